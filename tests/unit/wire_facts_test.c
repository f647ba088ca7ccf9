/*
 * Facts: the same for engines of other shapes over the same model, different where cells are, and words for
 * the difference, whatever the other side sends.
 */
#include "wire_samples.h"

static char *facts_of(const kvf_model *model, const char *extra) {
    char *facts = NULL;
    assert_ok(kvf_wire_facts(model, extra, &facts));
    return facts;
}

/* ---- what is in them ------------------------------------------------------------------------- */

static void facts_are_one_line_each_in_a_fixed_order(void **state) {
    (void)state;
    kvf_model *model = hybrid(2);
    char *facts = facts_of(model, "weights: r1");
    assert_string_equal(facts, "layer_count: 4\n"
                               "groups: full, ssm\n"
                               "full.kind: tokens\n"
                               "full.window_tokens: 0\n"
                               "full.chunk_tokens: 0\n"
                               "full.layers: 0,2\n"
                               "full.parts: k, v\n"
                               "full.k.dtype: bf16\n"
                               "full.k.units: 2\n"
                               "full.k.cell_elements: 4\n"
                               "full.k.rows_per_step: 1\n"
                               "full.k.tp_rule: split\n"
                               "full.v.dtype: bf16\n"
                               "full.v.units: 2\n"
                               "full.v.cell_elements: 4\n"
                               "full.v.rows_per_step: 1\n"
                               "full.v.tp_rule: split\n"
                               "ssm.kind: state\n"
                               "ssm.window_tokens: 0\n"
                               "ssm.chunk_tokens: 0\n"
                               "ssm.layers: 1,3\n"
                               "ssm.parts: conv.x, conv.B, conv.C, ssm\n"
                               "ssm.conv.x.dtype: bf16\n"
                               "ssm.conv.x.units: 4\n"
                               "ssm.conv.x.cell_elements: 1\n"
                               "ssm.conv.x.rows_per_step: 3\n"
                               "ssm.conv.x.tp_rule: split\n"
                               "ssm.conv.B.dtype: bf16\n"
                               "ssm.conv.B.units: 2\n"
                               "ssm.conv.B.cell_elements: 1\n"
                               "ssm.conv.B.rows_per_step: 3\n"
                               "ssm.conv.B.tp_rule: split\n"
                               "ssm.conv.C.dtype: bf16\n"
                               "ssm.conv.C.units: 2\n"
                               "ssm.conv.C.cell_elements: 1\n"
                               "ssm.conv.C.rows_per_step: 3\n"
                               "ssm.conv.C.tp_rule: split\n"
                               "ssm.ssm.dtype: bf16\n"
                               "ssm.ssm.units: 2\n"
                               "ssm.ssm.cell_elements: 16\n"
                               "ssm.ssm.rows_per_step: 1\n"
                               "ssm.ssm.tp_rule: split\n"
                               "weights: r1\n");
    kvf_free(facts);
    kvf_model_free(model);
}

static void layers_are_written_as_ranges(void **state) {
    (void)state;
    const uint32_t layers[] = {0, 1, 2, 5, 7, 8};
    kvf_part_desc part = PART(.name = "k", .units = 1, .cell_elements = 4);
    kvf_group_desc group = {
        .name = "full", .layers = layers, .layer_count = 6, .parts = &part, .part_count = 1};
    kvf_model *model = model_of(10, &group, 1);
    char *facts = facts_of(model, NULL);
    assert_non_null(strstr(facts, "\nfull.layers: 0-2,5,7-8\n"));
    kvf_free(facts);
    kvf_model_free(model);
}

static void the_digest_is_the_sha_256_of_the_text(void **state) {
    (void)state;
    static const uint8_t abc[KVF_WIRE_DIGEST_BYTES] = {
        0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea, 0x41, 0x41, 0x40, 0xde, 0x5d, 0xae, 0x22, 0x23,
        0xb0, 0x03, 0x61, 0xa3, 0x96, 0x17, 0x7a, 0x9c, 0xb4, 0x10, 0xff, 0x61, 0xf2, 0x00, 0x15, 0xad};
    uint8_t digest[KVF_WIRE_DIGEST_BYTES];
    kvf_wire_digest("abc", digest);
    assert_memory_equal(digest, abc, sizeof abc);
}

