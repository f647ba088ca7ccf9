/*
 * Checksums of our own cells, taken a slice at a time and without the agent's lock: of what we received, and for
 * peers that ask. Whoever wants some has a queue, in the order in which they were started. Every second slice is for
 * our own, and the queues of peers take turns with the others: who asks for much waits for it longer.
 */
#ifndef KVF_AGENT_HASHING_H
#define KVF_AGENT_HASHING_H

#include "agent/agent.h"

/** What is hashed. Its owner's struct begins with one, and sets all but what is marked as kept here. */
struct kvf_hashing {
    kvf_agent *agent;
    kvf_hashing_queue *queue; /* of its owner; NULL: it is for ourselves */
    uint32_t group, part;
    kvf_range layers, units;
    uint64_t begin, end; /* steps */
    kvf_dtype dtype;     /* in which elements are hashed; KVF_DTYPE_INVALID: in their own */
    /** The blocks, asked for before each slice; they stay until the slice is over. NULL, with a failure recorded:
     * they are not to be read any more. */
    const kvf_block_table *(*table)(kvf_hashing *hashing);
    /** Called once, unless it was stopped: it is listed no more then, and has no sums after the call. */
    void (*done)(kvf_hashing *hashing, kvf_status status);

    /* kept here */
    uint64_t *sums; /* by step; NULL before the first slice */
    const kvf_block_table *blocks;
    uint64_t step; /* where the next slice begins, and layer and unit where it is less than a step */
    uint32_t layer, unit;
    kvf_hashing *prev, *next; /* queue->first */
};

/** Starts. Fails where group, part, layers or units are not there: then done() is not called. */
kvf_status kvf_hashing_start(kvf_hashing *hashing);
/** Forgets one that was started and is not done. Needs the work. */
void kvf_hashing_stop(kvf_hashing *hashing);

/* For the loop: one slice a round. */

/** Whether anything is to be hashed. */
bool kvf_hashing_waits(const kvf_agent *agent);
/** The one whose turn it is, ready for a slice; NULL: none is, now. */
kvf_hashing *kvf_hashing_next(kvf_agent *agent);
/** Hashes a slice, with the work but without the lock. */
kvf_status kvf_hashing_slice(kvf_hashing *hashing);
/** Takes note of it, with the lock again. */
void kvf_hashing_sliced(kvf_hashing *hashing, kvf_status status);

#endif
