/*
 * What must be refused for models with attention and state, each with one sentence: sizes that ranks cannot share,
 * pages that are too small, block counts that are no whole number of logical blocks, and peers whose groups differ.
 */
#include <stdio.h>

#include <kvferry/connector/descriptors.h>

#include "shapes.h"

static kvf_model *shipped(const char *name) {
    kvf_model *model = NULL;
    assert_ok(kvf_model_load(name, NULL, &model));
    return model;
}

/* ---- sizes that ranks cannot share ----------------------------------------------------------- */

static const kvf_state_model nemotron = {.struct_size = sizeof nemotron,
                                         .type = KVF_STATE_MAMBA2,
                                         .intermediate_size = 4096,
                                         .groups = 8,
                                         .heads = 64,
                                         .head_size = 64,
                                         .state_size = 128,
                                         .conv_kernel = 4};

static const kvf_state_model jamba = {.struct_size = sizeof jamba,
                                      .type = KVF_STATE_MAMBA1,
                                      .intermediate_size = 8192,
                                      .state_size = 16,
                                      .conv_kernel = 4};

static const kvf_state_model qwen = {.struct_size = sizeof qwen,
                                     .type = KVF_STATE_GDN,
                                     .heads = 32,
                                     .head_size = 128,
                                     .key_heads = 16,
                                     .key_head_size = 128,
                                     .conv_kernel = 4};

