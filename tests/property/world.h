/*
 * The world of one case: which rank holds what, where every cell lies, which blocks a request has.
 *
 * All of it is derived from the recipe by the rules of the public headers, and nothing from what the library computes.
 * The library has formulas with strides; the world has a list with the address of each cell, made by counting through
 * the axes of a layout, innermost first.
 */
#ifndef KVF_PROPERTY_WORLD_H
#define KVF_PROPERTY_WORLD_H

#include <stddef.h>

#include "recipe.h"

#define NO_ID UINT32_MAX

enum { MAX_REGIONS = MAX_GROUPS * MAX_LAYERS * MAX_PARTS };

typedef struct place {
    uint32_t region, offset;
} place;

typedef struct strides {
    uint32_t region, offset, block, row, unit, piece;
} strides;

typedef struct rank_part {
    uint32_t units_begin, units_end;
    uint32_t replica, replica_count;
    uint32_t pieces;                /* of a cell */
    strides placements[MAX_LAYERS]; /* of hand-made shards, by held layer */
    place *cells;                   /* [held layer][kernel block][row][unit][piece] */
} rank_part;

typedef struct rank_group {
    uint32_t layers_begin, layers_end;              /* indices into the group's layers */
    uint32_t share_index, share_count, share_width; /* in steps */
    uint32_t block_count;
    rank_part parts[MAX_PARTS];
} rank_group;

typedef struct rank_world {
    uint32_t layers_begin, layers_end;
    uint32_t tp_rank, pp_rank;
    uint32_t region_count;
    uint32_t region_bytes[MAX_REGIONS];
    bool may_be_refused; /* odd placements, which may be refused although no byte is shared */
    rank_group groups[MAX_GROUPS];
} rank_world;

typedef struct engine_world {
    const char *illegal; /* why the library must refuse this engine; NULL: it must accept it */
    uint32_t illegal_rank;
    uint32_t rank_count;
    uint32_t tokens[MAX_GROUPS], kernel_blocks[MAX_GROUPS]; /* steps of a logical block */
    uint32_t block_count[MAX_GROUPS];
    uint32_t page_bytes[MAX_GROUPS];
    uint32_t page_content[MAX_GROUPS]; /* the largest page of any rank */
    char orders[MAX_GROUPS][ORDER_TEXT];
    rank_world ranks[MAX_RANKS];
} engine_world;

typedef struct table_world {
    uint32_t first_block;
    uint32_t count;
    uint32_t needed_begin, needed_end; /* blocks of the sequence that hold wanted steps, on any rank */
    uint32_t *ids;
} table_world;

typedef struct group_tables {
    uint32_t begin, end;
    uint32_t first; /* the first step after clipping */
    table_world side[SIDES];
} group_tables;

/* The model of one side. Groups and parts keep the recipe's numbers; the library's numbers are indices into the
 * orders. */
typedef struct model_world {
    group_recipe groups[MAX_GROUPS];
    uint32_t layer_count, group_count;
    uint32_t layers[MAX_GROUPS][MAX_LAYERS], layer_counts[MAX_GROUPS]; /* 0: it lacks the group */
    uint32_t group_order[MAX_GROUPS];
    uint32_t part_order[MAX_GROUPS][MAX_PARTS];
} model_world;

typedef struct world {
    const recipe *recipe;
    model_world models[SIDES];
    engine_world engines[SIDES];
    group_tables tables[MAX_GROUPS];
    bool scattered; /* no two blocks of any table are neighbours, and every request begins at 0 */
} world;

/** Derives the world. False when the case is too large to run. */
bool world_make(const recipe *r, world *out);

/* ---- memory of a case: all of it is freed at once ------------------------------------------- */

void arena_reset(void);
void *arena_take(size_t count, size_t bytes);

/* ---- small questions ------------------------------------------------------------------------- */

uint32_t cell_bytes_of(const part_recipe *part);

static inline uint32_t step_tokens_of(const group_recipe *group) {
    return group->step_tokens ? group->step_tokens : 1;
}

/** Whether the model of this side has the group. */
static inline bool has_group(const world *w, uint32_t side, uint32_t group) {
    return w->models[side].layer_counts[group] > 0;
}

/** The index of a local layer in the remote model's group; NO_ID if the remote model lacks the layer. */
uint32_t remote_layer(const world *w, uint32_t group, uint32_t local_layer);

/** Whether groups of this engine may overlap in memory. */
bool groups_overlap(const recipe *r, uint32_t side);

/** The number of a group's layout among the engine's. */
uint32_t layout_of(const recipe *r, uint32_t side, uint32_t group);

static inline uint32_t kernel_tokens_of(const engine_world *e, uint32_t group) {
    return e->tokens[group] / e->kernel_blocks[group];
}
static inline uint32_t layers_of(const rank_group *g) {
    return g->layers_end - g->layers_begin;
}
static inline uint32_t units_of(const rank_part *p) {
    return p->units_end - p->units_begin;
}

/** Whether the rank keeps this step. */
static inline bool keeps(const rank_group *g, uint32_t step) {
    return step / g->share_width % g->share_count == g->share_index;
}

/** Whether both keep some step, by looking at one step after the other. */
bool shares_meet(const rank_group *a, const rank_group *b);

/* ---- the files that derive it ---------------------------------------------------------------- */

/** Makes the models of both sides. False if one would have no group. */
bool make_models(const recipe *r, world *w);

/** Derives ranks, layers, units and token shares, and sizes of blocks. */
void shape_engine(const recipe *r, uint32_t side, world *w);

/** The order of axes as text: "" for NULL. */
void order_text(const layout_recipe *layout, char out[ORDER_TEXT]);

/** Whether a block is contiguous for each layer and part: heads and tokens are inside it. */
bool has_whole_pages(const layout_recipe *layout);

/** Finds the addresses of all cells of a built engine, by counting. */
void place_by_order(const recipe *r, uint32_t side, world *w);

/** Makes the placements and addresses of all cells of hand-made shards. */
void place_by_hand(const recipe *r, uint32_t side, world *w);

/** Says whether a byte of this rank's group belongs to two cells, or lies outside its region; NULL: neither. */
const char *find_overlap(const world *w, uint32_t side, const rank_world *rank, uint32_t group);

/** Derives table lengths and the blocks that each cache needs; then, when the addresses are known, ids. */
void measure_tables(const recipe *r, world *w);
void number_blocks(const recipe *r, world *w);

/* ---- cells ----------------------------------------------------------------------------------- */

/* A piece of a cell. */
typedef struct cell_visit {
    uint32_t group, layer, part, step, row, unit; /* layer: index into the group's layers */
    uint32_t model_layer;                         /* its number in the model */
    uint32_t first;                               /* the piece's first byte within the cell */
    place at;
    uint32_t bytes;
} cell_visit;

/**
 * Calls `visit` for every piece of every cell that a rank keeps of the steps begin .. end - 1 and that the tables of
 * a side give a block; returns false as soon as `visit` does.
 */
bool visit_cells(const world *w, uint32_t side, uint32_t rank, uint32_t group, uint32_t begin, uint32_t end,
                 bool (*visit)(const cell_visit *cell, void *context), void *context);

/** The bytes of a piece of a cell, as a function of its coordinates. */
void cell_content(const cell_visit *cell, unsigned char *out);

#endif
