/*
 * The model: a checked, immutable copy of a description, in one allocation, counted by its owners.
 */
#include <inttypes.h>
#include <stdatomic.h>

#include "model/model.h"

/* One allocation holds everything, sorted by kind, in an order that keeps all of it aligned:
 *
 *   | kvf_model | groups ... | parts of all groups ... | layers of all groups ... | names and notes ... |
 */
struct kvf_model {
    atomic_size_t owners;
    const char *name;
    const char *notes[KVF_MODEL_MAX_NOTES];
    uint32_t note_count;
    uint32_t layer_count;
    uint32_t group_count;
    kvf_group_desc groups[];
};

_Static_assert(sizeof(struct kvf_model) % _Alignof(kvf_group_desc) == 0, "groups follow the model");
_Static_assert(_Alignof(kvf_group_desc) >= _Alignof(kvf_part_desc), "parts follow the groups");
_Static_assert(_Alignof(kvf_part_desc) >= _Alignof(uint32_t), "layers follow the parts");

const char *kvf_group_kind_name(kvf_group_kind kind) {
    return kind == KVF_GROUP_TOKENS ? "tokens" : kind == KVF_GROUP_STATE ? "state" : "unknown";
}

const char *kvf_group_step_word(const kvf_group_desc *group) {
    if (group->kind == KVF_GROUP_STATE)
        return "state";
    return group->tokens_per_step > 1 ? "entry" : "token";
}

/* ---- checks ---------------------------------------------------------------------------------- */

static kvf_status check_name(const char *name) {
    if (!name || !name[0])
        return kvf_fail(KVF_E_INVALID, "name is %s; it must not be empty", name ? "\"\"" : "NULL");
    size_t length = strnlen(name, KVF_MODEL_MAX_NAME_BYTES + 1);
    for (size_t i = 0; i < length; i++)
        if (kvf_is_control(name[i]))
            return kvf_fail(KVF_E_INVALID, "name has the control character 0x%02x at byte %zu",
                            (unsigned)(unsigned char)name[i], i);
    if (length > KVF_MODEL_MAX_NAME_BYTES)
        return kvf_fail(KVF_E_RANGE, "name is longer than %u bytes: \"%.40s...\"", KVF_MODEL_MAX_NAME_BYTES,
                        name);
    return KVF_OK;
}

static kvf_status check_count(const char *field, uint32_t count, uint32_t most) {
    if (count == 0 || count > most)
        return kvf_fail(KVF_E_RANGE, "%s is %u; allowed: 1 to %u", field, count, most);
    return KVF_OK;
}

/* Checks one part, except its name and its place among the other parts. */
static kvf_status check_part_cells(const kvf_part_desc *part) {
    uint32_t bits = kvf_dtype_bits(part->dtype);
    if (bits == 0)
        return kvf_fail(KVF_E_INVALID, "dtype is %d, which is not a kvf_dtype", (int)part->dtype);
    if (part->tp_rule != KVF_TP_SPLIT && part->tp_rule != KVF_TP_REPLICATE)
        return kvf_fail(KVF_E_INVALID, "tp_rule is %d, which is not a kvf_tp_rule", (int)part->tp_rule);
    if (part->units == 0)
        return kvf_fail(KVF_E_RANGE, "units is 0; allowed: 1 and more");
    if (part->granule_units > part->units)
        return kvf_fail(KVF_E_RANGE, "granule_units is %u; allowed: 1 to units, which is %u",
                        part->granule_units, part->units);
    if (part->granule_units && part->units % part->granule_units)
        return kvf_fail(KVF_E_INVALID, "granule_units is %u, which does not divide units, %u",
                        part->granule_units, part->units);
    if (part->cell_elements == 0)
        return kvf_fail(KVF_E_RANGE, "cell_elements is 0; allowed: 1 and more");
    if ((uint64_t)part->cell_elements * bits % 8)
        return kvf_fail(KVF_E_INVALID, "cell_elements is %u, which in %s does not fill whole bytes",
                        part->cell_elements, kvf_dtype_name(part->dtype));
    return KVF_OK;
}

/* Tensors are numbered in the order of the parts, without gaps, so that "the parts of a tensor" is a range.
 */
static kvf_status check_tensor(const kvf_part_desc *parts, uint32_t i) {
    uint32_t least = i ? parts[i - 1].tensor : 0;
    uint32_t most = i ? least + 1 : 0;
    if (parts[i].tensor < least || parts[i].tensor > most)
        return kvf_fail(KVF_E_RANGE,
                        "tensor is %u; allowed: %u to %u (numbers follow the parts, without gaps)",
                        parts[i].tensor, least, most);
    return KVF_OK;
}

