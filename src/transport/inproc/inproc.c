/*
 * The fabric for peers in this process: plain copies.
 *
 * Endpoints find each other in a registry of the process. Each may have its own thread, so the registry's
 * mutex guards all that others see of an endpoint, and an endpoint that closes waits for the copies that
 * others are making from and to its memory: those are one slice each.
 */
#include <pthread.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/fork.h"
#include "base/wake.h"
#include "kernel/kernel.h"
#include "transport/notices.h"
#include "transport/slices.h"

#define TOKEN_BYTES 16
#define CARD_BYTES (TOKEN_BYTES + sizeof(uint64_t))
#define INBOX_BYTES (1u << 20) /* of notifications that wait for their receiver */

#define HAS_CLOSED "the peer has closed its endpoint"
#define OLD_CARD                                                                                             \
    "the card is for generation %llu of the peer's memory, which is now at %llu: a new card is needed"

typedef struct inproc_link inproc_link;

/* An endpoint that was shut out. Its older links stay shut even if it may connect again. */
typedef struct inproc_fence {
    uint64_t id;
    uint64_t number; /* fences so far, with this one */
    bool admitted;
} inproc_fence;

typedef struct inproc_endpoint {
    kvf_transport *transport;
    inproc_link *links;   /* ours */
    kvf_buffer delivered; /* an inbox being read */

    /* Under the registry's mutex. */
    uint64_t id;
    uint64_t *region_bytes; /* 0: none; for peers, as the transport's own tables belong to its thread */
    unsigned char **bases;
    uint32_t region_count;
    uint64_t oldest;     /* oldest generation of memory that a link may have */
    bool changing;       /* its tables change: no copy may begin */
    uint32_t references; /* by its transport and by links */
    uint32_t copying;    /* slices that are being copied from or to its memory, by others */
    const struct inproc_endpoint *copying_with; /* the endpoint whose memory it is copying from or to now */
    uint32_t fencing;                           /* threads that wait for a copy with it to end */
    inproc_fence *fences;
    uint32_t fence_count;
    uint64_t fence_number;
    bool closed;
    kvf_wake wake;
    kvf_buffer inbox; /* in the front's form, so that the front needs as much room */
    struct inproc_endpoint *previous, *following;
} inproc_endpoint;

struct inproc_link {
    inproc_endpoint *self;
    inproc_endpoint *remote;
    kvf_peer *peer;
    kvf_slices slices;
    bool lost;
    bool refused;               /* the endpoint refused us, and lives */
    char why[KVF_REASON_BYTES]; /* it was lost */
    uint64_t generation;        /* of the remote side's memory */
    uint64_t made;              /* the remote side's fence_number when the link was made */
    struct inproc_link *previous, *following;
};

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t copied; /* a copy has ended with an endpoint for which a thread waits */
    inproc_endpoint *endpoints;
    uint64_t last_id;
    pid_t pid; /* the process of the token: a forked child is another process */
    unsigned char token[TOKEN_BYTES];
} registry = {.mutex = PTHREAD_MUTEX_INITIALIZER, .copied = PTHREAD_COND_INITIALIZER};

/* A child of fork() has none of its parent's endpoints, whose descriptors it shares, and no thread that waits or copies. */
static void renew_registry(void) {
    (void)pthread_mutex_init(&registry.mutex, NULL);
    (void)pthread_cond_init(&registry.copied, NULL);
    registry.endpoints = NULL;
}

static void watch_forks(void) {
    kvf_fork_renew(renew_registry);
}

static void lock(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, watch_forks);
    (void)pthread_mutex_lock(&registry.mutex);
}

static void unlock(void) {
    (void)pthread_mutex_unlock(&registry.mutex);
}

/* The rest of this section needs the mutex. */

static kvf_status make_token(void) {
    pid_t pid = getpid();
    if (registry.pid == pid)
        return KVF_OK;
    kvf_status status = kvf_random(registry.token, TOKEN_BYTES);
    if (!status)
        registry.pid = pid;
    return status;
}

static void signal_all(void) {
    for (inproc_endpoint *other = registry.endpoints; other; other = other->following)
        kvf_wake_set(&other->wake, true);
}

static void release(inproc_endpoint *endpoint) {
    if (--endpoint->references > 0)
        return;
    kvf_buffer_free(&endpoint->inbox);
    kvf_buffer_free(&endpoint->delivered);
    kvf_free(endpoint->fences);
    kvf_free(endpoint->region_bytes);
    kvf_free(endpoint->bases);
    kvf_free(endpoint);
}

/* ---- the endpoint ---------------------------------------------------------------------------- */

