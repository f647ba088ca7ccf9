/*
 * Cells of a cache at even distances, moved to or from where they lie side by side.
 *
 * A box is so many rows of one (layer, part): of each row so many units, of each unit's cell so many pieces. Rows lie
 * in kernel blocks, which a block table gives. Side by side, the pieces stand in the order row, unit, piece:
 *
 *   memory   block 7: | u0 r0 r1 r2 | u1 r0 r1 r2 |   block 2: | u0 r0 r1 r2 | u1 r0 r1 r2 |    blocks = {7, 2}
 *   packed   | r0 u0 | r0 u1 | r1 u0 | r1 u1 | r2 u0 | r2 u1 | r0 u0 | ..                      first_row 0, rows 6
 *
 * Nothing here checks anything: callers have checked every offset and block before.
 */
#ifndef KVF_KERNEL_BOX_H
#define KVF_KERNEL_BOX_H

#include <kvferry/model.h>

#include "base/base.h"

typedef struct kvf_box {
    unsigned char *memory; /**< row 0 of kernel block 0, and of it the first unit and piece that are moved */
    uint64_t block_stride, row_stride, unit_stride, piece_stride; /**< bytes; blocks: kernel blocks */
    const uint32_t *blocks;                                       /**< logical blocks, in order */
    uint32_t kernel_blocks;                                       /**< of a logical block */
    uint64_t block_rows;                                          /**< of a kernel block */
    uint64_t first_row;                                           /**< counted from row 0 of blocks[0] */
    uint64_t rows, units, pieces;                                 /**< at least 1 each */
    uint64_t piece_bytes;
} kvf_box;

/** How many bytes a box has. */
static inline uint64_t kvf_box_bytes(const kvf_box *box) {
    return box->rows * box->units * box->pieces * box->piece_bytes;
}

/** One way to do it. */
typedef struct kvf_box_loops {
    const char *name; /**< "plain", "avx2", "avx512", "neon" */
    void (*gather)(const kvf_box *box, void *to, bool past);
    void (*scatter)(const kvf_box *box, const void *from, bool past);
} kvf_box_loops;

/**
 * Copies a box to where its pieces lie side by side, by the fastest loops of this machine. Any thread.
 *
 * @param past  what is written will not be read soon by this thread: write past the caches where that can be done. Later
 *              stores of this thread are seen after the bytes
 */
void kvf_kernel_gather(const kvf_box *box, void *to, bool past);

/** Copies pieces that lie side by side into a box, in the same way. */
void kvf_kernel_scatter(const kvf_box *box, const void *from, bool past);

/** The loops this machine can run, plain first, the fastest last; NULL past it. Any thread. */
const kvf_box_loops *kvf_kernel_box_loops(uint32_t i);

/** The address of the first unit and piece of a row of a box. */
static inline unsigned char *kvf_box_row(const kvf_box *box, uint64_t row) {
    const uint64_t at = box->first_row + row, kernel = at / box->block_rows;
    const uint64_t block =
        (uint64_t)box->blocks[kernel / box->kernel_blocks] * box->kernel_blocks + kernel % box->kernel_blocks;
    return box->memory + block * box->block_stride + at % box->block_rows * box->row_stride;
}

/** memcpy, piece by piece: right, and what the others are compared with. */
extern const kvf_box_loops kvf_box_plain;
#if defined(__x86_64__)
extern const kvf_box_loops kvf_box_avx2;
extern const kvf_box_loops kvf_box_avx512;
#elif defined(__aarch64__)
extern const kvf_box_loops kvf_box_neon;
#endif

#endif
