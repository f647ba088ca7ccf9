#include "base/wake.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/watch.h"

kvf_status kvf_wake_open(kvf_wake *wake) {
    *wake = (kvf_wake){eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), false};
    return wake->fd < 0 ? kvf_fail(KVF_E_IO, "eventfd: %s", strerror(errno)) : KVF_OK;
}

void kvf_wake_set(kvf_wake *wake, bool on) {
    uint64_t count = 1;
    if (wake->on == on || wake->fd < 0)
        return;
    ssize_t moved = on ? write(wake->fd, &count, sizeof count) : read(wake->fd, &count, sizeof count);
    if (moved == (ssize_t)sizeof count)
        wake->on = on;
}

void kvf_wake_close(kvf_wake *wake) {
    kvf_fd_close(&wake->fd);
    wake->on = false;
}
