/*
 * Pushes: writing a request to the consumers that expect it, as it becomes ready.
 *
 * A push has a flow for each rank that expects cells from us (flow.c). It ends when every rank of all its consumers has
 * been served, has given up, or never expected anything. It has failed if one has given up, as a hold has; a rank that
 * expects it anew before it ends, and gets it, has not.
 *
 * A chunk that the engine calls ready may wait for an event, and then all later chunks wait behind it: these words are
 * kept in order, and flows see a chunk only when it is ready.
 */
#include <stdio.h>

#include "agent/after.h"
#include "agent/claim.h"
#include "agent/early.h"
#include "agent/past.h"
#include "agent/peers.h"
#include "agent/push.h"
#include "agent/trace.h"
#include "model/model.h"

static kvf_push *push_of(kvf_ticket *ticket) {
    return (kvf_push *)ticket;
}

static kvf_push *find_push(const kvf_agent *agent, const void *id, size_t bytes) {
    kvf_ticket *push = NULL;
    HASH_FIND(hh_id, agent->pushes, id, bytes, push);
    return push_of(push);
}

static uint64_t count_tokens(const kvf_push *push) {
    const kvf_model *model = kvf_engine_model(push->base.agent->engine);
    uint64_t tokens = 1; /* a request with only states is one chunk */
    for (uint32_t g = 0; g < push->base.group_count; g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        if (group->kind == KVF_GROUP_TOKENS)
            tokens = kvf_max_u64(tokens, kvf_group_token_count(group, push->base.groups[g].end));
    }
    return tokens;
}

static void settle(kvf_push *push) {
    if (push->flows || push->base.state == KVF_TICKET_OVER)
        return;
    const bool complete = kvf_tally_complete(&push->tally);
    uint32_t rank = 0;
    const char *deserter = complete ? kvf_tally_deserter(&push->tally, &rank) : NULL;
    if (deserter && !push->base.status) {
        char detail[KVF_DETAIL_BYTES];
        (void)snprintf(detail, sizeof detail, "%s rank %u gave the request up", deserter, rank);
        kvf_ticket_record_failure(&push->base, KVF_E_CANCELLED, detail, NULL);
    }
    if (push->base.state == KVF_TICKET_CLOSING || (push->base.status && complete))
        kvf_ticket_tell(&push->base, true);
    else if (complete)
        kvf_ticket_done(&push->base);
}

/* Counts a rank that is served, or has given up; frees its flow. */
static void served(kvf_flow *flow) {
    kvf_push *push = flow->push;
    kvf_session *session = flow->session;
    const bool gave_up = flow->withdrawn || flow->refused; /* it says so only if it has not all of it */
    kvf_status status = kvf_tally_add(&push->tally, session->engine, session->rank, flow->expected_ranks,
                                      gave_up ? KVF_TALLY_GAVE_UP : KVF_TALLY_HAS_IT);
    push->base.bytes += flow->bytes;
    push->base.packed += flow->bytes_packed;
    push->base.runs += flow->runs;
    if (!status && flow->status && !gave_up)
        status = kvf_fail(flow->status, "%s", flow->detail ? flow->detail : "writing failed");
    if (status) {
        kvf_ticket_record_failure(&push->base, status, kvf_error_detail(), session);
    }
    kvf_flow_free(flow);
}

void kvf_push_served(kvf_flow *flow) {
    kvf_push *push = flow->push;
    served(flow);
    settle(push);
}

static void take(kvf_push *push, kvf_flow *flow) {
    kvf_flow_wait_no_more(flow);
    flow->push = push;
    kvf_tickets_due(push->base.agent, 0); /* the push may end now */
    DL_APPEND(push->flows, flow);
    if (flow->groups) {
        kvf_trace_reach_peer(&push->base, KVF_MOMENT_EXPECTED, flow->session);
        kvf_flow_pump(flow);
    } else if (kvf_claim_has_passed(flow->session)) {
        kvf_flow_free(flow); /* the new process of its rank may want something */
    } else {
        served(flow);
    }
}

