/*
 * A peer that leaves a stage and joins it again, while we stay joined: it has forgotten the flows from before, and what
 * we sent in between is lost. Neither may keep a flow, a slot, or a connection for good.
 */
#include "faulty_fabric.h"
#include "stage/ways.h"
#include "stage_scene.h"
#include "transport/transport.h"

#define SLOT 4096u
#define SECOND 1000000000ull
#define DOUBT (10 * SECOND)

static stage_scene scene_open(void) {
    return stage_scene_open(
        "inproc", attention(2, 2, 32), 600,
        (kvf_stage_options){
            .arena_bytes = 32 * SLOT, .slot_bytes = SLOT, .stall_ns = 1000 * SECOND, .doubt_ns = DOUBT});
}

static void work(const stage_scene *s) {
    for (int i = 0; i < 20; i++)
        (void)stage_world_work(s->w);
}

static void pass(const stage_scene *s, uint64_t ns) {
    s->w->now_ns += ns;
    work(s);
}

static void pull_all(const stage_scene *s) {
    kvf_move *move = stage_scene_begin(s, KVF_READ, 0);
    assert_ok(stage_world_finish(s->w, move));
    kvf_move_free(move);
    assert_int_equal(stage_world_wrong_bytes(s->d, &s->before, 5), 0);
}

static void a_reader_goes_on_after_its_opening_and_its_end_were_lost(void **state) {
    (void)state;
    stage_scene s = scene_open();
    kvf_stage_leave(s.p->stage, s.p->peers[0]);
    kvf_move *move = stage_scene_begin(&s, KVF_READ, 0);
    work(&s);
    assert_int_equal(s.p->events, 1); /* the opening */
    kvf_move_free(move);
    work(&s);
    assert_int_equal(s.p->events, 2); /* the END */
    assert_int_equal(stage_info_of(s.d->stage).flows, 1);
    assert_false(kvf_stage_peer_moves(s.d->stage, s.d->peers[0])); /* an idle session may end */
    assert_ok(kvf_stage_join(s.p->stage, s.p->peers[0]));
    kvf_move *next = stage_scene_begin(&s, KVF_READ, 0); /* one flow is open until P has accepted one */
    work(&s);
    assert_int_equal(stage_info_of(s.d->stage).flows, 2);
    pass(&s, SECOND / 4);
    assert_ok(stage_world_finish(s.w, next));
    kvf_move_free(next);
    assert_int_equal(stage_world_wrong_bytes(s.d, &s.before, 5), 0);
    stage_world_settle(s.w);
    assert_stage_idle(s.d->stage);
    assert_int_equal(s.p->events, 2);
    stage_scene_close(&s);
}

/* While P is away, each pause before the END is repeated is twice as long as the one before. */
static void an_end_is_repeated_after_pauses_that_double(void **state) {
    (void)state;
    stage_scene s = scene_open();
    kvf_stage_leave(s.p->stage, s.p->peers[0]);
    kvf_move *move = stage_scene_begin(&s, KVF_READ, 0);
    work(&s);
    kvf_move_free(move);
    work(&s);
    uint32_t heard = 2;
    for (uint64_t pause = SECOND / 4; pause <= 32 * SECOND; pause *= 2) {
        const uint64_t longest = pause < 8 * SECOND ? pause : 8 * SECOND;
        pass(&s, longest - 1);
        assert_int_equal(s.p->events, heard);
        pass(&s, 1);
        assert_int_equal(s.p->events, ++heard);
    }
    kvf_stage_leave(s.d->stage, s.d->peers[0]); /* nothing is left when D leaves, too */
    work(&s);
    assert_stage_idle(s.d->stage);
    stage_scene_close(&s);
}

/* P pushes, and leaves with D's slots. D, which does not hear that, ends the flow, and P does not hear this. Once P has
 * joined again, it answers that it does not know the flow. What it had under way when it left may still arrive: the
 * slots are in doubt for as long as those of a peer that has left. */
static void slots_that_a_writer_has_forgotten_come_back(void **state) {
    (void)state;
    stage_scene s = scene_open();
    s.p->is_deaf = true;
    kvf_move *move = stage_scene_begin(&s, KVF_WRITE, 0);
    work(&s);
    s.p->is_deaf = false;
    const uint32_t lent = stage_info_of(s.d->stage).slots_lent;
    assert_true(lent > 0);
    s.d->is_deaf = true;
    kvf_stage_leave(s.p->stage, s.p->peers[0]);
    work(&s);
    s.d->is_deaf = false;
    assert_fails(kvf_move_status(move), KVF_E_PEER_LOST, "has left");
    kvf_move_free(move);
    kvf_stage_stop(s.d->stage, s.d->peers[0]);
    work(&s);
    assert_int_equal(s.p->events, 1); /* D's END, while P has not joined */
    assert_ok(kvf_stage_join(s.p->stage, s.p->peers[0]));
    pass(&s, SECOND / 4);
    assert_int_equal(stage_info_of(s.d->stage).slots_doubt, lent);
    pass(&s, DOUBT - 1);
    assert_int_equal(stage_info_of(s.d->stage).slots_doubt, lent);
    pass(&s, 1);
    assert_stage_idle(s.d->stage);
    pull_all(&s);
    stage_scene_close(&s);
}

