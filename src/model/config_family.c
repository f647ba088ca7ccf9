/*
 * The families of models, as data.
 *
 * A row says which fields decide the sizes of a family's cache and how its configuration tells the layers apart.
 * Defaults are those of the families' public configuration classes; they are needed because published configurations
 * leave those fields out.
 */
#include "model/config.h"

/* ---- what each layer keeps ------------------------------------------------------------------- */

#define WORDS(name)                                                                                          \
    { .kind = KVF_RULE_WORDS, .field = (name) }
#define LAYER_TYPES WORDS("layer_types|layers_block_type")
#define ALL_FULL                                                                                             \
    { .kind = KVF_RULE_ALL, .picked = KVF_KEEPS_FULL }
#define LAST_OF_EACH(name, period, most)                                                                     \
    {                                                                                                        \
        .kind = KVF_RULE_PERIOD, .field = (name), .fallback = (period), .picked = KVF_KEEPS_FULL,            \
        .others = (most)                                                                                     \
    }
#define END                                                                                                  \
    { .kind = KVF_RULE_END }

static const kvf_layer_rule all_full[] = {LAYER_TYPES, ALL_FULL, END};

static const kvf_layer_rule all_window[] = {
    LAYER_TYPES,
    {.kind = KVF_RULE_WINDOW, .picked = KVF_KEEPS_WINDOW},
    ALL_FULL,
    END,
};

/* Full attention in the first max_window_layers layers, a window in those above. */
#define FULL_BELOW(layer)                                                                                    \
    {                                                                                                        \
        .kind = KVF_RULE_BELOW, .field = "max_window_layers", .fallback = (layer), .picked = KVF_KEEPS_FULL, \
        .others = KVF_KEEPS_WINDOW                                                                           \
    }

static const kvf_layer_rule window_above_28[] = {LAYER_TYPES, FULL_BELOW(28), ALL_FULL, END};
static const kvf_layer_rule window_above_62[] = {LAYER_TYPES, FULL_BELOW(62), ALL_FULL, END};
static const kvf_layer_rule window_above_80[] = {LAYER_TYPES, FULL_BELOW(80), ALL_FULL, END};

/* The first time that tokens pass through the layers they attend to everything, then to a window. */
static const kvf_layer_rule window_after_first_loop[] = {
    {.kind = KVF_RULE_BELOW,
     .field = "num_hidden_layers",
     .picked = KVF_KEEPS_FULL,
     .others = KVF_KEEPS_WINDOW},
    END,
};

static const kvf_layer_rule window_but_every_2nd[] = {LAYER_TYPES, LAST_OF_EACH(NULL, 2, KVF_KEEPS_WINDOW),
                                                      END};

static const kvf_layer_rule window_but_every_2nd_below_28[] = {
    LAYER_TYPES,
    {.kind = KVF_RULE_PERIOD,
     .fallback = 2,
     .second = "max_window_layers",
     .second_fallback = 28,
     .picked = KVF_KEEPS_FULL,
     .others = KVF_KEEPS_WINDOW},
    END,
};

static const kvf_layer_rule window_but_every_4th[] = {
    LAYER_TYPES,
    LAST_OF_EACH("sliding_window_pattern|_sliding_window_pattern", 4, KVF_KEEPS_WINDOW),
    END,
};

static const kvf_layer_rule window_but_every_4th_global[] = {
    LAYER_TYPES,
    LAST_OF_EACH("global_attn_every_n_layers", 4, KVF_KEEPS_WINDOW),
    END,
};

static const kvf_layer_rule window_but_first_of_4[] = {
    LAYER_TYPES,
    {.kind = KVF_RULE_OFFSET, .fallback = 4, .picked = KVF_KEEPS_FULL, .others = KVF_KEEPS_WINDOW},
    END,
};

static const kvf_layer_rule window_but_every_5th[] = {LAYER_TYPES, LAST_OF_EACH(NULL, 5, KVF_KEEPS_WINDOW),
                                                      END};

static const kvf_layer_rule window_but_every_6th[] = {
    LAYER_TYPES,
    LAST_OF_EACH("sliding_window_pattern|_sliding_window_pattern", 6, KVF_KEEPS_WINDOW),
    END,
};

/* A layer without rotary positions attends to everything; the others attend to their chunk. */
static const kvf_layer_rule chunks_with_rope[] = {
    LAYER_TYPES,
    {.kind = KVF_RULE_FLAGS, .field = "no_rope_layers", .picked = KVF_KEEPS_FULL, .others = KVF_KEEPS_CHUNK},
    LAST_OF_EACH("no_rope_layer_interval", 4, KVF_KEEPS_CHUNK),
    END,
};

static const kvf_layer_rule state_but_every_4th[] = {
    LAYER_TYPES,
    LAST_OF_EACH("full_attention_interval", 4, KVF_KEEPS_STATE),
    END,
};

/* Engines do not agree on the layers after the last whole group. */
static const kvf_layer_rule delta_but_last_of_group[] = {
    {.kind = KVF_RULE_PERIOD,
     .field = "layer_group_size",
     .whole = true,
     .picked = KVF_KEEPS_FULL,
     .others = KVF_KEEPS_STATE},
    END,
};

static const kvf_layer_rule delta_but_listed[] = {
    LAYER_TYPES,
    {.kind = KVF_RULE_NUMBERS,
     .field = "full_attention_layers",
     .picked = KVF_KEEPS_FULL,
     .others = KVF_KEEPS_STATE},
    END,
};

static const kvf_layer_rule delta_but_every_4th[] = {
    LAYER_TYPES,
    {.kind = KVF_RULE_NUMBERS,
     .field = "linear_attn_config.full_attn_layers",
     .second = "linear_attn_config.kda_layers",
     .picked = KVF_KEEPS_FULL,
     .others = KVF_KEEPS_STATE},
    LAST_OF_EACH(NULL, 4, KVF_KEEPS_STATE),
    END,
};

/* Some layers have an indexer: a flag says which. */
#define SPARSE_FLAGS                                                                                         \
    {                                                                                                        \
        .kind = KVF_RULE_FLAGS, .field = "sparse_attention_config.sparse_attention_freq",                    \
        .picked = KVF_KEEPS_FULL, .others = KVF_KEEPS_FULL | KVF_KEEPS_INDEXER                               \
    }

