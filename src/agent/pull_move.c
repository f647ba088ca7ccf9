/*
 * Moving the bytes of a pull, once every rank that it reads from has granted a lease and the destination is known; and
 * giving the leases back.
 */
#include <stdio.h>

#include "agent/arrival.h"
#include "agent/geometry.h"
#include "agent/histogram.h"
#include "agent/pace.h"
#include "agent/peers.h"
#include "agent/pull.h"
#include "agent/steps.h"
#include "agent/terms.h"
#include "agent/trace.h"
#include "agent/verify.h"
#include "model/model.h"
#include "transport/transport.h"

/* ---- leases ---------------------------------------------------------------------------------- */

void kvf_pull_release(kvf_pull *pull, kvf_status outcome) {
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

void kvf_pull_finish(kvf_pull *pull) {
    kvf_status status = kvf_ticket_gather(&pull->asker);
    if (status) {
        kvf_ticket_fail(&pull->base, status, kvf_error_detail(), NULL);
        return;
    }
    kvf_pull_release(pull, KVF_OK);
    kvf_ticket_done(&pull->base);
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
                    "group %s: steps [%llu, %llu) are wanted, but the producer holds [%llu, %llu)",
                    group->name, (unsigned long long)first, (unsigned long long)ours->end,
                    (unsigned long long)theirs->begin, (unsigned long long)theirs->end);
}

static kvf_status set_request(kvf_pull *pull) {
    kvf_remote *remote = pull->asker.remote;
    uint32_t groups = pull->base.group_count;
    kvf_status status = kvf_terms_check(remote, pull->base.groups); /* they may have come after the meeting */
    if (status)
        return status;
    if (!pull->request)
        status = kvf_geometry_request(remote->geometry, &pull->request);
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
    if (!status && pull->theirs)
        status = kvf_check_states(kvf_engine_model(pull->base.agent->engine), pull->base.groups, pull->theirs,
                                  groups);
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

/* A rank must have our card before it lends us slots. Joins the ranks that do not; true: some do not have it yet. */
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
        if (!kvf_session_join(session, true))
            waits = waits || session->joining || session->join_wanted;
    }
    return waits;
}

/* ---- connections that turn out not to read, or not soon ----------------------------------------- */

/* Whether a pull uses the connection of a session, or anything else that would fail with it, such as what another session
 * with the same endpoint pushes. A pull that is held back may have begun nothing yet. */
static bool is_used(const kvf_session *session) {
    const kvf_source *source;
    if (kvf_session_moves(session))
        return true;
    DL_FOREACH(session->sources, source) {
        if (source->ticket->base.kind == KVF_REQUEST_PULL &&
            kvf_carry_is_there(&kvf_pull_of(&source->ticket->base)->carry))
            return true;
    }
    return false;
}

/* Whether the connection to a source cannot read its memory, and another may. */
static bool is_to_pass_over(const kvf_pull *pull, const kvf_source *source) {
    kvf_session *session = source->session;
    const char *why = session && session->peer ? kvf_peer_refusal(session->peer) : NULL;
    return why && source->target->source != UINT32_MAX && kvf_way_of(&pull->base) != KVF_WAY_DIRECT &&
           kvf_session_pass_over(session, why);
}

static bool is_behind(const kvf_source *source) {
    const kvf_session *session = source->session;
    return session && session->peer && source->target->source != UINT32_MAX &&
           kvf_peer_is_behind(session->peer);
}

/* Ends such connections, so that others are made; one that is only behind, if nothing else uses it. False: something
 * still uses one that cannot read. */
static bool leave_connections(const kvf_pull *pull) {
    bool left = true;
    for (uint32_t i = 0; i < pull->asker.source_count; i++) {
        const kvf_source *source = &pull->asker.sources[i];
        const bool refused = is_to_pass_over(pull, source);
        if (!refused && !is_behind(source))
            continue;
        if (!is_used(source->session))
            kvf_session_disconnect(source->session);
        else if (refused)
            left = false;
    }
    return left;
}

/* After a refusal, everything is read anew, from the refused source by another transport. False: there is none; or the
 * engine uses layers that have arrived, and must not see them written again. */
static bool move_anew(kvf_pull *pull, kvf_status status) {
    bool any = false;
    if (pull->asker.arrival && pull->asker.arrival->layers > 0)
        return false;
    for (uint32_t i = 0; i < pull->asker.source_count && status == KVF_E_UNSUPPORTED; i++)
        any = is_to_pass_over(pull, &pull->asker.sources[i]) || any;
    if (!any)
        return false;
    pull->base.state = KVF_TICKET_RESERVED;
    kvf_pull_move(pull);
    return true;
}

void kvf_pull_move(kvf_pull *pull) {
    kvf_agent *agent = pull->base.agent;
    if (pull->asker.after && !pull->base.empty)
        return; /* goes on when its event has happened */
    pull->leaves = !pull->base.empty && !leave_connections(pull);
    if (pull->leaves)
        kvf_agent_due(agent, kvf_agent_now(agent) + KVF_MILLISECOND);
    if (pull->leaves || (!pull->base.empty && waits_to_join(pull)))
        return; /* goes on with kvf_pull_joined() */
    pull->base.state = KVF_TICKET_MOVING;
    if (pull->base.empty) {
        kvf_pull_finish(pull);
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
    kvf_pull *pull = kvf_pull_of(&source->ticket->base);
    if (pull->base.kind == KVF_REQUEST_PULL && pull->base.state == KVF_TICKET_RESERVED && pull->base.groups)
        kvf_pull_move(pull);
}

kvf_source *kvf_pull_expired(const kvf_pull *pull, uint64_t now) {
    for (uint32_t i = 0; i < pull->asker.source_count; i++) {
        kvf_source *source = &pull->asker.sources[i];
        if (source->generation && source->settled && now >= source->until)
            return source;
    }
    return NULL;
}

void kvf_pull_end_carry(kvf_pull *pull) {
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

void kvf_pull_arrived(kvf_pull *pull) {
    kvf_agent *agent = pull->base.agent;
    uint64_t now = kvf_agent_now(agent);
    kvf_source *late = kvf_pull_expired(pull, now);
    if (late) {
        kvf_ticket_fail(&pull->base, KVF_E_TIMEOUT, "the lease ran out before the last byte had arrived",
                        late->session);
        return;
    }
    kvf_histogram_add(&agent->stats.transfer, now - pull->asker.posted);
    kvf_histogram_add(&agent->stats.total, now - pull->base.created);
    kvf_pull_finish(pull);
}

void kvf_pull_poll(kvf_pull *pull) {
    kvf_status status = kvf_carry_status(&pull->carry);
    if (status == KVF_IN_PROGRESS)
        return;
    char why[512], detail[1024];
    (void)snprintf(why, sizeof why, "%s", status ? kvf_error_detail() : "");
    kvf_pull_end_carry(pull);
    if (!status)
        kvf_trace_reach(&pull->base, KVF_MOMENT_MOVED);
    (void)snprintf(detail, sizeof detail, "reading from %s failed with %s after %llu bytes: %s",
                   pull->asker.remote ? pull->asker.remote->name : "a producer", kvf_status_name(status),
                   (unsigned long long)pull->base.bytes, why);
    if (pull->base.silent)
        kvf_ticket_settle(&pull->base);
    else if (move_anew(pull, status))
        return;
    else if (status)
        kvf_ticket_fail(&pull->base, status, detail, NULL);
    else if (pull->base.agent->options.verify)
        kvf_verify_start(&pull->asker);
    else
        kvf_pull_arrived(pull);
}
