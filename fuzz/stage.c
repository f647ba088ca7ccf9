/*
 * A stage with a peer that sends anything between the user's calls: random bytes, nearly right messages, slots that it
 * was lent and others, in any order, while time passes and our own moves are under way. Whatever comes, every slot is
 * free when the peer is gone.
 */
#include "fuzz.h"

#include "stage/flow.h"

#define SLOT 4096u
#define MOVES 4u
#define TOKENS 24u

/* The rest of the input; zeros after its end. */
typedef struct input {
    const uint8_t *at;
    size_t left;
} input;

static uint32_t take(input *from) {
    uint32_t byte = from->left > 0 ? *from->at : 0;
    from->at += from->left > 0;
    from->left -= from->left > 0;
    return byte;
}

/* Made once, for both sides. */
static kvf_model *model;
static kvf_engine *engine;
static kvf_plan *plan;
static kvf_request *request;
static const uint32_t ids[] = {5, 2, 7};
static uint64_t now_ns;

static uint64_t now_of(void *context) {
    (void)context;
    return now_ns;
}

static const kvf_clock stopped = {now_of, NULL};

static void make_engine(void) {
    const kvf_part_desc parts[] = {
        {.name = "k", .dtype = KVF_DTYPE_BF16, .units = 2, .cell_elements = 64},
        {.name = "v", .dtype = KVF_DTYPE_BF16, .units = 2, .cell_elements = 64, .rows_per_step = 2}};
    const uint32_t layers[] = {0, 1};
    const kvf_group_desc group = {
        .name = "full", .layers = layers, .layer_count = 2, .parts = parts, .part_count = 2};
    const kvf_model_desc desc = {
        .struct_size = sizeof desc, .layer_count = 2, .groups = &group, .group_count = 1};
    const kvf_engine_spec spec = {.struct_size = sizeof spec,
                                  .all = {.tokens_per_block = 8, .block_count = 9, .order = "LPBNH"}};
    const kvf_group_request steps = {{ids, 3, 0}, {ids, 3, 0}, 0, TOKENS};
    FUZZ_MUST(kvf_model_create(&desc, &model) == KVF_OK);
    FUZZ_MUST(kvf_engine_build(model, &spec, &engine) == KVF_OK);
    FUZZ_MUST(kvf_plan_build(kvf_engine_shard(engine, 0), engine, NULL, &plan) == KVF_OK);
    FUZZ_MUST(kvf_request_create(plan, &request) == KVF_OK);
    FUZZ_MUST(kvf_request_set(request, &steps, 1) == KVF_OK);
}

/* Our transport with its stage, and the peer's transport, which has none. */
typedef struct scene {
    kvf_transport *ours, *theirs;
    kvf_stage *stage;
    kvf_peer *peer;
    kvf_move *moves[MOVES];
} scene;

static void on_notify(void *context, kvf_transport *transport, const char *sender, const void *data,
                      size_t bytes) {
    kvf_stage_message message;
    (void)context;
    (void)transport;
    (void)sender;
    memset(&message, 0, sizeof message);
    FUZZ_MUST(kvf_stage_read_message(data, bytes, &message) == KVF_OK); /* our own messages are valid */
}

static void on_event(void *context, const char *peer, kvf_status status, const char *text) {
    (void)context;
    (void)peer;
    FUZZ_MUST(status != KVF_OK && text[0] != '\0');
}

static kvf_transport *open_transport(const char *name) {
    const kvf_transport_options options = {
        .struct_size = sizeof options, .name = name, .on_notify = on_notify};
    kvf_transport *transport = NULL;
    FUZZ_MUST(kvf_transport_open("inproc", &options, &transport) == KVF_OK);
    return transport;
}

static void add_region(kvf_transport *transport, uint32_t region, uint64_t bytes) {
    kvf_memory memory = {.struct_size = sizeof memory, .address = NULL, .bytes = bytes};
    FUZZ_MUST(kvf_transport_allocate(transport, KVF_MEMORY_HOST, 0, bytes, &memory.address) == KVF_OK);
    FUZZ_MUST(kvf_transport_register_region(transport, region, &memory) == KVF_OK);
}

static void connect_peer(scene *s) {
    const void *card;
    size_t bytes;
    FUZZ_MUST(kvf_transport_export(s->theirs, &card, &bytes) == KVF_OK);
    FUZZ_MUST(kvf_transport_connect(s->ours, card, bytes, &s->peer) == KVF_OK);
    FUZZ_MUST(kvf_stage_join(s->stage, s->peer) == KVF_OK);
}

