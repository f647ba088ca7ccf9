/*
 * Models from configurations: what the layers of each family keep. The sizes are worked out by hand, in comments if
 * they are not obvious.
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

static const kvf_group_desc *group_named(const kvf_model *model, const char *name) {
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++)
        if (strcmp(kvf_model_group(model, g)->name, name) == 0)
            return kvf_model_group(model, g);
    return NULL;
}

/* What each layer keeps, one letter per layer: F full, W window, C chunk, S state, B both, - nothing. */
static void assert_layers(const kvf_model *model, const char *letters) {
    char got[128];
    uint32_t count = kvf_model_layer_count(model);
    assert_true(count < sizeof got);
    memset(got, '-', count);
    got[count] = '\0';
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        char letter = group->kind == KVF_GROUP_STATE ? 'S'
                      : group->window_tokens         ? 'W'
                      : group->chunk_tokens          ? 'C'
                                                     : 'F';
        for (uint32_t i = 0; i < group->layer_count; i++)
            got[group->layers[i]] = got[group->layers[i]] == '-' ? letter : 'B';
    }
    assert_string_equal(got, letters);
}

static void assert_layers_of(const char *json, const char *letters) {
    kvf_model *model = read_noted(json, NULL);
    assert_layers(model, letters);
    kvf_model_free(model);
}

static void assert_part(const kvf_part_desc *part, const char *name, kvf_dtype dtype, uint32_t units,
                        uint32_t granule_units, uint32_t cell_elements, uint32_t rows_per_step,
                        uint32_t tensor, kvf_tp_rule tp_rule) {
    assert_string_equal(part->name, name);
    assert_int_equal(part->dtype, dtype);
    assert_int_equal(part->units, units);
    assert_int_equal(part->granule_units, granule_units);
    assert_int_equal(part->cell_elements, cell_elements);
    assert_int_equal(part->rows_per_step, rows_per_step);
    assert_int_equal(part->tensor, tensor);
    assert_int_equal(part->tp_rule, tp_rule);
}

#define LLAMA                                                                                                \
    "\"model_type\": \"llama\", \"num_hidden_layers\": 2, \"hidden_size\": 512, "                            \
    "\"num_attention_heads\": 8"
#define BF16 ", \"torch_dtype\": \"bfloat16\""
#define LLAMA_WITH(fields) "{" LLAMA BF16 fields "}"

/* ---- the models that come with the library --------------------------------------------------- */

typedef struct expected_group {
    const char *name;
    uint32_t layers;
    uint32_t step_bytes;
    uint32_t window_tokens;
    uint32_t chunk_tokens;
    uint32_t tokens_per_step;
} expected_group;

static const struct {
    const char *name;
    uint32_t layers;
    expected_group groups[5];
} shipped[] = {
    /* 2 x 8 heads x 128 x 2 bytes = 4096 a layer: 128 KiB and 320 KiB a token */
    {"llama-3.1-8b", 32, {{"full", 32, 131072 / 32, 0, 0, 1}}},
    {"llama-3.1-70b", 80, {{"full", 80, 327680 / 80, 0, 0, 1}}},
    {"qwen3-32b", 64, {{"full", 64, 262144 / 64, 0, 0, 1}}},
    {"mistral-7b-v0.1", 32, {{"swa", 32, 4096, 4096, 0, 1}}},
    /* every 6th of 62 layers is full */
    {"gemma-3-27b", 62, {{"full", 10, 2 * 16 * 128 * 2, 0, 0, 1}, {"swa", 52, 2 * 16 * 128 * 2, 1024, 0, 1}}},
    {"gemma-4-26b-a4b",
     30,
     {{"full", 5, 2 * 2 * 512 * 2, 0, 0, 1}, {"swa", 25, 2 * 8 * 256 * 2, 1024, 0, 1}}},
    {"gemma-4-31b", 60, {{"full", 10, 2 * 4 * 512 * 2, 0, 0, 1}, {"swa", 50, 2 * 16 * 256 * 2, 1024, 0, 1}}},
    {"gpt-oss-120b", 36, {{"full", 18, 2 * 8 * 64 * 2, 0, 0, 1}, {"swa", 18, 2 * 8 * 64 * 2, 128, 0, 1}}},
    /* keys of 192 and values of 128 elements; full in the first and in every 6th layer */
    {"mimo-v2-flash", 48, {{"full", 9, 4 * 320 * 2, 0, 0, 1}, {"swa", 39, 8 * 320 * 2, 128, 0, 1}}},
    {"llama-4-scout", 48, {{"full", 12, 4096, 0, 0, 1}, {"chunked", 36, 4096, 0, 8192, 1}}},
    /* a latent of 512 + 64; the indexer adds 128 bytes and a 4-byte scale */
    {"deepseek-v3", 61, {{"mla", 61, 576 * 2, 0, 0, 1}}},
    {"deepseek-v3.2", 61, {{"mla", 61, 576 * 2 + 132, 0, 0, 1}}},
    /* latents of 512 elements, of tokens and of entries; compressors' states of 2 x 2 x (512 + 128) and 2 x 512 in single
     * precision */
    {"deepseek-v4-flash",
     43,
     {{"swa", 43, 1024, 128, 0, 1},
      {"csa", 21, 1024 + 132, 0, 0, 4},
      {"csa.state", 21, 4 * 640 * 4, 8, 0, 1},
      {"hca", 20, 1024, 0, 0, 128},
      {"hca.state", 20, 2 * 512 * 4, 128, 0, 1}}},
    /* conv: (64 x 64 + 2 x 8 x 128) channels x 3 rows x 2 bytes; state: 64 x 64 x 128 in single precision */
    {"nemotron-3-nano-30b",
     52,
     {{"full", 6, 2 * 2 * 128 * 2, 0, 0, 1}, {"ssm", 23, 36864 + 2097152, 0, 0, 1}}},
    /* conv: (256 x 64 + 2 x 8 x 256) x 3 x 2; state: 256 x 64 x 256 in single precision, the family's default */
    {"nemotron-h-56b", 118, {{"full", 10, 4096, 0, 0, 1}, {"ssm", 54, 122880 + 16777216, 0, 0, 1}}},
    /* conv: (8192 + 2 x 128) x 3 x 2; state: 128 x 64 x 128 x 2 */
    {"granite-4.0-h-small", 40, {{"full", 4, 4096, 0, 0, 1}, {"ssm", 36, 50688 + 2097152, 0, 0, 1}}},
    /* conv: 8192 x 3 x 2; state: 8192 x 16 x 2 */
    {"jamba-1.5-mini", 32, {{"full", 4, 4096, 0, 0, 1}, {"ssm", 28, 49152 + 262144, 0, 0, 1}}},
    /* conv: (2 x 16 x 128 + 32 x 128) x 3 x 2; state: 32 x 128 x 128 x 2 */
    {"qwen3-next-80b-a3b",
     48,
     {{"full", 12, 2 * 2 * 256 * 2, 0, 0, 1}, {"gdn", 36, 49152 + 1048576, 0, 0, 1}}},
    /* conv: 3 x 32 x 128 x 3 x 2; state: 32 x 128 x 128 in single precision */
    {"kimi-linear-48b-a3b", 27, {{"mla", 7, 1152, 0, 0, 1}, {"kda", 20, 73728 + 2097152, 0, 0, 1}}},
};

