#include "stage_pair.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "hosts.h"

/* Orders to the other process; it answers each with a word. */
typedef enum order {
    SPOIL = 's',
    CHECK = 'c', /* 'y': every cell is right */
    SEND = 'p',  /* all memory, through the plain connection */
} order;

kvf_transport_kind bench_kind(const char *name) {
    kvf_transport_kind kind = {.struct_size = sizeof kind};
    for (uint32_t i = 0; kvf_transport_describe(i, &kind) == KVF_OK; i++)
        if (strcmp(kind.name, name) == 0)
            return kind;
    return (kvf_transport_kind){0};
}

/* ---- both ends ------------------------------------------------------------------------------- */

uint64_t bench_token_bytes(const bench_cells *cells, uint32_t group) {
    return (uint64_t)cells->layers * 2 * BENCH_HEADS * cells->run_bytes[group];
}

bench_cells bench_cells_of(uint32_t layers, uint64_t run, uint64_t bytes) {
    bench_cells cells = {.groups = 1, .layers = layers, .run_bytes = {run}};
    cells.tokens[0] = bytes / bench_token_bytes(&cells, 0);
    return cells;
}

static uint32_t block_count(const bench_cells *cells, uint32_t group) {
    return (uint32_t)((cells->tokens[group] + BENCH_BLOCK_TOKENS - 1) / BENCH_BLOCK_TOKENS);
}

/* Blocks in descending order: none follows its predecessor in memory. */
static uint32_t block_of(const bench_cells *cells, uint32_t group, uint64_t token) {
    return block_count(cells, group) - 1 - (uint32_t)(token / BENCH_BLOCK_TOKENS);
}

/* Makes the same rank with its keys stored channel by channel instead of token by token. Takes the engine over. */
static kvf_engine *by_channels(kvf_engine *engine) {
    const kvf_shard_desc *built = kvf_shard_get(kvf_engine_shard(engine, 0));
    const kvf_model *model = kvf_engine_model(engine);
    const uint32_t count = kvf_model_group_count(model);
    kvf_group_shard_desc groups[BENCH_PAIR_GROUPS];
    kvf_placement places[BENCH_PAIR_GROUPS][BENCH_PAIR_REGIONS * 2];
    for (uint32_t g = 0; g < count; g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        groups[g] = built->groups[g];
        memcpy(places[g], groups[g].placements, (size_t)group->layer_count * 2 * sizeof *places[g]);
        groups[g].placements = places[g];
        for (uint32_t layer = 0; layer < group->layer_count; layer++) {
            kvf_placement *key = &places[g][(size_t)layer * 2];
            key->pieces = group->parts[0].cell_elements;
            key->row_stride = sizeof(uint16_t);
            key->piece_stride = BENCH_BLOCK_TOKENS * sizeof(uint16_t);
        }
    }
    kvf_shard_desc desc = *built;
    kvf_shard *shard = NULL;
    kvf_engine *out = NULL;
    desc.groups = groups;
    bench_must(kvf_shard_create(model, &desc, &shard));
    bench_must(kvf_engine_from_shards(model, kvf_engine_name(engine), &shard, 1, &out));
    kvf_engine_free(engine);
    return out;
}

