/*
 * Which peer may say what in a session: each row of the table in docs/protocol.md by the rightful peer, by another peer
 * with a key that is also allowed, and by a stranger without a key. Greetings are in agent_greeting_test.c, JOIN in
 * agent_join_test.c, messages to a consumer in agent_hearing_test.c.
 */
#include <sodium.h>

#include "agent/budget.h"
#include "agent/hear.h"
#include "agent/hold.h"
#include "agent/past.h"
#include "agent/push.h"
#include "agent_rights.h"

/* ---- calls of a consumer ---------------------------------------------------------------------- */

static void acquire_and_release_are_for_the_peer_of_the_session(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    uint64_t ticket = rights_hold(&s, "a");
    rights_not_of_others(&s, rights_acquire("a"));
    assert_int_equal(world_stats(s.p).leases_now, 0);
    assert_int_equal(rights_say(&s, &s.rightful, rights_acquire("a")), KVF_OK);
    assert_int_equal(world_stats(s.p).leases_now, 1);

    kvf_call_body release = {
        .kind = KVF_CALL_RELEASE, .request = {"a", 1}, .generation = s.rightful.generation, .rank_count = 1};
    rights_not_of_others(&s, release);
    assert_int_equal(world_stats(s.p).leases_now, 1);
    assert_int_equal(rights_say(&s, &s.rightful, release), KVF_OK);
    (void)world_done(&s.w, s.p, ticket);
    rights_close(&s);
}

static void a_lease_of_another_session_is_none(void **state) {
    (void)state;
    rights s;
    (void)rights_open_leased(&s);
    speaker_greet(&s.w, &s.other); /* as Y, in its own session */
    kvf_call_body release = {
        .kind = KVF_CALL_RELEASE, .request = {"b", 1}, .generation = s.rightful.generation, .rank_count = 1};
    assert_true(speaker_call(&s.w, &s.other, s.other.session, release));
    assert_int_equal(world_stats(s.p).leases_now, 1);
    kvf_call_body sums = {.kind = KVF_CALL_CHECKSUM,
                          .generation = s.rightful.generation,
                          .layers = {0, 1},
                          .units = {0, 1},
                          .end = 4};
    assert_true(speaker_call(&s.w, &s.other, s.other.session, sums));
    assert_int_equal(s.other.status, KVF_E_NOT_FOUND);
    rights_close(&s);
}

static void a_peer_has_as_many_leases_as_are_allowed(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    s.p->options.max_requests_per_peer = 1;
    (void)rights_hold(&s, "a");
    world_request held;
    uint64_t ticket;
    world_request_make(&s.w, &s.w.p, "b", 16, 20, 1, &held);
    world_hold(&s.w.p, &held, &ticket);
    assert_int_equal(rights_say(&s, &s.rightful, rights_acquire("a")), KVF_OK);
    assert_int_equal(rights_say(&s, &s.rightful, rights_acquire("b")), KVF_E_LIMIT);
    assert_non_null(strstr(s.rightful.detail, "this peer has 1 leases, the most allowed"));
    rights_close(&s);
}

/* One that has ended does not count. */
static void a_peer_expects_as_many_requests_as_are_allowed(void **state) {
    (void)state;
    rights s;
    world_request wanted;
    rights_open(&s);
    s.p->options.max_requests_per_peer = 1;
    world_request_make(&s.w, &s.w.d, "a", 40, 0, 1, &wanted);
    for (uint64_t i = 1; i <= 6; i += 2) {
        assert_int_equal(rights_say(&s, &s.rightful, rights_expect("a", i, &wanted)), KVF_OK);
        assert_int_equal(rights_say(&s, &s.rightful, rights_expect("b", i + 1, &wanted)), KVF_E_LIMIT);
        assert_non_null(strstr(s.rightful.detail, "this peer expects 1 requests, the most allowed"));
        const kvf_call_body withdraw = {
            .kind = KVF_CALL_WITHDRAW, .request = {"a", 1}, .generation = i | KVF_EXPECTATION};
        assert_int_equal(rights_say(&s, &s.rightful, withdraw), KVF_OK);
        speaker_run_for(&s.w, &s.rightful, MS);
    }
    rights_close(&s);
}