static kvf_status check_expect(const kvf_session *session, const kvf_call_body *call) {
    const kvf_agent *agent = session->agent;
    uint32_t groups = kvf_model_group_count(kvf_engine_model(agent->engine));
    bool is_part = call->first_id > 0 || call->more;
    if ((call->group_count || is_part) && call->group_count != groups)
        return kvf_fail(KVF_E_MISMATCH, "EXPECT: %u groups; the model has %u", call->group_count, groups);
    if (call->time_ns <= kvf_agent_now(agent))
        return kvf_fail(KVF_E_TIMEOUT, "EXPECT: its deadline has passed");
    return KVF_OK;
}

static kvf_status expect(kvf_session *session, const kvf_call_body *call, bool fresh) {
    kvf_agent *agent = session->agent;
    kvf_flow *flow = kvf_flow_of(session, call->generation);
    if (flow && (!fresh || !flow->more))
        return KVF_OK; /* known */
    if (!fresh)
        return kvf_past_repeated(agent, call->request);
    kvf_status status = check_expect(session, call);
    if (!status && !find_push(agent, call->request.data, call->request.size))
        status = kvf_past_look(agent, call->request);
    if (!status && !flow && call->first_id > 0)
        status =
            kvf_fail(KVF_E_NOT_FOUND, "EXPECT: the ids before %u are no longer known here", call->first_id);
    if (!status)
        status = flow ? kvf_flow_add(flow, call) : kvf_flow_make(session, call, &flow);
    if (status || flow->more)
        return status;
    kvf_push *push = find_push(agent, flow->id, flow->id_bytes);
    if (push && push->base.state == KVF_TICKET_MOVING) {
        take(push, flow);
        settle(push);
    }
    return KVF_OK;
}

void kvf_push_expected(kvf_session *session, const kvf_call_body *call, bool fresh) {
    kvf_status status = expect(session, call, fresh);
    kvf_answer_status(session, call, status, status ? kvf_error_detail() : "");
}

static void start(kvf_push *push) {
    push->total_tokens = count_tokens(push);
    push->base.state = KVF_TICKET_MOVING;
    for (kvf_flow *flow; (flow = kvf_flow_waiting_for(push->base.agent, &push->base));)
        take(push, flow);
    settle(push);
}

/* ---- what is ready --------------------------------------------------------------------------- */

static void drop_word(kvf_push *push, kvf_push_word *word) {
    kvf_after_drop(word->after);
    /* The analyser does not know that a list's first element always has a last one before it. */
    /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
    DL_DELETE(push->words, word);
    kvf_free(word);
}

static void drop_words(kvf_push *push) {
    while (push->words)
        drop_word(push, push->words);
}

/* Makes a word that waits for an event, or only behind others. */
static kvf_status make_word(kvf_push *push, const kvf_ready_event *event, kvf_push_word **out) {
    kvf_push_word *word = kvf_alloc0(1, sizeof *word);
    kvf_status status =
        word ? kvf_after_take(&push->base, event, &word->after) : kvf_nomem("what is ready of a push");
    if (status) {
        kvf_free(word);
        return status;
    }
    DL_APPEND(push->words, word);
    *out = word;
    return KVF_OK;
}

/* Takes the first words that no longer wait. */
static void hear_words(kvf_push *push) {
    bool news = false;
    for (; push->words && !push->words->after; news = true) {
        push->ready = push->words->ready;
        drop_word(push, push->words);
    }
    if (push->ready.tokens >= push->total_tokens)
        kvf_trace_reach(&push->base, KVF_MOMENT_READY);
    kvf_flow *flow, *next;
    if (news)
        DL_FOREACH_SAFE(push->flows, flow, next) {
            kvf_flow_pump(flow);
        }
}

static void push_ready(kvf_ticket *ticket, kvf_after *after) {
    kvf_push *push = push_of(ticket);
    kvf_push_word *word;
    DL_FOREACH(push->words, word) {
        if (word->after == after)
            word->after = NULL;
    }
    kvf_after_drop(after);
    if (push->base.state == KVF_TICKET_MOVING)
        hear_words(push);
}

/* ---- life ------------------------------------------------------------------------------------ */

static void push_fail(kvf_ticket *ticket, kvf_status status, const char *detail, const kvf_session *session) {
    kvf_push *push = push_of(ticket);
    (void)session;
    if (push->base.state != KVF_TICKET_MOVING)
        return;
    kvf_ticket_record_failure(&push->base, status, detail, NULL);
    kvf_ticket_unlist(&push->base);
    push->base.state = KVF_TICKET_CLOSING;
    drop_words(push);
    kvf_flow *flow, *next;
    DL_FOREACH_SAFE(push->flows, flow, next) {
        kvf_flow_stop(flow, status, push->base.detail ? push->base.detail : "");
    }
    settle(push);
}

