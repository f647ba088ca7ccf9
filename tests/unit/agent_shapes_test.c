/* Engines of one shape share plans, for reads and for writes, and every byte is right. */
#include <stdio.h>

#include "agent/geometry.h"
#include "agent/session.h"
#include "agent_net.h"
#include "agent_world.h"

#define SHAPE(engine_name, blocks)                                                                           \
    ENGINE(.name = (engine_name), .tp_size = 2, .all = {.block_count = (blocks), .order = "L|BPHN"})
#define OTHER(engine_name) ENGINE(.name = (engine_name), .tp_size = 1, .all = {.block_count = 64})

static void open_three(world *w, const kvf_engine_spec *p, const kvf_engine_spec *d,
                       const kvf_engine_spec *e) {
    static const kvf_agent_options options = {.struct_size = sizeof options, .idle_ns = 300 * MS};
    world_open_model(w, attention(2, 4, 8), p, d, &options);
    world_add(w, e, &options);
}

/* Pulls 40 tokens, from blocks 10 on into blocks `into` on. */
static void pull_from(world *w, world_engine *from, const char *id, uint32_t into, uint32_t seed) {
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    world_request_make(w, from, id, 40, 10, 1, &held);
    world_request_make(w, &w->d, id, 40, into, 1, &wanted);
    world_fill(w, from, &held, seed);
    world_hold(from, &held, theirs);
    world_pull(&w->d, &wanted, from, ours);
    world_all_done(w, &w->d, ours);
    world_all_done(w, from, theirs);
    assert_int_equal(world_wrong_cells(w, &w->d, &wanted, seed), 0);
    assert_true(world_wrong_cells(w, &w->d, &wanted, seed + 1) > 0);
}

static void push_to(world *w, world_engine *to, const char *id, uint32_t seed) {
    world_request pushed, expected;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    world_request_make(w, &w->p, id, 40, 10, 1, &pushed);
    world_request_make(w, to, id, 40, 20, 1, &expected);
    world_fill(w, &w->p, &pushed, seed);
    world_expect(to, &expected, &w->p, theirs);
    world_push(&w->p, &pushed, ours);
    world_ready(&w->p, ours);
    world_all_done(w, to, theirs);
    world_all_done(w, &w->p, ours);
    assert_int_equal(world_wrong_cells(w, to, &expected, seed), 0);
    assert_true(world_wrong_cells(w, to, &expected, seed + 1) > 0);
}

static void the_second_engine_of_a_shape_is_read_by_the_plan_of_the_first(void **state) {
    (void)state;
    world w;
    open_three(&w, SHAPE("P", 64), OTHER("D"), SHAPE("E", 64));
    pull_from(&w, &w.p, "a", 10, 3);
    assert_int_equal(world_stats(w.d.agents[0]).plans_built, 1);
    pull_from(&w, &w.e, "b", 30, 4);
    assert_int_equal(world_stats(w.d.agents[0]).plans_built, 1);
    assert_int_equal(world_stats(w.d.agents[0]).plans_now, 1);
    /* The plan is freed with the last engine of its shape. */
    world_until(&w, world_stats(w.d.agents[0]).plans_now == 0);
    assert_int_equal(world_stats(w.d.agents[0]).peers_now, 0);
    pull_from(&w, &w.e, "c", 30, 5);
    assert_int_equal(world_stats(w.d.agents[0]).plans_built, 2);
    world_quiet(&w);
    world_close(&w);
}

/* Also one of another engine: what a request needs depends on the shape alone. */
static void a_pull_leaves_its_request_to_the_next_of_the_shape(void **state) {
    (void)state;
    world w;
    open_three(&w, SHAPE("P", 64), OTHER("D"), SHAPE("E", 64));
    pull_from(&w, &w.p, "a", 10, 3);
    const kvf_geometry *shape = w.d.agents[0]->geometries;
    const kvf_request *left = shape->spares[0];
    assert_int_equal(shape->spare_count, 1);
    pull_from(&w, &w.p, "b", 30, 4);
    pull_from(&w, &w.e, "c", 30, 5);
    assert_int_equal(shape->spare_count, 1);
    assert_ptr_equal(shape->spares[0], left);
    world_quiet(&w);
    world_close(&w);
}

