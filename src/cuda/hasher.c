#include "cuda/hasher.h"

#include "cuda/device_image.h"
#include "cuda/over.h"

#define BLOCKS 16u /* of threads that run at once, as of a copier before which nothing waits */

/* A job's boxes and ids, which are copied to the device, and its sums, which are copied back; on both sides alike. */
typedef struct room {
    kvf_cuda_box boxes[KVF_HASHER_BOXES];
    uint32_t ids[KVF_HASHER_IDS];
    uint64_t sums[KVF_HASHER_SUMS];
} room;

struct kvf_hasher {
    uint32_t device;
    CUstream stream;
    CUmodule module;
    CUfunction kernels[2]; /* with a box that is converted: the second */
    CUevent over;
    room *host;          /* pinned */
    CUdeviceptr there;   /* the same on the device */
    const uint32_t *ids; /* as the caller knows them */
    uint32_t boxes, tiles, sums;
    bool converts, started;
};

static CUdeviceptr place_of(const kvf_hasher *hasher, size_t offset) {
    return hasher->there + offset;
}

/* ---- opening and closing ------------------------------------------------------------------------ */

static kvf_status make(kvf_hasher *hasher, const kvf_cuda *cuda) {
    void *host = NULL;
    kvf_status status = kvf_device_code_load(cuda, hasher->device, &hasher->module);
    if (status)
        return status;
    status = kvf_device_kernel(cuda, hasher->device, hasher->module, "kvf_hash_cells", &hasher->kernels[0]);
    if (!status)
        status = kvf_device_kernel(cuda, hasher->device, hasher->module, "kvf_hash_converted_cells",
                                   &hasher->kernels[1]);
    if (status)
        return status;
    CUresult result = kvf_cuda_least_stream(cuda, &hasher->stream);
    if (!result)
        result = cuda->cuEventCreate(&hasher->over, CU_EVENT_DISABLE_TIMING);
    if (!result)
        result = cuda->cuMemHostAlloc(&host, sizeof *hasher->host, CU_MEMHOSTALLOC_PORTABLE);
    hasher->host = host;
    if (!result)
        result = cuda->cuMemAlloc_v2(&hasher->there, sizeof *hasher->host);
    return kvf_cuda_status(hasher->device, result, "making room for checksums");
}

/* Frees everything made so far; the device must be entered. */
static void unmake(kvf_hasher *hasher, const kvf_cuda *cuda) {
    if (hasher->there)
        (void)cuda->cuMemFree_v2(hasher->there);
    if (hasher->host)
        (void)cuda->cuMemFreeHost(hasher->host);
    if (hasher->over)
        (void)cuda->cuEventDestroy_v2(hasher->over);
    if (hasher->stream)
        (void)cuda->cuStreamDestroy_v2(hasher->stream);
    if (hasher->module)
        (void)cuda->cuModuleUnload(hasher->module);
    kvf_free(hasher);
}

kvf_status kvf_hasher_open(uint32_t device, kvf_hasher **out) {
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_enter(device, &cuda);
    if (status)
        return status;
    kvf_hasher *hasher = kvf_alloc0(1, sizeof *hasher);
    if (!hasher) {
        kvf_cuda_leave(cuda);
        return kvf_nomem("checksums of a device");
    }
    hasher->device = device;
    status = make(hasher, cuda);
    if (status)
        unmake(hasher, cuda);
    else
        *out = hasher;
    kvf_cuda_leave(cuda);
    return status;
}

kvf_status kvf_hasher_close(kvf_hasher *hasher) {
    const kvf_cuda *cuda;
    if (!hasher)
        return KVF_OK;
    if (hasher->started)
        return KVF_E_AGAIN;
    kvf_status status = kvf_cuda_enter(hasher->device, &cuda);
    if (status)
        return status;
    unmake(hasher, cuda);
    kvf_cuda_leave(cuda);
    return KVF_OK;
}

