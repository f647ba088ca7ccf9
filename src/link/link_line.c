/*
 * Outgoing routes, and their connections.
 *
 *              begins                      DISCONNECTED, or gone when sent to
 *   connect ───────────────► DIALLED ───────────────────────────────────────► BROKEN
 *                              ▲  ▲ └─┐ CONNECT_RETRIED: told, ZeroMQ goes on     │ all read: ended, told
 *                              │  └───┘ and why                                   │
 *                              └──────────────────────── RESTING ◄────────────────┘
 *                                         pause over
 *
 * If no message comes over the first connection, a second one is made beside it. All messages are then sent over both,
 * until one comes over either of them; that connection stays. The first is not closed earlier, because a busy peer may
 * still answer over it, and may not accept the new connection, over which it does not know us.
 */
#include <errno.h>
#include <stdio.h>

#include "link/link_inside.h"

#define SEND_LIMIT 16384 /* messages that wait on one outgoing connection */
/* About as long as TCP tries by itself; leases, and not this, limit how long a network link may be down. */
#define UNACKNOWLEDGED_MS 900000
#define PAUSE_NS UINT64_C(20000000)
#define PAUSE_MAX_NS KVF_SECOND

#define MONITOR_ADDRESS "inproc://caller"
#define MONITORED                                                                                            \
    (ZMQ_EVENT_CONNECTED | ZMQ_EVENT_CLOSED | ZMQ_EVENT_CONNECT_RETRIED | ZMQ_EVENT_DISCONNECTED |           \
     ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |                                  \
     ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH)

kvf_status kvf_lines_open(kvf_zmq_link *link, const kvf_link_options *options) {
    const int longest = UNACKNOWLEDGED_MS;
    kvf_status status = kvf_link_make_router(link, options, SEND_LIMIT, &link->caller);
    if (!status && zmq_setsockopt(link->caller, ZMQ_TCP_MAXRT, &longest, sizeof longest))
        status = kvf_zmq_fail("ZMQ_TCP_MAXRT");
    return status ? status
                  : kvf_zmq_monitor(link->zmq, link->caller, MONITOR_ADDRESS, MONITORED, &link->monitor);
}

/* ---- silence --------------------------------------------------------------------------------- */

static void look_at(kvf_zmq_link *link, const kvf_line *line) {
    if (line->first->made)
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
    /* The analyser does not know that a line that is `asking` is in the list. */
    if (line->asking)
        DL_DELETE(link->asking, line); /* NOLINT(clang-analyzer-core.NullDereference) */
    line->asking = false;
}

/* ---- two connections ------------------------------------------------------------------------- */

static void end_second(kvf_zmq_link *link, kvf_line *line) {
    if (!line->second->there)
        return;
    kvf_dial_end(link, line->second);
    DL_DELETE2(link->doubled, line, two_prev, two_next);
}

static void begin_second(kvf_zmq_link *link, kvf_line *line) {
    end_second(link, line);
    line->first->heard = false;
    if (kvf_dial_begin(link, line->second) == KVF_OK)
        DL_APPEND2(link->doubled, line, two_prev, two_next);
}

/* Ends the first connection, and makes the second the first. */
static void change_over(kvf_zmq_link *link, kvf_line *line) {
    kvf_dial *former = line->first;
    DL_DELETE2(link->doubled, line, two_prev, two_next);
    kvf_dial_end(link, former);
    line->first = line->second;
    line->second = former;
    line->state = KVF_LINE_DIALLED;
}

/* Ends one connection of each line that has two and has received a message. If messages came over both, the first
 * stays, because the other end may know us by it. */
static void settle(kvf_zmq_link *link) {
    kvf_line *line, *next;
    DL_FOREACH_SAFE2(link->doubled, line, next, two_next) {
        if (line->first->heard)
            end_second(link, line);
        else if (line->second->heard)
            change_over(link, line);
    }
}

/* Makes a second connection, without a report to the owner. Not for ipc: it loses no messages, so that a second
 * connection would not help. */
static void dial_beside(kvf_zmq_link *link, kvf_line *line) {
    line->silence_ns = kvf_min_u64(2 * line->silence_ns, KVF_SILENCE_MAX_NS);
    forget_asked(link, line);
    if (line->endpoint.port_at)
        begin_second(link, line);
}

/* ---- dialling -------------------------------------------------------------------------------- */

static void report_break(kvf_zmq_link *link, kvf_route route, kvf_status status, const char *endpoint,
                         const char *what) {
    char detail[KVF_ENDPOINT_BYTES + 128];
    (void)snprintf(detail, sizeof detail, "%s: %s", endpoint, what);
    if (link->on_broken)
        link->on_broken(link->context, route, status, detail);
}

static void rest_for(kvf_zmq_link *link, kvf_line *line, uint64_t ns) {
    line->due_ns = kvf_now(link->clock) + ns;
    line->state = KVF_LINE_RESTING;
    DL_APPEND(link->resting, line);
    link->next_due_ns = kvf_min_u64(link->next_due_ns, line->due_ns);
}

