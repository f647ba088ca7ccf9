/*
 * What each layer keeps: a family's rules, tried in order, over the fields of a configuration.
 */
#include <stdio.h>

#include "model/config.h"

static const struct {
    const char *word;
    kvf_keeps keeps;
} words[] = {
    {"full_attention", KVF_KEEPS_FULL},
    {"attention", KVF_KEEPS_FULL},
    {"indexed_attention", KVF_KEEPS_FULL},
    {"deepseek_sparse_attention", KVF_KEEPS_FULL},
    {"qwen_sparse_attention", KVF_KEEPS_FULL},
    {"minimax_m3_sparse", KVF_KEEPS_FULL | KVF_KEEPS_INDEXER},
    {"sliding_attention", KVF_KEEPS_WINDOW},
    {"reference_sliding_attention", KVF_KEEPS_FULL}, /* a window of generated tokens; the prompt is kept */
    {"compressed_sparse_attention", KVF_KEEPS_WINDOW | KVF_KEEPS_SPARSE},
    {"heavily_compressed_attention", KVF_KEEPS_WINDOW | KVF_KEEPS_HEAVY},
    {"chunked_attention", KVF_KEEPS_CHUNK},
    {"linear_attention", KVF_KEEPS_STATE},
    {"mamba", KVF_KEEPS_STATE},
    {"mamba2", KVF_KEEPS_STATE},
    {"conv", KVF_KEEPS_STATE},
    {"hybrid", KVF_KEEPS_FULL | KVF_KEEPS_STATE},
    {"hybrid_sliding", KVF_KEEPS_WINDOW | KVF_KEEPS_STATE},
    {"mlp", KVF_KEEPS_NOTHING},
    {"moe", KVF_KEEPS_NOTHING},
};

static const struct {
    char letter;
    kvf_keeps keeps;
} letters[] = {
    {'M', KVF_KEEPS_STATE},
    {'*', KVF_KEEPS_FULL},
    {'-', KVF_KEEPS_NOTHING},
    {'E', KVF_KEEPS_NOTHING},
};

typedef struct ratio_row {
    uint32_t tokens;
    kvf_keeps keeps;
} ratio_row;

/* How many tokens share an entry: 1 is no compression, or one that keeps an entry for each token. */
static const ratio_row ratios[] = {
    {0, KVF_KEEPS_WINDOW},
    {1, KVF_KEEPS_WINDOW},
    {KVF_SPARSE_TOKENS, KVF_KEEPS_WINDOW | KVF_KEEPS_SPARSE},
    {KVF_HEAVY_TOKENS, KVF_KEEPS_WINDOW | KVF_KEEPS_HEAVY},
};
static const ratio_row source_ratios[] = {
    {0, KVF_KEEPS_WINDOW},
    {1, KVF_KEEPS_WINDOW | KVF_KEEPS_EACH},
    {KVF_PAIR_TOKENS, KVF_KEEPS_WINDOW | KVF_KEEPS_PAIR},
};

/* ---- how many layers ------------------------------------------------------------------------- */

/* Makes room for `count` layers, or checks that `count` is the number already known. */
static kvf_status settle_count(kvf_config *config, const char *field, size_t count) {
    if (config->layer_count && count != config->layer_count)
        return kvf_fail(KVF_E_INVALID, "%s%.*s describes %zu layers, but %s is %u", config->fields.prefix,
                        (int)strcspn(field, KVF_NAME_ENDS), field, count,
                        kvf_field_name(&config->fields, kvf_family_names(config->family)->layers).text,
                        config->layer_count);
    if (count == 0 || count > KVF_MODEL_MAX_LAYERS)
        return kvf_fail(KVF_E_RANGE, "%s%.*s describes %zu layers; allowed: 1 to %u", config->fields.prefix,
                        (int)strcspn(field, KVF_NAME_ENDS), field, count, KVF_MODEL_MAX_LAYERS);
    config->layer_count = (uint32_t)count;
    if (!config->keeps)
        config->keeps = kvf_alloc0(count, sizeof *config->keeps);
    return config->keeps ? KVF_OK : kvf_nomem("the layers of a configuration");
}

