#include "faulty_fabric.h"

#include <stdatomic.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/watch.h"
#include "transport/transport.h"

#define SCHEDULE "the schedule says so"

/* ---- the schedule ---------------------------------------------------------------------------- */

static struct {
    faulty_options options;
    _Atomic bool installed;
    _Atomic uint64_t drawn;
    _Atomic uint64_t counts[FAULTY_FAULTS];
} schedule;

static uint64_t draw(void) {
    uint64_t x = schedule.options.seed * 0xd1342543de82ef95u + atomic_fetch_add(&schedule.drawn, 1);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static bool happens(faulty_fault fault) {
    bool now = atomic_load(&schedule.installed) && draw() % 1000 < schedule.options.per_mille[fault];
    if (now)
        atomic_fetch_add(&schedule.counts[fault], 1);
    return now;
}

static uint32_t draw_turns(void) {
    uint32_t most = schedule.options.turns ? schedule.options.turns : 1;
    return 1 + (uint32_t)(draw() % most);
}

/* ---- the fabric ------------------------------------------------------------------------------ */

typedef struct faulty_endpoint faulty_endpoint;
typedef struct faulty_link faulty_link;

/* A batch on its way: waiting to start, moving, or waiting to end. */
typedef struct faulty_job {
    faulty_link *link;
    kvf_batch *batch;
    enum { JOB_WAITS, JOB_MOVES, JOB_ENDS } state;
    uint32_t turns; /* left to wait */
    kvf_operation operation;
    kvf_status status; /* that the batch ends with */
    char why[KVF_REASON_BYTES];
    bool half_moved, all_moved, late_end, deaf;
    struct faulty_job *next;
} faulty_job;

struct faulty_link {
    faulty_endpoint *endpoint;
    kvf_peer *outer; /* NULL once it was reported lost */
    kvf_peer *inner; /* NULL once it is closed */
    bool leaving;    /* the front ends its batches, so jobs end without a report */
    bool lose;       /* to be reported lost in the next turn */
    bool lives;      /* it has refused us */
    char why[KVF_REASON_BYTES];
    faulty_job *jobs;
    struct faulty_link *next;
};

struct faulty_endpoint {
    kvf_transport *outer, *inner;
    int wake_fd; /* in the set of the transport below */
    bool awake;
    faulty_link *links;
};

/* The kind of inner transport for the endpoint that is being opened. */
static _Thread_local const char *opening_kind;

static void wake(faulty_endpoint *endpoint, bool on) {
    uint64_t count = 1;
    if (endpoint->awake == on)
        return;
    ssize_t done =
        on ? write(endpoint->wake_fd, &count, sizeof count) : read(endpoint->wake_fd, &count, sizeof count);
    endpoint->awake = done == (ssize_t)sizeof count ? on : endpoint->awake;
}

static void lose(faulty_link *link, bool lives, const char *why) {
    link->lose = true;
    link->lives = lives;
    (void)snprintf(link->why, sizeof link->why, "%s", why);
}

static void on_notify(void *context, kvf_transport *inner, const char *sender, const void *data,
                      size_t bytes) {
    (void)inner;
    (void)kvf_deliver(((faulty_endpoint *)context)->outer, sender, data, bytes);
}

static void on_peer_lost(void *context, kvf_transport *inner, kvf_peer *peer, const char *detail) {
    (void)inner;
    faulty_link *link = ((faulty_endpoint *)context)->links;
    while (link && link->inner != peer)
        link = link->next;
    if (link)
        lose(link, kvf_peer_lives(peer), detail);
}

/* ---- opening and closing --------------------------------------------------------------------- */

static void faulty_close(void *self) {
    faulty_endpoint *endpoint = self;
    kvf_transport_close(endpoint->inner);
    if (endpoint->wake_fd >= 0)
        (void)close(endpoint->wake_fd);
    kvf_free(endpoint);
}

static kvf_status faulty_open(kvf_transport *transport, const kvf_transport_options *options, void **out) {
    faulty_endpoint *endpoint = kvf_alloc0(1, sizeof *endpoint);
    if (!endpoint)
        return kvf_nomem("an endpoint");
    kvf_transport_options inner = *options;
    inner.struct_size = sizeof inner;
    inner.on_notify = on_notify;
    inner.on_peer_lost = on_peer_lost;
    inner.context = endpoint;
    endpoint->outer = transport;
    endpoint->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    kvf_status status = kvf_transport_open(opening_kind, &inner, &endpoint->inner);
    if (!status) /* one epoll less: Linux allows five, one in another */
        status = kvf_watch_add(kvf_transport_event_fd(endpoint->inner), endpoint->wake_fd, NULL);
    if (status)
        faulty_close(endpoint);
    else
        *out = endpoint;
    return status;
}

static kvf_status faulty_allocate(void *self, kvf_memory_kind kind, uint32_t device, uint64_t bytes,
                                  void **out) {
    if (kind == KVF_MEMORY_HOST)
        return kvf_transport_allocate(((faulty_endpoint *)self)->inner, kind, device, bytes, out);
    const kvf_memory made = schedule.options.devices->allocate(device, bytes);
    *out = made.address;
    return made.address ? KVF_OK : kvf_fail(KVF_E_NOMEM, "the device has no memory left");
}

/* Fills the places of regions that this fabric is not shown: the one below has its regions in order. */
static kvf_status fill_places(kvf_transport *inner, uint32_t region) {
    static unsigned char nothing[64];
    kvf_status status = KVF_OK;
    uint32_t known;
    for ((void)kvf_transport_memory(inner, &known); known < region && !status; known++) {
        const kvf_memory place = {
            .struct_size = sizeof place, .address = nothing + known, .bytes = 1, .withheld = true};
        status = known < sizeof nothing ? kvf_transport_register_region(inner, known, &place)
                                        : kvf_fail(KVF_E_LIMIT, "region %u of a faulty endpoint", region);
    }
    return status;
}

static kvf_status faulty_register(void *self, uint32_t region, const kvf_memory *memory) {
    kvf_transport *inner = ((faulty_endpoint *)self)->inner;
    kvf_memory seen = *memory;
    kvf_status status = fill_places(inner, region);
    if (memory->kind != KVF_MEMORY_HOST)
        seen = (kvf_memory){.struct_size = sizeof seen,
                            .address = schedule.options.devices->look((uint64_t)(uintptr_t)memory->address),
                            .bytes = memory->bytes};
    return status ? status : kvf_transport_register_region(inner, region, &seen);
}

static kvf_status faulty_unregister(void *self, uint32_t region) {
    return kvf_transport_unregister_region(((faulty_endpoint *)self)->inner, region);
}

static kvf_status faulty_card(void *self, kvf_buffer *out) {
    const void *card;
    size_t bytes;
    kvf_status status = kvf_transport_export(((faulty_endpoint *)self)->inner, &card, &bytes);
    return status ? status : kvf_buffer_add(out, card, bytes);
}

static int faulty_event_fd(void *self) {
    return kvf_transport_event_fd(((faulty_endpoint *)self)->inner);
}

/* ---- links ----------------------------------------------------------------------------------- */

static kvf_status faulty_connect(void *self, const void *card, size_t bytes, kvf_peer *peer, void **out) {
    faulty_endpoint *endpoint = self;
    if (happens(FAULTY_NOT_CONNECTED))
        return kvf_fail(KVF_E_IO, "%s", SCHEDULE);
    faulty_link *link = kvf_alloc0(1, sizeof *link);
    if (!link)
        return kvf_nomem("a peer");
    kvf_status status = kvf_transport_connect(endpoint->inner, card, bytes, &link->inner);
    if (status) {
        kvf_free(link);
        return status;
    }
    link->endpoint = endpoint;
    link->outer = peer;
    link->next = endpoint->links;
    endpoint->links = link;
    *out = link;
    return KVF_OK;
}

/* Ends everything of the link that touches memory; the front ends the batches. */
static void leave(faulty_link *link) {
    link->leaving = true;
    kvf_peer *inner = link->inner;
    link->inner = NULL;
    kvf_peer_close(inner);
    for (faulty_job *job = link->jobs, *next; job; job = next) {
        next = job->next;
        kvf_free(job);
    }
    link->jobs = NULL;
}

static void faulty_disconnect(void *at) {
    faulty_link *link = at;
    leave(link);
    faulty_link **place = &link->endpoint->links;
    while (*place != link)
        place = &(*place)->next;
    *place = link->next;
    kvf_free(link);
}

static kvf_status faulty_notify(void *at, const void *data, size_t bytes) {
    faulty_link *link = at;
    if (!link->inner)
        return kvf_fail(KVF_E_PEER_LOST, "notify: the peer is gone");
    if (happens(FAULTY_NOT_NOTIFIED)) {
        wake(link->endpoint, true); /* the caller may try again */
        return kvf_fail(KVF_E_AGAIN, "%s", SCHEDULE);
    }
    return kvf_transport_notify(link->inner, data, bytes);
}

/* Without this fault the question draws no number. */
static bool faulty_is_behind(const void *at) {
    (void)at;
    return schedule.options.per_mille[FAULTY_BEHIND] > 0 && happens(FAULTY_BEHIND);
}

/* The inner transport decides, unless the schedule does. Without this fault a fence draws no number. */
static kvf_status faulty_fence(void *self, const void *card, size_t bytes) {
    kvf_status status = kvf_transport_fence(((faulty_endpoint *)self)->inner, card, bytes);
    bool inside = schedule.options.per_mille[FAULTY_STILL_INSIDE] > 0 && happens(FAULTY_STILL_INSIDE);
    return inside ? kvf_fail(KVF_E_AGAIN, "%s", SCHEDULE) : status;
}

static kvf_status faulty_admit(void *self, const void *card, size_t bytes) {
    return kvf_transport_admit(((faulty_endpoint *)self)->inner, card, bytes);
}

/* ---- batches --------------------------------------------------------------------------------- */

static void end_job(faulty_job *job, kvf_status status, const char *why) {
    job->state = JOB_ENDS;
    job->status = status;
    (void)snprintf(job->why, sizeof job->why, "%s", why);
    job->turns = job->late_end ? draw_turns() : 0;
    wake(job->link->endpoint, true);
}

static void on_done(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    faulty_job *job = context;
    (void)operation;
    if (job->link->leaving)
        return;
    if (!status && (job->half_moved || job->all_moved))
        end_job(job, KVF_E_IO, SCHEDULE);
    else
        end_job(job, status, detail);
}

static void start_job(faulty_job *job) {
    const kvf_batch *batch = job->batch;
    size_t count = job->half_moved ? batch->count / 2 : batch->count;
    job->state = JOB_MOVES;
    kvf_status status = kvf_transport_submit(job->link->inner, batch->direction, batch->runs, count, on_done,
                                             job, &job->operation);
    if (status)
        end_job(job, status, kvf_error_detail());
}

static kvf_status faulty_submit(void *at, kvf_batch *batch) {
    faulty_link *link = at;
    if (happens(FAULTY_REFUSED))
        return kvf_fail(KVF_E_IO, "%s", SCHEDULE);
    faulty_job *job = kvf_alloc0(1, sizeof *job);
    if (!job)
        return kvf_nomem("an operation");
    *job = (faulty_job){.link = link, .batch = batch, .state = JOB_WAITS};
    faulty_job **place = &link->jobs;
    while (*place)
        place = &(*place)->next;
    *place = job;
    job->half_moved = happens(FAULTY_HALF_MOVED);
    job->all_moved = happens(FAULTY_ALL_MOVED);
    job->late_end = happens(FAULTY_LATE_END);
    job->deaf = happens(FAULTY_DEAF);
    if (happens(FAULTY_PEER_LOST))
        lose(link, false, SCHEDULE);
    if (happens(FAULTY_NOTHING_MOVED))
        end_job(job, KVF_E_IO, SCHEDULE);
    else if (happens(FAULTY_LATE_START))
        job->turns = draw_turns();
    else
        start_job(job);
    if (job->state == JOB_WAITS || link->lose)
        wake(link->endpoint, true);
    return KVF_OK;
}

static void faulty_cancel(void *at, kvf_batch *batch) {
    const faulty_link *link = at;
    faulty_job *job = link->jobs;
    while (job && job->batch != batch)
        job = job->next;
    if (!job || job->deaf)
        return;
    if (job->state == JOB_WAITS)
        end_job(job, KVF_E_CANCELLED, KVF_REASON_CANCELLED);
    else if (job->state == JOB_MOVES)
        (void)kvf_transport_cancel(link->endpoint->inner, job->operation);
}

/* ---- progress -------------------------------------------------------------------------------- */

/* True if a job waits for another turn. */
static bool work_on_jobs(faulty_link *link) {
    bool waiting = false;
    for (faulty_job **place = &link->jobs; *place;) {
        faulty_job *job = *place;
        if (job->state != JOB_MOVES && job->turns > 0) {
            job->turns--;
            waiting = true;
        } else if (job->state == JOB_WAITS) {
            start_job(job);
            waiting = true;
        }
        if (job->state == JOB_ENDS && job->turns == 0) {
            *place = job->next;
            job->batch->next = job->batch->count;
            if (job->status)
                kvf_batch_fail(job->batch, job->status, job->why);
            kvf_batch_end(job->batch);
            kvf_free(job);
        } else {
            place = &job->next;
        }
    }
    return waiting;
}

static kvf_status faulty_progress(void *self, bool *busy) {
    faulty_endpoint *endpoint = self;
    bool waiting = false;
    kvf_status status = kvf_transport_progress(endpoint->inner, busy);
    for (faulty_link *link = endpoint->links; link; link = link->next) {
        kvf_peer *outer = link->outer;
        if (link->lose && outer) {
            leave(link);
            link->outer = NULL;
            (link->lives ? kvf_peer_refused : kvf_peer_lost)(outer, link->why);
        }
        waiting = work_on_jobs(link) || waiting;
    }
    wake(endpoint, waiting);
    *busy = *busy || waiting;
    return status;
}

static uint64_t faulty_late_ns(const void *self) {
    (void)self;
    return schedule.options.late_ns;
}

static const kvf_fabric plain = {
    .kind =
        {
            .name = "faulty",
            .reach = KVF_REACH_NETWORK,
            .memory_kinds = 1u << KVF_MEMORY_HOST,
            .allocates = 1u << KVF_MEMORY_HOST,
            .directions = 1u << KVF_READ | 1u << KVF_WRITE,
            .one_sided = true,
            .served = true,
            .fences = true,
            .in_flight = 1,
            .cost = {.ns_per_run = 1, .ns_per_byte = 1, .ns_per_source = 1},
        },
    .open = faulty_open,
    .allocate = faulty_allocate,
    .register_region = faulty_register,
    .unregister_region = faulty_unregister,
    .card = faulty_card,
    .connect = faulty_connect,
    .submit = faulty_submit,
    .cancel = faulty_cancel,
    .notify = faulty_notify,
    .is_behind = faulty_is_behind,
    .disconnect = faulty_disconnect,
    .fence = faulty_fence,
    .admit = faulty_admit,
    .progress = faulty_progress,
    .event_fd = faulty_event_fd,
    .close = faulty_close,
};

/* ---- installing ------------------------------------------------------------------------------ */

static kvf_fabric faulty;

const kvf_fabric *faulty_fabric(const char *kind) {
    opening_kind = kind;
    return atomic_load(&schedule.installed) ? &faulty : NULL;
}

void faulty_install(const faulty_options *options) {
    schedule.options = *options;
    faulty = plain;
    if (options->devices) {
        faulty.kind.memory_kinds |= 1u << KVF_MEMORY_CUDA;
        faulty.kind.allocates |= options->devices->allocate ? 1u << KVF_MEMORY_CUDA : 0;
    }
    if (options->late_ns) {
        faulty.kind.fences = false;
        faulty.fence = NULL;
        faulty.admit = NULL;
        faulty.late_ns = faulty_late_ns;
    }
    atomic_store(&schedule.drawn, 0);
    for (int i = 0; i < FAULTY_FAULTS; i++)
        atomic_store(&schedule.counts[i], 0);
    atomic_store(&schedule.installed, true);
}

void faulty_remove(void) {
    atomic_store(&schedule.installed, false);
}

uint64_t faulty_count(faulty_fault fault) {
    return atomic_load(&schedule.counts[fault]);
}