static const kvf_layer_rule sparse_by_flag[] = {LAYER_TYPES, SPARSE_FLAGS, END};
static const kvf_layer_rule sparse_by_flag_or_none[] = {LAYER_TYPES, SPARSE_FLAGS, ALL_FULL, END};

static const kvf_layer_rule window_listed_beside_convs[] = {
    LAYER_TYPES,
    {.kind = KVF_RULE_NUMBERS,
     .field = "local_layer_ids",
     .picked = KVF_KEEPS_WINDOW | KVF_KEEPS_STATE,
     .others = KVF_KEEPS_FULL | KVF_KEEPS_STATE},
    END,
};

static const kvf_layer_rule window_but_every_6th_beside_convs[] = {
    LAYER_TYPES,
    {.kind = KVF_RULE_PERIOD,
     .fallback = 6,
     .picked = KVF_KEEPS_FULL | KVF_KEEPS_STATE,
     .others = KVF_KEEPS_WINDOW | KVF_KEEPS_STATE},
    END,
};

static const kvf_layer_rule one_of_a_period[] = {
    WORDS("layers_block_type"),
    {.kind = KVF_RULE_OFFSET,
     .field = "attn_layer_period",
     .second = "attn_layer_offset",
     .fallback = 8,
     .second_fallback = 4,
     .picked = KVF_KEEPS_FULL,
     .others = KVF_KEEPS_STATE},
    END,
};

static const kvf_layer_rule lettered[] = {
    {.kind = KVF_RULE_LETTERS, .field = "hybrid_override_pattern"},
    LAYER_TYPES,
    END,
};

static const kvf_layer_rule worded[] = {LAYER_TYPES, END};

static const kvf_layer_rule flagged[] = {
    LAYER_TYPES,
    {.kind = KVF_RULE_FLAGS,
     .field = "hybrid_layer_pattern",
     .picked = KVF_KEEPS_FULL,
     .others = KVF_KEEPS_WINDOW},
    END,
};

static const kvf_layer_rule by_ratio[] = {
    {.kind = KVF_RULE_RATIOS, .field = "compress_ratios", .second = "layer_types"},
    LAYER_TYPES,
    END,
};

static const kvf_layer_rule by_source[] = {
    {.kind = KVF_RULE_SOURCES, .field = "compress_ratios", .second = "kv_source_layer_ids"},
    END,
};

static const kvf_layer_rule in_blocks[] = {{.kind = KVF_RULE_BLOCKS, .field = "block_configs"}, END};

static const kvf_layer_rule listed_from_0[] = {
    {.kind = KVF_RULE_NUMBERS,
     .field = "attn_layer_indices",
     .picked = KVF_KEEPS_FULL,
     .others = KVF_KEEPS_STATE},
    LAYER_TYPES,
    END,
};

static const kvf_layer_rule listed_or_all[] = {
    LAYER_TYPES,
    {.kind = KVF_RULE_NUMBERS,
     .field = "full_attn_idxs",
     .picked = KVF_KEEPS_FULL,
     .others = KVF_KEEPS_STATE},
    ALL_FULL,
    END,
};

static const kvf_layer_rule listed_from_1[] = {
    {.kind = KVF_RULE_NUMBERS,
     .field = "linear_attn_config.full_attn_layers",
     .second = "linear_attn_config.kda_layers",
     .first_number = 1,
     .picked = KVF_KEEPS_FULL,
     .others = KVF_KEEPS_STATE},
    LAYER_TYPES,
    END,
};

static const kvf_layer_rule all_state[] = {{.kind = KVF_RULE_ALL, .picked = KVF_KEEPS_STATE}, END};

static const kvf_layer_rule both_everywhere[] = {
    {.kind = KVF_RULE_ALL, .picked = KVF_KEEPS_FULL | KVF_KEEPS_STATE},
    END,
};

/* ---- what sizes a state ---------------------------------------------------------------------- */

static const kvf_state_fields mamba1 = {
    .kind = KVF_STATE_MAMBA1, .conv = "conv_kernel", .expand = "expand", .state_size = "state_size"};

static const kvf_state_fields jamba_mamba1 = {.kind = KVF_STATE_MAMBA1,
                                              .conv = "mamba_d_conv",
                                              .expand = "mamba_expand",
                                              .state_size = "mamba_d_state"};

static const kvf_state_fields mamba2 = {.kind = KVF_STATE_MAMBA2,
                                        .conv = "conv_kernel",
                                        .heads = "num_heads",
                                        .head_dim = "head_dim",
                                        .groups = "n_groups",
                                        .state_size = "state_size"};

static const kvf_state_fields nemotron_mamba2 = {.kind = KVF_STATE_MAMBA2,
                                                 .conv = "conv_kernel|mamba_d_conv",
                                                 .heads = "mamba_num_heads",
                                                 .head_dim = "mamba_head_dim",
                                                 .groups = "n_groups|mamba_n_groups",
                                                 .state_size = "ssm_state_size",
                                                 .dtype = KVF_DTYPE_F32};

static const kvf_state_fields granite_mamba2 = {.kind = KVF_STATE_MAMBA2,
                                                .conv = "mamba_d_conv",
                                                .expand = "mamba_expand",
                                                .heads = "mamba_n_heads",
                                                .head_dim = "mamba_d_head",
                                                .groups = "mamba_n_groups",
                                                .state_size = "mamba_d_state"};

static const kvf_state_fields zamba_mamba2 = {.kind = KVF_STATE_MAMBA2,
                                              .conv = "mamba_d_conv",
                                              .expand = "mamba_expand",
                                              .heads = "n_mamba_heads",
                                              .head_dim = "mamba_headdim",
                                              .groups = "mamba_ngroups",
                                              .state_size = "mamba_d_state"};

static const kvf_state_fields falcon_mamba2 = {.kind = KVF_STATE_MAMBA2,
                                               .conv = "mamba_d_conv",
                                               .expand = "mamba_expand",
                                               .inner = "mamba_d_ssm",
                                               .inner_or = 1024,
                                               .heads = "mamba_n_heads",
                                               .head_dim = "mamba_d_head",
                                               .groups = "mamba_n_groups",
                                               .state_size = "mamba_d_state"};

static const kvf_state_fields gated_delta = {.kind = KVF_STATE_GDN,
                                             .conv = "linear_conv_kernel_dim",
                                             .heads = "linear_num_value_heads",
                                             .head_dim = "linear_value_head_dim",
                                             .groups = "linear_num_key_heads",
                                             .state_size = "linear_key_head_dim"};

