/* Connections between two agents that carry flows of both directions: one session joins by the connection of another,
 * joins anew, or loses it. In virtual time. */
#include <stdio.h>

#include "agent/hear.h"
#include "agent/stage.h"
#include "agent_letters.h"
#include "agent_net.h"
#include "agent_packed_scene.h"
#include "faulty_fabric.h"
#include "stage/flow.h"
#include "stage/ways.h"

/* P reads "back" from D, by a connection of its own. */
static void pull_back(world *w) {
    world_request given, back;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    world_request_make(w, &w->d, "back", 20, 0, 1, &given);
    world_request_make(w, &w->p, "back", 20, 0, 1, &back);
    world_hold(&w->d, &given, holds);
    world_pull(&w->p, &back, &w->d, pulls);
    world_all_done(w, &w->p, pulls);
    world_all_done(w, &w->d, holds);
}

static void a_pull_from_ranks_that_have_read_from_this_one_goes_packed_from_each_of_them(void **state) {
    (void)state;
    world w;
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    world_open_model(&w, attention(2, 4, 8), TP2, ONE("D"), &options);
    pull_back(&w);
    world_pull_everything(&w, "there", 40, 1);
    assert_true(all_read(&w.d) > 0);
    assert_int_equal(all_packed(&w.d), all_read(&w.d));
    world_quiet(&w);
    world_close(&w);
}

/* Both engines are producer and consumer: P has read "back" from D, and D reads "slow" from P, for seconds. The first
 * session's connection carries both directions. */
static void open_both_ways(world *w, const kvf_agent_options *options, world_request *slow, uint64_t *pulls) {
    world_request given;
    uint64_t holds[WORLD_MAX_RANKS];
    world_open_model(w, attention(4, 8, 8), ONE("P"), ONE("D"), options);
    pull_back(w);
    world_request_make(w, &w->p, "slow", 200, 0, 1, &given);
    world_request_make(w, &w->d, "slow", 200, 20, 1, slow);
    slow->request.bytes_per_second = 8192;
    world_fill(w, &w->p, &given, 1);
    world_hold(&w->p, &given, holds);
    world_pull(&w->d, slow, &w->p, pulls);
}

/* The session's own request has ended. */
static void a_connection_that_carries_what_others_move_is_not_closed_as_idle(void **state) {
    (void)state;
    world w;
    world_request wanted;
    uint64_t pulls[WORLD_MAX_RANKS];
    kvf_agent_options options = options_of(KVF_WAY_PACKED);
    options.idle_ns = SECOND;
    open_both_ways(&w, &options, &wanted, pulls);
    world_run_for(&w, 5 * SECOND);
    world_all_done(&w, &w.d, pulls);
    assert_int_equal(all_packed(&w.d), all_read(&w.d));
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 1), 0);
    world_run_for(&w, 4 * SECOND);
    assert_int_equal(world_stats(w.d.agents[0]).peers_evicted, 2); /* now they are idle */
    world_close(&w);
}

/* Another engine greets D, which has as many clients as it allows. */
static void a_session_whose_connection_carries_what_others_move_makes_no_room(void **state) {
    (void)state;
    world w;
    world_request wanted;
    uint64_t pulls[WORLD_MAX_RANKS], connect;
    kvf_agent_options options = options_of(KVF_WAY_PACKED);
    options.max_peers = 1;
    open_both_ways(&w, &options, &wanted, pulls);
    world_run_for(&w, 2 * SECOND);
    world_add(&w, ONE("E"), NULL);
    assert_ok(kvf_agent_connect(w.e.agents[0], &w.d.contact, 60 * SECOND, &connect));
    world_all_done(&w, &w.d, pulls);
    assert_int_equal(all_packed(&w.d), all_read(&w.d));
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 1), 0);
    (void)world_done(&w, w.e.agents[0], connect);
    world_close(&w);
}