#define LATE (7 * SECOND)

/* The mover leaves with slots, or forgets them: its writes may be on their way in a network that cannot be told to drop them.
 * What it reads late it does not take. */
static void slots_stay_in_doubt_while_writes_may_arrive_that_cannot_be_stopped(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        const kvf_direction direction = i > 0 ? KVF_WRITE : KVF_READ;
        faulty_install(&(faulty_options){.late_ns = LATE});
        stage_scene s = scene_open();
        stage_end *mover = i > 0 ? s.p : s.d, *lender = i > 0 ? s.d : s.p;
        mover->is_deaf = true;
        kvf_move *move = stage_scene_begin(&s, direction, 0);
        work(&s);
        const uint32_t lent = stage_info_of(lender->stage).slots_lent;
        assert_true(lent > 0);
        if (i == 2) { /* as in slots_that_a_writer_has_forgotten_come_back() */
            mover->is_deaf = false;
            lender->is_deaf = true;
            kvf_stage_leave(mover->stage, mover->peers[0]);
            work(&s);
            lender->is_deaf = false;
            kvf_move_free(move);
            kvf_stage_stop(lender->stage, lender->peers[0]);
            work(&s);
            assert_ok(kvf_stage_join(mover->stage, mover->peers[0]));
            pass(&s, SECOND / 4);
        } else {
            kvf_stage_leave(lender->stage, lender->peers[0]);
            kvf_move_free(move);
        }
        assert_int_equal(stage_info_of(lender->stage).slots_doubt, lent);
        pass(&s, DOUBT);
        assert_int_equal(stage_info_of(lender->stage).slots_doubt, direction == KVF_WRITE ? lent : 0);
        pass(&s, LATE - 1);
        assert_int_equal(stage_info_of(lender->stage).slots_doubt, direction == KVF_WRITE ? lent : 0);
        pass(&s, 1);
        assert_int_equal(stage_info_of(lender->stage).slots_doubt, 0);
        mover->is_deaf = false;
        stage_scene_close(&s);
        faulty_remove();
    }
}

/* P answers an END that D has not sent. Without D's END the flow was kept for good when P left. */
static void a_flow_that_was_forgotten_before_its_end_was_said_leaves_nothing(void **state) {
    (void)state;
    stage_scene s = scene_open();
    s.p->is_deaf = true;
    kvf_move *move = stage_scene_begin(&s, KVF_WRITE, 0);
    work(&s);
    assert_true(stage_info_of(s.d->stage).slots_lent > 0);
    const kvf_stage_message forgotten = {
        .word = KVF_STAGE_END, .flow = s.d->stage->first->id, .status = KVF_E_NOT_FOUND};
    unsigned char data[KVF_STAGE_MESSAGE_MAX];
    kvf_stage_stop(s.d->stage, s.d->peers[0]);
    assert_true(kvf_stage_notice(s.d->stage, s.p->name, data, kvf_stage_write_message(&forgotten, data)));
    assert_true(stage_info_of(s.d->stage).slots_doubt > 0);
    kvf_stage_leave(s.d->stage, s.d->peers[0]);
    kvf_move_free(move);
    pass(&s, DOUBT);
    assert_stage_idle(s.d->stage);
    assert_null(s.d->stage->peers);
    stage_scene_close(&s);
}

/* P's slots stay in doubt from the moment when it left first: a process that joins and leaves again and again must not keep
 * them for good. */
static void leaving_again_does_not_begin_the_doubt_anew(void **state) {
    (void)state;
    stage_scene s = scene_open();
    s.p->is_deaf = true;
    kvf_move *move = stage_scene_begin(&s, KVF_WRITE, 0);
    work(&s);
    kvf_stage_leave(s.d->stage, s.d->peers[0]);
    const uint32_t lent = stage_info_of(s.d->stage).slots_doubt;
    assert_true(lent > 0);
    pass(&s, DOUBT - 1);
    assert_ok(kvf_stage_join(s.d->stage, s.d->peers[0]));
    kvf_stage_leave(s.d->stage, s.d->peers[0]);
    assert_int_equal(stage_info_of(s.d->stage).slots_doubt, lent);
    pass(&s, 1);
    assert_int_equal(stage_info_of(s.d->stage).slots_doubt, 0);
    assert_int_equal(stage_info_of(s.d->stage).flows, 0);
    kvf_move_free(move);
    s.p->is_deaf = false;
    stage_scene_close(&s);
}

