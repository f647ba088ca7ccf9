/*
 * Moving runs between processes.
 *
 * A transport is one endpoint of a rank: it registers the rank's memory regions (in the order of its shard's
 * regions), exports a *card* (address and memory keys, a few bytes for each region), and connects to peers by
 * their cards. Reads and writes name memory by region and offset; every run is checked against the registered sizes of
 * both sides before a byte moves, so no peer can make us touch other memory.
 *
 * These are the kinds, best first. "auto" takes for each peer the first kind that reaches it, and does not use a "ucx"
 * that finds no RDMA (see the setting "ucx.emulated"), nor "libfabric" on a machine without network cards of EFA or
 * Slingshot: other machines are then reached by "messages".
 * kvf_transport_describe() tells which kinds a build has, what they can do and what they are assumed to cost.
 *
 *   "inproc"  the peer is in this process: plain copies
 *   "cuda"    the peer is on this host, and both sides' memory is of CUDA devices: the reader's kernels copy from
 *             memory of the owner that it has mapped. The owner of written memory itself reads what is written, when
 *             it makes progress: only its own kernels write its memory, because a peer that is stopped in the middle
 *             of a kernel could not be shut out. Memory must be from cuMemAlloc() or a similar function; regions may
 *             begin anywhere in an allocation; see docs/devices.md
 *   "shm"     the peer is on this host: memory from kvf_transport_allocate() is mapped and copied from
 *             directly; memory the caller brought is read with process_vm_readv and, meanwhile, through a
 *             shared buffer that the peer fills when it has time. With a stage (stage.h) such memory goes packed where
 *             that is predicted to be faster
 *   "libfabric"  one-sided operations of libfabric by a network card of EFA (AWS) or Slingshot, or emulated over TCP;
 *             CUDA memory where the provider takes it. The machine's libfabric, from version 1.17 on, is loaded when
 *             the first endpoint that may use it is opened. Peers need the same provider. An endpoint uses one network
 *             interface. Over TCP, and by cards of EFA that lack RDMA reads or writes or whose libfabric does not tell,
 *             an agent with a stage gives peers a key to its arena only, so that everything goes packed. Tested over
 *             TCP, on no such card yet
 *   "ucx"     UCX one-sided operations: shared memory, TCP, RDMA, CUDA, as UCX finds them. The machine's UCX, from
 *             version 1.13 on, is loaded when the first endpoint that may use it is opened; kvferry is not linked
 *             against it. kvf_transport_find() says what was found. Peers need the same version (1.22 and all later
 *             versions count as one); other versions are refused, and the detail names them
 *   "messages"  messages of ZeroMQ over TCP, encrypted where there are keys: the owner of the memory gathers and
 *             scatters while it makes progress
 *
 * A transport and its peers may be used by one thread at a time; different transports are independent. All
 * callbacks run inside the transport functions, on the thread that calls them; a callback may call any function of the
 * transport except kvf_transport_progress() and kvf_transport_close().
 *
 * After fork(), only the process that opened a transport may use it: in a child every function of a transport or of its
 * peers that returns a status returns KVF_E_INVALID, and those that close or free do nothing.
 */
#ifndef KVFERRY_TRANSPORT_H
#define KVFERRY_TRANSPORT_H

#include <stdbool.h>

#include <kvferry/memory.h>
#include <kvferry/plan.h>
#include <kvferry/request.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_transport kvf_transport;
typedef struct kvf_peer kvf_peer;

