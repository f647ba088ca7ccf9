/*
 * Random cases, mostly with small numbers and legal engines: the relations of sizes matter, not the sizes.
 */
#include <string.h>

#include "random.h"
#include "world.h"

#define PICK(random, ...)                                                                                    \
    ((const uint32_t[]){__VA_ARGS__}[rng_below(random, sizeof(uint32_t[]){__VA_ARGS__} / sizeof(uint32_t))])

enum { INVALID = 0, F4_E2M1 = 9, I4 = 10 }; /* as in kvf_dtype */

/* ---- models ---------------------------------------------------------------------------------- */

static uint32_t random_divisor(rng *random, uint32_t of) {
    uint32_t divisors[64] = {1}, n = 0;
    for (uint32_t d = 1; d <= of; d++)
        if (of % d == 0)
            divisors[n++] = d;
    return divisors[rng_below(random, n)];
}

/* With `few` there are often more ranks than units, which decode context parallelism needs. */
static void make_part(rng *random, bool is_state, bool few, const part_recipe *before, part_recipe *out) {
    if (before && rng_chance(random, 50)) {
        *out = *before;
    } else {
        out->dtype = rng_between(random, INVALID + 1, I4);
        out->cell_elements = rng_between(random, 1, 6);
        if (out->dtype == F4_E2M1 || out->dtype == I4)
            out->cell_elements *= 2;
        out->units = few ? rng_between(random, 1, 2) : PICK(random, 1, 2, 3, 4, 4, 5, 6, 8, 8, 10, 12);
        if (before && rng_chance(random, 60))
            out->units = before->units;
        out->granule = rng_chance(random, 20) ? random_divisor(random, out->units) : 1;
        out->rows = rng_chance(random, is_state ? 50 : 12) ? rng_between(random, 2, 4) : 1;
        out->replicate = rng_chance(random, 20);
    }
    out->new_tensor = before && rng_chance(random, 50);
}

/* Makes groups as in published hybrids: few heads, or one latent, beside a convolution's projections and a state that
 * are split finely. */
static void make_hybrid(rng *random, recipe *out) {
    if (out->group_count < 2)
        out->group_count = 2;
    group_recipe *tokens = &out->groups[0], *state = &out->groups[1];
    tokens->is_state = 0;
    uint32_t replicate = rng_chance(random, 50);
    for (uint32_t p = 0; p < tokens->part_count; p++) {
        tokens->parts[p].units = replicate ? 1 : rng_between(random, 1, 2);
        tokens->parts[p].granule = 1;
        tokens->parts[p].replicate = replicate;
    }
    memset(state, 0, sizeof *state);
    state->is_state = 1;
    state->layer_mask = 1 + rng_below(random, (1u << out->layer_count) - 1);
    state->part_count = rng_between(random, 2, MAX_PARTS);
    uint32_t rows = rng_between(random, 2, 4), heads = PICK(random, 4, 6, 8);
    for (uint32_t p = 0; p < state->part_count; p++) {
        part_recipe *part = &state->parts[p];
        make_part(random, true, false, NULL, part);
        bool last = p + 1 == state->part_count;
        uint32_t channels = p ? 1 : rng_between(random, 1, 2); /* of a head, or of a group of heads */
        part->units = last ? heads : heads * channels;
        part->granule = last ? 1 : channels;
        part->rows = last ? 1 : rows;
        part->replicate = 0;
        part->new_tensor = last;
    }
}

static void make_model(rng *random, recipe *out) {
    bool few = rng_chance(random, 30);
    uint32_t step_tokens = PICK(random, 2, 2, 3, 4);
    out->layer_count = PICK(random, 1, 2, 2, 3, 3, 4, 5, 6);
    out->group_count = PICK(random, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4);
    for (uint32_t g = 0; g < out->group_count; g++) {
        group_recipe *group = &out->groups[g];
        uint32_t all = (1u << out->layer_count) - 1;
        group->is_state = rng_chance(random, 30);
        group->layer_mask = rng_chance(random, 40) ? all : 1 + rng_below(random, all);
        if (!group->is_state && rng_chance(random, 20))
            group->window = rng_between(random, 1, 40);
        else if (!group->is_state && rng_chance(random, 12))
            group->chunk = rng_between(random, 1, 32);
        else if (!group->is_state && rng_chance(random, 20))
            group->step_tokens = step_tokens;
        group->part_count = PICK(random, 1, 1, 1, 2, 2, 2, 2, 3, 4);
        for (uint32_t p = 0; p < group->part_count; p++)
            make_part(random, group->is_state, few, p ? &group->parts[p - 1] : NULL, &group->parts[p]);
    }
    if (rng_chance(random, 20))
        make_hybrid(random, out);
}

