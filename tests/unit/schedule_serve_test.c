/* The schedule: requests that serve, requests that load and serve, and what is refused. */
#include <kvferry/schedule.h>

#include "schedule_shapes.h"

#include "schedule/keys.h"

/* ---- serving --------------------------------------------------------------------------------- */

static void a_finished_request_is_held_for_its_consumer(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = add_serving(&f, false);
    assert_int_equal(match(&f, 0, 0), 0);

    kvf_schedule_end end = finish(&f, 10);

    assert_true(end.keep);
    assert_non_null(end.params);
    assert_string_equal(end.params->engine, "here");
    assert_string_equal(end.params->endpoint, "tcp://here:1");
    assert_int_equal(end.params->tokens, 10);
    assert_int_equal(end.params->expiry_ns, 130 * S);
    assert_false(end.params->push);
    assert_bytes(end.params->id.data, end.params->id.size, "r~ab.1");
    const kvf_instruction *hold = TAKE(&f, KVF_INSTRUCT_HOLD);
    assert_group(hold, 0, 0, 10, IDS, 3);
    assert_bytes(hold->transfer_id.data, hold->transfer_id.size, "r~ab.1");
    assert_int_equal(hold->deadline_ns, 30 * S);
    assert_int_equal(hold->consumers, 1);
    assert_int_equal(counts(&f).serving, 1);

    kvf_schedule_news news = sent(&f, generation);
    assert_int_equal(news.freed_count, 1);
    assert_false(news.freed[0].of_load);
    assert_int_equal(counts(&f).requests, 0);
    assert_int_equal(sent(&f, generation).freed_count, 0);
    done(&f);
}

static void no_two_lives_of_an_id_are_held_under_one_name(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t first = add_serving(&f, false);
    finish(&f, 10);
    uint64_t second = add_serving(&f, false);
    kvf_schedule_end end = finish(&f, 10);
    assert_bytes(end.params->id.data, end.params->id.size, "r~ab.2");
    TAKE(&f, KVF_INSTRUCT_HOLD, KVF_INSTRUCT_HOLD);

    kvf_schedule_news news = sent(&f, second);
    assert_int_equal(news.freed[0].request.generation, second);
    news = sent(&f, first);
    assert_int_equal(news.freed[0].request.generation, first);
    done(&f);
}

static void of_windows_and_states_only_what_is_needed_is_held(void **state) {
    (void)state;
    fixture f = schedule_of(hybrid(2));
    const uint32_t states[] = {1, 2, 9};
    const kvf_block_table tables[] = {TABLE, {states, 3, 0}};
    kvf_schedule_end end = {.struct_size = sizeof end};
    add_serving(&f, false);

    assert_ok(kvf_schedule_finished(f.s, &R, tables, 2, 9, 0, &end));

    const kvf_instruction *hold = TAKE(&f, KVF_INSTRUCT_HOLD);
    assert_group(hold, 0, 0, 9, IDS, 3);
    assert_group(hold, 1, 0, 1, states + 2, 1);
    done(&f);
}

static void a_request_that_nobody_wants_or_that_computed_nothing_is_not_held(void **state) {
    (void)state;
    fixture f = simple();
    kvf_schedule_request r = request();
    assert_ok(kvf_schedule_add(f.s, &r, 0, NULL));
    assert_false(finish(&f, 10).keep);
    add_serving(&f, false);
    kvf_schedule_end end = finish(&f, 0);
    assert_false(end.keep || end.params);
    TAKE_NOTHING(&f);
    assert_int_equal(counts(&f).requests, 0);
    done(&f);
}

static void a_request_of_one_token_is_held(void **state) {
    (void)state;
    fixture f = simple();
    add_serving(&f, false);

    assert_true(finish(&f, 1).keep);

    assert_group(TAKE(&f, KVF_INSTRUCT_HOLD), 0, 0, 1, IDS, 3);
    done(&f);
}

