/* Small pieces of base: bytes from outside, and what a loop waits for. */
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/wake.h"
#include "base/watch.h"

/* ---- bytes ----------------------------------------------------------------------------------- */

static void numbers_are_taken_one_after_another_low_byte_first(void **state) {
    (void)state;
    const unsigned char bytes[] = {0x01, 0x34, 0x12, 0xff, 0xff, 0xff, 0xff};
    kvf_byte_reader in = {bytes, sizeof bytes, false};

    assert_int_equal(kvf_take_number(&in, 1), 1);
    assert_int_equal(kvf_take_number(&in, 2), 0x1234);
    assert_int_equal(kvf_take_number(&in, 4), UINT32_MAX);
    assert_int_equal(in.left, 0);
    assert_false(in.cut_off);
}

static void a_number_that_was_put_is_taken(void **state) {
    (void)state;
    unsigned char bytes[8];
    kvf_put_number(bytes, UINT64_C(0x8877665544332211), sizeof bytes);
    kvf_byte_reader in = {bytes, sizeof bytes, false};

    assert_int_equal(bytes[0], 0x11);
    assert_true(kvf_take_number(&in, sizeof bytes) == UINT64_C(0x8877665544332211));
}

static void after_something_was_missing_everything_reads_as_nothing(void **state) {
    (void)state;
    const unsigned char bytes[] = {1, 2, 3};
    kvf_byte_reader in = {bytes, sizeof bytes, false};

    assert_int_equal(kvf_take_number(&in, 4), 0);
    assert_true(in.cut_off);
    assert_int_equal(kvf_take_number(&in, 1), 0);
    assert_null(kvf_take_bytes(&in, 1));
    assert_null(kvf_take_bytes(&in, 0));
}

static void the_sum_is_that_of_fnv_1a(void **state) {
    (void)state;
    assert_true(kvf_byte_sum(KVF_BYTE_SUM_START, "", 0) == UINT64_C(0xcbf29ce484222325));
    assert_true(kvf_byte_sum(KVF_BYTE_SUM_START, "a", 1) == UINT64_C(0xaf63dc4c8601ec8c));
    assert_true(kvf_byte_sum(KVF_BYTE_SUM_START, "foobar", 6) == UINT64_C(0x85944171f73967e8));
}

static void a_sum_may_be_made_in_parts(void **state) {
    (void)state;
    uint64_t first = kvf_byte_sum(KVF_BYTE_SUM_START, "foo", 3);

    assert_true(kvf_byte_sum(first, "bar", 3) == kvf_byte_sum(KVF_BYTE_SUM_START, "foobar", 6));
}

/* ---- waking ---------------------------------------------------------------------------------- */

static bool is_readable(int fd) {
    struct pollfd look = {.fd = fd, .events = POLLIN};
    return poll(&look, 1, 0) == 1;
}

static void a_descriptor_is_readable_exactly_while_it_is_set(void **state) {
    (void)state;
    kvf_wake wake = {-1, false};
    assert_int_equal(kvf_wake_open(&wake), KVF_OK);
    assert_false(is_readable(wake.fd));

    kvf_wake_set(&wake, true);
    assert_true(is_readable(wake.fd));
    kvf_wake_set(&wake, true); /* once is enough */
    kvf_wake_set(&wake, false);
    assert_false(is_readable(wake.fd));

    kvf_wake_close(&wake);
    assert_int_equal(wake.fd, -1);
}

static void one_that_is_not_open_is_neither_set_nor_closed(void **state) {
    (void)state;
    kvf_wake wake = {-1, false};
    kvf_wake_set(&wake, true);
    assert_false(wake.on);
    kvf_wake_close(&wake);
    assert_int_equal(wake.fd, -1);
}

/* ---- waiting --------------------------------------------------------------------------------- */

