/*
 * Walks a range of steps (tokens, states) in pieces that are contiguous in one kernel block of either side.
 *
 * Positions: a side that keeps only a share of the tokens stores them densely, in order. Token t is at
 *
 *   position(t) = t / (width * count) * width + t % width        (t / width % count == index)
 *
 * and position p lies in kernel block p / kernel_steps, row p % kernel_steps. Everything here is arithmetic
 * on positions; block tables are looked up later.
 */
#ifndef KVF_PLAN_WALK_H
#define KVF_PLAN_WALK_H

#include <kvferry/shard.h>

#include "base/base.h"

/** One side of a walk. */
typedef struct kvf_walk_side {
    uint32_t kernel_steps; /* of a kernel block */
    kvf_token_share share; /* defaults filled in */
} kvf_walk_side;

typedef struct kvf_walk {
    kvf_walk_side local, remote;
    uint64_t at, end; /* the steps not yet walked */
} kvf_walk;

typedef struct kvf_walk_piece {
    uint64_t step;            /* the first */
    uint64_t local_position;  /* of the first step */
    uint64_t remote_position; /* of the first step */
    uint32_t steps;
} kvf_walk_piece;

/** The next piece of steps that both sides keep; false at the end. */
bool kvf_walk_next(kvf_walk *walk, kvf_walk_piece *piece);

/** The position of the first step at or after `step` that a side keeps. For the end of a range this is the number of
 * steps before it that the side keeps. */
uint64_t kvf_walk_position(const kvf_walk_side *side, uint64_t step);

/** Whether any token is kept by both shares. */
bool kvf_shares_meet(kvf_token_share a, kvf_token_share b);

#endif
