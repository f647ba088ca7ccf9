/*
 * The groups of layers that keep one latent for all heads, perhaps beside the key of a sparse indexer.
 *
 * A latent is that of each token, or, of compressed ones (DeepSeek V4 and V4.1):
 *
 *   group        of the layers    has one row for    and the parts
 *   swa          all              a token, window    latent
 *   c1           KEEPS_EACH       a token            latent, indexer, indexer_scale
 *   c2           KEEPS_PAIR       2 tokens           latent, indexer, indexer_scale
 *   c2.state     KEEPS_PAIR       a token, window    compressor
 *   csa          KEEPS_SPARSE     4 tokens           latent, indexer, indexer_scale
 *   csa.state    KEEPS_SPARSE     a token, window    compressor, indexer_compressor
 *   hca          KEEPS_HEAVY      128 tokens         latent
 *   hca.state    KEEPS_HEAVY      a token, window    compressor
 *
 * A compressor's row is what a token adds to the entries it goes into: for each of them, as many elements as the entry
 * has, and as many scores that weigh them. Its window has the tokens that the next entry is made of.
 */
#include <stdio.h>

#include "model/config.h"

/* Engines sum what goes into an entry in single precision. */
#define COMPRESSOR_DTYPE KVF_DTYPE_F32

/* ---- latents --------------------------------------------------------------------------------- */

static kvf_status refuse_scales(const kvf_config *config) {
    if (config->options.scale_dtype)
        return kvf_fail(KVF_E_INVALID, "scale_dtype is %s, but a latent has no K and V to scale",
                        kvf_dtype_name(config->options.scale_dtype));
    return KVF_OK;
}

static void add_latent(kvf_config *config, uint32_t width) {
    kvf_dtype dtype = config->options.cache_dtype ? config->options.cache_dtype : config->dtype;
    kvf_config_add_row(config, "latent", dtype, width, 0);
}

/* ---- the latent of each layer ------------------------------------------------------------------ */

/* Sets the latents of the layers with a window, unless single layers are described. */
static kvf_status read_windowed(kvf_config *config) {
    const kvf_window_latent *names = config->family->window_latent;
    kvf_latent latent = {0};
    if (!names || !kvf_config_has(config, KVF_KEEPS_WINDOW) ||
        kvf_field_exists(&config->fields, "per_layer_config"))
        return KVF_OK;
    kvf_status status =
        kvf_field_need(&config->fields, names->rank, 1, KVF_CONFIG_MAX_WIDTH, 0, &latent.rank);
    if (!status)
        status = kvf_field_need(&config->fields, names->rope, 0, KVF_CONFIG_MAX_WIDTH, 0, &latent.rope);
    for (uint32_t i = 0; i < config->layer_count && !status; i++)
        if (config->keeps[i] & KVF_KEEPS_WINDOW)
            config->latents[i] = latent;
    return status;
}

/* Latents of layers with a window may be given in both ways, which must then agree. */
static kvf_status check_windowed(const kvf_config *config) {
    const kvf_window_latent *names = config->family->window_latent;
    kvf_latent said = {0};
    bool rank_given = false;
    bool rope_given = false;
    kvf_status status = names ? kvf_field_number(&config->fields, names->rank, 1, KVF_CONFIG_MAX_WIDTH,
                                                 &rank_given, &said.rank)
                              : KVF_OK;
    if (!status && names)
        status =
            kvf_field_number(&config->fields, names->rope, 0, KVF_CONFIG_MAX_WIDTH, &rope_given, &said.rope);
    for (uint32_t i = 0; i < config->layer_count && !status; i++) {
        const kvf_latent *is = &config->latents[i];
        if (!(config->keeps[i] & KVF_KEEPS_WINDOW))
            continue;
        if (rank_given && is->rank != said.rank)
            return kvf_config_layer_differs(config, names->rank, said.rank, i, is->rank);
        if (rope_given && is->rope != said.rope)
            return kvf_config_layer_differs(config, names->rope, said.rope, i, is->rope);
    }
    return status;
}

