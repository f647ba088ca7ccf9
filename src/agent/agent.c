/*
 * Agents: opening and closing, making progress, and what the engine may look at.
 */
#include <errno.h>
#include <poll.h>
#include <sodium.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "agent/agent.h"
#include "agent/link_endpoint.h"

#include "plan/plan.h"
#include "transport/memory.h"

#define LONGEST_SLEEP (60 * KVF_SECOND)
#define KVF_DAY (86400 * KVF_SECOND)

void kvf_agent_lock(kvf_agent *agent) {
    (void)pthread_mutex_lock(&agent->lock);
}

void kvf_agent_unlock(kvf_agent *agent) {
    kvf_link_wake(agent->link);
    (void)pthread_mutex_unlock(&agent->lock);
}

/* ---- progress -------------------------------------------------------------------------------- */

static void on_peer_lost(void *context, kvf_transport *transport, kvf_peer *peer, const char *detail) {
    kvf_agent *agent = context;
    (void)transport;
    (void)detail; /* the transfers that this has ended bring it */
    kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        if (session->peer == peer) {
            session->peer_lost = true; /* seen to outside of the transport */
            agent->due = 0;
        }
    }
}

static void tick_ticket(kvf_ticket *ticket, uint64_t now) {
    switch (ticket->kind) {
    case KVF_REQUEST_HOLD:
        kvf_hold_tick(ticket, now);
        break;
    case KVF_REQUEST_PULL:
        kvf_pull_tick(ticket, now);
        break;
    case KVF_REQUEST_PUSH:
        kvf_push_tick(ticket, now);
        break;
    case KVF_REQUEST_EXPECT:
        kvf_expect_tick(ticket, now);
        break;
    case KVF_REQUEST_CONNECT:
    case KVF_REQUEST_NONE:
        kvf_connect_tick(ticket, now);
        break;
    }
}

static void tick(kvf_agent *agent, uint64_t now) {
    agent->due = UINT64_MAX;
    kvf_sessions_tick(agent, now);
    kvf_early_tick(agent, now);
    kvf_flows_tick(agent, now);
    kvf_ticket *ticket, *next;
    HASH_ITER(hh, agent->tickets, ticket, next) {
        if (ticket->state != KVF_TICKET_OVER)
            tick_ticket(ticket, now);
    }
    kvf_remotes_tick(agent, now);
}

/* What a process does first when it wakes from a long stop is to give up what it may not write any more. */
static void stop_late_flows(kvf_agent *agent, uint64_t now) {
    kvf_flow *flow, *next;
    DL_FOREACH_SAFE2(agent->moving_flows, flow, next, moving_next) {
        if (now >= flow->until)
            kvf_flow_tick(flow, now);
    }
}

static void look_at_transfers(kvf_agent *agent) {
    kvf_ticket *pull, *next_pull;
    DL_FOREACH_SAFE2(agent->moving_pulls, pull, next_pull, moving_next) {
        kvf_pull_look(pull);
    }
    kvf_flow *flow, *next_flow;
    DL_FOREACH_SAFE2(agent->moving_flows, flow, next_flow, moving_next) {
        kvf_flow_move(flow);
    }
}

/* One round; true when another would find something to do. */
static bool work(kvf_agent *agent) {
    bool more = false, busy = false;
    agent->again = false;
    stop_late_flows(agent, kvf_now());
    kvf_link_progress(agent->link, &more);
    if (agent->transport)
        (void)kvf_transport_progress(agent->transport, &busy);
    look_at_transfers(agent);
    uint64_t now = kvf_now();
    if (now >= agent->due)
        tick(agent, now);
    while (agent->over)
        kvf_ticket_free(agent->over);
    return more || busy || agent->again || agent->due <= now || kvf_link_pending(agent->link);
}