static kvf_status inproc_open(kvf_transport *transport, const kvf_transport_options *options, void **out) {
    (void)options;
    inproc_endpoint *opened = kvf_alloc0(1, sizeof *opened);
    if (!opened)
        return kvf_nomem("an endpoint");
    opened->transport = transport;
    opened->references = 1;
    kvf_status status = kvf_wake_open(&opened->wake);
    if (status) {
        kvf_free(opened);
        return status;
    }
    lock();
    opened->id = ++registry.last_id;
    KVF_LIST_ADD(registry.endpoints, opened);
    unlock();
    *out = opened;
    return KVF_OK;
}

/* Needs the mutex. Afterwards no copy uses the memory of the endpoint, and none begins, until end_change(). */
static void begin_change(inproc_endpoint *endpoint) {
    endpoint->changing = true;
    while (endpoint->copying > 0)
        (void)pthread_cond_wait(&registry.copied, &registry.mutex);
}

static void end_change(inproc_endpoint *endpoint) {
    endpoint->changing = false;
    (void)pthread_cond_broadcast(&registry.copied);
}

/* Needs the mutex, and that no copy uses the memory. */
static kvf_status make_room(inproc_endpoint *endpoint, uint32_t region) {
    uint64_t *bytes = kvf_resize(endpoint->region_bytes, (size_t)region + 1, sizeof *bytes);
    if (bytes)
        endpoint->region_bytes = bytes;
    unsigned char **bases = kvf_resize(endpoint->bases, (size_t)region + 1, sizeof *bases);
    if (bases)
        endpoint->bases = bases;
    if (!bytes || !bases)
        return kvf_nomem("a region");
    for (; endpoint->region_count <= region; endpoint->region_count++) {
        bytes[endpoint->region_count] = 0;
        bases[endpoint->region_count] = NULL;
    }
    return KVF_OK;
}

static kvf_status inproc_register(void *self, uint32_t region, const kvf_memory *memory) {
    inproc_endpoint *endpoint = self;
    lock();
    begin_change(endpoint);
    kvf_status status = region < endpoint->region_count ? KVF_OK : make_room(endpoint, region);
    if (!status) {
        endpoint->region_bytes[region] = memory->bytes;
        endpoint->bases[region] = memory->address;
    }
    end_change(endpoint);
    unlock();
    return status;
}

static kvf_status inproc_unregister(void *self, uint32_t region) {
    inproc_endpoint *endpoint = self;
    lock();
    begin_change(endpoint);
    endpoint->oldest = kvf_transport_oldest(endpoint->transport);
    endpoint->region_bytes[region] = 0;
    endpoint->bases[region] = NULL;
    end_change(endpoint);
    signal_all();
    unlock();
    return KVF_OK;
}

static kvf_status inproc_card(void *self, kvf_buffer *out) {
    const inproc_endpoint *exported = self;
    lock();
    kvf_status status = make_token();
    if (!status)
        status = kvf_buffer_add(out, registry.token, TOKEN_BYTES);
    if (!status)
        status = kvf_buffer_add(out, &exported->id, sizeof exported->id);
    unlock();
    return status;
}

static int inproc_event_fd(void *self) {
    return ((inproc_endpoint *)self)->wake.fd;
}

/* Needs the mutex. */
static inproc_fence *find_fence(const inproc_endpoint *at, uint64_t id) {
    for (uint32_t i = 0; i < at->fence_count; i++)
        if (at->fences[i].id == id)
            return &at->fences[i];
    return NULL;
}

/* Needs the mutex. No number is used twice, so nobody needs to be shut out by it any more. */
static void lift_fences(uint64_t id) {
    for (inproc_endpoint *at = registry.endpoints; at; at = at->following) {
        inproc_fence *fence = find_fence(at, id);
        if (fence)
            *fence = at->fences[--at->fence_count];
    }
}

static void inproc_close(void *self) {
    inproc_endpoint *closed = self;
    lock();
    closed->closed = true;
    while (closed->copying > 0)
        (void)pthread_cond_wait(&registry.copied, &registry.mutex);
    KVF_LIST_REMOVE(registry.endpoints, closed);
    lift_fences(closed->id);
    /* Connected endpoints notice in their next progress(). */
    signal_all();
    kvf_wake_close(&closed->wake);
    release(closed);
    unlock();
}

/* ---- links ----------------------------------------------------------------------------------- */

static inproc_endpoint *find_endpoint(uint64_t id) {
    inproc_endpoint *found = registry.endpoints;
    while (found && found->id != id)
        found = found->following;
    return found;
}

