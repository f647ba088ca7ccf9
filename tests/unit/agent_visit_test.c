/* Visits: what a visitor that is not an engine learns about one, and what it leaves behind there. */
#include <stdio.h>

#include "agent/visit.h"
#include "agent_world.h"
#include "wire/wire.h"

#define OPTIONS(...)                                                                                         \
    (&(const kvf_agent_options){.struct_size = sizeof(kvf_agent_options), .own_thread = true, __VA_ARGS__})
#define VISIT(...) (&(const kvf_visit_options){.struct_size = sizeof(kvf_visit_options), __VA_ARGS__})

static void open_pair(world *w, kvf_model *model, const kvf_agent_options *options) {
    world_open_model(w, model,
                     ENGINE(.name = "P", .tp_size = 2, .all = {.block_count = 8, .order = "L|BPNH"}),
                     ENGINE(.name = "D", .all = {.tokens_per_block = 24, .block_count = 8}), options);
}

/* How long a visit may take on a busy machine. */
#define PATIENCE_NS (WORLD_PATIENCE_S * SECOND)

static kvf_visited *visit(const kvf_contact *contact) {
    kvf_visited *found = NULL;
    assert_ok(kvf_visit(contact, VISIT(.timeout_ns = PATIENCE_NS), &found));
    return found;
}

/* A visit that cannot succeed ends when its time is over, and says what it has learnt. How long it takes to learn that
 * depends on the machine, so the test tries longer and longer times. */
static void visit_fails_late(const kvf_contact *contact, const char *why) {
    kvf_visited *found = NULL;
    for (uint64_t time = 100 * MS; time <= PATIENCE_NS; time *= 2) {
        assert_int_equal(kvf_visit(contact, VISIT(.timeout_ns = time), &found), KVF_E_TIMEOUT);
        assert_null(found);
        assert_non_null(strstr(kvf_error_detail(), contact->endpoint));
        if (strstr(kvf_error_detail(), why))
            return;
    }
    fail_msg("\"%s\" is not in \"%s\"", why, kvf_error_detail());
}

/* ---- what is learnt -------------------------------------------------------------------------- */

static void a_visit_learns_the_model_and_every_placement(void **state) {
    (void)state;
    world w;
    open_pair(&w, hybrid(4), OPTIONS(.facts = "weights: v1"));
    const kvf_contact anyone = {.endpoint = w.p.contact.endpoint};
    kvf_visited *found = visit(&anyone);
    const kvf_engine *engine = kvf_visited_engine(found);
    assert_string_equal(kvf_engine_name(engine), "P");
    assert_int_equal(kvf_engine_rank_count(engine), 2);
    assert_ok(kvf_model_compare(kvf_engine_model(engine), w.model));
    assert_non_null(strstr(kvf_visited_facts(found), "\nweights: v1\n"));
    for (uint32_t r = 0; r < 2; r++) {
        assert_string_equal(kvf_visited_endpoint(found, r), kvf_agent_endpoint(w.p.agents[r]));
        assert_string_equal(kvf_visited_public_key(found, r), "");
        const kvf_shard *own = kvf_engine_shard(w.p.engine, r), *seen = kvf_engine_shard(engine, r);
        for (uint32_t g = 0; g < 2; g++)
            for (uint32_t l = 0; l < 2; l++)
                for (uint32_t p = 0; p < kvf_model_group(w.model, g)->part_count; p++)
                    assert_placement(seen, g, l, p, *kvf_shard_placement(own, g, l, p));
    }
    assert_null(kvf_visited_endpoint(found, 2));
    assert_null(kvf_visited_public_key(found, 2));
    kvf_visited_free(found);
    world_close(&w);
}

static void a_visit_may_wait_for_ever(void **state) {
    (void)state;
    world w;
    kvf_visited *found = NULL;
    open_pair(&w, attention(3, 4, 4), OPTIONS());
    assert_ok(kvf_visit(&w.p.contact, VISIT(.timeout_ns = UINT64_MAX), &found));
    kvf_visited_free(found);
    world_close(&w);
}

