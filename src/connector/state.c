/* The shapes of recurrent states, and where the projections of a conv state lie on each side. */
#include "connector/connector.h"

/* `total` divided over the ranks, refusing a remainder. */
static kvf_status per_rank(uint64_t total, uint32_t tp_size, const char *what, uint64_t *out) {
    return kvf_exact_share(total, 1, tp_size, what, out);
}

static kvf_status shape_mamba1(const kvf_state_model *model, uint32_t tp_size, kvf_state_shape *out) {
    uint64_t channels;
    kvf_status status = per_rank(model->intermediate_size, tp_size, "intermediate_size", &channels);
    if (status)
        return status;
    out->conv[0] = channels;
    out->temporal[0] = channels;
    out->temporal[1] = model->state_size;
    out->temporal_dimensions = 2;
    return KVF_OK;
}

static kvf_status shape_mamba2(const kvf_state_model *model, uint32_t tp_size, kvf_state_shape *out) {
    /* Groups that do not divide over the ranks are replicated, one on each rank. */
    uint64_t groups = model->groups % tp_size == 0 ? model->groups : tp_size;
    uint64_t channels, heads, group_channels;
    if (!kvf_mul(2 * groups, model->state_size, &group_channels))
        return kvf_plain_fail(KVF_E_OVERFLOW, "groups times state_size does not fit in 64 bits");
    kvf_status status = per_rank(model->intermediate_size, tp_size, "intermediate_size", &channels);
    if (!status)
        status = per_rank(model->heads, tp_size, "heads", &heads);
    if (status)
        return status;
    out->conv[0] = channels + group_channels / tp_size;
    out->temporal[0] = heads;
    out->temporal[1] = model->head_size;
    out->temporal[2] = model->state_size;
    out->temporal_dimensions = 3;
    return KVF_OK;
}

static kvf_status shape_gdn(const kvf_state_model *model, uint32_t tp_size, kvf_state_shape *out) {
    uint64_t key_channels, value_channels, channels, heads;
    if (!kvf_mul(2 * (uint64_t)model->key_heads, model->key_head_size, &key_channels) ||
        !kvf_mul(model->heads, model->head_size, &value_channels) ||
        !kvf_add(key_channels, value_channels, &channels))
        return kvf_plain_fail(KVF_E_OVERFLOW, "the channels of Q, K and V do not fit in 64 bits");
    kvf_status status = per_rank(channels, tp_size, "the channels of Q, K and V", &out->conv[0]);
    if (!status)
        status = per_rank(model->heads, tp_size, "heads", &heads);
    if (status)
        return status;
    out->temporal[0] = heads;
    out->temporal[1] = model->head_size;
    out->temporal[2] = model->key_head_size;
    out->temporal_dimensions = 3;
    return KVF_OK;
}

kvf_status kvf_state_shape_of(const kvf_state_model *given, uint32_t tp_size, kvf_state_shape *out) {
    kvf_state_model model;
    if (!given || !out)
        return kvf_plain_fail(KVF_E_INVALID, "%s is NULL", given ? "out" : "model");
    kvf_status status = kvf_take_struct(&model, sizeof model, given, "kvf_state_model");
    if (status)
        return status;
    if (!tp_size || model.conv_kernel < 2)
        return kvf_plain_fail(KVF_E_INVALID,
                              "tp_size is %u and conv_kernel %u; allowed: at least 1 and at least 2", tp_size,
                              model.conv_kernel);
    kvf_state_shape shape = {0};
    shape.conv[1] = (uint64_t)model.conv_kernel - 1 + model.spec_steps;
    switch (model.type) {
    case KVF_STATE_MAMBA1:
        status = shape_mamba1(&model, tp_size, &shape);
        break;
    case KVF_STATE_MAMBA2:
        status = shape_mamba2(&model, tp_size, &shape);
        break;
    case KVF_STATE_GDN:
        status = shape_gdn(&model, tp_size, &shape);
        break;
    default:
        status = kvf_plain_fail(KVF_E_RANGE, "type is %d; allowed: 0 to %d", (int)model.type, KVF_STATE_GDN);
    }
    if (!status)
        *out = shape;
    return status;
}

