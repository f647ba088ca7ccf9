/* Messages that are late, lost or repeated: generations keep them from applying to the next request of the same id. */
#include "agent/ticket.h"
#include "agent_lease_scene.h"

static void a_late_release_does_not_free_the_next_request_of_its_name(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
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
    letters_deliver(); /* a second time */
    world_run_for(&s.w, 100 * MS);
    assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_LEASED);
    assert_ok(kvf_agent_pull_into(s.d, s.ours[0], s.wanted.groups, s.wanted.group_count));
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    lease_close(&s);
}

/* D gives a pull up and tries again. P hears of the second try first. D may know its lease, or not yet; or there is none
 * yet. */
static void a_late_release_does_not_end_the_next_try(void **state) {
    (void)state;
    for (int known = 0; known < 3; known++) {
        scene s;
        lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
        s.wanted.request.bytes_per_second = 10000; /* 51,200 bytes */
        s.wanted.request.way = KVF_WAY_DIRECT;
        if (known > 0)
            world_hold(&s.w.p, &s.held, s.theirs);
        if (known == 1)
            letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_ANSWER, KVF_CALL_ACQUIRE);
        world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
        world_run_for(&s.w, SECOND);
        letters_no_rules();
        letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, KVF_CALL_RELEASE);
        assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
        (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED);
        world_run_for(&s.w, 10 * MS);
        world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
        world_run_for(&s.w, 50 * MS);
        letters_no_rules();
        world_run_for(&s.w, 3 * SECOND); /* the release is said again */
        if (known == 0)
            world_hold(&s.w.p, &s.held, s.theirs);
        else
            assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_LEASED);
        world_all_done(&s.w, &s.w.d, s.ours);
        world_all_done(&s.w, &s.w.p, s.theirs);
        assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
        lease_close(&s);
    }
}

static void a_late_acquire_takes_no_lease_after_its_release(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
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
    lease_close(&s);
}

/* D gives a pull up and tries again. P hears of the second try first, then of the first, and then that D gave it up. The
 * hold may be there, or come last. */
static void a_late_acquire_does_not_end_the_next_try(void **state) {
    (void)state;
    for (int held = 0; held < 2; held++) {
        scene s;
        lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
        s.wanted.request.bytes_per_second = 10000; /* 51,200 bytes */
        s.wanted.request.way = KVF_WAY_DIRECT;
        if (held)
            world_hold(&s.w.p, &s.held, s.theirs);
        letters_rule(LETTERS_KEEP, s.d, KVF_MESSAGE_CALL, KVF_CALL_ACQUIRE);
        world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
        world_until(&s.w, letters_kept() >= 1);
        letters_no_rules();
        letters_rule(LETTERS_KEEP, s.d, KVF_MESSAGE_CALL, KVF_CALL_RELEASE);
        assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
        (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED);
        world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
        world_run_for(&s.w, 50 * MS);
        letters_deliver();
        letters_no_rules();
        world_run_for(&s.w, 3 * SECOND);
        if (!held)
            world_hold(&s.w.p, &s.held, s.theirs);
        world_all_done(&s.w, &s.w.d, s.ours);
        world_all_done(&s.w, &s.w.p, s.theirs);
        assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
        lease_close(&s);
    }
}

/* The test grants leases in the place of a producer: the part of its table that it names in each answer, and the first
 * id that the consumer asked for each time. */
typedef struct grants {
    struct {
        uint64_t generation;
        uint32_t first, count; /* of the four ids */
        bool wrong;            /* other blocks */
    } parts[4];
    uint32_t asked[4], count;
} grants;

static struct {
    grants *grants;
    const world_request *held;
} by_hand;

static void grant_by_hand(kvf_session *session, const kvf_call_body *call, bool fresh) {
    static const uint32_t others[] = {40, 41, 42, 43};
    static const kvf_record record = {.name = "mark"};
    grants *g = by_hand.grants;
    assert_true(fresh && g->count < COUNT_OF(g->parts) && g->parts[g->count].count > 0);
    const uint32_t first = g->parts[g->count].first, count = g->parts[g->count].count;
    kvf_wire_group group = by_hand.held->groups[0];
    assert_int_equal(group.table.count, 4);
    group.table.ids = (g->parts[g->count].wrong ? others : group.table.ids) + first;
    group.table.count = count;
    group.table.first_block = first;
    kvf_answer answer = {.generation = g->parts[g->count].generation,
                         .time_ns = 20 * SECOND,
                         .groups = &group,
                         .group_count = 1,
                         .first_id = first,
                         .more = first + count < 4,
                         .records = &record,
                         .record_count = first == 0};
    g->asked[g->count++] = call->first_id;
    kvf_answer_send(session, call, &answer);
}

