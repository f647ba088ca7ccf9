/*
 * The permuting loops, written once for all vector widths. A file that includes this one defines
 *
 *     VECTOR, VECTOR_BYTES           the type and its size, a multiple of 16
 *     load(from), store(to, vector)  at any address
 *     load_lanes(from, distance)     16 bytes for each lane, from addresses `distance` bytes apart
 *     lane(vector, i)                the i-th 16 bytes; i is a constant
 *     low1 .. low8, high1 .. high8   interleaving the lower or upper halves of each 16 bytes of two vectors
 *
 * and gets rotate_cells(); permute_gather.h has the rest.
 */
#include <immintrin.h>

#include "kernel/permute.h"

#define ALWAYS static inline __attribute__((always_inline))

/* ---- one cell -------------------------------------------------------------------------------- */

/* Copies `half` to 2*half bytes; `half` is a constant up to 32. The two copies may overlap. */
ALWAYS void copy_halves(unsigned char *to, const unsigned char *from, size_t bytes, size_t half) {
    memcpy(to, from, half);
    if (bytes > half)
        memcpy(to + bytes - half, from + bytes - half, half);
}

/* Fewer than 16 bytes. */
ALWAYS void copy_tiny(unsigned char *to, const unsigned char *from, size_t bytes) {
    if (bytes >= 8)
        copy_halves(to, from, bytes, 8);
    else if (bytes >= 4)
        copy_halves(to, from, bytes, 4);
    else if (bytes >= 2)
        copy_halves(to, from, bytes, 2);
    else if (bytes)
        *to = *from;
}

ALWAYS void copy_short(unsigned char *to, const unsigned char *from, size_t bytes) {
    if (bytes >= 32)
        copy_halves(to, from, bytes, 32);
    else if (bytes >= 16)
        copy_halves(to, from, bytes, 16);
    else
        copy_tiny(to, from, bytes);
}

/* At least one vector. */
ALWAYS void copy_long(unsigned char *to, const unsigned char *from, size_t bytes) {
    size_t at = 0;
    for (; at + 4 * VECTOR_BYTES <= bytes; at += 4 * VECTOR_BYTES) {
        VECTOR a = load(from + at), b = load(from + at + VECTOR_BYTES);
        VECTOR c = load(from + at + 2 * VECTOR_BYTES), d = load(from + at + 3 * VECTOR_BYTES);
        store(to + at, a);
        store(to + at + VECTOR_BYTES, b);
        store(to + at + 2 * VECTOR_BYTES, c);
        store(to + at + 3 * VECTOR_BYTES, d);
    }
    for (; at + VECTOR_BYTES <= bytes; at += VECTOR_BYTES)
        store(to + at, load(from + at));
    if (at < bytes)
        store(to + bytes - VECTOR_BYTES, load(from + bytes - VECTOR_BYTES));
}

ALWAYS void copy_cell(unsigned char *to, const unsigned char *from, size_t bytes) {
    if (bytes >= VECTOR_BYTES)
        copy_long(to, from, bytes);
    else
        copy_short(to, from, bytes);
}

/* Prefetches a line of the next block into the second-level cache; without a next block, `next` is any memory.
 * The limit covers all of most blocks, because gathered cells are of scales or of few heads. */
ALWAYS void ask_for(const unsigned char *next, size_t at) {
    if (at < 16384)
        _mm_prefetch((const char *)(next + at), _MM_HINT_T1);
}

/* ---- rotating -------------------------------------------------------------------------------- */

/* A page in the loops below. `single` is a constant: whether it is one block, which then is `first`. Every cell
 * would otherwise reload the pointer from `blocks`, because a store might have changed it. */
typedef struct page {
    bool single;
    unsigned char *first;
    unsigned char *const *blocks;
} page;

ALWAYS unsigned char *find(page p, kvf_place place, uint64_t at) {
    return (p.single ? p.first + place : kvf_at_place(p.blocks, place)) + at;
}

/*
 * While a page is rotated, the next one is prefetched into the second-level cache, line by line in order of
 * address: memory is fastest that way, and the rotation can then read it in any order.
 */
