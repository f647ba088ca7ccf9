/*
 * Agents: opening and closing.
 */
#include <sodium.h>
#include <stdio.h>

#include "agent/arrival.h"
#include "agent/budget.h"
#include "agent/claim.h"
#include "agent/command.h"
#include "agent/early.h"
#include "agent/hear.h"
#include "agent/ledger.h"
#include "agent/past.h"
#include "agent/peers.h"
#include "agent/push.h"
#include "agent/stage.h"
#include "agent/summing.h"
#include "agent/trace.h"
#include "link/link_endpoint.h"
#include "port/door.h"
#include "wire/fields.h"

#include "transport/transport.h"

#define KVF_DAY (86400 * KVF_SECOND)
#define MOST_TRACED 65536u

static void on_peer_lost(void *context, kvf_transport *transport, kvf_peer *peer, const char *detail) {
    kvf_agent *agent = context;
    (void)transport;
    kvf_turn_take(agent); /* called while bytes move, without the lock */
    kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        if (session->peer == peer) {
            session->peer_lost = true; /* handled outside of the transport */
            session->peer_lives = kvf_peer_lives(peer);
            char *words = kvf_strdup(detail);
            kvf_free(session->broken_detail);
            session->broken_detail = words;
            agent->due = 0;
        }
    }
    (void)pthread_mutex_unlock(&agent->lock);
}

kvf_status kvf_agent_next_event(kvf_agent *agent, kvf_event *out) {
    if (!agent)
        return kvf_fail(KVF_E_INVALID, "agent is NULL");
    kvf_status status = kvf_check_out(out, "kvf_event");
    if (!status)
        status = kvf_agent_lock(agent);
    if (status)
        return status;
    bool found = kvf_event_take(agent, out);
    kvf_agent_unlock(agent);
    return found ? KVF_OK : kvf_fail(KVF_E_EMPTY, "there is no event");
}

/* ---- opening --------------------------------------------------------------------------------- */

static void take_default(uint64_t *value, uint64_t otherwise) {
    *value = *value ? *value : otherwise;
}

/* Times whose allowed ranges depend on the lease come after it. */
static kvf_status check_times(const kvf_agent_options *o) {
    const struct {
        const char *name;
        uint64_t ns, least, most;
        const char *range;
    } times[] = {{"lease_ns", o->lease_ns, KVF_SHORTEST_LEASE, KVF_DAY, "12 ms to a day"},
                 {"heartbeat_ns", o->heartbeat_ns, 0, o->lease_ns / 2, "up to half the lease"},
                 {"longest_ns", o->longest_ns, 2 * o->lease_ns, 365 * KVF_DAY, "from two leases to a year"},
                 {"idle_ns", o->idle_ns, 0, 365 * KVF_DAY, "up to a year"},
                 {"remember_ns", o->remember_ns, 0, KVF_DAY, "up to a day"},
                 {"peer_timeout_ns", o->peer_timeout_ns, 0, KVF_DAY, "up to a day"}};
    for (size_t i = 0; i < sizeof times / sizeof *times; i++)
        if (times[i].ns < times[i].least || times[i].ns > times[i].most)
            return kvf_fail(KVF_E_RANGE, "%s is %llu; allowed: %s (%llu to %llu)", times[i].name,
                            (unsigned long long)times[i].ns, times[i].range,
                            (unsigned long long)times[i].least, (unsigned long long)times[i].most);
    return KVF_OK;
}

