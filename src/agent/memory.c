/*
 * The memory of an agent: allocating it, and registering its regions, together or one by one.
 *
 * Peers are served while every region of the shard is registered: then there is a card. When a region is unregistered,
 * earlier cards become invalid. Each session of a peer that has one gets another id, so that the peer is told that the
 * old id is unknown, greets again, and takes the new card. Peers that we sent our card for writing are sent the next.
 */
#include <sodium.h>
#include <stdio.h>

#include "agent/stage.h"
#include "agent/summing.h"
#include "agent/ticket.h"
#include "request/request.h"
#include "shard/shard.h"
#include "transport/memory.h"
#include "transport/transport.h"

kvf_status kvf_agent_needs_memory(const kvf_agent *agent) {
    if (!agent)
        return kvf_fail(KVF_E_INVALID, "agent is NULL");
    return agent->transport ? KVF_OK : kvf_fail(KVF_E_INVALID, "the agent is a directory: it has no memory");
}

/* Enters an agent that has memory, and takes its work: nothing moves meanwhile. */
static kvf_status enter(kvf_agent *agent) {
    kvf_status status = kvf_agent_needs_memory(agent);
    if (!status)
        status = kvf_agent_lock(agent);
    if (!status)
        kvf_work_take(agent);
    return status;
}

static void leave(kvf_agent *agent) {
    kvf_work_give(agent);
    kvf_agent_unlock(agent);
}

kvf_status kvf_agent_allocate(kvf_agent *agent, kvf_memory_kind kind, uint32_t device, uint64_t bytes,
                              void **out) {
    kvf_status status = enter(agent);
    if (status)
        return status;
    status = kvf_transport_allocate(agent->transport, kind, device, bytes, out);
    leave(agent);
    return status;
}

/* ---- cards ----------------------------------------------------------------------------------- */

/* Makes two introductions: peers get the facts once, in the engine's first answer. */
static kvf_status introduce_self(kvf_agent *agent) {
    kvf_wire_buffer_free(&agent->with_facts);
    kvf_status status = kvf_agent_write_introduction(agent, agent->shard, NULL, agent->digest, agent->facts,
                                                     &agent->with_facts);
    if (!status)
        status = kvf_agent_write_introduction(agent, agent->shard, NULL, agent->digest, "",
                                              &agent->introductions[agent->rank]);
    agent->introduction_count += !status;
    return status;
}

/* Logs which libraries were loaded to move bytes, and which kinds of transport do not work here. */
static void log_findings(kvf_agent *agent) {
    kvf_transport_finding found = {.struct_size = sizeof found};
    if (!kvf_agent_logs(agent, KVF_LOG_INFO))
        return;
    for (uint32_t i = 0; kvf_transport_find(agent->transport, i, &found) == KVF_OK; i++) {
        kvf_text line = {0};
        if (found.works && found.library[0])
            kvf_text_add(&line, "transport %s: %s, version %s%s%s", found.kind, found.library, found.version,
                         found.ways[0] ? ", finds " : "", found.ways);
        else if (found.asked && !found.works)
            kvf_text_add(&line, "transport %s does not work here: %s", found.kind, found.why_not);
        if (line.data && !line.failed)
            kvf_agent_log(agent, KVF_LOG_INFO, line.data);
        kvf_text_free(&line);
    }
}

/* With `verify` all that arrives is hashed. The driver may make who opens a device for that wait for the engine's
 * streams, so it is done now, and not when one of these waits for a request. */
static kvf_status open_summing(kvf_agent *agent) {
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < agent->region_count && agent->options.verify && !status; i++) {
        if (agent->regions[i].kind != KVF_MEMORY_CUDA)
            continue;
        status = kvf_summing_make(&agent->summing);
        if (!status)
            status = kvf_summing_open(agent->summing, agent->regions[i].device);
    }
    return status;
}

/* From here on peers are served. */
static kvf_status open_memory(kvf_agent *agent) {
    const void *card;
    size_t bytes;
    kvf_status status = kvf_agent_open_stage(agent);
    if (!status)
        status = open_summing(agent);
    if (!status)
        status = kvf_transport_export(agent->transport, &card, &bytes);
    if (!status && !agent->with_facts.data)
        status = introduce_self(agent);
    if (!status) {
        agent->card_bytes = bytes;
        agent->card = card;
        kvf_sessions_due(agent); /* peers may wait for it */
        if (agent->regions_generation++ == 0)
            log_findings(agent);
    }
    return status;
}

