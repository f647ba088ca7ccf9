#include "transport/sockets.h"

#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

#include "base/tcp.h"

#define LOOK_EVERY_NS 1000000000
#define DEPTH_MAX 3u /* the library's epoll, those of its parts, and their sockets */

/* Whether a second has passed since this was true. */
static bool is_due(kvf_sockets *sockets) {
    struct timespec at;
    (void)clock_gettime(CLOCK_MONOTONIC_COARSE, &at);
    const int64_t now = (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
    if (now < sockets->due_ns)
        return false;
    sockets->due_ns = now + LOOK_EVERY_NS;
    return true;
}

static bool is_tcp(int fd) {
    int protocol = 0;
    socklen_t bytes = sizeof protocol;
    return getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &bytes) == 0 && protocol == IPPROTO_TCP;
}

/* How the line of each descriptor begins that an epoll watches, and in it the inode's number, in hexadecimal. */
static const char watched[] = "tfd:", inode[] = " ino:";

/* Whether a descriptor is still that of the socket that an epoll watches by this number. An epoll goes on watching a
 * socket that was closed while a forked child has it, and the number may then be that of another socket of the program. */
static bool is_as_watched(int fd, const char *line) {
    const char *at = strstr(line, inode);
    struct stat found;
    return !at || (fstat(fd, &found) == 0 && found.st_ino == strtoull(at + strlen(inode), NULL, 16));
}

/* A descriptor that is neither a socket nor an epoll has no lines of this form. */
static void try_often(int fd, uint32_t late_ms,
                      uint32_t depth) { /* NOLINT(misc-no-recursion): at most DEPTH_MAX */
    char path[64], line[256];
    if (is_tcp(fd)) {
        kvf_tcp_try_for(fd, late_ms);
        kvf_tcp_try_often(fd);
        return;
    }
    if (depth == 0)
        return;
    (void)snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        const bool watches = strncmp(line, watched, strlen(watched)) == 0;
        const int next = watches ? (int)strtol(line + strlen(watched), NULL, 10) : -1;
        if (watches && is_as_watched(next, line))
            try_often(next, late_ms, depth - 1);
    }
    if (file)
        (void)fclose(file);
}

void kvf_sockets_try_often(kvf_sockets *sockets, int fd) {
    if (fd >= 0 && is_due(sockets))
        try_often(fd, sockets->late_ms, DEPTH_MAX);
}
