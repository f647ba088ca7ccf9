#include "cuda/word.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <utlist.h>

#include "base/clock.h"
#include "base/thread.h"

#define PAGE_BYTES (64u << 10)
#define PAGE_WORDS (PAGE_BYTES / sizeof(uint32_t))

struct kvf_cuda_word {
    uint32_t *shown; /* what streams compare: base plus the number */
    uint32_t base, most;
    uint32_t awaited; /* the highest number that was marked; 0: none */
    uint64_t until;   /* by the monotonic clock, for the guard */
    bool late;        /* the guard has let its streams go */
    kvf_cuda_word *prev, *next;
};

/* For all that follows and all words: the guard has it, too. Nobody who has it waits for the driver. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static kvf_cuda_word *free_words, *taken_words;
static pthread_mutex_t guard_lock = PTHREAD_MUTEX_INITIALIZER; /* of who starts and stops it; taken first */
static struct {
    uint32_t users; /* the thread runs while there are any */
    pthread_t thread;
    pthread_cond_t turned; /* a word is to be looked at earlier, or nobody uses the guard any more */
    uint64_t next;         /* when it looks again */
} guard;
static _Atomic uint32_t awaited_words; /* whose number is below the highest that was marked */

/* ---- pages ------------------------------------------------------------------------------------- */

static kvf_status allocate_page(uint32_t device, void **page) {
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_enter(device, &cuda);
    if (status)
        return status;
    status = kvf_cuda_status(
        device, cuda->cuMemHostAlloc(page, PAGE_BYTES, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
        "allocating words that streams wait for");
    kvf_cuda_leave(cuda);
    return status;
}

kvf_status kvf_cuda_words_add(uint32_t device) {
    void *page = NULL;
    kvf_cuda_word *words = kvf_alloc0(PAGE_WORDS, sizeof *words);
    kvf_status status = words ? allocate_page(device, &page) : kvf_nomem("words");
    if (status) {
        kvf_free(words);
        return status;
    }
    memset(page, 0, PAGE_BYTES);
    (void)pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < PAGE_WORDS; i++) {
        words[i] = (kvf_cuda_word){.shown = (uint32_t *)page + i, .next = free_words};
        free_words = &words[i];
    }
    (void)pthread_mutex_unlock(&lock);
    return KVF_OK;
}

/* ---- words ------------------------------------------------------------------------------------- */

kvf_status kvf_cuda_word_take(uint32_t most, uint64_t wait_ns, kvf_cuda_word **out) {
    const kvf_cuda *cuda;
    KVF_ASSERT(most <= KVF_CUDA_WORD_MOST);
    kvf_status status = kvf_cuda_find(&cuda); /* fails in a child of fork(), which must not touch the lock */
    if (status)
        return status;
    (void)pthread_mutex_lock(&lock);
    kvf_cuda_word *word = free_words;
    if (word) {
        LL_DELETE(free_words, word);
        DL_APPEND(taken_words, word);
        word->most = most;
        word->awaited = 0;
        word->late = false;
        word->until = kvf_add_or_most(kvf_now(&kvf_monotonic), wait_ns);
        if (guard.users > 0 && word->until < guard.next)
            (void)pthread_cond_signal(&guard.turned);
    }
    (void)pthread_mutex_unlock(&lock);
    *out = word;
    return word ? KVF_OK : KVF_E_AGAIN;
}

static bool is_awaited(const kvf_cuda_word *word) {
    return *word->shown - word->base < word->awaited;
}

/* Shows a number. With the lock. */
static void show(kvf_cuda_word *word, uint32_t number) {
    const bool before = is_awaited(word);
    KVF_ASSERT(number <= word->most && word->base + number - *word->shown <= word->most);
    __atomic_store_n(word->shown, word->base + number, __ATOMIC_RELEASE);
    if (before && !is_awaited(word))
        (void)atomic_fetch_sub(&awaited_words, 1);
}

kvf_cuda_mark kvf_cuda_word_mark(kvf_cuda_word *word, uint32_t number) {
    (void)pthread_mutex_lock(&lock);
    const bool before = is_awaited(word);
    KVF_ASSERT(number <= word->most);
    word->awaited = number > word->awaited ? number : word->awaited;
    if (!before && is_awaited(word))
        (void)atomic_fetch_add(&awaited_words, 1);
    (void)pthread_mutex_unlock(&lock);
    return (kvf_cuda_mark){word->shown, word->base + number};
}

void kvf_cuda_word_set(kvf_cuda_word *word, uint32_t number) {
    (void)pthread_mutex_lock(&lock);
    if (!word->late)
        show(word, number);
    (void)pthread_mutex_unlock(&lock);
}

