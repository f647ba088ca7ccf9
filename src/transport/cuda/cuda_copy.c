/*
 * Copying runs: consecutive runs of one batch become a job of the device that they are copied to, and among these, runs
 * of one length at even distances on both sides become one box of its kernel. So if some heads of a page are copied,
 * its tokens are one box. The host's work for a job grows with its boxes, not with bytes.
 *
 * Nests of two regions become one box, whose block tables name where each nest begins: so all pages of a layer are one
 * box, and the host's work for a page is an id on each side.
 */
#include <stdio.h>

#include "request/request.h"
#include "transport/cuda/cuda.h"
#include "transport/cuda/nest_pages.h"

/* Runs of one length at even distances. */
typedef struct series {
    uint64_t from, to, bytes, from_step, to_step;
    uint32_t count;
} series;

static bool extends(series *so_far, const series *run) {
    if (so_far->count == 0 || run->bytes != so_far->bytes || run->from <= so_far->from ||
        run->to <= so_far->to)
        return false;
    if (so_far->count == 1) {
        so_far->from_step = run->from - so_far->from;
        so_far->to_step = run->to - so_far->to;
    } else if (run->from != so_far->from + so_far->count * so_far->from_step ||
               run->to != so_far->to + so_far->count * so_far->to_step) {
        return false;
    }
    so_far->count++;
    return true;
}

/* A box of rows at even distances, without a table. */
static kvf_box rows_of(const series *runs, uint64_t memory, uint64_t step) {
    return (kvf_box){.memory = (unsigned char *)(uintptr_t)memory, /* on a device: never dereferenced here */
                     .row_stride = runs->count > 1 ? step : runs->bytes,
                     .unit_stride = runs->bytes,
                     .kernel_blocks = 1,
                     .block_rows = runs->count,
                     .rows = runs->count,
                     .units = 1,
                     .pieces = 1,
                     .piece_bytes = runs->bytes};
}

static kvf_status add_series(kvf_copy_job *job, const series *runs) {
    const kvf_box from = rows_of(runs, runs->from, runs->from_step),
                  to = rows_of(runs, runs->to, runs->to_step);
    return runs->count ? kvf_copy_job_add(job, &(kvf_device_side){.pages = &from},
                                          &(kvf_device_side){.pages = &to}, runs->count, 1, runs->bytes)
                       : KVF_OK;
}

/* Adds runs to a job while there is room and they belong to this map's device; `count` receives how many. */
static kvf_status add_runs(const kvf_cuda_link *link, const kvf_cuda_map *map, kvf_copy_job *job,
                           const kvf_run *runs, size_t *count) {
    unsigned char *const *bases = kvf_transport_bases(link->endpoint->transport);
    series so_far = {0};
    size_t added = 0, i = 0;
    kvf_status status = KVF_OK;
    for (; i < *count && link->endpoint->devices[runs[i].local_region] == map->device; i++) {
        const series run = {.from = map->addresses[runs[i].remote_region] + runs[i].remote_offset,
                            .to = (uint64_t)(uintptr_t)bases[runs[i].local_region] + runs[i].local_offset,
                            .bytes = runs[i].bytes,
                            .count = 1};
        if (run.bytes == 0 || extends(&so_far, &run))
            continue;
        status = add_series(job, &so_far);
        if (status)
            break;
        added = i;
        so_far = run;
    }
    if (!status)
        status = add_series(job, &so_far);
    *count = status ? added : i;
    return status == KVF_E_LIMIT && added > 0 ? KVF_OK : status;
}

/* ---- nests ------------------------------------------------------------------------------------- */

static kvf_status add_group(kvf_copy_job *job, const kvf_nest_group *group, const kvf_nest_side *from,
                            const kvf_nest_side *to) {
    uint64_t address;
    uint32_t *from_ids = kvf_copy_job_table(job, 2 * group->count, &address);
    if (!from_ids)
        return KVF_E_LIMIT;
    uint32_t *to_ids = from_ids + group->count;
    kvf_nest_ids(group, from, to, from_ids, to_ids);
    const kvf_box from_pages = kvf_nest_pages(group, from, from_ids),
                  to_pages = kvf_nest_pages(group, to, to_ids);
    const kvf_device_side sides[] = {{.pages = &from_pages, .table = address, .table_on_host = from_ids},
                                     {.pages = &to_pages, .table = address, .table_on_host = from_ids}};
    return kvf_copy_job_add(job, &sides[0], &sides[1], from_pages.rows, from_pages.units,
                            group->shape->bytes);
}

