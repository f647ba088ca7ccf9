/*
 * Shards whose cells share bytes are refused; shards whose cells are merely interleaved are not.
 */
#include "shapes.h"
#include "shard/shard.h"

/*
 * K and V of two heads, 8 bytes a cell, 2 tokens a block, 3 blocks, one region of 512 bytes. Each test lays out the
 * layers; unless it says otherwise, a page is 64 bytes, head before token:
 *
 *   | K h0 t0 | K h0 t1 | K h1 t0 | K h1 t1 | V h0 t0 | V h0 t1 | V h1 t0 | V h1 t1 |
 */
typedef struct page {
    kvf_placement k, v;
} page;

static kvf_status try_layers(const kvf_placement *placements, uint32_t layers, uint64_t blocks,
                             uint32_t kernel_blocks) {
    kvf_model *model = attention(layers, 2, 4);
    const kvf_part_share parts[] = {{{0, 2}, 0, 1}, {{0, 2}, 0, 1}};
    const uint64_t region_bytes[] = {512, 512};
    kvf_group_shard_desc group = {.tokens_per_block = 2 * kernel_blocks,
                                  .kernel_blocks_per_block = kernel_blocks,
                                  .block_count = blocks,
                                  .parts = parts,
                                  .placements = placements};
    kvf_shard_desc desc = {.struct_size = sizeof desc,
                           .layers = {0, layers},
                           .region_bytes = region_bytes,
                           .region_count = 2,
                           .groups = &group};
    kvf_shard *shard = NULL;
    kvf_status status = kvf_shard_create(model, &desc, &shard);
    kvf_shard_free(shard);
    kvf_model_free(model);
    return status;
}

static kvf_status try_page(page p) {
    return try_layers(&p.k, 1, 3, 1);
}

/* K with these strides, and V in the other region, where it cannot overlap K. */
static kvf_status try_k(uint64_t block, uint64_t row, uint64_t unit) {
    return try_page((page){PLACED(0, 0, block, row, unit), PLACED(1, 0, 32, 8, 16)});
}

/* ---- one placement --------------------------------------------------------------------------- */

static void cells_may_stand_shoulder_to_shoulder(void **state) {
    (void)state;
    assert_ok(try_page((page){PLACED(0, 0, 64, 8, 16), PLACED(0, 32, 64, 8, 16)}));
}

static void any_nesting_of_the_three_axes_is_fine(void **state) {
    (void)state;
    assert_ok(try_k(32, 8, 16)); /* block, head, token */
    assert_ok(try_k(32, 16, 8)); /* block, token, head */
    assert_ok(try_k(8, 24, 48)); /* head, token, block */
    assert_ok(try_k(8, 48, 24)); /* token, head, block */
    assert_ok(try_k(16, 8, 48)); /* head, block, token */
    assert_ok(try_k(16, 48, 8)); /* token, block, head */
}

static void gaps_on_every_axis_are_fine(void **state) {
    (void)state;
    assert_ok(try_k(150, 11, 50));
}

static void rows_closer_than_a_cell_overlap(void **state) {
    (void)state;
    assert_fails(try_k(32, 7, 16), KVF_E_OVERLAP, "group full", "part k", "7 (row)");
}

static void units_closer_than_a_cell_overlap(void **state) {
    (void)state;
    assert_fails(try_k(64, 16, 7), KVF_E_OVERLAP, "part k", "7 (unit)");
}

static void blocks_closer_than_a_cell_overlap(void **state) {
    (void)state;
    assert_fails(try_k(7, 24, 48), KVF_E_OVERLAP, "part k", "7 (block)");
}

static void blocks_closer_than_their_content_overlap(void **state) {
    (void)state;
    assert_fails(try_k(31, 8, 16), KVF_E_OVERLAP, "part k", "step of 31 bytes", "clear the 32 inside");
}

static void units_closer_than_the_rows_inside_them_overlap(void **state) {
    (void)state;
    assert_fails(try_k(64, 8, 15), KVF_E_OVERLAP, "part k", "step of 15 bytes", "clear the 16 inside");
}

static void rows_closer_than_the_units_inside_them_overlap(void **state) {
    (void)state;
    assert_fails(try_k(64, 15, 8), KVF_E_OVERLAP, "part k", "step of 15 bytes", "clear the 16 inside");
}

