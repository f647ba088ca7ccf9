/*
 * Proving a plan on addresses.
 *
 * For every cell of one step that the local shard wants, the proof finds all lanes of all rules that write its bytes.
 * Each remote token share that has tokens for us must have exactly one such lane, which must read from the address of
 * the same cell in the remote rank's own placement, with strides that keep this true in every block and step. A cell
 * that is kept in pieces is checked in parts that are contiguous on both sides. If whole blocks have rules of their
 * own, these are checked in the same way for every cell of one block.
 *
 * The lanes of a rule are looked up by where they write, so the time grows with the cells, and not with cells x lanes.
 */
#include <stdlib.h>

#include "plan/plan.h"

typedef struct proof {
    const kvf_plan *plan;
    uint32_t group, layer, part, row, unit; /* the cell */
    bool whole;                             /* whether rules of whole blocks are checked, or those of steps */
    kvf_cell_location local;
    uint64_t at;       /* the first byte of the cell that is checked */
    uint64_t bytes;    /* bytes from there on that are contiguous on both sides, as far as is known */
    uint32_t *answers; /* [remote token share]: lanes found */
    const kvf_copy_lane **lanes; /* rule by rule, each rule's by region and local offset */
} proof;

static kvf_status cell_fault(const proof *p, kvf_status status, const char *what, uint32_t rank) {
    const kvf_group_desc *group = kvf_model_group(p->plan->local->model, p->group);
    return kvf_fail(status, "group %s, layer %u, part %s, row %u, unit %u: %s (remote rank %u)", group->name,
                    group->layers[p->layer], group->parts[p->part].name, p->row, p->unit, what, rank);
}

/* The address of byte `at` of a cell; `together` receives how many bytes are contiguous from there on. */
static uint64_t address_in(const kvf_cell_location *cell, uint64_t at, uint64_t *together) {
    uint64_t piece = cell->bytes / cell->pieces;
    *together = piece - at % piece;
    return cell->offset + at / piece * cell->piece_stride + at % piece;
}

/* Finds the remote offset from which a lane of a rule reads local `offset` of step 0 of block 0; false if the lane does
 * not write there. */
static bool read_from(const kvf_copy_rule *rule, const kvf_copy_lane *lane, uint64_t offset, uint64_t *remote,
                      uint64_t *room) {
    if (offset < lane->local_offset)
        return false;
    for (uint64_t row = 0; row < rule->rows_per_step; row++) {
        uint64_t rest = offset - lane->local_offset;
        if (rest < row * rule->local.row)
            return false;
        rest -= row * rule->local.row;
        uint64_t unit = rule->units > 1 && rule->local.unit ? rest / rule->local.unit : 0;
        if (unit >= rule->units)
            continue;
        rest -= unit * rule->local.unit;
        if (rest >= rule->cell_bytes)
            continue;
        *remote = lane->remote_offset + row * rule->remote.row + unit * rule->remote.unit + rest;
        *room = rule->cell_bytes - rest;
        return true;
    }
    return false;
}

/* How many bytes behind its local offset a lane of a rule writes, at most, in step 0 of block 0. */
static uint64_t reach_of(const kvf_copy_rule *rule) {
    uint64_t reach = rule->cell_bytes;
    if (!kvf_mul_add(rule->rows_per_step, rule->local.row, reach, &reach) ||
        !kvf_mul_add(rule->units, rule->local.unit, reach, &reach))
        return UINT64_MAX;
    return reach;
}

