/* How much memory a peer can make an agent keep, and for how long. */
#include <stdio.h>

#include "agent/agent.h"
#include "agent/budget.h"
#include "agent/early.h"
#include "agent/hear.h"
#include "agent/hold.h"
#include "agent/push.h"
#include "agent_crowd.h"
#include "agent_net.h"
#include "agent_speaker.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define LEASE (10 * SECOND)
#define OPTIONS(...)                                                                                         \
    (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), .lease_ns = LEASE, __VA_ARGS__})

typedef struct scene {
    world w;
    kvf_agent *p;
    speaker s;
} scene;

static void open_scene_of(scene *s, kvf_model *model, const kvf_agent_options *options) {
    world_open_model(&s->w, model, ONE("P"), ONE("D"), options);
    s->p = s->w.p.agents[0];
    speaker_open(&s->s, s->p, "X", false, 1);
    speaker_greet(&s->w, &s->s);
    assert_int_equal(s->s.kind, KVF_MESSAGE_WELCOME);
}

static void open_scene(scene *s, const kvf_agent_options *options) {
    open_scene_of(s, attention(2, 4, 8), options);
}

static void close_scene(scene *s) {
    speaker_close(&s->s);
    world_close(&s->w);
}

static kvf_status say(scene *s, kvf_call_body call) {
    assert_true(speaker_call(&s->w, &s->s, s->s.session, call));
    return s->s.status;
}

static kvf_call_body beat(void) {
    return (kvf_call_body){.kind = KVF_CALL_BEAT};
}

static kvf_call_body acquire(const char *id, uint64_t time_ns) {
    return (kvf_call_body){
        .kind = KVF_CALL_ACQUIRE, .request = {id, strlen(id)}, .time_ns = time_ns, .rank_count = 1};
}

static uint64_t kept(const scene *s) {
    return world_stats(s->p).memory_now_bytes;
}

/* An EXPECT of one table of `count` ids, without a time limit. */
static kvf_call_body expect_run(uint64_t generation, kvf_group_steps *group, const uint32_t *ids,
                                uint32_t count) {
    *group = (kvf_group_steps){.table = {ids, count, 0}, .begin = 0, .end = 16ull * count};
    return (kvf_call_body){.kind = KVF_CALL_EXPECT,
                           .request = {&generation, sizeof generation},
                           .generation = generation | KVF_EXPECTATION,
                           .time_ns = UINT64_MAX,
                           .rank_count = 1,
                           .groups = group,
                           .group_count = 1};
}

static void expectations_take_no_more_than_the_budget(void **state) {
    (void)state;
    scene s;
    kvf_group_steps group;
    enum { IDS = 190000, BUDGET = 8 << 20 };
    uint32_t *ids = calloc(IDS, sizeof *ids);
    assert_non_null(ids);
    for (uint32_t i = 0; i < IDS; i++)
        ids[i] = i;
    open_scene(&s, OPTIONS(.max_bytes_per_key = BUDGET));
    uint32_t taken = 0;
    while (taken < 100) {
        kvf_call_body call = expect_run(taken + 1, &group, ids, IDS);
        uint64_t id = taken + 1;
        call.request = (kvf_bytes){&id, sizeof id};
        if (say(&s, call) != KVF_OK)
            break;
        taken++;
    }
    assert_int_equal(taken, BUDGET / (4 * IDS));
    assert_int_equal(s.s.status, KVF_E_LIMIT);
    assert_non_null(strstr(s.s.detail, "allowed: up to 8388608"));
    assert_true(kept(&s) > BUDGET / 2 && kept(&s) <= BUDGET);
    assert_true(world_stats(s.p).over_budget >= 1);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 1);
    /* The peer goes away: nothing of it is kept, although it asked for no time limit. */
    speaker_run_for(&s.w, &s.s, LEASE + 3 * SECOND);
    assert_true(kept(&s) < 8192);
    free(ids);
    close_scene(&s);
}

static kvf_call_body withdraw(uint64_t generation) {
    return (kvf_call_body){
        .kind = KVF_CALL_WITHDRAW, .request = {"a", 1}, .generation = generation | KVF_EXPECTATION};
}

static void an_expectation_counts_with_its_id_and_all_its_tables(void **state) {
    (void)state;
    static const uint32_t ids[4000];
    static const char id[1000];
    const uint64_t least = sizeof(kvf_flow) + sizeof id + sizeof ids;
    kvf_group_steps groups[] = {{{ids, 1000, 0}, 0, 16000}, {{ids, 3000, 0}, 0, 1}};
    scene s;
    open_scene_of(&s, hybrid(4), OPTIONS());
    const uint64_t before = kept(&s);
    const kvf_call_body call = {.kind = KVF_CALL_EXPECT,
                                .request = {id, sizeof id},
                                .generation = 1 | KVF_EXPECTATION,
                                .time_ns = UINT64_MAX,
                                .rank_count = 1,
                                .groups = groups,
                                .group_count = 2};
    assert_int_equal(say(&s, call), KVF_OK);
    assert_in_range(kept(&s) - before, least, least + 1024);
    assert_int_equal(say(&s, withdraw(1)), KVF_OK);
    speaker_run_for(&s.w, &s.s, MS);
    assert_int_equal(kept(&s), before);
    close_scene(&s);
}

