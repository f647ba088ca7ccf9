/*
 * Compares the cuts of a plan with the list of the ranks that hold each cell.
 */
#include <string.h>

#include "transfer.h"

const rank_group *remote_shares(const world *w, uint32_t group) {
    const engine_world *e = &w->engines[REMOTE];
    for (uint32_t i = 0; i < e->rank_count; i++)
        if (layers_of(&e->ranks[i].groups[group]))
            return &e->ranks[i].groups[group];
    return NULL;
}

/* `layer` is the remote model's; NO_ID if it lacks the layer. */
static bool holds(const rank_group *held, uint32_t layer, uint32_t part, uint32_t unit, uint32_t share) {
    return layer >= held->layers_begin && layer < held->layers_end && unit >= held->parts[part].units_begin &&
           unit < held->parts[part].units_end && held->share_index == share;
}

static uint32_t count_holders(const world *w, uint32_t group, uint32_t layer, uint32_t part, uint32_t unit,
                              uint32_t share, uint32_t *lowest) {
    const engine_world *e = &w->engines[REMOTE];
    uint32_t n = 0, there = remote_layer(w, group, layer);
    for (uint32_t i = 0; i < e->rank_count; i++)
        if (holds(&e->ranks[i].groups[group], there, part, unit, share) && n++ == 0)
            *lowest = i;
    return n;
}

/* Calls `visit` for every (layer, part, unit, remote share with wanted tokens) of a group on the local rank. */
static bool each_wanted(const world *w, const asked *ask, uint32_t local_rank, uint32_t group,
                        bool (*visit)(const world *w, uint32_t group, uint32_t layer, uint32_t part,
                                      uint32_t unit, uint32_t share, void *context),
                        void *context) {
    const rank_group *held = &w->engines[LOCAL].ranks[local_rank].groups[group];
    layer_span layers = wanted_layers(w, ask, local_rank, group);
    const rank_group *remote = remote_shares(w, group);
    rank_group share = {.share_count = 1, .share_width = 1};
    if (remote)
        share = *remote;
    for (share.share_index = 0; share.share_index < share.share_count; share.share_index++) {
        if (!shares_meet(held, &share))
            continue;
        for (uint32_t layer = layers.begin; layer < layers.end; layer++)
            for (uint32_t p = 0; p < w->models[LOCAL].groups[group].part_count; p++)
                for (uint32_t unit = held->parts[p].units_begin; unit < held->parts[p].units_end; unit++)
                    if (!visit(w, group, layer, p, unit, share.share_index, context))
                        return false;
    }
    return true;
}

static bool has_holder(const world *w, uint32_t group, uint32_t layer, uint32_t part, uint32_t unit,
                       uint32_t share, void *context) {
    (void)context;
    uint32_t lowest;
    return count_holders(w, group, layer, part, unit, share, &lowest) > 0;
}

bool is_uncovered(const world *w, const asked *ask, uint32_t local_rank) {
    for (uint32_t g = 0; g < w->recipe->group_count; g++)
        if (!each_wanted(w, ask, local_rank, g, has_holder, NULL))
            return true;
    return false;
}

/* ---- cuts ------------------------------------------------------------------------------------ */

static bool take_cut(const world *w, const kvf_plan *plan, uint32_t i, choices *out) {
    const kvf_plan_cut *cut = kvf_plan_get_cut(plan, i);
    const model_world *local = &w->models[LOCAL];
    uint32_t rank = kvf_plan_source_rank(plan, cut->source);
    uint32_t g = cut->group < local->group_count ? local->group_order[cut->group] : NO_ID;
    uint32_t p = g != NO_ID && cut->part < local->groups[g].part_count ? local->part_order[g][cut->part] : 0;
    if (rank >= w->engines[REMOTE].rank_count || g == NO_ID || cut->part >= local->groups[g].part_count ||
        cut->layers.end > local->layer_counts[g] || cut->units.end > local->groups[g].parts[p].units ||
        cut->tokens.index >= MAX_SHARES)
        return wrong("cut %u speaks of what is not there", i);
    if (cut->layers.begin >= cut->layers.end || cut->units.begin >= cut->units.end)
        return wrong("cut %u is empty", i);
    const rank_group *held = &w->engines[REMOTE].ranks[rank].groups[g];
    for (uint32_t layer = cut->layers.begin; layer < cut->layers.end; layer++) {
        for (uint32_t unit = cut->units.begin; unit < cut->units.end; unit++) {
            if (!holds(held, remote_layer(w, g, layer), p, unit, cut->tokens.index))
                return wrong("cut %u: rank %u does not hold group %u, layer %u, part %u, unit %u, share %u",
                             i, rank, g, layer, p, unit, cut->tokens.index);
            uint32_t *chosen = &out->rank[g][layer][p][unit][cut->tokens.index];
            if (*chosen != NOBODY)
                return wrong("cut %u: group %u, layer %u, part %u, unit %u is in two cuts", i, g, layer, p,
                             unit);
            *chosen = rank;
        }
    }
    return true;
}

