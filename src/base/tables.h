/*
 * Hash tables and lists: uthash and utlist with kvferry's allocator, with an insertion that can fail instead of ending
 * the process, and with a hash that others cannot compute.
 */
#ifndef KVF_TABLES_H
#define KVF_TABLES_H

#include <sodium.h>

#include "base/base.h"

_Static_assert(crypto_shorthash_KEYBYTES == KVF_PROCESS_SECRET_BYTES, "the secret is the key of the hashes");

/* Peers choose many of the keys. With a hash that they can compute they would choose keys of the same hash, and each
 * lookup would visit all of them. */
static inline unsigned kvf_table_hash(const void *key, size_t bytes) {
    uint8_t hash[crypto_shorthash_BYTES];
    unsigned out;
    (void)crypto_shorthash(hash, key, bytes, kvf_process_secret());
    memcpy(&out, hash, sizeof out);
    return out;
}

#define HASH_FUNCTION(key, bytes, hash) ((hash) = kvf_table_hash(key, bytes))
#define HASH_NONFATAL_OOM 1
#define uthash_malloc(bytes) kvf_alloc(1, bytes)
#define uthash_free(memory, bytes) kvf_free(memory)
#define uthash_nonfatal_oom(element) ((void)(element))
#include <uthash.h>
#include <utlist.h>

#endif
