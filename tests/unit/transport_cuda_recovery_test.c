/*
 * Owners, readers and writers of device memory when something is in short supply, changes at a bad moment, or ends
 * while something is under way: nothing is repeated for ever, stays lost for longer than it must, or is left behind.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cuda/device_image.h"
#include "cuda/over.h"
#include "cuda_ends.h"
#include "cuda_scene.h"
#include "transport/cuda/cuda.h"
#include "transport/transport.h"

#define DESCRIPTORS 256
#define MS_NS 1000000u

/* ---- time --------------------------------------------------------------------------------------- */

static time_t ahead_s; /* of the machine's clock */

/* Found before the C library's. */
/* NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): the C library's begin with __ */
int clock_gettime(clockid_t clock, struct timespec *out) {
    const int failed = (int)syscall(SYS_clock_gettime, clock, out);
    out->tv_sec += failed ? 0 : ahead_s;
    return failed;
}

/* ---- a kernel that takes no message --------------------------------------------------------------- */

static bool no_room;   /* in any socket, for what is sent */
static int no_buffers; /* so many messages find no memory */

/* NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): the C library's begin with __ */
ssize_t sendmsg(int socket, const struct msghdr *message, int flags) {
    if (no_room || no_buffers > 0) {
        errno = no_room ? EAGAIN : ENOBUFS;
        no_buffers -= !no_room;
        return -1;
    }
    return syscall(SYS_sendmsg, socket, message, flags);
}

/* ---- a process without free descriptors --------------------------------------------------------- */

static int taken[DESCRIPTORS], taken_count;
static struct rlimit descriptors_before;

static void take_all_descriptors(void) {
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &descriptors_before), 0);
    const struct rlimit few = {DESCRIPTORS, descriptors_before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    while ((taken[taken_count] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0)
        taken_count++;
}

static void give_descriptors_back(void) {
    while (taken_count > 0)
        (void)close(taken[--taken_count]);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &descriptors_before), 0);
}

/* ---- writing ------------------------------------------------------------------------------------ */

/* The card that the owner has been told is too old when it connects back. That changes no region that peers may use,
 * and the writer once said nothing when it was asked for its regions anew: the owner asked again, for ever. */
static void a_writer_whose_generation_rises_tells_its_memory_anew(void **state) {
    (void)state;
    outcome noted;
    both_open();
    run_rounds();
    submit_of_writer(KVF_WRITE, BYTES, &noted);
    assert_ok(kvf_transport_progress(writer.transport, NULL)); /* it tells its memory, and asks */
    assert_ok(kvf_transport_unregister_region(writer.transport, 1));
    run_rounds();
    assert_int_equal(noted.calls, 1);
    assert_int_equal(noted.status, KVF_OK);
    assert_written(BYTES);
    both_close();
}

/* The owner has been asked for nothing yet, so nothing has to be waited for. */
static void a_write_that_is_cancelled_before_the_owner_was_asked_ends_at_once(void **state) {
    (void)state;
    outcome noted;
    both_open();
    run_rounds();
    no_room = true;
    submit_of_writer(KVF_WRITE, BYTES, &noted);
    assert_ok(kvf_transport_progress(writer.transport, NULL));
    assert_int_equal(noted.calls, 0);
    assert_ok(kvf_transport_cancel(writer.transport, noted.operation));
    assert_ok(kvf_transport_progress(writer.transport, NULL));
    assert_int_equal(noted.calls, 1);
    assert_int_equal(noted.status, KVF_E_CANCELLED);
    no_room = false;
    run_rounds();
    assert_int_equal(written(0, BYTES), 0);
    write_well();
    assert_int_equal(noted.calls, 1);
    both_close();
}

/* The owner's memory is mapped for the devices that a reader has when it connects. */
static void a_region_on_another_device_than_when_the_peer_was_connected_needs_a_new_connection(void **state) {
    (void)state;
    outcome noted;
    void *seen;
    DEVICES_ARE_STAND_INS(); /* a second device */
    both_open();
    run_rounds();
    kvf_memory more = device_memory(0, BYTES, &seen); /* the writer's other memory is on device 1 */
    more.withheld = false;
    assert_ok(kvf_transport_register_region(writer.transport, 2, &more));
    submit_of_region(2, KVF_READ, BYTES, &noted);
    run_rounds();
    assert_int_equal(noted.calls, 1);
    assert_int_equal(noted.status, KVF_E_UNSUPPORTED);
    assert_non_null(strstr(noted.detail,
                           "the memory is on a device that had none when the peer was connected: "
                           "connect again"));
    submit_of_writer(KVF_READ, BYTES, &noted); /* the connection still reads for the device that it knows */
    run_rounds();
    assert_int_equal(noted.status, KVF_OK);
    kvf_peer_close(peer);
    connect_ends();
    run_rounds();
    submit_of_region(2, KVF_READ, BYTES, &noted);
    run_rounds();
    assert_int_equal(noted.status, KVF_OK);
    devices_get(seen);
    devices_get(owner.seen[0]);
    assert_memory_equal(seen, owner.seen[0], BYTES);
    both_close();
}