static void every_shipped_model_has_its_published_cache_sizes(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof shipped / sizeof shipped[0]; i++) {
        kvf_model *model = NULL;
        if (kvf_model_load(shipped[i].name, NULL, &model) != KVF_OK)
            fail_msg("%s: %s", shipped[i].name, kvf_error_detail());
        assert_int_equal(kvf_model_layer_count(model), shipped[i].layers);
        uint32_t groups = 0;
        while (groups < sizeof shipped[i].groups / sizeof shipped[i].groups[0] &&
               shipped[i].groups[groups].name)
            groups++;
        assert_int_equal(kvf_model_group_count(model), groups);
        for (uint32_t g = 0; g < groups; g++) {
            const expected_group *expected = &shipped[i].groups[g];
            const kvf_group_desc *group = kvf_model_group(model, g);
            assert_string_equal(group->name, expected->name);
            assert_int_equal(group->layer_count, expected->layers);
            assert_int_equal(kvf_group_step_bytes(group), expected->step_bytes);
            assert_int_equal(group->window_tokens, expected->window_tokens);
            assert_int_equal(group->chunk_tokens, expected->chunk_tokens);
            assert_int_equal(group->tokens_per_step, expected->tokens_per_step);
        }
        kvf_model_free(model);
    }
}

static void every_shipped_model_is_listed_and_tested(void **state) {
    (void)state;
    uint32_t count = 0;
    for (const char *name; (name = kvf_builtin_model_name(count)); count++) {
        bool tested = false;
        for (size_t i = 0; i < sizeof shipped / sizeof shipped[0]; i++)
            tested |= strcmp(shipped[i].name, name) == 0;
        if (!tested)
            fail_msg("%s is shipped and not tested", name);
    }
    assert_int_equal(count, sizeof shipped / sizeof shipped[0]);
    assert_null(kvf_builtin_model_name(UINT32_MAX));
}

/* ---- heads ----------------------------------------------------------------------------------- */

static void heads_without_kv_heads_are_multi_head_attention(void **state) {
    (void)state;
    kvf_model *model = read_noted(LLAMA_WITH(""), NULL);
    const kvf_group_desc *full = kvf_model_group(model, 0);
    assert_string_equal(kvf_model_name(model), "llama");
    assert_string_equal(full->name, "full");
    assert_int_equal(full->part_count, 2);
    assert_part(&full->parts[0], "k", KVF_DTYPE_BF16, 8, 1, 64, 1, 0, KVF_TP_SPLIT);
    assert_part(&full->parts[1], "v", KVF_DTYPE_BF16, 8, 1, 64, 1, 0, KVF_TP_SPLIT);
    kvf_model_free(model);
}

static void one_kv_head_is_multi_query_attention(void **state) {
    (void)state;
    kvf_model *model = read_noted(LLAMA_WITH(", \"num_key_value_heads\": 1"), NULL);
    assert_int_equal(kvf_model_group(model, 0)->parts[0].units, 1);
    kvf_model_free(model);
}

static void a_head_size_that_is_given_need_not_divide_the_hidden_size(void **state) {
    (void)state;
    kvf_model *model = read_noted(LLAMA_WITH(", \"head_dim\": 100"), NULL);
    assert_int_equal(kvf_model_group(model, 0)->parts[1].cell_elements, 100);
    kvf_model_free(model);
}

static void a_field_that_is_null_counts_as_not_given(void **state) {
    (void)state;
    kvf_model *model = read_noted(LLAMA_WITH(", \"head_dim\": null, \"num_key_value_heads\": null"), NULL);
    assert_int_equal(kvf_model_group(model, 0)->parts[0].cell_elements, 64);
    assert_int_equal(kvf_model_group(model, 0)->parts[0].units, 8);
    kvf_model_free(model);
}

static void options_choose_the_cache_type_and_the_name(void **state) {
    (void)state;
    const kvf_config_options options = {
        .struct_size = sizeof options, .name = "mine", .cache_dtype = KVF_DTYPE_F8_E4M3};
    /* the configuration needs no dtype of its own then */
    kvf_model *model = read_noted("{" LLAMA "}", &options);
    assert_string_equal(kvf_model_name(model), "mine");
    assert_int_equal(kvf_group_step_bytes(kvf_model_group(model, 0)), 2 * 8 * 64);
    kvf_model_free(model);
}

static void scales_are_parts_beside_k_and_v(void **state) {
    (void)state;
    kvf_config_options options = {.struct_size = sizeof options,
                                  .cache_dtype = KVF_DTYPE_I8,
                                  .scale_dtype = KVF_DTYPE_F32,
                                  .scale_per_head = true};
    kvf_model *model = read_noted(LLAMA_WITH(", \"num_key_value_heads\": 4"), &options);
    const kvf_group_desc *full = kvf_model_group(model, 0);
    assert_int_equal(full->part_count, 4);
    assert_part(&full->parts[0], "k", KVF_DTYPE_I8, 4, 1, 64, 1, 0, KVF_TP_SPLIT);
    assert_part(&full->parts[2], "k_scale", KVF_DTYPE_F32, 4, 1, 1, 1, 1, KVF_TP_SPLIT);
    assert_part(&full->parts[3], "v_scale", KVF_DTYPE_F32, 4, 1, 1, 1, 1, KVF_TP_SPLIT);
    kvf_model_free(model);

    options.scale_per_head = false;
    model = read_noted(LLAMA_WITH(", \"num_key_value_heads\": 4"), &options);
    full = kvf_model_group(model, 0);
    assert_part(&full->parts[3], "v_scale", KVF_DTYPE_F32, 1, 1, 1, 1, 1, KVF_TP_REPLICATE);
    kvf_model_free(model);
}

static void options_that_mean_nothing_are_refused(void **state) {
    (void)state;
    static const char json[] = LLAMA_WITH("");
    static const char latent[] = "{\"model_type\": \"deepseek_v3\", \"num_hidden_layers\": 1, "
                                 "\"kv_lora_rank\": 512, \"qk_rope_head_dim\": 64" BF16 "}";
    kvf_model *model = NULL;
    kvf_config_options options = {.struct_size = sizeof options, .scale_per_head = true};
    assert_failure(kvf_model_from_config(json, sizeof json - 1, &options, &model), KVF_E_INVALID,
                   "scale_per_head is set, but scale_dtype is not");
    options = (kvf_config_options){.struct_size = sizeof options, .state_dtype = (kvf_dtype)50};
    assert_failure(kvf_model_from_config(json, sizeof json - 1, &options, &model), KVF_E_INVALID,
                   "kvf_config_options.state_dtype is 50");
    options = (kvf_config_options){.struct_size = sizeof options, .scale_dtype = KVF_DTYPE_I4};
    assert_failure(kvf_model_from_config(json, sizeof json - 1, &options, &model), KVF_E_INVALID,
                   "part 2 (k_scale): cell_elements is 1, which in i4 does not fill whole bytes");
    options.scale_dtype = KVF_DTYPE_F32;
    assert_failure(kvf_model_from_config(latent, sizeof latent - 1, &options, &model), KVF_E_INVALID,
                   "scale_dtype is f32, but a latent has no K and V");
    options.struct_size = 0;
    assert_failure(kvf_model_from_config(json, sizeof json - 1, &options, &model), KVF_E_INVALID,
                   "kvf_config_options.struct_size is 0");
    assert_int_equal(kvf_model_from_config(NULL, 1, NULL, &model), KVF_E_INVALID);
    assert_int_equal(kvf_model_from_config(json, 1, NULL, NULL), KVF_E_INVALID);
    assert_null(model);
}

/* ---- windows and chunks ---------------------------------------------------------------------- */

#define HEADS "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"head_dim\": 64" BF16
#define WINDOWED(type, layers, fields)                                                                       \
    "{\"model_type\": \"" type "\", \"num_hidden_layers\": " layers ", " HEADS fields "}"

