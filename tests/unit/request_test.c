/*
 * Requests: block tables and token ranges of both sides, the runs that they give, and what is refused. runs_test.c
 * tests how runs merge and how cursors go through them.
 */
#include "shapes.h"

/*
 * Most tests have one part of 8 bytes a token in one layer. Local blocks of 4 tokens are pages of 32 bytes, remote
 * blocks of 6 tokens are pages of 48; either cache has 8 blocks.
 */
#define BLOCKS(tokens, ...)                                                                                  \
    { .tokens_per_block = (tokens), .block_count = 8, __VA_ARGS__ }
#define FOURS ENGINE(.all = BLOCKS(4, .order = NULL))
#define SIXES ENGINE(.all = BLOCKS(6, .order = NULL))

static asked_request fours_from_sixes(kvf_group_desc group) {
    group.name = "mla";
    return asked_between(latent_of(1, group), FOURS, SIXES, 0);
}

static int set_up(void **state) {
    asked_request *a = malloc(sizeof *a);
    assert_non_null(a);
    *a = fours_from_sixes((kvf_group_desc){0});
    *state = a;
    return 0;
}

static int tear_down(void **state) {
    free_asked(*state);
    free(*state);
    return 0;
}

static void assert_steps(const asked_request *a, uint32_t group, uint64_t begin, uint64_t end) {
    uint64_t got_begin = 7, got_end = 7;
    kvf_request_steps(a->request, group, &got_begin, &got_end);
    assert_int_equal(got_begin, begin);
    assert_int_equal(got_end, end);
}

static const kvf_block_table no_blocks = {NULL, 0, 0};

/* ---- tables that end with a sequence --------------------------------------------------------- */

static void a_tail_lists_the_last_blocks_of_a_sequence(void **state) {
    (void)state;
    const uint32_t ids[] = {1, 7};
    kvf_block_table table;

    /* 10 tokens fill 3 blocks of 4: the list begins with the second. */
    assert_ok(kvf_block_table_tail(ids, 2, 10, 4, &table));

    assert_ptr_equal(table.ids, ids);
    assert_int_equal(table.count, 2);
    assert_int_equal(table.first_block, 1);
}

static void a_tail_may_be_the_whole_sequence_or_nothing(void **state) {
    (void)state;
    const uint32_t ids[] = {3, 1};
    kvf_block_table table;

    assert_ok(kvf_block_table_tail(ids, 2, 8, 4, &table));
    assert_int_equal(table.first_block, 0);
    assert_ok(kvf_block_table_tail(NULL, 0, 8, 4, &table));
    assert_int_equal(table.first_block, 2);
    assert_int_equal(table.count, 0);
    assert_ok(kvf_block_table_tail(NULL, 0, 0, 4, &table));
    assert_int_equal(table.first_block, 0);
}

static void a_tail_longer_than_its_sequence_is_refused(void **state) {
    (void)state;
    const uint32_t ids[] = {0, 1, 2, 3};
    kvf_block_table table = {NULL, 99, 99};
    assert_fails(kvf_block_table_tail(ids, 4, 10, 4, &table), KVF_E_RANGE, "count is 4", "10 tokens",
                 "only 3 of 4");
    assert_int_equal(table.count, 99);
}

static void a_tail_of_more_blocks_than_numbers_is_refused(void **state) {
    (void)state;
    const uint32_t ids[] = {0};
    kvf_block_table table;
    assert_fails(kvf_block_table_tail(ids, 1, UINT64_MAX, 16, &table), KVF_E_RANGE,
                 "tokens is 18446744073709551615", "4294967295 blocks");
    assert_ok(kvf_block_table_tail(ids, 1, UINT64_C(0xffffffff) * 16, 16, &table));
    assert_int_equal(table.first_block, 0xfffffffe);
}

static void a_tail_without_a_list_or_a_block_size_is_refused(void **state) {
    (void)state;
    const uint32_t ids[] = {0};
    kvf_block_table table;
    assert_fails(kvf_block_table_tail(NULL, 1, 10, 4, &table), KVF_E_INVALID, "ids is NULL");
    assert_fails(kvf_block_table_tail(ids, 1, 10, 0, &table), KVF_E_INVALID, "tokens_per_block is 0");
    assert_fails(kvf_block_table_tail(ids, 1, 10, 4, NULL), KVF_E_INVALID, "out is NULL");
}

