/*
 * What the engine may query: blocks, statistics, clocks.
 */
#include "agent/early.h"
#include "agent/hold.h"
#include "agent/ledger.h"
#include "agent/push.h"
#include "agent/push_shape.h"

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
    kvf_status status = kvf_agent_needs_memory(agent);
    if (status)
        return status;
    if (!state)
        return kvf_fail(KVF_E_INVALID, "state is NULL");
    status = kvf_agent_lock(agent);
    if (status)
        return status;
    kvf_ledger_entry entry;
    status = kvf_ledger_look(agent->ledger, group, block, &entry);
    uint32_t count = 0;
    bool leased = false;
    kvf_ticket *ticket, *next;
    if (!status)
        HASH_ITER(hh, agent->tickets, ticket, next) {
            bool has = has_block(ticket, group, block);
            count += has;
            leased |= has && kvf_hold_is_read(ticket);
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
    uint64_t bytes = agent->kept_bytes;
    const kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        if (!session->incoming)
            bytes += sizeof *session + session->card_bytes;
    }
    const kvf_remote *remote;
    DL_FOREACH(agent->all_remotes, remote) {
        bytes += sizeof *remote + remote->rank_count * sizeof *remote->ranks;
    }
    return bytes;
}

/* Plans for reading, and for writing. */
static uint64_t count_plans(const kvf_agent *agent, uint64_t *bytes) {
    uint64_t count = 0;
    for (const kvf_geometry *geometry = agent->geometries; geometry; geometry = geometry->hh.next) {
        count += geometry->plan != NULL;
        *bytes += geometry->plan ? kvf_plan_memory_bytes(geometry->plan) : 0;
    }
    for (const kvf_push_shape *shape = agent->push_shapes; shape; shape = shape->hh.next)
        for (const kvf_push_plan *plan = shape->plans; plan; plan = plan->next) {
            count++;
            *bytes += kvf_plan_memory_bytes(plan->plan);
        }
    return count;
}

kvf_status kvf_agent_get_stats(kvf_agent *agent, kvf_agent_stats *out) {
    if (!agent)
        return kvf_fail(KVF_E_INVALID, "agent is NULL");
    kvf_status status = kvf_check_out(out, "kvf_agent_stats");
    if (!status)
        status = kvf_agent_lock(agent);
    if (status)
        return status;
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
    stats.plans_now = count_plans(agent, &stats.memory_now_bytes);
    kvf_link_counts connections = kvf_link_count(agent->link);
    stats.connections_now = connections.now;
    stats.connections_closed = connections.closed;
    stats.over_budget += connections.refused + connections.dropped;
    kvf_agent_unlock(agent);
    kvf_fill_out(out, &stats, sizeof stats);
    return KVF_OK;
}

kvf_status kvf_agent_clock_offset(kvf_agent *agent, const char *engine, uint32_t rank, int64_t *offset_ns,
                                  uint64_t *error_ns) {
    if (!agent || !engine || !offset_ns || !error_ns)
        return kvf_fail(KVF_E_INVALID, "an argument is NULL");
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    status = kvf_fail(KVF_E_NOT_FOUND, "no session with rank %u of %s", rank, engine);
    const uint64_t now = kvf_agent_now(agent);
    const kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        if (session->rank != rank || session->clock_error == UINT64_MAX ||
            session->state == KVF_SESSION_LOST || strcmp(session->engine, engine) != 0)
            continue;
        *offset_ns = session->clock_offset;
        *error_ns = kvf_session_clock_error(session, now);
        status = KVF_OK;
    }
    kvf_agent_unlock(agent);
    return status;
}
