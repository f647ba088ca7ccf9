/*
 * Durations, counted in buckets that are 1.6% wide.
 */
#ifndef KVF_SIMULATE_QUANTILES_H
#define KVF_SIMULATE_QUANTILES_H

#include <kvferry/simulate.h>

#include "base/base.h"

#define KVF_QUANTILE_PARTS 64u /* of each power of two */

/** Zeroed: nothing was counted. */
typedef struct kvf_quantiles {
    uint64_t count, worst;
    double sum;
    uint64_t buckets[(65 - 6) * KVF_QUANTILE_PARTS];
} kvf_quantiles;

void kvf_quantiles_add(kvf_quantiles *q, uint64_t ns);
kvf_simulated_times kvf_quantiles_get(const kvf_quantiles *q);

#endif
