/*
 * The same transfer between stages: over transports, in chunks of layers and steps that are pulled and pushed at once,
 * packed through arenas of four slots, direct, or by the way that the stage chooses, and compared with the cells.
 */
#ifndef KVF_PROPERTY_FLOWS_H
#define KVF_PROPERTY_FLOWS_H

#include "packed.h"

/**
 * Moves the request of a plan.
 *
 * @param expected  the local rank's memory afterwards
 * @param written   a byte for each byte of that memory: 1 if it moves
 * @return false, after wrong(), if a byte is wrong, or a stage keeps slots or flows
 */
bool move_in_flows(const packed_transfer *t, const memory *expected, const memory *written);

#endif
