/*
 * Peers that break the rules of flows: each has one clear error and event, and harms nothing but its own flow. The
 * attacker speaks by hand-made notifications of an endpoint that has joined as any peer. KVF_TEST_FABRIC names the kind
 * of transport between the three, "inproc" by default.
 */
#include "stage_world.h"

#include <stdio.h>

#include "transport/transport.h"

#define SLOT 4096u

static const kvf_engine_spec d_spec = {.struct_size = sizeof d_spec,
                                       .tp_size = 1,
                                       .all = {.tokens_per_block = 8, .block_count = 100, .order = "L|BPNH"}},
                             p_spec = {
                                 .struct_size = sizeof p_spec,
                                 .tp_size = 1,
                                 .all = {.tokens_per_block = 16, .block_count = 100, .order = "L|BPHN"}};

/* The messages that the attacker received: the last of each kind, and how many. */
typedef struct attacker {
    kvf_transport *transport;
    kvf_peer *victim;
    kvf_stage_message last[6];
    uint32_t heard[6];
} attacker;

/* An honest pair with a request that the attacker's messages must not harm. The attacker claims to be a rank of D. */
typedef struct scene {
    stage_world *w;
    kvf_plan *plan;
    kvf_request *request;
    kvf_selection *selection;
    cell_rank before;
    stage_end *d, *p;
    stage_end *victim; /* the end that the attacker speaks to: P, but for the lender of a pull */
    attacker by;
} scene;

static void on_notify(void *context, kvf_transport *transport, const char *sender, const void *data,
                      size_t bytes) {
    attacker *by = context;
    (void)transport;
    (void)sender;
    kvf_stage_message message = {0};
    assert_ok(kvf_stage_read_message(data, bytes, &message));
    by->last[message.word] = message;
    by->heard[message.word]++;
}

static void work(scene *s) {
    for (int i = 0; i < 20; i++) {
        (void)stage_world_work(s->w);
        assert_ok(kvf_transport_progress(s->by.transport, NULL));
    }
}

static kvf_peer *connect_to(kvf_transport *from, kvf_transport *to) {
    const void *card;
    size_t bytes;
    kvf_peer *peer = NULL;
    assert_ok(kvf_transport_export(to, &card, &bytes));
    assert_ok(kvf_transport_connect(from, card, bytes, &peer));
    return peer;
}

static const char *fabric(void) {
    const char *kind = getenv("KVF_TEST_FABRIC");
    return kind ? kind : "inproc";
}

static scene scene_open_with(const uint32_t *convert) {
    const stage_pair shape = {
        attention(2, 2, 32),
        &d_spec,
        &p_spec,
        600,
        {.arena_bytes = 32 * SLOT, .slot_bytes = SLOT, .window = 4, .flows = 3, .convert = convert}};
    scene s = {.w = stage_world_open(fabric(), &shape)};
    s.plan = plan_of(&s.w->engines, 0);
    s.request = request_of(s.plan);
    set_sequences(s.request, &s.w->d_sequence, &s.w->p_sequence);
    assert_ok(kvf_selection_of_plan(s.plan, 0, &s.selection));
    s.d = &s.w->d[0];
    s.victim = s.p = &s.w->p[0];
    rank_copy(&s.before, &s.d->cells);
    return s;
}

static scene scene_open(void) {
    return scene_open_with(NULL);
}

/* Not part of scene_open(), since the attacker must not move in memory after it has joined. */
static void attacker_join(scene *s) {
    static unsigned char memory[1 << 16];
    const kvf_transport_options options = {
        .struct_size = sizeof options, .name = "mallory", .on_notify = on_notify, .context = &s->by};
    const kvf_memory region = {.struct_size = sizeof region, .address = memory, .bytes = sizeof memory};
    assert_ok(kvf_transport_open(fabric(), &options, &s->by.transport));
    assert_ok(kvf_transport_register(s->by.transport, &region, 1));
    s->by.victim = connect_to(s->by.transport, s->victim->transport);
    assert_ok(kvf_stage_join(s->victim->stage, connect_to(s->victim->transport, s->by.transport)));
}

static void scene_close(scene *s) {
    rank_close(&s->before);
    kvf_selection_free(s->selection);
    kvf_request_free(s->request);
    kvf_plan_free(s->plan);
    stage_world_close(s->w);
    kvf_transport_close(s->by.transport);
}

/* ---- what the attacker sends -------------------------------------------------------------------- */

static void say(const scene *s, const kvf_stage_message *message) {
    unsigned char data[KVF_STAGE_MESSAGE_MAX];
    size_t bytes = kvf_stage_write_message(message, data);
    assert_ok(kvf_transport_notify(s->by.victim, data, bytes));
}

/* A valid opening of the honest request, which the tests change. */
static kvf_opening opening_of(const scene *s, kvf_direction direction, kvf_group_steps *steps) {
    *steps = (kvf_group_steps){s->w->p_sequence.tables[0], 0, s->w->p_sequence.steps[0]};
    return (kvf_opening){.direction = direction,
                         .window = 4,
                         .slot_bytes = SLOT,
                         .stream_bytes = kvf_request_bytes(s->request, 0),
                         .model = kvf_stage_model_sum(s->w->engines.model),
                         .items = s->selection->items,
                         .item_count = s->selection->item_count,
                         .groups = steps,
                         .group_count = 1};
}

