/*
 * Messages that come before their hold or push: calls that ask for a hold, or release it, and expectations.
 *
 * Each is in a list of all, which a sweep checks for those whose time is over, and in the list of its request id, where
 * the request finds it.
 */
#include "agent/early.h"
#include "agent/budget.h"
#include "agent/past.h"
#include "agent/push.h"

static kvf_waiting *find_waiting(const kvf_agent *agent, const void *id, size_t bytes) {
    kvf_waiting *waiting = NULL;
    HASH_FIND(hh, agent->waiting, id, bytes, waiting);
    return waiting;
}

static kvf_waiting *make_waiting(kvf_agent *agent, const void *id, size_t bytes) {
    kvf_waiting *waiting = find_waiting(agent, id, bytes);
    if (waiting)
        return waiting;
    waiting = kvf_alloc0(1, sizeof *waiting);
    void *copy = kvf_copy(id, bytes, 1);
    if (waiting && copy) {
        waiting->id = copy;
        waiting->id_bytes = bytes;
        HASH_ADD_KEYPTR(hh, agent->waiting, waiting->id, bytes, waiting);
        if (waiting->hh.tbl)
            return waiting;
    }
    kvf_free(copy);
    kvf_free(waiting);
    return NULL;
}

static void drop_if_empty(kvf_agent *agent, kvf_waiting *waiting) {
    if (waiting->early || waiting->flows)
        return;
    HASH_DEL(agent->waiting, waiting);
    kvf_free(waiting->id);
    kvf_free(waiting);
}

/* The bytes kept for a call, with its place in the tables, and its request id, which others may wait for too. */
static uint64_t early_bytes(const kvf_waiting *waiting) {
    return sizeof(kvf_early) + sizeof *waiting + waiting->id_bytes + 128;
}

static void name_early(kvf_early *early, const kvf_session *session, kvf_waiting *waiting,
                       kvf_call_kind kind) {
    memset(early, 0, sizeof *early);
    early->session = (kvf_session *)session;
    early->waiting = waiting;
    early->kind = kind;
    early->of_whom.session = early->session;
    early->of_whom.waiting = waiting;
    early->of_whom.kind = kind;
}

/* ---- calls ----------------------------------------------------------------------------------- */

void kvf_early_free(kvf_early *early) {
    kvf_agent *agent = early->session->agent;
    early->session->early_count--;
    kvf_budget_give(early->session, early_bytes(early->waiting));
    HASH_DELETE(hh, agent->early_calls, early);
    /* The analyser does not know that a list's first element always has a last one before it. */
    /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
    DL_DELETE(agent->early, early);
    DL_DELETE2(early->session->early, early, own_prev, own_next);
    DL_DELETE2(early->waiting->early, early, same_prev, same_next);
    drop_if_empty(agent, early->waiting);
    kvf_session_less(early->session);
    kvf_free(early);
}

void kvf_early_forget(kvf_session *session) {
    kvf_early *early, *next;
    DL_FOREACH_SAFE2(session->early, early, next, own_next) {
        if (early->kind == KVF_CALL_ACQUIRE)
            kvf_early_free(early);
    }
}

kvf_early *kvf_early_first(const kvf_agent *agent, const kvf_ticket *ticket) {
    const kvf_waiting *waiting = find_waiting(agent, ticket->id, ticket->id_bytes);
    return waiting ? waiting->early : NULL;
}

kvf_early *kvf_early_find(const kvf_session *session, const kvf_call_body *call) {
    kvf_waiting *waiting = find_waiting(session->agent, call->request.data, call->request.size);
    kvf_early *early = NULL;
    kvf_early sought;
    if (!waiting)
        return NULL;
    name_early(&sought, session, waiting, call->kind);
    HASH_FIND(hh, session->agent->early_calls, &sought.of_whom, sizeof sought.of_whom, early);
    return early;
}

/* Makes an entry, if its budget and memory allow. */
static kvf_status make_early(kvf_session *session, const kvf_call_body *call, kvf_early **out) {
    kvf_agent *agent = session->agent;
    if (session->early_count >= agent->options.max_requests_per_peer)
        return kvf_fail(KVF_E_LIMIT, "%u calls of this peer wait already, the most allowed",
                        session->early_count);
    kvf_early *early = kvf_alloc0(1, sizeof *early);
    kvf_waiting *waiting = early ? make_waiting(agent, call->request.data, call->request.size) : NULL;
    kvf_status status =
        waiting ? kvf_budget_take(session, early_bytes(waiting)) : kvf_nomem("a call that waits");
    if (!status) {
        name_early(early, session, waiting, call->kind);
        HASH_ADD(hh, agent->early_calls, of_whom, sizeof early->of_whom, early);
        if (!early->hh.tbl) {
            kvf_budget_give(session, early_bytes(waiting));
            status = kvf_nomem("a call that waits");
        }
    }
    if (status) {
        if (waiting)
            drop_if_empty(agent, waiting);
        kvf_free(early);
        return status;
    }
    session->early_count++;
    DL_APPEND(agent->early, early);
    DL_APPEND2(session->early, early, own_prev, own_next);
    DL_APPEND2(waiting->early, early, same_prev, same_next);
    *out = early;
    return KVF_OK;
}

