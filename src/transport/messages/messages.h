/*
 * The fabric that every build has between machines: batches of runs as messages of ZeroMQ, encrypted where there are
 * keys. The owner of the memory does all the work on it: it gathers what is read into the messages that go out, and
 * scatters what is written from those that came in. In these files:
 *
 *   messages.c        the endpoint: its settings, its sockets, its turn of work
 *   messages_port.c   where the endpoint listens, who is connected to it, and who is hung up on
 *   messages_serve.c  the owner's side: who of them is let in, and what they ask
 *   messages_link.c   the consumer's side: connecting, and what the owner says
 *   messages_move.c   cutting batches into requests, and taking the answers
 *   messages_pool.c   the memory that messages are sent from
 *   messages_wire.c   messages, and how lists of runs are coded
 *   messages_card.c   our part of the card
 *
 * ZeroMQ's own thread connects, sends, receives and encrypts. All else happens in progress(), so what a peer asks for
 * moves only while the owner makes progress, and stops at once where it is refused.
 */
#ifndef KVF_TRANSPORT_MESSAGES_H
#define KVF_TRANSPORT_MESSAGES_H

#include <stdatomic.h>

#include <zmq.h>

#include "base/tables.h"
#include "base/turns.h"
#include "base/wake.h"
#include "kernel/kernel.h"
#include "port/door.h"
#include "transport/fences.h"
#include "transport/messages/messages_card.h"
#include "transport/slices.h"

#define MESSAGES_SLOTS_MAX 128u       /* of an endpoint: what it can have on its way */
#define MESSAGES_PEER_SLOTS 8u        /* of them, for one peer */
#define MESSAGES_PEER_SLOTS_LEAST 2u  /* when more than half of them are on their way */
#define MESSAGES_WINDOW_DEFAULT 8u    /* requests under way on one connection */
#define MESSAGES_RECEIVE_LIMIT 6      /* messages of one connection that wait to be looked at */
#define MESSAGES_SEND_LIMIT 256       /* more than are ever due to one that keeps to the protocol */
#define MESSAGES_CLIENTS_MAX 65536u   /* known at once */
#define MESSAGES_STRANGE_BYTES 65536u /* of a stranger who sends a longer message nothing more is heard */
#define MESSAGES_RUNS 256u            /* laid out at a time */
#define MESSAGES_A_TURN 64 /* messages of one socket that are looked at before the next socket is */
/* Work, as base/turns.h counts it: of a client in its turn, and of all together who have come in the last second, so that
 * who comes again and again has no more turns for it. Each request is some, whatever it moves. */
#define MESSAGES_TURN_WORK (256u << 10)
#define MESSAGES_SERVED_BYTES (1u << 20) /* in one turn of work: what comes meanwhile waits so long */
#define MESSAGES_NEWCOMERS_WORK (64u << 10)
#define MESSAGES_REQUEST_WORK 4096u
#define MESSAGES_FAILED_MAX 8u /* requests for what there is not: a peer that knows our card makes none */
#define MESSAGES_NEW_SLOTS 16u /* of all slots, for those */
#define MESSAGES_STUCK_NS                                                                                    \
    UINT64_C(2000000000) /* who takes nothing for so long, while others wait for slots, goes */
#define MESSAGES_NEW_NS UINT64_C(1000000000)
#define MESSAGES_LINGER_MS 200 /* what a closed connection still has to say gets so long */
#define MESSAGES_ADDRESS_BYTES (MESSAGES_HOST_BYTES + 16u)

/* ---- messages_pool.c ------------------------------------------------------------------------- */

typedef struct kvf_messages_pool kvf_messages_pool;

/** Memory of one message that is being made, or is on its way. */
typedef struct kvf_messages_slot {
    kvf_messages_pool *pool;
    struct kvf_messages_slot *following;
    bool served;           /**< it carries an answer to `client` */
    bool is_new;           /**< who had just come */
    uint32_t client;       /**< its number */
    unsigned char *memory; /**< MESSAGES_BYTES_MAX */
} kvf_messages_slot;

struct kvf_messages_pool {
    kvf_messages_slot *free;
    _Atomic(kvf_messages_slot *) returned; /**< by ZeroMQ's thread */
    atomic_bool wanted;                    /**< somebody waits for a slot */
    int fd;                                /**< readable when a slot has come back that was waited for */
    uint32_t made, taken;
};

kvf_status kvf_messages_pool_open(kvf_messages_pool *pool);

/**
 * A slot for a peer that has `held` of them: many as long as there are many, so that peers that read nothing, because
 * they were stopped, leave some for others. NULL: none now.
 */
kvf_messages_slot *kvf_messages_pool_take(kvf_messages_pool *pool, uint32_t held);

