/*
 * A selection in the memory of one shard.
 */
#include "kernel/convert.h"
#include "stage/inside.h"

static bool contains(kvf_range outer, kvf_range inner) {
    return outer.begin <= inner.begin && inner.end <= outer.end;
}

static kvf_status check_held(const kvf_shard *shard, const kvf_stream_item *item) {
    const kvf_group_desc *group = kvf_model_group(shard->model, item->group);
    const kvf_range layers = shard->group_layers[item->group];
    const kvf_range units = shard->groups[item->group].parts[item->part].units;
    if (contains(layers, item->layers) && contains(units, item->units))
        return KVF_OK;
    const uint32_t missing = contains(layers, item->layers)      ? item->layers.begin
                             : item->layers.begin < layers.begin ? item->layers.begin
                                                                 : item->layers.end - 1;
    return kvf_fail(
        KVF_E_UNCOVERED,
        "rank %u does not hold group %s, part %s, layer %u, units [%u, %u): it has units [%u, %u) of %u "
        "layers",
        shard->desc.rank, group->name, group->parts[item->part].name, group->layers[missing],
        item->units.begin, item->units.end, units.begin, units.end, layers.end - layers.begin);
}

static bool is_share(kvf_token_share own, kvf_token_share of_item) {
    return own.count == of_item.count &&
           (own.count == 1 || (own.index == of_item.index && own.width == of_item.width));
}

/* Finds the steps of the item's group that both ends keep, in this rank's positions. */
static kvf_status pair_shares(const kvf_shard *shard, const kvf_stream_item *item, kvf_kept *out) {
    const kvf_group_desc *group = kvf_model_group(shard->model, item->group);
    const kvf_token_share own = shard->groups[item->group].share;
    const unsigned long long each = group->tokens_per_step;
    const uint32_t other = is_share(own, item->tokens[0]) ? 1 : 0;
    if (!is_share(own, item->tokens[1 - other]))
        return kvf_fail(
            KVF_E_MISMATCH,
            "group %s: rank %u has share %u of %u of the tokens, in turns of %llu; the selection is between "
            "%u of %u, in turns of %llu, and %u of %u, in turns of %llu",
            group->name, shard->desc.rank, own.index, own.count, own.width * each, item->tokens[0].index,
            item->tokens[0].count, item->tokens[0].width * each, item->tokens[1].index, item->tokens[1].count,
            item->tokens[1].width * each);
    return kvf_kept_make(item->tokens[1 - other], item->tokens[other], group->tokens_per_step, out);
}

/* No product overflows: the bytes of a step of the group, in the model's types, fit in 64 bits. */
static kvf_item_shape shape_of(const kvf_shard *shard, const kvf_stream_item *item) {
    const kvf_part_desc *part = &kvf_model_group(shard->model, item->group)->parts[item->part];
    kvf_item_shape shape = {.memory_type = part->dtype,
                            .stream_type = item->dtype,
                            .rows_per_step = part->rows_per_step,
                            .units = item->units.end - item->units.begin};
    shape.memory_atom = (uint32_t)kvf_max_u64(1, kvf_dtype_bits(part->dtype) / 8);
    shape.stream_atom = (uint32_t)kvf_max_u64(1, kvf_dtype_bits(item->dtype) / 8);
    shape.cell_atoms = kvf_part_cell_bytes(part) / shape.memory_atom;
    shape.row_atoms = shape.cell_atoms * shape.units;
    shape.step_atoms = shape.row_atoms * shape.rows_per_step;
    return shape;
}

static kvf_status take_item(kvf_stream_map *map, uint32_t i) {
    const kvf_stream_item *item = &map->selection->items[i];
    kvf_status status = check_held(map->shard, item);
    if (!status && map->kept[item->group].positions == 0)
        status = pair_shares(map->shard, item, &map->kept[item->group]);
    if (!status)
        map->shapes[i] = shape_of(map->shard, item);
    return status;
}

kvf_status kvf_stream_map_create(const kvf_shard *shard, const kvf_selection *selection,
                                 kvf_stream_map **out) {
    kvf_stream_map *map = kvf_alloc0(1, sizeof *map);
    if (!map)
        return kvf_nomem("a stream");
    map->shard = shard;
    /* Checked again, because it may have been made for another model. */
    kvf_status status =
        kvf_selection_check(shard->model, selection->items, selection->item_count, &map->selection);
    if (!status) {
        map->shapes = kvf_alloc0(selection->item_count, sizeof *map->shapes);
        map->kept = kvf_alloc0(kvf_model_group_count(shard->model), sizeof *map->kept);
        if (!map->shapes || !map->kept)
            status = kvf_nomem("a stream");
    }
    for (uint32_t i = 0; i < selection->item_count && !status; i++)
        status = take_item(map, i);
    if (!status)
        status = kvf_lanes_of(shard->model, map->selection->items, map->selection->item_count, &map->lanes,
                              &map->lane_count);
    if (status)
        kvf_stream_map_free(map);
    else
        *out = map;
    return status;
}

void kvf_stream_map_free(kvf_stream_map *map) {
    if (!map)
        return;
    for (uint32_t g = 0; map->kept && g < kvf_model_group_count(map->shard->model); g++)
        kvf_kept_free(&map->kept[g]);
    kvf_free(map->kept);
    kvf_free(map->shapes);
    kvf_free(map->lanes);
    kvf_selection_free(map->selection);
    kvf_free(map);
}