/**
 * A setting of one kind of transport, such as {"ucx.tls", "tcp,self"}; the kind stands before the dot. Settings of
 * kinds that are not opened, or not in this build, are ignored. This struct stays as it is.
 *
 *   "shm.direct"  how memory that the caller brought is reached: "auto" (default): read by this side with
 *                 process_vm_readv and at the same time through a shared buffer that its owner fills, unless this
 *                 side alone is faster, and written with process_vm_writev, where the kernel allows it; "on":
 *                 never through the buffer where the kernel allows it; "off": always through the buffer
 *   "cuda.patience_ms"  how long a copy may take, 30000 by default. While one takes longer, others to the same peer
 *                 fail. kvf_transport_close() waits as long for kernels, and for readers in other processes of memory
 *                 that the transport has allocated
 *   "cuda.allocation"  how kvf_transport_allocate() gets CUDA memory: "plain" (default): by cuMemAlloc(), shared with
 *                 peers by CUDA IPC; "exportable": by cuMemCreate(), in multiples of what the driver asks for (2 MiB
 *                 on current devices), shared by file descriptors, which the caller can export, too
 *   "cuda.blocks"  the most blocks of threads, and so multiprocessors, that a copy takes: 1 to 1024, 32 by default,
 *                 and never more than the device has. A copy takes at most 16 of them while no other waits in front of
 *                 it. This side copies what it reads, and what peers write to it. Copies to and from a stage's arenas
 *                 have numbers of their own
 *   "libfabric.provider"  the provider, such as "efa", "cxi", "tcp" or, in libfabric 1.17, "net" (TCP); default: the
 *                 first of these that is there, and with "auto" only efa and cxi. If it is set, "auto" uses libfabric
 *                 on any machine
 *   "libfabric.domain"    the network interface, as the provider calls it, such as "rdmap0s6-rdm" or "eth0"; default:
 *                 the provider's first
 *   "libfabric.library"   the libfabric to load: files, separated by ':'; the first usable one is loaded. The system's
 *                 loader finds a name without a slash. Default: "libfabric.so.1"
 *   "libfabric.poll_us"   how often an endpoint looks for events, in microseconds, up to 1000000; ten times more
 *                 seldom while it has nothing under way. Default: 0, never, where the provider has a descriptor that
 *                 shows them; 100 elsewhere
 *   "ucx.tls"     value for UCX_TLS; default: that of the environment or of UCX's files, else "^cuda_ipc". With
 *                 cuda_ipc, a peer on this host that reads or writes memory of a device keeps it open until its process
 *                 ends, also after kvf_peer_close(), and for the driver, freeing such memory is undefined behaviour. So
 *                 who lets UCX use it, as by "all" or "cuda", must not free such memory before these processes have
 *                 ended
 *   "ucx.library" the UCX to load: files of libucp, separated by ':'; the first usable one is loaded. The system's
 *                 loader finds a name without a slash. Default: "libucp.so.0". A process may use several, unless
 *                 their files have the same names
 *   "ucx.devices" value for UCX_NET_DEVICES, such as "eth0" or "mlx5_0:1"; default: that of the environment. For hosts
 *                 with interfaces that peers cannot reach, such as bridges for containers
 *   "ucx.late_ms", "libfabric.late_ms"  for how long what a peer has sent may still arrive, in milliseconds, up to an hour
 *                 [60000]. These kinds cannot shut a peer out, so when one falls silent while it writes, an agent keeps
 *                 its blocks, and a stage its slots, for so long after the peer has stopped by its own clock. Over TCP
 *                 the sockets have it as their TCP_USER_TIMEOUT: a peer that acknowledges nothing for so long, or lives
 *                 and takes nothing, is lost, and what was on its way with it. RDMA's own repetitions must end earlier.
 *                 All peers must have the same value
 *   "ucx.emulated" whether to trust a UCX that finds no RDMA, and would emulate one-sided operations, with all
 *                 memory. Such a UCX lets peers access any address of the process, and operations on their way
 *                 cannot be kept out. "off" (default): "auto" does not use it for memory of the host, because messages
 *                 are as fast or faster, but uses it for CUDA memory if it supports that, except for an agent with a
 *                 stage; and an agent with a stage that names "ucx" gives peers a key to its arenas only, so that
 *                 everything goes packed. "on": "auto" prefers it to messages; all memory is registered
 *   "messages.listen"      tcp://ADDRESS:PORT, where either may be *, and ADDRESS may be an interface's name; default:
 *                          all interfaces, and any free port. An agent's listens where the agent does
 *   "messages.advertise"   the host names or addresses, separated by commas, under which peers find it; default:
 *                          those it listens on. For an agent: those of the agent
 *   "messages.secret_key"  Z85 CurveZMQ key: encrypts, and refuses peers without keys. For an agent: the agent's own
 *   "messages.max_connections"  connections to it at once [16384], but never more than half of the descriptors that the
 *                          process may have. For an agent: the agent's own, but never more than a quarter. Beyond
 *                          that it closes connections that have not shown its card, the one that was silent for
 *                          longest first; such connections are closed after 15 s in any case. Counted in
 *                          kvf_transport_info
 *   "messages.max_connections_per_address"  of these, from one network address [three quarters]
 *   "messages.max_strangers"  of these, without having shown its card [half]
 *   "messages.max_connections_per_second"  that it lets in, and as many at once [1000; 250 with keys, and while it
 *                          serves others]. For an agent: the agent's own. Peers beyond that try again
 *   "messages.patience_ms"  how long it tries to connect to a peer whose hosts do not answer, or end the connection
 *                          before they have let it in, [60000]; a try takes 1.5 s for each host. For an agent: its
 *                          `longest_ns`, so that requests wait up to their deadlines
 */
