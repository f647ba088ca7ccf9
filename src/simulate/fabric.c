#include "simulate/fabric.h"

#include <math.h>

#include "agent/agent.h"
#include "request/request.h"

typedef struct flow flow;

/* One direction of a rank's link. */
typedef struct port {
    flow *flows;
    uint32_t count;
    uint64_t busy_since, busy_ns; /* while it has flows */
} port;

struct kvf_modelled_endpoint {
    UT_hash_handle hh;
    uint64_t number;
    kvf_host *host;
    kvf_transport *transport;
    flow *links;    /* made by us */
    flow *comers;   /* made by others to us */
    flow *restless; /* of `links`: progress() has something to do */
    port in, out;
};

/* A connection, and the flow of its batches, one after the other: a batch is under way while `first` is not NULL. */
struct flow {
    kvf_modelled_endpoint *self;
    kvf_modelled_endpoint *remote; /* NULL: it is gone */
    uint64_t generation;
    bool is_restless;
    bool given_up;      /* the peer was not reached for too long */
    kvf_peer *peer;     /* NULL after its loss was reported */
    kvf_batch *oldest;  /* that was not ended */
    kvf_batch *current; /* that moves, or is about to; NULL: those from `oldest` on have moved */
    kvf_happening step; /* when the current batch begins to flow, and when it has moved */
    double left_ns;     /* of the current batch, on a link of its own */
    double rate;        /* of a link: up to 1; 0: it does not flow yet */
    uint64_t settled;   /* when `left_ns` was right */
    port *from, *to;    /* while it flows */
    flow *prev_from, *next_from, *prev_to, *next_to, *prev, *next, *prev_comer, *next_comer, *prev_restless,
        *next_restless;
};

/* What became of a batch, in kvf_batch.next, which is the fabric's. */
enum { BATCH_WAITS, BATCH_MOVED, BATCH_LEFT };

static kvf_world *world_of(const flow *f) {
    return f->self->host->world;
}

static kvf_modelled_endpoint *find(kvf_world *world, uint64_t number) {
    kvf_modelled_endpoint *endpoint = NULL;
    HASH_FIND(hh, world->endpoints, &number, sizeof number, endpoint);
    return endpoint;
}

/* Why the remote memory cannot be used; NULL if it can. */
static const char *find_loss(const flow *f) {
    if (!f->remote)
        return "the peer's process has ended";
    if (f->given_up)
        return "the peer's host does not answer";
    return f->generation < kvf_transport_oldest(f->remote->transport)
               ? "the card is for an older generation of the peer's memory: a new card is needed"
               : NULL;
}

/* Lets progress() look at it. */
static void stir(flow *f) {
    if (!f->is_restless)
        DL_APPEND2(f->self->restless, f, prev_restless, next_restless);
    f->is_restless = true;
    kvf_host_wake(f->self->host);
}

static void calm(flow *f) {
    if (f->is_restless)
        DL_DELETE2(f->self->restless, f, prev_restless, next_restless);
    f->is_restless = false;
}

/* ---- sharing links --------------------------------------------------------------------------- */

/* Counts what has flowed since the last time. */
static void settle(flow *f) {
    const uint64_t now = world_of(f)->line.now;
    f->left_ns = fmax(0, f->left_ns - f->rate * (double)(now - f->settled));
    f->settled = now;
}

static void reckon(flow *f) {
    kvf_timeline *line = &world_of(f)->line;
    settle(f);
    f->rate = 1.0 / (double)kvf_max_u64(f->from->count, f->to->count);
    kvf_happening_set(line, &f->step, line->now + (uint64_t)ceil(f->left_ns / f->rate));
}

/* The number of flows at these ports has changed. */
static void reckon_all(const port *from, const port *to) {
    flow *f;
    DL_FOREACH2(from->flows, f, next_from) {
        reckon(f);
    }
    DL_FOREACH2(to->flows, f, next_to) {
        if (f->from != from)
            reckon(f);
    }
}

static void enter_port(port *p, uint64_t now) {
    p->busy_since = p->count++ == 0 ? now : p->busy_since;
}

static void leave_port(port *p, uint64_t now) {
    p->busy_ns += --p->count == 0 ? now - p->busy_since : 0;
}

static void begin_flowing(flow *f, port *from, port *to) {
    const uint64_t now = world_of(f)->line.now;
    f->from = from;
    f->to = to;
    f->settled = now;
    f->rate = 0;
    DL_APPEND2(from->flows, f, prev_from, next_from);
    DL_APPEND2(to->flows, f, prev_to, next_to);
    enter_port(from, now);
    enter_port(to, now);
    reckon_all(from, to);
}

