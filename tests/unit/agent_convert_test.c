/*
 * Engines that keep the same elements in different types: converted on the way if both allow it, and refused by name
 * otherwise. Every element that arrives is compared with a scalar conversion of the one that was sent.
 */
#include <string.h>

#include "agent/area.h"
#include "agent_net.h"
#include "agent_world.h"
#include "model/match.h"

#define TWO(engine_name)                                                                                     \
    ENGINE(.name = (engine_name), .tp_size = 2, .all = {.block_count = 64}, .state = {.block_count = 64})
#define FOUR(engine_name)                                                                                    \
    ENGINE(.name = (engine_name), .tp_size = 4,                                                              \
           .all = {.tokens_per_block = 8, .block_count = 128, .order = "BLHNP"},                             \
           .state = {.block_count = 64})
#define CONVERT KVF_CONVERTED_DTYPES

enum { FULL = 0, SSM = 1 };

static kvf_model *hybrid_of(kvf_dtype full, kvf_dtype ssm) {
    kvf_model *plain = hybrid(4), *out = NULL;
    const kvf_dtype types[] = {full, full, ssm, ssm, ssm, ssm};
    assert_int_equal(kvf_model_part_count(plain), COUNT_OF(types));
    assert_ok(kvf_model_retype(plain, types, &out));
    kvf_model_free(plain);
    return out;
}

static kvf_agent_options options_of(uint32_t convert) {
    return (kvf_agent_options){.struct_size = sizeof(kvf_agent_options),
                               .transport = "inproc",
                               .verify = true,
                               .slot_bytes = 4096,
                               .arena_bytes = 64 * 4096,
                               .convert = convert};
}

/* Opens P with one model and D with another. */
static void open_types(world *w, kvf_model *p, const kvf_engine_spec *p_spec, kvf_model *d,
                       const kvf_engine_spec *d_spec, const kvf_agent_options *p_options,
                       const kvf_agent_options *d_options) {
    world_open_model(w, p, p_spec, p_spec, p_options);
    world_close_agents(&w->d);
    kvf_engine_free(w->d.engine);
    w->d.engine = engine_of(d, d_spec);
    kvf_model_free(d);
    world_open_agents(&w->d, d_options);
}

static uint64_t packed(const world_engine *e) {
    uint64_t bytes = 0;
    for (uint32_t r = 0; r < e->rank_count; r++)
        bytes += world_stats(e->agents[r]).bytes_packed;
    return bytes;
}

/* Moves a request of 100 tokens, of which D has cached the first `cached`. */
static void moves_well(world *w, const char *id, uint64_t cached, bool push, uint32_t seed) {
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    const kvf_model *model = kvf_engine_model(w->p.engine);
    const uint64_t before = packed(&w->p) + packed(&w->d);
    world_request_make(w, &w->p, id, 100, 5, 2, &held);
    world_request_make(w, &w->d, id, 100, 9, 3, &wanted);
    wanted.groups[FULL].begin = cached;
    world_fill(w, &w->p, &held, seed);
    world_filled_as(model);
    assert_true(world_wrong_cells(w, &w->d, &wanted, seed) > 0);
    if (push) {
        world_push(&w->p, &held, theirs);
        world_expect(&w->d, &wanted, &w->p, ours);
        for (uint32_t r = 0; r < w->p.rank_count; r++)
            assert_ok(kvf_agent_push_ready(w->p.agents[r], theirs[r], CHUNK(0, 40, 2)));
        world_run_for(w, 10 * MS);
        world_ready(&w->p, theirs);
    } else {
        world_hold(&w->p, &held, theirs);
        world_pull(&w->d, &wanted, &w->p, ours);
    }
    world_all_done(w, &w->d, ours);
    world_all_done(w, &w->p, theirs);
    assert_int_equal(world_wrong_cells(w, &w->d, &wanted, seed), 0);
    assert_true(world_wrong_cells(w, &w->d, &wanted, seed + 1) > 0);
    world_filled_as(NULL);
    assert_true(world_wrong_cells(w, &w->d, &wanted, seed) > 0); /* the bytes were not just copied */
    assert_true(packed(&w->p) + packed(&w->d) > before);
}

