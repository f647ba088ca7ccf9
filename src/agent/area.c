/*
 * Checksums by coordinates: every cell is hashed by itself, even if cells are adjacent, because they need not be in
 * another shape.
 */
#include "agent/area.h"

#include <xxhash.h>

#include "cuda/driver.h"
#include "kernel/convert.h"
#include "shard/shard.h"
#include "transport/memory.h"

/* Odd, so that no two cells of a part have the same seed within 2^64 steps, rows and units. */
#define STEP_FACTOR 0x9c6f2b4d71e8a535u
#define ROW_FACTOR 0xb3d8e47a1f0c6295u
#define UNIT_FACTOR 0xe1572c9d8a4b3f67u

/* ---- what a peer may have said --------------------------------------------------------------- */

static kvf_status check_inside(const char *what, kvf_range asked, kvf_range held) {
    if (asked.begin > asked.end || asked.begin < held.begin || asked.end > held.end)
        return kvf_fail(KVF_E_RANGE, "checksum: %s is [%u, %u); this rank holds [%u, %u)", what, asked.begin,
                        asked.end, held.begin, held.end);
    return KVF_OK;
}

static kvf_status check_region(const kvf_area *a, uint32_t r) {
    const kvf_memory *region = kvf_memory_at(a->regions, r);
    const uint64_t bytes = a->shard->desc.region_bytes[r];
    kvf_cuda_place place;
    if (region->kind != KVF_MEMORY_HOST && region->kind != KVF_MEMORY_CUDA)
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "checksum: region %u is of memory kind %d; allowed: %d (host) and %d (CUDA)", r,
                        (int)region->kind, (int)KVF_MEMORY_HOST, (int)KVF_MEMORY_CUDA);
    if (!region->address || region->bytes < bytes)
        return kvf_fail(KVF_E_RANGE, "checksum: region %u has %llu bytes; the shard's has %llu", r,
                        (unsigned long long)(region->address ? region->bytes : 0), (unsigned long long)bytes);
    if (region->kind == KVF_MEMORY_HOST)
        return KVF_OK;
    const kvf_status status =
        kvf_cuda_place_of(region->device, (CUdeviceptr)(uintptr_t)region->address, bytes, &place);
    return status ? kvf_fail_in(status, "checksum: region %u: ", r) : KVF_OK;
}

static kvf_status check_regions(const kvf_area *a) {
    kvf_status status = kvf_memory_check(a->regions, a->shard->desc.region_count, "checksum");
    for (uint32_t layer = a->layers.begin; layer < a->layers.end && !status; layer++) {
        const uint32_t r = kvf_shard_placement(a->shard, a->group, layer, a->part)->region;
        if (layer == a->layers.begin ||
            r != kvf_shard_placement(a->shard, a->group, layer - 1, a->part)->region)
            status = check_region(a, r);
    }
    return status;
}

/* check_table() has found a block for every piece. */
static uint32_t kernel_block(const kvf_area *a, const kvf_walk_piece *piece) {
    uint32_t block = 0;
    (void)kvf_table_look_up(&a->blocks, piece->local_position, piece->step, &block);
    return block;
}

static kvf_walk walk_of(const kvf_area *a) {
    return (kvf_walk){a->side, a->side, a->begin, a->end};
}