/*
 * One projection has exactly as many channels as the carried state. The other channels are two projections of equal
 * size, before it (Q, K) or after it (B, C).
 */
static kvf_status decompose(kvf_state_type type, const kvf_state_shape *shape, kvf_state_layout *layout) {
    uint64_t carried = shape->temporal[0], channels = shape->conv[0];
    bool alone = type == KVF_STATE_MAMBA1;
    if (!alone && !kvf_mul(carried, shape->temporal[1], &carried))
        return kvf_plain_fail(KVF_E_OVERFLOW,
                              "the heads of the state times their size do not fit in 64 bits");
    uint64_t rest = channels - carried; /* used only when channels >= carried */
    bool apart = alone ? channels == carried : channels > carried && rest % 2 == 0;
    if (!apart)
        return kvf_refuse(KVF_REFUSAL_CONV_NOT_DECOMPOSABLE, KVF_E_NOT_EXPRESSIBLE,
                          "conv has %llu channels and the state %llu; allowed: %s",
                          (unsigned long long)channels, (unsigned long long)carried,
                          alone ? "the same" : "more by an even number");
    layout->projection_count = alone ? 1 : 3;
    for (uint32_t p = 0; p < layout->projection_count; p++)
        layout->projection_dims[p] = rest / 2;
    layout->projection_dims[type == KVF_STATE_GDN ? 2 : 0] = carried;
    return KVF_OK;
}

kvf_status kvf_conv_split(kvf_state_type type, const kvf_state_shape *shape, uint32_t conv_elem_bytes,
                          uint32_t ssm_elem_bytes, kvf_state_layout *out) {
    if (!shape || !out)
        return kvf_plain_fail(KVF_E_INVALID, "%s is NULL", shape ? "out" : "shape");
    if (type != KVF_STATE_MAMBA1 && type != KVF_STATE_MAMBA2 && type != KVF_STATE_GDN)
        return kvf_refuse(KVF_REFUSAL_STATE_TYPE_NOT_SUPPORTED, KVF_E_UNSUPPORTED,
                          "type is %d; allowed: 0 to %d", (int)type, KVF_STATE_GDN);
    uint32_t dimensions = type == KVF_STATE_MAMBA1 ? 2 : 3;
    if (shape->temporal_dimensions != dimensions)
        return kvf_refuse(KVF_REFUSAL_CONV_NOT_DECOMPOSABLE, KVF_E_NOT_EXPRESSIBLE,
                          "the state has %u dimensions; allowed: %u", shape->temporal_dimensions, dimensions);
    kvf_state_layout layout = {0};
    kvf_status status = decompose(type, shape, &layout);
    if (status)
        return status;
    layout.conv_steps = shape->conv[1];
    layout.ssm_bytes = ssm_elem_bytes;
    bool fits = kvf_mul(layout.conv_steps, conv_elem_bytes, &layout.conv_bytes);
    uint64_t channel_bytes = layout.conv_bytes;
    fits = fits && kvf_mul(channel_bytes, shape->conv[0], &layout.conv_bytes);
    for (uint32_t d = 0; d < dimensions; d++)
        fits = fits && kvf_mul(layout.ssm_bytes, shape->temporal[d], &layout.ssm_bytes);
    if (!fits)
        return kvf_plain_fail(KVF_E_OVERFLOW, "the bytes of the state do not fit in 64 bits");
    for (uint32_t p = 0; p < layout.projection_count; p++)
        layout.projection_bytes[p] = layout.projection_dims[p] * channel_bytes; /* below conv_bytes */
    *out = layout;
    return KVF_OK;
}

void kvf_local_projection_runs(const kvf_state_layout *local, kvf_byte_run *out) {
    uint64_t offset = 0;
    for (uint32_t p = 0; p < local->projection_count; p++) {
        out[p] = (kvf_byte_run){offset, local->projection_bytes[p]};
        offset += local->projection_bytes[p];
    }
}

