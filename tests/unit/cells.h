/*
 * Ranks with real memory, and the cells in it by their coordinates: an oracle that knows nothing of plans. It
 * finds every cell with kvf_shard_locate() and counts positions of shared tokens one by one.
 */
#ifndef KVF_TEST_CELLS_H
#define KVF_TEST_CELLS_H

#include "shapes.h"

#include <kvferry/transport.h>

#define CELLS_GROUPS_MAX 8u

/** One sequence in the caches of one engine: its blocks are scattered, and no two groups share one's number.
 */
typedef struct cell_sequence {
    uint32_t group_count;
    uint64_t steps[CELLS_GROUPS_MAX]; /**< tokens; 1 in state groups */
    kvf_block_table tables[CELLS_GROUPS_MAX];
    uint32_t *ids;
} cell_sequence;

/** For all ranks of the engine that `shard` belongs to. */
void sequence_open(cell_sequence *sequence, const kvf_shard *shard, uint64_t tokens, uint32_t seed);
void sequence_close(cell_sequence *sequence);

/** One rank's regions. */
typedef struct cell_rank {
    const kvf_shard *shard;
    const cell_sequence *sequence;
    kvf_memory *regions;
    uint32_t region_count;
    bool owned; /**< the memory is from malloc() */
} cell_rank;

/** Gives memory for a region; it stays the giver's. */
typedef void *(*cell_allocate)(void *context, uint64_t bytes);

/** Takes memory for all regions, from malloc() where `allocate` is NULL, and scribbles over it. */
void rank_open(cell_rank *rank, const kvf_shard *shard, const cell_sequence *sequence, cell_allocate allocate,
               void *context);
void rank_close(cell_rank *rank);

/** A copy of the memory alone. */
void rank_copy(cell_rank *copy, const cell_rank *rank);

/** Other bytes everywhere. */
void rank_scribble(const cell_rank *rank, uint32_t seed);

/** Every byte of two memories must be the same. */
void assert_same_memory(const cell_rank *got, const cell_rank *wanted);

/** One cell of a sequence. */
typedef struct cell_place {
    uint32_t group, layer, part; /**< layer: index into the group's */
    uint32_t row;                /**< of the step */
    uint32_t unit;
    uint64_t step;
} cell_place;

typedef void (*cell_visit)(void *context, const cell_rank *rank, cell_place at, kvf_cell_location where);

/** Visits every cell of the sequence that the rank keeps in the model layers [layers.begin, layers.end). */
void each_cell(const cell_rank *rank, kvf_range layers, cell_visit visit, void *context);

/** What byte `i` of a cell is, everywhere, after rank_fill() with this seed. */
unsigned char cell_byte(uint32_t seed, cell_place at, uint64_t i);

/** Writes the sequence's cells in the model layers [layers.begin, layers.end), and no other byte. */
void rank_fill(const cell_rank *rank, kvf_range layers, uint32_t seed);

static inline kvf_range all_layers(const kvf_shard *shard) {
    return (kvf_range){0, kvf_model_layer_count(kvf_shard_model(shard))};
}

/** Sets the whole sequence, between two engines. */
void set_sequences(kvf_request *request, const cell_sequence *local, const cell_sequence *remote);

#endif
