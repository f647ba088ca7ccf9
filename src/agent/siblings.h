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

/** Introductions that are taken one after the other; zeroed, or from kvf_siblings_begin(). */
typedef struct kvf_siblings {
    kvf_remote_rank *ranks;
    kvf_shard **shards;
    uint32_t count, taken;
} kvf_siblings;

kvf_status kvf_siblings_begin(kvf_siblings *siblings, uint32_t count);

/**
 * Takes the next introduction: each rank once, of one engine with the same cells and with its own shard.
 *
 * @param digest  of the engine's facts
 * @param read    gets `context`
 * @return KVF_OK; KVF_E_MISMATCH where introductions contradict each other; what `read` returns; KVF_E_NOMEM
 */
kvf_status kvf_siblings_add(kvf_siblings *siblings, kvf_bytes introduction, const char *engine,
                            const uint8_t *digest, kvf_shard_reader read, const void *context);

/**
 * All were taken.
 *
 * @param ranks  receives `count` of them; see kvf_siblings_free()
 * @param out    receives the engine
 * @return KVF_OK, and the siblings are empty; what kvf_engine_from_shards() returns, and nothing is received
 */
kvf_status kvf_siblings_end(kvf_siblings *siblings, const char *engine, const kvf_model *model,
                            kvf_remote_rank **ranks, kvf_engine **out);

/** Frees what was taken. */
void kvf_siblings_drop(kvf_siblings *siblings);

/** All of it at once. After an error nothing is received. */
kvf_status kvf_siblings_take(const kvf_welcome *welcome, const uint8_t *digest, const kvf_model *model,
                             kvf_shard_reader read, const void *context, kvf_remote_rank **ranks,
                             kvf_engine **out);

/** NULL is accepted. */
void kvf_siblings_free(kvf_remote_rank *ranks, uint32_t count);

#endif
