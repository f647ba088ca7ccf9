/*
 * Converting with AVX2 and F16C, eight elements at a time. The processor's own conversions between f32 and f16,
 * given a rounding mode, round and make NaNs quiet as convert.h says; bf16 is converted in integer arithmetic, and so
 * is f32 to FP8. FP8 is read as f16, whose fields are as wide or wider: see convert_bits.h.
 */
#include <immintrin.h>

#include "kernel/convert.h"
#include "kernel/convert_bits.h"

#define ALWAYS static inline __attribute__((always_inline))
#define AT_ONCE ((size_t)8)

/* Exact: 2^8 times an f16, none of which is subnormal as f32. */
ALWAYS __m256i f32_of_e4m3(__m128i bytes) {
    const __m128i magnitude = _mm_and_si128(bytes, _mm_set1_epi16(0x7f));
    const __m256 small = _mm256_cvtph_ps(_mm_slli_epi16(magnitude, 7));
    const __m256i bits = _mm256_castps_si256(_mm256_mul_ps(small, _mm256_set1_ps(256)));
    const __m256i wide = _mm256_cvtepu16_epi32(bytes);
    const __m256i is_nan = _mm256_cmpeq_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(KVF_F8_E4M3_NAN)),
                                              _mm256_set1_epi32(KVF_F8_E4M3_NAN));
    const __m256i value = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc00000), is_nan);
    return _mm256_or_si256(value, _mm256_slli_epi32(_mm256_srli_epi32(wide, 7), 31));
}

/* Elements as bits of f32. */
ALWAYS __m256i read_f32(kvf_dtype type, const unsigned char *in) {
    if (type == KVF_DTYPE_F32)
        return _mm256_loadu_si256((const __m256i *)(const void *)in);
    if (type == KVF_DTYPE_F8_E4M3 || type == KVF_DTYPE_F8_E5M2) {
        const __m128i bytes = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)in));
        return type == KVF_DTYPE_F8_E4M3 ? f32_of_e4m3(bytes)
                                         : _mm256_castps_si256(_mm256_cvtph_ps(_mm_slli_epi16(bytes, 8)));
    }
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

/* kvf_narrow_magnitude() of eight numbers: the bits to be rounded, and how many of them, are chosen for each. */
ALWAYS __m256i f8_magnitude(__m256i magnitude, uint32_t fraction_bits, uint32_t least, uint32_t most) {
    const __m256i one = _mm256_set1_epi32(1), normal_off = _mm256_set1_epi32((int)(23 - fraction_bits));
    const __m256i below = _mm256_sub_epi32(_mm256_set1_epi32((int)least), _mm256_srli_epi32(magnitude, 23));
    const __m256i is_small = _mm256_cmpgt_epi32(below, _mm256_setzero_si256());
    const __m256i normal = _mm256_sub_epi32(magnitude, _mm256_set1_epi32((int)((least - 1) << 23)));
    const __m256i small = _mm256_or_si256(_mm256_and_si256(magnitude, _mm256_set1_epi32(0x7fffff)),
                                          _mm256_set1_epi32(0x800000));
    const __m256i small_off =
        _mm256_min_epi32(_mm256_add_epi32(normal_off, below), _mm256_set1_epi32(31)); /* leaves nothing */
    const __m256i whole = _mm256_blendv_epi8(normal, small, is_small);
    const __m256i off = _mm256_blendv_epi8(normal_off, small_off, is_small);
    const __m256i odd = _mm256_and_si256(_mm256_srlv_epi32(whole, off), one);
    const __m256i less_than_half = _mm256_sub_epi32(_mm256_sllv_epi32(one, _mm256_sub_epi32(off, one)), one);
    const __m256i rounded =
        _mm256_srlv_epi32(_mm256_add_epi32(whole, _mm256_add_epi32(less_than_half, odd)), off);
    return _mm256_min_epu32(rounded, _mm256_set1_epi32((int)most));
}

/* Eight bytes, in the lower half. */
ALWAYS __m128i f8_of(kvf_dtype type, __m256i bits) {
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    const __m256i payload = _mm256_and_si256(_mm256_srli_epi32(bits, 21), _mm256_set1_epi32(3));
    const __m256i nan = type == KVF_DTYPE_F8_E4M3
                            ? _mm256_set1_epi32(KVF_F8_E4M3_NAN)
                            : _mm256_or_si256(payload, _mm256_set1_epi32(KVF_F8_E5M2_QUIET));
    const __m256i number = type == KVF_DTYPE_F8_E4M3
                               ? f8_magnitude(magnitude, 3, KVF_F8_E4M3_LEAST, KVF_F8_E4M3_MOST)
                               : f8_magnitude(magnitude, 2, KVF_F8_E5M2_LEAST, KVF_F8_E5M2_MOST);
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(bits, 31), 7);
    const __m256i wide = _mm256_or_si256(_mm256_blendv_epi8(number, nan, is_nan), sign);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    return _mm_packus_epi16(halves, halves);
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
    if (type == KVF_DTYPE_F8_E4M3 || type == KVF_DTYPE_F8_E5M2) {
        const __m128i bytes = f8_of(type, bits);
        if (past)
            _mm_stream_si64((long long *)(void *)out, _mm_cvtsi128_si64(bytes));
        else
            _mm_storel_epi64((__m128i *)(void *)out, bytes);
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
