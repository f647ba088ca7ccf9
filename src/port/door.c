/*
 * The door: the connections made to us, as ZeroMQ reports them, and closing them.
 *
 * ZeroMQ has no limit on connections and no call that ends one: it reports descriptors that it has accepted, and
 * handles the end of a stream. So a connection is ended by shutting its socket down. The descriptor belongs to ZeroMQ,
 * which may have closed it meanwhile, and its number may have been reused: so a duplicate is checked first. The
 * duplicate takes the place of a reserved descriptor, so no free one is needed.
 */
#include "port/door.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/tcp.h"
#include "base/watch.h"

#define MONITOR_ADDRESS "inproc://listener"
#define EVENTS_AT_ONCE 256u
/* A connection has a few MiB waiting at most. */
#define DROPPED_AT_ONCE (64u << 10)
#define DROPS 512u
#define WEIGHED_AT_ONCE 256u
#define WEIGH_EVERY_NS UINT64_C(10000000)

/* ---- sockets --------------------------------------------------------------------------------- */

typedef union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    struct sockaddr_un local;
    struct sockaddr_storage room;
} address;

static bool is_by_tcp(const kvf_door *door) {
    return door->calls || door->port;
}

/* Whether a socket is of a connection to where we listen, or may be of one that we made. */
static bool is_guest(const kvf_door *door, int fd) {
    address own = {0};
    socklen_t bytes = sizeof own;
    if (door->calls)
        return true;
    if (getsockname(fd, &own.any, &bytes))
        return false;
    if (own.any.sa_family == AF_INET)
        return door->port && door->port == ntohs(own.v4.sin_port);
    if (own.any.sa_family == AF_INET6)
        return door->port && door->port == ntohs(own.v6.sin6_port);
    if (own.any.sa_family != AF_UNIX || door->port)
        return false;
    bool is_abstract = door->path[0] == '@';
    return own.local.sun_path[0] == (is_abstract ? '\0' : door->path[0]) &&
           strncmp(own.local.sun_path + 1, door->path + 1, sizeof own.local.sun_path - 1) == 0;
}

/* The address of the other end without its port; "" where it is on this machine without one. */
static void name_guest(int fd, char name[KVF_GUEST_ADDRESS_BYTES]) {
    address peer = {0};
    socklen_t bytes = sizeof peer;
    name[0] = '\0';
    if (getpeername(fd, &peer.any, &bytes))
        return;
    if (peer.any.sa_family == AF_INET)
        (void)inet_ntop(AF_INET, &peer.v4.sin_addr, name, KVF_GUEST_ADDRESS_BYTES);
    else if (peer.any.sa_family == AF_INET6)
        (void)inet_ntop(AF_INET6, &peer.v6.sin6_addr, name, KVF_GUEST_ADDRESS_BYTES);
}

/* Duplicates a descriptor whose number may have been reused; `file` receives the kernel's number of the file behind
 * it. */
static bool look_at_guest(const kvf_door *door, int fd, uint64_t *file) {
    struct stat found;
    if (dup3(fd, door->spare_fd, O_CLOEXEC) < 0 || fstat(door->spare_fd, &found))
        return false;
    *file = found.st_ino;
    return is_guest(door, door->spare_fd);
}

static void look_away(const kvf_door *door) {
    (void)dup3(door->empty_fd, door->spare_fd, O_CLOEXEC);
}

/* The kernel drops what comes by TCP, so that the other end sends it again, ever more rarely. What waits is dropped,
 * too, for ZeroMQ would still receive it. */
static bool stop_receiving(const kvf_door *door) {
    struct sock_filter nothing = BPF_STMT(BPF_RET | BPF_K, 0);
    const struct sock_fprog filter = {1, &nothing};
    char dropped[DROPPED_AT_ONCE];
    if (!is_by_tcp(door) || setsockopt(door->spare_fd, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter))
        return false;
    for (uint32_t i = 0; i < DROPS; i++)
        if (recv(door->spare_fd, dropped, sizeof dropped, MSG_DONTWAIT) <= 0)
            break;
    return true;
}

static void hang_up(void *owner, kvf_guest *guest) {
    const kvf_door *door = owner;
    uint64_t file;
    const int none = 0;
    if (look_at_guest(door, (int)guest->id, &file) && file == guest->mark) {
        const bool deaf = guest->muted || (guest->is_suspect && stop_receiving(door));
        (void)shutdown(door->spare_fd, SHUT_RDWR);
        if (deaf) /* else the other end's goodbye would be dropped, too */
            (void)setsockopt(door->spare_fd, SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof none);
    }
    look_away(door);
}

static bool mute(void *owner, const kvf_guest *guest) {
    const kvf_door *door = owner;
    uint64_t file;
    const bool muted =
        look_at_guest(door, (int)guest->id, &file) && file == guest->mark && stop_receiving(door);
    look_away(door);
    return muted;
}

/* ---- strangers ------------------------------------------------------------------------------- */

static void charge(void *owner, const char *host) {
    kvf_door *door = owner;
    if (door->port)
        kvf_gate_charge(&door->gate, host, door->weighed_ns);
}

