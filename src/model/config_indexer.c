/*
 * The indexers of layers with full attention.
 *
 * A token's key may stand beside its latent, in one group with it. A key for several tokens is in a group of its own,
 * and so is the key beside heads:
 *
 *   group            has one row for      and the parts
 *   indexer          `tokens` tokens      indexer, perhaps indexer_scale
 *   indexer.state    a token, window      indexer_key, perhaps indexer_gate
 *
 * The second group exists where tokens share a key: it has what the tokens of the next key give to it.
 */
#include "model/config.h"

/* ---- which layers ---------------------------------------------------------------------------- */

/* A list says of each layer whether it has an indexer of its own, by words or, as a text, by their first letters. */
static kvf_status mark_listed(kvf_config *config, const char *field, struct json_object *list) {
    bool letters = json_object_is_type(list, json_type_string);
    size_t count = letters ? (size_t)json_object_get_string_len(list) : json_object_array_length(list);
    if (count != config->layer_count)
        return kvf_fail(KVF_E_INVALID, "%s%s describes %zu layers, but the model has %u",
                        config->fields.prefix, field, count, config->layer_count);
    for (uint32_t i = 0; i < config->layer_count; i++) {
        char letter[2] = {letters ? json_object_get_string(list)[i] : '\0'};
        const char *word = letters ? letter : json_object_get_string(json_object_array_get_idx(list, i));
        bool own = word && strcmp(word, letters ? "F" : "full") == 0;
        if (!own && (!word || strcmp(word, letters ? "S" : "shared") != 0))
            return kvf_fail(KVF_E_INVALID, "%s%s[%u] is \"%s\"; allowed: %s", config->fields.prefix, field, i,
                            kvf_excerpt_of(word ? word : "null", 40).text,
                            letters ? "F and S" : "full and shared");
        if (own && (config->keeps[i] & KVF_KEEPS_FULL))
            config->keeps[i] |= KVF_KEEPS_INDEXER;
    }
    return KVF_OK;
}

/* Without a list, one of every few layers has an indexer, and all of the first ones. */
static kvf_status mark_by_period(kvf_config *config) {
    bool given;
    uint32_t every = config->family->indexer->every;
    uint32_t offset = 2;
    kvf_status status =
        kvf_field_number(&config->fields, "index_topk_freq", 0, KVF_MODEL_MAX_LAYERS, &given, &every);
    if (!status)
        status = kvf_field_number(&config->fields, "index_skip_topk_offset", 0, KVF_MODEL_MAX_LAYERS, &given,
                                  &offset);
    for (uint32_t i = 0; i < config->layer_count && !status; i++) {
        uint32_t behind = i + 1 > offset ? i + 1 - offset : 0;
        if ((config->keeps[i] & KVF_KEEPS_FULL) && (every < 2 || behind % every == 0))
            config->keeps[i] |= KVF_KEEPS_INDEXER;
    }
    return status;
}

/* Marks the layers that have an indexer of their own; the others use that of a layer before them. */
static kvf_status mark(kvf_config *config) {
    struct json_object *types;
    struct json_object *pattern = NULL;
    const char *name;
    kvf_status status = kvf_field_list(&config->fields, "indexer_types", &types, &name);
    if (!status && !types)
        status = kvf_field_find(&config->fields, "index_topk_pattern", &pattern, &name);
    if (status)
        return status;
    if (pattern && !json_object_is_type(pattern, json_type_string) &&
        !json_object_is_type(pattern, json_type_array))
        return kvf_fail(KVF_E_INVALID, "%s%s is neither a text nor a list", config->fields.prefix, name);
    status = types || pattern ? mark_listed(config, name, types ? types : pattern) : mark_by_period(config);
    uint32_t first = 0;
    while (first < config->layer_count && !(config->keeps[first] & KVF_KEEPS_FULL))
        first++;
    if (!status && first < config->layer_count && !(config->keeps[first] & KVF_KEEPS_INDEXER))
        status = kvf_fail(KVF_E_INVALID, "%s%s gives layer %u no indexer, and no layer before it has one",
                          config->fields.prefix, types || pattern ? name : "index_topk_freq", first);
    return status;
}

