/*
 * Gathers the introductions of an engine's ranks, which come in several messages.
 */
#ifndef KVF_WIRE_GATHER_H
#define KVF_WIRE_GATHER_H

#include "wire/wire.h"

#define KVF_GATHER_MAX_BYTES (64ull << 20) /* of all introductions of an engine */

/** What came so far; zeroed at first. */
typedef struct kvf_gathering {
    uint8_t digest[KVF_WIRE_DIGEST_BYTES];
    uint64_t incarnation; /* of the agent that sends them */
    uint32_t rank_count;
    kvf_bytes *introductions; /* each is a copy */
    uint32_t count;           /* ranks received so far: the next part begins with this one */
    uint64_t bytes;
    char *facts;
} kvf_gathering;

/**
 * Takes a WELCOME with introductions. It is ignored if it does not begin with the next rank. If the sender or the facts
 * have changed, gathering begins again.
 *
 * @param complete  receives whether all ranks are known
 * @return KVF_OK, KVF_E_PARSE (more ranks than there are), KVF_E_RANGE (KVF_GATHER_MAX_BYTES), KVF_E_NOMEM
 */
kvf_status kvf_gather(kvf_gathering *gathering, const uint8_t *digest, const kvf_welcome *welcome,
                      bool *complete);

/** A WELCOME as if all had come at once; it points into the gathering and `welcome`. */
kvf_welcome kvf_gathered(const kvf_gathering *gathering, const kvf_welcome *welcome);

/** The end of a part that begins with `first` and fits into a message. A part has at least one introduction. */
uint32_t kvf_gather_end(const kvf_wire_buffer *introductions, uint32_t first, uint32_t count);

void kvf_gather_free(kvf_gathering *gathering);

#endif