/* A rule that does not imply the number of layers needs the field that says it. */
static kvf_status need_count(const kvf_config *config) {
    return config->layer_count ? KVF_OK
                               : kvf_field_missing(&config->fields, kvf_family_names(config->family)->layers);
}

/* The layers that a list describes, without those after the model's own that only predict further tokens. */
static kvf_status count_described(const kvf_config *config, struct json_object *list, size_t *count) {
    const char *field = config->family->draft_layers;
    uint32_t draft = 0;
    bool given = false;
    kvf_status status =
        field ? kvf_field_number(&config->fields, field, 0, KVF_MODEL_MAX_LAYERS, &given, &draft) : KVF_OK;
    *count = json_object_array_length(list);
    if (config->layer_count && *count == (size_t)config->layer_count + draft)
        *count = config->layer_count;
    return status;
}

/* ---- rules ----------------------------------------------------------------------------------- */

/* Each function sets `applied` when it has decided about all layers. */

bool kvf_config_word_keeps(const char *word, kvf_keeps *keeps) {
    for (size_t w = 0; w < sizeof words / sizeof words[0]; w++)
        if (strcmp(word, words[w].word) == 0) {
            *keeps = words[w].keeps;
            return true;
        }
    return false;
}

static kvf_status keep_word(kvf_config *config, const char *field, struct json_object *list, uint32_t i) {
    struct json_object *element = json_object_array_get_idx(list, i);
    const char *word =
        json_object_is_type(element, json_type_string) ? json_object_get_string(element) : NULL;
    if (word && kvf_config_word_keeps(word, &config->keeps[i]))
        return KVF_OK;
    return kvf_fail(
        KVF_E_INVALID,
        "%s%.*s[%u] is %s; allowed: full_attention, sliding_attention, chunked_attention, "
        "compressed_sparse_attention, heavily_compressed_attention, linear_attention, mamba, conv, "
        "hybrid, mlp and moe",
        config->fields.prefix, (int)strcspn(field, KVF_NAME_ENDS), field, i,
        kvf_value_written(element, 60).text);
}

static kvf_status apply_words(kvf_config *config, const kvf_layer_rule *rule, bool *applied) {
    struct json_object *list;
    const char *field;
    kvf_status status = kvf_field_list(&config->fields, rule->field, &list, &field);
    if (status || !list)
        return status;
    *applied = true;
    size_t count = 0;
    status = count_described(config, list, &count);
    if (!status)
        status = settle_count(config, field, count);
    for (uint32_t i = 0; i < config->layer_count && !status; i++)
        status = keep_word(config, field, list, i);
    return status;
}

static kvf_status apply_letters(kvf_config *config, const kvf_layer_rule *rule, bool *applied) {
    const char *pattern;
    kvf_status status = kvf_field_text(&config->fields, rule->field, &pattern);
    if (status || !pattern)
        return status;
    *applied = true;
    status = settle_count(config, rule->field, strlen(pattern));
    for (uint32_t i = 0; i < config->layer_count && !status; i++) {
        size_t l = 0;
        while (l < sizeof letters / sizeof letters[0] && letters[l].letter != pattern[i])
            l++;
        if (l == sizeof letters / sizeof letters[0])
            return kvf_fail(KVF_E_INVALID, "%s%s has '%c' for layer %u; allowed: M, *, - and E",
                            config->fields.prefix, rule->field, pattern[i] >= ' ' ? pattern[i] : '?', i);
        config->keeps[i] = letters[l].keeps;
    }
    return status;
}

