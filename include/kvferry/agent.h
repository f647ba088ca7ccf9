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
 *   kvf_agent_push(request, length) --------'                                      the producer writes,
 *   kvf_agent_push_ready(blocks) as layers and chunks become ready
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
 * An agent is safe to use from several threads. With `own_thread` it works by itself. Without, its engine
 * makes it work, in a loop of its own:
 *
 *   for (;;) {
 *       poll(kvf_agent_event_fd(agent), ...);       // readable when there is work or an event; any time-out
 *       kvf_agent_progress(agent, NULL);
 *       while (kvf_agent_next_event(agent, &event) == KVF_OK)
 *           ...
 *   }
 *
 * or by kvf_agent_wait(). After fork(), only the process that opened an agent may use it.
 */
#ifndef KVFERRY_AGENT_H
#define KVFERRY_AGENT_H

#include <kvferry/record.h>
#include <kvferry/stage.h>
#include <kvferry/transport.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_agent kvf_agent;

typedef enum kvf_failure_policy {
    KVF_FAILURE_RECOMPUTE = 0, /**< the event lists the blocks to compute anew */
    KVF_FAILURE_FAIL = 1,      /**< the event says that the request should fail */
} kvf_failure_policy;

/** How important a line of the log is. The numbers are those of Python's logging. */
typedef enum kvf_log_level {
    KVF_LOG_DEBUG = 10, /**< every rank, every piece */
    /** An engine was met: who reads what from whom, how, and how long it should take; what serves a peer, and why
     * nothing better does; a peer that comes back. */
    KVF_LOG_INFO = 20,
    KVF_LOG_WARNING = 30, /**< a request failed or a peer was lost; the line is an object of JSON */
} kvf_log_level;

/** One line of the log. It is the library's, and valid during the call that brings it. */
typedef struct kvf_log_line {
    size_t struct_size; /**< sizeof(kvf_log_line) of the library */
    kvf_log_level level;
    uint64_t time_ns; /**< since 1970, UTC */
    const char *text; /**< without a newline */
} kvf_log_line;

/** How a line of the log is written out. */
typedef enum kvf_log_form {
    KVF_LOG_TEXT = 0, /**< time, level and text: "2026-11-22T20:05:01.123456Z WARNING ..." */
    /** An object of JSON: "time" and "level" as above, and "text"; a failure's members stand in the place of "text". */
    KVF_LOG_JSON = 1,
} kvf_log_form;

/**
 * Writes a line of the log out, with its time and level, for files and collectors of logs.
 *
 * @param line    as `log` in the agent's options was given it
 * @param out     receives one line without a newline, cut to fit and ended by a zero byte; may be NULL where out_bytes
 *                is 0
 * @param length  receives the bytes of the whole line without the zero byte, as of snprintf(); may be NULL
 * @return KVF_OK, also for a line that was cut; KVF_E_INVALID (a form that does not exist; a NULL), KVF_E_NOMEM
 *
 * Thread safety: any thread.
 */
KVF_API kvf_status kvf_log_write(const kvf_log_line *line, kvf_log_form form, char *out, size_t out_bytes,
                                 size_t *length);

/**
 * A key that may connect, and whom its holders may say they are. A name that any grant names is only for the keys of
 * those grants; a key may have several.
 */
typedef struct kvf_key_grant {
    size_t struct_size;            /**< sizeof(kvf_key_grant) */
    const char *public_key;        /**< Z85 */
    const char *engine;            /**< NULL: any engine that no grant names */
    uint32_t rank_begin, rank_end; /**< of that engine; both 0: all of them */
} kvf_key_grant;

