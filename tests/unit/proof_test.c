/*
 * The proof of a plan: it holds for the planner's plans, and finds each way of spoiling a plan.
 */
#include "plan/plan.h"
#include "shapes.h"

#define BLOCKS(...)                                                                                          \
    { .tokens_per_block = 4, .block_count = 8, __VA_ARGS__ }
#define BLOCKS_OF_6(...)                                                                                     \
    { .tokens_per_block = 6, .block_count = 8, __VA_ARGS__ }

static void plans_between_any_two_orders_hold(void **state) {
    (void)state;
    static const char *const orders[] = {"L|BPHN", "L|BPNH", "LP|BNH", "L|BHNP", "LBPHN",
                                         "BLHNP",  "BNLPH",  "P|LBNH", "NBLHP"};
    kvf_model *model = attention(2, 4, 4);
    for (size_t i = 0; i < COUNT_OF(orders); i++) {
        for (size_t j = 0; j < COUNT_OF(orders); j++) {
            pair p = pair_of(kvf_model_retain(model), ENGINE(.tp_size = 2, .all = BLOCKS(.order = orders[i])),
                             ENGINE(.tp_size = 3, .all = BLOCKS_OF_6(.order = orders[j])));
            kvf_plan *plan = plan_of(&p, 1);
            assert_ok(kvf_plan_verify(plan));
            kvf_plan_free(plan);
            free_pair(&p);
        }
    }
    kvf_model_free(model);
}

static void plans_between_any_two_orders_of_a_state_hold(void **state) {
    (void)state;
    static const char *const orders[] = {"L|BTNPH", "L|BTPHN", "L|BTPNH", "LT|BNPH", "BTLPHN", "L|BTNHP"};
    kvf_part_desc parts[] = {PART(.name = "q", .units = 4, .cell_elements = 1, .rows_per_step = 3),
                             PART(.name = "k", .units = 4, .cell_elements = 1, .rows_per_step = 3),
                             PART(.name = "rec", .units = 2, .cell_elements = 16, .tensor = 1)};
    kvf_model *model = one_group(
        2, (kvf_group_desc){.name = "gdn", .kind = KVF_GROUP_STATE, .parts = parts, .part_count = 3});
    for (size_t i = 0; i < COUNT_OF(orders) * COUNT_OF(orders); i++) {
        pair p = pair_of(kvf_model_retain(model),
                         ENGINE(.state = {.block_count = 8, .order = orders[i % COUNT_OF(orders)]}),
                         ENGINE(.tp_size = 1 + (uint32_t)(i % 2),
                                .state = {.block_count = 8, .order = orders[i / COUNT_OF(orders)]}));
        kvf_plan *plan = plan_of(&p, 0);
        assert_ok(kvf_plan_verify(plan));
        kvf_plan_free(plan);
        free_pair(&p);
    }
    kvf_model_free(model);
}

/* The n-th rule that moves steps, for a test to spoil. */
#define RULE_OF(plan, n) (*(kvf_copy_rule *)step_rule((plan), (n)))

/* A plan with two sources, and for each a rule with the lanes K and V of layers 0 and 1: each test spoils a plan of its
 * own. */
typedef struct proven {
    pair p;
    kvf_plan *plan;
} proven;

static int set_up_proven(void **state) {
    proven *s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->p = pair_of(attention(2, 2, 4), ENGINE(.all = BLOCKS(.page_bytes = 192)),
                   ENGINE(.tp_size = 2, .all = BLOCKS(.order = "L|BPNH")));
    s->plan = plan_of(&s->p, 0);
    assert_ok(kvf_plan_verify(s->plan));
    *state = s;
    return 0;
}

static int tear_down_proven(void **state) {
    proven *s = *state;
    kvf_plan_free(s->plan);
    free_pair(&s->p);
    free(s);
    return 0;
}

static void a_wrong_remote_offset_is_found(void **state) {
    kvf_plan *plan = ((proven *)*state)->plan;
    plan->lanes[3].remote_offset += 8; /* V of layer 1, of rule 0 */
    assert_fails(kvf_plan_verify(plan), KVF_E_MISMATCH, "group full, layer 1, part v, row 0, unit 0",
                 "wrong address", "remote rank 0");
}

static void a_wrong_remote_region_is_found(void **state) {
    kvf_plan *plan = ((proven *)*state)->plan;
    plan->lanes[0].remote_region = 1;
    assert_fails(kvf_plan_verify(plan), KVF_E_MISMATCH, "layer 0, part k", "wrong address");
}

