#include "moving.h"

#include <stdio.h>
#include <string.h>

/* A round under way. */
typedef struct round_state {
    moved *sum;
    uint64_t begin_ns, end_ns;
    verdict worst;
} round_state;

static bool take_moved(void *context, demo_side side, uint32_t index, const message *from) {
    (void)side, (void)index;
    round_state *self = context;
    const move_figures *figures = from->data;
    moved *sum = self->sum;
    size_t length = strlen(sum->transport);
    if (!strstr(sum->transport, figures->kind))
        (void)snprintf(sum->transport + length, sizeof sum->transport - length, "%s%s", length ? "+" : "",
                       figures->kind);
    if (figures->way[0])
        memcpy(sum->way, figures->way, sizeof sum->way);
    if (figures->begin_ns < self->begin_ns)
        self->begin_ns = figures->begin_ns;
    if (figures->end_ns > self->end_ns)
        self->end_ns = figures->end_ns;
    sum->bytes += figures->bytes;
    sum->bytes_packed += figures->bytes_packed;
    sum->runs += figures->runs;
    return from->bytes == sizeof *figures;
}

static bool take_verdict(void *context, demo_side side, uint32_t index, const message *from) {
    (void)side, (void)index;
    round_state *self = context;
    const verdict *found = from->data;
    self->sum->verified_bytes += found->bytes;
    self->sum->untouched_bytes += found->untouched_bytes;
    if (!found->wrong)
        return true;
    size_t i = 0;
    while (i < 5 && found->order[i] == self->worst.order[i])
        i++;
    if (!self->worst.wrong || found->order[i] < self->worst.order[i])
        self->worst = *found;
    return true;
}

int move_round(crew *all, moved *sum) {
    round_state self = {.sum = sum, .begin_ns = UINT64_MAX};
    sum->bytes = sum->bytes_packed = sum->runs = 0;
    crew_send(all, CREW_ALL, MESSAGE_MOVE, NULL, 0);
    /* In a push the prefill ranks count the bytes, and the decode ranks say when all have arrived. */
    const crew_part movers = all->job->asked->push ? CREW_ALL : CREW_DECODE;
    int result = crew_await(all, movers, MESSAGE_MOVED, "moving", take_moved, &self);
    if (result)
        return result;
    sum->seconds = (double)(self.end_ns - self.begin_ns) / 1e9;
    crew_send(all, CREW_DECODE, MESSAGE_VERIFY, NULL, 0);
    result = crew_await(all, CREW_DECODE, MESSAGE_VERIFIED, "verifying", take_verdict, &self);
    if (!result && self.worst.wrong)
        result = failure("%s", self.worst.text);
    return result;
}