/* Once a connection to the writer had failed, all its later writes did. */
static void an_owner_that_could_not_connect_back_tries_again(void **state) {
    (void)state;
    outcome noted;
    both_open();
    run_rounds();
    submit_of_writer(KVF_WRITE, BYTES, &noted);
    take_all_descriptors();
    run_rounds();
    give_descriptors_back();
    assert_int_equal(noted.status, KVF_E_IO);
    assert_non_null(strstr(noted.detail, "the owner could not read the data: socket: Too many open files"));
    ahead_s = 1; /* longer than the pause between two attempts */
    submit_of_writer(KVF_WRITE, BYTES, &noted);
    run_rounds();
    ahead_s = 0;
    assert_int_equal(noted.calls, 1);
    assert_int_equal(noted.status, KVF_OK);
    assert_written(BYTES);
    assert_int_equal(writer.lost, 0);
    both_close();
}

/* ---- reading ------------------------------------------------------------------------------------ */

/* Agents with "auto" go packed then. The connection was lost once, as if the owner had sent two descriptors. */
static void a_reader_without_descriptors_for_segments_says_so_and_stays_connected(void **state) {
    (void)state;
    char detail[512];
    test_scene *scene = scene_open_with("cuda", NULL, THEIRS_IN_SEGMENTS);
    const size_t left = devices_left();
    assert_ok(scene_connect(scene));
    take_all_descriptors();
    const kvf_status status = scene_pull(scene, detail);
    give_descriptors_back();
    assert_int_equal(status, KVF_E_UNSUPPORTED);
    if (!strstr(detail, "region 0: this process has no free descriptor for one that the peer has sent"))
        fail_msg("%s", detail);
    assert_int_equal(scene->lost, 0);
    assert_int_equal(devices_left(), left);
    assert_ok(scene_push(scene, detail));
    assert_int_equal(owner_tell(&scene->owner, 'c'), 0);
    kvf_peer_close(scene->peer);
    assert_ok(scene_connect(scene));
    assert_ok(scene_pull(scene, detail));
    assert_int_equal(cache_wrong_cells(&scene->here, 2), 0);
    scene_close(scene, false);
}

/* ---- connections -------------------------------------------------------------------------------- */

static bool has_something_to_do(kvf_transport *transport) {
    struct pollfd fd = {kvf_transport_event_fd(transport), POLLIN, 0};
    return poll(&fd, 1, 0) > 0;
}

/* Whether the owner has hung up. */
static bool is_closed(int fd) {
    kvf_cuda_packet packet;
    kvf_status status;
    while ((status = kvf_cuda_wire_receive(fd, &packet)) == KVF_OK)
        continue;
    return status == KVF_E_PEER_LOST;
}

static void a_guest_for_whom_there_is_no_descriptor_is_refused(void **state) {
    (void)state;
    both_open();
    run_rounds();
    const int first = open_guest(), second = open_guest();
    take_all_descriptors();
    run_rounds();
    const bool spins = has_something_to_do(owner.transport);
    give_descriptors_back();
    assert_false(spins);
    assert_int_equal(refusal_of(first), CUDA_REFUSED_SHORT);
    assert_int_equal(refusal_of(second), CUDA_REFUSED_SHORT);
    const int third = open_known_guest();
    (void)close(third);
    write_well();
    both_close();
}

