/* Whose block is it, and until when: leases, generations, doubt, cancelling, and messages that go astray. */
#include "agent/session.h"
#include "agent_letters.h"
#include "agent_scene.h"
#include "faulty_fabric.h"

#define TP2 ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64})
#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define LEASE(ns)                                                                                            \
    (&(const kvf_agent_options){                                                                             \
        .struct_size = sizeof(kvf_agent_options), .lease_ns = (ns), .peer_timeout_ns = 100 * MS})

static void set_up(scene *s, const kvf_engine_spec *p, const kvf_engine_spec *d,
                   const kvf_agent_options *options) {
    scene_open(s, attention(4, 8, 8), p, d, options);
    letters_begin();
}

static void tear_down(scene *s) {
    letters_end();
    scene_close(s);
}

/* Lets a push and its expectation find each other; nothing is ready yet. */
static void let_them_meet(scene *s) {
    letters_rule(LETTERS_PASS, s->p, KVF_MESSAGE_ANSWER, KVF_CALL_EXPECT);
    world_push(&s->w.p, &s->held, s->theirs);
    world_expect(&s->w.d, &s->wanted, &s->w.p, s->ours);
    world_until(&s->w, letters_met() >= 1);
}

/* Another request goes well. */
static void others_go_on(scene *s, const char *id) {
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    world_request_make(&s->w, &s->w.p, id, 50, 30, 1, &held);
    world_request_make(&s->w, &s->w.d, id, 50, 40, 1, &wanted);
    world_fill(&s->w, &s->w.p, &held, 5);
    held.request.deadline_ns = 20 * SECOND;
    world_hold(&s->w.p, &held, theirs);
    world_pull(&s->w.d, &wanted, &s->w.p, ours);
    world_all_done(&s->w, &s->w.d, ours);
    world_all_done(&s->w, &s->w.p, theirs);
    assert_int_equal(world_wrong_cells(&s->w, &s->w.d, &wanted, 5), 0);
}

/* ---- leases ---------------------------------------------------------------------------------- */

static void blocks_nobody_asks_for_are_free_after_the_lease(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(200 * MS));
    world_hold(&s.w.p, &s.held, s.theirs);
    assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_HELD);
    const world_outcome *end = world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT);
    assert_true(end->blocks_free);
    assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_FREE);
    assert_int_equal(world_stats(s.p).leases_expired, 1);
    others_go_on(&s, "b");
    tear_down(&s);
}

static void heartbeats_extend_leases_while_a_consumer_waits(void **state) {
    (void)state;
    scene s;
    set_up(&s, TP2, ONE("D"), LEASE(400 * MS));
    world_hold(&s.w.p, &s.held, s.theirs);
    const kvf_group_steps *groups = s.wanted.request.groups;
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 1600 * MS);
    assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_LEASED);
    assert_int_equal(world_stats(s.p).leases_now, 1);
    assert_int_equal(world_stats(s.p).leases_expired, 0);
    assert_ok(kvf_agent_pull_into(s.d, s.ours[0], groups, s.wanted.group_count));
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    tear_down(&s);
}

static void a_reader_that_dies_loses_its_lease(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(300 * MS));
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_block(s.p, 0, 0) == KVF_BLOCK_LEASED);
    letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, 0); /* not a word any more */
    world_close_agents(&s.w.d);
    const world_outcome *end = world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT);
    assert_true(end->blocks_free);
    assert_true(world_stats(s.p).leases_expired >= 1);
    tear_down(&s);
}

static void a_consumer_whose_heartbeats_are_lost_gives_up_before_the_producer_frees(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(300 * MS));
    s.held.request.deadline_ns = 300 * MS;
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, KVF_CALL_BEAT);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    (void)world_next(&s.w, s.p, s.theirs[0]); /* released with a failure, or expired */
    letters_no_rules();
    others_go_on(&s, "b");
    tear_down(&s);
}

