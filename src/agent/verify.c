/*
 * Integrity: received cells are compared with checksums that the producer computes of its own cells.
 *
 * The receiver asks cut by cut of the plan, a bounded number of steps at a time. If a step differs, it halves the
 * step's layers and then its units until one cell is left: the first wrong coordinates.
 */
#include <stdio.h>

#include "agent/budget.h"
#include "agent/expect.h"
#include "agent/hashing.h"
#include "agent/hold.h"
#include "agent/push.h"
#include "agent/push_shape.h"
#include "agent/terms.h"
#include "agent/trace.h"
#include "agent/verify.h"
#include "model/model.h"
#include "shard/shard.h"

#define STEPS_AT_ONCE 8192u
#define MOST_ASKED 1024u /* by one session at once; further calls must be repeated */

struct kvf_check {
    kvf_hashing ours; /* of the requested steps */
    bool hashing;
    kvf_asker *ticket;
    kvf_source *source;
    uint32_t cut;
    uint64_t begin, end;     /* requested steps */
    bool narrowing;          /* one step is known to differ */
    kvf_range layers, units; /* requested */
    kvf_range suspect_layers, suspect_units;
    uint64_t *theirs; /* by step */
};

static void ask_next(struct kvf_check *check);

void kvf_verify_stop(kvf_asker *ticket) {
    struct kvf_check *check = ticket->check;
    if (!check)
        return;
    ticket->check = NULL;
    if (check->source) {
        kvf_call_drop(check->source->call);
        check->source->call = NULL;
    }
    if (check->hashing)
        kvf_hashing_stop(&check->ours);
    kvf_free(check->theirs);
    kvf_free(check);
}

static void fail(struct kvf_check *check, kvf_status status) {
    kvf_ticket_fail(&check->ticket->base, status, kvf_error_detail(),
                    check->source ? check->source->session : NULL);
}

static void passed(kvf_asker *ticket) {
    kvf_verify_stop(ticket);
    kvf_trace_reach(&ticket->base, KVF_MOMENT_CHECKED);
    ticket->base.ops->verified(&ticket->base);
}

static kvf_source *source_of(const kvf_asker *ticket, uint32_t source) {
    for (uint32_t i = 0; i < ticket->source_count; i++)
        if (ticket->sources[i].target->source == source)
            return &ticket->sources[i];
    return NULL;
}

/* Whether we and the source of a cut both keep a step; otherwise there is nothing to compare. */
static bool is_kept(kvf_token_share share, uint64_t step) {
    return step / share.width % share.count == share.index; /* neither is 0 in a shard */
}

static void wrong_cell(struct kvf_check *check, const kvf_plan_cut *cut) {
    const kvf_asker *ticket = check->ticket;
    const kvf_group_desc *group = kvf_model_group(kvf_engine_model(ticket->base.agent->engine), cut->group);
    (void)kvf_fail(
        KVF_E_MISMATCH,
        "wrong bytes: group %s, layer %u, part %s, %s %llu, unit %u do not have the checksum of rank %u",
        group->name, group->layers[check->suspect_layers.begin], group->parts[cut->part].name,
        kvf_group_step_word(group), (unsigned long long)check->begin, check->suspect_units.begin,
        check->source->target->rank);
    ticket->base.agent->stats.checksums_wrong++;
    fail(check, KVF_E_MISMATCH);
}

static uint32_t middle(kvf_range range) {
    return range.begin + (range.end - range.begin) / 2;
}

/* Asks for the first half of the suspect cells, or names the cell that is left. */
static void narrow(struct kvf_check *check, const kvf_plan_cut *cut) {
    check->narrowing = true;
    check->layers = check->suspect_layers;
    check->units = check->suspect_units;
    if (check->layers.end - check->layers.begin > 1)
        check->layers.end = middle(check->layers);
    else if (check->units.end - check->units.begin > 1)
        check->units.end = middle(check->units);
    else {
        wrong_cell(check, cut);
        return;
    }
    ask_next(check);
}

/* The requested half is right, so the other one is wrong. */
static void take_other_half(struct kvf_check *check) {
    if (check->suspect_layers.end - check->suspect_layers.begin > 1)
        check->suspect_layers.begin = check->layers.end;
    else
        check->suspect_units.begin = check->units.end;
}

static void take_this_half(struct kvf_check *check) {
    check->suspect_layers = check->layers;
    check->suspect_units = check->units;
}

static bool has_steps(struct kvf_check *check) {
    const kvf_asker *ticket = check->ticket;
    const kvf_plan *plan = ticket->remote->plan;
    for (;;) {
        const kvf_plan_cut *cut = kvf_plan_get_cut(plan, check->cut);
        if (!cut)
            return false;
        const kvf_group_steps *group = &ticket->base.groups[cut->group];
        const kvf_group_desc *desc =
            kvf_model_group(kvf_engine_model(ticket->base.agent->engine), cut->group);
        uint64_t first = kvf_first_moved(desc, group->begin, group->end);
        check->begin = kvf_max_u64(check->end, first);
        if (check->begin < group->end) {
            check->end = kvf_min_u64(group->end, check->begin + STEPS_AT_ONCE);
            check->layers = check->suspect_layers = cut->layers;
            check->units = check->suspect_units = cut->units;
            check->source = source_of(ticket, cut->source);
            return true;
        }
        check->cut++;
        check->end = 0;
    }
}

