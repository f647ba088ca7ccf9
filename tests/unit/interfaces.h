/* The addresses of this machine's network interfaces, for tests. */
#ifndef KVF_TEST_INTERFACES_H
#define KVF_TEST_INTERFACES_H

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdbool.h>

/** The printable address of an interface beyond loopback; false: there is none. */
static inline bool find_interface(int family, char *out, socklen_t size) {
    struct ifaddrs *first;
    bool found = false;
    if (getifaddrs(&first) != 0)
        return false;
    for (const struct ifaddrs *at = first; at && !found; at = at->ifa_next) {
        if (at->ifa_addr && at->ifa_addr->sa_family == family && at->ifa_flags & IFF_UP &&
            !(at->ifa_flags & IFF_LOOPBACK))
            found = getnameinfo(at->ifa_addr,
                                family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6),
                                out, size, NULL, 0, NI_NUMERICHOST) == 0;
    }
    freeifaddrs(first);
    return found;
}

#endif
