/*
 * The fabric between machines that needs only ZeroMQ: batches of runs as its messages, encrypted if there are keys.
 * Only the owner accesses its memory: for reads it gathers the bytes into the messages it sends, for writes it scatters
 * them from the messages it received. In these files:
 *
 *   messages.c          the endpoint: its settings, its sockets, its progress()
 *   messages_port.c     where the endpoint listens, its connections, and hanging up
 *   messages_clients.c  the owner's side: who its clients are, from their greeting to their end
 *   messages_serve.c    the owner's side: the messages that come, and answering requests
 *   messages_link.c     the consumer's side: connecting, and messages from the owner
 *   messages_move.c     cutting batches into requests, and taking the answers
 *   messages_pool.c     the memory that messages are sent from
 *   messages_wire.c     messages, and how lists of runs are coded
 *   messages_card.c     our part of the card
 *
 * ZeroMQ's own thread connects, sends, receives and encrypts. All else happens in progress(), so a peer's requests
 * advance only while the owner makes progress, and stop at once when the owner refuses the peer.
 */
#ifndef KVF_TRANSPORT_MESSAGES_H
#define KVF_TRANSPORT_MESSAGES_H

#include <stdatomic.h>

#include <zmq.h>

#include "base/clock.h"
#include "base/tables.h"
#include "base/turns.h"
#include "base/wake.h"
#include "base/watch.h"
#include "kernel/kernel.h"
#include "port/door.h"
#include "port/names.h"
#include "transport/fences.h"
#include "transport/messages/messages_card.h"
#include "transport/slices.h"

#define MESSAGES_SLOTS_MAX 128u       /* of an endpoint: messages that it can have on their way */
#define MESSAGES_PEER_SLOTS 8u        /* of them, for one peer */
#define MESSAGES_PEER_SLOTS_LEAST 2u  /* the same, when half of all slots are on their way */
#define MESSAGES_WINDOW_DEFAULT 8u    /* requests under way on one connection */
#define MESSAGES_RECEIVE_LIMIT 6      /* messages of one connection that wait to be read */
#define MESSAGES_SEND_LIMIT 256       /* more than are ever due to a client that keeps to the protocol */
#define MESSAGES_CLIENTS_MAX 65536u   /* known at once */
#define MESSAGES_STRANGE_BYTES 65536u /* a stranger that sends a longer message is muted */
/* Of a TCP segment of a stranger, with its header, this much is received: a HELLO, and any message of a handshake. */
#define MESSAGES_STRANGE_SEGMENT 1024u
#define MESSAGES_SEALED_BYTES 256u /* what encryption adds to a message */
#define MESSAGES_LONGEST (MESSAGES_BYTES_MAX + MESSAGES_SEALED_BYTES)
#define MESSAGES_RUNS 256u /* laid out at a time */
#define MESSAGES_A_TURN 64 /* messages of one socket that are read before the next socket is */
/* Work, in the unit of base/turns.h: of a client in its turn; and of all clients together that came in the last second,
 * in a millisecond, while others were served in the last ten: so a peer gains nothing by reconnecting, and clients that
 * ask, wait for the answer and ask again are not always behind newcomers that only ask. Each request costs some work,
 * whatever it moves. */
#define MESSAGES_TURN_WORK (256u << 10)
#define MESSAGES_SERVED_BYTES (1u << 20) /* in one progress(): new messages wait for that long */
#define MESSAGES_NEWCOMERS_WORK (64u << 10)
#define MESSAGES_NEWCOMERS_NS UINT64_C(1000000)
#define MESSAGES_OTHERS_NS UINT64_C(10000000)
#define MESSAGES_SHARES_MAX 1024u /* that are paid at once */
#define MESSAGES_REQUEST_WORK 4096u
#define MESSAGES_FAILED_MAX 8u /* requests outside of our memory: a peer that knows our card makes none */
#define MESSAGES_NEW_SLOTS 16u /* of all slots, for clients of the last second */
#define MESSAGES_STUCK_NS                                                                                    \
    UINT64_C(2000000000) /* a client that reads nothing for so long, while others wait for slots, goes */
