/*
 * Sessions: greeting a rank of another engine, and being greeted; who a message is from.
 *
 * The client says HELLO until it is answered. A server keeps one session for each process that greets it
 * (engine, incarnation, rank), so a HELLO repeated changes nothing. The session's id, chosen by the server,
 * is in all messages after that: it finds the session when the connection below it breaks and comes back.
 */
#include <sodium.h>
#include <stdio.h>

#include "agent/peers.h"
#include "agent/remote.h"
#include "link/link_endpoint.h"

#define FIRST_PAUSE (50 * KVF_MILLISECOND)
#define LONGEST_PAUSE KVF_SECOND
/* How far two clocks may run apart, relative to the time since they were compared. */
#define CLOCK_DRIFT_DIVISOR 2048

/* ---- making and freeing ---------------------------------------------------------------------- */

static kvf_session *make_session(kvf_agent *agent, const char *engine, uint32_t rank) {
    kvf_session *session = kvf_alloc0(1, sizeof *session);
    if (!session)
        return NULL;
    session->agent = agent;
    session->engine = kvf_strdup(engine);
    session->rank = rank;
    session->clock_error = UINT64_MAX;
    /* The peer may still know the session we have lost, and which numbers it has seen in it. */
    session->next_number = agent->last_number;
    session->last_used = session->last_heard = kvf_agent_now(agent);
    session->since_ns = kvf_wall_clock();
    if (!session->engine) {
        kvf_free(session);
        return NULL;
    }
    return session;
}

/* Takes a session out of every table, so that nothing finds it any more. */
static void hide(kvf_session *session, bool lost) {
    kvf_agent *agent = session->agent;
    agent->last_number = kvf_max_u64(agent->last_number, session->next_number);
    if (session->hh.tbl)
        HASH_DELETE(hh, agent->sessions, session);
    if (session->hh_client.tbl)
        HASH_DELETE(hh_client, agent->clients, session);
    memset(&session->hh, 0, sizeof session->hh);
    memset(&session->hh_client, 0, sizeof session->hh_client);
    agent->hooks->hide(session, lost);
}

void kvf_session_free(kvf_session *session) {
    if (!session)
        return;
    kvf_agent *agent = session->agent;
    hide(session, false);
    kvf_peer_close(session->peer);
    session->peer = NULL;
    while (session->calls)
        kvf_call_drop(session->calls);
    agent->hooks->free_session(session);
    if (session->prev)
        DL_DELETE(agent->all_sessions, session);
    if (!session->incoming && session->route)
        kvf_link_disconnect(agent->link, session->route);
    kvf_free(session->key);
    kvf_free(session->card);
    kvf_free(session->broken_detail);
    kvf_free(session->failure);
    kvf_free(session->way_told);
    kvf_free(session->engine);
    kvf_wire_buffer_free(&session->introduction);
    kvf_free(session);
}

kvf_status kvf_session_to(kvf_remote *remote, uint32_t rank, kvf_session **out) {
    kvf_remote_rank *there = &remote->ranks[rank];
    if (there->session) {
        *out = there->session;
        return KVF_OK;
    }
    kvf_agent *agent = remote->agent;
    kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) { /* an engine met anew may have ranks we know */
        if (!session->incoming && session->state != KVF_SESSION_LOST && session->rank == rank &&
            session->incarnation == there->incarnation && strcmp(session->engine, remote->name) == 0) {
            *out = there->session = session;
            return KVF_OK;
        }
    }
    session = make_session(agent, remote->name, rank);
    if (!session)
        return kvf_nomem("a session");
    session->state = KVF_SESSION_GREETING;
    session->rank_count = remote->rank_count;
    session->incarnation = there->incarnation;
    memcpy(session->digest, remote->digest, sizeof session->digest);
    if (remote->introduction.size) {
        session->introduction.data = kvf_copy(remote->introduction.data, remote->introduction.size, 1);
        session->introduction.size = remote->introduction.size;
    }
    if (remote->introduction.size && !session->introduction.data) {
        kvf_session_free(session);
        return kvf_nomem("a session");
    }
    kvf_endpoint endpoint;
    session->same_host = kvf_endpoint_to_connect(there->endpoint, &endpoint) == KVF_OK && endpoint.loopback;
    kvf_status status = kvf_link_connect(agent->link, there->endpoint, there->public_key, &session->route);
    if (status) {
        kvf_session_free(session);
        return status;
    }
    there->session = session;
    DL_APPEND(agent->all_sessions, session);
    kvf_session_hello(session, kvf_agent_now(agent));
    *out = session;
    return KVF_OK;
}

