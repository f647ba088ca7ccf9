/*
 * Sessions: how the ranks of two engines meet, lend each other blocks, move them, and survive each other.
 *
 * An *agent* is one rank of an engine. It listens for peers, keeps the blocks of its engine that were promised to
 * peers, reads and writes blocks of peers, and tells its engine by *events* what became of each request. An agent
 * without memory is a *directory*: it hands out the introductions of an engine's ranks.
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
 * not yet known to have stopped). An event with `blocks_free` says that the agent has let go of the block; every
 * request has exactly one such event, whatever peers do. Until then an agent refuses other requests that would write
 * the same block.
 *
 * An agent is safe to use from several threads. With `own_thread` it makes progress by itself. Without, its engine
 * drives it, in a loop of its own (below). An agent's threads may use the processors that the thread which opens it may
 * use: open it on a thread that is not bound to a core that computes. They take no signals but those of their own faults.
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
    KVF_FAILURE_RECOMPUTE = 0, /**< the event lists the blocks to recompute */
    KVF_FAILURE_FAIL = 1,      /**< the event says that the request should fail */
} kvf_failure_policy;

/** How important a line of the log is. The numbers are those of Python's logging. */
typedef enum kvf_log_level {
    KVF_LOG_DEBUG = 10, /**< every rank, every piece */
    /** An engine was met: which rank reads what from which, how, and how long it should take; which transport serves a
     * peer, and why no better one does; a peer that comes back. */
    KVF_LOG_INFO = 20,
    /** A request failed or a peer was lost: the line is an object of JSON. Or words: a peer that was shut out is in the
     * middle of a write. */
    KVF_LOG_WARNING = 30,
} kvf_log_level;

/** One line of the log. Owned by the library, valid during the call that passes it. */
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
 * @param line    as passed to `log` of the agent's options
 * @param out     receives one line without a newline, cut to fit and ended by a zero byte; may be NULL where out_bytes
 *                is 0
 * @param length  receives the length of the whole line without the zero byte, as snprintf() returns it; may be NULL
 * @return KVF_OK, also for a line that was cut; KVF_E_INVALID (a form that does not exist; a NULL), KVF_E_NOMEM
 *
 * Thread safety: any thread.
 */
KVF_API kvf_status kvf_log_write(const kvf_log_line *line, kvf_log_form form, char *out, size_t out_bytes,
                                 size_t *length);

/**
 * A key that may connect, and the engine and ranks that its holders may speak for. An engine that any grant names is
 * reserved for the keys of those grants. A key may have several grants.
 */
typedef struct kvf_key_grant {
    size_t struct_size;            /**< sizeof(kvf_key_grant) */
    const char *public_key;        /**< Z85 */
    const char *engine;            /**< NULL: every engine that no grant names */
    uint32_t rank_begin, rank_end; /**< of that engine; both 0: all of them */
    /** The holders may give commands, see kvf_ask(). Such a grant lets them speak for no engine: `engine` is NULL and
     * the ranks are 0. A key that shall do both has two grants. */
    bool commands;
} kvf_key_grant;

/** Durations are in nanoseconds; 0 means the default in brackets. */
typedef struct kvf_agent_options {
    size_t struct_size;          /**< sizeof(kvf_agent_options) */
    const char *listen;          /**< where to listen; NULL: "tcp://127.0.0.1:*"; "": nowhere */
    const char *advertise;       /**< the endpoint told to peers; NULL: the one listened on */
    const char *transport;       /**< kind, see kvf_transport_open(); NULL: "auto" */
    const kvf_setting *settings; /**< as in kvf_transport_options, read while opening; NULL: none */
    uint32_t setting_count;
    const char *facts;      /**< `name: value` lines that must be the same on both sides, beyond the model's
                                 own: weights, rotary scaling ...; NULL: none. A name that begins with a group's name
                                 and a dot is a fact of that group only */
    const char *public_key; /**< Z85 CurveZMQ keys, see kvf_agent_make_keys(); NULL: no encryption */
    const char *secret_key;
    const char *const *allowed_keys; /**< public keys that may connect; needs keys */
    uint32_t allowed_key_count;      /**< 0, and no grants: everyone who knows our public key may connect */
    bool insecure;                   /**< listen beyond loopback without keys */
    uint64_t lease_ns; /**< how long blocks are held without a heartbeat, 12 ms to a day [30 s] */
    /** Between heartbeats, up to half of the lease [a sixth]; less for peers whose leases are shorter. */
    uint64_t heartbeat_ns;
    /** How long a broken connection may take to come back, up to a day [2 s]; a lease longer if the peer's host answers no
     * attempt to connect. */
    uint64_t peer_timeout_ns;
    uint64_t idle_ns;               /**< a peer without requests is forgotten after, up to a year [10 min] */
    uint32_t max_peers;             /**< peers that may greet us and be known at once [65536] */
    uint32_t max_requests_per_peer; /**< of each kind that a peer may have here at once [16384] */
    kvf_failure_policy policy;
    bool verify;     /**< compare what was read or written with checksums of the producer */
    bool own_thread; /**< make progress in a thread of the agent's own */
    /**
     * Receives the lines of the log, in order; NULL: none. Called one line at a time, on the agent's own thread or on
     * any that calls the agent. It may call any function of the agent except kvf_agent_close().
     */
    void (*log)(void *context, const kvf_log_line *line);
    void *log_context;
    kvf_log_level log_level; /**< the least important lines that are wanted [KVF_LOG_INFO] */
    /** Further keys that may connect, and the ranks that their holders speak for; needs keys. Copied. NULL: none. */
    const kvf_key_grant *grants;
    uint32_t grant_count;
    /* Budgets for the memory and time that peers take here. A request beyond them is refused with KVF_E_LIMIT, counted
     * (`over_budget`), and reported once by KVF_EVENT_PEER_REFUSED. */
    /** Sessions of all holders of one key together [8192]; without keys a connection may have 8. */
    uint32_t max_peers_per_key;
    uint64_t max_bytes_for_peers; /**< memory kept for all peers together [256 MiB] */
    /** Of max_bytes_for_peers, for all holders of one key together, or for one connection if there are no keys
     * [half]; never more than is left. */
    uint64_t max_bytes_per_key;
    /** The longest time that a peer's request is kept, however often the peer beats; from two leases to a year [1 h, or
     * two leases if that is longer]. A lease is renewed only if it then ends within this time: with less, the first
     * heartbeat could end it. All peers together keep a hold for no longer than this beyond the lease that its engine
     * gave it. */
    uint64_t longest_ns;
    /**
     * Connections that peers make to this agent [16384], but never more than half of the descriptors that the process
     * may have when the agent is opened (RLIMIT_NOFILE). Beyond that the agent closes connections without a session,
     * the one that was silent for longest first; a connection without a session that is silent for 15 s is closed in
     * any case. The agent's transport by messages takes as many connections again, but never more than a quarter of the
     * descriptors, unless `settings` say otherwise.
     */
    uint32_t max_connections;
    /** of max_connections, from one network address [three quarters] */
    uint32_t max_connections_per_address;
    /**
     * The way of requests that name none, see kvf_way. KVF_WAY_AUTO: the agent chooses for each rank that is read or
     * written. KVF_WAY_DIRECT: the agent has no stage, and needs no memory for one. KVF_WAY_PACKED: a request that
     * cannot go packed fails with KVF_E_UNSUPPORTED, and memory of devices is registered as `withheld`.
     */
    kvf_way way;
    uint32_t slot_bytes; /**< of the stage, see kvf_stage_options */
    /** likewise [64 MiB]; registered behind the shard's regions, written only when something goes packed */
    uint64_t arena_bytes;
    uint32_t workers; /**< likewise [0: the thread that makes progress copies] */
    /**
     * Element types that may be converted into each other on the way, in both directions: a set, see KVF_DTYPE_BIT()
     * [none]. A group whose types differ is moved only if both engines allow all of its types, and goes packed: `way`
     * must not be KVF_WAY_DIRECT. All ranks of an engine must have the same value.
     */
    uint32_t convert;
    const char *const *convert_groups; /**< the groups that may be converted; NULL: all. Copied */
    uint32_t convert_group_count;
    /**
     * How long the agent remembers a held or pushed request after it has ended, up to a day [none]. A peer that asks
     * for it meanwhile is refused at once, with KVF_E_EXISTS if it was handed over and KVF_E_NOT_FOUND if it was not,
     * instead of waiting until a request of that id comes. For engines that use each id once. The latest 16384 are
     * remembered.
     */
    uint64_t remember_ns;
    bool assumed_costs; /**< of the stage, see kvf_stage_options [calibrated] */
    /** How many of the latest requests keep their times for kvf_agent_trace(): some 400 bytes each, and 100 for each
     * rank of a peer; up to 65536 [none] */
    uint32_t trace_requests;
    /**
     * Without keys: programs of this machine may give commands, see kvf_ask() [they may not]. Must not be set together
     * with `insecure` or keys: holders of keys need a grant.
     */
    bool local_commands;
    /**
     * Connections by TCP that the agent lets in a second, and as many at once [1000; with keys 250]. Peers beyond that
     * try again, up to the deadlines of their requests: with keys, the 4096 ranks of an engine take 17 s to connect to
     * one rank. Its transport by messages lets in as many; without a number here, 250 while it serves others.
     */
    uint32_t max_connections_per_second;
    uint64_t device_arena_bytes; /**< of the stage, see kvf_stage_options [64 MiB] */
    uint64_t device_copy_bytes;  /**< of the stage, see kvf_stage_options [256 KiB] */
} kvf_agent_options;

