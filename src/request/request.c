/*
 * Sets a request: turns tables and token ranges into pieces.
 */
#include "request/request.h"

void kvf_request_id_text(kvf_request_id id, char text[KVF_ID_TEXT_BYTES]) {
    const unsigned char *bytes = id.data;
    size_t shown = bytes ? kvf_min_u64(id.size, KVF_ID_TEXT_BYTES - 4) : 0;
    for (size_t i = 0; i < shown; i++)
        text[i] = (char)(bytes[i] >= ' ' && bytes[i] < 0x7f ? bytes[i] : '?');
    memcpy(text + shown, shown < id.size ? "..." : "", shown < id.size ? 4 : 1);
}

kvf_status kvf_block_table_tail(const uint32_t *ids, uint32_t count, uint64_t tokens,
                                uint32_t tokens_per_block, kvf_block_table *out) {
    if ((count && !ids) || !out || tokens_per_block == 0)
        return kvf_fail(KVF_E_INVALID, "%s",
                        !out                    ? "out is NULL"
                        : tokens_per_block == 0 ? "tokens_per_block is 0"
                                                : "ids is NULL");
    uint64_t blocks = tokens / tokens_per_block + (tokens % tokens_per_block != 0);
    if (count > blocks)
        return kvf_fail(KVF_E_RANGE, "count is %u blocks, but %llu tokens fill only %llu of %u tokens", count,
                        (unsigned long long)tokens, (unsigned long long)blocks, tokens_per_block);
    if (blocks > UINT32_MAX)
        return kvf_fail(KVF_E_RANGE, "tokens is %llu: more than %u blocks", (unsigned long long)tokens,
                        UINT32_MAX);
    *out = (kvf_block_table){ids, count, (uint32_t)(blocks - count)};
    return KVF_OK;
}

kvf_status kvf_request_create(const kvf_plan *plan, kvf_request **out) {
    if (!plan || !out)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", plan ? "out" : "plan");
    kvf_request *request = kvf_alloc0(1, sizeof *request);
    if (!request)
        return kvf_nomem("a request");
    uint32_t groups = kvf_model_group_count(plan->local->model);
    request->plan = plan;
    request->walks = kvf_alloc0(plan->walk_count, sizeof *request->walks);
    request->next = kvf_alloc0(plan->walk_count, sizeof *request->next);
    request->begin = kvf_alloc0(groups, sizeof *request->begin);
    request->end = kvf_alloc0(groups, sizeof *request->end);
    request->asked = kvf_alloc0(groups, sizeof *request->asked);
    request->asked_next = kvf_alloc0(groups, sizeof *request->asked_next);
    if (!request->walks || !request->next || !request->begin || !request->end || !request->asked ||
        !request->asked_next) {
        kvf_request_free(request);
        return kvf_nomem("a request");
    }
    *out = request;
    return KVF_OK;
}

void kvf_request_free(kvf_request *request) {
    if (!request)
        return;
    for (uint32_t i = 0; i < request->plan->walk_count; i++) {
        if (request->walks)
            kvf_free(request->walks[i].pieces);
        if (request->next)
            kvf_free(request->next[i].pieces);
    }
    kvf_free(request->walks);
    kvf_free(request->next);
    kvf_free(request->begin);
    kvf_free(request->end);
    kvf_free(request->asked);
    kvf_free(request->asked_next);
    kvf_free(request->ids);
    kvf_free(request->ids_next);
    kvf_free(request);
}

const kvf_plan *kvf_request_plan(const kvf_request *request) {
    return request->plan;
}

/* ---- block tables ---------------------------------------------------------------------------- */

