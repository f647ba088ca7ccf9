#include "stage/flow.h"

#include <stdio.h>

#include "transport/transport.h"

/* Pauses before an END is repeated; they double. A busy peer answers within the first. */
#define END_FIRST_PAUSE (250 * KVF_MILLISECOND)
#define END_LONGEST_PAUSE (8 * KVF_SECOND)

/* ---- life ------------------------------------------------------------------------------------ */

void kvf_stage_note_rest(kvf_stage *stage, kvf_stage_rest rest) {
    stage->rest = rest > stage->rest ? rest : stage->rest;
}

void kvf_stage_flow_count(kvf_stage_flow *flow) {
    flow->counted = true;
    flow->peer->flows[flow->mover]++;
}

void kvf_stage_flow_uncount(kvf_stage_flow *flow) {
    if (flow->counted) {
        if (flow->peer->flows[flow->mover]-- >= flow->peer->flows_most)
            kvf_stage_note_rest(flow->stage, KVF_REST_WORK); /* another flow may wait for this */
        flow->counted = false;
    }
}

kvf_stage_flow *kvf_stage_flow_new(kvf_stage *stage, kvf_stage_peer *peer, uint64_t id, bool mover) {
    kvf_stage_flow *flow = kvf_alloc0(1, sizeof *flow);
    if (!flow)
        return NULL;
    flow->stage = stage;
    flow->peer = peer;
    flow->id = id;
    flow->mover = mover;
    kvf_stage_flow_use_arena(flow, KVF_MEMORY_HOST);
    flow->heard_ns = kvf_now(stage->clock);
    flow->turn = stage->turns;
    for (uint32_t i = 0; i < KVF_WINDOW_MAX; i++)
        flow->credits[i].flow = flow;
    KVF_QUEUE_ADD(stage->first, stage->last, flow);
    if (!mover)
        kvf_stage_flow_count(flow);
    return flow;
}

void kvf_stage_flow_use_arena(kvf_stage_flow *flow, kvf_memory_kind kind) {
    flow->arena = &flow->stage->arenas[kind];
    flow->share = &flow->peer->shares[kind];
    flow->stage->counts.device_flows += kind == KVF_MEMORY_CUDA;
}

void kvf_stage_flow_line_up(kvf_stage_flow *flow) {
    kvf_stage *stage = flow->stage;
    KVF_QUEUE_REMOVE(stage->first, stage->last, flow);
    kvf_stage_flow *before = stage->last;
    while (before && before->priority < flow->priority)
        before = before->previous;
    flow->previous = before;
    flow->following = before ? before->following : stage->first;
    if (flow->following)
        flow->following->previous = flow;
    else
        stage->last = flow;
    if (before)
        before->following = flow;
    else
        stage->first = flow;
}

kvf_stage_flow *kvf_stage_flow_find(const kvf_stage *stage, const kvf_stage_peer *peer, uint64_t id,
                                    bool mover) {
    kvf_stage_flow *flow = stage->first;
    while (flow && (flow->id != id || flow->peer != peer || flow->mover != mover))
        flow = flow->following;
    return flow;
}

void kvf_stage_flow_give(kvf_stage_flow *flow, uint64_t bytes) {
    KVF_ASSERT(bytes <= flow->kept_bytes && bytes <= flow->peer->kept_bytes);
    flow->kept_bytes -= bytes;
    flow->peer->kept_bytes -= bytes;
    flow->stage->kept_bytes -= bytes;
}

static void drop_opening(kvf_stage_flow *flow) {
    if (flow->opening && !flow->mover && !flow->stream) /* else its tables are in the stream */
        kvf_stage_flow_give(flow, flow->opening_bytes);
    kvf_free(flow->opening);
    flow->opening = NULL;
    if (flow->peer->outgoing == flow)
        flow->peer->outgoing = NULL;
    if (flow->peer->incoming == flow)
        flow->peer->incoming = NULL;
}

void kvf_credit_give(kvf_credit *credit, kvf_credit_state next) {
    if (credit->own)
        kvf_arena_give(credit->flow->arena, credit->own);
    credit->own = NULL;
    credit->state = next;
}