#define MESSAGES_ABSENT_NS                                                                                   \
    (MESSAGES_STUCK_NS / 4 * 3) /* without progress: an owner may have hung up on us ... */
#define MESSAGES_ABSENCE_COUNTS_NS (5 * KVF_SECOND) /* ... of which we hear by then */
#define MESSAGES_NEW_NS KVF_SECOND
#define MESSAGES_LINGER_MS 200 /* time for a closed connection to send its last messages */
#define MESSAGES_ADDRESS_BYTES (MESSAGES_HOST_BYTES + 16u)
#define MESSAGES_NAME_BYTES 5u /* ZeroMQ's name for a connection: a zero byte and a number */

/* ---- messages_pool.c ------------------------------------------------------------------------- */

typedef struct kvf_messages_pool kvf_messages_pool;

/** Memory of one message that is being made, or is on its way. */
typedef struct kvf_messages_slot {
    kvf_messages_pool *pool;
    struct kvf_messages_slot *following;
    bool served;           /**< it carries an answer to `client` */
    bool is_new;           /**< that had just connected */
    uint32_t client;       /**< the client's number */
    unsigned char *memory; /**< MESSAGES_BYTES_MAX */
} kvf_messages_slot;

struct kvf_messages_pool {
    kvf_messages_slot *free;
    _Atomic(kvf_messages_slot *) returned; /**< by ZeroMQ's thread */
    atomic_bool wanted;                    /**< a client or link waits for a slot */
    int fd;                                /**< readable when a slot that was waited for has come back */
    uint32_t made, taken;
};

kvf_status kvf_messages_pool_open(kvf_messages_pool *pool);

/**
 * A slot for a peer that has `held` slots already. While slots are scarce a peer gets fewer, so that stopped peers,
 * which read nothing, leave some for others. NULL: none now.
 */
kvf_messages_slot *kvf_messages_pool_take(kvf_messages_pool *pool, uint32_t held);

/** Makes the next slot that comes back wake the endpoint. */
void kvf_messages_pool_want(kvf_messages_pool *pool);

/** Gives back a slot: one that was not sent, or one from kvf_messages_pool_returned(). */
void kvf_messages_pool_give(kvf_messages_slot *slot);

/** Slots that have come back, linked by `following`: the caller must give back each of them. */
kvf_messages_slot *kvf_messages_pool_returned(kvf_messages_pool *pool);

/** Makes a message of part of a slot, which comes back when ZeroMQ is done with it. KVF_OK or KVF_E_NOMEM. */
kvf_status kvf_messages_pool_message(kvf_messages_slot *slot, size_t begin, size_t bytes, zmq_msg_t *out);

/** ZeroMQ has ended: all slots are back. */
void kvf_messages_pool_close(kvf_messages_pool *pool);

/* ---- the endpoint ---------------------------------------------------------------------------- */

typedef struct kvf_messages_client kvf_messages_client;
typedef struct kvf_messages_link kvf_messages_link;

/** Z85 keys as ZeroMQ takes them; empty: none. */
typedef struct kvf_messages_keys {
    char public_key[MESSAGES_KEY_TEXT];
    char secret_key[MESSAGES_KEY_TEXT];
} kvf_messages_keys;

