/*
 * Models with latents of more than one kind: of two sizes, two in each layer, and entries that other layers read. The sizes
 * are worked out by hand. (Those of DeepSeek V4 are in config_compressed_test.c.)
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "config_groups.h"

/* ---- LongCat: two attentions in a layer ------------------------------------------------------- */

#define LONGCAT(layers)                                                                                      \
    "{\"model_type\": \"longcat_flash\", \"torch_dtype\": \"bfloat16\", " layers                             \
    "\"hidden_size\": 6144, \"num_attention_heads\": 64, \"kv_lora_rank\": 512, \"qk_rope_head_dim\": 64, "  \
    "\"q_lora_rank\": 1536, \"qk_nope_head_dim\": 128, \"v_head_dim\": 128, \"ffn_hidden_size\": 12288, "    \
    "\"expert_ffn_hidden_size\": 2048, \"mla_scale_q_lora\": true, \"mla_scale_kv_lora\": true}"

static void each_attention_of_a_layer_counts_as_a_layer(void **state) {
    (void)state;
    static const expected_group groups[] = {{"mla", 56, 0, 0, 1, "latent:bf16:1:1x576"}};
    kvf_model *model = read_with(LONGCAT("\"num_layers\": 28, "), NULL);
    assert_int_equal(kvf_model_layer_count(model), 56);
    ASSERT_GROUPS(model, groups);
    ASSERT_GROUPS(read_with(LONGCAT("\"num_layers\": 28, \"num_hidden_layers\": 28, "), NULL), groups);
}

/* Some count attentions by this name, and some pairs of them. */
static void a_number_that_has_two_meanings_is_not_used(void **state) {
    (void)state;
    assert_refused(LONGCAT("\"num_hidden_layers\": 28, "), KVF_E_INVALID, "num_layers is missing");
    assert_refused(LONGCAT("\"num_layers\": 0, "), KVF_E_RANGE, "num_layers is 0; allowed: 1 to");
}

static void twice_the_most_layers_are_too_many(void **state) {
    (void)state;
    char most[32];
    char json[512];
    (void)snprintf(most, sizeof most, "\"num_layers\": %u, ", KVF_MODEL_MAX_LAYERS);
    assert_true(
        snprintf(json, sizeof json,
                 "{\"model_type\": \"longcat_flash\", %s\"dtype\": \"bfloat16\", \"kv_lora_rank\": 512, "
                 "\"qk_rope_head_dim\": 64}",
                 most) < (int)sizeof json);
    assert_refused(json, KVF_E_RANGE, "allowed: 1 to");
}

/* ---- dots3.note: latents of another size in a window -------------------------------------------- */

#define DOTS(more)                                                                                           \
    "{\"model_type\": \"dots3_note\", \"torch_dtype\": \"bfloat16\", \"num_hidden_layers\": 4, "             \
    "\"hidden_size\": 4096, \"num_attention_heads\": 32, \"num_key_value_heads\": 32, \"kv_lora_rank\": "    \
    "512, \"qk_rope_head_dim\": 64, \"index_topk\": 2048, \"index_n_heads\": 32, "                           \
    "\"swa_num_key_value_heads\": 32, \"swa_v_head_dim\": 128, \"swa_qk_nope_head_dim\": 128, "              \
    "\"sliding_window_size\": 256" more "}"
#define SWA ", \"swa_kv_lora_rank\": 768, \"swa_qk_rope_head_dim\": 32"
#define KINDS                                                                                                \
    ", \"layer_types\": [\"full_attention\", \"sliding_attention\", \"sliding_attention\", "                 \
    "\"full_attention\"]"

static void latents_in_a_window_have_sizes_of_their_own(void **state) {
    (void)state;
    static const expected_group groups[] = {
        {"mla", 2, 0, 0, 1, "latent:bf16:1:1x576 indexer:f8_e4m3:1:1x128 indexer_scale:f32:1:1x1"},
        {"swa", 2, 1, 256, 1, "latent:bf16:1:1x800"},
    };
    ASSERT_GROUPS(read_with(DOTS(SWA KINDS), NULL), groups);
}

