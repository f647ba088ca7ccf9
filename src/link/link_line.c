/*
 * Outgoing connections.
 *
 *              zmq_connect                 DISCONNECTED, or gone when sent to
 *   connect ───────────────► DIALLED ───────────────────────────────────────► BROKEN
 *                              ▲  ▲ └─┐ CONNECT_RETRIED: told, ZeroMQ goes on     │ all read: zmq_disconnect,
 *                              │  └───┘ and why                                   │ told
 *                              └──────────────────────── RESTING ◄────────────────┘
 *                                         pause over
 *
 * ZeroMQ's events name a connection by its endpoint text, and it disconnects by that text too. So each
 * connection has a text of its own: zeros before the port ("tcp://10.0.0.1:005555") mean the same, and
 * differ.
 */
#include <errno.h>
#include <stdio.h>

#include "link/link_inside.h"

#define SEND_LIMIT 16384 /* messages that wait on one outgoing connection */
#define PAUSE_NS UINT64_C(20000000)
#define PAUSE_MAX_NS UINT64_C(1000000000)
#define PADDINGS 16u

#define MONITOR_ADDRESS "inproc://caller"
#define MONITORED                                                                                            \
    (ZMQ_EVENT_CLOSED | ZMQ_EVENT_CONNECT_RETRIED | ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_HANDSHAKE_SUCCEEDED | \
     ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |                            \
     ZMQ_EVENT_HANDSHAKE_FAILED_AUTH)

/* What the calling socket knows a connection by. Its first byte is not 0: those ids are ZeroMQ's own. */
typedef struct line_id {
    char mark[8];
    uint64_t route;
    uint64_t attempt;
} line_id;

static line_id id_of(const kvf_line *line) {
    return (line_id){.mark = "kvferry", .route = line->route, .attempt = line->attempt};
}

kvf_status kvf_lines_open(kvf_zmq_link *link, const kvf_link_options *options) {
    kvf_status status = kvf_link_make_router(link, options, SEND_LIMIT, &link->caller);
    return status ? status
                  : kvf_zmq_monitor(link->zmq, link->caller, MONITOR_ADDRESS, MONITORED, &link->monitor);
}

/* ---- where ZeroMQ has it ---------------------------------------------------------------------- */

/* Finds an endpoint text that no other line of ours is connected by. The counter moves on each time, so that
 * late events of the connection before this one do not fit it. */
static bool choose_text(kvf_zmq_link *link, kvf_line *line) {
    const kvf_endpoint *endpoint = &line->endpoint;
    kvf_line *other;
    for (uint32_t i = 0; i < PADDINGS; i++) {
        /* At least one zero: without any it would be the text that ZeroMQ itself makes of addresses. */
        uint32_t zeros = endpoint->port_at ? 1 + link->padding++ % PADDINGS : 0;
        (void)snprintf(line->dialled, sizeof line->dialled, "%.*s%.*s%s", (int)endpoint->port_at,
                       endpoint->text, (int)zeros, "0000000000000000", endpoint->text + endpoint->port_at);
        HASH_FIND(by_dialled, link->lines_by_dialled, line->dialled, strlen(line->dialled), other);
        if (!other)
            return true;
    }
    return false;
}

static void forget_text(kvf_zmq_link *link, kvf_line *line) {
    HASH_DELETE(by_dialled, link->lines_by_dialled, line);
}

/* ---- silence --------------------------------------------------------------------------------- */

static void look_at(kvf_zmq_link *link, const kvf_line *line) {
    if (line->made)
        link->next_due_ns = kvf_min_u64(link->next_due_ns, line->asked_ns + line->silence_ns);
}

static void note_asked(kvf_zmq_link *link, kvf_line *line) {
    if (line->asking)
        return;
    line->asking = true;
    line->asked_ns = kvf_now(link->clock);
    DL_APPEND(link->asking, line);
    look_at(link, line);
}

