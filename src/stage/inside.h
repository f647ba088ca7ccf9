/*
 * Declarations that the files of the packed stream share.
 */
#ifndef KVF_STAGE_INSIDE_H
#define KVF_STAGE_INSIDE_H

#include "shard/shard.h"
#include "stage/kept.h"
#include "stage/stream.h"

/** The most items times their layers: a plan of 80 layers of 128 heads, each from another box, has 2^15 of one part.
 * Data from a peer must not make us allocate more than some MiB. */
#define KVF_STREAM_MAX_LANES (1u << 18)

/** An item in one of its layers: a contiguous range of the stream, possibly empty. */
typedef struct kvf_lane {
    uint32_t layer; /* of the model */
    uint32_t item;
    uint32_t group_layer; /* index into the group's layers */
} kvf_lane;

/**
 * The lanes of items, in the order of the stream.
 *
 * @param items  in their order, each within the model
 * @param out    receives an array to be freed with kvf_free()
 * @return KVF_OK, KVF_E_LIMIT, KVF_E_NOMEM
 */
kvf_status kvf_lanes_of(const kvf_model *model, const kvf_stream_item *items, uint32_t count, kvf_lane **out,
                        uint32_t *lane_count);

/**
 * How an item's elements are counted. An *atom* is never cut: it is an element, or a byte if elements are smaller.
 */
typedef struct kvf_item_shape {
    kvf_dtype memory_type, stream_type;
    uint32_t memory_atom, stream_atom; /* bytes of each */
    uint64_t cell_atoms, row_atoms, step_atoms;
    uint32_t rows_per_step, units;
} kvf_item_shape;

struct kvf_stream_map {
    const kvf_shard *shard;
    kvf_selection *selection;
    kvf_item_shape *shapes; /* by item */
    kvf_kept *kept;         /* by group; zeroed if the group has no item */
    kvf_lane *lanes;
    uint32_t lane_count;
};

/** The steps of a group that flow in one request, and where this rank has them. */
typedef struct kvf_stream_group {
    uint64_t first, steps; /* common steps of the sequence: before those that flow, and that flow */
    uint64_t position;     /* of the first step of ids[0] */
    uint32_t *ids;         /* logical blocks from there on; undefined for those without any of these steps */
} kvf_stream_group;

struct kvf_stream {
    const kvf_stream_map *map;
    kvf_stream_group *groups;
    uint64_t *begins; /* the bytes before each lane; the last entry is their sum */
    uint32_t *ids;    /* of all groups */
    uint64_t id_count;
};

/** Where the cells of a lane are, from the item's first unit on. */
static inline const kvf_placement *kvf_lane_placement(const kvf_stream_map *map, const kvf_lane *lane) {
    const kvf_stream_item *item = &map->selection->items[lane->item];
    return kvf_shard_placement(map->shard, item->group, lane->group_layer, item->part);
}

/** The lane in which a byte of the stream lies; the number of lanes if the byte is the stream's end. */
uint32_t kvf_stream_lane(const kvf_stream *stream, uint64_t byte);

#endif
