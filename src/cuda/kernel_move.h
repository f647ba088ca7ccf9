/*
 * The kernel that moves cells: one list of boxes, one launch.
 *
 * A box has cells, in the order of row and unit, and their places on two *sides*: in pages of a cache, which a block
 * table names, or contiguous in a packed stream. So the same code gathers, scatters, copies from one cache into another
 * of different order, and converts on the way; the host gives it rules and block tables, never a list of runs.
 *
 *   vector    what one load or store moves: up to 16 bytes; or the elements that one load and one store convert, of which
 *             the wider side has up to 16 bytes
 *   segment   vectors of a cell that are contiguous on both sides: the cell, or a piece of it
 *   strip     up to 128 vectors of a segment, moved by up to 32 threads, its *lanes*; each takes every lanes-th vector
 *   tile      256 neighbouring lanes of one box, moved by as many threads; four tiles by one block of threads at once
 *
 *   a segment of 16 vectors:  0 1 2 3 | 4 5 6 7 | 8 9 ..  lane 0 moves 0, 4, 8, 12; lane 1 moves 1, 5, 9, 13; ..
 *
 * So a thread finds its addresses once for four vectors, neighbouring threads move neighbouring vectors, and all loads
 * of a thread come before its stores; one that converts loads one vector ahead. Addresses are found by multiplying with
 * prepared reciprocals (kvf_divisor).
 *
 * This header is compiled twice: for devices, and for the host, where tests run it thread by thread. The including file
 * defines KVF_DEVICE (prefix of a function), KVF_UNROLL (prefix of a loop of constant length), KVF_ROLL (prefix of a loop
 * with a long body), KVF_READ(type, address) (what lies at an address of a device), and KVF_LOAD(type, address) and
 * KVF_STORE(type, address, value), for bytes that are touched once.
 */
#ifndef KVF_CUDA_KERNEL_MOVE_H
#define KVF_CUDA_KERNEL_MOVE_H

#include "cuda/kernel_boxes.h"
#include "kernel/convert_bits.h"

#ifdef __CUDACC_RTC__
typedef uint4 kvf_vector16;
#else
typedef struct kvf_vector16 {
    uint32_t words[4];
} __attribute__((aligned(16))) kvf_vector16;
#endif

/* A vector that a thread holds between load and store. */
typedef union kvf_held {
    uint32_t v4[4];
    uint64_t v8;
    kvf_vector16 v16;
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
        const uint32_t id = KVF_READ(uint32_t, side->blocks + logical * sizeof(uint32_t));
        const uint64_t block =
            (uint64_t)id * side->kernel_blocks.by + (kernel - logical * side->kernel_blocks.by);
        address += block * side->block_stride;
        row -= kernel * side->block_rows.by;
    }
    const uint32_t piece = kvf_quotient(byte, side->piece_bytes);
    return address + row * side->row_stride + piece * side->piece_stride +
           (byte - piece * side->piece_bytes.by);
}

/* Callers that copy pass a constant as `bytes`, so that no switch is left in the loops. */
KVF_DEVICE kvf_held kvf_load(uint64_t address, uint32_t bytes) {
    kvf_held held = {{0}};
    switch (bytes) {
    case 16:
        held.v16 = KVF_LOAD(kvf_vector16, address);
        break;
    case 8:
        held.v8 = KVF_LOAD(uint64_t, address);
        break;
    case 4:
        held.v4[0] = KVF_LOAD(uint32_t, address);
        break;
    case 2:
        held.v4[0] = KVF_LOAD(uint16_t, address);
        break;
    default:
        held.v4[0] = KVF_LOAD(uint8_t, address);
    }
    return held;
}

KVF_DEVICE void kvf_store(uint64_t address, uint32_t bytes, kvf_held held) {
    switch (bytes) {
    case 16:
        KVF_STORE(kvf_vector16, address, held.v16);
        break;
    case 8:
        KVF_STORE(uint64_t, address, held.v8);
        break;
    case 4:
        KVF_STORE(uint32_t, address, held.v4[0]);
        break;
    case 2:
        KVF_STORE(uint16_t, address, (uint16_t)held.v4[0]);
        break;
    default:
        KVF_STORE(uint8_t, address, (uint8_t)held.v4[0]);
    }
}

/* ---- strips ------------------------------------------------------------------------------------- */

/* A thread's part of a strip: vectors that are `lanes` apart. */
typedef struct kvf_lane {
    uint64_t from, to; /* of the first vector */
    uint32_t left;     /* vectors of the segment from there on; 0: the lane has none */
} kvf_lane;

