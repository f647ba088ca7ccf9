/*
 * The public functions of a stage, except for moves: opening, peers, messages, turns, and time.
 */
#include <stdio.h>

#include "cuda/long_runs.h"
#include "stage/cost.h"
#include "stage/flow.h"
#include "stage/ways.h"
#include "transport/card.h"
#include "transport/transport.h"

#define ARENA_BYTES (64u << 20)
#define SLOT_BYTES_LEAST 4096u
#define SLOT_BYTES_MOST (1u << 20)
#define WINDOW 8u
#define FLOWS 64u
#define COPIED_BYTES (1u << 20) /* in one kvf_stage_progress(), which holds up the transport's progress */
#define LATE_TURNS 16u          /* one turn in so many goes by time instead of priority */
#define DEVICE_PATIENCE_NS UINT64_C(30000000000)

/* ---- opening --------------------------------------------------------------------------------- */

static bool are_slots(uint64_t bytes, uint32_t slot) {
    return bytes / slot >= 4 && bytes / slot <= UINT32_MAX;
}

static kvf_status take_options(kvf_stage_options *options, const kvf_stage_options *given) {
    kvf_status status = kvf_take_options(options, sizeof *options, given, "kvf_stage_options");
    if (status)
        return status;
    if (options->workers > KVF_WORKERS_MAX)
        return kvf_fail(KVF_E_INVALID, "stage options: workers is %u; allowed: 0 to %u", options->workers,
                        KVF_WORKERS_MAX);
    options->arena_bytes = options->arena_bytes ? options->arena_bytes : ARENA_BYTES;
    options->device_arena_bytes = options->device_arena_bytes ? options->device_arena_bytes : ARENA_BYTES;
    options->device_copy_bytes = options->device_copy_bytes ? options->device_copy_bytes : KVF_LONG_RUN_BYTES;
    options->slot_bytes = options->slot_bytes ? options->slot_bytes : KVF_SLOT_BYTES;
    options->window = options->window ? options->window : WINDOW;
    options->flows = options->flows ? options->flows : FLOWS;
    options->stall_ns = options->stall_ns ? options->stall_ns : 30 * KVF_SECOND;
    options->doubt_ns = options->doubt_ns ? options->doubt_ns : 30 * KVF_SECOND;
    const uint32_t slot = options->slot_bytes;
    if (slot < SLOT_BYTES_LEAST || slot > SLOT_BYTES_MOST || (slot & (slot - 1)))
        return kvf_fail(KVF_E_INVALID, "stage options: slot_bytes is %u; allowed: powers of two, %u to %u",
                        slot, SLOT_BYTES_LEAST, SLOT_BYTES_MOST);
    if (!are_slots(options->arena_bytes, slot))
        return kvf_fail(KVF_E_INVALID, "stage options: arena_bytes is %llu; allowed: 4 slots of %u and more",
                        (unsigned long long)options->arena_bytes, slot);
    if (options->device_arena_bytes != KVF_NO_DEVICE_ARENA && !are_slots(options->device_arena_bytes, slot))
        return kvf_fail(KVF_E_INVALID,
                        "stage options: device_arena_bytes is %llu; allowed: 4 slots of %u and more, and "
                        "KVF_NO_DEVICE_ARENA",
                        (unsigned long long)options->device_arena_bytes, slot);
    if (options->window > KVF_WINDOW_MAX)
        return kvf_fail(KVF_E_INVALID, "stage options: window is %u; allowed: 0 to %u", options->window,
                        KVF_WINDOW_MAX);
    return KVF_OK;
}

kvf_status kvf_stage_check_options(const kvf_stage_options *options) {
    kvf_stage_options taken;
    return take_options(&taken, options);
}

/* Opens the arena that is in one kind of memory; `device` is its number. */
static kvf_status open_arena(kvf_stage *stage, kvf_memory_kind kind, uint32_t device, uint64_t bytes) {
    kvf_memory memory = {.struct_size = sizeof memory, .kind = kind, .device = device};
    const uint32_t slot = stage->options.slot_bytes;
    uint32_t slots = (uint32_t)(bytes / slot), region;
    memory.bytes = (uint64_t)slots * slot;
    (void)kvf_transport_memory(stage->transport, &region);
    kvf_status status = kvf_transport_allocate(stage->transport, kind, device, memory.bytes, &memory.address);
    if (status)
        return status;
    status = kvf_arena_open(&stage->arenas[kind], region, memory.address, slots, slot);
    if (!status)
        status = kvf_transport_register_arena(stage->transport, region, &memory);
    if (status) {
        kvf_arena_close(&stage->arenas[kind]);
        kvf_transport_give_back(stage->transport, memory.address);
    }
    return status;
}

