/*
 * Pulls: reading a request that a producer holds.
 *
 *   MEETING    the producer's engine is being met
 *   ASKING     each rank we read from was asked for a lease on the request
 *   RESERVED   all have granted one, and the destination is not known yet
 *   MOVING     runs are under way
 *   VERIFYING  checksums are compared
 *
 * Bytes count as read only if every lease was good until the last byte was here: until then the producer cannot have
 * given the blocks to another request.
 */
#include <stdio.h>

#include "agent/after.h"
#include "agent/geometry.h"
#include "agent/pull.h"
#include "agent/terms.h"
#include "agent/trace.h"
#include "agent/verify.h"
#include "model/model.h"

/* ---- leases ---------------------------------------------------------------------------------- */

static bool same_groups(const kvf_group_steps *a, const kvf_group_steps *b, uint32_t count) {
    for (uint32_t g = 0; g < count; g++) {
        const kvf_block_table *x = &a[g].table, *y = &b[g].table;
        if (a[g].begin != b[g].begin || a[g].end != b[g].end || x->count != y->count ||
            x->first_block != y->first_block ||
            (x->count > 0 && memcmp(x->ids, y->ids, x->count * sizeof *x->ids) != 0))
            return false;
    }
    return true;
}

/* Takes the groups that one rank of the producer holds: the same as its siblings. Takes over `theirs`, or frees it. */
static kvf_status take_steps(kvf_pull *pull, kvf_group_steps *theirs) {
    uint32_t groups = kvf_model_group_count(kvf_engine_model(pull->base.agent->engine));
    kvf_group_steps *own = NULL;
    const kvf_group_steps *heard;
    kvf_status status = kvf_terms_hear(pull->asker.remote, theirs, &own, &heard);
    if (!status && pull->theirs && !same_groups(pull->theirs, heard, groups))
        status = kvf_fail(KVF_E_MISMATCH, "the producer's rank holds other blocks than its siblings");
    if (!status && !pull->theirs) {
        pull->theirs = own ? kvf_steps_copy(own, groups) : theirs;
        theirs = own ? theirs : NULL;
        status = pull->theirs ? KVF_OK : kvf_nomem("a request");
    }
    kvf_free(own);
    kvf_free(theirs);
    return status;
}

/* Takes a part of the tables of one rank; with the last, all of them. */
static kvf_status take_tables(kvf_source *source, const kvf_answer *answer) {
    kvf_pull *pull = kvf_pull_of(&source->ticket->base);
    uint32_t theirs = kvf_terms_group_count(pull->asker.remote);
    if (answer->group_count != theirs)
        return kvf_fail(KVF_E_MISMATCH, "the lease is on %u groups; the model has %u", answer->group_count,
                        theirs);
    kvf_status status =
        kvf_parts_add(&source->parts, answer->groups, answer->group_count, answer->first_id, answer->more);
    if (status || answer->more)
        return status;
    kvf_group_steps *all = kvf_parts_join(&source->parts);
    return all ? take_steps(pull, all) : kvf_nomem("a request");
}

static void all_granted(kvf_pull *pull) {
    kvf_trace_reach(&pull->base, KVF_MOMENT_GRANTED);
    pull->base.state = KVF_TICKET_RESERVED;
    if (pull->base.groups)
        kvf_pull_move(pull);
}

void kvf_pull_granted(kvf_source *source) {
    kvf_pull *pull = kvf_pull_of(&source->ticket->base);
    source->settled = true;
    kvf_trace_reach_peer(&pull->base, KVF_MOMENT_GRANTED, source->session);
    kvf_tickets_due(pull->base.agent, source->until);
    for (uint32_t i = 0; i < pull->asker.source_count; i++)
        if (!pull->asker.sources[i].settled)
            return;
    all_granted(pull);
}

static kvf_status ask(kvf_source *source);

/* Whether a part continues those before. If the lease is another, or the producer starts over, we start over too. */
static bool goes_on(const kvf_source *source, const kvf_answer *answer) {
    return answer->first_id == source->parts.ids &&
           (source->parts.ids == 0 || answer->generation == source->generation);
}

/* Records come with the first part, and again if that comes again. */
static kvf_status take_records(kvf_source *source, const kvf_answer *answer) {
    if (answer->first_id > 0)
        return KVF_OK;
    kvf_records_free(&source->records);
    return kvf_records_add(&source->records, answer->records, answer->record_count, source->session->rank);
}