static kvf_status take_agent_options(kvf_agent *agent, const kvf_agent_options *given) {
    kvf_agent_options *o = &agent->options;
    kvf_status status = kvf_take_options(o, sizeof *o, given, "kvf_agent_options");
    if (status)
        return status;
    take_default(&o->lease_ns, 30 * KVF_SECOND);
    take_default(&o->heartbeat_ns, o->lease_ns / 6 + 1);
    take_default(&o->peer_timeout_ns, 2 * KVF_SECOND);
    take_default(&o->idle_ns, 600 * KVF_SECOND);
    o->max_peers = o->max_peers ? o->max_peers : 65536;
    o->max_requests_per_peer = o->max_requests_per_peer ? o->max_requests_per_peer : 16384;
    o->max_peers_per_key = o->max_peers_per_key ? o->max_peers_per_key : 8192;
    o->max_connections = o->max_connections ? o->max_connections : 16384;
    take_default(&o->max_bytes_for_peers, 256ull << 20);
    take_default(&o->max_bytes_per_key, o->max_bytes_for_peers / 2);
    take_default(&o->longest_ns, kvf_max_u64(3600 * KVF_SECOND, 2 * o->lease_ns));
    if ((status = check_times(o)))
        return status;
    if (o->trace_requests > MOST_TRACED)
        return kvf_fail(KVF_E_RANGE, "trace_requests is %u; allowed: up to %u", o->trace_requests,
                        MOST_TRACED);
    if (o->way > KVF_WAY_PACKED)
        return kvf_fail(KVF_E_INVALID, "way is %d; allowed: 0 (auto), 1 (direct) and 2 (packed)",
                        (int)o->way);
    if (o->local_commands && (o->insecure || o->public_key || o->secret_key))
        return kvf_fail(KVF_E_INVALID,
                        "local_commands is set together with %s; allowed: without keys, on loopback",
                        o->insecure ? "insecure" : "keys, whose holders need a grant");
    o->log_level = o->log_level ? o->log_level : KVF_LOG_INFO;
    if (o->policy != KVF_FAILURE_RECOMPUTE && o->policy != KVF_FAILURE_FAIL)
        return kvf_fail(KVF_E_INVALID, "policy is %d; allowed: 0 (recompute) and 1 (fail)", (int)o->policy);
    /* Texts the agent keeps; those for the link are read while it opens. */
    const char **texts[] = {&o->advertise, &o->facts, &o->public_key, &o->transport};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        if (!*texts[i])
            continue;
        agent->texts[i] = kvf_strdup(*texts[i]);
        if (!agent->texts[i])
            return kvf_nomem("an agent");
        *texts[i] = agent->texts[i];
    }
    return KVF_OK;
}

static kvf_status open_link(kvf_agent *agent, const kvf_surroundings *around) {
    const kvf_agent_options *o = &agent->options;
    const char **keys = NULL;
    uint32_t key_count = 0;
    kvf_status status = kvf_grants_keys(o, &keys, &key_count);
    if (status)
        return status;
    kvf_link_options options = {.table = around->link,
                                .clock = &agent->clock,
                                .listen = o->listen,
                                .public_key = o->public_key,
                                .secret_key = o->secret_key,
                                .allowed_keys = keys,
                                .allowed_key_count = key_count,
                                .insecure = o->insecure,
                                .max_connections = o->max_connections,
                                .max_connections_per_address = o->max_connections_per_address,
                                .max_connections_per_second = o->max_connections_per_second,
                                .is_known = kvf_session_has_route,
                                .on_crowded = kvf_budget_crowded,
                                .on_message = kvf_on_message,
                                .on_broken = kvf_on_broken,
                                .context = agent};
    status = kvf_link_open(&options, &agent->link);
    kvf_free(keys);
    if (!status)
        status = kvf_grants_take(agent);
    if (status)
        return status;
    /* Peers need one address: the wildcard of all interfaces is none. */
    const char *told = kvf_agent_endpoint(agent);
    kvf_endpoint endpoint;
    status = told[0] ? kvf_endpoint_to_connect(told, &endpoint) : KVF_OK;
    return status ? kvf_fail_in(status,
                                "%s: ", o->advertise ? "advertise" : "advertise is needed with this listen")
                  : KVF_OK;
}

#define OWN_SETTINGS 7u
#define OWN_NUMBERS 4u
#define MESSAGES_SIXTEENTHS                                                                                  \
    4u /* of the process's descriptors: for connections of its messages, beside the link's */

/* The settings that the transport's messages share with the session's. */
typedef struct carriage {
    char listen[KVF_ENDPOINT_BYTES], advertise[KVF_ENDPOINT_BYTES];
    char numbers[OWN_NUMBERS][16];
    kvf_setting settings[OWN_SETTINGS];
    uint32_t number_count, count;
} carriage;

/* The host of an endpoint, with its brackets if it has them; "": no host. */
static void host_of(const char *endpoint, char out[KVF_ENDPOINT_BYTES]) {
    static const char scheme[] = "tcp://";
    const char *colon = strrchr(endpoint, ':');
    out[0] = '\0';
    if (strncmp(endpoint, scheme, sizeof scheme - 1) != 0)
        return;
    const char *host = endpoint + sizeof scheme - 1;
    if (colon > host)
        (void)snprintf(out, KVF_ENDPOINT_BYTES, "%.*s", (int)(colon - host), host);
}