static kvf_status open_device_arena(kvf_stage *stage) {
    uint32_t count;
    const kvf_memory *cells = kvf_transport_memory(stage->transport, &count);
    const uint64_t bytes = stage->options.device_arena_bytes;
    return bytes == KVF_NO_DEVICE_ARENA
               ? kvf_fail(KVF_E_UNSUPPORTED, "device_arena_bytes says that there is none")
               : open_arena(stage, KVF_MEMORY_CUDA, cells[0].device, bytes);
}

static kvf_status pin_arena(const kvf_stage *stage) {
    const kvf_arena *arena = &stage->arenas[KVF_MEMORY_HOST];
    return stage->device ? kvf_stage_device_pin(stage->device, arena->slots[0].memory,
                                                (uint64_t)arena->slot_count * arena->slot_bytes)
                         : KVF_OK;
}

/* Takes an arena back, of which no peer knows. */
static void drop_arena(kvf_stage *stage, int kind) {
    kvf_arena *arena = &stage->arenas[kind];
    if (arena->slots && !kvf_transport_unregister_region(stage->transport, arena->region))
        kvf_transport_give_back(stage->transport, arena->slots[0].memory);
    kvf_arena_close(arena);
}

/* An arena that the device cannot reach is of no use: kernels would access memory that faults, for good. */
static kvf_status try_host_arena(kvf_stage *stage, uint64_t bytes) {
    kvf_status status = open_arena(stage, KVF_MEMORY_HOST, 0, bytes);
    if (status)
        return status;
    status = pin_arena(stage);
    if (!status)
        return KVF_OK;
    (void)snprintf(stage->why_host, sizeof stage->why_host, "%s", kvf_error_detail());
    drop_arena(stage, KVF_MEMORY_HOST);
    return kvf_fail(status, "%s", stage->why_host);
}

static bool cannot_pin(const kvf_stage *stage, kvf_status status) {
    return status == KVF_E_NOMEM && stage->why_host[0];
}

/* If the driver lacks memory to pin it, half of it, and so on: that moves the same bytes, in more turns. */
static kvf_status open_host_arena(kvf_stage *stage) {
    uint64_t bytes = stage->options.arena_bytes;
    kvf_status status = try_host_arena(stage, bytes);
    while (cannot_pin(stage, status) && are_slots(bytes / 2, stage->options.slot_bytes))
        status = try_host_arena(stage, bytes /= 2);
    return status;
}

/* A device's cells need one of the two: a transport may move only memory of devices, or none. */
static kvf_status open_arenas(kvf_stage *stage) {
    char why[KVF_DETAIL_BYTES];
    kvf_status status = open_host_arena(stage);
    if (!stage->device || (status && status != KVF_E_UNSUPPORTED && !cannot_pin(stage, status)))
        return status;
    (void)snprintf(why, sizeof why, "%s", kvf_error_detail());
    if (!open_device_arena(stage))
        return KVF_OK;
    (void)snprintf(stage->without_device, sizeof stage->without_device, "%s", kvf_error_detail());
    return status ? kvf_fail(status, "%s", why) : KVF_OK;
}

/* The detail stays. */
static void drop_arenas(kvf_stage *stage) {
    char why[KVF_DETAIL_BYTES];
    memcpy(why, kvf_error_detail(), strlen(kvf_error_detail()) + 1);
    for (int kind = KVF_ARENAS; kind-- > 0;)
        drop_arena(stage, kind);
    kvf_error_restore(why);
}

static bool settle(void *context) {
    const kvf_stage *stage = context;
    if (stage->workers)
        kvf_workers_settle(stage->workers);
    return !stage->device || kvf_stage_device_settle(stage->device);
}

static void close_copiers(kvf_stage *stage) {
    if (stage->uses_regions)
        (void)kvf_transport_set_region_user(stage->transport, NULL);
    stage->uses_regions = false;
    kvf_workers_close(stage->workers);
    if (!kvf_stage_device_close(stage->device, stage->device_patience_ns))
        kvf_transport_leave_memory(stage->transport);
    stage->workers = NULL;
    stage->device = NULL;
}

