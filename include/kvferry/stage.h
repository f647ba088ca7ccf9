/*
 * Fewer, longer operations: requests through an arena.
 *
 * Between machines an operation costs microseconds whatever its size, and a head slice in token-major order is a run of
 * some hundred bytes for each token, layer and part. So the bytes from one rank to another can go two ways:
 *
 *   direct   one operation for each run of the request, as kvf_transfer_start() does it
 *   packed   the rank that holds the cells gathers them into a slot of an arena, one operation moves the slot, and
 *            the reading rank scatters it. Between ranks of one host slots are mapped, and no operation is needed
 *
 * A stage belongs to one transport. It registers an arena, memory of bounded size cut into slots, as one more region
 * behind the shard's. It talks to the stages of its peers through notifications of the transport: the user passes
 * notifications to it, and says which peers have a stage.
 *
 *     on_notify:  if (!kvf_stage_notice(stage, sender, data, bytes)) ... the user's own message
 *     the loop:   kvf_transport_progress(transport, &busy); kvf_stage_progress(stage, &more);
 *                 sleep on kvf_transport_event_fd(transport) unless busy or more
 *
 * A flow is a sequence of bytes that each rank finds in its own memory (docs/protocol.md), so the two sides may cut and
 * order cells differently. No allocation grows with bytes or runs: a flow that is larger than the arena streams through
 * it.
 *
 * Only the thread that uses its transport may use a stage. Its own callbacks may call none of its functions.
 */
#ifndef KVFERRY_STAGE_H
#define KVFERRY_STAGE_H

#include <kvferry/transport.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_stage kvf_stage;

typedef enum kvf_way {
    /** The way that is predicted to be faster. Direct where the transport itself moves lists of runs (all but "ucx" and
     * "libfabric" do), except for memory of this host that cannot be mapped (memory that callers brought), for memory
     * that is withheld from peers (by `kvf_memory.withheld`; and, in an agent that names a "ucx" or "libfabric" without
     * RDMA, all memory but the arena), and where the two sides cut cells into different pieces, as when one keeps keys
     * channel by channel. Direct, too, where it is possible and the peer's block tables do not fit in the opening of a
     * flow: two million entries fit. */
    KVF_WAY_AUTO = 0,
    KVF_WAY_DIRECT = 1,
    KVF_WAY_PACKED = 2,
} kvf_way;

/** The length of arrays by kvf_way, with room for ways to come. */
#define KVF_WAYS 8

/** What a peer asks for when it begins a flow. */
typedef struct kvf_flow_request {
    size_t struct_size;      /**< sizeof(kvf_flow_request) of the library */
    kvf_direction direction; /**< KVF_READ: it reads from here; KVF_WRITE: it writes here */
    uint64_t permission;     /**< the number that entitles it, see kvf_move_options; 0: none */
    uint64_t bytes;          /**< of the flow, as the peer says */
    /** Steps and blocks of this rank, one for each group of the model, not checked yet. Valid during the call. */
    const kvf_group_steps *groups;
    uint32_t group_count;
} kvf_flow_request;

