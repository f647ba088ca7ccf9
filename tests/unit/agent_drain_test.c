/* Draining: nothing new is accepted, what is under way ends, and what does not is cancelled in the end. Resuming takes
 * that back. */
#include <sys/eventfd.h>
#include <unistd.h>

#include "agent/agent.h"
#include "agent_letters.h"
#include "agent_scene.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define TP2(engine_name) ENGINE(.name = (engine_name), .tp_size = 2, .all = {.block_count = 64})
#define LONG (100 * SECOND)
#define DRAINS "the engine drains"

static void set_up(scene *s) {
    scene_open(s, attention(2, 4, 8), ONE("P"), ONE("D"), NULL);
}

/* The DRAINED of an agent that came last, of `count`. */
static const world_outcome *last_drained(scene *s, const kvf_agent *agent, uint32_t count) {
    world_until(&s->w, world_count(&s->w, agent, KVF_EVENT_DRAINED) == count);
    const world_outcome *last = NULL;
    for (uint32_t i = 0; i < s->w.outcome_count; i++)
        if (s->w.outcomes[i].agent == agent && s->w.outcomes[i].kind == KVF_EVENT_DRAINED)
            last = &s->w.outcomes[i];
    assert_non_null(last);
    return last;
}

static const world_outcome *drained(scene *s, kvf_agent *agent, kvf_status status) {
    const world_outcome *end = last_drained(s, agent, 1);
    assert_int_equal(end->status, status);
    assert_int_equal(world_stats(agent).leases_now, 0);
    return end;
}

static void refused(scene *s, uint64_t ticket) {
    const uint64_t begun = world_now();
    const world_outcome *end = world_failed(&s->w, s->d, ticket, KVF_E_NOT_FOUND);
    assert_non_null(strstr(end->detail, DRAINS));
    assert_true(end->blocks_free);
    assert_true(world_now() - begun < SECOND);
}

static void an_idle_agent_has_drained_at_once_and_accepts_nothing(void **state) {
    (void)state;
    scene s;
    uint64_t ticket;
    set_up(&s);
    assert_ok(kvf_agent_drain(s.p, LONG));
    drained(&s, s.p, KVF_OK);
    assert_fails(kvf_agent_hold(s.p, &s.held.request, &ticket), KVF_E_CANCELLED, "drains", "kvf_agent_drain");
    assert_fails(kvf_agent_push(s.p, &s.held.request, &ticket), KVF_E_CANCELLED, "drains", "kvf_agent_drain");
    assert_fails(kvf_agent_pull(s.p, &s.held.request, &ticket), KVF_E_CANCELLED, "drains", "kvf_agent_drain");
    assert_fails(kvf_agent_expect(s.p, &s.held.request, &ticket), KVF_E_CANCELLED, "drains",
                 "kvf_agent_drain");
    assert_fails(kvf_agent_connect(s.p, &s.w.d.contact, 0, &ticket), KVF_E_CANCELLED, "drains",
                 "kvf_agent_drain");
    assert_ok(kvf_agent_drain(s.p, 0));
    world_run_for(&s.w, SECOND);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_DRAINED), 1);
    scene_close(&s);
}

static void held_requests_are_still_read_by_consumers_that_come_later(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    world_hold(&s.w.p, &s.held, s.theirs);
    assert_ok(kvf_agent_drain(s.p, LONG));
    world_run_for(&s.w, SECOND);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_DRAINED), 0);
    scene_pull(&s);
    world_all_done(&s.w, &s.w.p, s.theirs);
    drained(&s, s.p, KVF_OK);
    scene_close(&s);
}

static void a_push_takes_its_chunks_and_its_consumers(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    world_push(&s.w.p, &s.held, s.theirs);
    assert_ok(kvf_agent_push_ready(s.p, s.theirs[0], CHUNK(0, 32, UINT32_MAX)));
    assert_ok(kvf_agent_drain(s.p, LONG));
    world_run_for(&s.w, SECOND);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, SECOND);
    assert_ok(kvf_agent_push_ready(s.p, s.theirs[0], NULL));
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    drained(&s, s.p, KVF_OK);
    scene_close(&s);
}