/* P has not used D for long, and meets it again, while D reads from P by the connection of P's former session. */
static void a_client_that_joins_anew_leaves_what_others_move_alone(void **state) {
    (void)state;
    world w;
    world_request wanted, more;
    uint64_t pulls[WORLD_MAX_RANKS], others[WORLD_MAX_RANKS];
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    open_both_ways(&w, &options, &wanted, pulls);
    world_run_for(&w, SECOND);
    kvf_session *session = world_session(w.p.agents[0], false);
    session->joined = session->join_staged = false; /* as in a new session */
    world_request_make(&w, &w.d, "more", 20, 50, 1, &more);
    world_hold(&w.d, &more, others);
    world_request_make(&w, &w.p, "more", 20, 50, 1, &more);
    world_pull(&w.p, &more, &w.d, others);
    world_all_done(&w, &w.p, others);
    world_run_for(&w, 5 * SECOND);
    world_all_done(&w, &w.d, pulls);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 1), 0);
    world_close(&w);
}

/* As world_until(). What hangs at an agent keeps it busy, so time does not pass by itself. */
#define work_until(w, condition)                                                                             \
    for (uint64_t end_ = world_now() + 100 * SECOND; !(condition); net_advance(10 * MS)) {                   \
        assert_true(world_now() < end_);                                                                     \
        world_work(w);                                                                                       \
    }

/* D writes "pushed" to P, which joins anew meanwhile, and expects "more" of D. */
typedef struct anew_scene {
    world w;
    world_request slow, pushed, expected, more, wanted;
    uint64_t pulls[WORLD_MAX_RANKS], pushes[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS],
        others[WORLD_MAX_RANKS], news[WORLD_MAX_RANKS];
} anew_scene;

/* The writes hang for `turns`, or go slowly if that is 0. D reads "slow" by the connection with which it writes. */
static void join_while_written_to(anew_scene *s, uint32_t turns) {
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    open_both_ways(&s->w, &options, &s->slow, s->pulls);
    world_run_for(&s->w, SECOND);
    world_request_make(&s->w, &s->w.d, "pushed", 40, 40, 1, &s->pushed);
    world_request_make(&s->w, &s->w.p, "pushed", 40, 40, 1, &s->expected);
    world_request_make(&s->w, &s->w.d, "more", 20, 50, 1, &s->more);
    world_request_make(&s->w, &s->w.p, "more", 20, 50, 1, &s->wanted);
    s->pushed.request.way = s->expected.request.way = KVF_WAY_DIRECT;
    s->pushed.request.bytes_per_second = turns ? 0 : 1000;
    world_fill(&s->w, &s->w.d, &s->more, 3);
    world_expect(&s->w.p, &s->expected, &s->w.d, s->expects);
    world_push(&s->w.d, &s->pushed, s->pushes);
    world_push(&s->w.d, &s->more, s->others);
    world_ready(&s->w.d, s->others);
    world_run_for(&s->w, 100 * MS);
    if (turns)
        faulty_install(&(faulty_options){
            .seed = 1, .per_mille = {[FAULTY_LATE_START] = 1000, [FAULTY_DEAF] = 1000}, .turns = turns});
    world_ready(&s->w.d, s->pushes);
    if (turns) {
        world_until(&s->w, faulty_count(FAULTY_LATE_START) > 0);
        faulty_install(&(faulty_options){.seed = 1});
    } else {
        world_run_for(&s->w, 100 * MS);
    }
    kvf_agent *p = s->w.p.agents[0];
    kvf_session *session = world_session(p, false);
    assert_ok(kvf_agent_lock(p));
    kvf_work_take(p);
    session->joined = session->join_staged = false; /* as in a new session */
    assert_ok(kvf_session_join(session, true));
    kvf_work_give(p);
    kvf_agent_unlock(p);
    work_until(&s->w, session->joined);
    world_expect(&s->w.p, &s->wanted, &s->w.d, s->news);
}

