/*
 * The model of an engine that keeps the same elements in other types.
 */
#include "model/model.h"

uint32_t kvf_model_part_count(const kvf_model *model) {
    uint32_t parts = 0;
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++)
        parts += kvf_model_group(model, g)->part_count;
    return parts;
}

kvf_status kvf_model_retype(const kvf_model *model, const kvf_dtype *types, kvf_model **out) {
    const uint32_t count = kvf_model_group_count(model);
    kvf_group_desc *groups = kvf_alloc(count, sizeof *groups);
    kvf_part_desc *parts = kvf_alloc(kvf_model_part_count(model), sizeof *parts);
    kvf_status status = groups && parts ? KVF_OK : kvf_nomem("a model");
    for (uint32_t g = 0, at = 0; g < count && !status; g++) {
        groups[g] = *kvf_model_group(model, g);
        for (uint32_t p = 0; p < groups[g].part_count; p++) {
            parts[at + p] = groups[g].parts[p];
            parts[at + p].dtype = types[at + p];
        }
        groups[g].parts = &parts[at];
        at += groups[g].part_count;
    }
    const kvf_model_desc desc = {.struct_size = sizeof desc,
                                 .name = kvf_model_name(model),
                                 .layer_count = kvf_model_layer_count(model),
                                 .groups = groups,
                                 .group_count = count};
    if (!status)
        status = kvf_model_create(&desc, out);
    kvf_free(parts);
    kvf_free(groups);
    return status;
}