/* Patience is for those who lend, not for those who have been lent to. */
static void patience_ends_before_the_blocks_are_lent_but_not_after(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    s.wanted.request.patience_ns = 200 * MS;
    uint64_t begun = world_now();
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    const world_outcome *failed = world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    assert_true(world_now() - begun >= 200 * MS);
    assert_non_null(strstr(failed->detail, "patience has ended: no lease"));
    const kvf_contact nobody = {.engine = "P", .endpoint = "tcp://127.0.0.1:1"};
    s.wanted.request.contact = nobody;
    assert_ok(kvf_agent_pull(s.d, &s.wanted.request, &s.ours[0]));
    failed = world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    assert_non_null(strstr(failed->detail, "patience has ended"));
    assert_non_null(strstr(failed->detail, "127.0.0.1:1"));

    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    s.wanted.request.patience_ns = 2 * SECOND;
    begun = world_now();
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_block(s.p, 0, 0) == KVF_BLOCK_LEASED);
    world_run_for(&s.w, 2100 * MS);
    assert_true(world_now() - begun > 2 * SECOND);
    assert_ok(kvf_agent_pull_into(s.d, s.ours[0], s.wanted.groups, s.wanted.group_count));
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    tear_down(&s);
}

static void the_lease_of_a_consumer_that_was_replaced_outlives_the_release_of_the_new_one(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(1 * SECOND));
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_block(s.p, 0, 0) == KVF_BLOCK_LEASED);
    world_close_agents(&s.w.d);
    s.w.outcome_count = 0; /* the next agent may stand at the same address */
    world_open_agents(&s.w.d, LEASE(1 * SECOND));

    s.wanted.request.groups = s.wanted.groups;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs); /* once nobody may read any more */
    assert_int_equal(world_stats(s.p).leases_now, 0);
    assert_int_equal(world_stats(s.p).leases_expired, 1);
    tear_down(&s);
}

/* ---- generations ----------------------------------------------------------------------------- */

static void a_late_release_does_not_free_the_next_request_of_its_name(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    world_hold(&s.w.p, &s.held, s.theirs);
    letters_rule(LETTERS_KEEP, s.d, KVF_MESSAGE_CALL, KVF_CALL_RELEASE);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_until(&s.w, letters_kept() >= 1);
    letters_no_rules();
    letters_deliver_copies();
    world_all_done(&s.w, &s.w.p, s.theirs);

    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_block(s.p, 0, 0) == KVF_BLOCK_LEASED);
    letters_deliver(); /* once more */
    world_run_for(&s.w, 100 * MS);
    assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_LEASED);
    assert_ok(kvf_agent_pull_into(s.d, s.ours[0], s.wanted.groups, s.wanted.group_count));
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    tear_down(&s);
}

static void a_late_acquire_takes_no_lease_after_its_release(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    letters_rule(LETTERS_KEEP, s.d, KVF_MESSAGE_CALL, KVF_CALL_ACQUIRE);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, letters_kept() >= 1);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED);
    world_run_for(&s.w, 50 * MS); /* the release arrives */
    letters_no_rules();
    world_hold(&s.w.p, &s.held, s.theirs);
    letters_deliver();
    world_run_for(&s.w, 100 * MS);
    assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_HELD);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    tear_down(&s);
}

static void a_late_expect_is_not_written_to_after_its_withdrawal(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    letters_rule(LETTERS_KEEP, s.d, KVF_MESSAGE_CALL, KVF_CALL_EXPECT);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, letters_kept() >= 1);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED);
    world_until(&s.w, world_block(s.d, 0, 8) == KVF_BLOCK_FREE);
    letters_no_rules();

    world_fill(&s.w, &s.w.d, &s.wanted, 7);
    world_push(&s.w.p, &s.held, s.theirs);
    world_ready(&s.w.p, s.theirs);
    letters_deliver();
    world_run_for(&s.w, 100 * MS);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 7), 0);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_DONE), 0);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    tear_down(&s);
}

