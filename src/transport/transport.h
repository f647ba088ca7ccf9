/*
 * What a fabric implements, and what it may rely on.
 *
 * The front (transport.c) owns everything that is the same for all fabrics: options, the list of regions, the
 * outer card, choosing a fabric for each peer, checking every run against both sides' regions, operation
 * numbers, and the order of callbacks. A fabric is a folder with one kvf_fabric table, named in fabrics.c; it
 * moves runs that have been checked.
 *
 * A fabric never calls a user's callback itself: it calls kvf_batch_end(), kvf_deliver() and kvf_peer_lost(),
 * and only from inside its progress(), disconnect() or close().
 */
#ifndef KVF_TRANSPORT_ROOM_H
#define KVF_TRANSPORT_ROOM_H

#include <kvferry/transport.h>

#include "base/base.h"
#include "base/list.h"
#include "kernel/yardstick.h"
#include "plan/plan.h"

#define KVF_HOST_ID_BYTES 16
#define KVF_PLACE_BYTES (KVF_HOST_ID_BYTES + 8)

/** Identifies this boot of this machine and this network namespace: the scope of loopback addresses. False: unknown. */
bool kvf_host_place(unsigned char out[KVF_PLACE_BYTES]);

/** A fabric's reason for a failure is cut to this length. */
#define KVF_REASON_BYTES 256

/** The reason of a batch that its owner cancelled. */
#define KVF_REASON_CANCELLED "cancelled by its owner"

/** One submitted batch. Made by the front, owned by it, alive until kvf_batch_end(). */
typedef struct kvf_batch {
    kvf_peer *peer;
    kvf_operation operation;
    kvf_direction direction;
    const kvf_run *runs; /**< all inside registered memory on both sides */
    size_t count;
    const kvf_run_shape
        *shape;     /**< each of `runs` is a nest of this shape, see request/request.h; NULL: a run */
    uint64_t bytes; /**< of all runs */
    kvf_done done;
    void *context;
    bool cancelled;    /**< by its owner; the fabric ends it as soon as nothing accesses its memory */
    size_t next;       /**< for the fabric: the first run not yet started */
    size_t in_flight;  /**< for the fabric: posted and not yet complete */
    kvf_status failed; /**< see kvf_batch_fail() */
    char reason[KVF_REASON_BYTES]; /**< of the failure, in the fabric's words */
    /** Kept by the front: all batches of the peer that the fabric has not ended, in order of submission. A
     * fabric may follow them. */
    struct kvf_batch *previous, *following;
} kvf_batch;

#define KVF_NOTICE_MAX 4096u /**< bytes of a notification */
#define KVF_SENDER_MAX 255u  /**< bytes of the name of an endpoint */

/** A growing array of bytes, for cards. */
typedef struct kvf_buffer {
    unsigned char *data;
    size_t length;
    size_t capacity;
} kvf_buffer;

kvf_status kvf_buffer_add(kvf_buffer *bytes, const void *data, size_t length);
/** Makes room for `length` more bytes, so that adding them cannot fail. */
kvf_status kvf_buffer_room(kvf_buffer *bytes, size_t length);
void kvf_buffer_free(kvf_buffer *bytes);

/**
 * One fabric. `endpoint` is what open() made, `link` what connect() made. All functions are called by one
 * thread at a time for each endpoint; every pointer given to a fabric outlives its use there.
 */
