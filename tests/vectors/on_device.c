#include "on_device.h"

#ifdef KVF_WITHOUT_DEVICES

void region_to_device(kvf_block_region *region) {
    (void)region;
}

void region_from_device(kvf_block_region *region, void *memory) {
    (void)region;
    (void)memory;
}

unsigned regions_on_device(void) {
    return 0;
}

#else

#include <stdio.h>
#include <stdlib.h>

#include "cuda/device_image.h"
#include "cuda/driver.h"

static unsigned regions;

static void must(int result, const char *what) {
    if (result) {
        (void)fprintf(stderr, "%s: %d\n", what, result);
        exit(1);
    }
}

/* Copies on a stream for that alone, and waits. */
static void carry(const kvf_cuda *cuda, const kvf_block_region *region, void *memory, bool to_device) {
    const CUdeviceptr there = (uintptr_t)region->base;
    CUstream stream;
    must(kvf_cuda_least_stream(cuda, &stream), "making a stream");
    must(to_device ? cuda->cuMemcpyHtoDAsync_v2(there, memory, region->bytes, stream)
                   : cuda->cuMemcpyDtoHAsync_v2(memory, there, region->bytes, stream),
         "copying a region");
    must(cuda->cuStreamSynchronize(stream), "waiting for a copy");
    must(cuda->cuStreamDestroy_v2(stream), "ending a stream");
}

void region_to_device(kvf_block_region *region) {
    const kvf_cuda *cuda;
    CUdeviceptr there = 0;
    void *memory = region->base;
    /* What has no bytes, or is refused anyway, stays. */
    if (!getenv("KVF_VECTORS_DEVICE") || kvf_device_image_count == 0 || !memory || !region->bytes)
        return;
    must(kvf_cuda_enter(0, &cuda), kvf_error_detail());
    must(cuda->cuMemAlloc_v2(&there, region->bytes), "allocating a region");
    region->base = (void *)(uintptr_t)there; // NOLINT(performance-no-int-to-ptr)
    region->kind = KVF_MEMORY_CUDA;
    carry(cuda, region, memory, true);
    kvf_cuda_leave(cuda);
}

void region_from_device(kvf_block_region *region, void *memory) {
    const kvf_cuda *cuda;
    if (region->kind != KVF_MEMORY_CUDA)
        return;
    must(kvf_cuda_enter(0, &cuda), kvf_error_detail());
    carry(cuda, region, memory, false);
    must(cuda->cuMemFree_v2((uintptr_t)region->base), "freeing a region");
    kvf_cuda_leave(cuda);
    region->base = memory;
    region->kind = KVF_MEMORY_HOST;
    regions++;
}

unsigned regions_on_device(void) {
    return regions;
}

#endif
