/*
 * Two processes with their own model and event loop: a prefill process computes the caches of two requests. A decode
 * process pulls one of them; the prefill process pushes the other, layer by layer as it computes it.
 *
 * The prefill process keeps blocks of 16 tokens, token before head; the decode process blocks of 24, head before token.
 * Only the prefill process's endpoint travels between them, over a pipe. Every element is compared.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kvferry/agent.h>

#define LAYERS 4u
#define HEADS 4u
#define HEAD_SIZE 32u
#define PARTS 2u /* K and V */
#define TOKENS 40u
#define MAX_REGIONS 16u
#define SECOND 1000000000ull

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        if (call) {                                                                                          \
            (void)fprintf(stderr, "agents: %s\n", kvf_error_detail());                                       \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

/* One side: an engine of one rank, its agent, and its cache. */
typedef struct side {
    kvf_engine *engine;
    kvf_agent *agent;
    kvf_memory regions[MAX_REGIONS];
    uint32_t tokens_per_block;
} side;

/* Where the two requests lie, in the blocks of either side. */
typedef struct place {
    const char *name;
    uint32_t prefill[3], decode[2];
} place;

static const place pulled = {"pulled", {7, 3, 9}, {5, 1}};
static const place pushed = {"pushed", {2, 8, 4}, {0, 6}};

/* What the model "computes": a number for each element, different in each request. */
static float value_of(const place *p, uint32_t layer, uint32_t part, uint32_t token, uint32_t head,
                      uint32_t i) {
    uint32_t element = (((layer * PARTS + part) * TOKENS + token) * HEADS + head) * HEAD_SIZE + i;
    return (float)element + (p == &pushed ? 0.5f : 0.0f);
}

/* ---- the two sides --------------------------------------------------------------------------- */

static kvf_model *make_model(void) {
    static const uint32_t layers[LAYERS] = {0, 1, 2, 3};
    static const kvf_part_desc parts[PARTS] = {
        {.name = "k", .dtype = KVF_DTYPE_F32, .units = HEADS, .cell_elements = HEAD_SIZE},
        {.name = "v", .dtype = KVF_DTYPE_F32, .units = HEADS, .cell_elements = HEAD_SIZE}};
    static const kvf_group_desc group = {.name = "full",
                                         .kind = KVF_GROUP_TOKENS,
                                         .layers = layers,
                                         .layer_count = LAYERS,
                                         .parts = parts,
                                         .part_count = PARTS};
    const kvf_model_desc desc = {
        .struct_size = sizeof desc, .name = "toy", .layer_count = LAYERS, .groups = &group, .group_count = 1};
    kvf_model *model;
    TRY(kvf_model_create(&desc, &model));
    return model;
}

/* Builds the engine, opens its agent and lends it memory that peers on this host can map. */
static void open_side(side *s, const char *name, uint32_t tokens_per_block, const char *order) {
    const kvf_engine_spec spec = {
        .struct_size = sizeof spec,
        .name = name,
        .all = {.tokens_per_block = tokens_per_block, .block_count = 12, .order = order}};
    kvf_model *model = make_model();
    s->tokens_per_block = tokens_per_block;
    TRY(kvf_engine_build(model, &spec, &s->engine));
    kvf_model_free(model); /* the engine keeps what it needs */
    TRY(kvf_agent_open(s->engine, 0, NULL, &s->agent));
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(s->engine, 0));
    if (shard->region_count > MAX_REGIONS)
        exit(1);
    for (uint32_t i = 0; i < shard->region_count; i++) {
        s->regions[i] = (kvf_memory){.struct_size = sizeof(kvf_memory), .bytes = shard->region_bytes[i]};
        TRY(kvf_agent_allocate(s->agent, KVF_MEMORY_HOST, 0, s->regions[i].bytes, &s->regions[i].address));
    }
    TRY(kvf_agent_register(s->agent, s->regions, shard->region_count));
}

static void close_side(side *s) {
    kvf_agent_close(s->agent); /* which ends all use of the memory, and frees it */
    kvf_engine_free(s->engine);
}

/* Finds the elements of one head of a token. */
static float *find_cell(const side *s, const uint32_t *blocks, uint32_t layer, uint32_t part, uint32_t token,
                        uint32_t head) {
    kvf_cell_location at = {.struct_size = sizeof at};
    TRY(kvf_shard_locate(kvf_engine_shard(s->engine, 0), 0, layer, part, blocks[token / s->tokens_per_block],
                         token % s->tokens_per_block, head, &at));
    return (float *)(void *)((char *)s->regions[at.region].address + at.offset);
}

