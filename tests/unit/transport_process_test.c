/*
 * The same-host transport between real processes: moving bytes, and processes that die in the middle.
 *
 * Children serve until their pipe is closed and then end by themselves.
 */
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "transport_pair.h"
#include "transport_ways.h"

#define RUNS_MAX 4096
#define BIG (5u << 20)
#define CANNOT 77     /* the status of a child that may not do what the test needs */
#ifndef CLONE_NEWTIME /* since Linux 5.6 */
#define CLONE_NEWTIME 0x00000080
#endif

static const pair_kind kinds[] = {
    {"shm", {true, true}, "shm", {0}},
    {"shm", {false, false}, "shm", {0}},
    {"shm", {false, false}, "shm", {"shm.direct", "off"}},
    {"shm", {true, false}, "shm", {0}},
    {"shm", {true, false}, "shm", {"shm.direct", "off"}},
    {"auto", {true, false}, "shm", {0}},
};

typedef struct test_child {
    pid_t pid;
    int control; /* when the test closes it, the child ends */
    int answers;
    unsigned char card[65536];
    size_t card_bytes;
} test_child;

#define FORK UINT32_MAX        /* a notification: fork a child that keeps the receiver's sockets open */
#define CLOSE (UINT32_MAX - 1) /* another: close the endpoint, and live on */

static int child_answers, child_control;
static bool child_closes;

/* The grandchild ends with the control pipe. */
static void have_a_child(void) {
    char byte;
    if (fork() != 0)
        return;
    (void)!read(child_control, &byte, 1);
    _exit(0);
}

/* Answers with the byte at the offset that the notification names. */
static void answer_with_byte(test_side *side) {
    uint32_t value = side->notice_values[side->notices - 1];
    if (value == FORK)
        have_a_child();
    child_closes = value == CLOSE;
    unsigned char byte = value >= CLOSE ? 0 : side_memory(side, 0)[value];
    if (!child_closes)
        (void)!write(child_answers, &byte, 1);
}

static void serve_until_closed(test_side *side, int control) {
    struct pollfd fds[2] = {{kvf_transport_event_fd(side->transport), POLLIN, 0}, {control, POLLIN, 0}};
    while (!child_closes && poll(fds, 2, 60000) > 0 && !fds[1].revents)
        if (kvf_transport_progress(side->transport, NULL) != KVF_OK)
            _exit(1);
}

static void be_owner(const pair_kind *kind, uint32_t seed, int control, int answers) {
    test_side side;
    const void *card;
    size_t bytes;
    child_answers = answers;
    child_control = control;
    side_open(&side, kind, seed);
    side.on_notice = answer_with_byte;
    if (kvf_transport_export(side.transport, &card, &bytes) != KVF_OK)
        _exit(1);
    if (write(answers, &bytes, sizeof bytes) != sizeof bytes || write(answers, card, bytes) != (ssize_t)bytes)
        _exit(1);
    serve_until_closed(&side, control);
    side_close(&side);
    if (child_closes)
        (void)!write(answers, "", 1);
    (void)poll(&(struct pollfd){control, POLLIN, 0}, 1, 60000);
    _exit(0);
}

static void read_all(int fd, void *to, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t got = read(fd, (char *)to + done, bytes - done);
        assert_true(got > 0);
        done += (size_t)got;
    }
}

static test_child *child_start(const pair_kind *kind, uint32_t seed) {
    int down[2], up[2];
    test_child *made = calloc(1, sizeof *made);
    assert_non_null(made);
    assert_int_equal(pipe2(down, O_CLOEXEC), 0);
    assert_int_equal(pipe2(up, O_CLOEXEC), 0);
    (void)fflush(stdout);
    made->pid = fork();
    assert_true(made->pid >= 0);
    if (made->pid == 0) {
        (void)close(down[1]);
        (void)close(up[0]);
        be_owner(kind, seed, down[0], up[1]);
    }
    (void)close(down[0]);
    (void)close(up[1]);
    made->control = down[1];
    made->answers = up[0];
    read_all(made->answers, &made->card_bytes, sizeof made->card_bytes);
    assert_true(made->card_bytes <= sizeof made->card);
    read_all(made->answers, made->card, made->card_bytes);
    return made;
}

static void child_end(test_child *child, bool killed) {
    int status;
    (void)close(child->control);
    assert_int_equal(waitpid(child->pid, &status, 0), child->pid);
    if (killed)
        assert_true(WIFSIGNALED(status));
    else
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    (void)close(child->answers);
    free(child);
}

