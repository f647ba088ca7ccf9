/*
 * Heartbeats: one message to a peer renews all leases and expectations at it. If a consumer only waits for a hold that
 * is still to come, the message names none, and its answer shows that the producer lives.
 */
#include <stdlib.h>

#include "agent/beat.h"
#include "agent/expect.h"
#include "agent/hold.h"
#include "agent/pull.h"
#include "agent/push.h"

#define SILENCE KVF_SECOND

static bool is_alive(const kvf_ticket *ticket) {
    return ticket->state != KVF_TICKET_OVER && ticket->state != KVF_TICKET_DOUBT;
}

static int compare_numbers(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Fails the tickets whose leases or expectations, named in the beat `number`, the producer no longer knows. */
static void give_up(kvf_session *session, uint64_t number, const kvf_answer *answer) {
    uint32_t count = answer->gone_count;
    uint64_t *gone = kvf_copy(answer->gone, count, sizeof *gone);
    if (!gone)
        return; /* the answer to the next beat repeats it */
    qsort(gone, count, sizeof *gone, compare_numbers);
    kvf_source *source, *next;
    DL_FOREACH_SAFE(session->sources, source, next) {
        kvf_ticket *ticket = &source->ticket->base;
        bool pulls = ticket->kind == KVF_REQUEST_PULL;
        uint64_t generation = pulls ? source->generation : kvf_expect_generation(source->ticket);
        if (source->beat != number || !is_alive(ticket) || source->written || (!pulls && source->call) ||
            !bsearch(&generation, gone, count, sizeof *gone, compare_numbers))
            continue;
        source->settled = pulls || kvf_expect_has_stopped(source);
        kvf_ticket_fail(ticket, KVF_E_TIMEOUT, "the producer has given the request up", session);
    }
    kvf_free(gone);
}

/* A lease that this beat has confirmed. */
static kvf_source *first_to_grant(const kvf_session *session, uint64_t number) {
    kvf_source *source;
    DL_FOREACH(session->sources, source) {
        if (source->beat == number && source->generation && !source->settled &&
            source->ticket->base.kind == KVF_REQUEST_PULL && is_alive(&source->ticket->base))
            return source;
    }
    return NULL;
}

/* Extends a lease or an expectation only if the answered beat named it. */
static void on_beaten(kvf_call *call, kvf_status status, const kvf_answer *answer) {
    kvf_session *session = call->session;
    if (status)
        return;
    kvf_session_clock(session, call->first_sent, kvf_agent_now(session->agent), answer->clock_ns);
    kvf_source *source;
    DL_FOREACH(session->sources, source) {
        if (source->beat == call->number && source->ticket->base.kind == KVF_REQUEST_PULL)
            source->until =
                kvf_max_u64(source->until, call->first_sent + kvf_session_surely(answer->time_ns));
    }
    if (answer->gone_count > 0)
        give_up(session, call->number, answer);
    while ((source = first_to_grant(session, call->number)))
        kvf_pull_granted(source);
}

static void beat(kvf_session *session, uint64_t now) {
    kvf_agent *agent = session->agent;
    kvf_source *source;
    uint32_t count;
    DL_COUNT(session->sources, source, count);
    uint64_t *leases = kvf_alloc(count, sizeof *leases);
    uint64_t *expectations = kvf_alloc(2 * (size_t)count, sizeof *expectations);
    kvf_call_body body = {.leases = leases, .expectations = expectations, .clock_ns = now};
    uint64_t until = now + agent->options.lease_ns;
    if (leases && expectations) {
        DL_FOREACH(session->sources, source) {
            const kvf_ticket *ticket = &source->ticket->base;
            if (!is_alive(ticket))
                continue;
            /* The peer may not know yet what is still being requested; that does not mean that it is gone. */
            const bool asks = source->call && source->call->kind != KVF_CALL_CHECKSUM;
            source->beat = asks ? 0 : session->next_number + 1;
            if (ticket->kind == KVF_REQUEST_PULL && source->generation) {
                leases[body.lease_count++] = source->generation;
            } else if (ticket->kind == KVF_REQUEST_EXPECT && source->until &&
                       (!source->settled || source->written_call)) {
                source->until = kvf_max_u64(source->until, until);
                expectations[2 * (size_t)body.expectation_count] = kvf_expect_generation(source->ticket);
                expectations[2 * (size_t)body.expectation_count + 1] =
                    kvf_session_their_time(session, source->until);
                body.expectation_count++;
            }
        }
        (void)kvf_call_start(session, KVF_CALL_BEAT, &body, until, true, on_beaten, NULL, NULL);
    }
    kvf_free(leases);
    kvf_free(expectations);
}

/*
 * A call that waits for a hold that is still to come does not show whether the connection hangs. A beat does, because
 * it is answered at once. It is sent before the link would make another connection.
 */
static void beat_for_life(kvf_session *session, uint64_t now) {
    if (!session->asked_ns || session->beat_for_life)
        return;
    session->beat_for_life = now >= session->asked_ns + SILENCE;
    if (session->beat_for_life)
        session->next_beat = now;
    else
        kvf_session_due(session, session->asked_ns + SILENCE);
}

void kvf_beat_tick(kvf_session *session, uint64_t now) {
    if (session->incoming || session->state != KVF_SESSION_OPEN || !session->sources)
        return;
    beat_for_life(session, now);
    if (now >= session->next_beat) {
        session->next_beat = now + session->heartbeat_ns;
        beat(session, now);
    }
    kvf_session_due(session, session->next_beat);
}

/* The consumer waits for what is written until then; or it compares checksums of it, and will then answer WRITTEN. */
static void go_on(kvf_flow *flow, uint64_t until, uint64_t now) {
    flow->until = kvf_max_u64(flow->until, kvf_min_u64(until, flow->latest));
    if (flow->told && flow->verified)
        flow->told->deadline = kvf_max_u64(
            flow->told->deadline, kvf_min_u64(now + flow->session->agent->options.lease_ns, flow->latest));
}

void kvf_beat_answer(kvf_session *session, const kvf_call_body *call) {
    kvf_agent *agent = session->agent;
    uint64_t now = kvf_agent_now(agent);
    uint64_t *gone = kvf_alloc((size_t)call->lease_count + call->expectation_count, sizeof *gone);
    if (!gone)
        return; /* the next beat comes */
    kvf_answer answer = {.time_ns = agent->options.lease_ns, .gone = gone, .clock_ns = now};
    for (uint32_t i = 0; i < call->lease_count; i++) {
        kvf_reader *reader = kvf_reader_find(session, call->leases[i]);
        /* For as long as the answer says, or not at all: the peer counts on it. */
        if (reader && reader->hold->base.state == KVF_TICKET_HELD && !reader->left &&
            now + agent->options.lease_ns <= reader->latest)
            reader->until = now + agent->options.lease_ns;
        else
            gone[answer.gone_count++] = call->leases[i];
    }
    for (uint32_t i = 0; i < call->expectation_count; i++) {
        uint64_t generation = call->expectations[2 * (size_t)i];
        kvf_flow *flow = kvf_flow_of(session, generation);
        if (flow)
            go_on(flow, call->expectations[2 * (size_t)i + 1], now);
        else
            gone[answer.gone_count++] = generation;
    }
    kvf_answer_send(session, call, &answer);
    kvf_free(gone);
}
