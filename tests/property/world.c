/*
 * Derives the world of a case, and walks its cells.
 */
#include "world.h"

#include <stdlib.h>
#include <string.h>

#include "random.h"

/* ---- memory ---------------------------------------------------------------------------------- */

enum { ARENA_BYTES = 96 << 20, MOST_CELLS = 120000, MOST_BYTES = 768 << 10 };

static unsigned char *arena;
static size_t arena_used;

void arena_reset(void) {
    arena_used = 0;
}

/* The bounds below keep every case far within the arena; running out of it is a bug of these tests. */
void *arena_take(size_t count, size_t bytes) {
    if (!arena)
        arena = malloc(ARENA_BYTES);
    size_t total = (count * bytes + 15) / 16 * 16;
    if (!arena || total > ARENA_BYTES - arena_used) {
        fprintf(stderr, "property tests: no memory for %zu bytes\n", total);
        abort();
    }
    void *memory = arena + arena_used;
    arena_used += total;
    return memory;
}

/* ---- deriving -------------------------------------------------------------------------------- */

static bool small_enough(const recipe *r, const world *w, uint32_t side) {
    const engine_world *e = &w->engines[side];
    uint64_t cells = 0, bytes = 0;
    for (uint32_t i = 0; i < e->rank_count; i++) {
        for (uint32_t g = 0; g < r->group_count; g++) {
            const rank_group *held = &e->ranks[i].groups[g];
            const group_recipe *group = &w->models[side].groups[g];
            for (uint32_t p = 0; p < group->part_count; p++) {
                const part_recipe *part = &group->parts[p];
                if (held->parts[p].units_end <= held->parts[p].units_begin)
                    continue;
                uint64_t own = (uint64_t)layers_of(held) * held->block_count * e->tokens[g] * part->rows *
                               units_of(&held->parts[p]);
                bool cut = r->engines[side].by_hand && r->engines[side].hands[i].cut;
                cells += cut ? own * part->cell_elements : own;
                bytes += own * cell_bytes_of(part);
            }
        }
    }
    return cells <= MOST_CELLS && bytes <= MOST_BYTES;
}

bool world_make(const recipe *r, world *out) {
    memset(out, 0, sizeof *out);
    out->recipe = r;
    if (!make_models(r, out))
        return false;
    for (uint32_t side = 0; side < SIDES; side++)
        shape_engine(r, side, out);
    measure_tables(r, out);
    for (uint32_t side = 0; side < SIDES; side++) {
        engine_world *e = &out->engines[side];
        if (!small_enough(r, out, side))
            return false;
        if (e->illegal && e->illegal_rank != UINT32_MAX) {
            for (uint32_t g = 0; g < r->group_count; g++)
                order_text(&r->engines[side].layouts[layout_of(r, side, g)], e->orders[g]);
            continue;
        }
        if (r->engines[side].by_hand)
            place_by_hand(r, side, out);
        else
            place_by_order(r, side, out);
    }
    if (!out->engines[LOCAL].illegal && !out->engines[REMOTE].illegal)
        number_blocks(r, out);
    return true;
}

const char *find_overlap(const world *w, uint32_t side, const rank_world *rank, uint32_t group) {
    const engine_world *e = &w->engines[side];
    const group_recipe *cells_of = &w->models[side].groups[group];
    const rank_group *held = &rank->groups[group];
    unsigned char *used[MAX_REGIONS];
    for (uint32_t region = 0; region < rank->region_count; region++) {
        used[region] = arena_take(rank->region_bytes[region] + 1u, 1);
        memset(used[region], 0, rank->region_bytes[region]);
    }
    for (uint32_t p = 0; p < cells_of->part_count; p++) {
        const rank_part *part = &held->parts[p];
        uint32_t bytes = cell_bytes_of(&cells_of->parts[p]) / part->pieces;
        size_t cells = (size_t)layers_of(held) * held->block_count * e->tokens[group] *
                       cells_of->parts[p].rows * units_of(part) * part->pieces;
        for (size_t i = 0; i < cells; i++) {
            place at = part->cells[i];
            if (at.region >= rank->region_count ||
                (uint64_t)at.offset + bytes > rank->region_bytes[at.region])
                return "a cell outside its region";
            if (memchr(used[at.region] + at.offset, 1, bytes))
                return "two cells share a byte";
            memset(used[at.region] + at.offset, 1, bytes);
        }
    }
    return NULL;
}

