/* Histograms of durations: the bucket of a duration, and quantiles. */
#include <math.h>

#include "agent/histogram.h"
#include "shapes.h"

static void an_empty_one_knows_nothing(void **state) {
    (void)state;
    kvf_histogram histogram = {0};
    assert_int_equal(kvf_histogram_quantile(&histogram, 0.5), 0);
    assert_int_equal(kvf_histogram_quantile(NULL, 0.5), 0);
}

static void count_sum_shortest_and_longest_are_exact(void **state) {
    (void)state;
    kvf_histogram histogram = {0};
    kvf_histogram_add(&histogram, 300);
    kvf_histogram_add(&histogram, 20);
    kvf_histogram_add(&histogram, 5000);
    assert_int_equal(histogram.count, 3);
    assert_int_equal(histogram.sum_ns, 5320);
    assert_int_equal(histogram.min_ns, 20);
    assert_int_equal(histogram.max_ns, 5000);
}

static void the_first_may_be_the_shortest_or_zero(void **state) {
    (void)state;
    kvf_histogram histogram = {0};
    kvf_histogram_add(&histogram, 7);
    assert_int_equal(histogram.min_ns, 7);
    assert_int_equal(histogram.max_ns, 7);
    kvf_histogram_add(&histogram, 0);
    kvf_histogram_add(&histogram, 9);
    assert_int_equal(histogram.min_ns, 0);
    assert_int_equal(histogram.max_ns, 9);
}

static void a_bucket_ends_before_the_power_of_two_of_the_next(void **state) {
    (void)state;
    static const struct {
        uint64_t ns;
        uint32_t bucket;
    } cases[] = {{0, 0},
                 {1, 0},
                 {2, 1},
                 {3, 1},
                 {4, 2},
                 {1023, 9},
                 {1024, 10},
                 {UINT64_C(1) << 47, 47},
                 {(UINT64_C(1) << 47) - 1, 46},
                 {UINT64_C(1) << 48, 47},
                 {UINT64_MAX, 47}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        kvf_histogram histogram = {0};
        kvf_histogram_add(&histogram, cases[i].ns);
        assert_int_equal(histogram.buckets[cases[i].bucket], 1);
    }
}

static void a_sum_that_does_not_fit_stays_at_its_maximum(void **state) {
    (void)state;
    kvf_histogram histogram = {0};
    kvf_histogram_add(&histogram, UINT64_MAX);
    kvf_histogram_add(&histogram, UINT64_MAX - 1);
    assert_true(histogram.sum_ns == UINT64_MAX);
    assert_true(histogram.min_ns == UINT64_MAX - 1);
}

static void durations_are_taken_as_spread_evenly_in_their_bucket(void **state) {
    (void)state;
    kvf_histogram histogram = {0};
    /* 4 in [1024, 2048), 4 in [4096, 8192); the least and the largest are at the ends of buckets. */
    static const uint64_t durations[] = {1024, 1100, 1200, 1300, 4096, 5000, 6000, 8191};
    for (size_t i = 0; i < COUNT_OF(durations); i++)
        kvf_histogram_add(&histogram, durations[i]);

    assert_int_equal(kvf_histogram_quantile(&histogram, 0.25), 1536);  /* the middle of the first bucket */
    assert_int_equal(kvf_histogram_quantile(&histogram, 0.5), 2048);   /* the end of the first bucket */
    assert_int_equal(kvf_histogram_quantile(&histogram, 0.625), 5119); /* a quarter of the second bucket */
}

static void no_guess_lies_outside_what_was_counted(void **state) {
    (void)state;
    kvf_histogram histogram = {0};
    kvf_histogram_add(&histogram, 1500);
    kvf_histogram_add(&histogram, 1600);
    assert_int_equal(kvf_histogram_quantile(&histogram, 0), 1500);
    assert_int_equal(kvf_histogram_quantile(&histogram, 0.5), 1550);
    assert_int_equal(kvf_histogram_quantile(&histogram, 1), 1600);
    for (int i = 0; i <= 100; i++) {
        uint64_t guess = kvf_histogram_quantile(&histogram, i / 100.0);
        assert_true(guess >= 1500 && guess <= 1600);
    }
}

static void quantiles_grow_and_are_within_a_factor_of_two(void **state) {
    (void)state;
    kvf_histogram histogram = {0};
    uint64_t previous = 0;
    for (uint64_t ns = 1; ns <= 100000; ns++)
        kvf_histogram_add(&histogram, ns);
    for (int i = 1; i <= 1000; i++) {
        uint64_t guess = kvf_histogram_quantile(&histogram, i / 1000.0);
        uint64_t truth = (uint64_t)i * 100;
        assert_true(guess >= previous);
        assert_true(guess <= 2 * truth && 2 * guess >= truth);
        previous = guess;
    }
}

