/*
 * Making progress: one round after the other, and sleeping until there is something to do.
 *
 * An agent sleeps on one epoll descriptor that is readable whenever there is work: messages, operations that ended, a
 * timer, or `wake`, for work that no other descriptor shows. A thread that gives up the lock sets the latter two, so
 * that a sleeper never misses work that another thread began.
 */
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <unistd.h>

#include "agent/after.h"
#include "agent/arrival.h"
#include "agent/command.h"
#include "agent/drain.h"
#include "agent/early.h"
#include "agent/hashing.h"
#include "agent/pace.h"
#include "agent/peers.h"
#include "agent/pull.h"
#include "agent/push.h"
#include "base/thread.h"
#include "stage/ways.h"
#include "transport/transport.h"

#define STAGE_PAUSE (250 * KVF_MILLISECOND) /* the longest time between two looks of a stage that has flows */
#define REPEAT_PAUSE KVF_MILLISECOND /* before a stage repeats messages that a peer takes none of now */
/* How long closing waits until producers are told what they may free, and of that, until they have confirmed it. */
#define SAYING KVF_SECOND
#define CONFIRMING (100 * KVF_MILLISECOND)

/* ---- descriptors ----------------------------------------------------------------------------- */

kvf_status kvf_loop_open(kvf_agent *agent, bool unwatched) {
    (void)pthread_mutex_init(&agent->lock, NULL);
    (void)pthread_cond_init(&agent->turn, NULL);
    (void)pthread_cond_init(&agent->worked, NULL);
    agent->process = getpid();
    agent->forks = kvf_fork_count();
    agent->due = agent->tickets_due = agent->pace_due = UINT64_MAX;
    agent->told_wake.fd = agent->wake.fd = agent->poll_fd = -1;
    agent->looks.fd = agent->hashing_looks.fd = -1;
    agent->timer = (kvf_timer){-1, UINT64_MAX};
    if (unwatched)
        return KVF_OK;
    kvf_status status = kvf_timer_open(&agent->timer);
    if (!status)
        status = kvf_wake_open(&agent->told_wake);
    return status ? status : kvf_wake_open(&agent->wake);
}

/*
 * The transport's descriptor is an epoll in which fabrics nest others, and the engine may add it to its own. Linux
 * allows five nested epolls, so we add our other descriptors to the transport's instead of nesting it in ours.
 */
static kvf_status watch_all(kvf_agent *agent) {
    int fds[KVF_LINK_FDS + 3] = {agent->wake.fd, agent->timer.fd};
    uint32_t count = 2;
    kvf_status status = KVF_OK;
    if (agent->wake.fd < 0)
        return KVF_OK; /* nobody sleeps on it */
    if (agent->transport)
        agent->poll_fd = kvf_transport_event_fd(agent->transport);
    else
        status = kvf_watch_open(&agent->poll_fd);
    count += kvf_link_fds(agent->link, fds + count);
    if (!agent->options.own_thread) /* its engine waits for work and for events on one descriptor */
        fds[count++] = agent->told_wake.fd;
    for (uint32_t i = 0; i < count && !status; i++)
        status = kvf_watch_add(agent->poll_fd, fds[i], NULL);
    return status;
}

void kvf_loop_close(kvf_agent *agent) {
    if (!agent->transport)
        kvf_fd_close(&agent->poll_fd);
    kvf_timer_close(&agent->timer);
    kvf_wake_close(&agent->wake);
    kvf_wake_close(&agent->told_wake);
    kvf_looks_close(&agent->looks);
    kvf_looks_close(&agent->hashing_looks);
    (void)pthread_cond_destroy(&agent->worked);
    (void)pthread_cond_destroy(&agent->turn);
    (void)pthread_mutex_destroy(&agent->lock);
}

/* ---- one round ------------------------------------------------------------------------------- */

static void tick_tickets(kvf_agent *agent, uint64_t now) {
    kvf_ticket *ticket, *next;
    agent->tickets_due = UINT64_MAX;
    HASH_ITER(hh, agent->tickets, ticket, next) {
        if (ticket->state != KVF_TICKET_OVER)
            ticket->ops->tick(ticket, now);
    }
}

/* Does what is due: for some sessions in each round, as peers can make many; for all requests of the engine. */
static void tick(kvf_agent *agent, uint64_t now) {
    const bool all_is_due = now >= agent->due;
    if (all_is_due) {
        agent->due = UINT64_MAX;
        kvf_sessions_due(agent);
    }
    kvf_sessions_tick(agent, now);
    if (all_is_due || now >= agent->tickets_due)
        tick_tickets(agent, now);
    kvf_remotes_tick(agent, now);
}

/* A process that wakes from a long stop first gives up the flows that it may no longer write. */
static void stop_late_flows(kvf_agent *agent, uint64_t now) {
    kvf_flow *flow, *next;
    DL_FOREACH_SAFE2(agent->moving_flows, flow, next, moving_next) {
        if (now >= flow->until)
            kvf_flow_tick(flow, now);
    }
}

