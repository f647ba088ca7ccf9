#include "device_kernels.h"

#define KVF_DEVICE static inline
#define KVF_UNROLL
#define KVF_REACH(address) ((void *)(uintptr_t)(address))
#define KVF_LOAD(type, address) *(const type *)KVF_REACH(address)
#define KVF_STORE(type, address, value) *(type *)KVF_REACH(address) = (value)
#define KVF_CONSTANT static const
#define KVF_ADD_SUM(address, hash) *(uint64_t *)KVF_REACH(address) += (hash)
#include "cuda/kernel_hash.h"

void run_move_kernel(const kvf_cuda_box *boxes, uint32_t count, uint32_t tiles, bool convert,
                     uint32_t blocks) {
    for (uint32_t block = 0; block < blocks; block++)
        for (uint32_t thread = 0; thread < KVF_TILE_THREADS; thread++)
            kvf_move_thread(boxes, count, tiles, convert, block, blocks, thread);
}

void run_hash_kernel(const kvf_cuda_box *boxes, uint32_t count, uint32_t tiles, uint32_t blocks) {
    for (uint32_t block = 0; block < blocks; block++)
        for (uint32_t thread = 0; thread < KVF_TILE_THREADS; thread++)
            kvf_hash_thread(boxes, count, tiles, block, blocks, thread);
}

uint32_t run_quotient(uint32_t number, kvf_divisor by) {
    return kvf_quotient(number, by);
}
