/*
 * The UCX fabric between two processes, compared with UCX's own ucx_perftest: the same size, the same transports,
 * the same number in flight, the same place in memory again and again, in turns within one run.
 *
 * In both, both processes poll without sleeping, so the figures are valid only if two processors are otherwise
 * idle.
 *
 * The two do different work: ucx_perftest polls one connection that may hang when its peer dies; the fabric has
 * error handling and an event descriptor, takes runs from a list and checks each one.
 *
 *     bench/ucx [--json FILE]
 */
#include <arpa/inet.h>
#include <math.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <kvferry/transport.h>

#include "report.h"

#define IN_FLIGHT 64
#define ROUNDS 5
#define SECONDS_A_TURN 0.15
#define RUNS 2048 /* in a batch */
#define BATCHES 4 /* submitted at once */
#define TARGET_SPINS 20000
#define LONGEST_BYTES 131072u
#define PERFTEST_MS 20000 /* after this time it is considered hung */

static const uint64_t sizes[] = {512, 2048, 8192, 32768, LONGEST_BYTES};

typedef struct bench_route {
    const char *title;
    const char *tls;
    bool allocated;        /* memory that UCX can map on the other side, as ucx_perftest's is by default */
    double bytes_a_second; /* roughly, to choose how much to move */
    double ns_a_run;
} bench_route;

static const bench_route routes[] = {
    {"shared memory (posix), memory from kvf_transport_allocate()", "posix,self", true, 20e9, 50},
    {"shared memory (posix, emulated by UCX), the caller's memory", "posix,cma,self", false, 2e9, 2000},
    {"TCP over lo (emulated by UCX), the caller's memory", "tcp,self", false, 6e8, 8000},
};
#define ROUTES (sizeof routes / sizeof *routes)

/* ---- processors ------------------------------------------------------------------------------ */

/* The processors of the two sides; -1: there are not two. Without pinning, two polling processes may share one
 * processor for seconds, and this would measure the scheduler. */
static int processors[2] = {-1, -1};

static void choose_processors(void) {
    cpu_set_t allowed;
    int found = 0;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2)
        return;
    for (int i = 0; i < CPU_SETSIZE && found < 2; i++)
        if (CPU_ISSET(i, &allowed))
            processors[found++] = i;
}

static void stay_on(int processor) {
    cpu_set_t one;
    CPU_ZERO(&one);
    if (processor < 0)
        return;
    CPU_SET(processor, &one);
    (void)sched_setaffinity(0, sizeof one, &one);
}

/* ---- the other process: owns memory and progresses ------------------------------------------- */

typedef struct bench_target {
    pid_t pid;
    int line;
} bench_target;

static kvf_transport *open_transport(const bench_route *by, void **memory, kvf_transport_options *options) {
    kvf_transport *transport;
    options->struct_size = sizeof *options;
    static kvf_setting setting = {.key = "ucx.tls"};
    setting.value = by->tls;
    options->settings = &setting;
    options->setting_count = by->tls ? 1 : 0;
    options->max_in_flight = IN_FLIGHT;
    bench_require(kvf_transport_open("ucx", options, &transport) == KVF_OK, kvf_error_detail());
    if (by->allocated)
        bench_require(kvf_transport_allocate(transport, KVF_MEMORY_HOST, 0, LONGEST_BYTES, memory) == KVF_OK,
                      kvf_error_detail());
    else
        *memory = bench_alloc(LONGEST_BYTES, 1);
    memset(*memory, 0x5a, LONGEST_BYTES);
    kvf_memory region = {.struct_size = sizeof(kvf_memory), .address = *memory, .bytes = LONGEST_BYTES};
    bench_require(kvf_transport_register(transport, &region, 1) == KVF_OK, kvf_error_detail());
    return transport;
}

