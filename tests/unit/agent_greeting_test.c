/*
 * Which peers may greet, and under which names: the rows HELLO, WELCOME and REFUSED of the table in docs/protocol.md,
 * and the keys that may speak for a name.
 */
#include <stdio.h>

#include "agent/claim.h"
#include "agent/hear.h"
#include "agent_rights.h"

/* ---- greeting -------------------------------------------------------------------------------- */

static void a_greeting_repeated_brings_the_same_session(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    uint8_t id[KVF_WIRE_SESSION_BYTES];
    memcpy(id, s.rightful.session, sizeof id);
    speaker_greet(&s.w, &s.rightful);
    assert_memory_equal(id, s.rightful.session, sizeof id);
    assert_int_equal(world_stats(s.p).peers_now, 1);
    rights_close(&s);
}

static void an_introduction_opens_no_session(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    speaker *who[] = {&s.other, &s.stranger};
    for (int i = 0; i < 2; i++) {
        who[i]->engine = "X";
        who[i]->incarnation =
            s.rightful.incarnation; /* introductions tell the incarnation, but not the secret */
        speaker_greet(&s.w, who[i]);
        assert_int_equal(who[i]->kind, KVF_MESSAGE_REFUSED);
        assert_int_equal(who[i]->status, KVF_E_PERMISSION);
        assert_non_null(strstr(who[i]->detail, "secret"));
        assert_int_equal(who[i]->card_bytes, 0);
    }
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 1); /* reported once */
    rights_close(&s);
}

static void a_secret_that_was_heard_does_not_help_another_key(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    speaker *who[] = {&s.other, &s.stranger};
    for (int i = 0; i < 2; i++) {
        who[i]->engine = "X";
        who[i]->incarnation = s.rightful.incarnation;
        memcpy(who[i]->secret, s.rightful.secret, sizeof s.rightful.secret);
        speaker_greet(&s.w, who[i]);
        assert_int_equal(who[i]->status, KVF_E_PERMISSION);
        assert_non_null(strstr(who[i]->detail, "under another key"));
    }
    rights_close(&s);
}

static bool greets_until(rights *s, speaker *who, kvf_message_kind kind, kvf_status status) {
    for (int i = 0; i < 8; i++) {
        speaker_greet(&s->w, who);
        if (who->kind == kind && who->status == status)
            return true;
        speaker_run_for(&s->w, &s->rightful, 500 * MS);
    }
    return false;
}

/* Answers P's PROBE as the rightful peer. */
static void answer_probe(rights *s, kvf_status status) {
    assert_int_equal(s->rightful.kind, KVF_MESSAGE_CALL);
    assert_int_equal(s->rightful.call, KVF_CALL_PROBE);
    kvf_message answer = {.kind = KVF_MESSAGE_ANSWER,
                          .answer = {.number = rights_session(s)->probe->number,
                                     .kind = KVF_CALL_PROBE,
                                     .status = status,
                                     .detail = ""}};
    memcpy(answer.answer.session, s->rightful.session, sizeof answer.answer.session);
    speaker_send(&s->rightful, &answer);
}

static void a_name_is_the_living_process_that_has_it(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    s.other.engine = "X"; /* another process with the same name */
    speaker_greet(&s.w, &s.other);
    assert_int_equal(s.other.status, KVF_E_AGAIN);
    speaker_run_for(&s.w, &s.rightful, 10 * MS);
    answer_probe(&s, KVF_OK);
    speaker_run_for(&s.w, &s.rightful, 10 * MS);
    speaker_greet(&s.w, &s.other);
    assert_int_equal(s.other.status, KVF_E_PERMISSION);
    assert_non_null(strstr(s.other.detail, "and that process is alive"));
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 1);
    rights_close(&s);
}

/* An answer that says that something is wrong is one, too. */
static void a_process_that_answers_anything_lives(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    s.other.engine = "X";
    speaker_greet(&s.w, &s.other);
    assert_int_equal(s.other.status, KVF_E_AGAIN);
    speaker_run_for(&s.w, &s.rightful, 10 * MS);
    answer_probe(&s, KVF_E_TIMEOUT);
    speaker_run_for(&s.w, &s.rightful, 10 * MS);
    speaker_greet(&s.w, &s.other);
    assert_int_equal(s.other.status, KVF_E_AGAIN); /* it is asked again */
    rights_close(&s);
}

