/*
 * From cuts to copy rules.
 *
 * Each cut gives one *lane* for each of its layers: where its cells start on both sides, how wide they are, and the
 * *nest* of loops over rows and units that visits them. Where a side keeps its cells in pieces, the nest goes over
 * *grains* instead of cells, see split_cell(). Then lanes are made fewer and their cells wider, until nothing changes:
 *
 *   widen  units that are neighbours on both sides become one cell, and so do the rows of a step
 *   join   two lanes with the same nest, one starting where the cells of the other end, on both sides, become one
 *
 * Lanes with the same nest and equally wide cells form a *rule*. K and V of one layer, two tokens
 * and two heads in a page, in the same order on both sides:
 *
 *             |K t0 h0|K t0 h1|K t1 h0|K t1 h1|V t0 h0|V t0 h1|V t1 h0|V t1 h1|
 *
 *   pieces that are not whole blocks: a step is a token, of one row
 *   lanes     K: 2 units                      V: 2 units
 *   widen     |     K t0      |     K t1      |     V t0      |     V t1      |    cells of 2 heads
 *   rule      K and V of a token do not touch: two lanes in one page, each a cell a row
 *
 *   whole blocks: a step is a block, of two rows
 *   lanes     K: 2 rows x 2 units             V: 2 rows x 2 units
 *   widen     |               K               |               V               |    cells of 4 heads
 *   join      |                            K and V                            |    cells of 8 heads
 *   rule      one lane a layer; if layers lie behind one another in a block, they join too
 *
 * Nothing here depends on what a part is: any lanes that touch are joined, such as state with convolution, or layer
 * with layer.
 */
#include <stdlib.h>

#include "plan/plan.h"

/* A bound on what shards from other machines, which say how many pieces cells have, can make us allocate. 80 layers of
 * 128 heads in 128 pieces on both sides, cut differently, need 2^20 lanes. */
#define MAX_LANES (1u << 22)

/* The loops of a rule, without its cells and lanes. Nests are interned: lanes with equal nests have the same nest
 * number. */
typedef struct nest {
    uint32_t source, walk, group;
    uint32_t units, rows_per_step;
    kvf_strides local, remote;
    kvf_token_share remote_tokens;
} nest;

/* A lane that has no rule yet. */
typedef struct lane {
    kvf_copy_lane place;
    uint64_t cell_bytes;
    uint32_t nest;
} lane;

typedef struct fusion {
    kvf_plan *plan;
    nest *nests;
    uint32_t nest_count, nest_capacity;
    uint32_t *table; /* hash table of nests, see place_of(): two slots for each nest of the capacity */
    uint32_t *
        first_walks; /* [remote share % ranks]: the first walk of the current group with this share, if any */
    uint32_t walk_capacity;
    lane *lanes;
    uint32_t lane_count, lane_capacity;
} fusion;

static bool same_strides(const kvf_strides *a, const kvf_strides *b) {
    return a->block == b->block && a->row == b->row && a->unit == b->unit;
}

static bool same_nest(const nest *a, const nest *b) {
    return a->source == b->source && a->walk == b->walk && a->units == b->units &&
           a->rows_per_step == b->rows_per_step && same_strides(&a->local, &b->local) &&
           same_strides(&a->remote, &b->remote);
}

/* Hashes the fields that distinguish nests. */
static uint64_t hash_nest(const nest *n) {
    const uint64_t numbers[] = {n->source,      n->walk,       n->units,      n->rows_per_step,
                                n->local.block, n->local.row,  n->local.unit, n->remote.block,
                                n->remote.row,  n->remote.unit};
    uint64_t hash = 0;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        hash = (hash ^ numbers[i]) * UINT64_C(0x9E3779B97F4A7C15);
        hash ^= hash >> 29;
    }
    return hash;
}

/* The slot of a nest in the table: its number plus one, or 0 if it is not there yet. */
static uint32_t *place_of(fusion *f, const nest *wanted) {
    uint64_t at = hash_nest(wanted);
    for (;; at++) {
        uint32_t *place = &f->table[at & (2 * (uint64_t)f->nest_capacity - 1)];
        f->plan->steps++;
        if (*place == 0 || same_nest(&f->nests[*place - 1], wanted))
            return place;
    }
}

