/*
 * Grants, claims, and telling the engine about refused processes.
 */
#include <stdio.h>

#include "agent/claim.h"

/* ---- grants ---------------------------------------------------------------------------------- */

typedef struct kvf_grant {
    uint8_t key[KVF_KEY_BYTES];
    char *engine; /* NULL: any engine that no grant names */
    uint32_t rank_begin, rank_end;
    bool commands; /* instead of an engine */
} kvf_grant;

/* Elements are as far apart as the caller's kvf_key_grant is large. */
static const kvf_key_grant *grant_at(const kvf_key_grant *grants, uint32_t i) {
    return (const kvf_key_grant *)(const void *)((const char *)grants + i * grants->struct_size);
}

static kvf_status read_grant(const kvf_key_grant *given, kvf_grant *out) {
    kvf_key_grant grant;
    kvf_status status = kvf_take_options(&grant, sizeof grant, given, "kvf_key_grant");
    if (status)
        return status;
    if (!grant.public_key)
        return kvf_fail(KVF_E_INVALID, "public_key is NULL");
    status = kvf_link_read_key("public_key", grant.public_key, out->key);
    if (status)
        return status;
    if (grant.commands && (grant.engine || grant.rank_end > 0))
        return kvf_fail(KVF_E_INVALID,
                        "commands is set, and engine is %s; a grant of commands names no engine",
                        grant.engine ? grant.engine : "NULL with ranks");
    if (grant.rank_begin > grant.rank_end || (!grant.engine && grant.rank_end > 0))
        return kvf_fail(KVF_E_RANGE,
                        "ranks are [%u, %u) of engine %s; allowed: a range of ranks of a named engine",
                        grant.rank_begin, grant.rank_end, grant.engine ? grant.engine : "NULL");
    out->commands = grant.commands;
    out->rank_begin = grant.rank_begin;
    out->rank_end = grant.rank_end ? grant.rank_end : UINT32_MAX;
    out->engine = grant.engine ? kvf_strdup(grant.engine) : NULL;
    return grant.engine && !out->engine ? kvf_nomem("a grant") : KVF_OK;
}

static bool is_known(const kvf_agent *agent, const kvf_grant *grant) {
    for (uint32_t i = 0; i < agent->grant_count; i++) {
        const kvf_grant *known = &agent->grants[i];
        bool same_name = known->engine && grant->engine ? strcmp(known->engine, grant->engine) == 0
                                                        : known->engine == grant->engine;
        if (same_name && memcmp(known->key, grant->key, KVF_KEY_BYTES) == 0 &&
            known->rank_begin == grant->rank_begin && known->rank_end == grant->rank_end &&
            known->commands == grant->commands)
            return true;
    }
    return false;
}

static kvf_status add_grant(kvf_agent *agent, const kvf_key_grant *given) {
    kvf_grant read = {.engine = NULL};
    kvf_status status = read_grant(given, &read);
    if (status)
        return status;
    if (is_known(agent, &read)) {
        kvf_free(read.engine);
        return KVF_OK;
    }
    kvf_grant *grown = kvf_resize(agent->grants, (size_t)agent->grant_count + 1, sizeof *grown);
    if (!grown) {
        kvf_free(read.engine);
        return kvf_nomem("a grant");
    }
    agent->grants = grown;
    agent->grants[agent->grant_count++] = read;
    return KVF_OK;
}

kvf_status kvf_grants_take(kvf_agent *agent) {
    const kvf_agent_options *options = &agent->options;
    for (uint32_t i = 0; i < options->allowed_key_count; i++) {
        const kvf_key_grant any = {.struct_size = sizeof any, .public_key = options->allowed_keys[i]};
        kvf_status status = add_grant(agent, &any);
        if (status)
            return kvf_fail_in(status, "allowed_keys[%u]: ", i);
    }
    for (uint32_t i = 0; i < options->grant_count; i++) {
        kvf_status status = add_grant(agent, grant_at(options->grants, i));
        if (status)
            return kvf_fail_in(status, "grants[%u]: ", i);
    }
    return KVF_OK;
}

