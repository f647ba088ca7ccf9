/*
 * The speed of a device's copy engine, in the parts that KVF_BENCH_PARTS names, with commas between (all):
 *
 *   moves       gather, scatter and copy between two orders of pages within the device, gather to the host and scatter
 *               from it over the link; by run length, and by the number of blocks of threads
 *   batches     the same gather by the driver's copies of many places in one call
 *   link        long runs between device and host: by our kernel, and by the driver's copies, singly and in batches;
 *               also while a product of matrices runs
 *   checksums   a device's checksums of a cache
 *   converted   gather within the device into another type of elements
 *   received    received blocks that are permuted in place, and blocks that are copied to the host and back
 *   submitting  the host's time for submitting
 *   beside      how much a product of matrices is slowed down by the copy engine beside it
 *   peers       reading and writing the memory of another process, by the transport "cuda"
 *
 * Rates are compared with the driver's copy of the same bytes, in turns in one run. The destination of each case is
 * checked by token and head; before the case it is cleared, and the check must fail. KVF_BENCH_BYTES and
 * KVF_BENCH_ROUNDS set how much is moved at once (256 MiB), and how often (7). The file of --json is written anew after
 * each part. Ends with 77, and a message, if there is no device, or this build has no code for any.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/device_image.h"
#include "cuda/hasher.h"
#include "cuda_bench.h"

#define LAYER_RUN 256u /* of the request whose submission is measured */
#define SKIPPED 77

/* ---- cases ---------------------------------------------------------------------------------------- */

typedef struct move_case {
    const char *title, *name;
    bench_form from, to;
    bench_form copy_from, copy_to; /* for the driver's copy; the bytes that it overwrites are not checked */
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
    double copy_gb_per_s, ratio[BENCH_CAPS]; /* ratio 0: not measured */
} found;

static void measure(const move_case *of, const bench_shape *s, found *out) {
    double copies[ROUNDS_MAX * BENCH_CAPS], ratios[ROUNDS_MAX];
    size_t made = 0;
    for (size_t cap = 0; cap < BENCH_CAPS; cap++) {
        out->ratio[cap] = 0;
        if (!bench_gpu.copiers[cap])
            continue;
        for (uint32_t round = 0; round < bench_gpu.rounds; round++) {
            const double copy = bench_copy_ns(s, of->copy_from, of->copy_to);
            copies[made++] = copy;
            ratios[round] = copy / bench_move_ns(bench_gpu.copiers[cap], s, of->from, of->to);
        }
        out->ratio[cap] = bench_spread_of(ratios, bench_gpu.rounds).median;
    }
    out->copy_gb_per_s = (double)bench_shape_bytes(s) / bench_spread_of(copies, made).median;
}

/* The bytes must be right with each cap. */
static void verify(const move_case *of, const bench_shape *s) {
    bench_cells_control(s, of->to);
    for (size_t cap = 0; cap < BENCH_CAPS; cap++) {
        if (!bench_gpu.copiers[cap])
            continue;
        bench_cells_clear(s, of->to);
        (void)bench_move_ns(bench_gpu.copiers[cap], s, of->from, of->to);
        bench_gpu.spoiled = bench_gpu.spoiled || bench_cells_wrong(s, of->to) > 0;
    }
}

static void add_row(bench_report *report, const bench_shape *s, const found *f) {
    bench_text(report, bench_bytes(s->run));
    bench_number(report, 1, f->copy_gb_per_s);
    for (size_t cap = 0; cap < BENCH_CAPS; cap++) {
        if (f->ratio[cap] > 0)
            bench_number(report, 3, f->ratio[cap]);
        else
            bench_text(report, "-");
    }
}

