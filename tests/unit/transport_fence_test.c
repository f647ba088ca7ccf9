/* Owners that shut writers out: nothing is written any more once the owner is told that a writer is shut out. */
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "transport/front.h"
#include "transport_pair.h"
#include "transport_ways.h"

#define OWNER_SEED 1u
#define WRITER_SEED 2u
#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

static const kvf_run whole[] = {{0, 0, 5u << 20, 0, 0}, {0, 0, 70001, 1, 1}};

static kvf_status fence(const test_side *owner, const test_side *writer) {
    const void *card;
    size_t bytes;
    assert_int_equal(kvf_transport_export(writer->transport, &card, &bytes), KVF_OK);
    return kvf_transport_fence(owner->transport, card, bytes);
}

static kvf_status admit(const test_side *owner, const test_side *writer) {
    const void *card;
    size_t bytes;
    assert_int_equal(kvf_transport_export(writer->transport, &card, &bytes), KVF_OK);
    return kvf_transport_admit(owner->transport, card, bytes);
}

/* A copy of a side's memory. */
typedef struct picture {
    unsigned char *regions[SIDE_REGIONS];
} picture;

static picture take_picture(const test_side *side) {
    picture taken;
    for (uint32_t i = 0; i < SIDE_REGIONS; i++) {
        taken.regions[i] = malloc(side->regions[i].bytes);
        assert_non_null(taken.regions[i]);
        memcpy(taken.regions[i], side_memory(side, i), side->regions[i].bytes);
    }
    return taken;
}

/* Asserts that the memory is still the same; frees the picture. */
static void assert_as_pictured(const test_side *side, const picture *taken) {
    for (uint32_t i = 0; i < SIDE_REGIONS; i++) {
        if (memcmp(taken->regions[i], side_memory(side, i), side->regions[i].bytes) != 0)
            fail_msg("region %u was written", i);
        free(taken->regions[i]);
    }
}

/* ---- in one process -------------------------------------------------------------------------- */

static const pair_kind kinds[] = {
    {"inproc", {false, false}, "inproc", {0}},
    {"shm", {true, true}, "shm", {0}},
    {"shm", {false, false}, "shm", {0}},
    {"shm", {true, false}, "shm", {"shm.direct", "off"}},
    {"shm", {false, false}, "shm", {"shm.direct", "off"}},
#ifdef KVF_HAVE_MESSAGES
    {"messages", {false, false}, "messages", {"messages.listen", "tcp://127.0.0.1:*"}},
#endif
};

typedef struct both {
    test_side owner, writer;
    kvf_peer *peer; /* the owner, as the writer's peer */
} both;

static both *both_open(const pair_kind *kind) {
    both *b = calloc(1, sizeof *b);
    assert_non_null(b);
    side_open(&b->owner, kind, OWNER_SEED);
    side_open(&b->writer, kind, WRITER_SEED);
    b->peer = side_connect(&b->writer, &b->owner);
    return b;
}

static void both_close(both *b) {
    side_close(&b->writer);
    side_close(&b->owner);
    free(b);
}

/* Writes everything, and returns how that ended; the writer may be shut out. */
static kvf_status write_all(both *b, kvf_peer *peer) {
    return move_runs(&b->writer, &b->owner, peer, KVF_WRITE, whole, COUNT_OF(whole));
}

static void a_writer_that_is_shut_out_writes_nothing_more(void **state) {
    for (int steps = 0; steps < 6; steps++) {
        both *b = both_open(*state);
        kvf_run first = {0, 0, 100, 1, 1};
        assert_int_equal(move_runs(&b->writer, &b->owner, b->peer, KVF_WRITE, &first, 1), KVF_OK);
        test_outcome outcome = {0};
        assert_int_equal(
            kvf_transport_submit(b->peer, KVF_WRITE, whole, COUNT_OF(whole), note_outcome, &outcome, NULL),
            KVF_OK);
        for (int i = 0; i < steps; i++)
            assert_int_equal(kvf_transport_progress(i % 2 ? b->owner.transport : b->writer.transport, NULL),
                             KVF_OK);
        assert_int_equal(fence(&b->owner, &b->writer), KVF_OK);
        picture then = take_picture(&b->owner);
        drive(&b->writer, &b->owner, &b->writer.lost, 1);
        assert_int_equal(outcome.calls, 1);
        assert_string_equal(b->writer.lost_detail[0] ? strstr(b->writer.lost_detail, "shut") : "",
                            "shut this endpoint out");
        /* If the owner helps, everything may have been written before, and the answer may be on its way. */
        if (outcome.status != KVF_OK)
            assert_int_equal(outcome.status, KVF_E_PEER_LOST);
        else
            assert_memory_equal(then.regions[0], side_memory(&b->writer, 0), 5u << 20);
        assert_true(outcome.status != KVF_OK || steps > 0);
        assert_int_equal(kvf_transport_submit(b->peer, KVF_WRITE, whole, 1, note_outcome, &outcome, NULL),
                         KVF_E_PEER_LOST);
        drive_idle(&b->writer, &b->owner);
        assert_as_pictured(&b->owner, &then);
        both_close(b);
    }
}