/* Published configurations have [] where flags are not used. */
static kvf_status apply_flags(kvf_config *config, const kvf_layer_rule *rule, bool *applied) {
    struct json_object *list;
    const char *field;
    kvf_status status = kvf_field_list(&config->fields, rule->field, &list, &field);
    if (status || !list || json_object_array_length(list) == 0)
        return status;
    *applied = true;
    status = settle_count(config, field, json_object_array_length(list));
    for (uint32_t i = 0; i < config->layer_count && !status; i++) {
        uint32_t flag = 0;
        status = kvf_element_number(&config->fields, field, list, i, 0, 1, &flag);
        config->keeps[i] = flag ? rule->others : rule->picked;
    }
    return status;
}

static kvf_status apply_blocks(kvf_config *config, const kvf_layer_rule *rule, bool *applied) {
    struct json_object *list;
    const char *field;
    kvf_status status = kvf_field_list(&config->fields, rule->field, &list, &field);
    if (status || !list)
        return status;
    *applied = true;
    status = settle_count(config, field, json_object_array_length(list));
    for (uint32_t i = 0; i < config->layer_count && !status; i++)
        status = kvf_config_block_keeps(config, field, list, i, &config->keeps[i]);
    return status;
}

static kvf_status ratio_keeps(const kvf_config *config, const kvf_layer_rule *rule, struct json_object *list,
                              size_t i, kvf_keeps *keeps) {
    bool sources = rule->kind == KVF_RULE_SOURCES;
    const ratio_row *rows = sources ? source_ratios : ratios;
    size_t count = sources ? sizeof source_ratios / sizeof *rows : sizeof ratios / sizeof *rows;
    uint32_t tokens = 0;
    kvf_status status = kvf_element_number(&config->fields, rule->field, list, i, 0, UINT32_MAX, &tokens);
    for (size_t r = 0; r < count && !status; r++)
        if (rows[r].tokens == tokens) {
            *keeps = rows[r].keeps;
            return KVF_OK;
        }
    if (status)
        return status;
    if (sources)
        return kvf_fail(KVF_E_UNSUPPORTED, "%s%s[%zu] is %u; supported: 0, 1 and %u", config->fields.prefix,
                        rule->field, i, tokens, KVF_PAIR_TOKENS);
    return kvf_fail(KVF_E_UNSUPPORTED, "%s%s[%zu] is %u; supported: 0, 1, %u and %u", config->fields.prefix,
                    rule->field, i, tokens, KVF_SPARSE_TOKENS, KVF_HEAVY_TOKENS);
}

/* Checks that words, if there are some, say the same as the ratios. */
static kvf_status check_words(kvf_config *config, const kvf_layer_rule *rule, struct json_object *list) {
    struct json_object *words_list;
    const char *field;
    kvf_status status = kvf_field_list(&config->fields, rule->second, &words_list, &field);
    if (status || !words_list)
        return status;
    status = settle_count(config, field, json_object_array_length(words_list));
    for (uint32_t i = 0; i < config->layer_count && !status; i++) {
        kvf_keeps by_ratio = config->keeps[i];
        status = keep_word(config, field, words_list, i);
        if (!status && config->keeps[i] != by_ratio)
            status =
                kvf_fail(KVF_E_INVALID, "%s%s[%u] is %s, but %s[%u] is \"%s\"", config->fields.prefix,
                         rule->field, i, json_object_get_string(json_object_array_get_idx(list, i)),
                         rule->second, i, json_object_get_string(json_object_array_get_idx(words_list, i)));
    }
    return status;
}

/* The layers whose entries others read, and which have indexers. */
static kvf_status mark_sources(kvf_config *config, const kvf_layer_rule *rule) {
    struct json_object *list;
    const char *name;
    kvf_status status = kvf_field_list(&config->fields, rule->second, &list, &name);
    if (!status && !list)
        status = kvf_field_missing(&config->fields, rule->second);
    size_t count = status ? 0 : json_object_array_length(list);
    for (size_t i = 0; i < count && !status; i++) {
        uint32_t layer = 0;
        status = kvf_element_number(&config->fields, name, list, i, 0, config->layer_count - 1, &layer);
        if (!status && !(config->keeps[layer] & KVF_KEEPS_COMPRESSED))
            return kvf_fail(KVF_E_INVALID, "%s%s[%zu] is %u, but %s[%u] is 0", config->fields.prefix, name, i,
                            layer, rule->field, layer);
        config->keeps[layer] |= KVF_KEEPS_INDEXER;
    }
    return status;
}