static kvf_status check_part(const kvf_part_desc *parts, uint32_t i) {
    kvf_status status = check_name(parts[i].name);
    if (status)
        return kvf_fail_in(status, "part %u: ", i);
    for (uint32_t j = 0; j < i; j++)
        if (strcmp(parts[i].name, parts[j].name) == 0)
            return kvf_fail(KVF_E_INVALID, "part %u: name is \"%s\", which is also the name of part %u", i,
                            parts[i].name, j);
    status = check_part_cells(&parts[i]);
    if (!status)
        status = check_tensor(parts, i);
    if (!status)
        status = kvf_check_reserved(parts[i].reserved, 2, "kvf_part_desc");
    return status ? kvf_fail_in(status, "part %u (%s): ", i, parts[i].name) : KVF_OK;
}

static kvf_status check_layers(const kvf_group_desc *group, uint32_t layer_count) {
    kvf_status status = check_count("layer_count", group->layer_count, layer_count);
    if (status)
        return status;
    if (!group->layers)
        return kvf_fail(KVF_E_INVALID, "layers is NULL, but layer_count is %u", group->layer_count);
    for (uint32_t i = 0; i < group->layer_count; i++) {
        uint32_t layer = group->layers[i];
        if (layer >= layer_count)
            return kvf_fail(KVF_E_RANGE, "layers[%u] is %u; allowed: 0 to %u", i, layer, layer_count - 1);
        if (i && layer <= group->layers[i - 1])
            return kvf_fail(KVF_E_INVALID, "layers[%u] is %u, after %u; layers must ascend", i, layer,
                            group->layers[i - 1]);
    }
    return KVF_OK;
}

static kvf_status check_visibility(const kvf_group_desc *group) {
    if (group->kind != KVF_GROUP_TOKENS && group->kind != KVF_GROUP_STATE)
        return kvf_fail(KVF_E_INVALID, "kind is %d, which is not a kvf_group_kind", (int)group->kind);
    if (group->kind == KVF_GROUP_STATE && group->window_tokens)
        return kvf_fail(KVF_E_INVALID, "window_tokens is %u; a state group has no window",
                        group->window_tokens);
    if (group->kind == KVF_GROUP_STATE && group->chunk_tokens)
        return kvf_fail(KVF_E_INVALID, "chunk_tokens is %u; a state group has no chunks",
                        group->chunk_tokens);
    if (group->tokens_per_step > 1 &&
        (group->kind == KVF_GROUP_STATE || group->window_tokens || group->chunk_tokens))
        return kvf_fail(KVF_E_INVALID, "tokens_per_step is %u; allowed: 1 in a group %s",
                        group->tokens_per_step,
                        group->kind == KVF_GROUP_STATE ? "of states"
                        : group->window_tokens         ? "with a window"
                                                       : "with chunks");
    if (group->window_tokens && group->chunk_tokens)
        return kvf_fail(KVF_E_INVALID, "window_tokens is %u and chunk_tokens is %u; at most one may be set",
                        group->window_tokens, group->chunk_tokens);
    return KVF_OK;
}

/* A zero granule or row count stands for 1, see fill_defaults(). */
static uint32_t rows_per_step(const kvf_part_desc *part) {
    return part->rows_per_step ? part->rows_per_step : 1;
}

static bool part_step_bytes(const kvf_part_desc *part, uint64_t *out) {
    return kvf_mul(rows_per_step(part), part->units, out) && kvf_mul(*out, kvf_part_cell_bytes(part), out);
}

/* After this the bytes of one step over all layers fit in 64 bits, so nothing smaller needs a check. */
static kvf_status check_step_bytes(const kvf_group_desc *group) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < group->part_count; i++) {
        uint64_t bytes;
        if (!part_step_bytes(&group->parts[i], &bytes) || !kvf_add(sum, bytes, &sum))
            return kvf_fail(
                KVF_E_OVERFLOW,
                "part %u (%s): %u rows_per_step x %u units x %u cell_elements of %s do not fit in "
                "64 bits",
                i, group->parts[i].name, rows_per_step(&group->parts[i]), group->parts[i].units,
                group->parts[i].cell_elements, kvf_dtype_name(group->parts[i].dtype));
    }
    if (!kvf_mul(sum, group->layer_count, &sum))
        return kvf_fail(KVF_E_OVERFLOW, "the bytes of one step of %u layers do not fit in 64 bits",
                        group->layer_count);
    return KVF_OK;
}

