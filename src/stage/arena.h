/*
 * The arena: memory of bounded size that is cut into slots, and who may touch which.
 *
 * A slot is *free*, *own* (only our operations touch it), *lent* (a peer may read or write it), or *in doubt* (it was
 * lent, what it was lent for is over, and the peer may touch it still). Lent slots and those in doubt count against the
 * peer's share. At least half of the arena is never lent: own slots always become free by what this side does alone, so
 * two ranks that lend each other all they may still go on.
 *
 * Each time that a slot is lent it gets a new generation, by which a message says of which time it speaks.
 */
#ifndef KVF_STAGE_ARENA_H
#define KVF_STAGE_ARENA_H

#include "base/base.h"

typedef enum kvf_slot_state {
    KVF_SLOT_FREE = 0,
    KVF_SLOT_OWN,
    KVF_SLOT_LENT,
    KVF_SLOT_DOUBT,
} kvf_slot_state;

/** How many slots one peer has. */
typedef struct kvf_slot_share {
    uint32_t lent;  /**< with those in doubt */
    uint32_t doubt; /**< in doubt */
} kvf_slot_share;

typedef struct kvf_slot {
    unsigned char *memory;
    uint32_t number;
    uint32_t generation; /**< of the last time it was lent; never 0 then */
    kvf_slot_state state;
    kvf_slot_share *share;      /**< of the peer it is lent to */
    struct kvf_slot *following; /**< of those that are free */
} kvf_slot;

typedef struct kvf_arena {
    kvf_slot *slots;
    uint32_t slot_count, slot_bytes;
    uint32_t lent, doubt; /**< of all peers; `lent` with those in doubt */
    uint32_t free_count;
    kvf_slot *first_free;
} kvf_arena;

/** Cuts memory into slots. @return KVF_OK, KVF_E_NOMEM */
kvf_status kvf_arena_open(kvf_arena *arena, void *memory, uint32_t slot_count, uint32_t slot_bytes);
void kvf_arena_close(kvf_arena *arena);

/** The most slots that are lent to all peers together. */
uint32_t kvf_arena_lendable(const kvf_arena *arena);

/** The most slots of one peer: half of what can be lent and others do not have, so that peers who keep what they
 * have leave some. Of n who want many each comes to have one in n + 1. */
uint32_t kvf_arena_share(const kvf_arena *arena, const kvf_slot_share *share);

/** A slot for our own operations; NULL: none is free. */
kvf_slot *kvf_arena_take(kvf_arena *arena);

/** A slot to be lent; NULL: none is free, or the peer has its share. */
kvf_slot *kvf_arena_lend(kvf_arena *arena, kvf_slot_share *share);

/** What a lent slot was lent for is over, but the peer may touch it still. */
void kvf_arena_doubt(kvf_arena *arena, kvf_slot *slot);

/** Nobody touches it any more. */
void kvf_arena_give(kvf_arena *arena, kvf_slot *slot);

/** Where a slot begins in the arena. */
static inline uint64_t kvf_slot_offset(const kvf_arena *arena, uint32_t number) {
    return (uint64_t)number * arena->slot_bytes;
}

#endif