static void a_consumer_that_asks_while_the_producer_drains_is_refused_at_once(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    assert_ok(kvf_agent_drain(s.p, LONG));
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    refused(&s, s.ours[0]);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    refused(&s, s.ours[0]);
    scene_close(&s);
}

/* Two requests wait: one for a hold, one for a push. */
static void wait_in_vain(scene *s, world_request *second, uint64_t *expected) {
    world_request_make(&s->w, &s->w.d, "b", 50, 30, 1, second);
    world_pull(&s->w.d, &s->wanted, &s->w.p, s->ours);
    world_expect(&s->w.d, second, &s->w.p, expected);
    world_run_for(&s->w, 5 * SECOND);
    assert_int_equal(s->w.outcome_count, 0);
}

static void a_consumer_that_waits_already_is_refused_when_the_producer_drains(void **state) {
    (void)state;
    scene s;
    world_request second;
    uint64_t expected[WORLD_MAX_RANKS];
    set_up(&s);
    wait_in_vain(&s, &second, expected);
    assert_ok(kvf_agent_drain(s.p, LONG));
    refused(&s, s.ours[0]);
    refused(&s, expected[0]);
    drained(&s, s.p, KVF_OK);
    scene_close(&s);
}

static void a_refusal_that_is_lost_is_repeated(void **state) {
    (void)state;
    scene s;
    world_request second;
    uint64_t expected[WORLD_MAX_RANKS];
    set_up(&s);
    wait_in_vain(&s, &second, expected);
    letters_begin();
    letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_CALL, KVF_CALL_WRITTEN);
    assert_ok(kvf_agent_drain(s.p, LONG));
    world_until(&s.w, letters_met() == 1);
    letters_no_rules();
    refused(&s, expected[0]);
    letters_end();
    refused(&s, s.ours[0]);
    drained(&s, s.p, KVF_OK);
    scene_close(&s);
}

static void a_consumer_that_waits_for_blocks_that_are_not_ready_is_served(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    const int fd = eventfd(0, EFD_CLOEXEC);
    const kvf_ready_event after = {.struct_size = sizeof after, .kind = KVF_READY_FD, .fd = fd};
    s.held.request.after = &after;
    world_hold(&s.w.p, &s.held, s.theirs);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, SECOND);
    assert_ok(kvf_agent_drain(s.p, LONG));
    world_run_for(&s.w, SECOND);
    assert_int_equal(s.w.outcome_count, 0);
    assert_int_equal(write(fd, &(uint64_t){1}, sizeof(uint64_t)), sizeof(uint64_t));
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    drained(&s, s.p, KVF_OK);
    (void)close(fd);
    scene_close(&s);
}

static void a_consumer_that_waits_for_blocks_that_never_come_is_refused_with_them(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    const int fd = eventfd(0, EFD_CLOEXEC);
    const kvf_ready_event after = {.struct_size = sizeof after, .kind = KVF_READY_FD, .fd = fd};
    s.held.request.after = &after;
    world_hold(&s.w.p, &s.held, s.theirs);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, SECOND);
    assert_ok(kvf_agent_drain(s.p, LONG));
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    refused(&s, s.ours[0]);
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
    drained(&s, s.p, KVF_OK);
    (void)close(fd);
    scene_close(&s);
}

/* The peer has heard of it, too, when the consumer says that it has drained: it may be closed. */
static void a_consumer_gets_what_it_has_asked_for(void **state) {
    (void)state;
    scene s;
    scene_open(&s, attention(2, 4, 8), TP2("P"), ONE("D"), NULL);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, SECOND);
    assert_ok(kvf_agent_drain(s.d, LONG));
    world_hold(&s.w.p, &s.held, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    drained(&s, s.d, KVF_OK);
    for (uint32_t r = 0; r < s.w.p.rank_count; r++)
        assert_int_equal(world_stats(s.w.p.agents[r]).leases_now, 0);
    world_all_done(&s.w, &s.w.p, s.theirs);
    scene_close(&s);
}

