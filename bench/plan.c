/*
 * The cost of planning: building a plan, its memory, and emitting the runs of a request.
 *
 * The shapes are Llama 3.1 70B's, prefill TP 8 to decode TP 4 unless a row says otherwise, one request of
 * 8000 tokens over scattered blocks. Figures are medians over repetitions. The limits next to them are this
 * project's own: 100 us and 64 KiB for each remote rank, 3 ns for each run that does not merge with another.
 */
#include <stdio.h>
#include <stdlib.h>

#include <kvferry/request.h>

#include "report.h"

#define ROUNDS 51
#define TOKENS 8000u
#define PLAN_NS 100e3
#define PLAN_BYTES 65536.0
#define RUN_NS 3.0

typedef struct side {
    uint32_t tp_size;
    uint32_t tokens_per_block;
    const char *order;
} side;

static void require(kvf_status status) {
    bench_require(status == KVF_OK, kvf_error_detail());
}

static kvf_engine *engine_of(const kvf_model *model, side shape, uint64_t blocks) {
    kvf_engine_spec spec = {
        .struct_size = sizeof spec,
        .tp_size = shape.tp_size,
        .all = {.tokens_per_block = shape.tokens_per_block, .block_count = blocks, .order = shape.order}};
    kvf_engine *engine;
    require(kvf_engine_build(model, &spec, &engine));
    return engine;
}

/* ---- plans ----------------------------------------------------------------------------------- */

static void plan_row(bench_report *report, const kvf_model *model, side prefill, side decode,
                     uint64_t blocks) {
    kvf_engine *remote = engine_of(model, prefill, blocks), *local = engine_of(model, decode, blocks);
    double ns[ROUNDS];
    kvf_plan *plan = NULL;
    for (int i = 0; i < ROUNDS; i++) {
        kvf_plan_free(plan);
        uint64_t start = bench_now_ns();
        require(kvf_plan_build(kvf_engine_shard(local, 0), remote, NULL, &plan));
        ns[i] = (double)(bench_now_ns() - start);
    }
    require(kvf_plan_verify(plan));
    uint32_t sources = kvf_plan_source_count(plan);
    double bytes = (double)kvf_plan_memory_bytes(plan) / sources;
    double median = bench_spread_of(ns, ROUNDS).median / sources;
    char text[64];
    (void)snprintf(text, sizeof text, "TP %u -> TP %u", prefill.tp_size, decode.tp_size);
    bench_text(report, text);
    bench_number(report, 0, (double)blocks);
    bench_number(report, 0, sources);
    bench_number(report, 1, median / 1e3);
    bench_number(report, 3, median / PLAN_NS);
    bench_number(report, 0, bytes);
    bench_number(report, 3, bytes / PLAN_BYTES);
    if (median > PLAN_NS || bytes > PLAN_BYTES)
        bench_fail(report, "a plan is over 100 us or 64 KiB for each remote rank");
    kvf_plan_free(plan);
    kvf_engine_free(local);
    kvf_engine_free(remote);
}

/* ---- runs ------------------------------------------------------------------------------------ */

static kvf_request *request_of(const kvf_plan *plan, side prefill, side decode, bool scattered) {
    uint32_t theirs = (TOKENS + prefill.tokens_per_block - 1) / prefill.tokens_per_block;
    uint32_t ours = (TOKENS + decode.tokens_per_block - 1) / decode.tokens_per_block;
    uint32_t *ids = bench_alloc(theirs + ours, sizeof *ids);
    /* Steps of 7 and 11 over a prime number of blocks: no two blocks are neighbours. */
    for (uint32_t i = 0; i < theirs; i++)
        ids[i] = scattered ? i * 7 % 1009 : i;
    for (uint32_t i = 0; i < ours; i++)
        ids[theirs + i] = scattered ? i * 11 % 1009 : i;
    kvf_group_request group = {
        .remote = {ids, theirs, 0}, .local = {ids + theirs, ours, 0}, .begin = 0, .end = TOKENS};
    kvf_request *request;
    require(kvf_request_create(plan, &request));
    require(kvf_request_set(request, &group, 1));
    free(ids);
    return request;
}

static uint64_t pull_all(const kvf_request *request, kvf_run *runs, size_t capacity) {
    kvf_run_cursor cursor;
    kvf_run_cursor_start(&cursor, request, 0);
    uint64_t total = 0;
    for (size_t n; (n = kvf_run_cursor_next(&cursor, runs, capacity)) > 0;)
        total += n;
    return total;
}