static void numbers_of_leases_cannot_be_guessed(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    static const char *const ids[] = {"a", "b", "c", "d"};
    uint64_t seen[4];
    for (uint32_t i = 0; i < 4; i++) {
        world_request held;
        uint64_t ticket;
        world_request_make(&s.w, &s.w.p, ids[i], 16, 10 + i, 1, &held);
        world_hold(&s.w.p, &held, &ticket);
        assert_int_equal(rights_say(&s, &s.rightful, rights_acquire(ids[i])), KVF_OK);
        seen[i] = s.rightful.generation;
        assert_true(seen[i] < KVF_EXPECTATION);
        for (uint32_t j = 0; j < i; j++) {
            uint64_t apart = seen[i] > seen[j] ? seen[i] - seen[j] : seen[j] - seen[i];
            assert_true(apart > 1u << 20); /* false by chance once in 2^40 */
        }
    }
    rights_close(&s);
}

static void beats_are_for_the_peer_of_the_session(void **state) {
    (void)state;
    rights s;
    (void)rights_open_leased(&s);
    const uint64_t lease = s.rightful.generation;
    const uint64_t until = rights_session(&s)->readers->until;
    kvf_call_body beat = {.kind = KVF_CALL_BEAT, .leases = &lease, .lease_count = 1};
    speaker_run_for(&s.w, &s.rightful, SECOND);
    rights_not_of_others(&s, beat);
    assert_int_equal(rights_session(&s)->readers->until, until);
    assert_int_equal(rights_say(&s, &s.rightful, beat), KVF_OK);
    assert_true(rights_session(&s)->readers->until >= until + SECOND);
    rights_close(&s);
}

static void expect_and_withdraw_are_for_the_peer_of_the_session(void **state) {
    (void)state;
    rights s;
    world_request wanted;
    rights_open(&s);
    world_request_make(&s.w, &s.w.d, "a", 40, 0, 1, &wanted);
    rights_not_of_others(&s, rights_expect("a", 1, &wanted));
    assert_int_equal(rights_session(&s)->flow_count, 0);
    assert_int_equal(rights_say(&s, &s.rightful, rights_expect("a", 1, &wanted)), KVF_OK);
    assert_int_equal(rights_session(&s)->flow_count, 1);
    kvf_call_body withdraw = {
        .kind = KVF_CALL_WITHDRAW, .request = {"a", 1}, .generation = 1 | KVF_EXPECTATION};
    rights_not_of_others(&s, withdraw);
    assert_false(rights_session(&s)->flows->withdrawn);
    assert_int_equal(rights_say(&s, &s.rightful, withdraw), KVF_OK);
    speaker_run_for(&s.w, &s.rightful, 2 * MS);
    assert_int_equal(rights_session(&s)->flow_count, 0);
    rights_close(&s);
}

static void checksums_are_for_the_peer_of_the_session(void **state) {
    (void)state;
    rights s;
    (void)rights_open_leased(&s);
    kvf_call_body sums = {.kind = KVF_CALL_CHECKSUM,
                          .generation = s.rightful.generation,
                          .layers = {0, 1},
                          .units = {0, 1},
                          .end = 4};
    rights_not_of_others(&s, sums);
    assert_int_equal(s.other.sums + s.stranger.sums, 0);
    assert_int_equal(rights_say(&s, &s.rightful, sums), KVF_OK);
    assert_int_equal(s.rightful.sums, 4);
    sums.group = 1; /* the model has one */
    assert_int_equal(rights_say(&s, &s.rightful, sums), KVF_E_NOT_FOUND);
    sums.group = 0;
    sums.generation = 1 | KVF_EXPECTATION;
    assert_int_equal(rights_say(&s, &s.rightful, sums), KVF_E_NOT_FOUND); /* there is no such expectation, */
    (void)rights_push(&s, "b", 1);
    assert_int_equal(rights_say(&s, &s.rightful, sums), KVF_E_NOT_FOUND); /* or it is not written yet */
    rights_close(&s);
}

static void checksums_of_no_steps_or_more_than_8192_are_refused(void **state) {
    (void)state;
    static const kvf_range steps[] = {{4, 4}, {0, 8193}, {4, UINT32_MAX}};
    rights s;
    (void)rights_open_leased(&s);
    kvf_call_body sums = {
        .kind = KVF_CALL_CHECKSUM, .generation = s.rightful.generation, .layers = {0, 1}, .units = {0, 1}};
    for (size_t i = 0; i < COUNT_OF(steps); i++) {
        sums.begin = steps[i].begin;
        sums.end = steps[i].end;
        assert_int_equal(rights_say(&s, &s.rightful, sums), KVF_E_RANGE);
        assert_non_null(strstr(s.rightful.detail, "allowed: 1 to 8192 steps"));
    }
    rights_close(&s);
}