/* Each allocation of the round in which the message is heard fails once. */
static void an_expectation_for_which_there_is_no_memory_leaves_nothing(void **state) {
    (void)state;
    static const uint32_t ids[3] = {1, 2, 3};
    kvf_group_steps group;
    memory_count memory;
    scene s;
    bool busy;
    count_memory(&memory);
    open_scene(&s, OPTIONS());
    const uint64_t before = kept(&s);
    uint32_t refused = 0;
    for (size_t n = 1; memory.calls >= n - 1; n++) {
        kvf_call_body call = expect_run(n, &group, ids, 3);
        memcpy(call.session, s.s.session, sizeof call.session);
        call.request = (kvf_bytes){"a", 1};
        call.number = ++s.s.number;
        speaker_send(&s.s, &(kvf_message){.kind = KVF_MESSAGE_CALL, .call = call});
        net_advance(NET_LATENCY_NS);
        memory.calls = 0;
        memory.fail_at = n;
        (void)kvf_agent_progress(s.p, &busy);
        memory.fail_at = 0;
        speaker_run_for(&s.w, &s.s, MS);
        assert_true(s.s.status == KVF_OK || s.s.status == KVF_E_NOMEM);
        refused += s.s.status == KVF_E_NOMEM;
        assert_int_equal(say(&s, withdraw(n)), KVF_OK);
        speaker_run_for(&s.w, &s.s, MS);
        assert_int_equal(kept(&s), before);
    }
    assert_true(refused >= 3);
    close_scene(&s);
}

static void memory_that_is_kept_for_all_peers_has_a_limit_too(void **state) {
    (void)state;
    scene s;
    kvf_group_steps group;
    enum { IDS = 100000 };
    uint32_t *ids = calloc(IDS, sizeof *ids);
    assert_non_null(ids);
    open_scene(&s, OPTIONS(.max_bytes_for_peers = 1000000, .max_bytes_per_key = 900000));
    kvf_call_body call = expect_run(1, &group, ids, IDS);
    static const uint64_t id = 1;
    call.request = (kvf_bytes){&id, sizeof id};
    assert_int_equal(say(&s, call), KVF_OK);
    speaker other;
    speaker_open(&other, s.p, "Y", false, 2);
    speaker_greet(&s.w, &other);
    assert_true(speaker_call(&s.w, &other, other.session, call));
    assert_int_equal(other.status, KVF_E_LIMIT);
    assert_non_null(strstr(other.detail, "all peers"));
    free(ids);
    speaker_close(&other);
    close_scene(&s);
}

/* Each greedy peer takes as much as it can get. */
static void greedy_peers_leave_as_much_as_each_of_them_has(void **state) {
    (void)state;
    enum { GREEDY = 4, ALL = 8 << 20, IDS = 10000 };
    static uint32_t ids[IDS];
    speaker greedy[GREEDY], modest;
    kvf_group_steps group;
    scene s;
    open_scene(&s, OPTIONS(.max_bytes_for_peers = ALL));
    for (uint32_t i = 0; i < IDS; i++)
        ids[i] = i;
    uint64_t id = 0, largest = 0;
    for (uint32_t i = 0; i < GREEDY; i++) {
        char name[3] = {'G', (char)('a' + i)};
        uint64_t before = kept(&s);
        speaker_open(&greedy[i], s.p, name, false, (uint8_t)(10 + i));
        speaker_greet(&s.w, &greedy[i]);
        do {
            kvf_call_body call = expect_run(++id, &group, ids, IDS);
            call.request = (kvf_bytes){&id, sizeof id};
            assert_true(speaker_call(&s.w, &greedy[i], greedy[i].session, call));
        } while (greedy[i].status == KVF_OK);
        assert_int_equal(greedy[i].status, KVF_E_LIMIT);
        largest = kept(&s) - before > largest ? kept(&s) - before : largest;
        assert_true(largest <= ALL / 2);
    }
    assert_true(ALL - kept(&s) >= ALL >> (GREEDY + 1));
    speaker_open(&modest, s.p, "M", false, 9);
    speaker_greet(&s.w, &modest);
    kvf_call_body call = expect_run(++id, &group, ids, IDS);
    call.request = (kvf_bytes){&id, sizeof id};
    assert_true(speaker_call(&s.w, &modest, modest.session, call));
    assert_int_equal(modest.status, KVF_OK);
    for (uint32_t i = 0; i < GREEDY; i++)
        speaker_close(&greedy[i]);
    speaker_close(&modest);
    close_scene(&s);
}

static void a_peer_may_have_exactly_as_much_as_it_leaves_for_others(void **state) {
    (void)state;
    scene s;
    open_scene(&s, OPTIONS(.max_peers = 10));
    kvf_session *session = s.p->all_sessions;
    assert_int_equal(session->kept_bytes, sizeof *session + session->key_bytes);
    s.p->options.max_bytes_for_peers = 2 * s.p->kept_bytes + 2000;
    assert_fails(kvf_budget_take(session, 1001), KVF_E_LIMIT, "no more than is left for the others");
    assert_ok(kvf_budget_take(session, 1000));
    assert_fails(kvf_budget_take(session, 1), KVF_E_LIMIT, "no more than is left for the others");
    kvf_budget_give(session, 1000);
    assert_ok(kvf_budget_take(session, 1000));
    close_scene(&s);
}

static void a_peer_is_served_while_a_byte_is_left_of_what_all_may_have(void **state) {
    (void)state;
    scene s;
    open_scene(&s, OPTIONS(.max_peers = 10));
    s.p->options.max_bytes_for_peers = s.p->kept_bytes + 1;
    assert_ok(kvf_budget_look(s.p->all_sessions));
    assert_int_equal(world_stats(s.p).over_budget, 0);
    s.p->options.max_bytes_for_peers = s.p->kept_bytes;
    assert_fails(kvf_budget_look(s.p->all_sessions), KVF_E_LIMIT, "all peers use ");
    assert_int_equal(world_stats(s.p).over_budget, 1);
    close_scene(&s);
}

