/* Arrays of regions as callers give them: of this library's size of kvf_memory, or a newer one's. */
#ifndef KVF_TRANSPORT_MEMORY_H
#define KVF_TRANSPORT_MEMORY_H

#include <kvferry/transport.h>

/** Region i of an array, whose elements are as far apart as the caller's kvf_memory is large. */
static inline const kvf_memory *kvf_memory_at(const kvf_memory *regions, uint32_t i) {
    return (const kvf_memory *)(const void *)((const char *)regions + i * regions->struct_size);
}

/**
 * Whether an array of regions has one struct_size that this library can read, kinds that there are, and devices
 * where there are any.
 *
 * @return KVF_OK, or KVF_E_INVALID; the detail names `what`, the region and the value
 */
kvf_status kvf_memory_check(const kvf_memory *regions, uint32_t count, const char *what);

#endif
