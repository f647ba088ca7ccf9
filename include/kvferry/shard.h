/*
 * Which rank holds which cells, and where: the shard of one rank, and the engine as the set of its ranks.
 *
 * A shard says, for each group, which layers, units and tokens a rank keeps, and for each (layer, part) a
 * placement: the address of every cell as a sum of strides inside one of the rank's memory regions,
 *
 *   offset(block, row, unit) = offset + block * block_stride + row * row_stride
 *                                     + (unit - unit_begin) * unit_stride
 *
 * A rank may keep its cells in pieces, each a stride after the one before: if keys are stored channel by channel, the
 * elements of a cell lie apart. The model says what a cell is, the placement how the rank cuts it, so ranks that cut
 * cells differently still hold the same cells:
 *
 *   whole cells           t0: | c0 c1 c2 c3 |  t1: | c0 c1 c2 c3 |  ...
 *   in pieces of one      c0: | t0 t1 ... |    c1: | t0 t1 ... |    ...       a piece's row_stride is one element
 *
 * Offsets count from the start of a region; base addresses are known only when memory is registered with a transport.
 * So a shard can be sent to a peer, and nothing in it can name memory outside a region.
 *
 * Shards and engines are immutable once made; any thread may read them.
 */
#ifndef KVFERRY_SHARD_H
#define KVFERRY_SHARD_H

#include <stdbool.h>

#include <kvferry/model.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Which tokens a rank keeps (decode context parallelism): token t when (t / width) % count == index. The rank stores
 * them densely, in order. A zeroed struct means all tokens. This struct stays as it is.
 */
typedef struct kvf_token_share {
    uint32_t index; /**< less than count */
    uint32_t count; /**< ranks that share the tokens; 0 means 1 */
    uint32_t width; /**< neighbouring tokens kept together: a multiple of tokens_per_step; 0 means 1 */
} kvf_token_share;

/**
 * Where a rank keeps the cells of one (layer, part). Strides are in bytes.
 *
 * A cell is kept in `pieces` pieces of equally many elements, in order: piece i begins i * piece_stride after the
 * first. A piece must fill whole bytes. This struct stays as it is.
 */
typedef struct kvf_placement {
    uint32_t region;       /**< index into the shard's regions */
    uint64_t offset;       /**< of the first held unit's cell in row 0 of kernel block 0 */
    uint64_t block_stride; /**< between kernel blocks */
    uint64_t row_stride;
    uint64_t unit_stride;
    uint64_t piece_stride; /**< not used if a cell is one piece */
    uint32_t pieces;       /**< divides the cell's elements; 0 means 1: cells are whole */
} kvf_placement;

/** What a rank holds of one part, in every layer of the group. This struct stays as it is. */
typedef struct kvf_part_share {
    kvf_range units;        /**< of the whole model's units; empty: none */
    uint32_t replica;       /**< number of this rank among those with the same units and tokens */
    uint32_t replica_count; /**< how many such ranks there are; 0 means 1 */
} kvf_part_share;

/**
 * What a rank holds of one group.
 *
 * There are two sizes of block. Block tables count *logical* blocks; memory may be cut into smaller *kernel* blocks,
 * `kernel_blocks_per_block` for each logical block, numbered logical * kernel_blocks_per_block + k. Strides are between
 * kernel blocks.
 */
typedef struct kvf_group_shard_desc {
    uint32_t tokens_per_block;        /**< of a logical block: a multiple of tokens_per_step; 1 for states */
    uint32_t kernel_blocks_per_block; /**< 0 means 1; divides the steps of a block */
    uint64_t block_count;             /**< logical blocks in the cache */
    kvf_token_share tokens;
    const kvf_part_share *parts;     /**< one for each part of the model's group */
    const kvf_placement *placements; /**< [held layer of this group][part], layers ascending */
    uint64_t reserved[4];            /**< 0 */
} kvf_group_shard_desc;

typedef struct kvf_shard_desc {
    size_t struct_size;           /**< sizeof(kvf_shard_desc) */
    uint32_t rank;                /**< number of this rank in its engine */
    kvf_range layers;             /**< model layers this rank holds */
    const uint64_t *region_bytes; /**< size of each memory region */
    uint32_t region_count;
    /** One for each group of the model, even if no layer of it is held */
    const kvf_group_shard_desc *groups;
    uint32_t tp_rank, tp_size, pp_rank, pp_size; /**< for messages and named quantities; sizes of 0 mean 1 */
} kvf_shard_desc;

typedef struct kvf_shard kvf_shard;

/**
 * Makes one rank's shard from explicit placements, for memory that another program laid out. The model is retained.
 *
 * Checks that every cell of every block lies inside its region and shares no byte with another cell of its group.
 * Different groups may share memory: hybrid engines do, with different block ids.
 *
 * @param desc  copied
 * @param out   receives a shard owned by the caller, see kvf_shard_free()
 * @return KVF_OK, KVF_E_INVALID, KVF_E_RANGE, KVF_E_OVERFLOW, KVF_E_OVERLAP, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_shard_create(const kvf_model *model, const kvf_shard_desc *desc, kvf_shard **out);

/** Frees a shard; NULL is accepted. */
KVF_API void kvf_shard_free(kvf_shard *shard);

