/*
 * The stream of one request: how many bytes each lane has, and which blocks.
 *
 * The common steps of a group are numbered (stage/kept.h), and those of the request have consecutive numbers. So the
 * bytes of a lane are its steps times the bytes of a step, and a byte's place in the lane gives its step.
 */
#include "model/model.h"
#include "request/request.h"
#include "stage/inside.h"

/* One group while its stream is made. */
typedef struct group_blocks {
    const kvf_group_steps *wanted;
    uint64_t begin,
        end; /* logical blocks of this rank's sequence, from the first that is needed to the last */
} group_blocks;

/* ---- blocks ----------------------------------------------------------------------------------- */

static kvf_status look_up(const kvf_stream_map *map, uint32_t group, const kvf_block_table *table,
                          uint64_t position, uint32_t *id) {
    const kvf_held_group *held = &map->shard->groups[group];
    const kvf_table_side side = {"this rank's", table, held->steps_per_block, 1, held->block_count};
    return kvf_table_look_up(&side, position, kvf_kept_step(&map->kept[group], position), id);
}

/* Finds the steps of a group that flow, and their blocks. */
static kvf_status measure_group(const kvf_stream_map *map, uint32_t g, group_blocks *blocks,
                                kvf_stream_group *out) {
    const kvf_group_steps *wanted = blocks->wanted;
    const kvf_kept *kept = &map->kept[g];
    kvf_status status = kvf_check_steps(wanted->begin, wanted->end);
    if (!status && wanted->table.count > 0 && !wanted->table.ids)
        status = kvf_fail(KVF_E_INVALID, "table.ids is NULL");
    if (status || kept->steps == 0)
        return status;
    const uint64_t begin = kvf_first_moved(kvf_model_group(map->shard->model, g), wanted->begin, wanted->end);
    out->first = kvf_kept_number(kept, begin);
    out->steps = kvf_kept_number(kept, wanted->end) - out->first;
    if (out->steps == 0)
        return KVF_OK;
    const uint64_t first = kvf_kept_find(kept, out->first).position;
    const uint64_t last = kvf_kept_find(kept, out->first + out->steps - 1).position;
    uint32_t id; /* copy_table() checks the blocks between */
    status = look_up(map, g, &wanted->table, first, &id);
    if (!status)
        status = look_up(map, g, &wanted->table, last, &id);
    if (status)
        return status;
    const uint32_t tokens = map->shard->groups[g].steps_per_block;
    blocks->begin = first / tokens;
    blocks->end = last / tokens + 1;
    out->position = blocks->begin * tokens;
    return KVF_OK;
}

/* Copies the entries of the blocks in which steps flow. */
static kvf_status copy_table(const kvf_stream_map *map, uint32_t g, const group_blocks *blocks,
                             kvf_stream_group *out) {
    const kvf_kept *kept = &map->kept[g];
    const uint64_t tokens = map->shard->groups[g].steps_per_block, end = out->first + out->steps;
    for (uint64_t number = out->first; number < end;) {
        const uint64_t position = kvf_kept_find(kept, number).position, block = position / tokens;
        kvf_status status =
            look_up(map, g, &blocks->wanted->table, position, &out->ids[block - blocks->begin]);
        if (status)
            return status;
        number = kvf_kept_before(kept, (block + 1) * tokens);
    }
    return KVF_OK;
}

/* ---- making one ------------------------------------------------------------------------------- */

static kvf_status measure(const kvf_stream_map *map, const kvf_group_steps *groups, group_blocks *blocks,
                          kvf_stream_group *out, uint64_t *ids) {
    *ids = 0;
    for (uint32_t g = 0; g < kvf_model_group_count(map->shard->model); g++) {
        blocks[g].wanted = &groups[g];
        kvf_status status = measure_group(map, g, &blocks[g], &out[g]);
        if (status)
            return kvf_fail_in(status, "group %s: ", kvf_model_group(map->shard->model, g)->name);
        *ids += blocks[g].end - blocks[g].begin;
    }
    return KVF_OK;
}

static kvf_status copy_tables(const kvf_stream *stream, const group_blocks *blocks) {
    const kvf_model *model = stream->map->shard->model;
    uint32_t *ids = stream->ids;
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        stream->groups[g].ids = ids;
        kvf_status status = copy_table(stream->map, g, &blocks[g], &stream->groups[g]);
        if (status)
            return kvf_fail_in(status, "group %s: ", kvf_model_group(model, g)->name);
        ids += blocks[g].end - blocks[g].begin;
    }
    return KVF_OK;
}

static kvf_status add_lanes(const kvf_stream *stream) {
    const kvf_stream_map *map = stream->map;
    uint64_t at = 0;
    stream->begins[0] = 0;
    for (uint32_t i = 0; i < map->lane_count; i++) {
        const uint32_t item = map->lanes[i].item;
        const kvf_item_shape *shape = &map->shapes[item];
        uint64_t step;
        if (!kvf_mul(shape->step_atoms, shape->stream_atom, &step) ||
            !kvf_mul_add(step, stream->groups[map->selection->items[item].group].steps, at, &at))
            return kvf_fail(KVF_E_OVERFLOW, "the stream has more than 2^64 bytes");
        stream->begins[i + 1] = at;
    }
    return KVF_OK;
}