static void two_visits_give_the_plan_of_the_pair(void **state) {
    (void)state;
    world w;
    open_pair(&w, attention(3, 4, 4), OPTIONS());
    kvf_visited *p = visit(&w.p.contact), *d = visit(&w.d.contact);
    kvf_plan *seen = NULL, *own = NULL;
    assert_ok(kvf_plan_build(kvf_engine_shard(kvf_visited_engine(d), 0), kvf_visited_engine(p), NULL, &seen));
    assert_ok(kvf_plan_build(kvf_engine_shard(w.d.engine, 0), w.p.engine, NULL, &own));
    assert_ok(kvf_plan_verify(seen));
    for (uint32_t s = 0; s < 2; s++) {
        kvf_prediction a = {.struct_size = sizeof a}, b = a;
        assert_ok(kvf_plan_predict(seen, s, 100, NULL, &a));
        assert_ok(kvf_plan_predict(own, s, 100, NULL, &b));
        assert_int_equal(a.bytes, b.bytes);
        assert_int_equal(a.runs, b.runs);
    }
    kvf_plan_free(own);
    kvf_plan_free(seen);
    kvf_visited_free(d);
    kvf_visited_free(p);
    world_close(&w);
}

static void a_visit_says_which_protocol_and_how_far(void **state) {
    (void)state;
    world w;
    open_pair(&w, attention(3, 4, 4), OPTIONS());
    kvf_visited *found = NULL;
    uint32_t count = 99;
    uint64_t begun = kvf_now(&kvf_monotonic);
    assert_ok(kvf_visit(&w.p.contact, VISIT(.greetings = 7, .timeout_ns = PATIENCE_NS), &found));
    uint64_t took = kvf_now(&kvf_monotonic) - begun, sum = 0;
    const uint64_t *trips = kvf_visited_round_trips(found, &count);
    assert_true(count >= 1 &&
                count <= 7); /* fewer if an answer came so late that the greeting was repeated */
    for (uint32_t i = 0; i < count; i++) {
        assert_true(trips[i] > 0);
        sum += trips[i];
    }
    assert_true(sum <= took);
    assert_int_equal(kvf_visited_protocol(found), KVF_WIRE_VERSION);
    kvf_visited_free(found);

    found = visit(&w.p.contact);
    (void)kvf_visited_round_trips(found, &count);
    assert_int_equal(count, 0);
    kvf_visited_free(found);
    assert_ok(kvf_visit(&w.p.contact, VISIT(.greetings = 1, .timeout_ns = PATIENCE_NS), &found));
    (void)kvf_visited_round_trips(found, &count);
    assert_true(count <= 1);
    kvf_visited_free(found);
    assert_ok(kvf_visit(&w.p.contact, VISIT(.greetings = 1000, .timeout_ns = PATIENCE_NS), &found));
    kvf_visited_free(found);
    assert_int_equal(kvf_visit(&w.p.contact, VISIT(.greetings = 1001), &found), KVF_E_RANGE);
    world_close(&w);
}

static uint32_t greetings; /* that were sent */
static uint32_t last_asked_from;

static kvf_status note_greeting(kvf_link *link, kvf_route route, const void *data, size_t bytes) {
    kvf_message message = {0};
    assert_ok(kvf_wire_open((kvf_bytes){data, bytes}, &message));
    assert_ok(kvf_wire_read(&message));
    last_asked_from = message.hello.first_rank;
    assert_int_equal(message.hello.rank_count, 1); /* a visitor is alone */
    kvf_message_free(&message);
    return kvf_link_zmq.send(link, route, data, bytes);
}

/* On a busy machine an answer may take more than five seconds, and is not measured then: the test tries again. */
static void every_answer_is_measured_and_tells_of_one_rank(void **state) {
    (void)state;
    world w;
    kvf_link_table noting = kvf_link_zmq;
    uint32_t count = 0;
    noting.send = note_greeting;
    open_pair(&w, attention(3, 4, 4), OPTIONS());
    for (uint32_t tries = 0; count < 7 && tries < 10; tries++) {
        kvf_visited *found = NULL;
        const kvf_visit_options *options = VISIT(.greetings = 7, .timeout_ns = PATIENCE_NS);
        assert_ok(kvf_visit_over(&noting, &w.p.contact, options, &found));
        assert_int_equal(last_asked_from, 1); /* the last of two ranks */
        (void)kvf_visited_round_trips(found, &count);
        kvf_visited_free(found);
    }
    assert_int_equal(count, 7);
    world_close(&w);
}

static kvf_status lose_first_greeting(kvf_link *link, kvf_route route, const void *data, size_t bytes) {
    return ++greetings == 1 ? KVF_OK : kvf_link_zmq.send(link, route, data, bytes);
}

