/*
 * The inside of an agent.
 *
 *   link       messages in and out                               link.c
 *   session    one rank of a peer: greeting, calls, liveness     session.c, call.c, beat.c
 *   remote     an engine we read from: its ranks and our plan    remote.c
 *   ticket     one request of our engine, and its events         ticket.c, event.c
 *     hold       blocks others read     (producer)               hold.c
 *     pull       reading them           (consumer)               pull.c
 *     push       writing to others      (producer)               push.c, flow.c
 *     expect     being written to       (consumer)               expect.c
 *
 * Messages may be lost, repeated, late and out of order. So: who wants something *calls*, and repeats the
 * call until it is answered; who is called does the same thing once however often it is asked; and whatever
 * came from a session, a lease or an expectation that is no more is dropped by its number. Time is what ends
 * things when the other side says nothing.
 *
 * Everything here runs under the agent's lock. Functions that end a ticket or a session may free it.
 */
#ifndef KVF_AGENT_ROOM_H
#define KVF_AGENT_ROOM_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include <kvferry/agent.h>

#include "agent/histogram.h"
#include "agent/ledger.h"
#include "base/tables.h"
#include "link/link.h"
#include "wire/wire.h"

#define KVF_MILLISECOND 1000000ull
#define KVF_SECOND 1000000000ull
#define KVF_NO_RANK UINT32_MAX
#define KVF_EXPECTATION (1ull << 63) /* set in generations of expectations, never in those of leases */

typedef struct kvf_session kvf_session;
typedef struct kvf_remote kvf_remote;
typedef struct kvf_ticket kvf_ticket;
typedef struct kvf_asker kvf_asker;
typedef struct kvf_pull kvf_pull;
typedef struct kvf_hold kvf_hold;
typedef struct kvf_push kvf_push;
typedef struct kvf_source kvf_source;
typedef struct kvf_call kvf_call;
typedef struct kvf_flow kvf_flow;
typedef struct kvf_reader kvf_reader;
typedef struct kvf_early kvf_early;
typedef struct kvf_waiting kvf_waiting;
typedef struct kvf_event_node kvf_event_node;
typedef struct kvf_log_entry kvf_log_entry;

/* ---- calls: asked until answered ------------------------------------------------------------- */

/**
 * Called once: with the answer; or with KVF_E_TIMEOUT or KVF_E_PEER_LOST and no answer. Not called for calls
 * that were dropped. The call is freed after it.
 */
typedef void (*kvf_call_done)(kvf_call *call, kvf_status status, const kvf_answer *answer);

struct kvf_call {
    uint64_t number; /* in its session */
    kvf_session *session;
    kvf_call_kind kind;
    kvf_wire_buffer bytes;
    bool bound;          /* bytes carry the session's id */
    bool once;           /* not repeated */
    uint64_t first_sent; /* 0: not yet */
    uint64_t next_send, pause, deadline;
    kvf_call_done done; /* NULL: nobody waits */
    void *context;
    UT_hash_handle hh; /* session->calls, by number */
};

/**
 * Starts a call; it goes out as soon as the session is open.
 *
 * @param body     session, number and kind are filled in
 * @param out      receives the call, for kvf_call_drop(); may be NULL
 */
kvf_status kvf_call_start(kvf_session *session, kvf_call_kind kind, kvf_call_body *body, uint64_t deadline,
                          bool once, kvf_call_done done, void *context, kvf_call **out);

/** Forgets a call; an answer that comes is ignored. NULL is accepted. */
void kvf_call_drop(kvf_call *call);

void kvf_call_answered(kvf_session *session, const kvf_answer *answer);
void kvf_calls_bind(kvf_session *session);                   /**< the session is open (again): send them */
void kvf_calls_end(kvf_session *session, kvf_status status); /**< ends all of a session's calls */
void kvf_calls_tick(kvf_session *session, uint64_t now);

/** Answers a call of a peer. */
void kvf_answer_send(kvf_session *session, const kvf_call_body *call, kvf_answer *answer);
void kvf_answer_status(kvf_session *session, const kvf_call_body *call, kvf_status status,
                       const char *detail);

/* ---- sessions -------------------------------------------------------------------------------- */