kvf_status kvf_grants_keys(const kvf_agent_options *options, const char ***keys, uint32_t *count) {
    if (options->grant_count > 0 && (!options->grants || options->grants->struct_size == 0))
        return kvf_fail(KVF_E_INVALID, "grants is %s, grant_count %u",
                        options->grants ? "without struct_size" : "NULL", options->grant_count);
    if (options->allowed_key_count > 0 && !options->allowed_keys)
        return kvf_fail(KVF_E_INVALID, "allowed_keys is NULL, allowed_key_count %u",
                        options->allowed_key_count);
    *keys = kvf_alloc((size_t)options->allowed_key_count + options->grant_count, sizeof **keys);
    if (!*keys)
        return kvf_nomem("grants");
    *count = 0;
    for (uint32_t i = 0; i < options->allowed_key_count; i++)
        (*keys)[(*count)++] = options->allowed_keys[i];
    for (uint32_t i = 0; i < options->grant_count; i++)
        (*keys)[(*count)++] = grant_at(options->grants, i)->public_key;
    return KVF_OK;
}

static void forget_grant(kvf_agent *agent, uint32_t i) {
    kvf_free(agent->grants[i].engine);
    agent->grants[i] = agent->grants[--agent->grant_count];
}

void kvf_grants_free(kvf_agent *agent) {
    while (agent->grant_count > 0)
        forget_grant(agent, 0);
    kvf_free(agent->grants);
    agent->grants = NULL;
}

/* A name that grants mention is reserved for the keys of those grants. */
static bool is_granted(const kvf_agent *agent, const uint8_t *key, const char *engine, uint32_t rank) {
    bool named = false;
    for (uint32_t i = 0; i < agent->grant_count; i++) {
        const kvf_grant *grant = &agent->grants[i];
        if (!grant->engine || strcmp(grant->engine, engine) != 0)
            continue;
        named = true;
        if (key && memcmp(grant->key, key, KVF_KEY_BYTES) == 0 && rank >= grant->rank_begin &&
            rank < grant->rank_end)
            return true;
    }
    bool restricted = false; /* the key has grants, and each names an engine, or is for commands */
    for (uint32_t i = 0; key && i < agent->grant_count; i++) {
        const kvf_grant *grant = &agent->grants[i];
        if (memcmp(grant->key, key, KVF_KEY_BYTES) != 0)
            continue;
        if (!grant->engine && !grant->commands)
            return !named;
        restricted = true;
    }
    return !named && !restricted;
}

static kvf_status grant_key(kvf_agent *agent, const kvf_key_grant *grant) {
    uint32_t count = agent->grant_count;
    kvf_status status = add_grant(agent, grant);
    if (status)
        return status;
    status = kvf_link_allow(agent->link, grant->public_key, true);
    if (status && agent->grant_count > count)
        forget_grant(agent, count);
    return status;
}

kvf_status kvf_agent_grant_key(kvf_agent *agent, const kvf_key_grant *grant) {
    if (!grant)
        return kvf_fail(KVF_E_INVALID, "grant is NULL");
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    status = grant_key(agent, grant);
    kvf_agent_unlock(agent);
    return status;
}

static void forget_grants_of(kvf_agent *agent, const char *public_key) {
    uint8_t key[KVF_KEY_BYTES];
    if (kvf_link_read_key("public_key", public_key, key))
        return;
    for (uint32_t i = agent->grant_count; i > 0; i--)
        if (memcmp(agent->grants[i - 1].key, key, sizeof key) == 0 && agent->grants[i - 1].engine == NULL)
            forget_grant(agent, i - 1);
}

kvf_status kvf_agent_withdraw_key(kvf_agent *agent, const char *public_key) {
    if (!public_key)
        return kvf_fail(KVF_E_INVALID, "public_key is NULL");
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    status = kvf_link_allow(agent->link, public_key, false);
    if (!status)
        forget_grants_of(agent, public_key);
    kvf_agent_unlock(agent);
    return status;
}

/* ---- claims ---------------------------------------------------------------------------------- */

kvf_status kvf_claim_check(kvf_agent *agent, const uint8_t *key, const kvf_hello *hello) {
    kvf_status status = KVF_OK;
    if (kvf_wire_incarnation(hello->secret) != hello->incarnation)
        status = kvf_fail(
            KVF_E_PERMISSION,
            "does not accept the greeting of rank %u of %s: its secret does not belong to its incarnation",
            hello->rank, hello->engine);
    else if (!is_granted(agent, key, hello->engine, hello->rank))
        status = kvf_fail(KVF_E_PERMISSION, "does not allow this key to speak for rank %u of %s", hello->rank,
                          hello->engine);
    return status;
}

kvf_status kvf_claim_command(const kvf_agent *agent, const uint8_t *key) {
    for (uint32_t i = 0; key && i < agent->grant_count; i++) {
        if (agent->grants[i].commands && memcmp(agent->grants[i].key, key, KVF_KEY_BYTES) == 0)
            return KVF_OK;
    }
    if (key)
        return kvf_fail(KVF_E_PERMISSION, "does not allow this key to give commands");
    return agent->options.local_commands
               ? KVF_OK
               : kvf_fail(KVF_E_PERMISSION,
                          "takes no commands without keys, because local_commands is not set");
}