/* Finds the shard's memory, which must all be in one place. NULL: the shard has none. */
static kvf_status find_memory(const kvf_stage *stage, const kvf_memory **out) {
    uint32_t count;
    const kvf_memory *regions = kvf_transport_memory(stage->transport, &count);
    const uint32_t own = kvf_shard_get(stage->shard)->region_count;
    for (uint32_t i = 1; i < own; i++)
        if (regions[i].kind != regions[0].kind || regions[i].device != regions[0].device)
            return kvf_fail(KVF_E_UNSUPPORTED,
                            "stage: region 0 is in memory of kind %d, device %u, and region %u in kind %d, "
                            "device %u; all regions of a stage's shard must be of one kind and device",
                            (int)regions[0].kind, regions[0].device, i, (int)regions[i].kind,
                            regions[i].device);
    *out = own > 0 ? &regions[0] : NULL;
    return KVF_OK;
}

/* Opens the helpers that copy beside this thread: a device for its memory, workers for the host's. */
static kvf_status open_copiers(kvf_stage *stage) {
    const kvf_memory *memory = NULL;
    kvf_status status = find_memory(stage, &memory);
    if (!status && memory && memory->kind == KVF_MEMORY_CUDA)
        status = kvf_stage_device_open(memory->device, stage->transport, stage->options.device_copy_bytes,
                                       &stage->device);
    else if (!status && stage->options.workers > 0)
        status = kvf_workers_open(stage->options.workers, &stage->workers);
    if (status || (!stage->device && !stage->workers))
        return status;
    const kvf_region_user user = {
        stage->workers ? kvf_workers_fd(stage->workers) : kvf_stage_device_fd(stage->device), settle, stage};
    status = kvf_transport_set_region_user(stage->transport, &user);
    stage->uses_regions = !status;
    return status;
}

static kvf_status copy_convert(kvf_stage *stage) {
    const uint32_t *given = stage->options.convert;
    stage->options.convert = NULL; /* the caller's */
    if (!given)
        return KVF_OK;
    stage->convert =
        kvf_copy(given, kvf_model_group_count(kvf_shard_model(stage->shard)), sizeof *stage->convert);
    return stage->convert ? KVF_OK : kvf_nomem("a stage");
}

kvf_status kvf_stage_open(kvf_transport *transport, const kvf_shard *shard, const kvf_stage_options *options,
                          kvf_stage **out) {
    return kvf_stage_open_at(transport, shard, options, &kvf_monotonic, out);
}

kvf_status kvf_stage_open_at(kvf_transport *transport, const kvf_shard *shard,
                             const kvf_stage_options *options, const kvf_clock *clock, kvf_stage **out) {
    if (!transport || !shard || !out)
        return kvf_fail(KVF_E_INVALID, "stage: %s is NULL",
                        !transport ? "transport"
                        : !shard   ? "shard"
                                   : "out");
    kvf_stage *stage = kvf_alloc0(1, sizeof *stage);
    if (!stage)
        return kvf_nomem("a stage");
    stage->transport = transport;
    stage->shard = stage->shapes.shard = shard;
    stage->clock = clock;
    stage->device_patience_ns = DEVICE_PATIENCE_NS;
    stage->model = kvf_stage_model_sum(kvf_shard_model(shard));
    /* Numbers of flows are never reused, not even by the process that replaces this one. */
    if (kvf_random(&stage->last_flow, sizeof stage->last_flow))
        stage->last_flow = kvf_now(clock);
    stage->last_flow >>= 1;
    kvf_status status = take_options(&stage->options, options);
    if (!status && !stage->options.assumed_costs)
        (void)kvf_cost_calibrate();
    if (!status)
        status = copy_convert(stage);
    if (!status)
        status = kvf_stage_check_memory(stage);
    if (!status)
        status = open_copiers(stage);
    if (!status)
        status = open_arenas(stage);
    if (status) {
        close_copiers(stage);
        drop_arenas(stage);
        kvf_free(stage->convert);
        kvf_free(stage);
        return status;
    }
    *out = stage;
    return KVF_OK;
}

const char *kvf_stage_without_device(const kvf_stage *stage) {
    return stage->without_device[0] ? stage->without_device : NULL;
}

const char *kvf_stage_without_host(const kvf_stage *stage) {
    return !stage->arenas[KVF_MEMORY_HOST].slots && stage->why_host[0] ? stage->why_host : NULL;
}

