#include "transport/neighbour.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/watch.h"
#include "transport/card.h"

_Static_assert(KVF_NEIGHBOUR_ID_BYTES == KVF_HOST_ID_BYTES, "the host's identity is an id");

/* ---- places ------------------------------------------------------------------------------------ */

kvf_neighbour_place kvf_neighbour_here(void) {
    kvf_neighbour_place here;
    struct stat found;
    kvf_host_identity(here.host);
    here.network = stat("/proc/self/ns/net", &found) == 0 ? (uint64_t)found.st_ino : 0;
    return here;
}

kvf_status kvf_neighbour_check(const kvf_neighbour_place *here, const kvf_neighbour_place *there) {
    static const unsigned char unknown[KVF_NEIGHBOUR_ID_BYTES];
    const bool known = memcmp(here->host, unknown, sizeof unknown) != 0;
    if (!known || memcmp(there->host, unknown, sizeof unknown) == 0)
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "the host of %s is not known: it could not read /proc/sys/kernel/random/boot_id",
                        known ? "the peer" : "this process");
    if (memcmp(there->host, here->host, sizeof unknown) != 0)
        return kvf_fail(KVF_E_UNSUPPORTED, "the peer is on another host");
    if (there->network != here->network)
        return kvf_fail(KVF_E_UNSUPPORTED, "the peer is in another network namespace");
    return KVF_OK;
}

/* ---- sockets ----------------------------------------------------------------------------------- */

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

static kvf_status open_socket(int *out) {
    *out = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    return *out < 0 ? kvf_fail(KVF_E_IO, "socket: %s", strerror(errno)) : KVF_OK;
}

kvf_status kvf_neighbour_listen(const char *prefix, const unsigned char name[KVF_NEIGHBOUR_ID_BYTES],
                                int backlog, int *out) {
    struct sockaddr_un address;
    const socklen_t length = kvf_neighbour_address(prefix, name, &address);
    kvf_status status = open_socket(out);
    if (!status && (bind(*out, (const struct sockaddr *)&address, length) != 0 || listen(*out, backlog) != 0))
        status = kvf_fail(KVF_E_IO, "bind and listen: %s", strerror(errno));
    return status;
}

kvf_status kvf_neighbour_connect(const char *prefix, const unsigned char name[KVF_NEIGHBOUR_ID_BYTES],
                                 int *fd) {
    struct sockaddr_un address;
    const socklen_t length = kvf_neighbour_address(prefix, name, &address);
    kvf_status status = *fd < 0 ? open_socket(fd) : KVF_OK;
    if (status || connect(*fd, (const struct sockaddr *)&address, length) == 0)
        return status;
    if (errno == ECONNREFUSED)
        return kvf_fail(KVF_E_PEER_LOST, "the endpoint that exported the card is gone");
    if (errno == EAGAIN)
        return kvf_fail(KVF_E_AGAIN, "the peer does not accept connections: its queue is full");
    return kvf_fail(errno == EACCES || errno == EPERM ? KVF_E_PERMISSION : KVF_E_IO, "connect: %s",
                    strerror(errno));
}

int kvf_neighbour_spare(void) {
    return open("/dev/null", O_RDONLY | O_CLOEXEC);
}

