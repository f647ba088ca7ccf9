/*
 * A stand-in for the CUDA driver: a library named libcuda.so.1 for machines without devices.
 *
 * "Device" memory is a file in memory, mapped twice: without any right at the address that callers are given, so that a
 * host which follows it crashes, and somewhere else where only this library reads and writes. Other processes map it by
 * handles. Streams are lists of what is to be done, and nothing of it is done before somebody asks, waits, or its delay is
 * over: memory of the host is read when a copy runs, not when it is put on a stream, so a buffer that is used again too
 * early spoils bytes. Kernels are the library's own, run thread by thread.
 *
 * The environment's FAKE_CUDA_DEVICES says how many devices there are (2), FAKE_CUDA_VERSION for which CUDA the driver is.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "cuda/driver.h"
#include "fake_cuda.h"

enum {
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
};

#define MEMORY_OF_DEVICE (1ull << 30)
#define RANGES 4096u
#define DEPTH 16u

/* Each as kvferry declares it. */
#define DECLARE(name, arguments) __attribute__((visibility("default"))) CUresult name arguments;
KVF_CUDA_FUNCTIONS(DECLARE)
#undef DECLARE

/* ---- state -------------------------------------------------------------------------------------- */

typedef enum range_kind { FREE, DEVICE, MAPPED, HOST, PINNED } range_kind;

/* Memory that devices reach. */
typedef struct range {
    range_kind kind;
    uint64_t address;
    unsigned char *shadow; /* what is there */
    size_t bytes;
    int file, device;
} range;

typedef enum action_kind { COPY, FILL, LAUNCH, RECORD, WAIT, RELEASE } action_kind;

struct CUevent_st {
    unsigned pending; /* records on streams that have not been reached */
};

struct CUfunc_st {
    const char *name;
    void (*run)(uint64_t boxes, uint32_t count, uint32_t tiles, uint32_t blocks);
};

typedef struct action {
    action_kind kind;
    uint64_t due_ns, to, from;
    size_t bytes;
    unsigned char value;
    CUevent event;
    CUfunction function;
    uint32_t count, tiles, blocks;
    struct action *next;
} action;

struct CUstream_st {
    action *first, **last;
    struct CUstream_st *next;
};

