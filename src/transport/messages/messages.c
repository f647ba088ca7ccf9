/*
 * Endpoints of the fabric by messages: settings, sockets, and progress().
 */
#include "transport/messages/messages.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/descriptors.h"

#define LISTEN "messages.listen"
#define ADVERTISE "messages.advertise"
#define SECRET_KEY "messages.secret_key"
#define PATIENCE "messages.patience_ms"

#define DEFAULT_LISTEN "tcp://*:*"
#define DEFAULT_PATIENCE_MS 60000u

/* For a context with its two threads, a socket that listens and one that watches it, and our own descriptors. */
#define DESCRIPTORS 30
#define SOCKETS_MAX 16383
#define EVENTS 64
#define TRY_AGAIN_NS UINT64_C(50000000) /* to take a slot */
#define KEPT_BYTES (16u << 20)          /* more than a window of messages */

/*
 * A host that is silent for a minute is gone. The kernel probes it, not ZeroMQ's heartbeats: TCP would retransmit those
 * into a link that is down, and after the link is back wait as long again before it sends. Whether a connected process
 * works is judged by the peer that waits for it.
 */
#define KEEPALIVE_IDLE_S 30
#define KEEPALIVE_INTERVAL_S 10
#define KEEPALIVE_COUNT 3
#define UNACKNOWLEDGED_MS 60000
#define HANDSHAKE_MS 15000
#define BACKLOG 1024

/* ---- ZeroMQ ---------------------------------------------------------------------------------- */

kvf_status kvf_messages_tune(const kvf_messages_endpoint *endpoint, void *socket) {
    const struct {
        int option, value;
    } numbers[] = {
        {ZMQ_LINGER, MESSAGES_LINGER_MS},
        {ZMQ_SNDHWM, MESSAGES_SEND_LIMIT},
        {ZMQ_BACKLOG, BACKLOG},
        {ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS},
        {ZMQ_TCP_KEEPALIVE, 1},
        {ZMQ_TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S},
        {ZMQ_TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S},
        {ZMQ_TCP_KEEPALIVE_CNT, KEEPALIVE_COUNT},
        {ZMQ_TCP_MAXRT, UNACKNOWLEDGED_MS},
    };
    const int64_t longest = MESSAGES_LONGEST;
    bool good = zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &longest, sizeof longest) == 0;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        good = good &&
               zmq_setsockopt(socket, numbers[i].option, &numbers[i].value, sizeof numbers[i].value) == 0;
    if (good && endpoint->card.encrypted)
        good =
            zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, endpoint->keys.public_key, MESSAGES_KEY_TEXT) == 0 &&
            zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, endpoint->keys.secret_key, MESSAGES_KEY_TEXT) == 0;
    return good ? KVF_OK : kvf_zmq_fail("zmq_setsockopt");
}

kvf_status kvf_messages_watch(kvf_messages_endpoint *endpoint, void *socket, void *what, int *fd) {
    size_t bytes = sizeof *fd;
    int found;
    if (zmq_getsockopt(socket, ZMQ_FD, &found, &bytes))
        return kvf_zmq_fail("ZMQ_FD");
    kvf_status status = kvf_watch_add(endpoint->epoll_fd, found, what);
    if (!status)
        *fd = found;
    return status;
}

/* There may be no slot that could come back: then memory is short, and nothing but time shows when there is some. */
void kvf_messages_await_slot(kvf_messages_endpoint *endpoint) {
    kvf_messages_pool_want(&endpoint->pool);
    kvf_timer_by(&endpoint->timer, endpoint->now + TRY_AGAIN_NS);
}

/* ---- settings -------------------------------------------------------------------------------- */

/* The public key follows from the secret one. */
static kvf_status take_keys(kvf_messages_endpoint *endpoint, const char *secret_key) {
    if (!secret_key)
        return KVF_OK;
    if (!zmq_has("curve"))
        return kvf_fail(KVF_E_UNSUPPORTED, "the ZeroMQ of this machine is built without CURVE: no keys");
    kvf_messages_keys *keys = &endpoint->keys;
    if (strnlen(secret_key, MESSAGES_KEY_TEXT) != MESSAGES_KEY_TEXT - 1 ||
        !zmq_z85_decode(endpoint->card.key, secret_key) ||
        zmq_curve_public(keys->public_key, secret_key) != 0 ||
        !zmq_z85_decode(endpoint->card.key, keys->public_key))
        return kvf_fail(KVF_E_INVALID, "%s is no Z85 key of %u characters", SECRET_KEY,
                        MESSAGES_KEY_TEXT - 1);
    memcpy(keys->secret_key, secret_key, MESSAGES_KEY_TEXT);
    endpoint->card.encrypted = true;
    return KVF_OK;
}

