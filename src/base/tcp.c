#include "base/tcp.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
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
