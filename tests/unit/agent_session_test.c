/*
 * Who may say what: each row of the table in docs/protocol.md by the rightful peer, by another peer with a key that
 * is allowed too, and by a stranger without one. The latter two know everything the rightful one knows but its keys:
 * its introduction, its session's id, its leases.
 */
#include "agent/agent.h"
#include "agent/claim.h"
#include "agent/hold.h"
#include "agent/push.h"
#include "agent_letters.h"
#include "agent_net.h"
#include "agent_speaker.h"

#define ONE(engine_name) ENGINE(.name = (engine_name), .all = {.block_count = 64})
#define OPTIONS(...) (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), __VA_ARGS__})
#define LEASE (10 * SECOND)

/* P lends and writes; `rightful` has a session with it, as engine X. */
typedef struct scene {
    world w;
    kvf_agent *p;
    speaker rightful, other, stranger;
    char p_public[41], p_secret[41], d_public[41], d_secret[41];
} scene;

static void open_scene(scene *s) {
    memset(s, 0, sizeof *s);
    assert_ok(kvf_agent_make_keys(s->p_public, s->p_secret));
    assert_ok(kvf_agent_make_keys(s->d_public, s->d_secret));
    world_open_model(&s->w, attention(2, 4, 8), ONE("P"), ONE("D"), NULL);
    world_close_agents(&s->w.p);
    world_close_agents(&s->w.d);
    world_open_agents(&s->w.p,
                      OPTIONS(.public_key = s->p_public, .secret_key = s->p_secret, .lease_ns = LEASE));
    world_open_agents(&s->w.d,
                      OPTIONS(.public_key = s->d_public, .secret_key = s->d_secret, .lease_ns = LEASE));
    s->p = s->w.p.agents[0];
    speaker_open(&s->rightful, s->p, "X", true, 1);
    speaker_open(&s->other, s->p, "Y", true, 2);
    speaker_open(&s->stranger, s->p, "Z", false, 3);
    speaker_greet(&s->w, &s->rightful);
    assert_int_equal(s->rightful.kind, KVF_MESSAGE_WELCOME);
}

static void close_scene(scene *s) {
    speaker_close(&s->rightful);
    speaker_close(&s->other);
    speaker_close(&s->stranger);
    world_close(&s->w);
}

static kvf_session *session_of(const scene *s) {
    kvf_session *session;
    DL_FOREACH(s->p->all_sessions, session) {
        if (session->incoming && session->engine[0] == 'X' && session->state == KVF_SESSION_OPEN)
            return session;
    }
    return NULL;
}

/* A call in the rightful session, by anybody. The two others are told that there is no such session. */
static kvf_status say(scene *s, speaker *by, kvf_call_body call) {
    by->number = s->rightful.number;
    assert_true(speaker_call(&s->w, by, s->rightful.session, call));
    s->rightful.number = by->number;
    return by->status;
}

static void others_may_not(scene *s, kvf_call_body call) {
    uint64_t foreign = world_stats(s->p).messages_foreign;
    assert_int_equal(say(s, &s->other, call), KVF_E_PEER_LOST);
    assert_int_equal(say(s, &s->stranger, call), KVF_E_PEER_LOST);
    assert_int_equal(world_stats(s->p).messages_foreign, foreign + 2);
}

static kvf_call_body acquire(const char *id) {
    return (kvf_call_body){
        .kind = KVF_CALL_ACQUIRE, .request = {id, strlen(id)}, .time_ns = SECOND, .rank_count = 1};
}

static uint64_t hold(scene *s, const char *id) {
    world_request held;
    uint64_t ticket;
    world_request_make(&s->w, &s->w.p, id, 40, 10, 1, &held);
    world_hold(&s->w.p, &held, &ticket);
    return ticket;
}

/* ---- greeting -------------------------------------------------------------------------------- */

static void a_greeting_repeated_brings_the_same_session(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    uint8_t id[KVF_WIRE_SESSION_BYTES];
    memcpy(id, s.rightful.session, sizeof id);
    speaker_greet(&s.w, &s.rightful);
    assert_memory_equal(id, s.rightful.session, sizeof id);
    assert_int_equal(world_stats(s.p).peers_now, 1);
    close_scene(&s);
}

