/*
 * Tests of transports, each run in every way: by name, so that a failure says in which.
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

/** A way: what a test's name says of it, and what the test gets as its state. */
typedef struct test_way {
    char name[96];
    void *state;
} test_way;

#define MAX_WAYS 32

/** Ways to make a pair. Returns how many. */
size_t ways_of_pairs(const pair_kind *kinds, size_t count, test_way *out);

/** The kinds of transport of this build that move memory of the host, as texts. Returns how many. */
size_t ways_of_kinds(test_way *out);

typedef struct way_test {
    const char *name;
    CMUnitTestFunction run;
} way_test;

#define NAMED(test)                                                                                          \
    { #test, test }

/** Runs every test in every way, then `more` as they are. What main() returns. */
int run_every_way(const char *suite, const way_test *tests, size_t count, const test_way *ways,
                  size_t way_count, const struct CMUnitTest *more, size_t more_count);

#endif
