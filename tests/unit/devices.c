#include "devices.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "cuda/device_image.h"
#include "fake_cuda.h"

#define MOST 256u

static struct {
    void (*refuse)(const char *function, int result, unsigned times);
    void (*delay)(uint64_t ns);
    void *(*look)(uint64_t address);
    size_t (*left)(void);
    void (*stick)(int result);
    void (*vmm)(int vmm);
} fake;

static CUdeviceptr allocated[MOST];
static size_t allocated_count;

static bool find(void *library, const char *name, void *out) {
    void *address = library ? dlsym(library, name) : NULL;
    memcpy(out, &address, sizeof address);
    return address != NULL;
}

static bool find_all(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return find(library, "fake_cuda_fail", &fake.refuse) && find(library, "fake_cuda_delay", &fake.delay) &&
           find(library, "fake_cuda_look", &fake.look) && find(library, "fake_cuda_left", &fake.left) &&
           find(library, "fake_cuda_stick", &fake.stick) && find(library, "fake_cuda_vmm", &fake.vmm);
}

void devices_open(void) {
    if (find_all())
        return;
    (void)fprintf(stderr, "the stand-in for libcuda.so.1 is not found: %s\n", dlerror());
    exit(1);
}

bool devices_present(void) {
    return kvf_device_image_count > 0 && find_all();
}

kvf_memory device_memory(uint32_t device, uint64_t bytes, void **seen) {
    const kvf_cuda *cuda;
    CUdeviceptr address = 0;
    assert_int_equal(kvf_cuda_enter(device, &cuda), KVF_OK);
    assert_int_equal(cuda->cuMemAlloc_v2(&address, bytes), 0);
    kvf_cuda_leave(cuda);
    assert_true(allocated_count < MOST);
    allocated[allocated_count++] = address;
    *seen = fake.look(address);
    return (kvf_memory){.struct_size = sizeof(kvf_memory),
                        .address = (void *)(uintptr_t)address,
                        .bytes = bytes,
                        .kind = KVF_MEMORY_CUDA,
                        .device = device,
                        .kept = true};
}

void devices_free(void) {
    const kvf_cuda *cuda;
    assert_int_equal(kvf_cuda_enter(0, &cuda), KVF_OK);
    while (allocated_count > 0)
        assert_int_equal(cuda->cuMemFree_v2(allocated[--allocated_count]), 0);
    kvf_cuda_leave(cuda);
}

size_t devices_left(void) {
    return fake.left();
}

void devices_delay(uint64_t ns) {
    fake.delay(ns);
}

void devices_fail(const char *function, int result, unsigned times) {
    fake.refuse(function, result, times);
}

void devices_stick(int result) {
    fake.stick(result);
}

void *devices_look(uint64_t address) {
    return fake.look(address);
}

void devices_vmm(bool vmm) {
    fake.vmm(vmm);
}
