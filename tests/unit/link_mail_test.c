/* Which party's letter is read next, and whose letters are dropped. */
#include "link/link_mail.h"
#include "shapes.h"

#define GREEDY_WORK (2u << 20)

static const uint8_t greedy_key[KVF_KEY_BYTES] = {1}, other_key[KVF_KEY_BYTES] = {2};

/* Adds a letter; returns whether it was taken. */
static bool post(kvf_mail *mail, kvf_route route, const uint8_t *key, bool known, size_t bytes) {
    zmq_msg_t message;
    assert_int_equal(zmq_msg_init_size(&message, bytes), 0);
    memset(zmq_msg_data(&message), 0, bytes);
    bool taken = kvf_mail_add(mail, route, key, known, &message) == NULL;
    assert_int_equal(zmq_msg_close(&message), 0);
    return taken;
}

/* Reads one letter, which costs so much work, and returns its route; 0: there was none. */
static kvf_route read_one(kvf_mail *mail, uint64_t work) {
    kvf_mail_letter *letter = kvf_mail_next(mail);
    if (!letter)
        return 0;
    kvf_route route = letter->route;
    assert_true(kvf_mail_read(mail, letter, work) > work);
    return route;
}

static void letters_of_one_party_keep_their_order(void **state) {
    (void)state;
    kvf_mail mail;
    kvf_mail_open(&mail);
    for (kvf_route route = 1; route <= 100; route++)
        assert_true(post(&mail, route, greedy_key, true, 10));
    for (kvf_route route = 1; route <= 100; route++)
        assert_int_equal(read_one(&mail, GREEDY_WORK), route);
    assert_false(kvf_mail_waits(&mail));
    kvf_mail_close(&mail);
}

static void a_party_that_makes_much_work_lets_the_others_go_first(void **state) {
    (void)state;
    kvf_mail mail;
    kvf_mail_open(&mail);
    for (uint32_t i = 0; i < 100; i++)
        assert_true(post(&mail, 7, NULL, true, 10));
    assert_int_equal(read_one(&mail, GREEDY_WORK), 7); /* no other party had a letter */
    for (uint32_t i = 0; i < 20; i++) { /* 20 cheap letters, one at a time; none of 7's between */
        assert_true(post(&mail, 8, NULL, true, 10));
        assert_int_equal(read_one(&mail, 0), 8);
    }
    kvf_mail_close(&mail);
}

static void a_debt_is_paid_and_then_it_is_their_turn_again(void **state) {
    (void)state;
    kvf_mail mail;
    uint32_t reads[2] = {0};
    kvf_mail_open(&mail);
    for (uint32_t i = 0; i < 2000; i++) {
        assert_true(post(&mail, 7, NULL, true, 10));
        assert_true(post(&mail, 8, NULL, true, 10));
    }
    /* Both get equal work: a letter of one costs 8 times a letter of the other. */
    for (uint32_t i = 0; i < 900; i++) {
        kvf_mail_letter *letter = kvf_mail_next(&mail);
        bool heavy = letter->route == 7;
        reads[heavy ? 0 : 1]++;
        (void)kvf_mail_read(&mail, letter, (heavy ? 8u : 1u) * KVF_MAIL_LETTER_WORK - KVF_MAIL_LETTER_WORK);
    }
    assert_in_range(reads[0], 95, 105);
    kvf_mail_close(&mail);
}

static void connections_of_one_key_are_one_party_and_so_are_strangers(void **state) {
    (void)state;
    kvf_mail mail;
    uint32_t others = 0, strangers = 0;
    kvf_mail_open(&mail);
    for (kvf_route route = 1; route <= 200; route++) {
        assert_true(post(&mail, route, greedy_key, true, 10));
        assert_true(post(&mail, 1000, other_key, true, 10));
        assert_true(post(&mail, 2000 + route, NULL, false, 10));
    }
    for (uint32_t i = 0; i < 180; i++) {
        kvf_route route = read_one(&mail, 0);
        others += route == 1000;
        strangers += route > 2000;
    }
    assert_in_range(others, 76, 84); /* of 9 turns the two keys get 4 each, and strangers 1 */
    assert_in_range(strangers, 16, 24);
    kvf_mail_close(&mail);
}

