/*
 * Where memory is: the words that everything which takes memory shares.
 */
#ifndef KVFERRY_MEMORY_H
#define KVFERRY_MEMORY_H

/** Where a region's bytes are. */
typedef enum kvf_memory_kind {
    KVF_MEMORY_HOST = 0,
    KVF_MEMORY_CUDA = 1, /**< needs a UCX with CUDA support; whatever else takes memory refuses it */
} kvf_memory_kind;

#endif