static void a_late_written_does_not_end_the_next_expectation_of_its_name(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    letters_rule(LETTERS_KEEP, s.p, KVF_MESSAGE_CALL, KVF_CALL_WRITTEN);
    world_push(&s.w.p, &s.held, s.theirs);
    world_ready(&s.w.p, s.theirs);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, letters_kept() >= 1);
    letters_no_rules();
    letters_deliver_copies();
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);

    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 50 * MS);
    uint64_t stale = world_stats(s.d).messages_stale;
    letters_deliver();
    world_until(&s.w, world_stats(s.d).messages_stale > stale);
    assert_int_equal(world_block(s.d, 0, 8), KVF_BLOCK_FILLING);
    world_push(&s.w.p, &s.held, s.theirs);
    world_ready(&s.w.p, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    tear_down(&s);
}

/* ---- doubt ----------------------------------------------------------------------------------- */

static void withdrawn_blocks_are_in_doubt_until_the_writer_has_stopped(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    let_them_meet(&s);
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
    (void)world_done(&s.w, s.p, s.theirs[0]);
    tear_down(&s);
}

/* Writes begin late, and do not hear that they are cancelled. */
static void a_withdrawal_is_answered_when_nothing_is_written_any_more(void **state) {
    (void)state;
    uint32_t doubted = 0;
    for (uint32_t seed = 0; seed < 8; seed++) {
        scene s;
        faulty_install(&(faulty_options){
            .seed = seed, .per_mille = {[FAULTY_LATE_START] = 1000, [FAULTY_DEAF] = 1000}, .turns = 2000});
        set_up(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
        let_them_meet(&s);
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
        tear_down(&s);
        faulty_remove();
    }
    assert_true(doubted > 0);
}

static void without_a_word_from_the_writer_doubt_ends_with_its_time(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(500 * MS));
    let_them_meet(&s);
    letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, 0);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    assert_false(world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED)->blocks_free);
    assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT); /* it has noticed, and stopped before */
    tear_down(&s);
}

/* The agent in `place` does nothing until it is put back. */
static kvf_agent *stop(kvf_agent **place) {
    kvf_agent *agent = *place;
    *place = NULL;
    return agent;
}

static void a_writer_that_was_stopped_writes_nothing_when_it_wakes(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(500 * MS));
    let_them_meet(&s);
    kvf_agent *stopped = stop(&s.w.p.agents[0]);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    assert_false(world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED)->blocks_free);
    assert_int_equal(world_block(s.d, 0, 8), KVF_BLOCK_IN_DOUBT);
    assert_int_equal(world_next(&s.w, s.d, s.ours[0])->kind, KVF_EVENT_BLOCKS_FREE);
    world_fill(&s.w, &s.w.d, &s.wanted, 7);

    s.w.p.agents[0] = stopped;
    world_ready(&s.w.p, s.theirs);
    world_run_for(&s.w, 100 * MS);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 7), 0);
    (void)kvf_agent_cancel(s.p, s.theirs[0]);
    (void)world_next(&s.w, s.p, s.theirs[0]);
    others_go_on(&s, "b");
    tear_down(&s);
}

static void a_reader_that_was_stopped_does_not_believe_what_it_reads(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(300 * MS));
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_block(s.p, 0, 0) == KVF_BLOCK_LEASED);
    kvf_agent *stopped = stop(&s.w.d.agents[0]);
    assert_true(world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT)->blocks_free);
    world_fill(&s.w, &s.w.p, &s.held, 9); /* another request's */

    s.w.d.agents[0] = stopped;
    (void)kvf_agent_pull_into(s.d, s.ours[0], s.wanted.groups, s.wanted.group_count);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    others_go_on(&s, "b");
    tear_down(&s);
}

static void holds_that_the_producer_gave_up_fail_at_the_next_heartbeat(void **state) {
    (void)state;
    scene s;
    world_request third;
    uint64_t more;
    set_up(&s, ONE("P"), ONE("D"), LEASE(1 * SECOND));
    world_request_make(&s.w, &s.w.d, "b", 50, 30, 1, &third);
    world_push(&s.w.p, &s.held, s.theirs);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    third.request.contact = s.w.p.contact;
    assert_ok(kvf_agent_expect(s.d, &third.request, &more)); /* nobody has pushed this one yet */
    letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_CALL, KVF_CALL_WRITTEN);
    letters_rule(LETTERS_PASS, s.p, KVF_MESSAGE_ANSWER, KVF_CALL_EXPECT);
    world_until(&s.w, letters_met() >= 2);
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    (void)world_next(&s.w, s.p, s.theirs[0]);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    letters_end();
    assert_ok(kvf_agent_cancel(s.d, more));
    assert_int_equal(world_next(&s.w, s.d, more)->status, KVF_E_CANCELLED);
    tear_down(&s);
}

