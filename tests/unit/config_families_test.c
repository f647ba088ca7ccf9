/*
 * Families whose caches are like others', in the fields that their published configurations have. The sizes are
 * worked out by hand: heads, and elements of each.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "config_reading.h"
#include "model/config.h"

static kvf_model *read_model(const char *json) {
    return read_with(json, NULL);
}

#define BF16 ", \"torch_dtype\": \"bfloat16\"}"
/* 32 layers, 32 heads, 4096 wide */
#define LARGE                                                                                                \
    ", \"num_hidden_layers\": 32, \"hidden_size\": 4096, \"num_attention_heads\": 32, "                      \
    "\"intermediate_size\": 11008, \"vocab_size\": 64000"
#define TYPE(name) "{\"model_type\": \"" name "\""

/* ---- heads ----------------------------------------------------------------------------------- */

static const struct {
    const char *json;
    const char *group;
    uint32_t layers, kv_heads, head_dim, window_tokens;
} same_everywhere[] = {
    /* without a field for KV heads: as many as heads, of 4096 / 32 elements */
    {TYPE("baichuan") LARGE ", \"model_max_length\": 4096" BF16, "full", 32, 32, 128, 0},
    {TYPE("qwen") LARGE
     ", \"kv_channels\": 128, \"seq_length\": 8192, \"rotary_pct\": 1.0, \"emb_dropout_prob\": 0.0, "
     "\"visual\": {\"heads\": 16, \"image_size\": 448, \"layers\": 48, \"width\": 1664}" BF16,
     "full", 32, 32, 128, 0},
    {TYPE("xverse") LARGE ", \"max_tokenizer_truncation\": 6144" BF16, "full", 32, 32, 128, 0},
    {TYPE("internlm2") LARGE BF16, "full", 32, 32, 128, 0},
    {TYPE("persimmon") LARGE ", \"qk_layernorm\": true" BF16, "full", 32, 32, 128, 0},
    {TYPE("biogpt") LARGE ", \"layerdrop\": 0.1" BF16, "full", 32, 32, 128, 0},
    {TYPE("gpt_neox_japanese") LARGE ", \"intermediate_multiple_size\": 4" BF16, "full", 32, 32, 128, 0},
    {TYPE("internlm2") LARGE ", \"num_key_value_heads\": 8, \"pretraining_tp\": 1" BF16, "full", 32, 8, 128,
     0},
    {TYPE("internlm3") LARGE ", \"num_key_value_heads\": 2, \"head_dim\": 160" BF16, "full", 32, 2, 160, 0},
    {"{\"model_type\": \"granite4_vision\", \"vision_config\": {\"hidden_size\": 1152}, "
     "\"text_config\": " TYPE("granite4_vision_text") LARGE
     ", \"num_key_value_heads\": 8, \"attention_multiplier\": 0.0078125}" BF16,
     "full", 32, 8, 128, 0},
    {TYPE("minicpm") LARGE
     ", \"num_key_value_heads\": 8, \"dim_model_base\": 256, \"scale_emb\": 12, \"scale_depth\": 1.4" BF16,
     "full", 32, 8, 128, 0},
    {TYPE("deepseek") LARGE
     ", \"num_key_value_heads\": 16, \"first_k_dense_replace\": 1, \"moe_layer_freq\": 1" BF16,
     "full", 32, 16, 128, 0},
    {TYPE("orion") LARGE ", \"num_key_value_heads\": 32" BF16, "full", 32, 32, 128, 0},
    {TYPE("phi3small") LARGE
     ", \"num_key_value_heads\": 8, \"rope_position_scale\": 1.0, \"mup_width_multiplier\": 8.0" BF16,
     "full", 32, 8, 128, 0},
    {TYPE("bailing_moe") LARGE
     ", \"num_key_value_heads\": 4, \"n_group\": 8, \"topk_group\": 4, \"partial_rotary_factor\": 0.5" BF16,
     "full", 32, 4, 128, 0},
    {TYPE("bailing_moe_v2") LARGE ", \"num_key_value_heads\": 4, \"head_dim\": null" BF16, "full", 32, 4, 128,
     0},
    {TYPE("PanguEmbedded") LARGE ", \"num_key_value_heads\": 8" BF16, "full", 32, 8, 128, 0},
    {TYPE("grok-1") LARGE ", \"num_key_value_heads\": 8" BF16, "full", 32, 8, 128, 0},
    {TYPE("chameleon") LARGE
     ", \"num_key_value_heads\": 32, \"model_parallel_size\": 1, \"swin_norm\": false, "
     "\"vq_config\": {\"embed_dim\": 256, \"latent_channels\": 256, \"base_channels\": 128}" BF16,
     "full", 32, 32, 128, 0},
    /* other names: 24 layers, 16 heads of 2048 / 16 */
    {TYPE("gpt_neo") ", \"num_layers\": 24, \"hidden_size\": 2048, \"num_heads\": 16, \"window_size\": 256, "
                     "\"attention_types\": [[[\"global\", \"local\"], 12]], "
                     "\"attention_layers\": [\"global\", \"local\"]" BF16,
     "full", 24, 16, 128, 0},
    {TYPE("xglm") ", \"num_layers\": 24, \"d_model\": 2048, \"attention_heads\": 16, \"ffn_dim\": 8192" BF16,
     "full", 24, 16, 128, 0},
    {TYPE("ctrl") ", \"n_layer\": 48, \"n_embd\": 1280, \"n_head\": 16, \"dff\": 8192" BF16, "full", 48, 16,
     80, 0},
    {TYPE("telechat") ", \"n_layer\": 30, \"hidden_size\": 4096, \"n_head\": 32, \"ffn_hidden_size\": "
                      "12288" BF16,
     "full", 30, 32, 128, 0},
    {TYPE("exaone") ", \"num_layers\": 32, \"hidden_size\": 4096, \"num_attention_heads\": 32, "
                    "\"num_key_value_heads\": 8, \"head_dim\": 128" BF16,
     "full", 32, 8, 128, 0},
    {TYPE("dbrx") ", \"n_layers\": 40, \"d_model\": 6144, \"n_heads\": 48, "
                  "\"attn_config\": {\"clip_qkv\": 8, \"kv_n_heads\": 8, \"rope_theta\": 500000}, "
                  "\"ffn_config\": {\"ffn_hidden_size\": 10752, \"moe_num_experts\": 16}" BF16,
     "full", 40, 8, 128, 0},
    {TYPE("jetmoe") ", \"num_hidden_layers\": 24, \"hidden_size\": 2048, \"num_attention_heads\": 32, "
                    "\"num_key_value_heads\": 16, \"kv_channels\": 96, \"num_experts_per_tok\": 2" BF16,
     "full", 24, 16, 96, 0},
    {TYPE("step1") ", \"num_hidden_layers\": 48, \"hidden_size\": 6144, \"num_attention_heads\": 48, "
                   "\"num_attention_groups\": 4" BF16,
     "full", 48, 4, 128, 0},
    {TYPE("step3_text") ", \"num_hidden_layers\": 61, \"hidden_size\": 7168, \"num_attention_heads\": 64, "
                        "\"num_attention_groups\": 1, \"head_dim\": 256, \"share_q_dim\": 2048, "
                        "\"moe_layers_enum\": \"4,5,6\", \"share_expert_dim\": 5120" BF16,
     "full", 61, 1, 256, 0},
/* KV heads only where the flag says so */
#define CHATGLM(fields)                                                                                      \
    TYPE("chatglm")                                                                                          \
    ", \"num_layers\": 28, \"hidden_size\": 4096, \"num_attention_heads\": 32, \"kv_channels\": 128, "       \
    "\"padded_vocab_size\": 65024, \"ffn_hidden_size\": 13696, "                                             \
    "\"apply_query_key_layer_scaling\": true" fields BF16
    {CHATGLM(", \"multi_query_attention\": true, \"multi_query_group_num\": 2"), "full", 28, 2, 128, 0},
    {CHATGLM(", \"multi_query_group_num\": 2"), "full", 28, 32, 128, 0},
    {CHATGLM(", \"multi_query_attention\": true"), "full", 28, 1, 128, 0},
    /* windows, in all layers or in none */
    {TYPE("doge") LARGE ", \"num_key_value_heads\": 8, \"keep_window_size\": 2048" BF16, "full", 32, 8, 128,
     0},
    {TYPE("doge") LARGE ", \"sliding_window\": 512" BF16, "swa", 32, 32, 128, 512},
    {TYPE("phi3_v") LARGE ", \"num_key_value_heads\": 32, \"sliding_window\": 131072" BF16, "swa", 32, 32,
     128, 131072},
    {TYPE("mimo") LARGE ", \"num_key_value_heads\": 8, \"use_sliding_window\": false, "
                        "\"sliding_window\": 32768, \"max_window_layers\": 28, "
                        "\"num_nextn_predict_layers\": 1" BF16,
     "full", 32, 8, 128, 0},
    {TYPE("dots_ocr") LARGE ", \"num_key_value_heads\": 2, \"use_sliding_window\": false, "
                            "\"sliding_window\": 131072, \"max_window_layers\": 28, "
                            "\"vision_config\": {\"embed_dim\": 1536}" BF16,
     "full", 32, 2, 128, 0},
    {TYPE("dots1") LARGE ", \"num_key_value_heads\": 32, \"sliding_window\": null, "
                         "\"max_window_layers\": 62" BF16,
     "full", 32, 32, 128, 0},
    {TYPE("cohere_compass_text") LARGE BF16, "full", 32, 32, 128, 0},
    {TYPE("voxtral_realtime_text") LARGE ", \"num_key_value_heads\": 8, \"sliding_window\": 8192" BF16, "swa",
     32, 8, 128, 8192},
    {TYPE("phi4mm") LARGE
     ", \"num_key_value_heads\": 8, \"sliding_window\": 262144, \"embd_layer\": {\"embedding_cls\": "
     "\"image_audio\", \"image_embd_layer\": {\"crop_size\": 448, \"use_hd_transform\": true}, "
     "\"audio_embd_layer\": {\"compression_rate\": 8}}, \"speech_lora\": {\"layer\": \"layers.*\", \"r\": "
     "320}, "
     "\"vision_lora\": {\"layer\": \"layers.*\", \"r\": 256}" BF16,
     "swa", 32, 8, 128, 262144},
    /* models that write several tokens at once, and wrappers that are flat */
    {TYPE("sdar") LARGE ", \"num_key_value_heads\": 8, \"head_dim\": 160, \"block_size\": 4, "
                        "\"use_sliding_window\": false, \"max_window_layers\": 36" BF16,
     "full", 32, 8, 160, 0},
    {TYPE("sdar_moe") LARGE ", \"num_key_value_heads\": 4, \"num_experts\": 128" BF16, "full", 32, 4, 128, 0},
    {TYPE("llada2_moe") LARGE ", \"num_key_value_heads\": 4, \"head_dim\": 160, \"n_group\": 8" BF16, "full",
     32, 4, 160, 0},
    {TYPE("minicpmv") LARGE
     ", \"num_key_value_heads\": 4, \"query_num\": 64, \"image_size\": 448, \"patch_size\": 14, "
     "\"drop_vision_last_layer\": false, \"slice_config\": {\"max_slice_nums\": 9, \"patch_size\": 14}, "
     "\"use_sliding_window\": false, \"sliding_window\": 131072, \"max_window_layers\": 28, "
     "\"vision_batch_size\": 16, \"vision_config\": {\"hidden_size\": 1152}" BF16,
     "full", 32, 4, 128, 0},
    {TYPE("minicpmo") LARGE
     ", \"num_key_value_heads\": 4, \"audio_chunk_length\": 1.0, \"chunk_input\": true, "
     "\"tts_config\": {\"llm_dim\": 3584, \"num_layers\": 20}, \"audio_config\": {\"d_model\": 1024}" BF16,
     "full", 32, 4, 128, 0},
    {TYPE("Keye") LARGE ", \"num_key_value_heads\": 8, \"head_dim\": 160, \"sliding_window\": null, "
                        "\"use_sliding_window\": false, \"max_window_layers\": 36" BF16,
     "full", 32, 8, 160, 0},
    {TYPE("KeyeVL1_5") LARGE ", \"num_key_value_heads\": 8" BF16, "full", 32, 8, 128, 0},
    {TYPE("kimi_audio") LARGE ", \"num_key_value_heads\": 4, \"kimia_mimo_layers\": 6, "
                              "\"kimia_adaptor_input_dim\": 5120, \"use_sliding_window\": false, "
                              "\"kimia_mimo_transformer_from_layer_index\": 21" BF16,
     "full", 32, 4, 128, 0},
    {TYPE("molmo") LARGE ", \"num_key_value_heads\": null, \"embedding_size\": 152064, "
                         "\"layer_norm_type\": \"rms\", \"clip_qkv\": null" BF16,
     "full", 32, 32, 128, 0},
    {"{\"model_type\": \"molmo2\", \"text_config\": " TYPE("molmo2_text") LARGE
     ", \"num_key_value_heads\": 8, \"head_dim\": 160, \"rope_scaling_layers\": [0, 1]}" BF16,
     "full", 32, 8, 160, 0},
    {TYPE("telechat3") LARGE ", \"num_key_value_heads\": 8, \"head_dim\": 160" BF16, "full", 32, 8, 160, 0},
    {TYPE("TeleFLM") LARGE ", \"use_mup\": true, \"mup_scale_factor\": 8.0" BF16, "full", 32, 32, 128, 0},
    {TYPE("k2_horizon") LARGE ", \"num_key_value_heads\": 8, \"head_dim\": 160, \"rope_head_dim\": 64, "
                              "\"layernorm_num_groups\": 8, \"mova_num_experts\": 4" BF16,
     "full", 32, 8, 160, 0},
    {TYPE("xllm") LARGE ", \"num_key_value_heads\": 8, \"num_values\": 4" BF16, "full", 32, 8, 128, 0},
    {TYPE("RefinedWebModel") ", \"n_layer\": 32, \"hidden_size\": 4544, \"n_head\": 71, "
                             "\"multi_query\": true, \"parallel_attn\": true" BF16,
     "full", 32, 1, 64, 0},
    {TYPE("RefinedWeb") ", \"n_layer\": 60, \"hidden_size\": 8192, \"n_head\": 128, \"n_head_kv\": 8, "
                        "\"multi_query\": true" BF16,
     "full", 60, 8, 64, 0},
    /* tokens that pass through the layers more than once */
    {TYPE("nanbeige") LARGE ", \"num_key_value_heads\": 8, \"num_loops\": 2" BF16, "full", 64, 8, 128, 0},
    {TYPE("nanbeige") LARGE ", \"num_key_value_heads\": 8" BF16, "full", 32, 8, 128, 0},
    /* DeepSeek's small language models, of DeepSeek-OCR and VL 2 Tiny, have heads: 1280 / 10 */
    {"{\"model_type\": \"deepseek_vl_v2\", \"language_config\": " TYPE(
         "deepseek_v2") ", \"num_hidden_layers\": 12, \"hidden_size\": 1280, \"num_attention_heads\": 10, "
                        "\"num_key_value_heads\": 10, \"use_mla\": false, \"kv_lora_rank\": null, "
                        "\"q_lora_rank\": null, "
                        "\"qk_nope_head_dim\": 0, \"qk_rope_head_dim\": 0, \"v_head_dim\": 0, \"n_group\": "
                        "1}" BF16,
     "full", 12, 10, 128, 0},
    {"{\"model_type\": \"alpamayo2_super\", \"expert_config\": {\"hidden_size\": 1024}, \"vlm_config\": "
     "{\"model_type\": \"qwen3_vl\", \"text_config\": " TYPE("qwen3_vl_text") LARGE
     ", \"num_key_value_heads\": 8, \"head_dim\": 160}}" BF16,
     "full", 32, 8, 160, 0},
};