static void calls_of_a_producer_are_refused_from_a_consumer(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_call_body written = {
        .kind = KVF_CALL_WRITTEN, .request = {"a", 1}, .generation = 1 | KVF_EXPECTATION};
    kvf_call_body probe = {.kind = KVF_CALL_PROBE};
    rights_not_of_others(&s, written);
    rights_not_of_others(&s, probe);
    assert_int_equal(rights_say(&s, &s.rightful, written), KVF_E_INVALID);
    assert_int_equal(rights_say(&s, &s.rightful, probe), KVF_E_INVALID);
    rights_close(&s);
}

/* ---- numbers ---------------------------------------------------------------------------------- */

static void a_jump_of_numbers_forces_a_new_greeting(void **state) {
    (void)state;
    rights s;
    (void)rights_open_leased(&s);
    kvf_call_body beat = {.kind = KVF_CALL_BEAT, .number = UINT64_MAX};
    rights_not_of_others(&s, beat);
    s.rightful.number = 1;
    assert_int_equal(rights_say(&s, &s.rightful, beat), KVF_E_PEER_LOST); /* even from the rightful peer */
    assert_null(rights_session(&s));
    assert_int_equal(world_stats(s.p).leases_now, 1); /* a peer may still read by the lease, which runs out */
    uint8_t before[KVF_WIRE_SESSION_BYTES];
    memcpy(before, s.rightful.session, sizeof before);
    const uint64_t heard = world_stats(s.p).messages_received;
    speaker_greet(&s.w, &s.rightful);
    assert_int_equal(world_stats(s.p).messages_received, heard + 1);
    assert_int_equal(s.rightful.kind, KVF_MESSAGE_WELCOME);
    assert_memory_not_equal(before, s.rightful.session, sizeof before);
    s.rightful.number = 100000; /* numbers may go on where they were */
    assert_int_equal(rights_say(&s, &s.rightful, rights_acquire("a")), KVF_OK);
    rights_close(&s);
}

static void a_jump_is_by_as_many_numbers_as_are_remembered(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_call_body beat = {.kind = KVF_CALL_BEAT, .number = 1};
    assert_int_equal(rights_say(&s, &s.rightful, beat), KVF_OK);
    beat.number += 4095;
    assert_int_equal(rights_say(&s, &s.rightful, beat), KVF_OK);
    beat.number += 4096;
    assert_int_equal(rights_say(&s, &s.rightful, beat), KVF_E_PEER_LOST);
    rights_close(&s);
}

/* Found by fuzzing: nothing else is due at that agent, so only the end of the lease can free the session. */
static void a_session_that_was_left_ends_with_its_last_lease(void **state) {
    (void)state;
    rights s;
    uint64_t ticket = rights_open_leased(&s);
    kvf_call_body beat = {.kind = KVF_CALL_BEAT, .number = UINT64_MAX};
    assert_int_equal(rights_say(&s, &s.rightful, beat), KVF_E_PEER_LOST);
    speaker_run_for(&s.w, &s.rightful, RIGHTS_LEASE / 2);
    assert_int_equal(world_stats(s.p).peers_now, 1); /* its lease still runs */
    speaker_run_for(&s.w, &s.rightful, RIGHTS_LEASE);
    (void)world_failed(&s.w, s.p, ticket, KVF_E_TIMEOUT);
    assert_int_equal(world_stats(s.p).leases_now, 0);
    assert_int_equal(world_stats(s.p).peers_now, 0);
    assert_int_equal(s.p->kept_bytes, 0);
    rights_close(&s);
}

static void a_session_that_was_left_ends_with_its_last_expectation(void **state) {
    (void)state;
    rights s;
    world_request wanted;
    rights_open(&s);
    world_request_make(&s.w, &s.w.d, "a", 40, 0, 1, &wanted);
    assert_int_equal(rights_say(&s, &s.rightful, rights_expect("a", 1, &wanted)), KVF_OK);
    kvf_call_body beat = {.kind = KVF_CALL_BEAT, .number = UINT64_MAX};
    assert_int_equal(rights_say(&s, &s.rightful, beat), KVF_E_PEER_LOST);
    speaker_run_for(&s.w, &s.rightful, MS); /* the expectation does not wait for its push any more */
    assert_int_equal(world_stats(s.p).peers_now, 0);
    assert_int_equal(s.p->kept_bytes, 0);
    rights_close(&s);
}

