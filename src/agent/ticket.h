/*
 * Tickets: what every request of our engine has, whatever its kind; and what those have that want something
 * of a remote engine. A kind is a table of operations and a struct that begins with one of these.
 */
#ifndef KVF_AGENT_TICKET_H
#define KVF_AGENT_TICKET_H

#include "agent/parts.h"
#include "agent/records.h"
#include "agent/remote.h"
#include "agent/steps.h"

typedef enum kvf_ticket_state {
    KVF_TICKET_MEETING = 1, /* the remote engine is not known yet */
    KVF_TICKET_ASKING,      /* pull: leases asked for. expect: asked to be written */
    KVF_TICKET_RESERVED,    /* pull: all leases are there, the destination is not */
    KVF_TICKET_MOVING,      /* pull: reading. expect, push: data flows */
    KVF_TICKET_VERIFYING,
    KVF_TICKET_WAITING, /* hold: its blocks are not ready yet */
    KVF_TICKET_HELD,    /* hold */
    KVF_TICKET_CLOSING, /* hold: nobody new, the readers there are finish */
    KVF_TICKET_DOUBT,   /* the result was told, the blocks are not free yet */
    KVF_TICKET_OVER,    /* freed in the next tick */
} kvf_ticket_state;

/** What a kind of ticket does. */
typedef struct kvf_ticket_ops {
    kvf_request_kind kind;
    size_t size; /* of its struct, which begins with a kvf_ticket */
    bool lends;  /* its blocks are read, and not written */
    bool grows;  /* its tables need not reach over its steps: blocks come later */
    bool asks;   /* it begins with a kvf_asker */
    /** Takes from the request what is its own; NULL: nothing. */
    kvf_status (*begin)(kvf_ticket *ticket, const kvf_agent_request *request);
    /** Looks at the clock. */
    void (*tick)(kvf_ticket *ticket, uint64_t now);
    /** Something has failed. `session`: whose fault it is, or NULL. Not called once the result was told. */
    void (*fail)(kvf_ticket *ticket, kvf_status status, const char *detail, const kvf_session *session);
    /** Its remote engine is known, and its sources are attached. NULL: it needs none. */
    void (*met)(kvf_ticket *ticket);
    /** What it received has the checksums of its sources. NULL: it receives nothing. */
    void (*verified)(kvf_ticket *ticket);
    /** An event has happened that it waits for; drops it. NULL: it never does. */
    void (*ready)(kvf_ticket *ticket, kvf_after *after);
    /** What else is its own is given back; NULL: nothing. */
    void (*free)(kvf_ticket *ticket);
} kvf_ticket_ops;

/** How fast a pull or a push may move its bytes (pace.c). */
typedef struct kvf_pace {
    int32_t priority;
    uint64_t cap;            /* bytes a second; 0: none */
    uint64_t saved, counted; /* bytes that the cap lets move now, and when that was worked out */
    uint64_t moved;          /* when its last bytes were let go */
    uint64_t budget;         /* in this round; UINT64_MAX: as many as there are */
    uint32_t transfers;      /* that share it */
} kvf_pace;

struct kvf_ticket {
    const kvf_ticket_ops *ops;
    UT_hash_handle
        hh; /* agent->tickets, by number. A tick goes through thousands of them: it finds all it needs here */
    kvf_ticket_state state;
    kvf_request_kind kind;
    uint64_t deadline;
    kvf_agent *agent;
    uint64_t number;
    void *id;
    size_t id_bytes;
    kvf_group_steps *groups; /* NULL: a pull without destination yet */
    uint32_t group_count;
    bool empty;                                /* every group is: nothing moves */
    kvf_block_table *claims;                   /* what the ledger knows of it, by group; NULL: nothing */
    bool silent;                               /* its result was told: what is left is done without */
    kvf_event_node *result_event, *free_event; /* reserved, so that telling cannot fail */
    uint64_t created;
    uint64_t bytes, runs, packed;
    kvf_records records; /* lends: that travel with it. Otherwise: that came, once it is done */
    kvf_pace pace;
    kvf_way way;       /* that the request says */
    kvf_status status; /* why it failed */
    char *detail;
    char *peer_engine; /* for the event */
    uint32_t peer_rank;

    kvf_ticket *over_prev, *over_next; /* agent->over */

    UT_hash_handle hh_id; /* agent->holds, agent->pushes, by id; agent->pulls */
};

/** What a pull or an expect has to do with one rank of the producer. */
struct kvf_source {
    /* A heartbeat walks all sources of a session: what it reads lies together. */
    kvf_asker *ticket;
    kvf_source *prev, *next; /* session->sources */
    kvf_call *call;
    uint64_t generation; /* pull: of the lease; 0: none */
    uint64_t until; /* pull: the lease is good until then. expect: it may write until then, at the latest */
    uint64_t beat;  /* number of the last heartbeat that spoke of it */
    bool settled;   /* pull: granted. expect: it will write no more */
    bool written;   /* expect: and has written everything */