typedef enum kvf_session_state {
    KVF_SESSION_GREETING = 1, /* outgoing: HELLO was sent, or will be */
    KVF_SESSION_OPEN,
    KVF_SESSION_LOST,
} kvf_session_state;

/* Which of the peer's calls were seen: the highest number, and one bit each for those just below it. */
#define KVF_WINDOW_CALLS 4096u

struct kvf_session {
    kvf_agent *agent;
    bool incoming;
    kvf_session_state state;
    uint8_t id[KVF_WIRE_SESSION_BYTES];
    kvf_route route;
    char *engine; /* the peer's */
    uint64_t incarnation;
    uint32_t rank, rank_count;
    uint64_t hello_first, hello_sent, hello_next, hello_pause;

    kvf_call *calls;
    uint64_t next_number;
    uint64_t seen_highest;
    uint64_t seen[KVF_WINDOW_CALLS / 64];

    void *card;
    size_t card_bytes;
    kvf_peer *peer; /* made from the card when first needed */
    bool same_host;
    bool peer_lost; /* said by the transport; seen to in the next tick */
    bool gone;      /* its process is known to have ended */

    uint8_t digest[KVF_WIRE_DIGEST_BYTES]; /* outgoing: of its facts */
    kvf_wire_buffer introduction;          /* outgoing: of us, where it is not our usual one */
    kvf_source *sources;                   /* outgoing: what we want from it */
    bool joined, joining;                  /* outgoing: it has our card */
    uint64_t next_beat;

    kvf_shard *shard;            /* incoming, joined */
    struct kvf_push_plan *plans; /* incoming, joined: how we write to it */
    kvf_reader *readers;         /* incoming: leases it has */
    uint32_t reader_count;
    kvf_flow *flows; /* incoming: what it expects */
    kvf_flow *flow_table;
    uint32_t flow_count;
    uint32_t early_count;

    uint64_t last_heard, last_used, broken_since; /* 0: not broken */
    char *broken_detail;
    int64_t clock_offset;     /* of the peer's clock against ours */
    uint64_t clock_error;     /* UINT64_MAX: not known */
    uint8_t *key;             /* incoming: incarnation, rank and engine */
    UT_hash_handle hh;        /* agent->sessions, by id */
    UT_hash_handle hh_client; /* agent->clients, by key */
    kvf_session *prev, *next; /* agent->all_sessions */
};

/** The outgoing session with a rank of a remote engine, made if there is none. */
kvf_status kvf_session_to(kvf_remote *remote, uint32_t rank, kvf_session **out);

/** The transport's connection to the peer of a session that is open and whose card we have. */
kvf_status kvf_session_peer(kvf_session *session, kvf_peer **out);

/** Ends a session: its calls, what we wanted from it, what it wanted from us. The session is freed later. */
void kvf_session_lose(kvf_session *session, kvf_status status, const char *why);

void kvf_session_hello(kvf_session *session, uint64_t now);
/** Greets for the ranks of an engine, or for a session: then `digest` is of the engine's facts, in whose terms we
 * shall speak. */
void kvf_hello_send(kvf_agent *agent, kvf_route route, const uint8_t *digest, bool wants_ranks,
                    bool wants_card);
void kvf_sessions_tick(kvf_agent *agent, uint64_t now);
bool kvf_session_fresh(kvf_session *session, uint64_t number); /**< true the first time a number is seen */
void kvf_session_clock(kvf_session *session, uint64_t sent, uint64_t received, uint64_t theirs);
uint64_t kvf_session_their_time(const kvf_session *session, uint64_t ours);
kvf_status kvf_session_join(kvf_session *session); /**< sees to it that the peer has our card */
void kvf_session_free(kvf_session *session);

void kvf_on_message(void *context, kvf_route route, const void *data, size_t bytes);
void kvf_on_broken(void *context, kvf_route route, kvf_status status, const char *detail);

/* ---- remote engines -------------------------------------------------------------------------- */

/** A rank that we read from, or only notify. */
typedef struct kvf_target {
    uint32_t rank;
    uint32_t source; /* index in the plan; UINT32_MAX: only notified */
    uint32_t of;     /* so many ranks of our engine notify it */
} kvf_target;

typedef struct kvf_remote_rank {
    char *endpoint, *public_key;
    uint64_t incarnation;
    kvf_session *session;
} kvf_remote_rank;