/* A lent slot is in doubt if the flow failed: the peer may not know yet. */
static void end_credit(kvf_credit *credit, kvf_status status) {
    kvf_stage *stage = credit->flow->stage;
    const bool copying = credit->state == KVF_CREDIT_COPYING;
    if (copying && stage->device && !kvf_stage_device_withdraw(stage->device, &credit->job))
        return;
    if (copying && stage->workers)
        kvf_workers_withdraw(stage->workers, &credit->job);
    if (credit->state == KVF_CREDIT_MOVING)
        (void)kvf_transport_cancel(stage->transport, credit->operation);
    else if (credit->state != KVF_CREDIT_LENT)
        kvf_credit_give(credit, KVF_CREDIT_NONE);
    else if (status)
        kvf_arena_doubt(credit->flow->arena, credit->own);
}

void kvf_stage_flow_end(kvf_stage_flow *flow, kvf_status status) {
    if (flow->ended)
        return;
    kvf_stage *stage = flow->stage;
    flow->ended = true;
    flow->status = status;
    if (!flow->mover)
        flow->kept_ns = kvf_now(stage->clock); /* from now on the peer is to give back its slots */
    if (status) {
        (void)snprintf(flow->detail, sizeof flow->detail, "%s", kvf_error_detail());
        stage->counts.failed++;
    } else if (!flow->mover) {
        stage->counts.lent_bytes += flow->bytes;
    }
    if (flow->began_ns > 0)
        flow->took_ns = kvf_now(stage->clock) - flow->began_ns;
    for (uint32_t i = 0; i < KVF_WINDOW_MAX; i++)
        end_credit(&flow->credits[i], status);
    kvf_stage_device_drop(stage->device, &flow->table);
    if (flow->mover && flow->opening && flow->opening_at == 0) /* the peer has not heard of it */
        flow->end_sent = flow->end_heard = true;
    drop_opening(flow);
}

bool kvf_stage_flow_has(const kvf_stage_flow *flow, kvf_credit_state state) {
    for (uint32_t i = 0; i < KVF_WINDOW_MAX; i++)
        if (flow->credits[i].state == state)
            return true;
    return false;
}

bool kvf_stage_flow_is_copied(const kvf_stage_flow *flow) {
    return kvf_stage_flow_has(flow, KVF_CREDIT_COPYING);
}

void kvf_stage_flow_hear_end(kvf_stage_flow *flow) {
    KVF_ASSERT(flow->ended);
    flow->end_heard = true;
    for (uint32_t i = 0; i < KVF_WINDOW_MAX; i++)
        if (flow->credits[i].state == KVF_CREDIT_LENT)
            kvf_credit_give(&flow->credits[i], KVF_CREDIT_NONE);
    if (kvf_stage_flow_is_over(flow)) /* the next message may open another flow */
        kvf_stage_flow_uncount(flow);
}

/* A process that was stopped in the middle of a copy into a slot writes the rest whenever it goes on, and a network may
 * bring a write late. A peer that has forgotten the flow is not in the middle of a copy for it. What is read late is not
 * taken. */
static bool is_shut_out(kvf_stage_flow *flow, uint64_t now) {
    kvf_transport *transport = flow->stage->transport;
    const kvf_stage_peer *peer = flow->peer;
    size_t bytes = flow->card ? flow->card_bytes : peer->card_bytes;
    const void *card = flow->card ? flow->card : peer->peer ? kvf_peer_card(peer->peer, &bytes) : peer->card;
    if (flow->late_ends || !card)
        return now >= flow->late_ends;
    const kvf_status status =
        flow->forgotten ? KVF_E_UNSUPPORTED : kvf_transport_stop_endpoint(transport, card, bytes, true);
    if (status != KVF_E_UNSUPPORTED)
        return status != KVF_E_AGAIN;
    const bool reads = flow->direction == KVF_READ;
    flow->late_ends = flow->doubt_ends + (reads ? 0 : kvf_transport_late_ns(transport, card, bytes));
    return now >= flow->late_ends;
}

