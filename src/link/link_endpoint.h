/*
 * Endpoints as people and peers write them: "tcp://host:port", "tcp://[v6]:port", "ipc://path".
 *
 * They come from outside, and ZeroMQ trusts its caller, so only these forms are accepted. inproc:// is refused: each
 * link has its own ZeroMQ context, in which inproc:// could only name the link's own sockets.
 */
#ifndef KVF_LINK_ENDPOINT_H
#define KVF_LINK_ENDPOINT_H

#include "wire/wire.h"

/* Bytes of an endpoint's text for ZeroMQ or from it, with its zero byte. */
#define KVF_ENDPOINT_BYTES (KVF_WIRE_MAX_NAME + 32u)

typedef struct kvf_endpoint {
    char text[KVF_ENDPOINT_BYTES]; /* for ZeroMQ: with "localhost" replaced by 127.0.0.1 */
    size_t port_at;                /* tcp: where in `text` the port begins; ipc: 0 */
    bool ipv6;                     /* a numeric IPv6 address */
    bool loopback;                 /* only processes of this machine reach it */
} kvf_endpoint;

/**
 * Reads an endpoint to listen on, where host and port of tcp:// may be "*".
 *
 * @return KVF_OK, KVF_E_INVALID, KVF_E_RANGE (length, port); nothing is written on error
 */
kvf_status kvf_endpoint_to_listen(const char *text, kvf_endpoint *out);

/** Reads an endpoint to connect to: one host, which is not the address of all interfaces, and one port. */
kvf_status kvf_endpoint_to_connect(const char *text, kvf_endpoint *out);

/**
 * Whether what listens at an endpoint that was read to connect to is a process of this machine: the endpoint is
 * loopback, or an address of one of our interfaces. Names are not looked up: false.
 */
bool kvf_endpoint_is_here(const kvf_endpoint *endpoint);

#endif
