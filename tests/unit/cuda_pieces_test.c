/*
 * Pieces of one allocation of a device: none overlaps another, and gaps are used again.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "cuda/pieces.h"

#define BEGIN (UINT64_C(1) << 40)

static void pieces_lie_one_behind_the_other_and_are_aligned(void **state) {
    (void)state;
    kvf_pieces pieces = {.begin = BEGIN, .end = BEGIN + 1024};
    assert_int_equal(kvf_pieces_take(&pieces, 1), BEGIN);
    assert_int_equal(kvf_pieces_take(&pieces, 256), BEGIN + 256);
    assert_int_equal(kvf_pieces_take(&pieces, 512), BEGIN + 512);
    assert_int_equal(kvf_pieces_take(&pieces, 1), 0);
    kvf_pieces_free(&pieces);
    assert_int_equal(kvf_pieces_take(&pieces, 1024), BEGIN);
    kvf_pieces_free(&pieces);
}

static void a_gap_is_used_by_the_first_piece_that_fits(void **state) {
    (void)state;
    kvf_pieces pieces = {.begin = BEGIN, .end = BEGIN + 1024};
    const uint64_t first = kvf_pieces_take(&pieces, 300), second = kvf_pieces_take(&pieces, 256);
    assert_int_equal(second, BEGIN + 512);
    assert_true(kvf_pieces_give(&pieces, first));
    assert_int_equal(kvf_pieces_take(&pieces, 513), 0); /* neither in front nor behind */
    assert_int_equal(kvf_pieces_take(&pieces, 512), BEGIN);
    assert_true(kvf_pieces_give(&pieces, second));
    assert_int_equal(kvf_pieces_take(&pieces, 512), BEGIN + 512);
    kvf_pieces_free(&pieces);
}

static void what_is_no_piece_is_not_taken_back(void **state) {
    (void)state;
    kvf_pieces pieces = {.begin = BEGIN, .end = BEGIN + 1024}, none = {0};
    const uint64_t piece = kvf_pieces_take(&pieces, 512);
    assert_false(kvf_pieces_give(&pieces, piece + 256));
    assert_true(kvf_pieces_give(&pieces, piece));
    assert_false(kvf_pieces_give(&pieces, piece));
    assert_int_equal(kvf_pieces_take(&pieces, UINT64_MAX), 0);
    assert_int_equal(kvf_pieces_take(&none, 1), 0);
    assert_false(kvf_pieces_give(&none, 0));
}

/* Given any series of taking and giving, by a table of the pieces that there are. */
static void no_piece_overlaps_another(void **state) {
    enum { MOST = 40, BYTES = 65536 };
    (void)state;
    kvf_pieces pieces = {.begin = BEGIN, .end = BEGIN + BYTES};
    uint64_t begin[MOST] = {0}, bytes[MOST];
    uint64_t seed = 88172645463325252u;
    uint32_t refused = 0;
    for (int round = 0; round < 20000; round++) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        const uint64_t i = seed % MOST;
        if (begin[i]) {
            assert_true(kvf_pieces_give(&pieces, begin[i]));
            begin[i] = 0;
            continue;
        }
        bytes[i] = 1 + (seed >> 8) % 6000;
        begin[i] = kvf_pieces_take(&pieces, bytes[i]);
        refused += begin[i] == 0;
        assert_int_equal(begin[i] % 256, 0);
        for (uint64_t other = 0; begin[i] && other < MOST; other++)
            assert_true(other == i || !begin[other] || begin[other] + bytes[other] <= begin[i] ||
                        begin[i] + bytes[i] <= begin[other]);
        assert_true(!begin[i] || (begin[i] >= BEGIN && begin[i] + bytes[i] <= BEGIN + BYTES));
    }
    assert_true(refused > 100);
    kvf_pieces_free(&pieces);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_lie_one_behind_the_other_and_are_aligned),
        cmocka_unit_test(a_gap_is_used_by_the_first_piece_that_fits),
        cmocka_unit_test(what_is_no_piece_is_not_taken_back),
        cmocka_unit_test(no_piece_overlaps_another),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
