/* Counting the ranks of consumer engines: each rank once, all of them, and for as many engines as are wanted. */
#include "agent/tally.h"
#include "shapes.h"

static void an_engine_is_done_when_each_of_its_ranks_has_said_so(void **state) {
    (void)state;
    kvf_tally tally = {.wanted = 1};
    assert_ok(kvf_tally_add(&tally, "d", 2, 3, KVF_TALLY_HAS_IT));
    assert_ok(kvf_tally_add(&tally, "d", 0, 3, KVF_TALLY_HAS_IT));
    assert_false(kvf_tally_complete(&tally));
    assert_int_equal(kvf_tally_of(&tally, "d", 2), KVF_TALLY_HAS_IT);
    assert_int_equal(kvf_tally_of(&tally, "d", 1), KVF_TALLY_WAITS);
    assert_ok(kvf_tally_add(&tally, "d", 1, 3, KVF_TALLY_HAS_IT));
    assert_true(kvf_tally_complete(&tally));
    kvf_tally_free(&tally);
}

static void a_rank_that_repeats_itself_counts_once(void **state) {
    (void)state;
    kvf_tally tally = {.wanted = 1};
    for (int i = 0; i < 5; i++)
        assert_ok(kvf_tally_add(&tally, "d", 1, 2, KVF_TALLY_HAS_IT));
    assert_false(kvf_tally_complete(&tally));
    assert_ok(kvf_tally_add(&tally, "d", 0, 2, KVF_TALLY_HAS_IT));
    assert_true(kvf_tally_complete(&tally));
    kvf_tally_free(&tally);
}

static void an_engine_counts_once_however_many_ranks_repeat_themselves(void **state) {
    (void)state;
    kvf_tally tally = {.wanted = 2};
    for (int i = 0; i < 3; i++)
        assert_ok(kvf_tally_add(&tally, "d", 0, 1, KVF_TALLY_HAS_IT));
    assert_false(kvf_tally_complete(&tally));
    /* an engine decides which of its ranks take part */
    assert_ok(kvf_tally_add(&tally, "e", 7, 1, KVF_TALLY_HAS_IT));
    assert_true(kvf_tally_complete(&tally));
    assert_int_equal(kvf_tally_of(&tally, "e", 0), KVF_TALLY_WAITS);
    kvf_tally_free(&tally);
}

static void siblings_must_agree_on_how_many_they_are(void **state) {
    (void)state;
    kvf_tally tally = {.wanted = 1};
    assert_ok(kvf_tally_add(&tally, "d", 0, 2, KVF_TALLY_HAS_IT));
    assert_fails(kvf_tally_add(&tally, "d", 1, 1, KVF_TALLY_HAS_IT), KVF_E_MISMATCH, "rank 1 of d", "1", "2");
    assert_int_equal(kvf_tally_of(&tally, "d", 1), KVF_TALLY_WAITS);
    assert_fails(kvf_tally_add(&tally, "d", 1, 0, KVF_TALLY_HAS_IT), KVF_E_RANGE, "at least 1");
    assert_fails(kvf_tally_add(&tally, "d", KVF_WIRE_MAX_RANKS, 2, KVF_TALLY_HAS_IT), KVF_E_RANGE, "65536");
    assert_false(kvf_tally_complete(&tally));
    kvf_tally_free(&tally);
}

static void a_rank_that_gave_up_counts_until_it_tries_again(void **state) {
    (void)state;
    kvf_tally tally = {.wanted = 1};
    uint32_t rank = 7;
    assert_ok(kvf_tally_add(&tally, "d", 0, 2, KVF_TALLY_HAS_IT));
    assert_null(kvf_tally_deserter(&tally, &rank));
    assert_ok(kvf_tally_add(&tally, "d", 1, 2, KVF_TALLY_GAVE_UP));
    assert_true(kvf_tally_complete(&tally));
    assert_string_equal(kvf_tally_deserter(&tally, &rank), "d");
    assert_int_equal(rank, 1);
    kvf_tally_take_back(&tally, "d", 1);
    assert_false(kvf_tally_complete(&tally));
    assert_null(kvf_tally_deserter(&tally, &rank));
    kvf_tally_take_back(&tally, "d", 0); /* rank 0 has the request, and that stays so */
    kvf_tally_take_back(&tally, "e", 0);
    assert_ok(kvf_tally_add(&tally, "d", 1, 2, KVF_TALLY_HAS_IT));
    assert_true(kvf_tally_complete(&tally));
    kvf_tally_free(&tally);
}

static void a_high_rank_costs_no_more_than_a_low_one(void **state) {
    (void)state;
    uint64_t kept = 100;
    kvf_tally low = {.wanted = 1}, high = {.wanted = 1, .kept = &kept};
    assert_ok(kvf_tally_add(&low, "d", 0, 2, KVF_TALLY_HAS_IT));
    assert_ok(kvf_tally_add(&high, "d", KVF_WIRE_MAX_RANKS - 1, 2, KVF_TALLY_HAS_IT));
    assert_int_equal(high.bytes, low.bytes);
    assert_true(high.bytes < 256);
    assert_int_equal(kept, 100 + high.bytes);
    kvf_tally_free(&high);
    assert_int_equal(kept, 100);
    kvf_tally_free(&low);
}

