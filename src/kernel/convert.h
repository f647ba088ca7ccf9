/*
 * Changing the type of contiguous elements: f32, f16, bf16, f8_e4m3, f8_e5m2.
 *
 * Values round to the nearest of the new type, ties to even. Those beyond the greatest become infinity, but in FP8 the
 * greatest number, and so does infinity there, as in CUDA's saturating conversions. A NaN keeps its sign and the first
 * bits of its payload, and becomes quiet; that of f8_e4m3 has no payload. Every loop gives the same bits, whatever the
 * processor's modes are.
 */
#ifndef KVF_KERNEL_CONVERT_H
#define KVF_KERNEL_CONVERT_H

#include <kvferry/model.h>

#include "base/base.h"

/** Whether one type can be converted into the other: both are of those above. */
bool kvf_kernel_converts(kvf_dtype from, kvf_dtype to);

/**
 * Converts `count` elements. `in` and `out` must not overlap, and need not be aligned. Any thread.
 *
 * @param past  as for kvf_kernel_gather()
 */
void kvf_kernel_convert(kvf_dtype from, kvf_dtype to, const void *in, void *out, size_t count, bool past);

/** One implementation. */
typedef struct kvf_convert_loop {
    const char *name; /**< "plain", "avx2", "avx512", "neon" */
    void (*convert)(kvf_dtype from, kvf_dtype to, const void *in, void *out, size_t count, bool past);
} kvf_convert_loop;

/** The loops that this machine can run, plain first, the fastest last; NULL after the last. Any thread. */
const kvf_convert_loop *kvf_kernel_convert_loop(uint32_t i);

/** One element after the other, in integer arithmetic: the reference for the others. */
extern const kvf_convert_loop kvf_convert_plain;
#if defined(__x86_64__)
extern const kvf_convert_loop kvf_convert_avx2;
extern const kvf_convert_loop kvf_convert_avx512;
#elif defined(__aarch64__)
extern const kvf_convert_loop kvf_convert_neon;
#endif

#endif
