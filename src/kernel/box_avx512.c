#include <immintrin.h>
#include <stddef.h>

static void stream_lines(unsigned char *to, const unsigned char *from, size_t lines) {
    for (; lines > 0; lines--, to += 64, from += 64)
        _mm512_stream_si512((__m512i *)(void *)to, _mm512_loadu_si512(from));
}

static void end_streaming(void) {
    _mm_sfence();
}

#include "kernel/box_fast.h"

const kvf_box_loops kvf_box_avx512 = {"avx512", gather_fast, scatter_fast};