static void open_flow(scene *s, uint64_t flow, const kvf_opening *opening) {
    kvf_stage_message message = {.word = KVF_STAGE_OPEN, .flow = flow};
    unsigned char *data;
    size_t bytes;
    assert_ok(kvf_stage_write_opening(opening, &data, &bytes));
    assert_true(bytes <= kvf_stage_part_max());
    message.part = data;
    message.part_bytes = message.opening_bytes = (uint32_t)bytes;
    say(s, &message);
    kvf_free(data);
    work(s);
}

static void open_well(scene *s, uint64_t flow, kvf_direction direction) {
    kvf_group_steps steps;
    const kvf_opening opening = opening_of(s, direction, &steps);
    const uint32_t accepted = s->by.heard[KVF_STAGE_ACCEPT];
    open_flow(s, flow, &opening);
    assert_int_equal(s->by.heard[KVF_STAGE_ACCEPT], accepted + 1);
    assert_true(s->by.heard[KVF_STAGE_LEND] > 0);
}

static void end_flow(scene *s, uint64_t flow, kvf_status status) {
    const kvf_stage_message message = {
        .word = KVF_STAGE_END, .flow = flow, .status = status, .sentence = "enough"};
    say(s, &message);
    work(s);
}

static void give_back(scene *s, uint64_t flow, kvf_slot_note note) {
    kvf_stage_message message = {
        .word = KVF_STAGE_RETURN, .flow = flow, .slot_count_named = 1, .slots = {note}};
    say(s, &message);
    work(s);
}

/* The last event has this status and these words; if `end` is set, the attacker was told the same. */
static void assert_event(scene *s, uint32_t events, kvf_status status, const char *words, bool end) {
    assert_int_equal(s->victim->events, events);
    assert_int_equal(s->victim->event, status);
    if (!strstr(s->victim->event_text, words))
        fail_msg("\"%s\" is not in \"%s\"", words, s->victim->event_text);
    if (end) {
        assert_int_equal(s->by.last[KVF_STAGE_END].status, status);
        assert_non_null(strstr(s->by.last[KVF_STAGE_END].sentence, words));
    }
}

/* Whatever the attacker did, an honest request still succeeds in both directions. */
static void assert_unharmed(scene *s) {
    const kvf_move_options options = {.struct_size = sizeof options, .way = KVF_WAY_PACKED};
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++) {
        kvf_move *move;
        if (direction == KVF_READ)
            assert_ok(kvf_stage_pull(s->d->stage, s->request, s->d->peers, &options, &move));
        else
            assert_ok(kvf_stage_push(s->p->stage, s->request, 0, s->p->peers[0], &options, &move));
        assert_ok(stage_world_finish(s->w, move));
        kvf_move_free(move);
        assert_int_equal(stage_world_wrong_bytes(s->d, &s->before, 5), 0);
    }
    work(s);
    assert_int_equal((s->victim == s->p ? s->d : s->p)->events, 0);
    assert_stage_idle(s->d->stage);
}

/* ---- slots ----------------------------------------------------------------------------------- */

static void slots_it_was_not_given(void **state) {
    (void)state;
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++) {
        scene s = scene_open();
        attacker_join(&s);
        open_well(&s, 7, (kvf_direction)direction);
        give_back(&s, 7, (kvf_slot_note){31, 1, {0, 0}});
        assert_event(&s, 1, KVF_E_INVALID,
                     "the mover returned slot 31 of generation 1, which it does not have", true);
        assert_int_equal(stage_info_of(s.p->stage).slots_doubt, 4); /* it may touch what it was lent */
        assert_unharmed(&s);
        end_flow(&s, 7, KVF_OK);
        assert_stage_idle(s.p->stage);
        scene_close(&s);
    }
}

static void note_done(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation;
    (void)detail;
    *(kvf_status *)context = status;
}

/* The slots lent to the attacker are not lent to others, so it may write as late as it likes. */
static void a_slot_that_is_written_late(void **state) {
    (void)state;
    scene s = scene_open();
    attacker_join(&s);
    open_well(&s, 7, KVF_WRITE);
    const kvf_slot_note note = s.by.last[KVF_STAGE_LEND].slots[0];
    const kvf_stage_info info = stage_info_of(s.p->stage);
    const kvf_stage_peer *peer = s.p->stage->peers;
    while (strcmp(peer->name, "mallory") != 0)
        peer = peer->following;
    kvf_stage_stop(s.p->stage, peer->peer);
    work(&s);
    assert_int_equal(stage_info_of(s.p->stage).slots_doubt, 4);
    const kvf_run run = {.local_region = 0,
                         .remote_region = info.region,
                         .remote_offset = (uint64_t)note.slot * SLOT,
                         .bytes = SLOT};
    kvf_status written = KVF_IN_PROGRESS;
    kvf_operation operation;
    assert_ok(kvf_transport_submit(s.by.victim, KVF_WRITE, &run, 1, note_done, &written, &operation));
    work(&s);
    assert_ok(written);
    give_back(&s, 7, (kvf_slot_note){note.slot, note.generation, {0, SLOT}}); /* and tells P */
    assert_int_equal(stage_info_of(s.p->stage).slots_doubt, 3);
    assert_unharmed(&s); /* D has the cells of P, and nothing from the attacker's slot */
    assert_int_equal(s.p->events, 0);
    end_flow(&s, 7, KVF_OK);
    assert_stage_idle(s.p->stage);
    scene_close(&s);
}