/* The only engine with GigaChat 3.5 keeps this state in single precision. */
static const kvf_state_fields gigachat_delta = {.kind = KVF_STATE_GDN,
                                                .conv = "linear_conv_kernel_dim",
                                                .heads = "linear_num_value_heads",
                                                .head_dim = "linear_value_head_dim",
                                                .groups = "linear_num_key_heads",
                                                .state_size = "linear_key_head_dim",
                                                .dtype = KVF_DTYPE_F32};

/* Engines keep this state in single precision whatever the model's type is. */
static const kvf_state_fields kimi_delta = {
    .kind = KVF_STATE_KDA,
    .conv = "linear_attn_config.short_conv_kernel_size|linear_conv_kernel_dim",
    .heads = "linear_attn_config.num_heads|linear_num_heads",
    .head_dim = "linear_attn_config.head_dim|linear_head_dim",
    .dtype = KVF_DTYPE_F32};

/* In files that transformers saves, head_dim is what is rotated of a head with latents. */
static const kvf_state_fields bailing_delta = {.kind = KVF_STATE_KDA,
                                               .conv = "short_conv_kernel_size|linear_conv_kernel_dim",
                                               .heads = "num_attention_heads|linear_num_heads",
                                               .head_dim = "linear_head_dim>head_dim",
                                               .dtype = KVF_DTYPE_F32};

/* Keys and values have the same number and width: a file that says otherwise contradicts itself. */
static const kvf_state_fields alice_delta = {.kind = KVF_STATE_KDA,
                                             .conv = "linear_conv_kernel_dim",
                                             .heads = "linear_num_key_heads|linear_num_value_heads",
                                             .head_dim = "linear_key_head_dim|linear_value_head_dim",
                                             .dtype = KVF_DTYPE_F32};

/* A state's convolution is not the only one: words of n tokens are embedded and spread by another. */
static const kvf_stream_conv_fields ngram_conv = {.layers = "ple_layer_ids",
                                                  .taps = "ple_conv_kernel_size",
                                                  .taps_or = 4,
                                                  .dilation = "ngram_size",
                                                  .dilation_or = 3,
                                                  .streams = "hc_count",
                                                  .streams_or = 4};

static const kvf_state_fields short_conv = {
    .kind = KVF_STATE_CONV, .conv = "conv_L_cache", .inner = "conv_dim|hidden_size"};

static const kvf_state_fields four_convs = {.kind = KVF_STATE_CONVS,
                                            .conv = "sconv_kernel_size|conv_kernel_size"};

/* ---- indexers -------------------------------------------------------------------------------- */

/* Quantised whatever the cache's type is: 8 bits an element, then the scales. */
#define QUANTISED .dtype = KVF_DTYPE_F8_E4M3, .scaled = true

/* Of models that may have none; of such as always have one; and of such as have one in every fourth layer. */
static const kvf_indexer_fields index_keys = {.width = "index_head_dim", QUANTISED};
static const kvf_indexer_fields index_keys_of_128 = {.width = "index_head_dim", .width_or = 128, QUANTISED};
static const kvf_indexer_fields index_keys_in_every_4th = {
    .width = "index_head_dim", .width_or = 128, .every = 4, QUANTISED};

/* Of layers with entries for several tokens, or whose entries others read. */
static const kvf_indexer_fields index_keys_of_entries = {
    .width = "index_head_dim", .width_or = 128, .by_layer = true, QUANTISED};
static const kvf_indexer_fields index_keys_of_sources = {
    .width = "index_head_dim", .by_layer = true, QUANTISED};

/* A key for several tokens, which weigh differently. */
static const kvf_indexer_fields pooled_index_keys = {
    .width = "index_head_dim", .width_or = 128, .tokens = "index_kpool", .gated = true, QUANTISED};

static const kvf_indexer_fields region_index_keys = {.width = "sparse_config.proxy_dim",
                                                     .width_or = 256,
                                                     .enabled = "sparse_config.enabled",
                                                     .tokens = "sparse_config.region_block_size",
                                                     .tokens_or = 8,
                                                     .gated = true,
                                                     .dtype = KVF_DTYPE_F8_E4M3};

/* The tokens of a key weigh alike. */
static const kvf_indexer_fields mean_index_keys = {.width = "indexer_head_dim",
                                                   .tokens = "indexer_compress_ratio"};

/* A key of each token, in layers that the configuration names. */
static const kvf_indexer_fields named_index_keys = {
    .width = "index_head_dim|sparse_attention_config.sparse_index_dim",
    .width_or = 128,
    .no_values = "sparse_attention_config.sparse_disable_index_value",
    .by_layer = true};

/* ---- names of fields, and heads that differ ---------------------------------------------------- */

static const kvf_size_names most_names = {.layers = "num_hidden_layers",
                                          .hidden = "hidden_size",
                                          .heads = "num_attention_heads|num_heads",
                                          .kv_heads = "num_key_value_heads"};

static const kvf_size_names gpt_names = {.layers = "n_layer|n_layers|num_hidden_layers",
                                         .hidden = "n_embd|n_embed|d_model|hidden_size",
                                         .heads = "n_head|n_heads|num_attention_heads",
                                         .kv_heads = "num_key_value_heads|attn_config.kv_n_heads"};

static const kvf_size_names falcon_names = {.layers = "num_hidden_layers|n_layer",
                                            .hidden = "hidden_size|n_embed",
                                            .heads = "num_attention_heads|n_head",
                                            .kv_heads = "num_kv_heads|n_head_kv"};

static const kvf_size_names step_names = {.layers = "num_hidden_layers",
                                          .hidden = "hidden_size",
                                          .heads = "num_attention_heads",
                                          .kv_heads = "num_key_value_heads|num_attention_groups"};

/* Its number of layers has two meanings elsewhere: this one counts pairs of attentions. */
static const kvf_size_names longcat_names = {.layers = "num_layers",
                                             .hidden = "hidden_size",
                                             .heads = "num_attention_heads",
                                             .kv_heads = "num_key_value_heads"};

static const kvf_window_latent dots_window_latent = {.rank = "swa_kv_lora_rank",
                                                     .rope = "swa_qk_rope_head_dim"};

static const kvf_latent_layers mistral_latents = {.rope_flags = "no_rope_layers",
                                                  .rope_every = "no_rope_layer_interval",
                                                  .rope_every_or = 4,
                                                  .sources = "kv_source_layers"};