/* The first greeting may still be answered, so the answer to the last one may be to another. */
static void an_answer_that_may_be_to_another_greeting_is_not_measured(void **state) {
    (void)state;
    world w;
    kvf_link_table losing = kvf_link_zmq;
    kvf_visited *found = NULL;
    uint32_t count = 99;
    losing.send = lose_first_greeting;
    greetings = 0;
    open_pair(&w, attention(3, 4, 4), OPTIONS());
    assert_ok(
        kvf_visit_over(&losing, &w.p.contact, VISIT(.greetings = 1, .timeout_ns = PATIENCE_NS), &found));
    (void)kvf_visited_round_trips(found, &count);
    assert_int_equal(count, 0);
    kvf_visited_free(found);
    world_close(&w);
}

#define SLOW_NS (1200 * MS)

/* Answers on their way to the visitor, each for SLOW_NS. */
static struct {
    kvf_link_options visitor;
    struct {
        uint64_t due;
        uint8_t bytes[8192];
        kvf_letter letter;
    } letters[64];
    size_t begin, end;
} far;

static void take_slowly(void *context, const kvf_letter *letter) {
    (void)context;
    assert_true(far.end < COUNT_OF(far.letters) && letter->bytes <= sizeof far.letters[0].bytes);
    memcpy(far.letters[far.end].bytes, letter->data, letter->bytes);
    far.letters[far.end].letter = *letter;
    far.letters[far.end].letter.data = far.letters[far.end].bytes;
    far.letters[far.end].letter.work = NULL;
    far.letters[far.end++].due = kvf_now(&kvf_monotonic) + SLOW_NS;
}

static kvf_status open_far(const kvf_link_options *options, kvf_link **out) {
    kvf_link_options slow = *options;
    far.visitor = *options;
    far.begin = far.end = 0;
    slow.on_message = take_slowly;
    return kvf_link_zmq.open(&slow, out);
}

static void bring_slowly(kvf_link *link, bool *more) {
    kvf_link_zmq.progress(link, more);
    while (far.begin < far.end && kvf_now(&kvf_monotonic) >= far.letters[far.begin].due)
        far.visitor.on_message(far.visitor.context, &far.letters[far.begin++].letter);
}

static uint64_t next_letter(const kvf_link *link) {
    const uint64_t due = far.begin < far.end ? far.letters[far.begin].due : UINT64_MAX;
    return kvf_min_u64(due, kvf_link_zmq.due(link));
}

static void round_trips_of_more_than_a_second_are_measured_whole(void **state) {
    (void)state;
    world w;
    kvf_link_table slow = kvf_link_zmq;
    kvf_visited *found = NULL;
    uint32_t count = 0;
    slow.open = open_far;
    slow.progress = bring_slowly;
    slow.due = next_letter;
    open_pair(&w, latent(2), OPTIONS());
    assert_ok(kvf_visit_over(&slow, &w.p.contact, VISIT(.greetings = 2, .timeout_ns = PATIENCE_NS), &found));
    const uint64_t *trips = kvf_visited_round_trips(found, &count);
    assert_int_equal(count, 2);
    for (uint32_t i = 0; i < count; i++)
        assert_true(trips[i] >= SLOW_NS);
    kvf_visited_free(found);
    world_close(&w);
}

static void a_directory_is_visited_as_a_rank_is(void **state) {
    (void)state;
    world w;
    open_pair(&w, latent(2), OPTIONS());
    w.e.rank_count = 1;
    assert_ok(kvf_agent_open(NULL, 0, OPTIONS(), &w.e.agents[0]));
    const kvf_contact contact = {.engine = "P", .endpoint = kvf_agent_endpoint(w.e.agents[0])};
    visit_fails_late(&contact, "is a directory that knows no engine yet");
    world_introduce(&w.p, w.e.agents[0]);
    kvf_visited *found = visit(&contact);
    assert_string_equal(kvf_visited_endpoint(found, 1), kvf_agent_endpoint(w.p.agents[1]));
    kvf_visited_free(found);
    world_close(&w);
}