static void an_introduction_opens_no_session(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    speaker *who[] = {&s.other, &s.stranger};
    for (int i = 0; i < 2; i++) {
        who[i]->engine = "X";
        who[i]->incarnation = s.rightful.incarnation; /* as introductions tell; the secret they do not */
        speaker_greet(&s.w, who[i]);
        assert_int_equal(who[i]->kind, KVF_MESSAGE_REFUSED);
        assert_int_equal(who[i]->status, KVF_E_PERMISSION);
        assert_non_null(strstr(who[i]->detail, "secret"));
        assert_int_equal(who[i]->card_bytes, 0);
    }
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 1); /* told once */
    close_scene(&s);
}

static void a_secret_that_was_heard_does_not_help_another_key(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    s.other.engine = "X";
    s.other.incarnation = s.rightful.incarnation;
    memcpy(s.other.secret, s.rightful.secret, sizeof s.other.secret);
    speaker_greet(&s.w, &s.other);
    assert_int_equal(s.other.status, KVF_E_PERMISSION);
    assert_non_null(strstr(s.other.detail, "under another key"));
    close_scene(&s);
}

static bool greets_until(scene *s, speaker *who, kvf_message_kind kind, kvf_status status) {
    for (int i = 0; i < 8; i++) {
        speaker_greet(&s->w, who);
        if (who->kind == kind && who->status == status)
            return true;
        speaker_run_for(&s->w, &s->rightful, 500 * MS);
    }
    return false;
}

/* Answers what P asks the rightful one. */
static void answer_probe(scene *s) {
    assert_int_equal(s->rightful.kind, KVF_MESSAGE_CALL);
    assert_int_equal(s->rightful.call, KVF_CALL_PROBE);
    kvf_message answer = {.kind = KVF_MESSAGE_ANSWER,
                          .answer = {.number = session_of(s)->probe->number, .kind = KVF_CALL_PROBE}};
    memcpy(answer.answer.session, s->rightful.session, sizeof answer.answer.session);
    speaker_send(&s->rightful, &answer);
}

static void a_name_is_the_living_process_that_has_it(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    s.other.engine = "X"; /* a process of its own, under the same name */
    speaker_greet(&s.w, &s.other);
    assert_int_equal(s.other.status, KVF_E_AGAIN);
    speaker_run_for(&s.w, &s.rightful, 10 * MS);
    answer_probe(&s);
    speaker_run_for(&s.w, &s.rightful, 10 * MS);
    speaker_greet(&s.w, &s.other);
    assert_int_equal(s.other.status, KVF_E_PERMISSION);
    assert_non_null(strstr(s.other.detail, "which lives"));
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 1);
    close_scene(&s);
}

static void a_name_whose_process_says_nothing_goes_to_the_next(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    (void)hold(&s, "a");
    assert_int_equal(say(&s, &s.rightful, acquire("a")), KVF_OK);
    s.other.engine = "X";
    assert_true(greets_until(&s, &s.other, KVF_MESSAGE_WELCOME, KVF_OK));
    assert_int_equal(world_stats(s.p).leases_now, 1); /* the former one may still be reading */
    assert_int_equal(say(&s, &s.rightful, acquire("b")), KVF_E_PEER_LOST);
    speaker_run_for(&s.w, &s.other, LEASE);
    assert_int_equal(world_stats(s.p).leases_now, 0);
    close_scene(&s);
}

static void a_name_whose_connection_has_ended_is_free_when_that_does_not_come_back(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    speaker_close(&s.rightful);
    s.other.engine = "X";
    speaker_greet(&s.w, &s.other);
    assert_int_equal(s.other.status, KVF_E_AGAIN);
    speaker_run_for(&s.w, &s.other, 3 * SECOND);
    speaker_greet(&s.w, &s.other);
    assert_int_equal(s.other.kind, KVF_MESSAGE_WELCOME);
    speaker_open(&s.rightful, s.p, "X", true, 1);
    close_scene(&s);
}

/* Connections break, of living processes too, and whoever breaks them should gain nothing by it. */
static void a_name_whose_connection_comes_back_stays_with_its_process(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    speaker_close(&s.rightful);
    s.other.engine = "X";
    speaker_greet(&s.w, &s.other);
    assert_int_equal(s.other.status, KVF_E_AGAIN);
    speaker_reopen(&s.rightful, s.p);
    speaker_greet(&s.w, &s.rightful);
    assert_int_equal(s.rightful.kind, KVF_MESSAGE_WELCOME);
    speaker_run_for(&s.w, &s.rightful, 200 * MS); /* it is asked again */
    answer_probe(&s);
    speaker_run_for(&s.w, &s.rightful, 10 * MS);
    speaker_greet(&s.w, &s.other);
    assert_int_equal(s.other.status, KVF_E_PERMISSION);
    close_scene(&s);
}