/* As add_runs(), for nests. */
static kvf_status add_nests(const kvf_cuda_link *link, const kvf_cuda_map *map, kvf_copy_job *job,
                            const kvf_run *nests, const kvf_run_shape *shape, size_t *count) {
    unsigned char *const *bases = kvf_transport_bases(link->endpoint->transport);
    uint64_t here = 0, added = 0;
    kvf_status status = KVF_OK;
    while (here < *count && link->endpoint->devices[nests[here].local_region] == map->device)
        here++;
    while (added < here && !status) {
        kvf_nest_side from = {.memory = map->addresses[nests[added].remote_region],
                              .outer = shape->outer_remote,
                              .inner = shape->inner_remote},
                      to = {.memory = (uint64_t)(uintptr_t)bases[nests[added].local_region],
                            .outer = shape->outer_local,
                            .inner = shape->inner_local};
        const kvf_nest_group group = kvf_nest_group_next(nests + added, here - added, shape, &from, &to);
        status = add_group(job, &group, &from, &to);
        if (!status)
            added += group.count;
    }
    *count = added;
    return status == KVF_E_LIMIT && added > 0 ? KVF_OK : status;
}

/* ---- one copy ---------------------------------------------------------------------------------- */

static const kvf_cuda_map *map_for(const kvf_cuda_link *link, uint32_t device) {
    const kvf_cuda_map *map = link->maps;
    while (map && map->device != device)
        map = map->following;
    return map;
}

static void end_batch(kvf_cuda_link *link, kvf_batch *batch) {
    if (link->client)
        kvf_cuda_write_ended(link, batch);
    else
        kvf_batch_end(batch);
}

/* Fails the current batch: no more of it is started, and it ends once nothing of it is under way. */
static void fail_current(kvf_cuda_link *link, kvf_status status, const char *why) {
    kvf_batch *batch = kvf_slices_drop_current(&link->slices);
    kvf_batch_fail(batch, status, why);
    if (batch->in_flight == 0)
        end_batch(link, batch);
}

/* Starts a job only while the owner is there, see kvf_cuda_gate_enter(). KVF_E_PEER_LOST: the owner is gone, and the
 * job is dropped. */
static kvf_status launch(kvf_cuda_link *link, kvf_copy_job *job) {
    kvf_cuda_gate_enter();
    kvf_status status = KVF_E_PEER_LOST;
    if (kvf_cuda_link_lose_if_gone(link))
        kvf_copy_job_drop(job);
    else
        status = kvf_copy_job_start(job, NULL);
    kvf_cuda_gate_leave();
    return status;
}

/* Whether the peer's memory is mapped; if not, it is on its way, or the batch has failed. */
static bool is_mapped(kvf_cuda_link *link) {
    kvf_status status = kvf_cuda_link_map(link);
    if (status && !kvf_cuda_link_lose_if_gone(link))
        fail_current(link, status, kvf_error_detail());
    return !status && link->ready;
}

/* Tries once more to map what could not be mapped; if that fails, so do all batches up to the next one that writes.
 * False: nothing can be read now. */
static bool try_again(kvf_cuda_link *link) {
    kvf_cuda_fetch_again(link);
    const char *why = kvf_cuda_link_refusal(link);
    while (why && link->slices.current && link->slices.current->direction == KVF_READ)
        fail_current(link, KVF_E_UNSUPPORTED, why);
    return !why && link->ready && !link->lost;
}

/* Starts a copy of the next slice, by a kernel of ours. False: none was started, or the batch has failed. */
static bool start(kvf_cuda_link *link, kvf_cuda_copy *copy) {
    kvf_cuda_endpoint *endpoint = link->endpoint;
    kvf_batch *batch = link->slices.current;
    kvf_slice slice;
    kvf_slices_peek(&link->slices, CUDA_COPY_BYTES, KVF_SLICE_RUNS, &slice);
    size_t count;
    const kvf_run *runs = kvf_slice_runs(&slice, &count);
    const uint32_t device = endpoint->devices[runs->local_region];
    const kvf_cuda_map *map = map_for(link, device);
    kvf_copy_job *job;
    if (!map) {
        fail_current(link, KVF_E_UNSUPPORTED,
                     "the memory is on a device that had none when the peer was connected: connect again");
        return false;
    }
    if (kvf_cuda_link_refusal(link) && !try_again(link))
        return false;
    if (kvf_copier_begin(endpoint->copiers[device], &job))
        return false; /* until a job of another link is over */
    kvf_status status = batch->shape ? add_nests(link, map, job, runs, batch->shape, &count)
                                     : add_runs(link, map, job, runs, &count);
    if (status)
        kvf_copy_job_drop(job);
    else
        status = launch(link, job);
    if (status) {
        if (!link->lost)
            fail_current(link, status, kvf_error_detail());
        return false;
    }
    slice.count = slice.count ? count : 0;
    *copy = (kvf_cuda_copy){.batch = batch, .job = job, .started_ns = kvf_now(&kvf_monotonic)};
    batch->in_flight++;
    endpoint->changed = true;
    (void)kvf_slices_advance(&link->slices, &slice);
    return true;
}

