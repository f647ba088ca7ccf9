/*
 * Another process of this machine, for fabrics that talk to it over a socket: the socket, whose name is on the card;
 * the process at its other end; and messages, of which each comes whole, perhaps with a descriptor.
 */
#ifndef KVF_TRANSPORT_NEIGHBOUR_H
#define KVF_TRANSPORT_NEIGHBOUR_H

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>

#include "base/base.h"

#define KVF_NEIGHBOUR_ID_BYTES ((size_t)16)

/** Where the sockets of an endpoint can be reached, as its card says. */
typedef struct kvf_neighbour_place {
    unsigned char host[KVF_NEIGHBOUR_ID_BYTES]; /**< see kvf_host_identity() */
    uint64_t network;                           /**< of the network namespace, in which socket names live */
} kvf_neighbour_place;

/** The place of this process; zeros for what is unknown. */
kvf_neighbour_place kvf_neighbour_here(void);

/** KVF_E_UNSUPPORTED, with the reason, unless a peer at `there` can be reached. */
kvf_status kvf_neighbour_check(const kvf_neighbour_place *here, const kvf_neighbour_place *there);

/** Writes the address of the socket with that name, after the fabric's own prefix, and returns its length. */
socklen_t kvf_neighbour_address(const char *prefix, const unsigned char name[KVF_NEIGHBOUR_ID_BYTES],
                                struct sockaddr_un *out);

/** Makes the socket with that name, and listens. On failure `*out` may be a descriptor, which the caller closes. */
kvf_status kvf_neighbour_listen(const char *prefix, const unsigned char name[KVF_NEIGHBOUR_ID_BYTES],
                                int backlog, int *out);

/**
 * Connects to the socket with that name. `*fd` is -1 at first, and a descriptor afterwards, also on failure, unless
 * there are too many; the caller closes it, or calls again with it after KVF_E_AGAIN.
 *
 * @return KVF_OK, KVF_E_PEER_LOST (no process listens), KVF_E_AGAIN (its queue is full), KVF_E_PERMISSION, KVF_E_IO
 */
kvf_status kvf_neighbour_connect(const char *prefix, const unsigned char name[KVF_NEIGHBOUR_ID_BYTES],
                                 int *fd);

/** A descriptor that an endpoint keeps for kvf_neighbour_accept(), of no file that matters; -1: there is none. */
int kvf_neighbour_spare(void);

/**
 * Accepts a connection. If the process has no free descriptor, it gives up the spare one for a moment, to refuse the
 * connection at the head of the queue: that would otherwise stay there, and the listening socket readable, forever.
 *
 * @param spare    from kvf_neighbour_spare(); stays the caller's. If it is lost, a later call makes another
 * @param refusal  the message for a connection that is refused
 * @param out      receives the connection, which is the caller's
 * @return KVF_OK, KVF_E_AGAIN (none is waiting), KVF_E_LIMIT (one was refused; more may be waiting), KVF_E_IO (one may
 *         be waiting, but there is no memory for it, nor a descriptor to refuse it with: the caller tries again later)
 */
kvf_status kvf_neighbour_accept(int listening, int *spare, const void *refusal, size_t bytes, int *out);

/** Ends a connection and closes its descriptor, which may be -1. Closing alone ends no connection that a forked child of
 * this process holds, too: the other side would go on as if we were there. */
void kvf_neighbour_hang_up(int *socket);

/** The same for a socket at which others connect, and for connections that were not accepted yet. */
void kvf_neighbour_stop_listening(int *listening);

/** The process that has connected to us. KVF_E_PERMISSION unless it runs as our user, or as root. */
kvf_status kvf_neighbour_process(int socket, pid_t *pid);

/** A descriptor that becomes readable when the process ends, even if a child of it keeps its sockets; -1 if the kernel
 * gives none. */
int kvf_neighbour_watch_process(pid_t pid);

/** Whether a process has ended, all of its threads; false if that is not known, or its number is another's by now. */
bool kvf_neighbour_has_ended(pid_t pid);

/**
 * The process to which a socket has connected, with a descriptor as that of kvf_neighbour_watch_process().
 *
 * @return KVF_OK; KVF_E_PERMISSION: it runs as another user. If that is root, it would refuse us, and if we are, nobody
 *         else may tell us to which process and where we write. KVF_E_PEER_LOST: it has ended, and a child of it keeps
 *         the socket at which it listened. KVF_E_IO
 */
kvf_status kvf_neighbour_know_process(int socket, pid_t *pid, int *watch);

/** When a process began, in ticks since the machine started; 0 if unknown, as in a time namespace, where the same process
 * began at another time. The kernel gives the numbers of dead processes to new ones. */
uint64_t kvf_neighbour_started(pid_t pid);

/**
 * Sends one message, with a descriptor if `fd` is not -1. Never blocks.
 *
 * @return KVF_OK, KVF_E_AGAIN (the other side does not read), KVF_E_PEER_LOST, KVF_E_IO
 */
kvf_status kvf_neighbour_send(int socket, const struct iovec *parts, size_t count, int fd);

/**
 * Receives one message of `least` to `most` bytes. Never blocks.
 *
 * @param fd  receives the descriptor that came with it, or -1; the caller closes it. NULL: none is taken
 * @return KVF_OK, KVF_E_AGAIN (none is there), KVF_E_PEER_LOST, KVF_E_PARSE (shorter, longer, more descriptors),
 *         KVF_E_IO (the message has come, but this process has no descriptor free for the one that it brought)
 */
kvf_status kvf_neighbour_receive(int socket, void *out, size_t least, size_t most, size_t *bytes, int *fd);

#endif
