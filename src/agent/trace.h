/*
 * The times of the latest requests' steps, if the engine asked for traces: kept in a bounded table, by ticket, longer
 * than the tickets themselves. Without tracing a step costs one look at an option.
 */
#ifndef KVF_AGENT_TRACE_H
#define KVF_AGENT_TRACE_H

#include "agent/ticket.h"

/** Moments of a request, in the order in which it reaches them; each begins a phase, or ends the last one. */
typedef enum kvf_moment {
    KVF_MOMENT_ASKED = 0, /* the engine has asked for it */
    KVF_MOMENT_READY,     /* hold: its event has happened. push: all is ready */
    KVF_MOMENT_MET,       /* the remote engine is known */
    KVF_MOMENT_GRANTED,   /* pull: all leases are granted. Of a rank: its lease is granted */
    KVF_MOMENT_EXPECTED,  /* of a rank: it was asked to write, or has asked to be written to */
    KVF_MOMENT_BEGUN,     /* pull: the destination is known */
    KVF_MOMENT_PLANNED,   /* its runs are known */
    KVF_MOMENT_POSTED,    /* the first of them are under way */
    KVF_MOMENT_MOVED,     /* the last byte is there */
    KVF_MOMENT_CHECKING,  /* checksums are compared */
    KVF_MOMENT_CHECKED,
    KVF_MOMENT_WRITTEN,  /* of a rank: nothing more will be written */
    KVF_MOMENT_RELEASED, /* of a rank: its lease is given back */
    KVF_MOMENT_EXPIRED,  /* of a rank: its lease ran out */
    KVF_MOMENT_TOLD,     /* the event was made */
    KVF_MOMENT_FREED,    /* the blocks are the engine's again */
    KVF_MOMENT_NOTICED,  /* the engine has taken the event */
    KVF_MOMENTS
} kvf_moment;

/** What happened between a request and one rank of a peer. */
typedef struct kvf_trace_peer {
    kvf_moment moment;
    uint32_t rank;
    uint64_t time;
    int64_t clock_offset; /* of its clock against ours, as known then */
    uint64_t clock_error; /* UINT64_MAX: the offset was not known */
    char *engine;         /* NULL: there was no memory */
} kvf_trace_peer;

/** The number of them kept for one request. */
#define KVF_TRACE_PEERS 512u

struct kvf_trace {
    uint64_t ticket;
    kvf_request_kind kind;
    kvf_status status; /* once it is told */
    void *id;
    size_t id_bytes;
    uint64_t at[KVF_MOMENTS]; /* the first time, by the agent's clock; 0: not yet */
    uint64_t bytes, packed, runs;
    char *detail, *engine; /* once it is told; NULL: none */
    kvf_trace_peer *peers;
    uint32_t peer_count, peer_room, peers_left_out;
    UT_hash_handle hh; /* agent->traces */
};

void kvf_trace_begin(const kvf_ticket *ticket);
void kvf_trace_reach(const kvf_ticket *ticket, kvf_moment moment);
/** The same for one rank of a peer; NULL for `session`: it is lost, and nothing is recorded. */
void kvf_trace_reach_peer(const kvf_ticket *ticket, kvf_moment moment, const kvf_session *session);
/** The ticket's event is made: records how it ended. `engine`: the peer; "": not known. */
void kvf_trace_told(const kvf_ticket *ticket, const char *engine);
void kvf_trace_noticed(kvf_agent *agent, const kvf_event *event);
/** A ticket is freed: drops its trace if its result was never told. */
void kvf_trace_end(const kvf_ticket *ticket);
void kvf_traces_free(kvf_agent *agent);

#endif