/* A peer that was refused needs only to read why. */
static void narrow(void *owner, const kvf_guest *guest) {
    const kvf_door *door = owner;
    struct sock_filter beginning = BPF_STMT(BPF_RET | BPF_K, door->gate.narrow);
    const struct sock_fprog filter = {1, &beginning};
    uint64_t file;
    if (!door->gate.narrow)
        return;
    if (look_at_guest(door, (int)guest->id, &file) && file == guest->mark)
        (void)setsockopt(door->spare_fd, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter);
    look_away(door);
}

void kvf_door_widen(kvf_door *door, zmq_msg_t *message) {
    const int none = 0;
    uint64_t file;
    if (!door->gate.narrow)
        return;
    if (look_at_guest(door, zmq_msg_get(message, ZMQ_SRCFD), &file))
        (void)setsockopt(door->spare_fd, SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof none);
    look_away(door);
}

/* ---- weighing guests ------------------------------------------------------------------------- */

/*
 * The next thing that comes over a guest's connection, whose duplicate is the spare descriptor, makes `brought_fd`
 * readable, once. An epoll knows a connection by its file and the number it was added with, so all are added with the
 * number of the spare descriptor. They are gone from it when ZeroMQ closes them.
 */
static void listen_to(const kvf_door *door, uint64_t id, bool again) {
    if (is_by_tcp(door))
        (void)kvf_watch_once(door->brought_fd, door->spare_fd, again, (void *)(uintptr_t)id);
}

/* Something may have come already, and ZeroMQ may have read it. */
static void begin_to_weigh(kvf_door *door, uint64_t id) {
    listen_to(door, id, false);
    if (is_by_tcp(door))
        kvf_guests_stir(&door->guests, id);
}

static void listen_again(const kvf_door *door, const kvf_guest *guest) {
    uint64_t file;
    if (look_at_guest(door, (int)guest->id, &file) && file == guest->mark)
        listen_to(door, guest->id, true);
    look_away(door);
}

static void note_stirred(kvf_door *door) {
    struct epoll_event events[WEIGHED_AT_ONCE];
    const int count = epoll_wait(door->brought_fd, events, WEIGHED_AT_ONCE, 0);
    for (int i = 0; i < count; i++)
        kvf_guests_stir(&door->guests, (uintptr_t)events[i].data.ptr);
}

/* A number that is another connection's by now is of a guest that is gone, and hanging up looks closer. */
static void weigh(kvf_door *door, kvf_guest *guest) {
    uint64_t bytes = guest->brought;
    (void)kvf_tcp_count_received((int)guest->id, &bytes);
    if (!kvf_guests_weigh(&door->guests, guest, bytes) && !guest->muted && !guest->leaving)
        listen_again(door, guest);
}

void kvf_door_weigh(kvf_door *door, uint64_t now) {
    note_stirred(door);
    kvf_gate_tick(&door->gate, now);
    if (now < door->weigh_ns)
        return;
    door->weighed_ns = now;
    const kvf_guest *last = door->guests.moving ? door->guests.moving->moving_prev : NULL;
    for (uint32_t i = 0; i < WEIGHED_AT_ONCE && last; i++) {
        kvf_guest *guest = kvf_guests_next_moving(&door->guests);
        if (guest == last)
            last = NULL;
        weigh(door, guest);
    }
    door->weigh_ns = now + WEIGH_EVERY_NS;
}

uint64_t kvf_door_due(const kvf_door *door) {
    const uint64_t gate = kvf_gate_due(&door->gate);
    const uint64_t due = door->calls ? gate : kvf_min_u64(gate, kvf_guests_due(&door->guests));
    return door->guests.moving ? kvf_min_u64(due, door->weigh_ns) : due;
}

/* ---- what ZeroMQ tells ----------------------------------------------------------------------- */

/* False: there is no memory now to watch the connection. */
static bool arrived(kvf_door *door, int fd, uint64_t now) {
    char name[KVF_GUEST_ADDRESS_BYTES];
    uint64_t file;
    kvf_status status = KVF_OK;
    if (look_at_guest(door, fd, &file)) {
        name_guest(door->spare_fd, name);
        if (door->port)
            kvf_tcp_try_often(door->spare_fd);
        status = kvf_guests_arrive(&door->guests, (uint64_t)fd, file, name, now);
        if (!status)
            begin_to_weigh(door, (uint64_t)fd);
    }
    look_away(door);
    return status == KVF_OK;
}

bool kvf_door_take_events(kvf_door *door, uint64_t now) {
    uint16_t event;
    uint32_t value;
    for (uint32_t i = 0; i < EVENTS_AT_ONCE; i++) {
        if (door->waits && !arrived(door, door->waiting, now))
            return true;
        door->waits = false;
        if (!kvf_zmq_take_event(door->monitor, &event, &value, NULL))
            return false;
        door->waits = event == ZMQ_EVENT_ACCEPTED;
        door->waiting = (int)value;
        if (door->waits && door->port)
            kvf_gate_count(&door->gate, now);
        else if (event == ZMQ_EVENT_LISTENING && door->port)
            kvf_gate_open(&door->gate, (int)value);
        else if (event == ZMQ_EVENT_DISCONNECTED)
            kvf_guests_leave(&door->guests, value);
    }
    return true;
}

