/*
 * Translates cells on two sides into the numbers that the kernels take (kernel_boxes.h). Only arithmetic: no driver, no
 * device.
 */
#ifndef KVF_CUDA_DEVICE_BOX_H
#define KVF_CUDA_DEVICE_BOX_H

#include "cuda/kernel_boxes.h"
#include <kvferry/shard.h>

#include "kernel/box.h"

/** One side of a move. */
typedef struct kvf_device_side {
    /** Pages of a cache: as on the host, but memory is a device's address and never dereferenced here. NULL: the cells
     * are contiguous from `packed` on. */
    const kvf_box *pages;
    uint64_t packed;
    /** The device's address of the table that contains pages->blocks, and the table's beginning on the host. */
    uint64_t table;
    const uint32_t *table_on_host;
    uint32_t
        region; /**< of pages; the driver copies no run over two allocations, even if one ends where the other begins */
    kvf_dtype type; /**< of an element; if both sides have the same, bytes are moved */
    bool
        on_host; /**< packed cells are in pinned memory of the host: long runs may go by the driver's copies */
} kvf_device_side;

/**
 * Translates a move of cells into boxes of the kernels.
 *
 * @param rows   of a box on both sides; pages->rows and units are not read
 * @param units  of a row
 * @param cell_elements  of a unit's cell, in elements of the sides' types; in bytes if these are the same
 * @param out    receives up to `room` boxes; first_tile counts from `tile`
 * @param count  receives how many: more than one if the move has more than 2^30 lanes
 * @param tile   the first tile; receives the one after the last
 * @return KVF_OK, KVF_E_LIMIT (more boxes than there is room for, or too large cells, rows or blocks),
 *         KVF_E_UNSUPPORTED (types that cannot be converted, or misaligned elements to be converted)
 */
kvf_status kvf_device_boxes(const kvf_device_side *from, const kvf_device_side *to, uint64_t rows,
                            uint64_t units, uint64_t cell_elements, kvf_cuda_box *out, uint32_t room,
                            uint32_t *count, uint32_t *tile);

/** Sums of hashed cells, one for each step, and the seeds of the cells' hashes. All sums here are modulo 2^64. */
typedef struct kvf_device_sums {
    uint64_t address;                /**< of the sum of step 0, which need not exist, and the first unit */
    uint64_t step_bytes, unit_bytes; /**< between sums; 0: units share one */
    uint64_t seed;                   /**< of step 0, its first row, and the first unit */
    uint64_t step_seed, row_seed, unit_seed; /**< added for each */
    uint32_t rows;                           /**< of a step */
    kvf_token_share share;                   /**< the steps that are kept, with defaults filled in */
    uint64_t position;                       /**< of the first row's step among those that are kept */
} kvf_device_sums;

/**
 * Translates cells to be hashed into boxes of the kernel.
 *
 * @param from   has pages
 * @param to     the type in which elements are hashed
 * @param rows   whole steps
 * @param cell_elements  in elements of from->type; in bytes if both types are the same
 * @return as kvf_device_boxes()
 */
kvf_status kvf_device_hash_boxes(const kvf_device_side *from, kvf_dtype to, const kvf_device_sums *sums,
                                 uint64_t rows, uint64_t units, uint64_t cell_elements, kvf_cuda_box *out,
                                 uint32_t room, uint32_t *count, uint32_t *tile);

/** How many blocks of threads to launch for so many tiles: no more than have one, and than `most`. */
static inline uint32_t kvf_blocks_for(uint32_t tiles, uint32_t most) {
    const uint32_t all = (tiles + KVF_BLOCK_TILES - 1) / KVF_BLOCK_TILES;
    return all < most ? all : most;
}

/** A divisor for numbers below 2^31; `by` is from 1 to 2^31 - 1. */
kvf_divisor kvf_divisor_of(uint32_t by);

#endif