/* Two ranks take turns with the tokens: a block of 4 tokens on each of them holds 8 of the sequence. */
static void a_tail_counts_the_tokens_of_all_ranks_that_share_them(void **state) {
    (void)state;
    asked_request a = asked_between(
        latent(1), ENGINE(.all = {.tokens_per_block = 4, .block_count = 9}),
        ENGINE(.tp_size = 2, .dcp_size = 2, .all = {.tokens_per_block = 4, .block_count = 9}), 0);
    const uint32_t ids[] = {5, 2};
    kvf_block_table remote;

    assert_ok(kvf_block_table_tail(ids, 2, 12, 2 * 4, &remote));
    assert_int_equal(remote.first_block, 0);
    assert_ok(set_one(&a, TABLE(3, 1, 7), remote, 8, 12));

    /* Tokens 8 and 10 of rank 0, and 9 and 11 of rank 1, are the first two of block 2. */
    assert_runs(a.request, 0, {224, 64, 8, 0, 0}, {240, 72, 8, 0, 0});
    assert_runs(a.request, 1, {232, 64, 8, 0, 0}, {248, 72, 8, 0, 0});
    free_asked(&a);
}

/* ---- pairing by token ------------------------------------------------------------------------ */

static void blocks_of_4_and_6_are_paired_token_by_token(void **state) {
    asked_request *a = *state;
    /* 0..3 | 4 5 | 6 7 | 8 9. Local blocks begin at 96, 32, 224; remote ones at 240 and 96. */
    assert_ok(set_one(a, TABLE(3, 1, 7), TABLE(5, 2), 0, 10));
    assert_runs(a->request, 0, {96, 240, 32, 0, 0}, {32, 272, 16, 0, 0}, {48, 96, 16, 0, 0},
                {224, 112, 16, 0, 0});
    assert_steps(a, 0, 0, 10);
}

static void blocks_of_6_and_4_are_paired_token_by_token(void **state) {
    (void)state;
    asked_request a = asked_between(latent(1), SIXES, FOURS, 0);
    assert_ok(set_one(&a, TABLE(5, 2), TABLE(3, 1, 7), 0, 10));
    assert_runs(a.request, 0, {240, 96, 32, 0, 0}, {272, 32, 16, 0, 0}, {96, 48, 16, 0, 0},
                {112, 224, 16, 0, 0});
    free_asked(&a);
}

static void a_prefix_hit_inside_a_block_keeps_tokens_paired(void **state) {
    asked_request *a = *state;
    /* Tokens 0..4 are in the local cache already; the engine lists the blocks from token 4 on. */
    const uint32_t to_fill[] = {1, 7};
    kvf_block_table local;
    assert_ok(kvf_block_table_tail(to_fill, 2, 10, 4, &local));

    assert_ok(set_one(a, local, TABLE(5, 2), 5, 10));

    assert_runs(a->request, 0, {40, 280, 8, 0, 0}, {48, 96, 16, 0, 0}, {224, 112, 16, 0, 0});
    assert_steps(a, 0, 5, 10);
}

static void a_prefix_hit_on_a_local_boundary_may_begin_inside_a_remote_block(void **state) {
    asked_request *a = *state;
    assert_ok(set_one(a, TABLE_FROM(2, 7), TABLE_FROM(1, 2), 8, 10));
    assert_runs(a->request, 0, {224, 112, 16, 0, 0});
}

static void both_tables_may_be_tails(void **state) {
    asked_request *a = *state;
    assert_ok(set_one(a, TABLE_FROM(1, 1, 7), TABLE_FROM(1, 2), 6, 10));
    assert_runs(a->request, 0, {48, 96, 16, 0, 0}, {224, 112, 16, 0, 0});
}

static void tables_may_reach_beyond_what_is_wanted(void **state) {
    asked_request *a = *state;
    /* The tables have blocks for tokens yet to come; an id outside of the cache does no harm there. */
    assert_ok(set_one(a, TABLE(3, 1, 7, 99), TABLE(5, 2, 4, 99), 0, 4));
    assert_runs(a->request, 0, {96, 240, 32, 0, 0});
}

static void the_last_block_may_be_filled_in_part(void **state) {
    asked_request *a = *state;
    assert_ok(set_one(a, TABLE(3), TABLE(5), 0, 3));
    assert_runs(a->request, 0, {96, 240, 24, 0, 0});
}

static void a_block_may_serve_two_sequences(void **state) {
    asked_request *a = *state;
    /* The same block twice in a table: a shared prefix on the producer's side. */
    assert_ok(set_one(a, TABLE(0, 1, 2), TABLE(5, 5), 0, 12));
    assert_runs(a->request, 0, {0, 240, 48, 0, 0}, {48, 240, 48, 0, 0});
}

/* ---- logical and kernel blocks --------------------------------------------------------------- */

