/*
 * When to look again at what a device does: the driver tells nobody that a copy is over, and to look all the time takes a
 * processor. A descriptor becomes readable when it is time: soon after something has begun or ended, and then after pauses
 * that grow from 20 us to 1 ms. One thread at a time.
 */
#ifndef KVF_CUDA_LOOKS_H
#define KVF_CUDA_LOOKS_H

#include "base/base.h"

/** `fd` is -1 while it is not open: initialise with {-1, 0}. */
typedef struct kvf_looks {
    int fd;
    uint64_t pause_ns;
} kvf_looks;

/** @return KVF_OK; KVF_E_IO when the process has too many descriptors */
kvf_status kvf_looks_open(kvf_looks *looks);

/**
 * Says when the descriptor is readable next; it is not before.
 *
 * @param waiting  something is under way; otherwise it is not readable until this is called again
 * @param changed  something has begun or ended since the last call
 */
void kvf_looks_set(kvf_looks *looks, bool waiting, bool changed);

/** Closes it; one that is not open is accepted. */
void kvf_looks_close(kvf_looks *looks);

#endif
