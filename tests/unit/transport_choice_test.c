/*
 * The choice between copying alone and asking the owner, with simulated costs and time: the time that a transfer takes
 * with its choices, compared with the time that each way would take by itself.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "transport/shm/shm_choice.h"

#define SLOTS 4u
#define MIB (1ull << 20)
#define NEVER UINT64_MAX

/* Two processes and the costs of their work, in nanoseconds a byte unless the field says otherwise. */
typedef struct machine {
    uint64_t run_bytes;
    double read, take, serve;
    double hurt;      /* by which factor reads take longer while the owner works; 0: no longer */
    uint64_t wake_ns; /* to wake an idle owner */
    uint64_t stop_ns; /* the owner does not answer from then on */
    struct {
        uint64_t after_ns, ns;
    } aside; /* this side is suspended once, after so much work and for so long; 0: never */
} machine;

typedef struct transfer {
    const machine *on;
    kvf_shm_choice *choice; /* NULL: the owner does all work */
    uint64_t now, owner_free, left;
    struct {
        uint64_t bytes, ready; /* ready: NEVER if the owner does not answer */
    } slots[SLOTS];
    kvf_shm_load load;
    uint64_t alone_bytes;
    uint64_t worked_ns;
} transfer;

static kvf_slice slice_of(const machine *on, uint64_t bytes) {
    return (kvf_slice){.count = bytes / on->run_bytes ? bytes / on->run_bytes : 1, .bytes = bytes};
}

static void work(transfer *t, double ns) {
    const bool before = t->worked_ns < t->on->aside.after_ns;
    t->worked_ns += (uint64_t)ns;
    t->now += (uint64_t)ns + (before && t->worked_ns >= t->on->aside.after_ns ? t->on->aside.ns : 0);
}

static void ask(transfer *t, uint64_t bytes) {
    uint32_t slot = 0;
    while (t->slots[slot].bytes)
        slot++;
    if (t->choice)
        kvf_shm_choice_asked(t->choice, t->load.waiting > 0, t->now);
    t->now += 2000;
    uint64_t begin = t->owner_free > t->now ? t->owner_free : t->now + t->on->wake_ns;
    t->owner_free = begin + (uint64_t)(t->on->serve * (double)bytes);
    t->slots[slot].bytes = bytes;
    t->slots[slot].ready = t->on->stop_ns && t->owner_free > t->on->stop_ns ? NEVER : t->owner_free;
    t->load.waiting++;
    t->left -= bytes;
}

static void read_alone(transfer *t, uint64_t bytes) {
    double ns = 1000 + t->on->read * (double)bytes;
    if (t->on->hurt > 0 && t->owner_free > t->now)
        ns *= t->on->hurt;
    kvf_slice slice = slice_of(t->on, bytes);
    uint64_t begin = t->now;
    work(t, ns);
    kvf_shm_choice_read(t->choice, &slice, t->now - begin, t->now);
    t->alone_bytes += bytes;
}

/* Takes the first answer that is ready. */
static bool take_answer(transfer *t) {
    for (uint32_t i = 0; i < SLOTS; i++) {
        if (!t->slots[i].bytes || t->slots[i].ready > t->now)
            continue;
        kvf_slice slice = slice_of(t->on, t->slots[i].bytes);
        if (t->choice)
            kvf_shm_choice_answered(t->choice, true, t->now);
        work(t, t->on->take * (double)slice.bytes);
        if (t->choice)
            kvf_shm_choice_taken(t->choice, &slice, t->now);
        t->slots[i].bytes = 0;
        t->load.waiting--;
        return true;
    }
    return false;
}

static uint64_t next_answer(const transfer *t) {
    uint64_t next = NEVER;
    for (uint32_t i = 0; i < SLOTS; i++)
        if (t->slots[i].bytes && t->slots[i].ready < next)
            next = t->slots[i].ready;
    return next;
}

/* Waits for the slots that the owner still has, when nothing else is left to do. */
static void wait_for_owner(transfer *t) {
    uint64_t next = next_answer(t), alone_ns = 0;
    for (uint32_t i = 0; i < SLOTS; i++) {
        kvf_slice slice = slice_of(t->on, t->slots[i].bytes);
        if (t->slots[i].bytes && t->choice)
            alone_ns += kvf_shm_choice_direct_ns(t->choice, &slice);
    }
    if (t->choice)
        kvf_shm_choice_idle(t->choice);
    if (!t->choice || next <= t->choice->since_ns + alone_ns) {
        t->now = next;
        return;
    }
    t->now = kvf_max_u64(t->now, t->choice->since_ns + alone_ns) + alone_ns;
    kvf_shm_choice_abandoned(t->choice);
    t->load.waiting = 0;
}

