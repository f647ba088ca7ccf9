/*
 * A configuration's text, and typed access to its fields.
 *
 * json-c is strict about syntax, but of two fields with the same name it keeps the last; two programs that read the
 * same file might then see different models, so such a file is refused. Infinity and NaN are not JSON, but published
 * configurations contain them, and json-c accepts them.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "model/config.h"

/* ---- the text -------------------------------------------------------------------------------- */

static bool is_space(char c) {
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/* The position of a field's name in the text, and the name, whose escapes are resolved. */
typedef struct field_site {
    uint32_t object; /* number of the object that contains it */
    uint32_t written_length, length;
    const char *written, *name;
} field_site;

typedef struct field_sites {
    field_site *at;
    uint32_t count;
    uint32_t capacity;
    struct json_object *resolved; /* owns the names that are written with escapes; NULL: there are none */
} field_sites;

/* Resolves the escapes of a name as json-c does for its tree, where a name ends at a zero. */
static kvf_status resolve_name(field_sites *sites, field_site *site) {
    if (!memchr(site->written, '\\', site->written_length))
        return KVF_OK;
    if (!sites->resolved)
        sites->resolved = json_object_new_array();
    struct json_tokener *tokener = sites->resolved ? json_tokener_new() : NULL;
    struct json_object *text =
        tokener ? json_tokener_parse_ex(tokener, site->written - 1, (int)site->written_length + 2) : NULL;
    if (tokener)
        json_tokener_free(tokener);
    site->name = json_object_get_string(text);
    if (!site->name || json_object_array_add(sites->resolved, text)) {
        json_object_put(text);
        return kvf_nomem("the fields of a configuration");
    }
    site->length = (uint32_t)strlen(site->name);
    return KVF_OK;
}

/* A field takes at least four bytes of text, so the bound on the text bounds the number of fields. */
static kvf_status add_site(field_sites *sites, field_site site) {
    if (sites->count == sites->capacity) {
        uint32_t capacity = sites->capacity ? sites->capacity * 2 : 256;
        field_site *at = kvf_resize(sites->at, capacity, sizeof *at);
        if (!at)
            return kvf_nomem("the fields of a configuration");
        sites->at = at;
        sites->capacity = capacity;
    }
    kvf_status status = resolve_name(sites, &site);
    if (!status)
        sites->at[sites->count++] = site;
    return status;
}

static int compare_sites(const void *left, const void *right) {
    const field_site *a = left;
    const field_site *b = right;
    if (a->object != b->object)
        return a->object < b->object ? -1 : 1;
    if (a->length != b->length)
        return a->length < b->length ? -1 : 1;
    int order = memcmp(a->name, b->name, a->length);
    return order ? order : (a->written > b->written) - (a->written < b->written);
}

/* Skips a string from its first character to its closing quotation mark. Refuses control characters, which json-c
 * accepts. */
static kvf_status skip_string(const char *json, const char *end, const char **at) {
    const char *p = *at;
    while (p < end && *p != '"') {
        if ((unsigned char)*p < ' ')
            return kvf_fail(KVF_E_PARSE,
                            "configuration is not JSON at byte %zu: control character in a string",
                            (size_t)(p - json));
        p += *p == '\\' && p + 1 < end ? 2 : 1;
    }
    *at = p;
    return KVF_OK;
}

/* Whether the string that closes at `mark` is the name of a field. */
static bool is_name(const char *mark, const char *end) {
    const char *p = mark + 1;
    while (p < end && is_space(*p))
        p++;
    return p < end && *p == ':';
}

/* Lists the fields of a text that has been parsed, so strings end and brackets match. */
static kvf_status collect_sites(const char *json, size_t bytes, field_sites *sites) {
    uint32_t inside[KVF_CONFIG_MAX_DEPTH + 1] = {0};
    uint32_t depth = 0;
    uint32_t objects = 0;
    const char *end = json + bytes;
    kvf_status status = KVF_OK;
    for (const char *p = json; p < end && !status; p++) {
        if (*p == '{' || *p == '[') {
            if (depth == KVF_CONFIG_MAX_DEPTH)
                return kvf_fail(KVF_E_PARSE, "configuration nests deeper than %d", KVF_CONFIG_MAX_DEPTH);
            inside[++depth] = ++objects;
        } else if ((*p == '}' || *p == ']') && depth > 0) {
            depth--;
        } else if (*p == '\'') {
            /* json-c accepts these as quotation marks, which this scan does not recognise. */
            status = kvf_fail(KVF_E_PARSE, "configuration is not JSON at byte %zu: single quotation mark",
                              (size_t)(p - json));
        } else if (*p == '"') {
            const char *name = ++p;
            status = skip_string(json, end, &p);
            const uint32_t length = (uint32_t)(p - name);
            if (!status && is_name(p, end))
                status = add_site(sites, (field_site){inside[depth], length, length, name, name});
        }
    }
    return status;
}

static kvf_status check_unique(const char *json, size_t bytes) {
    field_sites sites = {0};
    kvf_status status = collect_sites(json, bytes, &sites);
    if (!status && sites.count)
        qsort(sites.at, sites.count, sizeof *sites.at, compare_sites);
    for (uint32_t i = 1; i < sites.count && !status; i++) {
        const field_site *a = &sites.at[i - 1];
        const field_site *b = &sites.at[i];
        if (a->object == b->object && a->length == b->length && memcmp(a->name, b->name, a->length) == 0)
            status = kvf_fail(KVF_E_INVALID, "%.*s is given twice in one object, at byte %zu and at byte %zu",
                              (int)kvf_min_u64(b->written_length, 80), b->written,
                              (size_t)(a->written - json), (size_t)(b->written - json));
    }
    kvf_free(sites.at);
    json_object_put(sites.resolved);
    return status;
}

static kvf_status parse_failure(struct json_tokener *tokener) {
    enum json_tokener_error error = json_tokener_get_error(tokener);
    if (error == json_tokener_error_depth)
        return kvf_fail(KVF_E_PARSE, "configuration nests deeper than %d at byte %zu", KVF_CONFIG_MAX_DEPTH,
                        json_tokener_get_parse_end(tokener));
    return kvf_fail(KVF_E_PARSE, "configuration is not JSON at byte %zu: %s",
                    json_tokener_get_parse_end(tokener), json_tokener_error_desc(error));
}

static kvf_status parse_with(struct json_tokener *tokener, const char *json, size_t bytes,
                             struct json_object **tree) {
    json_tokener_set_flags(tokener, JSON_TOKENER_STRICT | JSON_TOKENER_ALLOW_TRAILING_CHARS |
                                        JSON_TOKENER_VALIDATE_UTF8);
    struct json_object *parsed = json_tokener_parse_ex(tokener, json, (int)bytes);
    kvf_status status = KVF_OK;
    /* Only what follows a number or a word, such as null, says that it is over. An object ends by itself. */
    if (json_tokener_get_error(tokener) == json_tokener_continue) {
        parsed = json_tokener_parse_ex(tokener, "\n", 1);
        if (json_tokener_get_error(tokener) != json_tokener_success)
            return kvf_fail(KVF_E_PARSE, "configuration ends in the middle, at byte %zu", bytes);
    }
    if (json_tokener_get_error(tokener) != json_tokener_success) {
        status = parse_failure(tokener);
    } else if (!json_object_is_type(parsed, json_type_object)) {
        status = kvf_fail(KVF_E_PARSE, "configuration is a JSON %s; it must be an object",
                          json_type_to_name(json_object_get_type(parsed)));
    } else {
        size_t end = json_tokener_get_parse_end(tokener);
        while (end < bytes && is_space(json[end]))
            end++;
        if (end < bytes)
            status = kvf_fail(KVF_E_PARSE, "configuration has text after its end, at byte %zu", end);
        else
            status = check_unique(json, bytes);
    }
    if (status)
        json_object_put(parsed);
    else
        *tree = parsed;
    return status;
}

kvf_status kvf_config_parse(const char *json, size_t bytes, struct json_object **tree) {
    if (bytes == 0 || bytes > KVF_CONFIG_MAX_BYTES)
        return kvf_fail(KVF_E_RANGE, "configuration has %zu bytes; allowed: 1 to %u", bytes,
                        KVF_CONFIG_MAX_BYTES);
    struct json_tokener *tokener = json_tokener_new_ex(KVF_CONFIG_MAX_DEPTH);
    if (!tokener)
        return kvf_nomem("a configuration");
    kvf_status status = parse_with(tokener, json, bytes, tree);
    json_tokener_free(tokener);
    return status;
}

/* ---- fields ---------------------------------------------------------------------------------- */

/* json-c does not keep integers that need more than 64 bits. */
static const char *whole_value(struct json_object *value) {
    const bool is_integer = json_object_is_type(value, json_type_int);
    if (is_integer && json_object_get_uint64(value) == UINT64_MAX)
        return "18446744073709551615 or more";
    if (is_integer && json_object_get_int64(value) == INT64_MIN)
        return "-9223372036854775808 or less";
    const char *text = json_object_to_json_string_ext(value, JSON_C_TO_STRING_PLAIN);
    return text ? text : "?";
}

kvf_excerpt kvf_value_written(struct json_object *value, size_t most) {
    return kvf_excerpt_of(whole_value(value), most);
}

static kvf_excerpt written(struct json_object *value) {
    return kvf_value_written(value, 40);
}

/* Takes the next of `names` ("a|b>c") into `name`, and what follows it into `after`; false when there is none. */
static bool next_name(const char **names, char *name, size_t room, char *after) {
    if (!**names)
        return false;
    size_t length = strcspn(*names, KVF_NAME_ENDS);
    (void)snprintf(name, room, "%.*s", (int)length, *names);
    *after = (*names)[length];
    *names += length + (*after != '\0');
    return true;
}

/* Prints a field's name in messages: that at the beginning of `name`. */
#define NAMED "%s%.*s"
#define NAME_OF(fields, name) (fields)->prefix, (int)strcspn(name, KVF_NAME_ENDS), name

/* Follows a path such as "a.b". `value` is NULL if the path ends early or leads to null. */
static kvf_status follow(const kvf_fields *fields, const char *path, bool *exists,
                         struct json_object **value) {
    *value = fields->object;
    *exists = true;
    for (const char *p = path; *p && *value;) {
        if (!json_object_is_type(*value, json_type_object))
            return kvf_fail(KVF_E_INVALID, "%s%.*s is %s; it must be an object", fields->prefix,
                            (int)(p - path - 1), path, written(*value).text);
        char step[64];
        size_t length = strcspn(p, ".");
        (void)snprintf(step, sizeof step, "%.*s", (int)length, p);
        p += length + (p[length] == '.');
        struct json_object *next = NULL;
        bool found = json_object_object_get_ex(*value, step, &next);
        *value = next;
        *exists = found && (next || !*p);
    }
    return KVF_OK;
}

bool kvf_field_exists(const kvf_fields *fields, const char *names) {
    char name[64];
    char after;
    while (next_name(&names, name, sizeof name, &after)) {
        bool exists;
        struct json_object *value;
        if (follow(fields, name, &exists, &value) == KVF_OK && exists)
            return true;
    }
    return false;
}

kvf_status kvf_field_find(const kvf_fields *fields, const char *names, struct json_object **value,
                          const char **name) {
    *value = NULL;
    const char *found_name = names;
    char candidate[64];
    char after = '\0';
    const char *rest = names;
    for (const char *start = rest;
         !(*value && after == '>') && next_name(&rest, candidate, sizeof candidate, &after); start = rest) {
        struct json_object *here;
        bool exists;
        kvf_status status = follow(fields, candidate, &exists, &here);
        if (status)
            return status;
        if (!here)
            continue;
        if (*value && !json_object_equal(*value, here))
            return kvf_fail(KVF_E_INVALID, "%s%.*s is %s, but %s%s is %s", fields->prefix,
                            (int)strcspn(found_name, KVF_NAME_ENDS), found_name, written(*value).text,
                            fields->prefix, candidate, written(here).text);
        if (!*value)
            found_name = start;
        *value = here;
    }
    if (name)
        *name = found_name;
    return KVF_OK;
}

kvf_field_as_text kvf_field_name(const kvf_fields *fields, const char *names) {
    struct json_object *value;
    const char *name = names;
    kvf_field_as_text out;
    if (kvf_field_find(fields, names, &value, &name))
        name = names;
    (void)snprintf(out.text, sizeof out.text, "%.*s", (int)strcspn(name, KVF_NAME_ENDS), name);
    return out;
}

kvf_status kvf_field_missing(const kvf_fields *fields, const char *names) {
    if (!fields->family)
        return kvf_fail(KVF_E_INVALID, NAMED " is missing", NAME_OF(fields, names));
    return kvf_fail(KVF_E_INVALID, NAMED " is %s, and %.64s has no default for it", NAME_OF(fields, names),
                    kvf_field_exists(fields, names) ? "null" : "missing", fields->family);
}

static kvf_status number_of(const kvf_fields *fields, const char *name, struct json_object *value,
                            uint32_t least, uint32_t most, uint32_t *out) {
    if (!json_object_is_type(value, json_type_int))
        return kvf_fail(KVF_E_INVALID, NAMED " is %s; it must be a whole number from %u to %u",
                        NAME_OF(fields, name), written(value).text, least, most);
    int64_t number = json_object_get_int64(value); /* saturates if the number does not fit */
    if (number < (int64_t)least || number > (int64_t)most)
        return kvf_fail(KVF_E_RANGE, NAMED " is %s; allowed: %u to %u", NAME_OF(fields, name),
                        written(value).text, least, most);
    *out = (uint32_t)number;
    return KVF_OK;
}

kvf_status kvf_field_number(const kvf_fields *fields, const char *names, uint32_t least, uint32_t most,
                            bool *given, uint32_t *out) {
    struct json_object *value;
    const char *name;
    kvf_status status = kvf_field_find(fields, names, &value, &name);
    *given = !status && value;
    return *given ? number_of(fields, name, value, least, most, out) : status;
}

kvf_status kvf_field_need(const kvf_fields *fields, const char *names, uint32_t least, uint32_t most,
                          uint32_t fallback, uint32_t *out) {
    bool given;
    kvf_status status = kvf_field_number(fields, names, least, most, &given, out);
    if (status || given)
        return status;
    if (!fallback)
        return kvf_field_missing(fields, names);
    *out = fallback;
    return KVF_OK;
}

kvf_status kvf_field_flag(const kvf_fields *fields, const char *names, bool *out) {
    struct json_object *value;
    const char *name;
    kvf_status status = kvf_field_find(fields, names, &value, &name);
    if (status || !value)
        return status;
    if (!json_object_is_type(value, json_type_boolean))
        return kvf_fail(KVF_E_INVALID, NAMED " is %s; it must be true or false", NAME_OF(fields, name),
                        written(value).text);
    *out = json_object_get_boolean(value);
    return KVF_OK;
}

kvf_status kvf_field_text(const kvf_fields *fields, const char *names, const char **out) {
    *out = NULL;
    struct json_object *value;
    const char *name;
    kvf_status status = kvf_field_find(fields, names, &value, &name);
    if (status || !value)
        return status;
    if (!json_object_is_type(value, json_type_string))
        return kvf_fail(KVF_E_INVALID, NAMED " is %s; it must be a string", NAME_OF(fields, name),
                        written(value).text);
    *out = json_object_get_string(value);
    return *out ? KVF_OK : kvf_nomem("a text of the configuration");
}

kvf_status kvf_field_list(const kvf_fields *fields, const char *names, struct json_object **out,
                          const char **name) {
    kvf_status status = kvf_field_find(fields, names, out, name);
    if (status || !*out)
        return status;
    if (!json_object_is_type(*out, json_type_array))
        return kvf_fail(KVF_E_INVALID, NAMED " is %s; it must be a list", NAME_OF(fields, *name),
                        written(*out).text);
    return KVF_OK;
}

kvf_status kvf_field_object(const kvf_fields *fields, const char *name, kvf_fields *out) {
    *out = (kvf_fields){0};
    struct json_object *value;
    kvf_status status = kvf_field_find(fields, name, &value, NULL);
    if (status || !value)
        return status;
    if (!json_object_is_type(value, json_type_object))
        return kvf_fail(KVF_E_INVALID, NAMED " is %s; it must be an object", NAME_OF(fields, name),
                        written(value).text);
    out->object = value;
    out->family = fields->family;
    (void)snprintf(out->prefix, sizeof out->prefix, "%.60s%.32s.", fields->prefix, name);
    return KVF_OK;
}

kvf_status kvf_element_number(const kvf_fields *fields, const char *name, struct json_object *list, size_t i,
                              uint32_t least, uint32_t most, uint32_t *out) {
    kvf_fields element = *fields;
    char numbered[96];
    (void)snprintf(numbered, sizeof numbered, "%.*s[%zu]", (int)strcspn(name, KVF_NAME_ENDS), name, i);
    return number_of(&element, numbered, json_object_array_get_idx(list, i), least, most, out);
}
