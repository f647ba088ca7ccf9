/*
 * Requests that must be refused, and which ranks must refuse them.
 */
#ifndef KVF_PROPERTY_REQUESTS_H
#define KVF_PROPERTY_REQUESTS_H

#include "transfer.h"

typedef struct faulty_request {
    kvf_group_request groups[MAX_GROUPS];
    uint32_t group_count;
    kvf_status expected; /* from this rank: KVF_OK if it does not touch the fault */
    char named[16];      /* the text that the detail must contain */
} faulty_request;

/** Makes the faulty request of a case, as one local rank sees it. False when the case has none. */
bool make_faulty(const world *w, const asked *ask, uint32_t local_rank, faulty_request *out);

#endif
