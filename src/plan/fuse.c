/*
 * From cuts to copy rules.
 *
 * Each cut gives one *strand* for each of its layers: where its cells start on both sides, and the loop nest
 * over rows and units that visits them. Strands are then made fewer and wider:
 *
 *   widen  units that are neighbours on both sides become one cell, and so do the rows of a step
 *   join   two strands with the same nest, one starting where the cells of the other end, on both sides,
 *          become one with wider cells: K and V of a token, layers of one row, conv and recurrent state of
 *          a page
 *
 * until nothing changes. Strands with the same nest and cell are the lanes of one rule.
 */
#include <stdlib.h>

#include "plan/plan.h"

/* A loop nest without its cell. Interned: strands with equal nests have equal numbers. */
typedef struct nest {
    uint32_t source, walk, group;
    uint32_t units, rows_per_step;
    kvf_strides local, remote;
    kvf_token_share remote_tokens;
} nest;

typedef struct strand {
    uint32_t nest;
    uint32_t local_region, remote_region;
    kvf_range layers;
    uint64_t local_offset, remote_offset;
    uint64_t cell_bytes;
} strand;

typedef struct fusion {
    kvf_plan *plan;
    nest *nests;
    uint32_t nest_count, nest_capacity;
    strand *strands;
    uint32_t strand_count;
} fusion;

static bool same_nest(const nest *a, const nest *b) {
    return a->source == b->source && a->walk == b->walk && a->units == b->units &&
           a->rows_per_step == b->rows_per_step && a->local.block == b->local.block &&
           a->local.row == b->local.row && a->local.unit == b->local.unit &&
           a->remote.block == b->remote.block && a->remote.row == b->remote.row &&
           a->remote.unit == b->remote.unit;
}

/* The number of a nest. `hint` is a guess: the strand before usually has the same. */
static kvf_status intern(fusion *f, const nest *wanted, uint32_t hint, uint32_t *out) {
    if (hint < f->nest_count && same_nest(&f->nests[hint], wanted)) {
        *out = hint;
        return KVF_OK;
    }
    for (uint32_t i = 0; i < f->nest_count; i++) {
        if (same_nest(&f->nests[i], wanted)) {
            *out = i;
            return KVF_OK;
        }
    }
    if (f->nest_count == f->nest_capacity) {
        uint32_t capacity = f->nest_capacity ? 2 * f->nest_capacity : 16;
        nest *nests = kvf_resize(f->nests, capacity, sizeof *nests);
        if (!nests)
            return kvf_nomem("a plan");
        f->nests = nests;
        f->nest_capacity = capacity;
    }
    f->nests[f->nest_count] = *wanted;
    *out = f->nest_count++;
    return KVF_OK;
}

/* Makes the nest as flat and the cell as wide as it goes. `steps_of_block` is 1 where a block has one step.
 */
static void widen(nest *n, uint64_t *cell_bytes, bool one_step) {
    KVF_ASSERT(n->units > 0 && n->rows_per_step > 0 && *cell_bytes > 0);
    for (bool changed = true; changed;) {
        changed = false;
        if (n->units > 1 && n->local.unit == *cell_bytes && n->remote.unit == *cell_bytes) {
            *cell_bytes *= n->units;
            n->units = 1;
            changed = true;
        }
        if (n->rows_per_step > 1 && n->local.row == *cell_bytes && n->remote.row == *cell_bytes) {
            *cell_bytes *= n->rows_per_step;
            n->local.row *= n->rows_per_step;
            n->remote.row *= n->rows_per_step;
            n->rows_per_step = 1;
            changed = true;
        }
    }
    /* Strides that are never stepped are made equal, so that they keep no two nests apart. */
    if (n->units == 1)
        n->local.unit = n->remote.unit = 0;
    if (n->rows_per_step == 1 && one_step)
        n->local.row = n->remote.row = 0;
}

/* ---- strands --------------------------------------------------------------------------------- */

/* Blocks that can be whole on both sides: as many tokens, no token missing in between, and rows that can be
 * counted. */
static bool has_whole_blocks(const kvf_plan_walk *walk, const kvf_group_desc *group) {
    uint32_t tokens = walk->local.kernel_tokens;
    for (uint32_t p = 0; p < group->part_count; p++)
        if (group->parts[p].rows_per_step > UINT32_MAX / tokens)
            return false;
    return tokens == walk->remote.kernel_tokens && tokens > 1 && walk->local.share.count == 1 &&
           walk->remote.share.count == 1;
}

