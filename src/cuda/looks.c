#include "cuda/looks.h"

#include <errno.h>
#include <sys/timerfd.h>

#include "base/watch.h"

#define PAUSE_LEAST_NS 20000u
#define PAUSE_MOST_NS 1000000u

kvf_status kvf_looks_open(kvf_looks *looks) {
    *looks = (kvf_looks){timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), 0};
    return looks->fd < 0 ? kvf_fail(KVF_E_IO, "timerfd_create: %s", strerror(errno)) : KVF_OK;
}

/* Setting or stopping a timer also clears its expiry. */
void kvf_looks_set(kvf_looks *looks, bool waiting, bool changed) {
    const uint64_t longer = kvf_min_u64(2 * looks->pause_ns, PAUSE_MOST_NS);
    looks->pause_ns = waiting && !changed ? kvf_max_u64(longer, PAUSE_LEAST_NS) : PAUSE_LEAST_NS;
    const struct itimerspec once = {.it_value.tv_nsec = waiting ? (long)looks->pause_ns : 0};
    (void)timerfd_settime(looks->fd, 0, &once, NULL);
}

void kvf_looks_close(kvf_looks *looks) {
    kvf_fd_close(&looks->fd);
}
