/*
 * A request between two processes, pulled and pushed, direct and packed, by run length: the same bytes over the same
 * fabric in turns, compared with a plain socket that moves them from memory to memory.
 *
 * The two ranks keep K and V of two heads in different orders (NHD and HND), so that a run is one head of one token; in
 * models it has 256 B. Every byte is compared before any measurement.
 *
 * On one host, memory that the callers brought is read in more ways: by system calls alone, through a buffer that its
 * owner fills, by both at the same time (which is direct), and packed. Their processor time is that of both sides.
 *
 *     bench/packed [--json FILE]
 */
#include <poll.h>

#include "stage_pair.h"

#define LAYERS 2u
#define ROUNDS 15 /* single rounds of the plain socket differ by a factor of two */
#define SPINS 2000

static const bench_route routes[] = {
    {.title = "Pulled by UCX over TCP on loopback", .kind = "ucx", .tls = "tcp,self", .spins = SPINS},
    {.title = "Pushed by UCX over TCP on loopback",
     .kind = "ucx",
     .tls = "tcp,self",
     .push = true,
     .spins = SPINS},
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

static void start_pair(bench_pair *pair, const bench_route *route, uint64_t run) {
    const uint64_t bytes = route->brought ? 32ull << 20 : run < 4096 ? 8ull << 20 : 64ull << 20;
    const bench_cells cells = bench_cells_of(LAYERS, run, bytes);
    bench_pair_start(pair, route, &cells);
}

static double rate(const bench_pair *pair, double ns) {
    return (double)kvf_request_bytes(pair->request, 0) / ns;
}

static void compare(bench_report *report, uint64_t run, bench_pair *pair) {
    double direct[ROUNDS], packed[ROUNDS], chosen[ROUNDS], plain[ROUNDS], gain[ROUNDS], share[ROUNDS];
    kvf_move_info info = {.struct_size = sizeof info};
    bench_pair_open(pair);
    bench_pair_verify(pair, KVF_WAY_PACKED);
    bench_pair_verify(pair, KVF_WAY_DIRECT);
    for (int i = 0; i < ROUNDS; i++) {
        plain[i] = bench_pair_plain(pair);
        direct[i] = rate(pair, bench_pair_move(pair, KVF_WAY_DIRECT, NULL));
        packed[i] = rate(pair, bench_pair_move(pair, KVF_WAY_PACKED, NULL));
        chosen[i] = rate(pair, bench_pair_move(pair, KVF_WAY_AUTO, &info));
        gain[i] = packed[i] / direct[i];
        share[i] = packed[i] / plain[i];
    }
    const double bytes = (double)kvf_request_bytes(pair->request, 0);
    const double packed_ns = bytes / bench_spread_of(packed, ROUNDS).median;
    const double direct_ns = bytes / bench_spread_of(direct, ROUNDS).median;
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
    bench_pair_close(pair);
}

/* ---- memory that the callers brought --------------------------------------------------------- */

enum { TOGETHER, ALONE, SERVED, PACKED, CHOSEN, WAYS };

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
    static const kvf_way ways[WAYS] = {
        [TOGETHER] = KVF_WAY_DIRECT, [PACKED] = KVF_WAY_PACKED, [CHOSEN] = KVF_WAY_AUTO};
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
    double rates[WAYS][TURNS], seconds[WAYS][TURNS], ratios[WAYS][TURNS];
    bench_rival rivals[WAYS] = {0};
    bench_pair_open(pair);
    (void)bench_pair_ask_for(pair, 0, 1, 0);
    rivals[ALONE] = open_rival(pair, "on");
    rivals[SERVED] = open_rival(pair, "off");
    for (int way = 0; way < WAYS; way++)
        verify_brought(pair, rivals, way);
    for (int turn = 0; turn < TURNS; turn++) {
        for (int i = 0; i < WAYS; i++) {
            int way = (turn + i) % WAYS;
            uint64_t processor = bench_pair_processor_ns(pair), begin = bench_now_ns();
            move_brought(pair, rivals, way);
            rates[way][turn] = rate(pair, (double)(bench_now_ns() - begin));
            seconds[way][turn] = 1 / rate(pair, (double)(bench_pair_processor_ns(pair) - processor));
        }
        for (int way = 0; way < WAYS; way++)
            ratios[way][turn] = rates[CHOSEN][turn] / rates[way][turn];
    }
    /* Not with the better of each turn: if two ways vary, the best of each turn beats both. */
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
    static bench_pair brought_pairs[BROUGHT_SIZES];
    for (size_t i = 0; i < BROUGHT_SIZES; i++)
        start_pair(&brought_pairs[i], &brought, brought_bytes[i]);
    static bench_pair pairs[ROUTES][RUN_SIZES];
    for (size_t r = 0; r < ROUTES; r++)
        for (size_t i = 0; i < RUN_SIZES; i++)
            start_pair(&pairs[r][i], &routes[r], run_bytes[i]);
    compare_all_brought(report, brought_pairs);
    for (size_t r = 0; r < ROUTES; r++) {
        if (!bench_has_kind(routes[r].kind))
            continue;
        bench_table(report, routes[r].title,
                    (const char *[]){"run", "direct GB/s", "packed GB/s", "chosen GB/s", "way", "socket GB/s",
                                     "packed/direct", "packed/socket", "direct predicted", "packed predicted",
                                     NULL});
        for (size_t i = 0; i < RUN_SIZES; i++)
            compare(report, run_bytes[i], &pairs[r][i]);
        bench_note(report, "predicted: time predicted for the last round over the median that was seen");
    }
    return bench_report_end(report);
}
