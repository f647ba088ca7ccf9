/* Agents with their own threads, used from several threads of their engine. */
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "agent_world.h"

#define OWN_THREAD                                                                                           \
    (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), .own_thread = true, .verify = true})
#define THREADS 3u
#define REQUESTS 12u /* of each thread */
#define ALL (THREADS * REQUESTS)

typedef struct stage {
    world w;
    world_request held[ALL], wanted[ALL];
    char ids[ALL][16];
    atomic_uint done[2]; /* DONE events of P and of D */
    atomic_uint wrong;
    atomic_bool stop;
    kvf_ready_event event; /* some holds and pushes wait for it */
} stage;

typedef struct worker {
    stage *stage;
    uint32_t number;
} worker;

static bool is_push(uint32_t i) {
    return i % 3 == 2;
}

/* A thread of an engine: starts its share of the requests on both sides, in different orders. */
static void *ask(void *context) {
    const worker *self = context;
    stage *s = self->stage;
    kvf_agent *p = s->w.p.agents[0], *d = s->w.d.agents[0];
    for (uint32_t n = 0; n < 2 * REQUESTS; n++) {
        bool producer = (n + self->number) % 2;
        uint32_t i = self->number * REQUESTS + n / 2;
        const kvf_agent_request *request = producer ? &s->held[i].request : &s->wanted[i].request;
        uint64_t ticket;
        kvf_status status;
        if (!producer)
            status = is_push(i) ? kvf_agent_expect(d, request, &ticket) : kvf_agent_pull(d, request, &ticket);
        else if (is_push(i))
            status = kvf_agent_push(p, request, &ticket);
        else
            status = kvf_agent_hold(p, request, &ticket);
        if (!status && producer && is_push(i))
            status = kvf_agent_push_ready(p, ticket, NULL);
        atomic_fetch_add(&s->wrong, status != KVF_OK);
    }
    return NULL;
}

/* A thread that looks up statistics all the time. */
static void *look(void *context) {
    stage *s = context;
    while (!atomic_load(&s->stop)) {
        kvf_agent_stats stats = {.struct_size = sizeof stats};
        kvf_block_state state;
        uint32_t requests;
        int64_t offset;
        uint64_t error;
        bool busy;
        for (int side = 0; side < 2; side++) {
            kvf_agent *agent = side ? s->w.d.agents[0] : s->w.p.agents[0];
            atomic_fetch_add(&s->wrong, kvf_agent_get_stats(agent, &stats) != KVF_OK);
            atomic_fetch_add(&s->wrong, kvf_agent_block(agent, 0, 3, &state, &requests) != KVF_OK);
            (void)kvf_agent_clock_offset(agent, "P", 0, &offset, &error);
            atomic_fetch_add(&s->wrong, kvf_agent_progress(agent, &busy) != KVF_OK);
        }
    }
    return NULL;
}

/* Takes events: D's by waiting, P's by polling. */
static void *take(void *context) {
    worker *self = context;
    stage *s = self->stage;
    kvf_agent *agent = self->number ? s->w.d.agents[0] : s->w.p.agents[0];
    uint64_t end = world_now() + WORLD_PATIENCE_S * SECOND;
    while (atomic_load(&s->done[self->number]) < ALL && world_now() < end) {
        struct pollfd fd = {.fd = kvf_agent_event_fd(agent), .events = POLLIN};
        if (self->number)
            (void)kvf_agent_wait(agent, 100 * MS);
        else
            (void)poll(&fd, 1, 100);
        kvf_event event = {.struct_size = sizeof event};
        while (kvf_agent_next_event(agent, &event) == KVF_OK) {
            if (event.kind != KVF_EVENT_DONE) {
                (void)fprintf(stderr, "event %d: %s\n", (int)event.kind, event.detail);
                atomic_fetch_add(&s->wrong, 1);
            }
            atomic_fetch_add(&s->done[self->number], 1);
        }
    }
    return NULL;
}

