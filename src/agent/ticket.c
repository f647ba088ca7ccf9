/*
 * Tickets: what every kind of request has in common.
 */
#include <stdio.h>

#include "agent/arrival.h"
#include "agent/past.h"
#include "agent/peers.h"
#include "agent/terms.h"
#include "agent/trace.h"

#define DEFAULT_DEADLINE (120 * KVF_SECOND)
#define TOO_LATE                                                                                             \
    "the deadline has passed while the CUDA driver held up the agent: streams went on without their layers"

/* ---- claims ---------------------------------------------------------------------------------- */

static bool is_reader(const kvf_ticket *ticket) {
    return ticket->ops->lends;
}

/* The blocks of its tables that a ticket claims: of a destination only those that will be written. */
static kvf_block_table *claimed_tables(const kvf_ticket *ticket, const kvf_group_steps *groups,
                                       uint32_t count) {
    kvf_block_table *tables = kvf_alloc(count, sizeof *tables);
    for (uint32_t g = 0; tables && g < count; g++) {
        kvf_range wanted = {0, groups[g].table.count};
        if (!is_reader(ticket))
            wanted = kvf_wanted_entries(ticket->agent->shard, g, &groups[g]);
        uint32_t n = wanted.end - wanted.begin;
        tables[g] = (kvf_block_table){n ? groups[g].table.ids + wanted.begin : NULL, n, 0};
    }
    return tables;
}

/* Without this check, peers would refuse the tables, after as many messages as they take. */
static kvf_status check_told(const kvf_group_steps *groups, uint32_t count) {
    uint64_t ids = 0;
    for (uint32_t g = 0; g < count; g++)
        ids += groups[g].table.count;
    if (ids > KVF_WIRE_MAX_TABLE_IDS)
        return kvf_fail(KVF_E_RANGE, "the tables have %llu entries; peers take up to %u",
                        (unsigned long long)ids, KVF_WIRE_MAX_TABLE_IDS);
    return KVF_OK;
}

kvf_status kvf_ticket_claim(kvf_ticket *ticket, const kvf_group_steps *groups, uint32_t count) {
    kvf_agent *agent = ticket->agent;
    kvf_status status = kvf_check_groups(agent->shard, groups, count, ticket->ops->grows);
    if (!status && ticket->ops->tells)
        status = check_told(groups, count);
    if (status)
        return status;
    kvf_group_steps *copy = kvf_steps_copy(groups, count);
    kvf_block_table *tables = copy ? claimed_tables(ticket, copy, count) : NULL;
    if (!tables) {
        kvf_free(copy);
        return kvf_nomem("a request");
    }
    if (is_reader(ticket))
        status = kvf_ledger_take_readers(agent->ledger, tables, count);
    else
        status = kvf_ledger_take_writer(agent->ledger, tables, count, ticket->number);
    if (status) {
        kvf_free(tables);
        kvf_free(copy);
        return status;
    }
    ticket->claims = tables;
    ticket->groups = copy;
    ticket->group_count = count;
    ticket->empty = kvf_steps_empty(copy, count);
    return KVF_OK;
}

/* The entries that only the second of two tables has; `ids` is room for them, and for KVF_NO_BLOCK elsewhere. */
static kvf_block_table only_new(const kvf_block_table *known, const kvf_block_table *more, uint32_t *ids) {
    for (uint32_t i = 0; i < more->count; i++) {
        uint64_t place = (uint64_t)more->first_block + i;
        bool was = place >= known->first_block && place - known->first_block < known->count &&
                   known->ids[place - known->first_block] != KVF_NO_BLOCK;
        ids[i] = was ? KVF_NO_BLOCK : more->ids[i];
    }
    return (kvf_block_table){ids, more->count, more->first_block};
}

