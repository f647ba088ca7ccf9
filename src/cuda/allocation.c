#include "cuda/allocation.h"

kvf_status kvf_cuda_zero(uint32_t device, CUdeviceptr address, uint64_t bytes) {
    const kvf_cuda *cuda;
    CUstream stream = NULL;
    kvf_status status = kvf_cuda_enter(device, &cuda);
    if (status)
        return status;
    CUresult result = cuda->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0);
    if (!result)
        result = cuda->cuMemsetD8Async(address, 0, bytes, stream);
    if (!result)
        result = cuda->cuStreamSynchronize(stream);
    if (stream)
        (void)cuda->cuStreamDestroy_v2(stream);
    kvf_cuda_leave(cuda);
    return kvf_cuda_status(device, result, "zeroing memory of a device");
}

/* The driver cuts small allocations out of blocks of this size, and lets other processes open whole blocks only: then
 * they would reach other memory of ours, too. */
#define BLOCK_BYTES (2u << 20)

kvf_status kvf_cuda_allocate(uint32_t device, uint64_t bytes, CUdeviceptr *out) {
    const kvf_cuda *cuda;
    uint64_t blocks;
    if (!kvf_add(bytes, BLOCK_BYTES - 1, &blocks))
        return kvf_fail(KVF_E_NOMEM, "%llu bytes of a device are more than there can be",
                        (unsigned long long)bytes);
    blocks -= blocks % BLOCK_BYTES;
    kvf_status status = kvf_cuda_enter(device, &cuda);
    if (status)
        return status;
    const CUresult result = cuda->cuMemAlloc_v2(out, blocks);
    kvf_cuda_leave(cuda);
    if (result)
        return kvf_cuda_status(device, result, "allocating memory of a device");
    status = kvf_cuda_zero(device, *out, blocks);
    if (status)
        kvf_cuda_free(device, *out);
    return status;
}

void kvf_cuda_free(uint32_t device, CUdeviceptr address) {
    const kvf_cuda *cuda;
    if (kvf_cuda_enter(device, &cuda))
        return;
    (void)cuda->cuMemFree_v2(address);
    kvf_cuda_leave(cuda);
}