/* "10.0.0.7", or several with commas between. */
static kvf_status take_advertised(kvf_messages_card *card, const char *text) {
    char host[MESSAGES_HOST_BYTES];
    while (text && *text) {
        size_t length = strcspn(text, ",");
        if (length < sizeof host) {
            memcpy(host, text, length);
            host[length] = '\0';
        }
        if (length >= sizeof host || !kvf_messages_is_host(host) || card->host_count == MESSAGES_HOSTS_MAX)
            return kvf_fail(KVF_E_INVALID,
                            "%s: \"%.*s\": allowed: up to %u host names and addresses, with commas between",
                            ADVERTISE, (int)(length < 64 ? length : 64), text, MESSAGES_HOSTS_MAX);
        kvf_messages_add_host(card, host);
        text += length + (text[length] == ',');
    }
    return KVF_OK;
}

/* ZeroMQ takes the last 16 bits of larger numbers, and of text what it begins with. */
static bool is_port(const char *text) {
    char *end = NULL;
    if (strcmp(text, "*") == 0)
        return true;
    return text[0] >= '0' && text[0] <= '9' && strtoul(text, &end, 10) <= UINT16_MAX && *end == '\0';
}

static kvf_status check_listen(const char *listen) {
    const char *port = strrchr(listen, ':');
    if (strncmp(listen, "tcp://", 6) == 0 && port > listen + 5 && is_port(port + 1) &&
        strlen(listen) < MESSAGES_ADDRESS_BYTES)
        return KVF_OK;
    return kvf_fail(KVF_E_INVALID,
                    "%s is \"%s\"; allowed: tcp://HOST:PORT, where either may be *, and PORT up to 65535",
                    LISTEN, kvf_excerpt_of(listen, 80).text);
}

/* ---- opening and closing --------------------------------------------------------------------- */

static kvf_status open_events(kvf_messages_endpoint *endpoint) {
    kvf_status status = kvf_watch_open(&endpoint->epoll_fd);
    if (!status)
        status = kvf_wake_open(&endpoint->wake);
    if (!status)
        status = kvf_messages_pool_open(&endpoint->pool);
    if (!status)
        status = kvf_timer_open(&endpoint->timer);
    if (!status)
        status = kvf_watch_add(endpoint->epoll_fd, endpoint->wake.fd, &endpoint->wake);
    if (!status)
        status = kvf_watch_add(endpoint->epoll_fd, endpoint->pool.fd, &endpoint->pool);
    return status ? status : kvf_watch_add(endpoint->epoll_fd, endpoint->timer.fd, &endpoint->timer);
}

/*
 * ZeroMQ allocates every message that comes by malloc(). By default glibc returns most of what is freed to the kernel,
 * which then has to find and zero as much for the next message: 3 to 9% of the processor time of reads was that. Once a
 * block of this size was freed it keeps up to twice as much, unless the program has set its thresholds.
 */
static void keep_freed_memory(void) {
    void *volatile block = malloc(KEPT_BYTES); /* never touched; volatile, or the compiler leaves it out */
    free(block);
}

static kvf_status open_sockets(kvf_messages_endpoint *endpoint, const char *listen) {
    keep_freed_memory();
    endpoint->zmq = zmq_ctx_new();
    if (!endpoint->zmq)
        return kvf_zmq_fail("zmq_ctx_new");
    (void)zmq_ctx_set(endpoint->zmq, ZMQ_MAX_SOCKETS, SOCKETS_MAX);
    return kvf_messages_listen(endpoint, listen);
}