static bool is_mixed(const recipe *r) {
    uint32_t states = 0;
    for (uint32_t g = 0; g < r->group_count; g++)
        states += r->groups[g].is_state != 0;
    return states && states < r->group_count;
}

/* ---- engines --------------------------------------------------------------------------------- */

/* Makes the models differ: in the order of groups and parts, in what one lacks, or in one field. */
static void make_unlike(rng *random, const recipe *r, unlike_recipe *out) {
    if (rng_chance(random, 60))
        out->group_order = rng_below(random, 24);
    if (rng_chance(random, 60))
        out->part_order = rng_below(random, 24);
    if (r->layer_count > 1 && rng_chance(random, 30))
        out->fewer_layers = rng_between(random, 1, r->layer_count - 1 < 2 ? 1 : 2);
    uint32_t g = rng_below(random, r->group_count);
    if (r->group_count > 1 && rng_chance(random, 40))
        out->lacks_groups = 1u << g;
    if (rng_chance(random, 20))
        out->lacks_layers[rng_below(random, r->group_count)] = 1u << rng_below(random, r->layer_count);
    if (rng_chance(random, 30)) {
        out->differs = 1 + rng_below(random, r->group_count);
        out->field = rng_chance(random, 40) ? UNLIKE_DTYPE : rng_below(random, UNLIKE_FIELDS);
    }
}

static void make_order(rng *random, layout_recipe *out) {
    if (rng_chance(random, 20))
        return;
    out->order = rng_between(random, 1, 120);
    out->tensor_axis = rng_chance(random, 50) ? rng_between(random, 1, 5) : 0;
    char text[ORDER_TEXT];
    order_text(out, text);
    uint32_t legal = (uint32_t)strspn(text, "LTP"); /* only these axes may have their own buffers */
    if (rng_chance(random, 60))
        out->bar = 1 + rng_below(random, legal + 1);
    if (rng_chance(random, 3))
        out->bar = rng_between(random, 1, 7);
    if (rng_chance(random, 3))
        out->order_fault = rng_between(random, ORDER_MISSING, ORDER_TENSOR_INSIDE);
}

static void make_layout(rng *random, bool is_state, uint32_t other_tokens, layout_recipe *out) {
    memset(out, 0, sizeof *out);
    if (!is_state) {
        out->tokens = PICK(random, 0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 10, 12, 15, 16, 16, 20, 24, 32, 48);
        if (other_tokens && rng_chance(random, 25))
            out->tokens = other_tokens;
        uint32_t tokens = out->tokens ? out->tokens : 16;
        if (rng_chance(random, 25))
            out->kernel_blocks = random_divisor(random, tokens);
        if (rng_chance(random, 2))
            out->kernel_blocks = rng_between(random, 1, 5);
    } else if (rng_chance(random, 3)) {
        out->tokens = rng_between(random, 1, 3);
        out->kernel_blocks = rng_between(random, 0, 2);
    }
    make_order(random, out);
    if (rng_chance(random, 25))
        out->page_extra = rng_between(random, 1, 24);
    if (rng_chance(random, 2))
        out->page_short = 1;
    if (rng_chance(random, 20))
        out->page_align = PICK(random, 1, 2, 3, 4, 8, 16, 32);
    out->spare_blocks = rng_below(random, 4);
}

static void make_stages(rng *random, uint32_t layers, engine_recipe *out) {
    out->pp = PICK(random, 1, 1, 1, 1, 1, 2, 2, 3);
    if (out->pp > layers && !rng_chance(random, 5))
        out->pp = layers;
    out->uneven = rng_chance(random, 50);
    uint32_t left = layers;
    for (uint32_t stage = 0; stage < out->pp; stage++) {
        uint32_t later = out->pp - 1 - stage;
        out->stages[stage] = later && left > later ? rng_between(random, 1, left - later) : left;
        left -= out->stages[stage];
    }
    if (rng_chance(random, 2))
        out->stages[0] = rng_below(random, 4);
}