static void add_setting(carriage *to, const char *key, const char *value) {
    to->settings[to->count++] = (kvf_setting){key, value};
}

static void add_number(carriage *to, const char *key, uint32_t number) {
    char *text = to->numbers[to->number_count++];
    (void)snprintf(text, sizeof to->numbers[0], "%u", number);
    add_setting(to, key, text);
}

/*
 * Messages of the transport use the settings of the session's: the same interface, the address that peers are told, the
 * same keys, as many connections, and no patience of its own: requests have deadlines. An agent that listens nowhere,
 * or on a path, has no interface: it uses all of them with keys, or if it was set to be insecure, and otherwise the
 * loopback.
 */
static void take_carriage(const kvf_agent *agent, bool simulated, carriage *out) {
    const kvf_agent_options *o = &agent->options;
    char host[KVF_ENDPOINT_BYTES];
    *out = (carriage){0};
    host_of(simulated ? "" : kvf_link_endpoint(agent->link), host);
    bool everywhere = host[0] ? strcmp(host, "0.0.0.0") == 0 || strcmp(host, "[::]") == 0
                              : !simulated && (o->secret_key || o->insecure);
    const char *chosen = everywhere ? "*" : host[0] ? host : "127.0.0.1";
    (void)snprintf(out->listen, sizeof out->listen, "tcp://%.*s:*", (int)(sizeof out->listen - 9), chosen);
    add_setting(out, "messages.listen", out->listen);
    host_of(o->advertise ? o->advertise : "", host);
    const size_t bracket = host[0] == '[' ? 1 : 0; /* an address is advertised without brackets */
    (void)snprintf(out->advertise, sizeof out->advertise, "%.*s", (int)(strlen(host) - 2 * bracket),
                   host + bracket);
    if (host[0] && !strchr(host, '%')) /* an interface's name means nothing elsewhere */
        add_setting(out, "messages.advertise", out->advertise);
    if (o->secret_key)
        add_setting(out, "messages.secret_key", o->secret_key);
    add_number(out, "messages.max_connections", kvf_door_most(o->max_connections, MESSAGES_SIXTEENTHS));
    if (o->max_connections_per_address)
        add_number(out, "messages.max_connections_per_address", o->max_connections_per_address);
    if (o->max_connections_per_second)
        add_number(out, "messages.max_connections_per_second", o->max_connections_per_second);
    const uint64_t patience = kvf_min_u64(o->longest_ns / KVF_MILLISECOND, UINT32_MAX); /* at least 24 ms */
    add_number(out, "messages.patience_ms", (uint32_t)patience);
}

/* The caller's settings come last, so they override ours. */
static kvf_status open_transport(kvf_agent *agent, const kvf_surroundings *around) {
    const kvf_agent_options *o = &agent->options;
    carriage own;
    if (o->setting_count > 0 && !o->settings)
        return kvf_fail(KVF_E_INVALID, "settings is NULL, but setting_count is %u", o->setting_count);
    take_carriage(agent, around->link != NULL, &own);
    kvf_setting *settings = kvf_alloc((size_t)o->setting_count + own.count, sizeof *settings);
    if (!settings)
        return kvf_nomem("an agent");
    memcpy(settings, own.settings, own.count * sizeof *settings);
    if (o->setting_count > 0)
        memcpy(settings + own.count, o->settings, o->setting_count * sizeof *settings);
    char name[KVF_ENDPOINT_NAME_BYTES];
    kvf_endpoint_name(name, agent->name, agent->rank, agent->incarnation);
    kvf_transport_options options = {.struct_size = sizeof options,
                                     .name = name,
                                     .settings = settings,
                                     .setting_count = own.count + o->setting_count,
                                     .on_notify = kvf_agent_notified,
                                     .on_peer_lost = on_peer_lost,
                                     .context = agent};
    kvf_status status = kvf_transport_open_over(around->fabric, o->transport, &options, &agent->transport);
    kvf_free(settings);
    return status;
}

