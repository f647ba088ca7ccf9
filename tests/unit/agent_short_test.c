/*
 * Agents that run short of memory for a moment: whichever allocation fails while a request is under way, the request is
 * refused, fails or is done, has one result, and right bytes if it is done; no block stays claimed, and the next
 * request goes well.
 */
#include "agent/hear.h"
#include "agent/session.h"
#include "agent_world.h"
#include "sanitized.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define LEASE (2 * SECOND)

typedef struct scene {
    world w;
    memory_count memory;
    world_request given, wanted;
    bool pushes;
    uint64_t out[WORLD_MAX_RANKS], in[WORLD_MAX_RANKS]; /* tickets; 0: the call was refused */
    uint32_t done;                                      /* ranks of D that have all bytes */
} scene;

static void start(kvf_agent *agent, const world_request *request,
                  kvf_status (*call)(kvf_agent *, const kvf_agent_request *, uint64_t *), uint64_t *ticket) {
    kvf_agent_request own = request->request;
    own.deadline_ns = 2 * LEASE;
    kvf_status status = call(agent, &own, ticket);
    if (status)
        *ticket = 0;
    if (status)
        assert_fails(status, KVF_E_NOMEM, "no memory for");
}

static void start_all(scene *s, const char *id) {
    world_engine *p = &s->w.p, *d = &s->w.d;
    world_request_make(&s->w, p, id, 40, 0, 1, &s->given);
    world_request_make(&s->w, d, id, 40, 8, 1, &s->wanted);
    s->wanted.request.contact = p->contact;
    world_fill(&s->w, p, &s->given, 7);
    for (uint32_t r = 0; r < p->rank_count; r++)
        start(p->agents[r], &s->given, s->pushes ? kvf_agent_push : kvf_agent_hold, &s->out[r]);
    for (uint32_t r = 0; r < d->rank_count; r++)
        start(d->agents[r], &s->wanted, s->pushes ? kvf_agent_expect : kvf_agent_pull, &s->in[r]);
    for (uint32_t r = 0; s->pushes && r < p->rank_count; r++) {
        kvf_status status = s->out[r] ? kvf_agent_push_ready(p->agents[r], s->out[r], NULL) : KVF_OK;
        if (status) {
            assert_fails(status, KVF_E_NOMEM, "no memory for");
            (void)kvf_agent_cancel(p->agents[r], s->out[r]);
        }
    }
}

/* Takes the results of the requests that D started. A push or hold of P is done only if D has all of it. */
static void end_all(scene *s) {
    world_engine *d = &s->w.d, *p = &s->w.p;
    s->done = 0;
    for (uint32_t r = 0; r < d->rank_count; r++) {
        const world_outcome *o = s->in[r] ? world_next(&s->w, d->agents[r], s->in[r]) : NULL;
        if (!o)
            continue;
        if (o->kind == KVF_EVENT_DONE)
            s->done++;
        else
            assert_true(o->kind == KVF_EVENT_FAILED && o->status);
    }
    if (s->done == d->rank_count)
        assert_int_equal(world_wrong_cells(&s->w, d, &s->wanted, 7), 0);
    for (uint32_t r = 0; r < p->rank_count; r++) {
        const world_outcome *o = s->out[r] ? world_next(&s->w, p->agents[r], s->out[r]) : NULL;
        if (o && o->kind == KVF_EVENT_DONE)
            assert_int_equal(s->done, d->rank_count);
    }
}

/* A line that cannot be written whole is not written. */
static void read_line(void *context, const kvf_log_line *line) {
    (void)context;
    assert_true(line->text[0] != '\0');
}

/* Runs a request; allocation `fail_at` fails (0: none). Returns the number of allocations; `live`: how many are
 * left. */
