/*
 * The mover: it opens a flow, and its operations move the bytes. It is the reader of a pull and the holder of a push.
 */
#include "stage/flow.h"

#include "transport/transport.h"

/* ---- opening --------------------------------------------------------------------------------- */

static kvf_status write_opening(kvf_stage_flow *flow, const kvf_group_steps *theirs, uint32_t group_count) {
    const kvf_stage *stage = flow->stage;
    kvf_opening opening = {.direction = flow->direction,
                           .on_device = flow->theirs_on_device,
                           .priority = flow->priority,
                           .window = flow->window,
                           .slot_bytes = flow->arena->slot_bytes,
                           .stream_bytes = flow->bytes,
                           .model = stage->model,
                           .permission = flow->permission,
                           .items = flow->shape->selection->items,
                           .item_count = flow->shape->selection->item_count,
                           .groups = theirs,
                           .group_count = group_count};
    size_t bytes = 0;
    kvf_status status = kvf_stage_write_opening(&opening, &flow->opening, &bytes);
    flow->opening_bytes = (uint32_t)bytes;
    return status;
}

kvf_status kvf_mover_begin(kvf_stage *stage, kvf_stage_peer *peer, const kvf_flow_wish *wish,
                           kvf_stage_flow **out) {
    kvf_stage_flow *flow = kvf_stage_flow_new(stage, peer, stage->last_flow + 1, true);
    if (!flow) {
        kvf_shapes_leave(wish->shape);
        return kvf_nomem("a flow");
    }
    stage->last_flow++;
    flow->direction = wish->direction;
    flow->priority = wish->priority;
    flow->permission = wish->permission;
    flow->held = wish->held;
    flow->window = stage->options.window;
    flow->shape = wish->shape;
    flow->theirs_on_device = wish->arenas.theirs == KVF_MEMORY_CUDA;
    kvf_stage_flow_use_arena(flow, wish->arenas.ours);
    kvf_status status = kvf_stream_create(flow->shape->map, wish->ours, wish->group_count, &flow->stream);
    if (!status) {
        flow->bytes = kvf_stream_bytes(flow->stream);
        status = write_opening(flow, wish->theirs, wish->group_count);
    }
    if (status) {
        kvf_stage_flow_end(flow, status);
        kvf_stage_flow_free(flow);
        return status;
    }
    flow->owned = true;
    kvf_stage_flow_line_up(flow);
    *out = flow;
    return KVF_OK;
}

/* A peer is sent one opening at a time, and no more flows than both sides allow. */
static bool may_open(kvf_stage_flow *flow) {
    kvf_stage_peer *peer = flow->peer;
    if (flow->began_ns > 0)
        return peer->outgoing == flow;
    if (peer->outgoing || peer->flows[1] >= peer->flows_most)
        return false;
    peer->outgoing = flow;
    kvf_stage_flow_count(flow);
    flow->began_ns = flow->heard_ns = kvf_now(flow->stage->clock);
    return true;
}

static void say_open(kvf_stage_flow *flow) {
    while (flow->opening && may_open(flow)) {
        kvf_stage_message message = {.word = KVF_STAGE_OPEN,
                                     .opening_bytes = flow->opening_bytes,
                                     .at = flow->opening_at,
                                     .part = flow->opening + flow->opening_at};
        message.part_bytes = kvf_min_u64(flow->opening_bytes - flow->opening_at, kvf_stage_part_max());
        if (!kvf_stage_flow_say(flow, &message))
            return;
        flow->opening_at += (uint32_t)message.part_bytes;
        if (flow->opening_at == flow->opening_bytes) {
            kvf_free(flow->opening);
            flow->opening = NULL;
            flow->peer->outgoing = NULL;
        }
    }
}

/* ---- moving ---------------------------------------------------------------------------------- */