/* The writer has connected, but the owner has not accepted the connection yet. */
static void a_writer_that_was_not_let_in_yet_stays_out(void **state) {
    both *b = both_open(*state);
    test_outcome outcome = {0};
    assert_int_equal(
        kvf_transport_submit(b->peer, KVF_WRITE, whole, COUNT_OF(whole), note_outcome, &outcome, NULL),
        KVF_OK);
    assert_int_equal(fence(&b->owner, &b->writer), KVF_OK);
    picture then = take_picture(&b->owner);
    drive(&b->writer, &b->owner, &outcome.calls, 1);
    assert_int_equal(outcome.status, KVF_E_PEER_LOST);
    assert_as_pictured(&b->owner, &then);
    both_close(b);
}

static void a_writer_that_is_shut_out_is_not_heard(void **state) {
    both *b = both_open(*state);
    const uint32_t word = 1;
    assert_int_equal(kvf_transport_notify(b->peer, &word, sizeof word), KVF_OK);
    drive(&b->writer, &b->owner, &b->owner.notices, 1);
    assert_int_equal(fence(&b->owner, &b->writer), KVF_OK);
    (void)kvf_transport_notify(b->peer, &word, sizeof word);
    drive(&b->writer, &b->owner, &b->writer.lost, 1);
    drive_idle(&b->writer, &b->owner);
    assert_int_equal(kvf_transport_notify(b->peer, &word, sizeof word), KVF_E_PEER_LOST);
    assert_int_equal(b->owner.notices, 1);
    both_close(b);
}

/* Connecting is refused at once, or the next write fails. */
static void assert_cannot_write(both *b) {
    const void *card;
    size_t bytes;
    kvf_peer *peer = NULL;
    assert_int_equal(kvf_transport_export(b->owner.transport, &card, &bytes), KVF_OK);
    kvf_status status = kvf_transport_connect(b->writer.transport, card, bytes, &peer);
    if (!status)
        status = write_all(b, peer);
    assert_int_equal(status, KVF_E_PEER_LOST);
    kvf_peer_close(peer);
}

static void a_writer_that_is_shut_out_cannot_connect_until_it_is_admitted(void **state) {
    both *b = both_open(*state);
    kvf_run first = {0, 0, 100, 1, 1};
    assert_int_equal(move_runs(&b->writer, &b->owner, b->peer, KVF_WRITE, &first, 1), KVF_OK);
    assert_int_equal(fence(&b->owner, &b->writer), KVF_OK);
    assert_int_equal(fence(&b->owner, &b->writer), KVF_OK);
    picture then = take_picture(&b->owner);
    assert_cannot_write(b);
    assert_cannot_write(b);
    assert_as_pictured(&b->owner, &then);
    assert_int_equal(admit(&b->owner, &b->writer), KVF_OK);
    assert_int_equal(admit(&b->owner, &b->writer), KVF_OK);
    kvf_peer *again = side_connect(&b->writer, &b->owner);
    assert_int_equal(write_all(b, again), KVF_OK);
    assert_memory_equal(side_memory(&b->owner, 0), side_memory(&b->writer, 0), 5u << 20);
    assert_int_equal(fence(&b->owner, &b->writer), KVF_OK);
    assert_cannot_write(b);
    both_close(b);
}

