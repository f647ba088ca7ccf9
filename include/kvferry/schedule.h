/*
 * Bookkeeping for an inference engine's scheduler that hands caches over: when a request must wait, when its blocks are
 * free, what the workers must do, and what their answers add up to.
 *
 *   scheduler process                                        workers (one agent each, kvferry/agent.h)
 *
 *   kvf_schedule_add(request, where its cache is)
 *   kvf_schedule_match()      how many tokens can be loaded
 *   kvf_schedule_allocated()  these blocks ...
 *   kvf_schedule_take() ----- instructions ----------------> pull, expect, hold, push, cancel
 *   kvf_aggregator_step() <-- one output of each worker ---- received, sent, failed
 *   kvf_schedule_update()     run these, free those, compute that anew
 *   kvf_schedule_finished()   keep the blocks for a consumer?
 *
 * Nothing here does input or output, starts threads, reads a clock (times are passed in) or uses an agent. The engine
 * carries instructions and outputs between the processes. One thread at a time may use an object; any thread may call
 * functions without an object.
 *
 * Request ids are any bytes, including zeros, commas and colons, up to KVF_REQUEST_ID_BYTES. The same id may come again
 * after its request has ended; the *generation* tells the two apart, so a late report about the first is never taken
 * for one about the second.
 */
#ifndef KVFERRY_SCHEDULE_H
#define KVFERRY_SCHEDULE_H

#include <kvferry/request.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The longest id of a request here. Ids between engines may be longer, so that there is room for a suffix. */
#define KVF_REQUEST_ID_BYTES 960u

/** A request, with the generation of its id. This struct stays as it is. */
typedef struct kvf_request_key {
    kvf_request_id id;
    uint64_t generation; /**< 0: from an engine that does not count them */
} kvf_request_key;

/** A logical block of one group. This struct stays as it is. */
typedef struct kvf_group_block {
    uint32_t group;
    uint32_t block;
} kvf_group_block;

/* ---- outputs of the workers -------------------------------------------------------------------------------
 * In each step each worker answers once. A request counts as sent, or received, when the expected number of workers
 * have said so.
 */

/** No worker. */
#define KVF_NO_WORKER UINT32_MAX

/** Opaque data attached to an output. It stays with the engine, which is told which workers had it. */
typedef enum kvf_rider {
    KVF_RIDER_STATS = 1,
    KVF_RIDER_META = 2,
    KVF_RIDER_EVENTS = 4,
} kvf_rider;

/** What one worker reports in one step. Read during kvf_aggregator_step(); order and repetitions do not matter. */
typedef struct kvf_worker_output {
    size_t struct_size;          /**< sizeof(kvf_worker_output) */
    const kvf_request_key *sent; /**< producer: this worker no longer needs the request's blocks */
    size_t sent_count;
    /** consumer: ended, successfully or not; nothing writes its blocks any more */
    const kvf_request_key *received;
    size_t received_count;
    /**
     * Requests, received now or later, of which nothing that was loaded is valid. A worker that knows which blocks are
     * not valid names those in `invalid` instead, no later than the request in `received`.
     */
    const kvf_request_key *failed;
    size_t failed_count;
    const kvf_group_block *invalid; /**< blocks without valid content, of any requests */
    size_t invalid_count;
    uint32_t expected; /**< from this step on this many workers are expected; 0: as before */
    uint32_t riders;   /**< kvf_rider, or-ed */
} kvf_worker_output;

/** What is counted towards the expected number of workers. */
typedef enum kvf_count_rule {
    /** Workers: one that repeats itself counts once. Never waits for more than there are workers. */
    KVF_COUNT_WORKERS = 0,
    /** Reports of any workers, as vLLM's KVOutputAggregator does. */
    KVF_COUNT_REPORTS = 1,
} kvf_count_rule;

/** A zeroed struct with a worker_count means the defaults. */
typedef struct kvf_aggregator_options {
    size_t struct_size;    /**< sizeof(kvf_aggregator_options) */
    uint32_t worker_count; /**< outputs in a step; 1 to 1048576 */
    uint32_t expected;     /**< workers that report each request; 0: all */
    kvf_count_rule rule;
    /**
     * Drop the whole step when the selected worker has no output, as vLLM's KVOutputAggregator does. The reports of the
     * other workers are then lost, and requests may hang: for comparisons only.
     */
    bool drops_steps;
    /** Requests remembered that only some workers have reported, for sent and received each; beyond it the oldest is
     * forgotten and named in `forgotten` [65536] */
    uint32_t max_pending;
} kvf_aggregator_options;

