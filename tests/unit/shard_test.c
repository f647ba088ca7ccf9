/*
 * Shards from explicit placements: what is copied, what is read back, where cells lie, what is refused. overlap_test.c
 * tests cells that share bytes.
 */
#include "shapes.h"

/* ---- a shard to start from ------------------------------------------------------------------- */

/*
 * Two layers, each with a region of its own of 3 blocks of 2 tokens. A page has 64 bytes, head before token:
 *
 *   | K h0 t0 | K h0 t1 | K h1 t0 | K h1 t1 | V h0 t0 | ...     8 bytes each
 */
typedef struct sample {
    kvf_model *model;
    kvf_part_share parts[2];
    kvf_placement placements[4];
    uint64_t region_bytes[2];
    kvf_group_shard_desc group;
    kvf_shard_desc desc;
} sample;

static int set_up(void **state) {
    sample *s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->model = attention(2, 2, 4);
    for (uint32_t part = 0; part < 2; part++)
        s->parts[part].units = range(0, 2);
    for (uint32_t layer = 0; layer < 2; layer++) {
        s->region_bytes[layer] = 192;
        s->placements[2 * layer] = PLACED(layer, 0, 64, 8, 16);
        s->placements[2 * layer + 1] = PLACED(layer, 32, 64, 8, 16);
    }
    s->group = (kvf_group_shard_desc){
        .tokens_per_block = 2, .block_count = 3, .parts = s->parts, .placements = s->placements};
    s->desc = (kvf_shard_desc){.struct_size = sizeof s->desc,
                               .layers = {0, 2},
                               .region_bytes = s->region_bytes,
                               .region_count = 2,
                               .groups = &s->group};
    *state = s;
    return 0;
}

static int tear_down(void **state) {
    sample *s = *state;
    kvf_model_free(s->model);
    free(s);
    return 0;
}

static kvf_shard *made(const sample *s) {
    kvf_shard *shard = NULL;
    assert_ok(kvf_shard_create(s->model, &s->desc, &shard));
    return shard;
}

static kvf_status try_shard(const sample *s) {
    kvf_shard *shard = NULL;
    kvf_status status = kvf_shard_create(s->model, &s->desc, &shard);
    if (status)
        assert_null(shard);
    kvf_shard_free(shard);
    return status;
}

/* ---- what a shard keeps ---------------------------------------------------------------------- */

static void a_shard_is_a_copy_of_its_description_with_the_defaults_filled_in(void **state) {
    sample *s = *state;
    kvf_shard *shard = made(s);
    memset(s->parts, 0xff, sizeof s->parts);
    memset(s->placements, 0xff, sizeof s->placements);
    memset(s->region_bytes, 0xff, sizeof s->region_bytes);
    memset(&s->group, 0xff, sizeof s->group);

    const kvf_shard_desc *desc = kvf_shard_get(shard);
    assert_int_equal(desc->tp_size, 1);
    assert_int_equal(desc->pp_size, 1);
    assert_int_equal(desc->region_count, 2);
    assert_int_equal(desc->region_bytes[1], 192);
    assert_range(desc->layers, 0, 2);
    assert_int_equal(desc->groups[0].tokens_per_block, 2);
    assert_int_equal(desc->groups[0].kernel_blocks_per_block, 1);
    assert_int_equal(desc->groups[0].block_count, 3);
    assert_int_equal(desc->groups[0].tokens.index, 0);
    assert_int_equal(desc->groups[0].tokens.count, 1);
    assert_int_equal(desc->groups[0].tokens.width, 1);
    assert_range(desc->groups[0].parts[1].units, 0, 2);
    assert_int_equal(desc->groups[0].parts[1].replica, 0);
    assert_int_equal(desc->groups[0].parts[1].replica_count, 1);
    assert_placement(shard, 0, 1, 1, PLACED(1, 32, 64, 8, 16));
    kvf_shard_free(shard);
}

