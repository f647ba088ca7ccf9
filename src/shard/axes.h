/*
 * How cells lie in memory, as axes: read off placements, whoever laid the memory out and whatever it was called
 * there.
 */
#ifndef KVF_SHARD_AXES_H
#define KVF_SHARD_AXES_H

#include "shard/shard.h"

#define KVF_AXES_APART_MAX 2u

/** The axes of some layers and parts of one group, without those that have one step. */
typedef struct kvf_axes {
    kvf_region_axis
        nested[KVF_REGION_AXES_MAX]; /**< in one region, outermost first; the cell's own are 'D' */
    uint32_t nested_count;
    char apart[KVF_AXES_APART_MAX]; /**< with regions of their own */
    uint32_t apart_count;
} kvf_axes;

/**
 * Reads the axes off the placements.
 *
 * @param layers  held layers, as indices into the group's
 * @param parts   whose cells are alike, where they lie in one region
 * @return false when the layers or parts do not lie at even distances: no axes describe them
 */
bool kvf_axes_read(const kvf_shard *shard, uint32_t group, kvf_range layers, kvf_range parts, kvf_axes *out);

/** Whether `here` lies n times as far from `first` as `second` does, and has its cells as they have theirs. */
bool kvf_placements_even(const kvf_placement *first, const kvf_placement *second, const kvf_placement *here,
                         uint64_t n);

/** Whether cells of two parts have the same elements, and ranks as many of them. */
bool kvf_same_cells(const kvf_part_desc *a, const kvf_part_desc *b);

#endif