static void each_side_expands_its_blocks_with_its_own_ratio(void **state) {
    (void)state;
    /*
     * Kernel blocks of 2 tokens: 2 in a local block of 4, in pages of 24 bytes; 3 in a remote block of 6, in
     * pages of 32. Local block 3 is kernel blocks 6 and 7, remote block 5 is 15, 16 and 17.
     */
    asked_request a =
        asked_between(latent(1), ENGINE(.all = BLOCKS(4, .kernel_blocks_per_block = 2, .page_bytes = 24)),
                      ENGINE(.all = BLOCKS(6, .kernel_blocks_per_block = 3, .page_bytes = 32)), 0);

    assert_ok(set_one(&a, TABLE(3, 1, 7), TABLE(5, 2), 0, 10));

    assert_runs(a.request, 0, {144, 480, 16, 0, 0}, {168, 512, 16, 0, 0}, {48, 544, 16, 0, 0},
                {72, 192, 16, 0, 0}, {336, 224, 16, 0, 0});
    free_asked(&a);
}

static void one_side_may_have_kernel_blocks_and_the_other_none(void **state) {
    (void)state;
    /* Remote block 5 of 6 tokens is kernel blocks 10 and 11 of 3 tokens, in pages of 32 bytes. */
    asked_request a = asked_between(
        latent(1), FOURS, ENGINE(.all = BLOCKS(6, .kernel_blocks_per_block = 2, .page_bytes = 32)), 0);

    assert_ok(set_one(&a, TABLE(3, 1), TABLE(5), 0, 6));

    assert_runs(a.request, 0, {96, 320, 24, 0, 0}, {120, 352, 8, 0, 0}, {32, 360, 16, 0, 0});
    free_asked(&a);
}

static void the_kernel_blocks_of_a_block_are_neighbours(void **state) {
    (void)state;
    asked_request a = asked_between(latent(1), ENGINE(.all = BLOCKS(4, .kernel_blocks_per_block = 4)),
                                    ENGINE(.all = BLOCKS(4, .kernel_blocks_per_block = 2)), 0);
    assert_ok(set_one(&a, TABLE(3, 1), TABLE(5, 2), 0, 8));
    assert_runs(a.request, 0, {96, 160, 32, 0, 0}, {32, 64, 32, 0, 0});
    free_asked(&a);
}

/* ---- token shares ---------------------------------------------------------------------------- */

static void a_local_share_is_stored_densely(void **state) {
    (void)state;
    /* Local rank 1 of 2 keeps tokens 1 3 5 7 | 9: five tokens in two blocks. */
    asked_request a = asked_between(
        latent(1), ENGINE(.tp_size = 2, .dcp_size = 2, .all = BLOCKS(4, .order = NULL)), SIXES, 1);

    assert_ok(set_one(&a, TABLE(3, 1), TABLE(5, 2), 0, 10));

    assert_runs(a.request, 0, {96, 248, 8, 0, 0}, {104, 264, 8, 0, 0}, {112, 280, 8, 0, 0},
                {120, 104, 8, 0, 0}, {32, 120, 8, 0, 0});
    free_asked(&a);
}

static void each_remote_share_gives_its_own_tokens(void **state) {
    (void)state;
    /* Remote rank 1 of 2 keeps tokens 1 3 5 7 9 in one block of 6. */
    asked_request a = asked_between(latent(1), FOURS,
                                    ENGINE(.tp_size = 2, .dcp_size = 2, .all = BLOCKS(6, .order = NULL)), 0);

    assert_ok(set_one(&a, TABLE(3, 1, 7), TABLE(5), 0, 10));

    assert_runs(a.request, 0, {96, 240, 8, 0, 0}, {112, 248, 8, 0, 0}, {32, 256, 8, 0, 0}, {48, 264, 8, 0, 0},
                {224, 272, 8, 0, 0});
    assert_runs(a.request, 1, {104, 240, 8, 0, 0}, {120, 248, 8, 0, 0}, {40, 256, 8, 0, 0},
                {56, 264, 8, 0, 0}, {232, 272, 8, 0, 0});
    free_asked(&a);
}

static void a_table_of_a_share_need_only_reach_over_its_own_tokens(void **state) {
    (void)state;
    /* The local rank keeps five of ten tokens: a table of one block of 4 is too short by one token. */
    asked_request a = asked_between(
        latent(1), ENGINE(.tp_size = 2, .dcp_size = 2, .all = BLOCKS(4, .order = NULL)), SIXES, 1);
    assert_fails(set_one(&a, TABLE(3), TABLE(5, 2), 0, 10), KVF_E_RANGE, "local table", "step 9");
    assert_ok(set_one(&a, TABLE(3), TABLE(5, 2), 0, 9));
    free_asked(&a);
}

/* ---- windows and chunks ---------------------------------------------------------------------- */

static void tokens_before_the_window_are_left_out(void **state) {
    (void)state;
    /* Of 10 tokens, the last 4 are still needed: 6 7 | 8 9. The blocks before may be absent. */
    asked_request a = fours_from_sixes((kvf_group_desc){.window_tokens = 4});

    assert_ok(set_one(&a, TABLE(KVF_NO_BLOCK, 1, 7), TABLE(KVF_NO_BLOCK, 2), 0, 10));

    assert_runs(a.request, 0, {48, 96, 16, 0, 0}, {224, 112, 16, 0, 0});
    assert_steps(&a, 0, 6, 10);
    free_asked(&a);
}

