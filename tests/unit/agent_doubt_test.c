/* Blocks that a peer writes: until when it may write, and when they are free if it may still be writing. */
#include <sys/eventfd.h>
#include <unistd.h>

#include "agent/session.h"
#include "agent/ticket.h"
#include "agent_lease_scene.h"
#include "faulty_fabric.h"

static void withdrawn_blocks_are_in_doubt_until_the_writer_has_stopped(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    lease_meet(&s);
    letters_rule(LETTERS_KEEP, s.d, KVF_MESSAGE_CALL, KVF_CALL_WITHDRAW);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));

    const world_outcome *failed = world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED);
    assert_false(failed->blocks_free);
    assert_int_equal(world_block(s.d, 0, 8), KVF_BLOCK_IN_DOUBT);
    assert_int_equal(world_stats(s.d).blocks_in_doubt_now, 4);
    uint64_t other;
    assert_fails(kvf_agent_pull(s.d, &s.wanted.request, &other), KVF_E_EXISTS, "block 8", "doubt");
    assert_fails(kvf_agent_cancel(s.d, s.ours[0]), KVF_E_NOT_FOUND, "ticket");
    letters_no_rules();
    letters_deliver();

    const world_outcome *free = world_next(&s.w, s.d, s.ours[0]);
    assert_int_equal(free->kind, KVF_EVENT_BLOCKS_FREE);
    assert_true(free->blocks_free);
    assert_int_equal(world_block(s.d, 0, 8), KVF_BLOCK_FREE);
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
    lease_close(&s);
}

/* Its process has ended if it was on this host, and its endpoint did not only refuse us. */
static void blocks_of_a_lost_writer_are_free_at_once_only_if_it_has_ended(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        const bool here = i % 2, lives = i / 2;
        scene s;
        lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
        lease_meet(&s);
        kvf_session *session = s.d->all_sessions;
        assert_true(session->same_host);
        session->same_host = here;
        session->peer_lives = lives;
        session->peer_lost = true;
        kvf_sessions_due(s.d);
        const world_outcome *failed = world_failed(&s.w, s.d, s.ours[0], KVF_E_PEER_LOST);
        assert_int_equal(failed->blocks_free, here && !lives);
        if (!failed->blocks_free)
            assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
        assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
        (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
        lease_close(&s);
    }
}

/* After its time is over. Without late writes nothing is waited for. */
static void blocks_stay_in_doubt_while_writes_may_arrive_that_cannot_be_stopped(void **state) {
    (void)state;
    for (uint64_t late = 0; late <= 9 * SECOND; late += 9 * SECOND) {
        scene s;
        faulty_install(&(faulty_options){.late_ns = late});
        lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
        s.held.request.way = s.wanted.request.way = KVF_WAY_DIRECT;
        lease_meet(&s);
        letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_CALL, 0);
        letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_ANSWER, 0);
        assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
        assert_false(world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED)->blocks_free);
        const uint64_t until = kvf_asker_of(s.d->tickets)->sources[0].until;
        assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
        assert_true(world_now() >= until + late);
        assert_true(world_now() < until + late + SECOND);
        letters_no_rules();
        (void)world_next(&s.w, s.p, s.theirs[0]);
        lease_close(&s);
        faulty_remove();
    }
}

static void a_withdrawal_that_was_lost_is_said_again(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    lease_meet(&s);
    const uint32_t met = letters_met();
    letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, KVF_CALL_WITHDRAW);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    assert_false(world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED)->blocks_free);
    world_until(&s.w, letters_met() > met);
    letters_no_rules();
    assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
    (void)world_failed(&s.w, s.p, s.theirs[0],
                       KVF_E_CANCELLED); /* it was told, and did not wait for its deadline */
    lease_close(&s);
}

/* How many WITHDRAWs are sent if one of both sides cancels. */
static uint32_t withdrawals(bool by_the_writer) {
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    lease_meet(&s);
    const uint32_t met = letters_met();
    letters_no_rules();
    letters_rule(LETTERS_PASS, s.d, KVF_MESSAGE_CALL, KVF_CALL_WITHDRAW);
    assert_ok(by_the_writer ? kvf_agent_cancel(s.p, s.theirs[0]) : kvf_agent_cancel(s.d, s.ours[0]));
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED);
    (void)world_next(&s.w, s.p, s.theirs[0]);
    world_run_for(&s.w, 50 * MS);
    const uint32_t sent = letters_met() - met;
    lease_close(&s);
    return sent;
}

static void a_writer_that_said_that_it_stopped_is_not_told_to(void **state) {
    (void)state;
    assert_int_equal(withdrawals(true), 0);
    assert_int_equal(withdrawals(false), 1);
}

/* The consumer has no stage, and finds that out before it asks: in a round, and when the engine is met in the call. */
static void what_a_writer_was_not_asked_for_is_not_withdrawn(void **state) {
    (void)state;
    scene s;
    kvf_agent_options options = *LEASE(20 * SECOND);
    options.way = KVF_WAY_DIRECT;
    lease_open(&s, ONE("P"), ONE("D"), &options);
    s.wanted.request.way = KVF_WAY_PACKED;
    letters_rule(LETTERS_PASS, s.d, KVF_MESSAGE_CALL, KVF_CALL_WITHDRAW);
    for (int i = 0; i < 2; i++) {
        world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
        assert_true(world_failed(&s.w, s.d, s.ours[0], KVF_E_UNSUPPORTED)->blocks_free);
        world_run_for(&s.w, 50 * MS);
    }
    assert_int_equal(letters_met(), 0);
    lease_close(&s);
}

