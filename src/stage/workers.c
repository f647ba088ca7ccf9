#include "stage/workers.h"

#include <errno.h>
#include <pthread.h>

#include "base/fork.h"
#include "base/list.h"
#include "base/thread.h"
#include "base/wake.h"

typedef struct job_list {
    kvf_job *first, *last;
} job_list;

struct kvf_workers {
    pthread_mutex_t lock; /* guards the fields below, and the private part of jobs */
    pthread_cond_t work;  /* a job is queued, or the threads are to end */
    pthread_cond_t ended; /* a job that was under way is done */
    job_list queued, done;
    uint32_t under_way;
    bool stopping;
    kvf_wake wake;
    uint32_t forks; /* kvf_fork_count() of the process that has the threads */
    uint32_t count;
    pthread_t threads[KVF_WORKERS_MAX];
};

void kvf_job_do(const kvf_job *job) {
    if (job->gathers)
        kvf_stream_gather(job->stream, job->bases, job->bytes, job->slot);
    else
        kvf_stream_scatter(job->stream, job->bases, job->bytes, job->slot);
}

/* ---- the threads ----------------------------------------------------------------------------- */

static void lock(kvf_workers *workers) {
    (void)pthread_mutex_lock(&workers->lock);
}

static void unlock(kvf_workers *workers) {
    (void)pthread_mutex_unlock(&workers->lock);
}

/* Does the first job that is queued, outside the lock. */
static void do_first(kvf_workers *workers) {
    kvf_job *job = workers->queued.first;
    KVF_QUEUE_REMOVE(workers->queued.first, workers->queued.last, job);
    job->state = KVF_JOB_UNDER_WAY;
    workers->under_way++;
    unlock(workers);
    kvf_job_do(job);
    lock(workers);
    workers->under_way--;
    job->state = KVF_JOB_DONE;
    KVF_QUEUE_ADD(workers->done.first, workers->done.last, job);
    kvf_wake_set(&workers->wake, true);
    (void)pthread_cond_broadcast(&workers->ended);
}

static void *run(void *context) {
    kvf_workers *workers = context;
    lock(workers);
    while (!workers->stopping) {
        if (workers->queued.first)
            do_first(workers);
        else
            (void)pthread_cond_wait(&workers->work, &workers->lock);
    }
    unlock(workers);
    return NULL;
}

static kvf_status start(kvf_workers *workers, uint32_t count) {
    int error = 0;
    while (workers->count < count && !error) {
        error = kvf_thread_start(&workers->threads[workers->count], run, workers);
        workers->count += !error;
    }
    return error ? kvf_fail(KVF_E_IO, "a worker of a stage: %s", strerror(error)) : KVF_OK;
}

/* ---- opening and closing --------------------------------------------------------------------- */

kvf_status kvf_workers_open(uint32_t count, kvf_workers **out) {
    KVF_ASSERT(count >= 1 && count <= KVF_WORKERS_MAX);
    kvf_workers *workers = kvf_alloc0(1, sizeof *workers);
    if (!workers)
        return kvf_nomem("the workers of a stage");
    workers->forks = kvf_fork_count();
    (void)pthread_mutex_init(&workers->lock, NULL);
    (void)pthread_cond_init(&workers->work, NULL);
    (void)pthread_cond_init(&workers->ended, NULL);
    kvf_status status = kvf_wake_open(&workers->wake);
    if (!status)
        status = start(workers, count);
    if (status) {
        kvf_workers_close(workers);
        return status;
    }
    *out = workers;
    return KVF_OK;
}

static bool is_inherited(const kvf_workers *workers) {
    return workers->forks != kvf_fork_count();
}

void kvf_workers_close(kvf_workers *workers) {
    if (!workers || is_inherited(workers))
        return;
    lock(workers);
    KVF_ASSERT(!workers->queued.first && workers->under_way == 0);
    workers->stopping = true;
    (void)pthread_cond_broadcast(&workers->work);
    unlock(workers);
    for (uint32_t i = 0; i < workers->count; i++)
        (void)pthread_join(workers->threads[i], NULL);
    kvf_wake_close(&workers->wake);
    (void)pthread_cond_destroy(&workers->ended);
    (void)pthread_cond_destroy(&workers->work);
    (void)pthread_mutex_destroy(&workers->lock);
    kvf_free(workers);
}

int kvf_workers_fd(const kvf_workers *workers) {
    return workers->wake.fd;
}

/* ---- jobs ------------------------------------------------------------------------------------ */

void kvf_workers_put(kvf_workers *workers, kvf_job *job) {
    if (is_inherited(workers))
        return;
    lock(workers);
    KVF_ASSERT(job->state == KVF_JOB_APART);
    job->state = KVF_JOB_QUEUED;
    KVF_QUEUE_ADD(workers->queued.first, workers->queued.last, job);
    (void)pthread_cond_signal(&workers->work);
    unlock(workers);
}

/* Takes a job that is done. After the last one the descriptor is no longer readable. */
static void pick(kvf_workers *workers, kvf_job *job) {
    KVF_QUEUE_REMOVE(workers->done.first, workers->done.last, job);
    job->state = KVF_JOB_APART;
    kvf_wake_set(&workers->wake, workers->done.first != NULL);
}

kvf_job *kvf_workers_take(kvf_workers *workers) {
    if (is_inherited(workers))
        return NULL;
    lock(workers);
    kvf_job *job = workers->done.first;
    if (job)
        pick(workers, job);
    unlock(workers);
    return job;
}

void kvf_workers_withdraw(kvf_workers *workers, kvf_job *job) {
    if (is_inherited(workers))
        return;
    lock(workers);
    while (job->state == KVF_JOB_UNDER_WAY)
        (void)pthread_cond_wait(&workers->ended, &workers->lock);
    if (job->state == KVF_JOB_QUEUED) {
        KVF_QUEUE_REMOVE(workers->queued.first, workers->queued.last, job);
        job->state = KVF_JOB_APART;
    } else if (job->state == KVF_JOB_DONE) {
        pick(workers, job);
    }
    unlock(workers);
}

void kvf_workers_settle(kvf_workers *workers) {
    if (is_inherited(workers))
        return;
    lock(workers);
    while (workers->queued.first || workers->under_way > 0) {
        if (workers->queued.first)
            do_first(workers);
        else
            (void)pthread_cond_wait(&workers->ended, &workers->lock);
    }
    unlock(workers);
}