static void a_client_that_joins_anew_while_it_is_written_to_leaves_what_others_move_alone(void **state) {
    (void)state;
    anew_scene s;
    join_while_written_to(&s, 0);
    const world_outcome *failed = world_failed(&s.w, s.w.d.agents[0], s.pushes[0], KVF_E_CANCELLED);
    assert_non_null(strstr(failed->detail, "the consumer has met this rank again"));
    (void)world_failed(&s.w, s.w.p.agents[0], s.expects[0], KVF_E_CANCELLED);
    world_all_done(&s.w, &s.w.d, s.pulls);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.slow, 1), 0);
    world_all_done(&s.w, &s.w.p, s.news);
    world_all_done(&s.w, &s.w.d, s.others);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.p, &s.wanted, 3), 0);
    world_close(&s.w);
}

/* D's writes for what P has forgotten hang in that connection, though what others move goes on: D leaves it when nothing
 * else uses it, and only then writes anew. */
static void writes_that_hang_are_left_when_what_others_move_by_their_connection_has_ended(void **state) {
    (void)state;
    anew_scene s;
    faulty_install(&(faulty_options){.seed = 1});
    join_while_written_to(&s, 100000000);
    const kvf_agent *p = s.w.p.agents[0], *d = s.w.d.agents[0];
    const uint64_t begun = world_now();
    work_until(&s.w, world_now() > begun + SECOND);
    assert_true(world_session(d, true)->may_hang);
    assert_int_equal(world_count(&s.w, d, KVF_EVENT_FAILED), 0);
    assert_int_equal(world_count(&s.w, p, KVF_EVENT_DONE), 1); /* "back" */
    work_until(&s.w, !world_session(d, true)->may_hang);
    assert_true(world_now() > begun + 10 * SECOND);
    world_all_done(&s.w, &s.w.d, s.pulls);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.slow, 1), 0);
    (void)world_failed(&s.w, s.w.d.agents[0], s.pushes[0], KVF_E_CANCELLED);
    /* P still knows that expectation here, and so shuts D out, which may cut what is written anew. */
    (void)world_failed(&s.w, s.w.p.agents[0], s.expects[0], KVF_E_PEER_LOST);
    (void)world_next(&s.w, s.w.p.agents[0], s.news[0]);
    (void)world_next(&s.w, s.w.d.agents[0], s.others[0]);
    world_request_make(&s.w, &s.w.d, "last", 20, 50, 1, &s.more);
    world_request_make(&s.w, &s.w.p, "last", 20, 53, 1, &s.wanted);
    world_push(&s.w.d, &s.more, s.others);
    world_ready(&s.w.d, s.others);
    world_expect(&s.w.p, &s.wanted, &s.w.d, s.news);
    world_all_done(&s.w, &s.w.p, s.news);
    world_all_done(&s.w, &s.w.d, s.others);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.p, &s.wanted, 3), 0);
    world_close(&s.w);
    faulty_remove();
}

/* Agents that cannot send a notification are always busy, so time does not pass by itself. */
static void work_while_busy(world *w) {
    for (int i = 0; i < 500; i++) {
        world_work(w);
        net_advance(NET_LATENCY_NS);
    }
}

/*
 * D has lost P while bytes moved between them, and meets it again. The connection from P to D may hang for any time: P
 * no longer uses it, whether the flow has ended without its END being sent (a push that P has given up), or goes on
 * under a lease that D has forgotten (a pull). That P connects anew shows in a connection that is refused.
 */
