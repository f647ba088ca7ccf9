/*
 * One half of an honest pair that attackers attack: honest produce|consume [--keys PUBLIC,SECRET] [--allow KEY]...
 * [--peer ENDPOINT[,KEY]] [--connections COUNT]
 *
 * The producer lends and writes requests 0, 1, 2 ..., some at once. The consumer reads requests, expects others, and
 * checks every byte, which follows from the number of the request. Each prints its endpoint and then, five times a
 * second, a line of JSON with the results of its requests and the resources it uses. It ends when its standard input
 * does.
 */
#include <dirent.h>
#include <malloc.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "content.h"

#define SLOTS 8u
#define TOKENS 64u
#define GROUPS 4u
#define MAX_KEYS 8u
#define SECOND 1000000000ull
#define FEW_BYTES (1u << 20)
/* How many times longer everything may take with a sanitizer. */
#if defined __SANITIZE_ADDRESS__
#define SLOWER 10u
#else
#define SLOWER 1u
#endif

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        if (call) {                                                                                          \
            (void)fprintf(stderr, "honest: %s\n", kvf_error_detail());                                       \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

typedef struct slot {
    uint64_t number; /* of the request */
    uint64_t ticket;
    content_table tables[GROUPS];
} slot;

typedef struct honest {
    bool produces;
    kvf_engine *engine;
    kvf_agent *agent;
    content_rank rank;
    kvf_contact peer;
    slot slots[SLOTS];
    uint64_t done, failed, wrong, refused, next_line;
    double busiest; /* CPU seconds of one call of progress at most */
} honest;

static uint64_t now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

static kvf_engine *make_engine(const kvf_model *model, bool produces) {
    const kvf_engine_spec spec = {.struct_size = sizeof spec,
                                  .name = produces ? "prefill" : "decode",
                                  .tp_size = 1,
                                  .all = {.tokens_per_block = produces ? 8 : 16,
                                          .block_count = 512,
                                          .order = produces ? "BLHNP" : "L|BPHN"}};
    kvf_engine *engine = NULL;
    TRY(kvf_engine_build(model, &spec, &engine));
    return engine;
}

static void open_memory(honest *h) {
    h->rank.shard = kvf_engine_shard(h->engine, 0);
    const kvf_shard_desc *shard = kvf_shard_get(h->rank.shard);
    for (uint32_t i = 0; i < shard->region_count && i < CONTENT_REGIONS; i++) {
        h->rank.regions[i] = (kvf_memory){.struct_size = sizeof(kvf_memory), .bytes = shard->region_bytes[i]};
        TRY(kvf_agent_allocate(h->agent, KVF_MEMORY_HOST, 0, shard->region_bytes[i],
                               &h->rank.regions[i].address));
    }
    TRY(kvf_agent_register(h->agent, h->rank.regions, shard->region_count));
}

static uint32_t group_count(const honest *h) {
    return kvf_model_group_count(kvf_engine_model(h->engine));
}

static void start(honest *h, slot *s) {
    char id[32];
    kvf_group_steps groups[GROUPS];
    bool writes = s->number % 2;
    int id_bytes = snprintf(id, sizeof id, "request %llu", (unsigned long long)s->number);
    for (uint32_t g = 0; g < group_count(h); g++) {
        content_table *table = &s->tables[g];
        uint32_t per_block = kvf_shard_get(h->rank.shard)->groups[g].tokens_per_block;
        *table = (content_table){.count = TOKENS / per_block, .end = TOKENS};
        for (uint32_t i = 0; i < table->count; i++)
            table->ids[i] = (uint32_t)(s - h->slots) * table->count + i;
        content_fill(&h->rank, g, table, content_all(&h->rank, g, table),
                     h->produces ? s->number : ~s->number);
        groups[g] = (kvf_group_steps){{table->ids, table->count, 0}, 0, TOKENS};
    }
    const kvf_agent_request request = {.struct_size = sizeof request,
                                       .id = {id, (size_t)id_bytes},
                                       .groups = groups,
                                       .group_count = group_count(h),
                                       .deadline_ns = 60 * SECOND * SLOWER,
                                       .contact = h->peer};
    if (h->produces && writes) {
        TRY(kvf_agent_push(h->agent, &request, &s->ticket));
        TRY(kvf_agent_push_ready(h->agent, s->ticket, NULL));
    } else {
        TRY((h->produces ? kvf_agent_hold
             : writes    ? kvf_agent_expect
                         : kvf_agent_pull)(h->agent, &request, &s->ticket));
    }
}

static void check(honest *h, const slot *s) {
    content_cell first;
    char words[CONTENT_WORDS];
    for (uint32_t g = 0; g < group_count(h); g++)
        if (content_wrong(&h->rank, g, &s->tables[g], s->number, ~s->number, &first)) {
            h->wrong++;
            content_describe(&first, words);
            (void)fprintf(stderr, "honest: request %llu: %s\n", (unsigned long long)s->number, words);
            return;
        }
}

static void take(honest *h, const kvf_event *event) {
    if (event->kind == KVF_EVENT_PEER_REFUSED)
        h->refused++;
    if (event->kind == KVF_EVENT_PEER_LOST || event->kind == KVF_EVENT_FAILED)
        (void)fprintf(stderr, "honest %s: %s\n", h->produces ? "producer" : "consumer", event->detail);
    for (uint32_t i = 0; i < SLOTS; i++) {
        slot *s = &h->slots[i];
        if (event->ticket != s->ticket || event->ticket == 0)
            continue;
        if (event->kind == KVF_EVENT_DONE) {
            h->done++;
            if (!h->produces)
                check(h, s);
        } else if (event->kind == KVF_EVENT_FAILED) {
            h->failed++;
        }
        if (event->blocks_free) {
            s->number += SLOTS;
            start(h, s);
        }
    }
}

static uint64_t resident(void) {
    char line[256];
    FILE *file = fopen("/proc/self/statm", "r");
    const char *read = file ? fgets(line, sizeof line, file) : NULL;
    const char *second = read ? strchr(read, ' ') : NULL;
    if (file)
        (void)fclose(file);
    return second ? strtoull(second, NULL, 10) * (uint64_t)sysconf(_SC_PAGESIZE) : 0;
}

/* Makes glibc return freed memory, so that resident memory is memory in use. Not while much memory is in use: then it
 * would cost more than it shows. */
static bool give_back_freed(const kvf_agent_stats *stats) {
    bool few = stats->memory_now_bytes < FEW_BYTES;
#if defined __GLIBC__ && !defined __SANITIZE_ADDRESS__
    if (few)
        (void)malloc_trim(0);
    return few;
#else
    return few && false;
#endif
}

static uint32_t descriptors(void) {
    uint32_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder))
        count++;
    if (folder)
        (void)closedir(folder);
    return count;
}

