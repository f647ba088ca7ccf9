/*
 * Visiting all entries of a list that peers can make long, some of them in each round.
 *
 * An entry that was visited moves to the list's end and is marked with the number of the pass; the pass is over when
 * the first entry has the mark. Code that needs an earlier pass lowers `due`.
 */
#ifndef KVF_AGENT_SWEEP_H
#define KVF_AGENT_SWEEP_H

#include "base/base.h"

/* The most entries that are visited in a round. */
#define KVF_SWEPT_AT_ONCE 256u

typedef struct kvf_sweep {
    uint64_t due;     /* when a pass is to begin */
    uint64_t soonest; /* the earliest due time of entries that the pass has visited */
    uint32_t pass;
    bool under_way;
} kvf_sweep;

/** Marks the first entry of a list with a pass, moves it to the end and visits it, which may free it; false: the list
 * is empty, or its first entry has that mark. */
typedef bool (*kvf_sweep_first)(kvf_agent *agent, uint32_t pass, uint64_t now);

static inline void kvf_sweep_due(kvf_sweep *sweep, uint64_t when) {
    sweep->due = kvf_min_u64(sweep->due, when);
}

/** Notes the due time of an entry that the pass visits. */
static inline void kvf_sweep_found(kvf_sweep *sweep, uint64_t when) {
    sweep->soonest = kvf_min_u64(sweep->soonest, when);
}

/** One round: begins a pass if it is due, and goes on with a pass that is under way. */
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

/** When the next round is due; 0: now. */
static inline uint64_t kvf_sweep_next(const kvf_sweep *sweep) {
    return sweep->under_way ? 0 : sweep->due;
}

#endif