const char *kvf_stage_short_of_host(const kvf_stage *stage) {
    return stage->arenas[KVF_MEMORY_HOST].slots && stage->why_host[0] ? stage->why_host : NULL;
}

/* ---- closing --------------------------------------------------------------------------------- */

static void free_peer(kvf_stage *stage, kvf_stage_peer *peer) {
    KVF_LIST_REMOVE(stage->peers, peer);
    kvf_known_cost_leave(&stage->known_costs, peer->known);
    kvf_free(peer->card);
    kvf_free(peer->name);
    kvf_free(peer);
}

static void free_flows(kvf_stage *stage) {
    for (kvf_stage_flow *flow = stage->first, *following; flow; flow = following) {
        following = flow->following;
        if (!kvf_stage_flow_is_over(flow))
            continue;
        kvf_stage_flow_uncount(flow); /* its move may keep it for long; other flows need not wait */
        if (!flow->owned)
            kvf_stage_flow_free(flow);
    }
}

void kvf_stage_release(kvf_stage *stage) {
    free_flows(stage);
    if (stage->first || stage->moving > 0 || stage->moves > 0)
        return;
    while (stage->peers)
        free_peer(stage, stage->peers);
    while (stage->tallies)
        kvf_stage_count_no_more(stage, stage->tallies->permission);
    kvf_shapes_free(&stage->shapes);
    for (int kind = 0; kind < KVF_ARENAS; kind++)
        kvf_arena_close(&stage->arenas[kind]);
    kvf_free(stage->convert);
    kvf_free(stage);
}

/* Of a device that has been closed. */
static void forget_copies(kvf_stage_flow *flow) {
    kvf_credit *credit;
    while ((credit = kvf_stage_flow_credit(flow, KVF_CREDIT_COPYING)))
        kvf_credit_give(credit, KVF_CREDIT_NONE);
}

void kvf_stage_close(kvf_stage *stage) {
    if (!stage)
        return;
    for (kvf_stage_flow *flow = stage->first; flow; flow = flow->following) {
        kvf_stage_flow_end(flow, kvf_fail(KVF_E_CANCELLED, "the stage was closed"));
        flow->end_sent = true;
        kvf_stage_flow_hear_end(flow); /* the arena is not used again */
    }
    close_copiers(stage); /* workers' jobs have ended with the flows */
    for (kvf_stage_flow *flow = stage->first; flow; flow = flow->following)
        forget_copies(flow);
    stage->closed = true;
    kvf_stage_release(stage);
}

/* ---- peers ----------------------------------------------------------------------------------- */

static kvf_stage_peer *find_name(const kvf_stage *stage, const char *name) {
    kvf_stage_peer *peer = stage->peers;
    while (peer && strcmp(peer->name, name) != 0)
        peer = peer->following;
    return peer;
}

kvf_stage_peer *kvf_stage_find_peer(const kvf_stage *stage, const kvf_peer *peer) {
    kvf_stage_peer *found = stage->peers;
    while (found && found->peer != peer)
        found = found->following;
    return found;
}

/* A process that was restarted has the name of the one before, which may be stopped, and write into the slots it was
 * lent when it goes on. It has to be shut out by its own card, then. */
static kvf_status keep_card(const kvf_stage *stage, const kvf_stage_peer *left, const kvf_peer *joins) {
    size_t bytes;
    const void *card = kvf_peer_card(joins, &bytes);
    if (!left->card || kvf_card_is_of_same(left->card, left->card_bytes, card, bytes))
        return KVF_OK;
    for (kvf_stage_flow *flow = stage->first; flow; flow = flow->following) {
        if (flow->peer != left || !flow->doubt_ends || flow->end_heard || flow->card)
            continue;
        flow->card = kvf_copy(left->card, left->card_bytes, 1);
        flow->card_bytes = left->card_bytes;
        if (!flow->card)
            return kvf_nomem("a peer of a stage");
    }
    return KVF_OK;
}

