#include "groups_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "files.h"
#include "json.h"
#include "text.h"
#include "words.h"

enum { MAX_FILE_BYTES = 1 << 20, MAX_LAYERS = 65536 };

/* ---- reading an object ----------------------------------------------------------------------- */

/* An object of the file, and its place in it for messages. */
typedef struct object {
    const char *path; /* of the file */
    char where[160];  /* "group full, part k: "; "" for the outermost object */
    struct json_object *json;
} object;

/* Keys of JSON are what they are: one in capitals would not be read. */
static bool is_among(const char *const *keys, const char *key) {
    while (*keys && strcmp(*keys, key) != 0)
        keys++;
    return *keys != NULL;
}

/* Checks that an object has only allowed keys. Those of `read_over`, which other commands write, are ignored. */
static int check_keys(const object *of, const char *const *keys, const char *const *read_over) {
    char list[256];
    if (!json_object_is_type(of->json, json_type_object))
        return usage_error("%s: %sis not an object", of->path, of->where);
    json_object_object_foreach(of->json, key, value) {
        (void)value;
        if (is_among(keys, key) || is_among(read_over, key))
            continue;
        words_list(words_of_array(keys), list, sizeof list);
        return usage_error("%s: %sthere is no key \"%s\"; allowed: %s%s", of->path, of->where, key, list,
                           words_hint(words_of_array(keys), key).text);
    }
    return EXIT_DONE;
}

/* Reads a name. Without the key it is `otherwise`; if that is NULL, the key must be there. */
static int read_text(const object *of, const char *key, const char *otherwise, const char **out) {
    struct json_object *value = NULL;
    *out = otherwise;
    if (!json_object_object_get_ex(of->json, key, &value) && otherwise)
        return EXIT_DONE;
    if (!json_object_is_type(value, json_type_string) || json_object_get_string_len(value) == 0)
        return usage_error("%s: %s%s is %s; a name is needed", of->path, of->where, key,
                           value ? json_object_to_json_string(value) : "missing");
    *out = json_object_get_string(value);
    return EXIT_DONE;
}

/* Reads a whole number from `least` to `most`. If `least` is 0, the key may be missing, which means 0. */
static int read_number(const object *of, const char *key, uint32_t least, uint32_t most, uint32_t *out) {
    struct json_object *value = NULL;
    *out = 0;
    if (!json_object_object_get_ex(of->json, key, &value) && least == 0)
        return EXIT_DONE;
    int64_t number = json_object_is_type(value, json_type_int) ? json_object_get_int64(value) : -1;
    if (number < least || number > most)
        return usage_error("%s: %s%s is %s; allowed: a whole number from %u to %u", of->path, of->where, key,
                           value ? json_object_to_json_string(value) : "missing", least, most);
    *out = (uint32_t)number;
    return EXIT_DONE;
}

static int read_list(const object *of, const char *key, size_t most, struct json_object **out,
                     size_t *count) {
    *out = NULL;
    (void)json_object_object_get_ex(of->json, key, out);
    *count = json_object_is_type(*out, json_type_array) ? json_object_array_length(*out) : 0;
    if (*count == 0 || *count > most)
        return usage_error("%s: %s%s is %s; a list of 1 to %zu is needed", of->path, of->where, key,
                           *count ? "too long" : "not a list, or empty", most);
    return EXIT_DONE;
}

/* Reads one of a few words, as its number; without the key, the first one. */
static int read_choice(const object *of, const char *key, const char *const *choices, uint32_t *out) {
    char list[64];
    const char *word;
    int result = read_text(of, key, choices[0], &word);
    if (result || words_find(words_of_array(choices), word, out))
        return result;
    words_list(words_of_array(choices), list, sizeof list);
    return usage_error("%s: %s%s is \"%s\"; allowed: %s", of->path, of->where, key, word, list);
}

/* ---- the model ------------------------------------------------------------------------------- */

static const char *const no_keys[] = {NULL};
static const char *const kinds[] = {"tokens", "state", NULL};    /* in the order of kvf_group_kind */
static const char *const rules[] = {"split", "replicate", NULL}; /* in the order of kvf_tp_rule */

