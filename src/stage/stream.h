/*
 * The packed stream: everything that flows from one rank to another, as one sequence of bytes that each end can find
 * in its own memory.
 *
 * A *selection* says which cells flow: items of a group, a part, layers and units. A request adds a range of steps for
 * each group; the steps that both ends keep flow. The stream is the elements of these cells, in ascending order of
 *
 *     layer of the model, group, part, first unit of the item, step, row of the step, unit, element
 *
 * with nothing between them. It depends on no planner, block table, cut of cells or version of kvferry: each end maps
 * its own memory to the stream with its own placements and blocks. The ends may cut cells differently and keep elements
 * of different types: an item names the type that its elements have in the stream, and each end converts.
 *
 *     holder (HND, blocks of 4)               stream of one layer             reader (NHD, blocks of 16)
 *     K: | h0 t0 t1 t2 t3 | h1 t0 .. |  -->   K: t0 h0 h1, t1 h0 h1, ..  -->  K: | t0 h0 h1 | t1 h0 h1 | ..
 *     V: | h0 t0 t1 t2 t3 | h1 t0 .. |        V: t0 h0 h1, ..                 V: ..
 *
 * Because layers come first, the cells of a range of layers are one range of bytes. Bytes are named by their place in
 * the stream: any range can be gathered or scattered independently, in any order, from several threads.
 *
 * Three things, each made from the one before it:
 *
 *   kvf_selection    the cells that flow from one rank to another, by coordinates; can be sent
 *   kvf_stream_map   the selection in the memory of one shard; one for all requests and all peers of that shape
 *   kvf_stream       one request over a map: steps and blocks
 */
#ifndef KVF_STAGE_STREAM_H
#define KVF_STAGE_STREAM_H

#include <kvferry/plan.h>
#include <kvferry/request.h>

#include "base/base.h"
#include "kernel/box.h"
#include "plan/plan.h"

/* ---- what flows ------------------------------------------------------------------------------ */

/** Cells of one part, in a range of layers and units, at the steps that both ends keep. */
typedef struct kvf_stream_item {
    uint32_t group;
    uint32_t part;
    kvf_range layers;          /**< indices into kvf_group_desc.layers; not empty */
    kvf_range units;           /**< of the whole model's; not empty */
    kvf_token_share tokens[2]; /**< of the holder and of the reader; defaults filled in */
    kvf_dtype dtype;           /**< of its elements in the stream */
} kvf_stream_item;

/** The cells that flow from one rank to another. No two items share a unit of a part in a layer, and all items of a
 * group have the same shares. Immutable. */
typedef struct kvf_selection {
    const kvf_stream_item *items; /**< ascending by group, part, first unit, first layer */
    uint32_t item_count;
} kvf_selection;

/**
 * Makes the selection of one source of a plan from its cuts and the shares of the two shards. Converted elements have
 * the shorter of their two types in the stream.
 *
 * @param source  an index of the plan's
 * @param out     receives a selection owned by the caller, see kvf_selection_free()
 * @return KVF_OK, KVF_E_RANGE (no such source), KVF_E_LIMIT (more cuts than any useful plan has), KVF_E_NOMEM
 */
kvf_status kvf_selection_of_plan(const kvf_plan *plan, uint32_t source, kvf_selection **out);

/**
 * Checks and copies items that came from a peer.
 *
 * @param model  the model that the items' indices refer to
 * @return KVF_OK, KVF_E_RANGE (a group, part, layer, unit or share that does not exist; the detail names item and
 *         field), KVF_E_OVERLAP (two items have a unit of a layer in common), KVF_E_INVALID (wrong order; items of
 *         a group with different shares; a type into which the part's elements cannot be converted), KVF_E_LIMIT
 *         (more items than any plan has), KVF_E_NOMEM
 */
kvf_status kvf_selection_check(const kvf_model *model, const kvf_stream_item *items, uint32_t count,
                               kvf_selection **out);

/** NULL is accepted. */
void kvf_selection_free(kvf_selection *selection);

/** Whether elements of one type can be sent as elements of the other: the same type, or both can be converted. */
bool kvf_stream_converts(kvf_dtype from, kvf_dtype to);

/* ---- one rank's memory ----------------------------------------------------------------------- */

/** A selection as one rank keeps it. Immutable; any thread may read it. */
typedef struct kvf_stream_map kvf_stream_map;

/**
 * Finds the cells of a selection in a shard.
 *
 * @param shard      must outlive the map
 * @param selection  copied
 * @param out        receives a map owned by the caller, see kvf_stream_map_free()
 * @return KVF_OK, KVF_E_UNCOVERED (the shard does not hold some cell; the detail names group, part, layer and units),
 *         KVF_E_MISMATCH (the shard keeps steps by a share that is neither of the item's), KVF_E_LIMIT (the pattern of
 *         the two shares repeats too rarely), KVF_E_NOMEM; as kvf_selection_check() if the selection was checked
 *         for another model than the shard's
 */
