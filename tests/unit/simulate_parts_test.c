/* The parts of simulations: happenings in their order, quantiles, and blocks of engines that runs are checked against. */
#include "simulate/fleet.h"
#include "simulate/quantiles.h"

#include "shapes.h"

#define COUNT 500u

static uint32_t draw(uint32_t below) {
    static uint64_t random = 88172645463325252u;
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return (uint32_t)(random >> 20) % below;
}

/* ---- the timeline ---------------------------------------------------------------------------- */

typedef struct item {
    kvf_happening happening;
    uint64_t wanted; /* UINT64_MAX: never */
    uint32_t set;    /* the number of the call that has set it */
    bool happened;
} item;

static item items[COUNT];
static kvf_timeline line;
static uint64_t last_time;
static uint32_t last_set, happened_count;

static void happen(kvf_happening *happening) {
    item *one = (item *)happening;
    assert_int_equal(line.now, one->wanted);
    assert_true(line.now > last_time || (line.now == last_time && one->set > last_set));
    assert_false(one->happened);
    last_time = line.now;
    last_set = one->set;
    one->happened = true;
    happened_count++;
}

static void happenings_come_in_order_however_they_were_set(void **state) {
    uint32_t wanted = 0;
    (void)state;
    line = (kvf_timeline){0};
    last_time = last_set = happened_count = 0;
    for (uint32_t i = 0; i < COUNT; i++) {
        items[i] = (item){.wanted = UINT64_MAX};
        assert_ok(kvf_happening_make(&line, &items[i].happening, happen));
    }
    for (uint32_t set = 1; set <= 5 * COUNT; set++) {
        item *one = &items[draw(COUNT)];
        one->wanted = draw(4) ? 1 + draw(100) : UINT64_MAX; /* many at a time, and some taken back */
        one->set = set;
        kvf_happening_set(&line, &one->happening, one->wanted);
    }
    for (uint32_t i = 0; i < COUNT; i++)
        wanted += items[i].wanted != UINT64_MAX;
    while (kvf_timeline_step(&line))
        continue;
    assert_int_equal(happened_count, wanted);
    for (uint32_t i = 0; i < COUNT; i++)
        kvf_happening_drop(&line, &items[i].happening);
    kvf_timeline_free(&line);
}

static void a_happening_is_brought_forward_and_never_lies_in_the_past(void **state) {
    (void)state;
    line = (kvf_timeline){0};
    last_time = last_set = happened_count = 0;
    items[0] = (item){.wanted = 7, .set = 1};
    items[1] = (item){.wanted = 7, .set = 2};
    assert_ok(kvf_happening_make(&line, &items[0].happening, happen));
    assert_ok(kvf_happening_make(&line, &items[1].happening, happen));
    kvf_happening_by(&line, &items[0].happening, 9);
    kvf_happening_by(&line, &items[0].happening, 7);
    kvf_happening_by(&line, &items[0].happening, 8); /* it stays */
    assert_true(kvf_timeline_step(&line));
    kvf_happening_set(&line, &items[1].happening, 3); /* which is over */
    assert_true(kvf_timeline_step(&line));
    assert_false(kvf_timeline_step(&line));
    assert_int_equal(happened_count, 2);
    kvf_happening_set(&line, &items[0].happening, 20);
    kvf_happening_drop(&line, &items[0].happening);
    assert_false(kvf_timeline_step(&line));
    kvf_happening_drop(&line, &items[1].happening);
    kvf_timeline_free(&line);
}

/* ---- quantiles ------------------------------------------------------------------------------- */

