/*
 * Sessions: how the ranks of two engines meet, lend each other blocks, move them, and survive each other.
 *
 * An *agent* is one rank of an engine. It listens for peers, keeps the engine's blocks that were promised to
 * others, reads and writes blocks of others, and tells its engine by *events* what became of each request.
 * An agent without memory is a *directory*: it hands out the introductions of an engine's ranks.
 *
 *   producer                                   consumer
 *   kvf_agent_hold(request, blocks) ----.
 *                                        `---- kvf_agent_pull(request, blocks)     the consumer reads
 *                                              DONE: the blocks are filled
 *   DONE: the blocks are free
 *
 *                                              kvf_agent_expect(request, blocks)
 *   kvf_agent_push(request, blocks) --------'                                      the producer writes,
 *   kvf_agent_push_ready(...) as layers and chunks become ready
 *   DONE: the blocks are free                  DONE: the blocks are filled
 *
 * Every rank of either engine does this for its own part, with the same request id. Either side may come
 * first: a pull waits for its hold, a push for its expectation, up to the deadline given.
 *
 * Whose block is it? While an agent may still touch a block, or let a peer touch it, the block is *held* (the
 * agent's engine promised it to readers), *being filled*, or *in doubt* (a request failed, and a writer is
 * not yet known to have stopped). An event with `blocks_free` says that this is over; every request has
 * exactly one such event, whatever peers do. Until then an agent refuses other requests that would write the
 * same block.
 *
 * An agent is safe to use from several threads. Nothing happens unless somebody calls kvf_agent_progress() or
 * kvf_agent_wait() often enough, a few times for each heartbeat; with `own_thread` the agent does it by
 * itself.
 */
#ifndef KVFERRY_AGENT_H
#define KVFERRY_AGENT_H

#include <kvferry/transport.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_agent kvf_agent;

typedef enum kvf_failure_policy {
    KVF_FAILURE_RECOMPUTE = 0, /**< the event lists the blocks to compute anew */
    KVF_FAILURE_FAIL = 1,      /**< the event says that the request should fail */
} kvf_failure_policy;

/** Durations are in nanoseconds; 0 means the default in brackets. */
typedef struct kvf_agent_options {
    size_t struct_size;     /**< sizeof(kvf_agent_options) */
    const char *listen;     /**< where to listen; NULL: "tcp://127.0.0.1:*"; "": nowhere */
    const char *advertise;  /**< the endpoint told to peers; NULL: the one listened on */
    const char *transport;  /**< kind, see kvf_transport_open(); NULL: "auto" */
    const kvf_setting *settings; /**< of the transport, read while opening; NULL: none */
    uint32_t setting_count;
    const char *facts;      /**< `name: value` lines that must be the same on both sides, beyond the model's
                                 own: weights, rotary scaling ...; NULL: none */
    const char *public_key; /**< Z85 CurveZMQ keys, see kvf_agent_make_keys(); NULL: no encryption */
    const char *secret_key;
    const char *const *allowed_keys; /**< who may connect; needs keys */
    uint32_t allowed_key_count;      /**< 0: everyone who knows our public key */
    bool insecure;                   /**< listen beyond loopback without keys */
    uint64_t lease_ns;               /**< how long blocks are held without a sign of life [30 s] */
    uint64_t heartbeat_ns;           /**< between signs of life [a sixth of the lease] */
    uint64_t peer_timeout_ns;        /**< a peer whose connection broke may take so long to come back [2 s] */
    uint64_t idle_ns;                /**< a peer without requests is forgotten after [10 min] */
    uint32_t max_peers;              /**< that may greet us and be known at once [65536] */
    uint32_t max_requests_per_peer;  /**< of each kind that a peer may have here at once [16384] */
    kvf_failure_policy policy;
    bool verify;     /**< check what was read or written against checksums of the producer */
    bool own_thread; /**< make progress in a thread of the agent's own */
    /** Receives a line of JSON for each failure; called inside the agent's functions or thread. NULL: none */
    void (*log)(void *context, const char *line);
    void *log_context;
} kvf_agent_options;

/**
 * Opens the agent of rank `rank` of `engine`; it is not reachable before kvf_agent_register().
 *
 * @param engine   every rank of the own engine; must outlive the agent. NULL opens a directory
 * @param options  NULL for the defaults
 * @return KVF_OK, KVF_E_RANGE (rank), KVF_E_INVALID, KVF_E_PERMISSION (listening beyond loopback without
 *         keys), KVF_E_EXISTS (the address is taken), KVF_E_UNSUPPORTED, KVF_E_IO, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_open(const kvf_engine *engine, uint32_t rank, const kvf_agent_options *options,
                                  kvf_agent **out);

/**
 * Closes an agent: everything under way ends, no more events come, peers notice. Blocks must not be used
 * again before it has returned; memory from kvf_agent_allocate() is freed. NULL is accepted.
 */