kvf_status kvf_session_peer(kvf_session *session, kvf_peer **out) {
    KVF_ASSERT(kvf_work_is_ours(session->agent));
    if (!session->peer) {
        kvf_status status = kvf_transport_connect(session->agent->transport, session->card,
                                                  session->card_bytes, &session->peer);
        if (status)
            return kvf_fail_in(status, "%s rank %u: ", session->engine, session->rank);
        kvf_peer_served(session);
    }
    *out = session->peer;
    return KVF_OK;
}

/* ---- greeting -------------------------------------------------------------------------------- */

static void send_message(kvf_agent *agent, kvf_route route, const kvf_message *message) {
    kvf_wire_buffer bytes;
    if (kvf_wire_encode(message, &bytes))
        return; /* as if it was lost */
    (void)kvf_link_send(agent->link, route, bytes.data, bytes.size);
    agent->stats.messages_sent++;
    kvf_wire_buffer_free(&bytes);
}

void kvf_hello_send(kvf_agent *agent, kvf_route route, const uint8_t *digest, bool wants_ranks,
                    bool wants_card) {
    kvf_message message = {.kind = KVF_MESSAGE_HELLO,
                           .hello = {.engine = agent->name,
                                     .incarnation = agent->incarnation,
                                     .rank = agent->rank,
                                     .rank_count = agent->rank_count,
                                     .wants_ranks = wants_ranks,
                                     .wants_card = wants_card,
                                     .clock_ns = kvf_agent_now(agent)}};
    memcpy(message.digest, digest, sizeof message.digest);
    send_message(agent, route, &message);
}

void kvf_session_hello(kvf_session *session, uint64_t now) {
    if (!session->hello_first)
        session->hello_first = now;
    session->hello_sent = now;
    session->hello_pause =
        session->hello_pause ? kvf_min_u64(2 * session->hello_pause, LONGEST_PAUSE) : FIRST_PAUSE;
    session->hello_next = now + session->hello_pause;
    kvf_agent_due(session->agent, session->hello_next);
    kvf_hello_send(session->agent, session->route, session->digest, false, true);
}

static void refuse(kvf_agent *agent, kvf_route route, kvf_status status, const char *detail) {
    kvf_message message = {.kind = KVF_MESSAGE_REFUSED, .refused = {.status = status, .detail = detail}};
    memcpy(message.digest, agent->digest, sizeof message.digest);
    send_message(agent, route, &message);
    if (!kvf_refused_for_now(status))
        agent->stats.peers_refused++;
}

