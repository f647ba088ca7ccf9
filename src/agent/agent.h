/*
 * The inside of an agent.
 *
 * Nearly all files include this header: it has the agent, its lock and its loop, and the table of hooks by which lower
 * files call higher ones. Each header below may use those listed before it:
 *
 *   hashing.h  checksums of our own cells, in turns              hashing.c, area.c, summing.c, checksum.c
 *   peers.h    what users see of peers, and their log lines      peers.c
 *   session.h  one rank of a peer: greeting, calls, liveness     session.c, call.c
 *   stage.h    the stage, and the connections it uses            stage.c
 *   claim.h    who may speak for which rank                      claim.c
 *   greet.h    answering a HELLO                                 greet.c
 *   budget.h   limits on what is kept for peers                  budget.c
 *   parts.h    block tables in several messages                  parts.c
 *   records.h  records that travel with a cache                  records.c
 *   past.h     holds and pushes that have ended                  past.c
 *   remote.h   an engine we read from: its ranks and our plan    remote.c
 *   hear.h     messages, and connections that break              hear.c
 *   ticket.h   one request of our engine, and its events         ticket.c, event.c
 *   trace.h    the times of each request's steps                 trace.c, trace_text.c
 *   after.h    events to wait for before memory is read          after.c
 *   carry.h    the way that bytes move: directly or packed       carry.c
 *   hold.h     lending blocks to readers     (producer)          hold.c
 *   push.h     writing to consumers          (producer)          push.c, flow.c, join.c
 *   pull.h     reading held blocks           (consumer)          pull.c
 *   expect.h   being written to              (consumer)          expect.c
 *   pace.h     the order and speed of moves                      pace.c
 *   permit.h   what flows of peers may access                    permit.c
 *   drain.h    taking nothing new until all has ended            drain.c
 *
 * Messages may be lost, repeated, late and out of order. So the caller repeats a *call* until it gets an
 * answer; the called side carries it out once, however often it arrives; and messages of a session, a lease or an
 * expectation that has ended are recognised by its number and dropped. Deadlines end whatever waits for a silent peer.
 *
 * Everything here runs under the agent's lock. Functions that end a ticket or a session may free it.
 *
 * Bytes are copied and hashed without the lock, by the thread that has *the work*, a second lock around the first. Only
 * that thread uses the transport, its peers and its transfers, ends a session, or frees a ticket that was started. So
 * memory that is being copied or hashed stays in place while other threads hold, pull, take events and query the agent.
 */
#ifndef KVF_AGENT_ROOM_H
#define KVF_AGENT_ROOM_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include <kvferry/agent.h>

#include "agent/ledger.h"
#include "agent/sweep.h"
#include "base/alarms.h"
#include "base/fork.h"
#include "base/tables.h"
#include "base/wake.h"
#include "base/watch.h"
#include "cuda/looks.h"
#include "link/link.h"
#include "wire/wire.h"

#define KVF_NO_RANK UINT32_MAX
#define KVF_SHORTEST_LEASE (12 * KVF_MILLISECOND) /* a shorter one that a peer names counts as this */
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
typedef struct kvf_arrival kvf_arrival;
typedef struct kvf_departed kvf_departed;
typedef struct kvf_past kvf_past;
typedef struct kvf_event_node kvf_event_node;
typedef struct kvf_commanded kvf_commanded;
typedef struct kvf_log_entry kvf_log_entry;
typedef struct kvf_trace kvf_trace;

/* ---- hooks ----------------------------------------------------------------------------------- */

/**
 * How higher files handle what sessions and meetings receive. Each agent has this table (serve.c), so that lower files
 * need not know higher ones.
 */