static void rows_between_blocks_may_not_reach_into_them(void **state) {
    (void)state;
    /* Blocks are inside of rows here: 3 blocks 8 bytes apart need 24 bytes before the next row. */
    assert_fails(try_k(8, 23, 48), KVF_E_OVERLAP, "step of 23 bytes", "clear the 24 inside");
}

static void equal_strides_overlap(void **state) {
    (void)state;
    assert_fails(try_k(64, 16, 16), KVF_E_OVERLAP, "part k");
}

static void a_stride_of_zero_overlaps_where_it_is_stepped(void **state) {
    (void)state;
    assert_fails(try_k(0, 8, 16), KVF_E_OVERLAP, "0 (block)");
    assert_fails(try_k(64, 0, 16), KVF_E_OVERLAP, "0 (row)");
    assert_fails(try_k(64, 8, 0), KVF_E_OVERLAP, "0 (unit)");
}

static void the_block_stride_of_a_single_block_means_nothing(void **state) {
    (void)state;
    page apart = {PLACED(0, 0, 0, 8, 16), PLACED(0, 32, 0, 8, 16)};
    assert_ok(try_layers(&apart.k, 1, 1, 1));
    page interleaved = {PLACED(0, 0, 1, 16, 32), PLACED(0, 8, 70, 16, 32)};
    assert_ok(try_layers(&interleaved.k, 1, 1, 1));
    page crossed = {PLACED(0, 0, 1, 16, 32), PLACED(0, 15, 70, 16, 32)};
    assert_fails(try_layers(&crossed.k, 1, 1, 1), KVF_E_OVERLAP, "part k", "part v", "byte 16");
}

static void strides_step_over_kernel_blocks(void **state) {
    (void)state;
    /* 3 logical blocks of 2 kernel blocks: 6 pages. */
    page p = {PLACED(0, 0, 64, 8, 16), PLACED(0, 32, 64, 8, 16)};
    assert_ok(try_layers(&p.k, 1, 3, 2));
    p.k.block_stride = p.v.block_stride = 31;
    assert_fails(try_layers(&p.k, 1, 3, 2), KVF_E_OVERLAP, "31 (block)");
}

/* ---- placements against each other ----------------------------------------------------------- */

static void k_and_v_of_a_token_may_be_side_by_side(void **state) {
    (void)state;
    /* | K h0 t0 | V h0 t0 | K h0 t1 | V h0 t1 | K h1 t0 ... */
    assert_ok(try_page((page){PLACED(0, 0, 64, 16, 32), PLACED(0, 8, 64, 16, 32)}));
}

static void v_one_byte_too_early_shares_a_byte_with_k(void **state) {
    (void)state;
    assert_fails(try_page((page){PLACED(0, 0, 64, 16, 32), PLACED(0, 7, 64, 16, 32)}), KVF_E_OVERLAP,
                 "group full", "layer 0 part k", "layer 0 part v", "byte 7");
}

static void v_one_byte_too_late_shares_a_byte_with_the_next_token(void **state) {
    (void)state;
    assert_fails(try_page((page){PLACED(0, 0, 80, 16, 32), PLACED(0, 9, 80, 16, 32)}), KVF_E_OVERLAP,
                 "part k", "part v", "byte 16");
}

static void v_on_top_of_k_shares_every_byte(void **state) {
    (void)state;
    assert_fails(try_page((page){PLACED(0, 0, 64, 8, 16), PLACED(0, 0, 64, 8, 16)}), KVF_E_OVERLAP, "part k",
                 "part v");
}

static void k_and_v_ordered_differently_share_bytes_where_they_cross(void **state) {
    (void)state;
    /* K takes 0..8, 16..24, 32..40, 48..56 of a page; V takes 8..16, 24..32 and then 40..48, 56..64. */
    assert_ok(try_page((page){PLACED(0, 0, 64, 16, 32), PLACED(0, 8, 64, 32, 16)}));
    /* Tokens are 8 bytes apart: V h0 t1 is at 16..24, where K h0 t1 is. */
    assert_fails(try_page((page){PLACED(0, 0, 64, 16, 32), PLACED(0, 8, 64, 8, 32)}), KVF_E_OVERLAP,
                 "byte 16");
}

static void the_same_bytes_of_another_region_are_other_bytes(void **state) {
    (void)state;
    assert_ok(try_page((page){PLACED(0, 0, 64, 8, 16), PLACED(1, 0, 64, 8, 16)}));
}

