#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "process_pair.h"

/* ---- processes ------------------------------------------------------------------------------- */

_Noreturn void wrong(const char *file, int line, const char *what) {
    (void)fprintf(stderr, "%s:%d: %s (detail: %s)\n", file, line, what, kvf_error_detail());
    (void)fflush(stderr);
    _exit(1);
}

void say(const process *side, char word) {
    CHECK(send(side->line, &word, 1, MSG_NOSIGNAL) == 1);
}

void hear(const process *side, char expected) {
    char word = 0;
    CHECK(recv(side->line, &word, 1, 0) == 1);
    CHECK(word == expected);
}

bool heard(const process *side) {
    char word;
    return recv(side->line, &word, 1, MSG_DONTWAIT) >= 0;
}

/* Runs both processes; the actor must exit with 0, and the target too unless it was killed. */
void run_both(const pair_kind *way, void (*target)(process *), void (*actor)(process *), bool target_dies) {
    int lines[2];
    pid_t pids[2];
    int statuses[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, lines), 0);
    for (int i = 0; i < 2; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0) {
            process side = {.way = way, .line = lines[i], .notes_in_order = true, .other = i ? pids[0] : 0};
            (void)close(lines[!i]);
            (void)alarm(ALARM_SECONDS);
            (i ? actor : target)(&side);
            exit(0);
        }
    }
    (void)close(lines[0]);
    (void)close(lines[1]);
    for (int i = 1; i >= 0; i--)
        assert_int_equal(waitpid(pids[i], &statuses[i], 0), pids[i]);
    assert_true(WIFEXITED(statuses[1]));
    assert_int_equal(WEXITSTATUS(statuses[1]), 0);
    if (target_dies) {
        assert_true(WIFSIGNALED(statuses[0]));
        assert_int_equal(WTERMSIG(statuses[0]), SIGKILL);
    } else {
        assert_true(WIFEXITED(statuses[0]));
        assert_int_equal(WEXITSTATUS(statuses[0]), 0);
    }
}

/* ---- memory and runs ------------------------------------------------------------------------- */

void fill(process *side, uint32_t seed) {
    for (uint32_t r = 0; r < REGIONS; r++)
        side_fill(side->memory[r], seed, r, REGION_BYTES);
}

/* Makes runs that overlap on neither side, so that the result of a read or a write does not depend on their order. */
size_t make_runs(kvf_run *runs, size_t count, uint64_t bytes_max, uint64_t seed) {
    uint64_t at[REGIONS] = {0};
    size_t made = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t region = (uint32_t)draw(&seed, REGIONS);
        uint64_t gap = draw(&seed, 17);
        uint64_t bytes = draw(&seed, bytes_max + 1);
        if (at[region] + gap + bytes > REGION_BYTES)
            continue;
        uint64_t offset = at[region] + gap;
        at[region] = offset + bytes;
        /* The remote place is the mirror image in another region, so that local and remote places differ everywhere. */
        runs[made++] = (kvf_run){.local_region = region,
                                 .local_offset = offset,
                                 .remote_region = (region + 1) % REGIONS,
                                 .remote_offset = REGION_BYTES - offset - bytes,
                                 .bytes = bytes};
    }
    return made;
}

/* Whether every byte of this side's memory is what the runs put there, or what was there before. `from` is the seed of
 * the other side's memory, `before` of this side's. `reading`: this memory is the local side of the runs. */
bool is_exact(process *side, const kvf_run *runs, size_t count, bool reading, uint32_t from,
              uint32_t before) {
    unsigned char *expected[REGIONS];
    bool same = true;
    for (uint32_t r = 0; r < REGIONS; r++) {
        expected[r] = malloc(REGION_BYTES);
        CHECK(expected[r]);
        side_fill(expected[r], before, r, REGION_BYTES);
    }
    for (size_t i = 0; i < count; i++) {
        const kvf_run *run = &runs[i];
        for (uint64_t b = 0; b < run->bytes; b++)
            if (reading)
                expected[run->local_region][run->local_offset + b] =
                    side_byte(from, run->remote_region, run->remote_offset + b);
            else
                expected[run->remote_region][run->remote_offset + b] =
                    side_byte(from, run->local_region, run->local_offset + b);
    }
    for (uint32_t r = 0; r < REGIONS; r++) {
        same = same && memcmp(expected[r], side->memory[r], REGION_BYTES) == 0;
        free(expected[r]);
    }
    return same;
}

