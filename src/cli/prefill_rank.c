/*
 * A prefill rank: fills its caches, then serves until it is told to part.
 */
#include <stdlib.h>

#include "pattern.h"
#include "rank.h"

typedef struct prefill_rank {
    live_rank base;
    uint64_t filled_bytes;
    uint64_t notified;
} prefill_rank;

static bool write_cell(void *context, const logical_cell *at) {
    prefill_rank *self = context;
    pattern_write(at->address, at->bytes, at->key);
    self->filled_bytes += at->bytes;
    if ((self->filled_bytes & 0xfffff) < at->bytes)
        rank_progress(&self->base, (self->base.total_bytes + self->filled_bytes) / 2, self->base.total_bytes);
    return true;
}

static void fill(prefill_rank *self) {
    const demo_job *job = self->base.job;
    cell_memory memory = rank_memory(&self->base);
    for (uint32_t r = 0; r < job->work.request_count; r++)
        (void)cells_visit(&memory, CELLS_OF_PREFILL, r, workload_request(&job->work, r), write_cell, self);
    if (job->corrupt.wanted && job->corrupt.rank == self->base.seat->rank)
        corruption_apply(&job->corrupt, &memory, &job->work);
}

static bool send_card(const prefill_rank *self) {
    const void *card = NULL;
    size_t bytes = 0;
    if (self->base.transport) {
        kvf_status status = kvf_transport_export(self->base.transport, &card, &bytes);
        if (status)
            return rank_fail_status(&self->base, status, "exporting the card");
    }
    return rank_send(&self->base, MESSAGE_READY, card, bytes);
}

static void count_notification(void *context, kvf_transport *transport, const char *sender, const void *data,
                               size_t bytes) {
    (void)transport, (void)sender, (void)data, (void)bytes;
    ((prefill_rank *)context)->notified++;
}

static bool progress(const prefill_rank *self) {
    bool busy = self->base.transport != NULL;
    while (busy) {
        kvf_status status = kvf_transport_progress(self->base.transport, &busy);
        if (status)
            return rank_fail_status(&self->base, status, "serving");
    }
    return true;
}

/* Every read was notified of, but the last notifications may still be on their way. */
static bool await_notifications(prefill_rank *self, uint64_t expected) {
    uint64_t deadline = now_ns() + (uint64_t)self->base.job->asked->timeout_s * 1000000000u;
    while (self->notified < expected && now_ns() < deadline) {
        bool message_waits;
        rank_wait(&self->base, 10, &message_waits);
        if (!progress(self))
            return false;
    }
    if (self->notified == expected)
        return true;
    return rank_fail(&self->base, "%llu notifications of finished requests came, but %llu were sent",
                     (unsigned long long)self->notified, (unsigned long long)expected);
}

/* Returns false when the rank is to end. */
static bool obey(prefill_rank *self, const message *order) {
    switch (order->type) {
    case MESSAGE_MOVE:
        rank_suffer_fault(&self->base);
        return true;
    case MESSAGE_PART:
        if (!await_notifications(self, *(const uint64_t *)order->data))
            return false;
        rank_close(&self->base);
        return rank_send(&self->base, MESSAGE_PARTED, NULL, 0);
    default:
        return false; /* MESSAGE_QUIT */
    }
}

static void serve(prefill_rank *self) {
    for (;;) {
        bool message_waits;
        rank_wait(&self->base, -1, &message_waits);
        if (!progress(self))
            return;
        message order;
        if (message_waits && (!channel_receive(&self->base.seat->coordinator, &order) || !obey(self, &order)))
            return;
    }
}

int run_prefill_rank(rank_seat *seat) {
    prefill_rank self = {.filled_bytes = 0};
    kvf_transport_options callbacks = {.on_notify = count_notification, .context = &self};
    bool opened = rank_open(&self.base, seat, &callbacks, PATTERN_UNUSED_PREFILL);
    if (opened) {
        fill(&self);
        if (send_card(&self))
            serve(&self);
    }
    rank_close(&self.base);
    return EXIT_DONE;
}
