/*
 * Notes on fields that may decide a size and are not read: otherwise a configuration by a newer writer, or of a family
 * with a new feature, would be misread silently.
 *
 * A field is judged by its name. Fields that are read for the family, and fields known to decide no size, are listed
 * here; any other field is noted if its name contains one of a few words.
 */
#include <stdio.h>

#include "model/config.h"

/* ---- names ----------------------------------------------------------------------------------- */

/* The condition under which a row of names applies. */
typedef enum condition {
    ALWAYS,
    LATENT,     /* the model has attention with latents of each token */
    COMPRESSED, /* the model has latents that several tokens share */
    INDEXERS,   /* layers may have indexers */
    MARKED,     /* and fields of their own say which of them */
    STATE,      /* the model has a recurrent state */
    CHUNKS,     /* the family has chunks in some layers, or in some models */
    NO_WINDOW,  /* no layer of this model has a window */
    LISTED,     /* the configuration says of each layer what it keeps */
} condition;

typedef struct name_row {
    condition when;
    const char *names;
} name_row;

/* The fields that are read for every family. A family's own fields are in its row. */
static const name_row read_names[] = {
    {ALWAYS, "layer_types layers_block_type per_layer_config"},
    {CHUNKS, "attention_chunk_size"},
    {LATENT, "kv_lora_rank qk_rope_head_dim"},
    {MARKED, "indexer_types index_topk_freq index_topk_pattern index_skip_topk_offset"},
    {COMPRESSED, "qk_rope_head_dim compress_rates compress_rate_csa compress_rate_hca"},
    {STATE, "mamba_ssm_cache_dtype mamba_ssm_dtype"},
};

static const name_row harmless_names[] = {
    {ALWAYS, "n_group topk_group num_expert_group ep_size moe_layer_freq num_nextn_predict_layers"},
    {ALWAYS, "hidden_size_per_layer_input laurel_rank activation_sparsity_pattern rotary_dim clip_qkv"},
    {ALWAYS, "chunk_size_feed_forward num_beam_groups no_repeat_ngram_size encoder_no_repeat_ngram_size"},
    {ALWAYS, "output_hidden_states shared_intermediate_size interleave_moe_layer_step"},
    {ALWAYS, "serialize_explicit_per_layer_config allow_global_per_layer_attribute_access"},
    {ALWAYS, "layer_rope_theta num_attention_heads_per_layer num_dense_layers ffn_dim word_embed_proj_dim"},
    {ALWAYS, "layerdrop ffn_hidden_size scale_attn_by_inverse_layer_idx"},
    {ALWAYS, "intermediate_multiple_size model_parallel_size"},
    {ALWAYS, "block_dim block_ff_dim block_auto_adjust_ff_dim conv_dim_out conv_use_xavier_init"},
    {LATENT, "q_lora_rank qk_nope_head_dim qk_head_dim v_head_dim use_grouped_topk"},
    {INDEXERS, "index_n_heads"},
    {STATE, "expand mamba_expand chunk_size mamba_chunk_size time_step_rank mamba_dt_rank mamba_hidden_act"},
    {STATE, "use_mamba_kernels use_mambapy ssm_in_multiplier ssm_out_multiplier n_layer"},
    {NO_WINDOW, "max_window_layers use_sliding_window sliding_window_pattern _sliding_window_pattern"},
    {LISTED, "sliding_window sliding_window_pattern prefix_dense_sliding_window_pattern"},
    {LISTED, "no_rope_layers no_rope_layer_interval"},
};

/* A field whose name contains one of these decides no size, whatever else its name contains. */
static const char *const harmless_words[] = {
    "intermediate_size", "vocab_size", "norm",    "mlp",     "moe",         "expert", "bias",
    "multiplier",        "mtp",        "lm_head", "dropout", "initializer",
};

static const char *const size_words[] = {
    "head",      "dim",    "size",  "rank",  "window", "layer", "conv",  "state",   "kv",
    "key_value", "expand", "chunk", "group", "mamba",  "ssm",   "width", "pattern", "interval",
};

/* Inner objects that do not describe the cache. */
static const char *const other_objects[] = {"vision", "visual", "vq_config",    "audio", "tts",
                                            "slice",  "rope",   "quantization", "label", "generation"};

static bool has_word(const char *name, const char *const *words, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (strstr(name, words[i]))
            return true;
    return false;
}
#define HAS_WORD(name, words) has_word(name, words, sizeof(words) / sizeof *(words))

/* ---- what a field is ------------------------------------------------------------------------- */