static void parts_of_another_lease_or_a_beginning_anew_make_a_pull_begin_anew(void **state) {
    (void)state;
    grants cases[] = {{.parts = {{7, 0, 1, false}, {7, 1, 3, false}}},
                      {.parts = {{7, 0, 1, true}, {8, 1, 3, true}, {8, 0, 4, false}}},
                      {.parts = {{7, 0, 1, true}, {7, 0, 1, true}, {7, 0, 1, false}, {7, 1, 3, false}}}};
    const uint32_t asked[COUNT_OF(cases)][4] = {{0, 1}, {0, 1, 0}, {0, 1, 0, 1}};
    for (uint32_t i = 0; i < COUNT_OF(cases); i++) {
        scene s;
        lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
        kvf_hooks hooks = *s.p->hooks;
        hooks.serve[KVF_CALL_ACQUIRE] = grant_by_hand;
        s.p->hooks = &hooks;
        by_hand.grants = &cases[i];
        by_hand.held = &s.held;
        scene_pull(&s);
        assert_memory_equal(cases[i].asked, asked[i], sizeof asked[i]);
        assert_int_equal(s.w.outcomes[0].record_count, 1); /* which came with each beginning */
        lease_close(&s);
    }
}

static void a_late_expect_is_not_written_to_after_its_withdrawal(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
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
    lease_close(&s);
}

/* Starts a pull or an expectation that is refused, with an answer that is lost, and returns how it fails. `most`: the
 * limit on requests when the call is repeated. */
static const char *fails_though_the_refusal_is_lost(scene *s, bool pushed, uint32_t most) {
    const uint32_t met = letters_met();
    letters_rule(LETTERS_LOSE, s->p, KVF_MESSAGE_ANSWER, pushed ? KVF_CALL_EXPECT : KVF_CALL_ACQUIRE);
    if (pushed)
        world_expect(&s->w.d, &s->wanted, &s->w.p, s->ours);
    else
        world_pull(&s->w.d, &s->wanted, &s->w.p, s->ours);
    world_until(&s->w, letters_met() > met);
    letters_no_rules();
    s->p->options.max_requests_per_peer = most;
    const uint64_t since = world_stats(s->p).messages_sent;
    const char *detail = world_failed(&s->w, s->d, s->ours[0], KVF_E_NOT_FOUND)->detail;
    assert_true(world_stats(s->p).messages_sent - since <= 2); /* and not by its deadline */
    return detail;
}

