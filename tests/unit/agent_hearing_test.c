/* A consumer listens only to the producer at the other end of the connection that it has made. */
#include "agent/hear.h"
#include "agent/push.h"
#include "agent_letters.h"
#include "agent_net.h"
#include "agent_rights.h"

/* ---- what a consumer hears --------------------------------------------------------------------- */

/* Opens P and D; `by` sends messages to D under P's name. */
static void open_hearing(rights *s, speaker *by, bool keyed) {
    rights_open(s);
    speaker_open(by, s->w.d.agents[0], "P", keyed, 9);
}

static const kvf_session *session_with_p(const rights *s) {
    const kvf_session *session;
    DL_FOREACH(s->w.d.agents[0]->all_sessions, session) {
        if (!session->incoming)
            return session;
    }
    return NULL;
}

/* D greets P, and has a session with it. */
static kvf_agent *meet(rights *s) {
    uint64_t ticket;
    kvf_agent *d = s->w.d.agents[0];
    assert_ok(kvf_agent_connect(d, &s->w.p.contact, 0, &ticket));
    (void)world_done(&s->w, d, ticket);
    return d;
}

static void answers_and_calls_of_a_producer_count_over_the_connection_to_it(void **state) {
    (void)state;
    for (int keyed = 0; keyed < 2; keyed++) {
        rights s;
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
        /* The other peer says that everything is written, and asks whether D lives. */
        kvf_call_body written = {
            .kind = KVF_CALL_WRITTEN, .number = 1, .request = {"a", 1}, .generation = ours | KVF_EXPECTATION};
        assert_true(speaker_call(&s.w, &by, session->id, written));
        assert_int_equal(by.status, KVF_E_PEER_LOST);
        assert_true(
            speaker_call(&s.w, &by, session->id, (kvf_call_body){.kind = KVF_CALL_PROBE, .number = 2}));
        assert_int_equal(by.status, KVF_E_PEER_LOST);
        /* It answers D's calls to P. */
        for (uint64_t n = 1; n < 20; n++) {
            kvf_message answer = {.kind = KVF_MESSAGE_ANSWER,
                                  .answer = {.number = n, .kind = KVF_CALL_BEAT, .status = KVF_E_PEER_LOST}};
            memcpy(answer.answer.session, session->id, sizeof answer.answer.session);
            speaker_send(&by, &answer);
        }
        /* It sends WELCOME and REFUSED. */
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
        /* The rightful producer is heard. */
        world_request_make(&s.w, &s.w.p, "a", 40, 20, 1, &pushed);
        world_fill(&s.w, &s.w.p, &pushed, 7);
        world_push(&s.w.p, &pushed, &theirs);
        world_ready(&s.w.p, &theirs);
        (void)world_done(&s.w, d, ours);
        (void)world_done(&s.w, s.p, theirs);
        assert_int_equal(world_wrong_cells(&s.w, &s.w.d, &wanted, 7), 0);
        speaker_close(&by);
        rights_close(&s);
    }
}

static const kvf_session *session_of(const kvf_agent *agent, const char *client) {
    const kvf_session *session;
    DL_FOREACH(agent->all_sessions, session) {
        if (session->incoming && strcmp(session->engine, client) == 0)
            return session;
    }
    return NULL;
}

/* Sends a message to D over the connection that D has made to P. */
static void send_to_caller(rights *s, const kvf_message *message) {
    kvf_wire_buffer bytes;
    assert_ok(kvf_wire_encode(message, &bytes));
    assert_ok(kvf_link_send(s->p->link, session_of(s->p, "D")->route, bytes.data, bytes.size));
    kvf_wire_buffer_free(&bytes);
    world_run_for(&s->w, 100 * MS);
}

