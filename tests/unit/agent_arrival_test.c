/*
 * The arrival of a consumer's request, layer by layer, in memory of the host: what the agent says has arrived is compared
 * with the bytes that are there, at that moment. Streams of devices are in agent_arrival_device_test.c.
 */
#include <unistd.h>

#include "agent/push.h"
#include "agent/session.h"
#include "agent_world.h"

#define LAYERS 6u
#define TP2 ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64, .order = "L|BPNH"})
#define TP4                                                                                                  \
    ENGINE(.name = "D", .tp_size = 4, .all = {.tokens_per_block = 8, .block_count = 128, .order = "L|BPHN"})
#define TOKENS 100u /* of 128 bytes on a rank of D and in a layer: 75 KiB for a rank */
#define SLOWLY 200000u
#define SLOT_BYTES 4096u

/* Transport and way of a row of tests. */
typedef struct route {
    const char *transport;
    kvf_way way;
    uint32_t workers;
} route;

static bool has_workers;

static void open_world(world *w, const route *by, kvf_model *model, bool verify) {
    const kvf_agent_options options = {.struct_size = sizeof options,
                                       .transport = by->transport,
                                       .way = by->way,
                                       .slot_bytes = SLOT_BYTES,
                                       .workers = by->workers,
                                       .verify = verify};
    has_workers = by->workers > 0;
    world_open_model(w, model, TP2, TP4, &options);
}

/* What has arrived of a ticket; `otherwise` once it has ended. */
static uint32_t arrived(kvf_agent *agent, uint64_t ticket, uint32_t otherwise) {
    uint32_t layers = 0;
    const kvf_status status = kvf_agent_arrived(agent, ticket, &layers);
    if (status == KVF_E_NOT_FOUND)
        return otherwise;
    assert_ok(status);
    return layers;
}

/* ---- pulls ------------------------------------------------------------------------------------- */

/* What a rank has seen of its pull. */
typedef struct seen_pull {
    uint32_t layers;
    uint32_t changes; /* of the count, before all layers were there */
    uint32_t counts;  /* a bit for each */
    bool later_were_missing;
} seen_pull;

static void look(world *w, uint32_t rank, uint64_t ticket, const world_request *wanted, uint32_t all,
                 seen_pull *seen) {
    const uint32_t layers = arrived(w->d.agents[rank], ticket, all);
    assert_true(layers >= seen->layers && layers <= all);
    assert_int_equal(world_wrong_cells_below(&w->d, rank, wanted, 1, layers), 0);
    /* Workers may be writing the layers that have not arrived. */
    if (layers < all && !has_workers && world_wrong_cells_below(&w->d, rank, wanted, 1, all) > 0)
        seen->later_were_missing = true;
    seen->changes += layers > seen->layers && layers < all;
    seen->counts |= 1u << layers;
    seen->layers = layers;
}

/* Pulls with a cap, and looks after each round. */
static void pull_slowly(world *w, uint64_t cap, uint32_t all, seen_pull seen[WORLD_MAX_RANKS]) {
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    world_request_make(w, &w->p, "a", TOKENS, 3, 2, &held);
    world_request_make(w, &w->d, "a", TOKENS, 7, 3, &wanted);
    wanted.request.by_layer = true;
    wanted.request.bytes_per_second = cap;
    world_fill(w, &w->p, &held, 1);
    world_hold(&w->p, &held, holds);
    world_pull(&w->d, &wanted, &w->p, pulls);
    memset(seen, 0, WORLD_MAX_RANKS * sizeof *seen);
    for (bool over = false; !over;) {
        world_work(w);
        over = true;
        for (uint32_t r = 0; r < w->d.rank_count; r++) {
            look(w, r, pulls[r], &wanted, all, &seen[r]);
            over = over && seen[r].layers == all;
        }
    }
    world_all_done(w, &w->d, pulls);
    world_all_done(w, &w->p, holds);
    assert_int_equal(world_wrong_cells(w, &w->d, &wanted, 1), 0);
}

static void layers_of_a_pull_are_there_when_the_agent_says_so(void **state) {
    world w;
    seen_pull seen[WORLD_MAX_RANKS];
    open_world(&w, *state, attention(LAYERS, 8, 8), false);
    pull_slowly(&w, SLOWLY, LAYERS, seen);
    for (uint32_t r = 0; r < w.d.rank_count; r++) {
        assert_true(seen[r].changes >= 2);       /* layer by layer, as far as the rounds show them */
        assert_true(seen[r].later_were_missing); /* so an early count would have been seen */
    }
    world_quiet(&w);
    world_close(&w);
}

