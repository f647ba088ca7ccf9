/*
 * From an axis order to offsets and strides, computed by hand.
 *
 * Unless a test says otherwise: 2 layers, K and V of 2 heads, 8 bytes a cell, 4 tokens a block, 3 blocks. A
 * part of a page then has 2 * 4 * 8 = 64 bytes, a page 128, a layer 384.
 */
#include "shapes.h"

static kvf_engine *laid_out(const kvf_model *model, const char *order) {
    return engine_of(model, ENGINE(.all = {.tokens_per_block = 4, .block_count = 3, .order = order},
                                   .state = {.block_count = 3, .order = order}));
}

static void assert_regions(const kvf_engine *engine, uint32_t count, const uint64_t *bytes) {
    const kvf_shard_desc *desc = kvf_shard_get(kvf_engine_shard(engine, 0));
    assert_int_equal(desc->region_count, count);
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(desc->region_bytes[i], bytes[i]);
}

/* Lays out the usual model and compares its four placements: layer 0 K, V, layer 1 K, V. */
static void assert_order(const char *order, uint32_t regions, uint64_t region_bytes,
                         const kvf_placement wanted[4]) {
    kvf_model *model = attention(2, 2, 4);
    kvf_engine *engine = laid_out(model, order);
    const kvf_shard *shard = kvf_engine_shard(engine, 0);
    const uint64_t bytes[] = {region_bytes, region_bytes, region_bytes, region_bytes};
    assert_regions(engine, regions, bytes);
    for (uint32_t i = 0; i < 4; i++)
        assert_placement(shard, 0, i / 2, i % 2, wanted[i]);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static kvf_status try_spec(const kvf_model *model, kvf_group_spec spec) {
    if (spec.block_count == 0)
        spec.block_count = 3;
    if (spec.tokens_per_block == 0)
        spec.tokens_per_block = 4;
    kvf_engine *engine = NULL;
    kvf_status status = kvf_engine_build(model, ENGINE(.all = spec, .state = {.order = spec.order}), &engine);
    kvf_engine_free(engine);
    return status;
}

static kvf_status try_order(const char *order) {
    kvf_model *model = attention(2, 2, 4);
    kvf_status status = try_spec(model, (kvf_group_spec){.order = order});
    kvf_model_free(model);
    return status;
}

/* ---- the orders the header shows ------------------------------------------------------------- */

/* Placements: {region, offset, block stride, row stride, unit stride}. */

static void head_before_token_in_a_buffer_per_layer(void **state) {
    (void)state;
    assert_order("L|BPHN", 2, 384,
                 (kvf_placement[]){PLACED(0, 0, 128, 8, 32), PLACED(0, 64, 128, 8, 32),
                                   PLACED(1, 0, 128, 8, 32), PLACED(1, 64, 128, 8, 32)});
}

static void token_before_head_in_a_buffer_per_layer(void **state) {
    (void)state;
    assert_order("L|BPNH", 2, 384,
                 (kvf_placement[]){PLACED(0, 0, 128, 16, 8), PLACED(0, 64, 128, 16, 8),
                                   PLACED(1, 0, 128, 16, 8), PLACED(1, 64, 128, 16, 8)});
}

static void k_and_v_in_buffers_of_their_own(void **state) {
    (void)state;
    assert_order("LP|BNH", 4, 192,
                 (kvf_placement[]){PLACED(0, 0, 64, 16, 8), PLACED(1, 0, 64, 16, 8), PLACED(2, 0, 64, 16, 8),
                                   PLACED(3, 0, 64, 16, 8)});
}

static void k_and_v_of_one_token_side_by_side(void **state) {
    (void)state;
    assert_order("L|BHNP", 2, 384,
                 (kvf_placement[]){PLACED(0, 0, 128, 16, 64), PLACED(0, 8, 128, 16, 64),
                                   PLACED(1, 0, 128, 16, 64), PLACED(1, 8, 128, 16, 64)});
}

static void one_buffer_over_all_layers(void **state) {
    (void)state;
    assert_order("LBPHN", 1, 768,
                 (kvf_placement[]){PLACED(0, 0, 128, 8, 32), PLACED(0, 64, 128, 8, 32),
                                   PLACED(0, 384, 128, 8, 32), PLACED(0, 448, 128, 8, 32)});
}

static void blocks_outermost_with_all_layers_of_a_block_in_one_row(void **state) {
    (void)state;
    assert_order("BLHNP", 1, 768,
                 (kvf_placement[]){PLACED(0, 0, 256, 16, 64), PLACED(0, 8, 256, 16, 64),
                                   PLACED(0, 128, 256, 16, 64), PLACED(0, 136, 256, 16, 64)});
}

static void conv_state_step_by_step_with_the_recurrent_state_after_it(void **state) {
    (void)state;
    /* | x0..x3 B0 B1 C0 C1 | the same | the same | ssm h0 | ssm h1 |: 16 bytes a step, 48 + 64 = 112. */
    kvf_model *model = state_model(2);
    kvf_engine *engine = laid_out(model, "L|BTNPH");
    const kvf_shard *shard = kvf_engine_shard(engine, 0);

    assert_regions(engine, 2, (const uint64_t[]){336, 336});
    assert_placement(shard, 0, 1, 0, PLACED(1, 0, 112, 16, 2));
    assert_placement(shard, 0, 1, 1, PLACED(1, 8, 112, 16, 2));
    assert_placement(shard, 0, 1, 2, PLACED(1, 12, 112, 16, 2));
    assert_placement(shard, 0, 1, 3, PLACED(1, 48, 112, 64, 32));
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* ---- other orders ---------------------------------------------------------------------------- */

static void conv_state_channel_by_channel(void **state) {
    (void)state;
    /* Channels are outside of steps: x takes 4 * 3 * 2 = 24 bytes, B and C 12 each. */
    kvf_model *model = state_model(1);
    kvf_engine *engine = laid_out(model, "L|BTPHN");
    const kvf_shard *shard = kvf_engine_shard(engine, 0);

    assert_regions(engine, 1, (const uint64_t[]){336});
    assert_placement(shard, 0, 0, 0, PLACED(0, 0, 112, 2, 6));
    assert_placement(shard, 0, 0, 1, PLACED(0, 24, 112, 2, 6));
    assert_placement(shard, 0, 0, 2, PLACED(0, 36, 112, 2, 6));
    assert_placement(shard, 0, 0, 3, PLACED(0, 48, 112, 32, 32));
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void conv_and_recurrent_state_may_have_buffers_of_their_own(void **state) {
    (void)state;
    kvf_model *model = state_model(2);
    kvf_engine *engine = laid_out(model, "LT|BNPH");
    const kvf_shard *shard = kvf_engine_shard(engine, 0);

    assert_regions(engine, 4, (const uint64_t[]){144, 192, 144, 192});
    assert_placement(shard, 0, 1, 2, PLACED(2, 12, 48, 16, 2));
    assert_placement(shard, 0, 1, 3, PLACED(3, 0, 64, 64, 32));
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void a_buffer_for_each_part_over_all_layers(void **state) {
    (void)state;
    assert_order("P|LBNH", 2, 384,
                 (kvf_placement[]){PLACED(0, 0, 64, 16, 8), PLACED(1, 0, 64, 16, 8),
                                   PLACED(0, 192, 64, 16, 8), PLACED(1, 192, 64, 16, 8)});
}

static void parts_numbered_before_layers(void **state) {
    (void)state;
    assert_order("PL|BNH", 4, 192,
                 (kvf_placement[]){PLACED(0, 0, 64, 16, 8), PLACED(2, 0, 64, 16, 8), PLACED(1, 0, 64, 16, 8),
                                   PLACED(3, 0, 64, 16, 8)});
}

static void layers_inside_tokens(void **state) {
    (void)state;
    /* A token's row: layer 0 K h0, K h1, V h0, V h1, then layer 1. */
    assert_order("BNLPH", 1, 768,
                 (kvf_placement[]){PLACED(0, 0, 256, 64, 8), PLACED(0, 16, 256, 64, 8),
                                   PLACED(0, 32, 256, 64, 8), PLACED(0, 48, 256, 64, 8)});
}

static void a_bar_at_the_front_means_one_buffer(void **state) {
    (void)state;
    assert_order("|LBPHN", 1, 768,
                 (kvf_placement[]){PLACED(0, 0, 128, 8, 32), PLACED(0, 64, 128, 8, 32),
                                   PLACED(0, 384, 128, 8, 32), PLACED(0, 448, 128, 8, 32)});
}

static void the_tensor_axis_stands_just_outside_the_parts_when_left_out(void **state) {
    (void)state;
    kvf_model *model = state_model(1);
    kvf_engine *without = laid_out(model, "L|BPHN"), *with = laid_out(model, "L|BTPHN");
    for (uint32_t part = 0; part < 4; part++)
        assert_placement(kvf_engine_shard(without, 0), 0, 0, part,
                         *kvf_shard_placement(kvf_engine_shard(with, 0), 0, 0, part));
    kvf_engine_free(without);
    kvf_engine_free(with);
    kvf_model_free(model);
}

static void no_order_means_head_before_token_in_a_buffer_per_layer(void **state) {
    (void)state;
    assert_order(NULL, 2, 384,
                 (kvf_placement[]){PLACED(0, 0, 128, 8, 32), PLACED(0, 64, 128, 8, 32),
                                   PLACED(1, 0, 128, 8, 32), PLACED(1, 64, 128, 8, 32)});
}

static void parts_of_different_sizes_follow_each_other_in_a_page(void **state) {
    (void)state;
    /* K of 2 heads and 8 bytes, V of 2 heads and 16 bytes, a scale of one unit and 2 bytes a token. */
    kvf_part_desc parts[] = {PART(.name = "k", .units = 2, .cell_elements = 4),
                             PART(.name = "v", .units = 2, .cell_elements = 8),
                             PART(.name = "scale", .units = 1, .cell_elements = 1)};
    kvf_model *model = one_group(1, (kvf_group_desc){.name = "full", .parts = parts, .part_count = 3});
    kvf_engine *engine = laid_out(model, "L|BPHN");
    const kvf_shard *shard = kvf_engine_shard(engine, 0);

    assert_placement(shard, 0, 0, 0, PLACED(0, 0, 200, 8, 32));
    assert_placement(shard, 0, 0, 1, PLACED(0, 64, 200, 16, 64));
    assert_placement(shard, 0, 0, 2, PLACED(0, 192, 200, 2, 8));
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* ---- pages ----------------------------------------------------------------------------------- */

static void assert_page(kvf_group_spec spec, uint64_t region_bytes, kvf_placement k, kvf_placement v) {
    kvf_model *model = attention(1, 2, 4);
    spec.block_count = 3;
    if (spec.tokens_per_block == 0)
        spec.tokens_per_block = 4;
    kvf_engine *engine = engine_of(model, ENGINE(.all = spec));
    assert_regions(engine, 1, &region_bytes);
    assert_placement(kvf_engine_shard(engine, 0), 0, 0, 0, k);
    assert_placement(kvf_engine_shard(engine, 0), 0, 0, 1, v);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void a_page_may_be_larger_than_its_content(void **state) {
    (void)state;
    assert_page((kvf_group_spec){.page_bytes = 200}, 600, PLACED(0, 0, 200, 8, 32),
                PLACED(0, 64, 200, 8, 32));
}

static void a_page_may_be_just_its_content(void **state) {
    (void)state;
    assert_page((kvf_group_spec){.page_bytes = 128}, 384, PLACED(0, 0, 128, 8, 32),
                PLACED(0, 64, 128, 8, 32));
}

static void a_page_is_rounded_up_to_its_alignment(void **state) {
    (void)state;
    assert_page((kvf_group_spec){.page_align = 100}, 600, PLACED(0, 0, 200, 8, 32),
                PLACED(0, 64, 200, 8, 32));
    assert_page((kvf_group_spec){.page_align = 64}, 384, PLACED(0, 0, 128, 8, 32), PLACED(0, 64, 128, 8, 32));
}

static void a_given_page_is_rounded_up_as_well(void **state) {
    (void)state;
    assert_page((kvf_group_spec){.page_bytes = 130, .page_align = 64}, 576, PLACED(0, 0, 192, 8, 32),
                PLACED(0, 64, 192, 8, 32));
}

static void pages_are_those_of_kernel_blocks(void **state) {
    (void)state;
    /* 3 logical blocks of 4 tokens are 6 kernel blocks of 2: pages of 64 bytes, padded to 70. */
    assert_page((kvf_group_spec){.kernel_blocks_per_block = 2, .page_bytes = 70}, 420,
                PLACED(0, 0, 70, 8, 16), PLACED(0, 32, 70, 8, 16));
}

static void a_page_inside_the_part_axis_is_that_of_one_part(void **state) {
    (void)state;
    assert_page((kvf_group_spec){.order = "LPBNH", .page_bytes = 80}, 480, PLACED(0, 0, 80, 16, 8),
                PLACED(0, 240, 80, 16, 8));
}

static void a_page_smaller_than_its_content_is_refused(void **state) {
    (void)state;
    kvf_model *model = attention(1, 2, 4);
    assert_fails(try_spec(model, (kvf_group_spec){.page_bytes = 127}), KVF_E_RANGE, "group full",
                 "page_bytes is 127", "128 bytes of content");
    kvf_model_free(model);
}

static void sizes_past_64_bits_are_refused(void **state) {
    (void)state;
    kvf_model *model = attention(4, 2, 4);
    assert_fails(try_spec(model, (kvf_group_spec){.page_align = UINT64_MAX}), KVF_E_OVERFLOW, "page_align",
                 "18446744073709551615");
    assert_fails(try_spec(model, (kvf_group_spec){.page_bytes = UINT64_MAX / 2}), KVF_E_OVERFLOW, "axis B",
                 "3 steps of 9223372036854775807 bytes");
    assert_fails(try_spec(model, (kvf_group_spec){.order = "LBPHN", .page_bytes = UINT64_MAX / 8}),
                 KVF_E_OVERFLOW, "axis L", "4 steps");
    assert_fails(try_spec(model, (kvf_group_spec){.order = "PBLHN", .page_bytes = UINT64_MAX / 4}),
                 KVF_E_OVERFLOW, "do not fit in 64 bits");
    kvf_model_free(model);
}

/* ---- only what is held ----------------------------------------------------------------------- */

static void only_held_units_take_memory(void **state) {
    (void)state;
    kvf_model *model = attention(1, 2, 4);
    kvf_engine *engine =
        engine_of(model, ENGINE(.tp_size = 2, .all = {.tokens_per_block = 4, .block_count = 3}));
    const kvf_shard *second = kvf_engine_shard(engine, 1);

    assert_int_equal(kvf_shard_get(second)->region_bytes[0], 192);
    assert_placement(second, 0, 0, 0, PLACED(0, 0, 64, 8, 32));
    assert_placement(second, 0, 0, 1, PLACED(0, 32, 64, 8, 32));
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void only_held_layers_take_memory(void **state) {
    (void)state;
    kvf_model *model = attention(3, 2, 4);
    kvf_engine *engine = engine_of(
        model, ENGINE(.pp_size = 2, .all = {.tokens_per_block = 4, .block_count = 3, .order = "LBPHN"}));
    const kvf_shard *second = kvf_engine_shard(engine, 1); /* layers 1 and 2 */

    assert_int_equal(kvf_shard_get(second)->region_bytes[0], 768);
    assert_placement(second, 0, 1, 0, PLACED(0, 0, 128, 8, 32));
    assert_placement(second, 0, 2, 0, PLACED(0, 384, 128, 8, 32));
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* ---- several groups -------------------------------------------------------------------------- */

/* Group "full" has one head and pages of 64 bytes, group "ssm" pages of 112 bytes. Both have two layers with a buffer
 * each.
 */
static kvf_engine *two_groups(bool share_pages) {
    kvf_model *model = hybrid(1);
    kvf_engine *engine = engine_of(
        model, ENGINE(.all = {.tokens_per_block = 4, .block_count = 3}, .share_pages = share_pages));
    kvf_model_free(model);
    return engine;
}

static void groups_have_buffers_one_after_another(void **state) {
    (void)state;
    kvf_engine *engine = two_groups(false);
    assert_regions(engine, 4, (const uint64_t[]){192, 192, 336, 336});
    assert_placement(kvf_engine_shard(engine, 0), 0, 1, 1, PLACED(1, 32, 64, 8, 32));
    assert_placement(kvf_engine_shard(engine, 0), 1, 1, 3, PLACED(3, 48, 112, 32, 32));
    kvf_engine_free(engine);
}

static void groups_that_share_pages_use_the_same_buffers(void **state) {
    (void)state;
    kvf_engine *engine = two_groups(true);
    assert_regions(engine, 2, (const uint64_t[]){336, 336});
    assert_placement(kvf_engine_shard(engine, 0), 0, 1, 1, PLACED(1, 32, 64, 8, 32));
    assert_placement(kvf_engine_shard(engine, 0), 1, 1, 3, PLACED(1, 48, 112, 32, 32));
    kvf_engine_free(engine);
}

static void groups_that_share_pages_may_have_different_numbers_of_buffers(void **state) {
    (void)state;
    kvf_model *model = hybrid(1);
    const kvf_group_spec groups[] = {{.tokens_per_block = 4, .block_count = 8, .order = "LP|BHN"},
                                     {.block_count = 2}};
    kvf_engine *engine = engine_of(model, ENGINE(.groups = groups, .share_pages = true));

    /* 8 * 32 bytes for each part of a layer of "full"; the states need 2 * 112 of the first two. */
    assert_regions(engine, 4, (const uint64_t[]){256, 256, 256, 256});
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* ---- malformed orders ------------------------------------------------------------------------ */

static void an_order_needs_every_axis(void **state) {
    (void)state;
    static const char *const incomplete[] = {"",      "|",     "L|",    "BPHN",  "L|PHN",
                                             "L|BHN", "L|BPN", "L|BPH", "L|BTHN"};
    for (size_t i = 0; i < COUNT_OF(incomplete); i++)
        assert_fails(try_order(incomplete[i]), KVF_E_INVALID, "group full", "order is \"", incomplete[i],
                     "needs each of L, B, P, H and N");
}

static void an_order_names_no_axis_twice(void **state) {
    (void)state;
    static const char *const repeated[] = {"L|BPHNL", "L|BBPHN", "LL|BPHN", "L|BTTPHN", "L|BPPHN"};
    for (size_t i = 0; i < COUNT_OF(repeated); i++)
        assert_fails(try_order(repeated[i]), KVF_E_INVALID, repeated[i], "once", " again");
}

static void an_order_knows_no_other_letters(void **state) {
    (void)state;
    static const char *const unknown[] = {"L|BPHNX", "l|bphn", "L BPHN", "L|B/PHN", "L|BPHN\n"};
    for (size_t i = 0; i < COUNT_OF(unknown); i++)
        assert_fails(try_order(unknown[i]), KVF_E_INVALID, "needs each of L, B, P, H, N once");
}

static void an_order_has_one_bar(void **state) {
    (void)state;
    assert_fails(try_order("L|P|BHN"), KVF_E_INVALID, "L|P|BHN", "only one '|'");
    assert_fails(try_order("||LBPHN"), KVF_E_INVALID, "only one '|'");
}

static void blocks_heads_and_tokens_have_no_buffers_of_their_own(void **state) {
    (void)state;
    static const char *const forbidden[] = {"B|LPHN", "LB|PHN", "LH|BPN", "LN|BPH", "LBPHN|"};
    for (size_t i = 0; i < COUNT_OF(forbidden); i++)
        assert_fails(try_order(forbidden[i]), KVF_E_INVALID, forbidden[i], "only L, T and P");
}

static void the_tensor_axis_stands_outside_the_parts(void **state) {
    (void)state;
    assert_fails(try_order("L|BPTHN"), KVF_E_INVALID, "L|BPTHN", "T must stand outside P");
}

static void an_axis_outside_the_parts_needs_as_many_steps_in_each(void **state) {
    (void)state;
    kvf_part_desc parts[] = {PART(.name = "k", .units = 2, .cell_elements = 4),
                             PART(.name = "scale", .units = 1, .cell_elements = 1)};
    kvf_model *model = one_group(1, (kvf_group_desc){.name = "full", .parts = parts, .part_count = 2});

    assert_fails(try_spec(model, (kvf_group_spec){.order = "L|BHPN"}), KVF_E_INVALID, "group full", "axis H",
                 "part k with 2 steps", "part scale with 1", "put H inside P");
    assert_ok(try_spec(model, (kvf_group_spec){.order = "L|BNPH"}));
    kvf_model_free(model);
}

static void an_axis_outside_the_tensors_needs_as_many_steps_in_each(void **state) {
    (void)state;
    kvf_model *model = state_model(1);
    assert_fails(try_spec(model, (kvf_group_spec){.order = "L|BNTPH"}), KVF_E_INVALID, "group ssm", "axis N",
                 "part conv.C with 3 steps", "part ssm with 1");
    assert_fails(try_spec(model, (kvf_group_spec){.order = "L|BNPH"}), KVF_E_INVALID, "axis N");
    assert_ok(try_spec(model, (kvf_group_spec){.order = "L|BTNPH"}));
    assert_fails(try_spec(model, (kvf_group_spec){.order = "L|BTHNP"}), KVF_E_INVALID, "axis H",
                 "part conv.x with 4 steps", "part conv.B with 2");
    kvf_model_free(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(head_before_token_in_a_buffer_per_layer),
        cmocka_unit_test(token_before_head_in_a_buffer_per_layer),
        cmocka_unit_test(k_and_v_in_buffers_of_their_own),
        cmocka_unit_test(k_and_v_of_one_token_side_by_side),
        cmocka_unit_test(one_buffer_over_all_layers),
        cmocka_unit_test(blocks_outermost_with_all_layers_of_a_block_in_one_row),
        cmocka_unit_test(conv_state_step_by_step_with_the_recurrent_state_after_it),
        cmocka_unit_test(conv_state_channel_by_channel),
        cmocka_unit_test(conv_and_recurrent_state_may_have_buffers_of_their_own),
        cmocka_unit_test(a_buffer_for_each_part_over_all_layers),
        cmocka_unit_test(parts_numbered_before_layers),
        cmocka_unit_test(layers_inside_tokens),
        cmocka_unit_test(a_bar_at_the_front_means_one_buffer),
        cmocka_unit_test(the_tensor_axis_stands_just_outside_the_parts_when_left_out),
        cmocka_unit_test(no_order_means_head_before_token_in_a_buffer_per_layer),
        cmocka_unit_test(parts_of_different_sizes_follow_each_other_in_a_page),
        cmocka_unit_test(a_page_may_be_larger_than_its_content),
        cmocka_unit_test(a_page_may_be_just_its_content),
        cmocka_unit_test(a_page_is_rounded_up_to_its_alignment),
        cmocka_unit_test(a_given_page_is_rounded_up_as_well),
        cmocka_unit_test(pages_are_those_of_kernel_blocks),
        cmocka_unit_test(a_page_inside_the_part_axis_is_that_of_one_part),
        cmocka_unit_test(a_page_smaller_than_its_content_is_refused),
        cmocka_unit_test(sizes_past_64_bits_are_refused),
        cmocka_unit_test(only_held_units_take_memory),
        cmocka_unit_test(only_held_layers_take_memory),
        cmocka_unit_test(groups_have_buffers_one_after_another),
        cmocka_unit_test(groups_that_share_pages_use_the_same_buffers),
        cmocka_unit_test(groups_that_share_pages_may_have_different_numbers_of_buffers),
        cmocka_unit_test(an_order_needs_every_axis),
        cmocka_unit_test(an_order_names_no_axis_twice),
        cmocka_unit_test(an_order_knows_no_other_letters),
        cmocka_unit_test(an_order_has_one_bar),
        cmocka_unit_test(blocks_heads_and_tokens_have_no_buffers_of_their_own),
        cmocka_unit_test(the_tensor_axis_stands_outside_the_parts),
        cmocka_unit_test(an_axis_outside_the_parts_needs_as_many_steps_in_each),
        cmocka_unit_test(an_axis_outside_the_tensors_needs_as_many_steps_in_each),
    };
    return cmocka_run_group_tests_name("layout", tests, NULL, NULL);
}
