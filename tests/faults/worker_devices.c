#include "worker_devices.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cuda/device_image.h"
#include "cuda/driver.h"

enum { OUT_OF_MEMORY = 2 };

static struct {
    void (*fail)(const char *function, int result, unsigned times);
    void (*delay)(uint64_t ns);
    void *(*look)(uint64_t address);
} stand_in;

static bool is_real;

static bool find(void *library, const char *name, void *out) {
    void *address = dlsym(library, name);
    memcpy(out, &address, sizeof address);
    return address != NULL;
}

bool worker_devices_there(void) {
    void *library = kvf_device_image_count > 0 ? dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) : NULL;
    is_real = library && !find(library, "fake_cuda_look", &stand_in.look);
    return is_real || (library && find(library, "fake_cuda_fail", &stand_in.fail) &&
                       find(library, "fake_cuda_delay", &stand_in.delay));
}

bool worker_devices_are_real(void) {
    return is_real;
}

/* ---- copies of real memory ------------------------------------------------------------------- */

/* The device of this process, and a stream for these copies alone, which waits for no other. */
static uint32_t used;
static CUstream stream;

/* Without its bytes a worker cannot check anything. The driver of the harness reports that it has ended. */
static void must(kvf_status status) {
    if (!status)
        return;
    (void)fprintf(stderr, "worker %d: %s\n", (int)getpid(), kvf_error_detail());
    _exit(4);
}

static const kvf_cuda *enter(void) {
    const kvf_cuda *cuda;
    must(kvf_cuda_enter(used, &cuda));
    return cuda;
}

static void put(const kvf_memory *region, uint64_t offset, const unsigned char *seen, uint64_t bytes) {
    const kvf_cuda *cuda = enter();
    const CUdeviceptr to = (uintptr_t)region->address + offset;
    must(kvf_cuda_status(used, cuda->cuMemcpyHtoDAsync_v2(to, seen, bytes, stream), "filling"));
    kvf_cuda_leave(cuda);
}

static void get(const kvf_memory *region, unsigned char *seen) {
    const kvf_cuda *cuda = enter();
    const CUdeviceptr from = (uintptr_t)region->address;
    must(kvf_cuda_status(used, cuda->cuMemcpyDtoHAsync_v2(seen, from, region->bytes, stream), "looking"));
    kvf_cuda_leave(cuda);
}

static void settle(void) {
    const kvf_cuda *cuda = enter();
    must(kvf_cuda_status(used, cuda->cuStreamSynchronize(stream), "copying"));
    kvf_cuda_leave(cuda);
}

static const content_mirror mirror = {put, get, settle};

const content_mirror *worker_devices_mirror(void) {
    return is_real ? &mirror : NULL;
}

/* The copy is pinned: the driver need not wait for the stream in order to read it, and a fill is of many small ones. */
static kvf_status make_copy(const kvf_cuda *cuda, uint64_t bytes, unsigned char **out) {
    void *made = NULL;
    CUresult result = cuda->cuMemHostAlloc(&made, bytes, CU_MEMHOSTALLOC_PORTABLE);
    if (!result && !stream)
        result = cuda->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0);
    *out = made;
    return kvf_cuda_status(used, result, "making a copy");
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Rounds may name the fabric "cuda", so devices must reach each other: the first does for all that do not. */
static uint32_t device_of(const kvf_cuda *cuda, uint32_t wanted) {
    const uint32_t number = wanted % cuda->device_count;
    return kvf_cuda_check_reach(cuda, 0, number) || kvf_cuda_check_reach(cuda, number, 0) ? 0 : number;
}

kvf_status worker_devices_memory(uint32_t device, uint64_t bytes, kvf_memory *out, unsigned char **seen) {
    const kvf_cuda *cuda;
    CUdeviceptr address = 0;
    kvf_status status = kvf_cuda_find(&cuda);
    if (status)
        return status;
    used = device_of(cuda, device);
    status = kvf_cuda_enter(used, &cuda);
    if (status)
        return status;
    status = kvf_cuda_status(used, cuda->cuMemAlloc_v2(&address, bytes), "allocating");
    if (!status && is_real)
        status = make_copy(cuda, bytes, seen);
    else if (!status)
        *seen = stand_in.look(address);
    kvf_cuda_leave(cuda);
    if (status)
        return status;
    *out = (kvf_memory){.struct_size = sizeof *out,
                        .address = (void *)(uintptr_t)address, /* never followed by the host */
                        .bytes = bytes,
                        .kind = KVF_MEMORY_CUDA,
                        .device = used};
    memset(*seen, 0, bytes);
    if (is_real) {
        put(out, 0, *seen, bytes);
        settle();
    }
    return KVF_OK;
}

/* ---- faults of the stand-in ------------------------------------------------------------------ */

void worker_devices_trouble(chance *dice) {
    static const char *const functions[] = {"cuLaunchKernel",        "cuMemcpyHtoDAsync_v2",
                                            "cuEventRecord",         "cuMemAlloc_v2",
                                            "cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2"};
    if (is_real)
        return;
    if (chance_per_mille(dice, 5))
        stand_in.fail(functions[chance_between(dice, 0, sizeof functions / sizeof *functions - 1)],
                      OUT_OF_MEMORY, 1);
    if (chance_per_mille(dice, 20))
        stand_in.delay((uint64_t)chance_between(dice, 0, 2000) * 1000u);
}

void worker_devices_calm(void) {
    if (is_real)
        return;
    stand_in.fail("", 0, 0);
    stand_in.delay(0);
}
