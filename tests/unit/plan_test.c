/*
 * Copy rules, fused rules, and predictions. cover_test.c tests which rank reads what from which, proof_test.c the proof
 * of a plan.
 */
#include "plan/plan.h"
#include "shapes.h"

#define BLOCKS(...)                                                                                          \
    { .tokens_per_block = 4, .block_count = 8, __VA_ARGS__ }
#define BLOCKS_OF_6(...)                                                                                     \
    { .tokens_per_block = 6, .block_count = 8, __VA_ARGS__ }

/* ---- comparing ------------------------------------------------------------------------------- */

static void print_rule(const char *whose, const kvf_copy_rule *r) {
    print_error("%s: source %u, group %u, %u units, %u rows a step, cells of %llu bytes, local {%llu, %llu, "
                "%llu}, remote {%llu, %llu, %llu}, tokens %u of %u by %u, %u lanes a page\n",
                whose, r->source, r->group, r->units, r->rows_per_step, (unsigned long long)r->cell_bytes,
                (unsigned long long)r->local.block, (unsigned long long)r->local.row,
                (unsigned long long)r->local.unit, (unsigned long long)r->remote.block,
                (unsigned long long)r->remote.row, (unsigned long long)r->remote.unit, r->remote_tokens.index,
                r->remote_tokens.count, r->remote_tokens.width, r->lanes_per_page);
    for (uint32_t i = 0; i < r->lane_count; i++)
        print_error("  lane: local %u+%llu, remote %u+%llu, layers [%u, %u)\n", r->lanes[i].local_region,
                    (unsigned long long)r->lanes[i].local_offset, r->lanes[i].remote_region,
                    (unsigned long long)r->lanes[i].remote_offset, r->lanes[i].layers.begin,
                    r->lanes[i].layers.end);
}

static bool same_strides(const kvf_strides *a, const kvf_strides *b) {
    return a->block == b->block && a->row == b->row && a->unit == b->unit;
}

static bool same_lane(const kvf_copy_lane *a, const kvf_copy_lane *b) {
    return a->local_offset == b->local_offset && a->remote_offset == b->remote_offset &&
           a->local_region == b->local_region && a->remote_region == b->remote_region &&
           a->layers.begin == b->layers.begin && a->layers.end == b->layers.end;
}

static bool same_rule(const kvf_copy_rule *a, const kvf_copy_rule *b) {
    bool same = a->source == b->source && a->group == b->group && a->units == b->units &&
                a->rows_per_step == b->rows_per_step && a->cell_bytes == b->cell_bytes &&
                same_strides(&a->local, &b->local) && same_strides(&a->remote, &b->remote) &&
                a->remote_tokens.index == b->remote_tokens.index &&
                a->remote_tokens.count == b->remote_tokens.count &&
                a->remote_tokens.width == b->remote_tokens.width && a->lane_count == b->lane_count &&
                a->lanes_per_page == b->lanes_per_page && a->whole_blocks == b->whole_blocks;
    for (uint32_t i = 0; i < a->lane_count && same; i++)
        same = same_lane(&a->lanes[i], &b->lanes[i]);
    return same;
}

/* The rule must have the `count` lanes of `lanes`; a field of `wanted` that is 0 counts as 1 if 0 makes no sense for
 * it. */
static void check_rule(const kvf_plan *plan, uint32_t index, kvf_copy_rule wanted, const kvf_copy_lane *lanes,
                       uint32_t count, const char *file, int line) {
    const kvf_copy_rule *got = nth_rule(plan, wanted.whole_blocks, index);
    assert_non_null(got);
    wanted.lanes = lanes;
    wanted.lane_count = count;
    uint32_t *ones[] = {&wanted.units, &wanted.rows_per_step, &wanted.remote_tokens.count,
                        &wanted.remote_tokens.width, &wanted.lanes_per_page};
    for (size_t i = 0; i < COUNT_OF(ones); i++)
        *ones[i] = *ones[i] ? *ones[i] : 1;
    if (!same_rule(got, &wanted)) {
        print_rule("wanted", &wanted);
        print_rule("got", got);
        _fail(file, line);
    }
    check_success(kvf_plan_verify(plan), file, line);
}

#define RULE(...) ((kvf_copy_rule){__VA_ARGS__})

/* Lanes: {local offset, remote offset, local region, remote region, layers}. */
#define assert_rule(plan, index, rule, ...)                                                                  \
    check_rule((plan), (index), (rule), (const kvf_copy_lane[]){__VA_ARGS__},                                \
               COUNT_OF(((const kvf_copy_lane[]){__VA_ARGS__})), __FILE__, __LINE__)