static _Noreturn void be_target(const bench_route *by, int line) {
    void *memory;
    char word;
    const void *card;
    size_t bytes;
    stay_on(processors[1]);
    /* The target opens UCX only when its turn comes, and ends with the benchmark at the latest. */
    if (recv(line, &word, 1, 0) != 1)
        _exit(0);
    kvf_transport_options options = {0};
    kvf_transport *transport = open_transport(by, &memory, &options);
    bench_require(kvf_transport_export(transport, &card, &bytes) == KVF_OK, kvf_error_detail());
    bench_require(send(line, card, bytes, 0) == (ssize_t)bytes, "the card could not be sent");
    for (unsigned idle = 0;;) {
        bool busy;
        bench_require(kvf_transport_progress(transport, &busy) == KVF_OK, kvf_error_detail());
        idle = busy ? 0 : idle + 1;
        if (idle < TARGET_SPINS)
            continue;
        struct pollfd fds[2] = {{.fd = kvf_transport_event_fd(transport), .events = POLLIN},
                                {.fd = line, .events = POLLIN}};
        (void)poll(fds, 2, -1);
        if (fds[1].revents)
            break;
        idle = 0;
    }
    kvf_transport_close(transport);
    _exit(0);
}

static bench_target start_target(const bench_route *by) {
    int lines[2];
    bench_require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, lines) == 0, "no socket pair");
    bench_target started = {.pid = fork(), .line = lines[0]};
    bench_require(started.pid >= 0, "no process");
    if (started.pid == 0) {
        (void)close(lines[0]);
        be_target(by, lines[1]);
    }
    (void)close(lines[1]);
    return started;
}

static void end_target(const bench_target *target) {
    /* Targets started later also have the descriptor, so the target would not notice its closing. */
    (void)shutdown(target->line, SHUT_RDWR);
    (void)close(target->line);
    (void)waitpid(target->pid, NULL, 0);
}

/* ---- ours ------------------------------------------------------------------------------------ */

typedef struct bench_mover {
    kvf_transport *transport;
    kvf_peer *peer;
    void *memory;
    bool owns_memory;
    kvf_direction direction;
    kvf_run runs[RUNS];
    uint64_t batches_left;
    unsigned under_way;
} bench_mover;

static void submit_next(bench_mover *mover);

static void on_done(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation;
    bench_mover *mover = context;
    bench_require(status == KVF_OK, detail);
    mover->under_way--;
    submit_next(mover);
}

static void submit_next(bench_mover *mover) {
    if (mover->batches_left == 0)
        return;
    mover->batches_left--;
    mover->under_way++;
    bench_require(kvf_transport_submit(mover->peer, mover->direction, mover->runs, RUNS, on_done, mover,
                                       NULL) == KVF_OK,
                  kvf_error_detail());
}

static void open_mover(bench_mover *mover, const bench_route *by, const bench_target *target) {
    static unsigned char card[65536];
    kvf_transport_options options = {0};
    bench_require(send(target->line, "g", 1, 0) == 1, "the other process is gone");
    ssize_t bytes = recv(target->line, card, sizeof card, 0);
    bench_require(bytes > 0, "no card came");
    mover->transport = open_transport(by, &mover->memory, &options);
    mover->owns_memory = !by->allocated;
    bench_require(kvf_transport_connect(mover->transport, card, (size_t)bytes, &mover->peer) == KVF_OK,
                  kvf_error_detail());
}

static void close_mover(bench_mover *mover) {
    kvf_transport_close(mover->transport);
    if (mover->owns_memory)
        free(mover->memory);
}

/* Gigabytes a second over at least `count` runs. */
static double by_kvferry(bench_mover *mover, kvf_direction direction, uint64_t bytes, uint64_t count) {
    uint64_t batches = (count + RUNS - 1) / RUNS;
    mover->direction = direction;
    for (size_t i = 0; i < RUNS; i++)
        mover->runs[i] = (kvf_run){.bytes = bytes};
    uint64_t begin = 0;
    for (int warm = 1; warm >= 0; warm--) {
        mover->batches_left = warm ? BATCHES : batches;
        begin = bench_now_ns();
        for (int i = 0; i < BATCHES; i++)
            submit_next(mover);
        while (mover->under_way > 0)
            bench_require(kvf_transport_progress(mover->transport, NULL) == KVF_OK, kvf_error_detail());
    }
    return (double)(batches * RUNS * bytes) / (double)(bench_now_ns() - begin);
}

/* ---- UCX's ----------------------------------------------------------------------------------- */

