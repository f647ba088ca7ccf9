/* The per-group plan: all pages have one size; each group has its own number of tokens per page. */
#include <kvferry/connector/page_groups.h>

#include "connector/connector.h"

/* `larger` / `smaller`, refusing a remainder; 1 if `larger` is not the larger one. */
static kvf_status larger_by(uint64_t larger, uint64_t smaller, const char *what, uint64_t *out) {
    if (larger <= smaller) {
        *out = 1;
        return KVF_OK;
    }
    return kvf_exact_share(larger, 1, smaller, what, out);
}

/* The split of one group, in both directions; an axis that is not cut has 1. */
typedef struct group_split {
    uint64_t remote_by_heads, remote_by_tokens; /* pieces of a remote page */
    uint64_t local_by_heads, local_by_tokens;   /* pieces of a local page */
    kvf_shared_units first;                     /* the heads that the first source has */
} group_split;

/* Heads are the outer axis of a page, so that a part of the tokens is one run only if there is a single head. */
static kvf_status check_split(size_t g, const group_split *split, uint64_t remote_pieces,
                              uint64_t local_pieces) {
    bool remote_cut = split->remote_by_heads * split->remote_by_tokens == remote_pieces &&
                      (split->remote_by_tokens == 1 || split->first.local_units == 1);
    bool local_cut = split->local_by_heads * split->local_by_tokens == local_pieces &&
                     (split->local_by_tokens == 1 || split->first.remote_units == 1);
    if (!remote_cut || !local_cut)
        return kvf_refuse(
            KVF_REFUSAL_GROUP_NOT_SPLIT_PURELY, KVF_E_NOT_EXPRESSIBLE,
            "group %zu: a remote page has %llu times the local heads and %llu times the local tokens, a "
            "local one is filled by %llu ranks and %llu pages; pages allow %llu and %llu pieces",
            g, (unsigned long long)split->remote_by_heads, (unsigned long long)split->remote_by_tokens,
            (unsigned long long)split->local_by_heads, (unsigned long long)split->local_by_tokens,
            (unsigned long long)remote_pieces, (unsigned long long)local_pieces);
    return KVF_OK;
}

/* Finds sources and head pieces of a group, as for a model that has only this group's heads. */
static kvf_status map_group(const kvf_page_plan_desc *desc, const kvf_page_group *group, kvf_group_plan *plan,
                            group_split *split) {
    kvf_topology topology = {.local = {.struct_size = sizeof topology.local,
                                       .engine_id = "",
                                       .tp_size = desc->tp_size,
                                       .tp_rank = desc->tp_rank,
                                       .dcp_size = 1,
                                       .block_size = group->local_tokens_per_block,
                                       .total_kv_heads = group->total_kv_heads}};
    kvf_engine_transfer_info remote = {.struct_size = sizeof remote,
                                       .tp_size = desc->remote_tp_size,
                                       .dcp_size = 1,
                                       .block_size = group->remote_tokens_per_block};
    kvf_status status = kvf_attention_sources(&topology, &remote, &plan->source_ranks);
    if (!status)
        status = kvf_shared_attention(&topology, &remote, (uint32_t)plan->source_ranks.at[0], &split->first);
    if (!status)
        status = larger_by(split->first.remote_units, split->first.local_units, "remote heads",
                           &split->remote_by_heads);
    split->local_by_heads = plan->source_ranks.count;
    return status;
}

static kvf_status plan_group(const kvf_page_plan_desc *desc, size_t g, const kvf_page_plan *plan,
                             kvf_group_plan *out) {
    kvf_page_group group = desc->groups[g];
    if (!group.remote_tokens_per_block)
        group.remote_tokens_per_block = desc->remote_block_size;
    if (!group.total_kv_heads || !group.local_tokens_per_block || !group.remote_tokens_per_block)
        return kvf_plain_fail(
            KVF_E_INVALID, "group %zu: %u heads, %u local and %u remote tokens; allowed: 1 and more", g,
            group.total_kv_heads, group.local_tokens_per_block, group.remote_tokens_per_block);
    group_split split;
    kvf_status status = map_group(desc, &group, out, &split);
    if (!status)
        status = larger_by(group.remote_tokens_per_block, group.local_tokens_per_block,
                           "remote tokens per block", &split.remote_by_tokens);
    if (!status)
        status = larger_by(group.local_tokens_per_block, group.remote_tokens_per_block,
                           "local tokens per block", &split.local_by_tokens);
    if (!status)
        status = check_split(g, &split, plan->remote_to_local_page_ratio, plan->local_to_remote_page_ratio);
    if (status)
        return status;
    out->local_blocks_per_remote_block = split.remote_by_tokens;
    out->remote_blocks_per_local_block = split.local_by_tokens;
    out->tokens_per_piece = group.local_tokens_per_block < group.remote_tokens_per_block
                                ? group.local_tokens_per_block
                                : group.remote_tokens_per_block;
    out->remote_desc_offset = split.first.remote_begin / split.first.local_units * split.remote_by_tokens;
    return KVF_OK;
}