typedef struct kvf_fabric {
    /** What the fabric can do and costs, for users; `struct_size` stays 0. Settings begin with its name and a dot. */
    kvf_transport_kind kind;

    /** KVF_E_UNSUPPORTED (with a reason): this machine cannot do it; "auto" then goes on without this fabric.
     * KVF_E_INVALID: the value of a setting, see kvf_setting_of(). `options` are valid only during the call. */
    kvf_status (*open)(kvf_transport *transport, const kvf_transport_options *options, void **endpoint);

    /** NULL when the fabric has no memory of its own (kind.allocates is 0); memory is freed by close(). */
    kvf_status (*allocate)(void *endpoint, kvf_memory_kind kind, uint32_t device, uint64_t bytes, void **out);

    /** Registers one region under a free number, or under that of the same memory for which unregister_region() has said
     * KVF_E_AGAIN; its kind is in kind.memory_kinds, and kvf_transport_regions() lists it already. KVF_E_UNSUPPORTED:
     * "auto" goes on without this fabric. */
    kvf_status (*register_region)(void *endpoint, uint32_t region, const kvf_memory *memory);

    /**
     * Releases a region that no operation of ours uses. Ends the connections of peers whose cards are older than
     * kvf_transport_oldest(), which has risen just before the first such call, and refuses such cards from then on. The
     * part of a card that is written from now on, even after KVF_E_AGAIN, does not have the region, as
     * kvf_transport_regions() does not; peers that connect by such a card stay connected.
     *
     * @return KVF_OK: no peer reaches the region by this fabric any more; KVF_E_AGAIN (a peer may be in the middle
     *         of a write; the detail says which, and since when): the front calls again later
     */
    kvf_status (*unregister_region)(void *endpoint, uint32_t region);

    /** Appends this fabric's part of the card; nothing if no peer can connect by this fabric. */
    kvf_status (*card)(void *endpoint, kvf_buffer *out);

    /**
     * Connects by the part of the card that the peer's same fabric wrote. `card` is untrusted. KVF_E_UNSUPPORTED means
     * that this peer cannot be reached this way (another host, another process): the next fabric is tried.
     * kvf_peer_region_bytes() and kvf_peer_generation() are what the outer card claims, with 0 bytes for regions that
     * this fabric does not move; a fabric that learns the true sizes must compare. KVF_E_NOT_REGISTERED: the card is
     * older than the peer's kvf_transport_oldest().
     */
    kvf_status (*connect)(void *endpoint, const void *card, size_t bytes, kvf_peer *peer, void **link);

    /** Whether batches may have nests. */
    bool nests;

    /** Nobody sleeps on its endpoints, as in simulations: it has no event_fd, and the front opens no descriptors. Only for
     * kvf_transport_open_over(). */
    bool unwatched;

    /** Accepts a batch. Fails only as a whole, before anything has moved. */
    kvf_status (*submit)(void *link, kvf_batch *batch);

    /** `batch->cancelled` was just set: start no more of its runs, end it from progress() once nothing accesses its
     * memory. */
    void (*cancel)(void *link, kvf_batch *batch);

    kvf_status (*notify)(void *link, const void *data, size_t bytes);

    /** The assumed costs of memory, or machines, of another sort. The name is the kind, a slash and the sort, as
     * "shm/brought"; NULL if there is no such sort. */
    struct {
        const char *name;
        kvf_cost_model cost;
    } apart;

    /** Whether this peer's memory is of that sort, as far as is known now. NULL if `apart` has no name. */
    bool (*is_apart)(const void *link);

    /**
     * Measures those of the fabric's costs that can be measured without a peer. NULL: there are none.
     *
     * @param cost, apart  the assumed costs; receive the costs that were measured within the time limit
     */
    void (*measure)(const kvf_yardstick *yardstick, kvf_cost_model *cost, kvf_cost_model *apart);

    /**
     * The machine and network namespace of this peer, from its card, in the form of kvf_host_place(). NULL for a fabric
     * that reaches only this host.
     *
     * @return KVF_PLACE_BYTES bytes; zeros: it is not known
     */
    const unsigned char *(*place)(const void *link);

    /**
     * Lets the caller access a region of the peer in place until leave(): briefly, within one call by the user, and
     * without a progress() in between. NULL if no memory of peers is in our address space; then leave is NULL too. The
     * caller sees what the peer changes in the region meanwhile.
     *
     * @return where the region begins; NULL: it is not mapped here, or the peer is lost or lets us write no more; a
     *         batch then reports the reason
     */
    unsigned char *(*enter)(void *link, uint32_t region, kvf_direction direction);

    /** Ends the access. @return false: the peer is gone, and what was read or written is void */
    bool (*leave)(void *link, kvf_direction direction);

    /** How the peer's memory is reached, in a few words that the fabric owns and never frees; "" before that is known.
     * NULL: there is nothing to add to the fabric's name. */
    const char *(*way)(const void *link);

    /** See kvf_peer_is_behind(). NULL: never. */
    bool (*is_behind)(const void *link);

    /** Whether the peer withholds some of its memory, see kvf_transport_withhold_emulated(). NULL: never. */
    bool (*withholds)(const void *link);

    /** Why the peer's memory cannot be read after all, which was found out after connect(); NULL: nothing says so. The
     * link owns the text. NULL: connect() always knows. */
    const char *(*refusal)(const void *link);

    /** Ends the link, which may be lost already. No batch of this link may touch our memory after it returns;
     * writes that were sent over a network may still reach the peer's memory, until the peer shuts us out. The front
     * ends the batches. Called outside of progress(). */
    void (*disconnect)(void *link);

    /** Whether disconnect() would return at once: nothing that must be waited for touches our memory. NULL: always. */
    bool (*quiet)(const void *link);

    /**
     * Keeps the endpoint that wrote this part of a card from accessing our memory from now on. NULL if the fabric
     * cannot ensure that (kind.fences is false); then admit is NULL too.
     *
     * @return KVF_OK, KVF_E_AGAIN (it may be in the middle of a write: the detail says which, and since when),
     *         KVF_E_NOT_FOUND (it is kept out from now on, but was not seen here before: it may be connected by another
     *         fabric), KVF_E_PARSE, KVF_E_NOMEM
     */
    kvf_status (*fence)(void *endpoint, const void *card, size_t bytes);

    /** In place of fence: for how long, in nanoseconds, what a peer has sent to our memory may still arrive. Set if, and only
     * if, fence is not. */
    uint64_t (*late_ns)(const void *endpoint);

    /** Removes a fence. */
    kvf_status (*admit)(void *endpoint, const void *card, size_t bytes);

    /** See kvf_transport_stop_writing(). NULL: nothing goes on; a fabric whose processor copies for peers does so within
     * progress(). */
    bool (*stop_writing)(void *endpoint, uint32_t region, uint64_t offset, uint64_t bytes);

    /** Fills in what the fabric loaded and found: `library`, `version` and `ways`, which are "" before the call.
     * NULL: there is nothing to fill in. */
    void (*found)(void *endpoint, kvf_transport_finding *out);

    /** Bounded work. Sets *busy when it should be called again at once. */
    kvf_status (*progress)(void *endpoint, bool *busy);

    /** Adds what peers use of the endpoint to the numbers in `info`. NULL: the fabric does not count. */
    void (*count)(const void *endpoint, kvf_transport_info *info);

    /** Readable when progress() has something to do. */
    int (*event_fd)(void *endpoint);

    /** All links are closed already. */
    void (*close)(void *endpoint);
} kvf_fabric;

