#include "transport/device_context.h"

#include <stdio.h>

/* False if the driver does not say. */
static bool is_closed_to_cards(const kvf_memory *memory) {
    const kvf_cuda *cuda;
    int can = 0;
    if (kvf_cuda_enter(memory->device, &cuda))
        return false;
    const CUresult result = cuda->cuPointerGetAttribute(&can, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE,
                                                        (CUdeviceptr)(uintptr_t)memory->address);
    kvf_cuda_leave(cuda);
    return !result && !can;
}

kvf_status kvf_device_memory_refused(kvf_status status, const kvf_memory *memory) {
    if (memory->kind != KVF_MEMORY_CUDA)
        return status;
    char why[KVF_DETAIL_BYTES];
    (void)snprintf(why, sizeof why, "%s", kvf_error_detail());
    return kvf_fail(KVF_E_UNSUPPORTED, "memory of CUDA device %u is refused%s register it as withheld: %s",
                    memory->device,
                    is_closed_to_cards(memory)
                        ? ": it was created by cuMemCreate() without allocFlags.gpuDirectRDMACapable, which "
                          "network cards need; create it with that, or"
                        : "; to move it packed,",
                    why);
}