/* The key must be shown within 15 s; who has shown it may be silent. */
static void a_guest_that_does_not_show_the_key_is_hung_up_on(void **state) {
    (void)state;
    kvf_cuda_hello wrong;
    both_open();
    run_rounds();
    wrong = good_hello();
    wrong.key[0] ^= 1;
    const int known = open_known_guest(), silent = open_guest(), refused = open_guest();
    say_as_guest(refused, &wrong, sizeof wrong);
    run_rounds();
    ahead_s = 14;
    const int late = open_guest();
    run_rounds();
    assert_false(is_closed(silent));
    assert_false(is_closed(refused));
    ahead_s = 16;
    run_rounds();
    assert_true(is_closed(silent));
    assert_true(is_closed(refused));
    assert_false(is_closed(late));
    ahead_s = 30;
    run_rounds();
    assert_true(is_closed(late));
    assert_false(is_closed(known));
    ahead_s = 0;
    (void)close(known);
    (void)close(silent);
    (void)close(refused);
    (void)close(late);
    write_well();
    both_close();
}

/* Whoever waits for a peer that refused it may not take the peer's last writes for over: it lives, and may connect again.
 * Once it counted as a process that has ended, and blocks that it could still write were free. */
static void a_peer_that_refuses_us_lives_and_one_that_closes_does_not(void **state) {
    (void)state;
    const void *card;
    size_t bytes;
    for (int closes = 0; closes < 2; closes++) {
        both_open();
        run_rounds();
        assert_ok(kvf_transport_export(writer.transport, &card, &bytes));
        if (closes)
            kvf_transport_close(owner.transport);
        else
            assert_ok(kvf_transport_fence(owner.transport, card, bytes));
        for (int i = 0; i < ROUNDS; i++)
            assert_ok(kvf_transport_progress(writer.transport, NULL));
        assert_int_equal(writer.lost, 1);
        assert_int_equal(kvf_peer_lives(peer), !closes);
        kvf_transport_close(writer.transport);
        if (!closes)
            kvf_transport_close(owner.transport);
        devices_free();
    }
}

/* The same if the owner has no memory for one more client. It once hung up without a word, as if it had ended. */
static void an_owner_that_has_no_room_for_us_lives(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    both_open();
    memory.calls = 0;
    memory.fail_at = 1;
    assert_ok(kvf_transport_progress(owner.transport, NULL));
    memory.fail_at = 0;
    assert_true(memory.calls > 0);
    run_rounds();
    assert_int_equal(writer.lost, 1);
    assert_true(kvf_peer_lives(peer));
    assert_non_null(strstr(writer.lost_detail, "no memory or descriptor"));
    both_close();
}

/* It has no memory to read our greeting, and hangs up when our time is over: once without a word, too. */
static void an_owner_without_memory_to_hear_us_lives(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    both_open();
    assert_ok(kvf_transport_progress(owner.transport, NULL));
    for (ahead_s = 0; ahead_s <= 16; ahead_s += 16) {
        memory.fail_at = memory.calls + 1;
        assert_ok(kvf_transport_progress(owner.transport, NULL));
        assert_true(memory.calls >= memory.fail_at);
    }
    memory.fail_at = 0;
    ahead_s = 0;
    run_rounds();
    assert_int_equal(writer.lost, 1);
    assert_true(kvf_peer_lives(peer));
    assert_non_null(strstr(writer.lost_detail, "no memory or descriptor"));
    both_close();
}

/* The kernel has no memory for the answer to our greeting. We once waited for it for ever. */
static void an_owner_that_cannot_answer_us_refuses_us(void **state) {
    (void)state;
    both_open();
    no_buffers = 1;
    run_rounds();
    assert_int_equal(no_buffers, 0);
    assert_int_equal(writer.lost, 1);
    assert_true(kvf_peer_lives(peer));
    assert_non_null(strstr(writer.lost_detail, "no memory or descriptor"));
    both_close();
}

/* What another user's process sees: 0 if it is refused by name, and then hung up on. */
static int be_another_user(const unsigned char name[CUDA_ID_BYTES]) {
    int fd;
    kvf_cuda_packet packet;
    if (setuid(65534) || kvf_cuda_wire_connect(name, &fd))
        return 1;
    struct pollfd readable = {fd, POLLIN, 0};
    for (int i = 0; i < 2; i++) {
        if (poll(&readable, 1, 5000) <= 0)
            return 2;
        const kvf_status status = kvf_cuda_wire_receive(fd, &packet);
        if (i == 0 &&
            (status || packet.as.header.kind != CUDA_REFUSED || packet.as.header.count != CUDA_REFUSED_USER))
            return 3;
        if (i == 1 && status != KVF_E_PEER_LOST)
            return 4;
    }
    return 0;
}