static void an_older_generation(void **state) {
    (void)state;
    scene s = scene_open();
    attacker_join(&s);
    open_well(&s, 7, KVF_READ);
    const kvf_slot_note note = s.by.last[KVF_STAGE_LEND].slots[0];
    give_back(&s, 7, (kvf_slot_note){note.slot, note.generation, {0, 0}});
    assert_int_equal(s.p->events, 0);
    assert_int_equal(s.by.last[KVF_STAGE_LEND].slots[0].slot, note.slot); /* the same slot is lent again */
    give_back(&s, 7, (kvf_slot_note){note.slot, note.generation, {0, 0}});
    assert_event(&s, 1, KVF_E_INVALID, "of generation", true);
    assert_unharmed(&s);
    end_flow(&s, 7, KVF_E_CANCELLED);
    assert_stage_idle(s.p->stage);
    scene_close(&s);
}

static void bytes_that_are_not_the_next(void **state) {
    (void)state;
    const uint64_t all = 2 * 2 * 600 * 2 * 64;
    const kvf_byte_range wrong[] = {{0, 0},      {64, 128},       {0, SLOT + 2},  {0, 3},
                                    {2, 1 << 9}, {all, all + 64}, {0, UINT64_MAX}};
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        scene s = scene_open();
        attacker_join(&s);
        open_well(&s, 7, KVF_WRITE);
        kvf_slot_note note = s.by.last[KVF_STAGE_LEND].slots[0];
        note.bytes = wrong[i];
        give_back(&s, 7, note);
        assert_event(&s, 1, KVF_E_RANGE, "of the stream", true);
        end_flow(&s, 7, KVF_OK);
        assert_stage_idle(s.p->stage);
        scene_close(&s);
    }
}

/* Nor does a selection have the same cells twice (openings_that_are_not_ours). */
static void bytes_that_have_come_in_another_slot_are_refused_and_counted_once(void **state) {
    (void)state;
    scene s = scene_open();
    uint64_t by_layer[2] = {0};
    assert_int_equal(kvf_model_layer_count(s.w->engines.model), COUNT_OF(by_layer));
    assert_ok(kvf_stage_count(s.p->stage, "mallory", 0, by_layer));
    attacker_join(&s);
    open_well(&s, 7, KVF_WRITE);
    kvf_slot_note first = s.by.last[KVF_STAGE_LEND].slots[0], second = s.by.last[KVF_STAGE_LEND].slots[1];
    first.bytes = second.bytes = (kvf_byte_range){0, 512};
    give_back(&s, 7, first);
    assert_int_equal(by_layer[0], 512);
    give_back(&s, 7, second);
    assert_event(&s, 1, KVF_E_RANGE, "a slot has bytes [0, 512) of the stream; the next are [512,", true);
    assert_int_equal(by_layer[0] + by_layer[1], 512);
    kvf_stage_count_no_more(s.p->stage, 0);
    end_flow(&s, 7, KVF_OK);
    assert_stage_idle(s.p->stage);
    scene_close(&s);
}

static void more_bytes_than_the_stream_has(void **state) {
    (void)state;
    scene s = scene_open();
    attacker_join(&s);
    open_well(&s, 7, KVF_READ);
    const kvf_slot_note note = s.by.last[KVF_STAGE_LEND].slots[0];
    give_back(
        &s, 7,
        (kvf_slot_note){note.slot, note.generation, {0, 64}}); /* a slot of a pull comes back without bytes */
    assert_event(&s, 1, KVF_E_INVALID, "of a pull with bytes", true);
    assert_unharmed(&s);
    end_flow(&s, 7, KVF_OK);
    assert_stage_idle(s.p->stage);
    scene_close(&s);
}

static void fewer_bytes_than_the_stream_has(void **state) {
    (void)state;
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++) {
        scene s = scene_open();
        attacker_join(&s);
        open_well(&s, 7, (kvf_direction)direction);
        end_flow(&s, 7, KVF_OK);
        assert_event(&s, 1, KVF_E_INVALID, "the mover ended the flow without an error after", true);
        assert_stage_idle(s.p->stage);
        assert_unharmed(&s);
        scene_close(&s);
    }
}

/* ---- flows ----------------------------------------------------------------------------------- */

static void flows_that_there_are_not(void **state) {
    (void)state;
    const kvf_stage_word words[] = {KVF_STAGE_ACCEPT, KVF_STAGE_LEND, KVF_STAGE_RETURN};
    scene s = scene_open();
    attacker_join(&s);
    for (uint32_t i = 0; i < COUNT_OF(words); i++) {
        const kvf_stage_message message = {.word = words[i], .flow = 99, .slot_count_named = 1};
        say(&s, &message);
        work(&s);
        assert_event(&s, i + 1, KVF_E_NOT_FOUND, "about flow 99, which does not exist", false);
        assert_int_equal(s.by.heard[KVF_STAGE_END], 0);
    }
    assert_unharmed(&s);
    assert_stage_idle(s.p->stage);
    scene_close(&s);
}

/* A side that has ended a flow repeats its END until it hears the other's. The answer to an answer would be endless. */
static void an_end_of_a_flow_that_there_is_not_is_answered(void **state) {
    (void)state;
    const struct {
        bool by_lender;
        kvf_status status;
        uint32_t answers;
    } ends[] = {{false, KVF_OK, 1},
                {false, KVF_E_NOT_FOUND, 2},
                {true, KVF_OK, 3},
                {true, KVF_E_CANCELLED, 4},
                {true, KVF_E_NOT_FOUND, 4}};
    scene s = scene_open();
    attacker_join(&s);
    for (uint32_t i = 0; i < COUNT_OF(ends); i++) {
        const kvf_stage_message message = {
            .word = KVF_STAGE_END, .flow = 99, .by_lender = ends[i].by_lender, .status = ends[i].status};
        say(&s, &message);
        work(&s);
        assert_int_equal(s.by.heard[KVF_STAGE_END], ends[i].answers);
        assert_int_equal(s.by.last[KVF_STAGE_END].by_lender, i < 2);
        assert_int_equal(s.by.last[KVF_STAGE_END].status, KVF_E_NOT_FOUND);
        assert_int_equal(s.p->events, 0);
    }
    assert_unharmed(&s);
    assert_stage_idle(s.p->stage);
    scene_close(&s);
}

