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

/* How often something repeats along each axis but that of blocks. */
typedef struct steps {
    uint64_t rows, units, pieces;
} steps;

/* One placement, with the range of bytes from its first cell to its last; or a part of it, see outside_of_blocks(). */
typedef struct extent {
    const kvf_placement *placement;
    const kvf_part_desc *part;
    uint32_t layer;
    steps inside;    /* of each block */
    uint64_t period; /* its block stride; 0 if there is only one block */
    uint64_t begin, end;
} extent;

typedef struct interval {
    uint64_t begin, end;
    const extent *owner;
} interval;

static kvf_status check_alone(const extent *e, uint64_t blocks) {
    axis axes[AXES] = {{blocks, e->placement->block_stride},
                       {e->inside.rows, e->placement->row_stride},
                       {e->inside.units, e->placement->unit_stride},
                       {e->inside.pieces, e->placement->piece_stride}};
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
    steps repeated;
} pattern;

/* An axis whose steps touch, inner or outer, only makes the interval longer. The interval stays inside one block
 * stride: check_alone() has made sure that a step between blocks clears everything inside a block, and that a longer
 * step clears all blocks, so that its steps do not touch. */
static pattern join_cells(const extent *e) {
    pattern joined = {kvf_piece_bytes(e->part, e->placement), e->inside};
    for (int turn = 0; turn < AXES - 1; turn++) {
        if (e->placement->piece_stride == joined.bytes) {
            joined.bytes *= joined.repeated.pieces;
            joined.repeated.pieces = 1;
        }
        if (e->placement->unit_stride == joined.bytes) {
            joined.bytes *= joined.repeated.units;
            joined.repeated.units = 1;
        }
        if (e->placement->row_stride == joined.bytes) {
            joined.bytes *= joined.repeated.rows;
            joined.repeated.rows = 1;
        }
    }
    return joined;
}

/* The distance from a placement's offset to its i-th piece, of as many as `repeated` says. */
static uint64_t step_offset(const kvf_placement *placement, const steps *repeated, uint64_t i) {
    const uint64_t cell = i / repeated->pieces;
    return cell / repeated->units * placement->row_stride + cell % repeated->units * placement->unit_stride +
           i % repeated->pieces * placement->piece_stride;
}

/* Counts the pieces; false: there are more than `most`. */
static bool count_steps(const steps *repeated, uint64_t most, uint64_t *out) {
    return kvf_mul(repeated->rows, repeated->units, out) && kvf_mul(*out, repeated->pieces, out) &&
           *out <= most;
}

/* The intervals of block 0 of one placement, modulo the block stride. */
static size_t add_intervals(const extent *e, uint64_t period, interval *out) {
    const pattern joined = join_cells(e);
    const uint64_t count = joined.repeated.rows * joined.repeated.units * joined.repeated.pieces;
    size_t n = 0;
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t begin = (e->begin + step_offset(e->placement, &joined.repeated, i)) % period,
                       end = begin + joined.bytes;
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
        if (!count_steps(&joined.repeated, most, &intervals))
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

/* The steps of axes that lie outside of blocks, as when each head keeps all its blocks together. check_alone() has made
 * sure that one such step clears all blocks, so that the cells after each step repeat with the blocks independently. */
static steps outside_of_blocks(const extent *e, uint64_t blocks) {
    const kvf_placement *placement = e->placement;
    const uint64_t block = blocks > 1 ? placement->block_stride : UINT64_MAX;
    return (steps){.rows = placement->row_stride > block ? e->inside.rows : 1,
                   .units = placement->unit_stride > block ? e->inside.units : 1,
                   .pieces = placement->piece_stride > block ? e->inside.pieces : 1};
}

/* Splits a whole extent: adds one extent for each step of its axes outside of blocks. */
static size_t add_extents(const extent *whole, uint64_t blocks, extent *out) {
    const kvf_placement *placement = whole->placement;
    const steps outside = outside_of_blocks(whole, blocks),
                inside = {whole->inside.rows / outside.rows, whole->inside.units / outside.units,
                          whole->inside.pieces / outside.pieces};
    const uint64_t count = outside.rows * outside.units * outside.pieces;
    const uint64_t bytes =
        (blocks - 1) * placement->block_stride + (inside.rows - 1) * placement->row_stride +
        (inside.units - 1) * placement->unit_stride + (inside.pieces - 1) * placement->piece_stride +
        kvf_piece_bytes(whole->part, placement);
    for (uint64_t i = 0; i < count; i++) {
        out[i] = *whole;
        out[i].inside = inside;
        out[i].begin = placement->offset + step_offset(placement, &outside, i);
        out[i].end = out[i].begin + bytes;
    }
    return count;
}

/* The whole extent of a group's i-th placement, without its range. False: it has no cells. */
static bool extent_of(const kvf_shard *shard, uint32_t group, size_t i, extent *out) {
    const kvf_group_desc *desc = kvf_model_group(shard->model, group);
    const kvf_held_group *held = &shard->groups[group];
    const uint32_t part = (uint32_t)(i % desc->part_count);
    const kvf_placement *placed = &held->placements[i];
    const uint64_t units = held->parts[part].units.end - held->parts[part].units.begin;
    *out =
        (extent){.placement = placed,
                 .part = &desc->parts[part],
                 .layer = desc->layers[shard->group_layers[group].begin + i / desc->part_count],
                 .inside = {kvf_kernel_rows(held, &desc->parts[part]), units, placed->pieces},
                 .period = held->block_count * held->kernel_blocks_per_block > 1 ? placed->block_stride : 0};
    return units > 0;
}

/* Checks each placement alone. `more` receives how many extents there are beyond one for each. */
static kvf_status check_each(const kvf_shard *shard, uint32_t group, size_t placements, uint64_t blocks,
                             uint64_t most, uint64_t *more) {
    *more = 0;
    for (size_t i = 0; i < placements; i++) {
        extent e;
        if (!extent_of(shard, group, i, &e))
            continue;
        kvf_status status = check_alone(&e, blocks);
        if (status)
            return status;
        const steps outside = outside_of_blocks(&e, blocks);
        uint64_t count;
        if (!count_steps(&outside, most, &count) || count - 1 > most - *more)
            return kvf_fail(KVF_E_RANGE,
                            "layer %u part %s and others: more than %llu of their cells' places are "
                            "outside of blocks",
                            e.layer, e.part->name, (unsigned long long)most);
        *more += count - 1;
    }
    return KVF_OK;
}

kvf_status kvf_shard_check_overlap(const kvf_shard *shard, uint32_t group, uint64_t *left) {
    const kvf_held_group *held = &shard->groups[group];
    const kvf_range layers = shard->group_layers[group];
    const uint64_t blocks = held->block_count * held->kernel_blocks_per_block;
    const size_t placements =
        (size_t)(layers.end - layers.begin) * kvf_model_group(shard->model, group)->part_count;
    uint64_t more;
    kvf_status status = check_each(shard, group, placements, blocks, *left, &more);
    if (status)
        return status;
    *left -= more;
    extent *extents = kvf_alloc(placements + more, sizeof *extents);
    if (!extents)
        return kvf_nomem("a check of placements");
    size_t count = 0;
    for (size_t i = 0; i < placements; i++) {
        extent e;
        if (extent_of(shard, group, i, &e))
            count += add_extents(&e, blocks, extents + count);
    }
    if (count)
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
