/*
 * Whole requests: each source's way, its predicted duration, and its measured one.
 */
#include <stdio.h>

#include "model/model.h"
#include "plan/plan.h"
#include "request/request.h"
#include "stage/cost.h"
#include "stage/flow.h"
#include "stage/ways.h"
#include "transport/transfer.h"
#include "transport/transport.h"

/* The move of one source's bytes. */
typedef struct leg {
    kvf_way way;             /* the chosen way; KVF_WAY_AUTO: nothing to move */
    kvf_arena_choice arenas; /* if it goes packed */
    kvf_peer *peer;
    kvf_direction direction;
    kvf_transfer *transfer;
    kvf_stage_flow *flow;
    uint64_t bytes, runs, copies;
    uint64_t began_ns;
    bool over;
    bool was_held; /* its duration then says nothing about its way */
} leg;

struct kvf_move {
    kvf_stage *stage;
    leg *legs;
    uint32_t leg_count;
    uint32_t turn;     /* the leg that kvf_move_advance() serves first */
    kvf_status failed; /* the first failure */
    char detail[KVF_STAGE_DETAIL_BYTES];
    kvf_move_info info;
};

/* The request to one source. */
typedef struct order {
    const kvf_request *request;
    uint32_t source;
    kvf_peer *peer;
    kvf_direction direction;
    uint64_t permission;
    kvf_move_options options;
    kvf_transfer_start_options start;
} order;

/* ---- the two ways ---------------------------------------------------------------------------- */

static kvf_status go_direct(const kvf_move *move, const order *by, leg *out) {
    out->way = KVF_WAY_DIRECT;
    out->began_ns = kvf_now(move->stage->clock);
    return by->direction == KVF_READ
               ? kvf_transfer_read_source(by->request, by->source, by->peer, by->start, &out->transfer)
               : kvf_transfer_push_held(by->request, by->source, by->peer, by->start.held, &out->transfer);
}

/* The shape of the source's selection in our memory. */
static kvf_status find_shape(kvf_stage *stage, const order *by, kvf_stage_shape **out) {
    kvf_selection *selection = NULL;
    kvf_status status = kvf_selection_of_plan(kvf_request_plan(by->request), by->source, &selection);
    return status ? status : kvf_shapes_use(&stage->shapes, selection, out);
}

static kvf_status go_packed(const kvf_move *move, const order *by, kvf_stage_shape *shape, leg *out) {
    const kvf_group_request *groups = kvf_request_groups(by->request);
    const uint32_t count = kvf_model_group_count(kvf_shard_model(move->stage->shard));
    kvf_group_steps *steps = kvf_alloc((size_t)count * 2, sizeof *steps);
    kvf_stage_peer *peer = kvf_stage_find_peer(move->stage, by->peer);
    if (!steps) {
        kvf_shapes_leave(shape);
        return kvf_nomem("a move");
    }
    for (uint32_t g = 0; g < count; g++) {
        bool pull = by->direction == KVF_READ;
        steps[g] =
            (kvf_group_steps){pull ? groups[g].local : groups[g].remote, groups[g].begin, groups[g].end};
        steps[count + g] =
            (kvf_group_steps){pull ? groups[g].remote : groups[g].local, groups[g].begin, groups[g].end};
    }
    kvf_flow_wish wish = {.direction = by->direction,
                          .shape = shape,
                          .ours = steps,
                          .theirs = steps + count,
                          .group_count = count,
                          .priority = by->options.priority,
                          .permission = by->permission,
                          .held = by->start.held,
                          .arenas = out->arenas};
    kvf_status status = kvf_mover_begin(move->stage, peer, &wish, &out->flow);
    kvf_free(steps);
    out->way = KVF_WAY_PACKED;
    return status;
}

/* ---- whether it can go packed ----------------------------------------------------------------- */