/* As one is that does not serve memory which was registered later. */
static void a_writer_by_a_fabric_that_is_disabled_now_is_shut_out(void **state) {
    both *b = both_open(*state);
    assert_int_equal(write_all(b, b->peer), KVF_OK);
    for (uint32_t i = 0; i < b->owner.transport->fabric_count; i++)
        b->owner.transport->fabrics[i].disabled = true;
    assert_int_equal(fence(&b->owner, &b->writer), KVF_OK);
    picture then = take_picture(&b->owner);
    assert_int_equal(write_all(b, b->peer), KVF_E_PEER_LOST);
    assert_as_pictured(&b->owner, &then);
    both_close(b);
}

static void a_connection_from_before_stays_shut_when_its_writer_is_admitted(void **state) {
    both *b = both_open(*state);
    kvf_run first = {0, 0, 100, 1, 1};
    assert_int_equal(move_runs(&b->writer, &b->owner, b->peer, KVF_WRITE, &first, 1), KVF_OK);
    test_outcome outcome = {0};
    assert_int_equal(
        kvf_transport_submit(b->peer, KVF_WRITE, whole, COUNT_OF(whole), note_outcome, &outcome, NULL),
        KVF_OK);
    assert_int_equal(fence(&b->owner, &b->writer), KVF_OK);
    assert_int_equal(admit(&b->owner, &b->writer), KVF_OK);
    picture then = take_picture(&b->owner);
    drive(&b->writer, &b->owner, &outcome.calls, 1);
    assert_int_equal(outcome.status, KVF_E_PEER_LOST);
    assert_as_pictured(&b->owner, &then);
    both_close(b);
}

/* The writer is killed, or stopped for good, before the owner has read any of what it sent. */
static void writes_sent_before_the_fence_are_not_made_once_their_writer_is_admitted(void **state) {
    both *b = both_open(*state);
    test_outcome outcome = {0};
    assert_int_equal(
        kvf_transport_submit(b->peer, KVF_WRITE, whole, COUNT_OF(whole), note_outcome, &outcome, NULL),
        KVF_OK);
    for (int i = 0; i < 10; i++) {
        struct pollfd fd = {kvf_transport_event_fd(b->writer.transport), POLLIN, 0};
        (void)poll(&fd, 1, 10);
        assert_int_equal(kvf_transport_progress(b->writer.transport, NULL), KVF_OK);
    }
    assert_int_equal(fence(&b->owner, &b->writer), KVF_OK);
    assert_int_equal(admit(&b->owner, &b->writer), KVF_OK);
    picture then = take_picture(&b->owner);
    for (int i = 0; i < 10; i++) {
        struct pollfd fd = {kvf_transport_event_fd(b->owner.transport), POLLIN, 0};
        (void)poll(&fd, 1, 10);
        assert_int_equal(kvf_transport_progress(b->owner.transport, NULL), KVF_OK);
    }
    assert_as_pictured(&b->owner, &then);
    both_close(b);
}

static void other_writers_go_on(void **state) {
    both *b = both_open(*state);
    test_side other;
    side_open(&other, *state, 3);
    kvf_peer *peer = side_connect(&other, &b->owner);
    kvf_run first = {0, 0, 100, 1, 1};
    assert_int_equal(move_runs(&b->writer, &b->owner, b->peer, KVF_WRITE, &first, 1), KVF_OK);
    assert_int_equal(move_runs(&other, &b->owner, peer, KVF_WRITE, &first, 1), KVF_OK);
    assert_int_equal(fence(&b->owner, &b->writer), KVF_OK);
    assert_int_equal(move_runs(&other, &b->owner, peer, KVF_WRITE, whole, COUNT_OF(whole)), KVF_OK);
    assert_memory_equal(side_memory(&b->owner, 0), side_memory(&other, 0), 5u << 20);
    assert_int_equal(other.lost, 0);
    side_close(&other);
    both_close(b);
}

