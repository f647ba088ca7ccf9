/*
 * How much a product of matrices is slowed down by the copy engine that gathers beside it on a stream of its own: as
 * fast as it can, with several fixed numbers of blocks of threads and with as many as cuda/grid.h gives by default; and
 * by default as fast as a link of 400 Gbit/s takes the bytes. The product is cuBLAS's, which is loaded if it is there.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_bench.h"

#define EDGE 8192u
#define MATRIX_BYTES ((uint64_t)EDGE * EDGE * sizeof(uint16_t))
#define CHUNK_BYTES MEGABYTE /* of a matrix that is filled; fits into `seen` */
#define PRODUCTS 20u         /* measured together */
#define LINK_BYTES_PER_NS 50.0
#define FAST_PARTS 4u   /* jobs that last much longer than the host needs to start the next one */
#define PACED_PARTS 16u /* a link takes small pieces */
#define JOBS 2u         /* while one runs, the next is ready */

/* ---- the product ------------------------------------------------------------------------------------- */

/* cuBLAS's own values. */
enum { AS_IT_IS = 0, BF16 = 14, IN_F32 = 68, ITS_CHOICE = -1 };

typedef int (*gemm_call)(void *handle, int a_turned, int b_turned, int m, int n, int k, const void *alpha,
                         const void *a, int a_type, int a_step, const void *b, int b_type, int b_step,
                         const void *beta, void *c, int c_type, int c_step, int compute, int algorithm);

