/*
 * The inside of shards and engines, for the rooms that compute with them.
 */
#ifndef KVF_SHARD_ROOM_H
#define KVF_SHARD_ROOM_H

#include <kvferry/shard.h>

#include "base/base.h"
#include "model/match.h"

/** The steps, parts and places of one group that a rank holds. All sizes count steps, where the public description
 * counts tokens. */
typedef struct kvf_held_group {
    uint32_t steps_per_block; /* of a logical block */
    uint32_t kernel_steps;    /* of a kernel block */
    uint32_t kernel_blocks_per_block;
    uint64_t block_count;            /* logical blocks */
    kvf_token_share share;           /* of the steps */
    const kvf_part_share *parts;     /* [part] */
    const kvf_placement *placements; /* [held layer][part] */
    bool regions_ascend;             /* no part has a later layer in an earlier region */
} kvf_held_group;

struct kvf_shard {
    kvf_model *model;
    kvf_shard_desc desc;     /* `groups`, their arrays and `region_bytes` are owned, defaults filled in */
    kvf_held_group *groups;  /* as desc.groups, whose arrays they use */
    kvf_range *group_layers; /* by group: held layers, as indices into the group's layers */
};

/** What all ranks of an engine agree on for one group. */
typedef struct kvf_engine_group {
    uint32_t steps_per_block;
    uint32_t kernel_steps;
    uint32_t kernel_blocks_per_block;
    uint64_t block_count; /* the smallest of any rank */
    uint32_t share_count; /* shares of the steps */
    uint32_t share_width; /* in steps */
} kvf_engine_group;

struct kvf_engine {
    kvf_model *model;
    char *name;
    kvf_shard **shards;
    uint32_t shard_count;
    kvf_engine_group *groups;
};

/**
 * Checks the blocks and the token share that a rank says it has of a group, and counts them in steps.
 *
 * @param desc  with its defaults filled in; its parts and placements are not read
 * @param out   receives the numbers; its parts and placements are NULL
 */
kvf_status kvf_count_steps(const kvf_group_desc *group, const kvf_group_shard_desc *desc,
                           kvf_held_group *out);

/** The group's layers inside `layers`, as indices into the group's list. */
kvf_range kvf_held_layers(const kvf_group_desc *group, kvf_range layers);

/** What one rank of a tensor-parallel engine holds of a part. */
kvf_part_share kvf_tp_share(const kvf_part_desc *part, uint32_t tp_rank, uint32_t tp_size);

/* How many pieces may be checked for overlap. 2^24 take some seconds: K and V side by side of 64 layers, 128 heads and
 * 1024 tokens a block. A shard from a peer is checked while others wait: 2^18 take some 50 ms and 12 MiB. */
#define KVF_OVERLAP_OWN (1ull << 24)
#define KVF_OVERLAP_FOREIGN (1ull << 18)

/**
 * kvf_shard_create() with more parameters.
 *
 * @param group_layers      what is held of each group, as indices into its layers, if that is less than desc->layers;
 *                          NULL: all of those
 * @param overlap_intervals  how many interleaved pieces of a block may be checked for overlap, over all groups:
 *                           KVF_OVERLAP_OWN or KVF_OVERLAP_FOREIGN; the number checked is subtracted, even if the shard
 *                           is refused. NULL: no check, for placements that kvferry computed or has checked
 */
kvf_status kvf_shard_make(const kvf_model *model, const kvf_shard_desc *desc, const kvf_range *group_layers,
                          uint64_t *overlap_intervals, kvf_shard **out);

/**
 * Makes the same shard in terms of another model: its groups, parts and layers are those of `match->ours`. It holds
 * what `shard` holds of the groups that are the same in both models or are converted (these keep their types), and
 * nothing of other groups.
 *
 * @param shard  of match->theirs
 * @param out    receives a shard of match->retyped
 */
kvf_status kvf_shard_adapt(const kvf_shard *shard, const kvf_match *match, kvf_shard **out);

/** Adapts all shards of an engine to another model. */
kvf_status kvf_engine_adapt(const kvf_engine *engine, const kvf_match *match, kvf_engine **out);

/** The memory that a shard takes, about. */
uint64_t kvf_shard_memory_bytes(const kvf_shard *shard);

/** The memory that the shards of an engine take, about. */
uint64_t kvf_engine_memory_bytes(const kvf_engine *engine);

/** Checks that no two cells of a group of a shard share a byte. All cells must lie inside their regions. */
kvf_status kvf_shard_check_overlap(const kvf_shard *shard, uint32_t group, uint64_t *left);

/** Whether a rank holds units of a part. If not, the part's placements are not checked, and must not be used. */
static inline bool kvf_holds_units(const kvf_part_share *share) {
    return share->units.begin < share->units.end;
}

/** Bytes of each piece of a cell of `part` under a placement with its defaults filled in. */
static inline uint64_t kvf_piece_bytes(const kvf_part_desc *part, const kvf_placement *placement) {
    return kvf_part_cell_bytes(part) / placement->pieces;
}

/* ---- words (words.c) -------------------------------------------------------------------------- */

/** Adds a half-open range as people write it: "0-7", "3". */
void kvf_say_range(kvf_text *text, kvf_range range);

/** Adds ascending numbers, at least one, behind the words for one and for many: "ranks 0-6 by 2", "3 ranks of 0-7". */
void kvf_say_numbers(kvf_text *text, const char *one, const char *many, const uint32_t *list, uint32_t count);

/** Adds the model layers of a range, which is not empty, of a group's layers: "0-31", "5-59 by 6", "12 of 0-40". */
void kvf_say_layers(kvf_text *text, const kvf_group_desc *group, kvf_range layers);

/** Adds the word for `count` units of a part: "head", "heads", "channels", "latent", "units". */
void kvf_say_units(kvf_text *text, const kvf_group_desc *group, const kvf_part_desc *part, uint32_t count);

/** Adds the lines of kvf_engine_describe(), each with `indent` before it. */
void kvf_say_engine(kvf_text *text, const kvf_engine *engine, const char *indent);

/** Add a number with its unit: "16.0 MiB"; "1 048 576"; "3.21 ms". */
void kvf_say_bytes(kvf_text *text, uint64_t bytes);
void kvf_say_count(kvf_text *text, uint64_t count);
void kvf_say_time(kvf_text *text, double ns);

/** Rows of a kernel block of a part. */
static inline uint64_t kvf_kernel_rows(const kvf_held_group *group, const kvf_part_desc *part) {
    return (uint64_t)group->kernel_steps * part->rows_per_step;
}

/** What kvf_layout_place() needs to know about one group on one rank. */
typedef struct kvf_layout_request {
    const kvf_group_desc *group;
    const kvf_group_spec *spec;
    uint32_t layer_count;         /* held layers */
    uint32_t kernel_steps;        /* steps of a kernel block */
    uint64_t kernel_blocks;       /* kernel blocks in the cache */
    const kvf_part_share *shares; /* by part */
} kvf_layout_request;

/**
 * Computes the placements of one group from its axis order.
 *
 * @param placements    [layer][part], receives the placements; regions count from 0
 * @param region_bytes  receives an array with the size of each region, to be freed with kvf_free()
 */
kvf_status kvf_layout_place(const kvf_layout_request *request, kvf_placement *placements,
                            uint64_t **region_bytes, uint32_t *region_count);

#endif
