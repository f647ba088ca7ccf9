/* A link by ZeroMQ: opening and closing it, sending, and receiving. */
#include <errno.h>
#include <unistd.h>

#include "link/link_inside.h"

#define ANSWER_LIMIT 4096 /* messages that wait on one incoming connection */
#define DEFAULT_LISTEN "tcp://127.0.0.1:*"

/* The routing id that a ROUTER gives a connection: a zero byte and a number. */
#define INCOMING_ID_BYTES 5u

/* ---- opening and closing --------------------------------------------------------------------- */

static kvf_guests limits_of(const kvf_link_options *options) {
    const uint32_t most = kvf_door_most(options->max_connections, KVF_LINK_SIXTEENTHS),
                   address = options->max_connections_per_address;
    return (kvf_guests){.most = most,
                        .most_of_address = address ? address : most - most / 4,
                        .longest = KVF_LINK_LONGEST,
                        .longest_strange = KVF_WIRE_STRANGER_BYTES + KVF_LINK_SEALED_BYTES,
                        .is_known = options->is_known,
                        .on_crowded = options->on_crowded,
                        .context = options->context};
}

static kvf_status open_listener(kvf_zmq_link *link, const kvf_link_options *options,
                                const kvf_endpoint *endpoint) {
    const int server = 1;
    kvf_status status = kvf_link_make_router(link, options, ANSWER_LIMIT, &link->listener);
    if (status)
        return status;
    if (link->encrypted && zmq_setsockopt(link->listener, ZMQ_CURVE_SERVER, &server, sizeof server))
        return kvf_zmq_fail("ZMQ_CURVE_SERVER");
    const kvf_guests limits = limits_of(options);
    link->door.gate.rate = options->max_connections_per_second ? options->max_connections_per_second
                           : link->encrypted                   ? KVF_GATE_DEAR_RATE
                                                               : KVF_GATE_RATE;
    status = kvf_door_open(&link->door, link->zmq, link->listener, &limits);
    if (!status)
        status = kvf_link_bind(link, endpoint);
    if (!status)
        kvf_door_bound(&link->door, link->endpoint);
    return status;
}

static kvf_status open_sockets(kvf_zmq_link *link, const kvf_link_options *options,
                               const kvf_endpoint *endpoint) {
    link->zmq = zmq_ctx_new();
    if (!link->zmq)
        return kvf_zmq_fail("zmq_ctx_new");
    kvf_status status = kvf_guard_open(link, options);
    const kvf_guests limits = limits_of(options);
    if (!status)
        status = kvf_door_open_calls(&link->calls, &limits);
    if (!status)
        status = kvf_lines_open(link, options);
    if (!status && endpoint->text[0])
        status = open_listener(link, options, endpoint);
    return status ? status : kvf_link_note_fds(link);
}

/* Reads where to listen, if anywhere, and checks that it is allowed. */
static kvf_status read_listen(const kvf_link_options *options, kvf_endpoint *out) {
    const char *listen = options->listen ? options->listen : DEFAULT_LISTEN;
    *out = (kvf_endpoint){0};
    if (listen[0] == '\0')
        return KVF_OK;
    kvf_status status = kvf_endpoint_to_listen(listen, out);
    if (status)
        return kvf_fail_in(status, "listen: ");
    if (!out->loopback && !options->public_key && !options->insecure)
        return kvf_fail(
            KVF_E_PERMISSION,
            "listen is \"%s\", which other machines reach; allowed with public_key and secret_key, or "
            "with insecure",
            out->text);
    return KVF_OK;
}

static void close_zmq(kvf_link *base);