/* Whether the source can go packed at all. */
static kvf_status check_packed(const kvf_stage *stage, const order *by) {
    const kvf_plan *plan = kvf_request_plan(by->request);
    if (!kvf_stage_find_peer(stage, by->peer))
        return kvf_fail(KVF_E_NOT_FOUND, "source %u: its peer has not joined the stage", by->source);
    const kvf_arena_kinds arenas = kvf_peer_arenas(by->peer);
    if (!arenas.ours || !arenas.theirs)
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "source %u: its peer is reached over %s, and %s has no arena in memory that this "
                        "moves: withhold memory of devices, so that it goes packed over another transport",
                        by->source, kvf_peer_kind(by->peer), arenas.ours ? "that peer" : "this rank");
    if (kvf_stage_model_sum(kvf_shard_model(kvf_plan_local(plan))) != stage->model ||
        kvf_stage_model_sum(kvf_engine_model(kvf_plan_remote(plan))) != stage->model)
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "source %u: packed flows need the same groups, layers and parts on both sides",
                        by->source);
    return KVF_OK;
}

/* The steps of the request. */
static void spans_of(const kvf_request *request, kvf_step_span *spans) {
    const kvf_group_request *groups = kvf_request_groups(request);
    const uint32_t count = kvf_model_group_count(kvf_shard_model(kvf_plan_local(kvf_request_plan(request))));
    for (uint32_t g = 0; g < count; g++)
        spans[g] = (kvf_step_span){groups[g].begin, groups[g].end};
}

/* ---- the choice of arenas ---------------------------------------------------------------------- */

static kvf_memory_kind best_of(uint32_t kinds) {
    return kinds & 1u << KVF_MEMORY_CUDA ? KVF_MEMORY_CUDA : KVF_MEMORY_HOST;
}

static kvf_memory_kind kind_of(kvf_arena_choice arenas) {
    return arenas.ours == KVF_MEMORY_CUDA || arenas.theirs == KVF_MEMORY_CUDA ? KVF_MEMORY_CUDA
                                                                              : KVF_MEMORY_HOST;
}

/*
 * Finds the arenas through which a source's bytes go: those in memory of devices where the peer's fabric moves such
 * memory and that is predicted to be faster. When a device is busy, all slots of our arena there that the peer may have
 * may be in use; then the host's are taken.
 */
static kvf_arena_choice choose_arenas(const kvf_stage *stage, const kvf_stage_peer *joined,
                                      const kvf_peer_cost *cost, const leg *at) {
    const uint32_t host = 1u << KVF_MEMORY_HOST;
    const kvf_arena_kinds kinds = kvf_peer_arenas(joined->peer);
    const kvf_arena_choice near = {best_of(kinds.ours), best_of(kinds.theirs)};
    const bool by_host = kinds.ours & kinds.theirs & host;
    const bool full = !kvf_arena_has(&stage->arenas[near.ours], &joined->shares[near.ours]);
    const double in_host = kvf_way_cost_predict(&cost->packed[KVF_MEMORY_HOST], at->copies, at->bytes);
    const double on_device = kvf_way_cost_predict(&cost->packed[KVF_MEMORY_CUDA], at->copies, at->bytes);
    return by_host && (full || in_host < on_device) ? (kvf_arena_choice){KVF_MEMORY_HOST, KVF_MEMORY_HOST}
                                                    : near;
}

/* ---- the choice of a way ----------------------------------------------------------------------- */

/* Notes which ways are not taken. A held move is not measured, so it makes nothing be forgotten. */
static void pass_others(kvf_peer_cost *cost, const leg *at, const kvf_way_cost *taken, double ns) {
    if (at->was_held)
        return;
    if (taken != &cost->direct)
        kvf_way_cost_pass(&cost->direct, at->runs, at->bytes, ns);
    for (int kind = 0; kind < KVF_ARENAS; kind++)
        if (taken != &cost->packed[kind])
            kvf_way_cost_pass(&cost->packed[kind], at->copies, at->bytes, ns);
}

/* Whether the tables of the source's peer fit in the opening of a flow. */
static bool fits_opening(const order *by, const kvf_stage_shape *shape, uint32_t groups) {
    const kvf_group_request *all = kvf_request_groups(by->request);
    uint64_t blocks = 0;
    for (uint32_t g = 0; g < groups; g++)
        blocks += by->direction == KVF_READ ? all[g].remote.count : all[g].local.count;
    return kvf_stage_opening_bytes(shape->selection->item_count, groups, blocks) <= KVF_STAGE_OPENING_MAX;
}

