/*
 * Copies cells of a cache that are at regular distances to or from contiguous memory.
 *
 * A box has `rows` rows of one (layer, part), `units` units of each row, and `pieces` pieces of each unit's cell. Rows
 * lie in kernel blocks, which a block table gives. Packed, the pieces are in the order row, unit, piece:
 *
 *   memory   block 7: | u0 r0 r1 r2 | u1 r0 r1 r2 |   block 2: | u0 r0 r1 r2 | u1 r0 r1 r2 |    blocks = {7, 2}
 *   packed   | r0 u0 | r0 u1 | r1 u0 | r1 u1 | r2 u0 | r2 u1 | r0 u0 | ..                      first_row 0, rows 6
 *
 * These functions check nothing: callers must have checked every offset and block.
 */
#ifndef KVF_KERNEL_BOX_H
#define KVF_KERNEL_BOX_H

#include <kvferry/model.h>

#include "base/base.h"

typedef struct kvf_box {
    unsigned char *memory; /**< row 0 of kernel block 0, at the first unit and piece that are moved */
    uint64_t block_stride, row_stride, unit_stride, piece_stride; /**< bytes; blocks: kernel blocks */
    const uint32_t *blocks;                                       /**< logical blocks, in order */
    uint32_t kernel_blocks;                                       /**< in a logical block */
    uint64_t block_rows;                                          /**< in a kernel block */
    uint64_t first_row;                                           /**< counted from row 0 of blocks[0] */
    uint64_t rows, units, pieces;                                 /**< at least 1 each */
    uint64_t piece_bytes;
} kvf_box;

/** The number of bytes of a box. */
static inline uint64_t kvf_box_bytes(const kvf_box *box) {
    return box->rows * box->units * box->pieces * box->piece_bytes;
}

/** One implementation. */
typedef struct kvf_box_loops {
    const char *name; /**< "plain", "avx2", "avx512", "neon" */
    void (*gather)(const kvf_box *box, void *to, bool past);
    void (*scatter)(const kvf_box *box, const void *from, bool past);
} kvf_box_loops;

/**
 * Copies the pieces of a box into contiguous memory, with the fastest loops of this machine. Any thread.
 *
 * @param past  this thread will not read the result soon: write past the caches where possible. Later stores of this
 *              thread become visible after the bytes
 */
void kvf_kernel_gather(const kvf_box *box, void *to, bool past);

/** Copies contiguous pieces into a box, in the same way. */
void kvf_kernel_scatter(const kvf_box *box, const void *from, bool past);

/** The loops that this machine can run, plain first, the fastest last; NULL after the last. Any thread. */
const kvf_box_loops *kvf_kernel_box_loops(uint32_t i);

/** The address of the first unit and piece of a row of a box. */
static inline unsigned char *kvf_box_row(const kvf_box *box, uint64_t row) {
    const uint64_t at = box->first_row + row, kernel = at / box->block_rows;
    const uint64_t block =
        (uint64_t)box->blocks[kernel / box->kernel_blocks] * box->kernel_blocks + kernel % box->kernel_blocks;
    return box->memory + block * box->block_stride + at % box->block_rows * box->row_stride;
}

/** memcpy, piece by piece: the reference for the others. */
extern const kvf_box_loops kvf_box_plain;
#if defined(__x86_64__)
extern const kvf_box_loops kvf_box_avx2;
extern const kvf_box_loops kvf_box_avx512;
#elif defined(__aarch64__)
extern const kvf_box_loops kvf_box_neon;
#endif

#endif