static void close_endpoint(void *self) {
    kvf_messages_endpoint *endpoint = self;
    if (endpoint->router) {
        kvf_messages_close_clients(endpoint);
        if (endpoint->router_fd >= 0)
            (void)epoll_ctl(endpoint->epoll_fd, EPOLL_CTL_DEL, endpoint->router_fd, NULL);
        kvf_zmq_close(endpoint->router);
    }
    if (endpoint->door_fd >= 0)
        (void)epoll_ctl(endpoint->epoll_fd, EPOLL_CTL_DEL, endpoint->door_fd, NULL);
    kvf_zmq_close(endpoint->door.monitor);
    while (endpoint->zmq && zmq_ctx_term(endpoint->zmq) != 0 && zmq_errno() == EINTR) {
    }
    kvf_messages_pool_close(&endpoint->pool);
    kvf_fences_free(&endpoint->fences);
    kvf_wake_close(&endpoint->wake);
    kvf_door_close(&endpoint->door);
    kvf_door_close(&endpoint->calls);
    kvf_timer_close(&endpoint->timer);
    kvf_fd_close(&endpoint->epoll_fd);
    kvf_free(endpoint);
}

static kvf_status open_all(kvf_messages_endpoint *endpoint, const kvf_transport_options *options) {
    const char *listen = kvf_setting_of(options, LISTEN);
    kvf_messages_card *card = &endpoint->card;
    listen = listen ? listen : DEFAULT_LISTEN;
    kvf_status status = check_listen(listen);
    if (!status)
        status = take_advertised(card, kvf_setting_of(options, ADVERTISE));
    if (!status)
        status = take_keys(endpoint, kvf_setting_of(options, SECRET_KEY));
    if (!status)
        status = kvf_messages_take_limits(endpoint, options);
    if (!status)
        status = kvf_setting_number(options, PATIENCE, &endpoint->patience_ms);
    if (!status && kvf_descriptors_check("messages", DESCRIPTORS))
        status = kvf_fail_in(KVF_E_UNSUPPORTED, "too few descriptors: ");
    if (!status)
        status = kvf_random(card->secret, sizeof card->secret);
    if (!status)
        status = kvf_random(card->id, sizeof card->id);
    (void)kvf_host_place(card->place);
    if (!status)
        status = open_events(endpoint);
    if (!status)
        status = kvf_messages_watch_calls(endpoint);
    return status ? status : open_sockets(endpoint, listen);
}

static kvf_status open_endpoint(kvf_transport *transport, const kvf_transport_options *options, void **out) {
    kvf_messages_endpoint *endpoint = kvf_alloc0(1, sizeof *endpoint);
    if (!endpoint)
        return kvf_nomem("an endpoint");
    endpoint->transport = transport;
    endpoint->epoll_fd = endpoint->router_fd = endpoint->wake.fd = endpoint->pool.fd = -1;
    endpoint->door.empty_fd = endpoint->door.spare_fd = endpoint->door.brought_fd = -1;
    endpoint->calls.empty_fd = endpoint->calls.spare_fd = endpoint->calls.brought_fd = -1;
    endpoint->door_fd = endpoint->timer.fd = -1;
    endpoint->newcomers.turn_work = MESSAGES_NEWCOMERS_WORK;
    endpoint->patience_ms = DEFAULT_PATIENCE_MS;
    endpoint->window = options->max_in_flight ? options->max_in_flight : MESSAGES_WINDOW_DEFAULT;
    if (endpoint->window > MESSAGES_WINDOW_MAX)
        endpoint->window = MESSAGES_WINDOW_MAX;
    kvf_status status = open_all(endpoint, options);
    if (status)
        close_endpoint(endpoint);
    else
        *out = endpoint;
    return status;
}

/* ---- memory and cards ------------------------------------------------------------------------ */

static kvf_status register_region(void *self, uint32_t region, const kvf_memory *memory) {
    (void)self, (void)region, (void)memory;
    return KVF_OK; /* uses the front's table */
}

/* Each request moves as a whole within progress(): no peer can be in the middle of a write. */
static kvf_status unregister_region(void *self, uint32_t region) {
    kvf_messages_endpoint *endpoint = self;
    (void)region;
    kvf_messages_refuse_old(endpoint, kvf_transport_oldest(endpoint->transport));
    kvf_wake_set(&endpoint->wake, true);
    return KVF_OK;
}

static kvf_status write_card(void *self, kvf_buffer *out) {
    const kvf_messages_endpoint *endpoint = self;
    return kvf_messages_card_write(&endpoint->card, out);
}

/* ---- progress -------------------------------------------------------------------------------- */