static void a_refusal_that_is_lost_is_said_again(void **state) {
    (void)state;
    for (int pushed = 0; pushed < 2; pushed++) {
        scene s;
        lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
        const uint32_t most = s.p->options.max_requests_per_peer;
        s.p->options.remember_ns = 60 * SECOND;
        if (pushed)
            world_push(&s.w.p, &s.held, s.theirs);
        else
            world_hold(&s.w.p, &s.held, s.theirs);
        assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
        (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
        assert_non_null(strstr(fails_though_the_refusal_is_lost(&s, pushed, most), "is not kept any more"));

        /* P could grant the call when D repeats it, and refuses it all the same. */
        s.p->options.remember_ns = 0;
        s.p->options.max_requests_per_peer = 0;
        if (!pushed)
            world_hold(&s.w.p, &s.held, s.theirs);
        assert_non_null(strstr(fails_though_the_refusal_is_lost(&s, pushed, most),
                               "this call was refused before, or is over"));
        lease_close(&s);
    }
}

static void a_late_written_does_not_end_the_next_expectation_of_its_name(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
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
    world_run_for(&s.w, 50 * MS);
    assert_int_equal(world_stats(s.d).messages_stale, stale + 1);
    assert_int_equal(world_block(s.d, 0, 8), KVF_BLOCK_FILLING);
    world_push(&s.w.p, &s.held, s.theirs);
    world_ready(&s.w.p, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    lease_close(&s);
}

static void expect_and_push(scene *s) {
    world_push(&s->w.p, &s->held, s->theirs);
    world_ready(&s->w.p, s->theirs);
    world_expect(&s->w.d, &s->wanted, &s->w.p, s->ours);
    world_all_done(&s->w, &s->w.d, s->ours);
    world_all_done(&s->w, &s->w.p, s->theirs);
}

/* Meets P, and keeps a copy of its answer to D's greeting. */
static void meet_and_keep_the_welcome(scene *s) {
    uint64_t ticket;
    letters_rule(LETTERS_KEEP, s->p, KVF_MESSAGE_WELCOME, (kvf_call_kind)0);
    assert_ok(kvf_agent_connect(s->d, &s->w.p.contact, 0, &ticket));
    for (int i = 0; i < 2; i++) { /* of the engine, then of its rank */
        world_run_for(&s->w, 10 * MS);
        letters_deliver_copies();
    }
    assert_int_equal(world_next(&s->w, s->d, ticket)->kind, KVF_EVENT_PEER_READY);
    letters_no_rules();
}

/* D has sent P its card, and need not do so again. */
static void a_repeated_welcome_does_not_begin_the_session_anew(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    meet_and_keep_the_welcome(&s);
    expect_and_push(&s);
    letters_deliver();
    world_run_for(&s.w, 10 * MS);
    const uint32_t met = letters_met();
    letters_rule(LETTERS_PASS, s.d, KVF_MESSAGE_CALL, KVF_CALL_JOIN);
    expect_and_push(&s);
    assert_int_equal(letters_met(), met);
    lease_close(&s);
}

/* P has forgotten the session that the message names, and D has another by then. */
static void a_late_welcome_does_not_bring_a_former_session_back(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    meet_and_keep_the_welcome(&s);
    world_lose(s.p, world_session(s.p, true));
    s.wanted.request.way = KVF_WAY_PACKED;
    world_push(&s.w.p, &s.held, s.theirs);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    assert_ok(kvf_agent_push_ready(s.p, s.theirs[0], CHUNK(0, 16, 4)));
    world_run_for(&s.w, 100 * MS);
    const uint64_t stale = world_stats(s.d).messages_stale;
    const uint32_t openings = world_session(s.d, false)->openings;
    letters_deliver();
    world_run_for(&s.w, 100 * MS);
    assert_int_equal(world_stats(s.d).messages_stale, stale + 2);
    assert_int_equal(world_session(s.d, false)->openings, openings);
    world_ready(&s.w.p, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    lease_close(&s);
}

/* D greets at once, after 50 ms and after 100 ms more. P answers each at once, but the first two answers are under way for
 * long, and the third is lost. */
static void a_clock_is_not_compared_by_a_later_greeting_than_was_answered(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    uint64_t ticket, error = 0;
    int64_t offset = 1;
    letters_rule(LETTERS_KEEP, s.p, KVF_MESSAGE_WELCOME, (kvf_call_kind)0);
    assert_ok(kvf_agent_connect(s.d, &s.w.p.contact, 0, &ticket));
    world_run_for(&s.w, 10 * MS);
    letters_deliver(); /* of the engine */
    world_until(&s.w, letters_kept() == 2);
    letters_no_rules();
    letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_WELCOME, (kvf_call_kind)0);
    world_until(&s.w, letters_met() == 4);
    world_run_for(&s.w, 10 * MS);
    letters_deliver();
    letters_no_rules();
    assert_int_equal(world_next(&s.w, s.d, ticket)->kind, KVF_EVENT_PEER_READY);
    assert_ok(kvf_agent_clock_offset(s.d, "P", 0, &offset, &error));
    assert_true((uint64_t)(offset < 0 ? -offset : offset) <= error); /* both have the same clock */
    lease_close(&s);
}

static void a_lost_word_that_nothing_is_wanted_is_said_again(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    world_request_empty(&s.wanted);
    letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, KVF_CALL_EXPECT);
    world_push(&s.w.p, &s.held, s.theirs);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_all_done(&s.w, &s.w.d, s.ours);
    assert_int_equal(letters_met(), 1);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_DONE), 0);
    letters_no_rules();
    world_all_done(&s.w, &s.w.p, s.theirs);
    lease_close(&s);
}

