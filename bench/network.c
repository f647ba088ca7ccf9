/*
 * Moves scattered blocks from one process to another, over TCP on the loopback or between two network namespaces, with
 * each fabric that reaches other machines, compared with a plain socket between the same places: the owner gathers the
 * bytes into pieces of 1 MiB, and the reader scatters each piece, with the library's own loops. For the socket, both
 * sides know the list of blocks beforehand; the fabrics are told it.
 *
 * The ways are measured in turn; figures are medians of the rounds, a ratio is the median of the rounds' ratios, shown
 * with the lowest and the highest. The processor time is that of both processes, including ZeroMQ's threads and the
 * kernel's work for them; so many processors are busy with it on average.
 *
 *     bench/network [--json FILE]
 *
 * The owners may be on another host: see hosts.h.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <kvferry/agent.h>
#include <kvferry/transport.h>

#include "hosts.h"
#include "kernel/kernel.h"
#include "report.h"

#define REGION_BYTES (64ull << 20)
#define PIECE_BYTES (1u << 20)
#define ROUNDS 11
#define BATCH_RUNS 4096u
#define BATCHES 8u
#define SHORT_PARTS 16u /* a fabric that is slow with short runs moves only a part of the list */
#define OF_LONG_RUNS 0.6
#define OF_PLAIN 0.5

static const uint64_t sizes[] = {256, 1024, 16u << 10, 1u << 20};
#define SIZES (sizeof sizes / sizeof *sizes)

enum { PLAIN, MESSAGES, ENCRYPTED, UCX, LIBFABRIC, WAYS };
static const char *const titles[WAYS] = {"plain socket", "messages", "messages, encrypted", "ucx (tcp)",
                                         "libfabric (tcp)"};
static const char *const kinds[WAYS] = {NULL, "messages", "messages", "ucx", "libfabric"};

typedef struct bench_list {
    kvf_run *runs;
    size_t count;
} bench_list;
static bench_list lists[SIZES];
static char public_key[41], secret_key[41];

/* One way to move: the process that owns the memory, and our side. */
typedef struct bench_way {
    int number;
    pid_t pid;
    int line; /* a connected TCP socket for PLAIN, else a pair that carries the card */
    clockid_t clock;
    kvf_transport *transport;
    kvf_peer *peer;
    unsigned char *local;
    const bench_list *list;
    size_t count, next, ended;
} bench_way;

