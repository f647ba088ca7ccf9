#include "agent/stage.h"

#include <stdio.h>
#include <stdlib.h>

#include "agent/claim.h"
#include "agent/peers.h"
#include "stage/ways.h"
#include "transport/transport.h"

/* ---- names ----------------------------------------------------------------------------------- */

void kvf_endpoint_name(char out[KVF_ENDPOINT_NAME_BYTES], const char *engine, uint32_t rank,
                       uint64_t incarnation) {
    (void)snprintf(out, KVF_ENDPOINT_NAME_BYTES, "%.200s#%u@%016llx", engine, rank,
                   (unsigned long long)incarnation);
}

static void name_of(const kvf_session *session, char out[KVF_ENDPOINT_NAME_BYTES]) {
    kvf_endpoint_name(out, session->engine, session->rank, session->incarnation);
}

/* ---- opening --------------------------------------------------------------------------------- */

/* The session of an endpoint's name, "engine#rank@incarnation"; NULL: none, or the name was cut. Peers can make many
 * sessions, and bad messages, so it is looked up. */
static const kvf_session *session_named(const kvf_agent *agent, const char *name) {
    const char *at = strrchr(name, '@'), *mark = at ? memrchr(name, '#', (size_t)(at - name)) : NULL;
    char own[KVF_ENDPOINT_NAME_BYTES];
    kvf_client_key key;
    kvf_session *session = NULL;
    const size_t bytes =
        mark ? kvf_client_key_of(strtoull(at + 1, NULL, 16), (uint32_t)strtoul(mark + 1, NULL, 10), name,
                                 (size_t)(mark - name), &key)
             : 0;
    if (bytes == 0)
        return NULL;
    HASH_FIND(hh_client, agent->clients, &key, bytes, session);
    if (!session)
        HASH_FIND(hh_client, agent->servers, &key.incarnation, sizeof key.incarnation, session);
    if (!session)
        return NULL;
    name_of(session, own);
    return strcmp(own, name) == 0 ? session : NULL;
}

static bool permit(void *context, const char *peer, const kvf_flow_request *request) {
    kvf_agent *agent = context;
    kvf_turn_take(agent);
    kvf_status status = agent->hooks->permit(agent, peer, request);
    (void)pthread_mutex_unlock(&agent->lock);
    if (status == KVF_E_CANCELLED)
        kvf_stage_refuse_with(agent->stage, status);
    return status == KVF_OK;
}

/* Data under way when a permission or a session ends is not the peer's fault; nor is a shortage on our side. */
static bool may_be_innocent(kvf_status status) {
    return status == KVF_E_PERMISSION || status == KVF_E_CANCELLED || status == KVF_E_NOT_FOUND ||
           status == KVF_E_TIMEOUT || status == KVF_E_NOMEM;
}

static void on_event(void *context, const char *peer, kvf_status status, const char *text) {
    kvf_agent *agent = context;
    char line[KVF_DETAIL_BYTES];
    (void)snprintf(line, sizeof line, "%s: %s", peer, text);
    kvf_turn_take(agent);
    agent->stats.flows_refused++;
    const kvf_session *session = session_named(agent, peer);
    if (session && !may_be_innocent(status))
        kvf_claim_tell(agent, session->engine, session->rank, text);
    else
        kvf_agent_log(agent, KVF_LOG_INFO, line);
    (void)pthread_mutex_unlock(&agent->lock);
}

static bool shows_devices(const kvf_agent *agent) {
    for (uint32_t i = 0; i < agent->region_count; i++)
        if (agent->regions[i].kind != KVF_MEMORY_HOST && !agent->regions[i].withheld)
            return true;
    return false;
}

/* Without a stage, memory of devices that peers are shown still goes directly, by fabrics that take it. */
static kvf_status do_without(kvf_agent *agent, kvf_status status) {
    if (!shows_devices(agent))
        return kvf_fail_in(status, "the stage: ");
    kvf_text line = {0};
    kvf_text_add(&line, "memory of devices does not go packed to peers that map none of it: %s",
                 kvf_error_detail());
    if (!line.failed)
        kvf_agent_log(agent, KVF_LOG_INFO, line.data);
    kvf_text_free(&line);
    return KVF_OK;
}

