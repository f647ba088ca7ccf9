/*
 * Walks over steps, in pieces that are contiguous in a kernel block on both sides, and token shares.
 */
#include "plan/walk.h"
#include "shapes.h"

static kvf_walk_side all_tokens(uint32_t kernel_steps) {
    return (kvf_walk_side){kernel_steps, {0, 1, 1}};
}

static kvf_walk_side share_of(uint32_t kernel_steps, uint32_t index, uint32_t count, uint32_t width) {
    return (kvf_walk_side){kernel_steps, {index, count, width}};
}

static void check_walk(kvf_walk walk, const kvf_walk_piece *wanted, size_t count, const char *file,
                       int line) {
    kvf_walk_piece piece = {0};
    for (size_t i = 0; i < count; i++) {
        bool there = kvf_walk_next(&walk, &piece);
        if (!there || piece.step != wanted[i].step || piece.local_position != wanted[i].local_position ||
            piece.remote_position != wanted[i].remote_position || piece.steps != wanted[i].steps) {
            print_error("piece %zu: %s step %llu, positions %llu and %llu, %u steps\n", i,
                        there ? "" : "(none)", (unsigned long long)piece.step,
                        (unsigned long long)piece.local_position, (unsigned long long)piece.remote_position,
                        piece.steps);
            _fail(file, line);
        }
    }
    bool more = kvf_walk_next(&walk, &piece);
    bool again = kvf_walk_next(&walk, &piece); /* the walk stays at the end */
    if (more || again) {
        print_error("there is a piece after the last, of step %llu\n", (unsigned long long)piece.step);
        _fail(file, line);
    }
}

/* Pieces: {step, local position, remote position, steps}. */
#define assert_walk(local, remote, begin, end, ...)                                                          \
    check_walk((kvf_walk){(local), (remote), (begin), (end)}, (const kvf_walk_piece[]){__VA_ARGS__},         \
               COUNT_OF(((const kvf_walk_piece[]){__VA_ARGS__})), __FILE__, __LINE__)

#define assert_no_walk(local, remote, begin, end)                                                            \
    check_walk((kvf_walk){(local), (remote), (begin), (end)}, NULL, 0, __FILE__, __LINE__)

/* ---- block boundaries ------------------------------------------------------------------------ */

static void pieces_end_at_the_block_boundaries_of_both_sides(void **state) {
    (void)state;
    assert_walk(all_tokens(4), all_tokens(6), 0, 10, {0, 0, 0, 4}, {4, 4, 4, 2}, {6, 6, 6, 2}, {8, 8, 8, 2});
}

static void the_sides_can_be_exchanged(void **state) {
    (void)state;
    assert_walk(all_tokens(6), all_tokens(4), 0, 10, {0, 0, 0, 4}, {4, 4, 4, 2}, {6, 6, 6, 2}, {8, 8, 8, 2});
}

static void a_walk_may_begin_and_end_inside_blocks(void **state) {
    (void)state;
    assert_walk(all_tokens(4), all_tokens(6), 5, 9, {5, 5, 5, 1}, {6, 6, 6, 2}, {8, 8, 8, 1});
}

static void blocks_of_one_size_give_a_piece_each(void **state) {
    (void)state;
    assert_walk(all_tokens(16), all_tokens(16), 0, 40, {0, 0, 0, 16}, {16, 16, 16, 16}, {32, 32, 32, 8});
}

static void a_block_far_larger_than_the_other_is_cut_at_the_small_ones(void **state) {
    (void)state;
    assert_walk(all_tokens(2), all_tokens(1000), 1, 6, {1, 1, 1, 1}, {2, 2, 2, 2}, {4, 4, 4, 2});
}

static void states_are_walked_one_by_one(void **state) {
    (void)state;
    assert_walk(all_tokens(1), all_tokens(1), 0, 3, {0, 0, 0, 1}, {1, 1, 1, 1}, {2, 2, 2, 1});
}

static void a_walk_over_nothing_has_no_pieces(void **state) {
    (void)state;
    assert_no_walk(all_tokens(4), all_tokens(6), 0, 0);
    assert_no_walk(all_tokens(4), all_tokens(6), 7, 7);
}

static void a_walk_ends_inside_a_single_block(void **state) {
    (void)state;
    assert_walk(all_tokens(4), all_tokens(4), 9, 11, {9, 9, 9, 2});
}

static void positions_far_beyond_32_bits_are_exact(void **state) {
    (void)state;
    uint64_t far = UINT64_C(1) << 61; /* a multiple of 4; far + 1 is a multiple of 3 */
    assert_walk(all_tokens(4), all_tokens(3), far, far + 4, {far, far, far, 1},
                {far + 1, far + 1, far + 1, 3});
}

/* ---- token shares ---------------------------------------------------------------------------- */