struct kvf_remote {
    kvf_agent *agent;
    char *name, *endpoint, *public_key;
    bool ready;
    bool stale;      /* not for new requests: another took its name, or a rank of it was lost */
    kvf_route route; /* to the contact; 0 when ready */
    uint64_t hello_first, hello_next, hello_pause;
    uint8_t digest[KVF_WIRE_DIGEST_BYTES]; /* of its facts */
    kvf_match *match;             /* what its model and ours have in common; NULL: they are the same */
    kvf_wire_buffer introduction; /* of us, in its terms; size 0: it knows ours */
    kvf_engine *engine;           /* in terms of our model */
    kvf_remote_rank *ranks;
    uint32_t rank_count;
    kvf_plan *plan;
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

/* ---- terms: an engine of another model ------------------------------------------------------- */

/** Compares the facts of an engine that answers with ours. KVF_E_MISMATCH where nothing can be moved. */
kvf_status kvf_terms_meet(kvf_remote *remote, const uint8_t *digest, const char *facts);

/** A shard of the engine, as bytes in its terms, as a shard of our model. */
kvf_status kvf_terms_shard(const kvf_remote *remote, kvf_bytes bytes, kvf_shard **out);

/** The plan that fills a shard of our engine, of all groups that can be filled. */
kvf_status kvf_terms_plan(const kvf_remote *remote, const kvf_shard *shard, kvf_plan **out);

/** Whether the engine can fill all groups that are not empty; the detail names the first that it cannot. `groups`
 * may be NULL. */
kvf_status kvf_terms_check(const kvf_remote *remote, const kvf_group_steps *groups);

/** How many groups its messages speak of. */
uint32_t kvf_terms_group_count(const kvf_remote *remote);

/**
 * Groups of ours as we say them (of theirs as we hear them). The tables stay where they are.
 *
 * @param own  receives what the caller frees with kvf_free(), or NULL
 */
kvf_status kvf_terms_say(const kvf_remote *remote, const kvf_group_steps *ours, kvf_group_steps **own,
                         const kvf_group_steps **out);
kvf_status kvf_terms_hear(const kvf_remote *remote, const kvf_group_steps *theirs, kvf_group_steps **own,
                          const kvf_group_steps **out);

/** Group, part and layers of a call about cells, from ours to theirs. */
void kvf_terms_cells(const kvf_remote *remote, kvf_call_body *call);

/* ---- tickets --------------------------------------------------------------------------------- */

typedef enum kvf_ticket_state {
    KVF_TICKET_MEETING = 1, /* the remote engine is not known yet */
    KVF_TICKET_ASKING,      /* pull: leases asked for. expect: asked to be written */
    KVF_TICKET_RESERVED,    /* pull: all leases are there, the destination is not */
    KVF_TICKET_MOVING,      /* pull: reading. expect, push: data flows */
    KVF_TICKET_VERIFYING,
    KVF_TICKET_HELD,    /* hold */
    KVF_TICKET_CLOSING, /* hold: nobody new, the readers there are finish */
    KVF_TICKET_DOUBT,   /* the result was told, the blocks are not free yet */
    KVF_TICKET_OVER,    /* freed in the next tick */
} kvf_ticket_state;

/** Counts the ranks of consumer engines that are done with something: that have it, or have given it up. */
typedef struct kvf_tally_engine {
    char *name;
    uint32_t of;
    uint32_t count;
    uint8_t *ranks; /* [of the engine's ranks]: enum kvf_tally_mark */
    uint32_t rank_capacity;
    struct kvf_tally_engine *next;
} kvf_tally_engine;

typedef struct kvf_tally {
    kvf_tally_engine *engines;
    uint32_t wanted; /* engines */
    uint32_t done;   /* engines of which all ranks are done */
} kvf_tally;

typedef enum kvf_tally_mark {
    KVF_TALLY_WAITS = 0,
    KVF_TALLY_HAS_IT,
    KVF_TALLY_GAVE_UP,
} kvf_tally_mark;

/** Counts one rank, once. KVF_E_NOMEM; KVF_E_MISMATCH (another `of` than its siblings said). */
kvf_status kvf_tally_add(kvf_tally *tally, const char *name, uint32_t rank, uint32_t of, kvf_tally_mark mark);
kvf_tally_mark kvf_tally_of(const kvf_tally *tally, const char *name, uint32_t rank);
/** A rank that gave up tries again: it is not counted any more. */
void kvf_tally_take_back(kvf_tally *tally, const char *name, uint32_t rank);
bool kvf_tally_complete(const kvf_tally *tally);
/** The name of an engine one of whose ranks gave up; NULL: there is none. */
const char *kvf_tally_deserter(const kvf_tally *tally, uint32_t *rank);
void kvf_tally_free(kvf_tally *tally);

/** What a pull or an expect has to do with one rank of the producer. */
struct kvf_source {
    kvf_asker *ticket;
    kvf_session *session;
    const kvf_target *target;
    kvf_call *call;
    uint64_t generation; /* pull: of the lease; 0: none */
    uint64_t until; /* pull: the lease is good until then. expect: it may write until then, at the latest */
    uint64_t beat;  /* number of the last heartbeat that spoke of it */
    void *card;     /* expect: of a writer in doubt, to shut it out */
    size_t card_bytes;
    bool asked;              /* expect: EXPECT was sent */
    bool gone;               /* expect: the process of a writer in doubt has ended */
    uint64_t written_call;   /* expect: the WRITTEN to answer when all is verified */
    bool settled;            /* pull: granted. expect: it will write no more */
    bool written;            /* expect: and has written everything */
    kvf_source *prev, *next; /* session->sources */
};

/** What a kind of ticket does. */
typedef struct kvf_ticket_ops {
    kvf_request_kind kind;
    size_t size; /* of its struct, which begins with a kvf_ticket */
    bool lends;  /* its blocks are read, and not written */
    bool asks;   /* it begins with a kvf_asker */
    /** Takes from the request what is its own; NULL: nothing. */
    void (*begin)(kvf_ticket *ticket, const kvf_agent_request *request);
    /** Looks at the clock. */
    void (*tick)(kvf_ticket *ticket, uint64_t now);
    /** Something has failed. `session`: whose fault it is, or NULL. Not called once the result was told. */
    void (*fail)(kvf_ticket *ticket, kvf_status status, const char *detail, const kvf_session *session);
    /** Its remote engine is known, and its sources are attached. NULL: it needs none. */
    void (*met)(kvf_ticket *ticket);
    /** What it received has the checksums of its sources. NULL: it receives nothing. */
    void (*verified)(kvf_ticket *ticket);
    /** What else is its own is given back; NULL: nothing. */
    void (*free)(kvf_ticket *ticket);
} kvf_ticket_ops;

struct kvf_ticket {
    const kvf_ticket_ops *ops;
    kvf_agent *agent;
    uint64_t number;
    kvf_request_kind kind;
    kvf_ticket_state state;
    void *id;
    size_t id_bytes;
    kvf_group_steps *groups; /* NULL: a pull without destination yet */
    uint32_t group_count;
    bool empty;                                /* every group is: nothing moves */
    kvf_block_table *claims;                   /* what the ledger knows of it, by group; NULL: nothing */
    bool silent;                               /* its result was told: what is left is done without */
    kvf_event_node *result_event, *free_event; /* reserved, so that telling cannot fail */
    uint64_t created, deadline;
    uint64_t bytes, runs;
    kvf_status status; /* why it failed */
    char *detail;
    char *peer_engine; /* for the event */
    uint32_t peer_rank;

