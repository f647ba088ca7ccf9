/*
 * Block lists, descriptor tables and reads in the terms of vLLM's connector (PR 40731 and later).
 *
 * A descriptor is a run of bytes of one block in one region. A table lists the descriptors of all regions, one region
 * after another, and a descriptor's id is its index. A request's read is then two equally long lists of ids. kvferry's
 * own transfers need no tables (plan.h, request.h): these are for comparing, explaining and migrating. A table costs
 * memory for every block of the cache.
 *
 * Ownership, errors and threads are as in topology.h.
 */
#ifndef KVFERRY_CONNECTOR_DESCRIPTORS_H
#define KVFERRY_CONNECTOR_DESCRIPTORS_H

#include <kvferry/connector/state.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- block lists ----------------------------------------------------------------------------- */

/**
 * Expands logical block b of each attention group to kernel blocks b*stride ... b*stride + count - 1. State
 * groups keep their ids.
 *
 * @param stride  kernel blocks of a logical block on the side whose blocks these are
 * @param count   how many of them to name; at most stride
 * @return KVF_OK, KVF_E_INVALID, KVF_E_RANGE, KVF_E_OVERFLOW, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_logical_to_kernel(const kvf_cache_kind *kinds, const kvf_block_lists *lists,
                                         uint32_t stride, uint32_t count, kvf_block_lists *out);

/** Each id b becomes b*ratio ... b*ratio + ratio - 1. KVF_OK, KVF_E_INVALID, KVF_E_OVERFLOW, KVF_E_NOMEM. */
KVF_API kvf_status kvf_mapped_blocks(const kvf_ids *blocks, uint32_t ratio, kvf_ids *out);

/**
 * Maps the local blocks of attention groups to the remote block size and cuts each list to the remote one's
 * length, because the last local block may be filled only in part. If nothing is left to read, `out` has no groups.
 *
 * @return KVF_OK, KVF_E_INVALID, KVF_E_OVERFLOW, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_map_block_size(const kvf_cache_kind *kinds, const kvf_block_lists *local,
                                      const kvf_block_lists *remote, uint32_t ratio, kvf_block_lists *out);

/**
 * Pairs the blocks still to be filled with the blocks that fill them.
 *
 * Attention keeps the tail of the prefill list, because the blocks that decode lacks are at the end; an empty decode
 * list means that the group is cached, and leaves both lists empty. Where the two engines cut logical blocks into
 * different numbers of kernel blocks, both lists begin at the same token and are cut to the shorter one. Where prefill
 * has more state slots, its last ones pair: decode already has the positions of the earlier ones. Where decode has more
 * (the position that it computes again itself, scratch slots of speculative decoding), its first slots pair, and the
 * others stay as they are.
 *
 * @return KVF_OK, KVF_E_INVALID, KVF_E_RANGE (more decode than prefill blocks; two or more state slots for which
 *         prefill has none; lists that differ by more than padding explains), KVF_E_NOMEM
 */
KVF_API kvf_status kvf_prefix_trim(const kvf_cache_kind *kinds, const kvf_block_lists *decode,
                                   const kvf_block_lists *prefill, uint32_t decode_ppl, uint32_t prefill_ppl,
                                   kvf_block_lists *decode_out, kvf_block_lists *prefill_out);

/** The same for lists of regions, which hold attention only. */
KVF_API kvf_status kvf_prefix_trim_by_region(const kvf_block_lists *decode, const kvf_block_lists *prefill,
                                             kvf_block_lists *decode_out, kvf_block_lists *prefill_out);

/** A pair of token shares for kvf_dcp_prefix_trim(). */
typedef struct kvf_dcp_pair {
    size_t struct_size; /**< sizeof(kvf_dcp_pair) */
    uint32_t local_dcp_size, local_dcp_rank;
    uint32_t remote_dcp_size, remote_rank;
    uint64_t num_computed;      /**< blocks of this rank that are cached and not in the local list */
    bool has_num_remote_blocks; /**< whether the next field is known */
    uint64_t num_remote_blocks; /**< blocks of the whole sequence at the remote engine */
} kvf_dcp_pair;

/**
 * Pairs blocks where either side deals the blocks of a sequence out to its ranks: block g of the sequence is
 * entry g / size of rank g % size.
 *
 * @return KVF_OK, KVF_E_INVALID, KVF_E_OVERFLOW, KVF_E_RANGE (the remote list is too short for the blocks to fill),
 *         KVF_E_NOMEM
 */
