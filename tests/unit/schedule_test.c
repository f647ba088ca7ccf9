/*
 * The schedule: requests that load. schedule_serve_test.c has requests that serve, and what is refused.
 */
#include <kvferry/schedule.h>

#include "schedule_shapes.h"

/* ---- loading --------------------------------------------------------------------------------- */

static void a_request_waits_until_its_cache_is_loaded(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = add_loading(&f, there());
    assert_int_equal(match(&f, 0, 0), 10);

    assert_true(allocate(&f, 0, 10));
    const kvf_instruction *pull = TAKE(&f, KVF_INSTRUCT_PULL); /* without a RESERVE, which was not needed */

    assert_bytes(pull->request.id.data, pull->request.id.size, "r");
    assert_int_equal(pull->request.generation, generation);
    assert_bytes(pull->transfer_id.data, pull->transfer_id.size, "x");
    assert_string_equal(pull->engine, "there");
    assert_string_equal(pull->endpoint, "tcp://there:2");
    assert_string_equal(pull->public_key, "its key");
    assert_int_equal(pull->deadline_ns, 120 * S);
    assert_false(pull->reserved);
    assert_int_equal(pull->group_count, 1);
    assert_group(pull, 0, 0, 10, IDS, 3);
    TAKE_NOTHING(&f);
    assert_int_equal(match(&f, 0, 0), 0);

    kvf_schedule_news news = received(&f, generation);
    assert_int_equal(news.loaded_count, 1);
    assert_int_equal(news.loaded[0].outcome, KVF_LOADED);
    assert_int_equal(news.loaded[0].tokens, 10);
    assert_int_equal(news.freed_count, 0);
    assert_int_equal(received(&f, generation).loaded_count, 0); /* told once only */
    assert_false(allocate(&f, 10, 0));                          /* an engine may make the call again */
    TAKE_NOTHING(&f);
    assert_false(finish(&f, 10).keep);
    assert_int_equal(counts(&f).requests, 0);
    done(&f);
}

static void only_what_is_not_cached_here_is_loaded(void **state) {
    (void)state;
    fixture f = simple();
    add_loading(&f, there());
    assert_int_equal(match(&f, 4, 0), 6);

    assert_true(allocate(&f, 4, 6));

    assert_group(TAKE(&f, KVF_INSTRUCT_PULL), 0, 4, 10, IDS, 3);
    done(&f);
}

static void a_table_may_begin_where_the_load_begins(void **state) {
    (void)state;
    fixture f = simple();
    const kvf_block_table tail = {IDS, 2, 1}, late = {IDS, 1, 2};
    bool waits;
    add_loading(&f, there());

    assert_fails(kvf_schedule_allocated(f.s, &R, &late, 1, 4, 6, 0, &waits), KVF_E_RANGE, "[1, 2]", "[2, 3)");
    assert_ok(kvf_schedule_allocated(f.s, &R, &tail, 1, 4, 6, 0, &waits));

    assert_int_equal(TAKE(&f, KVF_INSTRUCT_PULL)->groups[0].table.first_block, 1);
    done(&f);
}

static void a_full_hit_only_notifies_the_producer(void **state) {
    (void)state;
    fixture f = simple();
    add_loading(&f, there());
    assert_int_equal(match(&f, 10, 0), 0);

    assert_false(allocate(&f, 10, 0));

    const kvf_instruction *notify = TAKE(&f, KVF_INSTRUCT_NOTIFY);
    assert_bytes(notify->transfer_id.data, notify->transfer_id.size, "x");
    assert_null(notify->groups);
    assert_int_equal(notify->group_count, 0);
    assert_int_equal(notify->deadline_ns, 0);
    assert_int_equal(match(&f, 0, 0), 0);
    assert_false(allocate(&f, 10, 0));
    TAKE_NOTHING(&f);
    done(&f);
}

static void a_request_in_the_queue_has_its_source_reserved_once(void **state) {
    (void)state;
    fixture f = simple();
    add_loading(&f, there());

    const kvf_instruction *reserve = TAKE(&f, KVF_INSTRUCT_RESERVE);
    assert_bytes(reserve->transfer_id.data, reserve->transfer_id.size, "x");
    assert_int_equal(counts(&f).waiting, 1);
    assert_int_equal(counts(&f).loading, 0);
    assert_int_equal(match(&f, 0, 0), 10);
    TAKE_NOTHING(&f);
    assert_true(allocate(&f, 0, 10));
    assert_int_equal(counts(&f).loading, 1);

    assert_true(TAKE(&f, KVF_INSTRUCT_PULL)->reserved);
    assert_int_equal(counts(&f).loading, 1);
    done(&f);
}

