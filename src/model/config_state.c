/*
 * The group of state layers: a convolution's last inputs, one part for each projection it runs over, and the
 * recurrent state.
 *
 *                conv parts, a row for each tap but one              recurrent state, one row
 *   Mamba 1      x: a unit is a channel                              unit: channel, cell: state_size
 *   Mamba 2      x: heads x head_dim | B, C: groups x state_size     unit: head, cell: head_dim x state_size
 *   delta rule   Q, K: key heads x key dim | V: heads x head_dim     unit: head, cell: head_dim x key dim
 *   short conv   x: a unit is a channel                              none
 *   four convs   k, v: KV heads x their dims | attn, mlp: hidden     none
 *
 * Some models have a convolution over the residual streams beside it, which no rank shares with another: a group "conv"
 * of its own, a row for each input that a tap may still reach, with all channels of all streams.
 *
 * A granule is a set of units that tensor parallelism keeps together: the channels of a head or of a group; if several
 * value heads share a key head, all of these, so that a rank's heads always match its keys.
 */
#include "model/config.h"

/* Sizes of a state of any family. */
typedef struct state_shape {
    uint32_t conv_rows;
    uint32_t heads;      /* Mamba 1 and a short convolution: channels */
    uint32_t head_dim;   /* of these: 1 */
    uint32_t groups;     /* of B and C, or key heads */
    uint32_t group_size; /* channels of each: the state size, or the key head's */
} state_shape;

/* ---- reading --------------------------------------------------------------------------------- */

static kvf_status read_expanded(const kvf_config *config, uint32_t *inner) {
    const kvf_fields *fields = &config->fields;
    uint32_t hidden = 0;
    uint32_t expand = 0;
    kvf_status status = kvf_field_need(fields, "hidden_size", 1, KVF_CONFIG_MAX_WIDTH, 0, &hidden);
    if (!status)
        status = kvf_field_need(fields, config->family->state->expand, 1, 256, 0, &expand);
    *inner = hidden *
             expand; /* both factors are bounded, so the product wraps only at 2^24 x 2^8, and then to 0 */
    if (!status && *inner == 0)
        status = kvf_fail(KVF_E_RANGE, "%s%s is %u, times hidden_size, %u, is beyond 32 bits", fields->prefix,
                          config->family->state->expand, expand, hidden);
    return status;
}

/* The inner width of the layer if the family has a field for it; 0 if only heads give it. */
static kvf_status read_inner(const kvf_config *config, uint32_t *inner) {
    const kvf_state_fields *names = config->family->state;
    *inner = 0;
    if (names->inner) {
        bool given;
        kvf_status status =
            kvf_field_number(&config->fields, names->inner, 1, KVF_CONFIG_MAX_WIDTH, &given, inner);
        if (status || given)
            return status;
        if (!kvf_field_exists(&config->fields, names->inner))
            return kvf_field_need(&config->fields, names->inner, 1, KVF_CONFIG_MAX_WIDTH, names->inner_or,
                                  inner);
    }
    return names->expand ? read_expanded(config, inner) : KVF_OK;
}

static bool is_auto(const kvf_fields *fields, const char *field) {
    struct json_object *value = NULL;
    return json_object_object_get_ex(fields->object, field, &value) &&
           json_object_is_type(value, json_type_string) && strcmp(json_object_get_string(value), "auto") == 0;
}

static kvf_status read_heads(const kvf_config *config, state_shape *shape) {
    const kvf_fields *fields = &config->fields;
    const kvf_state_fields *names = config->family->state;
    uint32_t inner = 0;
    kvf_status status = kvf_field_need(fields, names->heads, 1, KVF_CONFIG_MAX_HEADS, 0, &shape->heads);
    if (!status)
        status = read_inner(config, &inner);
    if (status)
        return status;
    if (inner && is_auto(fields, names->head_dim)) {
        if (inner % shape->heads)
            return kvf_fail(KVF_E_INVALID, "%s%s is %u, which does not divide the inner width, %u",
                            fields->prefix, names->heads, shape->heads, inner);
        shape->head_dim = inner / shape->heads;
        return KVF_OK;
    }
    status = kvf_field_need(fields, names->head_dim, 1, KVF_CONFIG_MAX_WIDTH, 0, &shape->head_dim);
    if (!status && inner && (uint64_t)shape->heads * shape->head_dim != inner)
        status = kvf_fail(KVF_E_INVALID, "%s%s is %u and %s is %u, but the inner width is %u", fields->prefix,
                          names->heads, shape->heads, names->head_dim, shape->head_dim, inner);
    return status;
}