/* An EXPECT without groups expects nothing, so it cannot announce more parts. */
static void parts_of_nothing_are_refused(void **state) {
    (void)state;
    scene s;
    open_scene(&s, OPTIONS(.max_peers = 10));
    kvf_call_body call = {.kind = KVF_CALL_EXPECT,
                          .request = {"a", 1},
                          .generation = 1 | KVF_EXPECTATION,
                          .time_ns = UINT64_MAX,
                          .rank_count = 1,
                          .more = true};
    assert_int_equal(say(&s, call), KVF_E_MISMATCH);
    assert_non_null(strstr(s.s.detail, "EXPECT: 0 groups; the model has 1"));
    call.more = false;
    call.first_id = 1;
    assert_int_equal(say(&s, call), KVF_E_MISMATCH);
    call.first_id = 0;
    assert_int_equal(say(&s, call), KVF_OK);
    close_scene(&s);
}

static void an_expectation_has_all_groups_of_the_model_or_none(void **state) {
    (void)state;
    scene s;
    const kvf_group_steps groups[2] = {{.end = 0}};
    open_scene(&s, OPTIONS(.max_peers = 10));
    const kvf_call_body call = {.kind = KVF_CALL_EXPECT,
                                .request = {"a", 1},
                                .generation = 1 | KVF_EXPECTATION,
                                .time_ns = UINT64_MAX,
                                .rank_count = 1,
                                .groups = groups,
                                .group_count = 2};
    assert_int_equal(say(&s, call), KVF_E_MISMATCH);
    assert_non_null(strstr(s.s.detail, "EXPECT: 2 groups; the model has 1"));
    close_scene(&s);
}

/* The moment in which it arrives is too late. */
static void an_expectation_is_refused_from_its_deadline_on(void **state) {
    (void)state;
    scene s;
    kvf_group_steps group;
    uint32_t ids[1] = {0};
    open_scene(&s, OPTIONS(.max_peers = 10));
    for (uint32_t left = 0; left < 2; left++) {
        kvf_call_body call = expect_run(1 + left, &group, ids, 1);
        call.time_ns = world_now() + NET_LATENCY_NS + left;
        assert_int_equal(say(&s, call), left ? KVF_OK : KVF_E_TIMEOUT);
    }
    close_scene(&s);
}

static void calls_that_wait_end_with_the_peer_that_waits(void **state) {
    (void)state;
    scene s;
    open_scene(&s, OPTIONS(.idle_ns = 3600 * SECOND));
    kvf_call_body call = acquire("a", 3600 * SECOND);
    memcpy(call.session, s.s.session, sizeof call.session);
    for (uint32_t i = 0; i < 2000; i++) {
        call.request = (kvf_bytes){&i, sizeof i};
        call.number = ++s.s.number;
        speaker_send(&s.s, &(kvf_message){.kind = KVF_MESSAGE_CALL, .call = call});
    }
    speaker_run_for(&s.w, &s.s, 5 * MS);
    uint64_t before = kept(&s);
    assert_true(before > 2000 * 100);
    for (int i = 0; i < 4; i++) { /* they wait while the peer lives */
        speaker_run_for(&s.w, &s.s, 5 * SECOND);
        assert_int_equal(say(&s, beat()), KVF_OK);
    }
    assert_int_equal(kept(&s), before);
    speaker_run_for(&s.w, &s.s, LEASE + 3 * SECOND);
    assert_true(kept(&s) < 8192);
    close_scene(&s);
}

static void a_call_that_waits_is_kept_once_until_it_is_withdrawn(void **state) {
    (void)state;
    scene s;
    open_scene(&s, OPTIONS(.max_peers = 10));
    const uint64_t before = kept(&s);
    assert_false(speaker_call(&s.w, &s.s, s.s.session, acquire("a", 60 * SECOND)));
    const uint64_t with_one = kept(&s);
    assert_true(with_one > before);
    assert_false(speaker_call(&s.w, &s.s, s.s.session, acquire("a", 60 * SECOND)));
    assert_int_equal(kept(&s), with_one);
    const kvf_call_body release = {
        .kind = KVF_CALL_RELEASE, .request = {"a", 1}, .rank_count = 1, .status = KVF_E_CANCELLED};
    assert_int_equal(say(&s, release), KVF_OK);
    assert_int_equal(kept(&s), before);
    close_scene(&s);
}

/* Its place in the tables of those that wait is 128 bytes. */
static void a_call_that_waits_counts_with_its_id_and_its_place_in_the_tables(void **state) {
    (void)state;
    scene s;
    open_scene(&s, OPTIONS(.max_peers = 10));
    const uint64_t before = kept(&s), one = sizeof(kvf_early) + sizeof(kvf_waiting) + 128;
    assert_false(speaker_call(&s.w, &s.s, s.s.session, acquire("a", 60 * SECOND)));
    assert_int_equal(kept(&s) - before, one + 1);
    assert_false(speaker_call(&s.w, &s.s, s.s.session, acquire("seven b", 60 * SECOND)));
    assert_int_equal(kept(&s) - before, one + 1 + one + 7);
    close_scene(&s);
}

static void a_call_waits_no_longer_than_any_request_may_take(void **state) {
    (void)state;
    scene s;
    open_scene(&s, OPTIONS(.longest_ns = 2 * LEASE));
    const uint64_t before = kept(&s);
    assert_false(speaker_call(&s.w, &s.s, s.s.session, acquire("a", 60 * SECOND)));
    for (int i = 0; i < 3; i++) {
        speaker_run_for(&s.w, &s.s, 5 * SECOND);
        assert_int_equal(say(&s, beat()), KVF_OK);
    }
    assert_true(kept(&s) > before);
    speaker_run_for(&s.w, &s.s, 6 * SECOND); /* 21 s after the call, and 6 s after the last beat */
    assert_int_equal(s.s.call, KVF_CALL_ACQUIRE);
    assert_int_equal(s.s.status, KVF_E_TIMEOUT);
    assert_int_equal(kept(&s), before);
    close_scene(&s);
}

