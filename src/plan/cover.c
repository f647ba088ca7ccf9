/*
 * Chooses the ranks that are read: cuts the wanted cells of the local shard at the boundaries of the remote ranks.
 *
 * It works on one part of one group at a time: layers are cut where remote pipeline stages begin, units where remote
 * shares begin, and each resulting box is assigned to one of the ranks that hold all of it, once for each remote token
 * share that has tokens we keep.
 */
#include <stdio.h>
#include <stdlib.h>

#include "plan/plan.h"

/* What a remote rank holds of one part of one group. */
typedef struct holder {
    uint32_t rank, share; /* `share` is its token share */
    kvf_range layers, units;
} holder;

typedef struct cover {
    kvf_plan *plan;
    uint32_t group, part;
    uint32_t *order; /* ranks whose share has tokens we keep, ordered by share, then by rank */
    holder *holders; /* in the same order */
    uint32_t holder_count;
    holder *near; /* those of them that hold the current layers */
    uint32_t near_count;
    uint32_t *shares; /* remote token shares that have tokens we keep, ascending */
    uint32_t share_count;
    uint32_t *bounds[2]; /* scratch, for layers and for units: two entries more than twice the ranks, each */
    uint32_t
        *last_cuts; /* [index in shares]: the share's last cut in the current layers of this part; UINT32_MAX:
                            none */
    uint32_t *counts;    /* scratch, two entries more than ranks */
    uint32_t *cut_ranks; /* [cut]: the rank it is read from; sources are numbered once all are known */
    uint32_t cut_capacity;
} cover;

