/*
 * Groups of a request: copying them, checking them, and finding which of their blocks are needed.
 */
#include "agent/steps.h"

#include "model/model.h"
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

static kvf_status check_table(const kvf_held_group *held, const kvf_block_table *table) {
    if (table->count > 0 && !table->ids)
        return kvf_fail(KVF_E_INVALID, "table.ids is NULL");
    for (uint32_t i = 0; i < table->count; i++)
        if (table->ids[i] != KVF_NO_BLOCK && table->ids[i] >= held->block_count)
            return kvf_fail(KVF_E_RANGE, "block %u, but the cache has %llu", table->ids[i],
                            (unsigned long long)held->block_count);
    return KVF_OK;
}

static kvf_status check_group(const kvf_held_group *held, const kvf_group_steps *group) {
    kvf_status status = kvf_check_steps(group->begin, group->end);
    return status ? status : check_table(held, &group->table);
}

/* The blocks of the sequence with those needed steps of a group that lie within [begin, end). */
static void needed_blocks(const kvf_shard *shard, uint32_t group, const kvf_group_steps *steps,
                          uint64_t part_begin, uint64_t part_end, uint64_t *from, uint64_t *to) {
    const kvf_held_group *held = &shard->groups[group];
    uint64_t first = kvf_first_moved(kvf_model_group(shard->model, group), steps->begin, steps->end);
    first = kvf_max_u64(first, part_begin);
    uint64_t last = kvf_min_u64(steps->end, part_end);
    kvf_walk_side side = {held->steps_per_block, held->share};
    uint64_t begin = kvf_walk_position(&side, first), end = kvf_walk_position(&side, last);
    *from = *to = 0;
    if (begin >= end)
        return;
    *from = begin / held->steps_per_block;
    *to = (end - 1) / held->steps_per_block + 1;
}

/* Without this check, the fault would show only after the peer was met, as an event. */
static kvf_status check_reach(const kvf_shard *shard, uint32_t group, const kvf_group_steps *steps,
                              uint64_t begin, uint64_t end) {
    const kvf_block_table *table = &steps->table;
    uint64_t from, to, low = table->first_block, high = low + table->count;
    needed_blocks(shard, group, steps, begin, end, &from, &to);
    if (from < to && (from < low || to > high))
        return kvf_fail(
            KVF_E_RANGE,
            "steps [%llu, %llu) are in blocks [%llu, %llu) of the sequence; the table has [%llu, %llu)",
            (unsigned long long)kvf_max_u64(steps->begin, begin),
            (unsigned long long)kvf_min_u64(steps->end, end), (unsigned long long)from,
            (unsigned long long)to, (unsigned long long)low, (unsigned long long)high);
    for (uint64_t i = from; i < to; i++)
        if (table->ids[i - low] == KVF_NO_BLOCK)
            return kvf_fail(KVF_E_RANGE, "block %llu of the sequence is needed, but the table has none there",
                            (unsigned long long)i);
    return KVF_OK;
}

kvf_status kvf_check_reach(const kvf_shard *shard, uint32_t group, const kvf_group_steps *steps,
                           uint64_t begin, uint64_t end) {
    kvf_status status = check_reach(shard, group, steps, begin, end);
    return status ? kvf_fail_in(status, "group %s: ", kvf_model_group(shard->model, group)->name) : KVF_OK;
}

static kvf_status check_count(const kvf_shard *shard, const char *name, uint32_t count) {
    uint32_t wanted = kvf_model_group_count(shard->model);
    if (count != wanted)
        return kvf_fail(KVF_E_INVALID, "%s is %u; the model has %u groups", name, count, wanted);
    return KVF_OK;
}

/* Of a group whose entries several tokens share there are at most as many as its tokens make. Whoever counts tokens there
 * would wait for entries that never come. */
