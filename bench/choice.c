/*
 * Whether the way that a stage chooses is the better one, and whether predictions hold: requests of many lengths of runs
 * and many sizes, in an order at random, between two processes, over each fabric; direct, packed and chosen in turns.
 *
 * One model has a group for each length of runs, so that one stage and one peer see them all, and what is learned from
 * some is what others are predicted from. The ranks keep heads and tokens in other orders (NHD and HND): a run is one
 * head of one token. Every cell is compared before anything is measured.
 *
 *     bench/choice [--json FILE]
 *
 * A point is a length and a size. A choice is right where the way that was chosen takes at most a tenth longer than the
 * other, by the medians of all rounds. An error is |predicted / taken - 1|, of a move that was told its way. The first
 * round is shown by itself: nothing was learned of that point then.
 */
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kvferry/stage.h>

#include "report.h"

#define HEADS 2u
#define ROUNDS 6u /* the first shows what is predicted of what was never seen */
#define SPINS 2000
#define BLOCK_TOKENS 16u
#define ALLOWED_LOSS 1.1
#define WANTED_RIGHT 0.95
#define WANTED_ERROR 0.25

static const uint64_t run_bytes[] = {128, 512, 2048, 8192, 32768, 131072, 1u << 20};
#define LENGTHS (sizeof run_bytes / sizeof *run_bytes)
static const uint64_t sizes[] = {64u << 10, 1u << 20, 8u << 20};
#define SIZES (sizeof sizes / sizeof *sizes)

typedef struct route {
    const char *title, *kind, *tls;
    bool brought; /* memory that the library did not allocate */
    bool push;    /* this process holds the cells and writes; else it reads */
} route;

static const route routes[] = {
    {"Pulled on one host: memory that the library allocated", "shm", NULL, false, false},
    {"Pulled on one host: memory that was brought", "shm", NULL, true, false},
    {"Pulled by messages on loopback", "messages", NULL, false, false},
    {"Pulled by UCX over TCP on loopback", "ucx", "tcp,self", false, false},
    {"Pushed by UCX over TCP on loopback", "ucx", "tcp,self", false, true},
};
#define ROUTES (sizeof routes / sizeof *routes)

static void must(kvf_status status) {
    if (status)
        (void)fprintf(stderr, "%s: %s\n", kvf_status_name(status), kvf_error_detail());
    bench_require(status == KVF_OK, "a call of the library failed");
}

/* ---- both ends ------------------------------------------------------------------------------- */

typedef struct end {
    kvf_engine *engine;
    kvf_transport *transport;
    kvf_stage *stage;
    kvf_peer *peer;
    unsigned char *memory[LENGTHS];
} end;

static uint64_t token_bytes(size_t length) {
    return (uint64_t)2 * HEADS * run_bytes[length];
}

static uint64_t most_tokens(size_t length) {
    const uint64_t tokens = sizes[SIZES - 1] / token_bytes(length);
    return tokens > 0 ? tokens : 1;
}

static uint32_t block_count(size_t length) {
    return (uint32_t)((most_tokens(length) + BLOCK_TOKENS - 1) / BLOCK_TOKENS);
}

/* Group g has layer g alone. */
static kvf_engine *make_engine(bool holds) {
    kvf_part_desc parts[LENGTHS][2];
    kvf_group_desc groups[LENGTHS];
    kvf_group_spec specs[LENGTHS];
    uint32_t layers[LENGTHS];
    char names[LENGTHS][16];
    for (uint32_t g = 0; g < LENGTHS; g++) {
        for (int p = 0; p < 2; p++)
            parts[g][p] = (kvf_part_desc){.name = p ? "v" : "k",
                                          .dtype = KVF_DTYPE_BF16,
                                          .units = HEADS,
                                          .cell_elements = (uint32_t)(run_bytes[g] / 2)};
        layers[g] = g;
        (void)snprintf(names[g], sizeof names[g], "runs_%u", g);
        groups[g] = (kvf_group_desc){
            .name = names[g], .layers = &layers[g], .layer_count = 1, .parts = parts[g], .part_count = 2};
        specs[g] = (kvf_group_spec){.tokens_per_block = BLOCK_TOKENS,
                                    .block_count = block_count(g),
                                    .order = holds ? "L|BPHN" : "L|BPNH"};
    }
    const kvf_model_desc desc = {
        .struct_size = sizeof desc, .layer_count = LENGTHS, .groups = groups, .group_count = LENGTHS};
    const kvf_engine_spec spec = {.struct_size = sizeof spec, .groups = specs};
    kvf_model *model = NULL;
    kvf_engine *engine = NULL;
    must(kvf_model_create(&desc, &model));
    must(kvf_engine_build(model, &spec, &engine));
    kvf_model_free(model);
    return engine;
}

