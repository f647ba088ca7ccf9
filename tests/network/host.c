/*
 * One engine of one rank on its own host, which obeys commands:
 * host NAME LISTEN FABRIC WAY LEASE_MS [NAME ENDPOINT of the producer]
 *
 * Without a producer it is one itself. WAY is auto, direct or packed. With the variables KVF_PUBLIC_KEY and KVF_SECRET_KEY both
 * engines have these keys, and KVF_SETTINGS has settings of the transport: KEY=VALUE,KEY=VALUE. It prints "endpoint" and
 * its endpoint, then reads commands from standard input; N is the number of a request, and its bytes follow from N:
 *
 *   hold N, push N        the producer lends, or writes
 *   pull N MS, expect N MS  the consumer reads, or expects a push; the deadline is MS milliseconds away
 *   spoil                 the next request's bytes are wrong at the last token of its first group
 *   meet NAME ENDPOINT    the consumer's next requests are of this producer
 *   look N                the consumer checks again what it has of requests that are done
 *
 * It prints the results, with the milliseconds since the command, and its log:
 *
 *   done KIND N MS WRONG      the consumer has checked every byte; WRONG cells are wrong; KIND may be look
 *   failed KIND N MS STATUS DETAIL
 *   lost DETAIL               a peer was lost
 *   log MS LEVEL TEXT         a line of the agent's log, MS milliseconds since the start
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "content.h"

#define SLOTS 32u
#define TOKENS 64u
#define GROUPS 4u
#define SECOND 1000000000ull
#define MILLISECOND 1000000ull

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        if (call) {                                                                                          \
            (void)fprintf(stderr, "host: %s\n", kvf_error_detail());                                         \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

/* The blocks of a request, in use while `ticket` is not 0. */
typedef struct slot {
    uint64_t ticket, number, begun;
    bool done;
    char kind[8];
    content_table tables[GROUPS];
} slot;

typedef struct host {
    const char *name;
    bool produces, spoils;
    kvf_engine *engine;
    kvf_agent *agent;
    content_rank rank;
    kvf_contact peer;
    slot slots[SLOTS];
} host;

static uint64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * SECOND + (uint64_t)now.tv_nsec;
}

static void open_engine(host *h, const kvf_model *model) {
    const kvf_engine_spec spec = {.struct_size = sizeof spec,
                                  .name = h->name,
                                  .tp_size = 1,
                                  .all = {.tokens_per_block = h->produces ? 8 : 16,
                                          .block_count = SLOTS * TOKENS / 8,
                                          .order = h->produces ? "BLHNP" : "L|BPHN"}};
    TRY(kvf_engine_build(model, &spec, &h->engine));
}

static void open_memory(host *h) {
    h->rank.shard = kvf_engine_shard(h->engine, 0);
    const kvf_shard_desc *shard = kvf_shard_get(h->rank.shard);
    for (uint32_t i = 0; i < shard->region_count && i < CONTENT_REGIONS; i++) {
        h->rank.regions[i] = (kvf_memory){.struct_size = sizeof(kvf_memory), .bytes = shard->region_bytes[i]};
        TRY(kvf_agent_allocate(h->agent, KVF_MEMORY_HOST, 0, shard->region_bytes[i],
                               &h->rank.regions[i].address));
    }
    TRY(kvf_agent_register(h->agent, h->rank.regions, shard->region_count));
}

/* ---- requests -------------------------------------------------------------------------------- */

static uint32_t group_count(const host *h) {
    return kvf_model_group_count(kvf_engine_model(h->engine));
}

static slot *free_slot(host *h) {
    for (uint32_t i = 0; i < SLOTS; i++)
        if (h->slots[i].ticket == 0)
            return &h->slots[i];
    (void)fprintf(stderr, "host: more than %u requests at once\n", SLOTS);
    exit(1);
}

