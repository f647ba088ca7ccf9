/*
 * From the text of a config.json to a model.
 */
#include <stdio.h>

#include "model/config.h"

/* ---- options and the text model -------------------------------------------------------------- */

static kvf_status check_dtype_option(const char *name, kvf_dtype dtype) {
    if (dtype != KVF_DTYPE_INVALID && kvf_dtype_bits(dtype) == 0)
        return kvf_fail(KVF_E_INVALID, "kvf_config_options.%s is %d, which is not a kvf_dtype", name,
                        (int)dtype);
    return KVF_OK;
}

static kvf_status take_options(kvf_config_options *out, const kvf_config_options *options) {
    kvf_status status = kvf_take_options(out, sizeof *out, options, "kvf_config_options");
    if (!status)
        status = check_dtype_option("cache_dtype", out->cache_dtype);
    if (!status)
        status = check_dtype_option("state_dtype", out->state_dtype);
    if (!status)
        status = check_dtype_option("scale_dtype", out->scale_dtype);
    if (!status && out->scale_per_head && !out->scale_dtype)
        status = kvf_fail(KVF_E_INVALID, "kvf_config_options.scale_per_head is set, but scale_dtype is not");
    return status;
}

/* Multimodal models keep the language model's configuration in an object inside; those that also speak or act keep it
 * in their thinker's or that of what sees. */
static kvf_status find_text_model(const kvf_fields *root, kvf_fields *out) {
    static const char *const names[] = {"text_config", "llm_config", "language_config"};
    kvf_fields inner;
    kvf_status status = kvf_field_object(root, "thinker_config", &inner);
    if (!status && !inner.object)
        status = kvf_field_object(root, "vlm_config", &inner);
    const kvf_fields *outer = inner.object ? &inner : root;
    for (size_t i = 0; i < sizeof names / sizeof names[0] && !status; i++) {
        status = kvf_field_object(outer, names[i], out);
        if (!status && out->object)
            return KVF_OK;
    }
    *out = *outer;
    return status;
}

/* A family may have models without latents, which are then a family of their own. */
static kvf_status choose_attention(kvf_config *config) {
    const char *flag = config->family->latents_if;
    bool latents = true;
    kvf_status status = flag ? kvf_field_flag(&config->fields, flag, &latents) : KVF_OK;
    if (!status && !latents)
        config->family = config->family->without_latents;
    return status;
}

/* Refuses what a family's models may have and no size is known for. */
static kvf_status check_supported(const kvf_config *config) {
    const kvf_supported_field *row = config->family->supported;
    const kvf_fields *fields = &config->fields;
    kvf_status status = KVF_OK;
    for (; row && row->field && !status; row++) {
        struct json_object *value;
        kvf_field_as_text name = kvf_field_name(fields, row->field);
        status = kvf_field_find(fields, row->field, &value, NULL);
        if (!status && !value && row->otherwise)
            return kvf_fail(KVF_E_UNSUPPORTED, "%s%s is missing: %s, not supported for %.64s", fields->prefix,
                            name.text, row->otherwise, fields->family);
        if (status || !value || !row->values)
            continue;
        bool text = json_object_is_type(value, json_type_string);
        const char *is = text ? json_object_get_string(value)
                              : json_object_to_json_string_ext(value, JSON_C_TO_STRING_PLAIN);
        if (!is || !kvf_config_is_among(is, row->values))
            return kvf_fail(KVF_E_UNSUPPORTED, "%s%s is %s, not supported for %.64s; supported: %s",
                            fields->prefix, name.text, kvf_excerpt_of(is ? is : "?", 60).text, fields->family,
                            row->values);
    }
    return status;
}