/* Doubles the capacity for nests, and makes a table with two slots for each. */
static kvf_status grow_nests(fusion *f) {
    uint32_t capacity = f->nest_capacity ? 2 * f->nest_capacity : 16;
    nest *nests = kvf_resize(f->nests, capacity, sizeof *nests);
    f->nests = nests ? nests : f->nests;
    uint32_t *table = nests ? kvf_alloc0(2 * (size_t)capacity, sizeof *table) : NULL;
    if (!table)
        return kvf_nomem("a plan");
    kvf_free(f->table);
    f->table = table;
    f->nest_capacity = capacity;
    for (uint32_t i = 0; i < f->nest_count; i++)
        *place_of(f, &f->nests[i]) = i + 1;
    return KVF_OK;
}

/* The number of a nest. `hint` is a guess: the lane before usually has the same. */
static kvf_status intern(fusion *f, const nest *wanted, uint32_t hint, uint32_t *out) {
    if (hint < f->nest_count && same_nest(&f->nests[hint], wanted)) {
        *out = hint;
        return KVF_OK;
    }
    kvf_status status = f->nest_count == f->nest_capacity ? grow_nests(f) : KVF_OK;
    if (status)
        return status;
    uint32_t *place = place_of(f, wanted);
    if (*place == 0) {
        f->nests[f->nest_count++] = *wanted;
        *place = f->nest_count;
    }
    *out = *place - 1;
    return KVF_OK;
}

/* Collapses loops into the cell as far as possible. `one_step`: no block has more than one step. */
static void widen(nest *n, uint64_t *cell_bytes, bool one_step) {
    KVF_ASSERT(n->units > 0 && n->rows_per_step > 0 && *cell_bytes > 0);
    for (bool changed = true; changed;) {
        changed = false;
        if (n->units > 1 && n->local.unit == *cell_bytes && n->remote.unit == *cell_bytes) {
            *cell_bytes *= n->units;
            n->units = 1;
            changed = true;
        }
        if (n->rows_per_step > 1 && n->local.row == *cell_bytes && n->remote.row == *cell_bytes) {
            *cell_bytes *= n->rows_per_step;
            n->local.row *= n->rows_per_step;
            n->remote.row *= n->rows_per_step;
            n->rows_per_step = 1;
            changed = true;
        }
    }
    /* Strides that no loop uses are made equal, so that they do not make nests differ. */
    if (n->units == 1)
        n->local.unit = n->remote.unit = 0;
    if (n->rows_per_step == 1 && one_step)
        n->local.row = n->remote.row = 0;
}

/* ---- cells in pieces ------------------------------------------------------------------------- */

/*
 * How the cells of a cut are split if a side keeps them in pieces. A grain is a run of bytes that is contiguous on both
 * sides; within a stretch both sides step evenly from grain to grain. So the planner treats a stretch of a cell as it
 * treats a range of units otherwise.
 *
 *   local     |  0   1   2   3  |  4   5   6   7  |      two pieces
 *   remote    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |          eight
 *   stretches |--- 4 grains ----|--- 4 grains ----|
 */
typedef struct cell_split {
    uint64_t grain_bytes;
    uint64_t stretch_bytes;             /* of the cell */
    uint64_t local_piece, remote_piece; /* bytes of a piece */
    uint32_t stretches;                 /* of a cell */
} cell_split;

static cell_split split_cell(const kvf_part_desc *part, const kvf_placement *local,
                             const kvf_placement *remote) {
    uint64_t cell = kvf_part_cell_bytes(part);
    cell_split split = {.local_piece = cell / local->pieces, .remote_piece = cell / remote->pieces};
    split.grain_bytes = kvf_gcd(split.local_piece, split.remote_piece);
    /* If a side's pieces are grains, it steps evenly through the whole cell, otherwise only inside a piece. */
    uint64_t local_reach = split.local_piece == split.grain_bytes ? cell : split.local_piece;
    uint64_t remote_reach = split.remote_piece == split.grain_bytes ? cell : split.remote_piece;
    split.stretch_bytes = local_reach < remote_reach ? local_reach : remote_reach;
    if (local_reach != cell && remote_reach != cell)
        split.stretch_bytes =
            split.grain_bytes; /* neither side's pieces are grains: they end in different places */
    split.stretches = (uint32_t)(cell / split.stretch_bytes);
    return split;
}