/* A client whose digest is another is told our facts. */
static void answer_ranks(kvf_agent *agent, kvf_route route, const uint8_t *digest) {
    if (!agent->introductions || agent->introduction_count < agent->rank_count) {
        char words[96];
        (void)snprintf(words, sizeof words, "knows %u of its engine's %u ranks so far",
                       agent->introduction_count, agent->rank_count);
        refuse(agent, route, KVF_E_AGAIN, words);
        return;
    }
    bool same = memcmp(digest, agent->digest, sizeof agent->digest) == 0;
    kvf_bytes *list = kvf_alloc(agent->rank_count, sizeof *list);
    if (!list)
        return;
    for (uint32_t i = 0; i < agent->rank_count; i++)
        list[i] = (kvf_bytes){agent->introductions[i].data, agent->introductions[i].size};
    kvf_message message = {.kind = KVF_MESSAGE_WELCOME,
                           .welcome = {.engine = agent->name,
                                       .incarnation = agent->incarnation,
                                       .rank = agent->engine ? agent->rank : KVF_NO_RANK,
                                       .rank_count = agent->rank_count,
                                       .clock_ns = kvf_agent_now(agent),
                                       .introductions = list,
                                       .introduction_count = agent->rank_count,
                                       .facts = same ? "" : agent->facts}};
    memcpy(message.digest, agent->digest, sizeof message.digest);
    send_message(agent, route, &message);
    kvf_free(list);
}

static kvf_status make_key(const kvf_hello *hello, uint8_t **key, size_t *bytes) {
    size_t name = strlen(hello->engine);
    *bytes = sizeof hello->incarnation + sizeof hello->rank + name;
    *key = kvf_alloc(*bytes, 1);
    if (!*key)
        return kvf_nomem("a session");
    memcpy(*key, &hello->incarnation, sizeof hello->incarnation);
    memcpy(*key + sizeof hello->incarnation, &hello->rank, sizeof hello->rank);
    memcpy(*key + sizeof hello->incarnation + sizeof hello->rank, hello->engine, name);
    return KVF_OK;
}

/* The session of a client that greets: the one it has, or a new one. */
static kvf_status session_of(kvf_agent *agent, const kvf_hello *hello, kvf_session **out) {
    uint8_t *key;
    size_t bytes;
    kvf_status status = make_key(hello, &key, &bytes);
    if (status)
        return status;
    kvf_session *session = NULL;
    HASH_FIND(hh_client, agent->clients, key, bytes, session);
    if (session) {
        kvf_free(key);
        *out = session;
        return KVF_OK;
    }
    if (HASH_CNT(hh_client, agent->clients) >= agent->options.max_peers) {
        kvf_free(key);
        return kvf_fail(KVF_E_LIMIT, "has %u peers, the most it takes", agent->options.max_peers);
    }
    session = make_session(agent, hello->engine, hello->rank);
    if (!session) {
        kvf_free(key);
        return kvf_nomem("a session");
    }
    session->incoming = true;
    session->state = KVF_SESSION_OPEN;
    session->incarnation = hello->incarnation;
    session->rank_count = hello->rank_count;
    session->key = key;
    randombytes_buf(session->id, sizeof session->id);
    HASH_ADD_KEYPTR(hh_client, agent->clients, session->key, bytes, session);
    if (session->hh_client.tbl)
        HASH_ADD(hh, agent->sessions, id, sizeof session->id, session);
    if (!session->hh_client.tbl || !session->hh.tbl) {
        kvf_session_free(session);
        return kvf_nomem("a session");
    }
    DL_APPEND(agent->all_sessions, session);
    kvf_peer_met(session);
    kvf_agent_due(agent, session->last_used + agent->options.idle_ns);
    *out = session;
    return KVF_OK;
}