KVF_API void kvf_agent_close(kvf_agent *agent);

/** Makes a pair of Z85 keys: 40 characters and a zero byte each. */
KVF_API kvf_status kvf_agent_make_keys(char public_key[41], char secret_key[41]);

/** Memory that same-host peers can map, see kvf_transport_allocate(). */
KVF_API kvf_status kvf_agent_allocate(kvf_agent *agent, uint64_t bytes, void **out);

/** Registers this rank's regions, once, see kvf_transport_register(); from here on peers are served. */
KVF_API kvf_status kvf_agent_register(kvf_agent *agent, const kvf_memory *regions, uint32_t count);

/* ---- meeting --------------------------------------------------------------------------------- */

/** The endpoint peers connect to, such as "tcp://127.0.0.1:41217"; owned by the agent. */
KVF_API const char *kvf_agent_endpoint(const kvf_agent *agent);

/**
 * The introduction of this rank: name, endpoint, public key, shard. It opens nothing by itself.
 *
 * @param bytes  receives a pointer owned by the agent, valid until it is closed
 * @return KVF_OK, KVF_E_INVALID before kvf_agent_register() and for a directory
 */
KVF_API kvf_status kvf_agent_introduction(kvf_agent *agent, const void **bytes, size_t *size);

/**
 * Adds the introduction of another rank of the same engine to those this agent (or directory) hands out. One
 * that is known is replaced. Peers can use the engine when the contact they know has all of its ranks.
 *
 * @return KVF_OK, KVF_E_PARSE, KVF_E_MISMATCH (of another engine or model), KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_introduce(kvf_agent *agent, const void *bytes, size_t size);

/** Where an engine is met: any agent or directory that has the introductions of all its ranks. */
typedef struct kvf_contact {
    const char *engine; /**< its name; another engine answering there is an error */
    const char *endpoint;
    const char *public_key; /**< of the agent or directory there; NULL: no encryption */
} kvf_contact;

/**
 * Meets an engine ahead of the first request: handshakes with its contact and with the ranks that this rank
 * would read from, and plans. An event KVF_EVENT_PEER_READY or KVF_EVENT_FAILED follows.
 *
 * @param deadline_ns  from now on; 0: 30 s. Attempts are repeated until then
 * @param ticket       receives the number the event will have; may be NULL
 */
KVF_API kvf_status kvf_agent_connect(kvf_agent *agent, const kvf_contact *contact, uint64_t deadline_ns,
                                     uint64_t *ticket);

/* ---- requests ---------------------------------------------------------------------------------------------
 * A request id is any bytes, up to 1024. Each call below makes a ticket: a number that names it in this agent
 * and is never used again. The steps of a group are tokens; in state groups, states.
 */

/** One group of a request: pull and expect give the steps that are wanted, hold and push those that are
 * there. */
typedef kvf_group_steps kvf_agent_group;

typedef struct kvf_agent_request {
    size_t struct_size; /**< sizeof(kvf_agent_request) */
    const void *id;
    size_t id_bytes;
    const kvf_agent_group *groups; /**< one for each group of the model; NULL: see the functions */
    uint32_t group_count;
    uint64_t deadline_ns; /**< pull, expect, push: fails after so long; 0: 120 s. hold: the lease, 0: the
                             agent's */
    uint32_t consumers;   /**< hold, push: engines that will take it; 0: 1 */
    kvf_contact contact;  /**< pull, expect: the producer. Not used by hold and push */
    /**
     * pull: fails when after so long the producer has not been met or has not lent its blocks, as where
     * nobody listens or nobody holds the request; 0: the deadline. Not used by others.
     */
    uint64_t patience_ns;
} kvf_agent_request;

