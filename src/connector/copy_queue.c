#include "connector/copy_queue.h"

#include <pthread.h>

#include "base/clock.h"
#include "cuda/over.h"

enum { JOBS = 8 };

struct kvf_copy_queue {
    uint32_t device;
    kvf_copier *copier;
    void *slot; /* pinned; NULL: not asked for yet */
    uint64_t patience_ns;
    kvf_copy_job *jobs[JOBS]; /* started, from `first` on, in order */
    uint32_t first, count;
    bool late;      /* a job did not end in time */
    kvf_status bad; /* of the first job that failed */
    uint64_t room;
    uint32_t *words;
    uint64_t word_count;
    kvf_device_table table;
    kvf_copy_queue *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static kvf_copy_queue *idle;
static kvf_copy_queue *abandoned; /* a device may still use what they have */

/* ---- taking and giving -------------------------------------------------------------------------- */

static kvf_copy_queue *take_idle(uint32_t device) {
    (void)pthread_mutex_lock(&lock);
    kvf_copy_queue **at = &idle;
    while (*at && (*at)->device != device)
        at = &(*at)->next;
    kvf_copy_queue *found = *at;
    if (found)
        *at = found->next;
    (void)pthread_mutex_unlock(&lock);
    return found;
}

static void put_into(kvf_copy_queue **list, kvf_copy_queue *queue) {
    (void)pthread_mutex_lock(&lock);
    queue->next = *list;
    *list = queue;
    (void)pthread_mutex_unlock(&lock);
}

kvf_status kvf_copy_queue_take(uint32_t device, uint64_t patience_ns, kvf_copy_queue **out) {
    const kvf_copier_options options = {.jobs = JOBS, .boxes = KVF_COPY_QUEUE_BOXES};
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_enter(device, &cuda);
    if (status) /* in a child of fork(), which must not touch the list: the parent may have held the lock */
        return status;
    kvf_cuda_leave(cuda);
    kvf_copy_queue *queue = take_idle(device);
    if (!queue) {
        queue = kvf_alloc0(1, sizeof *queue);
        if (!queue)
            return kvf_nomem("copies of a device");
        queue->device = device;
        status = kvf_copier_open(device, &options, &queue->copier);
    }
    if (status) {
        kvf_free(queue);
        return status;
    }
    queue->patience_ns = patience_ns;
    *out = queue;
    return KVF_OK;
}

static void free_slot(kvf_copy_queue *queue) {
    const kvf_cuda *cuda;
    if (!queue->slot || kvf_cuda_enter(queue->device, &cuda))
        return;
    (void)cuda->cuMemFreeHost(queue->slot);
    kvf_cuda_leave(cuda);
}

kvf_status kvf_copy_queue_give(kvf_copy_queue *queue, kvf_status status) {
    const kvf_status waited = kvf_copy_queue_wait(queue);
    if (queue->late) {
        put_into(&abandoned, queue);
        return status ? status : waited;
    }
    kvf_copier_drop_table(queue->copier, &queue->table);
    kvf_copier_drop_room(queue->copier, queue->room);
    kvf_free(queue->words);
    queue->words = NULL;
    queue->word_count = 0;
    queue->room = 0;
    if (!queue->bad) {
        put_into(&idle, queue);
    } else { /* the device may be unusable: the next call finds out with a new one */
        free_slot(queue);
        (void)kvf_copier_close(queue->copier);
        kvf_free(queue);
    }
    return status ? status : waited;
}

/* ---- memory ------------------------------------------------------------------------------------- */

kvf_status kvf_copy_queue_room(kvf_copy_queue *queue, uint64_t bytes, uint64_t *address) {
    KVF_ASSERT(!queue->room);
    kvf_status status = kvf_copier_room(queue->copier, bytes, &queue->room);
    *address = queue->room;
    return status;
}

kvf_status kvf_copy_queue_words(kvf_copy_queue *queue, uint64_t count, uint32_t **out) {
    KVF_ASSERT(!queue->words);
    queue->words = count <= SIZE_MAX / sizeof **out ? kvf_alloc0(count, sizeof **out) : NULL;
    queue->word_count = count;
    *out = queue->words;
    return queue->words ? KVF_OK : kvf_nomem("a block table of a device");
}

kvf_status kvf_copy_queue_upload(kvf_copy_queue *queue, uint64_t *address) {
    KVF_ASSERT(queue->words && !queue->table.address);
    kvf_status status = kvf_copier_put_table(queue->copier, queue->words, queue->word_count, &queue->table);
    *address = queue->table.address;
    return status;
}

kvf_status kvf_copy_queue_slot(kvf_copy_queue *queue, unsigned char **out) {
    const kvf_cuda *cuda;
    kvf_status status = queue->slot ? KVF_OK : kvf_cuda_enter(queue->device, &cuda);
    if (!status && !queue->slot) {
        const CUresult result =
            cuda->cuMemHostAlloc(&queue->slot, KVF_COPY_QUEUE_SLOT_BYTES, CU_MEMHOSTALLOC_PORTABLE);
        status = kvf_cuda_status(queue->device, result, "pinning memory of the host");
        if (status)
            queue->slot = NULL;
        kvf_cuda_leave(cuda);
    }
    *out = queue->slot;
    return status;
}

/* ---- jobs --------------------------------------------------------------------------------------- */

static kvf_status late(const kvf_copy_queue *queue) {
    return kvf_fail(KVF_E_IO,
                    "CUDA device %u has not finished a copy of blocks for %llu ms: something on it hangs",
                    queue->device, (unsigned long long)(queue->patience_ns / KVF_MILLISECOND));
}

/* A job that is over is polled once: then the copier has it back. */
typedef struct polled_job {
    kvf_copy_job *job;
    kvf_status status;
} polled_job;

static bool is_over(void *context) {
    polled_job *polled = context;
    polled->status = kvf_copy_job_poll(polled->job);
    return polled->status != KVF_IN_PROGRESS;
}

/* Waits for the oldest job. */
static kvf_status wait_for_one(kvf_copy_queue *queue) {
    polled_job oldest = {.job = queue->jobs[queue->first]};
    queue->late = queue->late || !kvf_cuda_await(is_over, &oldest, queue->patience_ns);
    if (queue->late)
        return late(queue);
    const kvf_status status = oldest.status;
    queue->first = (queue->first + 1) % JOBS;
    queue->count--;
    if (!queue->bad)
        queue->bad = status;
    return status;
}

kvf_status kvf_copy_queue_begin(kvf_copy_queue *queue, kvf_copy_job **out) {
    kvf_status status = KVF_OK;
    if (queue->count == JOBS)
        status = wait_for_one(queue);
    while (!status && (status = kvf_copier_begin(queue->copier, out)) == KVF_E_AGAIN && queue->count > 0)
        status = wait_for_one(queue);
    return status;
}

kvf_status kvf_copy_queue_start(kvf_copy_queue *queue, kvf_copy_job *job) {
    KVF_ASSERT(queue->count < JOBS);
    kvf_status status = kvf_copy_job_start(job, NULL);
    if (!status)
        queue->jobs[(queue->first + queue->count++) % JOBS] = job;
    else if (!queue->bad)
        queue->bad = status;
    return status;
}

kvf_status kvf_copy_queue_wait(kvf_copy_queue *queue) {
    kvf_status first = KVF_OK;
    while (queue->count > 0 && !queue->late) {
        const kvf_status status = wait_for_one(queue);
        if (!first)
            first = status;
    }
    return first;
}
