#include "transport/shm/shm_process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Abstract names begin with NUL, belong to no file, and vanish with the socket. */
socklen_t kvf_shm_socket_address(const unsigned char name[SHM_ID_BYTES], struct sockaddr_un *out) {
    static const char digits[] = "0123456789abcdef";
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    size_t at = 1 + (size_t)snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "kvferry-");
    for (size_t i = 0; i < SHM_ID_BYTES; i++) {
        out->sun_path[at++] = digits[name[i] >> 4];
        out->sun_path[at++] = digits[name[i] & 15];
    }
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + at);
}

uint64_t kvf_shm_network_namespace(void) {
    struct stat stat_of_it;
    return stat("/proc/self/ns/net", &stat_of_it) == 0 ? (uint64_t)stat_of_it.st_ino : 0;
}

/* The 22nd field of the line; the second is a name in brackets, with anything in it. */
uint64_t kvf_shm_process_started(pid_t pid) {
    char path[64], line[1024];
    (void)snprintf(path, sizeof path, "/proc/%ld/stat", (long)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t got = read(fd, line, sizeof line - 1);
    (void)close(fd);
    line[got > 0 ? got : 0] = '\0';
    const char *at = strrchr(line, ')');
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at + 1, NULL, 10) : 0;
}

kvf_status kvf_shm_peer_process(int socket, pid_t *pid) {
    struct ucred peer;
    socklen_t length = sizeof peer;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0)
        return kvf_fail(KVF_E_IO, "getsockopt(SO_PEERCRED): %s", strerror(errno));
    if (peer.uid != geteuid() && peer.uid != 0)
        return kvf_fail(KVF_E_PERMISSION, "the peer runs as user %lu; allowed %lu (ours) and 0",
                        (unsigned long)peer.uid, (unsigned long)geteuid());
    *pid = peer.pid;
    return KVF_OK;
}

int kvf_shm_process_open(pid_t pid) {
#ifdef SYS_pidfd_open
    return pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
#else
    (void)pid;
    return -1;
#endif
}
