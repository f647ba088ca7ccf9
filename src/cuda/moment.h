/*
 * A moment of somebody's stream, as an event of his says: kept by a stream and an event of our own, so that he may record
 * his anew or destroy it at once.
 *
 *     kvf_cuda_moment_take(device, event, &moment);
 *     while (kvf_cuda_moment_status(moment) == KVF_IN_PROGRESS) ...     nothing here waits for the device
 *     kvf_cuda_moment_drop(moment);
 *
 * A moment is used by one thread at a time.
 */
#ifndef KVF_CUDA_MOMENT_H
#define KVF_CUDA_MOMENT_H

#include "cuda/driver.h"

typedef struct kvf_cuda_moment kvf_cuda_moment;

/**
 * Takes the moment that an event stands for now: what was put on its stream before it was recorded last. One that was never
 * recorded stands for what is over.
 *
 * @param device  of the event
 * @param event   of this process
 * @return KVF_OK, KVF_E_INVALID (NULL), KVF_E_NOMEM, and what kvf_cuda_enter() and kvf_cuda_status() say
 */
kvf_status kvf_cuda_moment_take(uint32_t device, CUevent event, kvf_cuda_moment **out);

/** @return KVF_OK (it has come), KVF_IN_PROGRESS, KVF_E_IO (the device does nothing any more; the detail says why) */
kvf_status kvf_cuda_moment_status(const kvf_cuda_moment *moment);

/** Whether it has come or not; NULL is accepted. */
void kvf_cuda_moment_drop(kvf_cuda_moment *moment);

#endif
