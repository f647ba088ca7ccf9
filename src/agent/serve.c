/*
 * The functions that answer each call of a peer, and that are told when a session or a meeting ends: the table by which
 * lower files call higher ones.
 */
#include "agent/arrival.h"
#include "agent/beat.h"
#include "agent/command.h"
#include "agent/early.h"
#include "agent/expect.h"
#include "agent/greet.h"
#include "agent/hold.h"
#include "agent/permit.h"
#include "agent/pull.h"
#include "agent/push.h"
#include "agent/push_shape.h"
#include "agent/verify.h"

#define JOIN_PAUSE (100 * KVF_MILLISECOND)

static void serve_probe(kvf_session *session, const kvf_call_body *call, bool fresh) {
    (void)fresh;
    kvf_answer_status(session, call, KVF_OK, "");
}

static void serve_beat(kvf_session *session, const kvf_call_body *call, bool fresh) {
    (void)fresh;
    kvf_beat_answer(session, call);
}

static void serve_written(kvf_session *session, const kvf_call_body *call, bool fresh) {
    (void)fresh;
    kvf_expect_written(session, call);
}

static void serve_withdraw(kvf_session *session, const kvf_call_body *call, bool fresh) {
    (void)fresh;
    kvf_flow_withdraw(session, call);
}

static void serve_checksum(kvf_session *session, const kvf_call_body *call, bool fresh) {
    (void)fresh;
    kvf_verify_answer(session, call);
}

/* Requests that are going to fail, before their connection is closed, for which the driver may wait for all streams. */
static void let_streams_go(const kvf_session *session) {
    const kvf_source *source;
    DL_FOREACH(session->sources, source) {
        (void)kvf_arrival_end(source->ticket);
    }
}

static void hide_session(kvf_session *session, bool lost) {
    if (lost)
        let_streams_go(session);
    kvf_remotes_leave(session, lost);
}

/* The consumer is told that its expectations are not known here. It then shuts out what writes by now: nothing else may
 * begin to. */
static void forget(kvf_session *session) {
    kvf_flow *flow, *next;
    DL_FOREACH_SAFE2(session->flows, flow, next, session_next) {
        if (!kvf_flow_wants_nothing(flow))
            kvf_flow_stop(flow, KVF_E_PEER_LOST, "its session has ended");
    }
    kvf_early_forget(session);
}

static void free_session(kvf_session *session) {
    kvf_verify_forget(session);
    kvf_push_shape_leave(session->shape);
}

static void joined(kvf_session *session) {
    kvf_source *source, *next;
    DL_FOREACH_SAFE(session->sources, source, next) {
        kvf_pull_joined(source);
    }
}

static void met(kvf_remote *remote) {
    kvf_agent *agent = remote->agent;
    kvf_ticket *ticket, *next;
    HASH_ITER(hh, agent->tickets, ticket, next) {
        if (kvf_ticket_remote(ticket) == remote && ticket->state == KVF_TICKET_MEETING)
            kvf_ticket_met(kvf_asker_of(ticket));
    }
}

static void unmet(kvf_remote *remote, kvf_status status, const char *detail) {
    kvf_agent *agent = remote->agent;
    kvf_ticket *ticket, *next;
    HASH_ITER(hh, agent->tickets, ticket, next) {
        if (kvf_ticket_remote(ticket) == remote && ticket->state == KVF_TICKET_MEETING)
            kvf_ticket_fail(ticket, status, detail, NULL);
    }
}

static void lose(kvf_session *session, kvf_status status, const char *detail) {
    while (session->sources) {
        kvf_source *source = session->sources;
        kvf_ticket *ticket = &source->ticket->base;
        kvf_ticket_fail(ticket, status, detail, session);
        if (session->sources == source)
            kvf_source_lost(source);
    }
    kvf_flow *flow, *next;
    DL_FOREACH_SAFE2(session->flows, flow, next, session_next) {
        if (kvf_flow_wants_nothing(flow))
            continue;
        kvf_flow_stop(flow, KVF_E_PEER_LOST, detail);
        kvf_flow_drop(flow);
    }
    /* Its leases go on until they are released or run out: whatever is lost, the peer may live, and read by a connection
     * that it has made. */
    kvf_early_forget(session);
    kvf_verify_forget(session);
    kvf_remote *remote;
    DL_FOREACH(session->agent->all_remotes, remote) {
        if (remote->stale && !remote->ready) /* nobody goes on with meeting it */
            unmet(remote, status, detail);
    }
}

/* Without memory, the join is tried again; after another failure, tickets that wait for it time out. */
static void join(kvf_session *session) {
    if (kvf_session_join_now(session) != KVF_E_NOMEM)
        return;
    session->join_wanted = true;
    kvf_agent_due(session->agent, kvf_agent_now(session->agent) + JOIN_PAUSE);
}

const kvf_hooks kvf_agent_hooks = {
    .join = join,
    .greeted = kvf_greeted,
    .commanded = kvf_command_take,
    .serve =
        {
            [KVF_CALL_JOIN] = kvf_join_answer,
            [KVF_CALL_ACQUIRE] = kvf_hold_acquire,
            [KVF_CALL_RELEASE] = kvf_hold_release,
            [KVF_CALL_BEAT] = serve_beat,
            [KVF_CALL_EXPECT] = kvf_push_expected,
            [KVF_CALL_WRITTEN] = serve_written,
            [KVF_CALL_WITHDRAW] = serve_withdraw,
            [KVF_CALL_CHECKSUM] = serve_checksum,
            [KVF_CALL_PROBE] = serve_probe,
        },
    .beat = kvf_beat_tick,
    .hide = hide_session,
    .lose = lose,
    .retire = kvf_session_retire,
    .forget = forget,
    .free_session = free_session,
    .welcome = kvf_remote_welcome,
    .refuse = kvf_remote_fail,
    .met = met,
    .unmet = unmet,
    .joined = joined,
    .permit = kvf_permit_flow,
    .left = kvf_reader_left,
    .served = kvf_push_served,
};
