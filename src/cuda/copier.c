#include "cuda/copier.h"

#include "cuda/device_image.h"
#include "cuda/grid.h"
#include "cuda/long_runs.h"
#include "cuda/over.h"
#include "cuda/pieces.h"

#define JOBS_DEFAULT 32u
#define BOXES_DEFAULT 256u
#define TABLE_BYTES (UINT64_C(8) << 20) /* of tables that are kept, beside rooms */
#define UPLOAD_BYTES 262144u            /* for tables on their way: 65536 ids */

/* Boxes of one kernel: copies and conversions are launched separately. */
typedef struct launch {
    uint32_t count, tiles;
} launch;

enum { COPIES, CONVERSIONS, LAUNCHES };

/* What a job copies. */
typedef struct filling {
    launch launches[LAUNCHES];
    uint32_t run_count;  /* by the driver's copies */
    kvf_long_run latest; /* may go on with what is added next; if it has bytes, there is room for its box */
} filling;

struct kvf_copy_job {
    kvf_copier *copier;
    kvf_cuda_box
        *boxes; /* in pinned host memory: `room` copies, then, unless it is plain, `room` conversions */
    CUdeviceptr uploaded; /* the same on the device */
    uint32_t *ids;        /* of tables of its own, in pinned host memory */
    CUdeviceptr uploaded_ids;
    uint32_t id_count;
    filling filling;
    kvf_long_run runs[KVF_LONG_RUNS];
    CUevent over;
    bool started;
    CUresult failed; /* a part could not be started; the parts before it run */
    struct kvf_copy_job *next_free;
};

/* Pinned memory from which tables go to the device, one behind the other. */
typedef struct upload {
    unsigned char *memory;
    size_t bytes, used;
    CUevent over; /* behind the latest table */
    struct upload *next;
} upload;

struct kvf_copier {
    uint32_t device, job_count, room, id_room;
    uint64_t long_run_bytes;
    bool plain; /* see kvf_copier_options */
    kvf_grid grid;
    CUstream stream;
    CUdeviceptr kept; /* the device's memory that tables and rooms are pieces of */
    kvf_pieces pieces;
    CUmodule module;
    CUfunction kernels[LAUNCHES];
    void *boxes;          /* of all jobs, and behind them their ids */
    CUdeviceptr uploaded; /* the same on the device */
    kvf_copy_job *jobs, *free;
    upload *uploads;
    /* Of jobs that are started and not over, as far as polls have shown. */
    uint32_t started;
    uint64_t started_tiles;
};

/* ---- device code -------------------------------------------------------------------------------- */

static kvf_status load(kvf_copier *copier, const kvf_cuda *cuda) {
    static const char *const names[LAUNCHES] = {"kvf_copy_cells", "kvf_convert_cells"};
    kvf_status status = kvf_device_code_load(cuda, copier->device, &copier->module);
    for (int i = 0; !status && i < LAUNCHES; i++)
        status = kvf_device_kernel(cuda, copier->device, copier->module, names[i], &copier->kernels[i]);
    return status;
}

/* ---- opening and closing ------------------------------------------------------------------------ */

static kvf_status make_stream(kvf_copier *copier, const kvf_cuda *cuda) {
    return kvf_cuda_status(copier->device, kvf_cuda_least_stream(cuda, &copier->stream), "making a stream");
}

/* Allocates memory for what is put on the stream from now on. */
static CUresult allocate(kvf_copier *copier, const kvf_cuda *cuda, size_t bytes, CUdeviceptr *out) {
    *out = kvf_pieces_take(&copier->pieces, bytes);
    return *out ? 0 : cuda->cuMemAlloc_v2(out, bytes);
}

/* Frees it behind what is on the stream. What was too long for a piece waits for that: drivers need not wait when they
 * free. */
static void release(kvf_copier *copier, const kvf_cuda *cuda, CUdeviceptr address) {
    if (kvf_pieces_give(&copier->pieces, address))
        return;
    if (cuda->cuStreamSynchronize(copier->stream) == 0)
        (void)cuda->cuMemFree_v2(address);
}

