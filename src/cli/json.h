/*
 * Reading and printing JSON.
 */
#ifndef KVFERRY_CLI_JSON_H
#define KVFERRY_CLI_JSON_H

#include <json-c/json.h>
#include <stdint.h>

#include "shape.h"

/**
 * Reads a file's text, which is JSON and nothing else. An object that has a key twice is refused: json-c would keep the
 * last of the values. Prints what is wrong and returns EXIT_USAGE, or EXIT_FAILED if there is not enough memory.
 *
 * @param path  of the file, for messages
 * @param out   receives a value for json_object_put(); NULL if the text is refused, or is "null"
 */
int json_read(const char *path, const char *content, size_t bytes, struct json_object **out);

void json_text(struct json_object *object, const char *key, const char *value);
void json_count(struct json_object *object, const char *key, uint64_t value);

/** Adds a value, rounded to four significant digits: no measurement here is more exact. */
void json_real(struct json_object *object, const char *key, double value);

/** Adds a range as [begin, end]. */
void json_range(struct json_object *object, const char *key, kvf_range range);

/** Adds the notes about reading a model: a list of sentences, mostly empty. */
void json_notes(struct json_object *object, const char *key, const kvf_model *model);

/** The numbers of a shape. */
struct json_object *json_shape(const engine_shape *shape, const kvf_engine *engine);

/** Writes an object to a file as file_write() does, and frees it. */
int json_write(struct json_object *object, const char *file);

#endif