static void compare(struct kvf_check *check) {
    kvf_asker *ticket = check->ticket;
    const kvf_agent *agent = ticket->base.agent;
    const kvf_plan_cut *cut = kvf_plan_get_cut(ticket->remote->plan, check->cut);
    uint64_t steps = check->end - check->begin;
    const kvf_token_share own = agent->shard->groups[cut->group].share;
    for (uint64_t i = 0; i < steps; i++) {
        uint64_t step = check->begin + i;
        if (check->ours.sums[i] == check->theirs[i] || !is_kept(own, step) || !is_kept(cut->tokens, step))
            continue;
        if (!check->narrowing) {
            check->begin = step;
            check->end = step + 1;
        }
        take_this_half(check);
        narrow(check, cut);
        return;
    }
    if (check->narrowing) {
        take_other_half(check);
        narrow(check, cut);
    } else if (has_steps(check)) {
        ask_next(check);
    } else {
        passed(ticket);
    }
}

static const kvf_block_table *own_blocks(kvf_hashing *ours) {
    const struct kvf_check *check = (const struct kvf_check *)ours;
    return &check->ticket->base.groups[ours->group].table;
}

static void on_ours(kvf_hashing *ours, kvf_status status) {
    struct kvf_check *check = (struct kvf_check *)ours;
    check->hashing = false;
    if (status)
        fail(check, status);
    else
        compare(check);
}

/* Their checksums have come: computes ours of the same cells. */
static void hash_ours(struct kvf_check *check, const kvf_answer *answer) {
    const kvf_plan_cut *cut = kvf_plan_get_cut(check->ticket->remote->plan, check->cut);
    uint64_t steps = check->end - check->begin;
    if (answer->sum_count != steps) {
        fail(check, kvf_fail(KVF_E_PARSE, "%u checksums came for %llu steps", answer->sum_count,
                             (unsigned long long)steps));
        return;
    }
    memcpy(check->theirs, answer->sums, steps * sizeof *check->theirs);
    check->ours = (kvf_hashing){.agent = check->ticket->base.agent,
                                .group = cut->group,
                                .part = cut->part,
                                .layers = check->layers,
                                .units = check->units,
                                .begin = check->begin,
                                .end = check->end,
                                .table = own_blocks,
                                .done = on_ours};
    kvf_status status = kvf_hashing_start(&check->ours);
    check->hashing = !status;
    if (status)
        fail(check, status);
}

static void on_sums(kvf_call *call, kvf_status status, const kvf_answer *answer) {
    struct kvf_check *check = call->context;
    check->source->call = NULL;
    if (status == KVF_E_PEER_LOST)
        return; /* a lost session tells all its users */
    if (status)
        fail(check, status);
    else
        hash_ours(check, answer);
}

static void ask_next(struct kvf_check *check) {
    kvf_asker *ticket = check->ticket;
    const kvf_plan_cut *cut = kvf_plan_get_cut(ticket->remote->plan, check->cut);
    kvf_source *source = check->source;
    kvf_call_body body = {.generation = ticket->base.kind == KVF_REQUEST_PULL ? source->generation
                                                                              : kvf_expect_generation(ticket),
                          .group = cut->group,
                          .part = cut->part,
                          .layers = check->layers,
                          .units = check->units,
                          .begin = check->begin,
                          .end = check->end};
    kvf_terms_cells(ticket->remote, &body);
    kvf_status status = source->session
                            ? kvf_call_start(source->session, KVF_CALL_CHECKSUM, &body, ticket->base.deadline,
                                             false, on_sums, check, &source->call)
                            : kvf_fail(KVF_E_PEER_LOST, "the producer is gone");
    if (status)
        fail(check, status);
}

void kvf_verify_start(kvf_asker *ticket) {
    kvf_trace_reach(&ticket->base, KVF_MOMENT_CHECKING);
    ticket->base.state = KVF_TICKET_VERIFYING;
    struct kvf_check *check = kvf_alloc0(1, sizeof *check);
    uint64_t *theirs = kvf_alloc(STEPS_AT_ONCE, sizeof *theirs);
    if (!check || !theirs) {
        kvf_free(check);
        kvf_free(theirs);
        kvf_ticket_fail(&ticket->base, KVF_E_NOMEM, "no memory for checksums", NULL);
        return;
    }
    check->ticket = ticket;
    check->theirs = theirs;
    ticket->check = check;
    if (has_steps(check))
        ask_next(check);
    else
        passed(ticket);
}

/* ---- the producer's side --------------------------------------------------------------------- */