/* Those who may be clients are on D's list, and connect to it: P, which D has called, need not be among them. */
static void who_was_called_is_no_client_over_that_connection(void **state) {
    (void)state;
    rights s;
    uint64_t ticket;
    rights_open(&s);
    kvf_agent *d = meet(&s);
    const uint8_t secret[KVF_WIRE_SECRET_BYTES] = {7};
    const kvf_message hello = speaker_hello("Q", secret, d->digest);
    send_to_caller(&s, &hello);
    assert_null(session_of(d, "Q"));
    assert_int_equal(world_stats(d).messages_foreign, 1);
    send_to_caller(&s, &(kvf_message){.kind = KVF_MESSAGE_COMMAND, .command = {.id = {1}, .verb = "drain"}});
    assert_int_equal(world_stats(d).messages_foreign, 2);
    assert_int_equal(world_stats(s.p).messages_stale, 0); /* it got no reply */
    /* As a client of D, P is heard over the connection that it makes. */
    assert_ok(kvf_agent_connect(s.p, &s.w.d.contact, 0, &ticket));
    (void)world_done(&s.w, s.p, ticket);
    const kvf_session *session = session_of(d, "P");
    assert_non_null(session);
    kvf_message beat = {.kind = KVF_MESSAGE_CALL, .call = {.kind = KVF_CALL_BEAT, .number = 100}};
    memcpy(beat.call.session, session->id, sizeof beat.call.session);
    const uint64_t heard = session->last_heard;
    send_to_caller(&s, &beat);
    assert_int_equal(world_stats(d).messages_foreign, 3);
    assert_true(session->last_heard == heard);
    rights_close(&s);
}

/* Sends what a contact would: that it is P, with P's introduction; and with a session, P's card. */
static void send_welcomes(const rights *s, speaker *by) {
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
        rights s;
        speaker by;
        uint64_t ticket;
        open_hearing(&s, &by, keyed);
        kvf_agent *d = s.w.d.agents[0];
        letters_begin();
        letters_rule(LETTERS_LOSE, s.p, KVF_MESSAGE_WELCOME, (kvf_call_kind)0);
        assert_ok(kvf_agent_connect(d, &s.w.p.contact, 20 * SECOND, &ticket));
        speaker_run_for(&s.w, &by, 200 * MS);
        assert_true(letters_met() > 0); /* D greets, and gets no answer */
        send_welcomes(&s, &by);
        speaker_run_for(&s.w, &by, 200 * MS);
        assert_null(session_with_p(&s));
        assert_int_equal(world_count(&s.w, d, KVF_EVENT_PEER_READY) + world_count(&s.w, d, KVF_EVENT_FAILED),
                         0);
        letters_end();
        (void)world_done(&s.w, d, ticket); /* the greeted peer answers */
        speaker_close(&by);
        rights_close(&s);
    }
}

static void nobody_else_answers_while_a_session_is_being_opened(void **state) {
    (void)state;
    for (int keyed = 0; keyed < 2; keyed++) {
        rights s;
        speaker by;
        uint64_t ticket;
        open_hearing(&s, &by, keyed);
        kvf_agent *d = s.w.d.agents[0];
        const kvf_memory memory = {.struct_size = sizeof memory,
                                   .address = s.w.p.memory[0][0],
                                   .bytes = kvf_shard_get(s.p->shard)->region_bytes[0]};
        assert_ok(kvf_agent_unregister_region(s.p, 0)); /* P introduces its ranks, but has no card for now */
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
        rights_close(&s);
    }
}

/* How often P repeats a call of its own when it hears from X. */
static uint64_t repeated_when_heard(rights *s) {
    const uint64_t before = world_stats(s->p).messages_repeated;
    kvf_message beat = {.kind = KVF_MESSAGE_CALL,
                        .call = {.kind = KVF_CALL_BEAT, .number = ++s->rightful.number}};
    memcpy(beat.call.session, s->rightful.session, sizeof beat.call.session);
    speaker_send(&s->rightful, &beat);
    speaker_run_for(&s->w, &s->rightful, 5 * MS);
    return world_stats(s->p).messages_repeated - before;
}

/* P has written to X, which does not answer WRITTEN. */
static void open_with_a_push(rights *s, kvf_wire_buffer *introduction) {
    rights_open(s);
    kvf_call_body join = speaker_join(&s->rightful, s->w.d.agents[0], 1, introduction);
    assert_int_equal(rights_say(s, &s->rightful, join), KVF_OK);
    const uint64_t push = rights_push(s, "a", 1);
    world_ready(&s->w.p, &push);
}

