/* Streams and events of the stand-in, and the kernels that run on them. */
#include <stdlib.h>
#include <time.h>

#include "fake_cuda_inside.h"

typedef enum action_kind { COPY, FILL, LAUNCH, RECORD, WAIT, WAIT_VALUE, RELEASE } action_kind;

struct CUevent_st {
    int device;
    uint64_t recorded, reached; /* records that were put on streams, and those that have run */
    unsigned waits;             /* for it, on streams */
    bool destroyed;             /* by its creator; it stays while a stream refers to it */
    bool captured;              /* its last record is a part of a graph */
};

struct CUfunc_st {
    const char *name;
    void (*run)(uint64_t boxes, uint32_t count, uint32_t tiles, uint32_t blocks);
    int device;
    _Atomic bool loaded;
};

#define KERNELS 4u

struct CUmod_st {
    struct CUfunc_st kernels[KERNELS];
};

typedef struct action {
    action_kind kind;
    uint64_t due_ns, number, to, from; /* numbered as they were put on streams */
    size_t bytes;
    unsigned char value;
    CUevent event;
    uint64_t record; /* WAIT: number of the event's record to wait for */
    uint32_t word;   /* WAIT_VALUE: what the word at `from` is waited to be */
    CUfunction function;
    uint32_t count, tiles, blocks;
    struct action *next;
} action;

/* As the driver numbers them. */
typedef enum capture { NO_CAPTURE, CAPTURED, SPOILT } capture;

struct CUstream_st {
    action *first, **last;
    capture capture;
    bool blocking;  /* it and the default stream wait for each other */
    bool destroyed; /* its actions still run */
    int device, priority;
    unsigned queue; /* of its device and priority */
    struct CUstream_st *next;
};

static struct CUstream_st *streams;
static unsigned streams_made;
static uint64_t actions_put;
static struct CUstream_st defaults[KVF_CUDA_DEVICES_MAX]; /* of devices: the stream whose handle is NULL */

/* For a call that a stream is given to. */
static CUstream stream_of(CUstream given) {
    const int device = fake_current[fake_depth - 1]->device;
    CUstream own = &defaults[device];
    if (given)
        return given;
    (void)pthread_mutex_lock(&fake.lock);
    if (!own->last) {
        *own = (struct CUstream_st){.last = &own->first, .device = device, .next = streams};
        streams = own;
    }
    (void)pthread_mutex_unlock(&fake.lock);
    return own;
}

/* ---- kernels ------------------------------------------------------------------------------------ */

#define KVF_DEVICE static inline
#define KVF_UNROLL
#define KVF_ROLL
#define KVF_READ(type, address) (*(const type *)fake_access(address, sizeof(type)))
#define KVF_LOAD KVF_READ
#define KVF_STORE(type, address, value) *(type *)fake_access(address, sizeof(type)) = (value)
#define KVF_CONSTANT static const
#define KVF_ADD_SUM(address, hash) *(uint64_t *)fake_access(address, sizeof(uint64_t)) += (hash)
#include "cuda/kernel_hash.h"

/* Changes a bit of what every FAKE_CUDA_SPOIL-th launch has moved. */
static void spoil(const kvf_cuda_box *box) {
    static int launches;
    const int every = fake_number("FAKE_CUDA_SPOIL", 0);
    if (every > 0 && ++launches % every == 0)
        *(uint8_t *)fake_reach(kvf_address(&box->to, 0, 0, 0), 1) ^= 1;
}

static void move_cells(uint64_t boxes, uint32_t count, uint32_t tiles, bool convert, uint32_t blocks) {
    const kvf_cuda_box *given = fake_reach(boxes, count * sizeof *given);
    for (uint32_t block = 0; block < blocks && !fake.stuck; block++)
        for (uint32_t thread = 0; thread < KVF_TILE_THREADS && !fake.stuck; thread++)
            kvf_move_thread(given, count, tiles, convert, block, blocks, thread);
    if (count > 0 && !fake.stuck)
        spoil(given);
}

static void copy_cells(uint64_t boxes, uint32_t count, uint32_t tiles, uint32_t blocks) {
    move_cells(boxes, count, tiles, false, blocks);
}

static void convert_cells(uint64_t boxes, uint32_t count, uint32_t tiles, uint32_t blocks) {
    move_cells(boxes, count, tiles, true, blocks);
}