/* Every kept step has a block in the table, and the block is in the cache. */
static kvf_status check_table(const kvf_area *a) {
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

/* The type in which elements are hashed. */
static kvf_status check_type(kvf_area *a) {
    const kvf_dtype own = a->cell.dtype;
    a->cell_bytes = kvf_part_cell_bytes(&a->cell);
    if (a->dtype == KVF_DTYPE_INVALID || a->dtype == own)
        return KVF_OK;
    a->cell.dtype = a->dtype;
    return kvf_kernel_converts(own, a->dtype)
               ? KVF_OK
               : kvf_fail(KVF_E_UNSUPPORTED, "checksum: %s cannot be converted into %s", kvf_dtype_name(own),
                          kvf_dtype_name(a->dtype));
}

kvf_status kvf_area_check(kvf_area *a) {
    if (!a->shard || !a->regions || !a->table || (a->table->count && !a->table->ids))
        return kvf_fail(KVF_E_INVALID, "checksum: %s is NULL",
                        !a->shard     ? "shard"
                        : !a->regions ? "regions"
                        : !a->table   ? "table"
                                      : "table: ids");
    kvf_status status = check_place(a->shard, a->group, a->part);
    if (status)
        return status;
    const kvf_held_group *held = &a->shard->groups[a->group];
    if (a->begin > a->end || a->end > UINT64_MAX / 4)
        return kvf_fail(KVF_E_RANGE, "checksum: steps are [%llu, %llu); allowed: ranges inside [0, %llu)",
                        (unsigned long long)a->begin, (unsigned long long)a->end,
                        (unsigned long long)(UINT64_MAX / 4));
    a->side = (kvf_walk_side){held->kernel_steps, held->share};
    a->blocks = (kvf_table_side){"checksum", a->table, a->side.kernel_steps, held->kernel_blocks_per_block,
                                 held->block_count};
    a->cell = kvf_model_group(a->shard->model, a->group)->parts[a->part];
    status = check_inside("layers", a->layers, a->shard->group_layers[a->group]);
    if (!status)
        status = check_inside("units", a->units, held->parts[a->part].units);
    if (!status && a->units.begin == a->units.end)
        a->layers.end = a->layers.begin; /* no cells, and a part without units has no place in memory */
    if (!status)
        status = check_type(a);
    if (!status && !a->regions_stay)
        status = check_regions(a);
    return status ? status : check_table(a);
}

/* ---- where cells are ------------------------------------------------------------------------- */

const kvf_memory *kvf_area_memory(const kvf_area *a, uint32_t layer) {
    return kvf_memory_at(a->regions, kvf_shard_placement(a->shard, a->group, layer, a->part)->region);
}

bool kvf_area_uses_devices(const kvf_area *a) {
    for (uint32_t layer = a->layers.begin; layer < a->layers.end; layer++)
        if (kvf_area_memory(a, layer)->kind != KVF_MEMORY_HOST)
            return true;
    return false;
}

const unsigned char *kvf_area_first(const kvf_area *a, uint32_t layer) {
    const kvf_placement *placement = kvf_shard_placement(a->shard, a->group, layer, a->part);
    const uint64_t skipped = a->units.begin - a->shard->groups[a->group].parts[a->part].units.begin;
    return (const unsigned char *)kvf_area_memory(a, layer)->address + placement->offset +
           skipped * placement->unit_stride;
}

kvf_cell_seeds kvf_area_seeds(const kvf_area *a, uint32_t layer) {
    const kvf_group_desc *group = kvf_model_group(a->shard->model, a->group);
    /* By name, as engines may number groups and parts in other ways. */
    uint64_t seed = XXH3_64bits_withSeed(group->name, strlen(group->name), group->layers[layer]);
    seed = XXH3_64bits_withSeed(group->parts[a->part].name, strlen(group->parts[a->part].name), seed);
    return (kvf_cell_seeds){.first = seed + a->units.begin * UNIT_FACTOR,
                            .step = STEP_FACTOR,
                            .row = ROW_FACTOR,
                            .unit = UNIT_FACTOR};
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

/* Cells wait in a short queue while their memory is fetched: blocks are scattered, so the processor cannot predict the
 * next one. */
typedef struct tally {
    const kvf_sum_places *places;
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

/* One layer of an area. */
typedef struct sheet {
    const kvf_placement *placement;
    const unsigned char *first; /* see kvf_area_first() */
    uint32_t rows_per_step;
    kvf_cell_seeds seeds;
} sheet;

static sheet sheet_of(const kvf_area *a, uint32_t layer) {
    return (sheet){kvf_shard_placement(a->shard, a->group, layer, a->part), kvf_area_first(a, layer),
                   a->cell.rows_per_step, kvf_area_seeds(a, layer)};
}

/* Neighbouring steps of one unit, from `cell` on. */
static void add_steps(tally *t, const sheet *s, const unsigned char *cell, uint64_t seed, uint32_t steps,
                      uint64_t *sum) {
    for (uint32_t step = 0; step < steps; step++, sum += t->places->step, seed += s->seeds.step)
        for (uint32_t row = 0; row < s->rows_per_step; row++, cell += s->placement->row_stride)
            take(t, (pending){cell, s->placement, seed + row * s->seeds.row, sum});
}

/* Steps or units outermost, whichever lie further apart, so that memory is passed in ascending order. */
static void add_piece(const kvf_area *a, const sheet *s, const kvf_walk_piece *piece, uint64_t *sums,
                      tally *t) {
    const kvf_placement *p = s->placement;
    uint64_t row = piece->local_position % a->side.kernel_steps * s->rows_per_step;
    const unsigned char *cell = s->first + kernel_block(a, piece) * p->block_stride + row * p->row_stride;
    uint64_t seed = s->seeds.first + piece->step * s->seeds.step;
    uint32_t units = a->units.end - a->units.begin;
    bool unit_by_unit = p->unit_stride >= p->row_stride;
    uint32_t together = unit_by_unit ? piece->steps : 1; /* steps */
    for (uint32_t step = 0; step < piece->steps; step += together)
        for (uint32_t unit = 0; unit < units; unit++)
            add_steps(t, s, cell + (uint64_t)step * s->rows_per_step * p->row_stride + unit * p->unit_stride,
                      seed + step * s->seeds.step + unit * s->seeds.unit, together,
                      sums + step * t->places->step + unit * t->places->unit);
}

static bool is_in_pieces(const kvf_area *a, kvf_range layers) {
    bool found = false;
    for (uint32_t layer = layers.begin; layer < layers.end && !found; layer++)
        found = kvf_shard_placement(a->shard, a->group, layer, a->part)->pieces > 1;
    return found;
}

static kvf_status make_room(const kvf_area *a, kvf_range layers, tally *t) {
    t->own = kvf_model_group(a->shard->model, a->group)->parts[a->part].dtype;
    t->hashed = a->cell.dtype;
    t->elements = a->cell.cell_elements;
    t->cell_bytes = a->cell_bytes;
    t->hashed_bytes = kvf_part_cell_bytes(&a->cell);
    if (is_in_pieces(a, layers) && !(t->whole = kvf_alloc(a->cell_bytes, 1)))
        return kvf_nomem("a checksum");
    if (t->own != t->hashed && !(t->converted = kvf_alloc(t->hashed_bytes, 1))) {
        kvf_free(t->whole);
        return kvf_nomem("a checksum");
    }
    t->as_it_lies = !t->whole && !t->converted;
    return KVF_OK;
}

kvf_status kvf_area_sum_on_host(const kvf_area *a, kvf_range layers, const kvf_sum_places *places) {
    tally t = {.places = places};
    kvf_status status = make_room(a, layers, &t);
    if (status)
        return status;
    if (a->cell_bytes >= LINE_BYTES && a->cell_bytes <= QUEUED_CELL_BYTES)
        t.depth = (uint32_t)kvf_min_u64(QUEUE_BYTES / a->cell_bytes, QUEUE_CELLS);
    kvf_walk walk = walk_of(a);
    kvf_walk_piece piece;
    while (kvf_walk_next(&walk, &piece)) {
        uint64_t *sums = places->sums + (piece.step - a->begin) * places->step;
        for (uint32_t layer = layers.begin; layer < layers.end; layer++) {
            sheet s = sheet_of(a, layer);
            add_piece(a, &s, &piece, sums + (layer - a->layers.begin) * places->layer, &t);
        }
    }
    finish(&t);
    kvf_free(t.converted);
    kvf_free(t.whole);
    return KVF_OK;
}