/* A source whose keys another layer would have to make is not known. */
static kvf_status check_index_sources(const kvf_config *config, const kvf_layer_rule *rule) {
    static const char field[] = "index_source_layer_ids";
    struct json_object *list;
    const char *name;
    kvf_status status = kvf_field_list(&config->fields, field, &list, &name);
    size_t count = !status && list ? json_object_array_length(list) : 0;
    for (uint32_t layer = 0; layer < config->layer_count && !status; layer++) {
        bool found = !(config->keeps[layer] & KVF_KEEPS_INDEXER);
        for (size_t i = 0; i < count && !found && !status; i++) {
            uint32_t number = 0;
            status = kvf_element_number(&config->fields, name, list, i, 0, KVF_MODEL_MAX_LAYERS, &number);
            found = number == layer;
        }
        if (!status && !found)
            return kvf_fail(KVF_E_UNSUPPORTED, "%s%s has layer %u, but %s has not; supported: in both",
                            config->fields.prefix, rule->second, layer, field);
    }
    return status;
}

/* Layers that are no source keep a window alone: they read the entries of the last source before them. */
static kvf_status keep_sources(kvf_config *config, const kvf_layer_rule *rule) {
    kvf_status status = mark_sources(config, rule);
    bool any = false;
    for (uint32_t i = 0; i < config->layer_count && !status; i++) {
        any = any || (config->keeps[i] & KVF_KEEPS_INDEXER);
        if (!any && (config->keeps[i] & KVF_KEEPS_COMPRESSED))
            return kvf_fail(KVF_E_INVALID, "%s%s[%u] is not 0, but %s has no layer up to it",
                            config->fields.prefix, rule->field, i, rule->second);
        if (!(config->keeps[i] & KVF_KEEPS_INDEXER))
            config->keeps[i] &= KVF_KEEPS_WINDOW;
    }
    return status ? status : check_index_sources(config, rule);
}

/* The list may go on after the model's own layers: those that only predict further tokens keep a window alone, and
 * published lists have more of them than any field says. */
static kvf_status apply_ratios(kvf_config *config, const kvf_layer_rule *rule, bool *applied) {
    struct json_object *list;
    const char *field;
    kvf_status status = kvf_field_list(&config->fields, rule->field, &list, &field);
    if (status || !list)
        return status;
    *applied = true;
    status = need_count(config);
    size_t count = json_object_array_length(list);
    kvf_keeps keeps = KVF_KEEPS_WINDOW;
    while (!status && count > config->layer_count && keeps == KVF_KEEPS_WINDOW) {
        status = ratio_keeps(config, rule, list, count - 1, &keeps);
        count -= keeps == KVF_KEEPS_WINDOW;
    }
    if (!status)
        status = settle_count(config, field, count);
    for (uint32_t i = 0; i < config->layer_count && !status; i++)
        status = ratio_keeps(config, rule, list, i, &config->keeps[i]);
    if (status)
        return status;
    return rule->kind == KVF_RULE_SOURCES ? keep_sources(config, rule) : check_words(config, rule, list);
}

static kvf_status apply_period(kvf_config *config, const kvf_layer_rule *rule, bool *applied) {
    uint32_t period = rule->fallback;
    uint32_t end = rule->second ? rule->second_fallback : config->layer_count;
    bool given = false;
    kvf_status status = need_count(config);
    if (!status && rule->field)
        status = kvf_field_number(&config->fields, rule->field, 1, KVF_MODEL_MAX_LAYERS, &given, &period);
    if (!status && rule->second)
        status = kvf_field_number(&config->fields, rule->second, 0, KVF_MODEL_MAX_LAYERS, &given, &end);
    if (status || period == 0)
        return status;
    if (rule->whole && config->layer_count % period)
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "%s%s is %u, which does not divide the %u layers: what those after the last whole "
                        "group keep is not known",
                        config->fields.prefix, rule->field, period, config->layer_count);
    *applied = true;
    for (uint32_t i = 0; i < config->layer_count; i++)
        config->keeps[i] = (i + 1) % period == 0 || i >= end ? rule->picked : rule->others;
    return KVF_OK;
}

