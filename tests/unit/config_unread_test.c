/*
 * Configurations that describe their layers one by one, and fields that this version of the reader does not know.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "config_reading.h"

static kvf_model *read_model(const char *json) {
    return read_noted(json, NULL);
}

static void assert_same(const char *one, const char *other) {
    kvf_model *a = read_model(one);
    kvf_model *b = read_model(other);
    if (kvf_model_compare(a, b))
        fail_msg("%s", kvf_error_detail());
    kvf_model_free(a);
    kvf_model_free(b);
}

/* ---- layers one by one ----------------------------------------------------------------------- */

/* Four layers, window, window, full, full; those with a window have 4 heads of 32 elements. */
#define GEMMA(fields)                                                                                        \
    "{\"model_type\": \"gemma4_text\", \"dtype\": \"bfloat16\", \"num_hidden_layers\": 4, "                  \
    "\"hidden_size\": 64, \"num_attention_heads\": 8, \"num_key_value_heads\": 4, \"head_dim\": 32, "        \
    "\"sliding_window\": 16, \"attention_k_eq_v\": true, \"layer_types\": [\"sliding_attention\", "          \
    "\"sliding_attention\", \"full_attention\", \"full_attention\"]" fields "}"
#define BY_LAYER(layers) ", \"per_layer_config\": {" layers "}"
#define SMALL "{\"head_dim\": 64, \"num_key_value_heads\": 2}"

static void both_forms_of_gemma_4_are_the_same_model(void **state) {
    (void)state;
    static const char old[] = GEMMA(", \"global_head_dim\": 64, \"num_global_key_value_heads\": 2");
    static const char saved[] = GEMMA(BY_LAYER("\"2\": " SMALL ", \"3\": " SMALL));
    kvf_model *model = read_model(saved);
    assert_int_equal(kvf_model_group_count(model), 2);
    assert_kv_group(model, 0, "full", 2, 2, 2, 64);
    assert_kv_group(model, 1, "swa", 0, 2, 4, 32);
    assert_null(kvf_model_note(model, 0));
    kvf_model_free(model);
    assert_same(old, saved);
    assert_same(old, GEMMA(BY_LAYER("\"02\": " SMALL ", \"003\": " SMALL)));
    /* given in both forms, with the same values */
    assert_same(old, GEMMA(", \"global_head_dim\": 64, \"num_global_key_value_heads\": 2" BY_LAYER(
                         "\"2\": " SMALL ", \"3\": " SMALL)));
}

static void missing_fields_of_layers_are_not_guessed(void **state) {
    (void)state;
    /* no layer differs: head_dim holds, and not the 512 that hold if neither form is there */
    kvf_model *model = read_model(GEMMA(BY_LAYER("")));
    assert_kv_group(model, 0, "full", 2, 2, 4, 32);
    kvf_model_free(model);
    model = read_model(GEMMA(""));
    assert_kv_group(model, 0, "full", 2, 2, 4, 512);
    kvf_model_free(model);
}

static void layers_of_one_kind_with_other_heads_are_groups_of_their_own(void **state) {
    (void)state;
    kvf_model *model = read_model(GEMMA(BY_LAYER("\"1\": {\"head_dim\": 16}, \"3\": " SMALL)));
    assert_int_equal(kvf_model_group_count(model), 4);
    assert_kv_group(model, 0, "full", 2, 1, 4, 32);
    assert_kv_group(model, 1, "full.2", 3, 1, 2, 64);
    assert_kv_group(model, 2, "swa", 0, 1, 4, 32);
    assert_kv_group(model, 3, "swa.2", 1, 1, 4, 16);
    kvf_model_free(model);
}

static void any_family_may_describe_its_layers_one_by_one(void **state) {
    (void)state;
    kvf_model *model = read_model(
        "{\"model_type\": \"llama\", \"dtype\": \"float16\", \"num_hidden_layers\": 3, \"hidden_size\": 64, "
        "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"per_layer_config\": "
        "{\"1\": {\"num_key_value_heads\": 1, \"intermediate_size\": 7}}}");
    assert_kv_group(model, 0, "full", 0, 2, 2, 16);
    assert_kv_group(model, 1, "full.2", 1, 1, 1, 16);
    assert_null(kvf_model_note(model, 0));
    kvf_model_free(model);
}

