/*
 * Shared by the fuzz targets. Each target is one file with libFuzzer's entry point. Any input must be either refused
 * with a message or accepted, and an accepted one must be consistent.
 */
#ifndef KVF_FUZZ_H
#define KVF_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvferry/status.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/** Ends the process, which the fuzzer reports together with the input. */
#define FUZZ_MUST(condition)                                                                                 \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            (void)fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);             \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

/** A refusal must say something. */
static inline void fuzz_check_refusal(kvf_status status) {
    FUZZ_MUST(status != KVF_OK);
    FUZZ_MUST(strcmp(kvf_status_name(status), "unknown status") != 0);
    FUZZ_MUST(kvf_error_detail()[0] != '\0');
}

#endif