static void requests_beyond_the_spare_ones_are_freed(void **state) {
    (void)state;
    enum { PULLS = KVF_SPARE_REQUESTS + 3 };
    world w;
    world_request held[PULLS], wanted[PULLS];
    uint64_t theirs[PULLS][WORLD_MAX_RANKS], ours[PULLS][WORLD_MAX_RANKS];
    open_three(&w, SHAPE("P", 64), OTHER("D"), SHAPE("E", 64));
    for (uint32_t i = 0; i < PULLS; i++) {
        char id[16];
        (void)snprintf(id, sizeof id, "%u", i);
        world_request_make(&w, &w.p, id, 20, 2 * i, 1, &held[i]);
        world_request_make(&w, &w.d, id, 20, 4 * i, 1, &wanted[i]);
        world_hold(&w.p, &held[i], theirs[i]);
        world_pull(&w.d, &wanted[i], &w.p, ours[i]);
    }
    for (uint32_t i = 0; i < PULLS; i++)
        world_all_done(&w, &w.d, ours[i]);
    assert_int_equal(w.d.agents[0]->geometries->spare_count, KVF_SPARE_REQUESTS);
    world_quiet(&w);
    world_close(&w);
}

/* An agent may know thousands of peers: what it has to do with one of them must not take longer for that. */
static void requests_and_peers_that_are_forgotten_make_nobody_look_at_all_sessions(void **state) {
    (void)state;
    world w;
    open_three(&w, SHAPE("P", 64), OTHER("D"), SHAPE("E", 64));
    kvf_agent *agent = w.d.agents[0];
    pull_from(&w, &w.p, "a", 10, 3);
    pull_from(&w, &w.e, "b", 30, 4);
    world_run_for(&w, MS);
    const uint32_t before = agent->session_sweep.pass;
    for (uint32_t i = 0; i < 6; i++) {
        pull_from(&w, &w.e, (const char[]){(char)('c' + i), '\0'}, 10, 5 + i);
        world_run_for(&w, 100 * MS); /* also the times by which calls would have been repeated */
    }
    assert_int_equal(world_stats(agent).peers_evicted, 2); /* the ranks of P */
    assert_int_equal(agent->session_sweep.pass, before);
    kvf_sessions_due(agent);
    world_run_for(&w, MS);
    assert_int_equal(agent->session_sweep.pass, before + 1);
    world_quiet(&w);
    world_close(&w);
}

/* The number of blocks is part of a shape, since it limits ids. */
static void an_engine_with_more_blocks_has_a_plan_of_its_own(void **state) {
    (void)state;
    world w;
    open_three(&w, SHAPE("P", 64), OTHER("D"), SHAPE("E", 65));
    pull_from(&w, &w.p, "a", 10, 3);
    pull_from(&w, &w.e, "b", 30, 4);
    assert_int_equal(world_stats(w.d.agents[0]).plans_built, 2);
    assert_int_equal(world_stats(w.d.agents[0]).plans_now, 2);
    world_quiet(&w);
    world_close(&w);
}

static void the_second_engine_of_a_shape_is_written_to_by_the_plans_of_the_first(void **state) {
    (void)state;
    world w;
    open_three(&w, OTHER("P"), SHAPE("D", 64), SHAPE("E", 64));
    push_to(&w, &w.d, "a", 3);
    const uint64_t built = world_stats(w.p.agents[0]).plans_built;
    assert_true(built >= 2); /* one plan for each rank */
    push_to(&w, &w.e, "b", 4);
    assert_int_equal(world_stats(w.p.agents[0]).plans_built, built);
    assert_int_equal(world_stats(w.p.agents[0]).plans_now, built);
    world_until(&w, world_stats(w.p.agents[0]).plans_now == 0);
    assert_int_equal(world_stats(w.p.agents[0]).peers_now, 0);
    assert_int_equal(world_stats(w.p.agents[0]).memory_now_bytes, 0);
    push_to(&w, &w.e, "c", 5);
    assert_int_equal(world_stats(w.p.agents[0]).plans_built, 2 * built);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_second_engine_of_a_shape_is_read_by_the_plan_of_the_first),
        cmocka_unit_test(a_pull_leaves_its_request_to_the_next_of_the_shape),
        cmocka_unit_test(requests_beyond_the_spare_ones_are_freed),
        cmocka_unit_test(requests_and_peers_that_are_forgotten_make_nobody_look_at_all_sessions),
        cmocka_unit_test(an_engine_with_more_blocks_has_a_plan_of_its_own),
        cmocka_unit_test(the_second_engine_of_a_shape_is_written_to_by_the_plans_of_the_first),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
