/*
 * Measures the stage's memory, which must not depend on the bytes it moves: one request of 4 GiB through arenas of
 * 64 MiB, and 10,000 requests one after the other. The tables of the large request name the blocks of both caches many
 * times, so that 4 GiB flow between caches of 64 MiB. A block's number determines its bytes, which are checked.
 *
 * The library's own allocations are counted exactly; resident memory is that of the process.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <kvferry/stage.h>

#include "report.h"

#define LARGE_BYTES (4ull << 30)
#define ARENA_BYTES (64ull << 20)
#define REQUESTS 10000u
#define WARM 1000u /* requests until everything that is kept has been allocated */
#define TOKENS_PER_BLOCK 16u
#define HEADS 8u
#define CELL_BYTES 256u
#define BLOCK_BYTES ((uint64_t)TOKENS_PER_BLOCK * HEADS * CELL_BYTES)
#define BLOCKS 2048u /* 64 MiB */
#define SMALL_BLOCKS 8u

static void require(kvf_status status) {
    bench_require(status == KVF_OK, kvf_error_detail());
}

/* ---- counting --------------------------------------------------------------------------------- */

/* The header in front of each allocation; it keeps the alignment of malloc(). */
typedef union head {
    size_t bytes;
    max_align_t align;
} head;

static struct { uint64_t now, most, calls; } held;

static void *count_allocate(void *context, size_t bytes) {
    (void)context;
    head *made = malloc(sizeof *made + bytes);
    if (!made)
        return NULL;
    made->bytes = bytes;
    held.now += bytes;
    held.most = held.now > held.most ? held.now : held.most;
    held.calls++;
    return made + 1;
}

static void count_release(void *context, void *memory) {
    (void)context;
    if (!memory)
        return;
    head *made = (head *)memory - 1;
    held.now -= made->bytes;
    free(made);
}

static void *count_resize(void *context, void *memory, size_t bytes) {
    void *made = count_allocate(context, bytes);
    if (made && memory) {
        const size_t had = ((head *)memory - 1)->bytes;
        memcpy(made, memory, had < bytes ? had : bytes);
        count_release(context, memory);
    }
    return made;
}

static double resident_mib(void) {
    char line[256] = "";
    FILE *file = fopen("/proc/self/statm", "r");
    const char *read = file ? fgets(line, sizeof line, file) : NULL;
    const char *second = read ? strchr(read, ' ') : NULL;
    if (file)
        (void)fclose(file);
    bench_require(second != NULL, "/proc/self/statm cannot be read");
    const uint64_t pages = second ? strtoull(second, NULL, 10) : 0;
    return (double)pages * (double)sysconf(_SC_PAGESIZE) / (1 << 20);
}

/* ---- two ranks -------------------------------------------------------------------------------- */

typedef struct end {
    kvf_transport *transport;
    kvf_stage *stage;
    kvf_engine *engine;
    kvf_peer *peer; /* the other end */
    unsigned char *cells;
} end;

static void on_notify(void *context, kvf_transport *transport, const char *sender, const void *data,
                      size_t bytes) {
    (void)transport;
    (void)kvf_stage_notice(((end *)context)->stage, sender, data, bytes);
}

static void open_end(end *e, const kvf_model *model, const char *name, const char *order) {
    const kvf_engine_spec spec = {
        .struct_size = sizeof spec,
        .name = name,
        .tp_size = 1,
        .all = {.tokens_per_block = TOKENS_PER_BLOCK, .block_count = BLOCKS, .order = order}};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .name = name, .on_notify = on_notify, .context = e};
    const kvf_stage_options stage = {.struct_size = sizeof stage, .arena_bytes = ARENA_BYTES};
    kvf_memory memory = {.struct_size = sizeof memory, .bytes = (uint64_t)BLOCKS * BLOCK_BYTES};
    require(kvf_engine_build(model, &spec, &e->engine));
    require(kvf_transport_open("inproc", &options, &e->transport));
    require(kvf_transport_allocate(e->transport, memory.kind, 0, memory.bytes, &memory.address));
    require(kvf_transport_register(e->transport, &memory, 1));
    require(kvf_stage_open(e->transport, kvf_engine_shard(e->engine, 0), &stage, &e->stage));
    e->cells = memory.address;
}

static void connect_end(end *from, end *to) {
    const void *card;
    size_t bytes;
    require(kvf_transport_export(to->transport, &card, &bytes));
    require(kvf_transport_connect(from->transport, card, bytes, &from->peer));
    require(kvf_stage_join(from->stage, from->peer));
}

static void close_end(const end *e) {
    kvf_stage_close(e->stage);
    kvf_transport_close(e->transport);
    kvf_engine_free(e->engine);
}

static kvf_model *make_model(void) {
    const kvf_part_desc part = {
        .name = "k", .dtype = KVF_DTYPE_BF16, .units = HEADS, .cell_elements = CELL_BYTES / 2};
    const kvf_group_desc group = {
        .name = "full", .layers = (const uint32_t[]){0}, .layer_count = 1, .parts = &part, .part_count = 1};
    const kvf_model_desc desc = {
        .struct_size = sizeof desc, .layer_count = 1, .groups = &group, .group_count = 1};
    kvf_model *model = NULL;
    require(kvf_model_create(&desc, &model));
    return model;
}

/* ---- requests --------------------------------------------------------------------------------- */

