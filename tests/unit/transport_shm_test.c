/* What only the same-host transport can meet: the memory of another process, as the kernel sees it. */
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "transport/front.h"
#include "transport/neighbour.h"
#include "transport/shm/shm.h"
#include "transport/transport.h"
#include "transport_pair.h"
#include "transport_raw.h"

static time_t ahead_s; /* of the machine's clock */

/* Found before the C library's. */
/* NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): the C library's begin with __ */
int clock_gettime(clockid_t clock, struct timespec *out) {
    const int failed = (int)syscall(SYS_clock_gettime, clock, out);
    out->tv_sec += failed ? 0 : ahead_s;
    return failed;
}

static bool no_addresses; /* for memory that another process shares, or may share */

/* The same. */
/* NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): the C library's begin with __ */
void *mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset) {
    if (no_addresses && fd >= 0) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    /* NOLINTNEXTLINE(performance-no-int-to-ptr): the call gives an address */
    return (void *)syscall(SYS_mmap, address, bytes, protection, flags, fd, offset);
}

static int forbids; /* the errno of the next two calls; 0: they are made */

static ssize_t copy_between(long call, pid_t pid, const struct iovec *local, unsigned long local_count,
                            const struct iovec *remote, unsigned long remote_count, unsigned long flags) {
    if (forbids) {
        errno = forbids;
        return -1;
    }
    return syscall(call, pid, local, local_count, remote, remote_count, flags);
}

/* The same. */
/* NOLINTBEGIN(readability-inconsistent-declaration-parameter-name): the C library's begin with __ */
ssize_t process_vm_readv(pid_t pid, const struct iovec *local, unsigned long local_count,
                         const struct iovec *remote, unsigned long remote_count, unsigned long flags) {
    return copy_between(SYS_process_vm_readv, pid, local, local_count, remote, remote_count, flags);
}

ssize_t process_vm_writev(pid_t pid, const struct iovec *local, unsigned long local_count,
                          const struct iovec *remote, unsigned long remote_count, unsigned long flags) {
    return copy_between(SYS_process_vm_writev, pid, local, local_count, remote, remote_count, flags);
}
/* NOLINTEND(readability-inconsistent-declaration-parameter-name) */

/* Opens an endpoint over memory of which the second half is unmapped. */
static kvf_transport *open_over_hole(unsigned char **memory, size_t half) {
    kvf_transport *transport = NULL;
    *memory = mmap(NULL, 2 * half, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(*memory, MAP_FAILED);
    kvf_memory region = {.struct_size = sizeof(kvf_memory), .address = *memory, .bytes = 2 * half};
    kvf_transport_options options = {.struct_size = sizeof options, .name = "owner"};
    assert_int_equal(kvf_transport_open("shm", &options, &transport), KVF_OK);
    assert_int_equal(kvf_transport_register(transport, &region, 1), KVF_OK);
    assert_int_equal(munmap(*memory + half, half), 0);
    return transport;
}

static void memory_that_is_not_there_fails_the_batch_and_names_the_run(void **state) {
    (void)state;
    static const pair_kind brought = {"shm", {false, false}, "shm", {0}};
    size_t half = (size_t)sysconf(_SC_PAGESIZE) * 4;
    unsigned char *memory;
    test_side here, there = {.transport = open_over_hole(&memory, half)};
    side_open(&here, &brought, 1);
    kvf_peer *peer = side_connect(&here, &there);
    kvf_run runs[3] = {{0, 0, 100, 0, 0}, {200, 300, 100, 0, 0}, {400, half + 700, 100, 0, 0}};
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++) {
        test_outcome outcome = {0};
        assert_int_equal(
            kvf_transport_submit(peer, (kvf_direction)direction, runs, 3, note_outcome, &outcome, NULL),
            KVF_OK);
        drive(&here, &there, &outcome.calls, 1);
        assert_int_equal(outcome.status, KVF_E_IO);
        char run[128];
        (void)snprintf(run, sizeof run,
                       "owner: 100 bytes at offset %zu of the peer's region 0: process_vm_%s: Bad address",
                       half + 700, direction == KVF_READ ? "readv" : "writev");
        assert_non_null(strstr(outcome.detail, run));
    }
    assert_int_equal(move_runs(&here, &there, peer, KVF_READ, runs, 2), KVF_OK);
    side_close(&here);
    kvf_transport_close(there.transport);
    assert_int_equal(munmap(memory, half), 0);
}

