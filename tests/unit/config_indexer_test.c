/*
 * Models whose layers with full attention have indexers: keys for single tokens beside heads, and keys for several tokens
 * with what is yet to become one; and the convolutions of models that have them beside attention. The sizes are worked
 * out by hand.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "config_groups.h"

/* The part of this name, and its group. */
static const kvf_part_desc *part_named(const kvf_model *model, const char *name) {
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++)
        for (uint32_t p = 0; p < kvf_model_group(model, g)->part_count; p++)
            if (strcmp(kvf_model_group(model, g)->parts[p].name, name) == 0)
                return &kvf_model_group(model, g)->parts[p];
    fail_msg("no part is named %s", name);
    return NULL;
}

/* ---- GLM 5 Next ------------------------------------------------------------------------------ */

#define GLM(more)                                                                                            \
    "{\"model_type\": \"glm5_next\", \"text_config\": {\"model_type\": \"glm5_next_text\", \"dtype\": "      \
    "\"bfloat16\", \"num_hidden_layers\": 9, \"hidden_size\": 4096, \"num_attention_heads\": 64, "           \
    "\"num_key_value_heads\": 64, \"head_dim\": 0, \"kv_lora_rank\": 512, \"q_lora_rank\": 1536, "           \
    "\"qk_rope_head_dim\": 0, \"qk_nope_head_dim\": 256, \"qk_head_dim\": 256, \"v_head_dim\": 256, "        \
    "\"index_head_dim\": 128, \"index_n_heads\": 32, \"index_topk\": 2048, \"linear_num_heads\": 64, "       \
    "\"linear_head_dim\": 128, \"linear_conv_kernel_dim\": 4, \"hc_mult\": 4" more "}}"
#define POOLS ", \"index_kpool\": 16"

static void a_pooled_key_is_in_a_group_of_its_own(void **state) {
    (void)state;
    static const expected_group groups[] = {
        {"mla", 2, 3, 0, 1, "latent:bf16:1:1x512"},
        {"indexer", 2, 3, 0, 16, "indexer:f8_e4m3:1:1x128 indexer_scale:f32:1:1x1"},
        {"indexer.state", 2, 3, 16, 1, "indexer_key:bf16:1:1x128 indexer_gate:bf16:1:1x128"},
        {"kda", 7, 0, 0, 1,
         "conv.Q:bf16:8192:3x1 conv.K:bf16:8192:3x1 conv.V:bf16:8192:3x1 ssm:f32:64:1x16384"},
    };
    ASSERT_GROUPS(read_with(GLM(POOLS), NULL), groups);
    ASSERT_GROUPS(
        read_with(GLM(POOLS ", \"linear_attn_config\": {\"full_attn_layers\": [3, 7], \"kda_layers\": "
                            "[0, 1, 2, 4, 5, 6, 8], \"num_heads\": 64, \"head_dim\": 128, "
                            "\"short_conv_kernel_size\": 4}"),
                  NULL),
        groups);
}

static void only_layers_with_a_pool_of_their_own_have_its_keys(void **state) {
    (void)state;
    static const expected_group groups[] = {
        {"mla", 2, 3, 0, 1, "latent:bf16:1:1x512"},
        {"indexer", 1, 3, 0, 4, "indexer:f8_e4m3:1:1x128 indexer_scale:f32:1:1x1"},
        {"indexer.state", 1, 3, 4, 1, "indexer_key:bf16:1:1x128 indexer_gate:bf16:1:1x128"},
        {"kda", 7, 0, 0, 1,
         "conv.Q:bf16:8192:3x1 conv.K:bf16:8192:3x1 conv.V:bf16:8192:3x1 ssm:f32:64:1x16384"},
    };
    ASSERT_GROUPS(read_with(GLM(", \"index_kpool\": 4, \"index_topk_pattern\": \"FFFFSSSSS\""), NULL),
                  groups);
}

/* As of DeepSeek V3.2: then it stands beside the latent. */
static void a_pool_of_one_token_is_a_key_of_each_token(void **state) {
    (void)state;
    kvf_model *model = read_with(GLM(", \"index_kpool\": 1"), NULL);
    assert_int_equal(kvf_model_group_count(model), 2);
    assert_int_equal(kvf_model_group(model, 0)->part_count, 3);
    kvf_model_free(model);
}

static void a_pool_without_a_size_is_refused(void **state) {
    (void)state;
    assert_refused(GLM(""), KVF_E_INVALID,
                   "index_kpool is missing, and glm5_next_text has no default for it");
    assert_refused(GLM(", \"index_kpool\": 0"), KVF_E_RANGE, "index_kpool is 0; allowed: 1 to");
}

