/*
 * Same-host transfer of scattered blocks, compared with the machine's limit for the same list of blocks:
 *
 *   mapped   memory that the library allocated, against a plain memcpy loop from a shared mapping
 *   direct   memory that the caller brought, against process_vm_readv with 1024 blocks a call
 *   chosen   the same memory, by the way that the library chooses from the run length, against the better of its
 *            two ways, and one thread's memcpy of the same blocks beyond the caches; and against the direct way
 *            while the owner is busy
 *
 * The memory is another process's. The ways are measured in turn, so that a disturbance affects all of them;
 * figures are medians of the rounds, and a ratio is the median of the rounds' ratios.
 */
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kvferry/transport.h>

#include "kernel/kernel.h"
#include "report.h"

#define REGION_BYTES (256ull << 20)
#define ROUNDS 11
#define BATCH_RUNS 1024u
#define BATCHES 3u
#define VECTORS 1024u
#define REQUIRED 0.90

/* Powers of two, and lengths of real cells and latents. */
static const uint64_t run_bytes[] = {128,  256,  512,   656,   1024,  1152,  2048,   2944,
                                     4096, 8192, 16384, 32768, 49152, 65536, 131072, 262144};
#define RUN_SIZES (sizeof run_bytes / sizeof *run_bytes)
#define TURN_BYTES (24ull << 20) /* moved by one way in its turn */
#define TURNS 61

static const uint64_t busy_run_bytes[] = {256, 2944, 16384, 262144};
#define BUSY_RUN_SIZES (sizeof busy_run_bytes / sizeof *busy_run_bytes)

static const uint64_t block_bytes[] = {512, 2048, 8192, 32768, 131072};
#define BLOCK_SIZES (sizeof block_bytes / sizeof *block_bytes)

/* ---- the other process ----------------------------------------------------------------------- */

typedef struct bench_owner {
    pid_t pid;
    int to, from;           /* pipes */
    atomic_bool *busy;      /* shared: the owner is busy */
    unsigned char *brought; /* its address in the owner */
    unsigned char *card;
    size_t card_bytes;
} bench_owner;

static void *map_bytes(uint64_t bytes, int flags, int fd) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    bench_require(memory != MAP_FAILED, "no memory");
    return memory;
}

static void write_all(int fd, const void *data, size_t bytes) {
    bench_require(write(fd, data, bytes) == (ssize_t)bytes, "a pipe cannot be written");
}

static void read_all(int fd, void *data, size_t bytes) {
    unsigned char *at = data;
    for (size_t done = 0; done < bytes;) {
        ssize_t got = read(fd, at + done, bytes - done);
        bench_require(got > 0, "the other process has ended");
        done += (size_t)got;
    }
}

/* The owner: serves until the pipe is closed. The library allocates region 0, the owner brings region 1; `shared`
 * is for the plain loop. */