static void look_at_carries(kvf_agent *agent) {
    kvf_pull *pull, *next_pull;
    DL_FOREACH_SAFE2(agent->moving_pulls, pull, next_pull, moving_next) {
        kvf_pull_poll(pull);
    }
    kvf_flow *flow, *next_flow;
    DL_FOREACH_SAFE2(agent->moving_flows, flow, next_flow, moving_next) {
        kvf_flow_poll(flow);
    }
}

/* Moves and hashes bytes, which takes long, without the lock. */
static bool move_and_hash(kvf_agent *agent) {
    kvf_hashing *hashing = kvf_hashing_next(agent);
    bool busy = false;
    (void)pthread_mutex_unlock(&agent->lock);
    (void)kvf_transport_progress(agent->transport, &busy);
    bool more = false;
    if (agent->stage)
        (void)kvf_stage_progress(agent->stage, &more);
    const bool repeats = more && kvf_stage_only_repeats(agent->stage);
    kvf_status status = hashing ? kvf_hashing_slice(hashing) : KVF_OK;
    kvf_turn_take(agent);
    if (hashing)
        kvf_hashing_sliced(hashing, status);
    if (kvf_transport_waits(agent->transport) > agent->waits) {
        agent->waits = kvf_transport_waits(agent->transport);
        kvf_peers_waiting(agent);
    }
    if (agent->stage && !kvf_stage_is_idle(agent->stage)) /* it notices flows that take too long */
        kvf_agent_due(agent, kvf_agent_now(agent) + (repeats ? REPEAT_PAUSE : STAGE_PAUSE));
    return busy || (more && !repeats) || kvf_hashing_waits(agent);
}

/* One round; true: another would find something to do. */
static bool work(kvf_agent *agent) {
    bool more = false, busy = false;
    kvf_work_take(agent);
    agent->again = false;
    stop_late_flows(agent, kvf_agent_now(agent));
    kvf_link_progress(agent->link, &more);
    if (agent->transport)
        busy = move_and_hash(agent);
    kvf_arrivals_look(agent); /* before the end of those that are done */
    look_at_carries(agent);
    kvf_afters_look(agent);
    uint64_t now = kvf_agent_now(agent);
    tick(agent, now);
    kvf_early_tick(agent, now);
    kvf_flows_tick(agent, now);
    kvf_pace_round(agent, now);
    while (agent->over)
        kvf_ticket_free(agent->over);
    kvf_commands_tick(agent, now);
    kvf_drain_look(agent, now);
    agent->again = agent->again || more || busy;
    kvf_work_give(agent);
    return agent->again || kvf_next_due(agent) <= now || kvf_link_pending(agent->link);
}

kvf_status kvf_agent_progress(kvf_agent *agent, bool *busy) {
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    bool more = work(agent);
    kvf_agent_unlock(agent);
    if (busy)
        *busy = more;
    return KVF_OK;
}

/* ---- sleeping -------------------------------------------------------------------------------- */

/* Sleeps, without the lock, until the descriptor is readable or `until`. Called with the lock; returns with
 * it. */
static void sleep_on(kvf_agent *agent, int fd, uint64_t until) {
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    uint64_t now = kvf_agent_now(agent);
    kvf_work_show(agent);
    kvf_log_deliver(agent);
    if (agent->stopping)
        return; /* requested while a line was logged */
    (void)pthread_mutex_unlock(&agent->lock);
    uint64_t left = until > now ? until - now : 0;
    struct timespec timeout = {.tv_sec = (time_t)(left / KVF_SECOND), .tv_nsec = (long)(left % KVF_SECOND)};
    (void)ppoll(&polled, 1, until == UINT64_MAX ? NULL : &timeout, NULL);
    kvf_turn_take(agent);
}

static void *run(void *context) {
    kvf_agent *agent = context;
    kvf_turn_take(agent);
    while (!agent->stopping) {
        if (!work(agent)) {
            sleep_on(agent, agent->poll_fd, UINT64_MAX);
        } else {
            kvf_log_deliver(agent);
            kvf_turn_give(agent);
        }
    }
    (void)pthread_mutex_unlock(&agent->lock);
    return NULL;
}

kvf_status kvf_loop_start(kvf_agent *agent) {
    kvf_status status = watch_all(agent);
    if (status || !agent->options.own_thread)
        return status;
    const int error = kvf_thread_start(&agent->thread, run, agent);
    agent->thread_runs = !error;
    return error ? kvf_fail(KVF_E_IO, "the agent's thread: %s", strerror(error)) : KVF_OK;
}

/* ---- the last words ---------------------------------------------------------------------------- */

