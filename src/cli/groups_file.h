/*
 * Models of groups made by hand, as JSON: what docs/groups.schema.json describes, what --groups reads, and what
 * "kvferry models --json" writes.
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
 * Makes the model that a file describes. Returns EXIT_DONE, or says what is wrong, naming group, part and key, and
 * returns EXIT_USAGE or, where it cannot be read, EXIT_FAILED.
 */
int groups_file_load(const char *path, kvf_model **out);

/** The same object of any model. */
struct json_object *groups_file_json(const char *name, const kvf_model *model);

#endif
