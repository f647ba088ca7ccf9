/*
 * Calls and expectations that arrive before the hold or the push they are for.
 */
#ifndef KVF_AGENT_EARLY_H
#define KVF_AGENT_EARLY_H

#include "agent/ticket.h"

/** All that waits for the hold or the push of one request. */
struct kvf_waiting {
    void *id;
    size_t id_bytes;
    kvf_early *early;
    kvf_flow *flows;
    UT_hash_handle hh; /* agent->waiting, by id */
};

/** A call that came before its hold (early.c). */
struct kvf_early {
    struct {
        kvf_session *session;
        kvf_waiting *waiting; /* for the same id */
        uint64_t kind;        /* of call: ACQUIRE, RELEASE */
    } of_whom;
    kvf_session *session; /* in which it came; for a RELEASE, lost or not */
    kvf_waiting *waiting; /* for the same id */
    kvf_call_kind kind;   /* ACQUIRE, RELEASE */
    UT_hash_handle hh;    /* agent->early_calls, by `of_whom` */
    uint64_t number;      /* of the call, to answer it */
    uint32_t expected_ranks;
    uint64_t until;
    uint32_t pass;                    /* the last sweep that visited it */
    kvf_early *prev, *next;           /* agent->early */
    kvf_early *own_prev, *own_next;   /* session->early */
    kvf_early *same_prev, *same_next; /* waiting->early */
};

/** The first early call that waits for a hold; NULL: none. */
kvf_early *kvf_early_first(const kvf_agent *agent, const kvf_ticket *ticket);
/** The entry that an earlier copy of this call left. */
kvf_early *kvf_early_find(const kvf_session *session, const kvf_call_body *call);
/** Keeps a call for `wait` nanoseconds. An ACQUIRE is answered later, a RELEASE now. */
kvf_status kvf_early_keep(kvf_session *session, const kvf_call_body *call, uint64_t wait);
void kvf_early_tick(kvf_agent *agent, uint64_t now);
/** A session has ended. Its peer asks again in the next one, so its ACQUIREs are forgotten. It does not say again that it
 * wants nothing, as that was answered: a RELEASE is kept until its time is over, and the session until then. */
void kvf_early_forget(kvf_session *session);
void kvf_early_free(kvf_early *early);
/** Lists an expectation where its push will look for it; kvf_flow_wait_no_more() unlists it. */
kvf_status kvf_flow_wait(kvf_flow *flow);
void kvf_flow_wait_no_more(kvf_flow *flow);
/** Whether it waits for a push that will not come, because the agent drains. */
bool kvf_flow_is_refused(const kvf_flow *flow);
kvf_flow *kvf_flow_waiting_for(const kvf_agent *agent, const kvf_ticket *push);

#endif