    kvf_ticket *over_prev, *over_next; /* agent->over */

    UT_hash_handle hh;    /* agent->tickets, by number */
    UT_hash_handle hh_id; /* agent->holds, agent->pushes, by id */
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

struct kvf_pull {
    union {
        kvf_ticket base;
        kvf_asker asker;
    };
    uint64_t patience;       /* until when the blocks must have been lent; not after the deadline */
    kvf_group_steps *theirs; /* the producer's blocks */
    kvf_request *request;
    kvf_transfer *transfer;
    kvf_pull *moving_prev, *moving_next; /* agent->moving_pulls */
};

struct kvf_hold {
    kvf_ticket base;
    kvf_tally tally;
    kvf_reader *readers;
    uint64_t lease_until;     /* of the hold itself */
    kvf_status reader_failed; /* what a reader said last that did not get it */
};

struct kvf_push {
    kvf_ticket base;
    kvf_tally tally;
    kvf_flow *flows;
    uint64_t ready_tokens,
        chunk_end;         /* everything before ready_tokens is ready, and layers [0, ready_layers) */
    uint32_t ready_layers; /* up to chunk_end */
    uint64_t total_tokens;
};

/** The generation of an expectation, in messages. */
static inline uint64_t kvf_expect_generation(const kvf_asker *expect) {
    return expect->base.number | KVF_EXPECTATION;
}

/** Makes a ticket from what the engine asked: copies, checks, claims the blocks. */
kvf_status kvf_ticket_make(kvf_agent *agent, const kvf_ticket_ops *ops, const kvf_agent_request *given,
                           kvf_ticket **out);
/** The ticket of a number if it is of this kind; NULL otherwise. */
kvf_ticket *kvf_ticket_find(const kvf_agent *agent, uint64_t number, const kvf_ticket_ops *ops);
/** Lists a hold or a push, new ones, under its id; frees it where it cannot. */
kvf_status kvf_ticket_list(kvf_ticket *ticket, kvf_ticket **table);
/** Claims the blocks of `groups` for a ticket, whose own they become (a copy). */
kvf_status kvf_ticket_claim(kvf_ticket *ticket, const kvf_group_steps *groups, uint32_t group_count);
void kvf_ticket_unclaim(kvf_ticket *ticket);
/** Attaches a pull, expect or connect to the sessions of its remote's targets. */
kvf_status kvf_ticket_attach(kvf_asker *ticket);
void kvf_ticket_detach(kvf_asker *ticket);
void kvf_source_detach(kvf_source *source);
/** Ends with success: tells it, frees blocks, and the ticket in the next tick. */
void kvf_ticket_done(kvf_ticket *ticket);
/** Records the first failure; what ends the ticket is the business of its kind. */
void kvf_ticket_failed(kvf_ticket *ticket, kvf_status status, const char *detail, const kvf_session *session);
/** Tells a recorded failure. With `free` the blocks are free; without, the ticket is in doubt. */
void kvf_ticket_tell(kvf_ticket *ticket, bool free);
/** The blocks of a ticket in doubt are free: tells it. */
void kvf_ticket_settle(kvf_ticket *ticket);
void kvf_ticket_unlist(kvf_ticket *ticket); /**< its id may be used again */
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

void kvf_event_peer(kvf_agent *agent, kvf_event_kind kind, const char *engine, uint32_t rank,
                    kvf_status status, const char *detail);
void kvf_event_ticket(kvf_ticket *ticket, kvf_event_kind kind, bool blocks_free);
bool kvf_events_reserve(kvf_ticket *ticket);
bool kvf_event_take(kvf_agent *agent, kvf_event *out);
void kvf_events_free(kvf_agent *agent);
/** Logs a failure as an object of JSON. */
void kvf_log_failure(kvf_agent *agent, const char *what, const kvf_ticket *ticket, const char *engine,
                     uint32_t rank, kvf_status status, const char *detail);

/** Whether lines of a level are wanted: only then are they made. */
bool kvf_agent_logs(const kvf_agent *agent, kvf_log_level level);
/** Logs each line of a text, where lines of the level are wanted. */
void kvf_agent_log(kvf_agent *agent, kvf_log_level level, const char *text);
/** A remote engine was met: logs who reads what from whom. */
void kvf_explain_meeting(const kvf_remote *remote);
/** The transport has just been connected to a session's peer: logs the way, once for an engine. */
void kvf_explain_way(const kvf_session *session);

/** A copy of groups and their block ids in one allocation, for kvf_free(). */
kvf_group_steps *kvf_steps_copy(const kvf_group_steps *groups, uint32_t count);

/** Which entries of a table are wanted: those of the steps that remain after clipping to the group's window.
 */
bool kvf_steps_empty(const kvf_group_steps *groups, uint32_t count); /**< nothing is in any of them */

kvf_range kvf_wanted_entries(const kvf_shard *shard, uint32_t group, const kvf_group_steps *steps);

/** Checks groups against the model and the cache of a shard: numbers of groups, block ids, tables that reach.
 */
kvf_status kvf_check_groups(const kvf_shard *shard, const kvf_group_steps *groups, uint32_t count);

/* ---- the four kinds -------------------------------------------------------------------------- */

/** A lease: one rank of a consumer may read a hold. */
struct kvf_reader {
    uint64_t generation;
    uint64_t asked; /* number of the ACQUIRE that brought it */
    kvf_hold *hold;
    kvf_session *session;
    uint64_t until;
    uint32_t of;
    UT_hash_handle hh;                       /* agent->leases, by generation */
    kvf_reader *prev, *next;                 /* hold->readers */
    kvf_reader *session_prev, *session_next; /* session->readers */
};

/** A call that came before the hold it is for (early.c). */
struct kvf_early {
    kvf_session *session;
    kvf_waiting *waiting; /* for the same id */
    kvf_call_kind kind;   /* ACQUIRE, RELEASE */
    uint64_t number;      /* of the call, to answer it */
    uint32_t of;
    uint64_t until;
    kvf_early *prev, *next;           /* agent->early */
    kvf_early *same_prev, *same_next; /* waiting->early */
};

/** The first that waits for a hold; NULL: none. */
kvf_early *kvf_early_first(const kvf_agent *agent, const kvf_ticket *ticket);
/** The one that this call left when it came before. */
kvf_early *kvf_early_find(const kvf_session *session, const kvf_call_body *call);
/** Keeps a call for `wait` nanoseconds. The caller of an ACQUIRE waits for its answer; a RELEASE gets it now.
 */
kvf_status kvf_early_keep(kvf_session *session, const kvf_call_body *call, uint64_t wait);
void kvf_early_tick(kvf_agent *agent, uint64_t now);
void kvf_early_forget(kvf_session *session);
void kvf_early_free(kvf_early *early);
/** Puts an expectation where its push will look for it, and takes it away. */
kvf_status kvf_flow_wait(kvf_flow *flow);
void kvf_flow_wait_no_more(kvf_flow *flow);
kvf_flow *kvf_flow_waiting_for(const kvf_agent *agent, const kvf_ticket *push);

void kvf_hold_acquire(kvf_session *session, const kvf_call_body *call, bool fresh);
void kvf_hold_release(kvf_session *session, const kvf_call_body *call, bool fresh);
void kvf_reader_drop(kvf_reader *reader);
bool kvf_hold_is_read(const kvf_ticket *ticket); /**< it is a hold, and somebody has a lease on it */

void kvf_pull_granted(kvf_source *source); /**< its lease is known to last */
void kvf_pull_look(kvf_pull *pull);        /**< has its transfer ended? */

void kvf_expect_written(kvf_session *session, const kvf_call_body *call);

/** What one rank of a consumer expects of us: with a push, the writing of it. */
struct kvf_flow {
    kvf_session *session;
    kvf_push *push; /* NULL: not started yet */
    void *id;
    size_t id_bytes;
    uint64_t generation;
    uint32_t of;
    uint64_t until;
    kvf_group_steps *groups; /* of the consumer; NULL: nothing */
    uint64_t tokens;         /* done, or under way */
    uint32_t layers;         /* beyond them, up to chunk_end */
    uint64_t chunk_end;
    kvf_request *request;
    kvf_transfer *transfer;
    uint64_t bytes, runs;
    bool over;         /* nothing will be written any more */
    kvf_status status; /* why it failed */
    char *detail;
    bool withdrawn;
    uint64_t withdraw_number;              /* the call to answer once nothing moves */
    kvf_call *told;                        /* WRITTEN, under way */
    bool heard;                            /* and answered, or there is nobody to */
    kvf_flow *moving_prev, *moving_next;   /* agent->moving_flows */
    kvf_waiting *waiting;                  /* while there is no push */
    kvf_flow *same_prev, *same_next;       /* waiting->flows */
    kvf_flow *prev, *next;                 /* push->flows, or agent->flows while there is no push */
    kvf_flow *session_prev, *session_next; /* session->flows */
    UT_hash_handle hh;                     /* session->flow_table, by generation */
};

kvf_status kvf_flow_make(kvf_session *session, const kvf_call_body *call, kvf_flow **out);
void kvf_push_expected(kvf_session *session, const kvf_call_body *call, bool fresh); /**< serves EXPECT */
void kvf_flow_withdraw(kvf_session *session, const kvf_call_body *call);
kvf_flow *kvf_flow_of(const kvf_session *session, uint64_t generation);
void kvf_flow_pump(kvf_flow *flow);
void kvf_flow_move(kvf_flow *flow); /**< has its transfer ended? */
void kvf_flow_tick(kvf_flow *flow, uint64_t now);
void kvf_flow_stop(kvf_flow *flow, kvf_status status, const char *detail);
void kvf_flow_drop(kvf_flow *flow); /**< its session is going: counts it as served, badly */
void kvf_flow_free(kvf_flow *flow);
void kvf_push_served(kvf_flow *flow); /**< frees it */
void kvf_flows_tick(kvf_agent *agent, uint64_t now);
void kvf_join_answer(kvf_session *session, const kvf_call_body *call);
void kvf_push_plans_free(kvf_session *session);

void kvf_beat_tick(kvf_session *session, uint64_t now);
void kvf_beat_answer(kvf_session *session, const kvf_call_body *call);

/** Checks what a pull or expect received; its verified() follows, or its
 * failure. */
void kvf_verify_start(kvf_asker *ticket);
void kvf_verify_stop(kvf_asker *ticket);
void kvf_verify_answer(kvf_session *session, const kvf_call_body *call);

/* ---- what sessions and meetings bring ---------------------------------------------------------------------- */

/**
 * What those above make of what sessions and meetings hear: an agent is given this table (serve.c), so that what is below
 * need not know who is above.
 */
typedef struct kvf_hooks {
    /** Answers a call of a peer, by kind. `fresh`: it was not seen before. */
    void (*serve[KVF_CALL_CHECKSUM + 1])(kvf_session *session, const kvf_call_body *call, bool fresh);
    /** Says that what we want from a peer lives on. */
    void (*beat)(kvf_session *session, uint64_t now);
    /** A session is not to be found any more; `lost`: its peer is gone, and with it the engine as it was met. */
    void (*hide)(kvf_session *session, bool lost);
    /** A session is lost: whatever was wanted from it, or it wanted, ends. */
    void (*lose)(kvf_session *session, kvf_status status, const char *detail);
    void (*free_session)(kvf_session *session);
    /** The contact of an engine that is being met has answered, or never will. */
    void (*welcome)(kvf_remote *remote, const uint8_t *digest, const kvf_welcome *welcome);
    void (*refuse)(kvf_remote *remote, kvf_status status, const char *detail);
    /** A remote engine is ready, or is not to be met: for the tickets that wait for it. */
    void (*met)(kvf_remote *remote);
    void (*unmet)(kvf_remote *remote, kvf_status status, const char *detail);
    /** A flow will not write any more, and its consumer knows: frees it. */
    void (*served)(kvf_flow *flow);
} kvf_hooks;

extern const kvf_hooks kvf_agent_hooks;

/* ---- the agent ------------------------------------------------------------------------------- */

struct kvf_agent {
    const kvf_hooks *hooks;