static kvf_peer *child_connect(const test_side *here, const test_child *child) {
    kvf_peer *peer = NULL;
    assert_int_equal(kvf_transport_connect(here->transport, child->card, child->card_bytes, &peer), KVF_OK);
    assert_string_equal(kvf_peer_kind(peer), "shm");
    return peer;
}

/* ---- moving ---------------------------------------------------------------------------------- */

static void another_process_is_read_byte_for_byte(void **state) {
    static kvf_run runs[RUNS_MAX];
    test_child *child = child_start(*state, 2);
    for (uint64_t round = 0; round < 4; round++) {
        test_side here;
        uint64_t seed = round + 17;
        side_open(&here, *state, 1);
        kvf_peer *peer = child_connect(&here, child);
        size_t count = draw_runs(&seed, &here, &here, KVF_READ, round % 2 ? 2000 : 300000, runs, RUNS_MAX);
        assert_true(count > 10);
        assert_int_equal(move_runs(&here, NULL, peer, KVF_READ, runs, count), KVF_OK);
        uint64_t checked[SIDE_REGIONS] = {0};
        for (size_t i = 0; i < count; i++) {
            const kvf_run *run = &runs[i];
            const unsigned char *memory = side_memory(&here, run->local_region);
            for (; checked[run->local_region] < run->local_offset; checked[run->local_region]++)
                assert_int_equal(memory[checked[run->local_region]],
                                 side_byte(1, run->local_region, checked[run->local_region]));
            for (uint64_t at = 0; at < run->bytes; at++)
                assert_int_equal(memory[run->local_offset + at],
                                 side_byte(2, run->remote_region, run->remote_offset + at));
            checked[run->local_region] = run->local_offset + run->bytes;
        }
        side_close(&here);
    }
    child_end(child, false);
}

static void another_process_is_written_and_then_told(void **state) {
    test_child *child = child_start(*state, 2);
    test_side here;
    side_open(&here, *state, 1);
    kvf_peer *peer = child_connect(&here, child);
    for (uint32_t i = 0; i < 20; i++) {
        uint32_t offset = i * 5003;
        kvf_run runs[3] = {{offset, offset, 1, 0, 0}, {0, 100, 70000, 2, 2}, {7, i, 1000, 1, 1}};
        side_memory(&here, 0)[offset] = (unsigned char)(200 + i);
        assert_int_equal(move_runs(&here, NULL, peer, KVF_WRITE, runs, 3), KVF_OK);
        assert_int_equal(kvf_transport_notify(peer, &offset, sizeof offset), KVF_OK);
        unsigned char answer = 0;
        read_all(child->answers, &answer, 1);
        assert_int_equal(answer, 200 + i);
    }
    /* The written bytes are there, and no byte beside them has changed. */
    uint64_t bytes = here.regions[2].bytes;
    kvf_run back = {0, 0, bytes, 2, 2};
    unsigned char *expected = malloc(bytes);
    assert_non_null(expected);
    for (uint64_t at = 0; at < bytes; at++)
        expected[at] = at >= 100 && at < 70100 ? side_byte(1, 2, at - 100) : side_byte(2, 2, at);
    assert_int_equal(move_runs(&here, NULL, peer, KVF_READ, &back, 1), KVF_OK);
    assert_memory_equal(side_memory(&here, 2), expected, bytes);
    free(expected);
    side_close(&here);
    child_end(child, false);
}

/* ---- dying ----------------------------------------------------------------------------------- */

#define MANY 100

static void submit_many(kvf_peer *peer, const kvf_run *run, test_outcome *outcomes) {
    memset(outcomes, 0, MANY * sizeof *outcomes);
    for (int i = 0; i < MANY; i++)
        assert_int_equal(kvf_transport_submit(peer, KVF_READ, run, 1, note_outcome, &outcomes[i], NULL),
                         KVF_OK);
}

/* A batch may be complete before the process dies. Batches go two ways at once, so these need not be the first; but the
 * last batch was never begun. */
static void check_lost(const test_outcome *outcomes) {
    for (int i = 0; i < MANY; i++) {
        assert_int_equal(outcomes[i].calls, 1);
        if (outcomes[i].status)
            assert_int_equal(outcomes[i].status, KVF_E_PEER_LOST);
    }
    assert_int_equal(outcomes[MANY - 1].status, KVF_E_PEER_LOST);
}

