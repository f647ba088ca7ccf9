/*
 * The kernel that moves cells: one list of boxes, one launch.
 *
 * A box has cells, in the order of row and unit, and their places on two *sides*: in pages of a cache, which a block
 * table names, or contiguous in a packed stream. So the same code gathers, scatters, copies from one cache into another
 * of different order, and converts on the way; the host gives it rules and block tables, never a list of runs.
 *
 *   vector    what one thread moves at a time: up to 16 bytes of a cell, contiguous on both sides
 *   tile      KVF_TILE_VECTORS of one box, moved by one block of threads; a block of threads takes every grid-th tile
 *
 *   tile 0            tile 1            tile 2 (end of box 0)   tile 3 (box 1) ..
 *   | 4 rounds of 256 vectors |  ..
 *
 * Neighbouring threads move neighbouring vectors, in four rounds. All loads come before the stores, so that enough of
 * them are under way. Addresses are found by multiplying with prepared reciprocals (kvf_divisor).
 *
 * This header is compiled twice: for devices, and for the host, where tests run it thread by thread. The including file
 * defines KVF_DEVICE (prefix of a function), KVF_REACH(address) (a pointer for an address of a device) and KVF_UNROLL
 * (prefix of a loop of constant length).
 */
#ifndef KVF_CUDA_KERNEL_MOVE_H
#define KVF_CUDA_KERNEL_MOVE_H

#include "cuda/kernel_boxes.h"
#include "kernel/convert_bits.h"

typedef struct kvf_vector16 {
    uint32_t words[4];
} __attribute__((aligned(16))) kvf_vector16;

/* A vector that a thread holds between load and store. */
typedef union kvf_held {
    kvf_vector16 v16;
    uint64_t v8;
    uint32_t v4[4];
    uint16_t v2[8];
    unsigned char v1;
} kvf_held;

KVF_DEVICE uint32_t kvf_quotient(uint32_t number, kvf_divisor by) {
    return (uint32_t)(((uint64_t)number * by.factor) >> by.shift);
}

/* The address of a byte of a cell. */
KVF_DEVICE uint64_t kvf_address(const kvf_cuda_side *side, uint32_t row, uint32_t unit, uint32_t byte) {
    uint64_t address = side->memory + unit * side->unit_stride;
    row += side->first_row;
    if (side->blocks) {
        const uint32_t kernel = kvf_quotient(row, side->block_rows);
        const uint32_t logical = kvf_quotient(kernel, side->kernel_blocks);
        const uint32_t id = ((const uint32_t *)KVF_REACH(side->blocks))[logical];
        const uint64_t block =
            (uint64_t)id * side->kernel_blocks.by + (kernel - logical * side->kernel_blocks.by);
        address += block * side->block_stride;
        row -= kernel * side->block_rows.by;
    }
    const uint32_t piece = kvf_quotient(byte, side->piece_bytes);
    return address + row * side->row_stride + piece * side->piece_stride +
           (byte - piece * side->piece_bytes.by);
}

/* The addresses of vector `index` of a box on both sides. */
KVF_DEVICE void kvf_place(const kvf_cuda_box *box, uint32_t index, uint64_t *from, uint64_t *to) {
    const uint32_t cell = kvf_quotient(index, box->cell_vectors);
    const uint32_t vector = index - cell * box->cell_vectors.by;
    const uint32_t row = kvf_quotient(cell, box->units), unit = cell - row * box->units.by;
    *from = kvf_address(&box->from, row, unit, vector * box->from_bytes);
    *to = kvf_address(&box->to, row, unit, vector * box->to_bytes);
}

/* Callers pass a constant as `bytes`, so that no switch is left in the loops. */
KVF_DEVICE kvf_held kvf_load(uint64_t address, uint32_t bytes) {
    kvf_held held;
    switch (bytes) {
    case 16:
        held.v16 = *(const kvf_vector16 *)KVF_REACH(address);
        break;
    case 8:
        held.v8 = *(const uint64_t *)KVF_REACH(address);
        break;
    case 4:
        held.v4[0] = *(const uint32_t *)KVF_REACH(address);
        break;
    case 2:
        held.v2[0] = *(const uint16_t *)KVF_REACH(address);
        break;
    default:
        held.v1 = *(const unsigned char *)KVF_REACH(address);
    }
    return held;
}

KVF_DEVICE void kvf_store(uint64_t address, uint32_t bytes, kvf_held held) {
    switch (bytes) {
    case 16:
        *(kvf_vector16 *)KVF_REACH(address) = held.v16;
        break;
    case 8:
        *(uint64_t *)KVF_REACH(address) = held.v8;
        break;
    case 4:
        *(uint32_t *)KVF_REACH(address) = held.v4[0];
        break;
    case 2:
        *(uint16_t *)KVF_REACH(address) = held.v2[0];
        break;
    default:
        *(unsigned char *)KVF_REACH(address) = held.v1;
    }
}

