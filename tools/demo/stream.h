/*
 * A plain TCP stream from memory to memory, which measures the link between two machines. The client asks for a number
 * of bytes; there is no other protocol, no encryption, and no secret in the bytes.
 */
#ifndef KVFERRY_DEMO_STREAM_H
#define KVFERRY_DEMO_STREAM_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/** Serves streams, one after the other, in a thread. */
typedef struct stream_server {
    int listener; /* -1: none */
    uint16_t port;
    pthread_t thread;
    bool runs;
} stream_server;

/** Listens at an endpoint's host ("tcp://10.0.0.1:...") and a port (0: any); prints what is wrong if it cannot. */
int stream_listen(stream_server *out, const char *endpoint, uint16_t port);

/** Begins to serve. Call it after the last fork(), because it starts a thread. */
int stream_serve(stream_server *server);

void stream_close(stream_server *server);

/**
 * Reads `bytes` from the stream at an endpoint's host, and measures the time from the question to the last byte. The
 * connection has moved some bytes before. Prints what is wrong if it cannot.
 */
int stream_measure(const char *endpoint, uint16_t port, uint64_t bytes, uint32_t timeout_s, double *seconds);

#endif