struct CUctx_st {
    int device;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static range ranges[RANGES];
static struct CUstream_st *streams;
static struct CUctx_st contexts[KVF_CUDA_DEVICES_MAX];
static size_t left;
static uint64_t delay_ns;
static int stuck;
static char failing[64];
static int failing_result;
static unsigned failing_times;
static _Thread_local CUcontext current[DEPTH];
static _Thread_local unsigned depth;

/* ---- what tests say ----------------------------------------------------------------------------- */

void fake_cuda_fail(const char *function, int result, unsigned times) {
    (void)snprintf(failing, sizeof failing, "%s", function);
    failing_result = result;
    failing_times = times;
}

void fake_cuda_delay(uint64_t ns) {
    delay_ns = ns;
}

size_t fake_cuda_left(void) {
    return left;
}

void fake_cuda_stick(int result) {
    stuck = result;
}

static CUresult told(const char *function) {
    if (failing_times > 0 && strcmp(failing, function) == 0) {
        failing_times--;
        return failing_result;
    }
    return 0;
}

/* What every call that needs a context begins with. */
#define BEGIN                                                                                                \
    do {                                                                                                     \
        const CUresult told_result = told(__func__);                                                         \
        if (told_result)                                                                                     \
            return told_result;                                                                              \
        if (stuck)                                                                                           \
            return stuck;                                                                                    \
        if (depth == 0)                                                                                      \
            return INVALID_CONTEXT;                                                                          \
    } while (0)

/* ---- memory ------------------------------------------------------------------------------------- */

static range *range_at(uint64_t address) {
    for (size_t i = 0; i < RANGES; i++)
        if (ranges[i].kind != FREE && address >= ranges[i].address &&
            address - ranges[i].address < ranges[i].bytes)
            return &ranges[i];
    return NULL;
}

void *fake_cuda_look(uint64_t address) {
    const range *found = range_at(address);
    return found ? found->shadow + (address - found->address) : NULL;
}

uint64_t fake_cuda_address(const void *found) {
    const unsigned char *at = found;
    for (size_t i = 0; i < RANGES; i++)
        if (ranges[i].kind != FREE && at >= ranges[i].shadow && at < ranges[i].shadow + ranges[i].bytes)
            return ranges[i].address + (uint64_t)(at - ranges[i].shadow);
    return 0;
}

/* Of a kernel: a place that is nowhere ends the context. */
static void *reach(uint64_t address) {
    static _Alignas(64) unsigned char nowhere[64];
    void *found = fake_cuda_look(address);
    if (!found)
        stuck = ILLEGAL_ADDRESS;
    return found ? found : nowhere;
}

static range *new_range(void) {
    for (size_t i = 0; i < RANGES; i++)
        if (ranges[i].kind == FREE)
            return &ranges[i];
    return NULL;
}

/* Maps a file twice, see above; takes the file. */
static CUresult map(int file, size_t bytes, range_kind kind, CUdeviceptr *out) {
    range *made = new_range();
    void *address = mmap(NULL, bytes, PROT_NONE, MAP_SHARED, file, 0);
    void *shadow = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (!made || address == MAP_FAILED || shadow == MAP_FAILED) {
        (void)close(file);
        return OUT_OF_MEMORY;
    }
    *made = (range){kind, (uint64_t)(uintptr_t)address, shadow, bytes, file, current[depth - 1]->device};
    left++;
    *out = made->address;
    return 0;
}

static CUresult unmap(uint64_t address, range_kind kind) {
    range *found = range_at(address);
    if (!found || found->address != address || found->kind != kind)
        return INVALID_VALUE;
    (void)munmap((void *)(uintptr_t)found->address, found->bytes);
    (void)munmap(found->shadow, found->bytes);
    (void)close(found->file);
    found->kind = FREE;
    left--;
    return 0;
}

static CUresult allocate(CUdeviceptr *address, size_t bytes) {
    const int file = bytes > 0 && bytes <= MEMORY_OF_DEVICE ? memfd_create("fake_cuda", MFD_CLOEXEC) : -1;
    if (file < 0 || ftruncate(file, (off_t)bytes) != 0)
        return bytes == 0 ? INVALID_VALUE : OUT_OF_MEMORY;
    return map(file, bytes, DEVICE, address);
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    BEGIN;
    (void)pthread_mutex_lock(&lock);
    const CUresult result = allocate(address, bytes);
    (void)pthread_mutex_unlock(&lock);
    return result;
}

static CUresult note_host(void *address, size_t bytes, range_kind kind) {
    range *made = new_range();
    if (range_at((uint64_t)(uintptr_t)address))
        return ALREADY_REGISTERED;
    if (!made)
        return OUT_OF_MEMORY;
    *made = (range){kind, (uint64_t)(uintptr_t)address, address, bytes, -1, -1};
    left++;
    return 0;
}

CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    BEGIN;
    (void)flags;
    (void)pthread_mutex_lock(&lock);
    *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    const CUresult result = *address ? note_host(*address, bytes, HOST) : OUT_OF_MEMORY;
    (void)pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    BEGIN;
    (void)flags;
    (void)pthread_mutex_lock(&lock);
    const CUresult result = note_host(address, bytes, PINNED);
    (void)pthread_mutex_unlock(&lock);
    return result;
}

static CUresult forget_host(void *address, range_kind kind) {
    range *found = range_at((uint64_t)(uintptr_t)address);
    if (!found || found->kind != kind || found->address != (uint64_t)(uintptr_t)address)
        return kind == HOST ? INVALID_VALUE : NOT_REGISTERED;
    found->kind = FREE;
    left--;
    return 0;
}

