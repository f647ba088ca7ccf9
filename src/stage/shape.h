/*
 * Selections and their maps in this rank's memory. Each is made once for a shape of peer and kept: later requests and
 * peers of the same shape reuse it.
 */
#ifndef KVF_STAGE_SHAPE_H
#define KVF_STAGE_SHAPE_H

#include "stage/stream.h"

/** A selection in our memory. */
typedef struct kvf_stage_shape {
    kvf_selection *selection;
    kvf_stream_map *map;
    uint32_t users; /**< flows */
    uint64_t lanes; /**< items times their layers: a measure of its memory */
    struct kvf_stage_shape *previous, *following;
} kvf_stage_shape;

/** The known shapes, the most recently used first. */
typedef struct kvf_shapes {
    const kvf_shard *shard;
    kvf_stage_shape *first;
    uint32_t count;
    uint64_t lanes;
} kvf_shapes;

/**
 * Finds the shape of a selection, or makes it; if there are many, unused ones are freed.
 *
 * @param selection  taken over, whatever is returned
 * @param out        receives a shape that counts one user more
 * @return KVF_OK, KVF_E_NOMEM, and the failures of kvf_stream_map_create()
 */
kvf_status kvf_shapes_use(kvf_shapes *shapes, kvf_selection *selection, kvf_stage_shape **out);

/** One user less; NULL is accepted. */
void kvf_shapes_leave(kvf_stage_shape *shape);

/** Frees all shapes; none may be in use. */
void kvf_shapes_free(kvf_shapes *shapes);

#endif