/* The walks of a cut, made when there are none: `count` of them from `first` on. */
static kvf_status walks_of(kvf_plan *plan, const kvf_plan_cut *cut, uint32_t *first, uint32_t *count) {
    for (uint32_t i = 0; i < plan->walk_count; i++) {
        const kvf_plan_walk *walk = &plan->walks[i];
        if (walk->group == cut->group && walk->remote.share.index == cut->tokens.index) {
            *first = i;
            *count = walk->whole_steps ? 2 : 1;
            return KVF_OK;
        }
    }
    /* Distinct (group, share) pairs: few, and bounded by the cuts. */
    kvf_plan_walk *walks = kvf_resize(plan->walks, (size_t)plan->walk_count + 2, sizeof *walks);
    if (!walks)
        return kvf_nomem("a plan");
    plan->walks = walks;
    const kvf_group_shard_desc *local = &plan->local->groups[cut->group];
    const kvf_engine_group *remote = &plan->remote->groups[cut->group];
    kvf_plan_walk walk = {
        .group = cut->group,
        .local = {local->tokens_per_block / local->kernel_blocks_per_block, local->tokens},
        .remote = {remote->tokens_per_block / remote->kernel_blocks_per_block, cut->tokens}};
    *first = plan->walk_count;
    *count = 1;
    if (has_whole_blocks(&walk, kvf_model_group(plan->local->model, cut->group))) {
        walk.whole_steps = walk.local.kernel_tokens;
        walks[plan->walk_count++] = walk;
        walk.takes_whole = true;
        *count = 2;
    }
    walks[plan->walk_count++] = walk;
    return KVF_OK;
}

/* Whether blocks have a single step under the rules of a walk, on both sides. */
static bool one_step_a_block(const kvf_plan_walk *walk) {
    return walk->takes_whole || (walk->local.kernel_tokens == 1 && walk->remote.kernel_tokens == 1);
}

static kvf_status add_strand(fusion *f, const kvf_plan_cut *cut, uint32_t walk, uint32_t layer) {
    const kvf_plan *plan = f->plan;
    const kvf_plan_walk *sides = &plan->walks[walk];
    const kvf_shard *remote = plan->remote->shards[plan->source_ranks[cut->source]];
    const kvf_placement *l = kvf_shard_placement(plan->local, cut->group, layer, cut->part);
    const kvf_placement *r = kvf_shard_placement(remote, cut->group, layer, cut->part);
    const kvf_part_desc *part = &kvf_model_group(plan->local->model, cut->group)->parts[cut->part];
    uint32_t local_begin = plan->local->groups[cut->group].parts[cut->part].units.begin;
    uint32_t remote_begin = remote->groups[cut->group].parts[cut->part].units.begin;
    KVF_ASSERT(cut->units.begin >= local_begin && cut->units.begin >= remote_begin);
    strand s = {.local_region = l->region,
                .remote_region = r->region,
                .layers = {layer, layer + 1},
                .local_offset = l->offset + (uint64_t)(cut->units.begin - local_begin) * l->unit_stride,
                .remote_offset = r->offset + (uint64_t)(cut->units.begin - remote_begin) * r->unit_stride,
                .cell_bytes = kvf_part_cell_bytes(part)};
    nest n = {.source = cut->source,
              .walk = walk,
              .group = cut->group,
              .units = cut->units.end - cut->units.begin,
              .rows_per_step = part->rows_per_step * (sides->takes_whole ? sides->whole_steps : 1),
              .local = {l->block_stride, l->row_stride, l->unit_stride},
              .remote = {r->block_stride, r->row_stride, r->unit_stride},
              .remote_tokens = cut->tokens};
    widen(&n, &s.cell_bytes, one_step_a_block(sides));
    uint32_t hint = f->strand_count ? f->strands[f->strand_count - 1].nest : 0;
    kvf_status status = intern(f, &n, hint, &s.nest);
    if (!status)
        f->strands[f->strand_count++] = s;
    return status;
}

static kvf_status make_strands(fusion *f) {
    kvf_plan *plan = f->plan;
    size_t total = 0;
    for (uint32_t i = 0; i < plan->cut_count; i++)
        total += 2 * (size_t)(plan->cuts[i].layers.end - plan->cuts[i].layers.begin);
    if (total > UINT32_MAX)
        return kvf_fail(KVF_E_RANGE, "the plan has %zu pieces; allowed are up to %u", total, UINT32_MAX);
    f->strands = kvf_alloc(total, sizeof *f->strands);
    if (!f->strands)
        return kvf_nomem("a plan");
    for (uint32_t i = 0; i < plan->cut_count; i++) {
        const kvf_plan_cut *cut = &plan->cuts[i];
        uint32_t first = 0, count = 0;
        kvf_status status = walks_of(plan, cut, &first, &count);
        for (uint32_t walk = first; walk < first + count; walk++)
            for (uint32_t layer = cut->layers.begin; layer < cut->layers.end && !status; layer++)
                status = add_strand(f, cut, walk, layer);
        if (status)
            return status;
        KVF_ASSERT(f->strand_count <= total);
    }
    return KVF_OK;
}