static void a_finished_request_with_a_bad_table_goes_on_as_before(void **state) {
    (void)state;
    fixture f = simple();
    const kvf_block_table small = {IDS, 2, 0};
    kvf_schedule_end end = {.struct_size = sizeof end};
    add_serving(&f, false);

    assert_fails(kvf_schedule_finished(f.s, &R, &small, 1, 10, 0, &end), KVF_E_RANGE, "mla");

    assert_true(finish(&f, 10).keep);
    done(&f);
}

static void aborted_while_held_blocks_come_back_with_the_report(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = add_serving(&f, false);
    finish(&f, 10);
    TAKE(&f, KVF_INSTRUCT_HOLD);

    assert_false(aborted(&f));

    const kvf_instruction *cancel = TAKE(&f, KVF_INSTRUCT_CANCEL);
    assert_int_equal(cancel->cancels, KVF_INSTRUCT_HOLD);
    assert_int_equal(cancel->consumers, 0);
    assert_int_equal(counts(&f).stopping, 1);
    assert_int_equal(sent(&f, generation).freed_count, 1);
    assert_int_equal(counts(&f).stopping, 0);
    done(&f);
}

static void aborted_before_it_is_held_blocks_are_free_at_once(void **state) {
    (void)state;
    fixture f = simple();
    add_serving(&f, false);
    finish(&f, 10);

    assert_true(aborted(&f));

    TAKE_NOTHING(&f);
    assert_int_equal(counts(&f).requests, 0);
    done(&f);
}

static void aborted_before_it_has_finished_nothing_is_held(void **state) {
    (void)state;
    fixture f = simple();
    add_serving(&f, false);
    assert_true(aborted(&f));
    assert_fails(kvf_schedule_preempted(f.s, &R, NULL), KVF_E_NOT_FOUND, "r");
    TAKE_NOTHING(&f);
    done(&f);
}

/* ---- pushing --------------------------------------------------------------------------------- */

static void a_push_that_is_over_first_leaves_nothing_to_keep(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = add_serving(&f, true);
    assert_ok(kvf_schedule_push(f.s, &R, &TABLE, 1, 10));
    assert_fails(kvf_schedule_push(f.s, &R, &TABLE, 1, 10), KVF_E_INVALID, "already");
    const kvf_instruction *push = TAKE(&f, KVF_INSTRUCT_PUSH);
    assert_bytes(push->transfer_id.data, push->transfer_id.size, "r");
    assert_group(push, 0, 0, 10, IDS, 3);
    assert_int_equal(push->deadline_ns, 120 * S);

    assert_int_equal(sent(&f, generation).freed_count, 0); /* the request still runs on its blocks */
    kvf_schedule_end end = finish(&f, 10);

    assert_false(end.keep);
    assert_true(end.params && end.params->push);
    TAKE_NOTHING(&f);
    done(&f);
}

static void a_push_may_begin_without_blocks_which_its_chunks_bring(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = add_serving(&f, true);
    assert_fails(kvf_schedule_push(f.s, &R, NULL, 1, 10), KVF_E_INVALID, "tables");
    assert_fails(kvf_schedule_push(f.s, &R, NULL, 0, 0), KVF_E_RANGE, "tokens is 0");
    assert_ok(kvf_schedule_push(f.s, &R, NULL, 0, 10));
    const kvf_instruction *push = TAKE(&f, KVF_INSTRUCT_PUSH);
    assert_bytes(push->transfer_id.data, push->transfer_id.size, "r");
    assert_group(push, 0, 0, 10, IDS, 0);
    assert_fails(kvf_schedule_push(f.s, &R, NULL, 0, 10), KVF_E_INVALID, "already");

    assert_true(finish(&f, 10).keep);
    TAKE_NOTHING(&f);

    assert_int_equal(sent(&f, generation).freed_count, 1);
    done(&f);
}

static void a_push_under_way_keeps_the_blocks_of_a_finished_request(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = add_serving(&f, true);
    assert_ok(kvf_schedule_push(f.s, &R, &TABLE, 1, 10));
    TAKE(&f, KVF_INSTRUCT_PUSH);

    assert_true(finish(&f, 10).keep);
    TAKE_NOTHING(&f);

    assert_int_equal(sent(&f, generation).freed_count, 1);
    done(&f);
}

