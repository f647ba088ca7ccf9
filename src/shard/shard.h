/*
 * The inside of shards and engines, for the rooms that compute on them.
 */
#ifndef KVF_SHARD_ROOM_H
#define KVF_SHARD_ROOM_H

#include <kvferry/shard.h>

#include "base/base.h"

struct kvf_shard {
    kvf_model *model;
    kvf_shard_desc desc; /* `groups`, their arrays and `region_bytes` are owned, defaults filled in */
    kvf_group_shard_desc *groups; /* the same array as desc.groups */
    kvf_range *group_layers;      /* by group: held layers, as indices into the group's layers */
};

/** What all ranks of an engine agree on for one group. */
typedef struct kvf_engine_group {
    uint32_t tokens_per_block;
    uint32_t kernel_blocks_per_block;
    uint64_t block_count; /* the smallest of all ranks */
    uint32_t share_count; /* token shares */
    uint32_t share_width;
} kvf_engine_group;

struct kvf_engine {
    kvf_model *model;
    char *name;
    kvf_shard **shards;
    uint32_t shard_count;
    kvf_engine_group *groups;
};

/** The group's layers inside [layers.begin, layers.end), as indices into its list. */
kvf_range kvf_held_layers(const kvf_group_desc *group, kvf_range layers);

/** What one rank of a tensor-parallel engine holds of a part. */
kvf_part_share kvf_tp_share(const kvf_part_desc *part, uint32_t tp_rank, uint32_t tp_size);

/** kvf_shard_create() for placements that kvferry computed itself, where a look for shared bytes is idle. */
kvf_status kvf_shard_make(const kvf_model *model, const kvf_shard_desc *desc, bool look_for_overlap,
                          kvf_shard **out);

/** Checks that no two cells of a group of a shard share a byte. All cells must lie inside their regions. */
kvf_status kvf_shard_check_overlap(const kvf_shard *shard, uint32_t group);

/* ---- words (words.c) -------------------------------------------------------------------------- */

/** Adds a half-open range as it is spoken of: "0-7", "3". */
void kvf_say_range(kvf_text *text, kvf_range range);

/** Adds the model layers of a range, which is not empty, of a group's layers: "0-31", "5-59 by 6", "12 of 0-40". */
void kvf_say_layers(kvf_text *text, const kvf_group_desc *group, kvf_range layers);

/** Adds "head" or "heads", "channels", "latent", "units": what so many units of a part are called. */
void kvf_say_units(kvf_text *text, const kvf_group_desc *group, const kvf_part_desc *part, uint32_t count);

/** Adds the lines of kvf_engine_describe(), each with `indent` before it. */
void kvf_say_engine(kvf_text *text, const kvf_engine *engine, const char *indent);

/** Add a number with its unit: "16.0 MiB"; "1 048 576"; "3.21 ms". */
void kvf_say_bytes(kvf_text *text, uint64_t bytes);
void kvf_say_count(kvf_text *text, uint64_t count);
void kvf_say_time(kvf_text *text, double ns);

/** Rows of a kernel block of a part. */
static inline uint64_t kvf_kernel_rows(const kvf_group_shard_desc *group, const kvf_part_desc *part) {
    return (uint64_t)(group->tokens_per_block / group->kernel_blocks_per_block) * part->rows_per_step;
}

/** What kvf_layout_place() needs to know of one group on one rank. */
typedef struct kvf_layout_request {
    const kvf_group_desc *group;
    const kvf_group_spec *spec;
    uint32_t layer_count;         /* held layers */
    uint32_t kernel_tokens;       /* tokens of a kernel block */
    uint64_t kernel_blocks;       /* kernel blocks in the cache */
    const kvf_part_share *shares; /* by part */
} kvf_layout_request;

/**
 * Computes the placements of one group from its axis order.
 *
 * @param placements    [layer][part], written; regions count from 0
 * @param region_bytes  receives an array with the size of each region, to be freed with kvf_free()
 */
kvf_status kvf_layout_place(const kvf_layout_request *request, kvf_placement *placements,
                            uint64_t **region_bytes, uint32_t *region_count);

#endif
