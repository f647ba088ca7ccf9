/* The per-group plan: checks cell by cell that the pieces it names move the right cells; and what it refuses. */
#include <kvferry/connector/page_groups.h>

#include "topology_shapes.h"

/* One group on both sides; the cells of a page are ordered [head][token]. */
typedef struct page_case {
    uint32_t tp, rank, remote_tp, heads, local_tokens, remote_tokens;
    uint64_t prompt, cached_pages;
} page_case;

/* The cell of piece `piece`, entry `k`, in a page of `heads` heads and `tokens` tokens. */
static cell page_cell(uint64_t id, uint64_t pieces, uint64_t cells_per_piece, uint64_t k, uint64_t first_head,
                      uint64_t tokens) {
    uint64_t index = id % pieces * cells_per_piece + k;
    return (cell){id / pieces, first_head + index / tokens, index % tokens};
}

static void check_page_read(const page_case *p, const kvf_page_plan *plan, kvf_range local_heads) {
    uint64_t pages = (p->prompt + p->local_tokens - 1) / p->local_tokens - p->cached_pages;
    uint64_t remote_pages = (p->prompt + p->remote_tokens - 1) / p->remote_tokens;
    uint64_t head_count = local_heads.end - local_heads.begin, cells = head_count * p->local_tokens;
    uint64_t ids[64];
    for (uint64_t i = 0; i < 64; i++)
        ids[i] = i;
    kvf_ids ours = {ids, pages}, theirs = {ids, remote_pages};
    kvf_block_lists local = {&ours, 1}, remote = {&theirs, 1};
    unsigned char *filled = calloc(pages + 1, cells);
    uint64_t per_piece = cells / plan->local_to_remote_page_ratio;
    for (size_t s = 0; s < plan->all_source_ranks.count; s++) {
        uint64_t source = plan->all_source_ranks.at[s];
        kvf_range heads = heads_of_rank(p->remote_tp, p->heads, (uint32_t)source);
        kvf_block_lists a, b;
        assert_int_equal(kvf_page_plan_read(plan, p->prompt, &local, &remote, source, &a, &b), KVF_OK);
        assert_int_equal(a.groups[0].count, b.groups[0].count);
        for (size_t i = 0; i < a.groups[0].count; i++)
            for (uint64_t k = 0; k < per_piece; k++) {
                cell to = page_cell(a.groups[0].at[i], plan->local_to_remote_page_ratio, per_piece, k,
                                    local_heads.begin, p->local_tokens);
                cell from = page_cell(b.groups[0].at[i], plan->remote_to_local_page_ratio, per_piece, k,
                                      heads.begin, p->remote_tokens);
                assert_int_equal(to.head, from.head);
                assert_int_equal((to.block + p->cached_pages) * p->local_tokens + to.token,
                                 from.block * p->remote_tokens + from.token);
                filled[to.block * cells + (to.head - local_heads.begin) * p->local_tokens + to.token]++;
            }
        kvf_block_lists_free(&a);
        kvf_block_lists_free(&b);
    }
    for (uint64_t at = 0; at < pages * cells; at++) {
        uint64_t token = (at / cells + p->cached_pages) * p->local_tokens + at % p->local_tokens;
        assert_in_range(filled[at], token < p->prompt, 1);
    }
    free(filled);
}

static bool check_page_case(const page_case *p) {
    kvf_range local_heads = heads_of_rank(p->tp, p->heads, p->rank),
              remote_heads = heads_of_rank(p->remote_tp, p->heads, 0);
    kvf_page_group group = {p->heads, p->local_tokens, p->remote_tokens};
    kvf_page_plan_desc desc = {
        .struct_size = sizeof desc,
        .tp_size = p->tp,
        .tp_rank = p->rank,
        .remote_tp_size = p->remote_tp,
        .groups = &group,
        .group_count = 1,
        .local_page_bytes = (uint64_t)(local_heads.end - local_heads.begin) * p->local_tokens,
        .remote_page_bytes = (uint64_t)(remote_heads.end - remote_heads.begin) * p->remote_tokens,
        .layer_count = 1,
        .remote_num_blocks = 64};
    kvf_page_plan plan;
    kvf_status status = kvf_page_plan_build(&desc, &plan);
    if (status) {
        assert_int_equal(status, KVF_E_NOT_EXPRESSIBLE);
        return false;
    }
    check_page_read(p, &plan, local_heads);
    kvf_page_plan_free(&plan);
    return true;
}

static void page_plans_that_are_made_move_every_cell_to_its_place(void **state) {
    (void)state;
    static const uint64_t prompts[] = {16, 24, 70, 128};
    unsigned answered = 0, asked = 0;
    for (uint32_t tp = 1; tp <= 8; tp *= 2)
        for (uint32_t remote_tp = 1; remote_tp <= 8; remote_tp *= 2)
            for (uint32_t heads = 1; heads <= 16; heads *= 2)
                for (uint32_t sizes = 0; sizes < 9; sizes++)
                    for (uint32_t at = 0; at < 8; at++, asked++) {
                        page_case p = {.tp = tp,
                                       .rank = at % tp,
                                       .remote_tp = remote_tp,
                                       .heads = heads,
                                       .local_tokens = 8u << sizes % 3,
                                       .remote_tokens = 8u << sizes / 3,
                                       .prompt = prompts[at % 4],
                                       .cached_pages = at / 4 % 2};
                        answered += check_page_case(&p);
                    }
    assert_in_range(answered, asked / 2, asked - 1);
}

