/* Requests that were held or pushed and have ended: a peer that asks for one is told at once. And no rank reads a
 * request twice at a time. */
#include <stdio.h>

#include "agent/past.h"
#include "agent_letters.h"
#include "agent_scene.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define TP2(engine_name) ENGINE(.name = (engine_name), .tp_size = 2, .all = {.block_count = 64})
#define REMEMBERS(ns)                                                                                        \
    (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), .remember_ns = (ns)})
#define PATIENCE (5 * SECOND)

static void set_up(scene *s, const kvf_engine_spec *p, const kvf_engine_spec *d, uint64_t remember_ns) {
    scene_open(s, attention(2, 4, 8), p, d, REMEMBERS(remember_ns));
    s->wanted.request.patience_ns = PATIENCE;
}

/* Holds the request and reads it, until it is free again. */
static void hand_over(scene *s) {
    world_hold(&s->w.p, &s->held, s->theirs);
    scene_pull(s);
    world_all_done(&s->w, &s->w.p, s->theirs);
}

/* Pulls it once more, which must fail. Returns how long the pull waited. */
static uint64_t pull_in_vain(scene *s, kvf_status status, const char *text) {
    uint64_t begun = world_now();
    world_pull(&s->w.d, &s->wanted, &s->w.p, s->ours);
    const world_outcome *end = world_failed(&s->w, s->d, s->ours[0], status);
    assert_non_null(strstr(end->detail, text));
    assert_true(end->blocks_free);
    return world_now() - begun;
}

static void a_request_that_was_handed_over_is_refused_at_once(void **state) {
    (void)state;
    scene s;
    set_up(&s, TP2("P"), ONE("D"), 600 * SECOND);
    hand_over(&s);
    world_run_for(&s.w, 20 * SECOND);
    assert_true(pull_in_vain(&s, KVF_E_EXISTS, "was handed over 20.") < SECOND);
    scene_close(&s);
}

static void an_agent_that_remembers_nothing_waits_as_long_as_it_is_asked_to(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), 0);
    hand_over(&s);
    assert_true(pull_in_vain(&s, KVF_E_TIMEOUT, "the patience of the request has run out") >= PATIENCE);
    scene_close(&s);
}

static void a_request_that_nobody_came_for_is_refused_with_the_reason(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), 600 * SECOND);
    s.held.request.deadline_ns = SECOND;
    world_hold(&s.w.p, &s.held, s.theirs);
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT);
    assert_true(pull_in_vain(&s, KVF_E_NOT_FOUND, "with KVF_E_TIMEOUT") < SECOND);
    scene_close(&s);
}

static void a_request_that_was_pushed_is_refused_at_once(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), 600 * SECOND);
    world_push(&s.w.p, &s.held, s.theirs);
    world_ready(&s.w.p, s.theirs);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    uint64_t begun = world_now();
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    const world_outcome *end = world_failed(&s.w, s.d, s.ours[0], KVF_E_EXISTS);
    assert_non_null(strstr(end->detail, "was handed over"));
    assert_true(world_now() - begun < SECOND);
    scene_close(&s);
}

static void the_memory_ends(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), 10 * SECOND);
    hand_over(&s);
    world_run_for(&s.w, 11 * SECOND);
    assert_true(pull_in_vain(&s, KVF_E_TIMEOUT, "the patience of the request has run out") >= PATIENCE);
    scene_close(&s);
}

static void what_has_ended_is_remembered_for_exactly_that_long(void **state) {
    (void)state;
    scene s;
    const kvf_bytes id = {"a", 1};
    set_up(&s, ONE("P"), ONE("D"), 10 * SECOND);
    world_run_for(&s.w, 7 * SECOND);
    kvf_past_note(s.p, id, KVF_OK);
    assert_fails(kvf_past_look(s.p, id), KVF_E_EXISTS, "was handed over 0.0 s ago");
    world_run_for(&s.w, 10 * SECOND - 1);
    assert_fails(kvf_past_look(s.p, id), KVF_E_EXISTS, "was handed over 10.0 s ago");
    world_run_for(&s.w, 1);
    assert_ok(kvf_past_look(s.p, id));
    scene_close(&s);
}

static void an_id_that_is_used_again_is_a_new_request(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), 600 * SECOND);
    hand_over(&s);
    hand_over(&s);
    assert_true(pull_in_vain(&s, KVF_E_EXISTS, "was handed over") < SECOND);
    scene_close(&s);
}

static void the_refusal_is_repeated_where_it_was_lost(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), 600 * SECOND);
    hand_over(&s);
    letters_begin();
    letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_ANSWER, KVF_CALL_ACQUIRE);
    uint64_t begun = world_now();
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, letters_met() == 1);
    letters_no_rules();
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_EXISTS);
    assert_true(world_now() - begun < PATIENCE);
    letters_end();
    scene_close(&s);
}