static void anybody_may_ask_for_ranks_and_changes_nothing_by_it(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    const kvf_session *known = session_of(&s);
    const uint64_t kept = world_stats(s.p).memory_now_bytes;
    speaker *who[] = {&s.rightful, &s.other, &s.stranger};
    for (int i = 0; i < 3; i++) {
        /* in the name of the one that has a session, and without its secret */
        kvf_message hello = {.kind = KVF_MESSAGE_HELLO,
                             .hello = {.engine = "X",
                                       .incarnation = s.rightful.incarnation,
                                       .rank_count = 1,
                                       .wants_ranks = true,
                                       .clock_ns = world_now()}};
        const uint8_t none[KVF_WIRE_SESSION_BYTES] = {0};
        who[i]->kind = (kvf_message_kind)0;
        who[i]->card_bytes = 1;
        const uint32_t letters = who[i]->letters;
        speaker_send(who[i], &hello);
        speaker_run_for(&s.w, who[i], 10 * MS);
        assert_int_equal(who[i]->letters, letters + 1);
        assert_int_equal(who[i]->kind, KVF_MESSAGE_WELCOME);
        assert_int_equal(who[i]->card_bytes, 0);
        assert_memory_equal(who[i]->session, none, sizeof none);
    }
    assert_ptr_equal(session_of(&s), known);
    assert_int_equal(known->state, KVF_SESSION_OPEN);
    assert_int_equal(world_stats(s.p).peers_now, 1);
    assert_int_equal(world_stats(s.p).memory_now_bytes, kept);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 0);
    /* messages to the peer still go where the peer is */
    memcpy(s.rightful.session, known->id, sizeof known->id);
    (void)hold(&s, "a");
    assert_int_equal(say(&s, &s.rightful, acquire("a")), KVF_OK);
    close_scene(&s);
}

/* ---- keys for names --------------------------------------------------------------------------- */

static void a_name_that_is_granted_is_only_for_the_keys_it_was_granted_to(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    world_close_agents(&s.w.p);
    speaker known;
    char key[41], secret[41];
    assert_ok(kvf_agent_make_keys(key, secret));
    speaker_close(&s.rightful);
    speaker_open(&s.rightful, s.w.d.agents[0], "X", true, 1);
    const char *allowed[] = {s.other.public_key, s.d_public};
    const kvf_key_grant grants[] = {
        {.struct_size = sizeof *grants, .public_key = s.rightful.public_key, .engine = "X", .rank_end = 1},
        {.struct_size = sizeof *grants, .public_key = key, .engine = "Y", .rank_begin = 4, .rank_end = 8},
    };
    world_open_agents(&s.w.p,
                      OPTIONS(.public_key = s.p_public, .secret_key = s.p_secret, .allowed_keys = allowed,
                              .allowed_key_count = 2, .grants = grants, .grant_count = 2));
    s.p = s.w.p.agents[0];
    /* as the key that the name was granted to, as one that may be any other, as one that may be ranks of Y */
    const struct {
        const char *key, *secret, *engine;
        kvf_message_kind kind;
    } tries[] = {
        {s.rightful.public_key, s.rightful.secret_key, "X", KVF_MESSAGE_WELCOME},
        {s.rightful.public_key, s.rightful.secret_key, "V", KVF_MESSAGE_REFUSED},
        {s.other.public_key, s.other.secret_key, "X", KVF_MESSAGE_REFUSED},
        {s.other.public_key, s.other.secret_key, "V", KVF_MESSAGE_WELCOME},
        {s.other.public_key, s.other.secret_key, "Y", KVF_MESSAGE_REFUSED},
        {key, secret, "Y", KVF_MESSAGE_REFUSED}, /* it is rank 0 */
    };
    for (size_t i = 0; i < COUNT_OF(tries); i++) {
        speaker_open(&known, s.p, tries[i].engine, false, (uint8_t)(10 + i));
        speaker_close(&known);
        memcpy(known.public_key, tries[i].key, sizeof known.public_key);
        memcpy(known.secret_key, tries[i].secret, sizeof known.secret_key);
        speaker_reopen(&known, s.p);
        speaker_greet(&s.w, &known);
        if (known.kind != tries[i].kind)
            fail_msg("try %zu: %s", i, known.detail);
        if (known.kind == KVF_MESSAGE_REFUSED)
            assert_non_null(strstr(known.detail, "does not let this key speak"));
        speaker_close(&known);
    }
    close_scene(&s);
}

