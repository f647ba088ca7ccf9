/* Memory that comes and goes while peers know it: an engine that sleeps, wakes, and may have its cache elsewhere. */
#include "agent/session.h"
#include "agent_letters.h"
#include "agent_world.h"
#include "transport/front.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})

typedef struct scene {
    world w;
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    kvf_agent *p, *d;
} scene;

static void set_up(scene *s) {
    const kvf_agent_options options = {.struct_size = sizeof options, .peer_timeout_ns = 50 * MS};
    memset(s, 0, sizeof *s);
    world_open_model(&s->w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
    world_request_make(&s->w, &s->w.p, "a", 50, 0, 1, &s->held);
    world_request_make(&s->w, &s->w.d, "a", 50, 8, 1, &s->wanted);
    s->wanted.request.contact = s->w.p.contact;
    s->p = s->w.p.agents[0];
    s->d = s->w.d.agents[0];
}

static void tear_down(scene *s) {
    world_quiet(&s->w);
    world_close(&s->w);
}

static void hold_and_pull(scene *s, uint32_t seed) {
    world_fill(&s->w, &s->w.p, &s->held, seed);
    world_hold(&s->w.p, &s->held, s->theirs);
    world_pull(&s->w.d, &s->wanted, &s->w.p, s->ours);
    world_all_done(&s->w, &s->w.d, s->ours);
    world_all_done(&s->w, &s->w.p, s->theirs);
    assert_int_equal(world_wrong_cells(&s->w, &s->w.d, &s->wanted, seed), 0);
    assert_true(world_wrong_cells(&s->w, &s->w.d, &s->wanted, seed + 1) > 0);
}

static void expect_and_push(scene *s, uint32_t seed) {
    world_fill(&s->w, &s->w.p, &s->held, seed);
    world_expect(&s->w.d, &s->wanted, &s->w.p, s->ours);
    world_push(&s->w.p, &s->held, s->theirs);
    world_ready(&s->w.p, s->theirs);
    world_all_done(&s->w, &s->w.d, s->ours);
    world_all_done(&s->w, &s->w.p, s->theirs);
    assert_int_equal(world_wrong_cells(&s->w, &s->w.d, &s->wanted, seed), 0);
}

static uint64_t region_bytes(const world_engine *e, uint32_t region) {
    return kvf_shard_get(kvf_engine_shard(e->engine, 0))->region_bytes[region];
}

static void take_back(scene *s, world_engine *e) {
    for (uint32_t i = 0; i < 2; i++) {
        world_until(&s->w, kvf_agent_unregister_region(e->agents[0], i) == KVF_OK);
        memset(e->memory[0][i], 0xee, region_bytes(e, i)); /* a peer that still reads it gets these bytes */
    }
}

/* Registers new memory, in another order. */
static void give_at_once(world_engine *e) {
    for (uint32_t i = 2; i-- > 0;) {
        uint64_t bytes = region_bytes(e, i);
        assert_ok(kvf_agent_allocate(e->agents[0], KVF_MEMORY_HOST, 0, bytes, &e->memory[0][i]));
        kvf_memory memory = {.struct_size = sizeof memory, .address = e->memory[0][i], .bytes = bytes};
        assert_ok(kvf_agent_register_region(e->agents[0], i, &memory));
    }
}

/* A peer with a connection for the old memory has noticed by then. */
static void give_anew(scene *s, world_engine *e) {
    world_run_for(&s->w, 10 * MS);
    give_at_once(e);
}

static void a_producer_whose_cache_moves_is_met_again(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    hold_and_pull(&s, 1);
    take_back(&s, &s.w.p);
    give_anew(&s, &s.w.p);
    hold_and_pull(&s, 2);
    expect_and_push(&s, 3);
    tear_down(&s);
}

static void a_consumer_whose_cache_moves_is_written_where_it_is_now(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    expect_and_push(&s, 1);
    take_back(&s, &s.w.d);
    give_anew(&s, &s.w.d);
    expect_and_push(&s, 2);
    hold_and_pull(&s, 3);
    take_back(&s, &s.w.d);
    give_anew(&s, &s.w.d);
    hold_and_pull(&s, 4);
    tear_down(&s);
}

/* P has no connection to D's memory, because D reads, and so has not forgotten D. */
static void a_consumer_whose_cache_moves_greets_no_producer_again(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    world_close_agents(&s.w.d);
    world_open_agents(
        &s.w.d, &(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), .way = KVF_WAY_DIRECT});
    s.d = s.w.d.agents[0];
    hold_and_pull(&s, 1);
    take_back(&s, &s.w.d);
    give_anew(&s, &s.w.d);
    hold_and_pull(&s, 2);
    assert_int_equal(s.d->all_sessions->openings, 1);
    tear_down(&s);
}