/* What fabrics call. */

/**
 * Notes that a batch has failed; the first failure stays. The fabric ends it once nothing accesses its memory.
 *
 * @param reason  what happened, with the region or the run if the fabric knows it; the front adds the kind, the
 *                peer and how far the batch came. Copied
 */
void kvf_batch_fail(kvf_batch *batch, kvf_status status, const char *reason);

/** Ends a batch, with KVF_OK unless it has failed; the fabric must not use it afterwards. With batch->cancelled set, a
 * failure becomes KVF_E_CANCELLED. */
void kvf_batch_end(kvf_batch *batch);

/** The bytes that a notification takes in the front's memory. */
size_t kvf_notice_room(const char *sender, size_t bytes);

/** The most bytes that a notification takes. */
#define KVF_NOTICE_ROOM_MAX (16u + KVF_SENDER_MAX + KVF_NOTICE_MAX)

/**
 * Makes room for notifications that take `room` in all, so that the calls of kvf_deliver() for them cannot fail. A
 * fabric calls it before it takes a notification out of the queue it arrived in.
 *
 * @return KVF_OK or KVF_E_NOMEM: the fabric then leaves the notification in that queue, and tries again later
 */
kvf_status kvf_deliver_room(kvf_transport *transport, size_t room);

/**
 * Reports a notification from an endpoint that is connected to us.
 *
 * @param sender  the name the sender gave, which may be anything; NUL terminated, copied, and cut to
 *                KVF_SENDER_MAX bytes
 */
kvf_status kvf_deliver(kvf_transport *transport, const char *sender, const void *data, size_t bytes);

/**
 * The other side of this link is gone, its process or only its endpoint: the front ends its batches with KVF_E_PEER_LOST
 * and tells the user. The fabric must have made sure before that no batch of the link touches memory any more.
 *
 * @param reason  why it is gone, or how the fabric noticed; copied
 */
void kvf_peer_lost(kvf_peer *peer, const char *reason);

/** The same if the other side is still there, as far as is known: it refuses the connection, or this side has ended it, as
 * after a message that made no sense or for want of a descriptor. Such a peer may connect again and write, so what it was
 * to write is not over. */