static void on_notify(void *context, kvf_transport *transport, const char *sender, const void *data,
                      size_t bytes) {
    (void)transport;
    (void)kvf_stage_notice(((end *)context)->stage, sender, data, bytes);
}

static void on_event(void *context, const char *peer, kvf_status status, const char *text) {
    (void)context;
    (void)fprintf(stderr, "%s: %s: %s\n", peer, kvf_status_name(status), text);
}

static void open_end(end *e, const route *by, const char *name, bool holds) {
    const kvf_setting setting = {"ucx.tls", by->tls};
    const kvf_transport_options options = {.struct_size = sizeof options,
                                           .name = name,
                                           .settings = &setting,
                                           .setting_count = by->tls ? 1 : 0,
                                           .on_notify = on_notify,
                                           .context = e};
    const kvf_stage_options stage = {.struct_size = sizeof stage, .on_event = on_event};
    e->engine = make_engine(holds);
    must(kvf_transport_open(by->kind, &options, &e->transport));
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(e->engine, 0));
    bench_require(shard->region_count == LENGTHS, "one region a layer");
    kvf_memory regions[LENGTHS];
    for (uint32_t i = 0; i < LENGTHS; i++) {
        void *memory =
            by->brought ? aligned_alloc(4096, (shard->region_bytes[i] + 4095) / 4096 * 4096) : NULL;
        if (!by->brought)
            must(kvf_transport_allocate(e->transport, KVF_MEMORY_HOST, 0, shard->region_bytes[i], &memory));
        bench_require(memory != NULL, "there is no memory");
        e->memory[i] = memory;
        regions[i] = (kvf_memory){
            .struct_size = sizeof(kvf_memory), .address = memory, .bytes = shard->region_bytes[i]};
    }
    must(kvf_transport_register(e->transport, regions, LENGTHS));
    must(kvf_stage_open(e->transport, kvf_engine_shard(e->engine, 0), &stage, &e->stage));
}

static void exchange_cards(end *e, int line) {
    static unsigned char theirs[65536];
    const void *card;
    size_t bytes;
    must(kvf_transport_export(e->transport, &card, &bytes));
    bench_require(send(line, card, bytes, 0) == (ssize_t)bytes, "the card could not be sent");
    ssize_t got = recv(line, theirs, sizeof theirs, 0);
    bench_require(got > 0, "no card came");
    must(kvf_transport_connect(e->transport, theirs, (size_t)got, &e->peer));
    must(kvf_stage_join(e->stage, e->peer));
}

static void close_end(const end *e, bool brought) {
    kvf_stage_close(e->stage);
    kvf_transport_close(e->transport);
    kvf_engine_free(e->engine);
    for (uint32_t i = 0; i < LENGTHS && brought; i++)
        free(e->memory[i]);
}

static void work(const end *e, unsigned *idle) {
    bool moving, staging;
    must(kvf_transport_progress(e->transport, &moving));
    must(kvf_stage_progress(e->stage, &staging));
    *idle = moving || staging ? 0 : *idle + 1;
}

/* Sleeps where there has been nothing to do for a while. False: something came by `line`. */
static bool nap(const end *e, unsigned idle, int line) {
    if (idle < SPINS)
        return true;
    struct pollfd fds[2] = {{kvf_transport_event_fd(e->transport), POLLIN, 0}, {line, POLLIN, 0}};
    (void)poll(fds, 2, 100);
    return fds[1].revents == 0;
}

/* ---- cells ----------------------------------------------------------------------------------- */

/* From the last block back to the first: none follows the one before it in memory. */
static uint32_t block_of(size_t length, uint64_t token) {
    return block_count(length) - 1 - (uint32_t)(token / BLOCK_TOKENS);
}