/* Counts and predicts both ways, and returns the way to take. */
static kvf_way choose(kvf_move *move, const order *by, const kvf_stage_shape *shape, leg *out) {
    const kvf_stage_peer *peer = kvf_stage_find_peer(move->stage, by->peer);
    kvf_peer_cost *cost = &peer->known->by_direction[by->direction];
    kvf_step_span spans[KVF_MODEL_MAX_GROUPS];
    uint64_t bytes = 0;
    spans_of(by->request, spans);
    const kvf_plan *plan = kvf_request_plan(by->request);
    kvf_plan_count(plan, by->source, spans, &bytes, &out->runs);
    KVF_ASSERT(bytes == out->bytes);
    out->copies = kvf_cost_copies(plan, kvf_stream_map_size(shape->map, spans).pieces, bytes);
    const bool converts = kvf_plan_converts(plan); /* then there are no runs */
    const double direct = converts ? 0 : kvf_way_cost_predict(&cost->direct, out->runs, out->bytes);
    out->arenas = choose_arenas(move->stage, peer, cost, out);
    const double packed = kvf_way_cost_predict(&cost->packed[kind_of(out->arenas)], out->copies, out->bytes);
    move->info.direct_ns += direct;
    move->info.packed_ns += packed;
    const bool withheld = kvf_peer_withholds(by->peer) || kvf_transport_withholds(move->stage->transport);
    const bool fits = fits_opening(by, shape, kvf_model_group_count(kvf_shard_model(move->stage->shard)));
    const bool gains = withheld || (fits && packed < direct && kvf_cost_may_pack(plan, peer->has_lists));
    const kvf_way way = converts          ? KVF_WAY_PACKED
                        : by->options.way ? by->options.way
                        : gains           ? KVF_WAY_PACKED
                                          : KVF_WAY_DIRECT;
    if (way == KVF_WAY_DIRECT)
        pass_others(cost, out, &cost->direct, direct);
    else
        pass_others(cost, out, &cost->packed[kind_of(out->arenas)], packed);
    return way;
}

/* Starts the move of one source. */
static kvf_status start_leg(kvf_move *move, const order *by, leg *out) {
    kvf_stage *stage = move->stage;
    kvf_stage_shape *shape = NULL;
    out->peer = by->peer;
    out->direction = by->direction;
    out->was_held = by->start.held;
    out->bytes = kvf_request_bytes(by->request, by->source);
    if (out->bytes == 0) {
        out->over = true;
        return KVF_OK;
    }
    const kvf_status cannot = check_packed(stage, by);
    if (cannot && (by->options.way == KVF_WAY_PACKED || kvf_plan_converts(kvf_request_plan(by->request))))
        return cannot;
    kvf_status status = cannot ? KVF_OK : find_shape(stage, by, &shape);
    if (status)
        return status;
    const kvf_way way = cannot ? KVF_WAY_DIRECT : choose(move, by, shape, out);
    stage->counts.moves[KVF_WAY_AUTO] += by->options.way == KVF_WAY_AUTO;
    stage->counts.moves[way]++;
    move->info.packed += way == KVF_WAY_PACKED;
    if (way == KVF_WAY_PACKED)
        return go_packed(move, by, shape, out);
    kvf_shapes_leave(shape);
    return go_direct(move, by, out);
}

/* ---- moves ----------------------------------------------------------------------------------- */

static kvf_status take_options(kvf_move_options *options, const kvf_move_options *given) {
    *options = (kvf_move_options){0};
    kvf_status status = kvf_take_options(options, sizeof *options, given, "kvf_move_options");
    if (!status && (options->way > KVF_WAY_PACKED || options->priority > 255))
        return kvf_fail(KVF_E_INVALID, "move options: way is %d, priority %u; allowed: 0 to 2, 0 to 255",
                        (int)options->way, options->priority);
    return status;
}

