/*
 * Where memory is: shared by all functions that take memory.
 */
#ifndef KVFERRY_MEMORY_H
#define KVFERRY_MEMORY_H

/** Where a region's bytes are. */
typedef enum kvf_memory_kind {
    KVF_MEMORY_HOST = 0,
    /** A device's: served by the transport "cuda", by a UCX with CUDA support, and by a stage over any transport
     * (`kvf_memory.withheld`). */
    KVF_MEMORY_CUDA = 1,
} kvf_memory_kind;

#endif
