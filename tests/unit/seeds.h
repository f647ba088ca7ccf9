/*
 * Tests in which a seed determines what happens. A program that includes this has one such test, whose teardown is
 * seeds_say().
 */
#ifndef SEEDS_H
#define SEEDS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

/** The seed that is being run; UINT64_MAX: none, or all have passed. */
static uint64_t seed_running = UINT64_MAX;

/** Runs the seeds below `count`, or only the one that the environment variable KVF_SEED names. True: all were run. */
static inline bool seeds_run(uint64_t count, void (*run)(uint64_t seed, void *context), void *context) {
    const char *only = getenv("KVF_SEED");
    if (only) {
        run(strtoull(only, NULL, 10), context);
        return false;
    }
    for (seed_running = 0; seed_running < count; seed_running++)
        run(seed_running, context);
    seed_running = UINT64_MAX;
    return true;
}

/** A teardown that prints the seed with which the test has failed. */
static inline int seeds_say(void **state) {
    (void)state;
    if (seed_running != UINT64_MAX)
        print_message("it was KVF_SEED=%llu\n", (unsigned long long)seed_running);
    return 0;
}

#endif