/* As after a broken link. An unanswered call is repeated after 100 ms, then after 200, 400, 800, 1600 and 2000. */
static void a_peer_that_is_heard_of_after_a_silence_is_asked_again_at_once(void **state) {
    (void)state;
    rights s;
    kvf_wire_buffer introduction = {0};
    open_with_a_push(&s, &introduction);
    speaker_run_for(&s.w, &s.rightful, 900 * MS);
    assert_true(world_stats(s.p).messages_repeated > 0);
    assert_int_equal(repeated_when_heard(&s), 0); /* X may just have been busy for so long */
    speaker_run_for(&s.w, &s.rightful, 3600 * MS);
    assert_int_equal(repeated_when_heard(&s), 1);
    kvf_wire_buffer_free(&introduction);
    rights_close(&s);
}

/* How often P repeats a call of its own when it hears from X so long after it has asked X something. */
static uint64_t repeated_after(rights *s, uint64_t silence_ns) {
    const uint64_t before = world_stats(s->p).messages_repeated;
    kvf_session *session = rights_session(s);
    kvf_message beat = {.kind = KVF_MESSAGE_CALL,
                        .call = {.kind = KVF_CALL_BEAT, .number = ++s->rightful.number}};
    kvf_wire_buffer bytes;
    memcpy(beat.call.session, session->id, sizeof beat.call.session);
    assert_ok(kvf_wire_encode(&beat, &bytes));
    session->asked_ns = world_now() - silence_ns;
    kvf_on_message(s->p, &(const kvf_letter){.route = session->route,
                                             .key = session->peer_key,
                                             .data = bytes.data,
                                             .bytes = bytes.size});
    kvf_wire_buffer_free(&bytes);
    speaker_run_for(&s->w, &s->rightful, MS);
    return world_stats(s->p).messages_repeated - before;
}

static void a_silence_is_two_seconds_without_an_answer(void **state) {
    (void)state;
    rights s;
    kvf_wire_buffer introduction = {0};
    open_with_a_push(&s, &introduction);
    speaker_run_for(&s.w, &s.rightful, 1600 * MS); /* P has asked again after 1500 ms, and will after 3100 */
    assert_int_equal(repeated_after(&s, 2 * SECOND - 1), 0);
    assert_int_equal(repeated_after(&s, 2 * SECOND), 1);
    kvf_wire_buffer_free(&introduction);
    rights_close(&s);
}

/* As after an outage: X has connected anew, and then P hears what the first connection had brought before it ended. */
static void a_peer_is_called_over_the_connection_that_it_still_has(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_wire_buffer introduction = {0};
    assert_int_equal(
        rights_say(&s, &s.rightful, speaker_join(&s.rightful, s.w.d.agents[0], 1, &introduction)), KVF_OK);
    const uint64_t push = rights_push(&s, "a", 1);
    speaker anew = s.rightful;
    speaker_reopen(&anew, s.p);
    assert_int_equal(rights_say(&s, &anew, (kvf_call_body){.kind = KVF_CALL_BEAT}), KVF_OK);
    assert_int_equal(rights_say(&s, &s.rightful, (kvf_call_body){.kind = KVF_CALL_BEAT}), KVF_OK);
    speaker_close(&s.rightful);
    world_ready(&s.w.p, &push);
    speaker_run_for(&s.w, &anew, 100 * MS);
    assert_int_equal(anew.kind, KVF_MESSAGE_CALL);
    assert_int_equal(anew.call, KVF_CALL_WRITTEN);
    s.rightful.link = anew.link;
    kvf_wire_buffer_free(&introduction);
    rights_close(&s);
}

/* A message comes to an agent over a connection that it made; route 0 is none of a session or a meeting. */
static void comes_by(kvf_agent *agent, kvf_route route, const kvf_message *message) {
    kvf_wire_buffer bytes;
    assert_ok(kvf_wire_encode(message, &bytes));
    kvf_on_message(
        agent, &(const kvf_letter){.route = route, .called = true, .data = bytes.data, .bytes = bytes.size});
    kvf_wire_buffer_free(&bytes);
}

/* How many messages D counts as stale when this one comes by such a connection. */
static uint64_t stale_by(kvf_agent *d, kvf_route route, const kvf_message *message) {
    const uint64_t before = world_stats(d).messages_stale;
    comes_by(d, route, message);
    return world_stats(d).messages_stale - before;
}