/* Writes begin late, and ignore cancels. */
static void a_withdrawal_is_answered_when_nothing_is_written_any_more(void **state) {
    (void)state;
    uint32_t doubted = 0;
    for (uint32_t seed = 0; seed < 8; seed++) {
        scene s;
        faulty_install(&(faulty_options){
            .seed = seed, .per_mille = {[FAULTY_LATE_START] = 1000, [FAULTY_DEAF] = 1000}, .turns = 2000});
        lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
        lease_meet(&s);
        world_ready(&s.w.p, s.theirs);
        world_until(&s.w, faulty_count(FAULTY_LATE_START) > 0);
        assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
        const world_outcome *end = world_next(&s.w, s.d, s.ours[0]);
        if (!end->blocks_free) {
            doubted++;
            assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
        }
        world_fill(&s.w, &s.w.d, &s.wanted, 7);
        world_run_for(&s.w, 50 * MS);
        assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 7), 0);
        lease_close(&s);
        faulty_remove();
    }
    assert_true(doubted > 0);
}

/* The same where the writer's own engine cancels. */
static void a_writer_that_gives_up_says_so_when_nothing_is_written_any_more(void **state) {
    (void)state;
    scene s;
    faulty_install(
        &(faulty_options){.per_mille = {[FAULTY_LATE_START] = 1000, [FAULTY_DEAF] = 1000}, .turns = 2000});
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    lease_meet(&s);
    world_ready(&s.w.p, s.theirs);
    world_until(&s.w, faulty_count(FAULTY_LATE_START) > 0);
    const uint64_t begun = world_now();
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    assert_int_equal(world_stats(s.p).failed[KVF_REQUEST_PUSH], 0); /* a write is still under way */
    assert_true(world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED)->blocks_free);
    assert_true(world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED)->blocks_free);
    assert_true(world_now() - begun < SECOND); /* long before the lease is over */
    world_fill(&s.w, &s.w.d, &s.wanted, 7);
    world_run_for(&s.w, 50 * MS);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 7), 0);
    lease_close(&s);
    faulty_remove();
}

/* P has written a little of a slow push when it forgets the session. */
static void forgotten_while_written(scene *s) {
    lease_open(s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    s->held.request.bytes_per_second = 1000;
    s->held.request.way = KVF_WAY_DIRECT;
    lease_meet(s);
    world_ready(&s->w.p, s->theirs);
    world_run_for(&s->w, SECOND);
    kvf_session_retire(s->p->all_sessions);
}

/* The blocks of D are free: another request may have them. */
static void nothing_is_written_any_more(scene *s) {
    world_fill(&s->w, &s->w.d, &s->wanted, 7);
    world_run_for(&s->w, 5 * SECOND);
    assert_int_equal(world_wrong_cells(&s->w, &s->w.d, &s->wanted, 7), 0);
    (void)world_failed(&s->w, s->p, s->theirs[0], KVF_E_PEER_LOST);
    lease_close(s);
}

static void a_writer_that_has_forgotten_the_session_is_shut_out_when_it_answers_a_withdrawal(void **state) {
    (void)state;
    scene s;
    forgotten_while_written(&s);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    assert_false(world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED)->blocks_free);
    const uint64_t until = kvf_asker_of(s.d->tickets)->sources[0].until;
    assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
    assert_true(world_now() < until);
    nothing_is_written_any_more(&s);
}

/* It says that it has stopped, but its connection was another then, and may have left something on its way. */
static void the_word_of_a_writer_that_has_lost_its_connection_is_not_enough(void **state) {
    (void)state;
    scene s;
    faulty_install(&(faulty_options){.late_ns = 9 * SECOND});
    forgotten_while_written(&s);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    assert_false(world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED)->blocks_free);
    const uint64_t until = kvf_asker_of(s.d->tickets)->sources[0].until;
    assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
    assert_true(world_now() >= until + 9 * SECOND);
    nothing_is_written_any_more(&s);
    faulty_remove();
}

static void a_writer_that_no_longer_knows_an_expectation_is_shut_out(void **state) {
    (void)state;
    scene s;
    forgotten_while_written(&s);
    s.d->all_sessions->next_beat = 0;
    kvf_agent_due(s.d, 0);
    assert_true(world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT)->blocks_free);
    nothing_is_written_any_more(&s);
}

/* P has not begun to write when it forgets the session: nothing that D could shut out is there yet. */
static void a_writer_that_has_forgotten_the_session_does_not_begin_to_write(void **state) {
    (void)state;
    for (int pushed = 0; pushed < 2; pushed++) {
        scene s;
        lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
        s.held.request.way = s.wanted.request.way = KVF_WAY_DIRECT;
        if (pushed)
            world_push(&s.w.p, &s.held, s.theirs);
        world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
        world_run_for(&s.w, SECOND);
        kvf_session_retire(s.p->all_sessions);
        s.d->all_sessions->next_beat = 0;
        kvf_agent_due(s.d, 0);
        assert_true(world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT)->blocks_free);
        world_fill(&s.w, &s.w.d, &s.wanted, 7);
        if (!pushed)
            world_push(&s.w.p, &s.held, s.theirs);
        (void)kvf_agent_push_ready(s.p, s.theirs[0], NULL);
        world_run_for(&s.w, 5 * SECOND);
        assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 7), 0);
        if (!pushed)
            assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
        (void)world_failed(&s.w, s.p, s.theirs[0], pushed ? KVF_E_PEER_LOST : KVF_E_CANCELLED);
        lease_close(&s);
    }
}