/** Durations are in nanoseconds; 0 means the default in brackets. */
typedef struct kvf_agent_options {
    size_t struct_size;          /**< sizeof(kvf_agent_options) */
    const char *listen;          /**< where to listen; NULL: "tcp://127.0.0.1:*"; "": nowhere */
    const char *advertise;       /**< the endpoint told to peers; NULL: the one listened on */
    const char *transport;       /**< kind, see kvf_transport_open(); NULL: "auto" */
    const kvf_setting *settings; /**< of the transport, read while opening; NULL: none */
    uint32_t setting_count;
    const char *facts;      /**< `name: value` lines that must be the same on both sides, beyond the model's
                                 own: weights, rotary scaling ...; NULL: none. One whose name begins with a
                                 group's and a dot is of that group only */
    const char *public_key; /**< Z85 CurveZMQ keys, see kvf_agent_make_keys(); NULL: no encryption */
    const char *secret_key;
    const char *const *allowed_keys; /**< who may connect; needs keys */
    uint32_t allowed_key_count;      /**< 0, and no grants: everyone who knows our public key */
    bool insecure;                   /**< listen beyond loopback without keys */
    uint64_t lease_ns;               /**< how long blocks are held without a sign of life [30 s] */
    uint64_t heartbeat_ns;           /**< between signs of life [a sixth of the lease] */
    uint64_t peer_timeout_ns;        /**< how long a broken connection may take to come back [2 s] */
    uint64_t idle_ns;                /**< a peer without requests is forgotten after [10 min] */
    uint32_t max_peers;              /**< that may greet us and be known at once [65536] */
    uint32_t max_requests_per_peer;  /**< of each kind that a peer may have here at once [16384] */
    kvf_failure_policy policy;
    bool verify;     /**< check what was read or written against checksums of the producer */
    bool own_thread; /**< make progress in a thread of the agent's own */
    /**
     * Receives the lines of the log, in order; NULL: none. Called on the thread that makes progress, one
     * line at a time. It may call the agent, but for kvf_agent_close().
     */
    void (*log)(void *context, const kvf_log_line *line);
    void *log_context;
    kvf_log_level log_level; /**< the least important lines that are wanted [KVF_LOG_INFO] */
    /** Further keys that may connect, and the ranks their holders speak for; needs keys. Copied. NULL: none. */
    const kvf_key_grant *grants;
    uint32_t grant_count;
    /* Budgets for the memory and time that peers take here. A request beyond them is refused with KVF_E_LIMIT, counted
     * (`over_budget`), and told once by KVF_EVENT_PEER_REFUSED. */
    /** Sessions of all who hold one key [8192]; without keys a connection has 8. */
    uint32_t max_peers_per_key;
    uint64_t max_bytes_for_peers; /**< memory kept for those who greeted us [256 MiB] */
    /** Of it, for all who hold one key, or for a connection without [half of it]; and never more than is left for
     * others. */
    uint64_t max_bytes_per_key;
    /** The longest time that a peer's request is kept, however often the peer beats [1 h, or a longer lease]. */
    uint64_t longest_ns;
    /**
     * Connections that others make to this agent [16384], but never more than half of the descriptors that the
     * process may have when the agent is opened (RLIMIT_NOFILE). Where there are more, those without a session go,
     * first who has been silent for longest; and those without a session that say nothing for 15 s go in any case.
     * And as many to its transport by messages, but never more than a quarter of the descriptors, unless `settings`
     * say otherwise.
     */
    uint32_t max_connections;
    uint32_t max_connections_per_address; /**< of them, from one address of the network [three quarters] */
    /**
     * By which way requests move that do not say, see kvf_way: KVF_WAY_AUTO chooses for each rank that is read or
     * written. KVF_WAY_DIRECT: this agent has no stage, and needs no memory for one. KVF_WAY_PACKED: what cannot go
     * packed fails with KVF_E_UNSUPPORTED. An agent whose memory is a device's, and not `withheld`, has no stage either.
     */
    kvf_way way;
    uint32_t slot_bytes;  /**< of the stage, see kvf_stage_options */
    uint64_t arena_bytes; /**< likewise [64 MiB]; behind the regions, touched where something goes packed */
    uint32_t workers;     /**< likewise [0: who makes progress copies] */
    /**
     * Element types that may be converted into each other on the way, in both directions: a set (see KVF_DTYPE_BIT())
     * of f32, f16 and bf16 [none]. A group whose types differ is moved where both engines allow all of its types, and
     * then packed: `way` must not be KVF_WAY_DIRECT. All ranks of an engine say the same.
     */
    uint32_t convert;
    const char *const *convert_groups; /**< the groups for which that holds; NULL: all. Copied */
    uint32_t convert_group_count;
    /**
     * How long a request that was held or pushed is remembered when it has ended, up to a day: who asks for it then is
     * refused at once, with KVF_E_EXISTS where it was handed over and KVF_E_NOT_FOUND where it was not, and does not
     * wait until a request of that id comes. For engines whose ids are used once. The last 16384 are [none]
     */
    uint64_t remember_ns;
    bool assumed_costs; /**< of the stage, see kvf_stage_options [calibrated] */
    /** Of how many requests, the latest, the times are kept for kvf_agent_trace(): some 400 bytes each, and 100 for
     * each rank of a peer; up to 65536 [none] */
    uint32_t trace_requests;
} kvf_agent_options;

