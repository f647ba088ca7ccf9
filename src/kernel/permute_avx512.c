/* Permuting with vectors of 64 bytes. */
#include <immintrin.h>

#define VECTOR __m512i
#define VECTOR_BYTES ((size_t)64)
#define load(from) _mm512_loadu_si512((const __m512i *)(const void *)(from))
#define store(to, vector) _mm512_storeu_si512((__m512i *)(void *)(to), (vector))
#define load_16(from) _mm_loadu_si128((const __m128i *)(const void *)(from))
#define add_lane(vector, i, from) _mm512_inserti32x4((vector), load_16(from), (i))
#define load_lanes(from, distance)                                                                           \
    add_lane(add_lane(add_lane(_mm512_castsi128_si512(load_16(from)), 1, (from) + (distance)), 2,            \
                      (from) + 2 * (distance)),                                                              \
             3, (from) + 3 * (distance))
#define lane(vector, i) _mm512_extracti32x4_epi32((vector), (i))
#define low1(a, b) _mm512_unpacklo_epi8((a), (b))
#define low2(a, b) _mm512_unpacklo_epi16((a), (b))
#define low4(a, b) _mm512_unpacklo_epi32((a), (b))
#define low8(a, b) _mm512_unpacklo_epi64((a), (b))
#define high1(a, b) _mm512_unpackhi_epi8((a), (b))
#define high2(a, b) _mm512_unpackhi_epi16((a), (b))
#define high4(a, b) _mm512_unpackhi_epi32((a), (b))
#define high8(a, b) _mm512_unpackhi_epi64((a), (b))

#include "kernel/permute_vectors.h"

const kvf_permute_kernels kvf_permute_avx512 = {"avx512", VECTOR_BYTES, gather_cells, rotate_cells};