static kvf_status check_way(const kvf_request *request, kvf_way way) {
    kvf_status status = way == KVF_WAY_DIRECT ? kvf_plan_check_runs(kvf_request_plan(request)) : KVF_OK;
    return status ? kvf_fail_in(status, "way is direct: ") : KVF_OK;
}

static kvf_status make(kvf_stage *stage, uint32_t legs, kvf_move **out) {
    kvf_move *move = kvf_alloc0(1, sizeof *move);
    if (!move || !(move->legs = kvf_alloc0(legs, sizeof *move->legs))) {
        kvf_free(move);
        return kvf_nomem("a move");
    }
    move->stage = stage;
    stage->moves++;
    move->leg_count = legs;
    move->info.sources = legs;
    *out = move;
    return KVF_OK;
}

static void stop(const leg *at) {
    if (at->transfer)
        kvf_transfer_cancel(at->transfer);
    if (at->flow && !at->flow->ended)
        kvf_stage_flow_end(at->flow, kvf_fail(KVF_E_CANCELLED, "cancelled by its owner"));
}

static void fail(kvf_move *move, kvf_status status, const char *detail) {
    if (move->failed)
        return;
    move->failed = status;
    (void)snprintf(move->detail, sizeof move->detail, "%s", detail);
    for (uint32_t i = 0; i < move->leg_count; i++)
        if (!move->legs[i].over)
            stop(&move->legs[i]);
}

/* Source `i` cannot be started. If another was, and may write to our memory for a while, the move ends as one that fails
 * later. False: nothing is under way. */
static bool fail_begun(kvf_move *move, uint32_t i, kvf_status status) {
    bool begun = false;
    for (uint32_t before = 0; before < i; before++)
        begun = begun || !move->legs[before].over;
    for (uint32_t rest = i; rest < move->leg_count && begun; rest++)
        move->legs[rest].over = true;
    if (begun)
        fail(move, status, kvf_error_detail());
    return begun;
}

kvf_status kvf_stage_pull(kvf_stage *stage, const kvf_request *request, kvf_peer *const *peers,
                          const kvf_move_options *options, kvf_move **out) {
    return kvf_stage_pull_held(stage, request, peers, options, (kvf_transfer_start_options){0}, out);
}

kvf_status kvf_stage_pull_held(kvf_stage *stage, const kvf_request *request, kvf_peer *const *peers,
                               const kvf_move_options *options, kvf_transfer_start_options start,
                               kvf_move **out) {
    uint32_t sources = request ? kvf_plan_source_count(kvf_request_plan(request)) : 0;
    if (!stage || !request || (sources > 0 && !peers) || !out)
        return kvf_fail(KVF_E_INVALID, "pull: %s is NULL",
                        !stage     ? "stage"
                        : !request ? "request"
                        : !out     ? "out"
                                   : "peers");
    order by = {.request = request, .direction = KVF_READ, .start = start};
    kvf_move *move = NULL;
    kvf_status status = take_options(&by.options, options);
    if (!status)
        status = check_way(request, by.options.way);
    for (uint32_t i = 0; i < sources && !status; i++)
        if (!peers[i])
            status = kvf_fail(KVF_E_INVALID, "pull: the peer of source %u is NULL", i);
    if (!status)
        status = make(stage, sources, &move);
    for (uint32_t i = 0; i < sources && !status && !move->failed; i++) {
        by.source = i;
        by.peer = peers[i];
        by.permission = by.options.permissions ? by.options.permissions[i] : 0;
        status = start_leg(move, &by, &move->legs[i]);
        if (status && fail_begun(move, i, status))
            status = KVF_OK;
    }
    if (!status)
        *out = move;
    else if (move)
        kvf_move_free(move);
    return status;
}

kvf_status kvf_stage_push(kvf_stage *stage, const kvf_request *request, uint32_t source, kvf_peer *peer,
                          const kvf_move_options *options, kvf_move **out) {
    return kvf_stage_push_held(stage, request, source, peer, options, false, out);
}

