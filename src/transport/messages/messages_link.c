/*
 * The consumer's side: connecting to an owner by one of the hosts on its card, sending our HELLO, and handling its
 * messages. A connection that ends is lost: ZeroMQ would reconnect, but the owner would not know the new connection.
 *
 * An owner lets only so many connect in a second (port/gate.h), and a host that drops our attempts says nothing. So the
 * hosts are tried in rounds until one answers, and again if the owner hangs up before it has answered our HELLO, which
 * it may for want of room: nothing was asked of it until then. A host that refuses is not tried again.
 */
#include <stdio.h>
#include <sys/epoll.h>

#include "base/clock.h"
#include "base/descriptors.h"
#include "transport/messages/messages.h"

/* Of a connection: two sockets, each with a descriptor, a third that ZeroMQ makes to watch it, and its own. The
 * descriptors of the context are counted once, elsewhere. */
#define DESCRIPTORS_OF_A_LINK 6
/* For each host: TCP sends two attempts in that time, and would then send ever fewer. */
#define CONNECT_MS 1500
#define NEVER_MS 100000000 /* ZeroMQ must not reconnect */
#define PAUSE_NS UINT64_C(20000000)
#define PAUSE_MAX_NS KVF_SECOND
#define BEHIND_NS KVF_SECOND /* unless a link was down, what was given up has come by then */
/* On one machine a connection is made or refused within a second, and a handshake within a tenth, unless the process is
 * stopped, or lets nobody in now. Then connects do not wait for a while, since the caller stands still meanwhile. */
#define SAME_PLACE_MS 1000u
#define HANDSHAKE_MS 100u
#define HASTY_NS (10 * KVF_SECOND)

#define MONITORED                                                                                            \
    (ZMQ_EVENT_CONNECTED | ZMQ_EVENT_CONNECT_RETRIED | ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_CLOSED |           \
     ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |                                  \
     ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH)

/* Notes that the owner is gone; the first reason stays. */
static void lose(kvf_messages_link *link, const char *why) {
    if (link->lost)
        return;
    link->lost = link->stirs = true;
    (void)snprintf(link->why, sizeof link->why, "%s", why);
}

/* Ends the link from this side: the owner may live. */
static void give_up(kvf_messages_link *link, const char *why) {
    link->lives = link->lives || !link->lost;
    lose(link, why);
}

/* ---- sockets --------------------------------------------------------------------------------- */

static void hang_up(kvf_messages_link *link, int linger_ms) {
    void **sockets[] = {&link->dealer, &link->monitor};
    int *fds[] = {&link->dealer_fd, &link->monitor_fd};
    kvf_door_hung_up(&link->endpoint->calls, &link->call);
    if (link->dealer)
        (void)zmq_setsockopt(link->dealer, ZMQ_LINGER, &linger_ms, sizeof linger_ms);
    for (int i = 0; i < 2; i++) {
        if (*fds[i] >= 0)
            (void)epoll_ctl(link->endpoint->epoll_fd, EPOLL_CTL_DEL, *fds[i], NULL);
        kvf_zmq_close(*sockets[i]);
        *sockets[i] = NULL;
        *fds[i] = -1;
    }
    link->greeted = link->welcome = link->connected = link->found = link->broken = false;
    kvf_lookup_drop(&link->lookup);
    link->naming = false;
}

static kvf_status open_monitor(kvf_messages_link *link) {
    char name[48];
    (void)snprintf(name, sizeof name, "inproc://link-%llu", (unsigned long long)link->endpoint->dialled++);
    kvf_status status = kvf_zmq_monitor(link->endpoint->zmq, link->dealer, name, MONITORED, &link->monitor);
    return status ? status : kvf_messages_watch(link->endpoint, link->monitor, link, &link->monitor_fd);
}