static void a_writer_that_has_gone_is_out(void **state) {
    both *b = both_open(*state);
    kvf_run first = {0, 0, 100, 1, 1};
    assert_int_equal(move_runs(&b->writer, &b->owner, b->peer, KVF_WRITE, &first, 1), KVF_OK);
    const void *card;
    size_t bytes;
    assert_int_equal(kvf_transport_export(b->writer.transport, &card, &bytes), KVF_OK);
    unsigned char *kept = malloc(bytes);
    assert_non_null(kept);
    memcpy(kept, card, bytes);
    side_close(&b->writer);
    drive_idle(&b->owner, NULL);
    assert_int_equal(kvf_transport_fence(b->owner.transport, kept, bytes), KVF_OK);
    free(kept);
    both_close(b);
}

/* Writes again and again until the writer is shut out. */
static void *keep_writing(void *context) {
    both *b = context;
    test_outcome outcome = {0};
    kvf_status status;
    for (uint32_t calls = 1;; calls++) {
        status =
            kvf_transport_submit(b->peer, KVF_WRITE, whole, COUNT_OF(whole), note_outcome, &outcome, NULL);
        while (!status && outcome.calls < calls)
            (void)kvf_transport_progress(b->writer.transport, NULL);
        if (status || outcome.status)
            return (void *)(uintptr_t)(status == KVF_E_PEER_LOST || outcome.status == KVF_E_PEER_LOST);
    }
}

static void a_writer_in_another_thread_is_out(void **state) {
    for (int round = 0; round < 10; round++) {
        both *b = both_open(*state);
        kvf_run first = {0, 0, 100, 1, 1};
        assert_int_equal(move_runs(&b->writer, &b->owner, b->peer, KVF_WRITE, &first, 1), KVF_OK);
        const void *card;
        size_t bytes;
        assert_int_equal(kvf_transport_export(b->writer.transport, &card, &bytes), KVF_OK);
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, keep_writing, b), 0);
        for (int i = 0; i < 100 * round; i++)
            (void)kvf_transport_progress(b->owner.transport, NULL);
        kvf_status status;
        while ((status = kvf_transport_fence(b->owner.transport, card, bytes)) == KVF_E_AGAIN)
            (void)kvf_transport_progress(b->owner.transport, NULL);
        assert_int_equal(status, KVF_OK);
        for (uint32_t i = 0; i < SIDE_REGIONS; i++)
            memset(side_memory(&b->owner, i), 0x55, b->owner.regions[i].bytes);
        picture then = take_picture(&b->owner);
        assert_int_equal(kvf_transport_progress(b->owner.transport, NULL), KVF_OK);
        void *lost = NULL;
        assert_int_equal(pthread_join(thread, &lost), 0);
        assert_non_null(lost);
        assert_as_pictured(&b->owner, &then);
        both_close(b);
    }
}

static void bytes_that_are_no_card_are_refused(void **state) {
    both *b = both_open(*state);
    assert_int_equal(kvf_transport_fence(NULL, "x", 1), KVF_E_INVALID);
    assert_int_equal(kvf_transport_fence(b->owner.transport, NULL, 1), KVF_E_INVALID);
    assert_int_equal(kvf_transport_fence(b->owner.transport, "x", 1), KVF_E_PARSE);
    assert_int_equal(kvf_transport_admit(NULL, "x", 1), KVF_E_INVALID);
    assert_int_equal(kvf_transport_admit(b->owner.transport, "x", 1), KVF_E_PARSE);
    both_close(b);
}

/* ---- stopped in the middle ------------------------------------------------------------------- */

#define BYTES (2u << 20)

static unsigned char *guarded; /* BYTES bytes; the process that reads them is stopped in the middle, once */

static void stop_here(int number) {
    (void)number;
    (void)mprotect(guarded, BYTES, PROT_READ | PROT_WRITE);
    (void)raise(SIGSTOP);
}

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            (void)fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, kvf_error_detail());   \
            _exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)

static void hear(int line, char word) {
    char heard = 0;
    CHECK(recv(line, &heard, 1, 0) == 1);
    CHECK(heard == word);
}

static kvf_status child_write(kvf_transport *transport, kvf_peer *peer) {
    static const kvf_run run = {0, 0, BYTES, 0, 0};
    test_outcome outcome = {0};
    kvf_status status = kvf_transport_submit(peer, KVF_WRITE, &run, 1, note_outcome, &outcome, NULL);
    if (status)
        return status;
    while (outcome.calls == 0) {
        struct pollfd fd = {kvf_transport_event_fd(transport), POLLIN, 0};
        CHECK(poll(&fd, 1, 60000) > 0);
        CHECK(kvf_transport_progress(transport, NULL) == KVF_OK);
    }
    return outcome.status;
}

