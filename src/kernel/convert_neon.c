/*
 * Converting with NEON, four elements at a time. The processor's own conversions between f32 and f16 round and make
 * NaNs quiet as convert.h says, unless the thread's modes say otherwise. Then the plain loop converts. FP8 is converted
 * as in convert_avx2.c.
 */
#include <arm_neon.h>

#include "kernel/convert.h"
#include "kernel/convert_bits.h"

#define ALWAYS static inline __attribute__((always_inline))
#define AT_ONCE ((size_t)4)

ALWAYS uint32x4_t f32_of_f16(uint16x4_t halves) {
    return vreinterpretq_u32_f32(vcvt_f32_f16(vreinterpret_f16_u16(halves)));
}

ALWAYS uint32x4_t f32_of_e4m3(uint16x4_t bytes) {
    const uint16x4_t magnitude = vand_u16(bytes, vdup_n_u16(KVF_F8_E4M3_NAN));
    const float32x4_t small = vreinterpretq_f32_u32(f32_of_f16(vshl_n_u16(magnitude, 7)));
    const uint32x4_t bits = vreinterpretq_u32_f32(vmulq_n_f32(small, 256));
    const uint32x4_t is_nan = vceqq_u32(vmovl_u16(magnitude), vdupq_n_u32(KVF_F8_E4M3_NAN));
    const uint32x4_t value = vbslq_u32(is_nan, vdupq_n_u32(0x7fc00000), bits);
    return vorrq_u32(value, vshlq_n_u32(vmovl_u16(vshr_n_u16(bytes, 7)), 31));
}

/* A NaN is made quiet here: compilers take the conversion of an f16 to f32 and back for none at all. */
ALWAYS uint32x4_t f32_of_e5m2(uint16x4_t bytes) {
    const uint16x4_t halves = vshl_n_u16(bytes, 8);
    const uint16x4_t is_nan = vcgt_u16(vand_u16(halves, vdup_n_u16(0x7fff)), vdup_n_u16(KVF_F16_INFINITY));
    return f32_of_f16(vorr_u16(halves, vand_u16(is_nan, vdup_n_u16(KVF_F16_QUIET))));
}

/* Elements as bits of f32. */
ALWAYS uint32x4_t read_f32(kvf_dtype type, const unsigned char *in) {
    if (type == KVF_DTYPE_F32)
        return vreinterpretq_u32_u8(vld1q_u8(in));
    if (type == KVF_DTYPE_F8_E4M3 || type == KVF_DTYPE_F8_E5M2) {
        uint32_t four;
        memcpy(&four, in, sizeof four);
        const uint16x4_t bytes = vget_low_u16(vmovl_u8(vcreate_u8(four)));
        return type == KVF_DTYPE_F8_E4M3 ? f32_of_e4m3(bytes) : f32_of_e5m2(bytes);
    }
    const uint16x4_t halves = vreinterpret_u16_u8(vld1_u8(in));
    if (type == KVF_DTYPE_F16)
        return f32_of_f16(halves);
    const uint32x4_t bits = vshll_n_u16(halves, 16);
    const uint32x4_t is_nan = vcgtq_u32(vandq_u32(bits, vdupq_n_u32(0x7fffffff)), vdupq_n_u32(0x7f800000));
    return vorrq_u32(bits, vandq_u32(is_nan, vdupq_n_u32(0x00400000)));
}

ALWAYS uint16x4_t bf16_of(uint32x4_t bits) {
    const uint32x4_t is_nan = vcgtq_u32(vandq_u32(bits, vdupq_n_u32(0x7fffffff)), vdupq_n_u32(0x7f800000));
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000));
    return vshrn_n_u32(vbslq_u32(is_nan, quiet, rounded), 16);
}