static void layers_have_the_heads_of_their_family(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof same_everywhere / sizeof same_everywhere[0]; i++) {
        kvf_model *model = read_model(same_everywhere[i].json);
        assert_int_equal(kvf_model_group_count(model), 1);
        assert_kv_group(model, 0, same_everywhere[i].group, 0, same_everywhere[i].layers,
                        same_everywhere[i].kv_heads, same_everywhere[i].head_dim);
        assert_int_equal(kvf_model_group(model, 0)->window_tokens, same_everywhere[i].window_tokens);
        kvf_model_free(model);
    }
}

static void a_family_without_a_public_class_needs_its_kv_heads(void **state) {
    (void)state;
    static const char *const types[] = {"internlm3",  "minicpm",   "deepseek",      "orion",
                                        "phi3small",  "grok-1",    "iquestcoder",   "bailing_moe",
                                        "sarvam_moe", "param2moe", "PanguEmbedded", "step1"};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        char json[512];
        (void)snprintf(json, sizeof json, "{\"model_type\": \"%s\"%s%s", types[i], LARGE, BF16);
        assert_refused(json, KVF_E_INVALID, "num_key_value_heads is missing");
    }
}

/* If a head's size is missing, some engines divide the hidden size by the heads, here 4096 by 32. Others have a default:
 * 64 for Sarvam, 128 for these families. */