static void push_tick(kvf_ticket *ticket, uint64_t now) {
    kvf_push *push = push_of(ticket);
    kvf_flow *flow, *next;
    DL_FOREACH_SAFE(push->flows, flow, next) {
        kvf_flow_tick(flow, now);
    }
    if (push->base.state == KVF_TICKET_MOVING && now >= push->base.deadline) {
        char detail[512];
        const char *waits_for = NULL;
        for (flow = push->flows; flow && !waits_for; flow = flow->next)
            waits_for = kvf_peer_waits_for(flow->session);
        (void)snprintf(
            detail, sizeof detail,
            "the deadline has passed: %u of %u consumers are served, %llu of %llu tokens were ready%s%s%s",
            push->tally.done, push->tally.wanted, (unsigned long long)push->ready.tokens,
            (unsigned long long)push->total_tokens, push->words ? "; the others wait for an event" : "",
            waits_for ? "; " : "", waits_for ? waits_for : "");
        push_fail(&push->base, KVF_E_TIMEOUT, detail, NULL);
    } else if (push->base.state == KVF_TICKET_MOVING) {
        kvf_tickets_due(push->base.agent, push->base.deadline);
    }
    settle(push);
}

static kvf_status push_begin(kvf_ticket *ticket, const kvf_agent_request *request) {
    kvf_push *push = push_of(ticket);
    kvf_push_word *nothing; /* makes nothing ready; but all later words wait behind it */
    push->tally.wanted = request->consumers ? request->consumers : 1;
    push->tally.kept = &ticket->agent->kept_bytes;
    return request->after ? make_word(push, request->after, &nothing) : KVF_OK;
}

static void push_free(kvf_ticket *ticket) {
    kvf_push *push = push_of(ticket);
    while (push->flows)
        kvf_flow_free(push->flows);
    drop_words(push);
    kvf_tally_free(&push->tally);
}

static const kvf_ticket_ops push_ops = {
    .kind = KVF_REQUEST_PUSH,
    .size = sizeof(kvf_push),
    .begin = push_begin,
    .free = push_free,
    .lends = true,
    .grows = true,
    .tick = push_tick,
    .fail = push_fail,
    .ready = push_ready,
};

/* ---- what the engine calls ------------------------------------------------------------------- */

static kvf_status start_push(kvf_agent *agent, const kvf_agent_request *request, uint64_t *out) {
    if (request && request->id.data && find_push(agent, request->id.data, request->id.size))
        return kvf_fail(KVF_E_EXISTS, "a request with this id is being pushed already");
    kvf_ticket *made;
    kvf_status status = kvf_ticket_make(agent, &push_ops, request, &made);
    if (!status)
        status = kvf_ticket_list(made, &agent->pushes, (kvf_bytes){made->id, made->id_bytes});
    if (status)
        return status;
    if (out)
        *out = made->number;
    start(push_of(made));
    return KVF_OK;
}

kvf_status kvf_agent_push(kvf_agent *agent, const kvf_agent_request *request, uint64_t *ticket) {
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    status = start_push(agent, request, ticket);
    kvf_agent_unlock(agent);
    return status;
}

/* Computes what is ready with a chunk, after all chunks before it; KVF_E_RANGE: the chunk is out of order. */
static kvf_status say(const kvf_push *push, const kvf_push_chunk *chunk, kvf_push_ready *out) {
    const kvf_push_ready *said = &push->said;
    uint32_t all = kvf_model_layer_count(kvf_engine_model(push->base.agent->engine));
    uint32_t layers = chunk->layers < all ? chunk->layers : all;
    uint64_t begin = chunk->begin, end = kvf_min_u64(chunk->end, push->total_tokens);
    *out = (kvf_push_ready){layers == all ? end : begin, end, layers == all ? 0 : layers};
    if (begin == 0 && end == push->total_tokens && layers == all)
        return KVF_OK; /* everything, whatever was ready before */
    if (begin >= push->total_tokens && said->tokens == push->total_tokens && chunk->record_count == 0) {
        *out = *said;
        return KVF_OK; /* nothing: the last tokens complete no entry */
    }
    if (begin < said->tokens || begin >= end)
        return kvf_fail(KVF_E_RANGE, "the chunk is [%llu, %llu); %llu tokens are ready already, of %llu",
                        (unsigned long long)begin, (unsigned long long)end, (unsigned long long)said->tokens,
                        (unsigned long long)push->total_tokens);
    if (said->layers > 0 && (begin != said->tokens || end != said->chunk_end))
        return kvf_fail(KVF_E_RANGE, "the chunk is [%llu, %llu); [%llu, %llu) has %u of %u layers yet",
                        (unsigned long long)begin, (unsigned long long)end, (unsigned long long)said->tokens,
                        (unsigned long long)said->chunk_end, said->layers, all);
    if (layers < said->layers)
        return kvf_fail(KVF_E_RANGE, "layers is %u; %u are ready already", layers, said->layers);
    return KVF_OK;
}

