/*
 * Runs and cursors: which runs merge and which do not, in which order runs come, that cursors may stop anywhere, and
 * the runs of a piece as one nest.
 */
#include <pthread.h>

#include "request/request.h"
#include "shapes.h"

/* Unless a test says otherwise: 8 bytes a cell, blocks of 4 tokens, 16 blocks in either cache. */
#define BLOCKS(axes)                                                                                         \
    { .tokens_per_block = 4, .block_count = 16, .order = (axes) }

/* TP 1 on both sides, in these orders. */
static asked_request move_between(kvf_model *model, const char *local, const char *remote) {
    return asked_between(model, ENGINE(.all = BLOCKS(local)), ENGINE(.all = BLOCKS(remote)), 0);
}

static void set(const asked_request *m, kvf_block_table local, kvf_block_table remote, uint64_t begin,
                uint64_t end) {
    assert_ok(set_one(m, local, remote, begin, end));
}

#define MOST_RUNS 4096

/* Takes all runs of a source, `capacity` at a time. */
static size_t take(const kvf_request *request, uint32_t source, size_t capacity, kvf_run *out) {
    kvf_run_cursor cursor;
    kvf_run_cursor_start(&cursor, request, source);
    size_t total = 0;
    for (;;) {
        assert_true(total + capacity <= 2 * MOST_RUNS);
        size_t n = kvf_run_cursor_next(&cursor, out + total, capacity);
        assert_true(n <= capacity);
        if (n == 0)
            break;
        total += n;
    }
    /* the cursor stays at the end */
    assert_int_equal(kvf_run_cursor_next(&cursor, out + total, capacity), 0);
    return total;
}

static void assert_capacity_does_not_matter(const kvf_request *request) {
    static kvf_run all[2 * MOST_RUNS], few[2 * MOST_RUNS];
    static const size_t capacities[] = {1, 2, 3, 5, 7, 64, 1000};
    uint32_t sources = kvf_plan_source_count(kvf_request_plan(request));
    for (uint32_t source = 0; source < sources; source++) {
        size_t count = take(request, source, MOST_RUNS, all);
        assert_int_equal(kvf_request_run_count(request, source), count);
        for (size_t i = 0; i < COUNT_OF(capacities); i++) {
            assert_int_equal(take(request, source, capacities[i], few), count);
            assert_true(same_runs(all, few, count));
        }
    }
}

/* ---- what merges ----------------------------------------------------------------------------- */