static void join_over_a_connection_that_hangs(bool pushes) {
    world w;
    world_request given, wanted;
    uint64_t theirs[WORLD_MAX_RANKS], ours[WORLD_MAX_RANKS];
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    faulty_install(&(faulty_options){.seed = 1});
    world_open_model(&w, attention(4, 8, 8), ONE("P"), ONE("D"), &options);
    world_request_make(&w, &w.p, "slow", 200, 0, 1, &given);
    world_request_make(&w, &w.d, "slow", 200, 20, 1, &wanted);
    (pushes ? &given : &wanted)->request.bytes_per_second = 8192;
    if (pushes) {
        world_expect(&w.d, &wanted, &w.p, ours);
        world_push(&w.p, &given, theirs);
        world_ready(&w.p, theirs);
    } else {
        world_hold(&w.p, &given, theirs);
        world_pull(&w.d, &wanted, &w.p, ours);
    }
    world_run_for(&w, SECOND);
    const kvf_stage *stage = w.p.agents[0]->stage;
    assert_false(kvf_stage_is_idle(stage));
    faulty_install(&(faulty_options){
        .seed = 1, .per_mille = {[FAULTY_NOT_NOTIFIED] = 1000, [FAULTY_NOT_CONNECTED] = 1000}});
    if (pushes) {
        (void)kvf_agent_cancel(w.p.agents[0], theirs[0]);
        work_while_busy(&w);
        assert_false(kvf_stage_is_idle(stage)); /* its END cannot be sent */
    }
    assert_int_equal(faulty_count(FAULTY_NOT_CONNECTED), 0);
    kvf_session *session = world_session(w.d.agents[0], false);
    session->joined = session->join_staged = false; /* as in a new session */
    world_request_make(&w, &w.d, "more", 20, 50, 1, &wanted);
    world_expect(&w.d, &wanted, &w.p, ours + 1);
    work_while_busy(&w);
    assert_true(faulty_count(FAULTY_NOT_CONNECTED) > 0);
    faulty_remove();
    world_close(&w);
}

static void a_client_that_joins_anew_is_not_served_by_a_connection_that_hangs(void **state) {
    (void)state;
    join_over_a_connection_that_hangs(true);
    join_over_a_connection_that_hangs(false);
}

/* P has lent slots to D when P loses the connection between them. The transport knows, or does not (`inside`), that D
 * has nothing under way any more: only then are the slots free. Either way D may connect again. */
static void lend_and_lose(bool inside) {
    world w;
    world_request wanted, more;
    uint64_t pulls[WORLD_MAX_RANKS], others[WORLD_MAX_RANKS];
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    faulty_install(&(faulty_options){.seed = 1});
    open_both_ways(&w, &options, &wanted, pulls);
    world_run_for(&w, SECOND);
    faulty_install(&(faulty_options){.seed = 1, .per_mille = {[FAULTY_STILL_INSIDE] = inside ? 1000 : 0}});
    kvf_agent *p = w.p.agents[0];
    assert_false(kvf_stage_is_idle(p->stage));
    world_session(w.p.agents[0], false)->peer_lost = true;
    kvf_sessions_due(p);
    world_run_for(&w, 10 * MS);
    assert_int_equal(faulty_count(FAULTY_STILL_INSIDE) > 0, inside);
    assert_int_equal(kvf_stage_is_idle(p->stage), !inside);
    faulty_install(&(faulty_options){.seed = 1});
    (void)kvf_agent_cancel(w.d.agents[0], pulls[0]);
    (void)world_next(&w, w.d.agents[0], pulls[0]);

    world_request_make(&w, &w.d, "more", 20, 50, 1, &more);
    world_hold(&w.d, &more, others);
    world_request_make(&w, &w.p, "more", 20, 50, 1, &more);
    world_pull(&w.p, &more, &w.d, others);
    world_all_done(&w, &w.p, others);
    world_close(&w);
    faulty_remove();
}

static void shut_out(kvf_agent *agent, const kvf_agent *writer) {
    assert_ok(kvf_agent_lock(agent));
    kvf_work_take(agent);
    (void)kvf_endpoint_stop(agent, writer->card, writer->card_bytes, false);
    kvf_work_give(agent);
    kvf_agent_unlock(agent);
}

/* D shuts P out while it reads from P. P cannot say any more that it has left the flow, and D reads by a connection that
 * goes on. With `both`, that was a connection that P made for requests of its own. */