static unsigned char *map_bytes(uint64_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bench_require(memory != MAP_FAILED, "no memory");
    (void)madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

static unsigned char byte_at(uint64_t at) {
    return (unsigned char)((at * 0x9e3779b97f4a7c15u) >> 56);
}

/* ---- lists ----------------------------------------------------------------------------------- */

/* Lists every block of the region once, from a random place to a random place. */
static void make_list(uint64_t bytes, bench_list *out) {
    out->count = REGION_BYTES / bytes;
    out->runs = bench_alloc(out->count, sizeof *out->runs);
    uint32_t *from = bench_shuffled(out->count), *to = bench_shuffled(out->count);
    for (size_t i = 0; i < out->count; i++)
        out->runs[i] = (kvf_run){to[i] * bytes, from[i] * bytes, bytes, 0, 0};
    free(from);
    free(to);
}

/* ---- a plain socket -------------------------------------------------------------------------- */

/* Redirects one side of `runs` to the piece, where the runs are contiguous. */
static void lay_out(const kvf_run *runs, size_t count, bool remote, kvf_run *out) {
    uint64_t at = 0;
    for (size_t i = 0; i < count; i++) {
        out[i] = runs[i];
        *(remote ? &out[i].remote_offset : &out[i].local_offset) = at;
        at += runs[i].bytes;
    }
}

static size_t piece_runs(const bench_list *list, size_t i) {
    size_t runs = PIECE_BYTES / list->runs[0].bytes;
    return list->count - i < runs ? list->count - i : runs;
}

/* Sends the bytes of a list each time its number is received. */
/* NOLINTNEXTLINE(readability-non-const-parameter): the copying loop takes it so */
static void serve_plain(int line, unsigned char *memory) {
    static kvf_run runs[PIECE_BYTES / 256];
    unsigned char *piece = map_bytes(PIECE_BYTES);
    unsigned char which;
    while (bench_hosts_receive(line, &which, 1))
        for (size_t i = 0, count; i < lists[which].count; i += count) {
            count = piece_runs(&lists[which], i);
            lay_out(lists[which].runs + i, count, false, runs);
            kvf_kernel_pack_runs(KVF_COPY_TO_LOCAL, (kvf_copy_bases){&piece, &memory}, runs, count);
            bench_hosts_send(line, piece, count * runs[0].bytes);
        }
}

static void by_plain(bench_way *way) {
    static kvf_run runs[PIECE_BYTES / 256];
    static unsigned char *piece;
    unsigned char which = (unsigned char)(way->list - lists);
    if (!piece)
        piece = map_bytes(PIECE_BYTES);
    bench_hosts_send(way->line, &which, 1);
    for (size_t i = 0, count; i < way->count; i += count) {
        count = piece_runs(way->list, i);
        uint64_t bytes = count * way->list->runs[0].bytes;
        lay_out(way->list->runs + i, count, true, runs);
        bench_require(bench_hosts_receive(way->line, piece, bytes), "the other process has ended");
        kvf_kernel_copy_runs(KVF_COPY_TO_LOCAL, (kvf_copy_bases){&way->local, &piece}, runs, count, bytes);
    }
}

/* ---- a fabric -------------------------------------------------------------------------------- */

/* NOLINTNEXTLINE(readability-non-const-parameter): it is registered, and written */
static kvf_transport *open_fabric(int number, unsigned char *memory) {
    const kvf_setting listen = {"messages.listen", bench_hosts_are_two() ? "tcp://*:*" : "tcp://127.0.0.1:*"};
    const kvf_setting settings[WAYS][2] = {[MESSAGES] = {listen, listen},
                                           [ENCRYPTED] = {listen, {"messages.secret_key", secret_key}},
                                           [UCX] = {{"ucx.tls", "tcp,self"}}};
    kvf_transport_options options = {.struct_size = sizeof options, .settings = settings[number]};
    kvf_transport *transport = NULL;
    kvf_memory region = {.struct_size = sizeof region, .address = memory, .bytes = REGION_BYTES};
    while (options.setting_count < 2 && settings[number][options.setting_count].key)
        options.setting_count++;
    bench_require(kvf_transport_open(kinds[number], &options, &transport) == KVF_OK &&
                      kvf_transport_register(transport, &region, 1) == KVF_OK,
                  kvf_error_detail());
    return transport;
}

/* NOLINTNEXTLINE(readability-non-const-parameter): it is registered */
static void serve_fabric(int number, int line, unsigned char *memory) {
    kvf_transport *transport = open_fabric(number, memory);
    const void *card;
    size_t bytes;
    bench_require(kvf_transport_export(transport, &card, &bytes) == KVF_OK, kvf_error_detail());
    bench_hosts_send(line, &bytes, sizeof bytes);
    bench_hosts_send(line, card, bytes);
    struct pollfd fds[2] = {{kvf_transport_event_fd(transport), POLLIN, 0}, {line, POLLIN, 0}};
    for (bool busy = false; !fds[1].revents; (void)poll(fds, 2, busy ? 0 : -1))
        bench_require(kvf_transport_progress(transport, &busy) == KVF_OK, kvf_error_detail());
    kvf_transport_close(transport);
}

static void submit_next(bench_way *way);

static void on_done(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation;
    bench_way *way = context;
    bench_require(status == KVF_OK, detail);
    way->ended++;
    submit_next(way);
}

static void submit_next(bench_way *way) {
    size_t here = way->count - way->next < BATCH_RUNS ? way->count - way->next : BATCH_RUNS;
    if (here == 0)
        return;
    bench_require(kvf_transport_submit(way->peer, KVF_READ, way->list->runs + way->next, here, on_done, way,
                                       NULL) == KVF_OK,
                  kvf_error_detail());
    way->next += here;
}

static void by_fabric(bench_way *way) {
    size_t batches = (way->count + BATCH_RUNS - 1) / BATCH_RUNS;
    way->next = way->ended = 0;
    for (uint32_t i = 0; i < BATCHES; i++)
        submit_next(way);
    bool busy = false;
    struct pollfd fd = {kvf_transport_event_fd(way->transport), POLLIN, 0};
    while (way->ended < batches) {
        if (!busy)
            (void)poll(&fd, 1, -1);
        bench_require(kvf_transport_progress(way->transport, &busy) == KVF_OK, kvf_error_detail());
    }
}

/* ---- both ------------------------------------------------------------------------------------ */

static void start(bench_way *way, int number) {
    int lines[2];
    *way = (bench_way){.number = number};
    if (number == PLAIN)
        bench_hosts_connect(&lines[0], &lines[1]);
    else
        bench_require(socketpair(AF_UNIX, SOCK_STREAM, 0, lines) == 0, "no socket pair");
    way->line = lines[0];
    (void)fflush(NULL);
    way->pid = fork();
    bench_require(way->pid >= 0, "no second process");
    if (way->pid == 0) {
        (void)close(lines[0]);
        bench_hosts_cross();
        unsigned char *memory = map_bytes(REGION_BYTES);
        for (uint64_t at = 0; at < REGION_BYTES; at++)
            memory[at] = byte_at(at);
        if (number == PLAIN)
            serve_plain(lines[1], memory);
        else
            serve_fabric(number, lines[1], memory);
        _exit(0);
    }
    (void)close(lines[1]);
    bench_require(clock_getcpuclockid(way->pid, &way->clock) == 0, "no clock of the other process");
}

static void join(bench_way *way, unsigned char *local) {
    size_t bytes;
    way->local = local;
    if (way->number == PLAIN)
        return;
    way->transport = open_fabric(way->number, local);
    bench_require(bench_hosts_receive(way->line, &bytes, sizeof bytes), "the other process has ended");
    void *card = bench_alloc(bytes, 1);
    bench_require(bench_hosts_receive(way->line, card, bytes) &&
                      kvf_transport_connect(way->transport, card, bytes, &way->peer) == KVF_OK,
                  kvf_error_detail());
    free(card);
}

static void end(bench_way *way) {
    kvf_transport_close(way->transport);
    (void)shutdown(way->line, SHUT_RDWR); /* processes that were started later also have it open */
    (void)close(way->line);
    (void)waitpid(way->pid, NULL, 0);
}

static double processor_seconds(const bench_way *way) {
    struct timespec here = {0}, there = {0};
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &here);
    (void)clock_gettime(way->clock, &there);
    return (double)(here.tv_sec + there.tv_sec) + (double)(here.tv_nsec + there.tv_nsec) / 1e9;
}

