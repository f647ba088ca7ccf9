/*
 * Predicts the cost of a request from the plan alone.
 */
#include "plan/plan.h"

/* The beginning or end of a run on both sides. */
typedef struct run_edge {
    uint64_t local, remote;
    uint32_t local_region, remote_region;
} run_edge;

/* The runs and bytes that the lanes of one page give if every logical block is far from the others. */
typedef struct tally {
    uint64_t rows, runs;
    run_edge begin, end; /* of the first and of the last run; not set if there are none */
} tally;

static bool same_edge(const run_edge *a, const run_edge *b) {
    return a->local == b->local && a->remote == b->remote && a->local_region == b->local_region &&
           a->remote_region == b->remote_region;
}

/* The place of a piece if logical block b of the sequence lies at 2b: only kernel blocks of the same logical block are
 * neighbours.
 */
static uint64_t scattered_place(const kvf_walk_side *side, uint32_t kernel_blocks_per_block,
                                uint64_t position, const kvf_strides *strides, uint32_t rows_per_step) {
    uint64_t kernel = position / side->kernel_steps;
    uint64_t block = kernel + kernel / kernel_blocks_per_block * kernel_blocks_per_block;
    return block * strides->block + position % side->kernel_steps * rows_per_step * strides->row;
}

static void add_piece(const kvf_copy_rule *rule, const kvf_copy_lane *lane, uint64_t rows, uint64_t local,
                      uint64_t remote, tally *t) {
    kvf_run_shape s = kvf_rule_shape(rule, rows);
    run_edge begin = {lane->local_offset + local, lane->remote_offset + remote, lane->local_region,
                      lane->remote_region};
    run_edge end = begin;
    end.local += (s.outer_count - 1) * s.outer_local + (s.inner_count - 1) * s.inner_local + s.bytes;
    end.remote += (s.outer_count - 1) * s.outer_remote + (s.inner_count - 1) * s.inner_remote + s.bytes;
    bool merges = t->runs && same_edge(&t->end, &begin);
    if (t->runs == 0)
        t->begin = begin;
    t->runs += s.outer_count * s.inner_count - merges;
    t->end = end;
}

/* Counts the lanes of one page over all pieces, in the order of kvf_run_cursor_next(). */
static tally tally_page(const kvf_plan *plan, uint32_t index, const kvf_copy_lane *lanes,
                        const kvf_step_span *spans) {
    const kvf_copy_rule *rule = &plan->rules[index];
    const kvf_plan_walk *sides = &plan->walks[plan->rule_walks[index]];
    const kvf_group_desc *group = kvf_model_group(plan->local->model, rule->group);
    uint32_t local_kernel = plan->local->groups[rule->group].kernel_blocks_per_block;
    uint32_t remote_kernel = plan->remote->groups[rule->group].kernel_blocks_per_block;
    const kvf_step_span span = spans[rule->group];
    kvf_walk walk = {sides->local, sides->remote, kvf_first_moved(group, span.begin, span.end), span.end};
    kvf_walk_piece piece;
    tally t = {0};
    while (kvf_walk_next(&walk, &piece)) {
        uint32_t steps;
        if (!kvf_plan_walk_takes(sides, &piece, &steps))
            continue;
        uint64_t rows = (uint64_t)steps * rule->rows_per_step;
        uint64_t local = scattered_place(&sides->local, local_kernel, piece.local_position, &rule->local,
                                         rule->rows_per_step);
        uint64_t remote = scattered_place(&sides->remote, remote_kernel, piece.remote_position, &rule->remote,
                                          rule->rows_per_step);
        t.rows += rows;
        for (uint32_t l = 0; l < rule->lanes_per_page; l++)
            add_piece(rule, &lanes[l], rows, local, remote, &t);
    }
    return t;
}

/* Whether the previous page of lanes gives the same tally, at another place. */
static bool like_page_before(const kvf_copy_rule *rule, const kvf_copy_lane *lanes) {
    const kvf_copy_lane *before = lanes - rule->lanes_per_page;
    for (uint32_t l = 1; l < rule->lanes_per_page; l++) /* in a page remote distances equal local ones */
        if (lanes[l].local_offset - lanes[0].local_offset != before[l].local_offset - before[0].local_offset)
            return false;
    return true;
}

static void move_edge(run_edge *edge, const kvf_copy_lane *from, const kvf_copy_lane *to) {
    edge->local += to->local_offset - from->local_offset;
    edge->remote += to->remote_offset - from->remote_offset;
    edge->local_region = to->local_region;
    edge->remote_region = to->remote_region;
}

