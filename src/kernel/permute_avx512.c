/* Permuting with vectors of 64 bytes. */
#include <immintrin.h>

#define VECTOR __m512i
#define VECTOR_BYTES ((size_t)64)
#define load(from) _mm512_loadu_si512((const __m512i *)(const void *)(from))
#define store(to, vector) _mm512_storeu_si512((__m512i *)(void *)(to), (vector))
#define load_16(from) _mm_loadu_si128((const __m128i *)(const void *)(from))
#define load_two(from, distance)                                                                             \
    _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(from)), load_16((from) + (distance)), 1)
#define load_lanes(from, distance)                                                                           \
    _mm512_inserti64x4(_mm512_castsi256_si512(load_two((from), (distance))),                                 \
                       load_two((from) + 2 * (distance), (distance)), 1)
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

#include "kernel/permute_gather.h"

/* Not where short rows of cells are transposed by 16 bytes: wide vectors would be mostly empty. Nor with 2 rows, fewer
 * than a vector has pieces, or 16, for which there are not enough registers. */
static bool suits_gather(const kvf_gather *g) {
    bool narrow = g->count[1] * g->cell_bytes <= 32 || g->count[2] == 2 || g->count[2] == 16;
    return g->cell_bytes > 16 || (g->cell_bytes < 16 && !narrow);
}

const kvf_permute_kernels kvf_permute_avx512 = {.name = "avx512",
                                                .copy_aside = copy_aside,
                                                .gather = gather_cells,
                                                .put_aside = put_aside,
                                                .bring_back = bring_back,
                                                .suits_gather = suits_gather,
                                                .rotate = rotate_cells};
