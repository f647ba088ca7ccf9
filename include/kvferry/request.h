/*
 * Which bytes move for one request: the copy runs that follow from the block tables of both sides and a token range.
 *
 * Both sides are paired by token position (by that of the entry, where several tokens share one), never by position in
 * a block list: a table says with which block of the sequence it begins. The token range is walked in pieces that end at
 * the block boundaries of either side, and each piece gives the longest runs that are contiguous on both sides. Runs
 * that touch are merged, across units, rows, blocks, parts and layers.
 *
 *    local blocks of 4    |0 1 2 3|4 5 6 7|8 9 . .|
 *    remote blocks of 6   |0 1 2 3 4 5|6 7 8 9 . .|
 *    pieces               |0 1 2 3|4 5|6 7|8 9|
 *
 * A request object is made once and set again for each request: in the steady state nothing is allocated. One
 * thread at a time may use it; cursors over it may be read from several threads while it is not being set.
 */
#ifndef KVFERRY_REQUEST_H
#define KVFERRY_REQUEST_H

#include <kvferry/plan.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The id of a request: any bytes. This struct stays as it is. */
typedef struct kvf_request_id {
    const void *data; /**< may be NULL where size is 0 */
    size_t size;
} kvf_request_id;

/** A table entry without memory behind it: a block before the sliding window. */
#define KVF_NO_BLOCK UINT32_MAX

/** The blocks of one sequence in one group on one side. This struct stays as it is. */
typedef struct kvf_block_table {
    const uint32_t *ids; /**< logical block ids, in sequence order; KVF_NO_BLOCK where there is none */
    uint32_t count;
    uint32_t first_block; /**< number of ids[0] in the sequence; earlier blocks are not in the table */
} kvf_block_table;

/**
 * Makes a table that ends where a sequence of `tokens` tokens ends, from the list that an engine gives when it has only
 * the blocks still to fill after a prefix hit, or only those inside a sliding window.
 *
 * @param tokens_per_block  of a logical block, on the side the table belongs to; where ranks share the tokens, times
 *                          their number (kvf_token_share.count): an id names a block on each of them
 * @return KVF_OK; KVF_E_RANGE when the list is longer than the sequence; KVF_E_INVALID
 */
KVF_API kvf_status kvf_block_table_tail(const uint32_t *ids, uint32_t count, uint64_t tokens,
                                        uint32_t tokens_per_block, kvf_block_table *out);

/**
 * The blocks of one sequence in one group on one side, and the steps that they hold or shall receive: tokens, entries of
 * several tokens, or states, see kvf_group_step_count(). This struct stays as it is.
 */
typedef struct kvf_group_steps {
    kvf_block_table table;
    uint64_t begin; /**< the first step */
    uint64_t end;   /**< one past the last; equal to `begin`: no steps */
} kvf_group_steps;

/**
 * One group of a request. Steps are tokens, entries of several tokens, or states: see kvf_group_step_count().
 *
 * `begin == end` moves nothing (everything is cached here already). kvf_request_set() leaves out steps before the
 * group's sliding window or attention chunk, so tables need no blocks for them. This struct stays as it is.
 */
typedef struct kvf_group_request {
    kvf_block_table local;
    kvf_block_table remote;
    uint64_t begin; /**< the first step wanted; earlier ones are here already */
    uint64_t end;   /**< one past the last */
} kvf_group_request;

typedef struct kvf_request kvf_request;

/**
 * Makes an empty request over a plan, which must outlive it.
 *
 * @param out  receives a request owned by the caller, see kvf_request_free()
 * @return KVF_OK, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_request_create(const kvf_plan *plan, kvf_request **out);

/** Frees a request; NULL is accepted. */
KVF_API void kvf_request_free(kvf_request *request);

KVF_API const kvf_plan *kvf_request_plan(const kvf_request *request);

/**
 * Sets what the request moves. The tables are read during the call only.
 *
 * @param groups       one for each group of the model
 * @param group_count  must be the model's
 * @return KVF_OK; KVF_E_RANGE (a block id beyond its cache, a table that does not reach over the wanted
 *         steps: the detail names group, side, token and block); KVF_E_INVALID; KVF_E_NOMEM. After an error
 *         the request is as it was before
 */
KVF_API kvf_status kvf_request_set(kvf_request *request, const kvf_group_request *groups,
                                   uint32_t group_count);

/** The steps of a group that the request moves, after clipping to the window. */
KVF_API void kvf_request_steps(const kvf_request *request, uint32_t group, uint64_t *begin, uint64_t *end);

/** Bytes that the request moves from one source (an index of the plan), with converted elements counted in the shorter
 * type; 0 when there is no such source. */
KVF_API uint64_t kvf_request_bytes(const kvf_request *request, uint32_t source);

/** Number of runs that the request has for one source, after merging; 0 where its plan converts. Walks them:
 * O(runs). */
KVF_API uint64_t kvf_request_run_count(const kvf_request *request, uint32_t source);

/**
 * A piece of memory that is contiguous on both sides. Offsets count from the start of the regions. This struct stays
 * as it is.
 */
typedef struct kvf_run {
    uint64_t local_offset;
    uint64_t remote_offset;
    uint64_t bytes;
    uint32_t local_region;
    uint32_t remote_region;
} kvf_run;

/** A place in the sequence of a source's runs. Plain memory: copy it to remember a place; nothing to free. */
typedef struct kvf_run_cursor {
    uint64_t opaque[8];
} kvf_run_cursor;

/**
 * Puts a cursor before the first run of a source; a source that does not exist has no runs.
 *
 * @return KVF_OK; KVF_E_UNSUPPORTED (the plan converts: the detail names the group and both types), and the cursor is
 *         at its end
 */
KVF_API kvf_status kvf_run_cursor_start(kvf_run_cursor *cursor, const kvf_request *request, uint32_t source);

/**
 * Gives the next runs.
 *
 * @param runs      receives up to `capacity` runs; capacity must be at least 1
 * @return how many; 0 at the end
 */
KVF_API size_t kvf_run_cursor_next(kvf_run_cursor *cursor, kvf_run *runs, size_t capacity);

#ifdef __cplusplus
}
#endif

#endif