static void tables_may_begin_with_the_window(void **state) {
    (void)state;
    asked_request a = fours_from_sixes((kvf_group_desc){.window_tokens = 4});
    assert_ok(set_one(&a, TABLE_FROM(1, 1, 7), TABLE_FROM(1, 2), 0, 10));
    assert_runs(a.request, 0, {48, 96, 16, 0, 0}, {224, 112, 16, 0, 0});
    free_asked(&a);
}

static void a_prefix_hit_inside_the_window_counts(void **state) {
    (void)state;
    asked_request a = fours_from_sixes((kvf_group_desc){.window_tokens = 4});
    assert_ok(set_one(&a, TABLE_FROM(2, 7), TABLE_FROM(1, 2), 9, 10));
    assert_steps(&a, 0, 9, 10);
    assert_runs(a.request, 0, {232, 120, 8, 0, 0});
    free_asked(&a);
}

static void a_window_longer_than_the_sequence_leaves_nothing_out(void **state) {
    (void)state;
    asked_request a = fours_from_sixes((kvf_group_desc){.window_tokens = 10});
    assert_ok(set_one(&a, TABLE(3, 1, 7), TABLE(5, 2), 0, 10));
    assert_steps(&a, 0, 0, 10);
    free_asked(&a);
}

static void tokens_before_the_chunk_are_left_out(void **state) {
    (void)state;
    /* Chunks of 8: the last token, 9, is in the chunk from 8 on. */
    asked_request a = fours_from_sixes((kvf_group_desc){.chunk_tokens = 8});
    assert_ok(set_one(&a, TABLE(KVF_NO_BLOCK, KVF_NO_BLOCK, 7), TABLE(KVF_NO_BLOCK, 2), 0, 10));
    assert_steps(&a, 0, 8, 10);
    assert_runs(a.request, 0, {224, 112, 16, 0, 0});
    free_asked(&a);
}

static void a_full_chunk_is_moved_whole(void **state) {
    (void)state;
    asked_request a = fours_from_sixes((kvf_group_desc){.chunk_tokens = 4});
    assert_ok(set_one(&a, TABLE(KVF_NO_BLOCK, 1), TABLE(5, 2), 0, 8));
    assert_steps(&a, 0, 4, 8);
    free_asked(&a);
}

/* ---- several groups -------------------------------------------------------------------------- */

/* Groups "a" and "b" of a layer each, 8 bytes a token; "b" has a window of 4 tokens. */
static kvf_model *two_latents(void) {
    static const uint32_t layers[] = {0, 1};
    kvf_part_desc part = PART(.name = "latent", .units = 1, .cell_elements = 4);
    kvf_group_desc groups[] = {
        {.name = "a", .layers = layers, .layer_count = 1, .parts = &part, .part_count = 1},
        {.name = "b",
         .window_tokens = 4,
         .layers = layers + 1,
         .layer_count = 1,
         .parts = &part,
         .part_count = 1}};
    return model_of(2, groups, 2);
}

static void a_fully_cached_group_beside_a_partly_cached_one_moves_nothing(void **state) {
    (void)state;
    asked_request a = asked_between(two_latents(), FOURS, SIXES, 0);
    const kvf_group_request groups[] = {{no_blocks, TABLE(5, 2), 10, 10},
                                        {TABLE_FROM(2, 7), TABLE_FROM(1, 2), 8, 10}};

    assert_ok(kvf_request_set(a.request, groups, 2));

    assert_steps(&a, 0, 10, 10);
    assert_steps(&a, 1, 8, 10);
    assert_runs(a.request, 0, {224, 112, 16, 1, 1});
    free_asked(&a);
}

static void each_group_has_its_own_tables_and_window(void **state) {
    (void)state;
    asked_request a = asked_between(two_latents(), FOURS, SIXES, 0);
    const kvf_group_request groups[] = {{TABLE(0, 1, 2), TABLE(0, 1), 0, 9},
                                        {TABLE_FROM(1, 4, 6), TABLE(KVF_NO_BLOCK, 3), 0, 10}};

    assert_ok(kvf_request_set(a.request, groups, 2));

    assert_steps(&a, 0, 0, 9);
    assert_steps(&a, 1, 6, 10);
    assert_runs(a.request, 0, {0, 0, 72, 0, 0}, {144, 144, 16, 1, 1}, {192, 160, 16, 1, 1});
    free_asked(&a);
}