static bool in_order(const kvf_plan_cut *a, const kvf_plan_cut *b) {
    if (a->group != b->group)
        return a->group < b->group;
    if (a->layers.begin != b->layers.begin)
        return a->layers.begin < b->layers.begin;
    if (a->part != b->part)
        return a->part < b->part;
    return a->units.begin <= b->units.begin;
}

typedef struct choice_check {
    const choices *choices;
    uint32_t wanted;
} choice_check;

static bool check_choice(const world *w, uint32_t group, uint32_t layer, uint32_t part, uint32_t unit,
                         uint32_t share, void *context) {
    choice_check *check = context;
    uint32_t rank = check->choices->rank[group][layer][part][unit][share], lowest = NOBODY;
    check->wanted++;
    if (rank == NOBODY)
        return wrong("group %u, layer %u, part %u, unit %u, share %u is in no cut", group, layer, part, unit,
                     share);
    (void)count_holders(w, group, layer, part, unit, share, &lowest);
    if (w->recipe->first_replica && rank != lowest)
        return wrong("group %u, layer %u, part %u, unit %u is read from rank %u; the first holder is %u",
                     group, layer, part, unit, rank, lowest);
    return true;
}

bool check_cuts(const world *w, const asked *ask, const kvf_plan *plan, uint32_t local_rank, choices *out) {
    memset(out, 0xff, sizeof *out);
    uint32_t taken = 0;
    for (uint32_t i = 0; i < kvf_plan_cut_count(plan); i++) {
        const kvf_plan_cut *cut = kvf_plan_get_cut(plan, i);
        if (!take_cut(w, plan, i, out))
            return false;
        if (i && !in_order(kvf_plan_get_cut(plan, i - 1), cut))
            return wrong("cut %u is out of order", i);
        taken += (cut->layers.end - cut->layers.begin) * (cut->units.end - cut->units.begin);
    }
    choice_check check = {out, 0};
    for (uint32_t g = 0; g < w->recipe->group_count; g++)
        if (!each_wanted(w, ask, local_rank, g, check_choice, &check))
            return false;
    if (check.wanted != taken)
        return wrong("the cuts have %u units of layers and shares; %u are wanted", taken, check.wanted);
    for (uint32_t s = 1; s < kvf_plan_source_count(plan); s++)
        if (kvf_plan_source_rank(plan, s) <= kvf_plan_source_rank(plan, s - 1))
            return wrong("sources are not in ascending order of rank");
    return true;
}

/* ---- replicas -------------------------------------------------------------------------------- */

/* Local ranks that keep the same tokens must read each holder of a cell equally often, within one. */
static bool check_spread_of(const world *w, const choices *by_local_rank, uint32_t local_share,
                            uint32_t group, uint32_t layer, uint32_t part, uint32_t unit, uint32_t share) {
    const engine_world *local = &w->engines[LOCAL], *remote = &w->engines[REMOTE];
    uint32_t used[MAX_RANKS] = {0}, most = 0, least = UINT32_MAX;
    for (uint32_t i = 0; i < local->rank_count; i++) {
        uint32_t rank = by_local_rank[i].rank[group][layer][part][unit][share];
        if (rank != NOBODY && local->ranks[i].groups[group].share_index == local_share)
            used[rank]++;
    }
    for (uint32_t i = 0; i < remote->rank_count; i++) {
        if (!holds(&remote->ranks[i].groups[group], remote_layer(w, group, layer), part, unit, share))
            continue;
        most = used[i] > most ? used[i] : most;
        least = used[i] < least ? used[i] : least;
    }
    if (least != UINT32_MAX && most > least + 1)
        return wrong("group %u, layer %u, part %u, unit %u: one holder is read by %u ranks, another by %u",
                     group, layer, part, unit, most, least);
    return true;
}

bool check_spread(const recipe *r, const world *w, const choices *by_local_rank) {
    const engine_recipe *local = &r->engines[LOCAL];
    if (local->by_hand || r->first_replica)
        return true;
    for (uint32_t g = 0; g < r->group_count; g++) {
        const rank_group *remote = remote_shares(w, g);
        uint32_t local_shares = r->groups[g].is_state ? 1 : local->dcp;
        uint32_t shares = remote ? remote->share_count : 1;
        for (uint32_t layer = 0; layer < w->models[LOCAL].layer_counts[g]; layer++)
            for (uint32_t p = 0; p < w->models[LOCAL].groups[g].part_count; p++)
                for (uint32_t unit = 0; unit < w->models[LOCAL].groups[g].parts[p].units; unit++)
                    for (uint32_t share = 0; share < shares * local_shares; share++)
                        if (!check_spread_of(w, by_local_rank, share / shares, g, layer, p, unit,
                                             share % shares))
                            return false;
    }
    return true;
}