static void a_client_that_has_hung_up_is_forgotten_once_it_was_silent_for_long(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    assert_int_equal(rights_say(&s, &s.rightful, (kvf_call_body){.kind = KVF_CALL_BEAT}), KVF_OK);
    const uint64_t end = kvf_budget_silent_at(rights_session(&s));
    assert_in_range(end - world_now(), 11 * SECOND, 12 * SECOND); /* a lease, and two seconds more */
    speaker_close(&s.rightful);
    world_run_for(&s.w, end - 1 - world_now());
    assert_non_null(rights_session(&s));
    world_run_for(&s.w, 2);
    assert_null(rights_session(&s));
    assert_int_equal(world_stats(s.p).peers_evicted, 1);
    speaker_open(&s.rightful, s.p, "X", true, 1);
    rights_close(&s);
}

/* It says so where it answers a call of the producer. */
static void a_consumer_that_knows_the_session_no_more_is_lost_at_once(void **state) {
    (void)state;
    rights s;
    world_request wanted;
    rights_open(&s);
    world_request_make(&s.w, &s.w.d, "a", 40, 0, 1, &wanted);
    assert_int_equal(rights_say(&s, &s.rightful, rights_expect("a", 1, &wanted)), KVF_OK);
    kvf_message forgotten = {.kind = KVF_MESSAGE_ANSWER,
                             .answer = {.number = 1, .kind = KVF_CALL_PROBE, .status = KVF_E_PEER_LOST}};
    memcpy(forgotten.answer.session, s.rightful.session, sizeof forgotten.answer.session);
    speaker_send(&s.other, &forgotten);
    speaker_send(&s.stranger, &forgotten);
    speaker_run_for(&s.w, &s.rightful, MS);
    assert_non_null(rights_session(&s));
    speaker_send(&s.rightful, &forgotten);
    speaker_run_for(&s.w, &s.rightful, MS);
    assert_null(rights_session(&s));
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_LOST), 1);
    assert_int_equal(world_stats(s.p).peers_now, 0);
    assert_int_equal(s.p->kept_bytes, 0);
    rights_close(&s);
}

/* It greets again and again, and says each time that it has forgotten the session. */
static void a_consumer_that_is_lost_often_does_not_flood_the_engine(void **state) {
    (void)state;
    enum { OFTEN = 300, TOLD = 64 };
    rights s;
    rights_open(&s);
    kvf_message forgotten = {.kind = KVF_MESSAGE_ANSWER,
                             .answer = {.number = 1, .kind = KVF_CALL_PROBE, .status = KVF_E_PEER_LOST}};
    for (uint32_t i = 0; i < OFTEN; i++) {
        memcpy(forgotten.answer.session, s.rightful.session, sizeof forgotten.answer.session);
        speaker_send(&s.rightful, &forgotten);
        speaker_run_for(&s.w, &s.rightful, MS);
        assert_null(rights_session(&s));
        speaker_greet(&s.w, &s.rightful);
        assert_non_null(rights_session(&s));
    }
    assert_int_equal(world_stats(s.p).peers_lost, OFTEN);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_LOST), TOLD);
    speaker_run_for(&s.w, &s.rightful, 60 * SECOND);
    speaker_greet(&s.w, &s.rightful);
    memcpy(forgotten.answer.session, s.rightful.session, sizeof forgotten.answer.session);
    speaker_send(&s.rightful, &forgotten);
    speaker_run_for(&s.w, &s.rightful, MS);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_LOST), TOLD + 1);
    rights_close(&s);
}

/* As a caller repeats its call, whose time is in the message, until it is answered. */
static void a_call_that_is_repeated_waits_no_longer_than_the_first_time(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_call_body early = rights_acquire("a"); /* for a second */
    const uint64_t begun = world_now();
    assert_false(speaker_call(&s.w, &s.rightful, s.rightful.session, early)); /* no answer yet */
    early.number = s.rightful.number;
    assert_false(speaker_call(&s.w, &s.rightful, s.rightful.session, early));
    const uint32_t before = s.rightful.letters;
    speaker_run_for(&s.w, &s.rightful, begun + SECOND + 10 * MS - world_now());
    assert_int_equal(s.rightful.letters, before + 1);
    assert_int_equal(s.rightful.status, KVF_E_TIMEOUT);
    assert_false(speaker_call(&s.w, &s.rightful, s.rightful.session, rights_acquire("a"))); /* waits anew */
    speaker_run_for(&s.w, &s.rightful, SECOND);
    assert_int_equal(s.rightful.letters, before + 2);
    rights_close(&s);
}