static kvf_status make_jobs(kvf_copier *copier, const kvf_cuda *cuda) {
    const size_t job_boxes = (size_t)(copier->plain ? 1 : LAUNCHES) * copier->room * sizeof(kvf_cuda_box),
                 job_ids = (size_t)copier->id_room * sizeof(uint32_t), boxes = copier->job_count * job_boxes,
                 bytes = boxes + copier->job_count * job_ids;
    copier->jobs = kvf_alloc0(copier->job_count, sizeof *copier->jobs);
    if (!copier->jobs)
        return kvf_nomem("jobs of a device");
    CUresult result = cuda->cuMemHostAlloc(&copier->boxes, bytes, CU_MEMHOSTALLOC_PORTABLE);
    if (!result)
        result = cuda->cuMemAlloc_v2(&copier->uploaded, bytes);
    for (uint32_t i = 0; !result && i < copier->job_count; i++) {
        kvf_copy_job *job = &copier->jobs[i];
        unsigned char *host = copier->boxes;
        job->copier = copier;
        job->boxes = (kvf_cuda_box *)(void *)(host + i * job_boxes);
        job->uploaded = copier->uploaded + i * job_boxes;
        job->ids = (uint32_t *)(void *)(host + boxes + i * job_ids);
        job->uploaded_ids = copier->uploaded + boxes + i * job_ids;
        job->next_free = copier->free;
        copier->free = job;
        result = cuda->cuEventCreate(&job->over, CU_EVENT_DISABLE_TIMING);
    }
    return kvf_cuda_status(copier->device, result, "making room for jobs");
}

static CUresult make_upload(kvf_copier *copier, const kvf_cuda *cuda, size_t bytes) {
    upload *made = kvf_alloc0(1, sizeof *made);
    void *memory = NULL;
    CUresult result =
        made ? cuda->cuEventCreate(&made->over, CU_EVENT_DISABLE_TIMING) : CUDA_ERROR_OUT_OF_MEMORY;
    if (!result)
        result = cuda->cuMemHostAlloc(&memory, bytes, CU_MEMHOSTALLOC_PORTABLE);
    if (!result) {
        made->memory = memory;
        made->bytes = bytes;
        made->next = copier->uploads;
        copier->uploads = made;
        return 0;
    }
    if (made && made->over)
        (void)cuda->cuEventDestroy_v2(made->over);
    kvf_free(made);
    return result;
}

/* An engine's work may wait for us, so what is usually needed is there before. */
static CUresult keep_for_tables(kvf_copier *copier, const kvf_cuda *cuda) {
    const size_t bytes = KVF_COPIER_ROOM_BYTES + TABLE_BYTES;
    const CUresult result = cuda->cuMemAlloc_v2(&copier->kept, bytes);
    if (result)
        return result;
    copier->pieces = (kvf_pieces){.begin = copier->kept, .end = copier->kept + bytes};
    return make_upload(copier, cuda, UPLOAD_BYTES);
}

static void unmake_uploads(kvf_copier *copier, const kvf_cuda *cuda) {
    upload *next;
    if (copier->uploads)
        (void)cuda->cuStreamSynchronize(copier->stream); /* no job may have needed the latest table */
    for (upload *at = copier->uploads; at; at = next) {
        next = at->next;
        (void)cuda->cuEventDestroy_v2(at->over);
        (void)cuda->cuMemFreeHost(at->memory);
        kvf_free(at);
    }
}

/* Frees everything made so far; the device must be entered. */
static void unmake(kvf_copier *copier, const kvf_cuda *cuda) {
    unmake_uploads(copier, cuda);
    for (uint32_t i = 0; copier->jobs && i < copier->job_count; i++)
        if (copier->jobs[i].over)
            (void)cuda->cuEventDestroy_v2(copier->jobs[i].over);
    if (copier->uploaded)
        (void)cuda->cuMemFree_v2(copier->uploaded);
    if (copier->boxes)
        (void)cuda->cuMemFreeHost(copier->boxes);
    if (copier->module)
        (void)cuda->cuModuleUnload(copier->module);
    if (copier->stream)
        (void)cuda->cuStreamDestroy_v2(copier->stream);
    if (copier->kept)
        (void)cuda->cuMemFree_v2(copier->kept);
    kvf_pieces_free(&copier->pieces);
    kvf_free(copier->jobs);
    kvf_free(copier);
}

