/*
 * Moving a whole request: for each source a cursor over its runs, and a few batches that are filled from it,
 * submitted, and filled again. Everything is allocated at the start.
 *
 * A fabric that takes nests gets these instead of runs: a nest is an entry of a batch like a run, but never cut.
 */
#include <stdio.h>

#include "request/order.h"
#include "transport/front.h"
#include "transport/transfer.h"

#define BATCHES 3u
#define BATCH_RUNS 1024u   /* few: the lists should stay in the caches */
#define MESSAGE_RUNS 4096u /* of 256 bytes: as much as a message of the fabric takes */
#define MANY_BYTES (1u << 20)
#define BATCH_BYTES (16u << 20) /* a batch with this much is full; one long run may be more */
#define PULL_RUNS 64u           /* taken before the bytes are counted again */
#define DETAIL_BYTES 768u

typedef struct transfer_source transfer_source;

/* How much of a source is submitted at once: while one batch ends, others keep its fabric busy. */
typedef struct transfer_depth {
    uint32_t batches;
    uint32_t runs; /* of a batch, at most */
} transfer_depth;

typedef struct transfer_batch {
    transfer_source *source;
    kvf_operation operation;
    bool submitted;
    size_t count;
    size_t whole;          /* runs that end in it */
    uint64_t bytes, begin; /* of the source's, in the order in which they are taken */
    kvf_run *runs;
    kvf_run_shape shape; /* of nests */
} transfer_batch;

struct transfer_source {
    kvf_front_user user; /* of the peer */
    kvf_transfer *transfer;
    kvf_peer *peer; /* NULL: its connection was closed */
    kvf_run_cursor cursor;
    kvf_layer_order *order; /* over which the cursor goes; NULL: over the request itself */
    uint64_t taken;         /* bytes, into batches */
    bool nests;
    kvf_run
        ahead[PULL_RUNS]; /* nests, or runs of a held transfer: taken from the cursor and not submitted yet */
    size_t ahead_at, ahead_count;
    kvf_run_shape ahead_shape; /* of nests */
    bool exhausted;            /* the cursor */
    transfer_depth depth;
    transfer_batch *batches;
    kvf_run *runs; /* of all of them */
};

struct kvf_transfer {
    kvf_transport *transport;
    kvf_direction direction;
    bool held;         /* submits only what kvf_transfer_advance() allows */
    uint32_t turn;     /* the source that kvf_transfer_advance() serves first */
    bool swapped;      /* pushed by the plan's remote side: its runs name our memory as the remote one */
    kvf_status failed; /* the first failure, or KVF_E_CANCELLED */
    char detail[DETAIL_BYTES];
    uint32_t in_flight; /* batches */
    bool cut;           /* see kvf_transfer_was_cut() */
    bool abandoned;     /* kvf_transfer_free() was called: freed with the last batch */
    uint64_t bytes, runs;
    transfer_source *sources;
    uint32_t source_count;
};

static void free_transfer(kvf_transfer *transfer) {
    for (uint32_t i = 0; i < transfer->source_count; i++) {
        transfer_source *source = &transfer->sources[i];
        if (source->peer)
            KVF_LIST_REMOVE(source->peer->users, &source->user);
        kvf_layer_order_free(source->order);
        kvf_free(source->batches);
        kvf_free(source->runs);
    }
    kvf_free(transfer->sources);
    kvf_free(transfer);
}

static void cancel_batches(const transfer_source *source) {
    for (uint32_t i = 0; i < source->depth.batches; i++)
        if (source->batches[i].submitted)
            (void)kvf_transport_cancel(source->transfer->transport, source->batches[i].operation);
}

/* The first failure becomes the transfer's; nothing new is started, and batches under way are cancelled. */
static void fail(kvf_transfer *transfer, kvf_status status, const char *detail) {
    if (transfer->failed)
        return;
    transfer->failed = status;
    (void)snprintf(transfer->detail, sizeof transfer->detail, "%s", detail);
    for (uint32_t i = 0; i < transfer->source_count; i++)
        cancel_batches(&transfer->sources[i]);
}

