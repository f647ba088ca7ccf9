/*
 * Which ranks of which consumer engines are done with something.
 */
#ifndef KVF_AGENT_TALLY_H
#define KVF_AGENT_TALLY_H

#include "agent/agent.h"

/** Counts the ranks of a consumer engine that are done with something: they have it, or have given it up. */
typedef struct kvf_tally_engine {
    char *name;
    uint32_t expected_ranks;
    uint32_t count;
    /** Sorted by rank, of the ranks that have reported: the rank, and in the bits above it its kvf_tally_mark */
    uint32_t *said;
    uint32_t said_count, said_capacity;
    struct kvf_tally_engine *next;
} kvf_tally_engine;

/** The number of engines beyond `wanted` that may report. */
#define KVF_TALLY_STRANGERS 64u

typedef struct kvf_tally {
    kvf_tally_engine *engines;
    uint32_t engine_count;
    uint32_t wanted; /* engines */
    uint32_t done;   /* engines of which all ranks are done */
    uint64_t bytes;  /* of memory that it takes */
    uint64_t *kept;  /* also counts these bytes; NULL: none does */
} kvf_tally;

typedef enum kvf_tally_mark {
    KVF_TALLY_WAITS = 0,
    KVF_TALLY_HAS_IT,
    KVF_TALLY_GAVE_UP,
} kvf_tally_mark;

/** Counts a rank, once. KVF_E_NOMEM; KVF_E_MISMATCH (its siblings gave another expected_ranks); KVF_E_LIMIT (as many
 * engines as may report have done so). */
kvf_status kvf_tally_add(kvf_tally *tally, const char *name, uint32_t rank, uint32_t expected_ranks,
                         kvf_tally_mark mark);
kvf_tally_mark kvf_tally_of(const kvf_tally *tally, const char *name, uint32_t rank);
/** A rank that gave up tries again: it is no longer counted. */
void kvf_tally_take_back(kvf_tally *tally, const char *name, uint32_t rank);
bool kvf_tally_complete(const kvf_tally *tally);
/** The name of an engine with a rank that gave up; NULL: there is none. */
const char *kvf_tally_deserter(const kvf_tally *tally, uint32_t *rank);
void kvf_tally_free(kvf_tally *tally);

#endif
