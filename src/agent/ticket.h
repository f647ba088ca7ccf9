/*
 * Tickets: what all requests of our engine have in common; and askers: the tickets that need a remote engine. A kind of
 * request is a table of operations and a struct that begins with a ticket or an asker.
 */
#ifndef KVF_AGENT_TICKET_H
#define KVF_AGENT_TICKET_H

#include "agent/parts.h"
#include "agent/records.h"
#include "agent/remote.h"
#include "agent/steps.h"

typedef enum kvf_ticket_state {
    KVF_TICKET_MEETING = 1, /* the remote engine is not known yet */
    KVF_TICKET_ASKING,      /* pull: leases asked for. expect: producers asked to write */
    KVF_TICKET_RESERVED,    /* pull: all leases are there, the destination is not */
    KVF_TICKET_MOVING,      /* pull: reading. expect, push: data flows */
    KVF_TICKET_VERIFYING,
    KVF_TICKET_WAITING, /* hold: its blocks are not ready yet */
    KVF_TICKET_HELD,    /* hold */
    KVF_TICKET_CLOSING, /* hold: takes no new readers; the present ones finish */
    KVF_TICKET_DOUBT,   /* the result was told, the blocks are not free yet */
    KVF_TICKET_OVER,    /* freed in the next tick */
} kvf_ticket_state;

/** What a kind of ticket does. */
typedef struct kvf_ticket_ops {
    kvf_request_kind kind;
    size_t size; /* of its struct, which begins with a kvf_ticket */
    bool lends;  /* its blocks are read, and not written */
    bool grows;  /* its tables need not cover its steps: blocks come later */
    bool tells;  /* peers are told its tables */
    bool asks;   /* it begins with a kvf_asker */
    /** Takes the fields that are special to its kind from the request; NULL: there are none. */
    kvf_status (*begin)(kvf_ticket *ticket, const kvf_agent_request *request);
    /** Does what is due. */
    void (*tick)(kvf_ticket *ticket, uint64_t now);
    /** Something has failed. `session`: the one at fault, or NULL. Not called once the result was told. */
    void (*fail)(kvf_ticket *ticket, kvf_status status, const char *detail, const kvf_session *session);
    /** Its remote engine is known, and its sources are attached. NULL: it needs none. */
    void (*met)(kvf_ticket *ticket);
    /** The cells it received have the checksums of its sources. NULL: it receives nothing. */
    void (*verified)(kvf_ticket *ticket);
    /** How many of the first model layers have arrived while it moves, for arrival.c. NULL: it receives nothing. */
    uint32_t (*arrived)(const kvf_ticket *ticket);
    /** An event that it waits for has happened; drops it. NULL: it never waits for one. */
    void (*ready)(kvf_ticket *ticket, kvf_after *after);
    /** Frees what is special to its kind; NULL: nothing. */
    void (*free)(kvf_ticket *ticket);
} kvf_ticket_ops;

/** How fast a pull or a push may move its bytes (pace.c). */
typedef struct kvf_pace {
    int32_t priority;
    uint64_t cap;            /* bytes a second; 0: none */
    uint64_t saved, counted; /* bytes that the cap allows now, and when they were computed */
    uint64_t moved;          /* when its last bytes were allowed to move */
    uint64_t budget;         /* bytes in this round; UINT64_MAX: all */
    uint32_t transfers;      /* that share the budget */
} kvf_pace;

struct kvf_ticket {
    const kvf_ticket_ops *ops;
    /** agent->tickets, by number. A tick visits thousands of tickets: the fields it needs follow. */
    UT_hash_handle hh;
    kvf_ticket_state state;
    kvf_request_kind kind;
    uint64_t deadline;
    kvf_agent *agent;
    uint64_t number;
    void *id;
    size_t id_bytes;
    kvf_group_steps *groups; /* NULL: a pull without destination yet */
    uint32_t group_count;
    bool empty;                                /* every group is empty: nothing moves */
    kvf_block_table *claims;                   /* its blocks in the ledger, by group; NULL: none */
    bool silent;                               /* its result was told: no second one is */
    kvf_event_node *result_event, *free_event; /* reserved, so that telling cannot fail */
    uint64_t created;
    uint64_t bytes, runs, packed;
    kvf_records records; /* lends: those that travel with it. Otherwise: those received, once it is done */
    kvf_pace pace;
    kvf_way way;       /* the request's */
    kvf_status status; /* why it failed */
    char *detail;
    char *peer_engine; /* for the event */
    uint32_t peer_rank;

    kvf_ticket *over_prev, *over_next; /* agent->over */

    UT_hash_handle hh_id; /* agent->holds, agent->pushes, by id; agent->pulls */
};

/** The part of a pull or an expect that concerns one rank of the producer. */
struct kvf_source {
    /* A heartbeat walks all sources of a session: the fields it reads lie together. */
    kvf_asker *ticket;
    kvf_source *prev, *next; /* session->sources */
    kvf_call *call;
    uint64_t generation; /* pull: of the lease; 0: none */
    uint64_t until; /* pull: the lease is good until then. expect: it may write until then, at the latest */
    uint64_t beat;  /* number of the last heartbeat that named it */
    bool settled;   /* pull: granted. expect: it will write no more */
    bool written;   /* expect: and has written everything */

