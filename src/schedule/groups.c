/* The groups of an instruction: block tables, and the steps in them. */
#include "schedule/schedule.h"

#include "model/model.h"

kvf_group_steps *kvf_copy_groups(const kvf_group_steps *groups, uint32_t count) {
    uint64_t ids = 0, bytes;
    for (uint32_t g = 0; g < count; g++)
        ids += groups[g].table.count; /* 2^32 tables of 2^32 do not fit in memory */
    if (!kvf_mul_add(ids, sizeof(uint32_t), (uint64_t)count * sizeof *groups, &bytes) || bytes > SIZE_MAX)
        return NULL;
    kvf_group_steps *copy = kvf_alloc((size_t)bytes, 1);
    if (!copy)
        return NULL;
    uint32_t *next = (uint32_t *)(copy + count);
    for (uint32_t g = 0; g < count; g++) {
        copy[g] = groups[g];
        copy[g].table.ids = next;
        if (groups[g].table.count)
            memcpy(next, groups[g].table.ids, groups[g].table.count * sizeof *next);
        next += groups[g].table.count;
    }
    return copy;
}

/* The steps of a group that are needed after the token `end`, where those before the token `begin` are there. */
static kvf_group_steps needed_steps(const kvf_group_desc *group, uint64_t begin, uint64_t end) {
    if (group->kind == KVF_GROUP_STATE)
        return (kvf_group_steps){.begin = 0, .end = 1};
    return (kvf_group_steps){.begin = kvf_group_step_count(group, kvf_first_moved(group, begin, end)),
                             .end = kvf_group_step_count(group, end)};
}

static kvf_status state_group(const char *group_name, const kvf_block_table *table, kvf_group_steps *out) {
    if (table->count == 0 || table->ids[table->count - 1] == KVF_NO_BLOCK)
        return kvf_fail(KVF_E_RANGE, "group %s: there is no block for the state", group_name);
    out->table = (kvf_block_table){.ids = &table->ids[table->count - 1], .count = 1};
    return KVF_OK;
}

static kvf_status token_group(const kvf_group_desc *group, uint32_t tokens_per_block,
                              const kvf_block_table *table, kvf_group_steps *out) {
    const uint64_t begin = kvf_group_token_count(group, out->begin),
                   end = kvf_group_token_count(group, out->end);
    out->table = *table;
    if (begin == end)
        return KVF_OK;
    uint64_t first = begin / tokens_per_block, last = (end - 1) / tokens_per_block;
    uint64_t table_end = (uint64_t)table->first_block + table->count;
    if (first < table->first_block || last >= table_end)
        return kvf_fail(
            KVF_E_RANGE,
            "group %s: tokens [%llu, %llu) are in blocks [%llu, %llu], but the table has [%u, %llu)",
            group->name, (unsigned long long)begin, (unsigned long long)end, (unsigned long long)first,
            (unsigned long long)last, table->first_block, (unsigned long long)table_end);
    for (uint64_t b = first; b <= last; b++)
        if (table->ids[b - table->first_block] == KVF_NO_BLOCK)
            return kvf_fail(
                KVF_E_RANGE,
                "group %s: tokens [%llu, %llu) need block %llu of the sequence, but the table has none there",
                group->name, (unsigned long long)begin, (unsigned long long)end, (unsigned long long)b);
    return KVF_OK;
}

kvf_status kvf_make_groups(const kvf_schedule *s, const kvf_block_table *tables, uint32_t count,
                           uint64_t begin, uint64_t end, kvf_group_steps **out) {
    if (!tables || count != s->group_count)
        return kvf_fail(KVF_E_INVALID, "tables of %u groups; the model has %u", tables ? count : 0,
                        s->group_count);
    kvf_group_steps *groups = kvf_alloc(count, sizeof *groups);
    if (!groups)
        return kvf_nomem("the groups of an instruction");
    kvf_status status = KVF_OK;
    for (uint32_t g = 0; g < count && !status; g++) {
        const kvf_group_desc *group = kvf_model_group(s->model, g);
        groups[g] = needed_steps(group, begin, end);
        if (tables[g].count && !tables[g].ids)
            status = kvf_fail(KVF_E_INVALID, "group %s: the table is NULL and has %u blocks", group->name,
                              tables[g].count);
        else if (group->kind == KVF_GROUP_STATE)
            status = state_group(group->name, &tables[g], &groups[g]);
        else
            status = token_group(group, s->options.tokens_per_block[g], &tables[g], &groups[g]);
    }
    if (!status && !(*out = kvf_copy_groups(groups, count)))
        status = kvf_nomem("the groups of an instruction");
    kvf_free(groups);
    return status;
}

kvf_status kvf_make_steps(const kvf_schedule *s, uint64_t tokens, kvf_group_steps **out) {
    kvf_group_steps *groups = kvf_alloc0(s->group_count, sizeof *groups);
    if (!groups)
        return kvf_nomem("the groups of an instruction");
    for (uint32_t g = 0; g < s->group_count; g++)
        groups[g] = needed_steps(kvf_model_group(s->model, g), 0, tokens);
    *out = groups;
    return KVF_OK;
}
