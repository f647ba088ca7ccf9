/*
 * The inside of a request: the pieces of each walk of its plan, with their block ids.
 */
#ifndef KVF_REQUEST_ROOM_H
#define KVF_REQUEST_ROOM_H

#include <kvferry/request.h>

#include "base/base.h"
#include "plan/plan.h"

/** Steps that are neighbours in one kernel block of either side. */
typedef struct kvf_piece {
    uint32_t local_block; /* kernel block ids */
    uint32_t remote_block;
    uint32_t local_step; /* of the first step, in its block */
    uint32_t remote_step;
    uint32_t steps;
} kvf_piece;

/** The pieces of one walk of the plan. */
typedef struct kvf_walk_pieces {
    kvf_piece *pieces;
    uint32_t count, capacity;
    uint64_t steps; /* of all pieces */
} kvf_walk_pieces;

struct kvf_request {
    const kvf_plan *plan;
    kvf_walk_pieces *walks;                /* by walk of the plan */
    kvf_walk_pieces *next;                 /* being filled; becomes `walks` on success */
    uint64_t *begin, *end;                 /* by group: the steps moved */
    kvf_group_request *asked, *asked_next; /* by group: what was set, with tables that the request owns */
    uint32_t *ids, *ids_next;              /* block ids of those tables */
    size_t id_capacity;                    /* of either */
};

/** What a request was set to, one for each group of the model; owned by the request. */
const kvf_group_request *kvf_request_groups(const kvf_request *request);

/** One side of a group of a request: its table and the sizes its blocks have there. */
typedef struct kvf_table_side {
    const char *name; /* for messages */
    const kvf_block_table *table;
    uint32_t kernel_tokens;
    uint32_t kernel_blocks_per_block;
    uint64_t block_count;
} kvf_table_side;

/**
 * Finds the kernel block of a position, see plan/walk.h. `step` is the step at that position, for messages.
 *
 * @return KVF_OK; KVF_E_RANGE if the table has no block for it, or one beyond the cache
 */
kvf_status kvf_table_look_up(const kvf_table_side *side, uint64_t position, uint64_t step,
                             uint32_t *kernel_block);

/** Checks a range of steps: KVF_OK, KVF_E_INVALID or KVF_E_RANGE. */
kvf_status kvf_check_steps(uint64_t begin, uint64_t end);

#endif