static kvf_engine *make_engine(const bench_cells *cells, const bench_route *route, bool holds) {
    kvf_part_desc parts[BENCH_PAIR_GROUPS][2];
    kvf_group_desc groups[BENCH_PAIR_GROUPS];
    kvf_group_spec specs[BENCH_PAIR_GROUPS];
    uint32_t layers[BENCH_PAIR_REGIONS];
    char names[BENCH_PAIR_GROUPS][16];
    const uint32_t count = cells->groups * cells->layers;
    bench_require(cells->groups <= BENCH_PAIR_GROUPS && count <= BENCH_PAIR_REGIONS, "too many layers");
    for (uint32_t i = 0; i < count; i++)
        layers[i] = i;
    for (uint32_t g = 0; g < cells->groups; g++) {
        for (int p = 0; p < 2; p++)
            parts[g][p] = (kvf_part_desc){.name = p ? "v" : "k",
                                          .dtype = KVF_DTYPE_BF16,
                                          .units = BENCH_HEADS,
                                          .cell_elements = (uint32_t)(cells->run_bytes[g] / 2)};
        (void)snprintf(names[g], sizeof names[g], "runs_%u", g);
        groups[g] = (kvf_group_desc){.name = names[g],
                                     .layers = &layers[(size_t)g * cells->layers],
                                     .layer_count = cells->layers,
                                     .parts = parts[g],
                                     .part_count = 2};
        specs[g] = (kvf_group_spec){.tokens_per_block = BENCH_BLOCK_TOKENS,
                                    .block_count = block_count(cells, g),
                                    .order = holds ? "L|BPHN" : "L|BPNH"};
    }
    const kvf_model_desc desc = {
        .struct_size = sizeof desc, .layer_count = count, .groups = groups, .group_count = cells->groups};
    const kvf_engine_spec spec = {.struct_size = sizeof spec, .groups = specs};
    kvf_model *model = NULL;
    kvf_engine *engine = NULL;
    bench_must(kvf_model_create(&desc, &model));
    bench_must(kvf_engine_build(model, &spec, &engine));
    kvf_model_free(model);
    return holds && route->channels ? by_channels(engine) : engine;
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

static const kvf_shard_desc *shard_of(const bench_end *end) {
    return kvf_shard_get(kvf_engine_shard(end->engine, 0));
}

static void *get_memory(const bench_end *end, const bench_route *route, uint64_t bytes) {
    void *memory = NULL;
    if (route->brought)
        memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    else
        bench_must(kvf_transport_allocate(end->transport, KVF_MEMORY_HOST, 0, bytes, &memory));
    bench_require(memory != NULL, "there is no memory");
    return memory;
}

static void open_end(bench_end *end, const bench_route *route, const bench_cells *cells, const char *name,
                     bool holds) {
    const kvf_setting setting = {"ucx.tls", route->tls};
    const kvf_transport_options options = {.struct_size = sizeof options,
                                           .name = name,
                                           .settings = &setting,
                                           .setting_count = route->tls ? 1 : 0,
                                           .on_notify = on_notify,
                                           .context = end};
    const kvf_stage_options stage = {
        .struct_size = sizeof stage, .workers = route->workers, .on_event = on_event};
    end->spins = route->spins;
    end->engine = make_engine(cells, route, holds);
    bench_must(kvf_transport_open(route->kind, &options, &end->transport));
    const kvf_shard_desc *shard = shard_of(end);
    bench_require(shard->region_count == cells->groups * cells->layers, "one region a layer");
    kvf_memory regions[BENCH_PAIR_REGIONS];
    for (uint32_t i = 0; i < shard->region_count; i++) {
        end->memory[i] = get_memory(end, route, shard->region_bytes[i]);
        regions[i] = (kvf_memory){
            .struct_size = sizeof(kvf_memory), .address = end->memory[i], .bytes = shard->region_bytes[i]};
    }
    bench_must(kvf_transport_register(end->transport, regions, shard->region_count));
    bench_must(kvf_stage_open(end->transport, kvf_engine_shard(end->engine, 0), &stage, &end->stage));
}

static void close_end(bench_end *end, bool brought) {
    kvf_stage_close(end->stage);
    kvf_transport_close(end->transport);
    for (uint32_t i = 0; i < shard_of(end)->region_count && brought; i++)
        free(end->memory[i]);
    kvf_engine_free(end->engine);
}

/* Returns the other end's card, which stays valid until the next call. */
static const void *exchange_cards(bench_end *end, int line, size_t *their_bytes) {
    static unsigned char theirs[65536];
    const void *card;
    size_t bytes;
    bench_must(kvf_transport_export(end->transport, &card, &bytes));
    bench_require(send(line, card, bytes, MSG_NOSIGNAL) == (ssize_t)bytes, "the card could not be sent");
    const ssize_t got = recv(line, theirs, sizeof theirs, 0);
    bench_require(got > 0, "no card came");
    bench_must(kvf_transport_connect(end->transport, theirs, (size_t)got, &end->peer));
    bench_must(kvf_stage_join(end->stage, end->peer));
    *their_bytes = (size_t)got;
    return theirs;
}

static void work(const bench_end *end, unsigned *idle) {
    bool moving, staging;
    bench_must(kvf_transport_progress(end->transport, &moving));
    bench_must(kvf_stage_progress(end->stage, &staging));
    *idle = moving || staging ? 0 : *idle + 1;
}

/* Sleeps if there has been nothing to do for a while. False: an order came by `line`. */
static bool nap(const bench_end *end, unsigned idle, int line) {
    if (idle < end->spins)
        return true;
    struct pollfd fds[2] = {{kvf_transport_event_fd(end->transport), POLLIN, 0}, {line, POLLIN, 0}};
    (void)poll(fds, 2, 100);
    return fds[1].revents == 0;
}

/* ---- cells ----------------------------------------------------------------------------------- */

/* Fills a cell with content that follows from its coordinates, or checks that it has this content. */
static bool cell_is(unsigned char *memory, const kvf_cell_location *at, uint64_t coordinates, bool fill) {
    const uint64_t seed = coordinates * 0x9e3779b97f4a7c15u, piece = at->bytes / at->pieces;
    const uint64_t step = piece < 8 ? piece : 8;
    for (uint64_t i = 0; i < at->bytes; i += step) {
        const uint64_t word = (seed ^ (i & ~UINT64_C(7))) * 0xbf58476d1ce4e5b9u;
        const unsigned char *part = (const unsigned char *)&word + i % 8;
        unsigned char *cell = memory + at->offset + i / piece * at->piece_stride + i % piece;
        if (fill)
            memcpy(cell, part, step);
        else if (memcmp(cell, part, step) != 0)
            return false;
    }
    return true;
}

static bool cells_are(const bench_end *end, const bench_cells *cells, bool fill) {
    for (uint32_t g = 0; g < cells->groups; g++)
        for (uint32_t at = 0; at < cells->layers * 2 * BENCH_HEADS; at++)
            for (uint64_t token = 0; token < cells->tokens[g]; token++) {
                const uint32_t head = at % BENCH_HEADS, part = at / BENCH_HEADS % 2,
                               layer = at / BENCH_HEADS / 2;
                kvf_cell_location found = {.struct_size = sizeof found};
                bench_must(kvf_shard_locate(kvf_engine_shard(end->engine, 0), g, layer, part,
                                            block_of(cells, g, token), (uint32_t)(token % BENCH_BLOCK_TOKENS),
                                            head, &found));
                const uint64_t coordinates = (token * BENCH_PAIR_GROUPS + g) * 64 + at;
                if (!cell_is(end->memory[found.region], &found, coordinates, fill))
                    return false;
            }
    return true;
}

static void spoil(const bench_end *end) {
    const kvf_shard_desc *shard = shard_of(end);
    for (uint32_t i = 0; i < shard->region_count; i++)
        memset(end->memory[i], 0x5a, shard->region_bytes[i]);
}

/* ---- the other process ----------------------------------------------------------------------- */

static char obey(const bench_end *end, const bench_cells *cells, order given, int plain) {
    const kvf_shard_desc *shard = shard_of(end);
    if (given == SPOIL)
        spoil(end);
    for (uint32_t i = 0; i < shard->region_count && given == SEND; i++)
        bench_hosts_send(plain, end->memory[i], shard->region_bytes[i]);
    return given != CHECK || cells_are(end, cells, false) ? 'y' : 'n';
}

static _Noreturn void be_other(const bench_route *route, const bench_cells *cells, int line, int plain) {
    bench_end end = {0};
    unsigned idle = 0;
    size_t their_bytes;
    order given;
    char word;
    if (recv(line, &word, 1, 0) != 1)
        _exit(0);
    open_end(&end, route, cells, "other", !route->push);
    if (!route->push)
        (void)cells_are(&end, cells, true);
    (void)exchange_cards(&end, line, &their_bytes);
    for (;;) {
        do
            work(&end, &idle);
        while (nap(&end, idle, line));
        if (recv(line, &given, sizeof given, 0) != sizeof given)
            break;
        idle = 0;
        word = obey(&end, cells, given, plain);
        bench_require(send(line, &word, 1, MSG_NOSIGNAL) == 1, "the other process is gone");
    }
    close_end(&end, route->brought);
    _exit(0);
}

static void tell(const bench_pair *pair, order given) {
    bench_require(send(pair->line, &given, sizeof given, MSG_NOSIGNAL) == sizeof given,
                  "the other process is gone");
}

static char hear(const bench_pair *pair) {
    char word;
    bench_require(recv(pair->line, &word, 1, 0) == 1, "the other process is gone");
    return word;
}

/* ---- this process ---------------------------------------------------------------------------- */

void bench_pair_start(bench_pair *pair, const bench_route *route, const bench_cells *cells) {
    int lines[2], plain;
    bench_require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, lines) == 0, "no socket pair");
    *pair = (bench_pair){.route = route, .cells = *cells, .line = lines[0]};
    bench_hosts_connect(&pair->plain, &plain);
    pair->other = fork();
    bench_require(pair->other >= 0, "no process");
    if (pair->other == 0) {
        (void)close(lines[0]);
        (void)close(pair->plain);
        bench_hosts_cross();
        be_other(route, cells, lines[1], plain);
    }
    (void)close(lines[1]);
    (void)close(plain);
}