static void a_region_with_blocks_of_a_request_stays_and_the_request_is_named(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    world_hold(&s.w.p, &s.held, s.theirs);
    assert_fails(kvf_agent_unregister_region(s.p, 1), KVF_E_AGAIN, "\"a\"", "region 1");
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    assert_fails(kvf_agent_unregister_region(s.d, 0), KVF_E_AGAIN, "\"a\"", "region 0");
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    hold_and_pull(&s, 5); /* nothing has changed */
    tear_down(&s);
}

static void a_request_whose_id_is_no_text_is_named_without_what_cannot_be_printed(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    s.held.request.id = (kvf_request_id){"a\0,\x1b[m\n\xff", 8};
    world_hold(&s.w.p, &s.held, s.theirs);
    assert_fails(kvf_agent_unregister_region(s.p, 0), KVF_E_AGAIN, "request \"a?,?[m??\", ticket 1",
                 "region 0");
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    (void)world_next(&s.w, s.p, s.theirs[0]);
    tear_down(&s);
}

/* P has answered the card that is no longer valid by the time that D hears of it. */
static void a_consumer_whose_cache_moves_while_it_joins_joins_again(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    letters_begin();
    letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_ANSWER, KVF_CALL_JOIN);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 50 * MS);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    world_run_for(&s.w, 50 * MS);
    take_back(&s, &s.w.d);
    letters_no_rules();
    world_run_for(&s.w, 3 * SECOND);
    give_anew(&s, &s.w.d);
    world_forget(&s.w);
    expect_and_push(&s, 2);
    letters_end();
    tear_down(&s);
}

/* Groups have memory of their own, and a request may need blocks of one group only. */
static void a_region_without_blocks_of_a_request_may_go(void **state) {
    (void)state;
    scene s = {.theirs = {0}};
    const kvf_engine_spec *spec =
        ENGINE(.name = "P", .all = {.block_count = 64, .order = "L|BPHN"}, .state = {.order = "L|BTNPH"});
    world_open_model(&s.w, hybrid(4), spec, ONE("D"), NULL);
    s.p = s.w.p.agents[0];
    world_request_make(&s.w, &s.w.p, "a", 50, 0, 1, &s.held);
    s.held.groups[1] = (kvf_group_steps){.begin = 0}; /* no state */
    const kvf_shard *shard = kvf_engine_shard(s.w.p.engine, 0);
    const uint32_t used = kvf_shard_placement(shard, 0, 0, 0)->region,
                   unused = kvf_shard_placement(shard, 1, 1, 0)->region;
    assert_int_not_equal(used, unused);
    world_hold(&s.w.p, &s.held, s.theirs);
    assert_fails(kvf_agent_unregister_region(s.p, used), KVF_E_AGAIN, "\"a\"", "region");
    assert_ok(kvf_agent_unregister_region(s.p, unused));
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    (void)world_next(&s.w, s.p, s.theirs[0]);
    tear_down(&s);
}

/* D compares checksums of the region that it needs, while it has taken back the one before. */
static void a_pull_is_verified_while_another_region_is_gone(void **state) {
    (void)state;
    scene s = {.theirs = {0}};
    const kvf_engine_spec *spec =
        ENGINE(.name = "D", .all = {.block_count = 64, .order = "L|BPHN"}, .state = {.order = "L|BTNPH"});
    const kvf_agent_options options = {.struct_size = sizeof options, .way = KVF_WAY_DIRECT, .verify = true};
    world_open_model(&s.w, hybrid(4), ONE("P"), spec, &options);
    s.d = s.w.d.agents[0];
    world_request_make(&s.w, &s.w.p, "a", 50, 0, 1, &s.held);
    world_request_make(&s.w, &s.w.d, "a", 50, 8, 1, &s.wanted);
    s.wanted.groups[0] = (kvf_group_steps){.begin = 0}; /* only the state */
    s.wanted.request.bytes_per_second = 1000;
    world_fill(&s.w, &s.w.p, &s.held, 1);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 100 * MS);
    assert_int_equal(kvf_shard_placement(kvf_engine_shard(s.w.d.engine, 0), 0, 0, 0)->region, 0);
    assert_ok(kvf_agent_unregister_region(s.d, 0));
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    tear_down(&s);
}

