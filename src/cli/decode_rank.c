/*
 * A decode rank: plans, connects to its sources, moves requests, and verifies what it has.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "copy_limit.h"
#include "pattern.h"
#include "rank.h"
#include "verify.h"

/* A request in flight. */
typedef struct slot {
    kvf_request *request;
    kvf_transfer *transfer; /* NULL: free */
    uint32_t number;
} slot;

typedef struct decode_rank {
    live_rank base;
    kvf_plan *plan;
    kvf_peer **peers; /* by source */
    slot *slots;
    uint32_t slot_count;
    const char *kind;
} decode_rank;

/* ---- making ready ---------------------------------------------------------------------------- */

static bool make_plan(decode_rank *self) {
    const demo_job *job = self->base.job;
    kvf_plan_options how = {.struct_size = sizeof how,
                            .replicas = job->asked->first_replica ? KVF_REPLICA_FIRST : KVF_REPLICA_SPREAD};
    uint64_t begin = now_ns();
    kvf_status status = kvf_plan_build(self->base.shard, job->all.prefill, &how, &self->plan);
    uint64_t end = now_ns();
    if (status)
        return rank_fail_status(&self->base, status, "planning");
    if ((status = kvf_plan_verify(self->plan)))
        return rank_fail_status(&self->base, status, "verifying the plan");
    plan_figures figures = {kvf_plan_source_count(self->plan), kvf_plan_rule_count(self->plan),
                            kvf_plan_memory_bytes(self->plan), end - begin};
    return rank_send(&self->base, MESSAGE_READY, &figures, sizeof figures);
}

static bool make_slots(decode_rank *self) {
    uint32_t count = self->base.job->asked->in_flight;
    self->slots = calloc(count, sizeof *self->slots);
    self->peers = calloc(kvf_plan_source_count(self->plan) + 1, sizeof(kvf_peer *));
    if (!self->slots || !self->peers)
        return rank_fail(&self->base, "not enough memory");
    self->slot_count = count;
    for (uint32_t i = 0; i < count; i++) {
        kvf_status status = kvf_request_create(self->plan, &self->slots[i].request);
        if (status)
            return rank_fail_status(&self->base, status, "making a request");
    }
    return true;
}

/* The cards of all prefill ranks are in the order of ranks, each after its length. */
static bool connect_sources(decode_rank *self, const message *cards) {
    const unsigned char *at = cards->data;
    uint32_t source = 0;
    for (uint32_t from = 0; from < self->base.job->prefill_ranks; from++) {
        uint64_t bytes;
        memcpy(&bytes, at, sizeof bytes);
        at += sizeof bytes;
        if (kvf_plan_source_rank(self->plan, source) == from) {
            kvf_status status =
                kvf_transport_connect(self->base.transport, at, (size_t)bytes, &self->peers[source]);
            if (status) {
                char what[64];
                (void)snprintf(what, sizeof what, "connecting to prefill rank %u", from);
                return rank_fail_status(&self->base, status, what);
            }
            self->kind = kvf_peer_kind(self->peers[source++]);
        }
        at += bytes;
    }
    return rank_send(&self->base, MESSAGE_CONNECTED, self->kind, strlen(self->kind) + 1);
}

/* ---- moving ---------------------------------------------------------------------------------- */

static bool progress(const decode_rank *self, bool *busy) {
    kvf_status status = kvf_transport_progress(self->base.transport, busy);
    return status ? rank_fail_status(&self->base, status, "moving") : true;
}

static bool start(decode_rank *self, slot *in, uint32_t number) {
    const workload *work = &self->base.job->work;
    in->number = number;
    kvf_status status = kvf_request_set(in->request, workload_request(work, number), work->group_count);
    if (!status)
        status = kvf_transfer_start(in->request, KVF_READ, self->peers, &in->transfer);
    if (!status)
        return true;
    char what[64];
    (void)snprintf(what, sizeof what, "starting request %u", number);
    return rank_fail_status(&self->base, status, what);
}

/* Tells each source that this request's blocks are free as far as this rank goes. */
static bool notify_sources(const decode_rank *self, uint32_t number) {
    for (uint32_t source = 0; source < kvf_plan_source_count(self->plan); source++) {
        kvf_status status;
        while ((status = kvf_transport_notify(self->peers[source], &number, sizeof number)) == KVF_E_AGAIN) {
            bool busy;
            if (!progress(self, &busy))
                return false;
        }
        if (status)
            return rank_fail_status(&self->base, status, "notifying a source");
    }
    return true;
}

/* Takes a finished transfer out of its slot. */
static bool finish(decode_rank *self, slot *in, kvf_status status, move_figures *figures) {
    uint64_t bytes, runs;
    kvf_transfer_counts(in->transfer, &bytes, &runs);
    if (status) {
        char what[64];
        (void)snprintf(what, sizeof what, "request %u, after %llu bytes", in->number,
                       (unsigned long long)bytes);
        return rank_fail_status(&self->base, status, what);
    }
    kvf_transfer_free(in->transfer);
    in->transfer = NULL;
    figures->bytes += bytes;
    figures->runs += runs;
    return notify_sources(self, in->number);
}