/* ---- transports ------------------------------------------------------------------------------ */

static void on_notify(void *context, kvf_transport *transport, const char *sender, const void *data,
                      size_t bytes) {
    (void)transport;
    (void)sender;
    process *side = context;
    uint32_t number;
    CHECK(bytes >= sizeof number);
    memcpy(&number, data, sizeof number);
    if (side->notes++ != number)
        side->notes_in_order = false;
    for (size_t i = sizeof number; i < bytes; i++)
        CHECK(((const unsigned char *)data)[i] == side_byte(number, 0, i));
}

static void on_lost(void *context, kvf_transport *transport, kvf_peer *peer, const char *detail) {
    (void)transport;
    process *side = context;
    CHECK(*detail);
    CHECK(peer == side->peer);
    side->lost++;
}

void on_done(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation;
    process *side = context;
    side->ended = status;
    (void)snprintf(side->detail, sizeof side->detail, "%s", detail);
    side->ends++;
}

void open_side(process *side, uint32_t max_in_flight, uint32_t seed) {
    kvf_setting settings[2];
    kvf_transport_options options = {.struct_size = sizeof options,
                                     .settings = settings,
                                     .setting_count =
                                         pair_settings(&side->way->setting, side->library, settings),
                                     .max_in_flight = max_in_flight,
                                     .on_notify = on_notify,
                                     .on_peer_lost = on_lost,
                                     .context = side};
    CHECK(kvf_transport_open(side->way->kind, &options, &side->transport) == KVF_OK);
    kvf_memory regions[REGIONS];
    for (uint32_t r = 0; r < REGIONS; r++) {
        void *memory = NULL;
        if (side->way->allocated[r % 2])
            CHECK(kvf_transport_allocate(side->transport, KVF_MEMORY_HOST, 0, REGION_BYTES, &memory) ==
                  KVF_OK);
        else
            memory = calloc(1, REGION_BYTES);
        CHECK(memory);
        side->memory[r] = memory;
        for (uint64_t i = 0; memory && i < REGION_BYTES; i++)
            CHECK(side->memory[r][i] == 0);
        regions[r] =
            (kvf_memory){.struct_size = sizeof(kvf_memory), .address = memory, .bytes = REGION_BYTES};
    }
    fill(side, seed);
    CHECK(kvf_transport_register(side->transport, regions, REGIONS) == KVF_OK);
}

void close_side(process *side) {
    kvf_transport_close(side->transport);
    for (uint32_t r = 0; r < REGIONS; r++)
        if (!side->way->allocated[r % 2])
            free(side->memory[r]);
}

void send_card(const process *side) {
    const void *card;
    size_t bytes;
    CHECK(kvf_transport_export(side->transport, &card, &bytes) == KVF_OK);
    CHECK(send(side->line, card, bytes, MSG_NOSIGNAL) == (ssize_t)bytes);
}

size_t receive_card(const process *side, void *card, size_t capacity) {
    ssize_t got = recv(side->line, card, capacity, 0);
    CHECK(got > 0);
    return (size_t)got;
}

void connect_side(process *side) {
    static unsigned char card[65536];
    size_t bytes = receive_card(side, card, sizeof card);
    CHECK(kvf_transport_connect(side->transport, card, bytes, &side->peer) == KVF_OK);
    CHECK(strcmp(kvf_peer_kind(side->peer), side->way->expected) == 0);
}

/* Progresses as an event loop does: sleeps on the descriptor, which must wake whenever there is work. */
void progress(process *side) {
    struct pollfd fds[2] = {{.fd = kvf_transport_event_fd(side->transport), .events = POLLIN},
                            {.fd = side->line, .events = POLLIN}};
    CHECK(poll(fds, 2, -1) > 0 || errno == EINTR);
    CHECK(kvf_transport_progress(side->transport, NULL) == KVF_OK);
}

