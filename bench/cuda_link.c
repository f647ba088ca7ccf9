/*
 * The link between a device and pinned memory of the host, in long runs: by the kernel, as a stage gathers and scatters,
 * by single copies of the driver, and by its batched copies, in either signature. It decides from what length on a stage
 * should leave runs to the driver (cuda/long_runs.h). Each is compared with one copy of all bytes, in turns; and then
 * runs while a product of matrices occupies the device.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "cuda_product.h"

#define SHORTEST_RUN (16ull << 10)
#define LONGEST_RUN (4ull << 20)
#define CELLS (ROWS * HEADS) /* in a run: a block of TOKENS_FIRST is one */
#define BESIDE_BYTES (16ull << 20)

/* Runs in one direction: the blocks of a cache, scattered on the device, and in order on the host. */
typedef struct direction {
    const char *title;
    bench_form from, to;
} direction;

static const direction directions[] = {
    {"Runs from the device to pinned memory of the host", TOKENS_FIRST, ON_HOST},
    {"Runs from pinned memory of the host to the device", ON_HOST, TOKENS_FIRST},
};

/* What is moved, and how. */
typedef struct work {
    const direction *along;
    bench_shape shape;
    bench_runs runs;
} work;

typedef struct link_way {
    const char *name;
    CUresult (*start)(const struct link_way *way, const work *w); /* NULL: by a kernel */
    void *call;
    size_t cap; /* of the kernel: an index into bench_caps */
} link_way;

static CUresult start_singles(const link_way *way, const work *w) {
    CUresult result = 0;
    (void)way;
    for (size_t i = 0; i < w->runs.count && !result; i++)
        result =
            bench_gpu.cuda->cuMemcpyAsync(w->runs.to[i], w->runs.from[i], w->runs.bytes[i], bench_gpu.stream);
    return result;
}

static CUresult start_batch(const link_way *way, const work *w) {
    return bench_runs_batched(way->call, false, &w->runs);
}

static CUresult start_batch_2(const link_way *way, const work *w) {
    return bench_runs_batched(way->call, true, &w->runs);
}

enum { KERNEL_4, KERNEL_8, SINGLES, BATCH, BATCH_2, WAYS };

static void find_ways(link_way out[WAYS]) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    out[KERNEL_4] = (link_way){.name = "4 blocks", .cap = 0};
    out[KERNEL_8] = (link_way){.name = "8 blocks", .cap = 1};
    out[SINGLES] = (link_way){.name = "singly", .start = start_singles};
    out[BATCH] = (link_way){.name = "batch", .start = start_batch};
    out[BATCH_2] = (link_way){.name = "batch, CUDA 13", .start = start_batch_2};
    out[BATCH].call = library ? dlsym(library, "cuMemcpyBatchAsync") : NULL;
    out[BATCH_2].call = library ? dlsym(library, "cuMemcpyBatchAsync_v2") : NULL;
}

static bool is_there(const link_way *way) {
    return way->start ? way->call || way->start == start_singles : bench_gpu.copiers[way->cap] != NULL;
}

static work work_of(const direction *along, uint64_t run, uint64_t bytes) {
    work made = {.along = along, .shape = bench_shape_of(run / CELLS, kvf_max_u64(bytes, run))};
    const bench_shape *s = &made.shape;
    made.runs = bench_runs_of(s->blocks);
    for (uint32_t i = 0; i < s->blocks; i++) {
        const uint32_t token = i * (uint32_t)ROWS;
        made.runs.from[i] = bench_gpu.memory[along->from] + bench_place_of(s, along->from, token, 0);
        made.runs.to[i] = bench_gpu.memory[along->to] + bench_place_of(s, along->to, token, 0);
        made.runs.bytes[i] = kvf_min_u64(ROWS, s->tokens - token) * HEADS * s->run;
    }
    return made;
}

static void drop(work *w) {
    bench_runs_free(&w->runs);
    free(w->shape.ids);
}

/* Moves all runs once. `host_ns` receives the host's time until all are on the stream; 0 for a kernel. Below 0: the
 * driver refuses. */
static double move_ns(const link_way *way, const work *w, double *host_ns) {
    *host_ns = 0;
    if (!way->start)
        return bench_move_ns(bench_gpu.copiers[way->cap], &w->shape, w->along->from, w->along->to);
    const uint64_t begun = bench_now_ns();
    if (way->start(way, w))
        return -1;
    *host_ns = (double)(bench_now_ns() - begun);
    bench_stream_wait();
    return (double)(bench_now_ns() - begun);
}

/* ---- alone ------------------------------------------------------------------------------------------- */

typedef struct figures {
    double ratio, host_ns; /* ratio 0: not measured; the host's time is for one run */
} figures;