static void windows_alone_are_a_group(void **state) {
    (void)state;
    static const expected_group groups[] = {{"swa", 4, 0, 256, 1, "latent:bf16:1:1x800"}};
    ASSERT_GROUPS(read_with(DOTS(SWA ", \"layer_types\": [\"sliding_attention\", \"sliding_attention\", "
                                     "\"sliding_attention\", \"sliding_attention\"]"),
                            NULL),
                  groups);
}

static void sizes_of_latents_in_a_window_are_required(void **state) {
    (void)state;
    assert_refused(DOTS(KINDS), KVF_E_INVALID, "swa_kv_lora_rank is missing");
    assert_refused(DOTS(SWA), KVF_E_INVALID, "layer_types is missing");
}

/* As transformers 5.24 saves it: layers with a window have other sizes where they differ from the rest. Heads decide
 * nothing. */
#define SAVED(more)                                                                                          \
    "{\"model_type\": \"dots3_note\", \"text_config\": {\"model_type\": \"dots3_note_text\", "               \
    "\"dtype\": \"bfloat16\", \"num_hidden_layers\": 4, \"hidden_size\": 4096, \"num_attention_heads\": "    \
    "32, "                                                                                                   \
    "\"num_key_value_heads\": 32, \"head_dim\": 256, \"kv_lora_rank\": 512, \"qk_rope_head_dim\": 64, "      \
    "\"index_head_dim\": 128, \"index_topk\": 2048, \"index_n_heads\": 32, \"sliding_window\": 256, "        \
    "\"layer_types\": [\"indexed_attention\", \"sliding_attention\", \"sliding_attention\", "                \
    "\"indexed_attention\"]" more "}}"
#define OTHERWISE "\"num_attention_heads\": 16, \"num_key_value_heads\": 16, \"qk_nope_head_dim\": 192"

static void latents_of_single_layers_may_have_sizes_of_their_own(void **state) {
    (void)state;
    static const expected_group groups[] = {
        {"mla", 2, 0, 0, 1, "latent:bf16:1:1x576 indexer:f8_e4m3:1:1x128 indexer_scale:f32:1:1x1"},
        {"swa", 2, 1, 256, 1, "latent:bf16:1:1x832"},
    };
    ASSERT_GROUPS(read_with(SAVED(", \"per_layer_config\": {\"01\": {\"kv_lora_rank\": 768, " OTHERWISE
                                  "}, \"02\": {\"kv_lora_rank\": 768, " OTHERWISE "}}"),
                            NULL),
                  groups);
    static const expected_group different[] = {
        {"mla", 2, 0, 0, 1, "latent:bf16:1:1x576 indexer:f8_e4m3:1:1x128 indexer_scale:f32:1:1x1"},
        {"swa", 1, 1, 256, 1, "latent:bf16:1:1x800"},
        {"swa.2", 1, 2, 256, 1, "latent:bf16:1:1x576"},
    };
    ASSERT_GROUPS(read_with(SAVED(", \"per_layer_config\": {\"1\": {\"kv_lora_rank\": 768, "
                                  "\"qk_rope_head_dim\": 32}}"),
                            NULL),
                  different);
    static const expected_group others[] = {
        {"mla", 2, 0, 0, 1, "latent:bf16:1:1x576"},
        {"mla.2", 1, 1, 0, 1, "latent:bf16:1:1x320"},
    };
    ASSERT_GROUPS(read_with("{\"model_type\": \"deepseek_v3\", \"dtype\": \"bfloat16\", "
                            "\"num_hidden_layers\": 3, \"kv_lora_rank\": 512, \"qk_rope_head_dim\": 64, "
                            "\"per_layer_config\": {\"1\": {\"kv_lora_rank\": 256}}}",
                            NULL),
                  others);
}

