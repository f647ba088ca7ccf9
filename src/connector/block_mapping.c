/* Block lists: expanded from logical to kernel blocks, mapped to another block size, clipped. */
#include "connector/connector.h"

/* Each id b becomes b*stride ... b*stride + count - 1. */
static kvf_status expand(const kvf_ids *blocks, uint32_t stride, uint32_t count, kvf_ids *out) {
    uint64_t total;
    if (!kvf_mul(blocks->count, count, &total))
        return kvf_plain_fail(KVF_E_OVERFLOW, "%zu blocks times %u do not fit in 64 bits", blocks->count,
                              count);
    kvf_ids list;
    kvf_status status = kvf_ids_make(&list, total);
    if (status)
        return status;
    for (size_t i = 0; i < blocks->count; i++) {
        uint64_t first, last;
        if (!kvf_mul(blocks->at[i], stride, &first) || !kvf_add(first, count, &last)) {
            kvf_ids_free(&list);
            return kvf_plain_fail(KVF_E_OVERFLOW, "block id %llu times %u does not fit in 64 bits",
                                  (unsigned long long)blocks->at[i], stride);
        }
        for (uint32_t k = 0; k < count; k++)
            kvf_ids_add(&list, first + k);
    }
    *out = list;
    return KVF_OK;
}

kvf_status kvf_logical_to_kernel(const kvf_cache_kind *kinds, const kvf_block_lists *lists, uint32_t stride,
                                 uint32_t count, kvf_block_lists *out) {
    if (!kinds || !lists || !out)
        return kvf_plain_fail(KVF_E_INVALID, "kinds, lists and out must be given");
    if (!count || count > stride)
        return kvf_plain_fail(
            KVF_E_RANGE, "count is %u; allowed: 1 to the stride %u, or blocks would overlap", count, stride);
    kvf_block_lists made;
    kvf_status status = kvf_block_lists_make(&made, lists->count);
    for (size_t g = 0; !status && g < lists->count; g++)
        status = kinds[g] == KVF_CACHE_SSM ? kvf_ids_copy(&made.groups[g], &lists->groups[g])
                                           : expand(&lists->groups[g], stride, count, &made.groups[g]);
    if (status) {
        kvf_block_lists_free(&made);
        return status;
    }
    *out = made;
    return KVF_OK;
}

kvf_status kvf_mapped_blocks(const kvf_ids *blocks, uint32_t ratio, kvf_ids *out) {
    if (!blocks || !out)
        return kvf_plain_fail(KVF_E_INVALID, "blocks and out must be given");
    if (!ratio)
        return kvf_plain_fail(KVF_E_INVALID, "ratio is 0; allowed: 1 and more");
    return expand(blocks, ratio, ratio, out);
}

static kvf_status same_groups(const kvf_block_lists *local, const kvf_block_lists *remote) {
    if (local->count != remote->count)
        return kvf_plain_fail(KVF_E_INVALID, "%zu local groups and %zu remote ones", local->count,
                              remote->count);
    return KVF_OK;
}

kvf_status kvf_map_block_size(const kvf_cache_kind *kinds, const kvf_block_lists *local,
                              const kvf_block_lists *remote, uint32_t ratio, kvf_block_lists *out) {
    if (!kinds || !local || !remote || !out || !ratio)
        return kvf_plain_fail(KVF_E_INVALID, "%s", ratio ? "no argument may be NULL" : "ratio is 0");
    if (!local->count) {
        *out = (kvf_block_lists){0};
        return KVF_OK;
    }
    kvf_status status = same_groups(local, remote);
    if (status)
        return status;
    kvf_block_lists made;
    status = kvf_logical_to_kernel(kinds, local, ratio, ratio, &made);
    if (status)
        return status;
    for (size_t g = 0; g < made.count; g++)
        if (made.groups[g].count > remote->groups[g].count)
            made.groups[g].count = remote->groups[g].count;
    if (kvf_block_lists_all_empty(&made))
        kvf_block_lists_free(&made);
    *out = made;
    return KVF_OK;
}

