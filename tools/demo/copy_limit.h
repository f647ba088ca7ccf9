/*
 * The machine's own limit: the same runs copied without a transport.
 */
#ifndef KVFERRY_DEMO_COPY_LIMIT_H
#define KVFERRY_DEMO_COPY_LIMIT_H

#include "rank.h"

/** How the limit is measured for a kind of transport: "memcpy", or "process_vm_readv". */
const char *copy_limit_method(const options *asked, const char *transport);

/** Fills this decode rank's share of the memory to copy from. */
void copy_limit_prepare(live_rank *of);

/**
 * Copies all runs of all requests once, from memory that is as large as the prefill caches were, and counts
 * the time in the copies alone. False when it failed, which has been reported.
 */
bool copy_limit_measure(live_rank *of, const kvf_plan *plan, kvf_request *request, const char *method,
                        copy_figures *out);

#endif