static void mistral_has_a_window_in_all_layers_or_in_none(void **state) {
    (void)state;
    assert_layers_of(WINDOWED("mistral", "3", ", \"sliding_window\": 4096"), "WWW");
    assert_layers_of(WINDOWED("mistral", "3", ", \"sliding_window\": null"), "FFF");
    assert_layers_of(WINDOWED("mixtral", "3", ""), "FFF");
}

static void qwen_has_windows_above_a_layer_and_only_when_they_are_switched_on(void **state) {
    (void)state;
    static const char fields[] = ", \"sliding_window\": 32, \"max_window_layers\": 2";
    char json[512];
    (void)snprintf(json, sizeof json, WINDOWED("qwen2", "4", ", \"use_sliding_window\": true%s"), fields);
    assert_layers_of(json, "FFWW");
    (void)snprintf(json, sizeof json, WINDOWED("qwen3", "4", ", \"use_sliding_window\": false%s"), fields);
    assert_layers_of(json, "FFFF");
    (void)snprintf(json, sizeof json, WINDOWED("qwen3", "4", "%s"), fields);
    assert_layers_of(json, "FFFF");
}

static void gemma_is_full_in_the_last_layer_of_each_period(void **state) {
    (void)state;
    assert_layers_of(WINDOWED("gemma2", "5", ", \"sliding_window\": 4096"), "WFWFW");
    assert_layers_of(WINDOWED("gemma3_text", "8", ", \"sliding_window\": 512"), "WWWWWFWW");
    assert_layers_of(WINDOWED("gemma3_text", "7", ", \"sliding_window\": 512, \"sliding_window_pattern\": 3"),
                     "WWFWWFW");
    assert_layers_of(
        WINDOWED("gemma3_text", "4", ", \"sliding_window\": 512, \"_sliding_window_pattern\": 2"), "WFWF");
    assert_layers_of(WINDOWED("cohere2", "5", ", \"sliding_window\": 4096"), "WWWFW");
}

static void fields_that_a_family_leaves_out_have_its_defaults(void **state) {
    (void)state;
    kvf_model *model =
        read_noted("{\"model_type\": \"gemma3\", \"torch_dtype\": \"bfloat16\", \"text_config\": "
                   "{\"model_type\": \"gemma3_text\", \"hidden_size\": 2560, "
                   "\"num_hidden_layers\": 34, \"sliding_window\": 1024}}",
                   NULL);
    assert_int_equal(kvf_model_group(model, 0)->parts[0].units, 4);
    assert_int_equal(kvf_model_group(model, 0)->parts[0].cell_elements, 256);
    assert_int_equal(kvf_model_group(model, 1)->window_tokens, 1024);
    kvf_model_free(model);
}

static void exaone_4_is_full_in_every_fourth_layer_unless_it_has_no_window(void **state) {
    (void)state;
    assert_layers_of(WINDOWED("exaone4", "5", ""), "WWWFW");
    assert_layers_of(WINDOWED("exaone4", "5", ", \"sliding_window\": null"), "FFFFF");
}

static void the_last_layer_of_gemma_4_is_full_whatever_is_said(void **state) {
    (void)state;
    assert_layers_of(WINDOWED("gemma4_text", "7", ""), "WWWWWFF");
    assert_layers_of(WINDOWED("gemma4_text", "2",
                              ", \"layer_types\": [\"full_attention\", "
                              "\"sliding_attention\"]"),
                     "FF");
}

static void some_families_are_full_in_the_first_layer_of_four_or_from_a_layer_on(void **state) {
    (void)state;
    assert_layers_of(WINDOWED("cwm", "6", ", \"sliding_window\": 64"), "FWWWFW");
    assert_layers_of(WINDOWED("granite_swa", "5", ", \"sliding_window\": 64"), "FWWWF");
    assert_layers_of(WINDOWED("granite_swa", "5", ", \"sliding_window\": null"), "FFFFF");
    assert_layers_of(WINDOWED("afmoe", "5", ", \"global_attn_every_n_layers\": 3"), "WWFWW");
    assert_layers_of(WINDOWED("qwen2_moe", "6", ", \"use_sliding_window\": true, \"max_window_layers\": 3"),
                     "WFWFFF");
}

static void layer_types_decide_before_any_pattern(void **state) {
    (void)state;
    assert_layers_of(WINDOWED("gemma3_text", "3",
                              ", \"sliding_window\": 8, \"layer_types\": "
                              "[\"full_attention\", \"sliding_attention\", \"full_attention\"]"),
                     "FWF");
    assert_layers_of(WINDOWED("gpt_oss", "2",
                              ", \"sliding_window\": 8, \"layer_types\": "
                              "[\"full_attention\", \"sliding_attention\"]"),
                     "FW");
}

static void gemma_4_has_heads_of_its_own_in_full_layers(void **state) {
    (void)state;
    static const char fields[] = ", \"sliding_window\": 16, \"layer_types\": "
                                 "[\"sliding_attention\", \"full_attention\"], \"global_head_dim\": 128, "
                                 "\"num_global_key_value_heads\": 1";
    char json[640];
    (void)snprintf(json, sizeof json, WINDOWED("gemma4_text", "2", "%s, \"attention_k_eq_v\": true"), fields);
    kvf_model *model = read_noted(json, NULL);
    assert_int_equal(group_named(model, "full")->parts[0].units, 1);
    assert_int_equal(group_named(model, "full")->parts[1].cell_elements, 128);
    assert_int_equal(group_named(model, "swa")->parts[0].units, 2);
    assert_int_equal(group_named(model, "swa")->parts[1].cell_elements, 64);
    kvf_model_free(model);

    (void)snprintf(json, sizeof json, WINDOWED("gemma4_text", "2", "%s, \"attention_k_eq_v\": false"),
                   fields);
    model = read_noted(json, NULL);
    assert_int_equal(group_named(model, "full")->parts[0].units, 2);
    kvf_model_free(model);
}

static void assert_heads(const kvf_model *model, const char *group, uint32_t kv_heads, uint32_t head_dim,
                         uint32_t v_head_dim) {
    const kvf_group_desc *found = group_named(model, group);
    assert_non_null(found);
    assert_int_equal(found->part_count, 2);
    assert_part(&found->parts[0], "k", KVF_DTYPE_BF16, kv_heads, 1, head_dim, 1, 0, KVF_TP_SPLIT);
    assert_part(&found->parts[1], "v", KVF_DTYPE_BF16, kv_heads, 1, v_head_dim, 1, 0, KVF_TP_SPLIT);
}

static void assert_heads_of(const char *json, const char *group, uint32_t kv_heads, uint32_t head_dim,
                            uint32_t v_head_dim) {
    kvf_model *model = read_noted(json, NULL);
    assert_heads(model, group, kv_heads, head_dim, v_head_dim);
    if (kvf_model_note(model, 0))
        fail_msg("%s", kvf_model_note(model, 0));
    kvf_model_free(model);
}

