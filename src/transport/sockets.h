/*
 * The TCP sockets of a library that hands out none of them, as UCX and libfabric.
 *
 * Neither has a setting for how often TCP sends again what was not acknowledged. But each gives a descriptor to wait
 * for, which is an epoll of epolls with all its sockets, and the kernel lists what an epoll watches.
 */
#ifndef KVF_TRANSPORT_SOCKETS_H
#define KVF_TRANSPORT_SOCKETS_H

#include "base/base.h"

/** When to look at the sockets again; zeroed at first. */
typedef struct kvf_sockets {
    int64_t due_ns;
} kvf_sockets;

/**
 * Once in a second, makes TCP try every second (kvf_tcp_try_often()), for up to a minute, on all sockets that the
 * library has now.
 *
 * @param fd  the library's descriptor; -1: nothing is done
 */
void kvf_sockets_try_often(kvf_sockets *sockets, int fd);

#endif