void kvf_stage_flow_end_doubt(kvf_stage_flow *flow) {
    const kvf_arena *arena = flow->arena;
    bool quiet = is_shut_out(flow, kvf_now(flow->stage->clock));
    for (uint32_t i = 0; i < KVF_WINDOW_MAX; i++)
        if (flow->credits[i].state == KVF_CREDIT_LENT)
            quiet = kvf_transport_stop_writing(flow->stage->transport, arena->region,
                                               kvf_slot_offset(arena, flow->credits[i].own->number),
                                               arena->slot_bytes) &&
                    quiet;
    if (quiet)
        kvf_stage_flow_hear_end(flow);
}

void kvf_credit_done(kvf_credit *credit, kvf_credit_state next) {
    kvf_stage_flow *flow = credit->flow;
    flow->done += credit->note.bytes.end - credit->note.bytes.begin;
    if (flow->by_layer)
        kvf_stream_add_layers(flow->stream, credit->note.bytes, flow->by_layer);
    kvf_credit_give(credit, next);
    if (flow->done == flow->bytes)
        kvf_stage_flow_end(flow, KVF_OK);
}

/* Slots are filled in the order of the stream, and may be scattered in another. */
uint64_t kvf_stage_flow_in_place(const kvf_stage_flow *flow) {
    uint64_t first = flow->next;
    if (flow->done == flow->bytes)
        return flow->bytes;
    for (uint32_t i = 0; i < KVF_WINDOW_MAX; i++) {
        const kvf_credit *credit = &flow->credits[i];
        switch (credit->state) {
        case KVF_CREDIT_HERE:
        case KVF_CREDIT_MOVING:
        case KVF_CREDIT_MOVED:
        case KVF_CREDIT_COPYING:
        case KVF_CREDIT_BACK:
            first = kvf_min_u64(first, credit->note.bytes.begin);
            break;
        case KVF_CREDIT_NONE:
        case KVF_CREDIT_TO_LEND:
        case KVF_CREDIT_LENT:
        case KVF_CREDIT_TO_RETURN:
            break;
        }
    }
    return first;
}

bool kvf_stage_flow_is_over(const kvf_stage_flow *flow) {
    return flow->ended && flow->end_sent && flow->end_heard && flow->moving == 0 &&
           !kvf_stage_flow_is_copied(flow);
}

void kvf_stage_flow_free(kvf_stage_flow *flow) {
    KVF_ASSERT(flow->ended && flow->moving == 0 && !kvf_stage_flow_is_copied(flow));
    kvf_stage *stage = flow->stage;
    KVF_QUEUE_REMOVE(stage->first, stage->last, flow);
    kvf_stage_flow_uncount(flow);
    if (!flow->mover)
        flow->peer->opened_bytes -= flow->opening_bytes;
    kvf_stage_flow_give(flow, flow->kept_bytes);
    kvf_stream_free(flow->stream);
    kvf_shapes_leave(flow->shape);
    kvf_free(flow->card);
    kvf_free(flow);
}

void kvf_stage_flow_leave(kvf_stage_flow *flow) {
    if (!flow->ended)
        kvf_stage_flow_end(flow, kvf_fail(KVF_E_CANCELLED, "cancelled by its owner"));
    kvf_stage *stage = flow->stage;
    flow->owned = false;
    if (kvf_stage_flow_is_over(flow))
        kvf_stage_flow_free(flow);
    if (stage->closed)
        kvf_stage_release(stage);
}

/* ---- peers that break the rules ---------------------------------------------------------------- */

void kvf_stage_blame(kvf_stage *stage, const char *peer, kvf_status status) {
    stage->counts.refused++;
    if (stage->options.on_event) {
        char text[KVF_STAGE_DETAIL_BYTES];
        (void)snprintf(text, sizeof text, "%s", kvf_error_detail());
        stage->options.on_event(stage->options.context, peer, status, text);
        kvf_error_restore(text);
    }
}

