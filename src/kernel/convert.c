#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdatomic.h>

#include "kernel/convert.h"
#include "kernel/convert_bits.h"
#include "model/match.h"

/* ---- every conversion ------------------------------------------------------------------------- */

bool kvf_kernel_converts(kvf_dtype from, kvf_dtype to) {
    return (size_t)from < 32 && (size_t)to < 32 &&
           (KVF_CONVERTED_DTYPES >> from & KVF_CONVERTED_DTYPES >> to & 1);
}

static uint32_t read_f32(kvf_dtype type, const unsigned char *in) {
    uint32_t whole;
    uint16_t half;
    switch ((int)type) {
    case KVF_DTYPE_F32:
        memcpy(&whole, in, sizeof whole);
        return whole;
    case KVF_DTYPE_F8_E4M3:
        return kvf_f32_of_f8_e4m3(*in);
    case KVF_DTYPE_F8_E5M2:
        return kvf_f32_of_f8_e5m2(*in);
    default:
        memcpy(&half, in, sizeof half);
        return type == KVF_DTYPE_F16 ? kvf_f32_of_f16(half) : kvf_f32_of_bf16(half);
    }
}

static void write_f32(kvf_dtype type, uint32_t bits, unsigned char *out) {
    uint16_t half;
    switch ((int)type) {
    case KVF_DTYPE_F32:
        memcpy(out, &bits, sizeof bits);
        break;
    case KVF_DTYPE_F8_E4M3:
        *out = kvf_f8_e4m3_of_f32(bits);
        break;
    case KVF_DTYPE_F8_E5M2:
        *out = kvf_f8_e5m2_of_f32(bits);
        break;
    default:
        half = type == KVF_DTYPE_F16 ? kvf_f16_of_f32(bits) : kvf_bf16_of_f32(bits);
        memcpy(out, &half, sizeof half);
    }
}

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
/* Not every compiler lets __builtin_cpu_supports() ask for it. */
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
        fastest; /* asking a virtual processor takes as long as converting some KiB */
    const kvf_convert_loop *loop = atomic_load_explicit(&fastest, memory_order_relaxed), *next;
    if (!loop) {
        for (uint32_t i = 0; (next = kvf_kernel_convert_loop(i)) != NULL; i++)
            loop = next;
        atomic_store_explicit(&fastest, loop, memory_order_relaxed);
    }
    loop->convert(from, to, in, out, count, past);
}