KVF_API kvf_status kvf_dcp_prefix_trim(const kvf_dcp_pair *pair, const kvf_ids *local, const kvf_ids *remote,
                                       kvf_ids *local_out, kvf_ids *remote_out);

/** The group of a region that all groups use. */
#define KVF_ALL_GROUPS (-1)

/**
 * Lists the blocks to read from each region: those of its group, or of all groups in order.
 *
 * @return KVF_OK, KVF_E_RANGE (a group that does not exist), KVF_E_NOMEM
 */
KVF_API kvf_status kvf_block_ids_by_region(const kvf_block_lists *lists, const int32_t *region_groups,
                                           size_t region_count, kvf_block_lists *out);

/** The part of a group that a producer hands over. */
typedef struct kvf_exchange_group {
    kvf_cache_kind kind;
    uint32_t window_tokens; /**< sliding window; 0: none */
    uint32_t spec_blocks;   /**< state: speculative slots after the slot of the state */
} kvf_exchange_group;

/** Blocks that a sliding window can reach: ceil(window / block size) + 1; 0 without a window. */
KVF_API uint64_t kvf_blocks_per_window(uint32_t window_tokens, uint32_t block_size);

/**
 * Clips block lists to what a consumer can use: the last blocks of a window, and, if `clip_state`, the one
 * slot of a state. No groups in, no groups out.
 *
 * @return KVF_OK, KVF_E_INVALID, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_exchange_clip(const kvf_exchange_group *groups, size_t group_count,
                                     uint32_t block_size, bool clip_state, const kvf_block_lists *lists,
                                     kvf_block_lists *out);

/** Finds the one block that has the state: the last before the speculative ones. KVF_OK, KVF_E_NOMEM. */
KVF_API kvf_status kvf_ssm_state_clip(const kvf_ids *blocks, uint32_t spec_blocks, kvf_ids *out);

/* ---- descriptor ids -------------------------------------------------------------------------- */

/**
 * How a table is numbered: attention region r, block b is r*attention_blocks + b; all of attention is
 * followed by state, where region r, block b is r*state_blocks + b.
 */
typedef struct kvf_id_space {
    size_t struct_size; /**< sizeof(kvf_id_space) */
    uint32_t attention_regions;
    uint32_t state_regions;
    uint64_t attention_blocks; /**< descriptors of one attention region */
    uint64_t state_blocks;     /**< descriptors of one state region: logical blocks */
} kvf_id_space;

/**
 * Logical blocks of a cache of `kernel_blocks`.
 *
 * @return KVF_OK, KVF_E_INVALID, KVF_E_NOT_EXPRESSIBLE (they do not divide)
 */
KVF_API kvf_status kvf_state_blocks(uint64_t kernel_blocks, uint32_t physical_per_logical, uint64_t *out);

/**
 * Descriptor ids of a request: region by region over all groups, or, where some group keeps state, group by
 * group.
 *
 * @return KVF_OK, KVF_E_INVALID, KVF_E_RANGE (a block id beyond the region), KVF_E_OVERFLOW, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_desc_ids(const kvf_id_space *space, const kvf_cache_kind *kinds,
                                const kvf_block_lists *lists, kvf_ids *out);

/**
 * The same for regions of different lengths that belong to groups, group by group. Regions that all belong to
 * group 0 are shared by every group, region by region.
 *
 * @param region_groups  KVF_ALL_GROUPS or a group, for each region
 * @param region_blocks  descriptors of each region
 * @return as kvf_desc_ids(); KVF_E_RANGE also for a group with blocks and no region
 */
KVF_API kvf_status kvf_desc_ids_by_region(const kvf_block_lists *lists, const int32_t *region_groups,
                                          const uint64_t *region_blocks, size_t region_count, kvf_ids *out);

/** The same layer by layer, each with the blocks of its group. */
KVF_API kvf_status kvf_desc_ids_by_layer(const kvf_block_lists *lists, const int32_t *layer_groups,
                                         const uint64_t *layer_blocks, size_t layer_count, kvf_ids *out);

/* ---- descriptor tables ----------------------------------------------------------------------- */

typedef struct kvf_descriptor {
    uint64_t address;
    uint64_t bytes;
    uint32_t device;
} kvf_descriptor;

/** Owned; kvf_descriptor_table_free(). */
typedef struct kvf_descriptor_table {
    kvf_descriptor *at;
    size_t count;
    size_t attention_count; /**< attention descriptors, which come first; the rest are state */
} kvf_descriptor_table;

