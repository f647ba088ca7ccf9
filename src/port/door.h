/*
 * The door of a listening socket: the connections made to it, as ZeroMQ reports them, and closing them. A door of calls
 * is for connections that we make: it only weighs them, as the other does, and closes one that sends a message without
 * an end. Connections that are not by TCP are not weighed.
 */
#ifndef KVF_PORT_DOOR_H
#define KVF_PORT_DOOR_H

#include <sys/un.h>

#include "port/gate.h"
#include "port/guests.h"
#include "port/sockets.h"

/** All zero, except for the descriptors, which are -1, means closed: nothing is connected. */
typedef struct kvf_door {
    kvf_guests guests;
    bool calls;         /* of connections that we make: see kvf_door_open_calls() */
    uint64_t last_call; /* counts them */
    void *monitor; /* PAIR: what happens to the listener's connections. Its owner polls it, and closes it */
    uint16_t port; /* port that is listened on; 0: the path */
    char path[sizeof((struct sockaddr_un *)NULL)->sun_path]; /* begins with '@' for an abstract name */
    bool waits;                                              /* an accepted connection is not listed yet */
    int waiting;                                             /* its descriptor */
    int empty_fd, spare_fd;                                  /* see door.c */
    int brought_fd;                                          /* an epoll of guests that have been silent */
    uint64_t weigh_ns;                                       /* when guests that move are weighed next */
    uint64_t weighed_ns;                                     /* when they were weighed last */
    kvf_gate gate; /* its owner sets `rate`, and may set `narrow`, before the door is opened */
} kvf_door;

/**
 * Begins to watch a listener that is not bound yet.
 *
 * @param limits  the owner's settings for its guests; the door sets hang_up, mute, narrow and on_cut_off
 * @return KVF_OK, KVF_E_IO, KVF_E_NOMEM
 */
kvf_status kvf_door_open(kvf_door *door, void *zmq, void *listener, const kvf_guests *limits);

/** Where the listener was bound, as ZeroMQ says it: "tcp://127.0.0.1:4711", "ipc://PATH". */
void kvf_door_bound(kvf_door *door, const char *endpoint);

/** Receives whole segments from the sender of a message, who is no stranger any more; see `narrow` in gate.h. */
void kvf_door_widen(kvf_door *door, zmq_msg_t *message);

/** Reads a bounded number of events of connections that came and went, and closes some if there are too many; returns
 * whether there may be more events. */
bool kvf_door_take_events(kvf_door *door, uint64_t now);

/**
 * A message came over a connection that its socket has a route for.
 *
 * @return whether events were read, too: then the monitor's descriptor may be silent although there are more
 */
bool kvf_door_hear(kvf_door *door, uint64_t route, zmq_msg_t *message, uint64_t now);

/**
 * Weighs guests over whose connections something comes, see guests.h: a bounded number, and each at most a hundred
 * times a second. The owner calls it when `brought_fd` is readable, and when kvf_door_due() says so, and tells
 * kvf_guests_took().
 */
void kvf_door_weigh(kvf_door *door, uint64_t now);

/** When the door has something to do that no descriptor shows; UINT64_MAX: not before something happens. */
uint64_t kvf_door_due(const kvf_door *door);

/**
 * Begins to watch connections that we make. Each counts as known: none is closed for want of room, or because it is
 * silent. The owner tells kvf_guests_read() of messages, by the name of their connection.
 *
 * @param limits  only `longest`, `on_crowded` and `context` count
 * @return KVF_OK, KVF_E_IO
 */
kvf_status kvf_door_open_calls(kvf_door *door, const kvf_guests *limits);

/** ZeroMQ has connected, by a descriptor, to a port: kvf_tcp_try_often(), and what comes is weighed. Returns a name
 * that no other connection has had; 0: it is not by TCP, has ended already (the descriptor is another's), or there is
 * no memory. */
uint64_t kvf_door_called(kvf_door *door, int fd, uint16_t port, uint64_t now);

/** Whether a connection was closed because of what it sent. */
bool kvf_door_has_cut_off(const kvf_door *door, uint64_t call);

/** A connection has ended, or is no longer ours: its name is not used any more, and set to 0. */
void kvf_door_hung_up(kvf_door *door, uint64_t *call);

/** Frees what is known of connections. The listener and the monitor are closed already. */
void kvf_door_close(kvf_door *door);

/** How many connections may be made: as many as wanted (0: any number), but at most this part, in sixteenths, of the
 * descriptors that this process may have, and at least one. */
uint32_t kvf_door_most(uint32_t wanted, uint32_t sixteenths);

#endif
