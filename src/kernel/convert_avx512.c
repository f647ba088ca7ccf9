/*
 * Converting with AVX-512, sixteen elements at a time, as in convert_avx2.c. The instruction for bf16 treats subnormal
 * f32 as zero, so it is not used.
 */
#include <immintrin.h>

#include "kernel/convert.h"
#include "kernel/convert_bits.h"

#define ALWAYS static inline __attribute__((always_inline))
#define AT_ONCE ((size_t)16)

ALWAYS __m512i f32_of_e4m3(__m256i bytes) {
    const __m256i magnitude = _mm256_and_si256(bytes, _mm256_set1_epi16(0x7f));
    const __m512 small = _mm512_cvtph_ps(_mm256_slli_epi16(magnitude, 7));
    const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(small, _mm512_set1_ps(256)));
    const __m512i wide = _mm512_cvtepu16_epi32(bytes), nan = _mm512_set1_epi32(KVF_F8_E4M3_NAN);
    const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(_mm512_and_si512(wide, nan), nan);
    const __m512i value = _mm512_mask_mov_epi32(bits, is_nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_or_si512(value, _mm512_slli_epi32(_mm512_srli_epi32(wide, 7), 31));
}

/* Elements as bits of f32. */
ALWAYS __m512i read_f32(kvf_dtype type, const unsigned char *in) {
    if (type == KVF_DTYPE_F32)
        return _mm512_loadu_si512(in);
    if (type == KVF_DTYPE_F8_E4M3 || type == KVF_DTYPE_F8_E5M2) {
        const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)in));
        return type == KVF_DTYPE_F8_E4M3 ? f32_of_e4m3(bytes)
                                         : _mm512_castps_si512(_mm512_cvtph_ps(_mm256_slli_epi16(bytes, 8)));
    }
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

ALWAYS __m512i f8_magnitude(__m512i magnitude, uint32_t fraction_bits, uint32_t least, uint32_t most) {
    const __m512i one = _mm512_set1_epi32(1), normal_off = _mm512_set1_epi32((int)(23 - fraction_bits));
    const __m512i below = _mm512_sub_epi32(_mm512_set1_epi32((int)least), _mm512_srli_epi32(magnitude, 23));
    const __mmask16 is_small = _mm512_cmpgt_epi32_mask(below, _mm512_setzero_si512());
    const __m512i normal = _mm512_sub_epi32(magnitude, _mm512_set1_epi32((int)((least - 1) << 23)));
    const __m512i small = _mm512_or_si512(_mm512_and_si512(magnitude, _mm512_set1_epi32(0x7fffff)),
                                          _mm512_set1_epi32(0x800000));
    const __m512i small_off =
        _mm512_min_epi32(_mm512_add_epi32(normal_off, below), _mm512_set1_epi32(31)); /* leaves nothing */
    const __m512i whole = _mm512_mask_mov_epi32(normal, is_small, small);
    const __m512i off = _mm512_mask_mov_epi32(normal_off, is_small, small_off);
    const __m512i odd = _mm512_and_si512(_mm512_srlv_epi32(whole, off), one);
    const __m512i less_than_half = _mm512_sub_epi32(_mm512_sllv_epi32(one, _mm512_sub_epi32(off, one)), one);
    const __m512i rounded =
        _mm512_srlv_epi32(_mm512_add_epi32(whole, _mm512_add_epi32(less_than_half, odd)), off);
    return _mm512_min_epu32(rounded, _mm512_set1_epi32((int)most));
}

ALWAYS __m128i f8_of(kvf_dtype type, __m512i bits) {
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __mmask16 is_nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
    const __m512i payload = _mm512_and_si512(_mm512_srli_epi32(bits, 21), _mm512_set1_epi32(3));
    const __m512i nan = type == KVF_DTYPE_F8_E4M3
                            ? _mm512_set1_epi32(KVF_F8_E4M3_NAN)
                            : _mm512_or_si512(payload, _mm512_set1_epi32(KVF_F8_E5M2_QUIET));
    const __m512i number = type == KVF_DTYPE_F8_E4M3
                               ? f8_magnitude(magnitude, 3, KVF_F8_E4M3_LEAST, KVF_F8_E4M3_MOST)
                               : f8_magnitude(magnitude, 2, KVF_F8_E5M2_LEAST, KVF_F8_E5M2_MOST);
    const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(bits, 31), 7);
    return _mm512_cvtepi32_epi8(_mm512_or_si512(_mm512_mask_mov_epi32(number, is_nan, nan), sign));
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
    if (type == KVF_DTYPE_F8_E4M3 || type == KVF_DTYPE_F8_E5M2) {
        const __m128i bytes = f8_of(type, bits);
        if (past)
            _mm_stream_si128((__m128i *)(void *)out, bytes);
        else
            _mm_storeu_si128((__m128i *)(void *)out, bytes);
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