static void rest(kvf_zmq_link *link, kvf_line *line) {
    /* Lines that broke together should not all come back in the same moment. */
    uint64_t spread = line->route * UINT64_C(0x9E3779B97F4A7C15) % (line->pause_ns / 2);
    rest_for(link, line, line->pause_ns + spread);
    line->pause_ns = kvf_min_u64(line->pause_ns * 2, PAUSE_MAX_NS);
}

/* A name is looked up each time a connection is made. KVF_IN_PROGRESS: not yet; KVF_E_IO: there is no such name. */
static kvf_status find_address(kvf_line *line) {
    const kvf_endpoint *endpoint = &line->endpoint;
    const size_t begin = strlen("tcp://");
    if (!kvf_dial_has_name(endpoint))
        return KVF_OK;
    return kvf_look_up(endpoint->text + begin, endpoint->port_at - begin - 1, &line->lookup, line->address);
}

static kvf_status dial(kvf_zmq_link *link, kvf_line *line) {
    kvf_status status = kvf_dial_begin(link, line->first);
    if (!status)
        line->state = KVF_LINE_DIALLED;
    return status;
}

/* Dials a line that has rested for long enough. True: its end was reported, and other lines may have been freed. */
static bool redial(kvf_zmq_link *link, kvf_line *line) {
    DL_DELETE(link->resting, line);
    const kvf_status found = find_address(line);
    if (found == KVF_IN_PROGRESS)
        rest_for(link, line, KVF_LOOKUP_PAUSE);
    else if (found || dial(link, line))
        rest(link, line); /* to the end of the list */
    if (found == KVF_E_IO)
        report_break(link, line->route, KVF_E_IO, line->endpoint.text,
                     "no connection: the host name could not be looked up");
    return found == KVF_E_IO;
}

void kvf_lines_redial(kvf_zmq_link *link, bool all_read) {
    kvf_line *next;
    uint64_t next_due = KVF_LINK_NEVER;
    if (all_read && link->doubled)
        settle(link);
    if (link->next_due_ns == KVF_LINK_NEVER)
        return;
    uint64_t now = kvf_now(link->clock);
    if (now < link->next_due_ns)
        return;
    for (kvf_line *line = link->asking; line && all_read; line = next) {
        next = line->next;
        if (line->first->made && now >= line->asked_ns + line->silence_ns)
            dial_beside(link, line);
    }
    for (kvf_line *line = link->resting; line; line = next) {
        next = line->next;
        if (line->due_ns <= now && redial(link, line))
            next = link->resting;
    }
    for (const kvf_line *line = link->resting; line; line = line->next)
        next_due = kvf_min_u64(next_due, line->due_ns);
    link->next_due_ns = next_due;
    for (const kvf_line *line = link->asking; line; line = line->next)
        look_at(link, line);
}

/* ---- events of connections ------------------------------------------------------------------- */

static void break_line(kvf_zmq_link *link, kvf_line *line) {
    if (line->state != KVF_LINE_DIALLED)
        return;
    forget_asked(link, line);
    line->state = KVF_LINE_BROKEN;
    DL_APPEND(link->broken, line);
}

static void broke(kvf_zmq_link *link, kvf_dial *dial) {
    if (dial == dial->line->second)
        end_second(link, dial->line);
    else
        break_line(link, dial->line);
}

/* A try to connect has failed. Reported only for the first connection: while the first exists, the owner need not know
 * that there is no second. */
static void missed(kvf_zmq_link *link, kvf_dial *dial, uint32_t pause_ms) {
    kvf_line *line = dial->line;
    const char *words;
    kvf_status status = kvf_dial_missed(link, dial, &words);
    dial->closed = false;
    dial->tried_ns = kvf_now(link->clock) + pause_ms * UINT64_C(1000000);
    if (dial != line->first)
        return;
    if (kvf_dial_has_name(&line->endpoint) && !line->second->there && line->state == KVF_LINE_DIALLED) {
        forget_asked(link, line); /* its name may have another address by now */
        kvf_dial_end(link, dial);
        rest(link, line);
    }
    report_break(link, line->route, status, line->endpoint.text, words); /* may free the line */
}

/* Reads the port at the end of a TCP endpoint; 0: it has none. */
static uint16_t port_of(const char *text, size_t bytes) {
    size_t at = bytes;
    uint32_t port = 0;
    while (at > 0 && text[at - 1] >= '0' && text[at - 1] <= '9')
        at--;
    for (; at < bytes && port <= UINT16_MAX; at++)
        port = port * 10 + (uint32_t)(text[at] - '0');
    return port <= UINT16_MAX ? (uint16_t)port : 0;
}