kvf_status kvf_state_runs(const kvf_state_layout *local, const kvf_shared_units *shared,
                          kvf_state_runs_out *out) {
    kvf_state_runs_out runs = {0};
    for (uint32_t p = 0; p < local->projection_count; p++) {
        uint64_t remote_bytes, skipped;
        kvf_byte_run *run = &runs.projection[p];
        kvf_status status = kvf_exact_share(local->projection_bytes[p], shared->remote_units,
                                            shared->local_units, "a projection", &remote_bytes);
        if (!status)
            status = kvf_exact_share(remote_bytes, shared->remote_begin, shared->remote_units, "a projection",
                                     &skipped);
        if (!status)
            status = kvf_exact_share(local->projection_bytes[p], shared->units, shared->local_units,
                                     "a projection", &run->bytes);
        if (status)
            return status;
        run->offset = runs.remote_conv_bytes + skipped;
        if (!kvf_add(runs.remote_conv_bytes, remote_bytes, &runs.remote_conv_bytes))
            return kvf_plain_fail(KVF_E_OVERFLOW, "the remote conv state does not fit in 64 bits");
    }
    uint64_t skipped;
    kvf_status status = kvf_exact_share(local->ssm_bytes, shared->remote_units, shared->local_units,
                                        "the ssm state", &runs.remote_ssm_bytes);
    if (!status)
        status = kvf_exact_share(runs.remote_ssm_bytes, shared->remote_begin, shared->remote_units,
                                 "the ssm state", &skipped);
    if (!status)
        status = kvf_exact_share(local->ssm_bytes, shared->units, shared->local_units, "the ssm state",
                                 &runs.ssm.bytes);
    if (status)
        return status;
    if (!kvf_add(runs.remote_conv_bytes, skipped, &runs.ssm.offset))
        return kvf_plain_fail(KVF_E_OVERFLOW, "the remote state does not fit in 64 bits");
    *out = runs;
    return KVF_OK;
}

kvf_status kvf_remote_projection_runs(const kvf_state_layout *local, int64_t tp_ratio, uint64_t local_offset,
                                      kvf_byte_run *out) {
    if (!local || !out)
        return kvf_plain_fail(KVF_E_INVALID, "%s is NULL", local ? "out" : "local");
    if (!tp_ratio || tp_ratio > UINT32_MAX || tp_ratio < -(int64_t)UINT32_MAX)
        return kvf_plain_fail(KVF_E_RANGE, "tp_ratio is %lld; allowed: 1 to %u and its negative",
                              (long long)tp_ratio, UINT32_MAX);
    uint32_t parts = (uint32_t)(tp_ratio < 0 ? -tp_ratio : tp_ratio);
    if (tp_ratio > 0 && local_offset >= parts)
        return kvf_plain_fail(KVF_E_RANGE, "local_offset is %llu; allowed: 0 to %u",
                              (unsigned long long)local_offset, parts - 1);
    kvf_shared_units shared = {.units = 1, .local_units = 1, .remote_units = 1};
    if (tp_ratio > 0) {
        shared.remote_units = parts;
        shared.remote_begin = (uint32_t)local_offset;
    } else {
        shared.local_units = parts;
    }
    kvf_state_layout conv = *local;
    conv.ssm_bytes = 0; /* the caller wants only the projections */
    kvf_state_runs_out runs;
    kvf_status status = kvf_state_runs(&conv, &shared, &runs);
    if (status)
        return status;
    memcpy(out, runs.projection, local->projection_count * sizeof *out);
    return KVF_OK;
}

kvf_status kvf_physical_blocks_per_logical(uint64_t conv_bytes, uint64_t ssm_bytes, uint64_t block_bytes,
                                           uint64_t *out) {
    uint64_t bytes;
    if (!block_bytes || !out)
        return kvf_plain_fail(KVF_E_INVALID, "%s",
                              out ? "block_bytes is 0; allowed: 1 and more" : "out is NULL");
    if (!kvf_add(conv_bytes, ssm_bytes, &bytes))
        return kvf_plain_fail(KVF_E_OVERFLOW, "conv_bytes %llu and ssm_bytes %llu do not fit in 64 bits",
                              (unsigned long long)conv_bytes, (unsigned long long)ssm_bytes);
    *out = bytes / block_bytes + (bytes % block_bytes != 0);
    return KVF_OK;
}