/**
 * Opens the agent of rank `rank` of `engine`. Peers cannot reach it before kvf_agent_register().
 *
 * @param engine   every rank of the agent's own engine; must outlive the agent. Peers know it by its name: 1 to 255
 *                 bytes without control characters. NULL opens a directory
 * @param options  NULL for the defaults
 * @return KVF_OK, KVF_E_RANGE (the rank, the engine's name, a duration, a number), KVF_E_INVALID, KVF_E_PERMISSION
 *         (listening beyond loopback without keys), KVF_E_EXISTS (the address is taken), KVF_E_NOT_FOUND (a group of
 *         convert_groups; a kind of transport or a setting), KVF_E_UNSUPPORTED, KVF_E_IO, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_open(const kvf_engine *engine, uint32_t rank, const kvf_agent_options *options,
                                  kvf_agent **out);

/**
 * Closes an agent: everything under way ends, no more events come, peers notice. Blocks must not be used
 * again before it has returned; memory from kvf_agent_allocate() is freed. NULL is accepted. Producers are told which
 * blocks they may free, also those of pulls and expectations under way: for that it waits about a second at most, of
 * which 100 ms for their confirmation, and at most another second for messages that have not left yet. Meanwhile `log`
 * may be called. For a producer whose process is stopped in the middle of a write it waits a second, too: see
 * kvf_transport_close(). If a device has not finished a copy within "cuda.patience_ms", it may still access blocks after
 * this has returned: call kvf_agent_unregister_region() before, until it says KVF_OK, where memory of a device is to be
 * freed.
 *
 * Calls that are under way on other threads end first, kvf_agent_wait() with KVF_E_CANCELLED; no call may
 * begin afterwards. Does nothing in a child of fork().
 */
KVF_API void kvf_agent_close(kvf_agent *agent);

/**
 * Makes a pair of Z85 keys: 40 characters and a zero byte each. Any thread.
 *
 * @return KVF_OK, KVF_E_INVALID (a NULL), KVF_E_UNSUPPORTED (this machine's ZeroMQ has no keys)
 */
KVF_API kvf_status kvf_agent_make_keys(char public_key[41], char secret_key[41]);

/**
 * Lets holders of another key connect, from now on, and says which ranks they may speak for. Existing sessions stay as
 * they are. Needs `allowed_keys` or `grants` in the options: without them everyone may connect already.
 *
 * @param grant  is copied
 * @return KVF_OK, also when the key is allowed already; KVF_E_INVALID (not a key; everyone may connect), KVF_E_RANGE
 *         (ranks that are not a range, or ranks without an engine), KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_grant_key(kvf_agent *agent, const kvf_key_grant *grant);

/**
 * Takes a key off the list: its holders cannot connect any more and their messages are dropped, so that their leases
 * and expectations run out. They keep what they know: a peer that has this agent's card may read its memory until the
 * agent is closed. What this agent asks of them, over connections that it makes itself, goes on. Once the last key is
 * withdrawn, no peer may connect. Names that were granted to the key stay reserved for it.
 *
 * @return KVF_OK, KVF_E_NOT_FOUND (the key was not allowed), KVF_E_INVALID (not a key; everyone may connect)
 */
KVF_API kvf_status kvf_agent_withdraw_key(kvf_agent *agent, const char *public_key);

/**
 * Allocates memory that same-host peers can map, freed by kvf_agent_close(); arguments and errors as of
 * kvf_transport_allocate().
 */
KVF_API kvf_status kvf_agent_allocate(kvf_agent *agent, kvf_memory_kind kind, uint32_t device, uint64_t bytes,
                                      void **out);