/* The list may be longer than the model. */
static kvf_status read_flags(kvf_config *config, const char *field, struct json_object *list) {
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < config->layer_count && !status; i++) {
        uint32_t rotates = 0;
        status = kvf_element_number(&config->fields, field, list, i, 0, 1, &rotates);
        if (!rotates)
            config->latents[i].rope = 0;
    }
    return status;
}

static kvf_status read_unrotated(kvf_config *config) {
    const kvf_latent_layers *names = config->family->latent_layers;
    const char *field;
    struct json_object *list = NULL;
    bool given;
    if (!names)
        return KVF_OK;
    uint32_t every = names->rope_every_or;
    kvf_status status = kvf_field_list(&config->fields, names->rope_flags, &list, &field);
    if (!status && list)
        return read_flags(config, field, list);
    if (!status)
        status =
            kvf_field_number(&config->fields, names->rope_every, 1, KVF_MODEL_MAX_LAYERS, &given, &every);
    for (uint32_t i = every - 1; i < config->layer_count && !status; i += every)
        config->latents[i].rope = 0;
    return status;
}

/* Sets the latent of each layer. */
static kvf_status read_latents(kvf_config *config) {
    kvf_latent all = {0};
    kvf_status status =
        kvf_field_need(&config->fields, "kv_lora_rank", 1, KVF_CONFIG_MAX_WIDTH, 0, &all.rank);
    if (!status)
        status = kvf_field_need(&config->fields, "qk_rope_head_dim", 0, KVF_CONFIG_MAX_WIDTH, 0, &all.rope);
    if (status)
        return status;
    config->latents = kvf_alloc(config->layer_count, sizeof *config->latents);
    if (!config->latents)
        return kvf_nomem("the layers of a configuration");
    for (uint32_t i = 0; i < config->layer_count; i++)
        config->latents[i] = all;
    status = read_windowed(config);
    if (!status)
        status = read_unrotated(config);
    if (!status)
        status = kvf_config_override_layers(config);
    return status ? status : check_windowed(config);
}

/* ---- layers that read the latents of others ------------------------------------------------------ */

/* Such a layer keeps no latent. It may keep the key of an indexer. */
static kvf_status drop_readers(kvf_config *config) {
    const kvf_fields *fields = &config->fields;
    struct json_object *list = NULL;
    const char *name = NULL;
    kvf_status status = config->family->latent_layers
                            ? kvf_field_list(fields, config->family->latent_layers->sources, &list, &name)
                            : KVF_OK;
    if (status || !list)
        return status;
    if (json_object_array_length(list) != config->layer_count)
        return kvf_fail(KVF_E_INVALID, "%s%s describes %zu layers, but the model has %u", fields->prefix,
                        name, json_object_array_length(list), config->layer_count);
    for (uint32_t i = 0; i < config->layer_count && !status; i++) {
        uint32_t source = 0;
        status = kvf_element_number(fields, name, list, i, 0, i, &source);
        if (!status && source != i && !(config->keeps[source] & KVF_KEEPS_FULL))
            return kvf_fail(KVF_E_INVALID, "%s%s[%u] is %u, a layer that has no latents of its own",
                            fields->prefix, name, i, source);
        if (!status && source != i)
            config->keeps[i] &= ~KVF_KEEPS_FULL;
    }
    return status;
}

/* ---- groups of latents ------------------------------------------------------------------------- */

static uint32_t width_of(const kvf_config *config, uint32_t layer) {
    return config->latents[layer].rank + config->latents[layer].rope; /* each at most 2^24 */
}

/* Whether keys of single tokens are beside the latents of the layers that have them. */
static bool keys_are_beside(const kvf_config *config) {
    return config->indexer.width && config->indexer.tokens == 1;
}

