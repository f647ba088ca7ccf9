/*
 * The door: who has connected to us, as ZeroMQ tells it, and hanging up.
 *
 * ZeroMQ has no limit of connections and no call that ends one: it tells of descriptors that it has accepted, and takes
 * the end of a stream for what it is. So a connection is ended by shutting its socket down. The descriptor is ZeroMQ's,
 * which may have closed it by then, and its number may be that of something else: so a duplicate is looked at first.
 * That takes the place of a descriptor that is kept for this, and so needs no free one.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "link/link_inside.h"

#define MONITOR_ADDRESS "inproc://listener"
#define EVENTS_AT_ONCE 256u

/* ---- sockets --------------------------------------------------------------------------------- */

typedef union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    struct sockaddr_un local;
    struct sockaddr_storage room;
} address;

static bool is_our_port(const char *text, in_port_t port) {
    return strtoul(text, NULL, 10) == ntohs(port);
}

/* Whether a socket is of a connection to our endpoint. */
static bool is_guest(const kvf_zmq_link *link, int fd) {
    address own = {0};
    socklen_t bytes = sizeof own;
    if (getsockname(fd, &own.any, &bytes))
        return false;
    const char *port = strrchr(link->endpoint, ':'), *path = link->endpoint + strlen("ipc://");
    if (own.any.sa_family == AF_INET)
        return link->listens_on_tcp && is_our_port(port + 1, own.v4.sin_port);
    if (own.any.sa_family == AF_INET6)
        return link->listens_on_tcp && is_our_port(port + 1, own.v6.sin6_port);
    if (own.any.sa_family != AF_UNIX || link->listens_on_tcp)
        return false;
    bool is_abstract = path[0] == '@';
    return own.local.sun_path[0] == (is_abstract ? '\0' : path[0]) &&
           strncmp(own.local.sun_path + 1, path + 1, sizeof own.local.sun_path - 1) == 0;
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

/* Takes a duplicate of a descriptor that may be anybody's by now; the kernel's number of the file behind it. */
static bool look_at(const kvf_zmq_link *link, int fd, uint64_t *file) {
    struct stat found;
    if (dup3(fd, link->spare_fd, O_CLOEXEC) < 0 || fstat(link->spare_fd, &found))
        return false;
    *file = found.st_ino;
    return is_guest(link, link->spare_fd);
}

static void look_away(const kvf_zmq_link *link) {
    (void)dup3(link->empty_fd, link->spare_fd, O_CLOEXEC);
}

static void hang_up(void *owner, kvf_guest *guest) {
    const kvf_zmq_link *link = owner;
    uint64_t file;
    if (look_at(link, (int)guest->id, &file) && file == guest->mark)
        (void)shutdown(link->spare_fd, SHUT_RDWR);
    look_away(link);
}

/* ---- what ZeroMQ tells ----------------------------------------------------------------------- */

static void arrived(kvf_zmq_link *link, int fd) {
    char name[KVF_GUEST_ADDRESS_BYTES];
    uint64_t file;
    bool is_there = look_at(link, fd, &file);
    if (is_there) {
        name_guest(link->spare_fd, name);
        if (kvf_guests_arrive(&link->guests, (uint64_t)fd, file, name, link->now))
            (void)shutdown(link->spare_fd, SHUT_RDWR); /* no memory to watch it with */
    }
    look_away(link);
}

static void take_events(kvf_zmq_link *link) {
    uint16_t event;
    uint32_t value;
    for (uint32_t i = 0; i < EVENTS_AT_ONCE; i++) {
        if (!kvf_link_take_event(link->door, &event, &value, NULL)) {
            kvf_link_note(link, link->door, false);
            return;
        }
        if (event == ZMQ_EVENT_ACCEPTED)
            arrived(link, (int)value);
        else
            kvf_guests_leave(&link->guests, value);
    }
    kvf_link_note(link, link->door, true);
}

void kvf_door_take_events(kvf_zmq_link *link) {
    if (kvf_link_is_unread(link, link->door))
        take_events(link);
    kvf_guests_tick(&link->guests, link->now);
}

void kvf_door_hear(kvf_zmq_link *link, kvf_route route, zmq_msg_t *message) {
    if (kvf_guests_hear(&link->guests, route, link->now))
        return;
    take_events(link); /* it may have come since they were looked at */
    kvf_guests_name(&link->guests, (uint64_t)zmq_msg_get(message, ZMQ_SRCFD), route, link->now);
}

kvf_status kvf_door_open(kvf_zmq_link *link, const kvf_link_options *options) {
    uint32_t most = kvf_link_most_guests(options->max_connections);
    link->guests = (kvf_guests){.most = most,
                                .most_of_address = options->max_connections_per_address
                                                       ? options->max_connections_per_address
                                                       : most - most / 4,
                                .is_known = options->is_known,
                                .on_crowded = options->on_crowded,
                                .hang_up = hang_up,
                                .context = options->context,
                                .owner = link};
    link->empty_fd = eventfd(0, EFD_CLOEXEC);
    link->spare_fd = link->empty_fd < 0 ? -1 : fcntl(link->empty_fd, F_DUPFD_CLOEXEC, 0);
    if (link->spare_fd < 0)
        return kvf_fail(KVF_E_IO, "eventfd: %s", strerror(errno));
    return kvf_link_monitor(link->zmq, link->listener, MONITOR_ADDRESS,
                            ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_DISCONNECTED, &link->door);
}

void kvf_door_close(kvf_zmq_link *link) {
    kvf_guests_free(&link->guests);
    if (link->empty_fd >= 0)
        (void)close(link->empty_fd);
    if (link->spare_fd >= 0)
        (void)close(link->spare_fd);
}
