/*
 * The groups of attention layers: K and V for each KV head, or one latent for all heads.
 */
#include <stdio.h>

#include "model/config.h"

/* How many elements of an indexer key share one scale, and the types of both. Engines store this key quantised whatever
 * the cache's type is: 128 bytes and a 4-byte scale for each token, values first, then scales. */
#define INDEXER_SCALE_ELEMENTS 128u
#define INDEXER_DTYPE KVF_DTYPE_F8_E4M3
#define INDEXER_SCALE_DTYPE KVF_DTYPE_F32

/* ---- heads ----------------------------------------------------------------------------------- */

static kvf_status read_kv_heads(const kvf_config *config, kvf_heads *heads) {
    static const char field[] = "num_key_value_heads";
    const kvf_family *family = config->family;
    bool given;
    kvf_status status =
        kvf_field_number(&config->fields, field, 1, heads->query_heads, &given, &heads->kv_heads);
    if (status)
        return status;
    bool null = !given && kvf_field_exists(&config->fields, field);
    if (given)
        return kvf_config_check_kv_heads(config->fields.prefix, field, heads);
    if (family->kv_heads == KVF_AS_MANY_AS_HEADS || (null && family->null_kv_heads))
        heads->kv_heads = heads->query_heads; /* multi-head attention */
    else if (!null && family->kv_heads)
        heads->kv_heads = family->kv_heads;
    else
        return kvf_field_missing(&config->fields, field);
    return kvf_config_check_kv_heads(config->fields.prefix, field, heads);
}

static kvf_status read_head_dim(const kvf_config *config, kvf_heads *heads) {
    static const char names[] = "head_dim|attention_head_dim";
    bool given;
    kvf_status status =
        kvf_field_number(&config->fields, names, 1, KVF_CONFIG_MAX_WIDTH, &given, &heads->head_dim);
    if (status || given)
        return status;
    if (config->family->head_dim && kvf_field_exists(&config->fields, names))
        return kvf_field_missing(&config->fields, names);
    if (config->family->head_dim) {
        heads->head_dim = config->family->head_dim;
        return KVF_OK;
    }
    uint32_t hidden = 0;
    status = kvf_field_number(&config->fields, "hidden_size", 1, KVF_CONFIG_MAX_WIDTH, &given, &hidden);
    if (status)
        return status;
    if (!given)
        return kvf_fail(KVF_E_INVALID,
                        "%shead_dim is missing, and so is hidden_size; %.64s needs one of them",
                        config->fields.prefix, config->fields.family);
    if (hidden % heads->query_heads)
        return kvf_fail(KVF_E_INVALID,
                        "%shead_dim is missing, and num_attention_heads, %u, does not divide hidden_size, %u",
                        config->fields.prefix, heads->query_heads, hidden);
    heads->head_dim = hidden / heads->query_heads;
    return KVF_OK;
}

/* The heads of all full layers, in families whose full layers have other heads than the rest. */
typedef struct full_heads {
    kvf_heads heads;
    bool head_dim_given, kv_heads_given;
} full_heads;

/* If single layers are described, the fields for all full layers have no default, and `all` applies to them. */
static kvf_status read_full_heads(const kvf_config *config, const kvf_heads *all, full_heads *full) {
    const kvf_family *family = config->family;
    bool by_layer = kvf_field_exists(&config->fields, "per_layer_config");
    *full = (full_heads){.heads = *all};
    kvf_status status = KVF_OK;
    if (family->full_head_dim) {
        if (!by_layer)
            full->heads.head_dim = family->full_head_dim_or;
        status = kvf_field_number(&config->fields, family->full_head_dim, 1, KVF_CONFIG_MAX_WIDTH,
                                  &full->head_dim_given, &full->heads.head_dim);
    }
    bool other_heads = false;
    if (!status && family->full_kv_heads)
        status = kvf_field_flag(&config->fields, family->full_kv_heads_if, &other_heads);
    if (status || !other_heads)
        return status;
    status = kvf_field_number(&config->fields, family->full_kv_heads, 1, all->query_heads,
                              &full->kv_heads_given, &full->heads.kv_heads);
    return status ? status
                  : kvf_config_check_kv_heads(config->fields.prefix, family->full_kv_heads, &full->heads);
}

static kvf_status differ(const kvf_config *config, const char *field, uint32_t said, uint32_t layer,
                         uint32_t is) {
    return kvf_fail(KVF_E_INVALID, "%s%s is %u, but per_layer_config says %u for layer %u",
                    config->fields.prefix, field, said, is, layer);
}

