#include "transport/shm/shm_process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

socklen_t kvf_shm_socket_address(const unsigned char name[SHM_ID_BYTES], struct sockaddr_un *out) {
    return kvf_neighbour_address("kvferry-", name, out);
}

/* Reads the 22nd field of the line; the second is a name in brackets, which may contain anything. */
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

int kvf_shm_process_open(pid_t pid) {
#ifdef SYS_pidfd_open
    return pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
#else
    (void)pid;
    return -1;
#endif
}
