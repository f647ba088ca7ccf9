/*
 * Cells in pieces: moves between an engine that keeps its keys channel by channel, as vLLM does on CPUs, and engines
 * that keep them whole. The results are compared with an oracle that knows no plans; numbers of runs are worked out by
 * hand.
 */
#include "cells.h"
#include "channel_wise.h"

#define TOKENS 37u

static kvf_engine *head_wise(const kvf_model *model, uint32_t tp_size, uint32_t tokens, const char *order) {
    return engine_of(model,
                     ENGINE(.tp_size = tp_size,
                            .all = {.tokens_per_block = tokens, .block_count = BLOCKS, .order = order}));
}

/* ---- moving ---------------------------------------------------------------------------------- */

typedef struct ranks {
    cell_sequence sequence;
    cell_rank *all;
    uint32_t count;
} ranks;

static ranks open_ranks(const kvf_engine *engine, uint32_t seed) {
    ranks r = {.count = kvf_engine_rank_count(engine)};
    r.all = calloc(r.count, sizeof *r.all);
    assert_non_null(r.all);
    sequence_open(&r.sequence, kvf_engine_shard(engine, 0), TOKENS, seed);
    return r;
}

static void open_memory(ranks *r, const kvf_engine *engine) {
    for (uint32_t i = 0; i < r->count; i++)
        rank_open(&r->all[i], kvf_engine_shard(engine, i), &r->sequence, NULL, NULL);
}

static void close_ranks(ranks *r) {
    for (uint32_t i = 0; i < r->count; i++)
        rank_close(&r->all[i]);
    free(r->all);
    sequence_close(&r->sequence);
}

static void copy_runs(const kvf_request *request, const kvf_plan *plan, const cell_rank *to,
                      const ranks *from) {
    for (uint32_t s = 0; s < kvf_plan_source_count(plan); s++) {
        const cell_rank *source = &from->all[kvf_plan_source_rank(plan, s)];
        kvf_run_cursor cursor;
        kvf_run run;
        for (kvf_run_cursor_start(&cursor, request, s); kvf_run_cursor_next(&cursor, &run, 1);)
            memcpy((unsigned char *)to->regions[run.local_region].address + run.local_offset,
                   (unsigned char *)source->regions[run.remote_region].address + run.remote_offset,
                   run.bytes);
    }
}

/* Fills every rank of `to` from `from` and compares all of the rank's memory. */
static void move_and_compare(const kvf_engine *to, const kvf_engine *from) {
    ranks here = open_ranks(to, 1), there = open_ranks(from, 2);
    open_memory(&here, to);
    open_memory(&there, from);
    for (uint32_t i = 0; i < there.count; i++)
        rank_fill(&there.all[i], range(0, LAYERS), 7);
    for (uint32_t i = 0; i < here.count; i++) {
        cell_rank wanted;
        rank_copy(&wanted, &here.all[i]);
        rank_fill(&wanted, range(0, LAYERS), 7);
        kvf_plan *plan = NULL;
        assert_ok(kvf_plan_build(here.all[i].shard, from, NULL, &plan));
        assert_ok(kvf_plan_verify(plan));
        kvf_request *request = request_of(plan);
        set_sequences(request, &here.sequence, &there.sequence);
        copy_runs(request, plan, &here.all[i], &there);
        assert_same_memory(&here.all[i], &wanted);
        kvf_request_free(request);
        kvf_plan_free(plan);
        rank_close(&wanted);
    }
    close_ranks(&here);
    close_ranks(&there);
}

static void channel_wise_keys_and_whole_ones_fill_each_other(void **state) {
    (void)state;
    kvf_model *model = attention(LAYERS, HEADS, CHANNELS);
    const char *const orders[] = {"L|BPHN", "L|BPNH", "BLHNP"};
    for (uint32_t tp = 1; tp <= 2; tp++) {
        for (size_t i = 0; i < COUNT_OF(orders); i++) {
            kvf_engine *ours = channel_wise(model, tp, 8, CHANNELS, "channel-wise");
            kvf_engine *theirs = head_wise(model, 3 - tp, i ? 8 : 6, orders[i]);
            move_and_compare(ours, theirs);
            move_and_compare(theirs, ours);
            kvf_engine_free(ours);
            kvf_engine_free(theirs);
        }
    }
    kvf_model_free(model);
}

/* Cells of 1, 2, 4 and 8 pieces, in all pairs. */
static void any_numbers_of_pieces_fill_each_other(void **state) {
    (void)state;
    kvf_model *model = attention(LAYERS, HEADS, CHANNELS);
    for (uint32_t a = 1; a <= CHANNELS; a *= 2) {
        for (uint32_t b = 1; b <= CHANNELS; b *= 2) {
            kvf_engine *ours = channel_wise(model, 2, 8, a, "channel-wise"),
                       *theirs = channel_wise(model, 4, 5, b, "channel-wise");
            move_and_compare(ours, theirs);
            kvf_engine_free(ours);
            kvf_engine_free(theirs);
        }
    }
    kvf_model_free(model);
}