typedef struct kvf_setting {
    const char *key;
    const char *value;
} kvf_setting;

typedef struct kvf_transport_options {
    size_t struct_size;     /**< sizeof(kvf_transport_options) */
    const char *name;       /**< for messages and for peers' logs; NULL: made from the process id */
    uint32_t max_in_flight; /**< operations posted at once for each peer; 0: the kind's default */
    uint32_t setting_count; /**< of `settings` */
    const kvf_setting
        *settings; /**< read while opening; NULL: none. Of several with one key, the last counts */

    /** A peer sent a notification. `sender` is the name that its endpoint was opened with, neither verified nor unique.
     * `sender` and `data` are valid during the call. */
    void (*on_notify)(void *context, kvf_transport *transport, const char *sender, const void *data,
                      size_t bytes);
    /** A peer is gone, and `detail` says why; its operations have failed with KVF_E_PEER_LOST before this call.
     * `detail` is valid during the call. The peer may be closed at any time. */
    void (*on_peer_lost)(void *context, kvf_transport *transport, kvf_peer *peer, const char *detail);
    void *context;
} kvf_transport_options;

/**
 * Opens an endpoint.
 *
 * @param kind  "auto" (or NULL), or one of the kinds above, which is then the only one
 * @return KVF_OK, KVF_E_NOT_FOUND (no such kind or setting), KVF_E_UNSUPPORTED (not in this build),
 *         KVF_E_INVALID (options, or the value of a setting), KVF_E_IO, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_transport_open(const char *kind, const kvf_transport_options *options,
                                      kvf_transport **out);

typedef enum kvf_direction {
    KVF_READ = 0,  /**< remote to local */
    KVF_WRITE = 1, /**< local to remote */
} kvf_direction;

/** How far away a peer may be. */
typedef enum kvf_reach {
    KVF_REACH_PROCESS = 0,
    KVF_REACH_HOST = 1,
    KVF_REACH_NETWORK = 2,
} kvf_reach;

/** What a kind of transport can do, and what it is assumed to cost. Sets have the bit 1 << value for each member. */
typedef struct kvf_transport_kind {
    size_t struct_size; /**< sizeof(kvf_transport_kind), set by the caller */
    const char *name;
    kvf_reach reach;
    /** Set of kvf_memory_kind that it can serve; memory that the machine does not support is refused later. */
    uint32_t memory_kinds;
    uint32_t allocates;  /**< set of kvf_memory_kind: kvf_transport_allocate() gives memory peers can map */
    uint32_t directions; /**< set of kvf_direction */
    bool one_sided;      /**< some memory moves without progress of its owner */
    bool served;         /**< some memory moves only with progress of its owner */
    bool lists;          /**< one operation moves many runs */
    bool fences;         /**< kvf_transport_fence() can shut a peer out */
    uint32_t in_flight;  /**< default of max_in_flight */
    kvf_cost_model cost; /**< orders of magnitude on one core of a current server */
    const char *const *settings; /**< the keys of its settings, ended by NULL */
} kvf_transport_kind;

/**
 * Describes a kind of this build.
 *
 * @param i    its number, best first
 * @param out  struct_size is set by the caller; its texts are owned by the library
 * @return KVF_OK, KVF_E_NOT_FOUND (there are fewer), KVF_E_INVALID
 */
KVF_API kvf_status kvf_transport_describe(uint32_t i, kvf_transport_kind *out);

/** What an endpoint found about one kind of transport on this machine. Texts are cut to fit. */
typedef struct kvf_transport_finding {
    size_t struct_size; /**< sizeof(kvf_transport_finding), set by the caller */
    char kind[32];
    bool asked;         /**< the endpoint was opened with a kind that includes it */
    bool works;         /**< the endpoint has it */
    char why_not[1024]; /**< the reason why it does not work; "" otherwise */
    char library[512];  /**< the file that was loaded for it, such as libucp; "": none */
    char version[32];   /**< of that library */
    /** The ways it found to move bytes, in its own words, such as UCX's "tcp/eth0 cma/memory"; "": none */
    char ways[1024];
} kvf_transport_finding;

