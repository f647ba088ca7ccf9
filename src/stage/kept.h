/*
 * The steps that two ranks both keep, by number, and the position of each in one of the ranks.
 *
 * Each rank keeps its own share of a sequence's tokens. The pattern of steps that both keep repeats after a *period*, a
 * multiple of both ranks' periods. In our positions (plan/walk.h), these steps are a few *stretches* of the period:
 *
 *   width 2, we are 0 of 2    |0 1 . . 4 5 . . 8 9 . .|      our positions    0 1 2 3 4 5
 *   width 3, they 0 of 2      |0 1 2 . . . 6 7 8 . . .|      both keep        x x . . x .
 *   both                       0 1             8              stretches        [0, 2), [4, 5) of 6
 *
 * If one side keeps all steps, there is one stretch; it is the whole period if the other side has all of our steps.
 * A division and a binary search find the i-th common step, and nothing here grows with the sequence.
 */
#ifndef KVF_STAGE_KEPT_H
#define KVF_STAGE_KEPT_H

#include "base/base.h"
#include "plan/walk.h"

/** The most turns of both ranks' shares in one period. */
#define KVF_KEPT_MAX_STRETCHES 4096u

/** Neighbouring positions of a period whose steps both ranks keep. */
typedef struct kvf_kept_stretch {
    uint64_t position; /* the first */
    uint64_t before;   /* common steps of the period before it */
} kvf_kept_stretch;

typedef struct kvf_kept {
    kvf_token_share own;       /* defaults filled in */
    uint64_t positions, steps; /* of a period: our positions, and those of them that both keep (may be 0) */
    kvf_kept_stretch *stretches;
    uint32_t count;
} kvf_kept;

/**
 * @param own, other       defaults filled in
 * @param tokens_per_step  of the group, for messages
 * @return KVF_OK, KVF_E_LIMIT (the period has too many turns), KVF_E_NOMEM
 */
kvf_status kvf_kept_make(kvf_token_share own, kvf_token_share other, uint32_t tokens_per_step, kvf_kept *out);

/** A zeroed one is accepted. */
void kvf_kept_free(kvf_kept *kept);

/** How many common steps lie at positions before this one. */
uint64_t kvf_kept_before(const kvf_kept *kept, uint64_t position);

/** How many common steps of the sequence come before `step`. */
static inline uint64_t kvf_kept_number(const kvf_kept *kept, uint64_t step) {
    const kvf_walk_side side = {1, kept->own};
    return kvf_kept_before(kept, kvf_walk_position(&side, step));
}

/** The position of a common step. */
typedef struct kvf_kept_place {
    uint64_t position;
    uint64_t steps; /* common steps from there on at neighbouring positions; UINT64_MAX: all that follow */
} kvf_kept_place;

/** The position of the i-th common step of the sequence. There must be common steps. */
kvf_kept_place kvf_kept_find(const kvf_kept *kept, uint64_t i);

/**
 * Counts, among `steps` common steps from the `first` on, those at a position that is a multiple of `tokens` whose
 * predecessor is at the position before. With `tokens` 1: those that follow their predecessor without a gap.
 */
uint64_t kvf_kept_edges(const kvf_kept *kept, uint64_t first, uint64_t steps, uint64_t tokens);

/** The step at a position. */
static inline uint64_t kvf_kept_step(const kvf_kept *kept, uint64_t position) {
    const kvf_token_share *own = &kept->own;
    return (position / own->width * own->count + own->index) * own->width + position % own->width;
}

#endif