static bool same_rows(const kvf_config *config, uint32_t a, uint32_t b) {
    return width_of(config, a) == width_of(config, b) &&
           (!keys_are_beside(config) || ((config->keeps[a] ^ config->keeps[b]) & KVF_KEEPS_INDEXER) == 0);
}

static kvf_status add_rows(kvf_config *config, uint32_t layer) {
    add_latent(config, width_of(config, layer));
    if (keys_are_beside(config) && (config->keeps[layer] & KVF_KEEPS_INDEXER))
        kvf_config_add_indexer_key(config, 1);
    return KVF_OK;
}

/* Adds a group for each kind of rows that layers keep: `name`, and if they differ `name`.2 ... */
static kvf_status add_latents(kvf_config *config, const char *name, kvf_keeps what) {
    static const kvf_kept_rows rows = {"latents", same_rows, add_rows};
    return kvf_config_add_alike(config, name, KVF_GROUP_TOKENS, what, &rows);
}

/* Adds the keys of indexers whose layers keep no latents. */
static void add_keys_alone(kvf_config *config) {
    bool any = false;
    for (uint32_t i = 0; i < config->layer_count; i++) {
        if (!(config->keeps[i] & KVF_KEEPS_INDEXER) || (config->keeps[i] & KVF_KEEPS_FULL))
            continue;
        if (!any)
            (void)kvf_config_add_group(config, "indexer", KVF_GROUP_TOKENS);
        any = true;
        kvf_config_add_layer(config, i);
    }
    if (any)
        kvf_config_add_indexer_key(config, 0);
}

kvf_status kvf_config_add_latents(kvf_config *config) {
    kvf_status status = read_latents(config);
    if (!status)
        status = refuse_scales(config);
    if (!status)
        status = kvf_config_read_indexer(config);
    if (!status)
        status = drop_readers(config);
    if (!status)
        status = add_latents(config, "mla", KVF_KEEPS_FULL);
    if (status)
        return status;
    if (keys_are_beside(config))
        add_keys_alone(config);
    else if (config->indexer.width && kvf_config_has(config, KVF_KEEPS_INDEXER))
        kvf_config_add_indexer(config);
    return add_latents(config, "swa", KVF_KEEPS_WINDOW);
}

/* ---- compressed latents ---------------------------------------------------------------------- */

/* How the layers of one kind compress. */
typedef struct compression {
    kvf_keeps keeps;
    const char *entries; /* the group of what is compressed */
    const char *states;  /* the group of what is yet to be */
    const char *rate;    /* fields that may say the number of tokens */
    uint32_t tokens;     /* from one entry to the next */
    uint32_t overlap;    /* how many entries a token goes into */
    bool indexer;
    bool index_compressor; /* the indexer's key is not made of the latent, but compressed by itself */
} compression;

static const compression compressions[] = {
    {.keeps = KVF_KEEPS_EACH, .entries = "c1", .tokens = 1, .indexer = true},
    {.keeps = KVF_KEEPS_PAIR,
     .entries = "c2",
     .states = "c2.state",
     .tokens = KVF_PAIR_TOKENS,
     .overlap = 1,
     .indexer = true},
    {.keeps = KVF_KEEPS_SPARSE,
     .entries = "csa",
     .states = "csa.state",
     .rate = "compress_rates.compressed_sparse_attention|compress_rate_csa",
     .tokens = KVF_SPARSE_TOKENS,
     .overlap = 2,
     .indexer = true,
     .index_compressor = true},
    {.keeps = KVF_KEEPS_HEAVY,
     .entries = "hca",
     .states = "hca.state",
     .rate = "compress_rates.heavily_compressed_attention|compress_rate_hca",
     .tokens = KVF_HEAVY_TOKENS,
     .overlap = 1},
};