/* Forks a child that keeps the writer's sockets until the owner closes the line. */
static void leave_a_child(int line) {
    char word;
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child > 0)
        return;
    (void)recv(line, &word, 1, 0);
    _exit(0);
}

static void be_the_writer(int line, bool has_child) {
    unsigned char theirs[4096];
    kvf_transport *transport = NULL;
    kvf_peer *peer = NULL;
    const void *card;
    size_t bytes;
    (void)alarm(120);
    guarded = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(guarded != MAP_FAILED);
    memset(guarded, 0xc1, BYTES);
    kvf_memory region = {.struct_size = sizeof(kvf_memory), .address = guarded, .bytes = BYTES};
    CHECK(kvf_transport_open("shm", NULL, &transport) == KVF_OK);
    CHECK(kvf_transport_register(transport, &region, 1) == KVF_OK);
    CHECK(kvf_transport_export(transport, &card, &bytes) == KVF_OK);
    CHECK(send(line, card, bytes, 0) == (ssize_t)bytes);
    ssize_t got = recv(line, theirs, sizeof theirs, 0);
    CHECK(got > 0);
    CHECK(kvf_transport_connect(transport, theirs, (size_t)got, &peer) == KVF_OK);
    CHECK(child_write(transport, peer) == KVF_OK);
    if (has_child)
        leave_a_child(line);

    memset(guarded, 0xd2, BYTES);
    struct sigaction action = {.sa_handler = stop_here};
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    CHECK(mprotect(guarded + BYTES / 2, BYTES / 2, PROT_NONE) == 0);
    (void)child_write(transport, peer); /* stops in the middle; how the call ends is not defined */

    hear(line, 'g');
    memset(guarded, 0xe3, BYTES);
    CHECK(child_write(transport, peer) == KVF_E_PEER_LOST);
    kvf_peer_close(peer);
    CHECK(kvf_transport_connect(transport, theirs, (size_t)got, &peer) == KVF_OK);
    CHECK(child_write(transport, peer) == KVF_E_PEER_LOST);
    kvf_peer_close(peer);
    CHECK(send(line, "d", 1, 0) == 1);

    hear(line, 'g');
    CHECK(kvf_transport_connect(transport, theirs, (size_t)got, &peer) == KVF_OK);
    CHECK(child_write(transport, peer) == KVF_OK);
    CHECK(send(line, "d", 1, 0) == 1);
    kvf_transport_close(transport);
    _exit(0);
}

/* The owner's side of the test. */
typedef struct ownership {
    pid_t writer;
    int line;
    kvf_transport *transport;
    unsigned char *memory;
    unsigned char card[4096]; /* the writer's card */
    size_t card_bytes;
} ownership;

static void work(const ownership *o) {
    struct pollfd fds[2] = {{kvf_transport_event_fd(o->transport), POLLIN, 0}, {o->line, POLLIN, 0}};
    (void)poll(fds, 2, 10);
    assert_int_equal(kvf_transport_progress(o->transport, NULL), KVF_OK);
}