static int by_value(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

/* Sorts values and removes duplicates. */
static uint32_t sort_unique(uint32_t *values, uint32_t count) {
    qsort(values, count, sizeof *values, by_value);
    uint32_t n = 0;
    for (uint32_t i = 0; i < count; i++)
        if (n == 0 || values[n - 1] != values[i])
            values[n++] = values[i];
    return n;
}

/* Adds the boundaries of a remote range that lie strictly inside `wanted`. */
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

static kvf_token_share share_of(const cover *c, uint32_t index) {
    const kvf_engine_group *agreed = &c->plan->remote->groups[c->group];
    return (kvf_token_share){index, agreed->share_count, agreed->share_width};
}

static kvf_status add_cut(cover *c, uint32_t rank, uint32_t share, kvf_plan_cut cut) {
    kvf_plan *plan = c->plan;
    KVF_ASSERT(cut.layers.begin < cut.layers.end && cut.units.begin < cut.units.end);
    /* Extends the holder's last cut if this box continues it; cuts of other token shares may stand between. */
    uint32_t last = c->last_cuts[share];
    if (last != UINT32_MAX && c->cut_ranks[last] == rank && plan->cuts[last].units.end == cut.units.begin) {
        plan->cuts[last].units.end = cut.units.end;
        return KVF_OK;
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
    c->last_cuts[share] = plan->cut_count;
    c->cut_ranks[plan->cut_count] = rank;
    plan->cuts[plan->cut_count++] = cut;
    return KVF_OK;
}

/* Which of `n` holders is read: local replicas 0 .. m-1 of the same cells are spread evenly over holders 0 .. n-1. */
static uint32_t choose(const cover *c, uint32_t n) {
    const kvf_plan *plan = c->plan;
    const kvf_part_share *share = &plan->local->groups[c->group].parts[c->part];
    KVF_ASSERT(share->replica < share->replica_count);
    if (plan->options.replicas != KVF_REPLICA_SPREAD)
        return 0;
    return (uint32_t)((uint64_t)share->replica * n / share->replica_count);
}

/* Assigns one box to a holder of each remote token share. */
static kvf_status cover_box(cover *c, kvf_range layers, kvf_range units) {
    uint32_t at = 0;
    for (uint32_t s = 0; s < c->share_count; s++) {
        kvf_plan_cut cut = {.group = c->group,
                            .part = c->part,
                            .layers = layers,
                            .units = units,
                            .tokens = share_of(c, c->shares[s])};
        uint32_t n = 0, first, end;
        while (at < c->near_count && c->near[at].share < cut.tokens.index)
            at++;
        first = at;
        for (; at < c->near_count && c->near[at].share == cut.tokens.index; at++)
            n += contains(c->near[at].units, units);
        end = at;
        c->plan->steps += end - first + 1;
        if (n == 0)
            return uncovered(c, layers, units, cut.tokens);
        uint32_t pick = choose(c, n), i = first;
        KVF_ASSERT(pick < n);
        while (!contains(c->near[i].units, units) || pick-- > 0)
            i++;
        kvf_status status = add_cut(c, c->near[i].rank, s, cut);
        if (status)
            return status;
    }
    return KVF_OK;
}

static kvf_status cover_units(cover *c, kvf_range layers) {
    const kvf_plan *plan = c->plan;
    kvf_range wanted = plan->local->groups[c->group].parts[c->part].units;
    uint32_t n = 0, *bounds = c->bounds[1];
    if (wanted.begin == wanted.end)
        return KVF_OK;
    bounds[n++] = wanted.begin;
    bounds[n++] = wanted.end;
    c->near_count = 0;
    for (uint32_t i = 0; i < c->holder_count; i++) {
        if (!contains(c->holders[i].layers, layers))
            continue;
        n = add_bounds(bounds, n, wanted, c->holders[i].units);
        c->near[c->near_count++] = c->holders[i];
    }
    KVF_ASSERT(n <= 2 * plan->remote->shard_count + 2);
    n = sort_unique(bounds, n);
    for (uint32_t s = 0; s < c->share_count; s++)
        c->last_cuts[s] = UINT32_MAX;
    for (uint32_t i = 0; i + 1 < n; i++) {
        kvf_status status = cover_box(c, layers, (kvf_range){bounds[i], bounds[i + 1]});
        if (status)
            return status;
    }
    return KVF_OK;
}

/* The index in `shares` of a rank's share; UINT32_MAX: the rank has no tokens we keep. */
static uint32_t share_at(const cover *c, uint32_t rank) {
    uint32_t held = c->plan->remote->shards[rank]->groups[c->group].share.index;
    const uint32_t *found = bsearch(&held, c->shares, c->share_count, sizeof held, by_value);
    return found ? (uint32_t)(found - c->shares) : UINT32_MAX;
}

/* Counts the ranks of each share in `shares`: counts[1 + index]. */
static void count_ranks(const cover *c) {
    memset(c->counts, 0, (c->share_count + 1) * sizeof *c->counts);
    for (uint32_t rank = 0; rank < c->plan->remote->shard_count; rank++)
        if (share_at(c, rank) != UINT32_MAX)
            c->counts[share_at(c, rank) + 1]++;
}

/*
 * Lists the shares that have tokens we keep. If there are more such shares than ranks, some share has no rank: only
 * that one stays in the list, because it makes the cover fail. (So the time is bounded by the ranks and by our own
 * shares, even if the remote engine claims very many shares: within one period of our shares at least one is found.)
 */
static void list_shares(cover *c) {
    const uint32_t ranks = c->plan->remote->shard_count, count = share_of(c, 0).count;
    const kvf_token_share wanted = c->plan->local->groups[c->group].share;
    c->share_count = 0;
    for (uint32_t share = 0; share < count && c->share_count <= ranks; share++)
        if (kvf_shares_meet(share_of(c, share), wanted))
            c->shares[c->share_count++] = share;
    count_ranks(c);
    if (c->share_count <= ranks)
        return;
    uint32_t missing = 0;
    while (c->counts[missing + 1] > 0)
        missing++;
    c->shares[0] = c->shares[missing];
    c->share_count = 1;
    count_ranks(c);
}

/* Sorts the ranks that have these shares by share, then by rank. */
static void sort_ranks(cover *c) {
    uint32_t *ends = c->counts;
    list_shares(c);
    for (uint32_t share = 0; share < c->share_count; share++)
        ends[share + 1] += ends[share];
    c->holder_count = ends[c->share_count];
    for (uint32_t rank = 0; rank < c->plan->remote->shard_count; rank++)
        if (share_at(c, rank) != UINT32_MAX)
            c->order[ends[share_at(c, rank)]++] = rank;
}

static void list_holders(cover *c) {
    const kvf_engine *remote = c->plan->remote;
    for (uint32_t i = 0; i < c->holder_count; i++) {
        const kvf_shard *shard = remote->shards[c->order[i]];
        const kvf_held_group *held = &shard->groups[c->group];
        c->holders[i] = (holder){.rank = c->order[i],
                                 .share = held->share.index,
                                 .layers = shard->group_layers[c->group],
                                 .units = held->parts[c->part].units};
    }
    c->plan->steps += remote->shard_count;
}

static kvf_status cover_group(cover *c) {
    const kvf_plan *plan = c->plan;
    kvf_range wanted = kvf_plan_wanted_layers(plan, c->group);
    uint32_t n = 0, *bounds = c->bounds[0];
    if (wanted.begin == wanted.end)
        return KVF_OK;
    bounds[n++] = wanted.begin;
    bounds[n++] = wanted.end;
    for (uint32_t rank = 0; rank < plan->remote->shard_count; rank++)
        n = add_bounds(bounds, n, wanted, plan->remote->shards[rank]->group_layers[c->group]);
    KVF_ASSERT(n <= 2 * plan->remote->shard_count + 2);
    n = sort_unique(bounds, n);
    kvf_status status = KVF_OK;
    sort_ranks(c);
    uint32_t parts = kvf_model_group(plan->local->model, c->group)->part_count;
    for (uint32_t i = 0; i + 1 < n && !status; i++) {
        for (c->part = 0; c->part < parts && !status; c->part++) {
            list_holders(c);
            status = cover_units(c, (kvf_range){bounds[i], bounds[i + 1]});
        }
    }
    return status;
}

/* Numbers the ranks that are read as sources, in ascending order. */
static kvf_status number_sources(const cover *c) {
    kvf_plan *plan = c->plan;
    if (!c->cut_ranks)
        return KVF_OK; /* no rank is read */
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
    size_t ranks = plan->remote->shard_count, bounds = 2 * ranks + 2;
    uint32_t *scratch = kvf_alloc(2 * bounds + ranks + ranks + 1 + ranks + ranks + 2, sizeof *scratch);
    holder *holders = kvf_alloc(2 * ranks, sizeof *holders);
    if (!scratch || !holders) {
        kvf_free(scratch);
        kvf_free(holders);
        return kvf_nomem("a plan");
    }
    cover c = {.plan = plan,
               .holders = holders,
               .near = holders + ranks,
               .bounds = {scratch, scratch + bounds},
               .order = scratch + 2 * bounds,
               .shares = scratch + 2 * bounds + ranks,
               .last_cuts = scratch + 2 * bounds + 2 * ranks + 1,
               .counts = scratch + 2 * bounds + 3 * ranks + 1};
    kvf_status status = KVF_OK;
    for (c.group = 0; c.group < kvf_model_group_count(plan->local->model) && !status; c.group++)
        status = cover_group(&c);
    if (!status)
        status = number_sources(&c);
    kvf_free(c.cut_ranks);
    kvf_free(holders);
    kvf_free(scratch);
    return status;
}
