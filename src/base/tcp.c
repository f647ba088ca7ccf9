#include "base/tcp.h"

#include <linux/sockios.h>
#include <linux/tcp.h> /* glibc's tcp_info does not count bytes */
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#ifndef TCP_RTO_MAX_MS /* of Linux 6.15 */
#define TCP_RTO_MAX_MS 44
#endif

#define TRY_EVERY_MS 1000 /* the least that the kernel accepts */

void kvf_tcp_try_often(int fd) {
    const int longest = TRY_EVERY_MS;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, &longest, sizeof longest);
}

void kvf_tcp_try_for(int fd, uint32_t milliseconds) {
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof milliseconds);
}

/* What waits in the kernel is asked for last, so that what comes in between is not counted as received. */
bool kvf_tcp_count_received(int fd, uint64_t *bytes) {
    struct tcp_info info;
    socklen_t length = sizeof info;
    int waiting = 0;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) ||
        length < offsetof(struct tcp_info, tcpi_bytes_received) + sizeof info.tcpi_bytes_received ||
        ioctl(fd, SIOCINQ, &waiting) || waiting < 0)
        return false;
    *bytes = info.tcpi_bytes_received - kvf_min_u64(info.tcpi_bytes_received, (uint64_t)waiting);
    return true;
}
