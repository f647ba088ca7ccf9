/*
 * Emitting runs: rules x lanes x pieces, each piece a small loop nest, touching runs merged.
 *
 * Only the first run of a piece can touch the run before it: inside a piece kvf_rule_shape() has already joined all
 * runs that touch.
 */
#include "request/request.h"

/* The contents of a kvf_run_cursor. */
typedef struct place {
    const kvf_request *request;
    uint32_t rule, rule_end;
    uint32_t lane, lane_in_page;
    uint32_t piece;
    uint64_t run; /* within the piece */
} place;

_Static_assert(sizeof(place) <= sizeof(kvf_run_cursor), "a place must fit into a cursor");

kvf_status kvf_run_cursor_start(kvf_run_cursor *cursor, const kvf_request *request, uint32_t source) {
    if (!cursor || !request)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !cursor ? "cursor" : "request");
    kvf_range rules = kvf_plan_source_rules(request->plan, source);
    const place start = {.request = request, .rule = rules.begin, .rule_end = rules.end};
    memcpy(cursor, &start, sizeof start);
    return kvf_plan_check_runs(request->plan);
}

/* The array that receives runs. */
typedef struct emitter {
    kvf_run *runs;
    size_t count, capacity;
} emitter;

/* The first byte of a piece on one side. Cannot overflow, because the last cell of the last block lies in a region. */
static inline uint64_t first_byte(uint64_t offset, uint32_t block, uint32_t step, const kvf_strides *strides,
                                  const kvf_copy_rule *rule) {
    return offset + block * strides->block + (uint64_t)step * rule->rows_per_step * strides->row;
}

static inline bool touches(const kvf_run *last, uint64_t local, uint64_t remote, const kvf_copy_lane *lane) {
    return last->local_offset + last->bytes == local && last->remote_offset + last->bytes == remote &&
           last->local_region == lane->local_region && last->remote_region == lane->remote_region;
}

/*
 * Emits the runs of one piece in one lane, from run number *at on. Returns false if the array is full before the end;
 * *at is then the run to continue with.
 */
static inline bool emit_piece(const kvf_copy_rule *rule, const kvf_copy_lane *lane, const kvf_piece *piece,
                              uint64_t *at, emitter *out) {
    kvf_run_shape s = kvf_rule_shape(rule, (uint64_t)piece->steps * rule->rows_per_step);
    uint64_t local =
        first_byte(lane->local_offset, piece->local_block, piece->local_step, &rule->local, rule);
    uint64_t remote =
        first_byte(lane->remote_offset, piece->remote_block, piece->remote_step, &rule->remote, rule);
    uint64_t i = *at;
    KVF_ASSERT(i < s.outer_count * s.inner_count);
    if (i == 0 && out->count > 0 && touches(&out->runs[out->count - 1], local, remote, lane)) {
        out->runs[out->count - 1].bytes += s.bytes;
        i = 1;
    }
    uint64_t outer = i, inner = 0;
    if (s.inner_count > 1) {
        outer = i / s.inner_count;
        inner = i % s.inner_count;
    }
    for (; outer < s.outer_count; outer++, inner = 0) {
        uint64_t l = local + outer * s.outer_local, r = remote + outer * s.outer_remote;
        uint64_t room = out->capacity - out->count;
        uint64_t end = s.inner_count - inner <= room ? s.inner_count : inner + room;
        kvf_run *run = out->runs + out->count;
        KVF_ASSERT(inner < s.inner_count && end >= inner);
        out->count += end - inner;
        for (uint64_t k = inner; k < end; k++)
            *run++ = (kvf_run){l + k * s.inner_local, r + k * s.inner_remote, s.bytes, lane->local_region,
                               lane->remote_region};
        if (end < s.inner_count) {
            *at = outer * s.inner_count + end;
            return false;
        }
    }
    *at = 0;
    return true;
}

/* Both regions as one number, which is never UINT64_MAX. */
static inline uint64_t regions_of(uint32_t local, uint32_t remote) {
    return (uint64_t)local << 32 | remote;
}

/*
 * Emits whole pieces of one page of lanes until one does not fit, which *piece and *lane then name. The fast path: the
 * rule is a copy, so that the compiler knows that stores to runs cannot change it; most pieces have as many rows as the
 * one before, and so the same shape, and most shapes are a single run.
 */
