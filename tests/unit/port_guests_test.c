/* Which connections are closed if there are too many, or if nothing is sent over them. */
#include <stdio.h>

#include "port/guests.h"
#include "shapes.h"

#define SECONDS(n) ((n)*UINT64_C(1000000000))

typedef struct house {
    kvf_guests guests;
    uint64_t gone[64], gone_count;
    uint64_t known_below; /* routes below it are known */
    char crowded[256];
    uint32_t muted;  /* how many guests were muted */
    bool deaf;       /* muting fails */
    uint32_t looked; /* how often is_known() was called */
} house;

static bool is_known(void *context, uint64_t route) {
    house *h = context;
    h->looked++;
    return route < h->known_below;
}

static void hang_up(void *owner, kvf_guest *guest) {
    house *h = owner;
    assert_true(h->gone_count < COUNT_OF(h->gone));
    h->gone[h->gone_count++] = guest->id;
}

static bool mute(void *owner, const kvf_guest *guest) {
    house *h = owner;
    assert_false(guest->muted);
    h->muted += !h->deaf;
    return !h->deaf;
}

static void on_crowded(void *context, const char *detail) {
    house *h = context;
    (void)snprintf(h->crowded, sizeof h->crowded, "%s", detail);
}

static void open_house(house *h, uint32_t most, uint32_t most_of_address) {
    *h = (house){.guests = {.most = most,
                            .most_of_address = most_of_address,
                            .is_known = is_known,
                            .hang_up = hang_up,
                            .mute = mute,
                            .on_crowded = on_crowded,
                            .context = h,
                            .owner = h}};
}

static void arrive(house *h, uint64_t id, const char *address, uint64_t now) {
    assert_ok(kvf_guests_arrive(&h->guests, id, 0, address, now));
}

static void the_stranger_that_was_silent_longest_goes(void **state) {
    (void)state;
    house h;
    open_house(&h, 3, 0);
    for (uint64_t id = 1; id <= 3; id++)
        arrive(&h, id, "a", id);
    kvf_guests_name(&h.guests, 1, 101, 10); /* now 2 has been silent for longest */
    arrive(&h, 4, "a", 11);
    assert_int_equal(h.gone_count, 1);
    assert_int_equal(h.gone[0], 2);
    assert_int_equal(h.guests.count, 3);
    assert_int_equal(h.guests.refused, 1);
    assert_non_null(strstr(h.crowded, "there are 3 connections"));
    kvf_guests_leave(&h.guests, 2);
    assert_true(kvf_guests_hear(&h.guests, 101, 12));
    assert_false(kvf_guests_hear(&h.guests, 102, 12));
    kvf_guests_free(&h.guests);
}

static void the_known_stay_and_the_newcomer_goes(void **state) {
    (void)state;
    house h;
    open_house(&h, 3, 0);
    h.known_below = 200;
    for (uint64_t id = 1; id <= 3; id++) {
        arrive(&h, id, "a", id);
        kvf_guests_name(&h.guests, id, 100 + id, id);
    }
    arrive(&h, 4, "a", 11);
    assert_int_equal(h.gone_count, 1);
    assert_int_equal(h.gone[0], 4);
    assert_int_equal(h.guests.count, 3);
    kvf_guests_free(&h.guests);
}

static void one_address_does_not_take_the_places_of_others(void **state) {
    (void)state;
    house h;
    open_house(&h, 4, 2);
    arrive(&h, 1, "honest", 1);
    for (uint64_t id = 2; id <= 9; id++)
        arrive(&h, id, "crowd", id);
    assert_int_equal(h.guests.count, 3);
    assert_int_equal(h.gone_count, 6);
    for (uint64_t i = 0; i < h.gone_count; i++)
        assert_int_equal(h.gone[i], 2 + i);
    assert_non_null(strstr(h.crowded, "crowd has 2 connections"));
    kvf_guests_free(&h.guests);
}

