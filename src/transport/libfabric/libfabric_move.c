/*
 * Moving runs with libfabric: each piece is one read or write, complete once its bytes have arrived. That is said with
 * each write, because the provider "net" forgets what was said of its endpoint.
 */
#include "transport/libfabric/libfabric.h"

static kvf_libfabric_link *link_of(const kvf_post_job *job) {
    return (kvf_libfabric_link *)job->queue;
}

static void put_back(kvf_libfabric_link *link, kvf_libfabric_move *move) {
    move->following = link->spare_moves;
    link->spare_moves = move;
}

/* An operation has failed, at once or later: so has its batch, if it has not ended, and the link, if the peer cannot be
 * reached any more. */
static void fail(kvf_post_job *job, int error) {
    kvf_libfabric_link *link = link_of(job);
    if (job->batch) {
        const char *what = job->batch->direction == KVF_READ ? "read" : "write";
        kvf_status failed = kvf_libfabric_fail(link->endpoint->library, error, what);
        kvf_batch_fail(job->batch, failed, kvf_error_detail());
    }
    if (kvf_libfabric_means_lost(error))
        kvf_libfabric_fail_link(link, error, "connection");
}

static void moved(kvf_libfabric_operation *operation, size_t bytes, int error) {
    (void)bytes;
    kvf_libfabric_move *move = (kvf_libfabric_move *)operation;
    kvf_post_job *job = move->job;
    kvf_libfabric_link *link = link_of(job);
    put_back(link, move);
    if (error)
        fail(job, error);
    else
        kvf_libfabric_mark_answered(link);
    kvf_post_completed(job);
}

kvf_status kvf_libfabric_moves_open(kvf_libfabric_link *link) {
    const uint32_t count = link->endpoint->poster.max_in_flight;
    link->moves = kvf_alloc0(count, sizeof *link->moves);
    if (!link->moves)
        return kvf_nomem("a link's operations");
    for (uint32_t i = 0; i < count; i++) {
        link->moves[i].operation.done = moved;
        put_back(link, &link->moves[i]);
    }
    return KVF_OK;
}

static kvf_status check_targets(const kvf_post_queue *queue, const kvf_batch *batch) {
    const kvf_libfabric_link *link = (const kvf_libfabric_link *)queue;
    for (size_t i = 0; i < batch->count; i++) {
        const uint32_t region = batch->runs[i].remote_region;
        if (batch->runs[i].bytes > 0 && link->targets[region].withheld)
            return kvf_fail(
                KVF_E_PERMISSION,
                "submit: region %u: its owner withholds it because its libfabric emulates one-sided "
                "operations: move it packed",
                region);
    }
    return KVF_OK;
}

static inline kvf_posted post(kvf_post_job *job, const kvf_piece *piece) {
    kvf_libfabric_link *link = link_of(job);
    const kvf_libfabric_memory *local = &link->endpoint->regions[piece->run->local_region];
    const kvf_libfabric_target *remote = &link->targets[piece->run->remote_region];
    kvf_libfabric_move *move = link->spare_moves; /* as many as may be in flight */
    const struct iovec here = {local->address + piece->run->local_offset + piece->from, piece->bytes};
    const struct fi_rma_iov there = {.addr = remote->base + piece->run->remote_offset + piece->from,
                                     .len = piece->bytes,
                                     .key = remote->key};
    void *desc = kvf_libfabric_desc(local);
    const struct fi_msg_rma message = {.msg_iov = &here,
                                       .desc = &desc,
                                       .iov_count = 1,
                                       .addr = link->address,
                                       .rma_iov = &there,
                                       .rma_iov_count = 1,
                                       .context = &move->operation};
    move->job = job;
    ssize_t failed = job->batch->direction == KVF_READ
                         ? fi_readmsg(link->port.ep, &message, FI_COMPLETION)
                         : fi_writemsg(link->port.ep, &message, FI_COMPLETION | FI_DELIVERY_COMPLETE);
    if (!failed) {
        link->spare_moves = move->following;
        return KVF_POSTED_UNDER_WAY;
    }
    if (failed == -FI_EAGAIN) {
        link->endpoint->refused = true;
        return KVF_POSTED_FULL;
    }
    fail(job, (int)-failed);
    return KVF_POSTED_DONE;
}

bool kvf_libfabric_post(kvf_libfabric_endpoint *endpoint) {
    return kvf_post_round(&endpoint->poster, post);
}

const kvf_post_actions kvf_libfabric_post_actions = {.check = check_targets,
                                                     .close = kvf_libfabric_close_lost};
