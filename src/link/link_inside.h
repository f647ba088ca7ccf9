/*
 * The inside of a link by ZeroMQ, for its own files.
 *
 *   link_zmq.c       opening, closing, sending, progress
 *   link_endpoint.c  endpoints
 *   link_socket.c    sockets with our options, keys
 *   link_line.c      outgoing connections: dialling, and dialling again
 *   link_guard.c     the allow-list
 *   link_mail.c      received messages, and whose turn it is
 *   link_post.c      sent messages that have not left yet
 *   link_fds.c       file descriptors, and which sockets have unread messages
 */
#ifndef KVF_LINK_INSIDE_H
#define KVF_LINK_INSIDE_H

#include "link/link.h"
#include "link/link_endpoint.h"
#include "link/link_mail.h"
#include "link/link_post.h"

#include "base/tables.h"
#include "port/door.h"
#include "port/names.h"
#include "port/sockets.h"
#include <poll.h>
#include <zmq.h>

#define KVF_ROUTE_INCOMING (UINT64_C(1) << 63) /* marks routes of incoming connections */
#define KVF_LINK_NEVER UINT64_MAX
/* The time after which ZeroMQ gives up a try to connect and begins another. TCP tries after 0, 1 and 3 seconds. */
#define KVF_CONNECT_MS 1500
/* The time that the last messages of a connection have to leave when its user is done with it. They may be those that
 * release a producer's blocks, which are otherwise kept for the lease. */
#define KVF_LAST_WORDS_MS 1000
/* The share of this process's descriptors, in sixteenths, for connections that others make; we may use as many for
 * ours. */
#define KVF_LINK_SIXTEENTHS 8u

/* The most that one round of progress reads from one socket: messages, and bytes of them. */
/* What encryption adds to a message; and the longest message with it. */
#define KVF_LINK_SEALED_BYTES 256u
#define KVF_LINK_LONGEST (KVF_WIRE_MAX_BYTES + KVF_LINK_SEALED_BYTES)
#define KVF_LINK_BATCH 64u
#define KVF_LINK_BATCH_BYTES (2u << 20)

/* If no message comes for this time after one was sent over a TCP connection, a second connection is made beside it,
 * because TCP waits longer and longer before it retries over a network link that was down, up to two minutes. The time
 * doubles while no message comes, because a silent peer may just be busy. */
#define KVF_SILENCE_NS UINT64_C(2000000000)
#define KVF_SILENCE_MAX_NS UINT64_C(30000000000)

typedef enum kvf_line_state {
    KVF_LINE_DIALLED, /* connected, or trying to be */
    KVF_LINE_BROKEN,  /* ended, but messages from before may still be unread */
    KVF_LINE_RESTING /* waits until `due_ns`, to be dialled again; its host's name may be looked up meanwhile */
} kvf_line_state;

/**
 * One outgoing connection, with an endpoint text and a routing id that no other has.
 *
 * ZeroMQ is not left to reconnect: it gives up for good after a failed handshake, and after the first break its events
 * name the resolved address, which several connections may share.
 */
typedef struct kvf_dial {
    struct kvf_line *line;
    bool there;       /* ZeroMQ has it: it is connected, or ZeroMQ tries to connect it */
    uint64_t attempt; /* number of the connection under its line's route; part of the routing id */
    char text[KVF_ENDPOINT_BYTES]; /* the endpoint text that ZeroMQ has */
    kvf_status why;                /* why the handshake failed; KVF_OK: it did not */
    const char *what;              /* that reason in words */
    bool closed;                   /* the current try had a socket, which was closed */
    uint64_t tried_ns;             /* when that try began, or is to begin */
    bool made;                     /* the handshake is done: there is a connection */
    bool heard;                    /* a message came over it while there were two connections */
    uint64_t call;                 /* its name in link->calls; 0: it has none */
    UT_hash_handle by_text;
} kvf_dial;

/** The routing id by which the calling socket knows a connection. Its first byte is not 0: ZeroMQ's own ids begin with
 * 0. */
typedef struct kvf_dial_id {
    char mark[8];
    uint64_t route;
    uint64_t attempt;
} kvf_dial_id;

/**
 * An outgoing route. It lasts from the first kvf_link_connect() to the last kvf_link_disconnect(). It has one
 * connection after another, and sometimes two at once.
 */
