// The kernels' entry points; their code is in kernel_move.h and kernel_hash.h, which tests also run on the host.
#define KVF_DEVICE static __device__ __forceinline__
#define KVF_UNROLL _Pragma("unroll")
#define KVF_ROLL _Pragma("unroll 1")
#define KVF_READ(type, address) (*(const type *)(address))

// Bytes that are touched once, which the cache gives up first. Without this for stores, short runs go at a third.
#define KVF_LOAD(type, address) __ldcs((const type *)(address))
#define KVF_STORE(type, address, value) __stcs((type *)(address), value)

#define KVF_CONSTANT static __device__ const
#define KVF_ADD_SUM(address, hash) (void)atomicAdd((unsigned long long *)(address), hash)

#include "cuda/kernel_hash.h"

// The tile with which a thread begins, how many there are at once, and the thread of its tile.
#define KVF_FIRST (blockIdx.x * KVF_BLOCK_TILES + threadIdx.x / KVF_TILE_THREADS)
#define KVF_AT_ONCE (gridDim.x * KVF_BLOCK_TILES)
#define KVF_THREAD (threadIdx.x % KVF_TILE_THREADS)

extern "C" __global__ void __launch_bounds__(KVF_BLOCK_THREADS)
    kvf_copy_cells(const kvf_cuda_box *boxes, uint32_t count, uint32_t tiles) {
    kvf_move_thread(boxes, count, tiles, false, KVF_FIRST, KVF_AT_ONCE, KVF_THREAD);
}

extern "C" __global__ void __launch_bounds__(KVF_BLOCK_THREADS)
    kvf_convert_cells(const kvf_cuda_box *boxes, uint32_t count, uint32_t tiles) {
    kvf_move_thread(boxes, count, tiles, true, KVF_FIRST, KVF_AT_ONCE, KVF_THREAD);
}

extern "C" __global__ void __launch_bounds__(KVF_BLOCK_THREADS)
    kvf_hash_cells(const kvf_cuda_box *boxes, uint32_t count, uint32_t tiles) {
    kvf_hash_thread(boxes, count, tiles, false, KVF_FIRST, KVF_AT_ONCE, KVF_THREAD);
}

extern "C" __global__ void __launch_bounds__(KVF_BLOCK_THREADS)
    kvf_hash_converted_cells(const kvf_cuda_box *boxes, uint32_t count, uint32_t tiles) {
    kvf_hash_thread(boxes, count, tiles, true, KVF_FIRST, KVF_AT_ONCE, KVF_THREAD);
}
