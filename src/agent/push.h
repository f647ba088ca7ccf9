/*
 * Pushes, and their flows; each flow writes a push to one rank of a consumer.
 */
#ifndef KVF_AGENT_PUSH_H
#define KVF_AGENT_PUSH_H

#include "agent/carry.h"
#include "agent/parts.h"
#include "agent/tally.h"
#include "agent/ticket.h"

/** How much of a push is ready: everything before `tokens`, and the layers [0, layers) up to chunk_end. */
typedef struct kvf_push_ready {
    uint64_t tokens, chunk_end;
    uint32_t layers;
} kvf_push_ready;

/** What the engine has said is ready, once an event has happened and all words before it are ready. */
typedef struct kvf_push_word {
    kvf_push_ready ready;
    kvf_after *after;
    struct kvf_push_word *prev, *next; /* push->words */
} kvf_push_word;

struct kvf_push {
    kvf_ticket base;
    kvf_tally tally;
    kvf_flow *flows;
    kvf_push_ready said; /* by the engine */
    kvf_push_ready ready;
    kvf_push_word *words; /* turn `said` into `ready`, as events happen */
    uint64_t total_tokens;
};

/** The expectation of one rank of a consumer; once it has a push, also the writing. */
struct kvf_flow {
    /* A heartbeat renews thousands of flows: the fields that it reads and writes lie together. */
    UT_hash_handle hh; /* session->flow_table, by generation */
    uint64_t generation;
    uint64_t until, latest; /* `latest` bounds every renewal */

    kvf_session *session;
    kvf_push *push; /* NULL: not started yet */
    void *id;
    size_t id_bytes;
    uint32_t expected_ranks;
    uint64_t kept_bytes;     /* of its budget */
    kvf_group_steps *groups; /* of the consumer; NULL: nothing */
    bool more;               /* parts of `groups` are still to come */
    uint64_t more_until;     /* and must come by then */
    kvf_parts parts;         /* those that have come */
    uint64_t tokens;         /* done, or under way */
    uint32_t layers;         /* beyond them, up to chunk_end */
    uint64_t chunk_end;
    struct {
        uint64_t tokens, chunk_end;
        uint32_t layers;
    } before; /* the part under way */
    kvf_request *request;
    kvf_carry carry;
    uint64_t bytes, bytes_packed, runs;
    bool posted;       /* some of it was under way */
    bool packed;       /* the consumer demands packed: no other way is used */
    bool over;         /* nothing more will be written */
    bool cut;          /* a connection ended under its writes */
    bool verified;     /* the consumer has asked for checksums of what was written */
    kvf_status status; /* why it failed */
    char *detail;
    bool withdrawn;
    bool refused; /* the consumer has given up, and we noticed that before we heard of its withdrawal */
    uint64_t withdraw_number;              /* the call to answer once nothing moves */
    kvf_call *told;                        /* WRITTEN, under way */
    bool heard;                            /* WRITTEN is answered, or no peer is left to answer it */
    uint32_t pass;                         /* the last sweep that visited it, while there is no push */
    kvf_flow *moving_prev, *moving_next;   /* agent->moving_flows */
    kvf_waiting *waiting;                  /* while there is no push */
    kvf_flow *same_prev, *same_next;       /* waiting->flows */
    kvf_flow *prev, *next;                 /* push->flows, or agent->flows while there is no push */
    kvf_flow *session_prev, *session_next; /* session->flows */
};

kvf_status kvf_flow_make(kvf_session *session, const kvf_call_body *call, kvf_flow **out);
/** Adds a part of its tables; with the last one the flow may be written. */
kvf_status kvf_flow_add(kvf_flow *flow, const kvf_call_body *call);
void kvf_push_expected(kvf_session *session, const kvf_call_body *call, bool fresh); /**< serves EXPECT */
void kvf_flow_withdraw(kvf_session *session, const kvf_call_body *call);
kvf_flow *kvf_flow_of(const kvf_session *session, uint64_t generation);
/** Whether it waits for a push only to be counted. This was answered, so its consumer does not say it again: it stays until
 * its time is over, also if its session ends. */
bool kvf_flow_wants_nothing(const kvf_flow *flow);
void kvf_flow_pump(kvf_flow *flow);
/** kvf_flow_pump() for all flows of a session. */
void kvf_flows_pump(const kvf_session *session);
void kvf_flow_poll(kvf_flow *flow); /**< looks whether its carry has ended */
void kvf_flow_tick(kvf_flow *flow, uint64_t now);
void kvf_flow_stop(kvf_flow *flow, kvf_status status, const char *detail);
void kvf_flow_drop(kvf_flow *flow); /**< its session ends: counts it as served, with a failure */
void kvf_flow_free(kvf_flow *flow);
void kvf_push_served(kvf_flow *flow); /**< frees it */
void kvf_flows_tick(kvf_agent *agent, uint64_t now);
void kvf_join_answer(kvf_session *session, const kvf_call_body *call, bool fresh);

#endif