static kvf_status check_ends(const kvf_model *model, const kvf_group_steps *groups, uint32_t count) {
    uint64_t tokens = 0;
    for (uint32_t g = 0; g < count; g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        if (group->kind == KVF_GROUP_TOKENS && group->tokens_per_step == 1)
            tokens = kvf_max_u64(tokens, groups[g].end);
    }
    for (uint32_t g = 0; g < count && tokens > 0; g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        if (group->kind == KVF_GROUP_TOKENS && groups[g].end > kvf_group_step_count(group, tokens))
            return kvf_fail(
                KVF_E_RANGE,
                "group %s: end is %llu, in entries of %u tokens, but the longest group ends at token "
                "%llu; allowed: up to %llu",
                group->name, (unsigned long long)groups[g].end, group->tokens_per_step,
                (unsigned long long)tokens, (unsigned long long)kvf_group_step_count(group, tokens));
    }
    return KVF_OK;
}

/* The first group with a state that is wanted; `count` if there is none. */
static uint32_t wanted_state(const kvf_model *model, const kvf_group_steps *wanted, uint32_t count) {
    uint32_t g = 0;
    while (g < count &&
           (kvf_model_group(model, g)->kind != KVF_GROUP_STATE || wanted[g].begin >= wanted[g].end))
        g++;
    return g;
}

kvf_status kvf_check_states(const kvf_model *model, const kvf_group_steps *wanted,
                            const kvf_group_steps *held, uint32_t count) {
    const uint32_t state = wanted_state(model, wanted, count);
    for (uint32_t g = 0; g < count && state < count; g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        if (group->kind == KVF_GROUP_STATE || !wanted[g].end || !held[g].end || wanted[g].end == held[g].end)
            continue;
        return kvf_fail(
            KVF_E_RANGE,
            "group %s: the state is wanted after step %llu of group %s, but the producer has that "
            "after step %llu; allowed: the same end",
            kvf_model_group(model, state)->name, (unsigned long long)wanted[g].end, group->name,
            (unsigned long long)held[g].end);
    }
    return KVF_OK;
}

kvf_status kvf_check_groups(const kvf_shard *shard, const kvf_group_steps *groups, uint32_t count,
                            bool grow) {
    kvf_status status = check_count(shard, "group_count", count);
    for (uint32_t g = 0; g < count && !status; g++) {
        status = check_group(&shard->groups[g], &groups[g]);
        if (!status && !grow)
            status = check_reach(shard, g, &groups[g], 0, UINT64_MAX);
        if (status)
            return kvf_fail_in(status, "group %s: ", kvf_model_group(shard->model, g)->name);
    }
    return status ? status : check_ends(shard->model, groups, count);
}

/* A table without the blocks behind the steps' end: an engine also allocates for tokens to come. Of shares the first keeps
 * most, and its end counts for all ranks, as their tables must be the same. */
static kvf_block_table up_to_end(const kvf_held_group *held, uint64_t end, const kvf_block_table *table) {
    kvf_walk_side first = {held->steps_per_block, held->share};
    first.share.index = 0;
    const uint64_t steps = kvf_walk_position(&first, end);
    const uint64_t blocks = steps / held->steps_per_block + (steps % held->steps_per_block > 0);
    const uint64_t most = blocks - kvf_min_u64(blocks, table->first_block);
    return (kvf_block_table){table->ids, (uint32_t)kvf_min_u64(table->count, most), table->first_block};
}

kvf_status kvf_take_tables(const kvf_shard *shard, const kvf_group_steps *groups,
                           const kvf_block_table *tables, uint32_t count, kvf_block_table *out) {
    kvf_status status = check_count(shard, "table_count", count);
    for (uint32_t g = 0; g < count && !status; g++) {
        status = check_table(&shard->groups[g], &tables[g]);
        if (status)
            return kvf_fail_in(status, "group %s: ", kvf_model_group(shard->model, g)->name);
        out[g] = up_to_end(&shard->groups[g], groups[g].end, &tables[g]);
    }
    return status;
}

