/* Default durations, and the repetition of unanswered messages, in virtual time. */
#include <stdio.h>

#include "agent_letters.h"
#include "agent_scene.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})

static void set_up(scene *s) {
    scene_open(s, attention(2, 4, 8), ONE("P"), ONE("D"), NULL);
}

/* ---- defaults -------------------------------------------------------------------------------- */

static void a_pull_without_a_deadline_waits_for_two_minutes(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    s.wanted.request.deadline_ns = 0;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 119 * SECOND);
    assert_int_equal(world_count(&s.w, s.d, KVF_EVENT_FAILED), 0);
    world_run_for(&s.w, 2 * SECOND);
    assert_int_equal(world_count(&s.w, s.d, KVF_EVENT_FAILED), 1);
    assert_non_null(strstr(world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT)->detail, "deadline has passed"));
    scene_close(&s);
}

static void a_hold_without_a_lease_of_its_own_lasts_half_a_minute(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_run_for(&s.w, 29 * SECOND);
    assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_HELD);
    world_run_for(&s.w, 2 * SECOND);
    assert_int_equal(world_block(s.p, 0, 0), KVF_BLOCK_FREE);
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT);
    scene_close(&s);
}

static void a_connect_without_a_deadline_waits_for_half_a_minute(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    char endpoint[64];
    (void)snprintf(endpoint, sizeof endpoint, "%s", s.w.p.contact.endpoint);
    kvf_contact contact = {.engine = "P", .endpoint = endpoint};
    world_close_agents(&s.w.p);
    uint64_t ticket;
    assert_ok(kvf_agent_connect(s.d, &contact, 0, &ticket));
    world_run_for(&s.w, 29 * SECOND);
    assert_int_equal(world_count(&s.w, s.d, KVF_EVENT_FAILED), 0);
    world_run_for(&s.w, 2 * SECOND);
    assert_int_equal(world_count(&s.w, s.d, KVF_EVENT_FAILED), 1);
    assert_non_null(strstr(world_failed(&s.w, s.d, ticket, KVF_E_TIMEOUT)->detail, "deadline has passed"));
    scene_close(&s);
}

static void a_peer_without_requests_is_forgotten_after_ten_minutes(void **state) {
    (void)state;
    scene s;
    scene_open(&s, attention(2, 4, 8), ENGINE(.name = "P", .tp_size = 4, .all = {.block_count = 64}),
               ONE("D"), NULL);
    world_hold(&s.w.p, &s.held, s.theirs);
    scene_pull(&s);
    world_all_done(&s.w, &s.w.p, s.theirs);
    world_run_for(&s.w, 598 * SECOND);
    assert_int_equal(world_stats(s.p).peers_now, 1);
    assert_int_equal(world_stats(s.d).peers_now, 4);
    world_run_for(&s.w, 5 * SECOND);
    assert_int_equal(world_stats(s.p).peers_now, 0);
    assert_int_equal(world_stats(s.d).peers_now, 0);
    assert_int_equal(world_stats(s.p).peers_evicted, 1);
    scene_close(&s);
}

/* ---- statistics ------------------------------------------------------------------------------ */

static void the_time_in_the_queue_is_from_the_request_to_its_first_run(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    world_run_for(&s.w, 20 * SECOND);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 5 * SECOND);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    kvf_agent_stats stats = world_stats(s.d);
    assert_int_equal(stats.queue.count, 1);
    assert_in_range(stats.queue.sum_ns, 5 * SECOND, 8 * SECOND);
    scene_close(&s);
}

/* It is asked for at once, and written five seconds later. */
static void the_times_of_an_expectation_are_from_the_request_to_its_end(void **state) {
    (void)state;
    scene s;
    set_up(&s);
    world_run_for(&s.w, 20 * SECOND);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 5 * SECOND);
    world_push(&s.w.p, &s.held, s.theirs);
    world_ready(&s.w.p, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    kvf_agent_stats stats = world_stats(s.d);
    assert_int_equal(stats.queue.count, 1);
    assert_true(stats.queue.sum_ns < SECOND);
    assert_in_range(stats.transfer.sum_ns, 4 * SECOND, 6 * SECOND);
    assert_in_range(stats.total.sum_ns, 5 * SECOND, 6 * SECOND);
    scene_close(&s);
}

/* ---- repetitions ----------------------------------------------------------------------------- */

/* The number of messages of a kind from D after `ms`. */
typedef struct checkpoint {
    uint64_t ms;
    uint32_t messages;
} checkpoint;

