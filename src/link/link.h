/*
 * Carries messages between agents: by ZeroMQ, with one socket that listens and one that calls, and with CurveZMQ and an
 * allow-list if keys are given. Messages may be lost, or arrive twice or late, because connections break and come back;
 * the layer above repeats calls that were not answered.
 *
 * A *route* names the other end. Outgoing routes are made by kvf_link_connect(); incoming ones appear with
 * the first message from a peer and are good for answering until that peer's connection breaks.
 *
 * One thread at a time may use a link. A thread that waits for work polls its descriptors, which is allowed while
 * another thread uses the link.
 */
#ifndef KVF_LINK_H
#define KVF_LINK_H

#include "base/clock.h"
#include "wire/wire.h"

typedef struct kvf_link kvf_link;
typedef uint64_t kvf_route; /* 0 names none */

#define KVF_KEY_CHARACTERS 40u /* of a Z85 key */
#define KVF_KEY_BYTES 32u      /* of the key itself */

/** A received message, valid during the callback. */
typedef struct kvf_letter {
    kvf_route route;
    /** KVF_KEY_BYTES of the public key that the sender has proved to hold; NULL: the link has no keys. */
    const uint8_t *key;
    bool called; /* it came over a connection that we made */
    const void *data;
    size_t bytes;
    /** Receives how much work the message caused, in bytes as if all of it were copying (base/turns.h): a client that
     * causes much work waits longer for its next turn. NULL: not counted. */
    uint64_t *work;
} kvf_letter;

typedef struct kvf_link_table kvf_link_table;

typedef struct kvf_link_options {
    const kvf_link_table *table;     /* the carrier; NULL: kvf_link_zmq */
    const kvf_clock *clock;          /* NULL: kvf_monotonic; outlives the link */
    const char *listen;              /* "tcp://127.0.0.1:*", the default when NULL */
    const char *public_key;          /* Z85; NULL: no encryption */
    const char *secret_key;          /* Z85; with public_key */
    const char *const *allowed_keys; /* public keys that may connect; with public_key */
    uint32_t allowed_key_count;      /* 0: everyone who knows our public key may connect */
    bool insecure;                   /* allows to listen beyond loopback without keys */

    /** Limits of connections that others may make to us, in all and from one address; 0: half of the process's
     * descriptors, and three quarters of that. port/guests.h says which connections are closed beyond them. */
    uint32_t max_connections, max_connections_per_address;
    /** How many of them are let in a second by TCP, and as many at once; 0: as port/gate.h says, with keys fewer. */
    uint32_t max_connections_per_second;
    /** Whether an incoming route belongs to a known peer: others are closed first. NULL: no peer is known. */
    bool (*is_known)(void *context, kvf_route route);
    /** A connection was closed, or its messages dropped, for lack of room; may be NULL. */
    void (*on_crowded)(void *context, const char *detail);

    /** A message came. */
    void (*on_message)(void *context, const kvf_letter *letter);
    /**
     * An outgoing connection broke, or could not be made (`detail` says why). The link retries by itself, with pauses
     * that grow from 20 ms to 1 s, until kvf_link_disconnect(); each failed try is reported.
     *
     * `status` is KVF_E_IO (no connection), KVF_E_TIMEOUT (no connection, because the host did not answer, or this
     * process has no descriptor for it; the peer may still exist), KVF_E_PEER_LOST (it broke, perhaps in the handshake),
     * KVF_E_PERMISSION (our key is not allowed, or only one side encrypts), KVF_E_PARSE (the other end speaks another
     * protocol). Messages from before the break have been given to on_message.
     */
    void (*on_broken)(void *context, kvf_route route, kvf_status status, const char *detail);
    void *context;
} kvf_link_options;

/**
 * Opens a link: binds and starts to listen.
 *
 * Listening beyond loopback (any address that is not 127.0.0.0/8, ::1, localhost or ipc://) needs keys or
 * `insecure`. `listen` of "" listens nowhere. Endpoints are tcp:// and ipc:// with a path.
 *
 * @return KVF_OK, KVF_E_INVALID and KVF_E_RANGE (an invalid endpoint or key), KVF_E_PERMISSION (beyond
 *         loopback without keys: the detail names the options that would allow it), KVF_E_EXISTS (address in
 *         use), KVF_E_IO, KVF_E_UNSUPPORTED (keys, and a ZeroMQ without CURVE), KVF_E_NOMEM
 */
kvf_status kvf_link_open(const kvf_link_options *options, kvf_link **out);

/** Closes it, and waits at most a second for messages that have not left yet; NULL is accepted. */
void kvf_link_close(kvf_link *link);

/** The endpoint that the link listens on, with the chosen port; "" if it listens nowhere. */
const char *kvf_link_endpoint(const kvf_link *link);

/**
 * Connects to an endpoint. Returns before there is a connection; messages sent meanwhile wait, but for those that are
 * sent before a host name was looked up: these are dropped. After a connection breaks, messages are dropped until the
 * link tries again. Connecting twice to one endpoint with one key gives the same route, which must then be disconnected
 * twice.
 *
 * The endpoint may come from a peer: it must name one host and port, not the address of all interfaces. A
 * host name is looked up, as IPv4, each time a connection is made.
 *
 * @param server_key  Z85 public key of the other end; NULL or "": none. It must be given if, and only if, we have
 *                    keys
 * @return KVF_OK, KVF_E_INVALID and KVF_E_RANGE (an invalid endpoint or key),
 *         KVF_E_PERMISSION (only one side has keys), KVF_E_EXISTS (connected already under too many other
 *         keys: 1 for ipc, 16 for tcp), KVF_E_LIMIT (more connections than descriptors allow), KVF_E_IO, KVF_E_NOMEM
 */
