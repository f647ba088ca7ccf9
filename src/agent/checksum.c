/*
 * Checksums by coordinates: every cell is hashed by itself, even if cells are adjacent, because they need not be in
 * another shape.
 */
#include "agent/checksum.h"

#include <xxhash.h>

#include "kernel/convert.h"
#include "plan/walk.h"
#include "request/request.h"
#include "shard/shard.h"
#include "transport/memory.h"

/* Odd, so that no two cells of a part have the same seed within 2^64 steps, rows and units. */
#define STEP_FACTOR 0x9c6f2b4d71e8a535u
#define ROW_FACTOR 0xb3d8e47a1f0c6295u
#define UNIT_FACTOR 0xe1572c9d8a4b3f67u

/* The requested cells, and where this rank has them. */
typedef struct area {
    const kvf_shard *shard;
    const kvf_memory *regions;
    uint32_t group, part;
    kvf_range layers, units;
    const kvf_block_table *table;
    uint64_t begin, end;
    kvf_walk_side side;
    kvf_table_side blocks;
    uint64_t cell_bytes;
} area;

/* ---- what a peer may have said --------------------------------------------------------------- */

static kvf_status check_inside(const char *what, kvf_range asked, kvf_range held) {
    if (asked.begin > asked.end || asked.begin < held.begin || asked.end > held.end)
        return kvf_fail(KVF_E_RANGE, "checksum: %s is [%u, %u); this rank holds [%u, %u)", what, asked.begin,
                        asked.end, held.begin, held.end);
    return KVF_OK;
}

static kvf_status check_regions(const area *a) {
    kvf_status status = kvf_memory_check(a->regions, a->shard->desc.region_count, "checksum");
    if (status)
        return status;
    for (uint32_t layer = a->layers.begin; layer < a->layers.end; layer++) {
        uint32_t r = kvf_shard_placement(a->shard, a->group, layer, a->part)->region;
        const kvf_memory *region = kvf_memory_at(a->regions, r);
        if (region->kind != KVF_MEMORY_HOST)
            return kvf_fail(KVF_E_UNSUPPORTED, "checksum: region %u is of memory kind %d; allowed: 0 (host)",
                            r, (int)region->kind);
        if (!region->address || region->bytes < a->shard->desc.region_bytes[r])
            return kvf_fail(KVF_E_RANGE, "checksum: region %u has %llu bytes; the shard's has %llu", r,
                            (unsigned long long)(region->address ? region->bytes : 0),
                            (unsigned long long)a->shard->desc.region_bytes[r]);
    }
    return KVF_OK;
}

/* check_table() has found a block for every piece. */
static uint32_t kernel_block(const area *a, const kvf_walk_piece *piece) {
    uint32_t block = 0;
    (void)kvf_table_look_up(&a->blocks, piece->local_position, piece->step, &block);
    return block;
}

static kvf_walk walk_of(const area *a) {
    return (kvf_walk){a->side, a->side, a->begin, a->end};
}

/* Every kept step has a block in the table, and the block is in the cache. */
static kvf_status check_table(const area *a) {
    kvf_walk walk = walk_of(a);
    kvf_walk_piece piece;
    kvf_status status = KVF_OK;
    uint32_t block;
    while (!status && kvf_walk_next(&walk, &piece))
        status = kvf_table_look_up(&a->blocks, piece.local_position, piece.step, &block);
    return status;
}

static kvf_status check_place(const kvf_shard *shard, uint32_t group, uint32_t part) {
    uint32_t groups = kvf_model_group_count(shard->model);
    if (group >= groups)
        return kvf_fail(KVF_E_RANGE, "checksum: group is %u; the model has %u", group, groups);
    uint32_t parts = kvf_model_group(shard->model, group)->part_count;
    if (part >= parts)
        return kvf_fail(KVF_E_RANGE, "checksum: part is %u; group %s has %u", part,
                        kvf_model_group(shard->model, group)->name, parts);
    return KVF_OK;
}