static size_t one_round(kvf_model *model, bool pushes, kvf_way way, size_t fail_at, size_t *live) {
    static scene s;
    const kvf_agent_options options = {.struct_size = sizeof options,
                                       .lease_ns = LEASE,
                                       .peer_timeout_ns = 50 * MS,
                                       .way = way,
                                       .log = read_line,
                                       .log_level = KVF_LOG_DEBUG,
                                       .trace_requests = 1,
                                       .slot_bytes = 4096,
                                       .arena_bytes = 128 * 4096};
    s = (scene){.pushes = pushes};
    count_memory(&s.memory);
    world_open_model(&s.w, model, ONE("P"), ONE("D"), &options);
    s.memory.calls = 0;
    s.memory.fail_at = fail_at;
    start_all(&s, "a");
    end_all(&s);
    size_t calls = s.memory.calls;
    s.memory.fail_at = 0;
    if (!fail_at)
        assert_int_equal(s.done, 1);
    world_quiet(&s.w);
    start_all(&s, "b");
    end_all(&s);
    if (s.done != 1)
        fail_msg("the next request failed where allocation %zu was refused", fail_at);
    world_quiet(&s.w);
    kvf_model_retain(model);
    world_close(&s.w);
    *live = s.memory.live;
    return calls;
}

static void any_may_be_missing(bool pushes, kvf_way way) {
    kvf_model *model = attention(2, 4, 8); /* made before memory is counted */
    size_t live, calls = one_round(model, pushes, way, 0, &live);
    assert_true(calls > 50);
    for (size_t n = 0; n <= calls; n += SANITIZED ? 3 : 1) {
        /* memory that a process allocates once was allocated before */
        (void)one_round(model, pushes, way, n, &live);
        if (live)
            fail_msg("%zu allocations are left where number %zu of %zu was refused", live, n, calls);
    }
    (void)kvf_set_allocator(NULL);
    kvf_model_free(model);
}

static void a_pull_survives_any_allocation_that_fails(void **state) {
    (void)state;
    any_may_be_missing(false, KVF_WAY_DIRECT);
}

static void a_push_survives_any_allocation_that_fails(void **state) {
    (void)state;
    any_may_be_missing(true, KVF_WAY_DIRECT);
}

static void a_packed_pull_survives_any_allocation_that_fails(void **state) {
    (void)state;
    any_may_be_missing(false, KVF_WAY_PACKED);
}

static void a_packed_push_survives_any_allocation_that_fails(void **state) {
    (void)state;
    any_may_be_missing(true, KVF_WAY_PACKED);
}

/* Both ranks of P write. If the expectation fails when only the first was told of it, another thread may be using the
 * stage: a round ends the writer's flows, and until then the blocks are in doubt. */
static void an_expectation_that_fails_between_two_writers_is_settled_by_a_round(void **state) {
    (void)state;
    static scene s;
    const kvf_agent_options options = {
        .struct_size = sizeof options, .lease_ns = LEASE, .way = KVF_WAY_PACKED, .slot_bytes = 4096};
    bool refused = true;
    uint32_t in_doubt = 0;
    s = (scene){.pushes = true};
    count_memory(&s.memory);
    world_open_model(&s.w, attention(2, 4, 8), ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64}),
                     ONE("D"), &options);
    start_all(&s, "a"); /* afterwards both ranks are met */
    end_all(&s);
    assert_int_equal(s.done, 1);
    world_quiet(&s.w);
    world_request_make(&s.w, &s.w.d, "b", 40, 8, 1, &s.wanted);
    s.wanted.request.contact = s.w.p.contact;
    for (size_t n = 1; refused; n++) {
        kvf_agent *d = s.w.d.agents[0];
        s.memory.calls = 0;
        s.memory.fail_at = n;
        start(d, &s.wanted, kvf_agent_expect, &s.in[0]);
        s.memory.fail_at = 0;
        refused = s.memory.calls >= n;
        const world_outcome *o = s.in[0] ? world_next(&s.w, d, s.in[0]) : NULL;
        if (o && !o->blocks_free) {
            in_doubt++;
            assert_true(o->kind == KVF_EVENT_FAILED && o->status == KVF_E_NOMEM);
            o = world_next(&s.w, d, s.in[0]);
            assert_true(o->kind == KVF_EVENT_BLOCKS_FREE && o->blocks_free);
        }
        world_quiet(&s.w);
    }
    assert_true(in_doubt > 0);
    world_close(&s.w);
    /* Also introductions of siblings are freed. What a process allocates once was allocated by the tests before. */
    assert_int_equal(s.memory.live, 0);
}