CUresult cuMemHostUnregister(void *address) {
    BEGIN;
    (void)pthread_mutex_lock(&lock);
    const CUresult result = forget_host(address, PINNED);
    (void)pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemFreeHost(void *address) {
    BEGIN;
    (void)pthread_mutex_lock(&lock);
    const CUresult result = forget_host(address, HOST);
    if (result == 0)
        free(address);
    (void)pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) {
    BEGIN;
    (void)pthread_mutex_lock(&lock);
    const range *found = range_at(address);
    const bool of_device = found && (found->kind == DEVICE || found->kind == MAPPED);
    const int known = attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? (of_device ? CU_MEMORYTYPE_DEVICE : 1)
                                                                    : (found ? found->device : -1);
    (void)pthread_mutex_unlock(&lock);
    if (!found)
        return INVALID_VALUE;
    *(int *)value = known;
    return 0;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    BEGIN;
    (void)pthread_mutex_lock(&lock);
    const range *found = range_at(address);
    if (found) {
        *base = found->address;
        *bytes = found->bytes;
    }
    (void)pthread_mutex_unlock(&lock);
    return found ? 0 : INVALID_VALUE;
}

/* ---- memory of other processes ------------------------------------------------------------------ */

typedef struct handle {
    char file[32];
    uint64_t bytes;
} handle;

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address) {
    BEGIN;
    (void)pthread_mutex_lock(&lock);
    const range *found = range_at(address);
    const bool good = found && found->kind == DEVICE;
    handle made = {.bytes = good ? found->bytes : 0};
    if (good)
        (void)snprintf(made.file, sizeof made.file, "/proc/%d/fd/%d", (int)getpid(), found->file);
    (void)pthread_mutex_unlock(&lock);
    memset(out, 0, sizeof *out);
    memcpy(out, &made, sizeof made);
    return good ? 0 : INVALID_VALUE;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle given, unsigned flags) {
    BEGIN;
    (void)flags;
    handle from;
    memcpy(&from, &given, sizeof from);
    from.file[sizeof from.file - 1] = '\0';
    FILE *file = from.bytes > 0 && strncmp(from.file, "/proc/", 6) == 0 ? fopen(from.file, "r+e") : NULL;
    if (!file)
        return INVALID_VALUE;
    (void)pthread_mutex_lock(&lock);
    const CUresult result = map(dup(fileno(file)), from.bytes, MAPPED, address);
    (void)pthread_mutex_unlock(&lock);
    (void)fclose(file);
    return result;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    BEGIN;
    (void)pthread_mutex_lock(&lock);
    const CUresult result = unmap(address, MAPPED);
    (void)pthread_mutex_unlock(&lock);
    return result;
}

/* ---- kernels ------------------------------------------------------------------------------------ */

#define KVF_DEVICE static inline
#define KVF_UNROLL
#define KVF_REACH(address) reach(address)
#include "cuda/kernel_move.h"

static void move_cells(uint64_t boxes, uint32_t count, uint32_t tiles, bool convert, uint32_t blocks) {
    const kvf_cuda_box *given = reach(boxes);
    for (uint32_t block = 0; block < blocks && !stuck; block++)
        for (uint32_t thread = 0; thread < KVF_TILE_THREADS && !stuck; thread++)
            kvf_move_thread(given, count, tiles, convert, block, blocks, thread);
}

static void copy_cells(uint64_t boxes, uint32_t count, uint32_t tiles, uint32_t blocks) {
    move_cells(boxes, count, tiles, false, blocks);
}

static void convert_cells(uint64_t boxes, uint32_t count, uint32_t tiles, uint32_t blocks) {
    move_cells(boxes, count, tiles, true, blocks);
}

static struct CUfunc_st kernels[] = {{"kvf_copy_cells", copy_cells}, {"kvf_convert_cells", convert_cells}};

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    BEGIN;
    static int loaded;
    /* Machine code is an ELF file, and PTX a text that begins with a comment. */
    if (memcmp(image, "\177ELF", 4) != 0 && memcmp(image, "//", 2) != 0)
        return INVALID_IMAGE;
    *module = (CUmodule)(void *)&loaded;
    left++;
    return 0;
}