/* The stride from one grain of a stretch to the next. */
static uint64_t grain_step(const cell_split *split, const kvf_placement *placement, uint64_t piece_bytes) {
    return piece_bytes == split->grain_bytes ? placement->piece_stride : split->grain_bytes;
}

/* The offset of byte `at` of a cell from the cell's first byte. */
static uint64_t place_in_cell(const kvf_placement *placement, uint64_t piece_bytes, uint64_t at) {
    return at / piece_bytes * placement->piece_stride + at % piece_bytes;
}

/* ---- lanes ----------------------------------------------------------------------------------- */

/* Whether blocks can be whole on both sides: both have the same number of tokens, none missing in between, and the rows
 * fit in 32 bits. */
static bool has_whole_blocks(const kvf_plan_walk *walk, const kvf_group_desc *group) {
    uint32_t tokens = walk->local.kernel_steps;
    for (uint32_t p = 0; p < group->part_count; p++)
        if (group->parts[p].rows_per_step > UINT32_MAX / tokens)
            return false;
    return tokens == walk->remote.kernel_steps && tokens > 1 && walk->local.share.count == 1 &&
           walk->remote.share.count == 1;
}

static kvf_status grow_walks(fusion *f) {
    uint32_t capacity = f->walk_capacity ? 2 * f->walk_capacity : 8;
    kvf_plan_walk *walks = kvf_resize(f->plan->walks, capacity, sizeof *walks);
    if (!walks)
        return kvf_nomem("a plan");
    f->plan->walks = walks;
    f->walk_capacity = capacity;
    return KVF_OK;
}

static bool is_walk_of(const kvf_plan *plan, uint32_t walk, const kvf_plan_cut *cut) {
    return walk < plan->walk_count && plan->walks[walk].group == cut->group &&
           plan->walks[walk].remote.share.index == cut->tokens.index;
}

/*
 * The first walk of a cut, or the number of walks if there is none. There are seldom more shares than ranks, and then
 * each share has a place of its own. Otherwise the walks of the group, which are the last ones, are searched.
 */
static uint32_t find_walk(const kvf_plan *plan, uint32_t known, const kvf_plan_cut *cut) {
    if (is_walk_of(plan, known, cut))
        return known;
    uint32_t walk = plan->walk_count;
    if (cut->tokens.count <= plan->remote->shard_count)
        return walk;
    while (walk > 0 && plan->walks[walk - 1].group == cut->group)
        walk--;
    while (walk < plan->walk_count && !is_walk_of(plan, walk, cut))
        walk++;
    return walk;
}

/* The walks of a cut, `count` of them from `first` on; makes them if there are none. Cuts are ordered by group. */
static kvf_status walks_of(fusion *f, const kvf_plan_cut *cut, uint32_t *first, uint32_t *count) {
    kvf_plan *plan = f->plan;
    const kvf_held_group *local = &plan->local->groups[cut->group];
    const kvf_engine_group *remote = &plan->remote->groups[cut->group];
    uint32_t *known = &f->first_walks[cut->tokens.index % plan->remote->shard_count];
    *first = find_walk(plan, *known, cut);
    if (*first < plan->walk_count) {
        *known = *first;
        *count = plan->walks[*first].whole_steps ? 2 : 1;
        return KVF_OK;
    }
    kvf_status status = plan->walk_count + 2 > f->walk_capacity ? grow_walks(f) : KVF_OK;
    if (status)
        return status;
    kvf_plan_walk walk = {.group = cut->group,
                          .local = {local->kernel_steps, local->share},
                          .remote = {remote->kernel_steps, cut->tokens}};
    *first = *known = plan->walk_count;
    *count = 1;
    if (!plan->converts && has_whole_blocks(&walk, kvf_model_group(plan->local->model, cut->group))) {
        walk.whole_steps = walk.local.kernel_steps;
        plan->walks[plan->walk_count++] = walk;
        walk.takes_whole = true;
        *count = 2;
    }
    plan->walks[plan->walk_count++] = walk;
    return KVF_OK;
}

/* Whether blocks have a single step under the rules of a walk, on both sides. */
static bool one_step_a_block(const kvf_plan_walk *walk) {
    return walk->takes_whole || (walk->local.kernel_steps == 1 && walk->remote.kernel_steps == 1);
}

