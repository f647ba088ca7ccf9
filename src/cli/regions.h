/*
 * What the memory regions of a rank hold, neighbours that differ in nothing but their layers as one.
 */
#ifndef KVFERRY_CLI_REGIONS_H
#define KVFERRY_CLI_REGIONS_H

#include <json-c/json.h>
#include <kvferry/shard.h>

#include "table.h"

/** Begins a table of regions. */
void regions_start(table *list);

/** Adds the regions of one rank of a side, a row for each view. */
void regions_add(table *list, const char *side, const kvf_shard *shard);

/** The same as an array. */
struct json_object *regions_json(const kvf_shard *shard);

#endif
