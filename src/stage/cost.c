#include "stage/cost.h"

#include <math.h>

/* Of one core of a current server, beyond its caches: orders of magnitude. */
#define NS_PER_PIECE 6.0        /* to find it and to begin a copy, at either end */
#define NS_PER_COPIED_BYTE 0.15 /* gathered or scattered */
#define NOTICES_PER_SLOT 2.0    /* lent and returned */
#define NOTICES_PER_FLOW 4.0    /* opened, accepted, ended by both */
#define NOTICE_RUNS 2.0         /* what a notification costs, in operations of the fabric */
#define WEIGHT 0.25             /* of one transfer in the average */
#define FACTOR_MAX 16.0         /* a transfer that took longer was disturbed by something else */

void kvf_cost_assume(kvf_stage_cost *cost, const char *kind, uint32_t slot_bytes) {
    kvf_cost_model fabric;
    (void)kvf_cost_assumed(kind, &fabric);
    *cost = (kvf_stage_cost){.struct_size = sizeof *cost, .direct = fabric, .packed = fabric};
    double operation = fabric.ns_per_run;
    cost->packed.ns_per_run = 2 * NS_PER_PIECE;
    cost->packed.ns_per_byte = fabric.ns_per_byte + 2 * NS_PER_COPIED_BYTE +
                               operation * (1 + NOTICES_PER_SLOT * NOTICE_RUNS) / slot_bytes;
    cost->packed.ns_per_source = fabric.ns_per_source + NOTICES_PER_FLOW * NOTICE_RUNS * operation;
}

double kvf_cost_predict(const kvf_cost_model *cost, uint64_t runs, uint64_t bytes) {
    return cost->ns_per_source + cost->ns_per_run * (double)runs + cost->ns_per_byte * (double)bytes;
}

static void move(double *price, double share, double factor) {
    *price *= pow(factor, WEIGHT * share);
}

void kvf_cost_learn(kvf_cost_model *cost, uint64_t runs, uint64_t bytes, double ns) {
    double predicted = kvf_cost_predict(cost, runs, bytes);
    if (!(predicted > 0) || !(ns > 0))
        return;
    double factor = fmin(fmax(ns / predicted, 1 / FACTOR_MAX), FACTOR_MAX);
    double by_source = cost->ns_per_source / predicted;
    double by_runs = cost->ns_per_run * (double)runs / predicted;
    double by_bytes = cost->ns_per_byte * (double)bytes / predicted;
    move(&cost->ns_per_source, by_source, factor);
    move(&cost->ns_per_run, by_runs, factor);
    move(&cost->ns_per_byte, by_bytes, factor);
}