static void a_killed_owner_is_lost_and_other_owners_are_not(void **state) {
    static test_outcome first[MANY], second[MANY];
    test_child *killed = child_start(*state, 2), *living = child_start(*state, 3);
    test_side here;
    side_open(&here, *state, 1);
    kvf_peer *peers[2] = {child_connect(&here, killed), child_connect(&here, living)};
    kvf_run big = {0, 0, BIG, 0, 0}, small = {0, 0, 50000, 1, 1};
    assert_int_equal(move_runs(&here, NULL, peers[0], KVF_READ, &small, 1), KVF_OK);
    submit_many(peers[0], &big, first);
    submit_many(peers[1], &small, second);
    drive(&here, NULL, &first[2].calls, 1);
    assert_int_equal(kill(killed->pid, SIGKILL), 0);
    /* The process must be dead before anything more is copied: a busy machine may take long to end it, and its memory
     * stays mapped here longer. */
    siginfo_t ended;
    assert_int_equal(waitid(P_PID, (id_t)killed->pid, &ended, WEXITED | WNOWAIT), 0);
    drive(&here, NULL, &here.lost, 1);
    assert_ptr_equal(here.lost_peer, peers[0]);
    check_lost(first);
    /* The detail of a failed batch names the kind, the peer and how it ended. */
    assert_non_null(strstr(first[MANY - 1].detail, "shm: reading from side 2: "));
    assert_true(strstr(first[MANY - 1].detail, "process has ended") ||
                strstr(first[MANY - 1].detail, "closed the connection"));
    assert_non_null(strstr(first[MANY - 1].detail, "of 1 runs had started"));
    drive(&here, NULL, &second[MANY - 1].calls, 1);
    for (int i = 0; i < MANY; i++)
        assert_int_equal(second[i].status, KVF_OK);
    for (uint64_t at = 0; at < small.bytes; at++)
        assert_int_equal(side_memory(&here, 1)[at], side_byte(3, 1, at));
    child_end(killed, true);
    side_close(&here);
    child_end(living, false);
    assert_int_equal(here.lost, 1);
}

static void an_owner_that_dies_without_having_answered_is_lost(void **state) {
    static test_outcome outcomes[MANY];
    test_child *child = child_start(*state, 2);
    int status;
    assert_int_equal(kill(child->pid, SIGSTOP), 0);
    assert_int_equal(waitpid(child->pid, &status, WUNTRACED), child->pid);
    test_side here;
    side_open(&here, *state, 1);
    kvf_peer *peer = child_connect(&here, child);
    kvf_run small = {0, 0, 50000, 1, 1};
    submit_many(peer, &small, outcomes);
    drive_idle(&here, NULL);
    assert_int_equal(outcomes[0].calls, 0);
    assert_int_equal(kill(child->pid, SIGKILL), 0);
    drive(&here, NULL, &here.lost, 1);
    check_lost(outcomes);
    assert_int_equal(outcomes[0].status, KVF_E_PEER_LOST);
    child_end(child, true);
    side_close(&here);
}

static void an_owner_whose_own_child_keeps_its_sockets_is_lost_all_the_same(void **state) {
    static test_outcome outcomes[MANY];
    test_child *child = child_start(*state, 2);
    test_side here;
    side_open(&here, *state, 1);
    kvf_peer *peer = child_connect(&here, child);
    kvf_run small = {0, 0, 50000, 1, 1};
    assert_int_equal(move_runs(&here, NULL, peer, KVF_READ, &small, 1), KVF_OK);
    uint32_t fork_now = FORK;
    unsigned char answer = 1;
    assert_int_equal(kvf_transport_notify(peer, &fork_now, sizeof fork_now), KVF_OK);
    read_all(child->answers, &answer, 1);
    assert_int_equal(kill(child->pid, SIGKILL), 0);
    /* Wait for the loss before anything is submitted: otherwise a slice of mapped memory could still be copied. */
    drive(&here, NULL, &here.lost, 1);
    assert_int_equal(kvf_transport_submit(peer, KVF_READ, &small, 1, note_outcome, outcomes, NULL),
                     KVF_E_PEER_LOST);
    kvf_peer_close(peer);
    child_end(child, true);
    side_close(&here);
}

/* Has the owner do something that it answers when it is done. */
static void tell_child(const test_child *child, kvf_peer *peer, uint32_t what) {
    unsigned char answer;
    assert_int_equal(kvf_transport_notify(peer, &what, sizeof what), KVF_OK);
    read_all(child->answers, &answer, 1);
}