/* A configuration may give the heads of full layers in both ways, which must then agree. */
static kvf_status check_full_heads(const kvf_config *config, const full_heads *full) {
    for (uint32_t i = 0; i < config->layer_count; i++) {
        if (!(config->keeps[i] & KVF_KEEPS_FULL))
            continue;
        const kvf_heads *is = &config->heads[i];
        if (full->head_dim_given && is->head_dim != full->heads.head_dim)
            return differ(config, config->family->full_head_dim, full->heads.head_dim, i, is->head_dim);
        if (full->kv_heads_given && is->kv_heads != full->heads.kv_heads)
            return differ(config, config->family->full_kv_heads, full->heads.kv_heads, i, is->kv_heads);
    }
    return KVF_OK;
}

/* Sets the heads of each layer. */
static kvf_status read_heads(kvf_config *config) {
    kvf_heads all = {0};
    full_heads full;
    kvf_status status = kvf_field_need(&config->fields, "num_attention_heads|num_heads", 1,
                                       KVF_CONFIG_MAX_HEADS, config->family->heads, &all.query_heads);
    if (!status)
        status = read_kv_heads(config, &all);
    if (!status)
        status = read_head_dim(config, &all);
    if (!status)
        status = read_full_heads(config, &all, &full);
    if (status)
        return status;
    config->heads = kvf_alloc(config->layer_count, sizeof *config->heads);
    if (!config->heads)
        return kvf_nomem("the layers of a configuration");
    bool by_layer = kvf_field_exists(&config->fields, "per_layer_config");
    for (uint32_t i = 0; i < config->layer_count; i++)
        config->heads[i] = !by_layer && (config->keeps[i] & KVF_KEEPS_FULL) ? full.heads : all;
    status = kvf_config_override_heads(config, config->heads);
    return status || !by_layer ? status : check_full_heads(config, &full);
}

static void add_scale(kvf_config *config, const char *name, const kvf_heads *heads) {
    kvf_part_desc *scale = kvf_config_add_part(config, name, config->options.scale_dtype);
    scale->units = config->options.scale_per_head ? heads->kv_heads : 1;
    scale->tp_rule = config->options.scale_per_head ? KVF_TP_SPLIT : KVF_TP_REPLICATE;
    scale->cell_elements = 1;
    scale->tensor = 1;
}

static void add_head_parts(kvf_config *config, const kvf_heads *heads) {
    kvf_dtype dtype = config->options.cache_dtype ? config->options.cache_dtype : config->dtype;
    for (uint32_t i = 0; i < 2; i++) {
        kvf_part_desc *part = kvf_config_add_part(config, i ? "v" : "k", dtype);
        part->units = heads->kv_heads;
        part->cell_elements = heads->head_dim;
    }
    if (config->options.scale_dtype) {
        add_scale(config, "k_scale", heads);
        add_scale(config, "v_scale", heads);
    }
}

static bool same_heads(const kvf_heads *a, const kvf_heads *b) {
    return a->kv_heads == b->kv_heads && a->head_dim == b->head_dim;
}

/* The next layer after `after` that keeps `what` with heads that no group of `what` has yet; layer_count if none. */
static uint32_t next_shape(const kvf_config *config, uint8_t what, uint32_t after) {
    for (uint32_t i = after; i < config->layer_count; i++) {
        if (!(config->keeps[i] & what))
            continue;
        uint32_t before = 0;
        while (before < i &&
               !((config->keeps[before] & what) && same_heads(&config->heads[before], &config->heads[i])))
            before++;
        if (before == i)
            return i;
    }
    return config->layer_count;
}

/* Adds a group for each shape of the layers that keep `what`: "full", and if they differ "full.2" ... */
static kvf_status add_heads(kvf_config *config, const char *name, uint8_t what) {
    uint32_t number = 1;
    for (uint32_t first = next_shape(config, what, 0); first < config->layer_count;
         first = next_shape(config, what, first + 1), number++) {
        char numbered[KVF_CONFIG_GROUP_NAME_BYTES];
        (void)snprintf(numbered, sizeof numbered, number > 1 ? "%s.%u" : "%s", name, number);
        if (config->group_count == KVF_CONFIG_MAX_GROUPS - 1) /* one is reserved for a state */
            return kvf_fail(KVF_E_UNSUPPORTED,
                            "%sper_layer_config makes more than %u groups of layers with the same heads",
                            config->fields.prefix, KVF_CONFIG_MAX_GROUPS - 1);
        kvf_group_desc *group = kvf_config_add_group(config, numbered, KVF_GROUP_TOKENS);
        group->window_tokens = what == KVF_KEEPS_WINDOW ? config->window_tokens : 0;
        group->chunk_tokens = what == KVF_KEEPS_CHUNK ? config->chunk_tokens : 0;
        for (uint32_t i = first; i < config->layer_count; i++)
            if ((config->keeps[i] & what) && same_heads(&config->heads[i], &config->heads[first]))
                kvf_config_add_layer(config, i);
        add_head_parts(config, &config->heads[first]);
    }
    return KVF_OK;
}