/* Whether the endpoint at the other end has shut the link. */
static bool is_shut(const inproc_link *link) {
    const inproc_fence *fence = find_fence(link->remote, link->self->id);
    return fence && link->made < fence->number;
}

/* The card is of our process and undamaged, yet its sizes come from outside. It has 0 bytes for a region that its
 * endpoint does not serve, and a card that is older than a region leaves that out. */
static kvf_status compare_regions(const inproc_endpoint *remote, const kvf_peer *peer) {
    uint32_t claimed;
    const uint64_t *bytes = kvf_peer_region_bytes(peer, &claimed);
    for (uint32_t i = 0; i < claimed; i++) {
        const uint64_t here = i < remote->region_count ? remote->region_bytes[i] : 0;
        if (bytes[i] > 0 && here != bytes[i])
            return kvf_fail(KVF_E_PARSE, "region %u has %llu bytes in the card and %llu at its endpoint", i,
                            (unsigned long long)bytes[i], (unsigned long long)here);
    }
    return KVF_OK;
}

/* Needs the mutex. */
static kvf_status find_remote(const inproc_endpoint *endpoint, const unsigned char *card,
                              const kvf_peer *peer, inproc_endpoint **out) {
    uint64_t id;
    memcpy(&id, card + TOKEN_BYTES, sizeof id);
    kvf_status status = make_token();
    if (status)
        return status;
    if (memcmp(card, registry.token, TOKEN_BYTES) != 0)
        return kvf_fail(KVF_E_UNSUPPORTED, "the peer is in another process");
    inproc_endpoint *remote = find_endpoint(id);
    if (!remote || remote->closed)
        return kvf_fail(KVF_E_PEER_LOST, "the endpoint that exported the card is closed");
    const inproc_fence *fence = find_fence(remote, endpoint->id);
    if (fence && !fence->admitted)
        return kvf_fail(KVF_E_PEER_LOST, "the endpoint that exported the card has shut this one out");
    if (kvf_peer_generation(peer) < remote->oldest)
        return kvf_fail(KVF_E_NOT_REGISTERED, OLD_CARD, (unsigned long long)kvf_peer_generation(peer),
                        (unsigned long long)remote->oldest);
    *out = remote;
    return compare_regions(remote, peer);
}

static kvf_status inproc_connect(void *self, const void *card, size_t bytes, kvf_peer *peer, void **out) {
    if (bytes != CARD_BYTES)
        return kvf_fail(KVF_E_PARSE, "its part of the card has %zu bytes; allowed: %zu", bytes, CARD_BYTES);
    inproc_link *made = kvf_alloc0(1, sizeof *made);
    if (!made)
        return kvf_nomem("a peer");
    made->self = self;
    made->peer = peer;
    made->generation = kvf_peer_generation(peer);
    lock();
    kvf_status status = find_remote(made->self, card, peer, &made->remote);
    if (!status) {
        made->remote->references++;
        made->made = made->remote->fence_number;
    }
    unlock();
    if (status) {
        kvf_free(made);
        return status;
    }
    KVF_LIST_ADD(made->self->links, made);
    *out = made;
    return KVF_OK;
}

static void inproc_disconnect(void *self) {
    inproc_link *gone = self;
    KVF_LIST_REMOVE(gone->self->links, gone);
    lock();
    release(gone->remote);
    unlock();
    kvf_free(gone);
}

/* Needs the mutex. Whether the link is lost; notes why. */
static bool find_loss(inproc_link *to) {
    if (to->lost)
        return true;
    to->lost = true;
    if (to->remote->closed)
        (void)snprintf(to->why, sizeof to->why, "%s", HAS_CLOSED);
    else if (is_shut(to))
        (void)snprintf(to->why, sizeof to->why, "the peer has shut this endpoint out");
    else if (to->generation < to->remote->oldest)
        (void)snprintf(to->why, sizeof to->why, OLD_CARD, (unsigned long long)to->generation,
                       (unsigned long long)to->remote->oldest);
    else
        to->lost = false;
    to->refused = to->lost && !to->remote->closed;
    return to->lost;
}

static kvf_status inproc_submit(void *self, kvf_batch *batch) {
    inproc_link *to = self;
    kvf_slices_add(&to->slices, batch);
    lock();
    kvf_wake_set(&to->self->wake, true);
    unlock();
    return KVF_OK;
}

static void inproc_cancel(void *self, kvf_batch *batch) {
    (void)batch;
    inproc_link *to = self;
    kvf_slices_cancel(&to->slices);
    lock();
    kvf_wake_set(&to->self->wake, true);
    unlock();
}