static void runs_row(bench_report *report, const kvf_model *model, side prefill, side decode,
                     bool scattered) {
    uint64_t blocks = scattered ? 1009 : TOKENS / 16;
    kvf_engine *remote = engine_of(model, prefill, blocks), *local = engine_of(model, decode, blocks);
    kvf_plan *plan;
    require(kvf_plan_build(kvf_engine_shard(local, 0), remote, NULL, &plan));
    kvf_request *request = request_of(plan, prefill, decode, scattered);
    enum { CAPACITY = 1024 };
    kvf_run *runs = bench_alloc(CAPACITY, sizeof *runs);
    double ns[ROUNDS];
    uint64_t count = 0;
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t start = bench_now_ns();
        count = pull_all(request, runs, CAPACITY);
        ns[i] = (double)(bench_now_ns() - start) / (double)count;
    }
    bench_spread spread = bench_spread_of(ns, ROUNDS);
    char text[96];
    (void)snprintf(text, sizeof text, "TP %u %s x%u -> TP %u %s x%u", prefill.tp_size, prefill.order,
                   prefill.tokens_per_block, decode.tp_size, decode.order, decode.tokens_per_block);
    bench_text(report, text);
    bench_text(report, scattered ? "scattered" : "whole cache");
    bench_number(report, 0, (double)count);
    bench_number(report, 0, (double)kvf_request_bytes(request, 0) / (double)count);
    bench_number(report, 2, spread.low);
    bench_number(report, 2, spread.median);
    bench_number(report, 2, spread.median / RUN_NS);
    if (scattered && spread.median > RUN_NS)
        bench_fail(report, "a run takes more than 3 ns to emit");
    if (!scattered && count != 1)
        bench_fail(report, "everything is contiguous, but there is more than one run");
    free(runs);
    kvf_request_free(request);
    kvf_plan_free(plan);
    kvf_engine_free(local);
    kvf_engine_free(remote);
}

int main(int argc, char **argv) {
    bench_report *report = bench_report_start("plan", argc, argv);
    kvf_model *model;
    require(kvf_model_load("llama-3.1-70b", NULL, &model));

    static const char *const plan_columns[] = {"plan",   "blocks",         "sources",   "us each",
                                               "of 100", "bytes per rank", "of 64 KiB", NULL};
    bench_table(report, "Building a plan, Llama 3.1 70B (80 layers), for each remote rank", plan_columns);
    const uint64_t block_counts[] = {100, 10000, 1000000};
    for (size_t i = 0; i < sizeof block_counts / sizeof *block_counts; i++)
        plan_row(report, model, (side){8, 16, "L|BPHN"}, (side){4, 16, "L|BPHN"}, block_counts[i]);
    plan_row(report, model, (side){4, 16, "L|BPNH"}, (side){8, 24, "L|BPHN"}, 10000);
    plan_row(report, model, (side){3, 16, "LP|BNH"}, (side){2, 48, "BLHNP"}, 10000);
    plan_row(report, model, (side){8, 16, "L|BPHN"}, (side){1, 16, "L|BPHN"}, 10000);

    static const char *const run_columns[] = {"request", "blocks", "runs", "bytes each",
                                              "ns low",  "ns",     "of 3", NULL};
    bench_table(report, "Emitting the runs of one source, 8000 tokens", run_columns);
    runs_row(report, model, (side){8, 16, "L|BPHN"}, (side){4, 16, "L|BPHN"}, true);
    runs_row(report, model, (side){4, 16, "L|BPHN"}, (side){8, 16, "L|BPHN"}, true);
    runs_row(report, model, (side){8, 16, "L|BPHN"}, (side){4, 24, "L|BPHN"}, true);
    runs_row(report, model, (side){2, 16, "L|BHNP"}, (side){4, 16, "L|BHNP"}, true);
    runs_row(report, model, (side){8, 16, "L|BPNH"}, (side){4, 16, "L|BPHN"}, true);
    runs_row(report, model, (side){4, 16, "L|BPNH"}, (side){2, 24, "L|BPHN"}, true);
    runs_row(report, model, (side){4, 16, "LBPHN"}, (side){4, 16, "LBPHN"}, false);

    kvf_model_free(model);
    return bench_report_end(report);
}