typedef struct bench_figures {
    double rate[ROUNDS], cpu[ROUNDS];
} bench_figures;

static void measure(bench_way *way, size_t size, double *rate, double *cpu) {
    const bool is_slow = way->number == UCX || way->number == LIBFABRIC;
    bool part = is_slow && sizes[size] < PIECE_BYTES;
    way->list = &lists[size];
    way->count = lists[size].count / (part ? SHORT_PARTS : 1);
    double bytes = (double)way->count * (double)sizes[size], before = processor_seconds(way);
    uint64_t begin = bench_now_ns();
    (way->number == PLAIN ? by_plain : by_fabric)(way);
    *rate = bytes / (double)(bench_now_ns() - begin);
    *cpu = (processor_seconds(way) - before) / bytes * 1e9;
}

static void check(const bench_way *way) {
    for (size_t i = 0; i < way->count; i += 97)
        for (uint64_t at = 0; at < way->list->runs[i].bytes; at += 61)
            bench_require(way->local[way->list->runs[i].local_offset + at] ==
                              byte_at(way->list->runs[i].remote_offset + at),
                          "the bytes that arrived are wrong");
}

static bench_spread ratio_of(const double *a, const double *b) {
    double ratios[ROUNDS];
    for (int i = 0; i < ROUNDS; i++)
        ratios[i] = a[i] / b[i];
    return bench_spread_of(ratios, ROUNDS);
}