kvf_status kvf_ticket_grow(kvf_ticket *ticket, kvf_group_steps *groups) {
    const uint32_t count = ticket->group_count;
    size_t ids = 0;
    for (uint32_t g = 0; g < count; g++)
        ids += groups[g].table.count;
    kvf_block_table *claims = claimed_tables(ticket, groups, count);
    kvf_block_table *fresh = kvf_alloc(1, count * sizeof *fresh + ids * sizeof(uint32_t));
    kvf_status status = claims && fresh ? KVF_OK : kvf_nomem("blocks of a request");
    uint32_t *room = status ? NULL : (uint32_t *)(void *)(fresh + count);
    for (uint32_t g = 0; g < count && !status; g++) {
        fresh[g] = only_new(&ticket->groups[g].table, &groups[g].table, room);
        room += groups[g].table.count;
    }
    if (!status)
        status = kvf_ledger_take_readers(ticket->agent->ledger, fresh, count);
    kvf_free(fresh);
    if (status) {
        kvf_free(claims);
        return status;
    }
    kvf_free(ticket->claims);
    kvf_free(ticket->groups);
    ticket->claims = claims;
    ticket->groups = groups;
    return KVF_OK;
}

static void unclaim(kvf_ticket *ticket) {
    if (!ticket->claims)
        return;
    if (is_reader(ticket))
        kvf_ledger_drop_readers(ticket->agent->ledger, ticket->claims, ticket->group_count);
    else
        kvf_ledger_drop_writer(ticket->agent->ledger, ticket->claims, ticket->group_count, ticket->number);
    kvf_free(ticket->claims);
    ticket->claims = NULL;
}

/* ---- life ------------------------------------------------------------------------------------ */

static kvf_status check_request(const kvf_agent *agent, kvf_request_kind kind,
                                const kvf_agent_request *request) {
    if (!agent->card)
        return kvf_fail(KVF_E_INVALID, "the agent has no memory registered; see kvf_agent_register()");
    if (request->id.size == 0 || request->id.size > KVF_WIRE_MAX_REQUEST || !request->id.data)
        return kvf_fail(KVF_E_RANGE, "id has %zu bytes; allowed: 1 to %u", request->id.size,
                        KVF_WIRE_MAX_REQUEST);
    if (request->way > KVF_WAY_PACKED)
        return kvf_fail(KVF_E_INVALID, "way is %d; allowed: 0 (the agent's), 1 (direct) and 2 (packed)",
                        (int)request->way);
    if (!request->groups && kind != KVF_REQUEST_PULL)
        return kvf_fail(KVF_E_INVALID, "groups is NULL");
    return KVF_OK;
}

static kvf_status fill(kvf_ticket *ticket, const kvf_agent_request *request) {
    kvf_agent *agent = ticket->agent;
    uint64_t wait = request->deadline_ns;
    if (!wait)
        wait = ticket->kind == KVF_REQUEST_HOLD ? agent->options.lease_ns : DEFAULT_DEADLINE;
    ticket->deadline = kvf_add_or_most(ticket->created, wait);
    ticket->way = request->way;
    ticket->pace = (kvf_pace){
        .priority = request->priority, .cap = request->bytes_per_second, .counted = ticket->created};
    kvf_status status = ticket->ops->begin ? ticket->ops->begin(ticket, request) : KVF_OK;
    if (!status && ticket->ops->asks)
        status = kvf_arrival_begin(kvf_asker_of(ticket), request);
    if (!status && ticket->ops->lends)
        status = kvf_records_add(&ticket->records, request->records, request->record_count, agent->rank);
    if (status)
        return status;
    ticket->id_bytes = request->id.size;
    if (request->id.size > 0) {
        ticket->id = kvf_copy(request->id.data, request->id.size, 1);
        if (!ticket->id)
            return kvf_nomem("a request");
    }
    if (!kvf_events_reserve(ticket))
        return kvf_nomem("a request");
    return request->groups ? kvf_ticket_claim(ticket, request->groups, request->group_count) : KVF_OK;
}

