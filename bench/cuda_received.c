/*
 * Measures two functions that engines call: kvf_permute_received(), for blocks that arrived in another form, and
 * kvf_copy_blocks(), to the host and back. Both wait for the device, so their time is the caller's.
 */
#include <stdlib.h>

#include <kvferry/connector/postprocess.h>

#include "cuda_bench.h"

/* ---- permuting -------------------------------------------------------------------------------------- */

static kvf_block_region region_of(const bench_shape *s, bench_form in) {
    const uint64_t page = ROWS * HEADS * s->run;
    return (kvf_block_region){
        .layer = "layer",
        .base = (void *)(uintptr_t)bench_gpu.memory[in], /* NOLINT(performance-no-int-to-ptr) */
        .bytes = s->blocks * page,
        .block_count = s->blocks,
        .block_stride_bytes = page,
        .part_bytes = page,
        .kind = in == ON_HOST ? KVF_MEMORY_HOST : KVF_MEMORY_CUDA};
}

/* Permutes the blocks that lie in memory of the wanted form. */
static double permute_ns(const bench_shape *s, bench_form received, bench_form wanted) {
    const kvf_page_form by_head = {KVF_PAGE_HND, ROWS}, by_token = {KVF_PAGE_NHD, ROWS};
    const kvf_received_shape shape = {.struct_size = sizeof shape,
                                      .heads = HEADS,
                                      .cell_bytes = s->run,
                                      .received = received == HEADS_FIRST ? by_head : by_token,
                                      .wanted = wanted == HEADS_FIRST ? by_head : by_token};
    const kvf_block_region region = region_of(s, wanted);
    const uint64_t begun = bench_now_ns();
    bench_must(kvf_permute_received(&shape, &region, 1, s->ids, s->blocks, NULL));
    return (double)(bench_now_ns() - begun);
}

/* Puts received blocks into memory of the wanted form. */
static void receive(const bench_shape *s, bench_form received, bench_form wanted) {
    bench_cells_fill(s, received);
    bench_driver(bench_gpu.cuda->cuMemcpyAsync(bench_gpu.memory[wanted], bench_gpu.memory[received],
                                               bench_shape_span(s), bench_gpu.stream),
                 "receiving blocks");
    bench_stream_wait();
}

static void verify_permuting(const bench_shape *s, bench_form received, bench_form wanted) {
    receive(s, received, wanted);
    bench_require(bench_cells_wrong(s, wanted) > 0,
                  "the control: received blocks are taken for permuted ones");
    (void)permute_ns(s, received, wanted);
    bench_gpu.spoiled = bench_gpu.spoiled || bench_cells_wrong(s, wanted) > 0;
}

/* ---- copying ---------------------------------------------------------------------------------------- */

static double copy_blocks_ns(const bench_shape *s, bench_form from, bench_form to) {
    const kvf_block_region source = region_of(s, from), target = region_of(s, to);
    const uint64_t begun = bench_now_ns();
    bench_must(kvf_copy_blocks(&source, 1, &target, 1, s->ids, s->blocks, s->ids, s->blocks,
                               from == ON_HOST ? KVF_COPY_H2D : KVF_COPY_D2H, NULL));
    return (double)(bench_now_ns() - begun);
}

/* Copies one way, and back into cleared memory. */
static void verify_copying(const bench_shape *s, bench_form from, bench_form to) {
    const bench_form device = from == ON_HOST ? to : from;
    bench_cells_fill(s, device);
    bench_cells_clear(s, ON_HOST);
    (void)copy_blocks_ns(s, device, ON_HOST);
    bench_cells_control(s, device);
    (void)copy_blocks_ns(s, ON_HOST, device);
    bench_gpu.spoiled = bench_gpu.spoiled || bench_cells_wrong(s, device) > 0;
}

/* ---- rows ------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    bench_form from, to;
    double (*work_ns)(const bench_shape *s, bench_form from, bench_form to);
    void (*verify)(const bench_shape *s, bench_form from, bench_form to);
} works[] = {{"HND to NHD, in place", HEADS_FIRST, TOKENS_FIRST, permute_ns, verify_permuting},
             {"NHD to HND, in place", TOKENS_FIRST, HEADS_FIRST, permute_ns, verify_permuting},
             {"to the host", HEADS_FIRST, ON_HOST, copy_blocks_ns, verify_copying},
             {"from the host", ON_HOST, HEADS_FIRST, copy_blocks_ns, verify_copying}};

static void row(bench_report *report, const bench_shape *s, size_t which) {
    const bench_form from = works[which].from, to = works[which].to;
    double copies[ROUNDS_MAX], taken[ROUNDS_MAX];
    for (uint32_t round = 0; round < bench_gpu.rounds; round++) {
        copies[round] = bench_copy_ns(s, from, to);
        taken[round] = works[which].work_ns(s, from, to);
    }
    bench_text(report, works[which].name);
    bench_text(report, bench_bytes(s->run));
    bench_beside_copies(report, (double)bench_shape_bytes(s), copies, taken);
}

void bench_received(bench_report *report) {
    bench_table(report, "Blocks of 16 tokens and 8 heads: permuted as received, and copied",
                (const char *[]){"blocks", "cell", "copy GB/s", "GB/s", "lowest", "highest",
                                 "share of a copy", NULL});
    for (size_t which = 0; which < sizeof works / sizeof *works; which++) {
        for (uint64_t run = SHORTEST; run <= LONGEST / 4; run *= 4) {
            bench_shape s = bench_shape_of(run, bench_gpu.bytes);
            row(report, &s, which);
            works[which].verify(&s, works[which].from, works[which].to);
            free(s.ids);
        }
    }
    bench_note(report,
               "A permutation copies each byte twice, so half of a copy is its limit. Copies to and from the "
               "host pass through pinned memory, in which the driver's copy begins or ends.");
}
