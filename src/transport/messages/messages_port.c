/*
 * The port: where the endpoint listens, its connections, hanging up, and weighing those that we make. Strangers are
 * peers that have not shown the card's secret, or were refused.
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "transport/messages/messages.h"

#define CONNECTIONS "messages.max_connections"
#define CONNECTIONS_OF_ADDRESS "messages.max_connections_per_address"
#define STRANGERS "messages.max_strangers"
#define CONNECTIONS_OF_A_SECOND "messages.max_connections_per_second"

#define CONNECTIONS_DEFAULT 16384u
#define SIXTEENTHS 8u /* of the process's descriptors, at most */
/* New and ended connections are handled at most a hundred times a second: otherwise, in a flood of connections, each
 * would wake us twice. */
#define DOOR_PAUSE_NS UINT64_C(10000000)
/* Clients that had work done so recently are held up by new connections. */
#define SERVED_NS KVF_SECOND

/* ---- limits ---------------------------------------------------------------------------------- */

kvf_status kvf_messages_take_limits(kvf_messages_endpoint *endpoint, const kvf_transport_options *options) {
    kvf_guests *guests = &endpoint->door.guests;
    guests->most = CONNECTIONS_DEFAULT;
    kvf_status status = kvf_setting_number(options, CONNECTIONS, &guests->most);
    guests->most = kvf_door_most(guests->most, SIXTEENTHS);
    guests->most_of_address = guests->most - guests->most / 4;
    guests->most_strangers = guests->most - guests->most / 2;
    if (!status)
        status = kvf_setting_number(options, CONNECTIONS_OF_ADDRESS, &guests->most_of_address);
    if (!status)
        status = kvf_setting_number(options, STRANGERS, &guests->most_strangers);
    return status ? status : kvf_setting_number(options, CONNECTIONS_OF_A_SECOND, &endpoint->rate);
}

/* How many connections are let in a second now. */
static uint32_t rate_of(const kvf_messages_endpoint *endpoint) {
    if (endpoint->rate)
        return endpoint->rate;
    const bool holds_others_up = endpoint->card.encrypted || endpoint->now - endpoint->others_ns < SERVED_NS;
    return holds_others_up ? KVF_GATE_DEAR_RATE : KVF_GATE_RATE;
}

/* ---- the door -------------------------------------------------------------------------------- */

/* The door's number for a connection; never 0. */
static uint64_t route_of(uint32_t number) {
    return UINT64_C(1) << 32 | number;
}

static bool is_known(void *context, uint64_t route) {
    return kvf_messages_client_of(context, (uint32_t)route) != NULL;
}

static void on_left(void *context, uint64_t route) {
    kvf_messages_left(context, (uint32_t)route);
}

void kvf_messages_heard(kvf_messages_endpoint *endpoint, uint32_t number, bool client, zmq_msg_t *message) {
    if (!client && kvf_guests_read(&endpoint->door.guests, route_of(number)))
        return; /* strangers do not gain time by sending messages */
    if (kvf_door_hear(&endpoint->door, route_of(number), message, endpoint->now))
        endpoint->door_stirs = true;
}

void kvf_messages_part(kvf_messages_endpoint *endpoint, uint32_t number) {
    kvf_guests_part(&endpoint->door.guests, route_of(number), kvf_now(&kvf_monotonic));
}

bool kvf_messages_is_parting(const kvf_messages_endpoint *endpoint, uint32_t number) {
    return kvf_guests_is_parting(&endpoint->door.guests, route_of(number));
}

bool kvf_messages_was_met(const kvf_messages_endpoint *endpoint, uint32_t number) {
    return kvf_guests_was_met(&endpoint->door.guests, route_of(number));
}

void kvf_messages_dismiss(kvf_messages_endpoint *endpoint, uint32_t number) {
    kvf_guests_dismiss(&endpoint->door.guests, route_of(number));
}

void kvf_messages_mute(kvf_messages_endpoint *endpoint, uint32_t number) {
    kvf_guests_mute(&endpoint->door.guests, route_of(number));
}

bool kvf_messages_is_muted(const kvf_messages_endpoint *endpoint, uint32_t number) {
    return kvf_guests_is_muted(&endpoint->door.guests, route_of(number));
}

/* The next event at the door wakes us, once. */
static void listen_to_door(kvf_messages_endpoint *endpoint) {
    (void)kvf_watch_once(endpoint->epoll_fd, endpoint->door_fd, true, &endpoint->door);
    (void)kvf_watch_once(endpoint->epoll_fd, endpoint->door.brought_fd, true, &endpoint->door);
}

bool kvf_messages_mind_door(kvf_messages_endpoint *endpoint) {
    kvf_guests *guests = &endpoint->door.guests;
    bool more = false;
    if (!endpoint->router_stirs)
        kvf_guests_took(guests, 0, true);
    if (kvf_door_due(&endpoint->door) <= endpoint->now)
        kvf_door_weigh(&endpoint->door, endpoint->now);
    if (endpoint->door_stirs && endpoint->now >= endpoint->door_ns) {
        endpoint->door.gate.rate = rate_of(endpoint);
        endpoint->door_stirs = more = kvf_door_take_events(&endpoint->door, endpoint->now);
        endpoint->door_ns = more ? 0 : endpoint->now + DOOR_PAUSE_NS;
        kvf_door_weigh(&endpoint->door, endpoint->now);
        if (!more)
            listen_to_door(endpoint);
    }
    kvf_guests_tick(guests, endpoint->now);
    kvf_timer_by(&endpoint->timer, kvf_door_due(&endpoint->door));
    if (endpoint->door_stirs)
        kvf_timer_by(&endpoint->timer, endpoint->door_ns);
    return more;
}

/* ---- connections that we make ---------------------------------------------------------------- */

