/*
 * The groups of attention layers: K and V for each KV head, and the keys of indexers beside them; those of latents are
 * in config_latent.c.
 */
#include <stdio.h>

#include "model/config.h"

/* ---- heads ----------------------------------------------------------------------------------- */

static kvf_status check_kv_heads(const kvf_config *config, const kvf_heads *heads) {
    const kvf_size_names *names = kvf_family_names(config->family);
    return kvf_config_check_kv_heads(config, config->fields.prefix, names->kv_heads, names->heads, heads);
}

/* Whether all query heads share one KV head, whatever the number of KV heads is said to be. */
static kvf_status read_one_kv_head(const kvf_config *config, bool *one) {
    const kvf_family *family = config->family;
    bool several = false;
    *one = family->one_kv_head != NULL;
    kvf_status status = *one ? kvf_field_flag(&config->fields, family->one_kv_head, one) : KVF_OK;
    if (!status && family->one_kv_head_not)
        status = kvf_field_flag(&config->fields, family->one_kv_head_not, &several);
    *one = *one && !several;
    return status;
}

static kvf_status read_kv_heads(const kvf_config *config, kvf_heads *heads) {
    const kvf_family *family = config->family;
    const kvf_size_names *names = kvf_family_names(family);
    bool one = false;
    kvf_status status = read_one_kv_head(config, &one);
    if (status || one) {
        heads->kv_heads = 1;
        return status;
    }
    bool counts = !names->kv_heads_if;
    status = counts ? KVF_OK : kvf_field_flag(&config->fields, names->kv_heads_if, &counts);
    if (status || !counts) {
        heads->kv_heads = heads->query_heads;
        return status;
    }
    bool given;
    status =
        kvf_field_number(&config->fields, names->kv_heads, 1, heads->query_heads, &given, &heads->kv_heads);
    if (status)
        return status;
    bool null = !given && kvf_field_exists(&config->fields, names->kv_heads);
    if (given)
        return check_kv_heads(config, heads);
    if (family->kv_heads == KVF_AS_MANY_AS_HEADS || (null && family->null_kv_heads))
        heads->kv_heads = heads->query_heads; /* multi-head attention */
    else if (!null && family->kv_heads)
        heads->kv_heads = family->kv_heads;
    else
        return kvf_field_missing(&config->fields, names->kv_heads);
    return check_kv_heads(config, heads);
}

/* Engines may not agree on a head's size that is missing: one may have a default where another divides. */
static kvf_status check_disputed(const kvf_config *config, const char *names, uint32_t divided) {
    uint32_t disputed = config->family->head_dim_disputed;
    if (disputed && disputed != divided && !kvf_field_exists(&config->fields, names))
        return kvf_fail(
            KVF_E_INVALID,
            "%shead_dim is missing: some engines take %u for %.64s, others divide, which makes %u",
            config->fields.prefix, disputed, config->fields.family, divided);
    return KVF_OK;
}

static kvf_status read_head_dim(const kvf_config *config, kvf_heads *heads) {
    const char *names = kvf_family_head_dim_names(config->family);
    const kvf_size_names *sizes = kvf_family_names(config->family);
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
    status = kvf_field_number(&config->fields, sizes->hidden, 1, KVF_CONFIG_MAX_WIDTH, &given, &hidden);
    if (status)
        return status;
    if (!given)
        return kvf_fail(KVF_E_INVALID, "%shead_dim is missing, and so is %s; %.64s needs one of them",
                        config->fields.prefix, kvf_field_name(&config->fields, sizes->hidden).text,
                        config->fields.family);
    if (hidden % heads->query_heads)
        return kvf_fail(KVF_E_INVALID, "%shead_dim is missing, and %s, %u, does not divide %s, %u",
                        config->fields.prefix, kvf_field_name(&config->fields, sizes->heads).text,
                        heads->query_heads, kvf_field_name(&config->fields, sizes->hidden).text, hidden);
    heads->head_dim = hidden / heads->query_heads;
    return check_disputed(config, names, heads->head_dim);
}

static kvf_status read_v_head_dim(const kvf_config *config, kvf_heads *heads) {
    const char *name = config->family->v_head_dim;
    heads->v_head_dim = heads->head_dim;
    return name ? kvf_field_need(&config->fields, name, 1, KVF_CONFIG_MAX_WIDTH, 0, &heads->v_head_dim)
                : KVF_OK;
}

