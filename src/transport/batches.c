/*
 * Operations: checking and numbering submitted batches, and calling the callbacks that are due.
 */
#include <stdio.h>
#include <unistd.h>

#include "request/request.h"
#include "transport/front.h"
#include "transport/notices.h"

static kvf_front_batch *front_of(kvf_batch *batch) {
    return (kvf_front_batch *)batch;
}

/* ---- the table of operations ---------------------------------------------------------------------------
 *
 * Numbers count up, so consecutive ones fall into different buckets and chains stay short while there are at
 * least as many buckets as batches.
 */

static kvf_front_batch **bucket_of(const kvf_transport *transport, kvf_operation operation) {
    KVF_ASSERT(transport->bucket_count && (transport->bucket_count & (transport->bucket_count - 1)) == 0);
    return &transport->buckets[operation & (transport->bucket_count - 1)];
}

static kvf_status grow_table(kvf_transport *transport) {
    size_t count = transport->bucket_count ? transport->bucket_count * 2 : 64;
    kvf_front_batch **buckets = kvf_alloc0(count, sizeof(kvf_front_batch *));
    if (!buckets)
        return kvf_nomem("operations");
    for (size_t i = 0; i < transport->bucket_count; i++) {
        for (kvf_front_batch *batch = transport->buckets[i], *next; batch; batch = next) {
            next = batch->same_bucket;
            kvf_front_batch **at = &buckets[batch->fabric_view.operation & (count - 1)];
            batch->same_bucket = *at;
            *at = batch;
        }
    }
    kvf_free(transport->buckets);
    transport->buckets = buckets;
    transport->bucket_count = count;
    return KVF_OK;
}

static kvf_front_batch *find(const kvf_transport *transport, kvf_operation operation) {
    kvf_front_batch *batch = transport->bucket_count ? *bucket_of(transport, operation) : NULL;
    while (batch && batch->fabric_view.operation != operation)
        batch = batch->same_bucket;
    return batch;
}

/* A batch with a number, in no list. */
static kvf_status take_batch(kvf_transport *transport, kvf_front_batch **out) {
    if (transport->open_batches == transport->bucket_count) {
        kvf_status status = grow_table(transport);
        if (status)
            return status;
    }
    kvf_front_batch *batch = transport->spare;
    if (batch)
        transport->spare = batch->same_bucket;
    else if (!(batch = kvf_alloc(1, sizeof *batch)))
        return kvf_nomem("an operation");
    batch->ended = false;
    batch->fabric_view = (kvf_batch){.operation = ++transport->last_operation};
    kvf_front_batch **bucket = bucket_of(transport, batch->fabric_view.operation);
    batch->same_bucket = *bucket;
    *bucket = batch;
    transport->open_batches++;
    *out = batch;
    return KVF_OK;
}

static void give_back(kvf_transport *transport, kvf_front_batch *batch) {
    kvf_front_batch **at = bucket_of(transport, batch->fabric_view.operation);
    KVF_ASSERT(transport->open_batches > 0);
    while (*at != batch) {
        KVF_ASSERT(*at); /* else it is in no bucket: given back twice */
        at = &(*at)->same_bucket;
    }
    *at = batch->same_bucket;
    transport->open_batches--;
    batch->same_bucket = transport->spare;
    transport->spare = batch;
}

void kvf_front_free_batches(kvf_transport *transport) {
    KVF_ASSERT(transport->open_batches == 0 && !transport->ended.first);
    for (kvf_front_batch *batch = transport->spare, *next; batch; batch = next) {
        next = batch->same_bucket;
        kvf_free(batch);
    }
    kvf_free(transport->buckets);
    kvf_buffer_free(&transport->notices);
    kvf_buffer_free(&transport->delivering);
}

/* ---- submit and cancel ----------------------------------------------------------------------- */

static kvf_status refuse(const kvf_run *run, size_t i, const char *side, uint32_t region, uint64_t offset,
                         uint64_t region_bytes, bool withheld, uint32_t count) {
    if (region >= count)
        return kvf_fail(KVF_E_NOT_REGISTERED, "run %zu: %s region is %u, but %u are registered", i, side,
                        region, count);
    if (region_bytes == 0)
        return kvf_fail(KVF_E_NOT_REGISTERED, "run %zu: %s region %u %s", i, side, region,
                        withheld ? "is withheld: it moves packed only" : "was unregistered");
    return kvf_fail(KVF_E_RANGE,
                    "run %zu: %llu bytes at offset %llu of %s region %u; allowed: inside 0 to %llu", i,
                    (unsigned long long)run->bytes, (unsigned long long)offset, side, region,
                    (unsigned long long)region_bytes);
}

