/* What only the same-host transport can meet: the memory of another process as the kernel shows it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "transport/shm/shm_choice.h"
#include "transport_pair.h"

/* Opens an endpoint over memory whose second half of pages is not there. */
static kvf_transport *open_over_hole(unsigned char **memory, size_t half) {
    kvf_transport *transport = NULL;
    *memory = mmap(NULL, 2 * half, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(*memory, MAP_FAILED);
    kvf_memory region = {sizeof(kvf_memory), *memory, 2 * half, KVF_MEMORY_HOST, 0};
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
                       "owner: 100 bytes at offset %zu of its region 0: process_vm_%s: Bad address",
                       half + 700, direction == KVF_READ ? "readv" : "writev");
        assert_non_null(strstr(outcome.detail, run));
    }
    assert_int_equal(move_runs(&here, &there, peer, KVF_READ, runs, 2), KVF_OK);
    side_close(&here);
    kvf_transport_close(there.transport);
    assert_int_equal(munmap(memory, half), 0);
}

/* Runs of 256 bytes, of which the shared buffer would be the faster way. */
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
        assert_int_equal(move_runs(&here, &there, peer, KVF_READ, runs, 1), KVF_OK); /* it has answered */
        size_t count = short_runs(&here, runs, sizeof runs / sizeof *runs);
        test_outcome outcome = {0};
        assert_int_equal(kvf_transport_submit(peer, KVF_READ, runs, count, note_outcome, &outcome, NULL),
                         KVF_OK);
        if (i == 2) {
            for (int turn = 0; turn < 1000; turn++)
                assert_int_equal(kvf_transport_progress(here.transport, NULL), KVF_OK);
            assert_int_equal(outcome.calls, 0); /* where only the owner can, it must */
        }
        drive(&here, i == 2 ? &there : NULL, &outcome.calls, 1);
        assert_int_equal(outcome.status, KVF_OK);
        assert_memory_equal(side_memory(&here, 0), side_memory(&there, 0), count * 256);
        /* What it answers late is nobody's, and it is asked again. */
        drive_idle(&here, &there);
        side_fill(side_memory(&here, 0), 1, 0, here.regions[0].bytes);
        assert_int_equal(move_runs(&here, &there, peer, KVF_READ, runs, count), KVF_OK);
        assert_memory_equal(side_memory(&here, 0), side_memory(&there, 0), count * 256);
        side_close(&here);
        side_close(&there);
    }
}

/* ---- the choice between the ways ------------------------------------------------------------- */

static const kvf_slice short_slice = {.count = 1024, .bytes = 1024 * 256};
static const kvf_slice long_slice = {.count = 4, .bytes = 4 << 18};

/* How many of `count` slices go through the buffer. */
static uint32_t served(kvf_shm_choice *choice, const kvf_slice *slice, uint32_t count) {
    uint32_t by_owner = 0;
    for (uint32_t i = 0; i < count; i++)
        by_owner += kvf_shm_choice_make(choice, slice, true) == SHM_WAY_SERVED;
    return by_owner;
}

static void short_runs_are_served_until_measured_otherwise(void **state) {
    (void)state;
    kvf_shm_choice choice = {0};
    assert_int_equal(served(&choice, &short_slice, 8), 8);
    for (int i = 0; i < 50; i++) {
        kvf_shm_choice_learn(&choice, SHM_WAY_SERVED, &short_slice, 1000000);
        kvf_shm_choice_learn(&choice, SHM_WAY_DIRECT, &short_slice, 100000);
    }
    assert_int_equal(served(&choice, &short_slice, 100), 0);
    assert_int_equal(served(&choice, &long_slice, 2), 2); /* another length, of which nothing is known */
}

static void the_other_way_is_tried_now_and_then(void **state) {
    (void)state;
    kvf_shm_choice choice = {0};
    kvf_shm_choice_learn(&choice, SHM_WAY_SERVED, &short_slice, 100000);
    kvf_shm_choice_learn(&choice, SHM_WAY_DIRECT, &short_slice, 1000000);
    /* One slice of 256 KiB after each 64 MiB. */
    assert_int_equal(served(&choice, &short_slice, 2571), 2571 - 10);
}

static void an_owner_that_let_us_wait_is_left_alone_for_a_while(void **state) {
    (void)state;
    kvf_shm_choice choice = {0};
    kvf_shm_choice_stalled(&choice);
    uint64_t first = choice.pause_ns;
    assert_int_equal(served(&choice, &short_slice, 1), 0);
    kvf_shm_choice_stalled(&choice);
    assert_true(choice.pause_ns == 2 * first);
    choice.served_after_ns = 1; /* the pause is over */
    kvf_shm_choice_answered(&choice);
    assert_int_equal(served(&choice, &short_slice, 1), 1);
    kvf_shm_choice_stalled(&choice);
    assert_true(choice.pause_ns == first);
}

static void for_little_the_owner_is_not_woken(void **state) {
    (void)state;
    kvf_shm_choice choice = {0};
    const kvf_slice little = {.count = 16, .bytes = 16 * 256};
    assert_int_equal(kvf_shm_choice_make(&choice, &little, false), SHM_WAY_DIRECT);
    assert_int_equal(kvf_shm_choice_make(&choice, &little, true), SHM_WAY_SERVED);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_that_is_not_there_fails_the_batch_and_names_the_run),
        cmocka_unit_test(a_read_goes_on_without_an_owner_that_does_not_serve),
        cmocka_unit_test(short_runs_are_served_until_measured_otherwise),
        cmocka_unit_test(the_other_way_is_tried_now_and_then),
        cmocka_unit_test(an_owner_that_let_us_wait_is_left_alone_for_a_while),
        cmocka_unit_test(for_little_the_owner_is_not_woken),
    };
    return cmocka_run_group_tests_name("transport_shm", tests, NULL, NULL);
}