/* Whether the family's rules can give a layer `what`. */
static bool rules_give(const kvf_family *family, kvf_keeps what) {
    for (const kvf_layer_rule *rule = family->layers; rule->kind != KVF_RULE_END; rule++)
        if ((rule->picked | rule->others) & what)
            return true;
    return false;
}

/* Whether layers of this model keep `what`, or those of another model of its family. */
static bool may_keep(const kvf_config *config, kvf_keeps what) {
    return kvf_config_has(config, what) || rules_give(config->family, what);
}

static bool holds(const kvf_config *config, condition when) {
    const kvf_family *family = config->family;
    struct json_object *list;
    switch (when) {
    case ALWAYS:
        return true;
    case LATENT:
        return family->attention == KVF_ATTENTION_LATENT;
    case COMPRESSED:
        return family->attention == KVF_ATTENTION_COMPRESSED;
    case INDEXERS:
        return family->indexer != NULL;
    case MARKED:
        return family->indexer && !family->indexer->by_layer;
    case STATE:
        return family->state != NULL;
    case CHUNKS:
        return may_keep(config, KVF_KEEPS_CHUNK);
    case NO_WINDOW:
        return !kvf_config_has(config, KVF_KEEPS_WINDOW);
    case LISTED:
        return kvf_field_find(&config->fields, "layer_types|layers_block_type", &list, NULL) == KVF_OK &&
               list;
    }
    return false;
}

static bool is_in_rows(const kvf_config *config, const char *name, const name_row *rows, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (holds(config, rows[i].when) && kvf_config_is_among(name, rows[i].names))
            return true;
    return false;
}

static bool is_one(const char *name, const char *names) {
    return names && kvf_config_is_among(name, names);
}

static bool is_of_other_heads(const kvf_other_heads *other, const char *name) {
    return other && (is_one(name, other->keeps_field) || is_one(name, other->query_heads) ||
                     is_one(name, other->kv_heads) || is_one(name, other->head_dim) ||
                     is_one(name, other->v_head_dim));
}

static bool is_supported_only(const kvf_supported_field *row, const char *name) {
    while (row && row->field && strcmp(row->field, name) != 0)
        row++;
    return row && row->field;
}

static bool is_of_family(const kvf_config *config, const char *name) {
    const kvf_family *family = config->family;
    const kvf_size_names *names = kvf_family_names(family);
    if (is_one(name, names->layers) || is_one(name, names->hidden) || is_one(name, names->heads) ||
        is_one(name, names->kv_heads) || is_one(name, kvf_family_head_dim_names(family)) ||
        is_of_other_heads(family->other, name) ||
        (may_keep(config, KVF_KEEPS_WINDOW) && is_one(name, kvf_family_window_names(family))))
        return true;
    for (const kvf_layer_rule *rule = family->layers; rule->kind != KVF_RULE_END; rule++)
        if (is_one(name, rule->field) || is_one(name, rule->second))
            return true;
    if (is_one(name, family->window_switch) || is_one(name, family->v_head_dim) ||
        is_one(name, family->one_kv_head) || is_one(name, family->one_kv_head_not) ||
        is_one(name, family->shared_layers) || is_one(name, family->loops) ||
        is_supported_only(family->supported, name))
        return true;
    const kvf_indexer_fields *indexer = family->indexer;
    if (indexer && (is_one(name, indexer->width) || is_one(name, indexer->enabled) ||
                    is_one(name, indexer->no_values) || is_one(name, indexer->tokens)))
        return true;
    const kvf_cycles *cycles = family->cycles;
    if (cycles && (is_one(name, cycles->outer) || is_one(name, cycles->inner) || is_one(name, cycles->stack)))
        return true;
    const kvf_repeated_layers *repeated = family->repeated;
    if (repeated &&
        (is_one(name, repeated->passes) || is_one(name, repeated->begin) || is_one(name, repeated->end) ||
         is_one(name, repeated->count) || is_one(name, repeated->which)))
        return true;
    const kvf_window_latent *latent = family->window_latent;
    if (latent && (is_one(name, latent->rank) || is_one(name, latent->rope)))
        return true;
    const kvf_latent_layers *layers = family->latent_layers;
    if (layers && (is_one(name, layers->rope_flags) || is_one(name, layers->rope_every) ||
                   is_one(name, layers->sources)))
        return true;
    const kvf_stream_conv_fields *streams = family->stream_conv;
    if (streams && (is_one(name, streams->layers) || is_one(name, streams->taps) ||
                    is_one(name, streams->dilation) || is_one(name, streams->streams)))
        return true;
    const kvf_state_fields *state = family->state;
    return state &&
           (is_one(name, state->conv) || is_one(name, state->expand) || is_one(name, state->inner) ||
            (state->expand && is_one(name, "hidden_size")) || is_one(name, state->heads) ||
            is_one(name, state->head_dim) || is_one(name, state->groups) || is_one(name, state->state_size));
}