static int free_port(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    bench_require(fd >= 0 && bind(fd, (struct sockaddr *)&address, bytes) == 0 &&
                      getsockname(fd, (struct sockaddr *)&address, &bytes) == 0,
                  "no free port");
    (void)close(fd);
    return ntohs(address.sin_port);
}

/* Starts ucx_perftest with its output in `out` (or nowhere); returns 0 if it cannot be started. */
static pid_t spawn_perftest(char *const *arguments, int out) {
    posix_spawn_file_actions_t actions;
    pid_t pid = 0;
    bench_require(posix_spawn_file_actions_init(&actions) == 0, "no memory");
    if (out >= 0)
        (void)posix_spawn_file_actions_adddup2(&actions, out, 1);
    else
        (void)posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", 1, 0);
    (void)posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", 1, 0);
    if (posix_spawnp(&pid, arguments[0], &actions, NULL, arguments, environ) != 0)
        pid = 0;
    (void)posix_spawn_file_actions_destroy(&actions);
    return pid;
}

/* The last number of the text: messages per second. */
static double last_number(const char *text) {
    const char *end = text + strlen(text);
    while (end > text && (end[-1] == '\n' || end[-1] == ' '))
        end--;
    const char *begin = end;
    while (begin > text && begin[-1] != ' ' && begin[-1] != '\n')
        begin--;
    double number = strtod(begin, NULL);
    return isfinite(number) ? number : 0;
}

/* Returns a negative number if ucx_perftest hangs. */
static double read_result(int from) {
    char text[4096];
    size_t length = 0;
    ssize_t got = 1;
    struct pollfd ready = {.fd = from, .events = POLLIN};
    while (length < sizeof text - 1 && got > 0) {
        if (poll(&ready, 1, PERFTEST_MS) <= 0)
            return -1;
        got = read(from, text + length, sizeof text - 1 - length);
        length += got > 0 ? (size_t)got : 0;
    }
    text[length] = '\0';
    return last_number(text);
}

static void end_process(pid_t pid) {
    if (!pid)
        return;
    (void)kill(pid, SIGTERM);
    (void)waitpid(pid, NULL, 0);
}

/* Gigabytes a second; 0 if there is no ucx_perftest or it failed. */
static double by_perftest(kvf_direction direction, uint64_t bytes, uint64_t count) {
    char port[16], size[16], iterations[24], window[16], here[16], there[16];
    (void)snprintf(port, sizeof port, "%d", free_port());
    (void)snprintf(size, sizeof size, "%u", (unsigned)bytes);
    (void)snprintf(iterations, sizeof iterations, "%llu", (unsigned long long)count);
    (void)snprintf(window, sizeof window, "%d", IN_FLIGHT);
    (void)snprintf(here, sizeof here, "%d", processors[0]);
    (void)snprintf(there, sizeof there, "%d", processors[1]);
    char *test = direction == KVF_READ ? "ucp_get" : "ucp_put_bw";
    bool pinned = processors[1] >= 0;
    char *server[] = {"ucx_perftest",       "-p",  port, "-t", test, "-s", size, "-O", window,
                      pinned ? "-c" : NULL, there, NULL};
    char *client[] = {"ucx_perftest", "-p", port,       "-t", test,   "-s", size,        "-O",
                      window,         "-n", iterations, "-w", "1000", "-f", "127.0.0.1", pinned ? "-c" : NULL,
                      here,           NULL};
    pid_t serving = spawn_perftest(server, -1);
    double rate = 0;
    for (int attempt = 0; serving && rate == 0 && attempt < 20; attempt++) {
        int lines[2];
        struct timespec wait = {.tv_nsec = 100000000}; /* until the server listens: it does not report it */
        (void)nanosleep(&wait, NULL);
        bench_require(pipe(lines) == 0, "no pipe");
        pid_t asking = spawn_perftest(client, lines[1]);
        (void)close(lines[1]);
        rate = read_result(lines[0]);
        (void)close(lines[0]);
        end_process(asking);
    }
    end_process(serving);
    return rate > 0 ? rate * (double)bytes / 1e9 : 0;
}

