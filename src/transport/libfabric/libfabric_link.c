/*
 * Links of the libfabric fabric: connecting, noticing that the peer is gone, closing.
 */
#include "base/clock.h"
#include "transport/libfabric/libfabric.h"

#define LINGER_NS 200000000ull

/* ---- peers that are gone --------------------------------------------------------------------- */

/* For a peer that nothing has ever reached. */
#define ADVICE "the setting libfabric.domain says which interface to use"

void kvf_libfabric_fail_link(kvf_libfabric_link *link, int error, const char *what) {
    char why[KVF_REASON_BYTES];
    (void)kvf_libfabric_fail(link->endpoint->library, error, what);
    (void)snprintf(why, sizeof why, "%s%s", kvf_error_detail(), link->queue.answered ? "" : "; " ADVICE);
    kvf_post_lose(&link->queue, why);
}

void kvf_libfabric_mark_answered(kvf_libfabric_link *link) {
    link->queue.answered = true;
    link->silent_ns = 0;
    if (link->waits)
        kvf_peer_waits(link->queue.peer, NULL);
    link->waits = false;
}

static void begin_to_wait(kvf_libfabric_link *link) {
    const struct fi_info *info = link->endpoint->info;
    char why[KVF_REASON_BYTES];
    link->waits = true;
    (void)snprintf(why, sizeof why, "nothing %s by %s over %s%s",
                   link->queue.answered ? "reaches it any more" : "has reached it",
                   info->fabric_attr->prov_name, info->domain_attr->name,
                   link->queue.answered ? "" : "; " ADVICE);
    kvf_peer_waits(link->queue.peer, why);
}

/* For how long nothing of the link got through. Time in which nobody has looked, so that nothing was tried, does not
 * count. */
static uint64_t find_silence(kvf_libfabric_link *link) {
    const uint64_t now = kvf_now(&kvf_monotonic);
    if (link->silent_ns == 0 || now - link->looked_ns > 2 * KVF_LIBFABRIC_PATIENCE_NS)
        link->silent_ns = now;
    link->looked_ns = now;
    return now - link->silent_ns;
}

/* Once something has reached the peer, what is under way completes or fails by itself. But over TCP, if the connection
 * ended while there was nothing under way, libfabric refuses all operations from then on, and calls that temporary. */
bool kvf_libfabric_is_patient(kvf_libfabric_link *link) {
    if (link->queue.answered && (link->queue.in_flight > 0 || link->outbox.under_way > 0)) {
        link->silent_ns = 0;
        return false;
    }
    const uint64_t silence = find_silence(link);
    if (silence < KVF_LIBFABRIC_PATIENCE_NS)
        return true;
    if (!link->waits)
        begin_to_wait(link);
    if (link->queue.answered && silence >= KVF_LIBFABRIC_GIVE_UP_NS)
        kvf_post_lose(&link->queue,
                      "libfabric has no connection to it any more, and has made none for 20 seconds");
    return false;
}

bool kvf_libfabric_close_lost(kvf_post_queue *queue) {
    kvf_libfabric_link *link = (kvf_libfabric_link *)queue;
    kvf_libfabric_port_close(link->endpoint, &link->port);
    kvf_beacon_watch_close(link->endpoint->event_fd, &queue->watch);
    queue->in_flight = 0;
    return true;
}

bool kvf_libfabric_is_pending(const kvf_libfabric_link *link) {
    return !link->queue.lost && (link->queue.first || kvf_libfabric_is_notifying(link));
}

/* ---- closing --------------------------------------------------------------------------------- */

/* Closing a port discards what has not left yet. This gives notifications a moment to arrive. */
static void linger(kvf_libfabric_link *link) {
    kvf_libfabric_endpoint *endpoint = link->endpoint;
    size_t moved = 0;
    for (uint64_t end = kvf_now(&kvf_monotonic) + LINGER_NS;
         kvf_libfabric_is_notifying(link) && !link->queue.lost && kvf_now(&kvf_monotonic) < end;) {
        kvf_libfabric_send_waiting(link);
        if (kvf_libfabric_port_poll(endpoint, &link->port, &moved))
            break;
    }
}

/* Afterwards libfabric accesses no memory for this link any more. */
static void free_link(kvf_libfabric_link *link) {
    kvf_libfabric_endpoint *endpoint = link->endpoint;
    kvf_libfabric_port_close(endpoint, &link->port);
    link->queue.in_flight = 0;
    kvf_post_drop(&link->queue);
    kvf_libfabric_messages_close(&link->outbox);
    kvf_beacon_watch_close(endpoint->event_fd, &link->queue.watch);
    kvf_free(link->moves);
    kvf_free(link->targets);
    kvf_free(link);
}