static kvf_status check_area(area *a, const uint64_t *sums) {
    if (!a->shard || !a->regions || !a->table || !sums || (a->table->count && !a->table->ids))
        return kvf_fail(KVF_E_INVALID, "checksum: %s is NULL",
                        !a->shard     ? "shard"
                        : !a->regions ? "regions"
                        : !a->table   ? "table"
                        : !sums       ? "sums"
                                      : "table: ids");
    kvf_status status = check_place(a->shard, a->group, a->part);
    if (status)
        return status;
    const kvf_group_shard_desc *held = &a->shard->groups[a->group];
    if (a->begin > a->end || a->end > UINT64_MAX / 4)
        return kvf_fail(KVF_E_RANGE, "checksum: steps are [%llu, %llu); allowed: ranges inside [0, %llu)",
                        (unsigned long long)a->begin, (unsigned long long)a->end,
                        (unsigned long long)(UINT64_MAX / 4));
    a->side = (kvf_walk_side){held->tokens_per_block / held->kernel_blocks_per_block, held->tokens};
    a->blocks = (kvf_table_side){"checksum", a->table, a->side.kernel_tokens, held->kernel_blocks_per_block,
                                 held->block_count};
    a->cell_bytes = kvf_part_cell_bytes(&kvf_model_group(a->shard->model, a->group)->parts[a->part]);
    status = check_inside("layers", a->layers, a->shard->group_layers[a->group]);
    if (!status)
        status = check_inside("units", a->units, held->parts[a->part].units);
    if (!status)
        status = check_regions(a);
    return status ? status : check_table(a);
}

/* ---- sums ------------------------------------------------------------------------------------ */

/* Cells of less than a line lie close together; larger cells than this are fetched as they are read. */
#define QUEUED_CELL_BYTES 1024u
#define QUEUE_CELLS 64u /* a power of two */
#define QUEUE_BYTES 4096u
#define LINE_BYTES 64u

/* A cell to be hashed, and the sum it belongs to. */
typedef struct pending {
    const unsigned char *cell;
    const kvf_placement *placement; /* how it lies in pieces */
    uint64_t seed;
    uint64_t *sum;
} pending;

/* Where sums go, with the distances between steps, layers and units. Cells wait in a short queue while their memory is
 * fetched: blocks are scattered, so the processor cannot predict the next one. */
typedef struct tally {
    uint64_t *sums;
    uint64_t step, layer, unit;
    uint64_t cell_bytes;
    uint64_t hashed_bytes;    /* of a cell in the hashed type */
    unsigned char *whole;     /* room for a cell that is kept in pieces */
    unsigned char *converted; /* room for a cell whose elements are converted; NULL: no conversion */
    kvf_dtype own, hashed;    /* the type in which elements are kept, and the one in which they are hashed */
    uint32_t elements;        /* of a cell */
    bool as_it_lies;          /* neither in pieces nor converted: a cell is hashed where it is */
    uint32_t depth;           /* how many cells wait; 0: none */
    uint64_t taken;
    pending queue[QUEUE_CELLS];
} tally;

/* The contiguous bytes of a cell; copies a cell in pieces together first. */
static const unsigned char *whole_cell(const tally *t, const pending *p) {
    const kvf_placement *placement = p->placement;
    if (placement->pieces == 1)
        return p->cell;
    uint64_t bytes = t->cell_bytes / placement->pieces;
    for (uint32_t i = 0; i < placement->pieces; i++)
        memcpy(t->whole + i * bytes, p->cell + i * placement->piece_stride, bytes);
    return t->whole;
}

static const unsigned char *converted_cell(const tally *t, const unsigned char *cell) {
    if (!t->converted)
        return cell;
    kvf_kernel_convert(t->own, t->hashed, cell, t->converted, t->elements, false);
    return t->converted;
}

static void hash(const tally *t, const pending *p) {
    const unsigned char *cell = t->as_it_lies ? p->cell : converted_cell(t, whole_cell(t, p));
    *p->sum += XXH3_64bits_withSeed(cell, t->hashed_bytes, p->seed);
}

