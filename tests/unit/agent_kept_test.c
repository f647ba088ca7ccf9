/* What an agent keeps for other engines can be listed: holds and pushes, how long, and for whom. */
#include "agent_scene.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define LEASE (10 * SECOND)
#define MOST 8u

static void set_up(scene *s) {
    static const kvf_agent_options options = {.struct_size = sizeof options, .lease_ns = LEASE};
    scene_open(s, attention(2, 4, 8), ONE("P"), ONE("D"), &options);
}

static uint32_t list(kvf_agent *agent, uint64_t after, kvf_kept_request *kept) {
    uint32_t count = UINT32_MAX;
    memset(kept, 0, MOST * sizeof *kept);
    kept[0].struct_size = sizeof *kept;
    assert_ok(kvf_agent_kept_requests(agent, after, kept, MOST, &count));
    return count;
}

static void holds_and_pushes_are_listed_as_they_were_made(void **state) {
    (void)state;
    scene s;
    world_request second;
    uint64_t pushed[WORLD_MAX_RANKS];
    kvf_kept_request kept[MOST];
    set_up(&s);
    assert_int_equal(list(s.p, 0, kept), 0);
    world_request_make(&s.w, &s.w.p, "another", 30, 10, 1, &second);
    second.request.consumers = 3;
    second.request.deadline_ns = 40 * SECOND;
    world_push(&s.w.p, &second, pushed);
    world_run_for(&s.w, 4 * SECOND);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_run_for(&s.w, 1 * SECOND);

    assert_int_equal(list(s.p, 0, kept), 2);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(kept[i].struct_size, sizeof *kept);
    assert_true(kept[0].ticket == pushed[0] && kept[1].ticket == s.theirs[0]);
    assert_int_equal(kept[0].request_kind, KVF_REQUEST_PUSH);
    assert_int_equal(kept[1].request_kind, KVF_REQUEST_HOLD);
    assert_true(kept[0].id_bytes == 7 && memcmp(kept[0].id, "another", 7) == 0);
    assert_true(kept[1].id_bytes == 1 && kept[1].id[0] == 'a');
    assert_true(kept[0].tokens == 30 && kept[1].tokens == 50);
    assert_true(kept[0].consumers == 3 && kept[1].consumers == 1);
    assert_true(kept[0].served == 0 && kept[1].served == 0);
    assert_true(!kept[0].moves && !kept[1].moves);
    assert_int_equal(kept[0].age_ns, 5 * SECOND);
    assert_int_equal(kept[1].age_ns, 1 * SECOND);
    assert_int_equal(kept[0].left_ns, 35 * SECOND);
    assert_int_equal(kept[1].left_ns, 9 * SECOND);
    assert_int_equal(list(s.d, 0, kept), 0);
    assert_ok(kvf_agent_cancel(s.p, pushed[0]));
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    scene_close(&s);
}

/* A pull that only reserves keeps its lease, which its heartbeats renew. */
static void a_readers_lease_counts_and_pulls_are_not_kept(void **state) {
    (void)state;
    scene s;
    kvf_kept_request kept[MOST];
    set_up(&s);
    s.held.request.consumers = 2;
    world_hold(&s.w.p, &s.held, s.theirs);
    const kvf_agent_request reserved = {
        .struct_size = sizeof reserved, .id = s.wanted.request.id, .contact = s.w.p.contact};
    assert_ok(kvf_agent_pull(s.d, &reserved, &s.ours[0]));
    world_run_for(&s.w, 3 * LEASE);
    assert_int_equal(list(s.p, 0, kept), 1);
    assert_true(kept[0].moves && kept[0].served == 0);
    assert_true(kept[0].left_ns > LEASE / 2 && kept[0].left_ns <= LEASE);
    assert_int_equal(list(s.d, 0, kept), 0);

    assert_ok(kvf_agent_pull_into(s.d, s.ours[0], s.wanted.groups, s.wanted.group_count));
    world_all_done(&s.w, &s.w.d, s.ours);
    world_run_for(&s.w, SECOND);
    assert_int_equal(list(s.p, 0, kept), 1);
    assert_true(!kept[0].moves && kept[0].served == 1 && kept[0].consumers == 2);
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    scene_close(&s);
}

