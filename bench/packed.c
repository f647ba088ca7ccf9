/*
 * A request between two processes, pulled and pushed, direct and packed, by the length of its runs: the same bytes over
 * the same fabric in turns, beside a plain socket that moves them from memory to memory.
 *
 * The two ranks keep K and V of two heads in other orders (NHD and HND), so that a run is one head of one token, however
 * long: 256 B is what models have. Every byte is compared before anything is measured.
 *
 * Memory that the callers brought is read on one host in more ways: by system calls alone, through a buffer that its
 * owner fills, by both at the same time, which is direct, and packed. What they take of the processors is both sides'.
 *
 *     bench/packed [--json FILE]
 */
#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <kvferry/stage.h>

#include "report.h"

#define HEADS 2u
#define LAYERS 2u
#define ROUNDS 5
#define SPINS 2000
#define BLOCK_TOKENS 16u

typedef struct bench_route {
    const char *title, *kind, *tls;
    bool push;    /* this process holds the cells and writes; else it reads */
    bool brought; /* memory of the caller's; else the library allocates it */
} bench_route;

#define CHECK_CELLS (-1) /* an order to the other process, in place of a port */

static const bench_route routes[] = {
    {"Pulled by UCX over TCP on loopback", "ucx", "tcp,self", false, false},
    {"Pushed by UCX over TCP on loopback", "ucx", "tcp,self", true, false},
    {"Pulled on the same host: memory that the library allocated", "shm", NULL, false, false},
};
static const bench_route brought = {"Pulled on the same host: memory that the callers brought", "shm", NULL,
                                    false, true};

#define ROUTES (sizeof routes / sizeof *routes)

static const uint64_t run_bytes[] = {256, 1024, 4096, 32768, 1 << 20};
#define RUN_SIZES (sizeof run_bytes / sizeof *run_bytes)
static const uint64_t brought_bytes[] = {128,  256,   512,   1024,  2048,  2944,   4096,
                                         8192, 16384, 32768, 49152, 65536, 131072, 262144};
#define BROUGHT_SIZES (sizeof brought_bytes / sizeof *brought_bytes)
#define TURNS 15
#define BROUGHT_SPINS 100 /* what waits spends little */
#define REQUIRED 0.90

static void must(kvf_status status) {
    if (status)
        (void)fprintf(stderr, "%s: %s\n", kvf_status_name(status), kvf_error_detail());
    bench_require(status == KVF_OK, "a call of the library failed");
}

/* ---- both ends ------------------------------------------------------------------------------- */

typedef struct bench_end {
    kvf_engine *engine;
    kvf_transport *transport;
    kvf_stage *stage;
    kvf_peer *peer;
    unsigned char *memory[LAYERS];
    uint64_t tokens;
    bool brought;   /* the memory is not the library's */
    unsigned spins; /* rounds without work before it sleeps */
} bench_end;

static uint64_t tokens_of(const bench_route *by, uint64_t run) {
    uint64_t bytes = by->brought ? 32ull << 20 : run < 4096 ? 8ull << 20 : 64ull << 20;
    return bytes / ((uint64_t)LAYERS * 2 * HEADS * run);
}

static kvf_engine *make_engine(const bench_route *by, uint64_t run, const char *order) {
    const kvf_part_desc parts[] = {
        {.name = "k", .dtype = KVF_DTYPE_BF16, .units = HEADS, .cell_elements = (uint32_t)(run / 2)},
        {.name = "v", .dtype = KVF_DTYPE_BF16, .units = HEADS, .cell_elements = (uint32_t)(run / 2)}};
    const uint32_t layers[LAYERS] = {0, 1};
    const kvf_group_desc group = {
        .name = "full", .layers = layers, .layer_count = LAYERS, .parts = parts, .part_count = 2};
    const kvf_model_desc desc = {
        .struct_size = sizeof desc, .layer_count = LAYERS, .groups = &group, .group_count = 1};
    const kvf_engine_spec spec = {
        .struct_size = sizeof spec,
        .all = {.tokens_per_block = BLOCK_TOKENS,
                .block_count = (tokens_of(by, run) + BLOCK_TOKENS - 1) / BLOCK_TOKENS,
                .order = order}};
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
    (void)kvf_stage_notice(((bench_end *)context)->stage, sender, data, bytes);
}

