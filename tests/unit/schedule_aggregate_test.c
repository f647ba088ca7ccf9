/* The aggregator, which adds up the outputs of workers, and small rules that belong to it. */
#include <kvferry/schedule.h>

#include "shapes.h"

#include "schedule/keys.h"

#define KEY(text)                                                                                            \
    { {text, sizeof(text) - 1}, 0 }
#define SIZE(...) (sizeof(__VA_ARGS__) / sizeof *(__VA_ARGS__))
#define KEYS(...) (const kvf_request_key[]){__VA_ARGS__}, SIZE((kvf_request_key[]){__VA_ARGS__})

/* ---- given ----------------------------------------------------------------------------------- */

static kvf_aggregator *aggregator_with(kvf_aggregator_options options) {
    kvf_aggregator *a = NULL;
    options.struct_size = sizeof options;
    assert_int_equal(kvf_aggregator_create(&options, &a), KVF_OK);
    return a;
}

static kvf_aggregator *aggregator_of(uint32_t workers) {
    return aggregator_with((kvf_aggregator_options){.worker_count = workers});
}

static kvf_worker_output silent(void) {
    return (kvf_worker_output){.struct_size = sizeof(kvf_worker_output)};
}

static kvf_worker_output sends(const kvf_request_key *keys, size_t count) {
    kvf_worker_output output = silent();
    output.sent = keys;
    output.sent_count = count;
    return output;
}

static kvf_worker_output receives(const kvf_request_key *keys, size_t count) {
    kvf_worker_output output = silent();
    output.received = keys;
    output.received_count = count;
    return output;
}

/* One step of two workers; NULL if a worker has no output. */
static kvf_aggregate step2(kvf_aggregator *a, const kvf_worker_output *first,
                           const kvf_worker_output *second) {
    kvf_aggregate sum = {.struct_size = sizeof sum};
    const kvf_worker_output *outputs[] = {first, second};
    assert_int_equal(kvf_aggregator_step(a, outputs, 2, 0, &sum), KVF_OK);
    return sum;
}

static void assert_keys(const kvf_request_key *keys, size_t count, const char *const *names,
                        size_t name_count) {
    assert_int_equal(count, name_count);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(keys[i].id.size, strlen(names[i]));
        assert_memory_equal(keys[i].id.data, names[i], keys[i].id.size);
    }
}