/* P takes the memory of its states back, and registers it again: its sessions get new ids. */
static void renew_states(const scene *s) {
    const uint32_t states = kvf_shard_placement(kvf_engine_shard(s->w.p.engine, 0), 1, 1, 0)->region;
    const kvf_memory memory = s->p->regions[states];
    assert_ok(kvf_agent_unregister_region(s->p, states));
    assert_ok(kvf_agent_register_region(s->p, states, &memory));
}

/* The region has no blocks of the push. D notices with its next sign of life, and joins again for its next request, but
 * it has not lost P. */
static void a_push_goes_on_while_its_consumer_joins_again_because_another_region_has_changed(void **state) {
    (void)state;
    scene s = {.theirs = {0}};
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    const kvf_engine_spec *spec =
        ENGINE(.name = "P", .all = {.block_count = 64, .order = "L|BPHN"}, .state = {.order = "L|BTNPH"});
    const kvf_agent_options options = {.struct_size = sizeof options, .way = KVF_WAY_DIRECT};
    world_open_model(&s.w, hybrid(4), spec, ONE("D"), &options);
    s.p = s.w.p.agents[0];
    s.d = s.w.d.agents[0];
    world_request_make(&s.w, &s.w.p, "slow", 50, 0, 1, &s.held);
    world_request_make(&s.w, &s.w.d, "slow", 50, 8, 1, &s.wanted);
    s.held.groups[1] = s.wanted.groups[1] = (kvf_group_steps){.begin = 0}; /* no state */
    s.held.request.bytes_per_second = 1000;
    world_fill(&s.w, &s.w.p, &s.held, 1);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_push(&s.w.p, &s.held, s.theirs);
    world_ready(&s.w.p, s.theirs);
    world_run_for(&s.w, 100 * MS);
    renew_states(&s);
    world_until(&s.w, s.d->all_sessions->openings == 2);
    world_request_make(&s.w, &s.w.p, "next", 50, 20, 1, &held);
    world_request_make(&s.w, &s.w.d, "next", 50, 20, 1, &wanted);
    world_expect(&s.w.d, &wanted, &s.w.p, ours);
    world_push(&s.w.p, &held, theirs);
    world_ready(&s.w.p, theirs);
    world_all_done(&s.w, &s.w.d, ours);
    world_all_done(&s.w, &s.w.p, theirs);
    assert_int_equal(world_stats(s.p).done[KVF_REQUEST_PUSH], 1); /* "slow" is under way */
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    tear_down(&s);
}

/* D learns only with its next sign of life that its session has another id, and until then says that it knows no such
 * session. */
static void a_push_that_ends_before_its_consumer_has_greeted_anew_is_done(void **state) {
    (void)state;
    for (int told = 0; told < 2; told++) {
        scene s = {.theirs = {0}};
        const kvf_engine_spec *spec =
            ENGINE(.name = "P", .all = {.block_count = 64, .order = "L|BPHN"}, .state = {.order = "L|BTNPH"});
        const kvf_agent_options options = {.struct_size = sizeof options, .way = KVF_WAY_DIRECT};
        world_open_model(&s.w, hybrid(4), spec, ONE("D"), &options);
        s.p = s.w.p.agents[0];
        world_request_make(&s.w, &s.w.p, "a", 50, 0, 1, &s.held);
        world_request_make(&s.w, &s.w.d, "a", 50, 8, 1, &s.wanted);
        s.held.groups[1] = s.wanted.groups[1] = (kvf_group_steps){.begin = 0}; /* no state */
        world_fill(&s.w, &s.w.p, &s.held, 1);
        letters_begin();
        letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_CALL, KVF_CALL_WRITTEN);
        world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
        world_push(&s.w.p, &s.held, s.theirs);
        if (told) /* in the former session, which D has left when it hears that */
            world_ready(&s.w.p, s.theirs);
        world_run_for(&s.w, 100 * MS);
        renew_states(&s);
        if (!told) {
            letters_no_rules();
            world_ready(&s.w.p, s.theirs);
        }
        world_until(&s.w, s.w.d.agents[0]->all_sessions->openings == 2);
        letters_no_rules();
        world_all_done(&s.w, &s.w.d, s.ours);
        world_all_done(&s.w, &s.w.p, s.theirs);
        assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
        letters_end();
        tear_down(&s);
    }
}

