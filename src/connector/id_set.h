/*
 * A set of block ids: a hash table with open addressing in memory of the caller's.
 */
#ifndef KVF_CONNECTOR_ID_SET_H
#define KVF_CONNECTOR_ID_SET_H

#include "base/base.h"

#define KVF_NO_ID UINT32_MAX /**< no region has this block */

/** The slots of a table for `ids` ids: a power of two, and at least twice `ids`. False: too many. */
static inline bool kvf_id_set_slots(uint64_t ids, uint64_t *out) {
    *out = 4;
    while (*out / 2 < ids) {
        if (*out > UINT64_MAX / 4)
            return false;
        *out *= 2;
    }
    return true;
}

/** Empties a set. */
static inline void kvf_id_set_clear(uint32_t *table, uint64_t slots) {
    memset(table, 0xff, slots * sizeof *table);
}

/** Adds an id; false if it is in the set already. */
static inline bool kvf_id_set_add(uint32_t *table, uint64_t slots, uint32_t id) {
    /* The factor is 2^64 over the golden ratio: it spreads ids that are near each other. */
    uint64_t slot = (id * 0x9e3779b97f4a7c15u >> 32) & (slots - 1);
    for (; table[slot] != KVF_NO_ID; slot = (slot + 1) & (slots - 1))
        if (table[slot] == id)
            return false;
    table[slot] = id;
    return true;
}

#endif