static void two_forms_that_say_different_things_are_refused(void **state) {
    (void)state;
    assert_refused(GEMMA(", \"global_head_dim\": 128" BY_LAYER("\"2\": " SMALL ", \"3\": " SMALL)),
                   KVF_E_INVALID, "global_head_dim is 128, but per_layer_config says 64 for layer 2");
    assert_refused(GEMMA(", \"num_global_key_value_heads\": 1" BY_LAYER("\"2\": " SMALL ", \"3\": " SMALL)),
                   KVF_E_INVALID, "num_global_key_value_heads is 1, but per_layer_config says 2 for layer 2");
}

static void layers_that_cannot_be_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *layers;
        kvf_status status;
        const char *words;
    } cases[] = {
        {"\"4\": {}", KVF_E_RANGE, "per_layer_config.4 names no layer; allowed: \"0\" to \"3\""},
        {"\"-1\": {}", KVF_E_RANGE, "per_layer_config.-1 names no layer"},
        {"\"\": {}", KVF_E_RANGE, "names no layer"},
        {"\"9999999999\": {}", KVF_E_RANGE, "names no layer"},
        {"\"2\": {}, \"02\": {}", KVF_E_INVALID, "per_layer_config.02 is for layer 2, which is given twice"},
        {"\"2\": 7", KVF_E_INVALID, "per_layer_config.2 is 7; it must be an object"},
        {"\"2\": {\"head_dim\": 0}", KVF_E_RANGE, "per_layer_config.2.head_dim is 0; allowed: 1 to"},
        {"\"2\": {\"head_dim\": null}", KVF_E_INVALID,
         "per_layer_config.2.head_dim is null, and gemma4_text has no default for it"},
        {"\"2\": {\"num_key_value_heads\": 3}", KVF_E_INVALID,
         "per_layer_config.2.num_key_value_heads is 3, which does not divide num_attention_heads, 8"},
        {"\"2\": {\"num_key_value_heads\": 9}", KVF_E_RANGE,
         "per_layer_config.2.num_key_value_heads is 9; allowed: 1 to 8"},
        {"\"0\": {\"sliding_window\": 8}", KVF_E_UNSUPPORTED,
         "per_layer_config.0.sliding_window is 8, but sliding_window is 16; layers that differ in it are "
         "not"},
        {"\"0\": {\"num_attention_heads\": 6}", KVF_E_INVALID,
         "num_key_value_heads is 4, which does not divide num_attention_heads, 6"},
        {"\"0\": {\"skip\": [\"attention\"]}", KVF_E_UNSUPPORTED,
         "per_layer_config.0.skip is [\"attention\"]; layers without some of their parts are not supported"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char json[1024];
        (void)snprintf(json, sizeof json, GEMMA(BY_LAYER("%s")), cases[i].layers);
        assert_refused(json, cases[i].status, cases[i].words);
    }
    assert_refused(GEMMA(", \"per_layer_config\": [1]"), KVF_E_INVALID,
                   "per_layer_config is [1]; it must be an object");
    assert_refused("{\"model_type\": \"deepseek_v3\", \"dtype\": \"bfloat16\", \"num_hidden_layers\": 2, "
                   "\"kv_lora_rank\": 512, \"qk_rope_head_dim\": 64, \"index_head_dim\": 128, "
                   "\"per_layer_config\": {\"1\": {\"index_head_dim\": 256}}}",
                   KVF_E_UNSUPPORTED, "per_layer_config.1.index_head_dim is 256, but index_head_dim is 128");
    assert_refused("{\"model_type\": \"bailing_hybrid\", \"dtype\": \"bfloat16\", \"num_hidden_layers\": 2, "
                   "\"hidden_size\": 64, \"num_attention_heads\": 4, \"kv_lora_rank\": 512, "
                   "\"qk_rope_head_dim\": 64, \"layer_group_size\": 2, \"short_conv_kernel_size\": 4, "
                   "\"head_dim\": 16, \"per_layer_config\": {\"0\": {\"num_attention_heads\": 8}}}",
                   KVF_E_UNSUPPORTED,
                   "per_layer_config.0.num_attention_heads is 8, but num_attention_heads is 4");
    assert_refused("{\"model_type\": \"mimo_v2\", \"dtype\": \"bfloat16\", \"num_hidden_layers\": 1, "
                   "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"head_dim\": 4, "
                   "\"v_head_dim\": 2, \"hybrid_layer_pattern\": [0], \"per_layer_config\": {}}",
                   KVF_E_UNSUPPORTED, "per_layer_config is given: it is not supported for mimo_v2");
}

