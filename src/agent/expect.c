/*
 * Expectations: being written to by a producer.
 *
 * Each producer rank may write until a time, which heartbeats extend. When an expectation fails its writers are told to
 * stop. Until each has answered that it stopped, or its time is over and nothing that it has sent can still arrive, the
 * blocks are in doubt: no other request may use them.
 */
#include <stdio.h>

#include "agent/after.h"
#include "agent/brought.h"
#include "agent/carry.h"
#include "agent/expect.h"
#include "agent/histogram.h"
#include "agent/push.h"
#include "agent/terms.h"
#include "agent/trace.h"
#include "agent/verify.h"
#include "model/model.h"
#include "plan/plan.h"

/* Writers stop when their time is over; the blocks are kept for this much longer. */
#define WRITER_MARGIN (250 * KVF_MILLISECOND)
/* The pause before asking again whether the kernel has cleared a process away. */
#define ENDING_PAUSE (5 * KVF_MILLISECOND)

static kvf_status say_tables(kvf_source *source, uint64_t until);

/* Refused: it will not write. But it may have begun to, and have forgotten the session before its answer came. */
static void on_refused(kvf_source *source, kvf_status status) {
    char detail[KVF_DETAIL_BYTES];
    (void)snprintf(detail, sizeof detail, "%s", kvf_error_detail());
    source->settled = kvf_expect_has_stopped(source);
    kvf_ticket_fail(&source->ticket->base, status, detail, source->session);
}

static void on_expected(kvf_call *call, kvf_status status, const kvf_answer *answer) {
    kvf_source *source = call->context;
    source->call = NULL;
    if (status == KVF_E_PEER_LOST)
        return; /* a lost session tells all its users */
    if (status && !answer)
        return; /* that was the expectation's deadline, which gives a better reason */
    if (status)
        on_refused(source, status);
    else if (source->more && (status = say_tables(source, source->until)))
        kvf_ticket_fail(&source->ticket->base, status, kvf_error_detail(), source->session);
}

static void expect_check(kvf_asker *expect);

/* If packed, only we write the blocks, from slots that writers have filled. */
static bool is_packed(const kvf_asker *expect) {
    return kvf_way_by(&expect->base, expect->remote ? expect->remote->plan : NULL) == KVF_WAY_PACKED;
}

static kvf_call_body body_of(const kvf_source *source, uint64_t until) {
    const kvf_asker *expect = source->ticket;
    return (kvf_call_body){.request = {expect->base.id, expect->base.id_bytes},
                           .generation = kvf_expect_generation(expect),
                           .time_ns = kvf_session_their_time(source->session, until),
                           .rank_count = source->target->expected_ranks};
}

/* Sends as much of the block tables as fits into a message. */
static kvf_status say_tables(kvf_source *source, uint64_t until) {
    kvf_asker *expect = source->ticket;
    kvf_wire_group part[KVF_MODEL_MAX_GROUPS];
    kvf_call_body body = body_of(source, until);
    const kvf_group_steps *groups = NULL;
    kvf_group_steps *own = NULL;
    kvf_status status = kvf_terms_say(expect->remote, expect->base.groups, &own, &groups);
    if (status)
        return status;
    body.packed = is_packed(expect);
    body.groups = part;
    body.group_count = kvf_terms_group_count(expect->remote);
    body.first_id = source->told_ids;
    body.more = source->more = kvf_wire_part(groups, body.group_count, body.first_id, part);
    for (uint32_t g = 0; g < body.group_count; g++)
        source->told_ids += part[g].table.count;
    status = kvf_call_start(source->session, KVF_CALL_EXPECT, &body, expect->base.deadline, false,
                            on_expected, source, &source->call);
    kvf_free(own);
    return status;
}

static kvf_status check_way(const kvf_asker *expect) {
    if (kvf_way_of(&expect->base) == KVF_WAY_DIRECT) {
        kvf_status status = kvf_plan_check_runs(expect->remote->plan);
        return status ? kvf_fail_in(status, "way is direct: ") : KVF_OK;
    }
    if (!is_packed(expect))
        return KVF_OK;
    if (!expect->base.agent->stage)
        return kvf_fail(KVF_E_UNSUPPORTED, "way is packed, but this agent has no stage");
    return expect->remote->alike ? KVF_OK : kvf_way_unlike(expect->remote->name);
}

/* Ends the flows of its writers, so that their pending data does not reach the blocks. False: a round of the loop is to
 * do it again. A device still copies; or only the thread that has the work may end flows, and this one lacks it, because
 * it starts the expectation. */
