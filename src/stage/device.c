#include "stage/device.h"

#include <kvferry/stage.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/fork.h"
#include "base/list.h"
#include "cuda/looks.h"
#include "cuda/over.h"

#define SETTLE_NS UINT64_C(100000000)
/* Blocks of threads: 4 move what PCIe carries to and from an arena of the host, and within the device more than a link
 * of 400 Gbit/s does. While slots wait for each other, up to 8: that is as much as helps with runs of 64 B over PCIe,
 * and twice as fast within the device. More would occupy multiprocessors that the engine needs. */
#define ARENA_BLOCKS 4u
#define ARENA_BLOCKS_MOST 8u

struct kvf_stage_device {
    const kvf_transport *transport;
    kvf_copier *copier;
    kvf_looks looks;
    uint32_t forks;         /* of the process that opened it */
    bool changed;           /* a job was put or taken since the jobs were last polled */
    kvf_memory arena;       /* of the host */
    uint64_t arena_address; /* the device's */
    bool pinned;            /* by us */
    struct {
        kvf_job *first, *last;
    } jobs; /* in the order in which they were put; running jobs before waiting ones */
};

/* ---- opening and closing ------------------------------------------------------------------------ */

static void unmake(kvf_stage_device *device) {
    if (device->pinned)
        kvf_copier_unpin(device->copier, device->arena.address);
    kvf_looks_close(&device->looks);
    (void)kvf_copier_close(device->copier); /* in a child of fork(), this leaves the parent's open */
    kvf_free(device);
}

kvf_status kvf_stage_device_open(uint32_t number, const kvf_transport *transport, uint64_t copy_bytes,
                                 kvf_stage_device **out) {
    kvf_stage_device *device = kvf_alloc0(1, sizeof *device);
    if (!device)
        return kvf_nomem("the device of a stage");
    const kvf_copier_options options = {.least_blocks = ARENA_BLOCKS,
                                        .most_blocks = ARENA_BLOCKS_MOST,
                                        .long_run_bytes =
                                            copy_bytes == KVF_NO_DEVICE_COPIES ? 0 : copy_bytes};
    device->transport = transport;
    device->forks = kvf_fork_count();
    device->looks = (kvf_looks){-1, 0};
    kvf_status status = kvf_copier_open(number, &options, &device->copier);
    if (!status)
        status = kvf_looks_open(&device->looks);
    if (status)
        unmake(device);
    else
        *out = device;
    return status;
}

kvf_status kvf_stage_device_pin(kvf_stage_device *device, void *arena, uint64_t bytes) {
    const kvf_status status = kvf_copier_pin(device->copier, arena, bytes, &device->arena_address);
    if (status && status != KVF_E_EXISTS) /* a fabric has pinned it when it was registered */
        return status;
    device->arena = (kvf_memory){.address = arena, .bytes = bytes};
    device->pinned = !status;
    return KVF_OK;
}

kvf_status kvf_stage_device_bring(kvf_stage_device *device, const kvf_stream *stream, kvf_device_table *out) {
    uint64_t count;
    const uint32_t *ids = kvf_stream_table(stream, &count);
    return kvf_copier_put_table(device->copier, ids, count, out);
}

void kvf_stage_device_drop(kvf_stage_device *device, kvf_device_table *table) {
    if (device)
        kvf_copier_drop_table(device->copier, table);
}

/* ---- jobs --------------------------------------------------------------------------------------- */

kvf_stage_cells kvf_stage_cells_of(const kvf_stream_box *box, const kvf_device_table *table, uint64_t slot,
                                   uint64_t begin) {
    const uint64_t element = kvf_max_u64(1, kvf_dtype_bits(box->memory_type) / 8);
    const uint64_t cell_bytes = box->cells.pieces * box->cells.piece_bytes;
    const bool convert = box->memory_type != box->stream_type;
    return (kvf_stage_cells){.pages = {.pages = &box->cells,
                                       .table = table->address,
                                       .table_on_host = table->on_host,
                                       .region = box->region,
                                       .type = box->memory_type},
                             .packed = {.packed = slot + (box->byte - begin), .type = box->stream_type},
                             .elements = convert ? cell_bytes / element : cell_bytes};
}

typedef struct job_filling {
    kvf_job *job;
    uint64_t slot; /* where the device finds its slot */
    bool on_host;  /* the slot is in the arena of the host */
    kvf_status failed;
} job_filling;

static job_filling filling_of(const kvf_stage_device *device, kvf_job *job) {
    const uint64_t slot = (uint64_t)(uintptr_t)job->slot,
                   offset = slot - (uint64_t)(uintptr_t)device->arena.address;
    const bool on_host = offset < device->arena.bytes;
    return (job_filling){
        .job = job, .slot = on_host ? device->arena_address + offset : slot, .on_host = on_host};
}

