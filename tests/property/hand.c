/*
 * Placements and addresses of hand-made shards: blocks, rows, units and the pieces of a cell in any nesting, with gaps
 * between them, and with layers and parts one after another or together in pages.
 */
#include <string.h>

#include "random.h"
#include "world.h"

/* One (layer, part) of a group on a rank, and the number that its strides are drawn from. */
typedef struct item {
    uint32_t layer, part; /* layer: index into the held ones */
    uint64_t number;      /* the seed of everything about it */
} item;

typedef struct hand_layout {
    const group_recipe *cells;
    const engine_world *e;
    rank_world *rank;
    const hand_rank *hand;
    uint32_t group;
    uint32_t *cursors; /* by region: the first free byte */
} hand_layout;

enum { BLOCK, ROW, UNIT, PIECE, AXES };

static uint32_t count_of(const hand_layout *l, uint32_t part, uint32_t axis) {
    const rank_group *held = &l->rank->groups[l->group];
    if (axis == BLOCK)
        return held->block_count * l->e->kernel_blocks[l->group];
    if (axis == ROW)
        return kernel_tokens_of(l->e, l->group) * l->cells->parts[part].rows;
    if (axis == PIECE)
        return held->parts[part].pieces;
    return units_of(&held->parts[part]);
}

/* Strides of the given axes, the first one innermost; returns the bytes from the first cell to the end of the last. */
static uint32_t nest(const hand_layout *l, const item *it, const uint32_t *axes, uint32_t axis_count,
                     uint32_t stride_of[AXES]) {
    uint32_t cell = cell_bytes_of(&l->cells->parts[it->part]) / count_of(l, it->part, PIECE);
    rng pads = {mix64(it->number)};
    uint32_t step = cell + rng_below(&pads, l->hand->pad + 1), extent = cell;
    for (uint32_t i = 0; i < axis_count; i++) {
        uint32_t count = count_of(l, it->part, axes[i]);
        stride_of[axes[i]] = step;
        extent += (count - 1) * step;
        step = l->hand->tight ? extent : count * step;
        step += rng_below(&pads, l->hand->pad + 1);
        if (count == 1 && l->hand->junk)
            stride_of[axes[i]] = rng_below(&pads, 64);
    }
    return extent;
}

static uint32_t draw(uint64_t number, uint32_t bound) {
    rng one = {number};
    return rng_below(&one, bound);
}

static void permute(uint64_t number, uint32_t *values, uint32_t count) {
    rng order = {number};
    for (uint32_t i = count; i > 1; i--) {
        uint32_t j = rng_below(&order, i), swap = values[i - 1];
        values[i - 1] = values[j];
        values[j] = swap;
    }
}

static strides *placement_of(const hand_layout *l, const item *it) {
    return &l->rank->groups[l->group].parts[it->part].placements[it->layer];
}

static void place_alone(const hand_layout *l, const item *it) {
    uint32_t axes[AXES] = {BLOCK, ROW, UNIT, PIECE}, stride_of[AXES] = {0};
    permute(mix64(it->number ^ 1), axes, AXES);
    uint32_t extent = nest(l, it, axes, AXES, stride_of);
    uint32_t region = draw(it->number ^ 2, l->hand->regions);
    *placement_of(l, it) = (strides){region,         l->cursors[region], stride_of[BLOCK],
                                     stride_of[ROW], stride_of[UNIT],    stride_of[PIECE]};
    l->cursors[region] += extent + draw(it->number ^ 3, l->hand->pad + 1);
}

static void place_in_pages(const hand_layout *l, const item *items, uint32_t count) {
    uint32_t region = draw(l->hand->seed + l->group, l->hand->regions);
    uint32_t page = 0, blocks = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t axes[] = {ROW, UNIT, PIECE}, stride_of[AXES] = {0};
        permute(mix64(items[i].number ^ 1), axes, 3);
        uint32_t extent = nest(l, &items[i], axes, 3, stride_of);
        *placement_of(l, &items[i]) = (strides){region,         l->cursors[region] + page, 0,
                                                stride_of[ROW], stride_of[UNIT],           stride_of[PIECE]};
        page += extent + draw(items[i].number ^ 3, l->hand->pad + 1);
        blocks = count_of(l, items[i].part, BLOCK);
    }
    for (uint32_t i = 0; i < count; i++)
        placement_of(l, &items[i])->block =
            blocks == 1 && l->hand->junk ? draw(items[i].number ^ 4, 64) : page;
    l->cursors[region] += blocks * page;
}