static void a_process_that_has_answered_is_not_asked_until_its_time_is_over(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_session *x = rights_session(&s);
    const kvf_hello hello = {.engine = "X"};
    x->silent = true;
    assert_ok(kvf_claim_look(s.p, &hello));
    x->silent = false;
    x->alive_until = world_now() + 1;
    assert_fails(kvf_claim_look(s.p, &hello), KVF_E_PERMISSION, "that process is alive");
    assert_null(x->probe);
    x->alive_until = world_now();
    assert_fails(kvf_claim_look(s.p, &hello), KVF_E_AGAIN, "is checking whether");
    assert_non_null(x->probe);
    rights_close(&s);
}

static void a_name_whose_process_says_nothing_goes_to_the_next(void **state) {
    (void)state;
    rights s;
    (void)rights_open_leased(&s);
    s.other.engine = "X";
    assert_true(greets_until(&s, &s.other, KVF_MESSAGE_WELCOME, KVF_OK));
    assert_int_equal(world_stats(s.p).peers_replaced, 1);
    assert_int_equal(world_stats(s.p).leases_now, 1); /* the former process may still be reading */
    assert_int_equal(rights_say(&s, &s.rightful, rights_acquire("b")), KVF_E_PEER_LOST);
    speaker_run_for(&s.w, &s.other, RIGHTS_LEASE);
    assert_int_equal(world_stats(s.p).leases_now, 0);
    rights_close(&s);
}

static void a_process_that_is_heard_again_after_a_silence_is_asked_again(void **state) {
    (void)state;
    for (int greets = 0; greets < 2; greets++) {
        rights s;
        rights_open(&s);
        const kvf_session *session = rights_session(&s);
        s.other.engine = "X";
        speaker_greet(&s.w, &s.other);
        assert_int_equal(s.other.status, KVF_E_AGAIN);
        speaker_run_for(&s.w, &s.other, 3 * SECOND); /* nobody answers P's PROBE */
        assert_true(session->silent);
        if (greets)
            speaker_greet(&s.w, &s.rightful);
        else
            assert_int_equal(rights_say(&s, &s.rightful, (kvf_call_body){.kind = KVF_CALL_BEAT}), KVF_OK);
        speaker_greet(&s.w, &s.other);
        assert_int_equal(s.other.status, KVF_E_AGAIN);
        assert_ptr_equal(rights_session(&s), session);
        rights_close(&s);
    }
}

static void a_name_whose_connection_has_ended_is_free_when_that_does_not_come_back(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    speaker_close(&s.rightful);
    s.other.engine = "X";
    speaker_greet(&s.w, &s.other);
    assert_int_equal(s.other.status, KVF_E_AGAIN);
    speaker_run_for(&s.w, &s.other, 3 * SECOND);
    speaker_greet(&s.w, &s.other);
    assert_int_equal(s.other.kind, KVF_MESSAGE_WELCOME);
    speaker_open(&s.rightful, s.p, "X", true, 1);
    rights_close(&s);
}

/* Connections of living processes break too, and an attacker that breaks them must gain nothing. */
static void a_name_whose_connection_comes_back_stays_with_its_process(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    speaker_close(&s.rightful);
    s.other.engine = "X";
    speaker_greet(&s.w, &s.other);
    assert_int_equal(s.other.status, KVF_E_AGAIN);
    speaker_reopen(&s.rightful, s.p);
    speaker_greet(&s.w, &s.rightful);
    assert_int_equal(s.rightful.kind, KVF_MESSAGE_WELCOME);
    speaker_run_for(&s.w, &s.rightful, 200 * MS); /* P asks it again */
    answer_probe(&s, KVF_OK);
    speaker_run_for(&s.w, &s.rightful, 10 * MS);
    speaker_greet(&s.w, &s.other);
    assert_int_equal(s.other.status, KVF_E_PERMISSION);
    rights_close(&s);
}

static void anybody_may_ask_for_ranks_and_changes_nothing_by_it(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    const kvf_session *known = rights_session(&s);
    const uint64_t kept = world_stats(s.p).memory_now_bytes;
    speaker *who[] = {&s.rightful, &s.other, &s.stranger};
    for (int i = 0; i < 3; i++) {
        /* in the name of the peer that has a session, without its secret */
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
    assert_ptr_equal(rights_session(&s), known);
    assert_int_equal(known->state, KVF_SESSION_OPEN);
    assert_int_equal(world_stats(s.p).peers_now, 1);
    assert_int_equal(world_stats(s.p).memory_now_bytes, kept);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 0);
    /* messages for the peer still go to the peer */
    memcpy(s.rightful.session, known->id, sizeof known->id);
    (void)rights_hold(&s, "a");
    assert_int_equal(rights_say(&s, &s.rightful, rights_acquire("a")), KVF_OK);
    rights_close(&s);
}

