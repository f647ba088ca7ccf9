/*
 * The content of a rank's memory regions. Neighbours that differ only in their layers are shown as one.
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

/** The regions of one rank as a JSON array. */
struct json_object *regions_json(const kvf_shard *shard);

#endif