kvf_status kvf_link_connect(kvf_link *link, const char *endpoint, const char *server_key, kvf_route *out);

/** Gives an outgoing route back. Messages that have not left within a second are dropped. A route that does not exist
 * is ignored. */
void kvf_link_disconnect(kvf_link *link, kvf_route route);

/**
 * Sends a message. It is dropped if it cannot be sent now (the connection has ended, or the peer takes none, or too
 * much that was sent over this connection has not left yet, see link_post.h).
 *
 * @return KVF_OK, also if it was dropped; KVF_E_NOT_FOUND (there is no such outgoing route, or the connection of an
 *         incoming one has ended); KVF_E_RANGE (more than KVF_WIRE_MAX_BYTES), KVF_E_NOMEM
 */
kvf_status kvf_link_send(kvf_link *link, kvf_route route, const void *data, size_t bytes);

/**
 * Handles a bounded number of messages and events, with a callback for each; never blocks. A callback may call any
 * function except this one and kvf_link_close().
 *
 * @param more  receives whether there is more to take in at once
 */
void kvf_link_progress(kvf_link *link, bool *more);

/** Whether there is something to read that neither the descriptors nor kvf_link_due() show, because sending can consume
 * the signal. Ask before sleeping. Costs nothing if the link was not used since it last returned false. */
bool kvf_link_pending(kvf_link *link);

/**
 * Adds a key to the allow-list, or with `allowed` false removes it: messages from its holders' connections are then
 * dropped. The link must have been opened with allowed keys. If the list becomes empty later, no peer may connect.
 *
 * @return KVF_OK, also for a key that is on the list already; KVF_E_INVALID (not a key, or the link has no list),
 *         KVF_E_NOT_FOUND (the key to remove is not on the list), KVF_E_UNSUPPORTED, KVF_E_NOMEM
 */
kvf_status kvf_link_allow(kvf_link *link, const char *public_key, bool allowed);

#define KVF_LINK_FDS 7u

/** The descriptors that poll readable when something arrives; do not read them. Returns their number. */
uint32_t kvf_link_fds(const kvf_link *link, int fds[KVF_LINK_FDS]);

/** The time when kvf_link_progress() next has something to do that no descriptor shows; UINT64_MAX: never. */
uint64_t kvf_link_due(const kvf_link *link);

/** For threads that have nothing else to do: sleeps until something arrives, the link has something to do, or `until`,
 * a second at most. Does not look at kvf_link_pending(). */
void kvf_link_sleep(const kvf_link *link, uint64_t now, uint64_t until);

/** Connections that others made to us. */
typedef struct kvf_link_counts {
    uint64_t now;     /* open now */
    uint64_t closed;  /* closed by us: silent, no room, or cut off; of those that we made: cut off */
    uint64_t refused; /* those of `closed` that were not silent */
    /* Messages that were dropped: of senders that sent more than they had turns for, and to receivers that take too
     * little of what they are sent. */
    uint64_t dropped;
} kvf_link_counts;

kvf_link_counts kvf_link_count(const kvf_link *link);

/** Whether an incoming route's connection is known to have ended. */
bool kvf_link_has_ended(const kvf_link *link, kvf_route route);

/**
 * A carrier of messages: ZeroMQ, or a substitute in tests and simulations. Each function does the work of the function
 * with the same name above. The carrier's own struct begins with a kvf_link. open() receives all options, and need not
 * set the table.
 */
struct kvf_link_table {
    kvf_status (*open)(const kvf_link_options *options, kvf_link **out);
    void (*close)(kvf_link *link);
    const char *(*endpoint)(const kvf_link *link);
    kvf_status (*connect)(kvf_link *link, const char *endpoint, const char *server_key, kvf_route *out);
    void (*disconnect)(kvf_link *link, kvf_route route);
    kvf_status (*send)(kvf_link *link, kvf_route route, const void *data, size_t bytes);
    void (*progress)(kvf_link *link, bool *more);
    bool (*pending)(kvf_link *link);
    uint32_t (*fds)(const kvf_link *link, int fds[KVF_LINK_FDS]);
    uint64_t (*due)(const kvf_link *link);
    kvf_status (*allow)(kvf_link *link, const char *public_key, bool allowed); /* NULL: it has no list */
    kvf_link_counts (*counts)(const kvf_link *link);                           /* NULL: it does not count */
    bool (*has_ended)(const kvf_link *link, kvf_route route);                  /* NULL: it does not know */
};

struct kvf_link {
    const kvf_link_table *table;
};

extern const kvf_link_table kvf_link_zmq;

/** Reads a Z85 key; `name` is for the message. KVF_E_INVALID. */
kvf_status kvf_link_read_key(const char *name, const char *text, uint8_t key[KVF_KEY_BYTES]);

/** Writes a key as Z85, with a zero byte. */
void kvf_link_write_key(const uint8_t key[KVF_KEY_BYTES], char text[KVF_KEY_CHARACTERS + 1]);

/** Makes a pair of Z85 keys, 40 characters and a zero byte each. */
kvf_status kvf_link_make_keys(char public_key[KVF_KEY_CHARACTERS + 1],
                              char secret_key[KVF_KEY_CHARACTERS + 1]);

#endif
