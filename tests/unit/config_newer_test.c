/*
 * Families that came with transformers 5.20 to 5.24, in the fields that it saves. The sizes are worked out by hand: heads
 * and elements of each; of a convolution, channels and the inputs before the last tap.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

#include "config_groups.h"

#define TYPE(name) "{\"model_type\": \"" name "\", \"dtype\": \"bfloat16\""
#define TEXT(outer, inner) "{\"model_type\": \"" outer "\", \"text_config\": " TYPE(inner)

/* ---- heads ----------------------------------------------------------------------------------- */

#define APERTUS                                                                                              \
    ", \"num_hidden_layers\": 12, \"hidden_size\": 1536, \"num_attention_heads\": 16, "                      \
    "\"output_vocab_size\": 131072, \"vocab_size\": 266752"

static void apertus_1_5_has_a_kv_head_for_each_head_unless_it_says_other(void **state) {
    (void)state;
    static const expected_group multi_head[] = {{"full", 12, 0, 0, 1, "k:bf16:16:1x96 v:bf16:16:1x96"}};
    static const expected_group grouped[] = {{"full", 12, 0, 0, 1, "k:bf16:4:1x96 v:bf16:4:1x96"}};
    ASSERT_GROUPS(read_with(TYPE("apertus1p5_text") APERTUS "}", NULL), multi_head);
    ASSERT_GROUPS(
        read_with(TEXT("apertus1p5", "apertus1p5_text") APERTUS
                  ", \"num_key_value_heads\": 4}, \"image_token_offset\": 131272, \"vision_config\": "
                  "{\"base_channels\": 256, \"embed_dim\": 256}}",
                  NULL),
        grouped);
}

#define DOCLING                                                                                              \
    ", \"num_hidden_layers\": 28, \"hidden_size\": 1024, \"num_attention_heads\": 16, "                      \
    "\"embedding_multiplier\": 12.0, \"attention_multiplier\": 0.015625"

static void granite_docling_has_4_kv_heads_by_default(void **state) {
    (void)state;
    static const expected_group four[] = {{"full", 28, 0, 0, 1, "k:bf16:4:1x64 v:bf16:4:1x64"}};
    static const expected_group all[] = {{"full", 28, 0, 0, 1, "k:bf16:16:1x64 v:bf16:16:1x64"}};
    ASSERT_GROUPS(
        read_with(TEXT("granite_docling", "granite_docling_text") DOCLING
                  "}, \"density_router_hidden_size\": null, \"vision_config\": {\"scale_factor\": 4}}",
                  NULL),
        four);
    ASSERT_GROUPS(read_with(TYPE("granite_docling_text") DOCLING ", \"num_key_value_heads\": null}", NULL),
                  all);
}

/* Its window begins where tokens are generated: all of a prompt is kept. */
static void a_window_of_generated_tokens_is_none_of_the_cache(void **state) {
    (void)state;
    static const expected_group groups[] = {{"full", 2, 0, 0, 1, "k:bf16:10:1x128 v:bf16:10:1x128"}};
#define OCR                                                                                                  \
    ", \"num_hidden_layers\": 2, \"hidden_size\": 1280, \"num_attention_heads\": 10, "                       \
    "\"num_key_value_heads\": 10, \"head_dim\": 128, \"n_group\": 1, \"topk_group\": 1, "                    \
    "\"sliding_window\": 128"
    ASSERT_GROUPS(read_with(TEXT("unlimited_ocr", "unlimited_ocr_text") OCR
                            ", \"layer_types\": [\"reference_sliding_attention\", "
                            "\"reference_sliding_attention\"]}}",
                            NULL),
                  groups);
    ASSERT_GROUPS(read_with(TYPE("unlimited_ocr_text") OCR "}", NULL), groups);
    /* as published: DeepSeek's language model with heads */
    ASSERT_GROUPS(
        read_with("{\"model_type\": \"unlimited-ocr\", \"sliding_window\": 128, \"language_config\": " TYPE(
                      "deepseek_v2") ", \"num_hidden_layers\": 2, \"hidden_size\": 1280, "
                                     "\"num_attention_heads\": 10, \"num_key_value_heads\": 10, "
                                     "\"use_mla\": false, \"qk_nope_head_dim\": 0, "
                                     "\"qk_rope_head_dim\": 0, \"v_head_dim\": 0}}",
                  NULL),
        groups);
}