/** Whoever waits for a slot is to be woken by the next that comes back. */
void kvf_messages_pool_want(kvf_messages_pool *pool);

/** Gives one back that was not sent. */
void kvf_messages_pool_give(kvf_messages_slot *slot);

/** Slots that have come back, linked by `following`: each is to be given back. */
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
    void *router; /* who connects to us */
    int router_fd;
    int epoll_fd; /* of all sockets, the pool and `wake` */
    kvf_wake wake;
    kvf_messages_pool pool;
    kvf_messages_card card;
    kvf_messages_keys keys;
    uint32_t window;
    bool router_stirs; /* it may have something to take in */
    kvf_door door;     /* of the router */
    int door_fd;
    bool door_stirs;   /* it may have something to say, */
    uint64_t door_ns;  /* and is not asked before */
    int timer_fd;      /* for the door, */
    uint64_t timer_ns; /* and when it is set to; UINT64_MAX: it is not */
    uint64_t now;      /* of this turn of work */

    kvf_messages_client *clients;                /* by number */
    kvf_turns turns;                             /* of those with something to do */
    uint32_t new_slots;                          /* of answers to who had just come */
    uint64_t unstuck_ns;                         /* when those were looked for who take nothing */
    kvf_turn_party newcomers;                    /* one of the parties; the others are a client each */
    kvf_messages_client *starved, *last_starved; /* those who wait for a slot */
    uint32_t sweep_at;                           /* as many clients as make us look who is still there */
    bool greeting;                               /* `hello` came from `greeter`, and waits for memory */
    uint32_t greeter;
    zmq_msg_t hello;
    kvf_fences fences;

    kvf_messages_link *links;
    uint64_t dialled; /* counts sockets, for the names of their monitors */

    kvf_run runs[MESSAGES_RUNS];
    unsigned char list[MESSAGES_LIST_BYTES];
} kvf_messages_endpoint;

/** Options that both kinds of sockets have; and our keys. */
kvf_status kvf_messages_tune(const kvf_messages_endpoint *endpoint, void *socket);

/** Watches a socket's descriptor; `what` is the link, or the endpoint itself. */
kvf_status kvf_messages_watch(kvf_messages_endpoint *endpoint, void *socket, void *what, int *fd);

/* ---- messages_port.c ------------------------------------------------------------------------- */

/** Takes the settings that say how many may be connected. KVF_OK or KVF_E_INVALID. */
kvf_status kvf_messages_take_limits(kvf_messages_endpoint *endpoint, const kvf_transport_options *options);

/** Binds the socket and fills in where it listens. */
kvf_status kvf_messages_listen(kvf_messages_endpoint *endpoint, const char *listen);

/** Takes in who has come and gone, and hangs up where that is due; whether there may be more. */
bool kvf_messages_mind_door(kvf_messages_endpoint *endpoint);

/** A message came over a connection, of a client or not. */
void kvf_messages_heard(kvf_messages_endpoint *endpoint, uint32_t number, bool client, zmq_msg_t *message);

/** Hangs up when somebody who was refused has had time to read why. */
void kvf_messages_part(kvf_messages_endpoint *endpoint, uint32_t number);
bool kvf_messages_is_parting(const kvf_messages_endpoint *endpoint, uint32_t number);
bool kvf_messages_was_met(const kvf_messages_endpoint *endpoint,
                          uint32_t number); /**< and was a client until then */

/** Hangs up. */
void kvf_messages_dismiss(kvf_messages_endpoint *endpoint, uint32_t number);

/** Takes nothing more in over a connection, and hangs up later. */
void kvf_messages_mute(kvf_messages_endpoint *endpoint, uint32_t number);
bool kvf_messages_is_muted(const kvf_messages_endpoint *endpoint, uint32_t number);

void kvf_messages_count(const void *self, kvf_transport_info *info);

/* ---- messages_serve.c ------------------------------------------------------------------------ */

/** Somebody who has shown our secret. */
struct kvf_messages_client {
    kvf_turn_seat seat; /* waits where there is something to do */
    kvf_turn_party own;
    uint32_t number;   /* ZeroMQ's for the connection */
    uint64_t since_ns; /* when it was let in */
    unsigned char id[MESSAGES_ID_BYTES];
    uint64_t generation;
    uint32_t region_count; /* of the card it has */
    char name[KVF_SENDER_MAX + 1];
    zmq_msg_t pending[MESSAGES_WINDOW_MAX]; /* requests, a ring */
    uint32_t first, count;
    uint32_t slots;    /* on their way to it */
    uint64_t slots_ns; /* when one came back, or the first went */
    uint32_t taken;    /* notifications, of which it is not told yet */
    uint32_t failed;   /* requests that were for what there is not */
    bool is_gone;      /* its connection has ended, but what came before may still be unread */
    bool is_starved;
    kvf_messages_client *previous, *following; /* of the starved ones */
    UT_hash_handle hh;
};

