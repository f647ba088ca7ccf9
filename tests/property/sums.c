#include "sums.h"

#define XXH_INLINE_ALL
#include <kvferry/checksum.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "../unit/elements.h"
#include "coverage.h"
#include "cuda/device_box.h"
#include "device_kernels.h"
#include "forms.h"
#include "random.h"

enum { MOST_BOXES = 2 * MAX_LAYERS, MOST_CELL_BYTES = 512, TELLING_BYTES = 8 };

/* What each unit of a coordinate adds to the seed of a cell's hash. */
static const uint64_t step_seed = 0x9c6f2b4d71e8a535u, row_seed = 0xb3d8e47a1f0c6295u,
                      unit_seed = 0xe1572c9d8a4b3f67u;

/* The cells that are summed, by the world's numbers, and the library's number of group and part. */
typedef struct summed {
    const world *w;
    const kvf_shard *shard;
    const memory *m;
    uint32_t rank, group, part;
    uint32_t group_number, part_number;
    kvf_range layers, units; /* indices into the group's layers; units of the whole model's */
    uint32_t begin, end;     /* steps */
    kvf_dtype own, type;     /* in memory, and as they are hashed */
    bool by_unit;            /* a sum for each unit of each step, not one for each step */
    uint64_t *expected;
    const cell_visit *some; /* one of the cells; NULL: there is none */
} summed;

static const part_recipe *part_of(const summed *s) {
    return &s->w->models[REMOTE].groups[s->group].parts[s->part];
}

static uint32_t units_in(const summed *s) {
    return s->by_unit ? s->units.end - s->units.begin : 1;
}

static size_t sum_count(const summed *s) {
    return (size_t)(s->end - s->begin) * units_in(s);
}

/* ---- the oracle ------------------------------------------------------------------------------- */

/* The names as forms.c gives them. */
static uint64_t seed_of_layer(const summed *s, uint32_t model_layer) {
    const char group[] = {'g', (char)('0' + s->group)}, part[] = {'p', (char)('0' + s->part)};
    return XXH3_64bits_withSeed(part, 2, XXH3_64bits_withSeed(group, 2, model_layer));
}

static bool add_cell(const cell_visit *cell, void *context) {
    summed *s = context;
    unsigned char content[MOST_CELL_BYTES], converted[4 * MOST_CELL_BYTES];
    if (cell->part != s->part || cell->layer < s->layers.begin || cell->layer >= s->layers.end ||
        cell->unit < s->units.begin || cell->unit >= s->units.end || cell->first != 0)
        return true;
    cell_visit whole = *cell;
    whole.bytes = cell_bytes_of(part_of(s));
    cell_content(&whole, content);
    const unsigned char *hashed = content;
    size_t bytes = whole.bytes;
    if (s->own != s->type) {
        const uint32_t element = kvf_dtype_bits(s->own) / 8;
        bytes = 0;
        for (uint32_t at = 0; at < whole.bytes; at += element)
            bytes += element_move(s->own, content + at, s->type, converted + bytes);
        hashed = converted;
    }
    const uint64_t seed = seed_of_layer(s, cell->model_layer) + cell->step * step_seed +
                          cell->row * row_seed + cell->unit * unit_seed;
    const size_t at =
        (size_t)(cell->step - s->begin) * units_in(s) + (s->by_unit ? cell->unit - s->units.begin : 0);
    s->expected[at] += XXH3_64bits_withSeed(hashed, bytes, seed);
    cell_visit *some = arena_take(1, sizeof *some);
    if (!s->some) {
        *some = *cell;
        s->some = some;
    }
    return true;
}

/* ---- the kernel ------------------------------------------------------------------------------- */

static uint32_t kept_before(const rank_group *held, uint32_t step) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < step; i++)
        kept += keeps(held, i);
    return kept;
}