typedef struct kvf_aggregator kvf_aggregator;

/** @return KVF_OK, KVF_E_INVALID, KVF_E_RANGE (worker_count; `expected` beyond it when workers are counted),
 *          KVF_E_NOMEM */
KVF_API kvf_status kvf_aggregator_create(const kvf_aggregator_options *options, kvf_aggregator **out);

/** Frees an aggregator; NULL is accepted. */
KVF_API void kvf_aggregator_free(kvf_aggregator *aggregator);

/** The sum of a step. All pointers are owned by the aggregator and valid until its next call. */
typedef struct kvf_aggregate {
    size_t struct_size; /**< sizeof(kvf_aggregate), set by the caller */
    /** The worker whose output stands for all; KVF_NO_WORKER: the selected worker has none in this step. The rest of
     * this struct counts in any case */
    uint32_t output;
    uint32_t expected; /**< after this step */
    /* Each request once, ordered by the bytes of the id, then by generation. */
    const kvf_request_key *sent, *received;
    const kvf_request_key *failed;    /**< those of `received` that failed on at least one worker */
    const kvf_request_key *forgotten; /**< dropped for lack of room, see max_pending */
    size_t sent_count, received_count, failed_count, forgotten_count;
    const kvf_group_block *invalid; /**< of all workers, each once, ascending */
    size_t invalid_count;
    const uint32_t *with_stats, *with_meta,
        *with_events; /**< workers that have them, in the order in which to merge
                                                               them: ascending */
    uint32_t with_stats_count, with_meta_count, with_events_count;
} kvf_aggregate;

/**
 * Adds up one step.
 *
 * @param outputs   one for each worker; NULL: the worker has no output. An output without a connector's part has all
 *                  counts 0
 * @param count     must be the number of workers
 * @param selected  the worker whose output the engine passes on
 * @return KVF_OK; KVF_E_INVALID (count; an output missing though the selected worker has one; a NULL list);
 *         KVF_E_RANGE (selected; a longer id than KVF_REQUEST_ID_BYTES); KVF_E_NOMEM. After an error
 *         nothing has been counted
 *
 * Cost: O(reports log reports). Unknown requests are counted like any other.
 */
KVF_API kvf_status kvf_aggregator_step(kvf_aggregator *aggregator, const kvf_worker_output *const *outputs,
                                       uint32_t count, uint32_t selected, kvf_aggregate *out);

/** Forgets what was reported of a request that has ended; does nothing if nothing was reported. */
KVF_API void kvf_aggregator_forget(kvf_aggregator *aggregator, const kvf_request_key *request);

/** Requests that some workers have reported, but not all. */
KVF_API size_t kvf_aggregator_pending(const kvf_aggregator *aggregator);

/* ---- rules both sides must agree on ---------------------------------------------------------- */

/**
 * The length of an id without the suffix that front ends add to make it unique: a hyphen and eight hexadecimal digits
 * at its very end. The id that a proxy gave is the same on both engines; the suffix is not.
 */
KVF_API size_t kvf_base_request_bytes(kvf_request_id id);

/**
 * How many tokens of a prompt a producer computes and hands over. A state cannot be stepped back, so with state groups
 * the producer leaves the last token to the consumer; with speculation that looks `lookahead_tokens` ahead, it leaves
 * all but one of those. A prompt of which nothing would be left is computed whole.
 */
KVF_API uint64_t kvf_prefill_token_count(uint64_t prompt_tokens, bool has_state, uint32_t lookahead_tokens);

/**
 * Whether a lease has ended, or will end within `margin_ns`.
 *
 * @param now_ns           our clock
 * @param expiry_ns        on the clock of the engine that gave the lease; 0: the lease has no end
 * @param clock_offset_ns  that clock minus ours
 */
KVF_API bool kvf_lease_expired(uint64_t now_ns, uint64_t expiry_ns, int64_t clock_offset_ns,
                               uint64_t margin_ns);

