/*
 * Fewer, longer operations: requests through an arena.
 *
 * Between machines an operation costs microseconds whatever its size, and a head slice in token-major order is a run
 * of some hundred bytes for each token, layer and part. So what flows from one rank to another can go two ways:
 *
 *   direct   one operation for each run of the request, as kvf_transfer_start() does it
 *   packed   the rank that holds the cells gathers them into a slot of an arena, one operation moves the slot, and
 *            the rank that reads them scatters it. Between ranks of one host slots are mapped, and nothing moves them
 *
 * A stage belongs to one transport. It registers an arena, memory of bounded size cut into slots, as one more region
 * behind the shard's. It speaks with the stages of its peers through notifications of the transport: the user hands it
 * what comes, and says which peers have a stage.
 *
 *     on_notify:  if (!kvf_stage_notice(stage, sender, data, bytes)) ... the user's own message
 *     the loop:   kvf_transport_progress(transport, &busy); kvf_stage_progress(stage, &more);
 *                 sleep on kvf_transport_event_fd(transport) unless busy or more
 *
 * What flows is a sequence of bytes that both ranks find in their own memory by themselves (docs/protocol.md), so they
 * need neither cut cells nor order them alike. Nothing is allocated that grows with bytes or runs: what is larger than
 * the arena streams through it.
 *
 * A stage is used by the thread that uses its transport. None of its functions may be called from its own callbacks.
 */
#ifndef KVFERRY_STAGE_H
#define KVFERRY_STAGE_H

#include <kvferry/transport.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_stage kvf_stage;

typedef enum kvf_way {
    /** What is predicted to be faster. Direct where the transport itself moves lists of runs (all but "ucx" do), unless
     * it is memory of this host that cannot be mapped, that of callers, or memory that is withheld from peers (by
     * `kvf_memory.withheld`; and all but the arena of an agent that names a "ucx" without RDMA), or the two sides keep
     * cells in other pieces, as keys channel by channel beside whole ones. */
    KVF_WAY_AUTO = 0,
    KVF_WAY_DIRECT = 1,
    KVF_WAY_PACKED = 2,
} kvf_way;

/** What a peer asks for that begins a flow. */
typedef struct kvf_flow_request {
    size_t struct_size;      /**< sizeof(kvf_flow_request) of the library */
    kvf_direction direction; /**< KVF_READ: it reads from here; KVF_WRITE: it writes here */
    uint64_t permission;     /**< the number by which it says it may, see kvf_move_options; 0: none */
    uint64_t bytes;          /**< of the flow, as it says */
    /** Steps and blocks of this rank, one for each group of the model, of which nothing is checked yet. Valid during
     * the call. */
    const kvf_group_steps *groups;
    uint32_t group_count;
} kvf_flow_request;

/** Zeroed fields mean what their comment says. */
typedef struct kvf_stage_options {
    size_t struct_size;   /**< sizeof(kvf_stage_options) */
    uint64_t arena_bytes; /**< 0: 64 MiB; at least 4 slots */
    uint32_t slot_bytes;  /**< most that one operation moves; 0: 1 MiB; 4 KiB to 1 MiB, a power of two */
    uint32_t window;      /**< slots lent for one flow at once; 0: 8; up to 16 */
    /** Flows open with one peer at once, each way; 0: 64. The smaller number of both sides counts: a stage is told the
     * peer's with the first flow that it takes, and opens one until then. Those of this side beyond it wait. */
    uint32_t flows;
    /** Threads that gather and scatter while the transport moves other slots; 0: kvf_stage_progress() does it itself;
     * up to 16. They need processors that would be idle otherwise. */
    uint32_t workers;
    uint64_t stall_ns; /**< a flow whose peer says nothing for so long, where it should, is ended; 0: 30 s */
    /** Slots that a lost peer may still touch are kept so long. And where all are lent and a peer has waited so long for
     * its first one, flows that have given none back meanwhile are ended, and their slots are free after as long again.
     * 0: 30 s */
    uint64_t doubt_ns;
    /** Whether this peer may begin this flow; a reason goes into kvf_error_detail() by what is refused. NULL: all may
     * who have joined. */
    bool (*permit)(void *context, const char *peer, const kvf_flow_request *request);
    /** A peer did what it must not; what it harms is at most its own flow. `text` is valid during the call. */
    void (*on_event)(void *context, const char *peer, kvf_status status, const char *text);
    void *context;
    /** For each group of the shard's model, the types that flows of peers may be converted between, as of
     * kvf_plan_options; NULL: none, and a flow of other types than the shard's is refused. Copied. */
    const uint32_t *convert;
    /** Begins with the costs that are assumed: kvf_stage_open() does not call kvf_cost_calibrate(), which takes some
     * milliseconds the first time in a process, and seldom more than 30. */
    bool assumed_costs;
} kvf_stage_options;