/* A batch has moved only if the owner is there after its last copy, for a mapping outlives the owner. */
void kvf_cuda_copy_end(kvf_cuda_link *link, kvf_cuda_copy *copy, kvf_status status) {
    kvf_batch *batch = copy->batch;
    *copy = (kvf_cuda_copy){0};
    batch->in_flight--;
    link->endpoint->changed = true;
    if (status)
        kvf_batch_fail(batch, status, kvf_error_detail());
    const bool over = kvf_slices_is_over(&link->slices, batch);
    if (link->lost || kvf_cuda_link_lose_if_gone(link) || !over)
        return;
    if (batch->cancelled && batch->next < batch->count)
        kvf_slices_end(batch);
    else
        end_batch(link, batch);
}

void kvf_cuda_copy_poll(kvf_cuda_link *link) {
    for (uint32_t i = 0; i < CUDA_COPIES; i++) {
        kvf_cuda_copy *copy = &link->copies[i];
        kvf_status status = copy->job ? kvf_copy_job_poll(copy->job) : KVF_IN_PROGRESS;
        if (status != KVF_IN_PROGRESS)
            kvf_cuda_copy_end(link, copy, status);
    }
}

uint32_t kvf_cuda_copy_count(const kvf_cuda_link *link) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < CUDA_COPIES; i++)
        count += link->copies[i].job != NULL;
    return count;
}

bool kvf_cuda_copy_waits(const kvf_cuda_link *link) {
    if (link->fetching && link->fetching->due)
        return true;
    for (uint32_t i = 0; i < CUDA_COPIES; i++)
        if (link->copies[i].job || (link->copies[i].batch && !link->copies[i].sent))
            return true;
    return false;
}

/* ---- batches ----------------------------------------------------------------------------------- */

/* Whether a copy does not end: then nothing more is started. Copies under way may access memory until they end. */
static bool is_late(const kvf_cuda_link *link) {
    const uint64_t now = kvf_now(&kvf_monotonic);
    for (uint32_t i = 0; i < CUDA_COPIES; i++)
        if (link->copies[i].job && now - link->copies[i].started_ns > link->endpoint->patience_ns)
            return true;
    return false;
}

static void fail_all(kvf_cuda_link *link) {
    char why[KVF_REASON_BYTES];
    (void)snprintf(why, sizeof why,
                   "the device has not finished a copy for %llu ms (\"cuda.patience_ms\"): something on the "
                   "device hangs",
                   (unsigned long long)(link->endpoint->patience_ns / KVF_MILLISECOND));
    while (link->slices.current)
        fail_current(link, KVF_E_IO, why);
}

/* Begins to move the next slice: if its batch fails, one of the next batch, for nothing may cause another progress().
 * False: nothing can be begun now. */
static bool begin(kvf_cuda_link *link, kvf_cuda_copy *copy) {
    while (link->ready && link->slices.current && !link->lost) {
        const kvf_batch *batch = link->slices.current;
        if (batch->direction == KVF_WRITE) {
            kvf_cuda_write_start(link, copy);
            return true;
        }
        if (is_mapped(link) && start(link, copy))
            return true;
        if (link->slices.current == batch)
            return false; /* until a job of the device is over */
    }
    return false;
}

void kvf_cuda_copy_move(kvf_cuda_link *link) {
    kvf_cuda_copy_poll(link);
    if (link->lost)
        return;
    kvf_cuda_fetch_retry(link);
    kvf_slices_reap(&link->slices);
    if (is_late(link))
        fail_all(link);
    for (uint32_t i = 0; i < CUDA_COPIES && !link->lost; i++)
        if (!link->copies[i].batch && !begin(link, &link->copies[i]))
            break;
    kvf_cuda_write_send(link);
}

kvf_status kvf_cuda_copy_submit(void *self, kvf_batch *batch) {
    kvf_cuda_link *link = self;
    kvf_slices_add(&link->slices, batch);
    kvf_wake_set(&link->endpoint->wake, true);
    return KVF_OK;
}

void kvf_cuda_copy_cancel(void *self, kvf_batch *batch) {
    kvf_cuda_link *link = self;
    (void)batch;
    kvf_slices_cancel(&link->slices);
    kvf_wake_set(&link->endpoint->wake, true);
}