/* Opens the owner, and works until the writer has stopped in the middle of its second write. */
static void own(ownership *o, bool with_child) {
    int lines[2];
    const void *card;
    size_t bytes;
    void *memory = NULL;
    *o = (ownership){0};
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, lines), 0);
    o->writer = fork();
    assert_true(o->writer >= 0);
    if (o->writer == 0) {
        (void)close(lines[0]);
        be_the_writer(lines[1], with_child);
    }
    (void)close(lines[1]);
    o->line = lines[0];
    assert_int_equal(kvf_transport_open("shm", NULL, &o->transport), KVF_OK);
    assert_int_equal(kvf_transport_allocate(o->transport, KVF_MEMORY_HOST, 0, BYTES, &memory), KVF_OK);
    o->memory = memory;
    kvf_memory region = {.struct_size = sizeof(kvf_memory), .address = memory, .bytes = BYTES};
    assert_int_equal(kvf_transport_register(o->transport, &region, 1), KVF_OK);
    assert_int_equal(kvf_transport_export(o->transport, &card, &bytes), KVF_OK);
    assert_int_equal(send(o->line, card, bytes, 0), bytes);
    ssize_t got = recv(o->line, o->card, sizeof o->card, 0);
    assert_true(got > 0);
    o->card_bytes = (size_t)got;
    for (int status = 0; waitpid(o->writer, &status, WUNTRACED | WNOHANG) == 0;)
        work(o);
    assert_int_equal(o->memory[0], 0xd2);
    assert_int_equal(o->memory[BYTES - 1], 0xc1); /* it stopped in the middle */
    for (int i = 0; i < 3; i++) {
        char who[96];
        assert_int_equal(kvf_transport_fence(o->transport, o->card, o->card_bytes), KVF_E_AGAIN);
        (void)snprintf(who, sizeof who, "(process %ld) has been in the middle of a write", (long)o->writer);
        assert_non_null(strstr(kvf_error_detail(), who));
        work(o);
        kvf_transport_info info = {.struct_size = sizeof info};
        assert_int_equal(kvf_transport_get_info(o->transport, &info), KVF_OK);
        assert_int_equal(info.stuck, 1);
    }
}

static void await_fence(const ownership *o) {
    kvf_status status;
    while ((status = kvf_transport_fence(o->transport, o->card, o->card_bytes)) == KVF_E_AGAIN)
        work(o);
    assert_int_equal(status, KVF_OK);
}

/* Works until the writer reports that it is done. */
static void await_done(const ownership *o) {
    char word = 0;
    while (recv(o->line, &word, 1, MSG_DONTWAIT) != 1)
        work(o);
    assert_int_equal(word, 'd');
}

static void disown(const ownership *o) {
    kvf_transport_close(o->transport);
    (void)close(o->line);
}

static void a_writer_stopped_in_the_middle_is_out_once_it_has_gone_on(void **state) {
    (void)state;
    ownership o;
    own(&o, false);
    assert_int_equal(kill(o.writer, SIGCONT), 0);
    await_fence(&o);
    memset(o.memory, 0x77, BYTES); /* the memory is the owner's alone again */
    assert_int_equal(send(o.line, "g", 1, 0), 1);
    await_done(&o);
    for (uint32_t i = 0; i < BYTES; i++)
        assert_int_equal(o.memory[i], 0x77);
    assert_int_equal(kvf_transport_admit(o.transport, o.card, o.card_bytes), KVF_OK);
    assert_int_equal(send(o.line, "g", 1, 0), 1);
    await_done(&o);
    assert_int_equal(o.memory[0], 0xe3);
    assert_int_equal(o.memory[BYTES - 1], 0xe3);
    int status = 0;
    assert_int_equal(waitpid(o.writer, &status, 0), o.writer);
    assert_int_equal(status, 0);
    disown(&o);
}

static void a_writer_killed_in_the_middle_is_out(void **state) {
    (void)state;
    ownership o;
    own(&o, false);
    assert_int_equal(kill(o.writer, SIGKILL), 0);
    await_fence(&o);
    int status = 0;
    assert_int_equal(waitpid(o.writer, &status, 0), o.writer);
    assert_true(WIFSIGNALED(status));
    disown(&o);
}

static void a_writer_killed_in_the_middle_whose_child_keeps_its_sockets_is_out(void **state) {
    (void)state;
    ownership o;
    own(&o, true);
    assert_int_equal(kill(o.writer, SIGKILL), 0);
    await_fence(&o);
    int status = 0;
    assert_int_equal(waitpid(o.writer, &status, 0), o.writer);
    kvf_transport_info info = {.struct_size = sizeof info, .stuck = 1};
    assert_int_equal(kvf_transport_progress(o.transport, NULL), KVF_OK);
    assert_int_equal(kvf_transport_get_info(o.transport, &info), KVF_OK);
    assert_int_equal(info.stuck, 0);
    disown(&o);
}

static void an_owner_may_close_while_a_writer_is_stopped_in_the_middle(void **state) {
    (void)state;
    ownership o;
    own(&o, false);
    disown(&o);
    assert_int_equal(kill(o.writer, SIGKILL), 0);
    int status = 0;
    assert_int_equal(waitpid(o.writer, &status, 0), o.writer);
}