static void a_state_is_copied_whole_where_attention_is_trimmed(void **state) {
    (void)state;
    /* Attention: one head, K and V of 8 bytes. State: pages of 112 bytes. */
    asked_request a =
        asked_between(hybrid(1), ENGINE(.all = BLOCKS(4, .order = "L|BNHP"), .state = {.order = "L|BTNPH"}),
                      ENGINE(.all = BLOCKS(6, .order = "L|BNHP"), .state = {.order = "L|BTNPH"}), 0);
    const kvf_group_request groups[] = {{TABLE_FROM(2, 7), TABLE(5, 2), 9, 10}, {TABLE(6), TABLE(4), 0, 1}};

    assert_ok(kvf_request_set(a.request, groups, 2));

    assert_runs(a.request, 0, {464, 240, 16, 0, 0}, {464, 240, 16, 1, 1}, {672, 448, 112, 2, 2},
                {672, 448, 112, 3, 3});
    free_asked(&a);
}

static void a_state_moves_where_attention_is_cached_entirely(void **state) {
    (void)state;
    asked_request a = asked_between(hybrid(1), ENGINE(.all = BLOCKS(4, .order = NULL)), FOURS, 0);
    const kvf_group_request groups[] = {{no_blocks, no_blocks, 100, 100}, {TABLE(0), TABLE(0), 0, 1}};
    assert_ok(kvf_request_set(a.request, groups, 2));
    assert_int_equal(kvf_request_bytes(a.request, 0), 224);
    free_asked(&a);
}

static void the_states_of_checkpoints_are_copied_one_by_one(void **state) {
    (void)state;
    asked_request a = asked_between(state_model(1), ENGINE(.all = {.block_count = 8}),
                                    ENGINE(.all = {.block_count = 8}), 0);
    /* States 1 and 2 of 3; the local cache has state 0 already. */
    assert_ok(set_one(&a, TABLE_FROM(1, 6, 2), TABLE(0, 3, 5), 1, 3));
    assert_runs(a.request, 0, {672, 336, 112, 0, 0}, {224, 560, 112, 0, 0});
    assert_steps(&a, 0, 1, 3);
    free_asked(&a);
}

/* ---- what a request moves -------------------------------------------------------------------- */

static void a_new_request_moves_nothing(void **state) {
    asked_request *a = *state;
    assert_ptr_equal(kvf_request_plan(a->request), a->plan);
    assert_no_runs(a->request, 0);
    assert_steps(a, 0, 0, 0);
}

static void nothing_wanted_needs_no_tables(void **state) {
    asked_request *a = *state;
    assert_ok(set_one(a, no_blocks, no_blocks, 0, 0));
    assert_no_runs(a->request, 0);
    assert_ok(set_one(a, no_blocks, TABLE(5, 2), 10, 10));
    assert_no_runs(a->request, 0);
    assert_steps(a, 0, 10, 10);
}

static void a_request_can_be_set_again(void **state) {
    asked_request *a = *state;
    assert_ok(set_one(a, TABLE(3, 1, 7), TABLE(5, 2), 0, 10));
    assert_ok(set_one(a, TABLE(0), TABLE(0), 1, 3));
    assert_runs(a->request, 0, {8, 8, 16, 0, 0});
    assert_ok(set_one(a, TABLE(3, 1, 7), TABLE(5, 2), 8, 10));
    assert_runs(a->request, 0, {224, 112, 16, 0, 0});
    assert_steps(a, 0, 8, 10);
}

static void a_source_that_does_not_exist_moves_nothing(void **state) {
    asked_request *a = *state;
    assert_ok(set_one(a, TABLE(3), TABLE(5), 0, 4));
    assert_no_runs(a->request, 1);
    assert_no_runs(a->request, UINT32_MAX);
}

static void a_group_that_does_not_exist_has_no_steps(void **state) {
    asked_request *a = *state;
    assert_ok(set_one(a, TABLE(3), TABLE(5), 0, 4));
    assert_steps(a, 1, 0, 0);
}

/* ---- what is refused ------------------------------------------------------------------------- */

static void more_local_than_remote_tokens_fails_this_request_and_changes_nothing(void **state) {
    asked_request *a = *state;
    kvf_request *other = request_of(a->plan);
    kvf_group_request group = {TABLE(0), TABLE(0), 0, 4};
    assert_ok(kvf_request_set(other, &group, 1));
    assert_ok(set_one(a, TABLE(3), TABLE(5), 0, 4));

    /* 14 tokens, but the remote blocks end with token 11. */
    assert_fails(set_one(a, TABLE(3, 1, 7, 2), TABLE(5, 2), 0, 14), KVF_E_RANGE, "group mla", "remote table",
                 "step 12", "block 2");

    assert_runs(a->request, 0, {96, 240, 32, 0, 0});
    assert_steps(a, 0, 0, 4);
    assert_runs(other, 0, {0, 0, 32, 0, 0});
    kvf_request_free(other);
}

