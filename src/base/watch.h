/*
 * What a loop waits for: a set of descriptors, which is a descriptor itself, readable while one of them is; and a
 * timer. One thread at a time.
 */
#ifndef KVF_WATCH_H
#define KVF_WATCH_H

#include "base/base.h"

/** Closes a descriptor and sets it to -1; one that is -1 is accepted. */
void kvf_fd_close(int *fd);

/** Opens an empty set, an epoll. @return KVF_OK; KVF_E_IO, `*set` is -1, when there are too many descriptors */
kvf_status kvf_watch_open(int *set);

/** Adds a descriptor, with what epoll_wait() is to give when it is readable. @return KVF_OK or KVF_E_IO */
kvf_status kvf_watch_add(int set, int fd, void *what);

/** The same for a descriptor that is given when something new happens to it, however long it stays readable. */
kvf_status kvf_watch_edges(int set, int fd, void *what);

/** The same for a descriptor that is given once: `again` gives it once more. */
kvf_status kvf_watch_once(int set, int fd, bool again, void *what);

/** Removes a descriptor that another owner closes. */
void kvf_watch_remove(int set, int fd);

/** Removes a descriptor, closes it and sets it to -1; one that is -1 is accepted. Closing alone does not remove it if a
 * forked child holds the same file open. */
void kvf_watch_close(int set, int *fd);

/** `fd` is -1 while it is not open: initialise with {-1, UINT64_MAX}. */
typedef struct kvf_timer {
    int fd;
    uint64_t at_ns; /**< when `fd` becomes readable, by the monotonic clock; UINT64_MAX: it is not set */
} kvf_timer;

/** @return KVF_OK; KVF_E_IO when the process has too many descriptors */
kvf_status kvf_timer_open(kvf_timer *timer);

/** Makes the descriptor readable from `at_ns` on, and not before; UINT64_MAX: never. */
void kvf_timer_set(kvf_timer *timer, uint64_t at_ns);

/** Makes it readable at `at_ns` at the latest: an earlier time stays. */
static inline void kvf_timer_by(kvf_timer *timer, uint64_t at_ns) {
    if (at_ns < timer->at_ns)
        kvf_timer_set(timer, at_ns);
}

/** Closes it; one that is not open is accepted. */
void kvf_timer_close(kvf_timer *timer);

#endif