static void what_nobody_asked_for_is_counted_as_stale(void **state) {
    (void)state;
    rights s;
    const kvf_bytes introduction = {"i", 1};
    rights_open(&s);
    kvf_agent *d = s.w.d.agents[0];
    const kvf_message ranks = {.kind = KVF_MESSAGE_WELCOME,
                               .welcome = {.engine = "P",
                                           .incarnation = 5,
                                           .rank_count = 1,
                                           .introductions = &introduction,
                                           .introduction_count = 1}};
    kvf_message card = {.kind = KVF_MESSAGE_WELCOME,
                        .welcome = {.engine = "P", .incarnation = 5, .rank_count = 1, .card = {"c", 1}}};
    const kvf_message refused = {.kind = KVF_MESSAGE_REFUSED, .refused = {KVF_E_PERMISSION, "no"}};
    const kvf_message answer = {.kind = KVF_MESSAGE_ANSWER,
                                .answer = {.number = 1, .kind = KVF_CALL_BEAT, .detail = ""}};
    const kvf_message reply = {.kind = KVF_MESSAGE_REPLY, .reply = {.detail = ""}};
    assert_int_equal(stale_by(d, 0, &ranks), 1);
    assert_int_equal(stale_by(d, 0, &card), 1);
    assert_int_equal(stale_by(d, 0, &refused), 1);
    assert_int_equal(stale_by(d, 0, &answer), 1);
    assert_int_equal(stale_by(d, 0, &reply), 1);
    (void)meet(&s);
    const kvf_session *session = session_with_p(&s);
    assert_int_equal(stale_by(d, session->route, &ranks), 1); /* P is met already */
    assert_int_equal(stale_by(d, session->route, &refused), 1);
    card.welcome.card.size = 0;
    assert_int_equal(stale_by(d, session->route, &card), 1); /* neither introductions nor a card */
    assert_int_equal(session->state, KVF_SESSION_OPEN);
    rights_close(&s);
}

static void a_peer_that_answers_as_another_process_was_restarted(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_agent *d = meet(&s);
    kvf_message welcome = {.kind = KVF_MESSAGE_WELCOME,
                           .welcome = {.engine = "P",
                                       .incarnation = s.p->incarnation + 1,
                                       .rank_count = 1,
                                       .card = {s.p->card, s.p->card_bytes}}};
    memcpy(welcome.digest, s.p->digest, sizeof welcome.digest);
    send_to_caller(&s, &welcome);
    world_until(&s.w, world_count(&s.w, d, KVF_EVENT_PEER_LOST) == 1);
    assert_int_equal(world_stats(d).peers_replaced, 1);
    assert_int_equal(world_stats(d).peers_now, 0);
    rights_close(&s);
}

/* The connection has broken, and D has greeted once more to find out what is there by now. */
static void a_peer_that_comes_back_and_refuses_the_greeting_was_restarted(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_agent *d = meet(&s);
    const kvf_session *session = session_with_p(&s);
    kvf_message refused = {.kind = KVF_MESSAGE_REFUSED,
                           .refused = {.status = KVF_E_AGAIN, .detail = "has no memory registered yet"}};
    letters_begin();
    letters_rule(LETTERS_LOSE, d, KVF_MESSAGE_HELLO, (kvf_call_kind)0);
    kvf_on_broken(d, session->route, KVF_E_PEER_LOST, "the connection broke");
    assert_int_equal(stale_by(d, session->route, &refused), 0);
    assert_int_equal(session->state, KVF_SESSION_OPEN);
    assert_string_equal(session->broken_detail, "P has no memory registered yet");
    refused.refused.status = KVF_E_MISMATCH; /* another model */
    send_to_caller(&s, &refused);
    world_until(&s.w, world_count(&s.w, d, KVF_EVENT_PEER_LOST) == 1);
    assert_int_equal(world_stats(d).peers_replaced, 1);
    letters_end();
    rights_close(&s);
}