    kvf_session *session;
    const kvf_target *target;
    kvf_parts parts;     /* pull: of its block tables, until all have come */
    kvf_records records; /* that came from it */
    uint32_t told_ids;   /* expect: of ours that it knows */
    bool more;           /* expect: and there are others */
    void *card;          /* expect: of a writer in doubt, to shut it out */
    size_t card_bytes;
    bool asked;            /* expect: EXPECT was sent */
    bool gone;             /* expect: the process of a writer in doubt has ended */
    bool stays;            /* expect: that a writer does not end a write has been logged */
    uint64_t written_call; /* expect: the WRITTEN to answer when all is verified */
};

/** A ticket that wants something of ranks of a remote engine: a pull, an expect, a connect. */
struct kvf_asker {
    kvf_ticket base;
    kvf_remote *remote;
    kvf_source *sources;
    uint32_t source_count;
    uint64_t posted;         /* when the first run was */
    struct kvf_check *check; /* verifying */
};

static inline kvf_asker *kvf_asker_of(kvf_ticket *ticket) {
    return (kvf_asker *)ticket;
}

/** The remote engine that a ticket wants something of; NULL: none. */
static inline const kvf_remote *kvf_ticket_remote(const kvf_ticket *ticket) {
    return ticket->ops->asks ? ((const kvf_asker *)ticket)->remote : NULL;
}

/** Makes a ticket from what the engine asked: copies, checks, claims the blocks. */
kvf_status kvf_ticket_make(kvf_agent *agent, const kvf_ticket_ops *ops, const kvf_agent_request *given,
                           kvf_ticket **out);
/** The ticket of a number if it is of this kind; NULL otherwise. */
kvf_ticket *kvf_ticket_find(const kvf_agent *agent, uint64_t number, const kvf_ticket_ops *ops);
/** Lists a new ticket in the table of its kind, by `key`, which is the ticket's; frees it where it cannot. */
kvf_status kvf_ticket_list(kvf_ticket *ticket, kvf_ticket **table, kvf_bytes key);
/** Claims the blocks of `groups` for a ticket, whose own they become (a copy). */
kvf_status kvf_ticket_claim(kvf_ticket *ticket, const kvf_group_steps *groups, uint32_t group_count);
/** Gives a ticket that lends groups with more blocks than it has, from kvf_steps_merge(), and claims those that are
 * new. They become its own where it succeeds. */
kvf_status kvf_ticket_grow(kvf_ticket *ticket, kvf_group_steps *groups);
void kvf_ticket_unclaim(kvf_ticket *ticket);
/** Attaches a pull, expect or connect to the sessions of its remote's targets. */
kvf_status kvf_ticket_attach(kvf_asker *ticket);
void kvf_ticket_detach(kvf_asker *ticket);
void kvf_source_detach(kvf_source *source);
/** Takes the records of all its sources together, before it is done. KVF_OK, KVF_E_NOMEM */
kvf_status kvf_ticket_gather(kvf_asker *ticket);
/** Ends with success: tells it, frees blocks, and the ticket in the next tick. */
void kvf_ticket_done(kvf_ticket *ticket);
/** Records the first failure; what ends the ticket is the business of its kind. */
void kvf_ticket_record_failure(kvf_ticket *ticket, kvf_status status, const char *detail,
                               const kvf_session *session);
/** Tells a recorded failure. With `free` the blocks are free; without, the ticket is in doubt. */
void kvf_ticket_tell(kvf_ticket *ticket, bool blocks_free);
/** The blocks of a ticket in doubt are free: tells it. */
void kvf_ticket_settle(kvf_ticket *ticket);
/** Its id may be used again; who asks for what it lent is told that it is over. */
void kvf_ticket_unlist(kvf_ticket *ticket);
void kvf_ticket_free(kvf_ticket *ticket);

/** Why the remote engine of a ticket, or one of the ranks it needs, has not been met; NULL when all have. */
const char *kvf_ticket_unmet(const kvf_asker *ticket);
/** Starts a new ticket that needs a remote engine, and gives its number; frees it where it cannot. */
kvf_status kvf_ticket_meet(kvf_asker *ticket, const kvf_contact *contact, uint64_t *number);
/** The remote engine of a ticket is known now. */
void kvf_ticket_met(kvf_asker *ticket);

/** The session of a source is lost: whatever it still stood for is over. */
void kvf_source_lost(kvf_source *source);

/** Fails a ticket of any kind, in the way of its kind. `session`: whose fault it is, or NULL. */
void kvf_ticket_fail(kvf_ticket *ticket, kvf_status status, const char *detail, const kvf_session *session);

void kvf_event_ticket(kvf_ticket *ticket, kvf_event_kind kind, bool blocks_free);
bool kvf_events_reserve(kvf_ticket *ticket);

/** Logs a failure as an object of JSON. */
void kvf_log_failure(kvf_agent *agent, const char *what, const kvf_ticket *ticket, const char *engine,
                     uint32_t rank, kvf_status status, const char *detail);

#endif