static void a_remote_share_is_read_token_by_token(void **state) {
    (void)state;
    /* The remote rank keeps 1, 3, 5, 7 at positions 0, 1, 2, 3. */
    assert_walk(all_tokens(4), share_of(4, 1, 2, 1), 0, 8, {1, 1, 0, 1}, {3, 3, 1, 1}, {5, 5, 2, 1},
                {7, 7, 3, 1});
}

static void a_local_share_is_filled_token_by_token(void **state) {
    (void)state;
    assert_walk(share_of(4, 0, 2, 1), all_tokens(4), 1, 6, {2, 1, 2, 1}, {4, 2, 4, 1});
}

static void neighbouring_tokens_of_a_share_stay_together(void **state) {
    (void)state;
    /* Kept: 4..7 and 12..15, at positions 0..3 and 4..7. */
    assert_walk(all_tokens(8), share_of(8, 1, 2, 4), 0, 16, {4, 4, 0, 4}, {12, 12, 4, 4});
}

static void a_share_is_cut_at_its_own_block_boundaries(void **state) {
    (void)state;
    /* Remote blocks of 3 positions: 4 5 6 | 7 12 13 | 14 15. */
    assert_walk(all_tokens(8), share_of(3, 1, 2, 4), 0, 16, {4, 4, 0, 3}, {7, 7, 3, 1}, {12, 12, 4, 2},
                {14, 14, 6, 2});
}

static void a_walk_over_a_share_may_begin_and_end_between_its_tokens(void **state) {
    (void)state;
    assert_walk(all_tokens(8), share_of(8, 1, 2, 4), 6, 14, {6, 6, 2, 2}, {12, 12, 4, 2});
    assert_no_walk(all_tokens(8), share_of(8, 1, 2, 4), 8, 12);
}

static void two_sides_that_share_tokens_the_same_way_walk_positions(void **state) {
    (void)state;
    assert_walk(share_of(4, 1, 2, 2), share_of(4, 1, 2, 2), 0, 12, {2, 0, 0, 2}, {6, 2, 2, 2}, {10, 4, 4, 2});
}

static void two_sides_that_share_differently_meet_where_both_keep_a_token(void **state) {
    (void)state;
    /*
     * local   2 3 6 7 10 11 14 15 18 19    every other pair
     * remote  0 1 2 9 10 11 18 19 20       three of nine
     */
    assert_walk(share_of(16, 1, 2, 2), share_of(16, 0, 3, 3), 0, 20, {2, 0, 2, 1}, {10, 4, 4, 2},
                {18, 8, 6, 2});
}

static void two_shares_that_never_meet_have_no_pieces(void **state) {
    (void)state;
    assert_no_walk(share_of(4, 0, 2, 1), share_of(4, 1, 2, 1), 0, 100);
    assert_no_walk(share_of(4, 0, 2, 1), share_of(4, 3, 4, 1), 0, 100);
}

static void a_side_with_all_tokens_stores_a_token_at_its_own_number(void **state) {
    (void)state;
    kvf_walk_side side = all_tokens(4);
    assert_int_equal(kvf_walk_position(&side, 0), 0);
    assert_int_equal(kvf_walk_position(&side, 17), 17);
}

static void a_share_stores_its_tokens_densely(void **state) {
    (void)state;
    kvf_walk_side side = share_of(4, 1, 3, 2); /* keeps 2 3, 8 9, 14 15 */
    static const uint64_t kept[] = {2, 3, 8, 9, 14, 15};
    for (uint64_t i = 0; i < COUNT_OF(kept); i++)
        assert_int_equal(kvf_walk_position(&side, kept[i]), i);
}

static void the_position_of_a_token_that_is_not_kept_is_that_of_the_next_one(void **state) {
    (void)state;
    kvf_walk_side side = share_of(4, 1, 3, 2); /* keeps 2 3, 8 9, 14 15 */
    assert_int_equal(kvf_walk_position(&side, 0), 0);
    assert_int_equal(kvf_walk_position(&side, 4), 2);
    assert_int_equal(kvf_walk_position(&side, 5), 2);
    assert_int_equal(kvf_walk_position(&side, 7), 2);
    assert_int_equal(kvf_walk_position(&side, 10), 4);
    assert_int_equal(kvf_walk_position(&side, 12), 4);
}

/* ---- whether shares meet --------------------------------------------------------------------- */

static bool meet(kvf_token_share a, kvf_token_share b) {
    bool there = kvf_shares_meet(a, b);
    assert_int_equal(kvf_shares_meet(b, a), there);
    return there;
}

static void a_side_with_all_tokens_meets_every_share(void **state) {
    (void)state;
    assert_true(meet((kvf_token_share){0, 1, 1}, (kvf_token_share){6, 7, 3}));
    assert_true(meet((kvf_token_share){0, 1, 1}, (kvf_token_share){0, 1, 9}));
}

static void shares_of_one_kind_meet_only_themselves(void **state) {
    (void)state;
    assert_true(meet((kvf_token_share){2, 4, 8}, (kvf_token_share){2, 4, 8}));
    assert_false(meet((kvf_token_share){2, 4, 8}, (kvf_token_share){3, 4, 8}));
}

