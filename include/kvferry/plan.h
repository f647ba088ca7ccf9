/*
 * What moves, and from which rank: the cover of one local shard by the shards of one remote engine.
 *
 * For every local (layer, part) the wanted units are cut at the remote ranks' boundaries, one holder is
 * chosen for each piece, and the pieces become *copy rules*: loop nests over strides that say how the cells
 * of any block get from the remote rank's memory into ours. Nothing in a plan depends on block numbers, so
 * its size is O(layers x parts x sources). TP sizes and block sizes need not divide each other, and orders need not
 * agree.
 *
 *    remote rank 1 (heads 4..7)          local rank 0 (heads 0..5)
 *    block b: | h4 | h5 | h6 | h7 |  ->  block c: | h0 .. h3 | h4 | h5 |
 *             `--- cut ---'                                  `-- cut --'
 *
 * A plan is immutable once built; any thread may read it.
 */
#ifndef KVFERRY_PLAN_H
#define KVFERRY_PLAN_H

#include <kvferry/shard.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Which rank is read where several remote ranks hold the same cells. */
typedef enum kvf_replica_choice {
    KVF_REPLICA_SPREAD = 0, /**< local ranks that want the same cells take different holders */
    KVF_REPLICA_FIRST = 1,  /**< the lowest rank */
} kvf_replica_choice;

typedef struct kvf_plan_options {
    size_t struct_size; /**< sizeof(kvf_plan_options) */
    kvf_replica_choice replicas;
    kvf_range layers; /**< of the model: fill only these of the local shard's layers; empty: all. Plans of
                               neighbouring ranges together move the same as one plan of all layers */
    /** Fill only these groups of the local shard's model; NULL: all. Read during the call */
    const uint32_t *groups;
    uint32_t group_count;
    /**
     * Element types that may be converted into each other on the way, a set, see KVF_DTYPE_BIT(); 0: none, and groups
     * whose types differ are refused.
     */
    uint32_t convert;
} kvf_plan_options;

typedef struct kvf_plan kvf_plan;

/**
 * Builds the plan that fills `local` from the shards of one remote engine.
 *
 * The remote engine may run another model: with further groups and layers (a draft model's), without some groups, or
 * with groups in another order. Groups and parts are matched by name, layers by number. Only the groups and layers that
 * are asked for must be the same there. Of such a group, the layers that both models have must follow one another in the
 * group's list of either, also those that are not asked for.
 *
 * @param local    the shard to fill; must outlive the plan
 * @param remote   every rank of the remote engine; must outlive the plan
 * @param options  NULL for the defaults
 * @param out      receives a plan owned by the caller, see kvf_plan_free()
 * @return KVF_OK, KVF_E_MISMATCH (a group that is asked for, or some of its layers, differ or are missing there; the
 *         detail names them, or the field and both values), KVF_E_UNSUPPORTED (element types differ, and are not in
 *         `convert`), KVF_E_UNCOVERED (no rank holds some cells; the detail names group, layer, part, units and
 *         tokens), KVF_E_RANGE (layers beyond the model's), KVF_E_INVALID, KVF_E_NOMEM. If the local shard holds none
 *         of the wanted layers, or none of these has a cache, the plan has no source
 */
KVF_API kvf_status kvf_plan_build(const kvf_shard *local, const kvf_engine *remote,
                                  const kvf_plan_options *options, kvf_plan **out);

/** Frees a plan; NULL is accepted. */
KVF_API void kvf_plan_free(kvf_plan *plan);

KVF_API const kvf_shard *kvf_plan_local(const kvf_plan *plan);
KVF_API const kvf_engine *kvf_plan_remote(const kvf_plan *plan);

/**
 * Whether some of the cells that the plan fills have another element type on the remote side. Such a plan has cuts, but
 * no copy rules and no runs: the elements are the same, their bytes are not. Its requests go packed, see stage.h.
 */
KVF_API bool kvf_plan_converts(const kvf_plan *plan);

/**
 * Bytes of memory that the plan occupies, about: with the copy of the remote engine's layout that it makes if the two
 * models differ, without the shard and the engine that it was built from.
 */
KVF_API size_t kvf_plan_memory_bytes(const kvf_plan *plan);

/** How many remote ranks the plan reads from. Sources are numbered from 0 by ascending rank. */
KVF_API uint32_t kvf_plan_source_count(const kvf_plan *plan);

/** The remote rank of a source; UINT32_MAX when there is no such source. */
KVF_API uint32_t kvf_plan_source_rank(const kvf_plan *plan, uint32_t source);

/* ---- the cover: who reads what from whom ----------------------------------------------------- */