static void pull_whose_producer_is_shut_out(bool both) {
    world w;
    world_request given, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    if (both) {
        open_both_ways(&w, &options, &wanted, pulls);
    } else {
        world_open_model(&w, attention(4, 8, 8), ONE("P"), ONE("D"), &options);
        world_request_make(&w, &w.p, "slow", 200, 0, 1, &given);
        world_request_make(&w, &w.d, "slow", 200, 20, 1, &wanted);
        wanted.request.bytes_per_second = 8192;
        world_hold(&w.p, &given, holds);
        world_pull(&w.d, &wanted, &w.p, pulls);
    }
    world_run_for(&w, SECOND);
    kvf_agent *d = w.d.agents[0];
    shut_out(d, w.p.agents[0]);
    const uint64_t shut = world_now();
    const world_outcome *failed = world_next(&w, d, pulls[0]);
    assert_int_equal(failed->kind, KVF_EVENT_FAILED);
    assert_true(world_now() - shut <= d->options.heartbeat_ns + SECOND);
    world_close(&w);
}

static void a_packed_pull_fails_soon_when_its_producer_is_shut_out(void **state) {
    (void)state;
    pull_whose_producer_is_shut_out(false);
    pull_whose_producer_is_shut_out(true);
}

/* D has a lease, and learns where to read to when P has left D, but before D has heard of that: P does not take what D
 * opens then. */
static void a_packed_pull_that_begins_when_its_producer_was_shut_out_fails_soon(void **state) {
    (void)state;
    world w;
    world_request given, wanted;
    uint64_t holds[WORLD_MAX_RANKS], pull;
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    world_open_model(&w, attention(4, 8, 8), ONE("P"), ONE("D"), &options);
    world_pull_everything(&w, "before", 40, 1); /* so P has D's card */
    kvf_agent *d = w.d.agents[0];
    world_request_make(&w, &w.p, "a", 200, 0, 1, &given);
    world_request_make(&w, &w.d, "a", 200, 20, 1, &wanted);
    world_hold(&w.p, &given, holds);
    kvf_agent_request later = wanted.request;
    later.contact = w.p.contact;
    later.groups = NULL;
    later.group_count = 0;
    assert_ok(kvf_agent_pull(d, &later, &pull));
    world_run_for(&w, SECOND);
    shut_out(d, w.p.agents[0]);
    world_run_for(&w, 100 * MS);
    const uint64_t begun = world_now();
    assert_ok(kvf_agent_pull_into(d, pull, wanted.groups, wanted.group_count));
    assert_int_equal(world_next(&w, d, pull)->kind, KVF_EVENT_FAILED);
    assert_true(world_now() - begun <= d->options.heartbeat_ns + SECOND);
    world_close(&w);
}

static void slots_lent_over_a_lost_connection_are_free_if_nothing_is_under_way(void **state) {
    (void)state;
    lend_and_lose(true);
    lend_and_lose(false);
}

static void push_and_check(world *w, const char *id, uint32_t seed) {
    world_request given, wanted;
    uint64_t pushes[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS];
    world_request_make(w, &w->p, id, 20, 0, 1, &given);
    world_request_make(w, &w->d, id, 20, 0, 1, &wanted);
    world_fill(w, &w->p, &given, seed);
    world_expect(&w->d, &wanted, &w->p, expects);
    world_push(&w->p, &given, pushes);
    world_ready(&w->p, pushes);
    world_all_done(w, &w->d, expects);
    world_all_done(w, &w->p, pushes);
    assert_int_equal(world_wrong_cells(w, &w->d, &wanted, seed), 0);
}

/* D's expectation reaches P in a session that P has forgotten: P is sent D's card anew there, although P had it. */
static void expect_of_a_producer_that_has_forgotten(kvf_way way) {
    world w;
    const kvf_agent_options options = options_of(way);
    world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
    push_and_check(&w, "before", 1);
    w.p.agents[0]->options.idle_ns = SECOND;
    w.p.agents[0]->due = 0;
    world_run_for(&w, 3 * SECOND);
    assert_int_equal(world_stats(w.p.agents[0]).peers_evicted, 1);
    assert_true(world_session(w.d.agents[0], false)->joined);
    push_and_check(&w, "after", 2);
    world_close(&w);
}

static void a_producer_that_has_forgotten_its_consumer_is_sent_the_card_with_the_expectation(void **state) {
    (void)state;
    expect_of_a_producer_that_has_forgotten(KVF_WAY_DIRECT);
    expect_of_a_producer_that_has_forgotten(KVF_WAY_PACKED);
}

