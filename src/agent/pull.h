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
    uint64_t patience;       /* until when the blocks must have been lent; not after the deadline */
    kvf_group_steps *theirs; /* the producer's blocks */
    kvf_request *request;
    kvf_carry carry;
    kvf_pull *moving_prev, *moving_next; /* agent->moving_pulls */
};

static inline kvf_pull *kvf_pull_of(kvf_ticket *ticket) {
    return (kvf_pull *)ticket;
}

void kvf_pull_granted(kvf_source *source); /**< its lease is known to last */

/* ---- pull_move.c ----------------------------------------------------------------------------- */

/** All leases are granted, and the destination is known: moves, once the ranks that have to know us do. */
void kvf_pull_move(kvf_pull *pull);
void kvf_pull_joined(kvf_source *source); /**< its rank has our card, or did not take it */
void kvf_pull_poll(kvf_pull *pull);       /**< has what carries its bytes ended? */
void kvf_pull_end_carry(kvf_pull *pull);  /**< it has: takes over what it has counted */

/** Every byte is there, and is right where that was asked for: done, if every lease was good until now. */
void kvf_pull_arrived(kvf_pull *pull);

/** A source whose lease is over. NULL: there is none. */
kvf_source *kvf_pull_expired(const kvf_pull *pull, uint64_t now);

/** Tells each rank of the producer that waits for us that it need not. Answers are not waited for. */
void kvf_pull_release(kvf_pull *pull, kvf_status outcome);

/** Everything that was wanted is there, with the records: done. */
void kvf_pull_finish(kvf_pull *pull);

#endif