/**
 * Opens the agent of rank `rank` of `engine`; it is not reachable before kvf_agent_register().
 *
 * @param engine   every rank of the own engine; must outlive the agent. NULL opens a directory
 * @param options  NULL for the defaults
 * @return KVF_OK, KVF_E_RANGE (rank), KVF_E_INVALID, KVF_E_PERMISSION (listening beyond loopback without
 *         keys), KVF_E_EXISTS (the address is taken), KVF_E_NOT_FOUND (a group of convert_groups),
 *         KVF_E_UNSUPPORTED, KVF_E_IO, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_open(const kvf_engine *engine, uint32_t rank, const kvf_agent_options *options,
                                  kvf_agent **out);

/**
 * Closes an agent: everything under way ends, no more events come, peers notice. Blocks must not be used
 * again before it has returned; memory from kvf_agent_allocate() is freed. NULL is accepted.
 *
 * Calls that are under way on other threads end first, kvf_agent_wait() with KVF_E_CANCELLED; no call may
 * begin afterwards. Does nothing in a child of fork().
 */
KVF_API void kvf_agent_close(kvf_agent *agent);

/** Makes a pair of Z85 keys: 40 characters and a zero byte each. */
KVF_API kvf_status kvf_agent_make_keys(char public_key[41], char secret_key[41]);

/**
 * Lets holders of another key connect, from now on. Needs `allowed_keys` in the options: without, all may.
 *
 * @param public_key  Z85
 * @return KVF_OK, also when it is allowed already; KVF_E_INVALID (not a key; everyone may connect),
 *         KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_allow_key(kvf_agent *agent, const char *public_key);

/**
 * Lets holders of another key connect, from now on, and says whom they may speak for. Sessions that there are stay as
 * they are.
 *
 * @param grant  is copied
 * @return as kvf_agent_allow_key(); KVF_E_RANGE (ranks that are no range, or of no engine)
 */
KVF_API kvf_status kvf_agent_grant_key(kvf_agent *agent, const kvf_key_grant *grant);

/**
 * Takes a key off the list: its holders cannot connect any more, and what they still say is not heard, so that their
 * leases and what they expect run out. They keep what they know: who has this agent's card may read its memory until
 * it is closed. Where the last key is withdrawn nobody may connect. Names that were granted to it stay reserved for
 * it.
 *
 * @return KVF_OK, KVF_E_NOT_FOUND (it was not allowed), KVF_E_INVALID (not a key; everyone may connect)
 */
KVF_API kvf_status kvf_agent_withdraw_key(kvf_agent *agent, const char *public_key);

/**
 * Memory that same-host peers can map, freed by kvf_agent_close(); arguments and errors as of
 * kvf_transport_allocate().
 */
KVF_API kvf_status kvf_agent_allocate(kvf_agent *agent, kvf_memory_kind kind, uint32_t device, uint64_t bytes,
                                      void **out);

/**
 * Registers this rank's regions, see kvf_transport_register(); from here on peers are served. A call that failed may
 * be repeated, with the same regions. The descriptions are copied; the memory stays the caller's and must stay valid
 * until it is unregistered or the agent is closed. A rank that keeps no layer has none, and registers 0 of them.
 * Regions that are `withheld`, as those of a device mostly are, move packed: the agent's way must not be direct, and
 * all regions are in memory of the host or of one device. A device's that is not withheld goes directly: then a transport
 * is needed that takes it, as "cuda" does on one host and a UCX with CUDA support.
 *
 * @return KVF_OK, KVF_E_INVALID (not as many as the shard has, or kvf_memory), KVF_E_RANGE (a region smaller than
 *         the shard's), KVF_E_EXISTS (all are registered, or other memory by a call that failed), KVF_E_UNSUPPORTED
 *         (memory kind), KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_register(kvf_agent *agent, const kvf_memory *regions, uint32_t count);

/**
 * Registers one region, at any time. Peers are served while all of the shard's regions are registered; those that
 * greet before that are told to try again. The first time, regions are registered in their order.
 *
 * @return as kvf_agent_register(), KVF_E_RANGE (no such region, or one before it was never registered)
 */
KVF_API kvf_status kvf_agent_register_region(kvf_agent *agent, uint32_t region, const kvf_memory *memory);

/**
 * Takes one region back, at any time, as an engine does that sleeps or moves its cache. New requests are refused with
 * KVF_E_INVALID until all regions are registered again; peers learn that what they know of this rank's memory is
 * old, and meet it again: requests of theirs that wait for this rank go on waiting, or fail with KVF_E_PEER_LOST
 * where they have a connection for the memory. Once this has returned KVF_OK nobody touches the memory any more,
 * with the exception of kvf_transport_unregister_region().
 *
 * @return KVF_OK, KVF_E_AGAIN (a request has blocks in the region, which the detail names: cancel it or wait for its
 *         event; or a peer is in the middle of a write: let the agent work and call again; the detail names the
 *         peer, its process, and for how long it has been waited for),
 *         KVF_E_NOT_REGISTERED, KVF_E_RANGE (no such region), KVF_E_INVALID
 */