static void on_done(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation;
    kvf_credit *credit = context;
    kvf_stage_flow *flow = credit->flow;
    kvf_stage *stage = flow->stage;
    flow->moving--;
    stage->moving--;
    flow->operations += !status;
    flow->heard_ns = kvf_now(stage->clock);
    if (status || flow->ended)
        kvf_credit_give(credit, KVF_CREDIT_NONE);
    else if (flow->direction == KVF_WRITE)
        kvf_credit_give(credit, KVF_CREDIT_TO_RETURN);
    else
        credit->state = KVF_CREDIT_MOVED;
    if (status && !flow->ended)
        kvf_stage_flow_end(flow, kvf_fail(status, "%s", detail));
    if (stage->closed)
        kvf_stage_release(stage);
}

/* Between the lender's slot and one of ours, in one operation. */
static bool submit(kvf_stage_flow *flow, kvf_credit *credit) {
    kvf_stage *stage = flow->stage;
    credit->run = (kvf_run){.local_offset = kvf_slot_offset(flow->arena, credit->own->number),
                            .remote_offset = (uint64_t)credit->note.slot * flow->slot_bytes,
                            .bytes = credit->note.bytes.end - credit->note.bytes.begin,
                            .local_region = flow->arena->region,
                            .remote_region = flow->region};
    kvf_status status = kvf_transport_submit(flow->peer->peer, flow->direction, &credit->run, 1, on_done,
                                             credit, &credit->operation);
    if (status) {
        kvf_stage_flow_end(flow, status);
        return false;
    }
    credit->state = KVF_CREDIT_MOVING;
    flow->moving++;
    stage->moving++;
    return true;
}

/* How many bytes a lent slot will move: those in it (pull), or our next ones from `next` on (push). */
static uint64_t bytes_of_slot(const kvf_stage_flow *flow, const kvf_credit *credit, uint64_t next) {
    if (flow->direction == KVF_READ)
        return credit->note.bytes.end - credit->note.bytes.begin;
    return kvf_stream_cut(flow->stream, next, kvf_min_u64(flow->arena->slot_bytes, flow->slot_bytes));
}

uint64_t kvf_mover_allow(kvf_stage_flow *flow, uint64_t bytes) {
    uint64_t wanted = 0, next = flow->next;
    for (uint32_t i = 0; i < KVF_WINDOW_MAX && !flow->ended && flow->open; i++) {
        const kvf_credit *credit = &flow->credits[i];
        if (credit->state != KVF_CREDIT_HERE || (flow->direction == KVF_WRITE && next == flow->bytes))
            continue;
        uint64_t length = bytes_of_slot(flow, credit, next);
        wanted += length;
        next += length;
    }
    uint64_t given = wanted > flow->allowed ? kvf_min_u64(wanted - flow->allowed, bytes) : 0;
    flow->allowed += given;
    if (given > 0) /* it moves as fast as it may, though a slot may take long */
        flow->heard_ns = kvf_now(flow->stage->clock);
    return given;
}

/* Whether a slot may move now. */
static bool may_move(const kvf_stage_flow *flow, uint64_t bytes) {
    return !flow->held || flow->allowed >= bytes;
}

static void use_up(kvf_stage_flow *flow, uint64_t bytes) {
    flow->allowed -= flow->held ? bytes : 0;
}

/*
 * If the lender's arena is mapped into our address space, bytes are copied directly between its slot and the shard,
 * without a slot of ours. False: it is not mapped, or not now; then an operation moves the slot, or reports why it
 * cannot.
 */
static bool move_in_place(kvf_stage_flow *flow, kvf_credit *credit, uint64_t length) {
    kvf_peer *peer = flow->peer->peer;
    unsigned char *arena = flow->stage->device ? NULL : kvf_peer_enter(peer, flow->region, flow->direction);
    if (!arena)
        return false;
    use_up(flow, length);
    const bool read = flow->direction == KVF_READ;
    const kvf_job job = {.stream = flow->stream,
                         .bases = kvf_transport_bases(flow->stage->transport),
                         .bytes = credit->note.bytes,
                         .slot = arena + (uint64_t)credit->note.slot * flow->slot_bytes,
                         .gathers = !read};
    kvf_status status = kvf_stage_check_memory(flow->stage);
    if (!status)
        kvf_job_do(&job);
    kvf_status left = kvf_peer_leave(peer, flow->direction, length);
    status = status ? status : left;
    credit->state = KVF_CREDIT_TO_RETURN;
    flow->operations += !status;
    flow->heard_ns = kvf_now(flow->stage->clock);
    if (read)
        flow->done += length;
    if (status || (read && flow->done == flow->bytes))
        kvf_stage_flow_end(flow, status);
    return true;
}