/* ---- joining --------------------------------------------------------------------------------- */

static int by_nest_and_place(const void *a, const void *b) {
    const strand *x = a, *y = b;
    if (x->nest != y->nest)
        return x->nest < y->nest ? -1 : 1;
    if (x->local_region != y->local_region)
        return x->local_region < y->local_region ? -1 : 1;
    if (x->remote_region != y->remote_region)
        return x->remote_region < y->remote_region ? -1 : 1;
    return x->local_offset < y->local_offset ? -1 : x->local_offset > y->local_offset;
}

static void sort_strands(const fusion *f, int (*compare)(const void *, const void *)) {
    for (uint32_t i = 1; i < f->strand_count; i++) {
        if (compare(&f->strands[i - 1], &f->strands[i]) > 0) {
            qsort(f->strands, f->strand_count, sizeof *f->strands, compare);
            return;
        }
    }
}

static bool may_join(const fusion *f, const strand *a, const strand *b) {
    return !f->plan->options.keep_layers_apart || a->layers.begin == b->layers.begin;
}

static bool touch(const fusion *f, const strand *a, const strand *b) {
    return may_join(f, a, b) && a->nest == b->nest && a->local_region == b->local_region &&
           a->remote_region == b->remote_region && a->local_offset + a->cell_bytes == b->local_offset &&
           a->remote_offset + a->cell_bytes == b->remote_offset;
}

/* Joins touching strands; returns whether there were any. */
static bool join(fusion *f) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < f->strand_count; i++) {
        strand *last = n ? &f->strands[n - 1] : NULL;
        const strand *s = &f->strands[i];
        if (last && touch(f, last, s)) {
            last->cell_bytes += s->cell_bytes;
            last->layers.begin = last->layers.begin < s->layers.begin ? last->layers.begin : s->layers.begin;
            last->layers.end = last->layers.end > s->layers.end ? last->layers.end : s->layers.end;
        } else {
            f->strands[n++] = *s;
        }
    }
    bool joined = n < f->strand_count;
    f->strand_count = n;
    return joined;
}

/* Bytes that all strands move for one step of every walk: joining and widening change how, never how many. */
static inline uint64_t bytes_of_strands(const fusion *f) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < f->strand_count; i++) {
        const nest *n = &f->nests[f->strands[i].nest];
        bytes += f->strands[i].cell_bytes * n->units * n->rows_per_step;
    }
    return bytes;
}

static kvf_status join_and_widen(fusion *f) {
    for (;;) {
        sort_strands(f, by_nest_and_place);
        if (!join(f))
            return KVF_OK;
        bool changed = false;
        for (uint32_t i = 0; i < f->strand_count; i++) {
            strand *s = &f->strands[i];
            nest n = f->nests[s->nest];
            widen(&n, &s->cell_bytes, one_step_a_block(&f->plan->walks[n.walk]));
            uint32_t before = s->nest;
            kvf_status status = intern(f, &n, i ? f->strands[i - 1].nest : before, &s->nest);
            if (status)
                return status;
            changed |= s->nest != before;
        }
        if (!changed)
            return KVF_OK;
    }
}

/* ---- rules ----------------------------------------------------------------------------------- */

/* Rules in order of source; `nest` was renumbered in that order. */
static int by_rule(const void *a, const void *b) {
    const strand *x = a, *y = b;
    if (x->nest != y->nest)
        return x->nest < y->nest ? -1 : 1;
    if (x->cell_bytes != y->cell_bytes)
        return x->cell_bytes < y->cell_bytes ? -1 : 1;
    return by_nest_and_place(a, b);
}

static kvf_status renumber_nests(fusion *f) {
    uint32_t *numbers = kvf_alloc(f->nest_count, sizeof *numbers);
    nest *sorted = kvf_alloc(f->nest_count, sizeof *sorted);
    if (!numbers || !sorted) {
        kvf_free(numbers);
        kvf_free(sorted);
        return kvf_nomem("a plan");
    }
    uint32_t n = 0;
    for (uint32_t source = 0; source < f->plan->source_count; source++) {
        for (uint32_t i = 0; i < f->nest_count; i++) {
            if (f->nests[i].source == source) {
                sorted[n] = f->nests[i];
                numbers[i] = n++;
            }
        }
    }
    for (uint32_t i = 0; i < f->strand_count; i++)
        f->strands[i].nest = numbers[f->strands[i].nest];
    kvf_free(f->nests);
    kvf_free(numbers);
    f->nests = sorted;
    KVF_ASSERT(n == f->nest_count);
    return KVF_OK;
}

