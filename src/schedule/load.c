/* The load of a request: how much, into which blocks, and how it is stopped. */
#include "schedule/schedule.h"

kvf_status kvf_reserve_source(kvf_schedule *s, record *r) {
    if (r->load.state != PART_WAITING || r->load.push || r->load.reserved || s->options.heartbeats)
        return KVF_OK;
    order *o = kvf_make_order(s, r, KVF_INSTRUCT_RESERVE, 0, NULL);
    if (!o)
        return kvf_nomem("an instruction");
    kvf_queue_order(s, o, r, &r->load.order);
    return KVF_OK;
}

/* Drops the source of a waiting load; the workers stop keeping it alive. */
static kvf_status drop_source(kvf_schedule *s, record *r) {
    if (r->load.reserved) {
        order *o = kvf_make_order(s, r, KVF_INSTRUCT_CANCEL, KVF_INSTRUCT_RESERVE, NULL);
        if (!o)
            return kvf_nomem("an instruction");
        kvf_queue_order(s, o, NULL, NULL);
    }
    kvf_withdraw_order(s, &r->load.order);
    r->load.state = PART_NONE;
    return KVF_OK;
}

kvf_status kvf_check_lease(kvf_schedule *s, record *r, uint64_t now_ns, bool *over) {
    const load_part *load = &r->load;
    /* A push has no lease, and a lease for which heartbeats were sent ends later than it first said. */
    *over = load->state == PART_WAITING && !load->push && !load->alive &&
            kvf_lease_expired(now_ns, load->expiry_ns, load->clock_offset_ns, s->options.margin_ns);
    return *over ? drop_source(s, r) : KVF_OK;
}

kvf_status kvf_schedule_match(kvf_schedule *s, const kvf_request_key *request, uint64_t computed_tokens,
                              uint64_t now_ns, uint64_t *tokens) {
    record *r;
    bool over;
    if (!tokens)
        return kvf_fail(KVF_E_INVALID, "kvf_schedule_match: tokens is NULL");
    kvf_status status = kvf_live_record(s, request, &r);
    if (!status)
        status = kvf_check_lease(s, r, now_ns, &over);
    if (status)
        return status;
    bool some = r->load.state == PART_WAITING && r->load.tokens > computed_tokens;
    *tokens = some ? r->load.tokens - computed_tokens : 0;
    return KVF_OK;
}

/* Tells the producer that it need not keep anything, because everything is here or the request is gone. */
static kvf_status notify(kvf_schedule *s, record *r) {
    order *o = kvf_make_order(s, r, KVF_INSTRUCT_NOTIFY, 0, NULL);
    if (!o)
        return kvf_nomem("an instruction");
    kvf_withdraw_order(s, &r->load.order);
    kvf_queue_order(s, o, NULL, NULL);
    r->load.state = PART_NONE;
    return KVF_OK;
}

static kvf_status check_load(const kvf_schedule *s, const record *r, uint64_t computed, uint64_t load) {
    uint64_t end;
    if (!kvf_add(computed, load, &end) || end > r->load.tokens)
        return kvf_fail(KVF_E_RANGE, "load_tokens is %llu after %llu; allowed: up to token %llu",
                        (unsigned long long)load, (unsigned long long)computed,
                        (unsigned long long)r->load.tokens);
    if (s->has_state && end != r->load.tokens)
        return kvf_fail(KVF_E_RANGE, "load_tokens is %llu after %llu; with states, exactly up to token %llu",
                        (unsigned long long)load, (unsigned long long)computed,
                        (unsigned long long)r->load.tokens);
    return KVF_OK;
}

static kvf_status plan_load(kvf_schedule *s, record *r, const kvf_block_table *tables, uint32_t group_count,
                            uint64_t computed, uint64_t load) {
    kvf_group_steps *groups = NULL;
    kvf_status status = check_load(s, r, computed, load);
    if (!status)
        status = kvf_make_groups(s, tables, group_count, computed, computed + load, &groups);
    if (status)
        return status;
    order *o = kvf_make_order(s, r, r->load.push ? KVF_INSTRUCT_EXPECT : KVF_INSTRUCT_PULL, 0, groups);
    if (!o) {
        kvf_free(groups);
        return kvf_nomem("an instruction");
    }
    kvf_withdraw_order(s, &r->load.order); /* a RESERVE that no worker has seen */
    kvf_queue_order(s, o, r, &r->load.order);
    kvf_free(r->load.groups);
    r->load.groups = groups;
    r->load.computed = computed;
    r->load.end = computed + load;
    r->load.state = PART_PLANNED;
    return KVF_OK;
}

kvf_status kvf_schedule_allocated(kvf_schedule *s, const kvf_request_key *request,
                                  const kvf_block_table *tables, uint32_t group_count,
                                  uint64_t computed_tokens, uint64_t load_tokens, uint64_t now_ns,
                                  bool *waits) {
    record *r;
    bool over = false;
    kvf_status status = kvf_live_record(s, request, &r);
    if (status)
        return status;
    bool starts = r->load.state == PART_WAITING;
    if (starts)
        status = kvf_check_lease(s, r, now_ns, &over);
    if (status)
        return status;
    if (over && load_tokens)
        return kvf_fail(KVF_E_TIMEOUT, "the lease from %s on the blocks to load has ended", r->load.engine);
    bool under_way = r->load.state == PART_PLANNED || r->load.state == PART_ACTIVE;
    if (!starts && !under_way && load_tokens)
        return kvf_fail(KVF_E_RANGE, "load_tokens is %llu, but there is nothing to load",
                        (unsigned long long)load_tokens);
    if (starts && !over)
        status =
            load_tokens ? plan_load(s, r, tables, group_count, computed_tokens, load_tokens) : notify(s, r);
    if (!status && waits)
        *waits = r->load.state == PART_PLANNED || r->load.state == PART_ACTIVE;
    return status;
}

/* ---- stopping -------------------------------------------------------------------------------- */

/* Stops a request that never had blocks for its load. */
static kvf_status leave_queue(kvf_schedule *s, record *r, bool gone) {
    if (!gone)
        return KVF_OK; /* the request goes on waiting */
    return r->load.reserved ? drop_source(s, r) : notify(s, r);
}

/* Stops a load that workers have not seen: it goes back to the queue, or leaves it. */
static kvf_status unplan(kvf_schedule *s, record *r, bool gone) {
    order *planned = r->load.order;
    r->load.order = NULL; /* the new order takes the slot first, because that can fail */
    r->load.state = PART_WAITING;
    kvf_status status = gone ? leave_queue(s, r, true) : kvf_reserve_source(s, r);
    if (status) {
        r->load.order = planned;
        r->load.state = PART_PLANNED;
        return status;
    }
    kvf_withdraw_order(s, &planned);
    return KVF_OK;
}

kvf_status kvf_stop_load(kvf_schedule *s, record *r, bool gone, bool *kept) {
    switch (r->load.state) {
    case PART_WAITING:
        return leave_queue(s, r, gone);
    case PART_PLANNED:
        return unplan(s, r, gone);
    case PART_ACTIVE:
    case PART_STOPPING:
        *kept = true;
        return kvf_cancel_part(s, r, r->load.push ? KVF_INSTRUCT_EXPECT : KVF_INSTRUCT_PULL, &r->load.state);
    default:
        return KVF_OK;
    }
}
