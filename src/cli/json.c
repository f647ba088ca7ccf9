#include "json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "files.h"
#include "text.h"

/* ---- reading --------------------------------------------------------------------------------- */

/* The string between two quotation marks, without its escapes. */
static struct json_object *read_string(const char *first, const char *last) {
    struct json_tokener *reader = json_tokener_new();
    struct json_object *out = reader ? json_tokener_parse_ex(reader, first, (int)(last - first + 1)) : NULL;
    if (reader)
        json_tokener_free(reader);
    return out;
}

/* Adds the key at `first` to the keys of its object so far, which are NULL if there was no memory for them. */
static int add_key(const char *path, const char *content, const char *first, const char *last,
                   struct json_object *keys) {
    enum { SHOWN = 80 };
    struct json_object *key = read_string(first, last), *before = NULL;
    const char *name = json_object_get_string(key);
    int result = EXIT_DONE;
    if (name && json_object_object_get_ex(keys, name, &before))
        result = usage_error("%s: \"%.*s%s\" is given twice in one object, at byte %lld and at byte %lld",
                             path, SHOWN, name, strlen(name) > SHOWN ? "..." : "",
                             (long long)json_object_get_int64(before), (long long)(first - content));
    else if (!keys || !name ||
             json_object_object_add(keys, name, json_object_new_int64(first - content)) != 0)
        result = failure("not enough memory");
    json_object_put(key);
    return result;
}

static bool is_key(const char *behind, const char *end) {
    while (behind < end && strchr(" \t\r\n", *behind))
        behind++;
    return behind < end && *behind == ':';
}

/* Refuses a key that an object has twice, in a text that json-c has read: so strings end, and brackets match. */
static int check_keys(const char *path, const char *content, size_t bytes) {
    /* Of the objects around; those of a list stay empty. */
    struct json_object *keys[JSON_TOKENER_DEFAULT_DEPTH + 1] = {NULL};
    size_t depth = 0;
    int result = EXIT_DONE;
    const char *end = content + bytes;
    for (const char *at = content; at < end && !result; at++) {
        if (*at == '{' || *at == '[') {
            keys[depth++] = json_object_new_object();
        } else if (*at == '}' || *at == ']') {
            json_object_put(keys[--depth]);
        } else if (*at == '"' || *at == '\'') { /* json-c takes both for keys */
            const char *first = at;
            for (at++; *at != *first; at++)
                at += *at == '\\';
            if (is_key(at + 1, end))
                result = add_key(path, content, first, at, keys[depth - 1]);
        }
    }
    while (depth > 0)
        json_object_put(keys[--depth]);
    return result;
}

int json_read(const char *path, const char *content, size_t bytes, struct json_object **out) {
    struct json_tokener *reader = json_tokener_new();
    *out = NULL;
    if (!reader)
        return failure("not enough memory");
    json_tokener_set_flags(reader, JSON_TOKENER_STRICT | JSON_TOKENER_VALIDATE_UTF8);
    *out = json_tokener_parse_ex(reader, content, (int)bytes);
    const bool unfinished = json_tokener_get_error(reader) == json_tokener_continue;
    /* Only what follows a number or a word, such as null, says that it is over. */
    if (unfinished)
        *out = json_tokener_parse_ex(reader, "\n", 1);
    const enum json_tokener_error error = json_tokener_get_error(reader);
    int result = EXIT_DONE;
    if (error != json_tokener_success && unfinished)
        result = usage_error("%s ends in the middle, at byte %zu", path, bytes);
    else if (error != json_tokener_success)
        result = usage_error("%s is not JSON, at byte %zu: %s", path, json_tokener_get_parse_end(reader),
                             json_tokener_error_desc(error));
    else
        result = check_keys(path, content, bytes);
    json_tokener_free(reader);
    if (result) {
        json_object_put(*out);
        *out = NULL;
    }
    return result;
}

/* ---- printing -------------------------------------------------------------------------------- */

/* JSON is UTF-8, and the names of files and of peers are any bytes: '?' stands for those that are no character. */
static struct json_object *new_text(const char *value) {
    char *copy = strdup(value);
    if (!copy)
        return NULL;
    for (char *at = copy; *at;) {
        const size_t bytes = text_character(at);
        if (bytes == 0)
            *at = '?';
        at += bytes ? bytes : 1;
    }
    struct json_object *out = json_object_new_string(copy);
    free(copy);
    return out;
}

void json_text(struct json_object *object, const char *key, const char *value) {
    json_object_object_add(object, key, new_text(value));
}

void json_count(struct json_object *object, const char *key, uint64_t value) {
    json_object_object_add(object, key, json_object_new_uint64(value));
}

void json_real(struct json_object *object, const char *key, double value) {
    char digits[32];
    (void)snprintf(digits, sizeof digits, "%.4g", isfinite(value) ? value : 0.0);
    json_object_object_add(object, key, json_object_new_double_s(value, digits));
}

void json_range(struct json_object *object, const char *key, kvf_range range) {
    struct json_object *pair = json_object_new_array();
    json_object_array_add(pair, json_object_new_int64(range.begin));
    json_object_array_add(pair, json_object_new_int64(range.end));
    json_object_object_add(object, key, pair);
}

void json_notes(struct json_object *object, const char *key, const kvf_model *model) {
    struct json_object *notes = json_object_new_array();
    const char *note;
    for (uint32_t i = 0; (note = kvf_model_note(model, i)) != NULL; i++)
        json_object_array_add(notes, new_text(note));
    json_object_object_add(object, key, notes);
}

struct json_object *json_shape(const engine_shape *shape, const kvf_engine *engine) {
    const kvf_model *model = kvf_engine_model(engine);
    struct json_object *out = json_object_new_object(), *stages = json_object_new_array();
    json_count(out, "ranks", kvf_engine_rank_count(engine));
    json_count(out, "tp", shape->tp);
    json_count(out, "pp", shape->pp);
    for (uint32_t stage = 0; stage < shape->pp; stage++)
        json_object_array_add(stages, json_object_new_int64(shape_stage_layers(shape, engine, stage)));
    json_object_object_add(out, "pp_layers", stages);
    json_count(out, "dcp", shape->dcp);
    json_count(out, "dcp_width", shape->dcp_width);
    json_object_object_add(out, "share_pages", json_object_new_boolean(shape->share_pages));
    struct json_object *groups = json_object_new_array();
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_spec *spec = &shape->groups[g];
        struct json_object *group = json_object_new_object();
        json_text(group, "group", kvf_model_group(model, g)->name);
        json_count(group, "tokens_per_block", spec->tokens_per_block);
        json_count(group, "kernel_blocks_per_block", spec->kernel_blocks_per_block);
        json_count(group, "blocks", spec->block_count);
        json_text(group, "order", spec->order);
        json_object_object_add(group, "keys_by_channel", json_object_new_boolean(shape->turned_keys[g]));
        json_object_array_add(groups, group);
    }
    json_object_object_add(out, "groups", groups);
    return out;
}

int json_write(struct json_object *object, const char *file) {
    /* Keys and endpoints are copied from it, and have slashes. */
    const char *words = json_object_to_json_string_ext(
        object, JSON_C_TO_STRING_PRETTY | JSON_C_TO_STRING_SPACED | JSON_C_TO_STRING_NOSLASHESCAPE);
    char *lines;
    if (!words || asprintf(&lines, "%s\n", words) < 0)
        lines = NULL;
    int result = lines ? file_write(file, lines) : failure("not enough memory");
    free(lines);
    json_object_put(object);
    return result;
}