/**
 * Says what an endpoint found about a kind of this build: with "auto", which kinds work on this machine, and why others
 * do not.
 *
 * @param i    its number, as in kvf_transport_describe()
 * @param out  struct_size is set by the caller
 * @return KVF_OK, KVF_E_NOT_FOUND (there are fewer kinds), KVF_E_INVALID
 */
KVF_API kvf_status kvf_transport_find(kvf_transport *transport, uint32_t i, kvf_transport_finding *out);

/**
 * The costs that predictions assume for a kind of transport: orders of magnitude on a current server, replaced by what
 * kvf_cost_calibrate() measured if it was called. A program that shows a prediction should show the assumed costs with
 * it.
 *
 * @param kind  a kind of kvf_transport_open(); or "shm/brought": memory on one host that callers brought and that
 *              cannot be mapped; "ucx/emulated": UCX without RDMA; or "libfabric/emulated": libfabric
 *              where it emulates, as over TCP. NULL, "auto" and unknown kinds: the best that reaches peers on one host
 * @param out   receives the costs
 * @return the kind whose costs these are, owned by the library
 */
KVF_API const char *kvf_cost_assumed(const char *kind, kvf_cost_model *out);

/**
 * Measures those of these costs that need no peer, once in a process: how long one thread takes to copy runs between
 * mapped memory ("inproc", "shm"), to read them by a system call ("shm/brought"), and to gather and scatter. It needs 4
 * MiB and some 5 to 9 ms of one processor. After 30 ms, as on a busy machine, it begins no further measurement: what
 * was not measured by then stays as assumed. kvf_stage_open() calls it unless its options say otherwise.
 *
 * Thread safety: any thread; a call waits while another thread measures.
 *
 * @return how many nanoseconds the measurement took
 */
KVF_API uint64_t kvf_cost_calibrate(void);

/** The kinds in this build, best first; NULL past the last. */
KVF_API const char *kvf_transport_kind_name(uint32_t i);

/**
 * Allocates memory of a kind that same-host peers can map, if a transport here gives such memory, or else plain memory:
 * zeroed, freed by kvf_transport_close(), and page aligned; CUDA memory takes multiples of 2 MiB, and is aligned to 256
 * bytes at least.
 *
 * @param device  of the kind; 0 for the host
 * @return KVF_OK, KVF_E_INVALID (0 bytes, no such kind, a device of the host), KVF_E_UNSUPPORTED (no transport here
 *         moves this kind; CUDA memory needs a driver, and "cuda", "ucx" or "libfabric"), KVF_E_NOMEM, KVF_E_IO
 */
KVF_API kvf_status kvf_transport_allocate(kvf_transport *transport, kvf_memory_kind kind, uint32_t device,
                                          uint64_t bytes, void **out);

/**
 * Registers the memory regions of this rank, once: regions[i] is region i of the shard. The two functions below add and
 * remove single regions. The memory stays the caller's and must stay valid until it is unregistered or the transport is
 * closed: this process reads it for peers ("shm.direct"), so memory that is unmapped before it is unregistered ends the
 * process with SIGSEGV, as any use of it would.
 *
 * @return KVF_OK, KVF_E_INVALID (NULL, 0 bytes, struct_size), KVF_E_OVERFLOW, KVF_E_EXISTS (some memory is registered
 *         already), KVF_E_UNSUPPORTED (memory kind), KVF_E_IO, KVF_E_NOMEM; after an error nothing is registered
 */
KVF_API kvf_status kvf_transport_register(kvf_transport *transport, const kvf_memory *regions,
                                          uint32_t count);

/**
 * Registers one region, at any time. Connected peers go on with the regions they know; to reach this one they must
 * connect by a new card.
 *
 * @param region  the number of a region that was unregistered, or the next new number; or, with the same memory, of one
 *                for which kvf_transport_unregister_region() has said KVF_E_AGAIN, and which then stays
 * @return as kvf_transport_register(), KVF_E_EXISTS (this region is registered), KVF_E_RANGE (numbers left out)
 */
KVF_API kvf_status kvf_transport_register_region(kvf_transport *transport, uint32_t region,
                                                 const kvf_memory *memory);