static void keys_that_are_allowed_and_keys_of_grants_may_all_connect(void **state) {
    (void)state;
    const char *const allowed[] = {"a", "b"};
    const kvf_key_grant grants[] = {{.struct_size = sizeof *grants, .public_key = "c", .engine = "X"},
                                    {.struct_size = sizeof *grants, .public_key = "d", .engine = "Y"}};
    const kvf_agent_options both = {
        .allowed_keys = allowed, .allowed_key_count = 2, .grants = grants, .grant_count = 2};
    const char **keys;
    uint32_t count;
    assert_ok(kvf_grants_keys(&both, &keys, &count));
    assert_int_equal(count, 4);
    for (uint32_t i = 0; i < 4; i++)
        assert_string_equal(keys[i], ((const char *[]){"a", "b", "c", "d"})[i]);
    kvf_free(keys);
}

/* ---- calls of a consumer ---------------------------------------------------------------------- */

static void join_is_for_the_peer_of_the_session(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    kvf_wire_buffer introduction = {0};
    kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 3, &introduction);
    others_may_not(&s, join);
    assert_null(session_of(&s)->shard);
    assert_int_equal(say(&s, &s.rightful, join), KVF_OK);
    assert_non_null(session_of(&s)->shard);
    assert_int_equal(say(&s, &s.rightful, join), KVF_OK); /* asked again */

    join.card.size--; /* another card needs a higher generation */
    assert_int_equal(say(&s, &s.rightful, join), KVF_E_EXISTS);
    assert_non_null(strstr(s.rightful.detail, "generation is 3"));
    join.generation = 2;
    assert_int_equal(say(&s, &s.rightful, join), KVF_E_EXISTS);
    assert_true(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED) >= 2);
    join.generation = 4;
    assert_int_equal(say(&s, &s.rightful, join), KVF_OK);
    assert_int_equal(session_of(&s)->card_bytes, join.card.size);
    kvf_wire_buffer_free(&introduction);
    close_scene(&s);
}

static kvf_call_body expect(const scene *s, const char *id, uint64_t generation,
                            const world_request *wanted) {
    return (kvf_call_body){.kind = KVF_CALL_EXPECT,
                           .request = {id, strlen(id)},
                           .generation = generation | KVF_EXPECTATION,
                           .time_ns = world_now() + SECOND,
                           .rank_count = 1,
                           .groups = wanted->groups,
                           .group_count = s ? wanted->group_count : 0};
}

static void a_second_join_waits_until_what_is_written_by_the_first_is_over(void **state) {
    (void)state;
    scene s;
    world_request wanted, pushed;
    uint64_t push;
    open_scene(&s);
    kvf_wire_buffer introduction = {0};
    kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 1, &introduction);
    assert_int_equal(say(&s, &s.rightful, join), KVF_OK);
    world_request_make(&s.w, &s.w.d, "a", 40, 0, 1, &wanted);
    world_request_make(&s.w, &s.w.p, "a", 40, 0, 1, &pushed);
    assert_int_equal(say(&s, &s.rightful, expect(&s, "a", 1, &wanted)), KVF_OK);
    world_push(&s.w.p, &pushed, &push); /* of which nothing is ready yet */
    join.generation = 2;
    assert_int_equal(say(&s, &s.rightful, join), KVF_E_AGAIN);
    kvf_call_body withdraw = {
        .kind = KVF_CALL_WITHDRAW, .request = {"a", 1}, .generation = 1 | KVF_EXPECTATION};
    assert_int_equal(say(&s, &s.rightful, withdraw), KVF_OK);
    assert_int_equal(say(&s, &s.rightful, join), KVF_OK);
    kvf_wire_buffer_free(&introduction);
    close_scene(&s);
}

