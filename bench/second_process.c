#include "second_process.h"
#include "agent/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <zmq.h>

/* ---- engines --------------------------------------------------------------------------------- */

kvf_engine *bench_engine(const char *name, uint32_t layers, uint32_t units, uint32_t elements,
                         uint32_t blocks) {
    const kvf_part_desc parts[] = {
        {.name = "k", .dtype = KVF_DTYPE_BF16, .units = units, .cell_elements = elements},
        {.name = "v", .dtype = KVF_DTYPE_BF16, .units = units, .cell_elements = elements}};
    uint32_t numbers[64];
    for (uint32_t i = 0; i < layers; i++)
        numbers[i] = i;
    kvf_group_desc group = {
        .name = "full", .layers = numbers, .layer_count = layers, .parts = parts, .part_count = 2};
    kvf_model_desc desc = {
        .struct_size = sizeof desc, .layer_count = layers, .groups = &group, .group_count = 1};
    kvf_engine_spec spec = {.struct_size = sizeof spec, .name = name, .all = {.block_count = blocks}};
    kvf_model *model = NULL;
    kvf_engine *engine = NULL;
    bench_must(kvf_model_create(&desc, &model));
    bench_must(kvf_engine_build(model, &spec, &engine));
    kvf_model_free(model);
    return engine;
}

kvf_agent *bench_agent(const kvf_engine *engine) {
    return bench_agent_in(NULL, engine, &(kvf_agent_options){0});
}

kvf_agent *bench_agent_in(const kvf_link_table *link, const kvf_engine *engine,
                          const kvf_agent_options *more) {
    kvf_agent_options options = {.struct_size = sizeof options,
                                 .lease_ns = 20000 * KVF_SECOND,
                                 .heartbeat_ns = 5000 * KVF_SECOND,
                                 .transport = more->transport,
                                 .verify = more->verify,
                                 .own_thread = more->own_thread};
    kvf_agent *agent = NULL;
    bench_must(kvf_agent_open_in(&(const kvf_surroundings){.link = link}, engine, 0, &options, &agent));
    bench_register(agent, engine);
    return agent;
}

void bench_register(kvf_agent *agent, const kvf_engine *engine) {
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(engine, 0));
    kvf_memory *regions = bench_alloc(shard->region_count, sizeof *regions);
    for (uint32_t i = 0; i < shard->region_count; i++) {
        void *memory;
        bench_must(kvf_agent_allocate(agent, KVF_MEMORY_HOST, 0, shard->region_bytes[i], &memory));
        memset(memory, 1, shard->region_bytes[i]);
        regions[i] = (kvf_memory){
            .struct_size = sizeof(kvf_memory), .address = memory, .bytes = shard->region_bytes[i]};
    }
    bench_must(kvf_agent_register(agent, regions, shard->region_count));
    free(regions);
}