static kvf_status read_groups(const kvf_config *config, state_shape *shape) {
    const kvf_fields *fields = &config->fields;
    const kvf_state_fields *names = config->family->state;
    if (!names->groups) { /* keys and values have the same number and width */
        shape->groups = shape->heads;
        shape->group_size = shape->head_dim;
        return KVF_OK;
    }
    kvf_status status = kvf_field_need(fields, names->groups, 1, shape->heads, 0, &shape->groups);
    if (!status)
        status = kvf_field_need(fields, names->state_size, 1, KVF_CONFIG_MAX_WIDTH, 0, &shape->group_size);
    struct json_object *value;
    const char *given = names->groups; /* the one of its names that is given */
    if (!status)
        status = kvf_field_find(fields, names->groups, &value, &given);
    if (!status && shape->heads % shape->groups)
        status =
            kvf_fail(KVF_E_INVALID, "%s%.*s is %u, which does not divide %s, %u", fields->prefix,
                     (int)strcspn(given, KVF_NAME_ENDS), given, shape->groups, names->heads, shape->heads);
    return status;
}

static kvf_status read_rows(const kvf_config *config, state_shape *shape) {
    uint32_t taps = 0;
    kvf_status status =
        kvf_field_need(&config->fields, config->family->state->conv, 2, KVF_CONFIG_MAX_WIDTH, 0, &taps);
    shape->conv_rows = status ? 0 : taps - 1;
    return status;
}

static kvf_status read_shape(const kvf_config *config, state_shape *shape) {
    const kvf_state_fields *names = config->family->state;
    const kvf_fields *fields = &config->fields;
    kvf_status status = read_rows(config, shape);
    if (status)
        return status;
    shape->head_dim = 1;
    shape->groups = 1;
    if (names->kind == KVF_STATE_CONV)
        return kvf_field_need(fields, names->inner, 1, KVF_CONFIG_MAX_WIDTH, 0, &shape->heads);
    if (names->kind != KVF_STATE_MAMBA1) {
        status = read_heads(config, shape);
        return status ? status : read_groups(config, shape);
    }
    status = read_inner(config, &shape->heads);
    if (!status)
        status = kvf_field_need(fields, names->state_size, 1, KVF_CONFIG_MAX_WIDTH, 0, &shape->group_size);
    return status;
}

/* Multiplies into 32 bits; the message of an overflow names the product. */
static kvf_status multiply(const char *what, uint32_t a, uint32_t b, uint32_t *out) {
    uint64_t wide = (uint64_t)a * b;
    *out = (uint32_t)wide;
    if (wide > UINT32_MAX)
        return kvf_fail(KVF_E_OVERFLOW, "%s is %u x %u, beyond 32 bits", what, a, b);
    return KVF_OK;
}

/* The recurrent state's type: that of the options, or the configuration's, or the family's, or the model's. */
static kvf_status read_dtype(const kvf_config *config, kvf_dtype *out) {
    static const char names[] = "mamba_ssm_cache_dtype|mamba_ssm_dtype";
    const char *text;
    kvf_status status = kvf_field_text(&config->fields, names, &text);
    *out = config->family->state->dtype ? config->family->state->dtype : config->dtype;
    if (!status && text && strcmp(text, "auto") != 0 && kvf_dtype_by_name(text, out))
        status = kvf_fail_in(KVF_E_INVALID, "%s%s: ", config->fields.prefix,
                             kvf_field_name(&config->fields, names).text);
    if (config->options.state_dtype)
        *out = config->options.state_dtype;
    return status;
}

/* ---- building -------------------------------------------------------------------------------- */

static kvf_status add_conv(kvf_config *config, const char *name, const state_shape *shape, uint32_t count,
                           uint32_t size, uint32_t together) {
    kvf_part_desc *part = kvf_config_add_part(config, name, config->dtype);
    part->rows_per_step = shape->conv_rows;
    part->cell_elements = 1;
    kvf_status status = multiply("channels of the convolution", count, size, &part->units);
    return status ? status : multiply("channels of a granule", together, size, &part->granule_units);
}

static kvf_status add_parts(kvf_config *config, const state_shape *shape, kvf_dtype dtype) {
    bool delta = config->family->state->kind == KVF_STATE_GDN || config->family->state->kind == KVF_STATE_KDA;
    uint32_t together = delta ? shape->heads / shape->groups : 1;
    kvf_status status = KVF_OK;
    if (delta) {
        status = add_conv(config, "conv.Q", shape, shape->groups, shape->group_size, 1);
        if (!status)
            status = add_conv(config, "conv.K", shape, shape->groups, shape->group_size, 1);
        if (!status)
            status = add_conv(config, "conv.V", shape, shape->heads, shape->head_dim, together);
    } else {
        status = add_conv(config, "conv.x", shape, shape->heads, shape->head_dim, 1);
        bool mamba2 = config->family->state->kind == KVF_STATE_MAMBA2;
        if (!status && mamba2)
            status = add_conv(config, "conv.B", shape, shape->groups, shape->group_size, 1);
        if (!status && mamba2)
            status = add_conv(config, "conv.C", shape, shape->groups, shape->group_size, 1);
    }
    if (status || config->family->state->kind == KVF_STATE_CONV)
        return status;
    kvf_part_desc *state = kvf_config_add_part(config, "ssm", dtype);
    state->units = shape->heads;
    state->granule_units = together;
    state->tensor = 1;
    return multiply("elements of a recurrent state", shape->head_dim, shape->group_size,
                    &state->cell_elements);
}