/* The introductions of 4,096 ranks take some 2 MB; a message has at most 1 MiB. */
static void an_engine_of_4096_ranks_is_met_in_parts(void **state) {
    (void)state;
    enum { RANKS = 4096 };
    kvf_model *model = latent(2);
    kvf_engine *engine = engine_of(model, ENGINE(.name = "P", .tp_size = RANKS, .all = {.block_count = 8}));
    kvf_agent *directory = NULL;
    assert_ok(kvf_agent_open(NULL, 0, OPTIONS(), &directory));
    char *facts = NULL, endpoint[64];
    assert_ok(kvf_wire_facts(model, NULL, NULL, &facts));
    for (uint32_t r = 0; r < RANKS; r++) {
        kvf_wire_buffer shard = {0}, bytes = {0};
        assert_ok(kvf_wire_encode_shard(kvf_engine_shard(engine, r), NULL, &shard));
        (void)snprintf(endpoint, sizeof endpoint, "tcp://10.0.%u.%u:5555", r / 256, r % 256);
        kvf_introduction introduction = {.engine = "P",
                                         .incarnation = r,
                                         .rank = r,
                                         .rank_count = RANKS,
                                         .endpoint = endpoint,
                                         .shard = {shard.data, shard.size},
                                         .facts = facts};
        kvf_wire_digest(facts, introduction.digest);
        assert_ok(kvf_wire_encode_introduction(&introduction, &bytes));
        assert_ok(kvf_agent_introduce(directory, bytes.data, bytes.size));
        kvf_wire_buffer_free(&shard);
        kvf_wire_buffer_free(&bytes);
    }
    const kvf_contact contact = {.engine = "P", .endpoint = kvf_agent_endpoint(directory)};
    kvf_visited *found = visit(&contact);
    assert_int_equal(kvf_engine_rank_count(kvf_visited_engine(found)), RANKS);
    for (uint32_t r = 0; r < RANKS; r += 7) {
        (void)snprintf(endpoint, sizeof endpoint, "tcp://10.0.%u.%u:5555", r / 256, r % 256);
        assert_string_equal(kvf_visited_endpoint(found, r), endpoint);
    }
    kvf_agent_stats stats = world_stats(directory);
    assert_in_range(stats.messages_sent, 3, RANKS / 16); /* parts, some of them repeated */
    kvf_visited_free(found);
    kvf_agent_close(directory);
    kvf_free(facts);
    kvf_engine_free(engine);
    kvf_model_free(model);
}

/* A directory hands out introductions as it was given them. */
static void a_shard_of_another_rank_is_refused(void **state) {
    (void)state;
    world w;
    open_pair(&w, latent(2), OPTIONS());
    w.e.rank_count = 1;
    assert_ok(kvf_agent_open(NULL, 0, OPTIONS(), &w.e.agents[0]));
    kvf_introduction intro[2];
    void *storage[2];
    for (uint32_t r = 0; r < 2; r++) {
        const void *bytes;
        size_t size;
        assert_ok(kvf_agent_introduction(w.p.agents[r], &bytes, &size));
        assert_ok(kvf_wire_decode_introduction((kvf_bytes){bytes, size}, &intro[r], &storage[r]));
    }
    intro[1].shard = intro[0].shard;
    for (uint32_t r = 0; r < 2; r++) {
        kvf_wire_buffer bytes = {0};
        assert_ok(kvf_wire_encode_introduction(&intro[r], &bytes));
        assert_ok(kvf_agent_introduce(w.e.agents[0], bytes.data, bytes.size));
        kvf_wire_buffer_free(&bytes);
        kvf_free(storage[r]);
    }
    const kvf_contact contact = {.endpoint = kvf_agent_endpoint(w.e.agents[0])};
    kvf_visited *found = NULL;
    assert_fails(kvf_visit(&contact, NULL, &found), KVF_E_MISMATCH,
                 "the shard of rank 1 says it is of rank 0");
    assert_null(found);
    world_close(&w);
}

/* ---- what a visit leaves --------------------------------------------------------------------- */

static void visit_over(const kvf_link_table *link) {
    world w;
    open_pair(&w, latent(2), OPTIONS());
    kvf_visited *found = NULL;
    assert_ok(kvf_visit_over(link, &w.p.contact, NULL, &found));
    kvf_visited_free(found);
    kvf_agent_stats stats = world_stats(w.p.agents[0]);
    assert_int_equal(stats.peers_now, 0);
    assert_int_equal(stats.memory_now_bytes, 0);
    assert_int_equal(stats.messages_malformed, 0);
    assert_int_equal(stats.peers_refused, 0);
    world_close(&w);
}

static void a_visit_leaves_no_session(void **state) {
    (void)state;
    visit_over(NULL);
}

