/*
 * Remote engines: met as a whole, with the ranks we have to do with and our plan.
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
    uint32_t expected_ranks; /* so many ranks of our engine notify it */
} kvf_target;

struct kvf_remote {
    kvf_agent *agent;
    char *name, *endpoint, *public_key;
    bool ready;
    bool stale;      /* not for new requests: another took its name, or a rank of it was lost */
    kvf_route route; /* to the contact; 0 when ready */
    uint64_t hello_first, hello_next, hello_pause;
    uint8_t digest[KVF_WIRE_DIGEST_BYTES]; /* of its facts */
    kvf_match *match;             /* what its model and ours have in common; NULL: they are the same */
    bool alike;                   /* its groups, layers and parts have the numbers that ours have */
    kvf_wire_buffer introduction; /* of us, in its terms; size 0: it knows ours */
    kvf_gathering gathering;      /* of its ranks, while it is being met */
    kvf_siblings siblings;        /* then: those that were read so far */
    bool gathered;                /* all have come: what follows is done in bounded steps, a round each */
    uint32_t targets_called;      /* sessions with these were begun */
    kvf_geometry *geometry;       /* NULL: not all introductions were taken yet, or it was given up */
    kvf_plan *plan;               /* the geometry's; NULL: not ready */
    kvf_remote_rank *ranks;       /* likewise */
    uint32_t rank_count;
    kvf_target *targets;
    uint32_t target_count;
    kvf_request *spare; /* kept for the next pull */
    uint32_t users;     /* tickets */
    uint64_t last_used;
    char detail[256]; /* why meeting has not worked so far */
    kvf_status status;
    UT_hash_handle hh;       /* agent->remotes, by name */
    kvf_remote *prev, *next; /* agent->all_remotes */
};

/** The remote engine of a contact, being met if it is new. Counts the caller as a user. */
kvf_status kvf_remote_take(kvf_agent *agent, const kvf_contact *contact, kvf_remote **out);
void kvf_remote_drop(kvf_remote *remote);
void kvf_remote_welcome(kvf_remote *remote, const uint8_t *digest, const kvf_welcome *welcome);
/** Meeting failed for good: all who wait for it fail. */
void kvf_remote_fail(kvf_remote *remote, kvf_status status, const char *detail);
void kvf_remote_stale(kvf_remote *remote);
/** The place of a session among the ranks of a remote engine; NULL when it is none of them. */
kvf_remote_rank *kvf_remote_rank_of(kvf_remote *remote, const kvf_session *session);
void kvf_remote_free(kvf_remote *remote);
void kvf_remotes_tick(kvf_agent *agent, uint64_t now);

#endif