/* ---- rules ----------------------------------------------------------------------------------- */

static void equal_shapes_give_one_rule_with_a_lane_for_each_layer_and_part(void **state) {
    (void)state;
    /* 2 of 4 heads a rank, 4 tokens: parts of 64 bytes, pages of 128. */
    pair p = pair_of(attention(2, 4, 4), ENGINE(.tp_size = 2, .all = BLOCKS()),
                     ENGINE(.tp_size = 2, .all = BLOCKS()));
    kvf_plan *plan = plan_of(&p, 1);

    assert_int_equal(step_rule_count(plan), 1);
    assert_rule(
        plan, 0,
        RULE(.units = 2, .cell_bytes = 8, .local = {128, 8, 32}, .remote = {128, 8, 32}, .lanes_per_page = 2),
        {0, 0, 0, 0, {0, 1}}, {64, 64, 0, 0, {0, 1}}, {0, 0, 1, 1, {1, 2}}, {64, 64, 1, 1, {1, 2}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void two_sources_fill_their_heads_of_a_page(void **state) {
    (void)state;
    /* Remote: one head a rank, pages of 64. Local: two heads, head before token, pages of 128. */
    pair p = pair_of(attention(1, 2, 4), ENGINE(.all = BLOCKS()),
                     ENGINE(.tp_size = 2, .all = BLOCKS(.order = "L|BPNH")));
    kvf_plan *plan = plan_of(&p, 0);

    assert_int_equal(step_rule_count(plan), 2);
    assert_rule(plan, 0, RULE(.source = 0, .cell_bytes = 8, .local = {128, 8, 0}, .remote = {64, 8, 0}),
                {0, 0, 0, 0, {0, 1}}, {64, 32, 0, 0, {0, 1}});
    assert_rule(plan, 1, RULE(.source = 1, .cell_bytes = 8, .local = {128, 8, 0}, .remote = {64, 8, 0}),
                {32, 0, 0, 0, {0, 1}}, {96, 32, 0, 0, {0, 1}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_cut_begins_at_its_first_unit_on_both_sides(void **state) {
    (void)state;
    /* Local rank 1 wants heads 2 and 3 of a remote page with 4 heads, token before head, in rows of 32 bytes. */
    pair p = pair_of(attention(1, 4, 4), ENGINE(.tp_size = 2, .all = BLOCKS()),
                     ENGINE(.all = BLOCKS(.order = "L|BPNH")));
    kvf_plan *plan = plan_of(&p, 1);

    assert_int_equal(step_rule_count(plan), 1);
    assert_rule(plan, 0, RULE(.units = 2, .cell_bytes = 8, .local = {128, 8, 32}, .remote = {256, 32, 8}),
                {0, 16, 0, 0, {0, 1}}, {64, 144, 0, 0, {0, 1}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void strides_are_between_kernel_blocks(void **state) {
    (void)state;
    /* Local blocks of 4 tokens in 2 kernel blocks of 2: pages of 2 * 2 * 8 bytes. */
    pair p = pair_of(attention(1, 1, 4), ENGINE(.all = BLOCKS(.kernel_blocks_per_block = 2)),
                     ENGINE(.all = BLOCKS()));
    kvf_plan *plan = plan_of(&p, 0);

    assert_rule(plan, 0, RULE(.cell_bytes = 8, .local = {32, 8, 0}, .remote = {64, 8, 0}),
                {0, 0, 0, 0, {0, 1}}, {16, 32, 0, 0, {0, 1}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void each_token_share_has_a_rule_of_its_own(void **state) {
    (void)state;
    pair p = pair_of(latent(1), ENGINE(.all = BLOCKS()),
                     ENGINE(.tp_size = 2, .dcp_size = 2, .dcp_width = 4, .all = BLOCKS()));
    kvf_plan *plan = plan_of(&p, 0);

    assert_int_equal(step_rule_count(plan), 2);
    assert_rule(plan, 0,
                RULE(.source = 0, .cell_bytes = 8, .local = {32, 8, 0}, .remote = {32, 8, 0},
                     .remote_tokens = {0, 2, 4}),
                {0, 0, 0, 0, {0, 1}});
    assert_rule(plan, 1,
                RULE(.source = 1, .cell_bytes = 8, .local = {32, 8, 0}, .remote = {32, 8, 0},
                     .remote_tokens = {1, 2, 4}),
                {0, 0, 0, 0, {0, 1}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void the_rows_of_a_token_become_one_cell_where_they_are_neighbours(void **state) {
    (void)state;
    /* A token has two rows of 8 bytes; with the unit inside of the rows, they are 16 bytes apart. */
    kvf_part_desc part = PART(.name = "x", .units = 2, .cell_elements = 4, .rows_per_step = 2);
    kvf_group_desc group = {.name = "full", .parts = &part, .part_count = 1};
    pair same = pair_of(one_group(1, group), ENGINE(.all = BLOCKS()), ENGINE(.all = BLOCKS()));
    kvf_plan *wide = plan_of(&same, 0);
    assert_rule(wide, 0, RULE(.units = 2, .cell_bytes = 16, .local = {128, 16, 64}, .remote = {128, 16, 64}),
                {0, 0, 0, 0, {0, 1}});
    pair turned =
        pair_of(one_group(1, group), ENGINE(.all = BLOCKS()), ENGINE(.all = BLOCKS(.order = "L|BPNH")));
    kvf_plan *narrow = plan_of(&turned, 0);
    assert_rule(
        narrow, 0,
        RULE(.units = 2, .rows_per_step = 2, .cell_bytes = 8, .local = {128, 8, 64}, .remote = {128, 16, 8}),
        {0, 0, 0, 0, {0, 1}});
    kvf_plan_free(wide);
    kvf_plan_free(narrow);
    free_pair(&same);
    free_pair(&turned);
}

static void rules_are_found_by_source(void **state) {
    (void)state;
    pair p = pair_of(hybrid(1), ENGINE(.all = BLOCKS()), ENGINE(.tp_size = 2, .all = BLOCKS()));
    kvf_plan *plan = plan_of(&p, 0);

    kvf_range first = kvf_plan_source_rules(plan, 0), second = kvf_plan_source_rules(plan, 1);
    assert_int_equal(first.begin, 0);
    assert_int_equal(first.end, second.begin);
    assert_int_equal(second.end, kvf_plan_rule_count(plan));
    for (uint32_t i = 0; i < kvf_plan_rule_count(plan); i++)
        assert_int_equal(kvf_plan_get_rule(plan, i)->source, i >= first.end);
    kvf_plan_free(plan);
    free_pair(&p);
}

static void past_the_last_rule_and_source_there_is_none(void **state) {
    (void)state;
    pair p = pair_of(latent(1), ENGINE(.all = BLOCKS()), ENGINE(.all = BLOCKS()));
    kvf_plan *plan = plan_of(&p, 0);

    assert_null(kvf_plan_get_rule(plan, kvf_plan_rule_count(plan)));
    assert_range(kvf_plan_source_rules(plan, 1), 0, 0);
    kvf_plan_free(plan);
    free_pair(&p);
}

/* ---- fusing ---------------------------------------------------------------------------------- */

/* Local and remote have the same order and TP 1, so that everything that lies side by side on one side does so on the
 * other. */
static pair same_order(kvf_model *model, const char *order) {
    const kvf_engine_spec *spec = ENGINE(.all = BLOCKS(.order = order), .state = {.order = order});
    return pair_of(model, spec, spec);
}

static void neighbouring_heads_of_a_token_become_one_cell(void **state) {
    (void)state;
    /* Heads 2 and 3 of 4, token before head on both sides. */
    pair p = pair_of(attention(1, 4, 4), ENGINE(.tp_size = 2, .all = BLOCKS(.order = "L|BPNH")),
                     ENGINE(.all = BLOCKS(.order = "L|BPNH")));
    kvf_plan *plan = plan_of(&p, 1);

    assert_int_equal(step_rule_count(plan), 1);
    assert_rule(plan, 0, RULE(.cell_bytes = 16, .local = {128, 16, 0}, .remote = {256, 32, 0}),
                {0, 16, 0, 0, {0, 1}}, {64, 144, 0, 0, {0, 1}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void k_and_v_of_a_token_become_one_cell(void **state) {
    (void)state;
    pair p = same_order(attention(2, 2, 4), "L|BHNP");
    kvf_plan *plan = plan_of(&p, 0);

    assert_int_equal(step_rule_count(plan), 1);
    assert_rule(plan, 0, RULE(.units = 2, .cell_bytes = 16, .local = {128, 16, 64}, .remote = {128, 16, 64}),
                {0, 0, 0, 0, {0, 1}}, {0, 0, 1, 1, {1, 2}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void k_and_v_and_then_the_heads_become_one_cell(void **state) {
    (void)state;
    pair p = same_order(attention(1, 2, 4), "L|BNHP");
    kvf_plan *plan = plan_of(&p, 0);

    assert_int_equal(step_rule_count(plan), 1);
    assert_rule(plan, 0, RULE(.cell_bytes = 32, .local = {128, 32, 0}, .remote = {128, 32, 0}),
                {0, 0, 0, 0, {0, 1}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void layers_of_one_row_become_one_cell(void **state) {
    (void)state;
    pair p = same_order(attention(3, 2, 4), "BNLPH");
    kvf_plan *plan = plan_of(&p, 0);

    assert_int_equal(step_rule_count(plan), 1);
    assert_rule(plan, 0, RULE(.cell_bytes = 96, .local = {384, 96, 0}, .remote = {384, 96, 0}),
                {0, 0, 0, 0, {0, 3}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void layers_on_the_remote_side_only_stay_apart(void **state) {
    (void)state;
    pair p = pair_of(latent(2), ENGINE(.all = BLOCKS()), ENGINE(.all = BLOCKS(.order = "BNLPH")));
    kvf_plan *plan = plan_of(&p, 0);

    assert_rule(plan, 0, RULE(.cell_bytes = 8, .local = {32, 8, 0}, .remote = {64, 16, 0}),
                {0, 0, 0, 0, {0, 1}}, {0, 8, 1, 0, {1, 2}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void parts_that_are_neighbours_on_one_side_only_stay_apart(void **state) {
    (void)state;
    pair p = pair_of(attention(1, 1, 4), ENGINE(.all = BLOCKS(.order = "L|BHNP")),
                     ENGINE(.all = BLOCKS(.order = "LP|BNH")));
    kvf_plan *plan = plan_of(&p, 0);

    assert_rule(plan, 0, RULE(.cell_bytes = 8, .local = {64, 16, 0}, .remote = {32, 8, 0}),
                {0, 0, 0, 0, {0, 1}}, {8, 0, 0, 1, {0, 1}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void the_layers_of_a_block_lie_in_one_page(void **state) {
    (void)state;
    pair p = same_order(latent(3), "BLHNP");
    kvf_plan *plan = plan_of(&p, 0);

    assert_rule(plan, 0,
                RULE(.cell_bytes = 8, .local = {96, 8, 0}, .remote = {96, 8, 0}, .lanes_per_page = 3),
                {0, 0, 0, 0, {0, 1}}, {32, 32, 0, 0, {1, 2}}, {64, 64, 0, 0, {2, 3}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void lanes_a_page_apart_or_more_are_not_in_one_page(void **state) {
    (void)state;
    /* Layers are 64 bytes apart on both sides: two local pages of 32, but half a remote page of 128. */
    pair p = pair_of(latent(2), ENGINE(.all = {.tokens_per_block = 4, .block_count = 2, .order = "LBPHN"}),
                     ENGINE(.all = {.tokens_per_block = 8, .block_count = 2, .order = "BLPHN"}));
    kvf_plan *plan = plan_of(&p, 0);

    assert_rule(plan, 0, RULE(.cell_bytes = 8, .local = {32, 8, 0}, .remote = {128, 8, 0}),
                {0, 0, 0, 0, {0, 1}}, {64, 64, 0, 0, {1, 2}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_whole_state_becomes_one_cell(void **state) {
    (void)state;
    /* conv.x, conv.B and conv.C of a step, then the steps, then ssm: 48 + 64 bytes; local pages are padded.
     */
    pair p =
        pair_of(state_model(1), ENGINE(.state = {.block_count = 8, .order = "L|BTNPH", .page_bytes = 128}),
                ENGINE(.state = {.block_count = 8, .order = "L|BTNPH"}));
    kvf_plan *plan = plan_of(&p, 0);

    assert_int_equal(step_rule_count(plan), 1);
    assert_rule(plan, 0, RULE(.cell_bytes = 112, .local = {128, 0, 0}, .remote = {112, 0, 0}),
                {0, 0, 0, 0, {0, 1}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_whole_state_ordered_by_channel_becomes_one_cell_too(void **state) {
    (void)state;
    pair p = same_order(state_model(1), "L|BTPHN");
    kvf_plan *plan = plan_of(&p, 0);

    assert_int_equal(step_rule_count(plan), 1);
    assert_rule(plan, 0, RULE(.cell_bytes = 112, .local = {112, 0, 0}, .remote = {112, 0, 0}),
                {0, 0, 0, 0, {0, 1}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void half_a_state_is_moved_projection_by_projection(void **state) {
    (void)state;
    /* Remote steps: | x0 x1 B0 C0 | of 8 bytes, 24 in all, ssm at 24. Local steps of 16, ssm at 48. */
    pair p = pair_of(state_model(1), ENGINE(.state = {.block_count = 8, .order = "L|BTNPH"}),
                     ENGINE(.tp_size = 2, .state = {.block_count = 8, .order = "L|BTNPH"}));
    kvf_plan *plan = plan_of(&p, 0);

    assert_int_equal(step_rule_count(plan), 6);
    assert_rule(plan, 0,
                RULE(.rows_per_step = 3, .cell_bytes = 2, .local = {112, 16, 0}, .remote = {56, 8, 0}),
                {8, 4, 0, 0, {0, 1}}, {12, 6, 0, 0, {0, 1}});
    assert_rule(plan, 1,
                RULE(.rows_per_step = 3, .cell_bytes = 4, .local = {112, 16, 0}, .remote = {56, 8, 0}),
                {0, 0, 0, 0, {0, 1}});
    assert_rule(plan, 2, RULE(.cell_bytes = 32, .local = {112, 0, 0}, .remote = {56, 0, 0}),
                {48, 24, 0, 0, {0, 1}});
    assert_rule(
        plan, 3,
        RULE(.source = 1, .rows_per_step = 3, .cell_bytes = 2, .local = {112, 16, 0}, .remote = {56, 8, 0}),
        {10, 4, 0, 0, {0, 1}}, {14, 6, 0, 0, {0, 1}});
    kvf_plan_free(plan);
    free_pair(&p);
}

/* ---- size ------------------------------------------------------------------------------------ */

/* 80 layers, 8 KV heads of 128 elements, TP 8 -> TP 4. */
static kvf_plan *large_plan(pair *p, uint64_t blocks) {
    *p = pair_of(attention(80, 8, 128), ENGINE(.tp_size = 4, .all = {.block_count = blocks}),
                 ENGINE(.tp_size = 8, .all = {.block_count = blocks, .order = "L|BPNH"}));
    return plan_of(p, 3);
}

/* ---- whole blocks ---------------------------------------------------------------------------- */

static void a_whole_page_is_one_cell_where_it_lies_alike_on_both_sides(void **state) {
    (void)state;
    /* K of 8 bytes and V of 16, 2 heads, 4 tokens: pages of 4 * 2 * 24 bytes, whatever the order inside. */
    static const char *const orders[] = {"L|BPHN", "L|BPNH", "L|BHPN", "L|BNHP", "L|BHNP", "L|BNPH"};
    kvf_part_desc parts[] = {PART(.name = "k", .units = 2, .cell_elements = 4),
                             PART(.name = "v", .units = 2, .cell_elements = 8)};
    kvf_model *model = one_group(1, (kvf_group_desc){.name = "full", .parts = parts, .part_count = 2});
    for (size_t i = 0; i < COUNT_OF(orders); i++) {
        pair p = same_order(kvf_model_retain(model), orders[i]);
        kvf_plan *plan = plan_of(&p, 0);
        assert_rule(
            plan, 0,
            RULE(.cell_bytes = 192, .local = {192, 0, 0}, .remote = {192, 0, 0}, .whole_blocks = true),
            {0, 0, 0, 0, {0, 1}});
        assert_null(nth_rule(plan, true, 1));
        kvf_plan_free(plan);
        free_pair(&p);
    }
    kvf_model_free(model);
}

static void whole_pages_of_neighbouring_layers_are_one_cell(void **state) {
    (void)state;
    pair p = same_order(attention(3, 2, 4), "BHLNP");
    kvf_plan *plan = plan_of(&p, 0);
    assert_rule(plan, 0,
                RULE(.cell_bytes = 384, .local = {384, 0, 0}, .remote = {384, 0, 0}, .whole_blocks = true),
                {0, 0, 0, 0, {0, 3}});
    kvf_plan_free(plan);
    free_pair(&p);
}

static void blocks_of_different_size_are_never_whole(void **state) {
    (void)state;
    pair p =
        pair_of(latent(1), ENGINE(.all = BLOCKS()), ENGINE(.all = {.tokens_per_block = 8, .block_count = 8}));
    kvf_plan *plan = plan_of(&p, 0);
    assert_int_equal(kvf_plan_rule_count(plan), step_rule_count(plan));
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_large_model_takes_a_rule_a_source_and_less_than_64_kib(void **state) {
    (void)state;
    pair p;
    kvf_plan *plan = large_plan(&p, 10000);

    assert_int_equal(kvf_plan_source_count(plan), 2);
    assert_int_equal(step_rule_count(plan), 2);
    assert_int_equal(step_rule(plan, 0)->lane_count, 160);
    assert_int_equal(step_rule(plan, 1)->lane_count, 160);
    assert_in_range(kvf_plan_memory_bytes(plan), 320 * sizeof(kvf_copy_lane), 2 * 65536);
    assert_ok(kvf_plan_verify(plan));
    kvf_plan_free(plan);
    free_pair(&p);
}

static void the_size_of_a_plan_does_not_depend_on_the_number_of_blocks(void **state) {
    (void)state;
    pair few_blocks, many_blocks;
    kvf_plan *few = large_plan(&few_blocks, 1), *many = large_plan(&many_blocks, 1000000);

    assert_int_equal(kvf_plan_memory_bytes(few), kvf_plan_memory_bytes(many));
    kvf_plan_free(few);
    kvf_plan_free(many);
    free_pair(&few_blocks);
    free_pair(&many_blocks);
}

/* ---- prediction ------------------------------------------------------------------------------ */

/* Two layers; each source fills one head of K and V, block by block. */
static pair two_into_one(void) {
    return pair_of(attention(2, 2, 4), ENGINE(.all = BLOCKS()),
                   ENGINE(.tp_size = 2, .all = BLOCKS(.order = "L|BPNH")));
}

static void assert_prediction(const kvf_plan *plan, uint32_t source, uint64_t tokens, uint64_t bytes,
                              uint64_t runs) {
    kvf_prediction got = {.struct_size = sizeof got};
    assert_ok(kvf_plan_predict(plan, source, tokens, NULL, &got));
    assert_int_equal(got.bytes, bytes);
    assert_int_equal(got.runs, runs);
    assert_true(got.ns == 0);
}

static void a_prediction_counts_bytes_runs_and_their_cost(void **state) {
    (void)state;
    pair p = two_into_one();
    kvf_plan *plan = plan_of(&p, 0);
    kvf_cost_model cost = {.ns_per_run = 5, .ns_per_byte = 0.5, .ns_per_source = 100};
    kvf_prediction got = {.struct_size = sizeof got};

    /* 10 tokens in 3 blocks, 8 bytes each for K and V of 2 layers. */
    assert_ok(kvf_plan_predict(plan, 1, 10, &cost, &got));

    assert_int_equal(got.bytes, 320);
    assert_int_equal(got.runs, 12);
    assert_true(got.ns == 100 + 12 * 5 + 320 * 0.5);
    cost.reserved[4] = 2;
    assert_fails(kvf_plan_predict(plan, 1, 10, &cost, &got), KVF_E_INVALID, "reserved[4]", "2");
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_prediction_takes_as_many_tokens_as_32_bits_count(void **state) {
    (void)state;
    const kvf_engine_spec *spec =
        ENGINE(.all = {.tokens_per_block = 1u << 24, .block_count = 1, .order = "L|BNPH"});
    pair p = pair_of(attention(1, 1, 4), spec, spec);
    kvf_plan *plan = plan_of(&p, 0);
    kvf_prediction got = {.struct_size = sizeof got};
    assert_prediction(plan, 0, UINT32_MAX, UINT32_MAX * UINT64_C(16),
                      256); /* 256 blocks, K and V side by side */
    assert_fails(kvf_plan_predict(plan, 0, UINT64_C(1) << 32, NULL, &got), KVF_E_RANGE,
                 "tokens is 4294967296", "up to 4294967295");
    assert_fails(kvf_plan_predict(plan, 0, UINT64_MAX, NULL, &got), KVF_E_RANGE, "18446744073709551615");
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_head_slice_of_each_token_is_a_run_of_its_own(void **state) {
    (void)state;
    pair p = pair_of(attention(1, 4, 4), ENGINE(.tp_size = 2, .all = BLOCKS(.order = "L|BPNH")),
                     ENGINE(.all = BLOCKS(.order = "L|BPNH")));
    kvf_plan *plan = plan_of(&p, 0);
    assert_prediction(plan, 0, 10, 10 * 2 * 16, 20);
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_whole_page_is_one_run_and_a_part_of_it_several(void **state) {
    (void)state;
    pair p = same_order(attention(2, 2, 4), "L|BPHN");
    kvf_plan *plan = plan_of(&p, 0);
    assert_prediction(plan, 0, 8, 512, 4); /* 2 blocks in 2 layers */
    assert_prediction(plan, 0, 2, 128, 8); /* 2 heads of 2 parts in 2 layers */
    assert_prediction(plan, 0, 10, 640, 12);
    kvf_plan_free(plan);
    free_pair(&p);
}

static void blocks_of_different_sizes_are_cut_at_both(void **state) {
    (void)state;
    pair p = pair_of(latent(1), ENGINE(.all = BLOCKS()), ENGINE(.all = BLOCKS_OF_6()));
    kvf_plan *plan = plan_of(&p, 0);
    assert_prediction(plan, 0, 10, 80, 4);
    kvf_plan_free(plan);
    free_pair(&p);
}

static void only_what_is_inside_the_window_counts(void **state) {
    (void)state;
    kvf_model *model = latent_of(1, (kvf_group_desc){.name = "swa", .window_tokens = 4});
    pair p = same_order(model, "L|BPHN");
    kvf_plan *plan = plan_of(&p, 0);
    assert_prediction(plan, 0, 10, 32, 2); /* tokens 6 7 | 8 9 */
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_state_counts_once_whatever_the_number_of_tokens(void **state) {
    (void)state;
    pair p = same_order(state_model(2), "L|BTNPH");
    kvf_plan *plan = plan_of(&p, 0);
    assert_prediction(plan, 0, 100000, 224, 2);
    assert_prediction(plan, 0, 0, 224, 2);
    kvf_plan_free(plan);
    free_pair(&p);
}

static void no_tokens_cost_nothing(void **state) {
    (void)state;
    pair p = same_order(latent(1), "L|BPHN");
    kvf_plan *plan = plan_of(&p, 0);
    assert_prediction(plan, 0, 0, 0, 0);
    kvf_plan_free(plan);
    free_pair(&p);
}

static void layers_that_touch_are_one_run(void **state) {
    (void)state;
    /* A cache of a single block: layer 1 begins where layer 0 ends. */
    const kvf_engine_spec *spec = ENGINE(.all = {.tokens_per_block = 4, .block_count = 1, .order = "LBPHN"});
    pair p = pair_of(latent(2), spec, spec);
    kvf_plan *plan = plan_of(&p, 0);
    assert_prediction(plan, 0, 4, 64, 1);
    kvf_plan_free(plan);
    free_pair(&p);
}

static kvf_shard *uneven_pages(const kvf_model *model) {
    /* K and V touch in layer 0, but not in layer 1. */
    const kvf_part_share parts[] = {{{0, 1}, 0, 1}, {{0, 1}, 0, 1}};
    const kvf_placement places[] = {PLACED(0, 0, 128, 8, 8), PLACED(0, 32, 128, 8, 8),
                                    PLACED(1, 0, 128, 8, 8), PLACED(1, 40, 128, 8, 8)};
    const uint64_t bytes[] = {1024, 1024};
    kvf_group_shard_desc group = {
        .tokens_per_block = 4, .block_count = 8, .parts = parts, .placements = places};
    kvf_shard_desc desc = {.struct_size = sizeof desc,
                           .layers = {0, 2},
                           .region_bytes = bytes,
                           .region_count = 2,
                           .groups = &group};
    kvf_shard *shard = NULL;
    assert_ok(kvf_shard_create(model, &desc, &shard));
    return shard;
}

static void layers_with_parts_at_different_distances_are_counted_one_by_one(void **state) {
    (void)state;
    kvf_model *model = attention(2, 1, 4);
    kvf_shard *local = uneven_pages(model), *remote = uneven_pages(model);
    kvf_engine *engine = NULL;
    kvf_plan *plan = NULL;
    assert_ok(kvf_engine_from_shards(model, NULL, &remote, 1, &engine));
    assert_ok(kvf_plan_build(local, engine, NULL, &plan));

    assert_prediction(plan, 0, 8, 256, 2 * 1 + 2 * 2); /* two blocks of either layer */

    kvf_plan_free(plan);
    kvf_engine_free(engine);
    kvf_shard_free(local);
    kvf_model_free(model);
}

static void a_source_that_does_not_exist_has_no_prediction(void **state) {
    (void)state;
    pair p = two_into_one();
    kvf_plan *plan = plan_of(&p, 0);
    kvf_prediction got = {.bytes = 7};
    assert_fails(kvf_plan_predict(plan, 2, 10, NULL, &got), KVF_E_RANGE, "source is 2", "the plan has 2");
    assert_fails(kvf_plan_predict(NULL, 0, 10, NULL, &got), KVF_E_INVALID, "plan is NULL");
    assert_int_equal(got.bytes, 7);
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_prediction_is_what_a_request_over_scattered_blocks_counts(void **state) {
    (void)state;
    static const char *const orders[] = {"L|BPHN", "L|BPNH", "LP|BNH", "L|BHNP", "LBPHN", "BLHNP", "BNLPH"};
    const kvf_block_table scattered = TABLE(0, 2, 4, 6, 8, 10);
    kvf_model *model = attention(2, 4, 4);
    for (size_t i = 0; i < COUNT_OF(orders) * COUNT_OF(orders); i++) {
        kvf_group_spec local = {
            .tokens_per_block = 4, .block_count = 12, .order = orders[i % COUNT_OF(orders)]};
        kvf_group_spec remote = {.tokens_per_block = 4, .kernel_blocks_per_block = 2, .block_count = 12};
        remote.order = orders[i / COUNT_OF(orders)];
        pair p = pair_of(kvf_model_retain(model), ENGINE(.tp_size = 1 + (uint32_t)(i % 2), .all = local),
                         ENGINE(.all = remote));
        kvf_plan *plan = plan_of(&p, 0);
        kvf_request *request = request_of(plan);
        for (uint64_t tokens = 1; tokens <= 24; tokens += 5) {
            kvf_group_request wanted = {scattered, scattered, 0, tokens};
            assert_ok(kvf_request_set(request, &wanted, 1));
            assert_prediction(plan, 0, tokens, kvf_request_bytes(request, 0),
                              kvf_request_run_count(request, 0));
        }
        kvf_request_free(request);
        kvf_plan_free(plan);
        free_pair(&p);
    }
    kvf_model_free(model);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static kvf_status make_plan(void *subject) {
    const pair *p = subject;
    kvf_plan *plan = NULL;
    kvf_status status = kvf_plan_build(kvf_engine_shard(p->local, 0), p->remote, NULL, &plan);
    if (status)
        assert_null(plan);
    kvf_plan_free(plan);
    return status;
}

static void a_plan_survives_every_refused_allocation(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    pair p = pair_of(
        hybrid(2), ENGINE(.all = BLOCKS()),
        ENGINE(.tp_size = 2, .pp_size = 2, .all = BLOCKS(.order = "L|BNPH"), .state = {.order = "L|BTNPH"}));

    survive_every_refusal(&memory, make_plan, &p);

    free_pair(&p);
    assert_int_equal(memory.live, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_shapes_give_one_rule_with_a_lane_for_each_layer_and_part),
        cmocka_unit_test(two_sources_fill_their_heads_of_a_page),
        cmocka_unit_test(a_cut_begins_at_its_first_unit_on_both_sides),
        cmocka_unit_test(strides_are_between_kernel_blocks),
        cmocka_unit_test(each_token_share_has_a_rule_of_its_own),
        cmocka_unit_test(the_rows_of_a_token_become_one_cell_where_they_are_neighbours),
        cmocka_unit_test(rules_are_found_by_source),
        cmocka_unit_test(past_the_last_rule_and_source_there_is_none),
        cmocka_unit_test(neighbouring_heads_of_a_token_become_one_cell),
        cmocka_unit_test(k_and_v_of_a_token_become_one_cell),
        cmocka_unit_test(k_and_v_and_then_the_heads_become_one_cell),
        cmocka_unit_test(layers_of_one_row_become_one_cell),
        cmocka_unit_test(layers_on_the_remote_side_only_stay_apart),
        cmocka_unit_test(parts_that_are_neighbours_on_one_side_only_stay_apart),
        cmocka_unit_test(the_layers_of_a_block_lie_in_one_page),
        cmocka_unit_test(lanes_a_page_apart_or_more_are_not_in_one_page),
        cmocka_unit_test(a_whole_state_becomes_one_cell),
        cmocka_unit_test(a_whole_state_ordered_by_channel_becomes_one_cell_too),
        cmocka_unit_test(half_a_state_is_moved_projection_by_projection),
        cmocka_unit_test(a_whole_page_is_one_cell_where_it_lies_alike_on_both_sides),
        cmocka_unit_test(whole_pages_of_neighbouring_layers_are_one_cell),
        cmocka_unit_test(blocks_of_different_size_are_never_whole),
        cmocka_unit_test(a_large_model_takes_a_rule_a_source_and_less_than_64_kib),
        cmocka_unit_test(the_size_of_a_plan_does_not_depend_on_the_number_of_blocks),
        cmocka_unit_test(a_prediction_counts_bytes_runs_and_their_cost),
        cmocka_unit_test(a_prediction_takes_as_many_tokens_as_32_bits_count),
        cmocka_unit_test(a_head_slice_of_each_token_is_a_run_of_its_own),
        cmocka_unit_test(a_whole_page_is_one_run_and_a_part_of_it_several),
        cmocka_unit_test(blocks_of_different_sizes_are_cut_at_both),
        cmocka_unit_test(only_what_is_inside_the_window_counts),
        cmocka_unit_test(a_state_counts_once_whatever_the_number_of_tokens),
        cmocka_unit_test(no_tokens_cost_nothing),
        cmocka_unit_test(layers_that_touch_are_one_run),
        cmocka_unit_test(layers_with_parts_at_different_distances_are_counted_one_by_one),
        cmocka_unit_test(a_source_that_does_not_exist_has_no_prediction),
        cmocka_unit_test(a_prediction_is_what_a_request_over_scattered_blocks_counts),
        cmocka_unit_test_teardown(a_plan_survives_every_refused_allocation, stop_counting_memory),
    };
    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
