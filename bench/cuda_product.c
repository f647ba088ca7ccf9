#include "cuda_product.h"

#include <dlfcn.h>
#include <string.h>

#define EDGE 8192u
#define MATRIX_BYTES ((uint64_t)EDGE * EDGE * sizeof(uint16_t))
#define CHUNK_BYTES MEGABYTE /* of a matrix that is filled; fits into `seen` */

/* cuBLAS's own values. */
enum { AS_IT_IS = 0, BF16 = 14, IN_F32 = 68, ITS_CHOICE = -1 };

static void *load_cublas(void) {
    static const char *const names[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};
    void *library = NULL;
    for (size_t i = 0; !library && i < sizeof names / sizeof *names; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    return library;
}

static void *function_of(void *library, const char *name) {
    void *found = dlsym(library, name);
    bench_require(found != NULL, "cuBLAS lacks a function");
    return found;
}

/* Random elements of both signs, from 1/2 to 1: zeros would need less power, and so run at a higher clock. */
static void fill_matrix(CUdeviceptr matrix, uint64_t seed) {
    uint16_t *chunk = (uint16_t *)(void *)bench_gpu.seen;
    uint64_t state = seed;
    for (uint64_t done = 0; done < MATRIX_BYTES; done += CHUNK_BYTES) {
        for (size_t i = 0; i < CHUNK_BYTES / sizeof *chunk; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            chunk[i] = (uint16_t)(0x3f00u | (state >> 48 & 0x807fu));
        }
        bench_driver(bench_gpu.cuda->cuMemcpyAsync(matrix + done, (CUdeviceptr)(uintptr_t)chunk, CHUNK_BYTES,
                                                   bench_gpu.stream),
                     "filling a matrix");
        bench_stream_wait();
    }
}

/* False: cuBLAS does not start, as where the driver is older than it. */
static bool start_cublas(bench_product *p, void *library) {
    int (*create)(void **handle);
    void *found = function_of(library, "cublasCreate_v2");
    memcpy(&create, &found, sizeof found);
    found = function_of(library, "cublasSetStream_v2");
    memcpy(&p->set_stream, &found, sizeof found);
    found = function_of(library, "cublasGemmEx");
    memcpy(&p->gemm, &found, sizeof found);
    found = function_of(library, "cublasDestroy_v2");
    memcpy(&p->destroy, &found, sizeof found);
    return create(&p->handle) == 0;
}

static void open_matrices(bench_product *p) {
    bench_driver(bench_gpu.cuda->cuStreamCreateWithPriority(&p->stream, CU_STREAM_NON_BLOCKING, 0),
                 "making a stream");
    bench_driver(bench_gpu.cuda->cuEventCreate(&p->over, CU_EVENT_DISABLE_TIMING), "making an event");
    CUdeviceptr *const matrices[] = {&p->a, &p->b, &p->c};
    for (size_t i = 0; i < 3; i++)
        bench_driver(bench_gpu.cuda->cuMemAlloc_v2(matrices[i], MATRIX_BYTES), "allocating a matrix");
    fill_matrix(p->a, 1);
    fill_matrix(p->b, 2);
    bench_require(p->set_stream(p->handle, p->stream) == 0, "cuBLAS refuses a stream");
}

void bench_product_close(bench_product *p) {
    (void)p->destroy(p->handle);
    (void)bench_gpu.cuda->cuMemFree_v2(p->a);
    (void)bench_gpu.cuda->cuMemFree_v2(p->b);
    (void)bench_gpu.cuda->cuMemFree_v2(p->c);
    (void)bench_gpu.cuda->cuEventDestroy_v2(p->over);
    (void)bench_gpu.cuda->cuStreamDestroy_v2(p->stream);
}

void bench_product_start(const bench_product *p) {
    const float one = 1, zero = 0;
    for (uint32_t i = 0; i < BENCH_PRODUCTS; i++)
        bench_require(p->gemm(p->handle, AS_IT_IS, AS_IT_IS, EDGE, EDGE, EDGE, &one,
                              (const void *)(uintptr_t)p->a, BF16, EDGE, (const void *)(uintptr_t)p->b, BF16,
                              EDGE, &zero, (void *)(uintptr_t)p->c, BF16, EDGE, IN_F32, ITS_CHOICE) == 0,
                      "cuBLAS refuses the product");
    bench_driver(bench_gpu.cuda->cuEventRecord(p->over, p->stream), "recording");
}

bool bench_product_runs(const bench_product *p) {
    const CUresult result = bench_gpu.cuda->cuEventQuery(p->over);
    if (result != CUDA_ERROR_NOT_READY)
        bench_driver(result, "multiplying");
    return result == CUDA_ERROR_NOT_READY;
}

double bench_product_ns(const bench_product *p) {
    const uint64_t begun = bench_now_ns();
    bench_product_start(p);
    while (bench_product_runs(p))
        ;
    return (double)(bench_now_ns() - begun);
}

bool bench_product_open(bench_report *report, bench_product *p) {
    void *library = load_cublas();
    if (!library || !start_cublas(p, library)) {
        bench_note(report, library ? "Nothing beside a product of matrices: cuBLAS does not start."
                                   : "Nothing beside a product of matrices: there is no cuBLAS.");
        return false;
    }
    open_matrices(p);
    (void)bench_product_ns(p); /* loads its kernels, and raises the clock */
    return true;
}