static void what_hangs_from_before_is_over_when_a_client_joins_anew(void **state) {
    (void)state;
    scene s;
    world_request wanted, pushed;
    uint64_t push;
    open_scene(&s);
    kvf_wire_buffer introduction = {0};
    kvf_call_body join = speaker_join(&s.rightful, s.w.d.agents[0], 1, &introduction);
    assert_int_equal(say(&s, &s.rightful, join), KVF_OK);
    for (uint64_t i = 1; i <= 2; i++) {
        const char *id = i == 1 ? "a" : "b";
        world_request_make(&s.w, &s.w.d, id, 40, 0, 1, &wanted);
        world_request_make(&s.w, &s.w.p, id, 40, 0, 1, &pushed);
        assert_int_equal(say(&s, &s.rightful, expect(&s, id, i, &wanted)), KVF_OK);
        world_push(&s.w.p, &pushed, &push);
        world_ready(&s.w.p, &push);
        world_until(&s.w, session_of(&s)->flows->over); /* a new connection serves as the first one did */
        assert_int_equal(session_of(&s)->flows->status, KVF_OK);
        assert_non_null(session_of(&s)->peer);
        assert_int_equal(say(&s, &s.rightful, join), KVF_OK);
        assert_null(session_of(&s)->peer);
        kvf_call_body withdraw = {
            .kind = KVF_CALL_WITHDRAW, .request = {id, 1}, .generation = i | KVF_EXPECTATION};
        assert_int_equal(say(&s, &s.rightful, withdraw), KVF_OK);
        world_until(&s.w, !session_of(&s)->flows);
    }
    kvf_wire_buffer_free(&introduction);
    close_scene(&s);
}

static void acquire_and_release_are_for_the_peer_of_the_session(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    uint64_t ticket = hold(&s, "a");
    others_may_not(&s, acquire("a"));
    assert_int_equal(world_stats(s.p).leases_now, 0);
    assert_int_equal(say(&s, &s.rightful, acquire("a")), KVF_OK);
    assert_int_equal(world_stats(s.p).leases_now, 1);

    kvf_call_body release = {
        .kind = KVF_CALL_RELEASE, .request = {"a", 1}, .generation = s.rightful.generation, .rank_count = 1};
    others_may_not(&s, release);
    assert_int_equal(world_stats(s.p).leases_now, 1);
    assert_int_equal(say(&s, &s.rightful, release), KVF_OK);
    (void)world_done(&s.w, s.p, ticket);
    close_scene(&s);
}

static void a_lease_of_another_session_is_none(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    (void)hold(&s, "a");
    assert_int_equal(say(&s, &s.rightful, acquire("a")), KVF_OK);
    speaker_greet(&s.w, &s.other); /* as Y, in a session of its own */
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
    close_scene(&s);
}

static void numbers_of_leases_cannot_be_guessed(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    static const char *const ids[] = {"a", "b", "c", "d"};
    uint64_t seen[4];
    for (uint32_t i = 0; i < 4; i++) {
        world_request held;
        uint64_t ticket;
        world_request_make(&s.w, &s.w.p, ids[i], 16, 10 + i, 1, &held);
        world_hold(&s.w.p, &held, &ticket);
        assert_int_equal(say(&s, &s.rightful, acquire(ids[i])), KVF_OK);
        seen[i] = s.rightful.generation;
        assert_true(seen[i] < KVF_EXPECTATION);
        for (uint32_t j = 0; j < i; j++) {
            uint64_t apart = seen[i] > seen[j] ? seen[i] - seen[j] : seen[j] - seen[i];
            assert_true(apart > 1u << 20); /* by chance once in 2^40 */
        }
    }
    close_scene(&s);
}

static void beats_are_for_the_peer_of_the_session(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    (void)hold(&s, "a");
    assert_int_equal(say(&s, &s.rightful, acquire("a")), KVF_OK);
    const uint64_t lease = s.rightful.generation;
    const uint64_t until = session_of(&s)->readers->until;
    kvf_call_body beat = {.kind = KVF_CALL_BEAT, .leases = &lease, .lease_count = 1};
    speaker_run_for(&s.w, &s.rightful, SECOND);
    others_may_not(&s, beat);
    assert_int_equal(session_of(&s)->readers->until, until);
    assert_int_equal(say(&s, &s.rightful, beat), KVF_OK);
    assert_true(session_of(&s)->readers->until >= until + SECOND);
    close_scene(&s);
}