/* The inner configuration names its own type, or has that of its wrapper. */
static kvf_status find_family(const kvf_fields *root, kvf_config *config) {
    const char *outer;
    const char *inner;
    kvf_status status = kvf_field_text(root, "model_type", &outer);
    if (!status)
        status = kvf_field_text(&config->fields, "model_type", &inner);
    if (status)
        return status;
    const char *model_type = inner ? inner : outer;
    if (!model_type)
        return kvf_field_missing(root, "model_type");
    config->fields.family = model_type;
    config->family = kvf_family_find(model_type);
    if (!config->family)
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "%smodel_type is \"%s\", an unknown family; describe its groups by hand "
                        "(kvf_model_create(); kvferry.Model() in Python)",
                        inner ? config->fields.prefix : "", kvf_excerpt_of(model_type, 64).text);
    if (!config->options.name)
        config->options.name = outer ? outer : inner;
    status = choose_attention(config);
    return status ? status : check_supported(config);
}

/* Whether something is kept in the model's own type whatever the cache's is: a state, or what an indexer keeps beside
 * quantised keys or instead of them. */
static bool keeps_own_type(const kvf_config *config) {
    const kvf_indexer_fields *indexer = config->family->indexer;
    return kvf_config_has(config, KVF_KEEPS_STATE) || (indexer && (!indexer->dtype || indexer->tokens));
}

/* The model's element type: the language model's, or that of the whole configuration, or the family's. */
static kvf_status read_dtype(const kvf_fields *root, kvf_config *config) {
    static const char names[] = "dtype|torch_dtype";
    const char *text;
    const kvf_fields *fields = &config->fields;
    kvf_status status = kvf_field_text(fields, names, &text);
    if (!status && !text) {
        fields = root;
        status = kvf_field_text(fields, names, &text);
    }
    if (status)
        return status;
    config->dtype = config->family->dtype;
    if (text && kvf_dtype_by_name(text, &config->dtype))
        return kvf_fail_in(KVF_E_INVALID, "%s%s: ", fields->prefix, kvf_field_name(fields, names).text);
    if (config->dtype)
        return KVF_OK;
    bool only_attention = !keeps_own_type(config);
    if (config->options.cache_dtype && only_attention)
        return KVF_OK;
    return kvf_fail(KVF_E_INVALID, "%sdtype (or torch_dtype) is missing%s", config->fields.prefix,
                    only_attention ? ", and no cache_dtype is given (of the command: --dtype)" : "");
}

/* ---- groups ---------------------------------------------------------------------------------- */

bool kvf_config_has(const kvf_config *config, kvf_keeps what) {
    for (uint32_t i = 0; i < config->layer_count; i++)
        if (config->keeps[i] & what)
            return true;
    return false;
}

kvf_group_desc *kvf_config_add_group(kvf_config *config, const char *name, kvf_group_kind kind) {
    uint32_t g = config->group_count++;
    (void)snprintf(config->group_names[g], sizeof config->group_names[g], "%s", name);
    config->groups[g] = (kvf_group_desc){.name = config->group_names[g],
                                         .kind = kind,
                                         .layers = config->layers + (size_t)g * config->layer_count,
                                         .parts = config->parts[g]};
    return &config->groups[g];
}

void kvf_config_add_layer(kvf_config *config, uint32_t layer) {
    uint32_t g = config->group_count - 1;
    config->layers[(size_t)g * config->layer_count + config->groups[g].layer_count++] = layer;
}

void kvf_config_add_layers(kvf_config *config, kvf_keeps what) {
    for (uint32_t i = 0; i < config->layer_count; i++)
        if (config->keeps[i] & what)
            kvf_config_add_layer(config, i);
}

/* The next layer from `from` on that keeps `what` in rows that no layer before it has; layer_count if none. */
static uint32_t next_rows(const kvf_config *config, kvf_keeps what, const kvf_kept_rows *rows,
                          uint32_t from) {
    for (uint32_t i = from; i < config->layer_count; i++) {
        uint32_t before = 0;
        if (!(config->keeps[i] & what))
            continue;
        while (before < i && !((config->keeps[before] & what) && rows->same(config, before, i)))
            before++;
        if (before == i)
            return i;
    }
    return config->layer_count;
}