/**
 * Takes one region back, at any time, for engines that move their cache. From then on cards that were exported before
 * are refused: memory has *generations*, and a card names the one it is for. Connections to us by such cards are ended,
 * with KVF_E_PEER_LOST at the peers, which must connect again by a new card. Once this has returned KVF_OK, no peer
 * touches the memory any more, except by UCX: peers that are connected by it must have stopped before. Where UCX
 * emulates one-sided operations, it serves any address; with RDMA it keeps registrations in a cache, so that a peer with
 * the old card keeps access until the memory is unmapped; and see "ucx.tls" about memory of devices.
 *
 * A process that is stopped in the middle of a write, or claims to be, can write to the memory until it ends:
 * KVF_E_AGAIN then lasts as long as the process, and the detail names the peer, its process, and how long we have
 * waited for it. End that process, or do not reuse the memory; kvf_transport_register_region() lets the region stay.
 * Cards that are exported while we wait for peers do not show the region, and who connects by one stays connected.
 *
 * @return KVF_OK, KVF_E_NOT_REGISTERED, KVF_E_AGAIN (our own operations use it, a device copies cells of a stage or
 *         what a peer pushes, or a peer is in the middle of a write: make progress and call again; the memory is still
 *         in use), KVF_E_INVALID
 */
KVF_API kvf_status kvf_transport_unregister_region(kvf_transport *transport, uint32_t region);

/**
 * Returns the card that lets a peer connect and access the registered memory. Anyone who has it can read the cache:
 * give it only to peers that may.
 *
 * @param card   receives a pointer owned by the transport, valid until it is closed or its memory changes
 * @return KVF_OK, KVF_E_NOMEM, KVF_E_IO (a kind of transport cannot give its part)
 */
KVF_API kvf_status kvf_transport_export(kvf_transport *transport, const void **card, size_t *bytes);

/**
 * Connects to the endpoint that exported `card`. May return before the peer has answered, which needs progress on both
 * sides: operations submitted meanwhile wait. The peer may still refuse the connection later, for example because a
 * limit is reached (by "shm": 64 from one process, and half of its descriptors in all): the connection is then lost,
 * and the reason names the limit.
 *
 * @return KVF_OK, KVF_E_PARSE (not a card, or damaged), KVF_E_UNSUPPORTED (no kind in common; the detail
 *         lists both sides' kinds), KVF_E_PEER_LOST (no process listens), KVF_E_NOT_REGISTERED (a card of an older
 *         generation of the peer's memory; if only the peer can tell, the connection is lost with that reason),
 *         KVF_E_PERMISSION, KVF_E_IO, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_transport_connect(kvf_transport *transport, const void *card, size_t bytes,
                                         kvf_peer **out);

/** The kind that serves this peer, such as "shm"; owned by the library. */
KVF_API const char *kvf_peer_kind(const kvf_peer *peer);

/** Which transport serves a peer, and what has moved. Texts are cut to fit. */
typedef struct kvf_peer_info {
    size_t struct_size; /**< sizeof(kvf_peer_info); set by the caller */
    char kind[32];      /**< of the transport that serves it */
    char way[128];      /**< how it reaches the peer's memory, as "mapped memory"; "" before that is known */
    /** Better kinds that both sides have and cannot use, and why, as "shm: ..."; "": none */
    char passed_over[256];
    uint64_t bytes_read, bytes_written; /**< by this side, in operations that succeeded */
} kvf_peer_info;

/** @return KVF_OK, KVF_E_INVALID */
KVF_API kvf_status kvf_peer_get_info(const kvf_peer *peer, kvf_peer_info *info);

/** Sizes of the peer's regions, by region; 0 for a region that was unregistered or is withheld, or of a kind that the
 * transport which serves this peer does not move. Owned by the peer. */
KVF_API const uint64_t *kvf_peer_region_bytes(const kvf_peer *peer, uint32_t *count);

/**
 * Ends a connection. Operations in flight, and transfers that still had to use it, end first, with KVF_E_CANCELLED.
 * If a device does not finish a copy of theirs within "cuda.patience_ms", it may still access memory of this endpoint:
 * kvf_transport_unregister_region() says KVF_E_AGAIN until it has finished, and the memory must not be freed before.
 * If "ucx" reaches the peer by shared memory, and it takes no more operations, as when its process is stopped, this call
 * waits until it takes some, or ends, for it may still answer others: for ever, if this thread should make it take them.
 * A thread with both endpoints first cancels its operations, and makes progress of both until they have ended. NULL is
 * accepted.
 */
KVF_API void kvf_peer_close(kvf_peer *peer);