/** The model of a shard, owned by the shard. */
KVF_API const kvf_model *kvf_shard_model(const kvf_shard *shard);

/** The description of a shard with its zero defaults filled in, owned by the shard. */
KVF_API const kvf_shard_desc *kvf_shard_get(const kvf_shard *shard);

/** The layers of group `group` that this rank holds: indices into kvf_group_desc.layers. */
KVF_API kvf_range kvf_shard_group_layers(const kvf_shard *shard, uint32_t group);

/**
 * The placement of one (layer, part). `layer` is an index into kvf_group_desc.layers.
 *
 * @return owned by the shard; NULL when this rank does not hold that layer, or there is no such part
 */
KVF_API const kvf_placement *kvf_shard_placement(const kvf_shard *shard, uint32_t group, uint32_t layer,
                                                 uint32_t part);

#define KVF_REGION_AXES_MAX 8

/** An axis of an array: `length` steps, `stride` bytes apart. This struct stays as it is. */
typedef struct kvf_region_axis {
    char letter; /**< as in kvf_group_spec: L, B (kernel blocks), P, H, N (rows); D: the elements of a cell */
    uint64_t length;
    uint64_t stride;
} kvf_region_axis;

/** What one group keeps in a region, for neighbouring parts whose cells have the same type and size: an array, if it is
 * regular. */
typedef struct kvf_region_view {
    size_t struct_size; /**< sizeof(kvf_region_view), set by the caller */
    uint64_t region_bytes;
    uint32_t group;
    kvf_range parts; /**< of the group */
    /** Indices into kvf_group_desc.layers, from the first to the last layer in this region */
    kvf_range layers;
    uint32_t layer_count; /**< layers in this region: fewer than the range if some between are elsewhere */
    kvf_dtype dtype;
    uint64_t offset;     /**< in the region, of the first cell of the first layer and part */
    bool regular;        /**< `axes` describe the view; otherwise only placements do */
    uint32_t axis_count; /**< of `axes`: those with two or more steps */
    /** Outermost first. D appears twice if cells are kept in pieces. D counts bytes if elements are smaller than one */
    kvf_region_axis axes[KVF_REGION_AXES_MAX];
} kvf_region_view;

/**
 * Says what a region holds. A region has several views if groups share it, or if its parts differ in type or size or
 * lie at uneven distances.
 *
 * @param region  of the shard
 * @param i       which view, from 0 on: by group, then by part
 * @param out     struct_size is set by the caller; the rest is filled in
 * @return KVF_OK, KVF_E_NOT_FOUND (there are fewer views), KVF_E_RANGE (no such region), KVF_E_INVALID
 */
KVF_API kvf_status kvf_shard_region_view(const kvf_shard *shard, uint32_t region, uint32_t i,
                                         kvf_region_view *out);

/** The region and byte offset of one cell, and the pieces it is kept in. */
typedef struct kvf_cell_location {
    size_t struct_size; /**< sizeof(kvf_cell_location), set by the caller */
    uint32_t region;
    uint64_t offset;       /**< of the first piece */
    uint64_t bytes;        /**< of the whole cell; each piece has bytes / pieces */
    uint64_t piece_stride; /**< from the beginning of a piece to that of the next; 0 for a single piece */
    uint32_t pieces;       /**< at least 1 */
} kvf_cell_location;

/**
 * Finds one cell by its logical block, row and unit.
 *
 * @param layer  index into kvf_group_desc.layers
 * @param block  logical block
 * @param row    row in the logical block: step in the block * rows_per_step + row of the step
 * @param unit   counted over the whole model
 * @param out    struct_size is set by the caller; the rest is filled in
 * @return KVF_OK, KVF_E_RANGE (this rank does not hold it), KVF_E_INVALID
 */
KVF_API kvf_status kvf_shard_locate(const kvf_shard *shard, uint32_t group, uint32_t layer, uint32_t part,
                                    uint64_t block, uint32_t row, uint32_t unit, kvf_cell_location *out);

/* ---- engines: all ranks of one deployment ---------------------------------------------------- */

/**
 * How one rank arranges a group in memory.
 *
 * `order` nests the axes from outermost to innermost, one letter each: L layer, B block, T tensor, P part,
 * H unit (a head, a channel), N row (a token, an entry); the cell itself is innermost. A '|' ends the axes that get a
 * buffer of their own, which only L, T and P may. T may be left out: it then stands just outside P. Examples:
 *
 *   "L|BPHN"   a buffer per layer; in a page all of K, then all of V; head before token (HND)
 *   "L|BPNH"   the same, token before head (NHD)
 *   "LP|BNH"   K and V in buffers of their own
 *   "L|BHNP"   K and V of one token side by side
 *   "LBPHN"    one buffer over all layers
 *   "BLHNP"    one buffer, blocks outermost, all layers of a block in one row
 *   "L|BTNPH"  conv state step by step, its projections side by side (SD); the recurrent state after it
 *
 * An axis outside P (or T) needs the same number of steps in all parts that it spans.
 */
