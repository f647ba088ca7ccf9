/*
 * Which rank holds which cells: a literal version of the rules of shard.h for tensor, pipeline and decode context
 * parallelism.
 */
#include <string.h>

#include "world.h"

static const uint32_t dtype_bits[] = {0, 64, 32, 16, 16, 8, 8, 8, 8, 4, 4};

uint32_t cell_bytes_of(const part_recipe *part) {
    return part->cell_elements * dtype_bits[part->dtype] / 8;
}

bool groups_overlap(const recipe *r, uint32_t side) {
    const engine_recipe *engine = &r->engines[side];
    bool damaged = false;
    for (uint32_t i = 0; i < engine->hand_count && engine->by_hand; i++)
        damaged |= engine->hands[i].damage != 0;
    return engine->share_pages || damaged;
}

uint32_t layout_of(const recipe *r, uint32_t side, uint32_t group) {
    if (r->engines[side].per_group)
        return group;
    return r->groups[group].is_state ? 1 : 0;
}

bool shares_meet(const rank_group *a, const rank_group *b) {
    uint32_t span = a->share_width * a->share_count * b->share_width * b->share_count;
    for (uint32_t step = 0; step < span; step++)
        if (keeps(a, step) && keeps(b, step))
            return true;
    return false;
}

static void illegal(engine_world *e, uint32_t rank, const char *why) {
    if (!e->illegal) {
        e->illegal = why;
        e->illegal_rank = rank;
    }
}

/* Sets the group's layers that lie in the rank's range of layers. */
static void hold_layers(const model_world *model, uint32_t group, rank_world *rank) {
    rank_group *g = &rank->groups[group];
    g->layers_begin = g->layers_end = 0;
    for (uint32_t p = 0; p < model->groups[group].part_count; p++)
        g->parts[p].pieces = 1; /* hand-made shards change it */
    for (uint32_t i = 0; i < model->layer_counts[group]; i++) {
        uint32_t layer = model->layers[group][i];
        if (layer < rank->layers_begin)
            g->layers_begin = i + 1;
        if (layer < rank->layers_end)
            g->layers_end = i + 1;
    }
    if (g->layers_end < g->layers_begin)
        g->layers_end = g->layers_begin;
}

static void share_units(const part_recipe *part, uint32_t tp, uint32_t tp_rank, rank_part *out) {
    uint32_t granules = part->units / part->granule;
    uint32_t begin = tp_rank * granules / tp, end = (tp_rank + 1) * granules / tp;
    if (tp > granules)
        end = begin + 1;
    if (part->replicate) {
        begin = 0;
        end = granules;
    }
    out->units_begin = begin * part->granule;
    out->units_end = end * part->granule;
}

/* Counts the ranks of the stage that have the same units and tokens as this one: those before it, and all. */
static void count_replicas(const engine_world *e, uint32_t tp, uint32_t rank, uint32_t group, uint32_t part,
                           rank_part *out) {
    const rank_group *own = &e->ranks[rank].groups[group];
    uint32_t first = rank / tp * tp;
    out->replica = out->replica_count = 0;
    for (uint32_t i = first; i < first + tp; i++) {
        const rank_group *other = &e->ranks[i].groups[group];
        bool same = other->parts[part].units_begin == own->parts[part].units_begin &&
                    other->share_index == own->share_index;
        out->replica_count += same;
        out->replica += same && i < rank;
    }
}

/* Every token share must have the same number of holders of each unit. */
static bool shares_are_whole(const world *w, const engine_world *e, uint32_t side, uint32_t group) {
    const engine_recipe *engine = &w->recipe->engines[side];
    const group_recipe *cells = &w->models[side].groups[group];
    for (uint32_t p = 0; p < cells->part_count; p++) {
        for (uint32_t unit = 0; unit < cells->parts[p].units; unit++) {
            uint32_t holders[MAX_RANKS] = {0};
            for (uint32_t i = 0; i < engine->tp; i++) {
                const rank_group *g = &e->ranks[i].groups[group];
                if (unit >= g->parts[p].units_begin && unit < g->parts[p].units_end)
                    holders[g->share_index]++;
            }
            for (uint32_t share = 0; share < engine->dcp; share++)
                if (holders[share] == 0 || holders[share] != holders[0])
                    return false;
        }
    }
    return true;
}

