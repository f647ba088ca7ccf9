/*
 * Bytes from outside: little-endian numbers read one after another, and a checksum that detects damage.
 */
#ifndef KVF_BYTES_H
#define KVF_BYTES_H

#include "base/base.h"

/** The bytes not yet read. Once bytes were missing, `cut_off` stays set and every read gives nothing. */
typedef struct kvf_byte_reader {
    const unsigned char *at;
    size_t left;
    bool cut_off;
} kvf_byte_reader;

/** The next `bytes` bytes, as a pointer into the data; NULL when there are fewer. */
const void *kvf_take_bytes(kvf_byte_reader *from, size_t bytes);

/** The next number of `width` bytes, at most 8; 0 when there are fewer. */
uint64_t kvf_take_number(kvf_byte_reader *from, size_t width);

/** Writes the low `width` bytes of a number, at most 8. */
void kvf_put_number(unsigned char *to, uint64_t number, size_t width);

#define KVF_BYTE_SUM_START UINT64_C(0xcbf29ce484222325)

/**
 * Adds bytes to a checksum that began as KVF_BYTE_SUM_START: FNV-1a, 64 bits. Any changed byte changes it. It detects
 * damage, not forgery: a writer of the bytes can write a matching sum.
 */
uint64_t kvf_byte_sum(uint64_t sum, const void *data, size_t bytes);

#endif