/* Without a cap batches and slots end as they like. */
static void nothing_is_counted_early_at_full_speed(void **state) {
    world w;
    seen_pull seen[WORLD_MAX_RANKS];
    open_world(&w, *state, attention(LAYERS, 8, 8), false);
    pull_slowly(&w, 0, LAYERS, seen);
    world_quiet(&w);
    world_close(&w);
}

/* Layers 0 and 2 have attention, 1 and 3 states: layer 1 is there before layer 2. */
static void groups_count_together(void **state) {
    world w;
    seen_pull seen[WORLD_MAX_RANKS];
    const route *by = *state;
    const kvf_agent_options options = {
        .struct_size = sizeof options, .transport = by->transport, .way = by->way, .slot_bytes = SLOT_BYTES};
    const kvf_engine_spec *tp1 =
        ENGINE(.name = "D", .tp_size = 1, .all = {.block_count = 64, .order = "L|BPNH"});
    world_open_model(&w, hybrid(8),
                     ENGINE(.name = "P", .tp_size = 1, .all = {.block_count = 64, .order = "L|BPHN"}), tp1,
                     &options);
    pull_slowly(&w, 80000, 4, seen);
    assert_true(seen[0].counts & 1u << 2);
    assert_true(seen[0].later_were_missing);
    world_quiet(&w);
    world_close(&w);
}

static void with_checksums_nothing_has_arrived_before_the_end(void **state) {
    world w;
    seen_pull seen[WORLD_MAX_RANKS];
    open_world(&w, *state, attention(LAYERS, 8, 8), true);
    pull_slowly(&w, SLOWLY, LAYERS, seen);
    for (uint32_t r = 0; r < w.d.rank_count; r++)
        assert_int_equal(seen[r].changes, 0);
    world_quiet(&w);
    world_close(&w);
}

/* The agents work on threads of their own, and their engine asks meanwhile. */
static void an_engine_may_ask_while_the_agents_thread_works(void **state) {
    world w;
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    const route *by = *state;
    const kvf_agent_options options = {.struct_size = sizeof options,
                                       .transport = by->transport,
                                       .way = by->way,
                                       .slot_bytes = SLOT_BYTES,
                                       .own_thread = true};
    world_open_model(&w, attention(LAYERS, 8, 8), TP2, TP4, &options);
    world_request_make(&w, &w.p, "a", TOKENS, 3, 2, &held);
    world_request_make(&w, &w.d, "a", TOKENS, 7, 3, &wanted);
    wanted.request.by_layer = true;
    wanted.request.bytes_per_second = SLOWLY;
    world_fill(&w, &w.p, &held, 1);
    world_hold(&w.p, &held, holds);
    world_pull(&w.d, &wanted, &w.p, pulls);
    for (uint32_t r = 0; r < w.d.rank_count; r++)
        for (uint32_t layers = 0; layers < LAYERS;) {
            layers = arrived(w.d.agents[r], pulls[r], LAYERS);
            assert_int_equal(world_wrong_cells_below(&w.d, r, &wanted, 1, layers), 0);
        }
    world_all_done(&w, &w.d, pulls);
    world_all_done(&w, &w.p, holds);
    world_quiet(&w);
    world_close(&w);
}

/* Pulls into one rank whose engine sleeps until there is an event. If it takes none meanwhile, the last count waits. */
static void an_engine_that_waits_for_events_is_told_of_layers(void **state) {
    const route *by = *state;
    const kvf_agent_options options = {.struct_size = sizeof options,
                                       .transport = by->transport,
                                       .way = by->way,
                                       .slot_bytes = SLOT_BYTES,
                                       .own_thread = true};
    for (int late = 0; late < 2; late++) {
        world w;
        world_request held, wanted;
        uint64_t holds[WORLD_MAX_RANKS], ticket;
        uint32_t events = 0, layers = 0;
        world_open_model(&w, attention(LAYERS, 8, 8), TP2,
                         ENGINE(.name = "D", .all = {.block_count = 64, .order = "L|BPNH"}), &options);
        world_request_make(&w, &w.p, "a", TOKENS, 3, 2, &held);
        world_request_make(&w, &w.d, "a", TOKENS, 7, 3, &wanted);
        wanted.request.by_layer = wanted.request.layer_events = true;
        wanted.request.bytes_per_second = 2ull * SLOWLY;
        wanted.request.contact = w.p.contact;
        world_fill(&w, &w.p, &held, 1);
        world_hold(&w.p, &held, holds);
        assert_ok(kvf_agent_pull(w.d.agents[0], &wanted.request, &ticket));
        while (late && arrived(w.d.agents[0], ticket, LAYERS) < LAYERS)
            (void)usleep(1000);
        for (;;) {
            const kvf_event event = world_wait_event(w.d.agents[0]);
            assert_int_equal(event.ticket, ticket);
            if (event.kind == KVF_EVENT_DONE)
                break;
            assert_int_equal(event.kind, KVF_EVENT_LAYERS);
            assert_int_equal(event.id.size, strlen("a"));
            assert_true(event.layers > layers && event.layers <= LAYERS && !event.blocks_free);
            layers = event.layers;
            events++;
            assert_int_equal(world_wrong_cells_below(&w.d, 0, &wanted, 1, layers), 0);
        }
        assert_true(late ? events <= 1 : events >= 2);
        world_all_done(&w, &w.p, holds);
        world_close(&w);
    }
}

