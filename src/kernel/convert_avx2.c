/*
 * Converting with AVX2 and F16C, eight elements at a time. The processor's own conversions between f32 and f16,
 * given a rounding mode, round and make NaNs quiet as convert.h says; bf16 is converted in integer arithmetic.
 */
#include <immintrin.h>

#include "kernel/convert.h"

#define ALWAYS static inline __attribute__((always_inline))
#define AT_ONCE ((size_t)8)

/* Elements as bits of f32. */
ALWAYS __m256i read_f32(kvf_dtype type, const unsigned char *in) {
    if (type == KVF_DTYPE_F32)
        return _mm256_loadu_si256((const __m256i *)(const void *)in);
    const __m128i halves = _mm_loadu_si128((const __m128i *)(const void *)in);
    if (type == KVF_DTYPE_F16)
        return _mm256_castps_si256(_mm256_cvtph_ps(halves));
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    return _mm256_or_si256(bits, _mm256_and_si256(is_nan, _mm256_set1_epi32(0x00400000)));
}

ALWAYS __m128i bf16_of(__m256i bits) {
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    /* Packing works within 128 bits; the results are in the first and the third 64 bits. */
    const __m256i narrow = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0x08);
    return _mm256_castsi256_si128(narrow);
}

/* With `past`, `out` is aligned for stores past the caches. */
ALWAYS void write_f32(kvf_dtype type, __m256i bits, unsigned char *out, bool past) {
    if (type == KVF_DTYPE_F32) {
        if (past)
            _mm256_stream_si256((__m256i *)(void *)out, bits);
        else
            _mm256_storeu_si256((__m256i *)(void *)out, bits);
        return;
    }
    const __m128i halves =
        type == KVF_DTYPE_F16
            ? _mm256_cvtps_ph(_mm256_castsi256_ps(bits), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
            : bf16_of(bits);
    if (past)
        _mm_stream_si128((__m128i *)(void *)out, halves);
    else
        _mm_storeu_si128((__m128i *)(void *)out, halves);
}

ALWAYS void end_streaming(void) {
    _mm_sfence();
}

#include "kernel/convert_fast.h"

const kvf_convert_loop kvf_convert_avx2 = {"avx2", convert_fast};