    kvf_session *session;
    const kvf_target *target;
    kvf_parts parts;     /* pull: of its block tables, until all have come */
    kvf_records records; /* received from it */
    uint32_t told_ids;   /* expect: our block ids that it knows */
    bool more;           /* expect: more ids are to be sent */
    void *card;          /* expect: of a writer in doubt, to shut it out */
    size_t card_bytes;
    bool asked;          /* expect: EXPECT was sent */
    uint32_t opening;    /* expect: in this opening of the session */
    bool gone;           /* expect: the process of a writer in doubt has ended */
    uint64_t late_until; /* expect: what a writer that cannot be shut out has sent may arrive; 0: not known */
    bool stays;          /* expect: it was logged that a writer does not end a write */
    uint64_t written_call; /* expect: the WRITTEN to answer when all is verified */
};

/** A ticket that needs ranks of a remote engine: a pull, an expect, a connect. */
struct kvf_asker {
    kvf_ticket base;
    kvf_remote *remote;
    kvf_source *sources;
    uint32_t source_count;
    uint64_t posted;         /* when the first run was posted */
    struct kvf_check *check; /* verifying */
    kvf_arrival *arrival;    /* layer by layer; NULL: it is not counted */
    kvf_after *after;        /* no byte is written to the blocks before it; NULL: nothing to wait for */
    bool complete;           /* expect: all is here, and verified if it is to be */
};

static inline kvf_asker *kvf_asker_of(kvf_ticket *ticket) {
    return (kvf_asker *)ticket;
}

/** The remote engine that a ticket needs; NULL: none. */
static inline const kvf_remote *kvf_ticket_remote(const kvf_ticket *ticket) {
    return ticket->ops->asks ? ((const kvf_asker *)ticket)->remote : NULL;
}

/** Makes a ticket from the engine's request: copies, checks, claims the blocks. */
kvf_status kvf_ticket_make(kvf_agent *agent, const kvf_ticket_ops *ops, const kvf_agent_request *given,
                           kvf_ticket **out);
/** The ticket of a number if it is of this kind; NULL otherwise. */
kvf_ticket *kvf_ticket_find(const kvf_agent *agent, uint64_t number, const kvf_ticket_ops *ops);
/** Lists a new ticket in the table of its kind, by `key`, which the ticket owns; on failure frees the ticket. */
kvf_status kvf_ticket_list(kvf_ticket *ticket, kvf_ticket **table, kvf_bytes key);
/** Claims the blocks of `groups` for a ticket, which keeps a copy. */
kvf_status kvf_ticket_claim(kvf_ticket *ticket, const kvf_group_steps *groups, uint32_t group_count);
/** Gives a lending ticket the groups with more blocks that kvf_steps_merge() made, and claims the new blocks. On
 * success the ticket owns the groups. */
kvf_status kvf_ticket_grow(kvf_ticket *ticket, kvf_group_steps *groups);
void kvf_ticket_detach(kvf_asker *ticket);
/** Gathers the records of all its sources, before it is done. KVF_OK, KVF_E_NOMEM */
kvf_status kvf_ticket_gather(kvf_asker *ticket);
/** Ends a ticket with success: tells the engine, and frees the blocks, and the ticket in the next tick. With a failure
 * if streams did not wait for its layers to the end (arrival.h). */
void kvf_ticket_done(kvf_ticket *ticket);
/** Records the first failure; the ticket's kind decides when it ends. */
void kvf_ticket_record_failure(kvf_ticket *ticket, kvf_status status, const char *detail,
                               const kvf_session *session);
/** Tells the engine a recorded failure. With `blocks_free` the blocks are free; without, the ticket is in doubt. */
void kvf_ticket_tell(kvf_ticket *ticket, bool blocks_free);
/** Tells the engine that the blocks of a ticket in doubt are free. */
void kvf_ticket_settle(kvf_ticket *ticket);
/** Makes its id free for use; peers that ask for what it lent are told that it is over. */
void kvf_ticket_unlist(kvf_ticket *ticket);
void kvf_ticket_free(kvf_ticket *ticket);

/**
 * Whether the remote engine of a ticket, or one of the ranks it needs, has not been met.
 *
 * @param why  receives who that is, and the reason
 */
bool kvf_ticket_unmet(const kvf_asker *ticket, char *why, size_t bytes);
/** Why the transport is not connected yet to a rank that a ticket reads; NULL: it is, or need not be. */
const char *kvf_ticket_waits_for(const kvf_asker *ticket);
/** Starts a new ticket that needs a remote engine, and returns its number; on failure frees the ticket. */
kvf_status kvf_ticket_meet(kvf_asker *ticket, const kvf_contact *contact, uint64_t *number);
/** The remote engine of a ticket is known now. */
void kvf_ticket_met(kvf_asker *ticket);

/** The session of a source is lost: ends what the source still waited for. */
void kvf_source_lost(kvf_source *source);

/** Fails a ticket of any kind, by its kind's operation. `session`: the one at fault, or NULL. */
void kvf_ticket_fail(kvf_ticket *ticket, kvf_status status, const char *detail, const kvf_session *session);

void kvf_event_ticket(kvf_ticket *ticket, kvf_event_kind kind, bool blocks_free);
bool kvf_events_reserve(kvf_ticket *ticket);
/** So many layers of a request have arrived. `waits` has the event that says so, as long as it waits to be taken; it must
 * stay where it is until kvf_event_stay(). */
void kvf_event_layers(kvf_ticket *ticket, uint32_t layers, kvf_event_node **waits);
/** An event of layers stays as it is from now on. NULL is accepted. */
void kvf_event_stay(kvf_event_node *waits);

/** Logs a failure as an object of JSON. */
void kvf_log_failure(kvf_agent *agent, const char *what, const kvf_ticket *ticket, const char *engine,
                     uint32_t rank, kvf_status status, const char *detail);

#endif