static void set_window(uint32_t layers, const engine_recipe *engine, rank_world *rank) {
    rank->layers_begin = rank->pp_rank * layers / engine->pp;
    rank->layers_end = (rank->pp_rank + 1) * layers / engine->pp;
    if (!engine->uneven)
        return;
    rank->layers_begin = 0;
    for (uint32_t stage = 0; stage < rank->pp_rank; stage++)
        rank->layers_begin += engine->stages[stage];
    rank->layers_end = rank->layers_begin + engine->stages[rank->pp_rank];
}

static void check_stages(uint32_t layers, const engine_recipe *engine, engine_world *e) {
    if (engine->pp > layers)
        illegal(e, 0, "more stages than layers");
    uint32_t sum = 0;
    for (uint32_t stage = 0; engine->uneven && stage < engine->pp; stage++) {
        sum += engine->stages[stage];
        if (engine->stages[stage] == 0)
            illegal(e, 0, "a stage without layers");
    }
    if (engine->uneven && sum != layers)
        illegal(e, 0, "stages do not sum to the layers");
    if (engine->tp % engine->dcp != 0)
        illegal(e, 0, "dcp does not divide tp");
}

/* In steps. */
static uint32_t share_width(const engine_recipe *engine, const group_recipe *group) {
    const uint32_t each = step_tokens_of(group);
    return engine->width < each ? 1 : engine->width / each;
}

static void shape_built(const recipe *r, uint32_t side, world *w) {
    const engine_recipe *engine = &r->engines[side];
    const model_world *model = &w->models[side];
    engine_world *e = &w->engines[side];
    check_stages(model->layer_count, engine, e);
    if (e->illegal)
        return;
    e->rank_count = engine->tp * engine->pp;
    for (uint32_t i = 0; i < e->rank_count; i++) {
        rank_world *rank = &e->ranks[i];
        rank->tp_rank = i % engine->tp;
        rank->pp_rank = i / engine->tp;
        set_window(model->layer_count, engine, rank);
        for (uint32_t g = 0; g < r->group_count; g++) {
            rank_group *held = &rank->groups[g];
            hold_layers(&w->models[side], g, rank);
            held->share_count = held->share_width = 1;
            if (!r->groups[g].is_state) {
                held->share_index = rank->tp_rank % engine->dcp;
                held->share_count = engine->dcp;
                held->share_width = share_width(engine, &model->groups[g]);
            }
            for (uint32_t p = 0; p < model->groups[g].part_count; p++)
                share_units(&model->groups[g].parts[p], engine->tp, rank->tp_rank, &held->parts[p]);
        }
    }
    for (uint32_t g = 0; g < r->group_count; g++) {
        if (has_group(w, side, g) && !r->groups[g].is_state && !shares_are_whole(w, e, side, g))
            illegal(e, 0, "units are not held by whole sets of token shares");
        if (has_group(w, side, g) && engine->dcp > 1 &&
            engine->width % step_tokens_of(&model->groups[g]) != 0)
            illegal(e, 0, "a token share with a part of an entry");
        for (uint32_t i = 0; i < e->rank_count; i++)
            for (uint32_t p = 0; p < model->groups[g].part_count; p++)
                count_replicas(e, engine->tp, i, g, p, &e->ranks[i].groups[g].parts[p]);
    }
}

/* Ranks of an engine that hold layers of a group must share its tokens alike. */
static void check_agreement(const recipe *r, engine_world *e) {
    for (uint32_t g = 0; g < r->group_count; g++) {
        uint32_t width = 0;
        for (uint32_t i = 0; i < e->rank_count; i++) {
            const rank_group *held = &e->ranks[i].groups[g];
            if (layers_of(held) == 0)
                continue;
            if (width && held->share_width != width)
                illegal(e, UINT32_MAX, "ranks share tokens differently");
            width = held->share_width;
        }
    }
}