/* Whether there are blocks for everything that a chunk adds: tokens as they become ready, states at the end. */
static kvf_status check_blocks(const kvf_push *push, const kvf_group_steps *groups, uint64_t end) {
    const kvf_agent *agent = push->base.agent;
    kvf_status status = KVF_OK;
    for (uint32_t g = 0; g < push->base.group_count && !status; g++) {
        const kvf_group_desc *group = kvf_model_group(kvf_engine_model(agent->engine), g);
        if (group->kind == KVF_GROUP_TOKENS)
            status =
                kvf_check_reach(agent->shard, g, &groups[g], kvf_group_step_count(group, push->said.tokens),
                                kvf_group_step_count(group, end));
        else if (end == push->total_tokens)
            status = kvf_check_reach(agent->shard, g, &groups[g], 0, UINT64_MAX);
    }
    return status;
}

/* Claims the new blocks of a chunk. */
static kvf_status add_blocks(kvf_push *push, const kvf_push_chunk *chunk, uint64_t end) {
    kvf_ticket *base = &push->base;
    if (!chunk->tables)
        return check_blocks(push, base->groups, end);
    kvf_group_steps *merged = NULL;
    kvf_block_table tables[KVF_MODEL_MAX_GROUPS];
    kvf_status status =
        kvf_take_tables(base->agent->shard, base->groups, chunk->tables, chunk->table_count, tables);
    if (!status)
        status = kvf_steps_merge(base->groups, tables, base->group_count, &merged);
    if (!status)
        status = check_blocks(push, merged, end);
    if (!status)
        status = kvf_ticket_grow(base, merged);
    if (status)
        kvf_free(merged);
    return status;
}

static kvf_status advance(kvf_push *push, const kvf_push_chunk *chunk) {
    kvf_push_ready next;
    kvf_push_word *word = NULL;
    kvf_status status = say(push, chunk, &next);
    kvf_records *records = &push->base.records;
    const uint32_t records_before = records->count;
    if (!status)
        status = kvf_records_add(records, chunk->records, chunk->record_count, push->base.agent->rank);
    if (!status)
        status = make_word(push, chunk->after, &word);
    if (!status)
        status = add_blocks(push, chunk, next.chunk_end);
    if (status) {
        records->count = records_before;
        if (word)
            drop_word(push, word);
        return status;
    }
    word->ready = push->said = next;
    hear_words(push);
    return KVF_OK;
}

static kvf_status take_chunk(const kvf_push_chunk *given, kvf_push_chunk *out) {
    kvf_status status = kvf_take_options(out, sizeof *out, given, "kvf_push_chunk");
    if (!given) {
        out->end = UINT64_MAX;
        out->layers = UINT32_MAX;
    }
    return status;
}

kvf_status kvf_agent_push_ready(kvf_agent *agent, uint64_t number, const kvf_push_chunk *chunk) {
    kvf_push_chunk taken = {0};
    kvf_status status = take_chunk(chunk, &taken);
    if (!status)
        status = kvf_agent_lock(agent);
    if (status)
        return status;
    kvf_work_take(agent);
    kvf_push *push = push_of(kvf_ticket_find(agent, number, &push_ops));
    if (!push || push->base.state != KVF_TICKET_MOVING)
        status = kvf_fail(KVF_E_NOT_FOUND, "no push has ticket %llu", (unsigned long long)number);
    else
        status = advance(push, &taken);
    kvf_work_give(agent);
    kvf_agent_unlock(agent);
    return status;
}
