#include "cuda/moment.h"

#include "cuda/over.h"

struct kvf_cuda_moment {
    uint32_t device;
    CUstream stream;
    CUevent event; /* on our stream, behind the caller's event */
};

/* Waiting for an event that belongs to a graph would make our stream a part of the graph, and never see it happen. */
static kvf_status check_not_captured(const kvf_cuda *cuda, uint32_t device, CUevent event) {
    const CUresult result = cuda->cuEventQuery(event);
    if (result == CUDA_ERROR_CAPTURED_EVENT)
        return kvf_fail(
            KVF_E_INVALID,
            "the event was recorded in a stream while a CUDA graph was captured from it; give one "
            "that is recorded after the graph is launched");
    return result == CUDA_ERROR_NOT_READY ? KVF_OK : kvf_cuda_status(device, result, "waiting for an event");
}

static kvf_status follow(const kvf_cuda *cuda, kvf_cuda_moment *moment, CUevent event) {
    CUresult result = kvf_cuda_greatest_stream(cuda, &moment->stream);
    if (!result)
        result = cuda->cuEventCreate(&moment->event, CU_EVENT_DISABLE_TIMING);
    if (!result)
        result = cuda->cuStreamWaitEvent(moment->stream, event, 0);
    if (!result)
        result = cuda->cuEventRecord(moment->event, moment->stream);
    return kvf_cuda_status(moment->device, result, "waiting for an event");
}

/* The driver keeps what is still under way. */
static void let_go(const kvf_cuda *cuda, const kvf_cuda_moment *moment) {
    if (moment->event)
        (void)cuda->cuEventDestroy_v2(moment->event);
    if (moment->stream)
        (void)cuda->cuStreamDestroy_v2(moment->stream);
}

kvf_status kvf_cuda_moment_take(uint32_t device, CUevent event, kvf_cuda_moment **out) {
    const kvf_cuda *cuda;
    if (!event)
        return kvf_fail(KVF_E_INVALID, "the event is NULL; record it first");
    kvf_cuda_moment *moment = kvf_alloc0(1, sizeof *moment);
    kvf_status status = moment ? kvf_cuda_enter(device, &cuda) : kvf_nomem("an event");
    if (!status) {
        moment->device = device;
        status = check_not_captured(cuda, device, event);
        if (!status)
            status = follow(cuda, moment, event);
        if (status)
            let_go(cuda, moment);
        kvf_cuda_leave(cuda);
    }
    if (status)
        kvf_free(moment);
    else
        *out = moment;
    return status;
}

kvf_status kvf_cuda_moment_status(const kvf_cuda_moment *moment) {
    return kvf_cuda_over(moment->device, moment->event, "waiting for an event");
}

void kvf_cuda_moment_drop(kvf_cuda_moment *moment) {
    const kvf_cuda *cuda;
    if (!moment)
        return;
    if (kvf_cuda_enter(moment->device, &cuda) == KVF_OK) {
        let_go(cuda, moment);
        kvf_cuda_leave(cuda);
    }
    kvf_free(moment);
}
