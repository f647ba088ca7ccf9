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

/** Rounded to four significant digits, which is more than any measurement here is worth. */
void json_real(struct json_object *object, const char *key, double value);

/** [begin, end]. */
void json_range(struct json_object *object, const char *key, kvf_range range);

/** What is to be known of how a model was read: a list of sentences, mostly empty. */
void json_notes(struct json_object *object, const char *key, const kvf_model *model);

/** The numbers of a shape. */
struct json_object *json_shape(const engine_shape *shape, const kvf_engine *engine);

/** Says what is wrong with a file that json_write() could not write to; makes it. */
int json_check_file(const char *file);

/** Writes an object to a file ("-": standard output) and frees it; says what went wrong. */
int json_write(struct json_object *object, const char *file);

#endif