static void fill(host *h, slot *s, kvf_group_steps groups[GROUPS]) {
    for (uint32_t g = 0; g < group_count(h); g++) {
        content_table *table = &s->tables[g];
        uint32_t per_block = kvf_shard_get(h->rank.shard)->groups[g].tokens_per_block;
        *table = (content_table){.count = TOKENS / per_block, .end = TOKENS};
        for (uint32_t i = 0; i < table->count; i++)
            table->ids[i] = (uint32_t)(s - h->slots) * table->count + i;
        content_part all = content_all(&h->rank, g, table);
        content_fill(&h->rank, g, table, all, h->produces ? s->number : ~s->number);
        if (h->spoils && g == 0) {
            all.begin = TOKENS - 1; /* only the last token */
            content_fill(&h->rank, g, table, all, s->number + 1);
        }
        groups[g] = (kvf_group_steps){{table->ids, table->count, 0}, 0, TOKENS};
    }
    h->spoils = false;
}

static void start(host *h, const char *kind, uint64_t number, uint64_t deadline_ms) {
    static const struct {
        const char *name;
        kvf_status (*begin)(kvf_agent *, const kvf_agent_request *, uint64_t *);
    } kinds[] = {{"hold", kvf_agent_hold},
                 {"push", kvf_agent_push},
                 {"pull", kvf_agent_pull},
                 {"expect", kvf_agent_expect}};
    char id[32];
    kvf_group_steps groups[GROUPS];
    slot *s = free_slot(h);
    s->number = number;
    s->begun = now_ns();
    s->done = false;
    (void)snprintf(s->kind, sizeof s->kind, "%s", kind);
    fill(h, s, groups);
    int id_bytes = snprintf(id, sizeof id, "%llu", (unsigned long long)number);
    const kvf_agent_request request = {.struct_size = sizeof request,
                                       .id = {id, (size_t)id_bytes},
                                       .groups = groups,
                                       .group_count = group_count(h),
                                       .deadline_ns = deadline_ms * MILLISECOND,
                                       .contact = h->peer};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strcmp(kinds[i].name, kind) == 0)
            TRY(kinds[i].begin(h->agent, &request, &s->ticket));
    if (strcmp(kind, "push") == 0)
        TRY(kvf_agent_push_ready(h->agent, s->ticket, NULL));
}

static uint32_t count_wrong(const host *h, const slot *s) {
    content_cell first;
    uint32_t wrong = 0;
    for (uint32_t g = 0; g < group_count(h) && !h->produces; g++)
        wrong += content_wrong(&h->rank, g, &s->tables[g], s->number, ~s->number, &first);
    return wrong;
}

static void take(host *h, const kvf_event *event) {
    if (event->kind == KVF_EVENT_PEER_LOST)
        (void)printf("lost %s\n", event->detail);
    for (uint32_t i = 0; i < SLOTS; i++) {
        slot *s = &h->slots[i];
        if (event->ticket == 0 || event->ticket != s->ticket)
            continue;
        double ms = (double)(now_ns() - s->begun) / 1e6;
        if (event->kind == KVF_EVENT_DONE)
            (void)printf("done %s %llu %.1f %u\n", s->kind, (unsigned long long)s->number, ms,
                         count_wrong(h, s));
        else if (event->kind == KVF_EVENT_FAILED)
            (void)printf("failed %s %llu %.1f %s %s\n", s->kind, (unsigned long long)s->number, ms,
                         kvf_status_name(event->status), event->detail);
        s->done = event->kind == KVF_EVENT_DONE;
        if (event->blocks_free)
            s->ticket = 0;
    }
    (void)fflush(stdout);
}

/* ---- commands ------------------------------------------------------------------------------- */

static void write_log(void *context, const kvf_log_line *line) {
    static uint64_t begun;
    (void)context;
    begun = begun ? begun : now_ns();
    (void)printf("log %.1f %d %s\n", (double)(now_ns() - begun) / 1e6, (int)line->level, line->text);
    (void)fflush(stdout);
}

static void look(const host *h, uint64_t number) {
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < SLOTS; i++)
        wrong += h->slots[i].done ? count_wrong(h, &h->slots[i]) : 0;
    (void)printf("done look %llu 0 %u\n", (unsigned long long)number, wrong);
    (void)fflush(stdout);
}