kvf_status kvf_stage_join(kvf_stage *stage, kvf_peer *peer) {
    if (!stage || !peer || kvf_peer_transport(peer) != stage->transport)
        return kvf_fail(KVF_E_INVALID, "join: %s",
                        !stage  ? "stage is NULL"
                        : !peer ? "peer is NULL"
                                : "the peer is of another transport");
    const char *name = kvf_peer_name(peer);
    kvf_stage_peer *joined = find_name(stage, name);
    if (joined && joined->peer)
        return kvf_fail(KVF_E_EXISTS, "join: a peer named %s has joined already", name);
    if (!joined) {
        joined = kvf_alloc0(1, sizeof *joined);
        if (!joined || !(joined->name = kvf_strdup(name))) {
            kvf_free(joined);
            return kvf_nomem("a peer of a stage");
        }
        KVF_LIST_ADD(stage->peers, joined);
    }
    kvf_status status = keep_card(stage, joined, peer);
    if (status)
        return status;
    joined->known =
        kvf_known_cost_use(&stage->known_costs, peer, stage->options.slot_bytes, stage->device != NULL);
    if (!joined->known)
        return kvf_nomem("a peer of a stage"); /* the next turn frees a record that has not joined */
    kvf_free(joined->card);
    joined->card = NULL;
    joined->flows_most = 1;
    joined->peer = peer; /* slots that an earlier peer of this name may still touch count against its share */
    joined->has_lists = kvf_cost_has_lists(joined->known->kind);
    return KVF_OK;
}

/* Ends a flow whose peer has left: no message goes either way after our END, which may not reach it. */
static void part_from(kvf_stage_flow *flow) {
    const kvf_stage *stage = flow->stage;
    kvf_stage_flow_end(flow, kvf_fail(KVF_E_PEER_LOST, "%s has left", flow->peer->name));
    kvf_stage_flow_say_end(flow);
    flow->end_sent = true;
    flow->end_pause_ns = 0; /* if it joins again, it hears of the END at once */
    if (flow->doubt_ends)
        return;
    if (kvf_stage_flow_has(flow, KVF_CREDIT_LENT))
        flow->doubt_ends = kvf_now(stage->clock) + stage->options.doubt_ns;
    else
        kvf_stage_flow_hear_end(flow);
}

void kvf_stage_leave(kvf_stage *stage, kvf_peer *peer) {
    kvf_stage_peer *left = stage && peer ? kvf_stage_find_peer(stage, peer) : NULL;
    if (!left)
        return;
    for (kvf_stage_flow *flow = stage->first; flow; flow = flow->following)
        if (flow->peer == left)
            part_from(flow);
    const void *card = kvf_peer_card(peer, &left->card_bytes);
    left->card = kvf_copy(card, left->card_bytes, 1); /* no memory: the time in doubt alone frees its slots */
    left->peer = NULL;
    kvf_known_cost_leave(&stage->known_costs, left->known);
    left->known = NULL;
}

/* Frees slots in doubt whose time is over, once nobody can write to them. */
static void end_doubt(const kvf_stage *stage, uint64_t now) {
    for (kvf_stage_flow *flow = stage->first; flow; flow = flow->following)
        if (flow->doubt_ends && !flow->end_heard && now >= flow->doubt_ends)
            kvf_stage_flow_end_doubt(flow);
}

void kvf_stage_quiet(kvf_stage *stage, const char *name) {
    kvf_stage_peer *peer = stage && name ? find_name(stage, name) : NULL;
    for (kvf_stage_flow *flow = peer ? stage->first : NULL; flow; flow = flow->following)
        if (flow->peer == peer && flow->doubt_ends) {
            flow->doubt_ends = 1; /* long past */
            flow->late_ends = flow->late_ends ? 1 : 0;
        }
    if (peer)
        end_doubt(stage, kvf_now(stage->clock));
}

void kvf_stage_stop(kvf_stage *stage, const kvf_peer *peer) {
    const kvf_stage_peer *stopped = stage && peer ? kvf_stage_find_peer(stage, peer) : NULL;
    for (kvf_stage_flow *flow = stopped ? stage->first : NULL; flow; flow = flow->following)
        if (flow->peer == stopped && !flow->mover)
            kvf_stage_flow_end(flow, kvf_fail(KVF_E_CANCELLED, "the lender stopped the flow"));
}

bool kvf_stage_revoke(kvf_stage *stage, uint64_t permission) {
    bool quiet = true;
    for (kvf_stage_flow *flow = stage ? stage->first : NULL; flow; flow = flow->following) {
        if (flow->mover || !flow->open || flow->permission != permission)
            continue;
        kvf_stage_flow_end(flow, kvf_fail(KVF_E_CANCELLED, "its permission was revoked"));
        quiet = quiet && !kvf_stage_flow_is_copied(flow);
    }
    return quiet;
}

