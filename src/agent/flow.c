/*
 * Flows: the writing of one push to one rank of a consumer.
 *
 * A flow exists from the consumer's EXPECT on, with or without a push. It writes one part after the other: a
 * range of tokens in a range of layers that has become ready, by a plan for those layers. It writes only while the
 * consumer allows it. At the end it reports, until it gets an answer, that all is written or never will be.
 */
#include <stdio.h>

#include "agent/budget.h"
#include "agent/early.h"
#include "agent/pace.h"
#include "agent/past.h"
#include "agent/peers.h"
#include "agent/push.h"
#include "agent/push_shape.h"
#include "agent/steps.h"
#include "agent/trace.h"
#include "model/model.h"
#include "shard/shard.h"

/* ---- expectations ---------------------------------------------------------------------------- */

kvf_flow *kvf_flow_of(const kvf_session *session, uint64_t generation) {
    kvf_flow *flow = NULL;
    HASH_FIND(hh, session->flow_table, &generation, sizeof generation, flow);
    return flow;
}

bool kvf_flow_wants_nothing(const kvf_flow *flow) {
    return !flow->push && !flow->groups && !flow->more && !flow->over;
}

static uint64_t table_bytes(const kvf_call_body *call) {
    uint64_t bytes = 0;
    for (uint32_t g = 0; g < call->group_count; g++)
        bytes += sizeof *call->groups + (uint64_t)call->groups[g].table.count * sizeof(uint32_t);
    return bytes;
}

/* When a flow ends: as its consumer says, or when the consumer is silent; or when a part that is to come is late. */
static uint64_t end_of(const kvf_flow *flow) {
    uint64_t end = kvf_min_u64(flow->until, kvf_budget_silent_at(flow->session));
    return flow->more ? kvf_min_u64(end, flow->more_until) : end;
}

/* The bytes kept for an expectation, with its places in tables. */
static uint64_t flow_bytes(const kvf_call_body *call) {
    return sizeof(kvf_flow) + call->request.size + 256 + table_bytes(call);
}

/* Adds the next part; with the last, all tables are here. */
static kvf_status add_part(kvf_flow *flow, const kvf_call_body *call) {
    kvf_agent *agent = flow->session->agent;
    kvf_status status =
        kvf_parts_add(&flow->parts, call->groups, call->group_count, call->first_id, call->more);
    if (status)
        return status;
    flow->more = call->more;
    flow->more_until = kvf_agent_now(agent) + agent->options.lease_ns;
    kvf_sweep_due(&agent->flow_sweep, flow->more_until);
    if (!flow->more) {
        flow->groups = kvf_parts_join(&flow->parts);
        flow->more = !flow->groups;
    }
    return flow->more == call->more ? KVF_OK : kvf_nomem("an expectation");
}

kvf_status kvf_flow_add(kvf_flow *flow, const kvf_call_body *call) {
    uint64_t bytes = table_bytes(call);
    if (call->first_id < flow->parts.ids)
        return KVF_OK; /* known */
    kvf_status status = kvf_budget_take(flow->session, bytes);
    if (status)
        return status;
    status = add_part(flow, call);
    if (status)
        kvf_budget_give(flow->session, bytes);
    else
        flow->kept_bytes += bytes;
    return status;
}

static void free_memory(kvf_flow *flow) {
    kvf_parts_free(&flow->parts);
    kvf_free(flow->groups);
    kvf_free(flow->detail);
    kvf_free(flow->id);
    kvf_free(flow);
}

kvf_status kvf_flow_make(kvf_session *session, const kvf_call_body *call, kvf_flow **out) {
    kvf_agent *agent = session->agent;
    if (session->flow_count >= agent->options.max_requests_per_peer)
        return kvf_fail(KVF_E_LIMIT, "this peer expects %u requests, the most allowed", session->flow_count);
    uint64_t bytes = flow_bytes(call), now = kvf_agent_now(agent), latest = kvf_budget_latest(agent, now);
    kvf_status status = kvf_budget_take(session, bytes);
    if (status)
        return status;
    kvf_flow *flow = kvf_alloc0(1, sizeof *flow);
    void *id = kvf_copy(call->request.data, call->request.size, 1);
    if (!flow || !id) {
        kvf_free(flow);
        kvf_free(id);
        kvf_budget_give(session, bytes);
        return kvf_nomem("an expectation");
    }
    *flow = (kvf_flow){.session = session,
                       .id = id,
                       .id_bytes = call->request.size,
                       .generation = call->generation,
                       .expected_ranks = call->rank_count,
                       .until = kvf_min_u64(call->time_ns, latest),
                       .latest = latest,
                       .packed = call->packed,
                       .kept_bytes = bytes};
    status = call->group_count ? add_part(flow, call) : KVF_OK;
    if (!status) {
        HASH_ADD(hh, session->flow_table, generation, sizeof flow->generation, flow);
        status = flow->hh.tbl ? kvf_flow_wait(flow) : kvf_nomem("an expectation");
    }
    if (status) {
        if (flow->hh.tbl)
            HASH_DEL(session->flow_table, flow);
        free_memory(flow);
        kvf_budget_give(session, bytes);
        return status;
    }
    DL_APPEND2(session->flows, flow, session_prev, session_next);
    session->flow_count++;
    kvf_sweep_due(&agent->flow_sweep, end_of(flow));
    *out = flow;
    return KVF_OK;
}

