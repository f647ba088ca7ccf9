/* How much a peer can make an agent keep, and for how long. */
#include "agent/agent.h"
#include "agent/hold.h"
#include "agent/push.h"
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

static void open_scene(scene *s, const kvf_agent_options *options) {
    world_open_model(&s->w, attention(2, 4, 8), ONE("P"), ONE("D"), options);
    s->p = s->w.p.agents[0];
    speaker_open(&s->s, s->p, "X", false, 1);
    speaker_greet(&s->w, &s->s);
    assert_int_equal(s->s.kind, KVF_MESSAGE_WELCOME);
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

/* One run of `count` ids, allowed for ever. */
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
    enum { IDS = 400000, BUDGET = 8 << 20 };
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
    assert_non_null(strstr(s.s.detail, "allowed are 8388608"));
    assert_true(kept(&s) > BUDGET / 2 && kept(&s) <= BUDGET);
    assert_true(world_stats(s.p).over_budget >= 1);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 1);
    /* It goes away: nothing of it lasts, though it asked for ever. */
    speaker_run_for(&s.w, &s.s, LEASE + 3 * SECOND);
    assert_true(kept(&s) < 8192);
    free(ids);
    close_scene(&s);
}

static void what_is_kept_for_all_peers_has_an_end_too(void **state) {
    (void)state;
    scene s;
    kvf_group_steps group;
    enum { IDS = 100000 };
    uint32_t *ids = calloc(IDS, sizeof *ids);
    assert_non_null(ids);
    open_scene(&s, OPTIONS(.max_bytes_for_peers = 600000, .max_bytes_per_key = 500000));
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

static void calls_that_wait_end_with_the_one_who_waits(void **state) {
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
    for (int i = 0; i < 4; i++) { /* while it lives they wait */
        speaker_run_for(&s.w, &s.s, 5 * SECOND);
        assert_int_equal(say(&s, beat()), KVF_OK);
    }
    assert_int_equal(kept(&s), before);
    speaker_run_for(&s.w, &s.s, LEASE + 3 * SECOND);
    assert_true(kept(&s) < 8192);
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

static void who_has_no_session_is_heard_for_64_KiB(void **state) {
    (void)state;
    scene s;
    speaker stranger;
    enum { IDS = 30000 };
    uint32_t *ids = calloc(IDS, sizeof *ids);
    assert_non_null(ids);
    for (uint32_t i = 0; i < IDS; i++)
        ids[i] = 2 * i; /* 120,000 bytes: no two are neighbours */
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

/* ---- sessions --------------------------------------------------------------------------------- */

static void a_connection_without_a_key_has_few_sessions(void **state) {
    (void)state;
    scene s;
    open_scene(&s, OPTIONS(.max_peers = 100));
    uint32_t welcome = 1;
    for (uint8_t i = 0; i < 20; i++) {
        memset(s.s.secret, 10 + i, sizeof s.s.secret);
        s.s.incarnation = kvf_wire_incarnation(s.s.secret);
        char name[8] = {'N', (char)('a' + i)};
        s.s.engine = name;
        speaker_greet(&s.w, &s.s);
        welcome += s.s.kind == KVF_MESSAGE_WELCOME;
    }
    assert_int_equal(welcome, 8);
    assert_int_equal(s.s.status, KVF_E_LIMIT);
    assert_non_null(strstr(s.s.detail, "8 sessions for this connection"));
    assert_int_equal(world_stats(s.p).peers_now, 8);
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
    assert_int_equal(world_stats(s.p).peers_now, 2);
    assert_ok(kvf_agent_connect(s.w.d.agents[0], &s.w.p.contact, 5 * SECOND, &connect));
    (void)world_done(&s.w, s.w.d.agents[0], connect);
    assert_int_equal(world_stats(s.p).peers_evicted, 1);
    assert_int_equal(world_stats(s.p).leases_now, 1);
    assert_true(speaker_call(&s.w, &idle, idle.session, beat()));
    assert_int_equal(idle.status, KVF_E_PEER_LOST);
    speaker_close(&idle);
    close_scene(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(expectations_take_no_more_than_the_budget),
        cmocka_unit_test(what_is_kept_for_all_peers_has_an_end_too),
        cmocka_unit_test(calls_that_wait_end_with_the_one_who_waits),
        cmocka_unit_test(a_reader_that_beats_for_ever_does_not_keep_a_hold_for_ever),
        cmocka_unit_test(a_cancelled_hold_ends_within_a_lease_whatever_its_reader_says),
        cmocka_unit_test(who_has_no_session_is_heard_for_64_KiB),
        cmocka_unit_test(a_connection_without_a_key_has_few_sessions),
        cmocka_unit_test(where_all_sessions_are_taken_one_that_does_nothing_goes),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