void kvf_peer_refused(kvf_peer *peer, const char *reason);

/**
 * Closes a peer as kvf_peer_close() does, but waits for nothing: as long as something of this process touches memory for
 * its batches, they are only cancelled, and end when that is over. The peer is then closed in a later progress(). The
 * caller must not use it any more.
 */
void kvf_peer_part(kvf_peer *peer);

/** Whether a transfer uses the connection to a peer. */
bool kvf_peer_is_used(const kvf_peer *peer);

/** There is no connection to a peer yet, and `why`; the fabric tries again. NULL: now there is one. */
void kvf_peer_waits(kvf_peer *peer, const char *why);

/** Whether a peer was lost by kvf_peer_refused(): then its endpoint lives, and may move bytes by its own connections. */
bool kvf_peer_lives(const kvf_peer *peer);

/** The regions that a fabric serves: address and size, by region number; 0 bytes: none, or one that is withheld, or of
 * a kind that it does not serve. `endpoint` is the fabric's. */
const kvf_memory *kvf_transport_regions(const kvf_transport *transport, const void *endpoint,
                                        uint32_t *count);

/** Frees memory of kvf_transport_allocate() that is not registered, unless it is a fabric's, which keeps it until the
 * endpoint closes. */
void kvf_transport_give_back(kvf_transport *transport, const void *address);

/** Memory of kvf_transport_allocate() that is not a fabric's stays when the transport closes: a device may use it for
 * ever, and the driver would wait as long before it frees any. */
void kvf_transport_leave_memory(kvf_transport *transport);

/**
 * Registers the arena of a stage. A fabric may serve arenas and not the other memory, which then moves packed to peers
 * that it reaches; or the other memory and not arenas. For each peer, fabrics that move runs are tried first.
 *
 * @return as kvf_transport_register_region()
 */
kvf_status kvf_transport_register_arena(kvf_transport *transport, uint32_t region, const kvf_memory *memory);

/**
 * Ends what this process itself writes to these bytes of a region of ours because peers have asked it to. What has not
 * begun is given up; what has begun goes on, even without the peer, for a device may be late. What a peer's process, or
 * a network, writes is not seen here.
 *
 * @return whether nothing of it is under way; if not, the caller asks again later
 */
bool kvf_transport_stop_writing(kvf_transport *transport, uint32_t region, uint64_t offset, uint64_t bytes);

/**
 * Shuts an endpoint out, which ends its pending writes here, and then lets it connect anew: it starts later writes by
 * what it knows then. Connections that were shut stay shut.
 *
 * @param until_it_has  while the endpoint may still be writing it is not let in again; the caller retries later
 * @return as kvf_transport_fence(), but KVF_E_AGAIN instead of KVF_E_NOMEM: it may still be writing
 */
kvf_status kvf_transport_stop_endpoint(kvf_transport *transport, const void *card, size_t bytes,
                                       bool until_it_has);

/**
 * For how long what an endpoint has sent may still arrive: by the fabrics of this card that cannot shut it out, and that
 * may connect it. The network has it, or a socket's buffer, and an end of the connection or of the process need not stop
 * it. 0: there is no such fabric.
 */
uint64_t kvf_transport_late_ns(kvf_transport *transport, const void *card, size_t bytes);

/** Whether there are fabrics of both sorts: then only a connection shows whether a peer is reached by runs. */
bool kvf_transport_is_split(const kvf_transport *transport);

/** All registered regions, including those that are withheld. */
const kvf_memory *kvf_transport_memory(const kvf_transport *transport, uint32_t *count);

/** Whether memory of ours is withheld (kvf_memory.withheld): then everything moves packed. */
bool kvf_transport_withholds(const kvf_transport *transport);

/** Where each registered region begins, by region number. */
unsigned char *const *kvf_transport_bases(const kvf_transport *transport);

/** A user whose threads copy to and from our regions even while no function of the transport runs. */
typedef struct kvf_region_user {
    int fd; /**< readable while the user must be called; then the transport's event descriptor is readable too */
    /** Returns once none of the user's threads accesses the regions, or reads the table of their addresses. False: a
     * device still accesses regions. */
    bool (*settle)(void *context);
    void *context;
} kvf_region_user;

/**
 * Sets the one user of the regions besides the fabrics. The front calls its settle() before regions come or go.
 *
 * @param user  copied; NULL: removes the user
 * @return KVF_OK, KVF_E_EXISTS (there is one already), KVF_E_IO
 */
