/*
 * Where memory is: the words that everything which takes memory shares.
 */
#ifndef KVFERRY_MEMORY_H
#define KVFERRY_MEMORY_H

/** Where a region's bytes are. */
typedef enum kvf_memory_kind {
    KVF_MEMORY_HOST = 0,
    /** A device's: the transport "cuda" takes it, a UCX with CUDA support too, and a stage whatever the transport is
     * (`kvf_memory.withheld`). */
    KVF_MEMORY_CUDA = 1,
} kvf_memory_kind;

#endif
