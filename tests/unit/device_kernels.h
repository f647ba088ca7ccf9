/*
 * The kernels of devices, compiled for the host: every thread of every block runs in turn, over the host's memory.
 */
#ifndef KVF_TEST_DEVICE_KERNELS_H
#define KVF_TEST_DEVICE_KERNELS_H

#include <stdbool.h>

#include "cuda/kernel_boxes.h"

/** Moves the cells of boxes, by `blocks` blocks of threads. All boxes are converted, or none. */
void run_move_kernel(const kvf_cuda_box *boxes, uint32_t count, uint32_t tiles, bool convert,
                     uint32_t blocks);

/** Adds the hashes of the cells of boxes to their sums; of converted cells only with `convert`. */
void run_hash_kernel(const kvf_cuda_box *boxes, uint32_t count, uint32_t tiles, bool convert,
                     uint32_t blocks);

/** The kernels' division. */
uint32_t run_quotient(uint32_t number, kvf_divisor by);

#endif