void bench_pair_open(bench_pair *pair) {
    const bench_cells *cells = &pair->cells;
    const bool push = pair->route->push;
    bench_require(send(pair->line, "g", 1, MSG_NOSIGNAL) == 1, "the other process is gone");
    open_end(&pair->end, pair->route, cells, "mover", push);
    if (push)
        (void)cells_are(&pair->end, cells, true);
    pair->card = exchange_cards(&pair->end, pair->line, &pair->card_bytes);
    pair->theirs = make_engine(cells, pair->route, !push);
    bench_must(kvf_plan_build(kvf_engine_shard(push ? pair->theirs : pair->end.engine, 0),
                              push ? pair->end.engine : pair->theirs, NULL, &pair->plan));
    bench_must(kvf_request_create(pair->plan, &pair->request));
    for (uint32_t g = 0; g < cells->groups; g++) {
        const uint32_t blocks = block_count(cells, g);
        pair->ids[g] = bench_alloc(blocks, sizeof **pair->ids);
        for (uint32_t i = 0; i < blocks; i++)
            pair->ids[g][i] = block_of(cells, g, (uint64_t)i * BENCH_BLOCK_TOKENS);
    }
}

void bench_pair_close(bench_pair *pair) {
    (void)shutdown(pair->line, SHUT_RDWR);
    (void)waitpid(pair->other, NULL, 0);
    (void)close(pair->line);
    (void)close(pair->plain);
    kvf_request_free(pair->request);
    kvf_plan_free(pair->plan);
    kvf_engine_free(pair->theirs);
    for (uint32_t g = 0; g < pair->cells.groups; g++)
        free(pair->ids[g]);
    close_end(&pair->end, pair->route->brought);
}

