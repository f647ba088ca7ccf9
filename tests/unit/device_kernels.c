#include "device_kernels.h"

#include <stdlib.h>

/* A device ends its context over an access that is not aligned. */
static void *reach(uint64_t address, size_t bytes) {
    if (address % bytes)
        abort();
    return (void *)(uintptr_t)address;
}

#define KVF_DEVICE static inline
#define KVF_UNROLL
#define KVF_ROLL
#define KVF_READ(type, address) (*(const type *)reach(address, sizeof(type)))
#define KVF_LOAD KVF_READ
#define KVF_STORE(type, address, value) *(type *)reach(address, sizeof(type)) = (value)
#define KVF_CONSTANT static const
#define KVF_ADD_SUM(address, hash) *(uint64_t *)reach(address, sizeof(uint64_t)) += (hash)
#include "cuda/kernel_hash.h"

void run_move_kernel(const kvf_cuda_box *boxes, uint32_t count, uint32_t tiles, bool convert,
                     uint32_t blocks) {
    for (uint32_t block = 0; block < blocks; block++)
        for (uint32_t thread = 0; thread < KVF_TILE_THREADS; thread++)
            kvf_move_thread(boxes, count, tiles, convert, block, blocks, thread);
}

void run_hash_kernel(const kvf_cuda_box *boxes, uint32_t count, uint32_t tiles, bool convert,
                     uint32_t blocks) {
    for (uint32_t block = 0; block < blocks; block++)
        for (uint32_t thread = 0; thread < KVF_TILE_THREADS; thread++)
            kvf_hash_thread(boxes, count, tiles, convert, block, blocks, thread);
}

uint32_t run_quotient(uint32_t number, kvf_divisor by) {
    return kvf_quotient(number, by);
}
