/*
 * Holds: blocks that consumers read.
 *
 * A hold ends when all ranks of all its consumers have released it, or when its own lease and those of all
 * readers have run out. Calls of consumers that come before the hold, or before its blocks are ready, are kept for a
 * while.
 */
#include <sodium.h>
#include <stdio.h>

#include "agent/after.h"
#include "agent/budget.h"
#include "agent/claim.h"
#include "agent/early.h"
#include "agent/hold.h"
#include "agent/past.h"
#include "agent/trace.h"
#include "model/model.h"

#define READER_BYTES (sizeof(kvf_reader) + 64) /* with its place in the table */

/* ---- how long ---------------------------------------------------------------------------------- */

/* What peers ask for may keep a hold beyond the lease that its engine gave it, but not forever. */
static void set_lease(kvf_hold *hold, uint64_t until) {
    hold->lease_until = until;
    hold->latest = kvf_budget_latest(hold->base.agent, until);
}

static void keep_until(kvf_hold *hold, uint64_t until) {
    hold->lease_until = kvf_max_u64(hold->lease_until, kvf_min_u64(until, hold->latest));
}

/* ---- leases ---------------------------------------------------------------------------------- */

static kvf_hold *hold_of(kvf_ticket *ticket) {
    return (kvf_hold *)ticket;
}

static kvf_hold *find_hold(kvf_agent *agent, kvf_bytes id) {
    kvf_ticket *hold = NULL;
    HASH_FIND(hh_id, agent->holds, id.data, id.size, hold);
    return hold_of(hold);
}

/* A lease is the process's that got it: it lasts when the session is lost and the process greets again. */
static bool is_of(const kvf_reader *reader, const kvf_session *session) {
    const kvf_session *then = reader->session;
    return then == session ||
           (then->key_bytes == session->key_bytes && memcmp(then->key, session->key, then->key_bytes) == 0 &&
            then->keyed == session->keyed &&
            memcmp(then->peer_key, session->peer_key, sizeof then->peer_key) == 0);
}

static kvf_reader *reader_of(const kvf_hold *hold, const kvf_session *session) {
    kvf_reader *reader;
    DL_FOREACH(hold->readers, reader) {
        if (is_of(reader, session))
            return reader;
    }
    return NULL;
}

kvf_reader *kvf_reader_find(const kvf_session *session, uint64_t generation) {
    kvf_reader *reader = NULL;
    HASH_FIND(hh, session->agent->leases, &generation, sizeof generation, reader);
    return reader && is_of(reader, session) ? reader : NULL;
}

void kvf_reader_drop(kvf_reader *reader) {
    kvf_agent *agent = reader->session->agent;
    kvf_stage_revoke(agent->stage, reader->generation);
    DL_DELETE(reader->hold->readers, reader);
    DL_DELETE2(reader->session->readers, reader, session_prev, session_next);
    reader->session->reader_count--;
    HASH_DEL(agent->leases, reader);
    agent->stats.leases_now--;
    kvf_budget_give(reader->session, READER_BYTES);
    kvf_session_less(reader->session);
    kvf_free(reader);
}

/* The peer may read by another connection, and wait for the rest of the flow without end: its next heartbeat is told that
 * the lease is gone. It is not cut short, as the peer may read directly, too. */
void kvf_reader_left(void *agent, uint64_t generation) {
    kvf_reader *reader = NULL;
    HASH_FIND(hh, ((const kvf_agent *)agent)->leases, &generation, sizeof generation, reader);
    if (reader)
        reader->left = true;
}

/*
 * The generation of the next lease. No number is used twice, and a peer cannot guess those of other peers: a counter,
 * permuted by four rounds with random keys. Numbers that stand for expectations are skipped.
 */
static uint64_t next_generation(kvf_agent *agent) {
    uint64_t number;
    do {
        number = ++agent->next_lease;
        for (uint32_t round = 0; round < 4; round++) {
            uint32_t half = (uint32_t)number;
            const uint32_t in[2] = {round, half};
            uint8_t mixed[crypto_shorthash_BYTES];
            uint32_t out;
            (void)crypto_shorthash(mixed, (const uint8_t *)in, sizeof in, agent->lease_key);
            memcpy(&out, mixed, sizeof out);
            number = (uint64_t)half << 32 | ((uint32_t)(number >> 32) ^ out);
        }
    } while (number == 0 || number & KVF_EXPECTATION);
    return number;
}

