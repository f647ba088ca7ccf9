/*
 * Measures gathering pages into a packed stream of another type of elements, within the device. A driver's copy that
 * reads and writes as many bytes in all is the limit.
 */
#include <stdlib.h>
#include <string.h>

#include "kernel/convert.h"

#include "cuda_bench.h"

static const struct conversion {
    const char *name;
    kvf_dtype from, to;
} conversions[] = {{"bf16 to f32", KVF_DTYPE_BF16, KVF_DTYPE_F32},
                   {"bf16 to f16", KVF_DTYPE_BF16, KVF_DTYPE_F16},
                   {"bf16 to f8_e4m3", KVF_DTYPE_BF16, KVF_DTYPE_F8_E4M3},
                   {"f8_e4m3 to bf16", KVF_DTYPE_F8_E4M3, KVF_DTYPE_BF16},
                   {"f32 to bf16", KVF_DTYPE_F32, KVF_DTYPE_BF16}};

static uint64_t bytes_as(const struct conversion *of, uint64_t from_bytes) {
    return from_bytes * kvf_dtype_bits(of->to) / kvf_dtype_bits(of->from);
}

/* Gathers all cells of a cache in HEADS_FIRST. */
static double convert_ns(const struct conversion *of, const bench_shape *s) {
    const uint64_t elements = s->run * 8 / kvf_dtype_bits(of->from);
    const kvf_box pages = bench_pages_of(s, HEADS_FIRST, bench_gpu.memory[HEADS_FIRST]);
    const kvf_device_side from = {.pages = &pages, .type = of->from};
    const kvf_device_side to = {.packed = bench_gpu.memory[PACKED], .type = of->to};
    return bench_sides_ns(bench_gpu.copiers[BENCH_CAPS - 1], s, from, to, elements);
}

/* The cells of every 7th token that are not as the host converts them. */
static uint64_t count_wrong(const struct conversion *of, const bench_shape *s) {
    const uint64_t cell = bytes_as(of, s->run), all = bytes_as(of, bench_shape_bytes(s));
    unsigned char *given = bench_alloc(bench_shape_span(s), 1), *expected = bench_alloc(cell, 1);
    uint64_t wrong = 0;
    bench_cells_write(s, HEADS_FIRST, given);
    bench_driver(bench_gpu.cuda->cuMemcpyAsync((CUdeviceptr)(uintptr_t)bench_gpu.seen,
                                               bench_gpu.memory[PACKED], all, bench_gpu.stream),
                 "looking at converted cells");
    bench_stream_wait();
    for (uint32_t token = 0; token < s->tokens; token += CHECKED_EACH)
        for (uint32_t head = 0; head < HEADS; head++) {
            kvf_convert_plain.convert(of->from, of->to, given + bench_place_of(s, HEADS_FIRST, token, head),
                                      expected, s->run * 8 / kvf_dtype_bits(of->from), false);
            wrong += memcmp(bench_gpu.seen + (token * HEADS + head) * cell, expected, cell) != 0;
        }
    free(given);
    free(expected);
    return wrong;
}

static void verify(const struct conversion *of, const bench_shape *s) {
    bench_driver(bench_gpu.cuda->cuMemsetD8Async(bench_gpu.memory[PACKED], 0,
                                                 bytes_as(of, bench_shape_bytes(s)), bench_gpu.stream),
                 "clearing converted cells");
    bench_stream_wait();
    bench_require(count_wrong(of, s) > 0, "the control: cleared memory is taken for converted cells");
    (void)convert_ns(of, s);
    bench_gpu.spoiled = bench_gpu.spoiled || count_wrong(of, s) > 0;
}

static void row(bench_report *report, const struct conversion *of, uint64_t run) {
    double copies[ROUNDS_MAX], taken[ROUNDS_MAX];
    bench_shape s = bench_shape_of(run, bench_gpu.bytes / 2); /* converted cells have up to twice the bytes */
    const uint64_t touched = bench_shape_bytes(&s) + bytes_as(of, bench_shape_bytes(&s));
    const bench_shape copied = {.run = touched / 2 / HEADS, .tokens = 1};
    bench_cells_fill(&s, HEADS_FIRST);
    for (uint32_t round = 0; round < bench_gpu.rounds; round++) {
        copies[round] = bench_copy_ns(&copied, TOKENS_FIRST, PACKED);
        taken[round] = convert_ns(of, &s);
    }
    verify(of, &s);
    bench_text(report, of->name);
    bench_text(report, bench_bytes(run));
    bench_beside_copies(report, (double)bench_shape_bytes(&copied), copies, taken);
    free(s.ids);
}

void bench_converted(bench_report *report) {
    bench_table(report, "Gather within the device, with other elements",
                (const char *[]){"elements", "run read", "copy GB/s", "GB/s", "lowest", "highest",
                                 "share of a copy", NULL});
    for (size_t i = 0; i < sizeof conversions / sizeof *conversions; i++)
        for (uint64_t run = SHORTEST; run <= LONGEST / 4; run *= 4)
            row(report, &conversions[i], run);
    bench_note(report, "GB/s: half of the bytes that are read and written, as of a copy.");
}
