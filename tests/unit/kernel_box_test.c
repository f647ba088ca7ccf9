/* Compares each set of loops over boxes with memcpy, piece by piece: shapes, sizes, alignments, blocks, and no byte
 * beside them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "kernel/box.h"
#include "sanitized.h"

enum { SPACE = 1 << 18, SLACK = 64 };

static unsigned char cache[2][SPACE + SLACK] __attribute__((aligned(64)));
static unsigned char packed[2][SPACE + SLACK] __attribute__((aligned(64)));

static uint64_t state = 88172645463325252u;

static uint64_t draw(uint64_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

static void fill(unsigned char *bytes) {
    for (size_t i = 0; i < SPACE + SLACK; i++)
        bytes[i] = (unsigned char)draw(256);
}

/* Gathers and scatters the same bytes; the packed side begins `at` bytes into its buffer. */
static void check(const kvf_box_loops *loops, const kvf_box *box, size_t at, bool past) {
    const uint64_t bytes = kvf_box_bytes(box);
    assert_true(bytes + at <= SPACE);
    kvf_box plain = *box;
    plain.memory = box->memory - cache[0] + cache[1];
    memcpy(packed[0], packed[1], bytes + at + SLACK);
    loops->gather(box, packed[0] + at, past);
    kvf_box_plain.gather(box, packed[1] + at, past);
    assert_memory_equal(packed[0], packed[1], bytes + at + SLACK);
    for (size_t i = 0; i < bytes; i++)
        packed[1][at + i] = (unsigned char)(packed[0][at + i] * 5 + 1);
    memcpy(cache[1], cache[0], sizeof cache[0]);
    loops->scatter(box, packed[1] + at, past);
    kvf_box_plain.scatter(&plain, packed[1] + at, past);
    assert_memory_equal(cache[0], cache[1], sizeof cache[0]);
}

static void for_each_set(void (*test)(const kvf_box_loops *loops)) {
    const kvf_box_loops *loops;
    fill(cache[0]);
    fill(packed[1]);
    for (uint32_t i = 1; (loops = kvf_kernel_box_loops(i)) != NULL; i++) {
        print_message("loops: %s\n", loops->name);
        test(loops);
    }
}

/* Blocks in no particular order. */
static const uint32_t blocks[] = {2, 0, 3, 1};
enum { BLOCKS = 4 };

/* A box of all rows of its blocks except the first and last few; with heads before tokens, or the other way round. */
static kvf_box box_of(uint64_t rows, uint64_t units, uint64_t pieces, uint64_t piece, bool heads_first,
                      uint64_t gap, size_t offset) {
    kvf_box box = {.memory = cache[0] + offset,
                   .blocks = blocks,
                   .kernel_blocks = 1,
                   .block_rows = rows,
                   .units = units,
                   .pieces = pieces,
                   .piece_bytes = piece,
                   .piece_stride = piece};
    const uint64_t cell = pieces * piece;
    if (pieces > 1) { /* pieces are outermost: rows lie side by side */
        box.row_stride = piece;
        box.piece_stride = rows * piece + gap;
        box.unit_stride = pieces * box.piece_stride + gap;
        box.block_stride = units * box.unit_stride + gap;
    } else if (heads_first) {
        box.row_stride = cell + gap;
        box.unit_stride = rows * box.row_stride;
        box.block_stride = units * box.unit_stride + gap;
    } else {
        box.unit_stride = cell + gap;
        box.row_stride = units * box.unit_stride;
        box.block_stride = rows * box.row_stride + gap;
    }
    return box;
}

static void test_shape(const kvf_box_loops *loops, kvf_box box, size_t at) {
    const uint64_t all = BLOCKS * box.block_rows;
    if (BLOCKS * box.block_stride + SLACK > SPACE)
        return;
    for (int past = 0; past < 2; past++) {
        box.first_row = 0;
        box.rows = all;
        check(loops, &box, at, past);
        for (uint64_t skip = 1; skip < all; skip = 2 * skip + 1) {
            box.first_row = skip;
            box.rows = all - skip - (skip < all / 2 ? draw(all - skip) : 0);
            check(loops, &box, at, past);
        }
    }
}