#define ASSERT_NAMES(list, ...)                                                                              \
    assert_keys(list, list##_count, (const char *const[]){__VA_ARGS__}, SIZE((const char *[]){__VA_ARGS__}))

/* ---- counting -------------------------------------------------------------------------------- */

static void a_request_is_over_when_all_workers_have_said_so(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    kvf_worker_output quiet = silent(), both = receives(KEYS(KEY("r"), KEY("q"))),
                      one = receives(KEYS(KEY("r")));

    kvf_aggregate sum = step2(a, &both, &quiet);
    assert_int_equal(sum.received_count, 0);
    assert_int_equal(kvf_aggregator_pending(a), 2);

    sum = step2(a, &quiet, &one);
    ASSERT_NAMES(sum.received, "r");
    assert_int_equal(sum.sent_count, 0);
    assert_int_equal(sum.invalid_count, 0);
    assert_int_equal(sum.output, 0);
    assert_int_equal(kvf_aggregator_pending(a), 1);
    kvf_aggregator_free(a);
}

static void sent_and_received_are_counted_apart(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    kvf_worker_output sent = sends(KEYS(KEY("r"))), received = receives(KEYS(KEY("r")));

    kvf_aggregate sum = step2(a, &sent, &received);

    assert_int_equal(sum.sent_count + sum.received_count, 0);
    kvf_aggregator_free(a);
}

static void a_worker_that_repeats_itself_counts_once(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    kvf_worker_output quiet = silent(), twice = sends(KEYS(KEY("r"), KEY("r"))), once = sends(KEYS(KEY("r")));

    assert_int_equal(step2(a, &twice, &quiet).sent_count, 0);
    assert_int_equal(step2(a, &once, &quiet).sent_count, 0);
    kvf_aggregate sum = step2(a, &quiet, &once);

    ASSERT_NAMES(sum.sent, "r");
    kvf_aggregator_free(a);
}

static void of_more_than_64_workers_each_counts_once_too(void **state) {
    (void)state;
    enum { MOST = 66 };
    const kvf_request_key keys[] = {{{"r", 1}, 7}, {{"r", 1}, 7}};
    kvf_worker_output quiet = silent(), twice = sends(keys, 2), once = sends(keys, 1);
    const kvf_worker_output *all_but_one[MOST] = {&quiet}, *that_one[MOST] = {&once};
    kvf_aggregate sum = {.struct_size = sizeof sum};
    for (uint32_t w = 1; w < MOST; w++) {
        all_but_one[w] = &twice;
        that_one[w] = &quiet;
    }
    for (uint32_t workers = 65; workers <= MOST; workers++) {
        kvf_aggregator *a = aggregator_of(workers);

        assert_int_equal(kvf_aggregator_step(a, all_but_one, workers, 0, &sum), KVF_OK);
        assert_int_equal(sum.sent_count, 0);
        assert_int_equal(kvf_aggregator_step(a, that_one, workers, 0, &sum), KVF_OK);

        ASSERT_NAMES(sum.sent, "r");
        kvf_aggregator_free(a);
    }
}

static void one_worker_is_enough_where_there_is_one(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(1);
    kvf_worker_output once = sends(KEYS(KEY("r")));
    const kvf_worker_output *outputs[] = {&once};
    kvf_aggregate sum = {.struct_size = sizeof sum};

    assert_int_equal(kvf_aggregator_step(a, outputs, 1, 0, &sum), KVF_OK);

    ASSERT_NAMES(sum.sent, "r");
    kvf_aggregator_free(a);
}

static void reports_of_one_worker_add_up_where_reports_are_counted(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_with(
        (kvf_aggregator_options){.worker_count = 2, .expected = 3, .rule = KVF_COUNT_REPORTS});
    kvf_worker_output quiet = silent(), once = sends(KEYS(KEY("r")));

    assert_int_equal(step2(a, &once, &quiet).sent_count, 0);
    assert_int_equal(step2(a, &once, &quiet).sent_count, 0);
    kvf_aggregate sum = step2(a, &once, &quiet);

    ASSERT_NAMES(sum.sent, "r");
    kvf_aggregator_free(a);
}

static void fewer_workers_can_be_expected_than_there_are(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_with((kvf_aggregator_options){.worker_count = 2, .expected = 1});
    kvf_worker_output once = sends(KEYS(KEY("r")));

    kvf_aggregate sum = step2(a, &once, &once);

    ASSERT_NAMES(sum.sent, "r"); /* reported once, though either worker would be enough */
    kvf_aggregator_free(a);
}

static void all_workers_can_be_expected_by_number(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_with((kvf_aggregator_options){.worker_count = 2, .expected = 2});
    kvf_worker_output quiet = silent(), once = sends(KEYS(KEY("r")));

    assert_int_equal(step2(a, &once, &quiet).sent_count, 0);
    kvf_aggregate sum = step2(a, &quiet, &once);

    ASSERT_NAMES(sum.sent, "r");
    kvf_aggregator_free(a);
}

static void a_worker_changes_how_many_are_expected_for_requests_not_reported_yet(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    kvf_worker_output quiet = silent(), old = sends(KEYS(KEY("old"))), changed = sends(KEYS(KEY("new")));
    changed.expected = 1;

    assert_int_equal(step2(a, &old, &quiet).expected, 2);
    kvf_aggregate sum = step2(a, &changed, &quiet);

    assert_int_equal(sum.expected, 1);
    ASSERT_NAMES(sum.sent, "new");
    sum = step2(a, &quiet, &old);
    ASSERT_NAMES(sum.sent, "old");
    kvf_aggregator_free(a);
}

static void more_workers_than_there_are_are_not_waited_for(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    kvf_worker_output many = sends(KEYS(KEY("r"))), one = sends(KEYS(KEY("r")));
    many.expected = UINT32_MAX;

    kvf_aggregate sum = step2(a, &many, &one);

    ASSERT_NAMES(sum.sent, "r");
    kvf_aggregator_free(a);
}

static void generations_of_an_id_are_requests_of_their_own(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    kvf_request_key first = {{"r", 1}, 1}, second = {{"r", 1}, 2};
    kvf_worker_output of_first = sends(&first, 1), of_second = sends(&second, 1);

    assert_int_equal(step2(a, &of_first, &of_second).sent_count, 0);
    kvf_aggregate sum = step2(a, &of_second, &of_second);

    ASSERT_NAMES(sum.sent, "r");
    assert_int_equal(sum.sent[0].generation, 2);
    kvf_aggregator_free(a);
}

static void generations_of_an_id_are_in_order(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    const kvf_request_key keys[] = {{{"r", 1}, 2}, {{"r", 1}, 3}, {{"r", 1}, 1}};
    kvf_worker_output output = sends(keys, 3);

    kvf_aggregate sum = step2(a, &output, &output);

    assert_int_equal(sum.sent_count, 3);
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(sum.sent[i].generation, i + 1);
    kvf_aggregator_free(a);
}

/* Only bytes that both ids have are compared: "a" comes first, although a greater byte follows it in memory. */
static void an_id_comes_before_those_that_it_begins(void **state) {
    (void)state;
    const kvf_request_key shorter = {{"az", 1}, 0}, longer = {{"ab", 2}, 0};
    assert_true(kvf_compare_request_keys(&shorter, &longer) < 0);
    assert_true(kvf_compare_request_keys(&longer, &shorter) > 0);
}

static void ids_are_any_bytes(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    static char longest[KVF_REQUEST_ID_BYTES];
    kvf_request_key ids[] = {
        KEY("x,y"),  KEY("x"),    KEY("y"), KEY("HB"),      KEY("a:1"),
        KEY("a\0b"), KEY("a\0c"), KEY("a"), {{NULL, 0}, 0}, {{longest, sizeof longest}, 0}};
    kvf_worker_output all = sends(ids, SIZE(ids)), some = sends(ids + 5, 1);

    assert_int_equal(step2(a, &all, &some).sent_count, 1);
    kvf_aggregate sum = step2(a, &some, &all);

    assert_int_equal(sum.sent_count, SIZE(ids));
    for (size_t i = 1; i < sum.sent_count; i++)
        assert_true(kvf_compare_request_keys(&sum.sent[i - 1], &sum.sent[i]) < 0);
    for (size_t i = 0; i < sum.sent_count; i++)
        assert_int_equal(kvf_compare_request_keys(&sum.sent[i], &sum.sent[i]), 0);
    kvf_aggregator_free(a);
}

/* ---- failures -------------------------------------------------------------------------------- */

static void a_failed_request_is_named_when_it_is_over_on_all_workers(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    kvf_worker_output quiet = silent(), good = receives(KEYS(KEY("s"), KEY("r"))), bad = good;
    kvf_request_key failed = KEY("r");
    bad.failed = &failed;
    bad.failed_count = 1;

    assert_int_equal(step2(a, &bad, &quiet).failed_count, 0);
    kvf_aggregate sum = step2(a, &quiet, &good);

    ASSERT_NAMES(sum.received, "r", "s");
    ASSERT_NAMES(sum.failed, "r");
    assert_int_equal(step2(a, &quiet, &quiet).failed_count, 0);
    kvf_aggregator_free(a);
}

static void a_failure_does_not_stick_to_the_next_request_of_the_same_id(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    kvf_worker_output good = receives(KEYS(KEY("r"))), bad = good;
    bad.failed = good.received;
    bad.failed_count = 1;

    assert_int_equal(step2(a, &bad, &good).failed_count, 1);
    kvf_aggregate sum = step2(a, &good, &good);

    ASSERT_NAMES(sum.received, "r");
    assert_int_equal(sum.failed_count, 0);
    kvf_aggregator_free(a);
}

static void a_request_that_begins_anew_in_the_step_in_which_it_is_over_starts_clean(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_with((kvf_aggregator_options){.worker_count = 3, .expected = 2});
    kvf_worker_output quiet = silent(), good = receives(KEYS(KEY("r"))), bad = good;
    const kvf_worker_output *first[] = {&bad, &good, &good}, *second[] = {&good, &quiet, &quiet};
    kvf_aggregate sum = {.struct_size = sizeof sum};
    bad.failed = good.received;
    bad.failed_count = 1;

    assert_int_equal(kvf_aggregator_step(a, first, 3, 0, &sum), KVF_OK);
    ASSERT_NAMES(sum.failed, "r");
    assert_int_equal(kvf_aggregator_pending(a), 1); /* the third worker has yet to report */
    assert_int_equal(kvf_aggregator_step(a, second, 3, 0, &sum), KVF_OK);

    ASSERT_NAMES(sum.received, "r");
    assert_int_equal(sum.failed_count, 0);
    kvf_aggregator_free(a);
}

static void invalid_blocks_are_united_and_in_order(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    const kvf_group_block first[] = {{1, 4}, {0, 9}, {0, 3}}, second[] = {{0, 9}, {1, 0}, {1, 4}};
    const kvf_group_block united[] = {{0, 3}, {0, 9}, {1, 0}, {1, 4}};
    kvf_worker_output one = silent(), two = silent();
    one.invalid = first;
    one.invalid_count = two.invalid_count = 3;
    two.invalid = second;

    kvf_aggregate sum = step2(a, &one, &two);

    assert_int_equal(sum.invalid_count, 4);
    assert_memory_equal(sum.invalid, united, sizeof united);
    assert_int_equal(step2(a, &one, &two).invalid_count, 4); /* nothing is left over from the step before */
    kvf_aggregator_free(a);
}

/* ---- missing outputs -------------------------------------------------------------- */

static void nothing_is_lost_when_the_selected_worker_has_no_output(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    kvf_worker_output quiet = silent(), once = sends(KEYS(KEY("r"))), odd = once;
    const kvf_group_block block = {0, 7};
    odd.invalid = &block;
    odd.invalid_count = 1;

    kvf_aggregate sum = step2(a, NULL, &odd);
    assert_int_equal(sum.output, KVF_NO_WORKER);
    assert_int_equal(sum.invalid_count, 1);
    sum = step2(a, &once, &quiet);

    assert_int_equal(sum.output, 0);
    ASSERT_NAMES(sum.sent, "r");
    kvf_aggregator_free(a);
}

static void a_request_can_be_over_in_a_step_without_output(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    kvf_worker_output quiet = silent(), once = sends(KEYS(KEY("r")));

    assert_int_equal(step2(a, &once, &quiet).sent_count, 0);
    kvf_aggregate sum = step2(a, NULL, &once);

    ASSERT_NAMES(sum.sent, "r");
    kvf_aggregator_free(a);
}

static void the_step_is_dropped_where_that_was_asked_for(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_with((kvf_aggregator_options){.worker_count = 2, .drops_steps = true});
    kvf_worker_output once = sends(KEYS(KEY("r")));

    kvf_aggregate sum = step2(a, NULL, &once);

    assert_int_equal(sum.output, KVF_NO_WORKER);
    assert_int_equal(kvf_aggregator_pending(a), 0);
    kvf_aggregator_free(a);
}

static void a_missing_output_beside_a_selected_one_is_an_error_and_counts_nothing(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    kvf_worker_output once = sends(KEYS(KEY("r")));
    const kvf_worker_output *outputs[] = {&once, NULL};
    kvf_aggregate sum = {.struct_size = sizeof sum};

    assert_int_equal(kvf_aggregator_step(a, outputs, 2, 0, &sum), KVF_E_INVALID);
    assert_non_null(strstr(kvf_error_detail(), "worker 1"));

    assert_int_equal(kvf_aggregator_pending(a), 0);
    kvf_aggregator_free(a);
}

static void riders_are_named_by_worker(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(3);
    kvf_worker_output meta = silent(), stats = silent(), all = silent();
    meta.riders = KVF_RIDER_META;
    stats.riders = KVF_RIDER_STATS;
    all.riders = KVF_RIDER_STATS | KVF_RIDER_META | KVF_RIDER_EVENTS;
    const kvf_worker_output *outputs[] = {&stats, &meta, &all};
    kvf_aggregate sum = {.struct_size = sizeof sum};

    assert_int_equal(kvf_aggregator_step(a, outputs, 3, 2, &sum), KVF_OK);

    assert_int_equal(sum.output, 2);
    assert_int_equal(sum.with_stats_count, 2);
    assert_int_equal(sum.with_stats[0], 0);
    assert_int_equal(sum.with_stats[1], 2);
    assert_int_equal(sum.with_meta_count, 2);
    assert_int_equal(sum.with_meta[0], 1);
    assert_int_equal(sum.with_meta[1], 2);
    assert_int_equal(sum.with_events_count, 1);
    assert_int_equal(sum.with_events[0], 2);
    kvf_aggregator_free(a);
}

/* ---- bounds ---------------------------------------------------------------------------------- */

static void a_request_that_is_no_more_can_be_forgotten(void **state) {
    (void)state;
    const kvf_worker_output reports[] = {sends(KEYS(KEY("r"))), receives(KEYS(KEY("r")))};
    for (size_t i = 0; i < COUNT_OF(reports); i++) {
        kvf_aggregator *a = aggregator_of(2);
        kvf_worker_output quiet = silent();
        (void)step2(a, &reports[i], &quiet);
        assert_int_equal(kvf_aggregator_pending(a), 1);

        kvf_aggregator_forget(a, &(kvf_request_key)KEY("r"));
        kvf_aggregator_forget(a, &(kvf_request_key)KEY("never seen"));

        assert_int_equal(kvf_aggregator_pending(a), 0);
        kvf_aggregate sum = step2(a, &quiet, &reports[i]);
        assert_int_equal(sum.sent_count, 0);
        assert_int_equal(sum.received_count, 0);
        kvf_aggregator_free(a);
    }
}

static void a_request_with_the_longest_id_can_be_forgotten(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    static char longest[KVF_REQUEST_ID_BYTES];
    kvf_request_key key = {{longest, sizeof longest}, 0};
    kvf_worker_output quiet = silent(), once = sends(&key, 1);
    assert_int_equal(step2(a, &once, &quiet).sent_count, 0);
    assert_int_equal(kvf_aggregator_pending(a), 1);

    kvf_aggregator_forget(a, &key);

    assert_int_equal(kvf_aggregator_pending(a), 0);
    kvf_aggregator_free(a);
}

static void to_forget_no_request_changes_nothing(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    kvf_worker_output quiet = silent(), once = sends(KEYS(KEY("r")));
    assert_int_equal(step2(a, &once, &quiet).sent_count, 0);

    kvf_aggregator_forget(a, NULL);
    kvf_aggregator_forget(a, &(kvf_request_key){{NULL, 1}, 0});
    kvf_aggregator_forget(NULL, &(kvf_request_key)KEY("r"));

    assert_int_equal(kvf_aggregator_pending(a), 1);
    kvf_aggregator_free(a);
}

static void the_oldest_requests_are_forgotten_beyond_the_limit_and_named(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_with((kvf_aggregator_options){.worker_count = 2, .max_pending = 2});
    kvf_worker_output quiet = silent(), two = sends(KEYS(KEY("b"), KEY("a"))), third = sends(KEYS(KEY("c")));

    assert_int_equal(step2(a, &two, &quiet).forgotten_count, 0);
    kvf_aggregate sum = step2(a, &third, &quiet);

    ASSERT_NAMES(sum.forgotten, "b");
    assert_int_equal(kvf_aggregator_pending(a), 2);
    kvf_aggregator_free(a);
}

static void where_no_most_is_said_65536_requests_are_waited_for(void **state) {
    (void)state;
    enum { MOST = 65536 };
    static uint32_t numbers[MOST + 1];
    static kvf_request_key keys[MOST + 1];
    kvf_aggregator *a = aggregator_of(2);
    for (uint32_t i = 0; i <= MOST; i++) {
        numbers[i] = i;
        keys[i] = (kvf_request_key){{&numbers[i], sizeof numbers[i]}, 0};
    }
    kvf_worker_output quiet = silent(), most = sends(keys, MOST), one_more = sends(keys + MOST, 1);

    assert_int_equal(step2(a, &most, &quiet).forgotten_count, 0);
    assert_int_equal(step2(a, &one_more, &quiet).forgotten_count, 1);

    assert_int_equal(kvf_aggregator_pending(a), MOST);
    kvf_aggregator_free(a);
}

static void assert_refused(kvf_aggregator *a, const kvf_worker_output *output, kvf_status status) {
    kvf_worker_output good = sends(KEYS(KEY("good")));
    const kvf_worker_output *outputs[] = {&good, output};
    kvf_aggregate sum = {.struct_size = sizeof sum};
    assert_int_equal(kvf_aggregator_step(a, outputs, 2, 0, &sum), status);
    assert_int_equal(kvf_aggregator_pending(a), 0);
}

static void bad_outputs_are_refused_and_change_nothing(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    static char huge[KVF_REQUEST_ID_BYTES + 1];
    kvf_request_key too_long = {{huge, sizeof huge}, 0}, missing = {{NULL, 3}, 0},
                    endless = {{huge, SIZE_MAX}, 0};
    kvf_worker_output output = sends(&too_long, 1);
    assert_refused(a, &output, KVF_E_RANGE);
    output = receives(&missing, 1);
    assert_refused(a, &output, KVF_E_INVALID);
    output = receives(&endless, 1);
    assert_refused(a, &output, KVF_E_RANGE);
    output = sends(NULL, 1);
    assert_refused(a, &output, KVF_E_INVALID);
    output = silent();
    output.invalid_count = 1;
    assert_refused(a, &output, KVF_E_INVALID);
    output.invalid = &(kvf_group_block){0, 7};
    output.invalid_count = SIZE_MAX;
    assert_refused(a, &output, KVF_E_NOMEM);
    output = silent();
    output.struct_size = 0;
    assert_refused(a, &output, KVF_E_INVALID);
    kvf_aggregator_free(a);
}

static void workers_that_do_not_exist_are_refused(void **state) {
    (void)state;
    kvf_aggregator *a = aggregator_of(2);
    kvf_worker_output once = sends(KEYS(KEY("r")));
    const kvf_worker_output *outputs[] = {&once, &once, &once};
    kvf_aggregate sum = {.struct_size = sizeof sum};

    assert_int_equal(kvf_aggregator_step(a, outputs, 2, 2, &sum), KVF_E_RANGE);
    assert_int_equal(kvf_aggregator_step(a, outputs, 3, 0, &sum), KVF_E_INVALID);
    assert_int_equal(kvf_aggregator_step(a, outputs, 0, 0, &sum), KVF_E_INVALID);
    assert_int_equal(kvf_aggregator_step(a, NULL, 2, 0, &sum), KVF_E_INVALID);

    assert_int_equal(kvf_aggregator_pending(a), 0);
    kvf_aggregator_free(a);
}

static void impossible_options_are_refused(void **state) {
    (void)state;
    kvf_aggregator *a = NULL;
    kvf_aggregator_options o = {.struct_size = sizeof o};
    assert_int_equal(kvf_aggregator_create(&o, &a), KVF_E_RANGE);
    o.worker_count = (1 << 20) + 1;
    assert_int_equal(kvf_aggregator_create(&o, &a), KVF_E_RANGE);
    o.worker_count = 1 << 20;
    assert_int_equal(kvf_aggregator_create(&o, &a), KVF_OK);
    kvf_aggregator_free(a);
    a = NULL;
    o.worker_count = 2;
    o.expected = 3;
    assert_int_equal(kvf_aggregator_create(&o, &a), KVF_E_RANGE);
    o.rule = (kvf_count_rule)7;
    assert_int_equal(kvf_aggregator_create(&o, &a), KVF_E_INVALID);
    assert_int_equal(kvf_aggregator_create(NULL, &a), KVF_E_INVALID);
    assert_null(a);
    kvf_aggregator_free(NULL);
    assert_int_equal(kvf_aggregator_pending(NULL), 0);
}

/* ---- memory that runs out -------------------------------------------------------------------- */

static void an_aggregator_needs_memory_for_all_of_it(void **state) {
    (void)state;
    const kvf_aggregator_options options = {.struct_size = sizeof options, .worker_count = 2};
    kvf_aggregator *a = NULL;
    memory_count memory;
    count_memory(&memory);
    for (memory.fail_at = 1; memory.fail_at <= 2; memory.fail_at++) {
        memory.calls = 0;
        assert_fails(kvf_aggregator_create(&options, &a), KVF_E_NOMEM, "an aggregator");
        assert_null(a);
        assert_int_equal(memory.live, 0);
    }
}

/* Makes a step with one of its allocations refused, and then again; tells whether there was such an allocation. */
static bool step_is_refused(memory_count *memory, size_t fail_at) {
    kvf_aggregator *a = aggregator_of(2);
    const kvf_group_block block = {0, 7};
    kvf_worker_output first = sends(KEYS(KEY("r"), KEY("s"))), second = receives(KEYS(KEY("r"), KEY("t")));
    first.invalid = &block;
    first.invalid_count = 1;
    const kvf_worker_output *outputs[] = {&first, &second};
    kvf_aggregate sum = {.struct_size = sizeof sum};
    memory->calls = 0;
    memory->fail_at = fail_at;
    kvf_status status = kvf_aggregator_step(a, outputs, 2, 0, &sum);
    bool refused = memory->calls >= fail_at;
    memory->fail_at = 0;
    assert_int_equal(status, refused ? KVF_E_NOMEM : KVF_OK);
    if (refused) {
        assert_int_equal(kvf_aggregator_pending(a), 0);
        assert_ok(kvf_aggregator_step(a, outputs, 2, 0, &sum));
    }
    assert_int_equal(kvf_aggregator_pending(a), 4);
    assert_int_equal(sum.invalid_count, 1);
    kvf_aggregator_free(a);
    assert_int_equal(memory->live, 0);
    return refused;
}

static void a_step_without_memory_counts_nothing_and_can_be_made_again(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    size_t refused = 0;
    while (step_is_refused(&memory, refused + 1))
        refused++;
    assert_true(refused > 5); /* more than the lists of results */
}

static void a_request_takes_a_bit_of_memory_for_each_worker(void **state) {
    (void)state;
    enum { WORKERS = 8000 };
    kvf_worker_output quiet = silent(), once = sends(KEYS(KEY("r")));
    const kvf_worker_output *outputs[WORKERS] = {&once};
    kvf_aggregate sum = {.struct_size = sizeof sum};
    memory_count memory;
    for (uint32_t w = 1; w < WORKERS; w++)
        outputs[w] = &quiet;
    count_memory(&memory);
    kvf_aggregator *a = aggregator_of(WORKERS);
    memory.largest = 0;

    assert_int_equal(kvf_aggregator_step(a, outputs, WORKERS, 0, &sum), KVF_OK);

    assert_in_range(memory.largest, WORKERS / 8, WORKERS / 4);
    kvf_aggregator_free(a);
}

/* ---- rules ----------------------------------------------------------------------------------- */

static void the_suffix_of_a_front_end_is_not_part_of_the_base_of_an_id(void **state) {
    (void)state;
    assert_int_equal(kvf_base_request_bytes((kvf_request_id){"abc-0123aBcD", 12}), 3);
    assert_int_equal(kvf_base_request_bytes((kvf_request_id){"abc-09afAF9A", 12}), 3);
    assert_int_equal(kvf_base_request_bytes((kvf_request_id){"-deadbeef", 9}), 0);
    assert_int_equal(kvf_base_request_bytes((kvf_request_id){"deadbeef", 8}), 8);
    assert_int_equal(kvf_base_request_bytes((kvf_request_id){&"-deadbeef"[1], 8}), 8);
    assert_int_equal(kvf_base_request_bytes((kvf_request_id){"deadbeefdeadbeef", 16}), 16);
    assert_int_equal(kvf_base_request_bytes((kvf_request_id){"a-deadbeeg", 10}), 10);
    assert_int_equal(kvf_base_request_bytes((kvf_request_id){"a-deadbeef\n", 11}), 11);
    assert_int_equal(kvf_base_request_bytes((kvf_request_id){"a\0-deadbeef", 11}), 2);
    assert_int_equal(kvf_base_request_bytes((kvf_request_id){NULL, 0}), 0);
}

static void the_tokens_that_a_state_cannot_be_stepped_back_over_are_left_to_the_consumer(void **state) {
    (void)state;
    assert_int_equal(kvf_prefill_token_count(17, false, 0), 17);
    assert_int_equal(kvf_prefill_token_count(17, true, 0), 16);
    assert_int_equal(kvf_prefill_token_count(17, true, 3), 15);
    assert_int_equal(kvf_prefill_token_count(17, false, 3), 15);
    assert_int_equal(kvf_prefill_token_count(1, true, 0), 1);
    assert_int_equal(kvf_prefill_token_count(0, true, 0), 0);
    assert_int_equal(kvf_prefill_token_count(3, true, UINT32_MAX), 3);
}

static void a_lease_is_judged_by_the_clock_of_its_producer(void **state) {
    (void)state;
    assert_false(kvf_lease_expired(1000, 1106, 100, 5));
    assert_true(kvf_lease_expired(1000, 1105, 100, 5));
    assert_true(kvf_lease_expired(1000, 960, -40, 0));
    assert_false(kvf_lease_expired(1000, 961, -40, 0));
    assert_false(kvf_lease_expired(UINT64_MAX, 0, INT64_MAX, UINT64_MAX)); /* a lease without an end */
    assert_true(kvf_lease_expired(UINT64_MAX, UINT64_MAX, INT64_MAX, UINT64_MAX));
    assert_false(kvf_lease_expired(0, 1, INT64_MIN, 0));
}

static void the_offset_of_a_clock_comes_from_the_shortest_round_trip(void **state) {
    (void)state;
    const kvf_clock_probe probes[] = {{100, 300, 1000}, {400, 410, 505}, {500, 600, -7}};
    int64_t offset;
    uint64_t error;
    assert_int_equal(kvf_clock_offset(probes, 3, &offset, &error), KVF_OK);
    assert_int_equal(offset, 100);
    assert_int_equal(error, 5);
}

static void impossible_round_trips_are_refused(void **state) {
    (void)state;
    const kvf_clock_probe backwards = {10, 9, 5}, far = {INT64_MIN, INT64_MIN, INT64_MAX};
    const kvf_clock_probe longest = {INT64_MIN, INT64_MAX, 0};
    int64_t offset = 42;
    assert_int_equal(kvf_clock_offset(&backwards, 1, &offset, NULL), KVF_E_INVALID);
    assert_int_equal(kvf_clock_offset(&far, 1, &offset, NULL), KVF_E_OVERFLOW);
    assert_int_equal(kvf_clock_offset(NULL, 1, &offset, NULL), KVF_E_INVALID);
    assert_int_equal(kvf_clock_offset(&far, 0, &offset, NULL), KVF_E_INVALID);
    assert_int_equal(offset, 42);
    assert_int_equal(kvf_clock_offset(&longest, 1, &offset, NULL), KVF_OK);
    assert_int_equal(offset, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_is_over_when_all_workers_have_said_so),
        cmocka_unit_test(sent_and_received_are_counted_apart),
        cmocka_unit_test(a_worker_that_repeats_itself_counts_once),
        cmocka_unit_test(of_more_than_64_workers_each_counts_once_too),
        cmocka_unit_test(one_worker_is_enough_where_there_is_one),
        cmocka_unit_test(reports_of_one_worker_add_up_where_reports_are_counted),
        cmocka_unit_test(fewer_workers_can_be_expected_than_there_are),
        cmocka_unit_test(all_workers_can_be_expected_by_number),
        cmocka_unit_test(a_worker_changes_how_many_are_expected_for_requests_not_reported_yet),
        cmocka_unit_test(more_workers_than_there_are_are_not_waited_for),
        cmocka_unit_test(generations_of_an_id_are_requests_of_their_own),
        cmocka_unit_test(generations_of_an_id_are_in_order),
        cmocka_unit_test(an_id_comes_before_those_that_it_begins),
        cmocka_unit_test(ids_are_any_bytes),
        cmocka_unit_test(a_failed_request_is_named_when_it_is_over_on_all_workers),
        cmocka_unit_test(a_failure_does_not_stick_to_the_next_request_of_the_same_id),
        cmocka_unit_test(a_request_that_begins_anew_in_the_step_in_which_it_is_over_starts_clean),
        cmocka_unit_test(invalid_blocks_are_united_and_in_order),
        cmocka_unit_test(nothing_is_lost_when_the_selected_worker_has_no_output),
        cmocka_unit_test(a_request_can_be_over_in_a_step_without_output),
        cmocka_unit_test(the_step_is_dropped_where_that_was_asked_for),
        cmocka_unit_test(a_missing_output_beside_a_selected_one_is_an_error_and_counts_nothing),
        cmocka_unit_test(riders_are_named_by_worker),
        cmocka_unit_test(a_request_that_is_no_more_can_be_forgotten),
        cmocka_unit_test(a_request_with_the_longest_id_can_be_forgotten),
        cmocka_unit_test(to_forget_no_request_changes_nothing),
        cmocka_unit_test(the_oldest_requests_are_forgotten_beyond_the_limit_and_named),
        cmocka_unit_test(where_no_most_is_said_65536_requests_are_waited_for),
        cmocka_unit_test(bad_outputs_are_refused_and_change_nothing),
        cmocka_unit_test(workers_that_do_not_exist_are_refused),
        cmocka_unit_test(impossible_options_are_refused),
        cmocka_unit_test_teardown(an_aggregator_needs_memory_for_all_of_it, stop_counting_memory),
        cmocka_unit_test_teardown(a_step_without_memory_counts_nothing_and_can_be_made_again,
                                  stop_counting_memory),
        cmocka_unit_test_teardown(a_request_takes_a_bit_of_memory_for_each_worker, stop_counting_memory),
        cmocka_unit_test(the_suffix_of_a_front_end_is_not_part_of_the_base_of_an_id),
        cmocka_unit_test(the_tokens_that_a_state_cannot_be_stepped_back_over_are_left_to_the_consumer),
        cmocka_unit_test(a_lease_is_judged_by_the_clock_of_its_producer),
        cmocka_unit_test(the_offset_of_a_clock_comes_from_the_shortest_round_trip),
        cmocka_unit_test(impossible_round_trips_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
