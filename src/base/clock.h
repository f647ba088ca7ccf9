/*
 * Time, which is given to whoever needs it: production gives the machine's clock, tests and simulations one
 * of their own, which stands still until they move it.
 */
#ifndef KVF_CLOCK_H
#define KVF_CLOCK_H

#include <stdint.h>

typedef struct kvf_clock {
    uint64_t (*now)(void *context); /* nanoseconds since some moment; never goes back */
    void *context;
} kvf_clock;

/** The machine's monotonic clock. */
extern const kvf_clock kvf_monotonic;

static inline uint64_t kvf_now(const kvf_clock *clock) {
    return clock->now(clock->context);
}

#endif
