/*
 * A decode rank: meets the prefill engine, pulls requests or expects them, and verifies its memory.
 */
#include <stdlib.h>
#include <string.h>

#include "broken.h"
#include "copy_limit.h"
#include "pattern.h"
#include "rank.h"
#include "verify.h"

enum { BROKEN_PULL_S = 60 }; /* about how long the broken pull would take if its producer lived */

typedef struct decode_rank {
    live_rank base; /* first, see rank_serve() */
    kvf_plan *plan; /* to be proved, and to measure the machine's limit */
    kvf_request *request;
    kvf_group_steps *groups;
    char endpoint[256]; /* of the prefill engine */
    uint32_t round, next, finished;
    move_figures figures;
    broken_request broken;
} decode_rank;

/* Plans, unless the prefill engine is laid out in another process (fetch): then only the agent plans. */
static bool make_plan(decode_rank *self) {
    const demo_job *job = self->base.job;
    const kvf_plan_options how = {.struct_size = sizeof how, .convert = job->all.convert};
    kvf_status status = KVF_OK;
    if (job->all.prefill)
        status = kvf_plan_build(self->base.shard, job->all.prefill, &how, &self->plan);
    if (!status && self->plan && !kvf_plan_converts(self->plan))
        status = kvf_plan_verify(self->plan);
    if (!status && self->plan)
        status = kvf_request_create(self->plan, &self->request);
    if (status)
        return rank_fail_status(&self->base, status, "planning");
    self->groups = calloc(job->work.group_count, sizeof *self->groups);
    if (!self->groups)
        return rank_fail(&self->base, "not enough memory");
    return rank_send(&self->base, MESSAGE_READY, NULL, 0);
}

static kvf_contact prefill_engine(const decode_rank *self) {
    kvf_contact out = self->base.job->producer;
    out.endpoint = self->endpoint;
    return out;
}

static bool connect_engine(decode_rank *self, const message *endpoint) {
    if (endpoint->bytes > sizeof self->endpoint)
        return rank_fail(&self->base, "an endpoint of %zu bytes", endpoint->bytes);
    memcpy(self->endpoint, endpoint->data, endpoint->bytes);
    kvf_contact contact = prefill_engine(self);
    kvf_status status = kvf_agent_connect(self->base.agent, &contact, self->base.job->patience_ns, NULL);
    return status ? rank_fail_status(&self->base, status, "connecting") : true;
}

/* ---- moving ---------------------------------------------------------------------------------- */

static bool ask(decode_rank *self, const char *id, uint32_t number, uint64_t bytes_per_second,
                uint64_t *ticket) {
    const workload *work = &self->base.job->work;
    for (uint32_t g = 0; g < work->group_count; g++) {
        const kvf_group_request *wanted = &workload_request(work, number)[g];
        self->groups[g] = (kvf_group_steps){wanted->local, wanted->begin, wanted->end};
    }
    const kvf_agent_request request = {.struct_size = sizeof request,
                                       .id = {id, strlen(id)},
                                       .groups = self->groups,
                                       .group_count = work->group_count,
                                       .deadline_ns = self->base.job->patience_ns,
                                       .bytes_per_second = bytes_per_second,
                                       .contact = prefill_engine(self)};
    kvf_status status = self->base.job->asked->push ? kvf_agent_expect(self->base.agent, &request, ticket)
                                                    : kvf_agent_pull(self->base.agent, &request, ticket);
    return status ? rank_fail_status(&self->base, status, "starting a request") : true;
}

static bool take(decode_rank *self, uint32_t number) {
    char id[24];
    uint64_t ticket;
    rank_request_id(self->base.job, self->round, number, id);
    return ask(self, id, number, 0, &ticket);
}

static bool take_more(decode_rank *self) {
    const demo_job *job = self->base.job;
    while (self->next < job->work.request_count && self->next - self->finished < job->asked->in_flight)
        if (!take(self, self->next++))
            return false;
    return true;
}

static bool begin_round(decode_rank *self) {
    self->next = self->finished = 0;
    self->figures = (move_figures){.begin_ns = now_ns()};
    return take_more(self);
}

static bool count_taken(decode_rank *self, const kvf_event *event) {
    uint32_t count = self->base.job->work.request_count;
    self->finished++;
    if (event->request_kind == KVF_REQUEST_PULL) { /* otherwise the writer counts */
        self->figures.bytes += event->bytes;
        self->figures.bytes_packed += event->bytes_packed;
        self->figures.runs += event->runs;
    }
    rank_progress(&self->base, self->finished, count);
    rank_suffer_fault(&self->base);
    if (self->finished < count)
        return take_more(self);
    self->round++;
    self->figures.end_ns = now_ns();
    if (event->request_kind == KVF_REQUEST_PULL)
        rank_note_kinds(&self->base, KVF_PEER_PRODUCER);
    memcpy(self->figures.kind, self->base.kind, sizeof self->figures.kind);
    memcpy(self->figures.way, self->base.way, sizeof self->figures.way);
    return rank_send(&self->base, MESSAGE_MOVED, &self->figures, sizeof self->figures);
}

