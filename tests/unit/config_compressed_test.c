/*
 * Models from configurations whose layers compress their cache: several tokens share an entry (DeepSeek V4). The sizes
 * are worked out by hand, in comments if they are not obvious.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "config_reading.h"
#include "model/config.h"

/* ---- reading --------------------------------------------------------------------------------- */

/* Layers in letters: W a window alone, S four tokens an entry, H 128 tokens an entry. */
static const char *ratio_of(char letter) {
    return letter == 'W' ? "0" : letter == 'S' ? "4" : "128";
}

static const char *word_of(char letter) {
    return letter == 'W'   ? "\"sliding_attention\""
           : letter == 'S' ? "\"compressed_sparse_attention\""
                           : "\"heavily_compressed_attention\"";
}

/* A configuration with a list that has an element for each letter, and more fields. */
typedef struct config_text {
    char text[8192];
} config_text;

static config_text listed(uint32_t layers, const char *list, const char *(*element)(char),
                          const char *letters, const char *fields) {
    config_text out;
    size_t end = (size_t)snprintf(out.text, sizeof out.text,
                                  "{\"model_type\": \"deepseek_v4\", \"num_hidden_layers\": %u, "
                                  "\"torch_dtype\": \"bfloat16\"%s, \"%s\": [",
                                  layers, fields, list);
    for (const char *l = letters; *l; l++)
        end += (size_t)snprintf(out.text + end, sizeof out.text - end, "%s%s", l == letters ? "" : ", ",
                                element(*l));
    assert_true(end + sizeof "]}" <= sizeof out.text);
    memcpy(out.text + end, "]}", sizeof "]}");
    return out;
}

/* The fields of DeepSeek V4 Flash's configuration, without the list that says how each layer compresses. */
#define FLASH                                                                                                \
    ", \"hidden_size\": 4096, \"num_attention_heads\": 64, \"num_key_value_heads\": 1, \"head_dim\": 512, "  \
    "\"qk_rope_head_dim\": 64, \"q_lora_rank\": 1024, \"o_lora_rank\": 1024, \"o_groups\": 8, "              \
    "\"index_head_dim\": 128, \"index_n_heads\": 64, \"index_topk\": 512, \"sliding_window\": 128, "         \
    "\"num_hash_layers\": 3, \"num_nextn_predict_layers\": 1, \"hc_mult\": 4, \"compress_rope_theta\": "     \
    "160000, \"moe_intermediate_size\": 2048"
#define FLASH_LAYERS "WWSHSHSHSHSHSHSHSHSHSHSHSHSHSHSHSHSHSHSHSHS"

static config_text ratios(uint32_t layers, const char *letters, const char *fields) {
    return listed(layers, "compress_ratios", ratio_of, letters, fields);
}

static config_text words(uint32_t layers, const char *letters, const char *fields) {
    return listed(layers, "layer_types", word_of, letters, fields);
}

static kvf_model *flash(void) {
    return read_with(ratios(43, FLASH_LAYERS "W", FLASH).text, NULL);
}

static void assert_same_as_flash(const char *json) {
    kvf_model *expected = flash();
    kvf_model *model = read_with(json, NULL);
    if (kvf_model_compare(expected, model) != KVF_OK)
        fail_msg("%s", kvf_error_detail());
    kvf_model_free(model);
    kvf_model_free(expected);
}

/* ---- what is checked of a group -------------------------------------------------------------- */

typedef struct expected_group {
    const char *name;
    uint32_t layers, first_layer;
    uint32_t window_tokens, tokens_per_step;
    uint32_t step_bytes;
} expected_group;

static void assert_group(const kvf_group_desc *group, const expected_group *expected) {
    assert_string_equal(group->name, expected->name);
    assert_int_equal(group->kind, KVF_GROUP_TOKENS);
    assert_int_equal(group->layer_count, expected->layers);
    assert_int_equal(group->layers[0], expected->first_layer);
    assert_int_equal(group->window_tokens, expected->window_tokens);
    assert_int_equal(group->chunk_tokens, 0);
    assert_int_equal(group->tokens_per_step, expected->tokens_per_step);
    assert_int_equal(kvf_group_step_bytes(group), expected->step_bytes);
}

