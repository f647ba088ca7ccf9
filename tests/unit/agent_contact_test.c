/* A contact that tells of thousands of ranks, as it is met: in bounded steps, one round after the other. */
#include <stdio.h>

#include "agent/agent.h"
#include "agent/remote.h"
#include "agent_letters.h"
#include "agent_net.h"
#include "agent_world.h"

#define RANKS 20000u

typedef struct scene {
    kvf_model *model;
    kvf_engine *ours, *theirs;
    kvf_agent *contact, *agent;
    void *memory[4];
} scene;

static void introduce_all(const scene *s) {
    for (uint32_t rank = 0; rank < kvf_engine_rank_count(s->theirs); rank++) {
        kvf_wire_buffer shard, bytes;
        assert_ok(kvf_wire_encode_shard(kvf_engine_shard(s->theirs, rank), NULL, &shard));
        kvf_introduction intro = {.engine = "P",
                                  .incarnation = rank + 1,
                                  .rank = rank,
                                  .rank_count = kvf_engine_rank_count(s->theirs),
                                  .endpoint = "tcp://10.1.2.3:4567",
                                  .public_key = "",
                                  .shard = {shard.data, shard.size},
                                  .facts = s->agent->facts};
        memcpy(intro.digest, s->agent->digest, sizeof intro.digest);
        assert_ok(kvf_wire_encode_introduction(&intro, &bytes));
        assert_ok(kvf_agent_introduce(s->contact, bytes.data, bytes.size));
        kvf_wire_buffer_free(&shard);
        kvf_wire_buffer_free(&bytes);
    }
}

static void open_scene(scene *s, uint32_t our_ranks, uint32_t ranks, uint32_t shares) {
    kvf_surroundings around = net_surroundings;
    around.link = letters_link(net_surroundings.link);
    net_reset();
    *s = (scene){.model = attention(2, 2, 4)};
    assert_ok(kvf_engine_build(s->model, ENGINE(.name = "D", .tp_size = our_ranks, .all = {.block_count = 4}),
                               &s->ours));
    assert_ok(kvf_engine_build(
        s->model, ENGINE(.name = "P", .tp_size = ranks, .dcp_size = shares, .all = {.block_count = 4}),
        &s->theirs));
    assert_ok(kvf_agent_open_in(&around, s->ours, 0, NULL, &s->agent));
    assert_ok(kvf_agent_open_in(&around, NULL, 0, NULL, &s->contact));
    introduce_all(s);
}

static void close_scene(scene *s) {
    kvf_agent_close(s->agent);
    kvf_agent_close(s->contact);
    kvf_engine_free(s->ours);
    kvf_engine_free(s->theirs);
    kvf_model_free(s->model);
}

/* What the longest round did. */
typedef struct longest_round {
    uint32_t read, asked, called; /* introductions, ranks of ours, sessions */
    uint32_t rounds;              /* from when all introductions had come */
} longest_round;

static uint32_t larger(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

static longest_round meet(scene *s) {
    kvf_contact contact = {.engine = "P", .endpoint = kvf_agent_endpoint(s->contact)};
    kvf_remote *remote;
    longest_round most = {0};
    bool busy;
    assert_ok(kvf_remote_take(s->agent, &contact, &remote));
    for (uint32_t i = 0; i < 100000 && !remote->ready && !remote->stale; i++) {
        uint32_t read = remote->siblings.taken, asked = remote->own_ranks_asked,
                 called = remote->targets_called;
        assert_ok(kvf_agent_progress(s->contact, &busy));
        assert_ok(kvf_agent_progress(s->agent, &busy));
        most.read = larger(most.read, remote->siblings.taken > read ? remote->siblings.taken - read : 0);
        most.asked = larger(most.asked, remote->own_ranks_asked - asked);
        most.called = larger(most.called, remote->targets_called - called);
        most.rounds += remote->gathered;
        if (!busy)
            net_advance(1000);
    }
    assert_true(remote->ready);
    assert_int_equal(remote->rank_count, kvf_engine_rank_count(s->theirs));
    assert_int_equal(kvf_engine_rank_count(remote->engine), remote->rank_count);
    kvf_remote_drop(remote);
    return most;
}

static void twenty_thousand_ranks_are_met_in_small_steps(void **state) {
    (void)state;
    for (uint32_t shares = 1; shares <= RANKS / 2; shares *= RANKS / 2) {
        scene s;
        open_scene(&s, 8, RANKS, shares);
        longest_round most = meet(&s);
        assert_true(most.read <= 512 && most.called <= 64);
        assert_in_range(most.rounds, RANKS / 512, 2 * RANKS / 64);
        close_scene(&s);
    }
}

/* An honest large engine: each of ours asks for all of ours whom they read, some of them a round. */
static void an_engine_of_4096_ranks_meets_one_of_4096(void **state) {
    (void)state;
    scene s;
    open_scene(&s, 4096, 4096, 1);
    longest_round most = meet(&s);
    assert_true(most.read <= 512 && most.called <= 64);
    assert_in_range(most.asked, 1, 64);
    close_scene(&s);
}

/* Who is met twice, by a contact that repeats itself, is met once. */
static void introductions_that_come_again_change_nothing(void **state) {
    (void)state;
    scene s;
    open_scene(&s, 1, 5000, 1);
    letters_begin();
    letters_rule(LETTERS_TWICE, s.contact, KVF_MESSAGE_WELCOME, 0);
    longest_round most = meet(&s);
    assert_true(letters_met() > 1);
    letters_end();
    assert_true(most.read <= 512);
    close_scene(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(twenty_thousand_ranks_are_met_in_small_steps),
        cmocka_unit_test(an_engine_of_4096_ranks_meets_one_of_4096),
        cmocka_unit_test(introductions_that_come_again_change_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