/* The nanoseconds that a transfer of so many bytes takes if the link was idle before. */
static uint64_t transfer_ns(const machine *on, kvf_shm_choice *choice, uint64_t bytes,
                            uint64_t *alone_bytes) {
    transfer t = {.on = on, .choice = choice, .now = 1, .left = bytes, .load = {.slots = SLOTS}};
    if (choice)
        t.now = choice->answered_ns + 1000000;
    uint64_t begin = t.now;
    while (t.left > 0 || t.load.waiting > 0) {
        if (take_answer(&t))
            continue;
        uint64_t most = t.left < 1024 * on->run_bytes ? t.left : 1024 * on->run_bytes;
        kvf_slice slice = slice_of(on, most);
        kvf_shm_step step = {SHM_WAY_SERVED, SHM_SLOT_BYTES, 0};
        if (t.left > 0 && choice)
            step = kvf_shm_choice_make(choice, &slice, &t.load, t.now);
        uint64_t here = step.bytes < most ? step.bytes : most;
        if (here == 0 && t.left > 0) {
            t.now = kvf_min_u64(step.until_ns, next_answer(&t));
            continue;
        }
        if (t.left > 0 && step.way == SHM_WAY_DIRECT) {
            read_alone(&t, here);
            t.left -= here;
        } else if (t.left > 0 && t.load.waiting < SLOTS) {
            ask(&t, here);
        } else {
            wait_for_owner(&t);
        }
    }
    if (alone_bytes)
        *alone_bytes = t.alone_bytes;
    return t.now - begin;
}

static double direct_ns(const machine *on, uint64_t bytes) {
    return on->read * (double)bytes + 1000 * (double)bytes / (double)SHM_SLOT_BYTES;
}

static void assert_near(const machine *on, kvf_shm_choice *choice, uint64_t bytes, double better) {
    double ns = (double)transfer_ns(on, choice, bytes, NULL);
    if (ns * 0.9 > better)
        fail_msg("runs of %llu: read %g, take %g, serve %g: %g ns, and %g are possible",
                 (unsigned long long)on->run_bytes, on->read, on->take, on->serve, ns, better);
}

/* From runs of 128 bytes, for which a call costs 20 times as much as the copy, to long runs; and owners of which some
 * are ten times as slow as others. */
static void it_takes_no_longer_than_the_better_way_whatever_they_cost(void **state) {
    (void)state;
    static const struct {
        uint64_t run_bytes;
        double read;
    } lengths[] = {{128, 5}, {256, 2.4}, {1024, 0.9}, {2944, 0.3}, {16384, 0.19}, {262144, 0.13}};
    static const double serves[] = {0.05, 0.1, 0.2, 0.5, 2, 8}, takes[] = {0.05, 0.09, 0.12};
    for (size_t i = 0; i < 6 * 6 * 3; i++) {
        machine on = {lengths[i % 6].run_bytes,
                      lengths[i % 6].read,
                      takes[i / 36],
                      serves[i / 6 % 6],
                      0,
                      50000,
                      0,
                      {0}};
        kvf_shm_choice choice = {0};
        double direct = direct_ns(&on, 128 * MIB), served = (double)transfer_ns(&on, NULL, 128 * MIB, NULL);
        double better = direct < served ? direct : served;
        assert_near(&on, &choice, 128 * MIB, better);
        assert_near(&on, &choice, 128 * MIB, better); /* again, with what the choice has learned */
    }
}

static void an_owner_that_does_not_answer_costs_nothing(void **state) {
    (void)state;
    static const uint64_t sizes[] = {MIB / 8, MIB / 4, MIB, 8 * MIB, 128 * MIB};
    for (size_t i = 0; i < 5 * 3; i++) {
        static const machine machines[] = {{256, 2.4, 0.1, 0.15, 0, 50000, 1, {0}},
                                           {2944, 0.3, 0.1, 0.15, 0, 50000, 1, {0}},
                                           {262144, 0.13, 0.05, 0.07, 0, 50000, 1, {0}}};
        const machine *on = &machines[i % 3];
        kvf_shm_choice choice = {0};
        /* The choice may cost some short calls more than the better way. */
        assert_near(on, &choice, sizes[i / 3], direct_ns(on, sizes[i / 3]) + 10000);
    }
}

