/*
 * The introductions of an engine's ranks, which come in as many messages as they need.
 */
#ifndef KVF_WIRE_GATHER_H
#define KVF_WIRE_GATHER_H

#include "wire/wire.h"

#define KVF_GATHER_MAX_BYTES (64ull << 20) /* of all introductions of an engine */

/** What came so far; zeroed at first. */
typedef struct kvf_gathering {
    uint8_t digest[KVF_WIRE_DIGEST_BYTES];
    uint64_t incarnation; /* of who tells */
    uint32_t rank_count;
    kvf_bytes *introductions; /* each is a copy */
    uint32_t count;           /* the ranks below it are known: the next part begins with it */
    uint64_t bytes;
    char *facts;
} kvf_gathering;

/**
 * Takes a WELCOME with introductions. One of other ranks than the next is passed over; where somebody else tells, or
 * something else, it begins anew.
 *
 * @param complete  receives whether all are there
 * @return KVF_OK, KVF_E_PARSE (more ranks than there are), KVF_E_RANGE (KVF_GATHER_MAX_BYTES), KVF_E_NOMEM
 */
kvf_status kvf_gather(kvf_gathering *gathering, const uint8_t *digest, const kvf_welcome *welcome,
                      bool *complete);

/** A WELCOME as if all had come at once; it points into the gathering and `welcome`. */
kvf_welcome kvf_gathered(const kvf_gathering *gathering, const kvf_welcome *welcome);

/** The place where a part that begins with `first` ends, so that it fits into a message. At least one goes. */
uint32_t kvf_gather_end(const kvf_wire_buffer *introductions, uint32_t first, uint32_t count);

void kvf_gather_free(kvf_gathering *gathering);

#endif