/* Moves a thread's part of one tile, from its vector `first` on. */
KVF_DEVICE void kvf_copy_vectors(const kvf_cuda_box *box, uint32_t first, uint32_t bytes) {
    kvf_held held[KVF_TILE_ROUNDS];
    uint64_t to[KVF_TILE_ROUNDS];
    KVF_UNROLL
    for (uint32_t i = 0; i < KVF_TILE_ROUNDS; i++) {
        const uint32_t index = first + i * KVF_TILE_THREADS;
        uint64_t from;
        if (index < box->vectors) {
            kvf_place(box, index, &from, &to[i]);
            held[i] = kvf_load(from, bytes);
        }
    }
    KVF_UNROLL
    for (uint32_t i = 0; i < KVF_TILE_ROUNDS; i++)
        if (first + i * KVF_TILE_THREADS < box->vectors)
            kvf_store(to[i], bytes, held[i]);
}

KVF_DEVICE void kvf_copy_tile(const kvf_cuda_box *box, uint32_t tile, uint32_t thread) {
    const uint32_t first = (tile - box->first_tile) * KVF_TILE_VECTORS + thread;
    switch (box->from_bytes) {
    case 16:
        kvf_copy_vectors(box, first, 16);
        break;
    case 8:
        kvf_copy_vectors(box, first, 8);
        break;
    case 4:
        kvf_copy_vectors(box, first, 4);
        break;
    case 2:
        kvf_copy_vectors(box, first, 2);
        break;
    default:
        kvf_copy_vectors(box, first, 1);
    }
}

/* ---- with conversion ---------------------------------------------------------------------------- */

KVF_DEVICE uint32_t kvf_load_f32(uint64_t address, uint32_t type) {
    if (type == KVF_CUDA_F32)
        return kvf_load(address, 4).v4[0];
    const uint16_t half = kvf_load(address, 2).v2[0];
    return type == KVF_CUDA_F16 ? kvf_f32_of_f16(half) : kvf_f32_of_bf16(half);
}

KVF_DEVICE void kvf_store_f32(uint64_t address, uint32_t type, uint32_t bits) {
    kvf_held held;
    if (type == KVF_CUDA_F32) {
        held.v4[0] = bits;
        kvf_store(address, 4, held);
    } else {
        held.v2[0] = type == KVF_CUDA_F16 ? kvf_f16_of_f32(bits) : kvf_bf16_of_f32(bits);
        kvf_store(address, 2, held);
    }
}

/* A vector is one element: neighbouring threads take neighbouring elements. */
KVF_DEVICE void kvf_convert_tile(const kvf_cuda_box *box, uint32_t tile, uint32_t thread) {
    const uint32_t first = (tile - box->first_tile) * KVF_TILE_VECTORS + thread;
    uint32_t bits[KVF_TILE_ROUNDS];
    uint64_t to[KVF_TILE_ROUNDS];
    KVF_UNROLL
    for (uint32_t i = 0; i < KVF_TILE_ROUNDS; i++) {
        const uint32_t index = first + i * KVF_TILE_THREADS;
        uint64_t from;
        if (index < box->vectors) {
            kvf_place(box, index, &from, &to[i]);
            bits[i] = kvf_load_f32(from, box->from_type);
        }
    }
    KVF_UNROLL
    for (uint32_t i = 0; i < KVF_TILE_ROUNDS; i++)
        if (first + i * KVF_TILE_THREADS < box->vectors)
            kvf_store_f32(to[i], box->to_type, bits[i]);
}

/* ---- a launch ----------------------------------------------------------------------------------- */

/* The box of a tile: the last box that begins at the tile or before. */
KVF_DEVICE uint32_t kvf_box_of_tile(const kvf_cuda_box *boxes, uint32_t count, uint32_t tile) {
    uint32_t low = 0, high = count;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (boxes[middle].first_tile <= tile)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* All work of one thread. A launch converts all of its boxes, or none. */
KVF_DEVICE void kvf_move_thread(const kvf_cuda_box *boxes, uint32_t count, uint32_t tiles, bool convert,
                                uint32_t block, uint32_t blocks, uint32_t thread) {
    for (uint32_t tile = block; tile < tiles; tile += blocks) {
        const kvf_cuda_box *box = &boxes[kvf_box_of_tile(boxes, count, tile)];
        if (convert)
            kvf_convert_tile(box, tile, thread);
        else
            kvf_copy_tile(box, tile, thread);
    }
}

#endif