/**
 * Registers this rank's regions, see kvf_transport_register(); from here on peers are served. A call that failed may
 * be repeated, with the same regions. The descriptions are copied; the memory stays the caller's and must stay valid
 * until it is unregistered or the agent is closed. A rank that keeps no layer has no region, and registers 0 of them.
 * `withheld` regions, as those of a device mostly are, move packed: the agent's way must not be direct, and all regions
 * must be in memory of the host or of one device. Device memory that is not withheld moves directly, and needs a
 * transport that serves it: "cuda" on one host, a UCX with CUDA support, or a provider of libfabric that takes it. With
 * the transport "auto" it moves packed from and to peers that those do not reach; kvf_agent_peers() and the log say
 * which, and why.
 *
 * @return KVF_OK, KVF_E_INVALID (not as many as the shard has, or kvf_memory), KVF_E_RANGE (a region smaller than
 *         the shard's), KVF_E_EXISTS (all are registered, or other memory by a call that failed), KVF_E_UNSUPPORTED
 *         (memory kind), KVF_E_OVERFLOW, KVF_E_IO, KVF_E_NOMEM
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
 * Takes one region back, at any time, for engines that sleep or move their cache. New requests are refused with
 * KVF_E_INVALID until all regions are registered again. Peers learn that what they know of this rank's memory is old,
 * and meet the rank again: their requests that wait for this rank go on waiting. Of a peer with a connection for the
 * memory, requests that move by it fail with KVF_E_PEER_LOST; and so do all its requests to this rank if it expects
 * pushes from it, or is connected by UCX or libfabric. Once this has returned KVF_OK, no peer touches the memory any
 * more, with the one exception that kvf_transport_unregister_region() names.
 *
 * @return KVF_OK, KVF_E_AGAIN (a request has blocks in the region, and the detail names it: cancel it or wait for its
 *         event; a peer is in the middle of a write, and the detail names the peer, its process, and how long the agent
 *         has waited for it; or a device still copies or hashes cells: let the agent make progress and call again, or let
 *         the region stay by kvf_agent_register_region()), KVF_E_NOT_REGISTERED, KVF_E_RANGE (no such region),
 *         KVF_E_INVALID
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
 * Adds the introduction of another rank of the same engine to those this agent (or directory) hands out; an earlier one
 * of that rank is replaced. Peers can use the engine once the contact they know has the introductions of all its ranks.
 *
 * @return KVF_OK, KVF_E_PARSE, KVF_E_MISMATCH (another engine or model), KVF_E_EXISTS (of another process that says it
 *         is this rank), KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_introduce(kvf_agent *agent, const void *bytes, size_t size);

/** Where an engine is met: any agent or directory that has the introductions of all its ranks. */
typedef struct kvf_contact {
    const char *engine; /**< its name; it is an error if another engine answers there */
    const char *endpoint;
    const char *public_key; /**< of the agent or directory there; NULL: no encryption */
    uint64_t reserved[2];   /**< 0 */
} kvf_contact;

/**
 * Meets an engine ahead of the first request: handshakes with its contact and with the ranks that this rank
 * would read from, and plans. An event KVF_EVENT_PEER_READY or KVF_EVENT_FAILED follows.
 *
 * @param deadline_ns  how long to try, from now on; 0: 30 s. Failed attempts are repeated until then
 * @param ticket       receives the number the event will have; may be NULL
 * @return KVF_OK; KVF_E_INVALID (the contact; this agent has no memory registered), KVF_E_RANGE (a port),
 *         KVF_E_PERMISSION (only one of the contact and this agent has a key), KVF_E_CANCELLED (the agent drains),
 *         KVF_E_LIMIT (no more connections), KVF_E_IO, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_connect(kvf_agent *agent, const kvf_contact *contact, uint64_t deadline_ns,
                                     uint64_t *ticket);

/**
 * Says what our engine and one that was met have in common, group by group: first the groups of our model, in order,
 * then those that only theirs has. A request needs only the groups whose steps it names.
 *
 * @param engine  the name in its contact
 * @param i       from 0 on
 * @param match   struct_size is set by the caller; the rest is filled in
 * @return KVF_OK, KVF_E_NOT_FOUND (no engine of this name is met, or there are no more groups), KVF_E_INVALID
 */
KVF_API kvf_status kvf_agent_match(kvf_agent *agent, const char *engine, uint32_t i, kvf_group_match *match);

/* ---- requests ---------------------------------------------------------------------------------------------
 * A request id is any bytes, up to 1024. Each call below makes a ticket: a number that names it in this agent
 * and is never used again. The steps of a group are tokens, entries of several tokens, or states; see
 * kvf_group_step_count(). A producer's state is that after its last token, so a consumer that wants a state wants
 * tokens up to the same end: otherwise its request, or the push, fails with KVF_E_RANGE.
 *
 * Each may return KVF_E_INVALID (an argument; no memory is registered), KVF_E_RANGE (an id of no or too many bytes; in
 * a group more entries than the longest group has tokens for),
 * KVF_E_CANCELLED (the agent drains) and KVF_E_NOMEM; those with an event `after` KVF_E_UNSUPPORTED (no driver for it)
 * and KVF_E_IO (no more descriptors); and those with a contact what kvf_agent_connect() may return. Further errors, and
 * further reasons, are listed with each.
 */

/** The kind of event that marks memory as ready to be read. */
typedef enum kvf_ready_kind {
    KVF_READY_NOW = 0, /**< the memory is ready now */
    KVF_READY_FD = 1,  /**< when a file descriptor becomes readable, and stays so: an eventfd, a pipe */
    KVF_READY_CUDA_EVENT = 2, /**< when an event of a CUDA stream happens, recorded before the call */
} kvf_ready_kind;

/**
 * An event to wait for before blocks are touched, for engines whose device still works on them after the call: writes
 * what is to be read, or reads and writes what the blocks had before. Copied during the call. The descriptor is
 * duplicated, and never read: the caller may close its own at once, and must leave it readable until the request's
 * event. Waiting takes a descriptor. An event of a CUDA stream counts as it was last recorded before the call: the
 * caller may record it again or destroy it at once. One that was recorded while a CUDA graph was captured from its
 * stream is refused (KVF_E_INVALID), and a capture that still goes on is spoilt: record one after the graph is
 * launched. Waiting takes a stream of the device, which the agent polls at least every millisecond. Once the request's
 * event says DONE, all streams see what was read or written for it.
 */
typedef struct kvf_ready_event {
    size_t struct_size; /**< sizeof(kvf_ready_event) */
    kvf_ready_kind kind;
    int fd;             /**< KVF_READY_FD: anything that epoll takes; not a file on a disk */
    void *device_event; /**< KVF_READY_CUDA_EVENT: a cudaEvent_t, which is a CUevent */
    uint32_t device;    /**< KVF_READY_CUDA_EVENT: the number of the event's device */
} kvf_ready_event;

