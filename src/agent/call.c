/*
 * Calls: messages that are repeated, with growing pauses, until they are answered or their time is over. A JOIN that is
 * answered "not now" counts as not answered: the peer considers it anew each time it comes.
 */
#include "agent/session.h"

#define FIRST_PAUSE (100 * KVF_MILLISECOND)
#define LONGEST_PAUSE (2 * KVF_SECOND)

static kvf_status transmit(const kvf_call *call) {
    const kvf_session *session = call->session;
    return kvf_link_send(session->agent->link, session->route, call->bytes.data, call->bytes.size);
}

/* After an outage, what a connection brought before its end may be heard after the first messages of the next one: then
 * the session goes by a connection that has ended, and the former route is the good one. */
static void send_call(kvf_call *call, uint64_t now) {
    kvf_session *session = call->session;
    if (transmit(call) == KVF_E_NOT_FOUND && session->incoming && session->former_route) {
        kvf_session_goes_by(session, session->former_route);
        (void)transmit(call);
    }
    session->agent->stats.messages_sent++;
    if (!session->asked_ns)
        session->asked_ns = now;
    if (call->first_sent)
        session->agent->stats.messages_repeated++;
    else
        call->first_sent = now;
    call->next_send = now + call->pause;
    call->pause = kvf_min_u64(2 * call->pause, LONGEST_PAUSE);
    if (!call->once)
        kvf_session_due(session, call->next_send);
}

kvf_status kvf_call_start(kvf_session *session, kvf_call_kind kind, kvf_call_body *body, uint64_t deadline,
                          bool once, kvf_call_done done, void *context, kvf_call **out) {
    if (session->state == KVF_SESSION_LOST)
        return kvf_fail(KVF_E_PEER_LOST, "%s rank %u is gone", session->engine, session->rank);
    kvf_call *call = kvf_alloc0(1, sizeof *call);
    if (!call)
        return kvf_nomem("a call");
    *call = (kvf_call){.number = session->next_number + 1,
                       .session = session,
                       .kind = kind,
                       .once = once,
                       .pause = FIRST_PAUSE,
                       .deadline = deadline,
                       .done = done,
                       .context = context};
    body->number = call->number;
    body->kind = kind;
    memcpy(body->session, session->id, sizeof body->session);
    kvf_message message = {.kind = KVF_MESSAGE_CALL, .call = *body};
    kvf_status status = kvf_wire_encode(&message, &call->bytes);
    if (!status) {
        HASH_ADD(hh, session->calls, number, sizeof call->number, call);
        if (!call->hh.tbl)
            status = kvf_nomem("a call");
    }
    if (status) {
        kvf_wire_buffer_free(&call->bytes);
        kvf_free(call);
        return status;
    }
    session->next_number = call->number;
    session->last_used = kvf_agent_now(session->agent);
    kvf_session_due(session, deadline);
    if (session->state == KVF_SESSION_OPEN)
        send_call(call, session->last_used);
    if (out)
        *out = call;
    return KVF_OK;
}

static void unlist(kvf_call *call) {
    kvf_session *session = call->session;
    if (session->next_call == call)
        session->next_call = call->hh.next;
    HASH_DEL(session->calls, call);
}

static void release(kvf_call *call) {
    kvf_wire_buffer_free(&call->bytes);
    kvf_free(call->put_off);
    kvf_free(call);
}

static void free_call(kvf_call *call) {
    unlist(call);
    release(call);
}

void kvf_call_drop(kvf_call *call) {
    if (call)
        free_call(call);
}

/* The callback may drop other calls of the session, or end the session's user. */
static void end_call(kvf_call *call, kvf_status status, const kvf_answer *answer) {
    unlist(call);
    if (call->done)
        call->done(call, status, answer);
    release(call);
}

static void put_off(kvf_call *call, const char *why) {
    kvf_free(call->put_off);
    call->put_off = kvf_strdup(why);
}

void kvf_call_answered(kvf_session *session, const kvf_answer *answer) {
    kvf_call *call = NULL;
    HASH_FIND(hh, session->calls, &answer->number, sizeof answer->number, call);
    if (!call || call->kind != answer->kind) {
        session->agent->stats.messages_stale++;
        return;
    }
    if (call->kind == KVF_CALL_JOIN && answer->status == KVF_E_AGAIN) {
        put_off(call, answer->detail);
        return;
    }
    if (answer->status)
        (void)kvf_fail(answer->status, "%s rank %u: %s", session->engine, session->rank, answer->detail);
    end_call(call, answer->status, answer);
}