/* D has all of the request, which P does not hold, or push, yet. */
static void want_nothing(scene *s, bool pushed) {
    world_request none = s->wanted;
    none.request.groups = none.groups;
    world_request_empty(&none);
    if (pushed)
        world_expect(&s->w.d, &none, &s->w.p, s->ours);
    else
        world_pull(&s->w.d, &none, &s->w.p, s->ours);
    world_all_done(&s->w, &s->w.d, s->ours);
    world_until(&s->w, s->p->waiting);
}

static void lend(scene *s, bool pushed) {
    if (pushed)
        world_push(&s->w.p, &s->held, s->theirs);
    else
        world_hold(&s->w.p, &s->held, s->theirs);
}

/* Now D wants the request, and gets it. */
static void get(scene *s, bool pushed) {
    if (pushed) {
        world_ready(&s->w.p, s->theirs);
        world_expect(&s->w.d, &s->wanted, &s->w.p, s->ours);
    } else {
        world_pull(&s->w.d, &s->wanted, &s->w.p, s->ours);
    }
    world_all_done(&s->w, &s->w.d, s->ours);
    world_all_done(&s->w, &s->w.p, s->theirs);
    assert_int_equal(world_wrong_cells(&s->w, &s->w.d, &s->wanted, 1), 0);
}

/* D says that it wants nothing of the request, and then P loses the session: alone, or because D's calls jump. */
static void a_word_that_nothing_is_wanted_outlives_its_session(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        const bool pushed = i % 2, jumps = i / 2;
        scene s;
        lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
        want_nothing(&s, pushed);
        if (jumps)
            world_session(s.d, false)->next_number += KVF_WINDOW_CALLS;
        else
            world_lose(s.p, world_session(s.p, true));
        lease_others_go_on(&s, "b");
        assert_int_equal(world_session(s.d, false)->openings, 2);
        const uint64_t lent = world_now();
        lend(&s, pushed);
        world_all_done(&s.w, &s.w.p, s.theirs);
        assert_true(world_now() - lent < SECOND);
        world_run_for(&s.w, MS);
        assert_null(s.p->all_sessions->next); /* the former one is freed */
        lease_close(&s);
    }
}

static void a_word_that_nothing_is_wanted_is_forgotten_when_its_time_is_over(void **state) {
    (void)state;
    for (int pushed = 0; pushed < 2; pushed++) {
        scene s;
        lease_open(&s, ONE("P"), ONE("D"), LEASE(SECOND));
        want_nothing(&s, pushed);
        world_lose(s.p, world_session(s.p, true));
        world_run_for(&s.w, 900 * MS);
        assert_non_null(s.p->waiting);
        world_run_for(&s.w, 200 * MS);
        assert_null(s.p->waiting);
        assert_null(s.p->all_sessions);
        lend(&s, pushed);
        (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT);
        lease_close(&s);
    }
}

/* D says it again in its next session, as the answer was lost. Both times it is about the first hold or push. */
static void a_word_that_nothing_is_wanted_does_not_end_the_next_request_of_its_name(void **state) {
    (void)state;
    for (int pushed = 0; pushed < 2; pushed++) {
        scene s;
        lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
        letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_ANSWER, pushed ? KVF_CALL_EXPECT : KVF_CALL_RELEASE);
        want_nothing(&s, pushed);
        world_lose(s.p, world_session(s.p, true));
        letters_no_rules();
        world_until(&s.w, !world_session(s.d, false)->calls);
        assert_int_equal(world_session(s.d, false)->openings, 2);
        lend(&s, pushed);
        world_all_done(&s.w, &s.w.p, s.theirs);
        lend(&s, pushed);
        get(&s, pushed);
        lease_close(&s);
    }
}