/* ---- expectations ------------------------------------------------------------------------------- */

typedef struct push_scene {
    world_request held, wanted;
    uint64_t pushes[WORLD_MAX_RANKS], expected[WORLD_MAX_RANKS];
} push_scene;

static void start_push(world *w, push_scene *s) {
    world_request_make(w, &w->p, "a push", TOKENS, 3, 2, &s->held);
    world_request_make(w, &w->d, "a push", TOKENS, 7, 3, &s->wanted);
    s->wanted.request.by_layer = true;
    world_fill(w, &w->p, &s->held, 1);
    world_expect(&w->d, &s->wanted, &w->p, s->expected);
    world_push(&w->p, &s->held, s->pushes);
}

static void ready(world *w, const push_scene *s, uint64_t begin, uint64_t end, uint32_t layers) {
    for (uint32_t r = 0; r < w->p.rank_count; r++)
        assert_ok(kvf_agent_push_ready(w->p.agents[r], s->pushes[r], CHUNK(begin, end, layers)));
}

/* Waits until every rank has so many layers, and checks them; those after them are not there. */
static void await_layers(world *w, const push_scene *s, uint32_t layers, uint32_t all) {
    for (uint32_t r = 0; r < w->d.rank_count; r++) {
        world_until(w, arrived(w->d.agents[r], s->expected[r], all) >= layers);
        assert_int_equal(arrived(w->d.agents[r], s->expected[r], all), layers);
        assert_int_equal(world_wrong_cells_below(&w->d, r, &s->wanted, 1, layers), 0);
        if (layers < all) /* nothing of them is ready, and so nobody writes them now */
            assert_true(world_wrong_cells_below(&w->d, r, &s->wanted, 1, layers + 1) > 0);
    }
}

static void end_push(world *w, const push_scene *s) {
    world_all_done(w, &w->d, s->expected);
    world_all_done(w, &w->p, s->pushes);
    assert_int_equal(world_wrong_cells(w, &w->d, &s->wanted, 1), 0);
    world_quiet(w);
}

static void layers_arrive_as_they_are_pushed_packed(void **state) {
    world w;
    push_scene s;
    open_world(&w, *state, attention(LAYERS, 8, 8), false);
    start_push(&w, &s);
    world_run_for(&w, 20 * MS);
    await_layers(&w, &s, 0, LAYERS);
    for (uint32_t layer = 1; layer <= LAYERS; layer++) {
        ready(&w, &s, 0, UINT64_MAX, layer);
        await_layers(&w, &s, layer, LAYERS);
    }
    end_push(&w, &s);
    world_close(&w);
}

/* A layer has arrived when all its tokens have. */
static void layers_arrive_with_their_last_tokens(void **state) {
    world w;
    push_scene s;
    open_world(&w, *state, attention(LAYERS, 8, 8), false);
    start_push(&w, &s);
    ready(&w, &s, 0, 48, LAYERS);
    world_run_for(&w, 50 * MS);
    await_layers(&w, &s, 0, LAYERS);
    ready(&w, &s, 48, TOKENS, 2);
    await_layers(&w, &s, 2, LAYERS);
    ready(&w, &s, 48, TOKENS, LAYERS);
    end_push(&w, &s);
    world_close(&w);
}

/* States come with the last chunk, and so do the layers from the first one with a state on. */
static void states_arrive_with_the_last_chunk(void **state) {
    world w;
    push_scene s;
    const route *by = *state;
    const kvf_agent_options options = {
        .struct_size = sizeof options, .transport = by->transport, .way = by->way, .slot_bytes = SLOT_BYTES};
    world_open_model(&w, hybrid(8), ENGINE(.name = "P", .tp_size = 1, .all = {.block_count = 64}),
                     ENGINE(.name = "D", .tp_size = 1, .all = {.block_count = 64}), &options);
    start_push(&w, &s);
    ready(&w, &s, 0, 48, 4);
    ready(&w, &s, 48, TOKENS, 1);
    await_layers(&w, &s, 1, 4);
    ready(&w, &s, 48, TOKENS, 4);
    end_push(&w, &s);
    world_close(&w);
}