static void a_request_that_was_not_pushed_before_is_pushed_when_it_has_finished(void **state) {
    (void)state;
    fixture f = simple();
    kvf_schedule_request r = request();
    r.id = (kvf_request_id){"proxy-deadbeef", 14};
    r.serves = r.push = true;
    r.consumers = 2;
    assert_ok(kvf_schedule_add(f.s, &r, 0, NULL));
    kvf_request_key key = {r.id, 0};
    kvf_schedule_end end = {.struct_size = sizeof end};

    assert_ok(kvf_schedule_finished(f.s, &key, &TABLE, 1, 10, 0, &end));

    assert_true(end.keep);
    const kvf_instruction *push = TAKE(&f, KVF_INSTRUCT_PUSH);
    assert_bytes(push->transfer_id.data, push->transfer_id.size, "proxy"); /* the id that both engines know */
    assert_int_equal(push->consumers, 2);
    done(&f);
}

static void a_push_has_the_name_that_its_consumers_gave_as_it_is(void **state) {
    (void)state;
    fixture f = simple();
    kvf_schedule_request r = request();
    r.push_id = (kvf_request_id){"proxy-deadbeef", 14};
    r.serves = r.push = true;
    assert_ok(kvf_schedule_add(f.s, &r, 0, NULL));

    assert_true(finish(&f, 10).keep);

    const kvf_instruction *push = TAKE(&f, KVF_INSTRUCT_PUSH);
    assert_bytes(push->transfer_id.data, push->transfer_id.size, "proxy-deadbeef");
    done(&f);
}

static void names_of_transfers_have_up_to_1024_bytes(void **state) {
    (void)state;
    fixture f = simple();
    static const char longest[1024];
    kvf_schedule_request r = request();
    kvf_transfer_params source = there();
    r.source = &source;
    r.serves = r.push = true;
    source.id = r.push_id = (kvf_request_id){longest, sizeof longest};

    assert_ok(kvf_schedule_add(f.s, &r, 0, NULL));

    assert_int_equal(TAKE(&f, KVF_INSTRUCT_RESERVE)->transfer_id.size, sizeof longest);
    assert_int_equal(finish(&f, 10).params->id.size, sizeof longest);
    done(&f);
}

static void preempted_while_pushing_the_blocks_are_kept_and_it_is_pushed_no_more(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = add_serving(&f, true);
    assert_ok(kvf_schedule_push(f.s, &R, &TABLE, 1, 10));
    TAKE(&f, KVF_INSTRUCT_PUSH);

    assert_false(preempted(&f));
    assert_int_equal(TAKE(&f, KVF_INSTRUCT_CANCEL)->cancels, KVF_INSTRUCT_PUSH);
    assert_int_equal(sent(&f, generation).freed_count, 1);

    kvf_schedule_end end = finish(&f, 10);
    assert_false(end.keep || end.params);
    TAKE_NOTHING(&f);
    done(&f);
}

static void preempted_before_a_push_is_known_it_is_pushed_later(void **state) {
    (void)state;
    fixture f = simple();
    add_serving(&f, true);
    assert_ok(kvf_schedule_push(f.s, &R, &TABLE, 1, 10));

    assert_true(preempted(&f));

    TAKE_NOTHING(&f);
    assert_true(finish(&f, 10).keep);
    TAKE(&f, KVF_INSTRUCT_PUSH);
    done(&f);
}

static uint64_t add_loading_and_pushed(const fixture *f) {
    kvf_transfer_params source = there();
    kvf_schedule_request r = request();
    uint64_t generation;
    r.source = &source;
    r.serves = r.push = true;
    assert_ok(kvf_schedule_add(f->s, &r, 0, &generation));
    return generation;
}

static void a_request_is_not_pushed_before_it_is_loaded(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = add_loading_and_pushed(&f);
    assert_true(allocate(&f, 0, 10));
    assert_fails(kvf_schedule_push(f.s, &R, &TABLE, 1, 10), KVF_E_INVALID, "not loaded yet");
    TAKE(&f, KVF_INSTRUCT_PULL);
    assert_fails(kvf_schedule_push(f.s, &R, &TABLE, 1, 10), KVF_E_INVALID, "not loaded yet");
    TAKE_NOTHING(&f);

    assert_int_equal(received(&f, generation).loaded_count, 1);

    assert_ok(kvf_schedule_push(f.s, &R, &TABLE, 1, 10));
    TAKE(&f, KVF_INSTRUCT_PUSH);
    done(&f);
}

