#include "cuda/word.h"

#include <pthread.h>

/* Large, so that hardly any process needs a second one: allocating it may wait for streams that wait for words. */
#define PAGE_BYTES (64u << 10)
#define PAGE_WORDS (PAGE_BYTES / sizeof(uint32_t))

struct kvf_cuda_word {
    uint32_t *shown; /* what streams compare: base plus the number */
    uint32_t base, most;
    kvf_cuda_word *next; /* free ones */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static kvf_cuda_word *free_words;

/* Adds a page of words, under the lock. */
static kvf_status add_page(uint32_t device) {
    const kvf_cuda *cuda;
    void *page = NULL;
    kvf_cuda_word *words = kvf_alloc0(PAGE_WORDS, sizeof *words);
    kvf_status status = words ? kvf_cuda_enter(device, &cuda) : kvf_nomem("words");
    if (!status) {
        status = kvf_cuda_status(
            cuda, cuda->cuMemHostAlloc(&page, PAGE_BYTES, CU_MEMHOST_PORTABLE | CU_MEMHOST_DEVICEMAP),
            "allocating words that streams wait for");
        kvf_cuda_leave(cuda);
    }
    if (status) {
        kvf_free(words);
        return status;
    }
    memset(page, 0, PAGE_BYTES);
    for (uint32_t i = 0; i < PAGE_WORDS; i++)
        words[i] =
            (kvf_cuda_word){.shown = (uint32_t *)page + i, .next = i + 1 < PAGE_WORDS ? &words[i + 1] : NULL};
    free_words = words;
    return KVF_OK;
}

kvf_status kvf_cuda_word_take(uint32_t device, uint32_t most, kvf_cuda_word **out) {
    const kvf_cuda *cuda;
    KVF_ASSERT(most <= KVF_CUDA_WORD_MOST);
    kvf_status status = kvf_cuda_find(&cuda); /* fails in a child of fork(), which must not touch the lock */
    if (status)
        return status;
    (void)pthread_mutex_lock(&lock);
    status = free_words ? KVF_OK : add_page(device);
    if (!status) {
        kvf_cuda_word *word = free_words;
        free_words = word->next;
        word->most = most;
        *out = word;
    }
    (void)pthread_mutex_unlock(&lock);
    return status;
}

/* In a graph, each launch would wait for the number of a request that is long over. */
static kvf_status check_not_capturing(const kvf_cuda *cuda, CUstream stream) {
    int capture = 0;
    kvf_status status =
        kvf_cuda_status(cuda, cuda->cuStreamIsCapturing(stream, &capture), "looking at a stream");
    if (!status && capture)
        return kvf_fail(KVF_E_INVALID,
                        "a CUDA graph is being captured from the stream; let it wait before the "
                        "graph is launched");
    return status;
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

kvf_status kvf_cuda_word_await(const kvf_cuda_word *word, uint32_t device, CUstream stream, uint32_t number) {
    const kvf_cuda *cuda;
    KVF_ASSERT(number <= word->most);
    kvf_status status = kvf_cuda_enter(device, &cuda);
    if (status)
        return status;
    status = check_not_capturing(cuda, stream);
    if (!status)
        status = kvf_cuda_status(cuda,
                                 cuda->cuStreamWaitValue32_v2(stream, (CUdeviceptr)(uintptr_t)word->shown,
                                                              word->base + number, flags_on(cuda, device)),
                                 "letting a stream wait");
    kvf_cuda_leave(cuda);
    return status;
}

void kvf_cuda_word_set(kvf_cuda_word *word, uint32_t number) {
    KVF_ASSERT(number <= word->most && word->base + number - *word->shown <= word->most);
    __atomic_store_n(word->shown, word->base + number, __ATOMIC_RELEASE);
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
