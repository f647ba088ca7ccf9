/* File descriptors: those a link needs, and those that a sleeper polls. */
#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "link/link_inside.h"

/* A context with a listener, a caller, a monitor and a guard opens a dozen at most. */
#define DESCRIPTORS_OF_A_LINK 20

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

kvf_status kvf_link_note_fds(kvf_zmq_link *link) {
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