const kvf_agent_request *bench_ask_of(bench_ask *ask, uint32_t number, uint32_t block, const char *endpoint) {
    *ask = (bench_ask){.block = block, .id = number};
    ask->group = (kvf_group_steps){{&ask->block, 1, 0}, 0, 16};
    ask->request = (kvf_agent_request){.struct_size = sizeof ask->request,
                                       .id = {&ask->id, sizeof ask->id},
                                       .groups = &ask->group,
                                       .group_count = 1,
                                       .deadline_ns = 3600 * KVF_SECOND,
                                       .contact = {.engine = "P", .endpoint = endpoint}};
    return &ask->request;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static atomic_ullong live_bytes;

static void *count_allocate(void *context, size_t bytes) {
    (void)context;
    size_t *memory = malloc(bytes + 2 * sizeof(size_t));
    if (!memory)
        return NULL;
    memory[0] = bytes;
    atomic_fetch_add(&live_bytes, bytes);
    return memory + 2;
}

static void count_release(void *context, void *memory) {
    (void)context;
    if (!memory)
        return;
    size_t *start = (size_t *)memory - 2;
    atomic_fetch_sub(&live_bytes, start[0]);
    free(start);
}

static void *count_resize(void *context, void *memory, size_t bytes) {
    void *grown = count_allocate(context, bytes);
    if (grown && memory) {
        size_t before = ((size_t *)memory - 2)[0];
        memcpy(grown, memory, before < bytes ? before : bytes);
        count_release(context, memory);
    }
    return grown;
}

static uint64_t resident_bytes(void) {
    char line[256], *after_first;
    FILE *file = fopen("/proc/self/statm", "r");
    bench_require(file && fgets(line, sizeof line, file), "no /proc/self/statm");
    (void)fclose(file);
    (void)strtoull(line, &after_first, 10); /* skips the number of all pages; resident ones follow */
    return strtoull(after_first, NULL, 10) * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* ---- what it does ---------------------------------------------------------------------------- */

static void offer(kvf_agent *agent, const bench_board *board, bool push) {
    for (uint32_t i = 0; i < board->count; i++) {
        bench_ask ask;
        uint64_t ticket;
        uint32_t number = board->first + i;
        const kvf_agent_request *request = bench_ask_of(&ask, number, number % BENCH_BLOCKS, "");
        if (push) {
            bench_must(kvf_agent_push(agent, request, &ticket));
            bench_must(kvf_agent_push_ready(agent, ticket, NULL));
        } else {
            bench_must(kvf_agent_hold(agent, request, &ticket));
        }
    }
}

static void be_producer(bench_board *board, uint32_t layers) {
    const kvf_allocator allocator = {count_allocate, count_resize, count_release, NULL};
    bench_must(kvf_set_allocator(&allocator));
    kvf_engine *engine = bench_engine("P", layers, 8, 128, BENCH_BLOCKS);
    kvf_agent *agent = bench_agent(engine);
    (void)snprintf(board->endpoint, sizeof board->endpoint, "%s", kvf_agent_endpoint(agent));
    atomic_store(&board->order, BENCH_IDLE);
    for (int order = BENCH_IDLE; order != BENCH_END;) {
        (void)kvf_agent_wait(agent, KVF_MILLISECOND);
        kvf_event event = {.struct_size = sizeof event};
        while (kvf_agent_next_event(agent, &event) == KVF_OK)
            bench_require(!event.ticket || event.kind == KVF_EVENT_DONE, "a request of the producer failed");
        order = atomic_load(&board->order);
        if (order == BENCH_HOLD || order == BENCH_PUSH)
            offer(agent, board, order == BENCH_PUSH);
        if (order == BENCH_COUNT_MEMORY) {
            atomic_store(&board->live_bytes, atomic_load(&live_bytes));
            atomic_store(&board->resident_bytes, resident_bytes());
        }
        if (order != BENCH_IDLE && order != BENCH_END)
            atomic_store(&board->order, BENCH_IDLE);
    }
    kvf_agent_close(agent);
    kvf_engine_free(engine);
}

static void echo_all(void *router, const void *answer, const bench_board *board) {
    unsigned char id[256];
    int bytes;
    while ((bytes = zmq_recv(router, id, sizeof id, ZMQ_DONTWAIT)) >= 0) {
        zmq_msg_t question;
        (void)zmq_msg_init(&question);
        (void)zmq_msg_recv(&question, router, 0);
        (void)zmq_msg_close(&question);
        (void)zmq_send(router, id, (size_t)bytes, ZMQ_SNDMORE);
        (void)zmq_send(router, answer, board->echo_bytes, 0);
    }
}

/* Answers each message with one of `echo_bytes`. */
static void be_echo(bench_board *board) {
    void *zmq = zmq_ctx_new(), *router = zmq_socket(zmq, ZMQ_ROUTER);
    const int none = 0, backlog = 4096;
    size_t size = sizeof board->endpoint;
    bench_require(router && zmq_setsockopt(router, ZMQ_SNDHWM, &none, sizeof none) == 0 &&
                      zmq_setsockopt(router, ZMQ_RCVHWM, &none, sizeof none) == 0 &&
                      zmq_setsockopt(router, ZMQ_LINGER, &none, sizeof none) == 0 &&
                      zmq_setsockopt(router, ZMQ_BACKLOG, &backlog, sizeof backlog) == 0 &&
                      zmq_bind(router, "tcp://127.0.0.1:*") == 0 &&
                      zmq_getsockopt(router, ZMQ_LAST_ENDPOINT, board->endpoint, &size) == 0,
                  "no ZeroMQ socket");
    unsigned char *answer = bench_alloc(1u << 20, 1);
    memset(answer, 0, 1u << 20);
    atomic_store(&board->order, BENCH_IDLE);
    while (atomic_load(&board->order) != BENCH_END) {
        zmq_pollitem_t item = {router, 0, ZMQ_POLLIN, 0};
        (void)zmq_poll(&item, 1, 50);
        echo_all(router, answer, board);
    }
    (void)zmq_close(router);
    (void)zmq_ctx_term(zmq);
    free(answer);
}

/* ---- orders ---------------------------------------------------------------------------------- */

bench_board *bench_second_start(uint32_t layers) {
    bench_board *board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    bench_require(board != MAP_FAILED, "no shared memory");
    atomic_store(&board->order, BENCH_COUNT_MEMORY); /* cleared when the process is up */
    (void)fflush(stdout);
    board->pid = fork();
    bench_require(board->pid >= 0, "no second process");
    if (board->pid == 0) {
        if (layers)
            be_producer(board, layers);
        else
            be_echo(board);
        _exit(0);
    }
    while (atomic_load(&board->order) != BENCH_IDLE)
        (void)usleep(200);
    return board;
}

void bench_second_order(bench_board *board, bench_order order, uint32_t first, uint32_t count) {
    board->first = first;
    board->count = count;
    atomic_store(&board->order, order);
    while (atomic_load(&board->order) != BENCH_IDLE)
        (void)usleep(200);
}

void bench_second_end(bench_board *board) {
    atomic_store(&board->order, BENCH_END);
    (void)waitpid(board->pid, NULL, 0);
    (void)munmap(board, sizeof *board);
}
