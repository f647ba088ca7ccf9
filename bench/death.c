/*
 * A producer that pushes is killed while it writes: how long until the consumer's blocks are free, which its lease
 * would keep for 30 s. Beside it, how long the kernel takes to end such a process.
 *
 *     bench/death [--json FILE]
 *
 * The consumer is driven as in an engine's loop, by waiting. In each round both engines are new, the producer has
 * written one of its layers, and the request waits for the other.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "second_process.h"

#define ROUNDS 20u
#define LAYERS 2u
#define UNITS 8u
#define ELEMENTS 128u

typedef struct setting {
    const char *title;
    kvf_agent_options options;
} setting;

/* The producer's report, on a page that both processes have. */
typedef struct board {
    char endpoint[64];
    atomic_bool is_open, has_written;
} board;

static kvf_agent *open_agent(const setting *s, const kvf_engine *engine) {
    kvf_agent_options options = s->options;
    options.struct_size = sizeof options;
    kvf_agent *agent = NULL;
    bench_must(kvf_agent_open(engine, 0, &options, &agent));
    bench_register(agent, engine);
    return agent;
}

static void produce(const setting *s, board *told) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    kvf_engine *engine = bench_engine("P", LAYERS, UNITS, ELEMENTS, BENCH_BLOCKS);
    kvf_agent *agent = open_agent(s, engine);
    bench_ask ask;
    uint64_t ticket;
    const kvf_push_chunk first = {.struct_size = sizeof first, .end = 16, .layers = 1};
    bench_must(kvf_agent_push(agent, bench_ask_of(&ask, 0, 0, ""), &ticket));
    bench_must(kvf_agent_push_ready(agent, ticket, &first));
    (void)snprintf(told->endpoint, sizeof told->endpoint, "%s", kvf_agent_endpoint(agent));
    atomic_store(&told->is_open, true);
    for (;;) {
        kvf_agent_stats stats = {.struct_size = sizeof stats};
        (void)kvf_agent_wait(agent, KVF_MILLISECOND);
        bench_must(kvf_agent_get_stats(agent, &stats));
        if (stats.bytes_written > 0)
            atomic_store(&told->has_written, true);
    }
}

static pid_t start(const setting *s, board *told) {
    memset(told, 0, sizeof *told);
    (void)fflush(stdout);
    pid_t pid = fork();
    bench_require(pid >= 0, "no second process");
    if (pid == 0)
        produce(s, told);
    while (!atomic_load(&told->is_open))
        (void)usleep(200);
    return pid;
}

/* Waits for the event that says that the blocks are free. */
static void until_free(kvf_agent *agent, uint64_t ticket) {
    for (bool free = false; !free;) {
        kvf_event event = {.struct_size = sizeof event};
        (void)kvf_agent_wait(agent, KVF_SECOND);
        while (kvf_agent_next_event(agent, &event) == KVF_OK)
            free |= event.ticket == ticket && (event.blocks_free || event.kind == KVF_EVENT_BLOCKS_FREE);
    }
}

/* Milliseconds from the kill until the blocks are free. */
static double kill_one(const setting *s, board *told) {
    pid_t producer = start(s, told);
    kvf_engine *engine = bench_engine("D", LAYERS, UNITS, ELEMENTS, BENCH_BLOCKS);
    kvf_agent *agent = open_agent(s, engine);
    bench_ask ask;
    uint64_t ticket;
    bench_must(kvf_agent_expect(agent, bench_ask_of(&ask, 0, 0, told->endpoint), &ticket));
    while (!atomic_load(&told->has_written))
        (void)kvf_agent_wait(agent, KVF_MILLISECOND);
    uint64_t killed = bench_now_ns();
    bench_require(kill(producer, SIGKILL) == 0, "kill");
    until_free(agent, ticket);
    double taken = (double)(bench_now_ns() - killed) / 1e6;
    (void)waitpid(producer, NULL, 0);
    kvf_agent_close(agent);
    kvf_engine_free(engine);
    return taken;
}

/* Milliseconds from the kill until the kernel has ended the process. */
static double end_one(const setting *s, board *told) {
    pid_t producer = start(s, told);
    uint64_t killed = bench_now_ns();
    bench_require(kill(producer, SIGKILL) == 0 && waitpid(producer, NULL, 0) == producer, "kill");
    return (double)(bench_now_ns() - killed) / 1e6;
}

int main(int argc, char **argv) {
    static const setting settings[] = {
        {"shared mappings", {.transport = "shm"}},
        {"shared mappings, way direct", {.transport = "shm", .way = KVF_WAY_DIRECT}},
        {"messages", {.transport = "messages"}},
    };
    bench_report *report = bench_report_start("death", argc, argv);
    board *told = mmap(NULL, sizeof *told, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    bench_require(told != MAP_FAILED, "no shared memory");
    bench_table(report, "A pushing producer is killed: ms until the blocks are free",
                (const char *[]){"transport", "median", "worst", NULL});
    double taken[ROUNDS];
    for (size_t i = 0; i <= sizeof settings / sizeof *settings; i++) {
        const bool alone = i == sizeof settings / sizeof *settings;
        for (uint32_t round = 0; round < ROUNDS; round++)
            taken[round] = alone ? end_one(&settings[0], told) : kill_one(&settings[i], told);
        const bench_spread spread = bench_spread_of(taken, ROUNDS);
        bench_text(report, alone ? "the kernel ends the process" : settings[i].title);
        bench_number(report, 1, spread.median);
        bench_number(report, 1, spread.high);
    }
    (void)munmap(told, sizeof *told);
    return bench_report_end(report);
}