static void every_fifth_layer_of_kolibri_attends_to_everything(void **state) {
    (void)state;
    static const expected_group groups[] = {
        {"full", 2, 4, 0, 1, "k:bf16:4:1x128 v:bf16:4:1x128"},
        {"swa", 9, 0, 513, 1, "k:bf16:4:1x128 v:bf16:4:1x128"},
    };
#define KOLIBRI                                                                                              \
    TYPE("kolibri1")                                                                                         \
    ", \"num_hidden_layers\": 11, \"hidden_size\": 2560, \"num_attention_heads\": 48, "                      \
    "\"num_key_value_heads\": 4"
    ASSERT_GROUPS(read_with(KOLIBRI ", \"shared_expert_intermediate_size\": 512}", NULL), groups);
    static const expected_group said[] = {
        {"full", 1, 0, 0, 1, "k:bf16:4:1x96 v:bf16:4:1x96"},
        {"swa", 1, 1, 65, 1, "k:bf16:4:1x96 v:bf16:4:1x96"},
    };
    ASSERT_GROUPS(
        read_with(TYPE("kolibri1") ", \"num_hidden_layers\": 2, \"num_attention_heads\": 48, "
                                   "\"num_key_value_heads\": 4, \"head_dim\": 96, \"sliding_window\": 65, "
                                   "\"layer_types\": [\"full_attention\", \"sliding_attention\"]}",
                  NULL),
        said);
    assert_refused(TYPE("kolibri1") ", \"num_hidden_layers\": 1, \"num_attention_heads\": 48, "
                                    "\"num_key_value_heads\": 4, \"sliding_window\": null, "
                                    "\"layer_types\": [\"sliding_attention\"]}",
                   KVF_E_INVALID, "layer 0 has a window, but sliding_window is missing or not used");
}

/* ---- latents --------------------------------------------------------------------------------- */

/* Of 6 layers, 0, 1 and 5 have indexers unless a list says otherwise. */
static void hunyuan_4_that_sees_is_like_that_which_does_not(void **state) {
    (void)state;
#define HUNYUAN                                                                                              \
    ", \"num_hidden_layers\": 6, \"hidden_size\": 6144, \"num_attention_heads\": 64, "                       \
    "\"num_key_value_heads\": 64, \"head_dim\": 64, \"kv_lora_rank\": 512, \"qk_rope_head_dim\": 64, "       \
    "\"qk_nope_head_dim\": 192, \"q_lora_rank\": 2048, \"v_head_dim\": 256, \"index_n_heads\": 32, "         \
    "\"index_topk\": 2048, \"hc_mult\": 4"
    static const expected_group groups[] = {
        {"mla", 3, 0, 0, 1, "latent:bf16:1:1x576 indexer:f8_e4m3:1:1x128 indexer_scale:f32:1:1x1"},
        {"mla.2", 3, 2, 0, 1, "latent:bf16:1:1x576"},
    };
    ASSERT_GROUPS(read_with(TEXT("hy_v4_vl", "hy_v4_vl_text") HUNYUAN
                            "}, \"vision_config\": {\"patch_size\": 16}}",
                            NULL),
                  groups);
    static const expected_group listed[] = {
        {"mla", 1, 0, 0, 1, "latent:bf16:1:1x576 indexer:f8_e4m3:1:1x256 indexer_scale:f32:1:1x2"},
        {"mla.2", 5, 1, 0, 1, "latent:bf16:1:1x576"},
    };
    ASSERT_GROUPS(
        read_with(TYPE("hy_v4_vl_text") HUNYUAN
                  ", \"index_head_dim\": 256, \"indexer_types\": [\"full\", \"shared\", \"shared\", "
                  "\"shared\", \"shared\", \"shared\"]}",
                  NULL),
        listed);
}

