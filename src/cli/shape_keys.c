#include "shape_keys.h"

#include <stdlib.h>
#include <string.h>

#include "cli.h"

static const kvf_part_desc *keys_of(const kvf_group_desc *group, uint32_t *number) {
    for (uint32_t p = 0; p < group->part_count; p++)
        if (strcmp(group->parts[p].name, "k") == 0) {
            *number = p;
            return &group->parts[p];
        }
    return NULL;
}

bool shape_has_keys(const kvf_group_desc *group) {
    uint32_t number;
    return keys_of(group, &number) != NULL;
}

static uint32_t layers_held(const kvf_shard *shard, uint32_t group) {
    const kvf_range layers = kvf_shard_group_layers(shard, group);
    return layers.end - layers.begin;
}

/* False: other bytes lie between the tokens of a head. */
static bool turn(kvf_placement *place, const kvf_part_desc *keys, uint64_t rows) {
    const uint64_t cell = kvf_part_cell_bytes(keys);
    if (rows > 1 && place->row_stride != cell)
        return false;
    place->pieces = cell < keys->cell_elements ? (uint32_t)cell : keys->cell_elements; /* of whole bytes */
    place->row_stride = cell / place->pieces;
    place->piece_stride = rows * place->row_stride;
    return true;
}

/* The same rank with turned keys. `places` has room for all of its placements. */
static int turn_shard(const char *side, const bool *turned, const kvf_shard *shard,
                      kvf_group_shard_desc *groups, kvf_placement *places, kvf_shard **out) {
    const kvf_model *model = kvf_shard_model(shard);
    kvf_shard_desc desc = *kvf_shard_get(shard);
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        const size_t count = (size_t)layers_held(shard, g) * group->part_count;
        uint32_t number = 0;
        const kvf_part_desc *keys = turned[g] ? keys_of(group, &number) : NULL;
        groups[g] = desc.groups[g];
        const uint64_t rows = (uint64_t)groups[g].tokens_per_block / group->tokens_per_step /
                              groups[g].kernel_blocks_per_block * (keys ? keys->rows_per_step : 1);
        if (count > 0)
            memcpy(places, groups[g].placements, count * sizeof *places);
        groups[g].placements = places;
        for (size_t i = number; keys && i < count; i += group->part_count)
            if (!turn(&places[i], keys, rows))
                return usage_error(
                    "--%s: keys=by-channel needs an order in which the tokens of a head are side "
                    "by side, such as hnd",
                    side);
        places += count;
    }
    desc.groups = groups;
    const kvf_status status = kvf_shard_create(model, &desc, out);
    return status ? library_error(status, "--%s", side) : EXIT_DONE;
}

static size_t placements_of(const kvf_shard *shard) {
    const kvf_model *model = kvf_shard_model(shard);
    size_t count = 0;
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++)
        count += (size_t)layers_held(shard, g) * kvf_model_group(model, g)->part_count;
    return count;
}

static int turn_rank(const char *side, const bool *turned, const kvf_shard *shard, kvf_shard **out) {
    kvf_group_shard_desc *groups =
        calloc((size_t)kvf_model_group_count(kvf_shard_model(shard)) + 1, sizeof *groups);
    kvf_placement *places = calloc(placements_of(shard) + 1, sizeof *places);
    const int result = groups && places ? turn_shard(side, turned, shard, groups, places, out)
                                        : failure("not enough memory");
    free(places);
    free(groups);
    return result;
}

int shape_turn_keys(const char *side, const bool *turned, kvf_engine **engine) {
    const kvf_model *model = kvf_engine_model(*engine);
    const uint32_t ranks = kvf_engine_rank_count(*engine);
    kvf_shard **shards = calloc((size_t)ranks + 1, sizeof *shards);
    kvf_engine *out = NULL;
    int result = shards ? EXIT_DONE : failure("not enough memory");
    for (uint32_t rank = 0; rank < ranks && !result; rank++)
        result = turn_rank(side, turned, kvf_engine_shard(*engine, rank), &shards[rank]);
    if (!result) {
        const kvf_status status =
            kvf_engine_from_shards(model, kvf_engine_name(*engine), shards, ranks, &out);
        result = status ? library_error(status, "--%s", side) : EXIT_DONE;
    }
    for (uint32_t rank = 0; rank < ranks && !out && shards; rank++)
        kvf_shard_free(shards[rank]);
    free(shards);
    if (!result) {
        kvf_engine_free(*engine);
        *engine = out;
    }
    return result;
}
