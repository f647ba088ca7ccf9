/*
 * Pulls: reading a request that a producer holds.
 *
 *   MEETING    the producer's engine is being met
 *   ASKING     each rank we read from was asked for a lease on the request
 *   RESERVED   all have granted one, and we do not know yet where to
 *   MOVING     runs are under way
 *   VERIFYING  checksums are compared
 *
 * What was read counts only if every lease was good until the last byte was there: until then the producer
 * cannot have given the blocks to another request.
 */
#include <stdio.h>

#include "agent/histogram.h"
#include "agent/pace.h"
#include "agent/peers.h"
#include "agent/pull.h"
#include "agent/terms.h"
#include "agent/trace.h"
#include "agent/verify.h"
#include "model/model.h"

/* ---- leases ---------------------------------------------------------------------------------- */

static kvf_pull *pull_of(kvf_ticket *ticket) {
    return (kvf_pull *)ticket;
}

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

/* What one rank of the producer holds: the same as its siblings. `theirs` becomes the pull's, or is freed. */
static kvf_status take_steps(kvf_pull *pull, kvf_group_steps *theirs) {
    uint32_t groups = kvf_model_group_count(kvf_engine_model(pull->base.agent->engine));
    kvf_group_steps *own = NULL;
    const kvf_group_steps *heard;
    kvf_status status = kvf_terms_hear(pull->asker.remote, theirs, &own, &heard);
    if (!status && pull->theirs && !same_groups(pull->theirs, heard, groups))
        status = kvf_fail(KVF_E_MISMATCH, "it holds other blocks than its siblings");
    if (!status && !pull->theirs) {
        pull->theirs = own ? kvf_steps_copy(own, groups) : theirs;
        theirs = own ? theirs : NULL;
        status = pull->theirs ? KVF_OK : kvf_nomem("a request");
    }
    kvf_free(own);
    kvf_free(theirs);
    return status;
}

/* A part of the tables of one rank; with the last, all of them. */
static kvf_status take_tables(kvf_source *source, const kvf_answer *answer) {
    kvf_pull *pull = pull_of(&source->ticket->base);
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

static void pull_move(kvf_pull *pull);

static void all_granted(kvf_pull *pull) {
    kvf_trace_reach(&pull->base, KVF_MOMENT_GRANTED);
    pull->base.state = KVF_TICKET_RESERVED;
    if (pull->base.groups)
        pull_move(pull);
}

void kvf_pull_granted(kvf_source *source) {
    kvf_pull *pull = pull_of(&source->ticket->base);
    source->settled = true;
    kvf_trace_reach_peer(&pull->base, KVF_MOMENT_GRANTED, source->session);
    kvf_agent_due(pull->base.agent, source->until);
    for (uint32_t i = 0; i < pull->asker.source_count; i++)
        if (!pull->asker.sources[i].settled)
            return;
    all_granted(pull);
}

static kvf_status ask(kvf_source *source);

/* Another lease than the parts before were under, or the producer begins anew: so do we. */
static bool goes_on(const kvf_source *source, const kvf_answer *answer) {
    return answer->first_id == source->parts.ids &&
           (source->parts.ids == 0 || answer->generation == source->generation);
}

/* They come with the first part, and anew where that does. */
static kvf_status take_records(kvf_source *source, const kvf_answer *answer) {
    if (answer->first_id > 0)
        return KVF_OK;
    kvf_records_free(&source->records);
    return kvf_records_add(&source->records, answer->records, answer->record_count, source->session->rank);
}

/* Takes what came, and asks for what is missing; `complete` receives whether nothing is. */
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
    kvf_pull *pull = pull_of(&source->ticket->base);
    uint64_t asked = call->first_sent;
    source->call = NULL;
    if (status == KVF_E_TIMEOUT && !answer)
        return; /* that was the pull's deadline, which has more to say */
    bool complete = false;
    if (!status)
        status = take_answer(source, answer, &complete);
    if (status) {
        if (status == KVF_E_PEER_LOST)
            return; /* the session says so itself, to all who use it */
        kvf_ticket_fail(&pull->base, status, kvf_error_detail(), source->session);
        return;
    }
    if (!complete)
        return;
    /* The lease began when we asked, or later. Where that was long ago, as when the call waited for the
     * hold, a heartbeat has to say how long it lasts. */
    source->until = asked + answer->time_ns;
    if (source->until >= kvf_agent_now(pull->base.agent) + answer->time_ns / 2) {
        kvf_agent_due(pull->base.agent, source->session->next_beat);
        kvf_pull_granted(source);
    } else {
        source->session->next_beat = 0;
        kvf_agent_due(pull->base.agent, 0);
    }
}