static void a_process_of_another_user_is_refused_and_hung_up_on(void **state) {
    (void)state;
    int how = 0;
    kvf_cuda_card card;
    kvf_cuda_region regions[2];
    if (geteuid() != 0)
        skip();
    both_open();
    run_rounds();
    part_of(&owner, &card, regions);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        _exit(be_another_user(card.name));
    struct pollfd either[2] = {{kvf_transport_event_fd(owner.transport), POLLIN, 0},
                               {kvf_neighbour_watch_process(child), POLLIN, 0}};
    assert_true(either[1].fd >= 0);
    while (!either[1].revents) {
        assert_true(poll(either, 2, -1) > 0);
        run_rounds();
    }
    (void)close(either[1].fd);
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how));
    assert_int_equal(WEXITSTATUS(how), 0);
    write_well();
    both_close();
}

/* ---- children of fork() ------------------------------------------------------------------------- */

/* A child that keeps all sockets of this process open until it is killed. */
static pid_t have_a_child(void) {
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that fails leaves no process behind */
        for (;;)
            (void)pause();
    }
    return child;
}

static void end_child(pid_t child) {
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
}

/* If the writer went on reading, it could get bytes that were put there later. */
static void an_owner_that_closes_is_lost_though_a_child_keeps_its_sockets(void **state) {
    (void)state;
    both_open();
    run_rounds();
    const pid_t child = have_a_child();
    kvf_transport_close(owner.transport);
    for (int i = 0; i < ROUNDS; i++)
        assert_ok(kvf_transport_progress(writer.transport, NULL));
    assert_int_equal(writer.lost, 1);
    end_child(child);
    kvf_transport_close(writer.transport);
    devices_free();
}

/* The owner waits for its end before it takes memory back. */
static void a_reader_that_hangs_up_is_gone_though_a_child_keeps_its_sockets(void **state) {
    (void)state;
    both_open();
    run_rounds();
    const pid_t child = have_a_child();
    kvf_peer_close(peer);
    run_rounds();
    assert_ok(kvf_transport_unregister_region(owner.transport, 0));
    end_child(child);
    both_close();
}

/* A process that has said HELLO, and has a child that keeps its socket; neither reads. The child is the caller's. */
static pid_t have_a_reader_with_a_child(pid_t *child) {
    kvf_cuda_card card;
    kvf_cuda_region regions[2];
    int told[2];
    kvf_cuda_hello hello = good_hello();
    hello.generation = kvf_transport_oldest(owner.transport);
    part_of(&owner, &card, regions);
    assert_int_equal(pipe(told), 0);
    const pid_t reader = fork();
    assert_true(reader >= 0);
    if (reader == 0) {
        int fd;
        if (kvf_cuda_wire_connect(card.name, &fd) || kvf_cuda_wire_send(fd, &hello, sizeof hello))
            _exit(1);
        const pid_t own = fork();
        if (own > 0 && write(told[1], &own, sizeof own) != sizeof own)
            _exit(1);
        (void)alarm(60); /* a test that fails leaves no process behind for long */
        for (;;)
            (void)pause();
    }
    (void)close(told[1]);
    assert_int_equal(read(told[0], child, sizeof *child), sizeof *child);
    (void)close(told[0]);
    return reader;
}

/* A process that was killed reads no more. The owner once waited for its child, also when it closed: for 30 s, its
 * patience. */
static void a_reader_that_was_killed_is_gone_though_a_child_keeps_its_socket(void **state) {
    (void)state;
    pid_t child;
    void *made;
    both_open();
    run_rounds();
    kvf_peer_close(peer);
    assert_ok(kvf_transport_allocate(owner.transport, KVF_MEMORY_CUDA, 0, 4096, &made));
    const pid_t reader = have_a_reader_with_a_child(&child);
    run_rounds();
    assert_int_equal(kvf_transport_unregister_region(owner.transport, 0), KVF_E_AGAIN);
    end_child(reader);
    assert_ok(kvf_transport_unregister_region(owner.transport, 0));
    const uint64_t begun = kvf_now(&kvf_monotonic);
    kvf_transport_close(owner.transport);
    assert_in_range(kvf_now(&kvf_monotonic) - begun, 0, 20 * KVF_SECOND);
    assert_int_equal(kill(child, SIGKILL), 0);
    kvf_transport_close(writer.transport);
    devices_free();
}

/* Until all readers had let go of one region, no peer could connect for the others: their part of the card and the rest
 * differed. */