static bool cells_are(const end *e, bool fill) {
    for (uint32_t g = 0; g < LENGTHS; g++)
        for (uint32_t part = 0; part < 2; part++)
            for (uint64_t token = 0; token < most_tokens(g); token++)
                for (uint32_t head = 0; head < HEADS; head++) {
                    kvf_cell_location at = {.struct_size = sizeof at};
                    must(kvf_shard_locate(kvf_engine_shard(e->engine, 0), g, 0, part, block_of(g, token),
                                          (uint32_t)(token % BLOCK_TOKENS), head, &at));
                    unsigned char *cell = e->memory[at.region] + at.offset;
                    const uint64_t seed =
                        (((token * 2 + head) * 2 + part) * LENGTHS + g) * 0x9e3779b97f4a7c15u;
                    for (uint64_t i = 0; i < at.bytes; i += 8) {
                        const uint64_t word = (seed ^ i) * 0xbf58476d1ce4e5b9u;
                        if (fill)
                            memcpy(cell + i, &word, 8);
                        else if (memcmp(cell + i, &word, 8) != 0)
                            return false;
                    }
                }
    return true;
}

static void spoil(const end *e) {
    for (uint32_t g = 0; g < LENGTHS; g++)
        memset(e->memory[g], 0x5a, kvf_shard_get(kvf_engine_shard(e->engine, 0))->region_bytes[g]);
}

/* ---- the other process ----------------------------------------------------------------------- */

/* 's': spoil your cells; 'c': are they right? */
static _Noreturn void be_other(const route *by, int line) {
    end e = {0};
    unsigned idle = 0;
    char word;
    /* It opens the fabric only when its turn comes, and ends with the benchmark at the latest. */
    if (recv(line, &word, 1, 0) != 1)
        _exit(0);
    open_end(&e, by, "other", !by->push);
    if (!by->push)
        (void)cells_are(&e, true);
    exchange_cards(&e, line);
    for (;;) {
        do
            work(&e, &idle);
        while (nap(&e, idle, line));
        if (recv(line, &word, 1, 0) != 1)
            break;
        idle = 0;
        if (word == 's')
            spoil(&e);
        else
            word = cells_are(&e, false) ? 'y' : 'n';
        bench_require(send(line, &word, 1, 0) == 1, "the other process is gone");
    }
    close_end(&e, by->brought);
    _exit(0);
}

/* ---- moving ---------------------------------------------------------------------------------- */

typedef struct point {
    size_t length;
    uint64_t tokens, bytes;
    double took[3][ROUNDS];      /* ns, by kvf_way; [KVF_WAY_AUTO]: chosen */
    double predicted[3][ROUNDS]; /* of the way that was gone */
    bool packed[ROUNDS];         /* what was chosen */
} point;

typedef struct mover {
    end end;
    const route *by;
    int line;
    pid_t other;
    kvf_engine *theirs;
    kvf_plan *plan;
    kvf_request *request;
    uint32_t *ids[LENGTHS];
    point points[LENGTHS * SIZES];
    uint32_t point_count;
} mover;

/* Before this process opens UCX, which does not outlive a fork. */
static void start_other(mover *m, const route *by) {
    int lines[2];
    bench_require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, lines) == 0, "no socket pair");
    m->by = by;
    m->other = fork();
    bench_require(m->other >= 0, "no process");
    if (m->other == 0) {
        (void)close(lines[0]);
        be_other(by, lines[1]);
    }
    (void)close(lines[1]);
    m->line = lines[0];
}

static void make_points(mover *m) {
    for (size_t length = 0; length < LENGTHS; length++)
        for (size_t size = 0; size < SIZES; size++)
            if (sizes[size] >= token_bytes(length)) {
                point *p = &m->points[m->point_count++];
                p->length = length;
                p->tokens = sizes[size] / token_bytes(length);
            }
}

static void open_mover(mover *m) {
    const bool push = m->by->push;
    bench_require(send(m->line, "g", 1, 0) == 1, "the other process is gone");
    open_end(&m->end, m->by, "mover", push);
    if (push)
        (void)cells_are(&m->end, true);
    exchange_cards(&m->end, m->line);
    m->theirs = make_engine(!push);
    must(kvf_plan_build(kvf_engine_shard(push ? m->theirs : m->end.engine, 0),
                        push ? m->end.engine : m->theirs, NULL, &m->plan));
    must(kvf_request_create(m->plan, &m->request));
    for (size_t g = 0; g < LENGTHS; g++) {
        m->ids[g] = bench_alloc(block_count(g), sizeof **m->ids);
        for (uint32_t i = 0; i < block_count(g); i++)
            m->ids[g][i] = block_of(g, (uint64_t)i * BLOCK_TOKENS);
    }
    make_points(m);
}