static void a_whole_contiguous_cache_is_one_run(void **state) {
    (void)state;
    static const char *const orders[] = {"LBPHN", "LBPNH", "LBHNP"};
    for (size_t i = 0; i < COUNT_OF(orders); i++) {
        /* 2 layers of 16 blocks of K and V of 2 heads: 16 * 128 bytes each. */
        asked_request m = move_between(attention(2, 2, 4), orders[i], orders[i]);
        const kvf_block_table all = TABLE(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        set(&m, all, all, 0, 64);
        assert_runs(m.request, 0, {0, 0, 4096, 0, 0});
        free_asked(&m);
    }
}

static void neighbouring_blocks_with_all_layers_in_a_row_are_one_run(void **state) {
    (void)state;
    static const char *const orders[] = {"BLHNP", "BLPHN", "BLPNH", "BNLPH", "BPLHN"};
    for (size_t i = 0; i < COUNT_OF(orders); i++) {
        asked_request m = move_between(attention(2, 2, 4), orders[i], orders[i]);
        set(&m, TABLE(4, 5, 6), TABLE(7, 8, 9), 0, 12);
        assert_runs(m.request, 0, {1024, 1792, 768, 0, 0});
        free_asked(&m);
    }
}

static void neighbouring_blocks_are_one_run_in_each_layer(void **state) {
    (void)state;
    asked_request m = move_between(attention(2, 2, 4), "L|BPHN", "L|BPHN");
    set(&m, TABLE(4, 5, 6), TABLE(7, 8, 9), 0, 12);
    assert_runs(m.request, 0, {512, 896, 384, 0, 0}, {512, 896, 384, 1, 1});
    free_asked(&m);
}

static void the_layers_of_a_block_merge_where_blocks_are_scattered(void **state) {
    (void)state;
    asked_request m = move_between(latent(3), "BLHNP", "BLHNP");
    set(&m, TABLE(0, 2), TABLE(5, 3), 0, 8);
    assert_runs(m.request, 0, {0, 480, 96, 0, 0}, {192, 288, 96, 0, 0});
    free_asked(&m);
}

static void the_parts_of_a_block_merge_where_blocks_are_scattered(void **state) {
    (void)state;
    asked_request m = move_between(attention(1, 2, 4), "L|BPHN", "L|BPHN");
    set(&m, TABLE(0, 2), TABLE(5, 3), 0, 8);
    assert_runs(m.request, 0, {0, 640, 128, 0, 0}, {256, 384, 128, 0, 0});
    free_asked(&m);
}

static void blocks_of_different_sizes_merge_where_both_sides_go_on(void **state) {
    (void)state;
    asked_request m = asked_between(latent(1), ENGINE(.all = BLOCKS(NULL)),
                                    ENGINE(.all = {.tokens_per_block = 6, .block_count = 16}), 0);
    set(&m, TABLE(3, 4, 9), TABLE(5, 6), 0, 10);
    assert_runs(m.request, 0, {96, 240, 64, 0, 0}, {288, 304, 16, 0, 0});
    free_asked(&m);
}

/* ---- what does not --------------------------------------------------------------------------- */

static void blocks_that_are_neighbours_on_one_side_only_stay_apart(void **state) {
    (void)state;
    asked_request m = move_between(latent(1), NULL, NULL);
    set(&m, TABLE(4, 5), TABLE(7, 9), 0, 8);
    assert_runs(m.request, 0, {128, 224, 32, 0, 0}, {160, 288, 32, 0, 0});
    set(&m, TABLE(4, 6), TABLE(7, 8), 0, 8);
    assert_runs(m.request, 0, {128, 224, 32, 0, 0}, {192, 256, 32, 0, 0});
    free_asked(&m);
}

static void blocks_in_descending_order_stay_apart(void **state) {
    (void)state;
    asked_request m = move_between(latent(1), NULL, NULL);
    set(&m, TABLE(5, 4), TABLE(8, 7), 0, 8);
    assert_runs(m.request, 0, {160, 256, 32, 0, 0}, {128, 224, 32, 0, 0});
    free_asked(&m);
}

static void the_same_block_twice_is_two_runs(void **state) {
    (void)state;
    asked_request m = move_between(latent(1), NULL, NULL);
    set(&m, TABLE(4, 5), TABLE(7, 7), 0, 8);
    assert_runs(m.request, 0, {128, 224, 32, 0, 0}, {160, 224, 32, 0, 0});
    free_asked(&m);
}

static void padding_between_pages_keeps_blocks_apart(void **state) {
    (void)state;
    kvf_group_spec padded = BLOCKS(NULL);
    padded.page_bytes = 40;
    asked_request m = asked_between(latent(1), ENGINE(.all = padded), ENGINE(.all = BLOCKS(NULL)), 0);
    set(&m, TABLE(4, 5), TABLE(7, 8), 0, 8);
    assert_runs(m.request, 0, {160, 224, 32, 0, 0}, {200, 256, 32, 0, 0});
    free_asked(&m);
}

static void bytes_of_different_regions_never_merge(void **state) {
    (void)state;
    /* Two groups in regions 0 and 1: the second run begins at the offset where the first ends. */
    static const uint32_t layers[] = {0, 1};
    kvf_part_desc part = PART(.name = "latent", .units = 1, .cell_elements = 4);
    kvf_group_desc groups[] = {
        {.name = "a", .layers = layers, .layer_count = 1, .parts = &part, .part_count = 1},
        {.name = "b", .layers = layers + 1, .layer_count = 1, .parts = &part, .part_count = 1}};
    asked_request m = move_between(model_of(2, groups, 2), NULL, NULL);
    const kvf_group_request wanted[] = {{TABLE(0), TABLE(0), 0, 4}, {TABLE(1), TABLE(1), 0, 4}};

    assert_ok(kvf_request_set(m.request, wanted, 2));

    assert_runs(m.request, 0, {0, 0, 32, 0, 0}, {32, 32, 32, 1, 1});
    assert_capacity_does_not_matter(m.request);
    free_asked(&m);
}

/* ---- loops inside a block -------------------------------------------------------------------- */

static void part_of_a_block_is_a_run_for_each_head(void **state) {
    (void)state;
    asked_request m = move_between(attention(1, 2, 4), "L|BPHN", "L|BPHN");
    set(&m, TABLE(1), TABLE(2), 1, 3);
    assert_runs(m.request, 0, {136, 264, 16, 0, 0}, {168, 296, 16, 0, 0}, {200, 328, 16, 0, 0},
                {232, 360, 16, 0, 0});
    free_asked(&m);
}

static void whole_blocks_and_parts_of_blocks_go_together(void **state) {
    (void)state;
    asked_request m = move_between(attention(1, 2, 4), "L|BPHN", "L|BPHN");
    set(&m, TABLE(0, 2), TABLE(5, 3), 0, 6);
    assert_runs(m.request, 0, {256, 384, 16, 0, 0}, {288, 416, 16, 0, 0}, {320, 448, 16, 0, 0},
                {352, 480, 16, 0, 0}, {0, 640, 128, 0, 0});
    set(&m, TABLE(0, 2), TABLE(5, 3), 3, 8);
    assert_runs(m.request, 0, {24, 664, 8, 0, 0}, {56, 696, 8, 0, 0}, {88, 728, 8, 0, 0}, {120, 760, 8, 0, 0},
                {256, 384, 128, 0, 0});
    free_asked(&m);
}

static void tokens_of_several_rows_are_moved_with_all_of_them(void **state) {
    (void)state;
    /* A token has two rows of 8 bytes. Local: unit, row. Remote: row, unit: 16 bytes a row, 32 a token. */
    kvf_part_desc part = PART(.name = "x", .units = 2, .cell_elements = 4, .rows_per_step = 2);
    asked_request m = move_between(
        one_group(1, (kvf_group_desc){.name = "full", .parts = &part, .part_count = 1}), "L|BPHN", "L|BPNH");
    set(&m, TABLE(1), TABLE(2), 1, 2);
    assert_runs(m.request, 0, {144, 288, 8, 0, 0}, {152, 304, 8, 0, 0}, {208, 296, 8, 0, 0},
                {216, 312, 8, 0, 0});
    assert_capacity_does_not_matter(m.request);
    free_asked(&m);
}

static void a_transposition_is_a_run_for_each_cell_in_order_of_local_memory(void **state) {
    (void)state;
    /* Local: head before token. Remote: token before head, 16 bytes a token. */
    asked_request heads = move_between(attention(1, 2, 4), "L|BPHN", "L|BPNH");
    set(&heads, TABLE(0), TABLE(0), 0, 2);
    assert_runs(heads.request, 0, {0, 0, 8, 0, 0}, {8, 16, 8, 0, 0}, {32, 8, 8, 0, 0}, {40, 24, 8, 0, 0},
                {64, 64, 8, 0, 0}, {72, 80, 8, 0, 0}, {96, 72, 8, 0, 0}, {104, 88, 8, 0, 0});
    free_asked(&heads);
    /* And the other way round. */
    asked_request tokens = move_between(attention(1, 2, 4), "L|BPNH", "L|BPHN");
    set(&tokens, TABLE(0), TABLE(0), 0, 2);
    assert_runs(tokens.request, 0, {0, 0, 8, 0, 0}, {8, 32, 8, 0, 0}, {16, 8, 8, 0, 0}, {24, 40, 8, 0, 0},
                {64, 64, 8, 0, 0}, {72, 96, 8, 0, 0}, {80, 72, 8, 0, 0}, {88, 104, 8, 0, 0});
    free_asked(&tokens);
}

static void one_token_of_a_transposition_is_a_run_for_each_head(void **state) {
    (void)state;
    asked_request m = move_between(attention(1, 2, 4), "L|BPHN", "L|BPNH");
    set(&m, TABLE(0), TABLE(0), 3, 4);
    assert_runs(m.request, 0, {24, 48, 8, 0, 0}, {56, 56, 8, 0, 0}, {88, 112, 8, 0, 0}, {120, 120, 8, 0, 0});
    free_asked(&m);
}

static void k_and_v_side_by_side_here_and_apart_there_are_a_run_each(void **state) {
    (void)state;
    asked_request m = move_between(attention(1, 1, 4), "L|BHNP", "LP|BNH");
    set(&m, TABLE(1), TABLE(2), 0, 2);
    assert_runs(m.request, 0, {64, 64, 8, 0, 0}, {80, 72, 8, 0, 0}, {72, 64, 8, 0, 1}, {88, 72, 8, 0, 1});
    free_asked(&m);
}

static void the_last_run_of_a_block_merges_with_the_first_of_the_next(void **state) {
    (void)state;
    /*
     * Tokens 3 and 4 of blocks 0 and 1: a run for each head of K and V in either block, but V h1 t3 ends at
     * byte 128, where K h0 t4 begins.
     */
    asked_request m = move_between(attention(1, 2, 4), "L|BPHN", "L|BPHN");
    set(&m, TABLE(0, 1), TABLE(0, 1), 3, 5);
    assert_runs(m.request, 0, {24, 24, 8, 0, 0}, {56, 56, 8, 0, 0}, {88, 88, 8, 0, 0}, {120, 120, 16, 0, 0},
                {160, 160, 8, 0, 0}, {192, 192, 8, 0, 0}, {224, 224, 8, 0, 0});
    free_asked(&m);
}

static void a_state_split_by_channel_is_copied_step_by_step(void **state) {
    (void)state;
    /* Remote steps: | x0 x1 B0 C0 |, 8 bytes; local steps of 16; the states are blocks 1 and 2. */
    asked_request m = asked_between(state_model(1), ENGINE(.state = {.block_count = 4, .order = "L|BTNPH"}),
                                    ENGINE(.tp_size = 2, .state = {.block_count = 4, .order = "L|BTNPH"}), 0);
    set(&m, TABLE(1), TABLE(2), 0, 1);
    /* B and C, then x, then one head of ssm: pages of 112 and 56 bytes. */
    assert_runs(m.request, 1, {122, 116, 2, 0, 0}, {138, 124, 2, 0, 0}, {154, 132, 2, 0, 0},
                {126, 118, 2, 0, 0}, {142, 126, 2, 0, 0}, {158, 134, 2, 0, 0}, {116, 112, 4, 0, 0},
                {132, 120, 4, 0, 0}, {148, 128, 4, 0, 0}, {192, 136, 32, 0, 0});
    free_asked(&m);
}

/* ---- head slices ----------------------------------------------------------------------------- */

/* 8 KV heads of 128 elements, 2 layers, blocks of 16 tokens; TP 8 -> TP 4, 100 tokens in block order. */
static asked_request move_slices(const char *local, const char *remote) {
    asked_request m = asked_between(
        attention(2, 8, 128),
        ENGINE(.tp_size = 4, .all = {.tokens_per_block = 16, .block_count = 16, .order = local}),
        ENGINE(.tp_size = 8, .all = {.tokens_per_block = 16, .block_count = 16, .order = remote}), 0);
    set(&m, TABLE(0, 2, 4, 6, 8, 10, 12), TABLE(1, 3, 5, 7, 9, 11, 13), 0, 100);
    return m;
}

static void a_head_slice_between_token_major_caches_is_256_bytes_a_token(void **state) {
    (void)state;
    asked_request m = move_slices("L|BPNH", "L|BPNH");
    kvf_run runs[401];
    kvf_run_cursor cursor;
    kvf_run_cursor_start(&cursor, m.request, 1);

    assert_int_equal(kvf_request_run_count(m.request, 1), 100 * 2 * 2);
    assert_int_equal(kvf_request_bytes(m.request, 1), 100 * 2 * 2 * 256);
    assert_int_equal(kvf_run_cursor_next(&cursor, runs, COUNT_OF(runs)), 400);

    for (size_t i = 0; i < 400; i++)
        assert_int_equal(runs[i].bytes, 256);
    /* Head 1 of 2: at 256 in a token of 512. Remote block 1 begins at 2 * 16 * 256. The 4 tokens of the last
     * block come first, in 4 lanes: local block 12 begins at 12 * 4 * 16 * 256, remote block 13 at half
     * of 13. */
    assert_true(same_runs(&runs[0], &(kvf_run){196864, 106496, 256, 0, 0}, 1));
    assert_true(same_runs(&runs[16], &(kvf_run){256, 8192, 256, 0, 0}, 1));
    assert_true(same_runs(&runs[17], &(kvf_run){768, 8448, 256, 0, 0}, 1));
    free_asked(&m);
}

static void a_head_slice_into_a_head_major_cache_is_a_run_a_block(void **state) {
    (void)state;
    asked_request m = move_slices("L|BPHN", "L|BPNH");
    assert_int_equal(kvf_request_run_count(m.request, 1), 7 * 2 * 2);
    assert_int_equal(kvf_request_bytes(m.request, 1), 100 * 2 * 2 * 256);
    free_asked(&m);
}

/* ---- nests ----------------------------------------------------------------------------------- */

static void assert_nests(kvf_run_cursor *cursor, size_t capacity, kvf_run_shape shape, const kvf_run *wanted,
                         size_t count) {
    kvf_run got[8];
    kvf_run_shape got_shape;
    assert_int_equal(kvf_run_cursor_next_nests(cursor, got, capacity, &got_shape), count);
    assert_memory_equal(&got_shape, &shape, sizeof shape);
    assert_true(same_runs(got, wanted, count));
}

static void the_heads_of_a_page_are_a_nest_and_pages_of_one_length_come_together(void **state) {
    (void)state;
    /* Tokens 3 to 12: the last of block 0, and blocks 2 and 1 whole. Local: head before token, 32 bytes a head.
     * Remote: token before head, 16 bytes a token. K and V are nests of their own, page by page. */
    asked_request m = move_between(attention(1, 2, 4), "L|BPHN", "L|BPNH");
    kvf_run_shape shape;
    kvf_run_cursor cursor;
    set(&m, TABLE(0, 2, 1), TABLE(5, 3, 4), 3, 12);
    kvf_run_cursor_start(&cursor, m.request, 0);

    assert_nests(&cursor, 8, (kvf_run_shape){8, 1, 8, 16, 2, 32, 8},
                 (kvf_run[]){{24, 688, 16, 0, 0}, {88, 752, 16, 0, 0}}, 2);
    assert_nests(&cursor, 3, (kvf_run_shape){8, 2, 32, 8, 4, 8, 16},
                 (kvf_run[]){{256, 384, 64, 0, 0}, {320, 448, 64, 0, 0}, {128, 512, 64, 0, 0}}, 3);
    assert_nests(&cursor, 8, (kvf_run_shape){8, 2, 32, 8, 4, 8, 16}, &(kvf_run){192, 576, 64, 0, 0}, 1);
    assert_int_equal(kvf_run_cursor_next_nests(&cursor, &(kvf_run){0}, 1, &shape), 0);
    free_asked(&m);
}

static void a_nest_is_as_long_as_its_runs_and_reaches_to_the_end_of_the_last(void **state) {
    (void)state;
    kvf_nest_size size;
    /* 3 times 2 runs of 8 bytes: 2 * 100 + 1 * 16 + 8 here, 2 * 16 + 1 * 500 + 8 there. */
    assert_true(kvf_nest_measure(&(kvf_run_shape){8, 3, 100, 16, 2, 16, 500}, &size));
    assert_int_equal(size.bytes, 48);
    assert_int_equal(size.local, 224);
    assert_int_equal(size.remote, 540);
    /* The step of a loop of one is never made. */
    assert_true(kvf_nest_measure(&(kvf_run_shape){8, 1, UINT64_MAX, UINT64_MAX, 1, UINT64_MAX, 0}, &size));
    assert_int_equal(size.bytes, 8);
    assert_int_equal(size.local, 8);
    assert_int_equal(size.remote, 8);
}

static void nests_that_cannot_be_are_not_measured(void **state) {
    (void)state;
    const uint64_t half = UINT64_C(1) << 63, root = UINT64_C(1) << 32;
    const kvf_run_shape wrong[] = {
        {0, 1, 8, 8, 1, 8, 8},
        {8, 0, 8, 8, 1, 8, 8},
        {8, 1, 8, 8, 0, 8, 8},
        {1, root, 1, 1, root, 1, 1}, /* the number of runs */
        {root, root, 1, 1, 1, 0, 0}, /* their bytes */
        {8, 3, half + 8, 8, 1, 0, 0},
        {8, 3, 8, half + 8, 1, 0, 0},
        {8, 1, 0, 0, 3, half + 8, 8},
        {8, 1, 0, 0, 3, 8, half + 8}, /* a loop; modulo 2^64 it would fit */
        {8, 2, UINT64_MAX - 7, 8, 1, 0, 0},
        {8, 2, 8, UINT64_MAX - 7, 1, 0, 0},
        {8, 1, 0, 0, 2, UINT64_MAX - 7, 8},
        {8, 1, 0, 0, 2, 8, UINT64_MAX - 7}, /* a loop and the last run */
        {8, 2, half, 8, 2, half + 24, 16},
        {8, 2, 8, half, 2, 16, half + 24}, /* both loops, likewise */
        {8, 3, 7, 8, 1, 0, 0},
        {8, 3, 8, 7, 1, 0, 0},
        {8, 2, 16, 8, 2, 8, 8}, /* runs on each other */
    };
    kvf_nest_size size;
    for (size_t i = 0; i < COUNT_OF(wrong); i++)
        if (kvf_nest_measure(&wrong[i], &size))
            fail_msg("shape %zu was measured", i);
    /* The control: one byte less fits. */
    assert_true(kvf_nest_measure(&(kvf_run_shape){8, 2, UINT64_MAX - 8, UINT64_MAX - 8, 1, 0, 0}, &size));
    assert_true(size.local == UINT64_MAX && size.remote == UINT64_MAX);
}

/* ---- cursors --------------------------------------------------------------------------------- */

/*
 * Tokens 1 to 9 of 2 layers of K and V of 2 heads, between orders that cut every cell: 72 cells, and in the
 * one full block of each layer the last cell of K ends where the first of V begins.
 */
#define CELL_RUNS 70

static asked_request move_cells(void) {
    asked_request m = move_between(attention(2, 2, 4), "L|BPHN", "L|BPNH");
    set(&m, TABLE(3, 1, 7), TABLE(5, 2, 0), 1, 10);
    return m;
}

static void runs_are_the_same_however_many_fit_at_a_time(void **state) {
    (void)state;
    static const char *const orders[] = {"L|BPHN", "L|BPNH", "LP|BNH", "L|BHNP", "LBPHN", "BLHNP", "BNLPH"};
    /* Neighbours, gaps, and neighbours the other way round. */
    const kvf_block_table local = TABLE(0, 1, 2, 9, 8, 4), remote = TABLE(3, 4, 5, 6, 9, 8, 10, 11);
    for (size_t i = 0; i < COUNT_OF(orders) * COUNT_OF(orders); i++) {
        kvf_group_spec there = {.tokens_per_block = 3, .block_count = 16};
        there.order = orders[i / COUNT_OF(orders)];
        asked_request m =
            asked_between(attention(3, 4, 4), ENGINE(.all = BLOCKS(orders[i % COUNT_OF(orders)])),
                          ENGINE(.tp_size = 1 + (uint32_t)(i % 3), .all = there), 0);
        set(&m, local, remote, 0, 24);
        assert_capacity_does_not_matter(m.request);
        set(&m, local, remote, 5, 22);
        assert_capacity_does_not_matter(m.request);
        free_asked(&m);
    }
}

static void states_are_the_same_however_many_runs_fit_at_a_time(void **state) {
    (void)state;
    asked_request m = asked_between(state_model(2), ENGINE(.state = {.block_count = 4, .order = "L|BTNPH"}),
                                    ENGINE(.tp_size = 2, .state = {.block_count = 4, .order = "L|BTPHN"}), 0);
    set(&m, TABLE(1, 2), TABLE(2, 3), 0, 2);
    assert_capacity_does_not_matter(m.request);
    free_asked(&m);
}

static void a_copied_cursor_goes_on_from_the_same_place(void **state) {
    (void)state;
    asked_request m = move_cells();
    kvf_run all[256], rest[256];
    kvf_run_cursor cursor, remembered;
    kvf_run_cursor_start(&cursor, m.request, 0);
    size_t count = kvf_run_cursor_next(&cursor, all, COUNT_OF(all));
    assert_int_equal(count, CELL_RUNS);

    for (size_t place = 0; place <= count; place++) {
        kvf_run_cursor_start(&cursor, m.request, 0);
        if (place)
            assert_int_equal(kvf_run_cursor_next(&cursor, rest, place), place);
        remembered = cursor;
        (void)kvf_run_cursor_next(&cursor, rest, 7); /* using the cursor does not change its copy */
        assert_int_equal(kvf_run_cursor_next(&remembered, rest, COUNT_OF(rest)), count - place);
        assert_true(same_runs(rest, all + place, count - place));
    }
    free_asked(&m);
}

static void cursors_allocate_nothing(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    asked_request m = move_cells();
    memory.calls = 0;

    assert_int_equal(kvf_request_run_count(m.request, 0), CELL_RUNS);
    assert_int_equal(kvf_request_bytes(m.request, 0), 576);
    kvf_run_cursor cursor;
    kvf_run_cursor_start(&cursor, m.request, 0);
    for (kvf_run run; kvf_run_cursor_next(&cursor, &run, 1);)
        continue;

    assert_int_equal(memory.calls, 0);
    free_asked(&m);
    assert_int_equal(memory.live, 0);
}

static void *count_runs(void *request) {
    return (void *)(uintptr_t)kvf_request_run_count(request, 0);
}

static void threads_may_read_one_request_together(void **state) {
    (void)state;
    asked_request m = move_cells();
    pthread_t threads[4];
    for (size_t i = 0; i < COUNT_OF(threads); i++)
        assert_int_equal(pthread_create(&threads[i], NULL, count_runs, m.request), 0);
    for (size_t i = 0; i < COUNT_OF(threads); i++) {
        void *counted;
        assert_int_equal(pthread_join(threads[i], &counted), 0);
        assert_int_equal((uintptr_t)counted, CELL_RUNS);
    }
    free_asked(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_whole_contiguous_cache_is_one_run),
        cmocka_unit_test(neighbouring_blocks_with_all_layers_in_a_row_are_one_run),
        cmocka_unit_test(neighbouring_blocks_are_one_run_in_each_layer),
        cmocka_unit_test(the_layers_of_a_block_merge_where_blocks_are_scattered),
        cmocka_unit_test(the_parts_of_a_block_merge_where_blocks_are_scattered),
        cmocka_unit_test(blocks_of_different_sizes_merge_where_both_sides_go_on),
        cmocka_unit_test(blocks_that_are_neighbours_on_one_side_only_stay_apart),
        cmocka_unit_test(blocks_in_descending_order_stay_apart),
        cmocka_unit_test(the_same_block_twice_is_two_runs),
        cmocka_unit_test(padding_between_pages_keeps_blocks_apart),
        cmocka_unit_test(bytes_of_different_regions_never_merge),
        cmocka_unit_test(part_of_a_block_is_a_run_for_each_head),
        cmocka_unit_test(whole_blocks_and_parts_of_blocks_go_together),
        cmocka_unit_test(tokens_of_several_rows_are_moved_with_all_of_them),
        cmocka_unit_test(a_transposition_is_a_run_for_each_cell_in_order_of_local_memory),
        cmocka_unit_test(one_token_of_a_transposition_is_a_run_for_each_head),
        cmocka_unit_test(k_and_v_side_by_side_here_and_apart_there_are_a_run_each),
        cmocka_unit_test(the_last_run_of_a_block_merges_with_the_first_of_the_next),
        cmocka_unit_test(a_state_split_by_channel_is_copied_step_by_step),
        cmocka_unit_test(a_head_slice_between_token_major_caches_is_256_bytes_a_token),
        cmocka_unit_test(a_head_slice_into_a_head_major_cache_is_a_run_a_block),
        cmocka_unit_test(the_heads_of_a_page_are_a_nest_and_pages_of_one_length_come_together),
        cmocka_unit_test(a_nest_is_as_long_as_its_runs_and_reaches_to_the_end_of_the_last),
        cmocka_unit_test(nests_that_cannot_be_are_not_measured),
        cmocka_unit_test(runs_are_the_same_however_many_fit_at_a_time),
        cmocka_unit_test(states_are_the_same_however_many_runs_fit_at_a_time),
        cmocka_unit_test(a_copied_cursor_goes_on_from_the_same_place),
        cmocka_unit_test_teardown(cursors_allocate_nothing, stop_counting_memory),
        cmocka_unit_test(threads_may_read_one_request_together),
    };
    return cmocka_run_group_tests_name("runs", tests, NULL, NULL);
}