static kvf_status check_group_content(const kvf_group_desc *group, uint32_t layer_count) {
    kvf_status status = kvf_check_reserved(group->reserved, 4, "kvf_group_desc");
    if (!status)
        status = check_visibility(group);
    if (!status)
        status = check_layers(group, layer_count);
    if (!status)
        status = check_count("part_count", group->part_count, KVF_MODEL_MAX_PARTS);
    if (status)
        return status;
    if (!group->parts)
        return kvf_fail(KVF_E_INVALID, "parts is NULL, but part_count is %u", group->part_count);
    for (uint32_t i = 0; i < group->part_count && !status; i++)
        status = check_part(group->parts, i);
    return status ? status : check_step_bytes(group);
}

static kvf_status check_group(const kvf_model_desc *desc, uint32_t i) {
    const kvf_group_desc *group = &desc->groups[i];
    kvf_status status = check_name(group->name);
    if (status)
        return kvf_fail_in(status, "group %u: ", i);
    for (uint32_t j = 0; j < i; j++)
        if (strcmp(group->name, desc->groups[j].name) == 0)
            return kvf_fail(KVF_E_INVALID, "group %u: name is \"%s\", which is also the name of group %u", i,
                            group->name, j);
    status = check_group_content(group, desc->layer_count);
    return status ? kvf_fail_in(status, "group %u (%s): ", i, group->name) : KVF_OK;
}

static kvf_status check_model(const kvf_model_desc *desc) {
    kvf_status status = check_name(desc->name);
    if (!status)
        status = check_count("layer_count", desc->layer_count, KVF_MODEL_MAX_LAYERS);
    if (!status)
        status = check_count("group_count", desc->group_count, KVF_MODEL_MAX_GROUPS);
    if (!status && !desc->groups)
        status = kvf_fail(KVF_E_INVALID, "groups is NULL, but group_count is %u", desc->group_count);
    if (status)
        return kvf_fail_in(status, "model: ");
    for (uint32_t i = 0; i < desc->group_count && !status; i++)
        status = check_group(desc, i);
    return status;
}

/* ---- making ---------------------------------------------------------------------------------- */

/* How much room a checked description needs, by kind. */
struct content {
    size_t parts;
    size_t layers;
    size_t name_bytes; /* including those of notes */
};

static struct content measure(const kvf_model_desc *desc, const kvf_notes *notes) {
    struct content content = {0, 0, strlen(desc->name) + 1};
    for (uint32_t i = 0; i < notes->count; i++)
        content.name_bytes += strlen(notes->text[i]) + 1;
    for (uint32_t g = 0; g < desc->group_count; g++) {
        const kvf_group_desc *group = &desc->groups[g];
        content.parts += group->part_count;
        content.layers += group->layer_count;
        content.name_bytes += strlen(group->name) + 1;
        for (uint32_t p = 0; p < group->part_count; p++)
            content.name_bytes += strlen(group->parts[p].name) + 1;
    }
    return content;
}

static const char *place_name(char **end, const char *name) {
    char *start = *end;
    size_t bytes = strlen(name) + 1;
    memcpy(start, name, bytes);
    *end += bytes;
    return start;
}

static void fill_defaults(kvf_part_desc *part) {
    if (part->granule_units == 0)
        part->granule_units = 1;
    if (part->rows_per_step == 0)
        part->rows_per_step = 1;
}

static uint32_t tokens_per_step(const kvf_group_desc *group) {
    return group->tokens_per_step ? group->tokens_per_step : 1;
}

static void place(kvf_model *model, const kvf_model_desc *desc, const kvf_notes *notes,
                  struct content content) {
    kvf_part_desc *parts = (kvf_part_desc *)(void *)(model->groups + desc->group_count);
    uint32_t *layers = (uint32_t *)(void *)(parts + content.parts);
    char *names = (char *)(layers + content.layers);

    atomic_init(&model->owners, 1);
    model->name = place_name(&names, desc->name);
    model->note_count = notes->count;
    for (uint32_t i = 0; i < notes->count; i++)
        model->notes[i] = place_name(&names, notes->text[i]);
    model->layer_count = desc->layer_count;
    model->group_count = desc->group_count;
    for (uint32_t g = 0; g < desc->group_count; g++) {
        const kvf_group_desc *from = &desc->groups[g];
        kvf_group_desc *group = &model->groups[g];
        *group = *from;
        group->tokens_per_step = tokens_per_step(from);
        group->name = place_name(&names, from->name);
        group->layers = memcpy(layers, from->layers, from->layer_count * sizeof *layers);
        layers += from->layer_count;
        group->parts = memcpy(parts, from->parts, from->part_count * sizeof *parts);
        for (uint32_t p = 0; p < from->part_count; p++, parts++) {
            parts->name = place_name(&names, from->parts[p].name);
            fill_defaults(parts);
        }
    }
}

