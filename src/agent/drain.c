/*
 * Draining an agent, before its engine ends or while it is out of service, and taking that back.
 */
#include "agent/drain.h"
#include "agent/session.h"

/* Peers are still to be told of something: that blocks may be freed, that all is written. */
static bool owes_words(const kvf_agent *agent) {
    const kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        if (session->calls)
            return true;
    }
    return false;
}

static void cancel_all(kvf_agent *agent) {
    kvf_ticket *ticket, *next;
    agent->drain_until = UINT64_MAX;
    agent->drain_is_late = true;
    HASH_ITER(hh, agent->tickets, ticket, next) {
        if (ticket->state == KVF_TICKET_OVER || ticket->silent || ticket->status)
            continue;
        agent->drain_cancelled++;
        kvf_ticket_fail(ticket, KVF_E_CANCELLED, "it had not ended when the time to drain was over", NULL);
    }
}

void kvf_drain_look(kvf_agent *agent, uint64_t now) {
    if (!agent->drained)
        return;
    if (now >= agent->drain_until)
        cancel_all(agent);
    if (agent->drain_until != UINT64_MAX)
        kvf_agent_due(agent, agent->drain_until);
    if (HASH_COUNT(agent->tickets) == 0 && (agent->drain_is_late || !owes_words(agent)))
        kvf_event_drained(agent);
}

static kvf_status begin(kvf_agent *agent, uint64_t deadline_ns) {
    if (agent->drains && !agent->drained)
        return KVF_OK; /* nothing is left */
    if (!agent->drains && !kvf_event_reserve_drained(agent))
        return kvf_nomem("an event");
    agent->drains = true;
    agent->drain_until = kvf_add_or_most(kvf_agent_now(agent), deadline_ns);
    agent->early_sweep.due = agent->flow_sweep.due = 0;
    agent->due = 0;
    return KVF_OK;
}

kvf_status kvf_agent_drain(kvf_agent *agent, uint64_t deadline_ns) {
    kvf_status status = kvf_agent_needs_memory(agent);
    if (!status)
        status = kvf_agent_lock(agent);
    if (status)
        return status;
    status = begin(agent, deadline_ns);
    kvf_agent_unlock(agent);
    return status;
}

static void resume(kvf_agent *agent) {
    if (agent->drains)
        kvf_event_resumed(agent);
    agent->drains = agent->drain_is_late = false;
    agent->drain_cancelled = 0;
}

kvf_status kvf_agent_resume(kvf_agent *agent) {
    kvf_status status = kvf_agent_needs_memory(agent);
    if (!status)
        status = kvf_agent_lock(agent);
    if (status)
        return status;
    resume(agent);
    kvf_agent_unlock(agent);
    return KVF_OK;
}