static void a_timer_is_readable_from_its_time_on(void **state) {
    (void)state;
    const uint64_t never = UINT64_MAX;
    kvf_timer timer;
    assert_int_equal(kvf_timer_open(&timer), KVF_OK);
    assert_true(timer.at_ns == never && !is_readable(timer.fd));
    const uint64_t past = kvf_now(&kvf_monotonic), later = past + 3600 * KVF_SECOND;
    kvf_timer_set(&timer, later);
    assert_true(timer.at_ns == later && !is_readable(timer.fd));
    kvf_timer_set(&timer, past);
    assert_true(is_readable(timer.fd));
    kvf_timer_set(&timer, later); /* what had expired is forgotten */
    assert_false(is_readable(timer.fd));
    kvf_timer_set(&timer, 0); /* long ago, and not never */
    assert_true(is_readable(timer.fd));
    kvf_timer_set(&timer, never);
    assert_true(timer.at_ns == never && !is_readable(timer.fd));
    kvf_timer_close(&timer);
    assert_int_equal(timer.fd, -1);
    kvf_timer_close(&timer);
}

static void the_earliest_of_several_times_counts(void **state) {
    (void)state;
    kvf_timer timer;
    assert_int_equal(kvf_timer_open(&timer), KVF_OK);
    const uint64_t past = kvf_now(&kvf_monotonic), later = past + 3600 * KVF_SECOND;
    kvf_timer_by(&timer, later);
    assert_true(timer.at_ns == later);
    kvf_timer_by(&timer, later + 1);
    assert_true(timer.at_ns == later);
    kvf_timer_by(&timer, past);
    assert_true(timer.at_ns == past && is_readable(timer.fd));
    kvf_timer_by(&timer, later);
    assert_true(timer.at_ns == past && is_readable(timer.fd));
    kvf_timer_close(&timer);
}

static void a_set_is_readable_while_one_of_its_descriptors_is(void **state) {
    (void)state;
    kvf_wake first = {-1, false}, second = {-1, false};
    struct epoll_event event;
    int set;
    assert_int_equal(kvf_watch_open(&set), KVF_OK);
    assert_int_equal(kvf_wake_open(&first), KVF_OK);
    assert_int_equal(kvf_wake_open(&second), KVF_OK);
    assert_int_equal(kvf_watch_add(set, first.fd, &first), KVF_OK);
    assert_int_equal(kvf_watch_add(set, second.fd, &second), KVF_OK);
    assert_int_equal(kvf_watch_add(set, second.fd, &second), KVF_E_IO); /* it is in the set already */
    assert_false(is_readable(set));
    kvf_wake_set(&second, true);
    assert_true(is_readable(set));
    assert_int_equal(epoll_wait(set, &event, 1, 0), 1);
    assert_ptr_equal(event.data.ptr, &second);
    const int kept = dup(second.fd); /* as a forked child keeps it open */
    kvf_watch_close(set, &second.fd);
    assert_int_equal(second.fd, -1);
    assert_false(is_readable(set));
    kvf_watch_close(set, &second.fd);
    kvf_wake_close(&first);
    (void)close(kept);
    kvf_fd_close(&set);
    assert_int_equal(set, -1);
}

static void random_bytes_differ(void **state) {
    (void)state;
    unsigned char one[32] = {0}, two[32] = {0};
    assert_int_equal(kvf_random(one, sizeof one), KVF_OK);
    assert_int_equal(kvf_random(two, sizeof two), KVF_OK);
    assert_memory_not_equal(one, two, sizeof one);
}

int main(void) {
    const struct CMUnitTest bytes[] = {
        cmocka_unit_test(numbers_are_taken_one_after_another_low_byte_first),
        cmocka_unit_test(a_number_that_was_put_is_taken),
        cmocka_unit_test(after_something_was_missing_everything_reads_as_nothing),
        cmocka_unit_test(the_sum_is_that_of_fnv_1a),
        cmocka_unit_test(a_sum_may_be_made_in_parts),
    };
    const struct CMUnitTest waking[] = {
        cmocka_unit_test(a_descriptor_is_readable_exactly_while_it_is_set),
        cmocka_unit_test(one_that_is_not_open_is_neither_set_nor_closed),
    };
    const struct CMUnitTest waiting[] = {
        cmocka_unit_test(a_timer_is_readable_from_its_time_on),
        cmocka_unit_test(the_earliest_of_several_times_counts),
        cmocka_unit_test(a_set_is_readable_while_one_of_its_descriptors_is),
        cmocka_unit_test(random_bytes_differ),
    };
    return cmocka_run_group_tests_name("bytes", bytes, NULL, NULL) +
           cmocka_run_group_tests_name("waking", waking, NULL, NULL) +
           cmocka_run_group_tests_name("waiting", waiting, NULL, NULL);
}