static void a_region_of_one_part_stays_while_a_request_uses_it(void **state) {
    (void)state;
    scene s = {.theirs = {0}};
    world_open_model(&s.w, attention(1, 4, 8),
                     ENGINE(.name = "P", .all = {.block_count = 64, .order = "LP|BNH"}), ONE("D"), NULL);
    s.p = s.w.p.agents[0];
    world_request_make(&s.w, &s.w.p, "a", 50, 0, 1, &s.held);
    world_hold(&s.w.p, &s.held, s.theirs);
    for (uint32_t part = 0; part < 2; part++) {
        const uint32_t region = kvf_shard_placement(kvf_engine_shard(s.w.p.engine, 0), 0, 0, part)->region;
        assert_int_equal(region, part);
        assert_fails(kvf_agent_unregister_region(s.p, region), KVF_E_AGAIN, "\"a\"", "region");
    }
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    (void)world_next(&s.w, s.p, s.theirs[0]);
    tear_down(&s);
}

static void a_pull_waits_for_a_producer_that_sleeps(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    take_back(&s, &s.w.p);
    uint64_t ticket;
    assert_fails(kvf_agent_hold(s.p, &s.held.request, &ticket), KVF_E_INVALID, "no memory registered");
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 500 * MS);
    assert_int_equal(world_count(&s.w, s.d, KVF_EVENT_DONE), 0);
    give_anew(&s, &s.w.p);
    world_fill(&s.w, &s.w.p, &s.held, 7);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 7), 0);
    tear_down(&s);
}

/* D has a connection to P's memory, and has not noticed its end when it is asked for the next request. */
static void a_pull_that_begins_before_the_consumer_notices_that_memory_has_moved_goes_on(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    hold_and_pull(&s, 1);
    for (uint32_t i = 0; i < 2; i++)
        assert_ok(kvf_agent_unregister_region(s.p, i));
    give_at_once(&s.w.p);
    world_forget(&s.w);
    hold_and_pull(&s, 2);
    assert_int_equal(world_stats(s.d).peers_lost, 0);
    tear_down(&s);
}

static void a_consumer_that_waits_for_a_sleeping_producer_is_told_so(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    take_back(&s, &s.w.p);
    s.wanted.request.patience_ns = 500 * MS;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    const world_outcome *failed = world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    assert_non_null(strstr(failed->detail, "has unregistered its memory"));
    give_anew(&s, &s.w.p);
    /* until they have met: P is told that D gave the request up, which would end a later hold */
    world_run_for(&s.w, 2000 * MS);
    s.wanted.request.patience_ns = 0;
    hold_and_pull(&s, 3);
    tear_down(&s);
}

/* D sees only that its connection to P's memory has ended: it must not fence P, which would end P's reads from D. */
static void an_engine_that_takes_memory_back_goes_on_reading(void **state) {
    (void)state;
    /* Once a lease has passed, D shuts P out to have its blocks back: a slow machine must be done before. */
    const kvf_agent_options options = {
        .struct_size = sizeof options, .lease_ns = 8 * SECOND, .way = KVF_WAY_DIRECT};
    world w;
    world_request held, wanted, never;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS];
    world_open_model(&w, hybrid(4), ONE("P"), ONE("D"), &options);
    world_pull_everything(&w, "both", 50, 1); /* D has a connection to P's memory */
    world_request_make(&w, &w.d, "never", 50, 60, 1, &never);
    world_expect(&w.d, &never, &w.p, expects); /* P has a connection to D's memory */

    world_request_make(&w, &w.d, "back", 900, 0, 1, &held);
    world_request_make(&w, &w.p, "back", 900, 0, 1, &wanted);
    held.groups[1] = wanted.groups[1] = (kvf_group_steps){0};
    wanted.request.bytes_per_second = 150000; /* one second */
    world_fill(&w, &w.d, &held, 2);
    world_hold(&w.d, &held, holds);
    world_pull(&w.p, &wanted, &w.d, pulls);
    world_run_for(&w, 100 * MS);
    const uint32_t states = kvf_shard_placement(kvf_engine_shard(w.p.engine, 0), 1, 1, 0)->region;
    world_until(&w, kvf_agent_unregister_region(w.p.agents[0], states) == KVF_OK);
    (void)world_failed(&w, w.d.agents[0], expects[0], KVF_E_PEER_LOST);
    world_all_done(&w, &w.p, pulls);
    world_all_done(&w, &w.d, holds);
    assert_int_equal(world_wrong_cells(&w, &w.p, &wanted, 2), 0);
    world_quiet(&w);
    world_close(&w);
}

static kvf_status (*take_back_well)(void *endpoint, uint32_t region);

static kvf_status take_back_late(void *endpoint, uint32_t region) {
    (void)take_back_well(endpoint, region);
    return kvf_fail(KVF_E_AGAIN, "a peer is in the middle of a write");
}

