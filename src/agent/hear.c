/*
 * Receives messages from peers, each of which is passed on for the session or the engine that it is about, and the news
 * that a connection broke.
 *
 * All messages after the greeting carry the session's id. A message counts only if it comes from the session's peer: at
 * the server under the key that opened the session, at the client over the connection that was made for it.
 */
#include "agent/hear.h"

#include <stdio.h>

#include "agent/claim.h"
#include "agent/peers.h"
#include "agent/remote.h"

#define SILENCE (2 * KVF_SECOND) /* longer than a busy peer is silent */
/* How often a message's contents are copied: when read, kept, and put together. New pages cost more than that. */
#define COPIES 4u

/* ---- answers to a greeting --------------------------------------------------------------------- */

static kvf_session *greeting_on(kvf_agent *agent, kvf_route route) {
    kvf_session *session = NULL;
    HASH_FIND(hh_route, agent->by_route, &route, sizeof route, session);
    return session && !session->incoming ? session : NULL;
}

static kvf_remote *meeting_on(kvf_agent *agent, kvf_route route) {
    kvf_remote *remote;
    HASH_FIND(hh_route, agent->meetings, &route, sizeof route, remote);
    return remote;
}

/* Another process answers at the peer's endpoint. */
static kvf_status was_replaced(kvf_session *session) {
    session->agent->stats.peers_replaced++;
    session->gone = session->same_host; /* another process has its port */
    return kvf_fail(KVF_E_PEER_LOST, "the peer was restarted");
}

static kvf_status take_welcome(kvf_session *session, const kvf_welcome *welcome) {
    if (strcmp(welcome->engine, session->engine) != 0 || welcome->rank != session->rank)
        return kvf_fail(KVF_E_MISMATCH, "rank %u of engine %s answers where rank %u of %s was expected",
                        welcome->rank, welcome->engine, session->rank, session->engine);
    if (welcome->incarnation != session->incarnation)
        return was_replaced(session);
    if (session->state == KVF_SESSION_OPEN && memcmp(session->id, welcome->session, sizeof session->id) == 0)
        return KVF_OK; /* an answer to a repeated HELLO, or a sign of life */
    kvf_status status = kvf_session_take_card(session, welcome->card.data, welcome->card.size);
    if (status)
        return status;
    kvf_agent *agent = session->agent;
    /* The peer has forgotten our card with its session, and expectations that it is told again need it. */
    const bool forgotten = memcmp(session->id, welcome->session, sizeof session->id) != 0;
    session->join_wanted = session->join_wanted || (session->joined && forgotten && session->sources);
    if (forgotten) {
        kvf_session_stop_reading(session);
        session->seen_highest = 0; /* it does not go on with the numbers of the former session */
    }
    if (session->hh.tbl)
        HASH_DELETE(hh, agent->sessions, session);
    memset(&session->hh, 0, sizeof session->hh);
    memcpy(session->id, welcome->session, sizeof session->id);
    HASH_ADD(hh, agent->sessions, id, sizeof session->id, session);
    if (!session->hh.tbl) { /* no answer would find it: it is greeted again, as one without an id */
        memset(session->id, 0, sizeof session->id);
        session->state = KVF_SESSION_GREETING;
        kvf_session_due(session, session->hello_next);
        return kvf_nomem("a session");
    }
    session->state = KVF_SESSION_OPEN;
    session->openings++;
    kvf_peer_met(session);
    session->joined = session->join_failed = false;
    session->join_staged = session->join_staged && session->join_wanted;
    session->heartbeat_ns = agent->options.heartbeat_ns;
    if (welcome->lease_ns > 0) /* the peer keeps our leases for so long without a sign of life */
        session->heartbeat_ns =
            kvf_min_u64(session->heartbeat_ns, kvf_max_u64(welcome->lease_ns, KVF_SHORTEST_LEASE) / 6);
    session->next_beat = kvf_agent_now(agent) + session->heartbeat_ns;
    kvf_session_due(session, session->sources ? 0 : session->next_beat);
    if (session->sources) /* tickets that waited for it go on */
        kvf_tickets_due(agent, 0);
    kvf_calls_bind(session, forgotten);
    return KVF_OK;
}

/* The same process names another session though no greeting waits for its answer: an earlier one, in a message that is
 * late. */
static bool is_past_welcome(const kvf_session *session, const kvf_welcome *welcome) {
    return !session->hello_first && welcome->incarnation == session->incarnation &&
           memcmp(session->id, welcome->session, sizeof session->id) != 0;
}

