/*
 * A request between two processes, pulled and pushed, direct, packed and as the stage chooses, by run length: the same
 * bytes over the same fabric in turns, compared with a plain socket that moves them from memory to memory, in order.
 *
 * The two ranks keep K and V of two heads in different orders (NHD and HND), so that a run is one head of one token; in
 * models it has 256 B. Every byte is compared before any measurement.
 *
 * On one host, memory that the callers brought is read in more ways: by system calls alone, through a buffer that its
 * owner fills, by both at the same time (which is direct), and packed. Processor time is that of both sides.
 *
 *     bench/packed [--json FILE]
 *
 * The other process may be on another host: see hosts.h. Then only fabrics that reach it are measured.
 */
#include <poll.h>
#include <string.h>

#include "hosts.h"
#include "stage_pair.h"

#define LAYERS 2u
#define ROUNDS 15 /* single rounds of the plain socket differ by a factor of two */
#define SPINS 2000

static const bench_route routes[] = {
    {.title = "Pulled by messages", .kind = "messages"},
    {.title = "Pushed by messages", .kind = "messages", .push = true},
    {.title = "Pulled by UCX over TCP", .kind = "ucx", .tls = "tcp,self", .spins = SPINS},
    {.title = "Pushed by UCX over TCP", .kind = "ucx", .tls = "tcp,self", .push = true, .spins = SPINS},
    {.title = "Pulled by libfabric over TCP", .kind = "libfabric", .spins = SPINS},
    {.title = "Pushed by libfabric over TCP", .kind = "libfabric", .push = true, .spins = SPINS},
    {.title = "Pulled on the same host: memory that the library allocated", .kind = "shm", .spins = SPINS},
};
static const bench_route brought = {.title = "Pulled on the same host: memory that the callers brought",
                                    .kind = "shm",
                                    .brought = true,
                                    .spins = 100}; /* a side that waits uses little processor time */

#define ROUTES (sizeof routes / sizeof *routes)

static const uint64_t run_bytes[] = {256, 1024, 4096, 32768, 1 << 20};
#define RUN_SIZES (sizeof run_bytes / sizeof *run_bytes)
static const uint64_t brought_bytes[] = {128,  256,   512,   1024,  2048,  2944,   4096,
                                         8192, 16384, 32768, 49152, 65536, 131072, 262144};
#define BROUGHT_SIZES (sizeof brought_bytes / sizeof *brought_bytes)
#define TURNS 15
#define REQUIRED 0.90

/* Fabrics that move each run by itself take long for short ones that go directly. */
static uint64_t bytes_of(const bench_route *route, uint64_t run) {
    const bool is_slow = run < 4096 && !bench_kind(route->kind).lists;
    return route->brought ? 32ull << 20 : is_slow ? 8ull << 20 : 64ull << 20;
}

static void start_pair(bench_pair *pair, const bench_route *route, uint64_t run) {
    const uint64_t bytes = bytes_of(route, run);
    const bench_cells cells = bench_cells_of(LAYERS, run, bytes);
    bench_pair_start(pair, route, &cells);
}

static bool is_measured(const bench_route *route) {
    return bench_kind(route->kind).name && !(bench_hosts_are_two() && strcmp(route->kind, "shm") == 0);
}

static double rate(const bench_pair *pair, double ns) {
    return (double)kvf_request_bytes(pair->request, 0) / ns;
}

/* One way to move the bytes, in turns with the others. */
enum { DIRECT, PACKED, CHOSEN, SOCKET, WAYS };

static double take_turn(const bench_pair *pair, int way, kvf_move_info *info) {
    static const kvf_way ways[] = {
        [DIRECT] = KVF_WAY_DIRECT, [PACKED] = KVF_WAY_PACKED, [CHOSEN] = KVF_WAY_AUTO};
    return way == SOCKET ? bench_pair_plain(pair) : rate(pair, bench_pair_move(pair, ways[way], info));
}

