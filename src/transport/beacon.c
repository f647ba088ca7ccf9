/*
 * TCP and RDMA connections break when the peer dies or closes. For shared memory UCX checks every 20 seconds whether
 * the peer's process is still there, and never notices that only the endpoint was closed, while the process lives on
 * and uses the memory for something else; libfabric's endpoints have no connections whose end they would report.
 */
#include "transport/beacon.h"

#include <errno.h>
#include <poll.h>
#include <unistd.h>

#include "base/watch.h"
#include "transport/neighbour.h"

#define PREFIX "kvferry-" /* both sides make the name from the key: so a card leads to no other socket */
#define WATCHERS_MAX 65536

_Static_assert(KVF_BEACON_KEY_BYTES == KVF_NEIGHBOUR_ID_BYTES, "the key names the socket");

void kvf_beacon_open(kvf_beacon *beacon, int set) {
    kvf_beacon_close(beacon);
    if (kvf_host_place(beacon->mark + KVF_BEACON_KEY_BYTES) &&
        !kvf_random(beacon->mark, KVF_BEACON_KEY_BYTES)) {
        struct sockaddr_un name;
        socklen_t bytes = kvf_neighbour_address(PREFIX, beacon->mark, &name);
        beacon->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (beacon->listener >= 0 && bind(beacon->listener, (struct sockaddr *)&name, bytes) == 0 &&
            listen(beacon->listener, SOMAXCONN) == 0 && !kvf_watch_add(set, beacon->listener, beacon))
            return;
    }
    kvf_beacon_close(beacon);
}

void kvf_beacon_close(kvf_beacon *beacon) {
    for (size_t i = 0; i < beacon->watcher_count; i++)
        (void)close(beacon->watchers[i]);
    kvf_free(beacon->watchers);
    kvf_fd_close(&beacon->listener);
    *beacon = (kvf_beacon){.listener = -1};
}

static void drop_hung_up(kvf_beacon *beacon) {
    size_t kept = 0;
    for (size_t i = 0; i < beacon->watcher_count; i++) {
        if (kvf_beacon_is_gone(beacon->watchers[i]))
            (void)close(beacon->watchers[i]);
        else
            beacon->watchers[kept++] = beacon->watchers[i];
    }
    beacon->watcher_count = kept;
}

/* Accepts only processes of our user: others cannot map our memory, and must not fill our descriptor table. */
static bool is_ours(int watcher) {
    struct ucred credentials;
    socklen_t bytes = sizeof credentials;
    return getsockopt(watcher, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) == 0 &&
           (credentials.uid == geteuid() || credentials.uid == 0 || geteuid() == 0);
}

static bool keep(kvf_beacon *beacon, int watcher) {
    if (!is_ours(watcher))
        return false;
    if (beacon->watcher_count == beacon->watcher_capacity) {
        drop_hung_up(beacon);
        size_t capacity = beacon->watcher_capacity;
        if (beacon->watcher_count > capacity / 2 || capacity == 0) {
            if (capacity >= WATCHERS_MAX)
                return false;
            capacity = capacity ? capacity * 2 : 16;
            int *watchers = kvf_resize(beacon->watchers, capacity, sizeof *watchers);
            if (!watchers)
                return false;
            beacon->watchers = watchers;
            beacon->watcher_capacity = capacity;
        }
    }
    beacon->watchers[beacon->watcher_count++] = watcher;
    return true;
}

void kvf_beacon_tend(kvf_beacon *beacon) {
    for (;;) {
        int watcher = accept4(beacon->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (watcher < 0)
            return;
        if (!keep(beacon, watcher))
            (void)close(watcher);
    }
}

kvf_status kvf_beacon_watch(const unsigned char mark[KVF_BEACON_BYTES], int *out) {
    unsigned char here[KVF_PLACE_BYTES];
    *out = -1;
    if (!kvf_host_place(here) || memcmp(kvf_beacon_place(mark), here, sizeof here) != 0)
        return KVF_OK;
    struct sockaddr_un name;
    socklen_t bytes = kvf_neighbour_address(PREFIX, mark, &name);
    int watch = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (watch < 0)
        return KVF_OK;
    if (connect(watch, (struct sockaddr *)&name, bytes) == 0) {
        *out = watch;
        return KVF_OK;
    }
    bool gone = errno == ECONNREFUSED;
    (void)close(watch);
    return gone ? kvf_fail(KVF_E_PEER_LOST, "%s", KVF_BEACON_GONE) : KVF_OK;
}

bool kvf_beacon_is_gone(int watch) {
    char byte;
    ssize_t got = recv(watch, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}
