#include "transport/cuda/nest_pages.h"

#define COARSEST 4096u /* the most bytes by which an id counts */

/* The largest power of two, up to COARSEST, that divides all offsets whose bits are in `ored`. */
static uint64_t id_bytes_of(uint64_t ored) {
    ored |= COARSEST;
    return ored & (0 - ored);
}

static bool in_same_regions(const kvf_run *a, const kvf_run *b) {
    return a->local_region == b->local_region && a->remote_region == b->remote_region;
}

kvf_nest_group kvf_nest_group_next(const kvf_run *nests, uint64_t count, const kvf_run_shape *shape,
                                   kvf_nest_side *from, kvf_nest_side *to) {
    uint64_t from_ored = 0, to_ored = 0;
    uint64_t taken = 0;
    for (; taken < count && in_same_regions(nests, &nests[taken]); taken++) {
        const uint64_t from_all = from_ored | nests[taken].remote_offset,
                       to_all = to_ored | nests[taken].local_offset;
        if (from_all / id_bytes_of(from_all) > UINT32_MAX || to_all / id_bytes_of(to_all) > UINT32_MAX)
            break;
        from_ored = from_all;
        to_ored = to_all;
    }
    if (taken <= 1) {
        taken = 1;
        from->memory += nests->remote_offset;
        to->memory += nests->local_offset;
    }
    from->id_bytes = id_bytes_of(from_ored);
    to->id_bytes = id_bytes_of(to_ored);
    return (kvf_nest_group){nests, shape, taken};
}

/* A single nest has an id of 0, so any place can be told. */
void kvf_nest_ids(const kvf_nest_group *group, const kvf_nest_side *from, const kvf_nest_side *to,
                  uint32_t *from_ids, uint32_t *to_ids) {
    const uint32_t from_shift = (uint32_t)__builtin_ctzll(from->id_bytes),
                   to_shift = (uint32_t)__builtin_ctzll(to->id_bytes);
    for (uint64_t i = 0; i < group->count; i++) {
        from_ids[i] = group->count > 1 ? (uint32_t)(group->nests[i].remote_offset >> from_shift) : 0;
        to_ids[i] = group->count > 1 ? (uint32_t)(group->nests[i].local_offset >> to_shift) : 0;
    }
}

kvf_box kvf_nest_pages(const kvf_nest_group *group, const kvf_nest_side *side, const uint32_t *ids) {
    const kvf_run_shape *shape = group->shape;
    return (kvf_box){.memory = (unsigned char *)(uintptr_t)side->memory, /* never dereferenced here */
                     .block_stride = side->id_bytes,
                     .row_stride = shape->outer_count > 1 ? side->outer : side->id_bytes,
                     .unit_stride = shape->inner_count > 1 ? side->inner : shape->bytes,
                     .blocks = ids,
                     .kernel_blocks = 1,
                     .block_rows = shape->outer_count,
                     .rows = group->count * shape->outer_count,
                     .units = shape->inner_count,
                     .pieces = 1,
                     .piece_bytes = shape->bytes};
}