typedef struct kvf_line {
    kvf_route route;
    char *name; /* "endpoint key", as the caller gave them */
    kvf_endpoint endpoint;
    kvf_lookup *lookup;               /* of its host's name, while it rests; NULL: none is under way */
    char address[INET_ADDRSTRLEN];    /* the name's, as it was last looked up */
    char key[KVF_KEY_CHARACTERS + 1]; /* of the other end; "" without encryption */
    uint8_t key_bytes[KVF_KEY_BYTES];
    uint32_t users;
    kvf_line_state state; /* of the first connection */
    uint64_t attempts;
    kvf_dial dials[2];
    kvf_dial *first;  /* messages go over this connection, */
    kvf_dial *second; /* and over this one too, which is made while no message comes over the first */
    uint64_t pause_ns, due_ns;
    bool asking;         /* in the list of lines over which a message was sent, and none has come since */
    uint64_t asked_ns;   /* when that message was sent, or the connection was made */
    uint64_t silence_ns; /* how long the peer may be silent before a second connection is made */
    UT_hash_handle by_route, by_name;
    struct kvf_line *next, *prev;         /* in the list of broken, of resting or of asking lines */
    struct kvf_line *two_next, *two_prev; /* in the list of lines with a second connection */
} kvf_line;

typedef struct kvf_zmq_link {
    kvf_link base;
    void *zmq;      /* the context */
    void *listener; /* ROUTER; NULL if the link listens nowhere */
    void *caller;   /* ROUTER */
    void *monitor;  /* PAIR: events of the caller's connections */
    void *guard;    /* REP: which keys may connect; NULL without encryption */
    kvf_door door;  /* the connections to the listener, */
    kvf_door calls; /* and those that we made */
    kvf_mail mail;
    kvf_post to_guests, to_called; /* what was sent over connections to the listener, and over ours */
    uint64_t now;                  /* of this round of progress */
    bool open_to_all;              /* everyone who knows our key may connect */
    char endpoint[KVF_ENDPOINT_BYTES];
    bool encrypted;
    uint8_t (*allowed)[KVF_KEY_BYTES];
    uint32_t allowed_count;
    bool withdrawn; /* keys were removed from the list; their connections may still be open */
    void (*on_message)(void *context, const kvf_letter *letter);
    void (*on_broken)(void *context, kvf_route route, kvf_status status, const char *detail);
    void *context;

    kvf_route last_route;
    kvf_line *lines_by_route, *lines_by_name;
    kvf_line *broken, *resting, *asking, *doubled;
    kvf_dial *dials;  /* that ZeroMQ has, by text */
    uint32_t padding; /* see link_dial.c */

    void *sockets[KVF_LINK_FDS]; /* those of the sockets above that exist */
    struct pollfd fds[KVF_LINK_FDS];
    bool unread[KVF_LINK_FDS]; /* see link_fds.c */
    uint32_t socket_count;     /* after their descriptors come those of `calls` and of the door, or -1 */
    bool stirs;                /* something comes over connections that have been silent */
    uint64_t next_due_ns;      /* when a resting line is dialled, or a silent one dialled anew */
    const kvf_clock *clock;
} kvf_zmq_link;

static inline kvf_zmq_link *kvf_zmq_link_of(kvf_link *base) {
    return (kvf_zmq_link *)base;
}

/* ---- link_socket.c --------------------------------------------------------------------------- */

/** Checks the keys of the options: both or none, and that they belong together. */
kvf_status kvf_link_check_keys(const kvf_link_options *options);

/** Sets how long what was sent may still take to leave, in the background, after a connection or the socket is closed:
 * 0 at first. */
void kvf_link_linger(void *socket, int ms);

/** Makes a ROUTER with the options for both directions, and our keys. */
kvf_status kvf_link_make_router(kvf_zmq_link *link, const kvf_link_options *options, int send_limit,
                                void **out);

/** Binds the listener and finds out the endpoint. */
kvf_status kvf_link_bind(kvf_zmq_link *link, const kvf_endpoint *endpoint);

/** Where a message is sent to: the id by which a socket knows a connection of a route. */
typedef struct kvf_address {
    void *socket;
    kvf_post *post;
    kvf_route route;
    const void *id;
    size_t id_bytes;
} kvf_address;

/** Sends one message of two frames without waiting. 0, or errno; ENOBUFS: too much for this route has not left. */
int kvf_link_transmit(const kvf_address *to, const void *data, size_t bytes);

/* ---- link_dial.c ----------------------------------------------------------------------------- */

/** Has ZeroMQ connect to the endpoint of the line. KVF_E_EXISTS, KVF_E_INVALID, KVF_E_IO, KVF_E_NOMEM. */
kvf_status kvf_dial_begin(kvf_zmq_link *link, kvf_dial *dial);

/** Hangs up a connection, if ZeroMQ has it; unread messages from it are lost. */
void kvf_dial_end(kvf_zmq_link *link, kvf_dial *dial);