static void a_part_that_sticks_out_of_its_page_meets_the_next_page(void **state) {
    (void)state;
    /* V's last cell is at 60..68 of a page of 64, K's first at 0..8: blocks 0 and 1 share 64..68. */
    assert_fails(try_page((page){PLACED(0, 0, 64, 8, 16), PLACED(0, 36, 64, 8, 16)}), KVF_E_OVERLAP, "part k",
                 "part v", "each block");
}

static void a_part_may_stick_out_of_its_page_where_the_next_one_has_a_hole(void **state) {
    (void)state;
    /* K takes 8..40 of every 72 bytes, V takes 40..72: its page begins at 40. */
    assert_ok(try_page((page){PLACED(0, 8, 72, 8, 16), PLACED(0, 40, 72, 8, 16)}));
    /* K takes 40..72 and V 72..104, which is 0..32 of the next page. */
    assert_ok(try_page((page){PLACED(0, 40, 72, 8, 16), PLACED(0, 72, 72, 8, 16)}));
}

static void two_layers_may_follow_each_other(void **state) {
    (void)state;
    page layers[] = {{PLACED(0, 0, 64, 8, 16), PLACED(0, 32, 64, 8, 16)},
                     {PLACED(0, 192, 64, 8, 16), PLACED(0, 224, 64, 8, 16)}};
    assert_ok(try_layers(&layers[0].k, 2, 3, 1));
}

static void two_layers_may_share_rows_of_blocks(void **state) {
    (void)state;
    page layers[] = {{PLACED(0, 0, 128, 8, 16), PLACED(0, 32, 128, 8, 16)},
                     {PLACED(0, 64, 128, 8, 16), PLACED(0, 96, 128, 8, 16)}};
    assert_ok(try_layers(&layers[0].k, 2, 3, 1));
}

static void a_layer_that_begins_in_the_last_block_of_another_is_refused(void **state) {
    (void)state;
    page layers[] = {{PLACED(0, 0, 64, 8, 16), PLACED(0, 32, 64, 8, 16)},
                     {PLACED(0, 128, 64, 8, 16), PLACED(0, 224, 64, 8, 16)}};
    assert_fails(try_layers(&layers[0].k, 2, 3, 1), KVF_E_OVERLAP, "layer 0 part k", "layer 1 part k");
}

static void pages_of_different_sizes_in_the_same_bytes_are_refused(void **state) {
    (void)state;
    assert_fails(try_page((page){PLACED(0, 0, 64, 8, 16), PLACED(0, 32, 96, 8, 16)}), KVF_E_OVERLAP, "part k",
                 "part v", "block strides 64 and 96");
}

static void pages_of_different_sizes_in_bytes_of_their_own_are_fine(void **state) {
    (void)state;
    assert_ok(try_page((page){PLACED(0, 0, 64, 8, 16), PLACED(0, 192, 96, 8, 16)}));
}

static void two_layers_on_the_same_memory_are_refused(void **state) {
    (void)state;
    page layers[] = {{PLACED(0, 0, 64, 8, 16), PLACED(0, 32, 64, 8, 16)},
                     {PLACED(0, 0, 64, 8, 16), PLACED(0, 32, 64, 8, 16)}};
    assert_fails(try_layers(&layers[0].k, 2, 3, 1), KVF_E_OVERLAP, "layer 0", "layer 1");
}

/* A cache whose heads are apart: all blocks of head 0, with K and V of a token side by side, and then all blocks of
 * head 1. */
static void heads_may_have_all_their_blocks_together(void **state) {
    (void)state;
    const page p = {PLACED(0, 0, 32, 16, 96), PLACED(0, 8, 32, 16, 96)};
    assert_ok(try_page(p));
    page early = p;
    early.v.offset = 7;
    assert_fails(try_page(early), KVF_E_OVERLAP, "layer 0 part k", "layer 0 part v", "byte 7");
    /* The second head's values begin in the last block of the first head's keys. */
    page crossed = {PLACED(0, 0, 32, 16, 96), PLACED(0, 8, 32, 16, 80)};
    assert_fails(try_page(crossed), KVF_E_OVERLAP, "part v", "step of 80 bytes", "clear the 88 inside");
    page layers[] = {p, p};
    layers[1].k.offset += 192;
    layers[1].v.offset += 192;
    assert_ok(try_layers(&layers[0].k, 2, 3, 1));
    layers[1].k.offset -= 8;
    assert_fails(try_layers(&layers[0].k, 2, 3, 1), KVF_E_OVERLAP, "layer 0 part v", "layer 1 part k");
}

