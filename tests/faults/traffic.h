/*
 * The engines' schedulers in the fault harness: requests, in all their parts, and their blocks. A block goes back to
 * the stock when every rank has let go of it and is given out again at once, so that a rank that touches it too late
 * spoils another request.
 */
#ifndef KVF_FAULTS_TRAFFIC_H
#define KVF_FAULTS_TRAFFIC_H

#include "crew.h"

#define TRAFFIC_BLOCKS 256u /* of one group of one engine, at most */
#define TRAFFIC_STATUSES 32u

/** Results of requests, added up over rounds. */
typedef struct traffic_counts {
    uint64_t requests, parts, cancelled, second_turns, refilled, dropped;
    uint64_t done[6], failed[6]; /**< by kvf_request_kind, per rank */
    uint64_t failed_by_status[TRAFFIC_STATUSES];
    uint64_t in_doubt; /**< requests that failed, and whose blocks became free later */
    uint64_t bytes;
    uint64_t latest_result_ns, latest_free_ns; /**< the longest time after the deadline; after the result */
} traffic_counts;

typedef struct traffic_part traffic_part;

/** The free blocks of one engine, the last one freed on top. */
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
    uint64_t lease_ns, patience_ns; /**< patience: allowance for a busy machine */
    bool calm;                      /**< every request should be DONE; calm_failures counts others */
    uint32_t calm_failures;
    bool verbose; /**< print every failed request */
    char calm_words[ORDERS_WORDS + 40];
    void (*on_wrong)(void *context, const char *words);
    void *context;
} traffic;

bool traffic_open(traffic *t);
void traffic_close(traffic *t);

/** Starts a request of a random kind; false when there are no blocks for it now. */
bool traffic_launch(traffic *t);

/** Does what is due: orders, cancellations and checks. Reports overdue requests. */
void traffic_work(traffic *t);

/* The crew's callbacks. */
void traffic_report(traffic *t, uint32_t engine, uint32_t rank, const report *r);
void traffic_engine(traffic *t, uint32_t engine, bool up);

#endif