/* From here on no peer has a valid card of ours. */
static void close_memory(kvf_agent *agent) {
    agent->card = NULL;
    agent->card_bytes = 0;
    kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        kvf_session_unjoin(session);
        if (!session->incoming || !session->hh.tbl)
            continue;
        /* The analyser does not know that a session in the table is also in its list. */
        /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
        HASH_DELETE(hh, agent->sessions, session);
        memset(&session->hh, 0, sizeof session->hh);
        randombytes_buf(session->id, sizeof session->id);
        session->joins_again = session->renamed = true;
        HASH_ADD(hh, agent->sessions, id, sizeof session->id, session);
        if (session->hh.tbl)
            kvf_calls_bind(session, false); /* answers come in the new one */
        else
            kvf_session_lose(session, KVF_E_NOMEM, "no memory for a session");
    }
}

/* ---- regions --------------------------------------------------------------------------------- */

static bool is_registered(const kvf_agent *agent, uint32_t region) {
    return region < agent->region_count && agent->regions[region].bytes > 0;
}

/* A region must be as large as the shard says: peers compute with that. */
static kvf_status check_size(const kvf_shard_desc *shard, uint32_t region, const kvf_memory *memory) {
    if (memory->bytes < shard->region_bytes[region])
        return kvf_fail(KVF_E_RANGE, "region %u has %llu bytes; the shard of rank %u needs %llu", region,
                        (unsigned long long)memory->bytes, shard->rank,
                        (unsigned long long)shard->region_bytes[region]);
    return KVF_OK;
}

static kvf_status make_table(kvf_agent *agent) {
    uint32_t count = kvf_shard_get(agent->shard)->region_count;
    if (agent->regions)
        return KVF_OK;
    agent->regions = kvf_alloc0(count, sizeof *agent->regions);
    if (!agent->regions)
        return kvf_nomem("an agent");
    agent->region_count = count;
    return KVF_OK;
}

/* Memory as it is registered. If everything goes packed, no peer needs that of a device. */
static kvf_status take(const kvf_agent *agent, const kvf_memory *memory, kvf_memory *out) {
    kvf_status status = kvf_take_options(out, sizeof *out, memory, "kvf_memory");
    out->struct_size = sizeof *out;
    out->withheld = out->withheld || (agent->options.way == KVF_WAY_PACKED && out->kind != KVF_MEMORY_HOST);
    return status;
}

/* With a stage peers need only the arena; they get no more, unless it could be taken back. */
static void withhold(const kvf_agent *agent) {
    kvf_transport_withhold_emulated(agent->transport, agent->options.way != KVF_WAY_DIRECT);
}

static kvf_status add_region(kvf_agent *agent, uint32_t region, const kvf_memory *memory) {
    kvf_memory taken = {0};
    kvf_status status = check_size(kvf_shard_get(agent->shard), region, memory);
    withhold(agent);
    if (!status)
        status = take(agent, memory, &taken);
    if (!status)
        status = kvf_transport_register_region(agent->transport, region, &taken);
    if (!status)
        agent->regions[region] = taken;
    return status;
}

/* Registers all regions or, if one fails, none. The agent has no region before. */
static kvf_status add_all(kvf_agent *agent, const kvf_memory *regions) {
    const uint32_t count = agent->region_count;
    kvf_memory *taken = kvf_alloc(count, sizeof *taken);
    kvf_status status = taken ? KVF_OK : kvf_nomem("regions");
    withhold(agent);
    for (uint32_t i = 0; i < count && !status; i++)
        status = take(agent, kvf_memory_at(regions, i), &taken[i]);
    if (!status && count > 0)
        status = kvf_transport_register(agent->transport, taken, count);
    if (!status && count > 0)
        memcpy(agent->regions, taken, count * sizeof *taken);
    kvf_free(taken);
    return status;
}

static bool has_none(const kvf_agent *agent) {
    for (uint32_t i = 0; i < agent->region_count; i++)
        if (is_registered(agent, i))
            return false;
    return true;
}

static kvf_status open_if_complete(kvf_agent *agent) {
    for (uint32_t i = 0; i < agent->region_count; i++)
        if (!is_registered(agent, i))
            return KVF_OK;
    return open_memory(agent);
}

/* After a call that failed half-way, or a region that could not be taken back, continues with the same regions. */
static kvf_status add_or_compare(kvf_agent *agent, uint32_t region, const kvf_memory *memory) {
    const kvf_memory *known = &agent->regions[region];
    if (!is_registered(agent, region))
        return add_region(agent, region, memory);
    if (known->address != memory->address || known->bytes != memory->bytes)
        return kvf_fail(KVF_E_EXISTS, "region %u is registered already, as other memory", region);
    const kvf_status status = kvf_transport_register_region(agent->transport, region, known);
    return status == KVF_E_EXISTS ? KVF_OK : status;
}