static void a_silent_guest_is_dismissed_after_a_while(void **state) {
    (void)state;
    house h;
    open_house(&h, 0, 0);
    h.known_below = 102;
    arrive(&h, 1, "a", SECONDS(1)); /* a known guest */
    kvf_guests_name(&h.guests, 1, 101, SECONDS(1));
    arrive(&h, 2, "a", SECONDS(1)); /* a stranger that is heard once more */
    kvf_guests_name(&h.guests, 2, 102, SECONDS(1));
    arrive(&h, 3, "a", SECONDS(1));
    assert_true(kvf_guests_hear(&h.guests, 102, SECONDS(10)));
    kvf_guests_tick(&h.guests, SECONDS(15));
    assert_int_equal(h.gone_count, 0);
    assert_int_equal(kvf_guests_due(&h.guests), SECONDS(16));
    kvf_guests_tick(&h.guests, SECONDS(16));
    assert_int_equal(h.gone_count, 1);
    assert_int_equal(h.gone[0], 3);
    assert_int_equal(kvf_guests_due(&h.guests), SECONDS(25));
    kvf_guests_tick(&h.guests, SECONDS(25));
    assert_int_equal(h.gone_count, 2);
    assert_int_equal(h.gone[1], 2);
    assert_int_equal(h.guests.refused, 0);
    assert_int_equal(h.guests.closed, 2);
    kvf_guests_free(&h.guests);
}

static void strangers_have_places_of_their_own_and_give_them_back_when_met(void **state) {
    (void)state;
    house h;
    open_house(&h, 0, 0);
    h.guests.most_strangers = 2;
    h.known_below = 200;
    for (uint64_t id = 1; id <= 2; id++) {
        arrive(&h, id, "a", id);
        kvf_guests_name(&h.guests, id, 100 + id, id);
    }
    for (uint64_t id = 3; id <= 4; id++)
        arrive(&h, id, "a", id);
    assert_int_equal(h.gone_count, 0); /* 1 and 2 turned out to be known guests */
    assert_int_equal(h.guests.count, 4);
    arrive(&h, 5, "a", 5);
    assert_int_equal(h.gone_count, 1);
    assert_int_equal(h.gone[0], 3);
    assert_non_null(strstr(h.crowded, "there are 2 connections of strangers"));
    kvf_guests_leave(&h.guests, 1); /* its place was not one of the strangers' */
    arrive(&h, 6, "a", 6);
    assert_int_equal(h.gone_count, 2);
    assert_int_equal(h.gone[1], 4);
    assert_int_equal(h.guests.count, 3);
    kvf_guests_free(&h.guests);
}

static void a_refused_guest_goes_first_and_soon_and_at_once_when_refused_again(void **state) {
    (void)state;
    house h;
    open_house(&h, 3, 0);
    for (uint64_t id = 1; id <= 3; id++) {
        arrive(&h, id, "a", SECONDS(20));
        kvf_guests_name(&h.guests, id, 100 + id, SECONDS(20));
    }
    kvf_guests_part(&h.guests, 102, SECONDS(20));
    assert_true(kvf_guests_is_parting(&h.guests, 102));
    assert_false(kvf_guests_is_parting(&h.guests, 103));
    kvf_guests_tick(&h.guests, SECONDS(20));
    assert_int_equal(h.gone_count, 0);
    assert_int_equal(kvf_guests_due(&h.guests), SECONDS(21));
    arrive(&h, 4, "a", SECONDS(20) + 1);
    assert_int_equal(h.gone_count, 1);
    assert_int_equal(h.gone[0], 2);
    kvf_guests_part(&h.guests, 103, SECONDS(20) + 2);
    kvf_guests_tick(&h.guests, SECONDS(21));
    assert_int_equal(h.gone_count, 2);
    assert_int_equal(h.gone[1], 3);
    kvf_guests_part(&h.guests, 101, SECONDS(21));
    kvf_guests_part(&h.guests, 101, SECONDS(21));
    assert_int_equal(h.gone_count, 3);
    assert_int_equal(h.gone[2], 1);
    kvf_guests_part(&h.guests, 101, SECONDS(21)); /* no guest has this route any more */
    kvf_guests_dismiss(&h.guests, 101);
    assert_int_equal(h.gone_count, 3);
    kvf_guests_free(&h.guests);
}

static void a_place_that_was_taken_again_is_another_guest(void **state) {
    (void)state;
    house h;
    open_house(&h, 0, 0);
    arrive(&h, 7, "a", 1);
    kvf_guests_name(&h.guests, 7, 101, 1);
    kvf_guests_name(&h.guests, 7, 102, 2); /* the route of a guest whose arrival was not reported yet */
    assert_true(kvf_guests_hear(&h.guests, 101, 3));
    assert_false(kvf_guests_hear(&h.guests, 102, 3));
    arrive(&h, 7, "b", 4);
    assert_int_equal(h.guests.count, 1);
    assert_false(kvf_guests_hear(&h.guests, 101, 5));
    kvf_guests_leave(&h.guests, 7);
    kvf_guests_leave(&h.guests, 7);
    assert_int_equal(h.guests.count, 0);
    assert_int_equal(kvf_guests_due(&h.guests), UINT64_MAX);
    kvf_guests_free(&h.guests);
}