static void latents_in_a_window_that_are_given_twice_must_agree(void **state) {
    (void)state;
    assert_refused(
        SAVED(", \"swa_kv_lora_rank\": 1024, \"per_layer_config\": {\"1\": {\"kv_lora_rank\": 768}}"),
        KVF_E_INVALID, "swa_kv_lora_rank is 1024, but per_layer_config says 768 for layer 1");
    assert_refused(SAVED(", \"swa_qk_rope_head_dim\": 32, \"per_layer_config\": {\"1\": {\"kv_lora_rank\": "
                         "768, \"qk_rope_head_dim\": 32}}"),
                   KVF_E_INVALID, "swa_qk_rope_head_dim is 32, but per_layer_config says 64 for layer 2");
    assert_refused(SAVED(""), KVF_E_INVALID, "swa_kv_lora_rank is missing");
    assert_refused(SAVED(", \"per_layer_config\": {\"1\": {\"kv_lora_rank\": null}}"), KVF_E_INVALID,
                   "kv_lora_rank is null");
    assert_refused(DOTS(SWA KINDS ", \"use_dsa\": false"), KVF_E_UNSUPPORTED,
                   "use_dsa is false, not supported for dots3_note; supported: true");
}

static void too_many_sizes_of_latents_are_refused(void **state) {
    (void)state;
    char json[2048];
    size_t length = (size_t)snprintf(json, sizeof json,
                                     "{\"model_type\": \"deepseek_v3\", \"dtype\": \"bfloat16\", "
                                     "\"num_hidden_layers\": 16, \"kv_lora_rank\": 512, "
                                     "\"qk_rope_head_dim\": 64, \"per_layer_config\": {");
    for (int i = 0; i < 16; i++)
        length += (size_t)snprintf(json + length, sizeof json - length, "%s\"%d\": {\"kv_lora_rank\": %d}",
                                   i ? ", " : "", i, i + 1);
    (void)snprintf(json + length, sizeof json - length, "}}");
    assert_refused(json, KVF_E_UNSUPPORTED, "makes more than 15 groups of layers with the same latents");
}

/* ---- Mistral Large 4: latents without rotated elements, and latents of other layers ------------------ */

#define MISTRAL(more)                                                                                        \
    "{\"model_type\": \"mistral_large4\", \"text_config\": {\"model_type\": \"mistral_large4_text\", "       \
    "\"dtype\": \"bfloat16\", \"num_hidden_layers\": 6, \"hidden_size\": 6144, \"num_attention_heads\": "    \
    "64, "                                                                                                   \
    "\"num_key_value_heads\": 64, \"head_dim\": 64, \"kv_lora_rank\": 512, \"qk_rope_head_dim\": 64, "       \
    "\"qk_nope_head_dim\": 64, \"v_head_dim\": 128, \"index_n_heads\": 32, \"index_topk\": 2048" more "}}"
#define KEY " indexer:f8_e4m3:1:1x128 indexer_scale:f32:1:1x1"

static void every_fourth_latent_of_mistral_has_no_rotated_elements(void **state) {
    (void)state;
    static const expected_group groups[] = {
        {"mla", 5, 0, 0, 1, "latent:bf16:1:1x576" KEY},
        {"mla.2", 1, 3, 0, 1, "latent:bf16:1:1x512" KEY},
    };
    ASSERT_GROUPS(read_with(MISTRAL(""), NULL), groups);
    static const expected_group every_third[] = {
        {"mla", 4, 0, 0, 1, "latent:bf16:1:1x576" KEY},
        {"mla.2", 2, 2, 0, 1, "latent:bf16:1:1x512" KEY},
    };
    ASSERT_GROUPS(read_with(MISTRAL(", \"no_rope_layer_interval\": 3"), NULL), every_third);
    static const expected_group listed[] = {
        {"mla", 1, 0, 0, 1, "latent:bf16:1:1x512" KEY},
        {"mla.2", 5, 1, 0, 1, "latent:bf16:1:1x576" KEY},
    };
    ASSERT_GROUPS(read_with(MISTRAL(", \"no_rope_layers\": [0, 1, 1, 1, 1, 1, 0, 0]"), NULL), listed);
    assert_refused(MISTRAL(", \"no_rope_layers\": [0, 1, 2, 1, 1, 1]"), KVF_E_RANGE,
                   "no_rope_layers[2] is 2; allowed: 0 to 1");
    assert_refused(MISTRAL(", \"no_rope_layers\": [0, 1, 1, 1, 1]"), KVF_E_INVALID, "no_rope_layers[5] is");
}

