/*
 * The ranks of an engine, as its WELCOME introduces them.
 */
#ifndef KVF_AGENT_SIBLINGS_H
#define KVF_AGENT_SIBLINGS_H

#include <kvferry/shard.h>

#include "wire/wire.h"

/** Where a rank is met. */
typedef struct kvf_remote_rank {
    char *endpoint, *public_key;
    uint64_t incarnation;
    struct kvf_session *session; /* ours with it; NULL: none */
} kvf_remote_rank;

/** Reads a shard of the engine, as a shard of the model in kvf_siblings_end(). */
typedef kvf_status (*kvf_shard_reader)(const void *context, kvf_bytes bytes, kvf_shard **out);

/** Introductions that are taken one after the other, and then the shards in them; zeroed, or from
 * kvf_siblings_begin(). */
typedef struct kvf_siblings {
    kvf_remote_rank *ranks;
    kvf_bytes *told; /* by rank: its shard as it says it, in its introduction; NULL: not taken yet */
    uint8_t sum[KVF_WIRE_DIGEST_BYTES]; /* of the facts, and of all of those that were taken */
    kvf_shard **shards;                 /* by rank */
    uint32_t count, taken, read;
} kvf_siblings;

/** @param digest  of the engine's facts */
kvf_status kvf_siblings_begin(kvf_siblings *siblings, uint32_t count, const uint8_t *digest);

/**
 * Takes the next introduction: each rank once, of one engine with the same cells.
 *
 * @param introduction  must stay until its shard was read
 * @return KVF_OK; KVF_E_MISMATCH where introductions contradict each other; KVF_E_NOMEM
 */
kvf_status kvf_siblings_add(kvf_siblings *siblings, kvf_bytes introduction, const char *engine,
                            const uint8_t *digest);

/**
 * Reads the next shard, of introductions that were all taken.
 *
 * @param read  gets `context`
 * @return KVF_OK; KVF_E_MISMATCH where it is of another rank than who told it; what `read` returns
 */
kvf_status kvf_siblings_read(kvf_siblings *siblings, kvf_shard_reader read, const void *context);

/**
 * Makes an engine of the shards, which were all read.
 *
 * @return KVF_OK, and the engine has the shards; what kvf_engine_from_shards() returns
 */
kvf_status kvf_siblings_engine(kvf_siblings *siblings, const char *engine, const kvf_model *model,
                               kvf_engine **out);

/** Hands out the ranks, `count` of them, see kvf_siblings_free(); drops all else. */
kvf_remote_rank *kvf_siblings_end(kvf_siblings *siblings);

/** Frees what was taken. */
void kvf_siblings_drop(kvf_siblings *siblings);

/** All of it at once. After an error nothing is received. */
kvf_status kvf_siblings_take(const kvf_welcome *welcome, const uint8_t *digest, const kvf_model *model,
                             kvf_shard_reader read, const void *context, kvf_remote_rank **ranks,
                             kvf_engine **out);

/** NULL is accepted. */
void kvf_siblings_free(kvf_remote_rank *ranks, uint32_t count);

#endif
