/* The loop of an engine around its agents: what wakes it, several threads that run it, and its end. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent/agent.h"
#include "agent_net.h"
#include "agent_world.h"
#include "transport/transport.h"

#define OWN_THREAD (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), .own_thread = true})
#define LONG_MS (WORLD_PATIENCE_S * 1000) /* a poll that times out was woken too late */
#define TOKENS 40

typedef struct exchange {
    world w;
    world_request held, wanted;
} exchange;

static void set_up(exchange *x, const kvf_agent_options *options) {
    memset(x, 0, sizeof *x);
    world_open_model(&x->w, attention(2, 4, 8), ENGINE(.name = "P", .all = {.block_count = 64}),
                     ENGINE(.name = "D", .all = {.block_count = 64, .order = "BLHNP"}), options);
    world_request_make(&x->w, &x->w.p, "r", TOKENS, 3, 1, &x->held);
    world_request_make(&x->w, &x->w.d, "r", TOKENS, 7, 1, &x->wanted);
    x->wanted.request.contact = x->w.p.contact;
    world_fill(&x->w, &x->w.p, &x->held, 1);
}

/* ---- one thread ------------------------------------------------------------------------------ */

/* Lets agents whose descriptor is readable make progress, until D has an event for each ticket; returns the number of
 * wake-ups. */
static uint32_t poll_until_done(exchange *x) {
    kvf_agent *agents[2] = {x->w.p.agents[0], x->w.d.agents[0]};
    uint32_t rounds = 0;
    for (bool done = false; !done; rounds++) {
        struct pollfd fds[2];
        for (int i = 0; i < 2; i++)
            fds[i] = (struct pollfd){kvf_agent_event_fd(agents[i]), POLLIN, 0};
        if (poll(fds, 2, LONG_MS) <= 0)
            fail_msg("nothing was readable, and the exchange is not over");
        for (int i = 0; i < 2; i++) {
            kvf_event event = {.struct_size = sizeof event};
            if (!fds[i].revents)
                continue;
            assert_ok(kvf_agent_progress(agents[i], NULL));
            while (kvf_agent_next_event(agents[i], &event) == KVF_OK) {
                if (event.kind != KVF_EVENT_DONE)
                    fail_msg("event %d: %s", (int)event.kind, event.detail);
                done = done || i == 1;
            }
        }
    }
    return rounds;
}

static void a_pull_needs_no_call_but_those_that_the_descriptor_asks_for(void **state) {
    (void)state;
    exchange x;
    uint64_t ticket;
    set_up(&x, NULL);
    assert_ok(kvf_agent_pull(x.w.d.agents[0], &x.wanted.request, &ticket));
    world_hold(&x.w.p, &x.held, &ticket);
    (void)poll_until_done(&x);
    assert_int_equal(world_wrong_cells(&x.w, &x.w.d, &x.wanted, 1), 0);
    world_close(&x.w);
}

static void a_push_needs_no_call_but_those_that_the_descriptor_asks_for(void **state) {
    (void)state;
    exchange x;
    uint64_t ticket;
    set_up(&x, NULL);
    assert_ok(kvf_agent_expect(x.w.d.agents[0], &x.wanted.request, &ticket));
    assert_ok(kvf_agent_push(x.w.p.agents[0], &x.held.request, &ticket));
    assert_ok(kvf_agent_push_ready(x.w.p.agents[0], ticket, NULL));
    (void)poll_until_done(&x);
    assert_int_equal(world_wrong_cells(&x.w, &x.w.d, &x.wanted, 1), 0);
    world_close(&x.w);
}

