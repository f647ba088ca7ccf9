/*
 * The models, engines and bytes of the fault harness. Every byte follows from a seed and the coordinates of its cell,
 * so that any rank can fill its part of a request and any other rank can check its own.
 */
#ifndef KVF_FAULTS_CONTENT_H
#define KVF_FAULTS_CONTENT_H

#include <kvferry/agent.h>

#define CONTENT_ENGINES 3u
#define CONTENT_MODELS 4u
#define CONTENT_GROUPS 4u
#define CONTENT_BLOCKS 24u /* at most, of one request in one group */
#define CONTENT_TOKENS 160u
#define CONTENT_REGIONS 32u

/**
 * A hybrid of full attention, a sliding window and a state; a latent, of which every rank has a copy; a sliding window
 * and a state beside entries for 4 tokens, and for 8; or a latent for 4 tokens.
 */
kvf_model *content_model(uint32_t number);

/** Engines of different shapes: 2 ranks by heads; 1 rank; 2 ranks by layers. NULL on failure. */
kvf_engine *content_engine(const kvf_model *model, uint32_t number);
const char *content_engine_name(uint32_t number);

/** How many steps a block of a group holds. */
uint32_t content_block_steps(const kvf_shard *shard, uint32_t group);

/** The blocks of one group of a request. */
typedef struct content_table {
    uint32_t ids[CONTENT_BLOCKS];
    uint32_t count, first_block;
    uint32_t begin, end; /* the steps that a reader wants, or a holder has */
} content_table;

/**
 * Moves bytes between device memory that the host cannot reach and a copy of it, at `seen`. Transfers write other
 * requests' blocks into the same region meanwhile, so only what was filled is put back.
 */
typedef struct content_mirror {
    /** Begins to bring a range of the copy to the device. It must not change until settle(). */
    void (*put)(const kvf_memory *region, uint64_t offset, const unsigned char *seen, uint64_t bytes);
    /** Begins to bring the whole region to the copy. */
    void (*get)(const kvf_memory *region, unsigned char *seen);
    /** Waits until all these bytes have moved. */
    void (*settle)(void);
} content_mirror;

/** The memory of one rank. */
typedef struct content_rank {
    const kvf_shard *shard;
    kvf_memory regions[CONTENT_REGIONS];
    unsigned char *seen[CONTENT_REGIONS]; /**< where this process sees device memory; NULL: at its address */
    const content_mirror *mirror;         /**< `seen` has copies; NULL: it has the memory itself */
} content_rank;

/** Some cells of a request. */
typedef struct content_part {
    uint32_t begin, end; /* steps */
    kvf_range layers;
} content_part;

/** All cells that the blocks of a table have room for. */
content_part content_all(const content_rank *rank, uint32_t group, const content_table *table);
/** The cells of a table that a request moves: those inside the window. */
content_part content_wanted(const content_rank *rank, uint32_t group, const content_table *table);

/** Gives the cells of a part the bytes of a seed. */
void content_fill(const content_rank *rank, uint32_t group, const content_table *table, content_part part,
                  uint64_t seed);

/** A cell that has wrong bytes, and the first of them. */
typedef struct content_cell {
    uint32_t group, layer, part, step, row, unit; /**< layer: of the model */
    uint32_t block, byte;
    bool wanted;
    uint64_t word;  /**< what lies there, at `byte` */
    uint32_t bytes; /**< of the word */
} content_cell;

/**
 * How many cells of the blocks have wrong bytes. Cells that the request moves must have those of `seed`, the others
 * those of `before`. `first` receives the first wrong cell.
 */
uint32_t content_wrong(const content_rank *rank, uint32_t group, const content_table *table, uint64_t seed,
                       uint64_t before, content_cell *first);

#define CONTENT_WORDS 160u

/** Says which cell that is, and what is wrong with it. */
void content_describe(const content_cell *cell, char out[CONTENT_WORDS]);

/** Whether the bytes of a wrong cell are those of a seed, at any step, which `step` receives. Words of a few bytes may be
 * those of any seed, so nothing is said of them. */
bool content_is_of(const content_cell *cell, uint64_t seed, uint32_t *step);

#endif