static void on_event(void *context, const char *peer, kvf_status status, const char *text) {
    (void)context;
    (void)fprintf(stderr, "%s: %s: %s\n", peer, kvf_status_name(status), text);
}

static const char *order_of(bool holds) {
    return holds ? "L|BPHN" : "L|BPNH";
}

static void open_end(bench_end *end, const bench_route *by, const char *name, uint64_t run, bool holds) {
    const kvf_setting setting = {"ucx.tls", by->tls};
    const kvf_transport_options options = {.struct_size = sizeof options,
                                           .name = name,
                                           .settings = &setting,
                                           .setting_count = by->tls ? 1 : 0,
                                           .on_notify = on_notify,
                                           .context = end};
    const kvf_stage_options stage = {.struct_size = sizeof stage, .on_event = on_event};
    end->engine = make_engine(by, run, order_of(holds));
    end->tokens = tokens_of(by, run);
    end->brought = by->brought;
    end->spins = by->brought ? BROUGHT_SPINS : SPINS;
    must(kvf_transport_open(by->kind, &options, &end->transport));
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(end->engine, 0));
    bench_require(shard->region_count == LAYERS, "one region a layer");
    kvf_memory regions[LAYERS];
    for (uint32_t i = 0; i < LAYERS; i++) {
        void *memory = NULL;
        if (by->brought)
            memory = mmap(NULL, shard->region_bytes[i], PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                          -1, 0);
        else
            must(kvf_transport_allocate(end->transport, KVF_MEMORY_HOST, 0, shard->region_bytes[i], &memory));
        bench_require(memory != MAP_FAILED, "no memory");
        end->memory[i] = memory;
        regions[i] = (kvf_memory){
            .struct_size = sizeof(kvf_memory), .address = memory, .bytes = shard->region_bytes[i]};
    }
    must(kvf_transport_register(end->transport, regions, LAYERS));
    must(kvf_stage_open(end->transport, kvf_engine_shard(end->engine, 0), &stage, &end->stage));
}

/* Returns the peer's, which stays until the next call. */
static const unsigned char *exchange_cards(bench_end *end, int line, size_t *their_bytes) {
    static unsigned char theirs[65536];
    const void *card;
    size_t bytes;
    must(kvf_transport_export(end->transport, &card, &bytes));
    bench_require(send(line, card, bytes, 0) == (ssize_t)bytes, "the card could not be sent");
    ssize_t got = recv(line, theirs, sizeof theirs, 0);
    bench_require(got > 0, "no card came");
    must(kvf_transport_connect(end->transport, theirs, (size_t)got, &end->peer));
    must(kvf_stage_join(end->stage, end->peer));
    *their_bytes = (size_t)got;
    return theirs;
}

static void close_end(bench_end *end) {
    kvf_stage_close(end->stage);
    kvf_transport_close(end->transport);
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(end->engine, 0));
    for (uint32_t i = 0; i < LAYERS && end->brought; i++)
        (void)munmap(end->memory[i], shard->region_bytes[i]);
    kvf_engine_free(end->engine);
}

static void work(bench_end *end, unsigned *idle) {
    bool moving, staging;
    must(kvf_transport_progress(end->transport, &moving));
    must(kvf_stage_progress(end->stage, &staging));
    *idle = moving || staging ? 0 : *idle + 1;
}

/* Sleeps where there has been nothing to do for a while. False: something came by `line`. */
static bool nap(bench_end *end, unsigned idle, int line) {
    if (idle < end->spins)
        return true;
    struct pollfd fds[2] = {{kvf_transport_event_fd(end->transport), POLLIN, 0}, {line, POLLIN, 0}};
    (void)poll(fds, 2, 100);
    return fds[1].revents == 0;
}

/* ---- cells ----------------------------------------------------------------------------------- */

/* Every block in reverse, so that no two are neighbours on both sides. */
static uint32_t block_of(const bench_end *end, uint64_t token) {
    uint64_t blocks = (end->tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    return (uint32_t)(blocks - 1 - token / BLOCK_TOKENS);
}

static bool cells_are(const bench_end *end, bool fill) {
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t part = 0; part < 2; part++)
            for (uint64_t token = 0; token < end->tokens; token++)
                for (uint32_t head = 0; head < HEADS; head++) {
                    kvf_cell_location at = {.struct_size = sizeof at};
                    must(kvf_shard_locate(kvf_engine_shard(end->engine, 0), 0, layer, part,
                                          block_of(end, token), (uint32_t)(token % BLOCK_TOKENS), head, &at));
                    unsigned char *cell = end->memory[at.region] + at.offset;
                    uint64_t seed = (((token * 2 + head) * 2 + part) * LAYERS + layer) * 0x9e3779b97f4a7c15u;
                    for (uint64_t i = 0; i < at.bytes; i += 8) {
                        uint64_t word = (seed ^ i) * 0xbf58476d1ce4e5b9u;
                        if (fill)
                            memcpy(cell + i, &word, 8);
                        else if (memcmp(cell + i, &word, 8) != 0)
                            return false;
                    }
                }
    return true;
}