/* Asks P for its ranks from this one on, as a client that has these facts or others. */
static void ask_for_ranks(rights *s, uint32_t first_rank, bool of_other_facts) {
    kvf_message hello = {
        .kind = KVF_MESSAGE_HELLO,
        .hello = {
            .engine = "X", .incarnation = 1, .rank_count = 1, .wants_ranks = true, .first_rank = first_rank}};
    memcpy(hello.digest, s->rightful.digest, sizeof hello.digest);
    hello.digest[0] ^= of_other_facts;
    s->rightful.introductions = 0;
    speaker_send(&s->rightful, &hello);
    speaker_run_for(&s->w, &s->rightful, 10 * MS);
}

static void a_client_that_asks_for_more_ranks_than_there_are_is_told_all(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    for (uint32_t first = 0; first < 3; first++) {
        ask_for_ranks(&s, first, false);
        assert_int_equal(s.rightful.first_rank, 0);
        assert_int_equal(s.rightful.introductions, 1);
    }
    rights_close(&s);
}

static void only_a_client_with_other_facts_is_told_ours(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    ask_for_ranks(&s, 0, false);
    assert_int_equal(s.rightful.introductions, 1);
    assert_int_equal(s.rightful.facts_bytes, 0);
    ask_for_ranks(&s, 0, true);
    assert_int_equal(s.rightful.facts_bytes, strlen(s.p->facts));
    rights_close(&s);
}

static void a_greeting_that_cannot_be_read_is_counted_as_malformed(void **state) {
    (void)state;
    rights s;
    kvf_wire_buffer bytes;
    const kvf_message hello = {.kind = KVF_MESSAGE_HELLO,
                               .hello = {.engine = "X", .incarnation = 1, .rank = 85, .rank_count = 125}};
    rights_open(&s);
    assert_ok(kvf_wire_encode(&hello, &bytes));
    uint8_t *count = memchr(bytes.data, 125, bytes.size);
    assert_non_null(count);
    *count = 1; /* rank 85 of 1 */
    kvf_on_message(s.p, &(const kvf_letter){.data = bytes.data, .bytes = bytes.size});
    assert_int_equal(world_stats(s.p).messages_malformed, 1);
    kvf_wire_buffer_free(&bytes);
    rights_close(&s);
}

/* ---- keys for names --------------------------------------------------------------------------- */

static void a_name_that_is_granted_is_only_for_the_keys_it_was_granted_to(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
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
    /* with the key that the name was granted to, with one that may have any other name, with one for ranks of Y */
    const struct {
        const char *key, *secret, *engine;
        kvf_message_kind kind;
    } tries[] = {
        {s.rightful.public_key, s.rightful.secret_key, "X", KVF_MESSAGE_WELCOME},
        {s.rightful.public_key, s.rightful.secret_key, "V", KVF_MESSAGE_REFUSED},
        {s.other.public_key, s.other.secret_key, "X", KVF_MESSAGE_REFUSED},
        {s.other.public_key, s.other.secret_key, "V", KVF_MESSAGE_WELCOME},
        {s.other.public_key, s.other.secret_key, "Y", KVF_MESSAGE_REFUSED},
        {key, secret, "Y", KVF_MESSAGE_REFUSED}, /* it greets as rank 0 */
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
            assert_non_null(strstr(known.detail, "does not allow this key to speak"));
        speaker_close(&known);
    }
    rights_close(&s);
}

static kvf_message_kind greeted_as(rights *s, speaker *by, const char *engine) {
    by->engine = engine;
    speaker_greet(&s->w, by);
    return by->kind;
}

static void the_name_in_the_very_first_grant_is_for_its_key_too(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    const kvf_key_grant grants[] = {
        {.struct_size = sizeof *grants, .public_key = s.rightful.public_key, .engine = "X"},
        {.struct_size = sizeof *grants, .public_key = s.other.public_key}};
    rights_grant(&s, grants, 2);
    assert_int_equal(greeted_as(&s, &s.other, "X"), KVF_MESSAGE_REFUSED);
    assert_int_equal(greeted_as(&s, &s.rightful, "X"), KVF_MESSAGE_WELCOME);
    rights_close(&s);
}