/* Every run must lie inside a registered region on both sides. All code after this uses plain arithmetic. Inlined, so
 * that nothing is asked of nests where there are none.
 *
 * @param nest  what each of `runs` occupies; NULL: they are single runs */
static inline __attribute__((always_inline)) kvf_status check_runs(const kvf_peer *peer, const kvf_run *runs,
                                                                   size_t count, const kvf_nest_size *nest,
                                                                   uint64_t *bytes) {
    const kvf_transport *transport = peer->transport;
    const kvf_memory *local = transport->fabrics[peer->fabric_number].served;
    const uint64_t *remote = peer->region_bytes;
    uint32_t local_count = transport->region_count, remote_count = peer->region_count;
    *bytes = 0;
    for (size_t i = 0; i < count; i++) {
        const kvf_run *run = &runs[i];
        *bytes += run->bytes;
        uint64_t here = run->local_region < local_count ? local[run->local_region].bytes : 0;
        uint64_t there = run->remote_region < remote_count ? remote[run->remote_region] : 0;
        KVF_ASSERT(!nest || run->bytes == nest->bytes);
        if (!kvf_lies_inside(run->local_offset, nest ? nest->local : run->bytes, here))
            return refuse(run, i, "local", run->local_region, run->local_offset, here,
                          run->local_region < local_count &&
                              (transport->regions[run->local_region].withheld ||
                               transport->served[run->local_region].bytes > 0),
                          local_count);
        if (!kvf_lies_inside(run->remote_offset, nest ? nest->remote : run->bytes, there))
            return refuse(run, i, "remote", run->remote_region, run->remote_offset, there,
                          run->remote_region < remote_count && peer->region_withheld[run->remote_region],
                          remote_count);
    }
    return KVF_OK;
}

kvf_status kvf_front_check_peer(const kvf_peer *peer, const char *what) {
    kvf_status status = kvf_front_check_process(peer->transport, what);
    if (status)
        return status;
    if (peer->lost)
        return kvf_fail(KVF_E_PEER_LOST, "%s: %s: %s is gone: %s", what, peer->fabric->kind.name, peer->name,
                        peer->lost_reason);
    if (peer->closing || peer->parting)
        return kvf_fail(KVF_E_PEER_LOST, "%s: %s is being closed", what, peer->name);
    return KVF_OK;
}

static kvf_status check_submit(const kvf_peer *peer, kvf_direction direction, const kvf_run *runs,
                               size_t count, const kvf_nest_size *nest, kvf_done done, uint64_t *bytes) {
    if (!peer || !done || (!runs && count > 0))
        return kvf_fail(KVF_E_INVALID, "submit: %s is NULL", !peer ? "peer" : !done ? "done" : "runs");
    if (direction != KVF_READ && direction != KVF_WRITE)
        return kvf_fail(KVF_E_INVALID, "submit: direction is %d; allowed: 0 (read) and 1 (write)",
                        (int)direction);
    if (!(peer->fabric->kind.directions & 1u << direction))
        return kvf_fail(KVF_E_UNSUPPORTED, "submit: %s does not %s", peer->fabric->kind.name,
                        direction == KVF_READ ? "read" : "write");
    kvf_status status = kvf_front_check_peer(peer, "submit");
    if (status)
        return status;
    return nest ? check_runs(peer, runs, count, nest, bytes) : check_runs(peer, runs, count, NULL, bytes);
}

static kvf_status submit(kvf_peer *peer, kvf_direction direction, const kvf_run *runs, size_t count,
                         const kvf_run_shape *shape, kvf_done done, void *context, kvf_operation *out) {
    uint64_t bytes = 0;
    kvf_nest_size nest;
    if (shape && !kvf_nest_measure(shape, &nest))
        return kvf_fail(KVF_E_INVALID,
                        "submit: a nest whose numbers are 0 or too large, or whose runs lie on each other");
    kvf_status status = check_submit(peer, direction, runs, count, shape ? &nest : NULL, done, &bytes);
    if (status)
        return status;
    kvf_transport *transport = peer->transport;
    kvf_front_batch *front = NULL;
    status = take_batch(transport, &front);
    if (status)
        return status;
    kvf_batch *batch = &front->fabric_view;
    batch->peer = peer;
    batch->direction = direction;
    batch->runs = runs;
    batch->count = count;
    batch->shape = shape;
    batch->bytes = bytes;
    batch->done = done;
    batch->context = context;
    KVF_QUEUE_ADD(peer->batches.first, peer->batches.last, batch);
    if (count == 0) /* nothing for a fabric to do */
        kvf_batch_end(batch);
    else
        status = peer->fabric->submit(peer->link, batch);
    if (status) {
        KVF_QUEUE_REMOVE(peer->batches.first, peer->batches.last, batch);
        give_back(transport, front);
        return status;
    }
    if (out)
        *out = batch->operation;
    kvf_front_update_wake(transport);
    return KVF_OK;
}