static void a_reader_that_beats_for_ever_does_not_keep_a_hold_for_ever(void **state) {
    (void)state;
    scene s;
    world_request held;
    uint64_t ticket;
    open_scene(&s, OPTIONS(.longest_ns = 30 * SECOND));
    world_request_make(&s.w, &s.w.p, "a", 40, 10, 1, &held);
    world_hold(&s.w.p, &held, &ticket);
    assert_int_equal(say(&s, acquire("a", 0)), KVF_OK);
    const uint64_t lease = s.s.generation;
    uint64_t begun = world_now();
    while (world_stats(s.p).leases_now > 0) {
        kvf_call_body call = beat();
        call.leases = &lease;
        call.lease_count = 1;
        speaker_run_for(&s.w, &s.s, SECOND);
        assert_int_equal(say(&s, call), KVF_OK);
        assert_true(world_now() - begun < 40 * SECOND);
    }
    assert_true(world_now() - begun > 29 * SECOND);
    (void)world_failed(&s.w, s.p, ticket, KVF_E_TIMEOUT);
    close_scene(&s);
}

/* Whether by leases that it gives up for new ones, or by attempts that fail. */
static void a_peer_that_tries_again_and_again_does_not_keep_a_hold_for_ever(void **state) {
    (void)state;
    const kvf_call_body tries[] = {
        acquire("a", 0),
        {.kind = KVF_CALL_RELEASE, .request = {"a", 1}, .rank_count = 1, .status = KVF_E_IO}};
    for (uint32_t i = 0; i < 2; i++) {
        scene s;
        world_request held;
        uint64_t ticket;
        open_scene(&s, OPTIONS(.longest_ns = 30 * SECOND));
        world_request_make(&s.w, &s.w.p, "a", 40, 10, 1, &held);
        held.request.deadline_ns = 5 * SECOND;
        world_hold(&s.w.p, &held, &ticket);
        const uint64_t begun = world_now();
        while (world_stats(s.p).failed[KVF_REQUEST_HOLD] == 0) {
            assert_true(world_now() - begun < 40 * SECOND);
            (void)say(&s, tries[i]);
            speaker_run_for(&s.w, &s.s, SECOND);
        }
        assert_true(world_now() - begun > 33 * SECOND);
        (void)world_failed(&s.w, s.p, ticket, KVF_E_TIMEOUT);
        close_scene(&s);
    }
}

/* The agent has not looked at the time for so long that it hears of its reader before it notices. */
static void a_lease_that_is_over_is_not_granted_again_without_an_end(void **state) {
    (void)state;
    scene s;
    world_request held;
    uint64_t ticket;
    open_scene(&s, OPTIONS(.longest_ns = 30 * SECOND));
    world_request_make(&s.w, &s.w.p, "a", 40, 10, 1, &held);
    world_hold(&s.w.p, &held, &ticket);
    kvf_call_body call = acquire("a", 0);
    assert_int_equal(say(&s, call), KVF_OK);
    assert_true(s.s.time_ns == LEASE);
    memcpy(call.session, s.s.session, sizeof call.session);
    call.number = s.s.number; /* repeated, as if its answer was lost */
    speaker_send(&s.s, &(kvf_message){.kind = KVF_MESSAGE_CALL, .call = call});
    net_advance(31 * SECOND);
    speaker_run_for(&s.w, &s.s, MS);
    assert_int_equal(s.s.status, KVF_OK);
    assert_true(s.s.time_ns == 0);
    (void)world_failed(&s.w, s.p, ticket, KVF_E_TIMEOUT);
    close_scene(&s);
}

static void a_cancelled_hold_ends_within_a_lease_whatever_its_reader_says(void **state) {
    (void)state;
    scene s;
    world_request held;
    uint64_t ticket;
    open_scene(&s, OPTIONS(.max_peers = 65536));
    world_request_make(&s.w, &s.w.p, "a", 40, 10, 1, &held);
    world_hold(&s.w.p, &held, &ticket);
    assert_int_equal(say(&s, acquire("a", 0)), KVF_OK);
    const uint64_t lease = s.s.generation;
    assert_ok(kvf_agent_cancel(s.p, ticket));
    uint64_t begun = world_now();
    while (world_stats(s.p).failed[KVF_REQUEST_HOLD] == 0) {
        kvf_call_body call = beat();
        call.leases = &lease;
        call.lease_count = 1;
        speaker_run_for(&s.w, &s.s, SECOND);
        assert_int_equal(say(&s, call), KVF_OK);
        assert_true(world_now() - begun < LEASE + 2 * SECOND);
    }
    close_scene(&s);
}

/* Peers have used all memory that they may have. */
static void a_release_is_taken_if_a_lease_ends_with_it(void **state) {
    (void)state;
    scene s;
    world_request held;
    uint64_t tickets[2];
    open_scene(&s, OPTIONS(.max_peers = 10));
    for (uint32_t i = 0; i < 2; i++) {
        world_request_make(&s.w, &s.w.p, i ? "b" : "a", 40, 10, 1, &held);
        world_hold(&s.w.p, &held, &tickets[i]);
    }
    assert_int_equal(say(&s, acquire("a", SECOND)), KVF_OK);
    s.p->options.max_bytes_for_peers = s.p->kept_bytes;
    kvf_call_body read = {
        .kind = KVF_CALL_RELEASE, .request = {"a", 1}, .generation = s.s.generation, .rank_count = 1};
    kvf_call_body unread = {.kind = KVF_CALL_RELEASE, .request = {"b", 1}, .rank_count = 1};
    assert_int_equal(say(&s, unread), KVF_E_LIMIT);
    assert_int_equal(say(&s, read), KVF_OK);
    (void)world_done(&s.w, s.p, tickets[0]);
    assert_int_equal(say(&s, unread), KVF_OK);
    (void)world_done(&s.w, s.p, tickets[1]);
    close_scene(&s);
}

