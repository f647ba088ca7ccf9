/* Attempts that fail: which ones the call refuses, which may be repeated, and what the hold's event says. */
#include "agent_scene.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define TP2(engine_name) ENGINE(.name = (engine_name), .tp_size = 2, .all = {.block_count = 64})
#define LEASE(ns)                                                                                            \
    (&(const kvf_agent_options){                                                                             \
        .struct_size = sizeof(kvf_agent_options), .lease_ns = (ns), .peer_timeout_ns = 50 * MS})

static void set_up(scene *s, const kvf_engine_spec *p, const kvf_engine_spec *d,
                   const kvf_agent_options *options) {
    scene_open(s, attention(2, 4, 8), p, d, options);
}

/* ---- mistakes -------------------------------------------------------------------------------- */

/* The calls must refuse the request with both texts in the detail, and claim nothing. A push is refused by
 * kvf_agent_push_ready(), since blocks may come until then. */
static void assert_all_refuse(scene *s, const char *one, const char *other) {
    uint64_t ticket;
    assert_fails(kvf_agent_pull(s->d, &s->wanted.request, &ticket), KVF_E_RANGE, one, other);
    assert_fails(kvf_agent_expect(s->d, &s->wanted.request, &ticket), KVF_E_RANGE, one, other);
    assert_fails(kvf_agent_hold(s->d, &s->wanted.request, &ticket), KVF_E_RANGE, one, other);
    assert_ok(kvf_agent_push(s->d, &s->wanted.request, &ticket));
    assert_fails(kvf_agent_push_ready(s->d, ticket, NULL), KVF_E_RANGE, one, other);
    assert_ok(kvf_agent_cancel(s->d, ticket));
    assert_true(world_failed(&s->w, s->d, ticket, KVF_E_CANCELLED)->blocks_free);
    assert_int_equal(world_block(s->d, 0, 8), KVF_BLOCK_FREE);
}

static void a_table_that_is_too_short_is_refused_by_the_call(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), NULL);
    s.wanted.groups[0].table.count = 3; /* of the four that 50 tokens need */
    assert_all_refuse(&s, "[0, 4)", "[0, 3)");
    s.wanted.groups[0].end = 48;
    world_hold(&s.w.p, &s.held, s.theirs);
    scene_pull(&s);
    world_all_done(&s.w, &s.w.p, s.theirs);
    scene_close(&s);
}

static void a_table_that_begins_too_late_is_refused_by_the_call(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), NULL);
    s.wanted.groups[0].table.first_block = 1;
    s.wanted.groups[0].begin = 15;
    s.wanted.groups[0].end = 64;
    assert_all_refuse(&s, "[0, 4)", "[1, 5)");
    scene_close(&s);
}

static void a_table_without_a_block_where_one_is_needed_is_refused_by_the_call(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), NULL);
    s.wanted.ids[0][2] = KVF_NO_BLOCK;
    assert_all_refuse(&s, "block 2 of the sequence", "none");
    s.wanted.groups[0].begin = 48; /* only the last block is needed */
    world_hold(&s.w.p, &s.held, s.theirs);
    scene_pull(&s);
    world_all_done(&s.w, &s.w.p, s.theirs);
    scene_close(&s);
}

static void blocks_outside_of_a_window_need_not_be_there(void **state) {
    (void)state;
    scene s;
    memset(&s, 0, sizeof s);
    world_open_model(&s.w, latent_of(2, (kvf_group_desc){.name = "swa", .window_tokens = 20}), ONE("P"),
                     ONE("D"), NULL);
    world_request_make(&s.w, &s.w.p, "a", 50, 0, 1, &s.held);
    world_request_make(&s.w, &s.w.d, "a", 50, 8, 1, &s.wanted);
    world_fill(&s.w, &s.w.p, &s.held, 1);
    s.held.ids[0][0] = s.wanted.ids[0][0] = KVF_NO_BLOCK;
    world_hold(&s.w.p, &s.held, s.theirs);
    scene_pull(&s);
    world_all_done(&s.w, &s.w.p, s.theirs);
    scene_close(&s);
}

static void the_destination_that_is_named_later_is_checked_in_the_same_way(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), NULL);
    const kvf_group_steps *groups = s.wanted.request.groups;
    s.wanted.request.groups = NULL;
    world_hold(&s.w.p, &s.held, s.theirs);
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_stats(s.p).leases_now == 1);
    s.wanted.groups[0].table.count = 3;
    assert_fails(kvf_agent_pull_into(s.d, s.ours[0], groups, 1), KVF_E_RANGE, "[0, 3)");
    s.wanted.groups[0].table.count = 4;
    assert_ok(kvf_agent_pull_into(s.d, s.ours[0], groups, 1));
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    scene_close(&s);
}

/* ---- trying again ---------------------------------------------------------------------------- */

static void a_pull_that_wanted_too_much_is_repeated_with_less(void **state) {
    (void)state;
    scene s;
    world_request more;
    set_up(&s, TP2("P"), ONE("D"), NULL);
    world_request_make(&s.w, &s.w.d, "a", 60, 20, 1, &more);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_pull(&s.w.d, &more, &s.w.p, s.ours);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_RANGE);
    scene_pull(&s);
    world_all_done(&s.w, &s.w.p, s.theirs);
    scene_close(&s);
}

static void a_rank_that_was_cancelled_pulls_again_while_its_siblings_are_at_work(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), TP2("D"), NULL);
    world_hold(&s.w.p, &s.held, s.theirs);
    assert_ok(kvf_agent_pull(s.d, &s.wanted.request, &s.ours[0]));
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED);
    scene_pull(&s);
    world_all_done(&s.w, &s.w.p, s.theirs);
    scene_close(&s);
}

