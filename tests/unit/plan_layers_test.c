/* Plans for some layers only, executed on real memory and compared with an oracle that knows no plans. */
#include "cells.h"

#include "plan/plan.h"

#define TOKENS 37u

/* ---- models and shapes ----------------------------------------------------------------------- */

/* Six layers: attention in 0, 2 and 5 (layer 5 stands for one that predicts further tokens), a window in 1, a state in
 * 3, and nothing in 4. */
static kvf_model *mixed(void) {
    static const uint32_t full[] = {0, 2, 5}, window[] = {1}, state_layers[] = {3};
    kvf_part_desc kv[] = {PART(.name = "k", .units = 4, .cell_elements = 4),
                          PART(.name = "v", .units = 4, .cell_elements = 4)};
    kvf_part_desc state[4];
    fill_state_parts(state);
    kvf_group_desc groups[] = {
        {.name = "full", .layers = full, .layer_count = 3, .parts = kv, .part_count = 2},
        {.name = "swa", .layers = window, .layer_count = 1, .parts = kv, .part_count = 2},
        {.name = "ssm",
         .kind = KVF_GROUP_STATE,
         .layers = state_layers,
         .layer_count = 1,
         .parts = state,
         .part_count = 4}};
    return model_of(6, groups, 3);
}

static kvf_model *dense(void) {
    return attention(5, 4, 4);
}

static kvf_model *latents(void) {
    return latent(4);
}

typedef struct layer_case {
    kvf_model *(*model)(void);
    kvf_engine_spec local, remote;
} layer_case;

#define SPEC(...)                                                                                            \
    { .struct_size = sizeof(kvf_engine_spec), __VA_ARGS__ }
#define BLOCKS(...)                                                                                          \
    { .block_count = 40, __VA_ARGS__ }

static const layer_case cases[] = {
    {dense, SPEC(.all = BLOCKS(.tokens_per_block = 4)), SPEC(.all = BLOCKS(.tokens_per_block = 4))},
    {dense, SPEC(.all = BLOCKS(.tokens_per_block = 4, .order = "BLHNP")),
     SPEC(.all = BLOCKS(.tokens_per_block = 4, .order = "BLHNP"))},
    {dense, SPEC(.tp_size = 2, .all = BLOCKS(.tokens_per_block = 6, .order = "BLNHP")),
     SPEC(.tp_size = 3, .pp_size = 2, .all = BLOCKS(.tokens_per_block = 4, .order = "LP|BNH"))},
    {dense, SPEC(.tp_size = 8, .dcp_size = 2, .pp_size = 2, .all = BLOCKS(.tokens_per_block = 4)),
     SPEC(.tp_size = 4, .all = BLOCKS(.tokens_per_block = 8, .kernel_blocks_per_block = 2))},
    {latents, SPEC(.tp_size = 2, .dcp_size = 2, .dcp_width = 2, .all = BLOCKS(.tokens_per_block = 2)),
     SPEC(.tp_size = 3, .all = BLOCKS(.tokens_per_block = 5))},
    {mixed, SPEC(.tp_size = 2, .all = BLOCKS(.tokens_per_block = 4)),
     SPEC(.pp_size = 3, .all = BLOCKS(.tokens_per_block = 16))},
    {mixed, SPEC(.pp_size = 2, .all = BLOCKS(.tokens_per_block = 4)),
     SPEC(.tp_size = 2, .pp_size = 2, .all = BLOCKS(.tokens_per_block = 3, .order = "LBPNH"))},
};

/* One local rank, and all remote ranks, filled. */
typedef struct world {
    pair engines;
    cell_sequence local_sequence, remote_sequence;
    cell_rank here;
    cell_rank *there;
} world;

static void world_open(world *w, const layer_case *of, uint32_t local_rank) {
    w->engines = pair_of(of->model(), &of->local, &of->remote);
    const kvf_shard *local = kvf_engine_shard(w->engines.local, local_rank);
    sequence_open(&w->local_sequence, local, TOKENS, 1);
    sequence_open(&w->remote_sequence, kvf_engine_shard(w->engines.remote, 0), TOKENS, 2);
    rank_open(&w->here, local, &w->local_sequence, NULL, NULL);
    uint32_t ranks = kvf_engine_rank_count(w->engines.remote);
    w->there = calloc(ranks, sizeof *w->there);
    assert_non_null(w->there);
    for (uint32_t i = 0; i < ranks; i++) {
        const kvf_shard *shard = kvf_engine_shard(w->engines.remote, i);
        rank_open(&w->there[i], shard, &w->remote_sequence, NULL, NULL);
        rank_fill(&w->there[i], all_layers(shard), 7);
    }
}

