/* Received blocks are converted to the wanted form, whatever both forms are, compared cell by cell; and blocks are
 * copied. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "connector/postprocess.h"
#include "postprocess_world.h"
#include "sanitized.h"

/* ---- permuting ------------------------------------------------------------------------------- */

static void any_form_becomes_any_other_cell_by_cell(void **state) {
    (void)state;
    for (int round = 0; round < OFTEN(3000); round++) {
        /* Given blocks in one form, in a region with gaps, at any address */
        kvf_received_shape shape = any_shape();
        uint64_t pages = draw(4), step = blocks_of_page(&shape);
        world w = world_of(shape, pages * step + 1 + draw(4), 1 + draw(2), draw(4) ? draw(70) : 0);
        list_blocks(&w, pages * step);
        expect(&w, UINT64_MAX);
        /* When they are permuted */
        assert_int_equal(kvf_permute_received(&w.shape, &w.region, 1, w.ids, w.id_count, NULL), KVF_OK);
        /* Then every cell is where it belongs, and no other byte has changed */
        check(&w);
        end(&w);
    }
}

/* Permutes the listed blocks as one page, by one set of loops in one way. */
static void permute_with(const kvf_permute_kernels *set, kvf_permute_way way, world *w) {
    kvf_gather gather;
    uint64_t bytes;
    assert_int_equal(kvf_gather_of(&w->shape, &gather), KVF_OK);
    assert_true(kvf_permute_memory_bytes(&gather, way, &bytes));
    void *memory = malloc(bytes);
    assert_non_null(memory);
    kvf_permutation permutation;
    kvf_permute_prepare(&gather, way, set, memory, &permutation);
    unsigned char *blocks[8], *next[8];
    assert_true(w->id_count <= 8);
    for (size_t b = 0; b < w->id_count; b++) {
        blocks[b] = (unsigned char *)w->region.base + w->ids[b] * w->region.block_stride_bytes;
        next[b] = blocks[b];
    }
    kvf_permute_page(&permutation, blocks, draw(2) ? next : NULL);
    free(memory);
}

static void every_set_of_loops_permutes_both_ways(void **state) {
    (void)state;
    const kvf_permute_kernels *set;
    for (uint32_t i = 0; (set = kvf_kernel_permute_set(i)) != NULL; i++) {
        print_message("loops: %s\n", set->name);
        for (int round = 0; round < OFTEN(4000); round++) {
            kvf_received_shape shape = any_shape();
            uint64_t step = blocks_of_page(&shape);
            world w = world_of(shape, step + 1, 1, draw(4) ? draw(70) : 0);
            list_blocks(&w, step);
            expect(&w, UINT64_MAX);
            permute_with(set, round % 2 ? KVF_PERMUTE_ROTATE : KVF_PERMUTE_GATHER, &w);
            check(&w);
            end(&w);
        }
    }
}

/* The shapes for which the vector code has loops of its own: few heads, small cells, many tokens. */
static void every_set_of_loops_gathers_small_cells_of_few_heads(void **state) {
    (void)state;
    static const uint64_t cells[] = {1, 2, 4, 8, 12, 16, 32}, heads[] = {2, 4, 8, 16},
                          tokens[] = {16, 32, 48, 64, 128, 130};
    const kvf_permute_kernels *set;
    for (uint32_t i = 0; (set = kvf_kernel_permute_set(i)) != NULL; i++)
        for (size_t c = 0; c < sizeof cells / sizeof *cells; c++)
            for (size_t h = 0; h < sizeof heads / sizeof *heads; h++)
                for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
                    for (uint64_t how = 0; how < 4; how++) {
                        /* Either order first; wanted blocks as long as received ones, or twice as long */
                        kvf_page_order first = how & 1 ? KVF_PAGE_HND : KVF_PAGE_NHD;
                        uint64_t ratio = how & 2 ? 2 : 1;
                        kvf_received_shape shape =
                            shape_of(heads[h], cells[c], first, tokens[t] / ratio,
                                     first == KVF_PAGE_HND ? KVF_PAGE_NHD : KVF_PAGE_HND, tokens[t]);
                        world w = world_of(shape, 2, 1, draw(2) ? draw(70) : 0);
                        list_blocks(&w, 1);
                        expect(&w, UINT64_MAX);
                        permute_with(set, KVF_PERMUTE_GATHER, &w);
                        check(&w);
                        end(&w);
                    }
}

