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
    void (*refuse_after)(unsigned calls);
    void (*delay)(uint64_t ns);
    void (*hasten)(void);
    void *(*look)(uint64_t address);
    size_t (*left)(void);
    void (*stick)(int result);
    void (*pooled)(int pooled);
    unsigned (*grid)(void);
    unsigned (*launches)(void);
    unsigned (*copies)(void);
} fake;

/* The driver's own, which only tests call; it is found in a real driver only. */
static int (*wait_for_value)(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags);

/* Driver functions that only tests call. */
static int (*begin_capture)(CUstream stream, int mode);
static int (*end_capture)(CUstream stream, void **graph);
static int (*destroy_graph)(void *graph);

/* What a test has allocated on a device. A test cannot look at the memory of a real one: it has a copy. */
typedef struct device_block {
    CUdeviceptr address;
    uint64_t bytes;
    uint32_t device;
    unsigned char *copy; /* NULL with the stand-in */
} device_block;

static device_block blocks[2 * MOST];
static size_t block_count;

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

static bool find_captures(void *library) {
    return find(library, "cuStreamBeginCapture_v2", &begin_capture) &&
           find(library, "cuStreamEndCapture", &end_capture) &&
           find(library, "cuGraphDestroy", &destroy_graph);
}

static bool find_all(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return find(library, "fake_cuda_fail", &fake.refuse) &&
           find(library, "fake_cuda_fail_after", &fake.refuse_after) &&
           find(library, "fake_cuda_delay", &fake.delay) && find(library, "fake_cuda_hasten", &fake.hasten) &&
           find(library, "fake_cuda_look", &fake.look) && find(library, "fake_cuda_left", &fake.left) &&
           find(library, "fake_cuda_stick", &fake.stick) && find(library, "fake_cuda_pooled", &fake.pooled) &&
           find(library, "fake_cuda_grid", &fake.grid) &&
           find(library, "fake_cuda_launches", &fake.launches) &&
           find(library, "fake_cuda_copies", &fake.copies);
}

/* For devices_hold_up(). By default a driver puts streams on 8 queues, so a stream that is held up may hold up others,
 * and it loads kernels when they are first launched, for which it may wait until the device has no other work. A
 * driver reads this when it starts. */