static void world_close(world *w) {
    for (uint32_t i = 0; i < kvf_engine_rank_count(w->engines.remote); i++)
        rank_close(&w->there[i]);
    free(w->there);
    rank_close(&w->here);
    sequence_close(&w->local_sequence);
    sequence_close(&w->remote_sequence);
    free_pair(&w->engines);
}

static kvf_plan *layers_plan(const world *w, uint32_t begin, uint32_t end) {
    kvf_plan_options options = {.struct_size = sizeof options, .layers = {begin, end}};
    kvf_plan *plan = NULL;
    assert_ok(kvf_plan_build(w->here.shard, w->engines.remote, &options, &plan));
    return plan;
}

/* Moves the whole sequence by a plan; returns the number of bytes moved. */
static uint64_t move(const world *w, const kvf_plan *plan) {
    kvf_request *request = request_of(plan);
    set_sequences(request, &w->local_sequence, &w->remote_sequence);
    uint64_t moved = 0;
    for (uint32_t s = 0; s < kvf_plan_source_count(plan); s++) {
        const cell_rank *source = &w->there[kvf_plan_source_rank(plan, s)];
        kvf_run_cursor cursor;
        kvf_run run;
        uint64_t of_source = 0;
        for (kvf_run_cursor_start(&cursor, request, s); kvf_run_cursor_next(&cursor, &run, 1);) {
            memcpy((unsigned char *)w->here.regions[run.local_region].address + run.local_offset,
                   (unsigned char *)source->regions[run.remote_region].address + run.remote_offset,
                   run.bytes);
            of_source += run.bytes;
        }
        assert_int_equal(of_source, kvf_request_bytes(request, s));
        assert_true(of_source > 0); /* every source of a plan gives something */
        moved += of_source;
    }
    kvf_request_free(request);
    return moved;
}

static uint64_t predicted(const kvf_plan *plan) {
    uint64_t bytes = 0;
    for (uint32_t s = 0; s < kvf_plan_source_count(plan); s++) {
        kvf_prediction p = {.struct_size = sizeof p};
        assert_ok(kvf_plan_predict(plan, s, TOKENS, NULL, &p));
        bytes += p.bytes;
    }
    return bytes;
}

/* ---- tests ----------------------------------------------------------------------------------- */

/* Checks every rank of every case, cut before every layer. */
static void each_cut(void (*check)(const world *w, const cell_rank *before, uint32_t k)) {
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        uint32_t ranks = (cases[i].local.tp_size ? cases[i].local.tp_size : 1) *
                         (cases[i].local.pp_size ? cases[i].local.pp_size : 1);
        for (uint32_t rank = 0; rank < ranks; rank++) {
            world w;
            cell_rank before;
            world_open(&w, &cases[i], rank);
            rank_copy(&before, &w.here);
            for (uint32_t k = 1; k < kvf_model_layer_count(w.engines.model); k++) {
                check(&w, &before, k);
                for (uint32_t r = 0; r < before.region_count; r++)
                    memcpy(w.here.regions[r].address, before.regions[r].address, before.regions[r].bytes);
            }
            rank_close(&before);
            world_close(&w);
        }
    }
}

static void check_halves(const world *w, const cell_rank *before, uint32_t k) {
    uint32_t layers = kvf_model_layer_count(w->engines.model);
    kvf_plan *whole = layers_plan(w, 0, 0);
    kvf_plan *low = layers_plan(w, 0, k), *high = layers_plan(w, k, layers);
    assert_ok(kvf_plan_verify(low));
    assert_ok(kvf_plan_verify(high));
    assert_int_equal(predicted(low) + predicted(high), predicted(whole));
    cell_rank wanted;
    rank_copy(&wanted, before);

    uint64_t moved = move(w, low);
    rank_fill(&wanted, range(0, k), 7);
    assert_same_memory(&w->here, &wanted);

    moved += move(w, high);
    rank_fill(&wanted, range(k, layers), 7);
    assert_same_memory(&w->here, &wanted);

    assert_int_equal(moved, move(w, whole));
    assert_same_memory(&w->here, &wanted);
    rank_close(&wanted);
    kvf_plan_free(whole);
    kvf_plan_free(low);
    kvf_plan_free(high);
}

static void plans_of_two_halves_move_what_the_whole_plan_moves(void **state) {
    (void)state;
    each_cut(check_halves);
}

static void check_one_layer(const world *w, const cell_rank *before, uint32_t k) {
    kvf_plan *plan = layers_plan(w, k, k + 1);
    assert_ok(kvf_plan_verify(plan));
    cell_rank wanted;
    rank_copy(&wanted, before);
    rank_fill(&wanted, range(k, k + 1), 7);
    (void)move(w, plan);
    assert_same_memory(&w->here, &wanted);
    rank_close(&wanted);
    kvf_plan_free(plan);
}