/* A peer that leaves while messages still reach the other side tells it, so that nothing waits there. */
static void a_peer_that_leaves_says_so(void **state) {
    (void)state;
    stage_scene s = scene_open();
    for (int direction = KVF_READ; direction <= KVF_WRITE; direction++) {
        kvf_move *move = stage_scene_begin(&s, (kvf_direction)direction, 0);
        s.d->is_deaf = direction == KVF_READ; /* so that it cannot end before P leaves */
        s.p->is_deaf = direction == KVF_WRITE;
        (void)stage_world_work(s.w);
        (void)stage_world_work(s.w);
        assert_int_equal(kvf_move_status(move), KVF_IN_PROGRESS);
        s.d->is_deaf = s.p->is_deaf = false;
        stage_end *leaves = direction == KVF_READ ? s.p : s.d;
        kvf_stage_leave(leaves->stage, leaves->peers[0]);
        work(&s);
        assert_fails(kvf_move_status(move), KVF_E_PEER_LOST, "has left");
        kvf_move_free(move);
        assert_ok(kvf_stage_join(leaves->stage, leaves->peers[0]));
        work(&s);
        pass(&s, DOUBT);
        assert_stage_idle(s.d->stage);
        assert_stage_idle(s.p->stage);
    }
    pull_all(&s);
    stage_scene_close(&s);
}

/* ---- a writer that was stopped ------------------------------------------------------------------ */

static bool is_lent(void *context) {
    const kvf_stage_flow *flow = ((const stage_end *)context)->stage->first;
    return flow && !flow->mover && kvf_stage_flow_has(flow, KVF_CREDIT_LENT);
}

static uint32_t in_doubt(const stage_end *end) {
    return stage_info_of(end->stage).slots_doubt;
}

static void pass_doubt(stage_scene *s) {
    s->w->now_ns += 2 * DOUBT;
    for (int i = 0; i < 50; i++)
        (void)stage_world_work(s->w);
}

/* P pushes, and is stopped when it has slots of D, in the middle of a copy into one. */
static stage_scene stopped_open(kvf_move **move) {
    stage_scene s = stage_scene_open(
        "shm", attention(3, 4, 32), 600,
        (kvf_stage_options){
            .arena_bytes = 32 * SLOT, .slot_bytes = SLOT, .stall_ns = 1000 * SECOND, .doubt_ns = DOUBT});
    s.p->is_deaf = true; /* else it returns slots in the turn in which it hears of them */
    *move = stage_scene_begin(&s, KVF_WRITE, 0);
    stage_world_work_until(s.w, is_lent, s.d);
    s.p->is_deaf = false;
    assert_non_null(kvf_peer_enter(s.p->peers[0], s.d->stage->arenas[KVF_MEMORY_HOST].region, KVF_WRITE));
    s.p->stands_still = true;
    return s;
}

/* It goes on, its slots are free, and it may connect again. */
static void stopped_close(stage_scene *s, kvf_move *move) {
    const void *card;
    size_t bytes;
    assert_int_equal(kvf_peer_leave(s->p->peers[0], KVF_WRITE, SLOT), KVF_E_PEER_LOST);
    pass_doubt(s);
    assert_stage_idle(s->d->stage);
    s->p->stands_still = false;
    assert_int_not_equal(stage_world_finish(s->w, move), KVF_OK);
    kvf_move_free(move);
    assert_null(s->p->peers[0]);
    assert_ok(kvf_transport_export(s->d->transport, &card, &bytes));
    assert_ok(kvf_transport_connect(s->p->transport, card, bytes, &s->p->peers[0]));
    assert_ok(kvf_stage_join(s->p->stage, s->p->peers[0]));
    if (!kvf_stage_find_peer(s->d->stage, s->d->peers[0]))
        assert_ok(kvf_stage_join(s->d->stage, s->d->peers[0]));
    move = stage_scene_begin(s, KVF_WRITE, 0);
    assert_ok(stage_world_finish(s->w, move));
    kvf_move_free(move);
    assert_int_equal(stage_world_wrong_bytes(s->d, &s->before, 5), 0);
    stage_scene_close(s);
}