static void hash(uint64_t boxes, uint32_t count, uint32_t tiles, bool convert, uint32_t blocks) {
    const kvf_cuda_box *given = fake_reach(boxes, count * sizeof *given);
    for (uint32_t block = 0; block < blocks && !fake.stuck; block++)
        for (uint32_t thread = 0; thread < KVF_TILE_THREADS && !fake.stuck; thread++)
            kvf_hash_thread(given, count, tiles, convert, block, blocks, thread);
}

static void hash_cells(uint64_t boxes, uint32_t count, uint32_t tiles, uint32_t blocks) {
    hash(boxes, count, tiles, false, blocks);
}

static void hash_converted_cells(uint64_t boxes, uint32_t count, uint32_t tiles, uint32_t blocks) {
    hash(boxes, count, tiles, true, blocks);
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    BEGIN;
    const int device = fake_current[fake_depth - 1]->device;
    fake_wait_for_streams();
    /* Machine code is an ELF file, and PTX a text that begins with a comment. */
    if (memcmp(image, "\177ELF", 4) != 0 && memcmp(image, "//", 2) != 0)
        return INVALID_IMAGE;
    *module = calloc(1, sizeof **module);
    if (!*module)
        return OUT_OF_MEMORY;
    **module = (struct CUmod_st){{{"kvf_copy_cells", copy_cells, device, false},
                                  {"kvf_convert_cells", convert_cells, device, false},
                                  {"kvf_hash_cells", hash_cells, device, false},
                                  {"kvf_hash_converted_cells", hash_converted_cells, device, false}}};
    fake.left++;
    return 0;
}

CUresult cuModuleUnload(CUmodule module) {
    BEGIN;
    fake_wait_for_streams();
    free(module);
    fake.left--;
    return 0;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    BEGIN;
    for (size_t i = 0; i < KERNELS; i++)
        if (strcmp(module->kernels[i].name, name) == 0) {
            *function = &module->kernels[i];
            return 0;
        }
    return NOT_FOUND;
}

/* By default the driver does this when a kernel is first launched. */
static void load(CUfunction function) {
    if (!function->loaded)
        fake_wait_for_streams();
    function->loaded = true;
}

CUresult cuFuncLoad(CUfunction function) {
    BEGIN;
    load(function);
    return 0;
}

/* ---- streams ------------------------------------------------------------------------------------ */

static uint64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Host memory that the driver does not know may be copied, too. */
static void copy(const action *todo) {
    const void *source =
        fake_knows(todo->from) ? fake_reach(todo->from, todo->bytes) : (const void *)(uintptr_t)todo->from;
    void *target = fake_knows(todo->to) ? fake_reach(todo->to, todo->bytes) : (void *)(uintptr_t)todo->to;
    if (!fake.stuck)
        memcpy(target, source, todo->bytes);
}

static void fill(const action *todo) {
    void *target = fake_reach(todo->to, todo->bytes);
    if (!fake.stuck)
        memset(target, todo->value, todo->bytes);
}

static void let_go(CUevent event) {
    if (event->destroyed && event->waits == 0 && event->reached == event->recorded)
        free(event);
}

static bool has_value(const action *todo) {
    const uint32_t *word = fake_reach(todo->from, sizeof *word);
    return (int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - todo->word) >= 0;
}

/* Whether another stream of its queue has something to do that was put there before. */
static bool is_behind_another(const struct CUstream_st *stream) {
    for (const struct CUstream_st *at = streams; at; at = at->next)
        if (at != stream && at->first && at->device == stream->device && at->priority == stream->priority &&
            at->queue == stream->queue && at->first->number < stream->first->number)
            return true;
    return false;
}

/* Runs the first action of a stream; false: it is not due yet. */
static bool step(CUstream stream, uint64_t now) {
    action *todo = stream->first;
    if (!todo || todo->due_ns > now || (todo->kind == WAIT && todo->event->reached < todo->record) ||
        (todo->kind == WAIT_VALUE && !fake.stuck && !has_value(todo)) || is_behind_another(stream))
        return false;
    fake.running = stream->device;
    if (!fake.stuck) {
        switch (todo->kind) {
        case COPY:
            copy(todo);
            break;
        case FILL:
            fill(todo);
            break;
        case LAUNCH:
            todo->function->run(todo->from, todo->count, todo->tiles, todo->blocks);
            break;
        case RELEASE:
            (void)fake_free(todo->to);
            break;
        case RECORD:
        case WAIT:
        case WAIT_VALUE:
            break;
        }
    }
    if (todo->kind == RECORD)
        todo->event->reached++;
    if (todo->kind == WAIT)
        todo->event->waits--;
    if (todo->event)
        let_go(todo->event);
    stream->first = todo->next;
    if (!stream->first)
        stream->last = &stream->first;
    free(todo);
    return true;
}