static void show(bench_report *report, bench_figures figures[WAYS][SIZES], const bool *there) {
    bench_table(report, "Reads over TCP, GB/s, and processor seconds a GB of both sides",
                (const char *[]){"", "run", "GB/s", "low", "high", "CPU s/GB", "processors busy", "of plain",
                                 "lowest", "highest", "of its 1 MiB", NULL});
    for (int way = 0; way < WAYS; way++)
        for (size_t size = 0; size < SIZES && there[way]; size++) {
            bench_figures *of = &figures[way][size], sorted = *of;
            bench_spread of_plain = ratio_of(of->rate, figures[PLAIN][size].rate);
            double of_long = ratio_of(of->rate, figures[way][SIZES - 1].rate).median, busy[ROUNDS];
            for (int i = 0; i < ROUNDS; i++)
                busy[i] = of->cpu[i] * of->rate[i];
            bench_spread rate = bench_spread_of(sorted.rate, ROUNDS);
            bench_text(report, titles[way]);
            bench_text(report, bench_bytes(sizes[size]));
            bench_number(report, 2, rate.median);
            bench_number(report, 2, rate.low);
            bench_number(report, 2, rate.high);
            bench_number(report, 2, bench_spread_of(sorted.cpu, ROUNDS).median);
            bench_number(report, 2, bench_spread_of(busy, ROUNDS).median);
            bench_number(report, 2, of_plain.median);
            bench_number(report, 2, of_plain.low);
            bench_number(report, 2, of_plain.high);
            bench_number(report, 2, of_long);
            if (way == MESSAGES && size == 0 && (of_plain.median < OF_PLAIN || of_long < OF_LONG_RUNS))
                bench_fail(report,
                           "short runs by messages: less than half a plain socket, or 0.6 of long runs");
        }
}

int main(int argc, char **argv) {
    bench_report *report = bench_report_start("network", argc, argv);
    static bench_figures figures[WAYS][SIZES];
    bench_way ways[WAYS];
    bool there[WAYS] = {true, true, kvf_agent_make_keys(public_key, secret_key) == KVF_OK, false, false};
    for (uint32_t i = 0; kvf_transport_kind_name(i); i++)
        for (int way = UCX; way < WAYS; way++)
            there[way] = there[way] || strcmp(kvf_transport_kind_name(i), kinds[way]) == 0;
    bench_hosts_find();
    for (size_t size = 0; size < SIZES; size++)
        make_list(sizes[size], &lists[size]);
    for (int way = 0; way < WAYS; way++) /* before this process opens libraries that do not survive a fork */
        if (there[way])
            start(&ways[way], way);
    unsigned char *local = map_bytes(REGION_BYTES);
    for (int way = 0; way < WAYS; way++)
        if (there[way])
            join(&ways[way], local);
    for (int round = -1; round < ROUNDS; round++) /* the first round maps pages, and is checked */
        for (size_t size = 0; size < SIZES; size++)
            for (int way = 0; way < WAYS; way++) {
                bench_figures *of = &figures[way][size];
                int at = round < 0 ? 0 : round;
                if (!there[way])
                    continue;
                if (round < 0)
                    memset(local, 0, REGION_BYTES);
                measure(&ways[way], size, &of->rate[at], &of->cpu[at]);
                if (round < 0)
                    check(&ways[way]);
            }
    show(report, figures, there);
    for (int way = 0; way < WAYS; way++)
        if (there[way])
            end(&ways[way]);
    return bench_report_end(report);
}
