/*
 * Models whose groups were made by hand, as JSON. docs/groups.schema.json describes the format, --groups reads it, and
 * "kvferry models --json" writes it.
 *
 *   {"name": "toy", "layers": 4,
 *    "groups": [{"name": "full", "kind": "tokens", "layers": [0, 1, 2, 3],
 *                "parts": [{"name": "k", "dtype": "bf16", "units": 8, "cell_elements": 128},
 *                          {"name": "v", "dtype": "bf16", "units": 8, "cell_elements": 128}]}]}
 */
#ifndef KVFERRY_CLI_GROUPS_FILE_H
#define KVFERRY_CLI_GROUPS_FILE_H

#include <json-c/json.h>
#include <kvferry/model.h>

/**
 * Makes the model that a file describes. Returns EXIT_DONE; otherwise prints what is wrong, with group, part and key,
 * and returns EXIT_USAGE or, if the file cannot be read, EXIT_FAILED.
 */
int groups_file_load(const char *path, kvf_model **out);

/** Describes any model by such an object. */
struct json_object *groups_file_json(const char *name, const kvf_model *model);

#endif
