#include "simulate/network.h"

#include <stdio.h>

#include "link/link_endpoint.h"

#define INCOMING (UINT64_C(1) << 62)
#define FIRST_PAUSE (20 * KVF_MILLISECOND)
#define LONGEST_PAUSE KVF_SECOND
#define ENDPOINT_BYTES 64u

typedef struct parcel {
    struct parcel *prev, *next;
    uint64_t due;
    kvf_route route;
    size_t bytes;
    uint8_t data[];
} parcel;

typedef struct line line;

struct kvf_connection {
    size_t number;
    line *client;
    kvf_modelled_link *server;
    parcel *to_client, *to_server; /* that wait until the two hosts reach each other */
    kvf_connection *prev, *next;   /* of the server */
};

/* An outgoing route; dialled again when its connection breaks. */
struct line {
    UT_hash_handle by_route, by_endpoint;
    kvf_modelled_link *link;
    kvf_route route;
    uint32_t users;
    char endpoint[ENDPOINT_BYTES];
    kvf_connection *connection; /* NULL: none */
    bool broken;                /* on_broken() is due */
    bool silent;                /* at the last try, nothing got there */
    uint64_t pause, next_try;
    line *prev, *next; /* of those without a connection */
};

struct kvf_modelled_link {
    kvf_link base;
    UT_hash_handle hh;
    kvf_host *host;
    kvf_link_options options;
    char endpoint[ENDPOINT_BYTES];
    parcel *inbox;
    line *lines_by_route, *lines_by_endpoint;
    line *unconnected;
    kvf_connection *incoming;
    uint64_t incoming_count;
};

/* ---- connections ----------------------------------------------------------------------------- */

static void wake(const kvf_modelled_link *link) {
    kvf_host_wake(link->host);
}

static void leave_unconnected(line *l, uint64_t next_try) {
    l->connection = NULL;
    l->next_try = next_try;
    DL_APPEND(l->link->unconnected, l);
    kvf_happening_by(&l->link->host->world->line, &l->link->host->turn, next_try);
}

static void free_parcels(parcel **list) {
    parcel *one, *next;
    DL_FOREACH_SAFE(*list, one, next) {
        kvf_free(one);
    }
    *list = NULL;
}

static void forget(kvf_world *world, kvf_connection *connection) {
    world->connections[connection->number] = NULL;
    free_parcels(&connection->to_client);
    free_parcels(&connection->to_server);
    DL_DELETE(connection->server->incoming, connection);
    connection->server->incoming_count--;
    kvf_free(connection);
}

/* Ends a connection. Its client notices, and tries again. */
static void break_connection(kvf_connection *connection) {
    line *l = connection->client;
    kvf_world *world = l->link->host->world;
    l->broken = true;
    leave_unconnected(l, world->line.now + l->pause);
    wake(l->link);
    forget(world, connection);
}

/* A connection with a number that was never used; NULL: no memory. */
static kvf_connection *make_connection(kvf_world *world) {
    if (world->connection_count == world->connection_room) {
        const size_t room = 2 * world->connection_room + 1024;
        kvf_connection **grown = kvf_resize(world->connections, room, sizeof *grown);
        if (!grown)
            return NULL;
        world->connections = grown;
        world->connection_room = room;
    }
    kvf_connection *made = kvf_alloc0(1, sizeof *made);
    if (made) {
        made->number = world->connection_count;
        world->connections[world->connection_count++] = made;
    }
    return made;
}

/* Tries to connect a line, which is among the unconnected. */
static bool dial(line *l) {
    kvf_world *world = l->link->host->world;
    kvf_modelled_link *server = NULL;
    HASH_FIND_STR(world->links, l->endpoint, server);
    l->silent = server ? !kvf_hosts_reach(l->link->host, server->host) : l->link->host->cut_off;
    kvf_connection *made = server && !l->silent ? make_connection(world) : NULL;
    if (!made) {
        l->next_try = world->line.now + l->pause;
        l->pause = kvf_min_u64(2 * l->pause, LONGEST_PAUSE);
        return false;
    }
    made->client = l;
    made->server = server;
    DL_APPEND(server->incoming, made);
    server->incoming_count++;
    DL_DELETE(l->link->unconnected, l);
    l->connection = made;
    l->pause = FIRST_PAUSE;
    return true;
}

/* ---- the table ------------------------------------------------------------------------------- */

static kvf_status open_link(const kvf_link_options *options, kvf_link **out) {
    kvf_world *world = options->clock->context;
    kvf_modelled_link *link = kvf_alloc0(1, sizeof *link);
    if (!link)
        return kvf_nomem("a simulated link");
    link->base.table = &kvf_modelled_network;
    link->options = *options;
    link->host = world->opening;
    const uint64_t number = ++world->last_link; /* never used again, and no address of this machine */
    (void)snprintf(link->endpoint, sizeof link->endpoint, "tcp://240.%u.%u.%u:%u",
                   (unsigned)(number >> 24 & 255), (unsigned)(number >> 16 & 255),
                   (unsigned)(number >> 8 & 255), 1024 + (unsigned)(number & 255));
    HASH_ADD_STR(world->links, endpoint, link);
    if (!link->hh.tbl) {
        kvf_free(link);
        return kvf_nomem("a simulated link");
    }
    link->host->link = link;
    *out = &link->base;
    return KVF_OK;
}

