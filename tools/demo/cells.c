#include "cells.h"

#include <string.h>

#include "pattern.h"

/* Which steps of a group a rank keeps, and how many are in a block. */
typedef struct held_steps {
    kvf_token_share share;
    uint32_t in_block, in_kernel_block, kernel_blocks;
} held_steps;

uint32_t steps_in_block(const kvf_shard *shard, uint32_t group) {
    return kvf_shard_get(shard)->groups[group].tokens_per_block /
           kvf_model_group(kvf_shard_model(shard), group)->tokens_per_step;
}

static held_steps steps_held(const kvf_shard *shard, uint32_t group) {
    const kvf_group_shard_desc *held = &kvf_shard_get(shard)->groups[group];
    const uint32_t in_block = steps_in_block(shard, group);
    held_steps out = {held->tokens, in_block, in_block / held->kernel_blocks_per_block,
                      held->kernel_blocks_per_block};
    if (out.share.count > 1)
        out.share.width /= kvf_model_group(kvf_shard_model(shard), group)->tokens_per_step;
    return out;
}

static bool is_kept(const held_steps *held, uint64_t step) {
    return step / held->share.width % held->share.count == held->share.index;
}

/* The place of a step among those that the rank keeps. */
static uint64_t position_of(const held_steps *held, uint64_t step) {
    uint64_t period = (uint64_t)held->share.count * held->share.width;
    return step / period * held->share.width + step % held->share.width;
}

/* The offset of the first row of a step. */
static uint64_t step_offset(const held_steps *held, const kvf_placement *placement,
                            const kvf_block_table *table, uint64_t step, uint32_t rows_per_step) {
    uint64_t position = position_of(held, step);
    uint32_t logical = table->ids[position / held->in_block - table->first_block];
    uint64_t in_block = position % held->in_block;
    uint64_t kernel = (uint64_t)logical * held->kernel_blocks + in_block / held->in_kernel_block;
    return placement->offset + kernel * placement->block_stride +
           in_block % held->in_kernel_block * rows_per_step * placement->row_stride;
}

static bool has_block(const held_steps *held, const kvf_block_table *table, uint64_t step) {
    uint64_t block = position_of(held, step) / held->in_block;
    return block >= table->first_block && block - table->first_block < table->count &&
           table->ids[block - table->first_block] != KVF_NO_BLOCK;
}

/* ---- pieces ---------------------------------------------------------------------------------- */

/* Where the byte of a cell lies behind the cell's first. */
static uint64_t byte_offset(const kvf_placement *placement, uint64_t bytes, uint64_t byte) {
    const uint64_t piece = bytes / placement->pieces;
    return placement->pieces > 1 ? byte / piece * placement->piece_stride + byte % piece : byte;
}

static void take_pieces(const kvf_placement *placement, uint64_t bytes, const uint8_t *from, uint8_t *cell) {
    const uint64_t piece = bytes / placement->pieces;
    for (uint32_t i = 0; i < placement->pieces; i++)
        memcpy(cell + i * piece, from + i * placement->piece_stride, piece);
}

static void put_pieces(const kvf_placement *placement, uint64_t bytes, const uint8_t *cell, uint8_t *to) {
    const uint64_t piece = bytes / placement->pieces;
    for (uint32_t i = 0; i < placement->pieces; i++)
        memcpy(to + i * placement->piece_stride, cell + i * piece, piece);
}

size_t cells_room(const kvf_shard *shard) {
    const kvf_model *model = kvf_shard_model(shard);
    uint64_t most = 0;
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        for (uint32_t p = 0; p < group->part_count; p++)
            if (most < kvf_part_cell_bytes(&group->parts[p]))
                most = kvf_part_cell_bytes(&group->parts[p]);
    }
    return most;
}

bool cell_has(const kvf_placement *placement, uint64_t bytes, uint64_t first, uint64_t offset) {
    const uint64_t after = offset - first; /* an offset before the cell gives a huge number */
    if (placement->pieces == 1)
        return after < bytes;
    return after / placement->piece_stride < placement->pieces &&
           after % placement->piece_stride < bytes / placement->pieces;
}

/* ---- walking --------------------------------------------------------------------------------- */

/* A walk inside one layer and part. */
typedef struct part_walk {
    const cell_memory *memory;
    held_steps held;
    const kvf_placement *placement;
    const kvf_block_table *table;
    uint64_t begin, end; /* steps */
    uint32_t rows_per_step;
    kvf_range units;
    pattern_stream stream;
} part_walk;