/* The same until the peer is lost, woken by the transport only. */
void progress_until_lost(process *side) {
    struct pollfd wake = {.fd = kvf_transport_event_fd(side->transport), .events = POLLIN};
    while (side->lost == 0) {
        CHECK(poll(&wake, 1, -1) > 0 || errno == EINTR);
        CHECK(kvf_transport_progress(side->transport, NULL) == KVF_OK);
    }
}

void serve_until_told(process *side) {
    while (!heard(side))
        progress(side);
}

void serving_target(process *side) {
    open_side(side, 0, 1);
    send_card(side);
    serve_until_told(side);
    close_side(side);
}

void sleeping_target(process *side) {
    open_side(side, 0, 1);
    send_card(side);
    serve_until_told(side);
    say(side, 's');
    hear(side, 'w'); /* to the transport, this process is asleep */
    CHECK(is_exact(side, NULL, 0, true, 0, 1));
    close_side(side);
}

void submit(process *side, kvf_direction direction, const kvf_run *runs, size_t count,
            kvf_operation *operation) {
    CHECK(kvf_transport_submit(side->peer, direction, runs, count, on_done, side, operation) == KVF_OK);
}

void await_end(process *side, unsigned ends) {
    while (side->ends < ends)
        progress(side);
}

void notify(process *side, uint32_t number, size_t bytes) {
    unsigned char data[4096];
    memcpy(data, &number, sizeof number);
    for (size_t i = sizeof number; i < bytes; i++)
        data[i] = side_byte(number, 0, i);
    kvf_status status;
    while ((status = kvf_transport_notify(side->peer, data, bytes)) == KVF_E_AGAIN)
        progress(side);
    CHECK(status == KVF_OK);
}

#ifndef TCP_RTO_MAX_MS /* since Linux 6.15 */
#define TCP_RTO_MAX_MS 44
#endif

/* -1: the kernel does not know the option. */
static int tcp_option(int fd, int option) {
    int value = 0;
    socklen_t bytes = sizeof value;
    return getsockopt(fd, IPPROTO_TCP, option, &value, &bytes) ? -1 : value;
}

/* Counts the TCP connections of this process, which are the fabric's, that try for a minute, and, if the kernel can do
 * that, send again each second. */
static uint32_t trying_often(bool can) {
    uint32_t count = 0;
    for (int fd = 0; fd < 256; fd++) {
        struct tcp_info info;
        socklen_t bytes = sizeof info;
        const bool made =
            getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 && info.tcpi_state == TCP_ESTABLISHED;
        count += made && tcp_option(fd, TCP_USER_TIMEOUT) == 60000 &&
                 (!can || tcp_option(fd, TCP_RTO_MAX_MS) == 1000);
    }
    return count;
}

void trying_actor(process *side) {
    const kvf_run run = {.bytes = 4096};
    const int one = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool can = tcp_option(one, TCP_RTO_MAX_MS) > 0;
    (void)close(one);
    open_side(side, 0, 2);
    CHECK(trying_often(can) == 0);
    connect_side(side);
    for (unsigned ends = 1; trying_often(can) == 0; ends++) {
        submit(side, KVF_READ, &run, 1, NULL);
        await_end(side, ends);
        CHECK(side->ended == KVF_OK);
    }
    say(side, 'x');
    close_side(side);
}

void silent(process *side, void (*act)(process *)) {
    int lines[2];
    CHECK(pipe(lines) == 0);
    int kept = dup(2), kept_out = dup(1);
    CHECK(dup2(lines[1], 2) == 2 && dup2(lines[1], 1) == 1);
    act(side);
    (void)fflush(NULL);
    CHECK(dup2(kept, 2) == 2 && dup2(kept_out, 1) == 1);
    (void)close(lines[1]);
    char text[256];
    ssize_t said = read(lines[0], text, sizeof text - 1);
    if (said > 0) {
        text[said] = '\0';
        (void)fprintf(stderr, "%s", text);
    }
    CHECK(said == 0);
}