static void a_shard_keeps_what_its_rank_says_of_itself(void **state) {
    sample *s = *state;
    s->desc.rank = 5;
    s->desc.tp_rank = 1;
    s->desc.tp_size = 4;
    s->desc.pp_rank = 1;
    s->desc.pp_size = 2;
    s->group.tokens = (kvf_token_share){1, 2, 8};
    s->parts[0].replica = 2;
    s->parts[0].replica_count = 3;
    kvf_shard *shard = made(s);

    const kvf_shard_desc *desc = kvf_shard_get(shard);
    assert_int_equal(desc->rank, 5);
    assert_int_equal(desc->tp_rank, 1);
    assert_int_equal(desc->tp_size, 4);
    assert_int_equal(desc->pp_rank, 1);
    assert_int_equal(desc->pp_size, 2);
    assert_int_equal(desc->groups[0].tokens.index, 1);
    assert_int_equal(desc->groups[0].tokens.count, 2);
    assert_int_equal(desc->groups[0].tokens.width, 8);
    assert_int_equal(desc->groups[0].parts[0].replica, 2);
    assert_int_equal(desc->groups[0].parts[0].replica_count, 3);
    kvf_shard_free(shard);
}

static void a_shard_keeps_its_model_alive(void **state) {
    sample *s = *state;
    kvf_shard *shard = made(s);
    kvf_model_free(s->model);

    assert_string_equal(kvf_model_group(kvf_shard_model(shard), 0)->name, "full");
    s->model = NULL;
    kvf_shard_free(shard);
}

static void freeing_no_shard_is_fine(void **state) {
    (void)state;
    kvf_shard_free(NULL);
}

static void the_held_layers_of_a_group_are_indices_into_its_own_list(void **state) {
    (void)state;
    /* Model layers 1 and 2 of 4: "full" has layers 0 and 2, "ssm" has 1 and 3. */
    kvf_model *model = hybrid(2);
    uint32_t three_and_one[] = {1, 3};
    pair p = pair_of(model, ENGINE(.pp_size = 2, .pp_layers = three_and_one, .all = {.block_count = 1}),
                     ENGINE(.all = {.block_count = 1}));
    const kvf_shard *first = kvf_engine_shard(p.local, 0), *second = kvf_engine_shard(p.local, 1);

    assert_range(kvf_shard_group_layers(first, 0), 0, 1);
    assert_range(kvf_shard_group_layers(second, 0), 1, 2);
    assert_range(kvf_shard_group_layers(second, 1), 0, 2);
    kvf_range none = kvf_shard_group_layers(first, 1);
    assert_int_equal(none.begin, none.end);
    free_pair(&p);
}

static void a_group_that_does_not_exist_has_no_layers(void **state) {
    kvf_shard *shard = made(*state);
    assert_range(kvf_shard_group_layers(shard, 1), 0, 0);
    kvf_shard_free(shard);
}

static void there_is_a_placement_for_each_held_layer_and_part(void **state) {
    kvf_shard *shard = made(*state);
    assert_placement(shard, 0, 0, 0, PLACED(0, 0, 64, 8, 16));
    assert_placement(shard, 0, 0, 1, PLACED(0, 32, 64, 8, 16));
    assert_placement(shard, 0, 1, 0, PLACED(1, 0, 64, 8, 16));
    kvf_shard_free(shard);
}

static void there_is_no_placement_for_what_is_not_held(void **state) {
    sample *s = *state;
    s->desc.layers = range(1, 2);
    kvf_shard *shard = made(s); /* its only layer is at placements[0] */

    assert_null(kvf_shard_placement(shard, 0, 0, 0));
    assert_placement(shard, 0, 1, 0, PLACED(0, 0, 64, 8, 16));
    assert_null(kvf_shard_placement(shard, 0, 2, 0));
    assert_null(kvf_shard_placement(shard, 0, 1, 2));
    assert_null(kvf_shard_placement(shard, 1, 0, 0));
    kvf_shard_free(shard);
}

static void a_rank_may_hold_no_layers_and_no_memory(void **state) {
    sample *s = *state;
    s->desc.layers = range(2, 2);
    s->desc.region_count = 0;
    s->desc.region_bytes = NULL;
    s->group.placements = NULL;
    kvf_shard *shard = made(s);

    assert_null(kvf_shard_placement(shard, 0, 0, 0));
    kvf_shard_free(shard);
}

/* ---- where a cell is ------------------------------------------------------------------------- */

static void a_cell_is_found_by_block_row_and_unit(void **state) {
    kvf_shard *shard = made(*state);
    kvf_cell_location at = {.struct_size = sizeof at};

    assert_ok(kvf_shard_locate(shard, 0, 1, 1, 2, 1, 1, &at));

    assert_int_equal(at.region, 1);
    assert_int_equal(at.offset, 32 + 2 * 64 + 1 * 8 + 1 * 16); /* 184: the last cell of the region */
    assert_int_equal(at.bytes, 8);
    kvf_shard_free(shard);
}

