/*
 * Selections and their maps in this rank's memory, made once for each shape of peer and kept: the second request of a
 * known shape costs none, nor does the second peer.
 */
#ifndef KVF_STAGE_SHAPE_H
#define KVF_STAGE_SHAPE_H

#include "stage/stream.h"

/** A selection in our memory. */
typedef struct kvf_stage_shape {
    kvf_selection *selection;
    kvf_stream_map *map;
    uint32_t users; /**< flows */
    uint64_t lanes; /**< items times their layers: what it takes */
    struct kvf_stage_shape *previous, *following;
} kvf_stage_shape;

/** Those that are known, the one used last in front. */
typedef struct kvf_shapes {
    const kvf_shard *shard;
    kvf_stage_shape *first;
    uint32_t count;
    uint64_t lanes;
} kvf_shapes;

/**
 * Finds the shape of a selection, or makes it; one that nobody uses is forgotten where there are many.
 *
 * @param selection  taken over, whatever is returned
 * @param out        receives a shape that counts one user more
 * @return KVF_OK, KVF_E_NOMEM, and what kvf_stream_map_create() refuses
 */
kvf_status kvf_shapes_use(kvf_shapes *shapes, kvf_selection *selection, kvf_stage_shape **out);

/** One user less; NULL is accepted. */
void kvf_shapes_leave(kvf_stage_shape *shape);

/** Frees all; none is in use. */
void kvf_shapes_free(kvf_shapes *shapes);

#endif