/* A lease, an expectation or an early call alone; nothing else is under way. */
static void a_session_is_kept_while_anything_of_its_peer_is_here(void **state) {
    (void)state;
    for (uint32_t use = 0; use < 4; use++) {
        rights s;
        world_request wanted;
        rights_open(&s);
        s.p->options.idle_ns = SECOND;
        kvf_sessions_due(s.p); /* the session learns of that */
        (void)rights_hold(&s, "a");
        world_request_make(&s.w, &s.w.d, "b", 40, 0, 1, &wanted);
        kvf_call_body expect = rights_expect("b", 1, &wanted), early = rights_acquire("c");
        expect.time_ns = world_now() + RIGHTS_LEASE;
        early.time_ns = RIGHTS_LEASE;
        if (use == 1)
            assert_int_equal(rights_say(&s, &s.rightful, rights_acquire("a")), KVF_OK);
        else if (use == 2)
            assert_int_equal(rights_say(&s, &s.rightful, expect), KVF_OK);
        else if (use == 3)
            assert_false(speaker_call(&s.w, &s.rightful, s.rightful.session, early)); /* no answer yet */
        speaker_run_for(&s.w, &s.rightful, 900 * MS);
        assert_non_null(rights_session(&s));
        speaker_run_for(&s.w, &s.rightful, 3 * SECOND);
        assert_int_equal(rights_session(&s) != NULL, use > 0);
        speaker_run_for(&s.w, &s.rightful, 2 * RIGHTS_LEASE);
        assert_int_equal(world_stats(s.p).peers_now, 0);
        rights_close(&s);
    }
}

/* Its writes may still be on their way. */
static void a_writer_that_has_lost_its_peer_does_not_say_that_it_has_stopped(void **state) {
    (void)state;
    rights s;
    world_request wanted;
    rights_open(&s);
    world_request_make(&s.w, &s.w.d, "a", 40, 0, 1, &wanted);
    for (uint64_t i = 1; i <= 3; i++) {
        assert_int_equal(rights_say(&s, &s.rightful, rights_expect("a", i, &wanted)), KVF_OK);
        if (i == 2)
            kvf_flow_stop(rights_session(&s)->flows, KVF_E_PEER_LOST, "its endpoint is gone");
        if (i == 3)
            rights_session(&s)->peer_lost = true; /* the transport has just said so */
        const kvf_call_body withdraw = {
            .kind = KVF_CALL_WITHDRAW, .request = {"a", 1}, .generation = i | KVF_EXPECTATION};
        assert_int_equal(rights_say(&s, &s.rightful, withdraw), i == 1 ? KVF_OK : KVF_E_PEER_LOST);
        if (i < 3)
            assert_int_equal(rights_session(&s)->joins_again, i == 2);
    }
    rights_close(&s);
}

/* Each number is fresh once: in order, with gaps, late by less than a window, and over several windows. */
static void every_number_counts_once(void **state) {
    (void)state;
    static kvf_session session;
    const uint64_t last = 5ull * KVF_WINDOW_CALLS;
    for (uint64_t gap = 1; gap <= 70; gap += 23) {
        memset(&session, 0, sizeof session);
        for (uint64_t number = gap; number <= last; number += gap) {
            assert_true(kvf_session_fresh(&session, number));
            assert_false(kvf_session_fresh(&session, number));
            if (number > gap)
                assert_false(kvf_session_fresh(&session, number - gap)); /* the previous highest number */
            if (gap > 1) {
                assert_true(kvf_session_fresh(&session, number - 1)); /* a number that was left out */
                assert_false(kvf_session_fresh(&session, number - 1));
            }
        }
    }
    assert_true(kvf_session_fresh(&session, 2 * last));
    assert_true(kvf_session_fresh(&session, 2 * last - KVF_WINDOW_CALLS + 1));
    assert_false(kvf_session_fresh(&session, 2 * last - KVF_WINDOW_CALLS));
    assert_true(kvf_session_fresh(&session, 2 * last + KVF_WINDOW_CALLS)); /* all numbers between are new */
    for (uint64_t number = 2 * last + 1; number < 2 * last + KVF_WINDOW_CALLS; number++)
        assert_true(kvf_session_fresh(&session, number));
}