static void set_up(stage *s) {
    world_open_model(&s->w, attention(2, 4, 8), ENGINE(.name = "P", .all = {.block_count = 256}),
                     ENGINE(.name = "D", .all = {.block_count = 256, .order = "BLHNP"}), OWN_THREAD);
    for (uint32_t i = 0; i < ALL; i++) {
        (void)snprintf(s->ids[i], sizeof s->ids[i], "request %u", i);
        world_request_make(&s->w, &s->w.p, s->ids[i], 40, 3 * i, 1, &s->held[i]);
        world_request_make(&s->w, &s->w.d, s->ids[i], 40, 6 * i, 2, &s->wanted[i]);
        for (uint32_t b = 0; b < 3; b++)
            s->wanted[i].ids[0][b] = 3 * i + 2 - b;
        s->wanted[i].request.contact = s->w.p.contact;
        s->held[i].request.priority = s->wanted[i].request.priority = (int32_t)(i % 3);
        s->held[i].request.bytes_per_second = s->wanted[i].request.bytes_per_second = i % 4 ? 0 : 2000000;
        s->held[i].request.after = i % 5 ? NULL : &s->event;
        world_fill(&s->w, &s->w.p, &s->held[i], i);
    }
}

static void several_threads_use_agents_that_have_threads(void **state) {
    (void)state;
    static stage s;
    pthread_t askers[THREADS], takers[2], looker;
    worker workers[THREADS], sides[2];
    memset(&s, 0, sizeof s);
    s.event = (kvf_ready_event){.struct_size = sizeof s.event, .kind = KVF_READY_FD};
    assert_true((s.event.fd = eventfd(0, EFD_CLOEXEC)) >= 0);
    set_up(&s);
    for (uint32_t i = 0; i < 2; i++) {
        sides[i] = (worker){&s, i};
        assert_int_equal(pthread_create(&takers[i], NULL, take, &sides[i]), 0);
    }
    assert_int_equal(pthread_create(&looker, NULL, look, &s), 0);
    for (uint32_t i = 0; i < THREADS; i++) {
        workers[i] = (worker){&s, i};
        assert_int_equal(pthread_create(&askers[i], NULL, ask, &workers[i]), 0);
    }
    for (uint32_t i = 0; i < THREADS; i++)
        (void)pthread_join(askers[i], NULL);
    const uint64_t one = 1; /* some requests wait for it */
    assert_int_equal(write(s.event.fd, &one, sizeof one), sizeof one);
    for (uint32_t i = 0; i < 2; i++)
        (void)pthread_join(takers[i], NULL);
    atomic_store(&s.stop, true);
    (void)pthread_join(looker, NULL);

    assert_int_equal(atomic_load(&s.wrong), 0);
    assert_int_equal(atomic_load(&s.done[0]), ALL);
    assert_int_equal(atomic_load(&s.done[1]), ALL);
    for (uint32_t i = 0; i < ALL; i++)
        assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted[i], i), 0);
    world_quiet(&s.w);
    world_close(&s.w);
    (void)close(s.event.fd);
}

static void an_agent_is_closed_in_the_middle_of_its_work(void **state) {
    (void)state;
    for (uint32_t n = 0; n < 8; n++) {
        static stage s;
        uint64_t ticket;
        memset(&s, 0, sizeof s);
        s.event = (kvf_ready_event){.struct_size = sizeof s.event, .kind = KVF_READY_FD};
        assert_true((s.event.fd = eventfd(0, EFD_CLOEXEC)) >= 0); /* it never becomes readable */
        set_up(&s);
        for (uint32_t i = 0; i < ALL; i++) {
            assert_ok(is_push(i) ? kvf_agent_push(s.w.p.agents[0], &s.held[i].request, &ticket)
                                 : kvf_agent_hold(s.w.p.agents[0], &s.held[i].request, &ticket));
            if (is_push(i))
                assert_ok(kvf_agent_push_ready(s.w.p.agents[0], ticket, NULL));
            assert_ok(is_push(i) ? kvf_agent_expect(s.w.d.agents[0], &s.wanted[i].request, &ticket)
                                 : kvf_agent_pull(s.w.d.agents[0], &s.wanted[i].request, &ticket));
        }
        if (n > 0)
            (void)kvf_agent_wait(s.w.d.agents[0], n * 2 * MS);
        world_close_agents(n % 2 ? &s.w.p : &s.w.d);
        world_close(&s.w);
        (void)close(s.event.fd);
    }
}

/* P holds a request, and D is about to pull it. */
typedef struct one_request {
    world w;
    world_request held, wanted;
} one_request;

static void hold_one(one_request *s, const kvf_agent_options *options) {
    world_open_model(&s->w, attention(2, 4, 8), ENGINE(.name = "P", .all = {.block_count = 16}),
                     ENGINE(.name = "D", .all = {.block_count = 16}), options);
    world_request_make(&s->w, &s->w.p, "a", 40, 0, 1, &s->held);
    world_request_make(&s->w, &s->w.d, "a", 40, 0, 1, &s->wanted);
    s->wanted.request.contact = s->w.p.contact;
    assert_ok(kvf_agent_hold(s->w.p.agents[0], &s->held.request, NULL));
}

