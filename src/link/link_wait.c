/* What somebody needs to know who sleeps until a link has something to do. */
#include <errno.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "link/link_inside.h"

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
        if (zmq_getsockopt(sockets[i], ZMQ_FD, &link->fds[link->fd_count], &bytes))
            return kvf_link_fail_zmq("ZMQ_FD");
        link->fd_count++;
    }
    return KVF_OK;
}

uint32_t kvf_link_fds(const kvf_link *link, int fds[KVF_LINK_FDS]) {
    memcpy(fds, link->fds, link->fd_count * sizeof *fds);
    return link->fd_count;
}

uint64_t kvf_link_due(const kvf_link *link) {
    return link->next_due_ns;
}
