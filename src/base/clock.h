/*
 * Clocks, which are passed to the code that needs time: production passes the machine's clock, tests and simulations
 * one that stands still until they move it.
 */
#ifndef KVF_CLOCK_H
#define KVF_CLOCK_H

#include <stdint.h>

#define KVF_MILLISECOND 1000000ull
#define KVF_SECOND 1000000000ull

typedef struct kvf_clock {
    uint64_t (*now)(void *context); /* nanoseconds since an arbitrary moment; never decreases */
    void *context;
} kvf_clock;

/** The machine's monotonic clock. */
extern const kvf_clock kvf_monotonic;

/** Lets this thread sleep for less than a second of the machine's time; a signal may wake it earlier. */
void kvf_pause(uint32_t ns);

static inline uint64_t kvf_now(const kvf_clock *clock) {
    return clock->now(clock->context);
}

#endif