/* ---- states ---------------------------------------------------------------------------------- */

#define KINDS_OF_5(a, b, c, d, e) ", \"layer_types\": [\"" a "\", \"" b "\", \"" c "\", \"" d "\", \"" e "\"]"

/* A convolution over the hidden size: 7 taps keep 6 inputs. */
static void lfm_3_has_windows_beside_convolutions(void **state) {
    (void)state;
#define LFM                                                                                                  \
    ", \"num_hidden_layers\": 5, \"hidden_size\": 2048, \"num_attention_heads\": 16, "                       \
    "\"num_key_value_heads\": 4, \"conv_L_cache\": 7, \"conv_bias\": false, \"use_attention_gate\": true"
    static const expected_group groups[] = {
        {"full", 1, 2, 0, 1, "k:bf16:4:1x128 v:bf16:4:1x128"},
        {"swa", 1, 4, 256, 1, "k:bf16:4:1x128 v:bf16:4:1x128"},
        {"conv", 3, 0, 0, 1, "conv.x:bf16:2048:6x1"},
    };
    static const char inside[] = TEXT("lfm3_vl", "lfm3")
        LFM KINDS_OF_5("conv", "conv", "full_attention", "conv",
                       "sliding_attention") "}, \"vision_config\": {\"patch_size\": 16}}";
    ASSERT_GROUPS(read_with(inside, NULL), groups);
    assert_refused(TYPE("lfm3") LFM "}", KVF_E_INVALID, "layer_types is missing");
}

/* Convolutions over 8 x 64 channels of keys, twice, and 16 x 96 of values; a state of 96 x 64 for each value head. */
static void lara_has_windows_beside_a_gated_delta_net(void **state) {
    (void)state;
#define LARA                                                                                                 \
    TYPE("lara_mini")                                                                                        \
    ", \"num_hidden_layers\": 5, \"hidden_size\": 1024, \"num_attention_heads\": 16, "                       \
    "\"num_key_value_heads\": 4, \"linear_conv_kernel_dim\": 4, \"linear_num_key_heads\": 8, "               \
    "\"linear_key_head_dim\": 64, \"linear_num_value_heads\": 16, \"linear_value_head_dim\": 96"
    static const expected_group groups[] = {
        {"full", 1, 3, 0, 1, "k:bf16:4:1x128 v:bf16:4:1x128"},
        {"swa", 2, 1, 512, 1, "k:bf16:4:1x128 v:bf16:4:1x128"},
        {"gdn", 2, 0, 0, 1,
         "conv.Q:bf16:512:3x1 conv.K:bf16:512:3x1 conv.V:bf16:1536:3x1 ssm:bf16:16:1x6144"},
    };
    ASSERT_GROUPS(read_with(LARA KINDS_OF_5("linear_attention", "sliding_attention", "linear_attention",
                                            "full_attention", "sliding_attention") "}",
                            NULL),
                  groups);
    assert_refused(LARA "}", KVF_E_INVALID, "layer_types is missing");
}

/* Every sixth layer has no window. Each layer keeps the last 3 inputs of four convolutions. */
static void inkling_2_keeps_what_inkling_keeps(void **state) {
    (void)state;
    static const expected_group groups[] = {
        {"full", 1, 5, 0, 1, "k:bf16:8:1x128 v:bf16:8:1x128"},
        {"swa", 6, 0, 1024, 1, "k:bf16:4:1x96 v:bf16:4:1x96"},
        {"conv", 6, 0, 0, 1,
         "conv.k:bf16:384:3x1 conv.v:bf16:384:3x1 conv.attn:bf16:4608:3x1 conv.mlp:bf16:4608:3x1"},
        {"conv.2", 1, 5, 0, 1,
         "conv.k:bf16:1024:3x1 conv.v:bf16:1024:3x1 conv.attn:bf16:4608:3x1 conv.mlp:bf16:4608:3x1"},
    };
    ASSERT_GROUPS(read_with(TEXT("inkling2",
                                 "inkling2_text") ", \"num_hidden_layers\": 7, \"hidden_size\": 4608, "
                                                  "\"num_attention_heads\": 48, \"num_key_value_heads\": 8, "
                                                  "\"swa_num_attention_heads\": 48, "
                                                  "\"swa_num_key_value_heads\": 4, \"swa_head_dim\": 96, "
                                                  "\"conv_kernel_size\": 4, \"rel_extent\": 1024, "
                                                  "\"n_layers_per_attn_res_block\": 6, \"d_rel\": 16}, "
                                                  "\"vision_config\": {\"text_hidden_size\": 4608}}",
                            NULL),
                  groups);
}