kvf_status kvf_ticket_make(kvf_agent *agent, const kvf_ticket_ops *ops, const kvf_agent_request *given,
                           kvf_ticket **out) {
    kvf_agent_request request = {0};
    kvf_request_kind kind = ops->kind;
    kvf_status status = KVF_OK;
    if (agent->drains)
        return kvf_fail(KVF_E_CANCELLED, "the agent drains: it takes no new requests, see kvf_agent_drain()");
    if (kind != KVF_REQUEST_CONNECT) {
        if (!given)
            return kvf_fail(KVF_E_INVALID, "request is NULL");
        status = kvf_take_options(&request, sizeof request, given, "kvf_agent_request");
        if (!status)
            status = check_request(agent, kind, &request);
    } else {
        request = *given;
    }
    if (!status)
        status = kvf_check_reserved(request.contact.reserved, 2, "kvf_contact");
    if (status)
        return status;
    kvf_ticket *ticket = kvf_alloc0(1, ops->size);
    if (!ticket)
        return kvf_nomem("a request");
    ticket->ops = ops;
    ticket->agent = agent;
    ticket->kind = kind;
    ticket->number = agent->next_ticket + 1;
    ticket->created = kvf_agent_now(agent);
    ticket->peer_rank = KVF_NO_RANK;
    status = fill(ticket, &request);
    if (!status) {
        HASH_ADD(hh, agent->tickets, number, sizeof ticket->number, ticket);
        if (!ticket->hh.tbl)
            status = kvf_nomem("a request");
    }
    if (status) {
        kvf_ticket_free(ticket);
        return status;
    }
    agent->next_ticket = ticket->number;
    kvf_trace_begin(ticket);
    agent->stats.requests_now[kind]++;
    kvf_tickets_due(agent, ticket->deadline);
    *out = ticket;
    return KVF_OK;
}

kvf_ticket *kvf_ticket_find(const kvf_agent *agent, uint64_t number, const kvf_ticket_ops *ops) {
    kvf_ticket *ticket = NULL;
    HASH_FIND(hh, agent->tickets, &number, sizeof number, ticket);
    return ticket && ticket->ops == ops ? ticket : NULL;
}

static kvf_bytes id_of(const kvf_ticket *ticket) {
    return (kvf_bytes){ticket->id, ticket->id_bytes};
}

kvf_status kvf_ticket_list(kvf_ticket *ticket, kvf_ticket **table, kvf_bytes key) {
    HASH_ADD_KEYPTR(hh_id, *table, key.data, key.size, ticket);
    if (ticket->hh_id.tbl) {
        if (ticket->ops->lends)
            kvf_past_forget(ticket->agent, id_of(ticket));
        return KVF_OK;
    }
    kvf_ticket_free(ticket);
    return kvf_nomem("a request");
}

void kvf_ticket_unlist(kvf_ticket *ticket) {
    kvf_agent *agent = ticket->agent;
    if (!ticket->hh_id.tbl)
        return;
    if (ticket->kind == KVF_REQUEST_HOLD)
        HASH_DELETE(hh_id, agent->holds, ticket);
    else if (ticket->kind == KVF_REQUEST_PUSH)
        HASH_DELETE(hh_id, agent->pushes, ticket);
    else
        HASH_DELETE(hh_id, agent->pulls, ticket);
    if (ticket->ops->lends)
        kvf_past_note(agent, id_of(ticket), ticket->status);
    if (ticket->ops->lends && agent->drains) /* peers that wait for it wait in vain */
        agent->early_sweep.due = agent->flow_sweep.due = 0;
    memset(&ticket->hh_id, 0, sizeof ticket->hh_id);
}

static void free_asker(kvf_asker *ticket) {
    for (uint32_t i = 0; ticket->remote && ticket->sources && i < ticket->remote->target_count; i++) {
        kvf_parts_free(&ticket->sources[i].parts);
        kvf_records_free(&ticket->sources[i].records);
        kvf_free(ticket->sources[i].card);
    }
    kvf_arrival_free(ticket);
    kvf_ticket_detach(ticket);
    kvf_remote_drop(ticket->remote);
    kvf_free(ticket->sources);
}

