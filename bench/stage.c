/*
 * Gathering cells of a cache into a packed stream, and scattering a stream into a cache, compared with one thread's
 * memcpy of the same bytes. All data is beyond the caches: 192 MiB of cells in scattered blocks, and as much packed.
 * The three take turns, each on the next third of the memory; the ratio is the median of the turns' ratios.
 *
 * Heads come before tokens in a block, so that no two cells of the stream touch in memory; a row of the stream has one
 * cell for each head. Pieces of 2 B are keys stored channel by channel: 128 channels of blocks of 16 and 64 tokens.
 *
 * If elements change their type on the way, bytes are the mean of those in the cache and those in the stream, because
 * one is read and the other written.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "report.h"
#include "stage/stream.h"

#define MEMORY_BYTES (192ull << 20)
#define TURNS                                                                                                \
    3u /* through all of the memory: each is twice as large as the caches, so that they hardly help */
#define RANGE_BYTES (1ull << 20) /* in one call: a slot of an arena */
#define SAMPLES 15u

typedef struct subject {
    uint32_t cell_bytes; /* in the cache */
    uint32_t heads, tokens;
    bool channels; /* cells in pieces of one element */
    kvf_dtype from, to;
    double required; /* as a fraction of memcpy, both ways */
} subject;

#define PLAIN KVF_DTYPE_BF16, KVF_DTYPE_BF16

static const subject subjects[] = {
    {64, 8, 16, false, PLAIN, 0.50},
    {256, 8, 16, false, PLAIN, 0.85},
    {256, 2, 16, false, PLAIN, 0.85}, /* blocks of 8 KiB: a new pair of pages after each */
    {1024, 8, 16, false, PLAIN, 0.85},
    {16384, 8, 16, false, PLAIN, 0.85},
    {256, 8, 16, true, PLAIN, 0},
    {256, 8, 64, true, PLAIN, 0},
    {64, 8, 16, false, KVF_DTYPE_BF16, KVF_DTYPE_F32, 0},
    {256, 8, 16, false, KVF_DTYPE_BF16, KVF_DTYPE_F32, 0},
    {1024, 8, 16, false, KVF_DTYPE_F32, KVF_DTYPE_BF16, 0},
    {1024, 8, 16, false, KVF_DTYPE_BF16, KVF_DTYPE_F16, 0},
    {256, 8, 16, true, KVF_DTYPE_BF16, KVF_DTYPE_F32, 0},
    {1024, 8, 16, false, KVF_DTYPE_BF16, KVF_DTYPE_F8_E4M3, 0},
    {256, 8, 16, false, KVF_DTYPE_F8_E4M3, KVF_DTYPE_BF16, 0},
    {1024, 8, 16, false, KVF_DTYPE_BF16, KVF_DTYPE_F8_E5M2, 0},
};

/* ---- a cache ---------------------------------------------------------------------------------- */

typedef struct cache {
    kvf_model *model;
    kvf_shard *shard;
    kvf_selection *selection;
    kvf_stream_map *map;
    kvf_stream *stream;
    uint32_t blocks;
} cache;

static void require(kvf_status status) {
    bench_require(status == KVF_OK, kvf_error_detail());
}

static void open_shard(const subject *what, cache *c) {
    const uint64_t unit = (uint64_t)what->tokens * what->cell_bytes, block = unit * what->heads;
    const uint32_t element = kvf_dtype_bits(what->from) / 8;
    c->blocks = (uint32_t)(MEMORY_BYTES / block);
    kvf_placement place = {.block_stride = block, .row_stride = what->cell_bytes, .unit_stride = unit};
    if (what->channels) {
        place.pieces = what->cell_bytes / element;
        place.row_stride = element;
        place.piece_stride = (uint64_t)what->tokens * element;
    }
    const kvf_part_share share = {.units = {0, what->heads}};
    const kvf_group_shard_desc group = {
        .tokens_per_block = what->tokens, .block_count = c->blocks, .parts = &share, .placements = &place};
    const kvf_shard_desc desc = {.struct_size = sizeof desc,
                                 .layers = {0, 1},
                                 .region_bytes = &(const uint64_t){MEMORY_BYTES},
                                 .region_count = 1,
                                 .groups = &group};
    require(kvf_shard_create(c->model, &desc, &c->shard));
}

static cache open_cache(const subject *what) {
    cache c;
    const kvf_part_desc part = {.name = "k",
                                .dtype = what->from,
                                .units = what->heads,
                                .cell_elements = what->cell_bytes / (kvf_dtype_bits(what->from) / 8)};
    const kvf_group_desc group = {
        .name = "full", .layers = (const uint32_t[]){0}, .layer_count = 1, .parts = &part, .part_count = 1};
    const kvf_model_desc desc = {
        .struct_size = sizeof desc, .layer_count = 1, .groups = &group, .group_count = 1};
    require(kvf_model_create(&desc, &c.model));
    open_shard(what, &c);
    const kvf_stream_item item = {.layers = {0, 1}, .units = {0, what->heads}, .dtype = what->to};
    require(kvf_selection_check(c.model, &item, 1, &c.selection));
    require(kvf_stream_map_create(c.shard, c.selection, &c.map));
    uint32_t *ids = bench_shuffled(c.blocks);
    const kvf_group_steps steps = {{ids, c.blocks, 0}, 0, (uint64_t)c.blocks * what->tokens};
    require(kvf_stream_create(c.map, &steps, 1, &c.stream));
    free(ids);
    return c;
}

