/*
 * Moving runs with UCX. UCX calls back on completion, from inside its own progress.
 */
#include "transport/ucx/ucx.h"

static kvf_ucx_link *link_of(const kvf_post_job *job) {
    return (kvf_ucx_link *)job->queue;
}

/* ---- accepting ------------------------------------------------------------------------------- */

static kvf_status check_keys(const kvf_post_queue *queue, const kvf_batch *batch) {
    const kvf_ucx_link *link = (const kvf_ucx_link *)queue;
    for (size_t i = 0; i < batch->count; i++) {
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

/* ---- posting --------------------------------------------------------------------------------- */

static const char *word_of(const kvf_post_job *job) {
    return job->batch->direction == KVF_READ ? "read" : "write";
}

static void fail(kvf_post_job *job, ucs_status_t status, const char *what) {
    kvf_status failed = kvf_ucx_fail(link_of(job)->ucx, status, what);
    kvf_batch_fail(job->batch, failed, kvf_error_detail());
}

static void completed(void *request, ucs_status_t status, void *user_data) {
    kvf_post_job *job = user_data;
    kvf_ucx_link *link = link_of(job);
    link->ucx->ucp_request_free(request);
    link->queue.answered = link->queue.answered || status == UCS_OK;
    if (status != UCS_OK && job->batch)
        fail(job, status, word_of(job));
    kvf_post_completed(job);
}

static kvf_posted take_result(kvf_post_job *job, ucs_status_ptr_t result, const char *what) {
    if (UCS_PTR_IS_PTR(result))
        return KVF_POSTED_UNDER_WAY;
    if (UCS_PTR_IS_ERR(result))
        fail(job, UCS_PTR_STATUS(result), what);
    return KVF_POSTED_DONE;
}

void kvf_ucx_prepare(kvf_ucx_link *link) {
    link->param = (ucp_request_param_t){
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FIELD_MEMH,
        .cb.send = completed,
    };
}

static inline kvf_posted post(kvf_post_job *job, const kvf_piece *piece) {
    kvf_ucx_link *link = link_of(job);
    const kvf_ucx_memory *local = &link->endpoint->regions[piece->run->local_region];
    const kvf_ucx_target *remote = &link->targets[piece->run->remote_region];
    unsigned char *here = local->address + piece->run->local_offset + piece->from;
    const uint64_t there = remote->address + piece->run->remote_offset + piece->from;
    const bool reads = job->batch->direction == KVF_READ;
    link->param.user_data = job;
    link->param.memory_type = local->type;
    link->param.memh = local->handle;
    ucs_status_ptr_t result =
        reads ? link->ucx->ucp_get_nbx(link->ep, here, piece->bytes, there, remote->key, &link->param)
              : link->ucx->ucp_put_nbx(link->ep, here, piece->bytes, there, remote->key, &link->param);
    return take_result(job, result, reads ? "read" : "write");
}

bool kvf_ucx_post(kvf_ucx_endpoint *endpoint) {
    return kvf_post_round(&endpoint->poster, post);
}

/* A put completes here when its bytes have left; a flush, when they have arrived. */
static kvf_posted flush(kvf_post_job *job) {
    const kvf_ucx_link *link = link_of(job);
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = completed,
        .user_data = job,
    };
    return take_result(job, link->ucx->ucp_ep_flush_nbx(link->ep, &param), "flush");
}

const kvf_post_actions kvf_ucx_post_actions = {
    .check = check_keys, .finish = flush, .close = kvf_ucx_close_lost};