/* ---- sizes ----------------------------------------------------------------------------------- */

static kvf_status read_enabled(const kvf_config *config, bool *enabled) {
    const kvf_indexer_fields *names = config->family->indexer;
    *enabled = names != NULL;
    return names && names->enabled ? kvf_field_flag(&config->fields, names->enabled, enabled) : KVF_OK;
}

static kvf_status check_values(const kvf_config *config) {
    const char *field = config->family->indexer->no_values;
    struct json_object *list = NULL;
    const char *name;
    kvf_status status = field ? kvf_field_list(&config->fields, field, &list, &name) : KVF_OK;
    size_t count = !status && list ? json_object_array_length(list) : 0;
    for (size_t i = 0; i < count && i < config->layer_count && !status; i++) {
        uint32_t none = 1;
        status = kvf_element_number(&config->fields, name, list, i, 0, 1, &none);
        if (!status && !none && (config->keeps[i] & KVF_KEEPS_INDEXER))
            status = kvf_fail(KVF_E_UNSUPPORTED, "%s%s[%zu] is 0; supported for a layer with an indexer: 1",
                              config->fields.prefix, name, i);
    }
    return status;
}

static kvf_status read_width(kvf_config *config) {
    const kvf_indexer_fields *names = config->family->indexer;
    uint32_t width = names->width_or;
    bool given;
    kvf_status status =
        kvf_field_number(&config->fields, names->width, 1, KVF_CONFIG_MAX_WIDTH, &given, &width);
    config->indexer.width = width;
    if (!status && names->scaled && width % KVF_INDEXER_SCALE_ELEMENTS)
        status =
            kvf_fail(KVF_E_INVALID, "%s%s is %u; it must be a multiple of %u", config->fields.prefix,
                     kvf_field_name(&config->fields, names->width).text, width, KVF_INDEXER_SCALE_ELEMENTS);
    return status;
}

kvf_status kvf_config_read_indexer(kvf_config *config) {
    const kvf_indexer_fields *names = config->family->indexer;
    bool enabled;
    kvf_status status = read_enabled(config, &enabled);
    if (!status && enabled)
        status = read_width(config);
    if (status || !config->indexer.width)
        return status;
    config->indexer.tokens = 1;
    if (names->tokens)
        status = kvf_field_need(&config->fields, names->tokens, 1, KVF_CONFIG_MAX_WINDOW, names->tokens_or,
                                &config->indexer.tokens);
    if (!status && !names->by_layer)
        status = mark(config);
    return status ? status : check_values(config);
}

/* ---- building -------------------------------------------------------------------------------- */

void kvf_config_add_indexer_key(kvf_config *config, uint32_t tensor) {
    const kvf_indexer_fields *names = config->family->indexer;
    uint32_t width = config->indexer.width;
    kvf_config_add_row(config, "indexer", names->dtype ? names->dtype : config->dtype, width, tensor);
    if (names->scaled)
        kvf_config_add_row(config, "indexer_scale", KVF_DTYPE_F32, width / KVF_INDEXER_SCALE_ELEMENTS,
                           tensor);
}

void kvf_config_add_indexer(kvf_config *config) {
    uint32_t tokens = config->indexer.tokens;
    kvf_config_add_group(config, "indexer", KVF_GROUP_TOKENS)->tokens_per_step = tokens;
    kvf_config_add_layers(config, KVF_KEEPS_INDEXER);
    kvf_config_add_indexer_key(config, 0);
    if (tokens == 1)
        return;
    kvf_config_add_group(config, "indexer.state", KVF_GROUP_TOKENS)->window_tokens = tokens;
    kvf_config_add_layers(config, KVF_KEEPS_INDEXER);
    kvf_config_add_row(config, "indexer_key", config->dtype, config->indexer.width, 0);
    if (config->family->indexer->gated)
        kvf_config_add_row(config, "indexer_gate", config->dtype, config->indexer.width, 0);
}