static bool may_share_tokens(const recipe *r, uint32_t tp, uint32_t dcp) {
    if (tp % dcp != 0)
        return false;
    for (uint32_t g = 0; g < r->group_count; g++) {
        for (uint32_t p = 0; p < r->groups[g].part_count && !r->groups[g].is_state; p++) {
            const part_recipe *part = &r->groups[g].parts[p];
            uint32_t granules = part->units / part->granule;
            if (!part->replicate && (tp % granules != 0 || tp / granules % dcp != 0))
                return false;
        }
    }
    return true;
}

static void share_tokens(rng *random, const recipe *r, const engine_recipe *other, engine_recipe *out) {
    out->dcp = 1;
    out->width = rng_chance(random, 60) ? 1 : rng_between(random, 1, 4);
    if (rng_chance(random, 3))
        out->dcp = rng_between(random, 1, 9);
    if (!rng_chance(random, 60))
        return;
    uint32_t legal[9], n = 0;
    for (uint32_t dcp = 2; dcp <= 9; dcp++)
        if (may_share_tokens(r, out->tp, dcp))
            legal[n++] = dcp;
    if (n)
        out->dcp = legal[rng_below(random, n)];
    if (!other || !rng_chance(random, 40))
        return;
    out->width = other->width;
    for (uint32_t i = 0; i < n; i++)
        if (legal[i] == other->dcp)
            out->dcp = other->dcp;
}

/* Units of ranks made by hand. The remote side is a grid of layers x units x shares with overlaps and, now and then, a
 * hole; the local side is arbitrary. */
static void make_units(rng *random, const recipe *r, uint32_t piece, uint32_t pieces, hand_rank *hand) {
    for (uint32_t g = 0; g < r->group_count; g++) {
        for (uint32_t p = 0; p < r->groups[g].part_count; p++) {
            uint32_t units = r->groups[g].parts[p].units, begin, end;
            if (pieces) {
                /* Every rank of the engine computes the same cuts; some ranks hold a bit more. */
                begin = piece * units / pieces;
                end = (piece + 1) * units / pieces;
                if (rng_chance(random, 25))
                    begin = rng_below(random, begin + 1);
                if (rng_chance(random, 25))
                    end = rng_between(random, end, units);
                if (rng_chance(random, 3))
                    end = begin + rng_below(random, end - begin + 1);
            } else {
                begin = rng_below(random, units);
                end = rng_between(random, begin + (rng_chance(random, 90) ? 1 : 0), units);
            }
            hand->units_begin[g][p] = begin;
            hand->units_end[g][p] = end;
        }
    }
}

static void make_hand_rank(rng *random, hand_rank *out) {
    out->spare_blocks = rng_below(random, 3);
    out->replica_count = rng_between(random, 1, 3);
    out->replica = rng_below(random, out->replica_count);
    out->in_pages = rng_chance(random, 50);
    out->regions = rng_between(random, 1, 3);
    out->pad = rng_chance(random, 50) ? 0 : rng_between(random, 1, 9);
    out->tight = rng_chance(random, 40);
    out->junk = rng_chance(random, 30);
    out->cut = rng_chance(random, 35) ? (uint32_t)rng_next(random) | 1 : 0;
    out->seed = (uint32_t)rng_next(random);
    out->damage = rng_chance(random, 8) ? (uint32_t)rng_next(random) | 1 : 0;
}

static void make_by_hand(rng *random, const recipe *r, uint32_t side, engine_recipe *out) {
    uint32_t layers = r->layer_count - out->unlike.fewer_layers;
    out->by_hand = 1;
    out->dcp = rng_chance(random, 30) ? rng_between(random, 2, 3) : 1;
    out->width = rng_between(random, 1, 3);
    if (side == LOCAL) {
        out->hand_count = rng_between(random, 1, 3);
        for (uint32_t i = 0; i < out->hand_count; i++) {
            hand_rank *hand = &out->hands[i];
            make_hand_rank(random, hand);
            hand->layers_begin = rng_below(random, layers);
            hand->layers_end = rng_between(random, hand->layers_begin, layers);
            hand->share_index = rng_below(random, out->dcp);
            make_units(random, r, 0, 0, hand);
        }
        return;
    }
    uint32_t stages = layers > 1 ? rng_between(random, 1, 2) : 1, pieces = rng_between(random, 1, 3);
    uint32_t cut = rng_between(random, 1, layers);
    while (stages * pieces * out->dcp > MAX_HAND_RANKS)
        pieces--;
    for (uint32_t i = 0; i < stages * pieces * out->dcp; i++) {
        hand_rank *hand = &out->hands[out->hand_count++];
        make_hand_rank(random, hand);
        uint32_t stage = i / (pieces * out->dcp);
        hand->layers_begin = stage ? cut : 0;
        hand->layers_end = stage || stages == 1 ? layers : cut;
        if (hand->layers_begin && rng_chance(random, 25))
            hand->layers_begin--;
        hand->share_index = i % out->dcp;
        make_units(random, r, i / out->dcp % pieces, pieces, hand);
    }
    if (rng_chance(random, 5))
        out->disagree = 1 + rng_below(random, out->hand_count);
    if (rng_chance(random, 4) && out->hand_count > 1)
        out->hand_count--;
}

