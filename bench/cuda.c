/*
 * The speed of a device's copy engine, compared with the driver's copy of the same bytes, in turns in one run: gather,
 * scatter and copy between two orders of pages within the device, gather to the host and scatter from it over the link;
 * by run length, and by the number of blocks of threads. The same gather with the driver's batched copy, run by run.
 * The device's checksums of a cache. And the host's time for submitting.
 *
 * The destination of each case is checked by token and head; before the case it is cleared, and the check must fail.
 * KVF_BENCH_BYTES and KVF_BENCH_ROUNDS set how much is moved at once (256 MiB), and how often (7). Ends with 77, and a
 * message, if there is no device, or this build has no code for any.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/copier.h"
#include "cuda/device_image.h"
#include "cuda/hasher.h"
#include "report.h"

#define HEADS 8ull
#define ROWS 16ull /* tokens in a block */
#define SHORTEST 64u
#define LONGEST 65536u
#define MEGABYTE (1u << 20)
#define LAYERS 32u /* of the request whose submission is measured */
#define LAYER_RUN 256u
#define ROUNDS_MAX 64u
#define SKIPPED 77

static void require(kvf_status status) {
    bench_require(status == KVF_OK, kvf_error_detail());
}

/* ---- a device, and memory in three forms ---------------------------------------------------------- */

typedef enum form { HEADS_FIRST, TOKENS_FIRST, PACKED, ON_HOST, FORMS } form;

/* Blocks of threads that the engine may use; 0 stands for one on each multiprocessor. */
static const uint32_t caps[] = {4, 8, 16, 32, 0};
#define CAPS (sizeof caps / sizeof *caps)

static struct {
    const kvf_cuda *cuda;
    kvf_copier *copiers[CAPS]; /* NULL: the device has fewer multiprocessors */
    CUstream stream;           /* for the driver's copies */
    CUevent over;
    CUdeviceptr memory[FORMS]; /* ON_HOST: pinned memory of the host, under the same address */
    uint64_t room;             /* of each */
    unsigned char *seen;       /* pinned, for the host to check the device's bytes */
    uint64_t bytes;            /* moved at once, roughly */
    uint32_t rounds;
    bool spoiled; /* a case has written wrong bytes */
} bench;

static void driver(CUresult result, const char *doing) {
    require(kvf_cuda_status(bench.cuda, result, doing));
}

static uint64_t setting(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    const uint64_t value = text ? strtoull(text, NULL, 10) : otherwise;
    bench_require(value > 0, "KVF_BENCH_BYTES and KVF_BENCH_ROUNDS are numbers above 0");
    return value;
}

static void *pinned(uint64_t bytes) {
    void *made = NULL;
    driver(bench.cuda->cuMemHostAlloc(&made, bytes, CU_MEMHOST_PORTABLE | CU_MEMHOST_DEVICEMAP), "pinning");
    return made;
}

/* The device stays entered. */
static void open_device(void) {
    require(kvf_cuda_enter(0, &bench.cuda));
    bench.bytes = setting("KVF_BENCH_BYTES", 256ull * MEGABYTE);
    bench.rounds = (uint32_t)kvf_min_u64(setting("KVF_BENCH_ROUNDS", 7), ROUNDS_MAX);
    bench.room = bench.bytes + (uint64_t)ROWS * HEADS * LONGEST;
    const uint32_t all = bench.cuda->devices[0].multiprocessors;
    for (size_t i = 0; i < CAPS; i++) {
        const kvf_copier_options options = {
            .blocks = caps[i] ? caps[i] : all, .jobs = 2, .boxes = LAYERS * 2};
        if (caps[i] <= all)
            require(kvf_copier_open(0, &options, &bench.copiers[i]));
    }
    for (int i = 0; i < ON_HOST; i++)
        driver(bench.cuda->cuMemAlloc_v2(&bench.memory[i], bench.room), "allocating");
    bench.memory[ON_HOST] = (CUdeviceptr)(uintptr_t)pinned(bench.room);
    bench.seen = pinned(bench.room);
    driver(bench.cuda->cuStreamCreateWithPriority(&bench.stream, CU_STREAM_NON_BLOCKING, 0),
           "making a stream");
    driver(bench.cuda->cuEventCreate(&bench.over, CU_EVENT_DISABLE_TIMING), "making an event");
}