ALWAYS uint32x4_t f8_magnitude(uint32x4_t magnitude, uint32_t fraction_bits, uint32_t least, uint32_t most) {
    const uint32x4_t one = vdupq_n_u32(1), exponent = vshrq_n_u32(magnitude, 23);
    const uint32x4_t is_small = vcltq_u32(exponent, vdupq_n_u32(least));
    const uint32x4_t normal = vsubq_u32(magnitude, vdupq_n_u32((least - 1) << 23));
    const uint32x4_t small = vorrq_u32(vandq_u32(magnitude, vdupq_n_u32(0x7fffff)), vdupq_n_u32(0x800000));
    const uint32x4_t small_off = vminq_u32(vsubq_u32(vdupq_n_u32(23 - fraction_bits + least), exponent),
                                           vdupq_n_u32(31)); /* leaves nothing */
    const uint32x4_t whole = vbslq_u32(is_small, small, normal);
    const int32x4_t off =
        vreinterpretq_s32_u32(vbslq_u32(is_small, small_off, vdupq_n_u32(23 - fraction_bits)));
    const uint32x4_t odd = vandq_u32(vshlq_u32(whole, vnegq_s32(off)), one);
    const uint32x4_t less_than_half = vsubq_u32(vshlq_u32(one, vsubq_s32(off, vdupq_n_s32(1))), one);
    const uint32x4_t rounded = vshlq_u32(vaddq_u32(whole, vaddq_u32(less_than_half, odd)), vnegq_s32(off));
    return vminq_u32(rounded, vdupq_n_u32(most));
}

/* Four bytes, the first one lowest. */
ALWAYS uint32_t f8_of(kvf_dtype type, uint32x4_t bits) {
    const uint32x4_t magnitude = vandq_u32(bits, vdupq_n_u32(0x7fffffff));
    const uint32x4_t is_nan = vcgtq_u32(magnitude, vdupq_n_u32(0x7f800000));
    const uint32x4_t payload = vandq_u32(vshrq_n_u32(bits, 21), vdupq_n_u32(3));
    const uint32x4_t nan = type == KVF_DTYPE_F8_E4M3 ? vdupq_n_u32(KVF_F8_E4M3_NAN)
                                                     : vorrq_u32(payload, vdupq_n_u32(KVF_F8_E5M2_QUIET));
    const uint32x4_t number = type == KVF_DTYPE_F8_E4M3
                                  ? f8_magnitude(magnitude, 3, KVF_F8_E4M3_LEAST, KVF_F8_E4M3_MOST)
                                  : f8_magnitude(magnitude, 2, KVF_F8_E5M2_LEAST, KVF_F8_E5M2_MOST);
    const uint32x4_t sign = vshlq_n_u32(vshrq_n_u32(bits, 31), 7);
    const uint16x4_t halves = vmovn_u32(vorrq_u32(vbslq_u32(is_nan, nan, number), sign));
    return vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(halves, halves))), 0);
}

/* Compilers offer no store past the caches. */
ALWAYS void write_f32(kvf_dtype type, uint32x4_t bits, unsigned char *out, bool past) {
    (void)past;
    if (type == KVF_DTYPE_F32) {
        vst1q_u8(out, vreinterpretq_u8_u32(bits));
        return;
    }
    if (type == KVF_DTYPE_F8_E4M3 || type == KVF_DTYPE_F8_E5M2) {
        const uint32_t four = f8_of(type, bits);
        memcpy(out, &four, sizeof four);
        return;
    }
    const uint16x4_t halves = type == KVF_DTYPE_F16
                                  ? vreinterpret_u16_f16(vcvt_f16_f32(vreinterpretq_f32_u32(bits)))
                                  : bf16_of(bits);
    vst1_u8(out, vreinterpret_u8_u16(halves));
}

ALWAYS void end_streaming(void) {}

#include "kernel/convert_fast.h"

/* What changes the results of conversions in the register of modes (FPCR): the form of f16 (bit 26), NaNs without
 * payload (25), zeros for subnormal numbers (24, and 0 and 1 of newer processors), the rounding mode (23 and 22). */
#define MODES_THAT_MATTER 0x07c00003u

static bool modes_are_as_convert_says(void) {
    uint64_t modes;
    __asm__ volatile("mrs %0, fpcr" : "=r"(modes));
    return (modes & MODES_THAT_MATTER) == 0;
}

static void convert_neon(kvf_dtype from, kvf_dtype to, const void *in, void *out, size_t count, bool past) {
    if (modes_are_as_convert_says())
        convert_fast(from, to, in, out, count, past);
    else
        kvf_convert_plain.convert(from, to, in, out, count, past);
}

const kvf_convert_loop kvf_convert_neon = {"neon", convert_neon};