kvf_status kvf_agent_progress(kvf_agent *agent, bool *busy) {
    if (!agent)
        return kvf_fail(KVF_E_INVALID, "agent is NULL");
    kvf_agent_lock(agent);
    bool more = work(agent);
    kvf_agent_unlock(agent);
    if (busy)
        *busy = more;
    return KVF_OK;
}

/* Sleeps, without the lock, until something happens or `until`. Called with the lock; returns with it. */
static void sleep_until(kvf_agent *agent, uint64_t until) {
    uint64_t now = kvf_now();
    uint64_t end = kvf_min_u64(kvf_min_u64(until, agent->due), now + LONGEST_SLEEP);
    int fd = agent->transport ? kvf_transport_event_fd(agent->transport) : -1;
    kvf_link *link = agent->link;
    (void)pthread_mutex_unlock(&agent->lock);
    if (end > now)
        kvf_link_wait(link, &fd, fd >= 0 ? 1 : 0, end - now);
    (void)pthread_mutex_lock(&agent->lock);
}

static void *run(void *context) {
    kvf_agent *agent = context;
    (void)pthread_mutex_lock(&agent->lock);
    while (!agent->stopping) {
        if (work(agent)) {
            /* Others may have something to say between two rounds. */
            (void)pthread_mutex_unlock(&agent->lock);
            (void)pthread_mutex_lock(&agent->lock);
        } else {
            sleep_until(agent, UINT64_MAX);
        }
    }
    (void)pthread_mutex_unlock(&agent->lock);
    return NULL;
}

static kvf_status wait_for_event(kvf_agent *agent, uint64_t timeout_ns) {
    struct pollfd fd = {.fd = agent->event_fd, .events = POLLIN};
    uint64_t end = kvf_now() + kvf_min_u64(timeout_ns, UINT64_MAX / 4);
    for (;;) {
        uint64_t now = kvf_now();
        uint64_t left = end > now ? (end - now + KVF_MILLISECOND - 1) / KVF_MILLISECOND : 0;
        int ready = poll(&fd, 1, (int)kvf_min_u64(left, 1000000));
        if (ready > 0)
            return KVF_OK;
        if (ready < 0 && errno != EINTR)
            return kvf_fail(KVF_E_IO, "poll: %s", strerror(errno));
        if (kvf_now() >= end)
            return kvf_fail(KVF_E_TIMEOUT, "no event came");
    }
}

kvf_status kvf_agent_wait(kvf_agent *agent, uint64_t timeout_ns) {
    if (!agent)
        return kvf_fail(KVF_E_INVALID, "agent is NULL");
    if (agent->thread_runs)
        return wait_for_event(agent, timeout_ns);
    kvf_agent_lock(agent);
    uint64_t now = kvf_now(), end;
    if (!kvf_add(now, timeout_ns, &end))
        end = UINT64_MAX;
    while (!agent->events) {
        if (kvf_now() >= end)
            break;
        if (!work(agent) && !agent->events)
            sleep_until(agent, end);
    }
    bool found = agent->events != NULL;
    kvf_agent_unlock(agent);
    return found ? KVF_OK : kvf_fail(KVF_E_TIMEOUT, "no event came");
}

kvf_status kvf_agent_next_event(kvf_agent *agent, kvf_event *out) {
    if (!agent || !out)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !agent ? "agent" : "out");
    kvf_agent_lock(agent);
    bool found = kvf_event_take(agent, out);
    kvf_agent_unlock(agent);
    return found ? KVF_OK : kvf_fail(KVF_E_AGAIN, "no event is there");
}

int kvf_agent_event_fd(kvf_agent *agent) {
    return agent ? agent->event_fd : -1;
}

/* ---- opening --------------------------------------------------------------------------------- */