static void blocks_that_come_again_for_a_load_under_way_change_nothing(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = add_loading(&f, there());
    assert_true(allocate(&f, 0, 10));

    assert_true(allocate(&f, 0, 10)); /* planned */
    TAKE(&f, KVF_INSTRUCT_PULL);
    assert_true(allocate(&f, 0, 10)); /* active */

    TAKE_NOTHING(&f);
    assert_int_equal(received(&f, generation).loaded_count, 1);
    done(&f);
}

static void a_source_that_writes_is_expected(void **state) {
    (void)state;
    fixture f = simple();
    kvf_transfer_params source = there();
    source.push = true;
    uint64_t generation = add_loading(&f, source);
    TAKE_NOTHING(&f); /* no RESERVE: there is no lease to keep */

    assert_true(allocate(&f, 0, 10));
    assert_group(TAKE(&f, KVF_INSTRUCT_EXPECT), 0, 0, 10, IDS, 3);

    assert_false(aborted(&f));
    const kvf_instruction *cancel = TAKE(&f, KVF_INSTRUCT_CANCEL);
    assert_int_equal(cancel->cancels, KVF_INSTRUCT_EXPECT);
    assert_int_equal(received(&f, generation).freed_count, 1);
    done(&f);
}

static void tokens_that_the_source_lacks_are_not_offered(void **state) {
    (void)state;
    fixture f = simple();
    kvf_transfer_params source = there();
    source.tokens = 6; /* the tokens of an earlier turn */
    add_loading(&f, source);

    assert_int_equal(match(&f, 4, 0), 2);
    assert_int_equal(match(&f, 8, 0), 0);

    assert_fails(kvf_schedule_allocated(f.s, &R, &TABLE, 1, 4, 3, 0, NULL), KVF_E_RANGE, "3", "6");
    done(&f);
}

static void a_window_is_loaded_from_its_first_token(void **state) {
    (void)state;
    fixture f = schedule_of(latent_of(1, (kvf_group_desc){.name = "swa", .window_tokens = 3}));
    const uint32_t ids[] = {KVF_NO_BLOCK, 6, 8};
    const kvf_block_table table = {ids, 3, 0};
    add_loading(&f, there());

    assert_ok(kvf_schedule_allocated(f.s, &R, &table, 1, 0, 10, 0, NULL));

    assert_group(TAKE(&f, KVF_INSTRUCT_PULL), 0, 7, 10, ids, 3);
    done(&f);
}

/* Blocks of 4 tokens, 2 entries. */
static void entries_are_loaded_once_all_their_tokens_are_there(void **state) {
    (void)state;
    fixture f = schedule_of(entries_of(2));
    const kvf_block_table second = {IDS + 1, 2, 1};
    add_loading(&f, there());
    assert_int_equal(match(&f, 5, 0), 5);
    assert_fails(kvf_schedule_allocated(f.s, &R, &second, 1, 3, 7, 0, NULL), KVF_E_RANGE, "tokens [2, 10)",
                 "blocks [0, 2]", "has [1, 3)");
    assert_ok(kvf_schedule_allocated(f.s, &R, &second, 1, 5, 5, 0, NULL));
    assert_group(TAKE(&f, KVF_INSTRUCT_PULL), 0, 2, 5, IDS + 1, 2);
    done(&f);
}

/* The load fills no entry: the last token alone completes none. */
static void a_load_may_complete_no_entry(void **state) {
    (void)state;
    fixture f = schedule_of(entries_of(4));
    const kvf_block_table nothing = {0};
    const uint64_t generation = add_loading(&f, there());
    assert_ok(kvf_schedule_allocated(f.s, &R, &nothing, 1, 9, 1, 0, NULL));
    assert_group(TAKE(&f, KVF_INSTRUCT_PULL), 0, 2, 2, NULL, 0);
    assert_int_equal(failed(&f, generation, NULL, 0).loaded[0].tokens, 10);
    done(&f);
}

static void blocks_of_the_schedule_hold_whole_entries(void **state) {
    (void)state;
    kvf_model *model = entries_of(3);
    kvf_schedule *s = NULL;
    const kvf_schedule_options options = {
        .struct_size = sizeof options, .model = model, .tokens_per_block = FOUR_EACH};
    assert_fails(kvf_schedule_create(&options, &s), KVF_E_INVALID, "tokens_per_block[0] is 4",
                 "tokens_per_step, 3");
    kvf_model_free(model);
}