static kvf_status apply_offset(kvf_config *config, const kvf_layer_rule *rule, bool *applied) {
    uint32_t period = rule->fallback;
    uint32_t offset = rule->second_fallback;
    bool given = false;
    kvf_status status = need_count(config);
    if (!status && rule->field)
        status = kvf_field_number(&config->fields, rule->field, 1, KVF_MODEL_MAX_LAYERS, &given, &period);
    if (!status && rule->second)
        status = kvf_field_number(&config->fields, rule->second, 0, period - 1, &given, &offset);
    if (!status && offset >= period)
        status = kvf_fail(KVF_E_INVALID, "%s%s is missing, and its default, %u, is not below %s, %u",
                          config->fields.prefix, rule->second, offset, rule->field, period);
    if (status)
        return status;
    *applied = true;
    for (uint32_t i = 0; i < config->layer_count; i++)
        config->keeps[i] = i % period == offset ? rule->picked : rule->others;
    return KVF_OK;
}

static kvf_status apply_below(kvf_config *config, const kvf_layer_rule *rule, bool *applied) {
    uint32_t first = rule->fallback;
    bool given;
    kvf_status status = need_count(config);
    if (!status)
        status = kvf_field_number(&config->fields, rule->field, 0, KVF_MODEL_MAX_LAYERS, &given, &first);
    if (status || !config->window_tokens)
        return status;
    *applied = true;
    for (uint32_t i = 0; i < config->layer_count; i++)
        config->keeps[i] = i < first ? rule->picked : rule->others;
    return KVF_OK;
}

static kvf_status apply_all(kvf_config *config, const kvf_layer_rule *rule, bool *applied) {
    kvf_status status = need_count(config);
    if (status)
        return status;
    *applied = true;
    for (uint32_t i = 0; i < config->layer_count; i++)
        config->keeps[i] = rule->picked;
    return KVF_OK;
}

/* Takes a layer from a list; no list may have named it before (`unset` marks such layers). */
static const kvf_keeps unset = UINT16_MAX;

static kvf_status keep_numbered(kvf_config *config, const char *field, const kvf_layer_rule *rule,
                                kvf_keeps keeps, bool *given) {
    const kvf_fields *fields = &config->fields;
    struct json_object *list;
    const char *name;
    kvf_status status = kvf_field_list(fields, field, &list, &name);
    *given = !status && list;
    if (!*given)
        return status;
    size_t count = json_object_array_length(list);
    uint32_t most = config->layer_count - 1 + rule->first_number;
    for (size_t i = 0; i < count && !status; i++) {
        uint32_t number = 0;
        status = kvf_element_number(fields, name, list, i, rule->first_number, most, &number);
        if (status)
            return status;
        kvf_keeps *layer = &config->keeps[number - rule->first_number];
        if (*layer != unset)
            return kvf_fail(KVF_E_INVALID, "%s%s[%zu] is %u, a layer that is listed before", fields->prefix,
                            name, i, number);
        *layer = keeps;
    }
    return status;
}

static kvf_status apply_numbers(kvf_config *config, const kvf_layer_rule *rule, bool *applied) {
    kvf_status status = need_count(config);
    if (status)
        return status;
    for (uint32_t i = 0; i < config->layer_count; i++)
        config->keeps[i] = unset;
    bool others_given = false;
    status = keep_numbered(config, rule->field, rule, rule->picked, applied);
    if (!status && *applied && rule->second)
        status = keep_numbered(config, rule->second, rule, rule->others, &others_given);
    for (uint32_t i = 0; i < config->layer_count && !status && *applied; i++) {
        if (config->keeps[i] == unset && others_given)
            return kvf_fail(KVF_E_INVALID, "%s%s and %s: layer %u is in neither", config->fields.prefix,
                            rule->field, rule->second, i + rule->first_number);
        if (config->keeps[i] == unset)
            config->keeps[i] = rule->others;
    }
    return status;
}

