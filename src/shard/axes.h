/*
 * How cells lie in memory, as axes, derived from placements alone and not from the name of a layout.
 */
#ifndef KVF_SHARD_AXES_H
#define KVF_SHARD_AXES_H

#include "shard/shard.h"

#define KVF_AXES_APART_MAX 2u

/** The axes of some layers and parts of one group, without axes of a single step. */
typedef struct kvf_axes {
    /** Axes inside one region, outermost first; those of the cell are 'D' */
    kvf_region_axis nested[KVF_REGION_AXES_MAX];
    uint32_t nested_count;
    char apart[KVF_AXES_APART_MAX]; /**< axes whose steps have regions of their own */
    uint32_t apart_count;
} kvf_axes;

/**
 * Derives the axes from the placements.
 *
 * @param layers  held layers, as indices into the group's
 * @param parts   parts whose cells have the same type and size, if they lie in one region
 * @return false when the layers or parts do not lie at even distances, or one lies before the first: no axes describe
 *         them
 */
bool kvf_axes_read(const kvf_shard *shard, uint32_t group, kvf_range layers, kvf_range parts, kvf_axes *out);

/** Whether `here` is n times as far from `first` as `second` is, and all three arrange their cells alike. */
bool kvf_placements_even(const kvf_placement *first, const kvf_placement *second, const kvf_placement *here,
                         uint64_t n);

/** Whether two parts have cells of the same type and size, and equally many rows. */
bool kvf_same_cells(const kvf_part_desc *a, const kvf_part_desc *b);

#endif