kvf_status kvf_transport_set_region_user(kvf_transport *transport, const kvf_region_user *user);

/** The oldest generation of our memory that a card may describe. */
uint64_t kvf_transport_oldest(const kvf_transport *transport);

/**
 * Sets whether fabrics that emulate one-sided operations withhold the regions that are registered from now on: such a
 * fabric puts neither their addresses nor their keys on its card. For callers that move everything through an arena.
 * Other fabrics are not affected.
 */
void kvf_transport_withhold_emulated(kvf_transport *transport, bool withhold);
bool kvf_transport_withholds_emulated(const kvf_transport *transport);

/** Whether that was ever set: the caller has arenas, which are registered without it. */
bool kvf_transport_packs_emulated(const kvf_transport *transport);

/** Whether a peer withholds memory, in this way or by kvf_memory.withheld, or its fabric does not move all memory of
 * both sides: then only its arena can be read and written. */
bool kvf_peer_withholds(const kvf_peer *peer);

/** Why a connection cannot read the peer's memory, though it was made; NULL: as far as is known, it can. Good until the
 * next call about this transport. */
const char *kvf_peer_refusal(const kvf_peer *peer);

/** Whether a read by this connection would wait for the bytes of reads that were given up a second ago or longer. A
 * new connection would not: after an outage the old one brings those bytes first, and TCP knows only its old pace. */
bool kvf_peer_is_behind(const kvf_peer *peer);

/** Why there is no connection to a peer yet, which is tried again; NULL: there is one, as far as is known, or the peer is
 * lost. Good until the next call about this transport. */
const char *kvf_peer_waiting(const kvf_peer *peer);

/** How often kvf_peer_waits() has said that a peer waits: when it grows, peers are worth asking. */
uint64_t kvf_transport_waits(const kvf_transport *transport);

/** Whether the fabric that serves a peer takes nests. */
bool kvf_peer_takes_nests(const kvf_peer *peer);

/**
 * As kvf_transport_submit(), for nests of one shape, see request/request.h.
 *
 * @param peer   takes nests
 * @param shape  must stay like `nests`, until `done`
 */
kvf_status kvf_transport_submit_nests(kvf_peer *peer, kvf_direction direction, const kvf_run *nests,
                                      size_t count, const kvf_run_shape *shape, kvf_done done, void *context,
                                      kvf_operation *out);

/** Kinds of memory, as bits by kvf_memory_kind. */
typedef struct kvf_arena_kinds {
    uint32_t ours, theirs;
} kvf_arena_kinds;

/** In which memory there are arenas that the fabric of a peer moves: ours, and the peer's if it has a stage. */
kvf_arena_kinds kvf_peer_arenas(const kvf_peer *peer);

/** Whether a peer may withhold memory, by its card, without a connection: by kvf_memory.withheld, or because it is a
 * device's. False for bytes that are not a card. */
bool kvf_card_withholds(const void *card, size_t bytes);

/** The name that a peer's card gives it. */
const char *kvf_peer_name(const kvf_peer *peer);

/** The card with which a peer was connected. Owned by the peer. */
const void *kvf_peer_card(const kvf_peer *peer, size_t *bytes);

/** The endpoint that connected to a peer. */
kvf_transport *kvf_peer_transport(const kvf_peer *peer);

/** The reach of the fabric that serves a peer. */
kvf_reach kvf_peer_reach(const kvf_peer *peer);

/** Whether an endpoint has a fabric for peers on its own host that serves its memory. */
bool kvf_transport_is_near(const kvf_transport *transport);

/**
 * Begins to read or write a region of a peer in place, instead of by kvf_transport_submit(). The caller must call
 * kvf_peer_leave() before any other function of the transport.
 *
 * @return where the region begins; NULL: it cannot be accessed in place, now or ever; use a batch
 */
unsigned char *kvf_peer_enter(kvf_peer *peer, uint32_t region, kvf_direction direction);

/**
 * Ends the access, and counts the bytes like those of a batch.
 *
 * @return KVF_OK; KVF_E_PEER_LOST: the peer is gone, and what was read or written is void
 */
kvf_status kvf_peer_leave(kvf_peer *peer, kvf_direction direction, uint64_t bytes);

/** Takes over measured prices of a run and a byte, unless they are 0 (not measured). */
void kvf_cost_price(kvf_cost_model *cost, const kvf_copy_price *price);

