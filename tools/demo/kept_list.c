#include "kept_list.h"

#include <json-c/json.h>
#include <stdlib.h>
#include <string.h>

#define SECOND 1e9
#define MOST_LISTED 256u /* of ids that are short: they fit into a record */
#define PART 32u         /* requests that the agent is asked for at a time */

static struct json_object *describe(const kvf_kept_request *kept) {
    struct json_object *out = json_object_new_object();
    (void)json_object_object_add(out, "request", json_object_new_string_len(kept->id, (int)kept->id_bytes));
    (void)json_object_object_add(out, "tokens", json_object_new_uint64(kept->tokens));
    (void)json_object_object_add(out, "consumers", json_object_new_uint64(kept->consumers));
    (void)json_object_object_add(out, "served", json_object_new_uint64(kept->served));
    (void)json_object_object_add(out, "moves", json_object_new_boolean(kept->moves));
    (void)json_object_object_add(out, "age_s", json_object_new_double((double)kept->age_ns / SECOND));
    if (kept->left_ns != UINT64_MAX)
        (void)json_object_object_add(out, "left_s", json_object_new_double((double)kept->left_ns / SECOND));
    return out;
}

static bool is_named(const kvf_kept_request *kept, kvf_request_id names) {
    return kept->id_bytes >= names.size && (names.size == 0 || memcmp(kept->id, names.data, names.size) == 0);
}

static kvf_status list(kvf_agent *agent, kvf_request_id names, struct json_object *into, uint64_t *count) {
    kvf_kept_request *part = calloc(PART, sizeof *part);
    uint32_t left = part ? UINT32_MAX : 0;
    kvf_status status = part ? KVF_OK : KVF_E_NOMEM;
    for (uint64_t after = 0; left > 0 && !status;) {
        part[0].struct_size = sizeof *part;
        status = kvf_agent_kept_requests(agent, after, part, PART, &left);
        const uint32_t found = left < PART ? left : PART;
        for (uint32_t i = 0; i < found && !status; i++) {
            if (!is_named(&part[i], names))
                continue;
            if (++*count <= MOST_LISTED)
                (void)json_object_array_add(into, describe(&part[i]));
        }
        left -= found;
        after = found > 0 ? part[found - 1].ticket : after;
    }
    free(part);
    return status;
}

kvf_status kept_list_make(kvf_agent *agent, kvf_request_id names, kvf_record *out) {
    struct json_object *all = json_object_new_object(), *kept = json_object_new_array();
    uint64_t count = 0;
    kvf_status status = list(agent, names, kept, &count);
    (void)json_object_object_add(all, "count", json_object_new_uint64(count));
    (void)json_object_object_add(all, "kept", kept);
    size_t size = 0;
    const char *text = json_object_to_json_string_length(all, JSON_C_TO_STRING_PLAIN, &size);
    char *data = status || !text ? NULL : malloc(size);
    if (data)
        memcpy(data, text, size);
    else if (!status)
        status = KVF_E_NOMEM;
    json_object_put(all);
    *out = (kvf_record){.name = "kept", .data = data, .size = data ? size : 0};
    return status;
}

void kept_list_free(kvf_record *record) {
    free((void *)(uintptr_t)record->data);
    record->data = NULL;
}
