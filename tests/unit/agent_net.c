#include "agent_net.h"

#include <stdio.h>

#include "link/link_endpoint.h"
#include "port/guests.h"
#include "shapes.h"

#define LINKS 128u
#define LINES 128u
#define CONNECTIONS 65536u
#define FIRST_PORT 20000u
#define INCOMING (UINT64_C(1) << 62)
#define FIRST_PAUSE 20000000u
#define LONGEST_PAUSE 1000000000u

typedef struct parcel {
    uint64_t due;
    kvf_route route;
    bool keyed;
    uint8_t key[KVF_KEY_BYTES]; /* the sender's */
    size_t bytes;
    struct parcel *prev, *next;
    uint8_t data[];
} parcel;

typedef struct net_link net_link;

/* An outgoing connection, which is dialled again when it breaks. */
typedef struct net_line {
    uint32_t users; /* 0: not in use */
    kvf_route route;
    char endpoint[64];
    uint32_t connection; /* 0: none */
    bool broken;         /* on_broken() must be called */
    uint64_t pause, next_try;
} net_line;

struct net_link {
    kvf_link base;
    kvf_link_options options;
    char endpoint[64];
    parcel *inbox;
    net_line lines[LINES];
    kvf_guests guests; /* connections to this link, by index into `connections` */
};

typedef struct connection {
    net_link *client, *server; /* NULL: gone */
    kvf_route route;           /* the client's */
} connection;

#define FIRST_TIME 1000000000u
#define FIRST_ADDRESS "10.0.0.1"

static uint64_t time_now = FIRST_TIME;
static net_link *links[LINKS];
static connection connections[CONNECTIONS]; /* index 0 is unused */
static uint32_t connection_count, link_count;
static kvf_route last_route;
static const char *dial_from = FIRST_ADDRESS;

uint64_t net_now(void) {
    return time_now;
}

void net_advance(uint64_t ns) {
    time_now += ns;
}

void net_reset(void) {
    for (uint32_t i = 0; i < LINKS; i++)
        assert_null(links[i]);
    memset(connections, 0, (connection_count + 1) * sizeof *connections);
    connection_count = link_count = 0;
    last_route = 0;
    time_now = FIRST_TIME;
    dial_from = FIRST_ADDRESS;
}

static uint64_t clock_now(void *context) {
    (void)context;
    return time_now;
}

void net_dial_from(const char *address) {
    dial_from = address;
}

static void dial(net_link *link, net_line *line) {
    for (uint32_t i = 0; i < LINKS; i++) {
        if (!links[i] || strcmp(links[i]->endpoint, line->endpoint) != 0)
            continue;
        assert_true(connection_count + 1 < CONNECTIONS);
        connections[++connection_count] = (connection){link, links[i], line->route};
        line->connection = connection_count;
        line->pause = FIRST_PAUSE;
        if (!kvf_guests_arrive(&links[i]->guests, connection_count, 0, dial_from, time_now))
            return;
        connections[connection_count] = (connection){0}; /* no memory for it: dialled again later */
        line->connection = 0;
        break;
    }
    line->next_try = time_now + line->pause;
    line->pause = kvf_min_u64(2 * line->pause, LONGEST_PAUSE);
}

static void hang_up(net_link *client, kvf_route route) {
    for (uint32_t i = 0; i < LINES; i++)
        if (client->lines[i].users > 0 && client->lines[i].route == route) {
            client->lines[i].connection = 0;
            client->lines[i].broken = true;
            client->lines[i].next_try = time_now + client->lines[i].pause;
        }
}

/* A link closes a connection that a peer has made to it. */
static void show_out(void *owner, kvf_guest *guest) {
    connection *c = &connections[guest->id];
    (void)owner;
    if (c->client)
        hang_up(c->client, c->route);
    *c = (connection){0};
}