/* When it fails, as it stands. */
static uint64_t latest(const kvf_pull *pull) {
    bool waits = pull->base.state == KVF_TICKET_MEETING || pull->base.state == KVF_TICKET_ASKING;
    return waits ? pull->patience : pull->base.deadline;
}

static kvf_status ask(kvf_source *source) {
    kvf_pull *pull = pull_of(&source->ticket->base);
    uint64_t now = kvf_agent_now(pull->base.agent), end = latest(pull);
    kvf_call_body body = {.request = {pull->base.id, pull->base.id_bytes},
                          .rank_count = source->target->expected_ranks,
                          .first_id = source->parts.ids,
                          .time_ns = end > now ? end - now : 0};
    return kvf_call_start(source->session, KVF_CALL_ACQUIRE, &body, end, false, on_granted, source,
                          &source->call);
}

/* Tells each rank of the producer that waits for us that it need not. Answers are not waited for. */
static void release_all(kvf_pull *pull, kvf_status outcome) {
    uint64_t deadline = kvf_agent_now(pull->base.agent) + pull->base.agent->options.lease_ns;
    for (uint32_t i = 0; i < pull->asker.source_count; i++) {
        kvf_source *source = &pull->asker.sources[i];
        if (!source->session || source->session->state == KVF_SESSION_LOST)
            continue;
        if (source->generation)
            kvf_trace_reach_peer(&pull->base, KVF_MOMENT_RELEASED, source->session);
        kvf_call_body body = {.request = {pull->base.id, pull->base.id_bytes},
                              .rank_count = source->target->expected_ranks,
                              .generation = source->generation,
                              .earlier = source->call ? source->call->number : 0,
                              .status = outcome};
        (void)kvf_call_start(source->session, KVF_CALL_RELEASE, &body, deadline, false, NULL, NULL, NULL);
    }
}

/* Everything that was wanted is there, with the records. */
static void finish(kvf_pull *pull) {
    kvf_status status = kvf_ticket_gather(&pull->asker);
    if (status) {
        kvf_ticket_fail(&pull->base, status, kvf_error_detail(), NULL);
        return;
    }
    release_all(pull, KVF_OK);
    kvf_ticket_done(&pull->base);
}

