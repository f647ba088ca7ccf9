/*
 * The door of a socket that listens: who is connected to it, as ZeroMQ tells it, and hanging up.
 */
#ifndef KVF_PORT_DOOR_H
#define KVF_PORT_DOOR_H

#include <sys/un.h>

#include "port/guests.h"
#include "port/sockets.h"

/** Zeroed but for the descriptors, which are -1, it is closed: then nobody is connected. */
typedef struct kvf_door {
    kvf_guests guests;
    void *monitor; /* PAIR: what happens to the listener's connections. Its owner polls it, and closes it */
    uint16_t port; /* that is listened at; 0: at the path */
    char path[sizeof((struct sockaddr_un *)NULL)->sun_path]; /* '@' before a name that is no file's */
    bool waits;                                              /* one that was accepted is not listed yet */
    int waiting;                                             /* its descriptor */
    int empty_fd, spare_fd;                                  /* see door.c */
} kvf_door;

/**
 * Begins to watch a listener that is not bound yet.
 *
 * @param limits  what the owner sets of its guests; hang_up is the door's
 * @return KVF_OK, KVF_E_IO, KVF_E_NOMEM
 */
kvf_status kvf_door_open(kvf_door *door, void *zmq, void *listener, const kvf_guests *limits);

/** Where the listener was bound, as ZeroMQ says it: "tcp://127.0.0.1:4711", "ipc://PATH". */
void kvf_door_bound(kvf_door *door, const char *endpoint);

/** Takes in who has come and gone, a bounded number, and hangs up where there are too many; whether there may be more. */
bool kvf_door_take_events(kvf_door *door, uint64_t now);

/**
 * A message came over a connection that its socket has a route for.
 *
 * @return whether events were taken in, too: the monitor's descriptor may be silent now though there are more
 */
bool kvf_door_hear(kvf_door *door, uint64_t route, zmq_msg_t *message, uint64_t now);

/** Frees what is known of connections. The listener and the monitor are closed already. */
void kvf_door_close(kvf_door *door);

/** How many connections may be made: as many as wanted (0: any number), but no more than this part of the descriptors
 * that this process may have, in sixteenths, and at least one. */
uint32_t kvf_door_most(uint32_t wanted, uint32_t sixteenths);

#endif