static const kvf_size_names gpt_neo_names = {.layers = "num_layers|num_hidden_layers",
                                             .hidden = "hidden_size",
                                             .heads = "num_heads|num_attention_heads",
                                             .kv_heads = "num_key_value_heads"};

static const kvf_size_names xglm_names = {.layers = "num_layers|num_hidden_layers",
                                          .hidden = "d_model|hidden_size",
                                          .heads = "attention_heads|num_attention_heads",
                                          .kv_heads = "num_key_value_heads"};

static const kvf_size_names exaone_names = {.layers = "num_layers|num_hidden_layers",
                                            .hidden = "hidden_size",
                                            .heads = "num_attention_heads",
                                            .kv_heads = "num_key_value_heads"};

static const kvf_size_names chatglm_names = {.layers = "num_layers|num_hidden_layers",
                                             .hidden = "hidden_size",
                                             .heads = "num_attention_heads",
                                             .kv_heads = "multi_query_group_num",
                                             .kv_heads_if = "multi_query_attention"};

/* Every head is a KV head, and no field says otherwise. */
static const kvf_size_names hrm_names = {.layers = "num_hidden_layers",
                                         .hidden = "hidden_size",
                                         .heads = "num_attention_heads",
                                         .kv_heads = "num_attention_heads"};

static const kvf_size_names jetmoe_names = {.layers = "num_hidden_layers",
                                            .hidden = "hidden_size",
                                            .heads = "num_attention_heads",
                                            .kv_heads = "num_key_value_heads",
                                            .head_dim = "kv_channels"};

/* Attention is over the embeddings and the hidden states, side by side. */
static const kvf_size_names zamba_names = {.layers = "num_hidden_layers",
                                           .hidden = "attention_hidden_size",
                                           .heads = "num_attention_heads",
                                           .kv_heads = "num_key_value_heads"};

static const kvf_cycles hrm_cycles = {
    .outer = "H_cycles", .inner = "L_cycles", .stack = "num_layers_per_stack", .outer_or = 2, .inner_or = 3};

static const kvf_repeated_layers dory_repeated = {.passes = "n_recurrent_loops",
                                                  .begin = "n_input_layers",
                                                  .count = "n_recurrent_layers",
                                                  .which = "recurrent_kv_cache_mode",
                                                  .which_last = "last_loop"};

static const kvf_repeated_layers inkling_repeated = {.passes = "loop_num_passes|loop_config.num_passes",
                                                     .begin = "loop_layer_index_start|loop_config.core_start",
                                                     .end = "loop_layer_index_end|loop_config.core_end",
                                                     .passes_or = 3,
                                                     .begin_or = 6,
                                                     .end_or = 18};

static const kvf_other_heads gemma4_full = {.keeps = KVF_KEEPS_FULL,
                                            .kv_heads = "num_global_key_value_heads",
                                            .kv_heads_if = "attention_k_eq_v",
                                            .head_dim = "global_head_dim",
                                            .head_dim_or = 512};

/* Always, without a flag. */
static const kvf_other_heads diffusion_full = {.keeps = KVF_KEEPS_FULL,
                                               .kv_heads = "num_global_key_value_heads",
                                               .head_dim = "global_head_dim",
                                               .head_dim_or = 512};

static const kvf_other_heads mimo_window = {.keeps = KVF_KEEPS_WINDOW,
                                            .query_heads = "swa_num_attention_heads",
                                            .kv_heads = "swa_num_key_value_heads",
                                            .kv_heads_times = 2,
                                            .head_dim = "swa_head_dim",
                                            .v_head_dim = "swa_v_head_dim"};

static const kvf_other_heads step_window = {
    .keeps = KVF_KEEPS_WINDOW,
    .keeps_field = "attention_other_setting.attention_type",
    .query_heads = "num_sliding_attention_heads|attention_other_setting.num_attention_heads",
    .kv_heads = "attention_other_setting.num_attention_groups",
    .head_dim = "attention_other_setting.head_dim"};

static const kvf_other_heads step5_window = {
    .keeps = KVF_KEEPS_WINDOW,
    .keeps_field = "attention_other_setting.attention_type",
    .query_heads = "swa_num_attention_heads|attention_other_setting.num_attention_heads",
    .kv_heads = "attention_other_setting.num_attention_groups",
    .head_dim = "attention_other_setting.head_dim"};

static const kvf_other_heads inkling_window = {.keeps = KVF_KEEPS_WINDOW,
                                               .query_heads = "swa_num_attention_heads",
                                               .kv_heads = "swa_num_key_value_heads",
                                               .head_dim = "swa_head_dim"};

/* ---- what is refused ------------------------------------------------------------------------- */

/* No engine has such a key with more heads. */
static const kvf_supported_field one_index_head[] = {
    {.field = "indexer_kv_heads", .values = "1"},
    {0},
};

static const kvf_supported_field one_region_head[] = {
    {.field = "sparse_config.sparse_indexer_num_k_heads", .values = "1"},
    {0},
};

/* Lightning attention goes by the same name; one engine keeps its state in the model's type, another in F32. */
static const kvf_supported_field bailing_supported[] = {
    {.field = "short_conv_kernel_size", .otherwise = "a model with lightning attention"},
    {.field = "use_mla_nope", .values = "false"},
    {.field = "full_attention_type", .values = "mla"},
    {0},
};

static const kvf_supported_field gigachat_supported[] = {
    {.field = "linear_attention_type", .values = "Qwen3NextGatedDeltaNet"},
    {0},
};

/* Engines have different defaults. */
static const kvf_supported_field loops_given[] = {
    {.field = "loop_num", .otherwise = "an unknown number of loops"},
    {0},
};

/* Engines see by these fields that a model has no latents. */
static const kvf_supported_field no_parts_of_heads[] = {
    {.field = "qk_nope_head_dim", .values = "0", .otherwise = "heads in two parts without a latent"},
    {.field = "qk_rope_head_dim", .values = "0", .otherwise = "heads in two parts without a latent"},
    {0},
};

/* The old name of Falcon's larger models, and their only width: by it engines know that the KV heads count. */
static const kvf_supported_field large_only[] = {
    {.field = "hidden_size|n_embed", .values = "8192"},
    {0},
};

/* Wrappers with the fields of a language model that may have windows, which no engine reads here. */
static const kvf_supported_field no_windows[] = {
    {.field = "use_sliding_window", .values = "false"},
    {0},
};