/* A consumer that wants nothing has met the producer's ranks only when it says so. */
static void a_producer_hears_what_it_may_free_from_a_consumer_that_closes_at_once(void **state) {
    (void)state;
    for (uint32_t n = 0; n < 16; n++) {
        one_request s;
        hold_one(&s, OWN_THREAD);
        s.wanted.groups[0].begin = n % 2 ? 0 : s.wanted.groups[0].end;
        assert_ok(kvf_agent_pull(s.w.d.agents[0], &s.wanted.request, NULL));
        assert_int_equal(world_wait_event(s.w.d.agents[0]).kind, KVF_EVENT_DONE);
        world_close_agents(&s.w.d);
        assert_int_equal(world_wait_event(s.w.p.agents[0]).kind, KVF_EVENT_DONE);
        world_close(&s.w);
    }
}

typedef struct late_engine {
    kvf_agent *agent;
    atomic_bool begins, stop;
} late_engine;

/* An engine that has something else to do for a moment. */
static void *drive_later(void *context) {
    late_engine *engine = context;
    (void)usleep(10000);
    atomic_store(&engine->begins, true);
    while (!atomic_load(&engine->stop))
        (void)kvf_agent_progress(engine->agent, NULL);
    return NULL;
}

/* Whether D, which has all that P wrote and closes, waits until P has heard so. */
static bool waits_until_heard(void) {
    world w;
    world_request held, wanted;
    uint64_t push, expectation;
    pthread_t thread;
    world_open_model(&w, attention(2, 4, 8), ENGINE(.name = "P", .all = {.block_count = 16}),
                     ENGINE(.name = "D", .all = {.block_count = 16}), NULL);
    world_request_make(&w, &w.p, "a", 40, 0, 1, &held);
    world_request_make(&w, &w.d, "a", 40, 0, 1, &wanted);
    wanted.request.contact = w.p.contact;
    assert_ok(kvf_agent_push(w.p.agents[0], &held.request, &push));
    assert_ok(kvf_agent_push_ready(w.p.agents[0], push, NULL));
    assert_ok(kvf_agent_expect(w.d.agents[0], &wanted.request, &expectation));
    (void)world_done(&w, w.d.agents[0], expectation);
    late_engine engine = {.agent = w.p.agents[0]};
    assert_int_equal(pthread_create(&thread, NULL, drive_later, &engine), 0);
    world_close_agents(&w.d);
    const bool waited = atomic_load(&engine.begins);
    atomic_store(&engine.stop, true);
    assert_int_equal(pthread_join(thread, NULL), 0);
    (void)world_done(&w, w.p.agents[0], push);
    world_close(&w);
    return waited;
}

/* Otherwise P may see the end of the memory's connection before it hears that D has everything, and its push fails. */
static void a_consumer_that_closes_makes_sure_that_its_producer_has_heard_that_it_has_all(void **state) {
    (void)state;
    bool waited = false;
    for (uint32_t tries = 0; tries < 5 && !waited; tries++) /* it does not wait for long */
        waited = waits_until_heard();
    assert_true(waited);
}

/* Its engine does nothing while the consumer closes. */
static void a_producer_that_is_not_driven_hears_of_the_end_later(void **state) {
    (void)state;
    one_request s;
    uint64_t pull;
    hold_one(&s, NULL);
    assert_ok(kvf_agent_pull(s.w.d.agents[0], &s.wanted.request, &pull));
    (void)world_done(&s.w, s.w.d.agents[0], pull);
    world_close_agents(&s.w.d);
    assert_int_equal(world_wait_event(s.w.p.agents[0]).kind, KVF_EVENT_DONE);
    world_close(&s.w);
}

/* Its request has ended because its consumer has given it up. */
static void assert_given_up(kvf_agent *producer) {
    kvf_event event = world_wait_event(producer);
    while (event.kind == KVF_EVENT_PEER_LOST)
        event = world_wait_event(producer);
    assert_int_equal(event.kind, KVF_EVENT_FAILED);
    assert_int_equal(event.status, KVF_E_CANCELLED);
    assert_true(event.blocks_free);
}