static void assert_groups(const kvf_model *model, const expected_group *expected, uint32_t count) {
    assert_int_equal(kvf_model_group_count(model), count);
    for (uint32_t g = 0; g < count; g++)
        assert_group(kvf_model_group(model, g), &expected[g]);
}

/* Every part is one unit that all ranks have, and one row of a step. */
static void assert_part(const kvf_group_desc *group, uint32_t p, const char *name, kvf_dtype dtype,
                        uint32_t cell_elements, uint32_t tensor) {
    assert_true(p < group->part_count);
    const kvf_part_desc *part = &group->parts[p];
    assert_string_equal(part->name, name);
    assert_int_equal(part->dtype, dtype);
    assert_int_equal(part->cell_elements, cell_elements);
    assert_int_equal(part->tensor, tensor);
    assert_int_equal(part->units, 1);
    assert_int_equal(part->rows_per_step, 1);
    assert_int_equal(part->tp_rule, KVF_TP_REPLICATE);
}

/* ---- what is kept ---------------------------------------------------------------------------- */

static void flash_has_a_window_in_each_layer_and_compresses_in_two_ways(void **state) {
    (void)state;
    static const expected_group expected[] = {
        {"swa", 43, 0, 128, 1, 512 * 2},
        {"csa", 21, 2, 0, 4, 512 * 2 + 128 + 4},
        {"csa.state", 21, 2, 8, 1, (2 * 2 * 512 + 2 * 2 * 128) * 4},
        {"hca", 20, 3, 0, 128, 512 * 2},
        {"hca.state", 20, 3, 128, 1, 2 * 512 * 4},
    };
    kvf_model *model = flash();
    assert_int_equal(kvf_model_layer_count(model), 43);
    assert_groups(model, expected, 5);
    kvf_model_free(model);
}

static void pro_compresses_in_every_layer(void **state) {
    (void)state;
    char letters[64] = "HH";
    for (uint32_t i = 2; i < 61; i++)
        letters[i] = i % 2 ? 'H' : 'S';
    letters[61] = 'W'; /* of the layer that predicts further tokens */
    static const expected_group expected[] = {
        {"swa", 61, 0, 128, 1, 1024}, {"csa", 30, 2, 0, 4, 1156},         {"csa.state", 30, 2, 8, 1, 10240},
        {"hca", 31, 0, 0, 128, 1024}, {"hca.state", 31, 0, 128, 1, 4096},
    };
    kvf_model *model = read_with(ratios(61, letters, FLASH).text, NULL);
    assert_groups(model, expected, 5);
    kvf_model_free(model);
}

static void a_compressor_keeps_elements_and_scores_for_each_entry_that_a_token_goes_into(void **state) {
    (void)state;
    kvf_model *model = flash();
    assert_part(kvf_model_group(model, 0), 0, "latent", KVF_DTYPE_BF16, 512, 0);
    const kvf_group_desc *csa = kvf_model_group(model, 1);
    assert_int_equal(csa->part_count, 3);
    assert_part(csa, 0, "latent", KVF_DTYPE_BF16, 512, 0);
    assert_part(csa, 1, "indexer", KVF_DTYPE_F8_E4M3, 128, 1);
    assert_part(csa, 2, "indexer_scale", KVF_DTYPE_F32, 1, 1);
    /* windows overlap: a token goes into two entries */
    const kvf_group_desc *csa_state = kvf_model_group(model, 2);
    assert_int_equal(csa_state->part_count, 2);
    assert_part(csa_state, 0, "compressor", KVF_DTYPE_F32, 2048, 0);
    assert_part(csa_state, 1, "indexer_compressor", KVF_DTYPE_F32, 512, 1);
    const kvf_group_desc *hca = kvf_model_group(model, 3);
    assert_int_equal(hca->part_count, 1);
    assert_part(hca, 0, "latent", KVF_DTYPE_BF16, 512, 0);
    const kvf_group_desc *hca_state = kvf_model_group(model, 4);
    assert_int_equal(hca_state->part_count, 1);
    assert_part(hca_state, 0, "compressor", KVF_DTYPE_F32, 1024, 0);
    kvf_model_free(model);
}