static uint64_t runs_of(const kvf_engine *to, const kvf_engine *from) {
    kvf_plan *plan = NULL;
    assert_ok(kvf_plan_build(kvf_engine_shard(to, 0), from, NULL, &plan));
    kvf_prediction p = {.struct_size = sizeof p};
    assert_ok(kvf_plan_predict(plan, 0, 32, &(kvf_cost_model){0}, &p));
    assert_int_equal(p.bytes, 32ull * LAYERS * HEADS * CHANNELS * 2 * 2);
    kvf_plan_free(plan);
    return p.runs;
}

/* 32 tokens are 4 blocks of 8. */
static void two_engines_that_cut_alike_exchange_whole_pages(void **state) {
    (void)state;
    kvf_model *model = attention(LAYERS, HEADS, CHANNELS);
    kvf_engine *one = channel_wise(model, 1, 8, CHANNELS, "channel-wise"),
               *other = channel_wise(model, 1, 8, CHANNELS, "channel-wise");
    assert_int_equal(runs_of(one, other), LAYERS * 4);
    kvf_engine_free(one);
    kvf_engine_free(other);
    kvf_model_free(model);
}

/* The values of a head are one run per block; each element of the keys is a run of its own. */
static void unlike_cuts_cost_a_run_for_each_grain(void **state) {
    (void)state;
    kvf_model *model = attention(LAYERS, HEADS, CHANNELS);
    kvf_engine *one = channel_wise(model, 1, 8, CHANNELS, "channel-wise"),
               *other = head_wise(model, 1, 8, "L|BPHN");
    assert_int_equal(runs_of(one, other), LAYERS * HEADS * (4 + 32 * CHANNELS));
    assert_int_equal(runs_of(other, one), LAYERS * HEADS * (4 + 32 * CHANNELS));
    kvf_engine_free(one);
    kvf_engine_free(other);
    kvf_model_free(model);
}

/* ---- what is refused ------------------------------------------------------------------------- */

/* One layer and one head, cells of eight elements of four or sixteen bits, four tokens and one block. */
static kvf_status try_cell(kvf_dtype dtype, uint64_t row, uint64_t piece, uint32_t pieces, uint64_t bytes) {
    kvf_part_desc part = {.name = "k", .dtype = dtype, .units = 1, .cell_elements = CHANNELS};
    kvf_model *model = one_group(1, (kvf_group_desc){.name = "full", .parts = &part, .part_count = 1});
    const kvf_placement place = {
        .block_stride = bytes, .row_stride = row, .piece_stride = piece, .pieces = pieces};
    const kvf_part_share share = {.units = {0, 1}};
    const kvf_group_shard_desc group = {
        .tokens_per_block = 4, .block_count = 1, .parts = &share, .placements = &place};
    const kvf_shard_desc desc = {.struct_size = sizeof desc,
                                 .layers = {0, 1},
                                 .region_bytes = &bytes,
                                 .region_count = 1,
                                 .groups = &group};
    kvf_shard *shard = NULL;
    kvf_status status = kvf_shard_create(model, &desc, &shard);
    kvf_shard_free(shard);
    kvf_model_free(model);
    return status;
}

static void pieces_must_divide_a_cell_into_whole_bytes(void **state) {
    (void)state;
    assert_ok(try_cell(KVF_DTYPE_BF16, 2, 8, 8, 64));
    assert_ok(try_cell(KVF_DTYPE_I4, 1, 4, 4, 16));
    assert_fails(try_cell(KVF_DTYPE_BF16, 2, 8, 3, 64), KVF_E_INVALID, "part k", "pieces is 3", "8 elements");
    assert_fails(try_cell(KVF_DTYPE_I4, 1, 4, 8, 16), KVF_E_INVALID, "pieces is 8", "whole bytes");
    assert_fails(try_cell(KVF_DTYPE_BF16, 2, 8, 16, 64), KVF_E_INVALID, "pieces is 16");
}

static void pieces_must_lie_in_the_region_and_apart(void **state) {
    (void)state;
    assert_fails(try_cell(KVF_DTYPE_BF16, 2, 8, 8, 63), KVF_E_RANGE, "ends at byte 64", "has 63");
    assert_fails(try_cell(KVF_DTYPE_BF16, 2, 7, 8, 64), KVF_E_OVERLAP, "7 (piece)");
    assert_fails(try_cell(KVF_DTYPE_BF16, 2, UINT64_MAX / 2, 8, 64), KVF_E_OVERFLOW, "(piece)");
    assert_ok(try_cell(KVF_DTYPE_BF16, 16, UINT64_MAX, 1, 64)); /* a stride that is never used */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(channel_wise_keys_and_whole_ones_fill_each_other),
        cmocka_unit_test(any_numbers_of_pieces_fill_each_other),
        cmocka_unit_test(two_engines_that_cut_alike_exchange_whole_pages),
        cmocka_unit_test(unlike_cuts_cost_a_run_for_each_grain),
        cmocka_unit_test(pieces_must_divide_a_cell_into_whole_bytes),
        cmocka_unit_test(pieces_must_lie_in_the_region_and_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