/* ---- what makes them differ ------------------------------------------------------------------ */

typedef struct described {
    kvf_part_desc part;
    kvf_group_desc group;
    uint32_t layer_count;
    const char *name;
} described;

static const uint32_t three_layers[] = {0, 1, 3}, two_layers[] = {0, 1};

static described a_model(void) {
    return (described){
        .part = PART(.name = "k", .units = 8, .cell_elements = 128),
        .group = {.name = "full", .layers = three_layers, .layer_count = 3, .part_count = 1},
        .layer_count = 4,
        .name = "a",
    };
}

static char *facts_described(described d) {
    d.group.parts = &d.part;
    kvf_model_desc desc = {.struct_size = sizeof desc,
                           .name = d.name,
                           .layer_count = d.layer_count,
                           .groups = &d.group,
                           .group_count = 1};
    kvf_model *model = NULL;
    assert_ok(kvf_model_create(&desc, &model));
    char *facts = facts_of(model, NULL);
    kvf_model_free(model);
    return facts;
}

/* The two must differ, in words and in the digest. */
static void assert_differs(described other, const char *words) {
    char *ours = facts_described(a_model()), *theirs = facts_described(other);
    uint8_t a[KVF_WIRE_DIGEST_BYTES], b[KVF_WIRE_DIGEST_BYTES];
    kvf_wire_digest(ours, a);
    kvf_wire_digest(theirs, b);
    assert_memory_not_equal(a, b, sizeof a);
    assert_fails(kvf_wire_compare_facts(ours, theirs, "p"), KVF_E_MISMATCH, "engine \"p\"", words);
    kvf_free(ours);
    kvf_free(theirs);
}

static void whatever_changes_the_cells_changes_the_facts(void **state) {
    (void)state;
    described d = a_model();
    d.part.dtype = KVF_DTYPE_F8_E4M3;
    assert_differs(d, "full.k.dtype is \"bf16\" here and \"f8_e4m3\" there");
    d = a_model();
    d.part.units = 4;
    assert_differs(d, "full.k.units is \"8\" here and \"4\" there");
    d = a_model();
    d.part.cell_elements = 64;
    assert_differs(d, "full.k.cell_elements is \"128\" here and \"64\" there");
    d = a_model();
    d.part.rows_per_step = 2;
    assert_differs(d, "full.k.rows_per_step is \"1\" here and \"2\" there");
    d = a_model();
    d.part.tp_rule = KVF_TP_REPLICATE;
    assert_differs(d, "full.k.tp_rule is \"split\" here and \"replicate\" there");
    d = a_model();
    d.part.name = "key";
    assert_differs(d, "full.parts is \"k\" here and \"key\" there");
    d = a_model();
    d.group.name = "swa";
    assert_differs(d, "groups is \"full\" here and \"swa\" there");
    d = a_model();
    d.group.kind = KVF_GROUP_STATE;
    assert_differs(d, "full.kind is \"tokens\" here and \"state\" there");
    d = a_model();
    d.group.window_tokens = 1024;
    assert_differs(d, "full.window_tokens is \"0\" here and \"1024\" there");
    d = a_model();
    d.group.chunk_tokens = 8192;
    assert_differs(d, "full.chunk_tokens is \"0\" here and \"8192\" there");
    d = a_model();
    d.group.layers = two_layers;
    d.group.layer_count = 2;
    assert_differs(d, "full.layers is \"0-1,3\" here and \"0-1\" there");
    d = a_model();
    d.layer_count = 5;
    assert_differs(d, "layer_count is \"4\" here and \"5\" there");
}

static void what_an_engine_may_choose_is_not_in_the_facts(void **state) {
    (void)state;
    described d = a_model();
    d.name = "another name";
    d.part.granule_units = 4;
    char *ours = facts_described(a_model()), *theirs = facts_described(d);
    assert_string_equal(ours, theirs);
    assert_ok(kvf_wire_compare_facts(ours, theirs, "p"));
    kvf_free(ours);
    kvf_free(theirs);
}