static kvf_status set_server_key(const kvf_messages_link *link) {
    char key[MESSAGES_KEY_TEXT];
    if (!link->card.encrypted)
        return KVF_OK;
    if (!zmq_z85_encode(key, link->card.key, MESSAGES_KEY_BYTES) ||
        zmq_setsockopt(link->dealer, ZMQ_CURVE_SERVERKEY, key, sizeof key))
        return kvf_zmq_fail("the owner's key");
    return KVF_OK;
}

/* `host` is an address. */
static kvf_status open_dealer(kvf_messages_link *link, const char *host) {
    const int never = NEVER_MS, connect = CONNECT_MS, six = strchr(host, ':') != NULL;
    char address[sizeof link->address];
    const int receive = (int)MESSAGES_WINDOW_MAX;
    link->dealer = zmq_socket(link->endpoint->zmq, ZMQ_DEALER);
    if (!link->dealer)
        return kvf_zmq_fail("zmq_socket");
    kvf_status status = kvf_messages_tune(link->endpoint, link->dealer);
    if (!status && (zmq_setsockopt(link->dealer, ZMQ_RECONNECT_IVL, &never, sizeof never) ||
                    zmq_setsockopt(link->dealer, ZMQ_CONNECT_TIMEOUT, &connect, sizeof connect) ||
                    zmq_setsockopt(link->dealer, ZMQ_RCVHWM, &receive, sizeof receive) ||
                    zmq_setsockopt(link->dealer, ZMQ_IPV6, &six, sizeof six)))
        status = kvf_zmq_fail("zmq_setsockopt");
    if (!status)
        status = set_server_key(link);
    if (!status)
        status = open_monitor(link);
    if (!status)
        status = kvf_messages_watch(link->endpoint, link->dealer, link, &link->dealer_fd);
    kvf_messages_address(host, link->card.port, address, sizeof address);
    if (!status && kvf_zmq_connect(link->dealer, address))
        status = kvf_zmq_fail(address);
    link->tried_ns = kvf_now(&kvf_monotonic);
    return status;
}

/* Goes on when it is time to look whether the host's name was looked up. */
static void await_name(kvf_messages_link *link) {
    link->naming = true;
    link->due_ns = kvf_now(&kvf_monotonic) + KVF_LOOKUP_PAUSE;
    kvf_timer_by(&link->endpoint->timer, link->due_ns);
}

static kvf_status dial(kvf_messages_link *link, const char *host) {
    kvf_messages_address(host, link->card.port, link->address, sizeof link->address);
    if (kvf_messages_is_address(host))
        return open_dealer(link, host);
    await_name(link);
    return KVF_OK;
}

/* A round walks over the hosts of the card twice: the place of the host at one of its steps. */
static uint32_t place_at(const kvf_messages_link *link, uint32_t step) {
    return step < link->card.host_count ? step : step - link->card.host_count;
}

/* The place of the host that is tried now. */
static uint32_t host_of(const kvf_messages_link *link) {
    return place_at(link, link->tried - 1);
}

/* Loopback hosts come first if the owner's loopback is ours, and are skipped otherwise. NULL: at this step there is none
 * to try. */
static const char *host_at(const kvf_messages_link *link, uint32_t step) {
    const uint32_t place = place_at(link, step);
    const bool first = step == place;
    const char *host = link->card.hosts[place];
    const bool is_its_turn = kvf_messages_is_loopback(host) ? first && link->same_place : !first;
    return is_its_turn && !(link->hopeless >> place & 1) ? host : NULL;
}

/* NULL: all were tried in this round. */
static const char *next_host(kvf_messages_link *link) {
    const char *host = NULL;
    while (!host && link->tried < 2 * link->card.host_count)
        host = host_at(link, link->tried++);
    return host;
}

static bool has_hope(const kvf_messages_link *link) {
    for (uint32_t step = 0; step < 2 * link->card.host_count; step++)
        if (host_at(link, step))
            return true;
    return false;
}

/* How a host has failed. */
typedef enum miss {
    NOBODY_LISTENS,
    SOMETHING_ELSE, /* as far as is known, the owner lives */
    PERHAPS_LATER,  /* the same, and it may let us in later */
} miss;