static void every_pair_of_types_is_converted_when_pulled_and_when_pushed(void **state) {
    (void)state;
    static const kvf_dtype types[] = {KVF_DTYPE_F32, KVF_DTYPE_F16, KVF_DTYPE_BF16, KVF_DTYPE_F8_E4M3,
                                      KVF_DTYPE_F8_E5M2};
    const kvf_agent_options options = options_of(CONVERT);
    for (size_t i = 0; i < COUNT_OF(types) * COUNT_OF(types); i++) {
        const kvf_dtype p = types[i / COUNT_OF(types)], d = types[i % COUNT_OF(types)];
        world w;
        if (p == d)
            continue;
        open_types(&w, hybrid_of(p, p), i % 2 ? TWO("P") : FOUR("P"), hybrid_of(d, d),
                   i % 2 ? FOUR("D") : TWO("D"), &options, &options);
        moves_well(&w, "pulled", 0, false, 1);
        moves_well(&w, "pulled, with a hit", 37, false, 2);
        moves_well(&w, "pushed", 0, true, 3);
        moves_well(&w, "pushed, with a hit", 21, true, 4);
        for (uint32_t r = 0; r < w.d.rank_count; r++)
            assert_int_equal(world_stats(w.d.agents[r]).checksums_wrong, 0);
        world_quiet(&w);
        world_close(&w);
    }
}

static void a_state_may_keep_its_type_while_keys_are_converted(void **state) {
    (void)state;
    world w;
    const kvf_agent_options options = options_of(CONVERT);
    open_types(&w, hybrid_of(KVF_DTYPE_BF16, KVF_DTYPE_F32), TWO("P"),
               hybrid_of(KVF_DTYPE_F32, KVF_DTYPE_F32), FOUR("D"), &options, &options);
    moves_well(&w, "pulled", 0, false, 1);
    moves_well(&w, "pushed", 0, true, 2);
    kvf_group_match match = {.struct_size = sizeof match};
    assert_ok(kvf_agent_match(w.d.agents[0], "P", FULL, &match));
    assert_int_equal(match.agreement, KVF_AGREE_CONVERT);
    assert_ok(kvf_agent_match(w.d.agents[0], "P", SSM, &match));
    assert_int_equal(match.agreement, KVF_AGREE_SAME);
    world_quiet(&w);
    world_close(&w);
}

/* ---- checksums ------------------------------------------------------------------------------- */

static uint64_t sum_of(const world_engine *e, const world_request *request, kvf_dtype dtype) {
    const kvf_shard *shard = kvf_engine_shard(e->engine, 0);
    kvf_memory regions[WORLD_MAX_REGIONS];
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    uint64_t sums[100] = {0}, all = 0;
    for (uint32_t i = 0; i < desc->region_count; i++)
        regions[i] = (kvf_memory){
            .struct_size = sizeof regions[i], .address = e->memory[0][i], .bytes = desc->region_bytes[i]};
    kvf_area area = {.shard = shard,
                     .regions = regions,
                     .group = FULL,
                     .layers = kvf_shard_group_layers(shard, FULL),
                     .units = desc->groups[FULL].parts[0].units,
                     .table = &request->groups[FULL].table,
                     .end = 100,
                     .dtype = dtype};
    assert_ok(kvf_area_check(&area));
    assert_ok(kvf_area_sum_on_host(&area, area.layers, &(kvf_sum_places){.sums = sums, .step = 1}));
    for (size_t i = 0; i < COUNT_OF(sums); i++)
        all = all * 31 + sums[i];
    return all;
}

static void a_checksum_of_converted_cells_is_that_of_the_reader(void **state) {
    (void)state;
    world w;
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    const kvf_agent_options options = options_of(CONVERT);
    const kvf_engine_spec *one =
        ENGINE(.name = "P", .all = {.block_count = 64}, .state = {.block_count = 64});
    open_types(&w, hybrid_of(KVF_DTYPE_F32, KVF_DTYPE_F32), one, hybrid_of(KVF_DTYPE_F16, KVF_DTYPE_F16),
               ENGINE(.name = "D", .all = {.block_count = 64}, .state = {.block_count = 64}), &options,
               &options);
    world_request_make(&w, &w.p, "a", 100, 5, 2, &held);
    world_request_make(&w, &w.d, "a", 100, 9, 3, &wanted);
    world_fill(&w, &w.p, &held, 1);
    world_hold(&w.p, &held, theirs);
    world_pull(&w.d, &wanted, &w.p, ours);
    world_all_done(&w, &w.d, ours);
    world_all_done(&w, &w.p, theirs);
    const uint64_t sum = sum_of(&w.d, &wanted, KVF_DTYPE_INVALID);
    assert_int_equal(sum_of(&w.p, &held, KVF_DTYPE_F16), sum);
    assert_int_not_equal(sum_of(&w.p, &held, KVF_DTYPE_INVALID), sum);
    assert_int_not_equal(sum_of(&w.p, &held, KVF_DTYPE_BF16), sum);
    kvf_cell_location cell = {.struct_size = sizeof cell};
    assert_ok(
        kvf_shard_locate(kvf_engine_shard(w.d.engine, 0), FULL, 0, 0, wanted.ids[FULL][0], 3, 1, &cell));
    ((uint8_t *)w.d.memory[0][cell.region])[cell.offset] ^= 1;
    assert_int_not_equal(sum_of(&w.d, &wanted, KVF_DTYPE_INVALID), sum);
    world_quiet(&w);
    world_close(&w);
}

