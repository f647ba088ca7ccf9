/*
 * Cells on two sides, put into the numbers that the kernels take (kernel_boxes.h). Only arithmetic: no driver, no
 * device.
 */
#ifndef KVF_CUDA_DEVICE_BOX_H
#define KVF_CUDA_DEVICE_BOX_H

#include "cuda/kernel_boxes.h"
#include "kernel/box.h"

/** One side of a move. */
typedef struct kvf_device_side {
    /** Pages of a cache: as on the host, but memory is a device's address and never followed here. NULL: the cells lie
     * side by side from `packed` on. */
    const kvf_box *pages;
    uint64_t packed;
    /** Where the device finds the table that pages->blocks is part of, and where that table begins on the host. */
    uint64_t table;
    const uint32_t *table_on_host;
    kvf_dtype type; /**< of an element; where both sides' are the same, what is moved is bytes */
} kvf_device_side;

/**
 * Puts a move of cells into boxes of the kernels.
 *
 * @param rows   of a box on both sides; pages->rows and units are not read
 * @param units  of a row
 * @param cell_elements  of a unit's cell, as elements of the sides' types; bytes where these are the same
 * @param out    receives up to `room` boxes; first_tile counts from `tile`
 * @param count  receives how many: more than one where a box has 2^31 vectors or more
 * @param tile   the first tile; receives that behind the last
 * @return KVF_OK, KVF_E_LIMIT (more boxes than there is room for, or a cell of 2 GiB), KVF_E_UNSUPPORTED (types that
 *         cannot be converted, or elements to be converted that lie at odd addresses)
 */
kvf_status kvf_device_boxes(const kvf_device_side *from, const kvf_device_side *to, uint64_t rows,
                            uint64_t units, uint64_t cell_elements, kvf_cuda_box *out, uint32_t room,
                            uint32_t *count, uint32_t *tile);

/** Division by `by`, from 1 to 2^31 - 1, of numbers below 2^31. */
kvf_divisor kvf_divisor_of(uint32_t by);

#endif