static kvf_status add_notice(inproc_endpoint *to, const char *sender, const void *data, size_t bytes) {
    if (to->inbox.length + kvf_notice_room(sender, bytes) > INBOX_BYTES)
        return kvf_fail(KVF_E_AGAIN, "the peer has %zu bytes of notifications to read first",
                        to->inbox.length);
    return kvf_notices_add(&to->inbox, sender, data, bytes);
}

static kvf_status inproc_notify(void *self, const void *data, size_t bytes) {
    inproc_link *to = self;
    inproc_endpoint *remote = to->remote;
    const char *sender = kvf_transport_name(to->self->transport);
    lock();
    kvf_status status =
        find_loss(to) ? kvf_fail(KVF_E_PEER_LOST, "%s", to->why) : add_notice(remote, sender, data, bytes);
    if (!status)
        kvf_wake_set(&remote->wake, true);
    unlock();
    return status;
}

/* ---- progress -------------------------------------------------------------------------------- */

/* Keeps the remote memory in place while a slice is copied; false if the link is lost. */
static bool enter(inproc_link *to) {
    lock();
    while (to->remote->changing)
        (void)pthread_cond_wait(&registry.copied, &registry.mutex);
    bool there = !find_loss(to);
    to->remote->copying += there;
    to->self->copying_with = there ? to->remote : NULL;
    unlock();
    return there;
}

static void leave(const inproc_link *to) {
    inproc_endpoint *remote = to->remote;
    lock();
    to->self->copying_with = NULL;
    if ((--remote->copying == 0 && (remote->closed || remote->changing)) || remote->fencing > 0)
        (void)pthread_cond_broadcast(&registry.copied);
    unlock();
}

static void copy_slice(const inproc_link *to, kvf_direction direction, const kvf_slice *slice) {
    unsigned char *const *local = kvf_transport_bases(to->self->transport);
    unsigned char *const *remote = to->remote->bases; /* in place until leave() */
    bool read = direction == KVF_READ;
    kvf_copy_bases bases = {read ? local : remote, read ? remote : local};
    size_t count;
    const kvf_run *runs = kvf_slice_runs(slice, &count);
    kvf_kernel_copy_runs(read ? KVF_COPY_TO_LOCAL : KVF_COPY_TO_REMOTE, bases, runs, count, slice->bytes);
}

/* Copies up to `budget` bytes and returns how many; looking at a run counts, too. */
static uint64_t move(inproc_link *to, uint64_t budget) {
    uint64_t moved = 0;
    kvf_slices_reap(&to->slices);
    kvf_slice slice;
    while (kvf_slices_next(&to->slices, to->self->transport, moved, budget, &slice)) {
        if (!enter(to))
            return moved;
        kvf_batch *batch = to->slices.current;
        copy_slice(to, batch->direction, &slice);
        leave(to);
        moved += slice.bytes + slice.count;
        if (kvf_slices_advance(&to->slices, &slice))
            kvf_batch_end(batch);
    }
    return moved;
}

/* Notifications wait in the inbox until there is memory for them. */
static void read_inbox(inproc_endpoint *endpoint) {
    lock();
    bool room = kvf_deliver_room(endpoint->transport, endpoint->inbox.length) == KVF_OK;
    kvf_buffer full = room ? endpoint->inbox : (kvf_buffer){0};
    if (room) {
        endpoint->inbox = endpoint->delivered;
        endpoint->delivered = full;
    }
    unlock();
    kvf_notice notice;
    for (size_t at = 0; kvf_notices_next(&full, &at, &notice);)
        (void)kvf_deliver(endpoint->transport, notice.sender, notice.data, notice.bytes);
    endpoint->delivered.length = 0;
}

static void find_lost(inproc_endpoint *endpoint) {
    lock();
    for (inproc_link *at = endpoint->links; at; at = at->following)
        (void)find_loss(at);
    unlock();
}

/* If the remote end goes while copies are left to make, those end as lost; the others have ended before. */
static void report_lost(inproc_endpoint *endpoint) {
    for (inproc_link *at = endpoint->links; at; at = at->following)
        if (at->lost && at->peer) {
            kvf_peer *peer = at->peer;
            at->slices = (kvf_slices){0};
            at->peer = NULL;
            (at->refused ? kvf_peer_refused : kvf_peer_lost)(peer, at->why);
        }
}

