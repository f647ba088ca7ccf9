/*
 * Bytes from outside: numbers in little endian, taken one after another, and a sum that finds damage.
 */
#ifndef KVF_BYTES_H
#define KVF_BYTES_H

#include "base/base.h"

/** What is not yet read. Once something was missing, `cut_off` stays set and everything reads as nothing. */
typedef struct kvf_byte_reader {
    const unsigned char *at;
    size_t left;
    bool cut_off;
} kvf_byte_reader;

/** The next `bytes` bytes, inside what is read; NULL when there are not so many. */
const void *kvf_take_bytes(kvf_byte_reader *from, size_t bytes);

/** The next number of `width` bytes, 8 at most; 0 when there are not so many. */
uint64_t kvf_take_number(kvf_byte_reader *from, size_t width);

/** Writes the low `width` bytes of a number, 8 at most. */
void kvf_put_number(unsigned char *to, uint64_t number, size_t width);

#define KVF_BYTE_SUM_START UINT64_C(0xcbf29ce484222325)

/**
 * Adds bytes to a sum that began as KVF_BYTE_SUM_START: FNV-1a, 64 bits. Any changed byte changes it. It finds
 * damage, not forgery: whoever may write the bytes may write the sum too.
 */
uint64_t kvf_byte_sum(uint64_t sum, const void *data, size_t bytes);

#endif
