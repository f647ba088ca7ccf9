/* What an engine can look up: the requests of blocks, memory that is kept for peers, clocks. */
#include "agent/remote.h"
#include "agent/session.h"
#include "agent_letters.h"
#include "agent_scene.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})

static void set_up(scene *s) {
    scene_open(s, hybrid(2), ONE("P"), ONE("D"), NULL);
}

static void check_block(kvf_agent *agent, uint32_t group, uint32_t block, kvf_block_state state,
                        uint32_t requests) {
    kvf_block_state found = KVF_BLOCK_IN_DOUBT;
    uint32_t count = 99;
    assert_ok(kvf_agent_block(agent, group, block, &found, &count));
    assert_int_equal(found, state);
    assert_int_equal(count, requests);
}

/* 50 tokens take four blocks of group 0, and one state takes a block of group 1, of another number. */
static void a_block_is_one_of_its_group(void **state) {
    (void)state;
    scene s;
    uint64_t again;
    set_up(&s);
    s.held.ids[1][0] = 20;
    world_hold(&s.w.p, &s.held, s.theirs);
    check_block(s.p, 0, 3, KVF_BLOCK_HELD, 1);
    check_block(s.p, 0, 4, KVF_BLOCK_FREE, 0);
    check_block(s.p, 0, 20, KVF_BLOCK_FREE, 0);
    check_block(s.p, 1, 20, KVF_BLOCK_HELD, 1);
    check_block(s.p, 1, 21, KVF_BLOCK_FREE, 0);
    kvf_agent_request other = s.held.request;
    other.id = (kvf_request_id){"other", 5};
    assert_ok(kvf_agent_hold(s.p, &other, &again));
    check_block(s.p, 0, 3, KVF_BLOCK_HELD, 2);
    s.wanted.request.groups = NULL; /* reserved, but not read yet */
    s.wanted.request.group_count = 0;
    world_pull(&s.w.d, &s.wanted, &s.w.p, s.ours);
    world_run_for(&s.w, 100 * MS);
    check_block(s.p, 0, 3, KVF_BLOCK_LEASED, 2);
    check_block(s.p, 0, 4, KVF_BLOCK_FREE, 0);
    check_block(s.d, 0, 8, KVF_BLOCK_FREE, 0);
    assert_ok(kvf_agent_pull_into(s.d, s.ours[0], s.wanted.groups, 2));
    check_block(s.d, 0, 8, KVF_BLOCK_FILLING, 1);
    check_block(s.d, 1, 8, KVF_BLOCK_FILLING, 1);
    check_block(s.d, 1, 9, KVF_BLOCK_FREE, 0);
    world_all_done(&s.w, &s.w.d, s.ours);
    world_all_done(&s.w, &s.w.p, s.theirs);
    check_block(s.p, 0, 3, KVF_BLOCK_HELD, 1);
    assert_ok(kvf_agent_cancel(s.p, again));
    (void)world_failed(&s.w, s.p, again, KVF_E_CANCELLED);
    check_block(s.p, 0, 3, KVF_BLOCK_FREE, 0);
    scene_close(&s);
}

static void looking_at_a_missing_object_is_refused(void **state) {
    (void)state;
    scene s;
    kvf_block_state found;
    int64_t offset;
    uint64_t error;
    kvf_agent_stats stats = {0};
    set_up(&s);
    check_block(s.p, 1, 63, KVF_BLOCK_FREE, 0);
    assert_fails(kvf_agent_block(s.p, 1, 64, &found, NULL), KVF_E_RANGE, "group ssm: block 64", "has 64");
    assert_fails(kvf_agent_block(s.p, 2, 0, &found, NULL), KVF_E_RANGE, "group is 2", "has 2");
    assert_fails(kvf_agent_block(s.p, 0, 0, NULL, NULL), KVF_E_INVALID, "state is NULL");
    assert_fails(kvf_agent_block(NULL, 0, 0, &found, NULL), KVF_E_INVALID, "agent is NULL");
    assert_fails(kvf_agent_get_stats(NULL, &stats), KVF_E_INVALID, "agent is NULL");
    assert_fails(kvf_agent_get_stats(s.p, &stats), KVF_E_INVALID, "kvf_agent_stats");
    assert_fails(kvf_agent_clock_offset(s.p, "D", 0, &offset, &error), KVF_E_NOT_FOUND, "rank 0 of D");
    assert_fails(kvf_agent_clock_offset(NULL, "D", 0, &offset, &error), KVF_E_INVALID, "NULL");
    assert_fails(kvf_agent_clock_offset(s.p, NULL, 0, &offset, &error), KVF_E_INVALID, "NULL");
    assert_fails(kvf_agent_clock_offset(s.p, "D", 0, NULL, &error), KVF_E_INVALID, "NULL");
    assert_fails(kvf_agent_clock_offset(s.p, "D", 0, &offset, NULL), KVF_E_INVALID, "NULL");
    scene_close(&s);
}