void kvf_ticket_free(kvf_ticket *ticket) {
    kvf_agent *agent = ticket->agent;
    kvf_trace_end(ticket);
    kvf_ticket_unlist(ticket);
    if (ticket->state == KVF_TICKET_OVER)
        DL_DELETE2(agent->over, ticket, over_prev, over_next);
    if (ticket->hh.tbl) {
        HASH_DEL(agent->tickets, ticket);
        agent->stats.requests_now[ticket->kind]--;
    }
    if (ticket->ops->free)
        ticket->ops->free(ticket);
    if (ticket->ops->asks)
        free_asker(kvf_asker_of(ticket));
    unclaim(ticket);
    kvf_records_free(&ticket->records);
    kvf_free(ticket->groups);
    kvf_free(ticket->detail);
    kvf_free(ticket->peer_engine);
    kvf_free(ticket->id);
    kvf_free(ticket->result_event);
    kvf_free(ticket->free_event);
    kvf_free(ticket);
}

/* Attaches a pull, expect or connect to the sessions of its remote's targets. */
static kvf_status attach(kvf_asker *ticket) {
    kvf_remote *remote = ticket->remote;
    ticket->sources = kvf_alloc0(remote->target_count, sizeof *ticket->sources);
    if (!ticket->sources)
        return kvf_nomem("a request");
    for (uint32_t i = 0; i < remote->target_count; i++) {
        kvf_source *source = &ticket->sources[i];
        kvf_session *session;
        kvf_status status = kvf_session_to(remote, remote->targets[i].rank, &session);
        if (status)
            return status;
        source->ticket = ticket;
        source->target = &remote->targets[i];
        source->session = session;
        session->last_used = kvf_agent_now(session->agent);
        if (!session->sources) /* it may have been silent for long, as no ticket needed it */
            session->last_heard = session->last_used;
        DL_APPEND(session->sources, source);
        ticket->source_count++;
    }
    return KVF_OK;
}

static void detach_source(kvf_source *source) {
    kvf_call_drop(source->call);
    source->call = NULL;
    if (!source->session)
        return;
    source->session->last_used = kvf_agent_now(source->session->agent);
    DL_DELETE(source->session->sources, source);
    kvf_session_less(source->session);
    source->session = NULL;
}

void kvf_source_lost(kvf_source *source) {
    /* A lost writer is not settled: it may still write until its time is over, or its process ends. */
    source->gone = source->session->gone;
    detach_source(source);
}

void kvf_ticket_detach(kvf_asker *ticket) {
    for (uint32_t i = 0; ticket->sources && i < ticket->source_count; i++)
        detach_source(&ticket->sources[i]);
    ticket->source_count = 0;
}

/* ---- ends ------------------------------------------------------------------------------------ */

static void end_ticket(kvf_ticket *ticket) {
    kvf_ticket_unlist(ticket);
    ticket->state = KVF_TICKET_OVER;
    DL_APPEND2(ticket->agent->over, ticket, over_prev, over_next);
    ticket->agent->again = true;
}

kvf_status kvf_ticket_gather(kvf_asker *ticket) {
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < ticket->source_count && !status; i++)
        status = kvf_records_take(&ticket->base.records, &ticket->sources[i].records);
    return status;
}

/* Streams that wait for layers go on. False: they did before these had arrived. */
static bool end_arrival(kvf_ticket *ticket) {
    return !ticket->ops->asks || kvf_arrival_end(kvf_asker_of(ticket));
}

void kvf_ticket_done(kvf_ticket *ticket) {
    kvf_agent *agent = ticket->agent;
    if (ticket->state == KVF_TICKET_OVER)
        return;
    if (!end_arrival(ticket)) {
        kvf_ticket_record_failure(ticket, KVF_E_TIMEOUT, TOO_LATE, NULL);
        kvf_ticket_tell(ticket, true);
        return;
    }
    unclaim(ticket);
    agent->stats.done[ticket->kind]++;
    kvf_event_ticket(ticket, ticket->kind == KVF_REQUEST_CONNECT ? KVF_EVENT_PEER_READY : KVF_EVENT_DONE,
                     true);
    end_ticket(ticket);
}

