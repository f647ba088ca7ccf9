#include "stage/shape.h"

#include "base/list.h"

#define KEPT 256u /* shapes; a large deployment has a few for each pair of engines */

_Static_assert(sizeof(kvf_stream_item) == 13 * sizeof(uint32_t),
               "an item has no padding: it is compared as bytes");

static bool is_same(const kvf_selection *a, const kvf_selection *b) {
    return a->item_count == b->item_count &&
           (a->item_count == 0 || memcmp(a->items, b->items, a->item_count * sizeof *a->items) == 0);
}

static void forget(kvf_shapes *shapes, kvf_stage_shape *shape) {
    KVF_LIST_REMOVE(shapes->first, shape);
    shapes->count--;
    kvf_stream_map_free(shape->map);
    kvf_selection_free(shape->selection);
    kvf_free(shape);
}

/* The one that was used least recently, of those that nobody uses. */
static void forget_oldest(kvf_shapes *shapes) {
    kvf_stage_shape *oldest = NULL;
    for (kvf_stage_shape *shape = shapes->first; shape; shape = shape->following)
        if (shape->users == 0)
            oldest = shape;
    if (oldest)
        forget(shapes, oldest);
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
    if (shapes->count >= KEPT)
        forget_oldest(shapes);
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
