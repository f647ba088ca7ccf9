/*
 * Engines: which rank holds which units, layers and tokens, and engines that are made from given shards.
 */
#include "shapes.h"
#include "shard/shard.h"

static void assert_share(kvf_part_share share, uint32_t begin, uint32_t end, uint32_t replica,
                         uint32_t replica_count) {
    assert_range(share.units, begin, end);
    assert_int_equal(share.replica, replica);
    assert_int_equal(share.replica_count, replica_count);
}

static const kvf_group_shard_desc *group_of(const kvf_engine *engine, uint32_t rank, uint32_t group) {
    const kvf_shard *shard = kvf_engine_shard(engine, rank);
    assert_non_null(shard);
    return &kvf_shard_get(shard)->groups[group];
}

/* ---- units over tensor-parallel ranks -------------------------------------------------------- */

static void heads_are_split_evenly_where_they_divide(void **state) {
    (void)state;
    kvf_part_desc part = {.units = 8, .granule_units = 1};
    assert_share(kvf_tp_share(&part, 0, 1), 0, 8, 0, 1);
    assert_share(kvf_tp_share(&part, 0, 4), 0, 2, 0, 1);
    assert_share(kvf_tp_share(&part, 3, 4), 6, 8, 0, 1);
    assert_share(kvf_tp_share(&part, 5, 8), 5, 6, 0, 1);
}

static void heads_are_split_without_gaps_where_they_do_not_divide(void **state) {
    (void)state;
    kvf_part_desc part = {.units = 8, .granule_units = 1};
    assert_share(kvf_tp_share(&part, 0, 3), 0, 2, 0, 1);
    assert_share(kvf_tp_share(&part, 1, 3), 2, 5, 0, 1);
    assert_share(kvf_tp_share(&part, 2, 3), 5, 8, 0, 1);
}

static void neighbouring_ranks_share_a_head_where_there_are_more_ranks(void **state) {
    (void)state;
    kvf_part_desc part = {.units = 2, .granule_units = 1};
    assert_share(kvf_tp_share(&part, 0, 8), 0, 1, 0, 4);
    assert_share(kvf_tp_share(&part, 3, 8), 0, 1, 3, 4);
    assert_share(kvf_tp_share(&part, 4, 8), 1, 2, 0, 4);
    assert_share(kvf_tp_share(&part, 7, 8), 1, 2, 3, 4);
}

static void more_ranks_than_heads_need_not_be_a_multiple(void **state) {
    (void)state;
    /* Head rK/tp for 5 ranks and 3 heads: 0 0 1 1 2. */
    kvf_part_desc part = {.units = 3, .granule_units = 1};
    assert_share(kvf_tp_share(&part, 0, 5), 0, 1, 0, 2);
    assert_share(kvf_tp_share(&part, 1, 5), 0, 1, 1, 2);
    assert_share(kvf_tp_share(&part, 2, 5), 1, 2, 0, 2);
    assert_share(kvf_tp_share(&part, 3, 5), 1, 2, 1, 2);
    assert_share(kvf_tp_share(&part, 4, 5), 2, 3, 0, 1);
}

static void granules_are_never_cut(void **state) {
    (void)state;
    /* 4 heads of 16 channels over 3 ranks: 1, 1 and 2 heads. */
    kvf_part_desc part = {.units = 64, .granule_units = 16};
    assert_share(kvf_tp_share(&part, 0, 3), 0, 16, 0, 1);
    assert_share(kvf_tp_share(&part, 1, 3), 16, 32, 0, 1);
    assert_share(kvf_tp_share(&part, 2, 3), 32, 64, 0, 1);
    /* 8 ranks: whole heads, each on two ranks. */
    assert_share(kvf_tp_share(&part, 5, 8), 32, 48, 1, 2);
}

static void a_latent_is_kept_by_every_rank(void **state) {
    (void)state;
    kvf_part_desc part = {.units = 1, .granule_units = 1, .tp_rule = KVF_TP_REPLICATE};
    assert_share(kvf_tp_share(&part, 0, 1), 0, 1, 0, 1);
    assert_share(kvf_tp_share(&part, 2, 4), 0, 1, 2, 4);
}

