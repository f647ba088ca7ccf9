/*
 * Runs each test of transports in every way, under a name of its own, so that a failure says in which way.
 */
#ifndef TRANSPORT_WAYS_H
#define TRANSPORT_WAYS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <kvferry/transport.h>

#include "transport_pair.h"

/** A way: its text in a test's name, and the state that the test gets. */
typedef struct test_way {
    char name[96];
    void *state;
} test_way;

#define MAX_WAYS 32

/** Lists ways to make a pair; returns how many. */
size_t ways_of_pairs(const pair_kind *kinds, size_t count, test_way *out);

/** Lists the kinds of transport of this build that move host memory, as texts; returns how many. */
size_t ways_of_kinds(test_way *out);

typedef struct way_test {
    const char *name;
    CMUnitTestFunction run;
} way_test;

#define NAMED(test)                                                                                          \
    { #test, test }

/** Runs every test in every way, then the tests of `more` once. Returns the result for main(). */
int run_every_way(const char *suite, const way_test *tests, size_t count, const test_way *ways,
                  size_t way_count, const struct CMUnitTest *more, size_t more_count);

#endif
