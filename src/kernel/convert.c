#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdatomic.h>

#include "kernel/convert.h"
#include "model/match.h"

/*
 *          sign   exponent   fraction
 *   f32     1        8          23
 *   bf16    1        8           7      the upper half of an f32
 *   f16     1        5          10
 */
#define F32_QUIET 0x00400000u
#define F32_INFINITY 0x7f800000u
#define F16_INFINITY 0x7c00u
#define F16_QUIET 0x0200u

static bool is_nan32(uint32_t bits) {
    return (bits & 0x7fffffffu) > F32_INFINITY;
}

/* `bits` without its last `n`, rounded to the nearest, to the even one of two as near; 0 < n < 32. */
static uint32_t round_off(uint32_t bits, uint32_t n) {
    const uint32_t half = 1u << (n - 1), kept = bits >> n, rest = bits & (2 * half - 1);
    return kept + (rest > half || (rest == half && (kept & 1)));
}

/* ---- to f32: nothing is lost ------------------------------------------------------------------ */

static uint32_t f32_of_bf16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    return is_nan32(wide) ? wide | F32_QUIET : wide;
}

static uint32_t f32_of_f16(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = bits >> 10 & 0x1fu, fraction = bits & 0x3ffu;
    if (exponent == 0x1f)
        return sign | F32_INFINITY | (fraction ? F32_QUIET | fraction << 13 : 0);
    if (exponent == 0 && fraction == 0)
        return sign;
    /* An f32 with an exponent of e is 2^(e - 127), an f16 2^(e - 15); one of 0 has no leading 1, and counts as 1. */
    if (exponent == 0) {
        exponent = 1;
        for (; !(fraction & 0x400u); fraction <<= 1)
            exponent--; /* below 0 it goes around, and comes back with what is added */
    }
    return sign | (exponent + (127 - 15)) << 23 | (fraction & 0x3ffu) << 13;
}

/* ---- from f32 --------------------------------------------------------------------------------- */

static uint16_t bf16_of_f32(uint32_t bits) {
    if (is_nan32(bits))
        return (uint16_t)((bits | F32_QUIET) >> 16);
    return (uint16_t)round_off(bits, 16); /* a carry goes into the exponent, where it belongs */
}

static uint16_t f16_of_f32(uint32_t bits) {
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    const uint32_t exponent = magnitude >> 23, fraction = magnitude & 0x7fffffu;
    if (is_nan32(bits))
        return (uint16_t)(sign | F16_INFINITY | F16_QUIET | fraction >> 13);
    if (exponent >= 127 + 16) /* 2^16 and more; what rounds up to it gets there by a carry */
        return (uint16_t)(sign | F16_INFINITY);
    if (exponent > 127 - 15)
        return (uint16_t)(sign | round_off(magnitude - ((127u - 15) << 23), 13));
    if (exponent < 127 - 25) /* less than half of the least, 2^-24 */
        return (uint16_t)sign;
    return (uint16_t)(sign | round_off(fraction | 0x800000u, 126 - exponent)); /* counted in 2^-24 */
}

/* ---- all of them ------------------------------------------------------------------------------ */

bool kvf_kernel_converts(kvf_dtype from, kvf_dtype to) {
    return (size_t)from < 32 && (size_t)to < 32 &&
           (KVF_CONVERTED_DTYPES >> from & KVF_CONVERTED_DTYPES >> to & 1);
}

static uint32_t read_f32(kvf_dtype type, const unsigned char *in) {
    uint32_t whole;
    uint16_t half;
    if (type == KVF_DTYPE_F32) {
        memcpy(&whole, in, sizeof whole);
        return whole;
    }
    memcpy(&half, in, sizeof half);
    return type == KVF_DTYPE_F16 ? f32_of_f16(half) : f32_of_bf16(half);
}

static void write_f32(kvf_dtype type, uint32_t bits, unsigned char *out) {
    if (type == KVF_DTYPE_F32) {
        memcpy(out, &bits, sizeof bits);
        return;
    }
    const uint16_t half = type == KVF_DTYPE_F16 ? f16_of_f32(bits) : bf16_of_f32(bits);
    memcpy(out, &half, sizeof half);
}

/* Over f32, which has every f16 and bf16: so nothing is rounded twice. */
static void convert_plain(kvf_dtype from, kvf_dtype to, const void *in, void *out, size_t count, bool past) {
    (void)past;
    const size_t in_bytes = kvf_dtype_bits(from) / 8, out_bytes = kvf_dtype_bits(to) / 8;
    const unsigned char *at = in;
    unsigned char *to_at = out;
    for (size_t i = 0; i < count; i++)
        write_f32(to, read_f32(from, at + i * in_bytes), to_at + i * out_bytes);
}

const kvf_convert_loop kvf_convert_plain = {"plain", convert_plain};

#if defined(__x86_64__)
/* Not every compiler has a name for it. */
static bool has_f16c(void) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

const kvf_convert_loop *kvf_kernel_convert_loop(uint32_t i) {
    if (i == 0)
        return &kvf_convert_plain;
#if defined(__x86_64__)
    if (i == 1 && __builtin_cpu_supports("avx2") && has_f16c())
        return &kvf_convert_avx2;
    if (i == 2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && has_f16c())
        return &kvf_convert_avx512;
#elif defined(__aarch64__)
    if (i == 1)
        return &kvf_convert_neon;
#endif
    return NULL;
}

void kvf_kernel_convert(kvf_dtype from, kvf_dtype to, const void *in, void *out, size_t count, bool past) {
    KVF_ASSERT(kvf_kernel_converts(from, to));
    static _Atomic(const kvf_convert_loop *)
        fastest; /* asking a virtual processor takes as long as some KiB */
    const kvf_convert_loop *loop = atomic_load_explicit(&fastest, memory_order_relaxed), *next;
    if (!loop) {
        for (uint32_t i = 0; (next = kvf_kernel_convert_loop(i)) != NULL; i++)
            loop = next;
        atomic_store_explicit(&fastest, loop, memory_order_relaxed);
    }
    loop->convert(from, to, in, out, count, past);
}