typedef struct kvf_messages_endpoint {
    kvf_transport *transport;
    void *zmq;    /* the context */
    void *router; /* for peers that connect to us */
    int router_fd;
    int epoll_fd; /* of all sockets, the pool and `wake` */
    kvf_wake wake;
    kvf_messages_pool pool;
    kvf_messages_card card;
    kvf_messages_keys keys;
    uint32_t window;
    uint32_t rate;        /* connections that are let in a second; 0: it depends */
    uint32_t patience_ms; /* how long we try to connect to a peer */
    uint64_t hasty_ns;    /* until then no connect() waits for its peer, see messages_link.c */
    bool router_stirs;    /* there may be messages to read */
    kvf_door door;        /* of the router */
    int door_fd;
    bool door_stirs;    /* it may have events, ... */
    uint64_t door_ns;   /* ... which are not read before this time */
    kvf_door calls;     /* the connections that we make */
    bool calls_stir;    /* they bring something */
    kvf_timer timer;    /* for the doors */
    uint64_t now;       /* of this progress() */
    uint64_t absent_ns; /* when progress was last made after a long pause; 0: never */

    kvf_messages_client *clients;                /* by number */
    kvf_turns turns;                             /* of clients with something to do, */
    uint32_t new_slots;                          /* of answers to clients that had just connected */
    uint64_t unstuck_ns;                         /* when clients that read nothing were last looked for */
    kvf_turns new_turns;                         /* the same, of those that came in the last second: */
    kvf_turn_party newcomers;                    /* its only party. Each other one is a client */
    int64_t new_work;                            /* work that newcomers may have done now, beside others, */
    uint64_t new_work_ns;                        /* as of this time */
    uint64_t others_ns;                          /* when others last had work done */
    kvf_messages_client *starved, *last_starved; /* clients that wait for a slot */
    uint32_t sweep_at;                           /* the number of clients at which we look for dead ones */
    bool greeting;                               /* `hello` came from `greeter`, and waits for memory */
    uint32_t greeter;
    zmq_msg_t hello;
    kvf_fences fences;

    kvf_messages_link *links;
    uint64_t dialled; /* counts sockets, for the names of their monitors */

    kvf_run runs[MESSAGES_RUNS];
    unsigned char list[MESSAGES_LIST_BYTES];
} kvf_messages_endpoint;

/** Sets the options that both kinds of sockets have, and our keys. */
kvf_status kvf_messages_tune(const kvf_messages_endpoint *endpoint, void *socket);

/** Watches a socket's descriptor; `what` is the link, or the endpoint itself. */
kvf_status kvf_messages_watch(kvf_messages_endpoint *endpoint, void *socket, void *what, int *fd);

/** A client or link waits for a slot: wakes the endpoint when one comes back, and soon in any case. */
void kvf_messages_await_slot(kvf_messages_endpoint *endpoint);

/* ---- messages_port.c ------------------------------------------------------------------------- */

/** Reads the settings that limit the connections. KVF_OK or KVF_E_INVALID. */
kvf_status kvf_messages_take_limits(kvf_messages_endpoint *endpoint, const kvf_transport_options *options);

/** Binds the socket and fills in where it listens. */
kvf_status kvf_messages_listen(kvf_messages_endpoint *endpoint, const char *listen);

/** Begins to weigh what comes over connections that we make. */
kvf_status kvf_messages_watch_calls(kvf_messages_endpoint *endpoint);

/** Ends connections over which a message without an end comes. */
void kvf_messages_mind_calls(kvf_messages_endpoint *endpoint);

/** Notes new and ended connections, and hangs up where that is due; returns whether there may be more. */
bool kvf_messages_mind_door(kvf_messages_endpoint *endpoint);

/** A message came over a connection, of a client or not. */
void kvf_messages_heard(kvf_messages_endpoint *endpoint, uint32_t number, bool client, zmq_msg_t *message);

/** Hangs up once a refused peer has had time to read why. */
void kvf_messages_part(kvf_messages_endpoint *endpoint, uint32_t number);
bool kvf_messages_is_parting(const kvf_messages_endpoint *endpoint, uint32_t number);
bool kvf_messages_was_met(const kvf_messages_endpoint *endpoint,
                          uint32_t number); /**< and was a client until then */

/** Hangs up. */
void kvf_messages_dismiss(kvf_messages_endpoint *endpoint, uint32_t number);

/** Ignores what else comes over a connection, and hangs up later. */
void kvf_messages_mute(kvf_messages_endpoint *endpoint, uint32_t number);
bool kvf_messages_is_muted(const kvf_messages_endpoint *endpoint, uint32_t number);

void kvf_messages_count(const void *self, kvf_transport_info *info);

/* ---- messages_clients.c ---------------------------------------------------------------------- */

