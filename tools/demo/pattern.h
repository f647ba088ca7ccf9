/*
 * The content of a cell in a demo: a function of its logical coordinates, cheap enough to check gigabytes.
 *
 * A cell's coordinates (request, layer, part, token, head) are hashed to a 32-bit key once; word w of the
 * cell is then a permutation of key + w * odd constant. All words of one cell differ, and two cells have the same
 * word with a chance of 2^-32. The word is built from shifts and additions, which every vector unit has.
 */
#ifndef KVFERRY_DEMO_PATTERN_H
#define KVFERRY_DEMO_PATTERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    PATTERN_UNUSED_PREFILL = 0x5c, /* memory of a prefill rank that holds no request */
    PATTERN_UNUSED_DECODE = 0xa3,  /* memory of a decode rank to which nothing has been written */
};

/** The part of a key that all cells of one layer and part of a request have in common. */
typedef struct pattern_stream {
    uint64_t bits;
} pattern_stream;

static inline uint64_t pattern_mix(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static inline pattern_stream pattern_stream_of(uint64_t seed, uint32_t request, uint32_t group,
                                               uint32_t layer, uint32_t part) {
    uint64_t bits = pattern_mix(seed + 0x9e3779b97f4a7c15u);
    bits = pattern_mix(bits ^ ((uint64_t)request << 32 | layer));
    bits = pattern_mix(bits ^ ((uint64_t)group << 32 | part));
    return (pattern_stream){bits};
}

static inline uint32_t pattern_key(pattern_stream stream, uint64_t row, uint32_t unit) {
    return (uint32_t)(pattern_mix(stream.bits ^ (row << 24) ^ unit) >> 32);
}

/** Writes a whole cell. */
void pattern_write(uint8_t *cell, size_t bytes, uint32_t key);

/** Whether every byte of a cell is as pattern_write() writes it. */
bool pattern_matches(const uint8_t *cell, size_t bytes, uint32_t key);

/** One byte of a cell. */
uint8_t pattern_byte(uint32_t key, size_t offset);

/** The index of the first byte that is not `value`; `bytes` if there is none. */
size_t pattern_first_other(const uint8_t *memory, size_t bytes, uint8_t value);

#endif
