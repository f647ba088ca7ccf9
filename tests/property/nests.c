#include "nests.h"

#include "coverage.h"
#include "cuda/device_box.h"
#include "device_kernels.h"
#include "transport/cuda/nest_pages.h"

enum { MOST_NESTS = 64, MOST_BOXES = 4, TELLING_BYTES = 8 };

/* Nests of one shape and two regions, as add_group() of transport/cuda/cuda_copy.c. */
static bool copy_group(const kvf_nest_group *group, const kvf_nest_side *from, const kvf_nest_side *to,
                       uint32_t blocks, bool *spoiled) {
    uint32_t ids[2 * MOST_NESTS], count = 0, tiles = 0;
    kvf_cuda_box boxes[MOST_BOXES];
    kvf_nest_ids(group, from, to, ids, ids + group->count);
    const kvf_box from_pages = kvf_nest_pages(group, from, ids),
                  to_pages = kvf_nest_pages(group, to, ids + group->count);
    const uint64_t table = (uint64_t)(uintptr_t)ids;
    const kvf_device_side sides[] = {{.pages = &from_pages, .table = table, .table_on_host = ids},
                                     {.pages = &to_pages, .table = table, .table_on_host = ids}};
    const kvf_status status = kvf_device_boxes(&sides[0], &sides[1], from_pages.rows, from_pages.units,
                                               group->shape->bytes, boxes, MOST_BOXES, &count, &tiles);
    if (status)
        return wrong("nests cannot be described to a device: %s", kvf_error_detail());
    if (spoiled && !*spoiled && group->shape->inner_count > 1 && group->shape->bytes >= TELLING_BYTES) {
        boxes[0].from.unit_stride = 0;
        *spoiled = true;
    }
    run_move_kernel(boxes, count, tiles, false, blocks);
    note(KIND_NEST);
    note_if(KIND_NEST_MANY, group->count > 1);
    note_if(KIND_NEST_LOOPS, group->shape->outer_count > 1 && group->shape->inner_count > 1);
    return true;
}

bool emulate_nests(const kvf_request *request, uint32_t source, const memory *from, const memory *to,
                   rng *random, bool *spoiled) {
    kvf_run nests[MOST_NESTS];
    kvf_run_cursor cursor;
    kvf_run_shape shape;
    if (spoiled)
        *spoiled = false;
    kvf_run_cursor_start(&cursor, request, source);
    for (;;) {
        const size_t count =
            kvf_run_cursor_next_nests(&cursor, nests, rng_between(random, 1, MOST_NESTS), &shape);
        if (count == 0)
            return true;
        for (size_t at = 0; at < count;) {
            kvf_nest_side remote = {.memory = (uint64_t)(uintptr_t)from->regions[nests[at].remote_region],
                                    .outer = shape.outer_remote,
                                    .inner = shape.inner_remote},
                          local = {.memory = (uint64_t)(uintptr_t)to->regions[nests[at].local_region],
                                   .outer = shape.outer_local,
                                   .inner = shape.inner_local};
            const kvf_nest_group group = kvf_nest_group_next(nests + at, count - at, &shape, &remote, &local);
            if (!copy_group(&group, &remote, &local, rng_between(random, 1, 3), spoiled))
                return false;
            at += group.count;
        }
    }
}