static void no_party_has_more_room_than_it_leaves(void **state) {
    (void)state;
    kvf_mail mail;
    kvf_mail_open(&mail);
    uint64_t taken = 0;
    while (post(&mail, 7, NULL, true, 64u << 10))
        taken += 64u << 10;
    assert_in_range(taken, KVF_MAIL_BYTES / 2 - (1u << 20), KVF_MAIL_BYTES / 2);
    assert_int_equal(mail.dropped, 1);
    assert_true(post(&mail, 8, NULL, true, 64u << 10));
    assert_false(post(&mail, 7, NULL, true, 64u << 10));
    assert_int_equal(read_one(&mail, 0), 7);
    assert_int_equal(read_one(&mail, 0), 7);
    assert_int_equal(read_one(&mail, 0), 7);
    assert_true(post(&mail, 7, NULL, true, 64u << 10)); /* there is room again: some were read */
    kvf_mail_close(&mail);
    assert_int_equal(mail.bytes, 0);
}

static void letters_of_much_work_do_not_pile_up(void **state) {
    (void)state;
    kvf_mail mail;
    kvf_mail_open(&mail);
    assert_true(post(&mail, 7, NULL, true, 10));
    assert_int_equal(read_one(&mail, KVF_MAIL_WAITING_WORK), 7);
    assert_true(post(&mail, 7, NULL, true, 10)); /* one letter may wait, however much work it costs */
    assert_false(post(&mail, 7, NULL, true, 10));
    assert_true(post(&mail, 8, NULL, true, 10)); /* others have as much room as before */
    assert_true(post(&mail, 8, NULL, true, 10));
    assert_int_not_equal(read_one(&mail, 0), 0);
    assert_int_not_equal(read_one(&mail, 0), 0);
    assert_int_not_equal(read_one(&mail, 0), 0); /* the last letter of 7 cost little work */
    assert_true(post(&mail, 7, NULL, true, 10));
    assert_true(post(&mail, 7, NULL, true, 10));
    kvf_mail_close(&mail);
}

static void a_party_that_owes_for_one_letter_leaves_rounds_to_others(void **state) {
    (void)state;
    kvf_mail mail;
    kvf_mail_open(&mail);
    kvf_mail_begin_round(&mail);
    for (uint32_t i = 0; i < 2; i++)
        assert_true(post(&mail, 7, NULL, true, 10));
    assert_int_equal(read_one(&mail, GREEDY_WORK), 7);
    /* Route 7 has used 2,064 KiB of work in a turn of 64, and pays back 64 of the 2,000 in each round, from this one
     * on; the last 16 it pays in the turn in which its letter is read. */
    uint32_t rounds = 0;
    for (kvf_route read = 0; read != 7; rounds++) {
        assert_true(post(&mail, 8, NULL, true, 10));
        assert_int_equal(read_one(&mail, 0), 8); /* a party that owes nothing is read in every round */
        read = read_one(&mail, 0);
        kvf_mail_begin_round(&mail);
    }
    assert_int_equal(rounds, 31);
    kvf_mail_close(&mail);
}

static void of_those_that_owe_one_pays_in_each_round(void **state) {
    (void)state;
    kvf_mail mail;
    uint32_t rounds[2] = {0}, round = 0;
    kvf_mail_open(&mail);
    kvf_mail_begin_round(&mail);
    for (uint32_t i = 0; i < 2; i++) {
        assert_true(post(&mail, 7, NULL, true, 10));
        assert_true(post(&mail, 8, NULL, true, 10));
    }
    assert_int_equal(read_one(&mail, GREEDY_WORK), 7);
    assert_int_equal(read_one(&mail, GREEDY_WORK), 8);
    for (; kvf_mail_waits(&mail); round++) {
        kvf_route route = read_one(&mail, 0);
        rounds[route == 8] = route ? round : rounds[route == 8];
        kvf_mail_begin_round(&mail);
    }
    assert_int_equal(rounds[0], 60); /* each owes a little more than 31 turns, see above */
    assert_int_equal(rounds[1], 61);
    kvf_mail_close(&mail);
}

