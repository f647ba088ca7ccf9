/*
 * The requests of a demo: prompt lengths, prefix hits, and scattered block tables of both engines, chosen so
 * that all caches fit in a given memory.
 *
 * Lengths depend only on the seed, the longest prompt and the number of the request, and tables only on these and
 * their own engine's shape. Two machines that know these numbers, and have one engine each, therefore have the same
 * requests. An engine without a shape has empty tables and takes no memory.
 */
#ifndef KVFERRY_DEMO_WORKLOAD_H
#define KVFERRY_DEMO_WORKLOAD_H

#include <kvferry/request.h>

#include "engines.h"

typedef struct workload {
    uint32_t request_count;
    uint32_t group_count;
    uint64_t longest_tokens;
    uint64_t tokens;      /* of all prompts */
    uint32_t hit_count;   /* requests with a prefix that the decode side already has */
    uint64_t cache_bytes; /* of both engines */
    /** [request][group]; "local" is the decode engine, "remote" the prefill engine. */
    kvf_group_request *groups;
    uint32_t *ids; /* the tables point into it */
} workload;

/**
 * Chooses the requests, sets the block counts of both shapes, lays out the engines, and makes the tables.
 * Prints what is wrong if the options do not fit. Free with workload_free() in either case.
 */
int workload_make(const options *asked, engines *all, workload *out);

void workload_free(workload *work);

/** The groups of one request. */
static inline const kvf_group_request *workload_request(const workload *work, uint32_t request) {
    return &work->groups[(size_t)request * work->group_count];
}

#endif