/** One reading of another clock. This struct stays as it is. */
typedef struct kvf_clock_probe {
    int64_t sent_ns, received_ns; /**< our clock */
    int64_t remote_ns;            /**< the other clock, read in between */
} kvf_clock_probe;

/**
 * The other clock minus ours, by the probe with the shortest round trip: its reading minus the middle of the trip.
 *
 * @param error_ns  receives half of that round trip, the most by which the offset may be wrong; may be NULL
 * @return KVF_OK, KVF_E_INVALID (no probes; one was received before it was sent), KVF_E_OVERFLOW
 */
KVF_API kvf_status kvf_clock_offset(const kvf_clock_probe *probes, size_t count, int64_t *offset_ns,
                                    uint64_t *error_ns);

/* ---- the schedule -----------------------------------------------------------------------------------------
 * One for each engine, in the process of its scheduler; for consumers, producers and engines that are both.
 *
 * A request that loads:                                A request that serves:
 *
 *   waiting --match, allocated--> planned                 owed --finished--> planned
 *      |                            | take                  |                   | take
 *      |                         loading --+                |                holding --+
 *      |                            |      | abort          |                   |      | abort
 *      v                        received   v                v                  sent    v
 *    ended <------------------------+-- stopping          ended <---------------+-- stopping
 *
 * Blocks named in an instruction that was taken are not free before the workers have reported the request, however it
 * ends. Instructions that were not taken are withdrawn, and workers never see them.
 */

typedef struct kvf_schedule kvf_schedule;

/** What becomes of a request whose load failed. */
typedef enum kvf_load_policy {
    KVF_LOAD_RECOMPUTE = 0,
    KVF_LOAD_FAIL = 1,
} kvf_load_policy;

/**
 * How the cache of a request is found: made by the producer's kvf_schedule_finished(), and carried to the consumer by
 * the component that routes requests.
 */
typedef struct kvf_transfer_params {
    size_t struct_size;     /**< sizeof(kvf_transfer_params) */
    const char *engine;     /**< the producer: see kvf_contact of kvferry/agent.h */
    const char *endpoint;   /**< NULL or "": known by other means */
    const char *public_key; /**< NULL or "": no encryption */
    kvf_request_id id;      /**< what both engines call the transfer, up to 1024 bytes */
    uint64_t tokens;        /**< tokens that the producer has; 0: those of kvf_prefill_token_count() */
    uint64_t expiry_ns;     /**< on the producer's clock; 0: not known */
    bool push;              /**< the producer writes; otherwise the consumer reads */
} kvf_transfer_params;

/** Durations are in nanoseconds; 0 means the default in brackets. */
typedef struct kvf_schedule_options {
    size_t struct_size;     /**< sizeof(kvf_schedule_options) */
    const kvf_model *model; /**< needed; retained */
    /** Needed: for the logical blocks of each group, as in kvf_group_shard_desc; 1 for states. Copied. */
    const uint32_t *tokens_per_block;
    const char *engine; /**< needed to serve: our name, and the endpoint where we are met; copied */
    const char *endpoint;
    const char *public_key;
    uint64_t incarnation;      /**< any number that differs each time this process starts */
    uint32_t lookahead_tokens; /**< see kvf_prefill_token_count() */
    uint64_t lease_ns;         /**< how long blocks are kept for a consumer without a heartbeat [30 s] */
    uint64_t heartbeat_ns;     /**< between heartbeats [a sixth of the lease] */
    uint64_t margin_ns;        /**< a load is not begun if its lease ends this soon [5 s] */
    uint64_t deadline_ns;      /**< a load, or a push, fails after this time [120 s] */
    kvf_load_policy policy;
    /**
     * The engine itself sends heartbeats for waiting requests, see kvf_schedule_heartbeats(). Otherwise workers are
     * told to reserve, and their agents send them.
     */
    bool heartbeats;
    uint32_t max_requests; /**< at once, including ended ones whose blocks are not free [65536] */
} kvf_schedule_options;

/** @return KVF_OK, KVF_E_INVALID, KVF_E_RANGE, KVF_E_NOMEM */
KVF_API kvf_status kvf_schedule_create(const kvf_schedule_options *options, kvf_schedule **out);

