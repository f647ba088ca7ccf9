/*
 * A list of blocks, one for each layer, as searched architectures have it: a layer's attention may be left out, and
 * layers differ in how many query heads share a KV head.
 *
 *   "block_configs": [{"attention": {"n_heads_in_group": 8, "no_op": false}, "ffn": {...}}, ...]
 */
#include <stdio.h>

#include "model/config.h"

static const char group_field[] = "n_heads_in_group";

/* Features of a block's attention that change what is cached, and that no engine serves. */
static const char *const refused[] = {"replace_with_linear", "window_length", "num_sink_tokens"};

static bool says_no(struct json_object *value) {
    return !value || (json_object_is_type(value, json_type_boolean) && !json_object_get_boolean(value));
}

/* The attention of block `i`: an object that must be given. */
static kvf_status attention_of(const kvf_config *config, const char *name, struct json_object *list, size_t i,
                               kvf_fields *out) {
    struct json_object *element = json_object_array_get_idx(list, i);
    kvf_fields block = {.object = element, .family = config->fields.family};
    (void)snprintf(block.prefix, sizeof block.prefix, "%.40s%.24s[%zu].", config->fields.prefix, name, i);
    if (!json_object_is_type(element, json_type_object))
        return kvf_fail(KVF_E_INVALID, "%s%s[%zu] is not an object", config->fields.prefix, name, i);
    kvf_status status = kvf_field_object(&block, "attention", out);
    return status || out->object ? status : kvf_field_missing(&block, "attention");
}

static kvf_status refuse_features(const kvf_fields *attention) {
    for (size_t f = 0; f < sizeof refused / sizeof refused[0]; f++) {
        struct json_object *value = NULL;
        (void)json_object_object_get_ex(attention->object, refused[f], &value);
        if (!says_no(value))
            return kvf_fail(KVF_E_UNSUPPORTED, "%s%s is %s, which is not supported", attention->prefix,
                            refused[f], kvf_value_written(value, 40).text);
    }
    return KVF_OK;
}

kvf_status kvf_config_block_keeps(const kvf_config *config, const char *name, struct json_object *list,
                                  size_t i, kvf_keeps *keeps) {
    kvf_fields attention;
    bool left_out = false;
    kvf_status status = attention_of(config, name, list, i, &attention);
    if (!status)
        status = kvf_field_flag(&attention, "no_op", &left_out);
    if (!status && !left_out)
        status = refuse_features(&attention);
    *keeps = left_out ? KVF_KEEPS_NOTHING : KVF_KEEPS_FULL;
    return status;
}

kvf_status kvf_config_block_heads(kvf_config *config, const char *name) {
    struct json_object *list;
    kvf_status status = kvf_field_list(&config->fields, name, &list, NULL);
    for (uint32_t i = 0; i < config->layer_count && !status; i++) {
        kvf_heads *heads = &config->heads[i];
        kvf_fields attention;
        uint32_t group = 0;
        if (config->keeps[i] == KVF_KEEPS_NOTHING)
            continue;
        status = attention_of(config, name, list, i, &attention);
        if (!status)
            status = kvf_field_need(&attention, group_field, 1, heads->query_heads, 0, &group);
        if (!status && heads->query_heads % group)
            status = kvf_fail(KVF_E_INVALID, "%s%s is %u, which does not divide %s, %u", attention.prefix,
                              group_field, group,
                              kvf_field_name(&config->fields, kvf_family_names(config->family)->heads).text,
                              heads->query_heads);
        if (!status)
            heads->kv_heads = heads->query_heads / group;
    }
    return status;
}