static void a_block_that_is_needed_must_be_in_the_table(void **state) {
    (void)state;
    fixture f = simple();
    const uint32_t ids[] = {7, KVF_NO_BLOCK, 5}, open[] = {7, 3, KVF_NO_BLOCK};
    const kvf_block_table hole = {ids, 3, 0}, open_end = {open, 3, 0}, nothing = {NULL, 3, 0};
    const kvf_block_table hole_first = {ids + 1, 2, 1};
    add_loading(&f, there());

    assert_fails(kvf_schedule_allocated(f.s, &R, &hole, 1, 0, 10, 0, NULL), KVF_E_RANGE, "block 1");
    assert_fails(kvf_schedule_allocated(f.s, &R, &hole_first, 1, 4, 6, 0, NULL), KVF_E_RANGE, "block 1");
    assert_fails(kvf_schedule_allocated(f.s, &R, &open_end, 1, 0, 10, 0, NULL), KVF_E_RANGE, "block 2");
    assert_fails(kvf_schedule_allocated(f.s, &R, &nothing, 1, 0, 10, 0, NULL), KVF_E_INVALID, "mla");
    assert_fails(kvf_schedule_allocated(f.s, &R, &TABLE, 2, 0, 10, 0, NULL), KVF_E_INVALID, "2", "1");
    assert_fails(kvf_schedule_allocated(f.s, &R, NULL, 1, 0, 10, 0, NULL), KVF_E_INVALID, "tables");
    assert_fails(kvf_schedule_allocated(f.s, &R, &TABLE, 1, UINT64_MAX, 10, 0, NULL), KVF_E_RANGE, "10");

    assert_int_equal(match(&f, 0, 0), 10); /* the refused calls changed nothing */
    done(&f);
}

static void a_table_may_end_with_the_last_block_that_is_needed(void **state) {
    (void)state;
    fixture f = simple();
    const kvf_block_table two = {IDS, 2, 0};
    add_loading(&f, there());

    assert_fails(kvf_schedule_allocated(f.s, &R, &two, 1, 0, 9, 0, NULL), KVF_E_RANGE, "[0, 2]", "[0, 2)");
    assert_ok(kvf_schedule_allocated(f.s, &R, &two, 1, 0, 8, 0, NULL));

    assert_group(TAKE(&f, KVF_INSTRUCT_PULL), 0, 0, 8, IDS, 2);
    done(&f);
}

/* ---- states ---------------------------------------------------------------------------------- */

static void with_states_the_last_token_is_left_to_the_consumer(void **state) {
    (void)state;
    fixture f = schedule_of(hybrid(2));
    const uint32_t states[] = {1, 2};
    const kvf_block_table tables[] = {TABLE, {states, 2, 0}};
    kvf_transfer_params source = there();
    source.tokens = 0;
    add_loading(&f, source);
    assert_int_equal(match(&f, 0, 0), 9);

    assert_fails(kvf_schedule_allocated(f.s, &R, tables, 2, 0, 8, 0, NULL), KVF_E_RANGE, "states", "9");
    assert_ok(kvf_schedule_allocated(f.s, &R, tables, 2, 0, 9, 0, NULL));

    const kvf_instruction *pull = TAKE(&f, KVF_INSTRUCT_PULL);
    assert_group(pull, 0, 0, 9, IDS, 3);
    assert_group(pull, 1, 0, 1, states + 1, 1); /* the state after the last token */
    done(&f);
}

static void with_states_alone_the_last_token_is_left_to_the_consumer_too(void **state) {
    (void)state;
    fixture f = schedule_of(state_model(2));
    kvf_transfer_params source = there();
    source.tokens = 0;
    add_loading(&f, source);
    assert_int_equal(match(&f, 0, 0), 9);
    done(&f);
}

static void a_state_after_too_many_tokens_is_of_no_use(void **state) {
    (void)state;
    fixture f = schedule_of(hybrid(2));
    kvf_schedule_request r = request();
    kvf_transfer_params source = there();
    r.source = &source;

    assert_fails(kvf_schedule_add(f.s, &r, 0, NULL), KVF_E_RANGE, "10", "9");

    assert_int_equal(counts(&f).requests, 0);
    done(&f);
}

static void a_state_needs_a_block(void **state) {
    (void)state;
    fixture f = schedule_of(hybrid(2));
    const uint32_t none[] = {KVF_NO_BLOCK};
    const kvf_block_table empty[] = {TABLE, {NULL, 0, 0}}, null_block[] = {TABLE, {none, 1, 0}};
    kvf_transfer_params source = there();
    source.tokens = 9;
    add_loading(&f, source);

    assert_fails(kvf_schedule_allocated(f.s, &R, empty, 2, 0, 9, 0, NULL), KVF_E_RANGE, "ssm");
    assert_fails(kvf_schedule_allocated(f.s, &R, null_block, 2, 0, 9, 0, NULL), KVF_E_RANGE, "ssm");
    done(&f);
}

static void after_a_failure_with_states_nothing_of_the_load_counts(void **state) {
    (void)state;
    fixture f = schedule_of(hybrid(2));
    const uint32_t states[] = {1};
    const kvf_block_table tables[] = {TABLE, {states, 1, 0}};
    const kvf_group_block bad = {0, 5};
    kvf_transfer_params source = there();
    source.tokens = 9;
    uint64_t generation = add_loading(&f, source);
    assert_ok(kvf_schedule_allocated(f.s, &R, tables, 2, 4, 5, 0, NULL));
    TAKE(&f, KVF_INSTRUCT_PULL);

    kvf_schedule_news news = failed(&f, generation, &bad, 1);

    assert_int_equal(news.loaded[0].outcome, KVF_LOADED_IN_PART);
    assert_int_equal(news.loaded[0].tokens, 4);
    done(&f);
}

