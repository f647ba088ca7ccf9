/*
 * Groups of a request: copied, checked, and which of their blocks are needed.
 */
#include "agent/steps.h"

#include "plan/walk.h"
#include "request/request.h"
#include "shard/shard.h"

kvf_group_steps *kvf_steps_copy(const kvf_group_steps *groups, uint32_t count) {
    size_t ids = 0;
    for (uint32_t g = 0; g < count; g++)
        ids += groups[g].table.count;
    kvf_group_steps *copy = kvf_alloc(1, count * sizeof *copy + ids * sizeof(uint32_t));
    if (!copy)
        return NULL;
    uint32_t *at = (uint32_t *)(void *)(copy + count);
    for (uint32_t g = 0; g < count; g++) {
        uint32_t n = groups[g].table.count;
        copy[g] = groups[g];
        copy[g].table.ids = at;
        if (n > 0)
            memcpy(at, groups[g].table.ids, n * sizeof *at);
        at += n;
    }
    return copy;
}

static kvf_status check_group(const kvf_group_shard_desc *held, const kvf_group_steps *group) {
    const kvf_block_table *table = &group->table;
    kvf_status status = kvf_check_steps(group->begin, group->end);
    if (status)
        return status;
    if (table->count > 0 && !table->ids)
        return kvf_fail(KVF_E_INVALID, "table.ids is NULL");
    for (uint32_t i = 0; i < table->count; i++)
        if (table->ids[i] != KVF_NO_BLOCK && table->ids[i] >= held->block_count)
            return kvf_fail(KVF_E_RANGE, "block %u, but the cache has %llu", table->ids[i],
                            (unsigned long long)held->block_count);
    return KVF_OK;
}

/* Which blocks of the sequence the steps of a group are in that are needed of it. */
static void needed_blocks(const kvf_shard *shard, uint32_t group, const kvf_group_steps *steps,
                          uint64_t *from, uint64_t *to) {
    const kvf_group_shard_desc *held = &shard->groups[group];
    uint64_t first = kvf_group_first_needed(kvf_model_group(shard->model, group), steps->end);
    first = kvf_max_u64(first, steps->begin);
    kvf_walk_side side = {held->tokens_per_block, held->tokens};
    uint64_t begin = kvf_walk_position(&side, first), end = kvf_walk_position(&side, steps->end);
    *from = *to = 0;
    if (steps->begin >= steps->end || begin >= end)
        return;
    *from = begin / held->tokens_per_block;
    *to = (end - 1) / held->tokens_per_block + 1;
}

/* Without this it would be seen when the peer has been met, and be told by an event. */
static kvf_status check_reach(const kvf_shard *shard, uint32_t group, const kvf_group_steps *steps) {
    const kvf_block_table *table = &steps->table;
    uint64_t from, to, low = table->first_block, high = low + table->count;
    needed_blocks(shard, group, steps, &from, &to);
    if (from < to && (from < low || to > high))
        return kvf_fail(
            KVF_E_RANGE,
            "steps [%llu, %llu) are in blocks [%llu, %llu) of the sequence; the table has [%llu, %llu)",
            (unsigned long long)steps->begin, (unsigned long long)steps->end, (unsigned long long)from,
            (unsigned long long)to, (unsigned long long)low, (unsigned long long)high);
    for (uint64_t i = from; i < to; i++)
        if (table->ids[i - low] == KVF_NO_BLOCK)
            return kvf_fail(KVF_E_RANGE, "block %llu of the sequence is needed, and the table has none there",
                            (unsigned long long)i);
    return KVF_OK;
}

kvf_status kvf_check_groups(const kvf_shard *shard, const kvf_group_steps *groups, uint32_t count) {
    uint32_t wanted = kvf_model_group_count(shard->model);
    if (count != wanted)
        return kvf_fail(KVF_E_INVALID, "group_count is %u; the model has %u groups", count, wanted);
    for (uint32_t g = 0; g < count; g++) {
        kvf_status status = check_group(&shard->groups[g], &groups[g]);
        if (!status)
            status = check_reach(shard, g, &groups[g]);
        if (status)
            return kvf_fail_in(status, "group %s: ", kvf_model_group(shard->model, g)->name);
    }
    return KVF_OK;
}

kvf_range kvf_wanted_entries(const kvf_shard *shard, uint32_t group, const kvf_group_steps *steps) {
    uint64_t from, to;
    needed_blocks(shard, group, steps, &from, &to);
    if (from == to)
        return (kvf_range){0, 0};
    uint64_t low = steps->table.first_block, high = low + steps->table.count;
    from = kvf_min_u64(kvf_max_u64(from, low), high) - low;
    to = kvf_min_u64(kvf_max_u64(to, low), high) - low;
    return (kvf_range){(uint32_t)from, (uint32_t)to};
}

bool kvf_steps_empty(const kvf_group_steps *groups, uint32_t count) {
    for (uint32_t g = 0; g < count; g++)
        if (groups[g].begin < groups[g].end)
            return false;
    return true;
}
