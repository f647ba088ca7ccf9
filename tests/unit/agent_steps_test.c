/* Block tables that grow: merging two of them. */
#include "agent/steps.h"
#include "shapes.h"

#define NONE KVF_NO_BLOCK
#define NOTHING ((kvf_block_table){0})

/* Merges a table into the table of the second of two groups, and compares. */
static void check_merged(kvf_block_table first, kvf_block_table second, kvf_block_table wanted) {
    static const uint32_t other[] = {77};
    const kvf_group_steps groups[2] = {{{other, 1, 2}, 0, 5}, {first, 10, 20}};
    const kvf_block_table tables[2] = {{NULL, 0, 0}, second};
    kvf_group_steps *merged = NULL;
    assert_ok(kvf_steps_merge(groups, tables, 2, &merged));
    assert_int_equal(merged[0].table.count, 1);
    assert_int_equal(merged[0].table.first_block, 2);
    assert_int_equal(merged[0].table.ids[0], 77);
    assert_int_equal(merged[1].begin, 10);
    assert_int_equal(merged[1].end, 20);
    assert_int_equal(merged[1].table.first_block, wanted.first_block);
    assert_int_equal(merged[1].table.count, wanted.count);
    for (uint32_t i = 0; i < wanted.count; i++)
        assert_int_equal(merged[1].table.ids[i], wanted.ids[i]);
    kvf_free(merged);
}

#define AT(first, ...)                                                                                       \
    ((kvf_block_table){(const uint32_t[]){__VA_ARGS__},                                                      \
                       sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t), (first)})

static void tables_are_joined_wherever_they_lie(void **state) {
    (void)state;
    check_merged(AT(3, 30, 40), AT(5, 50), AT(3, 30, 40, 50));
    check_merged(AT(5, 50), AT(3, 30, 40), AT(3, 30, 40, 50));
    check_merged(AT(3, 30, 40), AT(4, 40, 50), AT(3, 30, 40, 50));
    check_merged(AT(3, 30, 40, 50, 60), AT(4, 40), AT(3, 30, 40, 50, 60));
    check_merged(AT(1, 10), AT(4, 40), AT(1, 10, NONE, NONE, 40));
    check_merged(AT(3, 30, 40), AT(2, 20), AT(2, 20, 30, 40));
    check_merged(AT(3, 30, NONE), AT(3, NONE, 40), AT(3, 30, 40));
}

/* A table has an entry for each block between two others, and 2^32 of them take 16 GiB. */
static void tables_that_lie_too_far_apart_are_refused(void **state) {
    (void)state;
    const uint32_t most = 1u << 22, near = 4 + most, far = near + 1;
    const kvf_group_steps groups[2] = {{AT(0, 1), 0, 5}, {AT(3, 30), 0, UINT64_MAX / 4}};
    kvf_block_table tables[2] = {NOTHING, AT(near, 50)};
    kvf_group_steps *merged = NULL;
    assert_ok(kvf_steps_merge(groups, tables, 2, &merged));
    assert_int_equal(merged[1].table.count, most + 2);
    assert_int_equal(merged[1].table.ids[most], NONE);
    assert_int_equal(merged[1].table.ids[most + 1], 50);
    kvf_free(merged);
    tables[1].first_block = far;
    assert_fails(kvf_steps_merge(groups, tables, 2, &merged), KVF_E_RANGE, "group 1", "[3, 4)",
                 "[4194309, 4194310)", "up to 4194304");
    tables[1].first_block = UINT32_MAX - 1;
    assert_fails(kvf_steps_merge(groups, tables, 2, &merged), KVF_E_RANGE, "group 1");
    tables[1].first_block = UINT32_MAX;
    assert_fails(kvf_steps_merge(groups, tables, 2, &merged), KVF_E_RANGE, "group 1", "ends at block");
}

/* The `first_block` of a table without entries has no meaning. */
static void a_table_without_entries_adds_nothing(void **state) {
    (void)state;
    check_merged((kvf_block_table){NULL, 0, 9}, AT(3, 30, 40), AT(3, 30, 40));
    check_merged(AT(3, 30, 40), (kvf_block_table){NULL, 0, 9}, AT(3, 30, 40));
    check_merged((kvf_block_table){NULL, 0, 9}, (kvf_block_table){NULL, 0, 4}, (kvf_block_table){NULL, 0, 4});
}