kvf_status kvf_copier_open(uint32_t device, const kvf_copier_options *options, kvf_copier **out) {
    const kvf_copier_options none = {0}, *given = options ? options : &none;
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_enter(device, &cuda);
    if (status)
        return status;
    kvf_copier *copier = kvf_alloc0(1, sizeof *copier);
    if (!copier) {
        kvf_cuda_leave(cuda);
        return kvf_nomem("a device's copy engine");
    }
    copier->device = device;
    copier->grid =
        kvf_grid_of(given->least_blocks, given->most_blocks, cuda->devices[device].multiprocessors);
    copier->job_count = given->jobs ? given->jobs : JOBS_DEFAULT;
    copier->room = given->boxes ? given->boxes : BOXES_DEFAULT;
    copier->id_room = given->ids;
    copier->long_run_bytes = given->long_run_bytes;
    copier->plain = given->plain;
    status = load(copier, cuda);
    if (!status)
        status = make_stream(copier, cuda);
    if (!status)
        status = make_jobs(copier, cuda);
    if (!status && !copier->plain)
        status = kvf_cuda_status(copier->device, keep_for_tables(copier, cuda), "making room for tables");
    if (status)
        unmake(copier, cuda);
    else
        *out = copier;
    kvf_cuda_leave(cuda);
    return status;
}

kvf_status kvf_copier_close(kvf_copier *copier) {
    const kvf_cuda *cuda;
    if (!copier)
        return KVF_OK;
    if (copier->started > 0)
        return kvf_fail(KVF_E_AGAIN, "%u jobs of CUDA device %u are under way", copier->started,
                        copier->device);
    kvf_status status = kvf_cuda_enter(copier->device, &cuda);
    if (status) /* a child of fork(), which does not own what its parent made */
        return status;
    unmake(copier, cuda);
    kvf_cuda_leave(cuda);
    return KVF_OK;
}

/* ---- memory ------------------------------------------------------------------------------------- */

/* Where the device finds registered memory of the host. */
static kvf_status find_registered(const kvf_cuda *cuda, uint32_t device, void *memory, uint64_t *address) {
    CUdevice handle = 0;
    CUdeviceptr found = 0;
    int as_host = 0;
    CUresult result = cuda->cuDeviceGet(&handle, (int)device);
    if (!result)
        result = cuda->cuDeviceGetAttribute(
            &as_host, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, handle);
    if (!result && !as_host)
        result = cuda->cuMemHostGetDevicePointer_v2(&found, memory, 0);
    *address = as_host ? (uint64_t)(uintptr_t)memory : found;
    if (!result)
        return KVF_OK;
    (void)kvf_cuda_status(device, result, "asking where a device finds it");
    return kvf_fail_in(KVF_E_UNSUPPORTED, "pinned memory of the host: ");
}

/* Drivers refuse memory that they cannot lock or map with many results; it is enough that they refuse. */
static kvf_status pinned(uint32_t device, CUresult result) {
    const kvf_status status = kvf_cuda_status(device, result, "pinning memory of the host");
    if (!status || status == KVF_E_NOMEM || kvf_cuda_stays(result))
        return status;
    return kvf_fail_in(KVF_E_UNSUPPORTED, "the device may not reach it: ");
}

