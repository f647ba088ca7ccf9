#include "agent/carry.h"

#include "agent/stage.h"
#include "plan/plan.h"
#include "stage/cost.h"
#include "stage/ways.h"
#include "transport/transfer.h"
#include "transport/transport.h"

/* ---- which way ------------------------------------------------------------------------------- */

kvf_way kvf_way_of(const kvf_ticket *ticket) {
    const kvf_agent *agent = ticket->agent;
    const kvf_way wanted = ticket->way ? ticket->way : agent->options.way;
    return wanted == KVF_WAY_AUTO && agent->transport && kvf_transport_withholds(agent->transport)
               ? KVF_WAY_PACKED
               : wanted;
}

kvf_way kvf_way_by(const kvf_ticket *ticket, const kvf_plan *plan) {
    return plan && kvf_plan_converts(plan) ? KVF_WAY_PACKED : kvf_way_of(ticket);
}

kvf_status kvf_way_unlike(const char *engine) {
    return kvf_fail(KVF_E_UNSUPPORTED,
                    "way is packed, but groups, layers or parts of %s have other numbers than in this "
                    "engine: use way \"direct\" or \"auto\", or give both models the same numbers",
                    engine);
}

bool kvf_way_uses_stage(kvf_session *session, kvf_way way, const kvf_plan *plan) {
    /* The analyser does not know that every source that is read has a session. */
    const kvf_agent *agent = session->agent; /* NOLINT(clang-analyzer-core.NullDereference) */
    kvf_peer *peer = session->peer;
    if (!agent->stage || way == KVF_WAY_DIRECT)
        return false;
    if (way == KVF_WAY_PACKED)
        return true;
    if (kvf_transport_is_split(agent->transport)) { /* only its connection tells */
        if (!peer && !kvf_work_is_ours(agent))
            return true;
        return (peer || !kvf_session_peer(session, &peer)) && kvf_peer_withholds(peer);
    }
    if (kvf_cost_may_pack(plan, true))
        return true;
    const bool near = session->same_host && kvf_transport_is_near(agent->transport);
    if (!peer && !kvf_work_is_ours(agent))
        return !near || session->withholds; /* as far as it is known */
    if (!peer && kvf_session_peer(session, &peer))
        return false;
    if (kvf_peer_withholds(peer))
        return true;
    if (kvf_peer_reach(peer) == KVF_REACH_NETWORK)
        return !kvf_cost_has_lists(kvf_peer_kind(peer));
    /* On one host runs cost nanoseconds, so another copy does not pay; unless the memory cannot be mapped. */
    return kvf_peer_is_brought(peer);
}

bool kvf_way_joins_stage(kvf_session *session, kvf_way way, const kvf_plan *plan) {
    return kvf_way_uses_stage(session, way, plan) ||
           (session->agent->stage && way != KVF_WAY_DIRECT && session->withholds);
}

static kvf_status cannot_pack(const kvf_session *session) {
    if (!session->agent->stage)
        return kvf_fail(KVF_E_UNSUPPORTED, "way is packed, but this agent has no stage%s",
                        session->agent->options.way == KVF_WAY_DIRECT
                            ? ": its way is direct"
                            : ": its memory is on a device and not withheld");
    return kvf_fail(
        KVF_E_UNSUPPORTED,
        "way is packed, but %s rank %u accepts no flows: it has no stage, cannot reach this rank, has "
        "other groups, layers or parts, or expects what goes directly: expect it packed",
        session->engine, session->rank);
}

static kvf_move_options options_of(const kvf_ticket *ticket, kvf_way way, const uint64_t *permissions) {
    int64_t priority = 128 + (int64_t)ticket->pace.priority;
    return (kvf_move_options){.struct_size = sizeof(kvf_move_options),
                              .way = way,
                              .priority = (uint32_t)(priority < 0     ? 0
                                                     : priority > 255 ? 255
                                                                      : priority),
                              .permissions = permissions};
}

/* Converted cells have no runs. Runs keep to a cap more exactly than whole slots, because a run is cut where the cap is
 * reached; but not every peer takes runs. */
static kvf_status choose_way(const kvf_ticket *ticket, const kvf_plan *plan, kvf_peer *const *peers,
                             uint32_t count, kvf_way wanted, kvf_way *out) {
    const bool converts = kvf_plan_converts(plan);
    bool withheld = false;
    for (uint32_t i = 0; i < count; i++)
        withheld = withheld || kvf_peer_withholds(peers[i]);
    *out = converts                                                  ? KVF_WAY_PACKED
           : wanted == KVF_WAY_AUTO && ticket->pace.cap && !withheld ? KVF_WAY_DIRECT
                                                                     : wanted;
    kvf_status status = converts && wanted == KVF_WAY_DIRECT ? kvf_plan_check_runs(plan) : KVF_OK;
    return status ? kvf_fail_in(status, "way is direct: ") : KVF_OK;
}

/* ---- starting -------------------------------------------------------------------------------- */

static kvf_status find_peers(kvf_session *const *sessions, uint32_t count, kvf_peer **peers) {
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < count && !status; i++)
        status = kvf_session_peer(sessions[i], &peers[i]);
    return status;
}

/* Finds the connections by which the stage knows the sources, and keeps those of sources that it does not know, which
 * go directly. Returns how many it knows; `without` receives a session that it does not know, or NULL. */