kvf_status kvf_model_create(const kvf_model_desc *given, kvf_model **out) {
    return kvf_model_create_noted(given, NULL, out);
}

kvf_status kvf_model_create_noted(const kvf_model_desc *given, const kvf_notes *notes, kvf_model **out) {
    static const kvf_notes none;
    if (!notes)
        notes = &none;
    if (!given || !out)
        return kvf_fail(KVF_E_INVALID, "model: %s is NULL", given ? "out" : "desc");
    kvf_model_desc desc;
    kvf_status status = kvf_take_options(&desc, sizeof desc, given, "kvf_model_desc");
    if (status)
        return status;
    if (!desc.name)
        desc.name = "model";
    status = check_model(&desc);
    if (status)
        return status;

    /* The bounds on groups, parts, layers, names and notes keep this sum far below 2^32. */
    struct content content = measure(&desc, notes);
    size_t bytes = sizeof(kvf_model) + desc.group_count * sizeof(kvf_group_desc) +
                   content.parts * sizeof(kvf_part_desc) + content.layers * sizeof(uint32_t) +
                   content.name_bytes;
    kvf_model *model = kvf_alloc0(1, bytes);
    if (!model)
        return kvf_nomem("a model");
    place(model, &desc, notes, content);
    *out = model;
    return KVF_OK;
}

kvf_model *kvf_model_retain(const kvf_model *model) {
    /* The count of owners is the only field of a model that changes, so `const` is cast away here. */
    kvf_model *owned = (kvf_model *)model;
    if (owned)
        atomic_fetch_add_explicit(&owned->owners, 1, memory_order_relaxed);
    return owned;
}

void kvf_model_free(kvf_model *model) {
    /* Release and acquire: reads by other owners happen before the memory is freed. */
    if (model && atomic_fetch_sub_explicit(&model->owners, 1, memory_order_acq_rel) == 1)
        kvf_free(model);
}

/* ---- reading --------------------------------------------------------------------------------- */

const char *kvf_model_name(const kvf_model *model) {
    return model->name;
}

const char *kvf_model_note(const kvf_model *model, uint32_t i) {
    return i < model->note_count ? model->notes[i] : NULL;
}

uint32_t kvf_model_layer_count(const kvf_model *model) {
    return model->layer_count;
}

uint32_t kvf_model_group_count(const kvf_model *model) {
    return model->group_count;
}

const kvf_group_desc *kvf_model_group(const kvf_model *model, uint32_t group) {
    return group < model->group_count ? &model->groups[group] : NULL;
}

uint64_t kvf_part_cell_bytes(const kvf_part_desc *part) {
    return (uint64_t)part->cell_elements * kvf_dtype_bits(part->dtype) / 8;
}

uint64_t kvf_group_step_bytes(const kvf_group_desc *group) {
    /* check_step_bytes() has made sure that the sum fits. */
    uint64_t sum = 0;
    for (uint32_t i = 0; i < group->part_count; i++) {
        uint64_t bytes = 0;
        (void)part_step_bytes(&group->parts[i], &bytes);
        sum += bytes;
    }
    return sum;
}

uint64_t kvf_group_step_count(const kvf_group_desc *group, uint64_t tokens) {
    return group->kind == KVF_GROUP_STATE ? 1 : tokens / tokens_per_step(group);
}

uint64_t kvf_group_first_needed(const kvf_group_desc *group, uint64_t end) {
    if (group->kind == KVF_GROUP_STATE || end == 0)
        return 0;
    if (group->window_tokens)
        return end > group->window_tokens ? end - group->window_tokens : 0;
    if (group->chunk_tokens)
        return (end - 1) / group->chunk_tokens * group->chunk_tokens;
    return 0;
}

uint64_t kvf_first_moved(const kvf_group_desc *group, uint64_t begin, uint64_t end) {
    return kvf_min_u64(kvf_max_u64(kvf_group_first_needed(group, end), begin), end);
}