static void take_default(uint64_t *value, uint64_t otherwise) {
    *value = *value ? *value : otherwise;
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
    if (o->lease_ns > KVF_DAY || o->idle_ns > 365 * KVF_DAY)
        return kvf_fail(KVF_E_RANGE, "lease_ns is %llu and idle_ns %llu; allowed are up to a day and a year",
                        (unsigned long long)o->lease_ns, (unsigned long long)o->idle_ns);
    if (o->heartbeat_ns > o->lease_ns / 2)
        return kvf_fail(KVF_E_RANGE, "heartbeat_ns is %llu; allowed is up to half the lease, %llu",
                        (unsigned long long)o->heartbeat_ns, (unsigned long long)(o->lease_ns / 2));
    if (o->policy != KVF_FAILURE_RECOMPUTE && o->policy != KVF_FAILURE_FAIL)
        return kvf_fail(KVF_E_INVALID, "policy is %d; allowed 0 (recompute) and 1 (fail)", (int)o->policy);
    /* Texts the agent keeps; those for the link are read while it opens. */
    const char **texts[] = {&o->advertise, &o->facts, &o->public_key};
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

static kvf_status open_link(kvf_agent *agent, const kvf_agent_options *o) {
    kvf_link_options options = {.listen = o->listen,
                                .public_key = o->public_key,
                                .secret_key = o->secret_key,
                                .allowed_keys = o->allowed_keys,
                                .allowed_key_count = o->allowed_key_count,
                                .insecure = o->insecure,
                                .on_message = kvf_on_message,
                                .on_broken = kvf_on_broken,
                                .context = agent};
    kvf_status status = kvf_link_open(&options, &agent->link);
    if (status)
        return status;
    /* Peers are told one address: that of all interfaces is none. */
    const char *told = kvf_agent_endpoint(agent);
    kvf_endpoint endpoint;
    status = told[0] ? kvf_endpoint_to_connect(told, &endpoint) : KVF_OK;
    return status ? kvf_fail_in(status,
                                "%s: ", o->advertise ? "advertise" : "advertise is needed with this listen")
                  : KVF_OK;
}

static kvf_status open_engine(kvf_agent *agent, const kvf_engine *engine, uint32_t rank) {
    const kvf_agent_options *o = &agent->options;
    agent->engine = engine;
    agent->rank = rank;
    agent->rank_count = kvf_engine_rank_count(engine);
    if (rank >= agent->rank_count)
        return kvf_fail(KVF_E_RANGE, "rank is %u; engine %s has %u ranks", rank, kvf_engine_name(engine),
                        agent->rank_count);
    agent->shard = kvf_engine_shard(engine, rank);
    agent->name = kvf_strdup(kvf_engine_name(engine));
    agent->introductions = kvf_alloc0(agent->rank_count, sizeof *agent->introductions);
    if (!agent->name || !agent->introductions)
        return kvf_nomem("an agent");
    kvf_status status = kvf_wire_facts(kvf_engine_model(engine), o->facts, &agent->facts);
    if (status)
        return status;
    kvf_wire_digest(agent->facts, agent->digest);
    status = kvf_ledger_create(agent->shard, &agent->ledger);
    if (status)
        return status;
    kvf_transport_options options = {.struct_size = sizeof options,
                                     .name = agent->name,
                                     .settings = o->settings,
                                     .setting_count = o->setting_count,
                                     .on_peer_lost = on_peer_lost,
                                     .context = agent};
    return kvf_transport_open(o->transport, &options, &agent->transport);
}

kvf_status kvf_agent_open(const kvf_engine *engine, uint32_t rank, const kvf_agent_options *options,
                          kvf_agent **out) {
    if (!out)
        return kvf_fail(KVF_E_INVALID, "out is NULL");
    kvf_agent *agent = kvf_alloc0(1, sizeof *agent);
    if (!agent)
        return kvf_nomem("an agent");
    (void)pthread_mutex_init(&agent->lock, NULL);
    agent->due = UINT64_MAX;
    agent->rank = KVF_NO_RANK;
    agent->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    kvf_status status = KVF_OK;
    if (agent->event_fd < 0)
        status = kvf_fail(KVF_E_IO, "eventfd: %s", strerror(errno));
    if (!status && sodium_init() < 0)
        status = kvf_fail(KVF_E_UNSUPPORTED, "libsodium cannot be initialised");
    if (!status)
        status = take_agent_options(agent, options);
    if (!status) {
        randombytes_buf(&agent->incarnation, sizeof agent->incarnation);
        status = open_link(agent, &agent->options);
    }
    if (!status && engine)
        status = open_engine(agent, engine, rank);
    if (!status && agent->options.own_thread) {
        agent->thread_runs = pthread_create(&agent->thread, NULL, run, agent) == 0;
        if (!agent->thread_runs)
            status = kvf_fail(KVF_E_IO, "pthread_create failed");
    }
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

static kvf_status needs_memory(const kvf_agent *agent) {
    if (!agent)
        return kvf_fail(KVF_E_INVALID, "agent is NULL");
    return agent->transport ? KVF_OK : kvf_fail(KVF_E_INVALID, "the agent is a directory: it has no memory");
}

kvf_status kvf_agent_allocate(kvf_agent *agent, uint64_t bytes, void **out) {
    kvf_status status = needs_memory(agent);
    if (status)
        return status;
    kvf_agent_lock(agent);
    status = kvf_transport_allocate(agent->transport, KVF_MEMORY_HOST, 0, bytes, out);
    kvf_agent_unlock(agent);
    return status;
}

/* Two of them: peers have facts of their own, and are spared ours. */
static kvf_status introduce_self(kvf_agent *agent) {
    kvf_wire_buffer shard = {0};
    kvf_status status = kvf_wire_encode_shard(agent->shard, &shard);
    if (status)
        return status;
    const kvf_agent_options *o = &agent->options;
    kvf_introduction intro = {.engine = agent->name,
                              .incarnation = agent->incarnation,
                              .rank = agent->rank,
                              .rank_count = agent->rank_count,
                              .endpoint = kvf_agent_endpoint(agent),
                              .public_key = o->public_key ? o->public_key : "",
                              .shard = {shard.data, shard.size},
                              .facts = agent->facts};
    memcpy(intro.digest, agent->digest, sizeof intro.digest);
    status = kvf_wire_encode_introduction(&intro, &agent->with_facts);
    intro.facts = "";
    if (!status)
        status = kvf_wire_encode_introduction(&intro, &agent->introductions[agent->rank]);
    kvf_wire_buffer_free(&shard);
    agent->introduction_count += !status;
    return status;
}

/* The shard's regions must be there, and as large as it says: peers compute with them. */
static kvf_status check_regions(const kvf_shard_desc *shard, const kvf_memory *regions, uint32_t count) {
    if (!regions || count != shard->region_count)
        return kvf_fail(KVF_E_INVALID, "count is %u regions; the shard of rank %u has %u", count, shard->rank,
                        shard->region_count);
    kvf_status status = kvf_memory_check(regions, count, "register");
    if (status)
        return status;
    for (uint32_t i = 0; i < count; i++)
        if (kvf_memory_at(regions, i)->bytes < shard->region_bytes[i])
            return kvf_fail(KVF_E_RANGE, "region %u has %llu bytes; the shard of rank %u needs %llu", i,
                            (unsigned long long)kvf_memory_at(regions, i)->bytes, shard->rank,
                            (unsigned long long)shard->region_bytes[i]);
    return KVF_OK;
}

static kvf_status register_regions(kvf_agent *agent, const kvf_memory *regions, uint32_t count) {
    if (agent->card)
        return kvf_fail(KVF_E_EXISTS, "the agent has its memory registered already");
    kvf_status status = check_regions(kvf_shard_get(agent->shard), regions, count);
    kvf_memory *copy = status ? NULL : kvf_copy(regions, count, regions->struct_size);
    if (!status && !copy)
        status = kvf_nomem("an agent");
    if (!status)
        status = kvf_transport_register(agent->transport, regions, count);
    if (status) {
        kvf_free(copy);
        return status;
    }
    agent->regions = copy;
    agent->region_count = count;
    const void *card;
    size_t bytes;
    status = kvf_transport_export(agent->transport, &card, &bytes);
    if (!status)
        status = introduce_self(agent);
    if (!status) {
        agent->card_bytes = bytes;
        agent->card = card;
    }
    return status;
}

kvf_status kvf_agent_register(kvf_agent *agent, const kvf_memory *regions, uint32_t count) {
    kvf_status status = needs_memory(agent);
    if (status)
        return status;
    kvf_agent_lock(agent);
    status = register_regions(agent, regions, count);
    kvf_agent_unlock(agent);
    return status;
}

/* ---- meeting --------------------------------------------------------------------------------- */

const char *kvf_agent_endpoint(const kvf_agent *agent) {
    if (!agent)
        return "";
    return agent->options.advertise ? agent->options.advertise : kvf_link_endpoint(agent->link);
}

kvf_status kvf_agent_introduction(kvf_agent *agent, const void **bytes, size_t *size) {
    if (!agent || !bytes || !size)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !agent ? "agent" : !bytes ? "bytes" : "size");
    kvf_agent_lock(agent);
    kvf_status status = KVF_OK;
    if (!agent->card)
        status = kvf_fail(KVF_E_INVALID, "the agent has no memory registered; see kvf_agent_register()");
    else {
        *bytes = agent->with_facts.data;
        *size = agent->with_facts.size;
    }
    kvf_agent_unlock(agent);
    return status;
}

/* A directory takes its engine's name, size, digest and facts from the first introduction. */
static kvf_status adopt(kvf_agent *agent, const kvf_introduction *intro) {
    if (agent->name)
        return KVF_OK;
    uint8_t digest[KVF_WIRE_DIGEST_BYTES];
    kvf_wire_digest(intro->facts, digest);
    if (intro->facts[0] && memcmp(digest, intro->digest, sizeof digest) != 0)
        return kvf_fail(KVF_E_MISMATCH, "the digest of rank %u of %s is not of its facts", intro->rank,
                        intro->engine);
    if (!agent->facts && !(agent->facts = kvf_strdup(intro->facts)))
        return kvf_nomem("a directory");
    agent->introductions = kvf_alloc0(intro->rank_count, sizeof *agent->introductions);
    agent->name = agent->introductions ? kvf_strdup(intro->engine) : NULL;
    if (!agent->name)
        return kvf_nomem("a directory");
    agent->rank_count = intro->rank_count;
    memcpy(agent->digest, intro->digest, sizeof agent->digest);
    return KVF_OK;
}

static kvf_status introduce(kvf_agent *agent, kvf_introduction *intro) {
    kvf_status status = adopt(agent, intro);
    if (status)
        return status;
    if (strcmp(intro->engine, agent->name) != 0 || intro->rank_count != agent->rank_count)
        return kvf_fail(KVF_E_MISMATCH, "the introduction is of engine %s with %u ranks, not %s with %u",
                        intro->engine, intro->rank_count, agent->name, agent->rank_count);
    if (memcmp(intro->digest, agent->digest, sizeof agent->digest) != 0)
        return kvf_fail(KVF_E_MISMATCH, "rank %u of %s caches other cells than its siblings", intro->rank,
                        intro->engine);
    if (agent->engine && intro->rank == agent->rank)
        return intro->incarnation == agent->incarnation
                   ? KVF_OK
                   : kvf_fail(KVF_E_EXISTS, "another process says it is rank %u of %s", intro->rank,
                              intro->engine);
    kvf_wire_buffer passed_on = {0};
    intro->facts = "";
    status = kvf_wire_encode_introduction(intro, &passed_on);
    if (status)
        return status;
    kvf_wire_buffer *place = &agent->introductions[intro->rank];
    agent->introduction_count += place->size == 0;
    kvf_wire_buffer_free(place);
    *place = passed_on;
    return KVF_OK;
}

kvf_status kvf_agent_introduce(kvf_agent *agent, const void *data, size_t size) {
    if (!agent || !data)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !agent ? "agent" : "bytes");
    kvf_introduction intro;
    void *storage = NULL;
    kvf_status status = kvf_wire_decode_introduction((kvf_bytes){data, size}, &intro, &storage);
    if (status)
        return status;
    kvf_agent_lock(agent);
    status = introduce(agent, &intro);
    kvf_agent_unlock(agent);
    kvf_free(storage);
    return status;
}