/** A consumer that has shown our secret. */
struct kvf_messages_client {
    kvf_turn_seat seat; /* in the queue while there is something to do */
    kvf_turn_party own;
    uint32_t number;   /* ZeroMQ's for the connection */
    uint64_t since_ns; /* when it was let in */
    unsigned char id[MESSAGES_ID_BYTES];
    uint64_t generation;
    uint32_t region_count; /* in the card it has */
    char name[KVF_SENDER_MAX + 1];
    zmq_msg_t pending[MESSAGES_WINDOW_MAX]; /* requests, a ring */
    uint32_t first, count;
    uint32_t slots;    /* on their way to it */
    uint64_t slots_ns; /* when the last one came back, or the first was sent */
    uint32_t taken;    /* notifications whose receipt it has not been told yet */
    uint32_t failed;   /* requests that failed the check against our memory */
    bool is_gone;      /* its connection has ended, but earlier messages may still be unread */
    bool is_starved;
    kvf_messages_client *previous, *following; /* of the starved ones */
    UT_hash_handle hh;
};

/** NULL: the peer at the other end is none. */
kvf_messages_client *kvf_messages_client_of(const kvf_messages_endpoint *endpoint, uint32_t number);

/** Whether it came in the last second. */
bool kvf_messages_is_new(const kvf_messages_endpoint *endpoint, const kvf_messages_client *client);

/** Answers a HELLO, of whatever content. False: there is no memory for the client now, try again later. */
bool kvf_messages_greet(kvf_messages_endpoint *endpoint, uint32_t number, zmq_msg_t *message);

/** The client has something to do, and waits for its turn. */
void kvf_messages_set_ready(kvf_messages_endpoint *endpoint, kvf_messages_client *client);

/** The client waits for a slot, or no longer does. */
void kvf_messages_set_starved(kvf_messages_endpoint *endpoint, kvf_messages_client *client, bool starved);

/** Sends an answer, and always takes it over; false: the client is gone, or does not read what it asked for, and is
 * forgotten. */
bool kvf_messages_answer(kvf_messages_endpoint *endpoint, kvf_messages_client *client, zmq_msg_t *message);
bool kvf_messages_answer_bytes(kvf_messages_endpoint *endpoint, kvf_messages_client *client, const void *data,
                               size_t bytes);

/** Tells a client why it is one no longer, and forgets it. */
void kvf_messages_refuse(kvf_messages_endpoint *endpoint, kvf_messages_client *client,
                         kvf_messages_refusal why, uint64_t detail);

/** Forgets a client, with its unanswered requests. */
void kvf_messages_forget_client(kvf_messages_endpoint *endpoint, kvf_messages_client *client);

/** A connection has ended: its requests need no answers any more. */
void kvf_messages_left(kvf_messages_endpoint *endpoint, uint32_t number);

/** Refuses the clients whose card is older than `oldest`. */
void kvf_messages_refuse_old(kvf_messages_endpoint *endpoint, uint64_t oldest);

/** Tells all clients that the endpoint closes. */
void kvf_messages_close_clients(kvf_messages_endpoint *endpoint);

kvf_status kvf_messages_fence(void *self, const void *part, size_t bytes);
kvf_status kvf_messages_admit(void *self, const void *part, size_t bytes);

/* ---- messages_serve.c ------------------------------------------------------------------------ */

/** Reads a bounded number of messages; returns whether there may be more. */
bool kvf_messages_take(kvf_messages_endpoint *endpoint);

/** Answers requests, and subtracts the work from `budget`; returns whether there is more to do at once. */
bool kvf_messages_serve(kvf_messages_endpoint *endpoint, uint64_t *budget);

/** Slots that answers were sent from are back. */
void kvf_messages_slots_back(kvf_messages_endpoint *endpoint);

/* ---- messages_link.c ------------------------------------------------------------------------- */

/** A request that was sent, and its part of its batch. */
typedef struct kvf_messages_asked {
    kvf_batch *batch; /* NULL: cancelled, the answer will be ignored */
    kvf_slice slice;
    uint32_t number;
    kvf_direction direction;
} kvf_messages_asked;

