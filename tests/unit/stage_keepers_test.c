/*
 * Peers that keep the slots they were lent: a stage lends half of its arena, and a peer that comes when all of that is
 * kept gets a slot within twice `doubt_ns`, before peers that have had one. And peers that do not serve: they get only
 * some of the slots that our own operations use.
 */
#include "stage_scene.h"

#include <stdio.h>

#include "transport/transport.h"

#define SLOT 4096u
#define SLOTS 32u
#define SECOND 1000000000ull
#define PATIENCE (10 * SECOND)
#define KEEPERS 6u

/* A peer made by hand: it opens flows like any other, and gives slots back only when the test tells it to. */
typedef struct keeper {
    char name[16];
    kvf_transport *transport;
    kvf_peer *victim;
    kvf_slot_note lent[SLOTS]; /* the slots of flow 1 that are lent and not given back */
    uint32_t count;
    kvf_status ended;
    bool says_end; /* sends END when it is told that its flow has ended */
    bool is_deaf;  /* it reads no message */
    unsigned char memory[64];
} keeper;

/* P lends; D is honest, and the keepers open the same request as D. */
typedef struct scene {
    stage_scene at;
    kvf_selection *selection;
    keeper keepers[KEEPERS];
} scene;

static void say(const keeper *k, const kvf_stage_message *message) {
    unsigned char data[KVF_STAGE_MESSAGE_MAX];
    assert_ok(kvf_transport_notify(k->victim, data, kvf_stage_write_message(message, data)));
}

static void on_notify(void *context, kvf_transport *transport, const char *sender, const void *data,
                      size_t bytes) {
    keeper *k = context;
    (void)transport, (void)sender;
    kvf_stage_message message = {0};
    assert_ok(kvf_stage_read_message(data, bytes, &message));
    for (uint32_t i = 0; message.word == KVF_STAGE_LEND && i < message.slot_count_named; i++)
        k->lent[k->count++] = message.slots[i];
    if (message.word != KVF_STAGE_END)
        return;
    k->ended = message.status;
    if (k->says_end)
        say(k, &(kvf_stage_message){
                   .word = KVF_STAGE_END, .flow = 1, .status = KVF_E_CANCELLED, .sentence = ""});
}

