#include "kernel/box.h"

static void gather_plain(const kvf_box *box, void *to, bool past) {
    (void)past;
    unsigned char *out = to;
    for (uint64_t r = 0; r < box->rows; r++) {
        const unsigned char *row = kvf_box_row(box, r);
        for (uint64_t u = 0; u < box->units; u++)
            for (uint64_t p = 0; p < box->pieces; p++, out += box->piece_bytes)
                memcpy(out, row + u * box->unit_stride + p * box->piece_stride, box->piece_bytes);
    }
}

static void scatter_plain(const kvf_box *box, const void *from, bool past) {
    (void)past;
    const unsigned char *in = from;
    for (uint64_t r = 0; r < box->rows; r++) {
        unsigned char *row = kvf_box_row(box, r);
        for (uint64_t u = 0; u < box->units; u++)
            for (uint64_t p = 0; p < box->pieces; p++, in += box->piece_bytes)
                memcpy(row + u * box->unit_stride + p * box->piece_stride, in, box->piece_bytes);
    }
}

const kvf_box_loops kvf_box_plain = {"plain", gather_plain, scatter_plain};

const kvf_box_loops *kvf_kernel_box_loops(uint32_t i) {
    if (i == 0)
        return &kvf_box_plain;
#if defined(__x86_64__)
    if (i == 1 && __builtin_cpu_supports("avx2"))
        return &kvf_box_avx2;
    if (i == 2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        return &kvf_box_avx512;
#elif defined(__aarch64__)
    if (i == 1)
        return &kvf_box_neon;
#endif
    return NULL;
}

static const kvf_box_loops *fastest(void) {
    const kvf_box_loops *found = &kvf_box_plain, *next;
    for (uint32_t i = 1; (next = kvf_kernel_box_loops(i)) != NULL; i++)
        found = next;
    return found;
}

void kvf_kernel_gather(const kvf_box *box, void *to, bool past) {
    fastest()->gather(box, to, past);
}

void kvf_kernel_scatter(const kvf_box *box, const void *from, bool past) {
    fastest()->scatter(box, from, past);
}