static void the_same_flow_opened_twice(void **state) {
    (void)state;
    scene s = scene_open();
    attacker_join(&s);
    open_well(&s, 7, KVF_READ);
    kvf_group_steps steps;
    const kvf_opening opening = opening_of(&s, KVF_READ, &steps);
    open_flow(&s, 7, &opening);
    assert_event(&s, 1, KVF_E_EXISTS, "flow 7: it was opened a second time", false);
    assert_int_equal(s.by.heard[KVF_STAGE_END], 0); /* the first goes on */
    assert_unharmed(&s);
    end_flow(&s, 7, KVF_E_CANCELLED);
    assert_stage_idle(s.p->stage);
    scene_close(&s);
}

static void more_flows_than_a_peer_may_have(void **state) {
    (void)state;
    scene s = scene_open();
    attacker_join(&s);
    for (uint32_t i = 0; i < 3; i++) {
        kvf_group_steps steps;
        const kvf_opening opening = opening_of(&s, KVF_READ, &steps);
        open_flow(&s, i, &opening);
    }
    assert_int_equal(s.p->events, 0);
    /* the attacker's share is a quarter of the arena */
    assert_int_equal(stage_info_of(s.p->stage).slots_lent, 8);
    for (uint32_t i = 3; i < 20; i++) {
        kvf_group_steps steps;
        const kvf_opening opening = opening_of(&s, KVF_READ, &steps);
        open_flow(&s, i, &opening);
        assert_event(&s, i - 2, KVF_E_LIMIT, "flows open; allowed: up to 3", i < 6);
    }
    assert_true(stage_info_of(s.p->stage).flows <= 6);
    assert_unharmed(&s);
    for (uint32_t i = 0; i < 6; i++)
        end_flow(&s, i, KVF_E_CANCELLED);
    assert_stage_idle(s.p->stage);
    scene_close(&s);
}

/* Openings are kept as long as their flows, so a limit holds for the bytes that a peer makes the stage keep. */
static void more_bytes_of_openings_than_a_peer_may_have(void **state) {
    (void)state;
    scene s = scene_open();
    attacker_join(&s);
    s.p->stage->options.flows = 64;
    const unsigned char part[100] = {0};
    kvf_stage_message message = {.word = KVF_STAGE_OPEN,
                                 .opening_bytes = KVF_STAGE_OPENING_MAX,
                                 .part = part,
                                 .part_bytes = sizeof part};
    for (message.flow = 0; message.flow < 9; message.flow++) {
        /* the stage gives up each opening when the next begins; the attacker does not end it */
        say(&s, &message);
        work(&s);
    }
    assert_event(&s, 9, KVF_E_LIMIT, "the peer's openings have 75497472 bytes; allowed: up to 67108864",
                 true);
    for (uint64_t i = 0; i < 9; i++)
        end_flow(&s, i, KVF_OK);
    message.flow = 10;
    say(&s, &message);
    work(&s);
    end_flow(&s, 10, KVF_E_CANCELLED);
    assert_int_equal(s.p->events, 9);
    assert_unharmed(&s);
    assert_stage_idle(s.p->stage);
    scene_close(&s);
}

#define CROWD 40u

static uint64_t opened_by_all(const kvf_stage *stage) {
    uint64_t bytes = 0;
    for (const kvf_stage_peer *peer = stage->peers; peer; peer = peer->following)
        bytes += peer->opened_bytes;
    return bytes;
}

static void work_with_crowd(scene *s, attacker *crowd) {
    for (int i = 0; i < 20; i++) {
        work(s);
        for (uint32_t k = 0; k < CROWD; k++)
            assert_ok(kvf_transport_progress(crowd[k].transport, NULL));
    }
}

static void crowd_join(scene *s, attacker *crowd) {
    static unsigned char memory[1 << 16];
    const kvf_memory region = {.struct_size = sizeof region, .address = memory, .bytes = sizeof memory};
    for (uint32_t i = 0; i < CROWD; i++) {
        char name[32];
        (void)snprintf(name, sizeof name, "mallory-%u", i);
        const kvf_transport_options options = {
            .struct_size = sizeof options, .name = name, .on_notify = on_notify, .context = &crowd[i]};
        assert_ok(kvf_transport_open(fabric(), &options, &crowd[i].transport));
        assert_ok(kvf_transport_register(crowd[i].transport, &region, 1));
        crowd[i].victim = connect_to(crowd[i].transport, s->victim->transport);
        assert_ok(kvf_stage_join(s->victim->stage, connect_to(s->victim->transport, crowd[i].transport)));
    }
}