/* The load from before its preemption writes to blocks that the request no longer has. */
static void a_request_that_is_computed_is_pushed_while_its_former_load_stops(void **state) {
    (void)state;
    fixture f = simple();
    (void)add_loading_and_pushed(&f);
    assert_true(allocate(&f, 0, 10));
    TAKE(&f, KVF_INSTRUCT_PULL);
    assert_false(preempted(&f));
    TAKE(&f, KVF_INSTRUCT_CANCEL);
    assert_false(allocate(&f, 0, 0));

    assert_ok(kvf_schedule_push(f.s, &R, &TABLE, 1, 10));

    TAKE(&f, KVF_INSTRUCT_PUSH);
    done(&f);
}

static void a_request_that_consumers_read_cannot_be_pushed(void **state) {
    (void)state;
    fixture f = simple();
    add_serving(&f, false);
    assert_fails(kvf_schedule_push(f.s, &R, &TABLE, 1, 10), KVF_E_INVALID, "pushed");
    done(&f);
}

/* ---- both ways ------------------------------------------------------------------------------- */

static void a_request_can_load_and_serve(void **state) {
    (void)state;
    fixture f = simple();
    kvf_schedule_request r = request();
    kvf_transfer_params source = there();
    uint64_t generation;
    source.tokens = 8; /* tokens of the first turn, in the cache of the engine that decoded it */
    r.source = &source;
    r.serves = true;
    assert_ok(kvf_schedule_add(f.s, &r, 0, &generation));
    TAKE(&f, KVF_INSTRUCT_RESERVE);
    assert_int_equal(match(&f, 4, 0), 4);
    assert_true(allocate(&f, 4, 4));
    assert_int_equal(TAKE(&f, KVF_INSTRUCT_PULL)->consumers, 0);
    kvf_schedule_end end = {.struct_size = sizeof end};
    assert_fails(kvf_schedule_finished(f.s, &R, &TABLE, 1, 10, 0, &end), KVF_E_INVALID, "loaded");
    assert_int_equal(received(&f, generation).loaded_count, 1);

    assert_true(finish(&f, 10).keep);

    const kvf_instruction *hold = TAKE(&f, KVF_INSTRUCT_HOLD);
    assert_group(hold, 0, 0, 10, IDS, 3);
    assert_false(hold->reserved); /* only its source was */
    assert_int_equal(sent(&f, generation).freed_count, 1);
    done(&f);
}

static void a_cancelled_load_and_a_finished_request_free_their_blocks_apart(void **state) {
    (void)state;
    fixture f = simple();
    kvf_schedule_request r = request();
    kvf_transfer_params source = there();
    uint64_t generation;
    r.source = &source;
    r.serves = true;
    assert_ok(kvf_schedule_add(f.s, &r, 0, &generation));
    assert_true(allocate(&f, 0, 10));
    TAKE(&f, KVF_INSTRUCT_PULL);
    assert_false(preempted(&f));
    assert_true(finish(&f, 10).keep);
    TAKE(&f, KVF_INSTRUCT_CANCEL, KVF_INSTRUCT_HOLD);

    kvf_schedule_news news = sent(&f, generation);
    assert_int_equal(news.freed_count, 1);
    assert_false(news.freed[0].of_load);
    news = received(&f, generation);
    assert_int_equal(news.freed_count, 1);
    assert_true(news.freed[0].of_load);
    assert_int_equal(counts(&f).requests, 0);
    done(&f);
}

/* ---- abuse ----------------------------------------------------------------------------------- */

