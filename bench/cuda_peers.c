/*
 * Two processes on one device. The owner has pages by heads, and the reader, which is the benchmark's own process, pages
 * by tokens, so that a run is one head of one token. The reader reads and writes all cells by the transport "cuda"; then
 * a single run at a time. The two share a page, on which the reader writes what the owner is to do, and the owner its
 * answers.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kvferry/transport.h>

#include "cuda_bench.h"
#include "transport/transport.h"

/* As in transfers of the library. */
#define BATCH_RUNS 1024u
#define BATCH_BYTES (16u << 20)
#define BATCHES 3u
#define SMALL_BYTES 4096u /* of the single run */
#define SMALL_TIMES 201u
#define CARD_BYTES 4096u

typedef enum order { OPEN = 1, FILL, CLEAR, COUNT_WRONG } order;

typedef struct board {
    bench_shape
        shape; /* of the owner's cache; `ids` lie on the board, at the same address in both processes */
    uint64_t wrong;
    kvf_status status; /* of opening; the detail says why it has failed */
    char detail[256];
    size_t card_bytes;
    unsigned char card[CARD_BYTES];
    uint32_t ids[];
} board;

static struct {
    pid_t pid;
    int to, from; /* pipes: an order is a byte, and so is "done" */
    board *board;
    size_t board_bytes;
} owner;

/* ---- the owner ---------------------------------------------------------------------------------------- */

static kvf_status open_owner(kvf_transport **transport) {
    void *memory = NULL;
    const void *card = NULL;
    kvf_status status = kvf_transport_open("cuda", NULL, transport);
    if (!status)
        status = kvf_transport_allocate(*transport, KVF_MEMORY_CUDA, 0, bench_gpu.room, &memory);
    const kvf_memory region = {
        .struct_size = sizeof region, .address = memory, .bytes = bench_gpu.room, .kind = KVF_MEMORY_CUDA};
    if (!status)
        status = kvf_transport_register(*transport, &region, 1);
    if (!status)
        status = kvf_transport_export(*transport, &card, &owner.board->card_bytes);
    if (status)
        return status;
    bench_require(owner.board->card_bytes <= CARD_BYTES, "a card is longer than expected");
    memcpy(owner.board->card, card, owner.board->card_bytes);
    bench_gpu_enter();
    bench_gpu.memory[HEADS_FIRST] = (CUdeviceptr)(uintptr_t)memory;
    return KVF_OK;
}

static void carry_out(order given, kvf_transport **transport) {
    board *b = owner.board;
    if (given == OPEN) {
        b->status = open_owner(transport);
        (void)snprintf(b->detail, sizeof b->detail, "%s", b->status ? kvf_error_detail() : "");
    } else if (given == FILL) {
        bench_cells_fill(&b->shape, HEADS_FIRST);
    } else if (given == CLEAR) {
        bench_cells_clear(&b->shape, HEADS_FIRST);
    } else {
        b->wrong = bench_cells_wrong(&b->shape, HEADS_FIRST);
    }
}

/* Serves, and carries out orders, until the reader closes its pipe. */
static void be_owner(int from, int to) {
    kvf_transport *transport = NULL;
    unsigned char given;
    for (;;) {
        struct pollfd fds[] = {{.fd = from, .events = POLLIN}, {.fd = -1, .events = POLLIN}};
        if (transport)
            fds[1].fd = kvf_transport_event_fd(transport);
        bench_require(poll(fds, 2, -1) > 0, "the owner cannot wait");
        if (transport)
            bench_must(kvf_transport_progress(transport, NULL));
        if (!fds[0].revents)
            continue;
        if (read(from, &given, 1) != 1)
            break;
        carry_out((order)given, &transport);
        bench_require(write(to, &given, 1) == 1, "the reader has ended");
    }
    kvf_transport_close(transport);
}