/* ---- refusals -------------------------------------------------------------------------------- */

/* D's request for all groups must fail, with these words in the detail. */
static void is_refused(world *w, bool push, kvf_way way, kvf_status status, const char *words) {
    world_request wanted;
    uint64_t ours[WORLD_MAX_RANKS];
    world_request_make(w, &w->d, push ? "pushed" : "pulled", 100, 9, 3, &wanted);
    wanted.request.way = way;
    wanted.request.deadline_ns = 5 * SECOND;
    if (push)
        world_expect(&w->d, &wanted, &w->p, ours);
    else
        world_pull(&w->d, &wanted, &w->p, ours);
    for (uint32_t r = 0; r < w->d.rank_count; r++) {
        const world_outcome *failed = world_failed(w, w->d.agents[r], ours[r], status);
        if (!strstr(failed->detail, words))
            fail_msg("\"%s\" is not in: %s", words, failed->detail);
    }
}

static void types_that_only_one_side_lets_be_converted_are_refused_by_name(void **state) {
    (void)state;
    const uint32_t both = KVF_DTYPE_BIT(KVF_DTYPE_F32) | KVF_DTYPE_BIT(KVF_DTYPE_F16);
    const uint32_t sets[][2] = {{0, 0}, {CONVERT, 0}, {0, CONVERT}, {CONVERT, both}};
    for (size_t i = 0; i < COUNT_OF(sets); i++) {
        world w;
        const kvf_agent_options p = options_of(sets[i][0]), d = options_of(sets[i][1]);
        open_types(&w, hybrid_of(KVF_DTYPE_BF16, KVF_DTYPE_F32), TWO("P"),
                   hybrid_of(KVF_DTYPE_F32, KVF_DTYPE_F32), TWO("D"), &p, &d);
        for (int push = 0; push < 2; push++) {
            is_refused(&w, push, KVF_WAY_AUTO, KVF_E_UNSUPPORTED,
                       "full.k.dtype is \"f32\" locally and \"bf16\" remotely");
            is_refused(&w, push, KVF_WAY_AUTO, KVF_E_UNSUPPORTED,
                       "only where both sides allow the conversion");
        }
        world_close(&w);
    }
}

static void conversion_is_allowed_group_by_group(void **state) {
    (void)state;
    static const char *const groups[] = {"full"};
    world w;
    kvf_agent_options p = options_of(CONVERT), d = options_of(CONVERT);
    d.convert_groups = groups;
    d.convert_group_count = 1;
    open_types(&w, hybrid_of(KVF_DTYPE_BF16, KVF_DTYPE_BF16), TWO("P"),
               hybrid_of(KVF_DTYPE_F16, KVF_DTYPE_F16), TWO("D"), &p, &d);
    is_refused(&w, false, KVF_WAY_AUTO, KVF_E_UNSUPPORTED,
               "ssm.conv.x.dtype is \"f16\" locally and \"bf16\" remotely");
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    world_request_make(&w, &w.p, "a", 100, 5, 2, &held);
    world_request_make(&w, &w.d, "a", 100, 9, 3, &wanted);
    wanted.groups[SSM] = (kvf_group_steps){0};
    world_fill(&w, &w.p, &held, 1);
    world_hold(&w.p, &held, theirs);
    world_pull(&w.d, &wanted, &w.p, ours);
    world_all_done(&w, &w.d, ours);
    world_all_done(&w, &w.p, theirs);
    world_filled_as(kvf_engine_model(w.p.engine));
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 1), 0);
    world_filled_as(NULL);
    world_quiet(&w);
    world_close(&w);
}