/* ---- Qwen 4 ---------------------------------------------------------------------------------- */

#define QWEN(more)                                                                                           \
    "{\"model_type\": \"qwen4_exp_text\", \"dtype\": \"bfloat16\", \"num_hidden_layers\": 8, "               \
    "\"hidden_size\": 2048, \"num_attention_heads\": 16, \"num_key_value_heads\": 2, "                       \
    "\"linear_conv_kernel_dim\": 4, \"linear_num_key_heads\": 16, \"linear_num_value_heads\": 32, "          \
    "\"linear_key_head_dim\": 128, \"linear_value_head_dim\": 64, \"hc_lowrank\": 320, "                     \
    "\"ple_embed_dim\": 2048, \"heads_per_ngram\": 8, \"ngram_vocab_size_base\": 20000000" more "}"
#define QSA(heads)                                                                                           \
    ", \"indexer_n_heads\": 4, \"indexer_kv_heads\": " heads                                                 \
    ", \"indexer_head_dim\": 96, \"indexer_budget\": "                                                       \
    "2048, \"indexer_compress_ratio\": 4"

static void keys_in_the_models_type_have_no_scales(void **state) {
    (void)state;
    static const expected_group groups[] = {
        {"full", 2, 3, 0, 1, "k:bf16:2:1x256 v:bf16:2:1x256"},
        {"indexer", 2, 3, 0, 4, "indexer:bf16:1:1x96"},
        {"indexer.state", 2, 3, 4, 1, "indexer_key:bf16:1:1x96"},
        {"gdn", 6, 0, 0, 1,
         "conv.Q:bf16:2048:3x1 conv.K:bf16:2048:3x1 conv.V:bf16:2048:3x1 ssm:bf16:32:1x8192"},
    };
    ASSERT_GROUPS(read_with(QWEN(QSA("1")), NULL), groups);
    assert_refused(QWEN(QSA("2")), KVF_E_UNSUPPORTED,
                   "indexer_kv_heads is 2, not supported for qwen4_exp_text; supported: 1");
}

/* 3 taps before the last, 3 tokens apart, of 4 streams of 2048. Every rank keeps all of them. */
static void layers_with_embedded_words_keep_the_inputs_of_their_convolution(void **state) {
    (void)state;
    static const expected_group groups[] = {
        {"full", 2, 3, 0, 1, "k:bf16:2:1x256 v:bf16:2:1x256"},
        {"gdn", 6, 0, 0, 1,
         "conv.Q:bf16:2048:3x1 conv.K:bf16:2048:3x1 conv.V:bf16:2048:3x1 ssm:bf16:32:1x8192"},
        {"conv", 2, 1, 0, 1, "conv.x:bf16:8192:9x1"},
    };
    ASSERT_GROUPS(read_with(QWEN(", \"ple_layer_ids\": [6, 2, 2]"), NULL), groups);
    kvf_model *model = read_with(
        QWEN(", \"ple_layer_ids\": [1], \"ple_conv_kernel_size\": 2, \"ngram_size\": 5, \"hc_count\": 2"),
        NULL);
    const kvf_part_desc *part = part_named(model, "conv.x");
    assert_int_equal(part->tp_rule, KVF_TP_REPLICATE);
    assert_int_equal(part->rows_per_step, 5);
    assert_int_equal(part->units, 4096);
    kvf_model_free(model);
    assert_refused(QWEN(", \"ple_layer_ids\": [9]"), KVF_E_RANGE, "ple_layer_ids[0] is 9; allowed: 1 to 8");
    assert_refused(QWEN(", \"ple_layer_ids\": [0]"), KVF_E_RANGE, "ple_layer_ids[0] is 0; allowed: 1 to 8");
}

/* ---- MiniMax M3 ------------------------------------------------------------------------------ */

#define MINIMAX(type, more)                                                                                  \
    "{\"model_type\": \"minimax_m3_vl\", \"text_config\": {\"model_type\": \"" type "\", \"dtype\": "        \
    "\"bfloat16\", \"num_hidden_layers\": 4, \"hidden_size\": 6144, \"num_attention_heads\": 64, "           \
    "\"num_key_value_heads\": 4, \"head_dim\": 128, \"rotary_dim\": 64" more "}}"
