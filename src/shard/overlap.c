/*
 * Checks that no two cells of a group share a byte.
 *
 * First each placement is checked alone: with axes sorted by stride, every axis must step over all that lies inside it.
 * Then placements whose address ranges meet are checked against each other: they must have the same block stride, and
 * their intervals inside one period must be disjoint.
 */
#include <stdlib.h>

#include "shard/shard.h"

/* Blocks, rows, units, and the pieces of a cell. */
#define AXES 4

typedef struct axis {
    uint64_t count;
    uint64_t stride;
} axis;

/* One placement, and the range of bytes from its first cell to its last. */
typedef struct extent {
    const kvf_placement *placement;
    const kvf_part_desc *part;
    uint32_t layer;
    uint64_t rows, units;
    uint64_t period; /* its block stride; 0 if there is only one block */
    uint64_t begin, end;
} extent;

typedef struct interval {
    uint64_t begin, end;
    const extent *owner;
} interval;

static kvf_status check_alone(const extent *e, uint64_t blocks) {
    axis axes[AXES] = {{blocks, e->placement->block_stride},
                       {e->rows, e->placement->row_stride},
                       {e->units, e->placement->unit_stride},
                       {e->placement->pieces, e->placement->piece_stride}};
    for (int i = 0; i < AXES - 1; i++) {
        for (int j = 0; j < AXES - 1 - i; j++) {
            if (axes[j].stride > axes[j + 1].stride) {
                axis swap = axes[j];
                axes[j] = axes[j + 1];
                axes[j + 1] = swap;
            }
        }
    }
    uint64_t inside = kvf_piece_bytes(e->part, e->placement);
    for (int i = 0; i < AXES; i++) {
        if (axes[i].count < 2)
            continue;
        if (axes[i].stride < inside)
            return kvf_fail(KVF_E_OVERLAP,
                            "part %s: strides %llu (block), %llu (row), %llu (unit), %llu (piece) overlap: a "
                            "step of %llu "
                            "bytes does not clear the %llu inside it",
                            e->part->name, (unsigned long long)e->placement->block_stride,
                            (unsigned long long)e->placement->row_stride,
                            (unsigned long long)e->placement->unit_stride,
                            (unsigned long long)e->placement->piece_stride,
                            (unsigned long long)axes[i].stride, (unsigned long long)inside);
        inside += (axes[i].count - 1) * axes[i].stride;
    }
    return KVF_OK;
}

