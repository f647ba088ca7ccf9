/*
 * The arrival of a pull or an expectation, layer by layer: the one place where it is counted, for its engine and for
 * streams that wait.
 *
 * Only requests that ask for it have one (kvf_agent_request.by_layer). It is looked at once a round, by the thread that
 * has the work. What is counted stays true: a pull's leases are good at the time, and a layer is never taken back.
 *
 * The driver may make its caller wait until a device has done all its work, and then for streams that wait here. So
 * streams are let go before a request's connections are closed, and while any of the process still wait, the fabric
 * "cuda" puts off what it takes back (cuda_link.c). A call of the engine may keep the driver's lock while it waits for
 * such a stream; then this agent's thread comes to nothing, and a moment after the deadline the guard of words lets the
 * streams go (cuda/word.h).
 */
#ifndef KVF_AGENT_ARRIVAL_H
#define KVF_AGENT_ARRIVAL_H

#include "agent/ticket.h"

typedef struct kvf_cuda_word kvf_cuda_word;

struct kvf_arrival {
    uint32_t layers, all;  /* model layers that have arrived, and that there are */
    kvf_cuda_word *word;   /* streams wait for it; NULL: none has yet */
    bool over;             /* the request has ended: no stream waits any more */
    bool late;             /* streams went on before it had */
    bool tells;            /* its engine wants KVF_EVENT_LAYERS */
    kvf_event_node *event; /* that waits to be taken; NULL: none does */
    bool counts;           /* expect: the stage counts in `come` */
    /* expect: bytes that came packed, and that are to come; by source of the plan, then by layer. NULL: not known */
    uint64_t *come, *awaited;
    kvf_asker *asker;
    kvf_arrival *prev, *next; /* agent->arrivals */
};

/** Begins to count for a new request, if it asks for it. KVF_OK, KVF_E_NOMEM */
kvf_status kvf_arrival_begin(kvf_asker *asker, const kvf_agent_request *request);

/** Looks at all requests that move. Once a round. */
void kvf_arrivals_look(kvf_agent *agent);

/** The request has ended, or is going to: all streams go on. False: they had to before, for the agent was held up by the
 * driver until after the deadline; so the request must not be done. */
bool kvf_arrival_end(kvf_asker *asker);
/** The same for all of an agent, which is being closed. No stream waits for later requests. */
void kvf_arrivals_end(kvf_agent *agent);
/** Ends the counting for good. All tickets have been freed. */
void kvf_arrivals_close(kvf_agent *agent);
void kvf_arrival_free(kvf_asker *asker);

#endif
