/*
 * One half of an honest pair on one host that attackers attack: shm_honest own [--wrong], or shm_honest read CARD
 *
 * The owner lends three regions: one that can be mapped, one that its caller brought, which the reader reads through
 * slots with the owner's help, and one that the reader writes to. Every byte follows from its region and offset, or
 * from the number of the round that wrote it, and the reader checks it; with --wrong one byte is wrong. Now and then
 * the reader reconnects. The owner's first line is its card; after that each half prints five lines of JSON a second,
 * and ends when its standard input does.
 */
#include <dirent.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <kvferry/transport.h>

#define SECOND 1000000000ull
#define REGIONS 3u
#define RUNS 64u
#define RUN_BYTES 4096u
#define REGION_BYTES (4u << 20)
#define DESCRIPTORS 1024u /* that the owner may have, like most processes */
#define CARD_BYTES 4096u
#define PATIENCE_NS (10 * SECOND)
#define ROUNDS_OF_A_CONNECTION 32u

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        if (call) {                                                                                          \
            (void)fprintf(stderr, "shm_honest: %s\n", kvf_error_detail());                                   \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

enum { MAPPED = 0, BROUGHT = 1, WRITTEN = 2 };

typedef struct half {
    kvf_transport *transport;
    unsigned char *memory[REGIONS];
    uint64_t done, failed, wrong, next_line;
    double busiest; /* CPU seconds of one call of progress at most */
} half;

static uint64_t now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

static unsigned char byte_of(uint32_t region, uint64_t round, uint64_t offset) {
    uint64_t mixed = (offset + round * 40503u + region * 977u) * 0x9e3779b97f4a7c15u;
    return (unsigned char)(mixed >> 56);
}

static void open_half(half *h, const kvf_transport_options *options) {
    static unsigned char brought[REGIONS][REGION_BYTES];
    kvf_memory regions[REGIONS];
    TRY(kvf_transport_open("shm", options, &h->transport));
    for (uint32_t i = 0; i < REGIONS; i++) {
        void *address = brought[i];
        if (i == MAPPED)
            TRY(kvf_transport_allocate(h->transport, KVF_MEMORY_HOST, 0, REGION_BYTES, &address));
        h->memory[i] = address;
        regions[i] = (kvf_memory){.struct_size = sizeof *regions, .address = address, .bytes = REGION_BYTES};
    }
    TRY(kvf_transport_register(h->transport, regions, REGIONS));
}

/* ---- what it takes of the machine -------------------------------------------------------------- */

static uint64_t resident(void) {
    char line[256];
    FILE *file = fopen("/proc/self/statm", "r");
    const char *read = file ? fgets(line, sizeof line, file) : NULL;
    const char *second = read ? strchr(read, ' ') : NULL;
    if (file)
        (void)fclose(file);
    return second ? strtoull(second, NULL, 10) * (uint64_t)sysconf(_SC_PAGESIZE) : 0;
}

/* If no descriptor is left to open the folder, all of them are in use. */
static uint32_t descriptors(void) {
    uint32_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder))
        count++;
    if (!folder)
        return DESCRIPTORS;
    (void)closedir(folder);
    return count;
}

static void say(half *h) {
    static uint64_t last_resident;
    uint64_t found = resident();
    last_resident = found ? found : last_resident;
    (void)printf("{\"done\": %llu, \"failed\": %llu, \"wrong\": %llu, \"refused\": 0, \"resident\": %llu, "
                 "\"descriptors\": %u, \"busiest_ms\": %.1f}\n",
                 (unsigned long long)h->done, (unsigned long long)h->failed, (unsigned long long)h->wrong,
                 (unsigned long long)last_resident, descriptors(), h->busiest * 1e3);
    (void)fflush(stdout);
    h->busiest = 0;
    h->next_line = now() + SECOND / 5;
}