/* Whether it waits for a request that is there, but not ready; so it is answered although the agent drains. */
static bool is_there(kvf_ticket *table, const kvf_waiting *waiting) {
    kvf_ticket *ticket = NULL;
    HASH_FIND(hh_id, table, waiting->id, waiting->id_bytes, ticket);
    return ticket;
}

static bool is_refused(const kvf_agent *agent, const kvf_early *early) {
    return agent->drains && early->kind == KVF_CALL_ACQUIRE && !is_there(agent->holds, early->waiting);
}

bool kvf_flow_is_refused(const kvf_flow *flow) {
    const kvf_agent *agent = flow->session->agent;
    return agent->drains && !flow->over && !is_there(agent->pushes, flow->waiting);
}

/* An ACQUIRE waits while its caller is heard. A RELEASE was answered, and is kept although its caller does not wait. */
static uint64_t end_of(const kvf_early *early) {
    return early->kind == KVF_CALL_ACQUIRE ? kvf_min_u64(early->until, kvf_budget_silent_at(early->session))
                                           : early->until;
}

kvf_status kvf_early_keep(kvf_session *session, const kvf_call_body *call, uint64_t wait) {
    kvf_agent *agent = session->agent;
    kvf_early *early = kvf_early_find(session, call);
    const bool repeated = early && early->number == call->number; /* with the same time, which has begun */
    if (!early) {
        kvf_status status = make_early(session, call, &early);
        if (status)
            return status;
    }
    if (!repeated)
        early->until = kvf_agent_now(agent) + kvf_min_u64(wait, agent->options.longest_ns);
    early->number = call->number;
    early->expected_ranks = call->rank_count;
    kvf_sweep_due(&agent->early_sweep, end_of(early));
    return KVF_OK;
}

static bool look_at_first(kvf_agent *agent, uint32_t pass, uint64_t now) {
    kvf_early *early = agent->early;
    if (!early || early->pass == pass)
        return false;
    early->pass = pass;
    DL_DELETE(agent->early, early);
    DL_APPEND(agent->early, early);
    const bool refused = is_refused(agent, early);
    if (!refused && now < end_of(early)) {
        kvf_sweep_found(&agent->early_sweep, end_of(early));
        return true;
    }
    kvf_call_body call = {.number = early->number, .kind = early->kind};
    if (early->kind == KVF_CALL_ACQUIRE)
        kvf_answer_status(early->session, &call, refused ? KVF_E_NOT_FOUND : KVF_E_TIMEOUT,
                          refused ? KVF_PAST_DRAINS : "the producer did not hold this request in time");
    kvf_early_free(early);
    return true;
}

void kvf_early_tick(kvf_agent *agent, uint64_t now) {
    kvf_sweep_round(&agent->early_sweep, agent, now, look_at_first);
}

/* ---- expectations ---------------------------------------------------------------------------- */

kvf_status kvf_flow_wait(kvf_flow *flow) {
    kvf_agent *agent = flow->session->agent;
    kvf_waiting *waiting = make_waiting(agent, flow->id, flow->id_bytes);
    if (!waiting)
        return kvf_nomem("an expectation");
    flow->waiting = waiting;
    DL_APPEND(agent->flows, flow);
    DL_APPEND2(waiting->flows, flow, same_prev, same_next);
    return KVF_OK;
}

void kvf_flow_wait_no_more(kvf_flow *flow) {
    kvf_agent *agent = flow->session->agent;
    DL_DELETE(agent->flows, flow);
    DL_DELETE2(flow->waiting->flows, flow, same_prev, same_next);
    drop_if_empty(agent, flow->waiting);
    flow->waiting = NULL;
}

kvf_flow *kvf_flow_waiting_for(const kvf_agent *agent, const kvf_ticket *push) {
    const kvf_waiting *waiting = find_waiting(agent, push->id, push->id_bytes);
    kvf_flow *flow = waiting ? waiting->flows : NULL;
    while (flow && (flow->over || flow->more))
        flow = flow->same_next;
    return flow;
}