static void a_new_stranger_waits_for_one_letter_of_each_other_stranger(void **state) {
    (void)state;
    kvf_mail mail;
    kvf_mail_open(&mail);
    for (uint32_t i = 0; i < 1000; i++) {
        assert_true(post(&mail, 5, NULL, false, 10));
        assert_true(post(&mail, 6, NULL, false, 10));
    }
    assert_true(post(&mail, 7, NULL, false, 10));
    uint32_t before = 0;
    while (read_one(&mail, 0) != 7)
        before++;
    assert_int_equal(before, 2);
    kvf_mail_close(&mail);
}

static void a_stranger_leaves_room_to_other_strangers_and_all_of_them_to_those_that_are_known(void **state) {
    (void)state;
    const uint64_t large = 64u << 10;
    kvf_mail mail;
    uint64_t taken[2] = {0};
    kvf_mail_open(&mail);
    for (uint32_t i = 0; i < 2; i++)
        while (post(&mail, 5 + i, NULL, false, large))
            taken[i] += large;
    /* half of the strangers' half */
    assert_in_range(taken[0], KVF_MAIL_BYTES / 4 - (1u << 20), KVF_MAIL_BYTES / 4);
    assert_in_range(taken[1], KVF_MAIL_BYTES / 8 - (1u << 20),
                    KVF_MAIL_BYTES / 8); /* and half of what is left of it */
    assert_true(post(&mail, 7, NULL, false, large));
    assert_true(post(&mail, 8, NULL, true, large));
    kvf_mail_close(&mail);
    assert_int_equal(mail.strangers.bytes, 0);
    assert_int_equal(mail.strangers.work, 0);
}

static void small_letters_of_one_stranger_do_not_keep_out_those_of_another(void **state) {
    (void)state;
    kvf_mail mail;
    uint32_t taken = 0;
    kvf_mail_open(&mail);
    while (post(&mail, 5, NULL, false, 10))
        taken++;
    assert_in_range(taken, 100, KVF_MAIL_WAITING_WORK / KVF_MAIL_LETTER_WORK);
    for (uint32_t i = 0; i < 100; i++)
        assert_true(post(&mail, 100 + i, NULL, false, 10));
    kvf_mail_close(&mail);
}

/* Else the places of those that are told apart would be used up for good, and later strangers would not take turns. */
static void strangers_whose_letters_were_dropped_are_forgotten(void **state) {
    (void)state;
    const uint64_t large = 64u << 10;
    kvf_mail mail;
    kvf_mail_open(&mail);
    for (kvf_route route = 1; route <= 20; route++)
        while (post(&mail, route, NULL, false, large)) {
        }
    for (kvf_route route = 1000; route < 1000 + KVF_MAIL_PARTIES; route++)
        assert_false(post(&mail, route, NULL, false, large));
    while (kvf_mail_waits(&mail)) {
        kvf_mail_begin_round(&mail);
        (void)read_one(&mail, 0);
    }
    assert_int_equal(HASH_COUNT(mail.parties), 0);
    assert_int_equal(mail.stranger_count, 0);
    assert_true(post(&mail, 5, NULL, false, 10));
    assert_null(mail.crowd.turn.first);
    kvf_mail_close(&mail);
}

/* The work of a greeting, and of a JOIN with a shard of 64 layers whose K and V interleave by block: see flow.c. */
#define HELLO_WORK (8u << 10)
#define JOIN_WORK (8u << 10 | 128u << 10)

static void a_large_engine_under_one_key_may_greet_at_once(void **state) {
    (void)state;
    kvf_mail mail;
    kvf_mail_open(&mail);
    assert_true(post(&mail, 1, greedy_key, false, 300));
    assert_int_equal(read_one(&mail, HELLO_WORK), 1);
    for (kvf_route route = 1; route <= 4096; route++)
        assert_true(post(&mail, route, greedy_key, false, 300));
    assert_int_equal(mail.dropped, 0);
    kvf_mail_close(&mail);
}