static void shape_hand(const recipe *r, uint32_t side, world *w) {
    const engine_recipe *engine = &r->engines[side];
    engine_world *e = &w->engines[side];
    e->rank_count = engine->hand_count;
    for (uint32_t i = 0; i < e->rank_count; i++) {
        const hand_rank *hand = &engine->hands[i];
        rank_world *rank = &e->ranks[i];
        rank->layers_begin = hand->layers_begin;
        rank->layers_end = hand->layers_end;
        if (hand->layers_begin > hand->layers_end || hand->layers_end > w->models[side].layer_count)
            illegal(e, i, "layers outside the model");
        uint32_t replicas = hand->replica_count ? hand->replica_count : 1;
        if (hand->replica >= replicas)
            illegal(e, i, "a replica beyond their number");
        for (uint32_t g = 0; g < r->group_count; g++) {
            rank_group *held = &rank->groups[g];
            hold_layers(&w->models[side], g, rank);
            held->share_count = held->share_width = 1;
            if (!r->groups[g].is_state) {
                held->share_index = hand->share_index;
                held->share_count = engine->dcp;
                held->share_width = engine->width + (engine->dcp > 1 && engine->disagree == i + 1);
                if (hand->share_index >= engine->dcp)
                    illegal(e, i, "a token share beyond their number");
            }
            const group_recipe *cells = &w->models[side].groups[g];
            for (uint32_t p = 0; p < cells->part_count; p++) {
                held->parts[p].units_begin = hand->units_begin[g][p];
                held->parts[p].units_end = hand->units_end[g][p];
                held->parts[p].replica = hand->replica;
                held->parts[p].replica_count = replicas;
                if (has_group(w, side, g) && (hand->units_begin[g][p] > hand->units_end[g][p] ||
                                              hand->units_end[g][p] > cells->parts[p].units))
                    illegal(e, i, "units outside the model");
            }
        }
    }
    if (side == REMOTE && !e->illegal)
        check_agreement(r, e);
}

/* Sets how many steps a block holds. */
static void count_steps(const recipe *r, uint32_t side, uint32_t g, uint32_t said, world *w) {
    engine_world *e = &w->engines[side];
    const uint32_t each = step_tokens_of(&w->models[side].groups[g]);
    if (r->engines[side].by_hand || r->groups[g].is_state)
        e->tokens[g] = said ? said : 1;
    else if (!said)
        e->tokens[g] = (16 + each - 1) / each;
    else if (r->engines[side].per_group)
        e->tokens[g] = said;
    else
        e->tokens[g] = said < each ? 1 : said / each;
    const bool in_tokens = !r->engines[side].by_hand && !r->engines[side].per_group;
    if (in_tokens && said % each != 0 && has_group(w, side, g))
        illegal(e, 0, "a block with a part of an entry");
}

void shape_engine(const recipe *r, uint32_t side, world *w) {
    engine_world *e = &w->engines[side];
    for (uint32_t g = 0; g < r->group_count; g++) {
        const layout_recipe *layout = &r->engines[side].layouts[layout_of(r, side, g)];
        bool state = r->groups[g].is_state;
        count_steps(r, side, g, layout->tokens, w);
        e->kernel_blocks[g] = layout->kernel_blocks ? layout->kernel_blocks : 1;
        if (!has_group(w, side, g))
            continue;
        if (e->tokens[g] % e->kernel_blocks[g] != 0)
            illegal(e, 0, "kernel blocks do not divide the tokens of a block");
        if (state && e->tokens[g] != 1)
            illegal(e, 0, "a block with several states");
    }
    if (r->engines[side].by_hand)
        shape_hand(r, side, w);
    else
        shape_built(r, side, w);
}