/* A shard that another machine claims to have is refused before anything is allocated for it. */
static void more_heads_outside_of_blocks_than_are_looked_at_are_refused(void **state) {
    (void)state;
    enum { HEADS = 1 << 20 };
    kvf_model *model = attention(1, HEADS, 4);
    const kvf_part_share parts[] = {{{0, HEADS}, 0, 1}, {{0, HEADS}, 0, 1}};
    const kvf_placement places[] = {PLACED(0, 0, 16, 0, 32), PLACED(0, 8, 16, 0, 32)};
    const uint64_t bytes = 32ull * HEADS;
    kvf_group_shard_desc group = {
        .tokens_per_block = 1, .block_count = 2, .parts = parts, .placements = places};
    kvf_shard_desc desc = {.struct_size = sizeof desc,
                           .layers = {0, 1},
                           .region_bytes = &bytes,
                           .region_count = 1,
                           .groups = &group};
    kvf_shard *shard = NULL;
    uint64_t left = KVF_OVERLAP_FOREIGN;
    assert_fails(kvf_shard_make(model, &desc, NULL, &left, &shard), KVF_E_RANGE, "part k",
                 "outside of blocks");
    assert_int_equal(left, KVF_OVERLAP_FOREIGN);
    kvf_model_free(model);
}

static void two_groups_may_share_memory(void **state) {
    (void)state;
    /* Blocks of both groups come from one pool and have different ids. */
    kvf_model *model = hybrid(1);
    const kvf_part_share kv[] = {{{0, 1}, 0, 1}, {{0, 1}, 0, 1}};
    const kvf_part_share state_parts[] = {{{0, 4}, 0, 1}, {{0, 2}, 0, 1}, {{0, 2}, 0, 1}, {{0, 2}, 0, 1}};
    const kvf_placement kv_places[] = {PLACED(0, 0, 128, 8, 0), PLACED(0, 16, 128, 8, 0)};
    const kvf_placement state_places[] = {PLACED(0, 0, 128, 2, 6), PLACED(0, 24, 128, 2, 6),
                                          PLACED(0, 36, 128, 2, 6), PLACED(0, 48, 128, 0, 32)};
    const kvf_group_shard_desc groups[] = {
        {.tokens_per_block = 2, .block_count = 4, .parts = kv, .placements = kv_places},
        {.tokens_per_block = 1, .block_count = 4, .parts = state_parts, .placements = state_places}};
    const uint64_t bytes = 512;
    kvf_shard_desc desc = {.struct_size = sizeof desc,
                           .layers = {0, 2},
                           .region_bytes = &bytes,
                           .region_count = 1,
                           .groups = groups};
    kvf_shard *shard = NULL;

    assert_ok(kvf_shard_create(model, &desc, &shard));

    kvf_shard_free(shard);
    kvf_model_free(model);
}

static void a_part_without_units_overlaps_nothing(void **state) {
    (void)state;
    kvf_model *model = attention(1, 2, 4);
    const kvf_part_share parts[] = {{{0, 2}, 0, 1}, {{0, 0}, 0, 1}};
    const kvf_placement places[] = {PLACED(0, 0, 64, 8, 16), PLACED(0, 0, 64, 8, 16)};
    const uint64_t bytes = 512;
    kvf_group_shard_desc group = {
        .tokens_per_block = 2, .block_count = 3, .parts = parts, .placements = places};
    kvf_shard_desc desc = {.struct_size = sizeof desc,
                           .layers = {0, 1},
                           .region_bytes = &bytes,
                           .region_count = 1,
                           .groups = &group};
    kvf_shard *shard = NULL;

    assert_ok(kvf_shard_create(model, &desc, &shard));

    kvf_shard_free(shard);
    kvf_model_free(model);
}