/* Takes whole runs: for a transfer at full speed. */
static void fill(transfer_source *source, transfer_batch *batch) {
    while (batch->count < source->depth.runs && batch->bytes < BATCH_BYTES && !source->exhausted) {
        size_t room = (size_t)kvf_min_u64(source->depth.runs - batch->count, PULL_RUNS);
        size_t got = kvf_run_cursor_next(&source->cursor, batch->runs + batch->count, room);
        for (size_t i = 0; i < got; i++, batch->count++) {
            batch->bytes += batch->runs[batch->count].bytes;
            if (source->transfer->swapped)
                batch->runs[batch->count] = kvf_run_swapped(&batch->runs[batch->count]);
        }
        source->exhausted = got == 0;
    }
    batch->whole = batch->count;
}

/* The next run or nest, or the rest of a run; NULL: there is none. */
static kvf_run *look_ahead(transfer_source *source) {
    if (source->ahead_at == source->ahead_count && !source->exhausted) {
        source->ahead_at = 0;
        source->ahead_count = source->nests ? kvf_run_cursor_next_nests(&source->cursor, source->ahead,
                                                                        PULL_RUNS, &source->ahead_shape)
                                            : kvf_run_cursor_next(&source->cursor, source->ahead, PULL_RUNS);
        source->exhausted = source->ahead_count == 0;
        for (size_t i = 0; i < source->ahead_count && source->transfer->swapped; i++)
            source->ahead[i] = kvf_run_swapped(&source->ahead[i]);
        if (source->nests && source->transfer->swapped)
            source->ahead_shape = kvf_run_shape_swapped(&source->ahead_shape);
    }
    return source->ahead_at < source->ahead_count ? &source->ahead[source->ahead_at] : NULL;
}

/* Takes at most `most` bytes, and cuts the run in which they end. */
static void fill_up_to(transfer_source *source, transfer_batch *batch, uint64_t most) {
    kvf_run *left;
    while (batch->count < source->depth.runs && batch->bytes < most && (left = look_ahead(source))) {
        kvf_run *run = &batch->runs[batch->count++];
        *run = *left;
        run->bytes = kvf_min_u64(left->bytes, most - batch->bytes);
        batch->bytes += run->bytes;
        left->local_offset += run->bytes;
        left->remote_offset += run->bytes;
        left->bytes -= run->bytes;
        if (left->bytes == 0) {
            batch->whole++;
            source->ahead_at++;
        }
    }
}

/* Takes nests of one shape until they have `most` bytes. */
static void fill_with_nests(transfer_source *source, transfer_batch *batch, uint64_t most) {
    const kvf_run *nest;
    while (batch->count < source->depth.runs && batch->bytes < most && (nest = look_ahead(source))) {
        const kvf_run_shape *shape = &source->ahead_shape;
        if (batch->count == 0)
            batch->shape = *shape;
        else if (memcmp(shape, &batch->shape, sizeof *shape) != 0)
            break;
        batch->runs[batch->count++] = *nest;
        batch->bytes += nest->bytes;
        batch->whole += shape->outer_count * shape->inner_count;
        source->ahead_at++;
    }
}

/* Whether something was not submitted yet. For a held transfer this is exact: see look_ahead(). */
static bool source_has_more(const transfer_source *source) {
    return !source->exhausted || source->ahead_at < source->ahead_count;
}

static bool has_more(const kvf_transfer *transfer) {
    for (uint32_t i = 0; i < transfer->source_count; i++)
        if (source_has_more(&transfer->sources[i]))
            return true;
    return false;
}