/* ---- failures -------------------------------------------------------------------------------- */

static void a_failed_load_goes_on_from_the_first_invalid_block(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = begin_load(&f, 0);
    const kvf_group_block bad[] = {{0, 3}, {0, 5}, {0, 99}, {1, 7}};

    kvf_schedule_news news = failed(&f, generation, bad, 4);

    assert_int_equal(news.loaded_count, 1);
    assert_int_equal(news.loaded[0].outcome, KVF_LOADED_IN_PART);
    assert_int_equal(news.loaded[0].tokens, 4);
    assert_int_equal(news.loaded[0].invalid_count, 2); /* the other blocks belong to other requests */
    assert_memory_equal(news.loaded[0].invalid, bad, 2 * sizeof *bad);
    done(&f);
}

static void a_failed_load_names_the_blocks_of_every_group(void **state) {
    (void)state;
    fixture f = schedule_of(hybrid(2));
    const uint32_t states[] = {1};
    const kvf_block_table tables[] = {TABLE, {states, 1, 0}};
    const kvf_group_block all[] = {{0, 3}, {0, 5}, {0, 7}, {1, 1}};
    kvf_transfer_params source = there();
    source.tokens = 9;
    uint64_t generation = add_loading(&f, source);
    assert_ok(kvf_schedule_allocated(f.s, &R, tables, 2, 0, 9, 0, NULL));
    TAKE(&f, KVF_INSTRUCT_PULL);

    kvf_schedule_news news = failed(&f, generation, NULL, 0);

    assert_int_equal(news.loaded[0].invalid_count, 4);
    assert_memory_equal(news.loaded[0].invalid, all, sizeof all);
    done(&f);
}

static void a_failed_load_names_no_block_after_its_last_token(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = add_loading(&f, there());
    assert_true(allocate(&f, 0, 8)); /* the table has a third block */
    TAKE(&f, KVF_INSTRUCT_PULL);

    assert_int_equal(failed(&f, generation, NULL, 0).loaded[0].invalid_count, 2);
    done(&f);
}

static void tokens_that_were_cached_here_survive_a_failed_load(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = begin_load(&f, 5);

    kvf_schedule_news news = failed(&f, generation, NULL, 0);

    assert_int_equal(news.loaded[0].tokens, 5); /* in the middle of a block */
    assert_int_equal(news.loaded[0].invalid_count, 2);
    done(&f);
}

static void a_load_that_failed_as_a_whole_has_no_valid_block_whatever_else_is_named(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = begin_load(&f, 0);
    const kvf_group_block bad = {0, 5};
    kvf_request_key key = {{"r", 1}, generation};

    kvf_schedule_news news =
        update(&f, (kvf_aggregate){.received = &key,
                                   .received_count = 1,
                                   .failed = &key,
                                   .failed_count = 1,
                                   .invalid = &bad, /* named by one worker; another worker named none */
                                   .invalid_count = 1});

    assert_int_equal(news.loaded[0].tokens, 0);
    assert_int_equal(news.loaded[0].invalid_count, 3);
    done(&f);
}

static void a_failed_load_names_blocks_of_a_table_that_begins_where_it_begins(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = add_loading(&f, there());
    const kvf_block_table rest = {IDS + 1, 2, 1};
    const kvf_group_block all[] = {{0, 3}, {0, 5}};
    assert_ok(kvf_schedule_allocated(f.s, &R, &rest, 1, 4, 6, 0, NULL));
    TAKE(&f, KVF_INSTRUCT_PULL);

    kvf_schedule_news news = failed(&f, generation, NULL, 0);

    assert_int_equal(news.loaded[0].tokens, 4);
    assert_int_equal(news.loaded[0].invalid_count, 2);
    assert_memory_equal(news.loaded[0].invalid, all, sizeof all);
    assert_int_equal(kvf_schedule_update(f.s, NULL, &news), KVF_E_INVALID);
    assert_int_equal(kvf_schedule_update(NULL, &(kvf_aggregate){.struct_size = sizeof(kvf_aggregate)}, &news),
                     KVF_E_INVALID);
    done(&f);
}

static void invalid_blocks_count_also_before_the_load_is_over(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = begin_load(&f, 0);
    const kvf_group_block bad = {0, 5};
    kvf_aggregate early = {.invalid = &bad, .invalid_count = 1};
    assert_int_equal(update(&f, early).loaded_count, 0);
    assert_int_equal(update(&f, early).loaded_count, 0);

    kvf_schedule_news news = received(&f, generation);

    assert_int_equal(news.loaded[0].outcome, KVF_LOADED_IN_PART);
    assert_int_equal(news.loaded[0].tokens, 8);
    assert_int_equal(news.loaded[0].invalid_count, 1);
    done(&f);
}