static void a_missing_size_that_engines_dispute_is_read_if_all_get_the_same(void **state) {
    (void)state;
    static const char *const types[] = {"internlm3", "iquestcoder"};
    for (size_t i = 0; i < 2; i++) {
        char json[512];
        (void)snprintf(json, sizeof json, "{\"model_type\": \"%s\"%s, \"num_key_value_heads\": 8%s", types[i],
                       LARGE, BF16);
        kvf_model *model = read_model(json);
        assert_kv_group(model, 0, "full", 0, 32, 8, 128);
        kvf_model_free(model);
    }
    kvf_model *model =
        read_model(TYPE("internlm3") ", \"num_hidden_layers\": 2, \"hidden_size\": 2048, "
                                     "\"num_attention_heads\": 32, \"num_key_value_heads\": 2, "
                                     "\"head_dim\": null" BF16);
    assert_kv_group(model, 0, "full", 0, 2, 2, 64);
    kvf_model_free(model);
    assert_refused(
        TYPE("sarvam_moe") LARGE ", \"num_key_value_heads\": 8" BF16, KVF_E_INVALID,
        "head_dim is missing: some engines take 64 for sarvam_moe, others divide, which makes 128");
    assert_refused(TYPE("muse_spark") LARGE
                   ", \"num_key_value_heads\": 8, \"layer_types\": [\"full_attention\"]" BF16,
                   KVF_E_UNSUPPORTED, "head_dim is missing: an unknown size of a head, for engines disagree");
    assert_refused(TYPE("exaone") LARGE BF16, KVF_E_INVALID, "num_key_value_heads is missing");
    model = read_model(TYPE("exaone") LARGE ", \"num_key_value_heads\": null" BF16);
    assert_kv_group(model, 0, "full", 0, 32, 32, 128);
    kvf_model_free(model);
}