kvf_status kvf_stage_push_held(kvf_stage *stage, const kvf_request *request, uint32_t source, kvf_peer *peer,
                               const kvf_move_options *options, bool held, kvf_move **out) {
    if (!stage || !request || !peer || !out)
        return kvf_fail(KVF_E_INVALID, "push: %s is NULL",
                        !stage     ? "stage"
                        : !request ? "request"
                        : !peer    ? "peer"
                                   : "out");
    uint32_t sources = kvf_plan_source_count(kvf_request_plan(request));
    if (source >= sources)
        return kvf_fail(KVF_E_RANGE, "push: source is %u; the plan has %u", source, sources);
    order by = {
        .request = request, .source = source, .peer = peer, .direction = KVF_WRITE, .start = {.held = held}};
    kvf_move *move = NULL;
    kvf_status status = take_options(&by.options, options);
    by.permission = by.options.permissions ? by.options.permissions[0] : 0;
    if (!status)
        status = check_way(request, by.options.way);
    if (!status)
        status = make(stage, 1, &move);
    if (!status)
        status = start_leg(move, &by, &move->legs[0]);
    if (!status)
        *out = move;
    else if (move)
        kvf_move_free(move);
    return status;
}

static uint64_t bytes_of(const leg *at) {
    uint64_t bytes = 0;
    if (at->transfer)
        kvf_transfer_counts(at->transfer, &bytes, NULL);
    else if (at->flow)
        bytes = at->flow->direction == KVF_READ ? at->flow->done : at->flow->told;
    return bytes;
}

/* Records a source's duration, for later predictions. */
static void learn(kvf_move *move, const leg *at) {
    kvf_stage *stage = move->stage;
    stage->counts.bytes[at->way] += at->bytes;
    kvf_stage_peer *peer = kvf_stage_find_peer(stage, at->peer);
    if (!peer || at->runs == 0 || at->was_held) /* no runs: it cannot go packed, and needs no prediction */
        return;
    kvf_peer_cost *cost = &peer->known->by_direction[at->direction];
    if (at->flow)
        kvf_way_cost_learn(&cost->packed[kind_of(at->arenas)], at->copies, at->bytes,
                           (double)at->flow->took_ns);
    else
        kvf_way_cost_learn(&cost->direct, at->runs, at->bytes,
                           (double)(kvf_now(stage->clock) - at->began_ns));
}

static void look_at(kvf_move *move, leg *at) {
    kvf_status status = KVF_OK;
    const char *detail = "";
    if (at->transfer) {
        status = kvf_transfer_status(at->transfer);
        detail = kvf_transfer_detail(at->transfer);
    } else {
        status = !at->flow->ended || kvf_stage_flow_is_copied(at->flow) ? KVF_IN_PROGRESS : at->flow->status;
        detail = at->flow->detail;
    }
    if (status == KVF_IN_PROGRESS)
        return;
    at->over = true;
    if (status)
        fail(move, status, detail);
    else
        learn(move, at);
}

static bool is_over(kvf_move *move) {
    bool over = true;
    for (uint32_t i = 0; i < move->leg_count; i++) {
        if (!move->legs[i].over)
            look_at(move, &move->legs[i]);
        over = over && move->legs[i].over;
    }
    return over;
}

kvf_status kvf_move_status(kvf_move *move) {
    if (!move)
        return kvf_fail(KVF_E_INVALID, "move: move is NULL");
    if (!is_over(move))
        return KVF_IN_PROGRESS;
    return move->failed ? kvf_fail(move->failed, "%s", move->detail) : KVF_OK;
}

kvf_status kvf_move_get_info(const kvf_move *move, kvf_move_info *out) {
    kvf_status status = kvf_check_out(out, "kvf_move_info");
    if (status || !move)
        return status ? status : kvf_fail(KVF_E_INVALID, "move: move is NULL");
    kvf_move_info info = move->info;
    for (uint32_t i = 0; i < move->leg_count; i++)
        info.bytes += bytes_of(&move->legs[i]);
    kvf_fill_out(out, &info, sizeof info);
    return KVF_OK;
}

void kvf_move_hold(kvf_move *move, bool held) {
    for (uint32_t i = 0; i < move->leg_count; i++) {
        leg *at = &move->legs[i];
        at->was_held = at->was_held || held;
        if (at->transfer)
            kvf_transfer_hold(at->transfer, held);
        else if (at->flow)
            at->flow->held = held;
    }
}

