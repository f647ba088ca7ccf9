/* Who may join, when again, and what becomes of what is written meanwhile. */
#include "agent/push.h"
#include "agent_rights.h"

static void join_is_for_the_peer_of_the_session(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_wire_buffer introduction = {0};
    kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 3, &introduction);
    rights_not_of_others(&s, join);
    assert_null(rights_session(&s)->shape);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    assert_non_null(rights_session(&s)->shape);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK); /* asked again */

    join.card.size--; /* another card needs a higher generation */
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_E_EXISTS);
    assert_non_null(strstr(s.rightful.detail, "generation is 3"));
    join.generation = 2;
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_E_EXISTS);
    assert_true(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED) >= 2);
    join.generation = 4;
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    assert_int_equal(rights_session(&s)->card_bytes, join.card.size);
    kvf_wire_buffer_free(&introduction);
    rights_close(&s);
}

static void a_second_join_waits_until_what_is_written_by_the_first_is_over(void **state) {
    (void)state;
    rights s;
    world_request wanted, pushed;
    uint64_t push;
    rights_open(&s);
    kvf_wire_buffer introduction = {0};
    kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 1, &introduction);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    world_request_make(&s.w, &s.w.d, "a", 40, 0, 1, &wanted);
    world_request_make(&s.w, &s.w.p, "a", 40, 0, 1, &pushed);
    assert_int_equal(rights_say(&s, &s.rightful, rights_expect("a", 1, &wanted)), KVF_OK);
    world_push(&s.w.p, &pushed, &push); /* of which nothing is ready yet */
    join.generation = 2;
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_E_AGAIN);
    kvf_call_body withdraw = {
        .kind = KVF_CALL_WITHDRAW, .request = {"a", 1}, .generation = 1 | KVF_EXPECTATION};
    assert_int_equal(rights_say(&s, &s.rightful, withdraw), KVF_OK);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    kvf_wire_buffer_free(&introduction);
    rights_close(&s);
}

static void what_hangs_from_before_is_over_when_a_client_joins_anew(void **state) {
    (void)state;
    rights s;
    world_request wanted, pushed;
    uint64_t push;
    rights_open(&s);
    kvf_wire_buffer introduction = {0};
    kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 1, &introduction);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    for (uint64_t i = 1; i <= 2; i++) {
        const char *id = i == 1 ? "a" : "b";
        world_request_make(&s.w, &s.w.d, id, 40, 0, 1, &wanted);
        world_request_make(&s.w, &s.w.p, id, 40, 0, 1, &pushed);
        assert_int_equal(rights_say(&s, &s.rightful, rights_expect(id, i, &wanted)), KVF_OK);
        world_push(&s.w.p, &pushed, &push);
        world_ready(&s.w.p, &push);
        world_until(&s.w, rights_session(&s)->flows->over); /* a new connection serves as the first one did */
        assert_int_equal(rights_session(&s)->flows->status, KVF_OK);
        assert_non_null(rights_session(&s)->peer);
        assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
        assert_null(rights_session(&s)->peer);
        kvf_call_body withdraw = {
            .kind = KVF_CALL_WITHDRAW, .request = {id, 1}, .generation = i | KVF_EXPECTATION};
        assert_int_equal(rights_say(&s, &s.rightful, withdraw), KVF_OK);
        world_until(&s.w, !rights_session(&s)->flows);
    }
    kvf_wire_buffer_free(&introduction);
    rights_close(&s);
}

/* While a push goes slowly to a client that has joined without a stage, it joins with one: `stage` says how. */
static kvf_status joins_while_written_to(kvf_join_stage stage) {
    rights s;
    world_request wanted, pushed;
    uint64_t push;
    rights_open(&s);
    kvf_wire_buffer introduction = {0};
    kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 1, &introduction);
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    world_request_make(&s.w, &s.w.d, "a", 40, 0, 1, &wanted);
    world_request_make(&s.w, &s.w.p, "a", 40, 0, 1, &pushed);
    pushed.request.bytes_per_second = 1000;
    pushed.request.way = KVF_WAY_DIRECT;
    assert_int_equal(rights_say(&s, &s.rightful, rights_expect("a", 1, &wanted)), KVF_OK);
    world_push(&s.w.p, &pushed, &push);
    world_ready(&s.w.p, &push);
    speaker_run_for(&s.w, &s.rightful, 100 * MS);
    assert_false(rights_session(&s)->flows->over);
    join.stage = stage;
    assert_int_equal(rights_say(&s, &s.rightful, join), KVF_OK);
    speaker_run_for(&s.w, &s.rightful, 100 * MS);
    kvf_call_body withdraw = {
        .kind = KVF_CALL_WITHDRAW, .request = {"a", 1}, .generation = 1 | KVF_EXPECTATION};
    const bool over = rights_session(&s)->flows->over;
    const kvf_status status = rights_session(&s)->flows->status;
    assert_int_equal(over, status != KVF_OK); /* 40 tokens take seconds */
    assert_int_equal(rights_say(&s, &s.rightful, withdraw), KVF_OK);
    kvf_wire_buffer_free(&introduction);
    rights_close(&s);
    return status;
}

static void a_client_that_had_lost_us_and_brings_its_stage_begins_anew(void **state) {
    (void)state;
    assert_int_equal(joins_while_written_to(KVF_JOIN_STAGED), KVF_E_PEER_LOST);
}

static void a_client_that_only_adds_its_stage_is_written_to_as_before(void **state) {
    (void)state;
    assert_int_equal(joins_while_written_to(KVF_JOIN_ADDS_STAGE), KVF_OK);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(join_is_for_the_peer_of_the_session),
        cmocka_unit_test(a_second_join_waits_until_what_is_written_by_the_first_is_over),
        cmocka_unit_test(what_hangs_from_before_is_over_when_a_client_joins_anew),
        cmocka_unit_test(a_client_that_had_lost_us_and_brings_its_stage_begins_anew),
        cmocka_unit_test(a_client_that_only_adds_its_stage_is_written_to_as_before),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