static void a_share_that_is_none_gives_an_end(void **state) {
    (void)state;
    kvf_histogram histogram = {0};
    kvf_histogram_add(&histogram, 10);
    kvf_histogram_add(&histogram, 20);
    assert_int_equal(kvf_histogram_quantile(&histogram, -1), 10);
    assert_int_equal(kvf_histogram_quantile(&histogram, 2), 20);
    assert_int_equal(kvf_histogram_quantile(&histogram, (double)NAN), 10);
}

static void the_longest_durations_of_all_are_guessed_too(void **state) {
    (void)state;
    kvf_histogram histogram = {0};
    kvf_histogram_add(&histogram, UINT64_MAX);
    kvf_histogram_add(&histogram, UINT64_C(1) << 47);
    for (int i = 0; i <= 100; i++) {
        uint64_t guess = kvf_histogram_quantile(&histogram, i / 100.0);
        assert_true(guess >= UINT64_C(1) << 47);
    }
    assert_true(kvf_histogram_quantile(&histogram, 0.5) > UINT64_C(1) << 62); /* the last bucket has no end */
}

static void the_last_bucket_but_one_ends_where_the_last_begins(void **state) {
    (void)state;
    kvf_histogram histogram = {0};
    kvf_histogram_add(&histogram, UINT64_C(1) << 46);
    kvf_histogram_add(&histogram, UINT64_MAX);
    assert_true(kvf_histogram_quantile(&histogram, 0.5) == UINT64_C(1) << 47);
}

static void a_bucket_of_a_single_duration_counts(void **state) {
    (void)state;
    kvf_histogram histogram = {0};
    kvf_histogram_add(&histogram, 10);
    kvf_histogram_add(&histogram, 1000);
    assert_int_equal(kvf_histogram_quantile(&histogram, 0.5), 16); /* the end of 10's bucket */
}

static void the_only_duration_is_every_quantile(void **state) {
    (void)state;
    kvf_histogram histogram = {0};
    kvf_histogram_add(&histogram, 300);
    for (int i = 0; i <= 10; i++)
        assert_int_equal(kvf_histogram_quantile(&histogram, i / 10.0), 300);
}

/* Durations of 0 and 1 ns are in the first bucket. */
static void the_first_bucket_begins_with_zero(void **state) {
    (void)state;
    kvf_histogram histogram = {0};
    static const uint64_t durations[] = {0, 0, 3, 3};
    for (size_t i = 0; i < COUNT_OF(durations); i++)
        kvf_histogram_add(&histogram, durations[i]);
    assert_int_equal(kvf_histogram_quantile(&histogram, 0.1), 0);
    assert_int_equal(kvf_histogram_quantile(&histogram, 0.5), 2);  /* the end of the first bucket */
    assert_int_equal(kvf_histogram_quantile(&histogram, 0.75), 2); /* between 2 and 3 */
}

/* Although a double cannot tell it from its neighbours. */
static void the_longest_duration_is_told_exactly(void **state) {
    (void)state;
    kvf_histogram histogram = {0};
    const uint64_t longest = (UINT64_C(1) << 60) + (UINT64_C(1) << 47) + 1;
    kvf_histogram_add(&histogram, UINT64_C(1) << 47);
    kvf_histogram_add(&histogram, longest);
    assert_true(kvf_histogram_quantile(&histogram, 1) == longest);
    assert_true(kvf_histogram_quantile(&histogram, 1.5) == longest);
}

/* As a caller may make one: it says that there are more durations than its buckets have. */
static void the_longest_is_told_where_counts_do_not_add_up(void **state) {
    (void)state;
    const kvf_histogram histogram = {.count = 2, .min_ns = 5, .max_ns = 9};
    assert_int_equal(kvf_histogram_quantile(&histogram, 0.5), 9);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_empty_one_knows_nothing),
        cmocka_unit_test(count_sum_shortest_and_longest_are_exact),
        cmocka_unit_test(the_first_may_be_the_shortest_or_zero),
        cmocka_unit_test(a_bucket_ends_before_the_power_of_two_of_the_next),
        cmocka_unit_test(a_sum_that_does_not_fit_stays_at_its_maximum),
        cmocka_unit_test(durations_are_taken_as_spread_evenly_in_their_bucket),
        cmocka_unit_test(no_guess_lies_outside_what_was_counted),
        cmocka_unit_test(quantiles_grow_and_are_within_a_factor_of_two),
        cmocka_unit_test(a_share_that_is_none_gives_an_end),
        cmocka_unit_test(the_longest_durations_of_all_are_guessed_too),
        cmocka_unit_test(the_last_bucket_but_one_ends_where_the_last_begins),
        cmocka_unit_test(a_bucket_of_a_single_duration_counts),
        cmocka_unit_test(the_only_duration_is_every_quantile),
        cmocka_unit_test(the_first_bucket_begins_with_zero),
        cmocka_unit_test(the_longest_duration_is_told_exactly),
        cmocka_unit_test(the_longest_is_told_where_counts_do_not_add_up),
    };
    return cmocka_run_group_tests_name("histograms", tests, NULL, NULL);
}