static void a_plan_of_one_layer_writes_no_other(void **state) {
    (void)state;
    each_cut(check_one_layer);
}

static void a_published_hybrid_moves_layer_range_by_layer_range(void **state) {
    (void)state;
    kvf_model *model = NULL;
    assert_ok(kvf_model_load("nemotron-3-nano-30b", NULL, &model));
    uint32_t layers = kvf_model_layer_count(model);
    pair p = pair_of(model, ENGINE(.tp_size = 2, .all = {.block_count = 8}),
                     ENGINE(.tp_size = 4, .pp_size = 2, .all = {.block_count = 8, .tokens_per_block = 32}));
    kvf_plan *whole = plan_of(&p, 1);
    uint64_t bytes = 0;
    for (uint32_t begin = 0; begin < layers; begin += 7) {
        uint32_t end = begin + 7 < layers ? begin + 7 : layers;
        kvf_plan_options options = {.struct_size = sizeof options, .layers = {begin, end}};
        kvf_plan *part = plan_with(&p, 1, &options);
        assert_ok(kvf_plan_verify(part));
        bytes += predicted(part);
        kvf_plan_free(part);
    }
    assert_int_equal(bytes, predicted(whole));
    kvf_plan_free(whole);
    free_pair(&p);
}

static void ranks_without_the_layers_are_no_sources(void **state) {
    (void)state;
    /* Two stages of two ranks: layers 0 to 1 and 2 to 4. */
    pair p = pair_of(dense(), ENGINE(.all = {.block_count = 4}),
                     ENGINE(.tp_size = 2, .pp_size = 2, .all = {.block_count = 4}));
    kvf_plan_options options = {.struct_size = sizeof options, .layers = {3, 5}};
    kvf_plan *plan = plan_with(&p, 0, &options);
    assert_int_equal(kvf_plan_source_count(plan), 2);
    assert_int_equal(kvf_plan_source_rank(plan, 0), 2);
    assert_int_equal(kvf_plan_source_rank(plan, 1), 3);
    for (uint32_t i = 0; i < kvf_plan_cut_count(plan); i++)
        assert_range(kvf_plan_get_cut(plan, i)->layers, 3, 5);
    kvf_plan_free(plan);
    free_pair(&p);
}

static void a_range_without_cached_layers_has_no_source(void **state) {
    (void)state;
    world w;
    world_open(&w, &cases[5], 0);
    kvf_plan *plan = layers_plan(&w, 4, 5);
    assert_int_equal(kvf_plan_source_count(plan), 0);
    assert_int_equal(kvf_plan_cut_count(plan), 0);
    assert_int_equal(kvf_plan_rule_count(plan), 0);
    assert_ok(kvf_plan_verify(plan));
    assert_int_equal(move(&w, plan), 0);
    kvf_prediction none = {.struct_size = sizeof none};
    assert_fails(kvf_plan_predict(plan, 0, TOKENS, NULL, &none), KVF_E_RANGE, "source is 0", "has 0");
    kvf_plan_free(plan);
    world_close(&w);
}

static void a_range_of_layers_that_another_stage_holds_has_no_source(void **state) {
    (void)state;
    pair p =
        pair_of(dense(), ENGINE(.pp_size = 2, .all = {.block_count = 4}), ENGINE(.all = {.block_count = 4}));
    kvf_plan_options options = {.struct_size = sizeof options, .layers = {3, 5}};
    kvf_plan *plan = plan_with(&p, 0, &options);
    assert_int_equal(kvf_plan_source_count(plan), 0);
    assert_ok(kvf_plan_verify(plan));
    kvf_plan_free(plan);
    free_pair(&p);
}

static void layers_that_no_remote_rank_holds_matter_only_when_wanted(void **state) {
    (void)state;
    /* The remote engine is the first of two stages: layers 0 and 1. */
    kvf_model *model = dense();
    kvf_engine *stages = engine_of(model, ENGINE(.pp_size = 2, .all = {.block_count = 4}));
    kvf_shard *first = NULL;
    assert_ok(kvf_shard_create(model, kvf_shard_get(kvf_engine_shard(stages, 0)), &first));
    kvf_engine *half = NULL, *local = engine_of(model, ENGINE(.all = {.block_count = 4}));
    assert_ok(kvf_engine_from_shards(model, "half", &first, 1, &half));
    kvf_plan_options options = {.struct_size = sizeof options, .layers = {0, 2}};
    kvf_plan *plan = NULL;
    assert_ok(kvf_plan_build(kvf_engine_shard(local, 0), half, &options, &plan));
    assert_ok(kvf_plan_verify(plan));
    kvf_plan_free(plan);
    plan = NULL;
    options.layers = range(1, 3);
    assert_fails(kvf_plan_build(kvf_engine_shard(local, 0), half, &options, &plan), KVF_E_UNCOVERED,
                 "layers 2 to 2");
    assert_null(plan);
    kvf_engine_free(local);
    kvf_engine_free(half);
    kvf_engine_free(stages);
    kvf_model_free(model);
}