/** The comment of a field says what zero means. */
typedef struct kvf_stage_options {
    size_t struct_size; /**< sizeof(kvf_stage_options) */
    /** 0: 64 MiB; at least 4 slots. Of a shard on a device fewer, if the driver has no memory to pin all of them */
    uint64_t arena_bytes;
    uint32_t slot_bytes; /**< the most that one operation moves; 0: 1 MiB; 4 KiB to 1 MiB, a power of two */
    uint32_t window;     /**< slots that one flow may have at once; 0: 8; up to 16 */
    /** Flows open with one peer at once, each way; 0: 64. The smaller number of both sides counts: a stage learns the
     * peer's with the first flow that it takes, and opens one flow until then. Further flows of this side wait. */
    uint32_t flows;
    /** Threads that gather and scatter while the transport moves other slots; 0: kvf_stage_progress() does it itself;
     * up to 16. They help only where processors would be idle otherwise. */
    uint32_t workers;
    /** A flow ends if its peer is silent for this long when it should answer, or if the device finishes none of its
     * copies for half as long; 0: 30 s. */
    uint64_t stall_ns;
    /** How long slots are kept that a lost peer may still touch. And if all slots are lent and a peer has waited this
     * long for its first one, flows that have given none back meanwhile are ended, and their slots are free after the
     * same time again. When the time is over, a peer that has not answered is shut out (kvf_transport_fence()) and let in
     * again. Where the transport cannot do that, slots that it may have written to are kept for as long as the network may
     * bring something late ("ucx.late_ms", "libfabric.late_ms"). 0: 30 s */
    uint64_t doubt_ns;
    /** Returns whether this peer may begin this flow. If not, the peer is told what kvf_error_detail() says after the
     * call. NULL: all peers that have joined may. */
    bool (*permit)(void *context, const char *peer, const kvf_flow_request *request);
    /** A peer broke the protocol, which harms at most its own flow. `text` is valid during the call. */
    void (*on_event)(void *context, const char *peer, kvf_status status, const char *text);
    void *context;
    /** For each group of the shard's model, the types between which flows of peers may be converted, as `convert` of
     * kvf_plan_options; NULL: none, and a flow of other types than the shard's is refused. Copied. */
    const uint32_t *convert;
    /** Begin with assumed costs: kvf_stage_open() does not call kvf_cost_calibrate(), which takes some milliseconds the
     * first time in a process, and seldom more than 30. */
    bool assumed_costs;
    /**
     * If the shard's memory is a device's and a transport here moves such memory, a second arena is in the device's
     * memory: peers that this transport reaches are sent packed bytes without a way through the host. At least 4 slots;
     * 0: 64 MiB; KVF_NO_DEVICE_ARENA: there is none. Without memory for it, or without such a transport, there is none
     * either, and kvf_stage_info says so.
     */
    uint64_t device_arena_bytes;
    /** Between the shard's memory, if it is a device's, and the arena of the host, runs of so many bytes and more are
     * copied by the driver. Such copies take none of the device's multiprocessors, and do not wait until kernels leave
     * one; all else is copied by a kernel. 0: 256 KiB; KVF_NO_DEVICE_COPIES: a kernel copies everything. */
    uint64_t device_copy_bytes;
} kvf_stage_options;

#define KVF_NO_DEVICE_ARENA UINT64_MAX
#define KVF_NO_DEVICE_COPIES UINT64_MAX

/**
 * Opens a stage: allocates the arena from the transport, which keeps it until it is closed, and registers it under the
 * number after the last region; and an arena in memory of the device, if there is one, under the next. Cards that reach
 * the arenas must be exported afterwards.
 *
 * @param shard  this rank's, whose regions are registered, all in memory of the host or all of one CUDA device; must
 *               outlive the stage. The device itself gathers and scatters its regions. Regions of a device that
 *               are not `withheld` go directly to peers that a transport for such memory reaches, and packed to others
 * @return KVF_OK, KVF_E_INVALID (options), KVF_E_NOT_REGISTERED (regions of the shard are not registered, or too
 *         small), KVF_E_UNSUPPORTED (regions in different places; no CUDA driver, or no code for the device),
 *         KVF_E_EXISTS (this stage needs workers or a device, and another stage of this transport has some), and the
 *         errors of kvf_transport_allocate() and kvf_transport_register_region()
 */
KVF_API kvf_status kvf_stage_open(kvf_transport *transport, const kvf_shard *shard,
                                  const kvf_stage_options *options, kvf_stage **out);

/** Ends all flows without telling the peers, and frees the stage. Call it before the transport is closed; moves may be
 * freed before or after. Waits for copies of a device, 30 s at most. NULL is accepted. */
KVF_API void kvf_stage_close(kvf_stage *stage);

/**
 * Names a peer that has a stage too: messages from the endpoint with the name in the peer's card are answered by this
 * connection. Both sides must do so before either begins a flow.
 *
 * @param peer  of the stage's transport; must stay open until kvf_stage_leave()
 * @return KVF_OK, KVF_E_EXISTS (a peer of that name, or this one, has joined), KVF_E_INVALID, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_stage_join(kvf_stage *stage, kvf_peer *peer);

/**
 * Ends all flows with a peer that is lost or about to be closed, with KVF_E_PEER_LOST; on the peer's side too, if it
 * can still be told. Slots that the peer may still read or write are in doubt: they are kept, and count against its
 * share, until kvf_stage_quiet() or for doubt_ns; and for longer while the peer's process is stopped in the middle of a
 * write, or a device of this process is late with what the peer has asked it to write there.
 */