static void dots_1_has_windows_from_a_layer_on(void **state) {
    (void)state;
    kvf_model *model =
        read_model(TYPE("dots1") LARGE ", \"num_key_value_heads\": 32, \"max_window_layers\": 30" BF16);
    assert_int_equal(kvf_model_group_count(model), 2);
    assert_kv_group(model, 0, "full", 0, 30, 32, 128);
    assert_kv_group(model, 1, "swa", 30, 2, 32, 128);
    assert_int_equal(kvf_model_group(model, 1)->window_tokens, 4096);
    kvf_model_free(model);
}

/* The first time through the layers, tokens attend to everything; the other times, to a window. */
static void loops_after_the_first_have_windows(void **state) {
    (void)state;
    kvf_model *model =
        read_model(TYPE("iquestloopcoder") LARGE ", \"num_key_value_heads\": 8, \"loop_num\": 2" BF16);
    assert_int_equal(kvf_model_layer_count(model), 64);
    assert_kv_group(model, 0, "full", 0, 32, 8, 128);
    assert_kv_group(model, 1, "swa", 32, 32, 8, 128);
    assert_int_equal(kvf_model_group(model, 1)->window_tokens, 64);
    kvf_model_free(model);
    model = read_model(TYPE("iquestloopcoder") LARGE
                       ", \"num_key_value_heads\": 8, \"loop_num\": 3, \"loop_window_size\": 128" BF16);
    assert_kv_group(model, 0, "full", 0, 32, 8, 128);
    assert_kv_group(model, 1, "swa", 32, 64, 8, 128);
    assert_int_equal(kvf_model_group(model, 1)->window_tokens, 128);
    kvf_model_free(model);
    assert_refused(TYPE("iquestloopcoder") LARGE ", \"num_key_value_heads\": 8" BF16, KVF_E_UNSUPPORTED,
                   "loop_num is missing: an unknown number of loops, not supported for iquestloopcoder");
}

/* 2 cycles, in each of which one stack of 16 layers has 3 turns and another has 1. */
static void two_stacks_that_take_turns_leave_a_cache_each_time(void **state) {
    (void)state;
#define HRM(fields)                                                                                          \
    TYPE("hrm_text")                                                                                         \
    ", \"hidden_size\": 1536, \"num_attention_heads\": 12, \"L_bp_cycles\": [2], \"prefix_lm\": true" fields \
        BF16
    static const char *const said[] = {
        HRM(", \"num_hidden_layers\": 16"),
        HRM(", \"num_hidden_layers\": 128, \"num_layers_per_stack\": 16, \"H_cycles\": 2, \"L_cycles\": 3"),
    };
    for (size_t i = 0; i < 2; i++) {
        kvf_model *model = read_model(said[i]);
        assert_int_equal(kvf_model_layer_count(model), 128);
        assert_kv_group(model, 0, "full", 0, 128, 12, 128);
        kvf_model_free(model);
    }
    kvf_model *model =
        read_model(HRM(", \"num_hidden_layers\": 4, \"H_cycles\": 3, \"L_cycles\": 1, \"head_dim\": 96"));
    assert_kv_group(model, 0, "full", 0, 24, 12, 96);
    kvf_model_free(model);
    assert_refused(HRM(", \"num_hidden_layers\": 16, \"num_layers_per_stack\": 16"), KVF_E_INVALID,
                   "num_hidden_layers is 16, but 2 cycles of 3 and 1 turns, of 16 layers each, make 128");
    assert_refused(HRM(", \"num_hidden_layers\": 16, \"H_cycles\": 4096, \"L_cycles\": 4096"), KVF_E_RANGE,
                   "turns");
    assert_refused(HRM(""), KVF_E_INVALID, "num_hidden_layers is missing");
}

static void spark_and_dory_have_windows_in_most_layers(void **state) {
    (void)state;
    kvf_model *model = read_model(TYPE("spark2_5") ", \"num_hidden_layers\": 28, \"hidden_size\": 2048, "
                                                   "\"num_attention_heads\": 8, \"num_key_value_heads\": 2, "
                                                   "\"headwise_attn_output_gate\": true" BF16);
    assert_kv_group(model, 0, "full", 3, 7, 2, 256);
    assert_kv_group(model, 1, "swa", 0, 21, 2, 256);
    assert_int_equal(kvf_model_group(model, 1)->window_tokens, 512);
    kvf_model_free(model);
#define DORY(fields)                                                                                         \
    TYPE("dory")                                                                                             \
    ", \"num_hidden_layers\": 4, \"hidden_size\": 2560, \"num_attention_heads\": 16, "                       \
    "\"num_key_value_heads\": 4, \"layer_types\": [\"sliding_attention\", \"mlp\", \"full_attention\", "     \
    "\"mlp\"], \"n_input_layers\": 1, \"n_recurrent_layers\": 2" fields BF16
    model = read_model(DORY(", \"n_recurrent_loops\": 1"));
    assert_kv_group(model, 0, "full", 2, 1, 4, 256);
    assert_kv_group(model, 1, "swa", 0, 1, 4, 256);
    assert_int_equal(kvf_model_group(model, 1)->window_tokens, 1024);
    kvf_model_free(model);
    assert_refused(DORY(""), KVF_E_UNSUPPORTED,
                   "n_recurrent_loops is missing: an unknown number of loops, not supported for dory");
}