typedef struct kvf_hooks {
    /** Answers a HELLO, whose body is not read yet. */
    void (*greeted)(kvf_agent *agent, const kvf_letter *letter, kvf_message *message);
    /** Takes a COMMAND, whose body is read. */
    void (*commanded)(kvf_agent *agent, const kvf_letter *letter, const kvf_command_body *body);
    /** Answers a call of a peer, by kind. `fresh`: the call was not seen before. */
    void (*serve[KVF_CALL_LAST + 1])(kvf_session *session, const kvf_call_body *call, bool fresh);
    /** Sends our card to a peer that waits for it. */
    void (*join)(kvf_session *session);
    /** Sends a heartbeat for the requests that we have at a peer, if one is due. */
    void (*beat)(kvf_session *session, uint64_t now);
    /** A session must no longer be found; `lost`: its peer is gone, and with it the engine as it was met. */
    void (*hide)(kvf_session *session, bool lost);
    /** A session is lost: our requests at the peer end, and the peer's here. */
    void (*lose)(kvf_session *session, kvf_status status, const char *detail);
    /** Ends the use of a session: it takes no more calls, and its leases run out. */
    void (*retire)(kvf_session *session);
    /** A session takes no more calls: its peer's early calls are forgotten, and nothing more is written to it. */
    void (*forget)(kvf_session *session);
    void (*free_session)(kvf_session *session);
    /** The contact of an engine that is being met has answered, or never will. */
    void (*welcome)(kvf_remote *remote, const uint8_t *digest, const kvf_welcome *welcome);
    void (*refuse)(kvf_remote *remote, kvf_status status, const char *detail);
    /** A remote engine is ready, or cannot be met: tells the tickets that wait for it. */
    void (*met)(kvf_remote *remote);
    void (*unmet)(kvf_remote *remote, kvf_status status, const char *detail);
    /** A peer has our card, or refused it: tells the tickets that wait for that. */
    void (*joined)(kvf_session *session);
    /** Whether the endpoint of this name may open a flow. */
    kvf_status (*permit)(kvf_agent *agent, const char *peer, const kvf_flow_request *request);
    /** A flow by which a lease is read is left with its connection; the peer may not hear of that. `agent`: a kvf_agent. */
    void (*left)(void *agent, uint64_t lease);
    /** A flow writes no more, and its consumer knows: frees it. */
    void (*served)(kvf_flow *flow);
} kvf_hooks;

extern const kvf_hooks kvf_agent_hooks;

/** Checksums that one owner wants, see hashing.h; zeroed at first, and must not move while it wants any. */
struct kvf_hashing_queue {
    kvf_hashing *first;
    uint32_t count;
    /** agent->hashing: the queues of peers that want some, in order of their turns */
    kvf_hashing_queue *prev, *next;
};

/* ---- the agent ------------------------------------------------------------------------------- */

struct kvf_agent {
    const kvf_hooks *hooks;

    /* lock.c and loop.c; all but `arrived` under the lock, too */
    pthread_mutex_t lock;
    pthread_cond_t turn;      /* a thread has entered, or has left while we stop */
    _Atomic uint64_t arrived; /* threads that have asked for the lock */
    uint64_t entered;         /* threads that have got it */
    uint64_t gives_way_to;    /* a thread that gives way goes on when so many have entered */
    pthread_cond_t worked;    /* a thread has given up the work */
    /** How often the work was asked for, and given up: threads get it in the order in which they asked */
    uint64_t work_asked, work_given;
    pthread_t worker; /* the thread that has the work, if any */
    uint32_t users;   /* calls of the engine under way */
    pid_t process;    /* the process that opened the agent, */
    uint32_t forks;   /* and kvf_fork_count() there */
    pthread_t thread;
    bool thread_runs, stopping;
    int poll_fd;     /* epoll: readable while there is work, and without own_thread while there are events */
    kvf_wake wake;   /* in poll_fd: for work that no other descriptor shows */
    kvf_timer timer; /* in poll_fd: for the next time that is due */
    kvf_log_entry *lines; /* to be logged */
    bool logging;         /* a thread is logging them */

    kvf_agent_options options; /* defaults filled in */
    char *texts[4];            /* copies of the texts in `options` that are used later */