static void end_part(kvf_flow *flow);

void kvf_flow_free(kvf_flow *flow) {
    kvf_session *session = flow->session;
    kvf_call_drop(flow->told);
    if (flow->push)
        DL_DELETE(flow->push->flows, flow); /* NOLINT(clang-analyzer-core.NullDereference): as below */
    else
        kvf_flow_wait_no_more(flow);
    /* The analyser does not know that a flow with a session is in its list. */
    /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
    DL_DELETE2(session->flows, flow, session_prev, session_next);
    HASH_DEL(session->flow_table, flow);
    session->flow_count--;
    kvf_budget_give(session, flow->kept_bytes);
    kvf_session_less(session);
    session->last_used = kvf_agent_now(session->agent);
    if (kvf_carry_is_there(&flow->carry))
        end_part(flow);
    free_memory(flow);
}

/* ---- writing --------------------------------------------------------------------------------- */

typedef struct flow_part {
    uint64_t begin, end; /* tokens */
    kvf_range layers;
} flow_part;

/* Finds a part that is ready and not yet written; false: none. The flow then counts it as written. */
static bool next_part(kvf_flow *flow, uint32_t all, flow_part *part) {
    const kvf_push_ready *ready = &flow->push->ready;
    flow->before.tokens = flow->tokens;
    flow->before.layers = flow->layers;
    flow->before.chunk_end = flow->chunk_end;
    if (flow->layers == 0 && flow->tokens < ready->tokens) {
        *part = (flow_part){flow->tokens, ready->tokens, {0, all}};
        flow->tokens = ready->tokens;
        return true;
    }
    if (flow->layers == 0) {
        if (ready->layers == 0)
            return false;
        *part = (flow_part){flow->tokens, ready->chunk_end, {0, ready->layers}};
        flow->layers = ready->layers;
        flow->chunk_end = ready->chunk_end;
        return true;
    }
    uint32_t layers = ready->tokens >= flow->chunk_end ? all : ready->layers;
    if (layers <= flow->layers)
        return false;
    *part = (flow_part){flow->tokens, flow->chunk_end, {flow->layers, layers}};
    flow->layers = layers == all ? 0 : layers;
    if (layers == all)
        flow->tokens = flow->chunk_end;
    return true;
}

/* The steps of one group in a part: tokens as they become ready, states with the last chunk. */
static kvf_status group_part(const kvf_flow *flow, uint32_t g, const flow_part *part,
                             kvf_group_request *out) {
    const kvf_push *push = flow->push;
    const kvf_group_desc *group = kvf_model_group(kvf_engine_model(push->base.agent->engine), g);
    const kvf_group_steps *wanted = &flow->groups[g], *held = &push->base.groups[g];
    uint64_t begin = kvf_first_moved(group, wanted->begin, wanted->end);
    uint64_t end = wanted->end;
    *out = (kvf_group_request){.local = wanted->table, .remote = held->table};
    if (begin >= end)
        return KVF_OK;
    if (begin < held->begin || end > held->end)
        return kvf_fail(KVF_E_RANGE,
                        "group %s: steps [%llu, %llu) are wanted, but the producer has [%llu, %llu)",
                        group->name, (unsigned long long)begin, (unsigned long long)end,
                        (unsigned long long)held->begin, (unsigned long long)held->end);
    if (group->kind == KVF_GROUP_STATE) {
        kvf_status status = kvf_check_states(kvf_engine_model(push->base.agent->engine), flow->groups,
                                             push->base.groups, push->base.group_count);
        if (status)
            return status;
    }
    bool last = part->end == push->total_tokens;
    if (group->kind == KVF_GROUP_TOKENS) {
        begin = kvf_max_u64(begin, kvf_group_step_count(group, part->begin));
        end = kvf_min_u64(end, kvf_group_step_count(group, part->end));
    }
    if (begin < end && (group->kind == KVF_GROUP_TOKENS || last)) {
        out->begin = begin;
        out->end = end;
    }
    return KVF_OK;
}