static void close_device(void) {
    for (size_t i = 0; i < CAPS; i++)
        require(kvf_copier_close(bench.copiers[i]));
    for (int i = 0; i < ON_HOST; i++)
        (void)bench.cuda->cuMemFree_v2(bench.memory[i]);
    (void)bench.cuda->cuMemFreeHost((void *)(uintptr_t)bench.memory[ON_HOST]);
    (void)bench.cuda->cuMemFreeHost(bench.seen);
    (void)bench.cuda->cuEventDestroy_v2(bench.over);
    (void)bench.cuda->cuStreamDestroy_v2(bench.stream);
    kvf_cuda_leave(bench.cuda);
}

static void wait_for_stream(void) {
    CUresult result;
    driver(bench.cuda->cuEventRecord(bench.over, bench.stream), "recording");
    while ((result = bench.cuda->cuEventQuery(bench.over)) == CUDA_NOT_READY)
        ;
    driver(result, "waiting");
}

/* ---- cells ---------------------------------------------------------------------------------------- */

/* A cache of one layer, with its blocks in random order. */
typedef struct shape {
    uint64_t run; /* bytes of one head of a token */
    uint32_t tokens, blocks;
    uint32_t *ids;
} shape;

static shape shape_of(uint64_t run, uint64_t bytes) {
    shape made = {.run = run, .tokens = (uint32_t)kvf_max_u64(bytes / (HEADS * run), 1)};
    made.blocks = (uint32_t)((made.tokens + ROWS - 1) / ROWS);
    made.ids = bench_shuffled(made.blocks);
    return made;
}

static uint64_t bytes_of(const shape *s) {
    return s->run * HEADS * s->tokens;
}

static uint64_t place_of(const shape *s, form in, uint32_t token, uint32_t head) {
    const uint64_t row = token % ROWS, page = (uint64_t)s->ids[token / ROWS] * ROWS * HEADS;
    const uint64_t cell = in == HEADS_FIRST    ? page + head * ROWS + row
                          : in == TOKENS_FIRST ? page + row * HEADS + head
                                               : (uint64_t)token * HEADS + head;
    return cell * s->run;
}

static uint64_t word_of(uint32_t token, uint32_t head, uint64_t word) {
    return ((uint64_t)token * HEADS + head + 1) * 0x9e3779b97f4a7c15u ^ word * 0xc2b2ae3d27d4eb4fu;
}

/* Writes all cells, or counts the cells that are wrong. */
static uint64_t go_over(const shape *s, form in, unsigned char *memory, bool write) {
    uint64_t wrong = 0;
    for (uint32_t token = 0; token < s->tokens; token++)
        for (uint32_t head = 0; head < HEADS; head++) {
            uint64_t *cell = (uint64_t *)(void *)(memory + place_of(s, in, token, head));
            bool same = true;
            for (uint64_t w = 0; w < s->run / sizeof *cell; w++) {
                if (write)
                    cell[w] = word_of(token, head, w);
                same = same && cell[w] == word_of(token, head, w);
            }
            wrong += !same;
        }
    return wrong;
}

static uint64_t span_of(const shape *s) {
    return (uint64_t)s->blocks * ROWS * HEADS * s->run;
}

static void fill(const shape *s, form in) {
    (void)go_over(s, in, bench.seen, true);
    driver(bench.cuda->cuMemcpyAsync(bench.memory[in], (CUdeviceptr)(uintptr_t)bench.seen, span_of(s),
                                     bench.stream),
           "filling a cache");
    wait_for_stream();
}

static uint64_t wrong_in(const shape *s, form in) {
    driver(bench.cuda->cuMemcpyAsync((CUdeviceptr)(uintptr_t)bench.seen, bench.memory[in], span_of(s),
                                     bench.stream),
           "looking at a cache");
    wait_for_stream();
    return go_over(s, in, bench.seen, false);
}