/* Runs of 256 bytes, for which the shared buffer would be the faster way. */
static size_t short_runs(const test_side *side, kvf_run *runs, size_t most) {
    size_t count = 0;
    for (; count < most && (count + 1) * 256 <= side->regions[0].bytes; count++)
        runs[count] = (kvf_run){count * 256, count * 256, 256, 0, 0};
    return count;
}

static void a_read_goes_on_without_an_owner_that_does_not_serve(void **state) {
    (void)state;
    static const char *const direct[] = {"auto", "on", "off"};
    static kvf_run runs[20000];
    for (int i = 0; i < 3; i++) {
        const pair_kind brought = {"shm", {false, false}, "shm", {"shm.direct", direct[i]}};
        test_side here, there;
        side_open(&here, &brought, 1);
        side_open(&there, &brought, 2);
        kvf_peer *peer = side_connect(&here, &there);
        /* the owner has answered once */
        assert_int_equal(move_runs(&here, &there, peer, KVF_READ, runs, 1), KVF_OK);
        size_t count = short_runs(&here, runs, sizeof runs / sizeof *runs);
        test_outcome outcome = {0};
        assert_int_equal(kvf_transport_submit(peer, KVF_READ, runs, count, note_outcome, &outcome, NULL),
                         KVF_OK);
        if (i == 2) {
            for (int turn = 0; turn < 1000; turn++)
                assert_int_equal(kvf_transport_progress(here.transport, NULL), KVF_OK);
            assert_int_equal(outcome.calls, 0); /* if only the owner can copy, it must */
        }
        drive(&here, i == 2 ? &there : NULL, &outcome.calls, 1);
        assert_int_equal(outcome.status, KVF_OK);
        assert_memory_equal(side_memory(&here, 0), side_memory(&there, 0), count * 256);
        /* The owner's late answers are dropped, and it is asked again. */
        drive_idle(&here, &there);
        side_fill(side_memory(&here, 0), 1, 0, here.regions[0].bytes);
        assert_int_equal(move_runs(&here, &there, peer, KVF_READ, runs, count), KVF_OK);
        assert_memory_equal(side_memory(&here, 0), side_memory(&there, 0), count * 256);
        side_close(&here);
        side_close(&there);
    }
}

static void goes_by_a_shared_buffer(const kvf_peer *peer) {
    kvf_peer_info info = {.struct_size = sizeof info};
    assert_int_equal(kvf_peer_get_info(peer, &info), KVF_OK);
    assert_string_equal(info.way, "a shared buffer, because the kernel forbids process_vm_readv");
}

/* As in a container, whose system calls are filtered. */
static void where_the_kernel_forbids_it_the_owner_copies(void **state) {
    (void)state;
    static const pair_kind brought = {"shm", {false, false}, "shm", {0}};
    static kvf_run runs[20000];
    static const int errors[] = {EPERM, ENOSYS, EACCES};
    for (int i = 0; i < 6; i++) {
        const kvf_direction direction = i % 2 ? KVF_READ : KVF_WRITE;
        test_side here, there;
        side_open(&here, &brought, 1);
        side_open(&there, &brought, 2);
        kvf_peer *peer = side_connect(&here, &there);
        const size_t count = short_runs(&here, runs, sizeof runs / sizeof *runs);
        forbids = errors[i / 2];
        assert_int_equal(move_runs(&here, &there, peer, direction, runs, count), KVF_OK);
        assert_memory_equal(side_memory(&here, 0), side_memory(&there, 0), count * 256);
        goes_by_a_shared_buffer(peer);
        forbids = 0;
        side_close(&here);
        side_close(&there);
    }
}

