/*
 * Whether a stage chooses the better way, and whether its predictions hold: requests of many run lengths and sizes, in
 * random order, between two processes, over each fabric; direct, packed and chosen in turns.
 *
 * One model has a group for each run length, so that one stage and one peer see them all, and measurements of some
 * predict others. The ranks keep heads and tokens in different orders (NHD and HND): a run is one head of one token.
 * Every cell is compared before any measurement.
 *
 *     bench/choice [--json FILE]
 *
 * A point is a length and a size. A choice is right if the chosen way takes at most a tenth longer than the other, by
 * the median over the rounds of the ratio of the two, which took turns. An error is |predicted / taken - 1|, of a move
 * whose way was given: compared with its own duration, and with the median of such moves over all rounds, because
 * single moves vary. The first round is shown separately: the stage had learned nothing about the point then.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stage_pair.h"

#define ROUNDS 8u /* the first shows predictions without measurements of the point */
#define SPINS 2000
#define ALLOWED_LOSS 1.1
#define WANTED_RIGHT 0.95
#define WANTED_ERROR 0.25

#define LENGTHS 7u
static const uint64_t run_bytes[LENGTHS] = {128, 512, 2048, 8192, 32768, 131072, 1u << 20};
static const uint64_t sizes[] = {64u << 10, 1u << 20, 8u << 20};
#define SIZES (sizeof sizes / sizeof *sizes)

static const bench_route routes[] = {
    {.title = "Pulled on one host: memory that the library allocated", .kind = "shm", .spins = SPINS},
    {.title = "Pulled on one host: memory that was brought", .kind = "shm", .brought = true, .spins = SPINS},
    {.title = "Pulled by messages on loopback", .kind = "messages", .spins = SPINS},
    {.title = "Pulled by UCX over TCP on loopback", .kind = "ucx", .tls = "tcp,self", .spins = SPINS},
    {.title = "Pushed by UCX over TCP on loopback",
     .kind = "ucx",
     .tls = "tcp,self",
     .push = true,
     .spins = SPINS},
    {.title = "Pulled on one host: keys channel by channel, memory that the library allocated",
     .kind = "shm",
     .spins = SPINS,
     .channels = true},
    {.title = "Pulled by messages on loopback: keys channel by channel",
     .kind = "messages",
     .spins = SPINS,
     .channels = true},
};
#define ROUTES (sizeof routes / sizeof *routes)

/* ---- points ---------------------------------------------------------------------------------- */

typedef struct point {
    uint32_t length;
    uint64_t tokens, bytes;
    double took[3][ROUNDS];      /* ns, by kvf_way; [KVF_WAY_AUTO]: chosen */
    double predicted[3][ROUNDS]; /* for the way that was taken */
    bool packed[ROUNDS];         /* whether the stage chose packed */
} point;

typedef struct sweep {
    bench_pair pair;
    point points[LENGTHS * SIZES];
    uint32_t point_count;
} sweep;

static bench_cells make_cells(void) {
    bench_cells cells = {.groups = LENGTHS, .layers = 1};
    for (uint32_t g = 0; g < LENGTHS; g++) {
        cells.run_bytes[g] = run_bytes[g];
        cells.tokens[g] = sizes[SIZES - 1] / bench_token_bytes(&cells, g);
    }
    return cells;
}

static void make_points(sweep *s) {
    for (uint32_t length = 0; length < LENGTHS; length++) {
        const uint64_t token = bench_token_bytes(&s->pair.cells, length);
        for (size_t size = 0; size < SIZES; size++)
            if (sizes[size] >= token)
                s->points[s->point_count++] = (point){.length = length, .tokens = sizes[size] / token};
    }
}

/* ---- moving ---------------------------------------------------------------------------------- */

/* Compares all cells, by each way; the stage must then forget these measurements. */
static void verify(bench_pair *pair) {
    bench_pair_verify(pair, KVF_WAY_DIRECT);
    bench_pair_verify(pair, KVF_WAY_PACKED);
    bench_pair_settle(pair);
    kvf_stage_leave(pair->end.stage, pair->end.peer);
    bench_must(kvf_stage_join(pair->end.stage, pair->end.peer));
}

static void try_point(bench_pair *pair, point *p, uint32_t round) {
    p->bytes = bench_pair_ask_for(pair, p->length, p->length + 1, p->tokens);
    for (int i = 0; i < 3; i++) {
        const kvf_way way = (kvf_way)((i + (int)round) % 3);
        kvf_move_info info = {.struct_size = sizeof info};
        p->took[way][round] = bench_pair_move(pair, way, &info);
        p->predicted[way][round] = info.packed ? info.packed_ns : info.direct_ns;
        if (way == KVF_WAY_AUTO)
            p->packed[round] = info.packed > 0;
    }
}

static void try_all(sweep *s) {
    uint32_t *order = bench_shuffled(s->point_count);
    for (uint32_t round = 0; round < ROUNDS; round++)
        for (uint32_t i = 0; i < s->point_count; i++)
            try_point(&s->pair, &s->points[order[(i + round * 7) % s->point_count]], round);
    free(order);
}

/* ---- judging --------------------------------------------------------------------------------- */

#define MOST_ERRORS ((size_t)2 * LENGTHS * SIZES * ROUNDS * ROUTES)

typedef struct errors {
    double values[MOST_ERRORS];
    size_t count;
} errors;

typedef struct verdict {
    uint32_t points, right; /* by the last round's choice */
    uint32_t first_right;   /* by the first's */
    errors single, median;  /* after the first round: compared with the move, with the median */
    errors first;           /* in the first round, compared with the median */
} verdict;