KVF_API void kvf_stage_leave(kvf_stage *stage, kvf_peer *peer);

/** Says that a peer of this name that has left no longer touches our memory: it was shut out, or has ended. What devices
 * of this process still write for it, the stage knows itself. */
KVF_API void kvf_stage_quiet(kvf_stage *stage, const char *name);

/** Ends the flows that this peer has opened, with KVF_E_CANCELLED on its side. */
KVF_API void kvf_stage_stop(kvf_stage *stage, const kvf_peer *peer);

/**
 * Ends the flows that peers have opened by a permission, with KVF_E_CANCELLED on their side.
 *
 * @return whether none of them touches the shard's memory any more. False: a device, which cannot be stopped, still
 *         copies for one; progress, and ask again
 */
KVF_API bool kvf_stage_revoke(kvf_stage *stage, uint64_t permission);

/** Takes a notification; returns false if it is not from a stage. Call it from on_notify. */
KVF_API bool kvf_stage_notice(kvf_stage *stage, const char *sender, const void *data, size_t bytes);

/**
 * Does a bounded amount of work: copies some slots and sends messages that are due. Call it after
 * kvf_transport_progress(), and now and then when nothing happens, so that it notices flows that take too long.
 *
 * @param busy  receives whether there is more to do at once; may be NULL
 * @return KVF_OK, KVF_E_INVALID
 */
KVF_API kvf_status kvf_stage_progress(kvf_stage *stage, bool *busy);

/* ---- a whole request ------------------------------------------------------------------------- */

/** One request on its way, or the part of it that one source gives. */
typedef struct kvf_move kvf_move;

typedef struct kvf_move_options {
    size_t struct_size; /**< sizeof(kvf_move_options) */
    kvf_way way;        /**< for all sources; KVF_WAY_AUTO chooses for each */
    /** 0 to 255: packed flows of a higher one go first, at both ends; but one slot in 16 is of the flow whose last one was
     * longest ago. */
    uint32_t priority;
    /** For each source, a number that its peer gave, and that the peer passes to its `permit`; NULL: 0 for all. Read
     * during the call. */
    const uint64_t *permissions;
} kvf_move_options;

/**
 * Reads a request from all its sources. If one cannot be started after another was, the move fails with that reason,
 * once nothing of the others is under way.
 *
 * @param request  over a plan whose local shard is the stage's; must stay unchanged until the move is freed
 * @param peers    the peer of each source, by source index. KVF_WAY_AUTO reads peers that have not joined directly
 * @param options  NULL: the defaults
 * @param out      receives a move owned by the caller, see kvf_move_free()
 * @return KVF_OK, KVF_E_INVALID, KVF_E_UNSUPPORTED (packed, and the groups of the two models differ; direct, and the
 *         plan converts), KVF_E_NOT_FOUND (packed, or the plan converts, and a peer has not joined), KVF_E_LIMIT
 *         (packed, and the peer's block tables do not fit in the opening of a flow), KVF_E_PEER_LOST, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_stage_pull(kvf_stage *stage, const kvf_request *request, kvf_peer *const *peers,
                                  const kvf_move_options *options, kvf_move **out);

/**
 * Writes the part of a request that one source of its plan gives, called by the source itself: this process is that
 * remote rank, and `peer` the rank that the plan calls local. Otherwise as kvf_stage_pull().
 *
 * @return as kvf_stage_pull(), KVF_E_RANGE (no such source)
 */
KVF_API kvf_status kvf_stage_push(kvf_stage *stage, const kvf_request *request, uint32_t source,
                                  kvf_peer *peer, const kvf_move_options *options, kvf_move **out);

/**
 * How a move stands. It moves while transport and stage progress.
 *
 * @return KVF_OK when every byte is in the reader's memory, KVF_IN_PROGRESS (kvf_error_detail() then stays as it is),
 *         otherwise the first failure, with its sentence in kvf_error_detail(); by then nothing of this side touches
 *         the request's memory any more
 */
KVF_API kvf_status kvf_move_status(kvf_move *move);

typedef struct kvf_move_info {
    size_t struct_size; /**< sizeof(kvf_move_info), set by the caller */
    uint64_t bytes;     /**< moved so far */
    uint32_t sources;   /**< of the move */
    uint32_t packed;    /**< of these, how many go packed */
    double direct_ns;   /**< predicted, for all sources one after another; 0 if not predicted */
    double packed_ns;   /**< likewise */
} kvf_move_info;

