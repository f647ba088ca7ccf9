/*
 * Checks of shapes and regions, for the functions on received blocks and on copied blocks.
 */
#ifndef KVF_CONNECTOR_POSTPROCESS_H
#define KVF_CONNECTOR_POSTPROCESS_H

#include <kvferry/connector/postprocess.h>

#include "kernel/permute.h"

/**
 * Describes a change of form. Sizes are checked, so that later arithmetic, which stays within a page, cannot overflow.
 *
 * @return KVF_OK; KVF_E_INVALID for a zero or an unknown order; KVF_E_NOT_EXPRESSIBLE when neither number of
 *         tokens divides the other; KVF_E_OVERFLOW
 */
kvf_status kvf_gather_of(const kvf_received_shape *shape, kvf_gather *out);

/**
 * Checks a region: every part of every block lies within its bytes, none shares a byte with another, and memory of a
 * device is what it says.
 * `name` ("region", "source") and `index` are for the detail.
 */
kvf_status kvf_check_region(const kvf_block_region *region, const char *name, size_t index);

/** Checks that a region has these blocks. */
kvf_status kvf_check_block_ids(const kvf_block_region *region, const uint32_t *ids, size_t count,
                               const char *name);

static inline uint64_t kvf_part_count(const kvf_block_region *region) {
    return region->part_count ? region->part_count : 1;
}

/** Where a part of a block begins. Cannot overflow once the region and the block were checked. */
static inline uint64_t kvf_part_offset(const kvf_block_region *region, uint32_t block, uint64_t part) {
    return block * region->block_stride_bytes + part * region->part_stride_bytes;
}

#endif
