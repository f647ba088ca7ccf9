/*
 * Block tables: the blocks of the sequence that each side must list, and their ids.
 */
#include <string.h>

#include "random.h"
#include "world.h"

static uint32_t first_needed(const group_recipe *group, uint32_t end) {
    if (group->window && end > group->window)
        return end - group->window;
    if (group->chunk && end)
        return (end - 1) - (end - 1) % group->chunk;
    return 0;
}

/* Finds the blocks that hold wanted steps, by counting through the steps of each rank. */
static void find_needed(const recipe *r, world *w, uint32_t side, uint32_t group) {
    engine_world *e = &w->engines[side];
    group_tables *tables = &w->tables[group];
    table_world *t = &tables->side[side];
    t->needed_begin = NO_ID;
    t->needed_end = 0;
    for (uint32_t i = 0; i < e->rank_count; i++) {
        const rank_group *held = &e->ranks[i].groups[group];
        uint32_t position = 0;
        for (uint32_t step = 0; step < tables->end; step++) {
            if (!keeps(held, step))
                continue;
            uint32_t block = position++ / e->tokens[group];
            if (step < tables->first)
                continue;
            if (block < t->needed_begin)
                t->needed_begin = block;
            if (block + 1 > t->needed_end)
                t->needed_end = block + 1;
        }
    }
    if (t->needed_end == 0)
        t->needed_begin = 0;
    const table_recipe *wanted = &r->requests[group].tables[side];
    uint32_t lead = wanted->lead < t->needed_begin ? wanted->lead : t->needed_begin;
    t->first_block = t->needed_begin - lead;
    t->count = t->needed_end + wanted->trail - t->first_block;
    if (t->needed_end == 0) {
        t->first_block = wanted->lead;
        t->count = 0;
    }
}

static uint32_t with_ids(const recipe *r, const world *w, uint32_t side, uint32_t group) {
    const table_world *t = &w->tables[group].side[side];
    uint32_t empty = r->requests[group].tables[side].lead_empty ? t->needed_begin - t->first_block : 0;
    return t->count ? t->count - empty : 0;
}

static uint32_t blocks_for(const recipe *r, const world *w, uint32_t side, uint32_t group) {
    uint32_t n = with_ids(r, w, side, group);
    return r->requests[group].tables[side].ids == IDS_SCATTERED ? 2 * n + 2 : n + 1;
}

void measure_tables(const recipe *r, world *w) {
    for (uint32_t g = 0; g < r->group_count; g++) {
        group_tables *tables = &w->tables[g];
        tables->begin = r->requests[g].begin;
        tables->end = r->requests[g].end;
        tables->first = first_needed(&w->models[LOCAL].groups[g], tables->end);
        if (tables->first < tables->begin)
            tables->first = tables->begin;
        for (uint32_t side = 0; side < SIDES; side++)
            find_needed(r, w, side, g);
    }
    for (uint32_t side = 0; side < SIDES; side++) {
        const engine_recipe *engine = &r->engines[side];
        engine_world *e = &w->engines[side];
        for (uint32_t g = 0; g < r->group_count; g++) {
            uint32_t layout = layout_of(r, side, g), most = 0, sum = 0;
            for (uint32_t other = 0; other < r->group_count; other++) {
                uint32_t blocks = blocks_for(r, w, side, other);
                sum += 2 * blocks;
                if (layout_of(r, side, other) == layout && blocks > most)
                    most = blocks;
            }
            e->block_count[g] = (groups_overlap(r, side) ? sum : most) + engine->layouts[layout].spare_blocks;
            for (uint32_t i = 0; i < e->rank_count; i++)
                e->ranks[i].groups[g].block_count =
                    e->block_count[g] + (engine->by_hand ? engine->hands[i].spare_blocks : 0);
        }
    }
}

/* ---- ids ------------------------------------------------------------------------------------- */

/* Lists the ids of a cache in the order in which a table takes them. Returns their number. */
static uint32_t list_candidates(uint32_t mode, uint32_t block_count, rng *random, uint32_t *ids) {
    uint32_t n = 0;
    uint32_t step = mode == IDS_SCATTERED ? 2 : 1;
    /* Scattered ids leave the last block unused: the memory after it may begin with another cache's block 0. */
    for (uint32_t id = 0; id + (step - 1) < block_count; id += step)
        ids[n++] = id;
    if (mode == IDS_ASCENDING || mode == IDS_DESCENDING) {
        uint32_t shift = rng_below(random, 3);
        for (uint32_t i = 0; i < n; i++)
            ids[i] = mode == IDS_ASCENDING ? (i + shift) % n : n - 1 - (i + shift) % n;
        return n;
    }
    uint32_t chunk = mode == IDS_CHUNKS ? 3 : 1;
    for (uint32_t i = n / chunk; i > 1; i--) {
        uint32_t j = rng_below(random, i);
        for (uint32_t k = 0; k < chunk; k++) {
            uint32_t *a = &ids[(i - 1) * chunk + k], *b = &ids[j * chunk + k], swap = *a;
            *a = *b;
            *b = swap;
        }
    }
    return n;
}

