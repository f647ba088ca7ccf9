/*
 * The same transfer through packed streams: each holder gathers, the reader scatters, and the stream is compared with
 * one that is made from single cells, sorted by their coordinates.
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

/** Moves the request of a plan. False, after wrong(), if a byte is wrong. */
bool move_packed(const packed_transfer *t);

#endif
