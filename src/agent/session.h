/*
 * Sessions, each with one rank of a peer: calls that are repeated until they are answered, greeting, liveness, clocks.
 */
#ifndef KVF_AGENT_SESSION_H
#define KVF_AGENT_SESSION_H

#include "agent/agent.h"

/* ---- calls: repeated until answered ---------------------------------------------------------- */

/**
 * Called once, with the answer, or with KVF_E_TIMEOUT or KVF_E_PEER_LOST and no answer; the call is freed afterwards.
 * Not called for calls that were dropped.
 */
typedef void (*kvf_call_done)(kvf_call *call, kvf_status status, const kvf_answer *answer);

struct kvf_call {
    uint64_t number; /* in its session */
    kvf_session *session;
    kvf_call_kind kind;
    kvf_wire_buffer bytes;
    bool once;           /* not repeated */
    uint64_t first_sent; /* 0: not yet */
    uint64_t next_send, pause, deadline;
    char *put_off;      /* why the peer answered that it shall be repeated, or NULL */
    kvf_call_done done; /* NULL: no code waits */
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
/** The session is open (again): sends them. `anew`: the peer knows none of their numbers. */
void kvf_calls_bind(kvf_session *session, bool anew);
void kvf_calls_end(kvf_session *session, kvf_status status); /**< ends all of a session's calls */
void kvf_calls_repeat(kvf_session *session, uint64_t now);   /**< in the next tick, without their pause */
/** Whether the peer has yet to confirm that it may free blocks, or a heartbeat; with `unsent`, only if it was not told,
 * either. */
bool kvf_calls_owed(const kvf_session *session, bool unsent);
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

/** What tells clients apart: a process, and the rank that it speaks for. Rank and engine are the client's name, by which
 * claims are found. */
typedef struct kvf_client_key {
    uint64_t incarnation;
    uint32_t rank;
    char engine[KVF_WIRE_MAX_NAME]; /* without its end */
} kvf_client_key;

/** Fills in a key. @return how many of its bytes count, of which the name has the same without those of the
 * incarnation; 0: the engine's name is too long for any client */
static inline size_t kvf_client_key_of(uint64_t incarnation, uint32_t rank, const char *engine,
                                       size_t engine_bytes, kvf_client_key *out) {
    if (engine_bytes > sizeof out->engine)
        return 0;
    out->incarnation = incarnation;
    out->rank = rank;
    memcpy(out->engine, engine, engine_bytes);
    return offsetof(kvf_client_key, engine) + engine_bytes;
}
#define KVF_CLIENT_NAME_AT offsetof(kvf_client_key, rank)

struct kvf_session {
    kvf_agent *agent;
    bool incoming;
    kvf_session_state state;
    uint8_t id[KVF_WIRE_SESSION_BYTES];
    kvf_route route;
    kvf_route former_route; /* incoming: the one before; 0: none */
    char *engine;           /* the peer's */
    uint64_t incarnation;
    uint32_t rank, rank_count;
    /* outgoing: the first HELLO since the last WELCOME, 0: none; the next one, and the time between two */
    uint64_t hello_first, hello_next, hello_pause;
    uint32_t
        openings; /* outgoing: each time the peer had forgotten, at the latest, what it was asked before */

    bool keyed; /* incoming: opened under peer_key */
    uint8_t peer_key[KVF_KEY_BYTES];
    struct kvf_party *party; /* incoming: its budget is used */
    uint64_t kept_bytes;     /* used of that budget */
    kvf_call *probe;         /* incoming: asks whether the peer lives, as another wants its name */
    uint64_t alive_until;    /* incoming: it answered, and is not asked again before */
    bool silent;             /* incoming: it did not answer the probe */

    kvf_call *calls;
    kvf_call *next_call; /* the next in a walk over `calls` */
    uint64_t next_number;
    uint64_t seen_highest;
    uint64_t seen[KVF_WINDOW_CALLS / 64];

    void *card;
    size_t card_bytes;
    bool withholds;    /* its card says that it may withhold memory */
    kvf_peer *peer;    /* made from the card when first needed */
    bool awaits_stage; /* our stage could not take the peer, as memory was short */
    bool same_host;
    bool peer_lost;  /* the transport has reported it lost; handled in the next tick */
    bool peer_lives; /* it was lost because its endpoint refused us */
    bool gone;       /* its process is known to have ended */

    uint8_t digest[KVF_WIRE_DIGEST_BYTES]; /* outgoing: of its facts */
    kvf_wire_buffer introduction;          /* outgoing: ours, if it is not our usual one */
    kvf_source *sources;                   /* outgoing: the requests that we have at it */
    struct kvf_remote_rank *ranks;         /* outgoing: places in engines; several if one was met anew */
    bool joined, joining;                  /* outgoing: it has our card, or is being sent it */
    bool joins_again;                      /* incoming: it was told that we have forgotten the session */
    bool renamed;                          /* incoming: it may not know the session's new id yet */
    bool may_hang;                         /* incoming: writes that were stopped may hang, see flow.c */
    bool join_wanted;                      /* outgoing: the thread that has the work shall send our card */
    bool join_staged;                      /* outgoing: and say that our stage takes its flows */
    bool join_failed;                      /* outgoing: it refused our card for good */
    bool takes_flows;                      /* its stage takes our flows */
    uint64_t next_beat, heartbeat_ns;      /* outgoing: the next heartbeat, and the time between two */
    uint64_t written_ns; /* outgoing: when it was last answered that we have what it wrote; 0: never */
    uint64_t asked_ns;   /* when we sent the first message since it was last heard; 0: none */
    bool beat_for_life;  /* since then a heartbeat was sent to find out whether it lives */