kvf_status kvf_transport_submit(kvf_peer *peer, kvf_direction direction, const kvf_run *runs, size_t count,
                                kvf_done done, void *context, kvf_operation *out) {
    return submit(peer, direction, runs, count, NULL, done, context, out);
}

bool kvf_peer_takes_nests(const kvf_peer *peer) {
    return peer->fabric->nests;
}

kvf_status kvf_transport_submit_nests(kvf_peer *peer, kvf_direction direction, const kvf_run *nests,
                                      size_t count, const kvf_run_shape *shape, kvf_done done, void *context,
                                      kvf_operation *out) {
    KVF_ASSERT(kvf_peer_takes_nests(peer));
    return submit(peer, direction, nests, count, shape, done, context, out);
}

kvf_status kvf_transport_cancel(kvf_transport *transport, kvf_operation operation) {
    if (!transport)
        return kvf_fail(KVF_E_INVALID, "cancel: transport is NULL");
    kvf_status status = kvf_front_check_process(transport, "cancel");
    if (status)
        return status;
    kvf_front_batch *front = find(transport, operation);
    if (!front)
        return kvf_fail(KVF_E_NOT_FOUND, "cancel: operation %llu is not under way",
                        (unsigned long long)operation);
    kvf_batch *batch = &front->fabric_view;
    if (!front->ended && !batch->cancelled) {
        batch->cancelled = true;
        batch->peer->fabric->cancel(batch->peer->link, batch);
    }
    return KVF_OK;
}

kvf_status kvf_transport_notify(kvf_peer *peer, const void *data, size_t bytes) {
    if (!peer || !data)
        return kvf_fail(KVF_E_INVALID, "notify: %s is NULL", !peer ? "peer" : "data");
    if (bytes < 1 || bytes > KVF_NOTICE_MAX)
        return kvf_fail(KVF_E_RANGE, "notify: %zu bytes; allowed: 1 to %u", bytes, KVF_NOTICE_MAX);
    kvf_status status = kvf_front_check_peer(peer, "notify");
    if (!status)
        status = peer->fabric->notify(peer->link, data, bytes);
    return status && !peer->lost
               ? kvf_fail_in(status, "notify: %s: %s: ", peer->fabric->kind.name, peer->name)
               : status;
}

/* ---- in place -------------------------------------------------------------------------------- */

unsigned char *kvf_peer_enter(kvf_peer *peer, uint32_t region, kvf_direction direction) {
    const kvf_fabric *fabric = peer->fabric;
    KVF_ASSERT(region < peer->region_count);
    return fabric->enter && !peer->lost ? fabric->enter(peer->link, region, direction) : NULL;
}

kvf_status kvf_peer_leave(kvf_peer *peer, kvf_direction direction, uint64_t bytes) {
    if (!peer->fabric->leave(peer->link, direction))
        return kvf_fail(KVF_E_PEER_LOST, "%s: %s was lost while its memory was %s", peer->fabric->kind.name,
                        peer->name, direction == KVF_READ ? "read" : "written");
    peer->moved[direction] += bytes;
    return KVF_OK;
}

/* ---- reports from fabrics -------------------------------------------------------------------- */

void kvf_batch_fail(kvf_batch *batch, kvf_status status, const char *reason) {
    if (batch->failed)
        return;
    batch->failed = status;
    (void)snprintf(batch->reason, sizeof batch->reason, "%s", reason);
}

void kvf_batch_end(kvf_batch *batch) {
    kvf_front_batch *front = front_of(batch);
    KVF_ASSERT(!front->ended);
    KVF_QUEUE_REMOVE(batch->peer->batches.first, batch->peer->batches.last, batch);
    front->ended = true;
    if (batch->failed && batch->cancelled && batch->failed != KVF_E_CANCELLED) {
        batch->failed = KVF_OK;
        kvf_batch_fail(batch, KVF_E_CANCELLED, KVF_REASON_CANCELLED);
    }
    KVF_QUEUE_ADD(batch->peer->transport->ended.first, batch->peer->transport->ended.last, batch);
}

void kvf_front_end_batches(kvf_peer *peer, kvf_status status, const char *reason) {
    for (kvf_batch *batch; (batch = peer->batches.first); kvf_batch_end(batch)) {
        batch->failed = KVF_OK; /* the fabric's own reason no longer matters */
        kvf_batch_fail(batch, status, reason);
    }
}

