#include "transport/shm/shm_wire.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

/* Room for one descriptor. */
typedef union control {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int))];
} control;

static kvf_status send_parts(int socket, struct iovec *parts, size_t count, int fd) {
    control with = {0};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
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

kvf_status kvf_shm_send(int socket, const void *message, size_t bytes, int fd) {
    struct iovec part = {(void *)message, bytes};
    return send_parts(socket, &part, 1, fd);
}

kvf_status kvf_shm_send_two(int socket, const void *head, size_t head_bytes, const void *tail,
                            size_t tail_bytes) {
    struct iovec parts[2] = {{(void *)head, head_bytes}, {(void *)tail, tail_bytes}};
    return send_parts(socket, parts, 2, -1);
}

/* The descriptor that came with a message, or -1. Because of alignment the space for one has room for two; further
 * descriptors are closed, and `surplus` says that there were some. */
static int take_descriptor(struct msghdr *message, bool *surplus) {
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
    return fd;
}

kvf_status kvf_shm_receive(int socket, kvf_shm_packet *packet) {
    control with;
    struct iovec part = {packet->as.raw, sizeof packet->as.raw};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = with.bytes, .msg_controllen = sizeof with.bytes};
    packet->fd = -1;
    ssize_t got;
    int resets = 0;
    do /* if the other end closed with messages of ours unread, its own messages come after that error */
        got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (got < 0 && (errno == EINTR || (errno == ECONNRESET && resets++ == 0)));
    if (got < 0 && errno == EAGAIN)
        return KVF_E_AGAIN;
    if (got < 0 && errno == ECONNRESET)
        got = 0;
    if (got < 0)
        return kvf_fail(KVF_E_PEER_LOST, "recvmsg: %s", strerror(errno));
    bool surplus;
    packet->fd = take_descriptor(&message, &surplus);
    packet->bytes = (size_t)got;
    if (packet->bytes >= sizeof(kvf_shm_header) && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) &&
        !surplus)
        return KVF_OK;
    if (packet->fd >= 0)
        (void)close(packet->fd);
    packet->fd = -1;
    if (got == 0)
        return kvf_fail(KVF_E_PEER_LOST, "the peer has closed the connection");
    if (surplus)
        return kvf_fail(KVF_E_PARSE, "a message with more than one descriptor");
    return kvf_fail(KVF_E_PARSE, "a message of %zd bytes; allowed: %zu to %u", got, sizeof(kvf_shm_header),
                    SHM_PACKET_MAX);
}

bool kvf_shm_fits(const kvf_shm_packet *packet, size_t fixed, size_t element_bytes, uint32_t most) {
    uint32_t count = packet->as.header.count;
    return count >= 1 && count <= most && packet->bytes == fixed + count * element_bytes;
}

kvf_status kvf_shm_map_foreign(int fd, uint64_t bytes, unsigned char **out) {
    struct stat stat;
    struct statfs system;
    if (fd < 0 || bytes == 0 || fstat(fd, &stat) != 0 || stat.st_size < 0 || (uint64_t)stat.st_size < bytes)
        return kvf_fail(KVF_E_PARSE, "shared memory is smaller than the %llu bytes that the peer claims",
                        (unsigned long long)bytes);
    /* Memory of hugetlbfs is refused, for accessing it may fault if the machine has no more huge pages. */
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstatfs(fd, &system) != 0 || system.f_type != TMPFS_MAGIC)
        return kvf_fail(KVF_E_PARSE, "shared memory is not sealed against shrinking");
    void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        return kvf_fail(KVF_E_NOMEM, "mmap of %llu shared bytes: %s", (unsigned long long)bytes,
                        strerror(errno));
    (void)madvise(mapped, bytes, MADV_HUGEPAGE);
    *out = mapped;
    return KVF_OK;
}

static kvf_status map_own(int fd, uint64_t bytes, unsigned char **out) {
    if (ftruncate(fd, (off_t)bytes) != 0)
        return kvf_fail(KVF_E_NOMEM, "no shared memory for %llu bytes: %s", (unsigned long long)bytes,
                        strerror(errno));
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return kvf_fail(KVF_E_IO, "fcntl(F_ADD_SEALS): %s", strerror(errno));
    void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        return kvf_fail(KVF_E_NOMEM, "no address space for %llu bytes: %s", (unsigned long long)bytes,
                        strerror(errno));
    (void)madvise(mapped, bytes, MADV_HUGEPAGE);
    *out = mapped;
    return KVF_OK;
}

kvf_status kvf_shm_make_memory(uint64_t *bytes, int *fd, unsigned char **out) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t rounded;
    if (!kvf_add(*bytes, page - 1, &rounded) || rounded > INT64_MAX)
        return kvf_fail(KVF_E_NOMEM, "no shared memory for %llu bytes", (unsigned long long)*bytes);
    rounded -= rounded % page;
    int made = memfd_create("kvferry", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made < 0)
        return kvf_fail(KVF_E_IO, "memfd_create: %s", strerror(errno));
    kvf_status status = map_own(made, rounded, out);
    if (status) {
        (void)close(made);
        return status;
    }
    *bytes = rounded;
    *fd = made;
    return KVF_OK;
}