static void the_direct_way_is_refused_where_types_differ(void **state) {
    (void)state;
    world w;
    const kvf_agent_options options = options_of(CONVERT);
    open_types(&w, hybrid_of(KVF_DTYPE_BF16, KVF_DTYPE_F32), TWO("P"),
               hybrid_of(KVF_DTYPE_F32, KVF_DTYPE_F32), TWO("D"), &options, &options);
    is_refused(&w, true, KVF_WAY_DIRECT, KVF_E_UNSUPPORTED,
               "way is direct: full.k is f32 locally and bf16 remotely");
    world_request held;
    uint64_t theirs[WORLD_MAX_RANKS];
    world_request_make(&w, &w.p, "pulled", 100, 5, 2, &held);
    world_hold(&w.p, &held, theirs);
    is_refused(&w, false, KVF_WAY_DIRECT, KVF_E_UNSUPPORTED,
               "way is direct: full.k is f32 locally and bf16 remotely");
    world_close(&w);
}

/* Like hybrid_of(), but with the two groups' numbers exchanged. */
static kvf_model *numbered_otherwise(kvf_dtype full) {
    kvf_model *usual = hybrid_of(full, KVF_DTYPE_F32);
    const kvf_group_desc groups[] = {*kvf_model_group(usual, SSM), *kvf_model_group(usual, FULL)};
    kvf_model *out = model_of(kvf_model_layer_count(usual), groups, COUNT_OF(groups));
    kvf_model_free(usual);
    return out;
}

static void packed_requests_are_refused_where_numbers_differ_and_the_way_out_is_said(void **state) {
    (void)state;
    const kvf_agent_options options = options_of(CONVERT);
    for (int push = 0; push < 2; push++) {
        world w;
        open_types(&w, hybrid_of(KVF_DTYPE_BF16, KVF_DTYPE_F32), TWO("P"), numbered_otherwise(KVF_DTYPE_F32),
                   TWO("D"), &options, &options);
        is_refused(&w, push, KVF_WAY_AUTO, KVF_E_MISMATCH,
                   "have the same numbers: give both models the same numbers, or one type");
        world_close(&w);
        open_types(&w, numbered_otherwise(KVF_DTYPE_BF16), TWO("P"), hybrid_of(KVF_DTYPE_F32, KVF_DTYPE_F32),
                   TWO("D"), &options, &options);
        is_refused(&w, push, KVF_WAY_AUTO, KVF_E_MISMATCH,
                   "have the same numbers: give both models the same numbers, or one type");
        world_close(&w);
        open_types(&w, numbered_otherwise(KVF_DTYPE_F32), TWO("P"), hybrid_of(KVF_DTYPE_F32, KVF_DTYPE_F32),
                   TWO("D"), &options, &options);
        world_request held;
        uint64_t theirs[WORLD_MAX_RANKS];
        world_request_make(&w, &w.p, push ? "pushed" : "pulled", 100, 5, 2, &held);
        if (push)
            world_push(&w.p, &held, theirs);
        else
            world_hold(&w.p, &held, theirs);
        is_refused(&w, push, KVF_WAY_PACKED, KVF_E_UNSUPPORTED,
                   "groups, layers or parts of P have other numbers than in this engine");
        world_close(&w);
    }
}

static void options_that_contradict_each_other_are_refused(void **state) {
    (void)state;
    static const char *const groups[] = {"full", "swa"};
    kvf_model *model = hybrid(4);
    kvf_engine *engine = engine_of(model, TWO("P"));
    kvf_agent *agent = NULL;
    kvf_agent_options options = options_of(CONVERT);
    options.way = KVF_WAY_DIRECT;
    assert_fails(kvf_agent_open(engine, 0, &options, &agent), KVF_E_INVALID, "way is direct");
    options = options_of(CONVERT | KVF_DTYPE_BIT(KVF_DTYPE_F64));
    assert_fails(kvf_agent_open(engine, 0, &options, &agent), KVF_E_INVALID,
                 "f16, bf16, f8_e4m3 and f8_e5m2");
    options = options_of(CONVERT);
    options.convert_groups = groups;
    options.convert_group_count = 2;
    assert_fails(kvf_agent_open(engine, 0, &options, &agent), KVF_E_NOT_FOUND, "no group \"swa\"");
    kvf_engine_free(engine);
    kvf_model_free(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_pair_of_types_is_converted_when_pulled_and_when_pushed),
        cmocka_unit_test(a_state_may_keep_its_type_while_keys_are_converted),
        cmocka_unit_test(a_checksum_of_converted_cells_is_that_of_the_reader),
        cmocka_unit_test(types_that_only_one_side_lets_be_converted_are_refused_by_name),
        cmocka_unit_test(conversion_is_allowed_group_by_group),
        cmocka_unit_test(the_direct_way_is_refused_where_types_differ),
        cmocka_unit_test(packed_requests_are_refused_where_numbers_differ_and_the_way_out_is_said),
        cmocka_unit_test(options_that_contradict_each_other_are_refused),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, world_is_real);
}
