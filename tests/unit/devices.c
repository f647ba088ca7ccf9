#include "devices.h"

#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "cuda/device_image.h"
#include "fake_cuda.h"

#define MOST 256u

static struct {
    void (*delay)(uint64_t ns);
    void (*hasten)(void);
    void *(*look)(uint64_t address);
    size_t (*left)(void);
    void (*stick)(int result);
    void (*strict)(int strict);
    unsigned (*waiting)(void);
    void (*fail_nth)(unsigned number, int result);
    const char *(*failed)(void);
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
    return find(library, "fake_cuda_delay", &fake.delay) && find(library, "fake_cuda_hasten", &fake.hasten) &&
           find(library, "fake_cuda_look", &fake.look) && find(library, "fake_cuda_left", &fake.left) &&
           find(library, "fake_cuda_stick", &fake.stick) && find(library, "fake_cuda_strict", &fake.strict) &&
           find(library, "fake_cuda_waiting", &fake.waiting) &&
           find(library, "fake_cuda_fail_nth", &fake.fail_nth) &&
           find(library, "fake_cuda_failed", &fake.failed);
}

/* ---- calls of the driver ----------------------------------------------------------------------------- */

/* kvferry and tests call the driver through one table. Here its entries are replaced: some count their calls, and that
 * of devices_fail() refuses them. So both work over any driver. */
static kvf_cuda *table;
static kvf_cuda own; /* the table as kvferry has filled it */
static _Atomic uint32_t launches, copies, grid;
static _Atomic uint32_t good_copies =
    UINT32_MAX; /* before one is refused; UINT32_MAX: none is, also after it was */
static int copy_result;

static CUresult count_launch(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                             unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                             CUstream stream, void **arguments, void **extra) {
    const CUresult result = own.cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                                               shared_bytes, stream, arguments, extra);
    if (!result) {
        grid = grid_x;
        launches++;
    }
    return result;
}

static CUresult count_copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    const bool refused = good_copies == 0;
    good_copies -= good_copies < UINT32_MAX;
    const CUresult result = refused ? copy_result : own.cuMemcpyAsync(to, from, bytes, stream);
    if (!result)
        copies++;
    return result;
}

void devices_fail_copy(uint32_t good, int result) {
    good_copies = good;
    copy_result = result;
}

uint32_t devices_grid(void) {
    return grid;
}

uint32_t devices_launches(void) {
    return launches;
}

uint32_t devices_copies(void) {
    return copies;
}

typedef void (*entry)(void); /* any function of the table */

static struct {
    pthread_mutex_t lock;
    size_t at;     /* of the entry that refuses, in the table */
    entry counted; /* what belongs there; NULL: no entry refuses */
    int result;
    unsigned times;
} refusal = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void end_refusal(void) {
    if (refusal.counted)
        memcpy((char *)table + refusal.at, &refusal.counted, sizeof(entry));
    refusal.counted = NULL;
}

static int refuse(void) {
    (void)pthread_mutex_lock(&refusal.lock);
    const int result = refusal.result;
    if (--refusal.times == 0)
        end_refusal();
    (void)pthread_mutex_unlock(&refusal.lock);
    return result;
}

/* For each function of the driver one with the same arguments that refuses. */
/* NOLINTBEGIN(misc-unused-parameters) */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define REFUSE(name, arguments)                                                                              \
    static CUresult refuse_##name arguments {                                                                \
        return refuse();                                                                                     \
    }
KVF_CUDA_FUNCTIONS(REFUSE)
#undef REFUSE
#pragma GCC diagnostic pop
/* NOLINTEND(misc-unused-parameters) */

static const struct {
    const char *name;
    size_t at;
    entry refuses;
} functions[] = {
#define ENTRY(name, arguments) {#name, offsetof(kvf_cuda, name), (entry)refuse_##name},
    KVF_CUDA_FUNCTIONS(ENTRY)
#undef ENTRY
};