/* Layers 6 and 7 of 9, of which the first has a window and the second does not, are there three times. */
static void loops_of_inkling_2_leave_a_cache_each(void **state) {
    (void)state;
#define LOOP(more)                                                                                           \
    TYPE("inkling2_loop_text")                                                                               \
    ", \"num_hidden_layers\": 9, \"hidden_size\": 512, \"num_attention_heads\": 8, "                         \
    "\"num_key_value_heads\": 4, \"head_dim\": 64, \"swa_num_attention_heads\": 8, "                         \
    "\"swa_num_key_value_heads\": 4, \"swa_head_dim\": 64, \"conv_kernel_size\": 4, \"layer_types\": ["      \
    "\"hybrid_sliding\", \"hybrid_sliding\", \"hybrid_sliding\", \"hybrid_sliding\", "                       \
    "\"hybrid_sliding\", \"hybrid\", \"hybrid_sliding\", \"hybrid\", \"hybrid_sliding\"]" more "}"
#define PARTS "k:bf16:4:1x64 v:bf16:4:1x64"
#define CONVS "conv.k:bf16:256:3x1 conv.v:bf16:256:3x1 conv.attn:bf16:512:3x1 conv.mlp:bf16:512:3x1"
    static const expected_group groups[] = {
        {"full", 4, 5, 0, 1, PARTS},
        {"swa", 9, 0, 1024, 1, PARTS},
        {"conv", 13, 0, 0, 1, CONVS},
    };
    static const char *const said[] = {
        LOOP(", \"loop_layer_index_end\": 8, \"loop_gate_rank\": 64"),
        LOOP(", \"loop_config\": {\"core_start\": 6, \"core_end\": 8, \"num_passes\": 3, \"gate_rank\": 64}"),
    };
    for (size_t i = 0; i < 2; i++) {
        kvf_model *model = read_with(said[i], NULL);
        assert_int_equal(kvf_model_layer_count(model), 27);
        static const uint32_t full[] = {5, 7, 9 + 7, 18 + 7};
        assert_memory_equal(kvf_model_group(model, 0)->layers, full, sizeof full);
        ASSERT_GROUPS(model, groups);
    }
    static const expected_group once[] = {
        {"full", 2, 5, 0, 1, PARTS},
        {"swa", 7, 0, 1024, 1, PARTS},
        {"conv", 9, 0, 0, 1, CONVS},
    };
    ASSERT_GROUPS(read_with(LOOP(", \"loop_num_passes\": 1"), NULL), once);
    assert_refused(LOOP(""), KVF_E_INVALID,
                   "the layers from 6 to before 18 are repeated; allowed: at least one, of 9");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(apertus_1_5_has_a_kv_head_for_each_head_unless_it_says_other),
        cmocka_unit_test(granite_docling_has_4_kv_heads_by_default),
        cmocka_unit_test(a_window_of_generated_tokens_is_none_of_the_cache),
        cmocka_unit_test(every_fifth_layer_of_kolibri_attends_to_everything),
        cmocka_unit_test(hunyuan_4_that_sees_is_like_that_which_does_not),
        cmocka_unit_test(lfm_3_has_windows_beside_convolutions),
        cmocka_unit_test(lara_has_windows_beside_a_gated_delta_net),
        cmocka_unit_test(inkling_2_keeps_what_inkling_keeps),
        cmocka_unit_test(loops_of_inkling_2_leave_a_cache_each),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