static void ids_are_any_bytes_up_to_the_limit(void **state) {
    (void)state;
    fixture f = simple();
    static char longest[KVF_REQUEST_ID_BYTES + 1];
    const kvf_request_id ids[] = {{"a,b", 3},  {"a:1", 3}, {"a\0b", 3},
                                  {"a\0c", 3}, {"\n", 1},  {longest, KVF_REQUEST_ID_BYTES}};
    kvf_schedule_request r = request();
    kvf_schedule_end end = {.struct_size = sizeof end};
    r.serves = true;
    for (size_t i = 0; i < COUNT_OF(ids); i++) {
        r.id = ids[i];
        assert_ok(kvf_schedule_add(f.s, &r, 0, NULL));
        kvf_request_key key = {r.id, 0};
        assert_ok(kvf_schedule_finished(f.s, &key, &TABLE, 1, 10, 0, &end));
        assert_memory_equal(end.params->id.data, r.id.data, r.id.size);
        assert_true(end.params->id.size <= 1024);
    }
    assert_int_equal(counts(&f).serving, COUNT_OF(ids));
    r.id = (kvf_request_id){longest, sizeof longest};
    assert_fails(kvf_schedule_add(f.s, &r, 0, NULL), KVF_E_RANGE, "request 0", "961", "960");
    r.id.size = 0;
    assert_fails(kvf_schedule_add(f.s, &r, 0, NULL), KVF_E_RANGE, "empty");
    r.id = (kvf_request_id){NULL, 3};
    assert_fails(kvf_schedule_add(f.s, &r, 0, NULL), KVF_E_INVALID, "NULL");
    const kvf_request_key nobody[] = {
        {{NULL, 3}, 0}, {{NULL, 1}, 0}, {{longest, sizeof longest}, 0}, {{NULL, 0}, 0}};
    for (size_t i = 0; i < COUNT_OF(nobody); i++)
        assert_fails(kvf_schedule_abort(f.s, &nobody[i], NULL), KVF_E_NOT_FOUND, "not known");
    done(&f);
}

static void sources_that_name_nothing_are_refused(void **state) {
    (void)state;
    fixture f = simple();
    static char huge[2000];
    kvf_schedule_request r = request();
    kvf_transfer_params source = there();
    r.source = &source;
    source.engine = "";
    assert_fails(kvf_schedule_add(f.s, &r, 0, NULL), KVF_E_INVALID, "source.engine");
    source = there();
    source.id.size = 0;
    assert_fails(kvf_schedule_add(f.s, &r, 0, NULL), KVF_E_RANGE, "source.id");
    source.id = (kvf_request_id){huge, sizeof huge};
    assert_fails(kvf_schedule_add(f.s, &r, 0, NULL), KVF_E_RANGE, "2000", "1024");
    source = there();
    source.struct_size = 0;
    assert_fails(kvf_schedule_add(f.s, &r, 0, NULL), KVF_E_INVALID, "kvf_transfer_params");
    r = request();
    r.push_id = (kvf_request_id){huge, sizeof huge};
    assert_fails(kvf_schedule_add(f.s, &r, 0, NULL), KVF_E_RANGE, "push_id has 2000 bytes", "1024");
    r.push_id.size = 0;
    assert_fails(kvf_schedule_add(f.s, &r, 0, NULL), KVF_E_RANGE, "push_id has 0 bytes");
    assert_int_equal(counts(&f).requests + counts(&f).instructions, 0);
    done(&f);
}

static void there_are_not_more_requests_than_allowed(void **state) {
    (void)state;
    fixture f = schedule_with(latent(1), (kvf_schedule_options){.max_requests = 1});
    kvf_schedule_request r = request();
    r.id = (kvf_request_id){"q", 1};
    uint64_t generation = begin_load(&f, 0);
    assert_fails(kvf_schedule_add(f.s, &r, 0, NULL), KVF_E_LIMIT, "1");
    assert_false(aborted(&f)); /* its blocks are not free, so the request still counts */
    assert_fails(kvf_schedule_add(f.s, &r, 0, NULL), KVF_E_LIMIT, "1");
    received(&f, generation);
    assert_ok(kvf_schedule_add(f.s, &r, 0, NULL));
    done(&f);
}

