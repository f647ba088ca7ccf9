#include "cuda/word.h"

#include <pthread.h>
#include <stdatomic.h>

#define PAGE_BYTES (64u << 10)
#define PAGE_WORDS (PAGE_BYTES / sizeof(uint32_t))

struct kvf_cuda_word {
    uint32_t *shown; /* what streams compare: base plus the number */
    uint32_t base, most;
    uint32_t awaited;    /* the highest number that was marked; 0: none */
    kvf_cuda_word *next; /* free ones */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* nobody who has it waits for anything */
static kvf_cuda_word *free_words;
static _Atomic uint32_t awaited_words; /* whose number is below the highest that was marked */

/* ---- pages ------------------------------------------------------------------------------------- */

static kvf_status allocate_page(uint32_t device, void **page) {
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_enter(device, &cuda);
    if (status)
        return status;
    status = kvf_cuda_status(
        cuda, cuda->cuMemHostAlloc(page, PAGE_BYTES, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
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

kvf_status kvf_cuda_word_take(uint32_t most, kvf_cuda_word **out) {
    const kvf_cuda *cuda;
    KVF_ASSERT(most <= KVF_CUDA_WORD_MOST);
    kvf_status status = kvf_cuda_find(&cuda); /* fails in a child of fork(), which must not touch the lock */
    if (status)
        return status;
    (void)pthread_mutex_lock(&lock);
    kvf_cuda_word *word = free_words;
    if (word)
        free_words = word->next;
    (void)pthread_mutex_unlock(&lock);
    if (!word)
        return KVF_E_AGAIN;
    word->most = most;
    word->awaited = 0;
    *out = word;
    return KVF_OK;
}

static bool is_awaited(const kvf_cuda_word *word) {
    return *word->shown - word->base < word->awaited;
}

kvf_cuda_mark kvf_cuda_word_mark(kvf_cuda_word *word, uint32_t number) {
    const bool before = is_awaited(word);
    KVF_ASSERT(number <= word->most);
    word->awaited = number > word->awaited ? number : word->awaited;
    if (!before && is_awaited(word))
        (void)atomic_fetch_add(&awaited_words, 1);
    return (kvf_cuda_mark){word->shown, word->base + number};
}

void kvf_cuda_word_set(kvf_cuda_word *word, uint32_t number) {
    const bool before = is_awaited(word);
    KVF_ASSERT(number <= word->most && word->base + number - *word->shown <= word->most);
    __atomic_store_n(word->shown, word->base + number, __ATOMIC_RELEASE);
    if (before && !is_awaited(word))
        (void)atomic_fetch_sub(&awaited_words, 1);
}

void kvf_cuda_word_give(kvf_cuda_word *word) {
    if (!word)
        return;
    kvf_cuda_word_set(word, word->most);
    word->base += word->most;
    (void)pthread_mutex_lock(&lock);
    word->next = free_words;
    free_words = word;
    (void)pthread_mutex_unlock(&lock);
}

bool kvf_cuda_words_awaited(void) {
    return atomic_load(&awaited_words) > 0;
}

/* ---- streams ------------------------------------------------------------------------------------ */

/* In a graph, each launch would wait for the number of a request that is long over. */
static kvf_status check_not_capturing(const kvf_cuda *cuda, CUstream stream) {
    int capture = 0;
    const CUresult result = cuda->cuStreamIsCapturing(stream, &capture);
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || (!result && capture))
        return kvf_fail(KVF_E_INVALID,
                        "a CUDA graph is being captured from %s; let it wait before the graph is launched",
                        result ? "a stream that the default stream waits for" : "the stream");
    return kvf_cuda_status(cuda, result, "looking at a stream");
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
    status = check_not_capturing(cuda, stream);
    if (!status)
        status = kvf_cuda_status(cuda,
                                 cuda->cuStreamWaitValue32_v2(stream, (CUdeviceptr)(uintptr_t)mark->shown,
                                                              mark->value, flags_on(cuda, device)),
                                 "letting a stream wait");
    kvf_cuda_leave(cuda);
    return status;
}