/* `producer` is its name, a space, and its endpoint; it stays as it is. */
static void meet(host *h, char *producer) {
    char *endpoint = producer + strcspn(producer, " ");
    *endpoint++ = '\0';
    h->peer.engine = producer;
    h->peer.endpoint = endpoint;
}

/* Returns false at the end of the input. */
static bool take_commands(host *h) {
    static char text[4096];
    static size_t length;
    ssize_t bytes = read(STDIN_FILENO, text + length, sizeof text - 1 - length);
    if (bytes <= 0)
        return false;
    length += (size_t)bytes;
    text[length] = '\0';
    for (char *end; (end = strchr(text, '\n'));) {
        char kind[8] = "", *rest = text + strcspn(text, " \n");
        *end = '\0';
        (void)snprintf(kind, sizeof kind, "%.*s", (int)(rest - text), text);
        uint64_t number = strtoull(rest, &rest, 10), deadline_ms = strtoull(rest, NULL, 10);
        if (strcmp(kind, "spoil") == 0)
            h->spoils = true;
        else if (strcmp(kind, "meet") == 0)
            meet(h, strdup(text + strlen("meet ")));
        else if (strcmp(kind, "look") == 0)
            look(h, number);
        else
            start(h, kind, number, deadline_ms);
        length -= (size_t)(end + 1 - text);
        memmove(text, end + 1, length + 1);
    }
    return true;
}

static void run(host *h) {
    struct pollfd polled[2] = {{.fd = STDIN_FILENO, .events = POLLIN},
                               {.fd = kvf_agent_event_fd(h->agent), .events = POLLIN}};
    do {
        kvf_event event = {.struct_size = sizeof event};
        TRY(kvf_agent_progress(h->agent, NULL));
        while (kvf_agent_next_event(h->agent, &event) == KVF_OK)
            take(h, &event);
    } while (poll(polled, 2, -1) >= 0 && (!polled[0].revents || take_commands(h)));
}

static kvf_way way_named(const char *name) {
    return strcmp(name, "packed") == 0   ? KVF_WAY_PACKED
           : strcmp(name, "direct") == 0 ? KVF_WAY_DIRECT
                                         : KVF_WAY_AUTO;
}

/* Splits KEY=VALUE,KEY=VALUE, which it changes. Returns how many there are. */
static uint32_t read_settings(char *text, kvf_setting *out, uint32_t most) {
    uint32_t count = 0;
    for (char *rest = text, *one; text[0] && (one = strsep(&rest, ",")) && count < most; count++) {
        out[count].key = strsep(&one, "=");
        out[count].value = one ? one : "";
    }
    return count;
}

int main(int argc, char **argv) {
    static host h;
    kvf_setting settings[4];
    if (argc != 6 && argc != 8)
        return fprintf(stderr, "host NAME LISTEN FABRIC WAY LEASE_MS [NAME ENDPOINT]\n"), 2;
    const char *public_key = getenv("KVF_PUBLIC_KEY");
    const kvf_agent_options options = {.struct_size = sizeof options,
                                       .listen = argv[2],
                                       .public_key = public_key,
                                       .secret_key = getenv("KVF_SECRET_KEY"),
                                       .insecure = !public_key,
                                       .transport = argv[3],
                                       .way = way_named(argv[4]),
                                       .lease_ns = strtoull(argv[5], NULL, 10) * MILLISECOND,
                                       .settings = settings,
                                       .setting_count = read_settings(getenv("KVF_SETTINGS"), settings, 4),
                                       .log = write_log,
                                       .log_level = KVF_LOG_DEBUG};
    h.name = argv[1];
    h.produces = argc == 6;
    if (!h.produces)
        h.peer = (kvf_contact){.engine = argv[6], .endpoint = argv[7], .public_key = public_key};
    kvf_model *model = content_model(1);
    open_engine(&h, model);
    TRY(kvf_agent_open(h.engine, 0, &options, &h.agent));
    open_memory(&h);
    (void)printf("endpoint %s\n", kvf_agent_endpoint(h.agent));
    (void)fflush(stdout);
    run(&h);
    kvf_agent_close(h.agent);
    kvf_engine_free(h.engine);
    kvf_model_free(model);
    return 0;
}