static void where_no_most_is_said_65536_requests_are_allowed(void **state) {
    (void)state;
    fixture f = schedule_with(latent(1), (kvf_schedule_options){0});
    kvf_schedule_request r = request();
    uint32_t number;
    r.id = (kvf_request_id){&number, sizeof number};
    for (number = 0; number < 65536; number++)
        assert_ok(kvf_schedule_add(f.s, &r, 0, NULL));
    assert_fails(kvf_schedule_add(f.s, &r, 0, NULL), KVF_E_LIMIT, "65536");
    done(&f);
}

static void unknown_requests_and_missing_arguments_are_errors(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t tokens;
    kvf_schedule_end end = {.struct_size = sizeof end};
    kvf_aggregate hollow = {.struct_size = sizeof hollow, .received_count = 1};
    kvf_schedule_news news = {.struct_size = sizeof news};
    kvf_schedule_request r = request();
    const kvf_instruction *list;
    const kvf_heartbeat *beats;
    size_t count;
    assert_fails(kvf_schedule_match(f.s, &R, 0, 0, &tokens), KVF_E_NOT_FOUND, "r", "not known");
    assert_fails(kvf_schedule_allocated(f.s, &R, &TABLE, 1, 0, 1, 0, NULL), KVF_E_NOT_FOUND, "r");
    assert_fails(kvf_schedule_finished(f.s, &R, &TABLE, 1, 1, 0, &end), KVF_E_NOT_FOUND, "r");
    assert_fails(kvf_schedule_push(f.s, &R, &TABLE, 1, 1), KVF_E_NOT_FOUND, "r");
    assert_fails(kvf_schedule_abort(f.s, NULL, NULL), KVF_E_INVALID, "NULL");
    assert_fails(kvf_schedule_match(NULL, &R, 0, 0, &tokens), KVF_E_INVALID, "NULL");
    assert_fails(kvf_schedule_add(NULL, &r, 0, NULL), KVF_E_INVALID, "NULL");
    assert_fails(kvf_schedule_add(f.s, NULL, 0, NULL), KVF_E_INVALID, "NULL");
    assert_fails(kvf_schedule_take(NULL, &list, &count), KVF_E_INVALID, "NULL");
    assert_fails(kvf_schedule_take(f.s, NULL, &count), KVF_E_INVALID, "NULL");
    assert_fails(kvf_schedule_take(f.s, &list, NULL), KVF_E_INVALID, "NULL");
    assert_fails(kvf_schedule_heartbeats(NULL, 0, &beats, &count), KVF_E_INVALID, "NULL");
    assert_fails(kvf_schedule_heartbeats(f.s, 0, NULL, &count), KVF_E_INVALID, "NULL");
    assert_fails(kvf_schedule_heartbeats(f.s, 0, &beats, NULL), KVF_E_INVALID, "NULL");
    assert_fails(kvf_schedule_update(f.s, &hollow, &news), KVF_E_INVALID, "count");
    kvf_schedule_free(NULL);
    done(&f);
}

static void impossible_options_are_refused(void **state) {
    (void)state;
    kvf_model *model = latent(1);
    kvf_schedule *s = NULL;
    const uint32_t zero[] = {0};
    kvf_schedule_options o = {.struct_size = sizeof o};
    kvf_schedule_request r = request();
    assert_fails(kvf_schedule_create(NULL, &s), KVF_E_INVALID, "options");
    o.tokens_per_block = zero;
    assert_fails(kvf_schedule_create(&o, &s), KVF_E_INVALID, "model");
    o.model = model;
    o.tokens_per_block = NULL;
    assert_fails(kvf_schedule_create(&o, &s), KVF_E_INVALID, "tokens_per_block");
    o.tokens_per_block = zero;
    assert_fails(kvf_schedule_create(&o, &s), KVF_E_RANGE, "tokens_per_block[0]");
    o.tokens_per_block = FOUR_EACH;
    o.policy = (kvf_load_policy)9;
    assert_fails(kvf_schedule_create(&o, &s), KVF_E_INVALID, "policy");
    o.policy = KVF_LOAD_FAIL;
    assert_fails(kvf_schedule_create(&o, NULL), KVF_E_INVALID, "out");
    assert_ok(kvf_schedule_create(&o, &s)); /* a schedule whose engine has no name can only load */
    r.serves = true;
    assert_fails(kvf_schedule_add(s, &r, 0, NULL), KVF_E_INVALID, "engine");
    kvf_schedule_free(s);
    kvf_model_free(model);
}