static kvf_status add_reader(kvf_hold *hold, kvf_session *session, const kvf_call_body *call,
                             kvf_reader **out) {
    kvf_agent *agent = hold->base.agent;
    KVF_ASSERT(hold->base.state == KVF_TICKET_HELD); /* what has begun to end is no longer found */
    if (session->reader_count >= agent->options.max_requests_per_peer)
        return kvf_fail(KVF_E_LIMIT, "this peer has %u leases, the most allowed", session->reader_count);
    kvf_status status = kvf_budget_take(session, READER_BYTES);
    if (status)
        return status;
    kvf_reader *reader = kvf_alloc0(1, sizeof *reader);
    if (!reader) {
        kvf_budget_give(session, READER_BYTES);
        return kvf_nomem("a lease");
    }
    *reader =
        (kvf_reader){.generation = next_generation(agent),
                     .asked = call->number,
                     .hold = hold,
                     .session = session,
                     .latest = kvf_min_u64(kvf_budget_latest(agent, kvf_agent_now(agent)), hold->latest),
                     .expected_ranks = call->rank_count};
    HASH_ADD(hh, agent->leases, generation, sizeof reader->generation, reader);
    if (!reader->hh.tbl) {
        kvf_budget_give(session, READER_BYTES);
        kvf_free(reader);
        return kvf_nomem("a lease");
    }
    agent->stats.leases_now++;
    DL_APPEND(hold->readers, reader);
    DL_APPEND2(session->readers, reader, session_prev, session_next);
    session->reader_count++;
    kvf_trace_reach_peer(&hold->base, KVF_MOMENT_GRANTED, session);
    *out = reader;
    return KVF_OK;
}

/* Whether a call begins another try of a rank that has a lease: it has given up the try before, and its RELEASE, which is
 * still to come, must not end the lease of this one. */
static bool is_next_try(const kvf_reader *reader, const kvf_call_body *call, bool fresh) {
    return reader && fresh && call->first_id == 0 && call->number != reader->asked;
}

/* Grants a lease, or grants the same lease again if the call is repeated. */
static void grant(kvf_hold *hold, kvf_session *session, const kvf_call_body *call, bool fresh) {
    kvf_reader *reader = reader_of(hold, session);
    if (is_next_try(reader, call, fresh)) {
        kvf_reader_drop(reader);
        reader = NULL;
    }
    if (!reader && kvf_tally_of(&hold->tally, session->engine, session->rank) == KVF_TALLY_HAS_IT) {
        kvf_answer_status(session, call, KVF_E_EXISTS, "this rank has released the request already");
        return;
    }
    if (!reader) {
        kvf_tally_take_back(&hold->tally, session->engine, session->rank);
        kvf_status status = add_reader(hold, session, call, &reader);
        if (status) {
            kvf_answer_status(session, call, status, kvf_error_detail());
            return;
        }
    }
    const uint64_t now = kvf_agent_now(hold->base.agent);
    reader->until = kvf_min_u64(now + hold->base.agent->options.lease_ns, reader->latest);
    kvf_tickets_due(hold->base.agent, reader->until);
    kvf_wire_group part[KVF_MODEL_MAX_GROUPS];
    kvf_answer answer = {.generation = reader->generation,
                         .time_ns = kvf_max_u64(reader->until, now) - now,
                         .groups = part,
                         .group_count = hold->base.group_count,
                         .first_id = call->first_id};
    if (call->first_id == 0) {
        answer.records = hold->base.records.all;
        answer.record_count = hold->base.records.count;
    }
    answer.more = kvf_wire_part(hold->base.groups, hold->base.group_count, call->first_id, part);
    kvf_answer_send(session, call, &answer);
}

/* Whether the caller has begun another try since, which a late call of this one must not end or replace. The numbers of
 * two sessions cannot be compared. */
static bool is_past_try(const kvf_reader *reader, const kvf_early *early, const kvf_session *session,
                        const kvf_call_body *call) {
    return (early && call->number < early->number) ||
           (reader && reader->session == session && call->number < reader->asked);
}