void fake_advance(void) {
    const uint64_t now = now_ns();
    for (bool moved = true; moved;) {
        moved = false;
        for (CUstream at = streams; at; at = at->next)
            moved |= step(at, now);
    }
    for (CUstream *at = &streams, gone; (gone = *at);) {
        if (!gone->destroyed || gone->first) {
            at = &gone->next;
            continue;
        }
        *at = gone->next;
        free(gone);
    }
}

void fake_cuda_hasten(void) {
    (void)pthread_mutex_lock(&fake.lock);
    for (CUstream at = streams; at; at = at->next)
        for (action *todo = at->first; todo; todo = todo->next)
            todo->due_ns = 0;
    fake_advance();
    (void)pthread_mutex_unlock(&fake.lock);
}

/* ---- captures of graphs ------------------------------------------------------------------------- */

static _Thread_local int mode_of_thread;

/* Marks all captures as spoilt; returns whether there was one. Needs the lock. */
static bool spoil_captures(void) {
    bool any = false;
    for (CUstream at = streams; at; at = at->next)
        if (at->capture == CAPTURED) {
            at->capture = SPOILT;
            any = true;
        }
    return any;
}

/* A call that no mode allows while something is captured. */
static CUresult forbidden(CUresult result) {
    (void)pthread_mutex_lock(&fake.lock);
    const bool any = spoil_captures();
    (void)pthread_mutex_unlock(&fake.lock);
    return any ? result : 0;
}

CUresult fake_unsafe(void) {
    return mode_of_thread == CU_STREAM_CAPTURE_MODE_RELAXED ? 0 : forbidden(CAPTURE_UNSUPPORTED);
}

CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    const int before = mode_of_thread;
    if (!fake.started)
        return CUDA_ERROR_NOT_INITIALIZED;
    mode_of_thread = *mode;
    *mode = before;
    return 0;
}

/* Found by name only: tests capture, and kvferry does not. Every mode is as 0, "global", is. */
__attribute__((visibility("default"))) CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
__attribute__((visibility("default"))) CUresult cuStreamEndCapture(CUstream stream, void **graph);
__attribute__((visibility("default"))) CUresult cuGraphDestroy(void *graph);

CUresult cuGraphDestroy(void *graph) {
    return graph ? INVALID_VALUE : 0;
}

CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
    BEGIN_PUT;
    (void)mode;
    if (!stream)
        return CAPTURE_UNSUPPORTED;
    stream->capture = CAPTURED;
    return 0;
}

CUresult cuStreamEndCapture(CUstream stream, void **graph) {
    BEGIN_PUT;
    CUresult result = stream->capture == SPOILT ? CAPTURE_INVALIDATED : 0;
    *graph = NULL;
    (void)pthread_mutex_lock(&fake.lock);
    stream->capture = NO_CAPTURE;
    for (CUstream at = streams; at; at = at->next) {
        if (at->capture == CAPTURED && !result)
            result = CAPTURE_UNJOINED;
        at->capture = NO_CAPTURE;
    }
    (void)pthread_mutex_unlock(&fake.lock);
    return result;
}

/* Whether the default stream would become a part of a graph, which it may not. */
static bool joins_capture(void) {
    bool any = false;
    (void)pthread_mutex_lock(&fake.lock);
    for (CUstream at = streams; at; at = at->next)
        any = any ||
              (at->blocking && at->capture == CAPTURED && at->device == fake_current[fake_depth - 1]->device);
    (void)pthread_mutex_unlock(&fake.lock);
    return any;
}

/* Whether an action becomes a part of a graph instead. A stream that waits for an event of a graph joins it. */
static bool is_captured(CUstream stream, const action *given) {
    if (given->kind == WAIT && given->event->captured)
        stream->capture = CAPTURED;
    if (given->kind == RECORD)
        given->event->captured = stream->capture != NO_CAPTURE;
    return stream->capture != NO_CAPTURE;
}

/* ---- actions ------------------------------------------------------------------------------------ */

static void pause_shortly(void) {
    const struct timespec pause = {.tv_nsec = 100000};
    (void)nanosleep(&pause, NULL);
}

