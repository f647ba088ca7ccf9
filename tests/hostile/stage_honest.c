/*
 * One half of an honest pair of stages over messages that attackers attack: stage_honest own|own-wrong [SECRET], or
 * stage_honest read CARD [SECRET]
 *
 * The reader pulls packed cells of the owner that follow from a seed, or pushes cells to it and pulls them back, and
 * checks every cell. "own-wrong": one byte is wrong. The owner connects back to peers that tell it a card, and joins
 * them, up to a limit: a peer with its card may start flows. SECRET is a Z85 CurveZMQ key. The owner's first line is
 * what attackers are told:
 *
 *     CARD,PORT,SECRET OF THE CARD,GENERATION,REGIONS,PUBLIC KEY or nothing
 *
 * After that each half prints five lines of JSON a second, and ends when its standard input does.
 */
#include <dirent.h>
#include <malloc.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <zmq.h>

#include "stage_pair.h"
#include "transport/card.h"
#include "transport/messages/messages_card.h"
#include "transport/transport.h"

#define SECOND 1000000000ull
#define JOINED_MAX 24u /* peers; each takes some descriptors */
#define CARD_BYTES 4096u
#define PATIENCE_NS (60 * SECOND)
#define SEED 1u
#if defined __SANITIZE_ADDRESS__
#define SLOWER 10u
#else
#define SLOWER 1u
#endif

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        if (call) {                                                                                          \
            (void)fprintf(stderr, "stage_honest: %s\n", kvf_error_detail());                                 \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

typedef struct half {
    const stage_pair *pair;
    kvf_transport *transport;
    kvf_stage *stage;
    content_rank rank;
    kvf_peer *peers[JOINED_MAX];
    struct {
        unsigned char card[CARD_BYTES];
        size_t bytes;
    } cards[JOINED_MAX];            /* of `peers` */
    unsigned char card[CARD_BYTES]; /* of a peer that wants to be joined */
    size_t card_bytes;
    bool joined; /* reader: the owner has joined us */
    uint64_t done, failed, wrong, events, next_line;
    double busiest; /* CPU seconds of one turn at most */
} half;

/* ---- callbacks -------------------------------------------------------------------------------- */

static void on_notify(void *context, kvf_transport *transport, const char *sender, const void *data,
                      size_t bytes) {
    half *h = context;
    (void)transport;
    if (h->stage && kvf_stage_notice(h->stage, sender, data, bytes))
        return;
    if (bytes > 4 && memcmp(data, "card", 4) == 0 && h->card_bytes == 0) {
        h->card_bytes = bytes - 4;
        memcpy(h->card, (const unsigned char *)data + 4, h->card_bytes);
    }
    h->joined = h->joined || (bytes == 6 && memcmp(data, "joined", 6) == 0);
}

/* Fences a lost peer, so that the slots it was lent can be lent again. */
static void on_peer_lost(void *context, kvf_transport *transport, kvf_peer *peer, const char *detail) {
    half *h = context;
    (void)detail;
    for (uint32_t i = 0; i < JOINED_MAX; i++) {
        if (h->peers[i] != peer)
            continue;
        h->peers[i] = NULL;
        if (!h->stage)
            continue;
        kvf_stage_leave(h->stage, peer);
        kvf_status status = kvf_transport_fence(transport, h->cards[i].card, h->cards[i].bytes);
        if (!status || status == KVF_E_NOT_FOUND)
            kvf_stage_quiet(h->stage, kvf_peer_name(peer));
    }
    kvf_peer_close(peer);
}

static void on_event(void *context, const char *peer, kvf_status status, const char *text) {
    (void)peer;
    (void)status;
    (void)text;
    ((half *)context)->events++;
}

/* Connects back to a peer that sent its card, and notifies it. */
static void join_one(half *h) {
    kvf_peer **place = h->peers;
    while (place < h->peers + JOINED_MAX && *place)
        place++;
    if (h->card_bytes > 0 && place < h->peers + JOINED_MAX &&
        !kvf_transport_connect(h->transport, h->card, h->card_bytes, place)) {
        if (kvf_stage_join(h->stage, *place) || kvf_transport_notify(*place, "joined", 6)) {
            kvf_stage_leave(h->stage, *place);
            kvf_peer_close(*place);
            *place = NULL;
        } else {
            memcpy(h->cards[place - h->peers].card, h->card, h->card_bytes);
            h->cards[place - h->peers].bytes = h->card_bytes;
        }
    }
    h->card_bytes = 0;
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

/* glibc keeps freed memory for later. It is given back here, so that the resident memory is what is in use. */
static void give_back_freed(void) {
#if defined __GLIBC__ && !defined __SANITIZE_ADDRESS__
    (void)malloc_trim(0);
#endif
}

static uint32_t descriptors(void) {
    uint32_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder))
        count++;
    if (folder)
        (void)closedir(folder);
    return folder ? count : 1024;
}

