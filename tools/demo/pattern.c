#include "pattern.h"

#include <string.h>

enum { CHUNK_WORDS = 64 };

static inline uint32_t word_of(uint32_t key, uint32_t index) {
    uint32_t x = key + index * 0x9e3779b9u;
    x ^= x << 13;
    x ^= x >> 17;
    return x ^ x << 5;
}

static inline void make_words(uint32_t words[CHUNK_WORDS], uint32_t key, uint32_t first, size_t count) {
    for (uint32_t i = 0; i < count; i++)
        words[i] = word_of(key, first + i);
}

void pattern_write(uint8_t *cell, size_t bytes, uint32_t key) {
    uint32_t words[CHUNK_WORDS];
    for (size_t at = 0; at < bytes; at += sizeof words) {
        size_t length = bytes - at < sizeof words ? bytes - at : sizeof words;
        make_words(words, key, (uint32_t)(at / sizeof *words), (length + 3) / sizeof *words);
        memcpy(cell + at, words, length);
    }
}

bool pattern_matches(const uint8_t *cell, size_t bytes, uint32_t key) {
    uint32_t words[CHUNK_WORDS];
    for (size_t at = 0; at < bytes; at += sizeof words) {
        size_t length = bytes - at < sizeof words ? bytes - at : sizeof words;
        make_words(words, key, (uint32_t)(at / sizeof *words), (length + 3) / sizeof *words);
        if (memcmp(cell + at, words, length) != 0)
            return false;
    }
    return true;
}

uint8_t pattern_byte(uint32_t key, size_t offset) {
    uint32_t word = word_of(key, (uint32_t)(offset / sizeof word));
    uint8_t bytes[sizeof word];
    memcpy(bytes, &word, sizeof word);
    return bytes[offset % sizeof word];
}

size_t pattern_first_other(const uint8_t *memory, size_t bytes, uint8_t value) {
    if (bytes == 0)
        return 0;
    /* All bytes are right if the first is right and each equals the byte before it. */
    if (memory[0] == value && memcmp(memory, memory + 1, bytes - 1) == 0)
        return bytes;
    size_t i = 0;
    while (i < bytes && memory[i] == value)
        i++;
    return i;
}