#define SPARSE(flags, more)                                                                                  \
    ", \"sparse_attention_config\": {\"use_sparse_attention\": true, \"sparse_index_dim\": 64, "             \
    "\"sparse_num_index_heads\": 4, \"sparse_topk_blocks\": 16, \"sparse_block_size\": 128, "                \
    "\"sparse_attention_freq\": [" flags "]" more "}"

static void a_flag_or_a_word_says_which_layers_have_an_indexer(void **state) {
    (void)state;
    static const expected_group groups[] = {
        {"full", 4, 0, 0, 1, "k:bf16:4:1x128 v:bf16:4:1x128"},
        {"indexer", 2, 1, 0, 1, "indexer:bf16:1:1x64"},
    };
    ASSERT_GROUPS(read_with(MINIMAX("minimax_m3_text", SPARSE("0, 1, 0, 1", "")), NULL), groups);
    ASSERT_GROUPS(read_with(MINIMAX("minimax_m2", SPARSE("0, 1, 0, 1", "")), NULL), groups);
    ASSERT_GROUPS(read_with(MINIMAX("minimax_m3_vl", SPARSE("0, 1, 0, 1", "")), NULL), groups);
    ASSERT_GROUPS(
        read_with(MINIMAX("minimax_m3_vl_text",
                          ", \"index_head_dim\": 64, \"index_n_heads\": 4, \"index_block_size\": 128, "
                          "\"layer_types\": [\"full_attention\", \"minimax_m3_sparse\", "
                          "\"full_attention\", \"minimax_m3_sparse\"]"),
                  NULL),
        groups);
}

/* A quantised cache leaves the keys in the model's type, which must then be known. */
static void the_keys_have_not_the_type_of_the_cache(void **state) {
    (void)state;
    static const expected_group groups[] = {
        {"full", 4, 0, 0, 1, "k:f8_e4m3:4:1x128 v:f8_e4m3:4:1x128"},
        {"indexer", 2, 1, 0, 1, "indexer:bf16:1:1x64"},
    };
    const kvf_config_options options = {.struct_size = sizeof options, .cache_dtype = KVF_DTYPE_F8_E4M3};
    ASSERT_GROUPS(read_with(MINIMAX("minimax_m3_text", SPARSE("0, 1, 0, 1", "")), &options), groups);
    kvf_model *model = NULL;
    static const char untyped[] = "{\"model_type\": \"minimax_m3_text\", \"num_hidden_layers\": 1, "
                                  "\"num_attention_heads\": 4, \"num_key_value_heads\": 4, \"layer_types\": "
                                  "[\"minimax_m3_sparse\"]}";
    assert_int_equal(kvf_model_from_config(untyped, strlen(untyped), &options, &model), KVF_E_INVALID);
    assert_non_null(strstr(kvf_error_detail(), "dtype (or torch_dtype) is missing"));
}

static void minimax_m2_has_no_indexers(void **state) {
    (void)state;
    static const expected_group groups[] = {{"full", 4, 0, 0, 1, "k:bf16:4:1x128 v:bf16:4:1x128"}};
    ASSERT_GROUPS(read_with(MINIMAX("minimax_m2", ""), NULL), groups);
}

static void layers_of_minimax_m3_that_nothing_describes_are_refused(void **state) {
    (void)state;
    assert_refused(MINIMAX("minimax_m3_text", ""), KVF_E_INVALID, "layer_types is missing");
    assert_refused(MINIMAX("minimax_m3_text", SPARSE("0, 1, 1", "")), KVF_E_INVALID,
                   "sparse_attention_freq describes 3 layers");
}

static void values_beside_the_keys_are_refused(void **state) {
    (void)state;
    kvf_model_free(read_with(
        MINIMAX("minimax_m3_text", SPARSE("0, 1, 0, 1", ", \"sparse_disable_index_value\": [0, 1, 0, 1]")),
        NULL));
    assert_refused(
        MINIMAX("minimax_m3_text", SPARSE("0, 1, 0, 1", ", \"sparse_disable_index_value\": [1, 1, 1, 0]")),
        KVF_E_UNSUPPORTED, "sparse_disable_index_value[3] is 0; supported for a layer with an indexer: 1");
}

static void other_families_have_no_such_layers(void **state) {
    (void)state;
    assert_refused("{\"model_type\": \"llama\", \"num_hidden_layers\": 1, \"num_attention_heads\": 4, "
                   "\"head_dim\": 8, \"dtype\": \"bfloat16\", \"layer_types\": [\"minimax_m3_sparse\"]}",
                   KVF_E_INVALID, "layer 0 has an indexer of its own, but no layer of llama has");
}

/* ---- Step 5 ---------------------------------------------------------------------------------- */