/* Of layers 1, 4 and 5, which read the latents of others, 4 has an indexer. */
static void layers_that_read_other_latents_keep_their_indexers_key_alone(void **state) {
    (void)state;
    static const expected_group groups[] = {
        {"mla", 1, 0, 0, 1, "latent:bf16:1:1x576" KEY},
        {"mla.2", 1, 2, 0, 1, "latent:bf16:1:1x576"},
        {"mla.3", 1, 3, 0, 1, "latent:bf16:1:1x512" KEY},
        {"indexer", 1, 4, 0, 1, "indexer:f8_e4m3:1:1x128 indexer_scale:f32:1:1x1"},
    };
#define READERS ", \"kv_source_layers\": [0, 0, 2, 3, 2, 2]"
    ASSERT_GROUPS(
        read_with(MISTRAL(READERS ", \"indexer_types\": [\"full\", \"shared\", \"shared\", \"full\", "
                                  "\"full\", \"shared\"]"),
                  NULL),
        groups);
    static const expected_group none_alone[] = {
        {"mla", 1, 0, 0, 1, "latent:bf16:1:1x576" KEY},
        {"mla.2", 1, 2, 0, 1, "latent:bf16:1:1x576"},
        {"mla.3", 1, 3, 0, 1, "latent:bf16:1:1x512"},
    };
    ASSERT_GROUPS(read_with(MISTRAL(READERS ", \"index_topk_pattern\": \"FSSSSS\""), NULL), none_alone);
    assert_refused(MISTRAL(", \"kv_source_layers\": [0, 0, 1, 3, 4, 5]"), KVF_E_INVALID,
                   "kv_source_layers[2] is 1, a layer that has no latents of its own");
    assert_refused(MISTRAL(", \"kv_source_layers\": [0, 2, 2, 3, 4, 5]"), KVF_E_RANGE,
                   "kv_source_layers[1] is 2; allowed: 0 to 1");
    assert_refused(MISTRAL(", \"kv_source_layers\": [0, 0]"), KVF_E_INVALID,
                   "kv_source_layers describes 2 layers, but the model has 6");
}

static void other_latents_have_no_window(void **state) {
    (void)state;
    assert_refused("{\"model_type\": \"deepseek_v3\", \"num_hidden_layers\": 1, \"sliding_window\": 16, "
                   "\"kv_lora_rank\": 512, \"qk_rope_head_dim\": 64, \"dtype\": \"bfloat16\", "
                   "\"layer_types\": [\"sliding_attention\"]}",
                   KVF_E_UNSUPPORTED, "layer 0 has a window or chunks, which are not supported with latents");
}

/* ---- DeepSeek V4.1: entries that other layers read ----------------------------------------------- */

#define V41(ratios, sources, indexers)                                                                       \
    "{\"model_type\": \"deepseek_v41\", \"text_config\": {\"torch_dtype\": \"bfloat16\", "                   \
    "\"num_hidden_layers\": 6, \"head_dim\": 512, \"qk_rope_head_dim\": 64, \"num_key_value_heads\": 1, "    \
    "\"num_attention_heads\": 64, \"index_head_dim\": 128, \"index_n_heads\": 64, \"q_lora_rank\": 1024, "   \
    "\"o_lora_rank\": 1024, \"o_groups\": 8, \"sliding_window\": 128, \"compress_ratios\": [" ratios         \
    "], \"kv_source_layer_ids\": [" sources "], \"index_source_layer_ids\": [" indexers                      \
    "], \"candidate_source_layer_id\": -1, \"engram_layer_ids\": [1], \"engram_head_dim\": 64}}"