static kvf_status add_head_groups(kvf_config *config) {
    kvf_status status = read_heads(config);
    if (!status)
        status = add_heads(config, "full", KVF_KEEPS_FULL);
    if (!status)
        status = add_heads(config, "swa", KVF_KEEPS_WINDOW);
    return status ? status : add_heads(config, "chunked", KVF_KEEPS_CHUNK);
}

/* ---- latents --------------------------------------------------------------------------------- */

/* Layers that share an indexer are refused: some of them keep no key of their own, so the group would have to be
 * split. */
static kvf_status check_own_indexers(const kvf_config *config) {
    struct json_object *types;
    const char *name;
    kvf_status status = kvf_field_list(&config->fields, "indexer_types", &types, &name);
    size_t count = !status && types ? json_object_array_length(types) : 0;
    for (size_t i = 0; i < count; i++) {
        const char *type = json_object_get_string(json_object_array_get_idx(types, i));
        if (!type || strcmp(type, "full") != 0)
            return kvf_fail(KVF_E_UNSUPPORTED,
                            "%sindexer_types[%zu] is \"%.40s\"; only \"full\" is supported",
                            config->fields.prefix, i, type ? type : "null");
    }
    if (status || types)
        return status;
    /* without that list, one of two other fields may say which layers share an indexer */
    bool given;
    uint32_t every = 1;
    struct json_object *pattern;
    status = kvf_field_number(&config->fields, "index_topk_freq", 0, KVF_MODEL_MAX_LAYERS, &given, &every);
    if (!status)
        status = kvf_field_find(&config->fields, "index_topk_pattern", &pattern, NULL);
    if (!status && (every > 1 || pattern))
        status = kvf_fail(KVF_E_UNSUPPORTED, "%s%s is given: layers that share an indexer are not supported",
                          config->fields.prefix, pattern ? "index_topk_pattern" : "index_topk_freq");
    return status;
}

static kvf_status add_indexer(kvf_config *config) {
    uint32_t width = 0;
    bool given;
    kvf_status status =
        kvf_field_number(&config->fields, "index_head_dim", 1, KVF_CONFIG_MAX_WIDTH, &given, &width);
    if (!given)
        width = config->family->index_head_dim;
    if (status || !width)
        return status;
    if (width % INDEXER_SCALE_ELEMENTS)
        return kvf_fail(KVF_E_INVALID, "%sindex_head_dim is %u; it must be a multiple of %u",
                        config->fields.prefix, width, INDEXER_SCALE_ELEMENTS);
    status = check_own_indexers(config);
    if (status)
        return status;
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
    return KVF_OK;
}

static kvf_status add_latent_group(kvf_config *config) {
    uint32_t rank = 0;
    uint32_t rope = 0;
    kvf_status status = kvf_field_need(&config->fields, "kv_lora_rank", 1, KVF_CONFIG_MAX_WIDTH, 0, &rank);
    if (!status)
        status = kvf_field_need(&config->fields, "qk_rope_head_dim", 1, KVF_CONFIG_MAX_WIDTH, 0, &rope);
    if (status)
        return status;
    if (config->options.scale_dtype)
        return kvf_fail(KVF_E_INVALID, "scale_dtype is %s, but a latent has no K and V to scale",
                        kvf_dtype_name(config->options.scale_dtype));
    (void)kvf_config_add_group(config, "mla", KVF_GROUP_TOKENS);
    kvf_config_add_layers(config, KVF_KEEPS_FULL);
    kvf_part_desc *latent = kvf_config_add_part(
        config, "latent", config->options.cache_dtype ? config->options.cache_dtype : config->dtype);
    latent->units = 1;
    latent->cell_elements = rank + rope; /* each at most 2^24 */
    latent->tp_rule = KVF_TP_REPLICATE;
    return add_indexer(config);
}

kvf_status kvf_config_add_attention(kvf_config *config) {
    bool attention = kvf_config_has(config, KVF_KEEPS_ATTENTION);
    if (attention && config->family->attention == KVF_ATTENTION_HEADS)
        return add_head_groups(config);
    kvf_status status = kvf_config_override_heads(config, NULL);
    return status || !attention ? status : add_latent_group(config);
}