static void be_owner(int from, int to, unsigned char *shared, atomic_bool *busy) {
    kvf_transport *transport = NULL;
    void *allocated = NULL;
    const void *card = NULL;
    size_t card_bytes = 0;
    bench_require(kvf_transport_open("shm", NULL, &transport) == KVF_OK &&
                      kvf_transport_allocate(transport, KVF_MEMORY_HOST, 0, REGION_BYTES, &allocated) ==
                          KVF_OK,
                  "the owner cannot open its transport");
    unsigned char *brought = map_bytes(REGION_BYTES, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    for (uint64_t i = 0; i < REGION_BYTES; i++)
        brought[i] = (unsigned char)((i * 0x9e3779b97f4a7c15u) >> 56);
    memcpy(allocated, brought, REGION_BYTES);
    memcpy(shared, brought, REGION_BYTES);
    kvf_memory regions[2] = {{.struct_size = sizeof(kvf_memory), .address = allocated, .bytes = REGION_BYTES},
                             {.struct_size = sizeof(kvf_memory), .address = brought, .bytes = REGION_BYTES}};
    bench_require(kvf_transport_register(transport, regions, 2) == KVF_OK &&
                      kvf_transport_export(transport, &card, &card_bytes) == KVF_OK,
                  "the owner cannot register its memory");
    write_all(to, &brought, sizeof brought);
    write_all(to, &card_bytes, sizeof card_bytes);
    write_all(to, card, card_bytes);
    struct pollfd fds[2] = {{kvf_transport_event_fd(transport), POLLIN, 0}, {from, POLLIN, 0}};
    while (poll(fds, 2, -1) > 0 && !fds[1].revents) {
        while (atomic_load(busy))
            (void)usleep(1000);
        bench_require(kvf_transport_progress(transport, NULL) == KVF_OK, "the owner cannot serve");
    }
    kvf_transport_close(transport);
    (void)munmap(brought, REGION_BYTES);
}

static bench_owner start_owner(unsigned char *shared) {
    int down[2] = {-1, -1}, up[2] = {-1, -1};
    bench_require(pipe(down) == 0 && pipe(up) == 0, "no pipes");
    bench_owner owner = {.to = down[1], .from = up[0]};
    owner.busy = map_bytes(sizeof *owner.busy, MAP_SHARED | MAP_ANONYMOUS, -1);
    (void)fflush(stdout);
    owner.pid = fork();
    bench_require(owner.pid >= 0, "no second process");
    if (owner.pid == 0) {
        (void)close(down[1]);
        (void)close(up[0]);
        be_owner(down[0], up[1], shared, owner.busy);
        _exit(0);
    }
    (void)close(down[0]);
    (void)close(up[1]);
    read_all(owner.from, &owner.brought, sizeof owner.brought);
    read_all(owner.from, &owner.card_bytes, sizeof owner.card_bytes);
    owner.card = bench_alloc(owner.card_bytes, 1);
    read_all(owner.from, owner.card, owner.card_bytes);
    return owner;
}

static void end_owner(bench_owner *owner) {
    (void)close(owner->to);
    (void)close(owner->from);
    (void)waitpid(owner->pid, NULL, 0);
    (void)munmap(owner->busy, sizeof *owner->busy);
    free(owner->card);
}

/* ---- the list -------------------------------------------------------------------------------- */

/* Lists every block of the region once, from a random place to a random place. */
static kvf_run *make_runs(uint64_t bytes, uint32_t remote_region, size_t *count) {
    *count = REGION_BYTES / bytes;
    kvf_run *runs = bench_alloc(*count, sizeof *runs);
    uint32_t *from = bench_shuffled(*count), *to = bench_shuffled(*count);
    for (size_t i = 0; i < *count; i++)
        runs[i] = (kvf_run){to[i] * bytes, from[i] * bytes, bytes, 0, remote_region};
    free(from);
    free(to);
    return runs;
}

/* ---- the ways to move it --------------------------------------------------------------------- */

typedef struct bench_state {
    bench_owner owner;
    kvf_transport *transport;
    kvf_peer *peer;
    unsigned char *local;  /* also region 0 of the transport */
    unsigned char *shared; /* with the other process */
    const kvf_run *runs;
    size_t count, next, ended;
    double bytes; /* of all runs */
    struct iovec *local_vectors, *remote_vectors;
    kvf_status failed;
} bench_state;

static void by_memcpy(bench_state *bench) {
    for (size_t i = 0; i < bench->count; i++)
        memcpy(bench->local + bench->runs[i].local_offset, bench->shared + bench->runs[i].remote_offset,
               bench->runs[i].bytes);
}

/* The vectors are made beforehand: the loop contains only the system calls. */
static void by_process_vm(bench_state *bench) {
    for (size_t i = 0; i < bench->count; i += VECTORS) {
        size_t here = bench->count - i < VECTORS ? bench->count - i : VECTORS;
        ssize_t moved = process_vm_readv(bench->owner.pid, bench->local_vectors + i, here,
                                         bench->remote_vectors + i, here, 0);
        bench_require(moved == (ssize_t)(here * bench->runs[0].bytes), "process_vm_readv is forbidden here");
    }
}

static void submit_next(bench_state *bench);

static void on_done(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation;
    (void)detail;
    bench_state *bench = context;
    bench->ended++;
    if (status)
        bench->failed = status;
    submit_next(bench);
}

static void submit_next(bench_state *bench) {
    size_t here = bench->count - bench->next < BATCH_RUNS ? bench->count - bench->next : BATCH_RUNS;
    if (here == 0 || bench->failed)
        return;
    bench->failed =
        kvf_transport_submit(bench->peer, KVF_READ, bench->runs + bench->next, here, on_done, bench, NULL);
    bench->next += here;
}

static void by_kvferry(bench_state *bench) {
    bench->next = bench->ended = 0;
    size_t batches = (bench->count + BATCH_RUNS - 1) / BATCH_RUNS;
    for (uint32_t i = 0; i < BATCHES; i++)
        submit_next(bench);
    while (bench->ended < batches && !bench->failed)
        bench->failed = kvf_transport_progress(bench->transport, NULL);
    bench_require(bench->failed == KVF_OK, kvf_error_detail());
}

static double gigabytes_per_second(bench_state *bench, void (*way)(bench_state *)) {
    uint64_t begin = bench_now_ns();
    way(bench);
    return bench->bytes / (double)(bench_now_ns() - begin);
}

static void check_copy(const bench_state *bench) {
    for (size_t i = 0; i < bench->count; i += 97)
        bench_require(memcmp(bench->local + bench->runs[i].local_offset,
                             bench->shared + bench->runs[i].remote_offset, bench->runs[i].bytes) == 0,
                      "the bytes that arrived are wrong");
}

/* One row of the table: our way and the machine's limit, in turn. */
static void compare(bench_report *report, bench_state *bench, uint64_t bytes, bool mapped) {
    size_t count;
    kvf_run *runs = make_runs(bytes, mapped ? 0 : 1, &count);
    bench->runs = runs;
    bench->count = count;
    bench->bytes = (double)(count * bytes);
    bench->local_vectors = bench_alloc(count, sizeof *bench->local_vectors);
    bench->remote_vectors = bench_alloc(count, sizeof *bench->remote_vectors);
    for (size_t i = 0; i < count; i++) {
        bench->local_vectors[i] = (struct iovec){bench->local + runs[i].local_offset, bytes};
        bench->remote_vectors[i] = (struct iovec){bench->owner.brought + runs[i].remote_offset, bytes};
    }
    void (*machine)(bench_state *) = mapped ? by_memcpy : by_process_vm;
    double ours[ROUNDS], limit[ROUNDS], ratios[ROUNDS];
    (void)gigabytes_per_second(bench, machine); /* maps the pages */
    memset(bench->local, 0, REGION_BYTES);
    (void)gigabytes_per_second(bench, by_kvferry);
    check_copy(bench);
    for (int i = 0; i < ROUNDS; i++) {
        bool first = i % 2; /* each is second equally often, in case that is slower */
        if (first)
            ours[i] = gigabytes_per_second(bench, by_kvferry);
        limit[i] = gigabytes_per_second(bench, machine);
        if (!first)
            ours[i] = gigabytes_per_second(bench, by_kvferry);
        ratios[i] = ours[i] / limit[i];
    }
    double ratio = bench_spread_of(ratios, ROUNDS).median;
    bench_spread us = bench_spread_of(ours, ROUNDS), it = bench_spread_of(limit, ROUNDS);
    bench_text(report, bench_bytes(bytes));
    bench_number(report, 2, us.median);
    bench_number(report, 2, us.low);
    bench_number(report, 2, us.high);
    bench_number(report, 2, it.median);
    bench_number(report, 2, it.low);
    bench_number(report, 2, it.high);
    bench_number(report, 2, ratio);
    if (ratio < REQUIRED)
        bench_fail(report, "less than 90% of the machine's limit");
    free(bench->local_vectors);
    free(bench->remote_vectors);
    free(runs);
}

/* ---- the library's own choice ---------------------------------------------------------------- */

enum { CHOSEN, DIRECT, SERVED, WAYS }; /* only SERVED needs work of the owner */

/* Opens a transport for each way, to the same owner; the states share everything else. */
static void open_ways(const bench_state *bench, bench_state *out) {
    static const char *const direct[WAYS] = {"auto", "on", "off"};
    for (int way = 0; way < WAYS; way++) {
        kvf_setting setting = {"shm.direct", direct[way]};
        kvf_transport_options options = {
            .struct_size = sizeof options, .settings = &setting, .setting_count = 1};
        kvf_memory local = {
            .struct_size = sizeof(kvf_memory), .address = bench->local, .bytes = REGION_BYTES};
        out[way] = *bench;
        bench_require(kvf_transport_open("shm", &options, &out[way].transport) == KVF_OK &&
                          kvf_transport_register(out[way].transport, &local, 1) == KVF_OK &&
                          kvf_transport_connect(out[way].transport, bench->owner.card,
                                                bench->owner.card_bytes, &out[way].peer) == KVF_OK,
                      "no connection");
    }
}

/* Moves all of the list once by each way, which maps pages and teaches the library the ways' speed. */
static void start_list(bench_state *ways, int way_count, const kvf_run *runs, size_t count, uint64_t bytes) {
    for (int way = 0; way < way_count; way++) {
        ways[way].runs = runs;
        ways[way].count = count;
        ways[way].bytes = (double)(count * bytes);
        memset(ways[way].local, 0, REGION_BYTES);
        (void)gigabytes_per_second(&ways[way], by_kvferry);
        check_copy(&ways[way]);
    }
}

static void take_part(bench_state *bench, const kvf_run *runs, size_t count, uint64_t bytes, int turn) {
    size_t here = TURN_BYTES / bytes, parts = count / here;
    bench->runs = runs + (size_t)turn % parts * here;
    bench->count = here;
    bench->bytes = (double)(here * bytes);
}

static void compare_choice(bench_report *report, bench_state *ways, uint64_t bytes) {
    size_t count;
    kvf_run *runs = make_runs(bytes, 1, &count);
    double rates[WAYS][TURNS], plain[TURNS], ratios[WAYS][TURNS];
    start_list(ways, WAYS, runs, count, bytes);
    for (int turn = 0; turn < TURNS; turn++) {
        for (int i = 0; i < WAYS; i++) {
            int way = (turn + i) % WAYS;
            take_part(&ways[way], runs, count, bytes, turn + i);
            rates[way][turn] = gigabytes_per_second(&ways[way], by_kvferry);
        }
        plain[turn] = gigabytes_per_second(&ways[0], by_memcpy);
        for (int way = DIRECT; way < WAYS; way++)
            ratios[way][turn] = rates[CHOSEN][turn] / rates[way][turn];
    }
    /* Not with the better of each turn: if two ways vary, the best of each turn beats both. */
    double beside_direct = bench_spread_of(ratios[DIRECT], TURNS).median;
    double beside_served = bench_spread_of(ratios[SERVED], TURNS).median;
    double ratio = beside_direct < beside_served ? beside_direct : beside_served;
    bench_text(report, bench_bytes(bytes));
    for (int way = 0; way < WAYS; way++)
        bench_number(report, 2, bench_spread_of(rates[way], TURNS).median);
    bench_number(report, 2, bench_spread_of(plain, TURNS).median);
    bench_number(report, 2, ratio);
    if (ratio < REQUIRED)
        bench_fail(report, "less than 90% of the better of the two ways");
    free(runs);
}

/* The owner answers before each turn, as between two steps of its engine, and not during the turn. */
static void compare_busy(bench_report *report, bench_state *ways, uint64_t bytes) {
    size_t count;
    kvf_run *runs = make_runs(bytes, 1, &count);
    double rates[SERVED][TURNS], ratios[TURNS];
    start_list(ways, SERVED, runs, count, bytes);
    for (int turn = 0; turn < TURNS; turn++) {
        for (int i = 0; i < SERVED; i++) {
            int way = (turn + i) % SERVED;
            take_part(&ways[way], runs, count, bytes, turn + i);
            atomic_store(ways->owner.busy, true);
            (void)usleep(1000);
            rates[way][turn] = gigabytes_per_second(&ways[way], by_kvferry);
            atomic_store(ways->owner.busy, false);
            (void)usleep(3000);
            bench_require(kvf_transport_progress(ways[way].transport, NULL) == KVF_OK, "no progress");
        }
        ratios[turn] = rates[CHOSEN][turn] / rates[DIRECT][turn];
    }
    double ratio = bench_spread_of(ratios, TURNS).median;
    bench_text(report, bench_bytes(bytes));
    bench_number(report, 2, bench_spread_of(rates[CHOSEN], TURNS).median);
    bench_number(report, 2, bench_spread_of(rates[DIRECT], TURNS).median);
    bench_number(report, 2, ratio);
    if (ratio < REQUIRED)
        bench_fail(report, "less than 90% of the direct way");
    free(runs);
}

static void compare_choices(bench_report *report, const bench_state *bench) {
    bench_state ways[WAYS];
    open_ways(bench, ways);
    bench_table(report, "Memory the caller brought: the way that is chosen, each way alone, and memcpy, GB/s",
                (const char *[]){"run", "chosen", "direct", "served", "memcpy", "ratio", NULL});
    for (size_t size = 0; size < RUN_SIZES; size++)
        compare_choice(report, ways, run_bytes[size]);
    bench_table(report, "The same while the owner does something else, GB/s",
                (const char *[]){"run", "chosen", "direct", "ratio", NULL});
    for (size_t size = 0; size < BUSY_RUN_SIZES; size++)
        compare_busy(report, ways, busy_run_bytes[size]);
    for (int way = 0; way < WAYS; way++)
        kvf_transport_close(ways[way].transport);
}

/* ---- the copying loops by themselves --------------------------------------------------------- */

static double loop_rate(const bench_state *bench, const kvf_copy_loop *loop, const kvf_run *runs,
                        size_t count) {
    kvf_copy_bases bases = {&bench->local, &bench->shared};
    uint64_t begin = bench_now_ns();
    for (size_t at = 0; at < count; at += BATCH_RUNS)
        loop->runs(KVF_COPY_TO_LOCAL, bases, runs + at, count - at < BATCH_RUNS ? count - at : BATCH_RUNS);
    return (double)REGION_BYTES / (double)(bench_now_ns() - begin);
}

static void compare_loops(bench_report *report, const bench_state *bench) {
    const kvf_copy_loop *loop = kvf_kernel_copy_loop(1);
    if (!loop) {
        bench_note(report, "This machine has no copying loop but memcpy.");
        return;
    }
    bench_table(report, "Copying loops, GB/s from a shared mapping",
                (const char *[]){"block", "memcpy", "loop", "GB/s", "ratio", NULL});
    for (size_t size = 0; size < BLOCK_SIZES; size++) {
        size_t count;
        kvf_run *runs = make_runs(block_bytes[size], 0, &count);
        double plain[ROUNDS], fast[ROUNDS], ratio[ROUNDS];
        for (int i = 0; i < ROUNDS; i++) {
            plain[i] = loop_rate(bench, &kvf_copy_plain, runs, count);
            fast[i] = loop_rate(bench, loop, runs, count);
            ratio[i] = fast[i] / plain[i];
        }
        bench_text(report, bench_bytes(block_bytes[size]));
        bench_number(report, 2, bench_spread_of(plain, ROUNDS).median);
        bench_text(report, loop->name);
        bench_number(report, 2, bench_spread_of(fast, ROUNDS).median);
        bench_number(report, 2, bench_spread_of(ratio, ROUNDS).median);
        free(runs);
    }
}

int main(int argc, char **argv) {
    bench_report *report = bench_report_start("transport", argc, argv);
    bench_state bench = {0};
    int fd = memfd_create("bench", MFD_CLOEXEC);
    bench_require(fd >= 0 && ftruncate(fd, (off_t)REGION_BYTES) == 0, "no shared memory");
    bench.shared = map_bytes(REGION_BYTES, MAP_SHARED, fd);
    bench.owner = start_owner(bench.shared);
    bench.local = map_bytes(REGION_BYTES, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    memset(bench.local, 0, REGION_BYTES);
    kvf_memory local = {.struct_size = sizeof(kvf_memory), .address = bench.local, .bytes = REGION_BYTES};
    bench_require(kvf_transport_open("shm", NULL, &bench.transport) == KVF_OK &&
                      kvf_transport_register(bench.transport, &local, 1) == KVF_OK &&
                      kvf_transport_connect(bench.transport, bench.owner.card, bench.owner.card_bytes,
                                            &bench.peer) == KVF_OK,
                  "no connection");
    const char *const columns[] = {"block",     "GB/s",       "low",   "high", "limit",
                                   "limit low", "limit high", "ratio", NULL};
    bench_table(report, "Memory the library allocated: kvferry, and memcpy from a shared mapping", columns);
    for (size_t size = 0; size < BLOCK_SIZES; size++)
        compare(report, &bench, block_bytes[size], true);
    bench_table(report, "Memory the caller brought: kvferry, and process_vm_readv of 1024 blocks", columns);
    for (size_t size = 0; size < BLOCK_SIZES; size++)
        compare(report, &bench, block_bytes[size], false);
    compare_choices(report, &bench);
    compare_loops(report, &bench);
    bench_note(report,
               "Every block of 256 MiB moved once, scattered on both sides; medians of 11 rounds, of "
               "the ways that are chosen of 61 rounds of 24 MiB; the ratio is the median of each round's.");
    kvf_transport_close(bench.transport);
    end_owner(&bench.owner);
    (void)munmap(bench.local, REGION_BYTES);
    (void)munmap(bench.shared, REGION_BYTES);
    (void)close(fd);
    return bench_report_end(report);
}
