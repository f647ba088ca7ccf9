/*
 * Holds: blocks that others read.
 */
#ifndef KVF_AGENT_HOLD_H
#define KVF_AGENT_HOLD_H

#include "agent/tally.h"
#include "agent/ticket.h"

struct kvf_hold {
    kvf_ticket base;
    kvf_tally tally;
    kvf_reader *readers;
    kvf_after *after;         /* the blocks are ready when this has happened; NULL: they are ready */
    uint64_t lease_until;     /* of the hold itself */
    uint64_t latest;          /* the end of all that peers may make of it */
    kvf_status reader_failed; /* the status that the last failed reader gave */
};

/** A lease: one rank of a consumer may read a hold. */
struct kvf_reader {
    uint64_t generation;
    uint64_t asked; /* number of the ACQUIRE that it answers */
    kvf_hold *hold;
    kvf_session *session;   /* in which it was granted, lost or not */
    uint64_t until, latest; /* `latest` bounds every renewal */
    uint32_t expected_ranks;
    bool left;                               /* a flow by which it read was left with its connection */
    UT_hash_handle hh;                       /* agent->leases, by generation */
    kvf_reader *prev, *next;                 /* hold->readers */
    kvf_reader *session_prev, *session_next; /* session->readers */
};

void kvf_hold_acquire(kvf_session *session, const kvf_call_body *call, bool fresh);
void kvf_hold_release(kvf_session *session, const kvf_call_body *call, bool fresh);
/** The lease of this number; NULL: the session's process has none. */
kvf_reader *kvf_reader_find(const kvf_session *session, uint64_t generation);
void kvf_reader_drop(kvf_reader *reader);
void kvf_reader_left(void *agent, uint64_t generation); /**< a flow by which it reads does not go on */
bool kvf_hold_is_read(const kvf_ticket *ticket);        /**< it is a hold, and a reader has a lease on it */

#endif