/* Its memory may hold anything by then. A connection that it has not accepted yet ends, too. */
static void an_endpoint_that_closes_is_lost_though_a_child_keeps_its_sockets(void **state) {
    test_child *child = child_start(*state, 2);
    test_side here, there;
    kvf_run small = {0, 0, 50000, 1, 1};
    test_outcome outcome = {0};
    side_open(&here, *state, 1);
    side_open(&there, *state, 3);
    kvf_peer *peer = child_connect(&here, child);
    assert_int_equal(move_runs(&here, NULL, peer, KVF_READ, &small, 1), KVF_OK);
    tell_child(child, peer, FORK);
    assert_int_equal(kill(child->pid, SIGSTOP), 0);
    assert_int_equal(waitpid(child->pid, NULL, WUNTRACED), child->pid);
    uint32_t what = CLOSE;
    assert_int_equal(kvf_transport_notify(peer, &what, sizeof what), KVF_OK);
    (void)child_connect(&there, child);
    assert_int_equal(kill(child->pid, SIGCONT), 0);
    read_all(child->answers, &(unsigned char){0}, 1);
    assert_int_equal(kvf_transport_submit(peer, KVF_READ, &small, 1, note_outcome, &outcome, NULL), KVF_OK);
    drive(&here, NULL, &here.lost, 1);
    assert_int_equal(outcome.status, KVF_E_PEER_LOST);
    drive(&there, NULL, &there.lost, 1);
    child_end(child, false);
    side_close(&here);
    side_close(&there);
}

/* The child keeps the socket at which its parent listened. */
static void a_card_of_a_dead_process_whose_child_lives_leads_nowhere(void **state) {
    test_child *dead = child_start(*state, 2);
    test_side here;
    kvf_peer *peer;
    side_open(&here, *state, 1);
    tell_child(dead, child_connect(&here, dead), FORK);
    assert_int_equal(kill(dead->pid, SIGKILL), 0);
    drive(&here, NULL, &here.lost, 1);
    assert_int_equal(waitpid(dead->pid, NULL, 0), dead->pid);
    assert_int_equal(kvf_transport_connect(here.transport, dead->card, dead->card_bytes, &peer),
                     KVF_E_PEER_LOST);
    side_close(&here);
    (void)close(dead->control);
    (void)close(dead->answers);
    free(dead);
}

static void a_card_of_a_dead_process_leads_nowhere(void **state) {
    test_child *dead = child_start(*state, 2);
    test_child copy = *dead;
    assert_int_equal(kill(dead->pid, SIGKILL), 0);
    child_end(dead, true);
    test_side here;
    side_open(&here, *state, 1);
    kvf_peer *peer = NULL;
    kvf_status status = kvf_transport_connect(here.transport, copy.card, copy.card_bytes, &peer);
    assert_int_equal(status, KVF_E_PEER_LOST);
    side_close(&here);
}

/* A consumer that reads the same run again and again. */
static void be_consumer(const pair_kind *kind, const void *card, size_t bytes, int started, bool forever) {
    test_side side;
    kvf_peer *peer = NULL;
    kvf_run big = {0, 0, BIG, 0, 0};
    side_open(&side, kind, 4);
    if (kvf_transport_connect(side.transport, card, bytes, &peer) != KVF_OK)
        _exit(1);
    for (int i = 0; forever || i < 3; i++) {
        if (move_runs(&side, NULL, peer, KVF_READ, &big, 1) != KVF_OK)
            _exit(1);
        (void)!write(started, &i, 1);
    }
    for (uint64_t at = 0; at < BIG; at += 13)
        if (side_memory(&side, 0)[at] != side_byte(2, 0, at))
            _exit(1);
    side_close(&side);
    _exit(0);
}

static pid_t consumer_start(const pair_kind *kind, const test_side *owner, int *started, bool forever) {
    const void *card;
    size_t bytes;
    int ends[2];
    assert_int_equal(kvf_transport_export(owner->transport, &card, &bytes), KVF_OK);
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    (void)fflush(stdout);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        be_consumer(kind, card, bytes, ends[1], forever);
    (void)close(ends[1]);
    *started = ends[0];
    return pid;
}

/* Serves until the consumer has written something, or has ended. */
static void serve_until_readable(test_side *owner, int fd) {
    for (;;) {
        struct pollfd fds[2] = {{kvf_transport_event_fd(owner->transport), POLLIN, 0}, {fd, POLLIN, 0}};
        assert_true(poll(fds, 2, 60000) > 0);
        if (fds[1].revents)
            return;
        assert_int_equal(kvf_transport_progress(owner->transport, NULL), KVF_OK);
    }
}