static void on_welcome(kvf_agent *agent, kvf_route route, kvf_message *message) {
    if (kvf_wire_read(message)) {
        agent->stats.messages_malformed++;
        return;
    }
    const kvf_welcome *welcome = &message->welcome;
    if (welcome->introduction_count > 0) {
        kvf_remote *remote = meeting_on(agent, route);
        if (remote)
            agent->hooks->welcome(remote, message->digest, welcome);
        else
            agent->stats.messages_stale++;
        return;
    }
    kvf_session *session = greeting_on(agent, route);
    if (!session || welcome->card.size == 0 || is_past_welcome(session, welcome)) {
        agent->stats.messages_stale++;
        return;
    }
    uint64_t now = kvf_agent_now(agent);
    session->last_heard = now;
    kvf_peer_heard(session);
    if (memcmp(message->digest, session->digest, sizeof session->digest) != 0) {
        kvf_session_lose(session, KVF_E_MISMATCH, "the peer caches other cells now");
        return;
    }
    kvf_status status = take_welcome(session, welcome);
    if (status == KVF_E_NOMEM)
        return; /* greeted again */
    session->broken_since = 0;
    session->unreached = KVF_OK;
    if (status)
        kvf_session_lose(session, status, kvf_error_detail());
    else if (session->hello_first)
        kvf_session_clock(session, session->hello_first, now, welcome->clock_ns);
    session->hello_first = 0;
}

/* After a temporary refusal we keep asking; a final one ends the tickets that wait. */
static void on_refused(kvf_agent *agent, kvf_route route, kvf_message *message) {
    kvf_remote *remote = meeting_on(agent, route);
    kvf_session *session = remote ? NULL : greeting_on(agent, route);
    if (!remote && (!session || !kvf_session_greets(session))) {
        agent->stats.messages_stale++;
        return;
    }
    const char *who = remote ? remote->name : session->engine;
    kvf_status status;
    if (message->version != KVF_WIRE_VERSION)
        status = kvf_fail(KVF_E_UNSUPPORTED,
                          "%s speaks version %u of the protocol; this library speaks version %u", who,
                          message->version, KVF_WIRE_VERSION);
    else if (kvf_wire_read(message))
        return;
    else
        status = kvf_fail(message->refused.status ? message->refused.status : KVF_E_AGAIN, "%s %s", who,
                          message->refused.detail);
    /* The process that had a session with us has the facts that our greeting says. */
    if (!remote && session->openings > 0 && status == KVF_E_MISMATCH)
        status = was_replaced(session);
    if (kvf_refused_for_now(status) && remote) {
        (void)snprintf(remote->detail, sizeof remote->detail, "%s", kvf_error_detail());
    } else if (kvf_refused_for_now(status)) {
        kvf_free(session->broken_detail);
        session->broken_detail = kvf_strdup(kvf_error_detail());
    } else if (remote) {
        agent->hooks->refuse(remote, status, kvf_error_detail());
    } else {
        kvf_session_lose(session, status, kvf_error_detail());
    }
}

/* ---- calls and answers ----------------------------------------------------------------------- */

static kvf_session *session_by_id(kvf_agent *agent, const uint8_t *id) {
    kvf_session *session = NULL;
    HASH_FIND(hh, agent->sessions, id, KVF_WIRE_SESSION_BYTES, session);
    return session;
}

/* Whether a message that names a session is from the session's peer. A client speaks over a connection that it made,
 * because our list says who may. */
static bool is_from_peer(const kvf_session *session, const kvf_letter *letter) {
    if (!session->incoming)
        return letter->route == session->route;
    if (letter->called)
        return false;
    return letter->key ? session->keyed && memcmp(letter->key, session->peer_key, KVF_KEY_BYTES) == 0
                       : !session->keyed;
}

static void heard(kvf_session *session, kvf_route route) {
    const uint64_t now = kvf_agent_now(session->agent);
    if (session->asked_ns && now - session->asked_ns >= SILENCE)
        kvf_calls_repeat(session, now); /* lost calls, and those with lost answers, wait no longer */
    session->last_heard = now;
    session->asked_ns = 0;
    session->beat_for_life = false;
    kvf_peer_heard(session);
    session->broken_since = 0;
    session->unreached = KVF_OK;
    session->silent = session->renamed = false;
    if (session->incoming)
        kvf_session_goes_by(session, route);
}