static void free_line(line *l) {
    HASH_DELETE(by_route, l->link->lines_by_route, l);
    HASH_DELETE(by_endpoint, l->link->lines_by_endpoint, l);
    if (l->connection)
        forget(l->link->host->world, l->connection);
    else
        DL_DELETE(l->link->unconnected, l);
    kvf_free(l);
}

static void close_link(kvf_link *base) {
    kvf_modelled_link *link = (kvf_modelled_link *)base;
    kvf_world *world = link->host->world;
    HASH_DEL(world->links, link);
    line *l, *next_line;
    HASH_ITER(by_route, link->lines_by_route, l, next_line) {
        free_line(l);
    }
    kvf_connection *c, *next;
    DL_FOREACH_SAFE(link->incoming, c, next) {
        break_connection(c);
    }
    free_parcels(&link->inbox);
    link->host->link = NULL;
    kvf_free(link);
}

static const char *endpoint_of(const kvf_link *base) {
    return ((const kvf_modelled_link *)base)->endpoint;
}

static kvf_status connect_link(kvf_link *base, const char *endpoint, const char *key, kvf_route *out) {
    kvf_modelled_link *link = (kvf_modelled_link *)base;
    kvf_endpoint read;
    line *l = NULL;
    (void)key;
    kvf_status status = kvf_endpoint_to_connect(endpoint, &read);
    if (status)
        return status;
    HASH_FIND(by_endpoint, link->lines_by_endpoint, endpoint, strlen(endpoint), l);
    if (!l) {
        l = kvf_alloc0(1, sizeof *l);
        if (!l)
            return kvf_nomem("a simulated connection");
        *l = (line){.link = link, .route = ++link->host->world->last_route, .pause = FIRST_PAUSE};
        (void)snprintf(l->endpoint, sizeof l->endpoint, "%s", endpoint);
        HASH_ADD(by_route, link->lines_by_route, route, sizeof l->route, l);
        if (!l->by_route.tbl) {
            kvf_free(l);
            return kvf_nomem("a simulated connection");
        }
        HASH_ADD_KEYPTR(by_endpoint, link->lines_by_endpoint, l->endpoint, strlen(l->endpoint), l);
        if (!l->by_endpoint.tbl) {
            HASH_DELETE(by_route, link->lines_by_route, l);
            kvf_free(l);
            return kvf_nomem("a simulated connection");
        }
        leave_unconnected(l, link->host->world->line.now);
        (void)dial(l);
    }
    l->users++;
    *out = l->route;
    return KVF_OK;
}

static line *line_of(const kvf_modelled_link *link, kvf_route route) {
    line *l = NULL;
    HASH_FIND(by_route, link->lines_by_route, &route, sizeof route, l);
    return l;
}

static kvf_connection *connection_of(const kvf_modelled_link *link, kvf_route route) {
    const kvf_world *world = link->host->world;
    const uint64_t number = route & ~INCOMING;
    return number < world->connection_count ? world->connections[number] : NULL;
}

static void disconnect_link(kvf_link *base, kvf_route route) {
    line *l = line_of((const kvf_modelled_link *)base, route);
    if (l && --l->users == 0)
        free_line(l);
}

static void carry(kvf_modelled_link *to, parcel *one) {
    kvf_world *world = to->host->world;
    one->due = world->line.now + world->latency_ns;
    DL_APPEND(to->inbox, one);
    kvf_happening_by(&world->line, &to->host->turn, one->due);
}

/* Carries what has waited in a connection. */
static void carry_kept(kvf_modelled_link *to, parcel **kept) {
    parcel *one = *kept, *next;
    for (*kept = NULL; one; one = next) {
        next = one->next;
        carry(to, one);
    }
}

static kvf_status put(kvf_connection *over, bool to_server, const void *data, size_t bytes) {
    kvf_world *world = over->server->host->world;
    parcel *one = kvf_alloc(1, sizeof *one + bytes);
    if (!one)
        return kvf_nomem("a simulated message");
    *one = (parcel){.route = to_server ? INCOMING | over->number : over->client->route, .bytes = bytes};
    memcpy(one->data, data, bytes);
    if (kvf_hosts_reach(over->client->link->host, over->server->host))
        carry(to_server ? over->server : over->client->link, one);
    else if (to_server)
        DL_APPEND(over->to_server, one);
    else
        DL_APPEND(over->to_client, one);
    world->messages++;
    world->message_bytes += bytes;
    return KVF_OK;
}

