/*
 * A recipe: everything that one random case is made of, as plain numbers.
 *
 * No number in a recipe depends on another: sizes of caches, block ids and addresses are derived (world.h). So the
 * shrinker can make any number smaller without adjusting the others. It relies on all members being uint32_t.
 */
#ifndef KVF_PROPERTY_RECIPE_H
#define KVF_PROPERTY_RECIPE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum {
    MAX_GROUPS = 4,
    MAX_PARTS = 4,
    MAX_LAYERS = 6,
    MAX_STAGES = 3,
    MAX_HAND_RANKS = 12,
    MAX_RANKS = 27,
    ORDER_TEXT = 16,
};

enum { LOCAL = 0, REMOTE = 1, SIDES = 2 };

typedef struct part_recipe {
    uint32_t dtype, units, granule, cell_elements, rows;
    uint32_t new_tensor; /* begins a new tensor */
    uint32_t replicate;
} part_recipe;

typedef struct group_recipe {
    uint32_t is_state;
    uint32_t window, chunk;
    uint32_t step_tokens; /* of an entry; 0 means 1 */
    uint32_t layer_mask;
    uint32_t part_count;
    part_recipe parts[MAX_PARTS];
} group_recipe;

enum order_fault {
    ORDER_FINE,
    ORDER_MISSING,
    ORDER_TWICE,
    ORDER_UNKNOWN,
    ORDER_TWO_BARS,
    ORDER_TENSOR_INSIDE
};

typedef struct layout_recipe {
    uint32_t
        tokens; /* steps of a block if the layout is of one group, otherwise its tokens; 0: the default */
    uint32_t kernel_blocks;
    uint32_t order;       /* 0: NULL; 1 .. 120: a permutation of L, B, P, H, N */
    uint32_t tensor_axis; /* 0: no T; else T is this many letters outside P, at most at the front */
    uint32_t bar;         /* 0: none; else the bar is before letter bar - 1 */
    uint32_t order_fault;
    uint32_t page_extra; /* 0: no page_bytes; else its bytes beyond the content, plus 1 */
    uint32_t page_short; /* page_bytes is one less than the content */
    uint32_t page_align;
    uint32_t spare_blocks;
} layout_recipe;

/* A rank with a shard made by hand: any units, any placements. */
typedef struct hand_rank {
    uint32_t layers_begin, layers_end;
    uint32_t share_index;
    uint32_t spare_blocks;
    uint32_t replica, replica_count;
    uint32_t units_begin[MAX_GROUPS][MAX_PARTS];
    uint32_t units_end[MAX_GROUPS][MAX_PARTS];
    uint32_t in_pages; /* a block's layers and parts lie together; otherwise one after another */
    uint32_t regions;
    uint32_t pad;   /* the largest gap after a cell, a row ..., in bytes */
    uint32_t tight; /* there is no gap after the last of them */
    uint32_t junk;  /* strides of axes of length 1 have arbitrary values */
    uint32_t cut;   /* 0: cells are whole; otherwise selects one of the possible numbers of pieces */
    uint32_t seed;
    uint32_t damage; /* 0: none; otherwise one number of one placement is replaced */
} hand_rank;

/* How an engine's model differs from the recipe's: all zero if it is the same. */
typedef struct unlike_recipe {
    uint32_t group_order, part_order; /* a permutation's number; 0: unchanged */
    uint32_t lacks_groups;            /* a bit for each group */
    uint32_t lacks_layers[MAX_GROUPS];
    uint32_t
        fewer_layers; /* so many layers at the end of the model are missing: the other side's draft model */
    uint32_t differs; /* 0: no group; otherwise `field` of group differs - 1 has another value */
    uint32_t field;   /* an unlike_field */
} unlike_recipe;

enum unlike_field {
    UNLIKE_DTYPE,
    UNLIKE_CELL,
    UNLIKE_ROWS,
    UNLIKE_UNITS,
    UNLIKE_WINDOW,
    UNLIKE_STEP,
    UNLIKE_PART, /* the last part is missing */
    UNLIKE_FIELDS
};

typedef struct engine_recipe {
    unlike_recipe unlike;
    uint32_t by_hand;
    uint32_t tp, pp;
    uint32_t uneven; /* the stages have the sizes below */
    uint32_t stages[MAX_STAGES];
    uint32_t dcp, width; /* also of hand-made shards, whose width is in steps */
    uint32_t share_pages;
    uint32_t even_pages; /* logical blocks of all groups are equally large, as hybrid engines make them */
    uint32_t per_group;  /* a layout for each group; otherwise layout 0 is for tokens and 1 for states */
    layout_recipe layouts[MAX_GROUPS];
    uint32_t hand_count;
    uint32_t disagree; /* 0: none; otherwise rank disagree - 1 shares tokens by another width */
    hand_rank hands[MAX_HAND_RANKS];
} engine_recipe;

enum id_mode { IDS_ASCENDING, IDS_DESCENDING, IDS_SHUFFLED, IDS_CHUNKS, IDS_SCATTERED, ID_MODES };

typedef struct table_recipe {
    uint32_t ids;        /* an id_mode */
    uint32_t lead;       /* blocks listed before the first needed one */
    uint32_t lead_empty; /* these are KVF_NO_BLOCK */
    uint32_t trail;      /* blocks listed after the last needed one */
} table_recipe;

typedef struct group_request_recipe {
    uint32_t begin, end;
    table_recipe tables[SIDES];
} group_request_recipe;

enum fault {
    FAULT_NONE,
    FAULT_BEYOND,
    FAULT_SHORT,
    FAULT_LATE,
    FAULT_HOLE,
    FAULT_BACKWARDS,
    FAULT_COUNT,
    FAULTS
};

typedef struct recipe {
    uint32_t layer_count, group_count;
    group_recipe groups[MAX_GROUPS];
    engine_recipe engines[SIDES];
    group_request_recipe requests[MAX_GROUPS];
    uint32_t ids_seed;
    uint32_t first_replica; /* KVF_REPLICA_FIRST */
    uint32_t ask_begin,
        ask_end;    /* layers that a plan is for; all, unless they are a range of the local model */
    uint32_t fault; /* of a second request, which must be refused */
    uint32_t fault_group, fault_side, fault_at;
} recipe;

/** Whether the numbers make a case: a model that is allowed, and sizes within the bounds above. */
bool recipe_usable(const recipe *r);

/** A random case. */
void recipe_generate(uint64_t seed, recipe *out);

/** Makes a failing case smaller while `fails` says that it still fails. Returns how many cases were tried. */
uint32_t recipe_shrink(recipe *r, bool (*fails)(const recipe *r));

/** Prints the case as C that can be pasted into a test. */
void recipe_print(FILE *to, const recipe *r, uint32_t local_rank);

#endif
