/*
 * The quantities that vLLM's KV connectors define, for one rank of a local (decode) engine and the remote (prefill)
 * engines it reads from: tp_ratio, handshake target ranks, source ranks, head slots ...
 *
 * They all follow from one rule for the ranks' shares. An axis of U units (KV heads; the shares of a state)
 * spread over n ranks gives rank r the units [rU/n, (r+1)U/n); with more ranks than units rank r holds unit
 * rU/n, which neighbours then share. Source ranks, slots and offsets are intersections of such ranges.
 *
 * These quantities are defined for shapes that divide. For others the functions return KVF_E_NOT_EXPRESSIBLE and never
 * a rounded number; a plan (plan.h) needs none of them and still works. Lengths, addresses and ids come from peers:
 * where vLLM's connector asserts, a function here returns an error with the values.
 *
 * Lists that a function makes (kvf_ids, kvf_block_lists, ...) belong to the caller, who frees them with the function
 * named beside the type; their contents before the call are not freed, and after an error they are unchanged. A zeroed
 * list is empty.
 *
 * A kvf_topology may be read by any thread as long as no thread registers or unregisters an engine. The other functions
 * use only their arguments.
 */
#ifndef KVFERRY_CONNECTOR_TOPOLOGY_H
#define KVFERRY_CONNECTOR_TOPOLOGY_H

#include <stdbool.h>

#include <kvferry/shard.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- why a question was refused -------------------------------------------------------------- */

/** The reason of an error of these headers, more precise than its status. The numbers are stable. */
typedef enum kvf_refusal {
    KVF_REFUSAL_NONE = 0, /**< the last error has none of these reasons: a NULL, a zero, no memory ... */
    KVF_REFUSAL_TP_NOT_DIVISIBLE = 1,
    KVF_REFUSAL_BLOCK_SIZE_NOT_DIVISIBLE = 2,
    KVF_REFUSAL_HEADS_NOT_DIVISIBLE = 3,
    KVF_REFUSAL_REGISTER_SELF = 4,
    KVF_REFUSAL_UNKNOWN_ENGINE = 5,
    KVF_REFUSAL_MAMBA_WITH_TENSOR_SHAPE = 6,
    KVF_REFUSAL_LENGTH_NOT_DIVISIBLE = 7, /**< bytes or blocks that do not divide into equal pieces */
    KVF_REFUSAL_DECODE_LONGER_THAN_PREFILL = 8,
    KVF_REFUSAL_UNPAIRABLE_STATE_SLOTS = 9,
    KVF_REFUSAL_PADDING_EXCEEDED = 10,
    KVF_REFUSAL_GROUP_WITHOUT_REGION = 11,
    KVF_REFUSAL_REMOTE_DOES_NOT_COVER = 12,
    KVF_REFUSAL_REPLICATED_HEADS_WITH_MORE_PREFILL_RANKS = 13,
    KVF_REFUSAL_BLOCK_LEN_MISMATCH = 14,
    KVF_REFUSAL_BLOCK_SIZE_WITH_SPLIT_READS = 15,
    KVF_REFUSAL_BLOCK_SIZE_WITH_HYBRID = 16,
    KVF_REFUSAL_STATE_TYPE_NOT_SUPPORTED = 17,
    KVF_REFUSAL_CONV_NOT_DECOMPOSABLE = 18,
    KVF_REFUSAL_GROUP_NOT_SPLIT_PURELY =
        19,                          /**< page groups split neither by heads alone nor by tokens alone */
    KVF_REFUSAL_DCP_NOT_LATENT = 20, /**< token shares of a cache that has heads */
    KVF_REFUSAL_NOT_HYBRID = 21,     /**< a question about state for a model that has none */
    KVF_REFUSAL_NO_LAYERS = 22,      /**< an engine was described without a layer or region */
} kvf_refusal;

/** The reason of this thread's last failing call to a function of these headers. */
KVF_API kvf_refusal kvf_topology_refusal(void);

/** The connector's word for a reason: "tp_not_divisible" ...; "none" for any other number. */
KVF_API const char *kvf_refusal_name(kvf_refusal refusal);