static void close_cache(const cache *c) {
    kvf_stream_free(c->stream);
    kvf_stream_map_free(c->map);
    kvf_selection_free(c->selection);
    kvf_shard_free(c->shard);
    kvf_model_free(c->model);
}

static bool too_slow; /* in some row */

/* ---- turns ------------------------------------------------------------------------------------ */

typedef struct setting {
    const cache *cache;
    unsigned char *memory, *packed; /* the packed side has room for elements of twice the width */
    uint64_t turn_bytes;            /* of the stream */
    double mean;                    /* bytes of cache and stream, for each of the stream */
} setting;

typedef void (*work)(const setting *s, kvf_byte_range bytes);

static void gather(const setting *s, kvf_byte_range bytes) {
    kvf_stream_gather(s->cache->stream, &s->memory, bytes, s->packed + bytes.begin);
}

static void scatter(const setting *s, kvf_byte_range bytes) {
    kvf_stream_scatter(s->cache->stream, &s->memory, bytes, s->packed + bytes.begin);
}

/* Copies as many bytes as the others, from the cache's memory to the packed side. */
static void copy(const setting *s, kvf_byte_range bytes) {
    const uint64_t place = (uint64_t)((double)bytes.begin * s->mean) % (MEMORY_BYTES - 2 * RANGE_BYTES);
    const uint64_t begin = place / 4096 * 4096;
    memcpy(s->packed + begin, s->memory + begin, (size_t)((double)(bytes.end - bytes.begin) * s->mean));
}

/* Processor time of this thread, including waits for memory; other threads' time does not count. */
static uint64_t now_ns(void) {
    struct timespec now;
    bench_require(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0, "there is no clock of the thread's");
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Returns GB/s. */
static double take_turn(work run, const setting *s, uint64_t turn) {
    const uint64_t begin = turn * s->turn_bytes, start = now_ns();
    for (uint64_t at = begin; at < begin + s->turn_bytes; at += RANGE_BYTES)
        run(s, (kvf_byte_range){at, at + RANGE_BYTES});
    return s->mean * (double)s->turn_bytes / (double)(now_ns() - start);
}

static void measure(bench_report *report, const subject *what, const setting *s) {
    double copied[SAMPLES], gathered[SAMPLES], put[SAMPLES], of[2][SAMPLES];
    size_t n = 0;
    for (uint64_t turn = 0; n < SAMPLES; turn++) {
        const double a = take_turn(copy, s, turn % TURNS);
        const double b = take_turn(gather, s, (turn + 1) % TURNS);
        const double c = take_turn(scatter, s, (turn + 2) % TURNS);
        if (turn == 0) /* only warms up */
            continue;
        copied[n] = a;
        gathered[n] = b;
        put[n] = c;
        of[0][n] = b / a;
        of[1][n++] = c / a;
    }
    bench_number(report, 2, bench_spread_of(copied, n).median);
    bench_number(report, 2, bench_spread_of(gathered, n).median);
    bench_number(report, 2, bench_spread_of(put, n).median);
    for (size_t i = 0; i < 2; i++) {
        const double ratio = bench_spread_of(of[i], n).median;
        bench_number(report, 2, ratio);
        too_slow |= ratio < what->required;
    }
}

static void row(bench_report *report, const subject *what, unsigned char *memory, unsigned char *packed) {
    const cache c = open_cache(what);
    const double to = kvf_dtype_bits(what->to), from = kvf_dtype_bits(what->from);
    const uint64_t turn = kvf_stream_bytes(c.stream) / TURNS / RANGE_BYTES * RANGE_BYTES;
    setting s = {.cache = &c, .turn_bytes = turn, .mean = (1 + from / to) / 2};
    s.memory = memory;
    s.packed = packed;
    char text[64];
    (void)snprintf(text, sizeof text, "%u x %s", what->heads, bench_bytes(what->cell_bytes));
    bench_text(report, text);
    bench_number(report, 0, what->tokens);
    bench_text(report, bench_bytes(what->channels ? kvf_dtype_bits(what->from) / 8 : what->cell_bytes));
    (void)snprintf(text, sizeof text, what->from == what->to ? "%s" : "%s -> %s", kvf_dtype_name(what->from),
                   kvf_dtype_name(what->to));
    bench_text(report, text);
    measure(report, what, &s);
    close_cache(&c);
}

/* Memory aligned to pages, like caches and arenas. */
static unsigned char *pages(uint64_t bytes) {
    unsigned char *memory = aligned_alloc(4096, bytes);
    bench_require(memory != NULL, "there is no memory");
    return memory;
}

int main(int argc, char **argv) {
    bench_report *report = bench_report_start("stage", argc, argv);
    static const char *const columns[] = {
        "cells",  "tokens",  "pieces",           "elements",          "memcpy GB/s",
        "gather", "scatter", "gather of memcpy", "scatter of memcpy", NULL};
    bench_table(report, "Packed streams beyond the caches", columns);
    unsigned char *memory = pages(MEMORY_BYTES), *packed = pages(2 * MEMORY_BYTES);
    for (uint64_t i = 0; i < MEMORY_BYTES; i++)
        memory[i] = packed[2 * i] = packed[2 * i + 1] = (unsigned char)(i * 31);
    for (size_t i = 0; i < sizeof subjects / sizeof *subjects; i++)
        row(report, &subjects[i], memory, packed);
    if (too_slow)
        bench_fail(report, "a row is slower, beside a copy of the same bytes, than it must be: 0.85 from 256 "
                           "B on, 0.50 at 64 B");
    free(memory);
    free(packed);
    return bench_report_end(report);
}