static uint32_t find_mates(kvf_session *const *sessions, uint32_t count, kvf_peer **peers,
                           const kvf_session **without) {
    uint32_t mates = 0;
    *without = NULL;
    for (uint32_t i = 0; i < count; i++) {
        kvf_peer *mate = kvf_session_mate(sessions[i]);
        mates += mate != NULL;
        if (mate)
            peers[i] = mate;
        else
            *without = sessions[i];
    }
    return mates;
}

kvf_status kvf_carry_pull(kvf_carry *carry, kvf_ticket *ticket, const kvf_request *request,
                          kvf_session *const *sessions, const uint64_t *permissions, bool alike, bool held) {
    const kvf_agent *agent = ticket->agent;
    const uint32_t count = kvf_plan_source_count(kvf_request_plan(request));
    kvf_way way = KVF_WAY_DIRECT;
    kvf_peer **peers = kvf_alloc0(count, sizeof *peers);
    if (!peers)
        return kvf_nomem("a request");
    kvf_status status = find_peers(sessions, count, peers);
    if (!status)
        status = choose_way(ticket, kvf_request_plan(request), peers, count, kvf_way_of(ticket), &way);
    bool staged = !status && count > 0 && way == KVF_WAY_PACKED;
    for (uint32_t i = 0; i < count && !status && !staged; i++)
        staged = kvf_way_uses_stage(sessions[i], way, kvf_request_plan(request));
    const kvf_session *without = NULL;
    const uint32_t mates = staged && alike ? find_mates(sessions, count, peers, &without) : 0;
    if (staged && way == KVF_WAY_PACKED && !alike)
        status = kvf_way_unlike(sessions[0]->engine);
    else if (way == KVF_WAY_PACKED && without)
        status = cannot_pack(without);
    const kvf_move_options options = options_of(ticket, way, permissions);
    const kvf_transfer_start_options start = {.held = held,
                                              .by_layer = kvf_asker_of(ticket)->arrival != NULL};
    if (!status && mates > 0)
        status = kvf_stage_pull_held(agent->stage, request, peers, &options, start, &carry->move);
    else if (!status)
        status = kvf_transfer_start_held(request, KVF_READ, peers, start, &carry->transfer);
    kvf_free(peers);
    return status;
}

kvf_status kvf_carry_push(kvf_carry *carry, kvf_ticket *ticket, kvf_way way, const kvf_request *request,
                          uint32_t source, kvf_session *session, uint64_t permission, bool held) {
    const kvf_agent *agent = ticket->agent;
    kvf_peer *peer;
    kvf_status status = kvf_session_peer(session, &peer);
    if (!status)
        status = choose_way(ticket, kvf_request_plan(request), &peer, 1, way, &way);
    kvf_peer *mate = status ? NULL : kvf_session_mate(session);
    if (!status && way == KVF_WAY_PACKED && !mate)
        status = cannot_pack(session);
    if (status)
        return status;
    const kvf_move_options options = options_of(ticket, way, &permission);
    return mate && kvf_way_uses_stage(session, way, kvf_request_plan(request))
               ? kvf_stage_push_held(agent->stage, request, source, mate, &options, held, &carry->move)
               : kvf_transfer_push_held(request, source, peer, held, &carry->transfer);
}

/* ---- going on -------------------------------------------------------------------------------- */

kvf_status kvf_carry_status(const kvf_carry *carry) {
    return carry->move ? kvf_move_status(carry->move) : kvf_transfer_status(carry->transfer);
}

uint32_t kvf_carry_layers(const kvf_carry *carry) {
    return carry->move ? kvf_move_layers(carry->move) : kvf_transfer_layers(carry->transfer);
}

uint64_t kvf_carry_packed(const kvf_carry *carry, uint32_t source) {
    return carry->move ? kvf_move_packed(carry->move, source) : 0;
}

kvf_carried kvf_carry_counts(const kvf_carry *carry) {
    kvf_carried out = {0};
    if (!carry->move) {
        kvf_transfer_counts(carry->transfer, &out.bytes, &out.runs);
        return out;
    }
    kvf_move_info info = {.struct_size = sizeof info};
    (void)kvf_move_get_info(carry->move, &info);
    out.bytes = info.bytes;
    out.runs = kvf_move_operations(carry->move);
    for (uint32_t i = 0; i < info.sources; i++)
        out.packed += kvf_move_packed(carry->move, i);
    return out;
}

bool kvf_carry_was_cut(const kvf_carry *carry) {
    return carry->move ? kvf_move_was_cut(carry->move) : kvf_transfer_was_cut(carry->transfer);
}

void kvf_carry_cancel(const kvf_carry *carry) {
    kvf_transfer_cancel(carry->transfer);
    kvf_move_cancel(carry->move);
}

void kvf_carry_free(kvf_carry *carry) {
    kvf_transfer_free(carry->transfer);
    kvf_move_free(carry->move);
    *carry = (kvf_carry){0};
}

void kvf_carry_hold(const kvf_carry *carry, bool held) {
    if (carry->move)
        kvf_move_hold(carry->move, held);
    else
        kvf_transfer_hold(carry->transfer, held);
}

uint64_t kvf_carry_advance(const kvf_carry *carry, uint64_t bytes) {
    return carry->move ? kvf_move_advance(carry->move, bytes) : kvf_transfer_advance(carry->transfer, bytes);
}