/* A JOIN behind the EXPECT would end the flow that P has begun by then. */
static void a_consumer_that_has_forgotten_its_producer_sends_its_card_before_the_expectation(void **state) {
    (void)state;
    world w;
    world_request given, wanted;
    uint64_t pushes[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS];
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
    push_and_check(&w, "before", 1);
    kvf_session *session = world_session(w.d.agents[0], false);
    session->joined = session->join_staged = false; /* as in a new session */
    world_request_make(&w, &w.p, "after", 20, 0, 1, &given);
    world_request_make(&w, &w.d, "after", 20, 0, 1, &wanted);
    given.request.bytes_per_second = 8192;
    world_fill(&w, &w.p, &given, 2);
    world_push(&w.p, &given, pushes);
    world_ready(&w.p, pushes);
    world_run_for(&w, 10 * MS);
    world_expect(&w.d, &wanted, &w.p, expects);
    world_all_done(&w, &w.d, expects);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 2), 0);
    world_close(&w);
}

/* P has made thousands of calls to others, and numbers those of a new session from there on. D learns of that session when
 * its connection has come back. */
static void the_first_call_of_a_new_session_is_no_jump_from_those_of_the_former(void **state) {
    (void)state;
    world w;
    world_request given, wanted;
    uint64_t pushes[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS];
    const kvf_agent_options options = options_of(KVF_WAY_DIRECT);
    world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
    kvf_agent *p = w.p.agents[0], *d = w.d.agents[0];
    push_and_check(&w, "before", 1);
    p->last_number = 10000;
    world_lose(p, world_session(p, true));
    kvf_session *session = world_session(d, false);
    kvf_work_take(d);
    kvf_on_broken(d, session->route, KVF_E_PEER_LOST, "the connection broke");
    kvf_work_give(d);
    world_until(&w, session->openings == 2);
    world_request_make(&w, &w.p, "slow", 20, 40, 1, &given);
    world_request_make(&w, &w.d, "slow", 20, 40, 1, &wanted);
    given.request.bytes_per_second = 2048;
    world_fill(&w, &w.p, &given, 4);
    world_push(&w.p, &given, pushes);
    world_ready(&w.p, pushes);
    world_expect(&w.d, &wanted, &w.p, expects);
    world_run_for(&w, 100 * MS);
    push_and_check(&w, "b", 2);
    push_and_check(&w, "c", 3);
    world_all_done(&w, &w.d, expects);
    world_all_done(&w, &w.p, pushes);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 4), 0);
    assert_int_equal(session->openings, 2);
    world_close(&w);
}

/* Only D writes to blocks that go packed: it need not shut P out for those that P no longer knows of, and what P has begun
 * to write in the next session goes on. */
static void a_packed_expectation_that_was_forgotten_disturbs_no_other(void **state) {
    (void)state;
    world w;
    world_request given, forgotten, wanted;
    uint64_t pushes[WORLD_MAX_RANKS], lost[WORLD_MAX_RANKS], expects[WORLD_MAX_RANKS];
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    world_open_model(&w, attention(4, 8, 8), ONE("P"), ONE("D"), &options);
    push_and_check(&w, "before", 1);
    world_request_make(&w, &w.d, "forgotten", 20, 40, 1, &forgotten);
    world_expect(&w.d, &forgotten, &w.p, lost);
    world_run_for(&w, 100 * MS);
    world_lose(w.p.agents[0], world_session(w.p.agents[0], true));
    world_request_make(&w, &w.p, "slow", 200, 0, 1, &given);
    world_request_make(&w, &w.d, "slow", 200, 0, 1, &wanted);
    given.request.bytes_per_second = 20480; /* 204,800 bytes */
    world_fill(&w, &w.p, &given, 2);
    world_push(&w.p, &given, pushes);
    world_ready(&w.p, pushes);
    world_expect(&w.d, &wanted, &w.p, expects);
    assert_true(world_failed(&w, w.d.agents[0], lost[0], KVF_E_TIMEOUT)->blocks_free);
    assert_int_equal(world_stats(w.p.agents[0]).done[KVF_REQUEST_PUSH], 1); /* "slow" is under way */
    world_all_done(&w, &w.d, expects);
    world_all_done(&w, &w.p, pushes);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 2), 0);
    world_close(&w);
}

