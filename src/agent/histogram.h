/*
 * Durations, counted in buckets whose bounds are powers of two: kvf_histogram of kvferry/agent.h. A zeroed
 * one is empty. Adding never fails and never allocates.
 */
#ifndef KVF_AGENT_HISTOGRAM_H
#define KVF_AGENT_HISTOGRAM_H

#include <kvferry/agent.h>

/** Counts a duration. The last bucket also counts longer ones (beyond a day and a half); the sum stays at its maximum
 * instead of overflowing. */
void kvf_histogram_add(kvf_histogram *histogram, uint64_t ns);

#endif