/* Replaces one number of one placement. */
static void damage(const hand_layout *l, const item *it) {
    rng numbers = {l->hand->damage};
    strides *s = placement_of(l, it);
    uint32_t *fields[] = {&s->offset, &s->block, &s->row, &s->unit, &s->piece, &s->region};
    uint32_t *field = fields[rng_below(&numbers, 6)];
    switch (rng_below(&numbers, 3)) {
    case 0: /* a little more or less */
        *field += rng_below(&numbers, 9);
        *field = *field > 4 ? *field - 4 : 0;
        break;
    case 1:
        *field = rng_below(&numbers, 2 * *field + 2);
        break;
    default:
        *field = rng_below(&numbers, 8);
    }
    l->rank->may_be_refused = true;
}

static void list_cells(const hand_layout *l, uint32_t part) {
    rank_group *held = &l->rank->groups[l->group];
    rank_part *p = &held->parts[part];
    uint32_t blocks = count_of(l, part, BLOCK), rows = count_of(l, part, ROW), units = units_of(p);
    p->cells = arena_take((size_t)layers_of(held) * blocks * rows * units * p->pieces, sizeof(place));
    place *cell = p->cells;
    for (uint32_t layer = 0; layer < layers_of(held); layer++) {
        const strides *s = &p->placements[layer];
        for (uint32_t block = 0; block < blocks; block++)
            for (uint32_t row = 0; row < rows; row++)
                for (uint32_t i = 0; i < units * p->pieces; i++)
                    *cell++ = (place){s->region, s->offset + block * s->block + row * s->row +
                                                     i / p->pieces * s->unit + i % p->pieces * s->piece};
    }
}

/* Chooses the number of pieces of a cell, for each part: it divides the elements, and pieces are whole bytes. */
static void cut_cells(const hand_layout *l) {
    for (uint32_t p = 0; p < l->cells->part_count; p++) {
        const part_recipe *part = &l->cells->parts[p];
        uint32_t bits = 8 * cell_bytes_of(part) / part->cell_elements, possible[64] = {1}, count = 0;
        for (uint32_t pieces = 1; pieces <= part->cell_elements; pieces++)
            if (part->cell_elements % pieces == 0 && part->cell_elements / pieces * bits % 8 == 0)
                possible[count++] = pieces;
        uint64_t number = mix64(l->hand->cut + mix64(p * 8 + l->group));
        l->rank->groups[l->group].parts[p].pieces = l->hand->cut ? possible[draw(number, count)] : 1;
    }
}

static void place_group(const hand_layout *l) {
    const rank_group *held = &l->rank->groups[l->group];
    cut_cells(l);
    item items[MAX_LAYERS * MAX_PARTS];
    uint32_t order[MAX_LAYERS * MAX_PARTS], count = 0;
    for (uint32_t layer = 0; layer < layers_of(held); layer++) {
        for (uint32_t part = 0; part < l->cells->part_count; part++) {
            if (units_of(&held->parts[part]) == 0)
                continue;
            /* In most shards all layers are alike. */
            uint32_t kind = l->hand->seed % 4 == 0 ? layer : 0;
            uint64_t number = mix64(l->hand->seed + mix64(kind * 64 + part * 8 + l->group));
            items[count++] = (item){layer, part, number};
        }
    }
    for (uint32_t i = 0; i < count; i++)
        order[i] = i;
    if (l->hand->seed % 3 == 0)
        permute(mix64(l->hand->seed ^ l->group), order, count);
    item ordered[MAX_LAYERS * MAX_PARTS];
    for (uint32_t i = 0; i < count; i++)
        ordered[i] = items[order[i]];
    if (l->hand->in_pages)
        place_in_pages(l, ordered, count);
    for (uint32_t i = 0; i < count && !l->hand->in_pages; i++)
        place_alone(l, &ordered[i]);
    if (l->hand->damage && l->group == 0 && count)
        damage(l, &ordered[l->hand->damage % count]);
    for (uint32_t part = 0; part < l->cells->part_count; part++)
        list_cells(l, part);
}

void place_by_hand(const recipe *r, uint32_t side, world *w) {
    engine_world *e = &w->engines[side];
    for (uint32_t i = 0; i < e->rank_count; i++) {
        rank_world *rank = &e->ranks[i];
        const hand_rank *hand = &r->engines[side].hands[i];
        uint32_t cursors[MAX_REGIONS] = {0};
        rank->region_count = hand->regions;
        for (uint32_t g = 0; g < r->group_count; g++) {
            if (has_group(w, side, g))
                place_group(&(hand_layout){&w->models[side].groups[g], e, rank, hand, g, cursors});
            for (uint32_t region = 0; region < hand->regions; region++) {
                if (cursors[region] > rank->region_bytes[region])
                    rank->region_bytes[region] = cursors[region];
                if (r->engines[side].share_pages)
                    cursors[region] = 0;
            }
        }
        for (uint32_t g = 0; g < r->group_count && !e->illegal; g++) {
            e->illegal = find_overlap(w, side, rank, g);
            e->illegal_rank = i;
        }
    }
}
