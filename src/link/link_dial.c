/*
 * One outgoing connection.
 *
 * ZeroMQ's events name a connection by its endpoint text, and it disconnects by that text too. So each connection gets
 * a text of its own: zeros before the port ("tcp://10.0.0.1:005555") make texts differ without changing their meaning.
 */
#include <errno.h>
#include <stdio.h>

#include "link/link_inside.h"

#define PADDINGS 16u

/* ---- connecting and hanging up ---------------------------------------------------------------- */

static kvf_dial_id id_of(const kvf_dial *dial) {
    return (kvf_dial_id){.mark = "kvferry", .route = dial->line->route, .attempt = dial->attempt};
}

kvf_dial *kvf_dial_of_text(const kvf_zmq_link *link, const void *text, size_t bytes) {
    kvf_dial *dial = NULL;
    HASH_FIND(by_text, link->dials, text, bytes, dial);
    return dial;
}

/* Finds an endpoint text that no other connection of ours has. The counter moves on each time, so that late events of
 * an earlier connection do not name this one. */
static bool choose_text(kvf_zmq_link *link, kvf_dial *dial) {
    const kvf_line *line = dial->line;
    const kvf_endpoint *endpoint = &line->endpoint;
    const char *place = endpoint->text; /* before the port */
    int place_bytes = (int)endpoint->port_at;
    char numeric[sizeof line->address + sizeof "tcp://:"];
    if (kvf_dial_has_name(endpoint)) {
        place_bytes = snprintf(numeric, sizeof numeric, "tcp://%s:", line->address);
        place = numeric;
    }
    for (uint32_t i = 0; i < PADDINGS; i++) {
        /* At least one zero, because ZeroMQ writes addresses itself without one. */
        uint32_t zeros = endpoint->port_at ? 1 + link->padding++ % PADDINGS : 0;
        (void)snprintf(dial->text, sizeof dial->text, "%.*s%.*s%s", place_bytes, place, (int)zeros,
                       "0000000000000000", endpoint->text + endpoint->port_at);
        if (!kvf_dial_of_text(link, dial->text, strlen(dial->text)))
            return true;
    }
    return false;
}

static void forget_text(kvf_zmq_link *link, kvf_dial *dial) {
    HASH_DELETE(by_text, link->dials, dial);
    memset(&dial->by_text, 0, sizeof dial->by_text);
}

kvf_status kvf_dial_begin(kvf_zmq_link *link, kvf_dial *dial) {
    kvf_line *line = dial->line;
    int ipv6 = line->endpoint.ipv6; /* only for IPv6 addresses: it makes names be looked up as IPv6 first */
    if (!choose_text(link, dial))
        return kvf_fail(KVF_E_EXISTS, "%s: there is a connection already, with other keys",
                        line->endpoint.text);
    HASH_ADD_KEYPTR(by_text, link->dials, dial->text, strlen(dial->text), dial);
    if (!dial->by_text.tbl)
        return kvf_nomem("connection");
    dial->attempt =
        ++line->attempts; /* ZeroMQ aborts when a routing id is used again before its old pipe is gone */
    dial->why = KVF_OK;
    dial->closed = dial->made = dial->heard = false;
    dial->tried_ns = kvf_now(link->clock);
    kvf_dial_id id = id_of(dial);
    bool good = zmq_setsockopt(link->caller, ZMQ_IPV6, &ipv6, sizeof ipv6) == 0 &&
                zmq_setsockopt(link->caller, ZMQ_CONNECT_ROUTING_ID, &id, sizeof id) == 0;
    if (good && link->encrypted)
        good = zmq_setsockopt(link->caller, ZMQ_CURVE_SERVERKEY, line->key, KVF_KEY_CHARACTERS + 1) == 0;
    dial->there = good && kvf_zmq_connect(link->caller, dial->text) == 0;
    int error = dial->there ? 0 : zmq_errno();
    kvf_link_note(link, link->caller, true);
    if (dial->there)
        return KVF_OK;
    forget_text(link, dial);
    return kvf_fail(error == EINVAL ? KVF_E_INVALID : KVF_E_IO, "cannot connect to %s: %s",
                    line->endpoint.text, zmq_strerror(error));
}

void kvf_dial_end(kvf_zmq_link *link, kvf_dial *dial) {
    if (!dial->there)
        return;
    kvf_door_hung_up(&link->calls, &dial->call);
    (void)kvf_zmq_disconnect(link->caller, dial->text);
    kvf_link_note(link, link->caller, true);
    forget_text(link, dial);
    dial->there = false;
}

int kvf_dial_send(kvf_zmq_link *link, const kvf_dial *dial, const void *data, size_t bytes) {
    kvf_dial_id id = id_of(dial);
    const kvf_address to = {link->caller, &link->to_called, dial->line->route, &id, sizeof id};
    int error = kvf_link_transmit(&to, data, bytes);
    kvf_link_note(link, link->caller, true);
    return error;
}

/* ---- why there is no connection --------------------------------------------------------------- */

void kvf_dial_refused(const kvf_zmq_link *link, kvf_dial *dial, uint16_t event, uint32_t value) {
    if (event == ZMQ_EVENT_HANDSHAKE_FAILED_AUTH) {
        dial->why = KVF_E_PERMISSION;
        dial->what = "the other end does not allow this end's key";
    } else if (event == ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL) {
        dial->why = KVF_E_PEER_LOST;
        dial->what = link->encrypted
                         ? "closed, or no answer, during the handshake: perhaps the public key given for it "
                           "is another's"
                         : "closed, or no answer, during the handshake: perhaps the other end encrypts";
    } else if (value == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH) {
        dial->why = KVF_E_PERMISSION;
        dial->what = link->encrypted ? "this end encrypts, but the other end does not"
                                     : "the other end encrypts, but this end does not";
    } else {
        kvf_dial_foreign(dial);
    }
}

void kvf_dial_foreign(kvf_dial *dial) {
    dial->why = KVF_E_PARSE;
    dial->what = "the other end does not speak ZeroMQ's protocol as this end does";
}

void kvf_dial_cut_off(kvf_dial *dial) {
    dial->why = KVF_E_PEER_LOST;
    dial->what = "it was closed here, because the other end sent a message without an end";
}

bool kvf_dial_has_name(const kvf_endpoint *endpoint) {
    const char *host = endpoint->text + strlen("tcp://");
    bool dotted = host[strspn(host, "0123456789.")] == ':';
    return endpoint->port_at && !endpoint->ipv6 && !dotted;
}

/* ZeroMQ's events give no reason, but their order allows conclusions: ZeroMQ opens and closes a socket only if it knows
 * an address to connect to. A port of this machine without a listener refuses at once. If a try lasted its full time,
 * there is a listener whose queue of connections is full, or we have read the events late, and the next try shows
 * which. */
kvf_status kvf_dial_missed(const kvf_zmq_link *link, const kvf_dial *dial, const char **words) {
    const kvf_endpoint *endpoint = &dial->line->endpoint;
    const uint64_t whole_ns = KVF_CONNECT_MS * UINT64_C(950000); /* ZeroMQ's clock is not exact */
    const bool waited = endpoint->port_at && kvf_now(link->clock) >= dial->tried_ns + whole_ns;
    if (!dial->closed) /* for want of a descriptor here */
        *words = "no connection: no socket could be made for it";
    else if (waited)
        *words = "no connection: the host did not answer";
    else if (endpoint->loopback)
        *words = "no connection: it was refused because nobody listens there";
    else
        *words = "no connection: it was refused, or there is no route to the host";
    return waited || !dial->closed ? KVF_E_TIMEOUT : KVF_E_IO;
}