static inline __attribute__((always_inline)) void emit_pages(const kvf_copy_rule *shared_rule, bool one_run,
                                                             uint32_t lanes_per_page,
                                                             const kvf_copy_lane *lanes,
                                                             const kvf_walk_pieces *walk, uint32_t *piece,
                                                             uint32_t *lane, emitter *out) {
    const kvf_copy_rule rule = *shared_rule;
    const kvf_piece *const pieces = walk->pieces;
    const uint32_t count = walk->count;
    const uint64_t local_step = rule.rows_per_step * rule.local.row;
    const uint64_t remote_step = rule.rows_per_step * rule.remote.row;
    kvf_run_shape s = {0};
    uint64_t shape_rows = 0, shape_runs = 1;
    kvf_run *restrict run = out->runs + out->count;
    const kvf_run *const full = out->runs + out->capacity;
    /* The end of the last run, in local variables; in a region that does not exist if there is no run yet. */
    uint64_t local_end = 0, remote_end = 0, regions_end = UINT64_MAX;
    if (out->count > 0) {
        local_end = run[-1].local_offset + run[-1].bytes;
        remote_end = run[-1].remote_offset + run[-1].bytes;
        regions_end = regions_of(run[-1].local_region, run[-1].remote_region);
    }
    uint32_t i = *piece, l = *lane;
    for (; i < count; i++, l = 0) {
        const kvf_piece *p = &pieces[i];
        uint64_t rows = (uint64_t)p->steps * rule.rows_per_step;
        if (one_run) {
            s.bytes = rule.cell_bytes * rows;
        } else if (rows != shape_rows) {
            s = kvf_rule_shape(&rule, rows);
            shape_rows = rows;
            shape_runs = s.outer_count * s.inner_count;
        }
        uint64_t local_place = p->local_block * rule.local.block + p->local_step * local_step;
        uint64_t remote_place = p->remote_block * rule.remote.block + p->remote_step * remote_step;
        for (; l < lanes_per_page; l++) {
            uint64_t local = lanes[l].local_offset + local_place,
                     remote = lanes[l].remote_offset + remote_place;
            const uint32_t local_region = lanes[l].local_region, remote_region = lanes[l].remote_region;
            const uint64_t regions = regions_of(local_region, remote_region);
            bool merges = local == local_end && remote == remote_end && regions == regions_end;
            if (shape_runs > (uint64_t)(full - run) + merges)
                goto stop;
            regions_end = regions;
            if (merges)
                run[-1].bytes += s.bytes;
            if (shape_runs == 1) {
                if (!merges)
                    *run++ = (kvf_run){local, remote, s.bytes, local_region, remote_region};
                local_end = local + s.bytes;
                remote_end = remote + s.bytes;
                continue;
            }
            uint64_t inner = merges;
            for (uint64_t outer = 0; outer < s.outer_count; outer++, inner = 0)
                for (; inner < s.inner_count; inner++)
                    *run++ = (kvf_run){local + outer * s.outer_local + inner * s.inner_local,
                                       remote + outer * s.outer_remote + inner * s.inner_remote, s.bytes,
                                       local_region, remote_region};
            local_end = run[-1].local_offset + s.bytes;
            remote_end = run[-1].remote_offset + s.bytes;
        }
    }
stop:
    *piece = i;
    *lane = l;
    out->count = (size_t)(run - out->runs);
    KVF_ASSERT(out->count <= out->capacity && l < lanes_per_page);
}

/* Whether every piece is a single run, because its rows are neighbours on both sides or there is only one. */
static bool is_straight(const kvf_copy_rule *rule) {
    bool rows_join = rule->local.row == rule->cell_bytes && rule->remote.row == rule->cell_bytes;
    return rule->units == 1 && (rows_join || (rule->whole_blocks && rule->rows_per_step == 1));
}

/* Has compiled variants for the most common rules: one lane in a page, one run for each piece. */
static void emit_whole(const kvf_copy_rule *rule, const kvf_copy_lane *lanes, const kvf_walk_pieces *walk,
                       uint32_t *piece, uint32_t *lane, emitter *out) {
    bool one_run = is_straight(rule);
    const kvf_copy_lane first = *lanes;
    if (rule->lanes_per_page > 1)
        emit_pages(rule, one_run, rule->lanes_per_page, lanes, walk, piece, lane, out);
    else if (one_run)
        emit_pages(rule, true, 1, &first, walk, piece, lane, out);
    else
        emit_pages(rule, false, 1, &first, walk, piece, lane, out);
}

/* Emits the runs of a rule page by page; the lanes of one page go together through all pieces. False if the array is
 * full before the end.
 */