static void a_reader_of_a_hold_that_was_given_up_is_told_by_its_next_heartbeat(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    letters_rule(LETTERS_PASS, s.p, KVF_MESSAGE_ANSWER, KVF_CALL_ACQUIRE);
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, letters_met() >= 1);
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    const world_outcome *failed = world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    assert_non_null(strstr(failed->detail, "given the request up")); /* and not that its lease ran out */
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
    tear_down(&s);
}

/* The hold's own lease is longer than the agent's: that a rank has read does not cut it short for the others. */
static void a_rank_may_come_long_after_another_has_read(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ENGINE(.name = "D", .tp_size = 2, .all = {.block_count = 64}), LEASE(500 * MS));
    s.held.request.deadline_ns = 10 * SECOND;
    s.wanted.request.contact = s.w.p.contact;
    world_hold(&s.w.p, &s.held, s.theirs);
    for (uint32_t r = 0; r < 2; r++) {
        world_run_for(&s.w, 4 * SECOND);
        assert_ok(kvf_agent_pull(s.w.d.agents[r], &s.wanted.request, &s.ours[r]));
        (void)world_done(&s.w, s.w.d.agents[r], s.ours[r]);
    }
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    tear_down(&s);
}

/* And the other way round: it is given the agent's lease anew, for the next. */
static void a_rank_that_has_read_gives_the_others_a_lease_more(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ENGINE(.name = "D", .tp_size = 2, .all = {.block_count = 64}), LEASE(1 * SECOND));
    s.held.request.deadline_ns = 1 * SECOND;
    s.wanted.request.contact = s.w.p.contact;
    world_hold(&s.w.p, &s.held, s.theirs);
    for (uint32_t r = 0; r < 2; r++) {
        world_run_for(&s.w, 700 * MS); /* the second comes after 1.4 s */
        assert_ok(kvf_agent_pull(s.w.d.agents[r], &s.wanted.request, &s.ours[r]));
        (void)world_done(&s.w, s.w.d.agents[r], s.ours[r]);
    }
    world_all_done(&s.w, &s.w.p, s.theirs);
    tear_down(&s);
}

/* ---- heartbeats of expectations -------------------------------------------------------------- */

/* Two expectations of one session wait for much longer than their lease. */
static void expect_two_for(scene *s, world_request *held, world_request *wanted, uint64_t theirs[],
                           uint64_t ours[], uint64_t ns) {
    set_up(s, ONE("P"), ONE("D"), LEASE(500 * MS));
    world_request_make(&s->w, &s->w.p, "b", 50, 30, 1, held);
    world_request_make(&s->w, &s->w.d, "b", 50, 40, 1, wanted);
    world_fill(&s->w, &s->w.p, held, 5);
    let_them_meet(s);
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
    tear_down(&s);
}

/* Its blocks are free by then: a heartbeat has given the writer one lease more, and not for ever. */
static void what_is_ready_a_lease_after_the_last_heartbeat_is_not_written(void **state) {
    (void)state;
    scene s;
    world_request held, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    expect_two_for(&s, &held, &wanted, theirs, ours, 5 * SECOND);
    letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, 0);
    kvf_agent *stopped = stop(&s.w.p.agents[0]); /* it does not see how time goes by */
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

/* Until when it may write is said on its own clock, which only an open session tells. */
static void nobody_is_asked_to_write_before_its_clock_is_known(void **state) {
    (void)state;
    scene s;
    set_up(&s, TP2, ONE("D"), NULL);
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
    tear_down(&s);
}

/* ---- astray ---------------------------------------------------------------------------------- */