/* The plan is the largest part; all of it is freed with the peer. */
static void memory_kept_for_peers_is_counted(void **state) {
    (void)state;
    scene s;
    kvf_plan *plan = NULL;
    set_up(&s);
    assert_int_equal(world_stats(s.d).memory_now_bytes, 0);
    world_hold(&s.w.p, &s.held, s.theirs);
    scene_pull(&s);
    world_all_done(&s.w, &s.w.p, s.theirs);
    assert_ok(kvf_plan_build(kvf_engine_shard(s.w.d.engine, 0), s.w.p.engine, NULL, &plan));
    const uint64_t plan_bytes = kvf_plan_memory_bytes(plan);
    assert_int_equal(world_stats(s.d).plans_now, 1);
    assert_in_range(world_stats(s.d).memory_now_bytes, plan_bytes + 1, plan_bytes + 10000);
    assert_true(world_stats(s.p).memory_now_bytes > 0);
    kvf_plan_free(plan);
    world_run_for(&s.w, 1300 * SECOND);
    assert_int_equal(world_stats(s.d).memory_now_bytes, 0);
    assert_int_equal(world_stats(s.p).memory_now_bytes, 0);
    scene_close(&s);
}

static void the_card_of_a_peer_is_memory_kept_for_it(void **state) {
    (void)state;
    scene s;
    uint64_t ticket;
    set_up(&s);
    letters_begin();
    letters_rule(LETTERS_KEEP, s.p, KVF_MESSAGE_WELCOME, (kvf_call_kind)0);
    assert_ok(kvf_agent_connect(s.d, &s.w.p.contact, 0, &ticket));
    world_run_for(&s.w, 10 * MS);
    letters_deliver(); /* P's introduction; next comes P's card */
    world_run_for(&s.w, 10 * MS);
    assert_true(letters_kept() > 0);
    const uint64_t before = world_stats(s.d).memory_now_bytes;
    letters_deliver();
    (void)world_done(&s.w, s.d, ticket);
    letters_end();
    assert_int_equal(world_stats(s.d).memory_now_bytes, before + s.p->card_bytes);
    scene_close(&s);
}

/* Beside the sessions with them, their cards and the plan. */
static void the_ranks_of_an_engine_are_memory_kept_for_it(void **state) {
    (void)state;
    enum { RANKS = 8 };
    scene s;
    uint64_t ticket;
    kvf_plan *plan = NULL;
    scene_open(&s, attention(2, RANKS, 8), ENGINE(.name = "P", .tp_size = RANKS, .all = {.block_count = 64}),
               ONE("D"), NULL);
    assert_ok(kvf_agent_connect(s.d, &s.w.p.contact, 0, &ticket));
    (void)world_done(&s.w, s.d, ticket);
    assert_ok(kvf_plan_build(kvf_engine_shard(s.w.d.engine, 0), s.w.p.engine, NULL, &plan));
    const kvf_agent_stats stats = world_stats(s.d);
    assert_int_equal(stats.peers_now, RANKS);
    assert_int_equal(stats.plans_now, 1);
    uint64_t kept = s.d->kept_bytes + sizeof(kvf_remote) + kvf_plan_memory_bytes(plan);
    for (uint32_t r = 0; r < RANKS; r++)
        kept += sizeof(kvf_session) + s.w.p.agents[r]->card_bytes + sizeof(kvf_remote_rank);
    assert_int_equal(stats.memory_now_bytes, kept);
    kvf_plan_free(plan);
    scene_close(&s);
}

static void a_clock_is_of_one_rank_of_one_engine(void **state) {
    (void)state;
    scene s;
    uint64_t ticket, error;
    int64_t offset;
    set_up(&s);
    assert_ok(kvf_agent_connect(s.d, &s.w.p.contact, 0, &ticket));
    (void)world_done(&s.w, s.d, ticket);
    assert_ok(kvf_agent_clock_offset(s.d, "P", 0, &offset, &error));
    assert_fails(kvf_agent_clock_offset(s.d, "P", 1, &offset, &error), KVF_E_NOT_FOUND, "rank 1 of P");
    assert_fails(kvf_agent_clock_offset(s.d, "Q", 0, &offset, &error), KVF_E_NOT_FOUND, "rank 0 of Q");
    world_lose(s.d, world_session(s.d, false)); /* the next process of its name may run elsewhere */
    assert_fails(kvf_agent_clock_offset(s.d, "P", 0, &offset, &error), KVF_E_NOT_FOUND, "rank 0 of P");
    scene_close(&s);
}

/* The memory kept for the old address is freed, although its ranks still have sessions. */
static void an_engine_that_is_met_at_another_address_is_kept_once(void **state) {
    (void)state;
    scene s;
    scene_open(&s, attention(2, 4, 8), ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 64}),
               ONE("D"), NULL);
    world_introduce(&s.w.p, s.w.p.agents[1]);
    world_hold(&s.w.p, &s.held, s.theirs);
    scene_pull(&s);
    world_all_done(&s.w, &s.w.p, s.theirs);
    uint64_t before = world_stats(s.d).memory_now_bytes;
    s.w.p.contact.endpoint = kvf_agent_endpoint(s.w.p.agents[1]);
    world_hold(&s.w.p, &s.held, s.theirs);
    scene_pull(&s);
    world_all_done(&s.w, &s.w.p, s.theirs);
    world_run_for(&s.w, SECOND);
    assert_int_equal(world_stats(s.d).memory_now_bytes, before);
    scene_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_block_is_one_of_its_group),
        cmocka_unit_test(looking_at_a_missing_object_is_refused),
        cmocka_unit_test(memory_kept_for_peers_is_counted),
        cmocka_unit_test(the_card_of_a_peer_is_memory_kept_for_it),
        cmocka_unit_test(the_ranks_of_an_engine_are_memory_kept_for_it),
        cmocka_unit_test(a_clock_is_of_one_rank_of_one_engine),
        cmocka_unit_test(an_engine_that_is_met_at_another_address_is_kept_once),
    };
    return cmocka_run_group_tests_name("agent_look", tests, world_is_simulated, world_is_real);
}