/* ---- a job -------------------------------------------------------------------------------------- */

void kvf_hasher_begin(kvf_hasher *hasher, const uint32_t *ids, uint32_t count, uint32_t sums) {
    KVF_ASSERT(!hasher->started && count <= KVF_HASHER_IDS && sums <= KVF_HASHER_SUMS);
    memcpy(hasher->host->ids, ids, count * sizeof *ids);
    hasher->ids = ids;
    hasher->sums = sums;
    hasher->boxes = hasher->tiles = 0;
    hasher->converts = false;
}

kvf_status kvf_hasher_add(kvf_hasher *hasher, const kvf_box *pages, kvf_dtype from, kvf_dtype to,
                          const kvf_device_sums *sums, uint64_t rows, uint64_t units,
                          uint64_t cell_elements) {
    const kvf_device_side side = {.pages = pages,
                                  .table = place_of(hasher, offsetof(room, ids)),
                                  .table_on_host = hasher->ids,
                                  .type = from};
    kvf_device_sums there = *sums;
    uint32_t made = 0, tiles = hasher->tiles;
    there.address += place_of(hasher, offsetof(room, sums));
    kvf_status status = kvf_device_hash_boxes(&side, to, &there, rows, units, cell_elements,
                                              hasher->host->boxes + hasher->boxes,
                                              KVF_HASHER_BOXES - hasher->boxes, &made, &tiles);
    if (!status) {
        hasher->boxes += made;
        hasher->tiles = tiles;
        hasher->converts = hasher->converts || from != to;
    }
    return status;
}

static CUresult launch(const kvf_hasher *hasher, const kvf_cuda *cuda) {
    CUdeviceptr boxes = hasher->there;
    uint32_t count = hasher->boxes, tiles = hasher->tiles;
    void *arguments[] = {&boxes, &count, &tiles};
    return tiles == 0
               ? 0
               : cuda->cuLaunchKernel(hasher->kernels[hasher->converts], kvf_blocks_for(tiles, BLOCKS), 1, 1,
                                      KVF_BLOCK_THREADS, 1, 1, 0, hasher->stream, arguments, NULL);
}

/* Puts a job on the stream, and its event behind it. Sums are copied as zeros with the rest: a driver may set memory
 * by a kernel of its own, load that at the first call, and wait for the work of an engine that waits for us. */
static CUresult put(const kvf_hasher *hasher, const kvf_cuda *cuda) {
    const CUdeviceptr sums = place_of(hasher, offsetof(room, sums));
    const size_t sum_bytes = hasher->sums * sizeof *hasher->host->sums;
    memset(hasher->host->sums, 0, sum_bytes);
    CUresult result = cuda->cuMemcpyHtoDAsync_v2(hasher->there, hasher->host,
                                                 offsetof(room, sums) + sum_bytes, hasher->stream);
    if (!result)
        result = launch(hasher, cuda);
    if (!result && sum_bytes)
        result = cuda->cuMemcpyDtoHAsync_v2(hasher->host->sums, sums, sum_bytes, hasher->stream);
    if (!result)
        result = cuda->cuEventRecord(hasher->over, hasher->stream);
    if (result)
        (void)cuda->cuStreamSynchronize(hasher->stream); /* a part of it may be under way */
    return result;
}

kvf_status kvf_hasher_start(kvf_hasher *hasher) {
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_enter(hasher->device, &cuda);
    if (status)
        return status;
    status = kvf_cuda_status(hasher->device, put(hasher, cuda), "starting checksums");
    kvf_cuda_leave(cuda);
    hasher->started = !status;
    return status;
}

kvf_status kvf_hasher_poll(kvf_hasher *hasher, const uint64_t **sums) {
    const kvf_status status = kvf_cuda_over(hasher->device, hasher->over, "computing checksums");
    hasher->started = status == KVF_IN_PROGRESS;
    *sums = hasher->host->sums;
    return status;
}