/* Tries the next host, or the first one again after a pause, or loses the link; `why` the last host failed. */
static void try_next(kvf_messages_link *link, const char *why, miss how) {
    char words[KVF_REASON_BYTES];
    const uint64_t now = kvf_now(&kvf_monotonic);
    const bool later = how == PERHAPS_LATER;
    (void)snprintf(words, sizeof words, "%s: %s", link->address, why);
    hang_up(link, 0);
    link->lives = link->lives || how != NOBODY_LISTENS;
    if (!later)
        link->hopeless |= 1u << host_of(link);
    const char *host = next_host(link);
    if (host && dial(link, host)) {
        give_up(link, kvf_error_detail());
    } else if (!host && (now >= link->until_ns || !has_hope(link))) {
        lose(link, words);
    } else if (!host) {
        link->due_ns = now + link->pause_ns;
        link->pause_ns = kvf_min_u64(2 * link->pause_ns, PAUSE_MAX_NS);
        kvf_timer_by(&link->endpoint->timer, link->due_ns);
    }
    if (!link->lost && later)
        kvf_peer_waits(link->peer, words);
}

/* Connects if the name of the host was looked up. */
static void go_on_naming(kvf_messages_link *link) {
    const char *host = link->card.hosts[host_of(link)];
    char address[INET_ADDRSTRLEN];
    const kvf_status status = kvf_look_up(host, strlen(host), &link->lookup, address);
    if (status == KVF_IN_PROGRESS) {
        await_name(link);
        return;
    }
    link->naming = false;
    link->stirs = true;
    if (status == KVF_E_IO)
        try_next(link, "no connection: the host name could not be looked up", SOMETHING_ELSE);
    else if (status || open_dealer(link, address))
        give_up(link, kvf_error_detail());
}

void kvf_messages_redial(kvf_messages_link *link) {
    if (!link->due_ns || link->lost)
        return;
    if (link->endpoint->now < link->due_ns) {
        kvf_timer_by(&link->endpoint->timer, link->due_ns);
        return;
    }
    link->due_ns = 0;
    if (link->naming) {
        go_on_naming(link);
        return;
    }
    link->tried = 0;
    link->lives = false; /* unless a host of this round says otherwise */
    link->stirs = true;
    if (dial(link, next_host(link)))
        give_up(link, kvf_error_detail());
}

/* ---- events of the connection ---------------------------------------------------------------- */

static void greet(kvf_messages_link *link) {
    kvf_messages_endpoint *endpoint = link->endpoint;
    kvf_messages_hello hello = {.generation = kvf_peer_generation(link->peer)};
    zmq_msg_t message;
    (void)kvf_peer_region_bytes(link->peer, &hello.region_count);
    memcpy(hello.secret, link->card.secret, sizeof hello.secret);
    memcpy(hello.id, endpoint->card.id, sizeof hello.id);
    (void)snprintf(hello.name, sizeof hello.name, "%s", kvf_transport_name(endpoint->transport));
    unsigned char bytes[MESSAGES_HELLO_BYTES_MAX];
    size_t length = kvf_messages_hello_write(&hello, bytes);
    if (zmq_msg_init_size(&message, length)) {
        give_up(link, "no memory for a greeting");
        return;
    }
    memcpy(zmq_msg_data(&message), bytes, length);
    link->greeted = true;
    (void)snprintf(link->way, sizeof link->way, "messages to %s%s", link->address,
                   link->card.encrypted ? ", encrypted" : "");
    kvf_messages_say(link, &message);
}

static void say_notice(kvf_messages_link *link, const void *data, size_t bytes) {
    zmq_msg_t message;
    if (zmq_msg_init_size(&message, bytes + 1)) {
        give_up(link, "no memory for a notification");
        return;
    }
    unsigned char *at = zmq_msg_data(&message);
    *at = MESSAGES_NOTICE;
    memcpy(at + 1, data, bytes);
    kvf_messages_say(link, &message);
}