/* Layers 1 and 2, of which 2 has attention, are there again for each further loop: as 4 + 2, 8 + 2 and 12 + 2. */
static void dorys_loops_leave_a_cache_each_unless_only_the_last_does(void **state) {
    (void)state;
    kvf_model *model = read_model(DORY(", \"n_recurrent_loops\": 4"));
    assert_int_equal(kvf_model_layer_count(model), 16);
    assert_kv_group(model, 0, "full", 2, 4, 4, 256);
    assert_kv_group(model, 1, "swa", 0, 1, 4, 256);
    for (uint32_t loop = 0; loop < 4; loop++)
        assert_int_equal(kvf_model_group(model, 0)->layers[loop], 4 * loop + 2);
    kvf_model_free(model);
    model = read_model(DORY(", \"n_recurrent_loops\": 4, \"recurrent_kv_cache_mode\": \"last_loop\""));
    assert_int_equal(kvf_model_layer_count(model), 4);
    assert_kv_group(model, 0, "full", 2, 1, 4, 256);
    kvf_model_free(model);
    assert_refused(DORY(", \"n_recurrent_loops\": 4, \"recurrent_kv_cache_mode\": \"first_loop\""),
                   KVF_E_UNSUPPORTED, "recurrent_kv_cache_mode is first_loop, not supported for dory");
    assert_refused(DORY(", \"n_recurrent_loops\": 4, \"per_layer_config\": {}"), KVF_E_UNSUPPORTED,
                   "per_layer_config is given: it is not supported for dory, whose layers are repeated");
}

static void repeated_layers_must_be_layers(void **state) {
    (void)state;
#define LOOPED(fields)                                                                                       \
    TYPE("dory")                                                                                             \
    ", \"num_hidden_layers\": 2, \"num_attention_heads\": 16, \"num_key_value_heads\": 4, "                  \
    "\"layer_types\": [\"full_attention\", \"mlp\"], \"n_recurrent_loops\": 2" fields BF16
    assert_refused(LOOPED(", \"n_recurrent_layers\": 2"), KVF_E_INVALID, "n_input_layers is missing");
    assert_refused(LOOPED(", \"n_input_layers\": 0"), KVF_E_INVALID, "n_recurrent_layers is missing");
    assert_refused(LOOPED(", \"n_input_layers\": 2, \"n_recurrent_layers\": 1"), KVF_E_RANGE,
                   "n_input_layers is 2; allowed: 0 to 1");
    assert_refused(LOOPED(", \"n_input_layers\": 1, \"n_recurrent_layers\": 2"), KVF_E_INVALID,
                   "n_input_layers: the layers from 1 to before 3 are repeated; allowed: at least one, of 2");
    char json[512];
    assert_true(snprintf(json, sizeof json,
                         TYPE("dory") ", \"num_hidden_layers\": 2, \"layer_types\": [\"full_attention\", "
                                      "\"mlp\"], \"n_input_layers\": 0, \"n_recurrent_layers\": 2, "
                                      "\"n_recurrent_loops\": %u" BF16,
                         KVF_MODEL_MAX_LAYERS / 2 + 1) < (int)sizeof json);
    assert_refused(json, KVF_E_RANGE, "passes through 2 layers are more than");
}

#define DIFFUSION(fields)                                                                                    \
    "{\"model_type\": \"diffusion_gemma\", \"text_config\": " TYPE(                                          \
        "diffusion_gemma_text") ", \"num_hidden_layers\": 12, \"hidden_size\": 2304, "                       \
                                "\"num_attention_heads\": 8, "                                               \
                                "\"num_key_value_heads\": 4, \"global_head_dim\": 512, "                     \
                                "\"num_global_key_value_heads\": 2" fields "}" BF16

/* The KV heads of layers without a window count without Gemma 4's flag. */
static void diffusion_gemma_has_other_heads_without_a_flag(void **state) {
    (void)state;
    kvf_model *model = read_model(DIFFUSION(", \"use_bidirectional_attention\": \"vision\""));
    assert_kv_group(model, 0, "full", 5, 2, 2, 512);
    assert_kv_group(model, 1, "swa", 0, 10, 4, 256);
    assert_int_equal(kvf_model_group(model, 1)->window_tokens, 512);
    kvf_model_free(model);
    assert_refused(DIFFUSION(", \"use_bidirectional_attention\": \"all\""), KVF_E_UNSUPPORTED,
                   "text_config.use_bidirectional_attention is all, not supported for diffusion_gemma_text");
}

static void what_a_family_may_not_have_is_refused_by_name(void **state) {
    (void)state;
    assert_refused(TYPE("minicpmv") LARGE ", \"num_key_value_heads\": 8, \"use_sliding_window\": true" BF16,
                   KVF_E_UNSUPPORTED,
                   "use_sliding_window is true, not supported for minicpmv; supported: false");
    assert_refused(TYPE("deepseek_v2") LARGE
                   ", \"num_key_value_heads\": 8, \"use_mla\": false, \"qk_rope_head_dim\": 64" BF16,
                   KVF_E_UNSUPPORTED,
                   "qk_nope_head_dim is missing: heads in two parts without a latent, not supported");
    assert_refused(TYPE("deepseek_v2") LARGE ", \"num_key_value_heads\": 8, \"use_mla\": false, "
                                             "\"qk_nope_head_dim\": 0, \"qk_rope_head_dim\": 64" BF16,
                   KVF_E_UNSUPPORTED, "qk_rope_head_dim is 64, not supported for deepseek_v2; supported: 0");
    assert_refused(TYPE("RefinedWeb") ", \"n_layer\": 32, \"hidden_size\": 4544, \"n_head\": 71" BF16,
                   KVF_E_UNSUPPORTED, "hidden_size is 4544, not supported for RefinedWeb; supported: 8192");
}

/* ---- latents --------------------------------------------------------------------------------- */

static void latents_are_those_of_deepseek(void **state) {
    (void)state;
    static const char *const types[] = {"kimi_vl", "dots_vlm", "pangu_ultra_moe", "sarvam_mla"};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        char json[512];
        (void)snprintf(json, sizeof json,
                       "{\"model_type\": \"%s\"%s, \"kv_lora_rank\": 512, \"qk_rope_head_dim\": 64, "
                       "\"qk_nope_head_dim\": 128, \"v_head_dim\": 128, \"q_lora_rank\": 1536%s",
                       types[i], LARGE, BF16);
        kvf_model *model = read_model(json);
        const kvf_group_desc *group = kvf_model_group(model, 0);
        assert_int_equal(group->layer_count, 32);
        assert_int_equal(group->part_count, 1);
        assert_int_equal(group->parts[0].units, 1);
        assert_int_equal(group->parts[0].cell_elements, 576);
        kvf_model_free(model);
    }
}