KVF_API kvf_status kvf_agent_unregister_region(kvf_agent *agent, uint32_t region);

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
    uint64_t reserved[2];   /**< 0 */
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

/**
 * What a met engine and ours have in common, group by group: first the groups of our model, in order, then those that
 * only theirs has. A request needs only the groups whose steps it names.
 *
 * @param engine  the name in its contact
 * @param i       from 0 on
 * @param match   struct_size is set by the caller; the rest is filled in
 * @return KVF_OK, KVF_E_NOT_FOUND (no engine of this name is met, or there are no more groups), KVF_E_INVALID
 */
KVF_API kvf_status kvf_agent_match(kvf_agent *agent, const char *engine, uint32_t i, kvf_group_match *match);

/* ---- requests ---------------------------------------------------------------------------------------------
 * A request id is any bytes, up to 1024. Each call below makes a ticket: a number that names it in this agent
 * and is never used again. The steps of a group are tokens; in state groups, states.
 */

/** The kind of event that marks memory as ready to be read. */
typedef enum kvf_ready_kind {
    KVF_READY_NOW = 0, /**< it is */
    KVF_READY_FD = 1,  /**< a file descriptor that becomes readable then, and stays so: an eventfd, a pipe */
    KVF_READY_CUDA_EVENT = 2, /**< an event of a CUDA stream, recorded before the call */
} kvf_ready_kind;

/**
 * An event to wait for before blocks are read, for engines whose device writes them after the call. Copied during
 * the call. The descriptor is duplicated, and never read: the caller may close its own at once, and must leave it
 * readable until the request's event. Waiting costs a descriptor. Of an event of a CUDA stream counts what it stands for
 * during the call: the caller may record it anew or destroy it at once. Waiting costs a stream of the device, which is looked
 * at after pauses of at most 1 ms. What is read or written for a request is there, for any stream, when its event says DONE.
 */
typedef struct kvf_ready_event {
    size_t struct_size; /**< sizeof(kvf_ready_event) */
    kvf_ready_kind kind;
    int fd;             /**< KVF_READY_FD: anything that epoll takes; not a file on a disk */
    void *device_event; /**< KVF_READY_CUDA_EVENT: a cudaEvent_t, which is a CUevent */
    uint32_t device;    /**< KVF_READY_CUDA_EVENT: whose event it is, by its number */
} kvf_ready_event;

typedef struct kvf_agent_request {
    size_t struct_size; /**< sizeof(kvf_agent_request) */
    kvf_request_id id;  /**< 1 to 1024 bytes, copied */
    /**
     * One for each group of the model, copied with their tables; NULL: see the functions. Pull and expect give the
     * steps that are wanted, hold and push those that are there.
     */
    const kvf_group_steps *groups;
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
    /**
     * pull, push: which requests of this agent move first. A request of a lower priority starts no new bytes while
     * one of a higher is moving and has not used up its cap; what was started before, at most 48 MiB for each rank,
     * still moves. It is not forgotten: whenever it has waited for 100 ms, it moves 1 MiB. Equal ones share. Not
     * used by others.
     */
    int32_t priority;
    /**
     * pull, push: the most bytes a second that this rank moves for the request, to all its peers together; 0: no cap.
     * Over any second it is exceeded by at most 2%, and kept without a long stop: every 10 ms some bytes move.
     * Heartbeats and the deadline go on meanwhile. Not used by others.
     */
    uint64_t bytes_per_second;
    /** hold, push: no byte is read, and no consumer learns that the blocks are there, before it; NULL: at once. */
    const kvf_ready_event *after;
    /**
     * pull, expect, push: by which way it moves; KVF_WAY_AUTO: the agent's. What is converted goes packed whatever is
     * said here, but for KVF_WAY_DIRECT, with which it fails. Packed needs the same groups, layers and parts on both
     * sides and a stage on both; what has none fails with KVF_E_UNSUPPORTED. Expected packed, blocks are written by
     * this side alone, so that they are free as soon as the request has ended, whatever its writers do; otherwise a
     * push's own way counts. With a cap, packed bytes begin slot by slot, and AUTO is direct
     * where peers can be reached so. Not used by hold.
     */
    kvf_way way;
    /**
     * hold, push: what travels with the cache, under the same lease. Copied. Each consumer rank gets the records of
     * those ranks that it reads from, or is written by, with its DONE; and gets them again where it tries again. Not
     * used by pull and expect.
     */
    const kvf_record *records;
    uint32_t record_count; /**< up to KVF_MAX_RECORDS */
} kvf_agent_request;

