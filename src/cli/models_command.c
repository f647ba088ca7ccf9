/*
 * kvferry models: lists the built-in models, or one given model, with the bytes of a token and of a sequence's state;
 * or lists the families whose configurations the library reads.
 */
#include <stdio.h>
#include <string.h>

#include "groups_file.h"
#include "json.h"
#include "options.h"
#include "table.h"
#include "text.h"

/* ---- models ---------------------------------------------------------------------------------- */

/* The list, as a table and as JSON. */
typedef struct listing {
    table list;
    struct json_object *all;
} listing;

/* A group in a few words: "full: 32 layers, k 8x128 bf16, v 8x128 bf16". */
static void describe_group(const kvf_group_desc *group, char *out, size_t bytes) {
    size_t length = (size_t)snprintf(out, bytes, "%s: %u layers, ", group->name, group->layer_count);
    for (uint32_t p = 0; p < group->part_count && length < bytes; p++) {
        const kvf_part_desc *part = &group->parts[p];
        length += (size_t)snprintf(out + length, bytes - length, "%s%s %ux%u %s", p ? ", " : "", part->name,
                                   part->units, part->cell_elements, kvf_dtype_name(part->dtype));
    }
    if (group->window_tokens && length < bytes)
        (void)snprintf(out + length, bytes - length, ", window %u", group->window_tokens);
    if (group->chunk_tokens && length < bytes)
        (void)snprintf(out + length, bytes - length, ", chunks of %u", group->chunk_tokens);
    if (group->tokens_per_step > 1 && length < bytes)
        (void)snprintf(out + length, bytes - length, ", an entry for %u tokens", group->tokens_per_step);
}

static void measure(const kvf_model *model, uint64_t *token_bytes, uint64_t *state_bytes) {
    *token_bytes = *state_bytes = 0;
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        uint64_t *sum = group->kind == KVF_GROUP_STATE ? state_bytes : token_bytes;
        *sum += kvf_group_step_bytes(group) * group->layer_count / group->tokens_per_step;
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
    struct json_object *out = groups_file_json(name, model);
    uint64_t token_bytes, state_bytes;
    measure(model, &token_bytes, &state_bytes);
    json_count(out, "token_bytes", token_bytes);
    json_count(out, "state_bytes", state_bytes);
    json_notes(out, "notes", model);
    return out;
}

static int add_model(const options *asked, listing *to) {
    kvf_model *model = NULL;
    int result = options_load_model(asked, &model);
    if (!result) {
        const char *name = kvf_model_name(model);
        add_rows(&to->list, name, model);
        json_object_array_add(to->all, json_model(name, model));
    }
    kvf_model_free(model);
    return result;
}

/* Loads each built-in model with the given options; a state type may not suit all of them. */
static int add_builtin(const options *asked, listing *to) {
    int result = EXIT_DONE;
    const char *name;
    for (uint32_t i = 0; !result && (name = kvf_builtin_model_name(i)) != NULL; i++) {
        kvf_model *model = NULL;
        kvf_status status = kvf_model_load(name, &asked->config, &model);
        if (status)
            return library_error(status, "model %s", name);
        options_say_notes(name, model);
        add_rows(&to->list, name, model);
        json_object_array_add(to->all, json_model(name, model));
        kvf_model_free(model);
    }
    return result;
}

/* The JSON to print: for one model that the user named, only its object, which --groups can read. */
static struct json_object *json_listed(const options *asked, struct json_object *all) {
    return json_object_get(asked->model || asked->groups ? json_object_array_get_idx(all, 0) : all);
}

static int list_models(const options *asked) {
    listing to = {.all = json_object_new_array()};
    table_start(&to.list, "model|>layers|>a token|>a state|groups");
    int result = asked->model || asked->groups ? add_model(asked, &to) : add_builtin(asked, &to);
    if (!result && options_want_text(asked) && !table_print(&to.list, 0))
        result = failure("not enough memory");
    if (!result && asked->json)
        result = json_write(json_listed(asked, to.all), asked->json);
    json_object_put(to.all);
    table_free(&to.list);
    return result;
}

/* ---- families -------------------------------------------------------------------------------- */

static void add_family(const char *model_types, table *list, struct json_object *all) {
    struct json_object *family = json_object_new_array();
    table_cell(list, model_types);
    for (size_t length; *model_types; model_types += length + (model_types[length] == ' ')) {
        length = strcspn(model_types, " ");
        json_object_array_add(family, json_object_new_string_len(model_types, (int)length));
    }
    json_object_array_add(all, family);
}

static int list_families(const options *asked) {
    table list;
    struct json_object *all = json_object_new_array();
    const char *model_types;
    int result = EXIT_DONE;
    table_start(&list, "model_type in config.json; those of a line are cached alike");
    for (uint32_t i = 0; (model_types = kvf_config_family(i)) != NULL; i++)
        add_family(model_types, &list, all);
    if (options_want_text(asked) && !table_print(&list, 0))
        result = failure("not enough memory");
    if (!result && asked->json)
        result = json_write(json_object_get(all), asked->json);
    json_object_put(all);
    table_free(&list);
    return result;
}

int run_models(int argc, char **argv) {
    options asked;
    int result = options_parse(argc, argv, COMMAND_MODELS, &asked);
    if (!result)
        result = asked.families ? list_families(&asked) : list_models(&asked);
    return result;
}