/* The session of a message; NULL: there is none, or it is not the sender's. */
static kvf_session *session_for(kvf_agent *agent, const uint8_t *id, const kvf_letter *letter) {
    kvf_session *session = session_by_id(agent, id);
    if (session && is_from_peer(session, letter))
        return session;
    if (!session) {
        agent->stats.messages_stale++;
        return NULL;
    }
    agent->stats.messages_foreign++;
    kvf_claim_tell(agent, session->engine, session->rank,
                   "messages in its session came from another connection");
    return NULL;
}

static void answer_unknown(kvf_agent *agent, kvf_route route, const kvf_call_body *call) {
    kvf_message answer = {.kind = KVF_MESSAGE_ANSWER,
                          .answer = {.number = call->number,
                                     .kind = call->kind,
                                     .status = KVF_E_PEER_LOST,
                                     .detail = "no such session"}};
    memcpy(answer.answer.session, call->session, sizeof call->session);
    kvf_message_send(agent, route, &answer);
}

/* Whether more calls lie between this one and those that we have seen than we can remember: they would count as seen.
 * Then both sides start over, and all calls still needed are sent again. */
static bool jumps(const kvf_session *session, uint64_t number) {
    return session->seen_highest > 0 && number > session->seen_highest &&
           number - session->seen_highest >= KVF_WINDOW_CALLS;
}

static void on_jump(kvf_session *session, const kvf_letter *letter, const kvf_call_body *call) {
    session->agent->stats.messages_stale++;
    if (!session->incoming) {
        kvf_session_greet_anew(session);
        return;
    }
    answer_unknown(session->agent, letter->route, call);
    kvf_session_retire(session);
}

static void on_call(kvf_agent *agent, const kvf_letter *letter, kvf_message *message) {
    const kvf_call_body *call = &message->call;
    kvf_session *session = session_for(agent, call->session, letter);
    if (!session) {
        answer_unknown(agent, letter->route, call);
        return;
    }
    heard(session, letter->route);
    session->last_used = session->last_heard;
    if (jumps(session, call->number)) {
        on_jump(session, letter, call);
        return;
    }
    bool fresh = kvf_session_fresh(session, call->number);
    /* A consumer's session is incoming at the producer: which calls are allowed depends on which side greeted. */
    bool from_server = call->kind == KVF_CALL_WRITTEN || call->kind == KVF_CALL_PROBE;
    if (from_server == session->incoming) {
        kvf_answer_status(session, call, KVF_E_INVALID, "the other side of the session must make this call");
        return;
    }
    agent->hooks->serve[call->kind](session, call, fresh);
}

static void on_answer(kvf_agent *agent, const kvf_letter *letter, kvf_message *message) {
    const kvf_answer *answer = &message->answer;
    kvf_session *session = session_for(agent, answer->session, letter);
    if (!session)
        return;
    if (answer->status != KVF_E_PEER_LOST) {
        heard(session, letter->route);
        kvf_call_answered(session, answer);
    } else if (session->incoming) {
        if (!session->renamed) /* it learns of the new id with its next sign of life; calls are repeated */
            kvf_session_lose(session, KVF_E_PEER_LOST, "the peer has forgotten the session");
    } else if (session->state == KVF_SESSION_OPEN) {
        kvf_session_greet_anew(session); /* the server has evicted us, or is another process by now */
    }
}

bool kvf_session_has_route(void *context, kvf_route route) {
    const kvf_agent *agent = context;
    kvf_session *known = NULL;
    HASH_FIND(hh_route, agent->by_route, &route, sizeof route, known);
    return known != NULL;
}

/* A sender without a session here has no reason for long messages. */
static bool is_too_large(kvf_agent *agent, const kvf_letter *letter) {
    return letter->bytes > KVF_WIRE_STRANGER_BYTES && !letter->called &&
           !kvf_session_has_route(agent, letter->route);
}

/* We never greeted a peer that connected to us. */
static bool is_unasked(kvf_agent *agent, const kvf_letter *letter) {
    agent->stats.messages_foreign += !letter->called;
    return !letter->called;
}

/* Whom we called is no client, and need not be on our list. */
static bool is_no_client(kvf_agent *agent, const kvf_letter *letter) {
    agent->stats.messages_foreign += letter->called;
    return letter->called;
}

/* Peers ask for something by these. */
static bool asks(kvf_message_kind kind) {
    return kind == KVF_MESSAGE_HELLO || kind == KVF_MESSAGE_CALL || kind == KVF_MESSAGE_COMMAND;
}

