/* Waiting for sockets, file descriptors of others, other threads, and the time to dial again. */
#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "agent/link_inside.h"

/* A context with a listener, a caller, a monitor and a guard opens a dozen at most. */
#define DESCRIPTORS_OF_A_LINK 20

uint64_t kvf_now(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

kvf_status kvf_link_check_descriptors(void) {
    int opened[DESCRIPTORS_OF_A_LINK];
    int count = 0;
    int error = 0;
    while (count < DESCRIPTORS_OF_A_LINK && !error) {
        opened[count] = eventfd(0, EFD_CLOEXEC);
        if (opened[count] < 0)
            error = errno;
        else
            count++;
    }
    while (count > 0)
        (void)close(opened[--count]);
    return error ? kvf_fail(KVF_E_IO, "a link needs %d file descriptors: %s", DESCRIPTORS_OF_A_LINK,
                            zmq_strerror(error))
                 : KVF_OK;
}

kvf_status kvf_link_prepare_wait(kvf_link *link) {
    void *const sockets[] = {link->listener, link->caller, link->monitor, link->guard};
    for (size_t i = 0; i < sizeof sockets / sizeof *sockets; i++) {
        size_t bytes = sizeof(int);
        if (!sockets[i])
            continue;
        if (zmq_getsockopt(sockets[i], ZMQ_FD, &link->socket_fds[link->socket_count], &bytes))
            return kvf_link_fail_zmq("ZMQ_FD");
        link->socket_count++;
    }
    link->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return link->wake_fd < 0 ? kvf_fail(KVF_E_IO, "eventfd: %s", zmq_strerror(errno)) : KVF_OK;
}

static bool make_room(kvf_link *link, uint32_t fd_count) {
    uint64_t needed = (uint64_t)fd_count + link->socket_count + 1;
    if (needed <= link->polled_capacity)
        return true;
    struct pollfd *larger =
        needed <= UINT32_MAX ? kvf_resize(link->polled, (size_t)needed, sizeof *link->polled) : NULL;
    if (!larger)
        return false;
    link->polled = larger;
    link->polled_capacity = (uint32_t)needed;
    return true;
}

void kvf_link_wait(kvf_link *link, const int *fds, uint32_t fd_count, uint64_t timeout_ns) {
    uint64_t due = atomic_load(&link->next_due_ns);
    uint64_t count = 0;
    uint64_t woken;
    if (due != KVF_LINK_NEVER) {
        uint64_t now = kvf_now();
        timeout_ns = kvf_min_u64(timeout_ns, due > now ? due - now : 0);
    }
    struct pollfd few[sizeof link->socket_fds / sizeof *link->socket_fds + 1];
    struct pollfd *polled = few;
    if (fd_count > 0 && make_room(link, fd_count)) {
        polled = link->polled;
        for (uint32_t i = 0; i < fd_count; i++)
            polled[count++] = (struct pollfd){.fd = fds[i], .events = POLLIN};
    } else if (fd_count > 0) {
        timeout_ns = kvf_min_u64(timeout_ns, 1000000); /* no memory to watch them with: look again soon */
    }
    for (uint32_t i = 0; i < link->socket_count; i++)
        polled[count++] = (struct pollfd){.fd = link->socket_fds[i], .events = POLLIN};
    polled[count++] = (struct pollfd){.fd = link->wake_fd, .events = POLLIN};

    struct timespec timeout = {.tv_sec = (time_t)(timeout_ns / 1000000000u),
                               .tv_nsec = (long)(timeout_ns % 1000000000u)};
    (void)ppoll(polled, count, &timeout, NULL);
    while (read(link->wake_fd, &woken, sizeof woken) < 0 && errno == EINTR) {
    }
}

void kvf_link_wake(kvf_link *link) {
    const uint64_t one = 1;
    /* It fails only when the counter is at its end, and then it is readable already. */
    while (write(link->wake_fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
}