/* In both directions, only part of the window is behind a token. */
static const kvf_supported_field one_direction[] = {
    {.field = "use_bidirectional_attention", .values = "vision"},
    {0},
};

static const kvf_supported_field head_dim_given[] = {
    {.field = "head_dim", .otherwise = "an unknown size of a head, for engines disagree"},
    {0},
};

/* vLLM has no such models; transformers keeps no keys of indexers for them. */
static const kvf_supported_field dsa_only[] = {
    {.field = "use_dsa", .values = "true"},
    {0},
};

/* Engines have different defaults here, too. */
static const kvf_supported_field recurrent_loops_given[] = {
    {.field = "n_recurrent_loops", .otherwise = "an unknown number of loops"},
    {.field = "recurrent_kv_cache_mode", .values = "per_loop last_loop"},
    {0},
};

/* ---- families -------------------------------------------------------------------------------- */

/* Gemma 4, whose classes differ in the window. */
#define GEMMA_4(types, window_tokens)                                                                        \
    {                                                                                                        \
        .model_types = (types), .attention = KVF_ATTENTION_HEADS, .layers = window_but_every_6th,            \
        .head_dim = 256, .window = (window_tokens), .other = &gemma4_full,                                   \
        .shared_layers = "num_kv_shared_layers", .last_is_full = true                                        \
    }

/* Inkling, whose classes differ in the size of a head that is not given. */
#define INKLING(types, head)                                                                                 \
    {                                                                                                        \
        .model_types = (types), .attention = KVF_ATTENTION_HEADS, .layers = window_listed_beside_convs,      \
        .other = &inkling_window, .window_names = "sliding_window_size|sliding_window",                      \
        .state = &four_convs, .unused = "number_of_conv_states use_sconv", .head_dim = (head), .window = 512 \
    }

/* Inkling 2, through some of whose layers tokens may pass several times. */
#define INKLING_2(types, some)                                                                               \
    {                                                                                                        \
        .model_types = (types), .attention = KVF_ATTENTION_HEADS,                                            \
        .layers = window_but_every_6th_beside_convs, .other = &inkling_window, .repeated = (some),           \
        .window_names = "sliding_window_size|sliding_window", .state = &four_convs,                          \
        .unused = "number_of_conv_states n_layers_per_attn_res_block loop_gate_rank loop_config.gate_rank",  \
        .head_dim = 128, .window = 1024                                                                      \
    }

/* The small language models of DeepSeek-OCR and DeepSeek VL 2, which have the name of those with latents. */
static const kvf_family deepseek_heads = {.attention = KVF_ATTENTION_HEADS,
                                          .layers = all_full,
                                          .supported = no_parts_of_heads,
                                          .unused = "use_mla kv_lora_rank q_lora_rank v_head_dim"};