static void the_oldest_are_forgotten_where_there_are_many(void **state) {
    (void)state;
    scene s;
    char id[16];
    set_up(&s, ONE("P"), ONE("D"), 600 * SECOND);
    for (uint32_t i = 0; i <= 16384; i++) {
        (void)snprintf(id, sizeof id, "%u", i);
        kvf_past_note(s.p, (kvf_bytes){id, strlen(id)}, KVF_E_CANCELLED);
    }
    s.wanted.request.id = (kvf_request_id){"1", 1};
    assert_true(pull_in_vain(&s, KVF_E_NOT_FOUND, "with KVF_E_CANCELLED") < SECOND);
    s.wanted.request.id = (kvf_request_id){"0", 1};
    assert_true(pull_in_vain(&s, KVF_E_TIMEOUT, "the patience of the request has run out") >= PATIENCE);
    scene_close(&s);
}

/* Otherwise the release of the first read would free the producer's blocks while the second still reads them. */
static void a_rank_reads_a_request_once_at_a_time(void **state) {
    (void)state;
    scene s;
    world_request second;
    uint64_t ticket;
    set_up(&s, ONE("P"), ONE("D"), 600 * SECOND);
    world_request_make(&s.w, &s.w.d, "a", 50, 30, 1, &second);
    second.request.contact = s.w.p.contact;
    const kvf_group_steps *groups = s.wanted.request.groups;
    s.wanted.request.groups = NULL;
    world_hold(&s.w.p, &s.held, s.theirs);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_stats(s.p).leases_now == 1);
    assert_fails(kvf_agent_pull(s.d, &second.request, &ticket), KVF_E_EXISTS, "of P", "already");
    assert_int_equal(world_block(s.d, 0, 30), KVF_BLOCK_FREE);
    assert_int_equal(world_stats(s.p).leases_now, 1);
    assert_ok(kvf_agent_pull_into(s.d, s.ours[0], groups, s.wanted.group_count));
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    scene_close(&s);
}

/* Written one after the other, the name of the engine and the id would be the same text. */
static void pulls_are_told_apart_by_engine_and_id(void **state) {
    (void)state;
    static const char *const names[][2] = {{"X", "Ya"}, {"XY", "a"}, {"Z", "Ya"}};
    scene s;
    uint64_t tickets[COUNT_OF(names)];
    set_up(&s, ONE("P"), ONE("D"), 600 * SECOND);
    for (uint32_t i = 0; i < COUNT_OF(names); i++) {
        const kvf_agent_request request = {
            .struct_size = sizeof request,
            .id = {names[i][1], strlen(names[i][1])},
            .contact = {.engine = names[i][0], .endpoint = "tcp://127.0.0.1:1"}};
        assert_ok(kvf_agent_pull(s.d, &request, &tickets[i]));
        assert_fails(kvf_agent_pull(s.d, &request, &tickets[i]), KVF_E_EXISTS, "reads this request of",
                     names[i][0]);
    }
    for (uint32_t i = 0; i < COUNT_OF(names); i++) {
        assert_ok(kvf_agent_cancel(s.d, tickets[i]));
        (void)world_failed(&s.w, s.d, tickets[i], KVF_E_CANCELLED);
    }
    scene_close(&s);
}

static void an_agent_remembers_for_a_day_at_most(void **state) {
    (void)state;
    kvf_agent *agent;
    assert_fails(kvf_agent_open(NULL, 0, REMEMBERS(86401 * SECOND), &agent), KVF_E_RANGE, "remember_ns",
                 "a day");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_that_was_handed_over_is_refused_at_once),
        cmocka_unit_test(an_agent_that_remembers_nothing_waits_as_long_as_it_is_asked_to),
        cmocka_unit_test(a_request_that_nobody_came_for_is_refused_with_the_reason),
        cmocka_unit_test(a_request_that_was_pushed_is_refused_at_once),
        cmocka_unit_test(the_memory_ends),
        cmocka_unit_test(what_has_ended_is_remembered_for_exactly_that_long),
        cmocka_unit_test(an_id_that_is_used_again_is_a_new_request),
        cmocka_unit_test(the_refusal_is_repeated_where_it_was_lost),
        cmocka_unit_test(the_oldest_are_forgotten_where_there_are_many),
        cmocka_unit_test(a_rank_reads_a_request_once_at_a_time),
        cmocka_unit_test(pulls_are_told_apart_by_engine_and_id),
        cmocka_unit_test(an_agent_remembers_for_a_day_at_most),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