/* ---- blocks ---------------------------------------------------------------------------------- */

#define NAS(blocks)                                                                                          \
    "{\"model_type\": \"nemotron-nas\", \"hidden_size\": 8192, \"num_attention_heads\": 64, "                \
    "\"num_key_value_heads\": null, \"block_configs\": [" blocks "]" BF16
#define BLOCK(attention) "{\"attention\": {" attention "}, \"ffn\": {\"ffn_mult\": 2.6, \"no_op\": false}}"
#define GROUPS_OF(n)                                                                                         \
    BLOCK("\"n_heads_in_group\": " n ", \"no_op\": false, \"replace_with_linear\": false, "                  \
          "\"sparsify\": null, \"window_length\": null, \"num_sink_tokens\": null")
#define NO_ATTENTION BLOCK("\"n_heads_in_group\": null, \"no_op\": true, \"window_length\": null")

/* 64 heads in groups of 8 and of 16: 8 and 4 KV heads of 8192 / 64 elements */
static void blocks_have_kv_heads_of_their_own_or_no_attention(void **state) {
    (void)state;
    kvf_model *model =
        read_model(NAS(GROUPS_OF("8") "," NO_ATTENTION "," GROUPS_OF("16") "," GROUPS_OF("8")));
    assert_int_equal(kvf_model_layer_count(model), 4);
    assert_int_equal(kvf_model_group_count(model), 2);
    assert_kv_group(model, 0, "full", 0, 2, 8, 128);
    assert_int_equal(kvf_model_group(model, 0)->layers[1], 3);
    assert_kv_group(model, 1, "full.2", 2, 1, 4, 128);
    kvf_model_free(model);
}

static void blocks_that_say_too_little_or_too_much_are_refused(void **state) {
    (void)state;
    assert_refused("{\"model_type\": \"nemotron-nas\"" LARGE BF16, KVF_E_INVALID,
                   "block_configs is missing, and nemotron-nas has no default for it");
    assert_refused(NAS("8"), KVF_E_INVALID, "block_configs[0] is not an object");
    assert_refused(NAS("{\"ffn\": {}}"), KVF_E_INVALID, "block_configs[0].attention is missing");
    assert_refused(NAS("{\"attention\": 8}"), KVF_E_INVALID, "block_configs[0].attention is 8");
    assert_refused(NAS(GROUPS_OF("8") "," GROUPS_OF("null")), KVF_E_INVALID,
                   "block_configs[1].attention.n_heads_in_group is null");
    assert_refused(NAS(GROUPS_OF("0")), KVF_E_RANGE, "n_heads_in_group is 0; allowed: 1 to 64");
    assert_refused(NAS(GROUPS_OF("65")), KVF_E_RANGE, "n_heads_in_group is 65; allowed: 1 to 64");
    assert_refused(NAS(GROUPS_OF("12")), KVF_E_INVALID,
                   "block_configs[0].attention.n_heads_in_group is 12, which does not divide "
                   "num_attention_heads, 64");
    assert_refused(NAS(BLOCK("\"no_op\": 0")), KVF_E_INVALID, "no_op is 0; it must be true or false");
    assert_refused(NAS(BLOCK("\"n_heads_in_group\": 8, \"replace_with_linear\": true")), KVF_E_UNSUPPORTED,
                   "block_configs[0].attention.replace_with_linear is true, which is not supported");
    assert_refused(NAS(BLOCK("\"n_heads_in_group\": 8, \"window_length\": 512")), KVF_E_UNSUPPORTED,
                   "window_length is 512, which is not supported");
    assert_refused(NAS(NO_ATTENTION), KVF_E_INVALID, "none of them keeps a cache");
}

/* ---- states ---------------------------------------------------------------------------------- */

#define ZAMBA(fields)                                                                                        \
    "{\"model_type\": \"zamba2\", \"num_hidden_layers\": 3, \"hidden_size\": 3584, "                         \
    "\"num_attention_heads\": 32, \"layers_block_type\": [\"mamba\", \"hybrid\", \"mamba\"], "               \
    "\"hybrid_layer_ids\": [1], \"num_mem_blocks\": 2, \"adapter_rank\": 128, \"kv_channels\": 112, "        \
    "\"num_query_groups\": 32, \"chunk_size\": 256, \"mamba_d_state\": 64, \"mamba_d_conv\": 4, "            \
    "\"mamba_expand\": 2, \"mamba_ngroups\": 2, \"n_mamba_heads\": 112, \"mamba_headdim\": 64" fields BF16

/* Attention is twice as wide as the hidden state: 32 heads of 7168 / 32. Every layer has a state of 112 heads, 64 x
 * 64 each, and a convolution over 112 x 64 and twice 2 x 64 channels. */
static void zamba_2_has_a_state_in_every_layer_and_attention_in_some(void **state) {
    (void)state;
    static const char *const widths[] = {", \"attention_hidden_size\": 7168",
                                         ", \"attention_hidden_size\": 7168, \"attention_head_dim\": 224, "
                                         "\"num_key_value_heads\": 32"};
    char json[1024];
    for (size_t i = 0; i < 2; i++) {
        (void)snprintf(json, sizeof json, ZAMBA("%s"), widths[i]);
        kvf_model *model = read_model(json);
        assert_kv_group(model, 0, "full", 1, 1, 32, 224);
        const kvf_group_desc *group = kvf_model_group(model, 1);
        assert_int_equal(group->layer_count, 3);
        assert_int_equal(group->parts[0].units, 7168);
        assert_int_equal(group->parts[1].units, 128);
        assert_int_equal(group->parts[2].units, 128);
        assert_int_equal(group->parts[3].units, 112);
        assert_int_equal(group->parts[3].cell_elements, 4096);
        kvf_model_free(model);
    }
    /* never the hidden size divided by the heads */
    assert_refused(ZAMBA(""), KVF_E_INVALID, "head_dim is missing, and so is attention_hidden_size");
}