static kvf_status start_part(kvf_flow *flow, const flow_part *part) {
    kvf_session *session = flow->session;
    uint32_t groups = flow->push->base.group_count;
    const kvf_push_plan *plan = NULL;
    kvf_status status = kvf_push_plan_for(session, part->layers, &plan);
    if (status || plan->source == UINT32_MAX)
        return status;
    kvf_group_request *wanted = kvf_alloc0(groups, sizeof *wanted);
    if (!status && !wanted)
        status = kvf_nomem("a request");
    for (uint32_t g = 0; g < groups && !status; g++)
        status = group_part(flow, g, part, &wanted[g]);
    if (!status)
        status = kvf_request_create(plan->plan, &flow->request);
    if (!status && (status = kvf_request_set(flow->request, wanted, groups)))
        status = kvf_fail_in(status, "as the consumer sees it: "); /* there our table is the remote one */
    kvf_free(wanted);
    if (!status)
        status = kvf_carry_push(&flow->carry, &flow->push->base,
                                flow->packed ? KVF_WAY_PACKED : kvf_way_of(&flow->push->base), flow->request,
                                plan->source, session, flow->generation, kvf_pace_start(&flow->push->base));
    if (kvf_carry_is_there(&flow->carry)) {
        DL_APPEND2(session->agent->moving_flows, flow, moving_prev, moving_next);
        if (!flow->posted)
            kvf_trace_reach_peer(&flow->push->base, KVF_MOMENT_POSTED, session);
        flow->posted = true;
    }
    if (status) {
        kvf_request_free(flow->request);
        flow->request = NULL;
    }
    return status;
}

static void end_part(kvf_flow *flow) {
    kvf_agent *agent = flow->session->agent;
    const kvf_carried carried = kvf_carry_counts(&flow->carry);
    flow->bytes += carried.bytes;
    flow->bytes_packed += carried.packed;
    flow->runs += carried.runs;
    flow->session->bytes_packed += carried.packed;
    agent->stats.bytes_written += carried.bytes;
    agent->stats.bytes_packed += carried.packed;
    agent->stats.runs += carried.runs;
    flow->cut = flow->cut || kvf_carry_was_cut(&flow->carry);
    kvf_peer_served(flow->session);
    if (kvf_session_is_past(flow->session))
        agent->due = 0; /* other flows may wait until it is left */
    kvf_carry_free(&flow->carry);
    kvf_request_free(flow->request);
    flow->request = NULL;
    /* The analyser does not know that a list's first element always has a last one before it. */
    /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
    DL_DELETE2(agent->moving_flows, flow, moving_prev, moving_next);
}

static void on_told(kvf_call *call, kvf_status status, const kvf_answer *answer) {
    kvf_flow *flow = call->context;
    flow->told = NULL;
    flow->heard = true;
    flow->refused = flow->refused || (answer && status == KVF_E_CANCELLED);
    if (status && !flow->status) {
        flow->status = status;
        flow->detail = kvf_strdup(kvf_error_detail());
    }
    if (flow->push)
        flow->session->agent->hooks->served(flow);
    else
        flow->session->agent->flow_sweep.due = 0; /* frees it */
}

/* After losing a connection under our writes, be it one that another session made, we cannot promise that no more of
 * them arrive, whatever else has ended the flow. */
static bool has_lost(const kvf_flow *flow) {
    return flow->status == KVF_E_PEER_LOST || flow->cut || flow->session->peer_lost;
}

/* The consumer then greets anew, and shuts us out, because we no longer answer for what it asked before. */
static void answer_withdraw(kvf_flow *flow, uint64_t number) {
    kvf_session *session = flow->session;
    const kvf_call_body call = {.number = number, .kind = KVF_CALL_WITHDRAW};
    const bool lost = has_lost(flow);
    session->joins_again = session->joins_again || lost;
    kvf_answer_status(session, &call, lost ? KVF_E_PEER_LOST : KVF_OK, "");
}

/* The records of the push, which are kept until its consumer has answered; NULL: none. Each flow keeps them, and a peer may
 * expect one push often. */
static const kvf_records *take_records(kvf_flow *flow) {
    const kvf_records *records = &flow->push->base.records;
    const uint64_t bytes = kvf_records_bytes(records);
    if (records->count == 0)
        return NULL;
    flow->status = kvf_budget_take(flow->session, bytes);
    if (flow->status) {
        flow->detail = kvf_strdup(kvf_error_detail());
        return NULL;
    }
    flow->kept_bytes += bytes;
    return records;
}

