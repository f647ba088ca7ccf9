/*
 * Bringing received blocks into this engine's form, in place, compared with plain copies of the same bytes:
 *
 *   copy      memcpy of every block to the same block of another buffer: the limit for the comparison
 *   moved     kvf_copy_blocks() to the other buffer: the same, written past the caches and prefetched
 *   aside     memcpy of every block to one scratch block and back: the limit of permuting through a
 *             scratch block, if reordering were free
 *
 * In memory: 192 MiB of blocks in scattered order, far beyond the caches. In the cache: 256 KiB again and
 * again, so that both buffers of the copy stay in a second-level cache of 1 MiB. The four take turns every
 * few milliseconds, on bytes that none has touched recently or, in the cache, that all just have; figures
 * are medians.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvferry/connector/postprocess.h>

#include "report.h"

#define MEMORY_BYTES (192ull << 20)
#define MEMORY_TURN (8ull << 20)
#define MEMORY_ROUNDS 4u
#define CACHE_BYTES (256ull << 10)
#define CACHE_REPEATS 16u
#define CACHE_ROUNDS 96u
#define SAMPLES 96u
#define REQUIRED 0.80

typedef struct subject {
    uint64_t heads, cell_bytes;
    kvf_page_form received, wanted;
    bool required; /* whether REQUIRED applies to it in memory */
} subject;

#define HND KVF_PAGE_HND
#define NHD KVF_PAGE_NHD

static const subject subjects[] = {
    /* Llama 3.1: heads of 128 elements of bf16; 8, and the 2 or 1 of a rank. */
    {8, 256, {HND, 4}, {HND, 16}, true},
    {8, 256, {HND, 16}, {HND, 64}, true},
    {8, 256, {HND, 64}, {HND, 16}, true},
    {8, 256, {HND, 128}, {HND, 16}, true},
    {8, 256, {HND, 16}, {NHD, 16}, true},
    {8, 256, {HND, 64}, {NHD, 64}, true},
    {8, 256, {HND, 128}, {NHD, 128}, true},
    {8, 256, {HND, 1024}, {NHD, 1024}, true},
    {8, 256, {NHD, 16}, {HND, 16}, true},
    {8, 256, {HND, 16}, {NHD, 64}, true},
    {8, 256, {NHD, 64}, {HND, 16}, true},
    {2, 256, {HND, 16}, {NHD, 16}, true},
    {2, 256, {HND, 16}, {HND, 64}, true},
    {1, 256, {NHD, 64}, {HND, 16}, false}, /* nothing to do */
    /* fp8, and small heads. */
    {8, 128, {HND, 64}, {NHD, 64}, true},
    {8, 64, {HND, 64}, {NHD, 64}, true},
    /* The width of DeepSeek's latent in bf16, and in fp8 with its scales. */
    {2, 1152, {HND, 64}, {NHD, 64}, true},
    {2, 656, {HND, 64}, {NHD, 64}, true},
    /* Cells that are gathered. */
    {8, 32, {HND, 64}, {NHD, 64}, true},
    {8, 16, {HND, 64}, {NHD, 64}, true},
    {8, 12, {HND, 128}, {NHD, 128}, false}, /* no power of two: moved one by one */
    {8, 8, {HND, 128}, {NHD, 128}, true},
    {8, 4, {HND, 128}, {NHD, 128}, true},
    {8, 4, {NHD, 128}, {HND, 128}, true},
    {2, 4, {HND, 512}, {NHD, 512}, true},
    {2, 4, {NHD, 512}, {HND, 512}, true},
    {16, 2, {HND, 128}, {NHD, 128}, true},
    {16, 1, {HND, 256}, {NHD, 256}, true},
};

static uint64_t bytes_of(const subject *what) {
    return what->heads * what->wanted.tokens * what->cell_bytes;
}

/* ---- the list -------------------------------------------------------------------------------- */

/* ---- one row --------------------------------------------------------------------------------- */

typedef struct buffers {
    unsigned char *memory, *other;
} buffers;

typedef struct setting {
    unsigned char *memory, *other, *aside;
    const uint32_t *ids;
    size_t turns, per_turn; /* blocks of a turn */
    uint64_t page;
    unsigned repeats; /* of a turn */
    kvf_received_shape shape;
    kvf_block_region region, other_region;
    kvf_scratch scratch;
} setting;

static void permute(const setting *s, const uint32_t *ids) {
    bench_require(kvf_permute_received(&s->shape, &s->region, 1, ids, s->per_turn, &s->scratch) == KVF_OK,
                  kvf_error_detail());
}

static void copy(const setting *s, const uint32_t *ids) {
    for (size_t b = 0; b < s->per_turn; b++)
        memcpy(s->other + ids[b] * s->page, s->memory + ids[b] * s->page, s->page);
}

static void move(const setting *s, const uint32_t *ids) {
    bench_require(kvf_copy_blocks(&s->region, 1, &s->other_region, 1, ids, s->per_turn, ids, s->per_turn,
                                  KVF_COPY_H2D, NULL) == KVF_OK,
                  kvf_error_detail());
}

static void copy_aside(const setting *s, const uint32_t *ids) {
    for (size_t b = 0; b < s->per_turn; b++) {
        memcpy(s->aside, s->memory + ids[b] * s->page, s->page);
        __asm__ volatile("" : : "r"(s->aside) : "memory"); /* or the compiler could drop both copies */
        memcpy(s->memory + ids[b] * s->page, s->aside, s->page);
    }
}