/* How many tokens the entries of compressed groups have; 1: there is no such group. */
static uint32_t largest_step(const recipe *r) {
    uint32_t most = 1;
    for (uint32_t g = 0; g < r->group_count; g++)
        if (r->groups[g].step_tokens > most)
            most = r->groups[g].step_tokens;
    return most;
}

static void make_engine(rng *random, const recipe *r, uint32_t side, engine_recipe *out) {
    const engine_recipe *other = side == REMOTE ? &r->engines[LOCAL] : NULL;
    memset(out, 0, sizeof *out);
    out->tp = PICK(random, 1, 1, 1, 2, 2, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9);
    if (rng_chance(random, 20))
        make_unlike(random, r, &out->unlike);
    make_stages(random, r->layer_count - out->unlike.fewer_layers, out);
    share_tokens(random, r, other, out);
    if (out->dcp > 1 && out->width % largest_step(r) && rng_chance(random, 85))
        out->width = largest_step(r) * rng_between(random, 1, 2);
    if (rng_chance(random, 15))
        make_by_hand(random, r, side, out);
    bool mixed = is_mixed(r);
    out->share_pages = rng_chance(random, mixed ? 50 : 25);
    out->even_pages = r->group_count > 1 && out->share_pages && rng_chance(random, mixed ? 60 : 30);
    out->per_group = r->group_count > 1 && (out->even_pages || rng_chance(random, 60));
    for (uint32_t i = 0; i < MAX_GROUPS; i++) {
        bool is_state = out->per_group ? r->groups[i].is_state : i == 1;
        make_layout(random, is_state, other ? other->layouts[i].tokens : 0, &out->layouts[i]);
        if (other && rng_chance(random, 20))
            out->layouts[i].order = other->layouts[i].order;
        const uint32_t entry = largest_step(r);
        if (!out->per_group && !is_state && out->layouts[i].tokens && rng_chance(random, 85))
            out->layouts[i].tokens = (out->layouts[i].tokens + entry - 1) / entry * entry;
        for (uint32_t tries = 0; out->even_pages && !has_whole_pages(&out->layouts[i]) && tries < 20; tries++)
            make_order(random, &out->layouts[i]);
    }
}

/* ---- requests -------------------------------------------------------------------------------- */

static void make_table(rng *random, table_recipe *out) {
    out->ids = rng_below(random, ID_MODES);
    out->lead = rng_chance(random, 50) ? 0 : rng_between(random, 1, 9);
    out->lead_empty = rng_chance(random, 50);
    out->trail = rng_chance(random, 30) ? rng_between(random, 1, 2) : 0;
}

static void make_requests(rng *random, recipe *out) {
    bool predictable = rng_chance(random, 25);
    uint32_t end = rng_chance(random, 50) ? rng_between(random, 1, 40) : rng_between(random, 1, 130);
    for (uint32_t g = 0; g < out->group_count; g++) {
        group_request_recipe *request = &out->requests[g];
        bool state = out->groups[g].is_state;
        request->end = state ? rng_between(random, 1, 3) : end;
        if (!state && rng_chance(random, 10) && !predictable)
            request->end = rng_between(random, 0, 60);
        if (rng_chance(random, 55))
            request->begin = rng_below(random, request->end + 1);
        if (rng_chance(random, 8))
            request->begin = request->end;
        for (uint32_t side = 0; side < SIDES; side++)
            make_table(random, &request->tables[side]);
        if (!predictable)
            continue;
        request->begin = 0;
        request->end = state ? 1 : end / step_tokens_of(&out->groups[g]);
        request->tables[LOCAL].ids = request->tables[REMOTE].ids = IDS_SCATTERED;
    }
    if (rng_chance(random, 35)) {
        out->fault = rng_between(random, FAULT_NONE + 1, FAULTS - 1);
        out->fault_group = rng_below(random, out->group_count);
        out->fault_side = rng_below(random, SIDES);
        out->fault_at = rng_below(random, 64);
    }
}

