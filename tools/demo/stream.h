/*
 * A plain TCP stream from memory to memory, as a measure of what the link between two machines gives: no protocol but
 * a number of bytes that are asked for, no encryption, and nothing in it that anybody could want.
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

/** Listens where an endpoint's host is ("tcp://10.0.0.1:..."), at a port, or at any with 0; says what failed. */
int stream_listen(stream_server *out, const char *endpoint, uint16_t port);

/** Begins to serve. After the last fork(), for it starts a thread. */
int stream_serve(stream_server *server);

void stream_close(stream_server *server);

/**
 * Takes so many bytes from the stream at an endpoint's host, and says how long that took from the question to the last
 * byte, over a connection that has moved some before. Says what failed.
 */
int stream_measure(const char *endpoint, uint16_t port, uint64_t bytes, uint32_t timeout_s, double *seconds);

#endif