/* Each begins an opening of 8 MiB, as any peer may, and never goes on. The memory is the stage's, whatever the fabric. */
static void more_bytes_than_all_peers_may_have(void **state) {
    (void)state;
    if (strcmp(fabric(), "inproc") != 0)
        skip();
    static attacker crowd[CROWD];
    memset(crowd, 0, sizeof crowd);
    scene s = scene_open();
    attacker_join(&s);
    crowd_join(&s, crowd);
    const unsigned char part[100] = {0};
    unsigned char data[KVF_STAGE_MESSAGE_MAX];
    kvf_stage_message message = {.word = KVF_STAGE_OPEN,
                                 .flow = 7,
                                 .opening_bytes = KVF_STAGE_OPENING_MAX,
                                 .part = part,
                                 .part_bytes = sizeof part};
    const size_t bytes = kvf_stage_write_message(&message, data);
    for (uint32_t i = 0; i < CROWD; i++)
        assert_ok(kvf_transport_notify(crowd[i].victim, data, bytes));
    work_with_crowd(&s, crowd);
    assert_in_range(opened_by_all(s.p->stage), 200u << 20, 256u << 20);
    uint32_t refused = 0;
    for (uint32_t i = 0; i < CROWD; i++) {
        const kvf_stage_message *end = &crowd[i].last[KVF_STAGE_END];
        refused += crowd[i].heard[KVF_STAGE_END];
        if (crowd[i].heard[KVF_STAGE_END] > 0 &&
            (end->status != KVF_E_LIMIT || !strstr(end->sentence, "the flows of all peers use")))
            fail_msg("status %d: %s", (int)end->status, end->sentence);
    }
    assert_int_equal(s.p->events, refused);
    assert_int_equal(opened_by_all(s.p->stage), (uint64_t)(CROWD - refused) * KVF_STAGE_OPENING_MAX);
    open_well(&s, 7, KVF_READ); /* one that needs less still finds room */
    end_flow(&s, 7, KVF_E_CANCELLED);
    message = (kvf_stage_message){.word = KVF_STAGE_END, .flow = 7, .status = KVF_E_CANCELLED};
    const size_t end_bytes = kvf_stage_write_message(&message, data);
    for (uint32_t i = 0; i < CROWD; i++)
        assert_ok(kvf_transport_notify(crowd[i].victim, data, end_bytes));
    work_with_crowd(&s, crowd);
    assert_int_equal(s.p->stage->kept_bytes, 0);
    assert_unharmed(&s);
    assert_stage_idle(s.p->stage);
    for (uint32_t i = 0; i < CROWD; i++)
        kvf_transport_close(crowd[i].transport);
    scene_close(&s);
}

/* Sends a long opening of another model, which is refused when the stage reads it. The stage gets no turn meanwhile. */
static void say_long(scene *s, uint64_t flow) {
    static const uint32_t ids[40000];
    kvf_group_steps steps;
    kvf_opening opening = opening_of(s, KVF_READ, &steps);
    opening.model ^= 1;
    steps.table = (kvf_block_table){ids, COUNT_OF(ids), 0};
    unsigned char *data;
    size_t bytes;
    assert_ok(kvf_stage_write_opening(&opening, &data, &bytes));
    for (size_t at = 0; at < bytes; at += kvf_stage_part_max()) {
        const size_t left = bytes - at, most = kvf_stage_part_max();
        const kvf_stage_message message = {.word = KVF_STAGE_OPEN,
                                           .flow = flow,
                                           .opening_bytes = (uint32_t)bytes,
                                           .at = (uint32_t)at,
                                           .part = data + at,
                                           .part_bytes = left < most ? left : most};
        say(s, &message);
        assert_ok(kvf_transport_progress(s->p->transport, NULL));
    }
    kvf_free(data);
}

/* Reading one may take milliseconds, and the caller that progresses the stage has other things to do. */
static void long_openings_are_read_one_in_a_turn(void **state) {
    (void)state;
    scene s = scene_open();
    attacker_join(&s);
    for (uint64_t flow = 1; flow <= 3; flow++)
        say_long(&s, flow);
    assert_int_equal(s.p->events, 0);
    /* A complete opening takes no more parts, and is not read if its flow has ended. */
    const unsigned char more[4] = {0};
    const kvf_stage_message behind = {.word = KVF_STAGE_OPEN,
                                      .flow = 2,
                                      .opening_bytes = 200000,
                                      .at = 160100,
                                      .part = more,
                                      .part_bytes = sizeof more};
    say(&s, &behind);
    assert_ok(kvf_transport_progress(s.p->transport, NULL));
    assert_event(&s, 1, KVF_E_PARSE, "part", false);
    for (uint32_t turn = 1; turn <= 2; turn++) {
        bool busy = false;
        assert_ok(kvf_stage_progress(s.p->stage, &busy));
        assert_event(&s, 1 + turn, KVF_E_MISMATCH, "other groups, layers or parts", false);
        assert_true(busy || turn == 2);
    }
    assert_unharmed(&s);
    scene_close(&s);
}

