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
    void (*hasten)(void);
    void *(*look)(uint64_t address);
    size_t (*left)(void);
    void (*stick)(int result);
    void (*pooled)(int pooled);
    int (*create)(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                  unsigned long long flags);
} fake;

/* Found in a real driver only; the stand-in has no such function. */
static CUresult (*allocate_managed)(CUdeviceptr *address, size_t bytes, unsigned flags);
#define ATTACH_GLOBAL 1u

static CUdeviceptr allocated[MOST];
static size_t allocated_count;

static void *look_up(void *library, const char *name) {
    return library ? dlsym(library, name) : NULL;
}

static bool find(void *library, const char *name, void *out) {
    void *address = look_up(library, name);
    memcpy(out, &address, sizeof address);
    return address != NULL;
}

static bool find_all(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return find(library, "fake_cuda_fail", &fake.refuse) && find(library, "fake_cuda_delay", &fake.delay) &&
           find(library, "fake_cuda_hasten", &fake.hasten) && find(library, "fake_cuda_look", &fake.look) &&
           find(library, "fake_cuda_left", &fake.left) && find(library, "fake_cuda_stick", &fake.stick) &&
           find(library, "fake_cuda_pooled", &fake.pooled) && find(library, "cuMemCreate", &fake.create);
}

void devices_open(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const bool real = library && !look_up(library, "fake_cuda_look");
    if (real ? find(library, "cuMemAllocManaged", &allocate_managed) : find_all())
        return;
    (void)fprintf(stderr, "neither a CUDA driver nor the stand-in for one is found: %s\n", dlerror());
    exit(1);
}

bool devices_present(void) {
    return kvf_device_image_count > 0 && find_all();
}

bool devices_are_real(void) {
    return allocate_managed != NULL;
}

uint32_t devices_number(uint32_t wanted) {
    const kvf_cuda *cuda;
    assert_int_equal(kvf_cuda_find(&cuda), KVF_OK);
    return wanted % cuda->device_count;
}

CUdeviceptr device_room(uint32_t device, uint64_t bytes) {
    const kvf_cuda *cuda;
    CUdeviceptr made = 0;
    assert_int_equal(kvf_cuda_enter(devices_number(device), &cuda), KVF_OK);
    if (allocate_managed)
        assert_int_equal(allocate_managed(&made, bytes, ATTACH_GLOBAL), 0);
    else
        assert_int_equal(cuda->cuMemAlloc_v2(&made, bytes), 0);
    kvf_cuda_leave(cuda);
    memset(devices_look(made), 0, bytes);
    return made;
}

void device_room_free(CUdeviceptr address) {
    const kvf_cuda *cuda;
    assert_int_equal(kvf_cuda_enter(0, &cuda), KVF_OK);
    assert_int_equal(cuda->cuMemFree_v2(address), 0);
    kvf_cuda_leave(cuda);
}

/* ---- memory in segments --------------------------------------------------------------------------- */

_Static_assert(SEGMENT == FAKE_SEGMENT, "the stand-in maps such segments");

static uint64_t segment_bytes(uint32_t i) {
    return (uint64_t)(i % 3 + 1) * SEGMENT;
}

static uint64_t all_segments(uint64_t bytes) {
    uint64_t all = 0;
    for (uint32_t i = 0; all < bytes; i++)
        all += segment_bytes(i);
    return all;
}

CUdeviceptr device_segments(uint32_t device, uint64_t bytes, int types) {
    const CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                            .requestedHandleTypes = types,
                                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, (int)device}};
    const CUmemAccessDesc access = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const uint64_t all = all_segments(bytes);
    const kvf_cuda *cuda;
    CUdeviceptr made = 0;
    assert_int_equal(kvf_cuda_enter(device, &cuda), KVF_OK);
    assert_int_equal(cuda->cuMemAddressReserve(&made, all, 0, 0, 0), 0);
    uint64_t at = 0;
    for (uint32_t i = 0; at < all; at += segment_bytes(i++)) {
        CUmemGenericAllocationHandle handle = 0;
        assert_int_equal(fake.create(&handle, segment_bytes(i), &properties, 0), 0);
        assert_int_equal(cuda->cuMemMap(made + at, segment_bytes(i), 0, handle, 0), 0);
        assert_int_equal(cuda->cuMemRelease(handle), 0);
    }
    assert_int_equal(cuda->cuMemSetAccess(made, all, &access, 1), 0);
    kvf_cuda_leave(cuda);
    return made;
}

void device_segments_free(CUdeviceptr address, uint64_t bytes) {
    const kvf_cuda *cuda;
    assert_int_equal(kvf_cuda_enter(0, &cuda), KVF_OK);
    assert_int_equal(cuda->cuMemUnmap(address, all_segments(bytes)), 0);
    assert_int_equal(cuda->cuMemAddressFree(address, all_segments(bytes)), 0);
    kvf_cuda_leave(cuda);
}

kvf_memory device_memory(uint32_t device, uint64_t bytes, void **seen) {
    const CUdeviceptr address = device_room(device, bytes);
    assert_true(allocated_count < MOST);
    allocated[allocated_count++] = address;
    *seen = devices_look(address);
    return (kvf_memory){.struct_size = sizeof(kvf_memory),
                        .address = (void *)(uintptr_t)address,
                        .bytes = bytes,
                        .kind = KVF_MEMORY_CUDA,
                        .device = devices_number(device),
                        .withheld = true};
}

void devices_free(void) {
    while (allocated_count > 0)
        device_room_free(allocated[--allocated_count]);
}

size_t devices_left(void) {
    return fake.left ? fake.left() : 0;
}

void devices_delay(uint64_t ns) {
    if (fake.delay)
        fake.delay(ns);
}

void devices_hasten(void) {
    if (fake.hasten)
        fake.hasten();
}

void devices_fail(const char *function, int result, unsigned times) {
    if (fake.refuse)
        fake.refuse(function, result, times);
}

void devices_stick(int result) {
    if (fake.stick)
        fake.stick(result);
}

void *devices_look(uint64_t address) {
    return fake.look ? fake.look(address) : (void *)(uintptr_t)address;
}

void devices_pooled(bool pooled) {
    if (fake.pooled)
        fake.pooled(pooled);
}