/* ---- lists ----------------------------------------------------------------------------------- */

/** Ranks, block ids or descriptor ids, in an order that matters. Owned; kvf_ids_free(). */
typedef struct kvf_ids {
    uint64_t *at;
    size_t count;
} kvf_ids;

/** Frees the numbers and empties the list; NULL is accepted. */
KVF_API void kvf_ids_free(kvf_ids *list);

/** One list of block ids for each group. Owned; kvf_block_lists_free(). */
typedef struct kvf_block_lists {
    kvf_ids *groups;
    size_t count;
} kvf_block_lists;

/** Frees every list and empties the set; NULL is accepted. */
KVF_API void kvf_block_lists_free(kvf_block_lists *lists);

/** Frees a text that a function of these headers made; NULL is accepted. */
KVF_API void kvf_topology_free_text(char *text);

/* ---- the local rank and the engines it knows ------------------------------------------------- */

/** What a group caches (GroupKind). */
typedef enum kvf_cache_kind {
    KVF_CACHE_FULL = 0, /**< full attention */
    KVF_CACHE_SWA = 1,  /**< sliding window */
    KVF_CACHE_MLA = 2,  /**< one latent for all heads */
    KVF_CACHE_SSM = 3,  /**< recurrent state: a block is a whole state */
} kvf_cache_kind;

/** Which version's conventions to follow, where versions of the connector differ in what a peer or a log sees. */
typedef enum kvf_dialect {
    KVF_DIALECT_V0_32 = 0,   /**< vLLM 0.32 */
    KVF_DIALECT_PR_40731 = 1 /**< as merged in pull requests 39529 and 40731 */
} kvf_dialect;

/** One rank of the local engine. */
typedef struct kvf_topology_desc {
    size_t struct_size;      /**< sizeof(kvf_topology_desc) */
    const char *engine_id;   /**< copied; may be empty */
    uint32_t tp_size;        /**< at least 1 */
    uint32_t tp_rank;        /**< less than tp_size */
    uint32_t dcp_size;       /**< decode context parallelism; divides tp_size; 0 means 1 */
    uint32_t block_size;     /**< tokens of a kernel block; at least 1 */
    uint32_t total_kv_heads; /**< of the whole model; at least 1; not used when is_mla */
    bool is_mla;             /**< attention keeps one latent, which every rank holds */
    bool is_mamba;           /**< a hybrid: some groups keep recurrent state */
    uint64_t block_bytes;    /**< of one kernel block in one region on this rank; 0: not known */
    kvf_dialect dialect;
} kvf_topology_desc;

typedef struct kvf_topology kvf_topology;

/**
 * Makes the view of one local rank.
 *
 * @param desc  copied
 * @param out   receives a topology owned by the caller, see kvf_topology_free()
 * @return KVF_OK, KVF_E_INVALID, KVF_E_RANGE, KVF_E_NOMEM; the detail names the field
 */
KVF_API kvf_status kvf_topology_create(const kvf_topology_desc *desc, kvf_topology **out);

/** Frees a topology and what was registered with it; NULL is accepted. */
KVF_API void kvf_topology_free(kvf_topology *topology);

/** The facts of a remote engine. */
typedef struct kvf_engine_transfer_info {
    size_t struct_size;                   /**< sizeof(kvf_engine_transfer_info) */
    uint32_t tp_size;                     /**< at least 1 */
    uint32_t dcp_size;                    /**< divides tp_size; 0 means 1 */
    uint32_t pp_rank;                     /**< for kvf_topology_describe() */
    uint32_t block_size;                  /**< tokens of a kernel block; at least 1 */
    uint32_t physical_blocks_per_logical; /**< kernel blocks of a logical block; 0 means 1 */
    uint64_t block_bytes;                 /**< of one kernel block in one region; 0: not known */
} kvf_engine_transfer_info;