static void test_runs(const kvf_box_loops *loops) {
    static const uint64_t sizes[] = {1,  2,  3,  4,   6,   8,   12,  16,  24,  32,
                                     48, 64, 80, 128, 192, 256, 320, 656, 1152};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (uint64_t units = 1; units <= 5; units += 2)
            for (uint64_t gap = 0; gap <= 64; gap = gap ? 8 * gap : 8)
                for (int heads_first = 0; heads_first < 2; heads_first++)
                    for (size_t at = 0; at < 3; at++)
                        test_shape(loops, box_of(4, units, 1, sizes[s], heads_first, gap, at == 1 ? 8 : 0),
                                   at * 24);
}

static void cells_of_any_size_and_alignment_are_moved_and_no_byte_beside_them(void **unused) {
    (void)unused;
    for_each_set(test_runs);
}

static void test_matrices(const kvf_box_loops *loops) {
    static const uint64_t rows[] = {1, 2, 7, 8, 16, 17, 64}, pieces[] = {2, 8, 15, 16, 64, 100, 128};
    static const uint64_t sizes[] = {1, 2, 4, 8, 16, 6};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
            for (size_t p = 0; p < sizeof pieces / sizeof *pieces; p++)
                for (uint64_t units = 1; units <= 3; units += 2)
                    for (uint64_t gap = 0; gap <= 24; gap += SANITIZED ? 24 : 8)
                        test_shape(loops, box_of(rows[r], units, pieces[p], sizes[s], true, gap, gap), gap);
}

static void cells_in_pieces_are_transposed_whatever_their_numbers(void **unused) {
    (void)unused;
    for_each_set(test_matrices);
}

static void test_kernel_blocks(const kvf_box_loops *loops) {
    static const uint32_t logical[] = {1, 0};
    kvf_box box = box_of(4, 3, 1, 64, true, 0, 0);
    box.blocks = logical; /* of two kernel blocks each: 2, 3, 0, 1 */
    box.kernel_blocks = 2;
    test_shape(loops, box, 0);
    box.rows = 1;
    box.first_row = 4;
    kvf_box direct = box;
    direct.blocks = (const uint32_t[]){3};
    direct.kernel_blocks = 1;
    direct.first_row = 0;
    loops->gather(&box, packed[0], false);
    loops->gather(&direct, packed[1], false);
    assert_memory_equal(packed[0], packed[1], kvf_box_bytes(&box));
}

static void a_logical_block_has_its_kernel_blocks_side_by_side(void **unused) {
    (void)unused;
    for_each_set(test_kernel_blocks);
}

/* Runs longer than the loops set aside or prefetch at a time. */
static void test_long(const kvf_box_loops *loops) {
    test_shape(loops, box_of(2, 1, 1, 30000, true, 0, 0), 0);
    test_shape(loops, box_of(2, 1, 1, 30001, true, 13, 5), 3);
    test_shape(loops, box_of(256, 1, 128, 1, true, 0, 0), 0);
    test_shape(loops, box_of(16, 1, 1024, 2, true, 0, 0), 0);
    test_shape(loops, box_of(4, 1, 3000, 2, true, 2, 0), 0);
    test_shape(loops, box_of(3000, 1, 4, 2, true, 0, 2), 1);
}

static void long_runs_and_large_matrices_are_moved_in_parts(void **unused) {
    (void)unused;
    for_each_set(test_long);
}

/* The last part of the matrix is shorter than a cache line, and the packed side begins in the middle of one. */
static void test_short_rest(const kvf_box_loops *loops) {
    for (size_t at = 0; at < 64; at += 7) {
        test_shape(loops, box_of(1025, 1, 8, 2, true, 0, 0), at);  /* 1024 rows of 16 bytes, and one */
        test_shape(loops, box_of(8, 1, 1025, 2, true, 0, at), at); /* the same the other way round */
    }
}

static void a_rest_of_a_matrix_may_be_shorter_than_a_line(void **unused) {
    (void)unused;
    for_each_set(test_short_rest);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cells_of_any_size_and_alignment_are_moved_and_no_byte_beside_them),
        cmocka_unit_test(cells_in_pieces_are_transposed_whatever_their_numbers),
        cmocka_unit_test(a_logical_block_has_its_kernel_blocks_side_by_side),
        cmocka_unit_test(long_runs_and_large_matrices_are_moved_in_parts),
        cmocka_unit_test(a_rest_of_a_matrix_may_be_shorter_than_a_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