static int read_part(const object *of, kvf_part_desc *out) {
    static const char *const keys[] = {"name",          "dtype",         "units",
                                       "granule_units", "cell_elements", "rows_per_step",
                                       "tensor",        "tp_rule",       NULL};
    const char *dtype = NULL;
    uint32_t rule = 0;
    int result = check_keys(of, keys, no_keys);
    if (!result)
        result = read_text(of, "name", NULL, &out->name);
    if (!result)
        result = read_text(of, "dtype", NULL, &dtype);
    if (!result && kvf_dtype_by_name(dtype, &out->dtype))
        result = usage_error("%s: %sdtype is \"%s\"; allowed: names such as f32, bf16, f16, fp8 and i8",
                             of->path, of->where, dtype);
    if (!result)
        result = read_number(of, "units", 1, UINT32_MAX, &out->units);
    if (!result)
        result = read_number(of, "granule_units", 0, UINT32_MAX, &out->granule_units);
    if (!result)
        result = read_number(of, "cell_elements", 1, UINT32_MAX, &out->cell_elements);
    if (!result)
        result = read_number(of, "rows_per_step", 0, UINT32_MAX, &out->rows_per_step);
    if (!result)
        result = read_number(of, "tensor", 0, UINT32_MAX, &out->tensor);
    if (!result)
        result = read_choice(of, "tp_rule", rules, &rule);
    out->tp_rule = (kvf_tp_rule)rule;
    return result;
}

/* A group with its layers and parts, which are owned. */
typedef struct group_memory {
    uint32_t *layers;
    kvf_part_desc *parts;
} group_memory;

static int read_layers(const object *of, kvf_group_desc *out, group_memory *memory) {
    struct json_object *list;
    size_t count;
    int result = read_list(of, "layers", MAX_LAYERS, &list, &count);
    memory->layers = calloc(count + 1, sizeof *memory->layers);
    if (!result && !memory->layers)
        return failure("not enough memory");
    for (size_t i = 0; i < count && !result; i++) {
        struct json_object *value = json_object_array_get_idx(list, i);
        int64_t layer = json_object_is_type(value, json_type_int) ? json_object_get_int64(value) : -1;
        if (layer < 0 || layer > UINT32_MAX)
            return usage_error("%s: %slayers has %s; allowed: numbers of layers", of->path, of->where,
                               json_object_to_json_string(value));
        memory->layers[i] = (uint32_t)layer;
    }
    out->layers = memory->layers;
    out->layer_count = (uint32_t)count;
    return result;
}

static int read_parts(const object *of, kvf_group_desc *out, group_memory *memory) {
    struct json_object *list;
    size_t count;
    int result = read_list(of, "parts", 64, &list, &count);
    memory->parts = calloc(count + 1, sizeof *memory->parts);
    if (!result && !memory->parts)
        return failure("not enough memory");
    for (size_t i = 0; i < count && !result; i++) {
        object part = {.path = of->path, .json = json_object_array_get_idx(list, i)};
        (void)snprintf(part.where, sizeof part.where, "group %.60s, part %zu: ", out->name, i);
        result = read_part(&part, &memory->parts[i]);
    }
    out->parts = memory->parts;
    out->part_count = (uint32_t)count;
    return result;
}

static int read_group(object *of, kvf_group_desc *out, group_memory *memory) {
    static const char *const keys[] = {
        "name", "kind", "layers", "window_tokens", "chunk_tokens", "tokens_per_step", "parts", NULL};
    uint32_t kind = 0;
    int result = check_keys(of, keys, no_keys);
    if (!result)
        result = read_text(of, "name", NULL, &out->name);
    if (!result)
        (void)snprintf(of->where, sizeof of->where, "group %.60s: ", out->name);
    if (!result)
        result = read_choice(of, "kind", kinds, &kind);
    out->kind = (kvf_group_kind)kind;
    if (!result)
        result = read_number(of, "window_tokens", 0, UINT32_MAX, &out->window_tokens);
    if (!result)
        result = read_number(of, "chunk_tokens", 0, UINT32_MAX, &out->chunk_tokens);
    if (!result)
        result = read_number(of, "tokens_per_step", 0, UINT32_MAX, &out->tokens_per_step);
    if (!result)
        result = read_layers(of, out, memory);
    return result ? result : read_parts(of, out, memory);
}