static void forget_asked(kvf_zmq_link *link, kvf_line *line) {
    if (line->asking)
        DL_DELETE(link->asking, line);
    line->asking = false;
}

void kvf_line_heard(kvf_zmq_link *link, kvf_line *line) {
    forget_asked(link, line);
    line->silence_ns = KVF_SILENCE_NS;
}

/* ---- dialling -------------------------------------------------------------------------------- */

static kvf_status dial(kvf_zmq_link *link, kvf_line *line) {
    int ipv6 = line->endpoint.ipv6; /* only then: with it, names would be looked up as IPv6 first */
    if (!choose_text(link, line))
        return kvf_fail(KVF_E_EXISTS, "%s is connected to already, with other keys", line->endpoint.text);
    HASH_ADD_KEYPTR(by_dialled, link->lines_by_dialled, line->dialled, strlen(line->dialled), line);
    if (!line->by_dialled.tbl)
        return kvf_nomem("connection");
    line->attempt++; /* ZeroMQ aborts when a routing id is used again before its old pipe is gone */
    line->why = KVF_OK;
    line->closed = false;
    line->made = false;
    line->tried_ns = kvf_now(link->clock);
    line_id id = id_of(line);
    bool good = zmq_setsockopt(link->caller, ZMQ_IPV6, &ipv6, sizeof ipv6) == 0 &&
                zmq_setsockopt(link->caller, ZMQ_CONNECT_ROUTING_ID, &id, sizeof id) == 0;
    if (good && link->encrypted)
        good = zmq_setsockopt(link->caller, ZMQ_CURVE_SERVERKEY, line->key, KVF_KEY_CHARACTERS + 1) == 0;
    bool dialled = good && zmq_connect(link->caller, line->dialled) == 0;
    int error = dialled ? 0 : zmq_errno();
    kvf_link_note(link, link->caller, true);
    if (!dialled) {
        forget_text(link, line);
        return kvf_fail(error == EINVAL ? KVF_E_INVALID : KVF_E_IO, "cannot connect to %s: %s",
                        line->endpoint.text, zmq_strerror(error));
    }
    line->state = KVF_LINE_DIALLED;
    return KVF_OK;
}

static void undial(kvf_zmq_link *link, kvf_line *line) {
    (void)zmq_disconnect(link->caller, line->dialled);
    kvf_link_note(link, link->caller, true);
    forget_text(link, line);
}

static void rest(kvf_zmq_link *link, kvf_line *line) {
    /* Lines that broke together should not all come back in the same moment. */
    uint64_t spread = line->route * UINT64_C(0x9E3779B97F4A7C15) % (line->pause_ns / 2);
    line->due_ns = kvf_now(link->clock) + line->pause_ns + spread;
    line->pause_ns = kvf_min_u64(line->pause_ns * 2, PAUSE_MAX_NS);
    line->state = KVF_LINE_RESTING;
    DL_APPEND(link->resting, line);
    link->next_due_ns = kvf_min_u64(link->next_due_ns, line->due_ns);
}

/* Nobody is told: it may be back at once, and if it is not, that there is no connection is told then. */
static void dial_anew(kvf_zmq_link *link, kvf_line *line) {
    line->silence_ns = kvf_min_u64(2 * line->silence_ns, KVF_SILENCE_MAX_NS);
    forget_asked(link, line);
    undial(link, line);
    if (dial(link, line))
        rest(link, line);
}

