/*
 * A moment of a caller's stream, given by the caller's event. It is kept by a stream and an event of our own, so the
 * caller may record its event again or destroy it at once.
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
 * Takes the moment for which an event stands now: all work put on its stream before its last record. An event that was
 * never recorded stands for a moment in the past.
 *
 * @param device  the event's device
 * @param event   an event of this process
 * @return KVF_OK, KVF_E_INVALID (NULL, or recorded while a graph was captured from its stream), KVF_E_NOMEM, and the
 *         results of kvf_cuda_enter() and kvf_cuda_status()
 */
kvf_status kvf_cuda_moment_take(uint32_t device, CUevent event, kvf_cuda_moment **out);

/** @return KVF_OK (it has come), KVF_IN_PROGRESS, KVF_E_IO (the device is unusable), as kvf_cuda_over() */
kvf_status kvf_cuda_moment_status(const kvf_cuda_moment *moment);

/** Frees a moment, whether it has come or not; NULL is accepted. */
void kvf_cuda_moment_drop(kvf_cuda_moment *moment);

#endif