static kvf_status open_zmq(const kvf_link_options *options, kvf_link **out) {
    kvf_endpoint endpoint;
    kvf_status status = read_listen(options, &endpoint);
    if (!status)
        status = kvf_link_check_keys(options);
    if (!status)
        status = kvf_link_check_descriptors();
    if (status)
        return status;
    kvf_zmq_link *link = kvf_alloc0(1, sizeof *link);
    if (!link)
        return kvf_nomem("link");
    link->clock = options->clock;
    link->encrypted = options->public_key != NULL;
    link->on_message = options->on_message;
    link->on_broken = options->on_broken;
    link->context = options->context;
    link->next_due_ns = KVF_LINK_NEVER;
    link->door.empty_fd = link->door.spare_fd = link->door.brought_fd = -1;
    link->calls.empty_fd = link->calls.spare_fd = link->calls.brought_fd = -1;
    kvf_mail_open(&link->mail);
    status = open_sockets(link, options, &endpoint);
    if (status) {
        close_zmq(&link->base);
        return status;
    }
    *out = &link->base;
    return KVF_OK;
}

static void close_zmq(kvf_link *base) {
    kvf_zmq_link *link = kvf_zmq_link_of(base);
    /* ZeroMQ does not remove the file of an ipc endpoint. Before the socket is closed the file is surely still ours. */
    if (strncmp(link->endpoint, "ipc://", 6) == 0 && link->endpoint[6] != '@')
        (void)unlink(link->endpoint + 6);
    kvf_link_linger(link->listener, KVF_LAST_WORDS_MS);
    kvf_link_linger(link->caller, KVF_LAST_WORDS_MS);
    void *const sockets[] = {link->listener, link->caller, link->monitor, link->guard, link->door.monitor};
    for (size_t i = 0; i < sizeof sockets / sizeof *sockets; i++)
        kvf_zmq_close(sockets[i]);
    while (link->zmq && zmq_ctx_term(link->zmq) != 0 && zmq_errno() == EINTR) {
    }
    kvf_mail_close(&link->mail);
    kvf_post_free(&link->to_guests);
    kvf_post_free(&link->to_called);
    kvf_lines_free(link);
    kvf_door_close(&link->calls);
    kvf_door_close(&link->door);
    kvf_free(link->allowed);
    kvf_free(link);
}

static const char *endpoint_of(const kvf_link *base) {
    return ((const kvf_zmq_link *)base)->endpoint;
}

static kvf_status connect_line(kvf_link *base, const char *endpoint, const char *server_key, kvf_route *out) {
    return kvf_lines_connect(kvf_zmq_link_of(base), endpoint, server_key, out);
}

static void disconnect_line(kvf_link *base, kvf_route route) {
    kvf_lines_disconnect(kvf_zmq_link_of(base), route);
}

/* ---- sending --------------------------------------------------------------------------------- */

/* Peers that do not take all that is sent to them leave no room for others: the worst of them is hung up on. */
static void make_room(kvf_zmq_link *link) {
    const kvf_route stuck = kvf_post_stuck(&link->to_guests, kvf_now(link->clock));
    if (!stuck)
        return;
    kvf_guests_dismiss(&link->door.guests, stuck);
    if (link->door.guests.on_crowded)
        link->door.guests.on_crowded(link->context, "over budget: a peer does not read what is sent to it");
}

static kvf_status send_incoming(kvf_zmq_link *link, kvf_route route, const void *data, size_t bytes) {
    uint8_t id[INCOMING_ID_BYTES] = {0};
    uint32_t number = (uint32_t)route;
    if (!link->listener)
        return KVF_OK;
    memcpy(id + 1, &number, sizeof number);
    const kvf_address to = {link->listener, &link->to_guests, route, id, sizeof id};
    int error = kvf_link_transmit(&to, data, bytes);
    kvf_link_note(link, link->listener, true);
    if (error == ENOBUFS)
        make_room(link);
    if (error == EHOSTUNREACH)
        return kvf_fail(KVF_E_NOT_FOUND, "the connection of route %llu has ended", (unsigned long long)route);
    return error == ENOMEM ? kvf_nomem("message") : KVF_OK;
}

static kvf_status send_zmq(kvf_link *base, kvf_route route, const void *data, size_t bytes) {
    kvf_zmq_link *link = kvf_zmq_link_of(base);
    if (route & KVF_ROUTE_INCOMING)
        return send_incoming(link, route, data, bytes);
    kvf_line *line = kvf_line_find(link, route);
    if (!line)
        return kvf_fail(KVF_E_NOT_FOUND, "there is no route %llu", (unsigned long long)route);
    return kvf_line_send(link, line, data, bytes);
}