static void take(tally *t, pending p) {
    if (t->depth == 0) {
        hash(t, &p);
        return;
    }
    if (p.placement->pieces == 1)
        for (uint64_t at = 0; at < t->cell_bytes; at += LINE_BYTES)
            __builtin_prefetch(p.cell + at);
    if (t->taken >= t->depth)
        hash(t, &t->queue[(t->taken - t->depth) % QUEUE_CELLS]);
    t->queue[t->taken++ % QUEUE_CELLS] = p;
}

static void finish(tally *t) {
    for (uint64_t i = t->taken > t->depth ? t->taken - t->depth : 0; i < t->taken; i++)
        hash(t, &t->queue[i % QUEUE_CELLS]);
}

/* One layer of an area, and the seed of its cell in step, row and unit 0. */
typedef struct sheet {
    const kvf_placement *placement;
    const unsigned char *first; /* the cell of kernel block 0, row 0 and the first requested unit */
    uint32_t rows_per_step;
    uint64_t seed;
} sheet;

static sheet sheet_of(const area *a, uint32_t layer) {
    const kvf_group_desc *group = kvf_model_group(a->shard->model, a->group);
    const kvf_placement *placement = kvf_shard_placement(a->shard, a->group, layer, a->part);
    uint64_t skipped = a->units.begin - a->shard->groups[a->group].parts[a->part].units.begin;
    /* By name, as engines may number groups and parts in other ways. */
    uint64_t seed = XXH3_64bits_withSeed(group->name, strlen(group->name), group->layers[layer]);
    seed = XXH3_64bits_withSeed(group->parts[a->part].name, strlen(group->parts[a->part].name), seed);
    return (sheet){placement,
                   (const unsigned char *)kvf_memory_at(a->regions, placement->region)->address +
                       placement->offset + skipped * placement->unit_stride,
                   group->parts[a->part].rows_per_step, seed};
}

/* Neighbouring steps of one unit, from `cell` on. */
static void add_steps(tally *t, const sheet *s, const unsigned char *cell, uint64_t seed, uint32_t steps,
                      uint64_t *sum) {
    for (uint32_t step = 0; step < steps; step++, sum += t->step, seed += STEP_FACTOR)
        for (uint32_t row = 0; row < s->rows_per_step; row++, cell += s->placement->row_stride)
            take(t, (pending){cell, s->placement, seed + row * ROW_FACTOR, sum});
}

/* Steps or units outermost, whichever lie further apart, so that memory is passed in ascending order. */
static void add_piece(const area *a, const sheet *s, const kvf_walk_piece *piece, uint64_t *sums, tally *t) {
    const kvf_placement *p = s->placement;
    uint64_t row = piece->local_position % a->side.kernel_tokens * s->rows_per_step;
    const unsigned char *cell = s->first + kernel_block(a, piece) * p->block_stride + row * p->row_stride;
    uint64_t seed = s->seed + piece->step * STEP_FACTOR + a->units.begin * UNIT_FACTOR;
    uint32_t units = a->units.end - a->units.begin;
    bool unit_by_unit = p->unit_stride >= p->row_stride;
    uint32_t together = unit_by_unit ? piece->steps : 1; /* steps */
    for (uint32_t step = 0; step < piece->steps; step += together)
        for (uint32_t unit = 0; unit < units; unit++)
            add_steps(t, s, cell + (uint64_t)step * s->rows_per_step * p->row_stride + unit * p->unit_stride,
                      seed + step * STEP_FACTOR + unit * UNIT_FACTOR, together,
                      sums + step * t->step + unit * t->unit);
}

static bool is_in_pieces(const area *a) {
    for (uint32_t layer = a->layers.begin; layer < a->layers.end; layer++)
        if (kvf_shard_placement(a->shard, a->group, layer, a->part)->pieces > 1)
            return true;
    return false;
}

