#include "toy_fabric.h"

#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "transport/slices.h"

#define NOTICES_MAX 200u
#define ENDPOINTS_MAX 8192u /* in the life of a process: numbers are not reused */

typedef struct toy_notice {
    char sender[KVF_SENDER_MAX + 1];
    size_t bytes;
    unsigned char data[KVF_NOTICE_MAX];
} toy_notice;

typedef struct toy_link toy_link;
typedef struct toy_endpoint {
    uint64_t id;
    kvf_transport *transport;
    toy_link *links;
    toy_notice *notices; /* a ring */
    uint64_t sent, told;
    int wake_fd;
} toy_endpoint;

struct toy_link {
    toy_endpoint *self;
    uint64_t remote; /* looked up for each use, since it may be gone */
    uint64_t generation;
    kvf_peer *peer; /* NULL after its loss was reported */
    kvf_slices slices;
    toy_link *following;
};

static toy_endpoint *endpoints[ENDPOINTS_MAX];
static uint64_t last_id;

static void wake(const toy_endpoint *endpoint) {
    (void)!write(endpoint->wake_fd, &(uint64_t){1}, sizeof(uint64_t));
}

static toy_endpoint *find(uint64_t id) {
    return id < ENDPOINTS_MAX ? endpoints[id] : NULL;
}

/* Lets every endpoint look again whether its peers are still there. */
static void wake_all(void) {
    for (uint64_t id = 1; id <= last_id; id++)
        if (endpoints[id])
            wake(endpoints[id]);
}

/* ---- the endpoint ---------------------------------------------------------------------------- */

static kvf_status toy_open(kvf_transport *transport, const kvf_transport_options *options, void **out) {
    (void)options;
    toy_endpoint *made = kvf_alloc0(1, sizeof *made);
    toy_notice *notices = kvf_alloc(NOTICES_MAX, sizeof *notices);
    if (!made || !notices || last_id + 1 == ENDPOINTS_MAX) {
        kvf_free(made);
        kvf_free(notices);
        return kvf_nomem("an endpoint");
    }
    *made = (toy_endpoint){.id = ++last_id, .transport = transport, .notices = notices};
    made->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    endpoints[last_id] = made;
    *out = made;
    return KVF_OK;
}

static void toy_close(void *at) {
    toy_endpoint *self = endpoints[((toy_endpoint *)at)->id];
    endpoints[self->id] = NULL;
    (void)close(self->wake_fd);
    kvf_free(self->notices);
    kvf_free(self);
    wake_all();
}

static kvf_status toy_register(void *at, uint32_t region, const kvf_memory *memory) {
    (void)at, (void)region, (void)memory;
    return KVF_OK; /* the front's table of regions holds all that is needed */
}

static kvf_status toy_unregister(void *at, uint32_t region) {
    (void)at, (void)region;
    wake_all();
    return KVF_OK;
}

static kvf_status toy_card(void *at, kvf_buffer *out) {
    return kvf_buffer_add(out, &((toy_endpoint *)at)->id, sizeof(uint64_t));
}

static int toy_event_fd(void *at) {
    return ((toy_endpoint *)at)->wake_fd;
}

/* ---- links ----------------------------------------------------------------------------------- */

/* Why the remote memory cannot be used; NULL if it can. */
static const char *find_loss(const toy_link *link) {
    const toy_endpoint *remote = find(link->remote);
    if (!remote)
        return "the peer's endpoint has closed";
    return link->generation < kvf_transport_oldest(remote->transport)
               ? "the card is for an older generation of the peer's memory: a new card is needed"
               : NULL;
}

static kvf_status toy_connect(void *at, const void *card, size_t bytes, kvf_peer *peer, void **out) {
    toy_link link = {.self = at, .peer = peer, .generation = kvf_peer_generation(peer)};
    if (bytes != sizeof link.remote)
        return kvf_fail(KVF_E_PARSE, "its part of the card has %zu bytes; allowed: 8", bytes);
    memcpy(&link.remote, card, bytes);
    const char *loss = find_loss(&link);
    if (loss)
        return kvf_fail(find(link.remote) ? KVF_E_NOT_REGISTERED : KVF_E_PEER_LOST, "%s", loss);
    link.following = link.self->links;
    toy_link *made = kvf_copy(&link, 1, sizeof link);
    if (!made)
        return kvf_nomem("a peer");
    link.self->links = made;
    *out = made;
    return KVF_OK;
}

static void toy_disconnect(void *at) {
    toy_link *link = at, **place = &link->self->links;
    while (*place != link)
        place = &(*place)->following;
    *place = link->following;
    kvf_free(link);
}