static void clear(const shape *s, form in) {
    if (in == ON_HOST) {
        memset((void *)(uintptr_t)bench.memory[in], 0, span_of(s));
        return;
    }
    driver(bench.cuda->cuMemsetD8Async(bench.memory[in], 0, span_of(s), bench.stream), "clearing a cache");
    wait_for_stream();
}

/* ---- moving --------------------------------------------------------------------------------------- */

static kvf_box pages_of(const shape *s, form in, CUdeviceptr memory) {
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

static bool has_pages(form in) {
    return in == HEADS_FIRST || in == TOKENS_FIRST;
}

static void finish(kvf_copy_job *job) {
    kvf_status status;
    while ((status = kvf_copy_job_poll(job)) == KVF_IN_PROGRESS)
        ;
    require(status);
}

/* One request, from its table to its last byte. */
static double move_ns(kvf_copier *copier, const shape *s, form from, form to) {
    kvf_device_table table;
    kvf_copy_job *job = NULL;
    const uint64_t begun = bench_now_ns();
    require(kvf_copier_put_table(copier, s->ids, s->blocks, &table));
    require(kvf_copier_begin(copier, &job));
    const kvf_box from_pages = pages_of(s, from, bench.memory[from]),
                  to_pages = pages_of(s, to, bench.memory[to]);
    const kvf_device_side sides[] = {{.pages = has_pages(from) ? &from_pages : NULL,
                                      .packed = bench.memory[from],
                                      .table = table.address,
                                      .table_on_host = s->ids},
                                     {.pages = has_pages(to) ? &to_pages : NULL,
                                      .packed = bench.memory[to],
                                      .table = table.address,
                                      .table_on_host = s->ids}};
    require(kvf_copy_job_add(job, &sides[0], &sides[1], s->tokens, HEADS, s->run));
    require(kvf_copy_job_start(job, NULL));
    finish(job);
    const double taken = (double)(bench_now_ns() - begun);
    kvf_copier_drop_table(copier, &table);
    return taken;
}

/* The driver's copy of as many bytes, between other memory of the same device or host. */
static double copy_ns(const shape *s, form from, form to) {
    const CUdeviceptr seen = (CUdeviceptr)(uintptr_t)bench.seen;
    const CUdeviceptr source = from == ON_HOST ? seen : bench.memory[from];
    const CUdeviceptr target = to == ON_HOST ? seen : bench.memory[to];
    const uint64_t begun = bench_now_ns();
    driver(bench.cuda->cuMemcpyAsync(target, source, bytes_of(s), bench.stream), "copying");
    wait_for_stream();
    return (double)(bench_now_ns() - begun);
}

/* ---- cases ---------------------------------------------------------------------------------------- */

typedef struct move_case {
    const char *title, *name;
    form from, to;
    form copy_from, copy_to; /* for the driver's copy; the bytes that it overwrites are not checked */
} move_case;

/* Each case reads the result of the one before: pages, then the arena, then the host's memory. */
static const move_case cases[] = {
    {"Gather within the device", "gather", HEADS_FIRST, PACKED, HEADS_FIRST, TOKENS_FIRST},
    {"Scatter within the device", "scatter", PACKED, TOKENS_FIRST, HEADS_FIRST, TOKENS_FIRST},
    {"Copy into pages of another order", "copy", HEADS_FIRST, TOKENS_FIRST, HEADS_FIRST, TOKENS_FIRST},
    {"Gather to the host's memory", "to the host", HEADS_FIRST, ON_HOST, HEADS_FIRST, ON_HOST},
    {"Scatter from the host's memory", "from the host", ON_HOST, TOKENS_FIRST, ON_HOST, TOKENS_FIRST},
};
#define CASES (sizeof cases / sizeof *cases)

typedef struct found {
    double copy_gb_per_s, ratio[CAPS]; /* ratio 0: not measured */
} found;

static void measure(const move_case *of, const shape *s, found *out) {
    double copies[ROUNDS_MAX * CAPS], ratios[ROUNDS_MAX];
    size_t made = 0;
    for (size_t cap = 0; cap < CAPS; cap++) {
        out->ratio[cap] = 0;
        if (!bench.copiers[cap])
            continue;
        for (uint32_t round = 0; round < bench.rounds; round++) {
            const double copy = copy_ns(s, of->copy_from, of->copy_to);
            copies[made++] = copy;
            ratios[round] = copy / move_ns(bench.copiers[cap], s, of->from, of->to);
        }
        out->ratio[cap] = bench_spread_of(ratios, bench.rounds).median;
    }
    out->copy_gb_per_s = (double)bytes_of(s) / bench_spread_of(copies, made).median;
}

/* The bytes must be right with each cap. */
static void verify(const move_case *of, const shape *s) {
    for (size_t cap = 0; cap < CAPS; cap++) {
        if (!bench.copiers[cap])
            continue;
        clear(s, of->to);
        bench_require(wrong_in(s, of->to) > 0, "the control: cleared memory is taken for right cells");
        (void)move_ns(bench.copiers[cap], s, of->from, of->to);
        bench.spoiled = bench.spoiled || wrong_in(s, of->to) > 0;
    }
}

static void add_row(bench_report *report, const shape *s, const found *f) {
    bench_text(report, bench_bytes(s->run));
    bench_number(report, 1, f->copy_gb_per_s);
    for (size_t cap = 0; cap < CAPS; cap++) {
        if (f->ratio[cap] > 0)
            bench_number(report, 3, f->ratio[cap]);
        else
            bench_text(report, "-");
    }
}

/* Lengths outside, cases inside, because each case reads the result of the one before. Figures are printed later. */
static void run_cases(bench_report *report) {
    enum { LENGTHS = 11 };
    static found all[CASES][LENGTHS];
    static shape shapes[LENGTHS];
    for (size_t i = 0; i < LENGTHS; i++) {
        shapes[i] = shape_of((uint64_t)SHORTEST << i, bench.bytes);
        fill(&shapes[i], HEADS_FIRST);
        for (size_t c = 0; c < CASES; c++) {
            measure(&cases[c], &shapes[i], &all[c][i]);
            verify(&cases[c], &shapes[i]);
        }
    }
    for (size_t c = 0; c < CASES; c++) {
        bench_table(report, cases[c].title,
                    (const char *[]){"run", "copy GB/s", "4 blocks", "8 blocks", "16 blocks", "32 blocks",
                                     "all SMs", NULL});
        for (size_t i = 0; i < LENGTHS; i++)
            add_row(report, &shapes[i], &all[c][i]);
    }
    bench_note(
        report,
        "Below \"blocks\" of threads: how fast it is as a share of the driver's copy of the same bytes.");
    for (size_t i = 0; i < LENGTHS; i++)
        free(shapes[i].ids);
}

/* ---- the driver's batched copy ---------------------------------------------------------------------- */

#define BATCH_RUNS 65536u

/* As the driver declares it from CUDA 12.8 on; later versions have others beside it. */
typedef struct batch_attributes {
    int source_order; /* 1: the stream's order */
    int from_where[2], to_where[2];
    unsigned flags;
} batch_attributes;
typedef CUresult (*batch_copy)(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count,
                               batch_attributes *attributes, size_t *attribute_begins, size_t attribute_count,
                               size_t *failed, CUstream stream);

/* The runs of a gather, as a list for the driver. */
typedef struct run_list {
    CUdeviceptr *from, *to;
    size_t *bytes, count;
} run_list;

static run_list runs_of(const shape *s) {
    run_list list = {.count = (size_t)s->tokens * HEADS};
    list.from = bench_alloc(list.count, sizeof *list.from);
    list.to = bench_alloc(list.count, sizeof *list.to);
    list.bytes = bench_alloc(list.count, sizeof *list.bytes);
    for (size_t i = 0; i < list.count; i++) {
        const uint32_t token = (uint32_t)(i / HEADS), head = (uint32_t)(i % HEADS);
        list.from[i] = bench.memory[HEADS_FIRST] + place_of(s, HEADS_FIRST, token, head);
        list.to[i] = bench.memory[PACKED] + place_of(s, PACKED, token, head);
        list.bytes[i] = s->run;
    }
    return list;
}

static void free_runs(run_list *list) {
    free(list->from);
    free(list->to);
    free(list->bytes);
}

/* Time until all bytes are there; `submitting` receives the duration of the call. */
static double batch_ns(batch_copy copy, const run_list *list, double *submitting) {
    batch_attributes attributes = {.source_order = 1};
    size_t begin = 0, failed = 0;
    const uint64_t begun = bench_now_ns();
    driver(
        copy(list->to, list->from, list->bytes, list->count, &attributes, &begin, 1, &failed, bench.stream),
        "copying a batch");
    *submitting = (double)(bench_now_ns() - begun);
    wait_for_stream();
    return (double)(bench_now_ns() - begun);
}

static void batch_row(bench_report *report, batch_copy copy, const shape *s) {
    double ratios[ROUNDS_MAX], submits[ROUNDS_MAX];
    run_list list = runs_of(s);
    fill(s, HEADS_FIRST);
    clear(s, PACKED);
    bench_require(wrong_in(s, PACKED) > 0, "the control: cleared memory is taken for right cells");
    for (uint32_t round = 0; round < bench.rounds; round++) {
        const double whole = copy_ns(s, HEADS_FIRST, TOKENS_FIRST);
        ratios[round] = whole / batch_ns(copy, &list, &submits[round]);
    }
    bench.spoiled = bench.spoiled || wrong_in(s, PACKED) > 0;
    bench_text(report, bench_bytes(s->run));
    bench_number(report, 0, (double)list.count);
    bench_number(report, 3, bench_spread_of(ratios, bench.rounds).median);
    bench_number(report, 1, bench_spread_of(submits, bench.rounds).median / (double)list.count);
    free_runs(&list);
}

static void batches(bench_report *report) {
    batch_copy copy = NULL;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL),
         *address = library ? dlsym(library, "cuMemcpyBatchAsync") : NULL;
    memcpy(&copy, &address, sizeof copy);
    if (!copy) {
        bench_note(report, "This driver has no batched copy.");
        return;
    }
    bench_table(report, "Gather within the device by the driver's batched copy, a run each",
                (const char *[]){"run", "runs", "share of a copy", "host ns a run", NULL});
    for (uint64_t run = SHORTEST; run <= LONGEST; run *= 2) {
        shape s = shape_of(run, kvf_min_u64(bench.bytes, run * BATCH_RUNS));
        batch_row(report, copy, &s);
        free(s.ids);
    }
}