static const kvf_family families[] = {
    /* Multi-head, grouped-query and multi-query attention, the same in every layer. */
    {.model_types =
         "llama granite granite4_vision granite4_vision_text granitemoe granitemoeshared olmo olmo2 olmoe "
         "flex_olmo cohere phi arcee apertus apertus1p5 apertus1p5_text hyperclovax jais2 nanochat "
         "aria_text deepseek_ocr2_text hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text gpt_neox "
         "gpt_neox_japanese opt biogpt persimmon diffllama internlm2 baichuan xverse telechat3 TeleFLM",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .kv_heads = KVF_AS_MANY_AS_HEADS},
    {.model_types =
         "stablelm nemotron glm4_moe glm4v_moe_text glm_ocr_text ernie4_5_moe ernie4_5_vl_moe_text "
         "emu3_text_model chameleon deepseek orion phi3small param2moe bailing_moe bailing_moe_v2 "
         "PanguEmbedded",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full},
    {.model_types = "internlm3 iquestcoder",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .null_kv_heads = true,
     .head_dim_disputed = 128},
    {.model_types = "sarvam_moe",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .head_dim_disputed = 64},
    {.model_types = "sdar sdar_moe llada2_moe",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .unused = "block_size"},
    {.model_types = "k2_horizon xllm",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .unused = "rope_head_dim"},
    {.model_types = "nanbeige",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .kv_heads = KVF_AS_MANY_AS_HEADS,
     .loops = "num_loops"},
    {.model_types = "hrm_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .names = &hrm_names,
     .cycles = &hrm_cycles,
     .head_dim = 128},
    {.model_types = "iquestloopcoder",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_after_first_loop,
     .window_names = "loop_window_size",
     .window = 64,
     .loops = "loop_num",
     .supported = loops_given},
    {.model_types = "molmo",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .null_kv_heads = true,
     .unused = "embedding_size"},
    {.model_types = "molmo2_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .null_kv_heads = true,
     .unused = "embedding_size rope_scaling_layers",
     .head_dim = 128},
    {.model_types = "Keye KeyeVL1_5 minicpmv minicpmo kimi_audio",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .supported = no_windows,
     .unused = "sliding_window dim_model_base patch_size image_size vision_batch_size "
               "drop_vision_last_layer chunk_input audio_chunk_length kimia_mimo_layers "
               "kimia_mimo_transformer_from_layer_index kimia_adaptor_input_dim"},
    {.model_types = "qwen3_vl_moe_text glm4v_text bitnet",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .null_kv_heads = true},
    {.model_types = "granite_docling granite_docling_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .null_kv_heads = true,
     .kv_heads = 4},
    /* Its window is one of generated tokens: those of the prompt are kept and seen by all. */
    {.model_types = "unlimited_ocr unlimited_ocr_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .null_kv_heads = true,
     .unused = "sliding_window"},
    {.model_types = "glm glm4 hy_v3 solar_open helium grok-1",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .head_dim = 128},
    {.model_types = "qwen3_vl_text seed_oss ernie4_5 paddleocr_vl_text cosmos3_edge_text qwen3_asr_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .null_kv_heads = true,
     .head_dim = 128},
    {.model_types = "gemma", .attention = KVF_ATTENTION_HEADS, .layers = all_full, .head_dim = 256},
    {.model_types = "gpt2 gptj codegen bloom mpt ctrl telechat",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .names = &gpt_names,
     .kv_heads = KVF_AS_MANY_AS_HEADS},
    {.model_types = "gpt_bigcode",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .names = &gpt_names,
     .one_kv_head = "multi_query",
     .kv_heads = KVF_AS_MANY_AS_HEADS},
    {.model_types = "falcon",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .names = &falcon_names,
     .one_kv_head = "multi_query",
     .one_kv_head_not = "new_decoder_architecture",
     .kv_heads = KVF_AS_MANY_AS_HEADS},
    {.model_types = "RefinedWeb",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .names = &falcon_names,
     .supported = large_only},
    {.model_types = "RefinedWebModel",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .names = &falcon_names,
     .one_kv_head = "multi_query",
     .one_kv_head_not = "new_decoder_architecture",
     .kv_heads = KVF_AS_MANY_AS_HEADS},
    {.model_types = "dbrx",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .names = &gpt_names,
     .kv_heads = 1,
     .unused = "ffn_config.hidden_size"},
    {.model_types = "gpt_neo",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .names = &gpt_neo_names,
     .kv_heads = KVF_AS_MANY_AS_HEADS,
     .unused = "window_size attention_layers"},
    {.model_types = "xglm",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .names = &xglm_names,
     .kv_heads = KVF_AS_MANY_AS_HEADS},
    {.model_types = "exaone",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .names = &exaone_names,
     .null_kv_heads = true},
    {.model_types = "chatglm",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .names = &chatglm_names,
     .kv_heads = 1,
     .unused = "kv_channels apply_query_key_layer_scaling"},
    {.model_types = "jetmoe",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .names = &jetmoe_names,
     .head_dim = 128},
    {.model_types = "qwen",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .kv_heads = KVF_AS_MANY_AS_HEADS,
     .unused = "kv_channels"},
    {.model_types = "minicpm",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .unused = "dim_model_base"},
    {.model_types = "step1", .attention = KVF_ATTENTION_HEADS, .layers = all_full, .names = &step_names},
    {.model_types = "step3_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .names = &step_names,
     .kv_heads = 1,
     .head_dim = 256,
     .unused = "share_q_dim moe_layers_enum"},
    {.model_types = "nemotron-nas",
     .attention = KVF_ATTENTION_HEADS,
     .layers = in_blocks,
     .blocks = "block_configs",
     .kv_heads = KVF_AS_MANY_AS_HEADS},

    /* One window for all layers, or none. */
    {.model_types = "mistral ministral voxtral_realtime_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_window,
     .null_kv_heads = true,
     .window = 4096},
    {.model_types = "mixtral phimoe phi4_multimodal",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_window,
     .null_kv_heads = true},
    {.model_types = "phi4mm",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_window,
     .unused = "embd_layer embd_layer.image_embd_layer embd_layer.image_embd_layer.crop_size "
               "embd_layer.audio_embd_layer speech_lora.layer vision_lora.layer"},
    {.model_types = "starcoder2 qwen3_omni_moe_text", .attention = KVF_ATTENTION_HEADS, .layers = all_window},
    {.model_types = "ministral3",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_window,
     .null_kv_heads = true,
     .head_dim = 128},
    {.model_types = "phi3 phi3_v",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_window,
     .kv_heads = KVF_AS_MANY_AS_HEADS},
    {.model_types = "doge",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_window,
     .kv_heads = KVF_AS_MANY_AS_HEADS,
     .unused = "keep_window_size"},
    {.model_types = "qwen3_moe",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_window,
     .window = 4096,
     .window_switch = "use_sliding_window"},

    /* Full attention, with an indexer in some layers. (Checkpoints of MiniMax M3 name M2 as their text's type.) */
    {.model_types = "minimax_m2",
     .attention = KVF_ATTENTION_HEADS,
     .layers = sparse_by_flag_or_none,
     .indexer = &named_index_keys,
     .unused = "index_block_size sparse_attention_config.sparse_block_size "
               "sparse_attention_config.sparse_num_index_heads",
     .head_dim = 128},
    {.model_types = "minimax_m3_vl minimax_m3_text minimax_m3_vl_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = sparse_by_flag,
     .indexer = &named_index_keys,
     .unused = "index_block_size sparse_attention_config.sparse_block_size "
               "sparse_attention_config.sparse_num_index_heads",
     .head_dim = 128},

    /* Windows in some layers. */
    {.model_types = "smollm3",
     .attention = KVF_ATTENTION_HEADS,
     .layers = worded,
     .null_kv_heads = true,
     .window_switch = "use_sliding_window"},
    {.model_types = "mellum",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .head_dim = 128,
     .window = 1024},
    {.model_types = "beam", .attention = KVF_ATTENTION_HEADS, .layers = worded, .head_dim_disputed = 128},
    {.model_types = "muse_spark muse_spark_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = worded,
     .supported = head_dim_given},
    {.model_types = "muse_glimmer muse_glimmer_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = worded,
     .head_dim = 128,
     .window = 2048},
    {.model_types = "flint",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .window_switch = "use_sliding_window",
     .window_switch_or = true,
     .head_dim = 128,
     .window = 513},
    {.model_types = "kolibri1",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_but_every_5th,
     .head_dim = 128,
     .window = 513},
    {.model_types = "laguna",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .head_dim = 128,
     .window = 512},
    {.model_types = "dots1",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_above_62,
     .null_kv_heads = true,
     .kv_heads = 32,
     .window = 4096},
    {.model_types = "cohere_compass_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = all_full,
     .kv_heads = KVF_AS_MANY_AS_HEADS,
     .window = 4096},
    {.model_types = "qwen2 mimo dots_ocr",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_above_28,
     .null_kv_heads = true,
     .window = 4096,
     .window_switch = "use_sliding_window"},
    {.model_types = "qwen2_moe",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_but_every_2nd_below_28,
     .window = 4096,
     .window_switch = "use_sliding_window"},
    {.model_types = "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_above_80,
     .null_kv_heads = true,
     .window = 4096,
     .window_switch = "use_sliding_window"},
    {.model_types = "qwen2_5_omni_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_above_28,
     .null_kv_heads = true,
     .window = 32768,
     .window_switch = "use_sliding_window"},
    {.model_types = "qwen3 isaac",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_above_28,
     .null_kv_heads = true,
     .head_dim = 128,
     .window = 4096,
     .window_switch = "use_sliding_window"},
    {.model_types = "gemma2 vaultgemma",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_but_every_2nd,
     .head_dim = 256,
     .window = 4096},
    {.model_types = "gemma3 gemma3_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_but_every_6th,
     .heads = 8,
     .kv_heads = 4,
     .head_dim = 256,
     .window = 4096},
    {.model_types = "gemma3n gemma3n_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_but_every_5th,
     .heads = 8,
     .kv_heads = 2,
     .head_dim = 256,
     .window = 512,
     .shared_layers = "num_kv_shared_layers",
     .shared_layers_or = 15},
    GEMMA_4("gemma4 gemma4_text", 512),
    GEMMA_4("gemma4_unified gemma4_unified_text", 1024),
    {.model_types = "diffusion_gemma diffusion_gemma_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_but_every_6th,
     .other = &diffusion_full,
     .supported = one_direction,
     .last_is_full = true,
     .head_dim = 256,
     .window = 512},
    {.model_types = "gpt_oss",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_but_every_2nd,
     .null_kv_heads = true,
     .head_dim = 64,
     .window = 128,
     .dtype = KVF_DTYPE_BF16},
    {.model_types = "cohere2 olmo3",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_but_every_4th,
     .kv_heads = KVF_AS_MANY_AS_HEADS,
     .window = 4096},
    {.model_types = "cohere2_moe",
     .attention = KVF_ATTENTION_HEADS,
     .layers = worded,
     .kv_heads = KVF_AS_MANY_AS_HEADS,
     .head_dim = 128,
     .window = 4096},
    {.model_types = "afmoe",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_but_every_4th_global,
     .kv_heads = KVF_AS_MANY_AS_HEADS,
     .head_dim = 128,
     .window = 1024},
    {.model_types = "cwm",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_but_first_of_4,
     .head_dim = 128,
     .window = 8192},
    {.model_types = "granite_swa",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_but_first_of_4,
     .null_kv_heads = true,
     .window = 128},
    {.model_types = "granitemoe_swa",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_but_first_of_4,
     .kv_heads = KVF_AS_MANY_AS_HEADS,
     .window = 128},
    {.model_types = "spark2_5",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_but_every_4th,
     .unused = "headwise_attn_output_gate",
     .head_dim = 256,
     .window = 512},
    {.model_types = "dory",
     .attention = KVF_ATTENTION_HEADS,
     .layers = worded,
     .supported = recurrent_loops_given,
     .repeated = &dory_repeated,
     .unused = "n_output_layers",
     .head_dim = 256,
     .window = 1024},
    {.model_types = "exaone4 exaone_moe",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_but_every_4th,
     .window = 4096},

    {.model_types = "mimo_v2_flash mimo_v2",
     .attention = KVF_ATTENTION_HEADS,
     .layers = flagged,
     .other = &mimo_window,
     /* Of files with both, engines read the first one; transformers adds 1 to the other, for the query. */
     .window_names = "sliding_window_size>sliding_window",
     .v_head_dim = "v_head_dim",
     .head_dim = 192,
     .unused = "attention_chunk_size"},
    {.model_types = "step3p5",
     .attention = KVF_ATTENTION_HEADS,
     .layers = worded,
     .names = &step_names,
     .other = &step_window,
     .draft_layers = "num_nextn_predict_layers",
     .unused = "use_rope_layers use_head_wise_attn_gate attention_other_setting.true_head_dim",
     .head_dim = 128},
    {.model_types = "step5 step5_vl",
     .attention = KVF_ATTENTION_HEADS,
     .layers = window_but_every_2nd,
     .names = &step_names,
     .other = &step5_window,
     .indexer = &region_index_keys,
     .supported = one_region_head,
     .draft_layers = "num_nextn_predict_layers",
     .unused = "use_rope_layers use_head_wise_attn_gate layer_types_with_mtp sparse_config.index_tp_size "
               "sparse_config.num_provider_groups sparse_config.sparse_indexer_num_heads "
               "sparse_config.sparse_indexer_rope_dim"},

    /* Chunks in some layers. */
    {.model_types = "llama4 llama4_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = chunks_with_rope,
     .null_kv_heads = true,
     .head_dim = 128,
     .chunk = 8192},

    /* One latent for all heads; with an indexer key where there is an index_head_dim, or always. */
    {.model_types = "deepseek_v2",
     .attention = KVF_ATTENTION_LATENT,
     .layers = all_full,
     .indexer = &index_keys,
     .latents_if = "use_mla",
     .without_latents = &deepseek_heads},
    {.model_types = "deepseek_v3 kimi_k2 kimi_vl dots_vlm pangu_ultra_moe sarvam_mla "
                    "glm4_moe_lite axk1 mistral4 youtu",
     .attention = KVF_ATTENTION_LATENT,
     .layers = all_full,
     .indexer = &index_keys},
    {.model_types = "deepseek_v32 glm_moe_dsa axk2",
     .attention = KVF_ATTENTION_LATENT,
     .layers = all_full,
     .indexer = &index_keys_of_128},
    {.model_types = "hy_v4 hy_v4_vl hy_v4_vl_text",
     .attention = KVF_ATTENTION_LATENT,
     .layers = all_full,
     .indexer = &index_keys_in_every_4th},

    {.model_types = "longcat_flash",
     .attention = KVF_ATTENTION_LATENT,
     .layers = all_full,
     .names = &longcat_names,
     .caches = 2,
     .unused = "num_hidden_layers ffn_hidden_size expert_ffn_hidden_size mla_scale_kv_lora"},
    {.model_types = "mistral_large4 mistral_large4_text",
     .attention = KVF_ATTENTION_LATENT,
     .layers = all_full,
     .indexer = &index_keys_of_128,
     .latent_layers = &mistral_latents},
    {.model_types = "dots3_note dots3_note_text",
     .attention = KVF_ATTENTION_LATENT,
     .layers = worded,
     .indexer = &index_keys_of_128,
     .window_latent = &dots_window_latent,
     .window_names = "sliding_window_size|sliding_window",
     .supported = dsa_only,
     .unused =
         "swa_num_attention_heads swa_num_key_value_heads swa_v_head_dim swa_qk_nope_head_dim swa_head_dim "
         "swa_q_lora_rank",
     .window = 512},

    /* One latent for all heads in a window, and in some layers also one for several tokens. */
    {.model_types = "deepseek_v4",
     .attention = KVF_ATTENTION_COMPRESSED,
     .layers = by_ratio,
     .indexer = &index_keys_of_entries,
     .head_dim = 512,
     .window = 128,
     .unused = "q_lora_rank o_lora_rank o_groups index_n_heads num_hash_layers dspark_block_size "
               "dspark_markov_rank dspark_target_layer_ids vision_n_layers vision_dim vision_n_heads "
               "vision_inter_dim vision_patch_size"},
    {.model_types = "deepseek_v41 deepseek_v41_text",
     .attention = KVF_ATTENTION_COMPRESSED,
     .layers = by_source,
     .indexer = &index_keys_of_sources,
     .unused = "q_lora_rank o_lora_rank o_groups index_n_heads num_hash_layers layer_types "
               "index_source_layer_ids candidate_source_layer_id candidate_block_size engram_layer_ids "
               "engram_head_dim engram_n_heads dspark_block_size dspark_markov_rank dspark_target_layer_ids"},

    /* State in all layers. */
    {.model_types = "mamba falcon_mamba", .layers = all_state, .state = &mamba1},
    {.model_types = "mamba2", .layers = all_state, .state = &mamba2},

    /* Attention and state. */
    {.model_types = "jamba",
     .attention = KVF_ATTENTION_HEADS,
     .layers = one_of_a_period,
     .null_kv_heads = true,
     .state = &jamba_mamba1},
    {.model_types = "nemotron_h",
     .attention = KVF_ATTENTION_HEADS,
     .layers = lettered,
     .null_kv_heads = true,
     .head_dim = 128,
     .state = &nemotron_mamba2},
    {.model_types = "granitemoehybrid",
     .attention = KVF_ATTENTION_HEADS,
     .layers = worded,
     .kv_heads = KVF_AS_MANY_AS_HEADS,
     .state = &granite_mamba2},
    {.model_types = "bamba",
     .attention = KVF_ATTENTION_HEADS,
     .layers = listed_from_0,
     .null_kv_heads = true,
     .state = &granite_mamba2},
    {.model_types = "falcon_h1",
     .attention = KVF_ATTENTION_HEADS,
     .layers = both_everywhere,
     .null_kv_heads = true,
     .state = &falcon_mamba2},
    {.model_types = "zamba2",
     .attention = KVF_ATTENTION_HEADS,
     .layers = worded,
     .names = &zamba_names,
     .kv_heads = KVF_AS_MANY_AS_HEADS,
     .unused = "hybrid_layer_ids adapter_rank lora_rank kv_channels num_query_groups num_mem_blocks "
               "conv_dimension expansion_factor state_size use_shared_attention_adapter",
     .state = &zamba_mamba2},
    {.model_types = "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text "
                    "interns2_mobius interns2_mobius_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = state_but_every_4th,
     .head_dim = 256,
     .state = &gated_delta},
    {.model_types = "qwen4_exp qwen4_exp_text",
     .attention = KVF_ATTENTION_HEADS,
     .layers = state_but_every_4th,
     .state = &gated_delta,
     .indexer = &mean_index_keys,
     .supported = one_index_head,
     .stream_conv = &ngram_conv,
     .unused =
         "indexer_n_heads indexer_budget ple_embed_dim heads_per_ngram hc_lowrank number_of_conv_states",
     .head_dim = 256},
    {.model_types = "olmo_hybrid",
     .attention = KVF_ATTENTION_HEADS,
     .layers = state_but_every_4th,
     .kv_heads = KVF_AS_MANY_AS_HEADS,
     .state = &gated_delta},
    {.model_types = "lfm2", .attention = KVF_ATTENTION_HEADS, .layers = listed_or_all, .state = &short_conv},
    {.model_types = "lfm2_moe", .attention = KVF_ATTENTION_HEADS, .layers = worded, .state = &short_conv},
    {.model_types = "lfm3",
     .attention = KVF_ATTENTION_HEADS,
     .layers = worded,
     .state = &short_conv,
     .head_dim = 128,
     .window = 256},
    {.model_types = "lara_mini",
     .attention = KVF_ATTENTION_HEADS,
     .layers = worded,
     .state = &gated_delta,
     .head_dim = 128,
     .window = 512},
    INKLING("inkling_text", 128),
    INKLING("inkling_model inkling_mm_model", 0),
    INKLING_2("inkling2 inkling2_text", NULL),
    INKLING_2("inkling2_loop inkling2_loop_text", &inkling_repeated),
    {.model_types = "kimi_linear kimi_k3",
     .attention = KVF_ATTENTION_LATENT,
     .layers = listed_from_1,
     .state = &kimi_delta,
     .indexer = &index_keys},
    {.model_types = "bailing_hybrid bailing_moe_v3_vl",
     .attention = KVF_ATTENTION_LATENT,
     .layers = delta_but_last_of_group,
     .state = &bailing_delta,
     .supported = bailing_supported,
     .unused = "num_key_value_heads group_norm_size max_window_layers"},
    {.model_types = "gigachat3_5",
     .attention = KVF_ATTENTION_LATENT,
     .layers = delta_but_listed,
     .state = &gigachat_delta,
     .supported = gigachat_supported,
     .unused = "head_dim num_key_value_heads"},
    {.model_types = "alice_ai",
     .attention = KVF_ATTENTION_HEADS,
     .layers = worded,
     .state = &alice_delta,
     .unused = "block_attn_res_block_size"},
    {.model_types = "glm5_next glm5_next_text",
     .attention = KVF_ATTENTION_LATENT,
     .layers = delta_but_every_4th,
     .state = &kimi_delta,
     .indexer = &pooled_index_keys},
};

bool kvf_config_is_among(const char *word, const char *words) {
    static const char between[] = " " KVF_NAME_ENDS;
    size_t length = strlen(word);
    for (const char *p = words; *p; p += strspn(p, between)) {
        size_t here = strcspn(p, between);
        if (here == length && memcmp(p, word, length) == 0)
            return true;
        p += here;
    }
    return false;
}

const char *kvf_config_family(uint32_t i) {
    return i < sizeof families / sizeof families[0] ? families[i].model_types : NULL;
}

const kvf_size_names *kvf_family_names(const kvf_family *family) {
    return family->names ? family->names : &most_names;
}

const char *kvf_family_window_names(const kvf_family *family) {
    return family->window_names ? family->window_names : "sliding_window";
}

const char *kvf_family_head_dim_names(const kvf_family *family) {
    const char *names = kvf_family_names(family)->head_dim;
    return names ? names : "head_dim|attention_head_dim";
}

const kvf_family *kvf_family_find(const char *model_type) {
    for (size_t i = 0; i < sizeof families / sizeof families[0]; i++)
        if (kvf_config_is_among(model_type, families[i].model_types))
            return &families[i];
    return NULL;
}
