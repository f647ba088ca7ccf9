/*
 * Overrides for single layers: per_layer_config, which has an object for each layer that differs, such as {"05":
 * {"head_dim": 512, "num_key_value_heads": 2}}.
 *
 * Layers may differ in heads, KV heads and head size, or in the size of a latent. Any other field that decides a size is
 * refused if its value differs from that of the whole configuration.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "model/config.h"

static const char query_heads_field[] = "num_attention_heads";
static const char kv_heads_field[] = "num_key_value_heads";
static const char head_dim_field[] = "head_dim";
static const char v_head_dim_field[] = "v_head_dim";
static const char rank_field[] = "kv_lora_rank";
static const char rope_field[] = "qk_rope_head_dim";

kvf_status kvf_config_check_kv_heads(const kvf_config *config, const char *prefix, const char *kv_names,
                                     const char *query_names, const kvf_heads *heads) {
    if (heads->query_heads % heads->kv_heads)
        return kvf_fail(KVF_E_INVALID, "%s%s is %u, which does not divide %s, %u", prefix,
                        kvf_field_name(&config->fields, kv_names).text, heads->kv_heads,
                        kvf_field_name(&config->fields, query_names).text, heads->query_heads);
    return KVF_OK;
}

/* Reads a number of one layer, which must not be null. */
static kvf_status read_number(const kvf_fields *layer, const char *field, uint32_t most, uint32_t *out) {
    bool given;
    kvf_status status = kvf_field_number(layer, field, 1, most, &given, out);
    if (!status && !given && kvf_field_exists(layer, field))
        status = kvf_field_missing(layer, field);
    return status;
}

static kvf_status read_heads(const kvf_config *config, const kvf_fields *layer, kvf_heads *heads) {
    kvf_status status = read_number(layer, head_dim_field, KVF_CONFIG_MAX_WIDTH, &heads->head_dim);
    if (!config->family->v_head_dim)
        heads->v_head_dim = heads->head_dim;
    else if (!status)
        status = read_number(layer, v_head_dim_field, KVF_CONFIG_MAX_WIDTH, &heads->v_head_dim);
    if (!status)
        status = read_number(layer, query_heads_field, KVF_CONFIG_MAX_HEADS, &heads->query_heads);
    if (!status)
        status = read_number(layer, kv_heads_field, heads->query_heads, &heads->kv_heads);
    return status
               ? status
               : kvf_config_check_kv_heads(config, layer->prefix, kv_heads_field, query_heads_field, heads);
}

kvf_status kvf_config_layer_differs(const kvf_config *config, const char *field, uint32_t said,
                                    uint32_t layer, uint32_t is) {
    return kvf_fail(KVF_E_INVALID, "%s%s is %u, but per_layer_config says %u for layer %u",
                    config->fields.prefix, field, said, is, layer);
}

static kvf_status read_latent(const kvf_fields *layer, kvf_latent *latent) {
    bool given;
    kvf_status status = read_number(layer, rank_field, KVF_CONFIG_MAX_WIDTH, &latent->rank);
    return status ? status
                  : kvf_field_number(layer, rope_field, 0, KVF_CONFIG_MAX_WIDTH, &given, &latent->rope);
}

/* Whether a layer's latent is read from this field, or the field decides nothing where there is a latent. */
static bool is_of_latent(const kvf_config *config, uint32_t layer, const char *name) {
    const kvf_size_names *names = kvf_family_names(config->family);
    if (strcmp(name, rank_field) == 0 || strcmp(name, rope_field) == 0)
        return true;
    return (config->keeps[layer] & KVF_KEEPS_ATTENTION) && !(config->keeps[layer] & KVF_KEEPS_STATE) &&
           (kvf_config_is_among(name, names->heads) || kvf_config_is_among(name, names->kv_heads) ||
            kvf_config_is_among(name, kvf_family_head_dim_names(config->family)));
}

/* Whether a layer's heads are read from this field. */
static bool is_of_heads(const kvf_config *config, const char *name) {
    return strcmp(name, query_heads_field) == 0 || strcmp(name, kv_heads_field) == 0 ||
           strcmp(name, head_dim_field) == 0 ||
           (config->family->v_head_dim && strcmp(name, v_head_dim_field) == 0);
}