/* Sends the notifications from before the owner has let us in. Each is its length, and its bytes. */
static void say_early(kvf_messages_link *link) {
    kvf_byte_reader from = {link->early.data, link->early.length, false};
    while (from.left > 0) {
        size_t bytes = (size_t)kvf_take_number(&from, 2);
        say_notice(link, kvf_take_bytes(&from, bytes), bytes);
    }
    kvf_buffer_free(&link->early);
}

/* ZeroMQ gave the try up after its time; if it did so earlier, the host, or ours, refused it. */
static bool was_unanswered(const kvf_messages_link *link, uint32_t event) {
    return event == ZMQ_EVENT_CONNECT_RETRIED && link->found &&
           kvf_now(&kvf_monotonic) - link->tried_ns >=
               CONNECT_MS * UINT64_C(950000); /* ZeroMQ's clock is not exact */
}

static const char *why_failed(const kvf_messages_link *link, uint32_t event, uint32_t value) {
    bool encrypted = link->card.encrypted;
    const char *host = link->card.hosts[host_of(link)];
    if (event == ZMQ_EVENT_CONNECT_RETRIED && !link->found && !kvf_messages_is_address(host))
        return "no connection: the host name could not be looked up";
    if (was_unanswered(link, event))
        return "no connection: the host did not answer";
    if (event == ZMQ_EVENT_CONNECT_RETRIED)
        return kvf_messages_is_loopback(host)
                   ? "nobody listens there: the peer's endpoint has closed, or its process has ended"
                   : "no connection: it was refused, or there is no route to the host";
    if (event == ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL && value == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
        return encrypted ? "the endpoint that listens there does not encrypt"
                         : "the endpoint that listens there encrypts";
    return encrypted ? "no handshake: the endpoint that listens there has another key than the card says"
                     : "no handshake: the endpoint that listens there is not that of the card";
}

static miss how_failed(const kvf_messages_link *link, uint32_t event) {
    if (was_unanswered(link, event))
        return PERHAPS_LATER;
    return event == ZMQ_EVENT_CONNECT_RETRIED && link->found ? NOBODY_LISTENS : SOMETHING_ELSE;
}

static void take_event(kvf_messages_link *link, uint32_t event, uint32_t value) {
    if (event == ZMQ_EVENT_CONNECTED) {
        link->connected = true;
        link->call =
            kvf_door_called(&link->endpoint->calls, (int)value, link->card.port, link->endpoint->now);
    } else if (event == ZMQ_EVENT_CLOSED) {
        link->found = true;
    } else if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED && !link->greeted) {
        greet(link);
    } else if (event == ZMQ_EVENT_DISCONNECTED && link->greeted) {
        link->broken = true;
    } else if (event != ZMQ_EVENT_HANDSHAKE_SUCCEEDED && !link->greeted) {
        try_next(link, why_failed(link, event, value), how_failed(link, event));
    }
}

/* An owner hangs up without a word on a client that takes none of its answers for long, as this process does while it is
 * stopped. Whether somebody still listens does not tell: of a process that ends, the kernel may close that last. */
static bool may_have_held_it_up(const kvf_messages_link *link) {
    const kvf_messages_endpoint *endpoint = link->endpoint;
    return link->count > link->writes && endpoint->absent_ns > 0 &&
           endpoint->now - endpoint->absent_ns < MESSAGES_ABSENCE_COUNTS_NS;
}

static void end_broken(kvf_messages_link *link) {
    if (kvf_door_has_cut_off(&link->endpoint->calls, link->call))
        give_up(link, "it was closed here, because the peer sent a message without an end");
    else if (link->welcome && may_have_held_it_up(link))
        give_up(link, "the peer has ended the connection, perhaps because this side read nothing for long");
    else if (link->welcome)
        lose(link, "the connection broke: the peer's process has ended, or the network failed");
    else
        try_next(link, "the connection broke before the peer had let us in", PERHAPS_LATER);
}