/** Frees a schedule; NULL is accepted. */
KVF_API void kvf_schedule_free(kvf_schedule *schedule);

/* -- a request arrives */

typedef struct kvf_schedule_request {
    size_t struct_size; /**< sizeof(kvf_schedule_request) */
    kvf_request_id id;  /**< 1 to KVF_REQUEST_ID_BYTES bytes. Copied */
    uint64_t prompt_tokens;
    const kvf_transfer_params *source; /**< where its cache is; NULL: it will be computed. Copied */
    int64_t clock_offset_ns;           /**< the source's clock minus ours */
    bool serves;                       /**< other engines will want its cache, see kvf_schedule_finished() */
    uint32_t consumers;                /**< how many; 0: 1 */
    bool push;                         /**< we write the cache to them, instead of waiting until they read */
    /** The consumers' id of the transfer; data NULL: the base of `id`. Requests whose ids have the same base, and that are
     * pushed at the same time, need other ones. Copied. */
    kvf_request_id push_id;
} kvf_schedule_request;

/**
 * Adds a request.
 *
 * @param generation  receives the generation, a number that is never used again; may be NULL
 * @return KVF_OK; KVF_E_EXISTS (a request of this id has not ended); KVF_E_RANGE (ids; a source whose state covers more
 *         tokens than a consumer can use: add the request without the source); KVF_E_LIMIT (max_requests);
 *         KVF_E_INVALID; KVF_E_NOMEM
 *
 * In the functions below generation 0 of a key means the latest one of the id. All of them return KVF_E_NOT_FOUND for a
 * request that is not known or has ended, and change nothing when they fail.
 */
KVF_API kvf_status kvf_schedule_add(kvf_schedule *schedule, const kvf_schedule_request *request,
                                    uint64_t now_ns, uint64_t *generation);

/**
 * How many tokens beyond the `computed_tokens` that are cached here can be loaded. The request then has to wait from
 * kvf_schedule_allocated() on until kvf_schedule_update() names it; others run meanwhile. Changes nothing, except that
 * a request whose lease has ended will be computed from then on.
 *
 * @param tokens  receives the number; 0 if there is nothing to load, or no longer
 */
KVF_API kvf_status kvf_schedule_match(kvf_schedule *schedule, const kvf_request_key *request,
                                      uint64_t computed_tokens, uint64_t now_ns, uint64_t *tokens);

/**
 * Gives a request its blocks; the workers are told to fill them. With `load_tokens` 0 everything is cached here: the
 * producer is told that it may free its blocks, and the request runs. Once the load has begun, further calls do
 * nothing.
 *
 * @param tables           one for each group, covering all tokens that the group needs; state groups: the last entry is
 *                         the block of the state. Copied
 * @param computed_tokens  cached here
 * @param load_tokens      to load after those; at most what kvf_schedule_match() said
 * @param waits            receives whether the request must wait; may be NULL
 * @return KVF_OK; KVF_E_RANGE (more tokens than there are, or a table that does not cover them); KVF_E_TIMEOUT (the
 *         lease has ended meanwhile: compute the request); KVF_E_INVALID; KVF_E_NOT_FOUND; KVF_E_NOMEM
 */
KVF_API kvf_status kvf_schedule_allocated(kvf_schedule *schedule, const kvf_request_key *request,
                                          const kvf_block_table *tables, uint32_t group_count,
                                          uint64_t computed_tokens, uint64_t load_tokens, uint64_t now_ns,
                                          bool *waits);

/**
 * Lets workers push a request before it has finished, whether or not it is computed. The workers open the push, and
 * tell their agents which layers and chunks are ready, with an event to wait for if a device computes them
 * (kvf_push_chunk).
 *
 * @param tables  all blocks of the prompt; NULL, with a group_count of 0: none yet, for an engine that allocates blocks
 *                chunk by chunk and names them with each chunk
 * @param tokens  of the prompt
 * @return KVF_OK, KVF_E_INVALID (not a request that is pushed, or called before), KVF_E_RANGE,
 *         KVF_E_NOT_FOUND, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_schedule_push(kvf_schedule *schedule, const kvf_request_key *request,
                                     const kvf_block_table *tables, uint32_t group_count, uint64_t tokens);

/* -- a request ends */

