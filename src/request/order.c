#include "request/order.h"

#include <stdlib.h>

#include "model/model.h"

static const kvf_group_desc *group_of(const kvf_request *request, const kvf_copy_rule *rule) {
    return kvf_model_group(kvf_shard_model(kvf_plan_local(request->plan)), rule->group);
}

/* Bytes of one lane of a rule in this request. */
static uint64_t lane_bytes(const kvf_request *request, uint32_t rule) {
    const kvf_copy_rule *r = &request->plan->rules[rule];
    return r->cell_bytes * r->units * r->rows_per_step *
           request->walks[request->plan->rule_walks[rule]].steps;
}

static uint32_t first_layer(const kvf_group_desc *group, const kvf_copy_lane *lanes, uint32_t count) {
    uint32_t first = UINT32_MAX;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t layer = group->layers[lanes[i].layers.begin];
        first = layer < first ? layer : first;
    }
    return first;
}

/* Each page as a stretch of its own. Returns how many; without `out` it only counts. */
static uint32_t list_pages(const kvf_request *request, uint32_t source, kvf_layer_stretch *out) {
    const kvf_range rules = kvf_plan_source_rules(request->plan, source);
    uint32_t count = 0;
    for (uint32_t rule = rules.begin; rule < rules.end; rule++) {
        const kvf_copy_rule *r = &request->plan->rules[rule];
        const uint64_t bytes = lane_bytes(request, rule) * r->lanes_per_page;
        if (bytes == 0)
            continue;
        for (uint32_t lane = 0; lane < r->lane_count; lane += r->lanes_per_page, count++)
            if (out)
                out[count] = (kvf_layer_stretch){
                    .rule = rule,
                    .lanes = {lane, lane + r->lanes_per_page},
                    .layer = first_layer(group_of(request, r), r->lanes + lane, r->lanes_per_page),
                    .bytes = bytes};
    }
    return count;
}

static int by_layer(const void *a, const void *b) {
    const kvf_layer_stretch *x = a, *y = b;
    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    if (x->rule != y->rule)
        return x->rule < y->rule ? -1 : 1;
    return x->lanes.begin < y->lanes.begin ? -1 : x->lanes.begin > y->lanes.begin;
}

/* Notes after which bytes of the order each layer by itself is whole; then those before it, too. */
static void measure(kvf_layer_order *order) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < order->stretch_count; i++) {
        const kvf_layer_stretch *stretch = &order->stretches[i];
        const kvf_copy_rule *rule = &order->request->plan->rules[stretch->rule];
        const kvf_group_desc *group = group_of(order->request, rule);
        bytes += stretch->bytes;
        for (uint32_t lane = stretch->lanes.begin; lane < stretch->lanes.end; lane++)
            for (uint32_t l = rule->lanes[lane].layers.begin; l < rule->lanes[lane].layers.end; l++)
                order->whole_after[group->layers[l]] = bytes;
    }
    for (uint32_t l = 1; l < order->layer_count; l++)
        order->whole_after[l] = kvf_max_u64(order->whole_after[l], order->whole_after[l - 1]);
}

/* Neighbouring pages of a rule become one stretch: then their runs are taken, and merged, as without an order. */
static void join_pages(kvf_layer_order *order) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < order->stretch_count; i++) {
        kvf_layer_stretch *last = n ? &order->stretches[n - 1] : NULL;
        const kvf_layer_stretch *page = &order->stretches[i];
        if (last && last->rule == page->rule && last->lanes.end == page->lanes.begin) {
            last->lanes.end = page->lanes.end;
            last->bytes += page->bytes;
        } else {
            order->stretches[n++] = *page;
        }
    }
    order->stretch_count = n;
}

kvf_status kvf_layer_order_make(const kvf_request *request, uint32_t source, kvf_layer_order **out) {
    kvf_layer_order *order = kvf_alloc0(1, sizeof *order);
    if (!order)
        return kvf_nomem("an order of layers");
    order->request = request;
    order->layer_count = kvf_model_layer_count(kvf_shard_model(kvf_plan_local(request->plan)));
    order->stretch_count = list_pages(request, source, NULL);
    order->stretches = kvf_alloc(order->stretch_count, sizeof *order->stretches);
    order->whole_after = kvf_alloc0(order->layer_count, sizeof *order->whole_after);
    if (!order->stretches || !order->whole_after) {
        kvf_layer_order_free(order);
        return kvf_nomem("an order of layers");
    }
    (void)list_pages(request, source, order->stretches);
    qsort(order->stretches, order->stretch_count, sizeof *order->stretches, by_layer);
    measure(order);
    join_pages(order);
    *out = order;
    return KVF_OK;
}

void kvf_layer_order_free(kvf_layer_order *order) {
    if (!order)
        return;
    kvf_free(order->stretches);
    kvf_free(order->whole_after);
    kvf_free(order);
}

uint32_t kvf_layer_order_whole(const kvf_layer_order *order, uint64_t bytes) {
    uint32_t low = 0, high = order->layer_count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (order->whole_after[middle] <= bytes)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* ---- its runs ---------------------------------------------------------------------------------- */

static void enter(kvf_layer_cursor *cursor) {
    if (cursor->stretch < cursor->order->stretch_count) {
        const kvf_layer_stretch *stretch = &cursor->order->stretches[cursor->stretch];
        kvf_run_cursor_start_in(&cursor->runs, cursor->order->request, stretch->rule, stretch->lanes);
    }
}

void kvf_layer_cursor_start(kvf_layer_cursor *cursor, const kvf_layer_order *order) {
    *cursor = (kvf_layer_cursor){.order = order};
    enter(cursor);
}

size_t kvf_layer_cursor_next(kvf_layer_cursor *cursor, kvf_run *runs, size_t capacity) {
    for (; cursor->stretch < cursor->order->stretch_count; cursor->stretch++, enter(cursor)) {
        const size_t got = kvf_run_cursor_next(&cursor->runs, runs, capacity);
        if (got > 0)
            return got;
    }
    return 0;
}

size_t kvf_layer_cursor_next_nests(kvf_layer_cursor *cursor, kvf_run *nests, size_t capacity,
                                   kvf_run_shape *shape) {
    for (; cursor->stretch < cursor->order->stretch_count; cursor->stretch++, enter(cursor)) {
        const size_t got = kvf_run_cursor_next_nests(&cursor->runs, nests, capacity, shape);
        if (got > 0)
            return got;
    }
    return 0;
}