#define STEP(more)                                                                                           \
    "{\"model_type\": \"step5_vl\", \"text_config\": {\"model_type\": \"step5\", \"torch_dtype\": "          \
    "\"bfloat16\", \"num_hidden_layers\": 3, \"num_nextn_predict_layers\": 1, \"hidden_size\": 5120, "       \
    "\"num_attention_heads\": 40, \"num_attention_groups\": 8, \"head_dim\": 192, \"sliding_window\": 512, " \
    "\"layer_types\": [\"full_attention\", \"sliding_attention\", \"sliding_attention\", "                   \
    "\"full_attention\"], \"use_rope_layers\": [true, true, true, true], \"use_head_wise_attn_gate\": "      \
    "true, \"attention_other_setting\": "                                                                    \
    "{\"attention_type\": \"sliding_attention\", \"num_attention_heads\": 64, \"num_attention_groups\": "    \
    "16, \"head_dim\": 128}" more "}}"

static void a_key_of_a_region_is_in_8_bits_without_a_scale(void **state) {
    (void)state;
    static const expected_group groups[] = {
        {"full", 1, 0, 0, 1, "k:bf16:8:1x192 v:bf16:8:1x192"},
        {"swa", 2, 1, 512, 1, "k:bf16:16:1x128 v:bf16:16:1x128"},
        {"indexer", 1, 0, 0, 8, "indexer:f8_e4m3:1:1x256"},
        {"indexer.state", 1, 0, 8, 1, "indexer_key:bf16:1:1x256 indexer_gate:bf16:1:1x256"},
    };
    ASSERT_GROUPS(
        read_with(
            STEP(", \"sparse_config\": {\"enabled\": true, \"proxy_dim\": 256, \"region_block_size\": 8, "
                 "\"sparse_indexer_num_heads\": 8, \"sparse_indexer_num_k_heads\": 1, \"topk\": 2048, "
                 "\"index_tp_size\": 8, \"sparse_indexer_rope_dim\": 64}"),
            NULL),
        groups);
    ASSERT_GROUPS(read_with(STEP(", \"sparse_config\": {}"), NULL), groups);
}

static void indexers_may_be_switched_off(void **state) {
    (void)state;
    static const expected_group groups[] = {
        {"full", 1, 0, 0, 1, "k:bf16:8:1x192 v:bf16:8:1x192"},
        {"swa", 2, 1, 512, 1, "k:bf16:16:1x128 v:bf16:16:1x128"},
    };
    ASSERT_GROUPS(read_with(STEP(", \"sparse_config\": {\"enabled\": false}"), NULL), groups);
    assert_refused(STEP(", \"sparse_config\": {\"sparse_indexer_num_k_heads\": 2}"), KVF_E_UNSUPPORTED,
                   "sparse_indexer_num_k_heads is 2, not supported for step5; supported: 1");
}

/* ---- Inkling --------------------------------------------------------------------------------- */

#define INKLING(hidden, more)                                                                                \
    "{\"model_type\": \"inkling_mm_model\", \"text_config\": {\"model_type\": \"inkling_model\", "           \
    "\"torch_dtype\": \"bfloat16\", \"num_hidden_layers\": 6, \"hidden_size\": " hidden ", "                 \
    "\"num_attention_heads\": 64, \"num_key_value_heads\": 8, \"head_dim\": 128, "                           \
    "\"swa_num_attention_heads\": 64, \"swa_num_key_value_heads\": 16, \"swa_head_dim\": 96, "               \
    "\"use_sconv\": true, \"sconv_kernel_size\": 4, \"d_rel\": 16, \"rel_extent\": 1024" more "}}"
#define LOCAL ", \"local_layer_ids\": [0, 1, 2, 3, 4]"

/* The inputs of four convolutions: of keys, of values, of what the attention gives, and of what the MLP gives. */
static void every_layer_keeps_the_inputs_of_four_convolutions(void **state) {
    (void)state;
    static const expected_group groups[] = {
        {"full", 1, 5, 0, 1, "k:bf16:8:1x128 v:bf16:8:1x128"},
        {"swa", 5, 0, 512, 1, "k:bf16:16:1x96 v:bf16:16:1x96"},
        {"conv", 5, 0, 0, 1,
         "conv.k:bf16:1536:3x1 conv.v:bf16:1536:3x1 conv.attn:bf16:6144:3x1 conv.mlp:bf16:6144:3x1"},
        {"conv.2", 1, 5, 0, 1,
         "conv.k:bf16:1024:3x1 conv.v:bf16:1024:3x1 conv.attn:bf16:6144:3x1 conv.mlp:bf16:6144:3x1"},
    };
    ASSERT_GROUPS(read_with(INKLING("6144", LOCAL), NULL), groups);
    ASSERT_GROUPS(
        read_with(INKLING("6144",
                          ", \"layer_types\": [\"hybrid_sliding\", \"hybrid_sliding\", \"hybrid_sliding\", "
                          "\"hybrid_sliding\", \"hybrid_sliding\", \"hybrid\"]"),
                  NULL),
        groups);
}