static void on_hello(kvf_agent *agent, kvf_route route, kvf_message *message) {
    if (message->version != KVF_WIRE_VERSION) {
        char words[96];
        (void)snprintf(words, sizeof words, "speaks version %u of the protocol, not version %u",
                       KVF_WIRE_VERSION, message->version);
        refuse(agent, route, KVF_E_UNSUPPORTED, words);
        return;
    }
    if (!agent->name) {
        refuse(agent, route, KVF_E_AGAIN, "a directory that knows no engine yet");
        return;
    }
    if (kvf_wire_read(message)) {
        agent->stats.messages_malformed++;
        return;
    }
    const kvf_hello *hello = &message->hello;
    if (hello->wants_ranks) {
        answer_ranks(agent, route, message->digest);
        return;
    }
    if (memcmp(message->digest, agent->digest, sizeof agent->digest) != 0) {
        refuse(agent, route, KVF_E_MISMATCH, "has other facts than those of the greeting");
        return;
    }
    if (!agent->card) {
        refuse(agent, route, KVF_E_AGAIN, "has no memory registered yet");
        return;
    }
    kvf_session *session = NULL;
    kvf_status status = session_of(agent, hello, &session);
    if (status) {
        refuse(agent, route, status == KVF_E_LIMIT ? status : KVF_E_AGAIN, kvf_error_detail());
        return;
    }
    session->route = route;
    session->last_heard = kvf_agent_now(agent);
    kvf_message answer = {.kind = KVF_MESSAGE_WELCOME,
                          .welcome = {.engine = agent->name,
                                      .incarnation = agent->incarnation,
                                      .rank = agent->rank,
                                      .rank_count = agent->rank_count,
                                      .clock_ns = session->last_heard,
                                      .card = {agent->card, agent->card_bytes}}};
    memcpy(answer.welcome.session, session->id, sizeof session->id);
    memcpy(answer.digest, agent->digest, sizeof answer.digest);
    send_message(agent, route, &answer);
}

void kvf_session_clock(kvf_session *session, uint64_t sent, uint64_t received, uint64_t theirs) {
    uint64_t trip = received - sent;
    if (trip / 2 + 1 >= session->clock_error)
        return;
    session->clock_error = trip / 2 + 1;
    session->clock_offset = (int64_t)(theirs - (sent + trip / 2));
}

/* A moment of our clock on the peer's, and rather too early than too late. */
uint64_t kvf_session_their_time(const kvf_session *session, uint64_t ours) {
    uint64_t now = kvf_agent_now(session->agent);
    uint64_t ahead = ours > now ? ours - now : 0;
    uint64_t slack = session->clock_error + ahead / CLOCK_DRIFT_DIVISOR;
    uint64_t theirs = ours + (uint64_t)session->clock_offset;
    return theirs > slack ? theirs - slack : 0;
}

static kvf_session *greeting_on(kvf_agent *agent, kvf_route route) {
    kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        if (!session->incoming && session->route == route && session->state != KVF_SESSION_LOST)
            return session;
    }
    return NULL;
}

static kvf_remote *meeting_on(kvf_agent *agent, kvf_route route) {
    kvf_remote *remote;
    DL_FOREACH(agent->all_remotes, remote) {
        if (remote->route == route && !remote->ready && !remote->stale)
            return remote;
    }
    return NULL;
}

static kvf_status take_welcome(kvf_session *session, const kvf_welcome *welcome) {
    if (strcmp(welcome->engine, session->engine) != 0 || welcome->rank != session->rank)
        return kvf_fail(KVF_E_MISMATCH, "rank %u of engine %s answers where rank %u of %s was", welcome->rank,
                        welcome->engine, session->rank, session->engine);
    if (welcome->incarnation != session->incarnation) {
        session->agent->stats.peers_replaced++;
        return kvf_fail(KVF_E_PEER_LOST, "%s rank %u was restarted", session->engine, session->rank);
    }
    if (session->state == KVF_SESSION_OPEN && memcmp(session->id, welcome->session, sizeof session->id) == 0)
        return KVF_OK; /* an answer to a HELLO repeated, or a sign of life */
    kvf_status status = kvf_session_take_card(session, welcome->card.data, welcome->card.size);
    if (status)
        return status;
    kvf_agent *agent = session->agent;
    if (session->hh.tbl)
        HASH_DELETE(hh, agent->sessions, session);
    memset(&session->hh, 0, sizeof session->hh);
    memcpy(session->id, welcome->session, sizeof session->id);
    HASH_ADD(hh, agent->sessions, id, sizeof session->id, session);
    if (!session->hh.tbl)
        return kvf_nomem("a session");
    session->state = KVF_SESSION_OPEN;
    kvf_peer_met(session);
    session->joined = false;
    session->hello_pause = 0;
    session->next_beat = kvf_agent_now(agent) + agent->options.heartbeat_ns;
    kvf_agent_due(agent, session->sources ? 0 : session->next_beat); /* who waited for it goes on */
    kvf_calls_bind(session);
    return KVF_OK;
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
        return;
    }
    kvf_session *session = greeting_on(agent, route);
    if (!session || welcome->card.size == 0) {
        agent->stats.messages_stale++;
        return;
    }
    uint64_t now = kvf_agent_now(agent);
    session->last_heard = now;
    kvf_peer_heard(session);
    session->broken_since = 0;
    if (memcmp(message->digest, session->digest, sizeof session->digest) != 0) {
        kvf_session_lose(session, KVF_E_MISMATCH, "it caches other cells now");
        return;
    }
    uint64_t asked = session->state == KVF_SESSION_OPEN ? session->hello_sent : session->hello_first;
    kvf_status status = take_welcome(session, welcome);
    if (status == KVF_E_NOMEM)
        return; /* greeted again */
    if (status)
        kvf_session_lose(session, status, kvf_error_detail());
    else
        kvf_session_clock(session, asked, now, welcome->clock_ns);
}