/* It has written everything before D hears that it has forgotten the session, but cannot say so. */
static void a_push_in_a_session_that_was_forgotten_has_failed(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    s.held.request.bytes_per_second = 40000; /* 51,200 bytes */
    s.held.request.way = KVF_WAY_DIRECT;
    lease_meet(&s);
    world_ready(&s.w.p, s.theirs);
    world_run_for(&s.w, SECOND);
    kvf_session_retire(s.p->all_sessions);
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_PEER_LOST);
    assert_true(world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT)->blocks_free);
    lease_close(&s);
}

static void a_withdrawal_leaves_alone_what_else_the_writer_writes(void **state) {
    (void)state;
    scene s;
    world_request wanted;
    uint64_t ours[WORLD_MAX_RANKS];
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    s.held.request.bytes_per_second = 10000;
    s.held.request.way = KVF_WAY_DIRECT;
    lease_meet(&s);
    world_ready(&s.w.p, s.theirs);
    world_request_make(&s.w, &s.w.d, "b", 50, 40, 1, &wanted);
    world_expect(&s.w.d, &wanted, &s.w.p, ours);
    world_run_for(&s.w, SECOND);
    assert_ok(kvf_agent_cancel(s.d, ours[0]));
    assert_false(world_failed(&s.w, s.d, ours[0], KVF_E_CANCELLED)->blocks_free);
    assert_int_equal(world_next(&s.w, s.d, ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    lease_close(&s);
}

/* The consumer tries again with other blocks, and the producer, which has not heard of the withdrawal, begins to push: it
 * may write the first blocks, too, which are in doubt until it has. */
static void a_request_that_is_expected_anew_while_it_is_withdrawn_is_written_to_both(void **state) {
    (void)state;
    for (int pushed_first = 0; pushed_first < 2; pushed_first++) {
        scene s;
        world_request anew;
        uint64_t ours[WORLD_MAX_RANKS];
        lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
        if (pushed_first)
            world_push(&s.w.p, &s.held, s.theirs);
        world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
        world_run_for(&s.w, SECOND);
        letters_rule(LETTERS_KEEP, s.d, KVF_MESSAGE_CALL, KVF_CALL_WITHDRAW);
        assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
        assert_false(world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED)->blocks_free);
        world_request_make(&s.w, &s.w.d, "a", 50, 40, 1, &anew);
        world_expect(&s.w.d, &anew, &s.w.p, ours);
        world_run_for(&s.w, SECOND);
        assert_int_equal(world_block(s.d, 0, 8), KVF_BLOCK_IN_DOUBT);
        if (!pushed_first)
            world_push(&s.w.p, &s.held, s.theirs);
        world_ready(&s.w.p, s.theirs);
        world_all_done(&s.w, &s.w.d, ours);
        assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &anew, 1), 0);
        letters_no_rules();
        letters_deliver();
        assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
        world_all_done(&s.w, &s.w.p, s.theirs);
        world_fill(&s.w, &s.w.d, &s.wanted, 7);
        world_run_for(&s.w, SECOND);
        assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 7), 0);
        lease_close(&s);
    }
}

static void a_request_that_was_withdrawn_before_its_push_is_written_when_it_is_expected_anew(void **state) {
    (void)state;
    scene s;
    world_request anew;
    uint64_t ours[WORLD_MAX_RANKS];
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, SECOND);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    world_request_make(&s.w, &s.w.d, "a", 50, 40, 1, &anew);
    world_expect(&s.w.d, &anew, &s.w.p, ours);
    world_push(&s.w.p, &s.held, s.theirs);
    world_ready(&s.w.p, s.theirs);
    world_all_done(&s.w, &s.w.d, ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &anew, 1), 0);
    lease_close(&s);
}

/* The push is over with the withdrawal of its only consumer. */
static void a_request_whose_push_was_withdrawn_from_is_not_waited_for_when_it_is_expected_anew(void **state) {
    (void)state;
    scene s;
    world_request anew;
    uint64_t ours[WORLD_MAX_RANKS];
    kvf_agent_options options = *LEASE(20 * SECOND);
    options.remember_ns = 60 * SECOND;
    lease_open(&s, ONE("P"), ONE("D"), &options);
    lease_meet(&s);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
    world_request_make(&s.w, &s.w.d, "a", 50, 40, 1, &anew);
    world_expect(&s.w.d, &anew, &s.w.p, ours);
    const uint64_t begun = world_now();
    const world_outcome *failed = world_failed(&s.w, s.d, ours[0], KVF_E_NOT_FOUND);
    assert_true(failed->blocks_free);
    assert_true(world_now() - begun < SECOND);
    lease_close(&s);
}