static void a_load_is_whole_though_blocks_of_other_requests_are_invalid(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = begin_load(&f, 0);
    const kvf_group_block others = {0, 99};
    update(&f, (kvf_aggregate){.invalid = &others, .invalid_count = 1});

    kvf_schedule_news news = received(&f, generation);

    assert_int_equal(news.loaded[0].outcome, KVF_LOADED);
    assert_int_equal(news.loaded[0].tokens, 10);
    assert_int_equal(news.loaded[0].invalid_count, 0);
    done(&f);
}

static void before_a_window_there_is_nothing_to_go_on_from(void **state) {
    (void)state;
    fixture f = schedule_of(latent_of(1, (kvf_group_desc){.name = "swa", .window_tokens = 3}));
    const kvf_group_block bad = {0, 5};
    uint64_t generation = begin_load(&f, 4);

    assert_int_equal(failed(&f, generation, &bad, 1).loaded[0].tokens, 4);
    done(&f);
}

static void computing_goes_on_inside_an_entry_whose_block_failed(void **state) {
    (void)state;
    fixture f = schedule_of(entries_of(2));
    const kvf_group_block second = {0, 3}, third = {0, 5};
    uint64_t generation = begin_load(&f, 5);
    assert_int_equal(failed(&f, generation, &second, 1).loaded[0].tokens, 5);
    done(&f);
    f = schedule_of(entries_of(2));
    generation = begin_load(&f, 5);
    assert_int_equal(failed(&f, generation, &third, 1).loaded[0].tokens, 8);
    done(&f);
}

static void by_policy_a_failed_load_fails_the_request(void **state) {
    (void)state;
    fixture f = schedule_with(latent(1), (kvf_schedule_options){.policy = KVF_LOAD_FAIL});
    uint64_t generation = begin_load(&f, 0);

    assert_int_equal(failed(&f, generation, NULL, 0).loaded[0].outcome, KVF_LOAD_FAILED);
    assert_false(finish(&f, 0).keep);
    done(&f);
}

static void reports_about_nobody_are_passed_over(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = begin_load(&f, 0);
    static char long_id[5000];
    const kvf_request_key strangers[] = {{{"q", 1}, 1},
                                         {{"r", 1}, generation + 1},
                                         {{"r\0", 2}, 0},
                                         {{NULL, 0}, 0},
                                         {{long_id, sizeof long_id}, 0}};
    kvf_aggregate aggregate = {.received = strangers,
                               .received_count = 5,
                               .sent = strangers,
                               .sent_count = 5,
                               .failed = strangers,
                               .failed_count = 5};

    kvf_schedule_news news = update(&f, aggregate);
    assert_int_equal(news.loaded_count + news.freed_count, 0);
    assert_int_equal(sent(&f, generation).freed_count, 0); /* the request is known, but does not serve */
    assert_int_equal(received(&f, generation).loaded_count, 1);
    done(&f);
}

/* ---- aborted and preempted ------------------------------------------------------------------- */

static void aborted_in_the_queue_the_producer_is_notified(void **state) {
    (void)state;
    fixture f = simple();
    add_loading(&f, there());

    assert_true(aborted(&f));

    TAKE(&f, KVF_INSTRUCT_NOTIFY);
    assert_int_equal(counts(&f).requests, 0);
    done(&f);
}

static void aborted_in_the_queue_a_reservation_is_cancelled(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = add_loading(&f, there());
    TAKE(&f, KVF_INSTRUCT_RESERVE);

    assert_true(aborted(&f));

    const kvf_instruction *cancel = TAKE(&f, KVF_INSTRUCT_CANCEL);
    assert_int_equal(cancel->cancels, KVF_INSTRUCT_RESERVE);
    assert_int_equal(cancel->request.generation, generation);
    assert_int_equal(counts(&f).requests, 0);
    done(&f);
}

static void aborted_before_the_workers_know_blocks_are_free_at_once(void **state) {
    (void)state;
    fixture f = simple();
    add_loading(&f, there());
    assert_true(allocate(&f, 0, 10));

    assert_true(aborted(&f));

    TAKE(&f, KVF_INSTRUCT_NOTIFY); /* without a PULL */
    assert_int_equal(counts(&f).requests, 0);
    done(&f);
}