static void take_event(kvf_zmq_link *link, uint16_t event, uint32_t value, const void *text, size_t bytes) {
    kvf_dial *dial = kvf_dial_of_text(link, text, bytes);
    if (!dial)
        return; /* hung up already */
    switch (event) {
    case ZMQ_EVENT_CONNECTED:
        kvf_door_hung_up(&link->calls, &dial->call);
        dial->call = kvf_door_called(&link->calls, (int)value, port_of(text, bytes), link->now);
        break;
    case ZMQ_EVENT_CLOSED:
        dial->closed = true;
        break;
    case ZMQ_EVENT_CONNECT_RETRIED:
        missed(link, dial, value);
        break;
    case ZMQ_EVENT_HANDSHAKE_SUCCEEDED:
        dial->made = true;
        if (dial == dial->line->second)
            break;
        dial->line->pause_ns = PAUSE_NS;
        dial->line->asked_ns = kvf_now(link->clock); /* waiting messages are sent now */
        if (dial->line->asking)
            look_at(link, dial->line);
        break;
    case ZMQ_EVENT_DISCONNECTED:
        if (!dial->made && !dial->why) /* of every other failure of a handshake ZeroMQ has told before */
            kvf_dial_foreign(dial);
        broke(link, dial);
        break;
    default: /* DISCONNECTED follows */
        kvf_dial_refused(link, dial, event, value);
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
        if (kvf_door_has_cut_off(&link->calls, line->first->call))
            kvf_dial_cut_off(line->first);
        kvf_status status = line->first->why ? line->first->why : KVF_E_PEER_LOST;
        const char *what = line->first->why ? line->first->what : "the connection broke";
        char endpoint[KVF_ENDPOINT_BYTES];
        kvf_route route = line->route;
        memcpy(endpoint, line->endpoint.text, sizeof endpoint);
        DL_DELETE(link->broken, line);
        if (line->second->there) {
            change_over(link, line);
        } else {
            kvf_dial_end(link, line->first);
            rest(link, line);
        }
        report_break(link, route, status, endpoint, what); /* may free the line */
    }
}

/* ---- lines ----------------------------------------------------------------------------------- */

kvf_line *kvf_line_find(kvf_zmq_link *link, kvf_route route) {
    kvf_line *line;
    HASH_FIND(by_route, link->lines_by_route, &route, sizeof route, line);
    return line;
}

kvf_line *kvf_line_hear(kvf_zmq_link *link, const void *id, size_t bytes) {
    kvf_dial_id read;
    if (bytes != sizeof read)
        return NULL;
    memcpy(&read, id, sizeof read);
    kvf_line *line = kvf_line_find(link, read.route);
    for (uint32_t i = 0; line && i < 2; i++) {
        kvf_dial *dial = &line->dials[i];
        if (!dial->there || dial->attempt != read.attempt)
            continue;
        dial->heard = true;
        (void)kvf_guests_read(&link->calls.guests, dial->call);
        forget_asked(link, line);
        line->silence_ns = KVF_SILENCE_NS;
        return line;
    }
    return NULL;
}

kvf_status kvf_line_send(kvf_zmq_link *link, kvf_line *line, const void *data, size_t bytes) {
    if (line->state != KVF_LINE_DIALLED)
        return KVF_OK;
    if (line->second->there && kvf_dial_send(link, line->second, data, bytes) == EHOSTUNREACH)
        end_second(link, line);
    switch (kvf_dial_send(link, line->first, data, bytes)) {
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
    kvf_lookup_drop(&line->lookup);
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
        (void)zmq_z85_decode(line->key_bytes, key); /* check_server_key() has checked the key */
    line->route = ++link->last_route;
    line->pause_ns = PAUSE_NS;
    line->silence_ns = KVF_SILENCE_NS;
    line->users = 1;
    line->first = &line->dials[0];
    line->second = &line->dials[1];
    line->first->line = line->second->line = line;
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
                        "%s: no public key is given for it; this side has keys, and encrypts all connections",
                        endpoint);
    if (!link->encrypted && key[0] != '\0')
        return kvf_fail(KVF_E_PERMISSION,
                        "%s: a public key is given for it, but this side has no keys of its own", endpoint);
    return link->encrypted ? kvf_link_read_key("the peer's public_key", key, bytes) : KVF_OK;
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
    status = find_address(line);
    if (status == KVF_IN_PROGRESS || status == KVF_E_IO) {
        rest_for(link, line, KVF_LOOKUP_PAUSE);
        status = KVF_OK;
    } else if (!status) {
        status = dial(link, line);
    }
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
    if (line->state == KVF_LINE_RESTING)
        DL_DELETE(link->resting, line);
    else if (line->state == KVF_LINE_BROKEN)
        DL_DELETE(link->broken, line);
    end_second(link, line);
    kvf_link_linger(link->caller, KVF_LAST_WORDS_MS);
    kvf_dial_end(link, line->first);
    kvf_link_linger(link->caller, 0); /* connections that are given up take nothing along */
    remove_line(link, line);
}

void kvf_lines_free(kvf_zmq_link *link) {
    kvf_line *line = link->lines_by_route;
    HASH_CLEAR(by_text, link->dials);
    HASH_CLEAR(by_name, link->lines_by_name);
    while (line) {
        kvf_line *next = line->by_route.next;
        HASH_DELETE(by_route, link->lines_by_route, line);
        free_line(line);
        line = next;
    }
}
