/*
 * kvferry models: what comes with the library, and what a token and a sequence cost in it.
 */
#include <stdio.h>

#include "json.h"
#include "options.h"
#include "table.h"
#include "text.h"

/* The groups in a few words: "full 32 x (k 8 x 128, v 8 x 128)". */
static void describe_group(const kvf_group_desc *group, char *out, size_t bytes) {
    size_t length = (size_t)snprintf(out, bytes, "%s: %u layers, ", group->name, group->layer_count);
    for (uint32_t p = 0; p < group->part_count && length < bytes; p++) {
        const kvf_part_desc *part = &group->parts[p];
        length += (size_t)snprintf(out + length, bytes - length, "%s%s %u x %u %s", p ? ", " : "", part->name,
                                   part->units, part->cell_elements, kvf_dtype_name(part->dtype));
    }
    if (group->window_tokens && length < bytes)
        (void)snprintf(out + length, bytes - length, ", window %u", group->window_tokens);
    if (group->chunk_tokens && length < bytes)
        (void)snprintf(out + length, bytes - length, ", chunks of %u", group->chunk_tokens);
}

static void measure(const kvf_model *model, uint64_t *token_bytes, uint64_t *state_bytes) {
    *token_bytes = *state_bytes = 0;
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        uint64_t *sum = group->kind == KVF_GROUP_STATE ? state_bytes : token_bytes;
        *sum += kvf_group_step_bytes(group) * group->layer_count;
    }
}

static void add_rows(table *list, const char *name, const kvf_model *model) {
    uint64_t token_bytes, state_bytes;
    measure(model, &token_bytes, &state_bytes);
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        char groups[256];
        describe_group(kvf_model_group(model, g), groups, sizeof groups);
        table_cell(list, g ? "" : name);
        table_cell(list, g ? "" : text_format("%u", kvf_model_layer_count(model)).text);
        table_cell(list, g ? "" : text_bytes(token_bytes).text);
        table_cell(list, g || !state_bytes ? "" : text_bytes(state_bytes).text);
        table_cell(list, groups);
    }
}

static struct json_object *json_model(const char *name, const kvf_model *model) {
    struct json_object *out = json_object_new_object();
    uint64_t token_bytes, state_bytes;
    measure(model, &token_bytes, &state_bytes);
    json_text(out, "name", name);
    json_count(out, "layers", kvf_model_layer_count(model));
    json_count(out, "token_bytes", token_bytes);
    json_count(out, "state_bytes", state_bytes);
    struct json_object *groups = json_object_new_array();
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        struct json_object *one = json_object_new_object();
        json_text(one, "name", group->name);
        json_text(one, "kind", group->kind == KVF_GROUP_STATE ? "state" : "tokens");
        json_count(one, "layers", group->layer_count);
        json_count(one, "window_tokens", group->window_tokens);
        json_count(one, "chunk_tokens", group->chunk_tokens);
        struct json_object *parts = json_object_new_array();
        for (uint32_t p = 0; p < group->part_count; p++) {
            struct json_object *part = json_object_new_object();
            json_text(part, "name", group->parts[p].name);
            json_count(part, "units", group->parts[p].units);
            json_count(part, "cell_elements", group->parts[p].cell_elements);
            json_text(part, "dtype", kvf_dtype_name(group->parts[p].dtype));
            json_object_array_add(parts, part);
        }
        json_object_object_add(one, "parts", parts);
        json_object_array_add(groups, one);
    }
    json_object_object_add(out, "groups", groups);
    json_notes(out, "notes", model);
    return out;
}

int run_models(int argc, char **argv) {
    options asked;
    int result = options_parse(argc, argv, COMMAND_MODELS, &asked);
    if (result)
        return result;
    table list;
    table_start(&list, "model|>layers|>a token|>a state|groups");
    struct json_object *all = json_object_new_array();
    const char *name;
    for (uint32_t i = 0; !result && (name = kvf_builtin_model_name(i)) != NULL; i++) {
        kvf_model *model = NULL;
        kvf_status status = kvf_model_load(name, &asked.config, &model);
        if (status) {
            result = library_error(status, "model %s", name);
            break;
        }
        options_say_notes(name, model);
        add_rows(&list, name, model);
        json_object_array_add(all, json_model(name, model));
        kvf_model_free(model);
    }
    if (!result && asked.json) {
        table_free(&list);
        return json_write(all, "-");
    }
    json_object_put(all);
    if (result) {
        table_free(&list);
        return result;
    }
    return table_print(&list, 0) ? EXIT_DONE : failure("not enough memory");
}