/* Facts come from the model alone, so the model of any shard of it gives the same. */
static void engines_of_other_shapes_have_the_same_facts(void **state) {
    (void)state;
    kvf_model *model = attention(4, 8, 128);
    kvf_engine *a = engine_of(model, ENGINE(.tp_size = 8, .all = {.block_count = 5}));
    kvf_engine *b = engine_of(
        model,
        ENGINE(.tp_size = 2, .pp_size = 2,
               .all = {.block_count = 9, .tokens_per_block = 64, .order = "L|BPNH", .page_align = 4096}));
    char *ours = facts_of(kvf_shard_model(kvf_engine_shard(a, 3)), NULL);
    char *theirs = facts_of(kvf_shard_model(kvf_engine_shard(b, 2)), NULL);
    assert_ok(kvf_wire_compare_facts(ours, theirs, "p"));
    kvf_free(ours);
    kvf_free(theirs);
    kvf_engine_free(a);
    kvf_engine_free(b);
    kvf_model_free(model);
}

static void builtin_models_all_have_facts_of_their_own(void **state) {
    (void)state;
    uint8_t digests[64][KVF_WIRE_DIGEST_BYTES];
    const char *name;
    uint32_t count = 0;
    for (; (name = kvf_builtin_model_name(count)); count++) {
        kvf_model *model = NULL;
        assert_ok(kvf_model_load(name, NULL, &model));
        char *facts = facts_of(model, NULL);
        kvf_wire_digest(facts, digests[count]);
        for (uint32_t i = 0; i < count; i++) {
            kvf_model *other = NULL;
            assert_ok(kvf_model_load(kvf_builtin_model_name(i), NULL, &other));
            bool same_cells = kvf_model_compare(model, other) == KVF_OK;
            bool same_digest = memcmp(digests[count], digests[i], KVF_WIRE_DIGEST_BYTES) == 0;
            assert_int_equal(same_cells, same_digest);
            kvf_model_free(other);
        }
        kvf_free(facts);
        kvf_model_free(model);
    }
}

/* ---- words ----------------------------------------------------------------------------------- */

static void every_differing_field_is_listed(void **state) {
    (void)state;
    assert_fails(kvf_wire_compare_facts("a: 1\nb: 2\nc: 3\nd: 4\n", "a: 1\nb: 9\nd: 5\ne: 6\n", "p"),
                 KVF_E_MISMATCH, "b is \"2\" here and \"9\" there", "; c is \"3\" here and missing there",
                 "; d is \"4\" here and \"5\" there", "; e is \"6\" there and missing here");
    assert_null(strstr(kvf_error_detail(), "a is"));
}

static void the_first_dozen_are_listed_and_the_others_counted(void **state) {
    (void)state;
    kvf_text ours = {0}, theirs = {0};
    for (int i = 0; i < 40; i++) {
        kvf_text_add(&ours, "a_name_that_is_long_enough_to_be_cut_somewhere_%d: %0*d\n", i, 100, i);
        kvf_text_add(&theirs, "a_name_that_is_long_enough_to_be_cut_somewhere_%d: %0*d\n", i, 100, i + 1);
    }
    assert_fails(kvf_wire_compare_facts(ours.data, theirs.data, "p"), KVF_E_MISMATCH, "; and 28 more");
    kvf_text_free(&ours);
    kvf_text_free(&theirs);
}

static void long_values_are_shown_where_they_differ(void **state) {
    (void)state;
    assert_fails(kvf_wire_compare_facts("layers: 0-9,11-19,21-29,31-39,41-49,51-59,61-69,71-79\n",
                                        "layers: 0-9,11-19,21-29,31-39,41-49,51-59,61-68,71-79\n", "p"),
                 KVF_E_MISMATCH, "69,71-79\" here and \"...", "68,71-79\" there");
}

static void the_same_fields_in_another_order_differ(void **state) {
    (void)state;
    assert_fails(kvf_wire_compare_facts("a: 1\nb: 2\n", "b: 2\na: 1\n", "p"), KVF_E_MISMATCH,
                 "another order");
    assert_fails(kvf_wire_compare_facts("a: 1\n", "a: 1\na: 2\n", "p"), KVF_E_MISMATCH, "twice");
}