static void a_local_table_that_ends_too_early_is_refused(void **state) {
    asked_request *a = *state;
    assert_fails(set_one(a, TABLE(3, 1), TABLE(5, 2), 0, 10), KVF_E_RANGE, "group mla", "local table",
                 "step 8", "block 2");
}

static void a_table_that_begins_too_late_is_refused(void **state) {
    asked_request *a = *state;
    assert_fails(set_one(a, TABLE_FROM(1, 1, 7), TABLE(5, 2), 3, 10), KVF_E_RANGE, "local table", "step 3",
                 "block 0");
    assert_fails(set_one(a, TABLE(3, 1, 7), TABLE_FROM(1, 2), 5, 10), KVF_E_RANGE, "remote table", "step 5",
                 "block 0");
}

static void an_empty_table_is_called_empty(void **state) {
    asked_request *a = *state;
    assert_fails(set_one(a, no_blocks, TABLE(5, 2), 0, 10), KVF_E_RANGE, "local table", "step 0",
                 "the table has blocks [0, 0)");
    assert_fails(set_one(a, TABLE_FROM(1, 1, 7), TABLE(5, 2), 0, 10), KVF_E_RANGE,
                 "the table has blocks [1, 3)");
}

static void an_absent_block_that_is_wanted_is_refused(void **state) {
    asked_request *a = *state;
    assert_fails(set_one(a, TABLE(3, KVF_NO_BLOCK, 7), TABLE(5, 2), 0, 10), KVF_E_RANGE, "group mla",
                 "local table", "step 4", "entry 1 has no block");
    assert_fails(set_one(a, TABLE_FROM(1, 1, KVF_NO_BLOCK), TABLE(5, 2), 4, 10), KVF_E_RANGE, "local table",
                 "step 8", "entry 1 has no block");
    assert_fails(set_one(a, TABLE(3, 1, 7), TABLE(KVF_NO_BLOCK, 2), 0, 10), KVF_E_RANGE, "remote table",
                 "step 0", "entry 0 has no block");
}

static void a_block_beyond_the_cache_is_refused(void **state) {
    asked_request *a = *state;
    assert_fails(set_one(a, TABLE(3, 8, 7), TABLE(5, 2), 0, 10), KVF_E_RANGE, "group mla", "local table",
                 "block 8", "the cache has 8");
    assert_fails(set_one(a, TABLE(3, 1, 7), TABLE(5, 4000000000), 0, 10), KVF_E_RANGE, "remote table",
                 "block 4000000000", "the cache has 8");
}

static void a_fault_in_one_group_leaves_all_groups_as_they_were(void **state) {
    (void)state;
    asked_request a = asked_between(two_latents(), FOURS, SIXES, 0);
    const kvf_group_request good[] = {{TABLE(3), TABLE(5), 0, 4}, {TABLE(1), TABLE(2), 0, 2}};
    const kvf_group_request bad[] = {{TABLE(0), TABLE(0), 0, 1}, {TABLE(9), TABLE(2), 0, 2}};
    assert_ok(kvf_request_set(a.request, good, 2));

    assert_fails(kvf_request_set(a.request, bad, 2), KVF_E_RANGE, "group b", "local table", "block 9");

    assert_runs(a.request, 0, {96, 240, 32, 0, 0}, {32, 96, 16, 1, 1});
    assert_steps(&a, 0, 0, 4);
    assert_steps(&a, 1, 0, 2);
    free_asked(&a);
}

static void every_group_of_the_model_must_be_given(void **state) {
    asked_request *a = *state;
    const kvf_group_request groups[2] = {{no_blocks, no_blocks, 0, 0}, {no_blocks, no_blocks, 0, 0}};
    assert_fails(kvf_request_set(a->request, groups, 2), KVF_E_INVALID, "group_count is 2",
                 "the model has 1 groups");
    assert_fails(kvf_request_set(a->request, groups, 0), KVF_E_INVALID, "group_count is 0");
}

static void missing_arguments_are_named(void **state) {
    asked_request *a = *state;
    kvf_group_request group = {no_blocks, no_blocks, 0, 0};
    kvf_request *request = NULL;
    assert_fails(kvf_request_set(NULL, &group, 1), KVF_E_INVALID, "request is NULL");
    assert_fails(kvf_request_set(a->request, NULL, 1), KVF_E_INVALID, "groups is NULL");
    assert_fails(kvf_request_create(NULL, &request), KVF_E_INVALID, "plan is NULL");
    assert_fails(kvf_request_create(a->plan, NULL), KVF_E_INVALID, "out is NULL");
    assert_null(request);
    kvf_run_cursor cursor;
    assert_fails(kvf_run_cursor_start(&cursor, NULL, 0), KVF_E_INVALID, "request is NULL");
    assert_fails(kvf_run_cursor_start(NULL, a->request, 0), KVF_E_INVALID, "cursor is NULL");
    kvf_request_free(NULL);
}

