#include "cuda/over.h"

#include "base/clock.h"

#define PAUSE_NS 20000

/* After these nothing of this process runs on the device. */
static bool ends_work(CUresult result) {
    return kvf_cuda_stays(result) || result == CUDA_ERROR_DEINITIALIZED ||
           result == CUDA_ERROR_ECC_UNCORRECTABLE || result == CUDA_ERROR_NVLINK_UNCORRECTABLE;
}

/* The driver's answer about a new event, which has no work. After an error that ends work, every call fails with it. */
static CUresult ask_of_nothing(const kvf_cuda *cuda) {
    CUevent event = NULL;
    CUresult result = cuda->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (!result) {
        result = cuda->cuEventQuery(event);
        (void)cuda->cuEventDestroy_v2(event);
    }
    return result;
}

/* A device that is no longer on its bus makes every call fail with an unknown error. One alone says nothing. */
static bool has_ended(const kvf_cuda *cuda, CUresult result) {
    return ends_work(result) || (result == CUDA_ERROR_UNKNOWN && ask_of_nothing(cuda) == CUDA_ERROR_UNKNOWN);
}

kvf_status kvf_cuda_over(uint32_t device, CUevent event, const char *doing) {
    const kvf_cuda *cuda;
    const bool entered = kvf_cuda_enter(device, &cuda) == KVF_OK;
    if (!entered && kvf_cuda_find(&cuda))
        return KVF_IN_PROGRESS; /* a child of fork() */
    const CUresult result =
        cuda->cuEventQuery(event); /* without the context it still tells if that has ended */
    const bool over = result == 0 || has_ended(cuda, result);
    if (entered)
        kvf_cuda_leave(cuda);
    return over ? kvf_cuda_status(device, result, doing) : KVF_IN_PROGRESS;
}

bool kvf_cuda_is_lost(uint32_t device) {
    const kvf_cuda *cuda;
    const bool entered = kvf_cuda_enter(device, &cuda) == KVF_OK;
    if (!entered && kvf_cuda_find(&cuda))
        return false; /* a child of fork() */
    const bool lost = has_ended(cuda, ask_of_nothing(cuda));
    if (entered)
        kvf_cuda_leave(cuda);
    return lost;
}

void kvf_cuda_pause(void) {
    kvf_pause(PAUSE_NS);
}

bool kvf_cuda_await(bool (*is_over)(void *context), void *context, uint64_t patience_ns) {
    const uint64_t begun = kvf_now(&kvf_monotonic);
    while (!is_over(context)) {
        if (kvf_now(&kvf_monotonic) - begun > patience_ns)
            return false;
        kvf_cuda_pause();
    }
    return true;
}