    /* loop.c; all but `arrived` under the lock, too */
    pthread_mutex_t lock;
    pthread_cond_t turn;      /* somebody has entered, or left while we stop */
    _Atomic uint64_t arrived; /* threads that have asked for the lock */
    uint64_t entered;         /* and have got it */
    uint64_t gives_way_to;    /* so many have to have entered before a thread that gives way goes on */
    uint32_t users;           /* calls of the engine under way */
    pid_t process;            /* that opened it */
    pthread_t thread;
    bool thread_runs, stopping;
    int poll_fd; /* epoll: readable while there is work, and without own_thread while there are events */
    int wake_fd, timer_fd; /* in it: for work that no other descriptor shows, and for a time that has come */
    bool awake;            /* wake_fd is readable */
    uint64_t armed;        /* what timer_fd is set to; UINT64_MAX: nothing */
    kvf_log_entry *lines;  /* to be logged */
    bool logging;          /* a thread does it */

    kvf_agent_options options; /* defaults filled in */
    char *texts[4];            /* copies of its texts that are used later */

    const kvf_engine *engine; /* NULL: a directory */
    const kvf_shard *shard;
    uint32_t rank, rank_count;
    char *name; /* NULL: a directory that knows nobody yet */
    uint64_t incarnation;
    char *facts;
    uint8_t digest[KVF_WIRE_DIGEST_BYTES];
    kvf_facts own_facts; /* the same, as read */

