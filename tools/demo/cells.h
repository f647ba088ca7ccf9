/*
 * Walking the cells of a request in a rank's memory, using only their coordinates and the placement formula. This
 * code uses no plans, rules or runs, so that it can check them.
 */
#ifndef KVFERRY_DEMO_CELLS_H
#define KVFERRY_DEMO_CELLS_H

#include <kvferry/request.h>

typedef struct logical_cell {
    uint8_t *address; /* all of it; if it is kept in pieces, of a copy that is put back after the visit */
    uint64_t bytes;
    kvf_dtype dtype; /* of its elements */
    kvf_dtype sent;  /* of the elements that were sent; equals dtype unless they are converted */
    uint32_t request;
    uint32_t group;
    uint32_t layer; /* of the model */
    uint32_t part;
    uint64_t row; /* step * rows_per_step + row of the step */
    uint32_t unit;
    uint32_t key; /* see pattern.h */
} logical_cell;

/** Called for each cell; false ends the walk. */
typedef bool (*cell_visitor)(void *context, const logical_cell *at);

/** One rank's memory. */
typedef struct cell_memory {
    const kvf_shard *shard;
    uint8_t *const *regions; /* where each region begins */
    uint64_t seed;
    const kvf_model *sent; /* as whose elements its cells were sent; NULL: as its own */
    uint8_t *aside;        /* room for one cell, see cells_room() */
} cell_memory;

/** How many steps a logical block of a group holds. */
uint32_t steps_in_block(const kvf_shard *shard, uint32_t group);

/** Bytes of the largest cell of a shard, for cell_memory.aside. */
size_t cells_room(const kvf_shard *shard);

/** Which cells of a request: those that a prefill rank has, or those that a decode rank wants. */
typedef enum cell_side {
    CELLS_OF_PREFILL,
    CELLS_OF_DECODE,
} cell_side;

/**
 * Visits the cells of one request, ordered by group, layer, part, row and unit.
 *
 * @param groups  one for each group of the model
 * @return false when the visitor ended the walk
 */
bool cells_visit(const cell_memory *memory, cell_side side, uint32_t request, const kvf_group_request *groups,
                 cell_visitor visit, void *context);

/** Where a rank keeps a byte of the cell of a row and unit, or NULL when it does not hold the cell. `layer` is an index
 * in the group. */
uint8_t *cell_byte(const cell_memory *memory, const kvf_block_table *table, uint32_t group, uint32_t layer,
                   uint32_t part, uint64_t row, uint32_t unit, uint64_t byte);

/** Whether a cell of `bytes` bytes that begins at `first` has the byte at `offset`. */
bool cell_has(const kvf_placement *placement, uint64_t bytes, uint64_t first, uint64_t offset);

#endif