static int accept_one(int listening) {
    return accept4(listening, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
}

kvf_status kvf_neighbour_accept(int listening, int *spare, const void *refusal, size_t bytes, int *out) {
    const struct iovec part = {(void *)refusal, bytes};
    *out = accept_one(listening);
    if (*out >= 0 && *spare < 0)
        *spare = kvf_neighbour_spare();
    if (*out >= 0)
        return KVF_OK;
    if (errno == ENOMEM || errno == ENOBUFS)
        return kvf_fail(KVF_E_IO, "accept: %s", strerror(errno));
    if (errno != EMFILE && errno != ENFILE)
        return KVF_E_AGAIN;
    kvf_fd_close(spare);
    int refused = accept_one(listening);
    const int error = errno;
    const bool any = refused >= 0;
    if (any)
        (void)kvf_neighbour_send(refused, &part, 1, -1);
    kvf_fd_close(&refused);
    *spare = kvf_neighbour_spare();
    if (any || error == EAGAIN)
        return any ? KVF_E_LIMIT : KVF_E_AGAIN;
    return kvf_fail(KVF_E_IO, "accept: %s", strerror(error)); /* another thread has taken the spare one */
}

void kvf_neighbour_hang_up(int *socket) {
    if (*socket >= 0)
        (void)shutdown(*socket, SHUT_RDWR);
    kvf_fd_close(socket);
}

/* After the shutdown nobody connects any more. */
void kvf_neighbour_stop_listening(int *listening) {
    int waiting;
    if (*listening >= 0)
        (void)shutdown(*listening, SHUT_RDWR);
    while (*listening >= 0 && (waiting = accept_one(*listening)) >= 0)
        kvf_neighbour_hang_up(&waiting);
    kvf_fd_close(listening);
}

/* ---- processes --------------------------------------------------------------------------------- */

static kvf_status read_process(int socket, bool root_may, pid_t *pid) {
    struct ucred peer;
    socklen_t length = sizeof peer;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0)
        return kvf_fail(KVF_E_IO, "getsockopt(SO_PEERCRED): %s", strerror(errno));
    if (peer.uid != geteuid() && (peer.uid != 0 || !root_may))
        return kvf_fail(KVF_E_PERMISSION, "the peer runs as user %lu, and this process as user %lu",
                        (unsigned long)peer.uid, (unsigned long)geteuid());
    *pid = peer.pid;
    return KVF_OK;
}

kvf_status kvf_neighbour_process(int socket, pid_t *pid) {
    return read_process(socket, true, pid);
}

int kvf_neighbour_watch_process(pid_t pid) {
#ifdef SYS_pidfd_open
    return pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
#else
    (void)pid;
    errno = ENOSYS;
    return -1;
#endif
}

bool kvf_neighbour_has_ended(pid_t pid) {
    struct pollfd end = {kvf_neighbour_watch_process(pid), POLLIN, 0};
    if (end.fd < 0)
        return pid > 0 && errno == ESRCH;
    const bool ended = poll(&end, 1, 0) > 0;
    (void)close(end.fd);
    return ended;
}

kvf_status kvf_neighbour_know_process(int socket, pid_t *pid, int *watch) {
    kvf_status status = read_process(socket, false, pid);
    if (status)
        return status;
    *watch = kvf_neighbour_watch_process(*pid);
    if (*pid > 0 && *watch < 0 && errno == ESRCH)
        return kvf_fail(KVF_E_PEER_LOST, "the process that exported the card is gone");
    return KVF_OK;
}

/* The beginning of a file of the kernel; nothing if it cannot be read. */
static void read_text(const char *path, char *out, size_t bytes) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd >= 0 ? read(fd, out, bytes - 1) : 0;
    kvf_fd_close(&fd);
    out[got > 0 ? got : 0] = '\0';
}

/* Whether this process is in a time namespace in which the machine started at another time: the last line has the
 * difference, in seconds and nanoseconds. */
static bool has_a_time_of_its_own(void) {
    char text[256];
    read_text("/proc/self/timens_offsets", text, sizeof text);
    const char *at = strstr(text, "boottime");
    return at && strpbrk(at, "123456789");
}

/* Reads the 22nd field of the line; the second is a name in brackets, which may contain anything. */
uint64_t kvf_neighbour_started(pid_t pid) {
    char path[64], line[1024];
    (void)snprintf(path, sizeof path, "/proc/%ld/stat", (long)pid);
    read_text(path, line, sizeof line);
    const char *at = has_a_time_of_its_own() ? NULL : strrchr(line, ')');
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at + 1, NULL, 10) : 0;
}