/* The heads of the layers whose heads differ from the rest, as the family's kvf_other_heads names them. */
typedef struct other_heads {
    kvf_heads heads;
    kvf_keeps keeps; /* those layers */
    bool head_dim_given, kv_heads_given;
} other_heads;

/* A field may say by a word which layers differ; a word that stands for no layers means that none does. */
static kvf_status read_which(const kvf_config *config, other_heads *out) {
    const kvf_other_heads *names = config->family->other;
    const char *word = NULL;
    out->keeps = names->keeps;
    kvf_status status =
        names->keeps_field ? kvf_field_text(&config->fields, names->keeps_field, &word) : KVF_OK;
    if (!status && word && !kvf_config_word_keeps(word, &out->keeps))
        out->keeps = KVF_KEEPS_NOTHING;
    return status;
}

/* A size that may be missing: `out` is then as it was. */
static kvf_status read_size(const kvf_config *config, const char *name, uint32_t most, bool *given,
                            uint32_t *out) {
    *given = false;
    return name ? kvf_field_number(&config->fields, name, 1, most, given, out) : KVF_OK;
}

static kvf_status read_other_kv_heads(const kvf_config *config, other_heads *out) {
    const kvf_other_heads *names = config->family->other;
    const char *query_names = kvf_family_names(config->family)->heads;
    kvf_heads *heads = &out->heads;
    bool counts = !names->kv_heads_if;
    bool given;
    kvf_status status = counts ? KVF_OK : kvf_field_flag(&config->fields, names->kv_heads_if, &counts);
    if (!status)
        status = read_size(config, names->query_heads, KVF_CONFIG_MAX_HEADS, &given, &heads->query_heads);
    if (!status && given)
        query_names = names->query_heads;
    if (!status && counts)
        status =
            read_size(config, names->kv_heads, heads->query_heads, &out->kv_heads_given, &heads->kv_heads);
    if (!status && !out->kv_heads_given && names->kv_heads_times)
        heads->kv_heads *= names->kv_heads_times; /* at most KVF_CONFIG_MAX_HEADS before */
    return status ? status
                  : kvf_config_check_kv_heads(config, config->fields.prefix, names->kv_heads, query_names,
                                              heads);
}

/* If single layers are described, the fields for these layers have no default, and `all` applies to them. */
static kvf_status read_other_heads(const kvf_config *config, const kvf_heads *all, other_heads *out) {
    const kvf_other_heads *names = config->family->other;
    bool by_layer = kvf_field_exists(&config->fields, "per_layer_config");
    *out = (other_heads){.heads = *all};
    if (!names)
        return KVF_OK;
    if (by_layer && names->kv_heads_times)
        return kvf_fail(KVF_E_UNSUPPORTED, "%sper_layer_config is given: it is not supported for %.64s",
                        config->fields.prefix, config->fields.family);
    kvf_heads *heads = &out->heads;
    bool given;
    if (names->head_dim_or && !by_layer)
        heads->head_dim = heads->v_head_dim = names->head_dim_or;
    kvf_status status = read_which(config, out);
    if (!status)
        status = read_other_kv_heads(config, out);
    if (!status)
        status =
            read_size(config, names->head_dim, KVF_CONFIG_MAX_WIDTH, &out->head_dim_given, &heads->head_dim);
    if (!status && out->head_dim_given && !config->family->v_head_dim)
        heads->v_head_dim = heads->head_dim;
    return status ? status
                  : read_size(config, names->v_head_dim, KVF_CONFIG_MAX_WIDTH, &given, &heads->v_head_dim);
}

/* A configuration may give the heads of such layers in both ways, which must then agree. */
static kvf_status check_other_heads(const kvf_config *config, const other_heads *other) {
    for (uint32_t i = 0; i < config->layer_count; i++) {
        if (!(config->keeps[i] & other->keeps))
            continue;
        const kvf_heads *is = &config->heads[i];
        if (other->head_dim_given && is->head_dim != other->heads.head_dim)
            return kvf_config_layer_differs(config, config->family->other->head_dim, other->heads.head_dim, i,
                                            is->head_dim);
        if (other->kv_heads_given && is->kv_heads != other->heads.kv_heads)
            return kvf_config_layer_differs(config, config->family->other->kv_heads, other->heads.kv_heads, i,
                                            is->kv_heads);
    }
    return KVF_OK;
}