/**
 * Checks whether the local rank can be paired with an engine. The first of these rules that is broken is the refusal:
 *
 *     one tp_size divides the other                               tp_not_divisible
 *     token shares only of a latent                               dcp_not_latent
 *     KV heads divide over the ranks of both sides                heads_not_divisible
 *     the remote block size divides the local one                 block_size_not_divisible
 *     a token of a head has as many bytes on both sides,          block_len_mismatch
 *     where both block lengths are known
 *
 * No rule says that a source rank must be a handshake target, because sources are chosen among the targets.
 *
 * @return KVF_OK, KVF_E_INVALID, KVF_E_RANGE, KVF_E_NOT_EXPRESSIBLE, KVF_E_MISMATCH (block lengths),
 *         KVF_E_OVERFLOW
 */
KVF_API kvf_status kvf_topology_check(const kvf_topology *topology, const kvf_engine_transfer_info *remote);

/**
 * Registers a remote engine. The first registration of an id stays: a second one changes nothing and returns
 * the facts of the first.
 *
 * For a hybrid, kvf_topology_check() must accept the engine first. For a dense model any engine whose facts are in
 * range is registered, because a plan (plan.h) may be able to read from an engine that kvf_topology_check() refuses.
 * vLLM's connector registers it too, and asserts when it first computes a quantity. Call kvf_topology_check() to find
 * out at once.
 *
 * @param stored  receives the facts on record; NULL if not wanted
 * @return KVF_OK, KVF_E_EXISTS (the local engine's own id), KVF_E_INVALID, KVF_E_RANGE, KVF_E_NOMEM; for a hybrid also
 *         as kvf_topology_check()
 */
KVF_API kvf_status kvf_topology_register(kvf_topology *topology, const char *engine_id,
                                         const kvf_engine_transfer_info *remote,
                                         kvf_engine_transfer_info *stored);

/**
 * The facts of a registered engine.
 *
 * @return KVF_OK, KVF_E_NOT_FOUND
 */
KVF_API kvf_status kvf_topology_get(const kvf_topology *topology, const char *engine_id,
                                    kvf_engine_transfer_info *out);

/** Forgets an engine; an id that is not registered is ignored. */
KVF_API void kvf_topology_unregister(kvf_topology *topology, const char *engine_id);

/* ---- ratios and flags ------------------------------------------------------------------------ */

/**
 * tp_size / remote tp_size when the local engine has at least as many ranks, else -(remote / local).
 *
 * @return KVF_OK, KVF_E_NOT_EXPRESSIBLE (neither divides the other)
 */
KVF_API kvf_status kvf_tp_ratio(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                int64_t *out);

/**
 * Local block size / remote block size.
 *
 * @return KVF_OK, KVF_E_NOT_EXPRESSIBLE (the remote size does not divide the local one)
 */
KVF_API kvf_status kvf_block_size_ratio(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                        uint32_t *out);

/** Whether the remote engine has more ranks than the model has KV heads, so that ranks share a head. */
KVF_API bool kvf_is_kv_replicated(const kvf_topology *topology, const kvf_engine_transfer_info *remote);

/** Whether several remote ranks hold the same cells: a latent, or more ranks than heads. */
KVF_API bool kvf_replicates_kv_cache(const kvf_topology *topology, const kvf_engine_transfer_info *remote);

/** Whether several local ranks hold the same cells. */
KVF_API bool kvf_local_replicates_kv_cache(const kvf_topology *topology);

/**
 * The least number of KV heads that a rank of an engine of `tp_size` ranks stores: max(1, heads / tp_size). If heads do
 * not divide, some ranks store one more: see kvf_physical_head_range().
 */
KVF_API uint32_t kvf_physical_heads(uint32_t total_kv_heads, uint32_t tp_size);

/**
 * The KV heads stored on one rank.
 *
 * @return KVF_OK, KVF_E_INVALID, KVF_E_RANGE, KVF_E_NOT_EXPRESSIBLE (fewer ranks than heads, and the heads do
 *         not divide over them)
 */
KVF_API kvf_status kvf_physical_head_range(uint32_t tp_size, uint32_t total_kv_heads, uint32_t rank,
                                           kvf_range *out);

/* ---- ranks ----------------------------------------------------------------------------------- */

