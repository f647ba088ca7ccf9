/*
 * The groups of layers that keep one latent for all heads, perhaps beside the key of a sparse indexer.
 */
#include "model/config.h"

/* How many elements of an indexer key share one scale, and the types of both. Engines store this key quantised whatever
 * the cache's type is: 128 bytes and a 4-byte scale for each token, values first, then scales. */
#define INDEXER_SCALE_ELEMENTS 128u
#define INDEXER_DTYPE KVF_DTYPE_F8_E4M3
#define INDEXER_SCALE_DTYPE KVF_DTYPE_F32

/* ---- indexers -------------------------------------------------------------------------------- */

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
            return kvf_fail(KVF_E_INVALID, "%s%s[%u] is \"%.40s\"; allowed: %s", config->fields.prefix, field,
                            i, word ? word : "null", letters ? "F and S" : "full and shared");
        if (own && (config->keeps[i] & KVF_KEEPS_FULL))
            config->keeps[i] |= KVF_KEEPS_INDEXER;
    }
    return KVF_OK;
}

/* Without a list, one of every few layers has an indexer, and all of the first ones. */
static kvf_status mark_by_period(kvf_config *config) {
    bool given;
    uint32_t every = config->family->index_every;
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
static kvf_status mark_indexers(kvf_config *config) {
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
        status = kvf_fail(KVF_E_INVALID, "layer %u has no indexer, and no layer before it has one", first);
    return status;
}

/* The width of an indexer's key; 0: the model has no indexers. */
static kvf_status read_indexer(kvf_config *config, uint32_t *width) {
    bool given;
    kvf_status status =
        kvf_field_number(&config->fields, "index_head_dim", 1, KVF_CONFIG_MAX_WIDTH, &given, width);
    if (!given)
        *width = config->family->index_head_dim;
    if (status || !*width)
        return status;
    if (*width % INDEXER_SCALE_ELEMENTS)
        return kvf_fail(KVF_E_INVALID, "%sindex_head_dim is %u; it must be a multiple of %u",
                        config->fields.prefix, *width, INDEXER_SCALE_ELEMENTS);
    return mark_indexers(config);
}

static void add_indexer(kvf_config *config, uint32_t width) {
    kvf_part_desc *key = kvf_config_add_part(config, "indexer", INDEXER_DTYPE);
    key->units = 1;
    key->cell_elements = width;
    key->tensor = 1;
    key->tp_rule = KVF_TP_REPLICATE;
    kvf_part_desc *scale = kvf_config_add_part(config, "indexer_scale", INDEXER_SCALE_DTYPE);
    scale->units = 1;
    scale->cell_elements = width / INDEXER_SCALE_ELEMENTS;
    scale->tensor = 1;
    scale->tp_rule = KVF_TP_REPLICATE;
}

/* ---- latents --------------------------------------------------------------------------------- */

/* Adds the layers with attention that have an indexer of their own, or those that have none. */
static void add_latents(kvf_config *config, const char *name, uint32_t width, bool with_indexer) {
    (void)kvf_config_add_group(config, name, KVF_GROUP_TOKENS);
    for (uint32_t i = 0; i < config->layer_count; i++)
        if ((config->keeps[i] & KVF_KEEPS_FULL) && !(config->keeps[i] & KVF_KEEPS_INDEXER) == !with_indexer)
            kvf_config_add_layer(config, i);
    kvf_part_desc *latent = kvf_config_add_part(
        config, "latent", config->options.cache_dtype ? config->options.cache_dtype : config->dtype);
    latent->units = 1;
    latent->cell_elements = width;
    latent->tp_rule = KVF_TP_REPLICATE;
}

kvf_status kvf_config_add_latents(kvf_config *config) {
    uint32_t rank = 0;
    uint32_t rope = 0;
    uint32_t indexer = 0;
    kvf_status status = kvf_field_need(&config->fields, "kv_lora_rank", 1, KVF_CONFIG_MAX_WIDTH, 0, &rank);
    if (!status)
        status = kvf_field_need(&config->fields, "qk_rope_head_dim", 1, KVF_CONFIG_MAX_WIDTH, 0, &rope);
    if (!status && config->options.scale_dtype)
        status = kvf_fail(KVF_E_INVALID, "scale_dtype is %s, but a latent has no K and V to scale",
                          kvf_dtype_name(config->options.scale_dtype));
    if (!status)
        status = read_indexer(config, &indexer);
    if (status)
        return status;
    bool shared = false;
    for (uint32_t i = 0; i < config->layer_count; i++)
        shared = shared || ((config->keeps[i] & KVF_KEEPS_FULL) && !(config->keeps[i] & KVF_KEEPS_INDEXER));
    add_latents(config, "mla", rank + rope, indexer > 0); /* each at most 2^24 */
    if (indexer)
        add_indexer(config, indexer);
    if (indexer && shared)
        add_latents(config, "mla.2", rank + rope, false);
    return KVF_OK;
}