/* Strips, ribbons, tiles, and the remainders at their ends. */
static void small_cells_are_transposed_for_every_number_of_heads_and_tokens(void **state) {
    (void)state;
    const kvf_permute_kernels *set;
    for (uint32_t i = 0; (set = kvf_kernel_permute_set(i)) != NULL; i++)
        for (uint64_t cell = 1; cell <= 16; cell *= 2)
            for (uint64_t heads = 1; heads <= 35; heads += 1 + heads / OFTEN(20))
                for (uint64_t tokens = 1; tokens <= 150; tokens += 1 + tokens / OFTEN(12))
                    for (int order = 0; order < 2; order++) {
                        world w = world_of(shape_of(heads, cell, (kvf_page_order)order, tokens,
                                                    (kvf_page_order)!order, tokens),
                                           2, 1, draw(3));
                        list_blocks(&w, 1);
                        expect(&w, UINT64_MAX);
                        permute_with(set, KVF_PERMUTE_GATHER, &w);
                        check(&w);
                        end(&w);
                    }
}

static void the_reverse_change_of_form_gives_back_what_was_there(void **state) {
    (void)state;
    for (int round = 0; round < OFTEN(300); round++) {
        kvf_received_shape shape = any_shape(), reverse = shape;
        shape.wanted.tokens = shape.received.tokens; /* the same blocks both ways */
        reverse = shape_of(shape.heads, shape.cell_bytes, shape.wanted.order, shape.wanted.tokens,
                           shape.received.order, shape.received.tokens);
        world w = world_of(shape, 3, 1, 0);
        list_blocks(&w, 3);
        assert_int_equal(kvf_permute_received(&shape, &w.region, 1, w.ids, 3, NULL), KVF_OK);
        assert_int_equal(kvf_permute_received(&reverse, &w.region, 1, w.ids, 3, NULL), KVF_OK);
        check(&w);
        end(&w);
    }
}

static void every_region_is_permuted(void **state) {
    (void)state;
    kvf_received_shape shape = shape_of(3, 64, KVF_PAGE_HND, 2, KVF_PAGE_NHD, 6);
    world a = world_of(shape, 5, 1, 0), b = world_of(shape, 4, 2, 1);
    list_blocks(&b, 3);
    memcpy(a.ids, b.ids, sizeof a.ids);
    a.id_count = b.id_count;
    expect(&a, UINT64_MAX);
    expect(&b, UINT64_MAX);
    kvf_block_region regions[2] = {a.region, b.region};
    assert_int_equal(kvf_permute_received(&shape, regions, 2, b.ids, 3, NULL), KVF_OK);
    check(&a);
    check(&b);
    end(&a);
    end(&b);
}

static void without_blocks_or_regions_nothing_happens(void **state) {
    (void)state;
    world w = world_of(shape_of(2, 4, KVF_PAGE_HND, 2, KVF_PAGE_HND, 4), 2, 1, 0);
    w.ids[0] = 0;
    assert_int_equal(kvf_permute_received(&w.shape, &w.region, 1, NULL, 0, NULL), KVF_OK);
    assert_int_equal(kvf_permute_received(&w.shape, NULL, 0, w.ids, 1, NULL), KVF_OK);
    assert_int_equal(kvf_finish_received(&w.shape, &w.region, 1, NULL, 0, NULL), KVF_OK);
    kvf_received_request empty = {NULL, 0, 0};
    assert_int_equal(kvf_finish_received(&w.shape, &w.region, 1, &empty, 1, NULL), KVF_OK);
    check(&w);
    end(&w);
}

/* ---- the receive step ------------------------------------------------------------------------ */

