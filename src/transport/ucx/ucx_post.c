/*
 * Moving runs with UCX: jobs, posting with a bounded number in flight, and completions.
 *
 *   submit -> posting -> all posted -> nothing in flight: ready -> (a write: flushed -> ready again) -> ended
 *
 * UCX calls back on completion, from inside its own progress; the callbacks only count, and put a job on the
 * endpoint's ready list after its last operation.
 */
#include "transport/ucx/ucx.h"

/* The most bytes that one progress() copies itself, and the most operations that it posts. */
#define BYTES_A_ROUND (4u << 20)
#define OPERATIONS_A_ROUND 4096u
/* Longer runs go out in pieces, so that a batch can be cancelled in the middle of a run. */
#define PIECE_BYTES (4u << 20)

/* ---- jobs ------------------------------------------------------------------------------------ */

static void make_ready(kvf_ucx_job *job) {
    kvf_ucx_endpoint *endpoint = job->link->endpoint;
    if (job->ready)
        return;
    job->ready = true;
    job->ready_next = NULL;
    *endpoint->ready_last = job;
    endpoint->ready_last = &job->ready_next;
}

static void settle(kvf_ucx_job *job) {
    if (job->batch->in_flight == 0 && (job->stopped || job->batch->next == job->batch->count))
        make_ready(job);
}

static kvf_ucx_job *next_ready(kvf_ucx_endpoint *endpoint) {
    kvf_ucx_job *job = endpoint->ready;
    if (job) {
        endpoint->ready = job->ready_next;
        if (!endpoint->ready)
            endpoint->ready_last = &endpoint->ready;
        job->ready = false;
    }
    return job;
}

static void free_job(kvf_ucx_job *job) {
    kvf_ucx_link *link = job->link;
    if (link->posting == job) {
        link->posting = job->following;
        link->posted_bytes = 0;
    }
    KVF_QUEUE_REMOVE(link->first, link->last, job);
    job->following = link->endpoint->spare_jobs;
    link->endpoint->spare_jobs = job;
}

void kvf_ucx_drop_jobs(kvf_ucx_link *link) {
    kvf_ucx_endpoint *endpoint = link->endpoint;
    kvf_ucx_job **at = &endpoint->ready;
    while (*at) {
        if ((*at)->link == link)
            *at = (*at)->ready_next;
        else
            at = &(*at)->ready_next;
    }
    endpoint->ready_last = at;
    link->posting = NULL;
    for (kvf_ucx_job *job = link->first; job; job = job->following)
        job->batch = NULL;
    while (link->first && link->in_flight == 0)
        free_job(link->first);
}

static kvf_status check_keys(const kvf_ucx_link *link, const kvf_batch *batch) {
    for (size_t i = 0; i < batch->count && link->withholds; i++) {
        uint32_t region = batch->runs[i].remote_region;
        if (batch->runs[i].bytes > 0 && !link->targets[region].key)
            return kvf_fail(KVF_E_PERMISSION,
                            "submit: region %u: its owner withholds it because its UCX would emulate "
                            "one-sided operations: move it packed or over messages, or set ucx.emulated to "
                            "\"on\" at the owner; to move it packed, the owner's stage must reach this "
                            "endpoint: the setting ucx.devices says which interfaces to use",
                            region);
    }
    return KVF_OK;
}

kvf_status kvf_ucx_submit(void *self, kvf_batch *batch) {
    kvf_ucx_link *link = self;
    kvf_ucx_endpoint *endpoint = link->endpoint;
    if (link->lost)
        return kvf_fail(KVF_E_PEER_LOST, "submit: %s", link->lost_why);
    kvf_status status = check_keys(link, batch);
    if (status)
        return status;
    kvf_ucx_job *job = endpoint->spare_jobs;
    if (job)
        endpoint->spare_jobs = job->following;
    else if (!(job = kvf_alloc(1, sizeof *job)))
        return kvf_nomem("a batch");
    *job = (kvf_ucx_job){.batch = batch, .link = link};
    batch->next = 0;
    batch->in_flight = 0;
    KVF_QUEUE_ADD(link->first, link->last, job);
    if (!link->posting)
        link->posting = job;
    kvf_wake_set(&endpoint->wake, true);
    return KVF_OK;
}

/* Operations in flight cannot be taken back, only waited for; posting handles the rest. */
void kvf_ucx_cancel(void *self, kvf_batch *batch) {
    (void)batch;
    kvf_ucx_link *link = self;
    kvf_wake_set(&link->endpoint->wake, true);
}

/* ---- posting --------------------------------------------------------------------------------- */

static void fail(kvf_ucx_job *job, ucs_status_t status, const char *what) {
    kvf_status failed = kvf_ucx_fail(job->link->ucx, status, what);
    kvf_batch_fail(job->batch, failed, kvf_error_detail());
}

static void completed(void *request, ucs_status_t status, void *user_data) {
    kvf_ucx_job *job = user_data;
    job->link->ucx->ucp_request_free(request);
    job->link->in_flight--;
    job->link->answered = job->link->answered || status == UCS_OK;
    if (!job->batch)
        return;
    job->batch->in_flight--;
    if (status != UCS_OK)
        fail(job, status, job->batch->direction == KVF_READ ? "read" : "write");
    settle(job);
}