static void a_reader_that_connects_while_a_region_is_taken_back_stays_connected(void **state) {
    (void)state;
    pid_t child;
    void *seen;
    outcome noted;
    const kvf_run run = {.bytes = BYTES, .remote_region = 2};
    both_open();
    run_rounds();
    kvf_peer_close(peer);
    const pid_t reader = have_a_reader_with_a_child(&child);
    run_rounds();
    kvf_memory more = device_memory(devices_number(0), BYTES, &seen);
    more.withheld = false;
    memset(seen, 0x5a, BYTES);
    devices_put(seen);
    assert_ok(kvf_transport_register_region(owner.transport, 2, &more));
    assert_int_equal(kvf_transport_unregister_region(owner.transport, 0), KVF_E_AGAIN);
    connect_ends();
    run_rounds();
    assert_int_equal(kvf_transport_unregister_region(owner.transport, 0), KVF_E_AGAIN);
    end_child(reader);
    assert_ok(kvf_transport_unregister_region(owner.transport, 0));
    assert_int_equal(kill(child, SIGKILL), 0);
    run_rounds();
    assert_int_equal(writer.lost, 0);
    submit_run(&run, KVF_READ, &noted);
    run_rounds();
    assert_int_equal(noted.calls, 1);
    assert_int_equal(noted.status, KVF_OK);
    devices_get(writer.seen[0]);
    assert_memory_equal(writer.seen[0], seen, BYTES);
    both_close();
}

/* Another thread starts a copy when this one forks: its child once waited for that thread, which it does not have. */
static void a_child_of_fork_does_not_wait_for_a_thread_of_its_parent(void **state) {
    (void)state;
    int how = 0;
    both_open();
    kvf_cuda_gate_enter();
    const pid_t child = fork();
    if (child == 0) {
        kvf_transport *transport = NULL;
        (void)alarm(10);
        if (kvf_transport_open("auto", NULL, &transport))
            _exit(1);
        kvf_transport_close(transport);
        _exit(kvf_transport_open("cuda", NULL, &transport) == KVF_E_UNSUPPORTED &&
                      strstr(kvf_error_detail(), "forked")
                  ? 0
                  : 2);
    }
    kvf_cuda_gate_leave();
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how));
    assert_int_equal(WEXITSTATUS(how), 0);
    write_well();
    both_close();
}

/* ---- a writer that dies -------------------------------------------------------------------------- */

static void await_word(int fd) {
    char word;
    assert_int_equal(read(fd, &word, 1), 1);
}

/* A process that asks the owner to write what `writer` has, and then waits. It claims to know the owner's memory of this
 * generation. It says "h" after HELLO, and "w" after it was let in and has asked. The caller ends it. */
static pid_t have_a_writer(int *says, uint64_t generation) {
    const kvf_cuda_write write_one = {.header = {CUDA_WRITE, 1}, .runs = {{.bytes = BYTES}}};
    kvf_cuda_memory memory = {.header = {CUDA_MEMORY, 1}};
    kvf_cuda_card card;
    kvf_cuda_region regions[2];
    kvf_cuda_hello hello = good_hello();
    int said[2];
    hello.generation = generation;
    part_of(&writer, &memory.card, regions);
    memory.card.region_count = 1;
    memory.generation = UINT64_MAX;
    memory.regions[0] = regions[0];
    part_of(&owner, &card, regions);
    assert_int_equal(pipe(said), 0);
    const pid_t process = fork();
    assert_true(process >= 0);
    if (process == 0) {
        kvf_cuda_packet packet;
        struct pollfd readable = {-1, POLLIN, 0};
        (void)alarm(60); /* a test that fails leaves no process behind for long */
        if (kvf_cuda_wire_connect(card.name, &readable.fd) ||
            kvf_cuda_wire_send(readable.fd, &hello, sizeof hello) || write(said[1], "h", 1) != 1 ||
            poll(&readable, 1, -1) != 1 || kvf_cuda_wire_receive(readable.fd, &packet) ||
            kvf_cuda_wire_send(readable.fd, &memory, memory_bytes(&memory)) ||
            kvf_cuda_wire_send(readable.fd, &write_one, write_bytes(&write_one)) ||
            write(said[1], "w", 1) != 1)
            _exit(1);
        for (;;)
            (void)pause();
    }
    (void)close(said[1]);
    *says = said[0];
    return process;
}