static kvf_status say_twice(kvf_link *link, kvf_route route, const void *data, size_t bytes) {
    (void)kvf_link_zmq.send(link, route, data, bytes);
    return kvf_link_zmq.send(link, route, data, bytes);
}

/* It greets twice if an answer takes longer than its first pause. */
static void a_visitor_that_greets_twice_leaves_no_session_either(void **state) {
    (void)state;
    kvf_link_table twice = kvf_link_zmq;
    twice.send = say_twice;
    visit_over(&twice);
}

/* ---- failures -------------------------------------------------------------------------------- */

static void visits_that_cannot_succeed_say_why(void **state) {
    (void)state;
    world w;
    open_pair(&w, latent(2), OPTIONS());
    kvf_visited *found = NULL;
    kvf_contact contact = {.engine = "Q", .endpoint = w.p.contact.endpoint};
    assert_fails(kvf_visit(&contact, NULL, &found), KVF_E_MISMATCH, "engine P answers there, not Q");
    contact.endpoint = "tcp://127.0.0.1:1";
    assert_fails(kvf_visit(&contact, VISIT(.timeout_ns = 100 * MS), &found), KVF_E_TIMEOUT, "127.0.0.1:1",
                 "no answer within 0.1 s");
    visit_fails_late(&contact, "nobody listens there");
    char nowhere[96]; /* an impossible host name: its label is too long */
    (void)snprintf(nowhere, sizeof nowhere, "tcp://%064d.test:5555", 0);
    contact.endpoint = nowhere;
    visit_fails_late(&contact, "the host name could not be looked up");
    contact.endpoint = "nonsense";
    assert_fails(kvf_visit(&contact, NULL, &found), KVF_E_INVALID, "nonsense");
    contact.reserved[1] = 1;
    assert_fails(kvf_visit(&contact, NULL, &found), KVF_E_INVALID, "reserved[1]");
    contact = (kvf_contact){0};
    assert_fails(kvf_visit(&contact, NULL, &found), KVF_E_INVALID, "endpoint");
    assert_fails(kvf_visit(NULL, NULL, &found), KVF_E_INVALID, "contact");
    assert_fails(kvf_visit(&w.p.contact, NULL, NULL), KVF_E_INVALID, "out is NULL");
    contact.endpoint = kvf_agent_endpoint(w.p.agents[1]);
    contact.engine = "P";
    visit_fails_late(&contact, "knows 1 of its engine's 2 ranks");
    assert_null(found);
    kvf_visited_free(NULL);
    world_close(&w);
}

static kvf_link_options of_visitor;

static void hear_in_next_version(void *context, const kvf_letter *letter) {
    unsigned char bytes[65536];
    kvf_letter changed = *letter;
    assert_true(letter->bytes <= sizeof bytes);
    memcpy(bytes, letter->data, letter->bytes);
    assert_int_equal(bytes[5], KVF_WIRE_VERSION);
    bytes[5]++;
    changed.data = bytes;
    of_visitor.on_message(context, &changed);
}

static kvf_status open_to_next_version(const kvf_link_options *options, kvf_link **out) {
    kvf_link_options changed = of_visitor = *options;
    changed.on_message = hear_in_next_version;
    return kvf_link_zmq.open(&changed, out);
}

static void an_engine_of_another_version_is_named_at_once(void **state) {
    (void)state;
    world w;
    char words[64];
    kvf_visited *found = NULL;
    kvf_link_table next = kvf_link_zmq;
    next.open = open_to_next_version;
    open_pair(&w, latent(2), OPTIONS());
    (void)snprintf(words, sizeof words, "the engine speaks version %u of the protocol", KVF_WIRE_VERSION + 1);
    assert_fails(kvf_visit_over(&next, &w.p.contact, VISIT(.timeout_ns = PATIENCE_NS), &found),
                 KVF_E_UNSUPPORTED, w.p.contact.endpoint, words);
    assert_null(found);
    world_close(&w);
}

static uint32_t rounds;

static void count_round(kvf_link *link, bool *more) {
    rounds++;
    kvf_link_zmq.progress(link, more);
}

static kvf_status count_greeting(kvf_link *link, kvf_route route, const void *data, size_t bytes) {
    greetings++;
    return kvf_link_zmq.send(link, route, data, bytes);
}

/* It greets at once, after 50 ms, after 100 ms more, and would again 200 ms later. On a busy machine it may be late:
 * the test tries again. */
