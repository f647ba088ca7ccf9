#include "visiting.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "files.h"
#include "json.h"

enum { MAX_KEY_FILE_BYTES = 4096 };

static bool take_key(struct json_object *all, const char *name, char key[KEY_CHARACTERS + 1]) {
    struct json_object *value = NULL;
    if (!json_object_object_get_ex(all, name, &value) || !json_object_is_type(value, json_type_string) ||
        json_object_get_string_len(value) != KEY_CHARACTERS)
        return false;
    memcpy(key, json_object_get_string(value), KEY_CHARACTERS);
    key[KEY_CHARACTERS] = '\0';
    return true;
}

int keys_read(const char *path, key_pair *out) {
    *out = (key_pair){0};
    if (!path)
        return EXIT_DONE;
    char content[MAX_KEY_FILE_BYTES];
    size_t bytes;
    int result = file_read("key-file", path, content, MAX_KEY_FILE_BYTES, &bytes);
    if (result)
        return result;
    struct json_object *all = NULL;
    result = bytes ? json_read(path, content, bytes, &all) : EXIT_DONE;
    bool whole = take_key(all, "public_key", out->public_key) && take_key(all, "secret_key", out->secret_key);
    json_object_put(all);
    memset(content, 0, sizeof content);
    if (result || whole)
        return result;
    return usage_error("--key-file is \"%s\"; allowed: a file with an object of public_key and secret_key, "
                       "both Z85 keys of %d characters, such as \"kvferry keys\" prints",
                       path, KEY_CHARACTERS);
}

int place_read(const char *text, meeting_place *out) {
    *out = (meeting_place){.endpoint = strdup(text)};
    if (!out->endpoint)
        return failure("not enough memory");
    char *comma = strchr(out->endpoint, ',');
    if (comma && !comma[1])
        return usage_error("\"%s\" ends with a comma; allowed: ENDPOINT, or ENDPOINT,KEY for encryption",
                           text);
    if (comma) {
        *comma = '\0';
        out->key = comma + 1;
    }
    return EXIT_DONE;
}

void place_free(meeting_place *place) {
    free(place->endpoint);
    *place = (meeting_place){0};
}

int place_visit(const options *asked, const char *name, const meeting_place *place, uint32_t patience_s,
                uint32_t greetings, kvf_visited **out) {
    key_pair keys;
    int result = keys_read(asked->key_file, &keys);
    if (result)
        return result;
    const kvf_contact contact = {.endpoint = place->endpoint, .public_key = place->key};
    const kvf_visit_options how = {.struct_size = sizeof how,
                                   .public_key = keys.public_key[0] ? keys.public_key : NULL,
                                   .secret_key = keys.secret_key[0] ? keys.secret_key : NULL,
                                   .timeout_ns = (uint64_t)patience_s * 1000000000u,
                                   .greetings = greetings};
    kvf_status status = kvf_visit(&contact, &how, out);
    memset(&keys, 0, sizeof keys);
    if (status == KVF_E_INVALID || status == KVF_E_RANGE)
        return library_error(status, "%s", name);
    return status ? library_failure(status, "%s", name) : EXIT_DONE;
}

int visited_model(const options *asked, const char *key, const kvf_engine *visited, kvf_model **out) {
    const kvf_model *theirs = kvf_engine_model(visited);
    if (asked->model || asked->groups) {
        int result = options_load_model(asked, out);
        kvf_status status = result ? KVF_OK : kvf_model_compare(*out, theirs);
        return status ? library_error(status, "--%s is not what %s caches",
                                      asked->groups ? "groups" : "model", kvf_engine_name(visited))
                      : result;
    }
    for (uint32_t g = 0; g < kvf_model_group_count(theirs); g++)
        if (kvf_model_group(theirs, g)->kind == KVF_GROUP_STATE)
            return usage_error(
                "--%s needs --model or --groups: %s keeps state in group %s, and does not say which of its "
                "channels stay together",
                key, kvf_engine_name(visited), kvf_model_group(theirs, g)->name);
    *out = kvf_model_retain(theirs);
    return EXIT_DONE;
}
