/*
 * The requests of a demo: prompt lengths, prefix hits, and scattered block tables of both engines, chosen so
 * that all of it fits in a given memory.
 *
 * Lengths follow from the seed, the longest prompt and the number of the request alone, and tables from those and
 * their own engine's shape. So two machines that each have one of the engines, and know these numbers, have the same
 * requests: where an engine has no shape its tables are empty and take no memory.
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
    uint32_t hit_count;   /* requests of which a prefix is on the decode side already */
    uint64_t cache_bytes; /* of both engines */
    /** [request][group]; "local" is the decode engine, "remote" the prefill engine. */
    kvf_group_request *groups;
    uint32_t *ids; /* what the tables point into */
} workload;

/**
 * Chooses the requests, sets the block counts of both shapes, lays out the engines, and makes the tables.
 * Says what is wrong when what was asked for does not fit. Free with workload_free() in either case.
 */
int workload_make(const options *asked, engines *all, workload *out);

void workload_free(workload *work);

/** The groups of one request. */
static inline const kvf_group_request *workload_request(const workload *work, uint32_t request) {
    return &work->groups[(size_t)request * work->group_count];
}

#endif