static void say(half *h) {
    static uint64_t last_resident;
    kvf_stage_info info = {.struct_size = sizeof info};
    TRY(kvf_stage_get_info(h->stage, &info));
    give_back_freed();
    const uint64_t found = resident();
    last_resident = found ? found : last_resident;
    (void)printf("{\"done\": %llu, \"failed\": %llu, \"wrong\": %llu, \"refused\": %llu, \"resident\": %llu, "
                 "\"descriptors\": %u, \"flows\": %u, \"slots_kept\": %u, \"slower\": %u, "
                 "\"busiest_ms\": %.1f}\n",
                 (unsigned long long)h->done, (unsigned long long)h->failed, (unsigned long long)h->wrong,
                 (unsigned long long)h->events, (unsigned long long)last_resident, descriptors(), info.flows,
                 info.slots - info.slots_free, SLOWER, h->busiest * 1e3);
    (void)fflush(stdout);
    h->busiest = 0;
    h->next_line = stage_pair_now() + SECOND / 5;
}

static double processor_time(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* One turn: works, or waits for work; false if the program must end. */
static bool turn(half *h) {
    static bool busy;
    struct pollfd polled[2] = {{.fd = STDIN_FILENO, .events = POLLIN},
                               {.fd = kvf_transport_event_fd(h->transport), .events = POLLIN}};
    bool moving = false, staging = false;
    if (stage_pair_now() >= h->next_line)
        say(h);
    (void)poll(polled, 2, busy ? 0 : 100);
    const double begun = processor_time();
    TRY(kvf_transport_progress(h->transport, &moving));
    TRY(kvf_stage_progress(h->stage, &staging));
    const double spent = processor_time() - begun;
    join_one(h);
    busy = moving || staging;
    h->busiest = spent > h->busiest ? spent : h->busiest;
    return !polled[0].revents;
}

/* ---- opening ---------------------------------------------------------------------------------- */

static void open_half(half *h, const stage_pair *pair, bool owner, const char *name, const char *secret) {
    const kvf_stage_options options = {.struct_size = sizeof options,
                                       .arena_bytes = 2u << 20,
                                       .slot_bytes = 1u << 15,
                                       .stall_ns = 15 * SECOND *
                                                   SLOWER, /* attackers may starve the pair for some time */
                                       .doubt_ns = 2 * SECOND,
                                       .on_event = on_event,
                                       .context = h};
    const kvf_shard *shard = kvf_engine_shard(owner ? pair->owner : pair->reader, 0);
    h->pair = pair;
    TRY(stage_pair_transport(name, secret, h, &h->transport, on_notify, on_peer_lost));
    TRY(stage_pair_register(h->transport, shard, &h->rank));
    TRY(kvf_stage_open(h->transport, shard, &options, &h->stage));
}

static void close_half(half *h) {
    kvf_stage_close(h->stage);
    h->stage = NULL;
    kvf_transport_close(h->transport);
}

static void fill(const half *h, uint32_t nth, uint64_t seed) {
    content_table table;
    stage_pair_table(h->rank.shard, nth, &table);
    content_fill(&h->rank, 0, &table, content_all(&h->rank, 0, &table), seed);
}

/* ---- the owner -------------------------------------------------------------------------------- */

static void print_hex(const unsigned char *data, size_t bytes, const char *behind) {
    for (size_t i = 0; i < bytes; i++)
        (void)printf("%02x", data[i]);
    (void)printf("%s", behind);
}

static void introduce(const half *h) {
    const void *data;
    size_t bytes;
    kvf_card card;
    kvf_messages_card part = {.port = 0};
    char key[STAGE_PAIR_KEY_TEXT] = "";
    TRY(kvf_transport_export(h->transport, &data, &bytes));
    TRY(kvf_card_read(data, bytes, &card));
    for (uint32_t i = 0; i < card.part_count; i++)
        if (strcmp(card.parts[i].kind, "messages") == 0)
            TRY(kvf_messages_card_read(card.parts[i].data, card.parts[i].bytes, &part));
    if (part.encrypted)
        (void)zmq_z85_encode(key, part.key, sizeof part.key);
    print_hex(data, bytes, ",");
    (void)printf("%u,", part.port);
    print_hex(part.secret, sizeof part.secret, ",");
    (void)printf("%llu,%u,%s\n", (unsigned long long)card.generation, card.region_count, key);
    (void)fflush(stdout);
    kvf_card_free(&card);
}

static void own(half *h, const char *secret, bool wrong) {
    content_table table;
    open_half(h, h->pair, true, "owner", secret);
    fill(h, 0, SEED);
    if (wrong) {
        stage_pair_table(h->rank.shard, 0, &table);
        const content_part one = {0, 1, {0, 1}};
        content_fill(&h->rank, 0, &table, one, ~SEED);
    }
    introduce(h);
    while (turn(h))
        ;
    say(h);
    close_half(h);
}

/* ---- the reader ------------------------------------------------------------------------------- */

typedef struct reader {
    half half;
    kvf_plan *pull, *push;       /* from the owner, and to it */
    kvf_request *requests[2][2]; /* [push][0, 1: which blocks of the owner] */
    const char *card, *secret;
    uint64_t round, opened;
} reader;

static kvf_request *make_request(const kvf_plan *plan, uint32_t local, uint32_t remote) {
    content_table tables[2];
    kvf_request *request = NULL;
    stage_pair_table(kvf_plan_local(plan), local, &tables[0]);
    stage_pair_table(kvf_engine_shard(kvf_plan_remote(plan), 0), remote, &tables[1]);
    const kvf_group_request group = {.local = {tables[0].ids, tables[0].count, 0},
                                     .remote = {tables[1].ids, tables[1].count, 0},
                                     .begin = 0,
                                     .end = STAGE_PAIR_TOKENS};
    TRY(kvf_request_create(plan, &request));
    TRY(kvf_request_set(request, &group, 1));
    return request;
}

static void make_requests(reader *r, const stage_pair *pair) {
    TRY(kvf_plan_build(kvf_engine_shard(pair->reader, 0), pair->owner, NULL, &r->pull));
    TRY(kvf_plan_build(kvf_engine_shard(pair->owner, 0), pair->reader, NULL, &r->push));
    for (uint32_t nth = 0; nth < 2; nth++) {
        r->requests[0][nth] = make_request(r->pull, 0, nth);
        r->requests[1][nth] = make_request(r->push, nth, 0);
    }
}

/* KVF_OK, KVF_E_TIMEOUT, or the move's error. `on` becomes false if the program must end. */
static kvf_status move(reader *r, bool push, uint32_t nth, bool *on) {
    const kvf_move_options options = {.struct_size = sizeof options, .way = KVF_WAY_PACKED};
    half *h = &r->half;
    kvf_move *moving = NULL;
    const uint64_t deadline = stage_pair_now() + PATIENCE_NS;
    kvf_status status = !h->peers[0] ? KVF_E_PEER_LOST
                        : push
                            ? kvf_stage_push(h->stage, r->requests[1][nth], 0, h->peers[0], &options, &moving)
                            : kvf_stage_pull(h->stage, r->requests[0][nth], h->peers, &options, &moving);
    if (status)
        return status;
    while ((status = kvf_move_status(moving)) == KVF_IN_PROGRESS && *on) {
        *on = turn(h);
        if (stage_pair_now() > deadline) {
            (void)fprintf(stderr, "stage_honest: nothing moved for %llu s\n", PATIENCE_NS / SECOND);
            status = KVF_E_TIMEOUT;
            break;
        }
    }
    kvf_move_cancel(moving);
    while (*on && kvf_move_status(moving) == KVF_IN_PROGRESS && stage_pair_now() < deadline + SECOND)
        *on = turn(h);
    kvf_move_free(moving);
    return status;
}

static void check(reader *r, uint64_t seed, uint64_t before) {
    char words[CONTENT_WORDS];
    content_cell first;
    content_table table;
    stage_pair_table(r->half.rank.shard, 0, &table);
    if (content_wrong(&r->half.rank, 0, &table, seed, before, &first) == 0)
        return;
    content_describe(&first, words);
    if (r->half.wrong++ == 0)
        (void)fprintf(stderr, "stage_honest: round %llu: %s\n", (unsigned long long)r->round, words);
}

/* Pulls, or pushes and pulls the pushed cells back; then every cell must be right. */
static bool go_round(reader *r) {
    bool on = true;
    const bool push = r->round % 2;
    const uint64_t seed = push ? r->round + 2 : SEED, before = ~r->round;
    kvf_status status = KVF_OK;
    if (push) {
        fill(&r->half, 0, seed);
        status = move(r, true, 1, &on);
    }
    fill(&r->half, 0, before);
    if (!status && on)
        status = move(r, false, push, &on);
    if (!on)
        return false;
    if (!status) {
        check(r, seed, before);
        r->half.done++;
    } else {
        (void)fprintf(stderr, "stage_honest: round %llu: %s\n", (unsigned long long)r->round,
                      kvf_error_detail());
        r->half.failed++;
    }
    r->round++;
    return true;
}

/* Meets the owner, under a new name each time. */
static bool meet(reader *r, const stage_pair *pair) {
    unsigned char card[CARD_BYTES];
    char name[32];
    half *h = &r->half;
    const half kept = *h;
    *h = (half){.done = kept.done, .failed = kept.failed, .wrong = kept.wrong, .next_line = kept.next_line};
    (void)snprintf(name, sizeof name, "reader-%d-%llu", (int)getpid(), (unsigned long long)r->opened++);
    open_half(h, pair, false, name, r->secret);
    const size_t bytes = stage_pair_read_card(r->card, card, sizeof card);
    TRY(kvf_transport_connect(h->transport, card, bytes, &h->peers[0]));
    TRY(kvf_stage_join(h->stage, h->peers[0]));
    kvf_status said = stage_pair_introduce(h->transport, h->peers[0]);
    const uint64_t deadline = stage_pair_now() + PATIENCE_NS;
    while (!h->joined && h->peers[0] && stage_pair_now() < deadline) {
        if (!turn(h))
            return false;
        if (said == KVF_E_AGAIN)
            said = stage_pair_introduce(h->transport, h->peers[0]);
    }
    h->failed += !h->joined;
    return true;
}

static void read_from(reader *r, const stage_pair *pair) {
    make_requests(r, pair);
    (void)printf("reader\n");
    (void)fflush(stdout);
    bool on = true;
    while (on) {
        on = meet(r, pair);
        while (on && r->half.joined && r->half.peers[0])
            on = go_round(r);
        close_half(&r->half);
    }
    for (uint32_t nth = 0; nth < 2; nth++) {
        kvf_request_free(r->requests[0][nth]);
        kvf_request_free(r->requests[1][nth]);
    }
    kvf_plan_free(r->pull);
    kvf_plan_free(r->push);
}

int main(int argc, char **argv) {
    stage_pair pair;
    static reader r;
    stage_pair_open(&pair);
    r.half.pair = &pair;
    const bool owns = argc >= 2 && strncmp(argv[1], "own", 3) == 0;
    if (owns) {
        own(&r.half, argc > 2 ? argv[2] : NULL, strcmp(argv[1], "own-wrong") == 0);
    } else if (argc >= 3 && strcmp(argv[1], "read") == 0) {
        r.card = argv[2];
        r.secret = argc > 3 ? argv[3] : NULL;
        read_from(&r, &pair);
    } else {
        return 2;
    }
    stage_pair_close(&pair);
    return r.half.wrong > 0;
}