/* ---- receiving ------------------------------------------------------------------------------- */

/* Finds the sender of a message over a connection that we made; false: the connection was hung up since. */
static bool see_called(kvf_zmq_link *link, zmq_msg_t *id, kvf_letter *letter) {
    const kvf_line *line = kvf_line_hear(link, zmq_msg_data(id), zmq_msg_size(id));
    if (!line)
        return false;
    letter->route = line->route;
    letter->called = true;
    letter->key = link->encrypted ? line->key_bytes : NULL;
    return true;
}

/* Finds the sender of a message over a connection that was made to us; false: the sender is not allowed. */
static bool see_incoming(kvf_zmq_link *link, zmq_msg_t *id, zmq_msg_t *message, uint8_t key[KVF_KEY_BYTES],
                         kvf_letter *letter) {
    const uint8_t *bytes = zmq_msg_data(id);
    uint32_t number;
    /* A client may choose a routing id, but ours do not. */
    if (zmq_msg_size(id) != INCOMING_ID_BYTES || bytes[0] != 0)
        return false;
    memcpy(&number, bytes + 1, sizeof number);
    letter->route = KVF_ROUTE_INCOMING | number;
    letter->key = link->encrypted ? key : NULL;
    if (link->encrypted && !kvf_guard_passes(link, message, key))
        return false;
    if (kvf_door_hear(&link->door, letter->route, message, link->now))
        kvf_link_note(link, link->door.monitor, true);
    return true;
}

/* Keeps a message over a connection that was made to us, until it is its sender's turn. */
static void keep_incoming(kvf_zmq_link *link, zmq_msg_t frames[2]) {
    uint8_t key[KVF_KEY_BYTES];
    kvf_letter letter = {0};
    if (!see_incoming(link, &frames[0], &frames[1], key, &letter))
        return;
    bool known = link->door.guests.is_known && link->door.guests.is_known(link->context, letter.route);
    const char *refused = kvf_mail_add(&link->mail, letter.route, letter.key, known, &frames[1]);
    if (refused && link->door.guests.on_crowded)
        link->door.guests.on_crowded(link->context, refused);
}

static void read_called(kvf_zmq_link *link, zmq_msg_t frames[2]) {
    kvf_letter letter = {.data = zmq_msg_data(&frames[1]), .bytes = zmq_msg_size(&frames[1])};
    if (see_called(link, &frames[0], &letter))
        link->on_message(link->context, &letter);
}

/* At most a batch; whether everything was taken in. `taken` receives how many messages that were. */
static bool take_messages(kvf_zmq_link *link, void *socket, uint32_t *taken,
                          void (*take)(kvf_zmq_link *link, zmq_msg_t frames[2])) {
    size_t bytes = 0;
    for (*taken = 0; *taken < KVF_LINK_BATCH && bytes < KVF_LINK_BATCH_BYTES; (*taken)++) {
        zmq_msg_t frames[2]; /* routing id; message */
        (void)zmq_msg_init(&frames[0]);
        (void)zmq_msg_init(&frames[1]);
        uint32_t count = kvf_zmq_receive(socket, frames, 2);
        bytes += zmq_msg_size(&frames[1]);
        if (count == 2)
            take(link, frames);
        (void)zmq_msg_close(&frames[0]);
        (void)zmq_msg_close(&frames[1]);
        if (count == 0) {
            kvf_link_note(link, socket, false);
            return true;
        }
    }
    return false;
}

/* Reads waiting letters by turns, up to the work of a round. */
static void read_mail(kvf_zmq_link *link) {
    kvf_mail_letter *mail;
    kvf_mail_begin_round(&link->mail);
    for (uint64_t work = 0; work < KVF_MAIL_ROUND_WORK && (mail = kvf_mail_next(&link->mail));) {
        uint64_t read = 0;
        const kvf_letter letter = {.route = mail->route,
                                   .key = mail->keyed ? mail->key : NULL,
                                   .data = zmq_msg_data(&mail->message),
                                   .bytes = zmq_msg_size(&mail->message),
                                   .work = &read};
        if (!mail->keyed || kvf_guard_knows(link, mail->key))
            link->on_message(link->context, &letter);
        work += kvf_mail_read(&link->mail, mail, read);
    }
}