/* ---- four convolutions beside attention -------------------------------------------------------- */

/* The outputs of the attention and of the MLP are split by KV heads, so that a rank has the channels of its heads. */
static kvf_status add_four(kvf_config *config, uint32_t layer) {
    const kvf_heads *heads = &config->heads[layer];
    state_shape shape = {0};
    uint32_t hidden = 0;
    kvf_status status = read_rows(config, &shape);
    if (!status)
        status = kvf_field_need(&config->fields, kvf_family_names(config->family)->hidden, 1,
                                KVF_CONFIG_MAX_WIDTH, 0, &hidden);
    if (!status && hidden % heads->kv_heads)
        status = kvf_fail(KVF_E_UNSUPPORTED, "%shidden_size is %u, which %u KV heads do not divide",
                          config->fields.prefix, hidden, heads->kv_heads);
    if (!status)
        status = add_conv(config, "conv.k", &shape, heads->kv_heads, heads->head_dim, 1);
    if (!status)
        status = add_conv(config, "conv.v", &shape, heads->kv_heads, heads->v_head_dim, 1);
    if (!status)
        status = add_conv(config, "conv.attn", &shape, heads->kv_heads, hidden / heads->kv_heads, 1);
    return status ? status
                  : add_conv(config, "conv.mlp", &shape, heads->kv_heads, hidden / heads->kv_heads, 1);
}

/* ---- all of it ------------------------------------------------------------------------------- */

kvf_status kvf_config_add_state(kvf_config *config) {
    static const char *const names[] = {
        [KVF_STATE_MAMBA1] = "ssm", [KVF_STATE_MAMBA2] = "ssm", [KVF_STATE_GDN] = "gdn",
        [KVF_STATE_KDA] = "kda",    [KVF_STATE_CONV] = "conv",
    };
    static const kvf_kept_rows four = {"heads", kvf_config_same_heads, add_four};
    if (!kvf_config_has(config, KVF_KEEPS_STATE))
        return KVF_OK;
    if (config->family->state->kind == KVF_STATE_CONVS)
        return kvf_config_add_alike(config, "conv", KVF_GROUP_STATE, KVF_KEEPS_STATE, &four);
    state_shape shape = {0};
    kvf_dtype dtype = KVF_DTYPE_INVALID;
    kvf_status status = read_shape(config, &shape);
    if (!status)
        status = read_dtype(config, &dtype);
    if (status)
        return status;
    (void)kvf_config_add_group(config, names[config->family->state->kind], KVF_GROUP_STATE);
    kvf_config_add_layers(config, KVF_KEEPS_STATE);
    return add_parts(config, &shape, dtype);
}

/* ---- convolutions over the residual streams ---------------------------------------------------- */

static kvf_status mark_streams(kvf_config *config, bool *any) {
    const kvf_fields *fields = &config->fields;
    struct json_object *list;
    const char *name;
    kvf_status status = kvf_field_list(fields, config->family->stream_conv->layers, &list, &name);
    size_t count = !status && list ? json_object_array_length(list) : 0;
    *any = count > 0;
    for (size_t i = 0; i < count && !status; i++) {
        uint32_t number = 1;
        status = kvf_element_number(fields, name, list, i, 1, config->layer_count, &number);
        config->keeps[number - 1] |= KVF_KEEPS_STREAMS;
    }
    return status;
}

kvf_status kvf_config_add_stream_conv(kvf_config *config) {
    const kvf_stream_conv_fields *names = config->family->stream_conv;
    const kvf_fields *fields = &config->fields;
    uint32_t taps = 0;
    uint32_t dilation = 0;
    uint32_t streams = 0;
    uint32_t hidden = 0;
    bool any = false;
    kvf_status status = names ? mark_streams(config, &any) : KVF_OK;
    if (status || !any)
        return status;
    status = kvf_field_need(fields, names->taps, 2, KVF_CONFIG_MAX_WINDOW, names->taps_or, &taps);
    if (!status)
        status =
            kvf_field_need(fields, names->dilation, 1, KVF_CONFIG_MAX_WINDOW, names->dilation_or, &dilation);
    if (!status)
        status = kvf_field_need(fields, names->streams, 1, KVF_CONFIG_MAX_WIDTH, names->streams_or, &streams);
    if (!status)
        status = kvf_field_need(fields, kvf_family_names(config->family)->hidden, 1, KVF_CONFIG_MAX_WIDTH, 0,
                                &hidden);
    if (status)
        return status;
    (void)kvf_config_add_group(config, "conv", KVF_GROUP_STATE);
    kvf_config_add_layers(config, KVF_KEEPS_STREAMS);
    kvf_part_desc *part = kvf_config_add_part(config, "conv.x", config->dtype);
    part->cell_elements = 1;
    part->tp_rule = KVF_TP_REPLICATE;
    status = multiply("inputs of a convolution", taps - 1, dilation, &part->rows_per_step);
    return status ? status : multiply("channels of a convolution", streams, hidden, &part->units);
}