static void take_result(kvf_ucx_job *job, ucs_status_ptr_t result, const char *what) {
    if (UCS_PTR_IS_PTR(result)) {
        job->link->in_flight++;
        job->batch->in_flight++;
    } else if (UCS_PTR_IS_ERR(result)) {
        fail(job, UCS_PTR_STATUS(result), what);
    }
}

static void skip_rest(kvf_ucx_job *job) {
    job->stopped = true;
    kvf_batch_fail(job->batch, KVF_E_CANCELLED, KVF_REASON_CANCELLED);
}

/* Posts the next piece of a run; returns how much completed at once. The front has checked the run against
 * the sizes of both regions, so plain arithmetic is safe. */
static uint64_t post_piece(kvf_ucx_link *link, kvf_ucx_job *job, ucp_request_param_t *param) {
    kvf_batch *batch = job->batch;
    const kvf_run *run = &batch->runs[batch->next];
    const kvf_ucx_memory *local = &link->endpoint->regions[run->local_region];
    const kvf_ucx_target *remote = &link->targets[run->remote_region];
    uint64_t done = link->posted_bytes;
    uint64_t bytes = kvf_min_u64(run->bytes - done, PIECE_BYTES);
    unsigned char *here = local->address + run->local_offset + done;
    uint64_t there = remote->address + run->remote_offset + done;
    ucs_status_ptr_t result = NULL;
    param->memory_type = local->type;
    param->memh = local->handle;
    if (bytes > 0 && batch->direction == KVF_READ)
        result = link->ucx->ucp_get_nbx(link->ep, here, bytes, there, remote->key, param);
    else if (bytes > 0)
        result = link->ucx->ucp_put_nbx(link->ep, here, bytes, there, remote->key, param);
    if (done + bytes < run->bytes) {
        link->posted_bytes = done + bytes;
    } else {
        link->posted_bytes = 0;
        batch->next++;
    }
    if (result)
        take_result(job, result, batch->direction == KVF_READ ? "read" : "write");
    return UCS_PTR_IS_PTR(result) ? 0 : bytes;
}

/* Posts a link's runs; returns whether the budget ended it. */
static bool post_link(kvf_ucx_link *link, uint64_t *bytes_left, uint32_t *operations_left) {
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FIELD_MEMH,
        .cb.send = completed,
    };
    kvf_ucx_job *job;
    while ((job = link->posting) && !link->lost) {
        const kvf_batch *batch = job->batch;
        param.user_data = job;
        while (batch->next < batch->count) {
            if (batch->cancelled || batch->failed) {
                skip_rest(job);
                break;
            }
            if (link->in_flight >= link->endpoint->max_in_flight)
                return false;
            if (*bytes_left == 0 || *operations_left == 0)
                return true;
            *bytes_left -= kvf_min_u64(*bytes_left, post_piece(link, job, &param));
            --*operations_left;
        }
        link->posting = job->following;
        link->posted_bytes = 0;
        settle(job);
    }
    return false;
}

bool kvf_ucx_post(kvf_ucx_endpoint *endpoint) {
    uint64_t bytes = BYTES_A_ROUND;
    uint32_t operations = OPERATIONS_A_ROUND;
    kvf_ucx_link *begin = endpoint->turn ? endpoint->turn : endpoint->links;
    kvf_ucx_link *link = begin;
    while (link) {
        kvf_ucx_link *following = link->following ? link->following : endpoint->links;
        if (post_link(link, &bytes, &operations)) {
            endpoint->turn = following;
            return true;
        }
        link = following == begin ? NULL : following;
    }
    return false;
}

/* ---- ending ---------------------------------------------------------------------------------- */

/* A put completes here when its bytes have left; a flush, when they have arrived. Cancelled and failed writes are
 * flushed too: they end when nothing of them is under way any more. */
static bool still_flushing(kvf_ucx_job *job) {
    if (job->batch->direction == KVF_READ || job->flushed || job->link->lost)
        return false;
    job->flushed = true;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = completed,
        .user_data = job,
    };
    take_result(job, job->link->ucx->ucp_ep_flush_nbx(job->link->ep, &param), "flush");
    return job->batch->in_flight > 0;
}

void kvf_ucx_end_ready(kvf_ucx_endpoint *endpoint) {
    kvf_ucx_job *job;
    while ((job = next_ready(endpoint))) {
        kvf_ucx_link *link = job->link;
        if (link->lost || still_flushing(job))
            continue; /* if it is lost, the front ends all its batches */
        kvf_batch *batch = job->batch;
        /* If the peer is gone, its memory may have held other data, so the batch does not count. */
        if (!batch->failed && link->watch >= 0 && kvf_ucx_beacon_gone(link->watch)) {
            kvf_ucx_mark_lost(link, KVF_UCX_BEACON_GONE);
            continue;
        }
        free_job(job);
        kvf_batch_end(batch);
    }
}