/* Everything in one allocation. */
static kvf_stream *stream_of(const kvf_stream_map *map, const kvf_stream_group *groups, uint32_t count,
                             uint64_t ids) {
    const size_t head =
        sizeof(kvf_stream) + count * sizeof *groups + (map->lane_count + 1) * sizeof(uint64_t);
    kvf_stream *stream = ids < SIZE_MAX / 8 ? kvf_alloc0(1, head + (size_t)ids * sizeof(uint32_t)) : NULL;
    if (!stream)
        return NULL;
    stream->map = map;
    stream->groups = (kvf_stream_group *)(void *)(stream + 1);
    stream->begins = (uint64_t *)(void *)(stream->groups + count);
    stream->ids = (uint32_t *)(void *)(stream->begins + map->lane_count + 1);
    stream->id_count = ids;
    memcpy(stream->groups, groups, count * sizeof *groups);
    return stream;
}

static kvf_status make(const kvf_stream_map *map, const kvf_group_steps *groups, uint32_t count,
                       group_blocks *blocks, kvf_stream_group *measured, kvf_stream **out) {
    uint64_t ids;
    kvf_status status = measure(map, groups, blocks, measured, &ids);
    if (status)
        return status;
    kvf_stream *stream = stream_of(map, measured, count, ids);
    if (!stream)
        return kvf_nomem("a stream");
    status = copy_tables(stream, blocks);
    if (!status)
        status = add_lanes(stream);
    if (status)
        kvf_free(stream);
    else
        *out = stream;
    return status;
}

kvf_status kvf_stream_create(const kvf_stream_map *map, const kvf_group_steps *groups, uint32_t count,
                             kvf_stream **out) {
    const uint32_t wanted = kvf_model_group_count(map->shard->model);
    if (count != wanted)
        return kvf_fail(KVF_E_INVALID, "count is %u; the model has %u groups", count, wanted);
    group_blocks *blocks = kvf_alloc0(count, sizeof *blocks);
    kvf_stream_group *measured = kvf_alloc0(count, sizeof *measured);
    kvf_status status =
        blocks && measured ? make(map, groups, count, blocks, measured, out) : kvf_nomem("a stream");
    kvf_free(blocks);
    kvf_free(measured);
    return status;
}

void kvf_stream_free(kvf_stream *stream) {
    kvf_free(stream);
}

const uint32_t *kvf_stream_table(const kvf_stream *stream, uint64_t *count) {
    *count = stream->id_count;
    return stream->ids;
}

/* ---- places ----------------------------------------------------------------------------------- */

uint64_t kvf_stream_bytes(const kvf_stream *stream) {
    return stream->begins[stream->map->lane_count];
}

/* Where the lanes of this layer and those after it begin. */
static uint64_t layer_begin(const kvf_stream *stream, uint32_t layer) {
    const kvf_stream_map *map = stream->map;
    uint32_t low = 0, high = map->lane_count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (map->lanes[middle].layer < layer)
            low = middle + 1;
        else
            high = middle;
    }
    return stream->begins[low];
}

kvf_byte_range kvf_stream_layers(const kvf_stream *stream, kvf_range layers) {
    const uint64_t begin = layer_begin(stream, layers.begin);
    return (kvf_byte_range){begin, kvf_max_u64(begin, layer_begin(stream, layers.end))};
}

uint32_t kvf_stream_lane(const kvf_stream *stream, uint64_t byte) {
    uint32_t low = 0, high = stream->map->lane_count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (stream->begins[middle + 1] <= byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

uint32_t kvf_stream_whole_layers(const kvf_stream *stream, uint64_t bytes) {
    const uint32_t lane = kvf_stream_lane(stream, bytes);
    return lane < stream->map->lane_count ? stream->map->lanes[lane].layer : UINT32_MAX;
}

void kvf_stream_add_layers(const kvf_stream *stream, kvf_byte_range bytes, uint64_t *by_layer) {
    for (uint32_t i = kvf_stream_lane(stream, bytes.begin); bytes.begin < bytes.end; i++) {
        const uint64_t end = kvf_min_u64(bytes.end, stream->begins[i + 1]);
        by_layer[stream->map->lanes[i].layer] += end - bytes.begin;
        bytes.begin = end;
    }
}

uint32_t kvf_stream_element(const kvf_stream *stream) {
    const kvf_stream_map *map = stream->map;
    uint32_t most = 0;
    for (uint32_t i = 0; i < map->selection->item_count; i++)
        most = map->shapes[i].stream_atom > most ? map->shapes[i].stream_atom : most;
    return most;
}

uint64_t kvf_stream_cut(const kvf_stream *stream, uint64_t begin, uint64_t most) {
    const kvf_stream_map *map = stream->map;
    const uint64_t all = kvf_stream_bytes(stream);
    KVF_ASSERT(begin <= all);
    if (most >= all - begin)
        return all - begin;
    const uint32_t lane = kvf_stream_lane(stream, begin + most);
    const uint64_t beyond =
        (begin + most - stream->begins[lane]) % map->shapes[map->lanes[lane].item].stream_atom;
    return beyond <= most ? most - beyond : 0;
}
