/* Invariants of the library: builds that look for faults assert them, and a release does not even evaluate them. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/base.h"
#include "plan/walk.h"

#ifdef KVF_ASSERTIONS
enum { ASSERTS = 1 };
#else
enum { ASSERTS = 0 };
#endif

/* How a child process ended, and what it wrote to standard error. */
typedef struct ending {
    int status;
    char words[512];
} ending;

static ending run_alone(void (*body)(void)) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        (void)dup2(ends[1], STDERR_FILENO);
        body();
        _exit(0);
    }
    (void)close(ends[1]);
    ending e = {0};
    size_t length = 0;
    for (ssize_t n; (n = read(ends[0], e.words + length, sizeof e.words - 1 - length)) > 0;)
        length += (size_t)n;
    (void)close(ends[0]);
    assert_int_equal(waitpid(child, &e.status, 0), child);
    return e;
}

static bool aborted(const ending *e) {
    return WIFSIGNALED(e->status) && WTERMSIG(e->status) == SIGABRT;
}

static bool went_on(const ending *e) {
    return WIFEXITED(e->status) && WEXITSTATUS(e->status) == 0;
}

/* ---- in which builds assertions are on -------------------------------------------------------------------------- */

static void invariants_are_asserted_in_all_presets_but_release(void **state) {
    (void)state;
    const char *preset = getenv("KVF_PRESET");
    assert_non_null(preset);
    if (strcmp(preset, "release") == 0)
        assert_false(ASSERTS);
    for (const char *const *on = (const char *const[]){"debug", "asan", "tsan", "faults", NULL}; *on; on++)
        if (strcmp(preset, *on) == 0)
            assert_true(ASSERTS);
}

/* ---- what an assertion does ---------------------------------------------------------------------------- */

static void break_an_invariant(void) {
    int blocks = 2;
    KVF_ASSERT(blocks == 3);
}

static void a_broken_invariant_aborts_where_invariants_are_asserted(void **state) {
    (void)state;
    ending e = run_alone(break_an_invariant);

    assert_int_equal(aborted(&e), ASSERTS);
    assert_int_equal(went_on(&e), !ASSERTS);
}

static void a_failed_assertion_names_its_condition_and_its_place(void **state) {
    (void)state;
    ending e = run_alone(break_an_invariant);

    assert_int_equal(strstr(e.words, "blocks == 3") != NULL, ASSERTS);
    assert_int_equal(strstr(e.words, "assertion_test.c:") != NULL, ASSERTS);
    assert_int_equal(strstr(e.words, "break_an_invariant()") != NULL, ASSERTS);
}

static void a_condition_is_evaluated_where_invariants_are_asserted_only(void **state) {
    (void)state;
    int evaluated = 0;
    KVF_ASSERT(++evaluated);

    assert_int_equal(evaluated, ASSERTS);
}

/* ---- in the library -------------------------------------------------------------------------- */

static void fail_without_a_failure(void) {
    (void)kvf_fail(KVF_OK, "nothing is wrong");
}

static void walk_beyond_the_shares(void) {
    kvf_walk walk = {.local = {4, {.index = 3, .count = 2, .width = 1}}, .remote = {4, {0, 1, 1}}, .end = 1};
    kvf_walk_piece piece;
    (void)kvf_walk_next(&walk, &piece);
}

static void the_library_is_built_with_its_invariants_asserted(void **state) {
    (void)state;
    ending failed = run_alone(fail_without_a_failure), walked = run_alone(walk_beyond_the_shares);

    assert_int_equal(aborted(&failed), ASSERTS);
    assert_int_equal(aborted(&walked), ASSERTS);
    assert_int_equal(strstr(failed.words, "error.c:") != NULL, ASSERTS);
    assert_int_equal(strstr(walked.words, "walk.c:") != NULL, ASSERTS);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(invariants_are_asserted_in_all_presets_but_release),
        cmocka_unit_test(a_broken_invariant_aborts_where_invariants_are_asserted),
        cmocka_unit_test(a_failed_assertion_names_its_condition_and_its_place),
        cmocka_unit_test(a_condition_is_evaluated_where_invariants_are_asserted_only),
        cmocka_unit_test(the_library_is_built_with_its_invariants_asserted),
    };
    return cmocka_run_group_tests_name("assertions", tests, NULL, NULL);
}
