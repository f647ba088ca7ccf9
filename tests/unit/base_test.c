/* What all folders of the library are built on: errors with a sentence, checked arithmetic, memory, texts, option
 * structs, threads. */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/base.h"
#include "base/thread.h"
#include "sanitized.h"

/* ---- errors with a sentence ---------------------------------------------------------------------- */

static int forget_errors(void **state) {
    (void)state;
    kvf_error_restore("");
    return 0;
}

static void a_failure_returns_its_status_and_leaves_its_words(void **state) {
    (void)state;
    kvf_status status = kvf_fail(KVF_E_RANGE, "block %u; allowed: 0 to %u", 9u, 8u);

    assert_int_equal(status, KVF_E_RANGE);
    assert_string_equal(kvf_error_detail(), "block 9; allowed: 0 to 8");
}

static void a_thread_that_never_failed_has_an_empty_detail(void **state) {
    (void)state;
    assert_string_equal(kvf_error_detail(), "");
}

static void a_caller_can_say_where_in_front_of_what(void **state) {
    (void)state;
    kvf_status inner = kvf_fail(KVF_E_INVALID, "units is 0");
    kvf_status outer = kvf_fail_in(inner, "group %u: ", 2u);

    assert_int_equal(outer, KVF_E_INVALID);
    assert_string_equal(kvf_error_detail(), "group 2: units is 0");
}

static void a_detail_may_quote_the_detail_before_it(void **state) {
    (void)state;
    (void)kvf_fail(KVF_E_IO, "read: gone");
    (void)kvf_fail(KVF_E_PEER_LOST, "peer 3 (%s)", kvf_error_detail());

    assert_string_equal(kvf_error_detail(), "peer 3 (read: gone)");
}

static void a_detail_can_be_put_back(void **state) {
    (void)state;
    char saved[KVF_DETAIL_BYTES];
    (void)kvf_fail(KVF_E_RANGE, "what the caller asked for");
    (void)snprintf(saved, sizeof saved, "%s", kvf_error_detail());
    (void)kvf_fail(KVF_E_IO, "what a callback did");
    kvf_error_restore(saved);

    assert_string_equal(kvf_error_detail(), "what the caller asked for");
}

static void words_that_are_too_long_are_cut_not_overrun(void **state) {
    (void)state;
    char lengthy[4096];
    memset(lengthy, 'x', sizeof lengthy - 1);
    lengthy[sizeof lengthy - 1] = '\0';

    (void)kvf_fail(KVF_E_PARSE, "%s", lengthy);
    size_t length = strlen(kvf_error_detail());
    (void)kvf_fail_in(KVF_E_PARSE, "%s", lengthy);

    assert_true(length >= 256 && length < sizeof lengthy);
    assert_int_equal(strlen(kvf_error_detail()), length);
}

