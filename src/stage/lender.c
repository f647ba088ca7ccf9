/*
 * The lender: it lends slots of its arena. It is the holder of a pull and the reader of a push.
 */
#include "stage/flow.h"

#define READ_AT_ONCE                                                                                         \
    (64u << 10) /* of longer openings, a turn of the stage reads one: each takes milliseconds */
#define OPENED_BYTES                                                                                         \
    (64u << 20) /* of one peer's openings: what a peer sends must not be able to fill our memory */
#define KEPT_BYTES (256u << 20) /* the same of all peers, and of all that their flows need */
#define LANE_BYTES 24u          /* of a lane in a stream, and in a shape that no other flow has */

/* ---- being opened ---------------------------------------------------------------------------- */

static kvf_status check_room(const kvf_stage *stage, const kvf_stage_peer *peer, uint64_t bytes) {
    if (kvf_is_fair(peer->kept_bytes, bytes, KEPT_BYTES - stage->kept_bytes))
        return KVF_OK;
    return kvf_fail(KVF_E_LIMIT,
                    "the flows of all peers use %llu bytes here, those of this peer %llu, and this one needs "
                    "%llu; allowed: up to %u in all, and for one peer no more than is left for the others",
                    (unsigned long long)stage->kept_bytes, (unsigned long long)peer->kept_bytes,
                    (unsigned long long)bytes, KEPT_BYTES);
}

static kvf_status keep(kvf_stage_flow *flow, uint64_t bytes) {
    kvf_status status = check_room(flow->stage, flow->peer, bytes);
    if (status)
        return status;
    flow->kept_bytes += bytes;
    flow->peer->kept_bytes += bytes;
    flow->stage->kept_bytes += bytes;
    return KVF_OK;
}

/* Checks that elements of other types than ours may be converted. */
static kvf_status check_types(const kvf_stage *stage, const kvf_selection *selection) {
    for (uint32_t i = 0; i < selection->item_count; i++) {
        const kvf_stream_item *item = &selection->items[i];
        const kvf_group_desc *group = kvf_model_group(kvf_shard_model(stage->shard), item->group);
        const kvf_dtype own = group->parts[item->part].dtype;
        const uint32_t both = KVF_DTYPE_BIT(own) | KVF_DTYPE_BIT(item->dtype);
        if (own == item->dtype || (stage->convert && (stage->convert[item->group] & both) == both))
            continue;
        return kvf_fail(
            KVF_E_PERMISSION, "item %u: %s.%s: the lender does not allow conversion between %s and %s", i,
            group->name, group->parts[item->part].name, kvf_dtype_name(own), kvf_dtype_name(item->dtype));
    }
    return KVF_OK;
}

static kvf_status find_shape(kvf_stage *stage, const kvf_opening *opening, kvf_stage_shape **out) {
    kvf_selection *selection = NULL;
    kvf_status status =
        kvf_selection_check(kvf_shard_model(stage->shard), opening->items, opening->item_count, &selection);
    if (!status)
        status = check_types(stage, selection);
    if (!status)
        return kvf_shapes_use(&stage->shapes, selection, out); /* takes the selection over */
    kvf_selection_free(selection);
    return status;
}

static kvf_status make_stream(kvf_stage_flow *flow, const kvf_opening *opening) {
    kvf_status status = find_shape(flow->stage, opening, &flow->shape);
    if (!status)
        status = keep(flow, flow->shape->lanes * LANE_BYTES);
    if (!status)
        status = kvf_stream_create(flow->shape->map, opening->groups, opening->group_count, &flow->stream);
    if (status)
        return status;
    flow->bytes = kvf_stream_bytes(flow->stream);
    if (flow->bytes != opening->stream_bytes || flow->bytes == 0)
        return kvf_fail(KVF_E_MISMATCH, "the mover's stream has %llu bytes, the lender's %llu",
                        (unsigned long long)opening->stream_bytes, (unsigned long long)flow->bytes);
    if (flow->slot_bytes < kvf_stream_element(flow->stream))
        return kvf_fail(KVF_E_RANGE, "the mover accepts %u bytes in a slot, less than an element",
                        flow->slot_bytes);
    return KVF_OK;
}