/* How a round stands. */
typedef struct round_state {
    uint32_t next, finished; /* requests */
    bool turned;             /* something finished or was started in the last turn */
    uint64_t seen_bytes;     /* moved when progress was last told */
    move_figures figures;
} round_state;

/* Looks at all slots once: frees what has finished, starts what is next. */
static bool turn(decode_rank *self, round_state *at) {
    uint32_t count = self->base.job->work.request_count;
    at->turned = false;
    for (uint32_t i = 0; i < self->slot_count; i++) {
        slot *in = &self->slots[i];
        kvf_status status = in->transfer ? kvf_transfer_status(in->transfer) : KVF_IN_PROGRESS;
        if (status != KVF_IN_PROGRESS) {
            if (!finish(self, in, status, &at->figures))
                return false;
            at->turned = true;
            at->finished++;
        }
        if (!in->transfer && at->next < count) {
            if (!start(self, in, at->next++))
                return false;
            at->turned = true;
        }
    }
    return true;
}

/* As long as bytes arrive, this rank is not silent. */
static void tell_progress(decode_rank *self, round_state *at) {
    uint64_t bytes = at->figures.bytes;
    for (uint32_t i = 0; i < self->slot_count; i++) {
        uint64_t arrived = 0;
        if (self->slots[i].transfer)
            kvf_transfer_counts(self->slots[i].transfer, &arrived, NULL);
        bytes += arrived;
    }
    if (bytes != at->seen_bytes)
        rank_progress(&self->base, at->finished, self->base.job->work.request_count);
    at->seen_bytes = bytes;
}

static bool move_all(decode_rank *self) {
    uint32_t count = self->base.job->work.request_count;
    round_state at = {.figures = {.begin_ns = now_ns()}};
    if (kvf_plan_source_count(self->plan) == 0)
        at.finished = count;
    while (at.finished < count) {
        bool busy, message_waits;
        if (!progress(self, &busy) || !turn(self, &at))
            return false;
        tell_progress(self, &at);
        if (at.next > self->slot_count / 2)
            rank_suffer_fault(&self->base);
        if (busy || at.turned)
            continue;
        rank_wait(&self->base, 100, &message_waits);
        if (message_waits) /* nothing is said now but that the coordinator is gone */
            return false;
    }
    at.figures.end_ns = now_ns();
    return rank_send(&self->base, MESSAGE_MOVED, &at.figures, sizeof at.figures);
}

/* ---- the rest of its life -------------------------------------------------------------------- */

/* Lets go of the sources' memory; the own memory is needed for measuring, so the transport stays. */
static bool part(decode_rank *self) {
    for (uint32_t source = 0; source < kvf_plan_source_count(self->plan); source++) {
        kvf_peer_close(self->peers[source]);
        self->peers[source] = NULL;
    }
    bool busy = self->base.transport != NULL;
    while (busy)
        if (!progress(self, &busy))
            return false;
    return rank_send(&self->base, MESSAGE_PARTED, NULL, 0);
}

static bool verify(decode_rank *self) {
    verdict found;
    verify_memory(&self->base, &found);
    return rank_send(&self->base, MESSAGE_VERIFIED, &found, sizeof found);
}

static bool copy(decode_rank *self) {
    copy_figures figures;
    const char *method = copy_limit_method(self->base.job->asked, self->kind);
    return copy_limit_measure(&self->base, self->plan, self->slots[0].request, method, &figures) &&
           rank_send(&self->base, MESSAGE_COPIED, &figures, sizeof figures);
}

/* Returns false when the rank is to end. */
static bool obey(decode_rank *self, const message *order) {
    switch (order->type) {
    case MESSAGE_CONNECT:
        return connect_sources(self, order);
    case MESSAGE_MOVE:
        return move_all(self);
    case MESSAGE_VERIFY:
        return verify(self);
    case MESSAGE_PART:
        return part(self);
    case MESSAGE_PREPARE:
        copy_limit_prepare(&self->base);
        return rank_send(&self->base, MESSAGE_PREPARED, NULL, 0);
    case MESSAGE_COPY:
        return copy(self);
    default:
        return false; /* MESSAGE_QUIT */
    }
}

static void serve(decode_rank *self) {
    for (;;) {
        bool message_waits, busy = self->base.transport != NULL;
        while (busy)
            if (!progress(self, &busy))
                return;
        rank_wait(&self->base, -1, &message_waits);
        message order;
        if (message_waits && (!channel_receive(&self->base.seat->coordinator, &order) || !obey(self, &order)))
            return;
    }
}

int run_decode_rank(rank_seat *seat) {
    decode_rank self = {.kind = ""};
    kvf_transport_options callbacks = {.context = &self};
    if (rank_open(&self.base, seat, &callbacks, PATTERN_UNUSED_DECODE) && make_plan(&self) &&
        make_slots(&self))
        serve(&self);
    for (uint32_t i = 0; i < self.slot_count; i++)
        kvf_transfer_free(self.slots[i].transfer);
    rank_close_transport(&self.base);
    for (uint32_t i = 0; i < self.slot_count; i++)
        kvf_request_free(self.slots[i].request);
    rank_close(&self.base);
    free(self.slots);
    free(self.peers);
    kvf_plan_free(self.plan);
    return EXIT_DONE;
}