/* ---- messages ---------------------------------------------------------------------------------- */

/* Room for one descriptor. */
typedef union control {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int))];
} control;

kvf_status kvf_neighbour_send(int socket, const struct iovec *parts, size_t count, int fd) {
    control with = {0};
    struct msghdr message = {.msg_iov = (struct iovec *)parts, .msg_iovlen = count};
    if (fd >= 0) {
        message.msg_control = with.bytes;
        message.msg_controllen = sizeof with.bytes;
        struct cmsghdr *item = CMSG_FIRSTHDR(&message);
        item->cmsg_level = SOL_SOCKET;
        item->cmsg_type = SCM_RIGHTS;
        item->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(item), &fd, sizeof fd);
    }
    ssize_t sent;
    do
        sent = sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent >= 0)
        return KVF_OK;
    if (errno == EAGAIN || errno == ENOBUFS)
        return kvf_fail(KVF_E_AGAIN, "the peer does not read its messages");
    if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN)
        return kvf_fail(KVF_E_PEER_LOST, "the peer has closed the connection");
    return kvf_fail(KVF_E_IO, "sendmsg: %s", strerror(errno));
}

/* The descriptor that came with a message, or -1. Because of alignment the space for one has room for two; further
 * descriptors are closed, and `surplus` says that there were some. If the kernel cuts off even the first, the process
 * has no descriptor free, which is `missed`. */
static int take_descriptor(struct msghdr *message, bool *surplus, bool *missed) {
    const bool cut = (message->msg_flags & MSG_CTRUNC) != 0;
    int fd = -1;
    *surplus = false;
    for (struct cmsghdr *item = CMSG_FIRSTHDR(message); item; item = CMSG_NXTHDR(message, item)) {
        if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t at = 0; CMSG_LEN(at + sizeof fd) <= item->cmsg_len; at += sizeof fd) {
            int one;
            memcpy(&one, CMSG_DATA(item) + at, sizeof one);
            if (fd < 0) {
                fd = one;
            } else {
                (void)close(one);
                *surplus = true;
            }
        }
    }
    *missed = cut && fd < 0;
    *surplus = *surplus || (cut && fd >= 0);
    return fd;
}

kvf_status kvf_neighbour_receive(int socket, void *out, size_t least, size_t most, size_t *bytes, int *fd) {
    control with;
    struct iovec part = {out, most};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    ssize_t got;
    int resets = 0, came = -1;
    bool surplus = false, missed = false;
    if (fd) {
        message.msg_control = with.bytes;
        message.msg_controllen = sizeof with.bytes;
        *fd = -1;
    }
    do /* if the other end closed with messages of ours unread, its own messages come after that error */
        got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_TRUNC | MSG_CMSG_CLOEXEC);
    while (got < 0 && (errno == EINTR || (errno == ECONNRESET && resets++ == 0)));
    if (got < 0 && errno == EAGAIN)
        return KVF_E_AGAIN;
    if (got < 0 && errno != ECONNRESET)
        return kvf_fail(KVF_E_PEER_LOST, "recvmsg: %s", strerror(errno));
    if (got >= 0 && fd) /* a message of no bytes may bring one, too */
        came = take_descriptor(&message, &surplus, &missed);
    *bytes = got > 0 ? (size_t)got : 0;
    if (*bytes >= least && *bytes <= most && !surplus) {
        if (fd)
            *fd = came;
        return missed
                   ? kvf_fail(KVF_E_IO, "this process has no free descriptor for one that the peer has sent")
                   : KVF_OK;
    }
    kvf_fd_close(&came);
    if (*bytes == 0)
        return kvf_fail(KVF_E_PEER_LOST, "the peer has closed the connection");
    if (surplus)
        return kvf_fail(KVF_E_PARSE, "a message with more than one descriptor");
    return kvf_fail(KVF_E_PARSE, "a message of %zu bytes; allowed: %zu to %zu", *bytes, least, most);
}