/* P has lost the process that wanted nothing, or takes it for alive until the new one of its rank greets. */
static void a_restarted_consumer_is_not_bound_by_what_its_former_process_did_not_want(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        const bool pushed = i % 2, lost = i / 2;
        scene s;
        lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
        want_nothing(&s, pushed);
        if (lost)
            world_lose(s.p, world_session(s.p, true));
        world_close_agents(&s.w.d);
        world_forget(&s.w); /* the next agent may have the same address */
        world_open_agents(&s.w.d, LEASE(20 * SECOND));
        s.d = s.w.d.agents[0];
        uint64_t ticket;
        assert_ok(kvf_agent_connect(s.d, &s.w.p.contact, 0, &ticket));
        (void)world_done(&s.w, s.d, ticket);
        lend(&s, pushed);
        get(&s, pushed);
        lease_close(&s);
    }
}

/* It was written, or could not be, which remains the reason. */
static void a_push_whose_last_word_is_never_answered_fails(void **state) {
    (void)state;
    for (int less = 0; less < 2; less++) {
        scene s;
        lease_open(&s, ONE("P"), ONE("D"), LEASE(400 * MS));
        letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_CALL, KVF_CALL_WRITTEN);
        if (less)
            s.held.groups[0].end = 40;
        world_push(&s.w.p, &s.held, s.theirs);
        world_ready(&s.w.p, s.theirs);
        world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
        const world_outcome *failed =
            world_failed(&s.w, s.p, s.theirs[0], less ? KVF_E_RANGE : KVF_E_TIMEOUT);
        assert_non_null(strstr(failed->detail, less ? "the producer has [0, 40)" : "did not answer"));
        (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
        lease_close(&s);
    }
}

/* D says its calls again in the session after the one that P has lost: the first is thousands of numbers below the last,
 * more than P remembers. */
/* Of packed expectations, too, whose blocks are free at once: the request is forgotten before the answer comes. */
static void a_withdrawal_that_is_lost_is_said_again(void **state) {
    (void)state;
    static const kvf_way ways[] = {KVF_WAY_DIRECT, KVF_WAY_PACKED};
    for (size_t i = 0; i < COUNT_OF(ways); i++) {
        scene s;
        const kvf_agent_options options = {
            .struct_size = sizeof options, .way = ways[i], .lease_ns = 30 * SECOND};
        lease_open(&s, ONE("P"), ONE("D"), &options);
        s.held.request.deadline_ns = s.wanted.request.deadline_ns = 100 * SECOND;
        lease_meet(&s);
        world_run_for(&s.w, 100 * MS);
        letters_no_rules();
        letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, KVF_CALL_WITHDRAW);
        assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
        world_run_for(&s.w, 50 * MS);
        assert_true(letters_met() > 0);
        assert_int_not_equal(world_block(s.p, 0, 0), KVF_BLOCK_FREE);
        letters_no_rules();
        world_run_for(&s.w, 2 * SECOND);
        assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_FREE);
        (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
        lease_close(&s);
    }
}

static void a_call_that_waits_is_said_again_behind_thousands_of_others(void **state) {
    (void)state;
    scene s;
    lease_open(&s, ONE("P"), ONE("D"), LEASE(20 * SECOND));
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 500 * MS);
    kvf_session *session = world_session(s.d, false);
    for (uint32_t i = 0; i < 2; i++) { /* P takes 6000 calls for seen */
        session->next_number += 3000;
        lease_others_go_on(&s, i ? "c" : "b");
    }
    const uint64_t stale = world_stats(s.p).messages_stale;
    world_lose(s.p, world_session(s.p, true));
    world_run_for(&s.w, 3 * SECOND);
    assert_int_equal(session->openings, 2);
    assert_true(world_stats(s.p).messages_stale - stale < 3);
    lease_others_go_on(&s, "d");
    world_hold(&s.w.p, &s.held, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    lease_close(&s);
}

/* The first try's release, which D says again in the session after the one that P has lost, gets a number behind that of
 * the second try. D had not seen the first lease; or it had been refused, so that the release names no ACQUIRE. */