static kvf_status check_permission(kvf_stage_flow *flow, const kvf_opening *opening) {
    const kvf_stage_options *options = &flow->stage->options;
    const kvf_flow_request request = {.struct_size = sizeof request,
                                      .direction = opening->direction,
                                      .permission = opening->permission,
                                      .bytes = opening->stream_bytes,
                                      .groups = opening->groups,
                                      .group_count = opening->group_count};
    kvf_error_restore("");
    flow->stage->refusal = KVF_E_PERMISSION;
    if (!options->permit || options->permit(options->context, flow->peer->name, &request))
        return KVF_OK;
    const char *verb = opening->direction == KVF_READ ? "read" : "write";
    const char *why = kvf_error_detail();
    return why[0] ? kvf_fail_in(flow->stage->refusal, "the mover may not %s: ", verb)
                  : kvf_fail(flow->stage->refusal, "the mover may not %s", verb);
}

/* Where the bytes of a push are counted by layer. */
static uint64_t *tally_of(const kvf_stage_flow *flow) {
    const kvf_stage_tally *tally = flow->direction == KVF_WRITE ? flow->stage->tallies : NULL;
    while (tally && (tally->permission != flow->permission || strcmp(tally->peer, flow->peer->name) != 0))
        tally = tally->next;
    return tally ? tally->by_layer : NULL;
}

static kvf_status accept(kvf_stage_flow *flow, const kvf_opening *opening) {
    kvf_stage *stage = flow->stage;
    if (opening->model != stage->model)
        return kvf_fail(KVF_E_MISMATCH, "the mover's model has other groups, layers or parts");
    kvf_status status = check_permission(flow, opening);
    if (status)
        return status;
    const kvf_memory_kind arena = opening->on_device ? KVF_MEMORY_CUDA : KVF_MEMORY_HOST;
    if (!stage->arenas[arena].slots)
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "the mover asks for slots in memory of %s; this rank has none there",
                        opening->on_device ? "a device" : "the host");
    kvf_stage_flow_use_arena(flow, arena);
    flow->permission = opening->permission;
    flow->direction = opening->direction;
    flow->priority = opening->priority;
    flow->window = opening->window < stage->options.window ? opening->window : stage->options.window;
    const uint32_t slot = flow->arena->slot_bytes;
    flow->slot_bytes = opening->slot_bytes < slot ? opening->slot_bytes : slot;
    flow->by_layer = tally_of(flow);
    return make_stream(flow, opening);
}

/* All of an opening has come: read it and decide. */
static void finish_opening(kvf_stage_flow *flow) {
    kvf_opening opening;
    kvf_status status = kvf_stage_read_opening(flow->opening, flow->opening_bytes, &opening);
    if (!status) {
        status = accept(flow, &opening);
        kvf_stage_free_opening(&opening);
    }
    if (status) {
        kvf_stage_flow_blame(flow, status);
        return;
    }
    kvf_free(flow->opening);
    flow->opening = NULL;
    flow->open = true;
    kvf_stage_flow_line_up(flow);
}

/* Counts the bytes of an opening, if its peer may have one more flow with so many. */
static kvf_status check_opening(kvf_stage_flow *flow, uint32_t bytes) {
    kvf_stage_peer *peer = flow->peer;
    const uint32_t most = flow->stage->options.flows;
    if (peer->flows[0] > most)
        return kvf_fail(KVF_E_LIMIT, "the peer has %u flows open; allowed: up to %u", peer->flows[0] - 1,
                        most);
    if (peer->opened_bytes + bytes > OPENED_BYTES)
        return kvf_fail(KVF_E_LIMIT, "the peer's openings have %llu bytes; allowed: up to %u",
                        (unsigned long long)peer->opened_bytes + bytes, OPENED_BYTES);
    kvf_status status = keep(flow, bytes);
    if (status)
        return status;
    flow->opening_bytes = bytes;
    peer->opened_bytes += bytes;
    return KVF_OK;
}

static kvf_stage_flow *begin(kvf_stage *stage, kvf_stage_peer *peer, const kvf_stage_message *message) {
    const uint32_t most = stage->options.flows;
    if (peer->flows[0] >= 2 * most) {
        kvf_stage_blame(stage, peer->name,
                        kvf_fail(KVF_E_LIMIT, "flow %llu: the peer has %u flows open; allowed: up to %u",
                                 (unsigned long long)message->flow, peer->flows[0], most));
        return NULL;
    }
    kvf_status status = check_room(stage, peer, sizeof(kvf_stage_flow));
    kvf_stage_flow *flow = status ? NULL : kvf_stage_flow_new(stage, peer, message->flow, false);
    if (!flow) {
        status = status ? status : kvf_nomem("a flow");
        kvf_stage_blame(stage, peer->name, status);
        kvf_stage_flow_deny(peer, message->flow, true, status);
        return NULL;
    }
    (void)keep(flow, sizeof *flow); /* there is room: see above */
    status = check_opening(flow, message->opening_bytes);
    if (status)
        kvf_stage_flow_blame(flow, status);
    else if (!(flow->opening = kvf_alloc(message->opening_bytes, 1)))
        kvf_stage_flow_end(flow, kvf_nomem("the opening of a flow"));
    else
        peer->incoming = flow;
    return flow;
}