typedef struct kvf_group_spec {
    uint32_t tokens_per_block;        /**< 0: the first multiple of tokens_per_step from 16 on; states: 1 */
    uint32_t kernel_blocks_per_block; /**< 0: 1 */
    uint64_t block_count;             /**< logical blocks in the cache; at least 1 */
    const char *order;                /**< NULL: "L|BPHN" */
    uint64_t page_bytes;  /**< stride of the B axis; 0: as small as its content. Per kernel block */
    uint64_t page_align;  /**< rounds the stride of the B axis up to a multiple; 0: 1 */
    uint64_t reserved[4]; /**< 0 */
} kvf_group_spec;

typedef struct kvf_engine_spec {
    size_t struct_size; /**< sizeof(kvf_engine_spec) */
    const char *name;   /**< for messages; NULL means "engine" */
    uint32_t tp_size;   /**< 0 means 1 */
    uint32_t pp_size;   /**< 0 means 1 */
    /** Layers of each stage, which add up to the model's; NULL: split as evenly as possible */
    const uint32_t *pp_layers;
    uint32_t dcp_size;            /**< ranks that share the tokens of a sequence; 0 means 1 */
    uint32_t dcp_width;           /**< neighbouring tokens kept together; 0 means 1 */
    kvf_group_spec all;           /**< of every token group, unless `groups` is given */
    kvf_group_spec state;         /**< of every state group; a block_count of 0 means that of `all` */
    const kvf_group_spec *groups; /**< NULL, or one for each group of the model */
    /** Groups share buffers: the i-th buffers of all groups are the same memory. Different block ids are then different
     * bytes only if the logical blocks of all groups are equally large and equally many: see page_bytes */
    bool share_pages;
} kvf_engine_spec;

typedef struct kvf_engine kvf_engine;

/**
 * Lays out every rank of an engine. Rank numbers are pp_rank * tp_size + tp_rank.
 *
 * A TP rank r of n holds, of G granules of a split part, [r*G/n, (r+1)*G/n) when n <= G, and granule r*G/n
 * otherwise (neighbours share). Under decode context parallelism rank r keeps token share r % dcp_size, which
 * needs every granule to be held by a multiple of dcp_size neighbouring ranks.
 *
 * @return KVF_OK, KVF_E_INVALID, KVF_E_RANGE, KVF_E_OVERFLOW, KVF_E_NOMEM; the detail names the field
 */
KVF_API kvf_status kvf_engine_build(const kvf_model *model, const kvf_engine_spec *spec, kvf_engine **out);

/**
 * Makes an engine from existing shards, such as those received from peers. On success the engine owns the shards.
 *
 * @param shards  shards of models that compare equal to `model`; shards[i] has rank i
 * @return KVF_OK, KVF_E_MISMATCH (a shard of another model, or ranks that share tokens differently),
 *         KVF_E_INVALID, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_engine_from_shards(const kvf_model *model, const char *name, kvf_shard *const *shards,
                                          uint32_t shard_count, kvf_engine **out);

/** Frees an engine and its shards; NULL is accepted. */
KVF_API void kvf_engine_free(kvf_engine *engine);

KVF_API const char *kvf_engine_name(const kvf_engine *engine);
KVF_API const kvf_model *kvf_engine_model(const kvf_engine *engine);
KVF_API uint32_t kvf_engine_rank_count(const kvf_engine *engine);

/** The shard of one rank, owned by the engine; NULL when there is no such rank. */
KVF_API const kvf_shard *kvf_engine_shard(const kvf_engine *engine, uint32_t rank);

/**
 * Describes the shape of an engine in words: a line with its name, ranks and parallel sizes, then a line for each group
 * with its layers, parts, blocks and order. Ranks that differ only in the layers, units or tokens that they hold share
 * a line.
 *
 * The order is derived from the placements of the first rank that holds the group, in the letters of kvf_group_spec,
 * without axes of a single step; "irregular" if no order describes them.
 *
 * @param text        receives the lines, each ended by a newline, cut to fit and ended by a zero byte; may be
 *                    NULL where text_bytes is 0
 * @param length      receives the bytes of the whole text without the zero byte, as of snprintf(); may be NULL
 * @return KVF_OK, also for a text that was cut; KVF_E_INVALID, KVF_E_NOMEM
 */
KVF_API kvf_status kvf_engine_describe(const kvf_engine *engine, char *text, size_t text_bytes,
                                       size_t *length);

#ifdef __cplusplus
}
#endif

#endif