static bool end_flows(const kvf_asker *expect) {
    kvf_agent *agent = expect->base.agent;
    bool told = false; /* before a writer was told our number there is no flow */
    for (uint32_t i = 0; i < expect->source_count && !told; i++)
        told = expect->sources[i].until > 0;
    if (told && !kvf_work_is_ours(agent)) {
        agent->due = 0;
        return false;
    }
    if (!told || kvf_stage_revoke(agent->stage, kvf_expect_generation(expect)))
        return true;
    kvf_agent_due(agent, kvf_agent_now(agent) + ENDING_PAUSE);
    return false;
}

/* Other sources are only told that they need not. */
static bool has_to_write(const kvf_source *source) {
    return source->target->source != UINT32_MAX && !source->ticket->base.empty;
}

/* A rank that has to write needs our card. It gets the card first, for it takes a JOIN behind an EXPECT for the sign that
 * we have forgotten what we expect: `waits` receives whether the thread that has the work is still to send it. */
static kvf_status send_card(const kvf_source *source, bool *waits) {
    const kvf_asker *expect = source->ticket;
    kvf_session *session = source->session;
    const kvf_plan *plan = expect->remote->plan;
    kvf_status status = check_way(expect);
    /* It does not know whether we are alike: if it knows our stage, it may write packed. */
    if (!status)
        status = kvf_session_join(session,
                                  expect->remote->alike &&
                                      kvf_way_joins_stage(session, kvf_way_by(&expect->base, plan), plan));
    *waits = !status && !session->joined && !session->joining;
    return status;
}

static kvf_status ask(kvf_source *source) {
    kvf_asker *expect = source->ticket;
    kvf_session *session = source->session;
    uint64_t until = kvf_agent_now(expect->base.agent) + expect->base.agent->options.lease_ns;
    source->asked = true;
    source->opening = session->openings;
    if (!has_to_write(source)) {
        kvf_call_body body = body_of(source, until);
        source->settled = source->written = true;
        return kvf_call_start(session, KVF_CALL_EXPECT, &body, until, false, NULL, NULL, NULL);
    }
    kvf_trace_reach_peer(&expect->base, KVF_MOMENT_EXPECTED, session); /* the peer may hear it at once */
    kvf_status status = say_tables(source, until);
    if (!status) {
        source->until = until;
        kvf_session_due(session, session->next_beat);
    }
    return status;
}

/* Asks the ranks whose session is open by now, as only then is their clock known, and which have our card. Before the
 * engine's event none may write. */
static void ask_all(kvf_asker *expect) {
    bool all = true;
    if (expect->after && !expect->base.empty)
        return;
    for (uint32_t i = 0; i < expect->source_count; i++) {
        kvf_source *source = &expect->sources[i];
        if (source->asked)
            continue;
        if (!source->session || source->session->state != KVF_SESSION_OPEN) {
            all = false;
            continue;
        }
        bool waits = false;
        kvf_status status = has_to_write(source) ? send_card(source, &waits) : KVF_OK;
        all = all && !waits;
        if (!status && !waits)
            status = ask(source);
        if (status) {
            kvf_ticket_fail(&expect->base, status, kvf_error_detail(), source->session);
            return;
        }
    }
    if (!all)
        return;
    expect->base.state = KVF_TICKET_MOVING;
    if (expect->base.empty) {
        kvf_ticket_done(&expect->base);
        return;
    }
    expect->posted = kvf_agent_now(expect->base.agent);
    kvf_trace_reach(&expect->base, KVF_MOMENT_POSTED);
    kvf_histogram_add(&expect->base.agent->stats.queue, expect->posted - expect->base.created);
    expect_check(expect);
}

static void expect_met(kvf_ticket *ticket) {
    ask_all(kvf_asker_of(ticket));
}

static kvf_status expect_begin(kvf_ticket *ticket, const kvf_agent_request *request) {
    return kvf_after_take(ticket, request->after, &kvf_asker_of(ticket)->after);
}

static void expect_ready(kvf_ticket *ticket, kvf_after *after) {
    (void)after;
    kvf_asker_stop_waiting(kvf_asker_of(ticket));
    if (ticket->state == KVF_TICKET_ASKING)
        ask_all(kvf_asker_of(ticket));
}