static void compare(bench_report *report, uint64_t run, bench_pair *pair) {
    double rates[WAYS][ROUNDS], seconds[WAYS][ROUNDS], gain[ROUNDS], share[ROUNDS], chosen_share[ROUNDS];
    kvf_move_info info = {.struct_size = sizeof info};
    bench_pair_open(pair);
    bench_pair_verify(pair, KVF_WAY_PACKED);
    bench_pair_verify(pair, KVF_WAY_DIRECT);
    const double bytes = (double)kvf_request_bytes(pair->request, 0);
    for (int i = 0; i < ROUNDS; i++) {
        for (int turn = 0; turn < WAYS; turn++) {
            const int way = (turn + i) % WAYS;
            const uint64_t processor = bench_pair_processor_ns(pair);
            rates[way][i] = take_turn(pair, way, way == CHOSEN ? &info : NULL);
            seconds[way][i] = (double)(bench_pair_processor_ns(pair) - processor) / bytes;
        }
        gain[i] = rates[PACKED][i] / rates[DIRECT][i];
        share[i] = rates[PACKED][i] / rates[SOCKET][i];
        chosen_share[i] = rates[CHOSEN][i] / rates[SOCKET][i];
    }
    double medians[WAYS];
    bench_text(report, bench_bytes(run));
    for (int way = 0; way < WAYS; way++)
        medians[way] = bench_spread_of(rates[way], ROUNDS).median;
    for (int way = 0; way < WAYS; way++) {
        bench_number(report, 3, medians[way]);
        if (way == CHOSEN)
            bench_text(report, info.packed ? "packed" : "direct");
    }
    bench_number(report, 2, bench_spread_of(gain, ROUNDS).median);
    bench_number(report, 2, bench_spread_of(share, ROUNDS).median);
    bench_number(report, 2, bench_spread_of(chosen_share, ROUNDS).median);
    bench_number(report, 2, info.direct_ns * medians[DIRECT] / bytes);
    bench_number(report, 2, info.packed_ns * medians[PACKED] / bytes);
    for (int way = PACKED; way < WAYS; way++)
        bench_number(report, 2, bench_spread_of(seconds[way], ROUNDS).median);
    bench_pair_close(pair);
}

/* ---- memory that the callers brought --------------------------------------------------------- */

enum { TOGETHER, ALONE, SERVED, BROUGHT_PACKED, BROUGHT_CHOSEN, BROUGHT_WAYS };

/* Another transport to the pair's memory, with a different setting; TOGETHER is the pair's own. */
typedef struct bench_rival {
    kvf_transport *transport;
    kvf_peer *peer;
} bench_rival;

static bench_rival open_rival(const bench_pair *pair, const char *direct) {
    const kvf_setting setting = {"shm.direct", direct};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = &setting, .setting_count = 1};
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(pair->end.engine, 0));
    kvf_memory regions[LAYERS];
    bench_rival rival = {0};
    for (uint32_t i = 0; i < LAYERS; i++)
        regions[i] = (kvf_memory){.struct_size = sizeof(kvf_memory),
                                  .address = pair->end.memory[i],
                                  .bytes = shard->region_bytes[i]};
    bench_must(kvf_transport_open("shm", &options, &rival.transport));
    bench_must(kvf_transport_register(rival.transport, regions, LAYERS));
    bench_must(kvf_transport_connect(rival.transport, pair->card, pair->card_bytes, &rival.peer));
    return rival;
}

static void move_by_rival(const bench_pair *pair, bench_rival *rival) {
    kvf_transfer *transfer = NULL;
    kvf_status status;
    unsigned idle = 0;
    bool busy;
    bench_must(kvf_transfer_start(pair->request, KVF_READ, &rival->peer, &transfer));
    while ((status = kvf_transfer_status(transfer)) == KVF_IN_PROGRESS) {
        struct pollfd fd = {kvf_transport_event_fd(rival->transport), POLLIN, 0};
        if (idle > brought.spins)
            (void)poll(&fd, 1, 100);
        bench_must(kvf_transport_progress(rival->transport, &busy));
        idle = busy ? 0 : idle + 1;
    }
    bench_must(status);
    kvf_transfer_free(transfer);
}

static void move_brought(const bench_pair *pair, bench_rival *rivals, int way) {
    static const kvf_way ways[BROUGHT_WAYS] = {
        [TOGETHER] = KVF_WAY_DIRECT, [BROUGHT_PACKED] = KVF_WAY_PACKED, [BROUGHT_CHOSEN] = KVF_WAY_AUTO};
    if (way == ALONE || way == SERVED)
        move_by_rival(pair, &rivals[way]);
    else
        (void)bench_pair_move(pair, ways[way], NULL);
}

static void verify_brought(const bench_pair *pair, bench_rival *rivals, int way) {
    bench_pair_spoil(pair);
    move_brought(pair, rivals, way);
    bench_pair_check(pair);
}