/* Lengths outside, cases inside, because each case reads the result of the one before. Figures are printed later. */
static void moves(bench_report *report) {
    enum { LENGTHS = 11 };
    static found all[CASES][LENGTHS];
    static bench_shape shapes[LENGTHS];
    for (size_t i = 0; i < LENGTHS; i++) {
        shapes[i] = bench_shape_of((uint64_t)SHORTEST << i, bench_gpu.bytes);
        bench_cells_fill(&shapes[i], HEADS_FIRST);
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

/* ---- checksums ------------------------------------------------------------------------------------ */

/* A request of some layers with the same table, one behind the other in the memory of a form. */
typedef struct layers {
    bench_shape one;
    uint32_t count;
} layers;

static layers layers_of(uint64_t run) {
    layers made = {.one = bench_shape_of(run, bench_gpu.bytes / LAYERS)};
    made.count = (uint32_t)kvf_min_u64(LAYERS, bench_gpu.room / bench_shape_span(&made.one));
    return made;
}

static void fill_layers(const layers *l, bench_form in) {
    for (uint32_t i = 0; i < l->count; i++)
        bench_cells_write(&l->one, in, bench_gpu.seen + i * bench_shape_span(&l->one));
    bench_driver(bench_gpu.cuda->cuMemcpyAsync(bench_gpu.memory[in], (CUdeviceptr)(uintptr_t)bench_gpu.seen,
                                               l->count * bench_shape_span(&l->one), bench_gpu.stream),
                 "filling caches");
    bench_stream_wait();
}

/* Hashes all layers of some tokens, and adds a sum for each. Seeds are those of coordinates, whatever the order. */
static void hash_tokens(kvf_hasher *hasher, const layers *l, bench_form in, uint32_t first, uint32_t count,
                        uint64_t *sums) {
    const uint32_t *ids = l->one.ids + first / ROWS;
    const uint64_t *found_sums;
    kvf_status status;
    kvf_hasher_begin(hasher, ids, (uint32_t)((count + ROWS - 1) / ROWS), count);
    for (uint32_t layer = 0; layer < l->count; layer++) {
        kvf_box pages = bench_pages_of(&l->one, in, bench_gpu.memory[in] + layer * bench_shape_span(&l->one));
        const kvf_device_sums where = {.step_bytes = sizeof *sums,
                                       .seed = layer * 0x9e3779b97f4a7c15u + first * 0xd6e8feb86659fd93u,
                                       .step_seed = 0xd6e8feb86659fd93u,
                                       .unit_seed = 0xc2b2ae3d27d4eb4fu,
                                       .rows = 1,
                                       .share = {.count = 1, .width = 1}};
        pages.blocks = ids;
        pages.rows = count;
        bench_must(
            kvf_hasher_add(hasher, &pages, KVF_DTYPE_F16, KVF_DTYPE_F16, &where, count, HEADS, l->one.run));
    }
    bench_must(kvf_hasher_start(hasher));
    while ((status = kvf_hasher_poll(hasher, &found_sums)) == KVF_IN_PROGRESS)
        ;
    bench_must(status);
    memcpy(sums + first, found_sums, count * sizeof *sums);
}

static double hash_ns(kvf_hasher *hasher, const layers *l, bench_form in, uint64_t *sums) {
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
    const uint64_t at = (l->count - 1) * bench_shape_span(&l->one) +
                        bench_place_of(&l->one, TOKENS_FIRST, spoiled, HEADS - 1);
    fill_layers(l, TOKENS_FIRST);
    (void)hash_ns(hasher, l, TOKENS_FIRST, others);
    bench_gpu.spoiled = bench_gpu.spoiled || count_different(l, sums, others) > 0;
    bench_driver(bench_gpu.cuda->cuMemsetD8Async(bench_gpu.memory[TOKENS_FIRST] + at,
                                                 (unsigned char)~bench_gpu.seen[at], 1, bench_gpu.stream),
                 "spoiling a byte");
    bench_stream_wait();
    (void)hash_ns(hasher, l, TOKENS_FIRST, others);
    bench_require(count_different(l, sums, others) == 1 && sums[spoiled] != others[spoiled],
                  "the control: a spoiled byte does not show in the sum of its token");
}

static void hash_row(bench_report *report, kvf_hasher *hasher, uint64_t run) {
    double copies[ROUNDS_MAX], hashed[ROUNDS_MAX];
    layers l = layers_of(run);
    uint64_t *sums = bench_alloc(l.one.tokens, sizeof *sums),
             *others = bench_alloc(l.one.tokens, sizeof *others);
    const double bytes = (double)bench_shape_bytes(&l.one) * l.count;
    const bench_shape all = {.run = run, .tokens = l.one.tokens * l.count};
    fill_layers(&l, HEADS_FIRST);
    for (uint32_t round = 0; round < bench_gpu.rounds; round++) {
        copies[round] = bench_copy_ns(&all, HEADS_FIRST, TOKENS_FIRST);
        hashed[round] = hash_ns(hasher, &l, HEADS_FIRST, sums);
    }
    verify_hashes(hasher, &l, sums, others);
    bench_text(report, bench_bytes(run));
    bench_beside_copies(report, bytes, copies, hashed);
    free(l.one.ids);
    free(sums);
    free(others);
}

static void checksums(bench_report *report) {
    kvf_hasher *hasher = NULL;
    bench_must(kvf_hasher_open(0, &hasher));
    bench_table(
        report, "Checksums of a cache of up to 32 layers, by its device",
        (const char *[]){"cell", "copy GB/s", "hashed GB/s", "lowest", "highest", "share of a copy", NULL});
    for (uint64_t run = SHORTEST; run <= LONGEST; run *= 4)
        hash_row(report, hasher, run);
    bench_note(report, "A copy reads and writes each byte, and a checksum reads it once.");
    bench_must(kvf_hasher_close(hasher));
}

/* ---- submitting ----------------------------------------------------------------------------------- */

/* The host's time to submit a request of many layers, of one box each. */
static double submit_ns(kvf_copier *copier, const bench_shape *s) {
    kvf_device_table table;
    kvf_copy_job *job = NULL;
    const uint64_t layer = bench_shape_span(s), begun = bench_now_ns();
    bench_must(kvf_copier_put_table(copier, s->ids, s->blocks, &table));
    bench_must(kvf_copier_begin(copier, &job));
    for (uint32_t l = 0; l < LAYERS; l++) {
        const kvf_box pages = bench_pages_of(s, HEADS_FIRST, bench_gpu.memory[HEADS_FIRST] + l * layer);
        const kvf_device_side from = {.pages = &pages, .table = table.address, .table_on_host = s->ids};
        const kvf_device_side to = {.packed = bench_gpu.memory[PACKED] + l * bench_shape_bytes(s)};
        bench_must(kvf_copy_job_add(job, &from, &to, s->tokens, HEADS, s->run));
    }
    bench_must(kvf_copy_job_start(job, NULL));
    const double taken = (double)(bench_now_ns() - begun);
    bench_job_finish(job);
    kvf_copier_drop_table(copier, &table);
    return taken;
}

static void submitting(bench_report *report) {
    double taken[ROUNDS_MAX];
    bench_table(report, "Submitting a request of 32 layers, runs of 256 B: the host's time",
                (const char *[]){"tokens", "runs", "us a request", "lowest", "highest", "ns a run", NULL});
    for (uint64_t bytes = kvf_max_u64(bench_gpu.bytes / 64, 1); bytes <= bench_gpu.bytes; bytes *= 8) {
        bench_shape s = bench_shape_of(LAYER_RUN, bytes / LAYERS);
        for (uint32_t round = 0; round < bench_gpu.rounds; round++)
            taken[round] = submit_ns(bench_gpu.copiers[0], &s);
        const bench_spread spread = bench_spread_of(taken, bench_gpu.rounds);
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

/* ---- parts ---------------------------------------------------------------------------------------- */

enum { PEERS = 8, PARTS };

static const struct {
    const char *name;
    void (*measure)(bench_report *report);
} parts[PARTS] = {
    {"moves", moves},           {"batches", bench_batches},     {"link", bench_link},
    {"checksums", checksums},   {"converted", bench_converted}, {"received", bench_received},
    {"submitting", submitting}, {"beside", bench_beside},       [PEERS] = {"peers", bench_peers}};

static size_t part_named(const char *name, size_t length) {
    size_t i = 0;
    while (i < PARTS && (strlen(parts[i].name) != length || strncmp(parts[i].name, name, length) != 0))
        i++;
    bench_require(i < PARTS, "KVF_BENCH_PARTS are some of moves, batches, link, checksums, converted, "
                             "received, submitting, beside, peers, with commas between");
    return i;
}

static void choose_parts(bool chosen[PARTS]) {
    const char *at = getenv("KVF_BENCH_PARTS");
    for (size_t i = 0; i < PARTS; i++)
        chosen[i] = !at;
    while (at) {
        const size_t length = strcspn(at, ",");
        chosen[part_named(at, length)] = true;
        at = at[length] ? at + length + 1 : NULL;
    }
}

static void measure_part(bench_report *report, size_t part) {
    char sentence[64];
    bench_gpu.spoiled = false;
    parts[part].measure(report);
    if (bench_gpu.spoiled) {
        (void)snprintf(sentence, sizeof sentence, "%s: what arrived is wrong", parts[part].name);
        bench_fail(report, sentence);
    }
    bench_report_save(report);
}

int main(int argc, char **argv) {
    const kvf_cuda *cuda;
    bool chosen[PARTS];
    choose_parts(chosen);
    bench_gpu_settings();
    if (chosen[PEERS])
        bench_peers_start();
    if (kvf_cuda_find(&cuda)) {
        (void)printf("skipped: no GPU (%s)\n", kvf_error_detail());
        return SKIPPED;
    }
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return SKIPPED;
    }
    bench_report *report = bench_report_start("cuda", argc, argv);
    bench_gpu_open();
    char words[160];
    (void)snprintf(words, sizeof words, "%s, %u SMs, a driver for CUDA %u.%u", cuda->devices[0].name,
                   cuda->devices[0].multiprocessors, cuda->version / 1000, cuda->version % 1000 / 10);
    bench_note(report, words);
    for (size_t i = 0; i < PARTS; i++)
        if (chosen[i])
            measure_part(report, i);
    bench_gpu_close();
    return bench_report_end(report);
}