static kvf_status net_open(const kvf_link_options *options, kvf_link **out) {
    net_link *link = calloc(1, sizeof *link);
    assert_non_null(link);
    link->options = *options;
    if (!options->listen)
        (void)snprintf(link->endpoint, sizeof link->endpoint, "tcp://127.0.0.1:%u",
                       FIRST_PORT + ++link_count);
    if (options->listen)
        (void)snprintf(link->endpoint, sizeof link->endpoint, "%s", options->listen);
    uint32_t place = 0;
    while (place < LINKS && links[place])
        place++;
    assert_true(place < LINKS);
    if (place < LINKS)
        links[place] = link;
    link->guests = (kvf_guests){.most = options->max_connections,
                                .most_of_address = options->max_connections_per_address,
                                .is_known = options->is_known,
                                .on_crowded = options->on_crowded,
                                .hang_up = show_out,
                                .context = options->context,
                                .owner = link};
    *out = &link->base;
    return KVF_OK;
}

static void net_close(kvf_link *base) {
    net_link *link = (net_link *)base;
    for (uint32_t i = 1; i <= connection_count; i++) {
        connection *c = &connections[i];
        if (c->server == link && c->client)
            hang_up(c->client, c->route);
        if (c->client == link && c->server)
            kvf_guests_leave(&c->server->guests, i);
        if (c->server == link || c->client == link)
            *c = (connection){0};
    }
    kvf_guests_free(&link->guests);
    for (uint32_t i = 0; i < LINKS; i++)
        links[i] = links[i] == link ? NULL : links[i];
    parcel *one, *next;
    DL_FOREACH_SAFE(link->inbox, one, next) {
        free(one);
    }
    free(link);
}

static const char *net_endpoint(const kvf_link *base) {
    return ((const net_link *)base)->endpoint;
}

static kvf_status net_connect(kvf_link *base, const char *endpoint, const char *key, kvf_route *out) {
    net_link *link = (net_link *)base;
    net_line *place = NULL;
    kvf_endpoint read;
    kvf_status status = kvf_endpoint_to_connect(endpoint, &read);
    (void)key;
    if (status)
        return status;
    for (uint32_t i = 0; i < LINES; i++) {
        net_line *line = &link->lines[i];
        if (line->users > 0 && strcmp(line->endpoint, endpoint) == 0) {
            line->users++;
            *out = line->route;
            return KVF_OK;
        }
        place = !place && line->users == 0 ? line : place;
    }
    assert_non_null(place);
    *place = (net_line){.users = 1, .route = ++last_route, .pause = FIRST_PAUSE};
    (void)snprintf(place->endpoint, sizeof place->endpoint, "%s", endpoint);
    dial(link, place);
    *out = place->route;
    return KVF_OK;
}

static net_line *line_of(net_link *link, kvf_route route) {
    for (uint32_t i = 0; i < LINES; i++)
        if (link->lines[i].users > 0 && link->lines[i].route == route)
            return &link->lines[i];
    return NULL;
}

static void net_disconnect(kvf_link *base, kvf_route route) {
    net_line *line = line_of((net_link *)base, route);
    if (!line || --line->users > 0)
        return;
    if (!line->connection)
        return;
    kvf_guests_leave(&connections[line->connection].server->guests, line->connection);
    connections[line->connection] = (connection){0};
}

/* The key that a link states is believed: nothing is encrypted here. */
static void put(net_link *to, kvf_route route, const net_link *from, const void *data, size_t bytes) {
    parcel *one = malloc(sizeof *one + bytes);
    assert_non_null(one);
    *one = (parcel){.due = time_now + NET_LATENCY_NS, .route = route, .bytes = bytes};
    one->keyed = from->options.public_key != NULL;
    if (one->keyed)
        assert_ok(kvf_link_read_key("public_key", from->options.public_key, one->key));
    memcpy(one->data, data, bytes);
    DL_APPEND(to->inbox, one);
}

static kvf_status net_send(kvf_link *base, kvf_route route, const void *data, size_t bytes) {
    if (route & INCOMING) {
        const connection *c = &connections[route & ~INCOMING];
        if (!c->client)
            return kvf_fail(KVF_E_NOT_FOUND, "connection %llu has ended",
                            (unsigned long long)(route & ~INCOMING));
        put(c->client, c->route, c->server, data, bytes);
        return KVF_OK;
    }
    const net_line *line = line_of((net_link *)base, route);
    if (!line)
        return kvf_fail(KVF_E_NOT_FOUND, "there is no route %llu", (unsigned long long)route);
    if (line->connection)
        put(connections[line->connection].server, INCOMING | line->connection, (const net_link *)base, data,
            bytes);
    return KVF_OK;
}

