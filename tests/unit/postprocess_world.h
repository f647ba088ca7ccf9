/*
 * Blocks in host memory to be permuted, and what they must become, computed cell by cell. Include CMocka before.
 */
#ifndef POSTPROCESS_WORLD_H
#define POSTPROCESS_WORLD_H

#include <stdlib.h>

#include "connector/postprocess.h"

static inline uint64_t draw(uint64_t below) {
    static uint64_t state = 0x2545f4914f6cdd1du;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 11) % below;
}

/* The blocks of one region, and what they must become. */
typedef struct world {
    unsigned char *memory, *expected;
    size_t bytes;
    kvf_received_shape shape;
    kvf_block_region region;
    uint32_t ids[64];
    size_t id_count;
} world;

static inline void fill(unsigned char *memory, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        memory[i] = (unsigned char)draw(256);
}

/* A region of `blocks` blocks with gaps, which begins at any byte and ends with its allocation. */
static inline world world_of(kvf_received_shape shape, uint64_t blocks, uint64_t parts, uint64_t misaligned) {
    shape.struct_size = sizeof shape;
    uint64_t page = shape.heads * shape.wanted.tokens * shape.cell_bytes;
    uint64_t part_stride = page + (parts > 1 ? draw(9) : 0);
    uint64_t stride = part_stride * (parts - 1) + page + draw(2) * draw(80);
    world w = {.bytes = misaligned + stride * (blocks - 1) + part_stride * (parts - 1) + page,
               .shape = shape};
    w.memory = malloc(w.bytes);
    w.expected = malloc(w.bytes);
    assert_non_null(w.memory);
    assert_non_null(w.expected);
    fill(w.memory, w.bytes);
    memcpy(w.expected, w.memory, w.bytes);
    w.region = (kvf_block_region){.base = w.memory + misaligned,
                                  .bytes = w.bytes - misaligned,
                                  .block_count = blocks,
                                  .block_stride_bytes = stride,
                                  .part_count = parts,
                                  .part_stride_bytes = part_stride,
                                  .part_bytes = page};
    return w;
}

static inline void end(world *w) {
    free(w->memory);
    free(w->expected);
}

/* Lists `count` different blocks in any order. */
static inline void list_blocks(world *w, size_t count) {
    uint32_t all[64];
    uint32_t blocks = (uint32_t)w->region.block_count;
    for (uint32_t i = 0; i < blocks; i++)
        all[i] = i;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t j = i + (uint32_t)draw(blocks - i);
        w->ids[i] = all[j];
        all[j] = all[i];
    }
    w->id_count = count;
}

/* Where a cell of the form lies, in bytes from the beginning of the listed blocks, taken one after another. */
static inline uint64_t cell_at(const kvf_received_shape *shape, kvf_page_form form, uint64_t token,
                               uint64_t head) {
    uint64_t page = token / form.tokens, row = token % form.tokens;
    uint64_t in_page = form.order == KVF_PAGE_HND ? head * form.tokens + row : row * shape->heads + head;
    return (page * form.tokens * shape->heads + in_page) * shape->cell_bytes;
}

static inline size_t byte_of(const world *w, uint64_t part, uint64_t offset) {
    const kvf_block_region *r = &w->region;
    size_t base = (size_t)((unsigned char *)r->base - w->memory);
    return base + w->ids[offset / r->part_bytes] * r->block_stride_bytes + part * r->part_stride_bytes +
           offset % r->part_bytes;
}

/* Computes, cell by cell and byte by byte, what the region must hold after the first `covered` tokens were received. */
static inline void expect(world *w, uint64_t covered) {
    const kvf_received_shape *s = &w->shape;
    for (uint64_t part = 0; part < w->region.part_count; part++)
        for (uint64_t token = 0; token < w->id_count * s->wanted.tokens; token++)
            for (uint64_t head = 0; head < s->heads; head++)
                for (uint64_t byte = 0; byte < s->cell_bytes; byte++) {
                    size_t to = byte_of(w, part, cell_at(s, s->wanted, token, head) + byte);
                    size_t from = byte_of(w, part, cell_at(s, s->received, token, head) + byte);
                    w->expected[to] = token < covered ? w->memory[from] : 0;
                }
}

static inline void check(const world *w) {
    if (memcmp(w->memory, w->expected, w->bytes) == 0)
        return;
    const kvf_received_shape *s = &w->shape;
    size_t at = 0;
    while (w->memory[at] == w->expected[at])
        at++;
    fail_msg("byte %zu of %zu is %u, not %u: %llu heads, cells of %llu, order %d x%llu -> %d x%llu, %zu ids",
             at, w->bytes, w->memory[at], w->expected[at], (unsigned long long)s->heads,
             (unsigned long long)s->cell_bytes, (int)s->received.order,
             (unsigned long long)s->received.tokens, (int)s->wanted.order,
             (unsigned long long)s->wanted.tokens, w->id_count);
}

static inline kvf_received_shape shape_of(uint64_t heads, uint64_t cell_bytes, kvf_page_order received,
                                          uint64_t received_tokens, kvf_page_order wanted,
                                          uint64_t wanted_tokens) {
    return (kvf_received_shape){
        sizeof(kvf_received_shape), heads, cell_bytes, {received, received_tokens}, {wanted, wanted_tokens}};
}

static inline kvf_received_shape any_shape(void) {
    static const uint64_t cells[] = {1, 2, 3, 4, 6, 8, 12, 16, 20, 32, 33, 48, 63, 64, 65, 96, 128, 130, 256};
    static const uint64_t long_cells[] = {300, 512, 656, 1152, 2048, 4095, 4100, 5000};
    uint64_t cell = cells[draw(sizeof cells / sizeof *cells)];
    bool long_cell = draw(8) == 0;
    if (long_cell)
        cell = long_cells[draw(sizeof long_cells / sizeof *long_cells)];
    uint64_t ratio = 1 + draw(long_cell ? 3 : 6), tokens = 1 + draw(long_cell ? 3 : draw(2) ? 20 : 5);
    uint64_t heads = 1 + draw(long_cell ? 3 : draw(2) ? 20 : 5);
    bool remote_longer = draw(2);
    return shape_of(heads, cell, (kvf_page_order)draw(2), remote_longer ? tokens * ratio : tokens,
                    (kvf_page_order)draw(2), remote_longer ? tokens : tokens * ratio);
}

static inline uint64_t blocks_of_page(const kvf_received_shape *shape) {
    return shape->received.tokens > shape->wanted.tokens ? shape->received.tokens / shape->wanted.tokens : 1;
}

/** The call must fail with this status, and its detail must have this word. */
#define assert_refused(call, status, word)                                                                   \
    do {                                                                                                     \
        assert_int_equal(call, status);                                                                      \
        if (!strstr(kvf_error_detail(), word))                                                               \
            fail_msg("\"%s\" does not say \"%s\"", kvf_error_detail(), word);                                \
    } while (0)

#endif
