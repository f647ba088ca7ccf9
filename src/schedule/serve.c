/* Serving requests to consumers, and the end of requests. */
#include <inttypes.h>
#include <stdio.h>

#include "schedule/schedule.h"

/*
 * The name under which consumers read the blocks of a finished request: its id, the incarnation of this process and the
 * generation, so that a late consumer never reads blocks of another request.
 */
static kvf_status name_transfer(const kvf_schedule *s, record *r) {
    char suffix[48];
    if (r->serve.id.data)
        return KVF_OK;
    size_t length = (size_t)snprintf(suffix, sizeof suffix, "~%" PRIx64 ".%" PRIu64, s->options.incarnation,
                                     r->key.generation);
    char *id = kvf_alloc(r->key.id.size + length, 1);
    if (!id)
        return kvf_nomem("the name of a transfer");
    memcpy(id, r->key.id.data, r->key.id.size);
    memcpy(id + r->key.id.size, suffix, length);
    r->serve.id = (kvf_request_id){id, r->key.id.size + length};
    return KVF_OK;
}

/* Takes ownership of `groups`, even if it fails. */
static kvf_status order_serving(kvf_schedule *s, record *r, kvf_group_steps *groups) {
    order *o = kvf_make_order(s, r, r->serve.push ? KVF_INSTRUCT_PUSH : KVF_INSTRUCT_HOLD, 0, groups);
    kvf_free(groups);
    if (!o)
        return kvf_nomem("an instruction");
    kvf_queue_order(s, o, r, &r->serve.order);
    r->serve.state = PART_PLANNED;
    return KVF_OK;
}

static kvf_status plan_serving(kvf_schedule *s, record *r, const kvf_block_table *tables,
                               uint32_t group_count, uint64_t tokens) {
    kvf_group_steps *groups = NULL;
    kvf_status status = name_transfer(s, r);
    if (!status)
        status = kvf_make_groups(s, tables, group_count, 0, tokens, &groups);
    return status ? status : order_serving(s, r, groups);
}

/* Plans a push whose blocks come chunk by chunk, under the consumers' name for it. */
static kvf_status plan_growing(kvf_schedule *s, record *r, uint64_t tokens) {
    kvf_group_steps *groups = NULL;
    kvf_status status = kvf_make_steps(s, tokens, &groups);
    return status ? status : order_serving(s, r, groups);
}

kvf_status kvf_schedule_push(kvf_schedule *s, const kvf_request_key *request, const kvf_block_table *tables,
                             uint32_t group_count, uint64_t tokens) {
    record *r;
    kvf_status status = kvf_live_record(s, request, &r);
    if (status)
        return status;
    if (!r->serve.push || r->serve.state != PART_WAITING)
        return kvf_fail(KVF_E_INVALID, "the request was not added with `push`, or is being pushed already");
    if (r->load.state != PART_NONE && r->load.state != PART_STOPPING)
        return kvf_fail(KVF_E_INVALID, "the request is not loaded yet, so it cannot be pushed");
    if (tokens == 0)
        return kvf_fail(KVF_E_RANGE, "tokens is 0; there is nothing to push");
    if (!tables && group_count == 0)
        return plan_growing(s, r, tokens);
    return plan_serving(s, r, tables, group_count, tokens);
}

/* Stops serving: KVF_OK or KVF_E_NOMEM. */
static kvf_status stop_serve(kvf_schedule *s, record *r, bool gone, bool *kept) {
    switch (r->serve.state) {
    case PART_WAITING:
    case PART_DONE:
        if (gone)
            r->serve.state = PART_NONE;
        return KVF_OK;
    case PART_PLANNED:
        kvf_withdraw_order(s, &r->serve.order);
        r->serve.state = gone ? PART_NONE : PART_WAITING;
        return KVF_OK;
    case PART_ACTIVE:
    case PART_STOPPING:
        *kept = true;
        return kvf_cancel_part(s, r, r->serve.push ? KVF_INSTRUCT_PUSH : KVF_INSTRUCT_HOLD, &r->serve.state);
    default:
        return KVF_OK;
    }
}

/* ---- requests end ---------------------------------------------------------------------------- */

static const kvf_transfer_params *tell_params(kvf_schedule *s, const record *r, uint64_t tokens,
                                              uint64_t now_ns) {
    memcpy(s->params_id, r->serve.id.data,
           r->serve.id.size); /* the record may be freed before the id is read */
    s->params = (kvf_transfer_params){.struct_size = sizeof s->params,
                                      .engine = s->options.engine,
                                      .endpoint = s->options.endpoint,
                                      .public_key = s->options.public_key,
                                      .id = {s->params_id, r->serve.id.size},
                                      .tokens = tokens,
                                      .expiry_ns = kvf_add_or_most(now_ns, s->options.lease_ns),
                                      .push = r->serve.push};
    return &s->params;
}

kvf_status kvf_schedule_finished(kvf_schedule *s, const kvf_request_key *request,
                                 const kvf_block_table *tables, uint32_t group_count, uint64_t tokens,
                                 uint64_t now_ns, kvf_schedule_end *out) {
    record *r;
    kvf_status status = kvf_check_out(out, "kvf_schedule_end");
    if (!status)
        status = kvf_live_record(s, request, &r);
    if (status)
        return status;
    bool kept = false, plans = r->serve.state == PART_WAITING && tokens > 0;
    if (plans && r->load.state == PART_ACTIVE)
        return kvf_fail(KVF_E_INVALID,
                        "the request is still being loaded, and cannot have computed %llu tokens",
                        (unsigned long long)tokens);
    if (plans)
        status = plan_serving(s, r, tables, group_count, tokens);
    if (status)
        return status;
    status = kvf_stop_load(s, r, true, &kept);
    if (status) {
        if (plans) {
            kvf_withdraw_order(s, &r->serve.order);
            r->serve.state = PART_WAITING;
        }
        return status;
    }
    bool serves = r->serve.state == PART_PLANNED || r->serve.state == PART_ACTIVE;
    kvf_schedule_end end = {.keep = kept || serves};
    if (serves || r->serve.state == PART_DONE)
        end.params = tell_params(s, r, tokens, now_ns);
    kvf_fill_out(out, &end, sizeof end);
    r->ended = true;
    kvf_settle_record(s, r);
    return KVF_OK;
}

/* At most one part needs an order to stop, because a request that loads is not pushed yet. So a failure leaves nothing
 * half done.
 */
static kvf_status stop(kvf_schedule *s, record *r, bool gone, bool *blocks_free) {
    bool kept = false;
    kvf_status status = kvf_stop_load(s, r, gone, &kept);
    if (!status)
        status = stop_serve(s, r, gone, &kept);
    if (!status && blocks_free)
        *blocks_free = !kept;
    return status;
}

kvf_status kvf_schedule_abort(kvf_schedule *s, const kvf_request_key *request, bool *blocks_free) {
    if (!s || !request)
        return kvf_fail(KVF_E_INVALID, "kvf_schedule_abort: schedule or request is NULL");
    kvf_schedule_release_results(s);
    record *r = kvf_find_record(s, request);
    if (!r)
        return kvf_unknown_request(request, r);
    kvf_status status = stop(s, r, true, blocks_free);
    if (status)
        return status;
    r->ended = true;
    kvf_settle_record(s, r);
    return KVF_OK;
}

kvf_status kvf_schedule_preempted(kvf_schedule *s, const kvf_request_key *request, bool *blocks_free) {
    record *r;
    kvf_status status = kvf_live_record(s, request, &r);
    return status ? status : stop(s, r, false, blocks_free);
}