/* Answers the words that all is written which waited until it was verified. */
static void answer_written(kvf_asker *expect, kvf_status status, const char *detail) {
    for (uint32_t i = 0; i < expect->source_count; i++) {
        kvf_source *source = &expect->sources[i];
        if (!source->written_call || !source->session)
            continue;
        kvf_call_body call = {.number = source->written_call, .kind = KVF_CALL_WRITTEN};
        source->written_call = 0;
        kvf_answer_status(source->session, &call, status, detail);
    }
}

static void expect_verified(kvf_ticket *ticket) {
    kvf_asker *expect = kvf_asker_of(ticket);
    kvf_agent *agent = expect->base.agent;
    uint64_t now = kvf_agent_now(agent);
    answer_written(expect, KVF_OK, "");
    expect->complete = true;
    if (!end_flows(expect))
        return; /* the next tick tries again */
    kvf_status status = kvf_ticket_gather(expect);
    if (status) {
        kvf_ticket_fail(&expect->base, status, kvf_error_detail(), NULL);
        return;
    }
    kvf_histogram_add(&agent->stats.transfer, now - expect->posted);
    kvf_histogram_add(&agent->stats.total, now - expect->base.created);
    kvf_ticket_done(&expect->base);
}

static void expect_check(kvf_asker *expect) {
    if (expect->base.state != KVF_TICKET_MOVING)
        return;
    for (uint32_t i = 0; i < expect->source_count; i++)
        if (!expect->sources[i].written)
            return;
    kvf_trace_reach(&expect->base, KVF_MOMENT_MOVED);
    if (expect->base.agent->options.verify)
        kvf_verify_start(expect);
    else
        expect_verified(&expect->base);
}

/* ---- written --------------------------------------------------------------------------------- */

static const kvf_ticket_ops expect_ops;

static kvf_asker *find(const kvf_agent *agent, uint64_t generation) {
    const uint64_t number = generation & ~KVF_EXPECTATION;
    return number == generation ? NULL : kvf_asker_of(kvf_ticket_find(agent, number, &expect_ops));
}

kvf_asker *kvf_expect_moving(const kvf_agent *agent, uint64_t generation) {
    kvf_asker *expect = find(agent, generation);
    bool live =
        expect && (expect->base.state == KVF_TICKET_ASKING || expect->base.state == KVF_TICKET_MOVING);
    return live ? expect : NULL;
}

bool kvf_expect_was(const kvf_agent *agent, uint64_t generation) {
    const uint64_t number = generation & ~KVF_EXPECTATION;
    return generation != number && number > 0 && number <= agent->next_ticket &&
           !kvf_expect_moving(agent, generation);
}

static kvf_source *source_of(const kvf_asker *expect, const kvf_session *session) {
    for (uint32_t i = 0; expect && i < expect->source_count; i++)
        if (expect->sources[i].session == session)
            return &expect->sources[i];
    return NULL;
}

/* It has failed, and does not take what it was said to be written. */
static void answer_given_up(kvf_session *session, const kvf_call_body *call, const kvf_asker *expect) {
    kvf_answer_status(session, call, KVF_E_CANCELLED, expect->base.detail ? expect->base.detail : "");
}

/*
 * A writer that has lost its connection to us cannot know which of its writes are still on their way. If the transport
 * cannot stop them, or they have not ended yet, we look again when its time is over. If packed, they reach no blocks, and
 * what else it writes is left alone.
 */
static bool stops(const kvf_source *source) {
    const kvf_session *session = source->session;
    if (is_packed(source->ticket))
        return true;
    const kvf_status status = kvf_endpoint_stop(session->agent, session->card, session->card_bytes, true);
    return status != KVF_E_AGAIN && status != KVF_E_UNSUPPORTED;
}

bool kvf_expect_has_stopped(const kvf_source *source) {
    return source->opening == source->session->openings || stops(source);
}