static void make_case(rng *random, recipe *out) {
    memset(out, 0, sizeof *out);
    make_model(random, out);
    for (uint32_t side = 0; side < SIDES; side++)
        make_engine(random, out, side, &out->engines[side]);
    make_requests(random, out);
    out->ids_seed = (uint32_t)rng_next(random);
    out->first_replica = rng_chance(random, 30);
    if (rng_chance(random, 15)) {
        out->ask_begin = rng_below(random, out->layer_count);
        out->ask_end = rng_between(random, out->ask_begin + 1, out->layer_count);
    }
}

/* Most random engines are illegal, because of their axis orders; most of these are made again. */
void recipe_generate(uint64_t seed, recipe *out) {
    rng random = {seed};
    static world w;
    for (;;) {
        make_case(&random, out);
        arena_reset();
        if (!recipe_usable(out) || !world_make(out, &w))
            continue;
        for (uint32_t tries = 0; tries < 30; tries++) {
            bool usable = true, legal = true;
            for (uint32_t side = 0; side < SIDES; side++) {
                if (!w.engines[side].illegal)
                    continue;
                legal = false;
                if (!rng_chance(&random, 90))
                    return;
                make_engine(&random, out, side, &out->engines[side]);
            }
            if (legal)
                return;
            arena_reset();
            usable = recipe_usable(out) && world_make(out, &w);
            if (!usable)
                break;
        }
    }
}

bool recipe_usable(const recipe *r) {
    bool good = r->layer_count >= 1 && r->layer_count <= MAX_LAYERS && r->group_count >= 1 &&
                r->group_count <= MAX_GROUPS && r->fault < FAULTS && r->fault_side < SIDES;
    for (uint32_t g = 0; g < r->group_count && good; g++) {
        const group_recipe *group = &r->groups[g];
        good = group->layer_mask && group->layer_mask < 1u << r->layer_count && group->part_count >= 1 &&
               group->part_count <= MAX_PARTS && !(group->window && group->chunk) &&
               !(group->is_state && (group->window || group->chunk)) &&
               (group->step_tokens <= 1 || !(group->is_state || group->window || group->chunk)) &&
               group->step_tokens <= 5 && r->requests[g].begin <= r->requests[g].end &&
               r->requests[g].end <= 1000;
        for (uint32_t p = 0; p < group->part_count && good; p++) {
            const part_recipe *part = &group->parts[p];
            good = part->dtype > INVALID && part->dtype <= I4 && part->units >= 1 && part->units <= 16 &&
                   part->granule >= 1 && part->units % part->granule == 0 && part->cell_elements >= 1 &&
                   part->cell_elements <= 64 && part->rows >= 1 && part->rows <= 8 &&
                   (part->dtype < F4_E2M1 || part->cell_elements % 2 == 0);
        }
        for (uint32_t side = 0; side < SIDES && good; side++)
            good = r->requests[g].tables[side].ids < ID_MODES;
    }
    for (uint32_t side = 0; side < SIDES && good; side++) {
        const engine_recipe *engine = &r->engines[side];
        good = engine->unlike.fewer_layers < r->layer_count && engine->unlike.differs <= r->group_count &&
               engine->unlike.field < UNLIKE_FIELDS;
        good = good && engine->tp >= 1 && engine->tp <= 9 && engine->pp >= 1 && engine->pp <= MAX_STAGES &&
               engine->dcp >= 1 && engine->dcp <= 9 && engine->width >= 1 && engine->width <= 8;
        if (engine->by_hand)
            good = good && engine->hand_count >= 1 && engine->hand_count <= MAX_HAND_RANKS;
        for (uint32_t i = 0; i < engine->hand_count && good && engine->by_hand; i++)
            good =
                engine->hands[i].regions >= 1 && engine->hands[i].regions <= 8 && engine->hands[i].pad < 64;
        for (uint32_t i = 0; i < MAX_GROUPS && good; i++)
            good = engine->layouts[i].order <= 120 && engine->layouts[i].tokens <= 64 &&
                   engine->layouts[i].kernel_blocks <= 64;
    }
    return good;
}