/* Only the producer knows what it has written by itself. */
static void of_a_direct_push_nothing_has_arrived_before_the_end(void **state) {
    world w;
    push_scene s;
    open_world(&w, *state, attention(LAYERS, 8, 8), false);
    start_push(&w, &s);
    ready(&w, &s, 0, UINT64_MAX, LAYERS - 1);
    for (uint32_t r = 0; r < w.d.rank_count; r++)
        world_until(&w, world_wrong_cells_below(&w.d, r, &s.wanted, 1, LAYERS - 1) == 0);
    for (uint32_t r = 0; r < w.d.rank_count; r++)
        assert_int_equal(arrived(w.d.agents[r], s.expected[r], LAYERS), 0);
    ready(&w, &s, 0, UINT64_MAX, LAYERS);
    end_push(&w, &s);
    world_close(&w);
}

/* Two ranks write to one. The first sends what it has of layer 0 once more, as many bytes as the second one gives. */
static void what_a_writer_sends_twice_does_not_stand_for_what_another_gives(void **state) {
    world w;
    push_scene s;
    const route *by = *state;
    const kvf_agent_options options = {
        .struct_size = sizeof options, .transport = by->transport, .way = by->way, .slot_bytes = SLOT_BYTES};
    world_open_model(&w, attention(LAYERS, 8, 8), TP2, ENGINE(.name = "D", .all = {.block_count = 64}),
                     &options);
    start_push(&w, &s);
    kvf_agent *faulty = w.p.agents[0];
    const uint64_t once = UINT64_C(128) * TOKENS; /* what it has of a layer */
    assert_ok(kvf_agent_push_ready(faulty, s.pushes[0], CHUNK(0, UINT64_MAX, 1)));
    world_until(&w, world_stats(faulty).bytes_packed == once);
    assert_ok(kvf_agent_lock(faulty));
    kvf_work_take(faulty);
    kvf_flow *flow = world_session(faulty, true)->flows;
    assert_int_equal(flow->layers, 1);
    flow->layers = 0; /* as if nothing had been written */
    kvf_flow_pump(flow);
    kvf_work_give(faulty);
    kvf_agent_unlock(faulty);
    world_until(&w, world_stats(faulty).bytes_packed == 2 * once);
    world_run_for(&w, 50 * MS);
    await_layers(&w, &s, 0, LAYERS);
    ready(&w, &s, 0, UINT64_MAX, 1);
    await_layers(&w, &s, 1, LAYERS);
    ready(&w, &s, 0, UINT64_MAX, LAYERS);
    end_push(&w, &s);
    world_close(&w);
}

/* ---- ends and refusals --------------------------------------------------------------------------- */

static void a_request_that_is_cancelled_half_way_has_no_arrival_any_more(void **state) {
    world w;
    push_scene s;
    uint32_t layers;
    open_world(&w, *state, attention(LAYERS, 8, 8), false);
    start_push(&w, &s);
    ready(&w, &s, 0, UINT64_MAX, 2);
    await_layers(&w, &s, 2, LAYERS);
    for (uint32_t r = 0; r < w.d.rank_count; r++) {
        assert_ok(kvf_agent_cancel(w.d.agents[r], s.expected[r]));
        assert_fails(kvf_agent_arrived(w.d.agents[r], s.expected[r], &layers), KVF_E_NOT_FOUND, "has ended");
        assert_ok(
            kvf_agent_let_wait(w.d.agents[r], s.expected[r], LAYERS, 0, NULL)); /* puts nothing anywhere */
        (void)world_failed(&w, w.d.agents[r], s.expected[r], KVF_E_CANCELLED);
    }
    for (uint32_t r = 0; r < w.p.rank_count; r++)
        (void)kvf_agent_cancel(w.p.agents[r], s.pushes[r]); /* it may have heard of the consumer's */
    world_quiet(&w);
    world_close(&w);
}