static void units_are_counted_over_the_whole_model(void **state) {
    sample *s = *state;
    s->parts[0].units = s->parts[1].units = range(1, 2);
    kvf_shard *shard = made(s);
    kvf_cell_location at = {.struct_size = sizeof at};

    assert_ok(kvf_shard_locate(shard, 0, 0, 0, 0, 0, 1, &at));

    assert_int_equal(at.offset, 0);
    assert_fails(kvf_shard_locate(shard, 0, 0, 0, 0, 0, 0, &at), KVF_E_RANGE, "unit is 0", "[1, 2)");
    kvf_shard_free(shard);
}

static void a_logical_block_is_several_kernel_blocks(void **state) {
    sample *s = *state;
    /* 3 logical blocks of 4 tokens: 6 kernel blocks of 2 tokens, a page of 64 bytes each. */
    s->group.tokens_per_block = 4;
    s->group.kernel_blocks_per_block = 2;
    s->region_bytes[0] = s->region_bytes[1] = 384;
    kvf_shard *shard = made(s);
    kvf_cell_location at = {.struct_size = sizeof at};

    assert_ok(kvf_shard_locate(shard, 0, 0, 0, 1, 3, 0, &at));

    assert_int_equal(at.offset, 3 * 64 + 8); /* kernel block 1*2 + 1, its row 1 */
    assert_fails(kvf_shard_locate(shard, 0, 0, 0, 0, 4, 0, &at), KVF_E_RANGE, "row 4", "3 blocks of 4 rows");
    kvf_shard_free(shard);
}

