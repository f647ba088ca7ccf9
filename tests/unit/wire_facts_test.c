/*
 * Facts: they are the same for engines of different shapes over one model, and differ if cells differ; and whatever the
 * other side sends, words tell the difference.
 */
#include <stdio.h>

#include "wire_samples.h"

#include "wire/show.h"

static char *facts_of(const kvf_model *model, const char *extra) {
    char *facts = NULL;
    assert_ok(kvf_wire_facts(model, NULL, extra, &facts));
    return facts;
}

/* ---- what facts contain ------------------------------------------------------------------------- */

static void facts_are_one_line_each_in_a_fixed_order(void **state) {
    (void)state;
    kvf_model *model = hybrid(2);
    char *facts = facts_of(model, "weights: r1");
    assert_string_equal(facts, "layer_count: 4\n"
                               "group: full\n"
                               "kind: tokens\n"
                               "window_tokens: 0\n"
                               "chunk_tokens: 0\n"
                               "layers: 0,2\n"
                               "part: k\n"
                               "dtype: bf16\n"
                               "units: 2\n"
                               "cell_elements: 4\n"
                               "rows_per_step: 1\n"
                               "part: v\n"
                               "dtype: bf16\n"
                               "units: 2\n"
                               "cell_elements: 4\n"
                               "rows_per_step: 1\n"
                               "group: ssm\n"
                               "kind: state\n"
                               "window_tokens: 0\n"
                               "chunk_tokens: 0\n"
                               "layers: 1,3\n"
                               "part: conv.x\n"
                               "dtype: bf16\n"
                               "units: 4\n"
                               "cell_elements: 1\n"
                               "rows_per_step: 3\n"
                               "part: conv.B\n"
                               "dtype: bf16\n"
                               "units: 2\n"
                               "cell_elements: 1\n"
                               "rows_per_step: 3\n"
                               "part: conv.C\n"
                               "dtype: bf16\n"
                               "units: 2\n"
                               "cell_elements: 1\n"
                               "rows_per_step: 3\n"
                               "part: ssm\n"
                               "dtype: bf16\n"
                               "units: 2\n"
                               "cell_elements: 16\n"
                               "rows_per_step: 1\n"
                               "own:\n"
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
    assert_non_null(strstr(facts, "\nlayers: 0-2,5,7-8\n"));
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

/* ---- what makes facts differ ------------------------------------------------------------------ */

typedef struct described {
    kvf_part_desc part;
    kvf_group_desc group;
    uint32_t layer_count;
    const char *name;
} described;

static const uint32_t three_layers[] = {0, 1, 3}, other_layers[] = {2};

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

/* Matches two texts of facts, group by group. */
static kvf_status match_texts(const char *ours, const char *theirs, kvf_match **out) {
    kvf_facts own;
    assert_ok(kvf_wire_read_facts(ours, &own));
    kvf_status status = kvf_wire_match(&own, theirs, "p", out);
    kvf_facts_free(&own);
    return status;
}

static kvf_status try_match(const char *ours, const char *theirs) {
    kvf_match *match = NULL;
    kvf_status status = match_texts(ours, theirs, &match);
    assert_true((status == KVF_OK) == (match != NULL));
    kvf_match_free(match);
    return status;
}

/* The other model's facts must differ in words and in the digest. */
static void assert_differs(described other, const char *words) {
    char *ours = facts_described(a_model()), *theirs = facts_described(other);
    uint8_t a[KVF_WIRE_DIGEST_BYTES], b[KVF_WIRE_DIGEST_BYTES];
    kvf_wire_digest(ours, a);
    kvf_wire_digest(theirs, b);
    assert_memory_not_equal(a, b, sizeof a);
    assert_fails(try_match(ours, theirs), KVF_E_MISMATCH, "engine \"p\"", words);
    kvf_free(ours);
    kvf_free(theirs);
}

static void whatever_changes_the_cells_changes_the_facts(void **state) {
    (void)state;
    described d = a_model();
    d.part.dtype = KVF_DTYPE_F8_E4M3;
    assert_differs(d, "full.k.dtype is \"bf16\" locally and \"f8_e4m3\" remotely");
    d = a_model();
    d.part.units = 4;
    assert_differs(d, "full.k.units is \"8\" locally and \"4\" remotely");
    d = a_model();
    d.part.cell_elements = 64;
    assert_differs(d, "full.k.cell_elements is \"128\" locally and \"64\" remotely");
    d = a_model();
    d.part.rows_per_step = 2;
    assert_differs(d, "full.k.rows_per_step is \"1\" locally and \"2\" remotely");
    d = a_model();
    d.part.name = "key";
    assert_differs(d, "full.k is missing remotely; full.key is missing locally");
    d = a_model();
    d.group.name = "swa";
    assert_differs(d, "group full is missing remotely; group swa is missing locally");
    d = a_model();
    d.group.kind = KVF_GROUP_STATE;
    assert_differs(d, "full.kind is \"tokens\" locally and \"state\" remotely");
    d = a_model();
    d.group.window_tokens = 1024;
    assert_differs(d, "full.window_tokens is \"0\" locally and \"1024\" remotely");
    d = a_model();
    d.group.chunk_tokens = 8192;
    assert_differs(d, "full.chunk_tokens is \"0\" locally and \"8192\" remotely");
    d = a_model();
    d.group.tokens_per_step = 4;
    assert_differs(d, "full.tokens_per_step is \"1\" locally and \"4\" remotely");
    d = a_model();
    d.group.layers = other_layers;
    d.group.layer_count = 1;
    assert_differs(d, "full.layers 0-1,3 are missing remotely; full.layers 2 are missing locally");
}

static void free_choices_of_an_engine_are_not_in_the_facts(void **state) {
    (void)state;
    described d = a_model();
    d.name = "another name";
    d.part.granule_units = 4;
    d.part.tp_rule = KVF_TP_REPLICATE;
    char *ours = facts_described(a_model()), *theirs = facts_described(d);
    assert_string_equal(ours, theirs);
    assert_ok(try_match(ours, theirs));
    kvf_free(ours);
    kvf_free(theirs);
}

/* Facts come from the model alone, so every shard of a model gives the same facts. */
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
    assert_ok(try_match(ours, theirs));
    kvf_free(ours);
    kvf_free(theirs);
    kvf_engine_free(a);
    kvf_engine_free(b);
    kvf_model_free(model);
}

/* ---- group by group -------------------------------------------------------------------------- */

static const char full[] =
    "group: full\nkind: tokens\nwindow_tokens: 0\nchunk_tokens: 0\nlayers: 0-2\n"
    "convert: f32, bf16, f16\npart: k\ndtype: bf16\nunits: 8\ncell_elements: 128\nrows_per_step: 1\n";
static const char draft[] = "group: draft\nkind: tokens\nwindow_tokens: 0\nchunk_tokens: 0\nlayers: 3\n"
                            "part: k\ndtype: bf16\nunits: 2\ncell_elements: 64\nrows_per_step: 1\n";

/* Facts of some groups as one text, which the caller frees. */
static char *text_of(const char *a, const char *b, const char *own) {
    kvf_text text = {0};
    kvf_text_add(&text, "layer_count: 4\n%s%s%s%s", a, b, own[0] ? "own:\n" : "", own);
    assert_false(text.failed);
    return text.data;
}

/* `text` with the first `from` replaced by `to`, of any length. */
static char *with(const char *text, const char *from, const char *to) {
    const char *at = strstr(text, from);
    assert_non_null(at);
    kvf_text out = {0};
    kvf_text_add(&out, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    return out.data;
}

static void check_group(const kvf_match *match, uint32_t i, const char *name, kvf_agreement agreement,
                        const char *words) {
    assert_string_equal(match->groups[i].name, name);
    assert_int_equal(match->groups[i].agreement, agreement);
    if (!strstr(match->groups[i].detail, words) || (words[0] == '\0' && match->groups[i].detail[0]))
        fail_msg("\"%s\" is not in \"%s\"", words, match->groups[i].detail);
}

static void a_draft_model_on_one_side_is_no_difference_of_the_other_groups(void **state) {
    (void)state;
    char *ours = text_of(full, draft, "weights: r1\ndraft.weights: d7\n"),
         *theirs = text_of(full, "", "weights: r1\n");
    kvf_match *match = NULL;
    assert_ok(match_texts(ours, theirs, &match));
    assert_int_equal(match->count, 2);
    check_group(match, 0, "full", KVF_AGREE_SAME, "");
    check_group(match, 1, "draft", KVF_AGREE_MISSING, "group draft is missing remotely");
    assert_ok(kvf_match_check(match, 0, range(0, 3)));
    assert_fails(kvf_match_check(match, 1, range(0, 1)), KVF_E_MISMATCH, "draft");
    kvf_match_free(match);
    assert_ok(match_texts(theirs, ours, &match));
    check_group(match, 0, "full", KVF_AGREE_SAME, "");
    check_group(match, 1, "draft", KVF_AGREE_MISSING, "group draft is missing locally");
    assert_int_equal(match->groups[1].ours, KVF_NO_GROUP);
    kvf_match_free(match);
    kvf_free(ours);
    kvf_free(theirs);
}

static void facts_of_somebody_without_a_name_are_matched(void **state) {
    (void)state;
    char *text = text_of(full, "", "");
    kvf_facts own;
    kvf_match *match = NULL;
    assert_ok(kvf_wire_read_facts(text, &own));
    assert_ok(kvf_wire_match(&own, text, NULL, &match));
    kvf_match_free(match);
    kvf_facts_free(&own);
    kvf_free(text);
}

static void draft_layers_in_a_group_are_missing_only_where_they_are_wanted(void **state) {
    (void)state;
    char *theirs = text_of(full, "", ""), *more = with(theirs, "layers: 0-2", "layers: 0-3");
    kvf_match *match = NULL;
    assert_ok(match_texts(more, theirs, &match));
    check_group(match, 0, "full", KVF_AGREE_SAME, "full.layers 3 are missing remotely");
    assert_int_equal(match->groups[0].layers_both, 3);
    assert_int_equal(match->groups[0].layers_ours, 1);
    assert_ok(kvf_match_check(match, 0, range(0, 3)));
    assert_fails(kvf_match_check(match, 0, range(0, 4)), KVF_E_MISMATCH,
                 "full.layers 3 are missing remotely");
    kvf_match_free(match);
    assert_ok(match_texts(theirs, more, &match));
    assert_ok(kvf_match_check(match, 0, range(0, 3)));
    assert_int_equal(match->groups[0].layers_theirs, 1);
    kvf_match_free(match);
    kvf_free(more);
    kvf_free(theirs);
}

static void types_are_converted_where_both_let_them(void **state) {
    (void)state;
    char *ours = text_of(full, draft, ""), *half = with(ours, "dtype: bf16", "dtype: f16");
    kvf_match *match = NULL;
    assert_ok(match_texts(ours, half, &match));
    check_group(match, 0, "full", KVF_AGREE_CONVERT, "full.k.dtype is \"bf16\" locally and \"f16\" remotely");
    check_group(match, 1, "draft", KVF_AGREE_SAME, "");
    assert_ok(kvf_match_check(match, 0, range(0, 3)));
    const kvf_group_desc *ours_in_their_type = kvf_model_group(match->retyped, 0);
    assert_int_equal(ours_in_their_type->parts[0].dtype, KVF_DTYPE_F16);
    kvf_match_free(match);
    static const char *const unable[] = {"convert: f32, f64\n", "convert: f32, f16\n", "convert: f6\n", ""};
    for (size_t i = 0; i < COUNT_OF(unable); i++) {
        char *theirs = with(half, "convert: f32, bf16, f16\n", unable[i]);
        assert_ok(match_texts(ours, theirs, &match));
        check_group(match, 0, "full", KVF_AGREE_DIFFER, "full.k.dtype");
        assert_fails(kvf_match_check(match, 0, range(0, 3)), KVF_E_UNSUPPORTED, "full.k.dtype",
                     "only where both sides allow the conversion");
        kvf_match_free(match);
        kvf_free(theirs);
    }
    kvf_free(half);
    kvf_free(ours);
}

/* A peer from before FP8 could be converted does not say that it can. */
static void fp8_is_converted_only_if_both_can(void **state) {
    (void)state;
    char *plain = text_of(full, draft, ""),
         *ours = with(plain, "bf16, f16\npart", "bf16, f16, f8_e4m3\npart");
    char *able = with(ours, "dtype: bf16", "dtype: f8_e4m3"),
         *unable = with(plain, "dtype: bf16", "dtype: f8_e4m3");
    kvf_match *match = NULL;
    assert_ok(match_texts(ours, able, &match));
    check_group(match, 0, "full", KVF_AGREE_CONVERT,
                "full.k.dtype is \"bf16\" locally and \"f8_e4m3\" remotely");
    kvf_match_free(match);
    assert_ok(match_texts(ours, unable, &match));
    check_group(match, 0, "full", KVF_AGREE_DIFFER, "full.k.dtype");
    assert_fails(kvf_match_check(match, 0, range(0, 3)), KVF_E_UNSUPPORTED, "only where both sides allow");
    kvf_match_free(match);
    kvf_free(unable);
    kvf_free(able);
    kvf_free(ours);
    kvf_free(plain);
}

/* 8 heads of 128 channels have as many elements as 16 heads of 64, but not the same elements. */
static void as_many_elements_are_not_the_same_elements(void **state) {
    (void)state;
    char *ours = text_of(full, draft, ""), *some = with(ours, "units: 8", "units: 16");
    char *theirs = with(some, "cell_elements: 128", "cell_elements: 64");
    kvf_match *match = NULL;
    assert_ok(match_texts(ours, theirs, &match));
    check_group(match, 0, "full", KVF_AGREE_DIFFER, "full.k.units is \"8\" locally and \"16\" remotely");
    check_group(match, 1, "draft", KVF_AGREE_SAME, "");
    kvf_match_free(match);
    kvf_free(theirs);
    kvf_free(some);
    kvf_free(ours);
}

static void groups_and_parts_are_found_by_name_in_any_order(void **state) {
    (void)state;
    char *ours = text_of(full, draft, ""), *theirs = text_of(draft, full, "");
    kvf_match *match = NULL;
    assert_ok(match_texts(ours, theirs, &match));
    check_group(match, 0, "full", KVF_AGREE_SAME, "");
    check_group(match, 1, "draft", KVF_AGREE_SAME, "");
    assert_int_equal(match->groups[0].theirs, 1);
    assert_int_equal(match->groups[1].theirs, 0);
    kvf_match_free(match);
    kvf_free(theirs);
    kvf_free(ours);
}

static void an_engines_own_fact_is_of_the_group_it_begins_with_or_of_all(void **state) {
    (void)state;
    char *ours = text_of(full, draft, "full.weights: r1\n"),
         *theirs = text_of(full, draft, "full.weights: r2\n");
    kvf_match *match = NULL;
    assert_ok(match_texts(ours, theirs, &match));
    check_group(match, 0, "full", KVF_AGREE_DIFFER, "full.weights is \"r1\" locally and \"r2\" remotely");
    check_group(match, 1, "draft", KVF_AGREE_SAME, "");
    kvf_match *back = NULL;
    assert_ok(kvf_match_reverse(match, &back));
    assert_int_equal(back->groups[0].agreement, KVF_AGREE_DIFFER);
    assert_int_equal(back->groups[1].agreement, KVF_AGREE_SAME);
    kvf_match_free(back);
    kvf_match_free(match);
    char *of_all = text_of(full, draft, "weights: r2\n");
    assert_fails(try_match(ours, of_all), KVF_E_MISMATCH, "full.weights",
                 "weights is \"r2\" remotely and missing locally");
    kvf_free(of_all);
    kvf_free(theirs);
    kvf_free(ours);
}

static kvf_status reverse(void *subject) {
    kvf_match *back = NULL;
    kvf_status status = kvf_match_reverse(subject, &back);
    kvf_match_free(back);
    return status;
}

static void a_conversion_seen_from_the_other_side_survives_refused_allocations(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    kvf_model *ours = attention(1, 2, 4), *theirs = NULL;
    kvf_match *match = NULL;
    assert_ok(kvf_model_retype(ours, (const kvf_dtype[]){KVF_DTYPE_F16, KVF_DTYPE_F16}, &theirs));
    uint32_t *convert = kvf_convert_sets(ours, KVF_CONVERTED_DTYPES);
    assert_non_null(convert);
    assert_ok(kvf_match_build(ours, convert, theirs, convert, &match));
    check_group(match, 0, "full", KVF_AGREE_CONVERT,
                "full.k.dtype is \"bf16\" locally and \"f16\" remotely; full.v.dtype is \"bf16\" locally and "
                "\"f16\" remotely");

    survive_every_refusal(&memory, reverse, match);

    kvf_match_free(match);
    kvf_free(convert);
    kvf_model_free(theirs);
    kvf_model_free(ours);
    assert_int_equal(memory.live, 0);
}

/* ---- reading --------------------------------------------------------------------------------- */

static kvf_status read(const char *text) {
    kvf_facts facts;
    kvf_status status = kvf_wire_read_facts(text, &facts);
    kvf_facts_free(&facts);
    return status;
}

static void written_facts_are_read(void **state) {
    (void)state;
    const char *name;
    for (uint32_t i = 0; (name = kvf_builtin_model_name(i)); i++) {
        kvf_model *model = NULL;
        kvf_facts facts;
        assert_ok(kvf_model_load(name, NULL, &model));
        uint32_t *convert = kvf_convert_sets(model, 0);
        for (uint32_t g = 1; g < kvf_model_group_count(model); g += 2)
            convert[g] = KVF_CONVERTED_DTYPES;
        char *text = NULL;
        assert_ok(kvf_wire_facts(model, convert, "weights: r1", &text));
        kvf_free(convert);
        assert_ok(kvf_wire_read_facts(text, &facts));
        assert_ok(kvf_model_compare(model, facts.model));
        for (uint32_t g = 0; g < kvf_model_group_count(model); g++)
            assert_int_equal(facts.convert[g], g % 2 ? KVF_CONVERTED_DTYPES : 0);
        assert_string_equal(facts.own, "weights: r1\n");
        kvf_facts_free(&facts);
        kvf_free(text);
        kvf_model_free(model);
    }
}

static void facts_that_were_freed_are_empty(void **state) {
    (void)state;
    char *text = text_of(full, draft, "");
    kvf_facts facts;
    assert_ok(kvf_wire_read_facts(text, &facts));
    kvf_facts_free(&facts);
    assert_null(facts.model);
    assert_null(facts.convert);
    kvf_facts_free(&facts);
    kvf_free(text);
}

static void a_text_that_is_no_facts_is_refused_with_its_line(void **state) {
    (void)state;
    static const struct {
        const char *from, *to, *words;
        kvf_status status;
    } changes[] = {
        {"layer_count: 4", "layer_count: -4", "line 1", KVF_E_PARSE},
        {"layer_count: 4", "layer_count: 4294967296", "line 1", KVF_E_PARSE},
        {"layer_count: 4", "layer_count: 0", "layer_count is 0", KVF_E_RANGE},
        {"convert", "\x1b[31mconverts", "line 7 is \"\\x1b[31mconverts", KVF_E_PARSE},
        {"convert", "converts", "line 7 is \"converts", KVF_E_PARSE},
        {"kind: tokens", "kind: other", "line 3: kind", KVF_E_PARSE},
        {"window_tokens: 0", "window_tokens: 0x", "line 4", KVF_E_PARSE},
        {"window_tokens: 0", "window_tokens: 4294967296", "line 4", KVF_E_PARSE},
        {"window_tokens: 0", "window_tokens: 18446744073709551616", "line 4", KVF_E_PARSE},
        {"window_tokens: 0", "window_tokens: :", "line 4", KVF_E_PARSE},
        {"window_tokens: 0", "window_tokens: /", "line 4", KVF_E_PARSE},
        {"layers: 0-2", "tokens_per_step: x\nlayers: 0-2", "line 6", KVF_E_PARSE},
        {"window_tokens: 0\nchunk_tokens: 0\n", "window_tokens: 8\nchunk_tokens: 0\ntokens_per_step: 2\n",
         "tokens_per_step is 2", KVF_E_INVALID},
        {"layers: 0-2", "layers: ", "line 6: not layers", KVF_E_PARSE},
        {"layers: 0-2", "layers: 0-", "line 6", KVF_E_PARSE},
        {"layers: 0-2", "layers: 2-0", "ends before", KVF_E_PARSE},
        {"layers: 0-2", "layers: 0 2", "line 6", KVF_E_PARSE},
        {"layers: 0-2", "layers: 0-4294967295", "too many", KVF_E_PARSE},
        {"layers: 0-2", "layers: 1-4", "layers[3] is 4", KVF_E_RANGE},
        {"layers: 0-2", "layers: 0,0", "must ascend", KVF_E_INVALID},
        {"dtype: bf16", "dtype: f6", "line 9: dtype is \"f6\"", KVF_E_UNSUPPORTED},
        {"units: 8", "units: 0", "units is 0", KVF_E_RANGE},
        {"units: 8", "heads: 8", "line 10 is \"heads: 8\"; expected units", KVF_E_PARSE},
        {"part: k", "part: ", "name", KVF_E_INVALID},
        {"part: k", "part: \x1b", "control character", KVF_E_INVALID},
        {"rows_per_step: 1\n", "rows_per_step: 1\nmore: 1\n", "line 13", KVF_E_PARSE},
        {"group: draft", "group: full", "which is also the name of group 0", KVF_E_INVALID},
    };
    static const char *const taken[][2] = {
        {"window_tokens: 0", "window_tokens: 4294967295"},
        {"window_tokens: 0", "window_tokens:0"}, /* without the space */
        {"layers: 0-2", "layers: 0,1-2"},
        {"layers: 0-2", "tokens_per_step: 128\nlayers: 0-2"},
        {"convert: f32, bf16, f16", "convert: f32,bf16, later"}, /* a type that this version does not know */
        {"convert: f32, bf16, f16\n", "convert:\n"},
    };
    char *good = text_of(full, draft, "");
    assert_ok(read(good));
    for (size_t i = 0; i < COUNT_OF(taken); i++) {
        char *other = with(good, taken[i][0], taken[i][1]);
        assert_ok(read(other));
        kvf_free(other);
    }
    for (size_t i = 0; i < COUNT_OF(changes); i++) {
        char *bad = with(good, changes[i].from, changes[i].to);
        assert_fails(read(bad), changes[i].status, "facts: ", changes[i].words);
        kvf_free(bad);
    }
    for (size_t cut = strlen(good); cut-- > 0;) { /* sanitizers find reads past the end */
        good[cut] = '\0';
        (void)read(good);
    }
    assert_fails(read(""), KVF_E_PARSE, "expected layer_count");
    assert_fails(read("\nlayer_count: 4\n"), KVF_E_PARSE, "line 1 is \"\"; expected layer_count");
    assert_fails(read("layer_count: 4\nown: x\n"), KVF_E_PARSE, "text after own:");
    assert_fails(read("layer_count: 4\n"), KVF_E_RANGE, "group_count is 0");
    kvf_free(good);
}

static void entries_of_several_tokens_are_a_line_of_their_own(void **state) {
    (void)state;
    kvf_model *model = compressed();
    char *text = facts_of(model, NULL);
    assert_null(strstr(text, "tokens_per_step: 1\n")); /* what most groups have is not said */
    assert_non_null(strstr(text, "group: csa\nkind: tokens\nwindow_tokens: 0\nchunk_tokens: 0\n"
                                 "tokens_per_step: 4\nlayers: 0,2\n"));
    kvf_facts facts;
    assert_ok(kvf_wire_read_facts(text, &facts));
    assert_ok(kvf_model_compare(model, facts.model));
    kvf_facts_free(&facts);
    kvf_free(text);
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
    assert_fails(kvf_wire_compare_own("a: 1\nb: 2\nc: 3\nd: 4\n", "a: 1\nb: 9\nd: 5\ne: 6\n", "p"),
                 KVF_E_MISMATCH, "other facts: b is \"2\" locally and \"9\" remotely",
                 "; c is \"3\" locally and missing remotely", "; d is \"4\" locally and \"5\" remotely",
                 "; e is \"6\" remotely and missing locally");
    assert_null(strstr(kvf_error_detail(), "a is"));
}

static void the_first_dozen_are_listed_and_the_others_counted(void **state) {
    (void)state;
    kvf_text ours = {0}, theirs = {0};
    for (int i = 0; i < 40; i++) {
        kvf_text_add(&ours, "a_name_that_is_long_enough_to_be_cut_somewhere_%d: %0*d\n", i, 100, i);
        kvf_text_add(&theirs, "a_name_that_is_long_enough_to_be_cut_somewhere_%d: %0*d\n", i, 100, i + 1);
    }
    assert_fails(kvf_wire_compare_own(ours.data, theirs.data, "p"), KVF_E_MISMATCH, "; and 28 more");
    kvf_text_free(&ours);
    kvf_text_free(&theirs);
}

/* Checks the words for `count` facts that only one side has: a, b, c ... */
static void check_missing(uint32_t count, const char *last) {
    char ours[64] = "";
    for (uint32_t i = 0; i < count; i++)
        (void)snprintf(ours + 4 * i, sizeof ours - 4 * i, "%c: \n", (char)('a' + i));
    assert_fails(kvf_wire_compare_own(ours, "", "p"), KVF_E_MISMATCH,
                 "other facts: a is \"\" locally and missing remotely; b is \"\" locally",
                 "; l is \"\" locally");
    const char *detail = kvf_error_detail(), *end = strstr(detail, last);
    assert_non_null(end);
    assert_string_equal(end, last);
}

static void a_dozen_are_all_listed(void **state) {
    (void)state;
    check_missing(12, "; l is \"\" locally and missing remotely");
    check_missing(13, "; l is \"\" locally and missing remotely; and 1 more");
}

static void facts_may_have_as_many_lines_as_the_limit(void **state) {
    (void)state;
    kvf_text text = {0};
    for (int i = 0; i < 20000; i++)
        kvf_text_add(&text, "a\n");
    assert_ok(kvf_wire_compare_own("a\n", text.data, "p"));
    kvf_text_add(&text, "a\n");
    assert_fails(kvf_wire_compare_own("a\n", text.data, "p"), KVF_E_MISMATCH, "more than 20000 lines");
    kvf_text_free(&text);
}

static void long_values_are_shown_where_they_differ(void **state) {
    (void)state;
    assert_fails(kvf_wire_compare_own("layers: 0-9,11-19,21-29,31-39,41-49,51-59,61-69,71-79\n",
                                      "layers: 0-9,11-19,21-29,31-39,41-49,51-59,61-68,71-79\n", "p"),
                 KVF_E_MISMATCH, "69,71-79\" locally and \"...", "68,71-79\" remotely");
}

/* If two values first differ within half of the length that is shown, they are shown from their start. */
static void values_are_shown_from_their_start_where_they_differ_early(void **state) {
    (void)state;
    assert_fails(kvf_wire_compare_own("a: 0123456789abcdefghij1\n", "a: 0123456789abcdefghij2\n", "p"),
                 KVF_E_MISMATCH,
                 "a is \"0123456789abcdefghij1\" locally and \"0123456789abcdefghij2\" remotely");
    assert_fails(kvf_wire_compare_own("a: 0123456789abcdefghijk1\n", "a: 0123456789abcdefghijk2\n", "p"),
                 KVF_E_MISMATCH, "a is \"...bcdefghijk1\" locally and \"...bcdefghijk2\" remotely");
    assert_fails(kvf_wire_compare_own("a: 1123456789abcdefghijk1\n", "a: 2123456789abcdefghijk2\n", "p"),
                 KVF_E_MISMATCH, "a is \"1123456789abcdefghijk1\" locally", "\"2123456789abcdefghijk2\"");
}

#define FORTY "0123456789012345678901234567890123456789"

static void shown_text_is_cut_between_characters(void **state) {
    (void)state;
    static const struct {
        const char *text, *shown;
    } cases[] = {
        {"", ""},
        {FORTY, FORTY},
        {FORTY "x", FORTY "..."},
        {"012345678901234567890123456789012345\x01", "012345678901234567890123456789012345\\x01"},
        {"0123456789012345678901234567890123456\x01", "0123456789012345678901234567890123456..."},
        {"012345678901234567890123456789012345\x01y", "012345678901234567890123456789012345\\x01..."},
        {" \x1f~\x7f\xc3\xa9", " \\x1f~\\x7f\xc3\xa9"},
    };
    kvf_shown shown;
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        assert_string_equal(kvf_wire_show(&shown, cases[i].text, strlen(cases[i].text), 0), cases[i].shown);
    assert_string_equal(kvf_wire_show(&shown, "abc", 3, 1), "...bc");
    assert_string_equal(kvf_wire_show(&shown, FORTY "01234567890", 51, 13),
                        "..."
                        "3456789012345678901234567890123456789"
                        "...");
    assert_string_equal(kvf_wire_show(&shown, FORTY "0123456789", 50, 13),
                        "...3456789012345678901234567890123456789");
}

static void the_same_fields_in_another_order_do_not_differ(void **state) {
    (void)state;
    assert_ok(kvf_wire_compare_own("a: 1\nb: 2\n", "b: 2\na: 1\n", "p"));
    assert_ok(kvf_wire_compare_own("", NULL, "p"));
}

static void lines_in_no_form_are_compared_all_the_same(void **state) {
    (void)state;
    assert_fails(kvf_wire_compare_own("a: 1\n", "", "p"), KVF_E_MISMATCH,
                 "a is \"1\" locally and missing remotely");
    assert_fails(kvf_wire_compare_own("a: 1\n", NULL, NULL), KVF_E_MISMATCH, "engine \"\"");
    assert_fails(kvf_wire_compare_own("a: 1\n", "::::", "p"), KVF_E_MISMATCH,
                 "a is \"1\" locally and missing");
    assert_fails(kvf_wire_compare_own("a: 1\n", "a", "p"), KVF_E_MISMATCH,
                 "a is \"1\" locally and \"\" remotely");
    assert_fails(kvf_wire_compare_own("", "a: 1", "p"), KVF_E_MISMATCH, "a is \"1\" remotely");
    assert_fails(kvf_wire_compare_own("a:1\n", "a:2", "p"), KVF_E_MISMATCH,
                 "a is \"1\" locally and \"2\" remotely");
}

static void control_characters_of_the_other_side_are_made_visible(void **state) {
    (void)state;
    assert_fails(kvf_wire_compare_own("a: 1\n", "a: \x1b[31mred\r\nx\ty: 2", "p\x07"), KVF_E_MISMATCH,
                 "engine \"p\\x07\"", "\\x1b[31mred\\x0d", "x\\x09y is \"2\" remotely");
    for (const char *c = kvf_error_detail(); *c; c++)
        assert_true((unsigned char)*c >= ' ');
}

static void a_line_without_end_is_cut_short(void **state) {
    (void)state;
    char *line = malloc(1000001);
    assert_non_null(line);
    memset(line, 'x', 1000000);
    line[1000000] = '\0';
    assert_fails(kvf_wire_compare_own("a: 1\n", line, line), KVF_E_MISMATCH, "xxx...");
    assert_true(strlen(kvf_error_detail()) < 400);
    for (int i = 1; i < 1000000; i += 2)
        line[i] = '\n';
    assert_fails(kvf_wire_compare_own("a: 1\n", line, "p"), KVF_E_MISMATCH, "more than 20000 lines");
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
    assert_fails(kvf_wire_facts(model, NULL, extra, &facts), KVF_E_RANGE, "262144");
    assert_null(facts);
    free(extra);
    kvf_model_free(model);
}

static void facts_may_be_as_long_as_the_limit(void **state) {
    (void)state;
    kvf_model *model = attention(1, 1, 4);
    char *facts = facts_of(model, "x\n");
    size_t room = KVF_WIRE_MAX_FACTS - strlen(facts) + 1; /* for own facts in place of x */
    char *own = calloc(room + 2, 1);
    assert_non_null(own);
    kvf_free(facts);
    memset(own, 'x', room);
    facts = facts_of(model, own);
    assert_int_equal(strlen(facts), KVF_WIRE_MAX_FACTS);
    kvf_free(facts);
    facts = NULL;
    own[room] = 'x';
    assert_fails(kvf_wire_facts(model, NULL, own, &facts), KVF_E_RANGE, "262145 bytes", "up to 262144");
    assert_null(facts);
    free(own);
    kvf_model_free(model);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static kvf_status refuse_by_fact(void *subject) {
    kvf_status status = kvf_wire_compare_own("a: 1\nb: 2\n", subject, "p");
    assert_int_not_equal(status, KVF_OK); /* no difference is passed over */
    return status == KVF_E_MISMATCH ? KVF_OK : status;
}

static kvf_status match_and_refuse(void *subject) {
    const char *const *texts = subject;
    kvf_match *match = NULL;
    kvf_facts own;
    kvf_status status = kvf_wire_read_facts(texts[0], &own);
    if (!status)
        status = kvf_wire_match(&own, texts[1], "p", &match);
    kvf_match_free(match);
    kvf_facts_free(&own);
    return status == KVF_E_MISMATCH ? KVF_OK : status;
}

static void nothing_leaks_where_memory_ends(void **state) {
    (void)state;
    memory_count memory;
    char *ours = text_of(full, draft, "full.weights: r1\nweights: r1\n");
    char *theirs = text_of(full, draft, "full.weights: r2\nweights: r1\n");
    char *others = text_of(draft, "", "weights: r2\n");
    count_memory(&memory);
    const char *const matched[] = {ours, theirs}, *const refused[] = {ours, others};
    survive_every_refusal(&memory, refuse_by_fact, "a: 2\nc: 3\n");
    survive_every_refusal(&memory, refuse_by_fact, "a: 1\nb: 3\n");
    survive_every_refusal(&memory, match_and_refuse, (void *)matched);
    survive_every_refusal(&memory, match_and_refuse, (void *)refused);
    assert_ok(kvf_set_allocator(NULL));
    kvf_free(ours);
    kvf_free(theirs);
    kvf_free(others);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(facts_are_one_line_each_in_a_fixed_order),
        cmocka_unit_test(layers_are_written_as_ranges),
        cmocka_unit_test(the_digest_is_the_sha_256_of_the_text),
        cmocka_unit_test(whatever_changes_the_cells_changes_the_facts),
        cmocka_unit_test(free_choices_of_an_engine_are_not_in_the_facts),
        cmocka_unit_test(engines_of_other_shapes_have_the_same_facts),
        cmocka_unit_test(a_draft_model_on_one_side_is_no_difference_of_the_other_groups),
        cmocka_unit_test(facts_of_somebody_without_a_name_are_matched),
        cmocka_unit_test(draft_layers_in_a_group_are_missing_only_where_they_are_wanted),
        cmocka_unit_test(types_are_converted_where_both_let_them),
        cmocka_unit_test(fp8_is_converted_only_if_both_can),
        cmocka_unit_test(as_many_elements_are_not_the_same_elements),
        cmocka_unit_test(groups_and_parts_are_found_by_name_in_any_order),
        cmocka_unit_test(an_engines_own_fact_is_of_the_group_it_begins_with_or_of_all),
        cmocka_unit_test_teardown(a_conversion_seen_from_the_other_side_survives_refused_allocations,
                                  stop_counting_memory),
        cmocka_unit_test(written_facts_are_read),
        cmocka_unit_test(facts_that_were_freed_are_empty),
        cmocka_unit_test(a_text_that_is_no_facts_is_refused_with_its_line),
        cmocka_unit_test(entries_of_several_tokens_are_a_line_of_their_own),
        cmocka_unit_test(builtin_models_all_have_facts_of_their_own),
        cmocka_unit_test(every_differing_field_is_listed),
        cmocka_unit_test(the_first_dozen_are_listed_and_the_others_counted),
        cmocka_unit_test(a_dozen_are_all_listed),
        cmocka_unit_test(facts_may_have_as_many_lines_as_the_limit),
        cmocka_unit_test(long_values_are_shown_where_they_differ),
        cmocka_unit_test(values_are_shown_from_their_start_where_they_differ_early),
        cmocka_unit_test(shown_text_is_cut_between_characters),
        cmocka_unit_test(the_same_fields_in_another_order_do_not_differ),
        cmocka_unit_test(lines_in_no_form_are_compared_all_the_same),
        cmocka_unit_test(control_characters_of_the_other_side_are_made_visible),
        cmocka_unit_test(a_line_without_end_is_cut_short),
        cmocka_unit_test(facts_above_the_size_limit_are_refused),
        cmocka_unit_test(facts_may_be_as_long_as_the_limit),
        cmocka_unit_test_teardown(nothing_leaks_where_memory_ends, stop_counting_memory),
    };
    return cmocka_run_group_tests_name("wire_facts", tests, NULL, NULL);
}
