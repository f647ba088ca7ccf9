/*
 * Looking at all of a list that peers make long, some of it in each round.
 *
 * Who was looked at is put to the list's end and marked with the number of the pass; the pass is over when the first
 * has the mark. When something is wanted is said by lowering `due`.
 */
#ifndef KVF_AGENT_SWEEP_H
#define KVF_AGENT_SWEEP_H

#include "base/base.h"

/* So many are looked at in a round, at most. */
#define KVF_SWEPT_AT_ONCE 256u

typedef struct kvf_sweep {
    uint64_t due;     /* when a pass is to begin */
    uint64_t soonest; /* of those that the pass has looked at */
    uint32_t pass;
    bool under_way;
} kvf_sweep;

/** Marks the first of a list with a pass, puts it to the end and looks at it, which may free it; false: the list is
 * empty, or its first has that mark. */
typedef bool (*kvf_sweep_first)(kvf_agent *agent, uint32_t pass, uint64_t now);

static inline void kvf_sweep_due(kvf_sweep *sweep, uint64_t when) {
    sweep->due = kvf_min_u64(sweep->due, when);
}

/** Notes when one that the pass looks at wants something. */
static inline void kvf_sweep_found(kvf_sweep *sweep, uint64_t when) {
    sweep->soonest = kvf_min_u64(sweep->soonest, when);
}

/** A round of it: begins a pass where its time has come, and goes on with one that is under way. */
static inline void kvf_sweep_round(kvf_sweep *sweep, kvf_agent *agent, uint64_t now, kvf_sweep_first first) {
    if (!sweep->under_way && now < sweep->due)
        return;
    if (!sweep->under_way)
        *sweep = (kvf_sweep){UINT64_MAX, UINT64_MAX, sweep->pass + 1, true};
    for (uint32_t i = 0; i < KVF_SWEPT_AT_ONCE && sweep->under_way; i++)
        sweep->under_way = first(agent, sweep->pass, now);
    if (!sweep->under_way)
        kvf_sweep_due(sweep, sweep->soonest);
}

/** When it is to be looked at; 0: now. */
static inline uint64_t kvf_sweep_next(const kvf_sweep *sweep) {
    return sweep->under_way ? 0 : sweep->due;
}

#endif
