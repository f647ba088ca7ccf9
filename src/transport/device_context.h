/*
 * The CUDA context of a thread that calls a library of a network. Such a library uses the context that is current: UCX
 * asks its events while it makes progress and while it is armed, libfabric copies small messages. An agent's thread has
 * no context, and the engine's may have another device's; without one such calls fail, or crash.
 *
 *     kvf_device_context before = kvf_device_context_take(&endpoint->context, memory);
 *     const kvf_cuda *entered = kvf_device_context_enter(&endpoint->context);
 *     ...                                                       calls of the library
 *     kvf_device_context_leave(entered);
 *
 * Costs nothing until memory of a device is registered. One thread at a time for each endpoint.
 */
#ifndef KVF_TRANSPORT_DEVICE_CONTEXT_H
#define KVF_TRANSPORT_DEVICE_CONTEXT_H

#include <kvferry/memory.h>

#include "cuda/driver.h"

/** Of an endpoint; all zeros: none is needed. */
typedef struct kvf_device_context {
    bool needed; /**< memory of a device was registered; stays true, as libraries remember what they saw */
    uint32_t device; /**< whose memory was registered last: calls that name no memory take any context */
} kvf_device_context;

/** To be called before memory is registered. Returns what was before, to be put back if the memory is refused. */
static inline kvf_device_context kvf_device_context_take(kvf_device_context *context,
                                                         const kvf_memory *memory) {
    const kvf_device_context before = *context;
    if (memory->kind == KVF_MEMORY_CUDA)
        *context = (kvf_device_context){true, memory->device};
    return before;
}

/** Makes the context current, if one is needed. Returns what kvf_device_context_leave() takes; pairs may be nested. */
static inline const kvf_cuda *kvf_device_context_enter(const kvf_device_context *context) {
    const kvf_cuda *cuda;
    return context->needed && !kvf_cuda_enter(context->device, &cuda) ? cuda : NULL;
}

static inline void kvf_device_context_leave(const kvf_cuda *entered) {
    if (entered)
        kvf_cuda_leave(entered);
}

/**
 * Explains that a library does not register memory: the detail has the library's reason, and gets what the owner of a
 * device's memory can do about it.
 *
 * @return KVF_E_UNSUPPORTED, so that "auto" goes on without the library; for memory of the host `status`, with the
 *         detail as it is
 */
kvf_status kvf_device_memory_refused(kvf_status status, const kvf_memory *memory);

#endif
