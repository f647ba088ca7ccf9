/*
 * Joining: a client sends its card and its shard to a server, which can then write to it, and whose stage can then open
 * flows to the client's.
 */
#include <stdio.h>

#include "agent/budget.h"
#include "agent/claim.h"
#include "agent/hold.h"
#include "agent/push.h"
#include "agent/push_shape.h"
#include "model/model.h"
#include "shard/shard.h"

/* Looking at an expectation takes as long as copying so many bytes. */
#define FLOW_WORK 512u

/* A peer joins again when its regions have changed. Our writes to the older ones must have ended by then. */
static kvf_status check_join(const kvf_session *session, const kvf_call_body *call) {
    if (call->generation <= session->joined_generation)
        return kvf_fail(KVF_E_EXISTS,
                        "JOIN: generation is %llu; this peer has joined with %llu already; allowed: higher "
                        "generations",
                        (unsigned long long)call->generation, (unsigned long long)session->joined_generation);
    const kvf_flow *flow;
    DL_FOREACH2(session->flows, flow, session_next) {
        if (flow->push && !flow->over)
            return kvf_fail(KVF_E_AGAIN, "JOIN: writing under generation %llu has not ended yet",
                            (unsigned long long)session->joined_generation);
    }
    return KVF_OK;
}

static kvf_status join(kvf_session *session, const kvf_call_body *call) {
    kvf_agent *agent = session->agent;
    if (call->card.size == 0)
        return kvf_fail(KVF_E_PARSE, "JOIN: card is empty");
    kvf_introduction intro;
    void *storage = NULL;
    kvf_push_shape *shape = NULL;
    kvf_status status = kvf_wire_decode_introduction(call->introduction, &intro, &storage);
    if (!status && (strcmp(intro.engine, session->engine) != 0 || intro.rank != session->rank ||
                    intro.incarnation != session->incarnation))
        status = kvf_fail(KVF_E_MISMATCH, "the introduction is not of the rank that greeted");
    if (!status && memcmp(intro.digest, agent->digest, sizeof agent->digest) != 0)
        status = kvf_fail(KVF_E_MISMATCH, "the introduction is of a rank that caches other cells");
    if (!status)
        status = kvf_push_shape_use(agent, &intro, &shape);
    kvf_free(storage);
    if (status)
        return status;
    uint64_t bytes = call->card.size + kvf_shard_memory_bytes(shape->shard);
    status = kvf_budget_take(session, bytes);
    if (!status) {
        status = kvf_session_take_card(session, call->card.data, call->card.size);
        if (status)
            kvf_budget_give(session, bytes);
    }
    if (status) {
        kvf_push_shape_leave(shape);
        return status;
    }
    kvf_budget_give(session, session->joined_bytes);
    session->joined_bytes = bytes;
    if (shape != session->shape) {
        kvf_budget_give(session, session->plan_bytes);
        session->plan_bytes = 0;
    }
    kvf_push_shape_leave(session->shape);
    session->shape = shape;
    session->joined_generation = call->generation;
    return KVF_OK;
}

/* Cancels what moves for a client's earlier expectations and pulls. Returns whether it was being written to. */
static bool cancel_earlier(const kvf_session *session) {
    const kvf_flow *flow;
    const kvf_reader *reader;
    bool writes = false;
    DL_FOREACH2(session->flows, flow, session_next) {
        kvf_carry_cancel(&flow->carry);
        writes = writes || kvf_carry_is_there(&flow->carry);
    }
    DL_FOREACH2(session->readers, reader, session_next) {
        kvf_stage_revoke(session->agent->stage, reader->generation);
    }
    return writes;
}

/*
 * A client that sends us its card again in a new call had lost us, unless it says otherwise (KVF_JOIN_ADDS_STAGE): it
 * has dropped its earlier expectations and pulls. What still moves for them is stuck in a connection that may hang for
 * any time, and so may be the last operations of flows that have ended. If nothing else moves, the client gets a new
 * connection. Otherwise perhaps it had lost something else, or only not used us for long, and flows of other sessions go
 * on by this one. It is left later if writes for the earlier expectations do hang in it (kvf_flow_pump()).
 */
static void begin_anew(kvf_session *session) {
    kvf_flow *flow;
    if (session->peer && !session->joins_again) {
        const bool writes = cancel_earlier(session);
        const bool shared = kvf_session_goes_on(session);
        DL_FOREACH2(session->flows, flow, session_next) {
            if (kvf_carry_is_there(&flow->carry))
                kvf_flow_stop(flow, shared ? KVF_E_CANCELLED : KVF_E_PEER_LOST,
                              "the consumer has met this rank again");
        }
        session->may_hang = writes && shared;
        if (!shared)
            kvf_session_disconnect(session);
    }
    session->joins_again = false;
}

static void refuse_join(kvf_session *session, const kvf_call_body *call, kvf_status status) {
    kvf_answer_status(session, call, status == KVF_E_NOMEM ? KVF_E_AGAIN : status, kvf_error_detail());
}