/**
 * The remote ranks to shake hands with, ascending: those whose share of the model overlaps ours; if the remote engine
 * uses decode context parallelism, those that keep tokens that we need.
 *
 * @return KVF_OK, KVF_E_NOT_EXPRESSIBLE, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_handshake_target_ranks(const kvf_topology *topology,
                                              const kvf_engine_transfer_info *remote, kvf_ids *out);

/** The remote ranks that hold cells of this rank: the same as kvf_handshake_target_ranks(). */
KVF_API kvf_status kvf_target_remote_ranks(const kvf_topology *topology,
                                           const kvf_engine_transfer_info *remote, kvf_ids *out);

/** Which share of the tokens this rank keeps: tp_rank modulo dcp_size. */
KVF_API uint32_t kvf_dcp_rank(const kvf_topology *topology);

/** The remote ranks that keep tokens that we need, if the remote engine shards tokens; otherwise empty. */
KVF_API kvf_status kvf_dcp_source_ranks(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                        kvf_ids *out);

/**
 * How many local ranks read or only notify a remote rank that this rank reads. That remote rank waits for all of them.
 *
 * @return KVF_OK, KVF_E_NOT_EXPRESSIBLE
 */
KVF_API kvf_status kvf_consumers_per_source(const kvf_topology *topology,
                                            const kvf_engine_transfer_info *remote, uint32_t *out);

/* ---- the mapping of PR 40731 (TPMapping) ----------------------------------------------------- */

/** The slot of a rank that holds none of our heads. */
#define KVF_NO_SLOT UINT64_MAX

/** The remote ranks that each group is read from. Owned; kvf_tp_mapping_free(). */
typedef struct kvf_tp_mapping {
    size_t group_count;
    kvf_ids *source_ranks;    /**< one list for each group, ascending */
    kvf_ids all_source_ranks; /**< their union, ascending */
    /** Parallel to all_source_ranks: the piece of the local heads that the rank has */
    uint64_t *attention_slot;
    /** Times the local block length: the byte offset of our heads in the remote block */
    uint64_t rank_offset_factor;
    uint32_t local_consumers; /**< kvf_consumers_per_source() */
} kvf_tp_mapping;

/**
 * Finds the source ranks of every group. The kinds say which groups keep state; is_mamba of the topology is not used.
 *
 * Attention reads each local head once, from the first target rank that holds it; a latent is read from the
 * first target rank; state is always sharded, and is read from every target rank.
 *
 * @param kinds  one for each group
 * @return KVF_OK, KVF_E_INVALID, KVF_E_NOT_EXPRESSIBLE, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_tp_mapping_build(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                        const kvf_cache_kind *kinds, size_t group_count, kvf_tp_mapping *out);

/** Frees what a mapping holds and zeroes it; NULL is accepted. */
KVF_API void kvf_tp_mapping_free(kvf_tp_mapping *mapping);

/** Finds the slot of one of all_source_ranks: KVF_OK, KVF_E_NOT_FOUND. */
KVF_API kvf_status kvf_tp_mapping_slot(const kvf_tp_mapping *mapping, uint64_t rank, uint64_t *out);

/**
 * Whether local blocks must be cut into one piece for each source: always if prefill has more ranks, except for a
 * latent with one source.
 */
KVF_API bool kvf_needs_split(bool is_mla, int64_t tp_ratio, size_t source_rank_count);

/* ---- the quantities of PR 39529 for hybrids --------------------------------------------------
 *
 * They describe models that keep attention and recurrent state. With a topology that is not is_mamba, every function
 * of this section and kvf_compute_split_handle_data() fails: KVF_E_INVALID, KVF_REFUSAL_NOT_HYBRID. For a dense model
 * use kvf_tp_mapping_build().
 */

/** The remote ranks that attention is read from. Errors as kvf_tp_mapping_build(). */
KVF_API kvf_status kvf_fa_source_ranks(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                       kvf_ids *out);

/** The remote ranks that state is read from. Errors as kvf_tp_mapping_build(). */
KVF_API kvf_status kvf_state_source_ranks(const kvf_topology *topology,
                                          const kvf_engine_transfer_info *remote, kvf_ids *out);

/** The union of the two. Errors as kvf_tp_mapping_build(). */
KVF_API kvf_status kvf_all_source_ranks(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                        kvf_ids *out);