void devices_fail(const char *function, int result, unsigned times) {
    const size_t count = sizeof functions / sizeof *functions;
    size_t i = 0;
    (void)pthread_mutex_lock(&refusal.lock);
    end_refusal();
    while (i < count && strcmp(functions[i].name, function) != 0)
        i++;
    if (i < count && times > 0) {
        refusal.at = functions[i].at;
        refusal.result = result;
        refusal.times = times;
        memcpy(&refusal.counted, (char *)table + refusal.at, sizeof(entry));
        memcpy((char *)table + refusal.at, &functions[i].refuses, sizeof(entry));
    }
    (void)pthread_mutex_unlock(&refusal.lock);
    assert_true(i < count || times == 0);
}

void devices_fail_nth(unsigned number, int result) {
    fake.fail_nth(number, result);
}

const char *devices_failed(void) {
    return fake.failed();
}

/* Before any other thread calls the driver. It is not started, so that children of fork() can use it. */
static bool take_table(void) {
    const kvf_cuda *found;
    if (kvf_cuda_load(&found))
        return false;
    table = (kvf_cuda *)(uintptr_t)found; /* const only for those who call through it */
    own = *table;
    table->cuLaunchKernel = count_launch;
    table->cuMemcpyAsync = count_copy;
    return true;
}

/* ---- finding the driver ------------------------------------------------------------------------------ */

/* For devices_hold_up(). By default a driver puts streams on 8 queues, so a stream that is held up may hold up others,
 * and it loads kernels when they are first launched, for which it may wait until the device has no other work. A
 * driver reads this when it starts. */
static void set_up_real(void) {
    (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    (void)setenv("CUDA_MODULE_LOADING", "EAGER", 1);
}

void devices_open(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const bool real = library && (getenv("KVF_TEST_DEVICES_AS_REAL") || !look_up(library, "fake_cuda_look"));
    if (real)
        set_up_real();
    if (!(real ? find(library, "cuStreamWaitValue32_v2", &wait_for_value) : find_all()) ||
        !find_captures(library)) {
        (void)fprintf(stderr, "neither a CUDA driver nor the stand-in for one is found: %s\n", dlerror());
        exit(1);
    }
    if (!take_table()) {
        (void)fprintf(stderr, "%s\n", kvf_error_detail());
        exit(1);
    }
}

bool devices_present(void) {
    return kvf_device_image_count > 0 && find_all();
}

bool devices_are_real(void) {
    return wait_for_value != NULL;
}

static bool reach_each_other(const kvf_cuda *cuda, uint32_t one, uint32_t other) {
    return !kvf_cuda_check_reach(cuda, one, other) && !kvf_cuda_check_reach(cuda, other, one);
}

/* Whether devices reach each other is not for a test to say, unless they are stand-ins. */
uint32_t devices_number(uint32_t wanted) {
    const kvf_cuda *cuda;
    assert_int_equal(kvf_cuda_find(&cuda), KVF_OK);
    const uint32_t number = wanted % cuda->device_count;
    return !devices_are_real() || reach_each_other(cuda, 0, number) ? number : 0;
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

uint32_t device_hide(CUdeviceptr address) {
    size_t i = 0;
    while (i < block_count && blocks[i].address != address)
        i++;
    assert_true(i < block_count);
    const uint32_t device = blocks[i].device;
    free(blocks[i].copy);
    blocks[i] = blocks[--block_count];
    return device;
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
    assert_int_equal(kvf_cuda_enter(device_hide(address), &cuda), KVF_OK);
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
    assert_int_equal(kvf_cuda_enter(device_hide(address), &cuda), KVF_OK);
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
            cuda->cuMemHostAlloc(&made, sizeof *gate, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
            0);
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

uint32_t devices_waiting(void) {
    return fake.waiting ? fake.waiting() : 0;
}

void devices_strict(bool strict) {
    if (fake.strict)
        fake.strict(strict);
}