kvf_status kvf_deliver_room(kvf_transport *transport, size_t room) {
    return kvf_buffer_room(&transport->notices, room);
}

kvf_status kvf_deliver(kvf_transport *transport, const char *sender, const void *data, size_t bytes) {
    return kvf_notices_add(&transport->notices, sender, data, bytes);
}

void kvf_peer_lost(kvf_peer *peer, const char *reason) {
    if (peer->lost)
        return;
    peer->lost = true;
    (void)snprintf(peer->lost_reason, sizeof peer->lost_reason, "%s", reason);
    kvf_front_end_batches(peer, KVF_E_PEER_LOST, peer->lost_reason);
    if (!peer->closing) {
        peer->lost_untold = true;
        peer->transport->lost_untold++;
    }
}

void kvf_peer_refused(kvf_peer *peer, const char *reason) {
    peer->lives = peer->lives || !peer->lost;
    kvf_peer_lost(peer, reason);
}

void kvf_peer_waits(kvf_peer *peer, const char *why) {
    (void)snprintf(peer->waits, sizeof peer->waits, "%s", why ? why : "");
    peer->transport->waits += why != NULL;
}

bool kvf_peer_is_used(const kvf_peer *peer) {
    return peer->users != NULL;
}

bool kvf_peer_lives(const kvf_peer *peer) {
    return peer->lives;
}

/* ---- callbacks ------------------------------------------------------------------------------- */

/* "shm: reading from prefill-1: process_vm_readv: Bad address (17 of 300 runs had started)" */
static void describe_failure(const kvf_batch *batch, char *out, size_t size) {
    const kvf_peer *peer = batch->peer;
    bool read = batch->direction == KVF_READ;
    *out = '\0';
    if (batch->failed)
        (void)snprintf(out, size, "%s: %s %s: %s (%zu of %zu runs had started)", peer->fabric->kind.name,
                       read ? "reading from" : "writing to", peer->name, batch->reason, batch->next,
                       batch->count);
}

static void call_done(kvf_transport *transport, kvf_batch *batch) {
    kvf_status status = batch->failed;
    batch->peer->moved[batch->direction] += status ? 0 : batch->bytes;
    kvf_done done = batch->done;
    void *context = batch->context;
    kvf_operation operation = batch->operation;
    char detail[KVF_REASON_BYTES + KVF_SENDER_MAX + 128];
    describe_failure(batch, detail, sizeof detail);
    KVF_QUEUE_REMOVE(transport->ended.first, transport->ended.last, batch);
    give_back(transport, front_of(batch));
    KVF_ASSERT(done);
    transport->calling++;
    done(context, operation, status, detail);
    transport->calling--;
}

void kvf_front_dispatch_peer(kvf_transport *transport, const kvf_peer *peer) {
    /* From the start each time: a callback may end or close anything else. */
    for (;;) {
        kvf_batch *batch = transport->ended.first;
        while (batch && batch->peer != peer)
            batch = batch->following;
        if (!batch)
            return;
        call_done(transport, batch);
    }
}

static void tell_notices(kvf_transport *transport) {
    if (transport->notices.length == 0)
        return;
    /* Callbacks may add notifications (by closing peers), which are delivered next time. */
    kvf_buffer told = transport->notices;
    transport->notices = transport->delivering;
    transport->delivering = told;
    kvf_notice notice;
    for (size_t at = 0; kvf_notices_next(&told, &at, &notice);)
        if (transport->options.on_notify)
            transport->options.on_notify(transport->options.context, transport, notice.sender, notice.data,
                                         notice.bytes);
    transport->delivering.length = 0;
}

static void tell_lost(kvf_transport *transport) {
    while (transport->lost_untold > 0) {
        kvf_peer *peer = transport->peers;
        while (peer && !peer->lost_untold)
            peer = peer->following;
        KVF_ASSERT(peer);
        if (!peer)
            return;
        peer->lost_untold = false;
        transport->lost_untold--;
        if (transport->options.on_peer_lost)
            transport->options.on_peer_lost(transport->options.context, transport, peer, peer->lost_reason);
    }
}

void kvf_front_dispatch(kvf_transport *transport) {
    while (transport->ended.first)
        call_done(transport, transport->ended.first);
    tell_notices(transport);
    /* on_notify may have cancelled batches or closed peers: ended batches are told before the loss of their peer. */
    while (transport->ended.first)
        call_done(transport, transport->ended.first);
    tell_lost(transport);
}

void kvf_front_update_wake(kvf_transport *transport) {
    bool due = transport->ended.first || transport->notices.length > 0 || transport->lost_untold > 0;
    kvf_wake_set(&transport->wake, due);
}