static void the_rows_of_a_token_count_as_rows_of_its_block(void **state) {
    (void)state;
    kvf_model *model = state_model(1);
    kvf_engine *engine = engine_of(model, ENGINE(.all = {.block_count = 2}, .state = {.order = "L|BTNPH"}));
    kvf_cell_location at = {.struct_size = sizeof at};

    /* Step 2 of conv.C, channel 1, state 1: pages of 112 bytes, steps of 16, conv.C from byte 12 on. */
    assert_ok(kvf_shard_locate(kvf_engine_shard(engine, 0), 0, 0, 2, 1, 2, 1, &at));

    assert_int_equal(at.offset, 112 + 2 * 16 + 12 + 2);
    assert_int_equal(at.bytes, 2);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void a_cell_outside_the_cache_is_not_found(void **state) {
    kvf_shard *shard = made(*state);
    kvf_cell_location at = {.struct_size = sizeof at, .region = 7, .offset = 7, .bytes = 7};

    assert_fails(kvf_shard_locate(shard, 0, 0, 0, 3, 0, 0, &at), KVF_E_RANGE, "block 3", "3 blocks");
    assert_fails(kvf_shard_locate(shard, 0, 0, 0, 0, 2, 0, &at), KVF_E_RANGE, "row 2", "2 rows");
    assert_fails(kvf_shard_locate(shard, 0, 0, 0, 0, 0, 2, &at), KVF_E_RANGE, "unit is 2", "[0, 2)");
    assert_fails(kvf_shard_locate(shard, 0, 2, 0, 0, 0, 0, &at), KVF_E_RANGE, "does not hold layer 2");
    assert_fails(kvf_shard_locate(shard, 0, 0, 2, 0, 0, 0, &at), KVF_E_RANGE, "part 2");
    assert_fails(kvf_shard_locate(shard, 1, 0, 0, 0, 0, 0, &at), KVF_E_RANGE, "group 1");
    assert_int_equal(at.offset, 7);
    kvf_shard_free(shard);
}

/* ---- what is refused ------------------------------------------------------------------------- */

static void missing_arguments_are_named(void **state) {
    sample *s = *state;
    kvf_shard *shard = NULL;
    assert_fails(kvf_shard_create(NULL, &s->desc, &shard), KVF_E_INVALID, "model is NULL");
    assert_fails(kvf_shard_create(s->model, NULL, &shard), KVF_E_INVALID, "desc is NULL");
    assert_fails(kvf_shard_create(s->model, &s->desc, NULL), KVF_E_INVALID, "out is NULL");
    assert_null(shard);
    kvf_cell_location location = {.struct_size = sizeof location};
    assert_fails(kvf_shard_locate(NULL, 0, 0, 0, 0, 0, 0, &location), KVF_E_INVALID, "shard is NULL");
}

static void a_description_without_its_size_is_refused(void **state) {
    sample *s = *state;
    s->desc.struct_size = 0;
    assert_fails(try_shard(s), KVF_E_INVALID, "kvf_shard_desc", "struct_size");
}

static void a_rank_must_be_below_its_size(void **state) {
    sample *s = *state;
    s->desc.tp_rank = 4;
    s->desc.tp_size = 4;
    assert_fails(try_shard(s), KVF_E_RANGE, "tp_rank 4 of tp_size 4");
    s->desc.tp_rank = 0;
    s->desc.pp_rank = 1;
    assert_fails(try_shard(s), KVF_E_RANGE, "pp_rank 1 of pp_size 1");
}

static void layers_must_be_a_range_of_the_models(void **state) {
    sample *s = *state;
    s->desc.layers = range(0, 3);
    assert_fails(try_shard(s), KVF_E_RANGE, "layers are [0, 3)", "[0, 2)");
    s->desc.layers = range(2, 1);
    assert_fails(try_shard(s), KVF_E_RANGE, "layers are [2, 1)");
}

static void missing_arrays_are_named(void **state) {
    sample *s = *state;
    s->desc.groups = NULL;
    assert_fails(try_shard(s), KVF_E_INVALID, "groups is NULL");
    s->desc.groups = &s->group;
    s->desc.region_bytes = NULL;
    assert_fails(try_shard(s), KVF_E_INVALID, "region_bytes is NULL");
    s->desc.region_bytes = s->region_bytes;
    s->group.parts = NULL;
    assert_fails(try_shard(s), KVF_E_INVALID, "group full", "parts is NULL", "2 parts");
    s->group.parts = s->parts;
    s->group.placements = NULL;
    assert_fails(try_shard(s), KVF_E_INVALID, "group full", "placements is NULL", "4 placements");
}

static void a_block_needs_tokens(void **state) {
    sample *s = *state;
    s->desc.rank = 3;
    s->group.tokens_per_block = 0;
    assert_fails(try_shard(s), KVF_E_INVALID, "rank 3, group full", "tokens_per_block is 0", "1 to");
}

static void kernel_blocks_must_divide_a_block(void **state) {
    sample *s = *state;
    s->group.kernel_blocks_per_block = 3;
    assert_fails(try_shard(s), KVF_E_INVALID, "kernel_blocks_per_block is 3", "tokens_per_block 2");
}

static void a_cache_needs_blocks(void **state) {
    sample *s = *state;
    s->group.block_count = 0;
    assert_fails(try_shard(s), KVF_E_RANGE, "block_count is 0", "1 to 4294967294");
}

static void kernel_block_ids_must_fit_in_32_bits(void **state) {
    sample *s = *state;
    s->group.block_count = UINT64_C(0x7fffffff);
    s->group.tokens_per_block = 2;
    s->group.kernel_blocks_per_block = 2;
    /* not too many regions, but a region that is too large */
    assert_fails(try_shard(s), KVF_E_RANGE, "of region 0");
    s->group.block_count = UINT64_C(0x80000000);
    assert_fails(try_shard(s), KVF_E_RANGE, "block_count is 2147483648 with 2 kernel blocks", "4294967294");
    s->group.block_count = UINT64_MAX;
    assert_fails(try_shard(s), KVF_E_RANGE, "block_count is 18446744073709551615");
}

static void a_token_share_must_be_one_of_them(void **state) {
    sample *s = *state;
    s->group.tokens = (kvf_token_share){2, 2, 1};
    assert_fails(try_shard(s), KVF_E_RANGE, "tokens.index is 2", "0 to 1");
    s->group.tokens = (kvf_token_share){1, 0, 0};
    assert_fails(try_shard(s), KVF_E_RANGE, "tokens.index is 1", "0 to 0");
}

/* The sample's memory is that of blocks of 2 steps. */
static void share_entries_of_4_tokens(sample *s) {
    kvf_model_free(s->model);
    kvf_part_desc parts[] = {PART(.name = "k", .units = 2, .cell_elements = 4),
                             PART(.name = "v", .units = 2, .cell_elements = 4)};
    s->model =
        one_group(2, (kvf_group_desc){.name = "csa", .tokens_per_step = 4, .parts = parts, .part_count = 2});
    s->group.tokens_per_block = 8;
}

static void a_block_of_entries_is_counted_in_tokens(void **state) {
    sample *s = *state;
    share_entries_of_4_tokens(s);
    kvf_shard *shard = made(s);
    kvf_cell_location cell = {.struct_size = sizeof cell};
    assert_int_equal(kvf_shard_get(shard)->groups[0].tokens_per_block, 8);
    assert_ok(kvf_shard_locate(shard, 0, 1, 1, 2, 1, 1, &cell));
    assert_int_equal(cell.offset, 32 + 2 * 64 + 8 + 16);
    assert_fails(kvf_shard_locate(shard, 0, 1, 1, 2, 2, 1, &cell), KVF_E_RANGE, "row 2",
                 "3 blocks of 2 rows");
    kvf_shard_free(shard);
}

static void an_entry_is_never_cut(void **state) {
    sample *s = *state;
    share_entries_of_4_tokens(s);
    s->group.tokens_per_block = 6;
    assert_fails(try_shard(s), KVF_E_INVALID, "group csa", "tokens_per_block is 6", "tokens_per_step, 4");
    s->group.tokens_per_block = 8;
    s->group.kernel_blocks_per_block = 4; /* divides the tokens, but not the entries */
    assert_fails(try_shard(s), KVF_E_INVALID, "kernel_blocks_per_block is 4", "the entries of a block, 2");
    s->group.kernel_blocks_per_block = 2;
    s->group.block_count = 1;
    kvf_shard_free(made(s));
    s->group.tokens = (kvf_token_share){1, 2, 6};
    assert_fails(try_shard(s), KVF_E_INVALID, "tokens.width is 6", "tokens_per_step, 4");
    s->group.tokens = (kvf_token_share){1, 2, 0};
    assert_fails(try_shard(s), KVF_E_INVALID, "tokens.width is 1", "tokens_per_step, 4");
    s->group.tokens.width = 12;
    kvf_shard_free(made(s));
}

static void units_must_be_a_range_of_the_parts(void **state) {
    sample *s = *state;
    s->parts[1].units = range(0, 3);
    assert_fails(try_shard(s), KVF_E_RANGE, "part v", "[0, 3)", "[0, 2)");
    s->parts[1].units = range(2, 1);
    assert_fails(try_shard(s), KVF_E_RANGE, "part v", "[2, 1)");
}

static void a_replica_must_be_one_of_them(void **state) {
    sample *s = *state;
    s->parts[0].replica = 2;
    s->parts[0].replica_count = 2;
    assert_fails(try_shard(s), KVF_E_RANGE, "part k", "replica is 2", "0 to 1");
}

static void a_state_fills_its_block_and_is_not_shared_by_token(void **state) {
    sample *s = *state;
    kvf_model_free(s->model);
    kvf_part_desc parts[] = {PART(.name = "a", .units = 2, .cell_elements = 4),
                             PART(.name = "b", .units = 2, .cell_elements = 4)};
    s->model = one_group(
        2, (kvf_group_desc){.name = "ssm", .kind = KVF_GROUP_STATE, .parts = parts, .part_count = 2});
    assert_fails(try_shard(s), KVF_E_INVALID, "tokens_per_block is 2", "1 state");
    s->group.tokens_per_block = 1;
    s->group.tokens.count = 2;
    assert_fails(try_shard(s), KVF_E_INVALID, "tokens.count is 2");
}

static void a_placement_names_a_region_of_the_shard(void **state) {
    sample *s = *state;
    s->placements[3].region = 2;
    assert_fails(try_shard(s), KVF_E_RANGE, "layer 1, part v", "region is 2", "the shard has 2");
}

static void the_last_cell_may_end_with_its_region_but_not_after_it(void **state) {
    sample *s = *state;
    assert_ok(try_shard(s)); /* V of block 2 ends at 32 + 2*64 + 8 + 16 + 8 = 192 */
    s->region_bytes[1] = 191;
    assert_fails(try_shard(s), KVF_E_RANGE, "layer 1, part v", "ends at byte 192 of region 1",
                 "which has 191");
}

static void an_address_past_64_bits_is_an_overflow(void **state) {
    sample *s = *state;
    const kvf_placement at_fault[] = {
        PLACED(0, UINT64_MAX - 7, 64, 8, 16),         /* the cell itself */
        PLACED(0, 0, UINT64_MAX / 2 + 1, 8, 16),      /* block 2 times its stride */
        PLACED(0, UINT64_MAX - 100, 64, 8, 16),       /* the offset plus block 2 */
        PLACED(0, 0, 64, UINT64_MAX, 16),             /* row 1, after the blocks */
        PLACED(0, 0, 64, 8, UINT64_MAX - 100),        /* unit 1 */
        PLACED(0, 0, UINT64_MAX / 2, UINT64_MAX, 16), /* block and row, which overflow together */
    };
    for (size_t i = 0; i < COUNT_OF(at_fault); i++) {
        s->placements[0] = at_fault[i];
        assert_fails(try_shard(s), KVF_E_OVERFLOW, "layer 0, part k", "ends past 2^64");
    }
}

static void a_region_as_large_as_memory_can_be_filled_to_its_last_byte(void **state) {
    sample *s = *state;
    s->region_bytes[0] = UINT64_MAX;
    s->placements[0].offset = UINT64_MAX - 128 - 32; /* the last cell of block 2 ends at 2*64 + 32 */
    assert_ok(try_shard(s));
}

static void a_part_without_units_needs_no_valid_placement(void **state) {
    sample *s = *state;
    s->parts[1].units = range(1, 1);
    s->placements[1] = s->placements[3] = PLACED(99, UINT64_MAX, 0, 0, 0);
    assert_ok(try_shard(s));
}

/* ---- memory ---------------------------------------------------------------------------------- */

static kvf_status make_shard(void *subject) {
    return try_shard(subject);
}

static void a_shard_survives_every_refused_allocation(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    void *s;
    (void)set_up(&s);

    survive_every_refusal(&memory, make_shard, s);

    (void)tear_down(&s);
    assert_int_equal(memory.live, 0);
}

#define SHARD_TEST(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        SHARD_TEST(a_shard_is_a_copy_of_its_description_with_the_defaults_filled_in),
        SHARD_TEST(a_shard_keeps_what_its_rank_says_of_itself),
        SHARD_TEST(a_shard_keeps_its_model_alive),
        cmocka_unit_test(freeing_no_shard_is_fine),
        cmocka_unit_test(the_held_layers_of_a_group_are_indices_into_its_own_list),
        SHARD_TEST(a_group_that_does_not_exist_has_no_layers),
        SHARD_TEST(there_is_a_placement_for_each_held_layer_and_part),
        SHARD_TEST(there_is_no_placement_for_what_is_not_held),
        SHARD_TEST(a_rank_may_hold_no_layers_and_no_memory),
        SHARD_TEST(a_cell_is_found_by_block_row_and_unit),
        SHARD_TEST(units_are_counted_over_the_whole_model),
        SHARD_TEST(a_logical_block_is_several_kernel_blocks),
        cmocka_unit_test(the_rows_of_a_token_count_as_rows_of_its_block),
        SHARD_TEST(a_cell_outside_the_cache_is_not_found),
        SHARD_TEST(missing_arguments_are_named),
        SHARD_TEST(a_description_without_its_size_is_refused),
        SHARD_TEST(a_rank_must_be_below_its_size),
        SHARD_TEST(layers_must_be_a_range_of_the_models),
        SHARD_TEST(missing_arrays_are_named),
        SHARD_TEST(a_block_needs_tokens),
        SHARD_TEST(kernel_blocks_must_divide_a_block),
        SHARD_TEST(a_cache_needs_blocks),
        SHARD_TEST(kernel_block_ids_must_fit_in_32_bits),
        SHARD_TEST(a_token_share_must_be_one_of_them),
        SHARD_TEST(a_block_of_entries_is_counted_in_tokens),
        SHARD_TEST(an_entry_is_never_cut),
        SHARD_TEST(units_must_be_a_range_of_the_parts),
        SHARD_TEST(a_replica_must_be_one_of_them),
        SHARD_TEST(a_state_fills_its_block_and_is_not_shared_by_token),
        SHARD_TEST(a_placement_names_a_region_of_the_shard),
        SHARD_TEST(the_last_cell_may_end_with_its_region_but_not_after_it),
        SHARD_TEST(an_address_past_64_bits_is_an_overflow),
        SHARD_TEST(a_region_as_large_as_memory_can_be_filled_to_its_last_byte),
        SHARD_TEST(a_part_without_units_needs_no_valid_placement),
        cmocka_unit_test_teardown(a_shard_survives_every_refused_allocation, stop_counting_memory),
    };
    return cmocka_run_group_tests_name("shard", tests, NULL, NULL);
}