    kvf_push_shape *shape;      /* incoming, joined: of its rank */
    uint64_t joined_generation; /* incoming, joined: of its regions */
    uint64_t joined_by;         /* incoming, joined: number of the last JOIN that was accepted */
    uint64_t joined_bytes;      /* used of its budget for its regions, */
    uint64_t plan_bytes;        /* and for the plans to write them */
    kvf_reader *readers;        /* incoming: leases it has */
    uint32_t reader_count;
    kvf_flow *flows; /* incoming: its expectations */
    kvf_flow *flow_table;
    uint32_t flow_count;
    kvf_early *early; /* incoming: its early calls */
    uint32_t early_count;
    kvf_hashing_queue hashing; /* incoming: checksums it asks for */

    uint64_t last_heard, last_used, broken_since; /* 0: not broken */
    char *broken_detail;
    kvf_status unreached; /* outgoing: why the latest try to connect failed; KVF_OK: it was heard since */
    bool waits_told;      /* it was logged that its transport's connection is still to be made */
    uint64_t since_ns, failed_ns; /* wall clock: when it was made, and when it last had a failure */
    char *failure;                /* that failure */
    char *way_told;               /* the way by which it is reached, as last logged */
    const char *past;             /* a transport that has turned out not to serve it; NULL: none */
    char *past_why;
    uint64_t bytes_received; /* outgoing: that it wrote to us */
    uint64_t bytes_packed;   /* that we moved packed, from it or to it */
    int64_t clock_offset;    /* of the peer's clock against ours */
    uint64_t clock_error;    /* of the offset when the clocks were compared; UINT64_MAX: not known */
    uint64_t compared;       /* when that was */
    uint8_t *key;            /* incoming: incarnation, rank and engine */
    size_t key_bytes;
    kvf_alarm time;           /* in agent->session_times */
    UT_hash_handle hh;        /* agent->sessions, by id */
    UT_hash_handle hh_client; /* agent->clients, by key; or agent->servers */
    UT_hash_handle hh_claim;  /* agent->claims, by rank and engine */
    UT_hash_handle hh_route;  /* agent->by_route. Several may have one route */
    uint32_t pass;            /* the last sweep that visited it */
    kvf_session *prev, *next; /* agent->all_sessions */
};

/** Requests a tick of a session at `when`: others, of which there may be thousands, are not looked at. */
static inline void kvf_session_due(kvf_session *session, uint64_t when) {
    kvf_alarm_by(&session->agent->session_times, &session->time, when);
}

/** Makes a session that is in no table yet; NULL: no memory. */
kvf_session *kvf_session_make(kvf_agent *agent, const char *engine, uint32_t rank);

/** The outgoing session with a rank of a remote engine, made if there is none. */
kvf_status kvf_session_to(kvf_remote *remote, uint32_t rank, kvf_session **out);

/** The transport's connection to the peer of a session that is open and whose card we have. */
kvf_status kvf_session_peer(kvf_session *session, kvf_peer **out);

/** Makes the connection, and adds the peer to our stage, if we have one. KVF_E_NOMEM: may be retried later. */
kvf_status kvf_session_stage(kvf_session *session);

/**
 * Notes that the transport of a connection cannot move what it must, though it could connect: the connection after the
 * next kvf_session_disconnect() passes it over, until the peer has other memory.
 *
 * @return false: no other transport is known to be able to
 */
bool kvf_session_pass_over(kvf_session *session, const char *why);

/** Whether the present connection is one to be passed over. */
bool kvf_session_is_past(const kvf_session *session);

/** The connection that our stage and the peer's use, maybe that of another session with the same process; NULL: one of
 * the two has no stage. */
kvf_peer *kvf_session_mate(const kvf_session *session);

/** Ends the flows by which we read from the peer: it has forgotten the session, and so has left them. */
void kvf_session_stop_reading(const kvf_session *session);

/** Whether our stage takes flows that the peer opens. */
bool kvf_session_takes_flows(const kvf_session *session);

/** Whether flows use its connection; the flows may be those of another session with the same endpoint. */
bool kvf_session_carries(const kvf_session *session);

/** Whether flows that have not ended do, likewise. The last operations of those that have ended may hang in it. */
bool kvf_session_goes_on(const kvf_session *session);

/** Whether flows or direct transfers that have not ended do, likewise: to close the connection would fail them. */
bool kvf_session_moves(const kvf_session *session);

/** Ends the transport's connection, if there is one, and with it every transfer that uses it: at once, or when a device
 * has finished what it copies for them. */
void kvf_session_disconnect(kvf_session *session);

/** kvf_transport_stop_endpoint() of our transport; only for the thread that has the work. */
kvf_status kvf_endpoint_stop(kvf_agent *agent, const void *card, size_t bytes, bool until_it_has);
/** For how long writes may still arrive of one that kvf_endpoint_stop() cannot stop: kvf_transport_late_ns(). */
uint64_t kvf_endpoint_late_ns(const kvf_agent *agent, const void *card, size_t bytes);

/** Copies the card of the peer's memory; if it differs from the card we had, ends the transport's connection. */
kvf_status kvf_session_take_card(kvf_session *session, const void *card, size_t bytes);

/** Ends a session: its calls, our requests at the peer, and the peer's here. The session is freed later. */
void kvf_session_lose(kvf_session *session, kvf_status status, const char *why);

/** Sets the route of messages to an incoming session's peer. */
void kvf_session_goes_by(kvf_session *session, kvf_route route);

/** Nothing that comes over its route finds the session any more. */
void kvf_session_forget_route(kvf_session *session);

/** Makes a session take no more calls; its peer must greet again. What it expects has failed. Its leases run out, and are
 * not cut short, because its reads cannot be stopped from here. */
void kvf_session_retire(kvf_session *session);

void kvf_message_send(kvf_agent *agent, kvf_route route, const kvf_message *message);
void kvf_session_hello(kvf_session *session, uint64_t now);
/** Whether an answer to HELLO is still to come. */
bool kvf_session_greets(const kvf_session *session);
/** An outgoing session is greeted again: the peer has forgotten it, or has another card by now. */
void kvf_session_greet_anew(kvf_session *session);
/** Greets for the ranks of an engine, or for a session: then `digest` is of the engine's facts, whose terms we shall
 * use. */
void kvf_hello_send(kvf_agent *agent, kvf_route route, const uint8_t *digest, bool wants_ranks,
                    uint32_t first_rank, bool wants_card);
void kvf_sessions_tick(kvf_agent *agent, uint64_t now);        /**< ticks some of them, see sweep.h */
bool kvf_session_fresh(kvf_session *session, uint64_t number); /**< true the first time a number is seen */
/** Compares the peer's clock with ours: a message was sent and answered at these times. */
void kvf_session_clock(kvf_session *session, uint64_t sent, uint64_t received, uint64_t theirs);
uint64_t kvf_session_their_time(const kvf_session *session, uint64_t ours);
/** Makes sure that the peer has our card; with `staged`, that its stage and ours know each other. On failure nothing is
 * remembered, and the next caller tries again. */
kvf_status kvf_session_join(kvf_session *session, bool staged);
/** Sends the card. Only the thread that has the work may call it, and not while a JOIN is on its way. */
kvf_status kvf_session_join_now(kvf_session *session);
/** Our card is no longer valid: the peer has none, and is sent the next one if it was being sent this one. */
void kvf_session_unjoin(kvf_session *session);
/** Whether we expect anything from the peer that it writes to our memory. */
bool kvf_session_is_to_be_written(const kvf_session *session);
void kvf_session_free(kvf_session *session);

/* How far two clocks may run apart, relative to the time since they were compared: far more than crystals do. */
#define KVF_CLOCK_DRIFT_DIVISOR 2048u

/** As much of a time that the peer counts from a moment before now as is not over there when it is over here. */
static inline uint64_t kvf_session_surely(uint64_t ns) {
    return ns - ns / KVF_CLOCK_DRIFT_DIVISOR;
}

/** How far the peer's clock and ours may have run apart by a time of our clock. */
static inline uint64_t kvf_session_drift(const kvf_session *session, uint64_t when) {
    return when > session->compared ? (when - session->compared) / KVF_CLOCK_DRIFT_DIVISOR : 0;
}

/** The most by which clock_offset may be wrong at a time of our clock; UINT64_MAX: it is not known. */
static inline uint64_t kvf_session_clock_error(const kvf_session *session, uint64_t when) {
    return session->clock_error == UINT64_MAX ? UINT64_MAX
                                              : session->clock_error + kvf_session_drift(session, when);
}

/** A request, a lease, a flow or an early call of the session has ended. A lost session is freed after the last of them. */
static inline void kvf_session_less(kvf_session *session) {
    if (session->state == KVF_SESSION_LOST)
        kvf_session_due(session, 0);
}

/** The client that speaks for a rank of an engine; NULL: none. */
static inline kvf_session *kvf_client_named(const kvf_agent *agent, const char *engine, uint32_t rank) {
    kvf_client_key key;
    kvf_session *client = NULL;
    const size_t bytes = kvf_client_key_of(0, rank, engine, strlen(engine), &key);
    const char *name = (const char *)&key + KVF_CLIENT_NAME_AT;
    if (bytes > 0)
        HASH_FIND(hh_claim, agent->claims, name, bytes - KVF_CLIENT_NAME_AT, client);
    return client;
}

#endif