typedef struct kvf_agent_request {
    size_t struct_size; /**< sizeof(kvf_agent_request) */
    kvf_request_id id;  /**< 1 to 1024 bytes, copied */
    /**
     * One for each group of the model, copied with their tables; NULL: see the functions. Pull and expect name the
     * steps that are wanted, hold and push those that are there.
     */
    const kvf_group_steps *groups;
    uint32_t group_count;
    /** pull, expect, push: time until it fails; 0: 120 s. hold: the lease; 0: the agent's */
    uint64_t deadline_ns;
    uint32_t consumers;  /**< hold, push: engines that will take it; 0: 1 */
    kvf_contact contact; /**< pull, expect: the producer. Not used by hold and push */
    /**
     * pull: time until it fails if the producer has not been met or has not lent its blocks, because no agent listens
     * or none holds the request; 0: the deadline. Not used by others.
     */
    uint64_t patience_ns;
    /**
     * pull, push: requests of this agent with a higher number move first. A request of a lower priority starts no new
     * bytes while one of a higher priority is moving and has not used up its cap; what was started before, at most
     * 48 MiB for each rank, still moves. It does not starve: whenever it has waited for 100 ms, it moves 1 MiB.
     * Requests of equal priority share. Not used by others.
     */
    int32_t priority;
    /**
     * pull, push: the most bytes a second that this rank moves for the request, to all its peers together; 0: no cap.
     * Over any second the cap is exceeded by at most 2%, and bytes flow evenly: some move every 10 ms. Heartbeats and
     * the deadline go on meanwhile. Not used by others.
     */
    uint64_t bytes_per_second;
    /**
     * An event to wait for; NULL: none. Until it has happened, no byte of a hold's or a push's blocks is read, and no
     * consumer learns of them; and no byte of a pull's or an expect's blocks is written. A deadline counts from the call,
     * the lease of a hold from the event.
     */
    const kvf_ready_event *after;
    /**
     * pull, expect, push: the way the request moves; KVF_WAY_AUTO: the agent's. Groups that are converted go packed,
     * and fail with KVF_WAY_DIRECT. Packed needs the same groups, layers and parts, and a stage, on both sides, and
     * fails with KVF_E_UNSUPPORTED without. Where KVF_WAY_PACKED is expected, this side alone writes the blocks, so
     * they are free as soon as the request has ended, whatever its writers do. Otherwise the push chooses the way; but
     * one that must go packed fails with KVF_E_UNSUPPORTED where the consumer expects what goes directly: because of
     * KVF_WAY_DIRECT, or of KVF_WAY_AUTO if it reaches the producer directly. With a cap, packed bytes begin slot by
     * slot, and AUTO is direct where peers can be reached directly. Not used by hold.
     */
    kvf_way way;
    /**
     * hold, push: what travels with the cache, under the same lease. Copied. Each consumer rank gets the records of
     * those ranks that it reads from, or is written by, with its DONE, and gets them again if it tries again. Not
     * used by pull and expect.
     */
    const kvf_record *records;
    uint32_t record_count; /**< up to KVF_MAX_RECORDS */
    /**
     * pull, expect: layers are counted as they arrive, for kvf_agent_arrived() and kvf_agent_let_wait(). What is read
     * directly then comes layer by layer, in more and shorter batches. Not used by hold and push.
     */
    bool by_layer;
    /** With `by_layer`: KVF_EVENT_LAYERS says that further layers have arrived. For engines that wait for events. */
    bool layer_events;
} kvf_agent_request;

/**
 * Producer: keeps blocks for consumers to read. They are held until `consumers` engines have released them, or until no
 * request and no heartbeat has come for the length of the lease, or until the limit of `longest_ns`. A consumer whose
 * attempt failed may try again until then.
 *
 * With `after`, consumers wait as they do for a hold that is still to come. The lease begins when the event happens; if
 * the event does not happen within the length of the lease, the hold fails. Cancelling does not wait for the event.
 *
 * Event: DONE (all consumers have the blocks), or FAILED with KVF_E_TIMEOUT (the lease ran out, or a consumer gave up
 * when its own time ran out), KVF_E_CANCELLED (by this engine or by a consumer's) or KVF_E_IO (the other end of the
 * descriptor in `after` was closed before it was written to).
 *
 * @return KVF_OK, KVF_E_EXISTS (the id is held already, or a block is being filled), KVF_E_RANGE (a block
 *         that does not exist, a table that does not reach over the steps, or tables with more than 2^22 entries in
 *         all; a record, see kvferry/record.h, or too many of them), and those of all requests
 */
KVF_API kvf_status kvf_agent_hold(kvf_agent *agent, const kvf_agent_request *request, uint64_t *ticket);

/**
 * Consumer: reads a request that a producer holds (or will hold before the deadline) into blocks of its own. Where all
 * groups are empty (begin == end) nothing is read, and every rank of the producer is told that it may free its blocks.
 *
 * With groups NULL the producer's blocks are only reserved and their lease kept alive, until kvf_agent_pull_into()
 * names the destination; for requests that wait for blocks of their own.
 *
 * Event: DONE (every wanted byte is there), or FAILED with the blocks that must be recomputed. After a failure
 * the request may be pulled again, as long as it is held.
 *
 * @return KVF_OK, KVF_E_EXISTS (a block is in use by another request, and the detail has the ticket of one that fills
 *         it; or this agent is reading the same request of the same engine already), KVF_E_RANGE (a block that does not
 *         exist, or a table that does not reach over the steps), KVF_E_OVERLAP (a block is given twice), and those of
 *         all requests
 */
KVF_API kvf_status kvf_agent_pull(kvf_agent *agent, const kvf_agent_request *request, uint64_t *ticket);

/** Names the destination of a pull that was started without one. Errors as of kvf_agent_pull(); KVF_E_NOT_FOUND when the
 * ticket has ended; KVF_E_EXISTS also when the pull has a destination. */
KVF_API kvf_status kvf_agent_pull_into(kvf_agent *agent, uint64_t ticket, const kvf_group_steps *groups,
                                       uint32_t group_count);

/** The same with an event to wait for, as in kvf_agent_request: until it has happened, no byte is written to the blocks. */
KVF_API kvf_status kvf_agent_pull_into_after(kvf_agent *agent, uint64_t ticket, const kvf_group_steps *groups,
                                             uint32_t group_count, const kvf_ready_event *after);

/** Consumer: lets a producer write a request into blocks of its own. Events and errors as of kvf_agent_pull();
 * KVF_E_EXISTS only because of blocks, KVF_E_RANGE also for tables with more than 2^22 entries in all.
 *
 * After a failure the request may be expected again, into other blocks at once, also while the first blocks are in doubt:
 * a push that goes on writes to both until it hears of the withdrawal. If the push has ended, as it does when its last
 * consumer gives up, the new expectation fails with KVF_E_NOT_FOUND if the producer remembers it (`remember_ns`), and
 * otherwise waits for another push. */
KVF_API kvf_status kvf_agent_expect(kvf_agent *agent, const kvf_agent_request *request, uint64_t *ticket);

/**
 * Producer: begins to write a request to the consumers that expect it. `end` of each group is the request's length in
 * its steps: in tokens, that of the longest group. If all token groups have entries of several tokens, that is the end
 * of the last entry, and states must be there when its last token is. The tables need not have all blocks yet, or any:
 * kvf_agent_push_ready() brings the rest.
 *
 * Event: DONE (all consumers have the request), or FAILED, with the reasons of kvf_agent_hold(), or with that for which
 * a consumer could not be written to, such as KVF_E_RANGE: it wants more than the push has. Then this side's blocks are
 * free, also those that chunks brought. Where consumers want nothing of this rank, DONE may come before anything is
 * ready. With `after`, nothing is written before that event, whatever is ready; the deadline counts from the call.
 *
 * A consumer that gives up, for whatever reason, no longer has to be served; the push goes on for the others and then
 * fails with KVF_E_CANCELLED, and the detail names a rank that gave up. If all of a consumer's ranks were written to
 * before the producer heard of it, the push may be DONE. A rank that expects the request again before the push has
 * ended, and gets it, has not given up.
 *
 * @return KVF_OK, KVF_E_EXISTS (the id is being pushed already, or a block is being filled), KVF_E_RANGE (a block
 *         that does not exist; records, as of kvf_agent_hold()), and those of all requests
 */
