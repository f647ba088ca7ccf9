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

void kvf_pull_granted(kvf_source *source); /**< its lease is known to last */
void kvf_pull_joined(kvf_source *source);  /**< its rank has our card, or did not take it */
void kvf_pull_poll(kvf_pull *pull);        /**< has what carries its bytes ended? */

#endif
