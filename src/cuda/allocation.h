/*
 * Plain memory of a device: of cuMemAlloc(), zeroed, because peers may read all of it.
 *
 * All functions here may be called by any thread.
 */
#ifndef KVF_CUDA_ALLOCATION_H
#define KVF_CUDA_ALLOCATION_H

#include "cuda/driver.h"

/**
 * Allocates memory of a device, in multiples of 2 MiB, so that who opens it in another process opens nothing else.
 *
 * @param out  receives its address; the caller frees it by kvf_cuda_free()
 * @return KVF_OK, KVF_E_NOMEM, and the results of kvf_cuda_enter() and kvf_cuda_status()
 */
kvf_status kvf_cuda_allocate(uint32_t device, uint64_t bytes, CUdeviceptr *out);

/** Frees what kvf_cuda_allocate() gave. The driver may wait for the device's work, or not: nothing may use it any more. */
void kvf_cuda_free(uint32_t device, CUdeviceptr address);

/**
 * Zeroes memory of a device, and waits until that is done.
 *
 * @return KVF_OK, and the results of kvf_cuda_enter() and kvf_cuda_status()
 */
kvf_status kvf_cuda_zero(uint32_t device, CUdeviceptr address, uint64_t bytes);

#endif