static void sizes_follow_the_fields_or_are_those_of_the_class(void **state) {
    (void)state;
    static const expected_group by_class[] = {
        {"swa", 2, 0, 128, 1, 1024}, {"csa", 1, 0, 0, 4, 1156},         {"csa.state", 1, 0, 8, 1, 10240},
        {"hca", 1, 1, 0, 128, 1024}, {"hca.state", 1, 1, 128, 1, 4096},
    };
    kvf_model *model = read_with(ratios(2, "SH", "").text, NULL);
    assert_groups(model, by_class, 5);
    kvf_model_free(model);

    static const expected_group by_fields[] = {
        {"swa", 2, 0, 48, 1, 20 * 2},
        {"csa", 1, 0, 0, 4, 20 * 2 + 256 + 8},
        {"csa.state", 1, 0, 8, 1, (4 * 20 + 4 * 256) * 4},
        {"hca", 1, 1, 0, 128, 20 * 2},
        {"hca.state", 1, 1, 128, 1, 2 * 20 * 4},
    };
    model = read_with(
        ratios(2, "SH", ", \"head_dim\": 20, \"index_head_dim\": 256, \"sliding_window\": 48").text, NULL);
    assert_groups(model, by_fields, 5);
    kvf_model_free(model);
}

static void a_model_without_compressed_layers_has_windows_alone(void **state) {
    (void)state;
    static const expected_group expected[] = {{"swa", 2, 0, 128, 1, 1024}};
    kvf_model *model =
        read_with("{\"model_type\": \"deepseek_v4\", \"num_hidden_layers\": 2, \"dtype\": \"bfloat16\", "
                  "\"compress_ratios\": [0, 1]}",
                  NULL);
    assert_groups(model, expected, 1);
    kvf_model_free(model);
}

static void options_choose_the_types_of_latents_and_of_what_is_yet_to_be_compressed(void **state) {
    (void)state;
    const kvf_config_options types = {
        .struct_size = sizeof types, .cache_dtype = KVF_DTYPE_F8_E4M3, .state_dtype = KVF_DTYPE_BF16};
    kvf_model *model = read_with(ratios(2, "SH", "").text, &types);
    assert_part(kvf_model_group(model, 0), 0, "latent", KVF_DTYPE_F8_E4M3, 512, 0);
    assert_part(kvf_model_group(model, 1), 0, "latent", KVF_DTYPE_F8_E4M3, 512, 0);
    assert_part(kvf_model_group(model, 1), 2, "indexer_scale", KVF_DTYPE_F32, 1, 1);
    assert_part(kvf_model_group(model, 2), 1, "indexer_compressor", KVF_DTYPE_BF16, 512, 1);
    assert_part(kvf_model_group(model, 4), 0, "compressor", KVF_DTYPE_BF16, 1024, 0);
    kvf_model_free(model);

    const kvf_config_options scales = {.struct_size = sizeof scales, .scale_dtype = KVF_DTYPE_F32};
    assert_refused_with(ratios(2, "SH", "").text, &scales, KVF_E_INVALID,
                        "scale_dtype is f32, but a latent has no K and V to scale");
}

/* ---- the ways to say it ---------------------------------------------------------------------- */

static void the_list_may_go_on_with_layers_that_predict_further_tokens(void **state) {
    (void)state;
    assert_same_as_flash(ratios(43, FLASH_LAYERS, FLASH).text);
    /* later checkpoints list three of them, although num_nextn_predict_layers is 1 */
    assert_same_as_flash(ratios(43, FLASH_LAYERS "WWW",
                                FLASH
                                ", \"dspark_block_size\": 5, \"dspark_target_layer_ids\": [40, 41, 42], "
                                "\"dspark_markov_rank\": 256")
                             .text);
    assert_refused(ratios(41, FLASH_LAYERS "W", FLASH).text, KVF_E_INVALID,
                   "compress_ratios describes 43 layers, but num_hidden_layers is 41");
    assert_refused(ratios(44, FLASH_LAYERS, FLASH).text, KVF_E_INVALID,
                   "compress_ratios describes 43 layers, but num_hidden_layers is 44");
}