/* The number of a rule's lanes that lie before an offset of a region. */
static uint32_t lanes_before(const kvf_copy_rule *rule, const kvf_copy_lane **lanes, uint32_t region,
                             uint64_t offset) {
    uint32_t begin = 0, end = rule->lane_count;
    while (begin < end) {
        const uint32_t middle = begin + (end - begin) / 2;
        const kvf_copy_lane *lane = lanes[middle];
        if (lane->local_region < region || (lane->local_region == region && lane->local_offset < offset))
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

static int compare_lanes(const void *left, const void *right) {
    const kvf_copy_lane *a = *(const kvf_copy_lane *const *)left, *b = *(const kvf_copy_lane *const *)right;
    if (a->local_region != b->local_region)
        return a->local_region < b->local_region ? -1 : 1;
    return (a->local_offset > b->local_offset) - (a->local_offset < b->local_offset);
}

/* NULL: there is not enough memory. */
static const kvf_copy_lane **sort_lanes(const kvf_plan *plan) {
    size_t count = 0;
    for (uint32_t i = 0; i < plan->rule_count; i++)
        count += plan->rules[i].lane_count;
    const kvf_copy_lane **lanes = kvf_alloc(count + 1, sizeof *lanes), **at = lanes;
    for (uint32_t i = 0; i < plan->rule_count && lanes; at += plan->rules[i++].lane_count) {
        for (uint32_t l = 0; l < plan->rules[i].lane_count; l++)
            at[l] = &plan->rules[i].lanes[l];
        qsort(at, plan->rules[i].lane_count, sizeof *at, compare_lanes);
    }
    return lanes;
}

static bool same_steps(const kvf_copy_rule *rule, kvf_strides strides, const kvf_placement *placement,
                       const kvf_part_desc *part, uint32_t kernel_steps) {
    return strides.block == placement->block_stride &&
           (kernel_steps == 1 || rule->whole_blocks ||
            strides.row * rule->rows_per_step == placement->row_stride * part->rows_per_step);
}

/* Whether a side of a walk has the block size and token share of its shard. */
static bool same_tokens(const kvf_walk_side *side, const kvf_held_group *held) {
    return side->kernel_steps == held->kernel_steps && side->share.index == held->share.index &&
           side->share.count == held->share.count && side->share.width == held->share.width;
}

static kvf_status check_answer(proof *p, uint32_t index, const kvf_copy_lane *lane, uint64_t remote,
                               uint64_t room) {
    const kvf_plan *plan = p->plan;
    const kvf_copy_rule *rule = &plan->rules[index];
    const kvf_plan_walk *walk = &plan->walks[plan->rule_walks[index]];
    const kvf_part_desc *part = &kvf_model_group(plan->local->model, p->group)->parts[p->part];
    uint32_t rank = plan->source_ranks[rule->source];
    const kvf_shard *shard = plan->remote->shards[rank];
    kvf_cell_location there = {.struct_size = sizeof there};
    if (kvf_shard_locate(shard, p->group, p->layer, p->part, 0, p->row, p->unit, &there) ||
        shard->groups[p->group].share.index != rule->remote_tokens.index)
        return cell_fault(p, KVF_E_MISMATCH, "the cell is read from a rank that does not hold it", rank);
    uint64_t together, offset = address_in(&there, p->at, &together);
    p->bytes = kvf_min_u64(p->bytes, together);
    if (there.region != lane->remote_region || offset != remote || room < p->bytes)
        return cell_fault(p, KVF_E_MISMATCH, "the cell is read from a wrong address", rank);
    if (walk->group != p->group || walk->takes_whole != rule->whole_blocks ||
        (walk->whole_steps != 0 && walk->whole_steps != walk->local.kernel_steps) ||
        !same_tokens(&walk->local, &plan->local->groups[p->group]) ||
        !same_tokens(&walk->remote, &shard->groups[p->group]))
        return cell_fault(p, KVF_E_MISMATCH, "the tokens are those of another share or block size", rank);
    if (!same_steps(rule, rule->local, kvf_shard_placement(plan->local, p->group, p->layer, p->part), part,
                    walk->local.kernel_steps) ||
        !same_steps(rule, rule->remote, kvf_shard_placement(shard, p->group, p->layer, p->part), part,
                    walk->remote.kernel_steps))
        return cell_fault(p, KVF_E_MISMATCH, "the address is right in the first block only", rank);
    if (p->answers[rule->remote_tokens.index]++)
        return cell_fault(p, KVF_E_OVERLAP, "the cell is written twice", rank);
    return KVF_OK;
}

/* Checks bytes from p->at on, and sets p->bytes to how many were checked. */
static kvf_status check_bytes(proof *p) {
    const kvf_plan *plan = p->plan;
    const kvf_engine_group *remote = &plan->remote->groups[p->group];
    memset(p->answers, 0, remote->share_count * sizeof *p->answers);
    uint64_t offset = address_in(&p->local, p->at, &p->bytes);
    kvf_status status = KVF_OK;
    const kvf_copy_lane **lanes = p->lanes;
    for (uint32_t i = 0; i < plan->rule_count && !status; lanes += plan->rules[i++].lane_count) {
        const kvf_copy_rule *rule = &plan->rules[i];
        if (rule->group != p->group || rule->whole_blocks != p->whole)
            continue;
        const uint64_t reach = reach_of(rule);
        uint32_t l = lanes_before(rule, lanes, p->local.region, offset > reach ? offset - reach : 0);
        for (; l < rule->lane_count && lanes[l]->local_region == p->local.region &&
               lanes[l]->local_offset <= offset && !status;
             l++) {
            uint64_t from, room;
            if (read_from(rule, lanes[l], offset, &from, &room))
                status = check_answer(p, i, lanes[l], from, room);
        }
    }
    kvf_token_share share = {0, remote->share_count, remote->share_width};
    for (; share.index < share.count && !status; share.index++)
        if (!p->answers[share.index] && kvf_shares_meet(share, plan->local->groups[p->group].share))
            status = cell_fault(p, KVF_E_UNCOVERED, "no rule writes the cell", UINT32_MAX);
    return status;
}

static kvf_status check_cell(proof *p) {
    kvf_status status =
        kvf_shard_locate(p->plan->local, p->group, p->layer, p->part, 0, p->row, p->unit, &p->local);
    for (p->at = 0; p->at < p->local.bytes && !status; p->at += p->bytes)
        status = check_bytes(p);
    return status;
}

/* Checks that the bytes that the rules of a group write for one step, or one block, over all remote token shares, are
 * as many as its cells have. */
static kvf_status check_totals(const kvf_plan *plan, uint32_t group, bool whole, uint32_t steps) {
    const kvf_group_desc *desc = kvf_model_group(plan->local->model, group);
    const kvf_held_group *held = &plan->local->groups[group];
    uint64_t wanted = 0, written = 0;
    for (uint32_t p = 0; p < desc->part_count; p++)
        wanted += (uint64_t)(held->parts[p].units.end - held->parts[p].units.begin) *
                  desc->parts[p].rows_per_step * kvf_part_cell_bytes(&desc->parts[p]);
    kvf_range layers = kvf_plan_wanted_layers(plan, group);
    wanted *= (uint64_t)(layers.end - layers.begin) * steps;
    uint64_t shares = 0;
    kvf_token_share share = {0, plan->remote->groups[group].share_count,
                             plan->remote->groups[group].share_width};
    for (; share.index < share.count; share.index++)
        shares += kvf_shares_meet(share, held->share);
    for (uint32_t i = 0; i < plan->rule_count; i++) {
        const kvf_copy_rule *rule = &plan->rules[i];
        if (rule->group == group && rule->whole_blocks == whole)
            written += rule->lane_count * rule->cell_bytes * rule->units * rule->rows_per_step;
    }
    if (written != wanted * shares)
        return kvf_fail(KVF_E_OVERLAP, "group %s: the rules write %llu bytes a step, its cells have %llu",
                        desc->name, (unsigned long long)written, (unsigned long long)(wanted * shares));
    return KVF_OK;
}

/* Checks every cell of `steps` steps of one block. */
static kvf_status check_cells(proof *p, uint32_t steps) {
    const kvf_shard *local = p->plan->local;
    const kvf_group_desc *group = kvf_model_group(local->model, p->group);
    kvf_range layers = kvf_plan_wanted_layers(p->plan, p->group);
    for (p->layer = layers.begin; p->layer < layers.end; p->layer++) {
        for (p->part = 0; p->part < group->part_count; p->part++) {
            kvf_range units = local->groups[p->group].parts[p->part].units;
            for (p->row = 0; p->row < group->parts[p->part].rows_per_step * steps; p->row++) {
                for (p->unit = units.begin; p->unit < units.end; p->unit++) {
                    kvf_status status = check_cell(p);
                    if (status)
                        return status;
                }
            }
        }
    }
    return check_totals(p->plan, p->group, p->whole, steps);
}

static kvf_status check_group(proof *p) {
    uint32_t whole_steps = 0;
    for (uint32_t w = 0; w < p->plan->walk_count; w++)
        if (p->plan->walks[w].group == p->group)
            whole_steps = p->plan->walks[w].whole_steps;
    p->whole = false;
    kvf_status status = check_cells(p, 1);
    if (status || !whole_steps)
        return status;
    p->whole = true;
    return check_cells(p, whole_steps);
}

kvf_status kvf_plan_verify(const kvf_plan *plan) {
    if (!plan)
        return kvf_fail(KVF_E_INVALID, "plan is NULL");
    kvf_status status = kvf_plan_check_runs(plan);
    if (status)
        return status;
    uint32_t groups = kvf_model_group_count(plan->local->model), shares = 1;
    for (uint32_t g = 0; g < groups; g++)
        if (plan->remote->groups[g].share_count > shares)
            shares = plan->remote->groups[g].share_count;
    proof p = {.plan = plan,
               .local = {.struct_size = sizeof p.local},
               .answers = kvf_alloc(shares, sizeof *p.answers),
               .lanes = sort_lanes(plan)};
    if (!p.answers || !p.lanes)
        status = kvf_nomem("a proof");
    for (p.group = 0; p.group < groups && !status; p.group++)
        status = check_group(&p);
    kvf_free(p.lanes);
    kvf_free(p.answers);
    return status;
}
