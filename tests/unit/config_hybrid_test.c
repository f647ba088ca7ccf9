/*
 * Configurations of models whose layers differ, each with one fault: a missing field, or fields that contradict each
 * other. Every case is a published configuration in which one text was replaced.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <kvferry/model.h>

enum { MOST_BYTES = 8192 };

/* Reads models/NAME.json with the first `from` replaced by `to`. */
static kvf_status read_edited(const char *name, const char *from, const char *to) {
    char path[512], text[MOST_BYTES], edited[2 * MOST_BYTES];
    (void)snprintf(path, sizeof path, "%s/models/%s.json", KVF_SOURCE_DIR, name);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    size_t bytes = fread(text, 1, sizeof text - 1, file);
    assert_int_equal(fclose(file), 0);
    text[bytes] = '\0';
    const char *at = strstr(text, from);
    if (!at)
        fail_msg("%s has no %s", name, from);
    int length = snprintf(edited, sizeof edited, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    assert_in_range(length, 1, sizeof edited - 1);
    kvf_model *model = NULL;
    kvf_status status = kvf_model_from_config(edited, (size_t)length, NULL, &model);
    assert_true((status == KVF_OK) == (model != NULL));
    kvf_model_free(model);
    return status;
}

static void assert_refused(const char *name, const char *from, const char *to, kvf_status wanted,
                           const char *words) {
    kvf_status status = read_edited(name, from, to);
    if (status != wanted || !strstr(kvf_error_detail(), words))
        fail_msg("%s with %s: wanted %s with \"%s\", got %s: %s", name, to, kvf_status_name(wanted), words,
                 kvf_status_name(status), status ? kvf_error_detail() : "");
}

/* ---- missing --------------------------------------------------------------------------------- */

static void a_field_that_is_missing_is_named(void **state) {
    (void)state;
    static const struct {
        const char *model;
        const char *prefix; /* how messages name the object that the field is in */
        const char *fields[12];
    } cases[] = {
        {"nemotron-3-nano-30b",
         "",
         {"num_attention_heads", "num_key_value_heads", "hybrid_override_pattern", "mamba_num_heads",
          "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"}},
        {"qwen3-next-80b-a3b",
         "",
         {"num_hidden_layers", "num_attention_heads", "num_key_value_heads", "linear_conv_kernel_dim",
          "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim"}},
        {"granite-4.0-h-small",
         "",
         {"num_attention_heads", "layer_types", "mamba_d_conv", "mamba_d_head", "mamba_d_state",
          "mamba_expand", "mamba_n_groups", "mamba_n_heads"}},
        {"jamba-1.5-mini",
         "",
         {"num_hidden_layers", "num_attention_heads", "num_key_value_heads", "mamba_d_conv", "mamba_d_state",
          "mamba_expand"}},
        {"kimi-linear-48b-a3b", "", {"num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim"}},
        {"kimi-linear-48b-a3b", "linear_attn_config.", {"num_heads", "short_conv_kernel_size"}},
        {"gemma-4-26b-a4b", "text_config.", {"num_attention_heads", "num_key_value_heads"}},
        {"deepseek-v3.2", "", {"num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (const char *const *field = cases[i].fields; *field; field++) {
            char key[64], other[64], words[128];
            (void)snprintf(key, sizeof key, "\"%s\":", *field);
            (void)snprintf(other, sizeof other, "\"not_%s\":", *field);
            (void)snprintf(words, sizeof words, "%s%s is missing", cases[i].prefix, *field);
            assert_refused(cases[i].model, key, other, KVF_E_INVALID, words);
        }
}

static void a_field_that_another_could_give_is_missed_together_with_it(void **state) {
    (void)state;
    assert_refused("granite-4.0-h-small", "\"hidden_size\"", "\"x\"", KVF_E_INVALID,
                   "head_dim is missing, and so is hidden_size");
    assert_refused("jamba-1.5-mini", "\"hidden_size\"", "\"x\"", KVF_E_INVALID,
                   "head_dim is missing, and so is hidden_size");
    /* the lists of layers, if their object is missing or has no such lists */
    assert_refused("kimi-linear-48b-a3b", "\"linear_attn_config\"", "\"x\"", KVF_E_INVALID,
                   "full_attn_layers is missing");
    assert_refused("kimi-linear-48b-a3b", "\"full_attn_layers\"", "\"x\"", KVF_E_INVALID,
                   "full_attn_layers is missing");
    assert_refused("kimi-linear-48b-a3b", "\"head_dim\": 128", "\"x\": 128", KVF_E_INVALID,
                   "linear_attn_config.head_dim is missing");
}

/* ---- contradictory --------------------------------------------------------------------------- */

static void layers_that_are_told_apart_in_two_ways_must_agree(void **state) {
    (void)state;
    assert_refused("nemotron-3-nano-30b", "\"num_hidden_layers\": 52", "\"num_hidden_layers\": 51",
                   KVF_E_INVALID, "hybrid_override_pattern describes 52 layers, but num_hidden_layers is 51");
    assert_refused("nemotron-3-nano-30b", "MEMEM*", "MEMEMQ", KVF_E_INVALID,
                   "hybrid_override_pattern has 'Q' for layer 5");
    assert_refused("qwen3-next-80b-a3b", "\"full_attention_interval\": 4",
                   "\"layer_types\": [\"linear_attention\", \"full_attention\"]", KVF_E_INVALID,
                   "layer_types describes 2 layers, but num_hidden_layers is 48");
    assert_refused("qwen3-next-80b-a3b", "\"full_attention_interval\": 4", "\"full_attention_interval\": 0",
                   KVF_E_RANGE, "full_attention_interval is 0; allowed: 1 to 65536");
    assert_refused("granite-4.0-h-small", "\"num_hidden_layers\": 40", "\"num_hidden_layers\": 36",
                   KVF_E_INVALID, "layer_types describes 40 layers, but num_hidden_layers is 36");
    assert_refused("granite-4.0-h-small", "\"attention\"", "\"sliding_attention\"", KVF_E_INVALID,
                   "layer 5 has a window, but sliding_window is missing");
    assert_refused("jamba-1.5-mini", "\"attn_layer_offset\": 4", "\"attn_layer_offset\": 8", KVF_E_RANGE,
                   "attn_layer_offset is 8; allowed: 0 to 7");
    assert_refused("kimi-linear-48b-a3b", "[4, 8, 12,", "[4, 7, 12,", KVF_E_INVALID,
                   "linear_attn_config.kda_layers[5] is 7, a layer that is listed before");
    assert_refused(
        "kimi-linear-48b-a3b", "[4, 8, 12,", "[4, 12,", KVF_E_INVALID,
        "linear_attn_config.full_attn_layers and linear_attn_config.kda_layers: layer 8 is in neither");
    assert_refused("kimi-linear-48b-a3b", "[4, 8, 12,", "[4, 28, 12,", KVF_E_RANGE,
                   "linear_attn_config.full_attn_layers[1] is 28; allowed: 1 to 27");
    assert_refused("gemma-4-31b", "\"num_hidden_layers\": 60", "\"num_hidden_layers\": 59", KVF_E_INVALID,
                   "text_config.layer_types describes 60 layers, but num_hidden_layers is 59");
    assert_refused("gemma-4-31b", "\"sliding_window\": 1024", "\"sliding_window\": null", KVF_E_INVALID,
                   "layer 0 has a window, but text_config.sliding_window is missing");
    assert_refused("gemma-4-31b", "\"num_kv_shared_layers\": 0", "\"num_kv_shared_layers\": 59",
                   KVF_E_INVALID, "num_kv_shared_layers is 59, but no layer before layer 5 is of its kind");
}

static void sizes_of_a_state_must_fit_each_other(void **state) {
    (void)state;
    assert_refused("nemotron-3-nano-30b", "\"n_groups\": 8", "\"n_groups\": 7", KVF_E_INVALID,
                   "n_groups is 7, which does not divide mamba_num_heads, 64");
    assert_refused("nemotron-3-nano-30b", "\"n_groups\": 8", "\"mamba_n_groups\": 7", KVF_E_INVALID,
                   "mamba_n_groups is 7, which does not divide mamba_num_heads, 64");
    assert_refused("nemotron-3-nano-30b", "\"n_groups\": 8", "\"n_groups\": 8, \"mamba_n_groups\": 4",
                   KVF_E_INVALID, "n_groups is 8, but mamba_n_groups is 4");
    assert_refused("nemotron-3-nano-30b", "\"conv_kernel\": 4", "\"conv_kernel\": 1", KVF_E_RANGE,
                   "conv_kernel is 1; allowed: 2 to");
    assert_refused("nemotron-3-nano-30b", "\"mamba_ssm_cache_dtype\": \"float32\"",
                   "\"mamba_ssm_cache_dtype\": \"float33\"", KVF_E_INVALID,
                   "mamba_ssm_cache_dtype: \"float33\" is no element type; allowed: ");
    assert_refused("nemotron-3-nano-30b", "\"mamba_ssm_cache_dtype\": \"float32\"",
                   "\"mamba_ssm_dtype\": \"float33\"", KVF_E_INVALID,
                   "mamba_ssm_dtype: \"float33\" is no element type; allowed: ");
    assert_refused("qwen3-next-80b-a3b", "\"linear_num_key_heads\": 16", "\"linear_num_key_heads\": 15",
                   KVF_E_INVALID,
                   "linear_num_key_heads is 15, which does not divide linear_num_value_heads, 32");
    assert_refused("qwen3-next-80b-a3b", "\"linear_num_key_heads\": 16", "\"linear_num_key_heads\": 64",
                   KVF_E_RANGE, "linear_num_key_heads is 64; allowed: 1 to 32");
    assert_refused("granite-4.0-h-small", "\"mamba_n_heads\": 128", "\"mamba_n_heads\": 64", KVF_E_INVALID,
                   "mamba_n_heads is 64 and mamba_d_head is 64, but the inner width is 8192");
    assert_refused("granite-4.0-h-small", "\"mamba_n_groups\": 1", "\"mamba_n_groups\": 3", KVF_E_INVALID,
                   "mamba_n_groups is 3, which does not divide mamba_n_heads, 128");
    assert_refused("jamba-1.5-mini", "\"mamba_expand\": 2", "\"mamba_expand\": 0", KVF_E_RANGE,
                   "mamba_expand is 0; allowed: 1 to 256");
    assert_refused("kimi-linear-48b-a3b", "\"num_heads\": 32", "\"num_heads\": 0", KVF_E_RANGE,
                   "linear_attn_config.num_heads is 0; allowed: 1 to");
}

static void heads_of_an_attention_group_must_fit_each_other(void **state) {
    (void)state;
    assert_refused(
        "gemma-4-31b", "\"num_global_key_value_heads\": 4", "\"num_global_key_value_heads\": 5",
        KVF_E_INVALID,
        "text_config.num_global_key_value_heads is 5, which does not divide num_attention_heads, 32");
    assert_refused("gemma-4-31b", "\"num_global_key_value_heads\": 4", "\"num_global_key_value_heads\": 33",
                   KVF_E_RANGE, "text_config.num_global_key_value_heads is 33; allowed: 1 to 32");
    assert_refused("gemma-4-31b", "\"global_head_dim\": 512", "\"global_head_dim\": 0", KVF_E_RANGE,
                   "text_config.global_head_dim is 0; allowed: 1 to");
    assert_refused("nemotron-3-nano-30b", "\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3",
                   KVF_E_INVALID, "num_key_value_heads is 3, which does not divide num_attention_heads, 32");
    assert_refused("deepseek-v3.2", "\"index_head_dim\": 128", "\"index_head_dim\": 100", KVF_E_INVALID,
                   "index_head_dim is 100; it must be a multiple of 128");
    assert_refused("deepseek-v3.2", "\"index_head_dim\": 128", "\"index_head_dim\": 0", KVF_E_RANGE,
                   "index_head_dim is 0; allowed: 1 to");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_field_that_is_missing_is_named),
        cmocka_unit_test(a_field_that_another_could_give_is_missed_together_with_it),
        cmocka_unit_test(layers_that_are_told_apart_in_two_ways_must_agree),
        cmocka_unit_test(sizes_of_a_state_must_fit_each_other),
        cmocka_unit_test(heads_of_an_attention_group_must_fit_each_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