/* Describes a layer to the kernel as src/agent/summing.c does; boxes of later layers follow. */
static kvf_status add_layer(const summed *s, uint32_t layer, const uint64_t *sums, kvf_cuda_box *boxes,
                            uint32_t *count, uint32_t *tiles) {
    const engine_world *e = &s->w->engines[REMOTE];
    const rank_group *held = &e->ranks[s->rank].groups[s->group];
    const table_world *table = &s->w->tables[s->group].side[REMOTE];
    const part_recipe *part = part_of(s);
    const kvf_placement *at = kvf_shard_placement(s->shard, s->group_number, layer, s->part_number);
    const uint32_t first = kept_before(held, s->begin), last = kept_before(held, s->end);
    const uint32_t tokens = e->tokens[s->group], pieces = at->pieces ? at->pieces : 1;
    const uint32_t skipped = s->units.begin - held->parts[s->part].units_begin;
    const kvf_box pages = {.memory = s->m->regions[at->region] + at->offset + skipped * at->unit_stride,
                           .block_stride = at->block_stride,
                           .row_stride = at->row_stride,
                           .unit_stride = at->unit_stride,
                           .piece_stride = at->piece_stride,
                           .blocks = table->ids + (first / tokens - table->first_block),
                           .kernel_blocks = e->kernel_blocks[s->group],
                           .block_rows = (uint64_t)kernel_tokens_of(e, s->group) * part->rows,
                           .first_row = (uint64_t)(first % tokens) * part->rows,
                           .units = s->units.end - s->units.begin,
                           .pieces = pieces,
                           .piece_bytes = cell_bytes_of(part) / pieces};
    const uint64_t step_bytes = 8u * units_in(s);
    const uint32_t model_layer = s->w->models[REMOTE].layers[s->group][layer];
    const kvf_device_sums to = {.address = (uint64_t)(uintptr_t)sums - s->begin * step_bytes,
                                .step_bytes = step_bytes,
                                .unit_bytes = s->by_unit ? 8 : 0,
                                .seed = seed_of_layer(s, model_layer) + s->units.begin * unit_seed,
                                .step_seed = step_seed,
                                .row_seed = row_seed,
                                .unit_seed = unit_seed,
                                .rows = part->rows,
                                .share = {held->share_index, held->share_count, held->share_width},
                                .position = first};
    const kvf_device_side from = {.pages = &pages,
                                  .table = (uint64_t)(uintptr_t)table->ids,
                                  .table_on_host = table->ids,
                                  .type = s->own};
    uint32_t made = 0;
    kvf_status status =
        kvf_device_hash_boxes(&from, s->type, &to, (uint64_t)(last - first) * part->rows, pages.units,
                              s->own == s->type ? cell_bytes_of(part) : part->cell_elements, boxes + *count,
                              MOST_BOXES - *count, &made, tiles);
    *count += made;
    return status;
}

/* Sums by the kernel; `spoil`: a kernel that takes the first unit of a row for all units. */
static kvf_status sum_by_kernel(const summed *s, bool spoil, uint32_t blocks, uint64_t *sums) {
    kvf_cuda_box boxes[MOST_BOXES];
    uint32_t count = 0, tiles = 0;
    kvf_status status = KVF_OK;
    memset(sums, 0, sum_count(s) * sizeof *sums);
    for (uint32_t layer = s->layers.begin; layer < s->layers.end && !status; layer++)
        status = add_layer(s, layer, sums, boxes, &count, &tiles);
    for (uint32_t i = 0; i < count && spoil; i++)
        boxes[i].from.unit_stride = 0;
    if (!status && count > 0)
        run_hash_kernel(boxes, count, tiles, s->own != s->type, blocks);
    return status;
}

/* ---- one area --------------------------------------------------------------------------------- */

static bool same_sums(const summed *s, const uint64_t *sums) {
    return memcmp(sums, s->expected, sum_count(s) * sizeof *sums) == 0;
}

static bool compare(const summed *s, const uint64_t *sums, const char *whose) {
    for (size_t i = 0; i < sum_count(s); i++)
        if (sums[i] != s->expected[i])
            return wrong("%s sum of step %u of rank %u, group %u, part %u is wrong", whose,
                         (uint32_t)(s->begin + i / units_in(s)), s->rank, s->group, s->part);
    return true;
}

/* The sums that the library computes on the host, which are not split by units and are of the memory's type. */
static bool check_host(const summed *s, uint64_t *sums) {
    const rank_world *rank = &s->w->engines[REMOTE].ranks[s->rank];
    const table_world *table = &s->w->tables[s->group].side[REMOTE];
    kvf_memory regions[MAX_REGIONS];
    if (s->by_unit || s->own != s->type)
        return true;
    for (uint32_t i = 0; i < rank->region_count; i++)
        regions[i] = (kvf_memory){
            .struct_size = sizeof *regions, .address = s->m->regions[i], .bytes = rank->region_bytes[i]};
    const kvf_block_table blocks = {table->ids, table->count, table->first_block};
    kvf_status status = kvf_checksum_steps(s->shard, regions, s->group_number, s->part_number, s->layers,
                                           s->units, &blocks, s->begin, s->end, sums);
    if (status)
        return wrong("kvf_checksum_steps() gives %s: %s", kvf_status_name(status), kvf_error_detail());
    note(KIND_SUM_HOST);
    return compare(s, sums, "the host's");
}

