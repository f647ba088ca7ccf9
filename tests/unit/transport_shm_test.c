/* What only the same-host transport can meet: the memory of another process, as the kernel sees it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "transport/transport.h"
#include "transport_pair.h"

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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_that_is_not_there_fails_the_batch_and_names_the_run),
        cmocka_unit_test(a_read_goes_on_without_an_owner_that_does_not_serve),
        cmocka_unit_test(memory_that_its_owner_unmapped_fails_the_batch_alone),
        cmocka_unit_test_teardown(an_owner_that_has_no_room_for_us_lives, allocate_again),
    };
    return cmocka_run_group_tests_name("transport_shm", tests, NULL, NULL);
}