typedef struct look_ahead {
    unsigned char *const *block; /* of the next page, or NULL */
    const unsigned char *line, *end;
    uint64_t block_bytes;
    uint32_t blocks_left;
} look_ahead;

ALWAYS bool enter_next_block(look_ahead *ahead) {
    if (!ahead->block || ahead->blocks_left-- == 0)
        return false;
    ahead->line = *ahead->block++;
    ahead->end = ahead->line + ahead->block_bytes;
    return true;
}

ALWAYS void ask_ahead(look_ahead *ahead, size_t bytes) {
    if (ahead->line == ahead->end && !enter_next_block(ahead))
        return;
    const unsigned char *line = ahead->line;
    size_t rest = (size_t)(ahead->end - line);
    ahead->line += bytes < rest ? bytes : rest;
    for (size_t at = 0; at < bytes; at += 64) /* harmless beyond the end */
        _mm_prefetch((const char *)((uintptr_t)line + at), _MM_HINT_T1);
}

/* Rotates `bytes` bytes of each cell, from `at` on, one cycle after another. `hold` keeps a cycle's first cell. */
ALWAYS void rotate_piece(page p, const kvf_rotation *rotation, look_ahead *ahead, uint64_t at, size_t bytes,
                         unsigned char *hold) {
    const kvf_place *place = rotation->places;
    for (size_t cycle = 0; cycle < rotation->cycle_count; cycle++) {
        const kvf_place *last = place + rotation->lengths[cycle] - 1;
        unsigned char *to = find(p, *place, at);
        copy_cell(hold, to, bytes);
        while (place < last) {
            ask_ahead(ahead, bytes);
            unsigned char *from = find(p, *++place, at);
            copy_cell(to, from, bytes);
            to = from;
        }
        ask_ahead(ahead, bytes);
        place++;
        copy_cell(to, hold, bytes);
    }
}

/* The first cell of a cycle waits in registers if it has few vectors: cycles may be as short as two cells. */
ALWAYS void rotate_vectors(page p, const kvf_rotation *rotation, look_ahead *ahead, size_t count) {
    const kvf_place *place = rotation->places;
    VECTOR held[8];
    for (size_t cycle = 0; cycle < rotation->cycle_count; cycle++) {
        const kvf_place *last = place + rotation->lengths[cycle] - 1;
        unsigned char *to = find(p, *place, 0);
        for (size_t i = 0; i < count; i++)
            held[i] = load(to + i * VECTOR_BYTES);
        while (place < last) {
            ask_ahead(ahead, count * VECTOR_BYTES);
            unsigned char *from = find(p, *++place, 0);
            copy_long(to, from, count * VECTOR_BYTES);
            to = from;
        }
        ask_ahead(ahead, count * VECTOR_BYTES);
        place++;
        for (size_t i = 0; i < count; i++)
            store(to + i * VECTOR_BYTES, held[i]);
    }
}

ALWAYS void rotate_page(bool single, const kvf_rotation *rotation, unsigned char *const *blocks,
                        unsigned char *const *next) {
    page p = {single, blocks[0], blocks};
    look_ahead ahead = {
        .block = next, .block_bytes = rotation->block_bytes, .blocks_left = rotation->block_count};
    switch (rotation->cell_bytes) {
    case 64:
        rotate_vectors(p, rotation, &ahead, 64 / VECTOR_BYTES);
        return;
    case 128:
        rotate_vectors(p, rotation, &ahead, 128 / VECTOR_BYTES);
        return;
    case 256:
        rotate_vectors(p, rotation, &ahead, 256 / VECTOR_BYTES);
        return;
    default:
        for (uint64_t at = 0; at < rotation->cell_bytes; at += KVF_HOLD_BYTES)
            rotate_piece(p, rotation, &ahead, at, kvf_min_u64(rotation->cell_bytes - at, KVF_HOLD_BYTES),
                         rotation->hold);
    }
}

static void rotate_cells(const kvf_rotation *rotation, unsigned char *const *blocks,
                         unsigned char *const *next) {
    if (rotation->block_count == 1)
        rotate_page(true, rotation, blocks, next);
    else
        rotate_page(false, rotation, blocks, next);
}