/* The processor time of a greeting where there are so many sessions. */
static uint64_t time_to_greet(uint32_t count) {
    enum { TIMES = 200 };
    scene s;
    open_scene(&s, OPTIONS());
    for (uint32_t i = 0; i < count; i++)
        crowd_greets(s.p, i);
    const uint64_t begun = crowd_time();
    for (uint32_t i = 0; i < TIMES; i++)
        crowd_greets(s.p, count + i);
    const uint64_t spent = crowd_time() - begun;
    assert_int_equal(world_stats(s.p).peers_now, count + TIMES + 1);
    close_scene(&s);
    return spent / TIMES;
}

static void a_greeting_takes_no_longer_where_there_are_many_sessions(void **state) {
    (void)state;
    crowd_compare(time_to_greet, 1200, 7500, 4, 2000); /* 6 times as long, if all sessions were visited */
}

/* The processor time for each of so many leases of the holders of one key, which all run out at once. */
static uint64_t time_to_expire(uint32_t count) {
    scene s;
    world_request held;
    uint64_t hold;
    open_scene(&s, OPTIONS());
    world_request_make(&s.w, &s.w.p, "a", 40, 10, 1, &held);
    held.request.deadline_ns = 100 * SECOND;
    world_hold(&s.w.p, &held, &hold);
    for (uint32_t i = 0; i < count; i++) {
        crowd_greets(s.p, i);
        kvf_message message = {.kind = KVF_MESSAGE_CALL, .call = acquire("a", SECOND)};
        message.call.number = 1;
        memcpy(message.call.session, s.p->all_sessions->prev->id, sizeof message.call.session);
        crowd_says(s.p, &message);
    }
    assert_int_equal(world_stats(s.p).leases_now, count);
    net_advance(LEASE);
    const uint64_t begun = crowd_time();
    while (world_stats(s.p).leases_now > 0)
        assert_ok(kvf_agent_progress(s.p, NULL));
    const uint64_t spent = crowd_time() - begun;
    assert_int_equal(world_stats(s.p).leases_expired, count);
    close_scene(&s);
    return spent / count;
}

static void the_end_of_a_lease_takes_no_longer_where_there_are_many_sessions(void **state) {
    (void)state;
    crowd_compare(time_to_expire, 1000, 6000, 3, 1000); /* all sessions were visited for each lease */
}

/* Each expectation of a push is told its records until it answers, and one peer may expect one push often. */
static void records_of_a_push_count_for_each_expectation_that_is_told_them(void **state) {
    (void)state;
    enum { BYTES = 100000, BUDGET = 1 << 20, EXPECTED = 30 };
    static uint8_t content[BYTES];
    kvf_record record = {.name = "r", .data = content, .size = sizeof content};
    kvf_wire_buffer introduction = {0};
    world_request wanted, pushed;
    uint64_t push;
    scene s;
    open_scene(&s, OPTIONS(.max_bytes_per_key = BUDGET));
    assert_int_equal(say(&s, speaker_join(&s.s, s.w.d.agents[0], 1, &introduction)), KVF_OK);
    world_request_make(&s.w, &s.w.d, "a", 40, 0, 1, &wanted);
    world_request_make(&s.w, &s.w.p, "a", 40, 0, 1, &pushed);
    pushed.request.way = KVF_WAY_DIRECT;
    pushed.request.records = &record;
    pushed.request.record_count = 1;
    world_push(&s.w.p, &pushed, &push);
    const uint64_t before = s.p->kept_bytes;
    for (uint64_t i = 1; i <= EXPECTED; i++) {
        kvf_call_body call = {.kind = KVF_CALL_EXPECT,
                              .request = {"a", 1},
                              .generation = i | KVF_EXPECTATION,
                              .time_ns = UINT64_MAX,
                              .rank_count = 1,
                              .groups = wanted.groups,
                              .group_count = wanted.group_count};
        assert_int_equal(say(&s, call), KVF_OK);
    }
    world_ready(&s.w.p, &push);
    speaker_run_for(&s.w, &s.s, 100 * MS);
    const kvf_flow *flow;
    uint32_t told = 0, refused = 0;
    for (flow = world_session(s.p, true)->flows; flow; flow = flow->session_next) {
        told += flow->told && flow->told->bytes.size > BYTES;
        refused += flow->status == KVF_E_LIMIT;
    }
    assert_int_equal(told + refused, EXPECTED);
    assert_in_range(told, BUDGET / BYTES - 2, BUDGET / BYTES);
    assert_in_range(s.p->kept_bytes - before, told * BYTES, BUDGET);
    (void)world_failed(&s.w, s.p, push, KVF_E_TIMEOUT); /* X answers nothing */
    assert_int_equal(s.p->kept_bytes - before, world_session(s.p, true)->plan_bytes);
    kvf_wire_buffer_free(&introduction);
    close_scene(&s);
}

