#include "request/order.h"

#include <stdlib.h>

#include "model/model.h"

/* Lanes of one rule that follow one another in the order. At first one page; then neighbours are joined. */
typedef struct stretch {
    uint32_t rule;
    kvf_range lanes;
    uint32_t layer; /* the first model layer of its lanes */
} stretch;

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

/* Lists each page of rules that move something. Returns how many; without `out` it only counts. */
static uint32_t list_pages(const kvf_request *request, uint32_t source, stretch *out) {
    const kvf_range rules = kvf_plan_source_rules(request->plan, source);
    uint32_t count = 0;
    for (uint32_t rule = rules.begin; rule < rules.end; rule++) {
        const kvf_copy_rule *r = &request->plan->rules[rule];
        if (lane_bytes(request, rule) == 0)
            continue;
        for (uint32_t lane = 0; lane < r->lane_count; lane += r->lanes_per_page, count++)
            if (out)
                out[count] =
                    (stretch){.rule = rule,
                              .lanes = {lane, lane + r->lanes_per_page},
                              .layer = first_layer(group_of(request, r), r->lanes + lane, r->lanes_per_page)};
    }
    return count;
}

static int by_layer(const void *a, const void *b) {
    const stretch *x = a, *y = b;
    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    if (x->rule != y->rule)
        return x->rule < y->rule ? -1 : 1;
    return x->lanes.begin < y->lanes.begin ? -1 : x->lanes.begin > y->lanes.begin;
}

/* Notes after which bytes of the order each layer by itself is whole; then those before it, too. */
static void measure(const kvf_layer_order *order, const kvf_request *request, const stretch *pages,
                    uint32_t count) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        const kvf_copy_rule *rule = &request->plan->rules[pages[i].rule];
        const kvf_group_desc *group = group_of(request, rule);
        bytes += lane_bytes(request, pages[i].rule) * (pages[i].lanes.end - pages[i].lanes.begin);
        for (uint32_t lane = pages[i].lanes.begin; lane < pages[i].lanes.end; lane++)
            for (uint32_t l = rule->lanes[lane].layers.begin; l < rule->lanes[lane].layers.end; l++)
                order->whole_after[group->layers[l]] = bytes;
    }
    for (uint32_t l = 1; l < order->layer_count; l++)
        order->whole_after[l] = kvf_max_u64(order->whole_after[l], order->whole_after[l - 1]);
}

/* Returns how many stretches are left. */
static uint32_t join_pages(stretch *pages, uint32_t count) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < count; i++)
        if (n > 0 && pages[n - 1].rule == pages[i].rule && pages[n - 1].lanes.end == pages[i].lanes.begin)
            pages[n - 1].lanes.end = pages[i].lanes.end;
        else
            pages[n++] = pages[i];
    return n;
}

/* Makes each stretch a rule of the order's plan. */
static kvf_status make_rules(kvf_layer_order *order, const kvf_request *request, const stretch *stretches,
                             uint32_t count) {
    const kvf_plan *plan = request->plan;
    order->request = *request;
    order->plan = *plan;
    order->plan.rules = kvf_alloc(count, sizeof *order->plan.rules);
    order->plan.rule_walks = kvf_alloc(count, sizeof *order->plan.rule_walks);
    if (!order->plan.rules || !order->plan.rule_walks)
        return kvf_nomem("an order of layers");
    for (uint32_t i = 0; i < count; i++) {
        kvf_copy_rule rule = plan->rules[stretches[i].rule];
        rule.lanes += stretches[i].lanes.begin;
        rule.lane_count = stretches[i].lanes.end - stretches[i].lanes.begin;
        order->plan.rules[i] = rule;
        order->plan.rule_walks[i] = plan->rule_walks[stretches[i].rule];
    }
    order->rules = (kvf_range){0, count};
    order->plan.source_rules = &order->rules;
    order->plan.source_count = 1;
    order->plan.rule_count = count;
    order->request.plan = &order->plan;
    return KVF_OK;
}

kvf_status kvf_layer_order_make(const kvf_request *request, uint32_t source, kvf_layer_order **out) {
    kvf_layer_order *order = kvf_alloc0(1, sizeof *order);
    const uint32_t count = list_pages(request, source, NULL);
    stretch *pages = kvf_alloc(count, sizeof *pages);
    kvf_status status = order && pages ? KVF_OK : kvf_nomem("an order of layers");
    if (!status) {
        order->layer_count = kvf_model_layer_count(kvf_shard_model(kvf_plan_local(request->plan)));
        order->whole_after = kvf_alloc0(order->layer_count, sizeof *order->whole_after);
        status = order->whole_after ? KVF_OK : kvf_nomem("an order of layers");
    }
    if (!status) {
        (void)list_pages(request, source, pages);
        qsort(pages, count, sizeof *pages, by_layer);
        measure(order, request, pages, count);
        status = make_rules(order, request, pages, join_pages(pages, count));
    }
    kvf_free(pages);
    if (status)
        kvf_layer_order_free(order);
    else
        *out = order;
    return status;
}

void kvf_layer_order_free(kvf_layer_order *order) {
    if (!order)
        return;
    kvf_free(order->plan.rules);
    kvf_free(order->plan.rule_walks);
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