static void close_mover(mover *m) {
    (void)shutdown(m->line, SHUT_RDWR);
    (void)waitpid(m->other, NULL, 0);
    (void)close(m->line);
    kvf_request_free(m->request);
    kvf_plan_free(m->plan);
    kvf_engine_free(m->theirs);
    for (size_t g = 0; g < LENGTHS; g++)
        free(m->ids[g]);
    close_end(&m->end, m->by->brought);
}

/* The first tokens of the groups from one length on to before another. */
static void set_request(mover *m, size_t begin, size_t behind, uint64_t tokens) {
    kvf_group_request groups[LENGTHS] = {0};
    for (size_t g = begin; g < behind; g++) {
        const uint64_t count = tokens ? tokens : most_tokens(g);
        const uint32_t blocks = (uint32_t)((count + BLOCK_TOKENS - 1) / BLOCK_TOKENS);
        groups[g] = (kvf_group_request){{m->ids[g], blocks, 0}, {m->ids[g], blocks, 0}, 0, count};
    }
    must(kvf_request_set(m->request, groups, LENGTHS));
}

/* Nanoseconds. */
static double move(const mover *m, kvf_way way, kvf_move_info *info) {
    const kvf_move_options options = {.struct_size = sizeof options, .way = way};
    kvf_move *moving = NULL;
    kvf_status status;
    unsigned idle = 0;
    const uint64_t begin = bench_now_ns();
    if (m->by->push)
        must(kvf_stage_push(m->end.stage, m->request, 0, m->end.peer, &options, &moving));
    else
        must(kvf_stage_pull(m->end.stage, m->request, &m->end.peer, &options, &moving));
    for (;;) {
        work(&m->end, &idle);
        if ((status = kvf_move_status(moving)) != KVF_IN_PROGRESS)
            break; /* what work() brought to its end wakes nobody */
        (void)nap(&m->end, idle, -1);
    }
    const double ns = (double)(bench_now_ns() - begin);
    must(status);
    must(kvf_move_get_info(moving, info));
    kvf_move_free(moving);
    return ns;
}

static char ask(const mover *m, char word) {
    bench_require(send(m->line, &word, 1, 0) == 1 && recv(m->line, &word, 1, 0) == 1,
                  "the other process is gone");
    return word;
}

/* Until flows that are over have been said to be. */
static void settle(const mover *m) {
    kvf_stage_info info = {.struct_size = sizeof info};
    unsigned idle = 0;
    do {
        work(&m->end, &idle);
        must(kvf_stage_get_info(m->end.stage, &info));
    } while (info.flows > 0);
}

/* All cells, by each way, where others were before. */
static void verify(mover *m) {
    for (int way = KVF_WAY_DIRECT; way <= KVF_WAY_PACKED; way++) {
        kvf_move_info info = {.struct_size = sizeof info};
        if (m->by->push)
            (void)ask(m, 's');
        else
            spoil(&m->end);
        bench_require(m->by->push ? ask(m, 'c') == 'n' : !cells_are(&m->end, false),
                      "cells are right before they were moved");
        set_request(m, 0, LENGTHS, 0);
        (void)move(m, (kvf_way)way, &info);
        bench_require(m->by->push ? ask(m, 'c') == 'y' : cells_are(&m->end, false),
                      "a cell has other bytes than its holder's");
    }
    settle(m);
    kvf_stage_leave(m->end.stage, m->end.peer); /* what that took is not to be known */
    must(kvf_stage_join(m->end.stage, m->end.peer));
}

static void try_point(mover *m, point *p, uint32_t round) {
    set_request(m, p->length, p->length + 1, p->tokens);
    p->bytes = kvf_request_bytes(m->request, 0);
    for (int i = 0; i < 3; i++) {
        const kvf_way way = (kvf_way)((i + (int)round) % 3);
        kvf_move_info info = {.struct_size = sizeof info};
        p->took[way][round] = move(m, way, &info);
        p->predicted[way][round] = info.packed ? info.packed_ns : info.direct_ns;
        if (way == KVF_WAY_AUTO)
            p->packed[round] = info.packed > 0;
    }
}

static void try_all(mover *m) {
    uint32_t *order = bench_shuffled(m->point_count);
    for (uint32_t round = 0; round < ROUNDS; round++)
        for (uint32_t i = 0; i < m->point_count; i++)
            try_point(m, &m->points[order[(i + round * 7) % m->point_count]], round);
    free(order);
}

/* ---- judging --------------------------------------------------------------------------------- */

typedef struct verdict {
    uint32_t points, right;                               /* after the first round */
    uint32_t first_right;                                 /* in it */
    double errors[2 * LENGTHS * SIZES * ROUNDS * ROUTES]; /* after the first round */
    size_t error_count;
    double first_errors[2 * LENGTHS * SIZES * ROUTES];
    size_t first_count;
} verdict;