/**
 * Producer: keeps blocks for consumers to read. They are held until `consumers` engines have released them,
 * or nobody has asked for them or given a sign of life for the length of the lease. A consumer whose attempt
 * failed may try again until then.
 *
 * With `after`, consumers wait as they do for a hold that is still to come. The lease begins when the event
 * happens; where it does not within the length of the lease, the hold fails. Cancelling does not wait for it.
 *
 * Event: DONE (all have them), or FAILED with KVF_E_TIMEOUT (the lease ran out; or a consumer's time, when it
 * gave up), KVF_E_CANCELLED (by this engine or by a consumer's) or KVF_E_IO (the other end of the descriptor in
 * `after` was closed before it was written to).
 *
 * @return KVF_OK, KVF_E_EXISTS (the id is held already, or a block is being filled), KVF_E_RANGE (a block
 *         that does not exist, or a table that does not reach over the steps; a record, see kvferry/record.h, or too
 *         many of them), KVF_E_UNSUPPORTED (a kind of event), KVF_E_INVALID, KVF_E_IO (no more descriptors), KVF_E_NOMEM
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
 * Event: DONE (every wanted byte is there), or FAILED with the blocks that must be computed. After a failure
 * the request may be pulled again, as long as it is held.
 *
 * @return KVF_OK, KVF_E_EXISTS (a block is in use by another request, which the detail names; or this agent is reading
 *         the same request of the same engine already), KVF_E_RANGE (a block that does not exist, or a table that does
 *         not reach over the steps), KVF_E_INVALID, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_pull(kvf_agent *agent, const kvf_agent_request *request, uint64_t *ticket);

/** Names the destination of a pull that was started without one. KVF_E_NOT_FOUND when the ticket has ended.
 */
KVF_API kvf_status kvf_agent_pull_into(kvf_agent *agent, uint64_t ticket, const kvf_group_steps *groups,
                                       uint32_t group_count);

/** Consumer: lets a producer write a request into own blocks. Events and errors as of kvf_agent_pull(). */
KVF_API kvf_status kvf_agent_expect(kvf_agent *agent, const kvf_agent_request *request, uint64_t *ticket);

/**
 * Producer: opens the writing of a request to those who expect it. The groups say how long it will be: their
 * `end` is its length. Their tables need not have all blocks yet, or any: kvf_agent_push_ready() brings them.
 *
 * Event: DONE (all consumers have it), or FAILED, with the reasons of kvf_agent_hold(); then the own blocks are
 * free, those that chunks brought too. With `after`, nothing is written before it has happened, whatever is ready;
 * the deadline counts from the call.
 *
 * @return KVF_OK, KVF_E_EXISTS (the id is being pushed already, or a block is being filled), KVF_E_RANGE (a block
 *         that does not exist; records, as of kvf_agent_hold()), KVF_E_UNSUPPORTED (a kind of event), KVF_E_INVALID,
 *         KVF_E_IO, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_push(kvf_agent *agent, const kvf_agent_request *request, uint64_t *ticket);

/** How much of a push is ready. Copied during the call. */
typedef struct kvf_push_chunk {
    size_t struct_size;  /**< sizeof(kvf_push_chunk) */
    uint64_t begin, end; /**< tokens; an end after that of the push, as UINT64_MAX, is that of the push */
    uint32_t layers;     /**< so many model layers are ready for them; more than there are: all */
    /**
     * Blocks that the push does not have yet, one table for each group of the model; NULL: none. A table's
     * `first_block` says where in the sequence its blocks are, and need not follow those given before; entries that
     * are known may be repeated as they were.
     */
    const kvf_block_table *tables;
    uint32_t table_count;
    const kvf_ready_event *after; /**< the chunk is ready when this has happened; NULL: it is */
    /** Further records of the push, as in kvf_agent_request, which arrive when all is written. Copied. */
    const kvf_record *records;
    uint32_t record_count;
} kvf_push_chunk;

