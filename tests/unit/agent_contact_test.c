/* Meeting a contact with introductions of thousands of ranks: in bounded steps, one round after the other. */
#include <stdio.h>

#include "agent/agent.h"
#include "agent/remote.h"
#include "agent_letters.h"
#include "agent_net.h"
#include "agent_world.h"
#include "wire/gather.h"

#define RANKS 20000u

typedef struct scene {
    kvf_model *model;
    kvf_engine *ours, *theirs;
    kvf_agent *contact, *agent;
    void *memory[4];
} scene;

/* Gives a contact the introductions of all ranks, as of an engine with this name. */
static void introduce_all(const scene *s, kvf_agent *contact, const char *name) {
    for (uint32_t rank = 0; rank < kvf_engine_rank_count(s->theirs); rank++) {
        kvf_wire_buffer shard, bytes;
        assert_ok(kvf_wire_encode_shard(kvf_engine_shard(s->theirs, rank), NULL, &shard));
        kvf_introduction intro = {.engine = name,
                                  .incarnation = rank + 1,
                                  .rank = rank,
                                  .rank_count = kvf_engine_rank_count(s->theirs),
                                  .endpoint = "tcp://10.1.2.3:4567",
                                  .public_key = "",
                                  .shard = {shard.data, shard.size},
                                  .facts = s->agent->facts};
        memcpy(intro.digest, s->agent->digest, sizeof intro.digest);
        assert_ok(kvf_wire_encode_introduction(&intro, &bytes));
        assert_ok(kvf_agent_introduce(contact, bytes.data, bytes.size));
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
    introduce_all(s, s->contact, "P");
}

static void close_scene(scene *s) {
    kvf_agent_close(s->agent);
    kvf_agent_close(s->contact);
    kvf_engine_free(s->ours);
    kvf_engine_free(s->theirs);
    kvf_model_free(s->model);
}

/* The most that any round did. */
typedef struct longest_round {
    uint32_t taken, read, asked,
        called;      /* introductions taken, shards read, own ranks asked, sessions called */
    uint32_t rounds; /* after all introductions had arrived */
} longest_round;

static uint32_t larger(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

static uint32_t grown(uint32_t before, uint32_t after) {
    return after > before ? after - before : 0;
}

static uint32_t asked_of(const kvf_remote *remote) {
    return remote->geometry ? remote->geometry->own_ranks_asked : 0;
}

static longest_round meet(scene *s) {
    kvf_contact contact = {.engine = "P", .endpoint = kvf_agent_endpoint(s->contact)};
    kvf_remote *remote;
    longest_round most = {0};
    bool busy;
    assert_ok(kvf_remote_take(s->agent, &contact, &remote));
    for (uint32_t i = 0; i < 100000 && !remote->ready && !remote->stale; i++) {
        const uint32_t taken = remote->siblings.taken, read = remote->siblings.read, asked = asked_of(remote),
                       called = remote->targets_called;
        assert_ok(kvf_agent_progress(s->contact, &busy));
        assert_ok(kvf_agent_progress(s->agent, &busy));
        most.taken = larger(most.taken, grown(taken, remote->siblings.taken));
        most.read = larger(most.read, grown(read, remote->siblings.read));
        most.asked = larger(most.asked, grown(asked, asked_of(remote)));
        most.called = larger(most.called, remote->targets_called - called);
        most.rounds += remote->gathered;
        if (!busy)
            net_advance(1000);
    }
    assert_true(remote->ready);
    assert_int_equal(remote->rank_count, kvf_engine_rank_count(s->theirs));
    assert_int_equal(kvf_engine_rank_count(remote->geometry->engine), remote->rank_count);
    kvf_remote_drop(remote);
    return most;
}

static void twenty_thousand_ranks_are_met_in_small_steps(void **state) {
    (void)state;
    for (uint32_t shares = 1; shares <= RANKS / 2; shares *= RANKS / 2) {
        scene s;
        open_scene(&s, 8, RANKS, shares);
        longest_round most = meet(&s);
        assert_true(most.taken <= 512 && most.called <= 64);
        assert_int_equal(most.read, 512);
        assert_true(most.taken == 512 && most.read <= 512 && most.called == 64);
        assert_in_range(most.rounds, RANKS / 512, 2 * RANKS / 64);
        close_scene(&s);
    }
}

/* An honest large engine: each of our ranks finds which of its ranks all of ours read, for some of ours per round. */
static void an_engine_of_4096_ranks_meets_one_of_4096(void **state) {
    (void)state;
    scene s;
    open_scene(&s, 4096, 4096, 1);
    longest_round most = meet(&s);
    assert_true(most.taken <= 512 && most.read <= 512 && most.called <= 64);
    assert_in_range(most.asked, 8, 16);
    close_scene(&s);
}

/* In how many messages a contact tells its ranks. */
static uint32_t parts_of(const kvf_agent *contact) {
    uint32_t parts = 0;
    for (uint32_t first = 0; first < contact->rank_count; parts++)
        first = kvf_gather_end(contact->introductions, first, contact->rank_count);
    return parts;
}

/* A contact that sends every introduction twice is met as if it sent it once. */
static void introductions_that_come_again_change_nothing(void **state) {
    (void)state;
    scene s;
    open_scene(&s, 1, 5000, 1);
    letters_begin();
    letters_rule(LETTERS_TWICE, s.contact, KVF_MESSAGE_WELCOME, 0);
    longest_round most = meet(&s);
    assert_true(parts_of(s.contact) > 1);
    assert_int_equal(letters_met(), parts_of(s.contact)); /* each is asked for once */
    letters_end();
    assert_true(most.taken <= 512 && most.read <= 512);
    close_scene(&s);
}

/* ---- engines of one shape -------------------------------------------------------------------- */

#define AT_ONCE 25u
#define ENGINES 1000u

/* An engine like P with another name, which is being met, and its contact. */
typedef struct other_engine {
    kvf_agent *contact;
    kvf_remote *remote;
    char name[16];
} other_engine;

static void begin_meeting(const scene *s, other_engine *e, uint32_t number) {
    kvf_surroundings around = net_surroundings;
    (void)snprintf(e->name, sizeof e->name, "P%u", number);
    assert_ok(kvf_agent_open_in(&around, NULL, 0, NULL, &e->contact));
    introduce_all(s, e->contact, e->name);
    kvf_contact contact = {.engine = e->name, .endpoint = kvf_agent_endpoint(e->contact)};
    assert_ok(kvf_remote_take(s->agent, &contact, &e->remote));
}

/* One round of all agents. */
static void work(const scene *s, other_engine *engines, uint32_t count) {
    bool busy, more = false;
    for (uint32_t i = 0; i < count; i++) {
        assert_ok(kvf_agent_progress(engines[i].contact, &busy));
        more = more || busy;
    }
    assert_ok(kvf_agent_progress(s->agent, &busy));
    if (!more && !busy)
        net_advance(1000);
}

static void work_until_met(const scene *s, other_engine *engines, uint32_t count) {
    uint32_t ready = 0;
    for (uint32_t i = 0; i < 100000 && ready < count; i++) {
        work(s, engines, count);
        ready = 0;
        for (uint32_t e = 0; e < count; e++)
            ready += engines[e].remote->ready || engines[e].remote->stale;
    }
    assert_int_equal(ready, count);
}

static kvf_agent_stats stats_of(kvf_agent *agent) {
    kvf_agent_stats stats = {.struct_size = sizeof stats};
    assert_ok(kvf_agent_get_stats(agent, &stats));
    return stats;
}

static void a_thousand_engines_of_one_shape_cost_one_plan(void **state) {
    (void)state;
    scene s;
    open_scene(&s, 2, 4, 1);
    (void)meet(&s);
    const uint64_t plan_bytes = kvf_plan_memory_bytes(s.agent->geometries->plan);
    const uint64_t first_bytes = stats_of(s.agent).memory_now_bytes;
    for (uint32_t met = 0; met < ENGINES - 1; met += AT_ONCE) {
        other_engine engines[AT_ONCE] = {0};
        const uint32_t count = ENGINES - 1 - met < AT_ONCE ? ENGINES - 1 - met : AT_ONCE;
        for (uint32_t i = 0; i < count; i++)
            begin_meeting(&s, &engines[i], met + i);
        work_until_met(&s, engines, count);
        for (uint32_t i = 0; i < count; i++) {
            assert_true(engines[i].remote->ready);
            assert_ptr_equal(engines[i].remote->plan, s.agent->geometries->plan);
            kvf_remote_drop(engines[i].remote);
            kvf_agent_close(engines[i].contact);
        }
    }
    assert_int_equal(HASH_COUNT(s.agent->geometries), 1);
    assert_int_equal(s.agent->geometries->users, ENGINES);
    assert_int_equal(stats_of(s.agent).plans_built, 1);
    assert_int_equal(stats_of(s.agent).plans_now, 1);
    /* Everything except the plan exists a thousand times. */
    assert_int_equal(stats_of(s.agent).memory_now_bytes, plan_bytes + ENGINES * (first_bytes - plan_bytes));
    close_scene(&s);
}

/* The next part at once, and nothing again as long as answers come within the first pause. */
static void each_part_of_the_introductions_is_asked_for_once(void **state) {
    (void)state;
    scene s;
    open_scene(&s, 1, 5000, 1);
    other_engine e = {.contact = s.contact};
    const kvf_contact contact = {.engine = "P", .endpoint = kvf_agent_endpoint(s.contact)};
    const uint64_t begun = net_now();
    uint32_t parts = 0;
    assert_ok(kvf_remote_take(s.agent, &contact, &e.remote));
    for (uint32_t i = 0; i < 100000 && !e.remote->gathered; i++) {
        const uint32_t known = e.remote->gathering.count;
        work(&s, &e, 1);
        parts += e.remote->gathering.count > known;
    }
    assert_true(parts > 2);
    assert_int_equal(stats_of(s.contact).messages_received, parts);
    assert_true(net_now() - begun < (2 * parts + 1) * NET_LATENCY_NS);
    kvf_remote_drop(e.remote);
    close_scene(&s);
}

/* The first remote makes the geometry; if it is given up meanwhile, the other one starts again. */
static void a_remote_that_waits_for_a_geometry_makes_it_where_its_maker_is_given_up(void **state) {
    (void)state;
    scene s;
    other_engine engines[2] = {0};
    open_scene(&s, 1, 3000, 1);
    begin_meeting(&s, &engines[0], 0);
    begin_meeting(&s, &engines[1], 1);
    for (uint32_t i = 0; i < 100000 && !(s.agent->geometries && s.agent->geometries->maker); i++)
        work(&s, engines, 2);
    kvf_geometry *geometry = s.agent->geometries;
    assert_int_equal(geometry->users, 2);
    assert_false(geometry->ready);
    other_engine *maker = geometry->maker == engines[0].remote ? &engines[0] : &engines[1];
    other_engine *waits = maker == &engines[0] ? &engines[1] : &engines[0];
    assert_ptr_equal(geometry->maker, maker->remote);
    kvf_remote_stale(maker->remote);
    assert_int_equal(geometry->users, 1);
    work_until_met(&s, engines, 2);
    assert_true(waits->remote->ready);
    assert_int_equal(kvf_engine_rank_count(geometry->engine), 3000);
    const uint32_t read = kvf_plan_source_rank(geometry->plan, 0);
    assert_int_equal(geometry->readers[read], 1);
    assert_int_equal(stats_of(s.agent).plans_built, 1);
    for (int i = 0; i < 2; i++) {
        kvf_remote_drop(engines[i].remote);
        kvf_agent_close(engines[i].contact);
    }
    close_scene(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(twenty_thousand_ranks_are_met_in_small_steps),
        cmocka_unit_test(an_engine_of_4096_ranks_meets_one_of_4096),
        cmocka_unit_test(introductions_that_come_again_change_nothing),
        cmocka_unit_test(each_part_of_the_introductions_is_asked_for_once),
        cmocka_unit_test(a_thousand_engines_of_one_shape_cost_one_plan),
        cmocka_unit_test(a_remote_that_waits_for_a_geometry_makes_it_where_its_maker_is_given_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
