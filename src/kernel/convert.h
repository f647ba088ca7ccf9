/*
 * Changing the type of elements that lie side by side: f32, f16, bf16.
 *
 * What is not a number of the new type becomes the nearest that is, the even one of two as near, or infinity beyond the
 * greatest. A NaN stays one: its sign and the first bits of its payload are kept, and it is made quiet. The same bits
 * come out of every loop, whatever the processor's modes say.
 */
#ifndef KVF_KERNEL_CONVERT_H
#define KVF_KERNEL_CONVERT_H

#include <kvferry/model.h>

#include "base/base.h"

/** Whether there is a way from one type to another: both are f32, f16 or bf16. */
bool kvf_kernel_converts(kvf_dtype from, kvf_dtype to);

/**
 * Converts `count` elements. The memory is not the same, and need not be aligned. Any thread.
 *
 * @param past  as of kvf_kernel_gather()
 */
void kvf_kernel_convert(kvf_dtype from, kvf_dtype to, const void *in, void *out, size_t count, bool past);

/** One way to do it. */
typedef struct kvf_convert_loop {
    const char *name; /**< "plain", "avx2", "avx512", "neon" */
    void (*convert)(kvf_dtype from, kvf_dtype to, const void *in, void *out, size_t count, bool past);
} kvf_convert_loop;

/** The loops this machine can run, plain first, the fastest last; NULL past it. Any thread. */
const kvf_convert_loop *kvf_kernel_convert_loop(uint32_t i);

/** One element after the other, in whole numbers: right, and what the others are compared with. */
extern const kvf_convert_loop kvf_convert_plain;
#if defined(__x86_64__)
extern const kvf_convert_loop kvf_convert_avx2;
extern const kvf_convert_loop kvf_convert_avx512;
#elif defined(__aarch64__)
extern const kvf_convert_loop kvf_convert_neon;
#endif

#endif