#define GRANT(...)                                                                                           \
    { .struct_size = sizeof(kvf_key_grant), __VA_ARGS__ }
enum { KEYS = 7 };

typedef struct key_ring {
    char open[KEYS][41];
    uint8_t bytes[KEYS][KVF_KEY_BYTES];
} key_ring;

static void make_key_ring(key_ring *ring) {
    char secret[41];
    for (int i = 0; i < KEYS; i++) {
        assert_ok(kvf_agent_make_keys(ring->open[i], secret));
        assert_ok(kvf_link_read_key("key", ring->open[i], ring->bytes[i]));
    }
}

static void a_key_speaks_for_exactly_what_it_is_granted(void **state) {
    (void)state;
    static key_ring k;
    make_key_ring(&k);
    const char *const allowed[] = {k.open[4], k.open[5]}; /* with a name of their own, or any other */
    const kvf_key_grant grants[] = {
        GRANT(.public_key = k.open[0], .engine = "X", .rank_begin = 2, .rank_end = 4),
        GRANT(.public_key = k.open[1], .engine = "X", .rank_begin = 5, .rank_end = 6),
        GRANT(.public_key = k.open[1], .engine = "Y"),
        GRANT(.public_key = k.open[2]),
        GRANT(.public_key = k.open[3], .commands = true),
        GRANT(.public_key = k.open[4], .engine = "W"),
        GRANT(.public_key = k.open[5], .engine = "Z")};
    kvf_agent agent = {.options = {.allowed_keys = allowed,
                                   .allowed_key_count = 2,
                                   .grants = grants,
                                   .grant_count = COUNT_OF(grants)}};
    enum { NO_KEY = -1, UNKNOWN = 6 };
    static const struct {
        int key;
        const char *engine;
        uint32_t rank;
        bool may;
    } cases[] = {
        {0, "X", 1, false},     {0, "X", 2, true},       {0, "X", 3, true},       {0, "X", 4, false},
        {0, "Y", 2, false},     {0, "V", 2, false}, /* it has grants for X alone */
        {1, "X", 5, true},      {1, "X", 2, false},      {1, "Y", 0, true},       {1, "Y", 99, true},
        {2, "V", 0, true},      {2, "X", 2, false}, /* X is not for any key */
        {3, "V", 0, false},     {4, "V", 0, true},       {4, "Z", 0, false},      {5, "V", 0, true},
        {5, "Z", 0, true},      {5, "Y", 0, false},      {UNKNOWN, "V", 0, true}, {UNKNOWN, "Z", 0, false},
        {NO_KEY, "V", 0, true}, {NO_KEY, "X", 2, false},
    };
    assert_ok(kvf_grants_take(&agent));
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        kvf_hello hello = {.engine = cases[i].engine, .rank = cases[i].rank};
        hello.incarnation = kvf_wire_incarnation(hello.secret);
        const uint8_t *key = cases[i].key == NO_KEY ? NULL : k.bytes[cases[i].key];
        if (kvf_claim_check(&agent, key, &hello) != (cases[i].may ? KVF_OK : KVF_E_PERMISSION))
            fail_msg("key %d as rank %u of %s", cases[i].key, cases[i].rank, cases[i].engine);
    }
    for (int i = 0; i < KEYS; i++)
        assert_int_equal(kvf_claim_command(&agent, k.bytes[i]), i == 3 ? KVF_OK : KVF_E_PERMISSION);
    assert_fails(kvf_claim_command(&agent, NULL), KVF_E_PERMISSION, "takes no commands without keys");
    kvf_grants_free(&agent);
}

/* Each of these differs from the first in one thing. */
static void a_grant_is_kept_once_and_another_beside_it(void **state) {
    (void)state;
    static key_ring k;
    make_key_ring(&k);
    const kvf_key_grant grants[] = {
        GRANT(.public_key = k.open[0], .engine = "X", .rank_end = 4),
        GRANT(.public_key = k.open[1], .engine = "X", .rank_end = 4),
        GRANT(.public_key = k.open[0], .engine = "Y", .rank_end = 4),
        GRANT(.public_key = k.open[0], .engine = "X", .rank_begin = 1, .rank_end = 4),
        GRANT(.public_key = k.open[0], .engine = "X", .rank_end = 5),
        GRANT(.public_key = k.open[0], .engine = "X"),
        GRANT(.public_key = k.open[0]),
        GRANT(.public_key = k.open[0], .commands = true)};
    kvf_agent agent = {.options = {.grants = grants, .grant_count = COUNT_OF(grants)}};
    for (int i = 0; i < 2; i++) {
        assert_ok(kvf_grants_take(&agent));
        assert_int_equal(agent.grant_count, COUNT_OF(grants));
    }
    kvf_grants_free(&agent);
    assert_int_equal(agent.grant_count, 0);
}