static void aborted_in_flight_blocks_are_kept_until_the_workers_report(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = begin_load(&f, 0);

    assert_false(aborted(&f));
    const kvf_instruction *cancel = TAKE(&f, KVF_INSTRUCT_CANCEL);
    assert_int_equal(cancel->cancels, KVF_INSTRUCT_PULL);
    assert_int_equal(cancel->deadline_ns, 0);
    assert_bytes(cancel->transfer_id.data, cancel->transfer_id.size, "x");
    assert_int_equal(counts(&f).stopping, 1);
    assert_false(aborted(&f)); /* a second abort changes nothing */
    TAKE_NOTHING(&f);

    kvf_schedule_news news = received(&f, generation);
    assert_int_equal(news.loaded_count, 0);
    assert_int_equal(news.freed_count, 1);
    assert_true(news.freed[0].of_load);
    assert_bytes(news.freed[0].request.id.data, news.freed[0].request.id.size, "r");
    assert_int_equal(counts(&f).requests, 0);
    assert_fails(kvf_schedule_abort(f.s, &R, NULL), KVF_E_NOT_FOUND, "r");
    done(&f);
}

static void a_load_that_was_cancelled_and_failed_is_just_over(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = begin_load(&f, 0);
    const kvf_group_block bad = {0, 7};
    assert_false(aborted(&f));

    kvf_schedule_news news = failed(&f, generation, &bad, 1);

    assert_int_equal(news.loaded_count, 0);
    assert_int_equal(news.freed_count, 1);
    done(&f);
}

static void aborted_after_the_load_blocks_are_free(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = begin_load(&f, 0);
    received(&f, generation);

    assert_true(aborted(&f));

    TAKE_NOTHING(&f);
    assert_int_equal(counts(&f).requests, 0);
    done(&f);
}

static void finished_in_the_queue_the_producer_is_notified(void **state) {
    (void)state;
    fixture f = simple();
    add_loading(&f, there());

    assert_false(finish(&f, 10).keep);

    TAKE(&f, KVF_INSTRUCT_NOTIFY);
    assert_int_equal(counts(&f).requests, 0);
    done(&f);
}

static void finished_while_loading_is_as_aborted(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = begin_load(&f, 0);

    kvf_schedule_end end = finish(&f, 0);

    assert_true(end.keep);
    assert_false(end.params);
    TAKE(&f, KVF_INSTRUCT_CANCEL);
    assert_int_equal(received(&f, generation).freed_count, 1);
    done(&f);
}

static void preempted_before_the_workers_know_it_can_be_loaded_again(void **state) {
    (void)state;
    fixture f = simple();
    add_loading(&f, there());
    assert_true(allocate(&f, 0, 10));

    assert_true(preempted(&f));

    TAKE(&f, KVF_INSTRUCT_RESERVE);
    assert_int_equal(match(&f, 0, 0), 10);
    assert_true(allocate(&f, 0, 10));
    assert_true(TAKE(&f, KVF_INSTRUCT_PULL)->reserved);
    done(&f);
}

static void preempted_before_the_workers_know_its_source_stays_reserved(void **state) {
    (void)state;
    fixture f = simple();
    add_loading(&f, there());
    TAKE(&f, KVF_INSTRUCT_RESERVE);
    assert_true(allocate(&f, 0, 10));

    assert_true(preempted(&f));

    TAKE_NOTHING(&f);
    assert_true(allocate(&f, 0, 10));
    assert_true(TAKE(&f, KVF_INSTRUCT_PULL)->reserved);
    done(&f);
}

static void preempted_in_flight_it_will_be_computed(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t generation = begin_load(&f, 0);

    assert_false(preempted(&f));

    TAKE(&f, KVF_INSTRUCT_CANCEL);
    assert_int_equal(match(&f, 0, 0), 0);
    assert_false(allocate(&f, 0, 0));
    assert_fails(kvf_schedule_allocated(f.s, &R, &TABLE, 1, 0, 10, 0, NULL), KVF_E_RANGE, "nothing to load");
    kvf_schedule_news news = received(&f, generation);
    assert_int_equal(news.freed_count, 1);
    assert_int_equal(news.loaded_count, 0);
    assert_int_equal(counts(&f).requests, 1); /* the request goes on */
    assert_false(finish(&f, 10).keep);
    done(&f);
}

static void an_id_that_comes_again_is_another_request(void **state) {
    (void)state;
    fixture f = simple();
    uint64_t first = begin_load(&f, 0);
    assert_false(aborted(&f));
    uint64_t second = add_loading(&f, there());
    assert_true(allocate(&f, 0, 10));
    TAKE(&f, KVF_INSTRUCT_CANCEL, KVF_INSTRUCT_PULL);
    assert_true(second > first);

    kvf_schedule_news news = received(&f, first);
    assert_int_equal(news.loaded_count, 0);
    assert_int_equal(news.freed_count, 1);
    assert_int_equal(news.freed[0].request.generation, first);

    assert_int_equal(received(&f, first).freed_count, 0);
    assert_int_equal(received(&f, second).loaded_count, 1);
    done(&f);
}

static void an_id_can_be_used_by_one_request_at_a_time(void **state) {
    (void)state;
    fixture f = simple();
    kvf_schedule_request r = request();
    add_loading(&f, there());
    assert_fails(kvf_schedule_add(f.s, &r, 0, NULL), KVF_E_EXISTS, "r");
    done(&f);
}