static void a_pull_that_has_not_ended_gives_its_lease_back_when_its_agent_closes(void **state) {
    (void)state;
    one_request s;
    hold_one(&s, OWN_THREAD);
    s.wanted.request.groups = NULL; /* the blocks are only reserved */
    s.wanted.request.group_count = 0;
    assert_ok(kvf_agent_pull(s.w.d.agents[0], &s.wanted.request, NULL));
    const uint64_t end = world_now() + WORLD_PATIENCE_S * SECOND;
    while (world_block(s.w.p.agents[0], 0, s.held.ids[0][0]) != KVF_BLOCK_LEASED && world_now() < end)
        (void)usleep(1000);
    assert_int_equal(world_block(s.w.p.agents[0], 0, s.held.ids[0][0]), KVF_BLOCK_LEASED);
    world_close_agents(&s.w.d);
    assert_given_up(s.w.p.agents[0]);
    world_close(&s.w);
}

static void an_expectation_that_has_not_ended_is_withdrawn_when_its_agent_closes(void **state) {
    const kvf_agent_options options = {
        .struct_size = sizeof options, .own_thread = true, .transport = *state, .lease_ns = 60 * SECOND};
    world w;
    world_request held, wanted;
    uint64_t push;
    world_open_model(&w, attention(2, 4, 8), ENGINE(.name = "P", .all = {.block_count = 16}),
                     ENGINE(.name = "D", .all = {.block_count = 16}), &options);
    world_request_make(&w, &w.p, "a", 40, 0, 1, &held);
    world_request_make(&w, &w.d, "a", 40, 0, 1, &wanted);
    wanted.request.contact = w.p.contact;
    assert_ok(kvf_agent_push(w.p.agents[0], &held.request, &push));
    assert_ok(kvf_agent_expect(w.d.agents[0], &wanted.request, NULL));
    kvf_kept_request kept = {.struct_size = sizeof kept};
    const uint64_t end = world_now() + WORLD_PATIENCE_S * SECOND;
    for (uint32_t count; !kept.moves && world_now() < end; (void)usleep(1000))
        assert_ok(kvf_agent_kept_requests(w.p.agents[0], 0, &kept, 1, &count));
    assert_true(kept.moves); /* it is expected */
    world_close_agents(&w.d);
    assert_given_up(w.p.agents[0]);
    world_close(&w);
}

static void waiting_ends_with_its_time(void **state) {
    (void)state;
    for (int own = 0; own < 2; own++) {
        world w;
        world_open_model(&w, attention(2, 4, 8), ENGINE(.name = "P", .all = {.block_count = 16}),
                         ENGINE(.name = "D", .all = {.block_count = 16}), own ? OWN_THREAD : NULL);
        uint64_t begun = world_now();
        kvf_event event = {.struct_size = sizeof event};
        assert_int_equal(kvf_agent_wait(w.d.agents[0], 50 * MS), KVF_E_TIMEOUT);
        assert_true(world_now() - begun >= 50 * MS);
        assert_int_equal(kvf_agent_wait(w.d.agents[0], 0), KVF_E_TIMEOUT);
        assert_int_equal(kvf_agent_next_event(w.d.agents[0], &event), KVF_E_EMPTY);
        struct pollfd fd = {.fd = kvf_agent_event_fd(w.d.agents[0]), .events = POLLIN};
        assert_int_equal(poll(&fd, 1, 0), 0);
        world_close(&w);
    }
}

int main(void) {
    static char shm[] = "shm", messages[] = "messages";
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(several_threads_use_agents_that_have_threads),
        cmocka_unit_test(an_agent_is_closed_in_the_middle_of_its_work),
        cmocka_unit_test(a_producer_hears_what_it_may_free_from_a_consumer_that_closes_at_once),
        cmocka_unit_test(a_consumer_that_closes_makes_sure_that_its_producer_has_heard_that_it_has_all),
        cmocka_unit_test(a_producer_that_is_not_driven_hears_of_the_end_later),
        cmocka_unit_test(a_pull_that_has_not_ended_gives_its_lease_back_when_its_agent_closes),
        {"an_expectation_that_has_not_ended_is_withdrawn_when_its_agent_closes (shm)",
         an_expectation_that_has_not_ended_is_withdrawn_when_its_agent_closes, NULL, NULL, shm},
        {"an_expectation_that_has_not_ended_is_withdrawn_when_its_agent_closes (messages)",
         an_expectation_that_has_not_ended_is_withdrawn_when_its_agent_closes, NULL, NULL, messages},
        cmocka_unit_test(waiting_ends_with_its_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