/**
 * Producer: keeps blocks for consumers to read. They are held until `consumers` engines have released them,
 * or nobody has asked for them or given a sign of life for the length of the lease.
 *
 * Event: DONE (all have them), or FAILED with KVF_E_TIMEOUT (the lease ran out) or KVF_E_CANCELLED.
 *
 * @return KVF_OK, KVF_E_EXISTS (the id is held already, or a block is being filled), KVF_E_RANGE,
 *         KVF_E_INVALID, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_hold(kvf_agent *agent, const kvf_agent_request *request, uint64_t *ticket);

/**
 * Consumer: reads a request that a producer holds (or will hold before the deadline) into own blocks. Where
 * all groups are empty (begin == end) nothing is read, and every rank of the producer is told that it may
 * free.
 *
 * With groups NULL the producer's blocks are only reserved, their lease kept alive, until
 * kvf_agent_pull_into() says where to; for requests that wait for blocks of their own.
 *
 * Event: DONE (every wanted byte is there), or FAILED with the blocks that must be computed.
 *
 * @return KVF_OK, KVF_E_EXISTS (a block is in use by another request; the detail names it), KVF_E_RANGE,
 *         KVF_E_INVALID, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_pull(kvf_agent *agent, const kvf_agent_request *request, uint64_t *ticket);

/** Names the destination of a pull that was started without one. KVF_E_NOT_FOUND when the ticket has ended.
 */
KVF_API kvf_status kvf_agent_pull_into(kvf_agent *agent, uint64_t ticket, const kvf_agent_group *groups,
                                       uint32_t group_count);

/** Consumer: lets a producer write a request into own blocks. Events and errors as of kvf_agent_pull(). */
KVF_API kvf_status kvf_agent_expect(kvf_agent *agent, const kvf_agent_request *request, uint64_t *ticket);

/**
 * Producer: writes a request to those who expect it, as it becomes ready.
 *
 * Event: DONE (all consumers have it), or FAILED; then the own blocks are free.
 */
KVF_API kvf_status kvf_agent_push(kvf_agent *agent, const kvf_agent_request *request, uint64_t *ticket);

/**
 * Says how much of a push is ready: all layers before token `chunk_begin`, and the model layers [0, layers)
 * for the tokens [chunk_begin, chunk_end). State groups are written with the last chunk. Chunks come in
 * order; within a chunk `layers` only grows; a new chunk may begin when the one before had all layers.
 *
 * kvf_agent_push_ready(agent, ticket, 0, UINT64_MAX, UINT32_MAX) says, at any time, that everything is ready.
 *
 * @return KVF_OK, KVF_E_NOT_FOUND (the ticket has ended), KVF_E_RANGE (out of order)
 */
KVF_API kvf_status kvf_agent_push_ready(kvf_agent *agent, uint64_t ticket, uint64_t chunk_begin,
                                        uint64_t chunk_end, uint32_t layers);

/**
 * Stops a request at any point. Its event still comes: FAILED with KVF_E_CANCELLED, or DONE if it was done;
 * and its blocks are not free before the event that says so.
 *
 * @return KVF_OK, KVF_E_NOT_FOUND (the ticket has ended)
 */
KVF_API kvf_status kvf_agent_cancel(kvf_agent *agent, uint64_t ticket);

/* ---- events ---------------------------------------------------------------------------------- */

typedef enum kvf_event_kind {
    KVF_EVENT_DONE = 1,
    KVF_EVENT_FAILED = 2,
    KVF_EVENT_BLOCKS_FREE = 3, /**< of a request that failed earlier with blocks in doubt */
    KVF_EVENT_PEER_READY = 4,  /**< kvf_agent_connect() has succeeded */
    KVF_EVENT_PEER_LOST = 5,   /**< a peer died or was replaced; its requests fail in events of their own */
} kvf_event_kind;

typedef enum kvf_request_kind {
    KVF_REQUEST_NONE = 0,
    KVF_REQUEST_HOLD = 1,
    KVF_REQUEST_PULL = 2,
    KVF_REQUEST_PUSH = 3,
    KVF_REQUEST_EXPECT = 4,
    KVF_REQUEST_CONNECT = 5,
} kvf_request_kind;

/** Blocks of one group. */
typedef struct kvf_block_list {
    const uint32_t *ids;
    uint32_t count;
} kvf_block_list;

/** What happened. Pointers are valid until the next call of kvf_agent_next_event(). */
typedef struct kvf_event {
    kvf_event_kind kind;
    kvf_request_kind request_kind;
    uint64_t ticket; /**< 0: of no request */
    const void *id;
    size_t id_bytes;
    kvf_status status;             /**< KVF_OK unless FAILED */
    const char *detail;            /**< a sentence; "" when there is nothing to say */
    const char *engine;            /**< the peer's; "" when it is not about one */
    uint32_t rank;                 /**< of the peer; UINT32_MAX: all of them, or none */
    bool blocks_free;              /**< the request's blocks are the engine's again */
    bool recompute;                /**< FAILED, by policy: compute `invalid`, rather than fail the request */
    const kvf_block_list *invalid; /**< FAILED pulls and expects: blocks without valid content, by group */
    uint32_t group_count;
    uint64_t bytes, runs; /**< moved */
} kvf_event;