/* The owner has a part of a read, and does not serve; the part cannot be taken back from it. */
static void what_the_owner_has_when_the_kernel_forbids_it_waits_for_the_owner(void **state) {
    (void)state;
    static const pair_kind brought = {"shm", {false, false}, "shm", {0}};
    static kvf_run runs[20000];
    test_side here, there;
    side_open(&here, &brought, 1);
    side_open(&there, &brought, 2);
    kvf_peer *peer = side_connect(&here, &there);
    assert_int_equal(move_runs(&here, &there, peer, KVF_READ, runs, 1), KVF_OK);
    const size_t count = short_runs(&here, runs, sizeof runs / sizeof *runs);
    test_outcome outcome = {0};
    assert_int_equal(kvf_transport_submit(peer, KVF_READ, runs, count, note_outcome, &outcome, NULL), KVF_OK);
    assert_int_equal(kvf_transport_progress(here.transport, NULL), KVF_OK);
    assert_int_equal(outcome.calls, 0);
    forbids = EPERM;
    for (int turn = 0; turn < 1000; turn++)
        assert_int_equal(kvf_transport_progress(here.transport, NULL), KVF_OK);
    assert_int_equal(outcome.calls, 0);
    goes_by_a_shared_buffer(peer);
    drive(&here, &there, &outcome.calls, 1);
    assert_int_equal(outcome.status, KVF_OK);
    assert_memory_equal(side_memory(&here, 0), side_memory(&there, 0), count * 256);
    forbids = 0;
    side_close(&here);
    side_close(&there);
}

/* If the kernel copies, it reports the missing memory. An owner that serves touches its memory itself, and has to keep
 * it. */
static void memory_that_its_owner_unmapped_fails_the_batch_alone(void **state) {
    (void)state;
    static unsigned char local[16 * 4096];
    const uint64_t page = 4096;
    kvf_transport *here = NULL, *there = NULL;
    unsigned char *memory = mmap(NULL, 16 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    memset(memory, 5, 16 * page);
    kvf_memory remote = {.struct_size = sizeof(kvf_memory), .address = memory, .bytes = 16 * page},
               ours = {.struct_size = sizeof(kvf_memory), .address = local, .bytes = sizeof local};
    const kvf_setting direct = {"shm.direct", "on"};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = &direct, .setting_count = 1};
    assert_int_equal(kvf_transport_open("shm", &options, &here), KVF_OK);
    assert_int_equal(kvf_transport_open("shm", NULL, &there), KVF_OK);
    assert_int_equal(kvf_transport_register(here, &ours, 1), KVF_OK);
    assert_int_equal(kvf_transport_register(there, &remote, 1), KVF_OK);
    test_side a = {.transport = here}, b = {.transport = there};
    kvf_peer *peer = side_connect(&a, &b);
    /* Both have mapped what they need by now: no later mapping of theirs will fill the hole. */
    assert_int_equal(move_runs(&a, &b, peer, KVF_READ, &(kvf_run){0, 0, page, 0, 0}, 1), KVF_OK);
    (void)munmap(memory + 8 * page, page);
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++) {
        kvf_run across = {0, 0, 16 * page, 0, 0};
        kvf_run list[3] = {{0, 0, page, 0, 0}, {page, 8 * page, 10, 0, 0}, {2 * page, 9 * page, page, 0, 0}};
        kvf_run around = {0, 9 * page, 7 * page, 0, 0};
        assert_int_equal(move_runs(&a, &b, peer, (kvf_direction)direction, &across, 1), KVF_E_IO);
        assert_int_equal(move_runs(&a, &b, peer, (kvf_direction)direction, list, 3), KVF_E_IO);
        assert_int_equal(move_runs(&a, &b, peer, (kvf_direction)direction, &around, 1), KVF_OK);
        assert_memory_equal(local, memory + 9 * page, 7 * page);
    }
    kvf_transport_close(here);
    kvf_transport_close(there);
    (void)munmap(memory, 8 * page);
    (void)munmap(memory + 9 * page, 7 * page);
}

static void *allocate_nothing(void *context, size_t bytes) {
    (void)context, (void)bytes;
    return NULL;
}