static bool has_room(CUstream stream) {
    unsigned count = 0;
    for (const action *at = stream->first; at; at = at->next)
        count++;
    return !fake.strict || count < fake.room;
}

/* Waits for room; needs the lock, and gives it up meanwhile. */
static void wait_for_room(CUstream stream) {
    for (fake_advance(); !has_room(stream); fake_advance()) {
        (void)pthread_mutex_unlock(&fake.lock);
        pause_shortly();
        (void)pthread_mutex_lock(&fake.lock);
    }
}

static CUresult put(CUstream on, action given) {
    CUstream stream = stream_of(on);
    if (!on && joins_capture())
        return forbidden(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    action *made = malloc(sizeof *made);
    if (!made)
        return OUT_OF_MEMORY;
    (void)pthread_mutex_lock(&fake.lock);
    if (is_captured(stream, &given)) {
        const bool spoilt = stream->capture == SPOILT;
        (void)pthread_mutex_unlock(&fake.lock);
        free(made);
        return spoilt ? CAPTURE_INVALIDATED : 0;
    }
    wait_for_room(stream);
    given.due_ns = now_ns() + fake.delay_ns;
    given.number = ++actions_put;
    given.next = NULL;
    *made = given;
    if (given.kind == RECORD)
        given.event->recorded++;
    if (given.kind == WAIT) {
        made->record = given.event->recorded;
        given.event->waits++;
    }
    *stream->last = made;
    stream->last = &made->next;
    (void)pthread_mutex_unlock(&fake.lock);
    return 0;
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    BEGIN_PUT;
    if (priority > 0 || priority < -5)
        return INVALID_VALUE;
    CUstream made = calloc(1, sizeof *made);
    if (!made)
        return OUT_OF_MEMORY;
    made->last = &made->first;
    made->device = fake_current[fake_depth - 1]->device;
    made->blocking = flags != CU_STREAM_NON_BLOCKING;
    made->priority = priority;
    const unsigned queues = (unsigned)fake_number("FAKE_CUDA_QUEUES", 0);
    (void)pthread_mutex_lock(&fake.lock);
    streams_made++;
    made->queue = queues ? streams_made % queues : streams_made;
    made->next = streams;
    streams = made;
    fake.left++;
    (void)pthread_mutex_unlock(&fake.lock);
    *stream = made;
    return 0;
}

CUresult cuStreamSynchronize(CUstream given) {
    BEGIN;
    CUstream stream = stream_of(given);
    for (;;) {
        (void)pthread_mutex_lock(&fake.lock);
        fake_advance();
        const bool done = !stream->first;
        (void)pthread_mutex_unlock(&fake.lock);
        if (done)
            return fake.stuck;
        pause_shortly();
    }
}

#define ANY_DEVICE (-1)

static bool is_idle(int device) {
    for (CUstream at = streams; at; at = at->next)
        if ((device == ANY_DEVICE || at->device == device) && at->first)
            return false;
    return true;
}

void fake_take_turn(void) {
    while (fake.waiting)
        pause_shortly();
}

void fake_wait_for_streams(void) {
    bool waits;
    fake.waiting++;
    do {
        (void)pthread_mutex_lock(&fake.lock);
        fake_advance();
        waits = fake.strict && !is_idle(ANY_DEVICE);
        (void)pthread_mutex_unlock(&fake.lock);
        if (waits)
            pause_shortly();
    } while (waits);
    fake.waiting--;
}

CUresult cuCtxSynchronize(void) {
    BEGIN;
    const CUresult refused = forbidden(CAPTURE_UNSUPPORTED);
    if (refused)
        return refused;
    for (;;) {
        (void)pthread_mutex_lock(&fake.lock);
        fake_advance();
        const bool done = is_idle(fake_current[fake_depth - 1]->device);
        (void)pthread_mutex_unlock(&fake.lock);
        if (done)
            return fake.stuck;
        pause_shortly();
    }
}

/* Like the driver's, this does not wait, and the stream's actions still run. */
CUresult cuStreamDestroy_v2(CUstream stream) {
    BEGIN;
    (void)pthread_mutex_lock(&fake.lock);
    stream->destroyed = true;
    fake.left--;
    fake_advance();
    (void)pthread_mutex_unlock(&fake.lock);
    return 0;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    BEGIN_PUT;
    (void)flags;
    return put(stream, (action){.kind = WAIT, .event = event});
}

/* Of words in the host's memory only; the driver takes others, too. */
CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    BEGIN_PUT;
    (void)pthread_mutex_lock(&fake.lock);
    const fake_range *found = fake_range_at(address);
    const bool good = found && (found->kind == HOST || found->kind == PINNED) && address % sizeof value == 0;
    (void)pthread_mutex_unlock(&fake.lock);
    if (!good || (flags & ~(unsigned)CU_STREAM_WAIT_VALUE_FLUSH) != CU_STREAM_WAIT_VALUE_GEQ)
        return INVALID_VALUE;
    return put(stream, (action){.kind = WAIT_VALUE, .from = address, .word = value});
}