static void channels_and_heads_that_a_tp_size_cannot_share_are_named(void **state) {
    (void)state;
    kvf_state_model odd_heads = nemotron, odd_values = qwen;
    odd_heads.heads = 32;
    odd_heads.intermediate_size = 3 * 4096;
    odd_values.heads = 31;
    odd_values.head_size = 96;
    const struct {
        const kvf_state_model *model;
        uint32_t tp_size;
        const char *words;
    } cases[] = {
        {&jamba, 3, "intermediate_size is 8192; 1/3 of it is not a whole number"},
        {&nemotron, 3, "intermediate_size is 4096; 1/3 of it is not a whole number"},
        {&odd_heads, 3, "heads is 32; 1/3 of it is not a whole number"},
        {&qwen, 3, "the channels of Q, K and V is 8192; 1/3 of it is not a whole number"},
        {&odd_values, 2, "heads is 31; 1/2 of it is not a whole number"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        kvf_state_shape shape = {.conv = {77, 77}};
        assert_fails(kvf_state_shape_of(cases[i].model, cases[i].tp_size, &shape), KVF_E_NOT_EXPRESSIBLE,
                     cases[i].words);
        assert_int_equal(kvf_topology_refusal(), KVF_REFUSAL_LENGTH_NOT_DIVISIBLE);
        assert_int_equal(shape.conv[0], 77);
    }
}

static void a_conv_state_that_does_not_come_apart_is_refused(void **state) {
    (void)state;
    kvf_state_shape shape = {.conv = {4097, 3}, .temporal = {64, 64, 128}, .temporal_dimensions = 3};
    kvf_state_layout layout;
    assert_fails(kvf_conv_split(KVF_STATE_MAMBA2, &shape, 2, 4, &layout), KVF_E_NOT_EXPRESSIBLE,
                 "conv has 4097 channels and the state 4096");
    shape.conv[0] = 4095;
    assert_fails(kvf_conv_split(KVF_STATE_GDN, &shape, 2, 4, &layout), KVF_E_NOT_EXPRESSIBLE,
                 "conv has 4095 channels and the state 4096");
    assert_int_equal(kvf_topology_refusal(), KVF_REFUSAL_CONV_NOT_DECOMPOSABLE);
}

/* The public connectors' view of state refuses this TP size, but an engine with such a layout still has a plan. */
static void a_tp_size_that_the_view_refuses_has_a_plan_all_the_same(void **state) {
    (void)state;
    kvf_state_shape shape;
    assert_int_equal(kvf_state_shape_of(&jamba, 3, &shape), KVF_E_NOT_EXPRESSIBLE);
    const kvf_engine_spec three = {.struct_size = sizeof three, .tp_size = 3, .all = {.block_count = 4}};
    kvf_engine_spec two = three;
    two.tp_size = 2;
    pair p = pair_of(shipped("jamba-1.5-mini"), &two, &three);
    for (uint32_t rank = 0; rank < 2; rank++) {
        kvf_plan *plan = plan_of(&p, rank);
        assert_ok(kvf_plan_verify(plan));
        assert_int_equal(kvf_plan_source_count(plan), 2);
        kvf_plan_free(plan);
    }
    free_pair(&p);
}

static void token_shares_that_ranks_of_a_hybrid_cannot_have_are_refused(void **state) {
    (void)state;
    kvf_model *model = shipped("nemotron-3-nano-30b");
    kvf_engine *engine = NULL;
    /* 2 KV heads: at TP 2 each head has one holder, so there is nobody to share its tokens with; at TP 4 each has
     * two. */
    assert_fails(
        kvf_engine_build(model, ENGINE(.tp_size = 2, .dcp_size = 2, .all = {.block_count = 4}), &engine),
        KVF_E_INVALID, "group full", "dcp_size is 2", "part k");
    assert_null(engine);
    assert_ok(
        kvf_engine_build(model, ENGINE(.tp_size = 4, .dcp_size = 2, .all = {.block_count = 4}), &engine));
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* ---- pages ----------------------------------------------------------------------------------- */

static kvf_status build_with_pages(const char *name, uint32_t tp_size, kvf_group_spec all,
                                   kvf_group_spec state) {
    kvf_model *model = shipped(name);
    kvf_engine *engine = NULL;
    all.block_count = 4;
    kvf_status status =
        kvf_engine_build(model, ENGINE(.tp_size = tp_size, .all = all, .state = state), &engine);
    assert_true((status == KVF_OK) == (engine != NULL));
    kvf_engine_free(engine);
    kvf_model_free(model);
    return status;
}

static void a_page_that_is_smaller_than_its_state_is_refused(void **state) {
    (void)state;
    /* conv: 6144 channels x 3 x 2 bytes; state: 64 heads x 64 x 128 x 4 bytes: 2134016 bytes, over the ranks
     */
    const struct {
        uint32_t tp_size;
        uint64_t content;
    } cases[] = {{1, 2134016}, {2, 1067008}, {4, 533504}, {8, 266752}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char given[64], content[64];
        (void)snprintf(given, sizeof given, "page_bytes is %llu", (unsigned long long)cases[i].content - 1);
        (void)snprintf(content, sizeof content, "%llu bytes of content",
                       (unsigned long long)cases[i].content);
        kvf_group_spec page = {.page_bytes = cases[i].content};
        assert_ok(build_with_pages("nemotron-3-nano-30b", cases[i].tp_size, (kvf_group_spec){0}, page));
        page.page_bytes--;
        assert_fails(build_with_pages("nemotron-3-nano-30b", cases[i].tp_size, (kvf_group_spec){0}, page),
                     KVF_E_RANGE, "group ssm", given, content);
        page.order = "L|BTNPH"; /* the content has the same size in any order */
        assert_fails(build_with_pages("nemotron-3-nano-30b", cases[i].tp_size, (kvf_group_spec){0}, page),
                     KVF_E_RANGE, "group ssm", given, content);
        page.page_align = 4096; /* the check comes before the page is rounded up */
        assert_fails(build_with_pages("nemotron-3-nano-30b", cases[i].tp_size, (kvf_group_spec){0}, page),
                     KVF_E_RANGE, "group ssm", given, content);
    }
}

static void a_page_that_is_smaller_than_its_tokens_is_refused_whatever_the_states(void **state) {
    (void)state;
    /* 16 tokens x 2 heads x 128 x 2 bytes, K and V */
    assert_fails(build_with_pages("nemotron-3-nano-30b", 1, (kvf_group_spec){.page_bytes = 16383},
                                  (kvf_group_spec){.page_bytes = 4 << 20}),
                 KVF_E_RANGE, "group full", "page_bytes is 16383", "16384 bytes of content");
    /* 16 heads on 3 ranks: the last rank has 6, each of 256 x 2 bytes. A page that fits the other ranks is too small
     * for it.
     */
    assert_fails(
        build_with_pages("gemma-4-31b", 3, (kvf_group_spec){.page_bytes = 98303}, (kvf_group_spec){0}),
        KVF_E_RANGE, "group swa", "page_bytes is 98303", "98304 bytes of content");
    assert_ok(build_with_pages("gemma-4-31b", 3, (kvf_group_spec){.page_bytes = 98304}, (kvf_group_spec){0}));
}

static void a_state_is_one_kernel_block(void **state) {
    (void)state;
    assert_fails(build_with_pages("nemotron-3-nano-30b", 1, (kvf_group_spec){0},
                                  (kvf_group_spec){.kernel_blocks_per_block = 2}),
                 KVF_E_INVALID, "group ssm", "kernel_blocks_per_block is 2", "does not divide");
}

/* ---- block counts ---------------------------------------------------------------------------- */

/* 9 kernel blocks, 2 for each logical block: the last logical block is half a block. */
static void a_block_count_that_is_no_multiple_of_the_ratio_is_refused_on_either_side(void **state) {
    (void)state;
    kvf_state_shape shape;
    kvf_state_layout layout;
    assert_ok(kvf_state_shape_of(&nemotron, 1, &shape));
    assert_ok(kvf_conv_split(KVF_STATE_MAMBA2, &shape, 2, 4, &layout));
    kvf_cache_memory odd = {.struct_size = sizeof odd,
                            .region_base = (uint64_t[]){1 << 30},
                            .region_block_bytes = (uint64_t[]){layout.conv_bytes + layout.ssm_bytes},
                            .region_count = 1,
                            .num_blocks = 9,
                            .physical_per_logical = 2,
                            .state = &layout};
    kvf_cache_memory even = odd;
    even.num_blocks = 10;
    kvf_topology_desc local = {.struct_size = sizeof local,
                               .engine_id = "decode",
                               .tp_size = 1,
                               .block_size = 16,
                               .total_kv_heads = 2};
    kvf_engine_transfer_info remote = {
        .struct_size = sizeof remote, .tp_size = 1, .block_size = 16, .physical_blocks_per_logical = 2};
    const char *words = "9 kernel blocks are not a whole number of logical blocks of 2";
    kvf_topology *topology;
    kvf_descriptor_table table = {0};
    assert_ok(kvf_topology_create(&local, &topology));

    uint64_t states = 0;
    assert_fails(kvf_state_blocks(9, 2, &states), KVF_E_NOT_EXPRESSIBLE, words);
    assert_fails(kvf_local_descriptors(&odd, KVF_LAYOUT_PACKED, 1, &table), KVF_E_NOT_EXPRESSIBLE, words);
    assert_fails(kvf_local_state_descriptors(&odd, &table), KVF_E_NOT_EXPRESSIBLE, words);
    assert_fails(kvf_remote_state_descriptors(topology, &remote, &layout, &odd, 0, &table),
                 KVF_E_NOT_EXPRESSIBLE, words);
    assert_null(table.at);

    static const kvf_cache_kind kinds[] = {KVF_CACHE_FULL, KVF_CACHE_SSM};
    for (uint32_t wrong = 0; wrong < 3; wrong++) {
        kvf_engine_transfer_plan_desc desc = {.struct_size = sizeof desc,
                                              .layout = KVF_LAYOUT_PACKED,
                                              .kinds = kinds,
                                              .group_count = 2,
                                              .local = wrong == 1 ? &odd : &even,
                                              .remote_ranks = wrong == 2 ? &odd : &even};
        kvf_engine_transfer_plan *plan = NULL;
        kvf_status status = kvf_engine_transfer_plan_build(topology, &remote, &desc, &plan);
        if (wrong)
            assert_fails(status, KVF_E_NOT_EXPRESSIBLE, words);
        else
            assert_ok(status);
        assert_true((plan != NULL) == (wrong == 0));
        kvf_engine_transfer_plan_free(plan);
    }
    kvf_topology_free(topology);
}

/* A table lists logical blocks, so the half block at the end of such a cache has no number. */
static void a_kernel_block_beyond_the_last_whole_block_has_no_number(void **state) {
    (void)state;
    pair p = pair_of(attention(1, 1, 4),
                     ENGINE(.all = {.tokens_per_block = 4, .kernel_blocks_per_block = 2, .block_count = 4}),
                     ENGINE(.all = {.tokens_per_block = 4, .kernel_blocks_per_block = 2, .block_count = 4}));
    kvf_plan *plan = plan_of(&p, 0);
    kvf_request *request = request_of(plan);
    kvf_group_request wanted = {.local = TABLE(3), .remote = TABLE(4), .end = 4};
    assert_fails(kvf_request_set(request, &wanted, 1), KVF_E_RANGE, "4");
    wanted.remote = TABLE(3);
    assert_ok(kvf_request_set(request, &wanted, 1));
    kvf_request_free(request);
    kvf_plan_free(plan);
    free_pair(&p);
}

/* ---- peers ----------------------------------------------------------------------------------- */

/* How a model differs from hybrid(): a group is left out, is of another kind, has other layers or fewer parts, or the
 * groups change places. */
typedef enum difference {
    NO_STATE,
    SWAPPED,
    STATE_AS_TOKENS,
    OTHER_LAYERS,
    FEWER_PROJECTIONS,
} difference;

static kvf_model *different(difference how) {
    static const uint32_t even[] = {0, 2}, odd[] = {1, 3}, last[] = {2, 3};
    kvf_part_desc kv[] = {PART(.name = "k", .units = 1, .cell_elements = 4),
                          PART(.name = "v", .units = 1, .cell_elements = 4)};
    kvf_part_desc parts[4];
    fill_state_parts(parts);
    kvf_group_desc full = {.name = "full", .layers = even, .layer_count = 2, .parts = kv, .part_count = 2};
    kvf_group_desc ssm = {.name = "ssm",
                          .kind = how == STATE_AS_TOKENS ? KVF_GROUP_TOKENS : KVF_GROUP_STATE,
                          .layers = how == OTHER_LAYERS ? last : odd,
                          .layer_count = 2,
                          .parts = parts,
                          .part_count = how == FEWER_PROJECTIONS ? 3 : 4};
    kvf_group_desc groups[] = {how == SWAPPED ? ssm : full, how == SWAPPED ? full : ssm};
    return model_of(4, groups, how == NO_STATE ? 1 : 2);
}

static const struct {
    difference how;
    const char *words;   /* words of the comparison between hybrid() and this model */
    const char *of_plan; /* words of the plan's error; NULL: the plan succeeds */
} differences[] = {
    {NO_STATE, "group_count is 2 on one side and 1 on the other", "group ssm is missing remotely"},
    {SWAPPED, "group 0 (full): name is \"full\" on one side and \"ssm\" on the other", NULL},
    {STATE_AS_TOKENS, "group 1 (ssm): kind is \"state\" on one side and \"tokens\" on the other",
     "ssm.kind is \"state\" locally and \"tokens\" remotely"},
    {OTHER_LAYERS, "group 1 (ssm): layers[0] is 1 on one side and 2 on the other",
     "ssm.layers 1 are missing remotely; ssm.layers 2 are missing locally"},
    {FEWER_PROJECTIONS, "group 1 (ssm): part_count is 4 on one side and 3 on the other",
     "ssm.ssm is missing remotely"},
};

static const kvf_engine_spec small = {.struct_size = sizeof small, .all = {.block_count = 4}};

static void a_peer_whose_groups_differ_is_refused_where_they_are_wanted(void **state) {
    (void)state;
    kvf_model *ours = hybrid(1);
    kvf_engine *local = engine_of(ours, &small);
    for (size_t i = 0; i < COUNT_OF(differences); i++) {
        kvf_model *theirs = different(differences[i].how);
        kvf_engine *remote = engine_of(theirs, &small);
        assert_fails(kvf_model_compare(ours, theirs), KVF_E_MISMATCH, differences[i].words);

        kvf_plan *plan = NULL;
        kvf_status status = kvf_plan_build(kvf_engine_shard(local, 0), remote, NULL, &plan);
        if (differences[i].of_plan)
            assert_fails(status, KVF_E_MISMATCH, differences[i].of_plan);
        else
            assert_ok(status);
        assert_int_equal(plan != NULL, !differences[i].of_plan);
        kvf_plan_free(plan);
        kvf_engine_free(remote);
        kvf_model_free(theirs);
    }
    kvf_engine_free(local);
    kvf_model_free(ours);
}

/* The shard of a rank that holds nothing. */
static kvf_shard *empty_shard(const kvf_model *model, uint32_t rank) {
    kvf_part_share shares[4] = {{.units = {0, 0}}};
    kvf_group_shard_desc groups[2] = {
        {.tokens_per_block = 1, .block_count = 1, .parts = shares},
        {.tokens_per_block = 1, .block_count = 1, .parts = shares},
    };
    kvf_shard_desc desc = {.struct_size = sizeof desc, .rank = rank, .layers = {0, 0}, .groups = groups};
    kvf_shard *shard = NULL;
    assert_ok(kvf_shard_create(model, &desc, &shard));
    return shard;
}

static void a_rank_whose_groups_differ_makes_no_engine_with_the_others(void **state) {
    (void)state;
    kvf_model *ours = hybrid(1);
    for (size_t i = 0; i < COUNT_OF(differences); i++) {
        kvf_model *theirs = different(differences[i].how);
        kvf_shard *shards[] = {empty_shard(ours, 0), empty_shard(theirs, 1)};
        kvf_engine *engine = NULL;
        assert_fails(kvf_engine_from_shards(ours, "prefill", shards, 2, &engine), KVF_E_MISMATCH, "rank 1",
                     differences[i].words);
        assert_null(engine);
        kvf_shard_free(shards[0]);
        kvf_shard_free(shards[1]);
        kvf_model_free(theirs);
    }
    kvf_model_free(ours);
}

static void a_request_must_speak_of_every_group(void **state) {
    (void)state;
    pair p = pair_of(hybrid(1), &small, &small);
    kvf_plan *plan = plan_of(&p, 0);
    kvf_request *request = request_of(plan);
    kvf_group_request wanted[3] = {{.local = TABLE(0), .remote = TABLE(0), .end = 1},
                                   {.local = TABLE(1), .remote = TABLE(1), .end = 1}};
    assert_fails(kvf_request_set(request, wanted, 1), KVF_E_INVALID, "1", "2");
    assert_fails(kvf_request_set(request, wanted, 3), KVF_E_INVALID, "3", "2");
    assert_ok(kvf_request_set(request, wanted, 2));
    kvf_request_free(request);
    kvf_plan_free(plan);
    free_pair(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(channels_and_heads_that_a_tp_size_cannot_share_are_named),
        cmocka_unit_test(a_conv_state_that_does_not_come_apart_is_refused),
        cmocka_unit_test(a_tp_size_that_the_view_refuses_has_a_plan_all_the_same),
        cmocka_unit_test(token_shares_that_ranks_of_a_hybrid_cannot_have_are_refused),
        cmocka_unit_test(a_page_that_is_smaller_than_its_state_is_refused),
        cmocka_unit_test(a_page_that_is_smaller_than_its_tokens_is_refused_whatever_the_states),
        cmocka_unit_test(a_state_is_one_kernel_block),
        cmocka_unit_test(a_block_count_that_is_no_multiple_of_the_ratio_is_refused_on_either_side),
        cmocka_unit_test(a_kernel_block_beyond_the_last_whole_block_has_no_number),
        cmocka_unit_test(a_peer_whose_groups_differ_is_refused_where_they_are_wanted),
        cmocka_unit_test(a_rank_whose_groups_differ_makes_no_engine_with_the_others),
        cmocka_unit_test(a_request_must_speak_of_every_group),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
