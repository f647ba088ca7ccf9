/*
 * Printing JSON.
 */
#ifndef KVFERRY_CLI_JSON_H
#define KVFERRY_CLI_JSON_H

#include <json-c/json.h>
#include <stdint.h>

#include "shape.h"

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