kvf_status kvf_table_look_up(const kvf_table_side *side, uint64_t position, uint64_t step,
                             uint32_t *kernel_block) {
    uint64_t kernel = position / side->kernel_steps;
    uint64_t logical = kernel / side->kernel_blocks_per_block;
    const kvf_block_table *table = side->table;
    if (logical < table->first_block || logical - table->first_block >= table->count)
        return kvf_fail(
            KVF_E_RANGE,
            "%s table: step %llu is in block %llu of the sequence, but the table has blocks [%u, %llu)",
            side->name, (unsigned long long)step, (unsigned long long)logical, table->first_block,
            (unsigned long long)table->first_block + table->count);
    uint32_t id = table->ids[logical - table->first_block];
    if (id == KVF_NO_BLOCK)
        return kvf_fail(KVF_E_RANGE, "%s table: step %llu is requested, but entry %llu has no block",
                        side->name, (unsigned long long)step,
                        (unsigned long long)(logical - table->first_block));
    if (id >= side->block_count)
        return kvf_fail(KVF_E_RANGE, "%s table: step %llu is in block %u, but the cache has %llu", side->name,
                        (unsigned long long)step, id, (unsigned long long)side->block_count);
    *kernel_block = id * side->kernel_blocks_per_block + (uint32_t)(kernel % side->kernel_blocks_per_block);
    return KVF_OK;
}

static kvf_status add_piece(kvf_walk_pieces *walk, kvf_piece piece) {
    if (walk->count == walk->capacity) {
        if (walk->capacity > UINT32_MAX / 2)
            return kvf_fail(KVF_E_RANGE, "the request has more than %u pieces", walk->capacity);
        uint32_t capacity = walk->capacity ? 2 * walk->capacity : 64;
        kvf_piece *pieces = kvf_resize(walk->pieces, capacity, sizeof *pieces);
        if (!pieces)
            return kvf_nomem("a request");
        walk->pieces = pieces;
        walk->capacity = capacity;
    }
    walk->pieces[walk->count++] = piece;
    walk->steps += piece.steps;
    return KVF_OK;
}

/* Looks up the blocks of a walk. Kernel block ids fit in 32 bits, because shards bound the number of kernel blocks. */
static kvf_status walk_tables(const kvf_plan_walk *sides, const kvf_table_side *local,
                              const kvf_table_side *remote, uint64_t begin, uint64_t end,
                              kvf_walk_pieces *out) {
    kvf_walk walk = {sides->local, sides->remote, begin, end};
    kvf_walk_piece at;
    while (kvf_walk_next(&walk, &at)) {
        uint32_t steps;
        if (!kvf_plan_walk_takes(sides, &at, &steps))
            continue;
        kvf_piece piece = {.local_step = (uint32_t)(at.local_position % local->kernel_steps),
                           .remote_step = (uint32_t)(at.remote_position % remote->kernel_steps),
                           .steps = steps};
        kvf_status status = kvf_table_look_up(local, at.local_position, at.step, &piece.local_block);
        if (!status)
            status = kvf_table_look_up(remote, at.remote_position, at.step, &piece.remote_block);
        KVF_ASSERT(status || piece.local_step + steps <= local->kernel_steps);
        KVF_ASSERT(status || piece.remote_step + steps <= remote->kernel_steps);
        if (!status)
            status = add_piece(out, piece);
        if (status)
            return status;
    }
    return KVF_OK;
}

kvf_status kvf_check_steps(uint64_t begin, uint64_t end) {
    if (begin > end)
        return kvf_fail(KVF_E_INVALID, "begin is %llu and end %llu; begin must not be after end",
                        (unsigned long long)begin, (unsigned long long)end);
    if (end > UINT64_MAX / 4)
        return kvf_fail(KVF_E_RANGE, "end is %llu; allowed: up to %llu", (unsigned long long)end,
                        (unsigned long long)(UINT64_MAX / 4));
    return KVF_OK;
}

static kvf_status check_group_request(const kvf_group_request *group) {
    kvf_status status = kvf_check_steps(group->begin, group->end);
    if (status)
        return status;
    if ((group->local.count && !group->local.ids) || (group->remote.count && !group->remote.ids))
        return kvf_fail(KVF_E_INVALID, "%s table: ids is NULL",
                        group->local.count && !group->local.ids ? "local" : "remote");
    return KVF_OK;
}

