/*
 * Whether two models cache the same cells.
 *
 * Not compared: the model's name, which is a label, and granule_units, tensor and tp_rule, which say how an engine
 * spreads and stores cells, not which cells there are.
 */
#include "model/model.h"

static kvf_status differ(const char *field, uint32_t a, uint32_t b) {
    return kvf_fail(KVF_E_MISMATCH, "%s is %u on one side and %u on the other", field, a, b);
}

static kvf_status differ_text(const char *field, const char *a, const char *b) {
    return kvf_fail(KVF_E_MISMATCH, "%s is \"%s\" on one side and \"%s\" on the other", field, a, b);
}

static kvf_status compare_part(const kvf_part_desc *a, const kvf_part_desc *b) {
    if (strcmp(a->name, b->name) != 0)
        return differ_text("name", a->name, b->name);
    if (a->dtype != b->dtype)
        return differ_text("dtype", kvf_dtype_name(a->dtype), kvf_dtype_name(b->dtype));
    if (a->units != b->units)
        return differ("units", a->units, b->units);
    if (a->cell_elements != b->cell_elements)
        return differ("cell_elements", a->cell_elements, b->cell_elements);
    if (a->rows_per_step != b->rows_per_step)
        return differ("rows_per_step", a->rows_per_step, b->rows_per_step);
    return KVF_OK;
}

static kvf_status compare_layers(const kvf_group_desc *a, const kvf_group_desc *b) {
    if (a->layer_count != b->layer_count)
        return differ("layer_count", a->layer_count, b->layer_count);
    for (uint32_t i = 0; i < a->layer_count; i++)
        if (a->layers[i] != b->layers[i])
            return kvf_fail(KVF_E_MISMATCH, "layers[%u] is %u on one side and %u on the other", i,
                            a->layers[i], b->layers[i]);
    return KVF_OK;
}

static kvf_status compare_group(const kvf_group_desc *a, const kvf_group_desc *b) {
    if (strcmp(a->name, b->name) != 0)
        return differ_text("name", a->name, b->name);
    if (a->kind != b->kind)
        return differ_text("kind", kvf_group_kind_name(a->kind), kvf_group_kind_name(b->kind));
    if (a->window_tokens != b->window_tokens)
        return differ("window_tokens", a->window_tokens, b->window_tokens);
    if (a->chunk_tokens != b->chunk_tokens)
        return differ("chunk_tokens", a->chunk_tokens, b->chunk_tokens);
    if (a->tokens_per_step != b->tokens_per_step)
        return differ("tokens_per_step", a->tokens_per_step, b->tokens_per_step);
    kvf_status status = compare_layers(a, b);
    if (status)
        return status;
    if (a->part_count != b->part_count)
        return differ("part_count", a->part_count, b->part_count);
    for (uint32_t p = 0; p < a->part_count; p++) {
        status = compare_part(&a->parts[p], &b->parts[p]);
        if (status)
            return kvf_fail_in(status, "part %u (%s): ", p, a->parts[p].name);
    }
    return KVF_OK;
}

kvf_status kvf_model_compare(const kvf_model *a, const kvf_model *b) {
    if (!a || !b)
        return kvf_fail(KVF_E_INVALID, "model to compare is NULL");
    if (a == b)
        return KVF_OK;
    if (kvf_model_layer_count(a) != kvf_model_layer_count(b))
        return differ("model: layer_count", kvf_model_layer_count(a), kvf_model_layer_count(b));
    if (kvf_model_group_count(a) != kvf_model_group_count(b))
        return differ("model: group_count", kvf_model_group_count(a), kvf_model_group_count(b));
    for (uint32_t g = 0; g < kvf_model_group_count(a); g++) {
        const kvf_group_desc *group = kvf_model_group(a, g);
        kvf_status status = compare_group(group, kvf_model_group(b, g));
        if (status)
            return kvf_fail_in(status, "group %u (%s): ", g, group->name);
    }
    return KVF_OK;
}