typedef struct kvf_schedule_end {
    size_t struct_size; /**< sizeof(kvf_schedule_end), set by the caller */
    bool keep;          /**< the blocks are not free before kvf_schedule_update() names the request */
    /** For the consumer; owned by the schedule, valid until its next call. NULL: nothing to hand over. */
    const kvf_transfer_params *params;
} kvf_schedule_end;

/**
 * Says that a request has finished. One that serves is kept for its consumers while they send heartbeats.
 *
 * @param tables  the blocks it leaves behind, as for kvf_schedule_allocated(); not used if the request does not serve
 * @param tokens  computed
 * @return KVF_OK; KVF_E_RANGE (a table that does not cover the tokens); KVF_E_INVALID (the request is still being
 *         loaded); KVF_E_NOT_FOUND; KVF_E_NOMEM
 */
KVF_API kvf_status kvf_schedule_finished(kvf_schedule *schedule, const kvf_request_key *request,
                                         const kvf_block_table *tables, uint32_t group_count, uint64_t tokens,
                                         uint64_t now_ns, kvf_schedule_end *out);

/**
 * Aborts a request at any point, even while its blocks are kept after it has finished. The engine at the other end is
 * told.
 *
 * @param blocks_free  receives whether its blocks are free now; otherwise kvf_schedule_update() names it later
 */
KVF_API kvf_status kvf_schedule_abort(kvf_schedule *schedule, const kvf_request_key *request,
                                      bool *blocks_free);

/**
 * Takes a request's blocks away; the request will come again. A load that workers have not seen is withdrawn and can be
 * matched again; one that is under way is cancelled, and the request will be computed.
 *
 * @param blocks_free  as of kvf_schedule_abort()
 */
KVF_API kvf_status kvf_schedule_preempted(kvf_schedule *schedule, const kvf_request_key *request,
                                          bool *blocks_free);

/* -- what the workers are told */

typedef enum kvf_instruction_kind {
    /**
     * Consumer: keep the producer's blocks alive until a PULL, NOTIFY or CANCEL follows. Not reported: if it fails, the
     * PULL fails.
     */
    KVF_INSTRUCT_RESERVE = 1,
    KVF_INSTRUCT_PULL = 2,   /**< consumer: read; report `received` */
    KVF_INSTRUCT_EXPECT = 3, /**< consumer: let the producer write; report `received` */
    KVF_INSTRUCT_NOTIFY =
        4,                 /**< consumer: tell the producer that it may free, nothing is wanted; no report */
    KVF_INSTRUCT_HOLD = 5, /**< producer: keep for consumers to read; report `sent` */
    KVF_INSTRUCT_PUSH = 6, /**< producer: write to consumers; report `sent` */
    KVF_INSTRUCT_CANCEL =
        7, /**< stop the instruction that `cancels` names; report as that would, except for RESERVE */
} kvf_instruction_kind;

/**
 * An instruction that every worker carries out; owned by the schedule until the next kvf_schedule_take(). With an
 * agent:
 *
 *   RESERVE   kvf_agent_pull() without groups
 *   PULL      kvf_agent_pull(); kvf_agent_pull_into() when `reserved`
 *   EXPECT    kvf_agent_expect()
 *   NOTIFY    the same three with every group empty: kvf_agent_expect() when `push`
 *   HOLD      kvf_agent_hold()
 *   PUSH      kvf_agent_push(), and kvf_agent_push_ready() as layers and chunks become ready
 *   CANCEL    kvf_agent_cancel() of the ticket that one of these gave
 *
 * A request is reported with the event of its ticket that says `blocks_free`, and not before.
 */
typedef struct kvf_instruction {
    kvf_instruction_kind kind;
    kvf_instruction_kind cancels;  /**< CANCEL only */
    kvf_request_key request;       /**< the key for reports */
    kvf_request_id transfer_id;    /**< the id for agents */
    const kvf_group_steps *groups; /**< PULL, EXPECT, HOLD, PUSH, one for each group; NULL otherwise */
    uint32_t group_count;
    const char *engine, *endpoint, *public_key; /**< of the producer, for consumers; "" when there is none */
    uint64_t deadline_ns; /**< PULL, EXPECT, RESERVE, PUSH: fails after this time. HOLD: the lease */
    uint32_t consumers;   /**< HOLD, PUSH */
    bool reserved;        /**< PULL, NOTIFY: continue the RESERVE that went before */
    bool push;            /**< NOTIFY: the producer would have pushed */
    uint64_t unused[6];   /**< room for fields to come */
} kvf_instruction;

