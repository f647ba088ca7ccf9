#include "transport/shm/shm_choice.h"

#include <time.h>

#define SERVED_BYTES_MIN (64u << 10) /* for less the owner need not be woken */
#define TRY_EVERY_BYTES (64u << 20)
#define TRY_FIRST_BYTES (2u << 20)
#define TRY_DIRECT 1u
#define TRY_SERVED 6u     /* more than fit into the buffer, for what counts is how they follow each other */
#define WEIGHT 0.125f     /* of a new measurement */
#define SURPRISE_MAX 4.0f /* what takes longer was somebody else's doing, in part */
#define PAUSE_MIN_NS 5000000ull
#define PAUSE_MAX_NS 1000000000ull

uint64_t kvf_shm_now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint32_t length_class(const kvf_slice *slice) {
    uint64_t bytes = slice->bytes / (slice->count ? slice->count : 1) / 64;
    uint32_t class = 0;
    while (bytes > 0 && class < SHM_LENGTHS - 1) {
        bytes /= 2;
        class ++;
    }
    return class;
}

/* Until it was measured: a system call finds each run's pages, a copy only misses the caches. */
static float cost(const kvf_shm_choice *choice, uint32_t class, kvf_shm_way way) {
    float measured = choice->lengths[class].ns_per_byte[way];
    float run_bytes = (float)(48u << class);
    if (measured > 0)
        return measured;
    return way == SHM_WAY_DIRECT ? 250 / run_bytes + 0.15f : 30 / run_bytes + 0.12f;
}

kvf_shm_way kvf_shm_choice_make(kvf_shm_choice *choice, const kvf_slice *slice, bool waiting) {
    uint32_t class = length_class(slice);
    if (choice->served_after_ns && kvf_shm_now_ns() < choice->served_after_ns)
        return SHM_WAY_DIRECT;
    if (!waiting && slice->bytes < SERVED_BYTES_MIN)
        return SHM_WAY_DIRECT;
    bool served = cost(choice, class, SHM_WAY_SERVED) < cost(choice, class, SHM_WAY_DIRECT);
    bool other_known = choice->lengths[class].ns_per_byte[!served] > 0;
    choice->lengths[class].bytes += slice->bytes;
    if (choice->lengths[class].trying == 0 &&
        choice->lengths[class].bytes > (other_known ? TRY_EVERY_BYTES : TRY_FIRST_BYTES)) {
        choice->lengths[class].bytes = 0;
        choice->lengths[class].trying = served ? TRY_DIRECT : TRY_SERVED;
    }
    if (choice->lengths[class].trying > 0) {
        choice->lengths[class].trying--;
        served = !served;
    }
    return served ? SHM_WAY_SERVED : SHM_WAY_DIRECT;
}

void kvf_shm_choice_learn(kvf_shm_choice *choice, kvf_shm_way way, const kvf_slice *slice, uint64_t ns) {
    float *known = &choice->lengths[length_class(slice)].ns_per_byte[way];
    if (slice->bytes < 4096)
        return;
    float now = (float)ns / (float)slice->bytes;
    if (*known > 0 && now > SURPRISE_MAX * *known)
        now = SURPRISE_MAX * *known;
    *known = *known > 0 ? *known + WEIGHT * (now - *known) : now;
}

void kvf_shm_choice_stalled(kvf_shm_choice *choice) {
    choice->pause_ns = kvf_min_u64(kvf_max_u64(choice->pause_ns * 2, PAUSE_MIN_NS), PAUSE_MAX_NS);
    choice->served_after_ns = kvf_shm_now_ns() + choice->pause_ns;
}

void kvf_shm_choice_answered(kvf_shm_choice *choice) {
    choice->pause_ns = 0;
}