static void check_repetitions(scene *s, letters_fate fate, kvf_message_kind kind, kvf_call_kind call,
                              const checkpoint *points, size_t count) {
    uint64_t begun = world_now();
    letters_begin();
    letters_rule(fate, s->d, kind, call);
    world_pull(&s->w.d, &s->wanted, &s->w.p, s->ours);
    for (size_t i = 0; i < count; i++) {
        world_run_for(&s->w, begun + points[i].ms * MS - world_now());
        if (letters_met() != points[i].messages)
            fail_msg("%u messages in %u ms, not %u", letters_met(), (unsigned)points[i].ms,
                     points[i].messages);
    }
    letters_end();
}

static void pull_after_all(scene *s) {
    world_hold(&s->w.p, &s->held, s->theirs);
    world_all_done(&s->w, &s->w.d, s->ours);
    world_all_done(&s->w, &s->w.p, s->theirs);
    assert_int_equal(world_wrong_cells(&s->w, &s->w.d, &s->wanted, 1), 0);
    scene_close(s);
}

/* A HELLO is repeated after 50 ms, then after twice as long each time, up to a second. */
static void an_engine_that_does_not_answer_is_greeted_again(void **state) {
    (void)state;
    static const checkpoint points[] = {{40, 1},   {60, 2},   {140, 2},  {160, 3},  {340, 3},  {360, 4},
                                        {740, 4},  {760, 5},  {1540, 5}, {1560, 6}, {2540, 6}, {2560, 7},
                                        {3540, 7}, {3560, 8}, {4540, 8}, {4560, 9}};
    scene s;
    set_up(&s);
    check_repetitions(&s, LETTERS_LOSE, KVF_MESSAGE_HELLO, 0, points, COUNT_OF(points));
    pull_after_all(&s);
}

/* The same for one of its ranks; the first message asked for the ranks. */
static void a_rank_that_is_not_ready_is_greeted_again(void **state) {
    (void)state;
    static const checkpoint points[] = {{40, 2},  {60, 3},  {140, 3},  {160, 4},  {340, 4},  {360, 5},
                                        {740, 5}, {760, 6}, {1540, 6}, {1560, 7}, {2540, 7}, {2560, 8}};
    scene s;
    set_up(&s);
    const uint64_t bytes = kvf_shard_get(kvf_engine_shard(s.w.p.engine, 0))->region_bytes[0];
    kvf_memory memory = {.struct_size = sizeof memory, .address = s.w.p.memory[0][0], .bytes = bytes};
    assert_ok(kvf_agent_unregister_region(s.p, 0));
    check_repetitions(&s, LETTERS_PASS, KVF_MESSAGE_HELLO, 0, points, COUNT_OF(points));
    assert_ok(kvf_agent_register_region(s.p, 0, &memory));
    pull_after_all(&s);
}

/* A call is repeated after 100 ms, then after twice as long each time, up to two seconds. */
static void a_call_that_is_not_answered_is_repeated(void **state) {
    (void)state;
    static const checkpoint points[] = {{90, 1},   {110, 2},  {290, 2},  {310, 3},  {690, 3},
                                        {710, 4},  {1490, 4}, {1510, 5}, {3090, 5}, {3110, 6},
                                        {5090, 6}, {5110, 7}, {7090, 7}, {7110, 8}};
    scene s;
    set_up(&s);
    check_repetitions(&s, LETTERS_LOSE, KVF_MESSAGE_CALL, KVF_CALL_ACQUIRE, points, COUNT_OF(points));
    assert_int_equal(world_stats(s.d).messages_repeated, 7);
    pull_after_all(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pull_without_a_deadline_waits_for_two_minutes),
        cmocka_unit_test(a_hold_without_a_lease_of_its_own_lasts_half_a_minute),
        cmocka_unit_test(a_connect_without_a_deadline_waits_for_half_a_minute),
        cmocka_unit_test(a_peer_without_requests_is_forgotten_after_ten_minutes),
        cmocka_unit_test(the_time_in_the_queue_is_from_the_request_to_its_first_run),
        cmocka_unit_test(the_times_of_an_expectation_are_from_the_request_to_its_end),
        cmocka_unit_test(an_engine_that_does_not_answer_is_greeted_again),
        cmocka_unit_test(a_rank_that_is_not_ready_is_greeted_again),
        cmocka_unit_test(a_call_that_is_not_answered_is_repeated),
    };
    return cmocka_run_group_tests_name("agent_times", tests, world_is_simulated, world_is_real);
}