/* Pull: in place, one slot a step, because that is a copy; otherwise, reads begin as long as slots of ours are free. */
static bool read_slots(kvf_stage_flow *flow) {
    bool did = false;
    kvf_credit *credit;
    while (!flow->ended && (credit = kvf_stage_flow_credit(flow, KVF_CREDIT_HERE))) {
        uint64_t length = bytes_of_slot(flow, credit, 0);
        if (!may_move(flow, length))
            break;
        if (move_in_place(flow, credit, length))
            return true;
        credit->own = kvf_arena_take(flow->arena, flow->share);
        if (!credit->own)
            break;
        use_up(flow, length);
        did = submit(flow, credit) || did;
    }
    return did;
}

static bool scatter_slot(kvf_stage_flow *flow) {
    kvf_credit *credit = kvf_stage_flow_credit(flow, KVF_CREDIT_MOVED);
    if (!credit)
        return false;
    if (kvf_stage_flow_scatter(credit))
        kvf_mover_copied(credit);
    return true;
}

/* Push: the next bytes, into one of the lender's slots. */
static bool write_slot(kvf_stage_flow *flow) {
    kvf_credit *credit = flow->next < flow->bytes ? kvf_stage_flow_credit(flow, KVF_CREDIT_HERE) : NULL;
    const uint64_t length = credit ? bytes_of_slot(flow, credit, flow->next) : 0;
    if (!credit || !may_move(flow, length))
        return false;
    credit->note.bytes = (kvf_byte_range){flow->next, flow->next + length};
    if (move_in_place(flow, credit, length)) {
        flow->next += length;
        return true;
    }
    credit->own = kvf_arena_take(flow->arena, flow->share);
    if (!credit->own)
        return false;
    use_up(flow, length);
    flow->next += length;
    if (kvf_stage_flow_gather(credit))
        kvf_mover_copied(credit);
    return true;
}

void kvf_mover_copied(kvf_credit *credit) {
    if (credit->flow->direction == KVF_WRITE)
        (void)submit(credit->flow, credit);
    else
        kvf_credit_done(credit, KVF_CREDIT_TO_RETURN);
}

bool kvf_mover_step(kvf_stage_flow *flow) {
    if (flow->ended || !flow->open)
        return false;
    if (flow->direction == KVF_WRITE)
        return write_slot(flow);
    bool did = read_slots(flow);
    return (!flow->ended && scatter_slot(flow)) || did;
}

void kvf_mover_talk(kvf_stage_flow *flow) {
    if (!flow->ended)
        say_open(flow);
    if (!flow->ended)
        kvf_stage_flow_say_slots(flow, KVF_STAGE_RETURN, KVF_CREDIT_TO_RETURN, KVF_CREDIT_NONE);
    kvf_stage_flow_say_end(flow);
}

/* ---- hearing --------------------------------------------------------------------------------- */