static void old_families_have_names_of_their_own(void **state) {
    (void)state;
    assert_heads_of("{\"model_type\": \"gpt2\", \"n_layer\": 2, \"n_embd\": 48, \"n_head\": 4, \"n_ctx\": 64"
                    ", \"scale_attn_by_inverse_layer_idx\": true" BF16 "}",
                    "full", 4, 12, 12);
    assert_heads_of("{\"model_type\": \"bloom\", \"n_layer\": 2, \"n_embed\": 48, "
                    "\"num_attention_heads\": 4" BF16 "}",
                    "full", 4, 12, 12);
    assert_heads_of("{\"model_type\": \"mpt\", \"n_layers\": 2, \"d_model\": 48, \"n_heads\": 4, "
                    "\"attn_config\": {\"kv_n_heads\": 2}" BF16 "}",
                    "full", 2, 12, 12);
    assert_refused("{\"model_type\": \"gpt2\", \"n_embd\": 48, \"n_head\": 4" BF16 "}", KVF_E_INVALID,
                   "n_layer is missing, and gpt2 has no default for it");
    assert_refused("{\"model_type\": \"gpt2\", \"n_layer\": 2, \"n_embd\": 50, \"n_head\": 4" BF16 "}",
                   KVF_E_INVALID, "head_dim is missing, and n_head, 4, does not divide n_embd, 50");
    assert_refused("{\"model_type\": \"gpt2\", \"n_layer\": 2, \"n_head\": 4" BF16 "}", KVF_E_INVALID,
                   "head_dim is missing, and so is n_embd");
    assert_refused("{\"model_type\": \"gpt2\", \"n_layer\": 2, \"num_hidden_layers\": 3, \"n_embd\": 48, "
                   "\"n_head\": 4" BF16 "}",
                   KVF_E_INVALID, "n_layer is 2, but num_hidden_layers is 3");
    assert_refused("{\"model_type\": \"mpt\", \"n_layers\": 2, \"d_model\": 48, \"n_heads\": 4, "
                   "\"attn_config\": {\"kv_n_heads\": 3}" BF16 "}",
                   KVF_E_INVALID, "attn_config.kv_n_heads is 3, which does not divide n_heads, 4");
}

/* Falcon 7B says that it has as many KV heads as heads, and has one. */
static void multi_query_is_one_kv_head_whatever_else_is_said(void **state) {
    (void)state;
#define FALCON(fields)                                                                                       \
    "{\"model_type\": \"falcon\", \"num_hidden_layers\": 2, \"hidden_size\": 48, "                           \
    "\"num_attention_heads\": 6" BF16 fields "}"
    assert_heads_of(FALCON(", \"num_kv_heads\": 6, \"multi_query\": true"), "full", 1, 8, 8);
    assert_heads_of(FALCON(""), "full", 1, 8, 8);
    assert_heads_of(FALCON(", \"multi_query\": false"), "full", 6, 8, 8);
    assert_heads_of(FALCON(", \"num_kv_heads\": 2, \"new_decoder_architecture\": true"), "full", 2, 8, 8);
    assert_heads_of(FALCON(", \"num_kv_heads\": null, \"new_decoder_architecture\": true"), "full", 6, 8, 8);
    assert_refused(FALCON(", \"multi_query\": 1"), KVF_E_INVALID, "multi_query is 1; it must be true or");
    assert_refused(FALCON(", \"new_decoder_architecture\": 1"), KVF_E_INVALID,
                   "new_decoder_architecture is 1; it must be true or");
#define STARCODER(fields)                                                                                    \
    "{\"model_type\": \"gpt_bigcode\", \"n_layer\": 2, \"n_embd\": 48, \"n_head\": 6" BF16 fields "}"
    assert_heads_of(STARCODER(""), "full", 1, 8, 8);
    assert_heads_of(STARCODER(", \"multi_query\": false"), "full", 6, 8, 8);
}

/* The published form names the heads of windows; the form of transformers leaves them out: twice as many KV heads. */
static void mimo_2_has_smaller_values_and_other_heads_in_windows(void **state) {
    (void)state;
#define MIMO(type, fields)                                                                                   \
    "{\"model_type\": \"" type "\", \"num_hidden_layers\": 3, \"num_attention_heads\": 16, "                 \
    "\"num_key_value_heads\": 2, \"head_dim\": 12, \"v_head_dim\": 8, \"attention_chunk_size\": 128" BF16    \
        fields "}"
    static const char published[] =
        MIMO("mimo_v2_flash", ", \"hybrid_layer_pattern\": [0, 1, 1], \"sliding_window\": 64, "
                              "\"sliding_window_size\": 64, \"swa_num_attention_heads\": 20, "
                              "\"swa_num_key_value_heads\": 5, \"swa_head_dim\": 10, \"swa_v_head_dim\": 6");
    kvf_model *model = read_noted(published, NULL);
    assert_layers(model, "FWW");
    assert_int_equal(group_named(model, "swa")->window_tokens, 64);
    kvf_model_free(model);
    assert_heads_of(published, "full", 2, 12, 8);
    assert_heads_of(published, "swa", 5, 10, 6);
    static const char saved[] =
        MIMO("mimo_v2", ", \"layer_types\": [\"full_attention\", \"sliding_attention\", "
                        "\"sliding_attention\"], \"sliding_window_size\": 32");
    assert_layers_of(saved, "FWW");
    assert_heads_of(saved, "full", 2, 12, 8);
    assert_heads_of(saved, "swa", 4, 12, 8);
    model = read_noted(MIMO("mimo_v2", ", \"hybrid_layer_pattern\": [0, 1, 1], \"sliding_window\": 33, "
                                       "\"sliding_window_size\": 32"),
                       NULL);
    assert_int_equal(group_named(model, "swa")->window_tokens, 32);
    kvf_model_free(model);
    assert_refused(MIMO("mimo_v2", ", \"hybrid_layer_pattern\": [0, 1, 2]"), KVF_E_RANGE,
                   "hybrid_layer_pattern[2] is 2; allowed: 0 to 1");
    assert_refused(MIMO("mimo_v2", ""), KVF_E_INVALID, "layer_types is missing");
    assert_refused(MIMO("mimo_v2", ", \"hybrid_layer_pattern\": [0, 1, 1], \"sliding_window\": 64, "
                                   "\"swa_num_attention_heads\": 20, \"swa_num_key_value_heads\": 3"),
                   KVF_E_INVALID,
                   "swa_num_key_value_heads is 3, which does not divide swa_num_attention_heads, 20");
    assert_refused("{\"model_type\": \"mimo_v2\", \"num_hidden_layers\": 1, \"num_attention_heads\": 4, "
                   "\"num_key_value_heads\": 2, \"head_dim\": 4, \"hybrid_layer_pattern\": [0]" BF16 "}",
                   KVF_E_INVALID, "v_head_dim is missing");
}

static void step_3_5_lists_more_layers_than_it_has_and_other_heads_for_windows(void **state) {
    (void)state;
#define STEP(fields)                                                                                         \
    "{\"model_type\": \"step3p5\", \"num_hidden_layers\": 2, \"num_attention_heads\": 8, "                   \
    "\"num_attention_groups\": 2, \"sliding_window\": 64, \"use_rope_layers\": [true, true], "               \
    "\"use_head_wise_attn_gate\": true" BF16 fields "}"
#define STEP_TYPES(more)                                                                                     \
    ", \"layer_types\": [\"full_attention\", \"sliding_attention\"" more "], \"num_nextn_predict_layers\": " \
    "1"
#define STEP_OTHER(type)                                                                                     \
    ", \"attention_other_setting\": {\"attention_type\": \"" type "\", \"num_attention_heads\": 12, "        \
    "\"num_attention_groups\": 3, \"head_dim\": 64, \"true_head_dim\": 64}"
    static const char whole[] = STEP(STEP_TYPES(", \"sliding_attention\"") STEP_OTHER("sliding_attention"));
    assert_layers_of(whole, "FW");
    assert_heads_of(whole, "full", 2, 128, 128);
    assert_heads_of(whole, "swa", 3, 64, 64);
    /* without the layer that predicts, and the other heads for full layers, for no layers, and not given */
    assert_layers_of(STEP(STEP_TYPES("")), "FW");
    assert_heads_of(STEP(STEP_TYPES("") STEP_OTHER("full_attention")), "full", 3, 64, 64);
    assert_heads_of(STEP(STEP_TYPES("") STEP_OTHER("full_attention")), "swa", 2, 128, 128);
    assert_heads_of(STEP(STEP_TYPES("") STEP_OTHER("none")), "swa", 2, 128, 128);
    assert_heads_of(STEP(STEP_TYPES("")), "swa", 2, 128, 128);
    assert_refused(STEP(STEP_TYPES(", \"full_attention\", \"full_attention\"")), KVF_E_INVALID,
                   "layer_types describes 4 layers, but num_hidden_layers is 2");
}

