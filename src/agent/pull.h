/*
 * Pulls: reading a request that a producer holds.
 */
#ifndef KVF_AGENT_PULL_H
#define KVF_AGENT_PULL_H

#include "agent/carry.h"

struct kvf_pull {
    union {
        kvf_ticket base;
        kvf_asker asker;
    };
    char *key;               /* in agent->pulls */
    uint64_t patience;       /* when the blocks must have been lent; not after the deadline */
    kvf_group_steps *theirs; /* the producer's blocks */
    kvf_request *request;
    kvf_carry carry;
    bool leaves; /* waits until no other pull uses a connection that is to be passed over */
    kvf_pull *moving_prev, *moving_next; /* agent->moving_pulls */
};

static inline kvf_pull *kvf_pull_of(kvf_ticket *ticket) {
    return (kvf_pull *)ticket;
}

void kvf_pull_granted(kvf_source *source); /**< its lease is known to last */

/* ---- pull_move.c ----------------------------------------------------------------------------- */

/** All leases are granted, and the destination is known: moves, once all ranks that need our card have it. */
void kvf_pull_move(kvf_pull *pull);
void kvf_pull_joined(kvf_source *source); /**< its rank has our card, or refused it */
void kvf_pull_poll(kvf_pull *pull);       /**< looks whether its carry has ended */
void kvf_pull_end_carry(kvf_pull *pull);  /**< its carry has ended: takes over the counts */

/** Every byte is here, and is verified if that was requested: done, if every lease was good until now. */
void kvf_pull_arrived(kvf_pull *pull);

/** A source whose lease is over. NULL: there is none. */
kvf_source *kvf_pull_expired(const kvf_pull *pull, uint64_t now);

/** Releases the blocks at each rank of the producer that waits for us. Does not wait for answers. */
void kvf_pull_release(kvf_pull *pull, kvf_status outcome);

/** All cells and records are here: done. */
void kvf_pull_finish(kvf_pull *pull);

#endif
