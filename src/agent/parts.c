#include "agent/parts.h"

#include "agent/steps.h"

struct kvf_part {
    kvf_group_steps *groups;
    kvf_part *prev, *next; /* parts->parts */
};

void kvf_parts_free(kvf_parts *parts) {
    kvf_part *part, *next;
    DL_FOREACH_SAFE(parts->parts, part, next) {
        kvf_free(part->groups);
        kvf_free(part);
    }
    *parts = (kvf_parts){0};
}

/* Whether a part of a group continues the parts before: it has no blocks, or the table's next ones. */
static kvf_status check_group(const kvf_group_steps *before, const kvf_group_steps *group) {
    uint64_t next = (uint64_t)before->table.first_block + before->table.count;
    if (group->begin != before->begin || group->end != before->end)
        return kvf_fail(KVF_E_MISMATCH, "steps are [%llu, %llu); the parts before had [%llu, %llu)",
                        (unsigned long long)group->begin, (unsigned long long)group->end,
                        (unsigned long long)before->begin, (unsigned long long)before->end);
    if (group->table.first_block != next)
        return kvf_fail(KVF_E_RANGE, "first_block is %u; the blocks before end with %llu",
                        group->table.first_block, (unsigned long long)next);
    return KVF_OK;
}

static kvf_status check(const kvf_parts *parts, const kvf_group_steps *groups, uint32_t count,
                        uint32_t first_id, bool more) {
    uint64_t ids = 0;
    kvf_status status = KVF_OK;
    for (uint32_t g = 0; g < count; g++)
        ids += groups[g].table.count;
    if (first_id != parts->ids)
        return kvf_fail(KVF_E_RANGE, "first_id is %u; %u ids are known", first_id, parts->ids);
    if (more && ids == 0)
        return kvf_fail(KVF_E_RANGE, "a part without ids, though others follow");
    if (ids > KVF_WIRE_MAX_TABLE_IDS - parts->ids)
        return kvf_fail(KVF_E_RANGE, "the block tables have more than %u ids", KVF_WIRE_MAX_TABLE_IDS);
    if (parts->parts && count != parts->group_count)
        return kvf_fail(KVF_E_MISMATCH, "%u groups; the parts before had %u", count, parts->group_count);
    for (uint32_t g = 0; parts->parts && g < count && !status; g++) {
        status = check_group(&parts->parts->prev->groups[g], &groups[g]);
        if (status)
            return kvf_fail_in(status, "group %u: ", g);
    }
    return status;
}

kvf_status kvf_parts_add(kvf_parts *parts, const kvf_group_steps *groups, uint32_t count, uint32_t first_id,
                         bool more) {
    kvf_status status = check(parts, groups, count, first_id, more);
    if (status)
        return status;
    kvf_part *part = kvf_alloc0(1, sizeof *part);
    kvf_group_steps *copy = kvf_steps_copy(groups, count);
    if (!part || !copy) {
        kvf_free(part);
        kvf_free(copy);
        return kvf_nomem("block tables");
    }
    part->groups = copy;
    DL_APPEND(parts->parts, part);
    parts->group_count = count;
    for (uint32_t g = 0; g < count; g++)
        parts->ids += groups[g].table.count;
    return KVF_OK;
}

kvf_group_steps *kvf_parts_join(kvf_parts *parts) {
    uint32_t count = parts->group_count;
    kvf_group_steps *all = kvf_alloc(1, count * sizeof *all + (size_t)parts->ids * sizeof(uint32_t));
    uint32_t *at = all ? (uint32_t *)(void *)(all + count) : NULL;
    for (uint32_t g = 0; all && g < count; g++) {
        const kvf_part *part;
        all[g] = parts->parts->groups[g]; /* steps, and where the table begins */
        all[g].table.ids = at;
        all[g].table.count = 0;
        DL_FOREACH(parts->parts, part) {
            const kvf_block_table *table = &part->groups[g].table;
            if (table->count > 0)
                memcpy(at, table->ids, table->count * sizeof *at);
            at += table->count;
            all[g].table.count += table->count;
        }
    }
    if (all)
        kvf_parts_free(parts);
    return all;
}
