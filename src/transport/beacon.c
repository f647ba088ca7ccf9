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

static void stop_listening(kvf_beacon *beacon) {
    kvf_watch_remove(beacon->set, beacon->listener);
    kvf_neighbour_stop_listening(&beacon->listener);
    memset(beacon->mark, 0, sizeof beacon->mark);
}

/* One that cannot be told has hung up. */
static void tell_replaced(kvf_beacon *beacon) {
    kvf_beacon_tend(beacon);
    for (size_t i = 0; i < beacon->watcher_count; i++)
        (void)!send(beacon->watchers[i], "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void kvf_beacon_open(kvf_beacon *beacon, int set) {
    tell_replaced(beacon);
    stop_listening(beacon);
    beacon->set = set;
    if (kvf_host_place(beacon->mark + KVF_BEACON_KEY_BYTES) &&
        !kvf_random(beacon->mark, KVF_BEACON_KEY_BYTES)) {
        struct sockaddr_un name;
        socklen_t bytes = kvf_neighbour_address(PREFIX, beacon->mark, &name);
        beacon->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (beacon->listener >= 0 && bind(beacon->listener, (struct sockaddr *)&name, bytes) == 0 &&
            listen(beacon->listener, SOMAXCONN) == 0 && !kvf_watch_edges(set, beacon->listener, beacon))
            return;
    }
    kvf_beacon_close(beacon);
}

void kvf_beacon_close(kvf_beacon *beacon) {
    for (size_t i = 0; i < beacon->watcher_count; i++)
        kvf_neighbour_hang_up(&beacon->watchers[i]);
    kvf_free(beacon->watchers);
    stop_listening(beacon);
    *beacon = (kvf_beacon){.listener = -1};
}

/* Whether the other end is closed; nothing is ever sent. */
static bool is_hung_up(int socket) {
    struct pollfd look = {socket, POLLIN, 0};
    return poll(&look, 1, 0) > 0;
}

static void drop_hung_up(kvf_beacon *beacon) {
    size_t kept = 0;
    for (size_t i = 0; i < beacon->watcher_count; i++) {
        if (is_hung_up(beacon->watchers[i]))
            (void)close(beacon->watchers[i]);
        else
            beacon->watchers[kept++] = beacon->watchers[i];
    }
    beacon->watcher_count = kept;
}

/* Whether the process at the other end is one of our user: others cannot map our memory, and must not fill our
 * descriptor table. The owner hangs up on them, so a watcher of another user must not take that for the owner's end. */
static bool is_ours(int socket, pid_t *process) {
    struct ucred credentials;
    socklen_t bytes = sizeof credentials;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0)
        return false;
    *process = credentials.pid;
    return credentials.uid == geteuid() || credentials.uid == 0 || geteuid() == 0;
}

static bool keep(kvf_beacon *beacon, int watcher) {
    pid_t process;
    if (!is_ours(watcher, &process))
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
    while (beacon->listener >= 0) {
        int watcher = accept4(beacon->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (watcher < 0)
            return;
        if (!keep(beacon, watcher))
            (void)close(watcher);
    }
}

typedef enum sight { UNSEEN, SEEN, GONE } sight;

/* A socket that is connected, but to an owner that has died, is held by a child of it. */
static sight look(const unsigned char mark[KVF_BEACON_BYTES], kvf_beacon_watch *watch) {
    struct sockaddr_un name;
    const socklen_t bytes = kvf_neighbour_address(PREFIX, mark, &name);
    pid_t owner;
    watch->socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (watch->socket < 0)
        return UNSEEN;
    if (connect(watch->socket, (struct sockaddr *)&name, bytes) != 0)
        return errno == ECONNREFUSED ? GONE : UNSEEN;
    if (!is_ours(watch->socket, &owner))
        return UNSEEN;
    if (owner <= 0) /* of another namespace of processes */
        return SEEN;
    watch->process = kvf_neighbour_watch_process(owner);
    return watch->process < 0 && errno == ESRCH ? GONE : SEEN;
}

kvf_status kvf_beacon_watch_open(const unsigned char mark[KVF_BEACON_BYTES], int set, void *what,
                                 kvf_beacon_watch *out) {
    unsigned char here[KVF_PLACE_BYTES];
    *out = (kvf_beacon_watch){-1, -1};
    if (!kvf_host_place(here) || memcmp(kvf_beacon_place(mark), here, sizeof here) != 0)
        return KVF_OK;
    const sight seen = look(mark, out);
    kvf_status status = KVF_OK;
    if (seen != SEEN)
        kvf_beacon_watch_close(set, out);
    if (out->socket >= 0)
        status = kvf_watch_add(set, out->socket, what);
    if (!status && out->process >= 0)
        status = kvf_watch_add(set, out->process, what);
    return seen == GONE ? kvf_fail(KVF_E_PEER_LOST, "%s", KVF_BEACON_GONE) : status;
}

void kvf_beacon_watch_close(int set, kvf_beacon_watch *watch) {
    kvf_watch_close(set, &watch->socket);
    kvf_watch_close(set, &watch->process);
}

bool kvf_beacon_is_gone(const kvf_beacon_watch *watch) {
    struct pollfd looks[2] = {{watch->socket, POLLIN, 0},
                              {watch->process, POLLIN, 0}}; /* -1 is passed over */
    return watch->socket >= 0 && poll(looks, 2, 0) > 0;
}

bool kvf_beacon_has_ended(const kvf_beacon_watch *watch) {
    struct pollfd process = {watch->process, POLLIN, 0};
    char told;
    ssize_t got = -1;
    if (poll(&process, 1, 0) > 0)
        return true;
    if (watch->socket >= 0)
        while ((got = recv(watch->socket, &told, 1, MSG_DONTWAIT)) > 0) {
        }
    return got == 0 || (watch->socket >= 0 && errno != EAGAIN && errno != EINTR);
}