static void an_owner_that_stops_in_the_middle_costs_what_it_had(void **state) {
    (void)state;
    for (uint64_t stop = 100000; stop < 20000000; stop += 300000) {
        machine on = {2944, 0.3, 0.1, 0.15, 0, 50000, stop, {0}};
        kvf_shm_choice choice = {0};
        assert_near(&on, &choice, 64 * MIB, direct_ns(&on, (64 + SLOTS) * MIB));
    }
}

static void where_the_owner_is_in_the_way_it_is_left_alone(void **state) {
    (void)state;
    /* Both share a processor: while the owner works, reads take twice as long, and the owner itself is slow. */
    machine on = {16384, 0.2, 0.1, 0.8, 2, 50000, 0, {0}};
    kvf_shm_choice choice = {0};
    (void)transfer_ns(&on, &choice, 512 * MIB, NULL); /* then the costs of both ways are known */
    uint64_t alone;
    double ns = (double)transfer_ns(&on, &choice, 256 * MIB, &alone);
    assert_true(ns <= 1.1 * direct_ns(&on, 256 * MIB));
    assert_true(alone > 250 * MIB);
    on.hurt = 0; /* the owner has a processor of its own again */
    on.serve = 0.1;
    for (int i = 0; i < 16; i++)
        (void)transfer_ns(&on, &choice, 128 * MIB, NULL);
    (void)transfer_ns(&on, &choice, 128 * MIB, &alone);
    assert_true(alone < 64 * MIB);
}

/* Like a scheduler: in the middle of the first measurement, and of one measurement in each later transfer. */
static void being_set_aside_for_a_while_does_not_make_a_way_look_slow(void **state) {
    (void)state;
    static const machine machines[] = {{256, 2.4, 0.1, 0.15, 0, 50000, 0, {500000, 6000000}},
                                       {2944, 0.3, 0.1, 0.15, 0, 50000, 0, {500000, 6000000}},
                                       {2944, 0.3, 0.1, 0.15, 0, 50000, 0, {500000, 300000000}}};
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        kvf_shm_choice choice = {0};
        uint64_t alone;
        (void)transfer_ns(&machines[i], &choice, 64 * MIB, NULL);
        (void)transfer_ns(&machines[i], &choice, 64 * MIB, &alone);
        assert_true(alone < 32 * MIB);
    }
}

static void for_little_the_owner_is_not_woken(void **state) {
    (void)state;
    const kvf_slice little = {.count = 16, .bytes = 16 * 256};
    const kvf_shm_choice choice = {0};
    kvf_shm_load load = {.slots = SLOTS};
    assert_int_equal(kvf_shm_choice_make(&choice, &little, &load, 1).way, SHM_WAY_DIRECT);
}

static void it_is_asked_for_little_first_and_not_before_it_has_answered_all(void **state) {
    (void)state;
    const kvf_slice slice = {.count = 1024, .bytes = MIB};
    kvf_shm_choice choice = {0};
    kvf_shm_load load = {.slots = SLOTS};
    kvf_shm_step first = kvf_shm_choice_make(&choice, &slice, &load, 1000);
    assert_int_equal(first.way, SHM_WAY_SERVED);
    assert_true(first.bytes == 65536);
    kvf_shm_choice_asked(&choice, false, 1000);
    load.waiting = 1;
    assert_int_equal(kvf_shm_choice_make(&choice, &slice, &load, 2000).way, SHM_WAY_DIRECT);
    kvf_shm_choice_answered(&choice, true, 3000);
    assert_int_equal(kvf_shm_choice_make(&choice, &slice, &load, 3000).way, SHM_WAY_SERVED);
    load = (kvf_shm_load){SLOTS, 0, 1};
    assert_int_equal(kvf_shm_choice_make(&choice, &slice, &load, 4000).way, SHM_WAY_DIRECT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_takes_no_longer_than_the_better_way_whatever_they_cost),
        cmocka_unit_test(an_owner_that_does_not_answer_costs_nothing),
        cmocka_unit_test(an_owner_that_stops_in_the_middle_costs_what_it_had),
        cmocka_unit_test(where_the_owner_is_in_the_way_it_is_left_alone),
        cmocka_unit_test(being_set_aside_for_a_while_does_not_make_a_way_look_slow),
        cmocka_unit_test(for_little_the_owner_is_not_woken),
        cmocka_unit_test(it_is_asked_for_little_first_and_not_before_it_has_answered_all),
    };
    return cmocka_run_group_tests_name("transport_choice", tests, NULL, NULL);
}
