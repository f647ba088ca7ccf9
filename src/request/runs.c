/*
 * Emitting runs: rules x lanes x pieces, each piece a small loop nest, touching runs merged.
 *
 * Only the first run of a piece can touch the last run before it: inside a piece kvf_rule_shape() has already
 * joined all that touches.
 */
#include "request/request.h"

void kvf_run_cursor_start(kvf_run_cursor *cursor, const kvf_request *request, uint32_t source) {
    kvf_range rules = kvf_plan_source_rules(request->plan, source);
    *cursor = (kvf_run_cursor){.request = request, .rule = rules.begin, .rule_end = rules.end};
}

/* Where runs go. */
typedef struct emitter {
    kvf_run *runs;
    size_t count, capacity;
} emitter;

/*
 * Emits the runs of one piece in one lane, from run number *at on. Returns false when the array is full
 * first; *at then says where to go on.
 */
static inline bool emit_piece(const kvf_copy_rule *rule, const kvf_copy_lane *lane, const kvf_piece *piece,
                              uint64_t *at, emitter *out) {
    kvf_run_shape s = kvf_rule_shape(rule, (uint64_t)piece->steps * rule->rows_per_step);
    /* No overflow: the last cell of the last block of both sides lies in a region. */
    uint64_t local = lane->local_offset + piece->local_block * rule->local.block +
                     (uint64_t)piece->local_step * rule->rows_per_step * rule->local.row;
    uint64_t remote = lane->remote_offset + piece->remote_block * rule->remote.block +
                      (uint64_t)piece->remote_step * rule->rows_per_step * rule->remote.row;
    uint64_t i = *at;
    if (i == 0 && out->count) {
        kvf_run *last = &out->runs[out->count - 1];
        if (last->local_offset + last->bytes == local && last->remote_offset + last->bytes == remote &&
            last->local_region == lane->local_region && last->remote_region == lane->remote_region) {
            last->bytes += s.bytes;
            i = 1;
        }
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

size_t kvf_run_cursor_next(kvf_run_cursor *c, kvf_run *runs, size_t capacity) {
    const kvf_plan *plan = c->request->plan;
    emitter out = {runs, 0, capacity};
    for (; c->rule < c->rule_end; c->rule++, c->lane = 0, c->piece = 0) {
        const kvf_copy_rule *rule = &plan->rules[c->rule];
        const kvf_walk_pieces *walk = &c->request->walks[plan->rule_walks[c->rule]];
        if (rule->lanes_inside) {
            for (; c->piece < walk->count; c->piece++, c->lane = 0)
                for (; c->lane < rule->lane_count; c->lane++)
                    if (!emit_piece(rule, &rule->lanes[c->lane], &walk->pieces[c->piece], &c->run, &out))
                        return out.count;
        } else {
            for (; c->lane < rule->lane_count; c->lane++, c->piece = 0)
                for (; c->piece < walk->count; c->piece++)
                    if (!emit_piece(rule, &rule->lanes[c->lane], &walk->pieces[c->piece], &c->run, &out))
                        return out.count;
        }
    }
    return out.count;
}