static kvf_status toy_submit(void *at, kvf_batch *batch) {
    toy_link *link = at;
    kvf_slices_add(&link->slices, batch);
    wake(link->self);
    return KVF_OK;
}

static void toy_cancel(void *at, kvf_batch *batch) {
    (void)batch;
    kvf_slices_cancel(&((toy_link *)at)->slices);
    wake(((toy_link *)at)->self);
}

static kvf_status toy_notify(void *at, const void *data, size_t bytes) {
    const toy_link *link = at;
    toy_endpoint *remote = find(link->remote);
    if (!remote)
        return kvf_fail(KVF_E_PEER_LOST, "the peer's endpoint has closed");
    if (remote->sent - remote->told == NOTICES_MAX)
        return kvf_fail(KVF_E_AGAIN, "%u notifications wait for the peer, the most allowed", NOTICES_MAX);
    toy_notice *notice = &remote->notices[remote->sent++ % NOTICES_MAX];
    (void)snprintf(notice->sender, sizeof notice->sender, "%s", kvf_transport_name(link->self->transport));
    memcpy(notice->data, data, bytes);
    notice->bytes = bytes;
    wake(remote);
    return KVF_OK;
}

/* ---- progress -------------------------------------------------------------------------------- */

static void copy_slice(const toy_link *link, kvf_direction direction, const kvf_slice *slice) {
    unsigned char *const *here = kvf_transport_bases(link->self->transport);
    unsigned char *const *there = kvf_transport_bases(find(link->remote)->transport);
    const kvf_run *runs = slice->count ? slice->runs : &slice->part;
    for (size_t i = 0; i < (slice->count ? slice->count : 1); i++) {
        unsigned char *local = here[runs[i].local_region] + runs[i].local_offset;
        unsigned char *remote = there[runs[i].remote_region] + runs[i].remote_offset;
        memmove(direction == KVF_READ ? local : remote, direction == KVF_READ ? remote : local,
                runs[i].bytes);
    }
}

/* Moves one slice; true if there are more. */
static bool move(toy_link *link) {
    kvf_slices_reap(&link->slices);
    kvf_batch *batch = link->slices.current;
    if (!batch)
        return false;
    kvf_slice slice;
    kvf_slices_peek(&link->slices, KVF_SLICE_BYTES, KVF_SLICE_RUNS, &slice);
    copy_slice(link, batch->direction, &slice);
    if (kvf_slices_advance(&link->slices, &slice))
        kvf_batch_end(batch);
    return link->slices.current != NULL;
}

static kvf_status toy_progress(void *at, bool *busy) {
    toy_endpoint *self = at;
    (void)!read(self->wake_fd, &(uint64_t){0}, sizeof(uint64_t));
    *busy = false;
    for (toy_link *link = self->links; link; link = link->following) {
        const char *loss = link->peer ? find_loss(link) : NULL;
        if (loss) {
            kvf_peer *peer = link->peer;
            link->peer = NULL;
            link->slices = (kvf_slices){0};
            kvf_peer_lost(peer, loss);
        } else if (link->peer) {
            *busy = move(link) || *busy;
        }
    }
    for (; self->told < self->sent; self->told++) {
        const toy_notice *notice = &self->notices[self->told % NOTICES_MAX];
        if (kvf_deliver(self->transport, notice->sender, notice->data, notice->bytes)) {
            *busy = true; /* the notification waits until there is memory for it */
            break;
        }
    }
    if (*busy)
        wake(self);
    return KVF_OK;
}

/* A writer moves in its own progress(), and nothing after that. */
static uint64_t toy_late_ns(const void *self) {
    (void)self;
    return 0;
}

const kvf_fabric toy_fabric = {
    .kind = {.name = "toy",
             .reach = KVF_REACH_PROCESS,
             .memory_kinds = 1u << KVF_MEMORY_HOST,
             .directions = 1u << KVF_READ | 1u << KVF_WRITE,
             .one_sided = true,
             .in_flight = 1,
             .cost = {.ns_per_run = 100, .ns_per_byte = 1, .ns_per_source = 100}},
    .open = toy_open,
    .register_region = toy_register,
    .unregister_region = toy_unregister,
    .card = toy_card,
    .connect = toy_connect,
    .submit = toy_submit,
    .cancel = toy_cancel,
    .notify = toy_notify,
    .disconnect = toy_disconnect,
    .late_ns = toy_late_ns,
    .progress = toy_progress,
    .event_fd = toy_event_fd,
    .close = toy_close,
};