static void requests_that_have_not_ended_in_time_are_cancelled(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    s.held.request.deadline_ns = LONG;
    world_hold(&s.w.p, &s.held, s.theirs);
    const uint64_t begun = world_now();
    assert_ok(kvf_agent_drain(s.p, 2 * SECOND));
    const world_outcome *end = world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
    assert_non_null(strstr(end->detail, "time to drain"));
    assert_true(world_now() - begun >= 2 * SECOND && world_now() - begun < 3 * SECOND);
    assert_non_null(strstr(drained(&s, s.p, KVF_E_TIMEOUT)->detail, "1 requests were cancelled"));
    scene_close(&s);
}

static void a_second_call_sets_the_time_anew(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    s.held.request.deadline_ns = LONG;
    world_hold(&s.w.p, &s.held, s.theirs);
    assert_ok(kvf_agent_drain(s.p, UINT64_MAX));
    world_run_for(&s.w, 5 * SECOND);
    const uint64_t begun = world_now();
    assert_ok(kvf_agent_drain(s.p, 0));
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
    assert_true(world_now() - begun < SECOND);
    drained(&s, s.p, KVF_E_TIMEOUT);
    scene_close(&s);
}

static void an_agent_that_is_closed_while_it_drains(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    world_hold(&s.w.p, &s.held, s.theirs);
    assert_ok(kvf_agent_drain(s.p, LONG));
    world_run_for(&s.w, SECOND);
    world_close(&s.w);
}

static void a_directory_has_nothing_to_drain(void **state) {
    (void)state;
    kvf_agent *agent;
    assert_ok(kvf_agent_open(NULL, 0, NULL, &agent));
    assert_fails(kvf_agent_drain(agent, 0), KVF_E_INVALID, "directory", "no memory");
    assert_fails(kvf_agent_resume(agent), KVF_E_INVALID, "directory", "no memory");
    kvf_agent_close(agent);
    assert_fails(kvf_agent_drain(NULL, 0), KVF_E_INVALID, "agent", "NULL");
    assert_fails(kvf_agent_resume(NULL), KVF_E_INVALID, "agent", "NULL");
}

/* ---- resuming ---------------------------------------------------------------------------------- */

/* The request is held, read, and arrives whole. */
static void serves(scene *s) {
    world_hold(&s->w.p, &s->held, s->theirs);
    scene_pull(s);
    world_all_done(&s->w, &s->w.p, s->theirs);
}

static void an_agent_that_has_drained_serves_again(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    assert_ok(kvf_agent_drain(s.p, LONG));
    drained(&s, s.p, KVF_OK);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    refused(&s, s.ours[0]);
    assert_ok(kvf_agent_resume(s.p));
    serves(&s);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_DRAINED),
                     1); /* it was taken before, and stays as it is */
    assert_int_equal(last_drained(&s, s.p, 1)->status, KVF_OK);
    scene_close(&s);
}

static void to_resume_an_agent_that_does_not_drain_does_nothing(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    assert_ok(kvf_agent_resume(s.p));
    serves(&s);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_DRAINED), 0);
    scene_close(&s);
}

static void a_drain_that_is_taken_back_ends_as_cancelled_and_its_requests_go_on(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    world_hold(&s.w.p, &s.held, s.theirs);
    assert_ok(kvf_agent_drain(s.p, SECOND));
    world_run_for(&s.w, SECOND / 2);
    assert_ok(kvf_agent_resume(s.p));
    const world_outcome *end = last_drained(&s, s.p, 1);
    assert_int_equal(end->status, KVF_E_CANCELLED);
    assert_string_equal(end->detail, "the agent was resumed");
    world_run_for(&s.w, 5 * SECOND); /* the time to drain is over, and cancels nothing */
    assert_int_equal(s.w.outcome_count, 1);
    scene_pull(&s);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_DRAINED), 1);
    scene_close(&s);
}

static void a_consumer_that_was_not_refused_yet_goes_on_waiting(void **state) {
    (void)state;
    scene s;
    world_request second;
    uint64_t expected[WORLD_MAX_RANKS];
    set_up(&s);
    wait_in_vain(&s, &second, expected);
    assert_ok(kvf_agent_drain(s.p, LONG));
    assert_ok(kvf_agent_resume(s.p)); /* before the agent has worked */
    world_run_for(&s.w, 5 * SECOND);
    assert_int_equal(last_drained(&s, s.p, 1)->status, KVF_E_CANCELLED);
    assert_int_equal(s.w.outcome_count, 1);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    assert_ok(kvf_agent_cancel(s.d, expected[0]));
    (void)world_failed(&s.w, s.d, expected[0], KVF_E_CANCELLED);
    scene_close(&s);
}