    const kvf_engine *engine; /* NULL: a directory */
    const kvf_shard *shard;
    uint32_t rank, rank_count;
    char *name; /* NULL: a directory that knows no engine yet */
    uint8_t secret[KVF_WIRE_SECRET_BYTES];
    uint64_t incarnation; /* proved by the secret */
    char *facts;
    uint8_t digest[KVF_WIRE_DIGEST_BYTES];
    kvf_facts own_facts; /* `facts`, parsed */

    kvf_clock clock;
    kvf_link *link;
    kvf_transport *transport;
    kvf_stage *stage; /* NULL: everything goes directly */
    kvf_memory *regions;
    uint32_t region_count;
    const void *card; /* NULL: not registered yet */
    size_t card_bytes;
    kvf_wire_buffer *introductions; /* [rank]; size 0: not known */
    uint32_t introduction_count;    /* of those that are known */
    kvf_wire_buffer with_facts;     /* our own, for directories */

    kvf_session *sessions; /* open ones, by id */
    kvf_session *clients;  /* incoming, by identity */
    kvf_session *claims;   /* incoming, by the rank they speak for */
    kvf_session *servers;  /* outgoing, by incarnation */
    kvf_session *by_route; /* incoming and outgoing, by the connection that messages to them take */
    struct kvf_grant *grants;
    uint32_t grant_count;
    struct kvf_refusal *refusals; /* those that the engine was told of */
    struct kvf_party *parties;    /* by key, or connection */
    uint64_t kept_bytes;          /* for all parties */
    uint64_t work;                /* done so far for the message being handled */
    kvf_session *all_sessions;
    kvf_departed *departed; /* peers that were lost, the latest last */
    uint32_t departed_count;
    uint64_t greeted_since; /* the engines that have greeted since then are `greeted` */
    uint32_t greeted;
    uint64_t lost_since; /* the peers of which the engine was told since then that they are lost are `lost` */
    uint32_t lost;
    kvf_remote *remotes; /* by name */
    kvf_remote *all_remotes;
    kvf_remote *meetings;        /* those that are being met, by route */
    kvf_geometry *geometries;    /* of these engines, by their descriptions of their shards */
    kvf_push_shape *push_shapes; /* of ranks that we may write to, likewise */
    kvf_ticket *tickets;
    kvf_ticket *holds, *pushes; /* by id */
    kvf_ticket *pulls;          /* by the name of the engine that is read, and id */
    kvf_past *past;
    kvf_trace *traces; /* of the latest requests, by ticket, the oldest first */
    uint64_t opened;   /* their times count from here */
    kvf_reader *leases;
    kvf_waiting *waiting; /* calls and flows that came early, by request id */
    kvf_early *early;
    kvf_early *early_calls;            /* the same, by session, request and kind */
    kvf_flow *flows;                   /* without a push yet */
    kvf_sweep early_sweep, flow_sweep; /* over `early` and `flows` */
    kvf_sweep session_sweep;           /* over all_sessions */
    kvf_alarms session_times;          /* when each is to be looked at by itself */
    kvf_alarms remote_times;           /* of all_remotes, likewise */
    uint64_t next_ticket;
    uint64_t next_lease;         /* counts leases; hold.c makes generations from it */
    uint8_t lease_key[16];       /* random */
    uint64_t regions_generation; /* higher each time our regions change */
    uint64_t last_number;        /* of the calls in sessions that have ended */
    kvf_ledger *ledger;

    bool drains;              /* takes nothing new */
    bool drain_is_late;       /* what was left has been cancelled */
    uint64_t drain_until;     /* then it is cancelled; UINT64_MAX: never */
    uint32_t drain_cancelled; /* requests */
    kvf_event_node *drained;  /* reserved, to be told when nothing is left */

