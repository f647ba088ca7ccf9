#include "transport/poster.h"

/* ---- opening and closing ------------------------------------------------------------------------ */

void kvf_poster_open(kvf_poster *poster, const kvf_post_actions *actions, uint32_t max_in_flight) {
    *poster = (kvf_poster){.actions = actions, .max_in_flight = max_in_flight};
    poster->ready_last = &poster->ready;
}

void kvf_poster_close(kvf_poster *poster) {
    for (kvf_post_job *job = poster->spare, *following; job; job = following) {
        following = job->following;
        kvf_free(job);
    }
    poster->spare = NULL;
}

void kvf_post_queue_add(kvf_poster *poster, kvf_post_queue *queue) {
    queue->poster = poster;
    KVF_LIST_ADD(poster->queues, queue);
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
    if (queue->posting == job) {
        queue->posting = job->following;
        queue->posted_bytes = 0;
    }
    KVF_QUEUE_REMOVE(queue->first, queue->last, job);
    job->following = queue->poster->spare;
    queue->poster->spare = job;
}

kvf_status kvf_post_add(kvf_post_queue *queue, kvf_batch *batch) {
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
        if (job->queue->halted || is_finishing(job))
            continue; /* if the peer is lost, the front ends all its batches */
        kvf_batch *batch = job->batch;
        if (!batch->failed && poster->actions->is_gone(job->queue))
            continue;
        free_job(job);
        kvf_batch_end(batch);
    }
}