/* Nobody but the transport knows then whether its last writes have arrived. */
static void a_writer_that_gives_up_as_its_connection_is_lost_does_not_claim_to_have_stopped(void **state) {
    (void)state;
    for (int lost = 0; lost < 2; lost++) {
        scene s;
        lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
        lease_meet(&s);
        s.p->all_sessions->peer_lost = lost;
        assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
        s.p->all_sessions->peer_lost = false;
        (void)world_failed(&s.w, s.d, s.ours[0], lost ? KVF_E_PEER_LOST : KVF_E_CANCELLED);
        (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
        lease_close(&s);
    }
}

/* The connection was closed by this side, or was that of another session to the same rank. */
static void a_writer_whose_connection_ends_under_its_writes_does_not_claim_to_have_stopped(void **state) {
    (void)state;
    scene s;
    faulty_install(&(faulty_options){.per_mille = {[FAULTY_LATE_START] = 1000}, .turns = 100000});
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    s.held.request.way = KVF_WAY_DIRECT;
    lease_meet(&s);
    world_ready(&s.w.p, s.theirs);
    world_until(&s.w, faulty_count(FAULTY_LATE_START) > 0);
    assert_ok(kvf_agent_lock(s.p));
    kvf_work_take(s.p);
    assert_true(kvf_session_carries(s.p->all_sessions)); /* so it is not evicted as idle meanwhile */
    kvf_session_disconnect(s.p->all_sessions);
    kvf_work_give(s.p);
    kvf_agent_unlock(s.p);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_PEER_LOST);
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
    lease_close(&s);
    faulty_remove();
}

/* A push of D goes over the connection that D's session for its pulls made, which its stage knows first. */
static void
a_pull_leaves_a_connection_that_is_behind_only_if_no_push_of_another_session_uses_it(void **state) {
    (void)state;
    scene s;
    world_request pushed, expected, other_held, other;
    uint64_t pushes[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS], holds[WORLD_MAX_RANKS],
        pulls[WORLD_MAX_RANKS];
    const kvf_ready_event event = {
        .struct_size = sizeof event, .kind = KVF_READY_FD, .fd = eventfd(0, EFD_CLOEXEC)};
    faulty_install(&(faulty_options){.seed = 1});
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    world_hold(&s.w.p, &s.held, s.theirs);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    world_request_make(&s.w, &s.w.d, "b", 50, 20, 1, &pushed);
    world_request_make(&s.w, &s.w.p, "b", 50, 24, 1, &expected);
    world_request_make(&s.w, &s.w.p, "c", 50, 30, 1, &other_held);
    world_request_make(&s.w, &s.w.d, "c", 50, 34, 1, &other);
    world_fill(&s.w, &s.w.d, &pushed, 2);
    world_fill(&s.w, &s.w.p, &other_held, 3);
    other.request.after =
        &event; /* it begins when something is on its way, during which the network stands still */
    world_hold(&s.w.p, &other_held, holds);
    world_pull(&s.w.d, &other, &s.w.p, pulls);
    world_expect(&s.w.p, &expected, &s.w.d, expects);
    world_push(&s.w.d, &pushed, pushes);
    world_run_for(&s.w, SECOND);
    faulty_install(&(faulty_options){.seed = 1, .per_mille = {[FAULTY_LATE_START] = 1000}, .turns = 2000});
    world_ready(&s.w.d, pushes);
    world_until(&s.w, faulty_count(FAULTY_LATE_START) > 0);
    faulty_install(&(faulty_options){.seed = 1, .per_mille = {[FAULTY_BEHIND] = 1000}});
    assert_int_equal(write(event.fd, &(uint64_t){1}, sizeof(uint64_t)), sizeof(uint64_t));
    world_all_done(&s.w, &s.w.d, pushes);
    world_all_done(&s.w, &s.w.p, expects);
    world_all_done(&s.w, &s.w.d, pulls);
    world_all_done(&s.w, &s.w.p, holds);
    assert_true(faulty_count(FAULTY_BEHIND) > 0);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.p, &expected, 2), 0);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &other, 3), 0);
    (void)close(event.fd);
    lease_close(&s);
    faulty_remove();
}

/* D pulls over the connection that it made to push, and then is to push by another transport, of which there is none. */
static void
a_push_leaves_a_connection_to_be_passed_over_once_no_pull_of_another_session_uses_it(void **state) {
    (void)state;
    scene s;
    world_request pushed, expected;
    uint64_t pushes[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS];
    faulty_install(&(faulty_options){.seed = 1});
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    for (int second = 0; second < 2; second++) {
        world_request_make(&s.w, &s.w.d, second ? "c" : "b", 50, 20, 1, &pushed);
        world_request_make(&s.w, &s.w.p, second ? "c" : "b", 50, 24, 1, &expected);
        pushed.request.way = expected.request.way = KVF_WAY_PACKED;
        world_expect(&s.w.p, &expected, &s.w.d, expects);
        world_push(&s.w.d, &pushed, pushes);
        if (!second) {
            world_ready(&s.w.d, pushes);
            world_all_done(&s.w, &s.w.d, pushes);
            world_all_done(&s.w, &s.w.p, expects);
        }
    }
    kvf_session *session = s.d->all_sessions;
    while (session && !session->incoming)
        session = session->next;
    assert_non_null(session);
    const char *kind = kvf_peer_kind(session->peer);
    faulty_install(&(faulty_options){.seed = 1, .per_mille = {[FAULTY_LATE_START] = 1000}, .turns = 2000});
    world_hold(&s.w.p, &s.held, s.theirs);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, faulty_count(FAULTY_LATE_START) > 0);
    faulty_install(&(faulty_options){.seed = 1});
    session->past = kind;
    world_ready(&s.w.d, pushes);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    (void)world_failed(&s.w, s.d, pushes[0], KVF_E_UNSUPPORTED);
    (void)world_failed(&s.w, s.p, expects[0], KVF_E_UNSUPPORTED);
    lease_close(&s);
    faulty_remove();
}

