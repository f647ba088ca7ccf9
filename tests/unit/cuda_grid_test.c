/* How many blocks of threads a copy gets (cuda/grid.h): arithmetic, without a device. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "cuda/grid.h"

#define PLENTY 4096u /* tiles of a copy that has work for 1024 blocks: 64 MiB in long runs */

static void assert_grid(kvf_grid grid, uint32_t least, uint32_t most) {
    assert_int_equal(grid.least, least);
    assert_int_equal(grid.most, most);
}

static void the_defaults_are_16_and_32(void **unused) {
    (void)unused;
    assert_grid(kvf_grid_of(0, 0, 132), 16, 32);
    assert_grid(kvf_grid_of(0, 0, 0), 16, 32); /* a driver that does not say how many there are */
}

static void a_device_with_fewer_multiprocessors_limits_both(void **unused) {
    (void)unused;
    assert_grid(kvf_grid_of(0, 0, 20), 16, 20);
    assert_grid(kvf_grid_of(0, 0, 4), 4, 4);
    assert_grid(kvf_grid_of(4, UINT32_MAX, 132), 4, 132);
}

static void the_most_that_is_asked_for_limits_the_least(void **unused) {
    (void)unused;
    assert_grid(kvf_grid_of(0, 3, 132), 3, 3);
    assert_grid(kvf_grid_of(8, 4, 132), 4, 4);
    assert_grid(kvf_grid_of(0, 100, 132), 16, 100);
}

static void a_least_beyond_the_default_most_is_the_most(void **unused) {
    (void)unused;
    assert_grid(kvf_grid_of(50, 0, 132), 50, 50);
    assert_grid(kvf_grid_of(200, 0, 132), 132, 132);
}

static void a_copy_with_nothing_in_front_gets_the_least(void **unused) {
    (void)unused;
    const kvf_grid grid = {16, 32};
    assert_int_equal(kvf_grid_blocks(&grid, PLENTY, 0), 16);
    assert_int_equal(kvf_grid_blocks(&grid, UINT32_MAX - 3, 0), 16);
}

static void each_mebibyte_in_front_is_a_block_more_up_to_the_most(void **unused) {
    (void)unused;
    const kvf_grid grid = {16, 32};
    assert_int_equal(kvf_grid_blocks(&grid, PLENTY, 63), 16);
    assert_int_equal(kvf_grid_blocks(&grid, PLENTY, 64), 17);
    assert_int_equal(kvf_grid_blocks(&grid, PLENTY, 127), 17);
    assert_int_equal(kvf_grid_blocks(&grid, PLENTY, 15 * 64), 31);
    assert_int_equal(kvf_grid_blocks(&grid, PLENTY, 16 * 64), 32);
    assert_int_equal(kvf_grid_blocks(&grid, PLENTY, PLENTY), 32);
    assert_int_equal(kvf_grid_blocks(&grid, PLENTY, UINT64_MAX), 32);
}

static void a_copy_gets_no_more_blocks_than_have_work(void **unused) {
    (void)unused;
    const kvf_grid grid = {16, 32};
    assert_int_equal(kvf_grid_blocks(&grid, 1, 0), 1);
    assert_int_equal(kvf_grid_blocks(&grid, 4, PLENTY), 1); /* a block has 4 tiles at once */
    assert_int_equal(kvf_grid_blocks(&grid, 5, PLENTY), 2);
    assert_int_equal(kvf_grid_blocks(&grid, 80, PLENTY), 20);
}

static void a_fixed_number_stays_whatever_waits(void **unused) {
    (void)unused;
    const kvf_grid grid = kvf_grid_of(8, 8, 132);
    assert_int_equal(kvf_grid_blocks(&grid, PLENTY, 0), 8);
    assert_int_equal(kvf_grid_blocks(&grid, PLENTY, UINT64_MAX), 8);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_defaults_are_16_and_32),
        cmocka_unit_test(a_device_with_fewer_multiprocessors_limits_both),
        cmocka_unit_test(the_most_that_is_asked_for_limits_the_least),
        cmocka_unit_test(a_least_beyond_the_default_most_is_the_most),
        cmocka_unit_test(a_copy_with_nothing_in_front_gets_the_least),
        cmocka_unit_test(each_mebibyte_in_front_is_a_block_more_up_to_the_most),
        cmocka_unit_test(a_copy_gets_no_more_blocks_than_have_work),
        cmocka_unit_test(a_fixed_number_stays_whatever_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