static kvf_status send_by(kvf_link *base, kvf_route route, const void *data, size_t bytes) {
    kvf_modelled_link *link = (kvf_modelled_link *)base;
    if (link->host->world->quiet)
        return KVF_OK;
    if (route & INCOMING) {
        kvf_connection *c = connection_of(link, route);
        return c ? put(c, false, data, bytes)
                 : kvf_fail(KVF_E_NOT_FOUND, "connection %llu has ended",
                            (unsigned long long)(route & ~INCOMING));
    }
    const line *l = line_of(link, route);
    if (!l)
        return kvf_fail(KVF_E_NOT_FOUND, "there is no route %llu", (unsigned long long)route);
    return l->connection ? put(l->connection, true, data, bytes) : KVF_OK;
}

static void tell(const kvf_modelled_link *link, const line *l, kvf_status status, const char *what) {
    char detail[ENDPOINT_BYTES + 64];
    (void)snprintf(detail, sizeof detail, "%s: %s", l->endpoint, what);
    link->options.on_broken(link->options.context, l->route, status, detail);
}

/* A line that needs something now; NULL: none does. */
static line *needy_of(const kvf_modelled_link *link) {
    line *l;
    DL_FOREACH(link->unconnected, l) {
        if (l->broken || link->host->world->line.now >= l->next_try)
            return l;
    }
    return NULL;
}

static void take_care_of(kvf_modelled_link *link, line *l) {
    if (l->broken) {
        l->broken = false;
        tell(link, l, KVF_E_PEER_LOST, "the connection broke");
    } else if (!dial(l)) {
        tell(link, l, l->silent ? KVF_E_TIMEOUT : KVF_E_IO,
             l->silent ? "no connection: the host does not answer"
                       : "no connection: it was refused because nobody listens there");
    }
}

static uint64_t due_of(const kvf_link *base) {
    const kvf_modelled_link *link = (const kvf_modelled_link *)base;
    uint64_t due = link->inbox ? link->inbox->due : UINT64_MAX;
    const line *l;
    DL_FOREACH(link->unconnected, l) {
        due = kvf_min_u64(due, l->broken ? 0 : l->next_try);
    }
    return due;
}

static bool is_pending(kvf_link *base) {
    return due_of(base) <= ((const kvf_modelled_link *)base)->host->world->line.now;
}

static void progress_link(kvf_link *base, bool *more) {
    kvf_modelled_link *link = (kvf_modelled_link *)base;
    const uint64_t now = link->host->world->line.now;
    while (link->inbox && link->inbox->due <= now) {
        parcel *one = link->inbox;
        DL_DELETE(link->inbox, one);
        const bool incoming = (one->route & INCOMING) != 0;
        if (incoming ? connection_of(link, one->route) != NULL : line_of(link, one->route) != NULL)
            link->options.on_message(link->options.context, &(const kvf_letter){.route = one->route,
                                                                                .called = !incoming,
                                                                                .data = one->data,
                                                                                .bytes = one->bytes});
        kvf_free(one);
    }
    line *l;
    while ((l = needy_of(link))) /* each callback may disconnect any */
        take_care_of(link, l);
    *more = is_pending(base);
}

/* NOLINTNEXTLINE(readability-non-const-parameter): the table has this type */
static uint32_t fds_of(const kvf_link *base, int fds[KVF_LINK_FDS]) {
    (void)base, (void)fds;
    return 0;
}

static kvf_link_counts count_link(const kvf_link *base) {
    return (kvf_link_counts){.now = ((const kvf_modelled_link *)base)->incoming_count};
}

static bool has_ended(const kvf_link *base, kvf_route route) {
    return (route & INCOMING) && !connection_of((const kvf_modelled_link *)base, route);
}

/* ---- hosts that are cut off -------------------------------------------------------------------- */

static void resume(kvf_connection *c) {
    if (!kvf_hosts_reach(c->client->link->host, c->server->host))
        return;
    carry_kept(c->client->link, &c->to_client);
    carry_kept(c->server, &c->to_server);
}

static void break_if_cut(kvf_connection *c) {
    if (!kvf_hosts_reach(c->client->link->host, c->server->host))
        break_connection(c);
}

/* Does it with each connection of a link, of which it may end that one. */
static void for_each_connection(kvf_modelled_link *link, void (*act)(kvf_connection *connection)) {
    kvf_connection *c, *next;
    line *l, *next_line;
    DL_FOREACH_SAFE(link->incoming, c, next) {
        act(c);
    }
    HASH_ITER(by_route, link->lines_by_route, l, next_line) {
        if (l->connection)
            act(l->connection);
    }
}

void kvf_network_resume(kvf_host *host) {
    for_each_connection(host->link, resume);
}

void kvf_network_break(kvf_host *host) {
    for_each_connection(host->link, break_if_cut);
}

const kvf_link_table kvf_modelled_network = {
    .open = open_link,
    .close = close_link,
    .endpoint = endpoint_of,
    .connect = connect_link,
    .disconnect = disconnect_link,
    .send = send_by,
    .progress = progress_link,
    .pending = is_pending,
    .fds = fds_of,
    .due = due_of,
    .counts = count_link,
    .has_ended = has_ended,
};