/* If it were hung up on at once, it would connect again at once. */
static void a_muted_guest_stays_until_it_was_silent_for_long(void **state) {
    (void)state;
    house h;
    open_house(&h, 0, 0);
    arrive(&h, 1, "a", SECONDS(1));
    arrive(&h, 2, "a", SECONDS(1));
    kvf_guests_name(&h.guests, 1, 101, SECONDS(2));
    kvf_guests_mute(&h.guests, 101);
    kvf_guests_mute(&h.guests, 101);
    kvf_guests_mute(&h.guests, 102); /* no guest has this route */
    assert_int_equal(h.muted, 1);
    assert_true(kvf_guests_is_muted(&h.guests, 101));
    assert_false(kvf_guests_is_muted(&h.guests, 102));
    assert_int_equal(h.gone_count, 0);
    assert_int_equal(h.guests.count, 2);
    kvf_guests_tick(&h.guests, SECONDS(2) + KVF_GUEST_SILENT_NS);
    assert_int_equal(h.gone_count, 2);
    h.deaf = true;
    arrive(&h, 3, "a", SECONDS(20));
    kvf_guests_name(&h.guests, 3, 103, SECONDS(20));
    kvf_guests_mute(&h.guests, 103);
    assert_int_equal(h.gone_count, 3);
    kvf_guests_free(&h.guests);
}

/* The last message of a closed connection is read when another connection has its descriptor already: the new
 * connection must not be hung up on because of it. */
static void a_late_message_of_a_closed_connection_is_not_that_of_its_successor(void **state) {
    (void)state;
    house h;
    open_house(&h, 0, 0);
    arrive(&h, 7, "a", 1);
    kvf_guests_name(&h.guests, 7, 101, 1);
    kvf_guests_leave(&h.guests, 7);
    arrive(&h, 7, "a", 2);
    kvf_guests_name(&h.guests, 7, 101, 3);
    assert_false(kvf_guests_has(&h.guests, 101));
    kvf_guests_dismiss(&h.guests, 101);
    kvf_guests_part(&h.guests, 101, 3);
    assert_int_equal(h.gone_count, 0);
    kvf_guests_name(&h.guests, 7, 102, 4);
    assert_true(kvf_guests_has(&h.guests, 102));
    assert_false(kvf_guests_is_parting(&h.guests, 102));
    kvf_guests_free(&h.guests);
}

/* ---- messages without an end ----------------------------------------------------------------- */

#define LONGEST 1000000u
#define LONGEST_STRANGE 50000u
#define STRANGE_AND_BATCH (LONGEST_STRANGE + (16u << 10))

static void open_weighing_house(house *h, uint64_t strangers) {
    open_house(h, 0, 0);
    h->guests.longest = LONGEST;
    h->guests.longest_strange = LONGEST_STRANGE;
    for (uint64_t id = 1; id <= strangers; id++) {
        arrive(h, id, "a", SECONDS(1));
        kvf_guests_name(&h->guests, id, 100 + id, SECONDS(1));
    }
}

/* Whether a guest still moves that is found to have brought so many bytes. */
static bool weigh(house *h, uint64_t id, uint64_t brought) {
    kvf_guest *guest;
    kvf_guests_stir(&h->guests, id);
    do
        assert_non_null(guest = kvf_guests_next_moving(&h->guests));
    while (guest->id != id);
    return kvf_guests_weigh(&h->guests, guest, brought);
}

static void read_all(house *h, int times) {
    while (times-- > 0)
        kvf_guests_took(&h->guests, 0, true);
}