static bool same_rule(const strand *a, const strand *b) {
    return a->nest == b->nest && a->cell_bytes == b->cell_bytes;
}

/*
 * How many strands from `first` on lie in one page on both sides, one after another: their runs can touch
 * only when a block is visited whole.
 */
static uint32_t strands_of_page(const fusion *f, uint32_t first) {
    const nest *n = &f->nests[f->strands[first].nest];
    uint32_t i = first + 1;
    for (; i < f->strand_count; i++) {
        const strand *a = &f->strands[i - 1], *b = &f->strands[i];
        uint64_t distance = b->local_offset - a->local_offset;
        if (!same_rule(a, b) || !may_join(f, a, b) || a->local_region != b->local_region ||
            a->remote_region != b->remote_region || distance != b->remote_offset - a->remote_offset ||
            distance >= n->local.block || distance >= n->remote.block)
            break;
    }
    return i - first;
}

/* One past the last strand of the rule that begins at `first`: same nest and cell, pages of as many strands.
 */
static uint32_t end_of_rule(const fusion *f, uint32_t first, uint32_t per_page) {
    uint32_t i = first + per_page;
    while (i < f->strand_count && same_rule(&f->strands[first], &f->strands[i]) &&
           strands_of_page(f, i) == per_page)
        i += per_page;
    return i;
}

static void make_rule(fusion *f, uint32_t first, uint32_t end, uint32_t per_page) {
    kvf_plan *plan = f->plan;
    const nest *n = &f->nests[f->strands[first].nest];
    KVF_ASSERT(per_page > 0 && end > first && (end - first) % per_page == 0);
    for (uint32_t i = first; i < end; i++) {
        const strand *s = &f->strands[i];
        plan->lanes[i] =
            (kvf_copy_lane){s->local_offset, s->remote_offset, s->local_region, s->remote_region, s->layers};
    }
    plan->rules[plan->rule_count] = (kvf_copy_rule){.source = n->source,
                                                    .group = n->group,
                                                    .units = n->units,
                                                    .rows_per_step = n->rows_per_step,
                                                    .cell_bytes = f->strands[first].cell_bytes,
                                                    .local = n->local,
                                                    .remote = n->remote,
                                                    .remote_tokens = n->remote_tokens,
                                                    .lanes = plan->lanes + first,
                                                    .lane_count = end - first,
                                                    .whole_blocks = plan->walks[n->walk].takes_whole,
                                                    .lanes_per_page = per_page};
    plan->rule_walks[plan->rule_count] = n->walk;
    kvf_range *of_source = &plan->source_rules[n->source];
    if (of_source->end == 0)
        of_source->begin = plan->rule_count;
    KVF_ASSERT(of_source->end == 0 || of_source->end == plan->rule_count); /* rules are ordered by source */
    of_source->end = ++plan->rule_count;
}

static kvf_status make_rules(fusion *f) {
    kvf_plan *plan = f->plan;
    kvf_status status = renumber_nests(f);
    if (status)
        return status;
    sort_strands(f, by_rule);
    uint32_t rules = 0;
    for (uint32_t i = 0; i < f->strand_count; rules++)
        i = end_of_rule(f, i, strands_of_page(f, i));
    plan->rules = kvf_alloc(rules, sizeof *plan->rules);
    plan->rule_walks = kvf_alloc(rules, sizeof *plan->rule_walks);
    plan->lanes = kvf_alloc(f->strand_count, sizeof *plan->lanes);
    plan->source_rules = kvf_alloc0(plan->source_count, sizeof *plan->source_rules);
    if (!plan->rules || !plan->rule_walks || !plan->lanes || !plan->source_rules)
        return kvf_nomem("a plan");
    plan->lane_count = f->strand_count;
    for (uint32_t i = 0; i < f->strand_count;) {
        uint32_t per_page = strands_of_page(f, i);
        uint32_t end = end_of_rule(f, i, per_page);
        make_rule(f, i, end, per_page);
        i = end;
    }
    KVF_ASSERT(plan->rule_count == rules);
    return KVF_OK;
}

kvf_status kvf_plan_fuse(kvf_plan *plan) {
    fusion f = {.plan = plan};
    kvf_status status = make_strands(&f);
    const uint64_t bytes = bytes_of_strands(&f);
    if (!status)
        status = join_and_widen(&f);
    KVF_ASSERT(status || bytes_of_strands(&f) == bytes);
    if (!status)
        status = make_rules(&f);
    kvf_free(f.strands);
    kvf_free(f.nests);
    return status;
}
