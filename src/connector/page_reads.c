/* Reads and descriptor tables of the per-group plan. */
#include <kvferry/connector/page_groups.h>

#include "connector/connector.h"

/* One group of a request at one source rank. */
typedef struct group_read {
    const kvf_group_plan *group;
    size_t index;
    uint64_t slot;
    uint64_t local_pieces, remote_pieces; /* of a page; one of them is 1 */
    const kvf_ids *local, *remote;
} group_read;

static kvf_status add_piece(uint64_t block, uint64_t pieces, uint64_t piece, kvf_ids *out) {
    uint64_t id;
    if (!kvf_mul_add(block, pieces, piece, &id))
        return kvf_plain_fail(KVF_E_OVERFLOW, "block id %llu times %llu does not fit in 64 bits",
                              (unsigned long long)block, (unsigned long long)pieces);
    kvf_ids_add(out, id);
    return KVF_OK;
}

/* Pieces `begin` ... `begin + count - 1` of each block from entry `first` on; at most `limit` ids. */
static kvf_status name_pieces(const kvf_ids *list, size_t first, uint64_t pieces, uint64_t begin,
                              uint64_t count, uint64_t limit, kvf_ids *out) {
    uint64_t total;
    if (!kvf_mul(list->count - first, count, &total))
        return kvf_plain_fail(KVF_E_OVERFLOW, "%zu blocks of %llu pieces do not fit in 64 bits", list->count,
                              (unsigned long long)count);
    kvf_status status = kvf_ids_make(out, total);
    for (size_t i = first; !status && i < list->count; i++)
        for (uint64_t k = 0; !status && k < count && out->count < limit; k++)
            status = add_piece(list->at[i], pieces, begin + k, out);
    return status;
}

/*
 * Lists pieces without the prompt's length, as the connector does. If local pages are gathered from pieces, a local
 * list that is too short means cached tokens: the remote list skips as many whole local pages. Surplus local blocks,
 * the first ones, are dropped.
 */
static kvf_status name_group(const group_read *read, kvf_ids *local_out, kvf_ids *remote_out) {
    uint64_t per_local = read->group->remote_blocks_per_local_block;
    size_t local = read->local->count, remote = read->remote->count, cached = 0, dropped = 0;
    uint64_t limit = UINT64_MAX;
    if (read->local_pieces > 1) {
        uint64_t pages = (remote + per_local - 1) / per_local;
        cached = !local ? remote : local < pages ? (size_t)((pages - local) * per_local) : 0;
        limit = remote - cached;
        dropped = per_local == 1 && local > remote ? local - remote : 0;
    }
    kvf_status status =
        name_pieces(read->remote, cached, read->remote_pieces, read->group->remote_desc_offset,
                    read->group->local_blocks_per_remote_block, UINT64_MAX, remote_out);
    return status ? status
                  : name_pieces(read->local, dropped, read->local_pieces, read->slot * per_local, per_local,
                                limit, local_out);
}

static uint64_t round_up(uint64_t tokens, uint64_t size) {
    return tokens / size + (tokens % size != 0);
}

/* Piece i of the prompt lies in local page i / per_local and in remote page i / per_remote. */
static kvf_status pair_group(const group_read *read, uint64_t prompt_tokens, kvf_ids *local_out,
                             kvf_ids *remote_out) {
    const kvf_group_plan *group = read->group;
    uint64_t per_local = group->remote_blocks_per_local_block,
             per_remote = group->local_blocks_per_remote_block;
    uint64_t pieces = round_up(prompt_tokens, group->tokens_per_piece);
    uint64_t local_pages = round_up(pieces, per_local), remote_pages = round_up(pieces, per_remote);
    if (!read->local->count)
        return KVF_OK;
    if (read->local->count > local_pages || read->remote->count < remote_pages)
        return kvf_refuse(KVF_REFUSAL_DECODE_LONGER_THAN_PREFILL, KVF_E_RANGE,
                          "group %zu: %zu local and %zu remote blocks; %llu prompt tokens fill %llu and %llu",
                          read->index, read->local->count, read->remote->count,
                          (unsigned long long)prompt_tokens, (unsigned long long)local_pages,
                          (unsigned long long)remote_pages);
    uint64_t cached = local_pages - read->local->count, first = cached * per_local;
    kvf_status status = kvf_ids_make(local_out, pieces - first);
    if (!status)
        status = kvf_ids_make(remote_out, pieces - first);
    for (uint64_t i = first; !status && i < pieces; i++) {
        status = add_piece(read->local->at[i / per_local - cached], read->local_pieces,
                           read->slot * per_local + i % per_local, local_out);
        if (!status)
            status = add_piece(read->remote->at[i / per_remote], read->remote_pieces,
                               group->remote_desc_offset + i % per_remote, remote_out);
    }
    return status;
}