/* A call of a peer, until it is answered. */
typedef struct asked {
    kvf_hashing hashing;
    kvf_session *session;
    uint64_t number, generation; /* of the call, and of the lease or expectation that it asks about */
} asked;

/* The ticket whose blocks a consumer may ask about: its lease's hold, or, once its flow is over, the push. */
static const kvf_ticket *asked_about(kvf_session *session, uint64_t generation) {
    if (generation & KVF_EXPECTATION) {
        const kvf_flow *flow = kvf_flow_of(session, generation);
        return flow && flow->push && flow->over ? &flow->push->base : NULL;
    }
    const kvf_reader *reader = kvf_reader_find(session, generation);
    return reader ? &reader->hold->base : NULL;
}

static const kvf_block_table *lent_blocks(kvf_hashing *hashing) {
    const asked *question = (const asked *)hashing;
    const kvf_ticket *ticket = asked_about(question->session, question->generation);
    if (ticket && hashing->group < ticket->group_count)
        return &ticket->groups[hashing->group].table;
    if (ticket)
        (void)kvf_fail(KVF_E_NOT_FOUND, "CHECKSUM: group is %u; the model has %u", hashing->group,
                       ticket->group_count);
    else
        (void)kvf_fail(KVF_E_NOT_FOUND, "CHECKSUM: generation %llu is no lease of this peer",
                       (unsigned long long)question->generation);
    return NULL;
}

/* The bytes kept for a question, with its sums. */
static uint64_t kept_for(const kvf_hashing *hashing) {
    return sizeof(asked) + (hashing->end - hashing->begin) * sizeof *hashing->sums;
}

static void free_question(asked *question) {
    kvf_budget_give(question->session, kept_for(&question->hashing));
    kvf_free(question);
}

static void answer_sums(kvf_hashing *hashing, kvf_status status) {
    asked *question = (asked *)hashing;
    const kvf_call_body call = {.number = question->number, .kind = KVF_CALL_CHECKSUM};
    kvf_answer answer = {.status = status, .sums = hashing->sums};
    answer.sum_count = status ? 0 : (uint32_t)(hashing->end - hashing->begin);
    answer.detail = status ? kvf_error_detail() : "";
    kvf_answer_send(question->session, &call, &answer);
    free_question(question);
}

void kvf_verify_forget(kvf_session *session) {
    while (session->hashing.first) {
        asked *question = (asked *)session->hashing.first;
        kvf_hashing_stop(&question->hashing);
        free_question(question);
    }
}

/* Whether a call is already being answered, or is one too many. */
static bool has_to_wait(const kvf_session *session, const kvf_call_body *call) {
    const kvf_hashing *hashing;
    DL_FOREACH(session->hashing.first, hashing) {
        if (((const asked *)hashing)->number == call->number)
            return true;
    }
    return session->hashing.count >= MOST_ASKED;
}

/* The type in which a peer keeps the elements of a part: a peer with other types than ours has joined. */
static kvf_dtype type_of(const kvf_session *session, const kvf_call_body *call) {
    const kvf_group_desc *group =
        session->shape ? kvf_model_group(kvf_shard_model(session->shape->shard), call->group) : NULL;
    return group && call->part < group->part_count ? group->parts[call->part].dtype : KVF_DTYPE_INVALID;
}

static kvf_status start_answer(kvf_session *session, const kvf_call_body *call) {
    asked *question = kvf_alloc0(1, sizeof *question);
    if (!question)
        return kvf_nomem("checksums");
    *question = (asked){.hashing = {.agent = session->agent,
                                    .queue = &session->hashing,
                                    .group = call->group,
                                    .part = call->part,
                                    .layers = call->layers,
                                    .units = call->units,
                                    .begin = call->begin,
                                    .end = call->end,
                                    .dtype = type_of(session, call),
                                    .table = lent_blocks,
                                    .done = answer_sums},
                        .session = session,
                        .number = call->number,
                        .generation = call->generation};
    kvf_status status = lent_blocks(&question->hashing) ? KVF_OK : KVF_E_NOT_FOUND;
    if (!status)
        status = kvf_budget_take(session, kept_for(&question->hashing));
    if (status) {
        kvf_free(question);
        return status;
    }
    status = kvf_hashing_start(&question->hashing);
    if (status)
        free_question(question);
    return status;
}

void kvf_verify_answer(kvf_session *session, const kvf_call_body *call) {
    kvf_flow *flow = call->generation & KVF_EXPECTATION ? kvf_flow_of(session, call->generation) : NULL;
    if (flow)
        flow->verified = true;
    if (has_to_wait(session, call))
        return;
    kvf_status status = KVF_OK;
    if (call->begin >= call->end || call->end - call->begin > STEPS_AT_ONCE)
        status = kvf_fail(KVF_E_RANGE, "CHECKSUM: begin to end; allowed: 1 to %u steps", STEPS_AT_ONCE);
    if (!status)
        status = start_answer(session, call);
    if (status && status != KVF_E_LIMIT) /* without room for it now, no answer: the peer repeats the call */
        kvf_answer_status(session, call, status, kvf_error_detail());
}