/* ---- leases ---------------------------------------------------------------------------------- */

static void a_cache_that_expires_too_soon_is_not_loaded(void **state) {
    (void)state;
    fixture f = simple();
    kvf_schedule_request r = request();
    kvf_transfer_params source = there();
    source.expiry_ns = 105 * S;
    r.source = &source;
    assert_ok(kvf_schedule_add(f.s, &r, 100 * S, NULL)); /* the margin is five seconds */

    assert_int_equal(match(&f, 0, 100 * S), 0);
    assert_false(allocate(&f, 10, 0));

    TAKE_NOTHING(&f);
    done(&f);
}

static void a_lease_is_over_by_the_clock_of_the_producer(void **state) {
    (void)state;
    fixture f = simple();
    kvf_schedule_request r = request();
    kvf_transfer_params source = there();
    source.expiry_ns = 1106 * S;
    r.source = &source;
    r.clock_offset_ns = 1000 * (int64_t)S;
    assert_ok(kvf_schedule_add(f.s, &r, 100 * S, NULL));

    assert_int_equal(match(&f, 0, 100 * S), 10);
    assert_int_equal(match(&f, 0, 101 * S), 0);

    TAKE_NOTHING(&f); /* the reservation is withdrawn */
    done(&f);
}

static void a_lease_that_ends_between_match_and_blocks_is_told(void **state) {
    (void)state;
    fixture f = simple();
    kvf_transfer_params source = there();
    source.expiry_ns = 100 * S;
    add_loading(&f, source);
    assert_int_equal(match(&f, 0, S), 10);

    assert_fails(kvf_schedule_allocated(f.s, &R, &TABLE, 1, 0, 10, 99 * S, NULL), KVF_E_TIMEOUT, "there");

    assert_int_equal(match(&f, 0, 99 * S), 0);
    done(&f);
}

static void a_source_that_is_kept_alive_does_not_expire(void **state) {
    (void)state;
    fixture f = simple();
    kvf_transfer_params source = there();
    source.expiry_ns = 30 * S;
    add_loading(&f, source);
    TAKE(&f, KVF_INSTRUCT_RESERVE);

    assert_int_equal(match(&f, 0, 1000 * S), 10);
    done(&f);
}

static void add_from(const fixture *f, const char *id, kvf_transfer_params source, const char *transfer) {
    kvf_schedule_request r = request();
    r.id = (kvf_request_id){id, strlen(id)};
    r.source = &source;
    source.id = (kvf_request_id){transfer, strlen(transfer)};
    source.expiry_ns = 30 * S;
    assert_ok(kvf_schedule_add(f->s, &r, 0, NULL));
}

static const kvf_heartbeat *beats_at(const fixture *f, uint64_t now, size_t expected_count) {
    const kvf_heartbeat *beats;
    size_t count;
    assert_ok(kvf_schedule_heartbeats(f->s, now, &beats, &count));
    assert_int_equal(count, expected_count);
    return beats;
}

static void an_engine_that_sends_signs_of_life_itself_gets_the_list(void **state) {
    (void)state;
    fixture f = schedule_with(latent(1), (kvf_schedule_options){.heartbeats = true});
    kvf_transfer_params a = there(), b = a, c = a, d = a;
    a.engine = "a";
    b.engine = c.engine = d.engine = "b";
    b.endpoint = "tcp://b:1";
    c.endpoint = d.endpoint = "tcp://b:2";
    d.public_key = "other key";
    add_from(&f, "1", d, "1");
    add_from(&f, "2", c, "x,y");
    add_from(&f, "r", c, "a:1");
    add_from(&f, "3", b, "z");
    add_from(&f, "4", a, "zz");
    TAKE_NOTHING(&f); /* no RESERVE: the engine sends heartbeats itself */

    const kvf_heartbeat *beats = beats_at(&f, 0, 5);
    const char *const in_order[] = {"zz", "z", "a:1", "x,y", "1"};
    for (size_t i = 0; i < COUNT_OF(in_order); i++)
        assert_bytes(beats[i].transfer_id.data, beats[i].transfer_id.size, in_order[i]);
    assert_string_equal(beats[0].engine, "a");
    assert_string_equal(beats[1].endpoint, "tcp://b:1");
    assert_string_equal(beats[4].public_key, "other key");
    beats_at(&f, 5 * S - 1, 0);

    assert_true(allocate(&f, 0, 10)); /* the agents send them for this request from now on */
    beats_at(&f, 5 * S, 4);
    assert_int_equal(match(&f, 0, 5 * S), 0);
    done(&f);
}

static void a_source_that_the_engine_keeps_alive_does_not_expire(void **state) {
    (void)state;
    fixture f = schedule_with(latent(1), (kvf_schedule_options){.heartbeats = true});
    kvf_transfer_params source = there();
    source.expiry_ns = 30 * S;
    add_loading(&f, source);
    beats_at(&f, 0, 1);

    assert_int_equal(match(&f, 0, 1000 * S), 10);
    done(&f);
}

