#include "agent/summing.h"

#include "base/clock.h"
#include "cuda/over.h"
#include "shard/shard.h"

#define PATIENCE_NS (30 * KVF_SECOND)

/*
 * The layers of an area are visited in order: those in memory of the host are hashed at once, and neighbouring ones on
 * one device become a job of its hasher.
 *
 *   layers   | 0 1 2 | 3 4 | 5 6 7 |
 *             device 0  host  device 1
 *             a job           a job
 */
struct kvf_summing {
    kvf_hasher *hashers[KVF_CUDA_DEVICES_MAX]; /* opened when first used, or before */
    kvf_area area;
    kvf_block_table table; /* the area's */
    uint32_t ids[KVF_HASHER_IDS];
    kvf_sum_places places;
    uint32_t next;       /* layer */
    kvf_hasher *runs;    /* NULL: none */
    kvf_range under_way; /* the layers of its job */
    uint64_t started_ns;
};

kvf_status kvf_summing_make(kvf_summing **summing) {
    if (!*summing)
        *summing = kvf_alloc0(1, sizeof **summing);
    return *summing ? KVF_OK : kvf_nomem("checksums");
}

kvf_status kvf_summing_open(kvf_summing *s, uint32_t device) {
    return s->hashers[device] ? KVF_OK : kvf_hasher_open(device, &s->hashers[device]);
}

bool kvf_summing_must_open(const kvf_summing *s, const kvf_area *area) {
    for (uint32_t layer = area->layers.begin; layer < area->layers.end; layer++) {
        const kvf_memory *memory = kvf_area_memory(area, layer);
        if (memory->kind == KVF_MEMORY_CUDA && !s->hashers[memory->device])
            return true;
    }
    return false;
}

static bool is_late(const kvf_summing *s) {
    return kvf_now(&kvf_monotonic) - s->started_ns > PATIENCE_NS;
}

static kvf_status late(void) {
    return kvf_fail(KVF_E_IO,
                    "the device has not finished checksums for %llu s: something on the device hangs",
                    (unsigned long long)(PATIENCE_NS / KVF_SECOND));
}

/* ---- one job ------------------------------------------------------------------------------------ */

/* How many sums the job has: those of neighbouring layers follow each other. */
static uint64_t sums_of(const kvf_summing *s, kvf_range layers) {
    return s->places.step ? (s->area.end - s->area.begin) * s->places.step
                          : (layers.end - layers.begin) * s->places.layer;
}

/* The cells of one layer from a position on, as boxes have them. */
static kvf_box pages_of(const kvf_area *a, uint32_t layer, uint64_t position, const uint32_t *ids) {
    const kvf_placement *placement = kvf_shard_placement(a->shard, a->group, layer, a->part);
    const uint64_t logical = (uint64_t)a->side.kernel_steps * a->blocks.kernel_blocks_per_block;
    return (kvf_box){.memory = (unsigned char *)(uintptr_t)kvf_area_first(a, layer),
                     .block_stride = placement->block_stride,
                     .row_stride = placement->row_stride,
                     .unit_stride = placement->unit_stride,
                     .piece_stride = placement->piece_stride,
                     .blocks = ids,
                     .kernel_blocks = a->blocks.kernel_blocks_per_block,
                     .block_rows = (uint64_t)a->side.kernel_steps * a->cell.rows_per_step,
                     .first_row = position % logical * a->cell.rows_per_step,
                     .units = a->units.end - a->units.begin,
                     .pieces = placement->pieces,
                     .piece_bytes = a->cell_bytes / placement->pieces};
}

static kvf_status add_layer(kvf_summing *s, kvf_hasher *hasher, uint32_t layer) {
    const kvf_area *a = &s->area;
    const uint64_t first = kvf_walk_position(&a->side, a->begin), last = kvf_walk_position(&a->side, a->end);
    const kvf_dtype own = kvf_model_group(a->shard->model, a->group)->parts[a->part].dtype;
    const kvf_box pages = pages_of(a, layer, first, s->ids);
    const kvf_cell_seeds seeds = kvf_area_seeds(a, layer);
    const uint64_t sum = (layer - s->under_way.begin) * s->places.layer - a->begin * s->places.step;
    const kvf_device_sums sums = {.address = sum * sizeof(uint64_t),
                                  .step_bytes = s->places.step * sizeof(uint64_t),
                                  .unit_bytes = s->places.unit * sizeof(uint64_t),
                                  .seed = seeds.first,
                                  .step_seed = seeds.step,
                                  .row_seed = seeds.row,
                                  .unit_seed = seeds.unit,
                                  .rows = a->cell.rows_per_step,
                                  .share = a->side.share,
                                  .position = first};
    return kvf_hasher_add(hasher, &pages, own, a->cell.dtype, &sums, (last - first) * a->cell.rows_per_step,
                          pages.units, own == a->cell.dtype ? a->cell_bytes : a->cell.cell_elements);
}

static kvf_status start_job(kvf_summing *s, uint32_t device) {
    const uint64_t sums = sums_of(s, s->under_way);
    if (sums > KVF_HASHER_SUMS)
        return kvf_fail(KVF_E_LIMIT, "checksum: %llu units of a layer; devices sum up to %u at once",
                        (unsigned long long)sums, KVF_HASHER_SUMS);
    kvf_status status = kvf_summing_open(s, device);
    kvf_hasher *hasher = s->hashers[device];
    if (status)
        return status;
    kvf_hasher_begin(hasher, s->ids, s->table.count, (uint32_t)sums);
    for (uint32_t layer = s->under_way.begin; layer < s->under_way.end && !status; layer++)
        status = add_layer(s, hasher, layer);
    if (!status)
        status = kvf_hasher_start(hasher);
    if (!status)
        s->runs = hasher;
    s->started_ns = kvf_now(&kvf_monotonic);
    return status;
}