/**
 * Says how much of a push is ready: all layers before token `begin`, and the model layers [0, layers) for the
 * tokens [begin, end). State groups are written with the last chunk, which must bring their blocks. Chunks come in
 * order; within a chunk `layers` only grows; a new chunk may begin when the one before had all layers. A chunk with
 * `after` waits for its event, and those that come behind it wait with it.
 *
 * The blocks of a chunk are claimed by the call, and are free with the event of the push. After an error nothing
 * has changed.
 *
 * @param chunk  NULL says, at any time, that everything is ready and all blocks have been given
 * @return KVF_OK; KVF_E_NOT_FOUND (the ticket has ended); KVF_E_RANGE (out of order; a block that does not exist;
 *         tables that, with those given before, do not reach over the chunk: the detail names group and token;
 *         records that, with those given before, are too many);
 *         KVF_E_EXISTS (a block is being filled by another request); KVF_E_INVALID (an entry that was given before
 *         is another block now); KVF_E_UNSUPPORTED (a kind of event); KVF_E_IO; KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_push_ready(kvf_agent *agent, uint64_t ticket, const kvf_push_chunk *chunk);

/**
 * Stops a request at any point. Its event still comes: FAILED with KVF_E_CANCELLED, or DONE if it was done;
 * and its blocks are not free before the event that says so. The event of a hold waits for its readers: until
 * their next heartbeat, or for the length of a lease, which readers that go on cannot make longer.
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
    /** Somebody said it is that rank of that engine, and was refused; told once in ten minutes for each rank and
     * reason, however often it happens. Nothing else has changed. */
    KVF_EVENT_PEER_REFUSED = 6,
} kvf_event_kind;

typedef enum kvf_request_kind {
    KVF_REQUEST_NONE = 0,
    KVF_REQUEST_HOLD = 1,
    KVF_REQUEST_PULL = 2,
    KVF_REQUEST_PUSH = 3,
    KVF_REQUEST_EXPECT = 4,
    KVF_REQUEST_CONNECT = 5,
} kvf_request_kind;

/** The length of arrays by kvf_request_kind, with room for kinds to come. */
#define KVF_REQUEST_KINDS 16

/** Blocks of one group. This struct stays as it is. */
typedef struct kvf_block_list {
    const uint32_t *ids;
    uint32_t count;
} kvf_block_list;

/** What happened. Pointers are valid until the next call of kvf_agent_next_event(). */
typedef struct kvf_event {
    size_t struct_size; /**< sizeof(kvf_event), set by the caller */
    kvf_event_kind kind;
    kvf_request_kind request_kind;
    uint64_t ticket; /**< 0: of no request */
    kvf_request_id id;
    kvf_status status;             /**< KVF_OK unless FAILED */
    const char *detail;            /**< a sentence; "" when there is nothing to say */
    const char *engine;            /**< the peer's; "" when it is not about one */
    uint32_t rank;                 /**< of the peer; UINT32_MAX: all of them, or none */
    bool blocks_free;              /**< the request's blocks are the engine's again */
    bool recompute;                /**< FAILED, by policy: compute `invalid`, rather than fail the request */
    const kvf_block_list *invalid; /**< FAILED pulls and expects: blocks without valid content, by group */
    uint32_t group_count;
    uint64_t bytes, runs;  /**< moved */
    uint64_t bytes_packed; /**< pull, push: of these bytes, those that went packed */
    /** DONE pulls and expects: what came with the cache, rank by rank, in the order in which each rank gave it. */
    const kvf_record *records;
    uint32_t record_count;
} kvf_event;

/**
 * Takes the next event.
 *
 * @param out  struct_size is set by the caller; the rest is filled in
 * @return KVF_OK, KVF_E_EMPTY (there is none), KVF_E_INVALID
 */
KVF_API kvf_status kvf_agent_next_event(kvf_agent *agent, kvf_event *out);

/**
 * A file descriptor that polls readable while there are events to take; without `own_thread` also while
 * kvf_agent_progress() has something to do: messages and operations that ended, and times that have come. It
 * is the same as long as the agent is open. Do not read it, but poll it, or give it to epoll.
 */
KVF_API int kvf_agent_event_fd(kvf_agent *agent);

/**
 * In how many nanoseconds kvf_agent_progress() is to be called again at the latest, though nothing arrives: 0
 * when there is something to do now; UINT64_MAX when no time is waited for, and with `own_thread`. For loops
 * that do not wait for kvf_agent_event_fd(), which becomes readable then.
 */
KVF_API uint64_t kvf_agent_timeout(kvf_agent *agent);

/**
 * Does what can be done now without waiting. Not needed with `own_thread`, but allowed.
 *
 * @param busy  receives whether there is more to do at once; may be NULL
 */
KVF_API kvf_status kvf_agent_progress(kvf_agent *agent, bool *busy);