/* Not all letters can wait at once: ranks repeat those that are dropped, as call.c does. Work is done at 1 GiB/s. */
static void all_ranks_of_a_large_engine_join_though_their_letters_are_dropped_at_first(void **state) {
    (void)state;
    enum { RANKS = 4096 };
    static uint64_t next_ms[RANKS + 1], pause_ms[RANKS + 1];
    static bool joined[RANKS + 1];
    kvf_mail mail;
    uint64_t now_ms = 0;
    kvf_mail_open(&mail);
    for (uint32_t count = 0; count < RANKS; now_ms++) {
        for (kvf_route rank = 1; rank <= RANKS; rank++) {
            if (joined[rank] || now_ms < next_ms[rank])
                continue;
            (void)post(&mail, rank, greedy_key, true, 4000);
            pause_ms[rank] = pause_ms[rank] ? kvf_min_u64(2 * pause_ms[rank], 2000) : 100;
            next_ms[rank] = now_ms + pause_ms[rank];
        }
        for (uint64_t work = 0; work < 1u << 20 && kvf_mail_waits(&mail);) {
            kvf_mail_begin_round(&mail);
            kvf_route rank = read_one(&mail, JOIN_WORK);
            count += rank && !joined[rank];
            joined[rank] = true;
            work += rank ? JOIN_WORK : 0;
        }
    }
    assert_true(mail.dropped > 0);
    assert_in_range(now_ms, 4096 * 136 / 1024, 10000); /* a JOIN is repeated for the lease of 30 s */
    kvf_mail_close(&mail);
}

static void parties_beyond_those_that_are_told_apart_are_strangers(void **state) {
    (void)state;
    kvf_mail mail;
    kvf_mail_open(&mail);
    for (kvf_route route = 1; route <= KVF_MAIL_PARTIES + 10; route++)
        assert_true(post(&mail, route, NULL, true, 10));
    assert_int_equal(HASH_COUNT(mail.parties), KVF_MAIL_PARTIES);
    assert_non_null(mail.crowd.turn.first);
    for (kvf_route route = 1; route <= KVF_MAIL_PARTIES + 10; route++)
        assert_int_not_equal(read_one(&mail, 0), 0);
    /* the other parties have no letters now, and are forgotten */
    assert_true(post(&mail, 1u << 20, NULL, true, 10));
    assert_int_equal(HASH_COUNT(mail.parties), 1);
    kvf_mail_close(&mail);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(letters_of_one_party_keep_their_order),
        cmocka_unit_test(a_party_that_makes_much_work_lets_the_others_go_first),
        cmocka_unit_test(a_debt_is_paid_and_then_it_is_their_turn_again),
        cmocka_unit_test(connections_of_one_key_are_one_party_and_so_are_strangers),
        cmocka_unit_test(no_party_has_more_room_than_it_leaves),
        cmocka_unit_test(letters_of_much_work_do_not_pile_up),
        cmocka_unit_test(a_party_that_owes_for_one_letter_leaves_rounds_to_others),
        cmocka_unit_test(of_those_that_owe_one_pays_in_each_round),
        cmocka_unit_test(a_new_stranger_waits_for_one_letter_of_each_other_stranger),
        cmocka_unit_test(a_stranger_leaves_room_to_other_strangers_and_all_of_them_to_those_that_are_known),
        cmocka_unit_test(small_letters_of_one_stranger_do_not_keep_out_those_of_another),
        cmocka_unit_test(strangers_whose_letters_were_dropped_are_forgotten),
        cmocka_unit_test(a_large_engine_under_one_key_may_greet_at_once),
        cmocka_unit_test(all_ranks_of_a_large_engine_join_though_their_letters_are_dropped_at_first),
        cmocka_unit_test(parties_beyond_those_that_are_told_apart_are_strangers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