/** The connection with an endpoint text; NULL: it was hung up. */
kvf_dial *kvf_dial_of_text(const kvf_zmq_link *link, const void *text, size_t bytes);

/** Sends without waiting. 0, or errno: ENOMEM; EHOSTUNREACH: it has ended; others: it takes no message now. */
int kvf_dial_send(kvf_zmq_link *link, const kvf_dial *dial, const void *data, size_t bytes);

/** Notes why a handshake failed, from the event. */
void kvf_dial_refused(const kvf_zmq_link *link, kvf_dial *dial, uint16_t event, uint32_t value);

/** Notes that the other end speaks another protocol. ZeroMQ hangs up on it without telling why. */
void kvf_dial_foreign(kvf_dial *dial);

/** Notes that what the other end sent was too much. */
void kvf_dial_cut_off(kvf_dial *dial);

/** Whether an endpoint is tcp:// with a host name, and not with a numeric address: it is dialled by its line's `address`. */
bool kvf_dial_has_name(const kvf_endpoint *endpoint);

/** Says why ZeroMQ gave up a try to connect: in `words`, and as KVF_E_TIMEOUT (the host did not answer) or KVF_E_IO. */
kvf_status kvf_dial_missed(const kvf_zmq_link *link, const kvf_dial *dial, const char **words);

/* ---- link_line.c ----------------------------------------------------------------------------- */

/** Makes the calling socket and its monitor. */
kvf_status kvf_lines_open(kvf_zmq_link *link, const kvf_link_options *options);

/** See kvf_link_connect(). */
kvf_status kvf_lines_connect(kvf_zmq_link *link, const char *endpoint, const char *server_key,
                             kvf_route *out);

/** See kvf_link_disconnect(). */
void kvf_lines_disconnect(kvf_zmq_link *link, kvf_route route);

/** Frees all lines. The sockets are closed already. */
void kvf_lines_free(kvf_zmq_link *link);

/** Handles events of connections, at most a batch. */
void kvf_lines_take_events(kvf_zmq_link *link);

/** Closes broken connections once all their messages have been read, and reports them. */
void kvf_lines_hang_up(kvf_zmq_link *link);

/** Dials the lines whose pause is over. If all received messages have been read, also dials a second connection for
 * each silent line, and ends one of two connections if a message has come over the other. */
void kvf_lines_redial(kvf_zmq_link *link, bool all_read);

kvf_line *kvf_line_find(kvf_zmq_link *link, kvf_route route);

/** Notes that a message came to the calling socket, and returns its line; NULL: its connection was hung up since. */
kvf_line *kvf_line_hear(kvf_zmq_link *link, const void *id, size_t bytes);

/** Sends a message over a line; drops it if it cannot be sent now. KVF_OK or KVF_E_NOMEM. */
kvf_status kvf_line_send(kvf_zmq_link *link, kvf_line *line, const void *data, size_t bytes);

/* ---- link_guard.c ---------------------------------------------------------------------------- */

/** Makes the socket by which ZeroMQ asks which connections to accept. It must exist before the listener. */
kvf_status kvf_guard_open(kvf_zmq_link *link, const kvf_link_options *options);

/** Answers ZeroMQ's requests, at most a batch. */
void kvf_guard_answer(kvf_zmq_link *link);

/** Reads the key under which a message came; false: it has none, or one that is no longer allowed. */
bool kvf_guard_passes(const kvf_zmq_link *link, zmq_msg_t *message, uint8_t key[KVF_KEY_BYTES]);

/** Whether a key that was allowed still is. */
bool kvf_guard_knows(const kvf_zmq_link *link, const uint8_t key[KVF_KEY_BYTES]);

/** See kvf_link_allow(). */
kvf_status kvf_guard_allow(kvf_zmq_link *link, const char *public_key, bool allowed);

/* ---- link_fds.c ------------------------------------------------------------------------------ */

/** Remembers the sockets and their file descriptors. All count as unread. */
kvf_status kvf_link_note_fds(kvf_zmq_link *link);

/** Finds the sockets with something to read, by one system call for all. */
void kvf_link_look(kvf_zmq_link *link);

/** Whether a socket may have something to read; false for NULL. */
bool kvf_link_is_unread(const kvf_zmq_link *link, const void *socket);

/** Notes that a socket was read until it was empty, or (`unread`) that another call may have consumed its signal. */
void kvf_link_note(kvf_zmq_link *link, const void *socket, bool unread);

/** Whether a socket has something to read, which its descriptor may not show. */
bool kvf_link_has_unread(kvf_zmq_link *link);

/** Checks that this process can open the file descriptors a link needs, because ZeroMQ aborts when it cannot. */
kvf_status kvf_link_check_descriptors(void);

#endif
