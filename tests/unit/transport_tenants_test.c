/* What one process may take from an owner over the same-host transport: turns, connections, memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "transport/shm/shm_tenants.h"

#define SEATS 4
#define PROCESSES 3

/* Processes 1 to 3, each with some connections. */
typedef struct house {
    kvf_shm_tenants tenants;
    kvf_shm_tenant *of[PROCESSES];
    kvf_shm_seat seats[PROCESSES][SEATS];
} house;

static kvf_shm_refusal admit(house *h, kvf_shm_tenant *tenant) {
    uint64_t limit;
    kvf_shm_tenant *loser;
    return kvf_shm_tenants_admit(&h->tenants, tenant, &limit, &loser);
}

static house *house_open(uint64_t descriptors) {
    house *h = calloc(1, sizeof *h);
    assert_non_null(h);
    kvf_shm_tenants_open(&h->tenants, descriptors);
    for (int i = 0; i < PROCESSES; i++) {
        h->of[i] = kvf_shm_tenants_enter(&h->tenants, i + 1);
        assert_int_equal(admit(h, h->of[i]), 0);
    }
    return h;
}

static void leave_all(house *h, kvf_shm_tenant *tenant) {
    for (uint32_t left = tenant->clients; left > 0; left--)
        kvf_shm_tenants_leave(&h->tenants, tenant, true);
}

static void house_close(house *h) {
    for (int i = 0; i < PROCESSES; i++) {
        for (int s = 0; s < SEATS; s++)
            kvf_shm_tenants_stop_waiting(&h->seats[i][s]);
        leave_all(h, h->of[i]);
    }
    assert_int_equal(h->tenants.clients, 0);
    assert_int_equal(h->tenants.strangers, 0);
    assert_int_equal(h->tenants.buffer_bytes, 0);
    assert_null(h->tenants.all);
    free(h);
}

static void wants(house *h, int process, int seat) {
    kvf_shm_tenants_wait(&h->tenants, h->of[process], &h->seats[process][seat]);
}

/* One step of the process whose turn it is, which takes so much work and then wants more; returns the process. */
static int step(house *h, const uint64_t work[PROCESSES]) {
    kvf_shm_tenant *whose = NULL;
    kvf_shm_seat *seat = kvf_shm_tenants_next(&h->tenants, &whose);
    assert_non_null(seat);
    int process = whose->process - 1;
    kvf_shm_tenants_spend(&h->tenants, whose, work[process]);
    kvf_shm_tenants_wait(&h->tenants, whose, seat);
    return process;
}

/* ---- turns ----------------------------------------------------------------------------------- */

static void work_is_shared_out_by_process_whatever_a_message_takes(void **state) {
    (void)state;
    static const uint64_t work[PROCESSES] = {16u << 10, 300u << 10, 1600u << 10};
    house *h = house_open(1024);
    uint64_t had[PROCESSES] = {0};
    for (int i = 0; i < PROCESSES; i++)
        for (int s = 0; s < SEATS - i; s++) /* however many connections a process has */
            wants(h, i, s);
    for (int i = 0; i < 5000; i++) {
        int process = step(h, work);
        had[process] += work[process];
    }
    for (int i = 1; i < PROCESSES; i++) {
        assert_true(had[i] <= had[0] + (1600u << 10) + SHM_TURN_WORK);
        assert_true(had[0] <= had[i] + (1600u << 10) + SHM_TURN_WORK);
    }
    house_close(h);
}

static void connections_of_a_process_take_turns(void **state) {
    (void)state;
    house *h = house_open(1024);
    for (int s = 0; s < SEATS; s++)
        wants(h, 0, s);
    for (int i = 0; i < 3 * SEATS; i++) {
        kvf_shm_tenant *whose = NULL;
        kvf_shm_seat *seat = kvf_shm_tenants_next(&h->tenants, &whose);
        assert_ptr_equal(seat, &h->seats[0][i % SEATS]);
        kvf_shm_tenants_spend(&h->tenants, whose, 1u << 20);
        kvf_shm_tenants_wait(&h->tenants, whose, seat);
    }
    house_close(h);
}

/* Two processes always want the largest messages, a third a small one now and then: it waits for one of the large
 * messages at most. */