/* The controls: a changed byte, and a kernel with a wrong stride, must give other sums. */
static bool check_controls(const summed *s, uint64_t *sums, rng *random) {
    const uint32_t bytes = s->some->bytes;
    unsigned char *cell = s->m->regions[s->some->at.region] + s->some->at.offset;
    if (s->own == s->type && rng_chance(random, 30)) {
        unsigned char *changed = cell + rng_below(random, bytes);
        *changed = (unsigned char)(*changed ^ 1u << rng_below(random, 8));
        (void)sum_by_kernel(s, false, 1, sums);
        const bool noticed = !same_sums(s, sums);
        cell_content(s->some, cell);
        note(KIND_SUM_CHANGED);
        if (!noticed)
            return wrong("a byte of rank %u, group %u, part %u changes, and no sum", s->rank, s->group,
                         s->part);
    }
    if (s->units.end - s->units.begin > 1 && cell_bytes_of(part_of(s)) >= TELLING_BYTES &&
        s->own == s->type && rng_chance(random, 30)) {
        (void)sum_by_kernel(s, true, 1, sums);
        note(KIND_SUM_SPOILED);
        if (same_sums(s, sums))
            return wrong("a kernel that takes one unit for all gives the sums of group %u", s->group);
    }
    return true;
}

/* Devices convert only elements that lie at multiples of their size. */
static bool is_refused(const summed *s, kvf_status status) {
    return status == KVF_E_UNSUPPORTED && s->own != s->type;
}

static bool check_area(summed *s, rng *random) {
    uint64_t *sums = arena_take(sum_count(s) + 1u, sizeof *sums);
    s->expected = arena_take(sum_count(s) + 1u, sizeof *sums);
    memset(s->expected, 0, sum_count(s) * sizeof *sums);
    (void)visit_cells(s->w, REMOTE, s->rank, s->group, s->begin, s->end, add_cell, s);
    const kvf_status status = sum_by_kernel(s, false, rng_between(random, 1, 3), sums);
    if (is_refused(s, status)) {
        note(KIND_SUM_MISALIGNED);
        return true;
    }
    if (status)
        return wrong("cells of rank %u, group %u cannot be hashed by a device: %s", s->rank, s->group,
                     kvf_error_detail());
    if (!compare(s, sums, "the kernel's") || !check_host(s, sums))
        return false;
    if (!s->some)
        return true;
    note(KIND_SUM);
    note_if(KIND_SUM_CONVERTED, s->own != s->type);
    note_if(KIND_SUM_SPLIT, s->by_unit);
    return check_controls(s, sums, random);
}

/* ---- choosing areas --------------------------------------------------------------------------- */

static kvf_range some_of(uint32_t begin, uint32_t end, rng *random) {
    const uint32_t from = begin + rng_below(random, end - begin);
    return (kvf_range){from, rng_between(random, from + 1, end)};
}

static bool is_float(uint32_t type) {
    return type >= KVF_DTYPE_F32 && type <= KVF_DTYPE_F8_E5M2;
}

static bool check_group(const world *w, uint32_t rank, const kvf_shard *shard, const memory *m,
                        uint32_t number, rng *random) {
    static const kvf_dtype types[] = {KVF_DTYPE_F32, KVF_DTYPE_F16, KVF_DTYPE_BF16, KVF_DTYPE_F8_E4M3,
                                      KVF_DTYPE_F8_E5M2};
    const model_world *model = &w->models[REMOTE];
    const uint32_t group = model->group_order[number];
    const group_tables *tables = &w->tables[group];
    const uint32_t part_number = rng_below(random, model->groups[group].part_count);
    const uint32_t part = model->part_order[group][part_number];
    const rank_group *held = &w->engines[REMOTE].ranks[rank].groups[group];
    const part_recipe *of = &model->groups[group].parts[part];
    if (layers_of(held) == 0 || units_of(&held->parts[part]) == 0 || tables->first >= tables->end)
        return true;
    const kvf_range steps = some_of(tables->first, tables->end, random);
    summed s = {.w = w,
                .shard = shard,
                .m = m,
                .rank = rank,
                .group = group,
                .part = part,
                .group_number = number,
                .part_number = part_number,
                .layers = some_of(held->layers_begin, held->layers_end, random),
                .units = some_of(held->parts[part].units_begin, held->parts[part].units_end, random),
                .begin = steps.begin,
                .end = steps.end,
                .own = (kvf_dtype)of->dtype,
                .type = (kvf_dtype)of->dtype,
                .by_unit = rng_chance(random, 40)};
    if (is_float(of->dtype) && rng_chance(random, 40))
        s.type = types[rng_below(random, sizeof types / sizeof *types)];
    return check_area(&s, random);
}

bool check_sums(const world *w, uint32_t rank, const kvf_shard *shard, const memory *m) {
    rng random = {mix64(w->recipe->ids_seed + 2000 + rank)};
    for (uint32_t i = 0; i < w->models[REMOTE].group_count; i++)
        if (!check_group(w, rank, shard, m, i, &random))
            return false;
    return true;
}