static bool add_box(void *context, const kvf_stream_box *box) {
    job_filling *filling = context;
    const kvf_job *job = filling->job;
    kvf_stage_cells cells = kvf_stage_cells_of(box, &job->table, filling->slot, job->bytes.begin);
    cells.packed.on_host = filling->on_host;
    filling->failed = kvf_copy_job_add(job->part, job->gathers ? &cells.pages : &cells.packed,
                                       job->gathers ? &cells.packed : &cells.pages, box->cells.rows,
                                       box->cells.units, cells.elements);
    return !filling->failed;
}

static void fail(kvf_job *job, kvf_status status) {
    job->failed = status;
    (void)snprintf(job->why, sizeof job->why, "%s", kvf_error_detail());
    job->state = KVF_JOB_DONE;
}

/* Starts the next part of a job, if the device takes one more. */
static void start(kvf_stage_device *device, kvf_job *job) {
    job_filling filling = filling_of(device, job);
    kvf_status status = kvf_copier_begin(device->copier, &job->part);
    if (status == KVF_E_AGAIN)
        return;
    const uint64_t begin = job->copied;
    if (!status)
        job->copied = kvf_stream_boxes(job->stream, kvf_transport_bases(device->transport),
                                       (kvf_byte_range){begin, job->bytes.end}, add_box, &filling);
    if (!status && filling.failed && (filling.failed != KVF_E_LIMIT || job->copied == begin)) {
        kvf_copy_job_drop(job->part);
        status = filling.failed;
    } else if (!status) {
        status = kvf_copy_job_start(job->part, NULL);
    }
    if (status)
        fail(job, status);
    else
        job->state = KVF_JOB_UNDER_WAY;
}

static void look_at(kvf_job *job) {
    kvf_status status = kvf_copy_job_poll(job->part);
    if (status == KVF_IN_PROGRESS)
        return;
    if (status)
        fail(job, status);
    else
        job->state = job->copied < job->bytes.end && !job->withdrawn ? KVF_JOB_QUEUED : KVF_JOB_DONE;
}

static void advance(kvf_stage_device *device, kvf_job *job) {
    if (job->state == KVF_JOB_UNDER_WAY)
        look_at(job);
    if (job->state == KVF_JOB_QUEUED)
        start(device, job);
}

static void remove_job(kvf_stage_device *device, kvf_job *job) {
    KVF_QUEUE_REMOVE(device->jobs.first, device->jobs.last, job);
    job->state = KVF_JOB_APART;
}

void kvf_stage_device_put(kvf_stage_device *device, const kvf_device_table *table, kvf_job *job) {
    KVF_ASSERT(job->state == KVF_JOB_APART);
    job->table = *table;
    job->copied = job->bytes.begin;
    job->failed = KVF_OK;
    job->withdrawn = false;
    job->state = KVF_JOB_QUEUED;
    KVF_QUEUE_ADD(device->jobs.first, device->jobs.last, job);
    advance(device, job);
    device->changed = true;
    kvf_looks_set(&device->looks, true, true);
}

kvf_job *kvf_stage_device_take(kvf_stage_device *device) {
    for (kvf_job *job = device->jobs.first; job; job = job->following) {
        advance(device, job);
        if (job->state == KVF_JOB_DONE) {
            remove_job(device, job);
            device->changed = true;
            return job;
        }
    }
    kvf_looks_set(&device->looks, device->jobs.first != NULL, device->changed);
    device->changed = false;
    return NULL;
}

bool kvf_stage_device_withdraw(kvf_stage_device *device, kvf_job *job) {
    if (job->state == KVF_JOB_UNDER_WAY)
        look_at(job);
    job->withdrawn = job->state == KVF_JOB_UNDER_WAY;
    if (!job->withdrawn && job->state != KVF_JOB_APART)
        remove_job(device, job);
    return !job->withdrawn;
}

/* Advances all jobs: one that waits for room on the device may be listed before some that have room. */
static bool copies_nothing(void *context) {
    kvf_stage_device *device = context;
    bool nothing = true;
    for (kvf_job *job = device->jobs.first; job; job = job->following) {
        advance(device, job);
        nothing = nothing && job->state == KVF_JOB_DONE;
    }
    return nothing;
}

bool kvf_stage_device_settle(kvf_stage_device *device) {
    return kvf_cuda_await(copies_nothing, device, SETTLE_NS);
}

bool kvf_stage_device_close(kvf_stage_device *device, uint64_t patience_ns) {
    if (!device)
        return true;
    const bool ours = device->forks == kvf_fork_count(); /* a child has nothing under way */
    const bool ended = !ours || kvf_cuda_await(copies_nothing, device, patience_ns);
    while (device->jobs.first)
        remove_job(device, device->jobs.first);
    if (ended)
        unmake(device);
    return ended;
}

int kvf_stage_device_fd(const kvf_stage_device *device) {
    return device->looks.fd;
}
