/*
 * The inside of an agent.
 *
 * This header is what all files know: the agent, its lock and its loop, and the table of hooks by which those
 * below call those above. Each of the others knows those before it:
 *
 *   hashing.h  checksums of our own cells, in turns              hashing.c, checksum.c
 *   peers.h    what users see of peers, and the log of them   peers.c
 *   session.h  one rank of a peer: greeting, calls, liveness     session.c, call.c
 *   stage.h    the stage, and by which connection it speaks      stage.c
 *   claim.h    who may speak for which rank                      claim.c
 *   greet.h    being greeted                                     greet.c
 *   budget.h   what peers may make us keep                       budget.c
 *   parts.h    block tables in several messages                  parts.c
 *   records.h  what travels with a cache                         records.c
 *   past.h     what was held or pushed, and is no more           past.c
 *   remote.h   an engine we read from: its ranks and our plan    remote.c
 *   ticket.h   one request of our engine, and its events         ticket.c, event.c
 *   trace.h    when what happened to it                          trace.c, trace_text.c
 *   after.h    what is waited for before memory is read          after.c
 *   hold.h     blocks others read            (producer)          hold.c
 *   push.h     writing to others             (producer)          push.c, flow.c
 *   pull.h     reading them                  (consumer)          pull.c
 *   expect.h   being written to              (consumer)          expect.c
 *   pace.h     which of what moves goes first, and how fast      pace.c
 *   carry.h    by which way bytes go                             carry.c
 *   permit.h   what flows of peers may touch                     permit.c
 *
 * Messages may be lost, repeated, late and out of order. So the caller repeats a *call* until it gets an
 * answer; the called side does a thing once however often it is asked; and whatever came from a session, a
 * lease or an expectation that is no more is dropped by its number. When the other side says nothing, time
 * ends things.
 *
 * Everything here runs under the agent's lock. Functions that end a ticket or a session may free it.
 *
 * Bytes are copied and hashed without the lock: by whichever thread has *the work*, which is a second lock around the
 * first. Only who has the work touches the transport, its peers and its transfers, ends a session, or frees a ticket
 * that was started. So what is copied or hashed stays where it is, while other threads hold, pull, take events and
 * look in.
 */
#ifndef KVF_AGENT_ROOM_H
#define KVF_AGENT_ROOM_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include <kvferry/agent.h>

#include "agent/ledger.h"
#include "agent/sweep.h"
#include "base/fork.h"
#include "base/tables.h"
#include "base/wake.h"
#include "cuda/looks.h"
#include "link/link.h"
#include "wire/wire.h"

#define KVF_MILLISECOND 1000000ull
#define KVF_SECOND 1000000000ull
#define KVF_NO_RANK UINT32_MAX
#define KVF_EXPECTATION (1ull << 63) /* set in generations of expectations, never in those of leases */

typedef struct kvf_session kvf_session;
typedef struct kvf_remote kvf_remote;
typedef struct kvf_geometry kvf_geometry;
typedef struct kvf_push_shape kvf_push_shape;
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
typedef struct kvf_hashing kvf_hashing;
typedef struct kvf_hashing_queue kvf_hashing_queue;
typedef struct kvf_after kvf_after;
typedef struct kvf_departed kvf_departed;
typedef struct kvf_past kvf_past;
typedef struct kvf_event_node kvf_event_node;
typedef struct kvf_log_entry kvf_log_entry;
typedef struct kvf_trace kvf_trace;

/* ---- hooks ----------------------------------------------------------------------------------- */

/**
 * What those above make of what sessions and meetings hear. An agent is given this table (serve.c), so that
 * what is below need not know who is above.
 */
