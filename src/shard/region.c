/*
 * The views of a region: one for each group and each run of parts whose cells lie alike in it.
 */
#include "shard/axes.h"

/* The held layers of a part that lie in a region; none of a part without units, whose placements mean nothing. */
typedef struct found {
    kvf_range layers; /* from the first to the last */
    uint32_t count;
} found;

/* The first held layer of a part that lies in this region or a later one, if the regions ascend. */
static uint32_t first_from(const kvf_shard *shard, uint32_t group, uint32_t part, uint32_t region) {
    kvf_range left = kvf_shard_group_layers(shard, group);
    while (left.begin < left.end) {
        const uint32_t middle = left.begin + (left.end - left.begin) / 2;
        if (kvf_shard_placement(shard, group, middle, part)->region < region)
            left.begin = middle + 1;
        else
            left.end = middle;
    }
    return left.begin;
}

static found find_layers(const kvf_shard *shard, uint32_t group, uint32_t part, uint32_t region) {
    kvf_range held = kvf_shard_group_layers(shard, group);
    found out = {0};
    if (!kvf_holds_units(&shard->groups[group].parts[part]))
        return out;
    if (shard->groups[group].regions_ascend) {
        held.begin = first_from(shard, group, part, region);
        held.end = first_from(shard, group, part, region + 1);
    }
    for (uint32_t layer = held.begin; layer < held.end; layer++) {
        if (kvf_shard_placement(shard, group, layer, part)->region != region)
            continue;
        out.layers.begin = out.count++ ? out.layers.begin : layer;
        out.layers.end = layer + 1;
    }
    return out;
}

/* Whether the part after `parts` continues the same view, at the same distance as those before, and behind them. */
static bool goes_on(const kvf_shard *shard, uint32_t group, found in, kvf_range parts, uint32_t region) {
    const kvf_group_desc *desc = kvf_model_group(shard->model, group);
    uint32_t next = parts.end;
    if (next == desc->part_count || !kvf_same_cells(&desc->parts[parts.begin], &desc->parts[next]))
        return false;
    const kvf_part_share *a = &shard->groups[group].parts[parts.begin],
                         *b = &shard->groups[group].parts[next];
    found there = find_layers(shard, group, next, region);
    if (a->units.begin != b->units.begin || a->units.end != b->units.end || there.count != in.count ||
        there.layers.begin != in.layers.begin || there.layers.end != in.layers.end)
        return false;
    for (uint32_t layer = in.layers.begin; layer < in.layers.end; layer++) {
        const kvf_placement *first = kvf_shard_placement(shard, group, layer, parts.begin);
        const kvf_placement *second = kvf_shard_placement(shard, group, layer, parts.begin + 1);
        const kvf_placement *here = kvf_shard_placement(shard, group, layer, next);
        const kvf_placement *of_first = kvf_shard_placement(shard, group, in.layers.begin, parts.begin);
        const kvf_placement *of_next = kvf_shard_placement(shard, group, in.layers.begin, next);
        if (here->offset < first->offset || !kvf_placements_even(first, second, here, next - parts.begin) ||
            here->offset - first->offset != of_next->offset - of_first->offset)
            return false;
    }
    return true;
}

static void fill(const kvf_shard *shard, uint32_t group, kvf_range parts, found in, kvf_region_view *out) {
    const kvf_group_desc *desc = kvf_model_group(shard->model, group);
    kvf_axes axes = {0};
    out->group = group;
    out->parts = parts;
    out->layers = in.layers;
    out->layer_count = in.count;
    out->dtype = desc->parts[parts.begin].dtype;
    out->offset = kvf_shard_placement(shard, group, in.layers.begin, parts.begin)->offset;
    out->regular =
        in.count == in.layers.end - in.layers.begin && kvf_axes_read(shard, group, in.layers, parts, &axes);
    out->axis_count = out->regular ? axes.nested_count : 0;
    memcpy(out->axes, axes.nested, sizeof out->axes);
}

/* The i-th view of a region; false when there are fewer. */
static bool find_view(const kvf_shard *shard, uint32_t region, uint32_t i, kvf_region_view *out) {
    for (uint32_t g = 0; g < kvf_model_group_count(shard->model); g++) {
        kvf_range parts = {0, 0};
        for (; parts.begin < kvf_model_group(shard->model, g)->part_count; parts.begin = parts.end) {
            found in = find_layers(shard, g, parts.begin, region);
            parts.end = parts.begin + 1;
            while (in.count > 0 && goes_on(shard, g, in, parts, region))
                parts.end++;
            if (in.count == 0 || i-- > 0)
                continue;
            fill(shard, g, parts, in, out);
            return true;
        }
    }
    return false;
}

kvf_status kvf_shard_region_view(const kvf_shard *shard, uint32_t region, uint32_t i, kvf_region_view *out) {
    if (!shard)
        return kvf_fail(KVF_E_INVALID, "shard is NULL");
    kvf_status status = kvf_check_out(out, "kvf_region_view");
    if (status)
        return status;
    if (region >= shard->desc.region_count)
        return kvf_fail(KVF_E_RANGE, "region is %u; the shard of rank %u has %u", region, shard->desc.rank,
                        shard->desc.region_count);
    kvf_region_view view = {.struct_size = sizeof view, .region_bytes = shard->desc.region_bytes[region]};
    if (!find_view(shard, region, i, &view))
        return kvf_fail(KVF_E_NOT_FOUND, "region %u has fewer than %u views", region, i + 1);
    kvf_fill_out(out, &view, sizeof view);
    return KVF_OK;
}