static void set_up_real(void) {
    (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    (void)setenv("CUDA_MODULE_LOADING", "EAGER", 1);
}

void devices_open(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const bool real = library && !look_up(library, "fake_cuda_look");
    if (real)
        set_up_real();
    if ((real ? find(library, "cuStreamWaitValue32_v2", &wait_for_value) : find_all()) &&
        find_captures(library))
        return;
    (void)fprintf(stderr, "neither a CUDA driver nor the stand-in for one is found: %s\n", dlerror());
    exit(1);
}

bool devices_present(void) {
    return kvf_device_image_count > 0 && find_all();
}

bool devices_are_real(void) {
    return wait_for_value != NULL;
}

uint32_t devices_number(uint32_t wanted) {
    const kvf_cuda *cuda;
    assert_int_equal(kvf_cuda_find(&cuda), KVF_OK);
    return wanted % cuda->device_count;
}

/* ---- memory, and copies of it ------------------------------------------------------------------------ */

/* Finds the memory whose copy is at `seen`; NULL: there is none, so the host sees the memory itself. */
static const device_block *block_at(const void *seen) {
    for (size_t i = 0; i < block_count; i++)
        if (blocks[i].copy && (uintptr_t)seen - (uintptr_t)blocks[i].copy < blocks[i].bytes)
            return &blocks[i];
    return NULL;
}

/* Copies on a stream of the device for that alone, which waits for no other, and is kept. */
static void carry(const void *seen, bool to_device) {
    static CUstream streams[KVF_CUDA_DEVICES_MAX];
    const device_block *block = block_at(seen);
    const kvf_cuda *cuda;
    if (!block)
        return;
    assert_int_equal(kvf_cuda_enter(block->device, &cuda), KVF_OK);
    if (!streams[block->device])
        assert_int_equal(cuda->cuStreamCreateWithPriority(&streams[block->device], CU_STREAM_NON_BLOCKING, 0),
                         0);
    CUstream stream = streams[block->device];
    if (to_device)
        assert_int_equal(cuda->cuMemcpyHtoDAsync_v2(block->address, block->copy, block->bytes, stream), 0);
    else
        assert_int_equal(cuda->cuMemcpyDtoHAsync_v2(block->copy, block->address, block->bytes, stream), 0);
    assert_int_equal(cuda->cuStreamSynchronize(stream), 0);
    kvf_cuda_leave(cuda);
}

void devices_get(const void *seen) {
    carry(seen, false);
}

void devices_put(const void *seen) {
    carry(seen, true);
}

void device_show(uint32_t device, CUdeviceptr address, uint64_t bytes) {
    device_block made = {.address = address, .bytes = bytes, .device = device};
    assert_true(block_count < sizeof blocks / sizeof *blocks);
    if (devices_are_real()) {
        made.copy = malloc(bytes + 1); /* also of 0 bytes, which no device gives */
        assert_non_null(made.copy);
    }
    blocks[block_count++] = made;
}

static void show_zeroed(uint32_t device, CUdeviceptr address, uint64_t bytes) {
    device_show(device, address, bytes);
    void *seen = devices_look(address);
    memset(seen, 0, bytes);
    devices_put(seen);
}

void device_hide(CUdeviceptr address) {
    size_t i = 0;
    while (i < block_count && blocks[i].address != address)
        i++;
    assert_true(i < block_count);
    free(blocks[i].copy);
    blocks[i] = blocks[--block_count];
}

CUdeviceptr device_room(uint32_t device, uint64_t bytes) {
    const uint32_t number = devices_number(device);
    const kvf_cuda *cuda;
    CUdeviceptr made = 0;
    assert_int_equal(kvf_cuda_enter(number, &cuda), KVF_OK);
    assert_int_equal(cuda->cuMemAlloc_v2(&made, bytes), 0);
    kvf_cuda_leave(cuda);
    show_zeroed(number, made, bytes);
    return made;
}

void device_room_free(CUdeviceptr address) {
    const kvf_cuda *cuda;
    device_hide(address);
    assert_int_equal(kvf_cuda_enter(0, &cuda), KVF_OK);
    assert_int_equal(cuda->cuMemFree_v2(address), 0);
    kvf_cuda_leave(cuda);
}

/* ---- memory in segments --------------------------------------------------------------------------- */

_Static_assert(SEGMENT == FAKE_SEGMENT, "the stand-in maps such segments");

static CUmemAllocationProp properties_of(uint32_t device, int types) {
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .requestedHandleTypes = types,
                                 .location = {CU_MEM_LOCATION_TYPE_DEVICE, (int)device}};
}

