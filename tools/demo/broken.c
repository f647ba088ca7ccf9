#include "broken.h"

#include <stdio.h>
#include <stdlib.h>

enum { HALFWAY_S = 20 };

bool broken_report(const live_rank *of, broken_request *self) {
    self->reports = true;
    if (self->ticket && !self->told.free_ns)
        return true;
    self->reports = false;
    return rank_send(of, MESSAGE_TOLD, &self->told, sizeof self->told);
}

bool broken_heed(const live_rank *of, broken_request *self, const kvf_event *event) {
    told_figures *told = &self->told;
    if (!self->ticket || event->ticket != self->ticket)
        return false;
    if (event->kind != KVF_EVENT_BLOCKS_FREE) {
        told->status = (uint32_t)event->status;
        told->told_ns = now_ns();
        told->bytes = event->bytes;
        (void)snprintf(told->detail, sizeof told->detail, "%s", event->detail);
        for (uint32_t g = 0; event->invalid && g < event->group_count; g++)
            told->invalid_blocks += event->invalid[g].count;
    }
    if (event->blocks_free)
        told->free_ns = now_ns();
    if (self->reports)
        (void)broken_report(of, self);
    return true;
}

uint32_t broken_layers(const kvf_shard *shard) {
    const kvf_model *model = kvf_shard_model(shard);
    uint32_t first = UINT32_MAX, last = 0;
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        const kvf_range kept = kvf_shard_group_layers(shard, g);
        if (group->kind != KVF_GROUP_TOKENS || kept.begin == kept.end)
            continue;
        first = group->layers[kept.begin] < first ? group->layers[kept.begin] : first;
        last = group->layers[kept.end - 1] > last ? group->layers[kept.end - 1] : last;
    }
    return first < last ? first + (last - first + 1) / 2 : 0;
}

/* The bytes that have moved from or to a rank of the other engine so far. */
static uint64_t count_moved(const live_rank *of, uint32_t peer) {
    uint32_t count = 0, room = 0;
    uint64_t bytes = 0;
    (void)kvf_agent_peers(of->agent, NULL, 0, &room);
    kvf_agent_peer *peers = calloc((size_t)room + 1, sizeof *peers);
    if (!peers)
        return 0; /* the caller asks again */
    peers->struct_size = sizeof *peers;
    (void)kvf_agent_peers(of->agent, peers, room + 1, &count);
    for (uint32_t i = 0; i < count && i <= room; i++)
        if (peer == UINT32_MAX || peers[i].rank == peer)
            bytes += peers[i].bytes_read + peers[i].bytes_written;
    free(peers);
    return bytes;
}

bool broken_wait_halfway(live_rank *of, broken_request *self, rank_heed heed, uint32_t peer,
                         uint32_t layers) {
    const uint64_t end = now_ns() + HALFWAY_S * UINT64_C(1000000000);
    halfway_figures figures = {.layers = layers};
    bool message_waits;
    while ((figures.bytes = count_moved(of, peer)) == 0 && !self->told.told_ns && now_ns() < end)
        if (!rank_wait(of, 5, &message_waits) || !rank_take_events(of, heed))
            return false;
    return rank_send(of, MESSAGE_HALFWAY, &figures, sizeof figures);
}