static void expect_and_withdraw_are_for_the_peer_of_the_session(void **state) {
    (void)state;
    scene s;
    world_request wanted;
    open_scene(&s);
    world_request_make(&s.w, &s.w.d, "a", 40, 0, 1, &wanted);
    others_may_not(&s, expect(&s, "a", 1, &wanted));
    assert_int_equal(session_of(&s)->flow_count, 0);
    assert_int_equal(say(&s, &s.rightful, expect(&s, "a", 1, &wanted)), KVF_OK);
    assert_int_equal(session_of(&s)->flow_count, 1);
    kvf_call_body withdraw = {
        .kind = KVF_CALL_WITHDRAW, .request = {"a", 1}, .generation = 1 | KVF_EXPECTATION};
    others_may_not(&s, withdraw);
    assert_false(session_of(&s)->flows->withdrawn);
    assert_int_equal(say(&s, &s.rightful, withdraw), KVF_OK);
    speaker_run_for(&s.w, &s.rightful, 2 * MS);
    assert_int_equal(session_of(&s)->flow_count, 0);
    close_scene(&s);
}

static void checksums_are_for_the_peer_of_the_session(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    (void)hold(&s, "a");
    assert_int_equal(say(&s, &s.rightful, acquire("a")), KVF_OK);
    kvf_call_body sums = {.kind = KVF_CALL_CHECKSUM,
                          .generation = s.rightful.generation,
                          .layers = {0, 1},
                          .units = {0, 1},
                          .end = 4};
    others_may_not(&s, sums);
    assert_int_equal(s.other.sums + s.stranger.sums, 0);
    assert_int_equal(say(&s, &s.rightful, sums), KVF_OK);
    assert_int_equal(s.rightful.sums, 4);
    close_scene(&s);
}

static void calls_of_a_producer_are_refused_from_a_consumer(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    kvf_call_body written = {
        .kind = KVF_CALL_WRITTEN, .request = {"a", 1}, .generation = 1 | KVF_EXPECTATION};
    kvf_call_body probe = {.kind = KVF_CALL_PROBE};
    others_may_not(&s, written);
    others_may_not(&s, probe);
    assert_int_equal(say(&s, &s.rightful, written), KVF_E_INVALID);
    assert_int_equal(say(&s, &s.rightful, probe), KVF_E_INVALID);
    close_scene(&s);
}

/* ---- numbers ---------------------------------------------------------------------------------- */

static void a_jump_of_numbers_forces_a_new_greeting(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    (void)hold(&s, "a");
    assert_int_equal(say(&s, &s.rightful, acquire("a")), KVF_OK);
    kvf_call_body beat = {.kind = KVF_CALL_BEAT, .number = UINT64_MAX};
    others_may_not(&s, beat);
    s.rightful.number = 1;
    assert_int_equal(say(&s, &s.rightful, beat), KVF_E_PEER_LOST); /* also of the rightful one */
    assert_null(session_of(&s));
    assert_int_equal(world_stats(s.p).leases_now, 1); /* which may be read by: it runs out */
    uint8_t before[KVF_WIRE_SESSION_BYTES];
    memcpy(before, s.rightful.session, sizeof before);
    speaker_greet(&s.w, &s.rightful);
    assert_int_equal(s.rightful.kind, KVF_MESSAGE_WELCOME);
    assert_memory_not_equal(before, s.rightful.session, sizeof before);
    s.rightful.number = 100000; /* numbers go on where they were */
    assert_int_equal(say(&s, &s.rightful, acquire("a")), KVF_OK);
    close_scene(&s);
}

static void what_ends_an_earlier_call_cannot_use_up_numbers(void **state) {
    (void)state;
    scene s;
    open_scene(&s);
    kvf_call_body release = {.kind = KVF_CALL_RELEASE, .request = {"a", 1}, .rank_count = 1};
    assert_int_equal(say(&s, &s.rightful, release), KVF_OK);
    release.number = 3;
    release.earlier = 3;
    kvf_wire_buffer bytes;
    assert_fails(kvf_wire_encode(&(kvf_message){.kind = KVF_MESSAGE_CALL, .call = release}, &bytes),
                 KVF_E_RANGE, "earlier is 3");
    close_scene(&s);
}

/* ---- what a consumer hears --------------------------------------------------------------------- */

/* D pulls from P what P does not hold, or expects it; `by` speaks to D. */
static void open_hearing(scene *s, speaker *by, bool keyed) {
    open_scene(s);
    speaker_open(by, s->w.d.agents[0], "P", keyed, 9);
}

static const kvf_session *session_with_p(const scene *s) {
    const kvf_session *session;
    DL_FOREACH(s->w.d.agents[0]->all_sessions, session) {
        if (!session->incoming)
            return session;
    }
    return NULL;
}