/* ---- checksums ------------------------------------------------------------------------------------ */

/* A request of some layers with the same table, one behind the other in the memory of a form. */
typedef struct layers {
    shape one;
    uint32_t count;
} layers;

static layers layers_of(uint64_t run) {
    layers made = {.one = shape_of(run, bench.bytes / LAYERS)};
    made.count = (uint32_t)kvf_min_u64(LAYERS, bench.room / span_of(&made.one));
    return made;
}

static void fill_layers(const layers *l, form in) {
    for (uint32_t i = 0; i < l->count; i++)
        (void)go_over(&l->one, in, bench.seen + i * span_of(&l->one), true);
    driver(bench.cuda->cuMemcpyAsync(bench.memory[in], (CUdeviceptr)(uintptr_t)bench.seen,
                                     l->count * span_of(&l->one), bench.stream),
           "filling caches");
    wait_for_stream();
}

/* Hashes all layers of some tokens, and adds a sum for each. Seeds are those of coordinates, whatever the order. */
static void hash_tokens(kvf_hasher *hasher, const layers *l, form in, uint32_t first, uint32_t count,
                        uint64_t *sums) {
    const uint32_t *ids = l->one.ids + first / ROWS;
    const uint64_t *found_sums;
    kvf_status status;
    kvf_hasher_begin(hasher, ids, (uint32_t)((count + ROWS - 1) / ROWS), count);
    for (uint32_t layer = 0; layer < l->count; layer++) {
        kvf_box pages = pages_of(&l->one, in, bench.memory[in] + layer * span_of(&l->one));
        const kvf_device_sums where = {.step_bytes = sizeof *sums,
                                       .seed = layer * 0x9e3779b97f4a7c15u + first * 0xd6e8feb86659fd93u,
                                       .step_seed = 0xd6e8feb86659fd93u,
                                       .unit_seed = 0xc2b2ae3d27d4eb4fu,
                                       .rows = 1,
                                       .share = {.count = 1, .width = 1}};
        pages.blocks = ids;
        pages.rows = count;
        require(
            kvf_hasher_add(hasher, &pages, KVF_DTYPE_F16, KVF_DTYPE_F16, &where, count, HEADS, l->one.run));
    }
    require(kvf_hasher_start(hasher));
    while ((status = kvf_hasher_poll(hasher, &found_sums)) == KVF_IN_PROGRESS)
        ;
    require(status);
    memcpy(sums + first, found_sums, count * sizeof *sums);
}