typedef struct kvf_hooks {
    /** Answers a HELLO, whose body is not read yet. */
    void (*greeted)(kvf_agent *agent, const kvf_letter *letter, kvf_message *message);
    /** Answers a call of a peer, by kind. `fresh`: it was not seen before. */
    void (*serve[KVF_CALL_LAST + 1])(kvf_session *session, const kvf_call_body *call, bool fresh);
    /** Says our card to a peer that waits for it. */
    void (*join)(kvf_session *session);
    /** Says that what we want from a peer lives on. */
    void (*beat)(kvf_session *session, uint64_t now);
    /** A session is not to be found any more; `lost`: its peer is gone, and the engine as it was met. */
    void (*hide)(kvf_session *session, bool lost);
    /** A session is lost: whatever was wanted from it, or it wanted, ends. */
    void (*lose)(kvf_session *session, kvf_status status, const char *detail);
    /** Ends the use of a session: it takes no more calls, and what it has runs out. */
    void (*retire)(kvf_session *session);
    /** A session takes no more calls: what its peer said early is forgotten. */
    void (*forget)(kvf_session *session);
    void (*free_session)(kvf_session *session);
    /** The contact of an engine that is being met has answered, or never will. */
    void (*welcome)(kvf_remote *remote, const uint8_t *digest, const kvf_welcome *welcome);
    void (*refuse)(kvf_remote *remote, kvf_status status, const char *detail);
    /** A remote engine is ready, or is not to be met: for the tickets that wait for it. */
    void (*met)(kvf_remote *remote);
    void (*unmet)(kvf_remote *remote, kvf_status status, const char *detail);
    /** A peer has our card, or does not take it: for what waits for that. */
    void (*joined)(kvf_session *session);
    /** Whether the endpoint of this name may open a flow. */
    kvf_status (*permit)(kvf_agent *agent, const char *peer, const kvf_flow_request *request);
    /** A flow will not write any more, and its consumer knows: frees it. */
    void (*served)(kvf_flow *flow);
} kvf_hooks;

extern const kvf_hooks kvf_agent_hooks;

/** Checksums that one owner wants, see hashing.h; zeroed at first, and in place while it wants any. */
struct kvf_hashing_queue {
    kvf_hashing *first;
    uint32_t count;
    kvf_hashing_queue *prev,
        *next; /* agent->hashing: those of peers that want some, in order of their turns */
};

/* ---- the agent ------------------------------------------------------------------------------- */

struct kvf_agent {
    const kvf_hooks *hooks;

    /* lock.c and loop.c; all but `arrived` under the lock, too */
    pthread_mutex_t lock;
    pthread_cond_t turn;      /* somebody has entered, or left while we stop */
    _Atomic uint64_t arrived; /* threads that have asked for the lock */
    uint64_t entered;         /* and have got it */
    uint64_t gives_way_to;    /* so many have to have entered before a thread that gives way goes on */
    pthread_cond_t worked;    /* somebody has given up the work */
    uint64_t work_asked,
        work_given;   /* how often it was asked for, and given up: who comes first has it first */
    pthread_t worker; /* who has it, if anybody has */
    uint32_t users;   /* calls of the engine under way */
    pid_t process;    /* that opened it, */
    uint32_t forks;   /* and kvf_fork_count() there */
    pthread_t thread;
    bool thread_runs, stopping;
    int poll_fd;    /* epoll: readable while there is work, and without own_thread while there are events */
    kvf_wake wake;  /* in it: for work that no other descriptor shows */
    int timer_fd;   /* in it: for a time that has come */
    uint64_t armed; /* what timer_fd is set to; UINT64_MAX: nothing */
    kvf_log_entry *lines; /* to be logged */
    bool logging;         /* a thread does it */

    kvf_agent_options options; /* defaults filled in */
    char *texts[4];            /* copies of its texts that are used later */

    const kvf_engine *engine; /* NULL: a directory */
    const kvf_shard *shard;
    uint32_t rank, rank_count;
    char *name; /* NULL: a directory that knows nobody yet */
    uint8_t secret[KVF_WIRE_SECRET_BYTES];
    uint64_t incarnation; /* which it proves */
    char *facts;
    uint8_t digest[KVF_WIRE_DIGEST_BYTES];
    kvf_facts own_facts; /* the same, as read */

