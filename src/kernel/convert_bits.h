/*
 * The conversion of one element, in integer arithmetic on its bits: the reference for every loop.
 *
 *              sign   exponent   fraction
 *   f32         1        8          23
 *   bf16        1        8           7      the upper half of an f32
 *   f16         1        5          10
 *   f8_e5m2     1        5           2      the upper half of an f16
 *   f8_e4m3     1        4           3      no infinity, and one NaN: all bits but the sign set (OCP FP8, 2023)
 *
 * Conversions go through f32, which has every value of the others, so nothing is rounded twice. Device code includes
 * this file too, so it must need no library and no other header.
 */
#ifndef KVF_KERNEL_CONVERT_BITS_H
#define KVF_KERNEL_CONVERT_BITS_H

#ifdef __CUDACC_RTC__ /* the including file defines the integer types */
#define KVF_BITS static __device__ inline
#define KVF_LEADING_ZEROS(bits) ((uint32_t)__clz((int)(bits)))
#else
#include <stdbool.h>
#include <stdint.h>
#define KVF_BITS static inline
#define KVF_LEADING_ZEROS(bits) ((uint32_t)__builtin_clz(bits))
#endif

#define KVF_F32_QUIET 0x00400000u
#define KVF_F32_INFINITY 0x7f800000u
#define KVF_F16_INFINITY 0x7c00u
#define KVF_F16_QUIET 0x0200u
#define KVF_F8_E4M3_NAN 0x7fu
#define KVF_F8_E4M3_MOST 0x7eu       /* 448 */
#define KVF_F8_E5M2_MOST 0x7bu       /* 57344 */
#define KVF_F8_E4M3_LEAST (127 - 6u) /* the exponent, as f32, of the least number that is not subnormal */
#define KVF_F8_E5M2_LEAST (127 - 14u)
#define KVF_F8_E5M2_QUIET 0x7eu

KVF_BITS bool kvf_is_nan32(uint32_t bits) {
    return (bits & 0x7fffffffu) > KVF_F32_INFINITY;
}

/* `bits` without its last `n`, rounded to nearest, ties to even; 0 < n < 32. */
KVF_BITS uint32_t kvf_round_off(uint32_t bits, uint32_t n) {
    const uint32_t half = 1u << (n - 1), kept = bits >> n, rest = bits & (2 * half - 1);
    return kept + (rest > half || (rest == half && (kept & 1)));
}

/* ---- to f32: exact ---------------------------------------------------------------------------- */

KVF_BITS uint32_t kvf_f32_of_bf16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    return kvf_is_nan32(wide) ? wide | KVF_F32_QUIET : wide;
}

KVF_BITS uint32_t kvf_f32_of_f16(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = bits >> 10 & 0x1fu, fraction = bits & 0x3ffu;
    if (exponent == 0x1f)
        return sign | KVF_F32_INFINITY | (fraction ? KVF_F32_QUIET | fraction << 13 : 0);
    if (exponent == 0 && fraction == 0)
        return sign;
    /* An exponent of e means 2^(e - 127) in f32, 2^(e - 15) in f16. An exponent of 0 means the same as 1, without a
     * leading 1. */
    if (exponent == 0) {
        const uint32_t places =
            KVF_LEADING_ZEROS(fraction) - 21; /* shifts its first bit to the leading 1, 0x400 */
        fraction <<= places;
        exponent = 1 - places; /* may wrap below 0; the addition below wraps back */
    }
    return sign | (exponent + (127 - 15)) << 23 | (fraction & 0x3ffu) << 13;
}

KVF_BITS uint32_t kvf_f32_of_f8_e5m2(uint8_t bits) {
    return kvf_f32_of_f16((uint16_t)(bits << 8));
}

KVF_BITS uint32_t kvf_f32_of_f8_e4m3(uint8_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x80u) << 24, magnitude = bits & 0x7fu;
    if (magnitude == KVF_F8_E4M3_NAN)
        return sign | KVF_F32_INFINITY | KVF_F32_QUIET;
    /* Moved to the fields of an f16 it has 2^-8 of its value, for the exponents' biases are 7 and 15. */
    const uint32_t small = kvf_f32_of_f16((uint16_t)(magnitude << 7));
    return small ? sign | (small + (8u << 23)) : sign;
}

/* ---- from f32 --------------------------------------------------------------------------------- */

KVF_BITS uint16_t kvf_bf16_of_f32(uint32_t bits) {
    if (kvf_is_nan32(bits))
        return (uint16_t)((bits | KVF_F32_QUIET) >> 16);
    return (uint16_t)kvf_round_off(bits, 16); /* a carry correctly increments the exponent */
}

KVF_BITS uint16_t kvf_f16_of_f32(uint32_t bits) {
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    const uint32_t exponent = magnitude >> 23, fraction = magnitude & 0x7fffffu;
    if (kvf_is_nan32(bits))
        return (uint16_t)(sign | KVF_F16_INFINITY | KVF_F16_QUIET | fraction >> 13);
    if (exponent >= 127 + 16) /* 2^16 and more; smaller values that round up to it carry below */
        return (uint16_t)(sign | KVF_F16_INFINITY);
    if (exponent > 127 - 15)
        return (uint16_t)(sign | kvf_round_off(magnitude - ((127u - 15) << 23), 13));
    if (exponent < 127 - 25) /* less than half of the smallest f16, 2^-24 */
        return (uint16_t)sign;
    return (uint16_t)(sign | kvf_round_off(fraction | 0x800000u, 126 - exponent)); /* in units of 2^-24 */
}

/* The magnitude of a number as FP8 with so many bits of fraction, whose least normal number has the exponent `least` as
 * f32. What exceeds the greatest number, infinity too, becomes it. */
KVF_BITS uint32_t kvf_f8_magnitude(uint32_t bits, uint32_t fraction_bits, uint32_t least, uint32_t most) {
    const uint32_t magnitude = bits & 0x7fffffffu, exponent = magnitude >> 23, off = 23 - fraction_bits;
    uint32_t rounded;
    if (exponent >= least)
        rounded = kvf_round_off(magnitude - ((least - 1) << 23), off);
    else if (exponent + fraction_bits + 1 < least) /* less than half of the smallest */
        rounded = 0;
    else
        rounded = kvf_round_off((magnitude & 0x7fffffu) | 0x800000u, off + least - exponent);
    return rounded < most ? rounded : most;
}

KVF_BITS uint8_t kvf_f8_e4m3_of_f32(uint32_t bits) {
    const uint32_t sign = bits >> 24 & 0x80u;
    if (kvf_is_nan32(bits))
        return (uint8_t)(sign | KVF_F8_E4M3_NAN);
    return (uint8_t)(sign | kvf_f8_magnitude(bits, 3, KVF_F8_E4M3_LEAST, KVF_F8_E4M3_MOST));
}

KVF_BITS uint8_t kvf_f8_e5m2_of_f32(uint32_t bits) {
    const uint32_t sign = bits >> 24 & 0x80u;
    if (kvf_is_nan32(bits))
        return (uint8_t)(sign | KVF_F8_E5M2_QUIET | (bits >> 21 & 3u));
    return (uint8_t)(sign | kvf_f8_magnitude(bits, 2, KVF_F8_E5M2_LEAST, KVF_F8_E5M2_MOST));
}

#endif