static void *resize_nothing(void *context, void *memory, size_t bytes) {
    (void)context, (void)memory, (void)bytes;
    return NULL;
}

static void release(void *context, void *memory) {
    (void)context;
    free(memory);
}

static int allocate_again(void **state) {
    (void)state;
    return (int)kvf_set_allocator(NULL);
}

/* The owner has no memory for one more client. It once hung up without a word, as if its process had ended. */
static void an_owner_that_has_no_room_for_us_lives(void **state) {
    (void)state;
    static const pair_kind brought = {"shm", {false, false}, "shm", {0}};
    const kvf_allocator poor = {allocate_nothing, resize_nothing, release, NULL};
    test_side here, there;
    side_open(&here, &brought, 1);
    side_open(&there, &brought, 2);
    kvf_peer *peer = side_connect(&here, &there);
    assert_int_equal(kvf_set_allocator(&poor), KVF_OK);
    assert_int_equal(kvf_transport_progress(there.transport, NULL), KVF_OK);
    assert_int_equal(kvf_set_allocator(NULL), KVF_OK);
    drive(&here, &there, &here.lost, 1);
    assert_true(kvf_peer_lives(peer));
    assert_non_null(strstr(here.lost_detail, "refused"));
    side_close(&here);
    side_close(&there);
}

/* A process without /proc cannot tell its host. It was once said to be on another one. */
static void assert_no_way(const kvf_neighbour_place *here, const kvf_neighbour_place *there,
                          const char *why) {
    assert_int_equal(kvf_neighbour_check(here, there), KVF_E_UNSUPPORTED);
    assert_non_null(strstr(kvf_error_detail(), why));
}

static void a_host_that_is_unknown_is_not_said_to_be_another(void **state) {
    (void)state;
    const kvf_neighbour_place here = kvf_neighbour_here();
    kvf_neighbour_place unknown = here, other = here;
    memset(unknown.host, 0, sizeof unknown.host);
    other.host[0] ^= 1;
    assert_int_equal(kvf_neighbour_check(&here, &here), KVF_OK);
    assert_no_way(&here, &other, "the peer is on another host");
    assert_no_way(&here, &unknown, "the host of the peer is not known");
    assert_no_way(&unknown, &here, "the host of this process is not known");
    assert_no_way(&unknown, &unknown, "the host of this process is not known");
}

/* ---- whose end it is --------------------------------------------------------------------------- */

static struct rlimit descriptors_before;

/* This process can open so many more descriptors. */
static void leave_descriptors(int left) {
    const int next = dup(STDIN_FILENO); /* all lower numbers are open */
    assert_true(next >= 0);
    (void)close(next);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &descriptors_before), 0);
    const struct rlimit few = {(rlim_t)(next + left), descriptors_before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
}

static void give_descriptors_back(void) {
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &descriptors_before), 0);
}

/* Both regions are memory that the transport allocated. */
static const pair_kind allocated = {"shm", {true, true}, "shm", {0}};

/* We have lost the owner, and are told that it lives: it may connect again and write. */
static void require_lives(test_side *here, test_side *there, const kvf_peer *peer) {
    drive(here, there, &here->lost, 1);
    assert_true(kvf_peer_lives(peer));
}

/* Without a descriptor there is none for the connection: the owner once said that it had as many as it allows. With one,
 * none is left for the gate: it once hung up without a word. */
static void an_owner_with_descriptors_left_says_why_it_refuses(int left) {
    static const pair_kind brought = {"shm", {false, false}, "shm", {0}};
    test_side here, there;
    side_open(&here, &brought, 1);
    side_open(&there, &brought, 2);
    kvf_peer *peer = side_connect(&here, &there);
    leave_descriptors(left);
    for (int i = 0; i < 3; i++)
        assert_int_equal(kvf_transport_progress(there.transport, NULL), KVF_OK);
    give_descriptors_back();
    require_lives(&here, &there, peer);
    assert_non_null(strstr(here.lost_detail, "no memory or descriptor"));
    side_close(&here);
    side_close(&there);
}