/** One piece of the cover. */
typedef struct kvf_plan_cut {
    uint32_t source;
    uint32_t group;
    uint32_t part;
    kvf_range layers; /**< indices into kvf_group_desc.layers */
    kvf_range units;  /**< of the whole model's units */
    /** The steps that this source has, as a share of them; those of them that the local rank keeps are read */
    kvf_token_share tokens;
} kvf_plan_cut;

KVF_API uint32_t kvf_plan_cut_count(const kvf_plan *plan);

/** The i-th cut, ordered by group, layer, part, unit; owned by the plan; NULL past the last. */
KVF_API const kvf_plan_cut *kvf_plan_get_cut(const kvf_plan *plan, uint32_t i);

/**
 * Proves the plan: every cell that the local shard wants, in the plan's layers, is written exactly once, from the bytes
 * of the same cell on a rank that holds it, and no other cell is written. The proof works on addresses, from the
 * placements of the two shards, and trusts nothing that the planner computed.
 *
 * @return KVF_OK; KVF_E_UNCOVERED, KVF_E_OVERLAP (a cell written twice) or KVF_E_MISMATCH (a cell read from a wrong
 *         address), and the detail has the coordinates of the first such cell; KVF_E_UNSUPPORTED (the plan converts);
 *         KVF_E_NOMEM
 */
KVF_API kvf_status kvf_plan_verify(const kvf_plan *plan);

/* ---- copy rules: how cells move -------------------------------------------------------------- */

/** Strides of one side of a rule, in bytes. This struct stays as it is. */
typedef struct kvf_strides {
    uint64_t block; /**< between kernel blocks */
    uint64_t row;
    uint64_t unit;
} kvf_strides;

/** One pair of starting points of a rule; all lanes of a rule share its loop nest. This struct stays as it is. */
typedef struct kvf_copy_lane {
    uint64_t local_offset; /**< in bytes from the region's start, of row 0 of kernel block 0 */
    uint64_t remote_offset;
    uint32_t local_region;
    uint32_t remote_region;
    kvf_range layers; /**< the layers this lane moves: indices into kvf_group_desc.layers */
} kvf_copy_lane;

/**
 * A loop nest: for each lane, each block pair, each row and each unit, copy `cell_bytes`. Cells that lie side
 * by side on both sides (K and V of a token, neighbouring units, layers of one row) were fused into wider cells, so
 * `cell_bytes` and `units` need not be those of a part.
 */
typedef struct kvf_copy_rule {
    uint32_t source;
    uint32_t group;
    uint32_t units;
    uint32_t rows_per_step;
    uint64_t cell_bytes;
    kvf_strides local;
    kvf_strides remote;
    kvf_token_share remote_tokens; /**< counted in steps, as in kvf_plan_cut */
    const kvf_copy_lane *lanes;    /**< owned by the plan */
    uint32_t lane_count;
    bool whole_blocks; /**< a step is a whole kernel block of both sides */
    /** How many neighbouring lanes lie in one page and are visited block by block; 1: each lane by itself. */
    uint32_t lanes_per_page;
} kvf_copy_rule;

KVF_API uint32_t kvf_plan_rule_count(const kvf_plan *plan);

/** The i-th rule, ordered by source; owned by the plan; NULL past the last. */
KVF_API const kvf_copy_rule *kvf_plan_get_rule(const kvf_plan *plan, uint32_t i);

/** The rules of one source: indices for kvf_plan_get_rule(). Empty when there is no such source. */
KVF_API kvf_range kvf_plan_source_rules(const kvf_plan *plan, uint32_t source);

/* ---- prediction ------------------------------------------------------------------------------ */

/** What moving costs on one transport. */
typedef struct kvf_cost_model {
    double ns_per_run;
    double ns_per_byte;
    double ns_per_source; /**< once for each remote rank of a request */
    double reserved[5];   /**< 0 */
} kvf_cost_model;

typedef struct kvf_prediction {
    size_t struct_size; /**< sizeof(kvf_prediction), set by the caller */
    uint64_t bytes;     /**< as they move: converted elements in the shorter of their two types */
    uint64_t runs;      /**< if no two blocks are neighbours in memory; 0 where the plan converts */
    double ns;
} kvf_prediction;

/**
 * Predicts one request of `tokens` tokens (and one state for each state group) from one source, with blocks scattered
 * over memory. Cost: O(blocks of the tokens).
 *
 * @param tokens  up to 2^32 - 1
 * @param cost    NULL: `ns` is 0
 * @param out     struct_size is set by the caller; the rest is filled in
 * @return KVF_OK, KVF_E_RANGE (no such source; tokens), KVF_E_INVALID
 */
KVF_API kvf_status kvf_plan_predict(const kvf_plan *plan, uint32_t source, uint64_t tokens,
                                    const kvf_cost_model *cost, kvf_prediction *out);

#ifdef __cplusplus
}
#endif

#endif