static void tokens_past_the_covered_ones_become_zero(void **state) {
    (void)state;
    for (int round = 0; round < OFTEN(1500); round++) {
        kvf_received_shape shape = any_shape();
        uint64_t pages = draw(4), step = blocks_of_page(&shape);
        world w = world_of(shape, pages * step + 1, 1 + draw(2), draw(5));
        list_blocks(&w, pages * step);
        uint64_t covered = draw(w.id_count * shape.wanted.tokens + 1);
        expect(&w, covered);
        kvf_received_request request = {w.ids, w.id_count, covered};
        assert_int_equal(kvf_finish_received(&w.shape, &w.region, 1, &request, 1, NULL), KVF_OK);
        check(&w);
        end(&w);
    }
}

static void each_request_has_its_own_cover(void **state) {
    (void)state;
    world w = world_of(shape_of(2, 1, KVF_PAGE_HND, 4, KVF_PAGE_HND, 4), 3, 1, 0);
    const uint32_t one[] = {2}, other[] = {0, 1};
    kvf_received_request requests[] = {{one, 1, 3}, {other, 2, 4}};
    memcpy(w.memory, "abcdefghijklmnopqrstuvwx", 8);
    memcpy((unsigned char *)w.region.base + 2 * w.region.block_stride_bytes, "qrstuvwx", 8);
    memcpy(w.expected, w.memory, w.bytes);
    memset(w.expected + w.region.block_stride_bytes, 0, 8);
    memcpy(w.expected + 2 * w.region.block_stride_bytes, "qrs\0uvw", 8);
    assert_int_equal(kvf_finish_received(&w.shape, &w.region, 1, requests, 2, NULL), KVF_OK);
    check(&w);
    end(&w);
}

/* ---- scratch --------------------------------------------------------------------------------- */

static void scratch_of_exactly_the_size_asked_for_is_enough(void **state) {
    (void)state;
    for (int round = 0; round < OFTEN(500); round++) {
        kvf_received_shape shape = any_shape();
        uint64_t pages = draw(4), step = blocks_of_page(&shape);
        world w = world_of(shape, pages * step + 1, 1, 0);
        list_blocks(&w, pages * step);
        expect(&w, UINT64_MAX);
        kvf_scratch scratch;
        assert_int_equal(kvf_received_scratch_bytes(&shape, w.id_count, &scratch.bytes), KVF_OK);
        scratch.memory = malloc(scratch.bytes);
        assert_non_null(scratch.memory);
        assert_int_equal(kvf_permute_received(&shape, &w.region, 1, w.ids, w.id_count, &scratch), KVF_OK);
        check(&w);
        free(scratch.memory);
        end(&w);
    }
}