uint64_t bench_pair_ask_for(bench_pair *pair, uint32_t first, uint32_t behind, uint64_t tokens) {
    kvf_group_request groups[BENCH_PAIR_GROUPS] = {0};
    for (uint32_t g = first; g < behind; g++) {
        const uint64_t count = tokens ? tokens : pair->cells.tokens[g];
        const uint32_t blocks = (uint32_t)((count + BENCH_BLOCK_TOKENS - 1) / BENCH_BLOCK_TOKENS);
        groups[g] = (kvf_group_request){{pair->ids[g], blocks, 0}, {pair->ids[g], blocks, 0}, 0, count};
    }
    bench_must(kvf_request_set(pair->request, groups, pair->cells.groups));
    return kvf_request_bytes(pair->request, 0);
}

double bench_pair_move(const bench_pair *pair, kvf_way way, kvf_move_info *info) {
    const kvf_move_options options = {.struct_size = sizeof options, .way = way};
    const bench_end *end = &pair->end;
    kvf_move *move = NULL;
    kvf_status status;
    unsigned idle = 0;
    const uint64_t begin = bench_now_ns();
    if (pair->route->push)
        bench_must(kvf_stage_push(end->stage, pair->request, 0, end->peer, &options, &move));
    else
        bench_must(kvf_stage_pull(end->stage, pair->request, &end->peer, &options, &move));
    for (;;) {
        work(end, &idle);
        if ((status = kvf_move_status(move)) != KVF_IN_PROGRESS)
            break; /* an end that work() itself has reached wakes nobody */
        (void)nap(end, idle, -1);
    }
    const double ns = (double)(bench_now_ns() - begin);
    bench_must(status);
    if (info)
        bench_must(kvf_move_get_info(move, info));
    kvf_move_free(move);
    return ns;
}

