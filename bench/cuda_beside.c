/*
 * How much a product of matrices is slowed down by the copy engine that gathers beside it on a stream of its own: as
 * fast as it can, with several fixed numbers of blocks of threads and with as many as cuda/grid.h gives by default; and
 * by default as fast as a link of 400 Gbit/s takes the bytes.
 */
#include <stdlib.h>

#include "cuda_product.h"

#define LINK_BYTES_PER_NS 50.0
#define FAST_PARTS 4u   /* jobs that last much longer than the host needs to start the next one */
#define PACED_PARTS 16u /* a link takes small pieces */
#define JOBS 2u         /* while one runs, the next is ready */

/* ---- the copy engine beside it ------------------------------------------------------------------------- */

/* Gathers a cache again and again, in jobs of some of its blocks. */
typedef struct load {
    const char *blocks; /* of threads, as shown */
    kvf_copier *copier;
    const bench_shape *shape;
    kvf_device_table table;
    uint32_t parts; /* a cache is as many jobs */
    bool paced;
    uint64_t due_ns; /* a paced job starts no earlier */
    kvf_copy_job *jobs[JOBS];
    uint64_t bytes[JOBS]; /* of each job */
    uint64_t started, ended, moved_bytes;
    uint64_t first_ended_ns, last_ended_ns;
} load;

/* A part has whole blocks. */
static uint32_t first_block(const load *l, uint64_t part) {
    return (uint32_t)(part * l->shape->blocks / l->parts);
}

static void start_job(load *l) {
    const uint64_t part = l->started % l->parts;
    const uint32_t block = first_block(l, part), token = block * (uint32_t)ROWS;
    const uint32_t end = (uint32_t)kvf_min_u64(first_block(l, part + 1) * (uint64_t)ROWS, l->shape->tokens);
    kvf_box pages = bench_pages_of(l->shape, HEADS_FIRST, bench_gpu.memory[HEADS_FIRST]);
    const kvf_device_side from = {
        .pages = &pages, .table = l->table.address, .table_on_host = l->table.on_host};
    const uint64_t token_bytes = HEADS * l->shape->run;
    const kvf_device_side to = {.packed = bench_gpu.memory[PACKED] + token * token_bytes};
    kvf_copy_job **job = &l->jobs[l->started % JOBS];
    pages.blocks += block;
    pages.rows = end - token;
    bench_must(kvf_copier_begin(l->copier, job));
    bench_must(kvf_copy_job_add(*job, &from, &to, end - token, HEADS, l->shape->run));
    bench_must(kvf_copy_job_start(*job, NULL));
    l->bytes[l->started++ % JOBS] = (end - token) * token_bytes;
}

/* Whether to start a job now. A paced one is then due again after its time on the link, counted from when it was due:
 * after that it may catch up, but by one job only. */
static bool comes_due(load *l) {
    const uint64_t now = bench_now_ns();
    if (!l->paced)
        return true;
    if (now < l->due_ns)
        return false;
    const double job_bytes = (double)bench_shape_bytes(l->shape) / l->parts;
    l->due_ns = kvf_max_u64(l->due_ns + (uint64_t)(job_bytes / LINK_BYTES_PER_NS), now);
    return true;
}

static void poll_oldest(load *l) {
    const kvf_status status = kvf_copy_job_poll(l->jobs[l->ended % JOBS]);
    if (status == KVF_IN_PROGRESS)
        return;
    bench_must(status);
    l->last_ended_ns = bench_now_ns();
    if (l->ended == 0)
        l->first_ended_ns = l->last_ended_ns;
    else
        l->moved_bytes += l->bytes[l->ended % JOBS];
    l->ended++;
}

/* What the host does while the product runs. */
static void keep_busy(load *l) {
    while (l->started - l->ended < JOBS && comes_due(l))
        start_job(l);
    if (l->started > l->ended)
        poll_oldest(l);
}

/* ---- both --------------------------------------------------------------------------------------------- */

/* `copied` receives the rate of the jobs that ended while the product ran, from the end of the one before; 0: none. The
 * cache is gathered at least once, as far as needed without the product, so that it can be checked. */
