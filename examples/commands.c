/*
 * Engines that heed an operator's commands. Alone, the program is an operator and starts two engines: it has a request
 * moved from the first to the second, and drains both. By hand:
 *
 *   commands prefill &          commands decode &              each prints its endpoint
 *   kvferry ask ENDPOINT hand-over prompt --to ENDPOINT        the request moves from the first to the second
 *   kvferry ask ENDPOINT drain                                 the engine takes nothing new,
 *   kvferry ask ENDPOINT resume                                and serves again
 *
 * The engine "prefill" keeps the cache of one request, "prompt". Any other engine keeps nothing; it takes a request
 * over by pulling it, compares every element, and then keeps it, too. The two lay out their caches differently.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kvferry/ask.h>

#define LAYERS 2u
#define HEADS 4u
#define HEAD_SIZE 32u
#define PARTS 2u /* K and V */
#define TOKENS 40u
#define MAX_REGIONS 16u
#define MAX_NAME 64u

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        if (call) {                                                                                          \
            (void)fprintf(stderr, "commands: %s\n", kvf_error_detail());                                     \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

typedef struct engine {
    kvf_engine *shape;
    kvf_agent *agent;
    kvf_memory regions[MAX_REGIONS];
    uint32_t tokens_per_block;
    uint32_t blocks[3];     /* of the request */
    char request[MAX_NAME]; /* that is kept; "": none */
    uint64_t pull;          /* the ticket of a request that is being taken over; 0: none */
    uint64_t pulled_for;    /* the command that asked for it */
    char pulled[MAX_NAME];
    bool drains;
    uint64_t drained_for; /* the command that asked to drain, and waits; 0: none */
    bool ends;
} engine;

/* ---- the cache ------------------------------------------------------------------------------- */

static kvf_model *make_model(void) {
    static const uint32_t layers[LAYERS] = {0, 1};
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

static void open_engine(engine *e, const char *name, bool keeps) {
    static const uint32_t kept[3] = {7, 3, 9}, empty[3] = {5, 1, 0};
    const kvf_engine_spec spec = {.struct_size = sizeof spec,
                                  .name = name,
                                  .all = {.tokens_per_block = keeps ? 16 : 24,
                                          .block_count = 12,
                                          .order = keeps ? "L|BPNH" : "L|BPHN"}};
    const kvf_agent_options options = {.struct_size = sizeof options, .local_commands = true};
    kvf_model *model = make_model();
    e->tokens_per_block = spec.all.tokens_per_block;
    memcpy(e->blocks, keeps ? kept : empty, sizeof e->blocks);
    TRY(kvf_engine_build(model, &spec, &e->shape));
    kvf_model_free(model); /* the engine keeps what it needs */
    TRY(kvf_agent_open(e->shape, 0, &options, &e->agent));
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(e->shape, 0));
    if (shard->region_count > MAX_REGIONS)
        exit(1);
    for (uint32_t i = 0; i < shard->region_count; i++) {
        e->regions[i] = (kvf_memory){.struct_size = sizeof(kvf_memory), .bytes = shard->region_bytes[i]};
        TRY(kvf_agent_allocate(e->agent, KVF_MEMORY_HOST, 0, e->regions[i].bytes, &e->regions[i].address));
    }
    TRY(kvf_agent_register(e->agent, e->regions, shard->region_count));
}

/* Finds the elements of one head of a token. */
static float *find_cell(const engine *e, uint32_t layer, uint32_t part, uint32_t token, uint32_t head) {
    kvf_cell_location at = {.struct_size = sizeof at};
    TRY(kvf_shard_locate(kvf_engine_shard(e->shape, 0), 0, layer, part,
                         e->blocks[token / e->tokens_per_block], token % e->tokens_per_block, head, &at));
    return (float *)(void *)((char *)e->regions[at.region].address + at.offset);
}

/* Computes every element of the request, or counts those that are not as computed. */
static uint32_t each_element(const engine *e, bool compute) {
    uint32_t wrong = 0, number = 0;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t part = 0; part < PARTS; part++)
            for (uint32_t token = 0; token < TOKENS; token++)
                for (uint32_t head = 0; head < HEADS; head++) {
                    float *cell = find_cell(e, layer, part, token, head);
                    for (uint32_t i = 0; i < HEAD_SIZE; i++, number++) {
                        if (compute)
                            cell[i] = (float)number;
                        wrong += cell[i] != (float)number;
                    }
                }
    return wrong;
}

/* ---- commands -------------------------------------------------------------------------------- */

static bool keeps(const engine *e, const kvf_request_id *id) {
    return id->size > 0 && id->size == strlen(e->request) && memcmp(id->data, e->request, id->size) == 0;
}