static bool may_connect(const kvf_agent *from, const kvf_agent *to) {
    kvf_peer *peer = NULL;
    const kvf_status status = kvf_transport_connect(from->transport, to->card, to->card_bytes, &peer);
    kvf_peer_close(peer);
    return status == KVF_OK;
}

/* Its process has ended, as the transport has it, and the kernel has not yet cleared it away. */
static void a_writer_that_has_ended_is_kept_out_until_its_last_write_is_over(void **state) {
    (void)state;
    scene s;
    faulty_install(&(faulty_options){.seed = 1});
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    lease_meet(&s);
    assert_true(may_connect(s.p, s.d));
    faulty_install(&(faulty_options){.seed = 1, .per_mille = {[FAULTY_STILL_INSIDE] = 1000}});
    s.d->all_sessions->peer_lost = true;
    kvf_sessions_due(s.d);
    assert_false(world_failed(&s.w, s.d, s.ours[0], KVF_E_PEER_LOST)->blocks_free);
    world_run_for(&s.w, SECOND);
    assert_int_equal(world_block(s.d, 0, 8), KVF_BLOCK_IN_DOUBT);
    assert_false(may_connect(s.p, s.d));
    faulty_install(&(faulty_options){.seed = 1});
    const uint64_t over = world_now();
    assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
    assert_true(world_now() - over <= 5 * MS);
    assert_true(may_connect(s.p, s.d));
    (void)kvf_agent_cancel(s.p, s.theirs[0]);
    (void)world_next(&s.w, s.p, s.theirs[0]);
    lease_close(&s);
    faulty_remove();
}

static void a_writer_that_has_forgotten_the_session_is_kept_out_until_its_last_write_is_over(void **state) {
    (void)state;
    scene s;
    faulty_install(&(faulty_options){.seed = 1});
    forgotten_while_written(&s);
    faulty_install(&(faulty_options){.seed = 1, .per_mille = {[FAULTY_STILL_INSIDE] = 1000}});
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    assert_false(world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED)->blocks_free);
    world_run_for(&s.w, SECOND);
    assert_int_equal(world_block(s.d, 0, 8), KVF_BLOCK_IN_DOUBT);
    assert_false(may_connect(s.p, s.d));
    faulty_install(&(faulty_options){.seed = 1});
    assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
    assert_true(may_connect(s.p, s.d));
    nothing_is_written_any_more(&s);
    faulty_remove();
}

/* P has heard the expectation, writes, and loses the session with the push. It refuses the copy in the next session: that
 * says nothing of what it has written before. */
static void a_writer_whose_answer_was_lost_with_the_session_is_kept_out_although_it_refuses(void **state) {
    (void)state;
    scene s;
    kvf_agent_options options = *LEASE(20 * SECOND);
    options.remember_ns = 60 * SECOND;
    faulty_install(&(faulty_options){.seed = 1});
    lease_open(&s, ONE("P"), ONE("D"), &options);
    s.held.request.bytes_per_second = 1000;
    s.held.request.way = KVF_WAY_DIRECT;
    letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_ANSWER, KVF_CALL_EXPECT);
    world_push(&s.w.p, &s.held, s.theirs);
    world_ready(&s.w.p, s.theirs);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, SECOND);
    letters_no_rules();
    world_lose(s.p, world_session(s.p, true));
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_PEER_LOST);
    faulty_install(&(faulty_options){.seed = 1, .per_mille = {[FAULTY_STILL_INSIDE] = 1000}});
    assert_false(world_failed(&s.w, s.d, s.ours[0], KVF_E_NOT_FOUND)->blocks_free);
    world_run_for(&s.w, SECOND);
    assert_int_equal(world_block(s.d, 0, 8), KVF_BLOCK_IN_DOUBT);
    faulty_install(&(faulty_options){.seed = 1});
    assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
    lease_close(&s);
    faulty_remove();
}

/* D has lost P, and met it again for another request, by the time that P has written everything. */
static void a_push_that_ends_after_its_consumer_has_given_it_up_has_failed(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    s.held.request.bytes_per_second = 20000; /* 51,200 bytes */
    s.held.request.way = KVF_WAY_DIRECT;
    lease_meet(&s);
    world_ready(&s.w.p, s.theirs);
    world_run_for(&s.w, SECOND);
    world_lose(s.d, world_session(s.d, false));
    assert_false(world_failed(&s.w, s.d, s.ours[0], KVF_E_PEER_LOST)->blocks_free);
    lease_others_go_on(&s, "b");
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
    assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
    lease_close(&s);
}

static void count_line(void *context, const kvf_log_line *line) {
    *(uint32_t *)context += strstr(line->text, "the schedule says so") != NULL;
}