/* The flow of a part; the first part makes it. */
static kvf_stage_flow *flow_of_part(kvf_stage *stage, kvf_stage_peer *peer,
                                    const kvf_stage_message *message) {
    kvf_stage_flow *flow = kvf_stage_flow_find(stage, peer, message->flow, false);
    unsigned long long id = message->flow;
    if (message->at > 0) {
        if (!flow)
            kvf_stage_blame(
                stage, peer->name,
                kvf_fail(KVF_E_NOT_FOUND, "flow %llu: a part of an opening came without the first part", id));
        return flow;
    }
    if (flow) {
        kvf_stage_blame(stage, peer->name,
                        kvf_fail(KVF_E_EXISTS, "flow %llu: it was opened a second time", id));
        return NULL;
    }
    if (peer->incoming)
        kvf_stage_flow_blame(peer->incoming,
                             kvf_fail(KVF_E_PARSE, "another opening came after %u bytes of this one",
                                      peer->incoming->opening_at));
    return begin(stage, peer, message);
}

void kvf_lender_hear_open(kvf_stage *stage, kvf_stage_peer *peer, const kvf_stage_message *message) {
    kvf_stage_flow *flow = flow_of_part(stage, peer, message);
    if (!flow || flow->ended)
        return;
    if (!flow->opening || flow->whole || message->at != flow->opening_at ||
        message->opening_bytes != flow->opening_bytes) {
        kvf_stage_flow_blame(flow, kvf_fail(KVF_E_PARSE, "part %u of an opening of %u; expected %u of %u",
                                            message->at, message->opening_bytes, flow->opening_at,
                                            flow->opening_bytes));
        return;
    }
    flow->heard_ns = kvf_now(stage->clock);
    memcpy(flow->opening + message->at, message->part, message->part_bytes);
    flow->opening_at += (uint32_t)message->part_bytes;
    if (flow->opening_at < flow->opening_bytes)
        return;
    flow->peer->incoming = NULL;
    if (flow->opening_bytes <= READ_AT_ONCE)
        finish_opening(flow);
    else
        flow->whole = true;
}

static kvf_stage_flow *next_whole(kvf_stage_flow *flow) {
    while (flow && (!flow->whole || flow->ended))
        flow = flow->following;
    return flow;
}

bool kvf_lender_read_one(kvf_stage *stage) {
    kvf_stage_flow *flow = next_whole(stage->first);
    if (!flow)
        return false;
    const bool more = next_whole(flow->following) != NULL;
    flow->whole = false;
    finish_opening(flow);
    return more;
}

/* ---- lending --------------------------------------------------------------------------------- */

static uint32_t credits_in_use(const kvf_stage_flow *flow) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < KVF_WINDOW_MAX; i++)
        count += flow->credits[i].state != KVF_CREDIT_NONE;
    return count;
}

/* Slots are reserved for flows that have waited longer and whose peer has none, whatever their priority: otherwise a
 * peer that returns a slot and takes the next at once would keep it forever. */
static bool others_come_first(const kvf_stage_flow *flow) {
    const kvf_arena *arena = flow->arena;
    uint32_t left = kvf_arena_lendable(arena) - arena->lent;
    if (arena->waiting == 0)
        return false;
    for (const kvf_stage_flow *other = flow->stage->first; other && left > 0; other = other->following) {
        const bool before = kvf_lender_waits(other) && other->arena == arena && other->peer != flow->peer &&
                            (flow->waits_ns == 0 || other->waits_ns < flow->waits_ns);
        left -= before;
    }
    return left == 0;
}

/* The peer has a slot: all its flows begin to wait anew. */
static void end_waiting(const kvf_stage_flow *flow) {
    for (kvf_stage_flow *other = flow->arena->waiting > 0 ? flow->stage->first : NULL; other;
         other = other->following)
        if (other->share == flow->share)
            other->waits_ns = 0;
}

