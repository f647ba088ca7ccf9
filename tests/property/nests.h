/*
 * Moves the nests of a request as "cuda" does: by the kernels of devices, which here run on the processor.
 */
#ifndef KVF_PROPERTY_NESTS_H
#define KVF_PROPERTY_NESTS_H

#include "random.h"
#include "transfer.h"

/**
 * Copies all nests of one source of a request.
 *
 * @param spoiled  NULL; or the control: a kernel that takes the first run of an inner loop for all of them, in one box.
 *                 Receives whether there was such a box, of runs that differ
 * @return false, after wrong(): nests cannot be described to a device
 */
bool emulate_nests(const kvf_request *request, uint32_t source, const memory *from, const memory *to,
                   rng *random, bool *spoiled);

#endif