/* Blocks of 16 tokens; the table begins with block 3. */
static void the_entries_of_wanted_tokens_count_from_the_first_block_of_the_table(void **state) {
    (void)state;
    kvf_model *model = attention(2, 4, 8);
    kvf_engine *engine = engine_of(model, ENGINE(.all = {.tokens_per_block = 16, .block_count = 99}));
    const kvf_shard *shard = kvf_engine_shard(engine, 0);
    const struct {
        uint64_t begin, end;
        kvf_range wanted;
    } cases[] = {{64, 112, {1, 4}},  {65, 80, {1, 2}}, {48, 49, {0, 1}}, {16, 65, {0, 2}},
                 {100, 900, {3, 4}}, {0, 40, {0, 0}},  {60, 60, {0, 0}}};
    for (uint32_t i = 0; i < COUNT_OF(cases); i++) {
        const kvf_group_steps steps = {AT(3, 30, 40, 50, 60), cases[i].begin, cases[i].end};
        const kvf_range found = kvf_wanted_entries(shard, 0, &steps);
        assert_int_equal(found.begin, cases[i].wanted.begin);
        assert_int_equal(found.end, cases[i].wanted.end);
    }
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* Of 16 tokens each rank keeps 8. */
static void a_rank_that_keeps_none_of_the_wanted_tokens_needs_no_block(void **state) {
    (void)state;
    kvf_model *model = attention(2, 1, 8);
    kvf_engine *engine =
        engine_of(model, ENGINE(.tp_size = 2, .dcp_size = 2, .dcp_width = 8, .all = {.block_count = 99}));
    const kvf_group_steps steps = {AT(0, 10), 16, 24};
    const kvf_range by_first = kvf_wanted_entries(kvf_engine_shard(engine, 0), 0, &steps);
    const kvf_range by_second = kvf_wanted_entries(kvf_engine_shard(engine, 1), 0, &steps);
    assert_true(by_first.begin == 0 && by_first.end == 1);
    assert_true(by_second.begin == 0 && by_second.end == 0);
    const kvf_group_steps bare = {NOTHING, 16, 24};
    assert_fails(kvf_check_groups(kvf_engine_shard(engine, 0), &bare, 1, false), KVF_E_RANGE, "[0, 1)");
    assert_ok(kvf_check_groups(kvf_engine_shard(engine, 1), &bare, 1, false));
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void of_one_token_the_block_is_needed_and_of_none_no_block(void **state) {
    (void)state;
    kvf_model *model = attention(2, 4, 8);
    kvf_engine *engine = engine_of(model, ENGINE(.all = {.tokens_per_block = 16, .block_count = 99}));
    const kvf_shard *shard = kvf_engine_shard(engine, 0);
    const kvf_group_steps one = {AT(0, 10), 0, 1}, bare = {NOTHING, 0, 1}, none = {AT(5, 10), 7, 7};
    const kvf_range found = kvf_wanted_entries(shard, 0, &one);
    assert_true(found.begin == 0 && found.end == 1);
    assert_ok(kvf_check_groups(shard, &one, 1, false));
    assert_fails(kvf_check_groups(shard, &bare, 1, false), KVF_E_RANGE, "steps [0, 1)", "blocks [0, 1)");
    assert_ok(kvf_check_groups(shard, &none, 1, false));
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void a_missing_block_is_found_wherever_the_table_begins(void **state) {
    (void)state;
    kvf_model *model = attention(2, 4, 8);
    kvf_engine *engine = engine_of(model, ENGINE(.all = {.tokens_per_block = 16, .block_count = 99}));
    kvf_group_steps steps = {AT(3, 30, NONE, 50, 60, 70, 80, 90), 48, 96};
    steps.table.count = 3;
    assert_fails(kvf_check_groups(kvf_engine_shard(engine, 0), &steps, 1, false), KVF_E_RANGE, "group full",
                 "block 4 of the sequence is needed");
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void every_block_of_every_group_is_checked(void **state) {
    (void)state;
    kvf_model *model = hybrid(2);
    kvf_engine *engine = engine_of(model, ENGINE(.all = {.block_count = 9}, .state = {.block_count = 9}));
    const kvf_shard *shard = kvf_engine_shard(engine, 0);
    const char *names[] = {"group full", "group ssm"};
    for (uint32_t g = 0; g < 2; g++) {
        kvf_group_steps groups[2] = {{.begin = 0}};
        kvf_block_table tables[2] = {{0}};
        kvf_block_table taken[2];
        groups[g].table = tables[g] = AT(0, 1, 9);
        assert_fails(kvf_check_groups(shard, groups, 2, true), KVF_E_RANGE, names[g], "block 9");
        assert_fails(kvf_check_groups(shard, groups, 2, false), KVF_E_RANGE, names[g], "block 9");
        assert_fails(kvf_take_tables(shard, groups, tables, 2, taken), KVF_E_RANGE, names[g], "block 9");
        tables[g] = (kvf_block_table){NULL, 1, 0};
        assert_fails(kvf_take_tables(shard, groups, tables, 2, taken), KVF_E_INVALID, names[g], "NULL");
        groups[g] = (kvf_group_steps){AT(0, 1), 2, 1};
        assert_fails(kvf_check_groups(shard, groups, 2, false), KVF_E_INVALID, names[g], "begin is 2");
    }
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* Of tokens [0, 100) in two shares 32 wide, the first rank keeps 64, in four blocks, and the second 36. */
static void of_more_blocks_those_that_no_rank_needs_are_left_out(void **state) {
    (void)state;
    kvf_model *model = attention(2, 1, 8);
    kvf_engine *engine =
        engine_of(model, ENGINE(.tp_size = 2, .dcp_size = 2, .dcp_width = 32, .all = {.block_count = 99}));
    const struct {
        uint32_t rank, end, first_block, left;
    } cases[] = {{0, 100, 2, 2}, {1, 100, 2, 2}, {1, 100, 3, 1},          {0, 100, 4, 0}, {1, 100, 4, 0},
                 {0, 64, 1, 1},  {0, 65, 1, 2},  {0, 100, UINT32_MAX, 0}, {0, 0, 0, 0}};
    for (uint32_t i = 0; i < COUNT_OF(cases); i++) {
        const kvf_group_steps group = {NOTHING, 0, cases[i].end};
        const kvf_block_table table = AT(cases[i].first_block, 10, 20, 30, 40);
        kvf_block_table taken;
        assert_ok(kvf_take_tables(kvf_engine_shard(engine, cases[i].rank), &group, &table, 1, &taken));
        assert_int_equal(taken.count, cases[i].left);
        assert_int_equal(taken.first_block, cases[i].first_block);
        assert_ptr_equal(taken.ids, table.ids);
    }
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void a_request_is_empty_if_every_group_is(void **state) {
    (void)state;
    kvf_group_steps groups[3] = {{NOTHING, 0, 0}, {NOTHING, 7, 7}, {NOTHING, 9, 9}};
    assert_true(kvf_steps_empty(groups, 3));
    groups[2].end++;
    assert_false(kvf_steps_empty(groups, 3));
    assert_true(kvf_steps_empty(groups, 2));
}

static void tables_that_disagree_or_overflow_are_refused_by_name(void **state) {
    (void)state;
    check_merged(NOTHING, AT(UINT32_MAX - 1, 20), AT(UINT32_MAX - 1, 20)); /* the last place */
    kvf_group_steps *merged = NULL;
    kvf_group_steps group = {AT(3, 30, 40), 0, 9};
    kvf_block_table table = AT(4, 41);
    assert_fails(kvf_steps_merge(&group, &table, 1, &merged), KVF_E_INVALID, "group 0", "block 4", "40",
                 "41");
    group.table = AT(0, 10);
    table = AT(UINT32_MAX, 20);
    assert_fails(kvf_steps_merge(&group, &table, 1, &merged), KVF_E_RANGE, "4294967296");
    assert_null(merged);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_are_joined_wherever_they_lie),
        cmocka_unit_test(tables_that_lie_too_far_apart_are_refused),
        cmocka_unit_test(a_table_without_entries_adds_nothing),
        cmocka_unit_test(the_entries_of_wanted_tokens_count_from_the_first_block_of_the_table),
        cmocka_unit_test(a_rank_that_keeps_none_of_the_wanted_tokens_needs_no_block),
        cmocka_unit_test(of_one_token_the_block_is_needed_and_of_none_no_block),
        cmocka_unit_test(a_missing_block_is_found_wherever_the_table_begins),
        cmocka_unit_test(every_block_of_every_group_is_checked),
        cmocka_unit_test(of_more_blocks_those_that_no_rank_needs_are_left_out),
        cmocka_unit_test(a_request_is_empty_if_every_group_is),
        cmocka_unit_test(tables_that_disagree_or_overflow_are_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