/* P has read from D, and writes to it: one of the two connections carries the flows of both sessions, until it is
 * lost. */
static void when_the_connection_that_carries_flows_is_lost_another_one_does(void **state) {
    (void)state;
    world w;
    char name[KVF_ENDPOINT_NAME_BYTES];
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
    kvf_agent *p = w.p.agents[0];
    kvf_endpoint_name(name, "D", 0, w.d.agents[0]->incarnation);
    pull_back(&w);
    kvf_session *out = world_session(w.p.agents[0], false);
    push_and_check(&w, "one", 1);
    const kvf_session *in = world_session(p, true);
    assert_ptr_not_equal(in->peer, out->peer);
    assert_ptr_equal(kvf_stage_peer_named(p->stage, name), out->peer);
    out->peer_lost = true;
    kvf_sessions_due(p);
    world_until(&w, in->peer && kvf_stage_peer_named(p->stage, name) == in->peer);
    push_and_check(&w, "two", 2);
    assert_int_equal(all_packed(&w.p), world_stats(p).bytes_read + world_stats(p).bytes_written);
    world_close(&w);
}

/* D's numbers jump, so P meets it again. A lease of the first session, whose connection carries the flows of both, ends
 * while D reads "slow" in the second. */
static void the_end_of_a_session_that_was_left_ends_no_flow_of_the_next(void **state) {
    (void)state;
    world w;
    world_request given, other, wanted, slow;
    uint64_t holds[WORLD_MAX_RANKS], others[WORLD_MAX_RANKS], direct[WORLD_MAX_RANKS],
        packed[WORLD_MAX_RANKS];
    kvf_agent_options options = options_of((kvf_way)0);
    options.idle_ns = 10 * SECOND;
    world_open_model(&w, attention(4, 8, 8), ONE("P"), ONE("D"), &options);
    push_and_check(&w, "before", 1);
    world_request_make(&w, &w.p, "direct", 50, 0, 1, &given);
    world_request_make(&w, &w.d, "direct", 50, 0, 1, &wanted);
    wanted.request.bytes_per_second = 10240; /* 51,200 bytes */
    wanted.request.way = KVF_WAY_DIRECT;
    world_fill(&w, &w.p, &given, 2);
    world_hold(&w.p, &given, holds);
    world_pull(&w.d, &wanted, &w.p, direct);
    world_run_for(&w, SECOND);
    kvf_session *session = world_session(w.d.agents[0], false);
    session->next_number += 5000;
    world_request_make(&w, &w.p, "slow", 200, 10, 1, &other);
    world_request_make(&w, &w.d, "slow", 200, 10, 1, &slow);
    slow.request.bytes_per_second = 20480; /* 204,800 bytes */
    slow.request.way = KVF_WAY_PACKED;
    world_fill(&w, &w.p, &other, 3);
    world_hold(&w.p, &other, others);
    world_pull(&w.d, &slow, &w.p, packed);
    world_all_done(&w, &w.d, direct);
    assert_int_equal(session->openings, 2);
    assert_true(world_stats(w.d.agents[0]).bytes_packed < 204800);
    world_all_done(&w, &w.d, packed);
    world_all_done(&w, &w.p, holds);
    world_all_done(&w, &w.p, others);
    assert_int_equal(world_wrong_cells(&w, &w.d, &wanted, 2), 0);
    assert_int_equal(world_wrong_cells(&w, &w.d, &slow, 3), 0);
    assert_int_equal(world_stats(w.p.agents[0]).peers_now, 2);
    world_until(&w, world_stats(w.p.agents[0]).peers_now == 1);
    world_close(&w);
}