static void a_range_must_not_end_before_it_begins(void **state) {
    asked_request *a = *state;
    assert_fails(set_one(a, TABLE(3, 1, 7), TABLE(5, 2), 10, 9), KVF_E_INVALID, "group mla", "begin is 10",
                 "end 9");
}

static void steps_near_the_end_of_numbers_are_refused(void **state) {
    asked_request *a = *state;
    assert_fails(set_one(a, TABLE(3), TABLE(5), UINT64_MAX - 1, UINT64_MAX), KVF_E_RANGE, "group mla",
                 "end is 18446744073709551615", "up to 4611686018427387903");
    /* The largest allowed number is far beyond any table. */
    assert_fails(set_one(a, TABLE(3), TABLE(5), UINT64_MAX / 4 - 1, UINT64_MAX / 4), KVF_E_RANGE,
                 "local table", "step 4611686018427387902");
}

/* If blocks have the same size on both sides, the request walks whole ones and the others apart. */
static void an_end_far_beyond_tables_with_the_same_blocks_is_refused_at_once(void **state) {
    (void)state;
    asked_request a = asked_between(latent_of(1, (kvf_group_desc){.name = "mla"}), FOURS, FOURS, 0);
    assert_fails(set_one(&a, TABLE(3, 1, 7), TABLE(5, 2, 0), 0, UINT64_MAX / 4), KVF_E_RANGE, "group mla",
                 "local table", "step 12 is in block 3", "[0, 3)");
    assert_fails(set_one(&a, TABLE(3, 1, 7), TABLE(5), 2, UINT64_MAX / 4), KVF_E_RANGE, "remote table",
                 "step 4");
    free_asked(&a);
}

static void a_table_without_its_list_is_refused(void **state) {
    asked_request *a = *state;
    kvf_block_table broken = {NULL, 2, 0};
    assert_fails(set_one(a, broken, TABLE(5, 2), 0, 4), KVF_E_INVALID, "group mla", "local table",
                 "ids is NULL");
    assert_fails(set_one(a, TABLE(3), broken, 0, 4), KVF_E_INVALID, "remote table", "ids is NULL");
}

