/*
 * What the schedulers of the engines do in the fault harness: requests, in all their parts, and the blocks
 * they use. Blocks go back when every rank has said so and are given out again at once, so that whoever
 * touches them too late spoils another request.
 */
#ifndef KVF_FAULTS_TRAFFIC_H
#define KVF_FAULTS_TRAFFIC_H

#include "crew.h"

#define TRAFFIC_BLOCKS 256u /* of one group of one engine, at most */
#define TRAFFIC_STATUSES 32u

/** What became of requests; added up over rounds. */
typedef struct traffic_counts {
    uint64_t requests, parts, cancelled, second_turns, refilled, dropped;
    uint64_t done[6], failed[6]; /**< by kvf_request_kind, per rank */
    uint64_t failed_by_status[TRAFFIC_STATUSES];
    uint64_t in_doubt; /**< failed with blocks that became free later */
    uint64_t bytes;
    uint64_t latest_result_ns, latest_free_ns; /**< after the deadline; after the result */
} traffic_counts;

typedef struct traffic_part traffic_part;

/** The blocks of one engine that are free, the last one freed on top. */
typedef struct traffic_stock {
    uint32_t free[CONTENT_GROUPS][TRAFFIC_BLOCKS];
    uint32_t count[CONTENT_GROUPS];
} traffic_stock;

typedef struct traffic {
    crew *crew;
    chance chance;
    traffic_counts counts;
    traffic_stock stocks[CONTENT_ENGINES];
    kvf_model *model;
    kvf_engine *shapes[CONTENT_ENGINES];
    traffic_part *parts;
    uint32_t part_count;
    uint32_t next_handle;
    uint64_t next_id;
    uint64_t lease_ns, patience_ns; /**< patience: for a machine that is busy */
    bool calm;                      /**< every request should be DONE; what is not: */
    uint32_t calm_failures;
    bool verbose; /**< print what failed */
    char calm_words[ORDERS_WORDS + 40];
    void (*on_wrong)(void *context, const char *words);
    void *context;
} traffic;

bool traffic_open(traffic *t);
void traffic_close(traffic *t);

/** Starts a request of a random kind; false when there are no blocks for it now. */
bool traffic_launch(traffic *t);

/** Does what is due: orders, cancellations, checks, and looks for what is overdue. */
void traffic_work(traffic *t);

/* For the crew. */
void traffic_report(traffic *t, uint32_t engine, uint32_t rank, const report *r);
void traffic_engine(traffic *t, uint32_t engine, bool up);

#endif
