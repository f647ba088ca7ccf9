/* File descriptors: those a link needs, and those that a sleeper polls. */
#include <sys/resource.h>

#include "base/descriptors.h"
#include "link/link_inside.h"

/* A context with a listener, a caller, their monitors and a guard opens some 20 at most. */
#define DESCRIPTORS_OF_A_LINK 28

/* Three quarters of what the process may have, and not less than one. */
uint32_t kvf_link_most_lines(void) {
    struct rlimit limit;
    uint64_t most = UINT32_MAX;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        most = kvf_min_u64(most, limit.rlim_cur - limit.rlim_cur / 4);
    return (uint32_t)kvf_max_u64(most, 1);
}

uint32_t kvf_link_most_guests(uint32_t wanted) {
    uint32_t most = kvf_link_most_lines();
    return wanted && wanted < most ? wanted : most;
}

kvf_status kvf_link_check_descriptors(void) {
    return kvf_descriptors_check("a link", DESCRIPTORS_OF_A_LINK);
}

kvf_status kvf_link_note_fds(kvf_zmq_link *link) {
    void *const sockets[] = {link->listener, link->caller, link->monitor, link->guard, link->door};
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