/* The source's batches have ended. A held transfer may have had none under way, and must not go on without a peer. */
static void on_closed(void *context) {
    transfer_source *source = context;
    source->peer = NULL;
    if (source_has_more(source))
        fail(source->transfer, KVF_E_CANCELLED, "the connection was closed");
}

static bool is_over(const kvf_transfer *transfer) {
    return transfer->in_flight == 0 && (transfer->failed || !has_more(transfer));
}

static void on_done(void *context, kvf_operation operation, kvf_status status, const char *detail);

static bool submit(transfer_source *source, transfer_batch *batch) {
    kvf_transfer *transfer = source->transfer;
    kvf_status status = source->nests ? kvf_transport_submit_nests(source->peer, transfer->direction,
                                                                   batch->runs, batch->count, &batch->shape,
                                                                   on_done, batch, &batch->operation)
                                      : kvf_transport_submit(source->peer, transfer->direction, batch->runs,
                                                             batch->count, on_done, batch, &batch->operation);
    if (status) {
        fail(transfer, status, kvf_error_detail());
        return false;
    }
    batch->submitted = true;
    transfer->in_flight++;
    return true;
}

/* Fills a source's free batches with at most `most` bytes in all (UINT64_MAX: as many as fit) and submits them.
 * Returns the number of bytes it has submitted. */
static uint64_t pump(transfer_source *source, uint64_t most) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < source->depth.batches && bytes < most && !source->transfer->failed; i++) {
        transfer_batch *batch = &source->batches[i];
        if (batch->submitted)
            continue;
        batch->count = batch->whole = 0;
        batch->bytes = 0;
        batch->begin = source->taken;
        if (source->nests)
            fill_with_nests(source, batch, kvf_min_u64(most - bytes, BATCH_BYTES));
        else if (most == UINT64_MAX && source->ahead_at == source->ahead_count)
            fill(source, batch);
        else
            fill_up_to(source, batch, kvf_min_u64(most - bytes, BATCH_BYTES));
        source->taken += batch->bytes;
        if (batch->count == 0 || !submit(source, batch))
            break;
        bytes += batch->bytes;
    }
    return bytes;
}

static void on_done(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation;
    transfer_batch *batch = context;
    kvf_transfer *transfer = batch->source->transfer;
    const kvf_peer *peer = batch->source->peer;
    batch->submitted = false;
    transfer->in_flight--;
    if (status) {
        transfer->cut = transfer->cut || !peer || peer->lost || peer->closing;
        fail(transfer, status, detail);
    } else {
        transfer->bytes += batch->bytes;
        transfer->runs += batch->whole;
        if (!transfer->held)
            (void)pump(batch->source, UINT64_MAX);
    }
    if (transfer->abandoned && transfer->in_flight == 0)
        free_transfer(transfer);
}

void kvf_transfer_hold(kvf_transfer *transfer, bool held) {
    if (transfer->held == held)
        return;
    transfer->held = held;
    for (uint32_t i = 0; i < transfer->source_count; i++)
        if (held)
            (void)look_ahead(&transfer->sources[i]);
        else
            (void)pump(&transfer->sources[i], UINT64_MAX);
}