static kvf_status find_group(const kvf_model *model, const char *name, uint32_t *out) {
    for (uint32_t g = 0; name && g < kvf_model_group_count(model); g++) {
        if (strcmp(kvf_model_group(model, g)->name, name) == 0) {
            *out = g;
            return KVF_OK;
        }
    }
    return kvf_fail(KVF_E_NOT_FOUND, "convert_groups: the model has no group \"%s\"", name ? name : "NULL");
}

/* What may be converted, group by group. */
static kvf_status take_convert(kvf_agent *agent) {
    kvf_agent_options *o = &agent->options;
    const kvf_model *model = kvf_engine_model(agent->engine);
    if (o->convert & ~KVF_CONVERTED_DTYPES)
        return kvf_fail(KVF_E_INVALID,
                        "convert is 0x%x; allowed: the bits of f32, f16, bf16, f8_e4m3 and f8_e5m2, 0x%x",
                        o->convert, KVF_CONVERTED_DTYPES);
    if (o->convert && o->way == KVF_WAY_DIRECT)
        return kvf_fail(KVF_E_INVALID, "convert is 0x%x, but way is direct; only packed transfers convert",
                        o->convert);
    if (o->convert_group_count > 0 && !o->convert_groups)
        return kvf_fail(KVF_E_INVALID, "convert_groups is NULL, and convert_group_count %u",
                        o->convert_group_count);
    agent->own_facts.convert = kvf_convert_sets(model, o->convert_groups ? 0 : o->convert);
    kvf_status status = agent->own_facts.convert ? KVF_OK : kvf_nomem("an agent");
    for (uint32_t i = 0; o->convert_groups && i < o->convert_group_count && !status; i++) {
        uint32_t g = 0;
        status = find_group(model, o->convert_groups[i], &g);
        if (!status)
            agent->own_facts.convert[g] = o->convert;
    }
    o->convert_groups = NULL; /* the caller's */
    return status;
}

static kvf_status check_name(const char *name) {
    const kvf_wire_field field = {
        .key = "the engine's name", .type = KVF_FIELD_NAME, .least = 1, .most = KVF_WIRE_MAX_NAME};
    return kvf_wire_field_check_text(&field, name, strlen(name), KVF_E_RANGE);
}

static kvf_status open_engine(kvf_agent *agent, const kvf_surroundings *around, const kvf_engine *engine,
                              uint32_t rank) {
    const kvf_agent_options *o = &agent->options;
    agent->engine = engine;
    agent->rank = rank;
    agent->rank_count = kvf_engine_rank_count(engine);
    if (rank >= agent->rank_count)
        return kvf_fail(KVF_E_RANGE, "rank is %u; engine %s has %u ranks", rank, kvf_engine_name(engine),
                        agent->rank_count);
    kvf_status status = check_name(kvf_engine_name(engine));
    if (status)
        return status;
    agent->shard = kvf_engine_shard(engine, rank);
    agent->name = kvf_strdup(kvf_engine_name(engine));
    agent->introductions = kvf_alloc0(agent->rank_count, sizeof *agent->introductions);
    if (!agent->name || !agent->introductions)
        return kvf_nomem("an agent");
    agent->own_facts =
        (kvf_facts){.model = kvf_model_retain(kvf_engine_model(engine)), .own = o->facts ? o->facts : ""};
    status = kvf_agent_check_stage(agent);
    if (!status)
        status = take_convert(agent);
    if (!status)
        status = kvf_wire_facts(kvf_engine_model(engine), agent->own_facts.convert, o->facts, &agent->facts);
    if (status)
        return status;
    kvf_wire_digest(agent->facts, agent->digest);
    status = kvf_ledger_create(agent->shard, &agent->ledger);
    if (status)
        return status;
    return open_transport(agent, around);
}

kvf_status kvf_agent_open(const kvf_engine *engine, uint32_t rank, const kvf_agent_options *options,
                          kvf_agent **out) {
    return kvf_agent_open_in(&(const kvf_surroundings){0}, engine, rank, options, out);
}