/* It was KVF_OK: a writer that has ended counted as a reader that has ended, and the memory could be freed or unmapped
 * while kernels of the owner wrote it. */
static void memory_is_not_given_back_while_kernels_write_it_for(bool of_a_liar) {
    int says;
    both_open();
    kvf_peer_close(peer);
    const pid_t process =
        have_a_writer(&says, of_a_liar ? UINT64_MAX : kvf_transport_oldest(owner.transport));
    devices_delay(HOUR_NS);
    await_word(says);
    run_rounds();
    await_word(says);
    run_rounds();
    devices_delay(0);
    end_child(process);
    (void)close(says);
    for (int i = 0; i < 3; i++) { /* before and after the owner has noticed */
        assert_fails(kvf_transport_unregister_region(owner.transport, 0), KVF_E_AGAIN,
                     "kernels of this process still copy what a guest", "asked to write",
                     "after it was told to let go");
        run_rounds();
    }
    assert_int_equal(written(0, BYTES), 0);
    devices_hasten();
    run_rounds();
    assert_ok(kvf_transport_unregister_region(owner.transport, 0));
    assert_written(BYTES);
    both_close();
}

static void memory_is_not_given_back_while_kernels_write_it_for_a_writer_that_has_died(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    memory_is_not_given_back_while_kernels_write_it_for(false);
}

/* It was KVF_OK, for the writer claimed to know memory that comes later. */
static void memory_is_not_given_back_while_kernels_write_it_for_a_writer_that_lies(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    memory_is_not_given_back_while_kernels_write_it_for(true);
}

/* ---- closing ------------------------------------------------------------------------------------- */

static void *count_allocate(void *context, size_t bytes) {
    ++*(int64_t *)context;
    return malloc(bytes);
}

static void *count_resize(void *context, void *memory, size_t bytes) {
    *(int64_t *)context += memory == NULL;
    return realloc(memory, bytes);
}

static void count_release(void *context, void *memory) {
    *(int64_t *)context -= memory != NULL;
    free(memory);
}

static void an_owner_that_closes_while_it_reads_frees_what_it_was_asked_for(void **state) {
    enum { LATE_NS = 20000000 };
    (void)state;
    DEVICES_ARE_STAND_INS();
    static int64_t allocated;
    const kvf_allocator counting = {count_allocate, count_resize, count_release, &allocated};
    const size_t left = devices_left();
    outcome noted;
    assert_ok(kvf_set_allocator(&counting));
    both_open();
    run_rounds();
    devices_delay(LATE_NS);
    submit_of_writer(KVF_WRITE, BYTES, &noted);
    run_rounds();
    devices_delay(0);
    assert_int_equal(written(0, BYTES), 0);
    kvf_transport_close(owner.transport);
    kvf_transport_close(writer.transport);
    assert_int_equal(noted.calls, 1);
    devices_free();
    assert_int_equal(devices_left(), left);
    assert_int_equal(allocated, 0);
    assert_ok(kvf_set_allocator(NULL));
}

/* A reader in another process, which needs no device for this: it says HELLO, and hangs up `after_ms` after it was told
 * that the owner closes; 0: never. */
static _Noreturn void be_reader(const unsigned char name[CUDA_ID_BYTES], const kvf_cuda_hello *hello,
                                int known, unsigned after_ms) {
    kvf_cuda_packet packet;
    int fd;
    struct pollfd readable = {-1, POLLIN, 0};
    (void)alarm(60);
    if (kvf_cuda_wire_connect(name, &fd) || kvf_cuda_wire_send(fd, hello, sizeof *hello))
        _exit(1);
    readable.fd = fd;
    for (;;) {
        if (poll(&readable, 1, -1) < 0 || kvf_cuda_wire_receive(fd, &packet))
            _exit(2);
        if (packet.as.header.kind == CUDA_READY && write(known, "k", 1) == 1)
            continue;
        if (packet.as.header.kind != CUDA_REFUSED || packet.as.header.count != CUDA_REFUSED_CLOSED)
            _exit(3);
        if (after_ms == 0)
            pause();
        (void)usleep(after_ms * 1000);
        _exit(0);
    }
}

