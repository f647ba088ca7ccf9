/* The description of an engine's shape, which the library reads off its shards. */
#include <stdio.h>

#include "shapes.h"

static void describes(kvf_model *model, const kvf_engine_spec *spec, const char *wanted) {
    kvf_engine *engine = engine_of(model, spec);
    char text[2048];
    size_t length;
    assert_ok(kvf_engine_describe(engine, text, sizeof text, &length));
    assert_string_equal(text, wanted);
    assert_int_equal(length, strlen(wanted));
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void orders_are_read_off_the_strides(void **state) {
    (void)state;
    static const char *const orders[] = {"L|BPHN", "L|BPNH", "L|BNHP", "L|BHNP", "LP|BNH",
                                         "BLPHN",  "LBPHN",  "BLHNP",  "LBNHP"};
    for (size_t i = 0; i < COUNT_OF(orders); i++) {
        char wanted[256];
        (void)snprintf(
            wanted, sizeof wanted,
            "E: 1 rank\n  full: layers 0-2; k v 4 heads x 4 bf16; 8 blocks of 16 tokens; order %s\n",
            orders[i]);
        describes(attention(3, 4, 4), ENGINE(.name = "E", .all = {.block_count = 8, .order = orders[i]}),
                  wanted);
    }
}

static void axes_of_one_step_are_left_out(void **state) {
    (void)state;
    describes(attention(1, 2, 4),
              ENGINE(.name = "E", .tp_size = 2, .all = {1, .block_count = 8, .order = "L|BPHN"}),
              "E: 2 ranks, tp 2\n"
              "  full: layers 0; k v 2 heads x 4 bf16 (1 a rank); 8 blocks of 1 token; order BP\n");
}

static void stages_shares_and_kernel_blocks_are_said(void **state) {
    (void)state;
    describes(
        latent(5),
        ENGINE(.name = "E", .tp_size = 4, .pp_size = 2, .dcp_size = 2, .dcp_width = 8,
               .all = {32, .kernel_blocks_per_block = 2, .block_count = 1}),
        "E: 8 ranks, tp 4, pp 2\n"
        "  mla: layers 0-4 (2 to 3 a rank); latent 4 bf16; 1 block of 32 tokens in 2 kernel blocks, tokens "
        "shared by 2 ranks, 8 together; order L|BN\n");
}

static void entries_of_several_tokens_are_said(void **state) {
    (void)state;
    describes(
        compressed(),
        ENGINE(.name = "E", .tp_size = 2, .dcp_size = 2, .dcp_width = 32,
               .all = {64, .kernel_blocks_per_block = 2, .block_count = 4}),
        "E: 2 ranks, tp 2\n"
        "  swa: layers 0-2, window of 24 tokens; latent 4 bf16; 4 blocks of 64 tokens in 2 kernel blocks, "
        "tokens shared by 2 ranks, 32 together; order L|BN\n"
        "  csa: layers 0-2 by 2, an entry for 4 tokens; latent 4 bf16, indexer 2 bf16; 4 blocks of 64 tokens "
        "in 2 kernel blocks, tokens shared by 2 ranks, 32 together; order L|BPN\n"
        "  hca: layers 1, an entry for 32 tokens; latent 4 bf16; 4 blocks of 64 tokens in 2 kernel blocks, "
        "tokens shared by 2 ranks, 32 together; order B\n");
}

static void views_are(const kvf_engine *engine, uint32_t region, uint32_t i, const char *wanted);

/* An engine of one rank, with a group of 4 blocks of 16 tokens whose parts each have a unit, in one region. */
static kvf_engine *engine_placed(const kvf_model *model, const kvf_placement *placements, uint64_t bytes) {
    const kvf_part_share shares[] = {{{0, 1}, 0, 1}, {{0, 1}, 0, 1}};
    const kvf_group_shard_desc group = {
        .tokens_per_block = 16, .block_count = 4, .parts = shares, .placements = placements};
    const kvf_shard_desc desc = {.struct_size = sizeof desc,
                                 .layers = {0, kvf_model_layer_count(model)},
                                 .region_bytes = &bytes,
                                 .region_count = 1,
                                 .groups = &group};
    kvf_shard *shard = NULL;
    kvf_engine *engine = NULL;
    assert_ok(kvf_shard_create(model, &desc, &shard));
    assert_ok(kvf_engine_from_shards(model, "E", &shard, 1, &engine));
    return engine;
}

/* One rank of two holds no keys. */
static void a_rank_without_units_counts_wherever_it_stands(void **state) {
    (void)state;
    kvf_model *model = attention(1, 2, 4);
    const kvf_placement placements[] = {PLACED(0, 0, 512, 8, 128), PLACED(0, 256, 512, 8, 128)};
    const uint64_t bytes = 512ull * 4;
    kvf_shard *shards[2] = {NULL};
    kvf_engine *engine = NULL;
    char text[256];
    for (uint32_t none = 0; none < 2; none++) {
        for (uint32_t rank = 0; rank < 2; rank++) {
            const kvf_part_share shares[] = {{{0, rank == none ? 0 : 2}, 0, 1}, {{0, 2}, 0, 1}};
            const kvf_group_shard_desc group = {
                .tokens_per_block = 16, .block_count = 4, .parts = shares, .placements = placements};
            const kvf_shard_desc desc = {.struct_size = sizeof desc,
                                         .rank = rank,
                                         .layers = {0, 1},
                                         .region_bytes = &bytes,
                                         .region_count = 1,
                                         .groups = &group};
            assert_ok(kvf_shard_create(model, &desc, &shards[rank]));
        }
        assert_ok(kvf_engine_from_shards(model, "E", shards, 2, &engine));
        assert_ok(kvf_engine_describe(engine, text, sizeof text, NULL));
        assert_non_null(strstr(text, "; k v 2 heads x 4 bf16 (0 to 2 a rank); "));
        kvf_engine_free(engine);
    }
    kvf_model_free(model);
}

/* Two layers in one buffer, and the third layer before them. */
static void memory_that_no_order_describes_is_irregular(void **state) {
    (void)state;
    kvf_model *model = latent(3);
    const kvf_placement placements[] = {PLACED(0, 128, 384, 8, 8), PLACED(0, 256, 384, 8, 8),
                                        PLACED(0, 0, 384, 8, 8)};
    kvf_engine *engine = engine_placed(model, placements, 384ull * 4);
    char text[256];
    assert_ok(kvf_engine_describe(engine, text, sizeof text, NULL));
    assert_string_equal(
        text, "E: 1 rank\n  mla: layers 0-2; latent 4 bf16; 4 blocks of 16 tokens; order irregular\n");
    views_are(engine, 0, 0, "group 0, parts 0-1, layers 0-3 at 128: irregular");
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* The views would otherwise say that V lies as far behind K as it lies before it, and so of layers. */
static void memory_that_goes_down_is_not_said_to_go_up(void **state) {
    (void)state;
    kvf_model *model = attention(2, 1, 4);
    const kvf_placement v_first[] = {PLACED(0, 128, 512, 8, 8), PLACED(0, 0, 512, 8, 8),
                                     PLACED(0, 384, 512, 8, 8), PLACED(0, 256, 512, 8, 8)},
                        last_layer_first[] = {PLACED(0, 256, 512, 8, 8), PLACED(0, 384, 512, 8, 8),
                                              PLACED(0, 0, 512, 8, 8), PLACED(0, 128, 512, 8, 8)};
    kvf_engine *engine = engine_placed(model, v_first, 512ull * 4);
    char text[256];
    views_are(engine, 0, 0, "group 0, parts 0-1, layers 0-2 at 128: B 4 (512) L 2 (256) N 16 (8) D 4 (2)");
    views_are(engine, 0, 1, "group 0, parts 1-2, layers 0-2 at 0: B 4 (512) L 2 (256) N 16 (8) D 4 (2)");
    assert_ok(kvf_engine_describe(engine, text, sizeof text, NULL));
    assert_non_null(strstr(text, "order irregular"));
    kvf_engine_free(engine);
    engine = engine_placed(model, last_layer_first, 512ull * 4);
    views_are(engine, 0, 0, "group 0, parts 0-2, layers 0-2 at 256: irregular");
    assert_ok(kvf_engine_describe(engine, text, sizeof text, NULL));
    assert_non_null(strstr(text, "order irregular"));
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* ---- regions ---------------------------------------------------------------------------------- */

/* Compares a view in the form "k v 0-2: B8 P2 ...", with strides in brackets. */
static void views_are(const kvf_engine *engine, uint32_t region, uint32_t i, const char *wanted) {
    kvf_region_view view = {.struct_size = sizeof view};
    char text[256];
    assert_ok(kvf_shard_region_view(kvf_engine_shard(engine, 0), region, i, &view));
    int length = snprintf(text, sizeof text, "group %u, parts %u-%u, layers %u-%u at %llu:", view.group,
                          view.parts.begin, view.parts.end, view.layers.begin, view.layers.end,
                          (unsigned long long)view.offset);
    for (uint32_t a = 0; a < view.axis_count; a++)
        length +=
            snprintf(text + length, sizeof text - (size_t)length, " %c %llu (%llu)", view.axes[a].letter,
                     (unsigned long long)view.axes[a].length, (unsigned long long)view.axes[a].stride);
    if (!view.regular)
        (void)snprintf(text + length, sizeof text - (size_t)length, " irregular");
    assert_string_equal(text, wanted);
}

/* Blocks of 16 tokens, K and V of 4 heads, cells of 8 bytes: 1024 bytes a page. */
static void a_region_says_what_it_holds(void **state) {
    (void)state;
    static const struct {
        const char *order, *wanted;
    } cases[] = {
        {"L|BPHN", "group 0, parts 0-2, layers 1-2 at 0: B 8 (1024) P 2 (512) H 4 (128) N 16 (8) D 4 (2)"},
        {"L|BPNH", "group 0, parts 0-2, layers 1-2 at 0: B 8 (1024) P 2 (512) N 16 (32) H 4 (8) D 4 (2)"},
        {"L|BNHP", "group 0, parts 0-2, layers 1-2 at 0: B 8 (1024) N 16 (64) H 4 (16) P 2 (8) D 4 (2)"},
        {"LP|BNH", "group 0, parts 1-2, layers 0-1 at 0: B 8 (512) N 16 (32) H 4 (8) D 4 (2)"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        kvf_model *model = attention(3, 4, 4);
        kvf_engine *engine = engine_of(model, ENGINE(.all = {.block_count = 8, .order = cases[i].order}));
        views_are(engine, 1, 0, cases[i].wanted);
        kvf_region_view view = {.struct_size = sizeof view};
        assert_fails(kvf_shard_region_view(kvf_engine_shard(engine, 0), 1, 1, &view), KVF_E_NOT_FOUND, "1",
                     "views");
        kvf_engine_free(engine);
        kvf_model_free(model);
    }
    kvf_model *model = attention(3, 4, 4);
    kvf_engine *engine = engine_of(model, ENGINE(.all = {.block_count = 8, .order = "BLPHN"}));
    views_are(
        engine, 0, 0,
        "group 0, parts 0-2, layers 0-3 at 0: B 8 (3072) L 3 (1024) P 2 (512) H 4 (128) N 16 (8) D 4 (2)");
    kvf_region_view view = {.struct_size = sizeof view};
    assert_fails(kvf_shard_region_view(kvf_engine_shard(engine, 0), 1, 0, &view), KVF_E_RANGE, "region is 1");
    assert_fails(kvf_shard_region_view(NULL, 1, 0, &view), KVF_E_INVALID, "shard");
    view.struct_size = 0;
    assert_fails(kvf_shard_region_view(kvf_engine_shard(engine, 0), 0, 0, &view), KVF_E_INVALID,
                 "struct_size");
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* A rank that holds keys and no values: their placements may say anything. */
static void a_part_without_units_is_in_no_region(void **state) {
    (void)state;
    kvf_model *model = attention(2, 1, 4);
    const kvf_part_share shares[] = {{{0, 1}, 0, 1}, {{0, 0}, 0, 1}};
    const kvf_placement placements[] = {PLACED(1, 0, 128, 8, 8), PLACED(0, 0, 0, 0, 0),
                                        PLACED(1, 512, 128, 8, 8), PLACED(9, 0, 0, 0, 0)};
    const uint64_t bytes[] = {64, 1024};
    const kvf_group_shard_desc group = {
        .tokens_per_block = 16, .block_count = 4, .parts = shares, .placements = placements};
    const kvf_shard_desc desc = {.struct_size = sizeof desc,
                                 .layers = {0, 2},
                                 .region_bytes = bytes,
                                 .region_count = 2,
                                 .groups = &group};
    kvf_shard *shard = NULL;
    kvf_region_view view = {.struct_size = sizeof view};
    assert_ok(kvf_shard_create(model, &desc, &shard));
    assert_fails(kvf_shard_region_view(shard, 0, 0, &view), KVF_E_NOT_FOUND, "region 0");
    assert_ok(kvf_shard_region_view(shard, 1, 0, &view));
    assert_range(view.parts, 0, 1);
    assert_fails(kvf_shard_region_view(shard, 1, 1, &view), KVF_E_NOT_FOUND, "region 1");
    kvf_shard_free(shard);
    kvf_model_free(model);
}

/* Layers in regions that go down, and one region with the first and the last layer. */
static void layers_are_found_whatever_the_order_of_their_regions(void **state) {
    (void)state;
    kvf_model *model = attention(4, 1, 4);
    const kvf_part_share shares[] = {{{0, 1}, 0, 1}, {{0, 1}, 0, 1}};
    const uint32_t regions[] = {2, 1, 0, 2};
    kvf_placement placements[8];
    for (uint32_t i = 0; i < 8; i++)
        placements[i] = PLACED(regions[i / 2], (i == 6 || i == 7) * 1024 + i % 2 * 128, 256, 8, 8);
    const uint64_t bytes[] = {2048, 2048, 2048};
    const kvf_group_shard_desc group = {
        .tokens_per_block = 16, .block_count = 4, .parts = shares, .placements = placements};
    const kvf_shard_desc desc = {.struct_size = sizeof desc,
                                 .layers = {0, 4},
                                 .region_bytes = bytes,
                                 .region_count = 3,
                                 .groups = &group};
    kvf_shard *shard = NULL;
    assert_ok(kvf_shard_create(model, &desc, &shard));
    const kvf_range wanted[] = {{2, 3}, {1, 2}, {0, 4}};
    for (uint32_t region = 0; region < 3; region++) {
        kvf_region_view view = {.struct_size = sizeof view};
        assert_ok(kvf_shard_region_view(shard, region, 0, &view));
        assert_range(view.layers, wanted[region].begin, wanted[region].end);
        assert_int_equal(view.layer_count, region == 2 ? 2 : 1);
        assert_range(view.parts, 0, 2);
    }
    kvf_shard_free(shard);
    kvf_model_free(model);
}

/* The struct of an older caller is filled as far as it goes. */
static void a_shorter_view_is_filled_as_far_as_it_goes(void **state) {
    (void)state;
    kvf_model *model = attention(3, 4, 4);
    kvf_engine *engine = engine_of(model, ENGINE(.all = {.block_count = 8}));
    kvf_region_view view = {.struct_size = offsetof(kvf_region_view, dtype), .axis_count = 99};
    assert_ok(kvf_shard_region_view(kvf_engine_shard(engine, 0), 2, 0, &view));
    assert_int_equal(view.layer_count, 1);
    assert_int_equal(view.layers.begin, 2);
    assert_int_equal(view.axis_count, 99);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static void nothing_to_write_to_is_refused(void **state) {
    (void)state;
    kvf_model *model = latent(1);
    kvf_engine *engine = engine_of(model, ENGINE(.all = {.block_count = 8}));
    size_t length;
    assert_fails(kvf_engine_describe(NULL, NULL, 0, &length), KVF_E_INVALID, "engine");
    assert_fails(kvf_engine_describe(engine, NULL, 3, &length), KVF_E_INVALID, "text");
    assert_ok(kvf_engine_describe(engine, NULL, 0, &length));
    assert_true(length > 0);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

static kvf_status describe(void *subject) {
    char text[256];
    return kvf_engine_describe(subject, text, sizeof text, NULL);
}

static void every_refused_allocation_is_reported(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    kvf_model *model = latent(1);
    kvf_engine *engine = engine_of(model, ENGINE(.all = {.block_count = 8}));
    survive_every_refusal(&memory, describe, engine);
    kvf_engine_free(engine);
    kvf_model_free(model);
    assert_int_equal(memory.live, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(orders_are_read_off_the_strides),
        cmocka_unit_test(axes_of_one_step_are_left_out),
        cmocka_unit_test(stages_shares_and_kernel_blocks_are_said),
        cmocka_unit_test(entries_of_several_tokens_are_said),
        cmocka_unit_test(a_rank_without_units_counts_wherever_it_stands),
        cmocka_unit_test(memory_that_no_order_describes_is_irregular),
        cmocka_unit_test(memory_that_goes_down_is_not_said_to_go_up),
        cmocka_unit_test(a_region_says_what_it_holds),
        cmocka_unit_test(a_part_without_units_is_in_no_region),
        cmocka_unit_test(layers_are_found_whatever_the_order_of_their_regions),
        cmocka_unit_test(a_shorter_view_is_filled_as_far_as_it_goes),
        cmocka_unit_test(nothing_to_write_to_is_refused),
        cmocka_unit_test_teardown(every_refused_allocation_is_reported, stop_counting_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