/** Our connection to an owner. */
struct kvf_messages_link {
    kvf_messages_endpoint *endpoint;
    kvf_peer *peer; /* NULL once it was reported lost */
    kvf_messages_card card;
    bool same_place;   /* the owner's loopback is ours */
    uint32_t tried;    /* hosts of the card, of both walks of this round */
    uint32_t hopeless; /* a bit for each host that is not tried again */
    uint64_t until_ns; /* no round begins after this time */
    uint64_t tried_ns; /* when the present try began */
    uint64_t pause_ns; /* before the next round, ... */
    uint64_t due_ns;   /* ... which begins at this time; 0: none is due */
    bool naming; /* the host that is tried has a name, and what is due is a look whether it was looked up */
    kvf_lookup *lookup; /* naming; NULL: it could not begin yet */
    void *dealer, *monitor;
    int dealer_fd, monitor_fd;
    uint64_t call; /* its name in endpoint->calls; 0: it has none */
    char address[MESSAGES_ADDRESS_BYTES];
    char way[MESSAGES_ADDRESS_BYTES + 32];
    bool found;     /* the address of the host: ZeroMQ opens, and closes, a socket only once it knows one */
    bool connected; /* but the handshake may not be over */
    bool greeted;   /* there is a connection, and we have sent our HELLO */
    bool welcome;   /* the owner has accepted it */
    bool broken;    /* it has ended, but earlier messages may still be unread */
    bool stirs;     /* there may be something to do */
    bool starved;   /* it waits for a slot */
    bool lost;      /* noticed; to be told to the front by progress() */
    bool lives;     /* once it is lost: the owner refused us, or this side gave up, so that it may live */
    char why[KVF_REASON_BYTES];
    kvf_slices slices;
    kvf_messages_asked asked[MESSAGES_WINDOW_MAX]; /* a ring */
    uint32_t first, count;
    uint64_t given_up_ns; /* when the last request was given up */
    uint32_t writes;      /* among `asked` */
    uint32_t number;      /* of the last request */
    uint32_t untaken;     /* notifications that the owner has not confirmed */
    kvf_buffer early;     /* notifications from before the owner has let us in */
    kvf_messages_link *previous, *following;
};

kvf_status kvf_messages_connect(void *self, const void *data, size_t bytes, kvf_peer *peer, void **out);
void kvf_messages_disconnect(void *self);
kvf_status kvf_messages_notify(void *self, const void *data, size_t bytes);
const char *kvf_messages_way(const void *self);
const unsigned char *kvf_messages_place(const void *self);
bool kvf_messages_is_behind(const void *self);

/** Tries again to connect, if that is due. */
void kvf_messages_redial(kvf_messages_link *link);

/** Sends a message, and always takes it over. An error loses the link. */
void kvf_messages_say(kvf_messages_link *link, zmq_msg_t *message);

/** Does the link's work, and subtracts the bytes it copies from `budget`; whether there is more to do at once. */
bool kvf_messages_work(kvf_messages_link *link, uint64_t *budget);

/* ---- messages_move.c ------------------------------------------------------------------------- */

kvf_status kvf_messages_submit(void *self, kvf_batch *batch);
void kvf_messages_cancel(void *self, kvf_batch *batch);

/** Drops cancelled requests that need not wait for their answers. */
void kvf_messages_forget(kvf_messages_link *link);

/** Whether the next slice may be asked for now: once the owner has answered our HELLO. So an owner that shuts us out and
 * admits us again never finds a WRITE that we sent before, and of strangers owners receive only what is short. */
bool kvf_messages_may_ask(const kvf_messages_link *link);

/** Sends requests as far as the window and the slots allow, and subtracts the bytes it copies from `budget`. */
void kvf_messages_ask(kvf_messages_link *link, uint64_t *budget);

/** Handles DATA, DONE or FAILED; false: it does not answer a request. */
bool kvf_messages_answered(kvf_messages_link *link, kvf_messages_kind kind, const unsigned char *data,
                           size_t bytes, uint64_t *budget);

#endif