static int make(const object *whole, struct json_object *list, size_t count, kvf_model_desc *desc,
                kvf_model **out) {
    kvf_group_desc *groups = calloc(count + 1, sizeof *groups);
    group_memory *memory = calloc(count + 1, sizeof *memory);
    if (!groups || !memory) {
        free(groups);
        free(memory);
        return failure("not enough memory");
    }
    int result = EXIT_DONE;
    for (size_t i = 0; i < count && !result; i++) {
        object group = {.path = whole->path, .json = json_object_array_get_idx(list, i)};
        (void)snprintf(group.where, sizeof group.where, "group %zu: ", i);
        result = read_group(&group, &groups[i], &memory[i]);
    }
    desc->groups = groups;
    desc->group_count = (uint32_t)count;
    kvf_status status = result ? KVF_OK : kvf_model_create(desc, out);
    if (status)
        result = library_error(status, "%s", whole->path);
    for (size_t i = 0; i < count; i++) {
        free(memory[i].layers);
        free(memory[i].parts);
    }
    free(memory);
    free(groups);
    return result;
}

static int read_model(const object *whole, kvf_model **out) {
    static const char *const keys[] = {"name", "layers", "groups", NULL};
    static const char *const read_over[] = {"token_bytes", "state_bytes", "notes", NULL};
    kvf_model_desc desc = {.struct_size = sizeof desc};
    struct json_object *list = NULL;
    size_t count = 0;
    int result = check_keys(whole, keys, read_over);
    if (!result)
        result = read_text(whole, "name", text_file_name(whole->path), &desc.name);
    if (!result)
        result = read_number(whole, "layers", 1, MAX_LAYERS, &desc.layer_count);
    if (!result)
        result = read_list(whole, "groups", 64, &list, &count);
    return result ? result : make(whole, list, count, &desc, out);
}

int groups_file_load(const char *path, kvf_model **out) {
    size_t bytes = 0;
    char *content = malloc(MAX_FILE_BYTES + 1);
    object whole = {.path = path};
    int result = content ? file_read("groups", path, content, MAX_FILE_BYTES + 1, &bytes)
                         : failure("not enough memory");
    if (!result && (bytes == 0 || bytes > MAX_FILE_BYTES))
        result = usage_error("%s is %s; allowed: 1 byte to 1 MiB", path, bytes ? "larger" : "empty");
    if (!result)
        result = json_read(path, content, bytes, &whole.json);
    if (!result)
        result = read_model(&whole, out);
    json_object_put(whole.json);
    free(content);
    return result;
}

/* ---- writing --------------------------------------------------------------------------------- */

static struct json_object *json_part(const kvf_part_desc *part) {
    struct json_object *out = json_object_new_object();
    json_text(out, "name", part->name);
    json_text(out, "dtype", kvf_dtype_name(part->dtype));
    json_count(out, "units", part->units);
    json_count(out, "granule_units", part->granule_units);
    json_count(out, "cell_elements", part->cell_elements);
    json_count(out, "rows_per_step", part->rows_per_step);
    json_count(out, "tensor", part->tensor);
    json_text(out, "tp_rule", rules[part->tp_rule]);
    return out;
}

static struct json_object *json_group(const kvf_group_desc *group) {
    struct json_object *out = json_object_new_object(), *layers = json_object_new_array(),
                       *parts = json_object_new_array();
    json_text(out, "name", group->name);
    json_text(out, "kind", kinds[group->kind]);
    for (uint32_t i = 0; i < group->layer_count; i++)
        json_object_array_add(layers, json_object_new_int64(group->layers[i]));
    json_object_object_add(out, "layers", layers);
    json_count(out, "window_tokens", group->window_tokens);
    json_count(out, "chunk_tokens", group->chunk_tokens);
    json_count(out, "tokens_per_step", group->tokens_per_step);
    for (uint32_t p = 0; p < group->part_count; p++)
        json_object_array_add(parts, json_part(&group->parts[p]));
    json_object_object_add(out, "parts", parts);
    return out;
}

struct json_object *groups_file_json(const char *name, const kvf_model *model) {
    struct json_object *out = json_object_new_object(), *groups = json_object_new_array();
    json_text(out, "name", name);
    json_count(out, "layers", kvf_model_layer_count(model));
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++)
        json_object_array_add(groups, json_group(kvf_model_group(model, g)));
    json_object_object_add(out, "groups", groups);
    return out;
}