static void tell_of_arena(kvf_agent *agent, const char *words, const char *why) {
    kvf_text line = {0};
    if (!why)
        return;
    kvf_text_add(&line, "%s: %s", words, why);
    if (!line.failed)
        kvf_agent_log(agent, KVF_LOG_INFO, line.data);
    kvf_text_free(&line);
}

/* Says why packed bytes of a device go through the host's memory, or cannot, or through less of it. */
static void tell_of_arenas(kvf_agent *agent) {
    tell_of_arena(agent, "packed bytes of the device go through memory of the host",
                  kvf_stage_without_device(agent->stage));
    tell_of_arena(agent, "packed bytes of the device go only to peers that map memory of it",
                  kvf_stage_without_host(agent->stage));
    tell_of_arena(agent, "the arena in memory of the host is smaller than asked for (\"arena_bytes\")",
                  kvf_stage_short_of_host(agent->stage));
}

static kvf_stage_options stage_options(kvf_agent *agent) {
    const kvf_agent_options *o = &agent->options;
    return (kvf_stage_options){.struct_size = sizeof(kvf_stage_options),
                               .arena_bytes = o->arena_bytes,
                               .slot_bytes = o->slot_bytes,
                               .workers = o->workers,
                               .stall_ns = o->longest_ns, /* leases and deadlines end flows earlier */
                               .doubt_ns = o->lease_ns,
                               .permit = permit,
                               .on_event = on_event,
                               .context = agent,
                               .convert = agent->own_facts.convert,
                               .assumed_costs = o->assumed_costs,
                               .device_arena_bytes = o->device_arena_bytes,
                               .device_copy_bytes = o->device_copy_bytes};
}

kvf_status kvf_agent_check_stage(kvf_agent *agent) {
    const kvf_stage_options options = stage_options(agent);
    return agent->options.way == KVF_WAY_DIRECT ? KVF_OK : kvf_stage_check_options(&options);
}

kvf_status kvf_agent_open_stage(kvf_agent *agent) {
    if (agent->stage || agent->options.way == KVF_WAY_DIRECT || agent->region_count == 0)
        return KVF_OK;
    const kvf_stage_options options = stage_options(agent);
    kvf_transport_withhold_emulated(agent->transport, false); /* the arena is for peers */
    kvf_status status =
        kvf_stage_open_at(agent->transport, agent->shard, &options, &agent->clock, &agent->stage);
    if (status)
        return do_without(agent, status);
    tell_of_arenas(agent);
    return KVF_OK;
}

void kvf_agent_notified(void *context, kvf_transport *transport, const char *sender, const void *data,
                        size_t bytes) {
    kvf_agent *agent = context;
    (void)transport;
    (void)kvf_stage_notice(agent->stage, sender, data, bytes);
}

/* ---- sessions -------------------------------------------------------------------------------- */

/* A card with another name than the session's would let its sender answer in another's place. */
static void join_stage(kvf_session *session) {
    char name[KVF_ENDPOINT_NAME_BYTES];
    name_of(session, name);
    kvf_stage *stage = session->agent->stage;
    session->awaits_stage = false;
    if (stage && session->peer && strcmp(kvf_peer_name(session->peer), name) == 0)
        session->awaits_stage = /* if another session's peer has joined, it serves both */
            kvf_stage_join(stage, session->peer) == KVF_E_NOMEM;
}

kvf_status kvf_session_peer(kvf_session *session, kvf_peer **out) {
    KVF_ASSERT(kvf_work_is_ours(session->agent));
    if (!session->peer) {
        /* Consumers read from us, or we write to them. */
        const kvf_connect_hints hints = {
            .past = session->past, .past_why = session->past_why, .only_written = session->incoming};
        kvf_status status = kvf_transport_connect_knowing(session->agent->transport, session->card,
                                                          session->card_bytes, &hints, &session->peer);
        if (status)
            return kvf_fail_in(status, "%s rank %u: ", session->engine, session->rank);
        kvf_peer_served(session);
        session->awaits_stage = true;
    }
    if (session->awaits_stage)
        join_stage(session);
    *out = session->peer;
    return KVF_OK;
}

bool kvf_session_is_past(const kvf_session *session) {
    return session->past && session->peer && strcmp(session->past, kvf_peer_kind(session->peer)) == 0;
}

