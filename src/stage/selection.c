/*
 * Selections: from a plan, or from elsewhere and checked.
 */
#include <stdlib.h>

#include "kernel/convert.h"
#include "plan/plan.h"
#include "stage/inside.h"

bool kvf_stream_converts(kvf_dtype from, kvf_dtype to) {
    return (from == to && kvf_dtype_bits(from) > 0) || kvf_kernel_converts(from, to);
}

/* ---- lanes ------------------------------------------------------------------------------------ */

/* Where the lanes of each layer of the model begin, and their end. NULL: no memory. */
static uint32_t *layers_of(const kvf_model *model, const kvf_stream_item *items, uint32_t count) {
    const uint32_t layers = kvf_model_layer_count(model);
    uint32_t *begins = kvf_alloc0((size_t)layers + 1, sizeof *begins);
    for (uint32_t i = 0; i < count && begins; i++) {
        const kvf_group_desc *group = kvf_model_group(model, items[i].group);
        for (uint32_t layer = items[i].layers.begin; layer < items[i].layers.end; layer++)
            begins[group->layers[layer] + 1]++;
    }
    for (uint32_t layer = 0; layer < layers && begins; layer++)
        begins[layer + 1] += begins[layer];
    return begins;
}

/* Sorts by layer, and keeps the order of items in a layer, which is by group, part and first unit. A counting sort:
 * peers choose the items, so the time must be linear in the lanes. */
kvf_status kvf_lanes_of(const kvf_model *model, const kvf_stream_item *items, uint32_t count, kvf_lane **out,
                        uint32_t *lane_count) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < count; i++)
        total += items[i].layers.end - items[i].layers.begin;
    if (total > KVF_STREAM_MAX_LANES)
        return kvf_fail(KVF_E_LIMIT, "the items have %llu layers together; allowed: up to %u",
                        (unsigned long long)total, KVF_STREAM_MAX_LANES);
    kvf_lane *lanes = kvf_alloc(total, sizeof *lanes);
    uint32_t *next = layers_of(model, items, count);
    for (uint32_t i = 0; i < count && lanes && next; i++) {
        const kvf_group_desc *group = kvf_model_group(model, items[i].group);
        for (uint32_t layer = items[i].layers.begin; layer < items[i].layers.end; layer++)
            lanes[next[group->layers[layer]]++] =
                (kvf_lane){.layer = group->layers[layer], .item = i, .group_layer = layer};
    }
    const bool made = lanes && next;
    kvf_free(next);
    if (!made) {
        kvf_free(lanes);
        return kvf_nomem("a selection");
    }
    *out = lanes;
    *lane_count = (uint32_t)total;
    return KVF_OK;
}

/* ---- checking --------------------------------------------------------------------------------- */

static uint32_t or_one(uint32_t value) {
    return value ? value : 1;
}

static kvf_status check_range(const char *name, kvf_range range, uint32_t count) {
    if (range.begin >= range.end || range.end > count)
        return kvf_fail(KVF_E_RANGE, "%s are [%u, %u); allowed: a range within [0, %u) that is not empty",
                        name, range.begin, range.end, count);
    return KVF_OK;
}

static kvf_status take_share(const kvf_group_desc *group, const char *whose, kvf_token_share *share) {
    share->count = or_one(share->count);
    share->width = or_one(share->width);
    if (share->index >= share->count)
        return kvf_fail(KVF_E_RANGE, "tokens.index of the %s is %u; allowed: 0 to %u", whose, share->index,
                        share->count - 1);
    if (group->kind == KVF_GROUP_STATE && share->count != 1)
        return kvf_fail(KVF_E_RANGE, "tokens.count of the %s is %u; a state cannot be shared by token", whose,
                        share->count);
    if (share->count == 1)
        share->width = 1; /* has no meaning then */
    return KVF_OK;
}

/* Checks one item by itself; fills in defaults. */
static kvf_status take_item(const kvf_model *model, kvf_stream_item *item) {
    const kvf_group_desc *group = kvf_model_group(model, item->group);
    if (!group)
        return kvf_fail(KVF_E_RANGE, "group is %u; the model has %u", item->group,
                        kvf_model_group_count(model));
    if (item->part >= group->part_count)
        return kvf_fail(KVF_E_RANGE, "part is %u; group %s has %u", item->part, group->name,
                        group->part_count);
    const kvf_part_desc *part = &group->parts[item->part];
    kvf_status status = check_range("layers", item->layers, group->layer_count);
    if (!status)
        status = check_range("units", item->units, part->units);
    if (!status)
        status = take_share(group, "holder", &item->tokens[0]);
    if (!status)
        status = take_share(group, "reader", &item->tokens[1]);
    if (!status && !kvf_stream_converts(part->dtype, item->dtype))
        return kvf_fail(KVF_E_INVALID, "dtype is %s, into which %s of part %s cannot be converted",
                        kvf_dtype_name(item->dtype), kvf_dtype_name(part->dtype), part->name);
    return status;
}

static int compare_items(const kvf_stream_item *a, const kvf_stream_item *b) {
    const uint32_t x[] = {a->group, a->part, a->units.begin, a->layers.begin};
    const uint32_t y[] = {b->group, b->part, b->units.begin, b->layers.begin};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        if (x[i] != y[i])
            return x[i] < y[i] ? -1 : 1;
    return 0;
}