static void who_has_no_session_is_heard_for_64_KiB(void **state) {
    (void)state;
    scene s;
    speaker stranger;
    enum { IDS = 30000 };
    uint32_t *ids = calloc(IDS, sizeof *ids);
    assert_non_null(ids);
    for (uint32_t i = 0; i < IDS; i++)
        ids[i] = 2 * i; /* 120,000 bytes: no two ids are neighbours */
    open_scene(&s, OPTIONS(.max_peers = 10));
    speaker_open(&stranger, s.p, "Y", false, 2);
    kvf_group_steps group;
    static const uint64_t id = 1;
    kvf_call_body call = expect_run(1, &group, ids, IDS);
    call.request = (kvf_bytes){&id, sizeof id};
    uint64_t before = world_stats(s.p).messages_malformed;
    assert_false(speaker_call(&s.w, &stranger, s.s.session, call));
    assert_int_equal(world_stats(s.p).messages_malformed, before + 1);
    assert_int_equal(say(&s, call), KVF_OK);
    free(ids);
    speaker_close(&stranger);
    close_scene(&s);
}

/* A command is the longest message of a peer without a session. */
static void who_has_no_session_is_heard_for_64_KiB_exactly(void **state) {
    (void)state;
    static const uint8_t content[KVF_WIRE_STRANGER_BYTES];
    scene s;
    kvf_record record = {.name = "r", .data = content, .size = sizeof content / 2};
    const kvf_message message = {
        .kind = KVF_MESSAGE_COMMAND,
        .command = {.verb = "drain", .time_ns = SECOND, .records = &record, .record_count = 1}};
    open_scene(&s, OPTIONS(.max_peers = 10));
    for (uint32_t longer = 0; longer < 2; longer++) {
        kvf_wire_buffer bytes;
        assert_ok(kvf_wire_encode(&message, &bytes));
        record.size += KVF_WIRE_STRANGER_BYTES + longer - bytes.size;
        kvf_wire_buffer_free(&bytes);
        assert_ok(kvf_wire_encode(&message, &bytes));
        assert_int_equal(bytes.size, KVF_WIRE_STRANGER_BYTES + longer);
        kvf_on_message(s.p, &(const kvf_letter){.data = bytes.data, .bytes = bytes.size});
        assert_int_equal(world_stats(s.p).messages_malformed, longer);
        kvf_wire_buffer_free(&bytes);
    }
    close_scene(&s);
}

/* ---- sessions --------------------------------------------------------------------------------- */

/* Greets under so many names. How often that was welcome. */
static uint32_t greet_as_many(scene *s, uint8_t count) {
    uint32_t welcome = 0;
    for (uint8_t i = 0; i < count; i++) {
        memset(s->s.secret, 10 + i, sizeof s->s.secret);
        s->s.incarnation = kvf_wire_incarnation(s->s.secret);
        char name[8] = {'N', (char)('a' + i)};
        s->s.engine = name;
        speaker_greet(&s->w, &s->s);
        welcome += s->s.kind == KVF_MESSAGE_WELCOME;
    }
    return welcome;
}

static void a_connection_without_a_key_has_few_sessions(void **state) {
    (void)state;
    scene s;
    open_scene(&s, OPTIONS(.max_peers = 100));
    assert_int_equal(greet_as_many(&s, 20), 7); /* one session was there before */
    assert_int_equal(s.s.status, KVF_E_LIMIT);
    assert_non_null(strstr(s.s.detail, "8 sessions for this connection"));
    assert_int_equal(world_stats(s.p).peers_now, 8);
    assert_int_equal(world_stats(s.p).over_budget, 20 - 7);
    close_scene(&s);
}

static void a_connection_whose_sessions_have_ended_may_have_as_many_again(void **state) {
    (void)state;
    scene s;
    open_scene(&s, OPTIONS(.max_peers = 100, .idle_ns = 4 * SECOND));
    assert_int_equal(greet_as_many(&s, 7), 7);
    for (uint32_t i = 0; i < 2; i++) {
        speaker_run_for(&s.w, &s.s, 5 * SECOND);
        assert_int_equal(world_stats(s.p).peers_now, 0);
        assert_int_equal(s.p->kept_bytes, 0);
        assert_null(s.p->parties);
        assert_int_equal(greet_as_many(&s, 9), 8);
    }
    close_scene(&s);
}

static void a_session_for_which_no_memory_is_left_does_not_count(void **state) {
    (void)state;
    scene s;
    speaker other;
    open_scene(&s, OPTIONS(.max_peers = 100));
    const uint64_t allowed = s.p->options.max_bytes_for_peers;
    s.p->options.max_bytes_for_peers = s.p->kept_bytes;
    speaker_open(&other, s.p, "Y", false, 2);
    for (uint32_t i = 0; i < 20; i++) {
        speaker_greet(&s.w, &other);
        assert_int_equal(other.status, KVF_E_LIMIT);
        assert_non_null(strstr(other.detail, "all peers use "));
    }
    s.p->options.max_bytes_for_peers = allowed;
    speaker_greet(&s.w, &other);
    assert_int_equal(other.kind, KVF_MESSAGE_WELCOME);
    speaker_close(&other);
    close_scene(&s);
}

static void where_all_sessions_are_taken_one_that_does_nothing_goes(void **state) {
    (void)state;
    scene s;
    world_request held;
    uint64_t hold, connect;
    open_scene(&s, OPTIONS(.max_peers = 2));
    world_request_make(&s.w, &s.w.p, "a", 40, 10, 1, &held);
    world_hold(&s.w.p, &held, &hold);
    assert_int_equal(say(&s, acquire("a", 0)), KVF_OK); /* X has a lease */
    speaker idle;
    speaker_open(&idle, s.p, "Y", false, 2);
    speaker_greet(&s.w, &idle);
    const uint64_t used = world_now();
    assert_int_equal(world_stats(s.p).peers_now, 2);
    assert_ok(kvf_agent_connect(s.w.d.agents[0], &s.w.p.contact, 5 * SECOND, &connect));
    (void)world_done(&s.w, s.w.d.agents[0], connect);
    assert_true(world_now() - used >= SECOND &&
                world_now() - used < 2 * SECOND); /* it is in use for a second */
    assert_int_equal(world_stats(s.p).peers_evicted, 1);
    assert_int_equal(world_stats(s.p).leases_now, 1);
    assert_true(speaker_call(&s.w, &idle, idle.session, beat()));
    assert_int_equal(idle.status, KVF_E_PEER_LOST);
    speaker_close(&idle);
    close_scene(&s);
}