static kvf_status plan_regions(const kvf_page_plan_desc *desc, kvf_page_plan *plan) {
    uint32_t halves = desc->blocks_first ? 2 : 1;
    uint64_t half, bytes;
    kvf_status status = kvf_exact_share(desc->remote_page_bytes, 1, halves, "remote_page_bytes", &half);
    if (!status)
        status = kvf_exact_share(half, 1, plan->remote_to_local_page_ratio, "remote_page_bytes", &bytes);
    if (status)
        return status;
    plan->region_count = (size_t)desc->layer_count * halves;
    plan->regions = kvf_alloc(plan->region_count, sizeof *plan->regions);
    if (!plan->regions)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for %zu regions", plan->region_count);
    for (size_t r = 0; r < plan->region_count; r++)
        plan->regions[r] = (kvf_region_plan){.layer = (uint32_t)(r / halves),
                                             .desc_bytes = bytes,
                                             .offset_in_page = r % halves * half,
                                             .page_stride = desc->remote_page_bytes,
                                             .num_blocks = desc->remote_num_blocks,
                                             .descs_per_block = plan->remote_to_local_page_ratio,
                                             .desc_stride = plan->remote_to_local_page_ratio > 1 ? bytes : 0};
    return KVF_OK;
}

/* Every remote rank that some group reads from, ascending. */
static kvf_status join_sources(uint32_t remote_tp_size, kvf_page_plan *plan) {
    kvf_status status = kvf_ids_make(&plan->all_source_ranks, remote_tp_size);
    for (uint64_t rank = 0; !status && rank < remote_tp_size; rank++)
        for (size_t g = 0; g < plan->group_count; g++)
            if (kvf_ids_have(&plan->groups[g].source_ranks, rank)) {
                kvf_ids_add(&plan->all_source_ranks, rank);
                break;
            }
    return status;
}

static kvf_status fill_plan(const kvf_page_plan_desc *desc, kvf_page_plan *plan) {
    kvf_status status = larger_by(desc->remote_page_bytes, desc->local_page_bytes, "remote_page_bytes",
                                  &plan->remote_to_local_page_ratio);
    if (!status)
        status = larger_by(desc->local_page_bytes, desc->remote_page_bytes, "local_page_bytes",
                           &plan->local_to_remote_page_ratio);
    if (status)
        return status;
    plan->groups = kvf_alloc0(desc->group_count, sizeof *plan->groups);
    if (!plan->groups)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for %zu groups", desc->group_count);
    plan->group_count = desc->group_count;
    for (size_t g = 0; !status && g < plan->group_count; g++)
        status = plan_group(desc, g, plan, &plan->groups[g]);
    if (!status)
        status = join_sources(desc->remote_tp_size, plan);
    return status ? status : plan_regions(desc, plan);
}

kvf_status kvf_page_plan_build(const kvf_page_plan_desc *given, kvf_page_plan *out) {
    if (!given || !out)
        return kvf_plain_fail(KVF_E_INVALID, "%s is NULL", given ? "out" : "desc");
    kvf_page_plan_desc desc;
    kvf_status status = kvf_take_struct(&desc, sizeof desc, given, "kvf_page_plan_desc");
    if (status)
        return status;
    if (!desc.tp_size || desc.tp_rank >= desc.tp_size)
        return kvf_plain_fail(KVF_E_RANGE, "tp_rank is %u of tp_size %u", desc.tp_rank, desc.tp_size);
    if (!desc.groups || !desc.group_count || !desc.local_page_bytes || !desc.remote_page_bytes)
        return kvf_plain_fail(KVF_E_INVALID,
                              "at least one group, local_page_bytes and remote_page_bytes must "
                              "be given");
    if (!desc.layer_count)
        return kvf_refuse(KVF_REFUSAL_NO_LAYERS, KVF_E_INVALID,
                          "layer_count is 0; an engine has at least one layer");
    kvf_page_plan plan = {0};
    status = fill_plan(&desc, &plan);
    if (status) {
        kvf_page_plan_free(&plan);
        return status;
    }
    *out = plan;
    return KVF_OK;
}

void kvf_page_plan_free(kvf_page_plan *plan) {
    if (!plan)
        return;
    for (size_t g = 0; g < plan->group_count; g++)
        kvf_ids_free(&plan->groups[g].source_ranks);
    kvf_free(plan->groups);
    kvf_ids_free(&plan->all_source_ranks);
    kvf_free(plan->regions);
    *plan = (kvf_page_plan){0};
}