static void pull_met(kvf_ticket *ticket) {
    kvf_pull *pull = pull_of(ticket);
    if (pull->base.groups && pull->base.empty) {
        finish(pull);
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

/* ---- moving ---------------------------------------------------------------------------------- */

static kvf_status check_held(const kvf_pull *pull, uint32_t g) {
    const kvf_group_desc *group = kvf_model_group(kvf_engine_model(pull->base.agent->engine), g);
    const kvf_group_steps *ours = &pull->base.groups[g], *theirs = &pull->theirs[g];
    if (ours->begin >= ours->end)
        return KVF_OK;
    uint64_t first = kvf_first_moved(group, ours->begin, ours->end);
    if (theirs->begin <= first && ours->end <= theirs->end)
        return KVF_OK;
    return kvf_fail(KVF_E_RANGE,
                    "group %s: steps [%llu, %llu) are wanted, and the producer holds [%llu, %llu)",
                    group->name, (unsigned long long)first, (unsigned long long)ours->end,
                    (unsigned long long)theirs->begin, (unsigned long long)theirs->end);
}

static kvf_status set_request(kvf_pull *pull) {
    kvf_remote *remote = pull->asker.remote;
    uint32_t groups = pull->base.group_count;
    kvf_status status = kvf_terms_check(remote, pull->base.groups); /* they may have come after the meeting */
    if (status)
        return status;
    if (remote->spare) {
        pull->request = remote->spare;
        remote->spare = NULL;
    } else {
        status = kvf_request_create(remote->plan, &pull->request);
    }
    kvf_group_request *wanted = kvf_alloc0(groups, sizeof *wanted);
    if (!status && !wanted)
        status = kvf_nomem("a request");
    for (uint32_t g = 0; g < groups && !status; g++) {
        wanted[g] = (kvf_group_request){.local = pull->base.groups[g].table,
                                        .begin = pull->base.groups[g].begin,
                                        .end = pull->base.groups[g].end};
        if (pull->theirs)
            wanted[g].remote = pull->theirs[g].table;
        if (pull->theirs)
            status = check_held(pull, g);
    }
    if (!status)
        status = kvf_request_set(pull->request, wanted, groups);
    kvf_free(wanted);
    return status;
}

/* The sessions and leases of the sources of the plan. */
static void list_sources(const kvf_pull *pull, kvf_session **sessions, uint64_t *permissions) {
    for (uint32_t i = 0; i < pull->asker.source_count; i++) {
        const kvf_source *source = &pull->asker.sources[i];
        if (source->target->source == UINT32_MAX)
            continue;
        sessions[source->target->source] = source->session;
        permissions[source->target->source] = source->generation;
    }
}

static kvf_status start_carry(kvf_pull *pull) {
    kvf_trace_reach(&pull->base, KVF_MOMENT_BEGUN);
    kvf_status status = set_request(pull);
    kvf_trace_reach(&pull->base, KVF_MOMENT_PLANNED);
    uint32_t count = kvf_plan_source_count(pull->asker.remote->plan);
    kvf_session **sessions = kvf_alloc0(count, sizeof(*sessions));
    uint64_t *permissions = kvf_alloc0(count, sizeof *permissions);
    if (!status && (!sessions || !permissions))
        status = kvf_nomem("a request");
    pull->asker.posted = kvf_agent_now(pull->base.agent);
    if (!status) {
        list_sources(pull, sessions, permissions);
        status = kvf_carry_pull(&pull->carry, &pull->base, pull->request, sessions, permissions,
                                pull->asker.remote->alike, kvf_pace_start(&pull->base));
    }
    if (kvf_carry_is_there(&pull->carry))
        DL_APPEND2(pull->base.agent->moving_pulls, pull, moving_prev, moving_next);
    kvf_free(permissions);
    kvf_free((void *)sessions);
    return status;
}

/* Whoever is to lend us slots must know by whom it is asked: whether some do not yet. They are told. */
static bool waits_to_join(kvf_pull *pull) {
    const kvf_remote *remote = pull->asker.remote;
    kvf_way way = kvf_way_by(&pull->base, remote->plan);
    bool waits = false;
    for (uint32_t i = 0; i < pull->asker.source_count && remote->alike; i++) {
        const kvf_source *source = &pull->asker.sources[i];
        kvf_session *session = source->session;
        if (source->target->source == UINT32_MAX || session->join_failed ||
            !kvf_way_uses_stage(session, way, remote->plan))
            continue;
        session->join_failed = kvf_session_join(session, true) != KVF_OK;
        waits = waits || session->joining || session->join_wanted;
    }
    return waits;
}

static void pull_move(kvf_pull *pull) {
    kvf_agent *agent = pull->base.agent;
    if (!pull->base.empty && waits_to_join(pull))
        return; /* goes on with kvf_pull_joined() */
    pull->base.state = KVF_TICKET_MOVING;
    if (pull->base.empty) {
        finish(pull);
        return;
    }
    kvf_status status = start_carry(pull);
    if (status) {
        kvf_ticket_fail(&pull->base, status, kvf_error_detail(), NULL);
        return;
    }
    kvf_histogram_add(&agent->stats.queue, pull->asker.posted - pull->base.created);
    kvf_histogram_add(&agent->stats.post, kvf_agent_now(agent) - pull->asker.posted);
    kvf_trace_reach(&pull->base, KVF_MOMENT_POSTED);
    agent->again = true;
}

void kvf_pull_joined(kvf_source *source) {
    kvf_pull *pull = pull_of(&source->ticket->base);
    if (pull->base.kind == KVF_REQUEST_PULL && pull->base.state == KVF_TICKET_RESERVED && pull->base.groups)
        pull_move(pull);
}

/* Was every lease good until now? */
static kvf_source *expired(const kvf_pull *pull, uint64_t now) {
    for (uint32_t i = 0; i < pull->asker.source_count; i++) {
        kvf_source *source = &pull->asker.sources[i];
        if (source->generation && source->settled && now >= source->until)
            return source;
    }
    return NULL;
}

static void end_carry(kvf_pull *pull) {
    kvf_agent *agent = pull->base.agent;
    DL_DELETE2(agent->moving_pulls, pull, moving_prev, moving_next);
    const kvf_carried carried = kvf_carry_counts(&pull->carry);
    for (uint32_t i = 0; i < pull->asker.source_count; i++) {
        kvf_source *source = &pull->asker.sources[i];
        if (source->session && source->target->source != UINT32_MAX)
            source->session->bytes_packed += kvf_carry_packed(&pull->carry, source->target->source);
        kvf_peer_served(source->session);
    }
    kvf_carry_free(&pull->carry);
    pull->base.bytes = carried.bytes;
    pull->base.packed = carried.packed;
    pull->base.runs = carried.runs;
    agent->stats.bytes_read += carried.bytes;
    agent->stats.bytes_packed += carried.packed;
    agent->stats.runs += carried.runs;
}

static void arrived(kvf_pull *pull) {
    kvf_agent *agent = pull->base.agent;
    uint64_t now = kvf_agent_now(agent);
    kvf_source *late = expired(pull, now);
    if (late) {
        kvf_ticket_fail(&pull->base, KVF_E_TIMEOUT, "the lease ran out before the last byte was there",
                        late->session);
        return;
    }
    kvf_histogram_add(&agent->stats.transfer, now - pull->asker.posted);
    kvf_histogram_add(&agent->stats.total, now - pull->base.created);
    finish(pull);
}

static void pull_verified(kvf_ticket *ticket) {
    kvf_pull *pull = pull_of(ticket);
    arrived(pull);
}

void kvf_pull_poll(kvf_pull *pull) {
    kvf_status status = kvf_carry_status(&pull->carry);
    if (status == KVF_IN_PROGRESS)
        return;
    char why[512], detail[1024];
    (void)snprintf(why, sizeof why, "%s", status ? kvf_error_detail() : "");
    end_carry(pull);
    if (!status)
        kvf_trace_reach(&pull->base, KVF_MOMENT_MOVED);
    (void)snprintf(detail, sizeof detail, "reading from %s failed with %s after %llu bytes: %s",
                   pull->asker.remote ? pull->asker.remote->name : "a producer", kvf_status_name(status),
                   (unsigned long long)pull->base.bytes, why);
    if (pull->base.silent)
        kvf_ticket_settle(&pull->base);
    else if (status)
        kvf_ticket_fail(&pull->base, status, detail, NULL);
    else if (pull->base.agent->options.verify)
        kvf_verify_start(&pull->asker);
    else
        arrived(pull);
}

static void pull_tick(kvf_ticket *ticket, uint64_t now) {
    kvf_pull *pull = pull_of(ticket);
    if (pull->base.state == KVF_TICKET_OVER || pull->base.state == KVF_TICKET_DOUBT)
        return;
    if (now >= latest(pull)) {
        char detail[512];
        const char *unmet = kvf_ticket_unmet(&pull->asker);
        const char *why = unmet                                   ? unmet
                          : pull->base.state == KVF_TICKET_ASKING ? "no lease on the request was granted"
                          : pull->base.state == KVF_TICKET_RESERVED && pull->base.groups
                              ? "not every rank has answered whether its stage takes us"
                          : pull->base.state == KVF_TICKET_RESERVED ? "no destination was named"
                                                                    : "the bytes were not there";
        (void)snprintf(detail, sizeof detail, "%s: %s",
                       now >= pull->base.deadline ? "the deadline has passed" : "patience has ended", why);
        kvf_ticket_fail(&pull->base, KVF_E_TIMEOUT, detail, NULL);
        return;
    }
    kvf_agent_due(pull->base.agent, latest(pull));
    kvf_source *late = expired(pull, now);
    if (late)
        kvf_ticket_fail(&pull->base, KVF_E_TIMEOUT, "the lease ran out", late->session);
    for (uint32_t i = 0; i < pull->asker.source_count; i++)
        if (pull->asker.sources[i].generation && pull->asker.sources[i].settled)
            kvf_agent_due(pull->base.agent, pull->asker.sources[i].until);
}

static void pull_fail(kvf_ticket *ticket, kvf_status status, const char *detail, const kvf_session *session) {
    kvf_pull *pull = pull_of(ticket);
    if (pull->base.silent)
        return;
    kvf_verify_stop(&pull->asker);
    kvf_ticket_record_failure(&pull->base, status, detail, session);
    kvf_ticket_unlist(&pull->base);
    release_all(pull, status);
    kvf_ticket_detach(&pull->asker);
    kvf_carry_cancel(&pull->carry);
    if (kvf_carry_is_there(&pull->carry) && kvf_carry_status(&pull->carry) != KVF_IN_PROGRESS)
        end_carry(pull);
    kvf_ticket_tell(&pull->base, !kvf_carry_is_there(&pull->carry));
}

static kvf_status pull_begin(kvf_ticket *ticket, const kvf_agent_request *request) {
    kvf_pull *pull = pull_of(ticket);
    if (!request->patience_ns || !kvf_add(ticket->created, request->patience_ns, &pull->patience))
        pull->patience = ticket->deadline;
    pull->patience = kvf_min_u64(pull->patience, ticket->deadline);
    kvf_agent_due(ticket->agent, pull->patience);
    return KVF_OK;
}

static void pull_free(kvf_ticket *ticket) {
    kvf_pull *pull = pull_of(ticket);
    kvf_remote *remote = pull->asker.remote;
    kvf_verify_stop(&pull->asker);
    bool moves = kvf_carry_is_there(&pull->carry); /* then the request is used until that has ended */
    kvf_carry_free(&pull->carry);
    if (remote && pull->request && !remote->spare && !moves) {
        remote->spare = pull->request;
        pull->request = NULL;
    }
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
    .verified = pull_verified,
    .free = pull_free,
};

/* ---- what the engine calls ------------------------------------------------------------------- */

/*
 * A rank reads a request of an engine once at a time: it has one lease on it, with whose release the blocks are another
 * request's. A second pull meanwhile would read what is written then.
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
        status = list_pull(pull_of(made), request->contact.engine ? request->contact.engine : "");
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

kvf_status kvf_agent_pull_into(kvf_agent *agent, uint64_t number, const kvf_group_steps *groups,
                               uint32_t group_count) {
    if (!agent || !groups)
        return kvf_fail(KVF_E_INVALID, "%s is NULL", !agent ? "agent" : "groups");
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    kvf_work_take(agent);
    kvf_pull *pull = pull_of(kvf_ticket_find(agent, number, &pull_ops));
    if (!pull || pull->base.silent || pull->base.state == KVF_TICKET_OVER)
        status = kvf_fail(KVF_E_NOT_FOUND, "no pull has ticket %llu", (unsigned long long)number);
    else if (pull->base.groups)
        status = kvf_fail(KVF_E_EXISTS, "the pull has its destination already");
    else
        status = kvf_ticket_claim(&pull->base, groups, group_count);
    if (!status && pull->base.state == KVF_TICKET_RESERVED)
        pull_move(pull);
    kvf_work_give(agent);
    kvf_agent_unlock(agent);
    return status;
}