/* Takes an answer, and asks for missing parts; `complete` receives whether none is missing. */
static kvf_status take_answer(kvf_source *source, const kvf_answer *answer, bool *complete) {
    bool fits = goes_on(source, answer);
    kvf_status status = take_records(source, answer);
    if (!status && fits)
        status = take_tables(source, answer);
    if (!fits)
        kvf_parts_free(&source->parts);
    source->generation = answer->generation;
    *complete = fits && !answer->more;
    return status || *complete ? status : ask(source);
}

static void on_granted(kvf_call *call, kvf_status status, const kvf_answer *answer) {
    kvf_source *source = call->context;
    kvf_pull *pull = kvf_pull_of(&source->ticket->base);
    uint64_t asked = call->first_sent;
    source->call = NULL;
    if (status == KVF_E_TIMEOUT && !answer)
        return; /* that was the pull's deadline, which gives a better reason */
    bool complete = false;
    if (!status)
        status = take_answer(source, answer, &complete);
    if (status) {
        if (status == KVF_E_PEER_LOST)
            return; /* the session tells all its users itself */
        kvf_ticket_fail(&pull->base, status, kvf_error_detail(), source->session);
        return;
    }
    if (!complete)
        return;
    /* The lease began when we asked, or later. If that was long ago, for example because the call waited for the hold,
     * a heartbeat must tell how long the lease lasts. */
    source->until = asked + kvf_session_surely(answer->time_ns);
    if (source->until >= kvf_agent_now(pull->base.agent) + answer->time_ns / 2) {
        kvf_session_due(source->session, source->session->next_beat);
        kvf_pull_granted(source);
    } else {
        source->session->next_beat = 0;
        kvf_session_due(source->session, 0);
    }
}

/* When the pull fails unless something changes. */
static uint64_t latest(const kvf_pull *pull) {
    bool waits = pull->base.state == KVF_TICKET_MEETING || pull->base.state == KVF_TICKET_ASKING;
    return waits ? pull->patience : pull->base.deadline;
}

static kvf_status ask(kvf_source *source) {
    kvf_pull *pull = kvf_pull_of(&source->ticket->base);
    uint64_t now = kvf_agent_now(pull->base.agent), end = latest(pull);
    kvf_call_body body = {.request = {pull->base.id, pull->base.id_bytes},
                          .rank_count = source->target->expected_ranks,
                          .first_id = source->parts.ids,
                          .time_ns = end > now ? end - now : 0};
    return kvf_call_start(source->session, KVF_CALL_ACQUIRE, &body, end, false, on_granted, source,
                          &source->call);
}

static void pull_met(kvf_ticket *ticket) {
    kvf_pull *pull = kvf_pull_of(ticket);
    if (pull->base.groups && pull->base.empty) {
        kvf_pull_finish(pull);
        return;
    }
    bool asked = false;
    for (uint32_t i = 0; i < pull->asker.source_count; i++) {
        kvf_source *source = &pull->asker.sources[i];
        if (source->target->source == UINT32_MAX) {
            source->settled = true;
            continue;
        }
        asked = true;
        kvf_status status = ask(source);
        if (status) {
            kvf_ticket_fail(&pull->base, status, kvf_error_detail(), NULL);
            return;
        }
    }
    if (!asked)
        all_granted(pull);
}

/* ---- the ticket ------------------------------------------------------------------------------- */

static void pull_verified(kvf_ticket *ticket) {
    kvf_pull *pull = kvf_pull_of(ticket);
    kvf_pull_arrived(pull);
}

/* Which leases are missing. Where some were granted, `late` is the first rank that has granted none: perhaps the engine
 * holds the request on its other ranks only. */
static void say_leases(const kvf_pull *pull, char *out, size_t bytes, const kvf_session **late) {
    uint32_t count = pull->asker.source_count, granted = 0, first = count;
    for (uint32_t i = 0; i < count; i++) {
        granted += pull->asker.sources[i].settled;
        if (first == count && !pull->asker.sources[i].settled)
            first = i;
    }
    (void)snprintf(out, bytes, "no lease on the request was granted");
    if (granted == 0 || first == count)
        return;
    *late = pull->asker.sources[first].session;
    (void)snprintf(out, bytes, "%u of %u producer ranks have granted a lease on the request", granted, count);
}