/**
 * Makes progress until there is an event or the time is over. Several threads may wait at once: an event
 * wakes them all, and one of them will take it.
 *
 * @param timeout_ns  UINT64_MAX: without end
 * @return KVF_OK, KVF_E_TIMEOUT, KVF_E_CANCELLED (another thread is closing the agent, which must not be used
 *         any more)
 */
KVF_API kvf_status kvf_agent_wait(kvf_agent *agent, uint64_t timeout_ns);

/* ---- looking in ------------------------------------------------------------------------------ */

/**
 * Says in words how this agent stands with an engine: where it was met, both shapes, which of its ranks are
 * read for what, by which transport, and what a request should take; and, as a producer, which of its ranks
 * have sessions here. What the log says at the first meeting, at any time.
 *
 * @param engine      its name; NULL: this agent itself, and every engine it knows
 * @param level       KVF_LOG_INFO: a summary, in which ranks that are alike share lines; KVF_LOG_DEBUG: after
 *                    it every rank and every piece
 * @param text        receives lines, each ended by a newline, cut to fit and ended by a zero byte; may
 *                    be NULL where text_bytes is 0
 * @param length      receives the bytes of the whole text without the zero byte, as of snprintf(); may
 *                    be NULL
 * @return KVF_OK, also for a text that was cut; KVF_E_NOT_FOUND (an engine that is not known, or no more),
 *         KVF_E_INVALID, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_explain(kvf_agent *agent, const char *engine, kvf_log_level level, char *text,
                                     size_t text_bytes, size_t *length);

/** The role of a peer towards this agent. */
typedef enum kvf_peer_role {
    KVF_PEER_PRODUCER = 1, /**< this rank takes blocks from it */
    KVF_PEER_CONSUMER = 2, /**< it takes blocks from this rank */
} kvf_peer_role;

typedef enum kvf_peer_state {
    KVF_PEER_GREETING = 1, /**< it was greeted and has not answered yet */
    KVF_PEER_OPEN = 2,
    KVF_PEER_BROKEN = 3, /**< the connection to it broke, and may come back */
    KVF_PEER_LOST = 4,   /**< it is gone; the latest of these are remembered until they come back */
} kvf_peer_state;

/** One rank of another engine, as an agent knows it. Texts are cut to fit; times are since 1970, UTC. */
typedef struct kvf_agent_peer {
    size_t struct_size; /**< sizeof(kvf_agent_peer) */
    kvf_peer_role role;
    kvf_peer_state state;
    uint32_t rank, rank_count;
    char engine[256];
    char fabric[32]; /**< the transport that serves it, as "shm"; "" before anything moved between the two */
    char way[128]; /**< how that reaches the peer's memory, as "mapped memory"; "" where that is not known */
    char passed_over[256]; /**< better transports of both sides that cannot, and why; "": none */
    uint64_t bytes_read; /**< by us from it. What it reads from us it does by itself: that is counted there */
    uint64_t bytes_written;  /**< by us to it */
    uint64_t bytes_received; /**< written by it to us, as it says */
    uint64_t round_trip_ns;  /**< of a message, the smallest seen; 0: not measured */
    uint64_t since_ns;       /**< when it was met; LOST: when it was lost */
    uint64_t failed_ns;      /**< when something with it failed last; 0: never */
    char failure[512];       /**< what that was; "": nothing */
    uint64_t bytes_packed;   /**< of what we read from it or wrote to it, that went packed */
} kvf_agent_peer;

/**
 * Lists the peers: those there is a session with, and after them those that were lost lately.
 *
 * @param peers     an array of `capacity` elements; the first one's struct_size is set by the caller and is the size
 *                  of each. NULL where capacity is 0
 * @param count     receives how many there are, which may be more than fit
 * @return KVF_OK, also where not all fit; KVF_E_INVALID
 */
KVF_API kvf_status kvf_agent_peers(kvf_agent *agent, kvf_agent_peer *peers, uint32_t capacity,
                                   uint32_t *count);

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