static kvf_status hear_accept(kvf_stage_flow *flow, const kvf_stage_message *message) {
    uint32_t count;
    const uint64_t *regions = kvf_peer_region_bytes(flow->peer->peer, &count);
    uint64_t there = message->region < count ? regions[message->region] : 0;
    if (flow->open || flow->opening)
        return kvf_fail(KVF_E_INVALID, "the lender accepted a flow that it %s",
                        flow->open ? "had accepted already" : "cannot know yet");
    if (message->slot_bytes == 0 || message->slot_count == 0 ||
        (uint64_t)message->slot_bytes * message->slot_count > there)
        return kvf_fail(KVF_E_RANGE,
                        "the lender's arena has %u slots of %u bytes in region %u, which has %llu bytes",
                        message->slot_count, message->slot_bytes, message->region, (unsigned long long)there);
    if (message->stream_bytes != flow->bytes)
        return kvf_fail(KVF_E_MISMATCH, "the lender's stream has %llu bytes, the mover's %llu",
                        (unsigned long long)message->stream_bytes, (unsigned long long)flow->bytes);
    if (flow->direction == KVF_WRITE && message->slot_bytes < kvf_stream_element(flow->stream))
        return kvf_fail(KVF_E_RANGE, "the lender's slots have %u bytes, less than an element",
                        message->slot_bytes);
    if (message->flows == 0)
        return kvf_fail(KVF_E_RANGE, "the lender accepts 0 flows; allowed: 1 and more");
    const uint32_t most = flow->stage->options.flows;
    flow->peer->flows_most = message->flows < most ? message->flows : most;
    flow->region = message->region;
    flow->slot_bytes = message->slot_bytes;
    flow->slot_count = message->slot_count;
    flow->open = true;
    return KVF_OK;
}

static kvf_status check_lent(const kvf_stage_flow *flow, const kvf_slot_note *note) {
    uint32_t have = 0;
    if (!flow->open || note->slot >= flow->slot_count)
        return kvf_fail(KVF_E_RANGE, "the lender lends slot %u; its arena has %u slots", note->slot,
                        flow->open ? flow->slot_count : 0);
    for (uint32_t i = 0; i < KVF_WINDOW_MAX; i++) {
        const kvf_credit *credit = &flow->credits[i];
        have += credit->state != KVF_CREDIT_NONE;
        if (credit->state != KVF_CREDIT_NONE && credit->note.slot == note->slot)
            return kvf_fail(KVF_E_INVALID, "the lender lends slot %u a second time", note->slot);
    }
    if (have >= flow->window)
        return kvf_fail(KVF_E_LIMIT, "the lender lends more than %u slots at once", flow->window);
    if (flow->direction == KVF_WRITE)
        return note->bytes.end == 0
                   ? KVF_OK
                   : kvf_fail(KVF_E_INVALID, "the lender lends slot %u of a push with bytes", note->slot);
    return kvf_stage_flow_check_bytes(flow, note->bytes,
                                      kvf_min_u64(flow->slot_bytes, flow->arena->slot_bytes));
}

static kvf_status hear_lent(kvf_stage_flow *flow, const kvf_slot_note *note) {
    kvf_status status = check_lent(flow, note);
    if (status)
        return status;
    kvf_credit *credit = kvf_stage_flow_credit(flow, KVF_CREDIT_NONE);
    credit->note = *note;
    credit->state = KVF_CREDIT_HERE;
    if (flow->direction == KVF_READ)
        flow->next = note->bytes.end;
    return KVF_OK;
}

static void hear_end(kvf_stage_flow *flow, const kvf_stage_message *message) {
    if (!flow->ended && message->status)
        kvf_stage_flow_end(flow, kvf_fail(message->status, "%s: %s", flow->peer->name, message->sentence));
    else if (!flow->ended && flow->direction == KVF_WRITE && flow->told == flow->bytes)
        kvf_stage_flow_end(flow, KVF_OK);
    else if (!flow->ended)
        kvf_stage_flow_blame(
            flow, kvf_fail(KVF_E_INVALID,
                           "the lender ended the flow without an error before all %llu bytes had moved",
                           (unsigned long long)flow->bytes));
    kvf_stage_flow_hear_end(flow);
}

void kvf_mover_hear(kvf_stage_flow *flow, const kvf_stage_message *message) {
    kvf_status status = KVF_OK;
    flow->heard_ns = kvf_now(flow->stage->clock);
    if (message->word == KVF_STAGE_END) {
        hear_end(flow, message);
        return;
    }
    if (flow->ended)
        return; /* the peer sent it before it heard of the end */
    if (message->word == KVF_STAGE_ACCEPT)
        status = hear_accept(flow, message);
    else
        for (uint32_t i = 0; i < message->slot_count_named && !status; i++)
            status = hear_lent(flow, &message->slots[i]);
    if (status)
        kvf_stage_flow_blame(flow, status);
}
