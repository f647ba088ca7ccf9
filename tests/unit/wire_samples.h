/*
 * Messages with random contents, and comparisons of two messages.
 */
#ifndef KVF_TEST_WIRE_SAMPLES_H
#define KVF_TEST_WIRE_SAMPLES_H

#include "shapes.h"

#include "wire/wire.h"

#define SAMPLE_NUMBERS 64
#define SAMPLE_BLOCKS 512
#define SAMPLE_GROUPS 4
#define SAMPLE_BYTES 200
#define SAMPLE_RECORDS 3

/** A sample, with the memory that its fields point to. */
typedef struct wire_sample {
    kvf_message message;
    kvf_introduction introduction;
    char names[4][KVF_WIRE_MAX_NAME + 1];
    char detail[SAMPLE_BYTES];
    uint8_t bytes[3][SAMPLE_BYTES];
    kvf_bytes list[5];
    uint64_t numbers[2 * SAMPLE_NUMBERS], pairs[2 * SAMPLE_NUMBERS];
    uint32_t ids[SAMPLE_GROUPS][SAMPLE_BLOCKS];
    kvf_wire_group groups[SAMPLE_GROUPS];
    kvf_record records[SAMPLE_RECORDS];
    char record_names[SAMPLE_RECORDS][KVF_MAX_RECORD_NAME + 1];
} wire_sample;

/** A random number that depends on the seed alone; never 0. */
uint64_t sample_random(uint64_t *seed);

/** Fills the fields that messages of this kind have; `call` matters for CALL and ANSWER. */
void sample_message(wire_sample *out, kvf_message_kind kind, kvf_call_kind call, uint64_t seed);
void sample_introduction(wire_sample *out, uint64_t seed);

/** The number of kinds, with each call and each answer counted as one; sample_kind() gives the n-th. */
#define SAMPLE_KINDS (3u + 2u * KVF_CALL_LAST + 2u)
void sample_kind(uint32_t n, kvf_message_kind *kind, kvf_call_kind *call);

void assert_same_message(const kvf_message *a, const kvf_message *b);
void assert_same_introduction(const kvf_introduction *a, const kvf_introduction *b);

/** Encodes a message; the test fails if that fails. */
kvf_wire_buffer sample_encoded(const kvf_message *message);

/** Copies the bytes into memory of exactly their size, so that a sanitizer sees reads past the end. */
kvf_bytes sample_exact(const void *data, size_t size);

#endif