/* Each side's stage must know the other's before either opens a flow; without a stage, everything goes directly. */
static void answer_join(kvf_session *session, const kvf_call_body *call) {
    const bool staged = call->stage != KVF_JOIN_UNSTAGED;
    const kvf_status status = staged && session->agent->stage ? kvf_session_stage(session) : KVF_OK;
    session->takes_flows = staged && status != KVF_E_NOMEM;
    if (status == KVF_E_NOMEM) {
        refuse_join(session, call, status);
        return;
    }
    kvf_answer answer = {.stage = staged && kvf_session_takes_flows(session)};
    kvf_answer_send(session, call, &answer);
}

void kvf_join_answer(kvf_session *session, const kvf_call_body *call, bool fresh) {
    kvf_status status = KVF_OK;
    session->agent->work += (uint64_t)session->flow_count * FLOW_WORK;
    bool same = session->shape && call->generation == session->joined_generation &&
                call->card.size == session->card_bytes &&
                memcmp(call->card.data, session->card, session->card_bytes) == 0;
    if (session->shape && call->number < session->joined_by) {
        kvf_answer_status(session, call, KVF_E_EXISTS, "JOIN: a later one has come before this one");
        return;
    }
    if (same) { /* not fresh if it did not get the answer, or was told to ask again */
        const bool anew = fresh && call->stage != KVF_JOIN_ADDS_STAGE;
        session->joined_by = call->number;
        if (anew)
            begin_anew(session);
        answer_join(session, call);
        if (!anew)
            kvf_flows_pump(session); /* flows that wait for the join */
        return;
    }
    if (call->generation == 0)
        status = kvf_fail(KVF_E_RANGE, "JOIN: generation is 0; allowed: 1 and more");
    else if (session->shape)
        status = check_join(session, call);
    if (status == KVF_E_EXISTS)
        kvf_claim_tell(session->agent, session->engine, session->rank, kvf_error_detail());
    if (!status)
        status = join(session, call);
    if (status) {
        refuse_join(session, call, status);
        return;
    }
    session->joined_by = call->number;
    answer_join(session, call);
    kvf_flows_pump(session);
}

static void on_joined(kvf_call *call, kvf_status status, const kvf_answer *answer) {
    kvf_session *session = call->session;
    session->joining = false;
    session->joined = !status;
    session->join_failed = status;
    session->takes_flows = !status && answer->stage;
    if (status == KVF_E_PEER_LOST)
        return;
    session->agent->due = 0;                                 /* for a join that waits for this one */
    if (!status || !kvf_session_is_to_be_written(session)) { /* direct reads need no card of ours */
        session->agent->hooks->joined(session);
        session->join_failed = status && status != KVF_E_TIMEOUT; /* after a time-out it is tried again */
        return;
    }
    char detail[KVF_DETAIL_BYTES];
    (void)snprintf(detail, sizeof detail, "the producer refused JOIN: %s", kvf_error_detail());
    kvf_session_lose(session, status, detail);
}

static kvf_status send_join(kvf_session *session) {
    kvf_agent *agent = session->agent;
    kvf_wire_buffer own =
        session->introduction.size ? session->introduction : agent->introductions[agent->rank];
    kvf_call_body body = {.introduction = {own.data, own.size},
                          .card = {agent->card, agent->card_bytes},
                          .generation = agent->regions_generation};
    if (session->join_staged && kvf_session_takes_flows(session))
        body.stage = session->joined ? KVF_JOIN_ADDS_STAGE : KVF_JOIN_STAGED;
    return kvf_call_start(session, KVF_CALL_JOIN, &body, kvf_agent_now(agent) + agent->options.lease_ns,
                          false, on_joined, NULL, NULL);
}

kvf_status kvf_session_join_now(kvf_session *session) {
    session->join_wanted = false;
    /* The peer may open flows as soon as it gets this message. */
    kvf_status status = session->join_staged ? kvf_session_stage(session) : KVF_OK;
    if (status != KVF_E_NOMEM) /* on other failures to add it to our stage, all goes directly */
        status = send_join(session);
    session->joining = !status;
    return status;
}

kvf_status kvf_session_join(kvf_session *session, bool staged) {
    kvf_agent *agent = session->agent;
    const bool known = session->joined || session->joining || session->join_wanted,
               was_staged = session->join_staged;
    if (known && (was_staged || !staged))
        return KVF_OK;
    session->join_staged = was_staged || staged;
    if (session->join_wanted || session->joining || !agent->card ||
        (session->join_staged && !kvf_work_is_ours(agent))) {
        session->join_wanted = true; /* sent in a tick, when the join before is answered */
        agent->due = 0;
        return KVF_OK;
    }
    kvf_status status = kvf_session_join_now(session);
    if (status)
        session->join_staged = was_staged;
    return status;
}

void kvf_session_unjoin(kvf_session *session) {
    kvf_call *call, *next;
    session->join_wanted = session->join_wanted || session->joining;
    HASH_ITER(hh, session->calls, call, next) {
        if (call->kind == KVF_CALL_JOIN)
            kvf_call_drop(call);
    }
    session->joined = session->joining = session->join_failed = false;
    session->join_staged = session->join_staged && session->join_wanted;
}