/* Nothing more will be written: tells the consumer, once, in the way that it waits for. */
static void tell(kvf_flow *flow) {
    kvf_session *session = flow->session;
    flow->over = true;
    if (flow->push)
        kvf_tickets_due(session->agent, 0);
    else
        session->agent->flow_sweep.due = 0;
    if (flow->withdraw_number)
        answer_withdraw(flow, flow->withdraw_number);
    if (flow->withdrawn)
        return;
    const kvf_records *records = flow->push && !flow->status ? take_records(flow) : NULL;
    kvf_call_body body = {.request = {flow->id, flow->id_bytes},
                          .generation = flow->generation,
                          .status = flow->status && has_lost(flow) ? KVF_E_PEER_LOST : flow->status,
                          .detail = flow->detail ? flow->detail : "",
                          .bytes = flow->bytes};
    if (flow->push)
        kvf_trace_reach_peer(&flow->push->base, KVF_MOMENT_WRITTEN, session);
    if (records) {
        body.records = records->all;
        body.record_count = records->count;
    }
    uint64_t deadline = kvf_agent_now(session->agent) + session->agent->options.lease_ns;
    kvf_status status =
        kvf_call_start(session, KVF_CALL_WRITTEN, &body, deadline, false, on_told, flow, &flow->told);
    if (!status)
        return;
    flow->heard =
        true; /* there is no answer to wait for: its next heartbeat tells the consumer, if it is there */
    if (!flow->status) {
        flow->status = status;
        flow->detail = kvf_strdup(kvf_error_detail());
    }
}

/* A connection that is to be passed over ends when nothing uses it, be it of another session. False: something does. */
static bool leave_past(kvf_session *session) {
    const kvf_flow *flow;
    if (!kvf_session_is_past(session))
        return true;
    DL_FOREACH2(session->flows, flow, session_next) {
        if (kvf_carry_is_there(&flow->carry))
            return false;
    }
    if (kvf_session_moves(session)) {
        kvf_agent_due(session->agent, kvf_agent_now(session->agent) + KVF_MILLISECOND);
        return false;
    }
    kvf_session_disconnect(session);
    return true;
}

/* Writes that were stopped when the client met us again may hang in the connection. New ones wait until they have ended,
 * and then go on by it; or until nothing else uses it, and then get another. False: neither yet. */
static bool leave_hanging(kvf_session *session) {
    const kvf_flow *flow;
    bool hangs = false;
    if (!session->may_hang)
        return true;
    DL_FOREACH2(session->flows, flow, session_next) {
        hangs = hangs || (flow->status && kvf_carry_is_there(&flow->carry));
    }
    if (hangs && kvf_session_goes_on(session)) {
        kvf_agent_due(session->agent, kvf_agent_now(session->agent) + KVF_MILLISECOND);
        return false;
    }
    session->may_hang = false;
    if (hangs)
        kvf_session_disconnect(session);
    return true;
}

void kvf_flow_pump(kvf_flow *flow) {
    kvf_session *session = flow->session;
    if (flow->packed && session->agent->stage && !session->takes_flows)
        return; /* it has not said yet that it takes flows: another JOIN is on its way */
    if (!flow->push || flow->over || kvf_carry_is_there(&flow->carry) || !session->shape)
        return;
    if ((kvf_session_is_past(session) || session->may_hang) && !kvf_work_is_ours(session->agent))
        return; /* its push begins, whose caller must not end a connection; a tick does */
    if (!leave_past(session) || !leave_hanging(session))
        return; /* the end of a flow pumps all, and so does a tick */
    uint32_t all = kvf_model_layer_count(kvf_engine_model(session->agent->engine));
    flow_part part;
    while (!kvf_carry_is_there(&flow->carry) && next_part(flow, all, &part)) {
        kvf_status status = start_part(flow, &part);
        if (status) {
            kvf_flow_stop(flow, status, kvf_error_detail());
            return;
        }
    }
    session->agent->again = true;
    if (!kvf_carry_is_there(&flow->carry) && flow->tokens >= flow->push->total_tokens)
        tell(flow);
}

void kvf_flow_stop(kvf_flow *flow, kvf_status status, const char *detail) {
    if (flow->over || flow->status)
        return;
    flow->status = status;
    flow->detail = kvf_strdup(detail);
    kvf_carry_cancel(&flow->carry);
    if (kvf_carry_is_there(&flow->carry) && kvf_carry_status(&flow->carry) != KVF_IN_PROGRESS)
        end_part(flow);
    if (!kvf_carry_is_there(&flow->carry))
        tell(flow);
}