/* All heads share one vector, which is key and value and contains the rotated elements. */
static kvf_status read_width(const kvf_config *config, uint32_t *width) {
    const kvf_fields *fields = &config->fields;
    const char *kv_names = kvf_family_names(config->family)->kv_heads;
    uint32_t kv_heads = 1;
    uint32_t rope = 0;
    bool given;
    kvf_status status = kvf_field_number(fields, kv_names, 1, KVF_CONFIG_MAX_HEADS, &given, &kv_heads);
    if (!status && kv_heads != 1)
        status = kvf_fail(KVF_E_INVALID, "%s%s is %u, but the heads of %.64s share one; allowed: 1",
                          fields->prefix, kvf_field_name(fields, kv_names).text, kv_heads, fields->family);
    if (!status)
        status = kvf_field_need(fields, "head_dim", 1, KVF_CONFIG_MAX_WIDTH, config->family->head_dim, width);
    if (!status)
        status = kvf_field_number(fields, "qk_rope_head_dim", 0, KVF_CONFIG_MAX_WIDTH, &given, &rope);
    if (!status && rope > *width)
        status = kvf_fail(KVF_E_INVALID, "%sqk_rope_head_dim is %u, but head_dim, which contains it, is %u",
                          fields->prefix, rope, *width);
    return status;
}

static kvf_status check_rate(const kvf_config *config, const compression *way) {
    uint32_t rate = way->tokens;
    bool given;
    kvf_status status =
        way->rate ? kvf_field_number(&config->fields, way->rate, 0, UINT32_MAX, &given, &rate) : KVF_OK;
    if (!status && rate != way->tokens)
        status = kvf_fail(KVF_E_UNSUPPORTED, "%s%s is %u; supported: %u", config->fields.prefix,
                          kvf_field_name(&config->fields, way->rate).text, rate, way->tokens);
    return status;
}

/* Adds what a compressor keeps whose entries have `width` elements: elements and scores for each entry. */
static void add_compressor(kvf_config *config, const char *name, const compression *way, uint32_t width,
                           uint32_t tensor) {
    kvf_dtype dtype = config->options.state_dtype ? config->options.state_dtype : COMPRESSOR_DTYPE;
    kvf_config_add_row(config, name, dtype, 2 * way->overlap * width, tensor); /* width is at most 2^24 */
}

static void add_compression(kvf_config *config, const compression *way, uint32_t width) {
    kvf_config_add_group(config, way->entries, KVF_GROUP_TOKENS)->tokens_per_step = way->tokens;
    kvf_config_add_layers(config, way->keeps);
    add_latent(config, width);
    if (way->indexer)
        kvf_config_add_indexer_key(config, 1);
    if (!way->states)
        return;
    kvf_config_add_group(config, way->states, KVF_GROUP_TOKENS)->window_tokens = way->overlap * way->tokens;
    kvf_config_add_layers(config, way->keeps);
    add_compressor(config, "compressor", way, width, 0);
    if (way->index_compressor)
        add_compressor(config, "indexer_compressor", way, config->indexer.width, 1);
}

kvf_status kvf_config_add_compressed(kvf_config *config) {
    uint32_t width = 0;
    kvf_status status = read_width(config, &width);
    if (!status)
        status = kvf_config_read_indexer(config);
    if (!status)
        status = refuse_scales(config);
    if (status)
        return status;
    kvf_config_add_group(config, "swa", KVF_GROUP_TOKENS)->window_tokens = config->window_tokens;
    kvf_config_add_layers(config, KVF_KEEPS_WINDOW);
    add_latent(config, width);
    for (size_t i = 0; i < sizeof compressions / sizeof compressions[0]; i++) {
        const compression *way = &compressions[i];
        if (!kvf_config_has(config, way->keeps))
            continue;
        status = check_rate(config, way);
        if (!status && way->indexer && !config->indexer.width)
            status = kvf_field_missing(&config->fields, config->family->indexer->width);
        if (status)
            return status;
        add_compression(config, way, width);
    }
    return KVF_OK;
}