kvf_status kvf_messages_watch_calls(kvf_messages_endpoint *endpoint) {
    const kvf_guests limits = {.longest = MESSAGES_LONGEST};
    kvf_status status = kvf_door_open_calls(&endpoint->calls, &limits);
    return status ? status : kvf_watch_add(endpoint->epoll_fd, endpoint->calls.brought_fd, &endpoint->calls);
}

/* A turn in which a link was not read until it was empty counts as one in which a message of it was: see
 * kvf_messages_work(). */
void kvf_messages_mind_calls(kvf_messages_endpoint *endpoint) {
    kvf_guests_took(&endpoint->calls.guests, 0, true);
    if (endpoint->calls_stir || kvf_door_due(&endpoint->calls) <= endpoint->now)
        kvf_door_weigh(&endpoint->calls, endpoint->now);
    endpoint->calls_stir = false;
    kvf_timer_by(&endpoint->timer, kvf_door_due(&endpoint->calls));
}

/* ---- counts ---------------------------------------------------------------------------------- */

void kvf_messages_count(const void *self, kvf_transport_info *info) {
    const kvf_messages_endpoint *endpoint = self;
    const kvf_guests *guests = &endpoint->door.guests;
    info->clients += guests->count;
    info->clients_max += guests->most;
    info->refused += guests->refused + endpoint->calls.guests.refused;
}

/* ---- listening ------------------------------------------------------------------------------- */

static kvf_status bind_router(kvf_messages_endpoint *endpoint, const char *listen) {
    const int six = strchr(listen, '*') == strchr(listen, '/') + 2 || strchr(listen, '[') != NULL;
    if (zmq_setsockopt(endpoint->router, ZMQ_IPV6, &six, sizeof six))
        return kvf_zmq_fail("ZMQ_IPV6");
    if (kvf_zmq_bind(endpoint->router, listen) == 0)
        return KVF_OK;
    int error = zmq_errno();
    return kvf_fail(kvf_status_of_listening(error), "cannot listen on %s: %s", listen, zmq_strerror(error));
}

/* ZeroMQ reports where it listens as "tcp://[::]:4711". */
static kvf_status read_bound(kvf_messages_endpoint *endpoint) {
    char bound[MESSAGES_ADDRESS_BYTES + 16];
    size_t bytes = sizeof bound;
    if (zmq_getsockopt(endpoint->router, ZMQ_LAST_ENDPOINT, bound, &bytes))
        return kvf_zmq_fail("ZMQ_LAST_ENDPOINT");
    char *host = bound + strlen("tcp://"), *colon = strrchr(bound, ':');
    unsigned port = 0;
    for (const char *digit = colon + 1; *digit >= '0' && *digit <= '9'; digit++)
        port = port * 10 + (unsigned)(*digit - '0');
    endpoint->card.port = (uint16_t)port;
    kvf_door_bound(&endpoint->door, bound);
    *colon = '\0';
    if (host[0] == '[' && colon[-1] == ']') {
        colon[-1] = '\0';
        host++;
    }
    if (kvf_messages_is_host(host))
        kvf_messages_add_host(&endpoint->card, host);
    else if (endpoint->card.host_count > 0) /* users have said where others find us */
        kvf_messages_add_host(&endpoint->card, "127.0.0.1");
    else
        kvf_messages_add_interfaces(&endpoint->card);
    endpoint->door_stirs = kvf_door_take_events(&endpoint->door, kvf_now(&kvf_monotonic));
    return KVF_OK;
}

static kvf_status open_door(kvf_messages_endpoint *endpoint) {
    kvf_guests limits = endpoint->door.guests;
    limits.is_known = is_known;
    limits.on_left = on_left;
    limits.longest = MESSAGES_LONGEST;
    limits.longest_strange = MESSAGES_STRANGE_BYTES + MESSAGES_SEALED_BYTES;
    limits.context = endpoint;
    endpoint->door.gate.narrow = MESSAGES_STRANGE_SEGMENT;
    endpoint->door.gate.rate = rate_of(endpoint);
    kvf_status status = kvf_door_open(&endpoint->door, endpoint->zmq, endpoint->router, &limits);
    if (!status)
        status = kvf_messages_watch(endpoint, endpoint->door.monitor, &endpoint->door, &endpoint->door_fd);
    if (!status)
        status = kvf_watch_once(endpoint->epoll_fd, endpoint->door.brought_fd, false, &endpoint->door);
    if (!status)
        listen_to_door(endpoint);
    return status;
}

kvf_status kvf_messages_listen(kvf_messages_endpoint *endpoint, const char *listen) {
    const int server = 1, mandatory = 1, receive = MESSAGES_RECEIVE_LIMIT;
    endpoint->router = zmq_socket(endpoint->zmq, ZMQ_ROUTER);
    if (!endpoint->router)
        return kvf_zmq_fail("zmq_socket");
    kvf_status status = kvf_messages_tune(endpoint, endpoint->router);
    if (!status && (!kvf_zmq_refuse_old(endpoint->router) ||
                    zmq_setsockopt(endpoint->router, ZMQ_ROUTER_MANDATORY, &mandatory, sizeof mandatory) ||
                    zmq_setsockopt(endpoint->router, ZMQ_RCVHWM, &receive, sizeof receive) ||
                    (endpoint->card.encrypted &&
                     zmq_setsockopt(endpoint->router, ZMQ_CURVE_SERVER, &server, sizeof server))))
        status = kvf_zmq_fail("zmq_setsockopt");
    if (!status)
        status = open_door(endpoint);
    if (!status)
        status = bind_router(endpoint, listen);
    if (!status)
        status = read_bound(endpoint);
    return status ? status : kvf_messages_watch(endpoint, endpoint->router, endpoint, &endpoint->router_fd);
}
