/*
 * What a request would cost, from the plan alone.
 */
#include "plan/plan.h"

/* With blocks scattered, runs merge inside a block pair only: lanes of one page, visited whole. */
static uint64_t runs_of_piece(const kvf_copy_rule *rule, uint64_t rows) {
    kvf_run_shape shape = kvf_rule_shape(rule, rows);
    uint64_t runs = shape.outer_count * shape.inner_count * rule->lane_count;
    if (shape.outer_count * shape.inner_count > 1)
        return runs;
    for (uint32_t i = 1; i < rule->lane_count; i++) {
        const kvf_copy_lane *a = &rule->lanes[i - 1], *b = &rule->lanes[i];
        bool one_page = i % rule->lanes_per_page != 0;
        runs -= one_page && a->local_offset + shape.bytes == b->local_offset &&
                a->remote_offset + shape.bytes == b->remote_offset;
    }
    return runs;
}

static void add_rule(const kvf_plan *plan, uint32_t index, uint64_t tokens, kvf_prediction *out) {
    const kvf_copy_rule *rule = &plan->rules[index];
    const kvf_plan_walk *sides = &plan->walks[plan->rule_walks[index]];
    const kvf_group_desc *group = kvf_model_group(plan->local->model, rule->group);
    uint64_t end = group->kind == KVF_GROUP_STATE ? 1 : tokens;
    kvf_walk walk = {sides->local, sides->remote, kvf_group_first_needed(group, end), end};
    kvf_walk_piece piece;
    while (kvf_walk_next(&walk, &piece)) {
        uint64_t rows = (uint64_t)piece.steps * rule->rows_per_step;
        out->runs += runs_of_piece(rule, rows);
        out->bytes += rows * rule->units * rule->cell_bytes * rule->lane_count;
    }
}

kvf_status kvf_plan_predict(const kvf_plan *plan, uint32_t source, uint64_t tokens,
                            const kvf_cost_model *cost, kvf_prediction *out) {
    if (source >= plan->source_count)
        return kvf_fail(KVF_E_RANGE, "source is %u; the plan has %u", source, plan->source_count);
    kvf_prediction p = {0};
    for (uint32_t i = plan->source_rules[source].begin; i < plan->source_rules[source].end; i++)
        add_rule(plan, i, tokens, &p);
    if (cost)
        p.ns = cost->ns_per_source + cost->ns_per_run * (double)p.runs + cost->ns_per_byte * (double)p.bytes;
    *out = p;
    return KVF_OK;
}