static void signs_of_life_are_a_nanosecond_apart_however_short_the_lease_is(void **state) {
    (void)state;
    fixture f = schedule_with(latent(1), (kvf_schedule_options){.heartbeats = true, .lease_ns = 5});
    add_loading(&f, there());

    beats_at(&f, 1, 1);
    beats_at(&f, 1, 0);
    beats_at(&f, 2, 1);
    done(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_waits_until_its_cache_is_loaded),
        cmocka_unit_test(only_what_is_not_cached_here_is_loaded),
        cmocka_unit_test(a_table_may_begin_where_the_load_begins),
        cmocka_unit_test(a_full_hit_only_notifies_the_producer),
        cmocka_unit_test(a_request_in_the_queue_has_its_source_reserved_once),
        cmocka_unit_test(blocks_that_come_again_for_a_load_under_way_change_nothing),
        cmocka_unit_test(a_source_that_writes_is_expected),
        cmocka_unit_test(tokens_that_the_source_lacks_are_not_offered),
        cmocka_unit_test(a_window_is_loaded_from_its_first_token),
        cmocka_unit_test(entries_are_loaded_once_all_their_tokens_are_there),
        cmocka_unit_test(a_load_may_complete_no_entry),
        cmocka_unit_test(blocks_of_the_schedule_hold_whole_entries),
        cmocka_unit_test(a_block_that_is_needed_must_be_in_the_table),
        cmocka_unit_test(a_table_may_end_with_the_last_block_that_is_needed),
        cmocka_unit_test(with_states_the_last_token_is_left_to_the_consumer),
        cmocka_unit_test(with_states_alone_the_last_token_is_left_to_the_consumer_too),
        cmocka_unit_test(a_state_after_too_many_tokens_is_of_no_use),
        cmocka_unit_test(a_state_needs_a_block),
        cmocka_unit_test(after_a_failure_with_states_nothing_of_the_load_counts),
        cmocka_unit_test(a_failed_load_goes_on_from_the_first_invalid_block),
        cmocka_unit_test(a_failed_load_names_the_blocks_of_every_group),
        cmocka_unit_test(a_failed_load_names_no_block_after_its_last_token),
        cmocka_unit_test(tokens_that_were_cached_here_survive_a_failed_load),
        cmocka_unit_test(a_load_that_failed_as_a_whole_has_no_valid_block_whatever_else_is_named),
        cmocka_unit_test(a_failed_load_names_blocks_of_a_table_that_begins_where_it_begins),
        cmocka_unit_test(invalid_blocks_count_also_before_the_load_is_over),
        cmocka_unit_test(a_load_is_whole_though_blocks_of_other_requests_are_invalid),
        cmocka_unit_test(before_a_window_there_is_nothing_to_go_on_from),
        cmocka_unit_test(computing_goes_on_inside_an_entry_whose_block_failed),
        cmocka_unit_test(by_policy_a_failed_load_fails_the_request),
        cmocka_unit_test(reports_about_nobody_are_passed_over),
        cmocka_unit_test(aborted_in_the_queue_the_producer_is_notified),
        cmocka_unit_test(aborted_in_the_queue_a_reservation_is_cancelled),
        cmocka_unit_test(aborted_before_the_workers_know_blocks_are_free_at_once),
        cmocka_unit_test(aborted_in_flight_blocks_are_kept_until_the_workers_report),
        cmocka_unit_test(a_load_that_was_cancelled_and_failed_is_just_over),
        cmocka_unit_test(aborted_after_the_load_blocks_are_free),
        cmocka_unit_test(finished_in_the_queue_the_producer_is_notified),
        cmocka_unit_test(finished_while_loading_is_as_aborted),
        cmocka_unit_test(preempted_before_the_workers_know_it_can_be_loaded_again),
        cmocka_unit_test(preempted_before_the_workers_know_its_source_stays_reserved),
        cmocka_unit_test(preempted_in_flight_it_will_be_computed),
        cmocka_unit_test(an_id_that_comes_again_is_another_request),
        cmocka_unit_test(an_id_can_be_used_by_one_request_at_a_time),
        cmocka_unit_test(a_cache_that_expires_too_soon_is_not_loaded),
        cmocka_unit_test(a_lease_is_over_by_the_clock_of_the_producer),
        cmocka_unit_test(a_lease_that_ends_between_match_and_blocks_is_told),
        cmocka_unit_test(a_source_that_is_kept_alive_does_not_expire),
        cmocka_unit_test(an_engine_that_sends_signs_of_life_itself_gets_the_list),
        cmocka_unit_test(a_source_that_the_engine_keeps_alive_does_not_expire),
        cmocka_unit_test(signs_of_life_are_a_nanosecond_apart_however_short_the_lease_is),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