/* Only a greeting of another version is answered: with ours. */
static void messages_of_another_version_are_counted_as_malformed(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_agent *d = s.w.d.agents[0];
    const kvf_message messages[] = {
        {.kind = KVF_MESSAGE_WELCOME,
         .welcome = {.engine = "P", .incarnation = 5, .rank_count = 1, .card = {"c", 1}}},
        {.kind = KVF_MESSAGE_CALL, .call = {.kind = KVF_CALL_BEAT, .number = 1}},
        {.kind = KVF_MESSAGE_ANSWER, .answer = {.kind = KVF_CALL_BEAT, .number = 1, .detail = ""}},
        {.kind = KVF_MESSAGE_COMMAND, .command = {.id = {1}, .verb = "drain", .time_ns = SECOND}}};
    for (uint32_t i = 0; i < COUNT_OF(messages); i++) {
        kvf_wire_buffer bytes;
        assert_ok(kvf_wire_encode(&messages[i], &bytes));
        assert_int_equal(bytes.data[5], KVF_WIRE_VERSION);
        bytes.data[5]++;
        const bool called = messages[i].kind != KVF_MESSAGE_COMMAND;
        kvf_on_message(d, &(const kvf_letter){.called = called, .data = bytes.data, .bytes = bytes.size});
        kvf_wire_buffer_free(&bytes);
        assert_int_equal(world_stats(d).messages_malformed, i + 1);
    }
    rights_close(&s);
}

static void a_release_of_no_lease_is_counted_as_stale_once(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    const kvf_call_body release = {
        .kind = KVF_CALL_RELEASE, .request = {"a", 1}, .rank_count = 1, .generation = 77};
    const uint64_t before = world_stats(s.p).messages_stale;
    assert_int_equal(rights_say(&s, &s.rightful, release), KVF_OK);
    assert_int_equal(world_stats(s.p).messages_stale, before + 1);
    s.rightful.number--; /* the same call again */
    assert_int_equal(rights_say(&s, &s.rightful, release), KVF_OK);
    assert_int_equal(world_stats(s.p).messages_stale, before + 1);
    rights_close(&s);
}

static void a_peer_whose_connection_breaks_is_greeted_once_and_again_after_50_ms(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_agent *d = meet(&s);
    letters_begin();
    letters_rule(LETTERS_LOSE, d, KVF_MESSAGE_HELLO, (kvf_call_kind)0);
    kvf_on_broken(d, session_with_p(&s)->route, KVF_E_PEER_LOST, "the connection broke");
    world_run_for(&s.w, 49 * MS);
    assert_int_equal(letters_met(), 1);
    world_run_for(&s.w, 2 * MS);
    assert_int_equal(letters_met(), 2);
    letters_end();
    rights_close(&s);
}

/* P has forgotten the session. */
static void forget_session(kvf_agent *d, const kvf_session *session) {
    kvf_message answer = {.kind = KVF_MESSAGE_ANSWER,
                          .answer = {.number = 1, .kind = KVF_CALL_BEAT, .status = KVF_E_PEER_LOST}};
    memcpy(answer.answer.session, session->id, sizeof answer.answer.session);
    comes_by(d, session->route, &answer);
}

static void a_peer_that_was_greeted_anew_may_go_on_with_any_number(void **state) {
    (void)state;
    rights s;
    rights_open(&s);
    kvf_agent *d = meet(&s);
    const kvf_session *session = session_with_p(&s);
    kvf_message probe = {.kind = KVF_MESSAGE_CALL, .call = {.kind = KVF_CALL_PROBE, .number = 1}};
    memcpy(probe.call.session, session->id, sizeof probe.call.session);
    assert_int_equal(stale_by(d, session->route, &probe), 0);
    forget_session(d, session);
    world_until(&s.w, session->state == KVF_SESSION_OPEN);
    memcpy(probe.call.session, session->id, sizeof probe.call.session);
    probe.call.number += KVF_WINDOW_CALLS;
    assert_int_equal(stale_by(d, session->route, &probe), 0);
    probe.call.number += KVF_WINDOW_CALLS; /* P must forget the session first */
    assert_int_equal(stale_by(d, session->route, &probe), 1);
    assert_int_equal(session->state, KVF_SESSION_GREETING);
    rights_close(&s);
}

/* D greets after 0, 50, 150 and 350 ms, and does not know which HELLO is answered: P's clock is off by at most half of
 * the time since the first. The next greeting begins anew, also of a session that is still open, and its first HELLO is
 * lost. */