/* Refuses layers without some of their parts, which cache nothing or something else. */
static kvf_status check_skip(const kvf_fields *layer, struct json_object *value) {
    if (json_object_is_type(value, json_type_array) && json_object_array_length(value) == 0)
        return KVF_OK;
    return kvf_fail(KVF_E_UNSUPPORTED, "%sskip is %s; layers without some of their parts are not supported",
                    layer->prefix, kvf_value_written(value, 40).text);
}

/* Checks a field of a layer that neither heads nor a latent are read from. */
static kvf_status check_other(kvf_config *config, const kvf_fields *layer, const char *name,
                              struct json_object *value) {
    if (strcmp(name, "skip") == 0)
        return check_skip(layer, value);
    switch (kvf_config_field_use(config, name)) {
    case KVF_FIELD_NO_SIZE:
        break;
    case KVF_FIELD_UNREAD: {
        char prefix[sizeof config->fields.prefix + sizeof "per_layer_config.*."];
        (void)snprintf(prefix, sizeof prefix, "%sper_layer_config.*.", config->fields.prefix);
        kvf_config_note_unread(config, prefix, name, value);
        break;
    }
    case KVF_FIELD_READ: {
        struct json_object *whole = NULL;
        (void)json_object_object_get_ex(config->fields.object, name, &whole);
        if (!json_object_equal(whole, value))
            return kvf_fail(KVF_E_UNSUPPORTED,
                            "%s%.64s is %s, but %s%.64s is %s; layers that differ in "
                            "it are not supported",
                            layer->prefix, name, kvf_value_written(value, 40).text, config->fields.prefix,
                            name, kvf_value_written(whole, 40).text);
        break;
    }
    }
    return KVF_OK;
}

static kvf_status override_layer(kvf_config *config, const kvf_fields *layer, uint32_t i) {
    json_object_object_foreach(layer->object, name, value) {
        if ((config->heads && is_of_heads(config, name)) ||
            (config->latents && is_of_latent(config, i, name)))
            continue;
        kvf_status status = check_other(config, layer, name, value);
        if (status)
            return status;
    }
    if (config->latents)
        return read_latent(layer, &config->latents[i]);
    return config->heads ? read_heads(config, layer, &config->heads[i]) : KVF_OK;
}

/* The layer that a field's name stands for: its number, perhaps with leading zeros. */
static kvf_status layer_of(const kvf_config *config, const kvf_fields *layers, const char *name,
                           uint32_t *out) {
    size_t digits = strspn(name, "0123456789");
    unsigned long number = digits && digits <= 9 && !name[digits] ? strtoul(name, NULL, 10) : ULONG_MAX;
    if (number >= config->layer_count)
        return kvf_fail(KVF_E_RANGE, "%s%.20s names no layer; allowed: \"0\" to \"%u\"", layers->prefix, name,
                        config->layer_count - 1);
    *out = (uint32_t)number;
    return KVF_OK;
}

static kvf_status override_layers(kvf_config *config, const kvf_fields *layers, bool *seen) {
    json_object_object_foreach(layers->object, name, value) {
        (void)value;
        uint32_t i = 0;
        kvf_fields layer;
        kvf_status status = layer_of(config, layers, name, &i);
        if (!status && seen[i])
            status = kvf_fail(KVF_E_INVALID, "%s%.20s is for layer %u, which is given twice", layers->prefix,
                              name, i);
        if (!status)
            status = kvf_field_object(layers, name, &layer);
        if (!status && layer.object)
            status = override_layer(config, &layer, i);
        if (status)
            return status;
        seen[i] = true;
    }
    return KVF_OK;
}

kvf_status kvf_config_override_layers(kvf_config *config) {
    kvf_fields layers;
    kvf_status status = kvf_field_object(&config->fields, "per_layer_config", &layers);
    if (status || !layers.object)
        return status;
    bool *seen = kvf_alloc0(config->layer_count, sizeof *seen);
    if (!seen)
        return kvf_nomem("the layers of a configuration");
    status = override_layers(config, &layers, seen);
    kvf_free(seen);
    return status;
}