static kvf_status read_group(const kvf_page_plan *plan, uint64_t prompt_tokens, group_read *read,
                             uint64_t rank, kvf_ids *local_out, kvf_ids *remote_out) {
    const kvf_ids *sources = &read->group->source_ranks;
    while (read->slot < sources->count && sources->at[read->slot] != rank)
        read->slot++;
    if (read->slot == sources->count)
        return KVF_OK;
    read->local_pieces = plan->local_to_remote_page_ratio;
    read->remote_pieces = plan->remote_to_local_page_ratio;
    return prompt_tokens ? pair_group(read, prompt_tokens, local_out, remote_out)
                         : name_group(read, local_out, remote_out);
}

kvf_status kvf_page_plan_read(const kvf_page_plan *plan, uint64_t prompt_tokens, const kvf_block_lists *local,
                              const kvf_block_lists *remote, uint64_t source_rank, kvf_block_lists *local_out,
                              kvf_block_lists *remote_out) {
    if (!plan || !local || !remote || !local_out || !remote_out)
        return kvf_plain_fail(KVF_E_INVALID, "no argument may be NULL");
    if (local->count != plan->group_count || remote->count != plan->group_count)
        return kvf_plain_fail(KVF_E_INVALID, "%zu local and %zu remote block lists; allowed: %zu each",
                              local->count, remote->count, plan->group_count);
    kvf_block_lists ours, theirs = {0};
    kvf_status status = kvf_block_lists_make(&ours, plan->group_count);
    if (!status)
        status = kvf_block_lists_make(&theirs, plan->group_count);
    for (size_t g = 0; !status && g < plan->group_count; g++) {
        group_read read = {
            .group = &plan->groups[g], .index = g, .local = &local->groups[g], .remote = &remote->groups[g]};
        status = read_group(plan, prompt_tokens, &read, source_rank, &ours.groups[g], &theirs.groups[g]);
    }
    if (status) {
        kvf_block_lists_free(&ours);
        kvf_block_lists_free(&theirs);
        return status;
    }
    *local_out = ours;
    *remote_out = theirs;
    return KVF_OK;
}

kvf_status kvf_flat_desc_ids(const kvf_block_lists *lists, uint32_t region_count, uint64_t descs_per_region,
                             kvf_ids *out) {
    if (!lists || !out)
        return kvf_plain_fail(KVF_E_INVALID, "%s is NULL", lists ? "out" : "lists");
    uint64_t blocks = 0, end, total;
    for (size_t g = 0; g < lists->count; g++)
        blocks += lists->groups[g].count;
    if (!kvf_mul(descs_per_region, region_count, &end) || !kvf_mul(blocks, region_count, &total))
        return kvf_plain_fail(KVF_E_OVERFLOW, "%u regions of %llu descriptors do not fit in 64 bits",
                              region_count, (unsigned long long)descs_per_region);
    kvf_ids made;
    kvf_status status = kvf_ids_make(&made, total);
    if (status)
        return status;
    for (size_t g = 0; g < lists->count; g++)
        for (uint32_t r = 0; r < region_count; r++)
            for (size_t i = 0; i < lists->groups[g].count; i++) {
                uint64_t id = lists->groups[g].at[i];
                if (id >= descs_per_region) {
                    kvf_ids_free(&made);
                    return kvf_plain_fail(KVF_E_RANGE, "group %zu: descriptor %llu; allowed: below %llu", g,
                                          (unsigned long long)id, (unsigned long long)descs_per_region);
                }
                kvf_ids_add(&made, r * descs_per_region + id);
            }
    *out = made;
    return KVF_OK;
}