kvf_peer *kvf_stage_peer_named(const kvf_stage *stage, const char *name) {
    const kvf_stage_peer *peer = find_name(stage, name);
    return peer ? peer->peer : NULL;
}

/* Whether there is a flow with a peer that has not ended, or with `hanging` one whose last operations have not. */
static bool has_flow(const kvf_stage *stage, const kvf_peer *peer, bool hanging) {
    const kvf_stage_peer *joined = kvf_stage_find_peer(stage, peer);
    for (const kvf_stage_flow *flow = joined ? stage->first : NULL; flow; flow = flow->following)
        if (flow->peer == joined && (!flow->ended || (hanging && !(flow->end_sent && flow->moving == 0))))
            return true;
    return false;
}

bool kvf_stage_peer_moves(const kvf_stage *stage, const kvf_peer *peer) {
    return has_flow(stage, peer, true);
}

bool kvf_stage_peer_goes_on(const kvf_stage *stage, const kvf_peer *peer) {
    return has_flow(stage, peer, false);
}

void kvf_stage_each_read(const kvf_stage *stage, const kvf_peer *peer,
                         void (*visit)(void *context, uint64_t permission), void *context) {
    const kvf_stage_peer *joined = kvf_stage_find_peer(stage, peer);
    for (const kvf_stage_flow *flow = joined ? stage->first : NULL; flow; flow = flow->following)
        if (flow->peer == joined && !flow->mover && !flow->ended && flow->direction == KVF_READ)
            visit(context, flow->permission);
}

void kvf_stage_stop_reading(const kvf_stage *stage, const kvf_peer *peer, kvf_status status) {
    const kvf_stage_peer *joined = kvf_stage_find_peer(stage, peer);
    for (kvf_stage_flow *flow = joined ? stage->first : NULL; flow; flow = flow->following)
        if (flow->peer == joined && flow->mover && flow->direction == KVF_READ)
            kvf_stage_flow_end(flow, status);
}

bool kvf_stage_is_idle(const kvf_stage *stage) {
    return !stage->first;
}

/* ---- messages -------------------------------------------------------------------------------- */

static bool is_from_lender(const kvf_stage_message *message) {
    return message->word == KVF_STAGE_ACCEPT || message->word == KVF_STAGE_LEND ||
           (message->word == KVF_STAGE_END && message->by_lender);
}

static void hear(kvf_stage *stage, kvf_stage_peer *peer, const kvf_stage_message *message) {
    if (message->word == KVF_STAGE_OPEN) {
        kvf_lender_hear_open(stage, peer, message);
        return;
    }
    bool mover = is_from_lender(message);
    kvf_stage_flow *flow = kvf_stage_flow_find(stage, peer, message->flow, mover);
    const bool is_end = message->word == KVF_STAGE_END;
    if (flow && flow->end_heard && is_end)
        return; /* repeated */
    if (!flow || flow->end_heard || (mover && flow->began_ns == 0)) {
        const kvf_status status =
            kvf_fail(KVF_E_NOT_FOUND, "a message of kind %d is about flow %llu, which does not exist",
                     (int)message->word, (unsigned long long)message->flow);
        if (flow || !is_end)
            kvf_stage_blame(stage, peer->name, status);
        else if (!mover || message->status != KVF_E_NOT_FOUND) /* otherwise it may be such an answer */
            kvf_stage_flow_deny(peer, message->flow, !mover, status);
    } else if (mover)
        kvf_mover_hear(flow, message);
    else
        kvf_lender_hear(flow, message);
}

bool kvf_stage_notice(kvf_stage *stage, const char *sender, const void *data, size_t bytes) {
    if (!stage || stage->closed || !sender || !data || !kvf_stage_is_message(data, bytes))
        return false;
    kvf_stage_peer *peer = find_name(stage, sender);
    kvf_stage_message message = {0};
    kvf_status status = peer && peer->peer ? kvf_stage_read_message(data, bytes, &message)
                                           : kvf_fail(KVF_E_NOT_FOUND,
                                                      "a message came from %s, which has not joined", sender);
    if (status)
        kvf_stage_blame(stage, sender, status);
    else
        hear(stage, peer, &message);
    return true;
}

/* ---- turns ----------------------------------------------------------------------------------- */

