/*
 * The server's half of the handshake.
 *
 * A server keeps one session for each process that greets it (engine, incarnation, rank), so a repeated HELLO changes
 * nothing. A process proves its incarnation by a secret, and with keys its session is bound to the key that it used: an
 * introduction, which anyone may know, opens nothing.
 */
#include <sodium.h>
#include <stdio.h>

#include "agent/budget.h"
#include "agent/claim.h"
#include "agent/greet.h"
#include "agent/peers.h"
#include "wire/gather.h"

static void refuse(kvf_agent *agent, kvf_route route, kvf_status status, const char *detail) {
    kvf_message message = {.kind = KVF_MESSAGE_REFUSED, .refused = {.status = status, .detail = detail}};
    memcpy(message.digest, agent->digest, sizeof message.digest);
    kvf_message_send(agent, route, &message);
    if (!kvf_refused_for_now(status))
        agent->stats.peers_refused++;
}

/* A client with another digest is sent our facts. */
static void answer_ranks(kvf_agent *agent, kvf_route route, const uint8_t *digest, uint32_t first) {
    if (!agent->introductions || agent->introduction_count < agent->rank_count) {
        char words[96];
        (void)snprintf(words, sizeof words, "knows %u of its engine's %u ranks so far",
                       agent->introduction_count, agent->rank_count);
        refuse(agent, route, KVF_E_AGAIN, words);
        return;
    }
    first = first < agent->rank_count ? first : 0;
    bool tells = first == 0 && memcmp(digest, agent->digest, sizeof agent->digest) != 0;
    uint32_t count = kvf_gather_end(agent->introductions, first, agent->rank_count) - first;
    kvf_bytes *list = kvf_alloc(count, sizeof *list);
    if (!list)
        return;
    for (uint32_t i = 0; i < count; i++)
        list[i] = (kvf_bytes){agent->introductions[first + i].data, agent->introductions[first + i].size};
    kvf_message message = {.kind = KVF_MESSAGE_WELCOME,
                           .welcome = {.engine = agent->name,
                                       .incarnation = agent->incarnation,
                                       .rank = agent->engine ? agent->rank : KVF_NO_RANK,
                                       .rank_count = agent->rank_count,
                                       .clock_ns = kvf_agent_now(agent),
                                       .first_rank = first,
                                       .introductions = list,
                                       .introduction_count = count,
                                       .facts = tells ? agent->facts : ""}};
    memcpy(message.digest, agent->digest, sizeof message.digest);
    kvf_message_send(agent, route, &message);
    kvf_free(list);
}

static kvf_status make_key(const kvf_hello *hello, uint8_t **key, size_t *bytes) {
    kvf_client_key made;
    *bytes = kvf_client_key_of(hello->incarnation, hello->rank, hello->engine, strlen(hello->engine), &made);
    *key = kvf_copy(&made, *bytes, 1);
    return *key ? KVF_OK : kvf_nomem("a session");
}

static kvf_status check_holder(const kvf_session *session, const uint8_t *key) {
    bool same = key ? session->keyed && memcmp(session->peer_key, key, KVF_KEY_BYTES) == 0 : !session->keyed;
    return same ? KVF_OK
                : kvf_fail(KVF_E_PERMISSION, "has a session with rank %u of %s under another key",
                           session->rank, session->engine);
}

/* Puts a new session into the tables; on failure the caller frees it. */
static kvf_status list_session(kvf_session *session) {
    kvf_agent *agent = session->agent;
    kvf_status status = kvf_claim_take(session);
    if (status)
        return status;
    HASH_ADD_KEYPTR(hh_client, agent->clients, session->key, session->key_bytes, session);
    if (session->hh_client.tbl)
        HASH_ADD(hh, agent->sessions, id, sizeof session->id, session);
    if (!session->hh_client.tbl || !session->hh.tbl)
        return kvf_nomem("a session");
    DL_APPEND(agent->all_sessions, session);
    kvf_peer_met(session);
    kvf_session_due(session,
                    kvf_min_u64(session->last_used + agent->options.idle_ns, kvf_budget_silent_at(session)));
    return KVF_OK;
}