static void the_one_that_does_nothing_is_found_among_64(void **state) {
    (void)state;
    enum { SPEAKERS = 8, OF_EACH = 8 };
    static speaker crowd[SPEAKERS];
    scene s;
    world_open_model(&s.w, attention(2, 4, 8), ONE("P"), ONE("D"), OPTIONS(.max_peers = 100));
    s.p = s.w.p.agents[0];
    for (int i = 0; i < SPEAKERS * OF_EACH; i++) {
        speaker *by = &crowd[i / OF_EACH];
        const char name[3] = {(char)('A' + i / OF_EACH), (char)('a' + i % OF_EACH)};
        if (i % OF_EACH == 0)
            speaker_open(by, s.p, name, false, 1);
        memset(by->secret, 1 + i, sizeof by->secret);
        by->incarnation = kvf_wire_incarnation(by->secret);
        by->engine = name;
        speaker_greet(&s.w, by);
        assert_int_equal(by->kind, KVF_MESSAGE_WELCOME);
    }
    kvf_session *session;
    DL_FOREACH(s.p->all_sessions, session) {
        session->last_used = world_now();
    }
    s.p->all_sessions->prev->last_used -= SECOND; /* the last one */
    kvf_budget_make_room(s.p);
    assert_int_equal(world_stats(s.p).peers_evicted, 1);
    for (uint32_t i = 0; i < SPEAKERS; i++)
        speaker_close(&crowd[i]);
    world_close(&s.w);
}

static void where_there_is_room_nobody_goes(void **state) {
    (void)state;
    scene s;
    speaker second;
    open_scene(&s, OPTIONS(.max_peers = 2));
    speaker_run_for(&s.w, &s.s, 3 * SECOND); /* X is silent meanwhile */
    speaker_open(&second, s.p, "Y", false, 2);
    speaker_greet(&s.w, &second);
    assert_int_equal(second.kind, KVF_MESSAGE_WELCOME);
    assert_int_equal(world_stats(s.p).peers_now, 2);
    assert_int_equal(world_stats(s.p).peers_evicted, 0);
    assert_int_equal(say(&s, beat()), KVF_OK);
    speaker_close(&second);
    close_scene(&s);
}

/* ---- connections ------------------------------------------------------------------------------ */

static void crowd_in(speaker *crowd, uint32_t count, const kvf_agent *to) {
    for (uint32_t i = 0; i < count; i++)
        speaker_open(&crowd[i], to, "Z", false, (uint8_t)(100 + i));
}

static void leave(speaker *crowd, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        speaker_close(&crowd[i]);
}

static void silent_connections_make_room_for_those_that_speak(void **state) {
    (void)state;
    enum { CROWD = 20, MOST = 6 };
    static speaker crowd[CROWD];
    scene s;
    world_request held, wanted;
    uint64_t hold, pull;
    open_scene(&s, OPTIONS(.max_connections = MOST));
    crowd_in(crowd, CROWD, s.p);
    assert_int_equal(world_stats(s.p).connections_now, MOST);
    assert_int_equal(world_stats(s.p).connections_closed, 1 + CROWD - MOST);
    assert_int_equal(world_stats(s.p).over_budget, 1 + CROWD - MOST);
    speaker_run_for(&s.w, &s.s, MS);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 1);
    /* A peer with a session is still served, and an engine that connects now gets in. */
    assert_int_equal(say(&s, beat()), KVF_OK);
    world_request_make(&s.w, &s.w.p, "a", 40, 10, 1, &held);
    world_request_make(&s.w, &s.w.d, "a", 40, 3, 1, &wanted);
    world_hold(&s.w.p, &held, &hold);
    world_pull(&s.w.d, &wanted, &s.w.p, &pull);
    (void)world_done(&s.w, s.w.d.agents[0], pull);
    assert_int_equal(world_stats(s.p).connections_now, MOST);
    /* After a while only connections with a session are left. */
    world_run_for(&s.w, 20 * SECOND);
    assert_int_equal(world_stats(s.p).connections_now, 2);
    leave(crowd, CROWD);
    close_scene(&s);
}

static void one_address_has_its_share_of_connections(void **state) {
    (void)state;
    enum { CROWD = 20, MOST = 10, OF_ADDRESS = 3 };
    static speaker crowd[CROWD];
    scene s;
    open_scene(&s, OPTIONS(.max_connections = MOST, .max_connections_per_address = OF_ADDRESS));
    net_dial_from("10.0.0.66");
    crowd_in(crowd, CROWD, s.p);
    assert_int_equal(world_stats(s.p).connections_now, 1 + OF_ADDRESS);
    speaker_run_for(&s.w, &s.s, MS);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 1);
    assert_int_equal(say(&s, beat()), KVF_OK);
    leave(crowd, CROWD);
    close_scene(&s);
}