void kvf_hold_acquire(kvf_session *session, const kvf_call_body *call, bool fresh) {
    kvf_agent *agent = session->agent;
    kvf_hold *hold = find_hold(agent, call->request);
    const kvf_reader *reader = hold ? reader_of(hold, session) : NULL;
    const kvf_early *early = kvf_early_find(session, call);
    kvf_status status = hold ? KVF_OK : kvf_past_look(agent, call->request);
    if (!status && ((!fresh && !reader && !early) || is_past_try(reader, early, session, call)))
        status = kvf_past_repeated(agent, call->request);
    if (status) {
        kvf_answer_status(session, call, status, kvf_error_detail());
        return;
    }
    if (hold && hold->base.state != KVF_TICKET_WAITING) {
        grant(hold, session, call, fresh);
        return;
    }
    status = kvf_early_keep(session, call, call->time_ns);
    if (status)
        kvf_answer_status(session, call, status, kvf_error_detail());
}

/* ---- releases -------------------------------------------------------------------------------- */

/* Whether it exists, ready or not, and has not begun to end. */
static bool is_there(const kvf_hold *hold) {
    return hold->base.state == KVF_TICKET_HELD || hold->base.state == KVF_TICKET_WAITING;
}

/* Not while a consumer may read: if a consumer was replaced, the former one may still have its lease. */
static void end_if_complete(kvf_hold *hold) {
    if (hold->readers)
        return;
    if (hold->base.state == KVF_TICKET_CLOSING) {
        kvf_ticket_tell(&hold->base, true);
        return;
    }
    if (!is_there(hold) || !kvf_tally_complete(&hold->tally))
        return;
    uint32_t rank = 0;
    const char *deserter = kvf_tally_deserter(&hold->tally, &rank);
    if (!deserter) {
        kvf_ticket_done(&hold->base);
        return;
    }
    char detail[KVF_DETAIL_BYTES];
    (void)snprintf(detail, sizeof detail, "%s rank %u gave the request up", deserter, rank);
    kvf_ticket_record_failure(&hold->base, hold->reader_failed, detail, NULL);
    kvf_ticket_tell(&hold->base, true);
}

/* Whether this outcome is a consumer's last word: it was cancelled, or its time is over. After another failure it may
 * try again, while the hold's lease lasts. */
static bool is_last_word(kvf_status outcome) {
    return outcome == KVF_E_CANCELLED || outcome == KVF_E_TIMEOUT;
}

static kvf_status release(kvf_hold *hold, kvf_session *session, uint32_t expected_ranks, kvf_status outcome) {
    kvf_status status = KVF_OK;
    if (!outcome || is_last_word(outcome))
        status = kvf_tally_add(&hold->tally, session->engine, session->rank, expected_ranks,
                               outcome ? KVF_TALLY_GAVE_UP : KVF_TALLY_HAS_IT);
    if (status)
        return status;
    if (outcome && (!hold->reader_failed || is_last_word(outcome)))
        hold->reader_failed = outcome;
    kvf_reader *reader = reader_of(hold, session);
    if (reader) {
        kvf_trace_reach_peer(&hold->base, KVF_MOMENT_RELEASED, session);
        kvf_reader_drop(reader);
    }
    keep_until(hold, kvf_agent_now(hold->base.agent) + hold->base.agent->options.lease_ns);
    end_if_complete(hold);
    return KVF_OK;
}

/* The hold that an ACQUIRE got a lease on, if its caller gave up before it saw the answer. Found by the call's number: a
 * closing hold is no longer found by its id, and the caller may know only the number of a lease before. */
static kvf_hold *granted_by(const kvf_session *session, uint64_t acquire) {
    kvf_reader *reader;
    DL_FOREACH2(session->readers, reader, session_next) {
        if (reader->asked == acquire)
            return reader->hold;
    }
    return NULL;
}

/* The hold whose lease a RELEASE names. */
static kvf_hold *named_by(const kvf_session *session, const kvf_call_body *release) {
    const kvf_reader *reader = release->generation ? kvf_reader_find(session, release->generation) : NULL;
    if (reader)
        return reader->hold;
    return release->earlier ? granted_by(session, release->earlier) : NULL;
}

