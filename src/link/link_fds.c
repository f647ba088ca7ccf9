/* File descriptors: those that a link needs, those that a sleeping thread polls; and sockets with unread messages. */
#include "base/descriptors.h"
#include "link/link_inside.h"

/* A context with a listener, a caller, their monitors, their doors and a guard opens some 23 at most. */
#define DESCRIPTORS_OF_A_LINK 32

kvf_status kvf_link_check_descriptors(void) {
    return kvf_descriptors_check("a link", DESCRIPTORS_OF_A_LINK);
}

/* ---- unread messages -------------------------------------------------------------------------- */

/*
 * Querying a ZeroMQ socket costs two system calls even if no message came, so all descriptors are polled at once. A
 * descriptor becomes readable when a message comes to a socket that was read until it was empty. Any other call on a
 * socket may consume that signal; after such a call the socket itself is queried.
 */
kvf_status kvf_link_note_fds(kvf_zmq_link *link) {
    void *const sockets[] = {link->listener, link->caller, link->monitor, link->guard, link->door.monitor};
    for (size_t i = 0; i < sizeof sockets / sizeof *sockets; i++) {
        struct pollfd *fd = &link->fds[link->socket_count];
        size_t bytes = sizeof fd->fd;
        if (!sockets[i])
            continue;
        if (zmq_getsockopt(sockets[i], ZMQ_FD, &fd->fd, &bytes))
            return kvf_zmq_fail("ZMQ_FD");
        fd->events = POLLIN;
        link->unread[link->socket_count] = true;
        link->sockets[link->socket_count++] = sockets[i];
    }
    link->fds[link->socket_count] = (struct pollfd){.fd = link->calls.brought_fd, .events = POLLIN};
    link->fds[link->socket_count + 1] = (struct pollfd){.fd = link->door.brought_fd, .events = POLLIN};
    return KVF_OK;
}

void kvf_link_look(kvf_zmq_link *link) {
    const struct pollfd *stirs = &link->fds[link->socket_count];
    bool told = poll(link->fds, link->socket_count + 2, 0) >= 0;
    for (uint32_t i = 0; i < link->socket_count; i++)
        link->unread[i] = link->unread[i] || !told || link->fds[i].revents;
    link->stirs = !told || stirs[0].revents || stirs[1].revents;
}

bool kvf_link_is_unread(const kvf_zmq_link *link, const void *socket) {
    for (uint32_t i = 0; i < link->socket_count; i++)
        if (link->sockets[i] == socket)
            return link->unread[i];
    return false;
}

void kvf_link_note(kvf_zmq_link *link, const void *socket, bool unread) {
    for (uint32_t i = 0; i < link->socket_count; i++)
        if (link->sockets[i] == socket)
            link->unread[i] = unread;
}

bool kvf_link_has_unread(kvf_zmq_link *link) {
    for (uint32_t i = 0; i < link->socket_count; i++) {
        link->unread[i] = link->unread[i] && kvf_zmq_readable(link->sockets[i]);
        if (link->unread[i])
            return true;
    }
    return false;
}