static kvf_status start_connect(kvf_agent *agent, const kvf_contact *contact, uint64_t deadline_ns,
                                uint64_t *out) {
    if (!agent->card)
        return kvf_fail(KVF_E_INVALID, "the agent has no memory registered; see kvf_agent_register()");
    kvf_agent_request request = {.contact = *contact,
                                 .deadline_ns = deadline_ns ? deadline_ns : 30 * KVF_SECOND};
    kvf_ticket *ticket;
    kvf_status status = kvf_ticket_make(agent, KVF_REQUEST_CONNECT, &request, &ticket);
    return status ? status : kvf_ticket_meet(ticket, contact, out);
}

kvf_status kvf_agent_connect(kvf_agent *agent, const kvf_contact *contact, uint64_t deadline_ns,
                             uint64_t *ticket) {
    if (!agent || !contact)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !agent ? "agent" : "contact");
    kvf_agent_lock(agent);
    kvf_status status = start_connect(agent, contact, deadline_ns, ticket);
    kvf_agent_unlock(agent);
    return status;
}

kvf_status kvf_agent_cancel(kvf_agent *agent, uint64_t number) {
    if (!agent)
        return kvf_fail(KVF_E_INVALID, "agent is NULL");
    kvf_agent_lock(agent);
    kvf_ticket *ticket = NULL;
    HASH_FIND(hh, agent->tickets, &number, sizeof number, ticket);
    kvf_status status = KVF_OK;
    if (!ticket || ticket->state == KVF_TICKET_OVER || ticket->silent)
        status = kvf_fail(KVF_E_NOT_FOUND, "no request has ticket %llu", (unsigned long long)number);
    else
        kvf_ticket_fail(ticket, KVF_E_CANCELLED, "cancelled by its engine", NULL);
    kvf_agent_unlock(agent);
    return status;
}