static void parts_that_never_come(void **state) {
    (void)state;
    scene s = scene_open();
    attacker_join(&s);
    const unsigned char part[100] = {0};
    kvf_stage_message message = {
        .word = KVF_STAGE_OPEN, .flow = 1, .opening_bytes = 5000, .part = part, .part_bytes = sizeof part};
    say(&s, &message);
    work(&s);
    assert_int_equal(s.p->events, 0);
    /* Another opening begins: no more of the first will come. */
    message.flow = 2;
    say(&s, &message);
    work(&s);
    assert_event(&s, 1, KVF_E_PARSE, "another opening came after 100 bytes of this one", true);
    /* Not the next part. */
    message.at = 300;
    say(&s, &message);
    work(&s);
    assert_event(&s, 2, KVF_E_PARSE, "part 300 of an opening of 5000; expected 100 of 5000", true);
    /* A part without the first. */
    message.flow = 3;
    say(&s, &message);
    work(&s);
    assert_event(&s, 3, KVF_E_NOT_FOUND, "without the first", false);
    /* The remaining parts do not come in time. */
    message.flow = 4;
    message.at = 0;
    say(&s, &message);
    work(&s);
    s.w->now_ns += UINT64_C(31000000000);
    work(&s);
    assert_event(&s, 4, KVF_E_TIMEOUT, "flow 4: nothing was heard from the peer", true);
    for (uint32_t i = 1; i < 5; i++)
        if (i != 3)
            end_flow(&s, i, KVF_OK);
    assert_unharmed(&s);
    assert_stage_idle(s.p->stage);
    scene_close(&s);
}

static void openings_that_are_not_ours(void **state) {
    (void)state;
    enum { MODEL, BYTES, ITEM, ORDER, TWICE, TYPE, BLOCK, STEPS, SLOTS, GROUPS, CASES };
    const struct {
        kvf_status status;
        const char *words;
    } wanted[CASES] = {
        [MODEL] = {KVF_E_MISMATCH, "the mover's model has other groups"},
        [BYTES] = {KVF_E_MISMATCH, "the mover's stream has 1 bytes"},
        [ITEM] = {KVF_E_RANGE, "unit"},
        [ORDER] = {KVF_E_INVALID, "item"},
        [TWICE] = {KVF_E_OVERLAP, "item"},
        [TYPE] = {KVF_E_PERMISSION, "full.k: the lender does not allow conversion between bf16 and f32"},
        [BLOCK] = {KVF_E_RANGE, "block"},
        [STEPS] = {KVF_E_RANGE, "step"},
        [SLOTS] = {KVF_E_RANGE, "less than an element"},
        [GROUPS] = {KVF_E_INVALID, "group"}};
    for (uint32_t i = 0; i < CASES; i++) {
        scene s = scene_open();
        attacker_join(&s);
        kvf_group_steps steps[2];
        kvf_opening opening = opening_of(&s, KVF_READ, steps);
        kvf_stream_item items[8];
        uint32_t ids[100];
        steps[1] = steps[0];
        memcpy(items, opening.items, opening.item_count * sizeof *items);
        memcpy(ids, steps[0].table.ids, steps[0].table.count * sizeof *ids);
        opening.items = items;
        steps[0].table.ids = ids;
        opening.model += i == MODEL;
        opening.stream_bytes = i == BYTES ? 1 : opening.stream_bytes;
        items[0].units.end += i == ITEM ? 100 : 0;
        assert_int_equal(opening.item_count, 2); /* K and V */
        if (i == ORDER) {
            items[2] = items[0];
            items[0] = items[1];
            items[1] = items[2];
        }
        if (i == TWICE)
            items[1] = items[0];
        items[0].dtype = i == TYPE ? KVF_DTYPE_F32 : items[0].dtype;
        ids[3] = i == BLOCK ? 100 : ids[3];
        steps[0].end += i == STEPS ? 100 : 0;
        opening.slot_bytes = i == SLOTS ? 1 : SLOT;
        opening.group_count = i == GROUPS ? 2 : 1;
        open_flow(&s, 7, &opening);
        assert_event(&s, 1, wanted[i].status, wanted[i].words, true);
        assert_int_equal(s.by.heard[KVF_STAGE_ACCEPT], 0);
        end_flow(&s, 7, KVF_OK);
        assert_unharmed(&s);
        assert_stage_idle(s.p->stage);
        scene_close(&s);
    }
}

/* Slots of 3 bytes take elements of K, but not those of V, which come later and have 4 bytes in the stream. */
static void slots_that_are_too_small_for_later_elements(void **state) {
    (void)state;
    const uint32_t convert = KVF_DTYPE_BIT(KVF_DTYPE_BF16) | KVF_DTYPE_BIT(KVF_DTYPE_F32);
    scene s = scene_open_with(&convert);
    attacker_join(&s);
    kvf_group_steps steps;
    kvf_opening opening = opening_of(&s, KVF_READ, &steps);
    kvf_stream_item items[2];
    assert_int_equal(opening.item_count, 2);
    memcpy(items, opening.items, sizeof items);
    items[1].dtype = KVF_DTYPE_F32;
    opening.items = items;
    opening.stream_bytes += opening.stream_bytes / 2;
    opening.slot_bytes = 3;
    open_flow(&s, 7, &opening);
    assert_event(&s, 1, KVF_E_RANGE, "3 bytes in a slot, less than an element", true);
    assert_int_equal(s.by.heard[KVF_STAGE_ACCEPT], 0);
    end_flow(&s, 7, KVF_OK);
    assert_unharmed(&s);
    assert_stage_idle(s.p->stage);
    scene_close(&s);
}

/* ---- a lender that lies ------------------------------------------------------------------------ */

/* P pushes to the attacker, or D pulls from it; the attacker lends slots that it does not have. */
static kvf_move *move_with_attacker(scene *s, kvf_direction direction, uint64_t *flow) {
    const kvf_move_options options = {.struct_size = sizeof options, .way = KVF_WAY_PACKED};
    kvf_move *move;
    kvf_stage_peer *peer = s->victim->stage->peers;
    while (strcmp(peer->name, "mallory") != 0)
        peer = peer->following;
    if (direction == KVF_WRITE)
        assert_ok(kvf_stage_push(s->p->stage, s->request, 0, peer->peer, &options, &move));
    else
        assert_ok(kvf_stage_pull(s->d->stage, s->request, &peer->peer, &options, &move));
    work(s);
    assert_int_equal(s->by.heard[KVF_STAGE_OPEN], 1);
    *flow = s->by.last[KVF_STAGE_OPEN].flow;
    return move;
}