/* Closes an owner of memory that another process has mapped; returns how many ms that took. */
static uint64_t close_read_owner(const char *allocation, unsigned after_ms, CUdeviceptr *out) {
    const kvf_setting impatient = {"cuda.patience_ms", "1000"},
                      exportable = {"cuda.allocation", "exportable"};
    kvf_cuda_card card;
    kvf_cuda_region regions[2];
    void *made;
    int how, known[2];
    assert_int_equal(pipe(known), 0);
    device_end_open_with(&owner, 0, strcmp(allocation, "plain") == 0 ? &impatient : &exportable);
    device_end_open(&writer, 1);
    assert_ok(kvf_transport_allocate(owner.transport, KVF_MEMORY_CUDA, 0, 4096, &made));
    *out = (CUdeviceptr)(uintptr_t)made;
    part_of(&owner, &card, regions);
    const kvf_cuda_hello hello = good_hello();
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        be_reader(card.name, &hello, known[1], after_ms);
    struct pollfd readable = {known[0], POLLIN, 0};
    while (poll(&readable, 1, 1) == 0)
        run_rounds();
    (void)close(known[0]);
    (void)close(known[1]);
    const uint64_t begun = kvf_now(&kvf_monotonic);
    kvf_transport_close(owner.transport);
    const uint64_t took = kvf_now(&kvf_monotonic) - begun;
    if (after_ms == 0)
        assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(after_ms == 0 || (WIFEXITED(how) && WEXITSTATUS(how) == 0));
    kvf_transport_close(writer.transport);
    devices_free();
    return took / KVF_MILLISECOND;
}

/* For the driver, freeing memory that another process has opened is undefined behaviour. */
static void memory_is_freed_once_no_other_process_has_it_mapped(void **state) {
    (void)state;
    CUdeviceptr made;
    const kvf_cuda *cuda;
    const size_t left = devices_left();
    assert_in_range(close_read_owner("plain", 100, &made), 90, 990);
    assert_int_equal(devices_left(), left);
    /* After its patience the owner leaves the memory, for as long as the process runs. */
    assert_in_range(close_read_owner("plain", 0, &made), 1000, 20000);
    if (!devices_are_real())
        assert_int_equal(devices_left(), left + 1);
    assert_ok(kvf_cuda_enter(0, &cuda));
    assert_int_equal(cuda->cuMemFree_v2(made), 0);
    kvf_cuda_leave(cuda);
    /* The control: readers keep a segment, so nothing is waited for. */
    assert_in_range(close_read_owner("exportable", 0, &made), 0, 990);
    assert_int_equal(devices_left(), left);
}

/* Drivers from CUDA 12 on need not wait for kernels when memory is freed, and a kernel that reads freed memory ends the
 * context. */
static void memory_is_freed_when_kernels_of_this_process_no_longer_read_it(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    outcome noted;
    void *made;
    owner = (test_end){0};
    assert_ok(kvf_transport_open("cuda", NULL, &owner.transport));
    assert_ok(kvf_transport_allocate(owner.transport, KVF_MEMORY_CUDA, 0, BYTES, &made));
    owner.memory[0] = (kvf_memory){
        .struct_size = sizeof(kvf_memory), .address = made, .bytes = BYTES, .kind = KVF_MEMORY_CUDA};
    assert_ok(kvf_transport_register(owner.transport, owner.memory, 1));
    device_end_open(&writer, 1);
    connect_ends();
    run_rounds();
    devices_delay(50 * MS_NS);
    submit_of_writer(KVF_READ, BYTES, &noted);
    assert_ok(kvf_transport_progress(writer.transport, NULL));
    devices_delay(0);
    kvf_transport_close(owner.transport);
    while (noted.calls == 0)
        assert_ok(kvf_transport_progress(writer.transport, NULL));
    assert_int_equal(noted.status, KVF_E_PEER_LOST);
    const bool is_lost = kvf_cuda_is_lost(1);
    devices_stick(0);
    assert_false(is_lost);
    kvf_transport_close(writer.transport);
    devices_free();
}