/* One event; false: there is none. */
static bool receive_event(kvf_messages_link *link) {
    uint16_t event;
    uint32_t value;
    if (!link->monitor || !kvf_zmq_take_event(link->monitor, &event, &value, NULL))
        return false;
    take_event(link, event, value);
    return true;
}

/* ---- messages from the owner ----------------------------------------------------------------- */

static void take_refusal(kvf_messages_link *link, const unsigned char *data, size_t bytes) {
    kvf_byte_reader from = {data, bytes, false};
    char words[KVF_REASON_BYTES];
    (void)kvf_take_number(&from, 4);
    uint32_t why = (uint32_t)kvf_take_number(&from, 4);
    unsigned long long detail = kvf_take_number(&from, 8);
    switch (why) {
    case MESSAGES_REFUSED_STRANGER:
        (void)snprintf(words, sizeof words, "another endpoint than that of the card listens at %s",
                       link->address);
        break;
    case MESSAGES_REFUSED_VERSION:
        (void)snprintf(words, sizeof words,
                       "the peer speaks version %llu of the messages; this library speaks version %u", detail,
                       MESSAGES_VERSION);
        break;
    case MESSAGES_REFUSED_GENERATION:
        (void)snprintf(words, sizeof words,
                       "the card is for generation %llu of the peer's memory, which is now at %llu or later: "
                       "a new card is needed",
                       (unsigned long long)kvf_peer_generation(link->peer), detail);
        break;
    case MESSAGES_REFUSED_FENCED:
        (void)snprintf(words, sizeof words, "the peer has shut this endpoint out");
        break;
    case MESSAGES_REFUSED_CLOSED:
        (void)snprintf(words, sizeof words, "the peer's endpoint has closed");
        break;
    case MESSAGES_REFUSED_FULL:
        (void)snprintf(words, sizeof words, "the peer has no room for another connection");
        break;
    default:
        (void)snprintf(words, sizeof words,
                       "the peer says that this endpoint does not keep to the protocol (reason %u)", why);
    }
    const bool is_there = why != MESSAGES_REFUSED_CLOSED && why != MESSAGES_REFUSED_STRANGER;
    link->lives = is_there;
    lose(link, words);
}

static bool take_taken(kvf_messages_link *link, const unsigned char *data, size_t bytes) {
    kvf_byte_reader from = {data, bytes, false};
    (void)kvf_take_number(&from, 4);
    uint32_t count = (uint32_t)kvf_take_number(&from, 4);
    if (from.cut_off || count > link->untaken)
        return false;
    link->untaken -= count;
    return true;
}

/* False: the owner violates the protocol. */
static bool take_message(kvf_messages_link *link, const unsigned char *data, size_t bytes, uint64_t *budget) {
    int kind = bytes > 0 ? data[0] : 0;
    switch (kind) {
    case MESSAGES_REFUSED:
        take_refusal(link, data, bytes);
        return true;
    case MESSAGES_DATA:
    case MESSAGES_DONE:
    case MESSAGES_FAILED:
        return kvf_messages_answered(link, (kvf_messages_kind)kind, data, bytes, budget);
    case MESSAGES_TAKEN:
        return take_taken(link, data, bytes);
    case MESSAGES_ALIVE:
        link->welcome = true;
        link->lives = false; /* if this connection ends */
        kvf_peer_waits(link->peer, NULL);
        say_early(link);
        return true;
    default:
        return false;
    }
}

/* One message; false: there is none. */
static bool receive_one(kvf_messages_link *link, uint64_t *budget) {
    zmq_msg_t message;
    (void)zmq_msg_init(&message);
    bool received = link->dealer && kvf_zmq_receive_frame(link->dealer, &message);
    if (received && !take_message(link, zmq_msg_data(&message), zmq_msg_size(&message), budget))
        give_up(link, "the peer does not keep to the protocol");
    (void)zmq_msg_close(&message);
    return received;
}