/* The links of these tests have no list of keys. */
static void a_grant_that_the_link_does_not_take_changes_nothing(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    const kvf_key_grant grants[] = {GRANT(.public_key = s.rightful.public_key, .engine = "X"),
                                    GRANT(.public_key = s.other.public_key, .engine = "Y")};
    const kvf_key_grant more = GRANT(.public_key = s.other.public_key, .engine = "Z");
    rights_grant(&s, grants, 2);
    assert_fails(kvf_agent_grant_key(s.p, &more), KVF_E_UNSUPPORTED, "this link has no keys");
    assert_int_equal(s.p->grant_count, 2);
    assert_fails(kvf_agent_grant_key(s.p, &grants[1]), KVF_E_UNSUPPORTED, "this link has no keys");
    assert_int_equal(s.p->grant_count, 2);
    rights_close(&s);
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

/* ---- reporting -------------------------------------------------------------------------------- */

/* Greets with a secret that does not match the incarnation, and is refused. */
static void lie(rights *s, const char *engine) {
    uint64_t known = s->other.incarnation;
    s->other.incarnation++;
    assert_int_equal(greeted_as(s, &s->other, engine), KVF_MESSAGE_REFUSED);
    s->other.incarnation = known;
}

static void a_refusal_is_told_once_in_ten_minutes(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    for (int i = 0; i < 3; i++)
        lie(&s, "L");
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 1);
    world_run_for(&s.w, 590 * SECOND);
    speaker_close(&s.other); /* a connection that is silent for so long is closed */
    speaker_reopen(&s.other, s.p);
    lie(&s, "L");
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 1);
    lie(&s, "K");
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 2);
    world_run_for(&s.w, 20 * SECOND);
    speaker_close(&s.other);
    speaker_reopen(&s.other, s.p);
    lie(&s, "L");
    lie(&s, "K");
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 3);
    assert_int_equal(world_stats(s.p).peers_refused, 7);
    rights_close(&s);
}

static void sixty_four_refusals_are_told_at_most(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    char name[] = "L00";
    for (int i = 0; i < 70; i++) {
        name[1] = (char)('0' + i / 10);
        name[2] = (char)('0' + i % 10);
        lie(&s, name);
    }
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 64);
    assert_int_equal(world_stats(s.p).peers_refused, 70);
    rights_close(&s);
}

static uint64_t time_of_day(void *context) {
    return *(const uint64_t *)context;
}

static void a_refusal_is_told_again_when_ten_minutes_are_over(void **state) {
    (void)state;
    static uint64_t now = 1000000;
    static const uint64_t later[] = {0, 600 * SECOND - 1, 1, 600 * SECOND - 1, 1};
    static const uint32_t told[] = {1, 1, 2, 2, 3};
    rights s;
    rights_open(&s);
    const kvf_clock clock = s.p->clock;
    for (size_t i = 0; i < COUNT_OF(later); i++) {
        now += later[i];
        s.p->clock = (kvf_clock){.now = time_of_day, .context = &now};
        kvf_claim_tell(s.p, "X", 0, "does not know it");
        s.p->clock = clock;
        world_run_for(&s.w, MS);
        assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), told[i]);
    }
    rights_close(&s);
}

/* Of the longest name and a long reason, whose last letters differ. */
static void refusals_with_other_words_are_others(void **state) {
    (void)state;
    char name[KVF_WIRE_MAX_NAME + 1], reason[141];
    rights s;
    rights_open(&s);
    memset(name, 'n', sizeof name - 1);
    memset(reason, 'r', sizeof reason - 1);
    name[sizeof name - 1] = reason[sizeof reason - 1] = '\0';
    for (int i = 0; i < 6; i++) {
        reason[sizeof reason - 2] = (char)('a' + i % 3);
        kvf_claim_tell(s.p, name, UINT32_MAX - 1, reason);
    }
    world_run_for(&s.w, MS);
    assert_int_equal(world_count(&s.w, s.p, KVF_EVENT_PEER_REFUSED), 3);
    rights_close(&s);
}

