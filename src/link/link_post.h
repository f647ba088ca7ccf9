/*
 * What was sent over connections and has not left yet: ZeroMQ keeps it until the other end takes it.
 *
 * Messages that have not left use a bounded memory. No connection may have more of it than it leaves free for all
 * others. Further messages are dropped, as if they were lost on the way. So a peer that asks for much and reads nothing
 * fills no memory, and one that asks for little is answered.
 *
 * One thread at a time sends; ZeroMQ's own threads free messages at any time.
 */
#ifndef KVF_LINK_POST_H
#define KVF_LINK_POST_H

#include <stdatomic.h>

#include "link/link.h"

#include "base/tables.h"

#include <zmq.h>

#define KVF_POST_BYTES (64u << 20) /* of all messages that have not left */
/* A connection over which not everything has left for so long may be closed if its messages take the room of others: one
 * whose other end reads nothing, or just enough to seem alive. */
#define KVF_POST_STUCK_NS UINT64_C(2000000000)

/** The messages of one connection. */
typedef struct kvf_post_box {
    kvf_route route;
    _Atomic uint64_t bytes; /* of those that have not left */
    _Atomic bool was_empty; /* all had left at a time since it was last looked at */
    uint64_t stuck_ns;      /* since when they have not; 0: it was never looked at */
    UT_hash_handle hh;
} kvf_post_box;

/** Zeroed: nothing was sent. */
typedef struct kvf_post {
    kvf_post_box *boxes;    /* by route; some are empty */
    uint32_t sweep_at;      /* with so many, the empty ones are freed */
    _Atomic uint64_t bytes; /* of all messages that have not left */
    uint64_t dropped;       /* messages for which there was no room */
    uint64_t look_ns;       /* when to look next for connections that are stuck */
} kvf_post;

/** Makes a message with a copy of the data, which counts until ZeroMQ frees it. 0; ENOMEM; ENOBUFS: there is no room. */
int kvf_post_write(kvf_post *post, kvf_route route, const void *data, size_t bytes, zmq_msg_t *out);

/** There was no room: the route that takes most of it, of those that are stuck. 0: none; looked for now and then. */
kvf_route kvf_post_stuck(kvf_post *post, uint64_t now);

/** Once ZeroMQ has freed all messages: its context was closed. */
void kvf_post_free(kvf_post *post);

#endif