static void ending_earlier_calls_cannot_use_up_numbers(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_call_body release = {.kind = KVF_CALL_RELEASE, .request = {"a", 1}, .rank_count = 1};
    assert_int_equal(rights_say(&s, &s.rightful, release), KVF_OK);
    release.number = 3;
    release.earlier = 3;
    kvf_wire_buffer bytes;
    assert_fails(kvf_wire_encode(&(kvf_message){.kind = KVF_MESSAGE_CALL, .call = release}, &bytes),
                 KVF_E_RANGE, "earlier is 3");
    rights_close(&s);
}

/* ---- leases ----------------------------------------------------------------------------------- */

/* Undoes the permutation: each of its four rounds can be undone, so different numbers stay different. */
static uint64_t unpermuted(const kvf_agent *agent, uint64_t number) {
    for (uint32_t round = 4; round-- > 0;) {
        const uint32_t half = (uint32_t)(number >> 32), in[2] = {round, half};
        uint8_t mixed[crypto_shorthash_BYTES];
        uint32_t out;
        (void)crypto_shorthash(mixed, (const uint8_t *)in, sizeof in, agent->lease_key);
        memcpy(&out, mixed, sizeof out);
        number = (uint64_t)((uint32_t)number ^ out) << 32 | half;
    }
    return number;
}

static kvf_call_body give_up(uint64_t generation, uint64_t acquire) {
    return (kvf_call_body){.kind = KVF_CALL_RELEASE,
                           .request = {"a", 1},
                           .rank_count = 1,
                           .generation = generation,
                           .earlier = acquire,
                           .status = KVF_E_CANCELLED};
}

/* A consumer that begins anew has another lease, whose number it has not heard of yet when it gives up. */
static void giving_up_ends_the_lease_whose_number_the_consumer_has_not_heard(void **state) {
    (void)state;
    rights s;
    const uint64_t ticket = rights_open_leased(&s);
    const uint64_t first = s.rightful.generation;
    assert_int_equal(rights_say(&s, &s.rightful, rights_acquire("a")), KVF_OK);
    assert_int_not_equal(s.rightful.generation, first);
    assert_int_equal(rights_say(&s, &s.rightful, give_up(first, s.rightful.number)), KVF_OK);
    assert_int_equal(world_stats(s.p).leases_now, 0);
    (void)world_failed(&s.w, s.p, ticket, KVF_E_CANCELLED);
    rights_close(&s);
}

/* The first try's lease is on a hold that was cancelled; the next try waits for another hold. */
static void giving_up_ends_the_lease_of_a_try_though_the_next_one_waits(void **state) {
    (void)state;
    rights s;
    const uint64_t ticket = rights_open_leased(&s);
    const uint64_t acquired = s.rightful.number;
    assert_ok(kvf_agent_cancel(s.p, ticket));
    kvf_past_forget(s.p, (kvf_bytes){"a", 1}); /* as if it was long ago */
    assert_false(speaker_call(&s.w, &s.rightful, s.rightful.session, rights_acquire("a")));
    assert_int_equal(rights_say(&s, &s.rightful, give_up(0, acquired)), KVF_OK);
    assert_int_equal(world_stats(s.p).leases_now, 0);
    (void)world_failed(&s.w, s.p, ticket, KVF_E_CANCELLED);
    (void)rights_hold(&s, "a"); /* it still waits */
    assert_int_equal(world_stats(s.p).leases_now, 1);
    rights_close(&s);
}

static void the_numbers_of_leases_are_a_count_that_is_permuted(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    uint64_t last = 0;
    for (uint32_t i = 0; i < 4; i++) {
        const char id[2] = {(char)('a' + i), '\0'};
        const uint64_t ticket = rights_hold(&s, id);
        assert_int_equal(rights_say(&s, &s.rightful, rights_acquire(id)), KVF_OK);
        assert_int_equal(s.rightful.generation & KVF_EXPECTATION, 0);
        const uint64_t count = unpermuted(s.p, s.rightful.generation);
        assert_true(count > last); /* numbers that would mean an expectation are skipped */
        assert_int_equal(count, s.p->next_lease);
        last = count;
        assert_ok(kvf_agent_cancel(s.p, ticket));
    }
    rights_close(&s);
}

/* ---- work ------------------------------------------------------------------------------------- */