void kvf_lines_redial(kvf_zmq_link *link, bool all_read) {
    kvf_line *next;
    uint64_t next_due = KVF_LINK_NEVER;
    if (link->next_due_ns == KVF_LINK_NEVER)
        return;
    uint64_t now = kvf_now(link->clock);
    if (now < link->next_due_ns)
        return;
    for (kvf_line *line = link->asking; line && all_read; line = next) {
        next = line->next;
        if (line->made && now >= line->asked_ns + line->silence_ns)
            dial_anew(link, line);
    }
    for (kvf_line *line = link->resting; line; line = next) {
        next = line->next;
        if (line->due_ns > now)
            continue;
        DL_DELETE(link->resting, line);
        if (dial(link, line))
            rest(link, line); /* to the end of the list */
    }
    for (const kvf_line *line = link->resting; line; line = line->next)
        next_due = kvf_min_u64(next_due, line->due_ns);
    link->next_due_ns = next_due;
    for (const kvf_line *line = link->asking; line; line = line->next)
        look_at(link, line);
}

/* ---- what happens to connections ------------------------------------------------------------- */

static void report_break(kvf_zmq_link *link, kvf_route route, kvf_status status, const char *endpoint,
                         const char *what) {
    char detail[KVF_ENDPOINT_BYTES + 128];
    (void)snprintf(detail, sizeof detail, "%s: %s", endpoint, what);
    if (link->on_broken)
        link->on_broken(link->context, route, status, detail);
}

static void break_line(kvf_zmq_link *link, kvf_line *line) {
    if (line->state != KVF_LINE_DIALLED)
        return;
    forget_asked(link, line);
    line->state = KVF_LINE_BROKEN;
    DL_APPEND(link->broken, line);
}

static void note_failed_handshake(const kvf_zmq_link *link, kvf_line *line, uint16_t event, uint32_t value) {
    if (event == ZMQ_EVENT_HANDSHAKE_FAILED_AUTH) {
        line->why = KVF_E_PERMISSION;
        line->what = "the other end does not allow our key";
    } else if (event == ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL) {
        line->why = KVF_E_PEER_LOST;
        line->what = link->encrypted
                         ? "closed, or no answer, during the handshake: perhaps another key than its own"
                         : "closed, or no answer, during the handshake: perhaps the other end encrypts";
    } else if (value == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH) {
        line->why = KVF_E_PERMISSION;
        line->what = link->encrypted ? "the other end does not encrypt, and we do"
                                     : "the other end encrypts, and we do not";
    } else {
        line->why = KVF_E_PARSE;
        line->what = "the other end does not speak ZeroMQ's protocol as we do";
    }
}

/* tcp://name:port, rather than with a numeric address. */
static bool has_name(const kvf_endpoint *endpoint) {
    static const char scheme[] = "tcp://";
    const char *host = endpoint->text + sizeof scheme - 1;
    bool dotted = host[strspn(host, "0123456789.")] == ':';
    return endpoint->port_at && !endpoint->ipv6 && !dotted;
}

/*
 * Why there is no connection. ZeroMQ's events bring no reason, but their order tells some: it has a socket, and
 * closes it, only once it knows an address to connect to.
 */
static const char *why_none(const kvf_zmq_link *link, const kvf_line *line) {
    if (!line->closed && has_name(&line->endpoint))
        return "no connection: the host name could not be looked up; trying again";
    if (!line->closed)
        return "no connection: no socket could be made for it; trying again";
    if (line->endpoint.loopback)
        return "no connection: it was refused, for nobody listens there; trying again";
    if (kvf_now(link->clock) - line->tried_ns >=
        KVF_CONNECT_MS * UINT64_C(750000)) /* ZeroMQ's own is not exact */
        return "no connection: the host did not answer; trying again";
    return "no connection: it was refused, or no way leads to the host; trying again";
}

