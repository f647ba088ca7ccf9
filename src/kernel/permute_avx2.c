/* Permuting with vectors of 32 bytes. */
#include <immintrin.h>

#define VECTOR __m256i
#define VECTOR_BYTES ((size_t)32)
#define load(from) _mm256_loadu_si256((const __m256i *)(const void *)(from))
#define store(to, vector) _mm256_storeu_si256((__m256i *)(void *)(to), (vector))
#define load_16(from) _mm_loadu_si128((const __m128i *)(const void *)(from))
#define load_lanes(from, distance)                                                                           \
    _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(from)), load_16((from) + (distance)), 1)
#define lane(vector, i) _mm256_extracti128_si256((vector), (i)&1)
#define low1(a, b) _mm256_unpacklo_epi8((a), (b))
#define low2(a, b) _mm256_unpacklo_epi16((a), (b))
#define low4(a, b) _mm256_unpacklo_epi32((a), (b))
#define low8(a, b) _mm256_unpacklo_epi64((a), (b))
#define high1(a, b) _mm256_unpackhi_epi8((a), (b))
#define high2(a, b) _mm256_unpackhi_epi16((a), (b))
#define high4(a, b) _mm256_unpackhi_epi32((a), (b))
#define high8(a, b) _mm256_unpackhi_epi64((a), (b))

#include "kernel/permute_vectors.h"

#include "kernel/permute_gather.h"

const kvf_permute_kernels kvf_permute_avx2 = {.name = "avx2",
                                              .copy_aside = copy_aside,
                                              .gather = gather_cells,
                                              .put_aside = put_aside,
                                              .bring_back = bring_back,
                                              .rotate = rotate_cells};