static bool visit_cell(const part_walk *walk, logical_cell *at, uint8_t *address, cell_visitor visit,
                       void *context) {
    if (walk->placement->pieces == 1) {
        at->address = address;
        return visit(context, at);
    }
    at->address = walk->memory->aside;
    take_pieces(walk->placement, at->bytes, address, at->address);
    const bool more = visit(context, at);
    put_pieces(walk->placement, at->bytes, at->address, address);
    return more;
}

static bool visit_part(const part_walk *walk, logical_cell *at, cell_visitor visit, void *context) {
    uint8_t *region = walk->memory->regions[walk->placement->region];
    for (uint64_t step = walk->begin; step < walk->end; step++) {
        if (!is_kept(&walk->held, step))
            continue;
        uint8_t *first =
            region + step_offset(&walk->held, walk->placement, walk->table, step, walk->rows_per_step);
        for (uint32_t row = 0; row < walk->rows_per_step; row++) {
            uint8_t *address = first + row * walk->placement->row_stride;
            at->row = step * walk->rows_per_step + row;
            for (at->unit = walk->units.begin; at->unit < walk->units.end; at->unit++) {
                at->key = pattern_key(walk->stream, at->row, at->unit);
                if (!visit_cell(walk, at, address, visit, context))
                    return false;
                address += walk->placement->unit_stride;
            }
        }
    }
    return true;
}

bool cells_visit(const cell_memory *memory, cell_side side, uint32_t request, const kvf_group_request *groups,
                 cell_visitor visit, void *context) {
    const kvf_model *model = kvf_shard_model(memory->shard);
    const kvf_shard_desc *shard = kvf_shard_get(memory->shard);
    logical_cell at = {.request = request};
    for (at.group = 0; at.group < kvf_model_group_count(model); at.group++) {
        const kvf_group_desc *group = kvf_model_group(model, at.group);
        const kvf_group_request *wanted = &groups[at.group];
        const kvf_group_shard_desc *held = &shard->groups[at.group];
        kvf_range layers = kvf_shard_group_layers(memory->shard, at.group);
        uint64_t begin = kvf_group_first_needed(group, wanted->end);
        if (side == CELLS_OF_DECODE && wanted->begin > begin)
            begin = wanted->begin;
        for (uint32_t layer = layers.begin; layer < layers.end; layer++) {
            at.layer = group->layers[layer];
            for (at.part = 0; at.part < group->part_count; at.part++) {
                const kvf_part_desc *part = &group->parts[at.part];
                at.bytes = kvf_part_cell_bytes(part);
                at.dtype = at.sent = part->dtype;
                if (memory->sent)
                    at.sent = kvf_model_group(memory->sent, at.group)->parts[at.part].dtype;
                part_walk walk = {
                    .memory = memory,
                    .held = steps_held(memory->shard, at.group),
                    .placement = kvf_shard_placement(memory->shard, at.group, layer, at.part),
                    .table = side == CELLS_OF_DECODE ? &wanted->local : &wanted->remote,
                    .begin = begin,
                    .end = wanted->end,
                    .rows_per_step = part->rows_per_step,
                    .units = held->parts[at.part].units,
                    .stream = pattern_stream_of(memory->seed, request, at.group, at.layer, at.part),
                };
                if (!visit_part(&walk, &at, visit, context))
                    return false;
            }
        }
    }
    return true;
}

uint8_t *cell_byte(const cell_memory *memory, const kvf_block_table *table, uint32_t group, uint32_t layer,
                   uint32_t part, uint64_t row, uint32_t unit, uint64_t byte) {
    const kvf_group_shard_desc *held = &kvf_shard_get(memory->shard)->groups[group];
    const held_steps steps = steps_held(memory->shard, group);
    const kvf_placement *placement = kvf_shard_placement(memory->shard, group, layer, part);
    const kvf_part_desc *desc = &kvf_model_group(kvf_shard_model(memory->shard), group)->parts[part];
    uint32_t rows_per_step = desc->rows_per_step;
    uint64_t step = row / rows_per_step;
    kvf_range units = held->parts[part].units;
    if (!placement || unit < units.begin || unit >= units.end || !is_kept(&steps, step) ||
        !has_block(&steps, table, step))
        return NULL;
    return memory->regions[placement->region] + step_offset(&steps, placement, table, step, rows_per_step) +
           row % rows_per_step * placement->row_stride + (unit - units.begin) * placement->unit_stride +
           byte_offset(placement, kvf_part_cell_bytes(desc), byte);
}
