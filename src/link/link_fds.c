/* File descriptors: those a link needs, and those that a sleeper polls. */
#include "base/descriptors.h"
#include "link/link_inside.h"

/* A context with a listener, a caller, a monitor and a guard opens a dozen at most. */
#define DESCRIPTORS_OF_A_LINK 20

kvf_status kvf_link_check_descriptors(void) {
    return kvf_descriptors_check("a link", DESCRIPTORS_OF_A_LINK);
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
