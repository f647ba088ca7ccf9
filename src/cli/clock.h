/*
 * The clock by which commands measure.
 */
#ifndef KVFERRY_CLI_CLOCK_H
#define KVFERRY_CLI_CLOCK_H

#include <stdint.h>
#include <time.h>

/** Nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share. */
static inline uint64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#endif
