#include "shard/axes.h"

static void nest(kvf_axes *to, char letter, uint64_t length, uint64_t stride) {
    if (length < 2)
        return;
    uint32_t i = to->nested_count++;
    for (; i > 0 && to->nested[i - 1].stride < stride; i--)
        to->nested[i] = to->nested[i - 1];
    to->nested[i] = (kvf_region_axis){letter, length, stride};
}

/* Adds an axis whose first two steps are at a and b. */
static void add_distance(kvf_axes *to, char letter, uint64_t length, const kvf_placement *a,
                         const kvf_placement *b) {
    if (a->region != b->region)
        to->apart[to->apart_count++] = letter;
    else
        nest(to, letter, length, b->offset - a->offset);
}

bool kvf_placements_even(const kvf_placement *first, const kvf_placement *second, const kvf_placement *here,
                         uint64_t n) {
    return here->region == (uint32_t)(first->region + n * (second->region - first->region)) &&
           here->offset == first->offset + n * (second->offset - first->offset) &&
           here->block_stride == first->block_stride && here->row_stride == first->row_stride &&
           here->unit_stride == first->unit_stride && here->pieces == first->pieces &&
           here->piece_stride == first->piece_stride;
}

/* The steps of an axis go upwards: its first step is where the array begins. */
static bool goes_down(const kvf_placement *a, const kvf_placement *b) {
    return a->region == b->region && a->offset > b->offset;
}

static bool are_even(const kvf_shard *shard, uint32_t group, kvf_range layers, kvf_range parts) {
    const kvf_placement *first = kvf_shard_placement(shard, group, layers.begin, parts.begin);
    if (layers.end - layers.begin > 1 &&
        goes_down(first, kvf_shard_placement(shard, group, layers.begin + 1, parts.begin)))
        return false;
    if (parts.end - parts.begin > 1 &&
        goes_down(first, kvf_shard_placement(shard, group, layers.begin, parts.begin + 1)))
        return false;
    for (uint32_t p = parts.begin; p < parts.end; p++)
        for (uint32_t layer = layers.begin + 1; layer < layers.end; layer++)
            if (!kvf_placements_even(kvf_shard_placement(shard, group, layers.begin, p),
                                     kvf_shard_placement(shard, group, layers.begin + 1, p),
                                     kvf_shard_placement(shard, group, layer, p), layer - layers.begin))
                return false;
    return true;
}

/* Adds the elements of a cell, counted in bytes if an element is smaller than a byte. */
static void nest_cell(kvf_axes *to, const kvf_part_desc *part, const kvf_placement *placement) {
    uint64_t piece = kvf_piece_bytes(part, placement);
    uint64_t element = kvf_part_cell_bytes(part) / part->cell_elements;
    element = element ? element : 1;
    if (placement->pieces > 1)
        nest(to, 'D', placement->pieces, placement->piece_stride);
    nest(to, 'D', piece / element, element);
}

bool kvf_axes_read(const kvf_shard *shard, uint32_t group, kvf_range layers, kvf_range parts, kvf_axes *out) {
    const kvf_part_desc *part = &kvf_model_group(shard->model, group)->parts[parts.begin];
    const kvf_held_group *held = &shard->groups[group];
    kvf_range units = held->parts[parts.begin].units;
    *out = (kvf_axes){0};
    if (!are_even(shard, group, layers, parts))
        return false;
    const kvf_placement *first = kvf_shard_placement(shard, group, layers.begin, parts.begin);
    if (layers.end - layers.begin > 1)
        add_distance(out, 'L', layers.end - layers.begin, first,
                     kvf_shard_placement(shard, group, layers.begin + 1, parts.begin));
    if (parts.end - parts.begin > 1)
        add_distance(out, 'P', parts.end - parts.begin, first,
                     kvf_shard_placement(shard, group, layers.begin, parts.begin + 1));
    nest(out, 'B', held->block_count * held->kernel_blocks_per_block, first->block_stride);
    nest(out, 'H', units.end - units.begin, first->unit_stride);
    nest(out, 'N', kvf_kernel_rows(held, part), first->row_stride);
    nest_cell(out, part, first);
    return true;
}

bool kvf_same_cells(const kvf_part_desc *a, const kvf_part_desc *b) {
    return a->dtype == b->dtype && a->units == b->units && a->cell_elements == b->cell_elements &&
           a->rows_per_step == b->rows_per_step && a->tp_rule == b->tp_rule;
}