/* It was stopped in the middle of a write. */
static void a_writer_whose_time_is_over_is_kept_out_until_its_last_write_is_over(void **state) {
    (void)state;
    scene s;
    uint32_t lines = 0;
    kvf_agent_options options = *LEASE(500 * MS);
    options.log = count_line;
    options.log_context = &lines;
    faulty_install(&(faulty_options){.seed = 1});
    lease_open(&s, ONE("P"), ONE("D"), &options);
    lease_meet(&s);
    kvf_agent *stopped = lease_stop(&s.w.p.agents[0]);
    faulty_install(&(faulty_options){.seed = 1, .per_mille = {[FAULTY_STILL_INSIDE] = 1000}});
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    assert_false(world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED)->blocks_free);
    world_run_for(&s.w, 3 * SECOND);
    assert_int_equal(world_block(s.d, 0, 8), KVF_BLOCK_IN_DOUBT);
    assert_false(may_connect(s.p, s.d));
    assert_int_equal(lines, 1); /* said once, however often the transport was asked */
    faulty_install(&(faulty_options){.seed = 1});
    const uint64_t over = world_now();
    assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
    assert_true(world_now() - over <= 250 * MS);
    assert_true(may_connect(s.p, s.d));
    s.w.p.agents[0] = stopped;
    (void)world_next(&s.w, s.p, s.theirs[0]);
    lease_close(&s);
    faulty_remove();
}

static void without_a_word_from_the_writer_doubt_ends_with_its_time(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(500 * MS));
    lease_meet(&s);
    letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, 0);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    assert_false(world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED)->blocks_free);
    assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
    (void)world_failed(&s.w, s.p, s.theirs[0],
                       KVF_E_TIMEOUT); /* the writer has noticed, and stopped earlier */
    lease_close(&s);
}

/* The first call of the session has not arrived when another request is withdrawn, whose EXPECT was answered. */
static void a_withdrawal_ends_no_call_of_another_request(void **state) {
    (void)state;
    scene s;
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    world_request_make(&s.w, &s.w.p, "b", 50, 30, 1, &held);
    world_request_make(&s.w, &s.w.d, "b", 50, 40, 1, &wanted);
    world_fill(&s.w, &s.w.p, &held, 5);
    world_hold(&s.w.p, &held, theirs);
    letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, KVF_CALL_ACQUIRE);
    world_pull(&s.w.d, &wanted, &s.w.p, ours);
    world_until(&s.w, letters_met() >= 1);
    assert_int_equal(s.d->all_sessions->next_number, 1);
    world_push(&s.w.p, &s.held, s.theirs);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, s.p->all_sessions->seen_highest >= 3); /* JOIN and EXPECT */
    world_run_for(&s.w, 10 * MS);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED);
    assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
    letters_no_rules();
    world_all_done(&s.w, &s.w.d, ours);
    world_all_done(&s.w, &s.w.p, theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &wanted, 5), 0);
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
    lease_close(&s);
}

static void a_writer_that_was_stopped_writes_nothing_when_it_wakes(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(500 * MS));
    lease_meet(&s);
    kvf_agent *stopped = lease_stop(&s.w.p.agents[0]);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    assert_false(world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED)->blocks_free);
    assert_int_equal(world_block(s.d, 0, 8), KVF_BLOCK_IN_DOUBT);
    const uint64_t until = kvf_asker_of(s.d->tickets)->sources[0].until;
    assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
    assert_int_equal(world_now(), until + 250 * MS); /* a margin, and no more */
    world_fill(&s.w, &s.w.d, &s.wanted, 7);

    s.w.p.agents[0] = stopped;
    world_ready(&s.w.p, s.theirs);
    world_run_for(&s.w, 100 * MS);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 7), 0);
    (void)kvf_agent_cancel(s.p, s.theirs[0]);
    (void)world_next(&s.w, s.p, s.theirs[0]);
    lease_others_go_on(&s, "b");
    lease_close(&s);
}

/* Lets two expectations of one session wait for `ns`, much longer than their lease. */
static void expect_two_for(scene *s, world_request *held, world_request *wanted, uint64_t theirs[],
                           uint64_t ours[], uint64_t ns) {
    lease_open(s, ONE("P"), ONE("D"), LEASE(500 * MS));
    world_request_make(&s->w, &s->w.p, "b", 50, 30, 1, held);
    world_request_make(&s->w, &s->w.d, "b", 50, 40, 1, wanted);
    world_fill(&s->w, &s->w.p, held, 5);
    lease_meet(s);
    world_push(&s->w.p, held, theirs);
    world_expect(&s->w.d, wanted, &s->w.p, ours);
    world_run_for(&s->w, ns);
}

static void expectations_are_written_long_after_their_first_lease(void **state) {
    (void)state;
    scene s;
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    expect_two_for(&s, &held, &wanted, theirs, ours, 5 * SECOND);
    world_ready(&s.w.p, s.theirs);
    world_ready(&s.w.p, theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.d, ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    world_all_done(&s.w, &s.w.p, theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &wanted, 5), 0);
    lease_close(&s);
}