static kvf_status grow_lanes(fusion *f) {
    if (f->lane_count >= MAX_LANES)
        return kvf_fail(KVF_E_RANGE, "the plan has more than %u pieces", MAX_LANES);
    size_t capacity = 2 * (size_t)f->lane_capacity;
    lane *lanes = kvf_resize(f->lanes, capacity, sizeof *lanes);
    if (!lanes)
        return kvf_nomem("a plan");
    f->lanes = lanes;
    f->lane_capacity = (uint32_t)capacity;
    return KVF_OK;
}

/* Adds a lane with this nest, after widening it as far as possible. */
static kvf_status add_lane(fusion *f, nest *n, lane *s) {
    if (f->lane_count == f->lane_capacity) {
        kvf_status grown = grow_lanes(f);
        if (grown)
            return grown;
    }
    widen(n, &s->cell_bytes, one_step_a_block(&f->plan->walks[n->walk]));
    uint32_t hint = f->lane_count ? f->lanes[f->lane_count - 1].nest : 0;
    kvf_status status = intern(f, n, hint, &s->nest);
    if (!status)
        f->lanes[f->lane_count++] = *s;
    return status;
}

/* Adds one lane for each stretch of each unit's cell; `n` and `s` are those of whole cells. If rows fill the gap
 * between pieces on both sides, as in whole blocks of two engines that cut alike, the cells of a unit become one again,
 * and only the loop over units remains. */
static kvf_status add_stretches(fusion *f, const kvf_part_desc *part, const kvf_placement *local,
                                const kvf_placement *remote, const nest *n, const lane *whole) {
    const cell_split split = split_cell(part, local, remote);
    nest within = *n;
    lane first = *whole;
    within.units = (uint32_t)(split.stretch_bytes / split.grain_bytes);
    within.local.unit = grain_step(&split, local, split.local_piece);
    within.remote.unit = grain_step(&split, remote, split.remote_piece);
    first.cell_bytes = split.grain_bytes;
    widen(&within, &first.cell_bytes, one_step_a_block(&f->plan->walks[n->walk]));
    if (split.stretches == 1 && within.units == 1) {
        within.units = n->units;
        within.local.unit = n->local.unit;
        within.remote.unit = n->remote.unit;
        return add_lane(f, &within, &first);
    }
    kvf_status status = KVF_OK;
    for (uint32_t unit = 0; unit < n->units; unit++) {
        for (uint32_t i = 0; i < split.stretches && !status; i++) {
            lane s = first;
            uint64_t at = i * split.stretch_bytes;
            s.place.local_offset += unit * n->local.unit + place_in_cell(local, split.local_piece, at);
            s.place.remote_offset += unit * n->remote.unit + place_in_cell(remote, split.remote_piece, at);
            status = add_lane(f, &within, &s);
        }
    }
    return status;
}

static kvf_status add_layer(fusion *f, const kvf_plan_cut *cut, uint32_t walk, uint32_t layer) {
    const kvf_plan *plan = f->plan;
    const kvf_plan_walk *sides = &plan->walks[walk];
    const kvf_shard *remote = plan->remote->shards[plan->source_ranks[cut->source]];
    const kvf_placement *l = kvf_shard_placement(plan->local, cut->group, layer, cut->part);
    const kvf_placement *r = kvf_shard_placement(remote, cut->group, layer, cut->part);
    const kvf_part_desc *part = &kvf_model_group(plan->local->model, cut->group)->parts[cut->part];
    uint32_t local_begin = plan->local->groups[cut->group].parts[cut->part].units.begin;
    uint32_t remote_begin = remote->groups[cut->group].parts[cut->part].units.begin;
    KVF_ASSERT(cut->units.begin >= local_begin && cut->units.begin >= remote_begin);
    lane s = {
        .place = {.local_region = l->region,
                  .remote_region = r->region,
                  .layers = {layer, layer + 1},
                  .local_offset = l->offset + (uint64_t)(cut->units.begin - local_begin) * l->unit_stride,
                  .remote_offset = r->offset + (uint64_t)(cut->units.begin - remote_begin) * r->unit_stride},
        .cell_bytes = kvf_part_cell_bytes(part)};
    nest n = {.source = cut->source,
              .walk = walk,
              .group = cut->group,
              .units = cut->units.end - cut->units.begin,
              .rows_per_step = part->rows_per_step * (sides->takes_whole ? sides->whole_steps : 1),
              .local = {l->block_stride, l->row_stride, l->unit_stride},
              .remote = {r->block_stride, r->row_stride, r->unit_stride},
              .remote_tokens = cut->tokens};
    f->plan->cuts_cells = f->plan->cuts_cells || l->pieces != r->pieces;
    if (l->pieces > 1 || r->pieces > 1)
        return add_stretches(f, part, l, r, &n, &s);
    return add_lane(f, &n, &s);
}

