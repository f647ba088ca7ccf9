/* Builds answers in the shape of the recorded ones, and compares them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

answer answer_with(json_object *out) {
    return (answer){.out = out};
}

answer answer_refused(void) {
    answer refused = {.refusal = kvf_refusal_name(kvf_topology_refusal())};
    snprintf(refused.detail, sizeof refused.detail, "%s", kvf_error_detail());
    return refused;
}

answer answer_not_covered(const char *reason) {
    return (answer){.not_covered = reason};
}

json_object *json_u64(uint64_t number) {
    return number > INT64_MAX ? json_object_new_uint64(number) : json_object_new_int64((int64_t)number);
}

json_object *with(json_object *object, const char *key, json_object *value) {
    json_object_object_add(object, key, value);
    return object;
}

json_object *json_ids(const kvf_ids *list) {
    json_object *array = json_object_new_array();
    for (size_t i = 0; i < list->count; i++)
        json_object_array_add(array, json_u64(list->at[i]));
    return array;
}

json_object *json_lists(const kvf_block_lists *lists) {
    json_object *array = json_object_new_array();
    for (size_t g = 0; g < lists->count; g++)
        json_object_array_add(array, json_ids(&lists->groups[g]));
    return array;
}

json_object *json_table(const kvf_descriptor_table *table) {
    json_object *array = json_object_new_array();
    for (size_t i = 0; i < table->count; i++) {
        json_object *entry = json_object_new_array();
        json_object_array_add(entry, json_u64(table->at[i].address));
        json_object_array_add(entry, json_u64(table->at[i].bytes));
        json_object_array_add(entry, json_u64(table->at[i].device));
        json_object_array_add(array, entry);
    }
    return array;
}

json_object *take_ids(kvf_ids *list) {
    json_object *array = json_ids(list);
    kvf_ids_free(list);
    return array;
}

json_object *take_lists(kvf_block_lists *lists) {
    json_object *array = json_lists(lists);
    kvf_block_lists_free(lists);
    return array;
}

json_object *take_table(kvf_descriptor_table *table) {
    json_object *array = json_table(table);
    kvf_descriptor_table_free(table);
    return array;
}

/* A path into a value, written while descending. */
typedef struct path {
    char text[256];
    size_t length;
} path;

/* Appends ".key", or "[index]" without a key; a path that is too long is cut off. */
static void extend(path *where, const char *key, size_t index) {
    char *end = where->text + where->length;
    size_t room = sizeof where->text - where->length;
    int written = key ? snprintf(end, room, ".%s", key) : snprintf(end, room, "[%zu]", index);
    if (written > 0)
        where->length += (size_t)written < room ? (size_t)written : room - 1;
}

static bool differ(json_object *expected, json_object *actual, path *where);

static bool arrays_differ(json_object *expected, json_object *actual, path *where) {
    size_t count = json_object_array_length(expected);
    if (count != json_object_array_length(actual))
        return true;
    size_t length = where->length;
    for (size_t i = 0; i < count; i++) {
        extend(where, NULL, i);
        if (differ(json_object_array_get_idx(expected, i), json_object_array_get_idx(actual, i), where))
            return true;
        where->text[where->length = length] = '\0';
    }
    return false;
}

static bool objects_differ(json_object *expected, json_object *actual, path *where) {
    size_t length = where->length;
    json_object_object_foreach(expected, key, value) {
        json_object *other = NULL;
        extend(where, key, 0);
        if (!json_object_object_get_ex(actual, key, &other) || differ(value, other, where))
            return true;
        where->text[where->length = length] = '\0';
    }
    return json_object_object_length(expected) != json_object_object_length(actual);
}

/* Compares two values; integers are compared in 64 bits, signed or not. */
static bool differ(json_object *expected, json_object *actual, path *where) {
    if (json_object_get_type(expected) != json_object_get_type(actual))
        return true;
    switch (json_object_get_type(expected)) {
    case json_type_array:
        return arrays_differ(expected, actual, where);
    case json_type_object:
        return objects_differ(expected, actual, where);
    default:
        return !json_object_equal(expected, actual);
    }
}

/* Describes a difference for the message. */
static void describe(json_object *expected, json_object *actual, const path *where, char *text,
                     size_t text_bytes) {
    const char *left = json_object_to_json_string_ext(expected, JSON_C_TO_STRING_PLAIN);
    const char *right = json_object_to_json_string_ext(actual, JSON_C_TO_STRING_PLAIN);
    snprintf(text, text_bytes, "at %s: recorded %.300s, got %.300s", where->length ? where->text : "the top",
             left, right);
}

bool first_difference(json_object *expected, json_object *actual, char *text, size_t text_bytes) {
    path where = {.text = ""};
    if (!differ(expected, actual, &where))
        return false;
    describe(expected, actual, &where, text, text_bytes);
    return true;
}