    kvf_commanded *commands; /* in the order in which they came */
    uint32_t command_count;
    uint64_t command_bytes; /* of the replies that are kept */
    uint64_t commands_due;  /* when the next one must be replied to, or may be forgotten */
    uint64_t last_command;  /* the number of the last one */

    kvf_event_node *events, *told; /* waiting; the one taken last */
    kvf_wake told_wake;            /* readable while events wait, and for good once we stop */
    uint64_t due;                  /* no tick of everything is needed before this time, */
    uint64_t tickets_due;          /* and none of the tickets before this one */
    bool again;                    /* more can be done at once */
    uint64_t waits;                /* kvf_transport_waits(), as of the last round */
    kvf_hashing_queue *hashing;    /* checksums being computed for peers, */
    kvf_hashing_queue own_hashing; /* and for ourselves */
    bool hashed_for_peer;          /* the last slice was */
    struct kvf_summing *summing;   /* of devices; NULL until it is needed */
    kvf_hashing *on_device;        /* the one whose slice a device computes; NULL: none */
    bool awaits_device;            /* the next slice must wait for a device */
    kvf_looks hashing_looks;       /* opened with the first that uses a device */
    kvf_pull *moving_pulls;
    kvf_ticket *over; /* freed at the end of a round */
    kvf_flow *moving_flows;
    bool paces;            /* a moving ticket has a priority or a cap */
    uint64_t pace_due;     /* when to pace again, at the latest */
    kvf_arrival *arrivals; /* of tickets whose layers are counted */
    bool guarded;          /* it uses the guard of words (cuda/word.h) */
    kvf_after *afters;     /* events that tickets wait for */
    struct pollfd *after_polls;
    uint32_t after_count, after_room;
    kvf_looks looks; /* watches events of devices; opened with the first */
    kvf_agent_stats stats;
};

/** Writes how the agent introduces itself: by `shard`, in terms of the facts with that digest. `told`: their model, if
 * the shard has other types; NULL if it has not. */
kvf_status kvf_agent_write_introduction(const kvf_agent *agent, const kvf_shard *shard, const kvf_model *told,
                                        const uint8_t *digest, const char *facts, kvf_wire_buffer *out);

/** An agent's environment. Zeroed is for production: the machine's clock, and ZeroMQ. */
typedef struct kvf_surroundings {
    const kvf_clock *clock; /* outlives the agent */
    const kvf_link_table *link;
    const struct kvf_fabric
        *fabric; /* for its transport, see kvf_transport_open_over(); if it is unwatched, so is the
                                        agent, which then has no descriptor */
} kvf_surroundings;

/** kvf_agent_open() in other surroundings. With another clock than the machine's, time wakes no thread: the code that
 * moves the clock calls kvf_agent_progress() when kvf_agent_timeout() is over, and no call may wait. */
kvf_status kvf_agent_open_in(const kvf_surroundings *surroundings, const kvf_engine *engine, uint32_t rank,
                             const kvf_agent_options *options, kvf_agent **out);

/* ---- lock.c ---------------------------------------------------------------------------------- */

/**
 * Waits for the work. The caller has the lock, and loses it meanwhile: what it looked up before may be gone. The wait
 * lasts at most one slice of copies or hashes, and the turns of the threads that asked before.
 */
void kvf_work_take(kvf_agent *agent);
void kvf_work_give(kvf_agent *agent);          /**< the caller has both, and keeps the lock */
bool kvf_work_is_ours(const kvf_agent *agent); /**< whether this thread has the work */

void kvf_turn_take(kvf_agent *agent);   /**< takes the lock */
void kvf_turn_give(kvf_agent *agent);   /**< the caller has the lock; threads that wait for it go first */
void kvf_log_deliver(kvf_agent *agent); /**< the caller has the lock, and loses it while lines are logged */
void kvf_work_show(kvf_agent *agent);   /**< makes the descriptor readable if there is work */
uint64_t kvf_next_due(const kvf_agent *agent);

/* ---- loop.c ---------------------------------------------------------------------------------- */