static kvf_status make_lanes(fusion *f) {
    kvf_plan *plan = f->plan;
    size_t total = 0;
    for (uint32_t i = 0; i < plan->cut_count; i++) /* a lower bound: cells in pieces need more lanes */
        total += 2 * (size_t)(plan->cuts[i].layers.end - plan->cuts[i].layers.begin);
    if (total > MAX_LANES)
        return kvf_fail(KVF_E_RANGE, "the plan has %zu pieces; allowed: up to %u", total, MAX_LANES);
    f->lanes = kvf_alloc(total, sizeof *f->lanes);
    f->first_walks = kvf_alloc0(plan->remote->shard_count, sizeof *f->first_walks);
    if (!f->lanes || !f->first_walks)
        return kvf_nomem("a plan");
    f->lane_capacity = (uint32_t)total;
    for (uint32_t i = 0; i < plan->cut_count; i++) {
        const kvf_plan_cut *cut = &plan->cuts[i];
        uint32_t first = 0, count = 0;
        kvf_status status = walks_of(f, cut, &first, &count);
        for (uint32_t walk = first; walk < first + count; walk++)
            for (uint32_t layer = cut->layers.begin; layer < cut->layers.end && !status; layer++)
                status = add_layer(f, cut, walk, layer);
        if (status)
            return status;
        KVF_ASSERT(f->lane_count <= f->lane_capacity);
    }
    return KVF_OK;
}

/* ---- joining --------------------------------------------------------------------------------- */

/* Orders lanes by nest, then by place in memory. */
static int by_nest_and_place(const void *a, const void *b) {
    const lane *x = a, *y = b;
    const kvf_copy_lane *p = &x->place, *q = &y->place;
    if (x->nest != y->nest)
        return x->nest < y->nest ? -1 : 1;
    if (p->local_region != q->local_region)
        return p->local_region < q->local_region ? -1 : 1;
    if (p->remote_region != q->remote_region)
        return p->remote_region < q->remote_region ? -1 : 1;
    return p->local_offset < q->local_offset ? -1 : p->local_offset > q->local_offset;
}

static void sort_lanes(const fusion *f, int (*compare)(const void *, const void *)) {
    for (uint32_t i = 1; i < f->lane_count; i++) {
        if (compare(&f->lanes[i - 1], &f->lanes[i]) > 0) {
            qsort(f->lanes, f->lane_count, sizeof *f->lanes, compare);
            return;
        }
    }
}

static bool same_regions(const lane *a, const lane *b) {
    return a->place.local_region == b->place.local_region && a->place.remote_region == b->place.remote_region;
}

static bool touch(const lane *a, const lane *b) {
    return a->nest == b->nest && same_regions(a, b) &&
           a->place.local_offset + a->cell_bytes == b->place.local_offset &&
           a->place.remote_offset + a->cell_bytes == b->place.remote_offset;
}

/* Joins touching lanes; returns whether any were joined. */
static bool join(fusion *f) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < f->lane_count; i++) {
        lane *last = n ? &f->lanes[n - 1] : NULL;
        const lane *s = &f->lanes[i];
        if (last && touch(last, s)) {
            kvf_range *layers = &last->place.layers;
            last->cell_bytes += s->cell_bytes;
            layers->begin = layers->begin < s->place.layers.begin ? layers->begin : s->place.layers.begin;
            layers->end = layers->end > s->place.layers.end ? layers->end : s->place.layers.end;
        } else {
            f->lanes[n++] = *s;
        }
    }
    bool joined = n < f->lane_count;
    f->lane_count = n;
    return joined;
}

/* Bytes that one step of every walk moves, computed from the cuts and from the lanes: joining and widening must not
 * change their number. */
