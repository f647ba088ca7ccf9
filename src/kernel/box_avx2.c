#include <immintrin.h>
#include <stddef.h>

static void stream_lines(unsigned char *to, const unsigned char *from, size_t lines) {
    for (; lines > 0; lines--, to += 64, from += 64) {
        const __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)from);
        const __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(from + 32));
        _mm256_stream_si256((__m256i *)(void *)to, low);
        _mm256_stream_si256((__m256i *)(void *)(to + 32), high);
    }
}

static void end_streaming(void) {
    _mm_sfence();
}

#include "kernel/box_fast.h"

const kvf_box_loops kvf_box_avx2 = {"avx2", gather_fast, scatter_fast};