/**
 * Takes the instructions made since the last call, each once, in order. Each goes to every worker.
 *
 * @return KVF_OK (also with none), KVF_E_NOMEM (none is taken)
 */
KVF_API kvf_status kvf_schedule_take(kvf_schedule *schedule, const kvf_instruction **instructions,
                                     size_t *count);

/* -- what the workers answer */

typedef enum kvf_load_outcome {
    KVF_LOADED = 0,         /**< run it */
    KVF_LOADED_IN_PART = 1, /**< run it from token `tokens` on */
    KVF_LOAD_FAILED = 2,    /**< by policy: end it */
} kvf_load_outcome;

typedef struct kvf_loaded {
    kvf_request_key request;
    kvf_load_outcome outcome;
    /** Leading tokens whose cache is valid. If computing cannot resume inside the load (states, tokens before a sliding
     * window): those that were cached here before */
    uint64_t tokens;
    const kvf_group_block *invalid; /**< its blocks that do not have the content that was asked for */
    size_t invalid_count;
    uint64_t unused[2]; /**< room for fields to come */
} kvf_loaded;

/**
 * A request whose blocks were kept after it was finished, aborted or preempted, and are free now. This struct stays
 * as it is.
 */
typedef struct kvf_freed {
    kvf_request_key request;
    bool of_load; /**< the request was loading into the blocks; otherwise consumers were reading them */
} kvf_freed;

/** Owned by the schedule, valid until its next call. */
typedef struct kvf_schedule_news {
    size_t struct_size;       /**< sizeof(kvf_schedule_news), set by the caller */
    const kvf_loaded *loaded; /**< requests that need not wait any more; they own their blocks again */
    size_t loaded_count;
    const kvf_freed *freed;
    size_t freed_count;
} kvf_schedule_news;

/**
 * Takes in the sum of a step. Requests and generations that the schedule does not know are skipped.
 *
 * @param aggregate  of kvf_aggregator_step(), or the engine's own, with `invalid` ascending; the lists of riders are
 *                   not read
 * @return KVF_OK, KVF_E_INVALID, KVF_E_NOMEM (nothing was taken in: call again with the same aggregate)
 */
KVF_API kvf_status kvf_schedule_update(kvf_schedule *schedule, const kvf_aggregate *aggregate,
                                       kvf_schedule_news *out);

/* -- signs of life */

/** A request that waits in the queue, and whose producer must not free it meanwhile. */
typedef struct kvf_heartbeat {
    const char *engine, *endpoint, *public_key;
    kvf_request_id transfer_id;
    uint64_t unused[2]; /**< room for fields to come */
} kvf_heartbeat;

/**
 * The heartbeats that are due, ordered by engine and endpoint; only with the option `heartbeats`. Agents keep requests
 * alive that are being loaded.
 *
 * @param beats  receives a list owned by the schedule, valid until its next call
 */
KVF_API kvf_status kvf_schedule_heartbeats(kvf_schedule *schedule, uint64_t now_ns,
                                           const kvf_heartbeat **beats, size_t *count);

/* -- counts */

typedef struct kvf_schedule_counts {
    size_t struct_size;  /**< sizeof(kvf_schedule_counts), set by the caller */
    size_t requests;     /**< known, in any state */
    size_t waiting;      /**< can load, have no blocks yet */
    size_t loading;      /**< planned or under way */
    size_t serving;      /**< blocks held for, or pushed to, consumers */
    size_t stopping;     /**< cancelled, not reported yet */
    size_t instructions; /**< not taken yet */
} kvf_schedule_counts;

/** @return KVF_OK, KVF_E_INVALID */
KVF_API kvf_status kvf_schedule_count(const kvf_schedule *schedule, kvf_schedule_counts *out);

#ifdef __cplusplus
}
#endif

#endif