static inline uint64_t bytes_of_cuts(const kvf_plan *plan) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < plan->cut_count; i++) {
        const kvf_plan_cut *cut = &plan->cuts[i];
        const kvf_part_desc *part = &kvf_model_group(plan->local->model, cut->group)->parts[cut->part];
        uint64_t cells =
            (uint64_t)(cut->layers.end - cut->layers.begin) * (cut->units.end - cut->units.begin);
        for (uint32_t w = 0; w < plan->walk_count; w++) {
            const kvf_plan_walk *walk = &plan->walks[w];
            if (walk->group == cut->group && walk->remote.share.index == cut->tokens.index)
                bytes += cells * kvf_part_cell_bytes(part) * part->rows_per_step *
                         (walk->takes_whole ? walk->whole_steps : 1);
        }
    }
    return bytes;
}

static inline uint64_t bytes_of_lanes(const fusion *f) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < f->lane_count; i++) {
        const nest *n = &f->nests[f->lanes[i].nest];
        bytes += f->lanes[i].cell_bytes * n->units * n->rows_per_step;
    }
    return bytes;
}

static kvf_status join_and_widen(fusion *f) {
    for (;;) {
        sort_lanes(f, by_nest_and_place);
        if (!join(f))
            return KVF_OK;
        bool changed = false;
        for (uint32_t i = 0; i < f->lane_count; i++) {
            lane *s = &f->lanes[i];
            nest n = f->nests[s->nest];
            widen(&n, &s->cell_bytes, one_step_a_block(&f->plan->walks[n.walk]));
            uint32_t before = s->nest;
            kvf_status status = intern(f, &n, i ? f->lanes[i - 1].nest : before, &s->nest);
            if (status)
                return status;
            changed |= s->nest != before;
        }
        if (!changed)
            return KVF_OK;
    }
}

/* ---- rules ----------------------------------------------------------------------------------- */

/* Orders rules by source; `nest` was renumbered in that order. */
static int by_rule(const void *a, const void *b) {
    const lane *x = a, *y = b;
    if (x->nest != y->nest)
        return x->nest < y->nest ? -1 : 1;
    if (x->cell_bytes != y->cell_bytes)
        return x->cell_bytes < y->cell_bytes ? -1 : 1;
    return by_nest_and_place(a, b);
}

static kvf_status renumber_nests(fusion *f) {
    uint32_t *numbers = kvf_alloc(f->nest_count, sizeof *numbers);
    uint32_t *next = kvf_alloc0((size_t)f->plan->source_count + 1, sizeof *next); /* [source] */
    nest *sorted = kvf_alloc(f->nest_count, sizeof *sorted);
    kvf_status status = numbers && next && sorted ? KVF_OK : kvf_nomem("a plan");
    for (uint32_t i = 0; i < f->nest_count && !status; i++)
        next[f->nests[i].source + 1]++;
    for (uint32_t source = 0; source < f->plan->source_count && !status; source++)
        next[source + 1] += next[source];
    for (uint32_t i = 0; i < f->nest_count && !status; i++) {
        numbers[i] = next[f->nests[i].source]++;
        sorted[numbers[i]] = f->nests[i];
    }
    for (uint32_t i = 0; i < f->lane_count && !status; i++)
        f->lanes[i].nest = numbers[f->lanes[i].nest];
    kvf_free(numbers);
    kvf_free(next);
    if (status) {
        kvf_free(sorted);
        return status;
    }
    kvf_free(f->nests);
    f->nests = sorted;
    return KVF_OK;
}

static bool same_rule(const lane *a, const lane *b) {
    return a->nest == b->nest && a->cell_bytes == b->cell_bytes;
}

/*
 * How many lanes from `first` on lie one after another in one page on both sides. Their runs can touch only if a block
 * is visited as a whole.
 */
static uint32_t lanes_of_page(const fusion *f, uint32_t first) {
    const nest *n = &f->nests[f->lanes[first].nest];
    uint32_t i = first + 1;
    for (; i < f->lane_count; i++) {
        const lane *a = &f->lanes[i - 1], *b = &f->lanes[i];
        uint64_t distance = b->place.local_offset - a->place.local_offset;
        if (!same_rule(a, b) || !same_regions(a, b) ||
            distance != b->place.remote_offset - a->place.remote_offset || distance >= n->local.block ||
            distance >= n->remote.block)
            break;
    }
    return i - first;
}

/* One past the last lane of the rule that begins at `first`: its lanes have the same nest and cell, and the same number
 * of lanes in a page.
 */
