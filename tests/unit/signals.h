/*
 * Signals that end calls: a poll() of this program, also one that a library makes, fails with EINTR two times out of
 * three if it finds nothing. In this way even ZeroMQ's calls that do not wait are interrupted, which poll first; signals
 * that a timer sends hit them too rarely for a test. Included by one file of a program.
 */
#ifndef KVF_TEST_SIGNALS_H
#define KVF_TEST_SIGNALS_H

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <time.h>

#define SIGNALS_PHASES 3u

/** In this thread: whether signals come, and how many calls ago the last one was let through. */
static _Thread_local bool signals_come;
static _Thread_local unsigned signals_phase;

/* Visible, so that libraries call it. */
__attribute__((visibility("default"))) int poll(struct pollfd *fds, nfds_t nfds, int timeout) {
    static const struct timespec none = {0};
    const struct timespec left = {.tv_sec = timeout / 1000, .tv_nsec = timeout % 1000 * 1000000L};
    const bool ends = signals_come && signals_phase++ % SIGNALS_PHASES != 0;
    const int ready = ppoll(fds, nfds, ends ? &none : timeout < 0 ? NULL : &left, NULL);
    if (!ends || ready != 0)
        return ready;
    errno = EINTR;
    return -1;
}

/** Signals come from now on; phases below SIGNALS_PHASES differ in which calls they end. */
static inline void signals_begin(unsigned phase) {
    signals_come = true;
    signals_phase = phase;
}

static inline void signals_end(void) {
    signals_come = false;
}

#endif