/* The agent shares its turns among peers by this work. */
static void a_message_is_as_much_work_as_it_has_bytes_and_what_they_unpack_to(void **state) {
    (void)state;
    rights s;
    world_request wanted;
    kvf_wire_buffer bytes;
    kvf_message read;
    uint64_t work = 0;
    rights_open(&s);
    world_request_make(&s.w, &s.w.d, "a", 40, 0, 1, &wanted);
    kvf_message message = {.kind = KVF_MESSAGE_CALL,
                           .call = rights_expect("a", 1 | KVF_EXPECTATION, &wanted)};
    message.call.number = 7; /* in an unknown session */
    assert_ok(kvf_wire_encode(&message, &bytes));
    assert_ok(kvf_wire_open((kvf_bytes){bytes.data, bytes.size}, &read));
    assert_ok(kvf_wire_read(&read));
    const uint64_t unpacked = kvf_message_kept(&read);
    assert_true(unpacked > 0);
    kvf_message_free(&read);
    kvf_on_message(s.p, &(const kvf_letter){.data = bytes.data, .bytes = bytes.size, .work = &work});
    assert_true(work >= bytes.size + 4 * unpacked && work < 1 << 20); /* read, kept, and put together */
    kvf_wire_buffer_free(&bytes);
    rights_close(&s);
}

static void a_message_that_is_sent_is_work_too(void **state) {
    (void)state;
    rights s;
    kvf_wire_buffer bytes;
    rights_open(&s);
    const kvf_message message = {.kind = KVF_MESSAGE_REFUSED,
                                 .refused = {.status = KVF_E_AGAIN, .detail = "is busy"}};
    assert_ok(kvf_wire_encode(&message, &bytes));
    const uint64_t work = s.p->work, sent = s.p->stats.messages_sent;
    kvf_message_send(s.p, rights_session(&s)->route, &message);
    assert_int_equal(s.p->work, work + bytes.size);
    assert_int_equal(s.p->stats.messages_sent, sent + 1);
    kvf_wire_buffer_free(&bytes);
    rights_close(&s);
}

/* ---- cards ------------------------------------------------------------------------------------ */

/* A new card ends the connection by the former one. */
static void a_card_is_new_only_if_its_bytes_are(void **state) {
    (void)state;
    static kvf_agent agent;
    static kvf_session session;
    session.agent = &agent;
    assert_ok(kvf_session_take_card(&session, "abcd", 4));
    const void *first = session.card;
    assert_ok(kvf_session_take_card(&session, "abcd", 4));
    assert_ptr_equal(session.card, first);
    static const struct {
        const char *bytes;
        size_t count;
    } others[] = {{"abcx", 4}, {"abc", 3}, {"abcx", 4}};
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        assert_ok(kvf_session_take_card(&session, others[i].bytes, others[i].count));
        assert_int_equal(session.card_bytes, others[i].count);
        assert_memory_equal(session.card, others[i].bytes, others[i].count);
    }
    kvf_free(session.card);
}

/* ---- clocks ----------------------------------------------------------------------------------- */

static uint64_t time_of_day(void *context) {
    return *(const uint64_t *)context;
}

/* The shortest round trip counts, or the first of equal ones; the clock may be off by half of it. */
static void the_shortest_round_trip_tells_the_peers_clock(void **state) {
    (void)state;
    static kvf_session session;
    session.clock_error = UINT64_MAX;
    kvf_session_clock(&session, 100, 300, 1200);
    assert_int_equal(session.clock_offset, 1000);
    assert_int_equal(session.clock_error, 101);
    kvf_session_clock(&session, 1000, 1201, 5000); /* equally long, in whole nanoseconds */
    assert_int_equal(session.clock_offset, 1000);
    kvf_session_clock(&session, 1000, 1198, 99);
    assert_int_equal(session.clock_offset, -1000);
    assert_int_equal(session.clock_error, 100);
    kvf_session_clock(&session, 1000, 2000, 99);
    assert_int_equal(session.clock_error, 100);
}

/* By then the clocks may have drifted apart by a 2048th of the time since. */
static void a_longer_round_trip_counts_when_the_shortest_is_long_ago(void **state) {
    (void)state;
    static kvf_session session;
    session.clock_error = UINT64_MAX;
    kvf_session_clock(&session, 1000, 1198, 99);
    const uint64_t later = 1000 + 10 * 2048;
    kvf_session_clock(&session, later - 218, later, 99); /* 110 */
    assert_int_equal(session.clock_error, 100);
    kvf_session_clock(&session, later - 216, later, later - 108 + 77);
    assert_int_equal(session.clock_error, 109);
    assert_int_equal(session.clock_offset, 77);
}