/* `name` becomes the session's, or is freed. */
static kvf_status open_session(kvf_agent *agent, const kvf_letter *letter, const kvf_hello *hello,
                               uint8_t *name, size_t name_bytes, kvf_session **out) {
    kvf_session *session = kvf_session_make(agent, hello->engine, hello->rank);
    if (!session) {
        kvf_free(name);
        return kvf_nomem("a session");
    }
    session->incoming = true;
    session->state = KVF_SESSION_OPEN;
    session->incarnation = hello->incarnation;
    session->rank_count = hello->rank_count;
    session->key = name;
    session->key_bytes = name_bytes;
    session->keyed = letter->key != NULL;
    if (letter->key)
        memcpy(session->peer_key, letter->key, sizeof session->peer_key);
    randombytes_buf(session->id, sizeof session->id);
    kvf_status status = kvf_party_join(session, letter);
    if (!status)
        status = list_session(session);
    if (status)
        kvf_session_free(session);
    else
        *out = session;
    return status;
}

/* The session of a client that greets: the one it has, or a new one. */
static kvf_status session_of(kvf_agent *agent, const kvf_letter *letter, const kvf_hello *hello,
                             kvf_session **out) {
    uint8_t *name;
    size_t bytes;
    kvf_status status = kvf_claim_check(agent, letter->key, hello);
    if (!status)
        status = make_key(hello, &name, &bytes);
    if (status)
        return status;
    kvf_session *session = NULL;
    HASH_FIND(hh_client, agent->clients, name, bytes, session);
    if (session) {
        kvf_free(name);
        *out = session;
        return check_holder(session, letter->key);
    }
    status = kvf_claim_look(agent, hello);
    if (!status && HASH_CNT(hh_client, agent->clients) >= agent->options.max_peers)
        kvf_budget_make_room(agent);
    if (!status && HASH_CNT(hh_client, agent->clients) >= agent->options.max_peers)
        status = kvf_fail(KVF_E_LIMIT, "has %u peers, the most it allows", agent->options.max_peers);
    if (!status)
        return open_session(agent, letter, hello, name, bytes, out);
    kvf_free(name);
    return status;
}

/* Whether this agent can answer yet; the detail says why not. */
static kvf_status check_ready(const kvf_agent *agent, const kvf_message *message) {
    if (memcmp(message->digest, agent->digest, sizeof agent->digest) != 0)
        return kvf_fail(KVF_E_MISMATCH, "has other facts than the greeting says");
    if (agent->card)
        return KVF_OK;
    return kvf_fail(KVF_E_AGAIN, agent->with_facts.data
                                     ? "has unregistered its memory, as an engine does that sleeps"
                                     : "has no memory registered yet");
}

static void answer_card(kvf_agent *agent, const kvf_letter *letter, const kvf_message *message) {
    kvf_session *session = NULL;
    kvf_status status = check_ready(agent, message);
    if (!status)
        status = session_of(agent, letter, &message->hello, &session);
    if (status) {
        refuse(agent, letter->route, status == KVF_E_NOMEM ? KVF_E_AGAIN : status, kvf_error_detail());
        if (status == KVF_E_PERMISSION)
            kvf_claim_tell(agent, message->hello.engine, message->hello.rank, kvf_error_detail());
        return;
    }
    kvf_session_goes_by(session, letter->route);
    session->last_heard = kvf_agent_now(agent);
    session->silent = false;
    kvf_message answer = {.kind = KVF_MESSAGE_WELCOME,
                          .welcome = {.engine = agent->name,
                                      .incarnation = agent->incarnation,
                                      .rank = agent->rank,
                                      .rank_count = agent->rank_count,
                                      .clock_ns = session->last_heard,
                                      .lease_ns = agent->options.lease_ns,
                                      .card = {agent->card, agent->card_bytes}}};
    memcpy(answer.welcome.session, session->id, sizeof session->id);
    memcpy(answer.digest, agent->digest, sizeof answer.digest);
    kvf_message_send(agent, letter->route, &answer);
}

void kvf_greeted(kvf_agent *agent, const kvf_letter *letter, kvf_message *message) {
    if (message->version != KVF_WIRE_VERSION) {
        char words[96];
        (void)snprintf(words, sizeof words, "speaks version %u of the protocol, not version %u",
                       KVF_WIRE_VERSION, message->version);
        refuse(agent, letter->route, KVF_E_UNSUPPORTED, words);
    } else if (!agent->name) {
        refuse(agent, letter->route, KVF_E_AGAIN, "is a directory that knows no engine yet");
    } else if (kvf_wire_read(message)) {
        agent->stats.messages_malformed++;
    } else if (message->hello.wants_ranks) {
        answer_ranks(agent, letter->route, message->digest, message->hello.first_rank);
    } else {
        answer_card(agent, letter, message);
    }
}
