/* Numbers of descriptors in their table: region by region, block by block. */
#include "connector/connector.h"

kvf_status kvf_state_blocks(uint64_t kernel_blocks, uint32_t physical_per_logical, uint64_t *out) {
    if (!physical_per_logical || !out)
        return kvf_plain_fail(KVF_E_INVALID, "%s", out ? "physical_per_logical is 0" : "out is NULL");
    if (kernel_blocks % physical_per_logical)
        return kvf_refuse(KVF_REFUSAL_LENGTH_NOT_DIVISIBLE, KVF_E_NOT_EXPRESSIBLE,
                          "%llu kernel blocks are not a whole number of logical blocks of %u",
                          (unsigned long long)kernel_blocks, physical_per_logical);
    *out = kernel_blocks / physical_per_logical;
    return KVF_OK;
}

/* The ids of one list in one region that begins at `first` and has `blocks` descriptors. */
static kvf_status add_region(const kvf_ids *list, size_t region, uint64_t first, uint64_t blocks,
                             kvf_ids *out) {
    for (size_t i = 0; i < list->count; i++) {
        if (list->at[i] >= blocks)
            return kvf_plain_fail(KVF_E_RANGE, "block id %llu in region %zu; allowed: below %llu",
                                  (unsigned long long)list->at[i], region, (unsigned long long)blocks);
        kvf_ids_add(out, first + list->at[i]);
    }
    return KVF_OK;
}

/* Room for every block in every region, and a check that no id overflows. */
static kvf_status make_room(const kvf_block_lists *lists, uint64_t regions, uint64_t descriptors,
                            kvf_ids *out) {
    uint64_t blocks = 0, total;
    for (size_t g = 0; g < lists->count; g++)
        blocks += lists->groups[g].count;
    if (!kvf_mul(blocks, regions, &total) || descriptors == UINT64_MAX)
        return kvf_plain_fail(KVF_E_OVERFLOW, "%llu blocks in %llu regions do not fit in 64 bits",
                              (unsigned long long)blocks, (unsigned long long)regions);
    return kvf_ids_make(out, total);
}

/* The index where attention ends and state begins, and the index where the table ends. */
static kvf_status measure(const kvf_id_space *space, uint64_t *attention_end, uint64_t *end) {
    if (!kvf_mul(space->attention_regions, space->attention_blocks, attention_end) ||
        !kvf_mul_add(space->state_regions, space->state_blocks, *attention_end, end))
        return kvf_plain_fail(KVF_E_OVERFLOW,
                              "%u regions of %llu and %u of %llu descriptors do not fit in 64 bits",
                              space->attention_regions, (unsigned long long)space->attention_blocks,
                              space->state_regions, (unsigned long long)space->state_blocks);
    return KVF_OK;
}

static kvf_status add_attention(const kvf_id_space *space, const kvf_ids *list, uint32_t region,
                                kvf_ids *out) {
    return add_region(list, region, region * space->attention_blocks, space->attention_blocks, out);
}

/* Without state: each region lists the blocks of all groups, one group after another. */
static kvf_status number_attention(const kvf_id_space *space, const kvf_block_lists *lists, kvf_ids *out) {
    kvf_status status = KVF_OK;
    for (uint32_t r = 0; r < space->attention_regions; r++)
        for (size_t g = 0; !status && g < lists->count; g++)
            status = add_attention(space, &lists->groups[g], r, out);
    return status;
}

static kvf_status number_groups(const kvf_id_space *space, const kvf_cache_kind *kinds,
                                const kvf_block_lists *lists, uint64_t state_begin, kvf_ids *out) {
    kvf_status status = KVF_OK;
    for (size_t g = 0; g < lists->count; g++) {
        bool state = kinds[g] == KVF_CACHE_SSM;
        uint32_t regions = state ? space->state_regions : space->attention_regions;
        for (uint32_t r = 0; !status && r < regions; r++)
            status = state ? add_region(&lists->groups[g], r, state_begin + r * space->state_blocks,
                                        space->state_blocks, out)
                           : add_attention(space, &lists->groups[g], r, out);
    }
    return status;
}

kvf_status kvf_desc_ids(const kvf_id_space *given, const kvf_cache_kind *kinds, const kvf_block_lists *lists,
                        kvf_ids *out) {
    if (!given || !kinds || !lists || !out)
        return kvf_plain_fail(KVF_E_INVALID, "no argument may be NULL");
    kvf_id_space space;
    uint64_t state_begin = 0, end = 0;
    kvf_ids made = {0};
    kvf_status status = kvf_take_struct(&space, sizeof space, given, "kvf_id_space");
    if (!status)
        status = measure(&space, &state_begin, &end);
    if (!status)
        status = make_room(lists,
                           space.attention_regions > space.state_regions ? space.attention_regions
                                                                         : space.state_regions,
                           end, &made);
    if (status)
        return status;
    bool has_state = false;
    for (size_t g = 0; g < lists->count; g++)
        has_state |= kinds[g] == KVF_CACHE_SSM;
    status = has_state ? number_groups(&space, kinds, lists, state_begin, &made)
                       : number_attention(&space, lists, &made);
    if (status) {
        kvf_ids_free(&made);
        return status;
    }
    *out = made;
    return KVF_OK;
}

