/*
 * A published hybrid model on two engines that cut its pages differently: attention and state share memory, a logical
 * block has as many kernel blocks as the state needs, and each engine has its own such number.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include <kvferry/request.h>

#define KERNEL_TOKENS 16u

enum { FULL = 0, SSM = 1 };

/* One page of a rank, of K or of V: 16 tokens of `heads` heads of 128 bf16 elements. */
static uint64_t page_bytes(uint32_t heads) {
    return (uint64_t)KERNEL_TOKENS * heads * 128 * 2;
}

static kvf_status build(const kvf_model *model, uint32_t tp_size, uint32_t heads, uint32_t kernel_blocks,
                        kvf_engine **out) {
    kvf_group_spec groups[] = {
        {.tokens_per_block = KERNEL_TOKENS * kernel_blocks,
         .kernel_blocks_per_block = kernel_blocks,
         .block_count = 8,
         .order = "LP|BHN",
         .page_bytes = page_bytes(heads)},
        {.block_count = 8, .page_bytes = page_bytes(heads) * kernel_blocks},
    };
    kvf_engine_spec spec = {
        .struct_size = sizeof spec, .tp_size = tp_size, .groups = groups, .share_pages = true};
    return kvf_engine_build(model, &spec, out);
}

static kvf_model *nemotron(void) {
    kvf_model *model;
    assert_int_equal(kvf_model_load("nemotron-3-nano-30b", NULL, &model), KVF_OK);
    assert_int_equal(kvf_model_group_count(model), 2);
    assert_int_equal(kvf_model_group(model, SSM)->kind, KVF_GROUP_STATE);
    return model;
}

static void a_logical_block_has_131_kernel_blocks_at_tp_4_and_261_at_tp_1(void **state) {
    (void)state;
    kvf_model *model = nemotron();
    kvf_engine *engine;

    /* 2 KV heads: each rank has one at TP 4. With one kernel block less, the state does not fit its page. */
    assert_int_equal(build(model, 4, 1, 130, &engine), KVF_E_RANGE);
    assert_non_null(strstr(kvf_error_detail(), "page_bytes"));
    assert_int_equal(build(model, 1, 2, 260, &engine), KVF_E_RANGE);
    assert_int_equal(build(model, 4, 1, 131, &engine), KVF_OK);
    kvf_engine_free(engine);
    assert_int_equal(build(model, 1, 2, 261, &engine), KVF_OK);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void both_ratios_meet_in_one_request(void **state) {
    (void)state;
    kvf_model *model = nemotron();
    kvf_engine *prefill, *decode;
    kvf_plan *plan;
    kvf_request *request;
    assert_int_equal(build(model, 4, 1, 131, &prefill), KVF_OK);
    assert_int_equal(build(model, 1, 2, 261, &decode), KVF_OK);
    assert_int_equal(kvf_plan_build(kvf_engine_shard(decode, 0), prefill, NULL, &plan), KVF_OK);
    assert_int_equal(kvf_plan_verify(plan), KVF_OK);
    assert_int_equal(kvf_request_create(plan, &request), KVF_OK);

    /* 5000 tokens: 3 remote blocks of 2096, 2 local blocks of 4176; on both sides the state is in one block of its
     * own. */
    uint32_t theirs[] = {4, 1, 6}, ours[] = {7, 2}, their_state[] = {3}, our_state[] = {5};
    kvf_group_request wanted[] = {
        {.local = {ours, 2, 0}, .remote = {theirs, 3, 0}, .end = 5000},
        {.local = {our_state, 1, 0}, .remote = {their_state, 1, 0}, .end = 1},
    };
    assert_int_equal(kvf_request_set(request, wanted, 2), KVF_OK);

    const kvf_group_desc *full = kvf_model_group(model, FULL), *ssm = kvf_model_group(model, SSM);
    uint64_t bytes = 0;
    for (uint32_t source = 0; source < kvf_plan_source_count(plan); source++)
        bytes += kvf_request_bytes(request, source);
    assert_int_equal(bytes, 5000 * kvf_group_step_bytes(full) * full->layer_count +
                                kvf_group_step_bytes(ssm) * ssm->layer_count);

    /* The heads come from two ranks and the state from all four: each group has its own sources. */
    uint32_t attention = 0, recurrent = 0;
    for (uint32_t i = 0; i < kvf_plan_cut_count(plan); i++) {
        const kvf_plan_cut *cut = kvf_plan_get_cut(plan, i);
        uint32_t rank_bit = 1u << kvf_plan_source_rank(plan, cut->source);
        if (cut->group == FULL)
            attention |= rank_bit;
        else
            recurrent |= rank_bit;
    }
    assert_int_equal(attention, 0x5);
    assert_int_equal(recurrent, 0xf);

    kvf_request_free(request);
    kvf_plan_free(plan);
    kvf_engine_free(decode);
    kvf_engine_free(prefill);
    kvf_model_free(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_logical_block_has_131_kernel_blocks_at_tp_4_and_261_at_tp_1),
        cmocka_unit_test(both_ratios_meet_in_one_request),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