static kvf_agent_request request_of(const engine *e, const kvf_command *command, kvf_group_steps *steps) {
    *steps = (kvf_group_steps){
        .table = {e->blocks, (TOKENS + e->tokens_per_block - 1) / e->tokens_per_block, 0}, .end = TOKENS};
    return (kvf_agent_request){.struct_size = sizeof(kvf_agent_request),
                               .id = command->request,
                               .groups = steps,
                               .group_count = 1,
                               .deadline_ns = command->deadline_ns};
}

/* KVF_E_AGAIN: it has replied. */
static kvf_status hand_over(const engine *e, const kvf_command *command, const char **detail) {
    kvf_group_steps steps;
    const kvf_agent_request request = request_of(e, command, &steps);
    char tokens[16]; /* for engines that do not know the length */
    (void)snprintf(tokens, sizeof tokens, "%u", TOKENS);
    const kvf_record length = {.name = "tokens", .end = TOKENS, .data = tokens, .size = strlen(tokens)};
    *detail = "this engine keeps no such request";
    if (!keeps(e, &command->request))
        return KVF_E_NOT_FOUND;
    kvf_status status = kvf_agent_hold(e->agent, &request, NULL);
    *detail = kvf_error_detail();
    if (status)
        return status;
    (void)kvf_agent_reply(e->agent, command->number, KVF_OK, NULL, &length, 1);
    return KVF_E_AGAIN;
}

/* KVF_E_AGAIN: the reply comes when the pull has ended. */
static kvf_status take_over(engine *e, const kvf_command *command, const char **detail) {
    kvf_group_steps steps;
    kvf_agent_request request = request_of(e, command, &steps);
    request.contact = command->peer;
    *detail = "this engine has no room: it keeps another request, or is taking one over";
    if (e->request[0] || e->pull || command->request.size >= MAX_NAME)
        return KVF_E_LIMIT;
    kvf_status status = kvf_agent_pull(e->agent, &request, &e->pull);
    *detail = status ? kvf_error_detail() : "";
    if (status)
        return status;
    e->pulled_for = command->number;
    (void)snprintf(e->pulled, sizeof e->pulled, "%.*s", (int)command->request.size,
                   (const char *)command->request.data);
    return KVF_E_AGAIN;
}

static kvf_status drain(engine *e, const kvf_command *command, const char **detail) {
    *detail = "this engine drains already";
    if (e->drains)
        return KVF_E_EXISTS;
    e->drains = true;
    e->drained_for = command->number;
    TRY(kvf_agent_drain(e->agent, command->deadline_ns));
    return KVF_E_AGAIN;
}

static void reply_drained(engine *e, kvf_status status, const char *detail) {
    if (e->drained_for)
        (void)kvf_agent_reply(e->agent, e->drained_for, status, detail, NULL, 0);
    e->drained_for = 0;
}

static kvf_status resume(engine *e, const char **detail) {
    *detail = "";
    TRY(kvf_agent_resume(e->agent));
    reply_drained(e, KVF_E_CANCELLED, "this engine was resumed");
    e->drains = false;
    return KVF_OK;
}

static void heed(engine *e, const kvf_command *command) {
    const char *detail = "this engine knows drain, resume, hand over and take over";
    kvf_status status = KVF_E_UNSUPPORTED;
    if (strcmp(command->verb, KVF_COMMAND_HAND_OVER) == 0)
        status = hand_over(e, command, &detail);
    else if (strcmp(command->verb, KVF_COMMAND_TAKE_OVER) == 0)
        status = take_over(e, command, &detail);
    else if (strcmp(command->verb, KVF_COMMAND_DRAIN) == 0)
        status = drain(e, command, &detail);
    else if (strcmp(command->verb, KVF_COMMAND_RESUME) == 0)
        status = resume(e, &detail);
    if (status == KVF_E_LIMIT)
        status = KVF_E_EXISTS; /* final: nobody is asked to try again */
    if (status != KVF_E_AGAIN)
        (void)kvf_agent_reply(e->agent, command->number, status, detail, NULL, 0);
}

/* A request that was taken over is there, or not: the asker is told, and only then is it kept. */
static void pulled(engine *e, const kvf_event *event) {
    char detail[160];
    kvf_status status = event->status;
    (void)snprintf(detail, sizeof detail, "%s", event->detail);
    const uint32_t wrong = status ? 0 : each_element(e, false);
    if (wrong > 0) {
        status = KVF_E_MISMATCH;
        (void)snprintf(detail, sizeof detail, "%u elements are wrong", wrong);
    }
    if (!status)
        memcpy(e->request, e->pulled, sizeof e->request);
    e->pull = 0;
    printf("%s: %s\n", e->pulled, status ? detail : "every element is right");
    (void)fflush(stdout); /* who has asked may look for it as soon as the reply comes */
    (void)kvf_agent_reply(e->agent, e->pulled_for, status, detail, NULL, 0);
}

