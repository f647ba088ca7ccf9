/*
 * Sessions: greeting a rank of another engine, and noticing that it is gone.
 *
 * The client repeats HELLO until it is answered (greet.c answers). All later messages carry the session's id, chosen by
 * the server: it finds the session after the connection breaks and comes back (hear.c).
 */
#include <stdio.h>

#include "agent/budget.h"
#include "agent/claim.h"
#include "agent/peers.h"
#include "agent/remote.h"
#include "agent/ticket.h"
#include "link/link_endpoint.h"
#include "transport/transport.h"

#define FIRST_PAUSE (50 * KVF_MILLISECOND)
#define LONGEST_PAUSE KVF_SECOND

/* ---- making and freeing ---------------------------------------------------------------------- */

kvf_session *kvf_session_make(kvf_agent *agent, const char *engine, uint32_t rank) {
    kvf_session *session = kvf_alloc0(1, sizeof *session);
    if (!session)
        return NULL;
    session->agent = agent;
    session->engine = kvf_strdup(engine);
    session->rank = rank;
    session->clock_error = UINT64_MAX;
    /* The peer may still know the session that we have lost, and the numbers that it has seen in it. */
    session->next_number = agent->last_number;
    session->last_used = session->last_heard = kvf_agent_now(agent);
    session->since_ns = kvf_wall_clock();
    if (!session->engine || kvf_alarms_join(&agent->session_times, &session->time)) {
        kvf_free(session->engine);
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
    if (session->hh_client.tbl && session->incoming)
        HASH_DELETE(hh_client, agent->clients, session);
    else if (session->hh_client.tbl)
        HASH_DELETE(hh_client, agent->servers, session);
    kvf_claim_drop(session);
    kvf_session_forget_route(session);
    memset(&session->hh, 0, sizeof session->hh);
    memset(&session->hh_client, 0, sizeof session->hh_client);
    agent->hooks->hide(session, lost);
}

void kvf_session_free(kvf_session *session) {
    if (!session)
        return;
    kvf_agent *agent = session->agent;
    hide(session, false); /* if nothing has yet */
    kvf_session_disconnect(session);
    while (session->calls)
        kvf_call_drop(session->calls);
    agent->hooks->free_session(session);
    if (session->prev)
        DL_DELETE(agent->all_sessions, session);
    kvf_alarms_leave(&agent->session_times, &session->time);
    if (!session->incoming)
        kvf_link_disconnect(agent->link, session->route);
    kvf_party_leave(session);
    kvf_free(session->key);
    kvf_free(session->card);
    kvf_free(session->broken_detail);
    kvf_free(session->failure);
    kvf_free(session->way_told);
    kvf_free(session->past_why);
    kvf_free(session->engine);
    kvf_wire_buffer_free(&session->introduction);
    kvf_free(session);
}

/* Lists a session by its process and by its connection. Two with one connection, or with one incarnation, are a mistake
 * of the other side: the older one is found. */
static kvf_status list_outgoing(kvf_session *session) {
    kvf_agent *agent = session->agent;
    kvf_session *other = NULL;
    HASH_FIND(hh_client, agent->servers, &session->incarnation, sizeof session->incarnation, other);
    if (!other)
        HASH_ADD(hh_client, agent->servers, incarnation, sizeof session->incarnation, session);
    HASH_ADD(hh_route, agent->by_route, route, sizeof session->route, session);
    return session->hh_route.tbl ? KVF_OK : kvf_nomem("a session");
}

kvf_status kvf_session_take_card(kvf_session *session, const void *card, size_t bytes) {
    if (session->card && session->card_bytes == bytes && memcmp(session->card, card, bytes) == 0)
        return KVF_OK;
    void *copy = kvf_copy(card, bytes, 1);
    if (!copy)
        return kvf_nomem("a session");
    kvf_session_disconnect(session);
    kvf_free(session->card);
    session->card = copy;
    session->card_bytes = bytes;
    session->withholds = kvf_card_withholds(card, bytes);
    kvf_free(session->past_why);
    session->past = session->past_why = NULL;
    return KVF_OK;
}

static void have(kvf_remote *remote, kvf_remote_rank *rank, kvf_session *session) {
    rank->remote = remote;
    rank->session = session;
    DL_APPEND(session->ranks, rank);
}

kvf_status kvf_session_to(kvf_remote *remote, uint32_t rank, kvf_session **out) {
    kvf_remote_rank *there = &remote->ranks[rank];
    if (there->session) {
        *out = there->session;
        return KVF_OK;
    }
    kvf_agent *agent = remote->agent;
    kvf_session *session;
    HASH_FIND(hh_client, agent->servers, &there->incarnation, sizeof there->incarnation, session);
    if (session && session->rank == rank && strcmp(session->engine, remote->name) == 0) {
        have(remote, there, session); /* an engine met anew may have ranks we know */
        *out = session;
        return KVF_OK;
    }
    session = kvf_session_make(agent, remote->name, rank);
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
    session->same_host =
        kvf_endpoint_to_connect(there->endpoint, &endpoint) == KVF_OK && kvf_endpoint_is_here(&endpoint);
    kvf_status status = kvf_link_connect(agent->link, there->endpoint, there->public_key, &session->route);
    if (!status)
        status = list_outgoing(session);
    if (status) {
        kvf_session_free(session);
        return status;
    }
    have(remote, there, session);
    DL_APPEND(agent->all_sessions, session);
    kvf_session_hello(session, kvf_agent_now(agent));
    *out = session;
    return KVF_OK;
}

/* ---- greeting -------------------------------------------------------------------------------- */

void kvf_message_send(kvf_agent *agent, kvf_route route, const kvf_message *message) {
    kvf_wire_buffer bytes;
    if (kvf_wire_encode(message, &bytes))
        return; /* as if it was lost */
    (void)kvf_link_send(agent->link, route, bytes.data, bytes.size);
    agent->stats.messages_sent++;
    agent->work += bytes.size;
    kvf_wire_buffer_free(&bytes);
}

void kvf_hello_send(kvf_agent *agent, kvf_route route, const uint8_t *digest, bool wants_ranks,
                    uint32_t first_rank, bool wants_card) {
    kvf_message message = {.kind = KVF_MESSAGE_HELLO,
                           .hello = {.engine = agent->name,
                                     .incarnation = agent->incarnation,
                                     .rank = agent->rank,
                                     .rank_count = agent->rank_count,
                                     .wants_ranks = wants_ranks,
                                     .first_rank = first_rank,
                                     .wants_card = wants_card,
                                     .clock_ns = kvf_agent_now(agent)}};
    memcpy(message.digest, digest, sizeof message.digest);
    if (wants_card) /* sent to peers that lend us memory, or to which we lend ours */
        memcpy(message.hello.secret, agent->secret, sizeof message.hello.secret);
    kvf_message_send(agent, route, &message);
}

void kvf_session_hello(kvf_session *session, uint64_t now) {
    if (!session->hello_first)
        session->hello_first = now;
    session->hello_pause =
        session->hello_pause ? kvf_min_u64(2 * session->hello_pause, LONGEST_PAUSE) : FIRST_PAUSE;
    session->hello_next = now + session->hello_pause;
    kvf_session_due(session, session->hello_next);
    kvf_hello_send(session->agent, session->route, session->digest, false, 0, true);
}

/* Once its connection has broken, a greeting finds out what is there by now. */
bool kvf_session_greets(const kvf_session *session) {
    return !session->incoming && (session->state == KVF_SESSION_GREETING || session->broken_since);
}

void kvf_session_greet_anew(kvf_session *session) {
    session->state = KVF_SESSION_GREETING;
    session->hello_pause = 0;
    session->hello_first = 0;
    session->seen_highest = 0;
    kvf_session_hello(session, kvf_agent_now(session->agent));
}

/* The best comparison counts: that of the shortest round trip, until it is so old that a later one says more. */
void kvf_session_clock(kvf_session *session, uint64_t sent, uint64_t received, uint64_t theirs) {
    uint64_t trip = received - sent;
    if (trip / 2 + 1 >= kvf_session_clock_error(session, received))
        return;
    session->clock_error = trip / 2 + 1;
    session->clock_offset = (int64_t)(theirs - (sent + trip / 2));
    session->compared = sent;
}

/* Converts a time of our clock to the peer's; if inexact, too early rather than too late. Half of the time until then is
 * left however long ago the clocks were compared, as between requests: a heartbeat compares them soon. */
uint64_t kvf_session_their_time(const kvf_session *session, uint64_t ours) {
    uint64_t now = kvf_agent_now(session->agent);
    uint64_t ahead = ours > now ? ours - now : 0;
    uint64_t slack = session->clock_error + kvf_min_u64(kvf_session_drift(session, now + ahead), ahead / 2);
    uint64_t theirs = ours + (uint64_t)session->clock_offset;
    return theirs > slack ? theirs - slack : 0;
}

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

/* ---- losing ---------------------------------------------------------------------------------- */

void kvf_session_retire(kvf_session *session) {
    hide(session, false);
    session->state = KVF_SESSION_LOST;
    session->agent->hooks->forget(session);
    kvf_calls_end(session, KVF_E_PEER_LOST); /* no answer would find it */
    session->agent->due = 0;
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
    const bool tells = (was_open || was_used) && kvf_peer_loss_is_news(session);
    if (tells)
        kvf_peer_left(session, detail);
    session->state = KVF_SESSION_LOST;
    hide(session, true);
    agent->due = 0; /* freed in the next tick */
    kvf_session_disconnect(session);
    kvf_calls_end(session, KVF_E_PEER_LOST);
    agent->hooks->lose(session, status, detail);
    agent->stats.peers_lost += was_open || was_used;
    if (tells)
        kvf_event_peer(agent, KVF_EVENT_PEER_LOST, session->engine, session->rank, status, detail);
}

static bool is_in_use(const kvf_session *session) {
    return session->sources || session->flows || session->readers || session->calls ||
           session->early_count > 0;
}

static bool is_unused_for_long(const kvf_session *session, uint64_t now) {
    return now - session->last_used >= session->agent->options.idle_ns;
}

/* Nothing is under way, here or on its connection, and it was not used for long, or its client has gone. */
static bool is_idle(const kvf_session *session, uint64_t now) {
    if (is_in_use(session))
        return false;
    bool ends =
        is_unused_for_long(session, now) || (session->incoming && now >= kvf_budget_silent_at(session) &&
                                             kvf_link_has_ended(session->agent->link, session->route));
    return ends && !kvf_session_carries(session);
}

/* Checks whether a peer was silent for longer than a living one would be. Only peers that we need are probed. */
static void check_life(kvf_session *session, uint64_t now) {
    kvf_agent *agent = session->agent;
    /* Also while it is greeted anew: what listens there by now may not be ready to answer. */
    if (session->broken_since) {
        uint64_t end = session->broken_since + agent->options.peer_timeout_ns;
        if (session->unreached == KVF_E_TIMEOUT) /* it may live, and let only some connect now */
            end += agent->options.lease_ns;
        if (now >= end) {
            kvf_session_lose(session, KVF_E_PEER_LOST,
                             session->broken_detail ? session->broken_detail : "the connection broke");
            return;
        }
        kvf_session_due(session, end);
    }
    if (session->state == KVF_SESSION_OPEN && session->sources && !session->incoming) {
        uint64_t end = session->last_heard + agent->options.lease_ns + agent->options.peer_timeout_ns;
        if (now >= end)
            kvf_session_lose(session, KVF_E_PEER_LOST,
                             "nothing was heard from the peer for the length of a lease");
        else
            kvf_session_due(session, end);
    }
}

bool kvf_session_is_to_be_written(const kvf_session *session) {
    const kvf_source *source;
    DL_FOREACH(session->sources, source) {
        if (source->ticket->base.kind == KVF_REQUEST_EXPECT)
            return true;
    }
    return false;
}

/* A peer that lives has taken memory back, and our requests that wait for it need only its next card. Those that moved by
 * the connection fail with it. */
static bool waits_for_card(const kvf_session *session) {
    return session->peer_lives && session->state == KVF_SESSION_OPEN && session->sources &&
           !kvf_session_is_to_be_written(session);
}

static void tick_session(kvf_session *session, uint64_t now) {
    kvf_agent *agent = session->agent;
    if (session->peer_lost && waits_for_card(session)) {
        session->peer_lost = session->peer_lives = false;
        kvf_session_disconnect(session);
        kvf_session_greet_anew(session);
    }
    if (session->peer_lost) {
        /* Its endpoint is gone, and the transport knows which of its writes are still under way. Asking for that shuts
         * it out: a peer that lives, and has only taken memory back, uses the connections that it made to us. */
        session->gone = session->same_host && !session->peer_lives;
        kvf_session_lose(session, KVF_E_PEER_LOST,
                         session->broken_detail ? session->broken_detail : "the peer's process is gone");
        return;
    }
    check_life(session, now);
    if (session->state == KVF_SESSION_LOST)
        return;
    if (kvf_session_greets(session)) {
        if (now >= session->hello_next)
            kvf_session_hello(session, now);
        else
            kvf_session_due(session, session->hello_next);
    }
    if (session->join_wanted && !session->joining && session->state == KVF_SESSION_OPEN && agent->card)
        agent->hooks->join(session);
    kvf_calls_tick(session, now);
    agent->hooks->beat(session, now);
    if (is_idle(session, now)) {
        agent->stats.peers_evicted++;
        hide(session, false);
        session->state = KVF_SESSION_LOST;
    } else {
        /* Also while it is in use: otherwise a time in the past would be due again and again. */
        bool again = is_in_use(session) || is_unused_for_long(session, now);
        kvf_session_due(session, (again ? now : session->last_used) + agent->options.idle_ns);
        if (session->incoming && kvf_budget_silent_at(session) > now)
            kvf_session_due(session, kvf_budget_silent_at(session));
    }
}

static kvf_session *session_at(kvf_alarm *time) {
    return (kvf_session *)((char *)time - offsetof(kvf_session, time));
}

/* May free it. */
static void look_at(kvf_session *session, uint64_t now) {
    kvf_agent *agent = session->agent;
    kvf_alarm_set(&agent->session_times, &session->time, UINT64_MAX); /* its tick sets when it is due again */
    if (session->state != KVF_SESSION_LOST)
        tick_session(session, now);
    if (session->state != KVF_SESSION_LOST || session->sources || session->flows || session->readers ||
        session->early)
        return; /* see kvf_session_less() */
    /* Freed only when nothing points to it, and no flow of the next session uses its connection: they end with that. */
    if (kvf_session_moves(session))
        kvf_session_due(session, now + agent->options.idle_ns);
    else
        kvf_session_free(session);
}

static bool look_at_first(kvf_agent *agent, uint32_t pass, uint64_t now) {
    kvf_session *session = agent->all_sessions;
    if (!session || session->pass == pass)
        return false;
    session->pass = pass;
    DL_DELETE(agent->all_sessions, session);
    DL_APPEND(agent->all_sessions, session);
    look_at(session, now);
    return true;
}

void kvf_sessions_tick(kvf_agent *agent, uint64_t now) {
    kvf_sweep_round(&agent->session_sweep, agent, now, look_at_first);
    for (uint32_t i = 0; i < KVF_SWEPT_AT_ONCE && kvf_alarms_next(&agent->session_times) <= now; i++)
        look_at(session_at(kvf_alarms_first(&agent->session_times)), now);
}