typedef struct product {
    void *handle; /* of cuBLAS */
    gemm_call gemm;
    int (*set_stream)(void *handle, CUstream stream);
    int (*destroy)(void *handle);
    CUstream stream;
    CUevent over;
    CUdeviceptr a, b, c;
} product;

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
static bool start_cublas(product *p, void *library) {
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

static void open_product(product *p) {
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

static void close_product(product *p) {
    (void)p->destroy(p->handle);
    (void)bench_gpu.cuda->cuMemFree_v2(p->a);
    (void)bench_gpu.cuda->cuMemFree_v2(p->b);
    (void)bench_gpu.cuda->cuMemFree_v2(p->c);
    (void)bench_gpu.cuda->cuEventDestroy_v2(p->over);
    (void)bench_gpu.cuda->cuStreamDestroy_v2(p->stream);
}

static void start_products(const product *p) {
    const float one = 1, zero = 0;
    for (uint32_t i = 0; i < PRODUCTS; i++)
        bench_require(p->gemm(p->handle, AS_IT_IS, AS_IT_IS, EDGE, EDGE, EDGE, &one,
                              (const void *)(uintptr_t)p->a, BF16, EDGE, (const void *)(uintptr_t)p->b, BF16,
                              EDGE, &zero, (void *)(uintptr_t)p->c, BF16, EDGE, IN_F32, ITS_CHOICE) == 0,
                      "cuBLAS refuses the product");
    bench_driver(bench_gpu.cuda->cuEventRecord(p->over, p->stream), "recording");
}

static bool is_running(const product *p) {
    const CUresult result = bench_gpu.cuda->cuEventQuery(p->over);
    if (result != CUDA_NOT_READY)
        bench_driver(result, "multiplying");
    return result == CUDA_NOT_READY;
}

/* ---- the copy engine beside it ------------------------------------------------------------------------- */

/* Gathers a cache again and again, in jobs of some of its blocks. */
typedef struct load {
    const char *blocks; /* of threads, as shown */
    kvf_copier *copier;
    const bench_shape *shape;
    kvf_device_table table;
    uint32_t parts; /* a cache is as many jobs */
    bool paced;
    uint64_t due_ns; /* a paced job starts no earlier */
    kvf_copy_job *jobs[JOBS];
    uint64_t bytes[JOBS]; /* of each job */
    uint64_t started, ended, moved_bytes;
    uint64_t first_ended_ns, last_ended_ns;
} load;

/* A part has whole blocks. */
static uint32_t first_block(const load *l, uint64_t part) {
    return (uint32_t)(part * l->shape->blocks / l->parts);
}

static void start_job(load *l) {
    const uint64_t part = l->started % l->parts;
    const uint32_t block = first_block(l, part), token = block * (uint32_t)ROWS;
    const uint32_t end = (uint32_t)kvf_min_u64(first_block(l, part + 1) * (uint64_t)ROWS, l->shape->tokens);
    kvf_box pages = bench_pages_of(l->shape, HEADS_FIRST, bench_gpu.memory[HEADS_FIRST]);
    const kvf_device_side from = {
        .pages = &pages, .table = l->table.address, .table_on_host = l->table.on_host};
    const uint64_t token_bytes = HEADS * l->shape->run;
    const kvf_device_side to = {.packed = bench_gpu.memory[PACKED] + token * token_bytes};
    kvf_copy_job **job = &l->jobs[l->started % JOBS];
    pages.blocks += block;
    pages.rows = end - token;
    bench_must(kvf_copier_begin(l->copier, job));
    bench_must(kvf_copy_job_add(*job, &from, &to, end - token, HEADS, l->shape->run));
    bench_must(kvf_copy_job_start(*job, NULL));
    l->bytes[l->started++ % JOBS] = (end - token) * token_bytes;
}

/* Whether to start a job now. A paced one is then due again after its time on the link, counted from when it was due:
 * after that it may catch up, but by one job only. */
static bool comes_due(load *l) {
    const uint64_t now = bench_now_ns();
    if (!l->paced)
        return true;
    if (now < l->due_ns)
        return false;
    const double job_bytes = (double)bench_shape_bytes(l->shape) / l->parts;
    l->due_ns = kvf_max_u64(l->due_ns + (uint64_t)(job_bytes / LINK_BYTES_PER_NS), now);
    return true;
}

static void poll_oldest(load *l) {
    const kvf_status status = kvf_copy_job_poll(l->jobs[l->ended % JOBS]);
    if (status == KVF_IN_PROGRESS)
        return;
    bench_must(status);
    l->last_ended_ns = bench_now_ns();
    if (l->ended == 0)
        l->first_ended_ns = l->last_ended_ns;
    else
        l->moved_bytes += l->bytes[l->ended % JOBS];
    l->ended++;
}

/* What the host does while the product runs. */
static void keep_busy(load *l) {
    while (l->started - l->ended < JOBS && comes_due(l))
        start_job(l);
    if (l->started > l->ended)
        poll_oldest(l);
}

/* ---- both --------------------------------------------------------------------------------------------- */

static double alone_ns(const product *p) {
    const uint64_t begun = bench_now_ns();
    start_products(p);
    while (is_running(p))
        ;
    return (double)(bench_now_ns() - begun);
}

/* `copied` receives the rate of the jobs that ended while the product ran, from the end of the one before; 0: none. The
 * cache is gathered at least once, as far as needed without the product, so that it can be checked. */
static double beside_ns(const product *p, load *l, double *copied) {
    l->started = l->ended = l->moved_bytes = l->due_ns = 0;
    while (l->ended == 0)
        keep_busy(l);
    const uint64_t begun = bench_now_ns();
    start_products(p);
    while (is_running(p))
        keep_busy(l);
    const double taken = (double)(bench_now_ns() - begun);
    *copied = l->moved_bytes ? (double)l->moved_bytes / (double)(l->last_ended_ns - l->first_ended_ns) : 0;
    while (l->started < l->parts)
        keep_busy(l);
    while (l->started > l->ended)
        poll_oldest(l);
    return taken;
}

static void add_row(bench_report *report, const product *p, load *l) {
    double alone[ROUNDS_MAX], beside[ROUNDS_MAX], ratios[ROUNDS_MAX], copied[ROUNDS_MAX];
    const uint32_t rounds = bench_gpu.rounds;
    bench_must(kvf_copier_put_table(l->copier, l->shape->ids, l->shape->blocks, &l->table));
    bench_cells_control(l->shape, PACKED);
    for (uint32_t round = 0; round < rounds; round++) {
        alone[round] = alone_ns(p) / PRODUCTS;
        beside[round] = beside_ns(p, l, &copied[round]) / PRODUCTS;
        ratios[round] = beside[round] / alone[round];
    }
    bench_gpu.spoiled = bench_gpu.spoiled || bench_cells_wrong(l->shape, PACKED) > 0;
    kvf_copier_drop_table(l->copier, &l->table);
    bench_text(report, bench_bytes(l->shape->run));
    bench_text(report, l->blocks);
    bench_number(report, 3, bench_spread_of(alone, rounds).median / 1e6);
    bench_number(report, 3, bench_spread_of(beside, rounds).median / 1e6);
    bench_number(report, 1, (bench_spread_of(ratios, rounds).median - 1) * 100);
    bench_number(report, 1, bench_spread_of(copied, rounds).median);
}

static uint32_t parts_of(const bench_shape *s, uint32_t wanted) {
    return wanted < s->blocks ? wanted : s->blocks;
}

static void measure(bench_report *report, const product *p, uint64_t run) {
    static const char *const names[BENCH_CAPS] = {"4", "8", "16", "32", "all SMs"};
    bench_shape s = bench_shape_of(run, bench_gpu.bytes);
    const kvf_copier_options options = {.jobs = JOBS, .boxes = LAYERS};
    load waiting = {.blocks = "default", .shape = &s, .parts = parts_of(&s, FAST_PARTS)},
         paced = {.blocks = "default, paced", .shape = &s, .parts = parts_of(&s, PACED_PARTS), .paced = true};
    bench_cells_fill(&s, HEADS_FIRST);
    for (size_t cap = 0; cap < BENCH_CAPS; cap++) {
        load fast = {.blocks = names[cap],
                     .copier = bench_gpu.copiers[cap],
                     .shape = &s,
                     .parts = parts_of(&s, FAST_PARTS)};
        if (fast.copier)
            add_row(report, p, &fast);
    }
    bench_must(kvf_copier_open(0, &options, &paced.copier));
    waiting.copier = paced.copier;
    add_row(report, p, &waiting);
    add_row(report, p, &paced);
    bench_must(kvf_copier_close(paced.copier));
    free(s.ids);
}

void bench_beside(bench_report *report) {
    product p;
    void *library = load_cublas();
    if (!library || !start_cublas(&p, library)) {
        bench_note(report, library ? "No product beside the copy engine: cuBLAS does not start."
                                   : "No product beside the copy engine: there is no cuBLAS.");
        return;
    }
    open_product(&p);
    (void)alone_ns(&p); /* loads its kernels, and raises the clock */
    bench_table(
        report,
        "A product of two matrices of 8192 x 8192 in bf16, alone and beside a gather within the device",
        (const char *[]){"run", "blocks", "alone ms", "beside ms", "slowdown %", "copied GB/s", NULL});
    measure(report, &p, 256);
    measure(report, &p, 2048);
    bench_note(report, "\"paced\": at 50 GB/s, as a link of 400 Gbit/s takes the bytes.");
    close_product(&p);
}