/* Sets the heads of each layer. */
static kvf_status read_heads(kvf_config *config) {
    kvf_heads all = {0};
    other_heads other;
    kvf_status status = kvf_field_need(&config->fields, kvf_family_names(config->family)->heads, 1,
                                       KVF_CONFIG_MAX_HEADS, config->family->heads, &all.query_heads);
    if (!status)
        status = read_kv_heads(config, &all);
    if (!status)
        status = read_head_dim(config, &all);
    if (!status)
        status = read_v_head_dim(config, &all);
    if (!status)
        status = read_other_heads(config, &all, &other);
    if (status)
        return status;
    config->heads = kvf_alloc(config->layer_count, sizeof *config->heads);
    if (!config->heads)
        return kvf_nomem("the layers of a configuration");
    bool by_layer = kvf_field_exists(&config->fields, "per_layer_config");
    for (uint32_t i = 0; i < config->layer_count; i++)
        config->heads[i] = !by_layer && (config->keeps[i] & other.keeps) ? other.heads : all;
    if (config->family->blocks)
        status = kvf_config_block_heads(config, config->family->blocks);
    if (!status)
        status = kvf_config_override_layers(config);
    return status || !by_layer ? status : check_other_heads(config, &other);
}

static void add_scale(kvf_config *config, const char *name, const kvf_heads *heads) {
    kvf_part_desc *scale = kvf_config_add_part(config, name, config->options.scale_dtype);
    scale->units = config->options.scale_per_head ? heads->kv_heads : 1;
    scale->tp_rule = config->options.scale_per_head ? KVF_TP_SPLIT : KVF_TP_REPLICATE;
    scale->cell_elements = 1;
    scale->tensor = 1;
}

static kvf_status add_head_parts(kvf_config *config, uint32_t layer) {
    const kvf_heads *heads = &config->heads[layer];
    kvf_dtype dtype = config->options.cache_dtype ? config->options.cache_dtype : config->dtype;
    for (uint32_t i = 0; i < 2; i++) {
        kvf_part_desc *part = kvf_config_add_part(config, i ? "v" : "k", dtype);
        part->units = heads->kv_heads;
        part->cell_elements = i ? heads->v_head_dim : heads->head_dim;
    }
    if (config->options.scale_dtype) {
        add_scale(config, "k_scale", heads);
        add_scale(config, "v_scale", heads);
    }
    return KVF_OK;
}

bool kvf_config_same_heads(const kvf_config *config, uint32_t layer, uint32_t other) {
    const kvf_heads *a = &config->heads[layer], *b = &config->heads[other];
    return a->kv_heads == b->kv_heads && a->head_dim == b->head_dim && a->v_head_dim == b->v_head_dim;
}

/* Adds a group for each shape of the layers that keep `what`: "full", and if they differ "full.2" ... */
static kvf_status add_heads(kvf_config *config, const char *name, kvf_keeps what) {
    static const kvf_kept_rows rows = {"heads", kvf_config_same_heads, add_head_parts};
    return kvf_config_add_alike(config, name, KVF_GROUP_TOKENS, what, &rows);
}

static kvf_status add_head_groups(kvf_config *config) {
    kvf_status status = read_heads(config);
    if (!status)
        status = add_heads(config, "full", KVF_KEEPS_FULL);
    if (!status)
        status = add_heads(config, "swa", KVF_KEEPS_WINDOW);
    if (!status)
        status = add_heads(config, "chunked", KVF_KEEPS_CHUNK);
    if (!status)
        status = kvf_config_read_indexer(config);
    if (!status && config->indexer.width && kvf_config_has(config, KVF_KEEPS_INDEXER))
        kvf_config_add_indexer(config);
    return status;
}

/* ---- all of it ------------------------------------------------------------------------------- */

kvf_status kvf_config_add_attention(kvf_config *config) {
    bool attention = kvf_config_has(config, KVF_KEEPS_ATTENTION);
    if (attention && config->family->attention == KVF_ATTENTION_HEADS)
        return add_head_groups(config);
    if (attention && config->family->attention == KVF_ATTENTION_LATENT)
        return kvf_config_add_latents(config);
    kvf_status status = kvf_config_override_layers(config);
    return status || !attention ? status : kvf_config_add_compressed(config);
}
