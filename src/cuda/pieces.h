/*
 * Pieces of one allocation of a device, given out and taken back by the host alone. The driver may wait for all work of
 * the device when it allocates or frees memory, and for some devices it has no pools of memory that would not.
 *
 * All use of the pieces is in the order of one stream. So a piece may be given out again while the device still uses it:
 * what uses it next runs behind. Only arithmetic: no driver, no device. One thread at a time.
 */
#ifndef KVF_CUDA_PIECES_H
#define KVF_CUDA_PIECES_H

#include "base/base.h"

typedef struct kvf_piece kvf_piece;

/** `begin` and `end` are addresses of the device; a zeroed struct has no memory to give. */
typedef struct kvf_pieces {
    uint64_t begin, end;
    kvf_piece *taken; /**< in the order of their addresses */
} kvf_pieces;

/**
 * Takes a piece.
 *
 * @return its address, which is aligned as the driver aligns allocations; 0: no gap has so many bytes, or the host lacks
 *         memory
 */
uint64_t kvf_pieces_take(kvf_pieces *pieces, uint64_t bytes);

/** Gives a piece back. False: the address is not one of a piece that was taken. */
bool kvf_pieces_give(kvf_pieces *pieces, uint64_t address);

/** Forgets all pieces. */
void kvf_pieces_free(kvf_pieces *pieces);

#endif