/* ---- closing --------------------------------------------------------------------------------- */

static void free_tickets(kvf_agent *agent) {
    kvf_ticket *ticket, *next;
    HASH_ITER(hh, agent->tickets, ticket, next) {
        while (ticket->readers)
            kvf_reader_drop(ticket->readers);
        while (ticket->flows)
            kvf_flow_free(ticket->flows);
        kvf_ticket_free(ticket);
    }
}

void kvf_agent_close(kvf_agent *agent) {
    if (!agent)
        return;
    if (agent->thread_runs) {
        kvf_agent_lock(agent);
        agent->stopping = true;
        kvf_agent_unlock(agent);
        (void)pthread_join(agent->thread, NULL);
    }
    /* First everything that moves; then who wanted it; then the ways it took. */
    kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        kvf_peer_close(session->peer);
        session->peer = NULL;
    }
    while (agent->flows)
        kvf_flow_free(agent->flows);
    free_tickets(agent);
    while (agent->early)
        kvf_early_free(agent->early);
    while (agent->all_remotes)
        kvf_remote_free(agent->all_remotes);
    while (agent->all_sessions)
        kvf_session_free(agent->all_sessions);
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
    kvf_free(agent->regions);
    kvf_free(agent->facts);
    kvf_free(agent->name);
    if (agent->event_fd >= 0)
        (void)close(agent->event_fd);
    (void)pthread_mutex_destroy(&agent->lock);
    kvf_free(agent);
}

