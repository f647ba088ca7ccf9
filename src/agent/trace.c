/*
 * The times of the latest requests: recorded as they happen; the newest replace the oldest.
 */
#include "agent/trace.h"
#include "agent/session.h"

#define FIRST_ROOM 8u

static kvf_trace *find(const kvf_agent *agent, uint64_t ticket) {
    kvf_trace *trace = NULL;
    if (agent->options.trace_requests)
        HASH_FIND(hh, agent->traces, &ticket, sizeof ticket, trace);
    return trace;
}

static void free_trace(kvf_trace *trace) {
    for (uint32_t i = 0; i < trace->peer_count; i++)
        kvf_free(trace->peers[i].engine);
    kvf_free(trace->peers);
    kvf_free(trace->detail);
    kvf_free(trace->engine);
    kvf_free(trace->id);
    kvf_free(trace);
}

static void forget(kvf_agent *agent, kvf_trace *trace) {
    HASH_DEL(agent->traces, trace);
    free_trace(trace);
}

void kvf_trace_begin(const kvf_ticket *ticket) {
    kvf_agent *agent = ticket->agent;
    if (!agent->options.trace_requests)
        return;
    while (HASH_COUNT(agent->traces) >= agent->options.trace_requests)
        forget(agent, agent->traces); /* a table of uthash begins with the entry that was added first */
    kvf_trace *trace = kvf_alloc0(1, sizeof *trace);
    void *id = ticket->id_bytes ? kvf_copy(ticket->id, ticket->id_bytes, 1) : NULL;
    if (!trace || (ticket->id_bytes && !id)) {
        kvf_free(trace);
        kvf_free(id);
        return; /* for information only */
    }
    trace->ticket = ticket->number;
    trace->kind = ticket->kind;
    trace->id = id;
    trace->id_bytes = ticket->id_bytes;
    trace->at[KVF_MOMENT_ASKED] = ticket->created;
    HASH_ADD(hh, agent->traces, ticket, sizeof trace->ticket, trace);
    if (!trace->hh.tbl)
        free_trace(trace);
}

void kvf_trace_reach(const kvf_ticket *ticket, kvf_moment moment) {
    kvf_trace *trace = find(ticket->agent, ticket->number);
    if (trace && !trace->at[moment])
        trace->at[moment] = kvf_agent_now(ticket->agent);
}

static bool make_room(kvf_trace *trace) {
    if (trace->peer_count < trace->peer_room)
        return true;
    uint32_t room = trace->peer_room ? 2 * trace->peer_room : FIRST_ROOM;
    kvf_trace_peer *peers = room <= KVF_TRACE_PEERS ? kvf_resize(trace->peers, room, sizeof *peers) : NULL;
    if (!peers)
        return false;
    trace->peers = peers;
    trace->peer_room = room;
    return true;
}

void kvf_trace_reach_peer(const kvf_ticket *ticket, kvf_moment moment, const kvf_session *session) {
    kvf_trace *trace = session ? find(ticket->agent, ticket->number) : NULL;
    if (!trace)
        return;
    if (!make_room(trace)) {
        trace->peers_left_out++;
        return;
    }
    const uint64_t now = kvf_agent_now(ticket->agent);
    trace->peers[trace->peer_count++] = (kvf_trace_peer){.moment = moment,
                                                         .rank = session->rank,
                                                         .time = now,
                                                         .clock_offset = session->clock_offset,
                                                         .clock_error = kvf_session_clock_error(session, now),
                                                         .engine = kvf_strdup(session->engine)};
}

void kvf_trace_told(const kvf_ticket *ticket, const char *engine) {
    kvf_trace *trace = find(ticket->agent, ticket->number);
    if (!trace || trace->at[KVF_MOMENT_TOLD])
        return;
    trace->at[KVF_MOMENT_TOLD] = kvf_agent_now(ticket->agent);
    trace->status = ticket->status;
    trace->bytes = ticket->bytes;
    trace->packed = ticket->packed;
    trace->runs = ticket->runs;
    trace->detail = ticket->detail ? kvf_strdup(ticket->detail) : NULL;
    trace->engine = engine[0] ? kvf_strdup(engine) : NULL;
}

void kvf_trace_noticed(kvf_agent *agent, const kvf_event *event) {
    const bool ends = event->ticket && event->kind != KVF_EVENT_LAYERS;
    kvf_trace *trace = ends ? find(agent, event->ticket) : NULL;
    if (trace && !trace->at[KVF_MOMENT_NOTICED])
        trace->at[KVF_MOMENT_NOTICED] = kvf_agent_now(agent);
}

void kvf_trace_end(const kvf_ticket *ticket) {
    kvf_trace *trace = find(ticket->agent, ticket->number);
    if (trace && !trace->at[KVF_MOMENT_TOLD])
        forget(ticket->agent, trace);
}

void kvf_traces_free(kvf_agent *agent) {
    while (agent->traces)
        forget(agent, agent->traces);
}
