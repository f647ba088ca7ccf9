#include "transport/neighbour.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

/* Abstract names begin with NUL, belong to no file, and vanish with the socket. */
socklen_t kvf_neighbour_address(const char *prefix, const unsigned char name[KVF_NEIGHBOUR_ID_BYTES],
                                struct sockaddr_un *out) {
    static const char digits[] = "0123456789abcdef";
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    size_t at = 1 + (size_t)snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "%s", prefix);
    KVF_ASSERT(at + 2 * KVF_NEIGHBOUR_ID_BYTES <= sizeof out->sun_path);
    for (size_t i = 0; i < KVF_NEIGHBOUR_ID_BYTES; i++) {
        out->sun_path[at++] = digits[name[i] >> 4];
        out->sun_path[at++] = digits[name[i] & 15];
    }
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + at);
}

uint64_t kvf_neighbour_network(void) {
    struct stat found;
    return stat("/proc/self/ns/net", &found) == 0 ? (uint64_t)found.st_ino : 0;
}

kvf_status kvf_neighbour_process(int socket, pid_t *pid) {
    struct ucred peer;
    socklen_t length = sizeof peer;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0)
        return kvf_fail(KVF_E_IO, "getsockopt(SO_PEERCRED): %s", strerror(errno));
    if (peer.uid != geteuid() && peer.uid != 0)
        return kvf_fail(KVF_E_PERMISSION, "the peer runs as user %lu; allowed: %lu (this process's) and 0",
                        (unsigned long)peer.uid, (unsigned long)geteuid());
    *pid = peer.pid;
    return KVF_OK;
}