kvf_status kvf_agent_open_in(const kvf_surroundings *surroundings, const kvf_engine *engine, uint32_t rank,
                             const kvf_agent_options *options, kvf_agent **out) {
    if (!out)
        return kvf_fail(KVF_E_INVALID, "out is NULL");
    kvf_agent *agent = kvf_alloc0(1, sizeof *agent);
    if (!agent)
        return kvf_nomem("an agent");
    agent->hooks = &kvf_agent_hooks;
    agent->rank = KVF_NO_RANK;
    agent->clock = surroundings->clock ? *surroundings->clock : kvf_monotonic;
    agent->opened = kvf_agent_now(agent);
    kvf_status status = kvf_loop_open(agent, surroundings->fabric && surroundings->fabric->unwatched);
    if (!status && sodium_init() < 0)
        status = kvf_fail(KVF_E_UNSUPPORTED, "libsodium cannot be initialised");
    if (!status)
        status = take_agent_options(agent, options);
    if (!status) {
        randombytes_buf(agent->secret, sizeof agent->secret);
        randombytes_buf(agent->lease_key, sizeof agent->lease_key);
        agent->incarnation = kvf_wire_incarnation(agent->secret);
        status = open_link(agent, surroundings);
    }
    if (!status && engine)
        status = open_engine(agent, surroundings, engine, rank);
    if (!status)
        status = kvf_loop_start(agent);
    if (status) {
        kvf_agent_close(agent);
        return status;
    }
    *out = agent;
    return KVF_OK;
}

kvf_status kvf_agent_make_keys(char public_key[41], char secret_key[41]) {
    if (!public_key || !secret_key)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !public_key ? "public_key" : "secret_key");
    return kvf_link_make_keys(public_key, secret_key);
}

/* ---- cancelling and closing ------------------------------------------------------------------- */

kvf_status kvf_agent_cancel(kvf_agent *agent, uint64_t number) {
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    kvf_work_take(agent); /* to stop what moves */
    kvf_ticket *ticket = NULL;
    HASH_FIND(hh, agent->tickets, &number, sizeof number, ticket);
    if (!ticket || ticket->state == KVF_TICKET_OVER || ticket->silent)
        status = kvf_fail(KVF_E_NOT_FOUND, "no request has ticket %llu", (unsigned long long)number);
    else
        kvf_ticket_fail(ticket, KVF_E_CANCELLED, "cancelled by its engine", NULL);
    kvf_work_give(agent);
    kvf_agent_unlock(agent);
    return status;
}

static void free_tickets(kvf_agent *agent) {
    kvf_ticket *ticket, *next;
    HASH_ITER(hh, agent->tickets, ticket, next) {
        kvf_ticket_free(ticket);
    }
}

void kvf_agent_close(kvf_agent *agent) {
    if (!agent || agent->forks != kvf_fork_count())
        return; /* a child of fork() has nothing to end: threads and connections are the parent's */
    kvf_loop_stop(agent);
    /* First everything that moves; then the tickets it moves for; then the connections it uses. */
    kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        kvf_session_disconnect(session);
    }
    while (agent->flows)
        kvf_flow_free(agent->flows);
    free_tickets(agent);
    kvf_arrivals_close(agent);
    kvf_past_free(agent);
    kvf_commands_free(agent);
    kvf_traces_free(agent);
    while (agent->early)
        kvf_early_free(agent->early);
    while (agent->all_remotes)
        kvf_remote_free(agent->all_remotes);
    while (agent->all_sessions)
        kvf_session_free(agent->all_sessions);
    kvf_alarms_free(&agent->remote_times);
    kvf_alarms_free(&agent->session_times);
    kvf_peers_forget(agent);
    kvf_stage_close(agent->stage);
    kvf_summing_free(agent->summing);
    kvf_transport_close(agent->transport);
    kvf_link_close(agent->link);
    kvf_events_free(agent);
    kvf_ledger_free(agent->ledger);
    for (uint32_t i = 0; agent->introductions && i < agent->rank_count; i++)
        kvf_wire_buffer_free(&agent->introductions[i]);
    kvf_free(agent->introductions);
    kvf_wire_buffer_free(&agent->with_facts);
    for (size_t i = 0; i < sizeof agent->texts / sizeof *agent->texts; i++)
        kvf_free(agent->texts[i]);
    kvf_free(agent->after_polls);
    kvf_free(agent->regions);
    kvf_grants_free(agent);
    kvf_free(agent->refusals);
    kvf_free(agent->facts);
    kvf_facts_free(&agent->own_facts);
    kvf_free(agent->name);
    kvf_loop_close(agent);
    kvf_free(agent);
}
