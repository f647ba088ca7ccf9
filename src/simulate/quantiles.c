#include "simulate/quantiles.h"

#define PART_BITS 6u

/* Numbers below 64 have buckets of their own; above, the bits behind the first one number a bucket. */
static uint32_t bucket_of(uint64_t ns) {
    if (ns < KVF_QUANTILE_PARTS)
        return (uint32_t)ns;
    const uint32_t shift = 63u - (uint32_t)__builtin_clzll(ns) - PART_BITS;
    return (shift + 1) * KVF_QUANTILE_PARTS + (uint32_t)(ns >> shift) % KVF_QUANTILE_PARTS;
}

/* The largest number in a bucket. */
static uint64_t end_of(uint32_t bucket) {
    if (bucket < KVF_QUANTILE_PARTS)
        return bucket;
    const uint32_t shift = bucket / KVF_QUANTILE_PARTS - 1;
    return ((uint64_t)(KVF_QUANTILE_PARTS + bucket % KVF_QUANTILE_PARTS + 1) << shift) - 1;
}

void kvf_quantiles_add(kvf_quantiles *q, uint64_t ns) {
    q->count++;
    q->sum += (double)ns;
    q->worst = kvf_max_u64(q->worst, ns);
    q->buckets[bucket_of(ns)]++;
}

/* The least number that at least the share `part` of all do not exceed. */
static uint64_t quantile(const kvf_quantiles *q, double part) {
    uint64_t seen = 0;
    for (uint32_t i = 0; i < sizeof q->buckets / sizeof *q->buckets; i++) {
        seen += q->buckets[i];
        if (seen > 0 && (double)seen >= part * (double)q->count)
            return kvf_min_u64(end_of(i), q->worst);
    }
    return q->worst;
}

kvf_simulated_times kvf_quantiles_get(const kvf_quantiles *q) {
    return (kvf_simulated_times){.count = q->count,
                                 .mean_ns = q->count ? q->sum / (double)q->count : 0,
                                 .p50_ns = quantile(q, 0.5),
                                 .p90_ns = quantile(q, 0.9),
                                 .p99_ns = quantile(q, 0.99),
                                 .worst_ns = q->worst};
}