/* The last call of the try that a RELEASE ends. Its own number may be a later one: a caller gives calls new numbers in a
 * new session. */
static uint64_t end_of_try(const kvf_call_body *release) {
    return release->earlier ? release->earlier : release->number;
}

void kvf_hold_release(kvf_session *session, const kvf_call_body *call, bool fresh) {
    kvf_agent *agent = session->agent;
    kvf_hold *hold = named_by(session, call);
    kvf_status status = KVF_OK;
    /* A consumer that gives up withdraws its ACQUIRE that still waits. */
    kvf_call_body waiting = *call;
    waiting.kind = KVF_CALL_ACQUIRE;
    kvf_early *early = fresh ? kvf_early_find(session, &waiting) : NULL;
    const bool tries_again = early && early->number > end_of_try(call);
    if (early && !tries_again)
        kvf_early_free(early);
    if (call->earlier)
        (void)kvf_session_fresh(session, call->earlier);
    if (call->generation) {
        agent->stats.messages_stale += fresh && !hold;
    } else if (!hold && fresh && !tries_again) {
        hold = find_hold(agent, call->request);
        const kvf_reader *reader = hold ? reader_of(hold, session) : NULL;
        if (reader && reader->asked > end_of_try(call)) /* the lease of another try, which began since */
            hold = NULL;
        else if (!hold && call->status == KVF_OK) /* a consumer that gave up says nothing of a hold to come */
            status = kvf_early_keep(session, call, agent->options.lease_ns);
    }
    if (hold && !reader_of(hold, session)) /* otherwise its lease makes room */
        status = kvf_budget_look(session);
    if (hold && !status)
        status = release(hold, session, call->rank_count, call->status);
    kvf_answer_status(session, call, status, status ? kvf_error_detail() : "");
}

/* ---- life ------------------------------------------------------------------------------------ */

/* A consumer that wants nothing is served even if the hold's blocks are not ready; and if the hold is over by now, because
 * what the consumer has said, perhaps in two sessions, must not end the next hold of this name. */
static kvf_early *first_to_serve(const kvf_hold *hold) {
    kvf_early *early = kvf_early_first(hold->base.agent, &hold->base);
    while (early && early->kind == KVF_CALL_ACQUIRE && hold->base.state != KVF_TICKET_HELD)
        early = early->same_next;
    return early;
}

/* Serves early calls. What a process that was replaced did not want, the new one may want. */
static void serve_early(kvf_hold *hold) {
    for (kvf_early *early; (early = first_to_serve(hold));) {
        kvf_call_body call = {
            .number = early->number, .kind = early->kind, .rank_count = early->expected_ranks};
        kvf_session *session = early->session;
        kvf_early_free(early);
        if (call.kind == KVF_CALL_ACQUIRE)
            grant(hold, session, &call, true);
        else if (is_there(hold) && !kvf_claim_has_passed(session))
            (void)release(hold, session, call.rank_count, KVF_OK);
    }
}

static void stop_waiting(kvf_hold *hold) {
    kvf_after_drop(hold->after);
    hold->after = NULL;
}

/* Allows no new readers, and no renewals: present readers may finish before their leases run out, because their reads
 * cannot be stopped from here. The answer to their next heartbeat says that the request is given up. */
static void hold_fail(kvf_ticket *ticket, kvf_status status, const char *detail, const kvf_session *session) {
    kvf_hold *hold = hold_of(ticket);
    (void)session;
    if (!is_there(hold))
        return;
    kvf_ticket_record_failure(&hold->base, status, detail, NULL);
    kvf_ticket_unlist(&hold->base);
    hold->base.state = KVF_TICKET_CLOSING;
    stop_waiting(hold);
    end_if_complete(hold);
}

static void hold_ready(kvf_ticket *ticket, kvf_after *after) {
    kvf_hold *hold = hold_of(ticket);
    (void)after;
    stop_waiting(hold);
    if (hold->base.state != KVF_TICKET_WAITING)
        return;
    uint64_t lease = hold->base.deadline - hold->base.created;
    hold->base.state = KVF_TICKET_HELD;
    kvf_trace_reach(ticket, KVF_MOMENT_READY);
    set_lease(hold, kvf_add_or_most(kvf_agent_now(hold->base.agent), lease));
    kvf_tickets_due(hold->base.agent, hold->lease_until);
    serve_early(hold);
}

