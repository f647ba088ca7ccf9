/*
 * The part of CMocka that the kernels' tests need, as a header: for emulated machines, which have no CMocka.
 */
#ifndef KVF_CROSS_CMOCKA_H
#define KVF_CROSS_CMOCKA_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct CMUnitTest {
    const char *name;
    void (*run)(void **state);
};

#define cmocka_unit_test(test)                                                                               \
    { #test, test }

#define print_message(...) ((void)printf(__VA_ARGS__))
#define print_error(...) ((void)fprintf(stderr, __VA_ARGS__))

#define fail()                                                                                               \
    do {                                                                                                     \
        print_error("%s:%d: failed\n", __FILE__, __LINE__);                                                  \
        exit(1);                                                                                             \
    } while (0)

#define assert_true(condition)                                                                               \
    do {                                                                                                     \
        if (!(condition))                                                                                    \
            fail();                                                                                          \
    } while (0)

#define assert_int_equal(a, b) assert_true((a) == (b))
#define assert_memory_equal(a, b, bytes) assert_true(memcmp((a), (b), (bytes)) == 0)

#define cmocka_run_group_tests(tests, setup, teardown)                                                       \
    cross_run_tests((tests), sizeof(tests) / sizeof *(tests))

static inline int cross_run_tests(const struct CMUnitTest *tests, size_t count) {
    for (size_t i = 0; i < count; i++) {
        print_message("[ RUN ] %s\n", tests[i].name);
        tests[i].run(NULL);
    }
    print_message("[ OK ] %zu tests\n", count);
    return 0;
}

#endif
