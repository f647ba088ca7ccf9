/*
 * The arena: memory of bounded size that is cut into slots, and the record of who may touch each.
 *
 * A slot is *free*, *own* (only our operations touch it), *lent* (a peer may read or write it), or *in doubt* (it was
 * lent to a flow that is over, but the peer may still touch it). Lent slots and those in doubt count against the peer's
 * share. At least half of the arena is never lent. This side alone can free its own slots, so two ranks still make
 * progress when each has lent the other as much as it may.
 *
 * A slot gets a new generation each time it is lent; messages name it, to tell one loan from another.
 */
#ifndef KVF_STAGE_ARENA_H
#define KVF_STAGE_ARENA_H

#include "base/base.h"

#define KVF_ARENAS 2 /**< of a stage, by kvf_memory_kind: the host's memory, and that of the shard's device */

typedef enum kvf_slot_state {
    KVF_SLOT_FREE = 0,
    KVF_SLOT_OWN,
    KVF_SLOT_LENT,
    KVF_SLOT_DOUBT,
} kvf_slot_state;

/** How many slots one peer has. */
typedef struct kvf_slot_share {
    uint32_t lent;  /**< to it, including those in doubt */
    uint32_t doubt; /**< those in doubt */
    uint32_t own;   /**< of our operations with it */
} kvf_slot_share;

typedef struct kvf_slot {
    unsigned char *memory;
    uint32_t number;
    uint32_t generation; /**< of its last loan, from 1; 0: never lent */
    kvf_slot_state state;
    kvf_slot_share *share;      /**< of the peer to which it is lent, or for which our operations use it */
    struct kvf_slot *following; /**< the next free slot */
} kvf_slot;

typedef struct kvf_arena {
    uint32_t region; /**< the number under which the transport knows the memory */
    kvf_slot *slots; /**< NULL: there is no arena */
    uint32_t slot_count, slot_bytes;
    uint32_t lent, doubt; /**< of all peers; `lent` includes those in doubt */
    uint32_t free_count;
    kvf_slot *first_free;
    uint32_t waiting; /**< flows that wait while their peer has no slot; perhaps too many */
} kvf_arena;

/** Cuts memory, registered as `region`, into slots. @return KVF_OK, KVF_E_NOMEM */
kvf_status kvf_arena_open(kvf_arena *arena, uint32_t region, void *memory, uint32_t slot_count,
                          uint32_t slot_bytes);
void kvf_arena_close(kvf_arena *arena);

/** The most slots that may be lent to all peers together. */
uint32_t kvf_arena_lendable(const kvf_arena *arena);

/** Whether there is a slot for our own operations with a peer: of those that others leave, a peer may have half, and
 * always one. So each of n peers that keep their slots has one in n + 1. */
bool kvf_arena_has(const kvf_arena *arena, const kvf_slot_share *share);

/** Takes a slot for our own operations with a peer; NULL: there is none. */
kvf_slot *kvf_arena_take(kvf_arena *arena, kvf_slot_share *share);

/** Takes a slot to lend; NULL: none is free or lendable, or the peer has its share. */
kvf_slot *kvf_arena_lend(kvf_arena *arena, kvf_slot_share *share);

/** Marks a lent slot as in doubt: its flow is over, but the peer may still touch it. */
void kvf_arena_doubt(kvf_arena *arena, kvf_slot *slot);

/** Frees a slot that nobody touches any more. */
void kvf_arena_give(kvf_arena *arena, kvf_slot *slot);

/** Where a slot begins in the arena. */
static inline uint64_t kvf_slot_offset(const kvf_arena *arena, uint32_t number) {
    return (uint64_t)number * arena->slot_bytes;
}

#endif
