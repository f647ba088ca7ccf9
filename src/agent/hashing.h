/*
 * Checksums of our own cells, computed in slices and without the agent's lock: of cells that we received, and for peers
 * that ask. A device hashes its own memory, one slice at a time, and a timer makes the agent look whether it has.
 *
 * Each owner has a queue, in the order in which its checksums were started. Every second slice is for ourselves, and
 * the peers' queues take turns for the others: a peer that asks for more waits longer.
 */
#ifndef KVF_AGENT_HASHING_H
#define KVF_AGENT_HASHING_H

#include "agent/agent.h"

/** A range of cells to hash. Its owner's struct begins with one, and sets all fields but those marked as kept here. */
struct kvf_hashing {
    kvf_agent *agent;
    kvf_hashing_queue *queue; /* of its owner; NULL: it is for ourselves */
    uint32_t group, part;
    kvf_range layers, units;
    uint64_t begin, end; /* steps */
    kvf_dtype dtype;     /* elements are hashed in this type; KVF_DTYPE_INVALID: in their own */
    /** Returns the blocks, before each slice; they must stay until the slice is over. NULL, with a failure recorded:
     * the blocks must not be read any more. */
    const kvf_block_table *(*table)(kvf_hashing *hashing);
    /** Called once, unless hashing was stopped. It is no longer listed then, and the sums are freed after the call. */
    void (*done)(kvf_hashing *hashing, kvf_status status);

    /* kept here */
    uint64_t *sums; /* by step; NULL before the first slice */
    const kvf_block_table *blocks;
    uint64_t step; /* where the next slice begins; layer and unit too, if slices are less than a step */
    uint32_t layer, unit;
    bool uses_device;         /* some of the memory is a device's */
    bool on_device;           /* a device computes a slice */
    kvf_hashing *prev, *next; /* queue->first */
};

/** Starts. Fails if group, part, layers or units do not exist; then done() is not called. */
kvf_status kvf_hashing_start(kvf_hashing *hashing);
/** Forgets one that was started and is not done. The caller has the work. */
void kvf_hashing_stop(kvf_hashing *hashing);

/* For the loop: one slice a round. */

/** Whether anything waits to be hashed, and for no device. */
bool kvf_hashing_waits(const kvf_agent *agent);
/** The next in turn, ready for a slice; NULL: none is ready now. */
kvf_hashing *kvf_hashing_next(kvf_agent *agent);
/** Hashes a slice. KVF_IN_PROGRESS: a device does. The caller has the work, but not the lock. */
kvf_status kvf_hashing_slice(kvf_hashing *hashing);
/** Records the slice's result. The caller has the lock again. */
void kvf_hashing_sliced(kvf_hashing *hashing, kvf_status status);

#endif