static void one_that_wants_little_does_not_wait_for_those_that_want_a_lot(void **state) {
    (void)state;
    static const uint64_t work[PROCESSES] = {300u << 10, 1040u << 10, 1040u << 10};
    house *h = house_open(1024);
    wants(h, 1, 0);
    wants(h, 2, 0);
    for (int i = 0; i < 100; i++)
        (void)step(h, work);
    kvf_shm_tenant *whose = NULL;
    for (int i = 0; i < 20; i++) {
        wants(h, 0, 0);
        int before = 0;
        kvf_shm_seat *seat;
        while ((seat = kvf_shm_tenants_next(&h->tenants, &whose)) != &h->seats[0][0]) {
            kvf_shm_tenants_spend(&h->tenants, whose, work[1]);
            kvf_shm_tenants_wait(&h->tenants, whose, seat);
            before++;
        }
        kvf_shm_tenants_spend(&h->tenants, whose, 100u << 10);
        assert_true(before <= 1);
    }
    house_close(h);
}

static void nobody_waits_where_nobody_wants_anything(void **state) {
    (void)state;
    house *h = house_open(1024);
    kvf_shm_tenant *whose = NULL;
    assert_null(kvf_shm_tenants_next(&h->tenants, &whose));
    wants(h, 0, 0);
    wants(h, 0, 0); /* asking twice counts once */
    wants(h, 1, 0);
    kvf_shm_tenants_stop_waiting(&h->seats[0][0]);
    kvf_shm_tenants_stop_waiting(&h->seats[0][0]);
    assert_ptr_equal(kvf_shm_tenants_next(&h->tenants, &whose), &h->seats[1][0]);
    assert_ptr_equal(whose, h->of[1]);
    assert_null(kvf_shm_tenants_next(&h->tenants, &whose));
    house_close(h);
}

/* The work that the door does for strangers in the second from `now_ns` on, if they always want something. */
static uint64_t door_work_of_a_second(house *h, uint64_t now_ns) {
    uint64_t work = 0;
    for (uint64_t past_ns = 0; past_ns < 1000000000u; past_ns += 100000)
        while (kvf_shm_tenants_opens_door(&h->tenants, now_ns + past_ns)) {
            kvf_shm_tenants_spend(&h->tenants, &h->tenants.door, SHM_CONNECTION_WORK);
            work += SHM_CONNECTION_WORK;
        }
    return work;
}

static void strangers_have_a_thousand_connections_at_once_and_then_an_eighth_of_the_time(void **state) {
    (void)state;
    house *h = house_open(1024);
    uint64_t now_ns = 1ull << 60, second = 1000 * (uint64_t)SHM_DOOR_WORK_PER_MS;
    uint64_t first = door_work_of_a_second(h, now_ns);
    assert_true(first >= SHM_DOOR_WORK + second * 9 / 10 && first <= SHM_DOOR_WORK + second * 11 / 10);
    uint64_t next = door_work_of_a_second(h, now_ns + 1000000000u);
    assert_true(next >= second * 9 / 10 && next <= second * 11 / 10);
    uint64_t later = door_work_of_a_second(h, now_ns + 100000000000u);
    assert_true(later >= first * 9 / 10 && later <= first * 11 / 10);
    house_close(h);
}

/* ---- connections ----------------------------------------------------------------------------- */

/* One more connection of a known process. */
static kvf_shm_refusal one_more(house *h, int process, uint64_t *limit, kvf_shm_tenant **loser) {
    kvf_shm_tenant *tenant = kvf_shm_tenants_enter(&h->tenants, process + 1);
    assert_ptr_equal(tenant, h->of[process]);
    kvf_shm_refusal over = kvf_shm_tenants_admit(&h->tenants, tenant, limit, loser);
    if (over)
        kvf_shm_tenants_leave(&h->tenants, tenant, false);
    return over;
}

static void a_process_has_64_connections(void **state) {
    (void)state;
    house *h = house_open(100000);
    uint64_t limit;
    kvf_shm_tenant *loser;
    for (int i = 1; i < 64; i++)
        assert_int_equal(one_more(h, 0, &limit, &loser), 0);
    assert_int_equal(one_more(h, 0, &limit, &loser), SHM_REFUSED_LIMIT);
    assert_int_equal(limit, 64);
    assert_int_equal(one_more(h, 1, &limit, &loser), 0); /* other processes have limits of their own */
    assert_null(loser);
    kvf_shm_tenants_leave(&h->tenants, h->of[0], true);
    assert_int_equal(one_more(h, 0, &limit, &loser), 0);
    house_close(h);
}

static void all_have_half_of_the_descriptors_and_the_one_with_most_gives_way(void **state) {
    (void)state;
    house *h = house_open(40);
    uint64_t limit;
    kvf_shm_tenant *loser;
    for (int i = 3; i < 20; i++)
        assert_int_equal(one_more(h, 0, &limit, &loser), 0);
    assert_int_equal(h->tenants.clients, 20);
    assert_int_equal(one_more(h, 0, &limit, &loser), SHM_REFUSED_FULL);
    assert_int_equal(limit, 20);
    assert_int_equal(one_more(h, 1, &limit, &loser), 0);
    assert_ptr_equal(loser, h->of[0]);
    kvf_shm_tenants_leave(&h->tenants, loser, true);
    assert_int_equal(h->tenants.clients, 20);
    house_close(h);
}