/* WRITTEN may be repeated, or late: it counts only if the expectation still waits for it. */
void kvf_expect_written(kvf_session *session, const kvf_call_body *call) {
    kvf_asker *expect = find(session->agent, call->generation);
    kvf_source *source = source_of(expect, session);
    if (!source || expect->base.state == KVF_TICKET_OVER) {
        session->agent->stats.messages_stale++;
        /* We may have lost the writer, and met it again. */
        if (expect && expect->base.silent && !call->status)
            answer_given_up(session, call, expect);
        else
            kvf_answer_status(session, call, KVF_OK, "");
        return;
    }
    bool news = !source->settled;
    source->settled = source->settled || call->status != KVF_E_PEER_LOST || stops(source);
    if (expect->base.state == KVF_TICKET_DOUBT || call->status) {
        if (call->status)
            kvf_answer_status(session, call, KVF_OK, "");
        else /* it has not heard of the withdrawal, and takes this for one */
            answer_given_up(session, call, expect);
        if (call->status && !expect->base.silent) {
            (void)kvf_fail(call->status, "%s rank %u: %s", session->engine, session->rank,
                           call->detail[0] ? call->detail : "it failed without giving a reason");
            kvf_ticket_fail(&expect->base, call->status, kvf_error_detail(), session);
        }
        expect->base.agent->due = 0;
        return;
    }
    if (expect->base.agent->options.verify)
        source->written_call = call->number;
    else
        kvf_answer_status(session, call, KVF_OK, "");
    if (!news)
        return;
    kvf_status status = kvf_records_add(&source->records, call->records, call->record_count, session->rank);
    if (status) {
        kvf_ticket_fail(&expect->base, status, kvf_error_detail(), session);
        return;
    }
    kvf_call_drop(source->call); /* EXPECT: the producer has heard it, even if its answer was lost */
    source->call = NULL;
    source->written = true;
    kvf_trace_reach_peer(&expect->base, KVF_MOMENT_WRITTEN, session);
    expect->base.bytes += call->bytes;
    session->bytes_received += call->bytes;
    expect_check(expect);
}

/* ---- failing --------------------------------------------------------------------------------- */

static void on_withdrawn(kvf_call *call, kvf_status status, const kvf_answer *answer) {
    kvf_source *source = call->context;
    (void)answer;
    source->call = NULL;
    if (status)
        return; /* then it is over when its time ends */
    source->settled = kvf_expect_has_stopped(source);
    source->ticket->base.agent->due = 0;
}

/* Keeps what is needed to shut the writer out: the session may be gone by then. */
static void keep_card(kvf_source *source) {
    const kvf_session *session = source->session;
    source->gone = session->gone;
    source->card = kvf_copy(session->card, session->card_bytes, 1);
    source->card_bytes = session->card_bytes;
}

static void withdraw(kvf_source *source) {
    kvf_asker *expect = source->ticket;
    uint64_t earlier = source->call ? source->call->number : 0;
    kvf_call_drop(source->call);
    source->call = NULL;
    if (source->settled || !source->session || !source->until)
        return;
    keep_card(source);
    kvf_call_body body = {.request = {expect->base.id, expect->base.id_bytes},
                          .generation = kvf_expect_generation(expect),
                          .earlier = earlier};
    /* A packed one's blocks are free without the answer, and the call is repeated when the ticket is gone. */
    if (is_packed(expect))
        (void)kvf_call_start(source->session, KVF_CALL_WITHDRAW, &body, source->until, false, NULL, NULL,
                             NULL);
    else
        (void)kvf_call_start(source->session, KVF_CALL_WITHDRAW, &body, source->until, false, on_withdrawn,
                             source, &source->call);
}

/*
 * A writer's time is over, and it has not reported that it stopped. It stops by itself, unless its process is suspended
 * in the middle of a write: then we shut it out, and wait for it. If the transport cannot do that, the network may still
 * have what it sent.
 */
static bool is_shut_out(kvf_source *source, uint64_t now) {
    kvf_agent *agent = source->ticket->base.agent;
    if (source->late_until || !source->card)
        return now >= source->late_until;
    const kvf_status status = kvf_endpoint_stop(agent, source->card, source->card_bytes, true);
    if (status == KVF_E_UNSUPPORTED) {
        source->late_until =
            source->until + WRITER_MARGIN + kvf_endpoint_late_ns(agent, source->card, source->card_bytes);
        return now >= source->late_until;
    }
    if (status != KVF_E_AGAIN)
        return true;
    if (!source->stays) /* logged once: it may stay for as long as its process lives */
        kvf_agent_log(agent, KVF_LOG_WARNING, kvf_error_detail());
    source->stays = true;
    return false;
}

/*
 * Whether a writer's process has ended with nothing under way: the transport has seen the process, and no longer does.
 * If the transport cannot tell (UCX and libfabric may still take in earlier data), its time has to end.
 */
static bool has_ended(kvf_source *source) {
    kvf_agent *agent = source->ticket->base.agent;
    kvf_status status =
        source->card ? kvf_endpoint_stop(agent, source->card, source->card_bytes, true) : KVF_E_UNSUPPORTED;
    source->gone = status == KVF_E_AGAIN; /* it is being cleared away: we ask again */
    return status == KVF_OK;
}