/* P has lost D's session, and the connection breaks: D greets P while its session is open, and is told another id. */
static bool meets_anew_short_of(size_t fail_at, bool pushes) {
    static scene s;
    const kvf_agent_options options = {
        .struct_size = sizeof options, .lease_ns = LEASE, .peer_timeout_ns = 50 * MS};
    s = (scene){.pushes = pushes};
    count_memory(&s.memory);
    world_open_model(&s.w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
    kvf_agent *d = s.w.d.agents[0];
    start_all(&s, "a");
    end_all(&s);
    assert_int_equal(s.done, 1);
    world_quiet(&s.w);
    world_lose(s.w.p.agents[0], world_session(s.w.p.agents[0], true));
    kvf_session *session = world_session(d, false);
    kvf_work_take(d);
    kvf_on_broken(d, session->route, KVF_E_PEER_LOST, "the connection broke");
    kvf_work_give(d);
    s.memory.calls = 0;
    s.memory.fail_at = fail_at;
    world_until(&s.w, session->openings == 2 || s.memory.calls >= fail_at);
    world_run_for(&s.w, 100 * MS);
    s.memory.fail_at = 0;
    const bool refused = s.memory.calls >= fail_at;
    start_all(&s, "b");
    end_all(&s);
    if (s.done != 1)
        fail_msg("the next request failed where allocation %zu was refused", fail_at);
    world_quiet(&s.w);
    world_close(&s.w);
    return refused;
}

static void a_session_that_is_met_anew_survives_any_allocation_that_fails(void **state) {
    (void)state;
    for (int pushes = 0; pushes < 2; pushes++)
        for (size_t n = 1; meets_anew_short_of(n, pushes); n++)
            assert_true(n < 1000);
}

/* A lease and an expectation last until the heartbeat after the next. */
static void a_heartbeat_without_memory_is_made_up_for_by_the_next(void **state) {
    (void)state;
    static scene s;
    const kvf_agent_options options = {.struct_size = sizeof options, .lease_ns = LEASE};
    bool refused = true;
    s = (scene){.pushes = true};
    count_memory(&s.memory);
    world_open_model(&s.w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
    kvf_agent *d = s.w.d.agents[0];
    world_request_make(&s.w, &s.w.p, "a", 40, 0, 1, &s.given);
    world_request_make(&s.w, &s.w.d, "a", 40, 0, 1, &s.wanted);
    s.wanted.request.groups = NULL; /* reserved, and not read */
    s.wanted.request.group_count = 0;
    s.given.request.deadline_ns = s.wanted.request.deadline_ns = 100 * LEASE;
    world_hold(&s.w.p, &s.given, s.out);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.in);
    world_request_make(&s.w, &s.w.d, "b", 40, 8, 1, &s.wanted);
    s.wanted.request.deadline_ns = 100 * LEASE;
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.in + 1);
    world_run_for(&s.w, 100 * MS);
    for (size_t n = 1; refused; n++) {
        d->all_sessions->next_beat = 0;
        kvf_sessions_due(d);
        s.memory.calls = 0;
        s.memory.fail_at = n;
        assert_ok(kvf_agent_progress(d, NULL));
        s.memory.fail_at = 0;
        refused = s.memory.calls >= n;
        world_run_for(&s.w, 2 * LEASE);
        assert_int_equal(world_stats(s.w.p.agents[0]).leases_now, 1);
        assert_int_equal(s.w.outcome_count, 0);
    }
    for (uint32_t i = 0; i < 2; i++) {
        assert_ok(kvf_agent_cancel(d, s.in[i]));
        (void)world_failed(&s.w, d, s.in[i], KVF_E_CANCELLED);
    }
    world_close(&s.w);
}