static void a_pull_that_waits_hears_within_seconds_whether_its_producer_lives(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(60 * SECOND));
    letters_rule(LETTERS_PASS, s.d, KVF_MESSAGE_CALL, KVF_CALL_BEAT);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 500 * MS);
    assert_int_equal(letters_met(), 0);
    world_run_for(&s.w, 1000 * MS); /* the next heartbeat is ten seconds away */
    assert_int_equal(letters_met(), 1);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    tear_down(&s);
}

static void who_waits_for_a_writer_is_not_idle_nor_is_the_writer(void **state) {
    (void)state;
    scene s;
    const kvf_agent_options options = {.struct_size = sizeof options, .idle_ns = SECOND};
    set_up(&s, ONE("P"), ONE("D"), &options);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 4 * SECOND); /* the first heartbeat comes after five */
    assert_int_equal(world_stats(s.d).peers_evicted, 0);
    assert_int_equal(world_stats(s.p).peers_evicted, 0);
    world_push(&s.w.p, &s.held, s.theirs);
    world_ready(&s.w.p, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    world_run_for(&s.w, 4 * SECOND);
    assert_int_equal(world_stats(s.d).peers_evicted, 1); /* now they are */
    assert_int_equal(world_stats(s.p).peers_evicted, 1);
    tear_down(&s);
}

/* The consumer's own lease, ten times as long, is not what its peer keeps things for. */
static void heartbeats_come_six_times_in_a_lease_of_who_gave_it(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(6 * SECOND));
    world_close_agents(&s.w.d);
    world_open_agents(&s.w.d, LEASE(60 * SECOND));
    s.d = s.w.d.agents[0];
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, SECOND);
    letters_rule(LETTERS_PASS, s.d, KVF_MESSAGE_CALL, KVF_CALL_BEAT);
    world_run_for(&s.w, 20 * SECOND);
    assert_in_range(letters_met(), 19, 21);
    world_push(&s.w.p, &s.held, s.theirs);
    world_ready(&s.w.p, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    tear_down(&s);
}

static void a_host_to_which_no_way_leads_is_waited_for_as_long_as_the_lease_lasts(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(10 * SECOND));
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 500 * MS);
    letters_rule(LETTERS_LOSE, NULL, KVF_MESSAGE_CALL, 0);
    kvf_work_take(s.d);
    kvf_on_broken(s.d, s.d->all_sessions->route, KVF_E_IO, "no way leads to the host");
    kvf_work_give(s.d);
    world_run_for(&s.w, 7 * SECOND);
    letters_no_rules();
    world_hold(&s.w.p, &s.held, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_stats(s.d).peers_lost, 0);
    tear_down(&s);
}

static void lost_repeated_and_late_messages_change_nothing(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        scene s;
        enum { COUNT = 6 };
        world_request held[COUNT], wanted[COUNT];
        uint64_t theirs[COUNT][WORLD_MAX_RANKS], ours[COUNT][WORLD_MAX_RANKS];
        static const char *const ids[COUNT] = {"1", "2", "3", "4", "5", "6"};
        set_up(&s, TP2, ENGINE(.name = "D", .tp_size = 2, .all = {.block_count = 64}), LEASE(20 * SECOND));
        letters_scramble(seed, 20, 15, 25);
        for (uint32_t i = 0; i < COUNT; i++) {
            world_request_make(&s.w, &s.w.p, ids[i], 50, 10 * i, 1, &held[i]);
            world_request_make(&s.w, &s.w.d, ids[i], 50, 10 * i, 2, &wanted[i]);
            for (uint32_t b = 0; b < 4; b++)
                wanted[i].ids[0][b] = 10 * i + 2 * b;
            held[i].groups[0].table.ids = held[i].ids[0];
            wanted[i].groups[0].table.ids = wanted[i].ids[0];
            held[i].request.groups = held[i].groups;
            wanted[i].request.groups = wanted[i].groups;
            world_fill(&s.w, &s.w.p, &held[i], i);
            if (i % 2) {
                world_push(&s.w.p, &held[i], theirs[i]);
                world_ready(&s.w.p, theirs[i]);
                world_expect(&s.w.d, &wanted[i], &s.w.p, ours[i]);
            } else {
                world_hold(&s.w.p, &held[i], theirs[i]);
                world_pull(&s.w.d, &wanted[i], &s.w.p, ours[i]);
            }
        }
        for (uint32_t i = 0; i < COUNT; i++) {
            world_all_done(&s.w, &s.w.d, ours[i]);
            assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &wanted[i], i), 0);
            world_all_done(&s.w, &s.w.p, theirs[i]);
        }
        tear_down(&s);
    }
}