    kvf_clock clock;
    kvf_link *link;
    kvf_transport *transport;
    kvf_stage *stage; /* NULL: everything goes directly */
    kvf_memory *regions;
    uint32_t region_count;
    const void *card; /* NULL: not registered yet */
    size_t card_bytes;
    kvf_wire_buffer *introductions; /* [rank]; size 0: not known */
    uint32_t introduction_count;    /* known */
    kvf_wire_buffer with_facts;     /* our own, for directories */

    kvf_session *sessions; /* open ones, by id */
    kvf_session *clients;  /* incoming, by identity */
    kvf_session *claims;   /* incoming, by the rank they speak for */
    kvf_session *servers;  /* outgoing, by incarnation */
    kvf_session *by_route; /* both, by the connection that messages to them take */
    struct kvf_grant *grants;
    uint32_t grant_count;
    struct kvf_refusal *refusals; /* of which the engine was told */
    struct kvf_party *parties;    /* by key, or connection */
    uint64_t kept_bytes;          /* for all of them */
    uint64_t work;                /* that the message was which is being taken in, so far */
    kvf_session *all_sessions;
    kvf_departed *departed; /* peers that were lost, the latest last */
    uint32_t departed_count;
    kvf_remote *remotes; /* by name */
    kvf_remote *all_remotes;
    kvf_geometry *geometries;    /* of these engines, by what they say of their shards */
    kvf_push_shape *push_shapes; /* of ranks that we may write to, likewise */
    kvf_ticket *tickets;
    kvf_ticket *holds, *pushes; /* by id */
    kvf_ticket *pulls;          /* by the name of the engine that is read, and id */
    kvf_past *past;
    kvf_trace *traces; /* of the latest requests, by ticket, the oldest first */
    uint64_t opened;   /* what their times are counted from */
    kvf_reader *leases;
    kvf_waiting *waiting; /* what came early, by request id */
    kvf_early *early;
    kvf_early *early_calls;            /* the same, by session, request and kind */
    kvf_flow *flows;                   /* without a push yet */
    kvf_sweep early_sweep, flow_sweep; /* over those two lists, */
    kvf_sweep session_sweep;           /* and over all_sessions */
    uint64_t next_ticket;
    uint64_t next_lease;         /* counts leases; see hold.c for what is said */
    uint8_t lease_key[16];       /* random */
    uint64_t regions_generation; /* higher each time our regions change */
    uint64_t last_number;        /* of the calls in sessions that are no more */
    kvf_ledger *ledger;

    kvf_event_node *events, *told; /* waiting; the one taken last */
    kvf_wake told_wake;            /* readable while there are any, and for good once we stop */
    uint64_t due;                  /* nothing is to be done by the clock before */
    bool again;                    /* more can be done at once */
    kvf_hashing_queue *hashing;    /* checksums being taken for peers, */
    kvf_hashing_queue own_hashing; /* and for ourselves */
    bool hashed_for_peer;          /* the last slice was */
    kvf_pull *moving_pulls;
    kvf_ticket *over; /* freed at the end of a round */
    kvf_flow *moving_flows;
    bool paces;        /* something that moves has a priority or a cap */
    uint64_t pace_due; /* it is to be looked at again then, at the latest */
    kvf_after *afters; /* events that are waited for */
    struct pollfd *after_polls;
    uint32_t after_count, after_room;
    kvf_looks looks; /* at those of devices; opened with the first */
    kvf_agent_stats stats;
};

/** How the agent introduces itself: by `shard`, which is in terms of the facts with that digest. `told`: their model,
 * where the shard has other types; NULL: it has not. */
kvf_status kvf_agent_write_introduction(const kvf_agent *agent, const kvf_shard *shard, const kvf_model *told,
                                        const uint8_t *digest, const char *facts, kvf_wire_buffer *out);