/* The index where each region begins; regions differ in length and lie one after another. */
static kvf_status region_starts(const uint64_t *blocks, size_t count, uint64_t **out) {
    uint64_t *starts = kvf_alloc(count + 1, sizeof *starts);
    if (!starts)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for %zu regions", count);
    starts[0] = 0;
    for (size_t r = 0; r < count; r++)
        if (!kvf_add(starts[r], blocks[r], &starts[r + 1])) {
            kvf_free(starts);
            return kvf_plain_fail(KVF_E_OVERFLOW, "the descriptors of %zu regions do not fit in 64 bits",
                                  count);
        }
    *out = starts;
    return KVF_OK;
}

/* A walk over regions and groups, in one of the orders below. */
typedef struct region_walk {
    const kvf_block_lists *lists;
    const int32_t *groups;
    const uint64_t *blocks;
    const uint64_t *starts;
    size_t count;
} region_walk;

static kvf_status walk_region(const region_walk *walk, size_t region, size_t group, kvf_ids *out) {
    return add_region(&walk->lists->groups[group], region, walk->starts[region], walk->blocks[region], out);
}

static kvf_status walk_groups(const region_walk *walk, kvf_ids *out) {
    for (size_t g = 0; g < walk->lists->count; g++) {
        bool found = false;
        for (size_t r = 0; r < walk->count; r++) {
            if (walk->groups[r] != KVF_ALL_GROUPS && (size_t)walk->groups[r] != g)
                continue;
            found = true;
            kvf_status status = walk_region(walk, r, g, out);
            if (status)
                return status;
        }
        if (!found && walk->lists->groups[g].count)
            return kvf_refuse(KVF_REFUSAL_GROUP_WITHOUT_REGION, KVF_E_RANGE,
                              "group %zu has %zu blocks, but no region belongs to it", g,
                              walk->lists->groups[g].count);
    }
    return KVF_OK;
}

static kvf_status walk_regions(const region_walk *walk, bool every_group, kvf_ids *out) {
    kvf_status status = KVF_OK;
    for (size_t r = 0; r < walk->count; r++)
        for (size_t g = 0; !status && g < walk->lists->count; g++)
            if (every_group || (size_t)walk->groups[r] == g)
                status = walk_region(walk, r, g, out);
    return status;
}

typedef enum walk_order { BY_GROUP, BY_REGION, BY_LAYER } walk_order;

static kvf_status number_by(walk_order order, const kvf_block_lists *lists, const int32_t *groups,
                            const uint64_t *blocks, size_t count, kvf_ids *out) {
    uint64_t *starts = NULL;
    kvf_status status = region_starts(blocks, count, &starts);
    if (status)
        return status;
    region_walk walk = {lists, groups, blocks, starts, count};
    kvf_ids made = {0};
    status = make_room(lists, count, starts[count], &made);
    if (!status)
        status =
            order == BY_GROUP ? walk_groups(&walk, &made) : walk_regions(&walk, order == BY_REGION, &made);
    kvf_free(starts);
    if (status) {
        kvf_ids_free(&made);
        return status;
    }
    *out = made;
    return KVF_OK;
}

static kvf_status check_regions(const kvf_block_lists *lists, const int32_t *groups, const uint64_t *blocks,
                                size_t count, int32_t lowest, const kvf_ids *out) {
    if (!lists || !groups || !blocks || !out)
        return kvf_plain_fail(KVF_E_INVALID, "no argument may be NULL");
    for (size_t r = 0; r < count; r++)
        if (groups[r] < lowest || (groups[r] >= 0 && (size_t)groups[r] >= lists->count))
            return kvf_plain_fail(KVF_E_RANGE, "group of region %zu is %d; allowed: %d and more, below %zu",
                                  r, groups[r], lowest, lists->count);
    return KVF_OK;
}

kvf_status kvf_desc_ids_by_region(const kvf_block_lists *lists, const int32_t *region_groups,
                                  const uint64_t *region_blocks, size_t region_count, kvf_ids *out) {
    kvf_status status = check_regions(lists, region_groups, region_blocks, region_count, KVF_ALL_GROUPS, out);
    if (status)
        return status;
    bool assigned = false;
    for (size_t r = 0; r < region_count; r++)
        assigned |= region_groups[r] != 0;
    return number_by(assigned ? BY_GROUP : BY_REGION, lists, region_groups, region_blocks, region_count, out);
}

kvf_status kvf_desc_ids_by_layer(const kvf_block_lists *lists, const int32_t *layer_groups,
                                 const uint64_t *layer_blocks, size_t layer_count, kvf_ids *out) {
    kvf_status status = check_regions(lists, layer_groups, layer_blocks, layer_count, 0, out);
    return status ? status : number_by(BY_LAYER, lists, layer_groups, layer_blocks, layer_count, out);
}