static void hold_tick(kvf_ticket *ticket, uint64_t now) {
    kvf_hold *hold = hold_of(ticket);
    kvf_agent *agent = hold->base.agent;
    uint64_t until = hold->lease_until;
    kvf_reader *reader, *next;
    DL_FOREACH_SAFE(hold->readers, reader, next) {
        if (now >= reader->until) {
            agent->stats.leases_expired++;
            kvf_log_failure(agent, "lease", &hold->base, reader->session->engine, reader->session->rank,
                            KVF_E_TIMEOUT, "the reader gave no sign of life for the length of its lease");
            /* It may have read: the hold must last until its lease ends. */
            keep_until(hold, reader->until);
            kvf_trace_reach_peer(&hold->base, KVF_MOMENT_EXPIRED, reader->session);
            kvf_reader_drop(reader);
        } else {
            until = kvf_max_u64(until, reader->until);
            kvf_tickets_due(agent, reader->until);
        }
    }
    end_if_complete(hold);
    if (is_there(hold) && now >= until) {
        char detail[160];
        (void)snprintf(detail, sizeof detail, "the lease ran out before %s%s%s",
                       hold->after ? "the event of the hold happened" : "all consumers had the blocks",
                       hold->reader_failed ? "; a reader's attempt failed with " : "",
                       hold->reader_failed ? kvf_status_name(hold->reader_failed) : "");
        agent->stats.leases_expired++;
        hold_fail(&hold->base, KVF_E_TIMEOUT, detail, NULL);
    }
    if (is_there(hold))
        kvf_tickets_due(agent, until);
}

static kvf_status hold_begin(kvf_ticket *ticket, const kvf_agent_request *request) {
    kvf_hold *hold = hold_of(ticket);
    hold->tally.wanted = request->consumers ? request->consumers : 1;
    hold->tally.kept = &ticket->agent->kept_bytes;
    return kvf_after_take(ticket, request->after, &hold->after);
}

static void hold_free(kvf_ticket *ticket) {
    kvf_hold *hold = hold_of(ticket);
    while (hold->readers)
        kvf_reader_drop(hold->readers);
    stop_waiting(hold);
    kvf_tally_free(&hold->tally);
}

static const kvf_ticket_ops hold_ops = {
    .kind = KVF_REQUEST_HOLD,
    .size = sizeof(kvf_hold),
    .begin = hold_begin,
    .free = hold_free,
    .lends = true,
    .tells = true,
    .tick = hold_tick,
    .fail = hold_fail,
    .ready = hold_ready,
};

bool kvf_hold_is_read(const kvf_ticket *ticket) {
    return ticket->ops == &hold_ops && ((const kvf_hold *)ticket)->readers;
}

static kvf_status start_hold(kvf_agent *agent, const kvf_agent_request *request, uint64_t *out) {
    kvf_ticket *made = NULL;
    if (request && request->id.data && find_hold(agent, (kvf_bytes){request->id.data, request->id.size}))
        return kvf_fail(KVF_E_EXISTS, "a request with this id is held already");
    kvf_status status = kvf_ticket_make(agent, &hold_ops, request, &made);
    if (!status)
        status = kvf_ticket_list(made, &agent->holds, (kvf_bytes){made->id, made->id_bytes});
    if (status)
        return status;
    kvf_hold *hold = hold_of(made);
    if (out)
        *out = made->number;
    hold->base.state = hold->after ? KVF_TICKET_WAITING : KVF_TICKET_HELD;
    set_lease(hold, hold->base.deadline);
    if (!hold->after)
        kvf_trace_reach(made, KVF_MOMENT_READY);
    serve_early(hold);
    return KVF_OK;
}

kvf_status kvf_agent_hold(kvf_agent *agent, const kvf_agent_request *request, uint64_t *ticket) {
    kvf_status status = kvf_agent_lock(agent);
    if (status)
        return status;
    status = start_hold(agent, request, ticket);
    kvf_agent_unlock(agent);
    return status;
}