/* Its slots were given to others once their time in doubt was over, and it wrote the rest of its copy then. */
static void slots_stay_in_doubt_while_a_writer_is_stopped_in_the_middle_of_a_copy(void **state) {
    (void)state;
    for (int joins_again = 0; joins_again < 2; joins_again++) {
        kvf_move *move;
        stage_scene s = stopped_open(&move);
        kvf_stage_leave(s.d->stage, s.d->peers[0]);
        if (joins_again) /* by another session of ours, while it stands still */
            assert_ok(kvf_stage_join(s.d->stage, s.d->peers[0]));
        const uint32_t lent = in_doubt(s.d);
        assert_true(lent > 0);
        pass_doubt(&s);
        assert_int_equal(in_doubt(s.d), lent);
        stopped_close(&s, move);
    }
}

/* Otherwise nobody would let it in again. */
static void an_end_of_a_writer_that_is_being_shut_out_frees_no_slot(void **state) {
    (void)state;
    kvf_move *move;
    stage_scene s = stopped_open(&move);
    const kvf_stage_message end = {
        .word = KVF_STAGE_END, .flow = s.d->stage->first->id, .status = KVF_E_CANCELLED};
    unsigned char data[KVF_STAGE_MESSAGE_MAX];
    kvf_stage_leave(s.d->stage, s.d->peers[0]);
    assert_ok(kvf_stage_join(s.d->stage, s.d->peers[0]));
    pass_doubt(&s);
    const uint32_t lent = in_doubt(s.d);
    assert_true(kvf_stage_notice(s.d->stage, s.p->name, data, kvf_stage_write_message(&end, data)));
    assert_int_equal(in_doubt(s.d), lent);
    stopped_close(&s, move);
}

/* It was restarted under its name while the process before stands still. The new one knows nothing of the flow, and
 * says so; and shutting the new one out would not stop the old one. */
static void slots_of_a_stopped_writer_stay_in_doubt_whatever_its_successor_says(void **state) {
    (void)state;
    static unsigned char memory[SLOT];
    const kvf_memory region = {.struct_size = sizeof region, .address = memory, .bytes = sizeof memory};
    kvf_move *move;
    stage_scene s = stopped_open(&move);
    const kvf_transport_options options = {.struct_size = sizeof options, .name = s.p->name};
    kvf_transport *successor;
    kvf_peer *peer;
    const void *card;
    size_t bytes;
    const kvf_stage_message words[] = {
        {.word = KVF_STAGE_END, .flow = s.d->stage->first->id, .status = KVF_E_NOT_FOUND},
        {.word = KVF_STAGE_END, .flow = s.d->stage->first->id, .status = KVF_E_CANCELLED}};
    unsigned char data[KVF_STAGE_MESSAGE_MAX];
    kvf_stage_leave(s.d->stage, s.d->peers[0]);
    const uint32_t lent = in_doubt(s.d);
    assert_true(lent > 0);
    assert_ok(kvf_transport_open("shm", &options, &successor));
    assert_ok(kvf_transport_register(successor, &region, 1));
    assert_ok(kvf_transport_export(successor, &card, &bytes));
    assert_ok(kvf_transport_connect(s.d->transport, card, bytes, &peer));
    assert_ok(kvf_stage_join(s.d->stage, peer));
    for (size_t i = 0; i < COUNT_OF(words); i++)
        assert_true(kvf_stage_notice(s.d->stage, s.p->name, data, kvf_stage_write_message(&words[i], data)));
    pass_doubt(&s);
    assert_int_equal(in_doubt(s.d), lent);
    kvf_stage_leave(s.d->stage, peer);
    kvf_peer_close(peer);
    kvf_transport_close(successor);
    pass_doubt(&s);
    assert_int_equal(in_doubt(s.d), lent);
    stopped_close(&s, move);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_of_a_stopped_writer_stay_in_doubt_whatever_its_successor_says),
        cmocka_unit_test(slots_stay_in_doubt_while_a_writer_is_stopped_in_the_middle_of_a_copy),
        cmocka_unit_test(an_end_of_a_writer_that_is_being_shut_out_frees_no_slot),
        cmocka_unit_test(a_reader_goes_on_after_its_opening_and_its_end_were_lost),
        cmocka_unit_test(an_end_is_repeated_after_pauses_that_double),
        cmocka_unit_test(slots_that_a_writer_has_forgotten_come_back),
        cmocka_unit_test(slots_stay_in_doubt_while_writes_may_arrive_that_cannot_be_stopped),
        cmocka_unit_test(a_flow_that_was_forgotten_before_its_end_was_said_leaves_nothing),
        cmocka_unit_test(leaving_again_does_not_begin_the_doubt_anew),
        cmocka_unit_test(a_peer_that_leaves_says_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