static void only_sources_keep_entries(void **state) {
    (void)state;
    static const expected_group groups[] = {
        {"swa", 6, 0, 128, 1, "latent:bf16:1:1x512"},
        {"c1", 1, 3, 0, 1, "latent:bf16:1:1x512 indexer:f8_e4m3:1:1x128 indexer_scale:f32:1:1x1"},
        {"c2", 1, 1, 0, 2, "latent:bf16:1:1x512 indexer:f8_e4m3:1:1x128 indexer_scale:f32:1:1x1"},
        {"c2.state", 1, 1, 2, 1, "compressor:f32:1:1x1024"},
    };
    ASSERT_GROUPS(read_with(V41("0, 2, 2, 1, 1, 0", "1, 3", "1, 2, 3"), NULL), groups);
    ASSERT_GROUPS(read_with(V41("0, 2, 2, 1, 1, 0, 0, 0", "3, 1", "3, 1"), NULL), groups);
}

static void sources_must_be_there_before_they_are_read(void **state) {
    (void)state;
    assert_refused(V41("0, 2, 2, 1, 1, 0", "2, 3", "2, 3"), KVF_E_INVALID,
                   "compress_ratios[1] is not 0, but kv_source_layer_ids has no layer up to it");
    assert_refused(V41("0, 2, 2, 1, 1, 0", "0, 1", "1"), KVF_E_INVALID,
                   "kv_source_layer_ids[0] is 0, but compress_ratios[0] is 0");
    assert_refused(V41("0, 2, 2, 1, 1, 0", "6", "6"), KVF_E_RANGE,
                   "kv_source_layer_ids[0] is 6; allowed: 0 to 5");
    assert_refused("{\"model_type\": \"deepseek_v41\", \"num_hidden_layers\": 1, \"compress_ratios\": [1], "
                   "\"sliding_window\": 128, \"dtype\": \"bfloat16\"}",
                   KVF_E_INVALID, "kv_source_layer_ids is missing");
}

static void a_source_without_an_indexer_is_refused(void **state) {
    (void)state;
    assert_refused(V41("0, 2, 2, 1, 1, 0", "1, 3", "1, 2"), KVF_E_UNSUPPORTED,
                   "kv_source_layer_ids has layer 3, but index_source_layer_ids has not; supported: in both");
}

static void ratios_of_v4_are_not_those_of_v41(void **state) {
    (void)state;
    assert_refused(V41("0, 4, 2, 1, 1, 0", "1, 3", "1, 3"), KVF_E_UNSUPPORTED,
                   "compress_ratios[1] is 4; supported: 0, 1 and 2");
}

static void a_size_of_the_indexers_keys_is_required(void **state) {
    (void)state;
    assert_refused("{\"model_type\": \"deepseek_v41\", \"num_hidden_layers\": 1, \"compress_ratios\": [1], "
                   "\"kv_source_layer_ids\": [0], \"index_source_layer_ids\": [0], \"head_dim\": 512, "
                   "\"sliding_window\": 128, \"dtype\": \"bfloat16\"}",
                   KVF_E_INVALID, "index_head_dim is missing");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_attention_of_a_layer_counts_as_a_layer),
        cmocka_unit_test(a_number_that_has_two_meanings_is_not_used),
        cmocka_unit_test(twice_the_most_layers_are_too_many),
        cmocka_unit_test(latents_in_a_window_have_sizes_of_their_own),
        cmocka_unit_test(windows_alone_are_a_group),
        cmocka_unit_test(sizes_of_latents_in_a_window_are_required),
        cmocka_unit_test(latents_of_single_layers_may_have_sizes_of_their_own),
        cmocka_unit_test(latents_in_a_window_that_are_given_twice_must_agree),
        cmocka_unit_test(too_many_sizes_of_latents_are_refused),
        cmocka_unit_test(every_fourth_latent_of_mistral_has_no_rotated_elements),
        cmocka_unit_test(layers_that_read_other_latents_keep_their_indexers_key_alone),
        cmocka_unit_test(other_latents_have_no_window),
        cmocka_unit_test(only_sources_keep_entries),
        cmocka_unit_test(sources_must_be_there_before_they_are_read),
        cmocka_unit_test(a_source_without_an_indexer_is_refused),
        cmocka_unit_test(ratios_of_v4_are_not_those_of_v41),
        cmocka_unit_test(a_size_of_the_indexers_keys_is_required),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