static void layers_that_share_a_cache_keep_none(void **state) {
    (void)state;
    assert_layers_of(WINDOWED("gemma4_text", "8", ", \"sliding_window\": 16, \"num_kv_shared_layers\": 2"),
                     "WWWWWF--");
    assert_refused(WINDOWED("gemma4_text", "8", ", \"sliding_window\": 16, \"num_kv_shared_layers\": 8"),
                   KVF_E_RANGE, "num_kv_shared_layers is 8; allowed: 0 to 7");
    assert_refused(WINDOWED("gemma4_text", "8", ", \"sliding_window\": 16, \"num_kv_shared_layers\": 3"),
                   KVF_E_INVALID, "num_kv_shared_layers is 3, but no layer before layer 5 is of its kind");
}

static void llama_4_has_chunks_where_positions_rotate(void **state) {
    (void)state;
    static const char chunk[] = ", \"attention_chunk_size\": 64";
    char json[512];
    (void)snprintf(json, sizeof json, WINDOWED("llama4_text", "5", "%s, \"no_rope_layers\": []"), chunk);
    assert_layers_of(json, "CCCFC");
    (void)snprintf(json, sizeof json, WINDOWED("llama4_text", "3", "%s, \"no_rope_layers\": [1, 0, 1]"),
                   chunk);
    assert_layers_of(json, "CFC");
    (void)snprintf(json, sizeof json, WINDOWED("llama4_text", "4", "%s, \"no_rope_layer_interval\": 2"),
                   chunk);
    assert_layers_of(json, "CFCF");
    assert_layers_of(WINDOWED("llama4_text", "4", ", \"attention_chunk_size\": null"), "FFFF");
}

static void the_text_model_of_a_multimodal_one_is_read(void **state) {
    (void)state;
    kvf_model *model =
        read_noted("{\"model_type\": \"mistral3\", \"vision_config\": {\"num_hidden_layers\": 7}, "
                   "\"text_config\": {\"model_type\": \"mistral\", \"num_hidden_layers\": 3, " HEADS
                   ", \"sliding_window\": null}}",
                   NULL);
    assert_string_equal(kvf_model_name(model), "mistral3");
    assert_layers(model, "FFF");
    kvf_model_free(model);
}

static void the_text_model_of_one_that_speaks_is_in_its_thinker(void **state) {
    (void)state;
    kvf_model *model =
        read_noted("{\"model_type\": \"qwen2_5_omni\", \"dtype\": \"float16\", "
                   "\"talker_config\": {\"num_hidden_layers\": 7}, \"thinker_config\": "
                   "{\"model_type\": \"qwen2_5_omni_thinker\", \"text_config\": "
                   "{\"model_type\": \"qwen2_5_omni_text\", \"num_hidden_layers\": 3, " HEADS "}}}",
                   NULL);
    assert_string_equal(kvf_model_name(model), "qwen2_5_omni");
    assert_layers(model, "FFF");
    kvf_model_free(model);
    assert_refused("{\"model_type\": \"qwen2_5_omni\", \"thinker_config\": {\"model_type\": \"other\"}}",
                   KVF_E_UNSUPPORTED, "thinker_config.model_type is \"other\", an unknown family");
}

/* ---- latents --------------------------------------------------------------------------------- */

#define LATENT_OF(type, fields)                                                                              \
    "{\"model_type\": \"" type "\", \"num_hidden_layers\": 2, \"num_attention_heads\": 128, "                \
    "\"kv_lora_rank\": 512, \"qk_rope_head_dim\": 64" BF16 fields "}"
#define LATENT(fields) LATENT_OF("deepseek_v32", fields)

static void a_latent_is_one_replicated_unit(void **state) {
    (void)state;
    kvf_model *model = read_noted(LATENT_OF("deepseek_v3", ""), NULL);
    const kvf_group_desc *mla = kvf_model_group(model, 0);
    assert_string_equal(mla->name, "mla");
    assert_int_equal(mla->part_count, 1);
    assert_part(&mla->parts[0], "latent", KVF_DTYPE_BF16, 1, 1, 576, 1, 0, KVF_TP_REPLICATE);
    kvf_model_free(model);
}

static void an_indexer_adds_its_key_and_the_scale_of_it(void **state) {
    (void)state;
    const kvf_config_options options = {.struct_size = sizeof options, .cache_dtype = KVF_DTYPE_F16};
    kvf_model *model = read_noted(LATENT(", \"index_head_dim\": 128"), &options);
    const kvf_group_desc *mla = kvf_model_group(model, 0);
    assert_int_equal(mla->part_count, 3);
    assert_part(&mla->parts[0], "latent", KVF_DTYPE_F16, 1, 1, 576, 1, 0, KVF_TP_REPLICATE);
    assert_part(&mla->parts[1], "indexer", KVF_DTYPE_F8_E4M3, 1, 1, 128, 1, 1, KVF_TP_REPLICATE);
    assert_part(&mla->parts[2], "indexer_scale", KVF_DTYPE_F32, 1, 1, 1, 1, 1, KVF_TP_REPLICATE);
    kvf_model_free(model);
}

static void a_family_that_always_has_an_indexer_has_its_default(void **state) {
    (void)state;
    kvf_model *model = read_noted(LATENT_OF("glm_moe_dsa", ""), NULL);
    assert_int_equal(kvf_model_group(model, 0)->part_count, 3);
    assert_int_equal(kvf_model_group(model, 0)->parts[1].cell_elements, 128);
    kvf_model_free(model);
}

/* Which of 11 layers have an indexer: I, or L for a latent alone. */
static void assert_indexers(const char *type, const char *fields, const char *wanted) {
    char json[512];
    char got[12] = "???????????";
    (void)snprintf(json, sizeof json,
                   "{\"model_type\": \"%s\", \"num_hidden_layers\": 11, \"kv_lora_rank\": 64, "
                   "\"qk_rope_head_dim\": 8" BF16 "%s}",
                   type, fields);
    kvf_model *model = read_noted(json, NULL);
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        assert_string_equal(group->name, g ? "mla.2" : "mla");
        assert_part(&group->parts[0], "latent", KVF_DTYPE_BF16, 1, 1, 72, 1, 0, KVF_TP_REPLICATE);
        assert_true(group->part_count == 1 || strcmp(group->parts[1].name, "indexer") == 0);
        for (uint32_t i = 0; i < group->layer_count; i++)
            got[group->layers[i]] = group->part_count == 1 ? 'L' : 'I';
    }
    if (kvf_model_note(model, 0))
        fail_msg("%s", kvf_model_note(model, 0));
    kvf_model_free(model);
    assert_string_equal(got, wanted);
}

static void layers_that_share_an_indexer_keep_a_latent_alone(void **state) {
    (void)state;
    assert_indexers("deepseek_v32", "", "IIIIIIIIIII");
    assert_indexers("deepseek_v3", "", "LLLLLLLLLLL");
    assert_indexers("deepseek_v32", ", \"index_topk_freq\": 4", "IILLLILLLIL");
    assert_indexers("deepseek_v32", ", \"index_topk_freq\": 4, \"index_skip_topk_offset\": 3", "IIILLLILLLI");
    assert_indexers("deepseek_v32", ", \"index_topk_freq\": 0", "IIIIIIIIIII");
    assert_indexers("deepseek_v32", ", \"index_topk_pattern\": \"FSSFSSSSFSF\"", "ILLILLLLILI");
    assert_indexers(
        "glm_moe_dsa",
        ", \"index_topk_freq\": 4, \"indexer_types\": [\"full\", \"shared\", \"shared\", \"full\", "
        "\"shared\", \"full\", \"full\", \"full\", \"full\", \"full\", \"full\"]",
        "ILLILIIIIII");
    assert_indexers("hy_v4", "", "IILLLILLLIL");
    assert_indexers("hy_v4", ", \"index_topk_freq\": 1", "IIIIIIIIIII");
}