/* Notes which sockets have events. */
static void look_around(kvf_messages_endpoint *endpoint) {
    struct epoll_event events[EVENTS];
    uint64_t returned;
    int count = epoll_wait(endpoint->epoll_fd, events, EVENTS, 0);
    for (int i = 0; i < count; i++) {
        void *what = events[i].data.ptr;
        if (what == endpoint)
            endpoint->router_stirs = true;
        else if (what == &endpoint->pool)
            (void)!read(endpoint->pool.fd, &returned, sizeof returned);
        else if (what == &endpoint->timer)
            kvf_timer_set(&endpoint->timer, UINT64_MAX);
        else if (what == &endpoint->door)
            endpoint->door_stirs = true;
        else if (what == &endpoint->calls)
            endpoint->calls_stir = true;
        else if (what != &endpoint->wake)
            ((kvf_messages_link *)what)->stirs = true;
    }
}

static bool serve(kvf_messages_endpoint *endpoint, uint64_t *budget) {
    bool more = false;
    if (endpoint->router_stirs) {
        endpoint->router_stirs = false;
        more = kvf_messages_take(endpoint);
    }
    more = kvf_messages_serve(endpoint, budget) || more;
    endpoint->router_stirs = more || (endpoint->router_stirs && kvf_zmq_readable(endpoint->router));
    return endpoint->router_stirs; /* then it is read next time, too */
}

static kvf_status progress(void *self, bool *busy) {
    kvf_messages_endpoint *endpoint = self;
    uint64_t budget = KVF_SLICE_BYTES, serving = MESSAGES_SERVED_BYTES;
    *busy = false;
    const uint64_t now = kvf_now(&kvf_monotonic);
    if (endpoint->now > 0 && now - endpoint->now >= MESSAGES_ABSENT_NS)
        endpoint->absent_ns = now;
    endpoint->now = now;
    look_around(endpoint);
    kvf_messages_slots_back(endpoint);
    for (kvf_messages_link *link = endpoint->links, *next; link; link = next) {
        next = link->following;
        kvf_messages_redial(link);
        if (!link->stirs && !link->starved)
            continue;
        bool more = kvf_messages_work(link, &budget);
        link->stirs = link->stirs || more;
        *busy = *busy || more;
    }
    kvf_messages_mind_calls(endpoint);
    *busy = serve(endpoint, &serving) || *busy;
    *busy = kvf_messages_mind_door(endpoint) || *busy;
    kvf_wake_set(&endpoint->wake, *busy);
    return KVF_OK;
}

static int event_fd(void *self) {
    return ((kvf_messages_endpoint *)self)->epoll_fd;
}

/* ---- the table ------------------------------------------------------------------------------- */

static const char *const settings[] = {LISTEN,
                                       ADVERTISE,
                                       SECRET_KEY,
                                       PATIENCE,
                                       "messages.max_connections",
                                       "messages.max_connections_per_address",
                                       "messages.max_connections_per_second",
                                       "messages.max_strangers",
                                       NULL};

extern const kvf_fabric kvf_fabric_messages;

const kvf_fabric kvf_fabric_messages = {
    .kind =
        {
            .name = "messages",
            .reach = KVF_REACH_NETWORK,
            .memory_kinds = 1u << KVF_MEMORY_HOST,
            .directions = 1u << KVF_READ | 1u << KVF_WRITE,
            .served = true,
            .lists = true,
            .fences = true,
            .in_flight = MESSAGES_WINDOW_DEFAULT,
            /* Gathering and scattering on both sides, and a stream over TCP. */
            .cost = {.ns_per_run = 40, .ns_per_byte = 0.5, .ns_per_source = 100e3},
            .settings = settings,
        },
    .open = open_endpoint,
    .register_region = register_region,
    .unregister_region = unregister_region,
    .card = write_card,
    .connect = kvf_messages_connect,
    .submit = kvf_messages_submit,
    .cancel = kvf_messages_cancel,
    .notify = kvf_messages_notify,
    .place = kvf_messages_place,
    .way = kvf_messages_way,
    .is_behind = kvf_messages_is_behind,
    .disconnect = kvf_messages_disconnect,
    .fence = kvf_messages_fence,
    .admit = kvf_messages_admit,
    .progress = progress,
    .count = kvf_messages_count,
    .event_fd = event_fd,
    .close = close_endpoint,
};