static void texts_that_are_no_facts_are_answered_with_words(void **state) {
    (void)state;
    assert_fails(kvf_wire_compare_facts("a: 1\n", "", "p"), KVF_E_MISMATCH, "did not say which");
    assert_fails(kvf_wire_compare_facts("a: 1\n", NULL, NULL), KVF_E_MISMATCH, "engine \"\"");
    assert_fails(kvf_wire_compare_facts("a: 1\n", "\n\n\n", "p"), KVF_E_MISMATCH, "did not say which");
    assert_fails(kvf_wire_compare_facts("a: 1\n", "::::", "p"), KVF_E_MISMATCH,
                 "a is \"1\" here and missing");
    assert_fails(kvf_wire_compare_facts("a: 1\n", "a", "p"), KVF_E_MISMATCH,
                 "a is \"1\" here and \"\" there");
    assert_fails(kvf_wire_compare_facts("", "a: 1", "p"), KVF_E_MISMATCH, "a is \"1\" there");
}

static void control_characters_of_the_other_side_are_made_visible(void **state) {
    (void)state;
    assert_fails(kvf_wire_compare_facts("a: 1\n", "a: \x1b[31mred\r\nx\ty: 2", "p\x07"), KVF_E_MISMATCH,
                 "engine \"p\\x07\"", "\\x1b[31mred\\x0d", "x\\x09y is \"2\" there");
    for (const char *c = kvf_error_detail(); *c; c++)
        assert_true((unsigned char)*c >= ' ');
}

static void a_line_without_end_is_cut_short(void **state) {
    (void)state;
    char *line = malloc(1000001);
    assert_non_null(line);
    memset(line, 'x', 1000000);
    line[1000000] = '\0';
    assert_fails(kvf_wire_compare_facts("a: 1\n", line, line), KVF_E_MISMATCH, "xxx...");
    assert_true(strlen(kvf_error_detail()) < 400);
    for (int i = 1; i < 1000000; i += 2)
        line[i] = '\n';
    assert_fails(kvf_wire_compare_facts("a: 1\n", line, "p"), KVF_E_MISMATCH, "more than 20000 lines");
    free(line);
}

static void facts_above_the_size_limit_are_refused(void **state) {
    (void)state;
    kvf_model *model = attention(1, 1, 4);
    char *extra = malloc(KVF_WIRE_MAX_FACTS + 1);
    assert_non_null(extra);
    memset(extra, 'x', KVF_WIRE_MAX_FACTS);
    extra[KVF_WIRE_MAX_FACTS] = '\0';
    char *facts = NULL;
    assert_fails(kvf_wire_facts(model, extra, &facts), KVF_E_RANGE, "1048576");
    assert_null(facts);
    free(extra);
    kvf_model_free(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(facts_are_one_line_each_in_a_fixed_order),
        cmocka_unit_test(layers_are_written_as_ranges),
        cmocka_unit_test(the_digest_is_the_sha_256_of_the_text),
        cmocka_unit_test(whatever_changes_the_cells_changes_the_facts),
        cmocka_unit_test(what_an_engine_may_choose_is_not_in_the_facts),
        cmocka_unit_test(engines_of_other_shapes_have_the_same_facts),
        cmocka_unit_test(builtin_models_all_have_facts_of_their_own),
        cmocka_unit_test(every_differing_field_is_listed),
        cmocka_unit_test(the_first_dozen_are_listed_and_the_others_counted),
        cmocka_unit_test(long_values_are_shown_where_they_differ),
        cmocka_unit_test(the_same_fields_in_another_order_differ),
        cmocka_unit_test(texts_that_are_no_facts_are_answered_with_words),
        cmocka_unit_test(control_characters_of_the_other_side_are_made_visible),
        cmocka_unit_test(a_line_without_end_is_cut_short),
        cmocka_unit_test(facts_above_the_size_limit_are_refused),
    };
    return cmocka_run_group_tests_name("wire_facts", tests, NULL, NULL);
}