/** Makes lock and descriptors, unless nobody sleeps on the agent. The caller calls kvf_loop_close() even if this fails. */
kvf_status kvf_loop_open(kvf_agent *agent, bool unwatched);
kvf_status kvf_loop_start(kvf_agent *agent); /**< watches link and transport, which are open, and works */
void kvf_loop_stop(kvf_agent *agent);        /**< ends the thread, and waits until every call is over */
void kvf_loop_close(kvf_agent *agent);

/**
 * Begins a call of the engine. KVF_E_INVALID: no agent, or one of the process that forked this one; the caller must not
 * unlock then.
 */
kvf_status kvf_agent_lock(kvf_agent *agent);
/** Ends the call: wakes a sleeping thread if there is work, and logs. */
void kvf_agent_unlock(kvf_agent *agent);

/* ---- events and the log: event.c, log.c ------------------------------------------------------ */

void kvf_event_peer(kvf_agent *agent, kvf_event_kind kind, const char *engine, uint32_t rank,
                    kvf_status status, const char *detail);
/** Makes agent->drained, so that telling cannot fail; false: no memory. */
bool kvf_event_reserve_drained(kvf_agent *agent);
/** Tells the engine that nothing is under way any more. */
void kvf_event_drained(kvf_agent *agent);
/** Tells the engine that the drain was taken back, unless it has taken the event that it had ended. */
void kvf_event_resumed(kvf_agent *agent);
/** Tells the engine of a command; everything is copied. KVF_E_NOMEM. */
kvf_status kvf_event_command(kvf_agent *agent, const kvf_command *command);
bool kvf_event_take(kvf_agent *agent, kvf_event *out);
void kvf_events_free(kvf_agent *agent);

/** Whether lines of a level are wanted; callers format them only then. */
bool kvf_agent_logs(const kvf_agent *agent, kvf_log_level level);
/** Nanoseconds since 1970, UTC, as in lines of the log. */
uint64_t kvf_wall_clock(void);
/** Logs each line of a text, if lines of the level are wanted. */
void kvf_agent_log(kvf_agent *agent, kvf_log_level level, const char *text);

/** The word of the log and of metrics, such as "pull". */
const char *kvf_request_kind_name(kvf_request_kind kind);
/** A request id, which is any bytes, as a text of JSON: those that are not printable ASCII are shown as \xNN. */
struct json_object *kvf_visible_id(const void *id, size_t bytes);
/** A copy, for kvf_free(); NULL: no memory. JSON and Prometheus take UTF-8 only, but names and sentences of peers may be
 * any bytes: '?' stands for each that is part of no character. */
char *kvf_copy_as_utf8(const char *text);
/** A text as one of JSON: as kvf_copy_as_utf8() gives it. */
struct json_object *kvf_visible_text(const char *text);

/** KVF_E_INVALID: the agent is NULL, or a directory, which has no memory. */
kvf_status kvf_agent_needs_memory(const kvf_agent *agent);

/** Logs a line as soon as the lock is given up. */
void kvf_log_line_add(kvf_agent *agent, kvf_log_level level, uint64_t time_ns, const char *text);

static inline uint64_t kvf_agent_now(const kvf_agent *agent) {
    return kvf_now(&agent->clock);
}

/** Requests a tick of everything at `when`. */
static inline void kvf_agent_due(kvf_agent *agent, uint64_t when) {
    agent->due = when < agent->due ? when : agent->due;
}

/** Requests a tick of the tickets at `when`, for a time of their own: it need not walk over thousands of idle sessions. */
static inline void kvf_tickets_due(kvf_agent *agent, uint64_t when) {
    agent->tickets_due = kvf_min_u64(agent->tickets_due, when);
}

/** Requests a tick of all sessions, some in each round. For one of them, kvf_session_due() does. */
static inline void kvf_sessions_due(kvf_agent *agent) {
    kvf_sweep_due(&agent->session_sweep, 0);
}

#endif