/* P has no room for D's card and shard. D does not ask again for each request. */
static void a_client_whose_join_was_refused_does_not_join_again(void **state) {
    (void)state;
    world w;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    kvf_agent_options options = options_of(KVF_WAY_PACKED);
    options.max_bytes_per_key = sizeof(kvf_session) + 1000;
    world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
    letters_begin();
    letters_rule(LETTERS_PASS, w.d.agents[0], KVF_MESSAGE_CALL, KVF_CALL_JOIN);
    for (uint32_t i = 0; i < 2; i++) {
        pull_one(&w, &w.d, i ? "b" : "a", holds, pulls);
        (void)world_failed(&w, w.d.agents[0], pulls[0], KVF_E_UNSUPPORTED);
        assert_int_equal(letters_met(), 1);
    }
    letters_end();
    world_close(&w);
}

/* D sends E's card as its own. P must not take what then comes over that connection for E's. */
static void a_client_cannot_join_with_the_card_of_another(void **state) {
    (void)state;
    world w;
    uint64_t holds[WORLD_MAX_RANKS], pulls[WORLD_MAX_RANKS];
    char name[KVF_ENDPOINT_NAME_BYTES];
    const kvf_agent_options options = options_of(KVF_WAY_PACKED);
    world_open_model(&w, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
    world_add(&w, ONE("E"), &options);
    kvf_agent *p = w.p.agents[0], *d = w.d.agents[0], *e = w.e.agents[0];
    kvf_peer *peer = NULL;
    assert_ok(kvf_transport_connect(p->transport, e->card, e->card_bytes, &peer));
    (void)snprintf(name, sizeof name, "%s", kvf_peer_name(peer));
    kvf_peer_close(peer);

    const kvf_agent before = *d;
    d->card = e->card;
    d->card_bytes = e->card_bytes;
    pull_one(&w, &w.d, "a", holds, pulls);
    (void)world_failed(&w, d, pulls[0], KVF_E_UNSUPPORTED);
    assert_null(kvf_stage_peer_named(p->stage, name));
    d->card = before.card;
    d->card_bytes = before.card_bytes;
    assert_ok(kvf_agent_cancel(p, holds[0]));

    pull_one(&w, &w.e, "b", holds, pulls); /* the control */
    (void)world_done(&w, e, pulls[0]);
    assert_non_null(kvf_stage_peer_named(p->stage, name));
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pull_from_ranks_that_have_read_from_this_one_goes_packed_from_each_of_them),
        cmocka_unit_test(a_connection_that_carries_what_others_move_is_not_closed_as_idle),
        cmocka_unit_test(a_session_whose_connection_carries_what_others_move_makes_no_room),
        cmocka_unit_test(a_client_that_joins_anew_leaves_what_others_move_alone),
        cmocka_unit_test(a_client_that_joins_anew_while_it_is_written_to_leaves_what_others_move_alone),
        cmocka_unit_test(writes_that_hang_are_left_when_what_others_move_by_their_connection_has_ended),
        cmocka_unit_test(a_client_that_joins_anew_is_not_served_by_a_connection_that_hangs),
        cmocka_unit_test(slots_lent_over_a_lost_connection_are_free_if_nothing_is_under_way),
        cmocka_unit_test(a_packed_pull_fails_soon_when_its_producer_is_shut_out),
        cmocka_unit_test(a_packed_pull_that_begins_when_its_producer_was_shut_out_fails_soon),
        cmocka_unit_test(a_producer_that_has_forgotten_its_consumer_is_sent_the_card_with_the_expectation),
        cmocka_unit_test(a_consumer_that_has_forgotten_its_producer_sends_its_card_before_the_expectation),
        cmocka_unit_test(when_the_connection_that_carries_flows_is_lost_another_one_does),
        cmocka_unit_test(the_end_of_a_session_that_was_left_ends_no_flow_of_the_next),
        cmocka_unit_test(a_client_whose_join_was_refused_does_not_join_again),
        cmocka_unit_test(a_client_cannot_join_with_the_card_of_another),
        cmocka_unit_test(a_packed_expectation_that_was_forgotten_disturbs_no_other),
        cmocka_unit_test(the_first_call_of_a_new_session_is_no_jump_from_those_of_the_former),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