static void a_visitor_whom_nobody_answers_sleeps_twice_as_long_each_time(void **state) {
    (void)state;
    const kvf_contact contact = {.endpoint = "tcp://127.0.0.1:1"};
    kvf_link_table counting = kvf_link_zmq;
    counting.progress = count_round;
    counting.send = count_greeting;
    for (uint32_t tries = 0; tries < 10 && greetings != 3; tries++) {
        kvf_visited *found = NULL;
        rounds = greetings = 0;
        assert_fails(kvf_visit_over(&counting, &contact, VISIT(.timeout_ns = 195 * MS), &found),
                     KVF_E_TIMEOUT, "127.0.0.1:1");
        assert_in_range(rounds, 1, 500);
    }
    assert_int_equal(greetings, 3);
}

static kvf_link_options opened;
static kvf_status broken_by;

static kvf_status open_to_break(const kvf_link_options *options, kvf_link **out) {
    opened = *options;
    return kvf_link_zmq.open(options, out);
}

static void break_at_once(kvf_link *link, bool *more) {
    kvf_link_zmq.progress(link, more);
    opened.on_broken(opened.context, 0, broken_by, "it is not to be");
}

static void
a_visitor_does_not_wait_for_an_engine_that_does_not_take_its_key_or_speaks_otherwise(void **state) {
    (void)state;
    static const kvf_status reasons[][2] = {
        {KVF_E_PERMISSION, KVF_E_PERMISSION}, {KVF_E_PARSE, KVF_E_PARSE}, {KVF_E_IO, KVF_E_TIMEOUT}};
    const kvf_contact contact = {.endpoint = "tcp://127.0.0.1:1"};
    kvf_link_table breaking = kvf_link_zmq;
    breaking.open = open_to_break;
    breaking.progress = break_at_once;
    for (size_t i = 0; i < COUNT_OF(reasons); i++) {
        kvf_visited *found = NULL;
        broken_by = reasons[i][0];
        assert_fails(kvf_visit_over(&breaking, &contact, VISIT(.timeout_ns = MS), &found), reasons[i][1],
                     "it is not to be");
        assert_null(found);
    }
}

static void a_visit_without_memory_fails(void **state) {
    (void)state;
    const kvf_contact contact = {.engine = "P", .endpoint = "tcp://127.0.0.1:1"};
    kvf_visited *found = NULL;
    memory_count memory;
    kvf_status status = KVF_E_NOMEM;
    count_memory(&memory);
    for (size_t n = 1; status == KVF_E_NOMEM; n++) {
        memory.calls = 0;
        memory.fail_at = n;
        status = kvf_visit(&contact, VISIT(.timeout_ns = 10 * MS), &found);
        assert_true(n > 2 || status == KVF_E_NOMEM);
        assert_null(found);
        assert_int_equal(memory.live, 0);
    }
    assert_int_equal(status, KVF_E_TIMEOUT);
    (void)kvf_set_allocator(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_visitor_whom_nobody_answers_sleeps_twice_as_long_each_time),
        cmocka_unit_test(
            a_visitor_does_not_wait_for_an_engine_that_does_not_take_its_key_or_speaks_otherwise),
        cmocka_unit_test(a_visit_without_memory_fails),
        cmocka_unit_test(a_visit_learns_the_model_and_every_placement),
        cmocka_unit_test(a_visit_may_wait_for_ever),
        cmocka_unit_test(two_visits_give_the_plan_of_the_pair),
        cmocka_unit_test(a_visit_says_which_protocol_and_how_far),
        cmocka_unit_test(every_answer_is_measured_and_tells_of_one_rank),
        cmocka_unit_test(an_answer_that_may_be_to_another_greeting_is_not_measured),
        cmocka_unit_test(round_trips_of_more_than_a_second_are_measured_whole),
        cmocka_unit_test(a_directory_is_visited_as_a_rank_is),
        cmocka_unit_test(a_shard_of_another_rank_is_refused),
        cmocka_unit_test(an_engine_of_4096_ranks_is_met_in_parts),
        cmocka_unit_test(a_visit_leaves_no_session),
        cmocka_unit_test(a_visitor_that_greets_twice_leaves_no_session_either),
        cmocka_unit_test(visits_that_cannot_succeed_say_why),
        cmocka_unit_test(an_engine_of_another_version_is_named_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