static uint64_t first_wanted(const kvf_request *request, uint32_t group, const kvf_group_request *wanted) {
    const kvf_group_desc *desc = kvf_model_group(request->plan->local->model, group);
    return kvf_first_moved(desc, wanted->begin, wanted->end);
}

static kvf_status fill_group(kvf_request *request, uint32_t group, const kvf_group_request *wanted) {
    const kvf_plan *plan = request->plan;
    kvf_status status = check_group_request(wanted);
    if (status)
        return status;
    if (!plan->asked[group] && wanted->begin < wanted->end)
        return kvf_fail(KVF_E_INVALID, "steps [%llu, %llu) are wanted, but the plan leaves this group out",
                        (unsigned long long)wanted->begin, (unsigned long long)wanted->end);
    const kvf_held_group *held = &plan->local->groups[group];
    const kvf_engine_group *remote_group = &plan->remote->groups[group];
    uint64_t begin = first_wanted(request, group, wanted);
    /* Backwards: the walk of a group's whole blocks comes last, and finds a table that does not reach at its first block
     * beyond. The other one passes over whole blocks without looking them up, however many there are. */
    for (uint32_t w = plan->walk_count; w-- > 0 && !status;) {
        const kvf_plan_walk *sides = &plan->walks[w];
        if (sides->group != group)
            continue;
        kvf_table_side local = {"local", &wanted->local, sides->local.kernel_steps,
                                held->kernel_blocks_per_block, held->block_count};
        kvf_table_side remote = {"remote", &wanted->remote, sides->remote.kernel_steps,
                                 remote_group->kernel_blocks_per_block, remote_group->block_count};
        status = walk_tables(sides, &local, &remote, begin, wanted->end, &request->next[w]);
    }
    return status;
}

/* Makes both sets of pieces equally large, so that a request no larger than an earlier one allocates nothing. */
static kvf_status match_capacity(const kvf_request *request) {
    for (uint32_t w = 0; w < request->plan->walk_count; w++) {
        kvf_walk_pieces *current = &request->walks[w];
        uint32_t capacity = request->next[w].capacity;
        if (current->capacity >= capacity)
            continue;
        kvf_piece *pieces = kvf_resize(current->pieces, capacity, sizeof *pieces);
        if (!pieces)
            return kvf_nomem("a request");
        current->pieces = pieces;
        current->capacity = capacity;
    }
    return KVF_OK;
}

const kvf_group_request *kvf_request_groups(const kvf_request *request) {
    return request->asked;
}

static kvf_status make_room_for_ids(kvf_request *request, size_t count) {
    if (count <= request->id_capacity)
        return KVF_OK;
    /* The tables that are set point into `ids`, so they move with it. */
    uint32_t *ids = kvf_alloc(count, sizeof *ids), *next = kvf_alloc(count, sizeof *next);
    if (!ids || !next) {
        kvf_free(ids);
        kvf_free(next);
        return kvf_nomem("a request");
    }
    const uint32_t groups = kvf_model_group_count(request->plan->local->model);
    size_t at = 0;
    for (uint32_t g = 0; g < groups; g++) {
        kvf_block_table *tables[2] = {&request->asked[g].local, &request->asked[g].remote};
        for (int side = 0; side < 2; at += tables[side++]->count) {
            if (tables[side]->count > 0)
                memcpy(ids + at, tables[side]->ids, tables[side]->count * sizeof *ids);
            tables[side]->ids = ids + at;
        }
    }
    kvf_free(request->ids);
    kvf_free(request->ids_next);
    request->ids = ids;
    request->ids_next = next;
    request->id_capacity = count;
    return KVF_OK;
}