static void *let_go_on(void *writer) {
    (void)poll(NULL, 0, 50);
    assert_int_equal(kill(*(const pid_t *)writer, SIGCONT), 0);
    return NULL;
}

/* Its memory may be used for something else when it has closed, without unregistering. */
static void an_owner_that_closes_waits_for_a_writer_in_the_middle(void **state) {
    (void)state;
    ownership o;
    pthread_t other;
    own(&o, false);
    const uint64_t begun = kvf_now(&kvf_monotonic);
    assert_int_equal(pthread_create(&other, NULL, let_go_on, &o.writer), 0);
    kvf_transport_close(o.transport);
    const uint64_t taken = kvf_now(&kvf_monotonic) - begun;
    assert_int_equal(pthread_join(other, NULL), 0);
    assert_int_equal(kill(o.writer, SIGKILL), 0);
    int status = 0;
    assert_int_equal(waitpid(o.writer, &status, 0), o.writer);
    (void)close(o.line);
    assert_in_range(taken, 50 * KVF_MILLISECOND, 900 * KVF_MILLISECOND);
}

/* ---- other ways ------------------------------------------------------------------------------ */

static void a_writer_with_other_ways_to_write_cannot_be_fenced(void **state) {
    (void)state;
    static const pair_kind ucx = {"ucx", {true, true}, "ucx", {0}};
    for (uint32_t i = 0; strcmp(kvf_transport_kind_name(i), "ucx") != 0; i++)
        if (!kvf_transport_kind_name(i + 1))
            skip();
    both *b = calloc(1, sizeof *b);
    assert_non_null(b);
    side_open(&b->owner, &ucx, OWNER_SEED);
    side_open(&b->writer, &ucx, WRITER_SEED);
    assert_int_equal(fence(&b->owner, &b->writer), KVF_E_UNSUPPORTED);
    both_close(b);
}

static void a_writer_with_several_ways_is_fenced_in_the_one_it_took(void **state) {
    (void)state;
    static const pair_kind automatic = {"auto", {true, true}, "inproc", {0}};
    both *b = both_open(&automatic);
    kvf_run first = {0, 0, 100, 1, 1};
    assert_int_equal(move_runs(&b->writer, &b->owner, b->peer, KVF_WRITE, &first, 1), KVF_OK);
    assert_int_equal(fence(&b->owner, &b->writer), KVF_OK);
    assert_cannot_write(b);
    both_close(b);
}

int main(void) {
    static const way_test tests[] = {
        NAMED(a_writer_that_is_shut_out_writes_nothing_more),
        NAMED(a_writer_that_was_not_let_in_yet_stays_out),
        NAMED(a_writer_that_is_shut_out_is_not_heard),
        NAMED(a_writer_by_a_fabric_that_is_disabled_now_is_shut_out),
        NAMED(a_writer_that_is_shut_out_cannot_connect_until_it_is_admitted),
        NAMED(a_connection_from_before_stays_shut_when_its_writer_is_admitted),
        NAMED(writes_sent_before_the_fence_are_not_made_once_their_writer_is_admitted),
        NAMED(other_writers_go_on),
        NAMED(a_writer_that_has_gone_is_out),
        NAMED(a_writer_in_another_thread_is_out),
        NAMED(bytes_that_are_no_card_are_refused),
    };
    const struct CMUnitTest more[] = {
        cmocka_unit_test(a_writer_stopped_in_the_middle_is_out_once_it_has_gone_on),
        cmocka_unit_test(a_writer_killed_in_the_middle_is_out),
        cmocka_unit_test(a_writer_killed_in_the_middle_whose_child_keeps_its_sockets_is_out),
        cmocka_unit_test(an_owner_may_close_while_a_writer_is_stopped_in_the_middle),
        cmocka_unit_test(an_owner_that_closes_waits_for_a_writer_in_the_middle),
        cmocka_unit_test(a_writer_with_other_ways_to_write_cannot_be_fenced),
        cmocka_unit_test(a_writer_with_several_ways_is_fenced_in_the_one_it_took),
    };
    test_way ways[MAX_WAYS];
    return run_every_way("transport_fence", tests, COUNT_OF(tests), ways,
                         ways_of_pairs(kinds, COUNT_OF(kinds), ways), more, COUNT_OF(more));
}