static void an_excerpt_ends_with_a_character_and_says_that_it_was_cut(void **state) {
    (void)state;
    static const struct {
        const char *text, *excerpt;
        size_t most;
    } cases[] = {{"", "", 4},
                 {"abcd", "abcd", 4},
                 {"abcde", "abcd...", 4},
                 {"abc\xc3\xa9", "abc...", 4},
                 {"ab\xc3\xa9", "ab\xc3\xa9", 4},
                 {"\xf0\x9f\x9a\xa2\xf0\x9f\x9a\xa2", "\xf0\x9f\x9a\xa2...", 7},
                 {"\x80\x80\x80", "...", 2},
                 {"abcde", "...", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_string_equal(kvf_excerpt_of(cases[i].text, cases[i].most).text, cases[i].excerpt);
    char lengthy[4096];
    memset(lengthy, 'x', sizeof lengthy - 1);
    lengthy[sizeof lengthy - 1] = '\0';
    assert_int_equal(strlen(kvf_excerpt_of(lengthy, 200).text), 203);
}

static void *fail_elsewhere(void *seen) {
    *(bool *)seen = kvf_error_detail()[0] != '\0';
    (void)kvf_fail(KVF_E_TIMEOUT, "elsewhere");
    return NULL;
}

static void one_threads_failure_is_not_seen_by_another(void **state) {
    (void)state;
    (void)kvf_fail(KVF_E_RANGE, "here");

    pthread_t thread;
    bool seen = true;
    assert_int_equal(pthread_create(&thread, NULL, fail_elsewhere, &seen), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);

    assert_false(seen);
    assert_string_equal(kvf_error_detail(), "here");
}

static void every_status_has_a_name_of_its_own(void **state) {
    (void)state;
    for (int a = KVF_OK; a <= KVF_IN_PROGRESS; a++) {
        const char *name = kvf_status_name((kvf_status)a);
        assert_memory_equal(name, "KVF_", 4);
        for (int b = KVF_OK; b < a; b++)
            assert_string_not_equal(name, kvf_status_name((kvf_status)b));
    }
    assert_string_equal(kvf_status_name(KVF_E_RANGE), "KVF_E_RANGE");
}

static void a_number_that_is_no_status_is_called_unknown(void **state) {
    (void)state;
    assert_string_equal(kvf_status_name((kvf_status)(KVF_IN_PROGRESS + 1)), "unknown status");
    assert_string_equal(kvf_status_name((kvf_status)100000), "unknown status");
}

static void the_version_of_the_library_is_that_of_its_headers(void **state) {
    (void)state;
    char text[32];
    (void)snprintf(text, sizeof text, "%d.%d.%d", KVF_VERSION_MAJOR, KVF_VERSION_MINOR, KVF_VERSION_PATCH);

    assert_string_equal(kvf_version(), text);
}

static void versions_compare_as_numbers(void **state) {
    (void)state;
    char *at;
    assert_int_equal(strtoul(kvf_version(), &at, 10), KVF_VERSION_NUMBER / 10000);
    assert_int_equal(*at++, '.');
    assert_int_equal(strtoul(at, &at, 10), KVF_VERSION_NUMBER / 100 % 100);
    assert_int_equal(*at++, '.');
    assert_int_equal(strtoul(at, &at, 10), KVF_VERSION_NUMBER % 100);
    assert_int_equal(*at, '\0');
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

static void sums_and_products_that_fit_are_exact(void **state) {
    (void)state;
    uint64_t result;

    assert_true(kvf_add(UINT64_MAX - 1, 1, &result));
    assert_true(result == UINT64_MAX);
    assert_true(kvf_mul(UINT32_MAX, UINT32_MAX, &result));
    assert_true(result == UINT64_C(0xFFFFFFFE00000001));
    assert_true(kvf_mul_add(UINT32_MAX, UINT64_C(0x100000001), 0, &result));
    assert_true(result == UINT64_MAX);
    assert_true(kvf_mul(0, UINT64_MAX, &result));
    assert_true(result == 0);
}

static void a_sum_of_times_stops_at_the_largest_number(void **state) {
    (void)state;
    assert_true(kvf_add_or_most(UINT64_MAX - 2, 1) == UINT64_MAX - 1);
    assert_true(kvf_add_or_most(UINT64_MAX - 1, 1) == UINT64_MAX);
    assert_true(kvf_add_or_most(UINT64_MAX, 1) == UINT64_MAX);
    assert_true(kvf_add_or_most(1, UINT64_MAX) == UINT64_MAX);
}

static void sums_and_products_that_do_not_fit_are_refused(void **state) {
    (void)state;
    uint64_t result;

    assert_false(kvf_add(UINT64_MAX, 1, &result));
    assert_false(kvf_mul(UINT64_C(1) << 32, UINT64_C(1) << 32, &result));
    /* First the product fits and the sum does not; then the product itself does not fit. */
    assert_false(kvf_mul_add(UINT32_MAX, UINT64_C(0x100000001), 1, &result));
    assert_false(kvf_mul_add(UINT64_MAX, 2, 0, &result));
}

static void the_smaller_and_the_larger_of_two_are_found(void **state) {
    (void)state;
    assert_true(kvf_min_u64(3, UINT64_MAX) == 3 && kvf_min_u64(UINT64_MAX, 3) == 3);
    assert_true(kvf_max_u64(3, UINT64_MAX) == UINT64_MAX && kvf_max_u64(UINT64_MAX, 3) == UINT64_MAX);
}

static void the_greatest_common_divisor_divides_both(void **state) {
    (void)state;
    assert_true(kvf_gcd(12, 18) == 6 && kvf_gcd(18, 12) == 6);
    assert_true(kvf_gcd(16, 9) == 1);
    assert_true(kvf_gcd(UINT64_C(3) << 40, UINT64_C(5) << 40) == UINT64_C(1) << 40);
}

static void zero_is_divided_by_everything(void **state) {
    (void)state;
    assert_true(kvf_gcd(0, 7) == 7 && kvf_gcd(7, 0) == 7 && kvf_gcd(0, 0) == 0);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* An allocator that counts its calls and refuses all calls from a chosen one on. */
typedef struct ledger {
    int live;
    int calls;
    int refuse_from; /* the number of the first call that is refused; 0: none is */
} ledger;

static bool refused(ledger *book) {
    book->calls++;
    return book->refuse_from && book->calls >= book->refuse_from;
}

static void *ledger_allocate(void *context, size_t bytes) {
    ledger *book = context;
    if (refused(book))
        return NULL;
    book->live++;
    return malloc(bytes);
}

static void *ledger_resize(void *context, void *memory, size_t bytes) {
    ledger *book = context;
    if (refused(book))
        return NULL;
    if (!memory)
        book->live++;
    return realloc(memory, bytes);
}

static void ledger_release(void *context, void *memory) {
    if (memory)
        ((ledger *)context)->live--;
    free(memory);
}

static int open_ledger(void **state) {
    static ledger book;
    book = (ledger){0};
    *state = &book;
    kvf_allocator allocator = {ledger_allocate, ledger_resize, ledger_release, &book};
    kvf_error_restore("");
    return kvf_set_allocator(&allocator) == KVF_OK ? 0 : -1;
}

static int close_ledger(void **state) {
    return kvf_set_allocator(NULL) == KVF_OK && ((ledger *)*state)->live == 0 ? 0 : -1;
}

static void memory_comes_from_and_goes_to_the_chosen_allocator(void **state) {
    ledger *book = *state;
    void *a = kvf_alloc(3, 8);
    void *b = kvf_resize(kvf_alloc0(1, 1), 100, 8);
    char *c = kvf_strdup("text");

    assert_int_equal(book->live, 3);
    kvf_free(a);
    kvf_free(b);
    kvf_free(c);
    assert_int_equal(book->live, 0);
}

static void without_a_chosen_allocator_none_is_called(void **state) {
    ledger *book = *state;
    assert_int_equal(kvf_set_allocator(NULL), KVF_OK);

    void *memory = kvf_alloc(1, 16);

    assert_non_null(memory);
    assert_int_equal(book->calls, 0);
    kvf_free(memory);
}

static void an_allocator_that_misses_a_function_is_refused_and_the_old_one_stays(void **state) {
    ledger *book = *state;
    const kvf_allocator broken[] = {{NULL, ledger_resize, ledger_release, book},
                                    {ledger_allocate, NULL, ledger_release, book},
                                    {ledger_allocate, ledger_resize, NULL, book}};
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++) {
        kvf_error_restore("");
        assert_int_equal(kvf_set_allocator(&broken[i]), KVF_E_INVALID);
        assert_string_not_equal(kvf_error_detail(), "");
    }

    void *memory = kvf_alloc(1, 1);
    assert_int_equal(book->live, 1);
    kvf_free(memory);
}

static void a_count_whose_bytes_overflow_is_no_memory(void **state) {
    ledger *book = *state;

    assert_null(kvf_alloc(SIZE_MAX / 8 + 1, 8));
    assert_null(kvf_alloc0(SIZE_MAX, 2));
    assert_null(kvf_copy("x", SIZE_MAX, 2));
    assert_int_equal(book->calls, 0);
}

static void a_resize_that_fails_leaves_the_memory_as_it_was(void **state) {
    ledger *book = *state;
    char *memory = kvf_strdup("kept");

    assert_null(kvf_resize(memory, SIZE_MAX, 2));
    book->refuse_from = book->calls + 1;
    assert_null(kvf_resize(memory, 1 << 20, 1));

    assert_string_equal(memory, "kept");
    kvf_free(memory);
}

static void no_elements_still_give_a_pointer(void **state) {
    (void)state;
    void *blocks[] = {kvf_alloc(0, 8), kvf_alloc0(0, 8), kvf_copy("", 0, 8),
                      kvf_resize(kvf_alloc(2, 8), 0, 8)};
    for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++) {
        assert_non_null(blocks[i]);
        kvf_free(blocks[i]);
    }
}

static void zeroed_memory_is_zero(void **state) {
    (void)state;
    unsigned char *memory = kvf_alloc0(100, 3);
    for (size_t i = 0; i < 300; i++)
        assert_int_equal(memory[i], 0);
    kvf_free(memory);
}

static void zeroed_memory_takes_none_before_it_is_used(void **state) {
    (void)state;
    const size_t bytes = (size_t)256 << 20, page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *memory = kvf_alloc0(bytes, 1), in_use = 0;
    assert_non_null(memory);
    unsigned char *middle = memory + bytes / 2;
    middle -= (uintptr_t)middle % page;
    assert_int_equal(mincore(middle, page, &in_use), 0);
    if (!SANITIZED) /* calloc() of the thread sanitizer writes */
        assert_int_equal(in_use & 1, 0);
    assert_int_equal(middle[0], 0);
    kvf_free(memory);
}

static void a_copy_is_equal_and_apart(void **state) {
    (void)state;
    uint32_t numbers[] = {1, 2, 3};
    uint32_t *copy = kvf_copy(numbers, 3, sizeof numbers[0]);
    numbers[1] = 20;

    assert_int_equal(copy[0], 1);
    assert_int_equal(copy[1], 2);
    assert_int_equal(copy[2], 3);
    kvf_free(copy);
}

static void running_out_is_a_failure_that_says_of_what(void **state) {
    (void)state;
    assert_int_equal(kvf_nomem("the plan"), KVF_E_NOMEM);
    assert_non_null(strstr(kvf_error_detail(), "the plan"));
}

static void refused_memory_is_null_everywhere(void **state) {
    ledger *book = *state;
    book->refuse_from = 1;

    assert_null(kvf_alloc(1, 1));
    assert_null(kvf_alloc0(1, 1));
    assert_null(kvf_resize(NULL, 1, 1));
    assert_null(kvf_copy("x", 1, 1));
    assert_null(kvf_strdup("x"));
}

/* ---- texts ----------------------------------------------------------------------------------- */

static void a_text_grows_with_what_is_added(void **state) {
    (void)state;
    kvf_text text = {0};
    for (int i = 0; i < 1000; i++)
        kvf_text_add(&text, "%03d ", i);

    assert_false(text.failed);
    assert_int_equal(text.length, 4000);
    assert_memory_equal(text.data, "000 001 002 ", 12);
    assert_string_equal(text.data + 3996, "999 ");
    kvf_text_free(&text);
    assert_null(text.data);
}

static void a_text_that_could_not_grow_keeps_what_it_had_and_takes_no_more(void **state) {
    ledger *book = *state;
    char lengthy[1000];
    memset(lengthy, 'y', sizeof lengthy - 1);
    lengthy[sizeof lengthy - 1] = '\0';
    kvf_text text = {0};
    kvf_text_add(&text, "first");

    book->refuse_from = book->calls + 1;
    kvf_text_add(&text, "%s", lengthy);
    book->refuse_from = 0;
    kvf_text_add(&text, "!");

    assert_true(text.failed);
    assert_string_equal(text.data, "first");
    kvf_text_free(&text);
}

static void an_empty_text_can_be_freed(void **state) {
    (void)state;
    kvf_text text = {0};
    kvf_text_free(&text);
    assert_int_equal(text.length, 0);
}

/* ---- option structs -------------------------------------------------------------------------- */

typedef struct old_options {
    size_t struct_size;
    uint64_t depth;
} old_options;

typedef struct new_options {
    size_t struct_size;
    uint64_t depth;
    uint64_t width;
} new_options;

static void no_options_mean_all_defaults(void **state) {
    (void)state;
    new_options taken = {1, 2, 3};

    assert_int_equal(kvf_take_options(&taken, sizeof taken, NULL, "new_options"), KVF_OK);
    assert_int_equal(taken.depth, 0);
    assert_int_equal(taken.width, 0);
}

static void options_of_the_same_age_are_taken_whole(void **state) {
    (void)state;
    new_options given = {sizeof given, 5, 6};
    new_options taken;

    assert_int_equal(kvf_take_options(&taken, sizeof taken, &given, "new_options"), KVF_OK);
    assert_int_equal(taken.depth, 5);
    assert_int_equal(taken.width, 6);
}

static void fields_an_older_caller_does_not_know_become_zero(void **state) {
    (void)state;
    old_options given = {sizeof given, 5};
    new_options taken = {0, 0, 77};

    assert_int_equal(kvf_take_options(&taken, sizeof taken, &given, "new_options"), KVF_OK);
    assert_int_equal(taken.depth, 5);
    assert_int_equal(taken.width, 0);
}

static void a_newer_caller_who_leaves_new_fields_zero_is_served(void **state) {
    (void)state;
    new_options given = {sizeof given, 5, 0};
    struct {
        old_options taken;
        uint64_t after;
    } place = {.after = 42};

    assert_int_equal(kvf_take_options(&place.taken, sizeof place.taken, &given, "old_options"), KVF_OK);
    assert_int_equal(place.taken.depth, 5);
    assert_int_equal(place.after, 42);
}

static void a_newer_caller_who_sets_new_fields_is_told(void **state) {
    (void)state;
    new_options given = {sizeof given, 5, 6};
    old_options taken;

    assert_int_equal(kvf_take_options(&taken, sizeof taken, &given, "old_options"), KVF_E_INVALID);
    assert_non_null(strstr(kvf_error_detail(), "old_options.struct_size is 24"));
}

static void options_without_their_size_are_refused(void **state) {
    (void)state;
    new_options given = {0, 5, 6};
    new_options taken;
    for (size_t size = 0; size < sizeof(size_t); size++) {
        given.struct_size = size;
        kvf_error_restore("");
        assert_int_equal(kvf_take_options(&taken, sizeof taken, &given, "new_options"), KVF_E_INVALID);
        assert_non_null(strstr(kvf_error_detail(), "new_options.struct_size"));
    }
}

#define WITH_LEDGER(test) cmocka_unit_test_setup_teardown(test, open_ledger, close_ledger)

/* ---- threads --------------------------------------------------------------------------------------- */

static void *look_at_mask(void *mask) {
    (void)pthread_sigmask(SIG_SETMASK, NULL, mask);
    return NULL;
}

static void a_thread_of_the_library_takes_the_signals_of_its_own_faults_only(void **state) {
    (void)state;
    sigset_t of_thread, before, after;
    pthread_t thread;
    (void)pthread_sigmask(SIG_SETMASK, NULL, &before);
    assert_int_equal(kvf_thread_start(&thread, look_at_mask, &of_thread), 0);
    (void)pthread_sigmask(SIG_SETMASK, NULL, &after);
    assert_int_equal(pthread_join(thread, NULL), 0);
    for (int number = 1; number <= SIGSYS; number++) {
        const bool of_faults = number == SIGSEGV || number == SIGBUS || number == SIGFPE ||
                               number == SIGILL || number == SIGTRAP || number == SIGSYS;
        const bool never_kept_out = number == SIGKILL || number == SIGSTOP;
        assert_int_equal(sigismember(&of_thread, number), !of_faults && !never_kept_out);
        assert_int_equal(sigismember(&after, number), sigismember(&before, number));
    }
}

int main(void) {
    const struct CMUnitTest errors[] = {
        cmocka_unit_test_setup(a_failure_returns_its_status_and_leaves_its_words, forget_errors),
        cmocka_unit_test_setup(a_thread_that_never_failed_has_an_empty_detail, forget_errors),
        cmocka_unit_test_setup(a_caller_can_say_where_in_front_of_what, forget_errors),
        cmocka_unit_test_setup(a_detail_may_quote_the_detail_before_it, forget_errors),
        cmocka_unit_test_setup(a_detail_can_be_put_back, forget_errors),
        cmocka_unit_test_setup(words_that_are_too_long_are_cut_not_overrun, forget_errors),
        cmocka_unit_test_setup(an_excerpt_ends_with_a_character_and_says_that_it_was_cut, forget_errors),
        cmocka_unit_test_setup(one_threads_failure_is_not_seen_by_another, forget_errors),
        cmocka_unit_test(every_status_has_a_name_of_its_own),
        cmocka_unit_test(a_number_that_is_no_status_is_called_unknown),
        cmocka_unit_test(the_version_of_the_library_is_that_of_its_headers),
        cmocka_unit_test(versions_compare_as_numbers),
    };
    const struct CMUnitTest arithmetic[] = {
        cmocka_unit_test(sums_and_products_that_fit_are_exact),
        cmocka_unit_test(a_sum_of_times_stops_at_the_largest_number),
        cmocka_unit_test(sums_and_products_that_do_not_fit_are_refused),
        cmocka_unit_test(the_smaller_and_the_larger_of_two_are_found),
        cmocka_unit_test(the_greatest_common_divisor_divides_both),
        cmocka_unit_test(zero_is_divided_by_everything),
    };
    const struct CMUnitTest memory[] = {
        WITH_LEDGER(memory_comes_from_and_goes_to_the_chosen_allocator),
        WITH_LEDGER(without_a_chosen_allocator_none_is_called),
        WITH_LEDGER(an_allocator_that_misses_a_function_is_refused_and_the_old_one_stays),
        WITH_LEDGER(a_count_whose_bytes_overflow_is_no_memory),
        WITH_LEDGER(a_resize_that_fails_leaves_the_memory_as_it_was),
        WITH_LEDGER(no_elements_still_give_a_pointer),
        WITH_LEDGER(zeroed_memory_is_zero),
        cmocka_unit_test(zeroed_memory_takes_none_before_it_is_used),
        WITH_LEDGER(a_copy_is_equal_and_apart),
        WITH_LEDGER(running_out_is_a_failure_that_says_of_what),
        WITH_LEDGER(refused_memory_is_null_everywhere),
    };
    const struct CMUnitTest texts[] = {
        WITH_LEDGER(a_text_grows_with_what_is_added),
        WITH_LEDGER(a_text_that_could_not_grow_keeps_what_it_had_and_takes_no_more),
        WITH_LEDGER(an_empty_text_can_be_freed),
    };
    const struct CMUnitTest options[] = {
        cmocka_unit_test(no_options_mean_all_defaults),
        cmocka_unit_test(options_of_the_same_age_are_taken_whole),
        cmocka_unit_test(fields_an_older_caller_does_not_know_become_zero),
        cmocka_unit_test(a_newer_caller_who_leaves_new_fields_zero_is_served),
        cmocka_unit_test(a_newer_caller_who_sets_new_fields_is_told),
        cmocka_unit_test(options_without_their_size_are_refused),
    };
    const struct CMUnitTest threads[] = {
        cmocka_unit_test(a_thread_of_the_library_takes_the_signals_of_its_own_faults_only),
    };
    int failed = cmocka_run_group_tests(errors, NULL, NULL);
    failed += cmocka_run_group_tests(arithmetic, NULL, NULL);
    failed += cmocka_run_group_tests(memory, NULL, NULL);
    failed += cmocka_run_group_tests(texts, NULL, NULL);
    failed += cmocka_run_group_tests(options, NULL, NULL);
    failed += cmocka_run_group_tests(threads, NULL, NULL);
    return failed ? 1 : 0;
}