/** Takes the next event. KVF_E_AGAIN when there is none. */
KVF_API kvf_status kvf_agent_next_event(kvf_agent *agent, kvf_event *out);

/** A file descriptor that polls readable while there are events to take. Do not read it. */
KVF_API int kvf_agent_event_fd(kvf_agent *agent);

/** Does what can be done now without waiting. Not needed with `own_thread`, but allowed. */
KVF_API kvf_status kvf_agent_progress(kvf_agent *agent, bool *busy);

/** Makes progress until there is an event or the time is over: KVF_OK or KVF_E_TIMEOUT. */
KVF_API kvf_status kvf_agent_wait(kvf_agent *agent, uint64_t timeout_ns);

/* ---- looking in ------------------------------------------------------------------------------ */

typedef enum kvf_block_state {
    KVF_BLOCK_FREE = 0,    /**< the agent has no claim on it */
    KVF_BLOCK_HELD = 1,    /**< promised to readers, none is known to be reading */
    KVF_BLOCK_LEASED = 2,  /**< a reader has a lease on it */
    KVF_BLOCK_FILLING = 3, /**< being read into or written by peers */
    KVF_BLOCK_IN_DOUBT = 4,
} kvf_block_state;

/** The state of a block, and how many requests have to do with it (may be NULL). KVF_E_RANGE: no such block.
 */
KVF_API kvf_status kvf_agent_block(kvf_agent *agent, uint32_t group, uint32_t block, kvf_block_state *state,
                                   uint32_t *requests);

#define KVF_HISTOGRAM_BUCKETS 48

/** Durations in nanoseconds: bucket i counts those in [2^i, 2^(i+1)), bucket 0 also 0. */
typedef struct kvf_histogram {
    uint64_t count, sum_ns, min_ns, max_ns;
    uint64_t buckets[KVF_HISTOGRAM_BUCKETS];
} kvf_histogram;

/** The duration below which a share `quantile` (0 to 1) of the counted ones lies, to within its bucket. */
KVF_API uint64_t kvf_histogram_quantile(const kvf_histogram *histogram, double quantile);

/** Counted since the agent was opened, but for those "now". */
typedef struct kvf_agent_stats {
    size_t struct_size; /**< sizeof(kvf_agent_stats); set by the caller */
    uint64_t bytes_read, bytes_written, runs;
    uint64_t done[6];                /**< by kvf_request_kind */
    uint64_t failed[6];              /**< by kvf_request_kind */
    uint64_t failures_by_status[32]; /**< by kvf_status */
    uint64_t leases_expired;
    uint64_t messages_sent, messages_received, messages_repeated;
    uint64_t messages_stale; /**< of an older generation, session or incarnation: dropped */
    uint64_t messages_malformed;
    uint64_t peers_refused, peers_evicted, peers_lost, peers_replaced;
    uint64_t checksums_wrong;
    uint64_t peers_now;       /**< sessions, in both directions */
    uint64_t requests_now[6]; /**< by kvf_request_kind */
    uint64_t leases_now;      /**< granted to readers */
    uint64_t blocks_held_now, blocks_filling_now, blocks_in_doubt_now;
    uint64_t memory_now_bytes; /**< kept for peers: sessions, shards, plans, leases */
    kvf_histogram transfer;    /**< from the first run posted to the last byte there */
    kvf_histogram post;        /**< posting runs */
    kvf_histogram queue;       /**< from the request to the first run posted */
    kvf_histogram total;       /**< from the request to its DONE: pulls and expects */
} kvf_agent_stats;

KVF_API kvf_status kvf_agent_get_stats(kvf_agent *agent, kvf_agent_stats *stats);

/**
 * What a peer's clock shows more than ours, in nanoseconds, by the smallest round trip seen, and how far off
 * this may be at most.
 *
 * @return KVF_OK, or KVF_E_NOT_FOUND when there is no session with that rank
 */
KVF_API kvf_status kvf_agent_clock_offset(kvf_agent *agent, const char *engine, uint32_t rank,
                                          int64_t *offset_ns, uint64_t *error_ns);

#ifdef __cplusplus
}
#endif

#endif