static kvf_status inproc_progress(void *self, bool *busy) {
    inproc_endpoint *endpoint = self;
    find_lost(endpoint);
    read_inbox(endpoint);
    uint32_t moving = 0;
    for (const inproc_link *to = endpoint->links; to; to = to->following)
        moving += to->slices.current && !to->lost;
    *busy = false;
    for (inproc_link *to = endpoint->links; to && moving > 0; to = to->following) {
        if (!to->slices.current || to->lost)
            continue;
        (void)move(to, KVF_SLICE_BYTES / moving + 1);
        *busy = *busy || (to->slices.current && !to->lost);
    }
    report_lost(endpoint);
    lock();
    kvf_wake_set(&endpoint->wake, *busy || endpoint->inbox.length > 0);
    unlock();
    return KVF_OK;
}

/* ---- fences ---------------------------------------------------------------------------------- */

/* Needs the mutex. */
static kvf_status add_fence(inproc_endpoint *endpoint, uint64_t id) {
    inproc_fence *fence = find_fence(endpoint, id);
    if (!fence) {
        inproc_fence *grown = kvf_resize(endpoint->fences, (size_t)endpoint->fence_count + 1, sizeof *grown);
        if (!grown)
            return kvf_nomem("a fence");
        endpoint->fences = grown;
        fence = &grown[endpoint->fence_count++];
    }
    *fence = (inproc_fence){id, ++endpoint->fence_number, false};
    return KVF_OK;
}

/* Whether the card is of this process; needs the mutex. */
static kvf_status read_card(const void *card, size_t bytes, uint64_t *id) {
    if (bytes != CARD_BYTES)
        return kvf_fail(KVF_E_PARSE, "its part of the card has %zu bytes; allowed: %zu", bytes, CARD_BYTES);
    kvf_status status = make_token();
    if (!status && memcmp(card, registry.token, TOKEN_BYTES) != 0)
        return KVF_E_NOT_FOUND; /* of another process, which never connects by this fabric */
    memcpy(id, (const unsigned char *)card + TOKEN_BYTES, sizeof *id);
    return status;
}

/* Waits for copies under way, which end soon: a process is stopped as a whole, not one thread of it. */
static kvf_status inproc_fence_out(void *self, const void *card, size_t bytes) {
    inproc_endpoint *endpoint = self;
    inproc_endpoint *other = NULL;
    uint64_t id = 0;
    lock();
    kvf_status status = read_card(card, bytes, &id);
    if (!status && (other = find_endpoint(id)) != NULL)
        status = add_fence(endpoint, id);
    if (!status && other) {
        endpoint->fencing++;
        while ((other = find_endpoint(id)) && other->copying_with == endpoint)
            (void)pthread_cond_wait(&registry.copied, &registry.mutex);
        endpoint->fencing--;
        if (other)
            kvf_wake_set(&other->wake, true); /* so that it notices */
    }
    unlock();
    return status;
}

static kvf_status inproc_admit(void *self, const void *card, size_t bytes) {
    uint64_t id = 0;
    lock();
    kvf_status status = read_card(card, bytes, &id);
    inproc_fence *fence = status ? NULL : find_fence(self, id);
    if (fence)
        fence->admitted = true;
    unlock();
    return status == KVF_E_NOT_FOUND ? KVF_OK : status;
}

static const char *inproc_way(const void *link) {
    (void)link;
    return "memory of this process";
}

static void inproc_measure(const kvf_yardstick *yardstick, kvf_cost_model *cost, kvf_cost_model *apart) {
    (void)apart;
    kvf_cost_price(cost, &yardstick->mapped);
}

extern const kvf_fabric kvf_fabric_inproc;

const kvf_fabric kvf_fabric_inproc = {
    .kind =
        {
            .name = "inproc",
            .reach = KVF_REACH_PROCESS,
            .memory_kinds = 1u << KVF_MEMORY_HOST,
            .directions = 1u << KVF_READ | 1u << KVF_WRITE,
            .one_sided = true,
            .lists = true,
            .fences = true,
            .in_flight = 1,
            /* A copied run costs a call and the misses of two scattered places. */
            .cost = {.ns_per_run = 60, .ns_per_byte = 0.125, .ns_per_source = 1e3},
        },
    .open = inproc_open,
    .register_region = inproc_register,
    .unregister_region = inproc_unregister,
    .card = inproc_card,
    .connect = inproc_connect,
    .submit = inproc_submit,
    .cancel = inproc_cancel,
    .notify = inproc_notify,
    .measure = inproc_measure,
    .way = inproc_way,
    .disconnect = inproc_disconnect,
    .fence = inproc_fence_out,
    .admit = inproc_admit,
    .progress = inproc_progress,
    .event_fd = inproc_event_fd,
    .close = inproc_close,
};
