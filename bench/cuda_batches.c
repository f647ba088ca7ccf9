/*
 * The driver's copies of many places in one call: the gather of the copy engine, given run by run, or as one box of
 * rows for each head of a block.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_bench.h"

#define RUNS_MAX 8192u /* a run took 4 us of the host's time where it was measured first */

/* ---- as the driver declares it from CUDA 12.8 on; later versions have others beside it --------------- */

enum { IN_ORDER_OF_STREAM = 1, AN_ADDRESS = 1 };

typedef struct batch_attributes {
    int source_order;
    CUmemLocation from_where, to_where;
    unsigned flags;
} batch_attributes;
typedef CUresult (*copy_runs_call)(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count,
                                   batch_attributes *attributes, size_t *attribute_begins,
                                   size_t attribute_count, size_t *failed, CUstream stream);
/* From CUDA 13 on. */
typedef CUresult (*copy_runs_call_2)(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count,
                                     batch_attributes *attributes, size_t *attribute_begins,
                                     size_t attribute_count, CUstream stream);

typedef struct batch_side {
    int kind;
    CUdeviceptr address;
    size_t row_step, layer_rows; /* 0: nothing between two of them */
    CUmemLocation where;
} batch_side;

typedef struct batch_box {
    batch_side from, to;
    size_t row_bytes, rows, layers;
    int source_order;
    unsigned flags;
} batch_box;
_Static_assert(sizeof(batch_attributes) == 24 && sizeof(batch_side) == 40 && sizeof(batch_box) == 112,
               "the sizes of the driver's structs");
typedef CUresult (*copy_boxes_call)(size_t count, batch_box *boxes, size_t *failed, unsigned long long flags,
                                    CUstream stream);

/* ---- lists for the driver ---------------------------------------------------------------------------- */

typedef struct batch {
    size_t count;
    bench_runs runs;
    batch_box *boxes;
} batch;

bench_runs bench_runs_of(size_t count) {
    return (bench_runs){.count = count,
                        .from = bench_alloc(count, sizeof(CUdeviceptr)),
                        .to = bench_alloc(count, sizeof(CUdeviceptr)),
                        .bytes = bench_alloc(count, sizeof(size_t))};
}

void bench_runs_free(bench_runs *runs) {
    free(runs->from);
    free(runs->to);
    free(runs->bytes);
}

static batch runs_of(const bench_shape *s) {
    batch made = {.count = (size_t)s->tokens * HEADS};
    made.runs = bench_runs_of(made.count);
    for (size_t i = 0; i < made.count; i++) {
        const uint32_t token = (uint32_t)(i / HEADS), head = (uint32_t)(i % HEADS);
        made.runs.from[i] = bench_gpu.memory[HEADS_FIRST] + bench_place_of(s, HEADS_FIRST, token, head);
        made.runs.to[i] = bench_gpu.memory[PACKED] + bench_place_of(s, PACKED, token, head);
        made.runs.bytes[i] = s->run;
    }
    return made;
}

static batch boxes_of(const bench_shape *s) {
    batch made = {.count = (size_t)s->blocks * HEADS};
    made.boxes = bench_alloc(made.count, sizeof *made.boxes);
    for (size_t i = 0; i < made.count; i++) {
        const uint32_t token = (uint32_t)(i / HEADS * ROWS), head = (uint32_t)(i % HEADS);
        made.boxes[i] = (batch_box){
            .from = {.kind = AN_ADDRESS,
                     .address = bench_gpu.memory[HEADS_FIRST] + bench_place_of(s, HEADS_FIRST, token, head),
                     .row_step = s->run},
            .to = {.kind = AN_ADDRESS,
                   .address = bench_gpu.memory[PACKED] + bench_place_of(s, PACKED, token, head),
                   .row_step = HEADS * s->run},
            .row_bytes = s->run,
            .rows = kvf_min_u64(ROWS, s->tokens - token),
            .layers = 1,
            .source_order = IN_ORDER_OF_STREAM};
    }
    return made;
}

static void drop(batch *of) {
    bench_runs_free(&of->runs);
    free(of->boxes);
}

/* ---- copying ----------------------------------------------------------------------------------------- */

