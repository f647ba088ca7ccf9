/*
 * The inside of a plan, for the files of this room and the rooms below.
 */
#ifndef KVF_PLAN_ROOM_H
#define KVF_PLAN_ROOM_H

#include <kvferry/plan.h>

#include "base/base.h"
#include "plan/walk.h"
#include "shard/shard.h"

/**
 * A way to walk the steps of a group: rules that share it share the pieces of a request.
 *
 * If kernel blocks hold the same number of tokens on both sides there are two walks. One takes the pieces that are
 * whole blocks, and counts each as one step: its rules treat a block as a single step, like a state, and so can join
 * everything that touches in it. The other takes the remaining pieces.
 */
typedef struct kvf_plan_walk {
    uint32_t group;
    kvf_walk_side local, remote;
    /* Steps of a whole block if there are two walks; 0: this walk takes all pieces. */
    uint32_t whole_steps;
    bool takes_whole;
} kvf_plan_walk;

/** Whether a walk takes a piece, and how many steps of its rules the piece is. */
static inline bool kvf_plan_walk_takes(const kvf_plan_walk *walk, const kvf_walk_piece *piece,
                                       uint32_t *steps) {
    bool whole = piece->steps == walk->whole_steps;
    *steps = whole ? 1 : piece->steps;
    return walk->whole_steps == 0 || whole == walk->takes_whole;
}

struct kvf_plan {
    const kvf_shard *local;
    const kvf_engine *remote;
    kvf_engine *adapted;     /* `remote` in terms of the local model if its model differs; NULL otherwise */
    const kvf_engine *given; /* the engine that the caller gave */
    bool *asked;             /* [group]: whether the plan fills it */
    bool converts;           /* some elements have another type there: the plan has walks, but no rules */
    bool
        cuts_cells; /* the two sides cut some cells into different pieces, so that runs are parts of a cell */
    kvf_plan_options options;
    uint32_t *source_ranks; /* ascending */
    kvf_range *source_rules;
    uint32_t source_count;
    kvf_plan_cut *cuts;
    uint32_t cut_count;
    kvf_copy_rule *rules;
    uint32_t *rule_walks; /* [rule]: index into walks */
    uint32_t rule_count;
    kvf_copy_lane *lanes; /* of all rules */
    uint32_t lane_count;
    kvf_plan_walk *walks;
    uint32_t walk_count;
    uint64_t steps; /* cost of the cover: how many ranks were visited */
};

/** The layers of a group that the plan fills, as indices into the group's layers: those held here and in
 * options.layers. */
kvf_range kvf_plan_wanted_layers(const kvf_plan *plan, uint32_t group);

/**
 * kvf_plan_build() without rules, for callers that only need the cover: which rank is read for which cells.
 */
kvf_status kvf_plan_build_cover(const kvf_shard *local, const kvf_engine *remote,
                                const kvf_plan_options *options, kvf_plan **out);

/**
 * Chooses the rank that is read for every wanted unit, layer and token: fills cuts and sources. After an error the plan
 * is incomplete, and kvf_plan_free() frees it.
 */
kvf_status kvf_plan_cover(kvf_plan *plan);

/** The type in which elements of a part move: the shorter of the two, or the local one if both are equally short. */
kvf_dtype kvf_plan_stream_type(const kvf_plan *plan, uint32_t group, uint32_t part);

/** Bytes of one step of a cut, over all its layers, in the type in which they move. */
uint64_t kvf_plan_step_bytes(const kvf_plan *plan, const kvf_plan_cut *cut);

/** The only walk of a cut, in a plan that converts. */
uint32_t kvf_plan_walk_of(const kvf_plan *plan, const kvf_plan_cut *cut);

/** KVF_OK; KVF_E_UNSUPPORTED if the plan converts and so has no runs: the detail names the part and its types. */
kvf_status kvf_plan_check_runs(const kvf_plan *plan);

/** Turns the cuts into copy rules: fills rules, lanes and walks; if the plan converts, only walks. */
kvf_status kvf_plan_fuse(kvf_plan *plan);

/** The steps [begin, end) of a group; none if both are equal. */
typedef struct kvf_step_span {
    uint64_t begin, end;
} kvf_step_span;

/**
 * Counts, from the rules, what one source gives to a request of these steps, clipped to windows: exactly the bytes and
 * runs that the request would have if no two of its logical blocks were neighbours in memory.
 *
 * @param source  of the plan
 * @param spans   one for each group of the model
 * @param bytes   receives the bytes
 * @param runs    receives the runs
 */
void kvf_plan_count(const kvf_plan *plan, uint32_t source, const kvf_step_span *spans, uint64_t *bytes,
                    uint64_t *runs);

/** How kvf_say_plan() describes a plan. */
typedef struct kvf_plan_words {
    uint64_t tokens;     /* of the request that is predicted */
    kvf_cost_model cost; /* assumed */
    const char *kind;    /* kind of transport that the cost is for */
    uint32_t most_lines; /* for the sources; 0: each source has its own lines, whatever their number */
    const char *indent;  /* before each line */
} kvf_plan_words;

/**
 * Adds a description of a plan: lines for each source that say what is read from it and what a request is predicted to
 * cost, then a line for all together. With `most_lines`, neighbouring sources that give equally much share lines.
 *
 * @return KVF_OK, KVF_E_NOMEM
 */
kvf_status kvf_say_plan(kvf_text *text, const kvf_plan *plan, const kvf_plan_words *how);

/** How the cells of one piece of a block pair form runs. */
typedef struct kvf_run_shape {
    uint64_t bytes;                                  /* of each run */
    uint64_t outer_count, outer_local, outer_remote; /* count and strides of the outer loop */
    uint64_t inner_count, inner_local, inner_remote;
} kvf_run_shape;

/**
 * The runs of `rows` rows of one block pair under a rule. Fused cells already contain neighbouring units, so only rows
 * of one unit remain to be joined, and then units whose rows are whole on both sides.
 */
static inline kvf_run_shape kvf_rule_shape(const kvf_copy_rule *rule, uint64_t rows) {
    kvf_run_shape s = {rule->cell_bytes, rows,        rule->local.row,
                       rule->remote.row, rule->units, rule->local.unit,
                       rule->remote.unit};
    if (rows == 1 || (rule->local.row == rule->cell_bytes && rule->remote.row == rule->cell_bytes)) {
        s.bytes = rule->cell_bytes * rows;
        s.outer_count = 1;
        if (rule->units > 1 && rule->local.unit == s.bytes && rule->remote.unit == s.bytes) {
            s.bytes *= rule->units;
            s.inner_count = 1;
        }
    } else if (rule->local.unit > rule->local.row) {
        /* The outer loop is over rows, so that local memory is written in ascending order. */
        s = (kvf_run_shape){rule->cell_bytes, rule->units,     rule->local.unit, rule->remote.unit, rows,
                            rule->local.row,  rule->remote.row};
    }
    KVF_ASSERT(s.bytes * s.outer_count * s.inner_count == rule->cell_bytes * rule->units * rows);
    return s;
}

#endif