kvf_status kvf_config_add_alike(kvf_config *config, const char *name, kvf_group_kind kind, kvf_keeps what,
                                const kvf_kept_rows *rows) {
    uint32_t number = 1;
    for (uint32_t first = next_rows(config, what, rows, 0); first < config->layer_count;
         first = next_rows(config, what, rows, first + 1), number++) {
        char numbered[KVF_CONFIG_GROUP_NAME_BYTES];
        (void)snprintf(numbered, sizeof numbered, number > 1 ? "%s.%u" : "%s", name, number);
        if (config->group_count == KVF_CONFIG_MAX_HEAD_GROUPS)
            return kvf_fail(KVF_E_UNSUPPORTED,
                            "%sper_layer_config makes more than %u groups of layers with the same %s",
                            config->fields.prefix, KVF_CONFIG_MAX_HEAD_GROUPS, rows->of);
        kvf_group_desc *group = kvf_config_add_group(config, numbered, kind);
        group->window_tokens = what == KVF_KEEPS_WINDOW ? config->window_tokens : 0;
        group->chunk_tokens = what == KVF_KEEPS_CHUNK ? config->chunk_tokens : 0;
        for (uint32_t i = first; i < config->layer_count; i++)
            if ((config->keeps[i] & what) && rows->same(config, i, first))
                kvf_config_add_layer(config, i);
        kvf_status status = rows->add(config, first);
        if (status)
            return status;
    }
    return KVF_OK;
}

kvf_part_desc *kvf_config_add_part(kvf_config *config, const char *name, kvf_dtype dtype) {
    uint32_t g = config->group_count - 1;
    kvf_part_desc *part = &config->parts[g][config->groups[g].part_count++];
    *part = (kvf_part_desc){.name = name, .dtype = dtype};
    return part;
}

void kvf_config_add_row(kvf_config *config, const char *name, kvf_dtype dtype, uint32_t elements,
                        uint32_t tensor) {
    kvf_part_desc *part = kvf_config_add_part(config, name, dtype);
    part->units = 1;
    part->cell_elements = elements;
    part->tensor = tensor;
    part->tp_rule = KVF_TP_REPLICATE;
}

static kvf_status build(kvf_config *config, kvf_model **out) {
    config->layers = kvf_alloc(config->layer_count, KVF_CONFIG_MAX_GROUPS * sizeof *config->layers);
    if (!config->layers)
        return kvf_nomem("the layers of a configuration");
    kvf_status status = kvf_config_add_attention(config);
    if (!status)
        status = kvf_config_add_state(config);
    if (!status)
        status = kvf_config_add_stream_conv(config);
    if (!status && config->group_count == 0)
        status = kvf_fail(KVF_E_INVALID, "%s%s is %u, and none of them keeps a cache", config->fields.prefix,
                          kvf_field_name(&config->fields, kvf_family_names(config->family)->layers).text,
                          config->layer_count);
    if (status)
        return status;
    kvf_config_note_unread_fields(config);
    const kvf_model_desc desc = {
        .struct_size = sizeof desc,
        .name = config->options.name,
        .layer_count = config->layer_count,
        .groups = config->groups,
        .group_count = config->group_count,
    };
    return kvf_model_create_noted(&desc, &config->notes, out);
}

static kvf_status read_tree(struct json_object *tree, const kvf_config_options *options, kvf_model **out) {
    kvf_config config = {.options = *options, .root = tree};
    kvf_fields root = {.object = tree};
    kvf_status status = find_text_model(&root, &config.fields);
    if (!status)
        status = find_family(&root, &config);
    if (!status)
        status = kvf_config_read_layers(&config);
    if (!status)
        status = read_dtype(&root, &config);
    if (!status)
        status = build(&config, out);
    kvf_free(config.layers);
    kvf_free(config.heads);
    kvf_free(config.latents);
    kvf_free(config.keeps);
    return status;
}

kvf_status kvf_model_from_config(const char *json, size_t bytes, const kvf_config_options *options,
                                 kvf_model **out) {
    if (!json || !out)
        return kvf_fail(KVF_E_INVALID, "configuration: %s is NULL", json ? "out" : "json");
    kvf_config_options taken;
    kvf_status status = take_options(&taken, options);
    struct json_object *tree = NULL;
    if (!status)
        status = kvf_config_parse(json, bytes, &tree);
    if (!status)
        status = read_tree(tree, &taken, out);
    json_object_put(tree);
    return status;
}