typedef struct batch_way {
    const char *title, *call, *column;
    batch (*list)(const bench_shape *s);
    CUresult (*copy)(void *call, const batch *of);
} batch_way;

CUresult bench_runs_batched(void *call, bool second, const bench_runs *runs) {
    batch_attributes attributes = {.source_order = IN_ORDER_OF_STREAM};
    size_t begin = 0, failed = 0;
    copy_runs_call copy;
    copy_runs_call_2 copy_2;
    memcpy(&copy, &call, sizeof copy);
    memcpy(&copy_2, &call, sizeof copy_2);
    return second ? copy_2(runs->to, runs->from, runs->bytes, runs->count, &attributes, &begin, 1,
                           bench_gpu.stream)
                  : copy(runs->to, runs->from, runs->bytes, runs->count, &attributes, &begin, 1, &failed,
                         bench_gpu.stream);
}

static CUresult copy_runs(void *call, const batch *of) {
    return bench_runs_batched(call, false, &of->runs);
}

static CUresult copy_boxes(void *call, const batch *of) {
    size_t failed = 0;
    copy_boxes_call copy;
    memcpy(&copy, &call, sizeof copy);
    return copy(of->count, of->boxes, &failed, 0, bench_gpu.stream);
}

static const batch_way ways[] = {
    {"Gather within the device by the driver's batched copy, a run each", "cuMemcpyBatchAsync", "runs",
     runs_of, copy_runs},
    {"Gather within the device by the driver's batched 3D copy, the rows of a head each",
     "cuMemcpy3DBatchAsync", "boxes", boxes_of, copy_boxes},
};

/* A driver may have the call and refuse it. */
static bool is_taken(bench_report *report, const batch_way *way, CUresult result) {
    const kvf_status status = kvf_cuda_status(0, result, way->call);
    if (status)
        bench_note(report, kvf_error_detail());
    return !status;
}

/* False: the driver has refused it, as a note says. */
static bool add_row(bench_report *report, const batch_way *way, void *call, const bench_shape *s,
                    const batch *of) {
    double ratios[ROUNDS_MAX], submits[ROUNDS_MAX];
    bench_cells_fill(s, HEADS_FIRST);
    bench_cells_control(s, PACKED);
    for (uint32_t round = 0; round < bench_gpu.rounds; round++) {
        const double whole = bench_copy_ns(s, HEADS_FIRST, TOKENS_FIRST);
        const uint64_t begun = bench_now_ns();
        if (!is_taken(report, way, way->copy(call, of)))
            return false;
        submits[round] = (double)(bench_now_ns() - begun);
        bench_stream_wait();
        ratios[round] = whole / (double)(bench_now_ns() - begun);
    }
    bench_gpu.spoiled = bench_gpu.spoiled || bench_cells_wrong(s, PACKED) > 0;
    const double submitting = bench_spread_of(submits, bench_gpu.rounds).median;
    bench_text(report, bench_bytes(s->run));
    bench_number(report, 0, (double)of->count);
    bench_number(report, 4, bench_spread_of(ratios, bench_gpu.rounds).median);
    bench_number(report, 1, submitting / (double)of->count);
    bench_number(report, 1, submitting / ((double)s->tokens * HEADS));
    return true;
}

static void add_table(bench_report *report, const batch_way *way, void *call) {
    bool taken = true;
    bench_table(
        report, way->title,
        (const char *[]){"run", way->column, "share of a copy", "host ns of each", "host ns a run", NULL});
    for (uint64_t run = SHORTEST; taken && run <= LONGEST; run *= 2) {
        bench_shape s = bench_shape_of(run, kvf_min_u64(bench_gpu.bytes, run * RUNS_MAX));
        batch of = way->list(&s);
        taken = add_row(report, way, call, &s, &of);
        drop(&of);
        free(s.ids);
    }
}

void bench_batches(bench_report *report) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        void *call = library ? dlsym(library, ways[i].call) : NULL;
        char words[96];
        (void)snprintf(words, sizeof words, "This driver has no %s().", ways[i].call);
        if (call)
            add_table(report, &ways[i], call);
        else
            bench_note(report, words);
    }
}