static void compare_brought(bench_report *report, uint64_t run, bench_pair *pair) {
    double rates[BROUGHT_WAYS][TURNS], seconds[BROUGHT_WAYS][TURNS], ratios[BROUGHT_WAYS][TURNS];
    bench_rival rivals[BROUGHT_WAYS] = {0};
    bench_pair_open(pair);
    (void)bench_pair_ask_for(pair, 0, 1, 0);
    rivals[ALONE] = open_rival(pair, "on");
    rivals[SERVED] = open_rival(pair, "off");
    for (int way = 0; way < BROUGHT_WAYS; way++)
        verify_brought(pair, rivals, way);
    for (int turn = 0; turn < TURNS; turn++) {
        for (int i = 0; i < BROUGHT_WAYS; i++) {
            int way = (turn + i) % BROUGHT_WAYS;
            uint64_t processor = bench_pair_processor_ns(pair), begin = bench_now_ns();
            move_brought(pair, rivals, way);
            rates[way][turn] = rate(pair, (double)(bench_now_ns() - begin));
            seconds[way][turn] = 1 / rate(pair, (double)(bench_pair_processor_ns(pair) - processor));
        }
        for (int way = 0; way < BROUGHT_WAYS; way++)
            ratios[way][turn] = rates[BROUGHT_CHOSEN][turn] / rates[way][turn];
    }
    /* Not with the better of each turn: if two ways vary, the best of each turn beats both. */
    double beside_alone = bench_spread_of(ratios[ALONE], TURNS).median;
    double beside_served = bench_spread_of(ratios[SERVED], TURNS).median;
    double ratio = beside_alone < beside_served ? beside_alone : beside_served;
    bench_text(report, bench_bytes(run));
    for (int way = 0; way < BROUGHT_WAYS; way++)
        bench_number(report, 2, bench_spread_of(rates[way], TURNS).median);
    bench_number(report, 2, ratio);
    bench_number(report, 2, 1 / bench_spread_of(ratios[BROUGHT_PACKED], TURNS).median);
    for (int way = 0; way < BROUGHT_CHOSEN; way++)
        bench_number(report, 2, bench_spread_of(seconds[way], TURNS).median);
    if (ratio < REQUIRED)
        bench_fail(report, "less than 90% of the better of system calls and the owner's copies");
    kvf_transport_close(rivals[ALONE].transport);
    kvf_transport_close(rivals[SERVED].transport);
    bench_pair_close(pair);
}

static void compare_all_brought(bench_report *report, bench_pair *pairs) {
    bench_table(report, brought.title,
                (const char *[]){"run", "together GB/s", "alone GB/s", "served GB/s", "packed GB/s",
                                 "chosen GB/s", "ratio", "packed/chosen", "together s/GB", "alone s/GB",
                                 "served s/GB", "packed s/GB", NULL});
    for (size_t i = 0; i < BROUGHT_SIZES; i++)
        compare_brought(report, brought_bytes[i], &pairs[i]);
    bench_note(report,
               "ratio: chosen over the better of alone (system calls) and served (copied by the owner into a "
               "buffer); together: both at once; s/GB: processor time of both processes");
}

int main(int argc, char **argv) {
    bench_report *report = bench_report_start("packed", argc, argv);
    static bench_pair brought_pairs[BROUGHT_SIZES], pairs[ROUTES][RUN_SIZES];
    bench_hosts_find();
    const bool one_host = !bench_hosts_are_two();
    for (size_t i = 0; i < BROUGHT_SIZES && one_host; i++)
        start_pair(&brought_pairs[i], &brought, brought_bytes[i]);
    for (size_t r = 0; r < ROUTES; r++)
        for (size_t i = 0; i < RUN_SIZES && is_measured(&routes[r]); i++)
            start_pair(&pairs[r][i], &routes[r], run_bytes[i]);
    if (one_host)
        compare_all_brought(report, brought_pairs);
    for (size_t r = 0; r < ROUTES; r++) {
        if (!is_measured(&routes[r]))
            continue;
        bench_table(report, routes[r].title,
                    (const char *[]){"run", "direct GB/s", "packed GB/s", "chosen GB/s", "way", "socket GB/s",
                                     "packed/direct", "packed/socket", "chosen/socket", "direct predicted",
                                     "packed predicted", "packed s/GB", "chosen s/GB", "socket s/GB", NULL});
        for (size_t i = 0; i < RUN_SIZES; i++)
            compare(report, run_bytes[i], &pairs[r][i]);
        bench_note(report, "predicted: time predicted for the last round over the median that was seen");
    }
    return bench_report_end(report);
}