static bool same_shares(const kvf_stream_item *a, const kvf_stream_item *b) {
    return memcmp(a->tokens, b->tokens, sizeof a->tokens) == 0; /* three numbers each, no padding */
}

/* Checks an item against the one before it. */
static kvf_status check_order(const kvf_stream_item *before, const kvf_stream_item *item) {
    if (compare_items(before, item) > 0)
        return kvf_fail(
            KVF_E_INVALID,
            "group %u, part %u, units from %u, layers from %u are not in ascending order: the item before "
            "has group %u, part %u, units from %u, layers from %u",
            item->group, item->part, item->units.begin, item->layers.begin, before->group, before->part,
            before->units.begin, before->layers.begin);
    if (before->group == item->group && !same_shares(before, item))
        return kvf_fail(KVF_E_INVALID,
                        "tokens are shared differently than in the item before, of the same group");
    return KVF_OK;
}

/* In a layer, items of one part are in the order of their units, so neighbours are enough. */
static kvf_status check_overlap(const kvf_stream_item *items, const kvf_lane *lanes, uint32_t count) {
    for (uint32_t i = 1; i < count; i++) {
        const kvf_stream_item *a = &items[lanes[i - 1].item], *b = &items[lanes[i].item];
        if (lanes[i - 1].layer == lanes[i].layer && a->group == b->group && a->part == b->part &&
            a->units.end > b->units.begin)
            return kvf_fail(KVF_E_OVERLAP, "items %u and %u both have layer %u of group %u, part %u, unit %u",
                            lanes[i - 1].item, lanes[i].item, lanes[i].layer, b->group, b->part,
                            b->units.begin);
    }
    return KVF_OK;
}

static kvf_status check_items(const kvf_model *model, kvf_stream_item *items, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        kvf_status status = take_item(model, &items[i]);
        if (!status && i > 0)
            status = check_order(&items[i - 1], &items[i]);
        if (status)
            return kvf_fail_in(status, "item %u: ", i);
    }
    kvf_lane *lanes = NULL;
    uint32_t lane_count = 0;
    kvf_status status = kvf_lanes_of(model, items, count, &lanes, &lane_count);
    if (!status)
        status = check_overlap(items, lanes, lane_count);
    kvf_free(lanes);
    return status;
}

/* ---- making them ------------------------------------------------------------------------------ */

/* Allocates a selection with room for `count` items behind it. */
static kvf_selection *selection_of(uint32_t count, kvf_stream_item **items) {
    kvf_selection *selection = kvf_alloc0(1, sizeof *selection + (size_t)count * sizeof **items);
    if (selection) {
        *items = (kvf_stream_item *)(void *)(selection + 1);
        *selection = (kvf_selection){*items, count};
    }
    return selection;
}

kvf_status kvf_selection_check(const kvf_model *model, const kvf_stream_item *items, uint32_t count,
                               kvf_selection **out) {
    if (count > KVF_STREAM_MAX_LANES)
        return kvf_fail(KVF_E_LIMIT, "there are %u items; allowed: up to %u", count, KVF_STREAM_MAX_LANES);
    kvf_stream_item *own = NULL;
    kvf_selection *selection = selection_of(count, &own);
    if (!selection)
        return kvf_nomem("a selection");
    if (count > 0)
        memcpy(own, items, count * sizeof *own);
    kvf_status status = check_items(model, own, count);
    if (status)
        kvf_free(selection);
    else
        *out = selection;
    return status;
}

static int by_order(const void *a, const void *b) {
    return compare_items(a, b);
}

/* Joins items of neighbouring layers that have the same units. Returns how many items are left. */
static uint32_t join_layers(kvf_stream_item *items, uint32_t count) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < count; i++) {
        kvf_stream_item *last = n ? &items[n - 1] : NULL;
        if (last && last->group == items[i].group && last->part == items[i].part &&
            last->units.begin == items[i].units.begin && last->units.end == items[i].units.end &&
            last->layers.end == items[i].layers.begin)
            last->layers.end = items[i].layers.end;
        else
            items[n++] = items[i];
    }
    return n;
}

static kvf_stream_item item_of(const kvf_plan *plan, const kvf_plan_cut *cut) {
    return (kvf_stream_item){.group = cut->group,
                             .part = cut->part,
                             .layers = cut->layers,
                             .units = cut->units,
                             .tokens = {cut->tokens, plan->local->groups[cut->group].share},
                             .dtype = kvf_plan_stream_type(plan, cut->group, cut->part)};
}

kvf_status kvf_selection_of_plan(const kvf_plan *plan, uint32_t source, kvf_selection **out) {
    if (source >= plan->source_count)
        return kvf_fail(KVF_E_RANGE, "source is %u; the plan has %u", source, plan->source_count);
    uint32_t count = 0;
    for (uint32_t i = 0; i < plan->cut_count; i++)
        count += plan->cuts[i].source == source;
    kvf_stream_item *items = kvf_alloc(count, sizeof *items);
    if (!items)
        return kvf_nomem("a selection");
    uint32_t n = 0;
    for (uint32_t i = 0; i < plan->cut_count; i++)
        if (plan->cuts[i].source == source)
            items[n++] = item_of(plan, &plan->cuts[i]);
    qsort(items, n, sizeof *items, by_order);
    kvf_status status = kvf_selection_check(plan->local->model, items, join_layers(items, n), out);
    kvf_free(items);
    return status;
}

void kvf_selection_free(kvf_selection *selection) {
    kvf_free(selection);
}