bool kvf_door_hear(kvf_door *door, uint64_t route, zmq_msg_t *message, uint64_t now) {
    if (kvf_guests_hear(&door->guests, route, now))
        return false;
    (void)kvf_door_take_events(door, now); /* it may have come since they were last read */
    kvf_guests_name(&door->guests, (uint64_t)zmq_msg_get(message, ZMQ_SRCFD), route, now);
    return true;
}

/* ---- connections that we make ---------------------------------------------------------------- */

/* A descriptor's number is reused, and the end of one connection may be told after the beginning of the next. So a name
 * is a count and, in its lower half, the descriptor, which is what the rest of this file takes a guest's id for. */
static uint64_t name_call(kvf_door *door, int fd) {
    return ++door->last_call << 32 | (uint32_t)fd;
}

static bool leads_to(int fd, uint16_t port) {
    address peer = {0};
    socklen_t bytes = sizeof peer;
    if (getpeername(fd, &peer.any, &bytes))
        return false;
    return peer.any.sa_family == AF_INET    ? ntohs(peer.v4.sin_port) == port
           : peer.any.sa_family == AF_INET6 ? ntohs(peer.v6.sin6_port) == port
                                            : false;
}

uint64_t kvf_door_called(kvf_door *door, int fd, uint16_t port, uint64_t now) {
    char host[KVF_GUEST_ADDRESS_BYTES];
    uint64_t file, call = 0;
    if (look_at_guest(door, fd, &file) && leads_to(door->spare_fd, port)) {
        kvf_tcp_try_often(door->spare_fd);
        name_guest(door->spare_fd, host);
        call = name_call(door, fd);
        if (kvf_guests_arrive(&door->guests, call, file, host, now) == KVF_OK)
            kvf_guests_name(&door->guests, call, call, now);
        if (kvf_guests_has(&door->guests, call))
            begin_to_weigh(door, call);
        else
            kvf_door_hung_up(door, &call);
    }
    look_away(door);
    return call;
}

bool kvf_door_has_cut_off(const kvf_door *door, uint64_t call) {
    return call && !kvf_guests_has(&door->guests, call);
}

void kvf_door_hung_up(kvf_door *door, uint64_t *call) {
    kvf_guests_leave(&door->guests, *call);
    *call = 0;
}

/* ---- opening and closing --------------------------------------------------------------------- */

uint32_t kvf_door_most(uint32_t wanted, uint32_t sixteenths) {
    struct rlimit limit;
    uint64_t most = UINT32_MAX;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0)
        most = kvf_min_u64(most, limit.rlim_cur); /* without a limit rlim_cur is the largest number */
    most = kvf_max_u64(most * sixteenths / 16, 1);
    return wanted && wanted < most ? wanted : (uint32_t)most;
}

static kvf_status open_door(kvf_door *door, const kvf_guests *limits) {
    door->gate.listener_fd = -1;
    door->guests = *limits;
    door->guests.owner = door;
    door->guests.hang_up = hang_up;
    door->guests.mute = mute;
    door->guests.narrow = narrow;
    door->guests.on_cut_off = charge;
    door->empty_fd = eventfd(0, EFD_CLOEXEC);
    door->spare_fd = door->empty_fd < 0 ? -1 : fcntl(door->empty_fd, F_DUPFD_CLOEXEC, 0);
    if (door->spare_fd < 0)
        return kvf_fail(KVF_E_IO, "eventfd: %s", strerror(errno));
    return kvf_watch_open(&door->brought_fd);
}

kvf_status kvf_door_open(kvf_door *door, void *zmq, void *listener, const kvf_guests *limits) {
    const kvf_status status = open_door(door, limits);
    return status ? status
                  : kvf_zmq_monitor(zmq, listener, MONITOR_ADDRESS,
                                    ZMQ_EVENT_LISTENING | ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_DISCONNECTED,
                                    &door->monitor);
}

static bool is_always_known(void *context, uint64_t route) {
    (void)context, (void)route;
    return true;
}

kvf_status kvf_door_open_calls(kvf_door *door, const kvf_guests *limits) {
    const kvf_guests own = {.longest = limits->longest,
                            .is_known = is_always_known,
                            .on_crowded = limits->on_crowded,
                            .context = limits->context};
    door->calls = true;
    return open_door(door, &own);
}

void kvf_door_bound(kvf_door *door, const char *endpoint) {
    static const char ipc[] = "ipc://";
    const char *port = strrchr(endpoint, ':');
    if (strncmp(endpoint, ipc, sizeof ipc - 1) == 0)
        (void)snprintf(door->path, sizeof door->path, "%s", endpoint + sizeof ipc - 1);
    else
        door->port = (uint16_t)strtoul(port + 1, NULL, 10);
}

void kvf_door_close(kvf_door *door) {
    kvf_guests_free(&door->guests);
    kvf_fd_close(&door->empty_fd);
    kvf_fd_close(&door->spare_fd);
    kvf_fd_close(&door->brought_fd);
}