/* The descriptors of regions; each layer's buffer has its own base address. */
static kvf_status build_table(const kvf_region_plan *regions, size_t count, const uint64_t *layer_base,
                              uint32_t device, kvf_descriptor_table *out) {
    uint64_t total = 0, part, end;
    for (size_t r = 0; r < count; r++)
        if (!kvf_mul(regions[r].num_blocks, regions[r].descs_per_block, &part) ||
            !kvf_add(total, part, &total) ||
            !kvf_mul_add(regions[r].num_blocks, regions[r].page_stride, layer_base[regions[r].layer], &end))
            return kvf_plain_fail(KVF_E_OVERFLOW,
                                  "region %zu: base %llu and %llu pages of %llu bytes do not "
                                  "fit in 64 bits",
                                  r, (unsigned long long)layer_base[regions[r].layer],
                                  (unsigned long long)regions[r].num_blocks,
                                  (unsigned long long)regions[r].page_stride);
    kvf_descriptor_table table = {0};
    table.at = total > SIZE_MAX ? NULL : kvf_alloc((size_t)total, sizeof *table.at);
    if (!table.at)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for %llu descriptors", (unsigned long long)total);
    for (size_t r = 0; r < count; r++)
        for (uint64_t b = 0; b < regions[r].num_blocks; b++)
            for (uint64_t k = 0; k < regions[r].descs_per_block; k++)
                table.at[table.count++] =
                    (kvf_descriptor){layer_base[regions[r].layer] + b * regions[r].page_stride +
                                         regions[r].offset_in_page + k * regions[r].desc_stride,
                                     regions[r].desc_bytes, device};
    table.attention_count = table.count;
    *out = table;
    return KVF_OK;
}

kvf_status kvf_page_plan_remote_table(const kvf_page_plan *plan, const uint64_t *layer_base, uint32_t device,
                                      kvf_descriptor_table *out) {
    if (!plan || !layer_base || !out)
        return kvf_plain_fail(KVF_E_INVALID, "no argument may be NULL");
    return build_table(plan->regions, plan->region_count, layer_base, device, out);
}

/*
 * A local page is as long as `pieces` remote pages, and each of its halves is cut in the same way, so that a local
 * region is a remote one with a longer page, a larger offset and more descriptors in each block.
 */
kvf_status kvf_page_plan_local_table(const kvf_page_plan *plan, const uint64_t *layer_base,
                                     uint64_t local_num_blocks, uint32_t device, kvf_descriptor_table *out) {
    if (!plan || !layer_base || !out)
        return kvf_plain_fail(KVF_E_INVALID, "no argument may be NULL");
    if (plan->remote_to_local_page_ratio > 1)
        return kvf_plain_fail(KVF_E_NOT_EXPRESSIBLE,
                              "a remote page is %llu local pages; local pages are not split",
                              (unsigned long long)plan->remote_to_local_page_ratio);
    kvf_region_plan *regions = kvf_copy(plan->regions, plan->region_count, sizeof *regions);
    if (!regions)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for %zu regions", plan->region_count);
    uint64_t pieces = plan->local_to_remote_page_ratio;
    for (size_t r = 0; r < plan->region_count; r++) {
        regions[r].page_stride *= pieces; /* gives local_page_bytes, so that it cannot overflow */
        regions[r].offset_in_page *= pieces;
        regions[r].num_blocks = local_num_blocks;
        regions[r].descs_per_block = pieces;
        regions[r].desc_stride = regions[r].desc_bytes;
    }
    kvf_status status = build_table(regions, plan->region_count, layer_base, device, out);
    kvf_free(regions);
    return status;
}
