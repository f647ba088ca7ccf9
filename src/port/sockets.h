/*
 * ZeroMQ sockets: functions for both listening and calling sockets.
 */
#ifndef KVF_PORT_SOCKETS_H
#define KVF_PORT_SOCKETS_H

#include <zmq.h>

#include "base/base.h"

/** Fails with KVF_E_IO (or KVF_E_NOMEM) and ZeroMQ's words for errno. */
kvf_status kvf_zmq_fail(const char *what);

/**
 * Lets a ROUTER hang up on peers that speak versions of ZeroMQ's protocol before 3, and on what it takes for one, such as
 * a program that speaks HTTP. Otherwise ZeroMQ ends the process if the first message of such a peer comes while the socket
 * closes. Before the socket binds or connects.
 */
bool kvf_zmq_refuse_old(void *router);

/* A signal ends ZeroMQ's functions with EINTR, also those that do not wait. These repeat them. */

/** zmq_bind(). */
int kvf_zmq_bind(void *socket, const char *address);

/** zmq_connect(). */
int kvf_zmq_connect(void *socket, const char *address);

/** zmq_disconnect(). */
int kvf_zmq_disconnect(void *socket, const char *address);

/** zmq_send() without waiting. Returns 0 or an errno. */
int kvf_zmq_send(void *socket, const void *data, size_t bytes, int flags);

/** zmq_msg_send() of a message's last frame, without waiting. Returns 0 or an errno; takes the frame over in any case. */
int kvf_zmq_send_last(void *socket, zmq_msg_t *frame);

/** Whether a socket has something to receive. */
bool kvf_zmq_readable(void *socket);

/** Receives one frame without waiting; returns whether there was one. */
bool kvf_zmq_receive_frame(void *socket, zmq_msg_t *frame);

/**
 * Receives one message without waiting: its first frames; further ones are dropped.
 *
 * @param frames  `capacity` of them, which the caller has initialised, may read, and closes
 * @return how many frames the message had; 0 when there is none
 */
uint32_t kvf_zmq_receive(void *socket, zmq_msg_t *frames, uint32_t capacity);

/** Closes a socket; NULL: there is none. Its events end first: ZeroMQ leaks those whose receiver has been closed. */
void kvf_zmq_close(void *socket);

/** Makes a PAIR that receives some events of a socket. The socket is closed first, by kvf_zmq_close(). */
kvf_status kvf_zmq_monitor(void *zmq, void *socket, const char *address, int events, void **out);

/**
 * Receives one event without waiting.
 *
 * @param text  receives the event's endpoint, as a message that the caller has initialised; NULL: not wanted
 * @return whether there was one
 */
bool kvf_zmq_take_event(void *monitor, uint16_t *event, uint32_t *value, zmq_msg_t *text);

#endif