/**
 * Shuts out the endpoint that exported `card`: its connections to us are ended and new ones refused. Once
 * this has returned KVF_OK, no operation that it has under way or starts later writes to our memory, even if its
 * process is stopped in the middle of a write and resumed much later. For owners that want to reuse memory to which a
 * peer was writing when it fell silent.
 *
 * @return KVF_OK; KVF_E_AGAIN (the peer is in the middle of a write, for as long as its process is stopped: make
 *         progress and call again; the detail names the peer, its process, and how long we have waited for it);
 *         KVF_E_UNSUPPORTED (it may be connected by a kind that cannot shut it out, "ucx" or "libfabric"); KVF_E_PARSE
 *         (not a card), KVF_E_INVALID, KVF_E_NOMEM. Except with the last three, it cannot connect again
 */
KVF_API kvf_status kvf_transport_fence(kvf_transport *transport, const void *card, size_t bytes);

/**
 * Lets an endpoint that was shut out connect again. For use when it is known to have given up its earlier operations.
 *
 * @return KVF_OK, also when it was not shut out; KVF_E_PARSE, KVF_E_INVALID, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_transport_admit(kvf_transport *transport, const void *card, size_t bytes);

/** The number of a submitted batch; never used again by the same transport. 0: none. */
typedef uint64_t kvf_operation;

/**
 * Called once for every submitted batch. All bytes have moved only if status is KVF_OK. Otherwise nothing touches this
 * side's memory any more. After a write that ended with KVF_E_PEER_LOST, or because the peer was closed, bytes sent
 * over a network before may still arrive, until the owner of that memory has called kvf_transport_fence().
 *
 * @param detail  one sentence about a failure: the kind of transport, the peer, how far the batch came, and the
 *                transport's own reason; "" with KVF_OK. Valid during the call
 */
typedef void (*kvf_done)(void *context, kvf_operation operation, kvf_status status, const char *detail);

/**
 * Submits a batch of runs. All runs are checked first: either the whole batch is accepted or none of it.
 *
 * @param runs  must stay unchanged until `done` is called
 * @param done  called from kvf_transport_progress(), or when the peer or the transport is closed; never from
 *              inside this function
 * @param out   receives the operation; may be NULL
 * @return KVF_OK, KVF_E_RANGE (a run outside a region; the detail names run, region, offset and size),
 *         KVF_E_NOT_REGISTERED (no such region, or one that is withheld), KVF_E_PERMISSION (of UCX and libfabric: the
 *         owner withholds it because they emulate there), KVF_E_UNSUPPORTED (the kind does not move bytes in this
 *         direction), KVF_E_PEER_LOST, KVF_E_INVALID, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_transport_submit(kvf_peer *peer, kvf_direction direction, const kvf_run *runs,
                                        size_t count, kvf_done done, void *context, kvf_operation *out);

/**
 * Cancels a batch: `done` is called with KVF_E_CANCELLED once nothing can touch its memory any more, or with
 * KVF_OK if it was complete.
 *
 * @return KVF_OK, or KVF_E_NOT_FOUND when it has ended already
 */
KVF_API kvf_status kvf_transport_cancel(kvf_transport *transport, kvf_operation operation);

/**
 * Sends a small message that arrives whole, once, in order, and after everything that this side completed before.
 *
 * @param bytes  1 to 4096
 * @return KVF_OK, KVF_E_RANGE, KVF_E_AGAIN (the peer does not take messages now: make progress and repeat),
 *         KVF_E_PEER_LOST, KVF_E_NOMEM; of UCX and libfabric also KVF_E_UNSUPPORTED, KVF_E_PERMISSION, KVF_E_IO (their
 *         library refuses the message, or the memory that it is sent from: the detail says why)
 */
KVF_API kvf_status kvf_transport_notify(kvf_peer *peer, const void *data, size_t bytes);

/**
 * Does a bounded amount of work (at most some megabytes of copying) and calls the callbacks that are due.
 * Never blocks.
 *
 * @param busy  receives whether there is more to do at once; may be NULL
 * @return KVF_OK, or KVF_E_IO when the endpoint itself is broken
 */
KVF_API kvf_status kvf_transport_progress(kvf_transport *transport, bool *busy);

/**
 * What peers take of an endpoint, as far as its kinds of transport count it. What one process may take is bounded,
 * however many connections it opens.
 */
