#include "hosts.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "report.h"

static const char *other_host = "127.0.0.1";
static int our_space = -1, other_space = -1; /* network namespaces; -1: one for both */

void bench_hosts_find(void) {
    const char *space = getenv("KVF_BENCH_SPACE"), *host = getenv("KVF_BENCH_HOST"),
               *device = getenv("KVF_BENCH_DEVICE");
    static const char *const interfaces[] = {"UCX_NET_DEVICES", "FI_TCP_IFACE", "FI_NET_IFACE"};
    for (size_t i = 0; i < sizeof interfaces / sizeof *interfaces; i++)
        (void)setenv(interfaces[i], device ? device : "lo", 1);
    if (!space || !host)
        return;
    other_host = host;
    our_space = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    other_space = open(space, O_RDONLY | O_CLOEXEC);
    bench_require(our_space >= 0 && other_space >= 0, "no such network namespace");
}

bool bench_hosts_are_two(void) {
    return other_space >= 0;
}

static void enter_space(int space) {
    bench_require(space < 0 || setns(space, CLONE_NEWNET) == 0, "the network namespace cannot be entered");
}

void bench_hosts_cross(void) {
    enter_space(other_space);
}

void bench_hosts_connect(int *here, int *there) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t bytes = sizeof address;
    const int one = 1;
    enter_space(other_space);
    const int listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    enter_space(our_space);
    *here = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    *there = -1;
    bench_require(listening >= 0 && *here >= 0 && inet_pton(AF_INET, other_host, &address.sin_addr) == 1 &&
                      bind(listening, (struct sockaddr *)&address, bytes) == 0 && listen(listening, 1) == 0 &&
                      getsockname(listening, (struct sockaddr *)&address, &bytes) == 0 &&
                      connect(*here, (struct sockaddr *)&address, bytes) == 0 &&
                      (*there = accept(listening, NULL, NULL)) >= 0,
                  "no connection to the other host");
    (void)setsockopt(*here, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    (void)setsockopt(*there, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    (void)close(listening);
}

void bench_hosts_send(int fd, const void *data, size_t bytes) {
    const unsigned char *at = data;
    while (bytes > 0) {
        const ssize_t sent = send(fd, at, bytes, MSG_NOSIGNAL);
        bench_require(sent > 0, "the other process has ended");
        at += sent;
        bytes -= (size_t)sent;
    }
}

bool bench_hosts_receive(int fd, void *data, size_t bytes) {
    unsigned char *at = data;
    while (bytes > 0) {
        const ssize_t got = recv(fd, at, bytes, 0);
        if (got <= 0)
            return false;
        at += got;
        bytes -= (size_t)got;
    }
    return true;
}
