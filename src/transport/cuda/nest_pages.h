/*
 * Nests of runs (request/request.h) as pages of the kernels' boxes: each nest is a block, which a table of ids names; its
 * outer loop are rows and its inner loop units. Only arithmetic: no driver, no device.
 */
#ifndef KVF_TRANSPORT_CUDA_NEST_PAGES_H
#define KVF_TRANSPORT_CUDA_NEST_PAGES_H

#include "kernel/box.h"
#include "request/request.h"

/** Nests of the same two regions; `count` of them. */
typedef struct kvf_nest_group {
    const kvf_run *nests;
    const kvf_run_shape *shape;
    uint64_t count;
} kvf_nest_group;

/** One side of a group: where its region begins, and the bytes by which ids count. */
typedef struct kvf_nest_side {
    uint64_t memory, id_bytes;
    uint64_t outer, inner; /**< the shape's steps */
} kvf_nest_side;

/**
 * Takes the nests at the front that ids can name together: at least one.
 *
 * @param count  of nests, at least one
 * @param from   the remote side, with the region's beginning and the shape's steps; receives the rest. If only one nest is
 *               taken, its memory becomes that of the nest, whose id is 0
 * @param to     the same for the local side
 */
kvf_nest_group kvf_nest_group_next(const kvf_run *nests, uint64_t count, const kvf_run_shape *shape,
                                   kvf_nest_side *from, kvf_nest_side *to);

/** Writes the ids of a group, `count` of each side. */
void kvf_nest_ids(const kvf_nest_group *group, const kvf_nest_side *from, const kvf_nest_side *to,
                  uint32_t *from_ids, uint32_t *to_ids);

/** The pages of one side; a unit's cell has the bytes of a run of the shape. */
kvf_box kvf_nest_pages(const kvf_nest_group *group, const kvf_nest_side *side, const uint32_t *ids);

#endif