/* ---- work ------------------------------------------------------------------------------------ */

void kvf_messages_say(kvf_messages_link *link, zmq_msg_t *message) {
    link->stirs = true; /* sending can swallow the signal on the descriptor */
    const int error = kvf_zmq_send_last(link->dealer, message);
    if (!error)
        return;
    (void)kvf_fail(KVF_E_IO, "sending to the peer: %s", zmq_strerror(error));
    give_up(link, kvf_error_detail());
}

/* No batch of the link accesses memory any more, for only our own thread does. */
static void tell_lost(kvf_messages_link *link) {
    kvf_peer *peer = link->peer;
    hang_up(link, 0);
    kvf_buffer_free(&link->early);
    link->slices = (kvf_slices){0};
    link->count = link->writes = 0;
    link->starved = false;
    link->peer = NULL;
    if (peer)
        (link->lives ? kvf_peer_refused : kvf_peer_lost)(peer, link->why);
}

bool kvf_messages_work(kvf_messages_link *link, uint64_t *budget) {
    link->stirs = false;
    if (!link->peer)
        return false;
    /* Events are read first, but take effect after the messages that came before them. */
    while (!link->lost && receive_event(link)) {
    }
    kvf_messages_forget(link);
    bool more = true;
    uint32_t received = 0;
    for (int i = 0; i < MESSAGES_A_TURN && more && !link->lost && *budget > 0; i++) {
        kvf_messages_ask(link, budget);
        more = receive_one(link, budget);
        received += more;
        if (kvf_transport_hurried(link->endpoint->transport))
            break;
    }
    if (more || received > 0) /* what has come may be whole messages that were not read yet */
        (void)kvf_guests_read(&link->endpoint->calls.guests, link->call);
    if (!more && link->broken) {
        end_broken(link);
        /* A new socket's descriptor shows nothing before the socket was read until it was empty. */
        more = true;
    }
    if (link->lost) {
        tell_lost(link);
        return false;
    }
    kvf_messages_forget(link);
    link->stirs = false;
    return more || link->broken || (link->dealer && kvf_zmq_readable(link->dealer)) ||
           (kvf_messages_may_ask(link) && !link->starved);
}

/* ---- the fabric's functions ------------------------------------------------------------------ */

static kvf_status check_card(const kvf_messages_endpoint *endpoint, const kvf_messages_card *card) {
    if (card->encrypted != endpoint->card.encrypted)
        return kvf_fail(KVF_E_PERMISSION, card->encrypted
                                              ? "the peer encrypts, but this side has no messages.secret_key"
                                              : "this side encrypts, but the peer has no keys");
    return KVF_OK;
}

/* Within a machine it is known at once whether the owner listens. */
static kvf_status wait_for_answer(kvf_messages_link *link) {
    uint64_t end = kvf_now(&kvf_monotonic) + SAME_PLACE_MS * UINT64_C(1000000);
    while (!link->greeted && !link->lost && !link->due_ns && kvf_now(&kvf_monotonic) < end) {
        zmq_pollitem_t item = {.socket = link->monitor, .events = ZMQ_POLLIN};
        bool before = link->connected;
        (void)zmq_poll(&item, 1, 10);
        while (!link->greeted && !link->lost && receive_event(link)) {
        }
        if (link->connected && !before)
            end = kvf_now(&kvf_monotonic) + HANDSHAKE_MS * UINT64_C(1000000);
    }
    if (!link->connected && !link->lost)
        link->endpoint->hasty_ns = kvf_now(&kvf_monotonic) + HASTY_NS;
    return link->lost ? kvf_fail(KVF_E_PEER_LOST, "%s", link->why) : KVF_OK;
}

static void free_link(kvf_messages_link *link) {
    hang_up(link, link->lost || !link->greeted ? 0 : MESSAGES_LINGER_MS);
    kvf_buffer_free(&link->early);
    kvf_free(link);
}