static void open_scene(scene *s) {
    const kvf_stage_options options = {.struct_size = sizeof options,
                                       .assumed_costs = true, /* the same in every run */
                                       .arena_bytes = 8 * SLOT,
                                       .slot_bytes = SLOT,
                                       .window = 3,
                                       .flows = 4,
                                       .on_event = on_event};
    const kvf_shard_desc *shard = kvf_shard_get(kvf_engine_shard(engine, 0));
    *s = (scene){.ours = open_transport("ours"), .theirs = open_transport("theirs")};
    for (uint32_t i = 0; i < shard->region_count; i++)
        add_region(s->ours, i, shard->region_bytes[i]);
    add_region(s->theirs, 0, 8 * SLOT);
    FUZZ_MUST(kvf_stage_open_at(s->ours, kvf_engine_shard(engine, 0), &options, &stopped, &s->stage) ==
              KVF_OK);
    connect_peer(s);
}

/* ---- the peer's messages ----------------------------------------------------------------------- */

static void hear(const scene *s, const kvf_stage_message *message) {
    unsigned char data[KVF_STAGE_MESSAGE_MAX];
    size_t bytes = kvf_stage_write_message(message, data);
    FUZZ_MUST(kvf_stage_notice(s->stage, "theirs", data, bytes));
}

static void hear_bytes(const scene *s, input *from) {
    unsigned char data[5 + 255] = {'k', 'v', 'f', 's', KVF_STAGE_VERSION};
    size_t bytes = take(from);
    for (size_t i = 0; i < bytes; i++)
        data[5 + i] = (unsigned char)take(from);
    FUZZ_MUST(kvf_stage_notice(s->stage, "theirs", data, 5 + bytes));
}

/* The number of a flow, of the peer or of ours. */
static uint64_t take_flow(const scene *s, input *from) {
    uint32_t which = take(from);
    const kvf_stage_flow *flow = which & 0x80 ? s->stage->first : NULL;
    for (uint32_t i = 0; flow && flow->following && i < (which & 7); i++)
        flow = flow->following;
    return flow ? flow->id : which & 7;
}

/* An opening that is right except for one byte, in one part or two. */
static void hear_open(const scene *s, input *from) {
    kvf_selection *selection = NULL;
    unsigned char *data = NULL;
    size_t bytes = 0;
    FUZZ_MUST(kvf_selection_of_plan(plan, 0, &selection) == KVF_OK);
    const kvf_group_steps steps = {{ids, 3, 0}, 0, TOKENS};
    const kvf_opening opening = {.direction = take(from) & 1 ? KVF_WRITE : KVF_READ,
                                 .window = 1 + (take(from) & 3),
                                 .slot_bytes = SLOT,
                                 .stream_bytes = kvf_request_bytes(request, 0),
                                 .model = kvf_stage_model_sum(model),
                                 .items = selection->items,
                                 .item_count = selection->item_count,
                                 .groups = &steps,
                                 .group_count = 1};
    FUZZ_MUST(kvf_stage_write_opening(&opening, &data, &bytes) == KVF_OK);
    uint32_t at = take(from), by = take(from), cut = take(from);
    if (at < bytes)
        data[at] ^= (unsigned char)by;
    kvf_stage_message message = {.word = KVF_STAGE_OPEN, .flow = take(from) & 7, .part = data};
    message.opening_bytes = (uint32_t)bytes;
    message.part_bytes = cut > 0 && cut < bytes ? cut : bytes;
    hear(s, &message);
    if (message.part_bytes < bytes && (take(from) & 1)) {
        message.at = (uint32_t)message.part_bytes;
        message.part = data + message.at;
        message.part_bytes = bytes - message.at;
        hear(s, &message);
    }
    kvf_free(data);
    kvf_selection_free(selection);
}

/* The true slots of a flow, except for changes by the input. */
static void hear_slots(const scene *s, input *from, kvf_stage_word word) {
    kvf_stage_message message = {.word = word, .flow = take_flow(s, from)};
    const kvf_stage_flow *flow = s->stage->first;
    while (flow && flow->id != message.flow)
        flow = flow->following;
    message.slot_count_named = 1 + take(from) % KVF_STAGE_SLOTS_MAX;
    for (uint32_t i = 0; i < message.slot_count_named; i++) {
        uint32_t change = take(from);
        kvf_slot_note *note = &message.slots[i];
        if (flow)
            *note = flow->credits[change % KVF_WINDOW_MAX].note;
        if (flow && (change & 0x10))
            note->bytes = (kvf_byte_range){flow->next, kvf_min_u64(flow->next + SLOT, flow->bytes)};
        if (change & 0x20)
            note->bytes = (kvf_byte_range){0, 0};
        if (change & 0x40)
            note->slot = take(from) & 15;
        if (change & 0x80)
            note->bytes.end = note->bytes.begin + 2 * take(from);
    }
    hear(s, &message);
}