bool kvf_cuda_word_give(kvf_cuda_word *word) {
    if (!word)
        return true;
    (void)pthread_mutex_lock(&lock);
    const bool in_time = !word->late;
    show(word, word->most);
    word->base += word->most;
    DL_DELETE(taken_words, word);
    LL_PREPEND(free_words, word);
    (void)pthread_mutex_unlock(&lock);
    return in_time;
}

bool kvf_cuda_words_awaited(void) {
    return atomic_load(&awaited_words) > 0;
}

/* ---- the guard ---------------------------------------------------------------------------------- */

/* Lets the streams of words go whose time is over; returns when the next one's is. With the lock. */
static uint64_t let_late_ones_go(void) {
    const uint64_t now = kvf_now(&kvf_monotonic);
    uint64_t next = UINT64_MAX;
    kvf_cuda_word *word;
    DL_FOREACH(taken_words, word) {
        if (word->late)
            continue;
        if (word->until > now) {
            next = word->until < next ? word->until : next;
            continue;
        }
        word->late = true;
        show(word, word->most);
    }
    return next;
}

static void *watch(void *unused) {
    (void)unused;
    (void)pthread_mutex_lock(&lock);
    while (guard.users > 0) {
        guard.next = let_late_ones_go();
        const struct timespec until = {.tv_sec = (time_t)(guard.next / KVF_SECOND),
                                       .tv_nsec = (long)(guard.next % KVF_SECOND)};
        if (guard.next == UINT64_MAX)
            (void)pthread_cond_wait(&guard.turned, &lock);
        else
            (void)pthread_cond_timedwait(&guard.turned, &lock, &until);
    }
    (void)pthread_mutex_unlock(&lock);
    return NULL;
}

static kvf_status begin_watching(void) {
    pthread_condattr_t clock;
    int error = pthread_condattr_init(&clock);
    if (!error) {
        (void)pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
        error = pthread_cond_init(&guard.turned, &clock);
        (void)pthread_condattr_destroy(&clock);
    }
    if (!error) {
        error = kvf_thread_start(&guard.thread, watch, NULL);
        if (error)
            (void)pthread_cond_destroy(&guard.turned);
    }
    return error ? kvf_fail(KVF_E_IO, "the thread that lets late streams go: %s", strerror(error)) : KVF_OK;
}

kvf_status kvf_cuda_guard_start(void) {
    kvf_status status = KVF_OK;
    (void)pthread_mutex_lock(&guard_lock);
    (void)pthread_mutex_lock(&lock);
    if (guard.users == 0)
        status = begin_watching();
    guard.users += !status;
    (void)pthread_mutex_unlock(&lock);
    (void)pthread_mutex_unlock(&guard_lock);
    return status;
}

void kvf_cuda_guard_stop(void) {
    (void)pthread_mutex_lock(&guard_lock);
    (void)pthread_mutex_lock(&lock);
    const bool was_last = --guard.users == 0;
    if (was_last)
        (void)pthread_cond_signal(&guard.turned);
    (void)pthread_mutex_unlock(&lock);
    if (was_last) {
        (void)pthread_join(guard.thread, NULL);
        (void)pthread_cond_destroy(&guard.turned);
    }
    (void)pthread_mutex_unlock(&guard_lock);
}

/* ---- streams ------------------------------------------------------------------------------------ */

/* In a graph, each launch would wait for the number of a request that is long over. */
static kvf_status check_not_capturing(const kvf_cuda *cuda, uint32_t device, CUstream stream) {
    int capture = 0;
    const CUresult result = cuda->cuStreamIsCapturing(stream, &capture);
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || (!result && capture))
        return kvf_fail(KVF_E_INVALID,
                        "a CUDA graph is being captured from %s; let it wait before the graph is launched",
                        result ? "a stream that the default stream waits for" : "the stream");
    return kvf_cuda_status(device, result, "looking at a stream");
}

/* Network cards may write a device's memory past its caches: where the device can, the stream flushes such writes. */
static unsigned flags_on(const kvf_cuda *cuda, uint32_t device) {
    int can_flush = 0;
    CUdevice handle;
    if (cuda->cuDeviceGet(&handle, (int)device) ||
        cuda->cuDeviceGetAttribute(&can_flush, CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, handle))
        can_flush = 0;
    return CU_STREAM_WAIT_VALUE_GEQ | (can_flush ? CU_STREAM_WAIT_VALUE_FLUSH : 0);
}

kvf_status kvf_cuda_mark_await(const kvf_cuda_mark *mark, uint32_t device, CUstream stream) {
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_enter(device, &cuda);
    if (status)
        return status;
    status = check_not_capturing(cuda, device, stream);
    if (!status)
        status = kvf_cuda_status(device,
                                 cuda->cuStreamWaitValue32_v2(stream, (CUdeviceptr)(uintptr_t)mark->shown,
                                                              mark->value, flags_on(cuda, device)),
                                 "letting a stream wait");
    kvf_cuda_leave(cuda);
    return status;
}