/**
 * Durations in nanoseconds: bucket i counts those in [2^i, 2^(i+1)), bucket 0 also 0. This struct stays as it is.
 */
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
    uint64_t done[KVF_REQUEST_KINDS];          /**< by kvf_request_kind */
    uint64_t failed[KVF_REQUEST_KINDS];        /**< by kvf_request_kind */
    uint64_t failures_by_status[KVF_STATUSES]; /**< by kvf_status */
    uint64_t leases_expired;
    uint64_t messages_sent, messages_received, messages_repeated;
    uint64_t messages_stale; /**< of an older generation, session or incarnation: dropped */
    uint64_t messages_malformed;
    uint64_t peers_refused, peers_evicted, peers_lost, peers_replaced;
    uint64_t checksums_wrong;
    uint64_t peers_now;                       /**< sessions, in both directions */
    uint64_t requests_now[KVF_REQUEST_KINDS]; /**< by kvf_request_kind */
    uint64_t leases_now;                      /**< granted to readers */
    uint64_t blocks_held_now, blocks_filling_now, blocks_in_doubt_now;
    uint64_t memory_now_bytes; /**< kept for peers: sessions, shards, plans, leases */
    kvf_histogram transfer;    /**< from the first run posted to the last byte there */
    kvf_histogram post;        /**< posting runs */
    kvf_histogram queue;       /**< from the request to the first run posted */
    kvf_histogram total;       /**< from the request to its DONE: pulls and expects */
    /** Dropped: in a session, and not from its peer; or answers to a greeting, from somebody who connected to us */
    uint64_t messages_foreign;
    uint64_t over_budget;     /**< what peers asked for and was refused, for they had as much as they may */
    uint64_t connections_now; /**< made to this agent */
    uint64_t connections_closed; /**< by this agent: no session, and silent, or no room */
    uint64_t bytes_packed;       /**< of bytes_read and bytes_written, those that went packed */
    uint64_t flows_refused; /**< flows, and what was said of them, that a peer must not have opened or said */
    /** Plans made and kept: for reading, one for all engines of the same facts and shards; for writing, one for all ranks
     * of other engines with the same shard, and each range of layers that was written. */
    uint64_t plans_built, plans_now;
} kvf_agent_stats;

KVF_API kvf_status kvf_agent_get_stats(kvf_agent *agent, kvf_agent_stats *stats);

/**
 * The statistics as text that Prometheus reads (its exposition format, version 0.0.4), for the engine's own page of
 * metrics: counters, gauges and histograms named `kvferry_...`, times in seconds, with the labels `engine` and `rank`
 * of this agent. An engine with several agents in one process prints the lines of each that begin with `#` once.
 *
 * @param text    receives the text, cut to fit and ended by a zero byte; may be NULL where text_bytes is 0
 * @param length  receives the bytes of the whole text without the zero byte, as of snprintf(); may be NULL
 * @return KVF_OK, also for a text that was cut; KVF_E_INVALID, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_metrics(kvf_agent *agent, char *text, size_t text_bytes, size_t *length);

/**
 * The times of the latest requests (`trace_requests` in the options), those under way too, as a trace that Perfetto and
 * chrome://tracing open: an object of JSON with "traceEvents", where a process is this agent and a thread one request.
 *
 * A request is one span, and below it are its phases, each named after what it waits for:
 *
 *   pull    meeting, asking (for leases), waiting (for blocks of its own), planning, posting, moving, arrived, and
 *           where checksums are compared verifying, ending
 *   expect  meeting, asking, moving, arrived, and likewise
 *   hold    preparing (until the event of `after`), held
 *   push    preparing (until all is said to be ready), writing
 *   all     noticing: until the engine has taken the event
 *
 * What concerns one rank of a peer is a moment: "granted" and "released" (a lease, on both sides), "expired", "expected"
 * and "written" (a push, on both sides), "posted" (the first bytes for it). Moments tell the peer, its clock minus ours
 * by the smallest round trip, and how far off that may be. `python -m kvferry.trace` joins the traces of several agents
 * by these and by the ids of requests. A lender cannot see single reads of its memory: its "granted" and "released" are
 * their bounds.
 *
 * Times are in microseconds since the agent was opened; "otherData" says what that is on its clock and since 1970.
 *
 * @param text    receives the text, cut to fit and ended by a zero byte; may be NULL where text_bytes is 0
 * @param length  receives the bytes of the whole text without the zero byte, as of snprintf(); may be NULL
 * @return KVF_OK, also for a text that was cut; KVF_E_INVALID (no requests are traced), KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_trace(kvf_agent *agent, char *text, size_t text_bytes, size_t *length);

/**
 * A peer's clock minus ours, in nanoseconds, by the smallest round trip seen, and how far off this may be at most.
 *
 * @return KVF_OK, or KVF_E_NOT_FOUND when there is no session with that rank
 */
KVF_API kvf_status kvf_agent_clock_offset(kvf_agent *agent, const char *engine, uint32_t rank,
                                          int64_t *offset_ns, uint64_t *error_ns);

#ifdef __cplusplus
}
#endif

#endif