/* ---- the other process ----------------------------------------------------------------------- */

/* The second process sends all of its memory through a socket. */
static void send_plainly(const bench_end *end, int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    address.sin_port = htons((uint16_t)port);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    bench_require(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0, "no connection");
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(end->engine, 0));
    for (uint32_t i = 0; i < LAYERS; i++)
        for (uint64_t at = 0; at < shard->region_bytes[i];) {
            uint64_t left = shard->region_bytes[i] - at;
            ssize_t sent = send(fd, end->memory[i] + at, left < 262144 ? left : 262144, MSG_NOSIGNAL);
            bench_require(sent > 0, "the socket broke");
            at += (uint64_t)sent;
        }
    (void)close(fd);
}

static _Noreturn void be_other(const bench_route *by, uint64_t run, int line) {
    bench_end end = {0};
    unsigned idle = 0;
    size_t their_bytes;
    char word;
    /* It opens the fabric only when its turn comes, and ends with the benchmark at the latest. */
    if (recv(line, &word, 1, 0) != 1)
        _exit(0);
    open_end(&end, by, "other", run, !by->push);
    if (!by->push)
        (void)cells_are(&end, true);
    (void)exchange_cards(&end, line, &their_bytes);
    for (;;) {
        do
            work(&end, &idle);
        while (nap(&end, idle, line));
        int order = 0;
        if (recv(line, &order, sizeof order, 0) != sizeof order)
            break;
        idle = 0;
        if (order != CHECK_CELLS) {
            send_plainly(&end, order);
            continue;
        }
        word = cells_are(&end, false) ? 'y' : 'n';
        bench_require(send(line, &word, 1, 0) == 1, "the other process is gone");
    }
    close_end(&end);
    _exit(0);
}

/* ---- measuring ------------------------------------------------------------------------------- */

typedef struct bench_mover {
    bench_end end;
    const bench_route *by;
    int line, listener, port;
    pid_t other;
    const unsigned char *card; /* of the other's */
    size_t card_bytes;
    kvf_engine *theirs;
    kvf_plan *plan;
    kvf_request *request;
    uint64_t bytes;
} bench_mover;

static void listen_plainly(bench_mover *mover) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof address;
    mover->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bench_require(mover->listener >= 0 && bind(mover->listener, (struct sockaddr *)&address, bytes) == 0 &&
                      listen(mover->listener, 1) == 0 &&
                      getsockname(mover->listener, (struct sockaddr *)&address, &bytes) == 0,
                  "no socket");
    mover->port = ntohs(address.sin_port);
}

/* Before this process opens UCX, which does not outlive a fork. */
static void start_other(bench_mover *mover, const bench_route *by, uint64_t run) {
    int lines[2];
    bench_require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, lines) == 0, "no socket pair");
    mover->other = fork();
    bench_require(mover->other >= 0, "no process");
    if (mover->other == 0) {
        (void)close(lines[0]);
        be_other(by, run, lines[1]);
    }
    (void)close(lines[1]);
    mover->line = lines[0];
}