static double take_turn(void (*work)(const setting *, const uint32_t *), const setting *s, size_t turn) {
    const uint32_t *ids = s->ids + turn % s->turns * s->per_turn;
    uint64_t start = bench_now_ns();
    for (unsigned i = 0; i < s->repeats; i++)
        work(s, ids);
    return (double)(s->repeats * s->per_turn * s->page) / (double)(bench_now_ns() - start);
}

static void measure(bench_report *report, const setting *s, bool cached, bool required) {
    unsigned rounds = cached ? CACHE_ROUNDS : MEMORY_ROUNDS;
    double permuted[SAMPLES], copied[SAMPLES], moved[SAMPLES], aside[SAMPLES];
    size_t samples = 0;
    /* The four work a quarter of the list apart; the first turns only warm up. */
    for (size_t turn = 0; turn < s->turns * (rounds + 1) && samples < SAMPLES; turn++) {
        double a = take_turn(copy, s, turn);
        double b = take_turn(permute, s, turn + s->turns / 4);
        double c = take_turn(copy_aside, s, turn + s->turns / 4 * 2);
        /* It writes past the caches, which would evict the data that is meant to be cached. */
        double d = cached ? 0 : take_turn(move, s, turn + s->turns / 4 * 3);
        if (turn < s->turns)
            continue;
        copied[samples] = a;
        permuted[samples] = b;
        moved[samples] = d;
        aside[samples++] = c;
    }
    double ours = bench_spread_of(permuted, samples).median, limit = bench_spread_of(copied, samples).median;
    bench_number(report, 2, ours);
    bench_number(report, 2, limit);
    if (!cached)
        bench_number(report, 2, bench_spread_of(moved, samples).median);
    bench_number(report, 2, bench_spread_of(aside, samples).median);
    bench_number(report, 2, ours / limit);
    if (required && ours / limit < REQUIRED)
        bench_fail(report, "permuting is below 80% of a plain copy of the same bytes");
}

static void name_form(bench_report *report, kvf_page_form form) {
    char text[32];
    (void)snprintf(text, sizeof text, "%s x%llu", form.order == HND ? "HND" : "NHD",
                   (unsigned long long)form.tokens);
    bench_text(report, text);
}

static void row(bench_report *report, const subject *what, const buffers *b, bool cached) {
    setting s = {.memory = b->memory, .other = b->other, .repeats = cached ? CACHE_REPEATS : 1};
    uint64_t turn = cached ? CACHE_BYTES : MEMORY_TURN;
    s.turns = cached ? 1 : MEMORY_BYTES / MEMORY_TURN;
    s.page = bytes_of(what);
    uint64_t blocks =
        what->received.tokens > what->wanted.tokens ? what->received.tokens / what->wanted.tokens : 1;
    s.per_turn = turn / s.page / blocks * blocks;
    size_t count = s.turns * s.per_turn;
    uint32_t *ids = bench_shuffled(count);
    s.ids = ids;
    s.aside = bench_alloc(s.page, 1);
    s.shape =
        (kvf_received_shape){sizeof s.shape, what->heads, what->cell_bytes, what->received, what->wanted};
    s.region = (kvf_block_region){.base = b->memory,
                                  .bytes = count * s.page,
                                  .block_count = count,
                                  .block_stride_bytes = s.page,
                                  .part_bytes = s.page};
    s.region.layer = "";
    s.other_region = s.region;
    s.other_region.base = b->other;
    bench_require(kvf_received_scratch_bytes(&s.shape, s.per_turn, &s.scratch.bytes) == KVF_OK,
                  kvf_error_detail());
    s.scratch.memory = bench_alloc(s.scratch.bytes, 1);
    bench_number(report, 0, (double)what->heads);
    bench_text(report, bench_bytes(what->cell_bytes));
    name_form(report, what->received);
    name_form(report, what->wanted);
    bench_text(report, bench_bytes(s.page));
    measure(report, &s, cached, what->required && !cached);
    free(s.scratch.memory);
    free(s.aside);
    free(ids);
}

static void table(bench_report *report, const char *title, bool cached) {
    static const char *const columns[] = {"heads", "cell",  "received", "wanted",  "block", "GB/s",
                                          "copy",  "moved", "aside",    "of copy", NULL};
    static const char *const cached_columns[] = {"heads", "cell", "received", "wanted",  "block",
                                                 "GB/s",  "copy", "aside",    "of copy", NULL};
    uint64_t bytes = cached ? CACHE_BYTES : MEMORY_BYTES;
    buffers b = {bench_alloc(bytes, 1), bench_alloc(bytes, 1)};
    for (uint64_t i = 0; i < bytes; i++)
        b.memory[i] = b.other[i] = (unsigned char)(i * 31);
    bench_table(report, title, cached ? cached_columns : columns);
    for (size_t i = 0; i < sizeof subjects / sizeof *subjects; i++)
        if (!cached || bytes_of(&subjects[i]) <= CACHE_BYTES)
            row(report, &subjects[i], &b, cached);
    free(b.memory);
    free(b.other);
}

int main(int argc, char **argv) {
    bench_report *report = bench_report_start("permute", argc, argv);
    table(report, "In memory: 192 MiB of scattered blocks", false);
    table(report, "In the cache: 256 KiB again and again", true);
    return bench_report_end(report);
}