static void tell(net_link *link, const net_line *line, kvf_status status, const char *what) {
    char detail[128];
    (void)snprintf(detail, sizeof detail, "%s: %s", line->endpoint, what);
    if (link->options.on_broken)
        link->options.on_broken(link->options.context, line->route, status, detail);
}

static void take_care_of(net_link *link, net_line *line) {
    if (line->users > 0 && line->broken) {
        line->broken = false;
        tell(link, line, KVF_E_PEER_LOST, "the connection broke");
    }
    if (line->users > 0 && !line->connection && time_now >= line->next_try) {
        dial(link, line);
        if (!line->connection && !line->broken) /* nobody listened, rather than closed it at once */
            tell(link, line, KVF_E_IO, "no connection: it was refused because nobody listens there");
    }
}

static bool net_pending(kvf_link *base) {
    const net_link *link = (const net_link *)base;
    bool pending = (link->inbox && link->inbox->due <= time_now) || kvf_guests_due(&link->guests) <= time_now;
    for (uint32_t i = 0; i < LINES; i++) {
        const net_line *line = &link->lines[i];
        pending |= line->users > 0 && (line->broken || (!line->connection && time_now >= line->next_try));
    }
    return pending;
}

static void net_progress(kvf_link *base, bool *more) {
    net_link *link = (net_link *)base;
    while (link->inbox && link->inbox->due <= time_now) {
        parcel *one = link->inbox;
        DL_DELETE(link->inbox, one);
        if ((one->route & INCOMING) && !kvf_guests_hear(&link->guests, one->route, time_now))
            kvf_guests_name(&link->guests, one->route & ~INCOMING, one->route, time_now);
        if ((one->route & INCOMING) || line_of(link, one->route))
            link->options.on_message(link->options.context,
                                     &(const kvf_letter){.route = one->route,
                                                         .key = one->keyed ? one->key : NULL,
                                                         .called = !(one->route & INCOMING),
                                                         .data = one->data,
                                                         .bytes = one->bytes});
        free(one);
    }
    kvf_guests_tick(&link->guests, time_now);
    for (uint32_t i = 0; i < LINES; i++)
        take_care_of(link, &link->lines[i]);
    *more = net_pending(base);
}

/* NOLINTNEXTLINE(readability-non-const-parameter): the table has this type */
static uint32_t net_fds(const kvf_link *base, int fds[KVF_LINK_FDS]) {
    (void)base, (void)fds;
    return 0;
}

static uint64_t net_due(const kvf_link *base) {
    const net_link *link = (const net_link *)base;
    uint64_t due = kvf_min_u64(link->inbox ? link->inbox->due : UINT64_MAX, kvf_guests_due(&link->guests));
    for (uint32_t i = 0; i < LINES; i++)
        if (link->lines[i].users > 0 && !link->lines[i].connection)
            due = kvf_min_u64(due, link->lines[i].next_try);
    return due;
}

static kvf_link_counts net_counts(const kvf_link *base) {
    const kvf_guests *guests = &((const net_link *)base)->guests;
    return (kvf_link_counts){guests->count, guests->closed, guests->refused, 0};
}

static bool net_has_ended(const kvf_link *base, kvf_route route) {
    return (route & INCOMING) && !kvf_guests_has(&((const net_link *)base)->guests, route);
}

static const kvf_clock net_clock = {clock_now, NULL};

static const kvf_link_table net_table = {
    .open = net_open,
    .close = net_close,
    .endpoint = net_endpoint,
    .connect = net_connect,
    .disconnect = net_disconnect,
    .send = net_send,
    .progress = net_progress,
    .pending = net_pending,
    .fds = net_fds,
    .due = net_due,
    .counts = net_counts,
    .has_ended = net_has_ended,
};

const kvf_surroundings net_surroundings = {.clock = &net_clock, .link = &net_table};