KVF_API kvf_status kvf_agent_push(kvf_agent *agent, const kvf_agent_request *request, uint64_t *ticket);

/** How much of a push is ready. Copied during the call. */
typedef struct kvf_push_chunk {
    size_t struct_size;  /**< sizeof(kvf_push_chunk) */
    uint64_t begin, end; /**< tokens; an `end` beyond the push's, such as UINT64_MAX, means the push's */
    uint32_t layers;     /**< how many model layers are ready for these tokens; more than there are: all */
    /**
     * Blocks that the push does not have yet, one table for each group of the model; NULL: none. A table's
     * `first_block` says where in the sequence its blocks are. They need not follow those given before, but at most
     * 2^22 blocks may be missing between. Known entries may be repeated unchanged. Blocks behind that of the push's
     * end, as of tokens still to be computed, are ignored.
     */
    const kvf_block_table *tables;
    uint32_t table_count;
    const kvf_ready_event *after; /**< the chunk is ready when this has happened; NULL: now */
    /** Further records of the push, as in kvf_agent_request, which arrive when all is written. Copied. */
    const kvf_record *records;
    uint32_t record_count;
} kvf_push_chunk;

/**
 * Says how much of a push is ready: all layers before token `begin`, and the model layers [0, layers) for the
 * tokens [begin, end). An entry of several tokens is ready with the last of them. State groups are written with the
 * last chunk, which must bring their blocks. Chunks come in order; within a chunk `layers` only grows; a new chunk may
 * begin when the one before had all layers. A chunk with `after` waits for its event, and later chunks wait with it.
 * Once everything is ready, a chunk behind the push's end, as of last tokens that complete no entry, adds nothing; it
 * may have no records.
 *
 * The call claims the blocks of a chunk; they are free with the event of the push. After an error nothing has changed.
 *
 * @param chunk  NULL says, at any time, that everything is ready and all blocks have been given
 * @return KVF_OK; KVF_E_NOT_FOUND (the ticket has ended: its event says how); KVF_E_RANGE (out of order; a block
 *         that does not exist; tables that, with those given before, do not cover the chunk: the detail names group and
 *         blocks; records that, with those given before, are too many); KVF_E_EXISTS (a block is being filled by
 *         another request); KVF_E_INVALID (an entry repeated with another block); KVF_E_UNSUPPORTED (a kind of event);
 *         KVF_E_IO; KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_push_ready(kvf_agent *agent, uint64_t ticket, const kvf_push_chunk *chunk);

/**
 * Stops a request at any point. Its event still comes: FAILED with KVF_E_CANCELLED, or DONE if it was done; its blocks
 * are not free before the event that says so. The event of a hold waits for its readers until their next heartbeat, but
 * at most for the length of a lease, even if they go on reading.
 *
 * @return KVF_OK, KVF_E_NOT_FOUND (the ticket has ended)
 */
KVF_API kvf_status kvf_agent_cancel(kvf_agent *agent, uint64_t ticket);

/* ---- layer by layer ---------------------------------------------------------------------------------------
 * A consumer may begin with the first layers of a request while others still arrive. A model layer has arrived when
 * all that the request brings to this rank's blocks of that layer is there: of all groups, their states too, from all
 * ranks that it comes from. A layer of which nothing comes has arrived.
 *
 *   kvf_agent_pull(agent, &(kvf_agent_request){.by_layer = true, ...}, &ticket);
 *   for (uint32_t layer = 0; layer < layers; layer++) {
 *       kvf_agent_let_wait(agent, ticket, layer + 1, device, stream);      // returns at once
 *       ...                                                                // puts the layer's kernels on the stream
 *   }
 *
 * What can be told, and when:
 *
 *   pull     by any way: a layer at a time. Layers that lie together in the pages of both sides, and are read directly,
 *            arrive together
 *   expect   packed: a layer at a time, as the producer writes them. Where a producer writes directly, only it knows
 *            what it has written: nothing has arrived before it reports the end
 *   either   with `verify`, nothing has arrived before all is verified
 *
 * The agent must make progress meanwhile: on a thread of its own, or on one that does not wait for the stream.
 */

/**
 * How many model layers of a pull or an expect have arrived: the layers [0, *layers) may be used. The number never
 * falls. A request that fails later has still brought them; its event says what to do with its blocks.
 *
 * @return KVF_OK; KVF_E_NOT_FOUND (the request has ended: see its event); KVF_E_INVALID (it is no pull or expect with
 *         `by_layer`; a NULL)
 *
 * Thread safety: any thread; does not wait.
 */
KVF_API kvf_status kvf_agent_arrived(kvf_agent *agent, uint64_t ticket, uint32_t *layers);

/**
 * Lets a stream of a CUDA device wait, without the host, until the first `layers` model layers of a pull or an expect
 * have arrived, or the request has ended, also by a failure. What is put on the stream afterwards then sees the bytes.
 * A stream passes when a request fails, so that it does not hang: what was computed counts only if the request's event
 * says DONE, or if kvf_agent_arrived() has said so before.
 *
 * The stream waits for a word in the host's memory, which CUDA does not know as a dependency. So the stream should have
 * a higher priority than the lowest, which kvferry's streams have: streams of the same priority share a few queues of
 * the driver, and a copy of the request behind the waiting stream in its queue would not begin, until the request has
 * failed by its deadline. Priorities do not count for copies between host and device: put none behind the wait, or give
 * the process more queues (CUDA_DEVICE_MAX_CONNECTIONS=32, before the driver starts). Until the stream has passed, a
 * thread that has to make progress for the request must not wait for the stream, nor make a CUDA call that waits for
 * the whole device. And no thread of the process should make one that keeps a lock of the driver while it waits, such
 * as cudaFree(), or a copy behind the wait to memory of the host that is not pinned: the agent would wait for the lock,
 * with all its requests. A second after the request's deadline its streams are let go without the agent, which ends
 * that; the request then fails with KVF_E_TIMEOUT, also if its bytes have come by then (docs/devices.md).
 *
 * @param layers  more than the model has: until the request has ended
 * @param device  the number of the stream's device
 * @param stream  a cudaStream_t, which is a CUstream; NULL: the device's default stream
 * @return KVF_OK, also if there is nothing to wait for any more: then nothing is put on the stream; KVF_E_NOT_FOUND
 *         (there never was such a ticket); KVF_E_INVALID (the request is no pull or expect with `by_layer`; a CUDA graph
 *         is being captured from the stream: let it wait before the graph is launched); KVF_E_UNSUPPORTED (no driver,
 *         or a device whose streams cannot wait for words); KVF_E_RANGE (no such device); KVF_E_IO (also: the thread
 *         that lets late streams go cannot be started); KVF_E_NOMEM
 *
 * Thread safety: any thread. It waits only for room on the stream, of which a driver has about 1000 places, and holds up
 * nobody meanwhile; so not on the thread that makes progress, if it puts that much on a stream.
 */