/* Prefill: computes a layer of a request. Decode: counts the elements that are not as computed. */
static uint32_t each_element(const side *s, const place *p, uint32_t layer, bool compute) {
    uint32_t wrong = 0;
    for (uint32_t part = 0; part < PARTS; part++)
        for (uint32_t token = 0; token < TOKENS; token++)
            for (uint32_t head = 0; head < HEADS; head++) {
                float *cell = find_cell(s, compute ? p->prefill : p->decode, layer, part, token, head);
                for (uint32_t i = 0; i < HEAD_SIZE; i++) {
                    float value = value_of(p, layer, part, token, head, i);
                    if (compute)
                        cell[i] = value;
                    wrong += cell[i] != value;
                }
            }
    return wrong;
}

/* ---- an event loop --------------------------------------------------------------------------- */

/* An engine's loop, which would also wait here for its own work. Returns when `requests` requests are done. */
static void run_until_done(const side *s, uint32_t requests) {
    kvf_event event = {.struct_size = sizeof event};
    while (requests > 0) {
        struct pollfd fd = {.fd = kvf_agent_event_fd(s->agent), .events = POLLIN};
        (void)poll(&fd, 1, 1000);
        TRY(kvf_agent_progress(s->agent, NULL));
        for (; kvf_agent_next_event(s->agent, &event) == KVF_OK; requests -= event.kind == KVF_EVENT_DONE)
            if (event.kind == KVF_EVENT_FAILED) {
                (void)fprintf(stderr, "agents: %.*s: %s\n", (int)event.id.size, (const char *)event.id.data,
                              event.detail);
                exit(1);
            }
    }
}

static kvf_agent_request ask(const place *p, const kvf_group_steps *steps) {
    return (kvf_agent_request){.struct_size = sizeof(kvf_agent_request),
                               .id = {p->name, strlen(p->name)},
                               .groups = steps,
                               .group_count = 1,
                               .deadline_ns = 60 * SECOND};
}

static void prefill(int pipe_end) {
    side s = {0};
    open_side(&s, "prefill", 16, "L|BPNH");
    const char *endpoint = kvf_agent_endpoint(s.agent);
    if (write(pipe_end, endpoint, strlen(endpoint) + 1) < 0)
        exit(1);

    for (uint32_t layer = 0; layer < LAYERS; layer++)
        (void)each_element(&s, &pulled, layer, true);
    const kvf_group_steps held = {.table = {pulled.prefill, 3, 0}, .end = TOKENS};
    kvf_agent_request request = ask(&pulled, &held);
    TRY(kvf_agent_hold(s.agent, &request, NULL));

    const kvf_group_steps written = {.table = {pushed.prefill, 3, 0}, .end = TOKENS};
    uint64_t ticket;
    request = ask(&pushed, &written);
    TRY(kvf_agent_push(s.agent, &request, &ticket));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        (void)each_element(&s, &pushed, layer, true);
        const kvf_push_chunk chunk = {.struct_size = sizeof chunk, .end = TOKENS, .layers = layer + 1};
        TRY(kvf_agent_push_ready(s.agent, ticket, &chunk));
        TRY(kvf_agent_progress(s.agent, NULL)); /* between two layers, as an engine would */
    }
    run_until_done(&s, 2); /* then both requests' blocks are free */
    close_side(&s);
}

static void decode(const char *endpoint) {
    side s = {0};
    open_side(&s, "decode", 24, "L|BPHN");
    const kvf_contact contact = {.engine = "prefill", .endpoint = endpoint};

    const kvf_group_steps read = {.table = {pulled.decode, 2, 0}, .end = TOKENS};
    kvf_agent_request request = ask(&pulled, &read);
    request.contact = contact;
    TRY(kvf_agent_pull(s.agent, &request, NULL));

    const kvf_group_steps received = {.table = {pushed.decode, 2, 0}, .end = TOKENS};
    request = ask(&pushed, &received);
    request.contact = contact;
    TRY(kvf_agent_expect(s.agent, &request, NULL));
    run_until_done(&s, 2);

    uint32_t wrong = 0;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        wrong += each_element(&s, &pulled, layer, false) + each_element(&s, &pushed, layer, false);
    (void)printf("%u elements pulled and as many pushed, %u of them wrong\n",
                 LAYERS * PARTS * TOKENS * HEADS * HEAD_SIZE, wrong);
    close_side(&s);
    if (wrong)
        exit(1);
}

int main(void) {
    int ends[2];
    char endpoint[256] = "";
    if (pipe(ends))
        return 1;
    pid_t child = fork(); /* before any agent is opened */
    if (child == 0) {
        prefill(ends[1]);
        return 0;
    }
    (void)close(ends[1]); /* so that nothing comes if the other process has ended */
    if (child < 0 || read(ends[0], endpoint, sizeof endpoint - 1) <= 0)
        return 1;
    decode(endpoint);
    int status = 1;
    return waitpid(child, &status, 0) != child || status != 0;
}
