#include "base/watch.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/clock.h"

void kvf_fd_close(int *fd) {
    if (*fd >= 0)
        (void)close(*fd);
    *fd = -1;
}

kvf_status kvf_watch_open(int *set) {
    *set = epoll_create1(EPOLL_CLOEXEC);
    return *set < 0 ? kvf_fail(KVF_E_IO, "epoll_create1: %s", strerror(errno)) : KVF_OK;
}

static kvf_status watch(int set, int how, int fd, uint32_t events, void *what) {
    struct epoll_event event = {.events = events, .data.ptr = what};
    return epoll_ctl(set, how, fd, &event) ? kvf_fail(KVF_E_IO, "epoll_ctl: %s", strerror(errno)) : KVF_OK;
}

kvf_status kvf_watch_add(int set, int fd, void *what) {
    return watch(set, EPOLL_CTL_ADD, fd, EPOLLIN, what);
}

kvf_status kvf_watch_edges(int set, int fd, void *what) {
    return watch(set, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLET, what);
}

kvf_status kvf_watch_once(int set, int fd, bool again, void *what) {
    return watch(set, again ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLONESHOT, what);
}

void kvf_watch_remove(int set, int fd) {
    (void)epoll_ctl(set, EPOLL_CTL_DEL, fd, NULL);
}

void kvf_watch_close(int set, int *fd) {
    if (*fd >= 0)
        kvf_watch_remove(set, *fd);
    kvf_fd_close(fd);
}

/* ---- timers ---------------------------------------------------------------------------------- */

kvf_status kvf_timer_open(kvf_timer *timer) {
    *timer = (kvf_timer){timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), UINT64_MAX};
    return timer->fd < 0 ? kvf_fail(KVF_E_IO, "timerfd_create: %s", strerror(errno)) : KVF_OK;
}

/* Setting a timer also clears its expiry; a time of 0 would stop it. */
void kvf_timer_set(kvf_timer *timer, uint64_t at_ns) {
    const uint64_t ns = at_ns == UINT64_MAX ? 0 : kvf_max_u64(at_ns, 1);
    const struct itimerspec once = {
        .it_value = {.tv_sec = (time_t)(ns / KVF_SECOND), .tv_nsec = (long)(ns % KVF_SECOND)}};
    timer->at_ns = timerfd_settime(timer->fd, TFD_TIMER_ABSTIME, &once, NULL) ? UINT64_MAX : at_ns;
}

void kvf_timer_close(kvf_timer *timer) {
    kvf_fd_close(&timer->fd);
    timer->at_ns = UINT64_MAX;
}