/* ---- cells ----------------------------------------------------------------------------------- */

static bool visit_step(const world *w, uint32_t side, const rank_group *held, uint32_t id,
                       uint32_t step_in_block, cell_visit *cell, bool (*visit)(const cell_visit *, void *),
                       void *context) {
    const engine_world *e = &w->engines[side];
    const model_world *model = &w->models[side];
    uint32_t group = cell->group, kernel_tokens = kernel_tokens_of(e, group);
    uint32_t block = id * e->kernel_blocks[group] + step_in_block / kernel_tokens;
    uint32_t blocks = held->block_count * e->kernel_blocks[group];
    for (uint32_t layer = 0; layer < layers_of(held); layer++) {
        cell->layer = held->layers_begin + layer;
        cell->model_layer = model->layers[group][cell->layer];
        for (cell->part = 0; cell->part < model->groups[group].part_count; cell->part++) {
            const part_recipe *part = &model->groups[group].parts[cell->part];
            const rank_part *own = &held->parts[cell->part];
            cell->bytes = cell_bytes_of(part) / own->pieces;
            for (cell->row = 0; cell->row < part->rows; cell->row++) {
                uint32_t row = step_in_block % kernel_tokens * part->rows + cell->row;
                const place *cells =
                    own->cells + (size_t)((layer * blocks + block) * (kernel_tokens * part->rows) + row) *
                                     units_of(own) * own->pieces;
                for (uint32_t i = 0; i < units_of(own) * own->pieces; i++) {
                    cell->unit = own->units_begin + i / own->pieces;
                    cell->first = i % own->pieces * cell->bytes;
                    cell->at = cells[i];
                    if (!visit(cell, context))
                        return false;
                }
            }
        }
    }
    return true;
}

bool visit_cells(const world *w, uint32_t side, uint32_t rank, uint32_t group, uint32_t begin, uint32_t end,
                 bool (*visit)(const cell_visit *cell, void *context), void *context) {
    const engine_world *e = &w->engines[side];
    const rank_group *held = &e->ranks[rank].groups[group];
    const table_world *t = &w->tables[group].side[side];
    uint32_t position = 0;
    for (uint32_t step = 0; step < end && layers_of(held); step++) {
        if (!keeps(held, step))
            continue;
        uint32_t at = position++, block = at / e->tokens[group];
        if (step < begin || block < t->first_block || block - t->first_block >= t->count)
            continue;
        uint32_t id = t->ids[block - t->first_block];
        if (id == NO_ID)
            continue;
        cell_visit cell = {.group = group, .step = step};
        if (!visit_step(w, side, held, id, at % e->tokens[group], &cell, visit, context))
            return false;
    }
    return true;
}

void cell_content(const cell_visit *cell, unsigned char *out) {
    uint64_t coordinates = cell->group | (uint64_t)cell->model_layer << 4 | (uint64_t)cell->part << 12 |
                           (uint64_t)cell->row << 16 | (uint64_t)cell->unit << 24 |
                           (uint64_t)cell->step << 40;
    uint64_t hash = 0;
    for (uint32_t i = 0; i < cell->first + cell->bytes; i++) {
        if (i % 8 == 0)
            hash = mix64(mix64(coordinates) + i);
        if (i >= cell->first)
            out[i - cell->first] = (unsigned char)(hash >> i % 8 * 8);
    }
}