/* The runs of one source so far, and the end of the last one. */
typedef struct forecast {
    const kvf_plan *plan;
    const kvf_step_span *spans;
    uint64_t bytes, runs;
    run_edge last;
} forecast;

/* Adds the tally of a page. As in kvf_run_cursor_next(), runs merge across pages and rules. */
static void add_page(forecast *f, const tally *t) {
    bool merges = f->runs && same_edge(&f->last, &t->begin);
    KVF_ASSERT(t->runs > 0);
    f->runs += t->runs - merges;
    f->last = t->end;
}

static void add_rule(forecast *f, uint32_t index) {
    const kvf_copy_rule *rule = &f->plan->rules[index];
    tally t = {0};
    for (uint32_t l = 0; l < rule->lane_count; l += rule->lanes_per_page) {
        const kvf_copy_lane *lanes = &rule->lanes[l];
        if (l == 0 || !like_page_before(rule, lanes)) {
            t = tally_page(f->plan, index, lanes, f->spans);
        } else {
            move_edge(&t.begin, lanes - rule->lanes_per_page, lanes);
            move_edge(&t.end, lanes - rule->lanes_per_page, lanes);
        }
        if (t.runs == 0)
            return;
        add_page(f, &t);
    }
    f->bytes += t.rows * rule->units * rule->cell_bytes * rule->lane_count;
}

/* Adds a cut of a plan that converts: it has bytes, but no runs. */
static void add_cut(forecast *f, const kvf_plan_cut *cut) {
    const kvf_plan_walk *sides = &f->plan->walks[kvf_plan_walk_of(f->plan, cut)];
    const kvf_group_desc *group = kvf_model_group(f->plan->local->model, cut->group);
    const kvf_step_span span = f->spans[cut->group];
    kvf_walk walk = {sides->local, sides->remote, kvf_first_moved(group, span.begin, span.end), span.end};
    kvf_walk_piece piece;
    uint64_t steps = 0;
    while (kvf_walk_next(&walk, &piece))
        steps += piece.steps;
    f->bytes += steps * kvf_plan_step_bytes(f->plan, cut);
}

void kvf_plan_count(const kvf_plan *plan, uint32_t source, const kvf_step_span *spans, uint64_t *bytes,
                    uint64_t *runs) {
    KVF_ASSERT(source < plan->source_count);
    forecast f = {.plan = plan, .spans = spans};
    for (uint32_t i = plan->source_rules[source].begin; i < plan->source_rules[source].end; i++)
        add_rule(&f, i);
    for (uint32_t i = 0; plan->converts && i < plan->cut_count; i++)
        if (plan->cuts[i].source == source)
            add_cut(&f, &plan->cuts[i]);
    *bytes = f.bytes;
    *runs = f.runs;
}

kvf_status kvf_plan_predict(const kvf_plan *plan, uint32_t source, uint64_t tokens,
                            const kvf_cost_model *cost, kvf_prediction *out) {
    if (!plan)
        return kvf_fail(KVF_E_INVALID, "plan is NULL");
    if (source >= plan->source_count)
        return kvf_fail(KVF_E_RANGE, "source is %u; the plan has %u", source, plan->source_count);
    if (tokens > UINT32_MAX) /* the time grows with them, and the sums are of 64 bits */
        return kvf_fail(KVF_E_RANGE, "tokens is %llu; allowed: up to %u", (unsigned long long)tokens,
                        UINT32_MAX);
    kvf_status status = kvf_check_out(out, "kvf_prediction");
    if (status)
        return status;
    for (size_t i = 0; cost && i < sizeof cost->reserved / sizeof *cost->reserved; i++)
        if (cost->reserved[i] != 0)
            return kvf_fail(KVF_E_INVALID, "kvf_cost_model.reserved[%zu] is %g; allowed: 0", i,
                            cost->reserved[i]);
    kvf_step_span spans[KVF_MODEL_MAX_GROUPS];
    for (uint32_t g = 0; g < kvf_model_group_count(plan->local->model); g++)
        spans[g] = (kvf_step_span){0, kvf_group_step_count(kvf_model_group(plan->local->model, g), tokens)};
    kvf_prediction p = {.struct_size = sizeof p};
    kvf_plan_count(plan, source, spans, &p.bytes, &p.runs);
    if (cost)
        p.ns = cost->ns_per_source + cost->ns_per_run * (double)p.runs + cost->ns_per_byte * (double)p.bytes;
    kvf_fill_out(out, &p, sizeof p);
    return KVF_OK;
}
