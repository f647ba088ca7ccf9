#include "stage/arena.h"

kvf_status kvf_arena_open(kvf_arena *arena, uint32_t region, void *memory, uint32_t slot_count,
                          uint32_t slot_bytes) {
    *arena = (kvf_arena){.region = region,
                         .slots = kvf_alloc0(slot_count, sizeof *arena->slots),
                         .slot_count = slot_count,
                         .slot_bytes = slot_bytes,
                         .free_count = slot_count};
    if (!arena->slots)
        return kvf_nomem("the slots of an arena");
    for (uint32_t i = slot_count; i-- > 0;) {
        kvf_slot *slot = &arena->slots[i];
        slot->memory = (unsigned char *)memory + kvf_slot_offset(arena, i);
        slot->number = i;
        slot->following = arena->first_free;
        arena->first_free = slot;
    }
    return KVF_OK;
}

void kvf_arena_close(kvf_arena *arena) {
    kvf_free(arena->slots);
    *arena = (kvf_arena){0};
}

uint32_t kvf_arena_lendable(const kvf_arena *arena) {
    return arena->slot_count / 2;
}

/* The most slots that one peer may have: half of the lendable slots that other peers do not have, so that peers who
 * keep theirs leave some. If n peers want many slots, each ends up with a share of 1 / (n + 1). */
static uint32_t share_of(const kvf_arena *arena, const kvf_slot_share *share) {
    const uint32_t others = arena->lent - share->lent, lendable = kvf_arena_lendable(arena);
    const uint32_t half = (lendable - others) / 2;
    return half > 0 ? half : 1;
}

/* Takes the most recently used slot: its memory is in the processor's caches. */
static kvf_slot *take(kvf_arena *arena, kvf_slot_state state, kvf_slot_share *share) {
    kvf_slot *slot = arena->first_free;
    if (!slot)
        return NULL;
    KVF_ASSERT(slot->state == KVF_SLOT_FREE && arena->free_count > 0);
    arena->first_free = slot->following;
    arena->free_count--;
    slot->state = state;
    slot->share = share;
    return slot;
}

/* Operations with a peer that does not serve keep their slots until they end. */
bool kvf_arena_has(const kvf_arena *arena, const kvf_slot_share *share) {
    return arena->free_count > share->own;
}

kvf_slot *kvf_arena_take(kvf_arena *arena, kvf_slot_share *share) {
    kvf_slot *slot = kvf_arena_has(arena, share) ? take(arena, KVF_SLOT_OWN, share) : NULL;
    share->own += slot != NULL;
    return slot;
}

kvf_slot *kvf_arena_lend(kvf_arena *arena, kvf_slot_share *share) {
    if (arena->lent >= kvf_arena_lendable(arena) || share->lent >= share_of(arena, share))
        return NULL;
    kvf_slot *slot = take(arena, KVF_SLOT_LENT, share);
    if (!slot)
        return NULL;
    slot->generation = slot->generation == UINT32_MAX ? 1 : slot->generation + 1;
    share->lent++;
    arena->lent++;
    return slot;
}

void kvf_arena_doubt(kvf_arena *arena, kvf_slot *slot) {
    KVF_ASSERT(slot->state == KVF_SLOT_LENT);
    slot->state = KVF_SLOT_DOUBT;
    slot->share->doubt++;
    arena->doubt++;
}

void kvf_arena_give(kvf_arena *arena, kvf_slot *slot) {
    KVF_ASSERT(slot->state != KVF_SLOT_FREE);
    if (slot->state == KVF_SLOT_DOUBT) {
        slot->share->doubt--;
        arena->doubt--;
    }
    if (slot->state == KVF_SLOT_OWN) {
        KVF_ASSERT(slot->share->own > 0);
        slot->share->own--;
    } else {
        KVF_ASSERT(slot->share->lent > 0 && arena->lent > 0);
        slot->share->lent--;
        arena->lent--;
    }
    slot->share = NULL;
    slot->state = KVF_SLOT_FREE;
    slot->following = arena->first_free;
    arena->first_free = slot;
    arena->free_count++;
}
