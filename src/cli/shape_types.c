#include "shape_types.h"

#include <stdlib.h>
#include <string.h>

#define SCALES "_scale"

/* Whether one part has the scales of another. */
static bool is_scale_of(const kvf_part_desc *scale, const kvf_part_desc *part) {
    const size_t bytes = strlen(part->name);
    return strncmp(scale->name, part->name, bytes) == 0 && strcmp(scale->name + bytes, SCALES) == 0;
}

static bool is_scaled(const kvf_group_desc *group, const kvf_part_desc *part) {
    for (uint32_t p = 0; p < group->part_count; p++)
        if (is_scale_of(&group->parts[p], part) || is_scale_of(part, &group->parts[p]))
            return true;
    return false;
}

kvf_status shape_retype(const kvf_model *model, const kvf_dtype *types, kvf_model **out) {
    const uint32_t count = kvf_model_group_count(model);
    uint32_t all = 0;
    for (uint32_t g = 0; g < count; g++)
        all += kvf_model_group(model, g)->part_count;
    kvf_group_desc *groups = calloc(count + 1, sizeof *groups);
    kvf_part_desc *parts = calloc(all + 1, sizeof *parts);
    kvf_status status = groups && parts ? KVF_OK : KVF_E_NOMEM;
    for (uint32_t g = 0, at = 0; g < count && !status; g++) {
        groups[g] = *kvf_model_group(model, g);
        for (uint32_t p = 0; p < groups[g].part_count; p++) {
            kvf_part_desc *part = &parts[at + p];
            *part = groups[g].parts[p];
            if (types[g] != KVF_DTYPE_INVALID && (SHAPE_CONVERTED & KVF_DTYPE_BIT(part->dtype)) &&
                !is_scaled(kvf_model_group(model, g), part))
                part->dtype = types[g];
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
    free(parts);
    free(groups);
    return status;
}