uint64_t kvf_transfer_advance(kvf_transfer *transfer, uint64_t bytes) {
    uint64_t done = 0;
    for (uint32_t i = 0; i < transfer->source_count && done < bytes; i++) {
        transfer_source *source = &transfer->sources[(transfer->turn + i) % transfer->source_count];
        done += pump(source, bytes - done);
        (void)look_ahead(source);
    }
    transfer->turn = transfer->source_count ? (transfer->turn + 1) % transfer->source_count : 0;
    return done;
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

/* A fabric that sends lists over a network makes messages of them. Of many bytes these should be long, and fill its
 * window, or the way there and back takes longer than the bytes. */
static transfer_depth depth_of(const kvf_peer *peer, const kvf_request *request, uint32_t source) {
    const kvf_transport_kind *kind = &peer->fabric->kind;
    if (kind->lists && kind->reach == KVF_REACH_NETWORK && kvf_request_bytes(request, source) >= MANY_BYTES)
        return (transfer_depth){kind->in_flight, MESSAGE_RUNS};
    return (transfer_depth){BATCHES, BATCH_RUNS};
}

static kvf_status make(uint32_t sources, kvf_transfer **out) {
    kvf_transfer *transfer = kvf_alloc0(1, sizeof *transfer);
    if (!transfer)
        return kvf_nomem("a transfer");
    transfer->sources = kvf_alloc0(sources, sizeof *transfer->sources);
    if (!transfer->sources) {
        free_transfer(transfer);
        return kvf_nomem("a transfer");
    }
    *out = transfer;
    return KVF_OK;
}

/* The transfer's next source is source `of_plan` of the request's plan. */
static kvf_status place_source(kvf_transfer *transfer, const kvf_request *request, uint32_t of_plan,
                               kvf_peer *peer, bool by_layer) {
    transfer_source *source = &transfer->sources[transfer->source_count++];
    const transfer_depth depth = depth_of(peer, request, of_plan);
    source->batches = kvf_alloc0(depth.batches, sizeof *source->batches);
    source->runs = kvf_alloc((size_t)depth.batches * depth.runs, sizeof *source->runs);
    if (!source->batches || !source->runs)
        return kvf_nomem("a transfer");
    for (uint32_t i = 0; i < depth.batches; i++)
        source->batches[i] =
            (transfer_batch){.source = source, .runs = source->runs + (size_t)i * depth.runs};
    source->depth = depth;
    source->transfer = transfer;
    source->peer = peer;
    source->nests = kvf_peer_takes_nests(peer);
    source->user = (kvf_front_user){.closed = on_closed, .context = source};
    KVF_LIST_ADD(peer->users, &source->user);
    kvf_status status = by_layer ? kvf_layer_order_make(request, of_plan, &source->order) : KVF_OK;
    if (source->order) /* checked: the plan has runs */
        (void)kvf_run_cursor_start(&source->cursor, &source->order->request, 0);
    else
        (void)kvf_run_cursor_start(&source->cursor, request, of_plan);
    return status;
}

/* Starts a transfer whose sources are placed, unless that failed; frees it if nothing is under way after a failure. */
static kvf_status launch(kvf_transfer *transfer, kvf_status placed, kvf_transfer **out) {
    if (placed) {
        free_transfer(transfer);
        return placed;
    }
    for (uint32_t i = 0; i < transfer->source_count && !transfer->failed; i++)
        if (transfer->held)
            (void)look_ahead(&transfer->sources[i]);
        else
            (void)pump(&transfer->sources[i], UINT64_MAX);
    if (transfer->failed && transfer->in_flight == 0) {
        kvf_status status = kvf_fail(transfer->failed, "transfer: %s", transfer->detail);
        free_transfer(transfer);
        return status;
    }
    *out = transfer; /* a failure with batches under way is reported by its status */
    return KVF_OK;
}

kvf_status kvf_transfer_start_held(const kvf_request *request, kvf_direction direction,
                                   kvf_peer *const *peers, kvf_transfer_start_options options,
                                   kvf_transfer **out) {
    if (!request || !out)
        return kvf_fail(KVF_E_INVALID, "transfer: %s is NULL", !request ? "request" : "out");
    if (direction != KVF_READ && direction != KVF_WRITE)
        return kvf_fail(KVF_E_INVALID, "transfer: direction is %d; allowed: 0 (read) and 1 (write)",
                        (int)direction);
    uint32_t sources = kvf_plan_source_count(kvf_request_plan(request));
    kvf_status status = check_peers(peers, sources);
    kvf_transfer *transfer = NULL;
    if (!status)
        status = kvf_plan_check_runs(kvf_request_plan(request));
    if (!status)
        status = make(sources, &transfer);
    if (status)
        return status;
    transfer->transport = sources > 0 ? peers[0]->transport : NULL;
    transfer->direction = direction;
    transfer->held = options.held;
    for (uint32_t i = 0; i < sources && !status; i++)
        status = place_source(transfer, request, i, peers[i], options.by_layer);
    return launch(transfer, status, out);
}

kvf_status kvf_transfer_start(const kvf_request *request, kvf_direction direction, kvf_peer *const *peers,
                              kvf_transfer **out) {
    return kvf_transfer_start_held(request, direction, peers, (kvf_transfer_start_options){0}, out);
}

/* Moves the bytes of one source; `direction` KVF_WRITE: this process is that source. */
static kvf_status start_one(const kvf_request *request, uint32_t source, kvf_peer *peer,
                            kvf_direction direction, kvf_transfer_start_options options, kvf_transfer **out) {
    const char *what = direction == KVF_WRITE ? "push" : "transfer";
    if (!request || !peer || !out)
        return kvf_fail(KVF_E_INVALID, "%s: %s is NULL", what, !request ? "request" : !peer ? "peer" : "out");
    uint32_t sources = kvf_plan_source_count(kvf_request_plan(request));
    if (source >= sources)
        return kvf_fail(KVF_E_RANGE, "%s: source is %u; the plan has %u", what, source, sources);
    kvf_transfer *transfer = NULL;
    kvf_status status = kvf_front_check_peer(peer, what);
    if (!status)
        status = kvf_plan_check_runs(kvf_request_plan(request));
    if (!status)
        status = make(1, &transfer);
    if (status)
        return status;
    transfer->transport = peer->transport;
    transfer->direction = direction;
    transfer->swapped = direction == KVF_WRITE;
    transfer->held = options.held;
    status = place_source(transfer, request, source, peer, options.by_layer);
    return launch(transfer, status, out);
}

kvf_status kvf_transfer_push_held(const kvf_request *request, uint32_t source, kvf_peer *peer, bool held,
                                  kvf_transfer **out) {
    return start_one(request, source, peer, KVF_WRITE, (kvf_transfer_start_options){.held = held}, out);
}

kvf_status kvf_transfer_read_source(const kvf_request *request, uint32_t source, kvf_peer *peer,
                                    kvf_transfer_start_options options, kvf_transfer **out) {
    return start_one(request, source, peer, KVF_READ, options, out);
}

kvf_status kvf_transfer_push(const kvf_request *request, uint32_t source, kvf_peer *peer,
                             kvf_transfer **out) {
    return kvf_transfer_push_held(request, source, peer, false, out);
}

kvf_status kvf_transfer_status(const kvf_transfer *transfer) {
    if (!transfer)
        return kvf_fail(KVF_E_INVALID, "transfer: transfer is NULL");
    if (!is_over(transfer))
        return KVF_IN_PROGRESS;
    return transfer->failed ? kvf_fail(transfer->failed, "%s", transfer->detail) : KVF_OK;
}

bool kvf_transfer_was_cut(const kvf_transfer *transfer) {
    return transfer && transfer->cut;
}

/* What was taken before the first batch that is under way is there. */
static uint64_t bytes_there(const transfer_source *source) {
    uint64_t there = source->taken;
    for (uint32_t i = 0; i < source->depth.batches; i++)
        if (source->batches[i].submitted)
            there = kvf_min_u64(there, source->batches[i].begin);
    return there;
}

uint32_t kvf_transfer_layers(const kvf_transfer *transfer) {
    uint32_t layers = UINT32_MAX;
    for (uint32_t i = 0; i < transfer->source_count; i++) {
        const transfer_source *source = &transfer->sources[i];
        const uint32_t whole = source->order && !transfer->failed
                                   ? kvf_layer_order_whole(source->order, bytes_there(source))
                                   : 0;
        layers = whole < layers ? whole : layers;
    }
    return layers;
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
    if (transfer && !is_over(transfer))
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