void bench_peers_start(void) {
    int down[2] = {-1, -1}, up[2] = {-1, -1};
    const uint64_t blocks = bench_gpu.bytes / (SHORTEST * HEADS * ROWS) + 1;
    owner.board_bytes = sizeof *owner.board + blocks * sizeof *owner.board->ids;
    owner.board = mmap(NULL, owner.board_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    bench_require(owner.board != MAP_FAILED && pipe(down) == 0 && pipe(up) == 0, "no memory or no pipes");
    (void)fflush(stdout);
    owner.pid = fork();
    bench_require(owner.pid >= 0, "no second process");
    if (owner.pid == 0) {
        (void)close(down[1]);
        (void)close(up[0]);
        be_owner(down[0], up[1]);
        _exit(0);
    }
    (void)close(down[0]);
    (void)close(up[1]);
    owner.to = down[1];
    owner.from = up[0];
}

static void tell_owner(order given) {
    unsigned char told = (unsigned char)given;
    bench_require(write(owner.to, &told, 1) == 1 && read(owner.from, &told, 1) == 1,
                  "the second process has ended");
}

static void end_owner(void) {
    (void)close(owner.to);
    (void)close(owner.from);
    (void)waitpid(owner.pid, NULL, 0);
    (void)munmap(owner.board, owner.board_bytes);
}

/* The owner's cache from now on: of the same tokens as ours, with its blocks in another order. */
static void give_owner(const bench_shape *ours) {
    uint32_t *ids = bench_shuffled(ours->blocks);
    owner.board->shape = *ours;
    owner.board->shape.ids = owner.board->ids;
    memcpy(owner.board->ids, ids, ours->blocks * sizeof *ids);
    free(ids);
}

/* ---- the reader --------------------------------------------------------------------------------------- */

typedef struct reader {
    kvf_transport *transport;
    kvf_peer *peer;
    kvf_direction direction;
    const kvf_run *runs;
    size_t count, next;
    const kvf_run_shape *shape; /* the runs are nests of this shape; NULL: they are runs */
    uint32_t under_way;         /* batches */
    bool failed;
    char why[512];
} reader;

static void fail(reader *r, const char *why) {
    if (!r->failed)
        (void)snprintf(r->why, sizeof r->why, "%s", why);
    r->failed = true;
}

static void submit_next(reader *r);

static void on_done(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    reader *r = context;
    (void)operation;
    r->under_way--;
    if (status)
        fail(r, detail);
    submit_next(r);
}

static size_t batch_count(const reader *r) {
    const uint64_t most = kvf_max_u64(BATCH_BYTES / r->runs[0].bytes, 1);
    return kvf_min_u64(r->count - r->next, kvf_min_u64(BATCH_RUNS, most));
}

static void submit_next(reader *r) {
    const size_t here = batch_count(r);
    const kvf_run *runs = r->runs + r->next;
    if (here == 0 || r->failed)
        return;
    if (r->shape ? kvf_transport_submit_nests(r->peer, r->direction, runs, here, r->shape, on_done, r, NULL)
                 : kvf_transport_submit(r->peer, r->direction, runs, here, on_done, r, NULL)) {
        fail(r, kvf_error_detail());
        return;
    }
    r->next += here;
    r->under_way++;
}

static double transfer_ns(reader *r, kvf_direction direction) {
    const uint64_t begun = bench_now_ns();
    r->direction = direction;
    r->next = 0;
    for (uint32_t i = 0; i < BATCHES; i++)
        submit_next(r);
    while (r->under_way > 0)
        bench_must(kvf_transport_progress(r->transport, NULL));
    return (double)(bench_now_ns() - begun);
}

static kvf_status open_reader(reader *r) {
    const kvf_memory region = {.struct_size = sizeof region,
                               .address = (void *)(uintptr_t)bench_gpu.memory[TOKENS_FIRST],
                               .bytes = bench_gpu.room,
                               .kind = KVF_MEMORY_CUDA};
    tell_owner(OPEN);
    if (owner.board->status) {
        fail(r, owner.board->detail);
        return owner.board->status;
    }
    kvf_status status = kvf_transport_open("cuda", NULL, &r->transport);
    if (!status)
        status = kvf_transport_register(r->transport, &region, 1);
    if (!status)
        status = kvf_transport_connect(r->transport, owner.board->card, owner.board->card_bytes, &r->peer);
    if (status)
        fail(r, kvf_error_detail());
    return status;
}

/* All cells, as single runs: a head of a block after the other, so that tokens lie at even distances on both sides. */
static kvf_run *runs_of(const bench_shape *ours, const bench_shape *theirs) {
    kvf_run *runs = bench_alloc((size_t)ours->tokens * HEADS, sizeof *runs);
    size_t made = 0;
    for (uint32_t first = 0; first < ours->tokens; first += ROWS)
        for (uint32_t head = 0; head < HEADS; head++)
            for (uint32_t token = first; token < kvf_min_u64(first + ROWS, ours->tokens); token++)
                runs[made++] = (kvf_run){.local_offset = bench_place_of(ours, TOKENS_FIRST, token, head),
                                         .remote_offset = bench_place_of(theirs, HEADS_FIRST, token, head),
                                         .bytes = ours->run};
    return runs;
}

/* All cells, as a nest for each block. */
static kvf_run *nests_of(const bench_shape *ours, const bench_shape *theirs, kvf_run_shape *shape) {
    kvf_run *nests = bench_alloc(ours->blocks, sizeof *nests);
    *shape = (kvf_run_shape){.bytes = ours->run,
                             .outer_count = ROWS,
                             .outer_local = HEADS * ours->run,
                             .outer_remote = ours->run,
                             .inner_count = HEADS,
                             .inner_local = ours->run,
                             .inner_remote = ROWS * ours->run};
    for (uint32_t block = 0; block < ours->blocks; block++)
        nests[block] =
            (kvf_run){.local_offset = bench_place_of(ours, TOKENS_FIRST, block * (uint32_t)ROWS, 0),
                      .remote_offset = bench_place_of(theirs, HEADS_FIRST, block * (uint32_t)ROWS, 0),
                      .bytes = ROWS * HEADS * ours->run};
    return nests;
}

/* ---- all cells, by run length ------------------------------------------------------------------------- */

enum { READS, RUN_READS, WRITES, WAYS };

typedef struct way {
    kvf_direction direction;
    bool nests;
} way;

static const way ways[WAYS] = {
    [READS] = {KVF_READ, true}, [RUN_READS] = {KVF_READ, false}, [WRITES] = {KVF_WRITE, true}};

static void measure(reader *r, const bench_shape *s, way by, double copies[], bench_spread *share) {
    double ratios[ROUNDS_MAX];
    for (uint32_t round = 0; round < bench_gpu.rounds; round++) {
        copies[round] = bench_copy_ns(s, HEADS_FIRST, PACKED);
        ratios[round] = copies[round] / transfer_ns(r, by.direction);
    }
    *share = bench_spread_of(ratios, bench_gpu.rounds);
}

/* What is read comes from the owner's cells; what is written, from ours. */
static void verify(reader *r, const bench_shape *s, way by) {
    uint64_t wrong;
    if (by.direction == KVF_READ) {
        tell_owner(FILL);
        bench_cells_control(s, TOKENS_FIRST);
        (void)transfer_ns(r, by.direction);
        wrong = bench_cells_wrong(s, TOKENS_FIRST);
    } else {
        bench_cells_fill(s, TOKENS_FIRST);
        tell_owner(CLEAR);
        tell_owner(COUNT_WRONG);
        bench_require(owner.board->wrong > 0, "the control: cleared memory is taken for right cells");
        (void)transfer_ns(r, by.direction);
        tell_owner(COUNT_WRONG);
        wrong = owner.board->wrong;
    }
    bench_gpu.spoiled = bench_gpu.spoiled || (wrong > 0 && !r->failed);
}

static void add_row(bench_report *report, reader *r, uint64_t run) {
    double copies[WAYS * ROUNDS_MAX];
    bench_spread shares[WAYS];
    bench_shape s = bench_shape_of(run, bench_gpu.bytes / (ROWS * HEADS * run) * (ROWS * HEADS * run));
    kvf_run_shape shape;
    give_owner(&s);
    kvf_run *runs = runs_of(&s, &owner.board->shape), *nests = nests_of(&s, &owner.board->shape, &shape);
    for (size_t i = 0; i < WAYS; i++) {
        r->runs = ways[i].nests ? nests : runs;
        r->count = ways[i].nests ? s.blocks : (size_t)s.tokens * HEADS;
        r->shape = ways[i].nests ? &shape : NULL;
        verify(r, &s, ways[i]);
        measure(r, &s, ways[i], copies + i * bench_gpu.rounds, &shares[i]);
    }
    free(runs);
    free(nests);
    free(s.ids);
    if (r->failed)
        return;
    bench_text(report, bench_bytes(run));
    bench_number(report, 0, (double)s.tokens * HEADS);
    bench_number(report, 1,
                 (double)bench_shape_bytes(&s) /
                     bench_spread_of(copies, (size_t)WAYS * bench_gpu.rounds).median);
    for (size_t i = 0; i < WAYS; i++)
        bench_number(report, 3, shares[i].median);
}

/* ---- one run ------------------------------------------------------------------------------------------ */

static void add_small(bench_report *report, reader *r, const char *name, bool by_driver, way by) {
    double taken[SMALL_TIMES];
    const bench_shape one = {.run = SMALL_BYTES / HEADS, .tokens = 1};
    const kvf_run run = {.bytes = SMALL_BYTES};
    r->runs = &run;
    r->count = 1;
    r->shape = NULL;
    for (size_t i = 0; i < SMALL_TIMES; i++)
        taken[i] = by_driver ? bench_copy_ns(&one, HEADS_FIRST, PACKED) : transfer_ns(r, by.direction);
    if (r->failed)
        return;
    const bench_spread spread = bench_spread_of(taken, SMALL_TIMES);
    bench_text(report, name);
    bench_number(report, 1, spread.median / 1e3);
    bench_number(report, 1, spread.low / 1e3);
    bench_number(report, 1, spread.high / 1e3);
}

/* ---- the part ----------------------------------------------------------------------------------------- */

static void add_tables(bench_report *report, reader *r) {
    bench_table(report, "Two processes on one device, by the transport \"cuda\": shares of the driver's copy",
                (const char *[]){"run", "runs", "copy GB/s", "read", "read by runs", "write", NULL});
    for (uint64_t run = SHORTEST; run <= LONGEST && !r->failed; run *= 4)
        add_row(report, r, run);
    bench_note(report,
               "\"read\" and \"write\": block by block, as the library's transfers do. \"read by runs\": as "
               "lists of runs that a user submits.");
    if (r->failed)
        return;
    bench_table(report, "One run of 4 KiB between the two processes",
                (const char *[]){"what", "us", "lowest", "highest", NULL});
    add_small(report, r, "copy", true, ways[READS]);
    add_small(report, r, "read", false, ways[READS]);
    add_small(report, r, "write", false, ways[WRITES]);
    bench_note(report, "\"copy\": the driver's, within this process.");
}

void bench_peers(bench_report *report) {
    reader r = {0};
    const kvf_status opened = open_reader(&r);
    if (!opened)
        add_tables(report, &r);
    if (opened == KVF_E_UNSUPPORTED)
        bench_note(report, r.why);
    else if (r.failed)
        bench_fail(report, r.why);
    kvf_peer_close(r.peer);
    kvf_transport_close(r.transport);
    end_owner();
}