static void processes_that_cannot_be_told_apart_have_half_of_the_room(void **state) {
    (void)state;
    house *h = house_open(400);
    for (int i = 0; i < 100; i++)
        assert_int_equal(admit(h, kvf_shm_tenants_enter(&h->tenants, 0)), 0);
    kvf_shm_tenant *unknown = kvf_shm_tenants_enter(&h->tenants, 0);
    assert_int_equal(admit(h, unknown), SHM_REFUSED_LIMIT);
    kvf_shm_tenants_leave(&h->tenants, unknown, false);
    leave_all(h, unknown);
    house_close(h);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* How much of a buffer of eight slots of 1 MiB the owner takes. */
static uint64_t take(house *h, int process) {
    uint64_t slot_bytes = 1u << 20;
    uint32_t slots = SHM_SLOTS_MAX;
    kvf_shm_tenants_take_buffer(&h->tenants, h->of[process], &slot_bytes, &slots);
    assert_true(slots == SHM_SLOTS_MAX || slots == 1);
    return slot_bytes * slots;
}

static void buffers_of_a_process_have_a_budget_and_everybody_has_a_small_one(void **state) {
    (void)state;
    house *h = house_open(1024);
    assert_int_equal(take(h, 0), 8u << 20);
    assert_int_equal(take(h, 0), 8u << 20);
    assert_int_equal(take(h, 0), SHM_BUFFER_BYTES_LEAST);
    assert_int_equal(take(h, 1), 8u << 20);
    assert_int_equal(h->tenants.buffer_bytes, (24u << 20) + SHM_BUFFER_BYTES_LEAST);
    kvf_shm_tenants_drop_buffer(&h->tenants, h->of[0], SHM_BUFFER_BYTES_LEAST);
    kvf_shm_tenants_drop_buffer(&h->tenants, h->of[0], 8u << 20);
    assert_int_equal(take(h, 0), 8u << 20);
    kvf_shm_tenants_drop_buffer(&h->tenants, h->of[0], 16u << 20);
    kvf_shm_tenants_drop_buffer(&h->tenants, h->of[1], 8u << 20);
    house_close(h);
}

static void buffers_of_all_have_a_budget(void **state) {
    (void)state;
    house *h = house_open(1024);
    kvf_shm_tenant *others[8];
    uint64_t taken = 0;
    for (int i = 0; i < 8; i++) { /* 8 x 8 MiB are all that the owner takes */
        uint64_t slot_bytes = 1u << 20;
        uint32_t slots = 8;
        others[i] = kvf_shm_tenants_enter(&h->tenants, 100 + i);
        kvf_shm_tenants_take_buffer(&h->tenants, others[i], &slot_bytes, &slots);
        taken += slot_bytes * slots;
    }
    assert_int_equal(taken, SHM_BUFFERS_BYTES);
    assert_int_equal(take(h, 0), SHM_BUFFER_BYTES_LEAST);
    kvf_shm_tenants_drop_buffer(&h->tenants, h->of[0], SHM_BUFFER_BYTES_LEAST);
    for (int i = 0; i < 8; i++) {
        kvf_shm_tenants_drop_buffer(&h->tenants, others[i], 8u << 20);
        kvf_shm_tenants_leave(&h->tenants, others[i], false);
    }
    house_close(h);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(work_is_shared_out_by_process_whatever_a_message_takes),
        cmocka_unit_test(connections_of_a_process_take_turns),
        cmocka_unit_test(one_that_wants_little_does_not_wait_for_those_that_want_a_lot),
        cmocka_unit_test(nobody_waits_where_nobody_wants_anything),
        cmocka_unit_test(strangers_have_a_thousand_connections_at_once_and_then_an_eighth_of_the_time),
        cmocka_unit_test(a_process_has_64_connections),
        cmocka_unit_test(all_have_half_of_the_descriptors_and_the_one_with_most_gives_way),
        cmocka_unit_test(processes_that_cannot_be_told_apart_have_half_of_the_room),
        cmocka_unit_test(buffers_of_a_process_have_a_budget_and_everybody_has_a_small_one),
        cmocka_unit_test(buffers_of_all_have_a_budget),
    };
    return cmocka_run_group_tests_name("transport_tenants", tests, NULL, NULL);
}