static uint32_t end_of_rule(const fusion *f, uint32_t first, uint32_t per_page) {
    uint32_t i = first + per_page;
    while (i < f->lane_count && same_rule(&f->lanes[first], &f->lanes[i]) && lanes_of_page(f, i) == per_page)
        i += per_page;
    return i;
}

static void make_rule(fusion *f, uint32_t first, uint32_t end, uint32_t per_page) {
    kvf_plan *plan = f->plan;
    const nest *n = &f->nests[f->lanes[first].nest];
    KVF_ASSERT(per_page > 0 && end > first && (end - first) % per_page == 0);
    for (uint32_t i = first; i < end; i++)
        plan->lanes[i] = f->lanes[i].place;
    plan->rules[plan->rule_count] = (kvf_copy_rule){.source = n->source,
                                                    .group = n->group,
                                                    .units = n->units,
                                                    .rows_per_step = n->rows_per_step,
                                                    .cell_bytes = f->lanes[first].cell_bytes,
                                                    .local = n->local,
                                                    .remote = n->remote,
                                                    .remote_tokens = n->remote_tokens,
                                                    .lanes = plan->lanes + first,
                                                    .lane_count = end - first,
                                                    .whole_blocks = plan->walks[n->walk].takes_whole,
                                                    .lanes_per_page = per_page};
    plan->rule_walks[plan->rule_count] = n->walk;
    kvf_range *of_source = &plan->source_rules[n->source];
    if (of_source->end == 0)
        of_source->begin = plan->rule_count;
    KVF_ASSERT(of_source->end == 0 || of_source->end == plan->rule_count); /* rules are ordered by source */
    of_source->end = ++plan->rule_count;
}

static kvf_status make_rules(fusion *f) {
    kvf_plan *plan = f->plan;
    kvf_status status = renumber_nests(f);
    if (status)
        return status;
    sort_lanes(f, by_rule);
    uint32_t rules = 0;
    for (uint32_t i = 0; i < f->lane_count; rules++)
        i = end_of_rule(f, i, lanes_of_page(f, i));
    plan->rules = kvf_alloc(rules, sizeof *plan->rules);
    plan->rule_walks = kvf_alloc(rules, sizeof *plan->rule_walks);
    plan->lanes = kvf_alloc(f->lane_count, sizeof *plan->lanes);
    plan->source_rules = kvf_alloc0(plan->source_count, sizeof *plan->source_rules);
    if (!plan->rules || !plan->rule_walks || !plan->lanes || !plan->source_rules)
        return kvf_nomem("a plan");
    plan->lane_count = f->lane_count;
    for (uint32_t i = 0; i < f->lane_count;) {
        uint32_t per_page = lanes_of_page(f, i);
        uint32_t end = end_of_rule(f, i, per_page);
        make_rule(f, i, end, per_page);
        i = end;
    }
    KVF_ASSERT(plan->rule_count == rules);
    return KVF_OK;
}

/* Makes only the walks of a plan that converts: its cells have other bytes on either side, so there are no rules. */
static kvf_status make_walks(fusion *f) {
    kvf_plan *plan = f->plan;
    kvf_status status = KVF_OK;
    uint32_t first, count;
    f->first_walks = kvf_alloc0(plan->remote->shard_count, sizeof *f->first_walks);
    plan->source_rules = kvf_alloc0(plan->source_count, sizeof *plan->source_rules);
    if (!f->first_walks || !plan->source_rules)
        return kvf_nomem("a plan");
    for (uint32_t i = 0; i < plan->cut_count && !status; i++)
        status = walks_of(f, &plan->cuts[i], &first, &count);
    return status;
}

static kvf_status make_all_rules(fusion *f) {
    kvf_status status = make_lanes(f);
    if (!status)
        status = join_and_widen(f);
    KVF_ASSERT(status || bytes_of_lanes(f) == bytes_of_cuts(f->plan));
    return status ? status : make_rules(f);
}

kvf_status kvf_plan_fuse(kvf_plan *plan) {
    fusion f = {.plan = plan};
    kvf_status status = plan->converts ? make_walks(&f) : make_all_rules(&f);
    kvf_free(f.lanes);
    kvf_free(f.first_walks);
    kvf_free(f.nests);
    kvf_free(f.table);
    return status;
}