static void words_and_rates_say_the_same_as_ratios(void **state) {
    (void)state;
    assert_same_as_flash(words(43, FLASH_LAYERS, FLASH).text);
    assert_same_as_flash(words(43, FLASH_LAYERS,
                               FLASH ", \"compress_rates\": {\"compressed_sparse_attention\": 4, "
                                     "\"heavily_compressed_attention\": 128}")
                             .text);
    assert_same_as_flash(
        words(43, FLASH_LAYERS, FLASH ", \"compress_rate_csa\": 4, \"compress_rate_hca\": 128").text);
    assert_same_as_flash(
        ratios(43, FLASH_LAYERS "W", FLASH ", \"compress_rate_csa\": 4, \"compress_rates\": null").text);
}

static void ratios_and_words_must_agree(void **state) {
    (void)state;
#define BOTH(words) ", \"layer_types\": [\"sliding_attention\", " words "]"
    kvf_model *model = read_with(ratios(2, "WS", BOTH("\"compressed_sparse_attention\"")).text, NULL);
    assert_int_equal(kvf_model_group_count(model), 3);
    kvf_model_free(model);
    assert_refused(ratios(2, "WS", BOTH("\"heavily_compressed_attention\"")).text, KVF_E_INVALID,
                   "compress_ratios[1] is 4, but layer_types[1] is \"heavily_compressed_attention\"");
    assert_refused(ratios(3, "WWS", BOTH("\"sliding_attention\"")).text, KVF_E_INVALID,
                   "layer_types describes 2 layers, but num_hidden_layers is 3");
}

/* ---- what is refused ------------------------------------------------------------------------- */

#define ONE(fields)                                                                                          \
    "{\"model_type\": \"deepseek_v4\", \"num_hidden_layers\": 1, \"dtype\": \"bfloat16\", " fields "}"

static void another_ratio_is_refused(void **state) {
    (void)state;
    assert_refused(ONE("\"compress_ratios\": [8]"), KVF_E_UNSUPPORTED,
                   "compress_ratios[0] is 8; supported: 0, 1, 4 and 128");
    assert_refused(ONE("\"compress_ratios\": [0, 8]"), KVF_E_UNSUPPORTED, "compress_ratios[1] is 8");
    assert_refused(ONE("\"compress_ratios\": [-1]"), KVF_E_RANGE, "compress_ratios[0] is -1; allowed: 0 to");
    assert_refused(ONE("\"compress_ratios\": [\"4\"]"), KVF_E_INVALID,
                   "compress_ratios[0] is \"4\"; it must be a whole number");
    assert_refused(words(1, "S", ", \"compress_rates\": {\"compressed_sparse_attention\": 8}").text,
                   KVF_E_UNSUPPORTED, "compress_rates.compressed_sparse_attention is 8; supported: 4");
    assert_refused(words(1, "H", ", \"compress_rate_hca\": 64").text, KVF_E_UNSUPPORTED,
                   "compress_rate_hca is 64; supported: 128");
    assert_refused(words(1, "H",
                         ", \"compress_rate_hca\": 64, "
                         "\"compress_rates\": {\"heavily_compressed_attention\": 128}")
                       .text,
                   KVF_E_INVALID,
                   "compress_rates.heavily_compressed_attention is 128, but compress_rate_hca is 64");
    assert_refused(words(1, "S", ", \"compress_rates\": [4, 128]").text, KVF_E_INVALID,
                   "compress_rates is [4,128]; it must be an object");
}

static void layers_that_nothing_or_something_else_describes_are_refused(void **state) {
    (void)state;
    assert_refused(ONE("\"head_dim\": 512"), KVF_E_INVALID,
                   "compress_ratios is missing, and deepseek_v4 has no default for it");
    assert_refused(ONE("\"compress_ratios\": []"), KVF_E_INVALID,
                   "compress_ratios describes 0 layers, but num_hidden_layers is 1");
    assert_refused(ONE("\"compress_ratios\": 4"), KVF_E_INVALID, "compress_ratios is 4; it must be a list");
    assert_refused("{\"model_type\": \"deepseek_v4\", \"dtype\": \"bfloat16\", \"compress_ratios\": [4, 0]}",
                   KVF_E_INVALID, "num_hidden_layers is missing, and deepseek_v4 has no default for it");
    assert_refused(words(1, "SS", "").text, KVF_E_INVALID,
                   "layer_types describes 2 layers, but num_hidden_layers is 1");
    assert_refused(ONE("\"layer_types\": [\"lightly_compressed_attention\"]"), KVF_E_INVALID,
                   "layer_types[0] is \"lightly_compressed_attention\"; allowed: ");
    assert_refused(ONE("\"layer_types\": [\"full_attention\"]"), KVF_E_INVALID,
                   "layer 0 has no window, but all layers of deepseek_v4 have one");
    assert_refused(ONE("\"layer_types\": [\"moe\"]"), KVF_E_INVALID, "layer 0 has no window, but all layers");
    assert_refused(ONE("\"layer_types\": [\"linear_attention\"]"), KVF_E_INVALID, "layer 0 has no window");
}