/**
 * Opens a stage: allocates the arena from the transport, which keeps it until it is closed, and registers it under the
 * number behind the last region. Cards that are to reach the arena are exported afterwards.
 *
 * @param shard  this rank's, whose regions are registered, all in memory of the host or all of one CUDA device; must
 *               outlive the stage. Of a device the regions are `withheld`, and the device itself gathers and scatters
 * @return KVF_OK, KVF_E_INVALID (options), KVF_E_NOT_REGISTERED (the shard's regions are not, or are smaller than it
 *         says), KVF_E_UNSUPPORTED (regions in different places; no CUDA driver, or no code for the device),
 *         KVF_E_EXISTS (workers or a device, and another stage of this transport has some), and what
 *         kvf_transport_allocate() and kvf_transport_register_region() refuse
 */
KVF_API kvf_status kvf_stage_open(kvf_transport *transport, const kvf_shard *shard,
                                  const kvf_stage_options *options, kvf_stage **out);

/** Ends all flows, without a word to the peers. Before the transport is closed; moves may be freed before or after it.
 * NULL is accepted. */
KVF_API void kvf_stage_close(kvf_stage *stage);

/**
 * Names a peer that has a stage too: messages from the endpoint that calls itself by the name in its card are answered
 * by this connection. Both sides do so before either begins a flow.
 *
 * @param peer  of the stage's transport; must stay open until kvf_stage_leave()
 * @return KVF_OK, KVF_E_EXISTS (a peer of that name, or this one, has joined), KVF_E_INVALID, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_stage_join(kvf_stage *stage, kvf_peer *peer);

/**
 * Ends all flows with a peer that is lost, or about to be closed, with KVF_E_PEER_LOST. Slots that it may still read or
 * write are in doubt: kept, and counted against its share, until kvf_stage_quiet() or for doubt_ns.
 */
KVF_API void kvf_stage_leave(kvf_stage *stage, kvf_peer *peer);

/** It is known that nobody of that name, who has left, touches our memory any more: it was shut out, or has ended. */
KVF_API void kvf_stage_quiet(kvf_stage *stage, const char *name);

/** Ends what this peer has opened, with KVF_E_CANCELLED there. */
KVF_API void kvf_stage_stop(kvf_stage *stage, const kvf_peer *peer);

/** Ends what peers have opened by a permission, with KVF_E_CANCELLED there: once this has returned, no flow of it
 * touches the shard's memory any more. */
KVF_API void kvf_stage_revoke(kvf_stage *stage, uint64_t permission);

/** Takes a notification; false where it is none of a stage. From on_notify. */
KVF_API bool kvf_stage_notice(kvf_stage *stage, const char *sender, const void *data, size_t bytes);

/**
 * Does a bounded amount of work: copies some slots, and says what is to be said. Call it after
 * kvf_transport_progress(), and now and then where nothing happens: it also notices what takes too long.
 *
 * @param busy  receives whether there is more to do at once; may be NULL
 * @return KVF_OK, KVF_E_INVALID
 */
KVF_API kvf_status kvf_stage_progress(kvf_stage *stage, bool *busy);

/* ---- a whole request ------------------------------------------------------------------------- */

/** One request on its way, or what one source gives of it. */
typedef struct kvf_move kvf_move;

typedef struct kvf_move_options {
    size_t struct_size; /**< sizeof(kvf_move_options) */
    kvf_way way;        /**< of all its sources; KVF_WAY_AUTO chooses for each */
    uint32_t priority;  /**< 0 to 255: packed flows of a higher one go first, at both ends */
    /** For each source, a number that its peer gave and hands to its `permit`; NULL: 0 for all. Read by the call. */
    const uint64_t *permissions;
} kvf_move_options;

/**
 * Reads a request from all its sources.
 *
 * @param request  over a plan whose local shard is the stage's; must stay unchanged until the move is freed
 * @param peers    the peer of each source, by source index. Where the way is chosen, those that have not joined are
 *                 read directly
 * @param options  NULL: the defaults
 * @param out      receives a move owned by the caller, see kvf_move_free()
 * @return KVF_OK, KVF_E_INVALID, KVF_E_UNSUPPORTED (packed, and the two models have not the same groups; direct,
 *         and the plan converts), KVF_E_NOT_FOUND (packed, or the plan converts, and a peer has not joined),
 *         KVF_E_PEER_LOST, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_stage_pull(kvf_stage *stage, const kvf_request *request, kvf_peer *const *peers,
                                  const kvf_move_options *options, kvf_move **out);

/**
 * Writes what one source of a plan gives, at the source itself: this process is that remote rank, and the request
 * names its blocks and those of the rank that the plan calls local. Otherwise as kvf_stage_pull().
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
    uint32_t packed;    /**< of them, those that go packed */
    double direct_ns;   /**< predicted, of all sources one after another; 0 where it was not */
    double packed_ns;   /**< likewise */
} kvf_move_info;