static void work(scene *s) {
    for (int i = 0; i < 20; i++) {
        (void)stage_world_work(s->at.w);
        for (uint32_t k = 0; k < KEEPERS; k++)
            if (!s->keepers[k].is_deaf)
                assert_ok(kvf_transport_progress(s->keepers[k].transport, NULL));
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

static void keeper_join(scene *s, uint32_t i) {
    keeper *k = &s->keepers[i];
    const kvf_memory region = {.struct_size = sizeof region, .address = k->memory, .bytes = sizeof k->memory};
    (void)snprintf(k->name, sizeof k->name, "keeper-%u", i);
    const kvf_transport_options options = {
        .struct_size = sizeof options, .name = k->name, .on_notify = on_notify, .context = k};
    assert_ok(kvf_transport_open("inproc", &options, &k->transport));
    assert_ok(kvf_transport_register(k->transport, &region, 1));
    k->victim = connect_to(k->transport, s->at.p->transport);
    assert_ok(kvf_stage_join(s->at.p->stage, connect_to(s->at.p->transport, k->transport)));
}

/* Opens a flow that reads from P, and keeps all slots that it is lent. */
static void keeper_open(scene *s, uint32_t i, uint32_t priority) {
    const kvf_group_steps steps = {s->at.w->p_sequence.tables[0], 0, s->at.w->p_sequence.steps[0]};
    const kvf_opening opening = {.direction = KVF_READ,
                                 .window = KVF_WINDOW_MAX,
                                 .priority = priority,
                                 .slot_bytes = SLOT,
                                 .stream_bytes = kvf_request_bytes(s->at.request, 0),
                                 .model = kvf_stage_model_sum(s->at.w->engines.model),
                                 .items = s->selection->items,
                                 .item_count = s->selection->item_count,
                                 .groups = &steps,
                                 .group_count = 1};
    unsigned char *data;
    size_t bytes;
    assert_ok(kvf_stage_write_opening(&opening, &data, &bytes));
    say(&s->keepers[i], &(kvf_stage_message){.word = KVF_STAGE_OPEN,
                                             .flow = 1,
                                             .opening_bytes = (uint32_t)bytes,
                                             .part = data,
                                             .part_bytes = bytes});
    kvf_free(data);
    work(s);
}

static void give_one_back(scene *s, keeper *k) {
    assert_true(k->count > 0);
    const kvf_slot_note first = k->lent[0];
    memmove(k->lent, k->lent + 1, --k->count * sizeof *k->lent);
    say(k, &(kvf_stage_message){.word = KVF_STAGE_RETURN,
                                .flow = 1,
                                .slot_count_named = 1,
                                .slots = {{.slot = first.slot, .generation = first.generation}}});
    work(s);
}

static const kvf_stage_peer *peer_named(const scene *s, const char *name) {
    const kvf_stage_peer *peer = s->at.p->stage->peers;
    while (strcmp(peer->name, name) != 0)
        peer = peer->following;
    return peer;
}

static uint32_t slots_of(const scene *s, const char *name) {
    return peer_named(s, name)->shares[KVF_MEMORY_HOST].lent;
}

static scene *scene_open(bool says_end) {
    static scene s;
    s = (scene){.at = stage_scene_open("inproc", attention(2, 2, 32), 600,
                                       (kvf_stage_options){.arena_bytes = SLOTS * SLOT,
                                                           .slot_bytes = SLOT,
                                                           .window = KVF_WINDOW_MAX,
                                                           .stall_ns = 1000 * SECOND,
                                                           .doubt_ns = PATIENCE})};
    assert_ok(kvf_selection_of_plan(s.at.plan, 0, &s.selection));
    for (uint32_t i = 0; i < KEEPERS; i++) {
        s.keepers[i].says_end = says_end;
        keeper_join(&s, i);
    }
    return &s;
}

static void scene_close(scene *s) {
    kvf_selection_free(s->selection);
    stage_scene_close(&s->at);
    for (uint32_t i = 0; i < KEEPERS; i++)
        kvf_transport_close(s->keepers[i].transport);
}

/* Six peers open flows, and five of them keep all slots that P lends: 8, 4, 2, 1 and 1; the last gets none. */
static void keep_all(scene *s) {
    static const uint32_t shares[KEEPERS] = {8, 4, 2, 1, 1, 0};
    for (uint32_t i = 0; i < KEEPERS; i++)
        keeper_open(s, i, 255);
    for (uint32_t i = 0; i < KEEPERS; i++)
        assert_int_equal(s->keepers[i].count, shares[i]);
    assert_int_equal(stage_info_of(s->at.p->stage).slots_lent, SLOTS / 2);
}

static kvf_move *begin_honest(scene *s) {
    kvf_move *move = stage_scene_begin(&s->at, KVF_READ, 0);
    work(s);
    assert_int_equal(kvf_move_status(move), KVF_IN_PROGRESS);
    assert_int_equal(slots_of(s, s->at.d->name), 0);
    return move;
}

static void end_honest(scene *s, kvf_move *move) {
    assert_ok(stage_world_finish(s->at.w, move));
    kvf_move_free(move);
    assert_int_equal(stage_world_wrong_bytes(s->at.d, &s->at.before, 5), 0);
}

static uint64_t bytes_of(const kvf_move *move) {
    kvf_move_info info = {.struct_size = sizeof info};
    assert_ok(kvf_move_get_info(move, &info));
    return info.bytes;
}

static void pass(scene *s, uint64_t ns) {
    s->at.w->now_ns += ns;
    work(s);
}

/* These peers end their flows as soon as they are told. */
static void slots_that_peers_keep_go_to_flows_that_have_none(void **state) {
    (void)state;
    scene *s = scene_open(true);
    keep_all(s);
    kvf_move *move = begin_honest(s);
    pass(s, PATIENCE); /* no peer is ended before that time is over */
    assert_int_equal(kvf_move_status(move), KVF_IN_PROGRESS);
    assert_int_equal(s->at.p->events, 0);
    pass(s, 1);
    end_honest(s, move);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(s->keepers[i].ended, KVF_E_TIMEOUT);
    assert_int_equal(s->at.p->event, KVF_E_TIMEOUT);
    assert_non_null(
        strstr(s->at.p->event_text, "the mover has returned no slot for 10000 ms, and other flows wait"));
    scene_close(s);
}

/* These peers do not stop: their slots are in doubt for as long again, and then free. */
static void slots_of_a_peer_that_does_not_stop_are_free_in_the_end(void **state) {
    (void)state;
    scene *s = scene_open(false);
    keep_all(s);
    kvf_move *move = begin_honest(s);
    pass(s, PATIENCE + 1);
    assert_int_equal(stage_info_of(s->at.p->stage).slots_doubt, SLOTS / 2);
    assert_int_equal(slots_of(s, s->at.d->name), 0);
    pass(s, PATIENCE + 1);
    end_honest(s, move);
    scene_close(s);
}

/* They could keep their slots for good by a RETURN now and then of what they do not have. */
static void a_return_of_no_slot_gives_a_peer_no_more_time(void **state) {
    (void)state;
    scene *s = scene_open(false);
    keep_all(s);
    kvf_move *move = begin_honest(s);
    pass(s, PATIENCE + 1);
    pass(s, PATIENCE / 2);
    for (uint32_t i = 0; i < 5; i++)
        say(&s->keepers[i], &(kvf_stage_message){.word = KVF_STAGE_RETURN,
                                                 .flow = 1,
                                                 .slot_count_named = 1,
                                                 .slots = {{.slot = SLOTS, .generation = 1}}});
    pass(s, PATIENCE / 2 + 1);
    end_honest(s, move);
    scene_close(s);
}

/* Five peers read no message, and P cannot send them any. It has filled slots for them all the same. */
static void keep_all_unheard(scene *s) {
    static const unsigned char note[KVF_NOTICE_MAX];
    for (uint32_t i = 0; i < 5; i++) {
        s->keepers[i].is_deaf = true;
        for (size_t bytes = sizeof note; bytes > 0; bytes /= 2)
            while (kvf_transport_notify(peer_named(s, s->keepers[i].name)->peer, note, bytes) == KVF_OK) {
            }
        keeper_open(s, i, 255);
    }
    assert_int_equal(stage_info_of(s->at.p->stage).slots_lent, SLOTS / 2);
}

/* Nobody else could have had these slots, for as long as the peers did not read. */
static void slots_of_which_peers_cannot_be_told_go_to_flows_that_have_none(void **state) {
    (void)state;
    scene *s = scene_open(true);
    keep_all_unheard(s);
    kvf_move *move = begin_honest(s);
    pass(s, PATIENCE);
    assert_int_equal(kvf_move_status(move), KVF_IN_PROGRESS);
    pass(s, 1);
    end_honest(s, move);
    assert_int_equal(s->at.p->events, 5);
    assert_int_equal(s->at.p->event, KVF_E_TIMEOUT);
    scene_close(s);
}

static void flows_of_peers_that_read_no_message_end_when_they_have_stalled(void **state) {
    (void)state;
    scene *s = scene_open(true);
    keep_all_unheard(s);
    pass(s, 1000 * SECOND);
    assert_int_equal(s->at.p->events, 0);
    pass(s, 1);
    assert_int_equal(s->at.p->events, 5);
    assert_int_equal(stage_info_of(s->at.p->stage).slots_lent, 0);
    scene_close(s);
}

/* If no other peer waits, a peer may take its time. */
static void a_peer_that_keeps_slots_that_nobody_waits_for_is_left_alone(void **state) {
    (void)state;
    scene *s = scene_open(true);
    for (uint32_t i = 0; i < 5; i++)
        keeper_open(s, i, 255);
    assert_int_equal(stage_info_of(s->at.p->stage).slots_lent, SLOTS / 2);
    pass(s, 900 * SECOND);
    assert_int_equal(s->at.p->events, 0);
    scene_close(s);
}

/* The first slot that comes back goes to the peer that has waited longest, though others of higher priority want it
 * too; the next slot goes to the next peer. */
static void the_flow_that_has_waited_longest_for_its_first_slot_is_first(void **state) {
    (void)state;
    scene *s = scene_open(true);
    for (uint32_t i = 0; i < 5; i++)
        keeper_open(s, i, 255);
    kvf_move *move = begin_honest(s);
    pass(s, 1);
    keeper_open(s, 5, 255); /* waits too, with a higher priority */
    pass(s, 1);
    give_one_back(s, &s->keepers[4]); /* has none now, and wants the next slot */
    assert_int_equal(bytes_of(move), SLOT);
    assert_int_equal(s->keepers[5].count, 1);
    assert_int_equal(s->keepers[4].count, 0);
    pass(s, PATIENCE + 1);
    end_honest(s, move);
    scene_close(s);
}

/* D waits with two flows. Once one of them has had a slot, a peer that has had none comes before the other, too. */
static void a_slot_for_one_flow_of_a_peer_ends_the_waiting_of_all(void **state) {
    (void)state;
    scene *s = scene_open(true);
    for (uint32_t i = 0; i < 5; i++)
        keeper_open(s, i, 255);
    kvf_move *moves[2] = {begin_honest(s), begin_honest(s)};
    pass(s, 1);
    keeper_open(s, 5, 255);
    pass(s, 1);
    give_one_back(s, &s->keepers[4]);
    assert_int_equal(bytes_of(moves[0]) + bytes_of(moves[1]), SLOT);
    assert_int_equal(s->keepers[5].count, 1);
    pass(s, PATIENCE + 1);
    end_honest(s, moves[0]);
    end_honest(s, moves[1]);
    scene_close(s);
}

/* ---- keepers that were stopped ------------------------------------------------------------------ */

static const kvf_engine_spec four = {.struct_size = sizeof four,
                                     .tp_size = 4,
                                     .all = {.tokens_per_block = 16, .block_count = 100, .order = "L|BPHN"}};

static bool has_lent_two(void *context) {
    return stage_info_of(((const stage_end *)context)->stage).slots_lent == 2;
}

static kvf_move *begin_push(const stage_world *w, const kvf_request *request, uint32_t rank) {
    const kvf_move_options options = {.struct_size = sizeof options, .way = KVF_WAY_PACKED};
    kvf_move *move = NULL;
    assert_ok(kvf_stage_push(w->p[rank].stage, request, rank, w->p[rank].peers[0], &options, &move));
    return move;
}

static void let_pass(stage_world *w, uint64_t ns) {
    w->now_ns += ns;
    for (int i = 0; i < 50; i++)
        (void)stage_world_work(w);
}

/* D lends two slots. Two of the ranks of P that push to it are stopped with one each, the first in the middle of a copy
 * into it, and a third waits. None of them has left. The third gets the slot of the second, which writes no more when it
 * goes on, and the slot of the first is kept. */
static void a_slot_into_which_its_keeper_is_in_the_middle_of_a_copy_goes_to_nobody_else(void **state) {
    (void)state;
    stage_world *w = stage_world_open(
        "shm",
        &(stage_pair){
            attention(2, 4, 32),
            &scene_d,
            &four,
            600,
            {.arena_bytes = 4 * SLOT, .slot_bytes = SLOT, .stall_ns = 1000 * SECOND, .doubt_ns = PATIENCE}});
    kvf_plan *plan = plan_of(&w->engines, 0);
    kvf_request *request = request_of(plan);
    set_sequences(request, &w->d_sequence, &w->p_sequence);
    const kvf_stage *lender = w->d[0].stage;
    const uint32_t arena = stage_info_of(lender).region;
    kvf_move *moves[3] = {begin_push(w, request, 0), begin_push(w, request, 1)};
    stage_world_work_until(w, has_lent_two, &w->d[0]);
    for (uint32_t i = 0; i < 2; i++) {
        assert_non_null(kvf_peer_enter(w->p[i].peers[0], arena, KVF_WRITE));
        w->p[i].stands_still = true;
    }
    assert_ok(kvf_peer_leave(w->p[1].peers[0], KVF_WRITE, 0));
    moves[2] = begin_push(w, request, 2);
    let_pass(w, 1);
    let_pass(w, PATIENCE + 1); /* the flows of both end, */
    assert_int_equal(stage_info_of(lender).slots_doubt, 2);
    let_pass(w, PATIENCE + 1); /* and are given up */
    assert_int_equal(stage_info_of(lender).slots_doubt, 1);
    assert_ok(stage_world_finish(w, moves[2]));
    assert_null(kvf_peer_enter(w->p[1].peers[0], arena, KVF_WRITE));
    let_pass(w, 10 * PATIENCE);
    assert_int_equal(stage_info_of(lender).slots_doubt, 1);
    assert_int_equal(kvf_peer_leave(w->p[0].peers[0], KVF_WRITE, 0), KVF_E_PEER_LOST);
    let_pass(w, 0);
    assert_stage_idle(lender);
    for (uint32_t i = 0; i < 2; i++) {
        w->p[i].stands_still = false;
        assert_int_not_equal(stage_world_finish(w, moves[i]), KVF_OK);
    }
    for (uint32_t i = 0; i < 3; i++)
        kvf_move_free(moves[i]);
    kvf_request_free(request);
    kvf_plan_free(plan);
    stage_world_close(w);
}

/* ---- peers that do not serve ------------------------------------------------------------------- */

static const kvf_engine_spec five = {.struct_size = sizeof five,
                                     .tp_size = 5,
                                     .all = {.tokens_per_block = 16, .block_count = 100, .order = "L|BPHN"}};

/* Stops every rank of P but the last as soon as it has lent slots, and before it has read what is asked of it. */
static bool have_four_stopped(void *context) {
    stage_world *w = context;
    uint32_t stopped = 0;
    for (uint32_t i = 0; i < 4; i++) {
        w->p[i].stands_still = w->p[i].stands_still || stage_info_of(w->p[i].stage).slots_lent > 0;
        stopped += w->p[i].stands_still;
    }
    return stopped == 4;
}

typedef struct part {
    kvf_move *move;
    uint32_t source;
    uint64_t bytes;
} part;

static bool is_there(void *context) {
    const part *wanted = context;
    return kvf_move_packed(wanted->move, wanted->source) == wanted->bytes;
}

/* D reads from five ranks of P, and the owner of the memory serves reads. Four ranks lend as many slots as D has, and
 * serve nothing: D keeps slots for the fifth. */
static void slots_are_left_for_peers_that_serve(void **state) {
    (void)state;
    stage_world *w = stage_world_open(
        "messages", &(stage_pair){attention(2, 5, 32),
                                  &scene_d,
                                  &five,
                                  600,
                                  {.arena_bytes = 16 * SLOT, .slot_bytes = SLOT, .stall_ns = 1000 * SECOND}});
    const kvf_move_options options = {.struct_size = sizeof options, .way = KVF_WAY_PACKED};
    kvf_plan *plan = plan_of(&w->engines, 0);
    kvf_request *request = request_of(plan);
    set_sequences(request, &w->d_sequence, &w->p_sequence);
    cell_rank before;
    rank_copy(&before, &w->d[0].cells);
    w->p[4].stands_still = true;
    kvf_move *move = NULL;
    assert_ok(kvf_stage_pull(w->d[0].stage, request, w->d[0].peers, &options, &move));
    stage_world_work_until(w, have_four_stopped, w);
    for (int i = 0; i < 100; i++)
        (void)stage_world_work(w);
    w->p[4].stands_still = false;
    part last = {move, 4, kvf_request_bytes(request, 4)};
    assert_true(last.bytes > 8 * SLOT);
    stage_world_work_until(w, is_there, &last);
    for (uint32_t i = 0; i < 4; i++)
        w->p[i].stands_still = false;
    assert_ok(stage_world_finish(w, move));
    kvf_move_free(move);
    assert_int_equal(stage_world_wrong_bytes(&w->d[0], &before, 5), 0);
    rank_close(&before);
    kvf_request_free(request);
    kvf_plan_free(plan);
    stage_world_close(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_that_peers_keep_go_to_flows_that_have_none),
        cmocka_unit_test(slots_of_a_peer_that_does_not_stop_are_free_in_the_end),
        cmocka_unit_test(a_return_of_no_slot_gives_a_peer_no_more_time),
        cmocka_unit_test(slots_of_which_peers_cannot_be_told_go_to_flows_that_have_none),
        cmocka_unit_test(flows_of_peers_that_read_no_message_end_when_they_have_stalled),
        cmocka_unit_test(a_peer_that_keeps_slots_that_nobody_waits_for_is_left_alone),
        cmocka_unit_test(the_flow_that_has_waited_longest_for_its_first_slot_is_first),
        cmocka_unit_test(a_slot_for_one_flow_of_a_peer_ends_the_waiting_of_all),
        cmocka_unit_test(a_slot_into_which_its_keeper_is_in_the_middle_of_a_copy_goes_to_nobody_else),
        cmocka_unit_test(slots_are_left_for_peers_that_serve),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
