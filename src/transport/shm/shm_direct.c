/*
 * Reading and writing memory that another process's caller brought, by one system call for up to 1024 runs.
 *
 * Such a call names its target by a process id, which the kernel may give to a new process once the old one
 * is dead. So a read counts only if the old process is found alive after the call; and nothing is written
 * unless it was alive just before.
 */
#include <errno.h>

#include "transport/shm/shm.h"

typedef struct vectors {
    struct iovec *of;
    size_t count;
} vectors;

/* Adds a piece of memory; joins it to the last one if they touch. */
static void add(vectors *to, void *address, size_t bytes) {
    if (bytes == 0)
        return;
    if (to->count > 0) {
        struct iovec *last = &to->of[to->count - 1];
        if ((unsigned char *)last->iov_base + last->iov_len == address) {
            last->iov_len += bytes;
            return;
        }
    }
    to->of[to->count++] = (struct iovec){address, bytes};
}

/* Removes the first `bytes` bytes, which were moved. */
static void take_off(vectors *from, size_t bytes) {
    while (from->count > 0 && bytes >= from->of->iov_len) {
        bytes -= from->of->iov_len;
        from->of++;
        from->count--;
    }
    if (bytes > 0) {
        from->of->iov_base = (unsigned char *)from->of->iov_base + bytes;
        from->of->iov_len -= bytes;
    }
}

static kvf_status lost(const char *why) {
    return kvf_fail(KVF_E_PEER_LOST, "%s", why);
}

/* Counts the moved bytes in `all_moved`. */
static kvf_status move_all(const kvf_shm_link *link, kvf_direction direction, vectors local, vectors remote,
                           uint64_t *all_moved) {
    bool write = direction == KVF_WRITE;
    const char *gone;
    while (local.count > 0) {
        if (write && (gone = kvf_shm_link_gone(link)))
            return lost(gone);
        ssize_t moved = write
                            ? process_vm_writev(link->pid, local.of, local.count, remote.of, remote.count, 0)
                            : process_vm_readv(link->pid, local.of, local.count, remote.of, remote.count, 0);
        int error = errno;
        gone = kvf_shm_link_gone(link);
        if (gone || (moved < 0 && error == ESRCH))
            return lost(gone ? gone : "the peer's process has ended");
        if (moved < 0 && (error == EPERM || error == ENOSYS || error == EACCES))
            return KVF_E_UNSUPPORTED;
        if (moved <= 0)
            return kvf_fail(KVF_E_IO, "%s: %s", write ? "process_vm_writev" : "process_vm_readv",
                            moved < 0 ? strerror(error) : "nothing moved");
        *all_moved += (uint64_t)moved;
        take_off(&local, (size_t)moved);
        take_off(&remote, (size_t)moved);
    }
    return KVF_OK;
}

/* Puts the run at which the copy stopped before the detail. */
static kvf_status name_run(const kvf_run *runs, size_t count, uint64_t moved) {
    while (count > 1 && moved >= runs->bytes) {
        moved -= runs->bytes;
        runs++;
        count--;
    }
    return kvf_fail_in(KVF_E_IO,
                       "%llu bytes at offset %llu of the peer's region %u: ", (unsigned long long)runs->bytes,
                       (unsigned long long)runs->remote_offset, runs->remote_region);
}

kvf_status kvf_shm_direct(const kvf_shm_link *link, kvf_direction direction, const kvf_slice *slice) {
    kvf_shm_endpoint *endpoint = link->endpoint;
    unsigned char *const *bases = kvf_transport_bases(endpoint->transport);
    vectors local = {endpoint->local, 0}, remote = {endpoint->remote, 0};
    size_t count;
    const kvf_run *runs = kvf_slice_runs(slice, &count);
    for (size_t i = 0; i < count; i++) {
        const kvf_run *run = &runs[i];
        add(&local, bases[run->local_region] + run->local_offset, run->bytes);
        /* NOLINTNEXTLINE(performance-no-int-to-ptr): an address in the other process */
        add(&remote, (void *)(uintptr_t)(link->addresses[run->remote_region] + run->remote_offset),
            run->bytes);
    }
    uint64_t moved = 0;
    kvf_status status = move_all(link, direction, local, remote, &moved);
    return status == KVF_E_IO ? name_run(runs, count, moved) : status;
}