static void a_layer_may_have_more_query_heads_for_the_same_cache(void **state) {
    (void)state;
    assert_same(GEMMA(BY_LAYER("")), GEMMA(BY_LAYER("\"0\": {\"num_attention_heads\": 16}")));
}

static void a_layer_may_repeat_what_holds_for_all(void **state) {
    (void)state;
    assert_same(GEMMA(BY_LAYER("")),
                GEMMA(BY_LAYER("\"0\": {\"sliding_window\": 16, \"skip\": []}, \"1\": null")));
}

static void more_shapes_than_there_are_groups_for_are_refused(void **state) {
    (void)state;
    char json[4096];
    int length = snprintf(json, sizeof json,
                          "{\"model_type\": \"llama\", \"dtype\": \"float16\", \"num_hidden_layers\": 16, "
                          "\"hidden_size\": 64, \"num_attention_heads\": 4, \"per_layer_config\": {");
    for (int i = 0; i < 16; i++)
        length += snprintf(json + length, sizeof json - (size_t)length, "%s\"%d\": {\"head_dim\": %d}",
                           i ? ", " : "", i, i + 1);
    (void)snprintf(json + length, sizeof json - (size_t)length, "}}");
    assert_refused(json, KVF_E_UNSUPPORTED, "per_layer_config makes more than 15 groups of layers");
}

/* ---- fields that are not read ---------------------------------------------------------------- */

static void assert_note(const char *json, const char *note) {
    kvf_model *model = read_model(json);
    if (!kvf_model_note(model, 0) || strcmp(kvf_model_note(model, 0), note) != 0)
        fail_msg("wanted the note \"%s\", got \"%s\"", note,
                 kvf_model_note(model, 0) ? kvf_model_note(model, 0) : "none");
    assert_null(kvf_model_note(model, 1));
    kvf_model_free(model);
}

static void assert_no_note(const char *json) {
    kvf_model *model = read_model(json);
    if (kvf_model_note(model, 0))
        fail_msg("%s", kvf_model_note(model, 0));
    kvf_model_free(model);
}

#define LLAMA(fields)                                                                                        \
    "{\"model_type\": \"llama\", \"dtype\": \"float16\", \"num_hidden_layers\": 3, \"hidden_size\": 64, "    \
    "\"num_attention_heads\": 4" fields "}"

static void a_field_that_may_decide_a_size_and_is_not_read_is_noted(void **state) {
    (void)state;
    assert_note(LLAMA(", \"value_head_dim\": 8"),
                "value_head_dim is 8: it may decide a size, but is not read for llama");
    assert_note(LLAMA(", \"v_head_dim\": 8"),
                "v_head_dim is 8: it may decide a size, but is not read for llama");
    assert_note(LLAMA(", \"kv_lora_rank\": 8"),
                "kv_lora_rank is 8: it may decide a size, but is not read for llama");
    assert_note(LLAMA(", \"sliding_window\": 8"),
                "sliding_window is 8: it may decide a size, but is not read for llama");
    assert_note(LLAMA(", \"cache\": {\"window\": {\"size\": [1, 2]}}"),
                "cache.window is {\"size\":[1,2]}: it may decide a size, but is not read for llama");
    assert_note(
        GEMMA(BY_LAYER("\"1\": {\"value_head_dim\": 8}, \"2\": {\"value_head_dim\": 8}")),
        "per_layer_config.*.value_head_dim is 8: it may decide a size, but is not read for gemma4_text");
    assert_note("{\"model_type\": \"any\", \"text_config\": " LLAMA(", \"new_size\": \"odd\\n\"") "}",
                "text_config.new_size is \"odd\\n\": it may decide a size, but is not read for llama");
    assert_note(
        LLAMA(", \"quantization_config\": {\"group_size\": 128, \"kv_cache_scheme\": {\"num_bits\": 8}}"),
        "quantization_config.kv_cache_scheme is {\"num_bits\":8}: it may decide a size, but is not read for "
        "llama");
}