KVF_DEVICE kvf_lane kvf_lane_of(const kvf_cuda_box *box, uint32_t item) {
    const uint32_t strips = kvf_quotient(item, box->lanes), lane = item - strips * box->lanes.by;
    const uint32_t segments = kvf_quotient(strips, box->strips), strip = strips - segments * box->strips.by;
    const uint32_t cells = kvf_quotient(segments, box->segments);
    const uint32_t segment = (segments - cells * box->segments.by) * box->segment_vectors;
    const uint32_t row = kvf_quotient(cells, box->units), unit = cells - row * box->units.by;
    const uint32_t first = strip * box->lanes.by * KVF_STRIP_VECTORS + lane;
    kvf_lane found;
    found.from =
        kvf_address(&box->from, row, unit, segment * box->from_bytes) + (uint64_t)first * box->from_bytes;
    found.to = kvf_address(&box->to, row, unit, segment * box->to_bytes) + (uint64_t)first * box->to_bytes;
    found.left = first < box->segment_vectors ? box->segment_vectors - first : 0;
    return found;
}

KVF_DEVICE void kvf_copy_lane(kvf_lane lane, uint32_t lanes, uint32_t bytes) {
    const uint32_t apart = lanes * bytes;
    kvf_held held[KVF_STRIP_VECTORS];
    KVF_UNROLL
    for (uint32_t i = 0; i < KVF_STRIP_VECTORS; i++)
        if (i * lanes < lane.left)
            held[i] = kvf_load(lane.from + i * apart, bytes);
    KVF_UNROLL
    for (uint32_t i = 0; i < KVF_STRIP_VECTORS; i++)
        if (i * lanes < lane.left)
            kvf_store(lane.to + i * apart, bytes, held[i]);
}

KVF_DEVICE void kvf_copy_item(const kvf_cuda_box *box, uint32_t item) {
    const kvf_lane lane = kvf_lane_of(box, item);
    const uint32_t lanes = box->lanes.by;
    switch (box->from_bytes) {
    case 16:
        kvf_copy_lane(lane, lanes, 16);
        break;
    case 8:
        kvf_copy_lane(lane, lanes, 8);
        break;
    case 4:
        kvf_copy_lane(lane, lanes, 4);
        break;
    case 2:
        kvf_copy_lane(lane, lanes, 2);
        break;
    default:
        kvf_copy_lane(lane, lanes, 1);
    }
}

/* ---- with conversion ---------------------------------------------------------------------------- */

KVF_DEVICE uint32_t kvf_element_bytes(uint32_t type) {
    return type == KVF_CUDA_F32 ? 4 : type == KVF_CUDA_F16 || type == KVF_CUDA_BF16 ? 2 : 1;
}

/* An element as the bits of an f32; bits above the element are ignored. */
KVF_DEVICE uint32_t kvf_widen(uint32_t bits, uint32_t type) {
    switch (type) {
    case KVF_CUDA_F32:
        return bits;
    case KVF_CUDA_F16:
        return kvf_f32_of_f16((uint16_t)bits);
    case KVF_CUDA_BF16:
        return kvf_f32_of_bf16((uint16_t)bits);
    case KVF_CUDA_F8_E4M3:
        return kvf_f32_of_f8_e4m3((uint8_t)bits);
    default:
        return kvf_f32_of_f8_e5m2((uint8_t)bits);
    }
}

/* The bits of an f32 as those of another type. */
KVF_DEVICE uint32_t kvf_narrow(uint32_t bits, uint32_t type) {
    switch (type) {
    case KVF_CUDA_F32:
        return bits;
    case KVF_CUDA_F16:
        return kvf_f16_of_f32(bits);
    case KVF_CUDA_BF16:
        return kvf_bf16_of_f32(bits);
    case KVF_CUDA_F8_E4M3:
        return kvf_f8_e4m3_of_f32(bits);
    default:
        return kvf_f8_e5m2_of_f32(bits);
    }
}

/* Four neighbouring elements of a vector, a *quad*. Callers pass constants as `quad` and `type`: with these, elements
 * stay in registers, and no switch is left. Of quads that a vector does not have, something is computed. */
KVF_DEVICE void kvf_widen_quad(const kvf_held *held, uint32_t quad, uint32_t type, uint32_t bits[4]) {
    const uint32_t in_word = 4 / kvf_element_bytes(type);
    KVF_UNROLL
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t at = 4 * quad + i, word = held->v4[at / in_word % 4];
        bits[i] = kvf_widen(word >> (at % in_word * (32 / in_word)), type);
    }
}

