/*
 * The groups of layers that keep one latent for all heads, perhaps beside the key of a sparse indexer.
 *
 * A latent is that of each token, or, of compressed ones (DeepSeek V4):
 *
 *   group        of the layers    has one row for    and the parts
 *   swa          all              a token, window    latent
 *   csa          KEEPS_SPARSE     4 tokens           latent, indexer, indexer_scale
 *   csa.state    KEEPS_SPARSE     a token, window    compressor, indexer_compressor
 *   hca          KEEPS_HEAVY      128 tokens         latent
 *   hca.state    KEEPS_HEAVY      a token, window    compressor
 *
 * A compressor's row is what a token adds to the entries it goes into: for each of them, as many elements as the entry
 * has, and as many scores that weigh them. Its window has the tokens that the next entry is made of.
 */
#include "model/config.h"

/* How many elements of an indexer key share one scale, and the types of both. Engines store this key quantised whatever
 * the cache's type is: 128 bytes and a 4-byte scale for each token, values first, then scales. */
#define INDEXER_SCALE_ELEMENTS 128u
#define INDEXER_DTYPE KVF_DTYPE_F8_E4M3
#define INDEXER_SCALE_DTYPE KVF_DTYPE_F32

/* Engines sum what goes into an entry in single precision. */
#define COMPRESSOR_DTYPE KVF_DTYPE_F32

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
static kvf_status read_indexer(const kvf_config *config, uint32_t *width) {
    bool given;
    kvf_status status =
        kvf_field_number(&config->fields, "index_head_dim", 1, KVF_CONFIG_MAX_WIDTH, &given, width);
    if (!given)
        *width = config->family->index_head_dim;
    if (!status && *width % INDEXER_SCALE_ELEMENTS)
        return kvf_fail(KVF_E_INVALID, "%sindex_head_dim is %u; it must be a multiple of %u",
                        config->fields.prefix, *width, INDEXER_SCALE_ELEMENTS);
    return status;
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

static kvf_status refuse_scales(const kvf_config *config) {
    if (config->options.scale_dtype)
        return kvf_fail(KVF_E_INVALID, "scale_dtype is %s, but a latent has no K and V to scale",
                        kvf_dtype_name(config->options.scale_dtype));
    return KVF_OK;
}

static void add_latent(kvf_config *config, uint32_t width) {
    kvf_part_desc *latent = kvf_config_add_part(
        config, "latent", config->options.cache_dtype ? config->options.cache_dtype : config->dtype);
    latent->units = 1;
    latent->cell_elements = width;
    latent->tp_rule = KVF_TP_REPLICATE;
}

/* Adds the layers with attention that have an indexer of their own, or those that have none. */
static void add_latents(kvf_config *config, const char *name, uint32_t width, bool with_indexer) {
    (void)kvf_config_add_group(config, name, KVF_GROUP_TOKENS);
    for (uint32_t i = 0; i < config->layer_count; i++)
        if ((config->keeps[i] & KVF_KEEPS_FULL) && !(config->keeps[i] & KVF_KEEPS_INDEXER) == !with_indexer)
            kvf_config_add_layer(config, i);
    add_latent(config, width);
}

kvf_status kvf_config_add_latents(kvf_config *config) {
    uint32_t rank = 0;
    uint32_t rope = 0;
    uint32_t indexer = 0;
    kvf_status status = kvf_field_need(&config->fields, "kv_lora_rank", 1, KVF_CONFIG_MAX_WIDTH, 0, &rank);
    if (!status)
        status = kvf_field_need(&config->fields, "qk_rope_head_dim", 1, KVF_CONFIG_MAX_WIDTH, 0, &rope);
    if (!status)
        status = refuse_scales(config);
    if (!status)
        status = read_indexer(config, &indexer);
    if (!status && indexer)
        status = mark_indexers(config);
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

/* ---- compressed latents ---------------------------------------------------------------------- */

/* How the layers of one kind compress. */
typedef struct compression {
    uint8_t keeps;
    const char *entries; /* the group of what is compressed */
    const char *states;  /* the group of what is yet to be */
    const char *rate;    /* fields that may say the number of tokens */
    uint32_t tokens;     /* from one entry to the next */
    uint32_t overlap;    /* how many entries a token goes into */
    bool indexer;
} compression;

static const compression compressions[] = {
    {.keeps = KVF_KEEPS_SPARSE,
     .entries = "csa",
     .states = "csa.state",
     .rate = "compress_rates.compressed_sparse_attention|compress_rate_csa",
     .tokens = KVF_SPARSE_TOKENS,
     .overlap = 2,
     .indexer = true},
    {.keeps = KVF_KEEPS_HEAVY,
     .entries = "hca",
     .states = "hca.state",
     .rate = "compress_rates.heavily_compressed_attention|compress_rate_hca",
     .tokens = KVF_HEAVY_TOKENS,
     .overlap = 1},
};

typedef struct compressed_widths {
    uint32_t latent;
    uint32_t indexer;
} compressed_widths;

/* All heads share one vector, which is key and value and contains the rotated elements. */
static kvf_status read_widths(const kvf_config *config, compressed_widths *out) {
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
        status = kvf_field_need(fields, "head_dim", 1, KVF_CONFIG_MAX_WIDTH, config->family->head_dim,
                                &out->latent);
    if (!status)
        status = kvf_field_number(fields, "qk_rope_head_dim", 0, KVF_CONFIG_MAX_WIDTH, &given, &rope);
    if (!status && rope > out->latent)
        status = kvf_fail(KVF_E_INVALID, "%sqk_rope_head_dim is %u, but head_dim, which contains it, is %u",
                          fields->prefix, rope, out->latent);
    return status ? status : read_indexer(config, &out->indexer);
}

static kvf_status check_rate(const kvf_config *config, const compression *way) {
    uint32_t rate = way->tokens;
    bool given;
    kvf_status status = kvf_field_number(&config->fields, way->rate, 0, UINT32_MAX, &given, &rate);
    if (!status && rate != way->tokens)
        status = kvf_fail(KVF_E_UNSUPPORTED, "%s%s is %u; supported: %u", config->fields.prefix,
                          kvf_field_name(&config->fields, way->rate).text, rate, way->tokens);
    return status;
}

/* Adds what a compressor keeps whose entries have `width` elements: elements and scores for each entry. */
static void add_compressor(kvf_config *config, const char *name, const compression *way, uint32_t width,
                           uint32_t tensor) {
    kvf_dtype dtype = config->options.state_dtype ? config->options.state_dtype : COMPRESSOR_DTYPE;
    kvf_part_desc *part = kvf_config_add_part(config, name, dtype);
    part->units = 1;
    part->cell_elements = 2 * way->overlap * width; /* width is at most 2^24 */
    part->tensor = tensor;
    part->tp_rule = KVF_TP_REPLICATE;
}

static void add_compression(kvf_config *config, const compression *way, const compressed_widths *widths) {
    kvf_config_add_group(config, way->entries, KVF_GROUP_TOKENS)->tokens_per_step = way->tokens;
    kvf_config_add_layers(config, way->keeps);
    add_latent(config, widths->latent);
    if (way->indexer)
        add_indexer(config, widths->indexer);

    kvf_config_add_group(config, way->states, KVF_GROUP_TOKENS)->window_tokens = way->overlap * way->tokens;
    kvf_config_add_layers(config, way->keeps);
    add_compressor(config, "compressor", way, widths->latent, 0);
    if (way->indexer)
        add_compressor(config, "indexer_compressor", way, widths->indexer, 1);
}

kvf_status kvf_config_add_compressed(kvf_config *config) {
    compressed_widths widths = {0};
    kvf_status status = read_widths(config, &widths);
    if (!status)
        status = refuse_scales(config);
    if (status)
        return status;
    kvf_config_add_group(config, "swa", KVF_GROUP_TOKENS)->window_tokens = config->window_tokens;
    kvf_config_add_layers(config, KVF_KEEPS_WINDOW);
    add_latent(config, widths.latent);
    for (size_t i = 0; i < sizeof compressions / sizeof compressions[0]; i++) {
        const compression *way = &compressions[i];
        if (!kvf_config_has(config, way->keeps))
            continue;
        status = check_rate(config, way);
        if (status)
            return status;
        add_compression(config, way, &widths);
    }
    return KVF_OK;
}
