#include "agent/peers.h"

#include <stdio.h>

#include "transport/transport.h"

#define MOST_DEPARTED 64u
/* The log names so many engines that greet in so long a time, and so many of their ranks that are lost; further ones are
 * details, as a peer may have any number of names, and greet as often as it likes. */
#define MOST_NEWS 64u
#define NEWS_NS (60 * KVF_SECOND)
/* How many sessions are looked at to find another rank of an engine. */
#define LOOKED_AT 1024u

/* A peer that was lost. */
struct kvf_departed {
    char *engine;
    uint32_t rank, rank_count;
    bool incoming;
    uint64_t when, when_ns; /* by the agent's clock, and by the wall's */
    char *failure;
    kvf_departed *prev, *next; /* agent->departed */
};

/* ---- who was lost ---------------------------------------------------------------------------- */

static void forget(kvf_agent *agent, kvf_departed *departed) {
    /* The analyser does not know that the list's head has its last as prev. */
    /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
    DL_DELETE(agent->departed, departed);
    agent->departed_count--;
    kvf_free(departed->engine);
    kvf_free(departed->failure);
    kvf_free(departed);
}

void kvf_peers_forget(kvf_agent *agent) {
    while (agent->departed)
        forget(agent, agent->departed);
}

static kvf_departed *departed_as(const kvf_session *session) {
    kvf_departed *departed;
    DL_FOREACH(session->agent->departed, departed) {
        if (departed->incoming == session->incoming && departed->rank == session->rank &&
            strcmp(departed->engine, session->engine) == 0)
            return departed;
    }
    return NULL;
}

void kvf_peer_left(kvf_session *session, const char *detail) {
    kvf_agent *agent = session->agent;
    kvf_departed *before = departed_as(session);
    kvf_departed *departed = kvf_alloc0(1, sizeof *departed);
    if (before)
        forget(agent, before);
    if (!departed)
        return; /* for information only */
    *departed = (kvf_departed){.engine = kvf_strdup(session->engine),
                               .rank = session->rank,
                               .rank_count = session->rank_count,
                               .incoming = session->incoming,
                               .when = kvf_agent_now(agent),
                               .when_ns = kvf_wall_clock(),
                               .failure = kvf_strdup(detail)};
    DL_APPEND(agent->departed, departed);
    agent->departed_count++;
    if (!departed->engine || !departed->failure)
        forget(agent, departed);
    else if (agent->departed_count > MOST_DEPARTED)
        forget(agent, agent->departed);
}

/* ---- failures -------------------------------------------------------------------------------- */

static void note_failure(kvf_session *session, const char *detail, uint64_t when_ns) {
    char *words = kvf_strdup(detail);
    if (!words)
        return;
    kvf_free(session->failure);
    session->failure = words;
    session->failed_ns = when_ns;
}

/* Peers can make many sessions, and have many leases that run out at once: the client is looked up. */
void kvf_peers_failed(kvf_agent *agent, const char *engine, uint32_t rank, const char *detail) {
    uint64_t now_ns = kvf_wall_clock();
    kvf_session *session = rank == KVF_NO_RANK ? NULL : kvf_client_named(agent, engine, rank);
    if (session)
        note_failure(session, detail, now_ns);
    for (session = agent->servers; session; session = session->hh_client.next)
        if ((rank == KVF_NO_RANK || session->rank == rank) && strcmp(session->engine, engine) == 0)
            note_failure(session, detail, now_ns);
    if (rank == KVF_NO_RANK)
        for (session = agent->clients; session; session = session->hh_client.next)
            if (strcmp(session->engine, engine) == 0)
                note_failure(session, detail, now_ns);
}

/* ---- the log --------------------------------------------------------------------------------- */

static void say_back(kvf_session *session, uint64_t since, const char *what) {
    kvf_agent *agent = session->agent;
    if (!kvf_agent_logs(agent, KVF_LOG_INFO))
        return;
    kvf_text text = {0};
    kvf_text_add(&text, "%s rank %u is back, %.3f s after %s", session->engine, session->rank,
                 (double)(kvf_agent_now(agent) - since) / 1e9, what);
    if (!text.failed)
        kvf_agent_log(agent, KVF_LOG_INFO, text.data);
    kvf_text_free(&text);
}

/* Whether there was room for one more piece of news in this minute. */
static bool is_news(uint64_t *since, uint32_t *count, uint64_t now) {
    if (now - *since >= NEWS_NS) {
        *since = now;
        *count = 0;
    }
    return (*count)++ < MOST_NEWS;
}