/* The producer does not hold the request again yet, because another decode rank still has to finish its part of the
 * round before the last one. */
static bool is_too_early(const decode_rank *self, const kvf_event *event) {
    return self->base.job->standing && event->status == KVF_E_EXISTS &&
           event->request_kind == KVF_REQUEST_PULL;
}

static bool heed(void *rank, const kvf_event *event) {
    decode_rank *self = rank;
    uint32_t round, number;
    if (broken_heed(&self->base, &self->broken, event))
        return true;
    if (event->kind == KVF_EVENT_FAILED && is_too_early(self, event) &&
        rank_read_request_id(&event->id, &round, &number))
        return take(self, number);
    if (event->kind == KVF_EVENT_FAILED)
        return rank_fail(&self->base, "%.*s%s%s", (int)event->id.size, (const char *)event->id.data,
                         event->id.size ? ": " : "", event->detail);
    if (event->kind == KVF_EVENT_PEER_READY)
        return rank_send(&self->base, MESSAGE_CONNECTED, NULL, 0);
    return event->kind != KVF_EVENT_DONE || count_taken(self, event);
}

/* ---- the request whose producer is killed ---------------------------------------------------- */

static bool is_source(const decode_rank *self, uint32_t prefill_rank) {
    for (uint32_t s = 0; s < kvf_plan_source_count(self->plan); s++)
        if (kvf_plan_source_rank(self->plan, s) == prefill_rank)
            return true;
    return false;
}

/* A pull from the victim is slowed down, so that it is under way when the victim dies. A push then still waits for the
 * layers that the victim does not write. */
static bool break_off(decode_rank *self) {
    const demo_job *job = self->base.job;
    const bool slow = !job->asked->push && is_source(self, job->victim);
    const uint64_t least = self->base.total_bytes / job->work.request_count / BROKEN_PULL_S;
    if (!ask(self, BROKEN_ID, 0, slow ? least + 1 : 0, &self->broken.ticket))
        return false;
    for (uint32_t g = 0; g < job->work.group_count; g++)
        self->broken.told.of_blocks += workload_request(&job->work, 0)[g].local.count;
    return job->asked->push || self->base.seat->rank > 0 ||
           broken_wait_halfway(&self->base, &self->broken, heed, job->victim, 0);
}

/* ---- parting, verifying, orders -------------------------------------------------------------- */

/* Waits until the agent has no peers. The prefill agents have closed, but their memory is freed only when it is no
 * longer mapped here. */
static bool part(decode_rank *self) {
    kvf_agent_stats stats = {.struct_size = sizeof stats};
    uint64_t deadline = now_ns() + self->base.job->patience_ns;
    bool message_waits;
    do {
        if (!rank_wait(&self->base, 10, &message_waits) || !rank_take_events(self, heed))
            return false;
        kvf_status status = kvf_agent_get_stats(self->base.agent, &stats);
        if (status)
            return rank_fail_status(&self->base, status, "parting");
    } while (stats.peers_now > 0 && now_ns() < deadline);
    return rank_send(&self->base, MESSAGE_PARTED, NULL, 0);
}

static bool verify(decode_rank *self) {
    verdict found;
    verify_memory(&self->base, &found);
    return rank_send(&self->base, MESSAGE_VERIFIED, &found, sizeof found);
}

static bool copy(decode_rank *self, const char *method) {
    copy_figures figures;
    return copy_limit_measure(&self->base, self->plan, self->request, method, &figures) &&
           rank_send(&self->base, MESSAGE_COPIED, &figures, sizeof figures);
}

static bool obey(void *rank, const message *order) {
    decode_rank *self = rank;
    switch (order->type) {
    case MESSAGE_CONNECT:
        return connect_engine(self, order);
    case MESSAGE_MOVE:
        return begin_round(self);
    case MESSAGE_BREAK:
        return break_off(self);
    case MESSAGE_TELL:
        return broken_report(&self->base, &self->broken);
    case MESSAGE_VERIFY:
        return verify(self);
    case MESSAGE_PART:
        return part(self);
    case MESSAGE_PREPARE:
        copy_limit_prepare(&self->base);
        return rank_send(&self->base, MESSAGE_PREPARED, NULL, 0);
    case MESSAGE_COPY:
        return copy(self, order->data);
    default:
        return false; /* MESSAGE_QUIT */
    }
}

int run_decode_rank(rank_seat *seat) {
    decode_rank self = {.round = 0};
    if (rank_open(&self.base, seat, PATTERN_UNUSED_DECODE) && make_plan(&self))
        rank_serve(&self, obey, heed, NULL);
    rank_close(&self.base);
    free(self.groups);
    kvf_request_free(self.request);
    kvf_plan_free(self.plan);
    return EXIT_DONE;
}