KVF_API kvf_status kvf_agent_let_wait(kvf_agent *agent, uint64_t ticket, uint32_t layers, uint32_t device,
                                      void *stream);

/**
 * Drains the agent, for an engine that is to end or to be taken out of service: nothing new is accepted, and what is
 * under way ends, or is cancelled when the time is over. From this call on
 *
 * - hold, pull, expect, push and connect fail with KVF_E_CANCELLED;
 * - what is held can still be read, also by consumers that come only now; a push still takes chunks, and is written to
 *   all its consumers;
 * - peers that ask for a request that is neither held nor pushed here, or already wait for one, are refused with
 *   KVF_E_NOT_FOUND, and need not wait until their deadline.
 *
 * KVF_EVENT_DRAINED follows, once, after the last event of every request, when the peers know of all ends. Then the
 * agent can be closed, and no peer loses anything by it. A request that has not ended when the time is over is
 * cancelled as by kvf_agent_cancel(), and has its own events; the event then follows when all blocks are free. A second
 * call sets the time anew. kvf_agent_resume() takes the drain back.
 *
 * @param deadline_ns  how long requests may take to end, from now on; 0: they are cancelled at once; UINT64_MAX: no
 *                     limit
 * @return KVF_OK, also where the agent has drained already; KVF_E_INVALID (a directory: it has no requests),
 *         KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_drain(kvf_agent *agent, uint64_t deadline_ns);

/**
 * Takes a drain back, whether it is under way or has ended: from this call on the agent accepts new requests, of its
 * engine and of peers. Requests under way go on without the drain's deadline. What was refused or cancelled meanwhile
 * stays so: it must be asked for again.
 *
 * Every drain has its one KVF_EVENT_DRAINED. If the engine has not taken it before this call, its status becomes
 * KVF_E_CANCELLED. So an event of another status that is taken after this call is that of a later drain.
 *
 * @return KVF_OK, also where the agent does not drain, and nothing changes; KVF_E_INVALID (a directory: it has no
 *         requests)
 */
KVF_API kvf_status kvf_agent_resume(kvf_agent *agent);

/* ---- events ---------------------------------------------------------------------------------- */