static int by_region_and_begin(const void *a, const void *b) {
    const extent *x = a, *y = b;
    if (x->placement->region != y->placement->region)
        return x->placement->region < y->placement->region ? -1 : 1;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

static int by_begin(const void *a, const void *b) {
    const interval *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* The cells of one block of a placement, as intervals in which cells that touch are joined. */
typedef struct pattern {
    uint64_t bytes; /* of one interval */
    uint64_t rows, units, pieces;
} pattern;

/* An axis whose steps touch, inner or outer, only makes the interval longer. The interval stays inside one block
 * stride: check_alone() has made sure that a step between blocks clears everything inside a block, and that a longer
 * step clears all blocks, so that its steps do not touch. */
static pattern join_cells(const extent *e) {
    pattern joined = {kvf_piece_bytes(e->part, e->placement), e->rows, e->units, e->placement->pieces};
    for (int turn = 0; turn < AXES - 1; turn++) {
        if (e->placement->piece_stride == joined.bytes) {
            joined.bytes *= joined.pieces;
            joined.pieces = 1;
        }
        if (e->placement->unit_stride == joined.bytes) {
            joined.bytes *= joined.units;
            joined.units = 1;
        }
        if (e->placement->row_stride == joined.bytes) {
            joined.bytes *= joined.rows;
            joined.rows = 1;
        }
    }
    return joined;
}

/* The intervals of block 0 of one placement, modulo the block stride. */
static size_t add_intervals(const extent *e, uint64_t period, interval *out) {
    pattern joined = join_cells(e);
    size_t n = 0;
    uint64_t cells = joined.rows * joined.units;
    for (uint64_t i = 0; i < cells * joined.pieces; i++) {
        uint64_t cell = i / joined.pieces;
        uint64_t begin = e->placement->offset + cell / joined.units * e->placement->row_stride +
                         cell % joined.units * e->placement->unit_stride +
                         i % joined.pieces * e->placement->piece_stride;
        begin %= period;
        uint64_t end = begin + joined.bytes;
        out[n++] = (interval){begin, end < period ? end : period, e};
        if (end > period)
            out[n++] = (interval){0, end - period, e};
    }
    return n;
}

/* `left` is how many intervals may still be checked. */
static kvf_status check_together(const extent *extents, size_t count, uint64_t *left) {
    const uint64_t most = *left;
    uint64_t period = extents[0].period;
    uint64_t room = 0;
    for (size_t i = 0; i < count; i++) {
        if (extents[i].period != period)
            return kvf_fail(
                KVF_E_OVERLAP,
                "layer %u part %s and layer %u part %s: their bytes are interleaved, but with different "
                "block strides %llu and %llu",
                extents[0].layer, extents[0].part->name, extents[i].layer, extents[i].part->name,
                (unsigned long long)period, (unsigned long long)extents[i].period);
        pattern joined = join_cells(&extents[i]);
        /* Each interval may be split in two at the end of the block stride. */
        uint64_t intervals;
        if (!kvf_mul(joined.rows, joined.units, &intervals) ||
            !kvf_mul(intervals, joined.pieces, &intervals) || intervals > most)
            room = UINT64_MAX;
        else
            room += 2 * intervals;
        if (room > 2 * most)
            return kvf_fail(
                KVF_E_RANGE,
                "layer %u part %s and others: their bytes are interleaved in more than %llu pieces "
                "a block",
                extents[i].layer, extents[i].part->name, (unsigned long long)most);
    }
    *left -= room / 2;
    if (period == 0)
        period = UINT64_MAX; /* a single block */
    interval *intervals = kvf_alloc(room, sizeof *intervals);
    if (!intervals)
        return kvf_nomem("a check of placements");
    size_t n = 0;
    for (size_t i = 0; i < count; i++)
        n += add_intervals(&extents[i], period, intervals + n);
    qsort(intervals, n, sizeof *intervals, by_begin);
    kvf_status status = KVF_OK;
    for (size_t i = 1; i < n && !status; i++) {
        const extent *a = intervals[i - 1].owner, *b = intervals[i].owner;
        if (intervals[i].begin < intervals[i - 1].end)
            status = kvf_fail(KVF_E_OVERLAP,
                              "layer %u part %s and layer %u part %s share byte %llu of each block", a->layer,
                              a->part->name, b->layer, b->part->name, (unsigned long long)intervals[i].begin);
    }
    kvf_free(intervals);
    return status;
}

kvf_status kvf_shard_check_overlap(const kvf_shard *shard, uint32_t group, uint64_t *left) {
    const kvf_group_desc *desc = kvf_model_group(shard->model, group);
    const kvf_group_shard_desc *held = &shard->groups[group];
    kvf_range layers = shard->group_layers[group];
    uint64_t blocks = held->block_count * held->kernel_blocks_per_block;
    size_t count = 0;
    extent *extents = kvf_alloc((size_t)(layers.end - layers.begin) * desc->part_count, sizeof *extents);
    if (!extents)
        return kvf_nomem("a check of placements");
    kvf_status status = KVF_OK;
    const kvf_placement *placement = held->placements;
    for (uint32_t layer = layers.begin; layer < layers.end; layer++) {
        for (uint32_t p = 0; p < desc->part_count && !status; p++, placement++) {
            uint64_t units = held->parts[p].units.end - held->parts[p].units.begin;
            if (units == 0)
                continue;
            extent *e = &extents[count++];
            *e = (extent){placement,
                          &desc->parts[p],
                          desc->layers[layer],
                          kvf_kernel_rows(held, &desc->parts[p]),
                          units,
                          blocks > 1 ? placement->block_stride : 0,
                          placement->offset,
                          0};
            e->end = e->begin + (blocks - 1) * placement->block_stride +
                     (e->rows - 1) * placement->row_stride + (units - 1) * placement->unit_stride +
                     (placement->pieces - 1) * placement->piece_stride + kvf_piece_bytes(e->part, placement);
            status = check_alone(e, blocks);
        }
    }
    if (!status && count)
        qsort(extents, count, sizeof *extents, by_region_and_begin);
    for (size_t i = 0; i < count && !status;) {
        uint64_t end = extents[i].end;
        size_t j = i + 1;
        for (; j < count && extents[j].placement->region == extents[i].placement->region &&
               extents[j].begin < end;
             j++)
            end = kvf_max_u64(end, extents[j].end);
        if (j - i > 1)
            status = check_together(extents + i, j - i, left);
        i = j;
    }
    kvf_free(extents);
    return status;
}