static kvf_status check_regions(const kvf_shard_desc *shard, const kvf_memory *regions, uint32_t count) {
    if (count != shard->region_count)
        return kvf_fail(KVF_E_INVALID, "count is %u regions; the shard of rank %u has %u", count, shard->rank,
                        shard->region_count);
    if (count && !regions)
        return kvf_fail(KVF_E_INVALID, "regions is NULL");
    kvf_status status = kvf_memory_check(regions, count, "register");
    for (uint32_t i = 0; i < count && !status; i++)
        status = check_size(shard, i, kvf_memory_at(regions, i));
    return status;
}

static kvf_status register_all(kvf_agent *agent, const kvf_memory *regions, uint32_t count) {
    if (agent->card)
        return kvf_fail(KVF_E_EXISTS, "the agent has its memory registered already");
    kvf_status status = check_regions(kvf_shard_get(agent->shard), regions, count);
    if (!status)
        status = make_table(agent);
    if (!status && has_none(agent) && !agent->stage)
        status = add_all(agent, regions);
    for (uint32_t i = 0; i < count && !status; i++)
        status = add_or_compare(agent, i, kvf_memory_at(regions, i));
    return status ? status : open_memory(agent);
}

kvf_status kvf_agent_register(kvf_agent *agent, const kvf_memory *regions, uint32_t count) {
    kvf_status status = enter(agent);
    if (status)
        return status;
    status = register_all(agent, regions, count);
    leave(agent);
    return status;
}

static kvf_status check_number(const kvf_agent *agent, uint32_t region) {
    uint32_t count = kvf_shard_get(agent->shard)->region_count;
    if (region >= count)
        return kvf_fail(KVF_E_RANGE, "region is %u; the shard of rank %u has %u", region, agent->rank, count);
    return KVF_OK;
}

static kvf_status register_one(kvf_agent *agent, uint32_t region, const kvf_memory *memory) {
    kvf_status status = memory ? check_number(agent, region) : kvf_fail(KVF_E_INVALID, "memory is NULL");
    if (!status)
        status = kvf_memory_check(memory, 1, "register");
    if (!status)
        status = make_table(agent);
    if (!status && is_registered(agent, region) && agent->card)
        return kvf_fail(KVF_E_EXISTS, "region %u is registered already", region);
    if (!status)
        status = add_or_compare(agent, region, memory);
    return status ? status : open_if_complete(agent);
}

kvf_status kvf_agent_register_region(kvf_agent *agent, uint32_t region, const kvf_memory *memory) {
    kvf_status status = enter(agent);
    if (status)
        return status;
    status = register_one(agent, region, memory);
    leave(agent);
    return status;
}

/* ---- taking back ----------------------------------------------------------------------------- */

static bool lies_in(const kvf_shard *shard, uint32_t group, uint32_t region) {
    kvf_range layers = kvf_shard_group_layers(shard, group);
    for (uint32_t layer = layers.begin; layer < layers.end; layer++)
        for (uint32_t p = 0; p < kvf_model_group(kvf_shard_model(shard), group)->part_count; p++)
            if (kvf_holds_units(&shard->groups[group].parts[p]) &&
                kvf_shard_placement(shard, group, layer, p)->region == region)
                return true;
    return false;
}

/* A request with blocks in a region, even if they are in doubt. */
static const kvf_ticket *find_user(const kvf_agent *agent, uint32_t region) {
    const kvf_ticket *ticket, *next;
    HASH_ITER(hh, agent->tickets, ticket, next) {
        for (uint32_t g = 0; ticket->claims && g < ticket->group_count; g++)
            if (ticket->claims[g].count > 0 && lies_in(agent->shard, g, region))
                return ticket;
    }
    return NULL;
}

static kvf_status unregister(kvf_agent *agent, uint32_t region) {
    kvf_status status = check_number(agent, region);
    if (!status && !is_registered(agent, region))
        status = kvf_fail(KVF_E_NOT_REGISTERED, "region %u is not registered", region);
    if (status)
        return status;
    const kvf_ticket *user = find_user(agent, region);
    if (user) {
        char id[KVF_ID_TEXT_BYTES];
        kvf_request_id_text((kvf_request_id){user->id, user->id_bytes}, id);
        return kvf_fail(KVF_E_AGAIN, "request \"%s\", ticket %llu, has blocks in region %u", id,
                        (unsigned long long)user->number, region);
    }
    if (kvf_summing_is_busy(agent->summing))
        return kvf_fail(KVF_E_AGAIN, "a device computes checksums, and has not finished");
    close_memory(agent);
    status = kvf_transport_unregister_region(agent->transport, region);
    if (!status)
        agent->regions[region] = (kvf_memory){.struct_size = sizeof(kvf_memory)};
    return status;
}

kvf_status kvf_agent_unregister_region(kvf_agent *agent, uint32_t region) {
    kvf_status status = enter(agent);
    if (status)
        return status;
    status = unregister(agent, region);
    leave(agent);
    return status;
}