bool kvf_peer_loss_is_news(const kvf_session *session) {
    kvf_agent *agent = session->agent;
    return !session->incoming || is_news(&agent->lost_since, &agent->lost, kvf_agent_now(agent));
}

/* The first rank of an engine is news, and its others are details. They greet one after the other: only the latest sessions
 * are looked at, as peers can make many. */
static kvf_log_level level_of_client(const kvf_session *session) {
    kvf_agent *agent = session->agent;
    const kvf_session *other = session;
    for (uint32_t i = 0; i < LOOKED_AT && other != agent->all_sessions; i++) {
        other = other->prev;
        if (other->incoming && strcmp(other->engine, session->engine) == 0)
            return KVF_LOG_DEBUG;
    }
    return is_news(&agent->greeted_since, &agent->greeted, kvf_agent_now(agent)) ? KVF_LOG_INFO
                                                                                 : KVF_LOG_DEBUG;
}

void kvf_peer_met(kvf_session *session) {
    kvf_agent *agent = session->agent;
    kvf_departed *departed = departed_as(session);
    kvf_text text = {0};
    if (departed) {
        say_back(session, departed->when, departed->failure);
        note_failure(session, departed->failure, departed->when_ns);
        forget(agent, departed);
        return;
    }
    if (!kvf_agent_logs(agent, KVF_LOG_INFO))
        return; /* neither news nor details are wanted */
    kvf_log_level level = session->incoming ? level_of_client(session) : KVF_LOG_DEBUG;
    if (!kvf_agent_logs(agent, level))
        return;
    kvf_text_add(&text, session->incoming ? "%s rank %u of %u has greeted" : "%s rank %u of %u has answered",
                 session->engine, session->rank, session->rank_count);
    kvf_text_add(&text, " %s rank %u", agent->name, agent->rank);
    if (level == KVF_LOG_INFO && agent->greeted == MOST_NEWS)
        kvf_text_add(&text, ", as have %u engines in a minute; others are logged as details", MOST_NEWS);
    if (!text.failed)
        kvf_agent_log(agent, level, text.data);
    kvf_text_free(&text);
}

void kvf_peer_heard(kvf_session *session) {
    if (session->broken_since)
        say_back(session, session->broken_since, session->broken_detail ? session->broken_detail : "a break");
}

static bool is_told_of_sibling(const kvf_session *session, const char *way) {
    const kvf_session *other;
    DL_FOREACH(session->agent->all_sessions, other) {
        if (other != session && other->incoming == session->incoming && other->way_told &&
            strcmp(other->engine, session->engine) == 0 && strcmp(other->way_told, way) == 0)
            return true;
    }
    return false;
}

void kvf_peer_served(kvf_session *session) {
    if (!session || !session->peer || !kvf_agent_logs(session->agent, KVF_LOG_INFO))
        return;
    kvf_agent *agent = session->agent;
    kvf_peer_info info = {.struct_size = sizeof info};
    (void)kvf_peer_get_info(session->peer, &info);
    kvf_text way = {0}, text = {0};
    kvf_text_add(&way, "%s%s%s%s%s%s", info.kind, info.way[0] ? ", by " : "", info.way,
                 kvf_peer_withholds(session->peer) ? ", packed" : "", info.passed_over[0] ? ", because " : "",
                 info.passed_over);
    kvf_text_add(&text, "%s rank %u %s %s rank %u over %s", agent->name, agent->rank,
                 session->incoming ? "writes to" : "reads from", session->engine, session->rank,
                 way.failed ? info.kind : way.data);
    if (!way.failed && !text.failed && (!session->way_told || strcmp(session->way_told, way.data) != 0)) {
        kvf_agent_log(agent, is_told_of_sibling(session, way.data) ? KVF_LOG_DEBUG : KVF_LOG_INFO, text.data);
        kvf_free(session->way_told);
        session->way_told = kvf_strdup(way.data);
    }
    kvf_text_free(&text);
    kvf_text_free(&way);
}

kvf_log_level kvf_peer_level_unreached(const kvf_session *session) {
    const kvf_session *other;
    DL_FOREACH(session->agent->all_sessions, other) {
        if (other != session && other->unreached && strcmp(other->engine, session->engine) == 0)
            return KVF_LOG_DEBUG;
    }
    return KVF_LOG_INFO;
}