bool kvf_session_pass_over(kvf_session *session, const char *why) {
    if (kvf_session_is_past(session))
        return true;
    if (session->past || !session->agent->stage || !session->peer || kvf_peer_withholds(session->peer) ||
        !kvf_transport_is_split(session->agent->transport))
        return false;
    session->past = kvf_peer_kind(session->peer);
    session->past_why = kvf_strdup(why);
    return true;
}

kvf_status kvf_session_stage(kvf_session *session) {
    kvf_peer *peer;
    kvf_status status = kvf_session_peer(session, &peer);
    return !status && session->awaits_stage ? kvf_nomem("a peer of the stage") : status;
}

kvf_status kvf_endpoint_stop(kvf_agent *agent, const void *card, size_t bytes, bool until_it_has) {
    KVF_ASSERT(kvf_work_is_ours(agent));
    return kvf_transport_stop_endpoint(agent->transport, card, bytes, until_it_has);
}

uint64_t kvf_endpoint_late_ns(const kvf_agent *agent, const void *card, size_t bytes) {
    return kvf_transport_late_ns(agent->transport, card, bytes);
}

/* Whether nothing is under way here any more for a peer whose process has ended. The agents' link may notice the end
 * before the transport does, whose own copies for the peer may still be queued on a device. Where the transport cannot
 * tell, the end counts unless the transport itself said so: UCX and libfabric may still take in earlier data then. */
static bool is_outside(const kvf_session *session) {
    const kvf_status status = kvf_endpoint_stop(session->agent, session->card, session->card_bytes, false);
    return status == KVF_OK || (status == KVF_E_UNSUPPORTED && !session->peer_lost);
}

void kvf_session_disconnect(kvf_session *session) {
    kvf_agent *agent = session->agent;
    kvf_peer *peer = session->peer;
    session->peer = NULL;
    session->waits_told = false;
    if (!peer)
        return;
    KVF_ASSERT(kvf_work_is_ours(agent));
    char name[KVF_ENDPOINT_NAME_BYTES];
    name_of(session, name);
    bool was_mate = agent->stage && kvf_stage_peer_named(agent->stage, name) == peer;
    if (was_mate) {
        kvf_stage_each_read(agent->stage, peer, agent->hooks->left, agent);
        kvf_stage_leave(agent->stage, peer);
    }
    kvf_peer_part(peer);
    /* The connection to a living process may also be lost, and that process may still access memory lent to it. */
    if (was_mate && session->gone && is_outside(session))
        kvf_stage_quiet(agent->stage, name);
    kvf_session *other;
    if (!was_mate)
        return;
    DL_FOREACH(agent->all_sessions, other) {
        if (other->peer && other->incarnation == session->incarnation && other->rank == session->rank &&
            strcmp(other->engine, session->engine) == 0)
            join_stage(other);
    }
}

kvf_peer *kvf_session_mate(const kvf_session *session) {
    char name[KVF_ENDPOINT_NAME_BYTES];
    bool joined = session->incoming ? session->shape != NULL : session->joined;
    if (!session->agent->stage || !joined || !session->takes_flows)
        return NULL;
    name_of(session, name);
    return kvf_stage_peer_named(session->agent->stage, name);
}

void kvf_session_stop_reading(const kvf_session *session) {
    const kvf_peer *mate = kvf_session_mate(session);
    if (mate)
        kvf_stage_stop_reading(session->agent->stage, mate,
                               kvf_fail(KVF_E_PEER_LOST, "%s rank %u has forgotten the session",
                                        session->engine, session->rank));
}

bool kvf_session_carries(const kvf_session *session) {
    const kvf_stage *stage = session->agent->stage;
    return session->peer &&
           (kvf_peer_is_used(session->peer) || (stage && kvf_stage_peer_moves(stage, session->peer)));
}

bool kvf_session_goes_on(const kvf_session *session) {
    return session->agent->stage && session->peer &&
           kvf_stage_peer_goes_on(session->agent->stage, session->peer);
}

bool kvf_session_moves(const kvf_session *session) {
    return session->peer && (kvf_peer_is_used(session->peer) || kvf_session_goes_on(session));
}

bool kvf_session_takes_flows(const kvf_session *session) {
    char name[KVF_ENDPOINT_NAME_BYTES];
    name_of(session, name);
    return session->agent->stage && kvf_stage_peer_named(session->agent->stage, name);
}