static void take_event(kvf_zmq_link *link, uint16_t event, uint32_t value, const void *text, size_t bytes) {
    kvf_line *line;
    HASH_FIND(by_dialled, link->lines_by_dialled, text, bytes, line);
    if (!line)
        return; /* hung up already */
    switch (event) {
    case ZMQ_EVENT_CLOSED:
        line->closed = true;
        break;
    case ZMQ_EVENT_CONNECT_RETRIED: {
        const char *why = why_none(link, line);
        line->closed = false;
        line->tried_ns = kvf_now(link->clock) + value * UINT64_C(1000000);
        report_break(link, line->route, KVF_E_IO, line->endpoint.text, why); /* may free the line */
        break;
    }
    case ZMQ_EVENT_HANDSHAKE_SUCCEEDED:
        line->pause_ns = PAUSE_NS;
        line->made = true;
        line->asked_ns = kvf_now(link->clock); /* what waited goes out now */
        if (line->asking)
            look_at(link, line);
        break;
    case ZMQ_EVENT_DISCONNECTED:
        break_line(link, line);
        break;
    default: /* DISCONNECTED follows */
        note_failed_handshake(link, line, event, value);
    }
}

void kvf_lines_take_events(kvf_zmq_link *link) {
    uint16_t event;
    uint32_t value;
    bool more = kvf_link_is_unread(link, link->monitor);
    for (uint32_t i = 0; i < KVF_LINK_BATCH && more; i++) {
        zmq_msg_t text;
        (void)zmq_msg_init(&text);
        more = kvf_zmq_take_event(link->monitor, &event, &value, &text);
        if (more)
            take_event(link, event, value, zmq_msg_data(&text), zmq_msg_size(&text));
        else
            kvf_link_note(link, link->monitor, false);
        (void)zmq_msg_close(&text);
    }
}

void kvf_lines_hang_up(kvf_zmq_link *link) {
    kvf_line *line;
    while ((line = link->broken)) {
        kvf_status status = line->why ? line->why : KVF_E_PEER_LOST;
        const char *what = line->why ? line->what : "the connection broke";
        char endpoint[KVF_ENDPOINT_BYTES];
        kvf_route route = line->route;
        memcpy(endpoint, line->endpoint.text, sizeof endpoint);
        DL_DELETE(link->broken, line);
        undial(link, line);
        rest(link, line);
        report_break(link, route, status, endpoint, what); /* may free the line */
    }
}

/* ---- lines ----------------------------------------------------------------------------------- */

kvf_line *kvf_line_find(kvf_zmq_link *link, kvf_route route) {
    kvf_line *line;
    HASH_FIND(by_route, link->lines_by_route, &route, sizeof route, line);
    return line;
}

kvf_line *kvf_line_of_id(kvf_zmq_link *link, const void *id, size_t bytes) {
    line_id read;
    if (bytes != sizeof read)
        return NULL;
    memcpy(&read, id, sizeof read);
    kvf_line *line = kvf_line_find(link, read.route);
    return line && line->attempt == read.attempt ? line : NULL;
}

kvf_status kvf_line_send(kvf_zmq_link *link, kvf_line *line, const void *data, size_t bytes) {
    if (line->state != KVF_LINE_DIALLED)
        return KVF_OK;
    line_id id = id_of(line);
    int error = kvf_link_transmit(link->caller, &id, sizeof id, data, bytes);
    kvf_link_note(link, link->caller, true);
    switch (error) {
    case 0:
        note_asked(link, line);
        return KVF_OK;
    case ENOMEM:
        return kvf_nomem("message");
    case EHOSTUNREACH: /* ZeroMQ gave it up, or is about to */
        break_line(link, line);
        return KVF_OK;
    default: /* dropped */
        return KVF_OK;
    }
}

static void free_line(kvf_line *line) {
    kvf_free(line->name);
    kvf_free(line);
}

static void remove_line(kvf_zmq_link *link, kvf_line *line) {
    HASH_DELETE(by_route, link->lines_by_route, line);
    HASH_DELETE(by_name, link->lines_by_name, line);
    free_line(line);
}