typedef enum kvf_event_kind {
    KVF_EVENT_DONE = 1,
    KVF_EVENT_FAILED = 2,
    KVF_EVENT_BLOCKS_FREE = 3, /**< of a request that failed earlier with blocks in doubt */
    KVF_EVENT_PEER_READY = 4,  /**< kvf_agent_connect() has succeeded */
    /** A peer died or was replaced; its requests fail with events of their own. Of consumers at most 64 in a minute;
     * further ones are counted. */
    KVF_EVENT_PEER_LOST = 5,
    /** A peer that said it is that rank of that engine was refused. Reported once in ten minutes for each rank and
     * reason, however often it happens. Nothing else has changed. */
    KVF_EVENT_PEER_REFUSED = 6,
    /** After kvf_agent_drain(): nothing is under way any more. `status` is KVF_E_TIMEOUT where requests were cancelled,
     * and `detail` says how many; KVF_E_CANCELLED where kvf_agent_resume() came first: the agent serves again. */
    KVF_EVENT_DRAINED = 7,
    /** An operator's program asks the engine for something: see kvf_command, and kvf_agent_reply(). Comes only where
     * the agent's options or grants allow commands. */
    KVF_EVENT_COMMAND = 8,
    /** Of a request with `layer_events`: `layers` model layers have arrived, from the first on, as kvf_agent_arrived()
     * counts them. While one of a request waits to be taken, further layers change its number, so at most one waits. It
     * comes before the event that ends the request, which need not have one: what arrives last is told with that. */
    KVF_EVENT_LAYERS = 9,
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

#define KVF_MAX_VERB 64u /**< bytes of a command's verb */

/* Verbs that have a meaning here; engines may agree on others. */

/** To take nothing new, and to reply when all that is under way has ended: see kvf_agent_drain(). No request. */
#define KVF_COMMAND_DRAIN "drain"
/** To take new requests again, after a drain or in the middle of one: see kvf_agent_resume(). No request. */
#define KVF_COMMAND_RESUME "resume"
/** To say what it keeps for other engines under names that begin with `request`, or under all. Each rank replies with a
 * record "kept": an object of JSON with "count", the number of such requests, and "kept", those that were made first, as
 * many as fit. Each is an object with "request" and what kvf_kept_request says: "tokens", "consumers", "served", "moves",
 * "age_s", and "left_s" unless there is no limit. */
#define KVF_COMMAND_LIST "list"
/** To hold a request, or whatever the engine keeps under that name, for the engine `peer`, or for whichever engine
 * takes it over if there is no peer; the reply says that it is held, and its records are what that engine needs to know
 * beyond the request's id. */
#define KVF_COMMAND_HAND_OVER "hand over"
/** To pull that request from the engine `peer`, which holds it; `records` are those of its reply. The reply says that
 * everything is there. */
#define KVF_COMMAND_TAKE_OVER "take over"

/**
 * A command: what an operator's program asks of an engine. The agent does nothing about it but hand it on: what a verb
 * means, and what a request or a prefix is called, is the engine's own affair.
 */
typedef struct kvf_command {
    size_t struct_size;     /**< sizeof(kvf_command) */
    const char *verb;       /**< 1 to 64 bytes without control characters */
    kvf_request_id request; /**< what it is about: up to 1024 bytes; size 0: nothing */
    /** Another engine that it is about; `endpoint` NULL: none. `engine` NULL: whichever answers there */
    kvf_contact peer;
    uint64_t deadline_ns; /**< how long the engine may take, from when the agent got it */
    const kvf_record *records;
    uint32_t record_count;
    uint64_t number; /**< in events: for kvf_agent_reply(). Not used by kvf_ask() */
    const char
        *asker; /**< in events: the public key of the asker, Z85; "" without keys. Not used by kvf_ask() */
} kvf_command;

/**
 * What happened. Pointers are valid until the next call of kvf_agent_next_event() by any thread, also if there is no
 * event then. So threads that share this work need a lock of their own, from the call until they have read the event.
 *
 * No event of a request is left out for want of memory, but it may then have its ticket only: no `id`, `engine` or
 * `invalid`, and no `recompute`.
 */
typedef struct kvf_event {
    size_t struct_size; /**< sizeof(kvf_event), set by the caller */
    kvf_event_kind kind;
    kvf_request_kind request_kind;
    uint64_t ticket; /**< 0: the event is about no request */
    kvf_request_id id;
    kvf_status status;  /**< KVF_OK unless FAILED, or DRAINED late or never */
    const char *detail; /**< a sentence; "" when there is nothing to say */
    const char *engine; /**< the peer's; "" when the event is about no peer */
    uint32_t rank;      /**< the peer's; UINT32_MAX: all of the engine's, or none */
    bool blocks_free;   /**< the request's blocks belong to the engine again */
    /** FAILED, by policy: recompute `invalid` instead of failing the request. It matters for pulls and expects: a producer
     * has its blocks */
    bool recompute;
    /** FAILED pulls and expects: blocks without valid content, for each group */
    const kvf_block_list *invalid;
    uint32_t group_count;
    uint64_t bytes, runs;  /**< moved */
    uint64_t bytes_packed; /**< pull, push: those of `bytes` that went packed */
    /** DONE pulls and expects: what came with the cache, rank by rank, in the order in which each rank gave it. */
    const kvf_record *records;
    uint32_t record_count;
    const kvf_command *command; /**< COMMAND; otherwise NULL */
    uint32_t layers;            /**< LAYERS; otherwise 0 */
} kvf_event;

/**
 * Takes the next event.
 *
 * @param out  struct_size is set by the caller; the rest is filled in
 * @return KVF_OK, KVF_E_EMPTY (there is none), KVF_E_INVALID
 */
KVF_API kvf_status kvf_agent_next_event(kvf_agent *agent, kvf_event *out);

/**
 * Replies to a command, whose asker waits. Five seconds after a command's deadline the agent replies itself, with
 * KVF_E_TIMEOUT.
 *
 * @param number   of the command
 * @param status   KVF_OK: done as asked; otherwise why not. KVF_E_AGAIN and KVF_E_LIMIT are no replies
 * @param detail   a sentence for the asker, cut after 1023 bytes; NULL: none
 * @param records  what the asker passes on, as with KVF_COMMAND_HAND_OVER; copied; NULL: none
 * @return KVF_OK; KVF_E_NOT_FOUND (no such command, or it has been replied to); KVF_E_INVALID (such a status);
 *         KVF_E_RANGE (no status; a record, see kvferry/record.h, or too many of them); KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_reply(kvf_agent *agent, uint64_t number, kvf_status status, const char *detail,
                                   const kvf_record *records, uint32_t record_count);

/**
 * A file descriptor that polls readable while there are events to take; without `own_thread` also while
 * kvf_agent_progress() has something to do: a message came, an operation ended, or a timer expired. It stays the same
 * while the agent is open. Poll it or give it to epoll; do not read from it.
 */
KVF_API int kvf_agent_event_fd(kvf_agent *agent);

/**
 * In how many nanoseconds at the latest kvf_agent_progress() must be called again, even if nothing arrives: 0 when
 * there is something to do now; UINT64_MAX when no timer runs, and with `own_thread`. For loops that do not wait for
 * kvf_agent_event_fd(), which becomes readable at that time.
 */
KVF_API uint64_t kvf_agent_timeout(kvf_agent *agent);

/**
 * Does what can be done now without waiting. Not needed with `own_thread`, but allowed.
 *
 * @param busy  receives whether there is more to do at once; may be NULL
 */
KVF_API kvf_status kvf_agent_progress(kvf_agent *agent, bool *busy);

/**
 * Makes progress until there is an event or the time is over. Several threads may wait at once: an event wakes all of
 * them, and one of them can take it.
 *
 * @param timeout_ns  UINT64_MAX: wait forever
 * @return KVF_OK, KVF_E_TIMEOUT, KVF_E_CANCELLED (another thread is closing the agent, which must not be used
 *         any more)
 */
KVF_API kvf_status kvf_agent_wait(kvf_agent *agent, uint64_t timeout_ns);

/* ---- descriptions, states, figures and traces ------------------------------------------------ */

/**
 * Says in words how this agent stands with an engine: where it was met, both shapes, which of its ranks are read for
 * what, by which transport, and how long a request should take; and, as a producer, which of its ranks have sessions
 * here. The log says the same at the first meeting.
 *
 * @param engine      the engine's name; NULL: this agent itself, and every engine it knows
 * @param level       KVF_LOG_INFO: a summary, in which ranks that are alike share lines; KVF_LOG_DEBUG: the summary,
 *                    then every rank and every piece
 * @param text        receives lines, each ended by a newline, cut to fit and ended by a zero byte; may
 *                    be NULL where text_bytes is 0
 * @param length      receives the bytes of the whole text without the zero byte, as of snprintf(); may
 *                    be NULL
 * @return KVF_OK, also for a text that was cut; KVF_E_NOT_FOUND (an engine that is not known, or no longer),
 *         KVF_E_INVALID, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_explain(kvf_agent *agent, const char *engine, kvf_log_level level, char *text,
                                     size_t text_bytes, size_t *length);

/** The role of a peer towards this agent. */
typedef enum kvf_peer_role {
    KVF_PEER_PRODUCER = 1, /**< this rank takes blocks from the peer */
    KVF_PEER_CONSUMER = 2, /**< the peer takes blocks from this rank */
} kvf_peer_role;

typedef enum kvf_peer_state {
    KVF_PEER_GREETING = 1, /**< we have greeted it, and it has not answered yet */
    KVF_PEER_OPEN = 2,
    KVF_PEER_BROKEN = 3, /**< the connection to it broke, and may come back */
    KVF_PEER_LOST = 4,   /**< it is gone; the latest lost peers are remembered until they come back */
} kvf_peer_state;

/** One rank of another engine, as an agent knows it. Texts are cut to fit; times are since 1970, UTC. */
typedef struct kvf_agent_peer {
    size_t struct_size; /**< sizeof(kvf_agent_peer) */
    kvf_peer_role role;
    kvf_peer_state state;
    uint32_t rank, rank_count;
    char engine[256];
    char fabric[32]; /**< the transport that serves it, as "shm"; "" before anything moved */
    char way[128]; /**< how the transport reaches the peer's memory, as "mapped memory"; "" where not known */
    char passed_over[256];   /**< better transports that both sides have and cannot use, and why; "": none */
    uint64_t bytes_read;     /**< by us from it; what it reads from us, it counts itself */
    uint64_t bytes_written;  /**< by us to it */
    uint64_t bytes_received; /**< by us from its writes, as it says */
    uint64_t round_trip_ns;  /**< of the message by which its clock is known; 0: not measured */
    uint64_t since_ns;       /**< when it was met; LOST: when it was lost */
    uint64_t failed_ns;      /**< time of the last failure; 0: none */
    char failure[512];       /**< the last failure; "": none */
    uint64_t bytes_packed;   /**< those of bytes_read and bytes_written that went packed */
} kvf_agent_peer;

/**
 * Lists the peers: first those with a session, then those that were lost lately.
 *
 * @param peers     an array of `capacity` elements; the first one's struct_size is set by the caller and is the size
 *                  of each. NULL where capacity is 0
 * @param count     receives how many peers there are, which may be more than fit
 * @return KVF_OK, also where not all fit; KVF_E_INVALID
 */
KVF_API kvf_status kvf_agent_peers(kvf_agent *agent, kvf_agent_peer *peers, uint32_t capacity,
                                   uint32_t *count);

/** A request that an agent keeps for other engines: a hold or a push that has not ended. */
typedef struct kvf_kept_request {
    size_t struct_size; /**< sizeof(kvf_kept_request) */
    uint64_t ticket;
    kvf_request_kind request_kind; /**< KVF_REQUEST_HOLD or KVF_REQUEST_PUSH */
    bool moves;                    /**< a consumer has a lease on it, or it is being written to one */
    uint32_t consumers;            /**< engines that will take it */
    uint32_t served;               /**< those of them that have it, or have given it up */
    uint64_t tokens;               /**< that are there, or that the push will have; of the group with most */
    uint64_t age_ns;               /**< since the call that made it */
    /** Time until it fails: unless a consumer gives a sign of life, if it is a hold. UINT64_MAX: no limit */
    uint64_t left_ns;
    uint32_t id_bytes;
    char id[1024]; /**< its id, without a zero byte at its end */
} kvf_kept_request;

/**
 * Lists the requests that the agent keeps for other engines, by rising tickets.
 *
 * @param after     only requests with higher tickets are listed and counted; 0: all. The last ticket of a list that did
 *                  not have room for all begins the next one
 * @param kept      an array of `capacity` elements; the first one's struct_size is set by the caller and is the size of
 *                  each. NULL where capacity is 0
 * @param count     receives how many there are, which may be more than fit
 * @return KVF_OK, also where not all fit; KVF_E_INVALID
 */
KVF_API kvf_status kvf_agent_kept_requests(kvf_agent *agent, uint64_t after, kvf_kept_request *kept,
                                           uint32_t capacity, uint32_t *count);

typedef enum kvf_block_state {
    KVF_BLOCK_FREE = 0,    /**< the agent has no claim on it */
    KVF_BLOCK_HELD = 1,    /**< promised to readers, none is known to be reading */
    KVF_BLOCK_LEASED = 2,  /**< a reader has a lease on it */
    KVF_BLOCK_FILLING = 3, /**< being read into or written by peers */
    KVF_BLOCK_IN_DOUBT = 4,
} kvf_block_state;

/** The state of a block, and how many requests use it (`requests` may be NULL). KVF_E_RANGE: no such block.
 */
KVF_API kvf_status kvf_agent_block(kvf_agent *agent, uint32_t group, uint32_t block, kvf_block_state *state,
                                   uint32_t *requests);

#define KVF_HISTOGRAM_BUCKETS 48

/**
 * Durations in nanoseconds: bucket i counts those in [2^i, 2^(i+1)); bucket 0 also counts 0. This struct stays as it
 * is.
 */
typedef struct kvf_histogram {
    uint64_t count, sum_ns, min_ns, max_ns;
    uint64_t buckets[KVF_HISTOGRAM_BUCKETS];
} kvf_histogram;

/** The duration that the share `quantile` (0 to 1) of all counted ones does not exceed, accurate to a bucket. */
KVF_API uint64_t kvf_histogram_quantile(const kvf_histogram *histogram, double quantile);

/** Counted since the agent was opened, except the fields named "now". */
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
    /** Lost: peers that this rank reads from or writes to. One that only reads from here and has ended is evicted, as an
     * idle one is, when nothing is under way for it any more; see `leases_expired`. */
    uint64_t peers_refused, peers_evicted, peers_lost, peers_replaced;
    uint64_t checksums_wrong;
    uint64_t peers_now;                       /**< sessions, in both directions */
    uint64_t requests_now[KVF_REQUEST_KINDS]; /**< by kvf_request_kind */
    uint64_t leases_now;                      /**< granted to readers */
    uint64_t blocks_held_now, blocks_filling_now, blocks_in_doubt_now;
    uint64_t memory_now_bytes; /**< kept for peers: sessions, shards, plans, leases */
    kvf_histogram transfer;    /**< from the first run posted to the last byte arrived */
    kvf_histogram post;        /**< posting runs */
    kvf_histogram queue;       /**< from the request to the first run posted */
    kvf_histogram total;       /**< from the request to its DONE: pulls and expects */
    /** Dropped: messages of a session that are not from its peer, and answers to a greeting that came by a connection
     * made to us */
    uint64_t messages_foreign;
    uint64_t over_budget;        /**< requests of peers that were refused because a budget was used up */
    uint64_t connections_now;    /**< connections that peers made to this agent */
    uint64_t connections_closed; /**< by this agent: without a session, and silent or for lack of room */
    uint64_t bytes_packed;       /**< those of bytes_read and bytes_written that went packed */
    uint64_t flows_refused;      /**< flows and messages about flows that a peer was not allowed to send */
    /** Plans made and kept: for reading, one for all engines with the same facts and shards; for writing, one for all
     * ranks of other engines with the same shard and for each range of layers that was written. */
    uint64_t plans_built, plans_now;
} kvf_agent_stats;