static void open_mover(bench_mover *mover, const bench_route *by, uint64_t run) {
    bench_require(send(mover->line, "g", 1, 0) == 1, "the other process is gone");
    listen_plainly(mover);
    mover->by = by;
    open_end(&mover->end, by, "mover", run, by->push);
    if (by->push)
        (void)cells_are(&mover->end, true);
    mover->card = exchange_cards(&mover->end, mover->line, &mover->card_bytes);
    mover->theirs = make_engine(by, run, order_of(!by->push));
    const kvf_engine *reader = by->push ? mover->theirs : mover->end.engine;
    must(kvf_plan_build(kvf_engine_shard(reader, 0), by->push ? mover->end.engine : mover->theirs, NULL,
                        &mover->plan));
    must(kvf_request_create(mover->plan, &mover->request));
    uint32_t blocks = (uint32_t)((mover->end.tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS);
    uint32_t *ids = bench_alloc(blocks, sizeof *ids);
    for (uint32_t i = 0; i < blocks; i++)
        ids[i] = blocks - 1 - i;
    kvf_group_request group = {{ids, blocks, 0}, {ids, blocks, 0}, 0, mover->end.tokens};
    must(kvf_request_set(mover->request, &group, 1));
    mover->bytes = kvf_request_bytes(mover->request, 0);
}

static void close_mover(bench_mover *mover) {
    (void)shutdown(mover->line, SHUT_RDWR);
    (void)waitpid(mover->other, NULL, 0);
    (void)close(mover->line);
    (void)close(mover->listener);
    kvf_request_free(mover->request);
    kvf_plan_free(mover->plan);
    kvf_engine_free(mover->theirs);
    close_end(&mover->end);
}

/* Gigabytes a second of one request; `info` may be NULL. */
static double move_all(bench_mover *mover, kvf_way way, kvf_move_info *info) {
    const kvf_move_options options = {.struct_size = sizeof options, .way = way};
    kvf_move *move = NULL;
    kvf_status status;
    unsigned idle = 0;
    uint64_t begin = bench_now_ns();
    if (mover->by->push)
        must(kvf_stage_push(mover->end.stage, mover->request, 0, mover->end.peer, &options, &move));
    else
        must(kvf_stage_pull(mover->end.stage, mover->request, &mover->end.peer, &options, &move));
    for (;;) {
        work(&mover->end, &idle);
        if ((status = kvf_move_status(move)) != KVF_IN_PROGRESS)
            break; /* what work() brought to its end wakes nobody */
        (void)nap(&mover->end, idle, -1);
    }
    uint64_t ns = bench_now_ns() - begin;
    must(status);
    if (info)
        must(kvf_move_get_info(move, info));
    kvf_move_free(move);
    return (double)mover->bytes / (double)ns;
}

static double receive_plainly(bench_mover *mover) {
    uint64_t begin = bench_now_ns(), got = 0, size[LAYERS];
    bench_require(send(mover->line, &mover->port, sizeof mover->port, 0) == sizeof mover->port,
                  "the other process is gone");
    int fd = accept(mover->listener, NULL, NULL);
    for (uint32_t i = 0; i < LAYERS; i++) {
        size[i] = kvf_shard_get(kvf_engine_shard(mover->end.engine, 0))->region_bytes[i];
        for (uint64_t at = 0; at < size[i];) {
            ssize_t n = recv(fd, mover->end.memory[i] + at, size[i] - at, 0);
            bench_require(n > 0, "the socket broke");
            at += (uint64_t)n;
            got += (uint64_t)n;
        }
    }
    (void)close(fd);
    return (double)got / (double)(bench_now_ns() - begin);
}

static bool has_arrived(bench_mover *mover) {
    const int order = CHECK_CELLS;
    char word = 'n';
    if (!mover->by->push)
        return cells_are(&mover->end, false);
    bench_require(send(mover->line, &order, sizeof order, 0) == sizeof order &&
                      recv(mover->line, &word, 1, 0) == 1,
                  "the other process is gone");
    return word == 'y';
}

/* What is pushed goes to memory of the other process, which only the first way finds empty. */
static void verify(bench_mover *mover, kvf_way way, bool first) {
    for (uint32_t i = 0; i < LAYERS && !mover->by->push; i++)
        memset(mover->end.memory[i], 0x5a, 4096);
    bench_require((mover->by->push && !first) || !has_arrived(mover),
                  "cells are right before they were moved");
    (void)move_all(mover, way, NULL);
    bench_require(has_arrived(mover), "a cell has other bytes than its holder's");
}

static void compare(bench_report *report, const bench_route *by, uint64_t run, bench_mover *mover) {
    double direct[ROUNDS], packed[ROUNDS], chosen[ROUNDS], plain[ROUNDS], gain[ROUNDS], share[ROUNDS];
    kvf_move_info info = {.struct_size = sizeof info};
    open_mover(mover, by, run);
    verify(mover, KVF_WAY_PACKED, true);
    verify(mover, KVF_WAY_DIRECT, false);
    for (int i = 0; i < ROUNDS; i++) {
        plain[i] = receive_plainly(mover);
        direct[i] = move_all(mover, KVF_WAY_DIRECT, NULL);
        packed[i] = move_all(mover, KVF_WAY_PACKED, NULL);
        chosen[i] = move_all(mover, KVF_WAY_AUTO, &info);
        gain[i] = packed[i] / direct[i];
        share[i] = packed[i] / plain[i];
    }
    double packed_ns = (double)mover->bytes / bench_spread_of(packed, ROUNDS).median;
    double direct_ns = (double)mover->bytes / bench_spread_of(direct, ROUNDS).median;
    bench_text(report, bench_bytes(run));
    bench_number(report, 3, bench_spread_of(direct, ROUNDS).median);
    bench_number(report, 3, bench_spread_of(packed, ROUNDS).median);
    bench_number(report, 3, bench_spread_of(chosen, ROUNDS).median);
    bench_text(report, info.packed ? "packed" : "direct");
    bench_number(report, 3, bench_spread_of(plain, ROUNDS).median);
    bench_number(report, 2, bench_spread_of(gain, ROUNDS).median);
    bench_number(report, 2, bench_spread_of(share, ROUNDS).median);
    bench_number(report, 2, info.direct_ns / direct_ns);
    bench_number(report, 2, info.packed_ns / packed_ns);
    close_mover(mover);
}

/* ---- memory that the callers brought --------------------------------------------------------- */

enum { TOGETHER, ALONE, SERVED, PACKED, CHOSEN, WAYS };

/* The mover's memory again, by a transport with another setting; TOGETHER is what the mover's own does. */
typedef struct bench_rival {
    kvf_transport *transport;
    kvf_peer *peer;
} bench_rival;

static bench_rival open_rival(const bench_mover *mover, const char *direct) {
    const kvf_setting setting = {"shm.direct", direct};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = &setting, .setting_count = 1};
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(mover->end.engine, 0));
    kvf_memory regions[LAYERS];
    bench_rival rival = {0};
    for (uint32_t i = 0; i < LAYERS; i++)
        regions[i] = (kvf_memory){.struct_size = sizeof(kvf_memory),
                                  .address = mover->end.memory[i],
                                  .bytes = shard->region_bytes[i]};
    must(kvf_transport_open("shm", &options, &rival.transport));
    must(kvf_transport_register(rival.transport, regions, LAYERS));
    must(kvf_transport_connect(rival.transport, mover->card, mover->card_bytes, &rival.peer));
    return rival;
}