static void writing_failed(kvf_flow *flow, kvf_status status, const char *why) {
    char detail[1024];
    flow->refused = status == KVF_E_CANCELLED; /* not by us */
    (void)snprintf(detail, sizeof detail, "writing to rank %u of %s failed with %s after %llu bytes: %s",
                   flow->session->rank, flow->session->engine, kvf_status_name(status),
                   (unsigned long long)flow->bytes, why);
    kvf_flow_stop(flow, status, detail);
}

/* After a refusal before anything moved, the part is written anew, by another transport. False: there is none. */
static bool begin_part_anew(kvf_flow *flow, kvf_status status, const char *why) {
    if (status != KVF_E_UNSUPPORTED || !kvf_session_pass_over(flow->session, why))
        return false;
    flow->tokens = flow->before.tokens;
    flow->layers = flow->before.layers;
    flow->chunk_end = flow->before.chunk_end;
    return true;
}

void kvf_flows_pump(const kvf_session *session) {
    for (kvf_flow *flow = session->flows, *next; flow; flow = next) {
        next = flow->session_next;
        kvf_flow_pump(flow);
    }
}

/* Goes on with a flow, and with those that wait until it no longer uses a connection. */
static void pump(kvf_flow *flow) {
    if (kvf_session_is_past(flow->session))
        kvf_flows_pump(flow->session);
    else
        kvf_flow_pump(flow);
}

void kvf_flow_poll(kvf_flow *flow) {
    if (!kvf_carry_is_there(&flow->carry))
        return;
    kvf_status status = kvf_carry_status(&flow->carry);
    if (status == KVF_IN_PROGRESS)
        return;
    char why[512];
    (void)snprintf(why, sizeof why, "%s", status ? kvf_error_detail() : "");
    const uint64_t written = flow->bytes;
    end_part(flow);
    if (flow->status)
        tell(flow);
    else if (status && (flow->bytes > written || !begin_part_anew(flow, status, why)))
        writing_failed(flow, status, why);
    pump(flow);
}

void kvf_flow_tick(kvf_flow *flow, uint64_t now) {
    /* Checks that we are still allowed to write before more is written. */
    if (now >= end_of(flow) && !flow->over)
        kvf_flow_stop(flow, KVF_E_TIMEOUT, "the consumer gave no sign of life for the length of its lease");
    else if (!flow->over)
        kvf_tickets_due(flow->session->agent, end_of(flow));
    if (kvf_session_is_past(flow->session) || (flow->session->may_hang && leave_hanging(flow->session)))
        kvf_flows_pump(flow->session);
    kvf_flow_poll(flow);
    if (flow->over && (flow->heard || flow->withdrawn))
        flow->session->agent->hooks->served(flow);
}

void kvf_flow_drop(kvf_flow *flow) {
    flow->status = flow->status ? flow->status : KVF_E_PEER_LOST;
    if (flow->push)
        flow->session->agent->hooks->served(flow);
    else
        kvf_flow_free(flow);
}

void kvf_flow_withdraw(kvf_session *session, const kvf_call_body *call) {
    if (call->earlier)
        (void)kvf_session_fresh(session, call->earlier);
    kvf_flow *flow = kvf_flow_of(session, call->generation);
    if (!flow) {
        kvf_answer_status(session, call, KVF_OK, "");
        return;
    }
    flow->withdrawn = true;
    if (flow->over) {
        answer_withdraw(flow, call->number);
        return;
    }
    flow->withdraw_number = call->number; /* answered when nothing moves */
    kvf_flow_stop(flow, KVF_E_CANCELLED, "withdrawn by the consumer");
}

/* Visits the flows that have no push yet. */
static bool look_at_first(kvf_agent *agent, uint32_t pass, uint64_t now) {
    kvf_flow *flow = agent->flows;
    if (!flow || flow->pass == pass)
        return false;
    flow->pass = pass;
    DL_DELETE(agent->flows, flow);
    DL_APPEND(agent->flows, flow);
    if (kvf_flow_is_refused(flow))
        kvf_flow_stop(flow, KVF_E_NOT_FOUND, KVF_PAST_DRAINS);
    if (now >= end_of(flow) || (flow->over && (flow->heard || flow->withdrawn)))
        kvf_flow_free(flow);
    else
        kvf_sweep_found(&agent->flow_sweep, end_of(flow));
    return true;
}

void kvf_flows_tick(kvf_agent *agent, uint64_t now) {
    kvf_sweep_round(&agent->flow_sweep, agent, now, look_at_first);
}