static kvf_status make_line(kvf_zmq_link *link, const kvf_endpoint *endpoint, const char *key,
                            const char *name, kvf_line **out) {
    kvf_line *line = kvf_alloc0(1, sizeof *line);
    if (!line)
        return kvf_nomem("connection");
    line->name = kvf_strdup(name);
    line->endpoint = *endpoint;
    (void)snprintf(line->key, sizeof line->key, "%s", key);
    if (key[0])
        (void)zmq_z85_decode(line->key_bytes, key); /* check_server_key() saw that it is one */
    line->route = ++link->last_route;
    line->pause_ns = PAUSE_NS;
    line->silence_ns = KVF_SILENCE_NS;
    line->users = 1;
    if (!line->name) {
        free_line(line);
        return kvf_nomem("connection");
    }
    HASH_ADD(by_route, link->lines_by_route, route, sizeof line->route, line);
    if (!line->by_route.tbl) {
        free_line(line);
        return kvf_nomem("connection");
    }
    HASH_ADD_KEYPTR(by_name, link->lines_by_name, line->name, strlen(line->name), line);
    if (!line->by_name.tbl) {
        HASH_DELETE(by_route, link->lines_by_route, line);
        free_line(line);
        return kvf_nomem("connection");
    }
    *out = line;
    return KVF_OK;
}

static kvf_status check_server_key(const kvf_zmq_link *link, const char *endpoint, const char *key) {
    uint8_t bytes[KVF_KEY_BYTES];
    if (link->encrypted && key[0] == '\0')
        return kvf_fail(KVF_E_PERMISSION,
                        "%s: server_key is missing: with keys of our own, connections are encrypted",
                        endpoint);
    if (!link->encrypted && key[0] != '\0')
        return kvf_fail(KVF_E_PERMISSION, "%s: server_key is given, but we have no keys of our own",
                        endpoint);
    return link->encrypted ? kvf_link_read_key("server_key", key, bytes) : KVF_OK;
}

kvf_status kvf_lines_connect(kvf_zmq_link *link, const char *endpoint, const char *server_key,
                             kvf_route *out) {
    kvf_endpoint read;
    kvf_line *line;
    char name[KVF_ENDPOINT_BYTES + KVF_KEY_CHARACTERS + 2];
    const char *key = server_key ? server_key : "";
    kvf_status status = kvf_endpoint_to_connect(endpoint, &read);
    if (!status)
        status = check_server_key(link, read.text, key);
    if (status)
        return status;
    (void)snprintf(name, sizeof name, "%s %s", read.text, key);
    HASH_FIND(by_name, link->lines_by_name, name, strlen(name), line);
    if (line) {
        line->users++;
        *out = line->route;
        return KVF_OK;
    }
    uint32_t most = kvf_door_most(0, KVF_LINK_SIXTEENTHS);
    if (HASH_CNT(by_route, link->lines_by_route) >= most)
        return kvf_fail(KVF_E_LIMIT,
                        "%s: there are %u connections, as many as the process's descriptors allow", read.text,
                        most);
    status = make_line(link, &read, key, name, &line);
    if (status)
        return status;
    status = dial(link, line);
    if (status) {
        remove_line(link, line);
        return status;
    }
    *out = line->route;
    return KVF_OK;
}

void kvf_lines_disconnect(kvf_zmq_link *link, kvf_route route) {
    kvf_line *line = kvf_line_find(link, route);
    if (!line || --line->users > 0)
        return;
    forget_asked(link, line);
    if (line->state == KVF_LINE_RESTING) {
        DL_DELETE(link->resting, line);
    } else {
        if (line->state == KVF_LINE_BROKEN)
            DL_DELETE(link->broken, line);
        undial(link, line);
    }
    remove_line(link, line);
}

void kvf_lines_free(kvf_zmq_link *link) {
    kvf_line *line = link->lines_by_route;
    HASH_CLEAR(by_dialled, link->lines_by_dialled);
    HASH_CLEAR(by_name, link->lines_by_name);
    while (line) {
        kvf_line *next = line->by_route.next;
        HASH_DELETE(by_route, link->lines_by_route, line);
        free_line(line);
        line = next;
    }
}