static kvf_status reach(kvf_messages_link *link) {
    const char *host = next_host(link);
    if (!host)
        return kvf_fail(KVF_E_UNSUPPORTED, "the peer listens on the loopback of another machine only");
    kvf_status status = dial(link, host);
    if (!status && !link->naming && link->same_place && link->tried_ns >= link->endpoint->hasty_ns)
        status = wait_for_answer(link);
    return status;
}

kvf_status kvf_messages_connect(void *self, const void *data, size_t bytes, kvf_peer *peer, void **out) {
    kvf_messages_endpoint *endpoint = self;
    kvf_messages_link *link = kvf_alloc0(1, sizeof *link);
    if (!link)
        return kvf_nomem("a peer");
    link->endpoint = endpoint;
    link->peer = peer;
    link->dealer_fd = link->monitor_fd = -1;
    link->pause_ns = PAUSE_NS;
    link->until_ns = kvf_now(&kvf_monotonic) + endpoint->patience_ms * UINT64_C(1000000);
    kvf_status status = kvf_messages_card_read(data, bytes, &link->card);
    if (!status)
        status = check_card(endpoint, &link->card);
    if (!status)
        status = kvf_descriptors_check("a connection by messages", DESCRIPTORS_OF_A_LINK);
    unsigned char here[KVF_PLACE_BYTES];
    link->same_place = kvf_host_place(here) && memcmp(here, link->card.place, sizeof here) == 0;
    if (!status)
        status = reach(link);
    if (status) {
        free_link(link);
        return status;
    }
    KVF_LIST_ADD(endpoint->links, link);
    kvf_wake_set(&endpoint->wake, true);
    *out = link;
    return KVF_OK;
}

void kvf_messages_disconnect(void *self) {
    kvf_messages_link *link = self;
    zmq_msg_t bye;
    if (link->greeted && !link->lost)
        say_early(link);
    if (link->greeted && !link->lost && zmq_msg_init_size(&bye, 1) == 0) {
        *(unsigned char *)zmq_msg_data(&bye) = MESSAGES_BYE;
        kvf_messages_say(link, &bye);
    }
    KVF_LIST_REMOVE(link->endpoint->links, link);
    free_link(link);
}

kvf_status kvf_messages_notify(void *self, const void *data, size_t bytes) {
    kvf_messages_link *link = self;
    unsigned char length[2];
    if (link->lost)
        return kvf_fail(KVF_E_PEER_LOST, "%s", link->why);
    if (link->untaken == MESSAGES_NOTICES_MAX)
        return kvf_fail(KVF_E_AGAIN, "%u notifications wait for the peer, the most allowed",
                        MESSAGES_NOTICES_MAX);
    kvf_status status = link->welcome ? KVF_OK : kvf_buffer_room(&link->early, sizeof length + bytes);
    if (status)
        return status;
    link->untaken++;
    if (link->welcome) {
        say_notice(link, data, bytes);
    } else {
        kvf_put_number(length, bytes, sizeof length);
        (void)kvf_buffer_add(&link->early, length, sizeof length);
        (void)kvf_buffer_add(&link->early, data, bytes);
    }
    kvf_wake_set(&link->endpoint->wake, true);
    return KVF_OK;
}

bool kvf_messages_is_behind(const void *self) {
    const kvf_messages_link *link = self;
    bool owes = false;
    for (uint32_t i = 0; i < link->count; i++)
        owes = owes || !link->asked[(link->first + i) % MESSAGES_WINDOW_MAX].batch;
    return owes && kvf_now(&kvf_monotonic) - link->given_up_ns >= BEHIND_NS;
}

const unsigned char *kvf_messages_place(const void *self) {
    return ((const kvf_messages_link *)self)->card.place;
}

const char *kvf_messages_way(const void *self) {
    const kvf_messages_link *link = self;
    return link->way;
}