static void other_families_do_not_compress(void **state) {
    (void)state;
    assert_refused("{\"model_type\": \"llama\", \"num_hidden_layers\": 1, \"num_attention_heads\": 4, "
                   "\"head_dim\": 8, \"sliding_window\": 16, \"dtype\": \"bfloat16\", "
                   "\"layer_types\": [\"compressed_sparse_attention\"]}",
                   KVF_E_INVALID, "layer 0 compresses its cache, but llama has no such layers");
}

static void a_window_that_is_missing_is_refused(void **state) {
    (void)state;
    assert_refused(ratios(2, "SH", ", \"sliding_window\": null").text, KVF_E_INVALID,
                   "layer 0 has a window, but sliding_window is missing or not used");
    assert_refused(words(2, "SH", ", \"sliding_window\": null").text, KVF_E_INVALID,
                   "layer 0 has a window, but sliding_window is missing or not used");
    assert_refused(ratios(2, "SH", ", \"sliding_window\": 0").text, KVF_E_RANGE, "sliding_window is 0");
}

static void sizes_that_do_not_fit_are_refused(void **state) {
    (void)state;
    assert_refused(ratios(1, "S", ", \"num_key_value_heads\": 2").text, KVF_E_INVALID,
                   "num_key_value_heads is 2, but the heads of deepseek_v4 share one; allowed: 1");
    assert_refused(ratios(1, "S", ", \"head_dim\": 32, \"qk_rope_head_dim\": 64").text, KVF_E_INVALID,
                   "qk_rope_head_dim is 64, but head_dim, which contains it, is 32");
    assert_refused(ratios(1, "S", ", \"index_head_dim\": 64").text, KVF_E_INVALID,
                   "index_head_dim is 64; it must be a multiple of 128");
    assert_refused(ratios(1, "S", ", \"per_layer_config\": {\"0\": {\"head_dim\": 64}}").text,
                   KVF_E_UNSUPPORTED, "per_layer_config.0.head_dim is 64, but head_dim is null");
}

static void a_size_that_is_not_read_is_noted(void **state) {
    (void)state;
    config_text text = ratios(1, "S", ", \"kv_lora_rank\": 512");
    kvf_model *model = NULL;
    assert_int_equal(kvf_model_from_config(text.text, strlen(text.text), NULL, &model), KVF_OK);
    assert_string_equal(kvf_model_note(model, 0),
                        "kv_lora_rank is 512: it may decide a size, but is not read for deepseek_v4");
    assert_null(kvf_model_note(model, 1));
    kvf_model_free(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(flash_has_a_window_in_each_layer_and_compresses_in_two_ways),
        cmocka_unit_test(pro_compresses_in_every_layer),
        cmocka_unit_test(a_compressor_keeps_elements_and_scores_for_each_entry_that_a_token_goes_into),
        cmocka_unit_test(sizes_follow_the_fields_or_are_those_of_the_class),
        cmocka_unit_test(a_model_without_compressed_layers_has_windows_alone),
        cmocka_unit_test(options_choose_the_types_of_latents_and_of_what_is_yet_to_be_compressed),
        cmocka_unit_test(the_list_may_go_on_with_layers_that_predict_further_tokens),
        cmocka_unit_test(words_and_rates_say_the_same_as_ratios),
        cmocka_unit_test(ratios_and_words_must_agree),
        cmocka_unit_test(another_ratio_is_refused),
        cmocka_unit_test(layers_that_nothing_or_something_else_describes_are_refused),
        cmocka_unit_test(other_families_do_not_compress),
        cmocka_unit_test(a_window_that_is_missing_is_refused),
        cmocka_unit_test(sizes_that_do_not_fit_are_refused),
        cmocka_unit_test(a_size_that_is_not_read_is_noted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