/* ---- all of it ------------------------------------------------------------------------------- */

static kvf_status apply_rule(kvf_config *config, const kvf_layer_rule *rule, bool *applied) {
    switch (rule->kind) {
    case KVF_RULE_ALL:
        return apply_all(config, rule, applied);
    case KVF_RULE_WINDOW:
        return config->window_tokens ? apply_all(config, rule, applied) : KVF_OK;
    case KVF_RULE_WORDS:
        return apply_words(config, rule, applied);
    case KVF_RULE_LETTERS:
        return apply_letters(config, rule, applied);
    case KVF_RULE_FLAGS:
        return apply_flags(config, rule, applied);
    case KVF_RULE_RATIOS:
    case KVF_RULE_SOURCES:
        return apply_ratios(config, rule, applied);
    case KVF_RULE_PERIOD:
        return apply_period(config, rule, applied);
    case KVF_RULE_OFFSET:
        return apply_offset(config, rule, applied);
    case KVF_RULE_BELOW:
        return apply_below(config, rule, applied);
    case KVF_RULE_NUMBERS:
        return apply_numbers(config, rule, applied);
    case KVF_RULE_BLOCKS:
        return apply_blocks(config, rule, applied);
    case KVF_RULE_END:
        break;
    }
    return kvf_field_missing(&config->fields, config->family->layers[0].field);
}

/* The default applies to a field that is missing; a field that is null means that there is no window or chunk. */
static kvf_status read_span(const kvf_config *config, const char *field, uint32_t fallback, uint32_t *out) {
    bool given;
    *out = kvf_field_exists(&config->fields, field) ? 0 : fallback;
    return kvf_field_number(&config->fields, field, 1, KVF_CONFIG_MAX_WINDOW, &given, out);
}

static kvf_status read_spans(kvf_config *config) {
    bool windows = true;
    kvf_status status = KVF_OK;
    if (config->family->window_switch) {
        windows = config->family->window_switch_or;
        status = kvf_field_flag(&config->fields, config->family->window_switch, &windows);
    }
    if (!status && windows)
        status = read_span(config, kvf_family_window_names(config->family), config->family->window,
                           &config->window_tokens);
    if (!status)
        status = read_span(config, "attention_chunk_size", config->family->chunk, &config->chunk_tokens);
    return status;
}

/* If the window or chunk is null, layers of a pattern have full attention; a layer that is explicitly named as windowed
 * or chunked is then a contradiction. */
static kvf_status settle_spans(kvf_config *config, bool named) {
    static const struct {
        kvf_keeps keeps;
        const char *what;
        const char *field;
    } spans[] = {
        {KVF_KEEPS_WINDOW, "a window", "sliding_window"},
        {KVF_KEEPS_CHUNK, "chunks", "attention_chunk_size"},
    };
    for (uint32_t s = 0; s < 2; s++) {
        if (spans[s].keeps == KVF_KEEPS_WINDOW ? config->window_tokens : config->chunk_tokens)
            continue;
        for (uint32_t i = 0; i < config->layer_count; i++) {
            if (!(config->keeps[i] & spans[s].keeps))
                continue;
            if (named)
                return kvf_fail(KVF_E_INVALID, "layer %u has %s, but %s%s is missing or not used", i,
                                spans[s].what, config->fields.prefix, spans[s].field);
            config->keeps[i] = KVF_KEEPS_FULL;
        }
    }
    return KVF_OK;
}

