/*
 * Gathers and scatters bytes of a stream as a device does: by the kernels of devices, which here run on the processor,
 * thread by thread.
 */
#ifndef KVF_PROPERTY_EMULATED_H
#define KVF_PROPERTY_EMULATED_H

#include "stage/stream.h"
#include "transfer.h"

/**
 * Gathers from, or scatters into, the memory of a rank.
 *
 * @param slot    of the bytes; only read if they are scattered
 * @param blocks  of threads
 * @return false, after wrong(): the cells cannot be described to a device
 */
bool emulate_gather(const kvf_stream *stream, const memory *m, kvf_byte_range bytes, unsigned char *slot,
                    uint32_t blocks);
bool emulate_scatter(const kvf_stream *stream, const memory *m, kvf_byte_range bytes,
                     const unsigned char *slot, uint32_t blocks);

/**
 * The control: gathers with a kernel that takes the first unit of a row for all units, in one box.
 *
 * @param spoiled  receives whether there was such a box, of cells that differ
 */
bool emulate_spoiled(const kvf_stream *stream, const memory *m, kvf_byte_range bytes, unsigned char *slot,
                     bool *spoiled);

#endif