/* How many flows the attacker says it takes, and how large it says its slots are. */
static uint32_t flows_said = 3, slot_bytes_said = SLOT;

static void accept_with(scene *s, uint64_t flow, uint32_t region, uint32_t slots, uint64_t bytes) {
    const kvf_stage_message message = {.word = KVF_STAGE_ACCEPT,
                                       .flow = flow,
                                       .region = region,
                                       .slot_bytes = slot_bytes_said,
                                       .slot_count = slots,
                                       .stream_bytes = bytes,
                                       .flows = flows_said};
    say(s, &message);
    work(s);
}

static void lend(scene *s, uint64_t flow, uint32_t first, uint32_t count, kvf_byte_range bytes) {
    kvf_stage_message message = {.word = KVF_STAGE_LEND, .flow = flow, .slot_count_named = count};
    for (uint32_t i = 0; i < count; i++)
        message.slots[i] = (kvf_slot_note){first + i, 1, bytes};
    say(s, &message);
    work(s);
}

static void slots_and_credits_that_do_not_exist(void **state) {
    (void)state;
    enum {
        REGION,
        TOO_MANY,
        BYTES,
        BEYOND,
        TWICE,
        CREDITS,
        FULL,
        EARLY,
        ENDED,
        NO_FLOWS,
        AGAIN,
        SMALL,
        CASES
    };
    const struct {
        kvf_status status;
        const char *words;
    } wanted[CASES] = {
        [REGION] = {KVF_E_RANGE, "in region 1, which has 0 bytes"},
        [TOO_MANY] = {KVF_E_RANGE, "17 slots of 4096 bytes in region 0, which has 65536 bytes"},
        [BYTES] = {KVF_E_MISMATCH, "the lender's stream has 5 bytes"},
        [BEYOND] = {KVF_E_RANGE, "the lender lends slot 16; its arena has 16 slots"},
        [TWICE] = {KVF_E_INVALID, "the lender lends slot 2 a second time"},
        [CREDITS] = {KVF_E_LIMIT, "the lender lends more than 4 slots at once"},
        [FULL] = {KVF_E_INVALID, "of a push with bytes"},
        [EARLY] = {KVF_E_RANGE, "the lender lends slot 0; its arena has 0 slots"},
        [ENDED] = {KVF_E_INVALID, "the lender ended the flow without an error before all"},
        [NO_FLOWS] = {KVF_E_RANGE, "the lender accepts 0 flows; allowed: 1 and more"},
        [AGAIN] = {KVF_E_INVALID, "the lender accepted a flow that it had accepted already"},
        [SMALL] = {KVF_E_RANGE, "the lender's slots have 1 bytes, less than an element"}};
    for (uint32_t i = 0; i < CASES; i++) {
        scene s = scene_open();
        attacker_join(&s);
        uint64_t flow, bytes = kvf_request_bytes(s.request, 0);
        kvf_move *move = move_with_attacker(&s, KVF_WRITE, &flow);
        flows_said = i == NO_FLOWS ? 0 : 3;
        slot_bytes_said = i == SMALL ? 1 : SLOT;
        for (int accepts = i == EARLY ? 0 : i == AGAIN ? 2 : 1; accepts > 0; accepts--)
            accept_with(&s, flow, i == REGION, i == TOO_MANY ? 17 : 16, i == BYTES ? 5 : bytes);
        if (i == TWICE)
            s.p->stands_still = true; /* so that both messages come before the first is used */
        if (i == TWICE)
            lend(&s, flow, 2, 1, (kvf_byte_range){0, 0});
        if (i == BEYOND || i == TWICE || i == FULL || i == EARLY)
            lend(&s, flow, i == BEYOND ? 16 : i == TWICE ? 2 : 0, 1, (kvf_byte_range){0, i == FULL ? 64 : 0});
        s.p->stands_still = false;
        if (i == CREDITS)
            lend(&s, flow, 0, 5, (kvf_byte_range){0, 0});
        if (i == ENDED) {
            const kvf_stage_message end = {.word = KVF_STAGE_END, .flow = flow, .by_lender = true};
            say(&s, &end);
        }
        work(&s);
        assert_event(&s, 1, wanted[i].status, wanted[i].words, true);
        assert_fails(kvf_move_status(move), wanted[i].status, wanted[i].words);
        kvf_move_free(move);
        const kvf_stage_message end = {
            .word = KVF_STAGE_END, .flow = flow, .by_lender = true, .status = KVF_E_CANCELLED};
        if (i != ENDED)
            say(&s, &end);
        work(&s);
        assert_unharmed(&s);
        assert_stage_idle(s.p->stage);
        scene_close(&s);
    }
}

