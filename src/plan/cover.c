/*
 * Who is read: the wanted cells of the local shard, cut at the boundaries of the remote ranks.
 *
 * One part of one group at a time: the layers are cut where remote pipeline stages begin, the units where
 * remote shares begin, and each resulting box is given to one of the ranks that hold all of it, once for each
 * remote token share that has tokens we keep.
 */
#include <stdio.h>
#include <stdlib.h>

#include "plan/plan.h"

typedef struct cover {
    kvf_plan *plan;
    uint32_t group, part;
    uint32_t *layer_bounds; /* scratch: one entry more than twice the ranks, each */
    uint32_t *unit_bounds;
    uint32_t *candidates;
    uint32_t *cut_ranks; /* [cut]: the rank it is read from; sources are numbered when all are known */
    uint32_t cut_capacity;
} cover;

static int by_value(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

/* Sorts and removes repetitions. */
static uint32_t sort_unique(uint32_t *values, uint32_t count) {
    qsort(values, count, sizeof *values, by_value);
    uint32_t n = 0;
    for (uint32_t i = 0; i < count; i++)
        if (n == 0 || values[n - 1] != values[i])
            values[n++] = values[i];
    return n;
}

/* The ends of `wanted` and every boundary of a remote range strictly inside it. */
static uint32_t add_bounds(uint32_t *bounds, uint32_t n, kvf_range wanted, kvf_range remote) {
    if (remote.begin == remote.end)
        return n;
    if (remote.begin > wanted.begin && remote.begin < wanted.end)
        bounds[n++] = remote.begin;
    if (remote.end > wanted.begin && remote.end < wanted.end)
        bounds[n++] = remote.end;
    return n;
}

static bool contains(kvf_range outer, kvf_range inner) {
    return outer.begin <= inner.begin && inner.end <= outer.end;
}

static kvf_status uncovered(const cover *c, kvf_range layers, kvf_range units, kvf_token_share tokens) {
    const kvf_group_desc *group = kvf_model_group(c->plan->local->model, c->group);
    char shares[64] = "";
    if (tokens.count > 1)
        (void)snprintf(shares, sizeof shares, " for tokens of share %u of %u", tokens.index, tokens.count);
    return kvf_fail(KVF_E_UNCOVERED, "%s: no rank holds group %s, layers %u to %u, part %s, units [%u, %u)%s",
                    kvf_engine_name(c->plan->remote), group->name, group->layers[layers.begin],
                    group->layers[layers.end - 1], group->parts[c->part].name, units.begin, units.end,
                    shares);
}

static kvf_status add_cut(cover *c, uint32_t rank, kvf_plan_cut cut) {
    kvf_plan *plan = c->plan;
    KVF_ASSERT(cut.layers.begin < cut.layers.end && cut.units.begin < cut.units.end);
    /* The same holder goes on where its last cut ended: cuts of other token shares may stand between. */
    for (uint32_t i = plan->cut_count; i-- > 0;) {
        kvf_plan_cut *last = &plan->cuts[i];
        if (last->group != cut.group || last->part != cut.part || last->layers.begin != cut.layers.begin)
            break;
        if (c->cut_ranks[i] == rank && last->tokens.index == cut.tokens.index &&
            last->units.end == cut.units.begin) {
            last->units.end = cut.units.end;
            return KVF_OK;
        }
    }
    if (plan->cut_count == c->cut_capacity) {
        uint32_t capacity = c->cut_capacity ? 2 * c->cut_capacity : 16;
        kvf_plan_cut *cuts = kvf_resize(plan->cuts, capacity, sizeof *cuts);
        plan->cuts = cuts ? cuts : plan->cuts;
        uint32_t *ranks = cuts ? kvf_resize(c->cut_ranks, capacity, sizeof *ranks) : NULL;
        if (!ranks)
            return kvf_nomem("a plan");
        c->cut_ranks = ranks;
        c->cut_capacity = capacity;
    }
    c->cut_ranks[plan->cut_count] = rank;
    plan->cuts[plan->cut_count++] = cut;
    return KVF_OK;
}

/* Gives one box to a holder of each remote token share. */
static kvf_status cover_box(cover *c, kvf_range layers, kvf_range units) {
    const kvf_plan *plan = c->plan;
    const kvf_engine *remote = plan->remote;
    const kvf_group_shard_desc *wanted = &plan->local->groups[c->group];
    const kvf_part_share *share = &wanted->parts[c->part];
    uint32_t holders = 0;
    for (uint32_t rank = 0; rank < remote->shard_count; rank++) {
        const kvf_shard *shard = remote->shards[rank];
        if (contains(shard->group_layers[c->group], layers) &&
            contains(shard->groups[c->group].parts[c->part].units, units))
            c->candidates[holders++] = rank;
    }
    kvf_token_share tokens = {0, remote->groups[c->group].share_count, remote->groups[c->group].share_width};
    for (; tokens.index < tokens.count; tokens.index++) {
        if (!kvf_shares_meet(tokens, wanted->tokens))
            continue;
        uint32_t n = 0;
        for (uint32_t i = 0; i < holders; i++)
            n += remote->shards[c->candidates[i]]->groups[c->group].tokens.index == tokens.index;
        if (n == 0)
            return uncovered(c, layers, units, tokens);
        KVF_ASSERT(share->replica < share->replica_count);
        /* Local replicas 0 .. m-1 of the same cells take holders 0 .. n-1 in equal shares. */
        uint32_t pick = 0;
        if (plan->options.replicas == KVF_REPLICA_SPREAD)
            pick = (uint32_t)((uint64_t)share->replica * n / share->replica_count);
        KVF_ASSERT(pick < n);
        uint32_t rank = 0;
        for (uint32_t i = 0; i < holders; i++) {
            if (remote->shards[c->candidates[i]]->groups[c->group].tokens.index != tokens.index)
                continue;
            rank = c->candidates[i];
            if (pick-- == 0)
                break;
        }
        kvf_status status = add_cut(
            c, rank,
            (kvf_plan_cut){
                .group = c->group, .part = c->part, .layers = layers, .units = units, .tokens = tokens});
        if (status)
            return status;
    }
    return KVF_OK;
}

static kvf_status cover_units(cover *c, kvf_range layers) {
    const kvf_plan *plan = c->plan;
    kvf_range wanted = plan->local->groups[c->group].parts[c->part].units;
    if (wanted.begin == wanted.end)
        return KVF_OK;
    uint32_t n = 0;
    c->unit_bounds[n++] = wanted.begin;
    c->unit_bounds[n++] = wanted.end;
    for (uint32_t rank = 0; rank < plan->remote->shard_count; rank++) {
        const kvf_shard *shard = plan->remote->shards[rank];
        if (contains(shard->group_layers[c->group], layers))
            n = add_bounds(c->unit_bounds, n, wanted, shard->groups[c->group].parts[c->part].units);
    }
    KVF_ASSERT(n <= 2 * plan->remote->shard_count + 2);
    n = sort_unique(c->unit_bounds, n);
    for (uint32_t i = 0; i + 1 < n; i++) {
        kvf_status status = cover_box(c, layers, (kvf_range){c->unit_bounds[i], c->unit_bounds[i + 1]});
        if (status)
            return status;
    }
    return KVF_OK;
}

static kvf_status cover_group(cover *c) {
    const kvf_plan *plan = c->plan;
    kvf_range wanted = kvf_plan_wanted_layers(plan, c->group);
    if (wanted.begin == wanted.end)
        return KVF_OK;
    uint32_t n = 0;
    c->layer_bounds[n++] = wanted.begin;
    c->layer_bounds[n++] = wanted.end;
    for (uint32_t rank = 0; rank < plan->remote->shard_count; rank++)
        n = add_bounds(c->layer_bounds, n, wanted, plan->remote->shards[rank]->group_layers[c->group]);
    KVF_ASSERT(n <= 2 * plan->remote->shard_count + 2);
    n = sort_unique(c->layer_bounds, n);
    uint32_t parts = kvf_model_group(plan->local->model, c->group)->part_count;
    for (uint32_t i = 0; i + 1 < n; i++) {
        for (c->part = 0; c->part < parts; c->part++) {
            kvf_status status = cover_units(c, (kvf_range){c->layer_bounds[i], c->layer_bounds[i + 1]});
            if (status)
                return status;
        }
    }
    return KVF_OK;
}

/* The ranks that are read, in ascending order, are the sources. */
static kvf_status number_sources(const cover *c) {
    kvf_plan *plan = c->plan;
    if (!c->cut_ranks)
        return KVF_OK; /* nothing is read */
    plan->source_ranks = kvf_copy(c->cut_ranks, plan->cut_count, sizeof *plan->source_ranks);
    if (!plan->source_ranks)
        return kvf_nomem("a plan");
    plan->source_count = sort_unique(plan->source_ranks, plan->cut_count);
    for (uint32_t i = 0; i < plan->cut_count; i++) {
        const uint32_t *found = bsearch(&c->cut_ranks[i], plan->source_ranks, plan->source_count,
                                        sizeof *plan->source_ranks, by_value);
        plan->cuts[i].source = (uint32_t)(found - plan->source_ranks);
        KVF_ASSERT(plan->source_ranks[plan->cuts[i].source] == c->cut_ranks[i]);
    }
    uint32_t *fitting = kvf_resize(plan->source_ranks, plan->source_count, sizeof *fitting);
    if (fitting)
        plan->source_ranks = fitting;
    return KVF_OK;
}

kvf_status kvf_plan_cover(kvf_plan *plan) {
    size_t ranks = plan->remote->shard_count;
    size_t bounds = 2 * ranks + 2;
    uint32_t *scratch = kvf_alloc(2 * bounds + ranks, sizeof *scratch);
    if (!scratch)
        return kvf_nomem("a plan");
    cover c = {.plan = plan,
               .layer_bounds = scratch,
               .unit_bounds = scratch + bounds,
               .candidates = scratch + 2 * bounds};
    kvf_status status = KVF_OK;
    for (c.group = 0; c.group < kvf_model_group_count(plan->local->model) && !status; c.group++)
        status = cover_group(&c);
    if (!status)
        status = number_sources(&c);
    kvf_free(c.cut_ranks);
    kvf_free(scratch);
    return status;
}
