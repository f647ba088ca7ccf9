/*
 * What comes before the hold or the push it is about.
 */
#ifndef KVF_AGENT_EARLY_H
#define KVF_AGENT_EARLY_H

#include "agent/ticket.h"

/** A call that came before the hold it is for (early.c). */
struct kvf_early {
    struct {
        kvf_session *session;
        kvf_waiting *waiting; /* for the same id */
        uint64_t kind;        /* of call: ACQUIRE, RELEASE */
    } of_whom;
    kvf_session *session;
    kvf_waiting *waiting; /* for the same id */
    kvf_call_kind kind;   /* ACQUIRE, RELEASE */
    UT_hash_handle hh;    /* agent->early_calls, by `of_whom` */
    uint64_t number;      /* of the call, to answer it */
    uint32_t expected_ranks;
    uint64_t until;
    uint32_t pass;                    /* that has looked at it last */
    kvf_early *prev, *next;           /* agent->early */
    kvf_early *own_prev, *own_next;   /* session->early */
    kvf_early *same_prev, *same_next; /* waiting->early */
};

/** The first that waits for a hold; NULL: none. */
kvf_early *kvf_early_first(const kvf_agent *agent, const kvf_ticket *ticket);
/** The one that this call left when it came before. */
kvf_early *kvf_early_find(const kvf_session *session, const kvf_call_body *call);
/** Keeps a call for `wait` nanoseconds. The caller of an ACQUIRE waits for its answer; a RELEASE gets it now.
 */
kvf_status kvf_early_keep(kvf_session *session, const kvf_call_body *call, uint64_t wait);
void kvf_early_tick(kvf_agent *agent, uint64_t now);
void kvf_early_forget(kvf_session *session);
void kvf_early_free(kvf_early *early);
/** Puts an expectation where its push will look for it, and takes it away. */
kvf_status kvf_flow_wait(kvf_flow *flow);
void kvf_flow_wait_no_more(kvf_flow *flow);
kvf_flow *kvf_flow_waiting_for(const kvf_agent *agent, const kvf_ticket *push);

#endif
