/*
 * Whether the work that an event stands behind is over, so that nothing of it accesses memory any more.
 */
#ifndef KVF_CUDA_OVER_H
#define KVF_CUDA_OVER_H

#include "cuda/driver.h"

/**
 * Polls a recorded event. Only two answers of the driver say that the work is over: success, and an error that ends
 * the device's context, with all its kernels. An unknown error is one if the driver then gives it for an event that has
 * no work, too. Others, as while a graph is captured, say nothing about the work: the caller's patience ends such
 * waiting.
 *
 * @param doing  for the detail, as of kvf_cuda_status()
 * @return KVF_OK, KVF_IN_PROGRESS, KVF_E_IO (the device is unusable for this process)
 */
kvf_status kvf_cuda_over(uint32_t device, CUevent event, const char *doing);

/** Whether an error has ended the device's context: nothing of this process runs on it any more. */
bool kvf_cuda_is_lost(uint32_t device);

/** Sleeps for 20 us: the pause between two polls, for callers that wait. */
void kvf_cuda_pause(void);

/**
 * Polls until something is over, with these pauses.
 *
 * @param is_over      polls once; is called at least once
 * @param patience_ns  how long it is polled
 * @return false: it is not over
 */
bool kvf_cuda_await(bool (*is_over)(void *context), void *context, uint64_t patience_ns);

#endif