static double hash_ns(kvf_hasher *hasher, const layers *l, form in, uint64_t *sums) {
    const uint64_t begun = bench_now_ns();
    for (uint32_t first = 0; first < l->one.tokens; first += KVF_HASHER_SUMS)
        hash_tokens(hasher, l, in, first, (uint32_t)kvf_min_u64(KVF_HASHER_SUMS, l->one.tokens - first),
                    sums);
    return (double)(bench_now_ns() - begun);
}

static uint32_t count_different(const layers *l, const uint64_t *a, const uint64_t *b) {
    uint32_t count = 0;
    for (uint32_t token = 0; token < l->one.tokens; token++)
        count += a[token] != b[token];
    return count;
}

/* Both orders of pages have the same sums; a byte that is spoiled changes those of its token only. */
static void verify_hashes(kvf_hasher *hasher, const layers *l, uint64_t *sums, uint64_t *others) {
    const uint32_t spoiled = l->one.tokens / 2;
    const uint64_t at =
        (l->count - 1) * span_of(&l->one) + place_of(&l->one, TOKENS_FIRST, spoiled, HEADS - 1);
    fill_layers(l, TOKENS_FIRST);
    (void)hash_ns(hasher, l, TOKENS_FIRST, others);
    bench.spoiled = bench.spoiled || count_different(l, sums, others) > 0;
    driver(bench.cuda->cuMemsetD8Async(bench.memory[TOKENS_FIRST] + at, (unsigned char)~bench.seen[at], 1,
                                       bench.stream),
           "spoiling a byte");
    wait_for_stream();
    (void)hash_ns(hasher, l, TOKENS_FIRST, others);
    bench_require(count_different(l, sums, others) == 1 && sums[spoiled] != others[spoiled],
                  "the control: a spoiled byte does not show in the sum of its token");
}

