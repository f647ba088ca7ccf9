/*
 * How many bytes and pieces a stream has, without walking it.
 *
 * Pieces are ordered by row, unit and piece. From one piece to the next, one of these indices goes up by one and those
 * inside it restart, so which index it is decides whether the two pieces touch. A placement has at most four kinds of
 * such edges; this code counts each kind.
 */
#include "model/model.h"
#include "stage/inside.h"

/* How many steps of a group directly follow the step before, in one kernel block, and across two of a logical block. */
typedef struct step_edges {
    uint64_t steps, in_kernel_block, between_kernel_blocks;
} step_edges;

static step_edges count_steps(const kvf_stream_map *map, uint32_t group, kvf_step_span span) {
    const kvf_kept *kept = &map->kept[group];
    const kvf_held_group *held = &map->shard->groups[group];
    step_edges edges = {.steps = 0};
    if (kept->steps == 0)
        return edges;
    const uint64_t end = span.end;
    const uint64_t begin = kvf_first_moved(kvf_model_group(map->shard->model, group), span.begin, end);
    const uint64_t first = kvf_kept_number(kept, begin);
    edges.steps = kvf_kept_number(kept, end) - first;
    const uint64_t kernel_edges = kvf_kept_edges(kept, first, edges.steps, held->kernel_steps);
    edges.in_kernel_block = kvf_kept_edges(kept, first, edges.steps, 1) - kernel_edges;
    edges.between_kernel_blocks =
        kernel_edges - kvf_kept_edges(kept, first, edges.steps, held->steps_per_block);
    return edges;
}

static uint64_t count_pieces(const kvf_stream_map *map, const kvf_lane *lane, const step_edges *edges) {
    const kvf_stream_item *item = &map->selection->items[lane->item];
    const kvf_item_shape *shape = &map->shapes[lane->item];
    const kvf_placement *placement = kvf_lane_placement(map, lane);
    const kvf_part_desc *part = &kvf_model_group(map->shard->model, item->group)->parts[item->part];
    const uint64_t piece = kvf_piece_bytes(part, placement), pieces = placement->pieces;
    const uint64_t block_rows = kvf_kernel_rows(&map->shard->groups[item->group], part);
    /* The extent of a cell, a row and a kernel block: from the first piece's first byte to the last piece's last. */
    const uint64_t cell = (pieces - 1) * placement->piece_stride + piece;
    const uint64_t row = (shape->units - 1) * placement->unit_stride + cell;
    const uint64_t block = (block_rows - 1) * placement->row_stride + row;
    const uint64_t rows = edges->steps * shape->rows_per_step;
    uint64_t count = rows * shape->units * pieces;
    if (placement->piece_stride == piece)
        count -= rows * shape->units * (pieces - 1);
    if (placement->unit_stride == cell)
        count -= rows * (shape->units - 1);
    if (placement->row_stride == row)
        count -= edges->steps * (shape->rows_per_step - 1) + edges->in_kernel_block;
    if (placement->block_stride == block)
        count -= edges->between_kernel_blocks;
    return count;
}

kvf_stream_size kvf_stream_map_size(const kvf_stream_map *map, const kvf_step_span *spans) {
    kvf_stream_size size = {0, 0};
    step_edges edges = {.steps = 0};
    for (uint32_t i = 0; i < map->selection->item_count; i++) { /* ascending by group */
        const kvf_stream_item *item = &map->selection->items[i];
        const kvf_item_shape *shape = &map->shapes[i];
        if (i == 0 || item->group != item[-1].group)
            edges = count_steps(map, item->group, spans[item->group]);
        size.bytes +=
            edges.steps * shape->step_atoms * shape->stream_atom * (item->layers.end - item->layers.begin);
        for (uint32_t layer = item->layers.begin; layer < item->layers.end; layer++)
            size.pieces += count_pieces(map, &(kvf_lane){.item = i, .group_layer = layer}, &edges);
    }
    return size;
}
