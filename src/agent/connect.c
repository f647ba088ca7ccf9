/*
 * Connects: meeting an engine ahead of the first request.
 */
#include <stdio.h>

#include "agent/ticket.h"

/* A connect is over when every rank it needs has answered. */
static void connect_tick(kvf_ticket *base, uint64_t now) {
    kvf_asker *ticket = kvf_asker_of(base);
    char unmet[KVF_DETAIL_BYTES / 2];
    if (!kvf_ticket_unmet(ticket, unmet, sizeof unmet)) {
        kvf_ticket_done(&ticket->base);
    } else if (now >= ticket->base.deadline) {
        char detail[KVF_DETAIL_BYTES];
        (void)snprintf(detail, sizeof detail, "the deadline has passed: %s", unmet);
        kvf_ticket_fail(&ticket->base, KVF_E_TIMEOUT, detail, NULL);
    } else {
        kvf_tickets_due(ticket->base.agent, ticket->base.deadline);
    }
}

static void connect_met(kvf_ticket *ticket) {
    connect_tick(ticket, ticket->created);
}

static void connect_fail(kvf_ticket *ticket, kvf_status status, const char *detail,
                         const kvf_session *session) {
    kvf_ticket_record_failure(ticket, status, detail, session);
    kvf_ticket_tell(ticket, true);
}

static const kvf_ticket_ops connect_ops = {
    .kind = KVF_REQUEST_CONNECT,
    .size = sizeof(kvf_asker),
    .asks = true,
    .met = connect_met,
    .tick = connect_tick,
    .fail = connect_fail,
};

static kvf_status start_connect(kvf_agent *agent, const kvf_contact *contact, uint64_t deadline_ns,
                                uint64_t *out) {
    if (!agent->card)
        return kvf_fail(KVF_E_INVALID, "the agent has no memory registered; see kvf_agent_register()");
    kvf_agent_request request = {.contact = *contact,
                                 .deadline_ns = deadline_ns ? deadline_ns : 30 * KVF_SECOND};
    kvf_ticket *ticket;
    kvf_status status = kvf_ticket_make(agent, &connect_ops, &request, &ticket);
    return status ? status : kvf_ticket_meet(kvf_asker_of(ticket), contact, out);
}

kvf_status kvf_agent_connect(kvf_agent *agent, const kvf_contact *contact, uint64_t deadline_ns,
                             uint64_t *ticket) {
    if (!agent || !contact)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !agent ? "agent" : "contact");
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    status = start_connect(agent, contact, deadline_ns, ticket);
    kvf_agent_unlock(agent);
    return status;
}