/* Takes a slot for the peer, in a free credit. */
static kvf_credit *take_slot(kvf_stage_flow *flow) {
    const uint32_t used = credits_in_use(flow);
    if (used >= flow->window)
        return NULL;
    kvf_slot *slot = others_come_first(flow) ? NULL : kvf_arena_lend(flow->arena, flow->share);
    if (!slot && flow->share->lent == 0 && flow->waits_ns == 0) {
        flow->waits_ns = kvf_max_u64(kvf_now(flow->stage->clock), 1);
        flow->arena->waiting++;
    }
    if (!slot)
        return NULL;
    end_waiting(flow);
    if (used == 0)
        flow->kept_ns = kvf_now(flow->stage->clock);
    kvf_credit *credit = kvf_stage_flow_credit(flow, KVF_CREDIT_NONE);
    credit->own = slot;
    credit->note = (kvf_slot_note){slot->number, slot->generation, {0, 0}};
    credit->state = KVF_CREDIT_TO_LEND;
    return credit;
}

/* Pull: gathers the next bytes into a slot. */
static bool lend_full(kvf_stage_flow *flow) {
    kvf_credit *credit = flow->next < flow->bytes ? take_slot(flow) : NULL;
    if (!credit)
        return false;
    uint64_t length = kvf_stream_cut(flow->stream, flow->next, flow->slot_bytes);
    credit->note.bytes = (kvf_byte_range){flow->next, flow->next + length};
    flow->next += length;
    if (kvf_stage_flow_gather(credit))
        kvf_lender_copied(credit);
    return true;
}

/* Push: lends an empty slot, if the rest of the stream needs more than are lent. */
static bool lend_empty(kvf_stage_flow *flow) {
    uint64_t lent = 0;
    for (uint32_t i = 0; i < KVF_WINDOW_MAX; i++)
        lent += flow->credits[i].state == KVF_CREDIT_LENT || flow->credits[i].state == KVF_CREDIT_TO_LEND;
    return lent * flow->slot_bytes < flow->bytes - flow->next && take_slot(flow);
}

/* Push: scatters a slot that came back full. */
static bool take_in(kvf_stage_flow *flow) {
    kvf_credit *credit = kvf_stage_flow_credit(flow, KVF_CREDIT_BACK);
    if (!credit)
        return false;
    if (kvf_stage_flow_scatter(credit))
        kvf_lender_copied(credit);
    return true;
}

bool kvf_lender_waits(const kvf_stage_flow *flow) {
    return flow->waits_ns > 0 && !flow->ended && flow->share->lent == 0;
}

bool kvf_lender_awaits_slots(const kvf_stage_flow *flow) {
    return kvf_stage_flow_has(flow, KVF_CREDIT_LENT) || kvf_stage_flow_has(flow, KVF_CREDIT_TO_LEND);
}

bool kvf_lender_keeps(const kvf_stage_flow *flow, uint64_t before_ns) {
    return !flow->mover && flow->kept_ns < before_ns && kvf_lender_awaits_slots(flow);
}

void kvf_lender_copied(kvf_credit *credit) {
    if (credit->flow->direction == KVF_READ)
        credit->state = KVF_CREDIT_TO_LEND;
    else
        kvf_credit_done(credit, KVF_CREDIT_NONE);
}

bool kvf_lender_step(kvf_stage_flow *flow) {
    if (flow->ended || !flow->open)
        return false;
    if (flow->direction == KVF_READ)
        return lend_full(flow);
    bool did = false;
    while (lend_empty(flow))
        did = true;
    return take_in(flow) || did;
}

void kvf_lender_talk(kvf_stage_flow *flow) {
    if (flow->open && !flow->ended && !flow->accepted) {
        const kvf_stage *stage = flow->stage;
        kvf_stage_message message = {.word = KVF_STAGE_ACCEPT,
                                     .region = flow->arena->region,
                                     .slot_bytes = flow->arena->slot_bytes,
                                     .slot_count = flow->arena->slot_count,
                                     .stream_bytes = flow->bytes,
                                     .flows = stage->options.flows};
        flow->accepted = kvf_stage_flow_say(flow, &message);
    }
    if (flow->accepted && !flow->ended)
        kvf_stage_flow_say_slots(flow, KVF_STAGE_LEND, KVF_CREDIT_TO_LEND, KVF_CREDIT_LENT);
    kvf_stage_flow_say_end(flow);
}

