#include "transport/shm/shm_wire.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

socklen_t kvf_shm_socket_address(const unsigned char name[SHM_ID_BYTES], struct sockaddr_un *out) {
    return kvf_neighbour_address(SHM_SOCKET_PREFIX, name, out);
}

kvf_status kvf_shm_send(int socket, const void *message, size_t bytes, int fd) {
    struct iovec part = {(void *)message, bytes};
    return kvf_neighbour_send(socket, &part, 1, fd);
}

kvf_status kvf_shm_send_two(int socket, const void *head, size_t head_bytes, const void *tail,
                            size_t tail_bytes) {
    struct iovec parts[2] = {{(void *)head, head_bytes}, {(void *)tail, tail_bytes}};
    return kvf_neighbour_send(socket, parts, 2, -1);
}

kvf_status kvf_shm_receive(int socket, kvf_shm_packet *packet) {
    return kvf_neighbour_receive(socket, packet->as.raw, sizeof packet->as.header, sizeof packet->as.raw,
                                 &packet->bytes, &packet->fd);
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