const char *kvf_peer_waits_for(const kvf_session *session) {
    return session && session->peer ? kvf_peer_waiting(session->peer) : NULL;
}

void kvf_peers_waiting(kvf_agent *agent) {
    kvf_session *session;
    if (!kvf_agent_logs(agent, KVF_LOG_INFO))
        return;
    DL_FOREACH(agent->all_sessions, session) {
        const char *why = kvf_peer_waits_for(session);
        kvf_text text = {0};
        if (!why || session->waits_told)
            continue;
        session->waits_told = true;
        kvf_text_add(&text, "%s rank %u: %s: %s; trying again", session->engine, session->rank,
                     kvf_peer_kind(session->peer), why);
        if (!text.failed)
            kvf_agent_log(agent, KVF_LOG_INFO, text.data);
        kvf_text_free(&text);
    }
}

/* ---- the list -------------------------------------------------------------------------------- */

static void describe(const kvf_session *session, kvf_agent_peer *out) {
    bool broken = session->broken_since && session->state == KVF_SESSION_OPEN;
    out->role = session->incoming ? KVF_PEER_CONSUMER : KVF_PEER_PRODUCER;
    out->state = broken                                   ? KVF_PEER_BROKEN
                 : session->state == KVF_SESSION_GREETING ? KVF_PEER_GREETING
                                                          : KVF_PEER_OPEN;
    out->rank = session->rank;
    out->rank_count = session->rank_count;
    (void)snprintf(out->engine, sizeof out->engine, "%s", session->engine);
    kvf_peer_info info = {.struct_size = sizeof info};
    if (session->peer)
        (void)kvf_peer_get_info(session->peer, &info);
    memcpy(out->fabric, info.kind, sizeof out->fabric);
    memcpy(out->way, info.way, sizeof out->way);
    memcpy(out->passed_over, info.passed_over, sizeof out->passed_over);
    out->bytes_read = info.bytes_read;
    out->bytes_written = info.bytes_written;
    out->bytes_packed = session->bytes_packed;
    out->bytes_received = session->bytes_received;
    out->round_trip_ns = session->clock_error == UINT64_MAX ? 0 : 2 * session->clock_error;
    out->since_ns = session->since_ns;
    out->failed_ns = session->failed_ns;
    (void)snprintf(out->failure, sizeof out->failure, "%s", session->failure ? session->failure : "");
}

static void describe_departed(const kvf_departed *departed, kvf_agent_peer *out) {
    out->role = departed->incoming ? KVF_PEER_CONSUMER : KVF_PEER_PRODUCER;
    out->state = KVF_PEER_LOST;
    out->rank = departed->rank;
    out->rank_count = departed->rank_count;
    out->since_ns = out->failed_ns = departed->when_ns;
    (void)snprintf(out->engine, sizeof out->engine, "%s", departed->engine);
    (void)snprintf(out->failure, sizeof out->failure, "%s", departed->failure);
}

/* The caller's array, and how many peers there are, also if not all fit. */
typedef struct peer_list {
    kvf_agent_peer *to;
    uint32_t capacity, count;
} peer_list;

static void put(peer_list *list, const kvf_agent_peer *peer) {
    if (list->count < list->capacity)
        kvf_fill_element(list->to, list->count, peer, sizeof *peer);
    list->count++;
}

kvf_status kvf_agent_peers(kvf_agent *agent, kvf_agent_peer *peers, uint32_t capacity, uint32_t *count) {
    kvf_status status = count ? KVF_OK : kvf_fail(KVF_E_INVALID, "count is NULL");
    if (!status && capacity > 0)
        status = kvf_check_out(peers, "kvf_agent_peer");
    if (!status)
        status = kvf_agent_lock(agent);
    if (status)
        return status;
    kvf_work_take(agent); /* the transport tells what serves a peer */
    peer_list list = {peers, capacity, 0};
    const kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        kvf_agent_peer peer = {0};
        if (session->state == KVF_SESSION_LOST)
            continue;
        describe(session, &peer);
        put(&list, &peer);
    }
    const kvf_departed *departed;
    DL_FOREACH(agent->departed, departed) {
        kvf_agent_peer peer = {0};
        describe_departed(departed, &peer);
        put(&list, &peer);
    }
    kvf_work_give(agent);
    kvf_agent_unlock(agent);
    *count = list.count;
    return KVF_OK;
}
