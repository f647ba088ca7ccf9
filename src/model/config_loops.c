/*
 * Layers that tokens pass through more than once: each time leaves a cache, which counts as that of a layer of its own.
 *
 *   loops      through all layers, one loop after the other
 *   cycles     two stacks take turns, and each turn is through all layers of a stack
 *   repeated   some layers in a row are passed several times: of layers 0 to 4, of which 1 and 2 are repeated, those of
 *              the second pass are 5 + 1 and 5 + 2, as engines number them; 5, 8 and 9 keep nothing
 */
#include <string.h>

#include "model/config.h"

/* ---- all layers ------------------------------------------------------------------------------ */

/* How many turns stacks take. If the number of layers is that of all turns, `count` becomes a stack's. */
static kvf_status read_turns(const kvf_config *config, uint32_t *count, uint32_t *turns) {
    const kvf_cycles *names = config->family->cycles;
    const kvf_fields *fields = &config->fields;
    const char *layers = kvf_family_names(config->family)->layers;
    uint32_t outer = 0;
    uint32_t inner = 0;
    uint32_t stack = *count;
    bool given = false;
    kvf_status status =
        kvf_field_need(fields, names->outer, 1, KVF_MODEL_MAX_LAYERS, names->outer_or, &outer);
    if (!status)
        status = kvf_field_need(fields, names->inner, 1, KVF_MODEL_MAX_LAYERS, names->inner_or, &inner);
    if (!status)
        status = kvf_field_number(fields, names->stack, 1, KVF_MODEL_MAX_LAYERS, &given, &stack);
    uint64_t all = (uint64_t)outer * (inner + 1);
    if (!status && all > KVF_MODEL_MAX_LAYERS)
        status = kvf_fail(KVF_E_RANGE, "%s%s is %u and %s is %u: more than %u turns", fields->prefix,
                          names->outer, outer, names->inner, inner, KVF_MODEL_MAX_LAYERS);
    if (!status && given && *count && all * stack != *count)
        status = kvf_fail(
            KVF_E_INVALID, "%s%s is %u, but %u cycles of %u and 1 turns, of %u layers each, make %llu",
            fields->prefix, layers, *count, outer, inner, stack, (unsigned long long)all * stack);
    *count = stack;
    *turns = (uint32_t)all;
    return status;
}

kvf_status kvf_config_read_times(const kvf_config *config, uint32_t *count, uint32_t *times) {
    const kvf_family *family = config->family;
    bool given;
    *times = family->caches ? family->caches : 1;
    if (family->cycles)
        return read_turns(config, count, times);
    if (!family->loops)
        return KVF_OK;
    return kvf_field_number(&config->fields, family->loops, 1, KVF_MODEL_MAX_LAYERS, &given, times);
}

/* ---- some layers ----------------------------------------------------------------------------- */

/* How many passes through the repeated layers leave a cache. */
static kvf_status read_passes(const kvf_config *config, uint32_t *passes) {
    const kvf_repeated_layers *names = config->family->repeated;
    const char *which = NULL;
    kvf_status status =
        kvf_field_need(&config->fields, names->passes, 1, KVF_MODEL_MAX_LAYERS, names->passes_or, passes);
    if (!status && names->which)
        status = kvf_field_text(&config->fields, names->which, &which);
    if (!status && which && strcmp(which, names->which_last) == 0)
        *passes = 1;
    return status;
}

static kvf_status read_repeated(const kvf_config *config, uint32_t *begin, uint32_t *end) {
    const kvf_repeated_layers *names = config->family->repeated;
    const kvf_fields *fields = &config->fields;
    uint32_t most = config->layer_count;
    uint32_t count = 0;
    kvf_status status = kvf_field_need(fields, names->begin, 0, most - 1, names->begin_or, begin);
    if (!status && names->count)
        status = kvf_field_need(fields, names->count, 1, most, 0, &count);
    *end = *begin + count;
    if (!status && !names->count)
        status = kvf_field_need(fields, names->end, 1, most, names->end_or, end);
    if (!status && (*begin >= *end || *end > most))
        status = kvf_fail(KVF_E_INVALID,
                          "%s%s: the layers from %u to before %u are repeated; allowed: at least one, of %u",
                          fields->prefix, kvf_field_name(fields, names->begin).text, *begin, *end, most);
    return status;
}

kvf_status kvf_config_repeat_layers(kvf_config *config) {
    uint32_t count = config->layer_count;
    uint32_t passes = 1;
    uint32_t begin = 0;
    uint32_t end = 0;
    kvf_status status = config->family->repeated ? read_passes(config, &passes) : KVF_OK;
    if (status || passes == 1)
        return status;
    status = read_repeated(config, &begin, &end);
    if (status)
        return status;
    if (kvf_field_exists(&config->fields, "per_layer_config"))
        return kvf_fail(
            KVF_E_UNSUPPORTED,
            "%sper_layer_config is given: it is not supported for %.64s, whose layers are repeated",
            config->fields.prefix, config->fields.family);
    if (passes > KVF_MODEL_MAX_LAYERS / count)
        return kvf_fail(KVF_E_RANGE, "%u passes through %u layers are more than %u layers", passes, count,
                        KVF_MODEL_MAX_LAYERS);
    kvf_keeps *keeps = kvf_alloc0((size_t)count * passes, sizeof *keeps);
    if (!keeps)
        return kvf_nomem("the layers of a configuration");
    for (uint32_t pass = 0; pass < passes; pass++)
        for (uint32_t i = pass ? begin : 0; i < (pass ? end : count); i++)
            keeps[(size_t)pass * count + i] = config->keeps[i];
    kvf_free(config->keeps);
    config->keeps = keeps;
    config->layer_count = count * passes;
    return KVF_OK;
}