static void an_owner_without_a_descriptor_for_us_lives(void **state) {
    (void)state;
    an_owner_with_descriptors_left_says_why_it_refuses(0);
    an_owner_with_descriptors_left_says_why_it_refuses(1);
}

/* Another thread may take the descriptor that the owner gives up for a moment. */
static void an_owner_whose_spare_descriptor_is_taken_sleeps_and_gets_another(void **state) {
    (void)state;
    static const pair_kind brought = {"shm", {false, false}, "shm", {0}};
    const kvf_run run = {0, 0, 100, 1, 1};
    test_side here, there;
    side_open(&here, &brought, 1);
    side_open(&there, &brought, 2);
    kvf_shm_endpoint *endpoint = there.transport->fabrics[0].endpoint;
    kvf_peer *peer = side_connect(&here, &there);
    drive_idle(&here, NULL);
    kvf_fd_close(&endpoint->spare_fd);
    leave_descriptors(0);
    uint32_t slept = 0;
    for (int i = 0; i < 200; i++) {
        struct pollfd wakes = {kvf_transport_event_fd(there.transport), POLLIN, 0};
        assert_int_equal(kvf_transport_progress(there.transport, NULL), KVF_OK);
        slept += poll(&wakes, 1, 0) == 0;
    }
    give_descriptors_back();
    assert_int_not_equal(slept, 0);
    assert_int_equal(move_runs(&here, &there, peer, KVF_READ, &run, 1), KVF_OK);
    assert_true(endpoint->spare_fd >= 0);
    side_close(&here);
    side_close(&there);
}

/* Takes all that this process may still have of something, and gives it back. */
typedef struct shortage {
    void (*begin)(void);
    void (*end)(void);
} shortage;

static void take_all_descriptors(void) {
    leave_descriptors(0);
}

static void take_addresses(void) {
    no_addresses = true;
}

static void give_addresses_back(void) {
    no_addresses = false;
}

static const shortage of_descriptors = {take_all_descriptors, give_descriptors_back},
                      of_addresses = {take_addresses, give_addresses_back};

/* The owner cannot map the buffer that we share with it. */
static void an_owner_runs_short(const shortage *what) {
    test_side here, there;
    test_outcome outcome = {0};
    const kvf_run run = {0, 0, 60000, 1, 1};
    side_open(&here, &raw_brought, 1);
    side_open(&there, &raw_brought, 2);
    kvf_peer *peer = side_connect(&here, &there);
    drive_idle(&here, &there);
    assert_int_equal(kvf_transport_submit(peer, KVF_READ, &run, 1, note_outcome, &outcome, NULL), KVF_OK);
    drive_idle(&here, NULL);
    what->begin();
    for (int i = 0; i < 3; i++)
        assert_int_equal(kvf_transport_progress(there.transport, NULL), KVF_OK);
    what->end();
    require_lives(&here, &there, peer);
    assert_non_null(strstr(here.lost_detail, "no memory or descriptor"));
    assert_int_equal(outcome.status, KVF_E_PEER_LOST);
    side_close(&here);
    side_close(&there);
}

static void an_owner_without_a_descriptor_for_our_buffer_lives(void **state) {
    (void)state;
    an_owner_runs_short(&of_descriptors);
}

/* The owner once said that our message made no sense. */
static void an_owner_without_addresses_for_our_buffer_says_so(void **state) {
    (void)state;
    an_owner_runs_short(&of_addresses);
}

/* The owner has sent a descriptor of its memory, and we cannot take or map it. */
static void a_reader_runs_short(const shortage *what, const char *reason) {
    test_side here, there;
    side_open(&here, &allocated, 1);
    side_open(&there, &allocated, 2);
    kvf_peer *peer = side_connect(&here, &there);
    drive_idle(NULL, &there);
    what->begin();
    assert_int_equal(kvf_transport_progress(here.transport, NULL), KVF_OK);
    what->end();
    require_lives(&here, &there, peer);
    assert_non_null(strstr(here.lost_detail, reason));
    side_close(&here);
    side_close(&there);
}

static void an_owner_for_whose_memory_we_have_no_descriptor_lives(void **state) {
    (void)state;
    a_reader_runs_short(&of_descriptors, "descriptor");
}