static double median_of(const double *values, size_t count) {
    double sorted[ROUNDS];
    memcpy(sorted, values, count * sizeof *values);
    return bench_spread_of(sorted, count).median;
}

static void judge(bench_report *report, const point *p, verdict *v) {
    const double direct = median_of(p->took[KVF_WAY_DIRECT], ROUNDS);
    const double packed = median_of(p->took[KVF_WAY_PACKED], ROUNDS);
    const double better = fmin(direct, packed);
    const bool last = p->packed[ROUNDS - 1];
    const double loss = (last ? packed : direct) / better;
    double errors[2 * ROUNDS];
    size_t count = 0;
    for (int way = KVF_WAY_DIRECT; way <= KVF_WAY_PACKED; way++) {
        v->first_errors[v->first_count++] = fabs(p->predicted[way][0] / p->took[way][0] - 1);
        for (uint32_t round = 1; round < ROUNDS; round++)
            errors[count++] = fabs(p->predicted[way][round] / p->took[way][round] - 1);
    }
    memcpy(v->errors + v->error_count, errors, count * sizeof *errors);
    v->error_count += count;
    v->points++;
    v->right += loss <= ALLOWED_LOSS;
    v->first_right += (p->packed[0] ? packed : direct) / better <= ALLOWED_LOSS;
    bench_text(report, bench_bytes(run_bytes[p->length]));
    bench_text(report, bench_bytes(p->bytes));
    bench_number(report, 0, direct / 1e3);
    bench_number(report, 0, packed / 1e3);
    bench_text(report, last ? "packed" : "direct");
    bench_number(report, 2, loss);
    bench_text(report, p->packed[0] ? "packed" : "direct");
    bench_number(report, 2, bench_spread_of(errors, count).median);
}

static void say(bench_report *report, verdict *v) {
    char line[200];
    const double right = (double)v->right / v->points;
    const double error = bench_spread_of(v->errors, v->error_count).median;
    (void)snprintf(line, sizeof line,
                   "right at %.0f%% of %u points, at first %.0f%%; median error %.2f, at first %.2f",
                   100 * right, v->points, 100.0 * v->first_right / v->points, error,
                   bench_spread_of(v->first_errors, v->first_count).median);
    bench_note(report, line);
}

static bool has_kind(const char *wanted) {
    const char *kind;
    for (uint32_t i = 0; (kind = kvf_transport_kind_name(i)); i++)
        if (strcmp(kind, wanted) == 0)
            return true;
    return false;
}

int main(int argc, char **argv) {
    bench_report *report = bench_report_start("choice", argc, argv);
    static mover movers[ROUTES];
    static verdict each, all;
    for (size_t r = 0; r < ROUTES; r++)
        if (has_kind(routes[r].kind))
            start_other(&movers[r], &routes[r]);
    for (size_t r = 0; r < ROUTES; r++) {
        mover *m = &movers[r];
        if (!m->by)
            continue;
        bench_table(report, m->by->title,
                    (const char *[]){"run", "bytes", "direct us", "packed us", "chosen", "of the better",
                                     "chosen at first", "error", NULL});
        open_mover(m);
        verify(m);
        try_all(m);
        each = (verdict){0};
        for (uint32_t i = 0; i < m->point_count; i++) {
            judge(report, &m->points[i], &each);
        }
        memcpy(all.errors + all.error_count, each.errors, each.error_count * sizeof *each.errors);
        memcpy(all.first_errors + all.first_count, each.first_errors,
               each.first_count * sizeof *each.first_errors);
        all.error_count += each.error_count;
        all.first_count += each.first_count;
        all.points += each.points;
        all.right += each.right;
        all.first_right += each.first_right;
        say(report, &each);
        close_mover(m);
    }
    bench_table(report, "All of them", (const char *[]){"points", "right", "median error", NULL});
    bench_number(report, 0, all.points);
    const double right = (double)all.right / all.points;
    bench_number(report, 2, right);
    const double error = bench_spread_of(all.errors, all.error_count).median;
    bench_number(report, 2, error);
    say(report, &all);
    if (right < WANTED_RIGHT)
        bench_fail(report, "a choice is to be right at 95% of the points");
    if (error > WANTED_ERROR)
        bench_fail(report, "the median error of predictions is to be at most 0.25");
    return bench_report_end(report);
}
