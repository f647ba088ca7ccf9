#include "agent/budget.h"

#include "agent/claim.h"

/* Without keys a connection is one process, which has one session here; a restart has another connection. */
#define SESSIONS_OF_A_CONNECTION 8u
/* How many sessions are checked to find one to remove. */
#define LOOKED_AT 64u
/* A session that was used within this time stays. */
#define IN_USE_NS KVF_SECOND

#define TOGETHER "over budget: all peers together use as much memory here as they are allowed"

typedef struct kvf_party {
    uint8_t key[KVF_KEY_BYTES]; /* of its holders; without keys, the route of its connection */
    uint32_t sessions;
    uint64_t bytes;
    UT_hash_handle hh; /* agent->parties, by key */
} kvf_party;

static kvf_party *find_party(kvf_agent *agent, const kvf_letter *letter) {
    uint8_t key[KVF_KEY_BYTES] = {0};
    kvf_party *party = NULL;
    if (letter->key)
        memcpy(key, letter->key, sizeof key);
    else
        memcpy(key, &letter->route, sizeof letter->route);
    HASH_FIND(hh, agent->parties, key, sizeof key, party);
    if (party || !(party = kvf_alloc0(1, sizeof *party)))
        return party;
    memcpy(party->key, key, sizeof party->key);
    HASH_ADD(hh, agent->parties, key, sizeof party->key, party);
    if (party->hh.tbl)
        return party;
    kvf_free(party);
    return NULL;
}

static void drop_if_empty(kvf_agent *agent, kvf_party *party) {
    if (party->sessions > 0)
        return;
    HASH_DEL(agent->parties, party);
    kvf_free(party);
}

kvf_status kvf_party_join(kvf_session *session, const kvf_letter *letter) {
    kvf_agent *agent = session->agent;
    uint32_t most = letter->key ? agent->options.max_peers_per_key : SESSIONS_OF_A_CONNECTION;
    kvf_party *party = find_party(agent, letter);
    if (!party)
        return kvf_nomem("a session");
    if (party->sessions >= most) {
        agent->stats.over_budget++;
        return kvf_fail(KVF_E_LIMIT, "has %u sessions for this %s, the most it allows", most,
                        letter->key ? "key" : "connection");
    }
    party->sessions++;
    session->party = party;
    kvf_status status = kvf_budget_take(session, sizeof *session + session->key_bytes);
    if (status) {
        party->sessions--;
        session->party = NULL;
        drop_if_empty(agent, party);
    }
    return status;
}

void kvf_party_leave(kvf_session *session) {
    if (!session->party)
        return;
    kvf_budget_give(session, session->kept_bytes);
    session->party->sessions--;
    drop_if_empty(session->agent, session->party);
    session->party = NULL;
}

static bool is_unfair(const kvf_agent *agent, const kvf_party *party, uint64_t bytes) {
    const uint64_t all = agent->options.max_bytes_for_peers;
    return !kvf_is_fair(party->bytes, bytes, all - kvf_min_u64(agent->kept_bytes, all));
}

kvf_status kvf_budget_take(kvf_session *session, uint64_t bytes) {
    kvf_agent *agent = session->agent;
    const kvf_agent_options *options = &agent->options;
    kvf_party *party = session->party;
    bool alone = bytes > options->max_bytes_per_key - kvf_min_u64(party->bytes, options->max_bytes_per_key);
    if (alone || is_unfair(agent, party, bytes)) {
        agent->stats.over_budget++;
        kvf_claim_tell(agent, session->engine, session->rank,
                       alone ? "over budget: its key or connection uses as much memory here as it is allowed"
                             : TOGETHER);
        if (alone)
            return kvf_fail(KVF_E_LIMIT,
                            "this peer and the others with its key use %llu bytes here; allowed: up to %llu",
                            (unsigned long long)party->bytes, (unsigned long long)options->max_bytes_per_key);
        return kvf_fail(KVF_E_LIMIT,
                        "all peers use %llu bytes here, those with this key %llu; allowed: up to %llu in "
                        "all, and for one key no more than is left for the others",
                        (unsigned long long)agent->kept_bytes, (unsigned long long)party->bytes,
                        (unsigned long long)options->max_bytes_for_peers);
    }
    party->bytes += bytes;
    session->kept_bytes += bytes;
    agent->kept_bytes += bytes;
    return KVF_OK;
}

kvf_status kvf_budget_look(const kvf_session *session) {
    kvf_agent *agent = session->agent;
    if (agent->kept_bytes < agent->options.max_bytes_for_peers)
        return KVF_OK;
    agent->stats.over_budget++;
    kvf_claim_tell(agent, session->engine, session->rank, TOGETHER);
    return kvf_fail(KVF_E_LIMIT, "all peers use %llu bytes here; allowed: up to %llu",
                    (unsigned long long)agent->kept_bytes,
                    (unsigned long long)agent->options.max_bytes_for_peers);
}

void kvf_budget_give(kvf_session *session, uint64_t bytes) {
    if (!session->party)
        return;
    KVF_ASSERT(bytes <= session->kept_bytes && bytes <= session->party->bytes);
    session->kept_bytes -= bytes;
    session->party->bytes -= bytes;
    session->agent->kept_bytes -= bytes;
}

void kvf_budget_crowded(void *context, const char *detail) {
    kvf_claim_tell(context, "", KVF_NO_RANK, detail);
}

uint64_t kvf_budget_latest(const kvf_agent *agent, uint64_t now) {
    return kvf_add_or_most(now, agent->options.longest_ns);
}

uint64_t kvf_budget_silent_at(const kvf_session *session) {
    const kvf_agent_options *options = &session->agent->options;
    return session->last_heard + options->lease_ns + options->peer_timeout_ns;
}

static bool may_go(const kvf_session *session, uint64_t now) {
    return session->incoming && session->state == KVF_SESSION_OPEN && !session->flows && !session->readers &&
           !session->calls && session->early_count == 0 && now - session->last_used >= IN_USE_NS &&
           !kvf_session_carries(session);
}

/* Checks some sessions from the front, and moves those that stay to the end, so that the next call checks others. A
 * sweep under way takes them for visited, so another sweep must follow. */
void kvf_budget_make_room(kvf_agent *agent) {
    uint64_t now = kvf_agent_now(agent);
    kvf_sessions_due(agent);
    for (uint32_t i = 0; i < LOOKED_AT && agent->all_sessions; i++) {
        kvf_session *session = agent->all_sessions;
        DL_DELETE(agent->all_sessions, session);
        DL_APPEND(agent->all_sessions, session);
        if (!may_go(session, now))
            continue;
        agent->stats.peers_evicted++;
        session->agent->hooks->retire(session);
        return;
    }
}