/* A refusal for now leaves us asking; one for good ends what waits. */
static void on_refused(kvf_agent *agent, kvf_route route, kvf_message *message) {
    kvf_remote *remote = meeting_on(agent, route);
    kvf_session *session = remote ? NULL : greeting_on(agent, route);
    if (!remote && (!session || session->state != KVF_SESSION_GREETING))
        return;
    const char *who = remote ? remote->name : session->engine;
    kvf_status status;
    if (message->version != KVF_WIRE_VERSION)
        status = kvf_fail(KVF_E_UNSUPPORTED, "%s speaks version %u of the protocol, and we version %u", who,
                          message->version, KVF_WIRE_VERSION);
    else if (kvf_wire_read(message))
        return;
    else
        status = kvf_fail(message->refused.status ? message->refused.status : KVF_E_AGAIN, "%s %s", who,
                          message->refused.detail);
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

bool kvf_session_fresh(kvf_session *session, uint64_t number) {
    if (number > session->seen_highest) {
        uint64_t ahead = kvf_min_u64(number - session->seen_highest, KVF_WINDOW_CALLS);
        for (uint64_t i = 1; i <= ahead; i++) {
            uint64_t bit = (number - ahead + i) % KVF_WINDOW_CALLS;
            session->seen[bit / 64] &= ~(1ull << bit % 64);
        }
        session->seen_highest = number;
    } else if (session->seen_highest - number >= KVF_WINDOW_CALLS) {
        return false;
    }
    uint64_t bit = number % KVF_WINDOW_CALLS;
    bool fresh = !(session->seen[bit / 64] >> bit % 64 & 1);
    session->seen[bit / 64] |= 1ull << bit % 64;
    return fresh;
}

static kvf_session *session_by_id(kvf_agent *agent, const uint8_t *id) {
    kvf_session *session = NULL;
    HASH_FIND(hh, agent->sessions, id, KVF_WIRE_SESSION_BYTES, session);
    return session;
}

static void heard(kvf_session *session, kvf_route route) {
    session->last_heard = kvf_agent_now(session->agent);
    kvf_peer_heard(session);
    session->broken_since = 0;
    if (session->incoming)
        session->route = route;
}

static void on_call(kvf_agent *agent, kvf_route route, kvf_message *message) {
    const kvf_call_body *call = &message->call;
    kvf_session *session = session_by_id(agent, call->session);
    if (!session) {
        agent->stats.messages_stale++;
        kvf_message answer = {.kind = KVF_MESSAGE_ANSWER,
                              .answer = {.number = call->number,
                                         .kind = call->kind,
                                         .status = KVF_E_PEER_LOST,
                                         .detail = "no such session"}};
        memcpy(answer.answer.session, call->session, sizeof call->session);
        send_message(agent, route, &answer);
        return;
    }
    heard(session, route);
    session->last_used = session->last_heard;
    bool fresh = kvf_session_fresh(session, call->number);
    /* A consumer's session is incoming at the producer: what may be asked depends on who greeted whom. */
    if ((call->kind == KVF_CALL_WRITTEN) == session->incoming) {
        kvf_answer_status(session, call, KVF_E_INVALID, "this call goes the other way");
        return;
    }
    agent->hooks->serve[call->kind](session, call, fresh);
}

static void on_answer(kvf_agent *agent, kvf_route route, kvf_message *message) {
    const kvf_answer *answer = &message->answer;
    kvf_session *session = session_by_id(agent, answer->session);
    if (!session) {
        agent->stats.messages_stale++;
        return;
    }
    if (answer->status != KVF_E_PEER_LOST) {
        heard(session, route);
        kvf_call_answered(session, answer);
    } else if (session->incoming) {
        kvf_session_lose(session, KVF_E_PEER_LOST, "the peer has forgotten the session");
    } else if (session->state == KVF_SESSION_OPEN) {
        session->state = KVF_SESSION_GREETING; /* the server has evicted us, or is another process by now */
        session->hello_pause = 0;
        session->hello_first = 0;
        kvf_session_hello(session, kvf_agent_now(agent));
    }
}

void kvf_on_message(void *context, kvf_route route, const void *data, size_t bytes) {
    kvf_agent *agent = context;
    agent->stats.messages_received++;
    kvf_message message = {0};
    if (kvf_wire_open((kvf_bytes){data, bytes}, &message)) {
        agent->stats.messages_malformed++;
        return;
    }
    switch (message.kind) {
    case KVF_MESSAGE_HELLO:
        on_hello(agent, route, &message);
        break;
    case KVF_MESSAGE_WELCOME:
        on_welcome(agent, route, &message);
        break;
    case KVF_MESSAGE_REFUSED:
        on_refused(agent, route, &message);
        break;
    case KVF_MESSAGE_CALL:
    case KVF_MESSAGE_ANSWER:
        if (kvf_wire_read(&message))
            agent->stats.messages_malformed++;
        else if (message.kind == KVF_MESSAGE_CALL)
            on_call(agent, route, &message);
        else
            on_answer(agent, route, &message);
        break;
    }
    kvf_message_free(&message);
}

/* ---- breaking and losing --------------------------------------------------------------------- */

void kvf_on_broken(void *context, kvf_route route, kvf_status status, const char *detail) {
    kvf_agent *agent = context;
    bool for_good = status == KVF_E_PERMISSION || status == KVF_E_PARSE;
    kvf_remote *remote = meeting_on(agent, route);
    if (remote && for_good)
        agent->hooks->refuse(remote, status, detail);
    else if (remote)
        (void)snprintf(remote->detail, sizeof remote->detail, "%s", detail);
    kvf_session *session = greeting_on(agent, route);
    if (!session)
        return;
    char *words = kvf_strdup(detail);
    if (words) {
        kvf_free(session->broken_detail);
        session->broken_detail = words;
    }
    if (for_good) {
        kvf_session_lose(session, status, detail);
    } else if (session->broken_since && status == KVF_E_IO && session->same_host) {
        /* On one host a port that takes no connection any more had its process end. */
        session->gone = true;
        kvf_session_lose(session, KVF_E_PEER_LOST, "its process is gone");
    } else if (session->state == KVF_SESSION_OPEN && !session->broken_since) {
        /* It may come back, or be another process by now: greeting it again tells. */
        session->broken_since = kvf_agent_now(agent);
        session->hello_pause = 0;
        kvf_session_hello(session, session->broken_since);
        kvf_agent_due(agent, session->broken_since + agent->options.peer_timeout_ns);
    }
}

void kvf_session_lose(kvf_session *session, kvf_status status, const char *why) {
    if (session->state == KVF_SESSION_LOST)
        return;
    kvf_agent *agent = session->agent;
    KVF_ASSERT(kvf_work_is_ours(agent));
    bool was_used = session->sources || session->flows;
    bool was_open = session->state == KVF_SESSION_OPEN;
    char detail[KVF_DETAIL_BYTES];
    (void)snprintf(detail, sizeof detail, "%s rank %u: %s", session->engine, session->rank, why);
    if (was_open || was_used)
        kvf_peer_left(session, detail);
    session->state = KVF_SESSION_LOST;
    hide(session, true);
    agent->due = 0;                /* freed in the next tick */
    kvf_peer_close(session->peer); /* what moves by it has ended after this */
    session->peer = NULL;
    kvf_calls_end(session, KVF_E_PEER_LOST);
    agent->hooks->lose(session, status, detail);
    if (was_open || was_used) {
        agent->stats.peers_lost++;
        kvf_event_peer(agent, KVF_EVENT_PEER_LOST, session->engine, session->rank, status, detail);
    }
}

static bool is_idle(const kvf_session *session, uint64_t now) {
    return !session->sources && !session->flows && !session->readers && !session->calls &&
           session->early_count == 0 && now - session->last_used >= session->agent->options.idle_ns;
}

/* Has it been silent for longer than a living peer would be? Only those we want something from are asked. */
static void check_life(kvf_session *session, uint64_t now) {
    kvf_agent *agent = session->agent;
    if (session->broken_since && session->state == KVF_SESSION_OPEN) {
        uint64_t end = session->broken_since + agent->options.peer_timeout_ns;
        if (now >= end) {
            kvf_session_lose(session, KVF_E_PEER_LOST,
                             session->broken_detail ? session->broken_detail : "the connection broke");
            return;
        }
        kvf_agent_due(agent, end);
    }
    if (session->state == KVF_SESSION_OPEN && session->sources && !session->incoming) {
        uint64_t end = session->last_heard + agent->options.lease_ns + agent->options.peer_timeout_ns;
        if (now >= end)
            kvf_session_lose(session, KVF_E_PEER_LOST, "it has not been heard of for the length of a lease");
        else
            kvf_agent_due(agent, end);
    }
}

static void tick_session(kvf_session *session, uint64_t now) {
    kvf_agent *agent = session->agent;
    if (session->peer_lost) {
        kvf_session_lose(session, KVF_E_PEER_LOST,
                         session->broken_detail ? session->broken_detail : "its process is gone");
        return;
    }
    check_life(session, now);
    if (session->state == KVF_SESSION_LOST)
        return;
    bool greets = session->state == KVF_SESSION_GREETING || session->broken_since;
    if (!session->incoming && greets) {
        if (now >= session->hello_next)
            kvf_session_hello(session, now);
        else
            kvf_agent_due(agent, session->hello_next);
    }
    kvf_calls_tick(session, now);
    agent->hooks->beat(session, now);
    if (is_idle(session, now)) {
        agent->stats.peers_evicted++;
        hide(session, false);
        session->state = KVF_SESSION_LOST;
    } else {
        kvf_agent_due(agent, session->last_used + agent->options.idle_ns);
    }
}

void kvf_sessions_tick(kvf_agent *agent, uint64_t now) {
    kvf_session *session, *next;
    DL_FOREACH_SAFE(agent->all_sessions, session, next) {
        if (session->state != KVF_SESSION_LOST)
            tick_session(session, now);
    }
    /* Freed apart from the walk above, and only when nothing points to them: transfers end when the peer
     * closes. */
    DL_FOREACH_SAFE(agent->all_sessions, session, next) {
        if (session->state == KVF_SESSION_LOST && !session->sources && !session->flows && !session->readers)
            kvf_session_free(session);
    }
}