/** @return KVF_OK, KVF_E_INVALID */
KVF_API kvf_status kvf_move_get_info(const kvf_move *move, kvf_move_info *out);

/** Stops a move; its status becomes KVF_E_CANCELLED once nothing of this side touches its memory any more. One that is
 * over stays as it is. */
KVF_API void kvf_move_cancel(kvf_move *move);

/** Frees a move. One that has not ended is cancelled, and its request must stay until the stage or the peers are
 * closed. NULL is accepted. */
KVF_API void kvf_move_free(kvf_move *move);

/* ---- seen from outside ----------------------------------------------------------------------- */

typedef struct kvf_stage_info {
    size_t struct_size; /**< sizeof(kvf_stage_info), set by the caller */
    uint32_t region;    /**< the number under which the arena in the host's memory is registered */
    uint32_t slots;     /**< of both arenas, as the following */
    uint32_t slots_free;
    uint32_t slots_lent;  /**< granted to a peer, or full for one to read */
    uint32_t slots_doubt; /**< slots that a peer may touch though its flow is over */
    uint32_t flows;       /**< not over yet, begun by either side */
    /** Sources of moves that were begun, by kvf_way; [KVF_WAY_AUTO]: those for which the stage chose the way. */
    uint64_t moves[KVF_WAYS];
    uint64_t bytes[KVF_WAYS]; /**< of sources of moves that succeeded, by kvf_way */
    uint64_t lent_bytes;      /**< of flows of peers that succeeded */
    uint64_t failed;          /**< flows of either side that did not succeed */
    uint64_t refused;         /**< messages that broke the protocol */
    uint64_t worker_copies;   /**< slots that workers gathered or scattered */
    uint32_t device_slots;    /**< of `slots`, in memory of the device; 0: there is no arena */
    uint64_t device_flows;    /**< flows of either side whose slots here were in memory of the device */
} kvf_stage_info;

/** @return KVF_OK, KVF_E_INVALID */
KVF_API kvf_status kvf_stage_get_info(const kvf_stage *stage, kvf_stage_info *out);

/** The times that both ways are predicted to take. A plan that converts goes packed only. */
typedef struct kvf_way_prediction {
    size_t struct_size; /**< sizeof(kvf_way_prediction), set by the caller */
    /**
     * The way that a stage would choose: the cheaper one; but KVF_WAY_DIRECT where nothing moves, and where the kind of
     * transport takes lists of runs and the two sides cut cells alike: packing saves nothing there, whatever is predicted.
     */
    kvf_way way;
    uint64_t bytes;
    uint64_t runs;    /**< operations, direct */
    uint64_t pieces;  /**< pieces of the local rank's memory that are contiguous in the packed stream too */
    double direct_ns; /**< 0 where the plan converts */
    double packed_ns; /**< 0 where the groups of the two models differ: nothing goes packed then */
} kvf_way_prediction;

/**
 * Predicts one request of `tokens` tokens (and one state for each state group) from one source, by each way, with
 * blocks scattered over memory and the costs that a stage begins with.
 *
 * @param tokens  up to 2^32 - 1
 * @param kind    as in kvf_cost_assumed()
 * @param out     struct_size is set by the caller; the rest is filled in
 * @return KVF_OK, KVF_E_RANGE (no such source; tokens), KVF_E_INVALID, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_way_predict(const kvf_plan *plan, uint32_t source, uint64_t tokens, const char *kind,
                                   kvf_way_prediction *out);

/**
 * Predicts the same for caches in memory of these kinds. The costs of gathering and scattering by devices were measured
 * on one NVIDIA H100 (docs/performance.md); those of network cards that reach a device are assumed. If the kind of
 * transport does not serve one side's memory, nothing goes direct, and direct_ns is 0.
 *
 * @param local   where the cache of the plan's local rank is
 * @param remote  where the source's is
 * @return as kvf_way_predict(), KVF_E_INVALID (no such kind of memory)
 */
KVF_API kvf_status kvf_way_predict_in(const kvf_plan *plan, uint32_t source, uint64_t tokens,
                                      const char *kind, kvf_memory_kind local, kvf_memory_kind remote,
                                      kvf_way_prediction *out);

#ifdef __cplusplus
}
#endif

#endif
