#include "base/descriptors.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

kvf_status kvf_descriptors_check(const char *who, uint32_t needed) {
    int opened[256];
    uint32_t count = 0;
    int error = 0;
    KVF_ASSERT(needed <= sizeof opened / sizeof *opened);
    while (count < needed && !error) {
        opened[count] = eventfd(0, EFD_CLOEXEC);
        if (opened[count] < 0)
            error = errno;
        else
            count++;
    }
    for (uint32_t i = count; i > 0; i--)
        (void)close(opened[i - 1]);
    return error ? kvf_fail(KVF_E_IO, "%s needs %u file descriptors, and %u are left: %s", who, needed, count,
                            strerror(error))
                 : KVF_OK;
}