/**
 * The piece of the local heads that a remote rank holds, numbered by attention source rank.
 *
 * @return KVF_OK, KVF_E_NOT_FOUND (that rank holds no head of ours), KVF_E_NOT_EXPRESSIBLE, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_fa_head_slot(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                    uint32_t remote_rank, uint64_t *out);

/** Whether only state is read from a remote rank, because another source rank has the same heads. */
KVF_API kvf_status kvf_should_skip_fa(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                      uint32_t remote_rank, bool *out);

/**
 * Byte offset of our first head inside the remote rank's K (or V) block.
 *
 * @param kv_block_bytes  length of a local K (or V) block
 * @return KVF_OK, KVF_E_NOT_EXPRESSIBLE, KVF_E_OVERFLOW, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_fa_rank_offset(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                      uint64_t kv_block_bytes, uint64_t *out);

/** Whether local blocks are read in pieces from several ranks. */
KVF_API kvf_status kvf_needs_split_handles(const kvf_topology *topology,
                                           const kvf_engine_transfer_info *remote, bool *out);

/**
 * Bytes of one K (or V) descriptor of attention: half of the shorter of the two blocks.
 *
 * @return KVF_OK, KVF_E_INVALID (a block length is not known; the topology is not a hybrid's),
 *         KVF_E_NOT_EXPRESSIBLE (it is odd)
 */
KVF_API kvf_status kvf_fa_descriptor_bytes(const kvf_topology *topology,
                                           const kvf_engine_transfer_info *remote, uint64_t *out);

/**
 * The block lists to use with one source rank: the lists of attention groups are empty on both sides if those heads are
 * read from another rank.
 *
 * @return KVF_OK, KVF_E_INVALID, KVF_E_NOT_EXPRESSIBLE, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_filter_block_ids_for_rank(const kvf_topology *topology,
                                                 const kvf_engine_transfer_info *remote,
                                                 const kvf_cache_kind *kinds, uint32_t remote_rank,
                                                 const kvf_block_lists *local,
                                                 const kvf_block_lists *remote_lists,
                                                 kvf_block_lists *local_out, kvf_block_lists *remote_out);

/* ---- layout and summary ---------------------------------------------------------------------- */

/** How a backend lays out its cache. */
typedef struct kvf_layout_flags {
    bool is_kv_layout_blocks_first; /**< blocks are the outermost axis, K and V inside each */
    bool cross_layers_blocks;       /**< one tensor over all layers */
    bool split_k_and_v;             /**< K and V are registered as regions of their own */
} kvf_layout_flags;

/**
 * Detects the layout from the shape that a backend gives to a cache of 1 block, 16 tokens, 1 head of size 1.
 *
 * @param probe_shape            that shape
 * @param registered_dimensions  dimensions of the tensor that is registered for all layers together; 0: there is none
 * @return KVF_OK, KVF_E_INVALID, KVF_E_NOT_EXPRESSIBLE (models with state have no tensor over all layers)
 */
KVF_API kvf_status kvf_detect_layout(const uint64_t *probe_shape, size_t probe_dimensions, bool is_mla,
                                     bool is_mamba, size_t registered_dimensions, kvf_layout_flags *out);

/**
 * A one-line summary of the local rank and one remote engine, in the connector's words. Unknown lengths are 0:
 * remote_block_len, and for a hybrid fa_desc_bytes if either block length is missing.
 *
 * @param text  receives a text owned by the caller; kvf_topology_free_text()
 */
KVF_API kvf_status kvf_topology_describe(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                         char **text);

/**
 * The text that a consumer sends to a producer rank when it is done: the request's id at the producer, a colon, and the
 * number of consumers that the rank waits for (PR 40731: the consumers' tp_size).
 */
KVF_API kvf_status kvf_completion_notice(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                         const char *remote_request_id, char **text);

/**
 * Sorts layer names in the order in which regions are registered: runs of digits compare as numbers, the rest as text.
 *
 * @param names  sorted in place
 * @return KVF_OK, KVF_E_INVALID (a name is NULL), KVF_E_NOMEM
 */
KVF_API kvf_status kvf_region_order(const char **names, size_t count);

#ifdef __cplusplus
}
#endif

#endif
