/* Arrays of regions as callers pass them: with this library's size of kvf_memory, or that of an older or newer one. */
#ifndef KVF_TRANSPORT_MEMORY_H
#define KVF_TRANSPORT_MEMORY_H

#include <kvferry/transport.h>

/** The size of the oldest kvf_memory. Fields beyond it are read from a copy by kvf_take_options() only. */
#define KVF_MEMORY_LEAST offsetof(kvf_memory, withheld)

/** Region i of an array, whose elements are as far apart as the caller's kvf_memory is large. */
static inline const kvf_memory *kvf_memory_at(const kvf_memory *regions, uint32_t i) {
    return (const kvf_memory *)(const void *)((const char *)regions + i * regions->struct_size);
}

/**
 * Checks that all regions of an array have the same struct_size, which this library can read, that their kinds are
 * known, and that the device of host memory is 0.
 *
 * @return KVF_OK, or KVF_E_INVALID; the detail names `what`, the region and the value
 */
kvf_status kvf_memory_check(const kvf_memory *regions, uint32_t count, const char *what);

#endif