static void a_page_plan_without_layers_is_refused_as_such(void **state) {
    (void)state;
    kvf_page_group group = {.total_kv_heads = 2, .local_tokens_per_block = 16};
    kvf_page_plan_desc desc = {.struct_size = sizeof desc,
                               .tp_size = 1,
                               .remote_tp_size = 1,
                               .remote_block_size = 16,
                               .groups = &group,
                               .group_count = 1,
                               .local_page_bytes = 4096,
                               .remote_page_bytes = 4096,
                               .remote_num_blocks = 4};
    kvf_page_plan plan;
    assert_int_equal(kvf_page_plan_build(&desc, &plan), KVF_E_INVALID);
    assert_int_equal(kvf_topology_refusal(), KVF_REFUSAL_NO_LAYERS);
    desc.layer_count = 1;
    assert_int_equal(kvf_page_plan_build(&desc, &plan), KVF_OK);
    kvf_page_plan_free(&plan);
    const kvf_page_plan none = {0};
    assert_memory_equal(&plan, &none, sizeof plan); /* and may be freed again */
    kvf_page_plan_free(&plan);
    kvf_page_plan_free(NULL);
    desc.tp_rank = 1;
    assert_int_equal(kvf_page_plan_build(&desc, &plan), KVF_E_RANGE);
    desc.tp_size = desc.tp_rank = 0;
    assert_int_equal(kvf_page_plan_build(&desc, &plan), KVF_E_RANGE);
    desc.tp_size = 1;
    desc.group_count = 0;
    assert_int_equal(kvf_page_plan_build(&desc, &plan), KVF_E_INVALID);
    assert_int_equal(kvf_page_plan_build(NULL, &plan), KVF_E_INVALID);
    assert_int_equal(kvf_page_plan_build(&desc, NULL), KVF_E_INVALID);
}

static void each_group_of_a_page_plan_has_ratios_of_its_own(void **state) {
    (void)state;
    /* Eight small heads and two large ones in pages of one size. */
    kvf_page_group groups[] = {{8, 16, 16}, {2, 16, 32}};
    kvf_page_plan_desc desc = {.struct_size = sizeof desc,
                               .tp_size = 4,
                               .tp_rank = 1,
                               .remote_tp_size = 2,
                               .groups = groups,
                               .group_count = 2,
                               .local_page_bytes = 32768,
                               .remote_page_bytes = 65536,
                               .layer_count = 1,
                               .remote_num_blocks = 4};
    kvf_page_plan plan;
    assert_int_equal(kvf_page_plan_build(&desc, &plan), KVF_OK);
    assert_int_equal(plan.groups[0].local_blocks_per_remote_block, 1);
    assert_int_equal(plan.groups[0].remote_desc_offset, 1);
    assert_int_equal(plan.groups[1].local_blocks_per_remote_block, 2);
    assert_int_equal(plan.groups[1].remote_desc_offset, 0);
    kvf_page_plan_free(&plan);
}

static void a_remote_without_sizes_per_group_has_one_size_in_all(void **state) {
    (void)state;
    kvf_page_group told[] = {{8, 16, 16}, {2, 32, 16}}, silent[] = {{8, 16, 0}, {2, 32, 0}};
    kvf_page_plan_desc desc = {.struct_size = sizeof desc,
                               .tp_size = 2,
                               .remote_tp_size = 4,
                               .remote_block_size = 16,
                               .groups = told,
                               .group_count = 2,
                               .local_page_bytes = 65536,
                               .remote_page_bytes = 32768,
                               .layer_count = 1};
    kvf_page_plan a, b;
    assert_int_equal(kvf_page_plan_build(&desc, &a), KVF_OK);
    desc.groups = silent;
    assert_int_equal(kvf_page_plan_build(&desc, &b), KVF_OK);
    for (int g = 0; g < 2; g++)
        assert_int_equal(a.groups[g].remote_blocks_per_local_block,
                         b.groups[g].remote_blocks_per_local_block);
    kvf_page_plan_free(&a);
    kvf_page_plan_free(&b);
}

static void more_local_pages_than_the_prompt_fills_are_refused(void **state) {
    (void)state;
    kvf_page_group group = {8, 16, 16};
    kvf_page_plan_desc desc = {.struct_size = sizeof desc,
                               .tp_size = 2,
                               .remote_tp_size = 4,
                               .groups = &group,
                               .group_count = 1,
                               .local_page_bytes = 4096,
                               .remote_page_bytes = 2048,
                               .layer_count = 1};
    kvf_page_plan plan;
    kvf_ids ours = IDS(1, 2, 3), theirs = IDS(5, 6);
    kvf_block_lists local = {&ours, 1}, remote = {&theirs, 1}, a, b;
    assert_int_equal(kvf_page_plan_build(&desc, &plan), KVF_OK);
    assert_refused(kvf_page_plan_read(&plan, 32, &local, &remote, 0, &a, &b), KVF_E_RANGE,
                   KVF_REFUSAL_DECODE_LONGER_THAN_PREFILL);
    kvf_page_plan_free(&plan);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(page_plans_that_are_made_move_every_cell_to_its_place),
        cmocka_unit_test(a_page_plan_without_layers_is_refused_as_such),
        cmocka_unit_test(each_group_of_a_page_plan_has_ratios_of_its_own),
        cmocka_unit_test(a_remote_without_sizes_per_group_has_one_size_in_all),
        cmocka_unit_test(more_local_pages_than_the_prompt_fills_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
