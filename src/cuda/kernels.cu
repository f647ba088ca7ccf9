// The kernels' entry points; their code is in kernel_move.h and kernel_hash.h, which tests also run on the host.
#define KVF_DEVICE static __device__ __forceinline__
#define KVF_UNROLL _Pragma("unroll")
#define KVF_REACH(address) ((void *)(address))

#define KVF_CONSTANT static __device__ const
#define KVF_ADD_SUM(address, hash) (void)atomicAdd((unsigned long long *)(address), hash)

#include "cuda/kernel_hash.h"

extern "C" __global__ void __launch_bounds__(KVF_TILE_THREADS)
    kvf_copy_cells(const kvf_cuda_box *boxes, uint32_t count, uint32_t tiles) {
    kvf_move_thread(boxes, count, tiles, false, blockIdx.x, gridDim.x, threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(KVF_TILE_THREADS)
    kvf_convert_cells(const kvf_cuda_box *boxes, uint32_t count, uint32_t tiles) {
    kvf_move_thread(boxes, count, tiles, true, blockIdx.x, gridDim.x, threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(KVF_TILE_THREADS)
    kvf_hash_cells(const kvf_cuda_box *boxes, uint32_t count, uint32_t tiles) {
    kvf_hash_thread(boxes, count, tiles, blockIdx.x, gridDim.x, threadIdx.x);
}