static void what_the_drain_has_cancelled_stays_cancelled(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    s.held.request.deadline_ns = LONG;
    world_hold(&s.w.p, &s.held, s.theirs);
    assert_ok(kvf_agent_drain(s.p, 0));
    assert_ok(kvf_agent_progress(s.p, NULL)); /* the request is cancelled, and has not gone yet */
    assert_ok(kvf_agent_resume(s.p));
    const world_outcome *end = last_drained(&s, s.p, 1);
    assert_int_equal(end->status, KVF_E_CANCELLED);
    assert_string_equal(end->detail,
                        "the agent was resumed; 1 requests were cancelled: they had not ended in time");
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
    scene_close(&s);
}

static void an_event_that_nobody_has_taken_says_that_the_agent_was_resumed(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    kvf_event_peer(s.p, KVF_EVENT_PEER_REFUSED, "X", 0, KVF_E_PERMISSION, "no"); /* stays as it is */
    assert_ok(kvf_agent_drain(s.p, LONG));
    assert_ok(kvf_agent_progress(s.p, NULL)); /* it has drained, and the event waits */
    assert_ok(kvf_agent_resume(s.p));
    assert_int_equal(last_drained(&s, s.p, 1)->status, KVF_E_CANCELLED);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 1);
    serves(&s);
    scene_close(&s);
}

static void a_resumed_agent_can_be_drained_again(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    for (uint32_t i = 1; i <= 3; i++) {
        s.held.request.deadline_ns = LONG;
        world_hold(&s.w.p, &s.held, s.theirs);
        assert_ok(kvf_agent_drain(s.p, 0));
        const world_outcome *end = last_drained(&s, s.p, i);
        assert_int_equal(end->status, KVF_E_TIMEOUT);
        assert_string_equal(end->detail,
                            "1 requests were cancelled: they had not ended in time"); /* counted anew */
        assert_ok(kvf_agent_resume(s.p));
    }
    serves(&s);
    assert_ok(kvf_agent_drain(s.p, LONG)); /* late as the drains before were, this one is not */
    assert_int_equal(last_drained(&s, s.p, 4)->status, KVF_OK);
    scene_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_idle_agent_has_drained_at_once_and_accepts_nothing),
        cmocka_unit_test(held_requests_are_still_read_by_consumers_that_come_later),
        cmocka_unit_test(a_push_takes_its_chunks_and_its_consumers),
        cmocka_unit_test(a_consumer_that_asks_while_the_producer_drains_is_refused_at_once),
        cmocka_unit_test(a_consumer_that_waits_already_is_refused_when_the_producer_drains),
        cmocka_unit_test(a_refusal_that_is_lost_is_repeated),
        cmocka_unit_test(a_consumer_that_waits_for_blocks_that_are_not_ready_is_served),
        cmocka_unit_test(a_consumer_that_waits_for_blocks_that_never_come_is_refused_with_them),
        cmocka_unit_test(a_consumer_gets_what_it_has_asked_for),
        cmocka_unit_test(requests_that_have_not_ended_in_time_are_cancelled),
        cmocka_unit_test(a_second_call_sets_the_time_anew),
        cmocka_unit_test(an_agent_that_is_closed_while_it_drains),
        cmocka_unit_test(a_directory_has_nothing_to_drain),
        cmocka_unit_test(an_agent_that_has_drained_serves_again),
        cmocka_unit_test(to_resume_an_agent_that_does_not_drain_does_nothing),
        cmocka_unit_test(a_drain_that_is_taken_back_ends_as_cancelled_and_its_requests_go_on),
        cmocka_unit_test(a_consumer_that_was_not_refused_yet_goes_on_waiting),
        cmocka_unit_test(what_the_drain_has_cancelled_stays_cancelled),
        cmocka_unit_test(an_event_that_nobody_has_taken_says_that_the_agent_was_resumed),
        cmocka_unit_test(a_resumed_agent_can_be_drained_again),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
