#include "kernel/box.h"

/* Row `row` of a box, its first unit and piece. */
static unsigned char *row_of(const kvf_box *box, uint64_t row) {
    const uint64_t at = box->first_row + row, kernel = at / box->block_rows;
    const uint64_t block =
        (uint64_t)box->blocks[kernel / box->kernel_blocks] * box->kernel_blocks + kernel % box->kernel_blocks;
    return box->memory + block * box->block_stride + at % box->block_rows * box->row_stride;
}

void kvf_kernel_gather(const kvf_box *box, void *to) {
    unsigned char *out = to;
    for (uint64_t r = 0; r < box->rows; r++) {
        const unsigned char *row = row_of(box, r);
        for (uint64_t u = 0; u < box->units; u++)
            for (uint64_t p = 0; p < box->pieces; p++, out += box->piece_bytes)
                memcpy(out, row + u * box->unit_stride + p * box->piece_stride, box->piece_bytes);
    }
}

void kvf_kernel_scatter(const kvf_box *box, const void *from) {
    const unsigned char *in = from;
    for (uint64_t r = 0; r < box->rows; r++) {
        unsigned char *row = row_of(box, r);
        for (uint64_t u = 0; u < box->units; u++)
            for (uint64_t p = 0; p < box->pieces; p++, in += box->piece_bytes)
                memcpy(row + u * box->unit_stride + p * box->piece_stride, in, box->piece_bytes);
    }
}