kvf_status kvf_stream_map_create(const kvf_shard *shard, const kvf_selection *selection,
                                 kvf_stream_map **out);

/** NULL is accepted. */
void kvf_stream_map_free(kvf_stream_map *map);

/** The size of a stream. */
typedef struct kvf_stream_size {
    uint64_t bytes;
    uint64_t pieces; /**< contiguous both in this rank's memory and in the stream */
} kvf_stream_size;

/**
 * Predicts the size of the stream of a request for a range of steps of each group, clipped to its window, from the map
 * alone: O(lanes), however many steps. Assumes that logical blocks are scattered, and that two pieces with steps
 * between them that do not flow are not contiguous.
 *
 * @param spans  one for each group of the model
 */
kvf_stream_size kvf_stream_map_size(const kvf_stream_map *map, const kvf_step_span *spans);

/* ---- one request ----------------------------------------------------------------------------- */

/** Bytes of a stream, half open. */
typedef struct kvf_byte_range {
    uint64_t begin, end;
} kvf_byte_range;

typedef struct kvf_stream kvf_stream;

/**
 * Makes the stream of one request. Steps before a group's window are left out, as in every request.
 *
 * @param map     must outlive the stream
 * @param groups  steps and this rank's blocks, one for each group of the model; copied, table included
 * @param out     receives a stream owned by the caller, see kvf_stream_free(). Immutable; any thread may read it
 * @return KVF_OK, KVF_E_RANGE (a block beyond the cache, a table that does not cover the steps that flow; the
 *         detail names group, step and block), KVF_E_INVALID, KVF_E_OVERFLOW (more than 2^64 bytes), KVF_E_NOMEM
 */
kvf_status kvf_stream_create(const kvf_stream_map *map, const kvf_group_steps *groups, uint32_t count,
                             kvf_stream **out);

/** NULL is accepted. */
void kvf_stream_free(kvf_stream *stream);

uint64_t kvf_stream_bytes(const kvf_stream *stream);

/** The bytes of a range of model layers: one range, empty if none of their cells flows. */
kvf_byte_range kvf_stream_layers(const kvf_stream *stream, kvf_range layers);

/** How many model layers lie whole in the first `bytes` of the stream; UINT32_MAX if that is all of it. */
uint32_t kvf_stream_whole_layers(const kvf_stream *stream, uint64_t bytes);

/** Adds, for each model layer, how many of its bytes lie in a range. */
void kvf_stream_add_layers(const kvf_stream *stream, kvf_byte_range bytes, uint64_t *by_layer);

/**
 * Copies bytes of the stream out of this rank's memory. O(lanes) to find the first, then the bytes.
 *
 * @param bases  where the regions of the shard begin in this process
 * @param bytes  within the stream; begins and ends at an element
 * @param out    receives them; not in the regions
 */
void kvf_stream_gather(const kvf_stream *stream, unsigned char *const *bases, kvf_byte_range bytes,
                       void *out);

/** Copies bytes of the stream from `in` into this rank's memory. */
void kvf_stream_scatter(const kvf_stream *stream, unsigned char *const *bases, kvf_byte_range bytes,
                        const void *in);

/** Cells of a stream, as one box. */
typedef struct kvf_stream_box {
    kvf_box cells;   /**< in this rank's memory */
    uint32_t region; /**< of it */
    uint64_t byte;   /**< of the stream, where they begin */
    kvf_dtype memory_type, stream_type;
} kvf_stream_box;

/** Takes a box; false: it could not take this box, and wants no more. */
typedef bool kvf_stream_visit(void *context, const kvf_stream_box *box);

/**
 * Passes the boxes of a range to `visit`, in order, for copies by other means than this processor.
 *
 * @param bases  where the regions begin; not dereferenced
 * @return the end of the range, or the first byte of the box that was not taken
 */
uint64_t kvf_stream_boxes(const kvf_stream *stream, unsigned char *const *bases, kvf_byte_range bytes,
                          kvf_stream_visit *visit, void *context);

/** The logical blocks to which the boxes of a stream refer, of all groups in one table. */
const uint32_t *kvf_stream_table(const kvf_stream *stream, uint64_t *count);

/** The bytes of the largest element in the stream. */
uint32_t kvf_stream_element(const kvf_stream *stream);

/** The most bytes, up to `most` and the end of the stream, with which a range from `begin` ends after a whole element.
 * 0 only at the end of the stream, or if `most` is less than an element. */
uint64_t kvf_stream_cut(const kvf_stream *stream, uint64_t begin, uint64_t most);

#endif