bool kvf_messages_is_client(const kvf_messages_endpoint *endpoint, uint32_t number);

/** A connection has ended. Nobody takes the answers any more to what was asked over it. */
void kvf_messages_left(kvf_messages_endpoint *endpoint, uint32_t number);

/** Takes in what came, some messages at most; whether there may be more. */
bool kvf_messages_take(kvf_messages_endpoint *endpoint);

/** Answers, taking what it copies from `budget`; whether there is more to do at once. */
bool kvf_messages_serve(kvf_messages_endpoint *endpoint, uint64_t *budget);

/** Slots that answers were sent from are back. */
void kvf_messages_slots_back(kvf_messages_endpoint *endpoint);

/** Refuses whoever has a card of before `oldest`. */
void kvf_messages_refuse_old(kvf_messages_endpoint *endpoint, uint64_t oldest);

kvf_status kvf_messages_fence(void *self, const void *part, size_t bytes);
kvf_status kvf_messages_admit(void *self, const void *part, size_t bytes);

/** Tells all that it closes. */
void kvf_messages_close_clients(kvf_messages_endpoint *endpoint);

/* ---- messages_link.c ------------------------------------------------------------------------- */

/** A request that was sent, and its part of its batch. */
typedef struct kvf_messages_asked {
    kvf_batch *batch; /* NULL: cancelled, the answer is of no interest */
    kvf_slice slice;
    uint32_t number;
    kvf_direction direction;
} kvf_messages_asked;

/** Our connection to an owner. */
struct kvf_messages_link {
    kvf_messages_endpoint *endpoint;
    kvf_peer *peer; /* NULL once it was reported lost */
    kvf_messages_card card;
    bool same_place; /* the owner's loopback is ours */
    uint32_t tried;  /* hosts of the card, of both rounds */
    void *dealer, *monitor;
    int dealer_fd, monitor_fd;
    char address[MESSAGES_ADDRESS_BYTES];
    char way[MESSAGES_ADDRESS_BYTES + 32];
    bool connected; /* but perhaps not yet shaken hands */
    bool greeted;   /* there is a connection, and we have said who we are */
    bool broken;    /* it has ended, but what came before may still be unread */
    bool stirs;     /* there may be something to do */
    bool starved;   /* it waits for a slot */
    bool lost;      /* noticed; to be told to the front by progress() */
    bool refused;   /* its owner said so, and lives */
    char why[KVF_REASON_BYTES];
    kvf_slices slices;
    kvf_messages_asked asked[MESSAGES_WINDOW_MAX]; /* a ring */
    uint32_t first, count;
    uint32_t writes;  /* of those that were asked */
    uint32_t number;  /* of the last request */
    uint32_t untaken; /* notifications */
    kvf_buffer early; /* notifications of before there was a connection */
    kvf_messages_link *previous, *following;
};

kvf_status kvf_messages_connect(void *self, const void *data, size_t bytes, kvf_peer *peer, void **out);
void kvf_messages_disconnect(void *self);
kvf_status kvf_messages_notify(void *self, const void *data, size_t bytes);
const char *kvf_messages_way(const void *self);
bool kvf_messages_place(const void *self, unsigned char out[KVF_PLACE_BYTES]);

/** Notes that the owner is gone; the first reason stays. */
void kvf_messages_lose(kvf_messages_link *link, const char *why);

/** Sends a message, which is taken over in any case. An error loses the link. */
void kvf_messages_say(kvf_messages_link *link, zmq_msg_t *message);

/** Does what there is to do, taking what it copies from `budget`; whether there is more to do at once. */
bool kvf_messages_work(kvf_messages_link *link, uint64_t *budget);

/* ---- messages_move.c ------------------------------------------------------------------------- */

kvf_status kvf_messages_submit(void *self, kvf_batch *batch);
void kvf_messages_cancel(void *self, kvf_batch *batch);

/** Forgets what was cancelled. */
void kvf_messages_forget(kvf_messages_link *link);

/** Sends requests as far as the window and the slots allow, taking what is copied from `budget`. */
void kvf_messages_ask(kvf_messages_link *link, uint64_t *budget);

/** Takes DATA, DONE or FAILED; false: it is no answer to what was asked. */
bool kvf_messages_answered(kvf_messages_link *link, kvf_messages_kind kind, const unsigned char *data,
                           size_t bytes, uint64_t *budget);

#endif