static void take_message(kvf_agent *agent, const kvf_letter *letter) {
    kvf_message message;
    if (is_too_large(agent, letter) || kvf_wire_open((kvf_bytes){letter->data, letter->bytes}, &message)) {
        agent->stats.messages_malformed++;
        return;
    }
    if (agent->stopping && asks(message.kind))
        return; /* it is about to notice that we are gone */
    switch (message.kind) {
    case KVF_MESSAGE_HELLO:
        if (!is_no_client(agent, letter))
            agent->hooks->greeted(agent, letter, &message);
        break;
    case KVF_MESSAGE_WELCOME:
        if (!is_unasked(agent, letter))
            on_welcome(agent, letter->route, &message);
        break;
    case KVF_MESSAGE_REFUSED:
        if (!is_unasked(agent, letter))
            on_refused(agent, letter->route, &message);
        break;
    case KVF_MESSAGE_CALL:
    case KVF_MESSAGE_ANSWER:
        if (kvf_wire_read(&message))
            agent->stats.messages_malformed++;
        else if (message.kind == KVF_MESSAGE_CALL)
            on_call(agent, letter, &message);
        else
            on_answer(agent, letter, &message);
        break;
    case KVF_MESSAGE_COMMAND:
        if (is_no_client(agent, letter))
            break;
        if (kvf_wire_read(&message))
            agent->stats.messages_malformed++;
        else
            agent->hooks->commanded(agent, letter, &message.command);
        break;
    case KVF_MESSAGE_REPLY: /* agents give no commands */
        if (!is_unasked(agent, letter))
            agent->stats.messages_stale++;
        break;
    }
    agent->work += COPIES * kvf_message_kept(&message);
    kvf_message_free(&message);
}

void kvf_on_message(void *context, const kvf_letter *letter) {
    kvf_agent *agent = context;
    agent->stats.messages_received++;
    agent->work = letter->bytes;
    take_message(agent, letter);
    if (letter->work)
        *letter->work = agent->work;
}

/* ---- connections that break -------------------------------------------------------------------- */

/* A try to connect to the contact of an engine, or to a rank, has failed: logs the reason, unless it is `known`. */
static void say_unreached(kvf_agent *agent, const char *engine, const kvf_session *session, const char *known,
                          const char *detail) {
    if (!kvf_agent_logs(agent, KVF_LOG_INFO) || (known && strcmp(known, detail) == 0))
        return;
    const kvf_log_level level = session ? kvf_peer_level_unreached(session) : KVF_LOG_INFO;
    kvf_text text = {0};
    kvf_text_add(&text, "%s", engine);
    if (session)
        kvf_text_add(&text, " rank %u", session->rank);
    kvf_text_add(&text, ": %s; trying again", detail);
    if (!text.failed)
        kvf_agent_log(agent, level, text.data);
    kvf_text_free(&text);
}

static bool is_unreached(kvf_status status) {
    return status == KVF_E_TIMEOUT || status == KVF_E_IO;
}

void kvf_on_broken(void *context, kvf_route route, kvf_status status, const char *detail) {
    kvf_agent *agent = context;
    bool for_good = status == KVF_E_PERMISSION || status == KVF_E_PARSE;
    kvf_remote *remote = meeting_on(agent, route);
    if (remote && is_unreached(status))
        say_unreached(agent, remote->name, NULL, remote->detail, detail);
    if (remote && for_good)
        agent->hooks->refuse(remote, status, detail);
    else if (remote)
        (void)snprintf(remote->detail, sizeof remote->detail, "%s", detail);
    kvf_session *session = greeting_on(agent, route);
    if (!session)
        return;
    if (is_unreached(status)) {
        say_unreached(agent, session->engine, session, session->broken_detail, detail);
        if (session->broken_since && session->unreached != status)
            kvf_session_due(session, 0); /* it may have less time now */
        session->unreached = status;
    }
    char *words = kvf_strdup(detail);
    if (words) {
        kvf_free(session->broken_detail);
        session->broken_detail = words;
    }
    if (for_good) {
        kvf_session_lose(session, status, detail);
    } else if (session->broken_since && status == KVF_E_IO && session->same_host) {
        /* On one host, a port that no longer takes connections means that its process has ended. */
        session->gone = true;
        kvf_session_lose(session, KVF_E_PEER_LOST, "the peer's process is gone");
    } else if (session->openings > 0 && !session->broken_since && status == KVF_E_PEER_LOST) {
        /* It may come back, or be another process by now: another HELLO finds out. */
        session->broken_since = kvf_agent_now(agent);
        session->hello_pause = session->hello_first = 0;
        kvf_session_hello(session, session->broken_since);
        kvf_session_due(session, session->broken_since + agent->options.peer_timeout_ns);
    }
}
