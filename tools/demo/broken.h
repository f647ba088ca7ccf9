/*
 * The broken request, whose producer is killed in its middle, as a rank of either side sees it.
 */
#ifndef KVFERRY_DEMO_BROKEN_H
#define KVFERRY_DEMO_BROKEN_H

#include "rank.h"

/** Its name on both sides. It moves the same blocks as the first request of a round. */
#define BROKEN_ID "broken"

typedef struct broken_request {
    uint64_t ticket; /* 0: the request was not started */
    bool reports;    /* report as soon as the blocks are free */
    told_figures told;
} broken_request;

/**
 * Takes an event if it is of this request, and sends the report once the blocks are free and the report is wanted.
 *
 * @return whether the event was of this request
 */
bool broken_heed(const live_rank *of, broken_request *self, const kvf_event *event);

/** Wants the report. It is sent at once if the blocks are free or the request was not started, otherwise later. */
bool broken_report(const live_rank *of, broken_request *self);

/** How many model layers a push writes before its producer is killed: up to the middle of those that the rank keeps for
 * tokens. 0: the rank keeps fewer than two. */
uint32_t broken_layers(const kvf_shard *shard);

/**
 * Waits until some bytes have moved from or to rank `peer` of the other engine (UINT32_MAX: any), and reports how many.
 * Waits for some seconds at most: a slowed-down request that goes packed begins with a whole slot, which may take
 * longer.
 */
bool broken_wait_halfway(live_rank *of, broken_request *self, rank_heed heed, uint32_t peer, uint32_t layers);

#endif
