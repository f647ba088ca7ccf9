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
#else
#include <stdbool.h>
#include <stdint.h>
#define KVF_BITS static inline
#endif

#define KVF_F32_QUIET 0x00400000u
#define KVF_F32_INFINITY 0x7f800000u
#define KVF_F16_INFINITY 0x7c00u
#define KVF_F16_QUIET 0x0200u
#define KVF_F8_E4M3_NAN 0x7fu
#define KVF_F8_E4M3_MOST 0x7eu /* 448 */
#define KVF_F8_E5M2_MOST 0x7bu /* 57344 */
#define KVF_F8_E5M2_QUIET 0x7eu

/* The exponents, as f32, of the least numbers that are not subnormal. */
#define KVF_F16_LEAST (127 - 14u)
#define KVF_F8_E4M3_LEAST (127 - 6u)
#define KVF_F8_E5M2_LEAST (127 - 14u)

KVF_BITS bool kvf_is_nan32(uint32_t bits) {
    return (bits & 0x7fffffffu) > KVF_F32_INFINITY;
}

/* The bits of a whole number below 2^24, which f32 has exactly, whatever the modes. */
KVF_BITS uint32_t kvf_f32_of_number(uint32_t number) {
#ifdef __CUDACC_RTC__
    return __float_as_uint((float)number);
#else
    const union {
        float value;
        uint32_t bits;
    } wide = {(float)(int32_t)number};
    return wide.bits;
#endif
}

/* `bits` without its last `n`, rounded to nearest, ties to even; 0 < n < 32. The sum must not overflow. */
KVF_BITS uint32_t kvf_round_off(uint32_t bits, uint32_t n) {
    return (bits + (1u << (n - 1)) - 1 + (bits >> n & 1)) >> n;
}

/* ---- to f32: exact ---------------------------------------------------------------------------- */

KVF_BITS uint32_t kvf_f32_of_bf16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    return kvf_is_nan32(wide) ? wide | KVF_F32_QUIET : wide;
}

/* The magnitude of a number with so many bits of fraction, whose exponent 1 is `least` in f32. An exponent of 0 means the
 * same as 1, but without a leading 1: such a number is its fraction times a power of two. */
KVF_BITS uint32_t kvf_wide_magnitude(uint32_t magnitude, uint32_t fraction_bits, uint32_t least) {
    const uint32_t usual = (magnitude << (23 - fraction_bits)) + ((least - 1) << 23);
    const uint32_t small = kvf_f32_of_number(magnitude) - ((127 - least + fraction_bits) << 23);
    return magnitude >> fraction_bits ? usual : magnitude ? small : 0;
}

KVF_BITS uint32_t kvf_f32_of_f16(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    const uint32_t payload = magnitude > KVF_F16_INFINITY ? KVF_F32_QUIET | (magnitude & 0x3ffu) << 13 : 0;
    return sign | (magnitude < KVF_F16_INFINITY ? kvf_wide_magnitude(magnitude, 10, KVF_F16_LEAST)
                                                : KVF_F32_INFINITY | payload);
}

KVF_BITS uint32_t kvf_f32_of_f8_e5m2(uint8_t bits) {
    return kvf_f32_of_f16((uint16_t)(bits << 8));
}

KVF_BITS uint32_t kvf_f32_of_f8_e4m3(uint8_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x80u) << 24, magnitude = bits & 0x7fu;
    return sign | (magnitude < KVF_F8_E4M3_NAN ? kvf_wide_magnitude(magnitude, 3, KVF_F8_E4M3_LEAST)
                                               : KVF_F32_INFINITY | KVF_F32_QUIET);
}

/* ---- from f32 --------------------------------------------------------------------------------- */

KVF_BITS uint16_t kvf_bf16_of_f32(uint32_t bits) {
    if (kvf_is_nan32(bits))
        return (uint16_t)((bits | KVF_F32_QUIET) >> 16);
    return (uint16_t)kvf_round_off(bits, 16); /* a carry increments the exponent */
}

/* The magnitude of a number with so many bits of fraction, whose exponent 1 is `least` in f32. What exceeds the greatest,
 * infinity too, becomes it. Without branches, as threads of a device that take different ones wait for each other. */
KVF_BITS uint32_t kvf_narrow_magnitude(uint32_t bits, uint32_t fraction_bits, uint32_t least, uint32_t most) {
    const uint32_t magnitude = bits & 0x7fffffffu, exponent = magnitude >> 23, off = 23 - fraction_bits;
    const uint32_t below = exponent < least ? least - exponent : 0;
    const uint32_t usual = magnitude - ((least - 1) << 23), small = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t all = off + below < 25 ? off + below : 25; /* 24 bits without their last 25 are 0 */
    const uint32_t rounded = kvf_round_off(below ? small : usual, all); /* a carry increments the exponent */
    return rounded < most ? rounded : most;
}

KVF_BITS uint16_t kvf_f16_of_f32(uint32_t bits) {
    const uint32_t number = kvf_narrow_magnitude(bits, 10, KVF_F16_LEAST, KVF_F16_INFINITY);
    const uint32_t nan = KVF_F16_INFINITY | KVF_F16_QUIET | (bits >> 13 & 0x3ffu);
    return (uint16_t)((bits >> 16 & 0x8000u) | (kvf_is_nan32(bits) ? nan : number));
}

KVF_BITS uint8_t kvf_f8_e4m3_of_f32(uint32_t bits) {
    const uint32_t number = kvf_narrow_magnitude(bits, 3, KVF_F8_E4M3_LEAST, KVF_F8_E4M3_MOST);
    return (uint8_t)((bits >> 24 & 0x80u) | (kvf_is_nan32(bits) ? KVF_F8_E4M3_NAN : number));
}

KVF_BITS uint8_t kvf_f8_e5m2_of_f32(uint32_t bits) {
    const uint32_t number = kvf_narrow_magnitude(bits, 2, KVF_F8_E5M2_LEAST, KVF_F8_E5M2_MOST);
    const uint32_t nan = KVF_F8_E5M2_QUIET | (bits >> 21 & 3u);
    return (uint8_t)((bits >> 24 & 0x80u) | (kvf_is_nan32(bits) ? nan : number));
}

#endif
