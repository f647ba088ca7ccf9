/*
 * The per-group plan of PR 41169: models whose attention groups differ in heads and head size but share pages
 * of equal size, so that one page holds different numbers of tokens in different groups.
 *
 * The larger of the two pages is cut into pieces as long as the smaller one. For each group a piece is either
 * a part of the heads or a part of the tokens:
 *
 *   remote page, 2 heads of 32 tokens        local pages, 1 head of 16 tokens
 *   | h0: t0..15 | h0: t16..31 | h1: ... |    ->  two for h0: | t0..15 |  | t16..31 |
 *
 * Where a local page is no run of whole pieces (its heads would lie apart, or it crosses remote pages), the
 * answer is KVF_E_NOT_EXPRESSIBLE; a plan (plan.h) does not have this limit.
 *
 * Ownership, errors and threads are as in topology.h.
 */
#ifndef KVFERRY_CONNECTOR_PAGE_GROUPS_H
#define KVFERRY_CONNECTOR_PAGE_GROUPS_H

#include <kvferry/connector/descriptors.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_page_group {
    uint32_t total_kv_heads;
    uint32_t local_tokens_per_block;
    uint32_t remote_tokens_per_block; /**< 0: the remote engine's one block size */
} kvf_page_group;

typedef struct kvf_page_plan_desc {
    size_t struct_size; /**< sizeof(kvf_page_plan_desc) */
    uint32_t tp_size, tp_rank, remote_tp_size;
    uint32_t remote_block_size; /**< for groups whose remote_tokens_per_block is 0 */
    const kvf_page_group *groups;
    size_t group_count;
    uint64_t local_page_bytes;
    uint64_t remote_page_bytes;
    bool blocks_first; /**< in each page, all of K and then all of V */
    uint32_t layer_count;
    uint64_t remote_num_blocks;
} kvf_page_plan_desc;

/** One descriptor region of the remote engine (RegionPlan). */
typedef struct kvf_region_plan {
    uint32_t layer;
    uint64_t desc_bytes;
    uint64_t offset_in_page;
    uint64_t page_stride;
    uint64_t num_blocks;
    uint64_t descs_per_block;
    uint64_t desc_stride; /**< between the descriptors of one block; 0 where there is one */
} kvf_region_plan;

/** The plan of one group. */
typedef struct kvf_group_plan {
    uint64_t local_blocks_per_remote_block;
    uint64_t remote_blocks_per_local_block;
    uint64_t tokens_per_piece;
    uint64_t remote_desc_offset; /**< index of our first piece in a remote page */
    kvf_ids source_ranks;        /**< a rank's index is its slot: the piece of the local heads that it has */
} kvf_group_plan;

/** Owned; kvf_page_plan_free(). */
typedef struct kvf_page_plan {
    uint64_t remote_to_local_page_ratio; /**< pieces of a remote page; 1 if it is not the larger one */
    uint64_t local_to_remote_page_ratio; /**< pieces of a local page; 1 if it is not the larger one */
    kvf_group_plan *groups;
    size_t group_count;
    kvf_ids all_source_ranks;
    kvf_region_plan *regions;
    size_t region_count;
} kvf_page_plan;

/**
 * @return KVF_OK, KVF_E_INVALID (also: no layers, KVF_REFUSAL_NO_LAYERS), KVF_E_NOT_EXPRESSIBLE,
 *         KVF_E_OVERFLOW, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_page_plan_build(const kvf_page_plan_desc *desc, kvf_page_plan *out);

KVF_API void kvf_page_plan_free(kvf_page_plan *plan);

/**
 * The descriptor ids to read from one source rank, group by group (ReadSpec): block * pieces + piece. A group
 * that is not read from this rank has empty lists.
 *
 * With the prompt's length, entry i of a local list pairs with entry i of the remote one, without tokens that
 * are cached and without pieces past the prompt's end. Without the length the call lists each block's pieces, as the
 * connector does before it trims, and the two lists of a group may differ in length.
 *
 * @param prompt_tokens  tokens of the whole prompt, cached or not; 0: not known
 * @param local          blocks still to fill, in each group; the prompt's other blocks, at its front, are cached
 * @param remote         blocks of the whole prompt
 * @return KVF_OK, KVF_E_INVALID, KVF_E_OVERFLOW, KVF_E_NOMEM, and with the prompt's length KVF_E_RANGE (more
 *         local blocks than the prompt fills, or fewer remote ones)
 */
KVF_API kvf_status kvf_page_plan_read(const kvf_page_plan *plan, uint64_t prompt_tokens,
                                      const kvf_block_lists *local, const kvf_block_lists *remote,
                                      uint64_t source_rank, kvf_block_lists *local_out,
                                      kvf_block_lists *remote_out);

/**
 * Descriptor ids in a table: group by group, each in every region of `descs_per_region` descriptors.
 *
 * @return as kvf_desc_ids()
 */
KVF_API kvf_status kvf_flat_desc_ids(const kvf_block_lists *lists, uint32_t region_count,
                                     uint64_t descs_per_region, kvf_ids *out);

/**
 * The remote engine's descriptors.
 *
 * @param layer_base  address of each layer's buffer
 * @return KVF_OK, KVF_E_INVALID, KVF_E_OVERFLOW, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_page_plan_remote_table(const kvf_page_plan *plan, const uint64_t *layer_base,
                                              uint32_t device, kvf_descriptor_table *out);

/**
 * The local descriptors for gather reads, where local pages are cut to the remote size.
 *
 * @param local_num_blocks  pages in each buffer
 * @return as kvf_page_plan_remote_table()
 */
KVF_API kvf_status kvf_page_plan_local_table(const kvf_page_plan *plan, const uint64_t *layer_base,
                                             uint64_t local_num_blocks, uint32_t device,
                                             kvf_descriptor_table *out);

#ifdef __cplusplus
}
#endif

#endif
