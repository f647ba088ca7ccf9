/*
 * A prefill rank: fills its caches, then, round by round, holds each request until the decode engine has read it, or
 * pushes it. For `kvferry serve` it holds all requests again and again, for any consumer, and heeds an operator's
 * commands.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "broken.h"
#include "kept_list.h"
#include "pattern.h"
#include "rank.h"

#define LOOK_MS 100
#define STANDING_NS UINT64_MAX /* no limit */

typedef struct prefill_rank {
    live_rank base;          /* first, see rank_serve() */
    kvf_group_steps *groups; /* of one request */
    uint64_t filled_bytes;
    uint64_t held, released; /* requests, in all rounds */
    uint32_t round;
    bool parting;
    broken_request broken;
    uint32_t unwritten;   /* requests of this round */
    move_figures figures; /* of this round, if it pushes */
    uint64_t *standing; /* the ticket of each request that is held for any consumer; 0: it is not held now */
    bool drains, drained;
    uint64_t drained_for; /* the command that asked to drain, and waits; 0: none */
} prefill_rank;

static bool write_cell(void *context, const logical_cell *at) {
    prefill_rank *self = context;
    pattern_write(at->address, at->bytes, at->key);
    self->filled_bytes += at->bytes;
    if ((self->filled_bytes & 0xfffff) < at->bytes)
        rank_progress(&self->base, (self->base.total_bytes + self->filled_bytes) / 2, self->base.total_bytes);
    return true;
}

static void fill_caches(prefill_rank *self) {
    const demo_job *job = self->base.job;
    cell_memory memory = rank_memory(&self->base);
    for (uint32_t r = 0; r < job->work.request_count; r++)
        (void)cells_visit(&memory, CELLS_OF_PREFILL, r, workload_request(&job->work, r), write_cell, self);
    if (job->corrupt.wanted && job->corrupt.rank == self->base.seat->rank)
        corruption_apply(&job->corrupt, &memory, &job->work);
}

static bool send_introduction(const prefill_rank *self) {
    const void *introduction = NULL;
    size_t bytes = 0;
    kvf_status status = kvf_agent_introduction(self->base.agent, &introduction, &bytes);
    if (status)
        return rank_fail_status(&self->base, status, "introducing itself");
    return rank_send(&self->base, MESSAGE_READY, introduction, bytes);
}

/* Holds or pushes a whole prompt, even if the decode engine already has a part of it. */
static bool lend(prefill_rank *self, const char *id, uint32_t number, uint64_t *ticket) {
    const workload *work = &self->base.job->work;
    kvf_group_steps *groups = self->groups;
    for (uint32_t g = 0; g < work->group_count; g++) {
        const kvf_group_request *wanted = &workload_request(work, number)[g];
        groups[g] = (kvf_group_steps){.table = wanted->remote, .end = wanted->end};
    }
    const kvf_agent_request request = {.struct_size = sizeof request,
                                       .id = {id, strlen(id)},
                                       .groups = groups,
                                       .group_count = work->group_count,
                                       .deadline_ns = self->base.job->standing ? STANDING_NS : 0};
    if (self->base.job->asked->push) {
        kvf_status status = kvf_agent_push(self->base.agent, &request, ticket);
        return status ? rank_fail_status(&self->base, status, "pushing a request") : true;
    }
    kvf_status status = kvf_agent_hold(self->base.agent, &request, ticket);
    return status ? rank_fail_status(&self->base, status, "holding a request") : true;
}

/* Writes the first `layers` model layers of a push, or everything if `layers` is UINT32_MAX. */
static bool write_layers(const prefill_rank *self, uint64_t ticket, uint32_t layers) {
    const kvf_push_chunk chunk = {.struct_size = sizeof chunk, .end = UINT64_MAX, .layers = layers};
    kvf_status status = kvf_agent_push_ready(self->base.agent, ticket, layers < UINT32_MAX ? &chunk : NULL);
    if (status ==
        KVF_E_NOT_FOUND) /* it is over, as when nobody wants anything of this rank: its event says how */
        return true;
    return status ? rank_fail_status(&self->base, status, "writing a request") : true;
}

static bool hold(prefill_rank *self, uint32_t round, uint32_t number) {
    char id[24];
    uint64_t ticket;
    rank_request_id(self->base.job, round, number, id);
    if (!lend(self, id, number, &ticket))
        return false;
    self->held++;
    return !self->base.job->asked->push || write_layers(self, ticket, UINT32_MAX);
}

