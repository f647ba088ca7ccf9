/*
 * Where memory is: shared by all functions that take memory.
 */
#ifndef KVFERRY_MEMORY_H
#define KVFERRY_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Where a region's bytes are. */
typedef enum kvf_memory_kind {
    KVF_MEMORY_HOST = 0,
    /** A device's: served by the transport "cuda", by a UCX with CUDA support or a provider of libfabric that takes it,
     * and by a stage over any transport (`kvf_memory.withheld`). */
    KVF_MEMORY_CUDA = 1,
} kvf_memory_kind;

/** A region. In an array all have the same struct_size, which is also the distance between them. */
typedef struct kvf_memory {
    size_t struct_size; /**< sizeof(kvf_memory) */
    void *address;
    uint64_t bytes;
    kvf_memory_kind kind;
    uint32_t device; /**< number of the CUDA device; 0 for the host */
    /** Peers get no access to it, and no run may name it: its contents move packed, through a stage (stage.h). So
     * memory that no transport here serves, as is usual for a device's, can be registered all the same. */
    bool withheld;
} kvf_memory;

#endif
