/*
 * The machine's own limit: the same runs copied without a transport.
 */
#ifndef KVFERRY_DEMO_COPY_LIMIT_H
#define KVFERRY_DEMO_COPY_LIMIT_H

#include "rank.h"

/** The way to measure the limit for a kind of transport: "memcpy", or "process_vm_readv". */
const char *copy_limit_method(const options *asked, const char *transport);

/** Fills this decode rank's share of the memory to copy from. */
void copy_limit_prepare(live_rank *of);

/**
 * Copies all runs of all requests once, from memory that is as large as the prefill caches were, and measures
 * only the time of the copies. False if it failed; the failure has then been reported.
 */
bool copy_limit_measure(live_rank *of, const kvf_plan *plan, kvf_request *request, const char *method,
                        copy_figures *out);

#endif
