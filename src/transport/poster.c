#include "transport/poster.h"

#include <stdio.h>

/* ---- opening and closing ------------------------------------------------------------------------ */

void kvf_poster_open(kvf_poster *poster, const kvf_post_actions *actions, uint32_t max_in_flight,
                     kvf_wake *wake) {
    *poster = (kvf_poster){.actions = actions, .max_in_flight = max_in_flight, .wake = wake};
    poster->ready_last = &poster->ready;
}

void kvf_poster_close(kvf_poster *poster) {
    for (kvf_post_job *job = poster->spare, *following; job; job = following) {
        following = job->following;
        kvf_free(job);
    }
    poster->spare = NULL;
}

void kvf_post_queue_add(kvf_post_queue *queue) {
    KVF_LIST_ADD(queue->poster->queues, queue);
}

void kvf_post_queue_remove(kvf_post_queue *queue) {
    kvf_poster *poster = queue->poster;
    if (poster->turn == queue)
        poster->turn = NULL;
    KVF_LIST_REMOVE(poster->queues, queue);
}

/* ---- jobs --------------------------------------------------------------------------------------- */

static void make_ready(kvf_post_job *job) {
    kvf_poster *poster = job->queue->poster;
    if (job->ready)
        return;
    job->ready = true;
    job->ready_next = NULL;
    *poster->ready_last = job;
    poster->ready_last = &job->ready_next;
}

static void settle(kvf_post_job *job) {
    if (job->batch->in_flight == 0 && (job->stopped || job->batch->next == job->batch->count))
        make_ready(job);
}

static kvf_post_job *next_ready(kvf_poster *poster) {
    kvf_post_job *job = poster->ready;
    if (job) {
        poster->ready = job->ready_next;
        if (!poster->ready)
            poster->ready_last = &poster->ready;
        job->ready = false;
    }
    return job;
}

static void free_job(kvf_post_job *job) {
    kvf_post_queue *queue = job->queue;
    KVF_ASSERT(queue->posting != job); /* it is ready only when it is posted */
    KVF_QUEUE_REMOVE(queue->first, queue->last, job);
    job->following = queue->poster->spare;
    queue->poster->spare = job;
}

static kvf_status add(kvf_post_queue *queue, kvf_batch *batch) {
    kvf_poster *poster = queue->poster;
    kvf_post_job *job = poster->spare;
    if (job)
        poster->spare = job->following;
    else if (!(job = kvf_alloc(1, sizeof *job)))
        return kvf_nomem("a batch");
    *job = (kvf_post_job){.batch = batch, .queue = queue};
    batch->next = 0;
    batch->in_flight = 0;
    KVF_QUEUE_ADD(queue->first, queue->last, job);
    if (!queue->posting)
        queue->posting = job;
    return KVF_OK;
}

kvf_status kvf_post_submit(void *link, kvf_batch *batch) {
    kvf_post_queue *queue = link;
    if (queue->lost)
        return kvf_fail(KVF_E_PEER_LOST, "submit: %s", queue->lost_why);
    kvf_status status = queue->withholds ? queue->poster->actions->check(queue, batch) : KVF_OK;
    if (!status)
        status = add(queue, batch);
    if (!status)
        kvf_wake_set(queue->poster->wake, true);
    return status;
}

/* Operations in flight cannot be taken back, only waited for; posting handles the rest. */
void kvf_post_cancel(void *link, kvf_batch *batch) {
    const kvf_post_queue *queue = link;
    (void)batch;
    kvf_wake_set(queue->poster->wake, true);
}

bool kvf_post_withholds(const void *link) {
    return ((const kvf_post_queue *)link)->withholds;
}

const unsigned char *kvf_post_place(const void *link) {
    return ((const kvf_post_queue *)link)->place;
}

void kvf_post_drop(kvf_post_queue *queue) {
    kvf_poster *poster = queue->poster;
    if (!queue->first)
        return;
    kvf_post_job **at = &poster->ready;
    while (*at) {
        if ((*at)->queue == queue)
            *at = (*at)->ready_next;
        else
            at = &(*at)->ready_next;
    }
    poster->ready_last = at;
    queue->posting = NULL;
    for (kvf_post_job *job = queue->first; job; job = job->following)
        job->batch = NULL;
    while (queue->first && queue->in_flight == 0)
        free_job(queue->first);
}

/* ---- posting ------------------------------------------------------------------------------------ */

void kvf_post_completed(kvf_post_job *job) {
    job->queue->in_flight--;
    if (!job->batch)
        return;
    job->batch->in_flight--;
    settle(job);
}

void kvf_post_stop(kvf_post_job *job) {
    job->stopped = true;
    kvf_batch_fail(job->batch, KVF_E_CANCELLED, KVF_REASON_CANCELLED);
}

void kvf_post_posted(kvf_post_job *job) {
    kvf_post_queue *queue = job->queue;
    queue->posting = job->following;
    queue->posted_bytes = 0;
    settle(job);
}

/* ---- ending ------------------------------------------------------------------------------------- */

/* Cancelled and failed writes are finished too: they end when nothing of them is under way any more. */
static bool is_finishing(kvf_post_job *job) {
    const kvf_post_actions *actions = job->queue->poster->actions;
    if (job->batch->direction == KVF_READ || job->finished || !actions->finish)
        return false;
    job->finished = true;
    if (actions->finish(job) != KVF_POSTED_UNDER_WAY)
        return false;
    kvf_post_under_way(job);
    return true;
}

void kvf_post_end_ready(kvf_poster *poster) {
    kvf_post_job *job;
    while ((job = next_ready(poster))) {
        if (job->queue->lost || is_finishing(job))
            continue; /* if the peer is lost, the front ends all its batches */
        kvf_batch *batch = job->batch;
        if (!batch->failed && kvf_post_is_gone(job->queue))
            continue;
        free_job(job);
        kvf_batch_end(batch);
    }
}

/* ---- peers that are gone ------------------------------------------------------------------------ */

void kvf_post_lose(kvf_post_queue *queue, const char *why) {
    if (!queue->lost) {
        queue->lost = true;
        (void)snprintf(queue->lost_why, sizeof queue->lost_why, "%s", why);
    }
    queue->poster->any_lost = true;
}

bool kvf_post_is_gone(kvf_post_queue *queue) {
    if (!kvf_beacon_is_gone(&queue->watch))
        return false;
    kvf_post_lose(queue, KVF_BEACON_GONE);
    return true;
}

/* False: not yet. */
static bool tell_one(kvf_post_queue *queue) {
    if (!queue->poster->actions->close(queue))
        return false;
    queue->lost_told = true;
    kvf_post_drop(queue);
    kvf_peer_lost(queue->peer, queue->lost_why);
    return true;
}

/* Closing one link may make progress, in which others are lost, also such as were passed already. */
void kvf_post_tell_lost(kvf_poster *poster) {
    poster->any_lost = poster->any_lost || poster->any_closing;
    while (poster->any_lost) {
        poster->any_lost = poster->any_closing = false;
        for (kvf_post_queue *queue = poster->queues; queue; queue = queue->following)
            if (queue->lost && !queue->lost_told)
                poster->any_closing = !tell_one(queue) || poster->any_closing;
    }
}