static void assert_state(const kvf_model *model, uint32_t g, uint32_t first_layer, uint32_t layer_count,
                         uint32_t rows, uint32_t keys, uint32_t values, uint32_t heads, uint32_t cell,
                         kvf_dtype dtype) {
    const kvf_group_desc *group = kvf_model_group(model, g);
    assert_non_null(group);
    assert_int_equal(group->layers[0], first_layer);
    assert_int_equal(group->layer_count, layer_count);
    assert_int_equal(group->part_count, 4);
    for (uint32_t p = 0; p < 3; p++) {
        assert_int_equal(group->parts[p].units, p < 2 ? keys : values);
        assert_int_equal(group->parts[p].rows_per_step, rows);
        assert_int_equal(group->parts[p].dtype, KVF_DTYPE_BF16);
    }
    assert_int_equal(group->parts[3].units, heads);
    assert_int_equal(group->parts[3].cell_elements, cell);
    assert_int_equal(group->parts[3].dtype, dtype);
}

#define BAILING(fields)                                                                                      \
    "{\"model_type\": \"bailing_hybrid\", \"hidden_size\": 2048, \"num_attention_heads\": 16, "              \
    "\"num_key_value_heads\": 4, \"head_dim\": 128, \"kv_lora_rank\": 512, \"qk_rope_head_dim\": 64, "       \
    "\"qk_nope_head_dim\": 128, \"v_head_dim\": 128, \"q_lora_rank\": null, \"group_norm_size\": 1, "        \
    "\"max_window_layers\": 20, \"n_group\": 8, \"num_nextn_predict_layers\": 1" fields BF16
#define SHORT_CONV ", \"short_conv_kernel_size\": 4"

/* 20 layers in groups of 5: four with latents of 512 + 64; the others with 16 heads, 128 x 128 each, in F32, and three
 * convolutions over 16 x 128 channels. */
static void ling_3_has_latents_in_the_last_layer_of_each_group(void **state) {
    (void)state;
    static const char ling[] = BAILING(SHORT_CONV ", \"num_hidden_layers\": 20, \"layer_group_size\": 5");
    char json[1024];
    for (size_t i = 0; i < 2; i++) {
        (void)snprintf(json, sizeof json,
                       i ? "{\"model_type\": \"bailing_moe_v3_vl\", \"text_config\": %s}" : "%s", ling);
        kvf_model *model = read_model(json);
        assert_int_equal(kvf_model_group_count(model), 2);
        const kvf_group_desc *group = kvf_model_group(model, 0);
        assert_int_equal(group->layer_count, 4);
        assert_int_equal(group->layers[0], 4);
        assert_int_equal(group->part_count, 1);
        assert_int_equal(group->parts[0].cell_elements, 576);
        assert_state(model, 1, 0, 16, 3, 2048, 2048, 16, 16384, KVF_DTYPE_F32);
        kvf_model_free(model);
    }
}

/* As transformers 5.24 saves it: head_dim is the 64 that are rotated; a head of the state is 96 wide. */
static void ling_3_has_a_states_head_size_of_its_own_when_saved(void **state) {
    (void)state;
    kvf_model *model = read_model(TYPE(
        "bailing_hybrid") ", \"hidden_size\": 2048, \"num_attention_heads\": 16, \"num_hidden_layers\": 6, "
                          "\"num_key_value_heads\": 16, \"head_dim\": 64, \"kv_lora_rank\": 512, "
                          "\"qk_rope_head_dim\": 64, \"qk_head_dim\": 192, \"layer_group_size\": 3, "
                          "\"linear_head_dim\": 96, \"linear_num_heads\": 16, "
                          "\"linear_conv_kernel_dim\": 4, \"layer_types\": [\"linear_attention\", "
                          "\"linear_attention\", \"full_attention\", \"linear_attention\", "
                          "\"linear_attention\", \"full_attention\"]" SHORT_CONV BF16);
    assert_int_equal(kvf_model_group(model, 0)->parts[0].cell_elements, 576);
    assert_state(model, 1, 0, 4, 3, 1536, 1536, 16, 9216, KVF_DTYPE_F32);
    kvf_model_free(model);
}

static void other_models_of_ling_are_refused_by_name(void **state) {
    (void)state;
    assert_refused(BAILING(", \"num_hidden_layers\": 20, \"layer_group_size\": 5"), KVF_E_UNSUPPORTED,
                   "short_conv_kernel_size is missing: a model with lightning attention, not supported");
    assert_refused(BAILING(SHORT_CONV ", \"num_hidden_layers\": 21, \"layer_group_size\": 5"),
                   KVF_E_UNSUPPORTED, "layer_group_size is 5, which does not divide the 21 layers");
    assert_refused(BAILING(SHORT_CONV ", \"num_hidden_layers\": 20"), KVF_E_INVALID,
                   "layer_group_size is missing");
    assert_refused(BAILING(SHORT_CONV ", \"num_hidden_layers\": 2, \"layer_group_size\": [1, 0]"),
                   KVF_E_INVALID, "layer_group_size is [1,0]");
    assert_refused(
        BAILING(SHORT_CONV ", \"num_hidden_layers\": 20, \"layer_group_size\": 5, \"use_mla_nope\": true"),
        KVF_E_UNSUPPORTED, "use_mla_nope is true, not supported for bailing_hybrid");
    assert_refused(
        BAILING(SHORT_CONV
                ", \"num_hidden_layers\": 20, \"layer_group_size\": 5, \"full_attention_type\": \"mha\""),
        KVF_E_UNSUPPORTED, "full_attention_type is mha, not supported for bailing_hybrid; supported: mla");
}

#define GDN                                                                                                  \
    ", \"linear_conv_kernel_dim\": 4, \"linear_num_key_heads\": 8, \"linear_key_head_dim\": 64, "            \
    "\"linear_num_value_heads\": 16, \"linear_value_head_dim\": 128"