/* The owner was once said to contradict its card. */
static void an_owner_for_whose_memory_we_have_no_addresses_lives(void **state) {
    (void)state;
    a_reader_runs_short(&of_addresses, "shared bytes: Cannot allocate memory");
}

/* Of runs this short the owner would copy some into a buffer, for which a descriptor is needed. */
static void memory_that_can_be_read_directly_is_read_without_a_descriptor_for_a_buffer(void **state) {
    (void)state;
    static const pair_kind brought = {"shm", {false, false}, "shm", {0}};
    enum { RUNS = 1024, APART = 68, BYTES = 66 }; /* more than is read without asking */
    static kvf_run runs[RUNS];
    test_side here, there;
    test_outcome outcome = {0};
    side_open(&here, &brought, 1);
    side_open(&there, &brought, 2);
    kvf_peer *peer = side_connect(&here, &there);
    drive_idle(&here, &there);
    for (uint32_t i = 0; i < RUNS; i++)
        runs[i] = (kvf_run){i * APART, i * APART, BYTES, 1, 1};
    assert_int_equal(kvf_transport_submit(peer, KVF_READ, runs, RUNS, note_outcome, &outcome, NULL), KVF_OK);
    leave_descriptors(0);
    drive_idle(&here, NULL);
    give_descriptors_back();
    drive(&here, &there, &outcome.calls, 1);
    if (outcome.status == KVF_E_UNSUPPORTED)
        skip();
    assert_int_equal(outcome.status, KVF_OK);
    for (uint32_t i = 0; i < RUNS; i++)
        assert_memory_equal(side_memory(&here, 1) + i * APART, side_memory(&there, 1) + i * APART, BYTES);
    side_close(&here);
    side_close(&there);
}

/* It may be stopped for longer than we wait. */
static void an_owner_that_accepts_nobody_lives(void **state) {
    (void)state;
    test_side here, there;
    int fds[RAW_QUEUE_MAX];
    side_open(&here, &raw_brought, 1);
    side_open(&there, &raw_brought, 2);
    uint32_t count = raw_fill_queue(&there, fds);
    kvf_peer *peer = side_connect(&here, &there);
    ahead_s = 11;
    require_lives(&here, NULL, peer);
    assert_non_null(strstr(here.lost_detail, "queue is full"));
    ahead_s = 0;
    while (count > 0)
        (void)close(fds[--count]);
    side_close(&here);
    side_close(&there);
}

/* ---- at a bad moment --------------------------------------------------------------------------- */

/* Our memory faults when it is first touched, and the owner acts at that moment. */
static struct {
    test_side *here, *there;
    bool fences;
    kvf_status status;
} trap;

static void spring_trap(int number) {
    const void *card;
    size_t bytes;
    (void)number;
    if (trap.fences) {
        (void)kvf_transport_export(trap.here->transport, &card, &bytes);
        trap.status = kvf_transport_fence(trap.there->transport, card, bytes);
    } else {
        trap.status = kvf_transport_unregister_region(trap.there->transport, 0);
        memset(side_memory(trap.there, 0), 0xee, 4096);
    }
    (void)mprotect(side_memory(trap.here, 0), 2u << 20, PROT_READ | PROT_WRITE);
}

static kvf_status move_into_trap(test_side *here, test_side *there, bool fences, const kvf_peer **out) {
    const kvf_run read = {0, 0, 4096, 0, 0}, write = {0, 0, 2u << 20, 0, 0};
    test_outcome outcome = {0};
    struct sigaction action = {.sa_handler = spring_trap}, before;
    side_open(here, &allocated, 1);
    side_open(there, &allocated, 2);
    kvf_peer *peer = side_connect(here, there);
    drive_idle(here, there);
    trap.here = here;
    trap.there = there;
    trap.fences = fences;
    assert_int_equal(sigaction(SIGSEGV, &action, &before), 0);
    assert_int_equal(mprotect(side_memory(here, 0), 2u << 20, PROT_NONE), 0);
    assert_int_equal(kvf_transport_submit(peer, fences ? KVF_WRITE : KVF_READ, fences ? &write : &read, 1,
                                          note_outcome, &outcome, NULL),
                     KVF_OK);
    drive(here, NULL, &outcome.calls, 1);
    assert_int_equal(sigaction(SIGSEGV, &before, NULL), 0);
    *out = peer;
    return outcome.status;
}

