/* Splitting an axis over ranks: the arithmetic that shards and connectors share. */
#ifndef KVF_SHARE_H
#define KVF_SHARE_H

#include <kvferry/shard.h>

/** The part of `units` that rank `rank` of `ranks` holds, split as evenly as possible; neighbours hold the same unit
 * where ranks > units. */
static inline kvf_range kvf_axis_share(uint32_t units, uint32_t ranks, uint32_t rank) {
    uint32_t begin = (uint32_t)((uint64_t)rank * units / ranks);
    if (ranks > units)
        return (kvf_range){begin, begin + 1};
    return (kvf_range){begin, (uint32_t)(((uint64_t)rank + 1) * units / ranks)};
}

#endif
