/* Small pieces of base: bytes that come from outside, and a descriptor that asks its owner for a call. */
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/bytes.h"
#include "base/wake.h"

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

static bool is_readable(const kvf_wake *wake) {
    struct pollfd look = {.fd = wake->fd, .events = POLLIN};
    return poll(&look, 1, 0) == 1;
}

static void a_descriptor_is_readable_exactly_while_it_is_set(void **state) {
    (void)state;
    kvf_wake wake = {-1, false};
    assert_int_equal(kvf_wake_open(&wake), KVF_OK);
    assert_false(is_readable(&wake));

    kvf_wake_set(&wake, true);
    assert_true(is_readable(&wake));
    kvf_wake_set(&wake, true); /* setting it twice counts once */
    kvf_wake_set(&wake, false);
    assert_false(is_readable(&wake));

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
    return cmocka_run_group_tests_name("bytes", bytes, NULL, NULL) +
           cmocka_run_group_tests_name("waking", waking, NULL, NULL);
}