/* A request that is over must not keep the loop spinning: after some last rounds the descriptor is silent. */
static void the_descriptor_is_silent_where_there_is_nothing_to_do(void **state) {
    (void)state;
    exchange x;
    uint64_t ticket;
    set_up(&x, NULL);
    world_hold(&x.w.p, &x.held, &ticket);
    assert_ok(kvf_agent_pull(x.w.d.agents[0], &x.wanted.request, &ticket));
    assert_true(poll_until_done(&x) < 10000);
    world_quiet(&x.w);
    for (int i = 0; i < 2; i++) {
        kvf_agent *agent = i ? x.w.d.agents[0] : x.w.p.agents[0];
        struct pollfd fd = {kvf_agent_event_fd(agent), POLLIN, 0};
        uint32_t rounds = 0;
        for (kvf_event event = {.struct_size = sizeof event}; poll(&fd, 1, 0) > 0; rounds++) {
            assert_true(rounds < 10000);
            assert_ok(kvf_agent_progress(agent, NULL));
            while (kvf_agent_next_event(agent, &event) == KVF_OK) {
            }
        }
    }
    world_close(&x.w);
}

static void an_event_makes_the_descriptor_readable_until_it_is_taken(void **state) {
    (void)state;
    for (int own = 0; own < 2; own++) {
        exchange x;
        uint64_t ticket;
        kvf_event event = {.struct_size = sizeof event};
        set_up(&x, own ? OWN_THREAD : NULL);
        kvf_agent *p = x.w.p.agents[0];
        struct pollfd fd = {kvf_agent_event_fd(p), POLLIN, 0};
        world_hold(&x.w.p, &x.held, &ticket);
        assert_ok(kvf_agent_cancel(p, ticket));
        assert_int_equal(poll(&fd, 1, LONG_MS), 1);
        while (kvf_agent_next_event(p, &event) == KVF_E_EMPTY)
            assert_ok(kvf_agent_progress(p, NULL));
        assert_int_equal(event.status, KVF_E_CANCELLED);
        for (uint32_t rounds = 0; poll(&fd, 1, 0) > 0; rounds++) {
            assert_true(rounds < 10000);
            assert_ok(kvf_agent_progress(p, NULL));
        }
        world_close(&x.w);
    }
}

static void a_time_that_has_come_makes_the_descriptor_readable(void **state) {
    (void)state;
    exchange x;
    uint64_t ticket;
    kvf_event event = {.struct_size = sizeof event};
    set_up(&x, NULL);
    kvf_agent *p = x.w.p.agents[0];
    struct pollfd fd = {kvf_agent_event_fd(p), POLLIN, 0};
    x.held.request.deadline_ns = 5 * MS;
    assert_ok(kvf_agent_hold(p, &x.held.request, &ticket));
    while (kvf_agent_next_event(p, &event) == KVF_E_EMPTY) {
        assert_int_equal(poll(&fd, 1, LONG_MS), 1);
        assert_ok(kvf_agent_progress(p, NULL));
    }
    assert_int_equal(event.status, KVF_E_TIMEOUT);
    world_close(&x.w);
}

static void the_time_out_is_that_of_the_next_thing_to_do(void **state) {
    (void)state;
    exchange x;
    uint64_t ticket;
    set_up(&x, NULL);
    kvf_agent *p = x.w.p.agents[0];
    for (bool busy = true; busy;)
        assert_ok(kvf_agent_progress(p, &busy));
    assert_true(kvf_agent_timeout(p) == UINT64_MAX);
    x.held.request.deadline_ns = 100 * SECOND;
    assert_ok(kvf_agent_hold(p, &x.held.request, &ticket));
    assert_true(kvf_agent_timeout(p) <= 100 * SECOND);
    assert_true(kvf_agent_timeout(p) > 50 * SECOND);
    assert_ok(kvf_agent_cancel(p, ticket));
    assert_true(kvf_agent_timeout(p) == 0); /* the request must still be freed */
    assert_true(kvf_agent_timeout(NULL) == UINT64_MAX);
    world_close(&x.w);
}