    kvf_clock clock;
    kvf_link *link;
    kvf_transport *transport;
    kvf_memory *regions;
    uint32_t region_count;
    const void *card; /* NULL: not registered yet */
    size_t card_bytes;
    kvf_wire_buffer *introductions; /* [rank]; size 0: not known */
    uint32_t introduction_count;    /* known */
    kvf_wire_buffer with_facts;     /* our own, for directories */

    kvf_session *sessions; /* open ones, by id */
    kvf_session *clients;  /* incoming, by identity */
    kvf_session *all_sessions;
    kvf_remote *remotes; /* by name */
    kvf_remote *all_remotes;
    kvf_ticket *tickets;
    kvf_ticket *holds, *pushes; /* by id */
    kvf_reader *leases;
    kvf_waiting *waiting; /* what came early, by request id */
    kvf_early *early;
    kvf_flow *flows; /* without a push yet */
    uint64_t next_ticket, next_generation;
    uint64_t last_number; /* of the calls in sessions that are no more */
    kvf_ledger *ledger;

    kvf_event_node *events, *told; /* waiting; the one taken last */
    int event_fd;
    uint64_t due; /* nothing is to be done by the clock before */
    bool again;   /* more can be done at once */
    kvf_pull *moving_pulls;
    kvf_ticket *over; /* freed at the end of a round */
    kvf_flow *moving_flows;
    kvf_agent_stats stats;
};

/** How the agent introduces itself: by `shard`, which is in terms of the facts with that digest. */
kvf_status kvf_agent_write_introduction(const kvf_agent *agent, const kvf_shard *shard, const uint8_t *digest,
                                        const char *facts, kvf_wire_buffer *out);

/** What an agent is given of the world around it. Zeroed is production: the machine's clock, and ZeroMQ. */
typedef struct kvf_surroundings {
    const kvf_clock *clock; /* outlives the agent */
    const kvf_link_table *link;
} kvf_surroundings;

/** kvf_agent_open() in other surroundings. With a clock that is not the machine's, nobody is woken by time:
 * whoever moves it calls kvf_agent_progress() when kvf_agent_timeout() is over, and nobody waits. */
kvf_status kvf_agent_open_in(const kvf_surroundings *surroundings, const kvf_engine *engine, uint32_t rank,
                             const kvf_agent_options *options, kvf_agent **out);

/* ---- lock.c ---------------------------------------------------------------------------------- */

void kvf_fd_raise(int fd); /**< an eventfd becomes readable */
void kvf_fd_lower(int fd);

void kvf_turn_take(kvf_agent *agent);   /**< takes the lock */
void kvf_turn_give(kvf_agent *agent);   /**< has the lock, and lets those go first who have come meanwhile */
void kvf_log_deliver(kvf_agent *agent); /**< has the lock, and leaves it while lines are logged */
void kvf_work_show(kvf_agent *agent);   /**< makes the descriptor readable if there is work */
uint64_t kvf_next_due(const kvf_agent *agent);

/* ---- loop.c ---------------------------------------------------------------------------------- */

kvf_status
kvf_loop_open(kvf_agent *agent); /**< makes lock and descriptors, to be closed also when it fails */
kvf_status kvf_loop_start(kvf_agent *agent); /**< link and transport are there: watches them, and works */
void kvf_loop_stop(kvf_agent *agent);        /**< ends the thread, and waits until every call is over */
void kvf_loop_close(kvf_agent *agent);

/**
 * Begins a call of the engine. KVF_E_INVALID: no agent, or one of the process that forked this one; then
 * nothing is to be unlocked.
 */
kvf_status kvf_agent_lock(kvf_agent *agent);
/** Ends it: wakes who sleeps where there is work, and logs. */
void kvf_agent_unlock(kvf_agent *agent);

/** KVF_E_INVALID: it is NULL, or a directory, which has no memory. */
kvf_status kvf_agent_needs_memory(const kvf_agent *agent);

/** Logs a line as soon as the lock is given up. */
void kvf_log_line_add(kvf_agent *agent, kvf_log_level level, uint64_t time_ns, const char *text);

static inline uint64_t kvf_agent_now(const kvf_agent *agent) {
    return kvf_now(&agent->clock);
}

/** Asks for a tick at `when`. */
static inline void kvf_agent_due(kvf_agent *agent, uint64_t when) {
    agent->due = when < agent->due ? when : agent->due;
}

#endif
