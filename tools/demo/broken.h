/*
 * The request in the middle of which its producer is killed, as a rank of either side sees it.
 */
#ifndef KVFERRY_DEMO_BROKEN_H
#define KVFERRY_DEMO_BROKEN_H

#include "rank.h"

/** How both sides name it; what it moves is what the first request of a round does. */
#define BROKEN_ID "broken"

typedef struct broken_request {
    uint64_t ticket; /* 0: none was made */
    bool reports;    /* as soon as the blocks are free */
    told_figures told;
} broken_request;

/**
 * Takes an event where it is of this request, and reports once its blocks are free and a report is wanted.
 *
 * @return whether it was
 */
bool broken_heed(const live_rank *of, broken_request *self, const kvf_event *event);

/** Wants the report: at once where the blocks are free, and there were none where no ticket was made. */
bool broken_report(const live_rank *of, broken_request *self);

/** Model layers of which a push writes so many before its producer is killed: half of those that the rank keeps for
 * tokens. 0: it keeps fewer than two. */
uint32_t broken_layers(const kvf_shard *shard);

/**
 * Waits until bytes of it have moved, from or to rank `peer` of the other engine (UINT32_MAX: any), and says how many.
 * Some seconds at the most: what is slowed down and packed begins with a whole slot, which may have to wait for longer.
 */
bool broken_wait_halfway(live_rank *of, broken_request *self, rank_heed heed, uint32_t peer, uint32_t layers);

#endif