void kvf_ticket_record_failure(kvf_ticket *ticket, kvf_status status, const char *detail,
                               const kvf_session *session) {
    if (ticket->status)
        return;
    ticket->status = status;
    ticket->detail = kvf_strdup(detail);
    if (session) {
        ticket->peer_engine = kvf_strdup(session->engine);
        ticket->peer_rank = session->rank;
    } else if (kvf_ticket_remote(ticket)) {
        ticket->peer_engine = kvf_strdup(kvf_ticket_remote(ticket)->name);
    }
}

void kvf_ticket_tell(kvf_ticket *ticket, bool blocks_free) {
    kvf_agent *agent = ticket->agent;
    (void)end_arrival(ticket);
    agent->stats.failed[ticket->kind]++;
    if ((unsigned)ticket->status < sizeof agent->stats.failures_by_status / sizeof(uint64_t))
        agent->stats.failures_by_status[ticket->status]++;
    kvf_log_failure(agent, "request", ticket, ticket->peer_engine, ticket->peer_rank, ticket->status,
                    ticket->detail);
    if (blocks_free)
        unclaim(ticket);
    else /* only a request that fills its blocks is told before they are free */
        kvf_ledger_doubt(agent->ledger, ticket->claims, ticket->group_count, ticket->number);
    kvf_event_ticket(ticket, KVF_EVENT_FAILED, blocks_free);
    ticket->silent = true;
    if (blocks_free)
        end_ticket(ticket);
    else
        ticket->state = KVF_TICKET_DOUBT;
}

void kvf_ticket_settle(kvf_ticket *ticket) {
    unclaim(ticket);
    kvf_event_ticket(ticket, KVF_EVENT_BLOCKS_FREE, true);
    end_ticket(ticket);
}

kvf_status kvf_ticket_meet(kvf_asker *ticket, const kvf_contact *contact, uint64_t *number) {
    kvf_status status = kvf_remote_take(ticket->base.agent, contact, &ticket->remote);
    if (status) {
        kvf_ticket_free(&ticket->base);
        return status;
    }
    if (number)
        *number = ticket->base.number;
    ticket->base.state = KVF_TICKET_MEETING;
    if (ticket->remote->ready)
        kvf_ticket_met(ticket);
    return KVF_OK;
}

void kvf_ticket_met(kvf_asker *ticket) {
    kvf_trace_reach(&ticket->base, KVF_MOMENT_MET);
    kvf_status status = attach(ticket);
    if (!status)
        status = kvf_terms_check(ticket->remote, ticket->base.groups);
    if (status) {
        kvf_ticket_fail(&ticket->base, status, kvf_error_detail(), NULL);
        return;
    }
    ticket->base.state = KVF_TICKET_ASKING;
    ticket->base.ops->met(&ticket->base);
}

void kvf_ticket_fail(kvf_ticket *ticket, kvf_status status, const char *detail, const kvf_session *session) {
    if (ticket->state == KVF_TICKET_OVER)
        return;
    ticket->ops->fail(ticket, status, detail, session);
}

bool kvf_ticket_unmet(const kvf_asker *ticket, char *why, size_t bytes) {
    const kvf_remote *remote = ticket->remote;
    if (ticket->base.state == KVF_TICKET_MEETING) {
        (void)snprintf(why, bytes, "%s: %s", remote->name,
                       remote->detail[0] ? remote->detail : "the engine did not answer");
        return true;
    }
    for (uint32_t i = 0; i < ticket->source_count; i++) {
        const kvf_session *session = ticket->sources[i].session;
        if (session && session->state == KVF_SESSION_GREETING) {
            (void)snprintf(why, bytes, "%s rank %u: %s", session->engine, session->rank,
                           session->broken_detail ? session->broken_detail : "it did not answer");
            return true;
        }
    }
    if (ticket->after)
        (void)snprintf(why, bytes, "the event that the request waits for (`after`) has not happened");
    return ticket->after != NULL;
}

const char *kvf_ticket_waits_for(const kvf_asker *ticket) {
    const char *why = NULL;
    for (uint32_t i = 0; i < ticket->source_count && !why; i++)
        why = kvf_peer_waits_for(ticket->sources[i].session);
    return why;
}
