/*
 * The kernels' arguments: plain numbers with the same layout on the host, which fills them in, and on devices.
 */
#ifndef KVF_CUDA_KERNEL_BOXES_H
#define KVF_CUDA_KERNEL_BOXES_H

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

#define KVF_TILE_THREADS 256u   /* that work on one tile */
#define KVF_BLOCK_TILES 4u      /* that a block of threads works on at once */
#define KVF_BLOCK_THREADS 1024u /* the product of the two, the most that a block may have */
#define KVF_STRIP_VECTORS 4u    /* that a thread moves of a strip */
#define KVF_STRIP_LANES 32u     /* threads that share a strip, at the most */

/** Division by multiplication: (number * factor) >> shift is number / by, for numbers below 2^31. */
typedef struct kvf_divisor {
    uint32_t by, factor, shift;
} kvf_divisor;

/** Where cells lie on one side; addresses are a device's. */
typedef struct kvf_cuda_side {
    uint64_t
        memory; /**< row 0 of kernel block 0, or of all rows if there is no table; first unit, first piece */
    uint64_t blocks; /**< a table of logical blocks, uint32_t; 0: rows are `row_stride` apart */
    uint64_t block_stride, row_stride, unit_stride, piece_stride; /**< bytes; blocks: kernel blocks */
    kvf_divisor block_rows;                                       /**< of a kernel block */
    kvf_divisor kernel_blocks;                                    /**< of a logical block */
    kvf_divisor piece_bytes; /**< of a cell that is kept in pieces; of the whole cell otherwise */
    uint32_t first_row;      /**< counted from row 0 of the first block of the table */
} kvf_cuda_side;

/** Types of elements to convert; KVF_CUDA_BYTES on both sides: only bytes are moved. */
enum {
    KVF_CUDA_BYTES = 0,
    KVF_CUDA_F32 = 1,
    KVF_CUDA_F16 = 2,
    KVF_CUDA_BF16 = 3,
    KVF_CUDA_F8_E4M3 = 4,
    KVF_CUDA_F8_E5M2 = 5
};

/**
 * The sums to which hashes of cells are added: each step has one, of 64 bits. Steps are counted from the one with which
 * the kept stretch of `width` steps begins that has the box's first row; sums of steps before that row need not exist.
 */
typedef struct kvf_cuda_sums {
    uint64_t address;                        /**< of the first step's sum, first unit */
    uint64_t step_bytes, unit_bytes;         /**< between sums; 0: units share one */
    uint64_t seed;                           /**< of the first step, its first row, and the first unit */
    uint64_t step_seed, row_seed, unit_seed; /**< added for each */
    kvf_divisor rows;                        /**< of a step */
    kvf_divisor width;                       /**< neighbouring steps that are kept */
    uint32_t round_steps;                    /**< from the beginning of a kept stretch to that of the next */
    uint32_t first_row;                      /**< the box's, counted from the first step's */
    uint32_t cell_bytes;                     /**< as they are hashed */
} kvf_cuda_sums;

/**
 * Cells on two sides, in one order: row, unit, byte; or cells on one side that are hashed.
 *
 * Cells that are moved consist of segments, which are contiguous on both sides, and these of strips, as kernel_move.h
 * describes. Divisors and `segment_vectors` are not read where cells are hashed, except `units`.
 */
typedef struct kvf_cuda_box {
    kvf_cuda_side from;
    union {
        kvf_cuda_side to;
        kvf_cuda_sums sums;
    };
    kvf_divisor units;    /**< in a row */
    kvf_divisor segments; /**< in a cell */
    kvf_divisor strips;   /**< in a segment */
    kvf_divisor lanes;    /**< in a strip */
    uint32_t segment_vectors;
    uint32_t items;      /**< lanes in the box, or cells to be hashed; below 2^31 */
    uint32_t first_tile; /**< of the box among those of the launch; ascending */
    uint16_t from_bytes,
        to_bytes; /**< of a vector: 1, 2, 4, 8 or 16. Where cells are hashed: of a granule, up to 8 */
    uint16_t from_type, to_type; /**< see above */
} kvf_cuda_box;

#endif
