/*
 * The groups of attention layers: K and V for each KV head, or one latent for all heads.
 */
#include "model/config.h"

/* Elements that share one scale in an indexer key, and the types of both. Engines store this key quantised
 * whatever the cache's type: 128 bytes and a 4-byte scale for each token, values first, scales after them. */
#define INDEXER_SCALE_ELEMENTS 128u
#define INDEXER_DTYPE KVF_DTYPE_F8_E4M3
#define INDEXER_SCALE_DTYPE KVF_DTYPE_F32

/* ---- heads ----------------------------------------------------------------------------------- */

typedef struct head_shape {
    uint32_t heads; /* query heads: they bound and divide what follows */
    uint32_t kv_heads;
    uint32_t head_dim;
} head_shape;

static kvf_status check_kv_heads(const kvf_config *config, const char *field, const head_shape *shape) {
    if (shape->heads % shape->kv_heads)
        return kvf_fail(KVF_E_INVALID, "%s%s is %u, which does not divide num_attention_heads, %u",
                        config->fields.prefix, field, shape->kv_heads, shape->heads);
    return KVF_OK;
}

static kvf_status read_kv_heads(const kvf_config *config, head_shape *shape) {
    static const char field[] = "num_key_value_heads";
    bool given;
    kvf_status status = kvf_field_number(&config->fields, field, 1, shape->heads, &given, &shape->kv_heads);
    if (status)
        return status;
    uint32_t fallback = config->family->kv_heads;
    if (!given && (fallback == KVF_AS_MANY_AS_HEADS || kvf_field_exists(&config->fields, field)))
        shape->kv_heads = shape->heads; /* multi-head attention: left out, or null */
    else if (!given && fallback)
        shape->kv_heads = fallback;
    else if (!given)
        return kvf_field_missing(&config->fields, field);
    return check_kv_heads(config, field, shape);
}

static kvf_status read_head_dim(const kvf_config *config, head_shape *shape) {
    bool given;
    kvf_status status = kvf_field_number(&config->fields, "head_dim|attention_head_dim", 1,
                                         KVF_CONFIG_MAX_WIDTH, &given, &shape->head_dim);
    if (status || given)
        return status;
    if (config->family->head_dim) {
        shape->head_dim = config->family->head_dim;
        return KVF_OK;
    }
    uint32_t hidden = 0;
    status = kvf_field_number(&config->fields, "hidden_size", 1, KVF_CONFIG_MAX_WIDTH, &given, &hidden);
    if (status)
        return status;
    if (!given)
        return kvf_fail(KVF_E_INVALID, "%shead_dim is missing, and so is hidden_size, which would give it",
                        config->fields.prefix);
    if (hidden % shape->heads)
        return kvf_fail(KVF_E_INVALID,
                        "%shead_dim is missing, and num_attention_heads, %u, does not divide hidden_size, %u",
                        config->fields.prefix, shape->heads, hidden);
    shape->head_dim = hidden / shape->heads;
    return KVF_OK;
}

/* Families whose full layers have heads of their own. */
static kvf_status read_full_shape(const kvf_config *config, head_shape *shape) {
    const kvf_family *family = config->family;
    kvf_status status = KVF_OK;
    if (family->full_head_dim)
        status = kvf_field_need(&config->fields, family->full_head_dim, 1, KVF_CONFIG_MAX_WIDTH,
                                family->full_head_dim_or, &shape->head_dim);
    bool other_heads = false;
    if (!status && family->full_kv_heads)
        status = kvf_field_flag(&config->fields, family->full_kv_heads_if, &other_heads);
    if (status || !other_heads)
        return status;
    bool given;
    status =
        kvf_field_number(&config->fields, family->full_kv_heads, 1, shape->heads, &given, &shape->kv_heads);
    return status ? status : check_kv_heads(config, family->full_kv_heads, shape);
}

static void add_scale(kvf_config *config, const char *name, const head_shape *shape) {
    kvf_part_desc *scale = kvf_config_add_part(config, name, config->options.scale_dtype);
    scale->units = config->options.scale_per_head ? shape->kv_heads : 1;
    scale->tp_rule = config->options.scale_per_head ? KVF_TP_SPLIT : KVF_TP_REPLICATE;
    scale->cell_elements = 1;
    scale->tensor = 1;
}

static void add_heads(kvf_config *config, const char *name, uint8_t keeps, const head_shape *shape) {
    if (!kvf_config_has(config, keeps))
        return;
    kvf_group_desc *group = kvf_config_add_group(config, name, KVF_GROUP_TOKENS, keeps);
    group->window_tokens = keeps == KVF_KEEPS_WINDOW ? config->window_tokens : 0;
    group->chunk_tokens = keeps == KVF_KEEPS_CHUNK ? config->chunk_tokens : 0;
    kvf_dtype dtype = config->options.cache_dtype ? config->options.cache_dtype : config->dtype;
    for (uint32_t i = 0; i < 2; i++) {
        kvf_part_desc *part = kvf_config_add_part(config, i ? "v" : "k", dtype);
        part->units = shape->kv_heads;
        part->cell_elements = shape->head_dim;
    }
    if (config->options.scale_dtype) {
        add_scale(config, "k_scale", shape);
        add_scale(config, "v_scale", shape);
    }
}

static kvf_status add_head_groups(kvf_config *config) {
    head_shape shape = {0};
    kvf_status status = kvf_field_need(&config->fields, "num_attention_heads", 1, KVF_CONFIG_MAX_HEADS,
                                       config->family->heads, &shape.heads);
    if (!status)
        status = read_kv_heads(config, &shape);
    if (!status)
        status = read_head_dim(config, &shape);
    head_shape full = shape;
    if (!status)
        status = read_full_shape(config, &full);
    if (status)
        return status;
    add_heads(config, "full", KVF_KEEPS_FULL, &full);
    add_heads(config, "swa", KVF_KEEPS_WINDOW, &shape);
    add_heads(config, "chunked", KVF_KEEPS_CHUNK, &shape);
    return KVF_OK;
}

/* ---- latents --------------------------------------------------------------------------------- */

/* Layers may share an indexer; then some keep no key of their own, and the group would have to be cut. */
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
    return status;
}

static kvf_status add_indexer(kvf_config *config) {
    uint32_t width = 0;
    bool given;
    kvf_status status =
        kvf_field_number(&config->fields, "index_head_dim", 1, KVF_CONFIG_MAX_WIDTH, &given, &width);
    if (status || !given)
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
    (void)kvf_config_add_group(config, "mla", KVF_GROUP_TOKENS, KVF_KEEPS_FULL);
    kvf_part_desc *latent = kvf_config_add_part(
        config, "latent", config->options.cache_dtype ? config->options.cache_dtype : config->dtype);
    latent->units = 1;
    latent->cell_elements = rank + rope; /* each at most 2^24 */
    latent->tp_rule = KVF_TP_REPLICATE;
    return add_indexer(config);
}

kvf_status kvf_config_add_attention(kvf_config *config) {
    if (!kvf_config_has(config, KVF_KEEPS_ATTENTION))
        return KVF_OK;
    return config->family->attention == KVF_ATTENTION_LATENT ? add_latent_group(config)
                                                             : add_head_groups(config);
}