static void every_part_of_a_group_is_shared_by_its_own_units(void **state) {
    (void)state;
    /* Attention with one head is on both ranks; the state of two heads is split. */
    kvf_model *model = hybrid(1);
    kvf_engine *engine = engine_of(model, ENGINE(.tp_size = 2, .all = {.block_count = 1}));

    assert_share(group_of(engine, 1, 0)->parts[0], 0, 1, 1, 2);
    assert_share(group_of(engine, 1, 1)->parts[0], 2, 4, 0, 1); /* conv.x */
    assert_share(group_of(engine, 1, 1)->parts[3], 1, 2, 0, 1); /* ssm */
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* ---- ranks and layers ------------------------------------------------------------------------ */

static void ranks_are_numbered_stage_by_stage(void **state) {
    (void)state;
    kvf_model *model = attention(4, 4, 4);
    kvf_engine *engine =
        engine_of(model, ENGINE(.name = "prefill", .tp_size = 2, .pp_size = 2, .all = {.block_count = 1}));

    assert_string_equal(kvf_engine_name(engine), "prefill");
    assert_ptr_equal(kvf_engine_model(engine), model);
    assert_int_equal(kvf_engine_rank_count(engine), 4);
    for (uint32_t rank = 0; rank < 4; rank++) {
        const kvf_shard_desc *desc = kvf_shard_get(kvf_engine_shard(engine, rank));
        assert_int_equal(desc->rank, rank);
        assert_int_equal(desc->tp_rank, rank % 2);
        assert_int_equal(desc->tp_size, 2);
        assert_int_equal(desc->pp_rank, rank / 2);
        assert_int_equal(desc->pp_size, 2);
        assert_range(desc->layers, 2 * (rank / 2), 2 * (rank / 2) + 2);
        assert_range(desc->groups[0].parts[0].units, 2 * (rank % 2), 2 * (rank % 2) + 2);
    }
    assert_null(kvf_engine_shard(engine, 4));
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void an_engine_keeps_its_model_alive(void **state) {
    (void)state;
    kvf_model *model = attention(1, 1, 4);
    kvf_engine *engine = engine_of(model, ENGINE(.all = {.block_count = 1}));
    kvf_model_free(model);

    assert_int_equal(kvf_model_layer_count(kvf_engine_model(engine)), 1);
    kvf_engine_free(engine);
}

static void freeing_no_engine_is_fine(void **state) {
    (void)state;
    kvf_engine_free(NULL);
}

static void sizes_that_are_left_out_are_one_and_blocks_have_16_tokens(void **state) {
    (void)state;
    kvf_model *model = hybrid(2);
    kvf_engine *engine = engine_of(model, ENGINE(.all = {.block_count = 5}));

    assert_string_equal(kvf_engine_name(engine), "engine");
    assert_int_equal(kvf_engine_rank_count(engine), 1);
    assert_int_equal(group_of(engine, 0, 0)->tokens_per_block, 16);
    assert_int_equal(group_of(engine, 0, 0)->kernel_blocks_per_block, 1);
    assert_int_equal(group_of(engine, 0, 0)->block_count, 5);
    assert_int_equal(group_of(engine, 0, 1)->tokens_per_block, 1);
    assert_int_equal(group_of(engine, 0, 1)->block_count, 5);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void groups_may_have_block_sizes_and_counts_of_their_own(void **state) {
    (void)state;
    kvf_model *model = hybrid(2);
    const kvf_group_spec groups[] = {{.tokens_per_block = 8, .kernel_blocks_per_block = 2, .block_count = 7},
                                     {.block_count = 3}};
    kvf_engine *engine =
        engine_of(model, ENGINE(.all = {.block_count = 5}, .state = {.block_count = 6}, .groups = groups));

    assert_int_equal(group_of(engine, 0, 0)->tokens_per_block, 8);
    assert_int_equal(group_of(engine, 0, 0)->kernel_blocks_per_block, 2);
    assert_int_equal(group_of(engine, 0, 0)->block_count, 7);
    assert_int_equal(group_of(engine, 0, 1)->tokens_per_block, 1);
    assert_int_equal(group_of(engine, 0, 1)->block_count, 3);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void state_groups_have_a_specification_of_their_own(void **state) {
    (void)state;
    kvf_model *model = hybrid(2);
    kvf_engine *engine =
        engine_of(model, ENGINE(.all = {.block_count = 5, .page_bytes = 4096},
                                .state = {.block_count = 2, .order = "L|BTNPH", .page_bytes = 128}));

    assert_int_equal(group_of(engine, 0, 1)->block_count, 2);
    assert_placement(kvf_engine_shard(engine, 0), 1, 0, 2, PLACED(2, 12, 128, 16, 2));
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void stages_are_as_even_as_they_go(void **state) {
    (void)state;
    kvf_model *model = attention(7, 1, 4);
    kvf_engine *engine = engine_of(model, ENGINE(.pp_size = 3, .all = {.block_count = 1}));

    assert_range(kvf_shard_get(kvf_engine_shard(engine, 0))->layers, 0, 2);
    assert_range(kvf_shard_get(kvf_engine_shard(engine, 1))->layers, 2, 4);
    assert_range(kvf_shard_get(kvf_engine_shard(engine, 2))->layers, 4, 7);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void stages_may_be_given(void **state) {
    (void)state;
    kvf_model *model = attention(7, 1, 4);
    const uint32_t layers[] = {4, 1, 2};
    kvf_engine *engine =
        engine_of(model, ENGINE(.pp_size = 3, .pp_layers = layers, .all = {.block_count = 1}));

    assert_range(kvf_shard_get(kvf_engine_shard(engine, 0))->layers, 0, 4);
    assert_range(kvf_shard_get(kvf_engine_shard(engine, 1))->layers, 4, 5);
    assert_range(kvf_shard_get(kvf_engine_shard(engine, 2))->layers, 5, 7);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* ---- tokens over ranks ----------------------------------------------------------------------- */

static void assert_tokens(const kvf_engine *engine, uint32_t rank, uint32_t index, uint32_t count,
                          uint32_t width) {
    kvf_token_share tokens = group_of(engine, rank, 0)->tokens;
    assert_int_equal(tokens.index, index);
    assert_int_equal(tokens.count, count);
    assert_int_equal(tokens.width, width);
}

static void ranks_with_the_same_heads_take_tokens_in_turn(void **state) {
    (void)state;
    /* 2 heads over 8 ranks, 2 token shares: of the 4 ranks of a head, 0 and 2 keep the same cells. */
    kvf_model *model = attention(1, 2, 4);
    kvf_engine *engine =
        engine_of(model, ENGINE(.tp_size = 8, .dcp_size = 2, .dcp_width = 4, .all = {.block_count = 1}));
    for (uint32_t rank = 0; rank < 8; rank++) {
        assert_tokens(engine, rank, rank % 2, 2, 4);
        assert_share(group_of(engine, rank, 0)->parts[0], rank / 4, rank / 4 + 1, rank % 4 / 2, 2);
    }
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void a_latent_can_be_shared_by_token_over_all_ranks(void **state) {
    (void)state;
    kvf_model *model = latent(1);
    kvf_engine *engine = engine_of(model, ENGINE(.tp_size = 4, .dcp_size = 4, .all = {.block_count = 1}));
    for (uint32_t rank = 0; rank < 4; rank++) {
        assert_tokens(engine, rank, rank, 4, 1);
        assert_share(group_of(engine, rank, 0)->parts[0], 0, 1, 0, 1);
    }
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void a_state_is_not_shared_by_token(void **state) {
    (void)state;
    kvf_model *model = hybrid(1);
    kvf_engine *engine = engine_of(model, ENGINE(.tp_size = 2, .dcp_size = 2, .all = {.block_count = 1}));

    assert_int_equal(group_of(engine, 1, 0)->tokens.count, 2);
    assert_int_equal(group_of(engine, 1, 1)->tokens.count, 1);
    assert_share(group_of(engine, 1, 1)->parts[3], 1, 2, 0, 1);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* ---- what a specification may not contain -------------------------------------------------------- */

static kvf_status try_engine(const kvf_model *model, const kvf_engine_spec *spec) {
    kvf_engine *engine = NULL;
    kvf_status status = kvf_engine_build(model, spec, &engine);
    if (status)
        assert_null(engine);
    kvf_engine_free(engine);
    return status;
}

static void heads_of_one_rank_each_leave_no_tokens_to_share(void **state) {
    (void)state;
    kvf_model *model = attention(1, 8, 4);
    assert_fails(try_engine(model, ENGINE(.tp_size = 4, .dcp_size = 2, .all = {.block_count = 1})),
                 KVF_E_INVALID, "group full", "dcp_size is 2", "units [0, 2) of part k", "1 TP ranks from 0");
    kvf_model_free(model);
}

static void holders_that_are_not_whole_sets_of_shares_are_refused(void **state) {
    (void)state;
    /* 4 heads over 6 ranks: head 0 on ranks 0 and 1, head 1 on rank 2 alone. */
    kvf_model *model = attention(1, 4, 4);
    assert_fails(try_engine(model, ENGINE(.tp_size = 6, .dcp_size = 2, .all = {.block_count = 1})),
                 KVF_E_INVALID, "dcp_size is 2", "units [1, 2)", "1 TP ranks from 2", "whole sets of 2");
    kvf_model_free(model);
}

static void token_shares_must_divide_the_ranks(void **state) {
    (void)state;
    kvf_model *model = latent(1);
    assert_fails(try_engine(model, ENGINE(.tp_size = 4, .dcp_size = 3, .all = {.block_count = 1})),
                 KVF_E_INVALID, "dcp_size is 3", "tp_size 4");
    kvf_model_free(model);
}

static void missing_arguments_are_named(void **state) {
    (void)state;
    kvf_model *model = latent(1);
    kvf_engine *engine = NULL;
    const kvf_engine_spec *spec = ENGINE(.all = {.block_count = 1});
    assert_fails(kvf_engine_build(NULL, spec, &engine), KVF_E_INVALID, "model is NULL");
    assert_fails(kvf_engine_build(model, NULL, &engine), KVF_E_INVALID, "spec is NULL");
    assert_fails(kvf_engine_build(model, spec, NULL), KVF_E_INVALID, "out is NULL");
    assert_fails(try_engine(model, &(kvf_engine_spec){.all = {.block_count = 1}}), KVF_E_INVALID,
                 "kvf_engine_spec", "struct_size");
    kvf_model_free(model);
}

static void the_number_of_ranks_is_bounded(void **state) {
    (void)state;
    kvf_model *model = latent(4);
    assert_fails(try_engine(model, ENGINE(.tp_size = 65537, .all = {.block_count = 1})), KVF_E_RANGE,
                 "tp_size is 65537 and pp_size 1", "up to 65536");
    assert_fails(try_engine(model, ENGINE(.tp_size = UINT32_MAX, .pp_size = UINT32_MAX)), KVF_E_RANGE,
                 "tp_size is 4294967295 and pp_size 4294967295");
    assert_fails(try_engine(model, ENGINE(.pp_size = 65536)), KVF_E_RANGE,
                 "pp_size is 65536; allowed: 1 to 4"); /* so many ranks may be */
    kvf_model_free(model);
}

static void every_stage_needs_a_layer(void **state) {
    (void)state;
    kvf_model *model = latent(3);
    assert_fails(try_engine(model, ENGINE(.pp_size = 4, .all = {.block_count = 1})), KVF_E_RANGE,
                 "pp_size is 4", "1 to 3");
    assert_fails(try_engine(model, ENGINE(.pp_size = 2, .pp_layers = (const uint32_t[]){3, 0},
                                          .all = {.block_count = 1})),
                 KVF_E_INVALID, "pp_layers[1] is 0");
    kvf_model_free(model);
}

static void stages_must_sum_to_the_models_layers(void **state) {
    (void)state;
    kvf_model *model = latent(5);
    assert_fails(try_engine(model, ENGINE(.pp_size = 2, .pp_layers = (const uint32_t[]){2, 2},
                                          .all = {.block_count = 1})),
                 KVF_E_INVALID, "pp_layers sums to 4", "5 layers");
    assert_fails(try_engine(model, ENGINE(.pp_size = 2, .pp_layers = (const uint32_t[]){6, UINT32_MAX},
                                          .all = {.block_count = 1})),
                 KVF_E_INVALID, "pp_layers sums to 4294967301");
    kvf_model_free(model);
}

static void a_cache_needs_blocks(void **state) {
    (void)state;
    kvf_model *model = hybrid(2);
    assert_fails(try_engine(model, ENGINE(.tp_size = 1)), KVF_E_INVALID, "group full", "block_count is 0");
    const kvf_group_spec groups[] = {{.block_count = 1}, {.block_count = 0}};
    assert_fails(try_engine(model, ENGINE(.all = {.block_count = 1}, .groups = groups)), KVF_E_INVALID,
                 "group ssm", "block_count is 0");
    kvf_model_free(model);
}

static void blocks_have_whole_entries_unless_they_are_given(void **state) {
    (void)state;
    kvf_model *model = compressed();
    kvf_engine *engine = engine_of(model, ENGINE(.all = {.block_count = 5}));
    for (uint32_t g = 0; g < 3; g++)
        assert_int_equal(group_of(engine, 0, g)->tokens_per_block, g < 2 ? 16 : 32);
    kvf_engine_free(engine);
    assert_fails(try_engine(model, ENGINE(.all = {.tokens_per_block = 16, .block_count = 5})), KVF_E_INVALID,
                 "group hca", "tokens_per_block is 16", "tokens_per_step, 32");
    assert_fails(
        try_engine(model, ENGINE(.tp_size = 2, .dcp_size = 2, .dcp_width = 2, .all = {.block_count = 5})),
        KVF_E_INVALID, "group csa", "tokens.width is 2", "tokens_per_step, 4");
    kvf_model_free(model);
}

static void block_sizes_and_counts_are_checked(void **state) {
    (void)state;
    kvf_model *model = latent(1);
    assert_fails(try_engine(model, ENGINE(.all = {.block_count = 1, .kernel_blocks_per_block = 3})),
                 KVF_E_INVALID, "group mla", "kernel_blocks_per_block is 3", "tokens_per_block 16");
    assert_fails(try_engine(model, ENGINE(.all = {.block_count = UINT64_MAX, .kernel_blocks_per_block = 2})),
                 KVF_E_RANGE, "block_count is 18446744073709551615 with 2 kernel blocks", "4294967294");
    /* one more than fits, and as many as fit */
    assert_fails(try_engine(model, ENGINE(.all = {.block_count = 2147483648, .kernel_blocks_per_block = 2})),
                 KVF_E_RANGE, "block_count is 2147483648 with 2 kernel blocks", "4294967294");
    kvf_engine_free(
        engine_of(model, ENGINE(.all = {.block_count = 2147483647, .kernel_blocks_per_block = 2})));
    kvf_model_free(model);
}

static void a_block_of_a_state_group_holds_one_state(void **state) {
    (void)state;
    kvf_model *model = state_model(1);
    assert_fails(try_engine(model, ENGINE(.state = {.tokens_per_block = 16, .block_count = 1})),
                 KVF_E_INVALID, "group ssm", "tokens_per_block is 16", "1 state");
    kvf_model_free(model);
}

/* ---- engines from shards --------------------------------------------------------------------- */

/* What one rank reports of itself: a latent of one layer in blocks of 4 tokens. */
typedef struct told {
    uint32_t rank, tokens_per_block, kernel_blocks_per_block;
    uint64_t block_count;
    kvf_token_share tokens;
    kvf_range layers;
} told;

static kvf_shard *shard_of(const kvf_model *model, told t) {
    const kvf_part_share part = {{0, 1}, 0, 1};
    const kvf_placement placement = PLACED(0, 0, 128, 8, 8);
    const uint64_t bytes = 8192;
    kvf_group_shard_desc group = {.tokens_per_block = t.tokens_per_block ? t.tokens_per_block : 4,
                                  .kernel_blocks_per_block = t.kernel_blocks_per_block,
                                  .block_count = t.block_count ? t.block_count : 10,
                                  .tokens = t.tokens,
                                  .parts = &part,
                                  .placements = &placement};
    kvf_shard_desc desc = {.struct_size = sizeof desc,
                           .rank = t.rank,
                           .layers = t.layers.end ? t.layers : range(0, 1),
                           .region_bytes = &bytes,
                           .region_count = 1,
                           .groups = &group};
    kvf_shard *shard = NULL;
    assert_ok(kvf_shard_create(model, &desc, &shard));
    return shard;
}

/* Joins two ranks to an engine, and frees everything whether it succeeds or not. */
static kvf_status try_two(told a, told b) {
    kvf_model *model = latent(2);
    kvf_shard *shards[] = {shard_of(model, a), shard_of(model, b)};
    kvf_engine *engine = NULL;
    kvf_status status = kvf_engine_from_shards(model, "remote", shards, 2, &engine);
    if (status) {
        assert_null(engine);
        kvf_shard_free(shards[0]);
        kvf_shard_free(shards[1]);
    }
    kvf_engine_free(engine);
    kvf_model_free(model);
    return status;
}

static void shards_become_the_engines_own(void **state) {
    (void)state;
    kvf_model *model = latent(1);
    kvf_shard *shards[] = {shard_of(model, (told){.rank = 0}), shard_of(model, (told){.rank = 1})};
    const kvf_shard *second = shards[1];
    kvf_engine *engine = NULL;

    assert_ok(kvf_engine_from_shards(model, NULL, shards, 2, &engine));

    memset(shards, 0, sizeof shards);
    assert_string_equal(kvf_engine_name(engine), "engine");
    assert_int_equal(kvf_engine_rank_count(engine), 2);
    assert_ptr_equal(kvf_engine_shard(engine, 1), second);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void shards_of_an_equal_model_are_welcome(void **state) {
    (void)state;
    kvf_model *model = latent(1), *equal = latent(1);
    kvf_shard *shard = shard_of(equal, (told){.rank = 0});
    kvf_engine *engine = NULL;

    assert_ok(kvf_engine_from_shards(model, NULL, &shard, 1, &engine));

    kvf_engine_free(engine);
    kvf_model_free(model);
    kvf_model_free(equal);
}

static void shards_of_another_model_are_refused_and_stay_the_callers(void **state) {
    (void)state;
    kvf_model *model = latent(2), *other = latent(1);
    kvf_shard *shards[] = {shard_of(model, (told){.rank = 0}), shard_of(other, (told){.rank = 1})};
    kvf_engine *engine = NULL;

    assert_fails(kvf_engine_from_shards(model, NULL, shards, 2, &engine), KVF_E_MISMATCH, "rank 1",
                 "layer_count is 2 on one side and 1 on the other");

    assert_null(engine);
    assert_int_equal(kvf_shard_get(shards[0])->rank, 0); /* the caller still has its shards */
    kvf_shard_free(shards[0]);
    kvf_shard_free(shards[1]);
    kvf_model_free(model);
    kvf_model_free(other);
}

static void shards_must_be_in_order_of_rank(void **state) {
    (void)state;
    const told ranks[] = {{.rank = 0}, {.rank = 1}, {.rank = 2}};
    assert_fails(try_two(ranks[1], ranks[0]), KVF_E_INVALID, "shards[0] has another rank");
    assert_fails(try_two(ranks[0], ranks[2]), KVF_E_INVALID, "shards[1] has another rank");
}

static void an_engine_needs_shards(void **state) {
    (void)state;
    kvf_model *model = latent(1);
    kvf_shard *none = NULL;
    kvf_engine *engine = NULL;
    assert_fails(kvf_engine_from_shards(model, NULL, &none, 0, &engine), KVF_E_INVALID, "shard_count is 0",
                 "at least 1");
    assert_fails(kvf_engine_from_shards(model, NULL, NULL, 1, &engine), KVF_E_INVALID, "shard");
    assert_fails(kvf_engine_from_shards(model, NULL, &none, 1, &engine), KVF_E_INVALID, "shards[0] is NULL");
    assert_fails(kvf_engine_from_shards(NULL, NULL, &none, 1, &engine), KVF_E_INVALID, "model is NULL");
    assert_fails(kvf_engine_from_shards(model, NULL, &none, 1, NULL), KVF_E_INVALID, "out is NULL");
    assert_null(engine);
    kvf_model_free(model);
}

static void ranks_must_agree_on_the_size_of_a_block(void **state) {
    (void)state;
    const told first = {.rank = 0};
    const told larger = {.rank = 1, .tokens_per_block = 8};
    const told divided = {.rank = 1, .kernel_blocks_per_block = 2};
    assert_fails(try_two(first, larger), KVF_E_MISMATCH, "group mla",
                 "rank 0 has 4 tokens and 1 kernel blocks", "rank 1 has 8 and 1");
    assert_fails(try_two(first, divided), KVF_E_MISMATCH, "rank 1 has 4 and 2");
}

static void ranks_must_share_tokens_the_same_way(void **state) {
    (void)state;
    const told even = {.rank = 0, .tokens = {0, 2, 1}}, pairs = {.rank = 0, .tokens = {0, 2, 4}};
    const told third = {.rank = 1, .tokens = {1, 3, 1}}, odd_pairs = {.rank = 1, .tokens = {1, 2, 4}};
    assert_fails(try_two(even, third), KVF_E_MISMATCH, "group mla", "rank 0 shares tokens by 2 with width 1",
                 "by 3 with width 1");
    assert_fails(try_two(even, odd_pairs), KVF_E_MISMATCH, "by 2 with width 4");
    assert_ok(try_two(pairs, odd_pairs));
}

static void a_rank_without_layers_of_a_group_need_not_agree_on_it(void **state) {
    (void)state;
    const told first = {.rank = 0};
    const told none = {.rank = 1, .tokens_per_block = 8, .tokens = {1, 2, 1}, .layers = {2, 2}};
    assert_ok(try_two(first, none));
}

static void an_engine_has_as_many_blocks_as_its_smallest_rank(void **state) {
    (void)state;
    kvf_model *model = latent(1);
    kvf_shard *shards[] = {shard_of(model, (told){.rank = 0, .block_count = 9}),
                           shard_of(model, (told){.rank = 1, .block_count = 7}),
                           shard_of(model, (told){.rank = 2, .block_count = 8})};
    kvf_engine *engine = NULL;

    assert_ok(kvf_engine_from_shards(model, NULL, shards, 3, &engine));

    assert_int_equal(engine->groups[0].block_count, 7);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static kvf_status make_model(void *subject) {
    (void)subject;
    kvf_part_desc part = PART(.name = "latent", .units = 1, .cell_elements = 4);
    const uint32_t layers[] = {0, 1};
    kvf_group_desc group = {
        .name = "mla", .layers = layers, .layer_count = 2, .parts = &part, .part_count = 1};
    kvf_model_desc desc = {.struct_size = sizeof desc, .layer_count = 2, .groups = &group, .group_count = 1};
    kvf_model *model = NULL;
    kvf_status status = kvf_model_create(&desc, &model);
    kvf_model_free(model);
    return status;
}

static kvf_status make_engine(void *subject) {
    return try_engine(subject, ENGINE(.tp_size = 2, .pp_size = 2, .all = {.block_count = 4}));
}

/* The shard stays: only making the engine around it fails. */
static kvf_status make_from_shard(void *subject) {
    kvf_shard *shard = subject;
    kvf_engine *engine = NULL;
    kvf_status status = kvf_engine_from_shards(shard->model, "remote", &shard, 1, &engine);
    if (!status) {
        engine->shard_count = 0; /* the shard still belongs to the test */
        kvf_engine_free(engine);
    }
    return status;
}

static void models_and_engines_survive_every_refused_allocation(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    kvf_model *model = hybrid(2), *mla = latent(1);
    kvf_shard *shard = shard_of(mla, (told){.rank = 0});

    survive_every_refusal(&memory, make_model, NULL);
    survive_every_refusal(&memory, make_engine, model);
    survive_every_refusal(&memory, make_from_shard, shard);

    kvf_shard_free(shard);
    kvf_model_free(mla);
    kvf_model_free(model);
    assert_int_equal(memory.live, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_are_split_evenly_where_they_divide),
        cmocka_unit_test(heads_are_split_without_gaps_where_they_do_not_divide),
        cmocka_unit_test(neighbouring_ranks_share_a_head_where_there_are_more_ranks),
        cmocka_unit_test(more_ranks_than_heads_need_not_be_a_multiple),
        cmocka_unit_test(granules_are_never_cut),
        cmocka_unit_test(a_latent_is_kept_by_every_rank),
        cmocka_unit_test(every_part_of_a_group_is_shared_by_its_own_units),
        cmocka_unit_test(ranks_are_numbered_stage_by_stage),
        cmocka_unit_test(an_engine_keeps_its_model_alive),
        cmocka_unit_test(freeing_no_engine_is_fine),
        cmocka_unit_test(sizes_that_are_left_out_are_one_and_blocks_have_16_tokens),
        cmocka_unit_test(blocks_have_whole_entries_unless_they_are_given),
        cmocka_unit_test(groups_may_have_block_sizes_and_counts_of_their_own),
        cmocka_unit_test(state_groups_have_a_specification_of_their_own),
        cmocka_unit_test(stages_are_as_even_as_they_go),
        cmocka_unit_test(stages_may_be_given),
        cmocka_unit_test(ranks_with_the_same_heads_take_tokens_in_turn),
        cmocka_unit_test(a_latent_can_be_shared_by_token_over_all_ranks),
        cmocka_unit_test(a_state_is_not_shared_by_token),
        cmocka_unit_test(heads_of_one_rank_each_leave_no_tokens_to_share),
        cmocka_unit_test(holders_that_are_not_whole_sets_of_shares_are_refused),
        cmocka_unit_test(token_shares_must_divide_the_ranks),
        cmocka_unit_test(missing_arguments_are_named),
        cmocka_unit_test(the_number_of_ranks_is_bounded),
        cmocka_unit_test(every_stage_needs_a_layer),
        cmocka_unit_test(stages_must_sum_to_the_models_layers),
        cmocka_unit_test(a_cache_needs_blocks),
        cmocka_unit_test(block_sizes_and_counts_are_checked),
        cmocka_unit_test(a_block_of_a_state_group_holds_one_state),
        cmocka_unit_test(shards_become_the_engines_own),
        cmocka_unit_test(shards_of_an_equal_model_are_welcome),
        cmocka_unit_test(shards_of_another_model_are_refused_and_stay_the_callers),
        cmocka_unit_test(shards_must_be_in_order_of_rank),
        cmocka_unit_test(an_engine_needs_shards),
        cmocka_unit_test(ranks_must_agree_on_the_size_of_a_block),
        cmocka_unit_test(ranks_must_share_tokens_the_same_way),
        cmocka_unit_test(a_rank_without_layers_of_a_group_need_not_agree_on_it),
        cmocka_unit_test(an_engine_has_as_many_blocks_as_its_smallest_rank),
        cmocka_unit_test_teardown(models_and_engines_survive_every_refused_allocation, stop_counting_memory),
    };
    return cmocka_run_group_tests_name("engine", tests, NULL, NULL);
}
