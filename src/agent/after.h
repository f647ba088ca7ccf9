/*
 * Events that tickets wait for before memory is read.
 */
#ifndef KVF_AGENT_AFTER_H
#define KVF_AGENT_AFTER_H

#include "agent/ticket.h"
#include "cuda/moment.h"

/** An event that a ticket waits for: a descriptor, or a moment of a device. */
struct kvf_after {
    kvf_ticket *ticket;
    int fd; /* -1: a moment */
    kvf_cuda_moment *moment;
    short seen;             /* revents of poll() */
    kvf_after *prev, *next; /* agent->afters */
};

/**
 * Begins to wait for an event of the engine.
 *
 * @param out  receives NULL if there is nothing to wait for: no event was given, or KVF_READY_NOW
 * @return KVF_OK, KVF_E_UNSUPPORTED, KVF_E_INVALID, KVF_E_IO, KVF_E_NOMEM
 */
kvf_status kvf_after_take(kvf_ticket *ticket, const kvf_ready_event *given, kvf_after **out);
void kvf_after_drop(kvf_after *after); /**< NULL is accepted */
/** Ends the waiting of a pull or expectation for the event after which its blocks may be written. */
void kvf_asker_stop_waiting(kvf_asker *asker);
/** Tells the tickets whose events have happened. Once a round. */
void kvf_afters_look(kvf_agent *agent);

#endif
