/*
 * Sockets of ZeroMQ: what those who listen with one, and those who call, do with it alike.
 */
#ifndef KVF_PORT_SOCKETS_H
#define KVF_PORT_SOCKETS_H

#include <zmq.h>

#include "base/base.h"

/** KVF_E_IO (or KVF_E_NOMEM) with the words of ZeroMQ for errno. */
kvf_status kvf_zmq_fail(const char *what);

/** Whether a socket has something to take in. */
bool kvf_zmq_readable(void *socket);

/** Takes in one frame without waiting; whether there was one. */
bool kvf_zmq_receive_frame(void *socket, zmq_msg_t *frame);

/**
 * Takes in one message without waiting: its first frames; further ones are dropped.
 *
 * @param frames  `capacity` of them, which the caller has initialised, may read, and closes
 * @return how many frames the message had; 0 when there is none
 */
uint32_t kvf_zmq_receive(void *socket, zmq_msg_t *frames, uint32_t capacity);

/** Has a new PAIR told of some events of a socket. */
kvf_status kvf_zmq_monitor(void *zmq, void *socket, const char *address, int events, void **out);

/**
 * Takes in one event without waiting.
 *
 * @param text  receives the endpoint that it is about, as a message that the caller has initialised; NULL: no interest
 * @return whether there was one
 */
bool kvf_zmq_take_event(void *monitor, uint16_t *event, uint32_t *value, zmq_msg_t *text);

/** kvf_tcp_try_often() for a connection that a socket's monitor told of, to this port: by now its descriptor may be
 * another's. */
void kvf_tcp_try_often_at(int fd, uint16_t port);

#endif
