/*
 * Requests that must be refused, and which ranks must refuse them.
 */
#ifndef KVF_PROPERTY_REQUESTS_H
#define KVF_PROPERTY_REQUESTS_H

#include "transfer.h"

typedef struct faulty_request {
    kvf_group_request groups[MAX_GROUPS];
    uint32_t group_count;
    kvf_status expected; /* of this rank: KVF_OK where it does not touch what is wrong */
    char named[16];      /* what the detail must say */
} faulty_request;

/** Makes the faulty request of a case, as one local rank sees it. False when the case has none. */
bool make_faulty(const world *w, const asked *ask, uint32_t local_rank, faulty_request *out);

#endif