static void the_time_of_a_greeting_counts_from_its_first_hello(void **state) {
    (void)state;
    for (int forgets = 0; forgets < 2; forgets++) {
        rights s;
        uint64_t ticket;
        rights_open(&s);
        kvf_agent *d = s.w.d.agents[0];
        const kvf_memory memory = {.struct_size = sizeof memory,
                                   .address = s.w.p.memory[0][0],
                                   .bytes = kvf_shard_get(s.p->shard)->region_bytes[0]};
        assert_ok(kvf_agent_unregister_region(s.p, 0)); /* P has no card for now */
        assert_ok(kvf_agent_connect(d, &s.w.p.contact, 0, &ticket));
        world_run_for(&s.w, 200 * MS);
        assert_ok(kvf_agent_register_region(s.p, 0, &memory));
        (void)world_done(&s.w, d, ticket);
        const kvf_session *session = session_with_p(&s);
        assert_int_equal(session->clock_error, 175 * MS + NET_LATENCY_NS + 1);
        letters_begin();
        letters_rule(LETTERS_LOSE, d, KVF_MESSAGE_HELLO, (kvf_call_kind)0);
        if (forgets)
            forget_session(d, session);
        else
            kvf_on_broken(d, session->route, KVF_E_PEER_LOST, "the connection broke");
        world_run_for(&s.w, 10 * MS);
        letters_end();
        world_run_for(&s.w, 50 * MS);
        assert_int_equal(session->state, KVF_SESSION_OPEN);
        assert_int_equal(session->clock_error, 25 * MS + NET_LATENCY_NS + 1);
        rights_close(&s);
    }
}

/* D has said HELLO, and says it again at these moments, also if it has looked in between whether it is time. */
static void says_hello_at_growing_pauses(rights *s, uint64_t begun) {
    static const uint64_t at_ms[] = {50, 150, 350, 750, 1550, 2550, 3550};
    for (uint32_t i = 0; i < COUNT_OF(at_ms); i++) {
        world_run_for(&s->w, begun + at_ms[i] * MS - MS - world_now());
        assert_int_equal(letters_met(), i + 1);
        kvf_agent_due(s->w.d.agents[0], 0);
        kvf_sessions_due(s->w.d.agents[0]);
        world_run_for(&s->w, 2 * MS);
        assert_int_equal(letters_met(), i + 2);
    }
}

static void nobody_is_greeted_less_often_than_once_in_a_second(void **state) {
    (void)state;
    rights s;
    uint64_t ticket;
    rights_open(&s);
    kvf_agent *d = s.w.d.agents[0];
    letters_begin();
    letters_rule(LETTERS_LOSE, d, KVF_MESSAGE_HELLO, (kvf_call_kind)0);
    assert_ok(kvf_agent_connect(d, &s.w.p.contact, 0, &ticket)); /* asks the contact */
    says_hello_at_growing_pauses(&s, world_now());
    letters_end();
    (void)world_done(&s.w, d, ticket);
    letters_begin();
    letters_rule(LETTERS_LOSE, d, KVF_MESSAGE_HELLO, (kvf_call_kind)0);
    forget_session(d, session_with_p(&s)); /* asks the rank */
    says_hello_at_growing_pauses(&s, world_now());
    letters_end();
    rights_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_peer_that_is_heard_of_after_a_silence_is_asked_again_at_once),
        cmocka_unit_test(a_silence_is_two_seconds_without_an_answer),
        cmocka_unit_test(a_peer_is_called_over_the_connection_that_it_still_has),
        cmocka_unit_test(answers_and_calls_of_a_producer_count_over_the_connection_to_it),
        cmocka_unit_test(who_was_called_is_no_client_over_that_connection),
        cmocka_unit_test(nobody_else_answers_while_an_engine_is_being_met),
        cmocka_unit_test(nobody_else_answers_while_a_session_is_being_opened),
        cmocka_unit_test(what_nobody_asked_for_is_counted_as_stale),
        cmocka_unit_test(a_peer_that_answers_as_another_process_was_restarted),
        cmocka_unit_test(a_peer_that_comes_back_and_refuses_the_greeting_was_restarted),
        cmocka_unit_test(messages_of_another_version_are_counted_as_malformed),
        cmocka_unit_test(a_release_of_no_lease_is_counted_as_stale_once),
        cmocka_unit_test(a_peer_whose_connection_breaks_is_greeted_once_and_again_after_50_ms),
        cmocka_unit_test(a_peer_that_was_greeted_anew_may_go_on_with_any_number),
        cmocka_unit_test(the_time_of_a_greeting_counts_from_its_first_hello),
        cmocka_unit_test(nobody_is_greeted_less_often_than_once_in_a_second),
    };
    return cmocka_run_group_tests(tests, world_is_simulated, NULL);
}