static void a_request_that_a_rank_has_read_is_not_lent_to_it_again(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), TP2("D"), NULL);
    world_hold(&s.w.p, &s.held, s.theirs);
    assert_ok(kvf_agent_pull(s.d, &s.wanted.request, &s.ours[0]));
    (void)world_done(&s.w, s.d, s.ours[0]);
    assert_ok(kvf_agent_pull(s.d, &s.wanted.request, &s.ours[0]));
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_EXISTS);
    assert_ok(kvf_agent_pull(s.w.d.agents[1], &s.wanted.request, &s.ours[1]));
    (void)world_done(&s.w, s.w.d.agents[1], s.ours[1]);
    world_all_done(&s.w, &s.w.p, s.theirs);
    scene_close(&s);
}

/* ---- the event of a hold --------------------------------------------------------------------- */

static void a_hold_whose_reader_was_cancelled_is_free_and_not_done(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), NULL);
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_stats(s.p).leases_now == 1);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    const world_outcome *end = world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
    assert_true(end->blocks_free);
    assert_non_null(strstr(end->detail, "D rank 0"));
    scene_close(&s);
}

static void a_hold_ends_as_the_rank_said_that_gave_it_up(void **state) {
    (void)state;
    scene s;
    world_request more;
    set_up(&s, ONE("P"), TP2("D"), NULL);
    world_request_make(&s.w, &s.w.d, "a", 60, 20, 1, &more);
    more.request.contact = s.w.p.contact;
    kvf_agent_request reserved = s.wanted.request;
    reserved.groups = NULL;
    world_hold(&s.w.p, &s.held, s.theirs);
    assert_ok(kvf_agent_pull(s.d, &reserved, &s.ours[0]));
    world_until(&s.w, world_stats(s.p).leases_now == 1);
    assert_ok(kvf_agent_cancel(s.d, s.ours[0]));
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_CANCELLED);
    kvf_agent *second = s.w.d.agents[1];
    assert_ok(kvf_agent_pull(second, &more.request, &s.ours[1]));
    (void)world_failed(&s.w, second, s.ours[1], KVF_E_RANGE);
    assert_ok(kvf_agent_pull(second, &s.wanted.request, &s.ours[1]));
    (void)world_done(&s.w, second, s.ours[1]);
    const world_outcome *end = world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED);
    assert_non_null(strstr(end->detail, "D rank 0 gave the request up"));
    scene_close(&s);
}

static void a_hold_whose_reader_failed_says_so_when_its_lease_is_over(void **state) {
    (void)state;
    scene s;
    world_request more;
    set_up(&s, ONE("P"), ONE("D"), LEASE(200 * MS));
    world_request_make(&s.w, &s.w.d, "a", 60, 20, 1, &more);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_pull(&s.w.d, &more, &s.w.p, s.ours);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_RANGE);
    const world_outcome *end = world_failed(&s.w, s.p, s.theirs[0], KVF_E_TIMEOUT);
    assert_non_null(strstr(end->detail, "KVF_E_RANGE"));
    scene_close(&s);
}

static void a_cancelled_hold_ends_though_its_reader_lives(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), LEASE(300 * MS));
    world_hold(&s.w.p, &s.held, s.theirs);
    s.wanted.request.groups = NULL; /* the reader only keeps its lease */
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_until(&s.w, world_stats(s.p).leases_now == 1);
    assert_ok(kvf_agent_cancel(s.p, s.theirs[0]));
    assert_true(world_failed(&s.w, s.p, s.theirs[0], KVF_E_CANCELLED)->blocks_free);
    (void)world_failed(&s.w, s.d, s.ours[0], KVF_E_TIMEOUT);
    scene_close(&s);
}

/* ---- waiting --------------------------------------------------------------------------------- */

static void a_pull_waits_for_its_hold_longer_than_a_lease(void **state) {
    (void)state;
    scene s;
    set_up(&s, ONE("P"), ONE("D"), NULL); /* leases last 30 s */
    s.wanted.request.deadline_ns = 100 * SECOND;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 90 * SECOND);
    world_hold(&s.w.p, &s.held, s.theirs);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_int_equal(world_count(&s.w, s.d, KVF_EVENT_PEER_LOST), 0);
    assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &s.wanted, 1), 0);
    scene_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_table_that_is_too_short_is_refused_by_the_call),
        cmocka_unit_test(a_table_that_begins_too_late_is_refused_by_the_call),
        cmocka_unit_test(a_table_without_a_block_where_one_is_needed_is_refused_by_the_call),
        cmocka_unit_test(blocks_outside_of_a_window_need_not_be_there),
        cmocka_unit_test(the_destination_that_is_named_later_is_checked_in_the_same_way),
        cmocka_unit_test(a_pull_that_wanted_too_much_is_repeated_with_less),
        cmocka_unit_test(a_rank_that_was_cancelled_pulls_again_while_its_siblings_are_at_work),
        cmocka_unit_test(a_request_that_a_rank_has_read_is_not_lent_to_it_again),
        cmocka_unit_test(a_hold_whose_reader_was_cancelled_is_free_and_not_done),
        cmocka_unit_test(a_hold_ends_as_the_rank_said_that_gave_it_up),
        cmocka_unit_test(a_hold_whose_reader_failed_says_so_when_its_lease_is_over),
        cmocka_unit_test(a_cancelled_hold_ends_though_its_reader_lives),
        cmocka_unit_test(a_pull_waits_for_its_hold_longer_than_a_lease),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
