/*
 * Converting with AVX-512, sixteen elements at a time, as in convert_avx2.c. The instruction for bf16 treats subnormal
 * f32 as zero, so it is not used.
 */
#include <immintrin.h>

#include "kernel/convert.h"

#define ALWAYS static inline __attribute__((always_inline))
#define AT_ONCE ((size_t)16)

/* Elements as bits of f32. */
ALWAYS __m512i read_f32(kvf_dtype type, const unsigned char *in) {
    if (type == KVF_DTYPE_F32)
        return _mm512_loadu_si512(in);
    const __m256i halves = _mm256_loadu_si256((const __m256i *)(const void *)in);
    if (type == KVF_DTYPE_F16)
        return _mm512_castps_si512(_mm512_cvtph_ps(halves));
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __mmask16 is_nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
    return _mm512_mask_or_epi32(bits, is_nan, bits, _mm512_set1_epi32(0x00400000));
}

ALWAYS __m256i bf16_of(__m512i bits) {
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __mmask16 is_nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i chosen = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x00400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16));
}

/* With `past`, `out` is aligned for stores past the caches. */
ALWAYS void write_f32(kvf_dtype type, __m512i bits, unsigned char *out, bool past) {
    if (type == KVF_DTYPE_F32) {
        if (past)
            _mm512_stream_si512((__m512i *)(void *)out, bits);
        else
            _mm512_storeu_si512(out, bits);
        return;
    }
    const __m256i halves =
        type == KVF_DTYPE_F16
            ? _mm512_cvtps_ph(_mm512_castsi512_ps(bits), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
            : bf16_of(bits);
    if (past)
        _mm256_stream_si256((__m256i *)(void *)out, halves);
    else
        _mm256_storeu_si256((__m256i *)(void *)out, halves);
}

ALWAYS void end_streaming(void) {
    _mm_sfence();
}

#include "kernel/convert_fast.h"

const kvf_convert_loop kvf_convert_avx512 = {"avx512", convert_fast};