static void an_indexer_that_does_not_fit_is_refused(void **state) {
    (void)state;
    assert_refused(LATENT(", \"index_head_dim\": 100"), KVF_E_INVALID,
                   "index_head_dim is 100; it must be a multiple of 128");
    assert_refused(LATENT(", \"index_head_dim\": 128, \"indexer_types\": [\"full\", \"none\"]"),
                   KVF_E_INVALID, "indexer_types[1] is \"none\"; allowed: full and shared");
    assert_refused(LATENT(", \"indexer_types\": [\"full\", null]"), KVF_E_INVALID,
                   "indexer_types[1] is \"null\"; allowed: full and shared");
    assert_refused(LATENT(", \"indexer_types\": [\"full\"]"), KVF_E_INVALID,
                   "indexer_types describes 1 layers, but the model has 2");
    assert_refused(LATENT(", \"index_topk_pattern\": \"FSF\""), KVF_E_INVALID,
                   "index_topk_pattern describes 3 layers, but the model has 2");
    assert_refused(LATENT(", \"index_topk_pattern\": \"FX\""), KVF_E_INVALID,
                   "index_topk_pattern[1] is \"X\"; allowed: F and S");
    assert_refused(LATENT(", \"index_topk_pattern\": 7"), KVF_E_INVALID,
                   "index_topk_pattern is neither a text nor a list");
    assert_refused(LATENT(", \"index_topk_pattern\": \"SF\""), KVF_E_INVALID,
                   "gives layer 0 no indexer, and no layer before it has one");
    assert_refused(LATENT(", \"index_topk_freq\": 2, \"index_skip_topk_offset\": 0"), KVF_E_INVALID,
                   "gives layer 0 no indexer, and no layer before it has one");
    assert_refused("{\"model_type\": \"deepseek_v3\", \"num_hidden_layers\": 2, \"kv_lora_rank\": 512" BF16
                   "}",
                   KVF_E_INVALID, "qk_rope_head_dim is missing");
}

/* ---- states ---------------------------------------------------------------------------------- */

static void mamba_2_keeps_x_b_c_and_a_state_for_each_head(void **state) {
    (void)state;
    kvf_model *model = NULL;
    assert_int_equal(kvf_model_load("nemotron-3-nano-30b", NULL, &model), KVF_OK);
    assert_layers(model, "S-S-SF-S-S-SF-S-S-SF-S-S-SF-S-S-SF-S-S-S-SF-S-S-S-S-");
    const kvf_group_desc *ssm = group_named(model, "ssm");
    assert_int_equal(ssm->kind, KVF_GROUP_STATE);
    assert_int_equal(ssm->part_count, 4);
    assert_part(&ssm->parts[0], "conv.x", KVF_DTYPE_BF16, 4096, 64, 1, 3, 0, KVF_TP_SPLIT);
    assert_part(&ssm->parts[1], "conv.B", KVF_DTYPE_BF16, 1024, 128, 1, 3, 0, KVF_TP_SPLIT);
    assert_part(&ssm->parts[2], "conv.C", KVF_DTYPE_BF16, 1024, 128, 1, 3, 0, KVF_TP_SPLIT);
    assert_part(&ssm->parts[3], "ssm", KVF_DTYPE_F32, 64, 1, 64 * 128, 1, 1, KVF_TP_SPLIT);
    kvf_model_free(model);
}

static void mamba_1_keeps_x_and_a_state_for_each_channel(void **state) {
    (void)state;
    kvf_model *model = NULL;
    assert_int_equal(kvf_model_load("jamba-1.5-mini", NULL, &model), KVF_OK);
    assert_layers(model, "SSSSFSSSSSSSFSSSSSSSFSSSSSSSFSSS");
    const kvf_group_desc *ssm = group_named(model, "ssm");
    assert_int_equal(ssm->part_count, 2);
    assert_part(&ssm->parts[0], "conv.x", KVF_DTYPE_BF16, 8192, 1, 1, 3, 0, KVF_TP_SPLIT);
    assert_part(&ssm->parts[1], "ssm", KVF_DTYPE_BF16, 8192, 1, 16, 1, 1, KVF_TP_SPLIT);
    kvf_model_free(model);
}

#define LFM2(fields)                                                                                         \
    "{\"model_type\": \"lfm2\", \"dtype\": \"bfloat16\", \"num_hidden_layers\": 4, "                         \
    "\"num_attention_heads\": 8, \"num_key_value_heads\": 2, \"hidden_size\": 64, \"conv_L_cache\": "        \
    "3" fields "}"

static void a_short_convolution_keeps_x_and_no_recurrent_state(void **state) {
    (void)state;
    kvf_model *model = read_noted(
        LFM2(", \"full_attn_idxs\": [2], \"conv_dim\": 64, \"conv_dim_out\": 64, \"num_heads\": 8"), NULL);
    assert_layers(model, "SSFS");
    assert_null(kvf_model_note(model, 0));
    const kvf_group_desc *conv = group_named(model, "conv");
    assert_int_equal(conv->part_count, 1);
    assert_part(&conv->parts[0], "conv.x", KVF_DTYPE_BF16, 64, 1, 1, 2, 0, KVF_TP_SPLIT);
    kvf_model_free(model);
    assert_layers_of(LFM2(", \"layer_types\": [\"conv\", \"full_attention\", \"conv\", \"conv\"]"), "SFSS");
    assert_layers_of(LFM2(""), "FFFF");
    assert_refused(LFM2(", \"full_attn_idxs\": [2], \"conv_dim\": 32"), KVF_E_INVALID, "conv_dim");
    assert_refused(LFM2(", \"num_heads\": 4"), KVF_E_INVALID, "num_heads");
}

static void a_gated_delta_net_keeps_value_heads_with_their_key_head(void **state) {
    (void)state;
    kvf_model *model = NULL;
    assert_int_equal(kvf_model_load("qwen3-next-80b-a3b", NULL, &model), KVF_OK);
    const kvf_group_desc *gdn = group_named(model, "gdn");
    assert_int_equal(gdn->part_count, 4);
    assert_part(&gdn->parts[0], "conv.Q", KVF_DTYPE_BF16, 2048, 128, 1, 3, 0, KVF_TP_SPLIT);
    assert_part(&gdn->parts[1], "conv.K", KVF_DTYPE_BF16, 2048, 128, 1, 3, 0, KVF_TP_SPLIT);
    assert_part(&gdn->parts[2], "conv.V", KVF_DTYPE_BF16, 4096, 256, 1, 3, 0, KVF_TP_SPLIT);
    assert_part(&gdn->parts[3], "ssm", KVF_DTYPE_BF16, 32, 2, 128 * 128, 1, 1, KVF_TP_SPLIT);
    kvf_model_free(model);
}

