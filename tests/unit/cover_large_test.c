/* Engines of thousands of ranks: the number of steps that finding the sources takes grows in proportion to the ranks.
 * The test counts steps. */
#include <stdio.h>

#include "plan/plan.h"
#include "shapes.h"

#define RANKS 20000u

/* Plans against an engine of so many ranks and token shares, and returns the steps taken. Many shares take longest. */
static uint64_t steps_of(uint32_t ranks, uint32_t shares, uint32_t *sources) {
    kvf_model *model = attention(2, 2, 4);
    kvf_engine *local = NULL, *remote = NULL;
    kvf_plan *plan = NULL;
    (void)shares;
    assert_ok(kvf_engine_build(model, ENGINE(.name = "D", .all = {.block_count = 4}), &local));
    assert_ok(kvf_engine_build(model,
                               ENGINE(.name = "P", .tp_size = ranks, .dcp_size = shares,
                                      .all = {.block_count = 4, .tokens_per_block = 16}),
                               &remote));
    assert_ok(kvf_plan_build_cover(kvf_engine_shard(local, 0), remote, NULL, &plan));
    uint64_t steps = plan->steps;
    *sources = kvf_plan_source_count(plan);
    kvf_plan_free(plan);
    kvf_engine_free(remote);
    kvf_engine_free(local);
    kvf_model_free(model);
    return steps;
}

static void twenty_thousand_shares_take_steps_in_proportion(void **state) {
    (void)state;
    uint32_t few, many;
    uint64_t some = steps_of(RANKS / 10, RANKS / 20, &few), all = steps_of(RANKS, RANKS / 2, &many);
    assert_int_equal(few, RANKS / 10);
    assert_int_equal(many, RANKS);
    assert_true(all <= 11 * some);
    assert_true(all <= 32 * (uint64_t)RANKS);
}

static void twenty_thousand_replicas_take_steps_in_proportion(void **state) {
    (void)state;
    uint32_t few, many;
    uint64_t some = steps_of(RANKS / 10, 1, &few), all = steps_of(RANKS, 1, &many);
    assert_int_equal(few, 2);
    assert_int_equal(many, 2);
    assert_true(all <= 11 * some);
    assert_true(all <= 32 * (uint64_t)RANKS);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(twenty_thousand_shares_take_steps_in_proportion),
        cmocka_unit_test(twenty_thousand_replicas_take_steps_in_proportion),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