/** The cost of gathering or scattering, assumed, or measured by kvf_cost_calibrate(): of a piece and of a byte at one
 * end. Any thread may call it. */
kvf_copy_price kvf_cost_copying(void);

/** The cost of reading and writing this peer's memory, assumed, or measured without the peer; returns the name by which
 * kvf_cost_assumed() knows it. */
const char *kvf_peer_costs(const kvf_peer *peer, kvf_cost_model *out);

/** Whether it is memory of this host that cannot be mapped here. */
bool kvf_peer_is_brought(const kvf_peer *peer);

/** The machine and network namespace of a peer, in the form of kvf_host_place(); false: not known. */
bool kvf_peer_place(const kvf_peer *peer, unsigned char out[KVF_PLACE_BYTES]);

/** The generation of a peer's memory that its card describes. */
uint64_t kvf_peer_generation(const kvf_peer *peer);

/** Whether its caches are only written, as kvf_connect_hints says: a fabric need not map them. */
bool kvf_peer_only_written(const kvf_peer *peer);

/**
 * Tells progress(), which runs or is about to run, to return after its current copy, for another thread waits for its
 * end. The only function of a transport that any thread may call at any time.
 */
void kvf_transport_hurry(kvf_transport *transport);

/** Whether a thread waits like this; until the end of progress(). */
bool kvf_transport_hurried(const kvf_transport *transport);

/** Facts about a peer that the caller knows before it connects. */
typedef struct kvf_connect_hints {
    const char *past; /**< a kind that has turned out not to serve it, though it could connect; NULL: none */
    const char *past_why; /**< for kvf_peer_info.passed_over; copied */
    bool only_written;    /**< its caches will not be read; arenas may be */
} kvf_connect_hints;

/** kvf_transport_connect() of a peer of which something is known. */
kvf_status kvf_transport_connect_knowing(kvf_transport *transport, const void *card, size_t bytes,
                                         const kvf_connect_hints *hints, kvf_peer **out);

/**
 * Compares the sizes that a fabric's part of a card has with those that the card has. An arena on a device that the peer
 * does not serve by this fabric is forgotten, if it has one on the host.
 *
 * @param bytes   the first of `count` sizes, each `stride` bytes behind the one before
 * @return KVF_OK; KVF_E_UNSUPPORTED (0 bytes: the peer does not serve a region by this fabric); KVF_E_PARSE
 */
kvf_status kvf_peer_check_regions(kvf_peer *peer, uint32_t count, const uint64_t *bytes, size_t stride);

/** The name from the options, for messages. */
const char *kvf_transport_name(const kvf_transport *transport);

/**
 * kvf_transport_open() with a fabric of the caller instead of those of this build, whatever the kind: for tests.
 *
 * @param in_front  NULL: those of this build
 */
kvf_status kvf_transport_open_over(const kvf_fabric *in_front, const char *kind,
                                   const kvf_transport_options *options, kvf_transport **out);

/** Whether kvf_transport_close() was called: the memory of batches that end now is the caller's only when it returns. */
bool kvf_transport_is_closing(const kvf_transport *transport);

/** Whether the endpoint was opened as "auto": a fabric that returns KVF_E_UNSUPPORTED is then left out. */
bool kvf_transport_is_automatic(const kvf_transport *transport);

/** The value that the options give to a key; NULL if they give none. */
const char *kvf_setting_of(const kvf_transport_options *options, const char *key);

/** Takes the number, 1 to `most`, that the options give to a key; `*out` stays if they give none. KVF_E_INVALID: another
 * value */
kvf_status kvf_setting_up_to(const kvf_transport_options *options, const char *key, uint32_t most,
                             uint32_t *out);

/** The same up to UINT32_MAX. */
kvf_status kvf_setting_number(const kvf_transport_options *options, const char *key, uint32_t *out);

/** The fabrics of this build, best first: ordered by reach, then by the cost of a byte, then of a run. NULL past the
 * last. */
const kvf_fabric *kvf_fabric_at(uint32_t i);

/**
 * Whether a table is complete and consistent: it has every function that all fabrics need, and a function for each
 * ability that it states.
 *
 * @return KVF_OK, or KVF_E_INVALID; the detail names the fabric and what is missing
 */
kvf_status kvf_fabric_check(const kvf_fabric *fabric);

#endif
