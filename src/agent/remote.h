/*
 * Remote engines: met as a whole, with the ranks we need and our plan.
 */
#ifndef KVF_AGENT_REMOTE_H
#define KVF_AGENT_REMOTE_H

#include "agent/geometry.h"
#include "agent/session.h"
#include "agent/siblings.h"
#include "wire/gather.h"

/** A rank that we read from, or only notify. */
typedef struct kvf_target {
    uint32_t rank;
    uint32_t source;         /* index in the plan; UINT32_MAX: only notified */
    uint32_t expected_ranks; /* the number of our engine's ranks that notify it */
} kvf_target;

struct kvf_remote {
    kvf_agent *agent;
    char *name, *endpoint, *public_key;
    bool ready;
    bool stale;      /* not for new requests: another took its name, or a rank of it was lost */
    kvf_route route; /* to the contact; 0 when ready */
    uint64_t hello_next, hello_pause;
    uint8_t digest[KVF_WIRE_DIGEST_BYTES]; /* of its facts */
    kvf_match *match;             /* what its model and ours have in common; NULL: they are the same */
    bool alike;                   /* its groups, layers and parts have the same numbers as ours */
    kvf_wire_buffer introduction; /* ours, in its terms; size 0: it understands our usual one */
    kvf_gathering gathering;      /* of its ranks' introductions, while it is being met */
    kvf_siblings siblings;        /* then: the ranks that were read so far */
    bool gathered;                /* all have come: the rest is done in bounded steps, one a round */
    uint32_t targets_called;      /* targets to which sessions were begun */
    kvf_geometry *geometry;       /* NULL: not all introductions were taken yet, or the engine was given up */
    kvf_plan *plan;               /* the geometry's; NULL: not ready */
    kvf_remote_rank *ranks;       /* likewise */
    uint32_t rank_count;
    kvf_target *targets;
    uint32_t target_count;
    uint32_t users; /* tickets */
    uint64_t last_used;
    char detail[256]; /* why meeting has not worked so far */
    kvf_status status;
    kvf_alarm time;          /* in agent->remote_times */
    UT_hash_handle hh;       /* agent->remotes, by name */
    UT_hash_handle hh_route; /* agent->meetings, by route; ended when ready or stale */
    kvf_remote *prev, *next; /* agent->all_remotes */
};

/** The remote engine of a contact, being met if it is new. Counts the caller as a user. */
kvf_status kvf_remote_take(kvf_agent *agent, const kvf_contact *contact, kvf_remote **out);
void kvf_remote_drop(kvf_remote *remote);
void kvf_remote_welcome(kvf_remote *remote, const uint8_t *digest, const kvf_welcome *welcome);
/** Meeting failed for good: all tickets that wait for it fail. */
void kvf_remote_fail(kvf_remote *remote, kvf_status status, const char *detail);
void kvf_remote_stale(kvf_remote *remote);
/** A session has ended: no remote engine has it. `lost`: they are stale. */
void kvf_remotes_leave(kvf_session *session, bool lost);
void kvf_remote_free(kvf_remote *remote);
void kvf_remotes_tick(kvf_agent *agent, uint64_t now); /**< ticks those that are due */

#endif