static const uint8_t *name_of(const kvf_session *session, size_t *bytes) {
    *bytes = session->key_bytes - KVF_CLIENT_NAME_AT;
    return session->key + KVF_CLIENT_NAME_AT;
}

static kvf_session *find_holder(const kvf_agent *agent, const void *name, size_t bytes) {
    kvf_session *holder = NULL;
    HASH_FIND(hh_claim, agent->claims, name, bytes, holder);
    return holder;
}

static void on_probed(kvf_call *call, kvf_status status, const kvf_answer *answer) {
    kvf_session *session = call->session;
    session->probe = NULL;
    session->silent = answer == NULL && status == KVF_E_TIMEOUT;
    if (!status)
        session->alive_until = kvf_agent_now(session->agent) + session->agent->options.peer_timeout_ns;
}

static void probe(kvf_session *session, uint64_t now) {
    kvf_call_body body = {0};
    uint64_t end = now + session->agent->options.peer_timeout_ns;
    (void)kvf_call_start(session, KVF_CALL_PROBE, &body, end, false, on_probed, NULL, &session->probe);
}

kvf_status kvf_claim_look(kvf_agent *agent, const kvf_hello *hello) {
    kvf_session *holder = kvf_client_named(agent, hello->engine, hello->rank);
    uint64_t now = kvf_agent_now(agent);
    if (!holder)
        return KVF_OK;
    if (!holder->probe && !holder->silent && now >= holder->alive_until)
        probe(holder, now);
    if (holder->silent)
        return KVF_OK;
    if (now >= holder->alive_until)
        return kvf_fail(KVF_E_AGAIN,
                        "is checking whether the previous process of rank %u of %s is still alive",
                        hello->rank, hello->engine);
    return kvf_fail(KVF_E_PERMISSION, "knows another process as rank %u of %s, and that process is alive",
                    hello->rank, hello->engine);
}

kvf_status kvf_claim_take(kvf_session *session) {
    kvf_agent *agent = session->agent;
    size_t bytes;
    const uint8_t *name = name_of(session, &bytes);
    kvf_session *holder = find_holder(agent, name, bytes);
    if (holder) {
        agent->stats.peers_replaced++;
        holder->agent->hooks->retire(holder);
    }
    HASH_ADD_KEYPTR(hh_claim, agent->claims, name, bytes, session);
    return session->hh_claim.tbl ? KVF_OK : kvf_nomem("a session");
}

void kvf_claim_drop(kvf_session *session) {
    if (session->hh_claim.tbl)
        HASH_DELETE(hh_claim, session->agent->claims, session);
    memset(&session->hh_claim, 0, sizeof session->hh_claim);
}

bool kvf_claim_has_passed(const kvf_session *session) {
    size_t bytes;
    const uint8_t *name = name_of(session, &bytes);
    const kvf_session *holder = find_holder(session->agent, name, bytes);
    return holder && holder->incarnation != session->incarnation;
}

/* ---- telling --------------------------------------------------------------------------------- */

#define REMEMBERED 64u                 /* refusals; further ones in that time are only counted */
#define REMEMBER_NS (600 * KVF_SECOND) /* until the engine is told again */

typedef struct kvf_refusal {
    uint64_t time;
    char words[KVF_WIRE_MAX_NAME + 160]; /* rank, engine and reason */
} kvf_refusal;

void kvf_claim_tell(kvf_agent *agent, const char *engine, uint32_t rank, const char *detail) {
    kvf_refusal said = {.time = kvf_agent_now(agent)};
    (void)snprintf(said.words, sizeof said.words, "%u %s %.140s", rank, engine, detail);
    if (!agent->refusals && !(agent->refusals = kvf_alloc0(REMEMBERED, sizeof *agent->refusals)))
        return;
    kvf_refusal *place = NULL;
    for (uint32_t i = 0; i < REMEMBERED; i++) {
        kvf_refusal *known = &agent->refusals[i];
        bool old = !known->words[0] || said.time - known->time >= REMEMBER_NS;
        if (!old && strcmp(known->words, said.words) == 0)
            return;
        place = !place && old ? known : place;
    }
    if (!place)
        return;
    *place = said;
    kvf_event_peer(agent, KVF_EVENT_PEER_REFUSED, engine, rank, KVF_E_PERMISSION, detail);
}
