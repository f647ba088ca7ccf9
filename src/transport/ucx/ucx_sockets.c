/*
 * The sockets of a UCX that uses TCP.
 *
 * UCX has no setting for how often TCP retransmits, and gives access to no socket. But the descriptor of its worker is
 * an epoll of epolls with all its sockets, and the kernel lists what an epoll contains.
 */
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/tcp.h"
#include "transport/ucx/ucx.h"

#define LOOK_EVERY_NS 1000000000
#define UNACKNOWLEDGED_MS 60000 /* as long as a host that sends nothing may be silent */
#define DEPTH_MAX 3u            /* the worker's epoll, its interfaces' epolls, and their sockets */

static bool is_tcp(int fd) {
    int protocol = 0;
    socklen_t bytes = sizeof protocol;
    return getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &bytes) == 0 && protocol == IPPROTO_TCP;
}

/* How the line of each descriptor begins that an epoll watches. */
static const char watched[] = "tfd:";

/* A descriptor that is neither a socket nor an epoll has no lines of this form. */
static void try_often(int fd, uint32_t depth) { /* NOLINT(misc-no-recursion): at most DEPTH_MAX */
    char path[64], line[256];
    if (is_tcp(fd)) {
        kvf_tcp_try_for(fd, UNACKNOWLEDGED_MS);
        kvf_tcp_try_often(fd);
        return;
    }
    if (depth == 0)
        return;
    (void)snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, watched, strlen(watched)) == 0)
            try_often((int)strtol(line + strlen(watched), NULL, 10), depth - 1);
    if (file)
        (void)fclose(file);
}

void kvf_ucx_try_often(kvf_ucx_endpoint *endpoint) {
    struct timespec at;
    (void)clock_gettime(CLOCK_MONOTONIC_COARSE, &at);
    const int64_t now = (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
    if (!endpoint->emulates || now < endpoint->sockets_due_ns)
        return;
    endpoint->sockets_due_ns = now + LOOK_EVERY_NS;
    int fd;
    if (endpoint->ucx->ucp_worker_get_efd(endpoint->worker, &fd) == UCS_OK)
        try_often(fd, DEPTH_MAX);
}