/* ---- looking in ------------------------------------------------------------------------------ */

static bool has_block(const kvf_ticket *ticket, uint32_t group, uint32_t block) {
    if (!ticket->claims)
        return false;
    const kvf_block_table *table = &ticket->claims[group];
    for (uint32_t i = 0; i < table->count; i++)
        if (table->ids[i] == block)
            return true;
    return false;
}

kvf_status kvf_agent_block(kvf_agent *agent, uint32_t group, uint32_t block, kvf_block_state *state,
                           uint32_t *requests) {
    kvf_status status = needs_memory(agent);
    if (status)
        return status;
    if (!state)
        return kvf_fail(KVF_E_INVALID, "state is NULL");
    kvf_agent_lock(agent);
    kvf_ledger_entry entry;
    status = kvf_ledger_look(agent->ledger, group, block, &entry);
    uint32_t count = 0;
    bool leased = false;
    kvf_ticket *ticket, *next;
    if (!status)
        HASH_ITER(hh, agent->tickets, ticket, next) {
            bool has = has_block(ticket, group, block);
            count += has;
            leased |= has && ticket->readers;
        }
    kvf_agent_unlock(agent);
    if (status)
        return status;
    *state = entry.state == KVF_BLOCK_HELD && leased ? KVF_BLOCK_LEASED : entry.state;
    if (requests)
        *requests = count;
    return KVF_OK;
}