static figures measure(const link_way *way, const work *w, double *link) {
    double ratios[ROUNDS_MAX], hosts[ROUNDS_MAX], copies[ROUNDS_MAX];
    bench_cells_control(&w->shape, w->along->to);
    for (uint32_t round = 0; round < bench_gpu.rounds; round++) {
        copies[round] = bench_copy_ns(&w->shape, w->along->from, w->along->to);
        const double taken = move_ns(way, w, &hosts[round]);
        if (taken < 0)
            return (figures){0};
        ratios[round] = copies[round] / taken;
    }
    bench_gpu.spoiled = bench_gpu.spoiled || bench_cells_wrong(&w->shape, w->along->to) > 0;
    *link = (double)bench_shape_bytes(&w->shape) / bench_spread_of(copies, bench_gpu.rounds).median;
    return (figures){.ratio = bench_spread_of(ratios, bench_gpu.rounds).median,
                     .host_ns = bench_spread_of(hosts, bench_gpu.rounds).median / (double)w->runs.count};
}

static void fill(const work *w) {
    if (w->along->from == ON_HOST)
        bench_cells_write(&w->shape, ON_HOST, (unsigned char *)(uintptr_t)bench_gpu.memory[ON_HOST]);
    else
        bench_cells_fill(&w->shape, w->along->from);
}

static void number_or_dash(bench_report *report, int digits, double value) {
    if (value > 0)
        bench_number(report, digits, value);
    else
        bench_text(report, "-");
}

static void add_row(bench_report *report, const link_way ways[WAYS], const direction *along, uint64_t run) {
    work w = work_of(along, run, bench_gpu.bytes);
    figures found[WAYS];
    double link = 0;
    fill(&w);
    for (int i = 0; i < WAYS; i++)
        found[i] = is_there(&ways[i]) ? measure(&ways[i], &w, &link) : (figures){0};
    bench_text(report, bench_bytes(run));
    bench_number(report, 0, (double)w.runs.count);
    bench_number(report, 1, link);
    for (int i = 0; i < WAYS; i++)
        number_or_dash(report, 3, found[i].ratio);
    for (int i = SINGLES; i < WAYS; i++)
        number_or_dash(report, 0, found[i].host_ns);
    drop(&w);
}

/* ---- beside a product -------------------------------------------------------------------------------- */

static void add_row_beside(bench_report *report, const bench_product *p, const link_way *way, const work *w) {
    double slower[ROUNDS_MAX], rates[ROUNDS_MAX], host_ns;
    for (uint32_t round = 0; round < bench_gpu.rounds; round++) {
        const double alone = bench_product_ns(p);
        uint64_t moved = 0, ended = 0;
        const uint64_t begun = bench_now_ns();
        bench_product_start(p);
        while (bench_product_runs(p)) {
            bench_require(move_ns(way, w, &host_ns) > 0,
                          "the driver refuses a copy that it has taken before");
            moved += bench_shape_bytes(&w->shape);
            ended = bench_now_ns();
        }
        slower[round] = ((double)(bench_now_ns() - begun) / alone - 1) * 100;
        rates[round] = moved ? (double)moved / (double)(ended - begun) : 0;
    }
    bench_text(report, bench_bytes(w->shape.run * CELLS));
    bench_text(report, w->along->to == ON_HOST ? "to the host" : "from the host");
    bench_text(report, way->name);
    bench_number(report, 1, bench_spread_of(rates, bench_gpu.rounds).median);
    bench_number(report, 1, bench_spread_of(slower, bench_gpu.rounds).median);
}

static void measure_beside(bench_report *report, const link_way ways[WAYS], const bench_product *p) {
    bench_table(report, "Runs between device and host, 16 MiB at once, while a product of matrices runs",
                (const char *[]){"run", "direction", "by", "GB/s", "slowdown of the product %", NULL});
    for (uint64_t run = 64ull << 10; run <= 1ull << 20; run *= 4)
        for (size_t d = 0; d < sizeof directions / sizeof *directions; d++) {
            work w = work_of(&directions[d], run, kvf_min_u64(BESIDE_BYTES, bench_gpu.bytes));
            double host_ns;
            fill(&w);
            for (int i = 0; i < WAYS; i++)
                if (is_there(&ways[i]) && move_ns(&ways[i], &w, &host_ns) > 0)
                    add_row_beside(report, p, &ways[i], &w);
            drop(&w);
        }
}

void bench_link(bench_report *report) {
    link_way ways[WAYS];
    bench_product p;
    find_ways(ways);
    for (size_t d = 0; d < sizeof directions / sizeof *directions; d++) {
        bench_table(report, directions[d].title,
                    (const char *[]){"run", "runs", "link GB/s", "4 blocks", "8 blocks", "singly", "batch",
                                     "batch, CUDA 13", "host ns singly", "host ns batch", "host ns CUDA 13",
                                     NULL});
        for (uint64_t run = SHORTEST_RUN; run <= LONGEST_RUN; run *= 2)
            add_row(report, ways, &directions[d], run);
    }
    bench_note(report,
               "\"link\": one copy of all bytes; the next five columns are shares of it. \"blocks\" of "
               "threads: our kernel, in cells of a 128th of a run. \"singly\", \"batch\": "
               "cuMemcpyAsync(), cuMemcpyBatchAsync(); the host's time is for one run.");
    if (bench_product_open(report, &p)) {
        measure_beside(report, ways, &p);
        bench_product_close(&p);
    }
}