static bool step(kvf_stage_flow *flow) {
    return flow->mover ? kvf_mover_step(flow) : kvf_lender_step(flow);
}

static void talk(kvf_stage_flow *flow) {
    if (flow->mover)
        kvf_mover_talk(flow);
    else
        kvf_lender_talk(flow);
}

/* Whether a mover has slots to work with. When all bytes of a push are in slots, others may be left over. */
static bool has_slots(const kvf_stage_flow *flow) {
    return flow->moving > 0 || kvf_stage_flow_has(flow, KVF_CREDIT_HERE) ||
           kvf_stage_flow_has(flow, KVF_CREDIT_MOVED) || kvf_stage_flow_is_copied(flow);
}

/* Whether a flow can only go on when its peer acts. */
static bool waits_for_peer(const kvf_stage_flow *flow) {
    if (flow->ended)
        return false;
    if (flow->mover)
        return flow->began_ns > 0 && (!has_slots(flow) || flow->next == flow->bytes);
    return !flow->open || kvf_lender_awaits_slots(flow);
}

static bool waits_for_device(const kvf_stage_flow *flow) {
    return flow->stage->device && !flow->ended && kvf_stage_flow_is_copied(flow);
}

/* Ends a flow whose peer has been silent for too long, or whose device finishes no copy. The device has half of the
 * time, so that the peer hears of it before it would call us silent. */
static void end_stalled(kvf_stage_flow *flow, uint64_t silent_ns) {
    const unsigned long long ms = silent_ns / 1000000;
    const uint64_t most = flow->stage->options.stall_ns;
    if (waits_for_device(flow) && silent_ns > most / 2)
        kvf_stage_flow_end(flow, kvf_fail(KVF_E_TIMEOUT, "the device has finished no copy for %llu ms", ms));
    if (silent_ns <= most || !waits_for_peer(flow))
        return;
    kvf_status status = kvf_fail(KVF_E_TIMEOUT, "nothing was heard from the peer for %llu ms", ms);
    if (flow->mover)
        kvf_stage_flow_end(flow, kvf_fail_in(status, "%s: ", flow->peer->name));
    else
        kvf_stage_flow_blame(flow, status);
}

/* Whether a flow has waited since before `since` while its peer has no slot of an arena: others keep all that may be
 * lent. Counts the flows that wait for it. */
static bool somebody_waits(const kvf_stage *stage, kvf_arena *arena, uint64_t since) {
    bool long_since = false;
    arena->waiting = 0;
    for (const kvf_stage_flow *flow = stage->first; flow; flow = flow->following) {
        const bool waits = flow->arena == arena && kvf_lender_waits(flow);
        arena->waiting += waits;
        long_since = long_since || (waits && flow->waits_ns < since);
    }
    return long_since;
}

/* If one has, ends the flows whose peers have returned no slot of the arena for as long. Their slots are freed as those of
 * lost peers when the peers have kept them as long again. */
static void end_keepers(const kvf_stage *stage, kvf_arena *arena, uint64_t now) {
    const uint64_t patience = stage->options.doubt_ns;
    const uint64_t since = now > patience ? now - patience : 0;
    if (!somebody_waits(stage, arena, since))
        return;
    for (kvf_stage_flow *flow = stage->first; flow; flow = flow->following) {
        if (flow->arena != arena || !kvf_lender_keeps(flow, since))
            continue;
        if (flow->ended)
            flow->doubt_ends = now;
        else
            kvf_stage_flow_blame(flow,
                                 kvf_fail(KVF_E_TIMEOUT,
                                          "the mover has returned no slot for %llu ms, and other flows wait",
                                          (unsigned long long)((now - flow->kept_ns) / 1000000)));
    }
}

static void watch_time(kvf_stage *stage) {
    const uint64_t now = stage->first ? kvf_now(stage->clock) : 0; /* an idle stage needs none */
    for (int kind = 0; kind < KVF_ARENAS; kind++)
        end_keepers(stage, &stage->arenas[kind], now);
    end_doubt(stage, now);
    for (kvf_stage_flow *flow = stage->first; flow; flow = flow->following)
        end_stalled(flow, now - flow->heard_ns);
}

static void free_peers(kvf_stage *stage) {
    for (kvf_stage_peer *peer = stage->peers, *following; peer; peer = following) {
        following = peer->following;
        bool used = peer->peer != NULL;
        for (const kvf_stage_flow *flow = stage->first; flow && !used; flow = flow->following)
            used = flow->peer == peer;
        if (!used)
            free_peer(stage, peer);
    }
}