static bool hold_round(prefill_rank *self) {
    const workload *work = &self->base.job->work;
    rank_suffer_fault(&self->base);
    self->figures = (move_figures){.begin_ns = UINT64_MAX};
    self->unwritten = work->request_count;
    bool all = true;
    for (uint32_t i = 0; i < work->request_count && all; i++)
        all = hold(self, self->round, i);
    self->round++;
    return all;
}

/* ---- requests for any consumer, and commands -------------------------------------------------- */

static size_t standing_count(const demo_job *job) {
    return (size_t)STANDING_ROUNDS * job->work.request_count;
}

static bool stand(prefill_rank *self, size_t place) {
    const uint32_t requests = self->base.job->work.request_count;
    char id[24];
    if (self->drains || self->standing[place])
        return true;
    rank_request_id(self->base.job, (uint32_t)(place / requests), (uint32_t)(place % requests), id);
    return lend(self, id, (uint32_t)(place % requests), &self->standing[place]);
}

static bool hold_standing(prefill_rank *self) {
    bool all = true;
    for (size_t i = 0; i < standing_count(self->base.job) && all; i++)
        all = stand(self, i);
    return all;
}

/* Holds a request again, for the next consumer, after one consumer has fetched it or given it up. */
static bool hold_again(prefill_rank *self, const kvf_event *event) {
    uint32_t round, number;
    if (event->request_kind != KVF_REQUEST_HOLD || !event->blocks_free ||
        !rank_read_request_id(&event->id, &round, &number))
        return true;
    const size_t place = (size_t)round * self->base.job->work.request_count + number;
    self->standing[place] = 0;
    return stand(self, place);
}

static void reply(const prefill_rank *self, uint64_t number, kvf_status status, const char *detail) {
    (void)kvf_agent_reply(self->base.agent, number, status, detail, NULL, 0); /* or its time is over */
}

static void reply_drained(prefill_rank *self, kvf_status status, const char *detail) {
    if (self->drained_for)
        reply(self, self->drained_for, status, detail);
    self->drained_for = 0;
}

/* Replies when it has drained, or at once if it will not. */
static void drain(prefill_rank *self, const kvf_command *asked) {
    if (self->drains) {
        reply(self, asked->number, self->drained ? KVF_OK : KVF_E_EXISTS,
              self->drained ? "it had drained before" : "it drains already");
        return;
    }
    kvf_status status = kvf_agent_drain(self->base.agent, asked->deadline_ns);
    self->drains = status == KVF_OK;
    self->drained_for = status ? 0 : asked->number;
    if (status)
        reply(self, asked->number, status, kvf_error_detail());
}

static bool resume(prefill_rank *self, const kvf_command *asked) {
    kvf_status status = kvf_agent_resume(self->base.agent);
    if (status)
        return rank_fail_status(&self->base, status, "resuming");
    self->drains = self->drained = false;
    reply_drained(self, KVF_E_CANCELLED, "it was resumed");
    if (!hold_standing(self))
        return false;
    reply(self, asked->number, KVF_OK, "");
    return true;
}

static void list(const prefill_rank *self, const kvf_command *asked) {
    kvf_record kept = {.name = NULL};
    kvf_status status = kept_list_make(self->base.agent, asked->request, &kept);
    if (status)
        reply(self, asked->number, status, kvf_error_detail());
    else
        (void)kvf_agent_reply(self->base.agent, asked->number, KVF_OK, NULL, &kept, 1);
    kept_list_free(&kept);
}

static bool heed_command(prefill_rank *self, const kvf_command *asked) {
    char detail[160];
    if (strcmp(asked->verb, KVF_COMMAND_RESUME) == 0)
        return resume(self, asked);
    if (strcmp(asked->verb, KVF_COMMAND_DRAIN) == 0) {
        drain(self, asked);
        return true;
    }
    if (strcmp(asked->verb, KVF_COMMAND_LIST) == 0) {
        list(self, asked);
        return true;
    }
    (void)snprintf(detail, sizeof detail, "kvferry serve does not %s; it takes %s, %s and %s", asked->verb,
                   KVF_COMMAND_DRAIN, KVF_COMMAND_RESUME, KVF_COMMAND_LIST);
    reply(self, asked->number, KVF_E_UNSUPPORTED, detail);
    return true;
}

static bool heed_standing(prefill_rank *self, const kvf_event *event) {
    if (event->kind == KVF_EVENT_COMMAND)
        return heed_command(self, event->command);
    if (event->kind == KVF_EVENT_DRAINED && event->status != KVF_E_CANCELLED) {
        self->drained = true;
        reply_drained(self, event->status, event->detail);
    }
    return hold_again(self, event);
}