/* The blocks are free by then: a heartbeat gives the writer only one more lease. */
static void parts_that_are_ready_a_lease_after_the_last_heartbeat_are_not_written(void **state) {
    (void)state;
    scene s;
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    expect_two_for(&s, &held, &wanted, theirs, ours, 5 * SECOND);
    letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, 0);
    kvf_agent *stopped = lease_stop(&s.w.p.agents[0]); /* it does not notice that time passes */
    world_run_for(&s.w, 1 * SECOND);
    world_fill(&s.w, &s.w.d, &s.wanted, 7);
    world_fill(&s.w, &s.w.d, &wanted, 8);
    s.w.p.agents[0] = stopped;
    world_ready(&s.w.p, s.theirs);
    world_ready(&s.w.p, theirs);
    world_run_for(&s.w, 100 * MS);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 7), 0);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &wanted, 8), 0);
    letters_end();
    for (uint32_t i = 0; i < 2; i++) {
        (void)kvf_agent_cancel(s.d, i ? ours[0] : s.ours[0]);
        (void)kvf_agent_cancel(s.p, i ? theirs[0] : s.theirs[0]);
        (void)world_next(&s.w, s.d, i ? ours[0] : s.ours[0]);
        (void)world_next(&s.w, s.p, i ? theirs[0] : s.theirs[0]);
    }
    world_run_for(&s.w, 2 * SECOND);
    world_close(&s.w);
}

/* What its leases last, as its answers to heartbeats say, is about leases only. */
static void a_producer_with_longer_leases_may_write_no_longer(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(500 * MS));
    world_close_agents(&s.w.p);
    world_open_agents(&s.w.p, LEASE(20 * SECOND));
    s.p = s.w.p.agents[0];
    s.wanted.request.contact = s.w.p.contact;
    lease_meet(&s);
    world_run_for(&s.w, 2 * SECOND); /* some heartbeats */
    assert_in_range(kvf_asker_of(s.d->tickets)->sources[0].until, world_now(), world_now() + 500 * MS);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED);
    assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
    lease_close(&s);
}

/* The writer's time limit is on its own clock, which is known only from an open session. */
static void nobody_is_asked_to_write_before_its_clock_is_known(void **state) {
    (void)state;
    scene s;
    lease_open(&s, TP2, ONE("D"), NULL);
    letters_rule(LETTERS_LOSE, s.w.p.agents[1], KVF_MESSAGE_WELCOME, 0);
    world_push(&s.w.p, &s.held, s.theirs);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, letters_met() >= 1);
    world_run_for(&s.w, 50 * MS);
    uint32_t open = 0, unknown = 0;
    const kvf_session *session;
    DL_FOREACH(s.d->all_sessions, session) {
        if (session->state == KVF_SESSION_OPEN) {
            open++;
            continue;
        }
        unknown++;
        assert_null(session->calls);
    }
    assert_int_equal(open, 1);
    assert_int_equal(unknown, 1);
    letters_no_rules();
    world_ready(&s.w.p, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    lease_close(&s);
}

/* The other one was not asked yet. The withdrawal does not arrive either. */
static void what_one_of_two_writers_sends_packed_is_not_taken_once_nobody_expects_it(void **state) {
    (void)state;
    scene s;
    lease_open(&s, TP2, ONE("D"), NULL);
    s.held.request.way = s.wanted.request.way = KVF_WAY_PACKED;
    s.held.request.bytes_per_second = 20000;
    world_introduce(&s.w.p, s.w.p.agents[1]); /* the consumer meets the engine by this one */
    s.w.p.contact.endpoint = kvf_agent_endpoint(s.w.p.agents[1]);
    letters_rule(LETTERS_LOSE, s.w.p.agents[0], KVF_MESSAGE_WELCOME, 0);
    letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, KVF_CALL_WITHDRAW);
    world_push(&s.w.p, &s.held, s.theirs);
    world_ready(&s.w.p, s.theirs);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 50 * MS);
    const kvf_source *sources = kvf_asker_of(s.d->tickets)->sources;
    assert_true(sources[0].until == 0 && sources[1].until > 0);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    assert_true(world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED)->blocks_free);
    world_fill(&s.w, &s.w.d, &s.wanted, 7);
    world_run_for(&s.w, 5 * SECOND);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 7), 0);
    for (uint32_t r = 0; r < 2; r++) {
        (void)kvf_agent_cancel(s.w.p.agents[r], s.theirs[r]);
        (void)world_next(&s.w, s.w.p.agents[r], s.theirs[r]);
    }
    lease_close(&s);
}

/* The consumer has met its two writers. Each allocation of its engine's call fails once, and some do when the first
 * writer was asked: its flows end in the next round, as the thread that calls may not end them. */
static void packed_blocks_are_in_doubt_until_a_round_has_ended_their_flows(void **state) {
    (void)state;
    scene s;
    memory_count memory;
    uint64_t ticket;
    uint32_t doubted = 0;
    count_memory(&memory);
    lease_open(&s, TP2, ONE("D"), LEASE(20 * SECOND));
    s.wanted.request.way = KVF_WAY_PACKED;
    assert_ok(kvf_agent_connect(s.d, &s.w.p.contact, 0, &ticket));
    assert_int_equal(world_next(&s.w, s.d, ticket)->kind, KVF_EVENT_PEER_READY);
    letters_rule(LETTERS_PASS, s.d, KVF_MESSAGE_CALL, KVF_CALL_EXPECT);
    for (size_t n = 1; memory.calls >= n - 1; n++) {
        const uint32_t before = letters_met();
        memory.calls = 0;
        memory.fail_at = n;
        const kvf_status status = kvf_agent_expect(s.d, &s.wanted.request, &s.ours[0]);
        memory.fail_at = 0;
        const uint32_t asked = letters_met() - before;
        if (status) {
            assert_int_equal(status, KVF_E_NOMEM);
            continue;
        }
        (void)kvf_agent_cancel(s.d, s.ours[0]); /* if nothing has failed */
        const world_outcome *failed = world_next(&s.w, s.d, s.ours[0]);
        assert_int_equal(failed->kind, KVF_EVENT_FAILED);
        if (failed->status == KVF_E_NOMEM) {
            assert_int_equal(failed->blocks_free, asked == 0);
            doubted += asked > 0;
        }
        if (!failed->blocks_free)
            assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
    }
    assert_true(doubted > 0);
    lease_close(&s);
}