static int compare(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void assert_near(uint64_t got, uint64_t exact) {
    assert_true(got >= exact && (double)got <= 1.02 * (double)exact);
}

static void quantiles_are_accurate_to_two_percent(void **state) {
    static uint64_t all[10000];
    kvf_quantiles q = {0};
    double sum = 0;
    (void)state;
    for (uint32_t i = 0; i < COUNT_OF(all); i++) {
        all[i] = (uint64_t)draw(1000) << draw(30);
        kvf_quantiles_add(&q, all[i]);
        sum += (double)all[i];
    }
    qsort(all, COUNT_OF(all), sizeof *all, compare);
    const kvf_simulated_times times = kvf_quantiles_get(&q);
    assert_int_equal(times.count, COUNT_OF(all));
    assert_near(times.p50_ns, all[4999]);
    assert_near(times.p90_ns, all[8999]);
    assert_near(times.p99_ns, all[9899]);
    assert_int_equal(times.worst_ns, all[9999]);
    assert_true(times.mean_ns == sum / (double)times.count);
}

static void quantiles_of_nothing_and_of_the_largest_numbers(void **state) {
    kvf_quantiles q = {0};
    (void)state;
    assert_int_equal(kvf_quantiles_get(&q).worst_ns, 0);
    assert_int_equal(kvf_quantiles_get(&q).p99_ns, 0);
    kvf_quantiles_add(&q, 0);
    assert_int_equal(kvf_quantiles_get(&q).p50_ns, 0);
    kvf_quantiles_add(&q, UINT64_MAX);
    assert_true(kvf_quantiles_get(&q).p99_ns == UINT64_MAX);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

typedef struct scene {
    kvf_model *model;
    kvf_engine *engine;
    kvf_world world;
    kvf_fleet fleet;
} scene;

static uint64_t no_time(void *context) {
    (void)context;
    return 1;
}

static void no_event(kvf_host *host, const kvf_event *event) {
    (void)host, (void)event;
}

static void open_scene(scene *s, const char *model, const char *order, bool share_pages) {
    const kvf_group_spec group = {.tokens_per_block = 16, .block_count = 64, .order = order};
    const kvf_engine_spec spec = {.struct_size = sizeof spec, .tp_size = 2, .all = group};
    const kvf_agent_options agent = {
        .struct_size = sizeof agent, .transport = "modelled", .way = KVF_WAY_DIRECT};
    memset(s, 0, sizeof *s);
    assert_ok(kvf_model_load(model, NULL, &s->model));
    assert_ok(kvf_engine_build(s->model, &spec, &s->engine));
    s->world.clock = (kvf_clock){no_time, &s->world};
    s->fleet.event = no_event;
    const kvf_simulated_role role = {.engine_count = 2, .shape = s->engine, .share_pages = share_pages};
    assert_ok(kvf_fleet_open(&s->fleet, &s->world, "test", &role, &agent));
}

static void close_scene(scene *s) {
    kvf_fleet_close(&s->fleet);
    kvf_timeline_free(&s->world.line);
    kvf_free(s->world.connections);
    kvf_engine_free(s->engine);
    kvf_model_free(s->model);
}

/* A run of a cell of one block on one side, and of one on the other. */
static kvf_run run_of(const scene *s, uint32_t group, uint32_t layer, uint32_t ours, uint32_t theirs) {
    kvf_cell_location here = {.struct_size = sizeof here}, there = {.struct_size = sizeof there};
    const kvf_shard *shard = kvf_engine_shard(s->engine, 1);
    const uint32_t unit = kvf_shard_get(shard)->groups[group].parts[0].units.begin;
    assert_ok(kvf_shard_locate(shard, group, layer, 0, ours, 0, unit, &here));
    assert_ok(kvf_shard_locate(shard, group, layer, 0, theirs, 0, unit, &there));
    return (kvf_run){here.offset, there.offset, here.bytes, here.region, there.region};
}

/* Of one run, which rank 1 of the first engine moves. */
static void assert_owners(const scene *s, kvf_run run, uint32_t request, uint64_t astray, uint64_t unlike) {
    const kvf_run_owners found =
        kvf_run_owners_of(&s->fleet.engines[0].hosts[1], &s->fleet.engines[1].hosts[1], &run, 1);
    assert_int_equal(found.request, request);
    assert_int_equal(found.astray, astray);
    assert_int_equal(found.unlike, unlike);
}

/* The control of simulations: only runs from blocks of a request to blocks of the same one are right. */
static void runs_to_or_from_blocks_of_others_are_foreign(void **state) {
    static const char *const orders[] = {"L|BPHN", "L|BPNH", "LP|BNH", "BLPHN", "LBPHN", "L|PBHN"};
    (void)state;
    for (uint32_t i = 0; i < COUNT_OF(orders); i++) {
        scene s;
        kvf_group_steps a, b, other;
        uint32_t ids[3][4];
        open_scene(&s, "llama-3.1-8b", orders[i], false);
        kvf_fleet_engine *one = &s.fleet.engines[0], *two = &s.fleet.engines[1];
        assert_true(kvf_engine_take_blocks(one, 1, 64, &a, ids[0]));
        assert_true(kvf_engine_take_blocks(two, 1, 64, &b, ids[1]));
        assert_true(kvf_engine_take_blocks(two, 2, 64, &other, ids[2]));
        for (uint32_t layer = 0; layer < 32; layer += 31)
            for (uint32_t block = 0; block < 4; block++) {
                assert_owners(&s, run_of(&s, 0, layer, ids[0][block], ids[1][block]), 1, 0, 0);
                assert_owners(&s, run_of(&s, 0, layer, ids[0][block], ids[2][block]), 1, 0, 1);
                assert_owners(&s, run_of(&s, 0, layer, ids[0][block], 63), 1, 0, 1);
                assert_owners(&s, run_of(&s, 0, layer, 63, ids[1][block]), 0, 1, 0);
            }
        kvf_run two_blocks =
            run_of(&s, 0, 0, ids[0][1], ids[1][1]); /* and into the one behind it, or the end */
        two_blocks.bytes = kvf_shard_placement(kvf_engine_shard(s.engine, 1), 0, 0, 0)->block_stride + 1;
        kvf_engine_give_blocks(one, &a);
        assert_owners(&s, two_blocks, 0, 1, 0);
        close_scene(&s);
    }
}

static void blocks_are_given_whole_or_not_at_all(void **state) {
    scene s;
    kvf_group_steps a, b;
    uint32_t ids[2][64];
    (void)state;
    open_scene(&s, "llama-3.1-8b", "L|BPHN", false);
    kvf_fleet_engine *engine = &s.fleet.engines[0];
    assert_int_equal(kvf_fleet_blocks(&s.fleet, 0, 1000), 63);
    assert_true(kvf_engine_take_blocks(engine, 1, 1000, &a, ids[0]));
    assert_int_equal(a.table.count, 63);
    assert_int_equal(a.end, 1000);
    assert_false(kvf_engine_take_blocks(engine, 2, 17, &b, ids[1]));
    assert_int_equal(engine->pools[0].free_count, 1);
    assert_true(kvf_engine_take_blocks(engine, 2, 16, &b, ids[1]));
    kvf_engine_give_blocks(engine, &a);
    kvf_engine_give_blocks(engine, &b);
    assert_int_equal(engine->pools[0].free_count, 64);
    for (uint32_t i = 0; i < 64; i++)
        assert_int_equal(engine->pools[0].owners[i], 0);
    close_scene(&s);
}

/* Layers with a window of 128 tokens have no blocks for what lies before. */
static void blocks_before_a_window_are_not_taken(void **state) {
    scene s;
    kvf_group_steps steps[2];
    uint32_t ids[128];
    (void)state;
    open_scene(&s, "gpt-oss-120b", "L|BPHN", false);
    const uint32_t windowed = kvf_model_group(s.model, 1)->window_tokens == 128;
    assert_int_equal(kvf_model_group(s.model, windowed)->window_tokens, 128);
    assert_true(kvf_engine_take_blocks(&s.fleet.engines[0], 1, 800, steps, ids));
    assert_int_equal(steps[windowed].table.first_block, 42); /* token 672, of the last 128 */
    assert_int_equal(steps[windowed].table.count, 8);
    assert_int_equal(steps[1 - windowed].table.count, 50);
    kvf_engine_give_blocks(&s.fleet.engines[0], steps);
    close_scene(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(happenings_come_in_order_however_they_were_set),
        cmocka_unit_test(a_happening_is_brought_forward_and_never_lies_in_the_past),
        cmocka_unit_test(quantiles_are_accurate_to_two_percent),
        cmocka_unit_test(quantiles_of_nothing_and_of_the_largest_numbers),
        cmocka_unit_test(runs_to_or_from_blocks_of_others_are_foreign),
        cmocka_unit_test(blocks_are_given_whole_or_not_at_all),
        cmocka_unit_test(blocks_before_a_window_are_not_taken),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