/* Adds what a job has found. */
static void take_sums(const kvf_summing *s, const uint64_t *found) {
    uint64_t *sums = s->places.sums + (s->under_way.begin - s->area.layers.begin) * s->places.layer;
    for (uint64_t i = 0; i < sums_of(s, s->under_way); i++)
        sums[i] += found[i];
}

/* ---- an area ------------------------------------------------------------------------------------ */

static bool are_together(const kvf_memory *a, const kvf_memory *b) {
    return a->kind == b->kind && (a->kind == KVF_MEMORY_HOST || a->device == b->device);
}

/* The layers from the next one on that go into one job. */
static kvf_range layers_together(const kvf_summing *s) {
    const kvf_memory *memory = kvf_area_memory(&s->area, s->next);
    kvf_range layers = {s->next, s->next + 1};
    while (layers.end < s->area.layers.end && layers.end - layers.begin < KVF_HASHER_BOXES &&
           are_together(memory, kvf_area_memory(&s->area, layers.end)) &&
           sums_of(s, (kvf_range){layers.begin, layers.end + 1}) <= KVF_HASHER_SUMS)
        layers.end++;
    return layers;
}

/* Goes on until a device has something to do. */
static kvf_status advance(kvf_summing *s) {
    kvf_status status = KVF_OK;
    while (!status && !s->runs && s->next < s->area.layers.end) {
        const kvf_memory *memory = kvf_area_memory(&s->area, s->next);
        s->under_way = layers_together(s);
        s->next = s->under_way.end;
        status = memory->kind == KVF_MEMORY_HOST ? kvf_area_sum_on_host(&s->area, s->under_way, &s->places)
                                                 : start_job(s, memory->device);
    }
    return status ? status : s->runs ? KVF_IN_PROGRESS : KVF_OK;
}

/* Takes the entries of the table that the area's steps are in. */
static kvf_status take_table(kvf_summing *s, const kvf_area *a) {
    const uint64_t first = kvf_walk_position(&a->side, a->begin), last = kvf_walk_position(&a->side, a->end);
    const uint64_t logical = (uint64_t)a->side.kernel_steps * a->blocks.kernel_blocks_per_block;
    const uint64_t begin = first / logical, end = (last + logical - 1) / logical;
    s->table = (kvf_block_table){.ids = s->ids, .first_block = (uint32_t)begin};
    if (first == last)
        return KVF_OK;
    KVF_ASSERT(end - begin <= KVF_HASHER_IDS);
    s->table.count = (uint32_t)(end - begin);
    memcpy(s->ids, a->table->ids + (begin - a->table->first_block), s->table.count * sizeof *s->ids);
    return KVF_OK;
}

kvf_status kvf_summing_start(kvf_summing *s, const kvf_area *area, const kvf_sum_places *places) {
    const uint64_t *sums;
    KVF_ASSERT(area->end - area->begin <= KVF_SUMMING_STEPS);
    if (s->runs && kvf_hasher_poll(s->runs, &sums) == KVF_IN_PROGRESS)
        return is_late(s) ? late() : KVF_E_AGAIN;
    s->runs = NULL;
    s->area = *area;
    s->places = *places;
    s->next = area->layers.begin;
    kvf_status status = take_table(s, area);
    s->area.table = s->area.blocks.table = &s->table;
    return status ? status : advance(s);
}

kvf_status kvf_summing_poll(kvf_summing *s) {
    const uint64_t *found;
    kvf_status status = kvf_hasher_poll(s->runs, &found);
    if (status == KVF_IN_PROGRESS)
        return is_late(s) ? late() : status;
    s->runs = NULL;
    if (status)
        return status;
    take_sums(s, found);
    return advance(s);
}

bool kvf_summing_is_busy(kvf_summing *s) {
    const uint64_t *sums;
    return s && s->runs && kvf_hasher_poll(s->runs, &sums) == KVF_IN_PROGRESS;
}

static bool is_idle(void *context) {
    return !kvf_summing_is_busy(context);
}

/* If the device hangs, it still reads the memory, so its hasher stays. */
void kvf_summing_free(kvf_summing *s) {
    if (!s)
        return;
    const uint64_t waited = kvf_now(&kvf_monotonic) - s->started_ns;
    (void)kvf_cuda_await(is_idle, s, PATIENCE_NS - kvf_min_u64(waited, PATIENCE_NS));
    for (uint32_t i = 0; i < KVF_CUDA_DEVICES_MAX; i++)
        (void)kvf_hasher_close(s->hashers[i]);
    kvf_free(s);
}

/* ---- at once ------------------------------------------------------------------------------------ */

static kvf_status wait_for(kvf_summing *s, const kvf_area *area, const kvf_sum_places *places) {
    kvf_status status = kvf_summing_start(s, area, places);
    while (status == KVF_IN_PROGRESS) {
        kvf_cuda_pause();
        status = kvf_summing_poll(s);
    }
    return status;
}

kvf_status kvf_summing_wait(const kvf_area *area, const kvf_sum_places *places) {
    kvf_summing *s = NULL;
    if (!kvf_area_uses_devices(area))
        return kvf_area_sum_on_host(area, area->layers, places);
    kvf_status status = kvf_summing_make(&s);
    kvf_area part = *area;
    while (!status && part.begin < area->end) {
        part.end = kvf_min_u64(area->end, part.begin + KVF_SUMMING_STEPS);
        const kvf_sum_places there = {places->sums + (part.begin - area->begin) * places->step, places->step,
                                      places->layer, places->unit};
        status = wait_for(s, &part, &there);
        part.begin = part.end;
    }
    kvf_summing_free(s);
    return status;
}