kvf_status kvf_copier_pin(kvf_copier *copier, void *memory, uint64_t bytes, uint64_t *address) {
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_enter(copier->device, &cuda);
    if (status)
        return status;
    const CUresult result =
        cuda->cuMemHostRegister_v2(memory, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    const bool existed = result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    status = existed ? KVF_OK : pinned(copier->device, result);
    if (!status) {
        status = find_registered(cuda, copier->device, memory, address);
        if (status && !existed)
            (void)cuda->cuMemHostUnregister(memory);
    }
    kvf_cuda_leave(cuda);
    return status || !existed ? status : KVF_E_EXISTS;
}

void kvf_copier_unpin(kvf_copier *copier, void *memory) {
    const kvf_cuda *cuda;
    if (kvf_cuda_enter(copier->device, &cuda))
        return;
    (void)cuda->cuMemHostUnregister(memory);
    kvf_cuda_leave(cuda);
}

/* Finds pinned memory that has so many bytes left, or makes some. */
static CUresult upload_with(kvf_copier *copier, const kvf_cuda *cuda, size_t bytes, upload **out) {
    upload *at = copier->uploads;
    for (; at; at = at->next) {
        if (at->used > 0 && cuda->cuEventQuery(at->over) == 0)
            at->used = 0;
        if (at->bytes - at->used >= bytes)
            break;
    }
    const CUresult result =
        at ? 0 : make_upload(copier, cuda, (bytes + UPLOAD_BYTES - 1) / UPLOAD_BYTES * UPLOAD_BYTES);
    *out = at ? at : copier->uploads;
    return result;
}

/* Copies a table to the device, from pinned memory: before the driver copies from other memory, it may wait until the
 * stream has done all its work. */
static CUresult upload_table(kvf_copier *copier, const kvf_cuda *cuda, CUdeviceptr to, const uint32_t *ids,
                             size_t bytes) {
    upload *by;
    CUresult result = upload_with(copier, cuda, bytes, &by);
    if (result)
        return result;
    memcpy(by->memory + by->used, ids, bytes);
    result = cuda->cuMemcpyHtoDAsync_v2(to, by->memory + by->used, bytes, copier->stream);
    if (result)
        return result;
    by->used += bytes;
    result = cuda->cuEventRecord(by->over, copier->stream);
    if (result)
        (void)cuda->cuStreamSynchronize(copier->stream); /* no other way to know when it is over */
    return result;
}

kvf_status kvf_copier_put_table(kvf_copier *copier, const uint32_t *ids, uint64_t count,
                                kvf_device_table *out) {
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_enter(copier->device, &cuda);
    if (status)
        return status;
    const size_t bytes = (size_t)(count ? count : 1) * sizeof *ids;
    CUdeviceptr address = 0;
    CUresult result = allocate(copier, cuda, bytes, &address);
    if (!result && count)
        result = upload_table(copier, cuda, address, ids, bytes);
    status = kvf_cuda_status(copier->device, result, "bringing a block table to a device");
    if (status && address)
        release(copier, cuda, address);
    if (!status)
        *out = (kvf_device_table){.address = address, .on_host = ids};
    kvf_cuda_leave(cuda);
    return status;
}

void kvf_copier_drop_table(kvf_copier *copier, kvf_device_table *table) {
    const kvf_cuda *cuda;
    if (!table->address || kvf_cuda_enter(copier->device, &cuda))
        return;
    release(copier, cuda, table->address);
    *table = (kvf_device_table){0};
    kvf_cuda_leave(cuda);
}

kvf_status kvf_copier_room(kvf_copier *copier, uint64_t bytes, uint64_t *address) {
    const kvf_cuda *cuda;
    CUdeviceptr made = 0;
    kvf_status status = kvf_cuda_enter(copier->device, &cuda);
    if (status)
        return status;
    status = kvf_cuda_status(copier->device, allocate(copier, cuda, bytes, &made), "making room on a device");
    *address = status ? 0 : made;
    kvf_cuda_leave(cuda);
    return status;
}

void kvf_copier_drop_room(kvf_copier *copier, uint64_t address) {
    const kvf_cuda *cuda;
    if (!address || kvf_cuda_enter(copier->device, &cuda))
        return;
    release(copier, cuda, address);
    kvf_cuda_leave(cuda);
}

/* ---- jobs --------------------------------------------------------------------------------------- */

kvf_status kvf_copier_begin(kvf_copier *copier, kvf_copy_job **out) {
    kvf_copy_job *job = copier->free;
    if (!job)
        return kvf_fail(KVF_E_AGAIN, "%u jobs of CUDA device %u are under way, the most allowed",
                        copier->job_count, copier->device);
    copier->free = job->next_free;
    memset(&job->filling, 0, sizeof job->filling);
    job->id_count = 0;
    job->failed = 0;
    *out = job;
    return KVF_OK;
}

void kvf_copy_job_drop(kvf_copy_job *job) {
    KVF_ASSERT(!job->started);
    job->next_free = job->copier->free;
    job->copier->free = job;
}

uint32_t *kvf_copy_job_table(kvf_copy_job *job, uint64_t count, uint64_t *address) {
    if (count > job->copier->id_room - job->id_count)
        return NULL;
    uint32_t *table = job->ids + job->id_count;
    *address = job->uploaded_ids + job->id_count * sizeof *table;
    job->id_count += (uint32_t)count;
    return table;
}

static kvf_status add_boxes(kvf_copy_job *job, const kvf_device_side *from, const kvf_device_side *to,
                            uint64_t rows, uint64_t units, uint64_t cell_elements) {
    const int which = from->type == to->type ? COPIES : CONVERSIONS;
    const uint32_t room = job->copier->room;
    launch *add = &job->filling.launches[which];
    uint32_t made = 0;
    KVF_ASSERT(which == COPIES || !job->copier->plain);
    kvf_status status =
        kvf_device_boxes(from, to, rows, units, cell_elements, job->boxes + (size_t)which * room + add->count,
                         room - add->count, &made, &add->tiles);
    add->count += made;
    return status;
}

/* Decides which way the latest run goes. */
static kvf_status end_run(kvf_copy_job *job) {
    const kvf_long_run latest = job->filling.latest;
    const kvf_device_side from = {.packed = latest.from}, to = {.packed = latest.to};
    job->filling.latest = (kvf_long_run){0};
    if (latest.bytes == 0)
        return KVF_OK;
    if (latest.bytes < job->copier->long_run_bytes || job->filling.run_count == KVF_LONG_RUNS)
        return add_boxes(job, &from, &to, 1, 1, latest.bytes);
    job->runs[job->filling.run_count++] = latest;
    return KVF_OK;
}

static kvf_status add_run(kvf_copy_job *job, kvf_long_run run) {
    kvf_long_run *latest = &job->filling.latest;
    if (latest->bytes > 0 && latest->from + latest->bytes == run.from &&
        latest->to + latest->bytes == run.to && latest->region == run.region) {
        latest->bytes += run.bytes;
        return KVF_OK;
    }
    kvf_status status = end_run(job);
    if (!status && job->filling.launches[COPIES].count == job->copier->room)
        status = kvf_fail(KVF_E_LIMIT, "there is room for %u boxes of a device", job->copier->room);
    *latest = run;
    return status;
}

/* Adds pages, and the bytes that they have packed in the host's memory. */
static kvf_status add_runs(kvf_copy_job *job, const kvf_device_side *side, uint64_t packed, bool gathers,
                           uint64_t rows, uint64_t row_bytes) {
    const kvf_box *pages = side->pages;
    kvf_status status = KVF_OK;
    for (uint64_t row = 0, together; row < rows && !status; row += together) {
        together = kvf_rows_together(pages, row, rows, row_bytes);
        const uint64_t memory = (uint64_t)(uintptr_t)kvf_box_row(pages, row), at = packed + row * row_bytes;
        status = add_run(job, (kvf_long_run){.from = gathers ? memory : at,
                                             .to = gathers ? at : memory,
                                             .bytes = together * row_bytes,
                                             .region = side->region});
    }
    return status;
}

/* Whether one side has pages of a device, the other bytes in the host's memory, and the driver may copy them. */
static bool go_by_runs(const kvf_copier *copier, const kvf_device_side *from, const kvf_device_side *to,
                       uint64_t rows, uint64_t units, uint64_t cell_bytes) {
    const kvf_box *pages = from->pages ? from->pages : to->pages;
    return copier->long_run_bytes > 0 && from->type == to->type && from->on_host != to->on_host && pages &&
           kvf_rows_are_whole(pages, units, cell_bytes) &&
           kvf_has_long_runs(pages, rows, units * cell_bytes, copier->long_run_bytes);
}

kvf_status kvf_copy_job_add(kvf_copy_job *job, const kvf_device_side *from, const kvf_device_side *to,
                            uint64_t rows, uint64_t units, uint64_t cell_elements) {
    const filling before = job->filling;
    kvf_status status;
    if (go_by_runs(job->copier, from, to, rows, units, cell_elements)) {
        status = add_runs(job, from->pages ? from : to, from->pages ? to->packed : from->packed,
                          from->pages != NULL, rows, units * cell_elements);
    } else {
        status = end_run(job);
        if (!status)
            status = add_boxes(job, from, to, rows, units, cell_elements);
    }
    if (status)
        job->filling = before;
    return status;
}

/* Uploads the job's own tables; sets `any` once something is on the stream. */
static CUresult upload_ids(const kvf_copy_job *job, const kvf_cuda *cuda, bool *any) {
    if (job->id_count == 0)
        return 0;
    const CUresult result = cuda->cuMemcpyHtoDAsync_v2(job->uploaded_ids, job->ids,
                                                       job->id_count * sizeof *job->ids, job->copier->stream);
    *any = *any || !result;
    return result;
}

/* Before the kernels, because these may have to wait for others. */
static CUresult copy_runs(const kvf_copy_job *job, const kvf_cuda *cuda, bool *any) {
    CUresult result = 0;
    for (uint32_t i = 0; !result && i < job->filling.run_count; i++) {
        const kvf_long_run *run = &job->runs[i];
        result = cuda->cuMemcpyAsync(run->to, run->from, run->bytes, job->copier->stream);
        *any = *any || !result;
    }
    return result;
}

/* Uploads and launches one kind of boxes; sets `any` once something is on the stream. */
static CUresult run(kvf_copy_job *job, const kvf_cuda *cuda, int which, bool *any) {
    kvf_copier *copier = job->copier;
    launch *given = &job->filling.launches[which];
    const size_t before = (size_t)which * copier->room;
    CUdeviceptr boxes = job->uploaded + before * sizeof(kvf_cuda_box);
    if (given->count == 0)
        return 0;
    CUresult result = cuda->cuMemcpyHtoDAsync_v2(boxes, job->boxes + before,
                                                 given->count * sizeof(kvf_cuda_box), copier->stream);
    *any = *any || !result;
    void *arguments[] = {&boxes, &given->count, &given->tiles};
    const uint32_t blocks = kvf_grid_blocks(&copier->grid, given->tiles, copier->started_tiles);
    if (!result)
        result = cuda->cuLaunchKernel(copier->kernels[which], blocks, 1, 1, KVF_BLOCK_THREADS, 1, 1, 0,
                                      copier->stream, arguments, NULL);
    return result;
}

/* Puts a job on the stream, and its event behind it. The job may touch memory until the event has come. If only a part
 * could be put there, the job fails when that part is over. */
static CUresult put(kvf_copy_job *job, const kvf_cuda *cuda, CUevent after) {
    kvf_copier *copier = job->copier;
    bool any = false;
    CUresult result = after ? cuda->cuStreamWaitEvent(copier->stream, after, 0) : 0;
    if (!result)
        result = copy_runs(job, cuda, &any);
    if (!result)
        result = upload_ids(job, cuda, &any);
    for (int i = 0; !result && i < LAUNCHES; i++)
        result = run(job, cuda, i, &any);
    if (result && !any)
        return result;
    job->failed = result;
    result = cuda->cuEventRecord(job->over, copier->stream);
    if (result)
        (void)cuda->cuStreamSynchronize(copier->stream); /* no other way to know when it is over */
    return result;
}

static uint64_t tiles_of(const kvf_copy_job *job) {
    return (uint64_t)job->filling.launches[COPIES].tiles + job->filling.launches[CONVERSIONS].tiles;
}

kvf_status kvf_copy_job_start(kvf_copy_job *job, CUevent after) {
    kvf_copier *copier = job->copier;
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_enter(copier->device, &cuda);
    if (status) {
        kvf_copy_job_drop(job);
        return status;
    }
    status = end_run(job);
    if (!status)
        status = kvf_cuda_status(copier->device, put(job, cuda, after), "starting a copy");
    kvf_cuda_leave(cuda);
    if (status) {
        kvf_copy_job_drop(job);
    } else {
        job->started = true;
        copier->started++;
        copier->started_tiles += tiles_of(job);
    }
    return status;
}

kvf_status kvf_copy_job_poll(kvf_copy_job *job) {
    kvf_copier *copier = job->copier;
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_over(copier->device, job->over, "copying");
    if (status == KVF_IN_PROGRESS)
        return status;
    if (!status)
        status = kvf_cuda_find(&cuda);
    if (!status)
        status = kvf_cuda_status(copier->device, job->failed, "starting a copy");
    job->started = false;
    copier->started--;
    copier->started_tiles -= tiles_of(job);
    kvf_copy_job_drop(job);
    return status;
}