static kvf_status make_room(const area *a, kvf_dtype dtype, tally *t) {
    kvf_part_desc part = kvf_model_group(a->shard->model, a->group)->parts[a->part];
    t->own = part.dtype;
    if (dtype != KVF_DTYPE_INVALID)
        part.dtype = dtype;
    t->hashed = part.dtype;
    t->elements = part.cell_elements;
    t->hashed_bytes = kvf_part_cell_bytes(&part);
    const bool converts = t->own != t->hashed;
    if (converts && !kvf_kernel_converts(t->own, t->hashed))
        return kvf_fail(KVF_E_UNSUPPORTED, "checksum: %s cannot be converted into %s", kvf_dtype_name(t->own),
                        kvf_dtype_name(t->hashed));
    if (is_in_pieces(a) && !(t->whole = kvf_alloc(a->cell_bytes, 1)))
        return kvf_nomem("a checksum");
    if (converts && !(t->converted = kvf_alloc(t->hashed_bytes, 1))) {
        kvf_free(t->whole);
        return kvf_nomem("a checksum");
    }
    t->as_it_lies = !t->whole && !t->converted;
    return KVF_OK;
}

static kvf_status add_area(const area *a, kvf_dtype dtype, tally *t) {
    t->cell_bytes = a->cell_bytes;
    kvf_status status = make_room(a, dtype, t);
    if (status)
        return status;
    if (a->cell_bytes >= LINE_BYTES && a->cell_bytes <= QUEUED_CELL_BYTES)
        t->depth = (uint32_t)kvf_min_u64(QUEUE_BYTES / a->cell_bytes, QUEUE_CELLS);
    kvf_walk walk = walk_of(a);
    kvf_walk_piece piece;
    while (kvf_walk_next(&walk, &piece)) {
        uint64_t *sums = t->sums + (piece.step - a->begin) * t->step;
        for (uint32_t layer = a->layers.begin; layer < a->layers.end; layer++, sums += t->layer) {
            sheet s = sheet_of(a, layer);
            add_piece(a, &s, &piece, sums, t);
        }
    }
    finish(t);
    kvf_free(t->converted);
    kvf_free(t->whole);
    return KVF_OK;
}

kvf_status kvf_checksum_steps(const kvf_shard *shard, const kvf_memory *regions, uint32_t group,
                              uint32_t part, kvf_range layers, kvf_range units, const kvf_block_table *table,
                              uint64_t begin, uint64_t end, uint64_t *sums) {
    return kvf_checksum_converted(shard, regions, group, part, layers, units, table, begin, end,
                                  KVF_DTYPE_INVALID, sums);
}

kvf_status kvf_checksum_converted(const kvf_shard *shard, const kvf_memory *regions, uint32_t group,
                                  uint32_t part, kvf_range layers, kvf_range units,
                                  const kvf_block_table *table, uint64_t begin, uint64_t end, kvf_dtype dtype,
                                  uint64_t *sums) {
    area a = {.shard = shard,
              .regions = regions,
              .group = group,
              .part = part,
              .layers = layers,
              .units = units,
              .table = table,
              .begin = begin,
              .end = end};
    kvf_status status = check_area(&a, sums);
    if (status)
        return status;
    memset(sums, 0, (size_t)(end - begin) * sizeof *sums);
    return add_area(&a, dtype, &(tally){.sums = sums, .step = 1});
}

kvf_status kvf_checksum_cells(const kvf_shard *shard, const kvf_memory *regions, uint32_t group,
                              uint32_t part, kvf_range layers, kvf_range units, const kvf_block_table *table,
                              uint64_t step, uint64_t *sums) {
    area a = {.shard = shard,
              .regions = regions,
              .group = group,
              .part = part,
              .layers = layers,
              .units = units,
              .table = table,
              .begin = step,
              .end = step < UINT64_MAX ? step + 1 : step};
    kvf_status status = check_area(&a, sums);
    if (status)
        return status;
    uint64_t units_asked = units.end - units.begin;
    memset(sums, 0, (size_t)((layers.end - layers.begin) * units_asked) * sizeof *sums);
    return add_area(&a, KVF_DTYPE_INVALID, &(tally){.sums = sums, .layer = units_asked, .unit = 1});
}