/* A lender's slots of a pull have the next bytes of the stream, and all of them before it ends well. */
static void slots_of_a_pull_with_other_bytes_than_the_next(void **state) {
    (void)state;
    const uint64_t all = 2 * 2 * 600 * 2 * 64;
    const struct {
        kvf_byte_range first, second; /* empty: the slot is not lent */
        kvf_status status;
        const char *words;
    } cases[] = {
        {{64, 128}, {0, 0}, KVF_E_RANGE, "bytes [64, 128) of the stream; the next are [0, 307200)"},
        {{0, SLOT}, {0, SLOT}, KVF_E_RANGE, "the next are [4096, 307200)"},
        {{0, SLOT}, {2 * SLOT, 3 * SLOT}, KVF_E_RANGE, "the next are [4096, 307200)"},
        {{0, 64}, {64, 64 + SLOT + 2}, KVF_E_RANGE, "4098 bytes at 64 of the stream; allowed: up to 4096"},
        {{0, 3}, {0, 0}, KVF_E_RANGE, "a slot has 3 bytes at 0 of the stream"},
        {{0, all + 64}, {0, 0}, KVF_E_RANGE, "bytes [0, 307264) of the stream"},
        {{0, SLOT}, {0, 0}, KVF_E_INVALID, "the lender ended the flow without an error before all 307200"}};
    for (uint32_t i = 0; i < COUNT_OF(cases); i++) {
        scene s = scene_open();
        s.victim = s.d;
        attacker_join(&s);
        uint64_t flow;
        flows_said = 3;
        slot_bytes_said = SLOT;
        kvf_move *move = move_with_attacker(&s, KVF_READ, &flow);
        accept_with(&s, flow, 0, 16, all);
        lend(&s, flow, 0, 1, cases[i].first);
        assert_int_equal(s.d->events, cases[i].second.end == 0 && cases[i].status == KVF_E_RANGE);
        if (cases[i].second.end > 0)
            lend(&s, flow, 1, 1, cases[i].second);
        kvf_stage_message end = {.word = KVF_STAGE_END, .flow = flow, .by_lender = true};
        if (cases[i].status == KVF_E_INVALID)
            say(&s, &end);
        work(&s);
        assert_event(&s, 1, cases[i].status, cases[i].words, true);
        assert_fails(kvf_move_status(move), cases[i].status, cases[i].words);
        kvf_move_free(move);
        end.status = KVF_E_CANCELLED;
        if (cases[i].status != KVF_E_INVALID)
            say(&s, &end);
        work(&s);
        assert_unharmed(&s);
        assert_stage_idle(s.p->stage);
        scene_close(&s);
    }
}

/* ---- messages -------------------------------------------------------------------------------- */

static void messages_that_are_none(void **state) {
    (void)state;
    scene s = scene_open();
    attacker_join(&s);
    const struct {
        const char *bytes;
        size_t count;
        kvf_status status;
    } wrong[] = {{"kvfs", 4, KVF_E_UNSUPPORTED},
                 {"kvfs\2", 5, KVF_E_UNSUPPORTED},
                 {"kvfs\1", 5, KVF_E_PARSE},
                 {"kvfs\1\6\0\0\0\0\0\0\0\0", 14, KVF_E_PARSE},
                 {"kvfs\1\3\0\0\0\0\0\0\0\0\0", 15, KVF_E_PARSE},
                 {"kvfs\1\3\0\0\0\0\0\0\0\0\21", 15, KVF_E_PARSE},
                 {"kvfs\1\3\0\0\0\0\0\0\0\0\1xxxx", 19, KVF_E_PARSE},
                 {"kvfs\1\5\0\0\0\0\0\0\0\0\2\0\0", 17, KVF_E_PARSE},
                 {"kvfs\1\5\0\0\0\0\0\0\0\0\1\377\0", 17, KVF_E_PARSE}};
    for (uint32_t i = 0; i < COUNT_OF(wrong); i++) {
        assert_ok(kvf_transport_notify(s.by.victim, wrong[i].bytes, wrong[i].count));
        work(&s);
        assert_event(&s, i + 1, wrong[i].status, "", false);
    }
    /* A notification that is no stage's, and a message from a peer that has not joined. */
    assert_ok(kvf_transport_notify(s.by.victim, "kvf", 3));
    work(&s);
    assert_int_equal(s.p->other_notices, 1);
    assert_true(kvf_stage_notice(s.p->stage, "nobody", "kvfs\1", 5));
    assert_event(&s, COUNT_OF(wrong) + 1, KVF_E_NOT_FOUND, "nobody, which has not joined", false);
    assert_unharmed(&s);
    scene_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_it_was_not_given),
        cmocka_unit_test(a_slot_that_is_written_late),
        cmocka_unit_test(an_older_generation),
        cmocka_unit_test(bytes_that_are_not_the_next),
        cmocka_unit_test(bytes_that_have_come_in_another_slot_are_refused_and_counted_once),
        cmocka_unit_test(more_bytes_than_the_stream_has),
        cmocka_unit_test(fewer_bytes_than_the_stream_has),
        cmocka_unit_test(flows_that_there_are_not),
        cmocka_unit_test(an_end_of_a_flow_that_there_is_not_is_answered),
        cmocka_unit_test(the_same_flow_opened_twice),
        cmocka_unit_test(more_flows_than_a_peer_may_have),
        cmocka_unit_test(more_bytes_of_openings_than_a_peer_may_have),
        cmocka_unit_test(more_bytes_than_all_peers_may_have),
        cmocka_unit_test(long_openings_are_read_one_in_a_turn),
        cmocka_unit_test(parts_that_never_come),
        cmocka_unit_test(openings_that_are_not_ours),
        cmocka_unit_test(slots_that_are_too_small_for_later_elements),
        cmocka_unit_test(slots_and_credits_that_do_not_exist),
        cmocka_unit_test(slots_of_a_pull_with_other_bytes_than_the_next),
        cmocka_unit_test(messages_that_are_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