/* Once it counted as free as soon as the peer was closed, though the kernel could still write it. */
static void memory_is_not_given_back_while_a_device_hangs_that_may_write_it(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    const kvf_setting impatient = {"cuda.patience_ms", "1"};
    const size_t left = devices_left();
    outcome noted;
    device_end_open(&owner, 0);
    device_end_open_with(&writer, 1, &impatient);
    connect_ends();
    run_rounds();
    devices_delay(HOUR_NS);
    submit_of_writer(KVF_READ, BYTES, &noted);
    assert_ok(kvf_transport_progress(writer.transport, NULL));
    devices_delay(0);
    kvf_peer_close(peer);
    assert_int_equal(noted.status, KVF_E_CANCELLED);
    for (int i = 0; i < 2; i++) {
        assert_fails(kvf_transport_unregister_region(writer.transport, 0), KVF_E_AGAIN,
                     "the device has not finished a copy of a connection that was closed");
        assert_fails(kvf_transport_unregister_region(owner.transport, 0), KVF_E_AGAIN, "may be reading");
        run_rounds();
    }
    devices_hasten();
    while (kvf_transport_unregister_region(writer.transport, 0) == KVF_E_AGAIN)
        kvf_cuda_pause();
    run_rounds();
    assert_ok(kvf_transport_unregister_region(owner.transport, 0)); /* it is not mapped any more */
    assert_memory_equal(writer.seen[0], owner.seen[0], BYTES);
    both_close();
    assert_int_equal(devices_left(), left);
}

/* Must be the last test: it leaves a copy that does not end while the endpoint is there. */
static void memory_that_a_hanging_device_may_write_is_not_freed(void **state) {
    (void)state;
    DEVICES_ARE_STAND_INS();
    const kvf_setting impatient = {"cuda.patience_ms", "1"};
    outcome noted;
    void *made;
    device_end_open(&owner, 0);
    device_end_open_with(&writer, 1, &impatient);
    connect_ends();
    run_rounds();
    assert_ok(kvf_transport_allocate(writer.transport, KVF_MEMORY_CUDA, 1, 4096, &made));
    devices_delay(HOUR_NS);
    submit_of_writer(KVF_READ, BYTES, &noted);
    assert_ok(kvf_transport_progress(writer.transport, NULL));
    kvf_transport_close(writer.transport);
    assert_int_equal(noted.calls, 1);
    assert_non_null(devices_look((uint64_t)(uintptr_t)made));
    devices_delay(0);
    devices_hasten();
    kvf_transport_close(owner.transport);
    devices_free();
}

int main(int argument_count, char **arguments) {
    if (argument_count == 5)
        return owner_main(arguments);
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_write_that_is_cancelled_before_the_owner_was_asked_ends_at_once),
        cmocka_unit_test(a_region_on_another_device_than_when_the_peer_was_connected_needs_a_new_connection),
        cmocka_unit_test(a_writer_whose_generation_rises_tells_its_memory_anew),
        cmocka_unit_test(an_owner_that_could_not_connect_back_tries_again),
        cmocka_unit_test(an_owner_that_closes_while_it_reads_frees_what_it_was_asked_for),
        cmocka_unit_test(a_reader_without_descriptors_for_segments_says_so_and_stays_connected),
        cmocka_unit_test(a_guest_for_whom_there_is_no_descriptor_is_refused),
        cmocka_unit_test(a_guest_that_does_not_show_the_key_is_hung_up_on),
        cmocka_unit_test(a_peer_that_refuses_us_lives_and_one_that_closes_does_not),
        cmocka_unit_test(an_owner_that_closes_is_lost_though_a_child_keeps_its_sockets),
        cmocka_unit_test(a_reader_that_hangs_up_is_gone_though_a_child_keeps_its_sockets),
        cmocka_unit_test(a_reader_that_was_killed_is_gone_though_a_child_keeps_its_socket),
        cmocka_unit_test(a_reader_that_connects_while_a_region_is_taken_back_stays_connected),
        cmocka_unit_test(memory_is_not_given_back_while_kernels_write_it_for_a_writer_that_has_died),
        cmocka_unit_test(memory_is_not_given_back_while_kernels_write_it_for_a_writer_that_lies),
        cmocka_unit_test_teardown(an_owner_that_has_no_room_for_us_lives, stop_counting_memory),
        cmocka_unit_test_teardown(an_owner_without_memory_to_hear_us_lives, stop_counting_memory),
        cmocka_unit_test(an_owner_that_cannot_answer_us_refuses_us),
        cmocka_unit_test(a_process_of_another_user_is_refused_and_hung_up_on),
        cmocka_unit_test(a_child_of_fork_does_not_wait_for_a_thread_of_its_parent),
        cmocka_unit_test(memory_is_freed_once_no_other_process_has_it_mapped),
        cmocka_unit_test(memory_is_freed_when_kernels_of_this_process_no_longer_read_it),
        cmocka_unit_test(memory_is_not_given_back_while_a_device_hangs_that_may_write_it),
        cmocka_unit_test(memory_that_a_hanging_device_may_write_is_not_freed),
    };
    devices_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