static void move_by_rival(const bench_mover *mover, bench_rival *rival) {
    kvf_transfer *transfer = NULL;
    kvf_status status;
    unsigned idle = 0;
    bool busy;
    must(kvf_transfer_start(mover->request, KVF_READ, &rival->peer, &transfer));
    while ((status = kvf_transfer_status(transfer)) == KVF_IN_PROGRESS) {
        must(kvf_transport_progress(rival->transport, &busy));
        idle = busy ? 0 : idle + 1;
        struct pollfd fd = {kvf_transport_event_fd(rival->transport), POLLIN, 0};
        if (idle > BROUGHT_SPINS)
            (void)poll(&fd, 1, 100);
    }
    must(status);
    kvf_transfer_free(transfer);
}

/* Processor time of both processes. */
static uint64_t processor_ns(const bench_mover *mover) {
    clockid_t clocks[2] = {CLOCK_PROCESS_CPUTIME_ID};
    bench_require(clock_getcpuclockid(mover->other, &clocks[1]) == 0, "no clock of the other process");
    uint64_t ns = 0;
    for (int i = 0; i < 2; i++) {
        struct timespec time;
        bench_require(clock_gettime(clocks[i], &time) == 0, "no clock of the other process");
        ns += (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
    }
    return ns;
}

static void move_brought(bench_mover *mover, bench_rival *rivals, int way) {
    static const kvf_way ways[WAYS] = {
        [TOGETHER] = KVF_WAY_DIRECT, [PACKED] = KVF_WAY_PACKED, [CHOSEN] = KVF_WAY_AUTO};
    if (way == ALONE || way == SERVED)
        move_by_rival(mover, &rivals[way]);
    else
        (void)move_all(mover, ways[way], NULL);
}

static void verify_brought(bench_mover *mover, bench_rival *rivals, int way) {
    for (uint32_t i = 0; i < LAYERS; i++)
        memset(mover->end.memory[i], 0x5a, 4096);
    bench_require(!has_arrived(mover), "cells are right before they were moved");
    move_brought(mover, rivals, way);
    bench_require(has_arrived(mover), "a cell has other bytes than its holder's");
}

static void compare_brought(bench_report *report, uint64_t run, bench_mover *mover) {
    double rates[WAYS][TURNS], seconds[WAYS][TURNS], ratios[WAYS][TURNS];
    bench_rival rivals[WAYS] = {0};
    open_mover(mover, &brought, run);
    rivals[ALONE] = open_rival(mover, "on");
    rivals[SERVED] = open_rival(mover, "off");
    for (int way = 0; way < WAYS; way++)
        verify_brought(mover, rivals, way);
    for (int turn = 0; turn < TURNS; turn++) {
        for (int i = 0; i < WAYS; i++) {
            int way = (turn + i) % WAYS;
            uint64_t processor = processor_ns(mover), begin = bench_now_ns();
            move_brought(mover, rivals, way);
            rates[way][turn] = (double)mover->bytes / (double)(bench_now_ns() - begin);
            seconds[way][turn] = (double)(processor_ns(mover) - processor) / (double)mover->bytes;
        }
        for (int way = 0; way < WAYS; way++)
            ratios[way][turn] = rates[CHOSEN][turn] / rates[way][turn];
    }
    /* Not of each turn's better one: of two that vary, the better one is better than both. */
    double beside_alone = bench_spread_of(ratios[ALONE], TURNS).median;
    double beside_served = bench_spread_of(ratios[SERVED], TURNS).median;
    double ratio = beside_alone < beside_served ? beside_alone : beside_served;
    bench_text(report, bench_bytes(run));
    for (int way = 0; way < WAYS; way++)
        bench_number(report, 2, bench_spread_of(rates[way], TURNS).median);
    bench_number(report, 2, ratio);
    bench_number(report, 2, 1 / bench_spread_of(ratios[PACKED], TURNS).median);
    for (int way = 0; way < CHOSEN; way++)
        bench_number(report, 2, bench_spread_of(seconds[way], TURNS).median);
    if (ratio < REQUIRED)
        bench_fail(report, "less than 90% of the better of system calls and the owner's copies");
    kvf_transport_close(rivals[ALONE].transport);
    kvf_transport_close(rivals[SERVED].transport);
    close_mover(mover);
}

static void compare_all_brought(bench_report *report, bench_mover *movers) {
    bench_table(report, brought.title,
                (const char *[]){"run", "together GB/s", "alone GB/s", "served GB/s", "packed GB/s",
                                 "chosen GB/s", "ratio", "packed/chosen", "together s/GB", "alone s/GB",
                                 "served s/GB", "packed s/GB", NULL});
    for (size_t i = 0; i < BROUGHT_SIZES; i++)
        compare_brought(report, brought_bytes[i], &movers[i]);
    bench_note(report,
               "ratio: chosen over the better of alone (system calls) and served (copied by the owner into a "
               "buffer); together: both at once; s/GB: processor time of both processes");
}

int main(int argc, char **argv) {
    bench_report *report = bench_report_start("packed", argc, argv);
    static bench_mover brought_movers[BROUGHT_SIZES];
    for (size_t i = 0; i < BROUGHT_SIZES; i++)
        start_other(&brought_movers[i], &brought, brought_bytes[i]);
    static bench_mover movers[ROUTES][RUN_SIZES];
    for (size_t r = 0; r < ROUTES; r++)
        for (size_t i = 0; i < RUN_SIZES; i++)
            start_other(&movers[r][i], &routes[r], run_bytes[i]);
    compare_all_brought(report, brought_movers);
    for (size_t r = 0; r < ROUTES; r++) {
        const char *kind;
        bool there = false;
        for (uint32_t i = 0; (kind = kvf_transport_kind_name(i)); i++)
            there = there || strcmp(kind, routes[r].kind) == 0;
        if (!there)
            continue;
        bench_table(report, routes[r].title,
                    (const char *[]){"run", "direct GB/s", "packed GB/s", "chosen GB/s", "way", "socket GB/s",
                                     "packed/direct", "packed/socket", "direct predicted", "packed predicted",
                                     NULL});
        for (size_t i = 0; i < RUN_SIZES; i++)
            compare(report, &routes[r], run_bytes[i], &movers[r][i]);
        bench_note(report, "predicted: time predicted for the last round over the median that was seen");
    }
    return bench_report_end(report);
}
