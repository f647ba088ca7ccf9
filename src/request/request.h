/*
 * The inside of a request: the pieces of each walk of its plan, with their block ids.
 */
#ifndef KVF_REQUEST_ROOM_H
#define KVF_REQUEST_ROOM_H

#include <kvferry/request.h>

#include "base/base.h"
#include "plan/plan.h"

#define KVF_ID_TEXT_BYTES 64u

/** The id of a request for a message: its first bytes, with question marks for those that cannot be printed. */
void kvf_request_id_text(kvf_request_id id, char text[KVF_ID_TEXT_BYTES]);

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

/**
 * Gives the next *nests* of a cursor: the runs of one piece of a rule, in two loops, as one entry. Its offsets are those
 * of the first run, and its bytes those of all. For fabrics that take many runs at even distances at once. A cursor
 * gives either nests or runs; nests are not merged where they touch.
 *
 * @param nests     receives nests of one shape, as many as there are one after the other, up to `capacity`
 * @param shape     receives the shape, unless there is no nest
 * @return how many; 0 at the end
 */
size_t kvf_run_cursor_next_nests(kvf_run_cursor *cursor, kvf_run *nests, size_t capacity,
                                 kvf_run_shape *shape);

/** The same run, or nest, as the other side sees it. */
static inline kvf_run kvf_run_swapped(const kvf_run *run) {
    return (kvf_run){.local_offset = run->remote_offset,
                     .remote_offset = run->local_offset,
                     .bytes = run->bytes,
                     .local_region = run->remote_region,
                     .remote_region = run->local_region};
}

/** The shape of the same nests as the other side sees them. */
static inline kvf_run_shape kvf_run_shape_swapped(const kvf_run_shape *s) {
    return (kvf_run_shape){.bytes = s->bytes,
                           .outer_count = s->outer_count,
                           .outer_local = s->outer_remote,
                           .outer_remote = s->outer_local,
                           .inner_count = s->inner_count,
                           .inner_local = s->inner_remote,
                           .inner_remote = s->inner_local};
}

/** The bytes that a nest has, and the stretch in which they lie on each side. */
typedef struct kvf_nest_size {
    uint64_t bytes; /* of all runs */
    uint64_t local,
        remote; /* from the first byte of the first run to the last byte of the last, on each side */
} kvf_nest_size;

/** Measures nests of a shape, which may come from a peer. False: a number is 0 or too large, or runs lie on each other so
 * that the nest has more bytes than it occupies: a peer could otherwise ask for any work in a small region. */
bool kvf_nest_measure(const kvf_run_shape *shape, kvf_nest_size *out);

/** One side of a group of a request: its table and the sizes its blocks have there. */
typedef struct kvf_table_side {
    const char *name; /* for messages */
    const kvf_block_table *table;
    uint32_t kernel_steps;
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