static void a_peer_that_hung_up_and_is_silent_is_forgotten(void **state) {
    (void)state;
    scene s;
    speaker gone;
    open_scene(&s, OPTIONS(.idle_ns = 3600 * SECOND));
    uint64_t before = kept(&s);
    speaker_open(&gone, s.p, "Y", false, 2);
    speaker_greet(&s.w, &gone);
    assert_true(kept(&s) > before);
    speaker_close(&gone);
    for (uint32_t i = 0; i < LEASE / SECOND; i++) {
        speaker_run_for(&s.w, &s.s, SECOND);
        assert_int_equal(say(&s, beat()), KVF_OK);
    }
    assert_int_equal(world_stats(s.p).peers_now, 2); /* it may still come back */
    speaker_run_for(&s.w, &s.s, 3 * SECOND);
    assert_int_equal(world_stats(s.p).peers_now, 1);
    assert_int_equal(kept(&s), before);
    speaker_run_for(&s.w, &s.s, LEASE + 3 * SECOND); /* X is silent too, but connected */
    assert_int_equal(say(&s, beat()), KVF_OK);
    close_scene(&s);
}

static void where_all_connections_have_sessions_the_newcomer_waits(void **state) {
    (void)state;
    enum { MOST = 2 };
    scene s;
    speaker second, third;
    open_scene(&s, OPTIONS(.max_connections = MOST));
    speaker_open(&second, s.p, "Y", false, 2);
    speaker_greet(&s.w, &second);
    assert_int_equal(second.kind, KVF_MESSAGE_WELCOME);
    speaker_open(&third, s.p, "Z", false, 3);
    assert_int_equal(world_stats(s.p).connections_now, MOST);
    assert_int_equal(say(&s, beat()), KVF_OK);
    assert_true(speaker_call(&s.w, &second, second.session, beat()));
    speaker_close(&second);
    speaker_run_for(&s.w, &third, SECOND); /* it is let in now */
    speaker_greet(&s.w, &third);
    assert_int_equal(third.kind, KVF_MESSAGE_WELCOME);
    speaker_close(&third);
    close_scene(&s);
}

static void answers_that_nobody_asked_for_are_foreign(void **state) {
    (void)state;
    scene s;
    open_scene(&s, OPTIONS(.max_peers = 10));
    kvf_message welcome = {.kind = KVF_MESSAGE_WELCOME,
                           .welcome = {.engine = "X", .rank_count = 1, .card = {"card", 4}, .facts = ""}};
    kvf_message refused = {.kind = KVF_MESSAGE_REFUSED,
                           .refused = {.status = KVF_E_PERMISSION, .detail = "no"}};
    speaker_send(&s.s, &welcome);
    speaker_send(&s.s, &refused);
    speaker_run_for(&s.w, &s.s, 5 * MS);
    assert_int_equal(world_stats(s.p).messages_foreign, 2);
    assert_int_equal(say(&s, beat()), KVF_OK);
    close_scene(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(expectations_take_no_more_than_the_budget),
        cmocka_unit_test(an_expectation_counts_with_its_id_and_all_its_tables),
        cmocka_unit_test_teardown(an_expectation_for_which_there_is_no_memory_leaves_nothing,
                                  stop_counting_memory),
        cmocka_unit_test(memory_that_is_kept_for_all_peers_has_a_limit_too),
        cmocka_unit_test(greedy_peers_leave_as_much_as_each_of_them_has),
        cmocka_unit_test(a_peer_may_have_exactly_as_much_as_it_leaves_for_others),
        cmocka_unit_test(a_peer_is_served_while_a_byte_is_left_of_what_all_may_have),
        cmocka_unit_test(parts_of_nothing_are_refused),
        cmocka_unit_test(an_expectation_has_all_groups_of_the_model_or_none),
        cmocka_unit_test(an_expectation_is_refused_from_its_deadline_on),
        cmocka_unit_test(calls_that_wait_end_with_the_peer_that_waits),
        cmocka_unit_test(a_call_that_waits_is_kept_once_until_it_is_withdrawn),
        cmocka_unit_test(a_call_that_waits_counts_with_its_id_and_its_place_in_the_tables),
        cmocka_unit_test(a_call_waits_no_longer_than_any_request_may_take),
        cmocka_unit_test(a_reader_that_beats_for_ever_does_not_keep_a_hold_for_ever),
        cmocka_unit_test(a_peer_that_tries_again_and_again_does_not_keep_a_hold_for_ever),
        cmocka_unit_test(a_lease_that_is_over_is_not_granted_again_without_an_end),
        cmocka_unit_test(a_cancelled_hold_ends_within_a_lease_whatever_its_reader_says),
        cmocka_unit_test(a_release_is_taken_if_a_lease_ends_with_it),
        cmocka_unit_test(a_greeting_takes_no_longer_where_there_are_many_sessions),
        cmocka_unit_test(the_end_of_a_lease_takes_no_longer_where_there_are_many_sessions),
        cmocka_unit_test(records_of_a_push_count_for_each_expectation_that_is_told_them),
        cmocka_unit_test(who_has_no_session_is_heard_for_64_KiB),
        cmocka_unit_test(who_has_no_session_is_heard_for_64_KiB_exactly),
        cmocka_unit_test(a_connection_without_a_key_has_few_sessions),
        cmocka_unit_test(a_connection_whose_sessions_have_ended_may_have_as_many_again),
        cmocka_unit_test(a_session_for_which_no_memory_is_left_does_not_count),
        cmocka_unit_test(where_all_sessions_are_taken_one_that_does_nothing_goes),
        cmocka_unit_test(the_one_that_does_nothing_is_found_among_64),
        cmocka_unit_test(where_there_is_room_nobody_goes),
        cmocka_unit_test(silent_connections_make_room_for_those_that_speak),
        cmocka_unit_test(one_address_has_its_share_of_connections),
        cmocka_unit_test(a_peer_that_hung_up_and_is_silent_is_forgotten),
        cmocka_unit_test(where_all_connections_have_sessions_the_newcomer_waits),
        cmocka_unit_test(answers_that_nobody_asked_for_are_foreign),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