static void fail_late(kvf_pull *pull, uint64_t now) {
    char detail[KVF_DETAIL_BYTES], reason[KVF_DETAIL_BYTES / 2], leases[96];
    const kvf_session *late = NULL;
    const bool unmet = kvf_ticket_unmet(&pull->asker, reason, sizeof reason);
    const char *waits_for = kvf_ticket_waits_for(&pull->asker);
    const bool asking = !unmet && !waits_for && pull->base.state == KVF_TICKET_ASKING;
    if (asking)
        say_leases(pull, leases, sizeof leases, &late);
    const char *why = unmet       ? reason
                      : waits_for ? waits_for
                      : asking    ? leases
                      : pull->base.state == KVF_TICKET_RESERVED && pull->base.groups
                          ? "not every rank has answered whether its stage accepts this rank"
                      : pull->base.state == KVF_TICKET_RESERVED ? "no destination was named"
                                                                : "the bytes had not arrived";
    (void)snprintf(detail, sizeof detail, "%s: %s",
                   now >= pull->base.deadline ? "the deadline has passed"
                                              : "the patience of the request has run out",
                   why);
    kvf_ticket_fail(&pull->base, KVF_E_TIMEOUT, detail, late);
}

static void pull_tick(kvf_ticket *ticket, uint64_t now) {
    kvf_pull *pull = kvf_pull_of(ticket);
    if (pull->base.state == KVF_TICKET_DOUBT)
        return;
    if (now >= latest(pull)) {
        fail_late(pull, now);
        return;
    }
    kvf_tickets_due(pull->base.agent, latest(pull));
    kvf_source *late = kvf_pull_expired(pull, now);
    if (late)
        kvf_ticket_fail(&pull->base, KVF_E_TIMEOUT, "the lease ran out", late->session);
    for (uint32_t i = 0; i < pull->asker.source_count; i++)
        if (pull->asker.sources[i].generation && pull->asker.sources[i].settled)
            kvf_tickets_due(pull->base.agent, pull->asker.sources[i].until);
    if (pull->leaves && !late)
        kvf_pull_move(pull);
}

static void pull_fail(kvf_ticket *ticket, kvf_status status, const char *detail, const kvf_session *session) {
    kvf_pull *pull = kvf_pull_of(ticket);
    if (pull->base.silent)
        return;
    kvf_verify_stop(&pull->asker);
    kvf_asker_stop_waiting(&pull->asker);
    kvf_ticket_record_failure(&pull->base, status, detail, session);
    kvf_ticket_unlist(&pull->base);
    kvf_pull_release(pull, status);
    kvf_ticket_detach(&pull->asker);
    kvf_carry_cancel(&pull->carry);
    if (kvf_carry_is_there(&pull->carry) && kvf_carry_status(&pull->carry) != KVF_IN_PROGRESS)
        kvf_pull_end_carry(pull);
    kvf_ticket_tell(&pull->base, !kvf_carry_is_there(&pull->carry));
}

static kvf_status pull_begin(kvf_ticket *ticket, const kvf_agent_request *request) {
    kvf_pull *pull = kvf_pull_of(ticket);
    if (!request->patience_ns || !kvf_add(ticket->created, request->patience_ns, &pull->patience))
        pull->patience = ticket->deadline;
    pull->patience = kvf_min_u64(pull->patience, ticket->deadline);
    kvf_tickets_due(ticket->agent, pull->patience);
    return kvf_after_take(ticket, request->after, &pull->asker.after);
}

static void pull_ready(kvf_ticket *ticket, kvf_after *after) {
    kvf_pull *pull = kvf_pull_of(ticket);
    (void)after;
    kvf_asker_stop_waiting(&pull->asker);
    if (pull->base.state == KVF_TICKET_RESERVED && pull->base.groups)
        kvf_pull_move(pull);
}

/* Counts only while all leases are good: until now the blocks were the request's, so what was read is. */
static uint32_t pull_arrived(const kvf_ticket *ticket) {
    const kvf_pull *pull = (const kvf_pull *)ticket;
    if (!kvf_carry_is_there(&pull->carry) || kvf_pull_expired(pull, kvf_agent_now(ticket->agent)))
        return 0;
    return kvf_carry_layers(&pull->carry);
}

static void pull_free(kvf_ticket *ticket) {
    kvf_pull *pull = kvf_pull_of(ticket);
    kvf_remote *remote = pull->asker.remote;
    kvf_verify_stop(&pull->asker);
    kvf_asker_stop_waiting(&pull->asker);
    bool moves = kvf_carry_is_there(&pull->carry); /* a carry uses the request until it has ended */
    kvf_carry_free(&pull->carry);
    if (pull->request && !moves)
        kvf_geometry_put_back(remote->geometry, pull->request);
    else
        kvf_request_free(pull->request);
    kvf_free(pull->theirs);
    kvf_free(pull->key);
}