uint64_t kvf_move_advance(kvf_move *move, uint64_t bytes) {
    uint64_t done = 0;
    for (uint32_t i = 0; i < move->leg_count && done < bytes; i++) {
        leg *at = &move->legs[(move->turn + i) % move->leg_count];
        if (at->transfer)
            done += kvf_transfer_advance(at->transfer, bytes - done);
        else if (at->flow)
            done += kvf_mover_allow(at->flow, bytes - done);
    }
    move->turn = move->leg_count ? (move->turn + 1) % move->leg_count : 0;
    return done;
}

bool kvf_move_was_cut(const kvf_move *move) {
    for (uint32_t i = 0; i < move->leg_count; i++)
        if (kvf_transfer_was_cut(move->legs[i].transfer))
            return true;
    return false;
}

uint64_t kvf_move_packed(const kvf_move *move, uint32_t source) {
    const leg *at = &move->legs[source];
    return at->flow ? bytes_of(at) : 0;
}

/* Of one source. */
static uint32_t layers_of(const leg *at) {
    if (at->transfer)
        return kvf_transfer_layers(at->transfer);
    if (!at->flow)
        return UINT32_MAX;
    if (at->flow->ended && at->flow->status)
        return 0;
    return kvf_stream_whole_layers(at->flow->stream, kvf_stage_flow_in_place(at->flow));
}

uint32_t kvf_move_layers(const kvf_move *move) {
    uint32_t layers = UINT32_MAX;
    for (uint32_t i = 0; i < move->leg_count; i++) {
        const uint32_t whole = layers_of(&move->legs[i]);
        layers = whole < layers ? whole : layers;
    }
    return layers;
}

kvf_status kvf_stage_count(kvf_stage *stage, const char *peer, uint64_t permission, uint64_t *by_layer) {
    kvf_stage_tally *tally = kvf_alloc0(1, sizeof *tally);
    char *name = kvf_strdup(peer);
    if (!tally || !name) {
        kvf_free(tally);
        kvf_free(name);
        return kvf_nomem("a count of layers");
    }
    tally->permission = permission;
    tally->peer = name;
    tally->by_layer = by_layer;
    tally->next = stage->tallies;
    stage->tallies = tally;
    return KVF_OK;
}

void kvf_stage_count_no_more(kvf_stage *stage, uint64_t permission) {
    for (kvf_stage_flow *flow = stage->first; flow; flow = flow->following)
        if (flow->permission == permission)
            flow->by_layer = NULL;
    for (kvf_stage_tally **at = &stage->tallies; *at;) {
        kvf_stage_tally *tally = *at;
        if (tally->permission != permission) {
            at = &tally->next;
            continue;
        }
        *at = tally->next;
        kvf_free(tally->peer);
        kvf_free(tally);
    }
}

void kvf_stage_refuse_with(kvf_stage *stage, kvf_status status) {
    stage->refusal = status;
}

uint64_t kvf_move_operations(const kvf_move *move) {
    uint64_t all = 0;
    for (uint32_t i = 0; i < move->leg_count; i++) {
        uint64_t runs = 0;
        if (move->legs[i].transfer)
            kvf_transfer_counts(move->legs[i].transfer, NULL, &runs);
        else if (move->legs[i].flow)
            runs = move->legs[i].flow->operations;
        all += runs;
    }
    return all;
}

void kvf_move_cancel(kvf_move *move) {
    if (move && !is_over(move))
        fail(move, KVF_E_CANCELLED, "the move was cancelled by its owner");
}

void kvf_move_free(kvf_move *move) {
    if (!move)
        return;
    for (uint32_t i = 0; i < move->leg_count; i++) {
        kvf_transfer_free(move->legs[i].transfer);
        if (move->legs[i].flow)
            kvf_stage_flow_leave(move->legs[i].flow);
    }
    move->stage->moves--;
    if (move->stage->closed)
        kvf_stage_release(move->stage);
    kvf_free(move->legs);
    kvf_free(move);
}