KVF_API void kvf_descriptor_table_free(kvf_descriptor_table *table);

/** How regions hold K and V. */
typedef enum kvf_region_layout {
    KVF_LAYOUT_KV_OUTER = 0,     /**< K and V in regions of their own */
    KVF_LAYOUT_BLOCKS_FIRST = 1, /**< in each block, all of K and then all of V */
    KVF_LAYOUT_PACKED = 2,       /**< K and V of a token side by side */
    KVF_LAYOUT_LATENT = 3,       /**< no heads */
} kvf_region_layout;

/** The registered memory of one rank. It needs at least one region (KVF_REFUSAL_NO_LAYERS). */
typedef struct kvf_cache_memory {
    size_t struct_size;                 /**< sizeof(kvf_cache_memory) */
    const uint64_t *region_base;        /**< address of each region */
    const uint64_t *region_block_bytes; /**< of a kernel block in each region */
    uint32_t region_count;
    uint32_t device;
    uint64_t num_blocks;           /**< kernel blocks in each region */
    uint32_t physical_per_logical; /**< 0 means 1 */
    const kvf_state_layout *state; /**< state that shares the pages of each region; NULL: none */
} kvf_cache_memory;

/**
 * The descriptors of the local rank: per region and block, one for each of `block_size_ratio` pieces, K
 * before V where a block holds both; then state, per region each projection and the recurrent state.
 *
 * @return KVF_OK, KVF_E_INVALID, KVF_E_OVERFLOW, KVF_E_NOT_EXPRESSIBLE (a block does not divide), KVF_E_NOMEM
 */
KVF_API kvf_status kvf_local_descriptors(const kvf_cache_memory *memory, kvf_region_layout layout,
                                         uint32_t block_size_ratio, kvf_descriptor_table *out);

/** What kvf_remote_descriptors() needs to know of both sides. */
typedef struct kvf_remote_view {
    size_t struct_size; /**< sizeof(kvf_remote_view) */
    kvf_region_layout layout;
    const kvf_cache_memory *local;
    const kvf_cache_memory *remote;
    uint32_t remote_rank;
    const bool *region_replicated; /**< regions that every rank holds whole; NULL: none */
} kvf_remote_view;

/**
 * The descriptors of one remote rank: for each block, the bytes that hold our heads (or channels).
 *
 * @return KVF_OK, KVF_E_INVALID, KVF_E_OVERFLOW, KVF_E_NOMEM, KVF_E_NOT_EXPRESSIBLE (shapes that do not
 *         divide; block lengths of the two sides that no whole head explains)
 */
KVF_API kvf_status kvf_remote_descriptors(const kvf_topology *topology,
                                          const kvf_engine_transfer_info *remote, const kvf_remote_view *view,
                                          kvf_descriptor_table *out);

/** The state descriptors of kvf_local_descriptors() alone. */
KVF_API kvf_status kvf_local_state_descriptors(const kvf_cache_memory *memory, kvf_descriptor_table *out);

/** The state descriptors of kvf_remote_descriptors() alone; `local` is our state's layout. */
KVF_API kvf_status kvf_remote_state_descriptors(const kvf_topology *topology,
                                                const kvf_engine_transfer_info *remote,
                                                const kvf_state_layout *local,
                                                const kvf_cache_memory *remote_memory, uint32_t remote_rank,
                                                kvf_descriptor_table *out);

/** Regions, among those of a table, that every rank holds whole. A zeroed struct means none. */
typedef struct kvf_replicated_regions {
    const bool *region_replicated;
    size_t region_count;
    uint64_t descriptors_per_region;
} kvf_replicated_regions;

/**
 * The local descriptors to use with one source rank: the attention heads and the state channels that the rank holds.
 *
 * @param replicated  NULL for none
 * @return KVF_OK, KVF_E_INVALID, KVF_E_RANGE, KVF_E_OVERFLOW, KVF_E_NOMEM, KVF_E_NOT_EXPRESSIBLE (a length
 *         that does not divide into the pieces)
 */
KVF_API kvf_status kvf_split_descriptors(const kvf_topology *topology, const kvf_engine_transfer_info *remote,
                                         const kvf_descriptor_table *local, uint32_t source_rank,
                                         const kvf_replicated_regions *replicated, kvf_descriptor_table *out);

/**
 * The local descriptors to use with one source rank, as PR 39529 makes them: as kvf_split_descriptors(), but
 * a rank from which only state is read names the first piece of attention, which is not read.
 *
 * @return as kvf_split_descriptors()
 */