CUresult cuStreamIsCapturing(CUstream stream, int *status) {
    BEGIN_PUT;
    if (!stream && joins_capture())
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT; /* which does not spoil it */
    *status = (int)stream_of(stream)->capture;
    return 0;
}

/* Found by name only: kvferry uses no pools of memory, which not all devices have, but an engine may. */
__attribute__((visibility("default"))) CUresult cuMemPoolCreate(void **pool, const int *properties);
__attribute__((visibility("default"))) CUresult cuMemPoolDestroy(void *pool);
__attribute__((visibility("default"))) CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes,
                                                                        void *pool, CUstream stream);
__attribute__((visibility("default"))) CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream);

CUresult cuMemPoolCreate(void **pool, const int *properties) {
    BEGIN;
    if (!fake_number("FAKE_CUDA_POOLS", 1))
        return CUDA_ERROR_NOT_SUPPORTED;
    *pool = properties[0] == CU_MEM_ALLOCATION_TYPE_PINNED ? malloc(1) : NULL;
    if (!*pool)
        return INVALID_VALUE;
    fake.left++;
    return 0;
}

CUresult cuMemPoolDestroy(void *pool) {
    BEGIN;
    free(pool);
    fake.left--;
    return 0;
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, void *pool, CUstream stream) {
    BEGIN;
    (void)stream;
    if (!pool)
        return INVALID_VALUE;
    (void)pthread_mutex_lock(&fake.lock);
    const CUresult result = fake_allocate(address, bytes);
    if (!result)
        fake_range_at(*address)->pooled = true;
    (void)pthread_mutex_unlock(&fake.lock);
    return result;
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    BEGIN_PUT;
    return put(stream, (action){.kind = RELEASE, .to = address});
}

/* May be a kernel of the driver's own, which is loaded when it is first launched. */
CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, CUstream stream) {
    static struct CUfunc_st kernels[KVF_CUDA_DEVICES_MAX];
    BEGIN_PUT;
    load(&kernels[fake_current[fake_depth - 1]->device]);
    return put(stream, (action){.kind = FILL, .to = address, .value = value, .bytes = count});
}

/* Of memory of the host that the driver does not know, it may first wait until the stream has done all its work. */
static CUresult put_copy(CUstream given, CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    CUstream stream = stream_of(given);
    fake.waiting++;
    (void)pthread_mutex_lock(&fake.lock);
    while (fake.strict && stream->first && !(fake_knows(to) && fake_knows(from))) {
        fake_advance();
        (void)pthread_mutex_unlock(&fake.lock);
        pause_shortly();
        (void)pthread_mutex_lock(&fake.lock);
    }
    (void)pthread_mutex_unlock(&fake.lock);
    fake.waiting--;
    return put(stream, (action){.kind = COPY, .to = to, .from = from, .bytes = bytes});
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    BEGIN_PUT;
    return put_copy(stream, to, (uint64_t)(uintptr_t)from, bytes);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    BEGIN_PUT;
    return put_copy(stream, (uint64_t)(uintptr_t)to, from, bytes);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    BEGIN_PUT;
    return put_copy(stream, to, from, bytes);
}

/* Found by name only: drivers have it from CUDA 12.8 on. */
/* NOLINTBEGIN(readability-non-const-parameter): as the driver declares it. */
__attribute__((visibility("default"))) CUresult
cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count, void *attributes,
                   size_t *attribute_begins, size_t attribute_count, size_t *failed, CUstream stream);

CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count, void *attributes,
                            size_t *attribute_begins, size_t attribute_count, size_t *failed,
                            CUstream stream) {
    BEGIN_PUT;
    if (!attributes || attribute_count != 1 || attribute_begins[0] != 0 || count == 0 || !stream)
        return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        const CUresult result =
            put(stream, (action){.kind = COPY, .to = to[i], .from = from[i], .bytes = bytes[i]});
        if (result) {
            *failed = i;
            return result;
        }
    }
    return 0;
}

/* From CUDA 13 on. */
__attribute__((visibility("default"))) CUresult
cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count, void *attributes,
                      size_t *attribute_begins, size_t attribute_count, CUstream stream);

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count,
                               void *attributes, size_t *attribute_begins, size_t attribute_count,
                               CUstream stream) {
    size_t failed = 0;
    return cuMemcpyBatchAsync(to, from, bytes, count, attributes, attribute_begins, attribute_count, &failed,
                              stream);
}

/* As the driver lays it out, for addresses of one layer. */
typedef struct box_side {
    int kind; /* 1: an address */
    CUdeviceptr address;
    size_t row_step, layer_rows;
    CUmemLocation where;
} box_side;
typedef struct copied_box {
    box_side from, to;
    size_t row_bytes, rows, layers;
    int source_order;
    unsigned flags;
} copied_box;

__attribute__((visibility("default"))) CUresult cuMemcpy3DBatchAsync(size_t count, copied_box *boxes,
                                                                     size_t *failed, unsigned long long flags,
                                                                     CUstream stream);

CUresult cuMemcpy3DBatchAsync(size_t count, copied_box *boxes, size_t *failed, unsigned long long flags,
                              CUstream stream) {
    BEGIN_PUT;
    if (count == 0 || flags || !stream)
        return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        const copied_box *box = &boxes[i];
        CUresult result = 0;
        *failed = i;
        if (box->from.kind != 1 || box->to.kind != 1 || box->source_order != 1 || box->row_bytes == 0 ||
            box->rows == 0 || box->layers != 1 || box->from.row_step < box->row_bytes ||
            box->to.row_step < box->row_bytes)
            return INVALID_VALUE;
        for (size_t row = 0; !result && row < box->rows; row++)
            result = put(stream, (action){.kind = COPY,
                                          .to = box->to.address + row * box->to.row_step,
                                          .from = box->from.address + row * box->from.row_step,
                                          .bytes = box->row_bytes});
        if (result)
            return result;
    }
    return 0;
}
/* NOLINTEND(readability-non-const-parameter) */

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream stream, void **arguments, void **extra) {
    BEGIN_PUT;
    const int device = fake_current[fake_depth - 1]->device;
    (void)shared_bytes;
    if (function->device != device || stream_of(stream)->device != device)
        return INVALID_HANDLE;
    load(function);
    if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x != KVF_BLOCK_THREADS || block_y != 1 ||
        block_z != 1 || extra)
        return INVALID_VALUE;
    return put(stream, (action){.kind = LAUNCH,
                                .function = function,
                                .from = *(uint64_t *)arguments[0],
                                .count = *(uint32_t *)arguments[1],
                                .tiles = *(uint32_t *)arguments[2],
                                .blocks = grid_x * KVF_BLOCK_TILES});
}

/* ---- events ------------------------------------------------------------------------------------- */

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    BEGIN_PUT;
    (void)flags;
    *event = calloc(1, sizeof **event);
    if (!*event)
        return OUT_OF_MEMORY;
    (*event)->device = fake_current[fake_depth - 1]->device;
    fake.left++;
    return 0;
}

/* Destroys an event even if its context has failed, and then returns the context's error. */
CUresult cuEventDestroy_v2(CUevent event) {
    const CUresult stuck = fake.stuck;
    if (!stuck)
        BEGIN;
    (void)pthread_mutex_lock(&fake.lock);
    event->destroyed = true;
    fake.left--;
    let_go(event);
    (void)pthread_mutex_unlock(&fake.lock);
    return stuck;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    BEGIN_PUT;
    if (event->device != stream_of(stream)->device)
        return INVALID_HANDLE;
    return put(stream, (action){.kind = RECORD, .event = event});
}

CUresult cuEventQuery(CUevent event) {
    BEGIN;
    if (event->captured) {
        (void)forbidden(0);
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    (void)pthread_mutex_lock(&fake.lock);
    fake_advance();
    const bool pending = event->reached < event->recorded;
    (void)pthread_mutex_unlock(&fake.lock);
    return fake.stuck ? fake.stuck : pending ? CUDA_ERROR_NOT_READY : 0;
}
