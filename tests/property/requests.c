#include "requests.h"

#include <string.h>

#include "forms.h"

/* Blocks of the sequence that a faulty table does not have. */
typedef struct lost_blocks {
    uint32_t begin, end;
} lost_blocks;

/* Whether the rank wants a step that lies in a lost block of that side, by counting through the steps. */
static bool is_touched(const world *w, const asked *ask, uint32_t local_rank, uint32_t group, uint32_t side,
                       lost_blocks lost) {
    const group_tables *tables = &w->tables[group];
    const rank_group *held = &w->engines[LOCAL].ranks[local_rank].groups[group];
    const rank_group *remote = remote_shares(w, group);
    layer_span layers = wanted_layers(w, ask, local_rank, group);
    bool wants = false;
    for (uint32_t p = 0; p < w->models[LOCAL].groups[group].part_count; p++)
        wants |= units_of(&held->parts[p]) > 0 && layers.begin < layers.end;
    uint32_t position[SIDES][MAX_SHARES] = {{0}};
    for (uint32_t step = 0; step < tables->end && wants; step++) {
        rank_group share = remote ? *remote : (rank_group){.share_count = 1, .share_width = 1};
        share.share_index = step / share.share_width % share.share_count;
        uint32_t of[SIDES] = {held->share_index, share.share_index}, block[SIDES];
        if (keeps(held, step))
            block[LOCAL] = position[LOCAL][of[LOCAL]]++ / w->engines[LOCAL].tokens[group];
        block[REMOTE] = position[REMOTE][of[REMOTE]]++ / w->engines[REMOTE].tokens[group];
        if (keeps(held, step) && step >= tables->first && block[side] >= lost.begin && block[side] < lost.end)
            return true;
    }
    return false;
}

/* Whether a remote rank has layers of a group that the local model has, too. */
static bool has_layers_of_both(const world *w, uint32_t rank, uint32_t group) {
    const rank_group *held = &w->engines[REMOTE].ranks[rank].groups[group];
    for (uint32_t layer = 0; layer < w->models[LOCAL].layer_counts[group]; layer++) {
        const uint32_t there = remote_layer(w, group, layer);
        if (there != NO_ID && there >= held->layers_begin && there < held->layers_end)
            return true;
    }
    return false;
}

static uint32_t beyond(const world *w, uint32_t local_rank, uint32_t group, uint32_t side) {
    if (side == LOCAL)
        return w->engines[LOCAL].ranks[local_rank].groups[group].block_count;
    uint32_t least = UINT32_MAX - 1;
    const engine_world *e = &w->engines[REMOTE];
    for (uint32_t i = 0; i < e->rank_count; i++)
        if (has_layers_of_both(w, i, group) && e->ranks[i].groups[group].block_count < least)
            least = e->ranks[i].groups[group].block_count;
    return least;
}

/* Asks for a group that the plan leaves out, or for a range that runs backwards, or for too many groups. */
static bool make_invalid(const world *w, const asked *ask, uint32_t at, faulty_request *out) {
    const recipe *r = w->recipe;
    uint32_t group = w->models[LOCAL].group_order[at];
    out->expected = KVF_E_INVALID;
    (void)snprintf(out->named, sizeof out->named, r->fault == FAULT_COUNT ? "group_count" : "group g%u",
                   group);
    if (r->fault == FAULT_COUNT)
        out->group_count += r->fault_at % 2 ? 1 : UINT32_MAX;
    else if (r->fault == FAULT_BACKWARDS)
        out->groups[at].begin = out->groups[at].end + 1 + r->fault_at % 3;
    else if (!ask->groups[group])
        out->groups[at].end = out->groups[at].begin + 1 + r->fault_at % 3;
    else
        return false;
    return true;
}

bool make_faulty(const world *w, const asked *ask, uint32_t local_rank, faulty_request *out) {
    const recipe *r = w->recipe;
    if (r->fault == FAULT_NONE)
        return false;
    fill_request_form(w, ask, out->groups);
    out->group_count = w->models[LOCAL].group_count;
    uint32_t at = r->fault_group % out->group_count, group = w->models[LOCAL].group_order[at];
    if (make_invalid(w, ask, at, out))
        return true;
    const table_world *t = &w->tables[group].side[r->fault_side];
    uint32_t needed = t->needed_end - t->needed_begin;
    if (t->count == 0 || needed == 0)
        return false;
    kvf_block_table *table = r->fault_side == LOCAL ? &out->groups[at].local : &out->groups[at].remote;
    uint32_t *ids = arena_take(t->count, sizeof *ids);
    memcpy(ids, t->ids, t->count * sizeof *ids);
    uint32_t block = t->needed_begin + r->fault_at % needed;
    lost_blocks lost = {block, block + 1};
    if (r->fault == FAULT_SHORT) {
        lost = (lost_blocks){t->needed_end - 1, UINT32_MAX};
        table->count = lost.begin - t->first_block;
    } else if (r->fault == FAULT_LATE) {
        lost = (lost_blocks){0, t->needed_begin + 1};
        uint32_t skipped = lost.end - t->first_block;
        ids += skipped;
        table->count -= skipped;
        table->first_block = lost.end;
    } else if (r->fault == FAULT_HOLE) {
        ids[block - t->first_block] = KVF_NO_BLOCK;
    } else {
        ids[block - t->first_block] =
            r->fault_at % 2 ? UINT32_MAX - 1 : beyond(w, local_rank, group, r->fault_side);
    }
    table->ids = ids;
    out->expected = is_touched(w, ask, local_rank, group, r->fault_side, lost) ? KVF_E_RANGE : KVF_OK;
    return true;
}