static void stop_flowing(flow *f) {
    const uint64_t now = world_of(f)->line.now;
    port *from = f->from, *to = f->to;
    if (!from)
        return;
    DL_DELETE2(from->flows, f, prev_from, next_from);
    DL_DELETE2(to->flows, f, prev_to, next_to);
    leave_port(from, now);
    leave_port(to, now);
    f->from = f->to = NULL;
    reckon_all(from, to);
}

uint64_t kvf_host_busy_ns(const kvf_host *host) {
    const kvf_modelled_endpoint *e = host->endpoint;
    const uint64_t now = host->world->line.now;
    return !e ? 0
              : kvf_max_u64(e->in.busy_ns + (e->in.count ? now - e->in.busy_since : 0),
                            e->out.busy_ns + (e->out.count ? now - e->out.busy_since : 0));
}

/* ---- batches --------------------------------------------------------------------------------- */

static void load(flow *f) {
    const kvf_world *world = world_of(f);
    f->left_ns = (double)f->current->bytes * world->byte_ns + (double)f->current->count * world->run_ns;
}

/* The current batch has moved, or was left: goes on with the next one, and lets the agent end this one. */
static void advance(flow *f, size_t became) {
    f->current->next = became;
    while ((f->current = f->current->following) && f->current->cancelled)
        f->current->next = BATCH_LEFT;
    if (f->current)
        load(f);
    stir(f);
}

static void count_moved(const flow *f) {
    kvf_world *world = world_of(f);
    const kvf_batch *batch = f->current;
    world->bytes += batch->bytes;
    world->runs += batch->count;
    if (world->moved)
        world->moved(f->self->host, f->remote->host, batch->runs, batch->count, batch->bytes);
}

/* Whether the way there is closed. */
static bool is_cut(const flow *f) {
    return f->remote && !kvf_hosts_reach(f->self->host, f->remote->host);
}

/* The current batch flows when a word has gone there and back. */
static void set_out(flow *f) {
    kvf_world *world = world_of(f);
    const uint64_t after = is_cut(f) ? KVF_FABRIC_REPEATS_NS : 2 * world->latency_ns;
    kvf_happening_set(&world->line, &f->step, world->line.now + after);
}

static void step(kvf_happening *happening) {
    flow *f = (flow *)((char *)happening - offsetof(flow, step));
    if (is_cut(f)) {
        f->given_up = true;
        stir(f);
    } else if (!f->from) {
        const bool reads = f->current->direction == KVF_READ;
        begin_flowing(f, reads ? &f->remote->out : &f->self->out, reads ? &f->self->in : &f->remote->in);
    } else {
        settle(f);
        count_moved(f);
        advance(f, BATCH_MOVED);
        if (f->current)
            reckon(f);
        else
            stop_flowing(f);
    }
}

static kvf_status submit(void *at, kvf_batch *batch) {
    flow *f = at;
    batch->next = BATCH_WAITS;
    f->oldest = f->oldest ? f->oldest : batch;
    if (!f->current) { /* the first of several waits for the way there and back; the others follow it at once */
        f->current = batch;
        load(f);
        set_out(f);
    }
    return KVF_OK;
}

static void cancel(void *at, kvf_batch *batch) {
    flow *f = at;
    if (batch != f->current)
        return; /* advance() passes over it */
    advance(f, BATCH_LEFT);
    if (!f->current) {
        kvf_happening_set(&world_of(f)->line, &f->step, UINT64_MAX);
        stop_flowing(f);
    } else if (f->from) {
        reckon(f);
    }
}

/* The way between its hosts has closed, or opened. */
static void turn(flow *f) {
    if (!f->current || !f->remote || f->remote->host->owner == f->self->host->owner)
        return;
    if (f->from) {
        settle(f);
        stop_flowing(f);
    }
    set_out(f);
}

void kvf_fabric_turn(kvf_host *host) {
    flow *f;
    DL_FOREACH(host->endpoint->links, f) {
        turn(f);
    }
    DL_FOREACH2(host->endpoint->comers, f, next_comer) {
        turn(f);
    }
}

/* ---- the endpoint ---------------------------------------------------------------------------- */

static kvf_status open_endpoint(kvf_transport *transport, const kvf_transport_options *options, void **out) {
    kvf_world *world = ((const kvf_agent *)options->context)->clock.context;
    kvf_modelled_endpoint *made = kvf_alloc0(1, sizeof *made);
    if (!made)
        return kvf_nomem("a simulated endpoint");
    made->number = ++world->last_endpoint;
    made->host = world->opening;
    made->transport = transport;
    HASH_ADD(hh, world->endpoints, number, sizeof made->number, made);
    if (!made->hh.tbl) {
        kvf_free(made);
        return kvf_nomem("a simulated endpoint");
    }
    made->host->endpoint = made;
    *out = made;
    return KVF_OK;
}

/* Ends what flows, for good. */
static void halt(flow *f) {
    kvf_happening_set(&world_of(f)->line, &f->step, UINT64_MAX);
    stop_flowing(f);
    stir(f);
}