static const kvf_ticket_ops pull_ops = {
    .kind = KVF_REQUEST_PULL,
    .size = sizeof(kvf_pull),
    .asks = true,
    .begin = pull_begin,
    .tick = pull_tick,
    .fail = pull_fail,
    .met = pull_met,
    .arrived = pull_arrived,
    .ready = pull_ready,
    .verified = pull_verified,
    .free = pull_free,
};

/* ---- what the engine calls ------------------------------------------------------------------- */

/*
 * A rank may read a request of an engine only once at a time: it has one lease on it, and after its release the blocks
 * may go to another request, whose bytes a second pull would read.
 */
static kvf_status list_pull(kvf_pull *pull, const char *engine) {
    kvf_agent *agent = pull->base.agent;
    size_t name_bytes = strlen(engine) + 1;
    kvf_bytes key = {NULL, name_bytes + pull->base.id_bytes};
    kvf_ticket *other = NULL;
    key.data = pull->key = kvf_alloc(1, key.size);
    if (!pull->key) {
        kvf_ticket_free(&pull->base);
        return kvf_nomem("a request");
    }
    memcpy(pull->key, engine, name_bytes);
    memcpy(pull->key + name_bytes, pull->base.id, pull->base.id_bytes);
    HASH_FIND(hh_id, agent->pulls, key.data, key.size, other);
    if (!other)
        return kvf_ticket_list(&pull->base, &agent->pulls, key);
    kvf_ticket_free(&pull->base);
    return kvf_fail(KVF_E_EXISTS, "ticket %llu reads this request of %s already",
                    (unsigned long long)other->number, engine);
}

static kvf_status start_pull(kvf_agent *agent, const kvf_agent_request *request, uint64_t *out) {
    kvf_ticket *made;
    kvf_status status = kvf_ticket_make(agent, &pull_ops, request, &made);
    if (!status)
        status = list_pull(kvf_pull_of(made), request->contact.engine ? request->contact.engine : "");
    return status ? status : kvf_ticket_meet(kvf_asker_of(made), &request->contact, out);
}

kvf_status kvf_agent_pull(kvf_agent *agent, const kvf_agent_request *request, uint64_t *ticket) {
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    status = start_pull(agent, request, ticket);
    kvf_agent_unlock(agent);
    return status;
}

/* An event that the pull was given counts for blocks of which it was given none. */
static kvf_status name_destination(kvf_pull *pull, const kvf_group_steps *groups, uint32_t group_count,
                                   const kvf_ready_event *event) {
    kvf_after *after = NULL;
    kvf_status status = kvf_after_take(&pull->base, event, &after);
    if (!status)
        status = kvf_ticket_claim(&pull->base, groups, group_count);
    if (status) {
        kvf_after_drop(after);
        return status;
    }
    if (after) {
        kvf_asker_stop_waiting(&pull->asker);
        pull->asker.after = after;
    }
    if (pull->base.state == KVF_TICKET_RESERVED)
        kvf_pull_move(pull);
    return KVF_OK;
}

kvf_status kvf_agent_pull_into(kvf_agent *agent, uint64_t number, const kvf_group_steps *groups,
                               uint32_t group_count) {
    return kvf_agent_pull_into_after(agent, number, groups, group_count, NULL);
}

kvf_status kvf_agent_pull_into_after(kvf_agent *agent, uint64_t number, const kvf_group_steps *groups,
                                     uint32_t group_count, const kvf_ready_event *after) {
    if (!agent || !groups)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !agent ? "agent" : "groups");
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    kvf_work_take(agent);
    kvf_pull *pull = kvf_pull_of(kvf_ticket_find(agent, number, &pull_ops));
    if (!pull || pull->base.silent || pull->base.state == KVF_TICKET_OVER)
        status = kvf_fail(KVF_E_NOT_FOUND, "no pull has ticket %llu", (unsigned long long)number);
    else if (pull->base.groups)
        status = kvf_fail(KVF_E_EXISTS, "the pull has its destination already");
    else
        status = name_destination(pull, groups, group_count, after);
    kvf_work_give(agent);
    kvf_agent_unlock(agent);
    return status;
}
