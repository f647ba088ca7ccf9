/*
 * The packed stream of a shard, made cell by cell in the order that src/stage/stream.h defines, from kvf_shard_locate()
 * alone; and a rank's memory to make it from.
 */
#ifndef KVF_TEST_PACKED_H
#define KVF_TEST_PACKED_H

#include "shapes.h"
#include "stage/stream.h"

/** One rank's memory, filled with a pattern. */
typedef struct packed_rank {
    const kvf_shard *shard;
    unsigned char **regions;
} packed_rank;

static inline packed_rank packed_open(const kvf_shard *shard, uint32_t seed) {
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    packed_rank rank = {shard, calloc(desc->region_count + 1, sizeof(unsigned char *))};
    uint32_t state = seed * 2654435761u + 1;
    for (uint32_t i = 0; i < desc->region_count; i++) {
        rank.regions[i] = malloc(desc->region_bytes[i] + 1);
        for (uint64_t at = 0; at < desc->region_bytes[i]; at++) {
            state = state * 1664525u + 1013904223u;
            rank.regions[i][at] = (unsigned char)(state >> 24);
        }
    }
    return rank;
}

static inline packed_rank packed_copy(const packed_rank *of) {
    packed_rank copy = packed_open(of->shard, 1);
    const kvf_shard_desc *desc = kvf_shard_get(of->shard);
    for (uint32_t i = 0; i < desc->region_count; i++)
        memcpy(copy.regions[i], of->regions[i], desc->region_bytes[i]);
    return copy;
}

static inline void packed_close(const packed_rank *rank) {
    for (uint32_t i = 0; i < kvf_shard_get(rank->shard)->region_count; i++)
        free(rank->regions[i]);
    free(rank->regions);
}

static inline void assert_same_memory(const packed_rank *a, const packed_rank *b) {
    const kvf_shard_desc *desc = kvf_shard_get(a->shard);
    for (uint32_t i = 0; i < desc->region_count; i++)
        assert_memory_equal(a->regions[i], b->regions[i], desc->region_bytes[i]);
}

static inline bool packed_keeps(kvf_token_share share, uint64_t step) {
    const uint32_t count = share.count ? share.count : 1, width = share.width ? share.width : 1;
    return step / width % count == share.index;
}

/** Where the walk is, and what it does with each cell. */
typedef struct packed_walk {
    const packed_rank *rank;
    const kvf_stream_item *items;
    uint32_t count;
    const kvf_group_steps *groups;
    unsigned char *bytes; /* of the stream: copied to the memory if `write` is set, otherwise from it */
    bool write;
    uint64_t at;     /* bytes so far */
    uint64_t pieces; /* runs that are contiguous in both and cross no logical block or gap of steps */
    uint32_t region;
    uint64_t end;             /* of the last piece, in that region */
    uint64_t block, position; /* of the last piece */
    uint32_t last_layer, last_item;
} packed_walk;

static inline void packed_piece(packed_walk *w, const kvf_cell_location *cell, uint32_t piece) {
    const uint64_t bytes = cell->bytes / cell->pieces, offset = cell->offset + piece * cell->piece_stride;
    unsigned char *memory = w->rank->regions[cell->region] + offset;
    if (w->bytes && w->write)
        memcpy(memory, w->bytes + w->at, bytes);
    else if (w->bytes)
        memcpy(w->bytes + w->at, memory, bytes);
    w->pieces += w->pieces == 0 || w->region != cell->region || w->end != offset;
    w->region = cell->region;
    w->end = offset + bytes;
    w->at += bytes;
}

/* Handles all cells of one step of an item in a layer. */
static inline void packed_step(packed_walk *w, const kvf_stream_item *item, uint32_t layer, uint64_t step) {
    const uint32_t per_block = steps_per_block(w->rank->shard, item->group);
    const kvf_token_share share = step_share(w->rank->shard, item->group);
    const kvf_block_table *table = &w->groups[item->group].table;
    const kvf_part_desc *part =
        &kvf_model_group(kvf_shard_model(w->rank->shard), item->group)->parts[item->part];
    uint64_t position = 0; /* counted step by step */
    for (uint64_t before = 0; before < step; before++)
        position += packed_keeps(share, before);
    const uint64_t block = position / per_block;
    if (block != w->block || (position != w->position && position != w->position + 1))
        w->end = UINT64_MAX; /* another run begins */
    w->block = block;
    w->position = position;
    for (uint32_t row = 0; row < part->rows_per_step; row++)
        for (uint32_t unit = item->units.begin; unit < item->units.end; unit++) {
            kvf_cell_location cell = {.struct_size = sizeof cell};
            assert_ok(kvf_shard_locate(
                w->rank->shard, item->group, layer, item->part, table->ids[block - table->first_block],
                (uint32_t)(position % per_block) * part->rows_per_step + row, unit, &cell));
            for (uint32_t piece = 0; piece < cell.pieces; piece++)
                packed_piece(w, &cell, piece);
        }
}

/** Goes through the whole stream. Searches all items anew for every layer, group, part and unit. */
static inline void packed_walk_all(packed_walk *w) {
    const kvf_model *model = kvf_shard_model(w->rank->shard);
    for (uint32_t number = 0; number < kvf_model_layer_count(model); number++)
        for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
            const kvf_group_desc *group = kvf_model_group(model, g);
            uint64_t first = kvf_group_first_needed(group, w->groups[g].end);
            first = first > w->groups[g].begin ? first : w->groups[g].begin;
            for (uint32_t p = 0; p < group->part_count; p++)
                for (uint32_t unit = 0; unit < group->parts[p].units; unit++)
                    for (uint32_t i = 0; i < w->count; i++) {
                        const kvf_stream_item *item = &w->items[i];
                        for (uint32_t layer = item->layers.begin; layer < item->layers.end; layer++) {
                            if (item->group != g || item->part != p || item->units.begin != unit ||
                                group->layers[layer] != number)
                                continue;
                            w->end = UINT64_MAX; /* each lane begins a new run */
                            for (uint64_t step = first; step < w->groups[g].end; step++)
                                if (packed_keeps(item->tokens[0], step) &&
                                    packed_keeps(item->tokens[1], step))
                                    packed_step(w, item, layer, step);
                        }
                    }
        }
}

#endif