static void close_endpoint(void *at) {
    kvf_modelled_endpoint *self = at;
    flow *f, *next;
    DL_FOREACH_SAFE2(self->comers, f, next, next_comer) {
        halt(f);
        f->remote = NULL;
    }
    HASH_DEL(self->host->world->endpoints, self);
    self->host->endpoint = NULL;
    kvf_free(self);
}

static kvf_status register_region(void *at, uint32_t region, const kvf_memory *memory) {
    (void)at, (void)region, (void)memory;
    return KVF_OK; /* the front's table of regions holds all that is needed */
}

static kvf_status unregister_region(void *at, uint32_t region) {
    flow *f;
    (void)region;
    DL_FOREACH2(((kvf_modelled_endpoint *)at)->comers, f, next_comer) {
        halt(f); /* it was made by a card of an older generation */
    }
    return KVF_OK;
}

static kvf_status card(void *at, kvf_buffer *out) {
    return kvf_buffer_add(out, &((kvf_modelled_endpoint *)at)->number, sizeof(uint64_t));
}

static kvf_status connect_to(void *at, const void *bytes, size_t size, kvf_peer *peer, void **out) {
    uint64_t number;
    flow *f = kvf_alloc0(1, sizeof *f);
    if (!f)
        return kvf_nomem("a simulated peer");
    KVF_ASSERT(size == sizeof number);
    memcpy(&number, bytes, sizeof number);
    *f = (flow){.self = at, .peer = peer, .generation = kvf_peer_generation(peer)};
    f->remote = find(world_of(f), number);
    const char *loss = find_loss(f);
    kvf_status status = loss ? kvf_fail(f->remote ? KVF_E_NOT_REGISTERED : KVF_E_PEER_LOST, "%s", loss)
                             : kvf_happening_make(&world_of(f)->line, &f->step, step);
    if (status) {
        kvf_free(f);
        return status;
    }
    DL_APPEND(f->self->links, f);
    DL_APPEND2(f->remote->comers, f, prev_comer, next_comer);
    *out = f;
    return KVF_OK;
}

static void disconnect(void *at) {
    flow *f = at;
    stop_flowing(f);
    kvf_happening_drop(&world_of(f)->line, &f->step);
    calm(f);
    if (f->remote)
        DL_DELETE2(f->remote->comers, f, prev_comer, next_comer);
    DL_DELETE(f->self->links, f);
    kvf_free(f);
}

static kvf_status notify(void *at, const void *data, size_t bytes) {
    (void)at, (void)data, (void)bytes;
    return kvf_fail(KVF_E_UNSUPPORTED, "a simulation has no notifications: its agents have no stage");
}

static void end_moved(flow *f) {
    while (f->oldest && f->oldest->next != BATCH_WAITS) {
        kvf_batch *batch = f->oldest;
        f->oldest = batch->following;
        if (batch->next == BATCH_LEFT)
            kvf_batch_fail(batch, KVF_E_CANCELLED, KVF_REASON_CANCELLED);
        kvf_batch_end(batch);
    }
}

static kvf_status progress(void *at, bool *busy) {
    kvf_modelled_endpoint *self = at;
    flow *f;
    *busy = false;
    while ((f = self->restless)) {
        calm(f);
        end_moved(f);
        const char *loss = f->peer ? find_loss(f) : NULL;
        if (!loss)
            continue;
        kvf_peer *peer = f->peer;
        kvf_happening_set(&world_of(f)->line, &f->step, UINT64_MAX);
        stop_flowing(f);
        f->peer = NULL;
        f->oldest = f->current = NULL;
        kvf_peer_lost(peer, loss);
    }
    return KVF_OK;
}

static uint64_t late_ns(const void *at) {
    (void)at;
    return KVF_FABRIC_REPEATS_NS;
}

static const unsigned char *place(const void *link) {
    static const unsigned char unknown[KVF_PLACE_BYTES];
    (void)link;
    return unknown;
}

const kvf_fabric kvf_modelled_fabric = {
    .kind = {.name = "modelled",
             .reach = KVF_REACH_NETWORK,
             .memory_kinds = 1u << KVF_MEMORY_HOST,
             .directions = 1u << KVF_READ | 1u << KVF_WRITE,
             .one_sided = true,
             .lists = true,
             .in_flight = 3,
             .cost = {.ns_per_run = 100, .ns_per_byte = 0.02, .ns_per_source = 20000}},
    .open = open_endpoint,
    .register_region = register_region,
    .unregister_region = unregister_region,
    .card = card,
    .connect = connect_to,
    .submit = submit,
    .cancel = cancel,
    .notify = notify,
    .place = place,
    .disconnect = disconnect,
    .late_ns = late_ns,
    .progress = progress,
    .close = close_endpoint,
    .unwatched = true,
};