/* Copies the new groups beside those that are set. */
static kvf_status keep_groups(kvf_request *request, const kvf_group_request *groups, uint32_t count) {
    size_t ids = 0;
    for (uint32_t g = 0; g < count; g++)
        ids += (size_t)groups[g].local.count + groups[g].remote.count;
    kvf_status status = make_room_for_ids(request, ids);
    if (status)
        return status;
    uint32_t *at = request->ids_next;
    for (uint32_t g = 0; g < count; g++) {
        request->asked_next[g] = groups[g];
        kvf_block_table *tables[2] = {&request->asked_next[g].local, &request->asked_next[g].remote};
        for (int side = 0; side < 2; at += tables[side++]->count) {
            if (tables[side]->count > 0)
                memcpy(at, tables[side]->ids, tables[side]->count * sizeof *at);
            tables[side]->ids = at;
        }
    }
    return KVF_OK;
}

kvf_status kvf_request_set(kvf_request *request, const kvf_group_request *groups, uint32_t group_count) {
    if (!request || !groups)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", request ? "groups" : "request");
    const kvf_plan *plan = request->plan;
    uint32_t model_groups = kvf_model_group_count(plan->local->model);
    if (group_count != model_groups)
        return kvf_fail(KVF_E_INVALID, "group_count is %u; the model has %u groups", group_count,
                        model_groups);
    for (uint32_t w = 0; w < plan->walk_count; w++)
        request->next[w] =
            (kvf_walk_pieces){.pieces = request->next[w].pieces, .capacity = request->next[w].capacity};
    for (uint32_t g = 0; g < group_count; g++) {
        kvf_status status = fill_group(request, g, &groups[g]);
        if (status)
            return kvf_fail_in(status, "group %s: ", kvf_model_group(plan->local->model, g)->name);
    }
    kvf_status status = keep_groups(request, groups, group_count);
    if (!status)
        status = match_capacity(request);
    if (status)
        return status;
    for (uint32_t g = 0; g < group_count; g++) {
        request->begin[g] = first_wanted(request, g, &groups[g]);
        request->end[g] = groups[g].end;
    }
    for (uint32_t w = 0; w < plan->walk_count; w++)
        KVF_ASSERT(request->next[w].count <= request->walks[w].capacity);
    kvf_walk_pieces *filled = request->next;
    request->next = request->walks;
    request->walks = filled;
    kvf_group_request *asked = request->asked_next;
    request->asked_next = request->asked;
    request->asked = asked;
    uint32_t *ids = request->ids_next;
    request->ids_next = request->ids;
    request->ids = ids;
    return KVF_OK;
}

void kvf_request_steps(const kvf_request *request, uint32_t group, uint64_t *begin, uint64_t *end) {
    bool known = group < kvf_model_group_count(request->plan->local->model);
    *begin = known ? request->begin[group] : 0;
    *end = known ? request->end[group] : 0;
}

uint64_t kvf_request_bytes(const kvf_request *request, uint32_t source) {
    const kvf_plan *plan = request->plan;
    kvf_range rules = kvf_plan_source_rules(plan, source);
    uint64_t bytes = 0;
    for (uint32_t i = 0; plan->converts && i < plan->cut_count; i++)
        if (plan->cuts[i].source == source)
            bytes += kvf_plan_step_bytes(plan, &plan->cuts[i]) *
                     request->walks[kvf_plan_walk_of(plan, &plan->cuts[i])].steps;
    for (uint32_t i = rules.begin; i < rules.end; i++) {
        const kvf_copy_rule *rule = &plan->rules[i];
        bytes += rule->cell_bytes * rule->units * rule->rows_per_step * rule->lane_count *
                 request->walks[plan->rule_walks[i]].steps;
    }
    return bytes;
}

uint64_t kvf_request_run_count(const kvf_request *request, uint32_t source) {
    kvf_run runs[256];
    kvf_run_cursor cursor;
    uint64_t total = 0;
    if (kvf_run_cursor_start(&cursor, request, source))
        return 0;
    for (size_t n; (n = kvf_run_cursor_next(&cursor, runs, sizeof runs / sizeof *runs)) > 0;)
        total += n;
    return total;
}