/* The engine gives up waiting for the peer, and goes on with the region. Peers were refused it, or could not connect. */
static void a_region_that_cannot_be_taken_back_serves_again(void **state) {
    (void)state;
    scene s;
    kvf_fabric fabric = *kvf_fabric_named("inproc");
    take_back_well = fabric.unregister_region;
    fabric.unregister_region = take_back_late;
    world_fabric(&fabric);
    set_up(&s);
    world_fabric(NULL);
    hold_and_pull(&s, 1);
    const kvf_memory memory = s.p->regions[0];
    for (int i = 0; i < 2; i++)
        assert_fails(kvf_agent_unregister_region(s.p, 0), KVF_E_AGAIN, "in the middle of a write");
    assert_ok(kvf_agent_register_region(s.p, 0, &memory));
    world_run_for(&s.w, 10 * MS);
    hold_and_pull(&s, 2);
    tear_down(&s);
}

static void mistakes_with_regions_are_refused(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    kvf_memory memory = {
        .struct_size = sizeof memory, .address = s.w.p.memory[0][0], .bytes = region_bytes(&s.w.p, 0)};
    assert_fails(kvf_agent_register_region(s.p, 0, &memory), KVF_E_EXISTS, "region 0");
    assert_fails(kvf_agent_register_region(s.p, 2, &memory), KVF_E_RANGE, "region is 2");
    assert_fails(kvf_agent_register_region(s.p, 0, NULL), KVF_E_INVALID, "memory");
    assert_fails(kvf_agent_unregister_region(s.p, 2), KVF_E_RANGE, "region is 2");
    assert_ok(kvf_agent_unregister_region(s.p, 0));
    assert_fails(kvf_agent_unregister_region(s.p, 0), KVF_E_NOT_REGISTERED, "region 0");
    memory.bytes--;
    assert_fails(kvf_agent_register_region(s.p, 0, &memory), KVF_E_RANGE, "region 0");
    memory.bytes++;
    memory.kind = (kvf_memory_kind)7;
    assert_fails(kvf_agent_register_region(s.p, 0, &memory), KVF_E_INVALID, "kind");
    memory.kind = KVF_MEMORY_HOST;
    assert_ok(kvf_agent_register_region(s.p, 0, &memory));
    void *allocated;
    const kvf_status refused = kvf_agent_allocate(s.p, KVF_MEMORY_CUDA, 4000, 64, &allocated);
    assert_true(refused == KVF_E_RANGE || refused == KVF_E_UNSUPPORTED); /* with a driver, or without */
    assert_fails(refused, refused, "CUDA");
    hold_and_pull(&s, 1);
    tear_down(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_producer_whose_cache_moves_is_met_again),
        cmocka_unit_test(a_consumer_whose_cache_moves_is_written_where_it_is_now),
        cmocka_unit_test(a_consumer_whose_cache_moves_greets_no_producer_again),
        cmocka_unit_test(a_consumer_whose_cache_moves_while_it_joins_joins_again),
        cmocka_unit_test(a_region_with_blocks_of_a_request_stays_and_the_request_is_named),
        cmocka_unit_test(a_request_whose_id_is_no_text_is_named_without_what_cannot_be_printed),
        cmocka_unit_test(a_region_without_blocks_of_a_request_may_go),
        cmocka_unit_test(a_pull_is_verified_while_another_region_is_gone),
        cmocka_unit_test(a_push_goes_on_while_its_consumer_joins_again_because_another_region_has_changed),
        cmocka_unit_test(a_push_that_ends_before_its_consumer_has_greeted_anew_is_done),
        cmocka_unit_test(a_region_of_one_part_stays_while_a_request_uses_it),
        cmocka_unit_test(a_pull_waits_for_a_producer_that_sleeps),
        cmocka_unit_test(a_pull_that_begins_before_the_consumer_notices_that_memory_has_moved_goes_on),
        cmocka_unit_test(a_consumer_that_waits_for_a_sleeping_producer_is_told_so),
        cmocka_unit_test(a_region_that_cannot_be_taken_back_serves_again),
        cmocka_unit_test(mistakes_with_regions_are_refused),
    };
    const struct CMUnitTest real[] = {
        /* In a simulated network no peer is known to be on the same host. */
        cmocka_unit_test(an_engine_that_takes_memory_back_goes_on_reading),
    };
    return cmocka_run_group_tests_name("agent_memory", tests, world_is_simulated, world_is_real) +
           cmocka_run_group_tests_name("agent_memory_real", real, NULL, NULL);
}