uint64_t devices_segment(void) {
    const CUmemAllocationProp properties = properties_of(0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    const kvf_cuda *cuda;
    size_t bytes = 0;
    assert_int_equal(kvf_cuda_find(&cuda), KVF_OK);
    assert_int_equal(
        cuda->cuMemGetAllocationGranularity(&bytes, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM), 0);
    return bytes;
}

static uint64_t segment_bytes(uint32_t i) {
    return (uint64_t)(i % 3 + 1) * devices_segment();
}

static uint64_t all_segments(uint64_t bytes) {
    uint64_t all = 0;
    for (uint32_t i = 0; all < bytes; i++)
        all += segment_bytes(i);
    return all;
}

CUdeviceptr device_segments(uint32_t device, uint64_t bytes, int types) {
    const uint32_t number = devices_number(device);
    const CUmemAllocationProp properties = properties_of(number, types);
    const CUmemAccessDesc access = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const uint64_t all = all_segments(bytes);
    const kvf_cuda *cuda;
    CUdeviceptr made = 0;
    assert_int_equal(kvf_cuda_enter(number, &cuda), KVF_OK);
    assert_int_equal(cuda->cuMemAddressReserve(&made, all, 0, 0, 0), 0);
    uint64_t at = 0;
    for (uint32_t i = 0; at < all; at += segment_bytes(i++)) {
        CUmemGenericAllocationHandle handle = 0;
        assert_int_equal(cuda->cuMemCreate(&handle, segment_bytes(i), &properties, 0), 0);
        assert_int_equal(cuda->cuMemMap(made + at, segment_bytes(i), 0, handle, 0), 0);
        assert_int_equal(cuda->cuMemRelease(handle), 0);
    }
    assert_int_equal(cuda->cuMemSetAccess(made, all, &access, 1), 0);
    kvf_cuda_leave(cuda);
    show_zeroed(number, made, all);
    return made;
}

void device_segments_free(CUdeviceptr address, uint64_t bytes) {
    const kvf_cuda *cuda;
    device_hide(address);
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

kvf_memory device_memory_first(uint64_t bytes, void **seen) {
    return device_memory(0, bytes, seen);
}

kvf_memory device_memory_second(uint64_t bytes, void **seen) {
    return device_memory(1, bytes, seen);
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

/* A real stream is held up until the number at `gate`, in memory of the host, has reached one of its own. */
static uint32_t *gate;
static uint32_t last_wanted;

static void wait_at_gate(const kvf_cuda *cuda, CUstream stream) {
    enum { AT_LEAST = 0 };
    if (!gate) {
        void *made = NULL;
        assert_int_equal(
            cuda->cuMemHostAlloc(&made, sizeof *gate, CU_MEMHOST_PORTABLE | CU_MEMHOST_DEVICEMAP), 0);
        gate = made;
        *gate = 0;
    }
    assert_int_equal(wait_for_value(stream, (CUdeviceptr)(uintptr_t)gate, ++last_wanted, AT_LEAST), 0);
}

#define HOUR_NS 3600000000000ull

void devices_hold_up(const kvf_cuda *cuda, CUstream stream) {
    devices_delay(HOUR_NS);
    if (wait_for_value)
        wait_at_gate(cuda, stream);
}

void devices_hasten(void) {
    if (fake.hasten)
        fake.hasten();
    if (gate)
        __atomic_store_n(gate, last_wanted, __ATOMIC_RELEASE);
}

void devices_capture(CUstream stream) {
    enum { GLOBAL = 0 };
    assert_int_equal(begin_capture(stream, GLOBAL), 0);
}

int devices_capture_end(CUstream stream) {
    void *graph = NULL;
    const int result = end_capture(stream, &graph);
    if (graph)
        assert_int_equal(destroy_graph(graph), 0);
    return result;
}

void devices_fail(const char *function, int result, unsigned times) {
    if (fake.refuse)
        fake.refuse(function, result, times);
}

void devices_fail_after(unsigned calls) {
    if (fake.refuse_after)
        fake.refuse_after(calls);
}

void devices_stick(int result) {
    if (fake.stick)
        fake.stick(result);
}

void *devices_look(uint64_t address) {
    if (fake.look)
        return fake.look(address);
    for (size_t i = 0; i < block_count; i++)
        if (address - blocks[i].address < blocks[i].bytes)
            return blocks[i].copy + (address - blocks[i].address);
    return NULL;
}

void devices_pooled(bool pooled) {
    if (fake.pooled)
        fake.pooled(pooled);
}

uint32_t devices_grid(void) {
    return fake.grid ? fake.grid() : 0;
}

uint32_t devices_copies(void) {
    return fake.copies ? fake.copies() : 0;
}

uint32_t devices_launches(void) {
    return fake.launches ? fake.launches() : 0;
}