/* Pulls `blocks` blocks of a sequence, whose tables name the caches' blocks again and again. */
static void pull(end *d, end *p, const kvf_plan *plan, const uint32_t *ids, uint32_t blocks) {
    const kvf_move_options options = {.struct_size = sizeof options, .way = KVF_WAY_PACKED};
    const kvf_group_request group = {
        {ids, blocks, 0}, {ids, blocks, 0}, 0, (uint64_t)blocks * TOKENS_PER_BLOCK};
    kvf_request *request = NULL;
    kvf_move *move = NULL;
    kvf_status status;
    require(kvf_request_create(plan, &request));
    require(kvf_request_set(request, &group, 1));
    require(kvf_stage_pull(d->stage, request, &d->peer, &options, &move));
    while ((status = kvf_move_status(move)) == KVF_IN_PROGRESS) {
        require(kvf_transport_progress(p->transport, NULL));
        require(kvf_stage_progress(p->stage, NULL));
        require(kvf_transport_progress(d->transport, NULL));
        require(kvf_stage_progress(d->stage, NULL));
    }
    require(status);
    kvf_move_free(move);
    kvf_request_free(request);
}

/* A cell's content follows from its block, token and head; in the source's blocks, heads come before tokens. */
static uint32_t content(uint32_t block, uint32_t token, uint32_t head_number, uint32_t word) {
    return (block * 1000003u + token * 10007u + head_number * 101u) ^ word * 2654435761u;
}

static uint32_t *cell_of(const end *e, uint32_t block, uint32_t token, uint32_t head_number,
                         bool heads_first) {
    const uint32_t cell = heads_first ? head_number * TOKENS_PER_BLOCK + token : token * HEADS + head_number;
    return (uint32_t *)(void *)(e->cells + (uint64_t)block * BLOCK_BYTES + (uint64_t)cell * CELL_BYTES);
}

/* Writes all cells of the source, or counts the wrong words in the reader's first blocks. */
static uint64_t go_over(const end *e, bool source, uint32_t blocks) {
    uint64_t wrong = 0;
    for (uint32_t b = 0; b < blocks; b++)
        for (uint32_t t = 0; t < TOKENS_PER_BLOCK; t++)
            for (uint32_t h = 0; h < HEADS; h++)
                for (uint32_t w = 0; w < CELL_BYTES / 4; w++) {
                    uint32_t *word = cell_of(e, b, t, h, source) + w;
                    if (source)
                        *word = content(b, t, h, w);
                    wrong += *word != content(b, t, h, w);
                }
    return wrong;
}

static void large(bench_report *report, end *d, end *p, const kvf_plan *plan) {
    const uint32_t blocks = (uint32_t)(LARGE_BYTES / BLOCK_BYTES);
    uint32_t *ids = bench_alloc(blocks, sizeof *ids);
    for (uint32_t i = 0; i < blocks; i++)
        ids[i] = i % BLOCKS;
    memset(d->cells, 0, (size_t)BLOCKS * BLOCK_BYTES);
    bench_require(go_over(d, false, BLOCKS) > 0, "the control: empty cells are taken for right ones");
    const double before = resident_mib();
    const uint64_t had = held.now, begun = bench_now_ns();
    held.most = held.now;
    pull(d, p, plan, ids, blocks);
    const double seconds = (double)(bench_now_ns() - begun) / 1e9;
    bench_table(
        report, "One request through arenas of 64 MiB",
        (const char *[]){"bytes", "GB/s", "MiB resident more", "KiB allocated at most", "wrong words", NULL});
    const uint64_t wrong = go_over(d, false, BLOCKS);
    bench_text(report, bench_bytes(LARGE_BYTES));
    bench_number(report, 2, (double)LARGE_BYTES / seconds / 1e9);
    bench_number(report, 1, resident_mib() - before);
    bench_number(report, 1, (double)(held.most - had) / 1024);
    bench_number(report, 0, (double)wrong);
    if (wrong > 0)
        bench_fail(report, "what arrived is wrong");
    free(ids);
}

static void many(bench_report *report, end *d, end *p, const kvf_plan *plan) {
    uint32_t *ids = bench_shuffled(BLOCKS);
    double first = 0;
    uint64_t had = 0, calls = 0;
    for (uint32_t i = 0; i < WARM + REQUESTS; i++) {
        if (i == WARM) {
            first = resident_mib();
            had = held.now;
            calls = held.calls;
        }
        pull(d, p, plan, ids + i % (BLOCKS - SMALL_BLOCKS), SMALL_BLOCKS);
    }
    const double more = resident_mib() - first;
    bench_table(report, "Requests of 256 KiB, one after the other",
                (const char *[]){"requests", "bytes allocated more", "allocations a request",
                                 "MiB resident more", NULL});
    bench_number(report, 0, REQUESTS);
    bench_number(report, 0, (double)held.now - (double)had);
    bench_number(report, 1, (double)(held.calls - calls) / REQUESTS);
    bench_number(report, 2, more);
    if (held.now != had)
        bench_fail(report, "requests leave allocations behind");
    if (more > 1)
        bench_fail(report, "resident memory grows");
    free(ids);
}

int main(int argc, char **argv) {
    const kvf_allocator counting = {count_allocate, count_resize, count_release, NULL};
    require(kvf_set_allocator(&counting));
    bench_report *report = bench_report_start("arena", argc, argv);
    static end d, p;
    kvf_plan *plan = NULL;
    kvf_model *model = make_model();
    open_end(&d, model, "decode", "L|BPNH");
    open_end(&p, model, "prefill", "L|BPHN");
    connect_end(&d, &p);
    connect_end(&p, &d);
    require(kvf_plan_build(kvf_engine_shard(d.engine, 0), p.engine, NULL, &plan));
    (void)go_over(&p, true, BLOCKS);
    large(report, &d, &p, plan);
    many(report, &d, &p, plan);
    kvf_plan_free(plan);
    close_end(&d);
    close_end(&p);
    kvf_model_free(model);
    return bench_report_end(report);
}
