/*
 * The same transfer through packed streams: gathered by each holder, scattered by the reader, and compared with a stream
 * that is made from the coordinates of single cells, sorted.
 */
#ifndef KVF_PROPERTY_PACKED_H
#define KVF_PROPERTY_PACKED_H

#include "transfer.h"

typedef struct packed_transfer {
    const world *w;
    uint32_t rank; /* local */
    const kvf_shard *shard;
    const kvf_plan *plan;
    const asked *ask;
    const choices *choices;
    const memory *remote; /* by rank, filled */
} packed_transfer;

/** Moves what a plan says. False, after wrong(), when a byte is not as it should be. */
bool move_packed(const packed_transfer *t);

#endif
