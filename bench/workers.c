/*
 * How many workers a stage should have: packed requests between two processes, by run length, with 0, 1 and 2 workers
 * at both ends, in turns. On one host, memory that both map is copied in place, without workers, so the routes are
 * those between hosts.
 *
 *     bench/workers [--json FILE]
 *
 * A gain is the median over the rounds of the rate with workers over the rate without, in the same round. Every byte is
 * compared before any measurement. Workers help only where processors are idle: compare the figures with `processors`.
 */
#include <unistd.h>

#include "stage_pair.h"

#define LAYERS 2u
#define REQUEST_BYTES (32ull << 20)
#define ROUNDS 21
#define SPINS 100 /* a side that waits leaves its processor to the workers */
#define COUNTS 3u /* of workers: 0, 1, 2 */

static const bench_route routes[] = {
    {.title = "Pulled by UCX over TCP on loopback", .kind = "ucx", .tls = "tcp,self", .spins = SPINS},
    {.title = "Pushed by UCX over TCP on loopback",
     .kind = "ucx",
     .tls = "tcp,self",
     .push = true,
     .spins = SPINS},
    {.title = "Pulled by messages on loopback", .kind = "messages", .spins = SPINS},
    {.title = "Pushed by messages on loopback", .kind = "messages", .push = true, .spins = SPINS},
};
#define ROUTES (sizeof routes / sizeof *routes)

static const uint64_t run_bytes[] = {256, 4096, 1 << 20};
#define RUN_SIZES (sizeof run_bytes / sizeof *run_bytes)

/* A route with one size of runs, by the number of workers. */
typedef struct trial {
    bench_route routes[COUNTS];
    bench_pair pairs[COUNTS];
} trial;

static void start(trial *t, const bench_route *route, uint64_t run) {
    const bench_cells cells = bench_cells_of(LAYERS, run, REQUEST_BYTES);
    for (uint32_t i = 0; i < COUNTS; i++) {
        t->routes[i] = *route;
        t->routes[i].workers = i;
        bench_pair_start(&t->pairs[i], &t->routes[i], &cells);
    }
}

static void compare(bench_report *report, uint64_t run, bench_pair pairs[COUNTS]) {
    double rates[COUNTS][ROUNDS], seconds[COUNTS][ROUNDS], gains[COUNTS][ROUNDS];
    for (uint32_t i = 0; i < COUNTS; i++) {
        bench_pair_open(&pairs[i]);
        bench_pair_verify(&pairs[i], KVF_WAY_PACKED);
    }
    const double bytes = (double)kvf_request_bytes(pairs[0].request, 0);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t turn = 0; turn < COUNTS; turn++) {
            const uint32_t i = (round + turn) % COUNTS;
            const uint64_t before = bench_pair_processor_ns(&pairs[i]);
            rates[i][round] = bytes / bench_pair_move(&pairs[i], KVF_WAY_PACKED, NULL);
            seconds[i][round] = (double)(bench_pair_processor_ns(&pairs[i]) - before) / bytes;
        }
        for (uint32_t i = 0; i < COUNTS; i++)
            gains[i][round] = rates[i][round] / rates[0][round];
    }
    bench_text(report, bench_bytes(run));
    for (uint32_t i = 0; i < COUNTS; i++)
        bench_number(report, 2, bench_spread_of(rates[i], ROUNDS).median);
    for (uint32_t i = 1; i < COUNTS; i++)
        bench_number(report, 2, bench_spread_of(gains[i], ROUNDS).median);
    for (uint32_t i = 0; i < COUNTS; i++)
        bench_number(report, 2, bench_spread_of(seconds[i], ROUNDS).median);
    bench_number(report, 0, (double)sysconf(_SC_NPROCESSORS_ONLN));
    for (uint32_t i = 0; i < COUNTS; i++)
        bench_pair_close(&pairs[i]);
}

int main(int argc, char **argv) {
    bench_report *report = bench_report_start("workers", argc, argv);
    static trial trials[ROUTES][RUN_SIZES];
    for (size_t r = 0; r < ROUTES; r++)
        for (size_t size = 0; size < RUN_SIZES && bench_kind(routes[r].kind).name; size++)
            start(&trials[r][size], &routes[r], run_bytes[size]);
    for (size_t r = 0; r < ROUTES; r++) {
        if (!bench_kind(routes[r].kind).name)
            continue;
        bench_table(report, routes[r].title,
                    (const char *[]){"run", "0 workers GB/s", "1", "2", "gain of 1", "gain of 2",
                                     "0 workers s/GB", "1 s/GB", "2 s/GB", "processors", NULL});
        for (size_t size = 0; size < RUN_SIZES; size++)
            compare(report, run_bytes[size], trials[r][size].pairs);
        bench_note(report, "s/GB: processor time of both processes");
    }
    return bench_report_end(report);
}
