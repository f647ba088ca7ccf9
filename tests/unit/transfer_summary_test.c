/* The summary of transfer samples for operators. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <kvferry/connector/transfer_summary.h>

static void samples_become_a_summary(void **state) {
    (void)state;
    const double transfer[] = {0.1, 0.3}, post[] = {0.001, 0.002}, bytes[] = {1048576, 3145728};
    const double descriptors[] = {3, 4};
    kvf_transfer_samples samples = {transfer,     post,     bytes, descriptors, 2, .failed_transfers = 1,
                                    .expired = 2, .late = 3};
    kvf_transfer_summary s;
    char text[300];

    assert_int_equal(kvf_transfer_summarise(&samples, &s), KVF_OK);

    assert_int_equal(s.transfers, 2);
    assert_true(s.average_transfer_ms == 200 && s.p90_transfer_ms == 280);
    assert_true(s.average_post_ms == 1.5 && s.p90_post_ms == 1.9);
    assert_true(s.average_mb == 2 && s.throughput_mb_per_s == 10 && s.average_descriptors == 3.5);
    assert_int_equal(s.failed * 100 + s.expired * 10 + s.late, 123);
    assert_false(s.empty);
    size_t length = kvf_transfer_summary_text(&s, text, sizeof text);
    assert_int_equal(length, strlen(text));
    assert_non_null(strstr(text, "transfers=2 transfer_ms=200.000 "));
    assert_non_null(strstr(text, " failed=1 expired=2 late=3"));
}

static void a_summary_of_nothing_is_empty_but_failures_are_something(void **state) {
    (void)state;
    kvf_transfer_samples samples = {0};
    kvf_transfer_summary s;
    assert_int_equal(kvf_transfer_summarise(&samples, &s), KVF_OK);
    assert_true(s.empty && s.throughput_mb_per_s == 0);
    samples.failed_notifications = 1;
    assert_int_equal(kvf_transfer_summarise(&samples, &s), KVF_OK);
    assert_false(s.empty);
}

static void failed_handshakes_and_notifications_count_as_failed_transfers_do(void **state) {
    (void)state;
    kvf_transfer_samples samples = {
        .failed_transfers = 1, .failed_handshakes = 20, .failed_notifications = 300};
    kvf_transfer_summary s;
    assert_int_equal(kvf_transfer_summarise(&samples, &s), KVF_OK);
    assert_int_equal(s.failed, 321);
    samples.failed_handshakes = UINT64_MAX;
    assert_int_equal(kvf_transfer_summarise(&samples, &s), KVF_E_OVERFLOW);
}

static void samples_that_are_no_measurements_are_refused(void **state) {
    (void)state;
    const double good[] = {1}, bad[] = {-1}, endless[] = {1.0 / 0.0};
    kvf_transfer_summary s;
    kvf_transfer_samples samples = {bad, good, good, good, .count = 1};
    assert_int_equal(kvf_transfer_summarise(&samples, &s), KVF_E_INVALID);
    samples = (kvf_transfer_samples){good, endless, good, good, .count = 1};
    assert_int_equal(kvf_transfer_summarise(&samples, &s), KVF_E_INVALID);
    samples = (kvf_transfer_samples){good, good, NULL, good, .count = 1};
    assert_int_equal(kvf_transfer_summarise(&samples, &s), KVF_E_INVALID);
}

static void transfers_that_took_no_time_have_no_throughput(void **state) {
    (void)state;
    const double zero[] = {0}, one[] = {1};
    kvf_transfer_samples samples = {zero, zero, one, one, .count = 1};
    kvf_transfer_summary s;
    assert_int_equal(kvf_transfer_summarise(&samples, &s), KVF_OK);
    assert_true(s.throughput_mb_per_s == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(samples_become_a_summary),
        cmocka_unit_test(a_summary_of_nothing_is_empty_but_failures_are_something),
        cmocka_unit_test(failed_handshakes_and_notifications_count_as_failed_transfers_do),
        cmocka_unit_test(samples_that_are_no_measurements_are_refused),
        cmocka_unit_test(transfers_that_took_no_time_have_no_throughput),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
