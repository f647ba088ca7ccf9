#include "base/tcp.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/sockios.h>
#include <linux/tcp.h> /* glibc's tcp_info does not count bytes */
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef TCP_RTO_MAX_MS /* of Linux 6.15 */
#define TCP_RTO_MAX_MS 44
#endif

#define TRY_EVERY_MS 1000 /* the least that the kernel accepts */
#define REFUSAL_MS 20     /* within a machine it takes microseconds */

void kvf_tcp_try_often(int fd) {
    const int longest = TRY_EVERY_MS;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, &longest, sizeof longest);
}

void kvf_tcp_try_for(int fd, uint32_t milliseconds) {
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof milliseconds);
}

bool kvf_tcp_is_deserted(const char *host, uint16_t port) {
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    const bool is_four = inet_pton(AF_INET, host, &four.sin_addr) == 1;
    if (!is_four && inet_pton(AF_INET6, host, &six.sin6_addr) != 1)
        return false;
    const void *address = is_four ? (const void *)&four : (const void *)&six;
    struct pollfd made = {.events = POLLOUT};
    int error = 0;
    socklen_t length = sizeof error;
    made.fd = socket(is_four ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (made.fd < 0)
        return false;
    if (connect(made.fd, address, is_four ? sizeof four : sizeof six))
        error = errno;
    if (error == EINPROGRESS && poll(&made, 1, REFUSAL_MS) == 1)
        (void)getsockopt(made.fd, SOL_SOCKET, SO_ERROR, &error, &length);
    (void)close(made.fd);
    return error == ECONNREFUSED;
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