static void kimi_delta_attention_stands_beside_latents(void **state) {
    (void)state;
    kvf_model *model = NULL;
    assert_int_equal(kvf_model_load("kimi-linear-48b-a3b", NULL, &model), KVF_OK);
    assert_layers(model, "SSSFSSSFSSSFSSSFSSSFSSSFSSF");
    const kvf_group_desc *kda = group_named(model, "kda");
    assert_part(&kda->parts[1], "conv.K", KVF_DTYPE_BF16, 4096, 128, 1, 3, 0, KVF_TP_SPLIT);
    assert_part(&kda->parts[3], "ssm", KVF_DTYPE_F32, 32, 1, 128 * 128, 1, 1, KVF_TP_SPLIT);
    assert_string_equal(group_named(model, "mla")->parts[0].name, "latent");
    kvf_model_free(model);
}

static void the_state_type_is_asked_for_or_said_or_the_models(void **state) {
    (void)state;
    static const char mamba[] =
        "\"model_type\": \"mamba2\", \"num_hidden_layers\": 1, \"num_heads\": 2, "
        "\"head_dim\": 4, \"n_groups\": 1, \"state_size\": 8, \"conv_kernel\": 4" BF16;
    static const struct {
        const char *said;
        kvf_dtype asked;
        kvf_dtype dtype;
    } cases[] = {{"", KVF_DTYPE_INVALID, KVF_DTYPE_BF16},
                 {", \"mamba_ssm_dtype\": \"float32\"", KVF_DTYPE_INVALID, KVF_DTYPE_F32},
                 {", \"mamba_ssm_cache_dtype\": \"auto\"", KVF_DTYPE_INVALID, KVF_DTYPE_BF16},
                 {", \"mamba_ssm_cache_dtype\": \"float32\"", KVF_DTYPE_F16, KVF_DTYPE_F16}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char json[512];
        (void)snprintf(json, sizeof json, "{%s%s}", mamba, cases[i].said);
        /* the attention's type does not touch the state */
        const kvf_config_options options = {
            .struct_size = sizeof options, .cache_dtype = KVF_DTYPE_F8_E4M3, .state_dtype = cases[i].asked};
        kvf_model *model = read_noted(json, &options);
        assert_int_equal(kvf_model_group(model, 0)->parts[0].dtype, KVF_DTYPE_BF16);
        assert_int_equal(kvf_model_group(model, 0)->parts[3].dtype, cases[i].dtype);
        kvf_model_free(model);
    }
}

#define HYBRID(type, layers, fields)                                                                         \
    "{\"model_type\": \"" type "\", \"num_hidden_layers\": " layers ", \"hidden_size\": 64, " HEADS          \
    ", \"mamba_d_conv\": 4, \"mamba_n_heads\": 8, \"mamba_d_state\": 16, \"mamba_n_groups\": 2, "            \
    "\"mamba_expand\": 2" fields "}"

static void layers_may_keep_both_attention_and_a_state(void **state) {
    (void)state;
    assert_layers_of(HYBRID("falcon_h1", "2", ", \"mamba_d_ssm\": 96, \"mamba_d_head\": 12"), "BB");
    /* null: mamba_expand decides, 2 x 64; left out: 1024 */
    assert_layers_of(HYBRID("falcon_h1", "2", ", \"mamba_d_ssm\": null, \"mamba_d_head\": 16"), "BB");
    assert_layers_of(HYBRID("falcon_h1", "2", ", \"mamba_d_head\": 128"), "BB");
    assert_refused(HYBRID("falcon_h1", "2", ", \"mamba_d_head\": 16"), KVF_E_INVALID,
                   "mamba_n_heads is 8 and mamba_d_head is 16, but the inner width is 1024");
}

static void a_head_size_of_auto_follows_from_the_inner_width(void **state) {
    (void)state;
    kvf_model *model =
        read_noted(HYBRID("bamba", "3", ", \"mamba_d_head\": \"auto\", \"attn_layer_indices\": [1]"), NULL);
    assert_layers(model, "SFS");
    assert_int_equal(group_named(model, "ssm")->parts[3].cell_elements, 2 * 64 / 8 * 16);
    kvf_model_free(model);
}

static void state_fields_that_contradict_each_other_are_refused(void **state) {
    (void)state;
    assert_refused(HYBRID("bamba", "3", ", \"mamba_d_head\": 15, \"attn_layer_indices\": [1]"), KVF_E_INVALID,
                   "mamba_n_heads is 8 and mamba_d_head is 15, but the inner width is 128");
    assert_refused(HYBRID("bamba", "3", ", \"mamba_d_head\": \"big\", \"attn_layer_indices\": [1]"),
                   KVF_E_INVALID, "mamba_d_head is \"big\"; it must be a whole number");
    assert_refused(HYBRID("bamba", "3", ", \"mamba_d_head\": 16, \"attn_layer_indices\": [1, 3]"),
                   KVF_E_RANGE, "attn_layer_indices[1] is 3; allowed: 0 to 2");
    assert_refused(HYBRID("bamba", "3", ", \"mamba_d_head\": 16, \"attn_layer_indices\": [1, 1]"),
                   KVF_E_INVALID, "attn_layer_indices[1] is 1, a layer that is listed before");
    assert_refused(HYBRID("bamba", "3", ", \"mamba_d_head\": 16"), KVF_E_INVALID,
                   "attn_layer_indices is missing");
    assert_refused(
        "{\"model_type\": \"mamba2\", \"num_hidden_layers\": 1, \"num_heads\": 3, \"head_dim\": 4, "
        "\"n_groups\": 2, \"state_size\": 8, \"conv_kernel\": 4" BF16 "}",
        KVF_E_INVALID, "n_groups is 2, which does not divide num_heads, 3");
    assert_refused(
        "{\"model_type\": \"mamba2\", \"num_hidden_layers\": 1, \"num_heads\": 2, \"head_dim\": 4, "
        "\"n_groups\": 2, \"state_size\": 8, \"conv_kernel\": 1" BF16 "}",
        KVF_E_RANGE, "conv_kernel is 1; allowed: 2 to");
    assert_refused("{\"model_type\": \"mamba2\", \"num_hidden_layers\": 1, \"num_heads\": 65536, "
                   "\"head_dim\": 65536, \"n_groups\": 1, \"state_size\": 8, \"conv_kernel\": 4" BF16 "}",
                   KVF_E_OVERFLOW, "channels of the convolution is 65536 x 65536");
    assert_refused("{\"model_type\": \"mamba\", \"num_hidden_layers\": 1, \"hidden_size\": 16777216, "
                   "\"expand\": 256, \"state_size\": 8, \"conv_kernel\": 4" BF16 "}",
                   KVF_E_RANGE, "expand is 256, times hidden_size, 16777216, is beyond 32 bits");
}

#define KIMI(full, kda)                                                                                      \
    "{\"model_type\": \"kimi_linear\", \"num_hidden_layers\": 3, \"kv_lora_rank\": 8, "                      \
    "\"qk_rope_head_dim\": 8" BF16 ", \"linear_attn_config\": {\"full_attn_layers\": " full                  \
    ", \"kda_layers\": " kda ", \"num_heads\": 2, \"head_dim\": 4, \"short_conv_kernel_size\": 4}}"

static void kimi_linear_is_the_same_in_the_fields_of_its_own_and_in_those_of_its_class(void **state) {
    (void)state;
    kvf_model *own = read_noted(KIMI("[2]", "[1, 3]"), NULL);
    kvf_model *saved = read_noted(
        "{\"model_type\": \"kimi_linear\", \"num_hidden_layers\": 3, \"kv_lora_rank\": 8, "
        "\"qk_rope_head_dim\": 8" BF16 ", \"linear_num_heads\": 2, \"linear_head_dim\": 4, "
        "\"linear_conv_kernel_dim\": 4, \"layer_types\": [\"linear_attention\", \"full_attention\", "
        "\"linear_attention\"]}",
        NULL);
    if (kvf_model_compare(own, saved))
        fail_msg("%s", kvf_error_detail());
    kvf_model_free(own);
    kvf_model_free(saved);
}