static void hear_accept(const scene *s, input *from) {
    kvf_stage_message message = {.word = KVF_STAGE_ACCEPT, .flow = take_flow(s, from)};
    message.slot_bytes = SLOT >> (take(from) & 3);
    message.slot_count = take(from) & 15;
    message.stream_bytes = kvf_request_bytes(request, 0);
    message.flows = message.slot_count;
    hear(s, &message);
}

static void hear_end(const scene *s, input *from) {
    kvf_stage_message message = {.word = KVF_STAGE_END, .flow = take_flow(s, from), .sentence = "enough"};
    message.by_lender = take(from) & 1;
    message.status = take(from) & 1 ? KVF_E_CANCELLED : KVF_OK;
    hear(s, &message);
}

/* ---- the user's calls -------------------------------------------------------------------------- */

static void work(const scene *s) {
    FUZZ_MUST(kvf_transport_progress(s->ours, NULL) == KVF_OK);
    FUZZ_MUST(kvf_stage_progress(s->stage, NULL) == KVF_OK);
    FUZZ_MUST(kvf_transport_progress(s->theirs, NULL) == KVF_OK);
}

static void begin_move(scene *s, input *from) {
    uint32_t how = take(from);
    kvf_move **move = &s->moves[how % MOVES];
    const kvf_move_options options = {
        .struct_size = sizeof options, .way = KVF_WAY_PACKED, .priority = how >> 3 & 3};
    kvf_move_free(*move);
    *move = NULL;
    kvf_status status = !s->peer  ? KVF_E_PEER_LOST
                        : how & 4 ? kvf_stage_pull(s->stage, request, &s->peer, &options, move)
                                  : kvf_stage_push(s->stage, request, 0, s->peer, &options, move);
    FUZZ_MUST(!s->peer || status == KVF_OK);
}

static void end_moves(scene *s) {
    for (uint32_t i = 0; i < MOVES; i++) {
        kvf_move_free(s->moves[i]);
        s->moves[i] = NULL;
    }
}

static void lose_peer(scene *s) {
    kvf_stage_leave(s->stage, s->peer);
    kvf_peer_close(s->peer);
    s->peer = NULL;
}

static void do_one(scene *s, input *from) {
    switch (take(from) % 12) {
    case 0:
        hear_bytes(s, from);
        break;
    case 1:
        hear_open(s, from);
        break;
    case 2:
        hear_slots(s, from, KVF_STAGE_RETURN);
        break;
    case 3:
        hear_slots(s, from, KVF_STAGE_LEND);
        break;
    case 4:
        hear_accept(s, from);
        break;
    case 5:
        hear_end(s, from);
        break;
    case 6:
        begin_move(s, from);
        break;
    case 7:
        kvf_move_cancel(s->moves[take(from) % MOVES]);
        break;
    case 8:
        now_ns += (uint64_t)(1 + take(from) % 40) * 1000000000u;
        break;
    case 9:
        kvf_stage_stop(s->stage, s->peer);
        break;
    case 10:
        if (s->peer)
            lose_peer(s);
        else
            connect_peer(s);
        break;
    default:
        work(s);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input from = {data, size};
    scene s;
    if (!model)
        make_engine();
    open_scene(&s);
    for (uint32_t i = 0; i < 200 && from.left > 0; i++)
        do_one(&s, &from);
    end_moves(&s);
    if (s.peer)
        lose_peer(&s);
    kvf_stage_quiet(s.stage, "theirs");
    work(&s);
    kvf_stage_info info = {.struct_size = sizeof info};
    FUZZ_MUST(kvf_stage_get_info(s.stage, &info) == KVF_OK);
    FUZZ_MUST(info.flows == 0 && info.slots_free == info.slots && info.slots_doubt == 0);
    kvf_stage_close(s.stage);
    kvf_transport_close(s.ours);
    kvf_transport_close(s.theirs);
    return 0;
}