void kvf_stage_flow_blame(kvf_stage_flow *flow, kvf_status status) {
    (void)kvf_fail_in(status, "flow %llu: ", (unsigned long long)flow->id);
    kvf_stage_blame(flow->stage, flow->peer->name, status);
    kvf_stage_flow_end(flow, status);
}

/* ---- talking --------------------------------------------------------------------------------- */

bool kvf_stage_flow_say(kvf_stage_flow *flow, kvf_stage_message *message) {
    unsigned char data[KVF_STAGE_MESSAGE_MAX];
    if (!flow->peer->peer)
        return false;
    message->flow = flow->id;
    size_t bytes = kvf_stage_write_message(message, data);
    kvf_status status = kvf_transport_notify(flow->peer->peer, data, bytes);
    if (status == KVF_E_AGAIN || status == KVF_E_NOMEM)
        kvf_stage_note_rest(flow->stage, KVF_REST_MESSAGES);
    else if (status) {
        kvf_stage_flow_end(flow, status);
        flow->end_sent = true; /* the peer is out of reach; kvf_stage_leave() does the rest */
    }
    return !status;
}

kvf_credit *kvf_stage_flow_credit(kvf_stage_flow *flow, kvf_credit_state state) {
    kvf_credit *first = NULL;
    for (uint32_t i = 0; i < KVF_WINDOW_MAX; i++) {
        kvf_credit *credit = &flow->credits[i];
        if (credit->state == state && (!first || credit->note.bytes.begin < first->note.bytes.begin))
            first = credit;
    }
    return first;
}

/* The next credit to name; with full slots, the one with the next bytes. */
static kvf_credit *next_to_say(kvf_stage_flow *flow, kvf_credit_state state, bool full) {
    kvf_credit *credit = kvf_stage_flow_credit(flow, state);
    return credit && full && credit->note.bytes.begin != flow->told ? NULL : credit;
}

void kvf_stage_flow_say_slots(kvf_stage_flow *flow, kvf_stage_word word, kvf_credit_state from,
                              kvf_credit_state to) {
    const bool full = (word == KVF_STAGE_LEND) == (flow->direction == KVF_READ);
    const uint64_t told = flow->told;
    kvf_stage_message message = {.word = word};
    kvf_credit *said[KVF_STAGE_SLOTS_MAX], *credit;
    while ((credit = next_to_say(flow, from, full))) {
        said[message.slot_count_named] = credit;
        message.slots[message.slot_count_named++] =
            full ? credit->note : (kvf_slot_note){credit->note.slot, credit->note.generation, {0, 0}};
        credit->state = to;
        if (full)
            flow->told = credit->note.bytes.end;
    }
    if (message.slot_count_named == 0 || kvf_stage_flow_say(flow, &message) || flow->ended)
        return;
    flow->told = told;
    for (uint32_t i = 0; i < message.slot_count_named; i++)
        said[i]->state = from;
}

/* The peer may have forgotten the flow without hearing our END, or its own may be lost. */
static bool is_end_due_again(const kvf_stage_flow *flow, uint64_t now) {
    return !flow->end_heard && !flow->forgotten && flow->peer->peer &&
           now - flow->end_sent_ns >= flow->end_pause_ns;
}

void kvf_stage_flow_say_end(kvf_stage_flow *flow) {
    if (!flow->ended || flow->moving > 0 || (flow->end_sent && flow->end_heard))
        return;
    const uint64_t now = kvf_now(flow->stage->clock);
    if (flow->end_sent && !is_end_due_again(flow, now))
        return;
    kvf_stage_message message = {.word = KVF_STAGE_END, .by_lender = !flow->mover, .status = flow->status};
    (void)snprintf(message.sentence, sizeof message.sentence, "%s", flow->status ? flow->detail : "");
    if (kvf_stage_flow_say(flow, &message))
        flow->end_sent = true;
    else if (!flow->end_sent)
        return; /* the peer takes none now */
    flow->end_sent_ns = now;
    flow->end_pause_ns =
        flow->end_pause_ns ? kvf_min_u64(2 * flow->end_pause_ns, END_LONGEST_PAUSE) : END_FIRST_PAUSE;
}