/* A rank has its heads' channels of each: 6144 / 16 and 6144 / 8 of what the attention and the MLP give. */
static void a_ranks_channels_are_those_of_its_heads(void **state) {
    (void)state;
    kvf_model *model = read_with(INKLING("6144", LOCAL), NULL);
    static const uint32_t together[2][4] = {{96, 96, 384, 384}, {128, 128, 768, 768}};
    for (uint32_t g = 0; g < 2; g++)
        for (uint32_t p = 0; p < 4; p++) {
            const kvf_part_desc *part = &kvf_model_group(model, 2 + g)->parts[p];
            assert_int_equal(part->granule_units, together[g][p]);
            assert_int_equal(part->tp_rule, KVF_TP_SPLIT);
        }
    kvf_model_free(model);
    assert_refused(INKLING("6145", LOCAL), KVF_E_UNSUPPORTED,
                   "hidden_size is 6145, which 16 KV heads do not divide");
}

static void windows_that_nothing_lists_are_refused(void **state) {
    (void)state;
    assert_refused(INKLING("6144", ""), KVF_E_INVALID, "layer_types is missing");
    assert_refused(INKLING("6144", ", \"local_layer_ids\": [6]"), KVF_E_RANGE,
                   "local_layer_ids[0] is 6; allowed: 0 to 5");
}

/* ---- Kimi K3 --------------------------------------------------------------------------------- */

static void kimi_k3_keeps_what_kimi_linear_keeps(void **state) {
    (void)state;
    static const char json[] =
        "{\"model_type\": \"kimi_k3\", \"text_config\": {\"dtype\": \"bfloat16\", \"num_hidden_layers\": 4, "
        "\"hidden_size\": 512, \"num_attention_heads\": 8, \"num_key_value_heads\": 8, \"kv_lora_rank\": 64, "
        "\"qk_rope_head_dim\": 16, \"linear_attn_config\": {\"kda_layers\": [1, 2, 3], \"full_attn_layers\": "
        "[4], "
        "\"num_heads\": 8, \"head_dim\": 32, \"short_conv_kernel_size\": 4}}}";
    static const expected_group groups[] = {
        {"mla", 1, 3, 0, 1, "latent:bf16:1:1x80"},
        {"kda", 3, 0, 0, 1, "conv.Q:bf16:256:3x1 conv.K:bf16:256:3x1 conv.V:bf16:256:3x1 ssm:f32:8:1x1024"},
    };
    ASSERT_GROUPS(read_with(json, NULL), groups);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pooled_key_is_in_a_group_of_its_own),
        cmocka_unit_test(only_layers_with_a_pool_of_their_own_have_its_keys),
        cmocka_unit_test(a_pool_of_one_token_is_a_key_of_each_token),
        cmocka_unit_test(a_pool_without_a_size_is_refused),
        cmocka_unit_test(keys_in_the_models_type_have_no_scales),
        cmocka_unit_test(layers_with_embedded_words_keep_the_inputs_of_their_convolution),
        cmocka_unit_test(a_flag_or_a_word_says_which_layers_have_an_indexer),
        cmocka_unit_test(the_keys_have_not_the_type_of_the_cache),
        cmocka_unit_test(minimax_m2_has_no_indexers),
        cmocka_unit_test(layers_of_minimax_m3_that_nothing_describes_are_refused),
        cmocka_unit_test(values_beside_the_keys_are_refused),
        cmocka_unit_test(other_families_have_no_such_layers),
        cmocka_unit_test(a_key_of_a_region_is_in_8_bits_without_a_scale),
        cmocka_unit_test(indexers_may_be_switched_off),
        cmocka_unit_test(every_layer_keeps_the_inputs_of_four_convolutions),
        cmocka_unit_test(a_ranks_channels_are_those_of_its_heads),
        cmocka_unit_test(windows_that_nothing_lists_are_refused),
        cmocka_unit_test(kimi_k3_keeps_what_kimi_linear_keeps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