static void note(errors *to, double predicted, double taken) {
    to->values[to->count++] = fabs(predicted / taken - 1);
}

static double median_of(const double *values, size_t count) {
    static double sorted[MOST_ERRORS];
    memcpy(sorted, values, count * sizeof *values);
    return bench_spread_of(sorted, count).median;
}

static void add(errors *to, const errors *from) {
    memcpy(to->values + to->count, from->values, from->count * sizeof *from->values);
    to->count += from->count;
}

/* The median ratio of packed to direct, which took turns. */
static double ratio_of(const point *p) {
    double ratios[ROUNDS];
    for (uint32_t round = 0; round < ROUNDS; round++)
        ratios[round] = p->took[KVF_WAY_PACKED][round] / p->took[KVF_WAY_DIRECT][round];
    return bench_spread_of(ratios, ROUNDS).median;
}

/* The duration of the chosen way over that of the better one. */
static double loss_of(double ratio, bool packed) {
    return fmax(packed ? ratio : 1 / ratio, 1);
}

static void judge(bench_report *report, const point *p, verdict *v) {
    const double ratio = ratio_of(p);
    const size_t before = v->single.count;
    double usual[3];
    for (int way = KVF_WAY_DIRECT; way <= KVF_WAY_PACKED; way++) {
        usual[way] = median_of(p->took[way], ROUNDS);
        note(&v->first, p->predicted[way][0], usual[way]);
        for (uint32_t round = 1; round < ROUNDS; round++) {
            note(&v->single, p->predicted[way][round], p->took[way][round]);
            note(&v->median, p->predicted[way][round], usual[way]);
        }
    }
    const bool last = p->packed[ROUNDS - 1];
    v->points++;
    v->right += loss_of(ratio, last) <= ALLOWED_LOSS;
    v->first_right += loss_of(ratio, p->packed[0]) <= ALLOWED_LOSS;
    bench_text(report, bench_bytes(run_bytes[p->length]));
    bench_text(report, bench_bytes(p->bytes));
    bench_number(report, 0, usual[KVF_WAY_DIRECT] / 1e3);
    bench_number(report, 0, usual[KVF_WAY_PACKED] / 1e3);
    bench_text(report, last ? "packed" : "direct");
    bench_number(report, 2, loss_of(ratio, last));
    bench_text(report, p->packed[0] ? "packed" : "direct");
    bench_number(report, 2, p->predicted[KVF_WAY_DIRECT][0] / usual[KVF_WAY_DIRECT]);
    bench_number(report, 2, p->predicted[KVF_WAY_PACKED][0] / usual[KVF_WAY_PACKED]);
    bench_number(report, 2, median_of(v->single.values + before, v->single.count - before));
    bench_number(report, 2, median_of(v->median.values + before, v->median.count - before));
}

static void say(bench_report *report, const verdict *v) {
    char line[240];
    (void)snprintf(
        line, sizeof line,
        "right at %.0f%% of %u points, at first %.0f%%; median error %.2f of the median of all rounds, "
        "%.2f of a single move, at first %.2f",
        100.0 * v->right / v->points, v->points, 100.0 * v->first_right / v->points,
        median_of(v->median.values, v->median.count), median_of(v->single.values, v->single.count),
        median_of(v->first.values, v->first.count));
    bench_note(report, line);
}

static void add_verdict(verdict *to, const verdict *from) {
    to->points += from->points;
    to->right += from->right;
    to->first_right += from->first_right;
    add(&to->single, &from->single);
    add(&to->median, &from->median);
    add(&to->first, &from->first);
}

static void try_route(bench_report *report, sweep *s, verdict *all) {
    static verdict each;
    bench_table(report, s->pair.route->title,
                (const char *[]){"run", "bytes", "direct us", "packed us", "chosen", "of the better",
                                 "chosen at first", "direct predicted at first", "packed predicted at first",
                                 "error", "of the median", NULL});
    bench_pair_open(&s->pair);
    verify(&s->pair);
    make_points(s);
    try_all(s);
    each = (verdict){0};
    for (uint32_t i = 0; i < s->point_count; i++)
        judge(report, &s->points[i], &each);
    say(report, &each);
    add_verdict(all, &each);
    bench_pair_close(&s->pair);
}

static void judge_all(bench_report *report, const verdict *all) {
    const double right = (double)all->right / all->points;
    const double median = median_of(all->median.values, all->median.count);
    bench_table(report, "All of them",
                (const char *[]){"points", "right", "right at first", "median error", "of the median", NULL});
    bench_number(report, 0, all->points);
    bench_number(report, 2, right);
    bench_number(report, 2, (double)all->first_right / all->points);
    bench_number(report, 2, median_of(all->single.values, all->single.count));
    bench_number(report, 2, median);
    if (right < WANTED_RIGHT)
        bench_fail(report, "a choice is to be right at 95% of the points");
    if (median > WANTED_ERROR)
        bench_fail(report, "the median error of predictions is to be at most 0.25");
}

int main(int argc, char **argv) {
    bench_report *report = bench_report_start("choice", argc, argv);
    static sweep sweeps[ROUTES];
    static verdict all;
    const bench_cells cells = make_cells();
    for (size_t r = 0; r < ROUTES; r++)
        if (bench_kind(routes[r].kind).name)
            bench_pair_start(&sweeps[r].pair, &routes[r], &cells);
    for (size_t r = 0; r < ROUTES; r++)
        if (sweeps[r].pair.route)
            try_route(report, &sweeps[r], &all);
    judge_all(report, &all);
    return bench_report_end(report);
}