/* If a producer was never met, the event of the request gives the link's reason. */
static void an_unmet_producer_is_explained_by_its_link(void **state) {
    (void)state;
    char nowhere[96]; /* an impossible host name: its label is too long */
    (void)snprintf(nowhere, sizeof nowhere, "tcp://%064d.test:5555", 0);
    const struct {
        const char *endpoint, *reason;
    } cases[] = {{nowhere, "the host name could not be looked up"},
                 {"tcp://127.0.0.1:1", "it was refused because nobody listens there"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        exchange x;
        kvf_event event = {.struct_size = sizeof event, .detail = ""};
        set_up(&x, OWN_THREAD);
        x.wanted.request.contact.endpoint = cases[i].endpoint;
        /* A busy machine may need longer to find out, so the deadline is then doubled. */
        for (uint64_t deadline_ns = 200 * MS; !strstr(event.detail, cases[i].reason); deadline_ns *= 2) {
            assert_true(deadline_ns < WORLD_PATIENCE_S * SECOND);
            x.wanted.request.deadline_ns = deadline_ns;
            assert_ok(kvf_agent_pull(x.w.d.agents[0], &x.wanted.request, NULL));
            assert_ok(kvf_agent_wait(x.w.d.agents[0], 2 * WORLD_PATIENCE_S * SECOND));
            assert_ok(kvf_agent_next_event(x.w.d.agents[0], &event));
            assert_int_equal(event.status, KVF_E_TIMEOUT);
        }
        assert_non_null(strstr(event.detail, cases[i].endpoint));
        world_close(&x.w);
    }
}

static bool is_readable(kvf_agent *agent) {
    for (bool busy = true; busy;)
        assert_ok(kvf_agent_progress(agent, &busy));
    struct pollfd fd = {kvf_agent_event_fd(agent), POLLIN, 0};
    return poll(&fd, 1, 0) == 1;
}

/* Without a thread of its own: the engine waits for work and for events on one descriptor. */
static void the_descriptor_is_readable_while_an_event_waits(void **state) {
    (void)state;
    exchange x;
    uint64_t tickets[2];
    set_up(&x, NULL);
    kvf_agent *p = x.w.p.agents[0];
    kvf_event event = {.struct_size = sizeof event};
    for (uint32_t i = 0; i < 2; i++) {
        x.held.request.id = (kvf_request_id){&i, sizeof i};
        assert_ok(kvf_agent_hold(p, &x.held.request, &tickets[i]));
    }
    assert_false(is_readable(p));
    for (uint32_t i = 0; i < 2; i++)
        assert_ok(kvf_agent_cancel(p, tickets[i]));
    for (uint32_t i = 0; i < 2; i++) {
        assert_true(is_readable(p));
        assert_ok(kvf_agent_next_event(p, &event));
        assert_int_equal(event.ticket, tickets[i]);
    }
    assert_false(is_readable(p));
    world_close(&x.w);
}

static void an_agent_with_a_thread_waits_for_no_call(void **state) {
    (void)state;
    exchange x;
    uint64_t ticket;
    set_up(&x, OWN_THREAD);
    world_hold(&x.w.p, &x.held, &ticket);
    assert_true(kvf_agent_timeout(x.w.p.agents[0]) == UINT64_MAX);
    world_close(&x.w);
}

static uint32_t rounds;

static void count_round(kvf_link *link, bool *more) {
    rounds++;
    kvf_link_zmq.progress(link, more);
}

static void an_agent_that_waits_for_events_sleeps_meanwhile(void **state) {
    (void)state;
    kvf_link_table counting = kvf_link_zmq;
    kvf_agent *directory = NULL;
    counting.progress = count_round;
    assert_ok(kvf_agent_open_in(&(const kvf_surroundings){.link = &counting}, NULL, 0, NULL, &directory));
    assert_int_equal(kvf_agent_wait(directory, 200 * MS), KVF_E_TIMEOUT);
    assert_in_range(rounds, 1, 500);
    kvf_agent_close(directory);
}

/* ---- several threads ------------------------------------------------------------------------- */

typedef struct waiter {
    kvf_agent *agent;
    pthread_t thread;
    kvf_status status;
} waiter;

static void *wait_for_ever(void *context) {
    waiter *self = context;
    self->status = kvf_agent_wait(self->agent, UINT64_MAX);
    return NULL;
}

static uint32_t calls_under_way(kvf_agent *agent) {
    (void)pthread_mutex_lock(&agent->lock);
    uint32_t users = agent->users;
    (void)pthread_mutex_unlock(&agent->lock);
    return users;
}

static void closing_ends_the_waits_of_other_threads(void **state) {
    (void)state;
    for (int own = 0; own < 2; own++) {
        exchange x;
        waiter waiters[4];
        set_up(&x, own ? OWN_THREAD : NULL);
        for (size_t i = 0; i < COUNT_OF(waiters); i++) {
            waiters[i] = (waiter){.agent = x.w.d.agents[0]};
            assert_int_equal(pthread_create(&waiters[i].thread, NULL, wait_for_ever, &waiters[i]), 0);
        }
        while (calls_under_way(x.w.d.agents[0]) < COUNT_OF(waiters))
            (void)sched_yield();
        world_close_agents(&x.w.d);
        for (size_t i = 0; i < COUNT_OF(waiters); i++) {
            (void)pthread_join(waiters[i].thread, NULL);
            assert_int_equal(waiters[i].status, KVF_E_CANCELLED);
        }
        world_close(&x.w);
    }
}

typedef struct lingerer {
    kvf_agent *agent; /* NULL: lines are not heeded */
    pthread_t closer;
    bool logged, left_behind;
} lingerer;

static void *stop_the_loop(void *agent) {
    kvf_loop_stop(agent);
    kvf_work_give(agent); /* so that the agent can be closed after all */
    return NULL;
}

/* Stays in the call that logs until the closing thread has come twice: to say so, and to wait for calls to end. If it
 * does not wait, it takes the work. */
static void linger(void *context, const kvf_log_line *line) {
    lingerer *self = context;
    kvf_agent *agent = self->agent;
    (void)line;
    if (!agent || self->logged)
        return;
    self->logged = true;
    (void)pthread_mutex_lock(&agent->lock);
    const uint64_t before = agent->entered, asked = agent->work_asked;
    assert_int_equal(pthread_create(&self->closer, NULL, stop_the_loop, agent), 0);
    while (agent->entered < before + 2) {
        (void)pthread_mutex_unlock(&agent->lock);
        (void)sched_yield();
        (void)pthread_mutex_lock(&agent->lock);
    }
    self->left_behind = agent->work_asked > asked;
    (void)pthread_mutex_unlock(&agent->lock);
}

static void closing_waits_for_calls_that_are_in_the_log_function(void **state) {
    (void)state;
    exchange x;
    lingerer l = {.agent = NULL};
    const kvf_agent_options options = {.struct_size = sizeof options, .log = linger, .log_context = &l};
    uint64_t ticket;
    set_up(&x, &options);
    assert_ok(kvf_agent_hold(x.w.p.agents[0], &x.held.request, &ticket));
    l.agent = x.w.p.agents[0];
    assert_ok(kvf_agent_cancel(l.agent, ticket));
    assert_true(l.logged);
    assert_int_equal(pthread_join(l.closer, NULL), 0);
    assert_false(l.left_behind);
    world_close(&x.w);
}

static void look_for_closing(void *context, const kvf_log_line *line) {
    bool *said = context;
    *said = *said || strstr(line->text, "the agent is being closed");
}

/* Also if no producer is to be told, as none has been met. */
static void what_closing_gives_up_is_logged(void **state) {
    (void)state;
    exchange x;
    bool said = false;
    const kvf_agent_options options = {
        .struct_size = sizeof options, .log = look_for_closing, .log_context = &said};
    uint64_t ticket;
    set_up(&x, &options);
    x.wanted.request.contact = x.w.p.contact;
    assert_ok(kvf_agent_pull(x.w.d.agents[0], &x.wanted.request, &ticket));
    world_close_agents(&x.w.d);
    assert_true(said);
    world_close(&x.w);
}

static void *one_round(void *agent) {
    return kvf_agent_progress(agent, NULL) ? agent : NULL;
}

/* A transport that is hurried ends a long move early. */
static void only_a_thread_that_waits_for_the_work_hurries_the_transport(void **state) {
    (void)state;
    exchange x;
    pthread_t thread;
    void *failed;
    set_up(&x, NULL);
    kvf_agent *d = x.w.d.agents[0];
    assert_ok(kvf_agent_lock(d));
    kvf_work_take(d);
    assert_false(kvf_transport_hurried(d->transport));
    assert_int_equal(pthread_create(&thread, NULL, one_round, d), 0);
    while (d->work_asked - d->work_given < 2) {
        (void)pthread_mutex_unlock(&d->lock);
        (void)sched_yield();
        (void)pthread_mutex_lock(&d->lock);
    }
    assert_true(kvf_transport_hurried(d->transport));
    kvf_work_give(d);
    kvf_agent_unlock(d);
    assert_int_equal(pthread_join(thread, &failed), 0);
    assert_null(failed);
    assert_false(kvf_transport_hurried(d->transport));
    world_close(&x.w);
}

typedef struct comer {
    kvf_agent *agent;
    bool had_its_turn;
} comer;

static void *take_one_turn(void *context) {
    comer *self = context;
    kvf_turn_take(self->agent);
    self->had_its_turn = true;
    (void)pthread_mutex_unlock(&self->agent->lock);
    return NULL;
}

static void a_thread_that_gives_way_lets_those_go_first_that_have_come(void **state) {
    (void)state;
    exchange x;
    pthread_t threads[3];
    comer comers[COUNT_OF(threads)];
    set_up(&x, NULL);
    kvf_agent *d = x.w.d.agents[0];
    kvf_turn_take(d);
    const uint64_t came = atomic_load(&d->arrived);
    for (size_t i = 0; i < COUNT_OF(threads); i++) {
        comers[i] = (comer){.agent = d};
        assert_int_equal(pthread_create(&threads[i], NULL, take_one_turn, &comers[i]), 0);
    }
    while (atomic_load(&d->arrived) < came + COUNT_OF(threads))
        (void)sched_yield();
    kvf_turn_give(d);
    for (size_t i = 0; i < COUNT_OF(threads); i++)
        assert_true(comers[i].had_its_turn);
    (void)pthread_mutex_unlock(&d->lock);
    for (size_t i = 0; i < COUNT_OF(threads); i++)
        (void)pthread_join(threads[i], NULL);
    world_close(&x.w);
}

#define REQUESTS 48u

typedef struct crowd {
    world w;
    pthread_mutex_t taking;
    atomic_uint done, wrong;
} crowd;

typedef struct one {
    crowd *crowd;
    kvf_agent *agent;
} one;

/* Only the waiting threads make progress with these agents. */
static void *wait_and_take(void *context) {
    const one *self = context;
    crowd *c = self->crowd;
    while (atomic_load(&c->done) < 2 * REQUESTS) {
        kvf_event event = {.struct_size = sizeof event};
        (void)kvf_agent_wait(self->agent, 20 * MS);
        (void)pthread_mutex_lock(&c->taking); /* an event is valid until another is taken */
        while (kvf_agent_next_event(self->agent, &event) == KVF_OK) {
            atomic_fetch_add(&c->wrong, event.kind != KVF_EVENT_DONE);
            atomic_fetch_add(&c->done, 1);
        }
        (void)pthread_mutex_unlock(&c->taking);
    }
    return NULL;
}

static void several_threads_wait_for_agents_that_have_none(void **state) {
    (void)state;
    static crowd c;
    static world_request held[REQUESTS], wanted[REQUESTS];
    static char ids[REQUESTS][16];
    pthread_t threads[6];
    one ones[6];
    memset(&c, 0, sizeof c);
    (void)pthread_mutex_init(&c.taking, NULL);
    world_open_model(&c.w, attention(2, 4, 8), ENGINE(.name = "P", .all = {.block_count = 256}),
                     ENGINE(.name = "D", .all = {.block_count = 256, .order = "BLHNP"}), NULL);
    for (size_t i = 0; i < COUNT_OF(threads); i++) {
        ones[i] = (one){&c, i % 2 ? c.w.p.agents[0] : c.w.d.agents[0]};
        assert_int_equal(pthread_create(&threads[i], NULL, wait_and_take, &ones[i]), 0);
    }
    for (uint32_t i = 0; i < REQUESTS; i++) {
        uint64_t ticket;
        (void)snprintf(ids[i], sizeof ids[i], "request %u", i);
        world_request_make(&c.w, &c.w.p, ids[i], TOKENS, 3 * i, 1, &held[i]);
        world_request_make(&c.w, &c.w.d, ids[i], TOKENS, 3 * i, 1, &wanted[i]);
        world_fill(&c.w, &c.w.p, &held[i], i);
        wanted[i].request.contact = c.w.p.contact;
        assert_ok(kvf_agent_pull(c.w.d.agents[0], &wanted[i].request, &ticket));
        world_hold(&c.w.p, &held[i], &ticket);
    }
    for (size_t i = 0; i < COUNT_OF(threads); i++)
        (void)pthread_join(threads[i], NULL);
    assert_int_equal(atomic_load(&c.wrong), 0);
    for (uint32_t i = 0; i < REQUESTS; i++)
        assert_int_equal(world_wrong_cells(&c.w, &c.w.d, &wanted[i], i), 0);
    world_close(&c.w);
}

/* ---- the log --------------------------------------------------------------------------------- */

typedef struct talker {
    kvf_agent *agent;
    atomic_uint lines, wrong, deep;
} talker;

/* Makes calls that an engine may make when it logs a failure. */
static void call_back(void *context, const kvf_log_line *line) {
    talker *self = context;
    kvf_agent_stats stats = {.struct_size = sizeof stats};
    (void)line;
    if (!self->agent)
        return;
    atomic_fetch_add(&self->wrong, atomic_fetch_add(&self->deep, 1) > 0);
    atomic_fetch_add(&self->wrong, kvf_agent_get_stats(self->agent, &stats) != KVF_OK);
    atomic_fetch_add(&self->wrong, kvf_agent_progress(self->agent, NULL) != KVF_OK);
    atomic_fetch_add(&self->wrong, kvf_agent_cancel(self->agent, UINT64_MAX) != KVF_E_NOT_FOUND);
    atomic_fetch_sub(&self->deep, 1);
    atomic_fetch_add(&self->lines, 1);
}

static void the_log_function_may_call_the_agent(void **state) {
    (void)state;
    for (int own = 0; own < 2; own++) {
        exchange x;
        talker t = {.agent = NULL};
        kvf_agent_options options = {
            .struct_size = sizeof options, .own_thread = own, .log = call_back, .log_context = &t};
        uint64_t ticket;
        set_up(&x, &options);
        t.agent = x.w.p.agents[0];
        for (uint32_t i = 0; i < 8; i++) {
            assert_ok(kvf_agent_hold(x.w.p.agents[0], &x.held.request, &ticket));
            assert_ok(kvf_agent_cancel(x.w.p.agents[0], ticket));
        }
        world_until(&x.w, atomic_load(&t.lines) == 8);
        assert_int_equal(atomic_load(&t.wrong), 0);
        world_close(&x.w);
    }
}

typedef struct patient {
    kvf_agent *agent; /* NULL: lines are not heeded */
    const kvf_agent_request *request;
    kvf_status status; /* of the wait */
    sem_t waited;
} patient;

/* At the first line that a request has failed, holds another one until it fails, too. */
static void hold_and_wait(void *context, const kvf_log_line *line) {
    patient *self = context;
    kvf_agent *agent = self->agent;
    kvf_event event = {.struct_size = sizeof event};
    (void)line;
    if (!agent)
        return;
    self->agent = NULL;
    assert_ok(kvf_agent_next_event(agent, &event)); /* that of the line */
    assert_ok(kvf_agent_hold(agent, self->request, NULL));
    self->status = kvf_agent_wait(agent, WORLD_PATIENCE_S * SECOND);
    assert_return_code(sem_post(&self->waited), 0);
}

/* Also on the agent's own thread, without which nothing goes on. */
static void the_log_function_may_wait_for_an_event(void **state) {
    (void)state;
    exchange x;
    patient w = {.agent = NULL};
    kvf_agent_options options = {.struct_size = sizeof options,
                                 .own_thread = true,
                                 .log = hold_and_wait,
                                 .log_context = &w,
                                 .log_level = KVF_LOG_WARNING};
    assert_return_code(sem_init(&w.waited, 0, 0), 0);
    set_up(&x, &options);
    kvf_agent_request next = x.held.request;
    next.id = (kvf_request_id){"next", 4};
    x.held.request.deadline_ns = next.deadline_ns = 10 * MS;
    w.request = &next;
    w.agent = x.w.p.agents[0];
    assert_ok(kvf_agent_hold(x.w.p.agents[0], &x.held.request, NULL));
    while (sem_wait(&w.waited) != 0)
        assert_int_equal(errno, EINTR);
    assert_ok(w.status);
    world_close(&x.w);
    (void)sem_destroy(&w.waited);
}

static void the_error_of_a_call_is_not_overwritten_by_the_log_function(void **state) {
    (void)state;
    exchange x;
    talker t = {.agent = NULL};
    kvf_agent_options options = {.struct_size = sizeof options, .log = call_back, .log_context = &t};
    uint64_t ticket;
    set_up(&x, &options);
    t.agent = x.w.p.agents[0];
    world_hold(&x.w.p, &x.held, &ticket);
    (void)kvf_agent_cancel(x.w.p.agents[0], 12345);
    assert_ok(kvf_agent_cancel(x.w.p.agents[0], ticket));
    assert_int_equal(atomic_load(&t.lines), 1);
    assert_non_null(strstr(kvf_error_detail(), "12345"));
    world_close(&x.w);
}

/* ---- processes ------------------------------------------------------------------------------- */

static void a_child_of_fork_cannot_use_its_parents_agent(void **state) {
    (void)state;
    for (int own = 0; own < 2; own++) {
        exchange x;
        set_up(&x, own ? OWN_THREAD : NULL);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            uint64_t ticket;
            int wrong = kvf_agent_progress(x.w.d.agents[0], NULL) != KVF_E_INVALID;
            wrong += strstr(kvf_error_detail(), "forked") == NULL;
            wrong += kvf_agent_hold(x.w.p.agents[0], &x.held.request, &ticket) != KVF_E_INVALID;
            wrong += kvf_agent_timeout(x.w.p.agents[0]) != UINT64_MAX;
            kvf_agent_close(x.w.d.agents[0]);
            _exit(wrong);
        }
        int status;
        uint64_t tickets[2];
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
        world_hold(&x.w.p, &x.held, &tickets[0]);
        world_pull(&x.w.d, &x.wanted, &x.w.p, &tickets[1]);
        (void)world_done(&x.w, x.w.d.agents[0], tickets[1]);
        world_close(&x.w);
    }
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static void an_agent_that_cannot_be_opened_closes_only_its_own_descriptors(void **state) {
    (void)state;
    const int zero = fcntl(STDIN_FILENO, F_GETFD) < 0 ? open("/dev/null", O_RDONLY) : STDIN_FILENO;
    assert_int_equal(zero, 0);
    struct rlimit whole;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &whole), 0);
    kvf_status status = KVF_E_IO;
    uint32_t refused = 0;
    for (rlim_t left = 0; status; left++) {
        kvf_agent *agent = NULL;
        const int next = dup(0); /* all lower numbers are open */
        (void)close(next);
        const struct rlimit few = {(rlim_t)next + left, whole.rlim_max};
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
        status = kvf_agent_open_in(&net_surroundings, NULL, 0, NULL, &agent);
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &whole), 0);
        refused += status != KVF_OK;
        assert_true(fcntl(0, F_GETFD) >= 0);
        kvf_agent_close(agent);
    }
    assert_true(refused >= 3); /* a timer and two descriptors to wake it */
}

