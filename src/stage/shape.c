#include "stage/shape.h"

#include "base/list.h"

#define KEPT 256u             /* shapes; a large deployment has a few for each pair of engines */
#define KEPT_LANES (1u << 18) /* of all shapes: some MiB, whatever peers ask for */

_Static_assert(sizeof(kvf_stream_item) == 13 * sizeof(uint32_t),
               "an item has no padding: it is compared as bytes");

static bool is_same(const kvf_selection *a, const kvf_selection *b) {
    return a->item_count == b->item_count &&
           (a->item_count == 0 || memcmp(a->items, b->items, a->item_count * sizeof *a->items) == 0);
}

static void forget(kvf_shapes *shapes, kvf_stage_shape *shape) {
    KVF_LIST_REMOVE(shapes->first, shape);
    shapes->count--;
    shapes->lanes -= shape->lanes;
    kvf_stream_map_free(shape->map);
    kvf_selection_free(shape->selection);
    kvf_free(shape);
}

/* Frees shapes without users, the least recently used first. */
static void make_room(kvf_shapes *shapes, uint64_t lanes) {
    while (shapes->count >= KEPT || shapes->lanes + lanes > KEPT_LANES) {
        kvf_stage_shape *oldest = NULL;
        for (kvf_stage_shape *shape = shapes->first; shape; shape = shape->following)
            if (shape->users == 0)
                oldest = shape;
        if (!oldest)
            return;
        forget(shapes, oldest);
    }
}

static uint64_t lanes_of(const kvf_selection *selection) {
    uint64_t lanes = 0;
    for (uint32_t i = 0; i < selection->item_count; i++)
        lanes += selection->items[i].layers.end - selection->items[i].layers.begin;
    return lanes;
}

static kvf_status make(kvf_shapes *shapes, kvf_selection *selection, kvf_stage_shape **out) {
    kvf_stage_shape *shape = kvf_alloc0(1, sizeof *shape);
    kvf_status status =
        shape ? kvf_stream_map_create(shapes->shard, selection, &shape->map) : kvf_nomem("a shape");
    if (status) {
        kvf_free(shape);
        kvf_selection_free(selection);
        return status;
    }
    shape->selection = selection;
    shape->lanes = lanes_of(selection);
    make_room(shapes, shape->lanes);
    shapes->lanes += shape->lanes;
    shapes->count++;
    *out = shape;
    return KVF_OK;
}

kvf_status kvf_shapes_use(kvf_shapes *shapes, kvf_selection *selection, kvf_stage_shape **out) {
    kvf_stage_shape *shape = shapes->first;
    while (shape && !is_same(shape->selection, selection))
        shape = shape->following;
    if (shape) {
        KVF_LIST_REMOVE(shapes->first, shape);
        kvf_selection_free(selection);
    } else {
        kvf_status status = make(shapes, selection, &shape);
        if (status)
            return status;
    }
    KVF_LIST_ADD(shapes->first, shape);
    shape->users++;
    *out = shape;
    return KVF_OK;
}

void kvf_shapes_leave(kvf_stage_shape *shape) {
    if (!shape)
        return;
    KVF_ASSERT(shape->users > 0);
    shape->users--;
}

void kvf_shapes_free(kvf_shapes *shapes) {
    while (shapes->first)
        forget(shapes, shapes->first);
}