static void a_field_that_says_nothing_or_decides_no_size_is_not_noted(void **state) {
    (void)state;
    assert_no_note(LLAMA(", \"value_head_dim\": null, \"sliding_window\": null, \"new_layers\": [], "
                         "\"new_size\": 0, \"use_new_heads\": false, \"new_dims\": {}"));
    assert_no_note(
        LLAMA(", \"intermediate_size\": 8, \"vocab_size\": 8, \"rms_norm_eps\": 1e-6, "
              "\"max_position_embeddings\": 8, \"moe_layer_freq\": 1, \"max_window_layers\": 28, "
              "\"rope_scaling\": {\"mscale_all_dim\": 1}, \"vision_config\": {\"hidden_size\": 8}"));
    assert_no_note(LLAMA(", \"quantization_config\": {\"group_size\": 128, \"kv_cache_scheme\": null}"));
    assert_no_note(LLAMA(", \"layer_types\": [\"full_attention\", \"full_attention\", \"full_attention\"], "
                         "\"sliding_window\": 64, "
                         "\"no_rope_layer_interval\": 4"));
}

static void no_shipped_model_has_a_note(void **state) {
    (void)state;
    for (uint32_t i = 0; kvf_builtin_model_name(i); i++) {
        kvf_model *model = NULL;
        assert_int_equal(kvf_model_load(kvf_builtin_model_name(i), NULL, &model), KVF_OK);
        if (kvf_model_note(model, 0))
            fail_msg("%s: %s", kvf_builtin_model_name(i), kvf_model_note(model, 0));
        kvf_model_free(model);
    }
}

static void notes_are_few_and_of_one_line(void **state) {
    (void)state;
    char json[4096];
    int length = snprintf(json, sizeof json, "%s", LLAMA(""));
    length--; /* goes back over the closing bracket */
    for (int i = 0; i < 40; i++)
        length += snprintf(json + length, sizeof json - (size_t)length, ", \"new\\n_size_%d\": 8", i);
    (void)snprintf(json + length, sizeof json - (size_t)length, "}");
    kvf_model *model = read_model(json);
    assert_string_equal(kvf_model_note(model, 15),
                        "new?_size_15 is 8: it may decide a size, but is not read for llama");
    assert_null(kvf_model_note(model, 16));
    assert_null(kvf_model_note(model, UINT32_MAX));
    kvf_model_free(model);
}

static void a_model_from_a_description_has_no_note(void **state) {
    (void)state;
    static const uint32_t layer = 0;
    const kvf_part_desc part = {.name = "k", .dtype = KVF_DTYPE_F32, .units = 1, .cell_elements = 1};
    const kvf_group_desc group = {
        .name = "full", .layers = &layer, .layer_count = 1, .parts = &part, .part_count = 1};
    const kvf_model_desc desc = {
        .struct_size = sizeof desc, .layer_count = 1, .groups = &group, .group_count = 1};
    kvf_model *model = NULL;
    assert_int_equal(kvf_model_create(&desc, &model), KVF_OK);
    assert_null(kvf_model_note(model, 0));
    kvf_model_free(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_forms_of_gemma_4_are_the_same_model),
        cmocka_unit_test(missing_fields_of_layers_are_not_guessed),
        cmocka_unit_test(layers_of_one_kind_with_other_heads_are_groups_of_their_own),
        cmocka_unit_test(any_family_may_describe_its_layers_one_by_one),
        cmocka_unit_test(two_forms_that_say_different_things_are_refused),
        cmocka_unit_test(layers_that_cannot_be_are_refused),
        cmocka_unit_test(a_layer_may_have_more_query_heads_for_the_same_cache),
        cmocka_unit_test(a_layer_may_repeat_what_holds_for_all),
        cmocka_unit_test(more_shapes_than_there_are_groups_for_are_refused),
        cmocka_unit_test(a_field_that_may_decide_a_size_and_is_not_read_is_noted),
        cmocka_unit_test(a_field_that_says_nothing_or_decides_no_size_is_not_noted),
        cmocka_unit_test(no_shipped_model_has_a_note),
        cmocka_unit_test(notes_are_few_and_of_one_line),
        cmocka_unit_test(a_model_from_a_description_has_no_note),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
