/*
 * A product of two matrices of 8192 x 8192 in bf16, which occupies all multiprocessors of a device: something for copies
 * to run beside. It is cuBLAS's, which is loaded if it is there.
 */
#ifndef BENCH_CUDA_PRODUCT_H
#define BENCH_CUDA_PRODUCT_H

#include "cuda_bench.h"

#define BENCH_PRODUCTS 20u /* started together */

typedef int (*bench_gemm_call)(void *handle, int a_turned, int b_turned, int m, int n, int k,
                               const void *alpha, const void *a, int a_type, int a_step, const void *b,
                               int b_type, int b_step, const void *beta, void *c, int c_type, int c_step,
                               int compute, int algorithm);

typedef struct bench_product {
    void *handle; /* of cuBLAS */
    bench_gemm_call gemm;
    int (*set_stream)(void *handle, CUstream stream);
    int (*destroy)(void *handle);
    CUstream stream;
    CUevent over;
    CUdeviceptr a, b, c;
} bench_product;

/** False: there is no cuBLAS, or it does not start, as where the driver is older than it; a note says so. */
bool bench_product_open(bench_report *report, bench_product *p);
void bench_product_close(bench_product *p);
/** Starts BENCH_PRODUCTS products, one after the other. */
void bench_product_start(const bench_product *p);
bool bench_product_runs(const bench_product *p);
/** The time of BENCH_PRODUCTS products alone. */
double bench_product_ns(const bench_product *p);

#endif
