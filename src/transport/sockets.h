/*
 * The TCP sockets of a library that hands out none of them, as UCX and libfabric.
 *
 * Neither has a setting for how often TCP sends again what was not acknowledged, or for how long. But each gives a
 * descriptor to wait for, which is an epoll of epolls with all its sockets, and the kernel lists what an epoll watches.
 */
#ifndef KVF_TRANSPORT_SOCKETS_H
#define KVF_TRANSPORT_SOCKETS_H

#include "base/base.h"

#define KVF_SOCKETS_LATE_MS 60000u /* the default of the fabrics' settings, and the most that they take */
#define KVF_SOCKETS_LATE_MS_MAX 3600000u

typedef struct kvf_sockets {
    int64_t due_ns; /* when to look at the sockets again; 0 at first */
    /** For how long TCP keeps what is not acknowledged: then it breaks the connection, and nothing of it arrives later. A
     * host that sends nothing may be silent as long. */
    uint32_t late_ms;
} kvf_sockets;

/**
 * Once in a second, makes TCP try every second (kvf_tcp_try_often()), for up to `late_ms`, on all sockets that the library
 * has now.
 *
 * @param fd  the library's descriptor; -1: nothing is done
 */
void kvf_sockets_try_often(kvf_sockets *sockets, int fd);

#endif