kvf_status kvf_block_ids_by_region(const kvf_block_lists *lists, const int32_t *region_groups,
                                   size_t region_count, kvf_block_lists *out) {
    if (!lists || !region_groups || !out)
        return kvf_plain_fail(KVF_E_INVALID, "lists, region_groups and out must be given");
    size_t all = 0;
    for (size_t g = 0; g < lists->count; g++)
        all += lists->groups[g].count;
    kvf_block_lists made;
    kvf_status status = kvf_block_lists_make(&made, region_count);
    for (size_t r = 0; !status && r < region_count; r++) {
        int32_t group = region_groups[r];
        if (group != KVF_ALL_GROUPS && (group < 0 || (size_t)group >= lists->count)) {
            status = kvf_plain_fail(KVF_E_RANGE, "group of region %zu is %d; allowed: %d and more, below %zu",
                                    r, group, KVF_ALL_GROUPS, lists->count);
            break;
        }
        kvf_ids *list = &made.groups[r];
        status = kvf_ids_make(list, all);
        for (size_t g = 0; !status && g < lists->count; g++)
            if (group == KVF_ALL_GROUPS || (size_t)group == g)
                for (size_t i = 0; i < lists->groups[g].count; i++)
                    kvf_ids_add(list, lists->groups[g].at[i]);
    }
    if (status) {
        kvf_block_lists_free(&made);
        return status;
    }
    *out = made;
    return KVF_OK;
}

uint64_t kvf_blocks_per_window(uint32_t window_tokens, uint32_t block_size) {
    if (!window_tokens || !block_size)
        return 0;
    return ((uint64_t)window_tokens + block_size - 1) / block_size + 1;
}

kvf_status kvf_ssm_state_clip(const kvf_ids *blocks, uint32_t spec_blocks, kvf_ids *out) {
    if (!blocks || !out)
        return kvf_plain_fail(KVF_E_INVALID, "blocks and out must be given");
    if (!blocks->count)
        return kvf_ids_make(out, 0);
    /* A short list no longer has its speculative slots: its first block bears the state. */
    size_t last = blocks->count - 1;
    size_t bearing = spec_blocks < last ? last - spec_blocks : 0;
    return kvf_ids_slice(out, blocks, bearing, bearing + 1);
}

static kvf_status clip_group(const kvf_exchange_group *group, uint32_t block_size, bool clip_state,
                             const kvf_ids *blocks, kvf_ids *out) {
    if (group->kind == KVF_CACHE_SSM && clip_state)
        return kvf_ssm_state_clip(blocks, group->spec_blocks, out);
    uint64_t window = kvf_blocks_per_window(group->window_tokens, block_size);
    size_t begin = window && window < blocks->count ? blocks->count - (size_t)window : 0;
    return kvf_ids_slice(out, blocks, begin, blocks->count);
}

kvf_status kvf_exchange_clip(const kvf_exchange_group *groups, size_t group_count, uint32_t block_size,
                             bool clip_state, const kvf_block_lists *lists, kvf_block_lists *out) {
    if (!groups || !lists || !out || !block_size)
        return kvf_plain_fail(KVF_E_INVALID, "%s",
                              block_size ? "no argument may be NULL" : "block_size is 0");
    if (lists->count && lists->count != group_count)
        return kvf_plain_fail(KVF_E_INVALID, "%zu block lists for %zu groups", lists->count, group_count);
    kvf_block_lists made;
    kvf_status status = kvf_block_lists_make(&made, lists->count);
    for (size_t g = 0; !status && g < lists->count; g++)
        status = clip_group(&groups[g], block_size, clip_state, &lists->groups[g], &made.groups[g]);
    if (status) {
        kvf_block_lists_free(&made);
        return status;
    }
    *out = made;
    return KVF_OK;
}