KVF_API kvf_status kvf_compute_split_handle_data(const kvf_topology *topology,
                                                 const kvf_engine_transfer_info *remote,
                                                 const kvf_descriptor_table *local, uint32_t source_rank,
                                                 kvf_descriptor_table *out);

/* ---- the plan of one remote engine, and its reads -------------------------------------------- */

typedef struct kvf_engine_transfer_plan_desc {
    size_t struct_size; /**< sizeof(kvf_engine_transfer_plan_desc) */
    kvf_region_layout layout;
    const kvf_cache_kind *kinds; /**< one for each group */
    size_t group_count;
    const kvf_cache_memory *local;
    const kvf_cache_memory *remote_ranks; /**< tp_size of the remote engine, by rank */
    const bool *region_replicated;        /**< NULL: none */
} kvf_engine_transfer_plan_desc;

typedef struct kvf_engine_transfer_plan kvf_engine_transfer_plan;

/**
 * Checks that two engines can exchange caches as the connector does, and makes the tables of every source.
 *
 * @param desc  read during the call only
 * @return KVF_OK, KVF_E_INVALID, KVF_E_NOT_EXPRESSIBLE, KVF_E_MISMATCH (block lengths), KVF_E_OVERFLOW,
 *         KVF_E_NOMEM
 */
KVF_API kvf_status kvf_engine_transfer_plan_build(const kvf_topology *topology,
                                                  const kvf_engine_transfer_info *remote,
                                                  const kvf_engine_transfer_plan_desc *desc,
                                                  kvf_engine_transfer_plan **out);

KVF_API void kvf_engine_transfer_plan_free(kvf_engine_transfer_plan *plan);

/** The mapping of a plan, owned by the plan. */
KVF_API const kvf_tp_mapping *kvf_engine_transfer_plan_mapping(const kvf_engine_transfer_plan *plan);

/** The local table cut to `block_size` tokens: our own or the remote block size; NULL for another. */
KVF_API const kvf_descriptor_table *kvf_engine_transfer_plan_local(const kvf_engine_transfer_plan *plan,
                                                                   uint32_t block_size);

/** The local table cut for one source rank; NULL when blocks are not split over ranks. */
KVF_API const kvf_descriptor_table *kvf_engine_transfer_plan_split(const kvf_engine_transfer_plan *plan,
                                                                   uint64_t source_rank);

/** The table of one remote rank; NULL if that rank holds no cells of ours. */
KVF_API const kvf_descriptor_table *kvf_engine_transfer_plan_remote(const kvf_engine_transfer_plan *plan,
                                                                    uint64_t remote_rank);

/** One copy of `bytes` from the remote address to the local one. */
typedef struct kvf_read_copy {
    uint64_t remote_address;
    uint64_t local_address;
    uint64_t bytes;
} kvf_read_copy;

/** What to read from one remote rank (ReadSpec). */
typedef struct kvf_read_spec {
    uint64_t remote_rank;
    kvf_ids local_ids;  /**< in the rank's split table if there is one, else in the table of its block size */
    kvf_ids remote_ids; /**< as many, in the rank's table */
    kvf_read_copy *copies; /**< as many */
} kvf_read_spec;

/** A request's reads. Owned; kvf_reads_free(). */
typedef struct kvf_reads {
    kvf_read_spec *specs;
    size_t count;
    kvf_ids notify_only; /**< ranks that wait for this request and from which nothing is read */
    char *notice;        /**< what to tell every one of these ranks: kvf_completion_notice() */
} kvf_reads;

/**
 * Plans one request: expands, trims and pairs its blocks, and names the descriptors.
 *
 * @param local_blocks   logical blocks still to fill, for each group; no groups: everything is cached
 * @param remote_blocks  logical blocks of the whole prompt at the remote engine
 * @return KVF_OK, KVF_E_INVALID, KVF_E_RANGE (ids beyond a table; see kvf_prefix_trim()), KVF_E_OVERFLOW,
 *         KVF_E_NOMEM
 */
KVF_API kvf_status kvf_engine_transfer_plan_read(const kvf_engine_transfer_plan *plan,
                                                 const kvf_block_lists *local_blocks,
                                                 const kvf_block_lists *remote_blocks,
                                                 const char *remote_request_id, kvf_reads *out);

KVF_API void kvf_reads_free(kvf_reads *reads);

#ifdef __cplusplus
}
#endif

#endif