void kvf_stage_flow_deny(const kvf_stage_peer *peer, uint64_t flow, bool by_lender, kvf_status status) {
    unsigned char data[KVF_STAGE_MESSAGE_MAX];
    kvf_stage_message message = {
        .word = KVF_STAGE_END, .flow = flow, .by_lender = by_lender, .status = status};
    (void)snprintf(message.sentence, sizeof message.sentence, "%s", kvf_error_detail());
    if (peer->peer)
        (void)kvf_transport_notify(peer->peer, data, kvf_stage_write_message(&message, data));
}

/* ---- the shard's memory ------------------------------------------------------------------------ */

kvf_status kvf_stage_check_memory(const kvf_stage *stage) {
    uint32_t count;
    const kvf_memory *regions = kvf_transport_memory(stage->transport, &count);
    const kvf_shard_desc *shard = kvf_shard_get(stage->shard);
    for (uint32_t i = 0; i < shard->region_count; i++) {
        uint64_t there = i < count ? regions[i].bytes : 0;
        if (there < shard->region_bytes[i])
            return kvf_fail(KVF_E_NOT_REGISTERED, "region %u has %llu bytes; the shard's has %llu", i,
                            (unsigned long long)there, (unsigned long long)shard->region_bytes[i]);
    }
    return KVF_OK;
}

/* A shorter copy takes less time than waking a worker. Slots smaller than this still go to workers. */
#define WORTH_A_WORKER_BYTES (64u << 10)

static bool is_for_workers(const kvf_stage *stage, kvf_byte_range bytes) {
    return stage->workers &&
           bytes.end - bytes.begin >= kvf_min_u64(WORTH_A_WORKER_BYTES, stage->options.slot_bytes);
}

static bool copy(kvf_credit *credit, bool gathers) {
    kvf_stage_flow *flow = credit->flow;
    kvf_stage *stage = flow->stage;
    kvf_status status = kvf_stage_check_memory(stage);
    if (!status && stage->device && !flow->table.address)
        status = kvf_stage_device_bring(stage->device, flow->stream, &flow->table);
    if (status) {
        kvf_stage_flow_end(flow, status);
        return false;
    }
    credit->job = (kvf_job){.stream = flow->stream,
                            .bases = kvf_transport_bases(stage->transport),
                            .bytes = credit->note.bytes,
                            .slot = credit->own->memory,
                            .gathers = gathers};
    if (!stage->device && !is_for_workers(stage, credit->note.bytes)) {
        kvf_job_do(&credit->job);
        return true;
    }
    credit->state = KVF_CREDIT_COPYING;
    if (stage->device) {
        kvf_stage_device_put(stage->device, &flow->table, &credit->job);
        return false;
    }
    stage->counts.worker_copies++;
    kvf_workers_put(stage->workers, &credit->job);
    return false;
}

bool kvf_stage_flow_gather(kvf_credit *credit) {
    return copy(credit, true);
}

bool kvf_stage_flow_scatter(kvf_credit *credit) {
    return copy(credit, false);
}

kvf_status kvf_stage_flow_check_bytes(const kvf_stage_flow *flow, kvf_byte_range bytes, uint64_t most) {
    uint64_t length = bytes.end - bytes.begin;
    if (bytes.begin != flow->next || bytes.end > flow->bytes || length == 0)
        return kvf_fail(KVF_E_RANGE, "a slot has bytes [%llu, %llu) of the stream; the next are [%llu, %llu)",
                        (unsigned long long)bytes.begin, (unsigned long long)bytes.end,
                        (unsigned long long)flow->next, (unsigned long long)flow->bytes);
    if (length > most || kvf_stream_cut(flow->stream, bytes.begin, length) != length)
        return kvf_fail(
            KVF_E_RANGE, "a slot has %llu bytes at %llu of the stream; allowed: up to %llu, whole elements",
            (unsigned long long)length, (unsigned long long)bytes.begin, (unsigned long long)most);
    return KVF_OK;
}