static void a_stranger_whose_message_does_not_end_is_muted(void **state) {
    (void)state;
    house h;
    open_weighing_house(&h, 1);
    assert_true(weigh(&h, 1, 300)); /* a handshake, and a message that was read */
    assert_true(weigh(&h, 1, 300 + STRANGE_AND_BATCH));
    read_all(&h, 5);
    assert_true(weigh(&h, 1, 301 + STRANGE_AND_BATCH)); /* the first time that it is too much */
    read_all(&h, 1);
    assert_true(weigh(&h, 1, 301 + STRANGE_AND_BATCH)); /* there may be whole messages that were not read */
    assert_int_equal(h.muted, 0);
    read_all(&h, 1);
    assert_false(weigh(&h, 1, 301 + STRANGE_AND_BATCH));
    assert_int_equal(h.muted, 1);
    assert_int_equal(h.gone_count, 0);
    assert_int_equal(h.guests.refused, 1);
    assert_non_null(strstr(h.crowded, "of a brought 66385 bytes of a message without an end"));
    kvf_guests_stir(&h.guests, 1);
    assert_null(kvf_guests_next_moving(&h.guests)); /* nothing more is received over it */
    kvf_guests_tick(&h.guests, SECONDS(1) + KVF_GUEST_SILENT_NS);
    assert_int_equal(h.gone_count, 1);
    assert_int_equal(h.guests.part_bytes, 0);
    kvf_guests_free(&h.guests);
}

static void a_guest_whose_messages_are_read_may_bring_any_number(void **state) {
    (void)state;
    house h;
    open_weighing_house(&h, 1);
    for (uint64_t i = 1; i <= 20; i++) {
        read_all(&h, 3);
        if (i % 2)
            assert_true(kvf_guests_read(&h.guests, 101));
        else
            assert_true(kvf_guests_hear(&h.guests, 101, SECONDS(1)));
        assert_true(weigh(&h, 1, i * LONGEST));
    }
    assert_int_equal(h.guests.part_bytes, 0);
    assert_true(weigh(&h, 1, 20 * LONGEST + 5));
    assert_int_equal(h.guests.part_bytes, 5);
    assert_false(kvf_guests_read(&h.guests, 102));
    assert_false(weigh(&h, 1, 20 * LONGEST + 5)); /* it is silent now */
    assert_null(kvf_guests_next_moving(&h.guests));
    assert_false(weigh(&h, 1, 7)); /* it was another's number */
    assert_int_equal(h.guests.part_bytes, 5);
    assert_int_equal(h.guests.refused, 0);
    kvf_guests_free(&h.guests);
}

static void a_known_guest_may_bring_its_longest_message_and_is_hung_up_on_after_it(void **state) {
    (void)state;
    house h;
    open_weighing_house(&h, 1);
    h.known_below = 200;
    const uint64_t most = LONGEST + (16u << 10);
    assert_true(weigh(&h, 1, 300));
    assert_true(weigh(&h, 1, 300 + most));
    read_all(&h, 3);
    assert_true(weigh(&h, 1, 301 + most));
    read_all(&h, 2);
    assert_false(weigh(&h, 1, 301 + most));
    assert_int_equal(h.gone_count, 1);
    assert_int_equal(h.muted, 0);
    assert_int_equal(h.guests.refused, 1);
    assert_int_equal(h.guests.part_bytes, 0);
    kvf_guests_free(&h.guests);
}

/* The owner may never have read all, but ZeroMQ gives it a message of each in turn. */
static void a_turn_is_over_when_far_more_messages_were_read_than_there_are_guests(void **state) {
    (void)state;
    house h;
    open_weighing_house(&h, 3);
    assert_true(weigh(&h, 1, 1));
    assert_true(weigh(&h, 1, 2 + STRANGE_AND_BATCH));
    const uint32_t turn = 2 * 3 + KVF_GUESTS_LEFT;
    kvf_guests_took(&h.guests, turn - 1, false);
    kvf_guests_took(&h.guests, 1, false);
    kvf_guests_took(&h.guests, turn - 1, false);
    assert_true(weigh(&h, 1, 2 + STRANGE_AND_BATCH));
    kvf_guests_took(&h.guests, 1, false);
    assert_false(weigh(&h, 1, 2 + STRANGE_AND_BATCH));
    assert_int_equal(h.muted, 1);
    kvf_guests_free(&h.guests);
}