static void a_release_that_is_said_again_with_a_new_number_does_not_end_the_next_try(void **state) {
    (void)state;
    for (int refused = 0; refused < 2; refused++) {
        scene s;
        kvf_agent_options options = *LEASE(20 * SECOND);
        options.remember_ns = 600 * SECOND;
        lease_open(&s, ONE("P"), ONE("D"), &options);
        s.wanted.request.bytes_per_second = 3000; /* 51,200 bytes */
        s.wanted.request.deadline_ns = 60 * SECOND;
        s.wanted.request.way = KVF_WAY_DIRECT;
        s.held.request.deadline_ns = 60 * SECOND;
        world_hold(&s.w.p, &s.held, s.theirs);
        letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, KVF_CALL_RELEASE);
        if (refused) {
            assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
            (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
            world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
            (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_NOT_FOUND);
            world_hold(&s.w.p, &s.held, s.theirs);
        } else {
            letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_ANSWER, KVF_CALL_ACQUIRE);
            world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
            world_run_for(&s.w, SECOND);
            assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
            (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED);
            letters_no_rules();
            letters_rule(LETTERS_LOSE, s.d, KVF_MESSAGE_CALL, KVF_CALL_RELEASE);
        }
        kvf_session *session = world_session(s.d, false);
        world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
        for (uint32_t i = 0; i < 2; i++) { /* P takes 6000 calls for seen */
            session->next_number += 3000;
            world_run_for(&s.w, 4 * SECOND); /* a heartbeat */
        }
        letters_no_rules();
        world_lose(s.p, world_session(s.p, true));
        world_run_for(&s.w, 4 * SECOND);
        assert_int_equal(session->openings, 2);
        assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_LEASED);
        world_all_done(&s.w, &s.w.d, s.ours);
        world_all_done(&s.w, &s.w.p, s.theirs);
        assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
        lease_close(&s);
    }
}

static void lost_repeated_and_late_messages_change_nothing(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        scene s;
        enum { COUNT = 6 };
        world_request held[COUNT], wanted[COUNT];
        uint64_t theirs[COUNT][WORLD_MAX_RANKS], ours[COUNT][WORLD_MAX_RANKS];
        static const char *const ids[COUNT] = {"1", "2", "3", "4", "5", "6"};
        lease_open(&s, TP2, ENGINE(.name = "D", .tp_size = 2, .all = {.block_count = 64}),
                   LEASE(20 * SECOND));
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
        lease_close(&s);
    }
}

static void cancelling_while_messages_go_astray_frees_everything_once(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 8; seed++) {
        scene s;
        lease_open(&s, ONE("P"), ONE("D"), LEASE(1 * SECOND));
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
        lease_close(&s);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_late_release_does_not_free_the_next_request_of_its_name),
        cmocka_unit_test(a_late_release_does_not_end_the_next_try),
        cmocka_unit_test(a_late_acquire_takes_no_lease_after_its_release),
        cmocka_unit_test(a_late_acquire_does_not_end_the_next_try),
        cmocka_unit_test(parts_of_another_lease_or_a_beginning_anew_make_a_pull_begin_anew),
        cmocka_unit_test(a_late_expect_is_not_written_to_after_its_withdrawal),
        cmocka_unit_test(a_refusal_that_is_lost_is_said_again),
        cmocka_unit_test(a_late_written_does_not_end_the_next_expectation_of_its_name),
        cmocka_unit_test(a_repeated_welcome_does_not_begin_the_session_anew),
        cmocka_unit_test(a_late_welcome_does_not_bring_a_former_session_back),
        cmocka_unit_test(a_clock_is_not_compared_by_a_later_greeting_than_was_answered),
        cmocka_unit_test(a_lost_word_that_nothing_is_wanted_is_said_again),
        cmocka_unit_test(a_word_that_nothing_is_wanted_outlives_its_session),
        cmocka_unit_test(a_word_that_nothing_is_wanted_is_forgotten_when_its_time_is_over),
        cmocka_unit_test(a_word_that_nothing_is_wanted_does_not_end_the_next_request_of_its_name),
        cmocka_unit_test(a_restarted_consumer_is_not_bound_by_what_its_former_process_did_not_want),
        cmocka_unit_test(a_push_whose_last_word_is_never_answered_fails),
        cmocka_unit_test(a_withdrawal_that_is_lost_is_said_again),
        cmocka_unit_test(a_call_that_waits_is_said_again_behind_thousands_of_others),
        cmocka_unit_test(a_release_that_is_said_again_with_a_new_number_does_not_end_the_next_try),
        cmocka_unit_test(lost_repeated_and_late_messages_change_nothing),
        cmocka_unit_test(cancelling_while_messages_go_astray_frees_everything_once),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