static void hash_row(bench_report *report, kvf_hasher *hasher, uint64_t run) {
    double rates[ROUNDS_MAX], copies[ROUNDS_MAX], ratios[ROUNDS_MAX];
    layers l = layers_of(run);
    uint64_t *sums = bench_alloc(l.one.tokens, sizeof *sums),
             *others = bench_alloc(l.one.tokens, sizeof *others);
    const double bytes = (double)bytes_of(&l.one) * l.count;
    const shape all = {.run = run, .tokens = l.one.tokens * l.count};
    fill_layers(&l, HEADS_FIRST);
    for (uint32_t round = 0; round < bench.rounds; round++) {
        const double copy = copy_ns(&all, HEADS_FIRST, TOKENS_FIRST);
        const double hash = hash_ns(hasher, &l, HEADS_FIRST, sums);
        copies[round] = bytes / copy;
        rates[round] = bytes / hash;
        ratios[round] = copy / hash;
    }
    verify_hashes(hasher, &l, sums, others);
    bench_text(report, bench_bytes(run));
    bench_number(report, 1, bench_spread_of(copies, bench.rounds).median);
    const bench_spread spread = bench_spread_of(rates, bench.rounds);
    bench_number(report, 1, spread.median);
    bench_number(report, 1, spread.low);
    bench_number(report, 1, spread.high);
    bench_number(report, 3, bench_spread_of(ratios, bench.rounds).median);
    free(l.one.ids);
    free(sums);
    free(others);
}