/* In some families the last layers read the cache of an earlier layer of their kind. */
static kvf_status drop_shared(kvf_config *config) {
    const char *field = config->family->shared_layers;
    if (!field)
        return KVF_OK;
    uint32_t shared = config->family->shared_layers_or;
    bool given;
    kvf_status status = kvf_field_number(&config->fields, field, 0, config->layer_count - 1, &given, &shared);
    if (status)
        return status;
    if (shared >= config->layer_count)
        return kvf_field_missing(&config->fields, field);
    kvf_keeps kept = KVF_KEEPS_NOTHING;
    for (uint32_t i = 0; i < config->layer_count - shared; i++)
        kept |= config->keeps[i];
    for (uint32_t i = config->layer_count - shared; i < config->layer_count; i++) {
        if (config->keeps[i] & ~kept)
            return kvf_fail(KVF_E_INVALID, "%s%s is %u, but no layer before layer %u is of its kind",
                            config->fields.prefix, field, shared, i);
        config->keeps[i] = KVF_KEEPS_NOTHING;
    }
    return KVF_OK;
}

static kvf_status check_known(const kvf_config *config) {
    for (uint32_t i = 0; i < config->layer_count; i++) {
        kvf_keeps keeps = config->keeps[i];
        if ((keeps & KVF_KEEPS_ATTENTION) && config->family->attention == KVF_ATTENTION_NONE)
            return kvf_fail(KVF_E_INVALID, "layer %u has attention, but this family has none", i);
        if ((keeps &
             (config->family->window_latent ? KVF_KEEPS_CHUNK : KVF_KEEPS_WINDOW | KVF_KEEPS_CHUNK)) &&
            config->family->attention == KVF_ATTENTION_LATENT)
            return kvf_fail(KVF_E_UNSUPPORTED,
                            "layer %u has a window or chunks, which are not supported with latents", i);
        if (config->family->attention == KVF_ATTENTION_COMPRESSED && !(keeps & KVF_KEEPS_WINDOW))
            return kvf_fail(KVF_E_INVALID, "layer %u has no window, but all layers of %.64s have one", i,
                            config->fields.family);
        if (config->family->attention != KVF_ATTENTION_COMPRESSED && (keeps & KVF_KEEPS_COMPRESSED))
            return kvf_fail(KVF_E_INVALID, "layer %u compresses its cache, but %.64s has no such layers", i,
                            config->fields.family);
        if ((keeps & KVF_KEEPS_INDEXER) && !(config->family->indexer && config->family->indexer->by_layer))
            return kvf_fail(KVF_E_INVALID, "layer %u has an indexer of its own, but no layer of %.64s has", i,
                            config->fields.family);
        if ((keeps & KVF_KEEPS_STATE) && !config->family->state)
            return kvf_fail(KVF_E_INVALID, "layer %u has a recurrent state, but this family has none", i);
    }
    return KVF_OK;
}

kvf_status kvf_config_read_layers(kvf_config *config) {
    bool given;
    uint32_t count = 0;
    uint32_t times = 1;
    const char *names = kvf_family_names(config->family)->layers;
    kvf_status status = kvf_field_number(&config->fields, names, 1, KVF_MODEL_MAX_LAYERS, &given, &count);
    if (!status)
        status = kvf_config_read_times(config, &count, &times);
    if (!status && given)
        status = settle_count(config, names, (size_t)count * times);
    if (!status)
        status = read_spans(config);

    const kvf_layer_rule *rule = config->family->layers;
    bool applied = false;
    while (!status && !applied) {
        status = apply_rule(config, rule, &applied);
        rule += !applied;
    }
    if (!status && config->family->last_is_full)
        config->keeps[config->layer_count - 1] = KVF_KEEPS_FULL;
    if (!status)
        status = settle_spans(config, rule->kind == KVF_RULE_WORDS || rule->kind == KVF_RULE_RATIOS ||
                                          rule->kind == KVF_RULE_SOURCES);
    if (!status)
        status = drop_shared(config);
    if (!status)
        status = check_known(config);
    return status ? status : kvf_config_repeat_layers(config);
}