static bool has_perftest(void) {
    char *const version[] = {"ucx_perftest", "-h", NULL};
    pid_t pid = spawn_perftest(version, -1);
    if (pid)
        (void)waitpid(pid, NULL, 0);
    return pid != 0;
}

/* ---- both ------------------------------------------------------------------------------------ */

static void compare(bench_report *report, bench_mover *mover, const bench_route *by, kvf_direction direction,
                    uint64_t bytes, bool perftest) {
    double ours[ROUNDS], theirs[ROUNDS], ratios[ROUNDS];
    double seconds_a_run = by->ns_a_run / 1e9 + (double)bytes / by->bytes_a_second;
    uint64_t count = (uint64_t)(SECONDS_A_TURN / seconds_a_run) + 1;
    for (int i = 0; i < ROUNDS; i++) {
        theirs[i] = perftest ? by_perftest(direction, bytes, count) : 0;
        ours[i] = by_kvferry(mover, direction, bytes, count);
        ratios[i] = theirs[i] > 0 ? ours[i] / theirs[i] : 0;
    }
    bench_spread our = bench_spread_of(ours, ROUNDS), their = bench_spread_of(theirs, ROUNDS);
    bench_spread ratio = bench_spread_of(ratios, ROUNDS);
    bench_text(report, direction == KVF_READ ? "read" : "write");
    bench_text(report, bench_bytes(bytes));
    bench_number(report, 3, our.median);
    bench_number(report, 3, our.low);
    bench_number(report, 3, our.high);
    bench_number(report, 3, their.median);
    bench_number(report, 3, their.low);
    bench_number(report, 3, their.high);
    bench_number(report, 2, their.median > 0 ? our.median / their.median : 0);
    bench_number(report, 2, ratio.median);
}

static void compare_route(bench_report *report, const bench_route *by, const bench_target *target,
                          bool perftest) {
    static bench_mover mover;
    mover = (bench_mover){0};
    open_mover(&mover, by, target);
    /* By default ucx_perftest does what the fabric does with allocated memory; UCX_ALLOC_PRIO makes its memory
     * like a caller's. */
    (void)setenv("UCX_TLS", by->tls, 1);
    if (by->allocated)
        (void)unsetenv("UCX_ALLOC_PRIO");
    else
        (void)setenv("UCX_ALLOC_PRIO", "mmap", 1);
    bench_table(report, by->title,
                (const char *[]){"", "run", "kvferry GB/s", "low", "high", "perftest GB/s", "low", "high",
                                 "ratio", "ratio by turns", NULL});
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            compare(report, &mover, by, (kvf_direction)direction, sizes[i], perftest);
    if (!perftest)
        bench_note(report, "The limit is missing: ucx_perftest is not installed (Debian: ucx-utils).");
    close_mover(&mover);
}

static bool has_ucx(void) {
    const char *kind;
    for (uint32_t i = 0; (kind = kvf_transport_kind_name(i)); i++)
        if (strcmp(kind, "ucx") == 0)
            return true;
    return false;
}

int main(int argc, char **argv) {
    bench_target targets[ROUTES];
    /* For our own processes and ucx_perftest: TCP stays on this machine, and no warnings about settings. */
    (void)setenv("UCX_NET_DEVICES", "lo", 1);
    (void)setenv("UCX_WARN_UNUSED_ENV_VARS", "n", 1);
    (void)unsetenv("UCX_ALLOC_PRIO");
    if (!has_ucx()) {
        printf("This build has no UCX: nothing to measure.\n");
        return 0;
    }
    choose_processors();
    for (size_t i = 0; i < ROUTES; i++)
        targets[i] = start_target(&routes[i]); /* before this process opens UCX, which must not be forked */
    stay_on(processors[0]);
    bench_report *report = bench_report_start("ucx", argc, argv);
    bool perftest = has_perftest();
    if (processors[1] < 0)
        printf("There is only one processor: these figures are those of the scheduler.\n");
    for (size_t i = 0; i < ROUTES; i++) {
        compare_route(report, &routes[i], &targets[i], perftest);
        end_target(&targets[i]);
    }
    return bench_report_end(report);
}