/** @return KVF_OK, KVF_E_INVALID */
KVF_API kvf_status kvf_move_get_info(const kvf_move *move, kvf_move_info *out);

/** Stops a move; its status becomes KVF_E_CANCELLED once nothing of this side touches its memory any more. */
KVF_API void kvf_move_cancel(kvf_move *move);

/** Frees a move that is over; one that is not gets cancelled, and its request must stay until the stage or the peers
 * are closed. NULL is accepted. */
KVF_API void kvf_move_free(kvf_move *move);

/* ---- seen from outside ----------------------------------------------------------------------- */

typedef struct kvf_stage_info {
    size_t struct_size; /**< sizeof(kvf_stage_info), set by the caller */
    uint32_t region;    /**< the number under which the arena is registered */
    uint32_t slots;
    uint32_t slots_free;
    uint32_t slots_lent;  /**< granted to a peer, or full for one to read */
    uint32_t slots_doubt; /**< that a peer may touch though its flow is over */
    uint32_t flows;       /**< not over yet, begun by either side */
    uint64_t
        moves[3]; /**< sources of moves that were begun, by kvf_way; [KVF_WAY_AUTO]: those that were chosen */
    uint64_t bytes[3];      /**< of sources of moves that ended well, by kvf_way */
    uint64_t lent_bytes;    /**< of flows of peers that ended well */
    uint64_t failed;        /**< flows that ended in another way, of either side */
    uint64_t refused;       /**< messages that a peer must not have sent */
    uint64_t worker_copies; /**< slots that workers were given to gather or to scatter */
} kvf_stage_info;

/** @return KVF_OK, KVF_E_INVALID */
KVF_API kvf_status kvf_stage_get_info(const kvf_stage *stage, kvf_stage_info *out);

/** The prices of the two ways to one peer in one direction: assumed or calibrated at first, then moved towards the
 * transfers that ended, of all peers on its machine that are reached in the same way, where that is known. They predict transfers that are unlike all before; the stage predicts others from transfers with runs of similar
 * length and of similar size. */
typedef struct kvf_stage_cost {
    size_t struct_size; /**< sizeof(kvf_stage_cost), set by the caller */
    kvf_cost_model direct;
    kvf_cost_model
        packed; /**< ns_per_run: of a piece that is contiguous in this rank's memory and in the stream */
    uint64_t direct_seen; /**< from how many flows it was learned; 0: assumed */
    uint64_t packed_seen;
} kvf_stage_cost;

/** @return KVF_OK, KVF_E_NOT_FOUND (it has not joined), KVF_E_INVALID */
KVF_API kvf_status kvf_stage_get_cost(const kvf_stage *stage, const kvf_peer *peer, kvf_direction direction,
                                      kvf_stage_cost *out);

/** The times that both ways are assumed to take. A plan that converts goes packed only. */
typedef struct kvf_way_prediction {
    size_t struct_size; /**< sizeof(kvf_way_prediction), set by the caller */
    kvf_way way;        /**< the cheaper; KVF_WAY_DIRECT where nothing moves */
    uint64_t bytes;
    uint64_t runs;    /**< operations, direct */
    uint64_t pieces;  /**< of the local rank's memory that are contiguous in the packed stream too */
    double direct_ns; /**< 0 where the plan converts */
    double packed_ns; /**< 0 where the two models have not the same groups: nothing goes packed then */
} kvf_way_prediction;

/**
 * Predicts one request of `tokens` tokens (and one state for each state group) from one source, by each way, blocks
 * scattered, with the costs that are assumed at first.
 *
 * @param kind  as in kvf_cost_assumed()
 * @param out   struct_size is set by the caller; the rest is filled in
 * @return KVF_OK, KVF_E_RANGE (no such source), KVF_E_INVALID, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_way_predict(const kvf_plan *plan, uint32_t source, uint64_t tokens, const char *kind,
                                   kvf_way_prediction *out);

/**
 * The same of caches that lie in memory of these kinds. What devices gather and scatter is assumed to cost what others
 * published of theirs; nothing of it was measured. Where one side's memory is none that the kind of transport serves,
 * nothing goes direct, and direct_ns is 0.
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
