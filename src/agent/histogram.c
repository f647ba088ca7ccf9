/* Counting durations in buckets, and estimating quantiles from them. */
#include "agent/histogram.h"

#include "base/base.h"

static uint32_t bucket_of(uint64_t ns) {
    uint32_t bucket = ns < 2 ? 0 : 63u - (uint32_t)__builtin_clzll(ns);
    return bucket < KVF_HISTOGRAM_BUCKETS ? bucket : KVF_HISTOGRAM_BUCKETS - 1;
}

void kvf_histogram_add(kvf_histogram *histogram, uint64_t ns) {
    histogram->min_ns = histogram->count == 0 ? ns : kvf_min_u64(histogram->min_ns, ns);
    histogram->max_ns = kvf_max_u64(histogram->max_ns, ns);
    histogram->sum_ns = kvf_add_or_most(histogram->sum_ns, ns);
    histogram->count++;
    histogram->buckets[bucket_of(ns)]++;
}

/* Where in [begin, end) of a bucket the share lies, if its durations are spread evenly. The shortest and the longest
 * duration narrow the first and the last bucket. */
static uint64_t within(const kvf_histogram *histogram, uint32_t bucket, double share) {
    uint64_t begin = bucket == 0 ? 0 : UINT64_C(1) << bucket;
    uint64_t end = bucket == KVF_HISTOGRAM_BUCKETS - 1 ? histogram->max_ns : UINT64_C(2) << bucket;
    begin = kvf_max_u64(begin, histogram->min_ns);
    end = kvf_min_u64(end, histogram->max_ns);
    if (end <= begin)
        return begin;
    uint64_t width = end - begin;
    uint64_t step = (uint64_t)((double)width * share); /* share <= 1, but a double may round the width up */
    return begin + kvf_min_u64(step, width);
}

uint64_t kvf_histogram_quantile(const kvf_histogram *histogram, double quantile) {
    if (!histogram || histogram->count == 0)
        return 0;
    if (!(quantile > 0)) /* also true for NaN */
        return histogram->min_ns;
    if (quantile >= 1)
        return histogram->max_ns;
    double wanted = quantile * (double)histogram->count;
    double before = 0;
    for (uint32_t i = 0; i < KVF_HISTOGRAM_BUCKETS; i++) {
        double here = (double)histogram->buckets[i];
        if (before + here >= wanted) /* not an empty one: there is more wanted than before it */
            return within(histogram, i, (wanted - before) / here);
        before += here;
    }
    return histogram->max_ns; /* reached only when the counts do not add up */
}