kvf_field_use kvf_config_field_use(const kvf_config *config, const char *name) {
    if (is_of_family(config, name) ||
        is_in_rows(config, name, read_names, sizeof read_names / sizeof *read_names))
        return KVF_FIELD_READ;
    const char *dot = strrchr(name, '.');
    const char *last = dot ? dot + 1 : name;
    if (is_one(name, config->family->unused) ||
        is_in_rows(config, last, harmless_names, sizeof harmless_names / sizeof *harmless_names) ||
        HAS_WORD(last, harmless_words) || !HAS_WORD(last, size_words))
        return KVF_FIELD_NO_SIZE;
    return KVF_FIELD_UNREAD;
}

/* ---- notes ----------------------------------------------------------------------------------- */

/* null, false, 0 and empty values say that the model does not have the feature. */
static bool says_nothing(struct json_object *value) {
    switch (json_object_get_type(value)) {
    case json_type_null:
        return true;
    case json_type_boolean:
    case json_type_int:
    case json_type_double:
        return json_object_get_double(value) == 0;
    case json_type_string:
        return json_object_get_string_len(value) == 0;
    case json_type_array:
        return json_object_array_length(value) == 0;
    case json_type_object:
        return json_object_object_length(value) == 0;
    }
    return false;
}

/* A name from outside may contain any character but a zero byte; a note must be one line. */
static void make_printable(char *text) {
    for (; *text; text++)
        if ((unsigned char)*text < ' ' || (unsigned char)*text > '~')
            *text = '?';
}

static bool is_noted(const kvf_notes *notes, const char *field) {
    size_t length = strlen(field);
    for (uint32_t i = 0; i < notes->count; i++)
        if (strncmp(notes->text[i], field, length) == 0 && notes->text[i][length] == ' ')
            return true;
    return false;
}

void kvf_config_note_unread(kvf_config *config, const char *prefix, const char *name,
                            struct json_object *value) {
    kvf_notes *notes = &config->notes;
    char field[128];
    (void)snprintf(field, sizeof field, "%.60s%.60s", prefix, name);
    make_printable(field);
    if (says_nothing(value) || notes->count == KVF_MODEL_MAX_NOTES || is_noted(notes, field))
        return;
    char *note = notes->text[notes->count++];
    (void)snprintf(note, KVF_MODEL_NOTE_BYTES, "%s is %.27s: it may decide a size, but is not read for %.32s",
                   field, kvf_value_written(value, 24).text, config->fields.family);
    make_printable(note);
}

/* Notes the fields of `object`, whose path from the configuration is `path`: "" or "a.". */
static void note_object(kvf_config *config, struct json_object *object, const char *path, int depth) {
    json_object_object_foreach(object, name, value) {
        char inner[128];
        int length = snprintf(inner, sizeof inner, "%s%s", path, name);
        kvf_field_use use = kvf_config_field_use(config, inner);
        if (use == KVF_FIELD_UNREAD)
            kvf_config_note_unread(config, config->fields.prefix, inner, value);
        else if (use == KVF_FIELD_NO_SIZE && json_object_is_type(value, json_type_object) && depth < 3 &&
                 length < (int)sizeof inner - 1 && !HAS_WORD(name, other_objects)) {
            inner[length] = '.';
            inner[length + 1] = '\0';
            note_object(config, value, inner, depth + 1);
        }
    }
}

/* Notes if a quantised checkpoint asks for a quantised cache. */
static void note_quantised_cache(kvf_config *config, const kvf_fields *fields) {
    struct json_object *quantisation = NULL;
    if (config->options.cache_dtype ||
        !json_object_object_get_ex(fields->object, "quantization_config", &quantisation) ||
        !json_object_is_type(quantisation, json_type_object))
        return;
    char prefix[sizeof fields->prefix + sizeof "quantization_config."];
    (void)snprintf(prefix, sizeof prefix, "%squantization_config.", fields->prefix);
    json_object_object_foreach(quantisation, name, value) {
        if (strstr(name, "kv_cache"))
            kvf_config_note_unread(config, prefix, name, value);
    }
}

void kvf_config_note_unread_fields(kvf_config *config) {
    note_object(config, config->fields.object, "", 0);
    note_quantised_cache(config, &config->fields);
    const kvf_fields root = {.object = config->root};
    if (config->root != config->fields.object)
        note_quantised_cache(config, &root);
}