static void cancelling_while_messages_go_astray_frees_everything_once(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 8; seed++) {
        scene s;
        set_up(&s, ONE("P"), ONE("D"), LEASE(1 * SECOND));
        letters_scramble(seed, 20, 15, 25);
        bool pushes = seed % 2;
        if (pushes) {
            world_push(&s.w.p, &s.held, s.theirs);
            world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
        } else {
            world_hold(&s.w.p, &s.held, s.theirs);
            world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
        }
        for (uint64_t i = 0; i < seed * 3; i++)
            world_work(&s.w);
        (void)kvf_agent_cancel(s.d, s.ours[0]);
        if (seed % 3 == 0)
            (void)kvf_agent_cancel(s.p, s.theirs[0]);
        (void)world_next(&s.w, s.d, s.ours[0]);
        if (pushes && seed % 3)
            (void)kvf_agent_cancel(s.p, s.theirs[0]);
        (void)world_next(&s.w, s.p, s.theirs[0]);
        tear_down(&s);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_nobody_asks_for_are_free_after_the_lease),
        cmocka_unit_test(heartbeats_extend_leases_while_a_consumer_waits),
        cmocka_unit_test(a_reader_that_dies_loses_its_lease),
        cmocka_unit_test(a_consumer_whose_heartbeats_are_lost_gives_up_before_the_producer_frees),
        cmocka_unit_test(patience_ends_before_the_blocks_are_lent_but_not_after),
        cmocka_unit_test(the_lease_of_a_consumer_that_was_replaced_outlives_the_release_of_the_new_one),
        cmocka_unit_test(a_late_release_does_not_free_the_next_request_of_its_name),
        cmocka_unit_test(a_late_acquire_takes_no_lease_after_its_release),
        cmocka_unit_test(a_late_expect_is_not_written_to_after_its_withdrawal),
        cmocka_unit_test(a_late_written_does_not_end_the_next_expectation_of_its_name),
        cmocka_unit_test(withdrawn_blocks_are_in_doubt_until_the_writer_has_stopped),
        cmocka_unit_test(a_withdrawal_is_answered_when_nothing_is_written_any_more),
        cmocka_unit_test(without_a_word_from_the_writer_doubt_ends_with_its_time),
        cmocka_unit_test(a_writer_that_was_stopped_writes_nothing_when_it_wakes),
        cmocka_unit_test(a_reader_that_was_stopped_does_not_believe_what_it_reads),
        cmocka_unit_test(holds_that_the_producer_gave_up_fail_at_the_next_heartbeat),
        cmocka_unit_test(a_reader_of_a_hold_that_was_given_up_is_told_by_its_next_heartbeat),
        cmocka_unit_test(a_rank_may_come_long_after_another_has_read),
        cmocka_unit_test(a_rank_that_has_read_gives_the_others_a_lease_more),
        cmocka_unit_test(expectations_are_written_long_after_their_first_lease),
        cmocka_unit_test(what_is_ready_a_lease_after_the_last_heartbeat_is_not_written),
        cmocka_unit_test(nobody_is_asked_to_write_before_its_clock_is_known),
        cmocka_unit_test(a_pull_that_waits_hears_within_seconds_whether_its_producer_lives),
        cmocka_unit_test(who_waits_for_a_writer_is_not_idle_nor_is_the_writer),
        cmocka_unit_test(heartbeats_come_six_times_in_a_lease_of_who_gave_it),
        cmocka_unit_test(a_host_to_which_no_way_leads_is_waited_for_as_long_as_the_lease_lasts),
        cmocka_unit_test(lost_repeated_and_late_messages_change_nothing),
        cmocka_unit_test(cancelling_while_messages_go_astray_frees_everything_once),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
