/*
 * Ranks with real memory, whose cells are found by their coordinates: an oracle that knows nothing of plans. It finds
 * every cell with kvf_shard_locate() and counts the positions of shared tokens one by one.
 */
#ifndef KVF_TEST_CELLS_H
#define KVF_TEST_CELLS_H

#include "shapes.h"

#include <kvferry/transport.h>

#define CELLS_GROUPS_MAX 8u

/** One sequence in the caches of one engine: its blocks are scattered, and no two groups have a block with the same
 * number.
 */
typedef struct cell_sequence {
    uint32_t group_count;
    uint64_t steps[CELLS_GROUPS_MAX]; /**< tokens; 1 in state groups */
    kvf_block_table tables[CELLS_GROUPS_MAX];
    uint32_t *ids;
} cell_sequence;

/** Makes the tables for all ranks of the engine that `shard` belongs to. */
void sequence_open(cell_sequence *sequence, const kvf_shard *shard, uint64_t tokens, uint32_t seed);
void sequence_close(cell_sequence *sequence);

/** The regions of one rank. */
typedef struct cell_rank {
    const kvf_shard *shard;
    const cell_sequence *sequence;
    kvf_memory *regions;
    uint32_t region_count;
    bool owned; /**< the memory came from malloc() */
} cell_rank;

/** Gives memory for a region; the memory still belongs to the allocator. */
typedef void *(*cell_allocate)(void *context, uint64_t bytes);

/** Takes memory for all regions, from malloc() if `allocate` is NULL, and scribbles over it. */
void rank_open(cell_rank *rank, const kvf_shard *shard, const cell_sequence *sequence, cell_allocate allocate,
               void *context);
void rank_close(cell_rank *rank);

/** Copies the rank's memory, and shares everything else. */
void rank_copy(cell_rank *copy, const cell_rank *rank);

/** Fills the whole memory with other bytes. */
void rank_scribble(const cell_rank *rank, uint32_t seed);

/** Asserts that two memories have the same bytes. */
void assert_same_memory(const cell_rank *got, const cell_rank *wanted);

/** One cell of a sequence. */
typedef struct cell_place {
    uint32_t group, layer, part; /**< layer: an index into the group's layers */
    uint32_t row;                /**< within the step */
    uint32_t unit;
    uint64_t step;
} cell_place;

typedef void (*cell_visit)(void *context, const cell_rank *rank, cell_place at, kvf_cell_location where);

/** Visits every cell of the sequence that the rank keeps in the model layers [layers.begin, layers.end). */
void each_cell(const cell_rank *rank, kvf_range layers, cell_visit visit, void *context);

/** The value of byte `i` of a cell after rank_fill() with this seed, the same on every rank. */
unsigned char cell_byte(uint32_t seed, cell_place at, uint64_t i);

/** Writes the sequence's cells in the model layers [layers.begin, layers.end), and no other byte. */
void rank_fill(const cell_rank *rank, kvf_range layers, uint32_t seed);

static inline kvf_range all_layers(const kvf_shard *shard) {
    return (kvf_range){0, kvf_model_layer_count(kvf_shard_model(shard))};
}

/** Makes a request for the whole sequence between two engines. */
void set_sequences(kvf_request *request, const cell_sequence *local, const cell_sequence *remote);

#endif
