/*
 * Which ranks of which consumer engines are done with something.
 */
#ifndef KVF_AGENT_TALLY_H
#define KVF_AGENT_TALLY_H

#include "agent/agent.h"

/** Counts the ranks of consumer engines that are done with something: that have it, or have given it up. */
typedef struct kvf_tally_engine {
    char *name;
    uint32_t expected_ranks;
    uint32_t count;
    uint32_t
        *said; /* by rank, of those that have said something: the rank, and above it its kvf_tally_mark */
    uint32_t said_count, said_capacity;
    struct kvf_tally_engine *next;
} kvf_tally_engine;

/** So many engines more than are wanted may say something. */
#define KVF_TALLY_STRANGERS 64u

typedef struct kvf_tally {
    kvf_tally_engine *engines;
    uint32_t engine_count;
    uint32_t wanted; /* engines */
    uint32_t done;   /* engines of which all ranks are done */
    uint64_t bytes;  /* of memory that it takes */
    uint64_t *kept;  /* where they are counted, too; NULL: nowhere */
} kvf_tally;

typedef enum kvf_tally_mark {
    KVF_TALLY_WAITS = 0,
    KVF_TALLY_HAS_IT,
    KVF_TALLY_GAVE_UP,
} kvf_tally_mark;

/** Counts one rank, once. KVF_E_NOMEM; KVF_E_MISMATCH (another `of` than its siblings said); KVF_E_LIMIT (as many
 * engines as may be have said something). */
kvf_status kvf_tally_add(kvf_tally *tally, const char *name, uint32_t rank, uint32_t expected_ranks,
                         kvf_tally_mark mark);
kvf_tally_mark kvf_tally_of(const kvf_tally *tally, const char *name, uint32_t rank);
/** A rank that gave up tries again: it is not counted any more. */
void kvf_tally_take_back(kvf_tally *tally, const char *name, uint32_t rank);
bool kvf_tally_complete(const kvf_tally *tally);
/** The name of an engine one of whose ranks gave up; NULL: there is none. */
const char *kvf_tally_deserter(const kvf_tally *tally, uint32_t *rank);
void kvf_tally_free(kvf_tally *tally);

#endif