/* ---- the log --------------------------------------------------------------------------------- */

typedef struct greetings {
    uint32_t news, details;
    char last[256]; /* of the news */
} greetings;

static void count_greetings(void *context, const kvf_log_line *line) {
    greetings *to = context;
    if (!strstr(line->text, "rank 0 of 1 has greeted P rank 0"))
        return;
    to->news += line->level == KVF_LOG_INFO;
    to->details += line->level == KVF_LOG_DEBUG;
    if (line->level == KVF_LOG_INFO)
        (void)snprintf(to->last, sizeof to->last, "%s", line->text);
}

static void greet_as_others(rights *s, uint32_t count) {
    static uint32_t number;
    for (uint32_t i = 0; i < count; i++) {
        char engine[16];
        (void)snprintf(engine, sizeof engine, "E%u", number++);
        s->rightful.engine = engine;
        speaker_greet(&s->w, &s->rightful);
        assert_int_equal(s->rightful.kind, KVF_MESSAGE_WELCOME);
    }
    speaker_run_for(&s->w, &s->rightful, MS); /* lines are written when the agent has ended its round */
}

/* One key may have as many names as it has sessions, time and again. */
static void sixty_four_engines_that_greet_are_news_in_a_minute(void **state) {
    (void)state;
    rights s;
    greetings log = {0};
    rights_open(&s);
    s.p->options.log = count_greetings;
    s.p->options.log_context = &log;
    s.p->options.log_level = KVF_LOG_DEBUG;
    greet_as_others(&s, 63); /* the rightful peer came before there was a log */
    assert_null(strstr(log.last, "details"));
    greet_as_others(&s, 5);
    assert_int_equal(log.news, 64);
    assert_int_equal(log.details, 4);
    assert_non_null(
        strstr(log.last, "P rank 0, as have 64 engines in a minute; others are logged as details"));
    speaker_run_for(&s.w, &s.rightful, 60 * SECOND);
    greet_as_others(&s, 1);
    assert_int_equal(log.news, 65);
    assert_null(strstr(log.last, "details"));
    rights_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_greeting_repeated_brings_the_same_session),
        cmocka_unit_test(an_introduction_opens_no_session),
        cmocka_unit_test(a_secret_that_was_heard_does_not_help_another_key),
        cmocka_unit_test(a_name_is_the_living_process_that_has_it),
        cmocka_unit_test(a_process_that_answers_anything_lives),
        cmocka_unit_test(a_process_that_has_answered_is_not_asked_until_its_time_is_over),
        cmocka_unit_test(a_name_whose_process_says_nothing_goes_to_the_next),
        cmocka_unit_test(a_process_that_is_heard_again_after_a_silence_is_asked_again),
        cmocka_unit_test(a_name_whose_connection_has_ended_is_free_when_that_does_not_come_back),
        cmocka_unit_test(a_name_whose_connection_comes_back_stays_with_its_process),
        cmocka_unit_test(anybody_may_ask_for_ranks_and_changes_nothing_by_it),
        cmocka_unit_test(a_client_that_asks_for_more_ranks_than_there_are_is_told_all),
        cmocka_unit_test(only_a_client_with_other_facts_is_told_ours),
        cmocka_unit_test(a_greeting_that_cannot_be_read_is_counted_as_malformed),
        cmocka_unit_test(a_name_that_is_granted_is_only_for_the_keys_it_was_granted_to),
        cmocka_unit_test(the_name_in_the_very_first_grant_is_for_its_key_too),
        cmocka_unit_test(a_key_speaks_for_exactly_what_it_is_granted),
        cmocka_unit_test(a_grant_is_kept_once_and_another_beside_it),
        cmocka_unit_test(a_grant_that_the_link_does_not_take_changes_nothing),
        cmocka_unit_test(a_refusal_is_told_once_in_ten_minutes),
        cmocka_unit_test(a_refusal_is_told_again_when_ten_minutes_are_over),
        cmocka_unit_test(refusals_with_other_words_are_others),
        cmocka_unit_test(sixty_four_refusals_are_told_at_most),
        cmocka_unit_test(keys_that_are_allowed_and_keys_of_grants_may_all_connect),
        cmocka_unit_test(sixty_four_engines_that_greet_are_news_in_a_minute),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