static void take_incoming(kvf_zmq_link *link) {
    uint32_t taken = 0;
    const bool all = !kvf_link_is_unread(link, link->listener) ||
                     take_messages(link, link->listener, &taken, keep_incoming);
    kvf_guests_took(&link->door.guests, taken, all);
    if (link->stirs || kvf_door_due(&link->door) <= link->now)
        kvf_door_weigh(&link->door, link->now);
}

/* Whether all messages over connections that we made were taken in. */
static bool take_called(kvf_zmq_link *link) {
    uint32_t taken = 0;
    bool all = !link->broken && !kvf_link_is_unread(link, link->caller);
    if (!all)
        all = take_messages(link, link->caller, &taken, read_called);
    kvf_guests_took(&link->calls.guests, taken, all);
    if (link->stirs || kvf_door_due(&link->calls) <= link->now)
        kvf_door_weigh(&link->calls, link->now);
    return all;
}

static bool is_pending(kvf_link *base);

static void progress_zmq(kvf_link *base, bool *more) {
    kvf_zmq_link *link = kvf_zmq_link_of(base);
    link->now = kvf_now(link->clock);
    kvf_link_look(link);
    kvf_guard_answer(link);
    if (kvf_link_is_unread(link, link->door.monitor))
        kvf_link_note(link, link->door.monitor, kvf_door_take_events(&link->door, link->now));
    kvf_guests_tick(&link->door.guests, link->now);
    /* Events are read first, but take effect after the messages that came before them. */
    kvf_lines_take_events(link);
    const bool all_read = take_called(link);
    if (all_read)
        kvf_lines_hang_up(link);
    kvf_lines_redial(link, all_read);
    take_incoming(link);
    read_mail(link);
    *more = is_pending(base);
}

static uint64_t due_of(const kvf_link *base) {
    const kvf_zmq_link *link = (const kvf_zmq_link *)base;
    return kvf_min_u64(link->next_due_ns, kvf_min_u64(kvf_door_due(&link->door), kvf_door_due(&link->calls)));
}

static kvf_link_counts counts_of(const kvf_link *base) {
    const kvf_zmq_link *link = (const kvf_zmq_link *)base;
    const kvf_guests *guests = &link->door.guests, *called = &link->calls.guests;
    return (kvf_link_counts){guests->count, guests->closed + called->closed,
                             guests->refused + called->refused, link->mail.dropped + link->to_guests.dropped};
}

static bool has_ended(const kvf_link *base, kvf_route route) {
    return (route & KVF_ROUTE_INCOMING) && !kvf_guests_has(&((const kvf_zmq_link *)base)->door.guests, route);
}

static bool is_pending(kvf_link *base) {
    kvf_zmq_link *link = kvf_zmq_link_of(base);
    return link->broken || kvf_mail_waits(&link->mail) || kvf_link_has_unread(link);
}

static uint32_t fds_of(const kvf_link *base, int fds[KVF_LINK_FDS]) {
    const kvf_zmq_link *link = (const kvf_zmq_link *)base;
    const uint32_t count = link->socket_count + 1 + (link->listener != NULL); /* only then is there a door */
    for (uint32_t i = 0; i < count; i++)
        fds[i] = link->fds[i].fd;
    return count;
}

static kvf_status allow_key(kvf_link *base, const char *public_key, bool allowed) {
    return kvf_guard_allow(kvf_zmq_link_of(base), public_key, allowed);
}

const kvf_link_table kvf_link_zmq = {
    .open = open_zmq,
    .close = close_zmq,
    .endpoint = endpoint_of,
    .connect = connect_line,
    .disconnect = disconnect_line,
    .send = send_zmq,
    .progress = progress_zmq,
    .pending = is_pending,
    .fds = fds_of,
    .due = due_of,
    .counts = counts_of,
    .has_ended = has_ended,
    .allow = allow_key,
};