static void two_lists_of_layers_must_name_each_layer_once(void **state) {
    (void)state;
    assert_layers_of(KIMI("[2]", "[3, 1]"), "SFS");
    assert_layers_of(KIMI("[2]", "null"), "SFS");
    assert_refused(
        KIMI("[2]", "[1]"), KVF_E_INVALID,
        "linear_attn_config.full_attn_layers and linear_attn_config.kda_layers: layer 3 is in neither");
    assert_refused(KIMI("[2]", "[1, 2, 3]"), KVF_E_INVALID,
                   "linear_attn_config.kda_layers[1] is 2, a layer that is listed before");
    assert_refused(KIMI("[0]", "[1, 2, 3]"), KVF_E_RANGE,
                   "linear_attn_config.full_attn_layers[0] is 0; allowed: 1 to 3");
    assert_refused(KIMI("[\"2\"]", "[1, 3]"), KVF_E_INVALID,
                   "linear_attn_config.full_attn_layers[0] is \"2\"; it must be a whole number");
}

static void a_pattern_of_letters_says_what_each_layer_keeps(void **state) {
    (void)state;
    static const char nemotron[] =
        "\"model_type\": \"nemotron_h\", \"mamba_num_heads\": 2, \"mamba_head_dim\": 4, \"n_groups\": 1, "
        "\"ssm_state_size\": 8, \"conv_kernel\": 4, " HEADS;
    static const struct {
        const char *fields;
        kvf_status status;
        /* if the status is KVF_OK, the letters of the layers; otherwise words of the error */
        const char *words;
    } cases[] = {
        {"\"num_hidden_layers\": 4, \"hybrid_override_pattern\": \"M*-E\"", KVF_OK, "SF--"},
        {"\"hybrid_override_pattern\": \"MM*\"", KVF_OK, "SSF"},
        {"\"layers_block_type\": [\"mamba\", \"moe\", \"attention\", \"mlp\"]", KVF_OK, "S-F-"},
        {"\"num_hidden_layers\": 4, \"hybrid_override_pattern\": \"M*-\"", KVF_E_INVALID,
         "hybrid_override_pattern describes 3 layers, but num_hidden_layers is 4"},
        {"\"num_hidden_layers\": 2, \"hybrid_override_pattern\": \"Mx\"", KVF_E_INVALID,
         "hybrid_override_pattern has 'x' for layer 1"},
        {"\"num_hidden_layers\": 2, \"hybrid_override_pattern\": \"--\"", KVF_E_INVALID,
         "none of them keeps a cache"},
        {"\"hybrid_override_pattern\": \"\"", KVF_E_RANGE, "hybrid_override_pattern describes 0 layers"},
        {"\"num_hidden_layers\": 2", KVF_E_INVALID, "hybrid_override_pattern is missing"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char json[640];
        (void)snprintf(json, sizeof json, "{%s, %s}", nemotron, cases[i].fields);
        if (cases[i].status == KVF_OK)
            assert_layers_of(json, cases[i].words);
        else
            assert_refused(json, cases[i].status, cases[i].words);
    }
}

static void every_file_of_models_is_what_the_library_carries(void **state) {
    (void)state;
    for (uint32_t i = 0; kvf_builtin_model_name(i); i++) {
        char path[512];
        (void)snprintf(path, sizeof path, "%s/models/%s.json", KVF_SOURCE_DIR, kvf_builtin_model_name(i));
        kvf_model *from_file = NULL;
        kvf_model *carried = NULL;
        assert_int_equal(kvf_model_load(path, NULL, &from_file), KVF_OK);
        assert_int_equal(kvf_model_load(kvf_builtin_model_name(i), NULL, &carried), KVF_OK);
        assert_int_equal(kvf_model_compare(from_file, carried), KVF_OK);
        kvf_model_free(from_file);
        kvf_model_free(carried);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_shipped_model_has_its_published_cache_sizes),
        cmocka_unit_test(every_shipped_model_is_listed_and_tested),
        cmocka_unit_test(heads_without_kv_heads_are_multi_head_attention),
        cmocka_unit_test(one_kv_head_is_multi_query_attention),
        cmocka_unit_test(a_head_size_that_is_given_need_not_divide_the_hidden_size),
        cmocka_unit_test(a_field_that_is_null_counts_as_not_given),
        cmocka_unit_test(options_choose_the_cache_type_and_the_name),
        cmocka_unit_test(scales_are_parts_beside_k_and_v),
        cmocka_unit_test(options_that_mean_nothing_are_refused),
        cmocka_unit_test(mistral_has_a_window_in_all_layers_or_in_none),
        cmocka_unit_test(qwen_has_windows_above_a_layer_and_only_when_they_are_switched_on),
        cmocka_unit_test(gemma_is_full_in_the_last_layer_of_each_period),
        cmocka_unit_test(fields_that_a_family_leaves_out_have_its_defaults),
        cmocka_unit_test(exaone_4_is_full_in_every_fourth_layer_unless_it_has_no_window),
        cmocka_unit_test(the_last_layer_of_gemma_4_is_full_whatever_is_said),
        cmocka_unit_test(some_families_are_full_in_the_first_layer_of_four_or_from_a_layer_on),
        cmocka_unit_test(layer_types_decide_before_any_pattern),
        cmocka_unit_test(gemma_4_has_heads_of_its_own_in_full_layers),
        cmocka_unit_test(old_families_have_names_of_their_own),
        cmocka_unit_test(multi_query_is_one_kv_head_whatever_else_is_said),
        cmocka_unit_test(mimo_2_has_smaller_values_and_other_heads_in_windows),
        cmocka_unit_test(step_3_5_lists_more_layers_than_it_has_and_other_heads_for_windows),
        cmocka_unit_test(layers_that_share_a_cache_keep_none),
        cmocka_unit_test(llama_4_has_chunks_where_positions_rotate),
        cmocka_unit_test(the_text_model_of_a_multimodal_one_is_read),
        cmocka_unit_test(the_text_model_of_one_that_speaks_is_in_its_thinker),
        cmocka_unit_test(a_latent_is_one_replicated_unit),
        cmocka_unit_test(an_indexer_adds_its_key_and_the_scale_of_it),
        cmocka_unit_test(a_family_that_always_has_an_indexer_has_its_default),
        cmocka_unit_test(layers_that_share_an_indexer_keep_a_latent_alone),
        cmocka_unit_test(an_indexer_that_does_not_fit_is_refused),
        cmocka_unit_test(mamba_2_keeps_x_b_c_and_a_state_for_each_head),
        cmocka_unit_test(mamba_1_keeps_x_and_a_state_for_each_channel),
        cmocka_unit_test(a_short_convolution_keeps_x_and_no_recurrent_state),
        cmocka_unit_test(a_gated_delta_net_keeps_value_heads_with_their_key_head),
        cmocka_unit_test(kimi_delta_attention_stands_beside_latents),
        cmocka_unit_test(the_state_type_is_asked_for_or_said_or_the_models),
        cmocka_unit_test(layers_may_keep_both_attention_and_a_state),
        cmocka_unit_test(a_head_size_of_auto_follows_from_the_inner_width),
        cmocka_unit_test(state_fields_that_contradict_each_other_are_refused),
        cmocka_unit_test(kimi_linear_is_the_same_in_the_fields_of_its_own_and_in_those_of_its_class),
        cmocka_unit_test(two_lists_of_layers_must_name_each_layer_once),
        cmocka_unit_test(a_pattern_of_letters_says_what_each_layer_keeps),
        cmocka_unit_test(every_file_of_models_is_what_the_library_carries),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
