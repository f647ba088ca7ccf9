/*
 * Checksums of cells by the kernels of devices, and by the library on the host, compared with sums of hashes of single
 * cells.
 */
#ifndef KVF_PROPERTY_SUMS_H
#define KVF_PROPERTY_SUMS_H

#include "transfer.h"

/** Sums cells of some groups of a remote rank, whose memory is filled. False, after wrong(), if a sum is wrong. */
bool check_sums(const world *w, uint32_t rank, const kvf_shard *shard, const memory *m);

#endif
