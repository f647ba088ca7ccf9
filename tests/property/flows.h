/*
 * The same transfer between stages: over transports, in chunks of layers and steps that are pulled and pushed at once,
 * packed through arenas of four slots, direct, or by the way that the stage chooses, and compared with the cells.
 */
#ifndef KVF_PROPERTY_FLOWS_H
#define KVF_PROPERTY_FLOWS_H

#include "packed.h"

/**
 * Moves what a plan says.
 *
 * @param expected  the local rank's memory afterwards
 * @param written   a byte for each of it: 1 where something moves
 * @return false, after wrong(), when a byte is not as it should be, or a stage keeps something
 */
bool move_in_flows(const packed_transfer *t, const memory *expected, const memory *written);

#endif