static void a_wrong_local_offset_leaves_a_cell_out(void **state) {
    kvf_plan *plan = ((proven *)*state)->plan;
    plan->lanes[0].local_offset += 8;
    assert_fails(kvf_plan_verify(plan), KVF_E_UNCOVERED, "layer 0, part k, row 0, unit 0",
                 "no rule writes the cell");
}

static void a_wrong_local_region_leaves_a_cell_out(void **state) {
    kvf_plan *plan = ((proven *)*state)->plan;
    plan->lanes[0].local_region = 1;
    assert_fails(kvf_plan_verify(plan), KVF_E_UNCOVERED, "layer 0, part k", "no rule writes the cell");
}

static void a_missing_lane_is_found(void **state) {
    kvf_plan *plan = ((proven *)*state)->plan;
    RULE_OF(plan, 1).lane_count--;
    assert_fails(kvf_plan_verify(plan), KVF_E_UNCOVERED, "layer 1, part v, row 0, unit 1",
                 "no rule writes the cell");
}

static void a_missing_rule_is_found(void **state) {
    kvf_plan *plan = ((proven *)*state)->plan;
    RULE_OF(plan, 1).group = 9;
    assert_fails(kvf_plan_verify(plan), KVF_E_UNCOVERED, "layer 0, part k, row 0, unit 1");
}

static void a_missing_rule_of_whole_blocks_is_found(void **state) {
    kvf_plan *plan = ((proven *)*state)->plan;
    assert_true(plan->rules[plan->rule_count - 1].whole_blocks);
    plan->rule_count--;
    assert_fails(kvf_plan_verify(plan), KVF_E_UNCOVERED, "layer 0, part k, row 0, unit 1",
                 "no rule writes the cell");
}

static void a_row_of_a_whole_block_that_is_read_from_another_is_found(void **state) {
    kvf_plan *plan = ((proven *)*state)->plan;
    kvf_copy_rule *whole = &plan->rules[plan->rule_count - 1];
    assert_true(whole->whole_blocks);
    whole->lanes_per_page = 1;
    ((kvf_copy_lane *)whole->lanes)[0].remote_offset += 8;
    assert_fails(kvf_plan_verify(plan), KVF_E_MISMATCH, "part k, row 0, unit 1", "wrong address");
}

static void a_lane_in_place_of_another_is_found(void **state) {
    kvf_plan *plan = ((proven *)*state)->plan;
    plan->lanes[1] = plan->lanes[0];
    assert_fails(kvf_plan_verify(plan), KVF_E_OVERLAP, "layer 0, part k, row 0, unit 0", "written twice");
}

static void a_lane_that_comes_twice_is_found(void **state) {
    kvf_plan *plan = ((proven *)*state)->plan;
    kvf_copy_lane lanes[5];
    memcpy(lanes, plan->lanes, 4 * sizeof *lanes);
    lanes[4] = lanes[2];
    RULE_OF(plan, 0).lanes = lanes;
    RULE_OF(plan, 0).lane_count = 5;
    assert_fails(kvf_plan_verify(plan), KVF_E_OVERLAP, "layer 1, part k, row 0, unit 0", "written twice");
}

static void a_lane_that_writes_what_nobody_wants_is_found(void **state) {
    kvf_plan *plan = ((proven *)*state)->plan;
    kvf_copy_lane lanes[5];
    memcpy(lanes, plan->lanes, 4 * sizeof *lanes);
    lanes[4] = lanes[0];
    lanes[4].local_offset = 128; /* the padding of the page */
    RULE_OF(plan, 0).lanes = lanes;
    RULE_OF(plan, 0).lane_count = 5;
    assert_fails(kvf_plan_verify(plan), KVF_E_OVERLAP, "group full", "write 72 bytes a step",
                 "its cells have 64");
}

static void wrong_strides_between_rows_and_blocks_are_found(void **state) {
    kvf_plan *plan = ((proven *)*state)->plan;
    uint64_t *strides[] = {&RULE_OF(plan, 0).local.block, &RULE_OF(plan, 0).local.row,
                           &RULE_OF(plan, 0).remote.block, &RULE_OF(plan, 0).remote.row};
    for (size_t i = 0; i < COUNT_OF(strides); i++) {
        uint64_t right = *strides[i];
        *strides[i] = right + 8;
        assert_fails(kvf_plan_verify(plan), KVF_E_MISMATCH, "layer 0, part k, row 0, unit 0",
                     "in the first block only");
        *strides[i] = right;
    }
    assert_ok(kvf_plan_verify(plan));
}