static void a_push_moves_while_a_consumer_expects_it(void **state) {
    (void)state;
    scene s;
    kvf_kept_request kept[MOST];
    set_up(&s);
    world_push(&s.w.p, &s.held, s.theirs);
    world_expect(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, SECOND);
    assert_int_equal(list(s.p, 0, kept), 1);
    assert_true(kept[0].moves && kept[0].tokens == 50);
    assert_int_equal(list(s.d, 0, kept), 0);
    world_ready(&s.w.p, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(list(s.p, 0, kept), 0);
    scene_close(&s);
}

/* A reader goes on reading until its next heartbeat; the hold has ended for everybody else. */
static void what_was_cancelled_is_not_kept(void **state) {
    (void)state;
    scene s;
    kvf_kept_request kept[MOST];
    set_up(&s);
    world_hold(&s.w.p, &s.held, s.theirs);
    const kvf_agent_request reserved = {
        .struct_size = sizeof reserved, .id = s.wanted.request.id, .contact = s.w.p.contact};
    assert_ok(kvf_agent_pull(s.d, &reserved, &s.ours[0]));
    world_run_for(&s.w, SECOND);
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    assert_int_equal(world_stats(s.p).leases_now, 1);
    assert_int_equal(list(s.p, 0, kept), 0);
    (void)world_next(&s.w, s.d, s.ours[0]);
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
    scene_close(&s);
}

static void a_lease_may_have_no_limit(void **state) {
    (void)state;
    scene s;
    kvf_kept_request kept[MOST];
    set_up(&s);
    s.held.request.deadline_ns = UINT64_MAX;
    world_hold(&s.w.p, &s.held, s.theirs);
    assert_int_equal(list(s.p, 0, kept), 1);
    assert_true(kept[0].left_ns == UINT64_MAX);
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    scene_close(&s);
}

static void the_steps_of_the_group_with_most_count(void **state) {
    (void)state;
    scene s;
    world_request states;
    uint64_t more;
    kvf_kept_request kept[MOST];
    const kvf_engine_spec *spec =
        ENGINE(.name = "P", .all = {.block_count = 64}, .state = {.block_count = 64});
    scene_open(&s, hybrid(2), spec, ONE("D"), NULL);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_request_make(&s.w, &s.w.p, "states", 50, 10, 1, &states);
    states.groups[0] = (kvf_group_steps){.begin = 0};
    world_hold(&s.w.p, &states, &more);
    assert_int_equal(list(s.p, 0, kept), 2);
    assert_true(kept[0].tokens == 50 && kept[1].tokens == 1);
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    assert_ok(kvf_agent_cancel(s.p, more));
    scene_close(&s);
}

static void entries_count_as_the_tokens_they_stand_for(void **state) {
    (void)state;
    scene s;
    kvf_kept_request kept[MOST];
    kvf_model *model = entries_of(4);
    scene_open(&s, model, ENGINE(.name = "P", .all = {.block_count = 64}), ONE("D"), NULL);
    assert_int_equal(s.held.groups[0].end, 12);
    world_hold(&s.w.p, &s.held, s.theirs);
    assert_int_equal(list(s.p, 0, kept), 1);
    assert_int_equal(kept[0].tokens, 48); /* of 50, of which the last two complete no entry */
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    scene_close(&s);
}

/* As where the agent had no time to end it. */
static void nothing_is_left_of_a_lease_that_is_over(void **state) {
    (void)state;
    scene s;
    kvf_kept_request kept[MOST];
    set_up(&s);
    world_hold(&s.w.p, &s.held, s.theirs);
    s.w.p.agents[0] = NULL;
    world_run_for(&s.w, 2 * LEASE);
    assert_int_equal(list(s.p, 0, kept), 1);
    assert_int_equal(kept[0].age_ns, 2 * LEASE);
    assert_int_equal(kept[0].left_ns, 0);
    s.w.p.agents[0] = s.p;
    (void)world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT);
    scene_close(&s);
}