static void thousands_of_ranks_in_any_order_are_kept_apart(void **state) {
    (void)state;
    enum { RANKS = 4096, STEP = 1597 }; /* they have no common divisor, so each rank comes once */
    kvf_tally tally = {.wanted = 1};
    for (uint32_t i = 0; i < RANKS; i++) {
        uint32_t rank = i * STEP % RANKS;
        assert_int_equal(kvf_tally_of(&tally, "d", rank), KVF_TALLY_WAITS);
        assert_false(kvf_tally_complete(&tally));
        assert_ok(kvf_tally_add(&tally, "d", rank, RANKS, rank % 2 ? KVF_TALLY_HAS_IT : KVF_TALLY_GAVE_UP));
    }
    assert_true(kvf_tally_complete(&tally));
    for (uint32_t rank = 0; rank < RANKS; rank++)
        assert_int_equal(kvf_tally_of(&tally, "d", rank), rank % 2 ? KVF_TALLY_HAS_IT : KVF_TALLY_GAVE_UP);
    uint32_t first;
    assert_string_equal(kvf_tally_deserter(&tally, &first), "d");
    assert_int_equal(first, 0);
    assert_true(tally.bytes <= 2 * sizeof(uint32_t) * RANKS + 256);
    kvf_tally_free(&tally);
}

static void the_memory_of_each_engine_is_counted_as_it_grows(void **state) {
    (void)state;
    uint64_t kept = 0;
    kvf_tally tally = {.wanted = 1, .kept = &kept};
    const uint64_t one = sizeof(kvf_tally_engine) + sizeof "decode";
    for (uint32_t rank = 0; rank < 100; rank++) {
        assert_ok(kvf_tally_add(&tally, "decode", rank, 128, KVF_TALLY_HAS_IT));
        assert_int_equal(kept, one + tally.engines->said_capacity * sizeof(uint32_t));
    }
    const uint64_t before = kept;
    assert_ok(kvf_tally_add(&tally, "deputy", 0, 1, KVF_TALLY_HAS_IT));
    assert_int_equal(kept - before, one + tally.engines->said_capacity * sizeof(uint32_t));
    kvf_tally_free(&tally);
    assert_int_equal(kept, 0);
}

static void engines_that_nobody_waits_for_are_counted_up_to_a_limit(void **state) {
    (void)state;
    kvf_tally tally = {.wanted = 2};
    for (uint32_t i = 0; i < 2 + KVF_TALLY_STRANGERS; i++) {
        const char name[3] = {(char)('a' + i / 20), (char)('a' + i % 20), 0};
        assert_ok(kvf_tally_add(&tally, name, 0, 2, KVF_TALLY_HAS_IT));
    }
    assert_fails(kvf_tally_add(&tally, "zz", 0, 2, KVF_TALLY_HAS_IT), KVF_E_LIMIT, "66 engines");
    assert_ok(kvf_tally_add(&tally, "aa", 1, 2, KVF_TALLY_HAS_IT));
    kvf_tally_free(&tally);
}

/* As where blocks are to be kept for the whole lease, whoever reads them. */
static void any_number_of_engines_may_be_waited_for(void **state) {
    (void)state;
    kvf_tally tally = {.wanted = UINT32_MAX};
    for (uint32_t i = 0; i < KVF_TALLY_STRANGERS; i++) {
        const char name[3] = {(char)('a' + i / 20), (char)('a' + i % 20), 0};
        assert_ok(kvf_tally_add(&tally, name, 0, 1, KVF_TALLY_HAS_IT));
    }
    assert_int_equal(tally.done, KVF_TALLY_STRANGERS);
    assert_false(kvf_tally_complete(&tally));
    kvf_tally_free(&tally);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rank_that_gave_up_counts_until_it_tries_again),
        cmocka_unit_test(an_engine_is_done_when_each_of_its_ranks_has_said_so),
        cmocka_unit_test(a_rank_that_repeats_itself_counts_once),
        cmocka_unit_test(an_engine_counts_once_however_many_ranks_repeat_themselves),
        cmocka_unit_test(siblings_must_agree_on_how_many_they_are),
        cmocka_unit_test(a_high_rank_costs_no_more_than_a_low_one),
        cmocka_unit_test(the_memory_of_each_engine_is_counted_as_it_grows),
        cmocka_unit_test(thousands_of_ranks_in_any_order_are_kept_apart),
        cmocka_unit_test(engines_that_nobody_waits_for_are_counted_up_to_a_limit),
        cmocka_unit_test(any_number_of_engines_may_be_waited_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
