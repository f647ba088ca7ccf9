#include "cuda_bench.h"

#include <stdlib.h>
#include <string.h>

const uint32_t bench_caps[BENCH_CAPS] = {4, 8, 16, 32, 0};
struct bench_gpu bench_gpu;

/* ---- a device ------------------------------------------------------------------------------------- */

void bench_driver(CUresult result, const char *doing) {
    bench_must(kvf_cuda_status(0, result, doing));
}

static uint64_t setting(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    const uint64_t value = text ? strtoull(text, NULL, 10) : otherwise;
    bench_require(value > 0, "KVF_BENCH_BYTES and KVF_BENCH_ROUNDS are numbers above 0");
    return value;
}

void bench_gpu_settings(void) {
    bench_gpu.bytes = setting("KVF_BENCH_BYTES", 256ull * MEGABYTE);
    bench_gpu.rounds = (uint32_t)kvf_min_u64(setting("KVF_BENCH_ROUNDS", 7), ROUNDS_MAX);
    bench_gpu.room = bench_gpu.bytes + (uint64_t)ROWS * HEADS * LONGEST;
}

static void *pinned(uint64_t bytes) {
    void *made = NULL;
    bench_driver(
        bench_gpu.cuda->cuMemHostAlloc(&made, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
        "pinning");
    return made;
}

void bench_gpu_enter(void) {
    bench_must(kvf_cuda_enter(0, &bench_gpu.cuda));
    bench_gpu.seen = pinned(bench_gpu.room);
    bench_driver(bench_gpu.cuda->cuStreamCreateWithPriority(&bench_gpu.stream, CU_STREAM_NON_BLOCKING, 0),
                 "making a stream");
    bench_driver(bench_gpu.cuda->cuEventCreate(&bench_gpu.over, CU_EVENT_DISABLE_TIMING), "making an event");
}

void bench_gpu_open(void) {
    bench_gpu_enter();
    const uint32_t all = bench_gpu.cuda->devices[0].multiprocessors;
    for (size_t i = 0; i < BENCH_CAPS; i++) {
        const uint32_t blocks = bench_caps[i] ? bench_caps[i] : all; /* whatever waits */
        const kvf_copier_options options = {
            .least_blocks = blocks, .most_blocks = blocks, .jobs = 2, .boxes = LAYERS * 2};
        if (bench_caps[i] <= all)
            bench_must(kvf_copier_open(0, &options, &bench_gpu.copiers[i]));
    }
    for (int i = 0; i < ON_HOST; i++)
        bench_driver(bench_gpu.cuda->cuMemAlloc_v2(&bench_gpu.memory[i], bench_gpu.room), "allocating");
    bench_gpu.memory[ON_HOST] = (CUdeviceptr)(uintptr_t)pinned(bench_gpu.room);
}

void bench_gpu_close(void) {
    for (size_t i = 0; i < BENCH_CAPS; i++)
        bench_must(kvf_copier_close(bench_gpu.copiers[i]));
    for (int i = 0; i < ON_HOST; i++)
        (void)bench_gpu.cuda->cuMemFree_v2(bench_gpu.memory[i]);
    (void)bench_gpu.cuda->cuMemFreeHost((void *)(uintptr_t)bench_gpu.memory[ON_HOST]);
    (void)bench_gpu.cuda->cuMemFreeHost(bench_gpu.seen);
    (void)bench_gpu.cuda->cuEventDestroy_v2(bench_gpu.over);
    (void)bench_gpu.cuda->cuStreamDestroy_v2(bench_gpu.stream);
    kvf_cuda_leave(bench_gpu.cuda);
}

void bench_stream_wait(void) {
    CUresult result;
    bench_driver(bench_gpu.cuda->cuEventRecord(bench_gpu.over, bench_gpu.stream), "recording");
    while ((result = bench_gpu.cuda->cuEventQuery(bench_gpu.over)) == CUDA_ERROR_NOT_READY)
        ;
    bench_driver(result, "waiting");
}

/* ---- cells ---------------------------------------------------------------------------------------- */

bench_shape bench_shape_of(uint64_t run, uint64_t bytes) {
    bench_shape made = {.run = run, .tokens = (uint32_t)kvf_max_u64(bytes / (HEADS * run), 1)};
    made.blocks = (uint32_t)((made.tokens + ROWS - 1) / ROWS);
    made.ids = bench_shuffled(made.blocks);
    return made;
}

uint64_t bench_shape_bytes(const bench_shape *s) {
    return s->run * HEADS * s->tokens;
}

uint64_t bench_shape_span(const bench_shape *s) {
    return (uint64_t)s->blocks * ROWS * HEADS * s->run;
}

uint64_t bench_place_of(const bench_shape *s, bench_form in, uint32_t token, uint32_t head) {
    const uint64_t row = token % ROWS, page = (uint64_t)s->ids[token / ROWS] * ROWS * HEADS;
    const uint64_t cell = in == HEADS_FIRST    ? page + head * ROWS + row
                          : in == TOKENS_FIRST ? page + row * HEADS + head
                                               : (uint64_t)token * HEADS + head;
    return cell * s->run;
}

static uint64_t word_of(uint32_t token, uint32_t head, uint64_t word) {
    return ((uint64_t)token * HEADS + head + 1) * 0x9e3779b97f4a7c15u ^ word * 0xc2b2ae3d27d4eb4fu;
}

void bench_cells_write(const bench_shape *s, bench_form in, unsigned char *memory) {
    for (uint32_t token = 0; token < s->tokens; token++)
        for (uint32_t head = 0; head < HEADS; head++) {
            uint64_t *cell = (uint64_t *)(void *)(memory + bench_place_of(s, in, token, head));
            for (uint64_t w = 0; w < s->run / sizeof *cell; w++)
                cell[w] = word_of(token, head, w);
        }
}

static bool is_right(const uint64_t *cell, uint64_t run, uint32_t token, uint32_t head) {
    for (uint64_t w = 0; w < run / sizeof *cell; w++)
        if (cell[w] != word_of(token, head, w))
            return false;
    return true;
}

void bench_cells_fill(const bench_shape *s, bench_form in) {
    bench_cells_write(s, in, bench_gpu.seen);
    bench_driver(bench_gpu.cuda->cuMemcpyAsync(bench_gpu.memory[in], (CUdeviceptr)(uintptr_t)bench_gpu.seen,
                                               bench_shape_span(s), bench_gpu.stream),
                 "filling a cache");
    bench_stream_wait();
}

void bench_cells_clear(const bench_shape *s, bench_form in) {
    if (in == ON_HOST) {
        memset((void *)(uintptr_t)bench_gpu.memory[in], 0, bench_shape_span(s));
        return;
    }
    bench_driver(
        bench_gpu.cuda->cuMemsetD8Async(bench_gpu.memory[in], 0, bench_shape_span(s), bench_gpu.stream),
        "clearing a cache");
    bench_stream_wait();
}

uint64_t bench_cells_wrong(const bench_shape *s, bench_form in) {
    uint64_t wrong = 0;
    bench_driver(bench_gpu.cuda->cuMemcpyAsync((CUdeviceptr)(uintptr_t)bench_gpu.seen, bench_gpu.memory[in],
                                               bench_shape_span(s), bench_gpu.stream),
                 "looking at a cache");
    bench_stream_wait();
    for (uint32_t token = 0; token < s->tokens; token += CHECKED_EACH)
        for (uint32_t head = 0; head < HEADS; head++) {
            const unsigned char *cell = bench_gpu.seen + bench_place_of(s, in, token, head);
            wrong += !is_right((const uint64_t *)(const void *)cell, s->run, token, head);
        }
    return wrong;
}

void bench_cells_control(const bench_shape *s, bench_form in) {
    bench_cells_clear(s, in);
    bench_require(bench_cells_wrong(s, in) > 0, "the control: cleared memory is taken for right cells");
}

/* ---- moving --------------------------------------------------------------------------------------- */

kvf_box bench_pages_of(const bench_shape *s, bench_form in, CUdeviceptr memory) {
    return (kvf_box){.memory = (unsigned char *)(uintptr_t)memory,
                     .block_stride = ROWS * HEADS * s->run,
                     .row_stride = in == HEADS_FIRST ? s->run : HEADS * s->run,
                     .unit_stride = in == HEADS_FIRST ? ROWS * s->run : s->run,
                     .blocks = s->ids,
                     .kernel_blocks = 1,
                     .block_rows = ROWS,
                     .rows = s->tokens,
                     .units = HEADS,
                     .pieces = 1,
                     .piece_bytes = s->run};
}

static bool has_pages(bench_form in) {
    return in == HEADS_FIRST || in == TOKENS_FIRST;
}

void bench_job_finish(kvf_copy_job *job) {
    kvf_status status;
    while ((status = kvf_copy_job_poll(job)) == KVF_IN_PROGRESS)
        ;
    bench_must(status);
}

double bench_sides_ns(kvf_copier *copier, const bench_shape *s, kvf_device_side from, kvf_device_side to,
                      uint64_t cell_elements) {
    kvf_device_table table;
    kvf_copy_job *job = NULL;
    const uint64_t begun = bench_now_ns();
    bench_must(kvf_copier_put_table(copier, s->ids, s->blocks, &table));
    bench_must(kvf_copier_begin(copier, &job));
    from.table = to.table = table.address;
    from.table_on_host = to.table_on_host = s->ids;
    bench_must(kvf_copy_job_add(job, &from, &to, s->tokens, HEADS, cell_elements));
    bench_must(kvf_copy_job_start(job, NULL));
    bench_job_finish(job);
    const double taken = (double)(bench_now_ns() - begun);
    kvf_copier_drop_table(copier, &table);
    return taken;
}

double bench_move_ns(kvf_copier *copier, const bench_shape *s, bench_form from, bench_form to) {
    const kvf_box from_pages = bench_pages_of(s, from, bench_gpu.memory[from]),
                  to_pages = bench_pages_of(s, to, bench_gpu.memory[to]);
    const kvf_device_side sides[] = {
        {.pages = has_pages(from) ? &from_pages : NULL, .packed = bench_gpu.memory[from]},
        {.pages = has_pages(to) ? &to_pages : NULL, .packed = bench_gpu.memory[to]}};
    return bench_sides_ns(copier, s, sides[0], sides[1], s->run);
}

double bench_copy_ns(const bench_shape *s, bench_form from, bench_form to) {
    const CUdeviceptr seen = (CUdeviceptr)(uintptr_t)bench_gpu.seen;
    const CUdeviceptr source = from == ON_HOST ? seen : bench_gpu.memory[from];
    const CUdeviceptr target = to == ON_HOST ? seen : bench_gpu.memory[to];
    const uint64_t begun = bench_now_ns();
    bench_driver(bench_gpu.cuda->cuMemcpyAsync(target, source, bench_shape_bytes(s), bench_gpu.stream),
                 "copying");
    bench_stream_wait();
    return (double)(bench_now_ns() - begun);
}

void bench_beside_copies(bench_report *report, double bytes, const double *copy_ns, const double *work_ns) {
    double copies[ROUNDS_MAX], rates[ROUNDS_MAX], ratios[ROUNDS_MAX];
    for (uint32_t round = 0; round < bench_gpu.rounds; round++) {
        copies[round] = bytes / copy_ns[round];
        rates[round] = bytes / work_ns[round];
        ratios[round] = copy_ns[round] / work_ns[round];
    }
    bench_number(report, 1, bench_spread_of(copies, bench_gpu.rounds).median);
    const bench_spread spread = bench_spread_of(rates, bench_gpu.rounds);
    bench_number(report, 1, spread.median);
    bench_number(report, 1, spread.low);
    bench_number(report, 1, spread.high);
    bench_number(report, 3, bench_spread_of(ratios, bench_gpu.rounds).median);
}