static void a_long_list_comes_in_parts(void **state) {
    (void)state;
    scene s;
    kvf_kept_request kept[MOST];
    uint64_t tickets[5];
    uint32_t count = 0;
    set_up(&s);
    for (uint32_t i = 0; i < 5; i++) {
        char name[] = {(char)('v' + i), '\0'};
        world_request one;
        world_request_make(&s.w, &s.w.p, name, 10, i, 1, &one);
        world_hold(&s.w.p, &one, &tickets[i]);
    }
    assert_ok(kvf_agent_kept_requests(s.p, 0, NULL, 0, &count));
    assert_int_equal(count, 5);
    memset(kept, 0xee, sizeof kept);
    kept[0].struct_size = sizeof *kept;
    assert_ok(kvf_agent_kept_requests(s.p, 0, kept, 2, &count));
    assert_true(count == 5 && kept[0].ticket == tickets[0] && kept[1].ticket == tickets[1]);
    assert_int_equal(kept[2].struct_size, UINT64_C(0xeeeeeeeeeeeeeeee));
    assert_ok(kvf_agent_kept_requests(s.p, tickets[1], kept, 2, &count));
    assert_true(count == 3 && kept[0].ticket == tickets[2] && kept[1].ticket == tickets[3]);
    assert_ok(kvf_agent_kept_requests(s.p, tickets[4], kept, 2, &count));
    assert_int_equal(count, 0);
    for (uint32_t i = 0; i < 5; i++)
        assert_ok(kvf_agent_cancel(s.p, tickets[i]));
    scene_close(&s);
}

static void callers_may_know_fewer_fields(void **state) {
    (void)state;
    struct {
        size_t struct_size;
        uint64_t ticket;
    } older[2] = {{.struct_size = sizeof *older}, {.ticket = 77}};
    scene s;
    uint32_t count;
    set_up(&s);
    world_hold(&s.w.p, &s.held, s.theirs);
    assert_ok(kvf_agent_kept_requests(s.p, 0, (kvf_kept_request *)(void *)older, 2, &count));
    assert_true(count == 1 && older[0].ticket == s.theirs[0] && older[1].ticket == 77);
    older[0].struct_size = 0;
    assert_fails(kvf_agent_kept_requests(s.p, 0, (kvf_kept_request *)(void *)older, 2, &count), KVF_E_INVALID,
                 "kvf_kept_request.struct_size is 0");
    assert_fails(kvf_agent_kept_requests(s.p, 0, NULL, 1, &count), KVF_E_INVALID, "kvf_kept_request is NULL");
    assert_fails(kvf_agent_kept_requests(s.p, 0, NULL, 0, NULL), KVF_E_INVALID, "count is NULL");
    assert_fails(kvf_agent_kept_requests(NULL, 0, NULL, 0, &count), KVF_E_INVALID, "agent is NULL");
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    scene_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(holds_and_pushes_are_listed_as_they_were_made),
        cmocka_unit_test(a_readers_lease_counts_and_pulls_are_not_kept),
        cmocka_unit_test(a_push_moves_while_a_consumer_expects_it),
        cmocka_unit_test(what_was_cancelled_is_not_kept),
        cmocka_unit_test(a_lease_may_have_no_limit),
        cmocka_unit_test(the_steps_of_the_group_with_most_count),
        cmocka_unit_test(entries_count_as_the_tokens_they_stand_for),
        cmocka_unit_test(nothing_is_left_of_a_lease_that_is_over),
        cmocka_unit_test(a_long_list_comes_in_parts),
        cmocka_unit_test(callers_may_know_fewer_fields),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