/* Clocks may drift apart by a 2048th of the time from their comparison until then. */
static void a_moment_on_the_peers_clock_is_rather_too_early(void **state) {
    (void)state;
    static uint64_t now = 1000000;
    static kvf_agent agent;
    static kvf_session session;
    agent.clock = (kvf_clock){.now = time_of_day, .context = &now};
    session.agent = &agent;
    session.clock_error = UINT64_MAX;
    kvf_session_clock(&session, now, now + 198, now + 99 + 5000);
    assert_int_equal(kvf_session_their_time(&session, now), now + 5000 - 100);
    assert_int_equal(kvf_session_their_time(&session, now - 10), now - 10 + 5000 - 100);
    assert_int_equal(kvf_session_their_time(&session, now + 2047), now + 2047 + 5000 - 100);
    assert_int_equal(kvf_session_their_time(&session, now + 2048), now + 2048 + 5000 - 101);
    now += 7 * 2048;
    assert_int_equal(kvf_session_clock_error(&session, now), 107);
    assert_int_equal(kvf_session_their_time(&session, now + 2048), now + 2048 + 5000 - 108);
    assert_int_equal(kvf_session_their_time(&session, now + 6), now + 6 + 5000 - 103); /* half is left */
    now -= 7 * 2048;
    session.clock_offset = -(int64_t)now;
    assert_int_equal(kvf_session_their_time(&session, now + 101), 1);
    assert_int_equal(kvf_session_their_time(&session, now + 100), 0);
    assert_int_equal(kvf_session_their_time(&session, now + 99), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(acquire_and_release_are_for_the_peer_of_the_session),
        cmocka_unit_test(a_lease_of_another_session_is_none),
        cmocka_unit_test(a_peer_has_as_many_leases_as_are_allowed),
        cmocka_unit_test(a_peer_expects_as_many_requests_as_are_allowed),
        cmocka_unit_test(a_call_that_is_repeated_waits_no_longer_than_the_first_time),
        cmocka_unit_test(numbers_of_leases_cannot_be_guessed),
        cmocka_unit_test(beats_are_for_the_peer_of_the_session),
        cmocka_unit_test(expect_and_withdraw_are_for_the_peer_of_the_session),
        cmocka_unit_test(checksums_are_for_the_peer_of_the_session),
        cmocka_unit_test(checksums_of_no_steps_or_more_than_8192_are_refused),
        cmocka_unit_test(calls_of_a_producer_are_refused_from_a_consumer),
        cmocka_unit_test(a_jump_of_numbers_forces_a_new_greeting),
        cmocka_unit_test(a_jump_is_by_as_many_numbers_as_are_remembered),
        cmocka_unit_test(a_session_that_was_left_ends_with_its_last_lease),
        cmocka_unit_test(a_session_that_was_left_ends_with_its_last_expectation),
        cmocka_unit_test(a_client_that_has_hung_up_is_forgotten_once_it_was_silent_for_long),
        cmocka_unit_test(a_consumer_that_knows_the_session_no_more_is_lost_at_once),
        cmocka_unit_test(a_consumer_that_is_lost_often_does_not_flood_the_engine),
        cmocka_unit_test(a_session_is_kept_while_anything_of_its_peer_is_here),
        cmocka_unit_test(a_writer_that_has_lost_its_peer_does_not_say_that_it_has_stopped),
        cmocka_unit_test(every_number_counts_once),
        cmocka_unit_test(the_shortest_round_trip_tells_the_peers_clock),
        cmocka_unit_test(a_longer_round_trip_counts_when_the_shortest_is_long_ago),
        cmocka_unit_test(a_moment_on_the_peers_clock_is_rather_too_early),
        cmocka_unit_test(ending_earlier_calls_cannot_use_up_numbers),
        cmocka_unit_test(giving_up_ends_the_lease_whose_number_the_consumer_has_not_heard),
        cmocka_unit_test(giving_up_ends_the_lease_of_a_try_though_the_next_one_waits),
        cmocka_unit_test(the_numbers_of_leases_are_a_count_that_is_permuted),
        cmocka_unit_test(a_message_is_as_much_work_as_it_has_bytes_and_what_they_unpack_to),
        cmocka_unit_test(a_message_that_is_sent_is_work_too),
        cmocka_unit_test(a_card_is_new_only_if_its_bytes_are),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
