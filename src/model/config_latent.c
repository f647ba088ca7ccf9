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

/* Adds the layers with attention that have an indexer of their own, or those that have none. */
static void add_latents(kvf_config *config, const char *name, uint32_t width, bool with_indexer) {
    (void)kvf_config_add_group(config, name, KVF_GROUP_TOKENS);
    for (uint32_t i = 0; i < config->layer_count; i++)
        if ((config->keeps[i] & KVF_KEEPS_FULL) && !(config->keeps[i] & KVF_KEEPS_INDEXER) == !with_indexer)
            kvf_config_add_layer(config, i);
    add_latent(config, width);
}

/* Keys of single tokens are beside the latents of the layers that have them. */
static void add_full(kvf_config *config, uint32_t width) {
    bool indexer = config->indexer.width > 0;
    if (!indexer || config->indexer.tokens > 1) {
        (void)kvf_config_add_group(config, "mla", KVF_GROUP_TOKENS);
        kvf_config_add_layers(config, KVF_KEEPS_FULL);
        add_latent(config, width);
        if (indexer)
            kvf_config_add_indexer(config);
        return;
    }
    bool shared = false;
    for (uint32_t i = 0; i < config->layer_count; i++)
        shared = shared || ((config->keeps[i] & KVF_KEEPS_FULL) && !(config->keeps[i] & KVF_KEEPS_INDEXER));
    add_latents(config, "mla", width, true);
    kvf_config_add_indexer_key(config, 1);
    if (shared)
        add_latents(config, "mla.2", width, false);
}

static kvf_status add_windowed(kvf_config *config) {
    const kvf_window_latent *names = config->family->window_latent;
    uint32_t rank = 0;
    uint32_t rope = 0;
    kvf_status status = kvf_field_need(&config->fields, names->rank, 1, KVF_CONFIG_MAX_WIDTH, 0, &rank);
    if (!status)
        status = kvf_field_need(&config->fields, names->rope, 0, KVF_CONFIG_MAX_WIDTH, 0, &rope);
    if (status)
        return status;
    kvf_config_add_group(config, "swa", KVF_GROUP_TOKENS)->window_tokens = config->window_tokens;
    kvf_config_add_layers(config, KVF_KEEPS_WINDOW);
    add_latent(config, rank + rope);
    return KVF_OK;
}

kvf_status kvf_config_add_latents(kvf_config *config) {
    uint32_t rank = 0;
    uint32_t rope = 0;
    kvf_status status = kvf_field_need(&config->fields, "kv_lora_rank", 1, KVF_CONFIG_MAX_WIDTH, 0, &rank);
    if (!status)
        status = kvf_field_need(&config->fields, "qk_rope_head_dim", 0, KVF_CONFIG_MAX_WIDTH, 0, &rope);
    if (!status)
        status = refuse_scales(config);
    if (!status)
        status = kvf_config_read_indexer(config);
    if (status)
        return status;
    if (kvf_config_has(config, KVF_KEEPS_FULL))
        add_full(config, rank + rope); /* each at most 2^24 */
    return kvf_config_has(config, KVF_KEEPS_WINDOW) ? add_windowed(config) : KVF_OK;
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