/* While it drains: what nobody reads is held for nobody, and given up. */
static int look(void *rank) {
    prefill_rank *self = rank;
    kvf_agent_stats stats = {.struct_size = sizeof stats};
    if (!self->drains || self->drained)
        return -1;
    if (kvf_agent_get_stats(self->base.agent, &stats) == KVF_OK && stats.leases_now == 0)
        for (size_t i = 0; i < standing_count(self->base.job); i++)
            if (self->standing[i])
                (void)kvf_agent_cancel(self->base.agent, self->standing[i]); /* or it has just ended */
    return LOOK_MS;
}

/* The decode engine has read everything, but its notices may still be on their way: waits for all of them. */
static bool part_if_released(prefill_rank *self) {
    if (!self->parting || self->released < self->held)
        return true;
    self->parting = false;
    rank_close(&self->base);
    return rank_send(&self->base, MESSAGE_PARTED, NULL, 0);
}

/* Counts a push that ended; with the last one of the round, reports to the coordinator. */
static bool take_written(prefill_rank *self, const kvf_event *event) {
    self->figures.bytes += event->bytes;
    self->figures.bytes_packed += event->bytes_packed;
    self->figures.runs += event->runs;
    if (--self->unwritten > 0)
        return true;
    rank_note_kinds(&self->base, KVF_PEER_CONSUMER);
    memcpy(self->figures.kind, self->base.kind, sizeof self->figures.kind);
    memcpy(self->figures.way, self->base.way, sizeof self->figures.way);
    return rank_send(&self->base, MESSAGE_MOVED, &self->figures, sizeof self->figures);
}

static bool heed(void *rank, const kvf_event *event) {
    prefill_rank *self = rank;
    if (self->base.job->standing)
        return heed_standing(self, event);
    if (broken_heed(&self->base, &self->broken, event))
        return true;
    if (event->kind == KVF_EVENT_FAILED)
        return rank_fail(&self->base, "request %.*s: %s", (int)event->id.size, (const char *)event->id.data,
                         event->detail);
    self->released += event->kind == KVF_EVENT_DONE;
    if (event->kind == KVF_EVENT_DONE && event->request_kind == KVF_REQUEST_PUSH &&
        !take_written(self, event))
        return false;
    return part_if_released(self);
}

/* ---- the request whose producer is killed ---------------------------------------------------- */

/* The victim writes half of the layers; all others write, or lend, everything. */
static bool break_off(prefill_rank *self) {
    const demo_job *job = self->base.job;
    const bool dies = self->base.seat->rank == job->victim;
    const uint32_t layers = dies ? broken_layers(self->base.shard) : UINT32_MAX;
    if (!lend(self, BROKEN_ID, 0, &self->broken.ticket))
        return false;
    if (!job->asked->push)
        return true;
    return write_layers(self, self->broken.ticket, layers) &&
           (!dies || broken_wait_halfway(&self->base, &self->broken, heed, UINT32_MAX, layers));
}

/* Cancels the broken request, as an engine does that hears of the failure elsewhere. */
static bool give_up(prefill_rank *self) {
    if (self->broken.ticket && !self->broken.told.told_ns)
        (void)kvf_agent_cancel(self->base.agent, self->broken.ticket); /* or it has just ended */
    return broken_report(&self->base, &self->broken);
}

/* ---- orders ---------------------------------------------------------------------------------- */

static bool obey(void *rank, const message *order) {
    prefill_rank *self = rank;
    if (order->type == MESSAGE_MOVE)
        return hold_round(self);
    if (order->type == MESSAGE_BREAK)
        return break_off(self);
    if (order->type == MESSAGE_GIVE_UP)
        return give_up(self);
    if (order->type == MESSAGE_STAND)
        return hold_standing(self);
    self->parting = order->type == MESSAGE_PART;
    return self->parting && part_if_released(self);
}

int run_prefill_rank(rank_seat *seat) {
    prefill_rank self = {.groups = calloc(seat->job->work.group_count, sizeof *self.groups),
                         .standing = calloc(standing_count(seat->job), sizeof *self.standing)};
    if (rank_open(&self.base, seat, PATTERN_UNUSED_PREFILL)) {
        fill_caches(&self);
        if (!self.groups || !self.standing)
            (void)rank_fail(&self.base, "not enough memory");
        else if (send_introduction(&self))
            rank_serve(&self, obey, heed, look);
    }
    rank_close(&self.base);
    free(self.groups);
    free(self.standing);
    return EXIT_DONE;
}