static void a_killed_consumer_leaves_its_owner_serving_others(void **state) {
    test_side owner;
    int started, status;
    side_open(&owner, *state, 2);
    pid_t killed = consumer_start(*state, &owner, &started, true);
    serve_until_readable(&owner, started);
    assert_int_equal(kill(killed, SIGKILL), 0);
    assert_int_equal(waitpid(killed, &status, 0), killed);
    assert_true(WIFSIGNALED(status));
    drive_idle(&owner, NULL);
    (void)close(started);
    pid_t other = consumer_start(*state, &owner, &started, false);
    for (char byte;;) {
        serve_until_readable(&owner, started);
        if (read(started, &byte, 1) <= 0)
            break;
    }
    assert_int_equal(waitpid(other, &status, 0), other);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    (void)close(started);
    side_close(&owner);
}

/* ---- who may --------------------------------------------------------------------------------- */

/* Before the owner can refuse: "auto" then goes on to the next kind of transport. */
static void the_memory_of_another_users_process_is_passed_over(void **state) {
    test_side owner;
    int status;
    if (geteuid() != 0)
        skip();
    side_open(&owner, *state, 2);
    const void *card;
    size_t bytes;
    assert_int_equal(kvf_transport_export(owner.transport, &card, &bytes), KVF_OK);
    (void)fflush(stdout);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        test_side side;
        kvf_peer *peer = NULL;
        if (setgid(65534) != 0 || setuid(65534) != 0)
            _exit(2);
        side_open(&side, &kinds[0], 4);
        kvf_status connected = kvf_transport_connect(side.transport, card, bytes, &peer);
        _exit(connected == KVF_E_PERMISSION && strstr(kvf_error_detail(), "runs as user 0") ? 0 : 3);
    }
    while (waitpid(pid, &status, WNOHANG) == 0)
        drive_idle(&owner, NULL);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    side_close(&owner);
}

/* Connects from a time namespace in which the machine started a day earlier. */
static int connect_a_day_later(const void *card, size_t bytes) {
    static const char offsets[] = "boottime 86400 0\n";
    int status;
    int fd = unshare(CLONE_NEWTIME) == 0 ? open("/proc/self/timens_offsets", O_WRONLY | O_CLOEXEC) : -1;
    if (fd < 0 || write(fd, offsets, sizeof offsets - 1) < 0)
        return CANNOT;
    const pid_t pid = fork(); /* it is the first one inside */
    if (pid == 0) {
        test_side side;
        kvf_peer *peer = NULL;
        side_open(&side, &kinds[0], 4);
        _exit(kvf_transport_connect(side.transport, card, bytes, &peer) == KVF_OK ? 0 : 3);
    }
    return waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : 4;
}

static void an_owner_in_another_time_namespace_is_not_taken_for_one_that_is_gone(void **state) {
    test_side owner;
    int status;
    side_open(&owner, *state, 2);
    const void *card;
    size_t bytes;
    assert_int_equal(kvf_transport_export(owner.transport, &card, &bytes), KVF_OK);
    (void)fflush(stdout);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        _exit(connect_a_day_later(card, bytes));
    while (waitpid(pid, &status, WNOHANG) == 0)
        drive_idle(&owner, NULL);
    side_close(&owner);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == CANNOT)
        skip();
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void) {
    static const way_test tests[] = {
        NAMED(another_process_is_read_byte_for_byte),
        NAMED(another_process_is_written_and_then_told),
        NAMED(a_killed_owner_is_lost_and_other_owners_are_not),
        NAMED(an_owner_that_dies_without_having_answered_is_lost),
        NAMED(an_owner_whose_own_child_keeps_its_sockets_is_lost_all_the_same),
        NAMED(an_endpoint_that_closes_is_lost_though_a_child_keeps_its_sockets),
        NAMED(a_card_of_a_dead_process_whose_child_lives_leads_nowhere),
        NAMED(a_card_of_a_dead_process_leads_nowhere),
        NAMED(a_killed_consumer_leaves_its_owner_serving_others),
        NAMED(the_memory_of_another_users_process_is_passed_over),
        NAMED(an_owner_in_another_time_namespace_is_not_taken_for_one_that_is_gone),
    };
    test_way ways[MAX_WAYS];
    return run_every_way("transport_process", tests, sizeof tests / sizeof *tests, ways,
                         ways_of_pairs(kinds, sizeof kinds / sizeof *kinds, ways), NULL, 0);
}