typedef struct kvf_transport_info {
    size_t struct_size;   /**< sizeof(kvf_transport_info); set by the caller */
    uint32_t clients;     /**< connections that peers have made to us, now */
    uint32_t clients_max; /**< how many there may be; 0: not counted here */
    uint32_t processes; /**< processes that own these connections, and those that have not shown a card yet */
    uint32_t stuck; /**< peers that should stop writing and have not yet: kvf_transport_fence() names them */
    uint64_t buffer_bytes; /**< memory of peers that is mapped here now as shared buffers */
    /** so far: shared buffers of which only a part is mapped, because the budget of one process or of all is spent;
     * their peers are served more slowly */
    uint64_t cut_buffers;
    uint64_t refused; /**< so far: connections refused or ended because a limit was reached */
} kvf_transport_info;

/** @return KVF_OK, KVF_E_INVALID */
KVF_API kvf_status kvf_transport_get_info(const kvf_transport *transport, kvf_transport_info *info);

/** A file descriptor that polls readable when kvf_transport_progress() has something to do. Do not read it.
 */
KVF_API int kvf_transport_event_fd(kvf_transport *transport);

/**
 * Closes all peers (their operations end with KVF_E_CANCELLED) and the endpoint; NULL is accepted. By "ucx", answers of
 * peers may still reach the memory of such operations until this call returns.
 *
 * The memory is the caller's alone afterwards, but for one case: a peer on this host whose process was stopped in the
 * middle of a write, such as by a debugger, and for longer than a second, for which this call waits. If peers write and
 * that may happen, unregister the memory first, which says so (KVF_E_AGAIN).
 */
KVF_API void kvf_transport_close(kvf_transport *transport);

/* ---- a whole request ------------------------------------------------------------------------- */

typedef struct kvf_transfer kvf_transfer;

/**
 * Starts moving a request: its runs are submitted in batches, a bounded number at once for each source.
 *
 * @param request  must stay unchanged until the transfer is freed
 * @param peers    the peer of each source, by source index; all of one transport
 * @param out      receives a transfer owned by the caller, see kvf_transfer_free()
 * @return KVF_OK, KVF_E_INVALID, KVF_E_UNSUPPORTED (the plan converts, and has no runs: see stage.h), KVF_E_PEER_LOST,
 *         KVF_E_NOMEM
 */
KVF_API kvf_status kvf_transfer_start(const kvf_request *request, kvf_direction direction,
                                      kvf_peer *const *peers, kvf_transfer **out);

/**
 * Starts moving the part of a request that one source of its plan gives, called by the source itself: this process is
 * that remote rank, and writes the runs to the rank that the plan calls local. For producers that write; the other
 * sources of the plan do the same.
 *
 * @param request  over a plan to fill the peer's shard; must stay unchanged until the transfer is freed
 * @param source   which source of the plan this rank is
 * @param peer     the rank the plan calls local
 * @param out      receives a transfer owned by the caller, see kvf_transfer_free()
 * @return as kvf_transfer_start(), KVF_E_RANGE (no such source), and the errors of kvf_transport_submit()
 */
KVF_API kvf_status kvf_transfer_push(const kvf_request *request, uint32_t source, kvf_peer *peer,
                                     kvf_transfer **out);

/**
 * How a transfer stands. It moves while its transport progresses.
 *
 * @return KVF_OK when every byte is there, KVF_IN_PROGRESS while it moves (kvf_error_detail() then stays as it
 *         is), otherwise the first failure, with its sentence in kvf_error_detail(); nothing touches its memory any
 *         more then
 */
KVF_API kvf_status kvf_transfer_status(const kvf_transfer *transfer);

/**
 * One sentence about the first failure of a transfer: source, peer, how far it came, and why.
 *
 * @return text owned by the transfer; "" while nothing has failed
 */
KVF_API const char *kvf_transfer_detail(const kvf_transfer *transfer);

/** Bytes and runs completed so far; either may be NULL. */
KVF_API void kvf_transfer_counts(const kvf_transfer *transfer, uint64_t *bytes, uint64_t *runs);

/** Stops a transfer; its status becomes KVF_E_CANCELLED once nothing touches its memory any more. One that is over stays
 * as it is. */
KVF_API void kvf_transfer_cancel(kvf_transfer *transfer);

/** Frees a transfer. One that is still moving is cancelled, and freed when it has ended. */
KVF_API void kvf_transfer_free(kvf_transfer *transfer);

#ifdef __cplusplus
}
#endif

#endif
