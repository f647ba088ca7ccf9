/* The front of a link, with the checks that hold for every carrier of messages. */
#include "link/link.h"

#include <poll.h>

#include "base/base.h"

kvf_status kvf_link_open(const kvf_link_options *options, kvf_link **out) {
    kvf_link_options taken = *options;
    if (!options->on_message)
        return kvf_fail(KVF_E_INVALID, "on_message is NULL");
    taken.clock = options->clock ? options->clock : &kvf_monotonic;
    taken.table = options->table ? options->table : &kvf_link_zmq;
    kvf_status status = taken.table->open(&taken, out);
    if (!status)
        (*out)->table = taken.table;
    return status;
}

void kvf_link_close(kvf_link *link) {
    if (link)
        link->table->close(link);
}

const char *kvf_link_endpoint(const kvf_link *link) {
    return link->table->endpoint(link);
}

kvf_status kvf_link_connect(kvf_link *link, const char *endpoint, const char *server_key, kvf_route *out) {
    return link->table->connect(link, endpoint, server_key, out);
}

void kvf_link_disconnect(kvf_link *link, kvf_route route) {
    link->table->disconnect(link, route);
}

kvf_status kvf_link_send(kvf_link *link, kvf_route route, const void *data, size_t bytes) {
    if (bytes > KVF_WIRE_MAX_BYTES)
        return kvf_fail(KVF_E_RANGE, "a message has %zu bytes; allowed: 0 to %u", bytes, KVF_WIRE_MAX_BYTES);
    return link->table->send(link, route, data, bytes);
}

void kvf_link_progress(kvf_link *link, bool *more) {
    link->table->progress(link, more);
}

bool kvf_link_pending(kvf_link *link) {
    return link->table->pending(link);
}

kvf_status kvf_link_allow(kvf_link *link, const char *public_key, bool allowed) {
    if (!link->table->allow)
        return kvf_fail(KVF_E_UNSUPPORTED, "this link has no keys");
    return link->table->allow(link, public_key, allowed);
}

kvf_link_counts kvf_link_count(const kvf_link *link) {
    return link->table->counts ? link->table->counts(link) : (kvf_link_counts){0};
}

bool kvf_link_has_ended(const kvf_link *link, kvf_route route) {
    return link->table->has_ended && link->table->has_ended(link, route);
}

uint32_t kvf_link_fds(const kvf_link *link, int fds[KVF_LINK_FDS]) {
    return link->table->fds(link, fds);
}

uint64_t kvf_link_due(const kvf_link *link) {
    return link->table->due(link);
}

void kvf_link_sleep(const kvf_link *link, uint64_t now, uint64_t until) {
    int fds[KVF_LINK_FDS];
    struct pollfd polled[KVF_LINK_FDS];
    uint32_t count = kvf_link_fds(link, fds);
    for (uint32_t i = 0; i < count; i++)
        polled[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
    until = kvf_min_u64(until, kvf_link_due(link));
    uint64_t left = until > now ? (until - now + KVF_MILLISECOND - 1) / KVF_MILLISECOND : 0;
    (void)poll(polled, count, (int)kvf_min_u64(left, 1000));
}
