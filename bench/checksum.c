/*
 * Checksums by coordinates, compared with plain copies of the same bytes: memcpy of every region to another buffer.
 * About 192 MiB, far beyond the caches, one rank, blocks in scattered order; the two take turns, and figures are
 * medians.
 *
 * The cost is hashing cell by cell, which different shapes make necessary: the smaller the cells, the higher the cost.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvferry/checksum.h>

#include "report.h"

#define MEMORY_BYTES (192ull << 20)
#define LAYERS 8u
#define SAMPLES 12u
#define PARTS_MAX 4u

typedef struct subject {
    const char *name, *order;
    kvf_group_kind kind;
    uint32_t tokens_per_block;
    uint32_t part_count;
    kvf_part_desc parts[PARTS_MAX];
} subject;

#define HEADS(count, elements)                                                                               \
    { .dtype = KVF_DTYPE_BF16, .units = (count), .cell_elements = (elements) }

static const subject subjects[] = {
    {"8 heads, HND", "L|BPHN", KVF_GROUP_TOKENS, 16, 2, {HEADS(8, 128), HEADS(8, 128)}},
    {"8 heads, NHD", "L|BPNH", KVF_GROUP_TOKENS, 16, 2, {HEADS(8, 128), HEADS(8, 128)}},
    {"8 heads, K beside V", "L|BHNP", KVF_GROUP_TOKENS, 16, 2, {HEADS(8, 128), HEADS(8, 128)}},
    {"1 head, layers in a block", "BLHNP", KVF_GROUP_TOKENS, 16, 2, {HEADS(1, 128), HEADS(1, 128)}},
    {"8 small heads, HND", "L|BPHN", KVF_GROUP_TOKENS, 16, 2, {HEADS(8, 32), HEADS(8, 32)}},
    {"latent", "L|BPNH", KVF_GROUP_TOKENS, 64, 1, {HEADS(1, 576)}},
    {"recurrent state", "L|BPHN", KVF_GROUP_STATE, 1, 1, {HEADS(64, 64 * 128)}},
    {"conv state",
     "L|BPHN",
     KVF_GROUP_STATE,
     1,
     1,
     {{.dtype = KVF_DTYPE_BF16, .units = 6144, .cell_elements = 1, .rows_per_step = 3}}},
};

typedef struct setting {
    kvf_engine *engine;
    const kvf_shard *shard;
    kvf_memory *regions;
    unsigned char **copies;
    uint32_t *ids;
    kvf_block_table table;
    uint64_t steps, bytes;
    uint64_t *sums;
} setting;

static kvf_engine *build(const subject *what, uint64_t blocks) {
    static const char *const names[PARTS_MAX] = {"a", "b", "c", "d"};
    kvf_part_desc parts[PARTS_MAX];
    uint32_t layers[LAYERS];
    for (uint32_t i = 0; i < LAYERS; i++)
        layers[i] = i;
    for (uint32_t i = 0; i < what->part_count; i++) {
        parts[i] = what->parts[i];
        parts[i].name = names[i];
    }
    kvf_group_desc group = {.name = "group",
                            .kind = what->kind,
                            .layers = layers,
                            .layer_count = LAYERS,
                            .parts = parts,
                            .part_count = what->part_count};
    kvf_model_desc desc = {
        .struct_size = sizeof desc, .layer_count = LAYERS, .groups = &group, .group_count = 1};
    kvf_group_spec cache = {
        .tokens_per_block = what->tokens_per_block, .block_count = blocks, .order = what->order};
    kvf_engine_spec spec = {.struct_size = sizeof spec, .groups = &cache, .all = {.block_count = blocks}};
    kvf_model *model = NULL;
    kvf_engine *engine = NULL;
    bench_require(kvf_model_create(&desc, &model) == KVF_OK, kvf_error_detail());
    bench_require(kvf_engine_build(model, &spec, &engine) == KVF_OK, kvf_error_detail());
    kvf_model_free(model);
    return engine;
}

static uint64_t part_bytes(const kvf_part_desc *part) {
    return kvf_part_cell_bytes(part) * part->units * (part->rows_per_step ? part->rows_per_step : 1);
}

static uint64_t block_bytes(const subject *what) {
    uint64_t bytes = part_bytes(&what->parts[0]);
    for (uint32_t i = 1; i < what->part_count; i++)
        bytes += part_bytes(&what->parts[i]);
    return bytes * what->tokens_per_block * LAYERS;
}

static setting set_up(const subject *what) {
    setting s = {0};
    uint32_t blocks = (uint32_t)(MEMORY_BYTES / block_bytes(what));
    s.engine = build(what, blocks);
    s.shard = kvf_engine_shard(s.engine, 0);
    const kvf_shard_desc *desc = kvf_shard_get(s.shard);
    s.regions = bench_alloc(desc->region_count, sizeof *s.regions);
    s.copies = bench_alloc(desc->region_count, sizeof *s.copies);
    for (uint32_t r = 0; r < desc->region_count; r++) {
        s.regions[r] = (kvf_memory){.struct_size = sizeof(kvf_memory),
                                    .address = bench_alloc(desc->region_bytes[r], 1),
                                    .bytes = desc->region_bytes[r]};
        s.copies[r] = bench_alloc(desc->region_bytes[r], 1);
        memset(s.regions[r].address, (int)r + 1, desc->region_bytes[r]);
        memset(s.copies[r], 0, desc->region_bytes[r]);
        s.bytes += desc->region_bytes[r];
    }
    s.ids = bench_shuffled(blocks);
    s.table = (kvf_block_table){s.ids, blocks, 0};
    s.steps = (uint64_t)blocks * what->tokens_per_block;
    s.sums = bench_alloc(s.steps, sizeof *s.sums);
    return s;
}

static void tear_down(const setting *s) {
    for (uint32_t r = 0; r < kvf_shard_get(s->shard)->region_count; r++) {
        free(s->regions[r].address);
        free(s->copies[r]);
    }
    free(s->regions);
    free(s->copies);
    free(s->ids);
    free(s->sums);
    kvf_engine_free(s->engine);
}

static double sum(const setting *s, const subject *what) {
    uint64_t start = bench_now_ns();
    for (uint32_t part = 0; part < what->part_count; part++)
        bench_require(kvf_checksum_steps(s->shard, s->regions, 0, part, (kvf_range){0, LAYERS},
                                         (kvf_range){0, what->parts[part].units}, &s->table, 0, s->steps,
                                         s->sums) == KVF_OK,
                      kvf_error_detail());
    return (double)s->bytes / (double)(bench_now_ns() - start);
}

static double copy(const setting *s) {
    uint64_t start = bench_now_ns();
    for (uint32_t r = 0; r < kvf_shard_get(s->shard)->region_count; r++)
        memcpy(s->copies[r], s->regions[r].address, s->regions[r].bytes);
    return (double)s->bytes / (double)(bench_now_ns() - start);
}

static void row(bench_report *report, const subject *what) {
    setting s = set_up(what);
    double summed[SAMPLES], copied[SAMPLES];
    (void)copy(&s);
    for (size_t i = 0; i < SAMPLES; i++) {
        summed[i] = sum(&s, what);
        copied[i] = copy(&s);
    }
    double ours = bench_spread_of(summed, SAMPLES).median, plain = bench_spread_of(copied, SAMPLES).median;
    bench_text(report, what->name);
    bench_text(report, bench_bytes(kvf_part_cell_bytes(&what->parts[0])));
    bench_number(report, 2, ours);
    bench_number(report, 2, plain);
    bench_number(report, 2, ours / plain);
    tear_down(&s);
}

int main(int argc, char **argv) {
    bench_report *report = bench_report_start("checksum", argc, argv);
    bench_table(report, "Checksums of 192 MiB of cells",
                (const char *[]){"cache", "cell", "GB/s", "copy", "of copy", NULL});
    for (size_t i = 0; i < sizeof subjects / sizeof *subjects; i++)
        row(report, &subjects[i]);
    return bench_report_end(report);
}