static void wrong_strides_between_units_are_found(void **state) {
    (void)state;
    pair p = pair_of(attention(1, 2, 4), ENGINE(.all = BLOCKS()), ENGINE(.all = BLOCKS(.order = "L|BPNH")));
    kvf_plan *plan = plan_of(&p, 0);
    kvf_copy_rule *rule = &RULE_OF(plan, 0);
    rule->remote.unit = 16;
    assert_fails(kvf_plan_verify(plan), KVF_E_MISMATCH, "part k, row 0, unit 1", "wrong address");
    rule->remote.unit = 8;
    rule->local.unit = 40;
    assert_fails(kvf_plan_verify(plan), KVF_E_UNCOVERED, "part k, row 0, unit 1", "no rule writes the cell");
    rule->local.unit = 0;
    assert_fails(kvf_plan_verify(plan), KVF_E_UNCOVERED, "part k, row 0, unit 1", "no rule writes the cell");
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_missing_unit_is_found(void **state) {
    (void)state;
    pair p = pair_of(attention(1, 2, 4), ENGINE(.all = BLOCKS()), ENGINE(.all = BLOCKS(.order = "L|BPNH")));
    kvf_plan *plan = plan_of(&p, 0);
    RULE_OF(plan, 0).units = 1;
    assert_fails(kvf_plan_verify(plan), KVF_E_UNCOVERED, "part k, row 0, unit 1", "no rule writes the cell");
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_cell_that_is_cut_short_or_too_long_is_found(void **state) {
    kvf_plan *plan = ((proven *)*state)->plan;
    RULE_OF(plan, 0).cell_bytes = 4;
    assert_fails(kvf_plan_verify(plan), KVF_E_MISMATCH, "layer 0, part k, row 0, unit 0", "wrong address");
    RULE_OF(plan, 0).cell_bytes = 16; /* writes over the next token */
    assert_fails(kvf_plan_verify(plan), KVF_E_OVERLAP, "write 96 bytes a step", "its cells have 64");
}

static void a_wrong_rank_is_found(void **state) {
    kvf_plan *plan = ((proven *)*state)->plan;
    plan->source_ranks[0] = 1;
    assert_fails(kvf_plan_verify(plan), KVF_E_MISMATCH, "layer 0, part k, row 0, unit 0",
                 "from a rank that does not hold it", "remote rank 1");
}

static void a_missing_step_of_a_state_is_found(void **state) {
    (void)state;
    pair p = pair_of(state_model(1), ENGINE(.state = {.block_count = 8, .order = "L|BTNPH"}),
                     ENGINE(.tp_size = 2, .state = {.block_count = 8, .order = "L|BTNPH"}));
    kvf_plan *plan = plan_of(&p, 0);
    RULE_OF(plan, 1).rows_per_step = 2; /* conv.x of source 0 */
    assert_fails(kvf_plan_verify(plan), KVF_E_UNCOVERED, "group ssm, layer 0, part conv.x, row 2, unit 0");
    RULE_OF(plan, 1).rows_per_step = 3;
    RULE_OF(plan, 1).remote.row = 10;
    assert_fails(kvf_plan_verify(plan), KVF_E_MISMATCH, "part conv.x, row 1, unit 0", "wrong address");
    kvf_plan_free(plan);
    free_pair(&p);
}

/* Even tokens from source 0, odd ones from source 1. */
static kvf_plan *shared_plan(pair *p) {
    *p = pair_of(latent(1), ENGINE(.all = BLOCKS()), ENGINE(.tp_size = 2, .dcp_size = 2, .all = BLOCKS()));
    return plan_of(p, 0);
}

static void a_rule_with_the_tokens_of_another_share_is_found(void **state) {
    (void)state;
    pair p;
    kvf_plan *plan = shared_plan(&p);
    RULE_OF(plan, 0).remote_tokens.index = 1;
    assert_fails(kvf_plan_verify(plan), KVF_E_MISMATCH, "part latent", "does not hold it", "remote rank 0");
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_rule_that_walks_the_tokens_of_another_share_is_found(void **state) {
    (void)state;
    pair p;
    kvf_plan *plan = shared_plan(&p);
    plan->rule_walks[0] = 1;
    plan->rule_walks[1] = 0;
    assert_fails(kvf_plan_verify(plan), KVF_E_MISMATCH, "part latent", "tokens are those of another share",
                 "remote rank 0");
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_walk_over_blocks_of_another_size_is_found(void **state) {
    kvf_plan *plan = ((proven *)*state)->plan;
    plan->walks[0].remote.kernel_steps = 8;
    assert_fails(kvf_plan_verify(plan), KVF_E_MISMATCH, "layer 0, part k", "another share or block size");
    plan->walks[0].remote.kernel_steps = 4;
    plan->walks[0].local.kernel_steps = 2;
    assert_fails(kvf_plan_verify(plan), KVF_E_MISMATCH, "layer 0, part k", "another share or block size");
}

static void a_walk_over_shares_of_another_width_is_found(void **state) {
    (void)state;
    pair p;
    kvf_plan *plan = shared_plan(&p);
    plan->walks[1].remote.share.width = 2;
    assert_fails(kvf_plan_verify(plan), KVF_E_MISMATCH, "part latent", "another share", "remote rank 1");
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_rule_that_walks_the_blocks_of_another_group_is_found(void **state) {
    (void)state;
    static const uint32_t layers[] = {0, 1};
    kvf_part_desc part = PART(.name = "latent", .units = 1, .cell_elements = 4);
    kvf_group_desc groups[] = {
        {.name = "a", .layers = layers, .layer_count = 1, .parts = &part, .part_count = 1},
        {.name = "b", .layers = layers + 1, .layer_count = 1, .parts = &part, .part_count = 1}};
    pair p = pair_of(model_of(2, groups, 2), ENGINE(.all = BLOCKS()), ENGINE(.all = BLOCKS()));
    kvf_plan *plan = plan_of(&p, 0);
    plan->rule_walks[step_rule(plan, 1) - plan->rules] = 0;
    assert_fails(kvf_plan_verify(plan), KVF_E_MISMATCH, "group b, layer 1, part latent");
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_share_that_nobody_reads_is_found(void **state) {
    (void)state;
    pair p;
    kvf_plan *plan = shared_plan(&p);
    RULE_OF(plan, 1).lane_count = 0;
    assert_fails(kvf_plan_verify(plan), KVF_E_UNCOVERED, "part latent, row 0, unit 0",
                 "no rule writes the cell");
    kvf_plan_free(plan);
    free_pair(&p);
}

static void there_is_no_proof_of_nothing(void **state) {
    (void)state;
    assert_fails(kvf_plan_verify(NULL), KVF_E_INVALID, "plan is NULL");
}

static kvf_status make_proof(void *subject) {
    return kvf_plan_verify(subject);
}

static void a_proof_survives_a_refused_allocation(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    pair p;
    kvf_plan *plan = shared_plan(&p);

    survive_every_refusal(&memory, make_proof, plan);

    kvf_plan_free(plan);
    free_pair(&p);
    assert_int_equal(memory.live, 0);
}

#define PROOF_TEST(test) cmocka_unit_test_setup_teardown(test, set_up_proven, tear_down_proven)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plans_between_any_two_orders_hold),
        cmocka_unit_test(plans_between_any_two_orders_of_a_state_hold),
        PROOF_TEST(a_wrong_remote_offset_is_found),
        PROOF_TEST(a_wrong_remote_region_is_found),
        PROOF_TEST(a_wrong_local_offset_leaves_a_cell_out),
        PROOF_TEST(a_wrong_local_region_leaves_a_cell_out),
        PROOF_TEST(a_missing_lane_is_found),
        PROOF_TEST(a_missing_rule_is_found),
        PROOF_TEST(a_missing_rule_of_whole_blocks_is_found),
        PROOF_TEST(a_row_of_a_whole_block_that_is_read_from_another_is_found),
        PROOF_TEST(a_lane_in_place_of_another_is_found),
        PROOF_TEST(a_lane_that_comes_twice_is_found),
        PROOF_TEST(a_lane_that_writes_what_nobody_wants_is_found),
        PROOF_TEST(wrong_strides_between_rows_and_blocks_are_found),
        cmocka_unit_test(wrong_strides_between_units_are_found),
        cmocka_unit_test(a_missing_unit_is_found),
        PROOF_TEST(a_cell_that_is_cut_short_or_too_long_is_found),
        PROOF_TEST(a_wrong_rank_is_found),
        cmocka_unit_test(a_missing_step_of_a_state_is_found),
        cmocka_unit_test(a_rule_with_the_tokens_of_another_share_is_found),
        cmocka_unit_test(a_rule_that_walks_the_tokens_of_another_share_is_found),
        PROOF_TEST(a_walk_over_blocks_of_another_size_is_found),
        cmocka_unit_test(a_walk_over_shares_of_another_width_is_found),
        cmocka_unit_test(a_rule_that_walks_the_blocks_of_another_group_is_found),
        cmocka_unit_test(a_share_that_nobody_reads_is_found),
        cmocka_unit_test(there_is_no_proof_of_nothing),
        cmocka_unit_test_teardown(a_proof_survives_a_refused_allocation, stop_counting_memory),
    };
    return cmocka_run_group_tests_name("proof", tests, NULL, NULL);
}