static void answers_and_calls_of_a_producer_count_over_the_connection_to_it(void **state) {
    (void)state;
    for (int keyed = 0; keyed < 2; keyed++) {
        scene s;
        speaker by;
        world_request wanted, pushed;
        uint64_t ours, theirs;
        open_hearing(&s, &by, keyed);
        kvf_agent *d = s.w.d.agents[0];
        world_request_make(&s.w, &s.w.d, "a", 40, 0, 1, &wanted);
        world_expect(&s.w.d, &wanted, &s.w.p, &ours);
        world_run_for(&s.w, 100 * MS);
        const kvf_session *session = session_with_p(&s);
        assert_non_null(session);
        /* Another one says that all is written, and asks whether it lives. */
        kvf_call_body written = {
            .kind = KVF_CALL_WRITTEN, .number = 1, .request = {"a", 1}, .generation = ours | KVF_EXPECTATION};
        assert_true(speaker_call(&s.w, &by, session->id, written));
        assert_int_equal(by.status, KVF_E_PEER_LOST);
        assert_true(
            speaker_call(&s.w, &by, session->id, (kvf_call_body){.kind = KVF_CALL_PROBE, .number = 2}));
        assert_int_equal(by.status, KVF_E_PEER_LOST);
        /* And answers what D asked P. */
        for (uint64_t n = 1; n < 20; n++) {
            kvf_message answer = {.kind = KVF_MESSAGE_ANSWER,
                                  .answer = {.number = n, .kind = KVF_CALL_BEAT, .status = KVF_E_PEER_LOST}};
            memcpy(answer.answer.session, session->id, sizeof answer.answer.session);
            speaker_send(&by, &answer);
        }
        /* And greets back, and refuses. */
        kvf_message welcome = {
            .kind = KVF_MESSAGE_WELCOME,
            .welcome = {.engine = "P", .incarnation = 5, .rank_count = 1, .card = {"c", 1}}};
        speaker_send(&by, &welcome);
        kvf_message refused = {.kind = KVF_MESSAGE_REFUSED, .refused = {KVF_E_PERMISSION, "no"}};
        speaker_send(&by, &refused);
        speaker_run_for(&s.w, &by, 100 * MS);
        assert_true(world_stats(d).messages_foreign >= 21);
        assert_int_equal(world_stats(d).done[KVF_REQUEST_EXPECT], 0);
        assert_int_equal(world_count(&s.w, d, KVF_EVENT_PEER_LOST), 0);
        assert_int_equal(session->state, KVF_SESSION_OPEN);
        /* The rightful one does. */
        world_request_make(&s.w, &s.w.p, "a", 40, 20, 1, &pushed);
        world_fill(&s.w, &s.w.p, &pushed, 7);
        world_push(&s.w.p, &pushed, &theirs);
        world_ready(&s.w.p, &theirs);
        (void)world_done(&s.w, d, ours);
        (void)world_done(&s.w, s.p, theirs);
        assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &wanted, 7), 0);
        speaker_close(&by);
        close_scene(&s);
    }
}

/* What a contact would say: that it is P, with P's introduction; and with a session, P's card. */
static void send_welcomes(const scene *s, speaker *by) {
    const kvf_bytes all[] = {{s->p->introductions[0].data, s->p->introductions[0].size}};
    kvf_message welcome = {.kind = KVF_MESSAGE_WELCOME,
                           .welcome = {.engine = "P",
                                       .incarnation = s->p->incarnation,
                                       .rank_count = 1,
                                       .introductions = all,
                                       .introduction_count = 1}};
    memcpy(welcome.digest, s->p->digest, sizeof welcome.digest);
    speaker_send(by, &welcome);
    welcome.welcome.introductions = NULL;
    welcome.welcome.introduction_count = 0;
    memset(welcome.welcome.session, 0x77, sizeof welcome.welcome.session);
    welcome.welcome.card = (kvf_bytes){"a card", 6};
    speaker_send(by, &welcome);
    kvf_message refused = {.kind = KVF_MESSAGE_REFUSED, .refused = {KVF_E_PERMISSION, "no"}};
    speaker_send(by, &refused);
}