static void only_requests_that_ask_for_it_are_counted(void **state) {
    world w;
    world_request held, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    uint32_t layers;
    open_world(&w, *state, attention(LAYERS, 8, 8), false);
    world_request_make(&w, &w.p, "a", TOKENS, 3, 2, &held);
    world_request_make(&w, &w.d, "a", TOKENS, 7, 3, &wanted);
    held.request.by_layer = held.request.layer_events = true; /* have no meaning */
    world_pull(&w.d, &wanted, &w.p, pulls);
    world_hold(&w.p, &held, holds);
    assert_fails(kvf_agent_arrived(w.p.agents[0], holds[0], &layers), KVF_E_INVALID, "no pull or expect");
    assert_fails(kvf_agent_arrived(w.d.agents[0], pulls[0], &layers), KVF_E_INVALID, "by_layer");
    assert_fails(kvf_agent_let_wait(w.d.agents[0], pulls[0], 1, 0, NULL), KVF_E_INVALID, "by_layer");
    assert_fails(kvf_agent_arrived(w.d.agents[0], 12345, &layers), KVF_E_NOT_FOUND, "12345");
    assert_fails(kvf_agent_let_wait(w.d.agents[0], 12345, 1, 0, NULL), KVF_E_NOT_FOUND, "12345");
    assert_fails(kvf_agent_let_wait(w.d.agents[0], 0, 1, 0, NULL), KVF_E_NOT_FOUND, "ticket 0");
    assert_fails(kvf_agent_arrived(w.d.agents[0], pulls[0], NULL), KVF_E_INVALID, "layers is NULL");
    wanted.request.id = (kvf_request_id){"b", 1};
    wanted.request.layer_events = true;
    assert_fails(kvf_agent_pull(w.d.agents[0], &wanted.request, NULL), KVF_E_INVALID, "by_layer is not");
    world_all_done(&w, &w.d, pulls);
    world_all_done(&w, &w.p, holds);
    world_quiet(&w);
    world_close(&w);
}

int main(void) {
    static const route shm = {.transport = "shm", .way = KVF_WAY_DIRECT};
    static const route shm_packed = {.transport = "shm", .way = KVF_WAY_PACKED};
    static const route shm_workers = {.transport = "shm", .way = KVF_WAY_PACKED, .workers = 2};
    static const route messages = {.transport = "messages", .way = KVF_WAY_DIRECT};
    static const route messages_packed = {.transport = "messages", .way = KVF_WAY_PACKED};
    static const route messages_workers = {.transport = "messages", .way = KVF_WAY_PACKED, .workers = 2};
#define OVER(test, by)                                                                                       \
    { #test " over " #by, test, NULL, NULL, (void *)(uintptr_t) & (by) }
    const struct CMUnitTest tests[] = {
        OVER(layers_of_a_pull_are_there_when_the_agent_says_so, shm),
        OVER(layers_of_a_pull_are_there_when_the_agent_says_so, shm_packed),
        OVER(layers_of_a_pull_are_there_when_the_agent_says_so, messages),
        OVER(layers_of_a_pull_are_there_when_the_agent_says_so, messages_packed),
        OVER(nothing_is_counted_early_at_full_speed, shm),
        OVER(nothing_is_counted_early_at_full_speed, shm_workers),
        OVER(nothing_is_counted_early_at_full_speed, messages_workers),
        OVER(an_engine_may_ask_while_the_agents_thread_works, shm),
        OVER(an_engine_may_ask_while_the_agents_thread_works, shm_packed),
        OVER(an_engine_that_waits_for_events_is_told_of_layers, shm),
        OVER(an_engine_that_waits_for_events_is_told_of_layers, messages_packed),
        OVER(nothing_is_counted_early_at_full_speed, shm_packed),
        OVER(nothing_is_counted_early_at_full_speed, messages),
        OVER(nothing_is_counted_early_at_full_speed, messages_packed),
        OVER(groups_count_together, shm),
        OVER(groups_count_together, shm_packed),
        OVER(with_checksums_nothing_has_arrived_before_the_end, shm),
        OVER(with_checksums_nothing_has_arrived_before_the_end, shm_packed),
        OVER(layers_arrive_as_they_are_pushed_packed, shm_packed),
        OVER(layers_arrive_as_they_are_pushed_packed, messages_packed),
        OVER(layers_arrive_as_they_are_pushed_packed, messages_workers),
        OVER(what_a_writer_sends_twice_does_not_stand_for_what_another_gives, shm_packed),
        OVER(what_a_writer_sends_twice_does_not_stand_for_what_another_gives, messages_packed),
        OVER(layers_arrive_with_their_last_tokens, shm_packed),
        OVER(states_arrive_with_the_last_chunk, shm_packed),
        OVER(of_a_direct_push_nothing_has_arrived_before_the_end, shm),
        OVER(a_request_that_is_cancelled_half_way_has_no_arrival_any_more, shm_packed),
        OVER(only_requests_that_ask_for_it_are_counted, shm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
