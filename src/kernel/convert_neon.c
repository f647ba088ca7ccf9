/*
 * Converting with NEON, four elements at a time. The processor's own conversions between f32 and f16 round and make
 * NaNs quiet as convert.h says, unless the thread's modes say otherwise. Then the plain loop converts.
 */
#include <arm_neon.h>

#include "kernel/convert.h"

#define ALWAYS static inline __attribute__((always_inline))
#define AT_ONCE ((size_t)4)

/* Elements as bits of f32. */
ALWAYS uint32x4_t read_f32(kvf_dtype type, const unsigned char *in) {
    if (type == KVF_DTYPE_F32)
        return vreinterpretq_u32_u8(vld1q_u8(in));
    const uint16x4_t halves = vreinterpret_u16_u8(vld1_u8(in));
    if (type == KVF_DTYPE_F16)
        return vreinterpretq_u32_f32(vcvt_f32_f16(vreinterpret_f16_u16(halves)));
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

/* Compilers offer no store past the caches. */
ALWAYS void write_f32(kvf_dtype type, uint32x4_t bits, unsigned char *out, bool past) {
    (void)past;
    if (type == KVF_DTYPE_F32) {
        vst1q_u8(out, vreinterpretq_u8_u32(bits));
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