static void neither_a_consumer_that_waits_for_its_writer_nor_the_writer_is_idle(void **state) {
    (void)state;
    scene s;
    const kvf_agent_options options = {.struct_size = sizeof options, .idle_ns = SECOND};
    lease_open(&s, ONE("P"), ONE("D"), &options);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 4 * SECOND); /* the first heartbeat comes after five */
    assert_int_equal(world_stats(s.d).peers_evicted, 0);
    assert_int_equal(world_stats(s.p).peers_evicted, 0);
    world_push(&s.w.p, &s.held, s.theirs);
    world_ready(&s.w.p, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    world_run_for(&s.w, 4 * SECOND);
    assert_int_equal(world_stats(s.d).peers_evicted, 1); /* now both are idle */
    assert_int_equal(world_stats(s.p).peers_evicted, 1);
    lease_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(withdrawn_blocks_are_in_doubt_until_the_writer_has_stopped),
        cmocka_unit_test(blocks_of_a_lost_writer_are_free_at_once_only_if_it_has_ended),
        cmocka_unit_test(blocks_stay_in_doubt_while_writes_may_arrive_that_cannot_be_stopped),
        cmocka_unit_test(the_word_of_a_writer_that_has_lost_its_connection_is_not_enough),
        cmocka_unit_test(a_withdrawal_that_was_lost_is_said_again),
        cmocka_unit_test(a_writer_that_said_that_it_stopped_is_not_told_to),
        cmocka_unit_test(what_a_writer_was_not_asked_for_is_not_withdrawn),
        cmocka_unit_test(a_withdrawal_is_answered_when_nothing_is_written_any_more),
        cmocka_unit_test(a_writer_that_gives_up_says_so_when_nothing_is_written_any_more),
        cmocka_unit_test(a_writer_that_has_forgotten_the_session_is_shut_out_when_it_answers_a_withdrawal),
        cmocka_unit_test(a_writer_that_no_longer_knows_an_expectation_is_shut_out),
        cmocka_unit_test(a_writer_that_has_forgotten_the_session_does_not_begin_to_write),
        cmocka_unit_test(a_push_in_a_session_that_was_forgotten_has_failed),
        cmocka_unit_test(a_withdrawal_leaves_alone_what_else_the_writer_writes),
        cmocka_unit_test(a_request_that_is_expected_anew_while_it_is_withdrawn_is_written_to_both),
        cmocka_unit_test(a_request_that_was_withdrawn_before_its_push_is_written_when_it_is_expected_anew),
        cmocka_unit_test(a_request_whose_push_was_withdrawn_from_is_not_waited_for_when_it_is_expected_anew),
        cmocka_unit_test(a_writer_that_gives_up_as_its_connection_is_lost_does_not_claim_to_have_stopped),
        cmocka_unit_test(a_writer_whose_connection_ends_under_its_writes_does_not_claim_to_have_stopped),
        cmocka_unit_test(
            a_pull_leaves_a_connection_that_is_behind_only_if_no_push_of_another_session_uses_it),
        cmocka_unit_test(
            a_push_leaves_a_connection_to_be_passed_over_once_no_pull_of_another_session_uses_it),
        cmocka_unit_test(a_writer_that_has_ended_is_kept_out_until_its_last_write_is_over),
        cmocka_unit_test(a_writer_that_has_forgotten_the_session_is_kept_out_until_its_last_write_is_over),
        cmocka_unit_test(a_writer_whose_answer_was_lost_with_the_session_is_kept_out_although_it_refuses),
        cmocka_unit_test(a_push_that_ends_after_its_consumer_has_given_it_up_has_failed),
        cmocka_unit_test(a_writer_whose_time_is_over_is_kept_out_until_its_last_write_is_over),
        cmocka_unit_test(without_a_word_from_the_writer_doubt_ends_with_its_time),
        cmocka_unit_test(a_withdrawal_ends_no_call_of_another_request),
        cmocka_unit_test(a_writer_that_was_stopped_writes_nothing_when_it_wakes),
        cmocka_unit_test(expectations_are_written_long_after_their_first_lease),
        cmocka_unit_test(parts_that_are_ready_a_lease_after_the_last_heartbeat_are_not_written),
        cmocka_unit_test(a_producer_with_longer_leases_may_write_no_longer),
        cmocka_unit_test(nobody_is_asked_to_write_before_its_clock_is_known),
        cmocka_unit_test(what_one_of_two_writers_sends_packed_is_not_taken_once_nobody_expects_it),
        cmocka_unit_test_teardown(packed_blocks_are_in_doubt_until_a_round_has_ended_their_flows,
                                  stop_counting_memory),
        cmocka_unit_test(neither_a_consumer_that_waits_for_its_writer_nor_the_writer_is_idle),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