static void say(const honest *h) {
    kvf_agent_stats stats = {.struct_size = sizeof stats};
    TRY(kvf_agent_get_stats(h->agent, &stats));
    bool trimmed = give_back_freed(&stats);
    (void)printf(
        "{\"done\": %llu, \"failed\": %llu, \"wrong\": %llu, \"refused\": %llu, \"resident\": %llu, "
        "\"descriptors\": %u, \"kept\": %llu, \"over_budget\": %llu, \"foreign\": %llu, \"malformed\": %llu, "
        "\"peers\": %llu, \"closed\": %llu, \"slower\": %u, \"trimmed\": %s, "
        "\"busiest_ms\": %.1f}\n",
        (unsigned long long)h->done, (unsigned long long)h->failed, (unsigned long long)h->wrong,
        (unsigned long long)h->refused, (unsigned long long)resident(), descriptors(),
        (unsigned long long)stats.memory_now_bytes, (unsigned long long)stats.over_budget,
        (unsigned long long)stats.messages_foreign, (unsigned long long)stats.messages_malformed,
        (unsigned long long)stats.peers_now, (unsigned long long)stats.connections_closed, SLOWER,
        trimmed ? "true" : "false", h->busiest * 1e3);
    (void)fflush(stdout);
}

static double processor_time(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void run(honest *h) {
    struct pollfd polled[2] = {{.fd = STDIN_FILENO, .events = POLLIN},
                               {.fd = kvf_agent_event_fd(h->agent), .events = POLLIN}};
    while (poll(polled, 2, 100) >= 0 && !polled[0].revents) {
        kvf_event event = {.struct_size = sizeof event};
        double begun = processor_time();
        TRY(kvf_agent_progress(h->agent, NULL));
        double spent = processor_time() - begun;
        h->busiest = spent > h->busiest ? spent : h->busiest;
        while (kvf_agent_next_event(h->agent, &event) == KVF_OK)
            take(h, &event);
        if (now() >= h->next_line) {
            h->next_line = now() + SECOND / 5;
            say(h);
            h->busiest = 0;
        }
    }
}

/* Splits "a,b": ends the first part, and returns the second; NULL if there is no comma. */
static char *after_comma(char *text) {
    char *comma = strchr(text, ',');
    if (comma)
        *comma++ = '\0';
    return comma;
}

int main(int argc, char **argv) {
    static honest h;
    const char *allowed[MAX_KEYS];
    kvf_agent_options options = {.struct_size = sizeof options,
                                 .allowed_keys = allowed,
                                 .lease_ns = 10 * SECOND * (SLOWER > 1 ? 3 : 1),
                                 .peer_timeout_ns = 2 * SECOND * SLOWER};
    h.produces = argc > 1 && strcmp(argv[1], "produce") == 0;
    for (int i = 2; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--keys") == 0) {
            options.secret_key = after_comma(argv[i + 1]);
            options.public_key = argv[i + 1];
        } else if (strcmp(argv[i], "--allow") == 0 && options.allowed_key_count < MAX_KEYS) {
            allowed[options.allowed_key_count++] = argv[i + 1];
        } else if (strcmp(argv[i], "--peer") == 0) {
            h.peer = (kvf_contact){.engine = "prefill", .public_key = after_comma(argv[i + 1])};
            h.peer.endpoint = argv[i + 1];
        } else if (strcmp(argv[i], "--connections") == 0) {
            options.max_connections = options.max_connections_per_address =
                (uint32_t)strtoul(argv[i + 1], NULL, 10);
        }
    }
    kvf_model *model = content_model(1);
    h.engine = make_engine(model, h.produces);
    TRY(kvf_agent_open(h.engine, 0, &options, &h.agent));
    open_memory(&h);
    (void)printf("%s\n", kvf_agent_endpoint(h.agent));
    (void)fflush(stdout);
    for (uint32_t i = 0; i < SLOTS; i++) {
        h.slots[i].number = i;
        start(&h, &h.slots[i]);
    }
    run(&h);
    say(&h);
    kvf_agent_close(h.agent);
    kvf_engine_free(h.engine);
    kvf_model_free(model);
    return h.wrong > 0;
}