/* ---- memory ---------------------------------------------------------------------------------- */

typedef struct scarcity {
    int calls, refuse_at; /* refuse_at: only the call of this number is refused */
} scarcity;

static void *scarce_allocate(void *context, size_t bytes) {
    scarcity *s = context;
    return ++s->calls == s->refuse_at ? NULL : malloc(bytes);
}

static void *scarce_resize(void *context, void *memory, size_t bytes) {
    scarcity *s = context;
    return ++s->calls == s->refuse_at ? NULL : realloc(memory, bytes);
}

static void scarce_release(void *context, void *memory) {
    (void)context;
    free(memory);
}

static void registering_that_failed_for_want_of_memory_may_be_repeated(void **state) {
    (void)state;
    kvf_model *model = attention(2, 4, 8);
    kvf_engine *engine = engine_of(model, ENGINE(.name = "P", .all = {.block_count = 16}));
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(engine, 0));
    kvf_status status = KVF_E_NOMEM;
    int refused = 0;
    for (int n = 1; status; n++) {
        kvf_agent *agent;
        kvf_memory regions[WORLD_MAX_REGIONS];
        scarcity scarce = {0, n};
        const kvf_allocator allocator = {scarce_allocate, scarce_resize, scarce_release, &scarce};
        assert_ok(kvf_agent_open(engine, 0, NULL, &agent));
        for (uint32_t i = 0; i < shard->region_count; i++) {
            regions[i] = (kvf_memory){.struct_size = sizeof(kvf_memory), .bytes = shard->region_bytes[i]};
            assert_ok(kvf_agent_allocate(agent, KVF_MEMORY_HOST, 0, regions[i].bytes, &regions[i].address));
        }
        assert_ok(kvf_set_allocator(&allocator));
        status = kvf_agent_register(agent, regions, shard->region_count);
        assert_ok(kvf_set_allocator(NULL));
        if (status) {
            refused++;
            assert_int_equal(status, KVF_E_NOMEM);
            assert_ok(kvf_agent_register(agent, regions, shard->region_count));
        }
        assert_int_equal(kvf_agent_register(agent, regions, shard->region_count), KVF_E_EXISTS);
        kvf_agent_close(agent);
    }
    assert_true(refused > 5);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pull_needs_no_call_but_those_that_the_descriptor_asks_for),
        cmocka_unit_test(a_push_needs_no_call_but_those_that_the_descriptor_asks_for),
        cmocka_unit_test(the_descriptor_is_silent_where_there_is_nothing_to_do),
        cmocka_unit_test(an_event_makes_the_descriptor_readable_until_it_is_taken),
        cmocka_unit_test(a_time_that_has_come_makes_the_descriptor_readable),
        cmocka_unit_test(the_time_out_is_that_of_the_next_thing_to_do),
        cmocka_unit_test(an_unmet_producer_is_explained_by_its_link),
        cmocka_unit_test(the_descriptor_is_readable_while_an_event_waits),
        cmocka_unit_test(an_agent_with_a_thread_waits_for_no_call),
        cmocka_unit_test(an_agent_that_waits_for_events_sleeps_meanwhile),
        cmocka_unit_test(closing_ends_the_waits_of_other_threads),
        cmocka_unit_test(closing_waits_for_calls_that_are_in_the_log_function),
        cmocka_unit_test(what_closing_gives_up_is_logged),
        cmocka_unit_test(only_a_thread_that_waits_for_the_work_hurries_the_transport),
        cmocka_unit_test(a_thread_that_gives_way_lets_those_go_first_that_have_come),
        cmocka_unit_test(several_threads_wait_for_agents_that_have_none),
        cmocka_unit_test(the_log_function_may_call_the_agent),
        cmocka_unit_test(the_log_function_may_wait_for_an_event),
        cmocka_unit_test(the_error_of_a_call_is_not_overwritten_by_the_log_function),
        cmocka_unit_test(a_child_of_fork_cannot_use_its_parents_agent),
        cmocka_unit_test(an_agent_that_cannot_be_opened_closes_only_its_own_descriptors),
        cmocka_unit_test(registering_that_failed_for_want_of_memory_may_be_repeated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