/* Convolutions over 8 x 64 channels of keys and 16 x 128 of values; 16 heads of 128 x 64 in F32. */
static void gigachat_3_5_has_latents_and_a_gated_delta_net(void **state) {
    (void)state;
#define GIGA(fields)                                                                                         \
    "{\"model_type\": \"gigachat3_5\", \"num_hidden_layers\": 4, \"hidden_size\": 1280, "                    \
    "\"num_attention_heads\": 16, \"num_key_value_heads\": 16, \"head_dim\": 64, \"kv_lora_rank\": 512, "    \
    "\"qk_rope_head_dim\": 64, \"q_lora_rank\": 1536, \"layernorm_type\": \"pre_post\"" GDN fields BF16
    static const char *const listed[] = {
        GIGA(", \"layer_types\": [\"linear_attention\", \"linear_attention\", \"full_attention\", "
             "\"linear_attention\"]"),
        GIGA(", \"full_attention_layers\": [2], \"linear_attention_type\": \"Qwen3NextGatedDeltaNet\"")};
    for (size_t i = 0; i < 2; i++) {
        kvf_model *model = read_model(listed[i]);
        const kvf_group_desc *group = kvf_model_group(model, 0);
        assert_int_equal(group->layers[0], 2);
        assert_int_equal(group->layer_count, 1);
        assert_int_equal(group->parts[0].cell_elements, 576);
        assert_state(model, 1, 0, 3, 3, 512, 2048, 16, 8192, KVF_DTYPE_F32);
        kvf_model_free(model);
    }
    assert_refused(GIGA(", \"full_attention_layers\": [2], \"linear_attention_type\": \"Mamba2\""),
                   KVF_E_UNSUPPORTED, "linear_attention_type is Mamba2, not supported for gigachat3_5");
}

/* As many key heads as value heads: convolutions over 16 x 128 channels, 16 heads of 128 x 128 in F32. */
static void alice_ai_has_kv_heads_and_a_delta_state(void **state) {
    (void)state;
#define ALICE(fields)                                                                                        \
    "{\"model_type\": \"alice_ai\", \"num_hidden_layers\": 4, \"hidden_size\": 2048, "                       \
    "\"num_attention_heads\": 16, \"num_key_value_heads\": 2, \"head_dim\": 256, "                           \
    "\"block_attn_res_block_size\": 2, \"layer_types\": [\"linear_attention\", \"linear_attention\", "       \
    "\"linear_attention\", \"full_attention\"], \"linear_conv_kernel_dim\": 4, "                             \
    "\"linear_num_key_heads\": 16, \"linear_key_head_dim\": 128" fields BF16
    kvf_model *model = read_model(ALICE(", \"linear_num_value_heads\": 16, \"linear_value_head_dim\": 128"));
    assert_kv_group(model, 0, "full", 3, 1, 2, 256);
    assert_state(model, 1, 0, 3, 3, 2048, 2048, 16, 16384, KVF_DTYPE_F32);
    kvf_model_free(model);
    assert_refused(ALICE(", \"linear_num_value_heads\": 32, \"linear_value_head_dim\": 128"), KVF_E_INVALID,
                   "linear_num_value_heads");
}

static void interns_2_mobius_is_like_qwen_3_5(void **state) {
    (void)state;
    kvf_model *model = read_model(
        "{\"model_type\": \"interns2_mobius\", \"text_config\": {\"model_type\": \"interns2_mobius_text\", "
        "\"num_hidden_layers\": 4, \"hidden_size\": 2048, \"num_attention_heads\": 16, "
        "\"num_key_value_heads\": 2, \"head_dim\": 256, \"num_blocks\": 4, "
        "\"full_attention_interval\": 4" GDN "}" BF16);
    assert_kv_group(model, 0, "full", 3, 1, 2, 256);
    assert_state(model, 1, 0, 3, 3, 512, 2048, 16, 8192, KVF_DTYPE_BF16);
    kvf_model_free(model);
}

/* A switch for windows is on by default in some families (Flint), and off in others. */
static void a_window_may_be_there_unless_it_is_switched_off(void **state) {
    (void)state;
#define FLINT(more)                                                                                          \
    TYPE("flint")                                                                                            \
    ", \"num_hidden_layers\": 3, \"hidden_size\": 2048, \"num_attention_heads\": 32, "                       \
    "\"num_key_value_heads\": "                                                                              \
    "4, \"layer_types\": [\"sliding_attention\", \"full_attention\", \"sliding_attention\"]" more BF16
    kvf_model *model = read_model(FLINT(""));
    assert_kv_group(model, 0, "full", 1, 1, 4, 128);
    assert_kv_group(model, 1, "swa", 0, 2, 4, 128);
    assert_int_equal(kvf_model_group(model, 1)->window_tokens, 513);
    kvf_model_free(model);
    model = read_model(FLINT(", \"use_sliding_window\": true, \"sliding_window\": 65"));
    assert_int_equal(kvf_model_group(model, 1)->window_tokens, 65);
    kvf_model_free(model);
    assert_refused(FLINT(", \"use_sliding_window\": false"), KVF_E_INVALID,
                   "layer 0 has a window, but sliding_window is missing or not used");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_window_may_be_there_unless_it_is_switched_off),
        cmocka_unit_test(layers_have_the_heads_of_their_family),
        cmocka_unit_test(a_family_without_a_public_class_needs_its_kv_heads),
        cmocka_unit_test(a_missing_size_that_engines_dispute_is_read_if_all_get_the_same),
        cmocka_unit_test(dots_1_has_windows_from_a_layer_on),
        cmocka_unit_test(loops_after_the_first_have_windows),
        cmocka_unit_test(two_stacks_that_take_turns_leave_a_cache_each_time),
        cmocka_unit_test(spark_and_dory_have_windows_in_most_layers),
        cmocka_unit_test(dorys_loops_leave_a_cache_each_unless_only_the_last_does),
        cmocka_unit_test(repeated_layers_must_be_layers),
        cmocka_unit_test(diffusion_gemma_has_other_heads_without_a_flag),
        cmocka_unit_test(what_a_family_may_not_have_is_refused_by_name),
        cmocka_unit_test(latents_are_those_of_deepseek),
        cmocka_unit_test(blocks_have_kv_heads_of_their_own_or_no_attention),
        cmocka_unit_test(blocks_that_say_too_little_or_too_much_are_refused),
        cmocka_unit_test(zamba_2_has_a_state_in_every_layer_and_attention_in_some),
        cmocka_unit_test(ling_3_has_latents_in_the_last_layer_of_each_group),
        cmocka_unit_test(ling_3_has_a_states_head_size_of_its_own_when_saved),
        cmocka_unit_test(other_models_of_ling_are_refused_by_name),
        cmocka_unit_test(gigachat_3_5_has_latents_and_a_gated_delta_net),
        cmocka_unit_test(alice_ai_has_kv_heads_and_a_delta_state),
        cmocka_unit_test(interns_2_mobius_is_like_qwen_3_5),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