uint64_t bench_pair_processor_ns(const bench_pair *pair) {
    clockid_t clocks[2] = {CLOCK_PROCESS_CPUTIME_ID};
    bench_require(clock_getcpuclockid(pair->other, &clocks[1]) == 0, "no clock of the other process");
    uint64_t ns = 0;
    for (int i = 0; i < 2; i++) {
        struct timespec time;
        bench_require(clock_gettime(clocks[i], &time) == 0, "no clock of the other process");
        ns += (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
    }
    return ns;
}

void bench_pair_settle(const bench_pair *pair) {
    kvf_stage_info info = {.struct_size = sizeof info};
    unsigned idle = 0;
    do {
        work(&pair->end, &idle);
        bench_must(kvf_stage_get_info(pair->end.stage, &info));
    } while (info.flows > 0);
}

static bool has_arrived(const bench_pair *pair) {
    if (!pair->route->push)
        return cells_are(&pair->end, &pair->cells, false);
    tell(pair, CHECK);
    return hear(pair) == 'y';
}

void bench_pair_spoil(const bench_pair *pair) {
    if (pair->route->push) {
        tell(pair, SPOIL);
        (void)hear(pair);
    } else {
        spoil(&pair->end);
    }
    bench_require(!has_arrived(pair), "cells are right before they were moved");
}

void bench_pair_check(const bench_pair *pair) {
    bench_require(has_arrived(pair), "a cell has other bytes than its holder's");
}

void bench_pair_verify(bench_pair *pair, kvf_way way) {
    bench_pair_spoil(pair);
    (void)bench_pair_ask_for(pair, 0, pair->cells.groups, 0);
    (void)bench_pair_move(pair, way, NULL);
    bench_pair_check(pair);
}

/* ---- a plain socket -------------------------------------------------------------------------- */

double bench_pair_plain(const bench_pair *pair) {
    const kvf_shard_desc *shard = shard_of(&pair->end);
    uint64_t bytes = 0;
    const uint64_t begin = bench_now_ns();
    tell(pair, SEND);
    for (uint32_t i = 0; i < shard->region_count; i++) {
        bench_require(bench_hosts_receive(pair->plain, pair->end.memory[i], shard->region_bytes[i]),
                      "the socket broke");
        bytes += shard->region_bytes[i];
    }
    const double ns = (double)(bench_now_ns() - begin);
    (void)hear(pair);
    return (double)bytes / ns;
}
