/*
 * Another process of this machine, for fabrics that talk to it over a socket: the socket's address, and the process at
 * its other end.
 */
#ifndef KVF_TRANSPORT_NEIGHBOUR_H
#define KVF_TRANSPORT_NEIGHBOUR_H

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

#include "base/base.h"

#define KVF_NEIGHBOUR_ID_BYTES ((size_t)16)

/** Writes the address of the socket with that name, after the fabric's own prefix, and returns its length. */
socklen_t kvf_neighbour_address(const char *prefix, const unsigned char name[KVF_NEIGHBOUR_ID_BYTES],
                                struct sockaddr_un *out);

/** A number for the network namespace, in which socket names live; 0 when unknown. */
uint64_t kvf_neighbour_network(void);

/** The process at the other end of a socket. KVF_E_PERMISSION unless it runs as our user, or as root. */
kvf_status kvf_neighbour_process(int socket, pid_t *pid);

#endif
