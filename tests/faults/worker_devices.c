#include "worker_devices.h"

#include <dlfcn.h>
#include <string.h>

#include "cuda/device_image.h"
#include "cuda/driver.h"

enum { OUT_OF_MEMORY = 2 };

static struct {
    void (*fail)(const char *function, int result, unsigned times);
    void (*delay)(uint64_t ns);
    void *(*look)(uint64_t address);
} stand_in;

static bool find(void *library, const char *name, void *out) {
    void *address = dlsym(library, name);
    memcpy(out, &address, sizeof address);
    return address != NULL;
}

bool worker_devices_there(void) {
    void *library = kvf_device_image_count > 0 ? dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) : NULL;
    return library && find(library, "fake_cuda_fail", &stand_in.fail) &&
           find(library, "fake_cuda_delay", &stand_in.delay) &&
           find(library, "fake_cuda_look", &stand_in.look);
}

kvf_status worker_devices_memory(uint32_t device, uint64_t bytes, kvf_memory *out, unsigned char **seen) {
    const kvf_cuda *cuda;
    CUdeviceptr address = 0;
    kvf_status status = kvf_cuda_enter(device, &cuda);
    if (status)
        return status;
    status = kvf_cuda_status(cuda, cuda->cuMemAlloc_v2(&address, bytes), "allocating");
    kvf_cuda_leave(cuda);
    if (status)
        return status;
    *seen = stand_in.look(address);
    memset(*seen, 0, bytes);
    *out = (kvf_memory){.struct_size = sizeof *out,
                        .address = (void *)(uintptr_t)address, /* never followed by the host */
                        .bytes = bytes,
                        .kind = KVF_MEMORY_CUDA,
                        .device = device};
    return KVF_OK;
}

void worker_devices_trouble(chance *dice) {
    static const char *const functions[] = {"cuLaunchKernel",        "cuMemcpyHtoDAsync_v2",
                                            "cuEventRecord",         "cuMemAllocAsync",
                                            "cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2"};
    if (chance_per_mille(dice, 5))
        stand_in.fail(functions[chance_between(dice, 0, sizeof functions / sizeof *functions - 1)],
                      OUT_OF_MEMORY, 1);
    if (chance_per_mille(dice, 20))
        stand_in.delay((uint64_t)chance_between(dice, 0, 2000) * 1000u);
}

void worker_devices_calm(void) {
    stand_in.fail("", 0, 0);
    stand_in.delay(0);
}