/* For groups that overlap: the bytes of every rank that belong to blocks of tables. */
typedef struct claims {
    unsigned char *bytes[MAX_RANKS][MAX_REGIONS];
} claims;

static void claims_make(const engine_world *e, bool shared, claims *out) {
    for (uint32_t i = 0; i < e->rank_count && shared; i++)
        for (uint32_t region = 0; region < e->ranks[i].region_count; region++) {
            uint32_t bytes = e->ranks[i].region_bytes[region];
            out->bytes[i][region] = arena_take(bytes + 1u, 1);
            memset(out->bytes[i][region], 0, bytes);
        }
}

/* Checks, or with `take` marks, every byte of every cell of one logical block on all ranks. */
static bool claim_block(const world *w, uint32_t side, uint32_t group, uint32_t id, bool take, claims *c) {
    const engine_world *e = &w->engines[side];
    const group_recipe *cells_of = &w->models[side].groups[group];
    uint32_t kernel = e->kernel_blocks[group];
    for (uint32_t i = 0; i < e->rank_count; i++) {
        const rank_group *held = &e->ranks[i].groups[group];
        for (uint32_t p = 0; p < cells_of->part_count; p++) {
            const rank_part *part = &held->parts[p];
            if (layers_of(held) == 0)
                continue;
            uint32_t bytes = cell_bytes_of(&cells_of->parts[p]) / part->pieces;
            uint32_t cells =
                kernel_tokens_of(e, group) * cells_of->parts[p].rows * units_of(part) * part->pieces;
            for (uint32_t layer = 0; layer < layers_of(held); layer++) {
                const place *cell =
                    part->cells + (size_t)(layer * held->block_count * kernel + id * kernel) * cells;
                for (uint32_t k = 0; k < kernel * cells; k++) {
                    unsigned char *at = c->bytes[i][cell[k].region] + cell[k].offset;
                    if (!take && memchr(at, 1, bytes))
                        return false;
                    if (take)
                        memset(at, 1, bytes);
                }
            }
        }
    }
    return true;
}

static bool number_table(const recipe *r, world *w, uint32_t side, uint32_t group, claims *taken) {
    engine_world *e = &w->engines[side];
    table_world *t = &w->tables[group].side[side];
    const table_recipe *wanted = &r->requests[group].tables[side];
    uint32_t *candidates = arena_take(e->block_count[group], sizeof *candidates);
    rng random = {mix64(r->ids_seed + side * 16 + group)};
    uint32_t n = list_candidates(wanted->ids, e->block_count[group], &random, candidates), next = 0;
    t->ids = arena_take(t->count + 1u, sizeof *t->ids);
    for (uint32_t i = 0; i < t->count; i++) {
        t->ids[i] = NO_ID;
        if (wanted->lead_empty && t->first_block + i < t->needed_begin)
            continue;
        bool shared = groups_overlap(r, side);
        while (next < n && shared && !claim_block(w, side, group, candidates[next], false, taken))
            next++;
        if (next == n)
            return false;
        t->ids[i] = candidates[next++];
    }
    /* Marked only now: blocks of one group may lie side by side in a page of another. */
    for (uint32_t i = 0; i < t->count && groups_overlap(r, side); i++)
        if (t->ids[i] != NO_ID)
            (void)claim_block(w, side, group, t->ids[i], true, taken);
    return true;
}

void number_blocks(const recipe *r, world *w) {
    claims *taken = arena_take(SIDES, sizeof *taken);
    for (uint32_t side = 0; side < SIDES; side++)
        claims_make(&w->engines[side], groups_overlap(r, side), &taken[side]);
    w->scattered = true;
    for (uint32_t g = 0; g < r->group_count; g++) {
        group_tables *tables = &w->tables[g];
        bool fits =
            number_table(r, w, LOCAL, g, &taken[LOCAL]) && number_table(r, w, REMOTE, g, &taken[REMOTE]);
        if (!fits) {
            /* The cache is full of other groups' blocks: this group moves nothing. */
            tables->begin = tables->first = tables->end;
            for (uint32_t side = 0; side < SIDES; side++) {
                tables->side[side].count = 0;
                tables->side[side].needed_end = tables->side[side].needed_begin;
            }
        }
        for (uint32_t side = 0; side < SIDES; side++)
            w->scattered &= r->requests[g].tables[side].ids == IDS_SCATTERED && !groups_overlap(r, side);
        w->scattered &= tables->begin == 0;
    }
}