/* Pulls that have not ended give their leases back, and expectations are withdrawn. */
static void give_up(kvf_agent *agent) {
    kvf_ticket *ticket, *next;
    HASH_ITER(hh, agent->tickets, ticket, next) {
        const bool asks = ticket->kind == KVF_REQUEST_PULL || ticket->kind == KVF_REQUEST_EXPECT;
        if (asks && ticket->state != KVF_TICKET_OVER && !ticket->silent && !ticket->status)
            kvf_ticket_fail(ticket, KVF_E_CANCELLED, "the agent is being closed", NULL);
    }
}

/* A producer that was told a moment ago that we have what it wrote may not have heard it yet. When it answers what comes
 * after that, it has. */
static void ask_whether_heard(kvf_agent *agent, uint64_t now) {
    kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        kvf_call_body body = {.clock_ns = now};
        if (session->written_ns && now < session->written_ns + SAYING && session->state == KVF_SESSION_OPEN &&
            !session->broken_since)
            (void)kvf_call_start(session, KVF_CALL_BEAT, &body, now + CONFIRMING, true, NULL, NULL, NULL);
    }
}

/* Whether a producer has yet to be sent, or else to confirm, that it may free blocks. */
static bool owes_words(const kvf_agent *agent, bool unsent) {
    const kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        if (!session->broken_since && kvf_calls_owed(session, unsent))
            return true;
    }
    return false;
}

/*
 * Without these words producers would keep blocks until their leases end, or take a push for failed. They may also be
 * lost if the producer notices the end of a connection for memory first; so it shall confirm them, unless it has no time
 * for that, such as one that the same thread drives. Meanwhile nothing but messages is looked at, and nothing new begins
 * (hear.c). The time is that of the machine: others, as in simulations, do not pass while we wait.
 */
static void say_last_words(kvf_agent *agent) {
    const uint64_t begun = kvf_agent_now(agent);
    bool more = false;
    if (agent->clock.now != kvf_monotonic.now)
        return;
    kvf_work_take(agent);
    give_up(agent);
    ask_whether_heard(agent, begun);
    kvf_work_give(agent);
    for (uint64_t now = begun; now < begun + SAYING && owes_words(agent, now >= begun + CONFIRMING);
         now = kvf_agent_now(agent)) {
        if (now > begun && !more)
            kvf_pause(KVF_MILLISECOND);
        kvf_work_take(agent);
        kvf_link_progress(agent->link, &more);
        kvf_sessions_tick(agent, kvf_agent_now(agent));
        kvf_work_give(agent);
    }
    kvf_log_deliver(agent);
}

void kvf_loop_stop(kvf_agent *agent) {
    kvf_turn_take(agent);
    agent->stopping = true;
    kvf_arrivals_end(agent); /* callers may wait for a device, and its streams for us */
    kvf_wake_set(&agent->wake, true);
    kvf_wake_set(&agent->told_wake, true);
    (void)pthread_mutex_unlock(&agent->lock);
    if (agent->thread_runs)
        (void)pthread_join(agent->thread, NULL);
    kvf_turn_take(agent);
    while (agent->users > 0 || agent->entered < atomic_load(&agent->arrived))
        (void)pthread_cond_wait(&agent->turn, &agent->lock);
    say_last_words(agent);
    kvf_work_take(agent); /* kept for good: closing needs it */
    (void)pthread_mutex_unlock(&agent->lock);
}

/* Whether another thread makes progress: in the log function this may be the agent's own. */
static bool is_served(const kvf_agent *agent) {
    return agent->thread_runs && !pthread_equal(agent->thread, pthread_self());
}

kvf_status kvf_agent_wait(kvf_agent *agent, uint64_t timeout_ns) {
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    const uint64_t end = kvf_add_or_most(kvf_agent_now(agent), timeout_ns);
    while (!agent->events && !agent->stopping && kvf_agent_now(agent) < end) {
        if (is_served(agent)) {
            sleep_on(agent, agent->told_wake.fd, end);
        } else if (work(agent)) {
            kvf_log_deliver(agent);
            kvf_turn_give(agent);
        } else if (!agent->events) {
            sleep_on(agent, agent->poll_fd, end);
        }
    }
    if (agent->events)
        status = KVF_OK;
    else if (agent->stopping)
        status = kvf_fail(KVF_E_CANCELLED, "the agent is being closed");
    else
        status = kvf_fail(KVF_E_TIMEOUT, "no event came");
    kvf_agent_unlock(agent);
    return status;
}

uint64_t kvf_agent_timeout(kvf_agent *agent) {
    if (kvf_agent_lock(agent))
        return UINT64_MAX;
    uint64_t now = kvf_agent_now(agent), due = kvf_next_due(agent);
    bool waits = agent->again || kvf_link_pending(agent->link);
    uint64_t left = agent->thread_runs || due == UINT64_MAX ? UINT64_MAX : due > now ? due - now : 0;
    left = waits && !agent->thread_runs ? 0 : left;
    kvf_agent_unlock(agent);
    return left;
}

int kvf_agent_event_fd(kvf_agent *agent) {
    return !agent ? -1 : agent->options.own_thread ? agent->told_wake.fd : agent->poll_fd;
}