/* ---- more blocks ----------------------------------------------------------------------------- */

/* The most entries without a block that a table gets because others do not follow it at once: each takes memory, and
 * time. */
#define MOST_MISSING (1u << 22)

/* The begin and end of a table with the entries of both. */
static kvf_status span(const kvf_block_table *a, const kvf_block_table *b, uint64_t *begin, uint64_t *end) {
    uint64_t a_end = (uint64_t)a->first_block + a->count, b_end = (uint64_t)b->first_block + b->count;
    *begin = a->count == 0   ? b->first_block
             : b->count == 0 ? a->first_block
                             : kvf_min_u64(a->first_block, b->first_block);
    *end = a->count == 0 ? b_end : b->count == 0 ? a_end : kvf_max_u64(a_end, b_end);
    if (*end > UINT32_MAX)
        return kvf_fail(KVF_E_RANGE, "a table ends at block %llu of the sequence; allowed: up to %u",
                        (unsigned long long)*end, UINT32_MAX);
    if (*end - *begin > (uint64_t)a->count + b->count + MOST_MISSING)
        return kvf_fail(
            KVF_E_RANGE,
            "tables of blocks [%u, %llu) and [%u, %llu) of the sequence; allowed: up to %u blocks between",
            a->first_block, (unsigned long long)a_end, b->first_block, (unsigned long long)b_end,
            MOST_MISSING);
    return KVF_OK;
}

static kvf_status put_entries(const kvf_block_table *from, uint64_t begin, uint32_t *ids) {
    for (uint32_t i = 0; i < from->count; i++) {
        uint32_t *id = &ids[from->first_block - begin + i];
        if (*id != KVF_NO_BLOCK && from->ids[i] != KVF_NO_BLOCK && *id != from->ids[i])
            return kvf_fail(KVF_E_INVALID, "block %llu of the sequence was given as %u, and now as %u",
                            (unsigned long long)from->first_block + i, *id, from->ids[i]);
        if (from->ids[i] != KVF_NO_BLOCK)
            *id = from->ids[i];
    }
    return KVF_OK;
}

kvf_status kvf_steps_merge(const kvf_group_steps *groups, const kvf_block_table *tables, uint32_t count,
                           kvf_group_steps **out) {
    uint64_t total = 0, begin, end;
    kvf_status status = KVF_OK;
    for (uint32_t g = 0; g < count && !status; g++) {
        status = span(&groups[g].table, &tables[g], &begin, &end);
        total += end - begin;
        if (status)
            status = kvf_fail_in(status, "group %u: ", g);
    }
    kvf_group_steps *merged =
        status ? NULL : kvf_alloc(1, count * sizeof *merged + (size_t)total * sizeof(uint32_t));
    if (!merged)
        return status ? status : kvf_nomem("a request");
    uint32_t *ids = (uint32_t *)(void *)(merged + count);
    for (uint32_t g = 0; g < count && !status; g++) {
        (void)span(&groups[g].table, &tables[g], &begin, &end);
        uint32_t n = (uint32_t)(end - begin);
        for (uint32_t i = 0; i < n; i++)
            ids[i] = KVF_NO_BLOCK;
        merged[g] = (kvf_group_steps){{ids, n, (uint32_t)begin}, groups[g].begin, groups[g].end};
        status = put_entries(&groups[g].table, begin, ids);
        if (!status)
            status = put_entries(&tables[g], begin, ids);
        if (status)
            status = kvf_fail_in(status, "group %u: ", g);
        ids += n;
    }
    if (status)
        kvf_free(merged);
    else
        *out = merged;
    return status;
}

kvf_range kvf_wanted_entries(const kvf_shard *shard, uint32_t group, const kvf_group_steps *steps) {
    uint64_t from, to;
    needed_blocks(shard, group, steps, 0, UINT64_MAX, &from, &to);
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