static void take_event(engine *e, const kvf_event *event) {
    if (event->kind == KVF_EVENT_COMMAND)
        heed(e, event->command);
    else if (event->kind == KVF_EVENT_DRAINED && event->status != KVF_E_CANCELLED)
        reply_drained(e, event->status, event->detail);
    else if (e->pull && event->ticket == e->pull && event->kind != KVF_EVENT_BLOCKS_FREE)
        pulled(e, event);
}

/* Runs until its standard input ends, as that of an engine whose operator has gone. */
static void run(engine *e) {
    kvf_event event = {.struct_size = sizeof event};
    while (!e->ends) {
        struct pollfd fds[] = {{.fd = kvf_agent_event_fd(e->agent), .events = POLLIN},
                               {.fd = 0, .events = POLLIN}};
        (void)poll(fds, 2, 1000);
        char rest[64];
        e->ends = fds[1].revents && !fgets(rest, sizeof rest, stdin);
        TRY(kvf_agent_progress(e->agent, NULL));
        while (kvf_agent_next_event(e->agent, &event) == KVF_OK)
            take_event(e, &event);
        (void)fflush(stdout);
    }
}

/* One engine, until its standard input ends. */
static int be_engine(const char *name, bool spoiled) {
    engine e = {.shape = NULL};
    const bool is_prefill = strcmp(name, "prefill") == 0;
    open_engine(&e, name, is_prefill);
    if (is_prefill) {
        (void)each_element(&e, true);
        (void)snprintf(e.request, sizeof e.request, "prompt");
    }
    if (spoiled) /* one element is wrong, to see that somebody notices */
        *find_cell(&e, LAYERS - 1, PARTS - 1, TOKENS - 1, HEADS - 1) += 1;
    printf("%s\n", kvf_agent_endpoint(e.agent));
    (void)fflush(stdout);
    run(&e);
    kvf_agent_close(e.agent);
    kvf_engine_free(e.shape);
    return 0;
}

/* ---- the operator ---------------------------------------------------------------------------- */

/* An engine in a process of its own. */
typedef struct started {
    const char *name;
    pid_t pid;
    int stay; /* while it is open, the engine runs */
    FILE *told;
    char endpoint[256];
} started;

static void start(started *out, const char *name) {
    int in[2], told[2];
    if (pipe(in) || pipe(told))
        exit(1);
    *out = (started){.name = name, .pid = fork(), .stay = in[1]};
    if (out->pid < 0)
        exit(1);
    if (out->pid == 0) {
        if (dup2(in[0], 0) < 0 || dup2(told[1], 1) < 0)
            _exit(1);
        (void)close(in[1]);
        exit(be_engine(name, false));
    }
    (void)close(in[0]);
    (void)close(told[1]);
    FILE *from = fdopen(told[0], "r");
    if (!from || !fgets(out->endpoint, sizeof out->endpoint, from))
        exit(1);
    out->endpoint[strcspn(out->endpoint, "\n")] = '\0';
    out->told = from; /* stays open, as the engine writes to it */
}

/* Gives a command, and says what came of it. */
static void give(const started *to, const char *verb, const started *about) {
    const kvf_contact contact = {.engine = to->name, .endpoint = to->endpoint};
    kvf_command command = {.struct_size = sizeof command, .verb = verb};
    kvf_asked *asked;
    kvf_asked_rank reply = {.struct_size = sizeof reply};
    if (about) {
        command.request = (kvf_request_id){"prompt", 6};
        command.peer = (kvf_contact){.engine = about->name, .endpoint = about->endpoint};
    }
    TRY(kvf_ask(&contact, &command, NULL, &asked));
    TRY(kvf_asked_reply(asked, 0, &reply));
    printf("%s was asked to %s: %s %s\n", to->name, verb, kvf_status_name(reply.status), reply.detail);
    if (reply.status)
        exit(1);
    kvf_asked_free(asked);
}

static void stop(const started *one) {
    int status = 0;
    (void)close(one->stay);
    if (waitpid(one->pid, &status, 0) != one->pid || status != 0)
        exit(1);
    (void)fclose(one->told);
}

static int operate(void) {
    started prefill, decode;
    start(&prefill, "prefill");
    start(&decode, "decode");
    give(&prefill, KVF_COMMAND_HAND_OVER, &decode);
    give(&decode, KVF_COMMAND_TAKE_OVER, &prefill); /* checks every element before it replies */
    give(&prefill, KVF_COMMAND_DRAIN, NULL);
    give(&prefill, KVF_COMMAND_RESUME, NULL);
    give(&prefill, KVF_COMMAND_DRAIN, NULL);
    give(&decode, KVF_COMMAND_DRAIN, NULL);
    stop(&decode); /* started last, it holds the other's standard input open */
    stop(&prefill);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 1)
        return operate();
    if (argc > 3 || (argc == 3 && strcmp(argv[2], "spoiled") != 0))
        return fprintf(stderr, "commands [NAME [spoiled]]\n"), 2;
    return be_engine(argv[1], argc == 3);
}