static void checksums(bench_report *report) {
    kvf_hasher *hasher = NULL;
    require(kvf_hasher_open(0, &hasher));
    bench_table(
        report, "Checksums of a cache of up to 32 layers, by its device",
        (const char *[]){"cell", "copy GB/s", "hashed GB/s", "lowest", "highest", "share of a copy", NULL});
    for (uint64_t run = SHORTEST; run <= LONGEST; run *= 4)
        hash_row(report, hasher, run);
    bench_note(report, "A copy reads and writes each byte, and a checksum reads it once.");
    require(kvf_hasher_close(hasher));
}

/* ---- submitting ----------------------------------------------------------------------------------- */

/* The host's time to submit a request of many layers, of one box each. */
static double submit_ns(kvf_copier *copier, const shape *s) {
    kvf_device_table table;
    kvf_copy_job *job = NULL;
    const uint64_t layer = span_of(s), begun = bench_now_ns();
    require(kvf_copier_put_table(copier, s->ids, s->blocks, &table));
    require(kvf_copier_begin(copier, &job));
    for (uint32_t l = 0; l < LAYERS; l++) {
        const kvf_box pages = pages_of(s, HEADS_FIRST, bench.memory[HEADS_FIRST] + l * layer);
        const kvf_device_side from = {.pages = &pages, .table = table.address, .table_on_host = s->ids};
        const kvf_device_side to = {.packed = bench.memory[PACKED] + l * bytes_of(s)};
        require(kvf_copy_job_add(job, &from, &to, s->tokens, HEADS, s->run));
    }
    require(kvf_copy_job_start(job, NULL));
    const double taken = (double)(bench_now_ns() - begun);
    finish(job);
    kvf_copier_drop_table(copier, &table);
    return taken;
}

static void submission(bench_report *report) {
    double taken[ROUNDS_MAX];
    bench_table(report, "Submitting a request of 32 layers, runs of 256 B: the host's time",
                (const char *[]){"tokens", "runs", "us a request", "lowest", "highest", "ns a run", NULL});
    for (uint64_t bytes = kvf_max_u64(bench.bytes / 64, 1); bytes <= bench.bytes; bytes *= 8) {
        shape s = shape_of(LAYER_RUN, bytes / LAYERS);
        for (uint32_t round = 0; round < bench.rounds; round++)
            taken[round] = submit_ns(bench.copiers[0], &s);
        const bench_spread spread = bench_spread_of(taken, bench.rounds);
        const double runs = (double)s.tokens * HEADS * LAYERS;
        bench_number(report, 0, s.tokens);
        bench_number(report, 0, runs);
        bench_number(report, 2, spread.median / 1e3);
        bench_number(report, 2, spread.low / 1e3);
        bench_number(report, 2, spread.high / 1e3);
        bench_number(report, 3, spread.median / runs);
        free(s.ids);
    }
}

int main(int argc, char **argv) {
    const kvf_cuda *cuda;
    if (kvf_cuda_find(&cuda)) {
        (void)printf("skipped: no GPU (%s)\n", kvf_error_detail());
        return SKIPPED;
    }
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return SKIPPED;
    }
    bench_report *report = bench_report_start("cuda", argc, argv);
    open_device();
    char words[160];
    (void)snprintf(words, sizeof words, "%s, %u SMs, a driver for CUDA %u.%u", cuda->devices[0].name,
                   cuda->devices[0].multiprocessors, cuda->version / 1000, cuda->version % 1000 / 10);
    run_cases(report);
    batches(report);
    checksums(report);
    submission(report);
    bench_note(report, words);
    if (bench.spoiled)
        bench_fail(report, "what arrived is wrong");
    close_device();
    return bench_report_end(report);
}