static void an_even_share_meets_no_odd_one(void **state) {
    (void)state;
    assert_false(meet((kvf_token_share){0, 2, 1}, (kvf_token_share){1, 4, 1}));
    assert_false(meet((kvf_token_share){0, 2, 1}, (kvf_token_share){3, 4, 1}));
    assert_true(meet((kvf_token_share){0, 2, 1}, (kvf_token_share){2, 4, 1}));
}

static void shares_of_coprime_counts_always_meet(void **state) {
    (void)state;
    assert_true(meet((kvf_token_share){1, 2, 1}, (kvf_token_share){0, 3, 1}));
    assert_true(meet((kvf_token_share){4, 5, 1}, (kvf_token_share){6, 7, 1}));
}

static void shares_of_different_widths_meet_where_their_tokens_do(void **state) {
    (void)state;
    kvf_token_share first_of_eight = {0, 2, 4};                     /* 0..3, 8..11 */
    assert_true(meet(first_of_eight, (kvf_token_share){3, 4, 1}));  /* 3, 7, 11 */
    assert_true(meet(first_of_eight, (kvf_token_share){1, 4, 2}));  /* 2 3, 10 11 */
    assert_false(meet(first_of_eight, (kvf_token_share){2, 4, 2})); /* 4 5, 12 13 */
}

static bool keeps(kvf_token_share share, uint32_t token) {
    return token / share.width % share.count == share.index;
}

static void whether_small_shares_meet_agrees_with_looking_at_every_token(void **state) {
    (void)state;
    kvf_token_share a, b;
    for (a.count = 1; a.count <= 4; a.count++)
        for (a.width = 1; a.width <= 4; a.width++)
            for (b.count = 1; b.count <= 4; b.count++)
                for (b.width = 1; b.width <= 4; b.width++)
                    for (a.index = 0; a.index < a.count; a.index++)
                        for (b.index = 0; b.index < b.count; b.index++) {
                            bool seen = false; /* all periods divide 16 * 9 */
                            for (uint32_t token = 0; token < 144 && !seen; token++)
                                seen = keeps(a, token) && keeps(b, token);
                            assert_int_equal(kvf_shares_meet(a, b), seen);
                        }
}

static void shares_as_wide_as_numbers_go_are_compared_without_overflow(void **state) {
    (void)state;
    kvf_token_share last = {UINT32_MAX - 1, UINT32_MAX, UINT32_MAX};
    assert_true(meet(last, last));
    assert_false(meet(last, (kvf_token_share){0, UINT32_MAX, UINT32_MAX}));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_end_at_the_block_boundaries_of_both_sides),
        cmocka_unit_test(the_sides_can_be_exchanged),
        cmocka_unit_test(a_walk_may_begin_and_end_inside_blocks),
        cmocka_unit_test(blocks_of_one_size_give_a_piece_each),
        cmocka_unit_test(a_block_far_larger_than_the_other_is_cut_at_the_small_ones),
        cmocka_unit_test(states_are_walked_one_by_one),
        cmocka_unit_test(a_walk_over_nothing_has_no_pieces),
        cmocka_unit_test(a_walk_ends_inside_a_single_block),
        cmocka_unit_test(positions_far_beyond_32_bits_are_exact),
        cmocka_unit_test(a_remote_share_is_read_token_by_token),
        cmocka_unit_test(a_local_share_is_filled_token_by_token),
        cmocka_unit_test(neighbouring_tokens_of_a_share_stay_together),
        cmocka_unit_test(a_share_is_cut_at_its_own_block_boundaries),
        cmocka_unit_test(a_walk_over_a_share_may_begin_and_end_between_its_tokens),
        cmocka_unit_test(two_sides_that_share_tokens_the_same_way_walk_positions),
        cmocka_unit_test(two_sides_that_share_differently_meet_where_both_keep_a_token),
        cmocka_unit_test(two_shares_that_never_meet_have_no_pieces),
        cmocka_unit_test(a_side_with_all_tokens_stores_a_token_at_its_own_number),
        cmocka_unit_test(a_share_stores_its_tokens_densely),
        cmocka_unit_test(the_position_of_a_token_that_is_not_kept_is_that_of_the_next_one),
        cmocka_unit_test(a_side_with_all_tokens_meets_every_share),
        cmocka_unit_test(shares_of_one_kind_meet_only_themselves),
        cmocka_unit_test(an_even_share_meets_no_odd_one),
        cmocka_unit_test(shares_of_coprime_counts_always_meet),
        cmocka_unit_test(shares_of_different_widths_meet_where_their_tokens_do),
        cmocka_unit_test(whether_small_shares_meet_agrees_with_looking_at_every_token),
        cmocka_unit_test(shares_as_wide_as_numbers_go_are_compared_without_overflow),
    };
    return cmocka_run_group_tests_name("walk", tests, NULL, NULL);
}