/** What an agent is given of the world around it. Zeroed is production: the machine's clock, and ZeroMQ. */
typedef struct kvf_surroundings {
    const kvf_clock *clock; /* outlives the agent */
    const kvf_link_table *link;
    const struct kvf_fabric *fabric; /* what its transport opens over, see kvf_transport_open_over() */
} kvf_surroundings;

/** kvf_agent_open() in other surroundings. With a clock that is not the machine's, nobody is woken by time:
 * whoever moves it calls kvf_agent_progress() when kvf_agent_timeout() is over, and nobody waits. */
kvf_status kvf_agent_open_in(const kvf_surroundings *surroundings, const kvf_engine *engine, uint32_t rank,
                             const kvf_agent_options *options, kvf_agent **out);

/* ---- lock.c ---------------------------------------------------------------------------------- */

/**
 * Has the lock, and waits for the work, leaving the lock meanwhile: what was looked up before may be gone. At most
 * one slice of copies or hashes is waited for, and those who came before.
 */
void kvf_work_take(kvf_agent *agent);
void kvf_work_give(kvf_agent *agent);          /**< has the lock and the work, and keeps the lock */
bool kvf_work_is_ours(const kvf_agent *agent); /**< for assertions: this thread has the work */

void kvf_turn_take(kvf_agent *agent);   /**< takes the lock */
void kvf_turn_give(kvf_agent *agent);   /**< has the lock, and lets those go first who have come meanwhile */
void kvf_log_deliver(kvf_agent *agent); /**< has the lock, and leaves it while lines are logged */
void kvf_work_show(kvf_agent *agent);   /**< makes the descriptor readable if there is work */
uint64_t kvf_next_due(const kvf_agent *agent);

/* ---- loop.c ---------------------------------------------------------------------------------- */

/** Makes lock and descriptors, to be closed also when it fails. */
kvf_status kvf_loop_open(kvf_agent *agent);
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

/* ---- events and the log: event.c, log.c ------------------------------------------------------ */

void kvf_event_peer(kvf_agent *agent, kvf_event_kind kind, const char *engine, uint32_t rank,
                    kvf_status status, const char *detail);
bool kvf_event_take(kvf_agent *agent, kvf_event *out);
void kvf_events_free(kvf_agent *agent);

/** Whether lines of a level are wanted: only then are they made. */
bool kvf_agent_logs(const kvf_agent *agent, kvf_log_level level);
/** Nanoseconds since 1970, UTC, as in lines of the log. */
uint64_t kvf_wall_clock(void);
/** Logs each line of a text, where lines of the level are wanted. */
void kvf_agent_log(kvf_agent *agent, kvf_log_level level, const char *text);

/** The word of the log and of metrics, such as "pull". */
const char *kvf_request_kind_name(kvf_request_kind kind);
/** A request id, which is any bytes, as a text of JSON: those that are not printable ASCII are shown as \xNN. */
struct json_object *kvf_visible_id(const void *id, size_t bytes);

/** KVF_E_INVALID: it is NULL, or a directory, which has no memory. */
kvf_status kvf_agent_needs_memory(const kvf_agent *agent);

/** Logs a line as soon as the lock is given up. */
void kvf_log_line_add(kvf_agent *agent, kvf_log_level level, uint64_t time_ns, const char *text);

static inline uint64_t kvf_agent_now(const kvf_agent *agent) {
    return kvf_now(&agent->clock);
}

/** Asks for a tick of everything at `when`. */
static inline void kvf_agent_due(kvf_agent *agent, uint64_t when) {
    agent->due = when < agent->due ? when : agent->due;
}

/** Asks for a tick of the sessions at `when`: a heartbeat need not walk over thousands of tickets that want nothing. */
static inline void kvf_sessions_due(kvf_agent *agent, uint64_t when) {
    kvf_sweep_due(&agent->session_sweep, when);
}

#endif