/* Gives a call the next number. Without memory for its bytes it keeps the one it has. */
static void renumber(kvf_call *call) {
    kvf_session *session = call->session;
    kvf_message message;
    kvf_wire_buffer bytes = {0};
    if (kvf_wire_open((kvf_bytes){call->bytes.data, call->bytes.size}, &message))
        return;
    kvf_status status = kvf_wire_read(&message);
    if (call->kind == KVF_CALL_RELEASE && !message.call.earlier)
        message.call.earlier = call->number; /* it ends nothing that began after it */
    message.call.number = session->next_number + 1;
    if (!status)
        status = kvf_wire_encode(&message, &bytes);
    kvf_message_free(&message);
    if (status)
        return;
    kvf_wire_buffer_free(&call->bytes);
    call->bytes = bytes;
    unlist(call);
    call->number = ++session->next_number;
    HASH_ADD(hh, session->calls, number, sizeof call->number, call);
    if (call->hh.tbl)
        return;
    if (call->done)
        call->done(call, kvf_nomem("a call"), NULL);
    release(call);
}

/* A call may wait while thousands of others are made and answered. In a session whose peer has seen none of them the next
 * number would look like a jump (hear.c), so the calls before such a gap get new numbers, behind all others. */
static void close_gaps(kvf_session *session) {
    kvf_call *call, *next;
    uint32_t count = 0, moved = 0;
    HASH_ITER(hh, session->calls, call, next) {
        count++;
        if ((next ? next->number : session->next_number + 1) - call->number >= KVF_WINDOW_CALLS)
            moved = count;
    }
    for (call = session->calls; call && moved > 0; call = session->next_call, moved--) {
        session->next_call = call->hh.next;
        renumber(call);
    }
}

/* Calls made before the session was open, or in one that the peer has forgotten, get the session's id. */
void kvf_calls_bind(kvf_session *session, bool anew) {
    uint64_t now = kvf_agent_now(session->agent);
    kvf_call *call, *next;
    if (anew)
        close_gaps(session);
    HASH_ITER(hh, session->calls, call, next) {
        kvf_wire_set_session(&call->bytes, session->id);
        call->pause = FIRST_PAUSE;
        send_call(call, now);
    }
}

bool kvf_calls_owed(const kvf_session *session, bool unsent) {
    const kvf_call *call;
    for (call = session->calls; call; call = call->hh.next)
        if ((call->kind == KVF_CALL_RELEASE || call->kind == KVF_CALL_WITHDRAW ||
             call->kind == KVF_CALL_BEAT) &&
            !(unsent && call->first_sent))
            return true;
    return false;
}

void kvf_calls_repeat(kvf_session *session, uint64_t now) {
    kvf_call *call, *next;
    HASH_ITER(hh, session->calls, call, next) {
        call->next_send = now;
    }
    kvf_agent_due(session->agent, now);
}

void kvf_calls_end(kvf_session *session, kvf_status status) {
    while (session->calls) {
        (void)kvf_fail(status, "%s rank %u is gone", session->engine, session->rank);
        end_call(session->calls, status, NULL);
    }
}

static void tick_call(kvf_call *call, uint64_t now) {
    kvf_session *session = call->session;
    if (now >= call->deadline) {
        (void)kvf_fail(KVF_E_TIMEOUT, "%s rank %u %s%s", session->engine, session->rank,
                       call->put_off ? "was not ready in time: " : "did not answer",
                       call->put_off ? call->put_off : "");
        end_call(call, KVF_E_TIMEOUT, NULL);
        return;
    }
    kvf_session_due(session, call->deadline);
    if (session->state != KVF_SESSION_OPEN || (call->once && call->first_sent))
        return;
    if (now >= call->next_send)
        send_call(call, now);
    else
        kvf_session_due(session, call->next_send);
}

/* Ending a call may end or begin others: unlist() makes sure that the walk goes on with one that still exists. */
void kvf_calls_tick(kvf_session *session, uint64_t now) {
    for (kvf_call *call = session->calls; call; call = session->next_call) {
        session->next_call = call->hh.next;
        tick_call(call, now);
    }
}

void kvf_answer_send(kvf_session *session, const kvf_call_body *call, kvf_answer *answer) {
    memcpy(answer->session, session->id, sizeof answer->session);
    answer->number = call->number;
    answer->kind = call->kind;
    if (call->kind == KVF_CALL_WRITTEN)
        session->written_ns = kvf_agent_now(session->agent);
    if (!answer->detail)
        answer->detail = "";
    kvf_message message = {.kind = KVF_MESSAGE_ANSWER, .answer = *answer};
    kvf_wire_buffer bytes;
    kvf_status status = kvf_wire_encode(&message, &bytes);
    if (status && status != KVF_E_NOMEM) { /* too large for a message: answers that instead */
        message.answer = (kvf_answer){.number = call->number,
                                      .kind = call->kind,
                                      .status = status,
                                      .detail = "the answer cannot be sent"};
        memcpy(message.answer.session, session->id, sizeof message.answer.session);
        status = kvf_wire_encode(&message, &bytes);
    }
    if (status)
        return; /* the caller asks again */
    (void)kvf_link_send(session->agent->link, session->route, bytes.data, bytes.size);
    session->agent->stats.messages_sent++;
    session->agent->work += bytes.size;
    kvf_wire_buffer_free(&bytes);
}

void kvf_answer_status(kvf_session *session, const kvf_call_body *call, kvf_status status,
                       const char *detail) {
    kvf_answer answer = {.status = status, .detail = detail};
    kvf_answer_send(session, call, &answer);
}
