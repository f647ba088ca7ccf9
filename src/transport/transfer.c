/*
 * Moving a whole request: for each source a cursor over its runs, and a few batches that are filled from it,
 * submitted, and filled again. Everything is allocated at the start.
 */
#include <stdio.h>

#include "transport/front.h"

#define BATCHES 3u /* of one source, submitted at once: while one ends, others keep its fabric busy */
#define BATCH_RUNS 1024u
#define BATCH_BYTES (16u << 20) /* a batch with this much is full; one long run may be more */
#define PULL_RUNS 64u           /* looked at between two looks at the bytes */
#define DETAIL_BYTES 768u

typedef struct transfer_source transfer_source;

typedef struct transfer_batch {
    transfer_source *source;
    kvf_operation operation;
    bool submitted;
    size_t count;
    uint64_t bytes;
    kvf_run runs[BATCH_RUNS];
} transfer_batch;

struct transfer_source {
    kvf_transfer *transfer;
    kvf_peer *peer;
    kvf_run_cursor cursor;
    bool exhausted;
    transfer_batch *batches;
};

struct kvf_transfer {
    kvf_transport *transport;
    kvf_direction direction;
    bool swapped;      /* pushed by the plan's remote side: its runs name our memory as the remote one */
    kvf_status failed; /* the first failure, or KVF_E_CANCELLED */
    char detail[DETAIL_BYTES];
    uint32_t in_flight; /* batches */
    bool abandoned;     /* kvf_transfer_free() was called: freed with the last batch */
    uint64_t bytes, runs;
    transfer_source *sources;
    uint32_t source_count;
    transfer_batch *batches; /* of all sources */
};

static void free_transfer(kvf_transfer *transfer) {
    kvf_free(transfer->batches);
    kvf_free(transfer->sources);
    kvf_free(transfer);
}

/* The first failure is the transfer's; nothing new is started, and what moves is stopped. */
static void fail(kvf_transfer *transfer, kvf_status status, const char *detail) {
    if (transfer->failed)
        return;
    transfer->failed = status;
    (void)snprintf(transfer->detail, sizeof transfer->detail, "%s", detail);
    for (uint32_t i = 0; i < transfer->source_count * BATCHES; i++)
        if (transfer->batches[i].submitted)
            (void)kvf_transport_cancel(transfer->transport, transfer->batches[i].operation);
}

static void swap_sides(kvf_run *run) {
    *run =
        (kvf_run){run->remote_offset, run->local_offset, run->bytes, run->remote_region, run->local_region};
}

static void fill(transfer_source *source, transfer_batch *batch) {
    batch->count = 0;
    batch->bytes = 0;
    while (batch->count < BATCH_RUNS && batch->bytes < BATCH_BYTES && !source->exhausted) {
        size_t room = BATCH_RUNS - batch->count < PULL_RUNS ? BATCH_RUNS - batch->count : PULL_RUNS;
        size_t got = kvf_run_cursor_next(&source->cursor, batch->runs + batch->count, room);
        for (size_t i = 0; i < got; i++, batch->count++) {
            batch->bytes += batch->runs[batch->count].bytes;
            if (source->transfer->swapped)
                swap_sides(&batch->runs[batch->count]);
        }
        source->exhausted = got == 0;
    }
}

static void on_done(void *context, kvf_operation operation, kvf_status status, const char *detail);

/* Keeps a source's batches under way. */
static void pump(transfer_source *source) {
    kvf_transfer *transfer = source->transfer;
    for (uint32_t i = 0; i < BATCHES && !transfer->failed && !source->exhausted; i++) {
        transfer_batch *batch = &source->batches[i];
        if (batch->submitted)
            continue;
        fill(source, batch);
        if (batch->count == 0)
            return;
        kvf_status status = kvf_transport_submit(source->peer, transfer->direction, batch->runs, batch->count,
                                                 on_done, batch, &batch->operation);
        if (status) {
            fail(transfer, status, kvf_error_detail());
            return;
        }
        batch->submitted = true;
        transfer->in_flight++;
    }
}

static void on_done(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation;
    transfer_batch *batch = context;
    kvf_transfer *transfer = batch->source->transfer;
    batch->submitted = false;
    transfer->in_flight--;
    if (status) {
        fail(transfer, status, detail);
    } else {
        transfer->bytes += batch->bytes;
        transfer->runs += batch->count;
        pump(batch->source);
    }
    if (transfer->abandoned && transfer->in_flight == 0)
        free_transfer(transfer);
}

static kvf_status check_peers(kvf_peer *const *peers, uint32_t count) {
    if (!peers)
        return count > 0 ? kvf_fail(KVF_E_INVALID, "transfer: peers is NULL") : KVF_OK;
    for (uint32_t i = 0; i < count; i++) {
        if (!peers[i])
            return kvf_fail(KVF_E_INVALID, "transfer: the peer of source %u is NULL", i);
        if (peers[i]->transport != peers[0]->transport)
            return kvf_fail(KVF_E_INVALID, "transfer: the peers of sources 0 and %u are of two transports",
                            i);
        kvf_status status = kvf_front_check_peer(peers[i], "transfer");
        if (status)
            return status;
    }
    return KVF_OK;
}

