#include "kernel/permute.h"

/* Shorter cells are gathered: looking up a place takes as long as moving 64 bytes. */
#define ROTATE_LEAST 64u

#define LINE 64u /* of the cache */

static uint64_t cells_of_page(const kvf_gather *gather) {
    return gather->block_bytes / gather->cell_bytes * gather->block_count;
}

static bool changes_nothing(const kvf_gather *gather) {
    return gather->cell_bytes == gather->block_bytes &&
           (gather->block_count == 1 || gather->block_from == gather->block_bytes);
}

static bool can_rotate(const kvf_gather *gather) {
    return cells_of_page(gather) < UINT32_MAX && gather->block_count <= KVF_PLACE_BLOCKS &&
           gather->block_bytes <= KVF_PLACE_BYTES;
}

kvf_permute_way kvf_permute_best_way(const kvf_gather *gather) {
    if (changes_nothing(gather))
        return KVF_PERMUTE_NOTHING;
    return gather->cell_bytes >= ROTATE_LEAST && can_rotate(gather) ? KVF_PERMUTE_ROTATE : KVF_PERMUTE_GATHER;
}

/* For each cell: its place, its source, and at most half a cycle length. */
#define ROTATE_CELL_BYTES (sizeof(kvf_place) + 2 * sizeof(uint32_t))

bool kvf_permute_memory_bytes(const kvf_gather *gather, kvf_permute_way way, uint64_t *out) {
    *out = 0;
    if (way == KVF_PERMUTE_ROTATE)
        return can_rotate(gather) &&
               kvf_mul_add(cells_of_page(gather), ROTATE_CELL_BYTES, KVF_HOLD_BYTES + LINE, out);
    if (way == KVF_PERMUTE_GATHER)
        return kvf_mul_add(gather->block_bytes, gather->block_count, KVF_PERMUTE_SLACK + LINE, out);
    return true;
}

/* Stores, for each cell of a page in the new order, the number of the cell that goes there. All distances are
 * whole cells, because the axes were joined from the inside. */
static void number_sources(const kvf_gather *gather, uint32_t *sources) {
    uint64_t cell = gather->cell_bytes, step = gather->from[2] / cell;
    for (uint64_t b = 0; b < gather->block_count; b++)
        for (uint64_t i = 0; i < gather->count[0]; i++)
            for (uint64_t j = 0; j < gather->count[1]; j++) {
                uint64_t from = (b * gather->block_from + i * gather->from[0] + j * gather->from[1]) / cell;
                for (uint64_t k = 0; k < gather->count[2]; k++, from += step)
                    *sources++ = (uint32_t)from;
            }
}

static void find_cycles(const kvf_gather *gather, uint32_t *sources, kvf_place *places, uint32_t *lengths,
                        kvf_rotation *out) {
    /* can_rotate() has checked that both fit */
    uint32_t cells = (uint32_t)cells_of_page(gather), per_block = cells / gather->block_count;
    number_sources(gather, sources);
    size_t used = 0, cycles = 0;
    for (uint32_t first = 0; first < cells; first++) {
        if (sources[first] == first)
            continue;
        size_t begin = used;
        for (uint32_t cell = first; sources[cell] != cell;) {
            uint32_t source = sources[cell];
            places[used++] = gather->block_count == 1 ? cell * gather->cell_bytes
                                                      : (kvf_place)(cell / per_block) << 40 |
                                                            cell % per_block * gather->cell_bytes;
            sources[cell] = cell; /* done */
            cell = source;
        }
        lengths[cycles++] = (uint32_t)(used - begin);
    }
    out->places = places;
    out->lengths = lengths;
    out->place_count = used;
    out->cycle_count = cycles;
    out->cell_bytes = gather->cell_bytes;
    out->block_bytes = gather->block_bytes;
    out->block_count = gather->block_count;
}

/* Rounds up to the beginning of a cache line: vectors across two lines cost twice. */
static unsigned char *at_line(unsigned char *memory) {
    return memory + (LINE - (uintptr_t)memory % LINE) % LINE;
}