/* The sizes may be claims of another machine. */
static void try_interleaved(uint32_t tokens) {
    kvf_model *model = attention(1, 1, 4);
    const kvf_part_share parts[] = {{{0, 1}, 0, 1}, {{0, 1}, 0, 1}};
    const kvf_placement places[] = {PLACED(0, 0, 0, 16, 8), PLACED(0, 8, 0, 16, 8)};
    const uint64_t bytes = 16ull * tokens;
    kvf_group_shard_desc group = {
        .tokens_per_block = tokens, .block_count = 1, .parts = parts, .placements = places};
    kvf_shard_desc desc = {.struct_size = sizeof desc,
                           .layers = {0, 1},
                           .region_bytes = &bytes,
                           .region_count = 1,
                           .groups = &group};
    kvf_shard *shard = NULL;
    if (tokens > KVF_OVERLAP_OWN)
        assert_fails(kvf_shard_create(model, &desc, &shard), KVF_E_RANGE, "layer 0 part k", "interleaved",
                     "16777216");
    /* The same shard as if from a peer: refused before anything is allocated for it. */
    uint64_t left = KVF_OVERLAP_FOREIGN;
    kvf_status status = kvf_shard_make(model, &desc, NULL, &left, &shard);
    if (tokens > KVF_OVERLAP_FOREIGN)
        assert_fails(status, KVF_E_RANGE, "layer 0 part k", "interleaved", "262144");
    else
        assert_ok(status);
    /* K and V of each token were counted; if the shard was refused, nothing was. */
    assert_int_equal(KVF_OVERLAP_FOREIGN - left, tokens > KVF_OVERLAP_FOREIGN ? 0 : 2ull * tokens);
    kvf_shard_free(shard);
    kvf_model_free(model);
}

static void blocks_of_absurdly_many_interleaved_cells_are_refused(void **state) {
    (void)state;
    try_interleaved(1u << 31);
    try_interleaved(1u << 23);
    try_interleaved(1u << 16);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cells_may_stand_shoulder_to_shoulder),
        cmocka_unit_test(any_nesting_of_the_three_axes_is_fine),
        cmocka_unit_test(gaps_on_every_axis_are_fine),
        cmocka_unit_test(rows_closer_than_a_cell_overlap),
        cmocka_unit_test(units_closer_than_a_cell_overlap),
        cmocka_unit_test(blocks_closer_than_a_cell_overlap),
        cmocka_unit_test(blocks_closer_than_their_content_overlap),
        cmocka_unit_test(units_closer_than_the_rows_inside_them_overlap),
        cmocka_unit_test(rows_closer_than_the_units_inside_them_overlap),
        cmocka_unit_test(rows_between_blocks_may_not_reach_into_them),
        cmocka_unit_test(equal_strides_overlap),
        cmocka_unit_test(a_stride_of_zero_overlaps_where_it_is_stepped),
        cmocka_unit_test(the_block_stride_of_a_single_block_means_nothing),
        cmocka_unit_test(strides_step_over_kernel_blocks),
        cmocka_unit_test(k_and_v_of_a_token_may_be_side_by_side),
        cmocka_unit_test(v_one_byte_too_early_shares_a_byte_with_k),
        cmocka_unit_test(v_one_byte_too_late_shares_a_byte_with_the_next_token),
        cmocka_unit_test(v_on_top_of_k_shares_every_byte),
        cmocka_unit_test(k_and_v_ordered_differently_share_bytes_where_they_cross),
        cmocka_unit_test(the_same_bytes_of_another_region_are_other_bytes),
        cmocka_unit_test(a_part_that_sticks_out_of_its_page_meets_the_next_page),
        cmocka_unit_test(a_part_may_stick_out_of_its_page_where_the_next_one_has_a_hole),
        cmocka_unit_test(two_layers_may_follow_each_other),
        cmocka_unit_test(two_layers_may_share_rows_of_blocks),
        cmocka_unit_test(a_layer_that_begins_in_the_last_block_of_another_is_refused),
        cmocka_unit_test(pages_of_different_sizes_in_the_same_bytes_are_refused),
        cmocka_unit_test(pages_of_different_sizes_in_bytes_of_their_own_are_fine),
        cmocka_unit_test(two_layers_on_the_same_memory_are_refused),
        cmocka_unit_test(heads_may_have_all_their_blocks_together),
        cmocka_unit_test(more_heads_outside_of_blocks_than_are_looked_at_are_refused),
        cmocka_unit_test(two_groups_may_share_memory),
        cmocka_unit_test(a_part_without_units_overlaps_nothing),
        cmocka_unit_test(blocks_of_absurdly_many_interleaved_cells_are_refused),
    };
    return cmocka_run_group_tests_name("overlap", tests, NULL, NULL);
}