static kvf_job *next_copied(const kvf_stage *stage) {
    return stage->device    ? kvf_stage_device_take(stage->device)
           : stage->workers ? kvf_workers_take(stage->workers)
                            : NULL;
}

/* Goes on with the slots that workers, or a device, have copied. */
static void take_copied(const kvf_stage *stage) {
    kvf_job *job;
    while ((job = next_copied(stage))) {
        kvf_credit *credit = (kvf_credit *)(void *)((char *)job - offsetof(kvf_credit, job));
        KVF_ASSERT(credit->state == KVF_CREDIT_COPYING);
        credit->flow->heard_ns = kvf_now(stage->clock);
        if (credit->flow->ended)
            kvf_credit_give(credit, KVF_CREDIT_NONE);
        else if (job->failed)
            kvf_stage_flow_end(credit->flow, kvf_fail(job->failed, "%s", job->why));
        else if (credit->flow->mover)
            kvf_mover_copied(credit);
        else
            kvf_lender_copied(credit);
    }
}

/* One slot's work. A flow that had its turn goes behind the others of its priority. */
static bool take_turn(kvf_stage_flow *flow) {
    kvf_stage *stage = flow->stage;
    flow->turn = stage->turns;
    if (!step(flow))
        return false;
    stage->turns++;
    talk(flow);
    kvf_stage_flow_line_up(flow);
    return true;
}

/* Peers choose priorities, so some turns go to the flow whose last one was longest ago, whatever its priority. */
static bool take_late_turn(const kvf_stage *stage) {
    kvf_stage_flow *late = stage->turns % LATE_TURNS == 0 ? stage->first : NULL;
    for (kvf_stage_flow *flow = late; flow; flow = flow->following)
        late = flow->turn < late->turn ? flow : late;
    return late && take_turn(late);
}

static bool take_first_turn(const kvf_stage *stage) {
    kvf_stage_flow *flow = stage->first;
    while (flow && !take_turn(flow))
        flow = flow->following;
    return flow != NULL;
}

static bool take_turns(kvf_stage *stage) {
    uint32_t left = COPIED_BYTES / stage->options.slot_bytes;
    while (left > 0 && (take_late_turn(stage) || take_first_turn(stage)))
        left--;
    return left == 0;
}

kvf_status kvf_stage_progress(kvf_stage *stage, bool *busy) {
    if (busy)
        *busy = false;
    if (!stage || stage->closed)
        return kvf_fail(KVF_E_INVALID, "stage: %s", stage ? "it is closed" : "stage is NULL");
    stage->rest = KVF_REST_NOTHING;
    watch_time(stage);
    take_copied(stage);
    for (kvf_stage_flow *flow = stage->first; flow; flow = flow->following)
        talk(flow);
    const bool more = kvf_lender_read_one(stage);
    if (take_turns(stage) || more)
        kvf_stage_note_rest(stage, KVF_REST_WORK);
    free_flows(stage);
    free_peers(stage);
    if (busy)
        *busy = stage->rest != KVF_REST_NOTHING;
    return KVF_OK;
}

bool kvf_stage_only_repeats(const kvf_stage *stage) {
    return stage->rest == KVF_REST_MESSAGES;
}

/* ---- what a stage reports -------------------------------------------------------------------- */

kvf_status kvf_stage_get_info(const kvf_stage *stage, kvf_stage_info *out) {
    kvf_status status = kvf_check_out(out, "kvf_stage_info");
    if (status || !stage)
        return status ? status : kvf_fail(KVF_E_INVALID, "stage: stage is NULL");
    kvf_stage_info info = stage->counts;
    info.device_slots = stage->arenas[KVF_MEMORY_CUDA].slot_count;
    info.region = stage->arenas[KVF_MEMORY_HOST].region;
    for (int kind = 0; kind < KVF_ARENAS; kind++) {
        const kvf_arena *arena = &stage->arenas[kind];
        info.slots += arena->slot_count;
        info.slots_free += arena->free_count;
        info.slots_lent += arena->lent - arena->doubt;
        info.slots_doubt += arena->doubt;
    }
    for (const kvf_stage_flow *flow = stage->first; flow; flow = flow->following)
        info.flows++;
    kvf_fill_out(out, &info, sizeof info);
    return KVF_OK;
}