/* The memory is the owner's alone again, and holds other bytes, before the last byte is read. */
static void a_read_of_memory_that_is_taken_back_meanwhile_has_not_moved(void **state) {
    (void)state;
    test_side here, there;
    const kvf_peer *peer;
    const kvf_status status = move_into_trap(&here, &there, false, &peer);
    assert_int_equal(trap.status, KVF_OK);
    assert_int_equal(side_memory(&here, 0)[4095], 0xee);
    assert_int_equal(status, KVF_E_PEER_LOST);
    assert_true(kvf_peer_lives(peer));
    side_close(&here);
    side_close(&there);
}

static void what_is_read_in_place_is_void_once_the_memory_is_taken_back(void **state) {
    (void)state;
    test_side here, there;
    side_open(&here, &allocated, 1);
    side_open(&there, &allocated, 2);
    kvf_peer *peer = side_connect(&here, &there);
    drive_idle(&here, &there);
    assert_non_null(kvf_peer_enter(peer, 1, KVF_READ));
    assert_int_equal(kvf_transport_unregister_region(there.transport, 0), KVF_OK);
    assert_int_equal(kvf_peer_leave(peer, KVF_READ, 1), KVF_E_PEER_LOST);
    side_close(&here);
    side_close(&there);
}

/* Each time the owner asked again, a peer that had connected meanwhile was lost, and its card was refused. */
static void a_peer_that_connects_while_a_region_is_taken_back_stays_connected(void **state) {
    (void)state;
    const kvf_run gone = {0, 0, 4096, 0, 0}, kept = {0, 0, 4096, 1, 1};
    test_side here, there, late;
    side_open(&here, &allocated, 1);
    side_open(&there, &allocated, 2);
    side_open(&late, &allocated, 3);
    kvf_peer *writer = side_connect(&here, &there);
    drive_idle(&here, &there);
    assert_non_null(kvf_peer_enter(writer, 1, KVF_WRITE));
    assert_int_equal(kvf_transport_unregister_region(there.transport, 0), KVF_E_AGAIN);
    kvf_peer *peer = side_connect(&late, &there), *back = side_connect(&there, &here);
    drive_idle(&late, &there);
    assert_int_equal(kvf_peer_region_bytes(peer, NULL)[0], 0);
    assert_int_equal(kvf_transport_submit(back, KVF_READ, &gone, 1, note_outcome, &(test_outcome){0}, NULL),
                     KVF_E_NOT_REGISTERED);
    assert_non_null(strstr(kvf_error_detail(), "local region 0 was unregistered"));
    assert_int_equal(kvf_transport_unregister_region(there.transport, 0), KVF_E_AGAIN);
    drive_idle(&late, &there);
    assert_int_equal(kvf_peer_leave(writer, KVF_WRITE, 1), KVF_E_PEER_LOST);
    assert_int_equal(kvf_transport_unregister_region(there.transport, 0), KVF_OK);
    drive_idle(&late, &there);
    assert_int_equal(late.lost, 0);
    assert_int_equal(kvf_transport_submit(peer, KVF_READ, &gone, 1, note_outcome, &(test_outcome){0}, NULL),
                     KVF_E_NOT_REGISTERED);
    assert_int_equal(move_runs(&late, &there, peer, KVF_READ, &kept, 1), KVF_OK);
    assert_memory_equal(side_memory(&late, 1), side_memory(&there, 1), 4096);
    side_close(&late);
    side_close(&here);
    side_close(&there);
}