static void an_empty_range_means_all_layers(void **state) {
    (void)state;
    world w;
    world_open(&w, &cases[0], 0);
    kvf_plan *whole = plan_of(&w.engines, 0), *empty = layers_plan(&w, 3, 3);
    assert_int_equal(predicted(empty), predicted(whole));
    assert_true(predicted(whole) > 0);
    kvf_plan_free(whole);
    kvf_plan_free(empty);
    world_close(&w);
}

static void a_caller_that_knows_no_layers_gets_all(void **state) {
    (void)state;
    world w;
    world_open(&w, &cases[0], 0);
    kvf_plan *whole = plan_of(&w.engines, 0), *older = NULL;
    kvf_plan_options options = {.struct_size = offsetof(kvf_plan_options, layers), .layers = {1, 2}};
    assert_ok(kvf_plan_build(w.here.shard, w.engines.remote, &options, &older));
    assert_int_equal(predicted(older), predicted(whole));
    kvf_plan_free(whole);
    kvf_plan_free(older);
    world_close(&w);
}

static void layers_beyond_the_model_are_refused(void **state) {
    (void)state;
    pair p = pair_of(dense(), ENGINE(.all = {.block_count = 4}), ENGINE(.all = {.block_count = 4}));
    static const kvf_range wrong[] = {{0, 6}, {5, 6}, {6, 6}, {3, 2}, {UINT32_MAX, UINT32_MAX}};
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        kvf_plan_options options = {.struct_size = sizeof options, .layers = wrong[i]};
        kvf_plan *plan = NULL;
        assert_fails(kvf_plan_build(kvf_engine_shard(p.local, 0), p.remote, &options, &plan), KVF_E_RANGE,
                     "layers are [", "within [0, 5)");
        assert_null(plan);
    }
    free_pair(&p);
}

static void the_proof_is_of_exactly_the_wanted_layers(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        world w;
        world_open(&w, &cases[i], 0);
        kvf_plan *plan = layers_plan(&w, 0, 2);
        plan->options.layers = range(0, 1); /* as if the rules wrote a layer too many */
        assert_int_equal(kvf_plan_verify(plan), KVF_E_OVERLAP);
        plan->options.layers = range(0, 3); /* as if the rules wrote a layer too few */
        kvf_status status = kvf_plan_verify(plan);
        kvf_range own = kvf_shard_get(w.here.shard)->layers;
        assert_int_equal(status, own.end > 2 ? KVF_E_UNCOVERED : KVF_OK);
        kvf_plan_free(plan);
        world_close(&w);
    }
}

static kvf_status make_plan(void *subject) {
    const world *w = subject;
    kvf_plan_options options = {.struct_size = sizeof options, .layers = {1, 3}};
    kvf_plan *plan = NULL;
    kvf_status status = kvf_plan_build(w->here.shard, w->engines.remote, &options, &plan);
    kvf_plan_free(plan);
    return status;
}

static void a_plan_of_some_layers_survives_every_refused_allocation(void **state) {
    (void)state;
    memory_count m;
    count_memory(&m);
    world w;
    world_open(&w, &cases[6], 0);
    survive_every_refusal(&m, make_plan, &w);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plans_of_two_halves_move_what_the_whole_plan_moves),
        cmocka_unit_test(a_plan_of_one_layer_writes_no_other),
        cmocka_unit_test(a_published_hybrid_moves_layer_range_by_layer_range),
        cmocka_unit_test(ranks_without_the_layers_are_no_sources),
        cmocka_unit_test(a_range_without_cached_layers_has_no_source),
        cmocka_unit_test(a_range_of_layers_that_another_stage_holds_has_no_source),
        cmocka_unit_test(layers_that_no_remote_rank_holds_matter_only_when_wanted),
        cmocka_unit_test(an_empty_range_means_all_layers),
        cmocka_unit_test(a_caller_that_knows_no_layers_gets_all),
        cmocka_unit_test(layers_beyond_the_model_are_refused),
        cmocka_unit_test(the_proof_is_of_exactly_the_wanted_layers),
        cmocka_unit_test_teardown(a_plan_of_some_layers_survives_every_refused_allocation,
                                  stop_counting_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