static void scratch_for_long_cells_is_a_fraction_of_a_page(void **state) {
    (void)state;
    kvf_received_shape shape = shape_of(8, 256, KVF_PAGE_HND, 128, KVF_PAGE_NHD, 128);
    uint64_t bytes;
    assert_int_equal(kvf_received_scratch_bytes(&shape, 1, &bytes), KVF_OK);
    assert_true(bytes < 8 * 128 * 256 / 10);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void a_shape_without_meaning_is_refused(void **state) {
    (void)state;
    const kvf_received_shape good = shape_of(2, 4, KVF_PAGE_HND, 2, KVF_PAGE_HND, 4);
    uint64_t bytes;
    kvf_received_shape bad = good;
    bad.struct_size = 0;
    assert_refused(kvf_received_scratch_bytes(&bad, 1, &bytes), KVF_E_INVALID, "struct_size");
    bad = good;
    bad.heads = 0;
    assert_refused(kvf_received_scratch_bytes(&bad, 1, &bytes), KVF_E_INVALID, "heads");
    bad = good;
    bad.cell_bytes = 0;
    assert_refused(kvf_received_scratch_bytes(&bad, 1, &bytes), KVF_E_INVALID, "cell_bytes");
    bad = good;
    bad.received.tokens = 0;
    assert_refused(kvf_received_scratch_bytes(&bad, 1, &bytes), KVF_E_INVALID, "received.tokens");
    bad = good;
    bad.wanted.order = (kvf_page_order)7;
    assert_refused(kvf_received_scratch_bytes(&bad, 1, &bytes), KVF_E_INVALID, "wanted.order is 7");
    bad = good;
    bad.received.tokens = 3;
    assert_refused(kvf_received_scratch_bytes(&bad, 1, &bytes), KVF_E_NOT_EXPRESSIBLE, "divide");
    bad = good;
    bad.heads = UINT64_MAX / 2;
    assert_refused(kvf_received_scratch_bytes(&bad, 1, &bytes), KVF_E_OVERFLOW, "page");
    bad = shape_of(1, 1, KVF_PAGE_HND, UINT64_MAX / 4, KVF_PAGE_NHD, 1);
    assert_refused(kvf_received_scratch_bytes(&bad, 1, &bytes), KVF_E_OVERFLOW, "blocks");
    assert_refused(kvf_received_scratch_bytes(&good, SIZE_MAX, &bytes), KVF_E_OVERFLOW, "scratch");
    assert_refused(kvf_received_scratch_bytes(NULL, 1, &bytes), KVF_E_INVALID, "shape is NULL");
    assert_refused(kvf_received_scratch_bytes(&good, 1, NULL), KVF_E_INVALID, "out is NULL");
    assert_refused(kvf_permute_received(NULL, NULL, 0, NULL, 0, NULL), KVF_E_INVALID, "shape is NULL");
}

static kvf_status permute(const world *w, kvf_block_region region) {
    return kvf_permute_received(&w->shape, &region, 1, w->ids, w->id_count, NULL);
}

static void a_region_that_does_not_hold_what_it_says_is_refused(void **state) {
    (void)state;
    world w = world_of(shape_of(2, 4, KVF_PAGE_HND, 2, KVF_PAGE_HND, 4), 4, 2, 0);
    list_blocks(&w, 4);
    kvf_block_region bad = w.region;
    bad.base = NULL;
    assert_refused(permute(&w, bad), KVF_E_INVALID, "base is NULL");
    bad = w.region;
    bad.bytes--;
    assert_refused(permute(&w, bad), KVF_E_RANGE, "its blocks take");
    bad = w.region;
    bad.block_count = 0;
    assert_refused(permute(&w, bad), KVF_E_INVALID, "block_count is 0");
    bad = w.region;
    bad.block_count = UINT64_C(1) << 32;
    assert_refused(permute(&w, bad), KVF_E_INVALID, "block_count is 4294967296");
    bad = w.region;
    bad.part_bytes = 31;
    assert_refused(permute(&w, bad), KVF_E_INVALID, "part_bytes is 31");
    bad = w.region;
    bad.part_bytes = 0;
    assert_refused(permute(&w, bad), KVF_E_INVALID, "part_bytes is 0");
    bad = w.region;
    bad.part_stride_bytes = 31;
    assert_refused(permute(&w, bad), KVF_E_OVERLAP, "part_stride_bytes is 31");
    bad = w.region;
    bad.block_stride_bytes = bad.part_stride_bytes + 31;
    assert_refused(permute(&w, bad), KVF_E_OVERLAP, "block_stride_bytes");
    bad = w.region;
    bad.block_stride_bytes = UINT64_MAX / 2;
    assert_refused(permute(&w, bad), KVF_E_OVERFLOW, "64 bits");
    kvf_block_region twice[2] = {w.region, w.region};
    assert_refused(kvf_permute_received(&w.shape, twice, 2, w.ids, w.id_count, NULL), KVF_E_OVERLAP,
                   "regions 0 and 1");
    assert_refused(kvf_permute_received(&w.shape, NULL, 1, w.ids, w.id_count, NULL), KVF_E_INVALID,
                   "regions is NULL");
    check(&w);
    end(&w);
}

static void blocks_that_are_not_there_or_listed_twice_are_refused_and_nothing_changes(void **state) {
    (void)state;
    world w = world_of(shape_of(2, 4, KVF_PAGE_HND, 2, KVF_PAGE_HND, 4), 4, 1, 0);
    const uint32_t beyond[] = {0, 4}, twice[] = {1, 3, 1}, absent[] = {UINT32_MAX}, good[] = {0, 1, 2};
    assert_refused(kvf_permute_received(&w.shape, &w.region, 1, beyond, 2, NULL), KVF_E_RANGE,
                   "entry 1 is block 4; allowed: 0 to 3");
    assert_refused(kvf_permute_received(&w.shape, &w.region, 1, absent, 1, NULL), KVF_E_RANGE, "4294967295");
    assert_refused(kvf_permute_received(&w.shape, &w.region, 1, twice, 3, NULL), KVF_E_OVERLAP,
                   "entry 2 is block 1");
    assert_refused(kvf_permute_received(&w.shape, &w.region, 1, NULL, 2, NULL), KVF_E_INVALID, "NULL");
    kvf_received_request shared[] = {{good, 2, 8}, {good + 1, 2, 8}};
    assert_refused(kvf_finish_received(&w.shape, &w.region, 1, shared, 2, NULL), KVF_E_OVERLAP, "request 1");
    kvf_received_request too_much[] = {{good, 1, 4}, {good + 1, 1, 5}};
    assert_refused(kvf_finish_received(&w.shape, &w.region, 1, too_much, 2, NULL), KVF_E_RANGE,
                   "request 1: covered_tokens is 5; allowed: 0 to 4");
    assert_refused(kvf_finish_received(&w.shape, &w.region, 1, NULL, 2, NULL), KVF_E_INVALID, "requests");
    w.shape.received.tokens = 8;
    assert_refused(kvf_permute_received(&w.shape, &w.region, 1, good, 3, NULL), KVF_E_INVALID,
                   "each received page takes 2");
    check(&w);
    end(&w);
}

static void scratch_that_is_too_small_or_askew_is_refused(void **state) {
    (void)state;
    world w = world_of(shape_of(2, 4, KVF_PAGE_HND, 2, KVF_PAGE_HND, 4), 4, 1, 0);
    list_blocks(&w, 2);
    uint64_t memory[512];
    kvf_scratch scratch = {memory, 0};
    assert_int_equal(kvf_received_scratch_bytes(&w.shape, 2, &scratch.bytes), KVF_OK);
    assert_true(scratch.bytes < sizeof memory);
    scratch.bytes--;
    assert_refused(kvf_permute_received(&w.shape, &w.region, 1, w.ids, 2, &scratch), KVF_E_INVALID,
                   "scratch.bytes");
    scratch = (kvf_scratch){(unsigned char *)memory + 4, sizeof memory - 4};
    assert_refused(kvf_permute_received(&w.shape, &w.region, 1, w.ids, 2, &scratch), KVF_E_INVALID,
                   "aligned");
    scratch = (kvf_scratch){NULL, sizeof memory};
    assert_refused(kvf_permute_received(&w.shape, &w.region, 1, w.ids, 2, &scratch), KVF_E_INVALID, "NULL");
    check(&w);
    end(&w);
}

/* ---- copying --------------------------------------------------------------------------------- */

/* The source has two layers of four blocks with two parts; the destination has two layers of three blocks. */
typedef struct copies {
    unsigned char from[2][80], to[2][60];
    kvf_block_region source[2], destination[2];
} copies;

static void start_copies(copies *c) {
    static const char *const names[] = {"l0", "l1"};
    fill((unsigned char *)c->from, sizeof c->from);
    memset(c->to, 0xee, sizeof c->to);
    for (size_t i = 0; i < 2; i++) {
        /* The source: all first parts, then all second parts. The destination: parts side by side. */
        c->source[i] = (kvf_block_region){names[i], c->from[i], 80, 4, 10, 2, 40, 9, KVF_MEMORY_HOST, 0};
        c->destination[1 - i] =
            (kvf_block_region){names[i], c->to[i], 60, 3, 20, 2, 10, 9, KVF_MEMORY_HOST, 0};
    }
}

static void assert_untouched(const copies *c) {
    for (size_t layer = 0; layer < 2; layer++)
        for (size_t i = 0; i < sizeof c->to[layer]; i++)
            assert_int_equal(c->to[layer][i], 0xee);
}

static void pairs_are_copied_in_every_layer_by_its_name(void **state) {
    (void)state;
    copies c;
    start_copies(&c);
    const uint32_t from[] = {3, 0}, to[] = {0, 2};
    size_t copied;
    assert_int_equal(kvf_copy_blocks(c.source, 2, c.destination, 2, from, 2, to, 2, KVF_COPY_H2D, &copied),
                     KVF_OK);
    assert_int_equal(copied, 2);
    for (size_t layer = 0; layer < 2; layer++) {
        unsigned char expected[60];
        memset(expected, 0xee, sizeof expected);
        for (size_t i = 0; i < 2; i++)
            for (size_t part = 0; part < 2; part++)
                memcpy(expected + to[i] * 20 + part * 10, c.from[layer] + from[i] * 10 + part * 40, 9);
        assert_memory_equal(c.to[layer], expected, 60);
    }
    /* And back again, to other blocks. */
    const uint32_t back[] = {1, 2};
    unsigned char before[160];
    memcpy(before, c.from, 160);
    assert_int_equal(kvf_copy_blocks(c.destination, 2, c.source, 2, to, 2, back, 2, KVF_COPY_D2H, NULL),
                     KVF_OK);
    for (size_t layer = 0; layer < 2; layer++)
        for (size_t i = 0; i < 2; i++)
            for (size_t part = 0; part < 2; part++)
                memcpy(before + layer * 80 + back[i] * 10 + part * 40,
                       before + layer * 80 + from[i] * 10 + part * 40, 9);
    assert_memory_equal(c.from, before, 160);
}

static void a_source_may_be_copied_twice_and_the_last_of_two_stays(void **state) {
    (void)state;
    copies c;
    start_copies(&c);
    const uint32_t from[] = {1, 1, 2}, to[] = {0, 1, 1};
    assert_int_equal(kvf_copy_blocks(c.source, 1, c.destination, 2, from, 3, to, 3, KVF_COPY_H2D, NULL),
                     KVF_OK);
    assert_memory_equal(c.to[0], c.from[0] + 10, 9);
    assert_memory_equal(c.to[0] + 20, c.from[0] + 20, 9);
    assert_int_equal(c.to[1][0], 0xee); /* the source of this call has no second layer */
}

static void many_scattered_and_neighbouring_blocks_are_copied(void **state) {
    (void)state;
    enum { BLOCKS = 1000, BYTES = 777 };
    unsigned char *from = malloc((size_t)BLOCKS * BYTES), *to = calloc(BLOCKS, BYTES);
    assert_non_null(from);
    assert_non_null(to);
    fill(from, (size_t)BLOCKS * BYTES);
    uint32_t source_ids[BLOCKS], destination_ids[BLOCKS];
    for (uint32_t i = 0; i < BLOCKS; i++) {
        source_ids[i] = i < 500 ? i : 999 - (i - 500);
        destination_ids[i] = i < 500 ? i + 500 : i - 500;
    }
    kvf_block_region source = {.layer = "a",
                               .base = from,
                               .bytes = (uint64_t)BLOCKS * BYTES,
                               .block_count = BLOCKS,
                               .block_stride_bytes = BYTES,
                               .part_bytes = BYTES};
    kvf_block_region destination = source;
    destination.base = to;
    assert_int_equal(kvf_copy_blocks(&source, 1, &destination, 1, source_ids, BLOCKS, destination_ids, BLOCKS,
                                     KVF_COPY_H2D, NULL),
                     KVF_OK);
    for (size_t i = 0; i < BLOCKS; i++)
        assert_memory_equal(to + (size_t)destination_ids[i] * BYTES, from + (size_t)source_ids[i] * BYTES,
                            BYTES);
    free(from);
    free(to);
}

static void without_pairs_nothing_is_copied(void **state) {
    (void)state;
    copies c;
    start_copies(&c);
    const uint32_t ids[] = {0, 1};
    size_t copied = 9;
    assert_int_equal(kvf_copy_blocks(c.source, 2, c.destination, 2, ids, 2, ids, 1, KVF_COPY_H2D, &copied),
                     KVF_OK);
    assert_int_equal(copied, 0);
    assert_int_equal(kvf_copy_blocks(c.source, 2, c.destination, 2, NULL, 0, NULL, 0, KVF_COPY_H2D, NULL),
                     KVF_OK);
    assert_int_equal(kvf_copy_blocks(NULL, 0, c.destination, 2, ids, 2, ids, 2, KVF_COPY_H2D, NULL), KVF_OK);
    assert_int_equal(kvf_copy_blocks(c.source, 2, NULL, 0, ids, 2, ids, 2, KVF_COPY_H2D, NULL), KVF_OK);
    assert_untouched(&c);
}

static void a_copy_that_cannot_be_whole_copies_nothing(void **state) {
    (void)state;
    copies c;
    start_copies(&c);
    const uint32_t good[] = {0, 1}, beyond[] = {0, 3};
    /* Block 3 exists in the source and not in the destination. */
    assert_refused(kvf_copy_blocks(c.source, 2, c.destination, 2, good, 2, beyond, 2, KVF_COPY_H2D, NULL),
                   KVF_E_RANGE, "layer l0: destination_ids: entry 1 is block 3; allowed: 0 to 2");
    assert_refused(kvf_copy_blocks(c.destination, 2, c.source, 2, beyond, 2, good, 2, KVF_COPY_D2H, NULL),
                   KVF_E_RANGE, "source_ids");
    assert_refused(kvf_copy_blocks(c.source, 2, c.destination, 1, good, 2, good, 2, KVF_COPY_H2D, NULL),
                   KVF_E_NOT_FOUND, "no layer l0");
    assert_refused(kvf_copy_blocks(c.source, 2, NULL, 1, good, 2, good, 2, KVF_COPY_H2D, NULL), KVF_E_INVALID,
                   "NULL");
    copies bad = c;
    bad.source[1].layer = NULL;
    assert_refused(kvf_copy_blocks(bad.source, 2, c.destination, 2, good, 2, good, 2, KVF_COPY_H2D, NULL),
                   KVF_E_INVALID, "source 1: layer is NULL");
    bad = c;
    bad.destination[0].part_bytes = 8;
    assert_refused(kvf_copy_blocks(c.source, 2, bad.destination, 2, good, 2, good, 2, KVF_COPY_H2D, NULL),
                   KVF_E_MISMATCH, "layer l1");
    bad = c;
    bad.destination[1].base = c.from[0] + 20;
    assert_refused(kvf_copy_blocks(c.source, 2, bad.destination, 2, good, 2, good, 2, KVF_COPY_H2D, NULL),
                   KVF_E_OVERLAP, "source 0 and destination 1");
    bad = c;
    bad.destination[0].bytes = 58;
    assert_refused(kvf_copy_blocks(c.source, 2, bad.destination, 2, good, 2, good, 2, KVF_COPY_H2D, NULL),
                   KVF_E_RANGE, "destination 0");
    assert_untouched(&c);
}

/* Why depends on the machine: no devices in this build, no driver, no such device, or not its memory. Devices that are
 * there: postprocess_device_test. */
#define assert_refused_whatever_the_reason(call, word)                                                       \
    do {                                                                                                     \
        assert_int_not_equal(call, KVF_OK);                                                                  \
        if (!strstr(kvf_error_detail(), word))                                                               \
            fail_msg("\"%s\" does not say \"%s\"", kvf_error_detail(), word);                                \
    } while (0)

static void memory_that_is_not_a_devices_is_refused_by_name(void **state) {
    (void)state;
    copies c;
    start_copies(&c);
    const uint32_t ids[] = {0, 1};
    copies device = c;
    device.destination[1].kind = KVF_MEMORY_CUDA;
    device.destination[1].device = 3;
    assert_refused_whatever_the_reason(
        kvf_copy_blocks(c.source, 2, device.destination, 2, ids, 2, ids, 2, KVF_COPY_H2D, NULL),
        "destination 1, in memory of CUDA device 3: ");
    assert_refused_whatever_the_reason(
        kvf_copy_blocks(device.destination, 2, c.source, 2, ids, 2, ids, 2, KVF_COPY_D2H, NULL),
        "source 1, in memory of CUDA device 3: ");
    device.destination[1].kind = (kvf_memory_kind)7;
    assert_refused(kvf_copy_blocks(c.source, 2, device.destination, 2, ids, 2, ids, 2, KVF_COPY_H2D, NULL),
                   KVF_E_INVALID, "destination 1: kind is 7");
    assert_untouched(&c);
}

static void a_direction_says_which_side_is_the_host(void **state) {
    (void)state;
    copies c;
    start_copies(&c);
    const uint32_t ids[] = {0, 1};
    copies device = c;
    device.source[0].kind = KVF_MEMORY_CUDA;
    assert_refused(kvf_copy_blocks(device.source, 2, c.destination, 2, ids, 2, ids, 2, KVF_COPY_H2D, NULL),
                   KVF_E_INVALID, "direction is \"h2d\", but source 0 is not host memory");
    assert_refused(kvf_copy_blocks(c.destination, 2, device.source, 2, ids, 2, ids, 2, KVF_COPY_D2H, NULL),
                   KVF_E_INVALID, "direction is \"d2h\", but destination 0 is not host memory");
    assert_refused(
        kvf_copy_blocks(c.source, 2, c.destination, 2, ids, 2, ids, 2, (kvf_copy_direction)2, NULL),
        KVF_E_INVALID, "direction is 2");
    assert_untouched(&c);
}

static void received_blocks_that_are_not_on_a_device_are_refused_by_name(void **state) {
    (void)state;
    unsigned char memory[64];
    memset(memory, 0xee, sizeof memory);
    const kvf_received_shape shape = {.struct_size = sizeof shape,
                                      .heads = 2,
                                      .cell_bytes = 2,
                                      .received = {KVF_PAGE_HND, 4},
                                      .wanted = {KVF_PAGE_NHD, 4}};
    const kvf_block_region region = {.base = memory,
                                     .bytes = sizeof memory,
                                     .block_count = 4,
                                     .block_stride_bytes = 16,
                                     .part_bytes = 16,
                                     .kind = KVF_MEMORY_CUDA,
                                     .device = 1};
    const uint32_t block = 2;
    const kvf_received_request request = {&block, 1, 3};
    assert_refused_whatever_the_reason(kvf_permute_received(&shape, &region, 1, &block, 1, NULL),
                                       "region 0, in memory of CUDA device 1: ");
    assert_refused_whatever_the_reason(kvf_finish_received(&shape, &region, 1, &request, 1, NULL),
                                       "region 0, in memory of CUDA device 1: ");
    for (size_t i = 0; i < sizeof memory; i++)
        assert_int_equal(memory[i], 0xee);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_form_becomes_any_other_cell_by_cell),
        cmocka_unit_test(every_set_of_loops_permutes_both_ways),
        cmocka_unit_test(every_set_of_loops_gathers_small_cells_of_few_heads),
        cmocka_unit_test(small_cells_are_transposed_for_every_number_of_heads_and_tokens),
        cmocka_unit_test(the_reverse_change_of_form_gives_back_what_was_there),
        cmocka_unit_test(every_region_is_permuted),
        cmocka_unit_test(without_blocks_or_regions_nothing_happens),
        cmocka_unit_test(tokens_past_the_covered_ones_become_zero),
        cmocka_unit_test(each_request_has_its_own_cover),
        cmocka_unit_test(scratch_of_exactly_the_size_asked_for_is_enough),
        cmocka_unit_test(scratch_for_long_cells_is_a_fraction_of_a_page),
        cmocka_unit_test(a_shape_without_meaning_is_refused),
        cmocka_unit_test(a_region_that_does_not_hold_what_it_says_is_refused),
        cmocka_unit_test(blocks_that_are_not_there_or_listed_twice_are_refused_and_nothing_changes),
        cmocka_unit_test(scratch_that_is_too_small_or_askew_is_refused),
        cmocka_unit_test(pairs_are_copied_in_every_layer_by_its_name),
        cmocka_unit_test(a_source_may_be_copied_twice_and_the_last_of_two_stays),
        cmocka_unit_test(many_scattered_and_neighbouring_blocks_are_copied),
        cmocka_unit_test(without_pairs_nothing_is_copied),
        cmocka_unit_test(a_copy_that_cannot_be_whole_copies_nothing),
        cmocka_unit_test(memory_that_is_not_a_devices_is_refused_by_name),
        cmocka_unit_test(a_direction_says_which_side_is_the_host),
        cmocka_unit_test(received_blocks_that_are_not_on_a_device_are_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