void kvf_libfabric_disconnect(void *self) {
    kvf_libfabric_link *link = self;
    const kvf_cuda *entered = kvf_device_context_enter(&link->endpoint->device_context);
    linger(link);
    kvf_post_queue_remove(&link->queue);
    KVF_LIST_REMOVE(link->endpoint->links, link);
    free_link(link);
    kvf_device_context_leave(entered);
}

/* ---- connecting ------------------------------------------------------------------------------ */

static kvf_status check_protocol(const kvf_libfabric_endpoint *endpoint, const kvf_libfabric_card *card) {
    const struct fi_info *info = endpoint->info;
    if (card->protocol == info->ep_attr->protocol &&
        card->protocol_version == info->ep_attr->protocol_version && card->format == info->addr_format &&
        card->address_bytes == endpoint->address_bytes)
        return KVF_OK;
    return kvf_fail(
        KVF_E_UNSUPPORTED,
        "the peer has libfabric's provider %s (protocol %u.%u, addresses of form %u) and this side %s "
        "(%u.%u, %u), which do not understand each other: load the same version on both "
        "sides (libfabric.library), and choose the same provider (libfabric.provider)",
        card->provider, card->protocol, card->protocol_version, card->format, info->fabric_attr->prov_name,
        info->ep_attr->protocol, info->ep_attr->protocol_version, info->addr_format);
}

static kvf_status find_address(kvf_libfabric_link *link, const kvf_libfabric_card *card) {
    unsigned char address[KVF_LIBFABRIC_ADDRESS_MAX]; /* aligned, unlike the card */
    memcpy(address, card->address, card->address_bytes);
    int done = fi_av_insert(link->port.addresses, address, 1, &link->address, 0, NULL);
    return done == 1 ? KVF_OK
                     : kvf_libfabric_refuse(link->endpoint->library, done < 0 ? done : FI_EINVAL, "address");
}

static kvf_status make_link(kvf_libfabric_endpoint *endpoint, kvf_libfabric_card *card, kvf_peer *peer,
                            kvf_libfabric_link **out) {
    kvf_libfabric_link *link = kvf_alloc0(1, sizeof *link);
    if (!link)
        return kvf_nomem("a link");
    link->endpoint = endpoint;
    link->queue.poster = &endpoint->poster;
    link->queue.peer = peer;
    link->port.fd = -1;
    link->targets = card->regions; /* now the link's */
    card->regions = NULL;
    for (uint32_t i = 0; i < card->region_count; i++)
        link->queue.withholds = link->queue.withholds || link->targets[i].withheld;
    memcpy(link->queue.place, kvf_beacon_place(card->beacon), sizeof link->queue.place);
    kvf_status status = kvf_beacon_watch_open(card->beacon, endpoint->event_fd, link, &link->queue.watch);
    if (!status)
        status = kvf_libfabric_moves_open(link);
    if (!status)
        status = kvf_libfabric_port_open(endpoint, &link->port);
    if (!status)
        status = find_address(link, card);
    if (status)
        free_link(link);
    else
        *out = link;
    return status;
}

kvf_status kvf_libfabric_connect(void *self, const void *data, size_t bytes, kvf_peer *peer, void **out) {
    kvf_libfabric_endpoint *endpoint = self;
    kvf_libfabric_card card;
    kvf_libfabric_link *link = NULL;
    kvf_status status = kvf_libfabric_card_read(data, bytes, &card);
    if (!status)
        status = check_protocol(endpoint, &card);
    if (!status)
        status = kvf_peer_check_regions(peer, card.region_count, &card.regions->bytes, sizeof *card.regions);
    const kvf_cuda *entered = kvf_device_context_enter(&endpoint->device_context);
    if (!status)
        status = make_link(endpoint, &card, peer, &link);
    kvf_device_context_leave(entered);
    kvf_free(card.regions);
    if (status)
        return status;
    KVF_LIST_ADD(endpoint->links, link);
    kvf_post_queue_add(&link->queue);
    kvf_wake_set(&endpoint->wake, true);
    *out = link;
    return KVF_OK;
}

bool kvf_libfabric_is_emulated(const void *self) {
    const kvf_libfabric_link *link = self;
    return link->endpoint->emulates;
}
