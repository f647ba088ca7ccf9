/*
 * When to poll a device again: the driver does not report that a copy is over, and constant polling takes a whole
 * processor. A descriptor becomes readable when it is time: soon after a copy has begun or ended, and then after pauses
 * that grow from 20 us to 1 ms. One thread at a time.
 */
#ifndef KVF_CUDA_LOOKS_H
#define KVF_CUDA_LOOKS_H

#include "base/base.h"

/** `fd` is -1 while this is not open: initialise with {-1, 0}. */
typedef struct kvf_looks {
    int fd;
    uint64_t pause_ns;
} kvf_looks;

/** @return KVF_OK; KVF_E_IO when the process has too many descriptors */
kvf_status kvf_looks_open(kvf_looks *looks);

/**
 * Sets when the descriptor becomes readable next; until then it is not readable.
 *
 * @param waiting  a copy is under way; otherwise the descriptor is not readable until this is called again
 * @param changed  a copy has begun or ended since the last call
 */
void kvf_looks_set(kvf_looks *looks, bool waiting, bool changed);

/** Closes it; accepted if it is not open. */
void kvf_looks_close(kvf_looks *looks);

#endif