static void ids_are_shown_as_text(void **state) {
    (void)state;
    char bytes[KVF_ID_TEXT_BYTES], text[KVF_ID_TEXT_BYTES];
    memset(bytes, 'x', sizeof bytes);
    memset(text, '#', sizeof text);
    kvf_request_id_text((kvf_request_id){" a~\x1f\x7f\0\xff", 7}, text);
    assert_string_equal(text, " a~????");
    kvf_request_id_text((kvf_request_id){NULL, 0}, text);
    assert_string_equal(text, "");
    kvf_request_id_text((kvf_request_id){bytes, KVF_ID_TEXT_BYTES - 4}, text);
    assert_int_equal(strlen(text), KVF_ID_TEXT_BYTES - 4);
    assert_memory_equal(text, bytes, KVF_ID_TEXT_BYTES - 4);
    kvf_request_id_text((kvf_request_id){bytes, KVF_ID_TEXT_BYTES - 3}, text);
    assert_memory_equal(text, bytes, KVF_ID_TEXT_BYTES - 4);
    assert_string_equal(text + KVF_ID_TEXT_BYTES - 4, "...");
}

/* Tries with each allocation refused in turn, until no more is refused. */
static void a_schedule_is_made_with_all_its_memory_or_not_at_all(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    kvf_model *model = latent(1);
    size_t live = memory.live;
    kvf_schedule *s = NULL;
    kvf_schedule_options o = {.struct_size = sizeof o,
                              .model = model,
                              .tokens_per_block = FOUR_EACH,
                              .engine = "here",
                              .endpoint = "tcp://here:1",
                              .public_key = "key"};
    kvf_status status;
    do {
        memory.calls = 0;
        memory.fail_at++;
        status = kvf_schedule_create(&o, &s);
        assert_true(status == KVF_E_NOMEM || memory.calls < memory.fail_at);
        assert_true(status == KVF_OK || (memory.live == live && s == NULL));
    } while (status == KVF_E_NOMEM);
    memory.fail_at = 0;
    assert_ok(status);
    kvf_schedule_free(s);
    assert_int_equal(memory.live, live);
    kvf_model_free(model);
}

/* Makes a call with each of its allocations refused in turn, until it succeeds; a refused call may change nothing. */
#define UNTIL_ENOUGH(f, memory, call)                                                                        \
    do {                                                                                                     \
        kvf_schedule_counts before = counts(f), after;                                                       \
        kvf_status status;                                                                                   \
        (memory)->fail_at = 0;                                                                               \
        do {                                                                                                 \
            (memory)->calls = 0;                                                                             \
            (memory)->fail_at++;                                                                             \
            status = (call);                                                                                 \
            after = counts(f);                                                                               \
            if (status == KVF_E_NOMEM)                                                                       \
                assert_memory_equal(&before, &after, sizeof before);                                         \
        } while (status == KVF_E_NOMEM);                                                                     \
        (memory)->fail_at = 0;                                                                               \
        assert_ok(status);                                                                                   \
    } while (0)