/* Its owner has given up waiting for a writer that is stopped. It could not be registered again, and was half gone. */
static void a_region_that_is_being_taken_back_can_stay(void **state) {
    (void)state;
    static const pair_kind of_one_process = {"auto", {true, true}, "inproc", {0}};
    const kvf_run run = {0, 0, 4096, 0, 0};
    test_side here, there, late;
    side_open(&here, &allocated, 1);
    side_open(&there, &of_one_process, 2);
    side_open(&late, &of_one_process, 3);
    kvf_peer *writer = side_connect(&here, &there);
    drive_idle(&here, &there);
    assert_non_null(kvf_peer_enter(writer, 1, KVF_WRITE));
    assert_int_equal(kvf_transport_unregister_region(there.transport, 0), KVF_E_AGAIN);
    kvf_memory other = there.regions[0];
    other.bytes--;
    assert_int_equal(kvf_transport_register_region(there.transport, 0, &other), KVF_E_EXISTS);
    assert_int_equal(kvf_transport_register_region(there.transport, 0, &there.regions[0]), KVF_OK);
    assert_int_equal(kvf_transport_register_region(there.transport, 0, &there.regions[0]), KVF_E_EXISTS);
    kvf_peer *peer = side_connect(&late, &there);
    assert_string_equal(kvf_peer_kind(peer), "inproc");
    assert_int_equal(move_runs(&late, &there, peer, KVF_READ, &run, 1), KVF_OK);
    assert_memory_equal(side_memory(&late, 0), side_memory(&there, 0), 4096);
    assert_int_equal(kvf_transport_unregister_region(there.transport, 0), KVF_E_AGAIN);
    assert_int_equal(kvf_peer_leave(writer, KVF_WRITE, 1), KVF_E_PEER_LOST);
    assert_int_equal(kvf_transport_unregister_region(there.transport, 0), KVF_OK);
    side_close(&late);
    side_close(&here);
    side_close(&there);
}

/* It is shut out between two slices of a batch, and has not read the message that says so. */
static void an_owner_whose_gate_is_shut_lives(void **state) {
    (void)state;
    test_side here, there;
    const kvf_peer *peer;
    assert_int_equal(move_into_trap(&here, &there, true, &peer), KVF_E_PEER_LOST);
    assert_int_equal(trap.status, KVF_E_AGAIN);
    assert_true(kvf_peer_lives(peer));
    side_close(&here);
    side_close(&there);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_that_is_not_there_fails_the_batch_and_names_the_run),
        cmocka_unit_test(a_read_goes_on_without_an_owner_that_does_not_serve),
        cmocka_unit_test(where_the_kernel_forbids_it_the_owner_copies),
        cmocka_unit_test(what_the_owner_has_when_the_kernel_forbids_it_waits_for_the_owner),
        cmocka_unit_test(memory_that_its_owner_unmapped_fails_the_batch_alone),
        cmocka_unit_test_teardown(an_owner_that_has_no_room_for_us_lives, allocate_again),
        cmocka_unit_test(a_host_that_is_unknown_is_not_said_to_be_another),
        cmocka_unit_test(an_owner_without_a_descriptor_for_us_lives),
        cmocka_unit_test(an_owner_whose_spare_descriptor_is_taken_sleeps_and_gets_another),
        cmocka_unit_test(an_owner_without_a_descriptor_for_our_buffer_lives),
        cmocka_unit_test(an_owner_for_whose_memory_we_have_no_descriptor_lives),
        cmocka_unit_test(an_owner_for_whose_memory_we_have_no_addresses_lives),
        cmocka_unit_test(an_owner_without_addresses_for_our_buffer_says_so),
        cmocka_unit_test(memory_that_can_be_read_directly_is_read_without_a_descriptor_for_a_buffer),
        cmocka_unit_test(an_owner_that_accepts_nobody_lives),
        cmocka_unit_test(a_read_of_memory_that_is_taken_back_meanwhile_has_not_moved),
        cmocka_unit_test(what_is_read_in_place_is_void_once_the_memory_is_taken_back),
        cmocka_unit_test(a_peer_that_connects_while_a_region_is_taken_back_stays_connected),
        cmocka_unit_test(a_region_that_is_being_taken_back_can_stay),
        cmocka_unit_test(an_owner_whose_gate_is_shut_lives),
    };
    return cmocka_run_group_tests_name("transport_shm", tests, NULL, NULL);
}