static double beside_ns(const bench_product *p, load *l, double *copied) {
    l->started = l->ended = l->moved_bytes = l->due_ns = 0;
    while (l->ended == 0)
        keep_busy(l);
    const uint64_t begun = bench_now_ns();
    bench_product_start(p);
    while (bench_product_runs(p))
        keep_busy(l);
    const double taken = (double)(bench_now_ns() - begun);
    *copied = l->moved_bytes ? (double)l->moved_bytes / (double)(l->last_ended_ns - l->first_ended_ns) : 0;
    while (l->started < l->parts)
        keep_busy(l);
    while (l->started > l->ended)
        poll_oldest(l);
    return taken;
}

static void add_row(bench_report *report, const bench_product *p, load *l) {
    double alone[ROUNDS_MAX], beside[ROUNDS_MAX], ratios[ROUNDS_MAX], copied[ROUNDS_MAX];
    const uint32_t rounds = bench_gpu.rounds;
    bench_must(kvf_copier_put_table(l->copier, l->shape->ids, l->shape->blocks, &l->table));
    bench_cells_control(l->shape, PACKED);
    for (uint32_t round = 0; round < rounds; round++) {
        alone[round] = bench_product_ns(p) / BENCH_PRODUCTS;
        beside[round] = beside_ns(p, l, &copied[round]) / BENCH_PRODUCTS;
        ratios[round] = beside[round] / alone[round];
    }
    bench_gpu.spoiled = bench_gpu.spoiled || bench_cells_wrong(l->shape, PACKED) > 0;
    kvf_copier_drop_table(l->copier, &l->table);
    bench_text(report, bench_bytes(l->shape->run));
    bench_text(report, l->blocks);
    bench_number(report, 3, bench_spread_of(alone, rounds).median / 1e6);
    bench_number(report, 3, bench_spread_of(beside, rounds).median / 1e6);
    bench_number(report, 1, (bench_spread_of(ratios, rounds).median - 1) * 100);
    bench_number(report, 1, bench_spread_of(copied, rounds).median);
}

static uint32_t parts_of(const bench_shape *s, uint32_t wanted) {
    return wanted < s->blocks ? wanted : s->blocks;
}

static void measure(bench_report *report, const bench_product *p, uint64_t run) {
    static const char *const names[BENCH_CAPS] = {"4", "8", "16", "32", "all SMs"};
    bench_shape s = bench_shape_of(run, bench_gpu.bytes);
    const kvf_copier_options options = {.jobs = JOBS, .boxes = LAYERS};
    load waiting = {.blocks = "default", .shape = &s, .parts = parts_of(&s, FAST_PARTS)},
         paced = {.blocks = "default, paced", .shape = &s, .parts = parts_of(&s, PACED_PARTS), .paced = true};
    bench_cells_fill(&s, HEADS_FIRST);
    for (size_t cap = 0; cap < BENCH_CAPS; cap++) {
        load fast = {.blocks = names[cap],
                     .copier = bench_gpu.copiers[cap],
                     .shape = &s,
                     .parts = parts_of(&s, FAST_PARTS)};
        if (fast.copier)
            add_row(report, p, &fast);
    }
    bench_must(kvf_copier_open(0, &options, &paced.copier));
    waiting.copier = paced.copier;
    add_row(report, p, &waiting);
    add_row(report, p, &paced);
    bench_must(kvf_copier_close(paced.copier));
    free(s.ids);
}

void bench_beside(bench_report *report) {
    bench_product p;
    if (!bench_product_open(report, &p))
        return;
    bench_table(
        report,
        "A product of two matrices of 8192 x 8192 in bf16, alone and beside a gather within the device",
        (const char *[]){"run", "blocks", "alone ms", "beside ms", "slowdown %", "copied GB/s", NULL});
    measure(report, &p, 256);
    measure(report, &p, 2048);
    bench_note(report, "\"paced\": at 50 GB/s, as a link of 400 Gbit/s takes the bytes.");
    bench_product_close(&p);
}