static kvf_status make(uint32_t sources, kvf_transfer **out) {
    kvf_transfer *transfer = kvf_alloc0(1, sizeof *transfer);
    if (!transfer)
        return kvf_nomem("a transfer");
    transfer->sources = kvf_alloc0(sources, sizeof *transfer->sources);
    transfer->batches = kvf_alloc((size_t)sources * BATCHES, sizeof *transfer->batches);
    if (!transfer->sources || !transfer->batches) {
        free_transfer(transfer);
        return kvf_nomem("a transfer");
    }
    transfer->source_count = sources;
    *out = transfer;
    return KVF_OK;
}

/* Source i of the transfer is source `of_plan` of the request's plan. */
static void place_source(kvf_transfer *transfer, uint32_t i, const kvf_request *request, uint32_t of_plan,
                         kvf_peer *peer) {
    transfer_source *source = &transfer->sources[i];
    source->transfer = transfer;
    source->peer = peer;
    source->batches = &transfer->batches[(size_t)i * BATCHES];
    kvf_run_cursor_start(&source->cursor, request, of_plan);
    for (uint32_t b = 0; b < BATCHES; b++) {
        source->batches[b].source = source;
        source->batches[b].submitted = false;
    }
}

/* Gets a placed transfer under way; it is freed if nothing of it is. */
static kvf_status launch(kvf_transfer *transfer, kvf_transfer **out) {
    for (uint32_t i = 0; i < transfer->source_count && !transfer->failed; i++)
        pump(&transfer->sources[i]);
    if (transfer->failed && transfer->in_flight == 0) {
        kvf_status status = kvf_fail(transfer->failed, "transfer: %s", transfer->detail);
        free_transfer(transfer);
        return status;
    }
    *out = transfer; /* a failure with batches under way is told by its status */
    return KVF_OK;
}

kvf_status kvf_transfer_start(const kvf_request *request, kvf_direction direction, kvf_peer *const *peers,
                              kvf_transfer **out) {
    if (!request || !out)
        return kvf_fail(KVF_E_INVALID, "transfer: %s is NULL", !request ? "request" : "out");
    if (direction != KVF_READ && direction != KVF_WRITE)
        return kvf_fail(KVF_E_INVALID, "transfer: direction is %d; allowed 0 (read) and 1 (write)",
                        (int)direction);
    uint32_t sources = kvf_plan_source_count(kvf_request_plan(request));
    kvf_status status = check_peers(peers, sources);
    kvf_transfer *transfer = NULL;
    if (!status)
        status = make(sources, &transfer);
    if (status)
        return status;
    transfer->transport = sources > 0 ? peers[0]->transport : NULL;
    transfer->direction = direction;
    for (uint32_t i = 0; i < sources; i++)
        place_source(transfer, i, request, i, peers[i]);
    return launch(transfer, out);
}

kvf_status kvf_transfer_push(const kvf_request *request, uint32_t source, kvf_peer *peer,
                             kvf_transfer **out) {
    if (!request || !peer || !out)
        return kvf_fail(KVF_E_INVALID, "push: %s is NULL", !request ? "request" : !peer ? "peer" : "out");
    uint32_t sources = kvf_plan_source_count(kvf_request_plan(request));
    if (source >= sources)
        return kvf_fail(KVF_E_RANGE, "push: source is %u; the plan has %u", source, sources);
    kvf_transfer *transfer = NULL;
    kvf_status status = kvf_front_check_peer(peer, "push");
    if (!status)
        status = make(1, &transfer);
    if (status)
        return status;
    transfer->transport = peer->transport;
    transfer->direction = KVF_WRITE;
    transfer->swapped = true;
    place_source(transfer, 0, request, source, peer);
    return launch(transfer, out);
}

kvf_status kvf_transfer_status(const kvf_transfer *transfer) {
    if (!transfer)
        return kvf_fail(KVF_E_INVALID, "transfer: transfer is NULL");
    if (transfer->in_flight > 0)
        return KVF_IN_PROGRESS;
    return transfer->failed ? kvf_fail(transfer->failed, "%s", transfer->detail) : KVF_OK;
}

const char *kvf_transfer_detail(const kvf_transfer *transfer) {
    return transfer ? transfer->detail : "";
}

void kvf_transfer_counts(const kvf_transfer *transfer, uint64_t *bytes, uint64_t *runs) {
    if (bytes)
        *bytes = transfer ? transfer->bytes : 0;
    if (runs)
        *runs = transfer ? transfer->runs : 0;
}

void kvf_transfer_cancel(kvf_transfer *transfer) {
    if (transfer && transfer->in_flight > 0)
        fail(transfer, KVF_E_CANCELLED, "the transfer was cancelled by its owner");
}

void kvf_transfer_free(kvf_transfer *transfer) {
    if (!transfer)
        return;
    if (transfer->in_flight == 0) {
        free_transfer(transfer);
        return;
    }
    transfer->abandoned = true;
    kvf_transfer_cancel(transfer);
}