/* ---- hearing --------------------------------------------------------------------------------- */

static kvf_status find_lent(kvf_stage_flow *flow, const kvf_slot_note *note, kvf_credit **out) {
    for (uint32_t i = 0; i < KVF_WINDOW_MAX; i++) {
        kvf_credit *credit = &flow->credits[i];
        if (credit->state != KVF_CREDIT_LENT || credit->note.slot != note->slot)
            continue;
        *out = credit;
        return credit->note.generation == note->generation
                   ? KVF_OK
                   : kvf_fail(KVF_E_INVALID,
                              "the mover returned slot %u of generation %u, but the slot is at generation %u",
                              note->slot, note->generation, credit->note.generation);
    }
    return kvf_fail(KVF_E_INVALID, "the mover returned slot %u of generation %u, which it does not have",
                    note->slot, note->generation);
}

/* Pull: the mover has read the slot. */
static kvf_status come_back_empty(kvf_credit *credit, const kvf_slot_note *note) {
    if (note->bytes.end > 0)
        return kvf_fail(KVF_E_INVALID, "the mover returned slot %u of a pull with bytes", note->slot);
    kvf_credit_done(credit, KVF_CREDIT_NONE);
    return KVF_OK;
}

static kvf_status come_back_full(kvf_stage_flow *flow, kvf_credit *credit, const kvf_slot_note *note) {
    kvf_status status = kvf_stage_flow_check_bytes(flow, note->bytes, flow->arena->slot_bytes);
    if (status)
        return status;
    credit->note.bytes = note->bytes;
    credit->state = KVF_CREDIT_BACK;
    flow->next = note->bytes.end;
    return KVF_OK;
}

static void hear_return(kvf_stage_flow *flow, const kvf_slot_note *note) {
    kvf_credit *credit = NULL;
    kvf_status status = find_lent(flow, note, &credit);
    if (!status)
        flow->kept_ns = flow->heard_ns;
    if (!status && flow->ended)
        kvf_credit_give(credit, KVF_CREDIT_NONE);
    else if (!status)
        status =
            flow->direction == KVF_READ ? come_back_empty(credit, note) : come_back_full(flow, credit, note);
    if (status && !flow->ended)
        kvf_stage_flow_blame(flow, status);
}

/* The mover has forgotten the flow: it left us meanwhile, and what it had under way then may still arrive. */
static bool leaves_doubt(const kvf_stage_flow *flow, const kvf_stage_message *message) {
    return flow->ended && message->status == KVF_E_NOT_FOUND && kvf_stage_flow_has(flow, KVF_CREDIT_LENT);
}

static void hear_end(kvf_stage_flow *flow, const kvf_stage_message *message) {
    if (flow->doubt_ends && flow->heard_ns >= flow->doubt_ends)
        return; /* the mover is being shut out, and must be let in again when it is */
    if (leaves_doubt(flow, message)) {
        const kvf_stage *stage = flow->stage;
        flow->forgotten = true;
        flow->doubt_ends = flow->doubt_ends ? flow->doubt_ends : flow->heard_ns + stage->options.doubt_ns;
        return;
    }
    unsigned long long bytes = flow->bytes, got = flow->direction == KVF_READ ? flow->told : flow->done;
    if (!flow->ended && message->status)
        kvf_stage_flow_end(flow, kvf_fail(message->status, "%s: %s", flow->peer->name, message->sentence));
    else if (!flow->ended && flow->open && flow->direction == KVF_READ && got == bytes)
        kvf_stage_flow_end(flow, KVF_OK); /* this also returns the last slots */
    else if (!flow->ended)
        kvf_stage_flow_blame(
            flow, kvf_fail(KVF_E_INVALID,
                           "the mover ended the flow without an error after %llu of %llu bytes", got, bytes));
    kvf_stage_flow_hear_end(flow);
}

void kvf_lender_hear(kvf_stage_flow *flow, const kvf_stage_message *message) {
    if (flow->card)
        return; /* it is of a process that another has replaced, which cannot speak for it */
    flow->heard_ns = kvf_now(flow->stage->clock);
    if (message->word == KVF_STAGE_END)
        hear_end(flow, message);
    else
        for (uint32_t i = 0; i < message->slot_count_named; i++)
            hear_return(flow, &message->slots[i]);
}