static void nobody_else_answers_while_an_engine_is_being_met(void **state) {
    (void)state;
    for (int keyed = 0; keyed < 2; keyed++) {
        scene s;
        speaker by;
        uint64_t ticket;
        open_hearing(&s, &by, keyed);
        kvf_agent *d = s.w.d.agents[0];
        letters_begin();
        letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_WELCOME, (kvf_call_kind)0);
        assert_ok(kvf_agent_connect(d, &s.w.p.contact, 20 * SECOND, &ticket));
        speaker_run_for(&s.w, &by, 200 * MS);
        assert_true(letters_met() > 0); /* it greets, and hears nothing */
        send_welcomes(&s, &by);
        speaker_run_for(&s.w, &by, 200 * MS);
        assert_null(session_with_p(&s));
        assert_int_equal(world_count(&s.w, d, KVF_EVENT_PEER_READY) + world_count(&s.w, d, KVF_EVENT_FAILED),
                         0);
        letters_end();
        (void)world_done(&s.w, d, ticket); /* the one that is greeted does */
        speaker_close(&by);
        close_scene(&s);
    }
}

static void nobody_else_answers_while_a_session_is_being_opened(void **state) {
    (void)state;
    for (int keyed = 0; keyed < 2; keyed++) {
        scene s;
        speaker by;
        uint64_t ticket;
        open_hearing(&s, &by, keyed);
        kvf_agent *d = s.w.d.agents[0];
        const kvf_memory memory = {.struct_size = sizeof memory,
                                   .address = s.w.p.memory[0][0],
                                   .bytes = kvf_shard_get(s.p->shard)->region_bytes[0]};
        assert_ok(kvf_agent_unregister_region(s.p, 0)); /* P tells its ranks, and to ask again for the card */
        assert_ok(kvf_agent_connect(d, &s.w.p.contact, 20 * SECOND, &ticket));
        speaker_run_for(&s.w, &by, 200 * MS);
        const kvf_session *session = session_with_p(&s);
        assert_non_null(session);
        assert_int_equal(session->state, KVF_SESSION_GREETING);
        send_welcomes(&s, &by);
        speaker_run_for(&s.w, &by, 200 * MS);
        assert_ptr_equal(session_with_p(&s), session);
        assert_int_equal(session->state, KVF_SESSION_GREETING);
        assert_int_equal(world_count(&s.w, d, KVF_EVENT_PEER_READY) + world_count(&s.w, d, KVF_EVENT_FAILED),
                         0);
        assert_ok(kvf_agent_register_region(s.p, 0, &memory));
        (void)world_done(&s.w, d, ticket);
        speaker_close(&by);
        close_scene(&s);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_greeting_repeated_brings_the_same_session),
        cmocka_unit_test(an_introduction_opens_no_session),
        cmocka_unit_test(a_secret_that_was_heard_does_not_help_another_key),
        cmocka_unit_test(a_name_is_the_living_process_that_has_it),
        cmocka_unit_test(a_name_whose_process_says_nothing_goes_to_the_next),
        cmocka_unit_test(a_name_whose_connection_has_ended_is_free_when_that_does_not_come_back),
        cmocka_unit_test(a_name_whose_connection_comes_back_stays_with_its_process),
        cmocka_unit_test(anybody_may_ask_for_ranks_and_changes_nothing_by_it),
        cmocka_unit_test(a_name_that_is_granted_is_only_for_the_keys_it_was_granted_to),
        cmocka_unit_test(keys_that_are_allowed_and_keys_of_grants_may_all_connect),
        cmocka_unit_test(join_is_for_the_peer_of_the_session),
        cmocka_unit_test(a_second_join_waits_until_what_is_written_by_the_first_is_over),
        cmocka_unit_test(what_hangs_from_before_is_over_when_a_client_joins_anew),
        cmocka_unit_test(acquire_and_release_are_for_the_peer_of_the_session),
        cmocka_unit_test(a_lease_of_another_session_is_none),
        cmocka_unit_test(numbers_of_leases_cannot_be_guessed),
        cmocka_unit_test(beats_are_for_the_peer_of_the_session),
        cmocka_unit_test(expect_and_withdraw_are_for_the_peer_of_the_session),
        cmocka_unit_test(checksums_are_for_the_peer_of_the_session),
        cmocka_unit_test(calls_of_a_producer_are_refused_from_a_consumer),
        cmocka_unit_test(a_jump_of_numbers_forces_a_new_greeting),
        cmocka_unit_test(what_ends_an_earlier_call_cannot_use_up_numbers),
        cmocka_unit_test(answers_and_calls_of_a_producer_count_over_the_connection_to_it),
        cmocka_unit_test(nobody_else_answers_while_an_engine_is_being_met),
        cmocka_unit_test(nobody_else_answers_while_a_session_is_being_opened),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