static bool all_settled(kvf_asker *expect, uint64_t now) {
    bool all = true;
    if (!end_flows(expect))
        return false;
    if (is_packed(expect)) /* only slots are in doubt, and they are the stage's */
        return true;
    for (uint32_t i = 0; i < expect->source_count; i++) {
        kvf_source *source = &expect->sources[i];
        if (!source->until)
            continue; /* was never asked to write */
        uint64_t end = source->until + WRITER_MARGIN;
        if (!source->settled && source->gone)
            source->settled = has_ended(source);
        if (!source->settled && now >= end)
            source->settled = is_shut_out(source, now);
        if (!source->settled)
            kvf_agent_due(expect->base.agent, source->gone         ? now + ENDING_PAUSE
                                              : now < end          ? end
                                              : source->late_until ? source->late_until
                                                                   : now + WRITER_MARGIN);
        all &= source->settled;
    }
    return all;
}

static void expect_fail(kvf_ticket *ticket, kvf_status status, const char *detail,
                        const kvf_session *session) {
    kvf_asker *expect = kvf_asker_of(ticket);
    if (expect->base.silent)
        return;
    kvf_verify_stop(expect);
    kvf_asker_stop_waiting(expect);
    kvf_ticket_record_failure(&expect->base, status, detail, session);
    answer_written(expect, KVF_E_CANCELLED, expect->base.detail ? expect->base.detail : "");
    if (expect->base.state != KVF_TICKET_MEETING)
        for (uint32_t i = 0; i < expect->source_count; i++)
            withdraw(&expect->sources[i]);
    kvf_ticket_tell(&expect->base, all_settled(expect, kvf_agent_now(expect->base.agent)));
}

/* Names the first writer that is late: perhaps its engine never pushed. */
static void fail_late(kvf_asker *expect) {
    char detail[KVF_DETAIL_BYTES], why[KVF_DETAIL_BYTES / 2];
    const bool unmet = kvf_ticket_unmet(expect, why, sizeof why);
    const kvf_session *late = NULL;
    uint32_t writers = 0, written = 0;
    for (uint32_t i = 0; i < expect->source_count; i++) {
        const kvf_source *source = &expect->sources[i];
        if (!has_to_write(source))
            continue;
        writers++;
        written += source->written;
        late = late || source->written ? late : source->session;
    }
    if (unmet)
        (void)snprintf(detail, sizeof detail, "the deadline has passed: %s", why);
    else
        (void)snprintf(detail, sizeof detail,
                       "the deadline has passed: %u of %u producer ranks have written everything%s", written,
                       writers, written < writers ? "" : ", but it is not verified yet");
    kvf_ticket_fail(&expect->base, KVF_E_TIMEOUT, detail, unmet ? NULL : late);
}

static void expect_tick(kvf_ticket *ticket, uint64_t now) {
    kvf_asker *expect = kvf_asker_of(ticket);
    if (expect->base.state == KVF_TICKET_DOUBT) {
        if (all_settled(expect, now))
            kvf_ticket_settle(&expect->base);
        return;
    }
    if (now >= expect->base.deadline) {
        fail_late(expect);
        return;
    }
    kvf_tickets_due(expect->base.agent, expect->base.deadline);
    if (expect->base.state == KVF_TICKET_ASKING)
        ask_all(expect);
    else if (expect->complete)
        expect_verified(ticket);
}

static void expect_free(kvf_ticket *ticket) {
    (void)end_flows(kvf_asker_of(ticket));
    kvf_brought_end(kvf_asker_of(ticket));
    kvf_verify_stop(kvf_asker_of(ticket));
    kvf_asker_stop_waiting(kvf_asker_of(ticket));
}

static const kvf_ticket_ops expect_ops = {
    .kind = KVF_REQUEST_EXPECT,
    .size = sizeof(kvf_asker),
    .asks = true,
    .tells = true,
    .begin = expect_begin,
    .tick = expect_tick,
    .fail = expect_fail,
    .met = expect_met,
    .arrived = kvf_brought_layers,
    .ready = expect_ready,
    .verified = expect_verified,
    .free = expect_free,
};

kvf_status kvf_agent_expect(kvf_agent *agent, const kvf_agent_request *request, uint64_t *out) {
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    kvf_ticket *made = NULL;
    status = kvf_ticket_make(agent, &expect_ops, request, &made);
    if (!status)
        status = kvf_ticket_meet(kvf_asker_of(made), &request->contact, out);
    kvf_agent_unlock(agent);
    return status;
}