static void a_table_that_begins_at_the_last_possible_block_is_read_without_overflow(void **state) {
    asked_request *a = *state;
    assert_fails(set_one(a, TABLE_FROM(UINT32_MAX, 3, 1), TABLE(5, 2), 0, 4), KVF_E_RANGE, "local table",
                 "step 0");
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void a_request_of_a_size_it_has_had_allocates_nothing(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    asked_request a = fours_from_sixes((kvf_group_desc){0});
    assert_ok(set_one(&a, TABLE(3, 1, 7), TABLE(5, 2), 0, 10));
    assert_ok(set_one(&a, TABLE(1, 3, 2), TABLE(0, 1), 0, 10));
    memory.calls = 0;

    assert_ok(set_one(&a, TABLE(0, 2, 4), TABLE(1, 3), 0, 10));
    assert_fails(set_one(&a, TABLE(0, 2, 4), TABLE(1, 99), 0, 10), KVF_E_RANGE, "block 99");
    assert_ok(set_one(&a, TABLE(5, 1, 7), TABLE(5, 2), 3, 9));
    assert_int_equal(kvf_request_run_count(a.request, 0), 4);

    assert_int_equal(memory.calls, 0);
    free_asked(&a);
    assert_int_equal(memory.live, 0);
}

static kvf_status make_request(void *subject) {
    kvf_request *request = NULL;
    kvf_status status = kvf_request_create(subject, &request);
    if (status)
        assert_null(request);
    kvf_group_request group = {TABLE(3, 1, 7), TABLE(5, 2), 0, 10};
    if (!status)
        status = kvf_request_set(request, &group, 1);
    kvf_request_free(request);
    return status;
}

static void a_request_survives_every_refused_allocation(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    asked_request a = fours_from_sixes((kvf_group_desc){0});

    survive_every_refusal(&memory, make_request, a.plan);

    free_asked(&a);
    assert_int_equal(memory.live, 0);
}

static void a_request_that_cannot_grow_is_as_it_was(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    asked_request a = fours_from_sixes((kvf_group_desc){0});
    uint32_t ids[100];
    for (uint32_t i = 0; i < COUNT_OF(ids); i++)
        ids[i] = i % 8;
    kvf_block_table table = {ids, COUNT_OF(ids), 0};
    assert_ok(set_one(&a, TABLE(3), TABLE(5), 0, 4));

    size_t refused = 0;
    for (size_t n = 1; n <= 3; n++) { /* about 130 pieces: the array begins small and doubles */
        memory.calls = 0;
        memory.fail_at = n;
        kvf_status status = set_one(&a, table, table, 0, 390);
        memory.fail_at = 0;
        if (status == KVF_OK)
            break;
        refused++;
        assert_int_equal(status, KVF_E_NOMEM);
        assert_runs(a.request, 0, {96, 240, 32, 0, 0});
        assert_steps(&a, 0, 0, 4);
    }

    assert_true(refused > 0);
    free_asked(&a);
    assert_int_equal(memory.live, 0);
}

#define REQUEST_TEST(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_tail_lists_the_last_blocks_of_a_sequence),
        cmocka_unit_test(a_tail_may_be_the_whole_sequence_or_nothing),
        cmocka_unit_test(a_tail_longer_than_its_sequence_is_refused),
        cmocka_unit_test(a_tail_of_more_blocks_than_numbers_is_refused),
        cmocka_unit_test(a_tail_without_a_list_or_a_block_size_is_refused),
        cmocka_unit_test(a_tail_counts_the_tokens_of_all_ranks_that_share_them),
        REQUEST_TEST(blocks_of_4_and_6_are_paired_token_by_token),
        cmocka_unit_test(blocks_of_6_and_4_are_paired_token_by_token),
        REQUEST_TEST(a_prefix_hit_inside_a_block_keeps_tokens_paired),
        REQUEST_TEST(a_prefix_hit_on_a_local_boundary_may_begin_inside_a_remote_block),
        REQUEST_TEST(both_tables_may_be_tails),
        REQUEST_TEST(tables_may_reach_beyond_what_is_wanted),
        REQUEST_TEST(the_last_block_may_be_filled_in_part),
        REQUEST_TEST(a_block_may_serve_two_sequences),
        cmocka_unit_test(each_side_expands_its_blocks_with_its_own_ratio),
        cmocka_unit_test(one_side_may_have_kernel_blocks_and_the_other_none),
        cmocka_unit_test(the_kernel_blocks_of_a_block_are_neighbours),
        cmocka_unit_test(a_local_share_is_stored_densely),
        cmocka_unit_test(each_remote_share_gives_its_own_tokens),
        cmocka_unit_test(a_table_of_a_share_need_only_reach_over_its_own_tokens),
        cmocka_unit_test(tokens_before_the_window_are_left_out),
        cmocka_unit_test(tables_may_begin_with_the_window),
        cmocka_unit_test(a_prefix_hit_inside_the_window_counts),
        cmocka_unit_test(a_window_longer_than_the_sequence_leaves_nothing_out),
        cmocka_unit_test(tokens_before_the_chunk_are_left_out),
        cmocka_unit_test(a_full_chunk_is_moved_whole),
        cmocka_unit_test(a_fully_cached_group_beside_a_partly_cached_one_moves_nothing),
        cmocka_unit_test(each_group_has_its_own_tables_and_window),
        cmocka_unit_test(a_state_is_copied_whole_where_attention_is_trimmed),
        cmocka_unit_test(a_state_moves_where_attention_is_cached_entirely),
        cmocka_unit_test(the_states_of_checkpoints_are_copied_one_by_one),
        REQUEST_TEST(a_new_request_moves_nothing),
        REQUEST_TEST(nothing_wanted_needs_no_tables),
        REQUEST_TEST(a_request_can_be_set_again),
        REQUEST_TEST(a_source_that_does_not_exist_moves_nothing),
        REQUEST_TEST(a_group_that_does_not_exist_has_no_steps),
        REQUEST_TEST(more_local_than_remote_tokens_fails_this_request_and_changes_nothing),
        REQUEST_TEST(a_local_table_that_ends_too_early_is_refused),
        REQUEST_TEST(a_table_that_begins_too_late_is_refused),
        REQUEST_TEST(an_empty_table_is_called_empty),
        REQUEST_TEST(an_absent_block_that_is_wanted_is_refused),
        REQUEST_TEST(a_block_beyond_the_cache_is_refused),
        cmocka_unit_test(a_fault_in_one_group_leaves_all_groups_as_they_were),
        REQUEST_TEST(every_group_of_the_model_must_be_given),
        REQUEST_TEST(missing_arguments_are_named),
        REQUEST_TEST(a_range_must_not_end_before_it_begins),
        REQUEST_TEST(steps_near_the_end_of_numbers_are_refused),
        cmocka_unit_test(an_end_far_beyond_tables_with_the_same_blocks_is_refused_at_once),
        REQUEST_TEST(a_table_without_its_list_is_refused),
        REQUEST_TEST(a_table_that_begins_at_the_last_possible_block_is_read_without_overflow),
        cmocka_unit_test_teardown(a_request_of_a_size_it_has_had_allocates_nothing, stop_counting_memory),
        cmocka_unit_test_teardown(a_request_survives_every_refused_allocation, stop_counting_memory),
        cmocka_unit_test_teardown(a_request_that_cannot_grow_is_as_it_was, stop_counting_memory),
    };
    return cmocka_run_group_tests_name("request", tests, NULL, NULL);
}