static bool emit_rule(place *c, const kvf_copy_rule *rule, const kvf_walk_pieces *walk, emitter *out) {
    for (; c->lane < rule->lane_count; c->lane += rule->lanes_per_page, c->piece = 0) {
        const kvf_copy_lane *lanes = rule->lanes + c->lane;
        KVF_ASSERT(c->lane + rule->lanes_per_page <= rule->lane_count &&
                   c->lane_in_page < rule->lanes_per_page);
        while (c->piece < walk->count) {
            if (c->run == 0)
                emit_whole(rule, lanes, walk, &c->piece, &c->lane_in_page, out);
            if (c->piece == walk->count)
                break;
            if (!emit_piece(rule, &lanes[c->lane_in_page], &walk->pieces[c->piece], &c->run, out))
                return false;
            if (++c->lane_in_page == rule->lanes_per_page) {
                c->lane_in_page = 0;
                c->piece++;
            }
        }
    }
    return true;
}

size_t kvf_run_cursor_next(kvf_run_cursor *cursor, kvf_run *runs, size_t capacity) {
    place at;
    memcpy(&at, cursor, sizeof at);
    const kvf_plan *plan = at.request->plan;
    emitter out = {.runs = runs, .capacity = capacity};
    for (; at.rule < at.rule_end; at.rule++, at.lane = 0)
        if (!emit_rule(&at, &plan->rules[at.rule], &at.request->walks[plan->rule_walks[at.rule]], &out))
            break;
    memcpy(cursor, &at, sizeof at);
    return out.count;
}

/* ---- nests ------------------------------------------------------------------------------------ */

static bool span_of(const kvf_run_shape *s, uint64_t outer_step, uint64_t inner_step, uint64_t *out) {
    uint64_t outer;
    return kvf_mul_add(s->outer_count - 1, outer_step, s->bytes, &outer) &&
           kvf_mul_add(s->inner_count - 1, inner_step, outer, out);
}

bool kvf_nest_measure(const kvf_run_shape *shape, kvf_nest_size *out) {
    uint64_t runs;
    return shape->bytes > 0 && shape->outer_count > 0 && shape->inner_count > 0 &&
           kvf_mul(shape->outer_count, shape->inner_count, &runs) &&
           kvf_mul(runs, shape->bytes, &out->bytes) &&
           span_of(shape, shape->outer_local, shape->inner_local, &out->local) &&
           span_of(shape, shape->outer_remote, shape->inner_remote, &out->remote) &&
           out->bytes <= out->local && out->bytes <= out->remote;
}

/* The array that receives nests of one shape. */
typedef struct nest_emitter {
    kvf_run *nests;
    size_t count, capacity;
    kvf_run_shape *shape; /* of those that are there */
} nest_emitter;

/* Adds the nests of one rule, from the cursor's place on. False if the array is full, or the next nest has another
 * shape. */
static bool emit_nests(place *c, const kvf_copy_rule *rule, const kvf_walk_pieces *walk, nest_emitter *out) {
    kvf_run_shape shape = {0};
    uint64_t shape_rows = 0;
    for (; c->lane < rule->lane_count; c->lane += rule->lanes_per_page, c->piece = 0)
        for (; c->piece < walk->count; c->piece++, c->lane_in_page = 0) {
            const kvf_piece *piece = &walk->pieces[c->piece];
            const uint64_t rows = (uint64_t)piece->steps * rule->rows_per_step;
            if (rows != shape_rows)
                shape = kvf_rule_shape(rule, rows);
            shape_rows = rows;
            if (out->count == 0)
                *out->shape = shape;
            if (memcmp(&shape, out->shape, sizeof shape) != 0)
                return false;
            for (; c->lane_in_page < rule->lanes_per_page; c->lane_in_page++) {
                const kvf_copy_lane *lane = &rule->lanes[c->lane + c->lane_in_page];
                if (out->count == out->capacity)
                    return false;
                out->nests[out->count++] = (kvf_run){
                    first_byte(lane->local_offset, piece->local_block, piece->local_step, &rule->local, rule),
                    first_byte(lane->remote_offset, piece->remote_block, piece->remote_step, &rule->remote,
                               rule),
                    shape.bytes * shape.outer_count * shape.inner_count, lane->local_region,
                    lane->remote_region};
            }
        }
    return true;
}

size_t kvf_run_cursor_next_nests(kvf_run_cursor *cursor, kvf_run *nests, size_t capacity,
                                 kvf_run_shape *shape) {
    place at;
    memcpy(&at, cursor, sizeof at);
    const kvf_plan *plan = at.request->plan;
    nest_emitter out = {.nests = nests, .capacity = capacity, .shape = shape};
    KVF_ASSERT(at.run == 0 && capacity > 0);
    for (; at.rule < at.rule_end; at.rule++, at.lane = 0)
        if (!emit_nests(&at, &plan->rules[at.rule], &at.request->walks[plan->rule_walks[at.rule]], &out))
            break;
    memcpy(cursor, &at, sizeof at);
    return out.count;
}