/**
 * Reads the statistics.
 *
 * @param stats  struct_size is set by the caller; the rest is filled in
 * @return KVF_OK, KVF_E_INVALID
 */
KVF_API kvf_status kvf_agent_get_stats(kvf_agent *agent, kvf_agent_stats *stats);

/**
 * The statistics as text that Prometheus reads (its exposition format, version 0.0.4), for the engine's own page of
 * metrics: counters, gauges and histograms named `kvferry_...`, times in seconds, with the labels `engine` and `rank`
 * of this agent. An engine that joins the texts of several agents must keep the lines that begin with `#` only once.
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
 * What happens with one rank of a peer is an instant event: "granted" and "released" (a lease, on both sides),
 * "expired", "expected" and "written" (a push, on both sides), "posted" (the first bytes for it). It names the peer,
 * the peer's clock minus ours by the shortest round trip, and the error bound of that. `python -m kvferry.trace` joins
 * the traces of several agents by these and by the ids of requests. A producer cannot see single reads of its memory:
 * they lie between its "granted" and "released".
 *
 * Times are in microseconds since the agent was opened; "otherData" gives that moment on its clock and since 1970.
 *
 * @param text    receives the text, cut to fit and ended by a zero byte; may be NULL where text_bytes is 0
 * @param length  receives the bytes of the whole text without the zero byte, as of snprintf(); may be NULL
 * @return KVF_OK, also for a text that was cut; KVF_E_INVALID (no requests are traced), KVF_E_NOMEM
 */
KVF_API kvf_status kvf_agent_trace(kvf_agent *agent, char *text, size_t text_bytes, size_t *length);

/**
 * A peer's clock minus ours, in nanoseconds, by the best comparison so far, and the most by which this may be wrong now:
 * half of a round trip, and as clocks drift, half a millisecond for each second since.
 *
 * @return KVF_OK, or KVF_E_NOT_FOUND when there is no session with that rank
 */
KVF_API kvf_status kvf_agent_clock_offset(kvf_agent *agent, const char *engine, uint32_t rank,
                                          int64_t *offset_ns, uint64_t *error_ns);

#ifdef __cplusplus
}
#endif

#endif