KVF_DEVICE void kvf_narrow_quad(const uint32_t bits[4], uint32_t quad, uint32_t type, kvf_held *held) {
    const uint32_t in_word = 4 / kvf_element_bytes(type);
    KVF_UNROLL
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t at = 4 * quad + i, narrow = kvf_narrow(bits[i], type)
                                                   << (at % in_word * (32 / in_word));
        uint32_t *word = &held->v4[at / in_word % 4];
        *word = at % in_word ? *word | narrow : narrow;
    }
}

KVF_DEVICE void kvf_convert_quad(const kvf_held *held, uint32_t quad, uint32_t from, uint32_t to,
                                 kvf_held *out) {
    uint32_t bits[4];
    switch (from) {
    case KVF_CUDA_F32:
        kvf_widen_quad(held, quad, KVF_CUDA_F32, bits);
        break;
    case KVF_CUDA_F16:
        kvf_widen_quad(held, quad, KVF_CUDA_F16, bits);
        break;
    case KVF_CUDA_BF16:
        kvf_widen_quad(held, quad, KVF_CUDA_BF16, bits);
        break;
    case KVF_CUDA_F8_E4M3:
        kvf_widen_quad(held, quad, KVF_CUDA_F8_E4M3, bits);
        break;
    default:
        kvf_widen_quad(held, quad, KVF_CUDA_F8_E5M2, bits);
    }
    switch (to) {
    case KVF_CUDA_F32:
        kvf_narrow_quad(bits, quad, KVF_CUDA_F32, out);
        break;
    case KVF_CUDA_F16:
        kvf_narrow_quad(bits, quad, KVF_CUDA_F16, out);
        break;
    case KVF_CUDA_BF16:
        kvf_narrow_quad(bits, quad, KVF_CUDA_BF16, out);
        break;
    case KVF_CUDA_F8_E4M3:
        kvf_narrow_quad(bits, quad, KVF_CUDA_F8_E4M3, out);
        break;
    default:
        kvf_narrow_quad(bits, quad, KVF_CUDA_F8_E5M2, out);
    }
}

#define KVF_VECTOR_QUADS 4u /* of the most elements in a vector, 16 */

KVF_DEVICE kvf_held kvf_convert_vector(kvf_held held, uint32_t elements, uint32_t from, uint32_t to) {
    kvf_held converted;
    KVF_UNROLL
    for (uint32_t quad = 0; quad < KVF_VECTOR_QUADS; quad++)
        if (4 * quad < elements)
            kvf_convert_quad(&held, quad, from, to, &converted);
    return converted;
}

/* A thread loads its next vector before it converts one. */
KVF_DEVICE void kvf_convert_item(const kvf_cuda_box *box, uint32_t item) {
    const kvf_lane lane = kvf_lane_of(box, item);
    const uint32_t lanes = box->lanes.by, from_bytes = box->from_bytes, to_bytes = box->to_bytes;
    const uint32_t elements = from_bytes / kvf_element_bytes(box->from_type);
    kvf_held next;
    if (lane.left > 0)
        next = kvf_load(lane.from, from_bytes);
    KVF_ROLL
    for (uint32_t i = 0; i < KVF_STRIP_VECTORS && i * lanes < lane.left; i++) {
        const kvf_held held = next;
        if (i + 1 < KVF_STRIP_VECTORS && (i + 1) * lanes < lane.left)
            next = kvf_load(lane.from + (i + 1) * lanes * from_bytes, from_bytes);
        kvf_store(lane.to + i * lanes * to_bytes, to_bytes,
                  kvf_convert_vector(held, elements, box->from_type, box->to_type));
    }
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

/* All work of one thread of `blocks` times 256. A launch converts all of its boxes, or none. */
KVF_DEVICE void kvf_move_thread(const kvf_cuda_box *boxes, uint32_t count, uint32_t tiles, bool convert,
                                uint32_t block, uint32_t blocks, uint32_t thread) {
    for (uint32_t tile = block; tile < tiles; tile += blocks) {
        const kvf_cuda_box *box = &boxes[kvf_box_of_tile(boxes, count, tile)];
        const uint32_t item = (tile - box->first_tile) * KVF_TILE_THREADS + thread;
        if (item >= box->items)
            continue;
        if (convert)
            kvf_convert_item(box, item);
        else
            kvf_copy_item(box, item);
    }
}

#endif