static uint64_t kept_for_peers(const kvf_agent *agent) {
    uint64_t bytes = 0;
    const kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        bytes += sizeof *session + session->card_bytes + session->reader_count * sizeof(kvf_reader) +
                 session->flow_count * sizeof(kvf_flow) + session->early_count * sizeof(kvf_early);
    }
    const kvf_remote *remote;
    DL_FOREACH(agent->all_remotes, remote) {
        bytes += sizeof *remote + remote->rank_count * sizeof *remote->ranks;
        if (remote->plan)
            bytes += kvf_plan_memory_bytes(remote->plan);
    }
    return bytes;
}

kvf_status kvf_agent_get_stats(kvf_agent *agent, kvf_agent_stats *out) {
    if (!agent || !out || out->struct_size == 0)
        return kvf_fail(KVF_E_INVALID, "%s",
                        !agent ? "agent is NULL"
                        : !out ? "stats is NULL"
                               : "struct_size is 0");
    kvf_agent_lock(agent);
    kvf_agent_stats stats = agent->stats;
    const kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        stats.peers_now++;
    }
    if (agent->ledger) {
        kvf_ledger_counts counts = kvf_ledger_count(agent->ledger);
        stats.blocks_held_now = counts.held;
        stats.blocks_filling_now = counts.filling;
        stats.blocks_in_doubt_now = counts.in_doubt;
    }
    stats.memory_now_bytes = kept_for_peers(agent);
    kvf_agent_unlock(agent);
    stats.struct_size = out->struct_size;
    memcpy(out, &stats, out->struct_size < sizeof stats ? out->struct_size : sizeof stats);
    return KVF_OK;
}

kvf_status kvf_agent_clock_offset(kvf_agent *agent, const char *engine, uint32_t rank, int64_t *offset_ns,
                                  uint64_t *error_ns) {
    if (!agent || !engine || !offset_ns || !error_ns)
        return kvf_fail(KVF_E_INVALID, "an argument is NULL");
    kvf_agent_lock(agent);
    kvf_status status = kvf_fail(KVF_E_NOT_FOUND, "no session with rank %u of %s", rank, engine);
    const kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        if (session->rank != rank || session->clock_error == UINT64_MAX ||
            strcmp(session->engine, engine) != 0)
            continue;
        *offset_ns = session->clock_offset;
        *error_ns = session->clock_error;
        status = KVF_OK;
    }
    kvf_agent_unlock(agent);
    return status;
}