void kvf_permute_prepare(const kvf_gather *gather, kvf_permute_way way, const kvf_permute_kernels *kernels,
                         void *memory, kvf_permutation *out) {
    *out = (kvf_permutation){.gather = *gather, .kernels = kernels, .way = way};
    if (way == KVF_PERMUTE_GATHER)
        out->aside = at_line(memory);
    if (way != KVF_PERMUTE_ROTATE)
        return;
    uint64_t cells = cells_of_page(gather);
    kvf_place *places = memory;
    uint32_t *sources = (uint32_t *)(places + cells);
    find_cycles(gather, sources, places, sources + cells, &out->rotation);
    out->rotation.hold = at_line((unsigned char *)(sources + 2 * cells));
}

void kvf_permute_page(const kvf_permutation *permutation, unsigned char *const *blocks,
                      unsigned char *const *next) {
    const kvf_gather *gather = &permutation->gather;
    if (permutation->way == KVF_PERMUTE_ROTATE)
        permutation->kernels->rotate(&permutation->rotation, blocks, next);
    if (permutation->way != KVF_PERMUTE_GATHER)
        return;
    const kvf_permute_kernels *kernels = permutation->kernels;
    unsigned char *aside = permutation->aside;
    if (kernels->put_aside && kernels->put_aside(gather, aside, blocks[0], next ? next[0] : blocks[0])) {
        kernels->bring_back(gather, blocks[0], aside);
        return;
    }
    for (uint32_t b = 0; b < gather->block_count; b++)
        kernels->copy_aside(aside + b * gather->block_bytes, blocks[b], gather->block_bytes,
                            next ? next[b] : blocks[b]);
    for (uint32_t b = 0; b < gather->block_count; b++)
        kernels->gather(gather, blocks[b], aside + b * gather->block_from);
}

/* ---- the plain loops ------------------------------------------------------------------------- */

static void plain_gather(const kvf_gather *gather, unsigned char *to, const unsigned char *from) {
    size_t bytes = gather->cell_bytes;
    for (uint64_t i = 0; i < gather->count[0]; i++)
        for (uint64_t j = 0; j < gather->count[1]; j++)
            for (uint64_t k = 0; k < gather->count[2]; k++, to += bytes)
                memcpy(to, from + i * gather->from[0] + j * gather->from[1] + k * gather->from[2], bytes);
}

static void plain_rotate(const kvf_rotation *rotation, unsigned char *const *blocks,
                         unsigned char *const *next) {
    (void)next;
    for (uint64_t at = 0; at < rotation->cell_bytes; at += KVF_HOLD_BYTES) {
        size_t bytes = kvf_min_u64(rotation->cell_bytes - at, KVF_HOLD_BYTES);
        const kvf_place *place = rotation->places;
        for (size_t cycle = 0; cycle < rotation->cycle_count; cycle++) {
            const kvf_place *last = place + rotation->lengths[cycle] - 1;
            memcpy(rotation->hold, kvf_at_place(blocks, *place) + at, bytes);
            for (; place < last; place++)
                memcpy(kvf_at_place(blocks, place[0]) + at, kvf_at_place(blocks, place[1]) + at, bytes);
            memcpy(kvf_at_place(blocks, *place++) + at, rotation->hold, bytes);
        }
    }
}

static void plain_copy_aside(unsigned char *aside, const unsigned char *block, size_t bytes,
                             const unsigned char *next) {
    (void)next;
    memcpy(aside, block, bytes);
}

const kvf_permute_kernels kvf_permute_plain = {
    .name = "plain", .gather = plain_gather, .rotate = plain_rotate, .copy_aside = plain_copy_aside};

/* ---- choosing the loops ---------------------------------------------------------------------- */

const kvf_permute_kernels *kvf_kernel_permute_set(uint32_t i) {
    const kvf_permute_kernels *sets[3] = {&kvf_permute_plain};
    uint32_t count = 1;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2"))
        sets[count++] = &kvf_permute_avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        sets[count++] = &kvf_permute_avx512;
#endif
    return i < count ? sets[i] : NULL;
}

/* The widest vectors are the fastest, except where their suits_gather() says no. */
const kvf_permute_kernels *kvf_permute_best_kernels(const kvf_gather *gather, kvf_permute_way way) {
    const kvf_permute_kernels *best = &kvf_permute_plain, *set;
    for (uint32_t i = 0; (set = kvf_kernel_permute_set(i)) != NULL; i++)
        if (way != KVF_PERMUTE_GATHER || !set->suits_gather || set->suits_gather(gather))
            best = set;
    return best;
}