static void every_call_can_be_made_again_when_there_was_no_memory(void **state) {
    (void)state;
    const kvf_group_block bad = {0, 3};
    const kvf_instruction *list;
    const kvf_heartbeat *beats;
    kvf_transfer_params source = there();
    kvf_schedule_request r = request();
    kvf_schedule_news news = {.struct_size = sizeof news};
    kvf_schedule_end end = {.struct_size = sizeof end};
    uint64_t generation;
    size_t count;
    r.source = &source;
    r.serves = true;
    memory_count memory;
    count_memory(&memory);
    fixture f = simple();

    UNTIL_ENOUGH(&f, &memory, kvf_schedule_add(f.s, &r, 0, &generation));
    kvf_request_key key = {{"r", 1}, generation};
    kvf_aggregate over = {.struct_size = sizeof over,
                          .received = &key,
                          .received_count = 1,
                          .invalid = &bad,
                          .invalid_count = 1};
    UNTIL_ENOUGH(&f, &memory, kvf_schedule_allocated(f.s, &R, &TABLE, 1, 0, 10, 0, NULL));
    UNTIL_ENOUGH(&f, &memory, kvf_schedule_preempted(f.s, &R, NULL));
    UNTIL_ENOUGH(&f, &memory, kvf_schedule_heartbeats(f.s, 0, &beats, &count));
    UNTIL_ENOUGH(&f, &memory, kvf_schedule_allocated(f.s, &R, &TABLE, 1, 0, 10, 0, NULL));
    UNTIL_ENOUGH(&f, &memory, kvf_schedule_take(f.s, &list, &count));
    UNTIL_ENOUGH(&f, &memory, kvf_schedule_update(f.s, &over, &news));
    assert_int_equal(news.loaded[0].tokens, 4);
    assert_int_equal(news.loaded[0].invalid_count, 1);
    UNTIL_ENOUGH(&f, &memory, kvf_schedule_finished(f.s, &R, &TABLE, 1, 10, 0, &end));
    UNTIL_ENOUGH(&f, &memory, kvf_schedule_take(f.s, &list, &count));
    UNTIL_ENOUGH(&f, &memory, kvf_schedule_abort(f.s, &R, NULL));
    assert_int_equal(sent(&f, generation).freed_count, 1);

    memory.fail_at = 0;
    done(&f);
    assert_int_equal(memory.live, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_finished_request_is_held_for_its_consumer),
        cmocka_unit_test(no_two_lives_of_an_id_are_held_under_one_name),
        cmocka_unit_test(of_windows_and_states_only_what_is_needed_is_held),
        cmocka_unit_test(a_request_that_nobody_wants_or_that_computed_nothing_is_not_held),
        cmocka_unit_test(a_request_of_one_token_is_held),
        cmocka_unit_test(a_finished_request_with_a_bad_table_goes_on_as_before),
        cmocka_unit_test(aborted_while_held_blocks_come_back_with_the_report),
        cmocka_unit_test(aborted_before_it_is_held_blocks_are_free_at_once),
        cmocka_unit_test(aborted_before_it_has_finished_nothing_is_held),
        cmocka_unit_test(a_push_that_is_over_first_leaves_nothing_to_keep),
        cmocka_unit_test(a_push_may_begin_without_blocks_which_its_chunks_bring),
        cmocka_unit_test(a_push_under_way_keeps_the_blocks_of_a_finished_request),
        cmocka_unit_test(a_request_that_was_not_pushed_before_is_pushed_when_it_has_finished),
        cmocka_unit_test(a_push_has_the_name_that_its_consumers_gave_as_it_is),
        cmocka_unit_test(names_of_transfers_have_up_to_1024_bytes),
        cmocka_unit_test(preempted_while_pushing_the_blocks_are_kept_and_it_is_pushed_no_more),
        cmocka_unit_test(preempted_before_a_push_is_known_it_is_pushed_later),
        cmocka_unit_test(a_request_is_not_pushed_before_it_is_loaded),
        cmocka_unit_test(a_request_that_is_computed_is_pushed_while_its_former_load_stops),
        cmocka_unit_test(a_request_that_consumers_read_cannot_be_pushed),
        cmocka_unit_test(a_request_can_load_and_serve),
        cmocka_unit_test(a_cancelled_load_and_a_finished_request_free_their_blocks_apart),
        cmocka_unit_test(ids_are_any_bytes_up_to_the_limit),
        cmocka_unit_test(sources_that_name_nothing_are_refused),
        cmocka_unit_test(there_are_not_more_requests_than_allowed),
        cmocka_unit_test(where_no_most_is_said_65536_requests_are_allowed),
        cmocka_unit_test(unknown_requests_and_missing_arguments_are_errors),
        cmocka_unit_test(impossible_options_are_refused),
        cmocka_unit_test(ids_are_shown_as_text),
        cmocka_unit_test_teardown(a_schedule_is_made_with_all_its_memory_or_not_at_all, stop_counting_memory),
        cmocka_unit_test_teardown(every_call_can_be_made_again_when_there_was_no_memory,
                                  stop_counting_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
