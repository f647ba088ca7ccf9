#include <time.h>

#include "base/clock.h"

static uint64_t monotonic_now(void *context) {
    struct timespec now;
    (void)context;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * KVF_SECOND + (uint64_t)now.tv_nsec;
}

void kvf_pause(uint32_t ns) {
    (void)nanosleep(&(const struct timespec){.tv_nsec = ns}, NULL);
}

const kvf_clock kvf_monotonic = {monotonic_now, 0};