/* Each brings less than a stranger may, but together it is more than is kept for them. */
static void strangers_have_a_limit_together(void **state) {
    (void)state;
    enum { CROWD = 30, EACH = 40000 };
    house h;
    open_weighing_house(&h, CROWD);
    for (uint64_t id = 1; id <= CROWD; id++)
        assert_true(weigh(&h, id, 1)); /* a message was read */
    const uint64_t fit = KVF_GUESTS_PART_BYTES / EACH;
    for (uint64_t id = 1; id <= fit + 1; id++) {
        assert_true(weigh(&h, id, 1 + EACH));
        assert_int_equal(h.guests.part_bytes, id * EACH);
    }
    assert_true(weigh(&h, fit + 2, 1 + KVF_GUEST_GREETING_BYTES)); /* it shakes hands */
    read_all(&h, 2);
    assert_false(weigh(&h, fit + 1, 1 + EACH));
    assert_int_equal(h.gone_count, 1); /* no room to keep what it has brought */
    assert_int_equal(h.gone[0], fit + 1);
    assert_int_equal(h.muted, 0);
    read_all(&h, 2);
    for (uint64_t id = 1; id <= fit; id++)
        assert_false(weigh(&h, id, 1 + EACH)); /* now there is */
    assert_false(weigh(&h, fit + 2, 1 + KVF_GUEST_GREETING_BYTES));
    assert_int_equal(h.gone_count, 1);
    assert_int_equal(h.guests.part_bytes, fit * EACH + KVF_GUEST_GREETING_BYTES);
    h.known_below = 200; /* they are met */
    for (uint64_t id = 1; id <= fit; id++)
        assert_false(weigh(&h, id, 1 + EACH));
    assert_int_equal(h.guests.part_bytes, KVF_GUEST_GREETING_BYTES);
    kvf_guests_free(&h.guests);
    assert_int_equal(h.guests.part_bytes, 0);
    assert_null(h.guests.moving);
}

static void looking_for_room_takes_bounded_steps(void **state) {
    (void)state;
    house h;
    open_house(&h, 5000, 0);
    h.known_below = UINT64_MAX;
    for (uint64_t id = 1; id <= 5000; id++) {
        arrive(&h, id, "a", id);
        kvf_guests_name(&h.guests, id, 10000 + id, id);
    }
    for (uint64_t id = 5001; id <= 5020; id++) {
        h.looked = 0;
        arrive(&h, id, "a", id);
        assert_int_equal(h.gone[h.gone_count - 1], id);
        assert_true(h.looked <= 64);
    }
    h.looked = 0;
    kvf_guests_tick(&h.guests, SECONDS(100));
    assert_true(h.looked <= 64);
    kvf_guests_free(&h.guests);
}

/* It was once never listed, so that none of its messages counted as read, and it was cut off. */
static void a_guest_for_whose_route_there_is_no_memory_is_listed_with_its_next_message(void **state) {
    (void)state;
    memory_count memory;
    house h;
    count_memory(&memory);
    open_house(&h, 3, 0);
    arrive(&h, 1, "a", 1);
    memory.fail_at = memory.calls + 1;
    kvf_guests_name(&h.guests, 1, 101, 2);
    assert_true(memory.calls >= memory.fail_at);
    assert_false(kvf_guests_hear(&h.guests, 101, 3));
    kvf_guests_name(&h.guests, 1, 101, 4);
    assert_true(kvf_guests_hear(&h.guests, 101, 5));
    kvf_guests_free(&h.guests);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_stranger_that_was_silent_longest_goes),
        cmocka_unit_test(the_known_stay_and_the_newcomer_goes),
        cmocka_unit_test(one_address_does_not_take_the_places_of_others),
        cmocka_unit_test(a_silent_guest_is_dismissed_after_a_while),
        cmocka_unit_test(strangers_have_places_of_their_own_and_give_them_back_when_met),
        cmocka_unit_test(a_refused_guest_goes_first_and_soon_and_at_once_when_refused_again),
        cmocka_unit_test(a_place_that_was_taken_again_is_another_guest),
        cmocka_unit_test(a_late_message_of_a_closed_connection_is_not_that_of_its_successor),
        cmocka_unit_test(a_muted_guest_stays_until_it_was_silent_for_long),
        cmocka_unit_test(a_stranger_whose_message_does_not_end_is_muted),
        cmocka_unit_test(a_guest_whose_messages_are_read_may_bring_any_number),
        cmocka_unit_test(a_known_guest_may_bring_its_longest_message_and_is_hung_up_on_after_it),
        cmocka_unit_test(a_turn_is_over_when_far_more_messages_were_read_than_there_are_guests),
        cmocka_unit_test(strangers_have_a_limit_together),
        cmocka_unit_test(looking_for_room_takes_bounded_steps),
        cmocka_unit_test_teardown(a_guest_for_whose_route_there_is_no_memory_is_listed_with_its_next_message,
                                  stop_counting_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