CUresult cuModuleUnload(CUmodule module) {
    BEGIN;
    (void)module;
    left--;
    return 0;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    BEGIN;
    (void)module;
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (strcmp(kernels[i].name, name) == 0) {
            *function = &kernels[i];
            return 0;
        }
    return NOT_FOUND;
}

/* ---- streams ------------------------------------------------------------------------------------ */

static uint64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void copy(const action *todo) {
    const range *from = range_at(todo->from), *to = range_at(todo->to);
    /* Memory of the host that the driver does not know may be copied, too. */
    const void *source = from ? fake_cuda_look(todo->from) : (const void *)(uintptr_t)todo->from;
    void *target = to ? fake_cuda_look(todo->to) : (void *)(uintptr_t)todo->to;
    if ((from && todo->from + todo->bytes > from->address + from->bytes) ||
        (to && todo->to + todo->bytes > to->address + to->bytes))
        stuck = ILLEGAL_ADDRESS;
    else
        memcpy(target, source, todo->bytes);
}

/* Does the first thing of a stream; false: it cannot be done yet. */
static bool step(CUstream stream, uint64_t now) {
    action *todo = stream->first;
    if (!todo || todo->due_ns > now || (todo->kind == WAIT && todo->event->pending > 0))
        return false;
    if (!stuck) {
        switch (todo->kind) {
        case COPY:
            copy(todo);
            break;
        case FILL:
            memset(reach(todo->to), todo->value, todo->bytes);
            break;
        case LAUNCH:
            todo->function->run(todo->from, todo->count, todo->tiles, todo->blocks);
            break;
        case RELEASE:
            (void)unmap(todo->to, DEVICE);
            break;
        case RECORD:
        case WAIT:
            break;
        }
    }
    if (todo->kind == RECORD)
        todo->event->pending--;
    stream->first = todo->next;
    if (!stream->first)
        stream->last = &stream->first;
    free(todo);
    return true;
}

static void advance(void) {
    const uint64_t now = now_ns();
    for (bool moved = true; moved;) {
        moved = false;
        for (CUstream at = streams; at; at = at->next)
            moved |= step(at, now);
    }
}

static CUresult put(CUstream stream, action given) {
    action *made = malloc(sizeof *made);
    if (!made)
        return OUT_OF_MEMORY;
    (void)pthread_mutex_lock(&lock);
    advance();
    given.due_ns = now_ns() + delay_ns;
    given.next = NULL;
    *made = given;
    if (given.kind == RECORD)
        given.event->pending++;
    *stream->last = made;
    stream->last = &made->next;
    (void)pthread_mutex_unlock(&lock);
    return 0;
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    BEGIN;
    (void)flags;
    if (priority > 0 || priority < -5)
        return INVALID_VALUE;
    CUstream made = calloc(1, sizeof *made);
    if (!made)
        return OUT_OF_MEMORY;
    made->last = &made->first;
    (void)pthread_mutex_lock(&lock);
    made->next = streams;
    streams = made;
    left++;
    (void)pthread_mutex_unlock(&lock);
    *stream = made;
    return 0;
}

CUresult cuStreamSynchronize(CUstream stream) {
    BEGIN;
    for (;;) {
        (void)pthread_mutex_lock(&lock);
        advance();
        const bool done = !stream->first;
        (void)pthread_mutex_unlock(&lock);
        if (done)
            return stuck;
        const struct timespec pause = {.tv_nsec = 100000};
        (void)nanosleep(&pause, NULL);
    }
}

/* As the driver: what is on the stream is still done. */
CUresult cuStreamDestroy_v2(CUstream stream) {
    const CUresult result = cuStreamSynchronize(stream);
    if (result)
        return result;
    (void)pthread_mutex_lock(&lock);
    CUstream *at = &streams;
    while (*at != stream)
        at = &(*at)->next;
    *at = stream->next;
    left--;
    (void)pthread_mutex_unlock(&lock);
    free(stream);
    return 0;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    BEGIN;
    (void)flags;
    return put(stream, (action){.kind = WAIT, .event = event});
}

CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream) {
    BEGIN;
    (void)stream;
    return cuMemAlloc_v2(address, bytes);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    BEGIN;
    return put(stream, (action){.kind = RELEASE, .to = address});
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    BEGIN;
    (void)pthread_mutex_lock(&lock);
    advance();
    const CUresult result = unmap(address, DEVICE);
    (void)pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, CUstream stream) {
    BEGIN;
    return put(stream, (action){.kind = FILL, .to = address, .value = value, .bytes = count});
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    BEGIN;
    return put(stream, (action){.kind = COPY, .to = to, .from = (uint64_t)(uintptr_t)from, .bytes = bytes});
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    BEGIN;
    return put(stream, (action){.kind = COPY, .to = (uint64_t)(uintptr_t)to, .from = from, .bytes = bytes});
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    BEGIN;
    return put(stream, (action){.kind = COPY, .to = to, .from = from, .bytes = bytes});
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream stream, void **arguments, void **extra) {
    BEGIN;
    (void)shared_bytes;
    if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x != KVF_TILE_THREADS || block_y != 1 ||
        block_z != 1 || extra)
        return INVALID_VALUE;
    return put(stream, (action){.kind = LAUNCH,
                                .function = function,
                                .from = *(uint64_t *)arguments[0],
                                .count = *(uint32_t *)arguments[1],
                                .tiles = *(uint32_t *)arguments[2],
                                .blocks = grid_x});
}

/* ---- events ------------------------------------------------------------------------------------- */

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    BEGIN;
    (void)flags;
    *event = calloc(1, sizeof **event);
    left += *event != NULL;
    return *event ? 0 : OUT_OF_MEMORY;
}

CUresult cuEventDestroy_v2(CUevent event) {
    BEGIN;
    free(event);
    left--;
    return 0;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    BEGIN;
    return put(stream, (action){.kind = RECORD, .event = event});
}

CUresult cuEventQuery(CUevent event) {
    BEGIN;
    (void)pthread_mutex_lock(&lock);
    advance();
    const bool pending = event->pending > 0;
    (void)pthread_mutex_unlock(&lock);
    return stuck ? stuck : pending ? CUDA_NOT_READY : 0;
}

/* ---- devices and contexts ----------------------------------------------------------------------- */

static int number_from(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? (int)strtol(text, NULL, 10) : otherwise;
}

CUresult cuDriverGetVersion(int *version) {
    *version = number_from("FAKE_CUDA_VERSION", 12080);
    return told(__func__);
}

CUresult cuInit(unsigned flags) {
    (void)flags;
    return told(__func__);
}

CUresult cuGetErrorName(CUresult result, const char **text) {
    *text = result == OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
            : result == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                        : "CUDA_ERROR_OF_THE_STAND_IN";
    return 0;
}

CUresult cuGetErrorString(CUresult result, const char **text) {
    *text = result == OUT_OF_MEMORY     ? "out of memory"
            : result == ILLEGAL_ADDRESS ? "an illegal memory access was encountered"
                                        : "something else";
    return 0;
}

CUresult cuDeviceGetCount(int *count) {
    *count = number_from("FAKE_CUDA_DEVICES", 2);
    return told(__func__);
}

CUresult cuDeviceGet(CUdevice *device, int number) {
    int count = 0;
    (void)cuDeviceGetCount(&count);
    *device = number;
    return number < count ? 0 : INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *name, int bytes, CUdevice device) {
    (void)snprintf(name, (size_t)bytes, "stand-in %d", device);
    return 0;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    (void)device;
    *bytes = MEMORY_OF_DEVICE;
    return told(__func__);
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    (void)device;
    *value = attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT       ? 4
             : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? number_from("FAKE_CUDA_MAJOR", 9)
                                                                         : 0;
    return 0;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    contexts[device].device = device;
    *context = &contexts[device];
    return told(__func__);
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (depth == DEPTH)
        return OUT_OF_MEMORY;
    current[depth++] = context;
    return told(__func__);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (depth == 0)
        return INVALID_CONTEXT;
    *context = current[--depth];
    return 0;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    BEGIN;
    *least = 0;
    *greatest = -5;
    return 0;
}