/* Without requests; memory is counted from the beginning on. */
static void open_counted(scene *s) {
    const kvf_agent_options options = {.struct_size = sizeof options};
    *s = (scene){.pushes = false};
    count_memory(&s->memory);
    world_open_model(&s->w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
}

/* News of a peer are for information only: without memory for one of its two parts, nothing is told. */
static void news_of_a_peer_without_memory_are_left_out(void **state) {
    (void)state;
    static scene s;
    open_counted(&s);
    for (size_t n = 1; n <= 3; n++) {
        const size_t live = s.memory.live;
        s.memory.calls = 0;
        s.memory.fail_at = n;
        kvf_event_peer(s.w.p.agents[0], KVF_EVENT_PEER_REFUSED, "X", 0, KVF_E_PERMISSION, "no");
        s.memory.fail_at = 0;
        assert_int_equal(s.memory.live, n < 3 ? live : live + 2);
    }
    world_run_for(&s.w, MS);
    assert_int_equal(world_count(&s.w, s.w.p.agents[0], KVF_EVENT_PEER_REFUSED), 1);
    world_close(&s.w);
}

/* Its event once had an empty sentence, and said that blocks were to be recomputed without naming any. */
static void a_failure_without_memory_for_its_event_has_nothing_to_recompute(void **state) {
    (void)state;
    static scene s;
    uint32_t without_id = 0, with_blocks = 0;
    bool refused = true;
    open_counted(&s);
    kvf_agent *d = s.w.d.agents[0];
    for (size_t n = 1; refused; n++) {
        world_request_make(&s.w, &s.w.d, "a", 40, 8, 1, &s.wanted);
        s.wanted.request.deadline_ns = 100 * LEASE;
        world_pull(&s.w.d, &s.wanted, &s.w.p, s.in);
        world_run_for(&s.w, 10 * MS);
        s.memory.calls = 0;
        s.memory.fail_at = n;
        assert_ok(kvf_agent_cancel(d, s.in[0]));
        s.memory.fail_at = 0;
        refused = s.memory.calls >= n;
        const world_outcome *o = world_failed(&s.w, d, s.in[0], KVF_E_CANCELLED);
        assert_int_equal(o->recompute, o->group_count > 0);
        with_blocks += o->group_count > 0;
        without_id += o->id_bytes == 0;
        world_quiet(&s.w);
    }
    assert_int_equal(without_id, 1);
    assert_true(with_blocks > 0);
    world_close(&s.w);
}

static void a_drain_without_memory_for_its_event_does_not_begin(void **state) {
    (void)state;
    static scene s;
    open_counted(&s);
    kvf_agent *p = s.w.p.agents[0];
    for (size_t n = 1; n <= 2; n++) { /* the event, and its sentence */
        const size_t live = s.memory.live;
        s.memory.calls = 0;
        s.memory.fail_at = n;
        assert_fails(kvf_agent_drain(p, SECOND), KVF_E_NOMEM, "event");
        s.memory.fail_at = 0;
        assert_int_equal(s.memory.live, live);
    }
    world_run_for(&s.w, MS);
    assert_int_equal(world_count(&s.w, p, KVF_EVENT_DRAINED), 0);
    assert_ok(kvf_agent_drain(p, SECOND));
    world_until(&s.w, world_count(&s.w, p, KVF_EVENT_DRAINED) == 1);
    world_close(&s.w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_pull_survives_any_allocation_that_fails, stop_counting_memory),
        cmocka_unit_test_teardown(a_push_survives_any_allocation_that_fails, stop_counting_memory),
        cmocka_unit_test_teardown(a_packed_pull_survives_any_allocation_that_fails, stop_counting_memory),
        cmocka_unit_test_teardown(a_packed_push_survives_any_allocation_that_fails, stop_counting_memory),
        cmocka_unit_test_teardown(an_expectation_that_fails_between_two_writers_is_settled_by_a_round,
                                  stop_counting_memory),
        cmocka_unit_test_teardown(a_session_that_is_met_anew_survives_any_allocation_that_fails,
                                  stop_counting_memory),
        cmocka_unit_test_teardown(a_heartbeat_without_memory_is_made_up_for_by_the_next,
                                  stop_counting_memory),
        cmocka_unit_test_teardown(news_of_a_peer_without_memory_are_left_out, stop_counting_memory),
        cmocka_unit_test_teardown(a_failure_without_memory_for_its_event_has_nothing_to_recompute,
                                  stop_counting_memory),
        cmocka_unit_test_teardown(a_drain_without_memory_for_its_event_does_not_begin, stop_counting_memory),
    };
    return cmocka_run_group_tests_name("agent_short", tests, world_is_simulated, world_is_real);
}