static double processor_time(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* One turn: works, or waits for work; false if the program must end. */
static bool turn(half *h) {
    struct pollfd polled[2] = {{.fd = STDIN_FILENO, .events = POLLIN},
                               {.fd = kvf_transport_event_fd(h->transport), .events = POLLIN}};
    if (now() >= h->next_line)
        say(h);
    (void)poll(polled, 2, 100);
    double begun = processor_time();
    TRY(kvf_transport_progress(h->transport, NULL));
    double spent = processor_time() - begun;
    h->busiest = spent > h->busiest ? spent : h->busiest;
    return !polled[0].revents;
}

/* ---- the owner --------------------------------------------------------------------------------- */

static void own(bool one_wrong) {
    half h = {0};
    const struct rlimit few = {DESCRIPTORS, DESCRIPTORS};
    const void *card;
    size_t bytes;
    (void)setrlimit(RLIMIT_NOFILE, &few);
    open_half(&h, NULL);
    for (uint32_t region = MAPPED; region <= BROUGHT; region++)
        for (uint64_t at = 0; at < REGION_BYTES; at++)
            h.memory[region][at] = byte_of(region, 0, at);
    if (one_wrong)
        h.memory[BROUGHT][REGION_BYTES / 3] ^= 1;
    TRY(kvf_transport_export(h.transport, &card, &bytes));
    for (size_t i = 0; i < bytes; i++)
        (void)printf("%02x", ((const unsigned char *)card)[i]);
    (void)printf("\n");
    (void)fflush(stdout);
    while (turn(&h))
        ;
    kvf_transport_close(h.transport);
}

/* ---- the reader -------------------------------------------------------------------------------- */

typedef struct outcome {
    bool ended;
    kvf_status status;
} outcome;

static void note(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation;
    if (status)
        (void)fprintf(stderr, "shm_honest: %s\n", detail);
    *(outcome *)context = (outcome){true, status};
}

/* A share of a region, a different one in each round; sixteen rounds cover the region. */
static void fill_runs(kvf_run *runs, uint32_t region, uint64_t round) {
    for (uint32_t i = 0; i < RUNS; i++) {
        uint64_t at = (round * RUNS + i) * RUN_BYTES % REGION_BYTES;
        runs[i] = (kvf_run){at, at, RUN_BYTES, region, region};
    }
}

static bool move(half *h, kvf_peer *peer, kvf_direction direction, uint32_t region, uint64_t round) {
    kvf_run runs[RUNS];
    outcome out = {0};
    kvf_operation operation;
    fill_runs(runs, region, round);
    if (kvf_transport_submit(peer, direction, runs, RUNS, note, &out, &operation))
        return false;
    uint64_t deadline = now() + PATIENCE_NS;
    while (!out.ended && now() < deadline)
        if (!turn(h)) {
            kvf_transport_close(h->transport); /* which ends operations under way */
            exit(h->wrong > 0);
        }
    if (!out.ended) {
        (void)fprintf(stderr, "shm_honest: nothing moved for %llu s\n", PATIENCE_NS / SECOND);
        (void)kvf_transport_cancel(h->transport, operation);
        kvf_peer_close(peer); /* which ends the operation */
        h->failed++;
        return false;
    }
    return out.status == KVF_OK;
}

static void fill(half *h, uint32_t region, uint64_t round, uint64_t content, bool clear) {
    kvf_run runs[RUNS];
    fill_runs(runs, region, round);
    for (uint32_t i = 0; i < RUNS; i++)
        for (uint64_t at = runs[i].local_offset; at < runs[i].local_offset + RUN_BYTES; at++)
            h->memory[region][at] = (unsigned char)(byte_of(region, content, at) ^ (clear ? 0xff : 0));
}

static bool right(const half *h, uint32_t region, uint64_t round, uint64_t content) {
    kvf_run runs[RUNS];
    fill_runs(runs, region, round);
    for (uint32_t i = 0; i < RUNS; i++)
        for (uint64_t at = runs[i].local_offset; at < runs[i].local_offset + RUN_BYTES; at++)
            if (h->memory[region][at] != byte_of(region, content, at)) {
                (void)fprintf(stderr, "shm_honest: round %llu: region %u is wrong at %llu\n",
                              (unsigned long long)round, region, (unsigned long long)at);
                return false;
            }
    return true;
}

/* Reads mapped memory, or memory that the owner's caller brought, or writes and reads back what it wrote. Bytes that
 * were not moved stay inverted, and so are all wrong. KVF_E_IO: a move failed. */
static kvf_status go_round(half *h, kvf_peer *peer, uint64_t round) {
    uint32_t region = (uint32_t)(round % REGIONS);
    uint64_t share = round / REGIONS;
    uint64_t content = region == WRITTEN ? round : 0;
    if (region == WRITTEN) {
        fill(h, region, share, content, false);
        if (!move(h, peer, KVF_WRITE, region, share))
            return KVF_E_IO;
    }
    fill(h, region, share, content, true);
    if (!move(h, peer, KVF_READ, region, share))
        return KVF_E_IO;
    h->wrong += !right(h, region, share, content);
    h->done++;
    return KVF_OK;
}

static size_t read_card(const char *text, unsigned char *out) {
    size_t bytes = strlen(text) / 2;
    for (size_t i = 0; i < bytes && i < CARD_BYTES; i++) {
        const char two[3] = {text[2 * i], text[2 * i + 1], '\0'};
        out[i] = (unsigned char)strtoul(two, NULL, 16);
    }
    return bytes < CARD_BYTES ? bytes : CARD_BYTES;
}

static void read_from(const char *text) {
    unsigned char card[CARD_BYTES];
    half h = {0};
    const kvf_setting served = {"shm.direct", "off"};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = &served, .setting_count = 1};
    size_t bytes = read_card(text, card);
    open_half(&h, &options);
    (void)printf("reader\n");
    (void)fflush(stdout);
    for (uint64_t round = 0;;) {
        kvf_peer *peer = NULL;
        kvf_status status = kvf_transport_connect(h.transport, card, bytes, &peer);
        uint64_t failed = h.failed;
        if (status)
            (void)fprintf(stderr, "shm_honest: %s\n", kvf_error_detail());
        for (uint32_t i = 0; !status && i < ROUNDS_OF_A_CONNECTION; i++)
            status = go_round(&h, peer, round++);
        if (h.failed == failed) { /* move() has not closed the peer */
            h.failed += status != KVF_OK;
            kvf_peer_close(peer);
        }
        if (status && !turn(&h))
            break;
    }
    kvf_transport_close(h.transport);
    exit(h.wrong > 0);
}

int main(int argc, char **argv) {
    if (argc >= 2 && strcmp(argv[1], "own") == 0)
        own(argc > 2 && strcmp(argv[2], "--wrong") == 0);
    else if (argc == 3 && strcmp(argv[1], "read") == 0)
        read_from(argv[2]);
    else
        return 2;
    return 0;
}
