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

/** Reads a shard of the engine, as a shard of `model` in kvf_siblings_take(). */
typedef kvf_status (*kvf_shard_reader)(const void *context, kvf_bytes bytes, kvf_shard **out);

/**
 * Takes the introductions of all ranks, each once, of one engine with the same cells and with its own shard.
 *
 * @param digest  of the engine's facts
 * @param read    gets `context`
 * @param ranks   receives as many as there are introductions; see kvf_siblings_free()
 * @param out     receives the engine
 * @return KVF_OK; KVF_E_MISMATCH where introductions contradict each other; what `read` and kvf_engine_from_shards()
 *         return; KVF_E_NOMEM. After an error nothing is received
 */
kvf_status kvf_siblings_take(const kvf_welcome *welcome, const uint8_t *digest, const kvf_model *model,
                             kvf_shard_reader read, const void *context, kvf_remote_rank **ranks,
                             kvf_engine **out);

/** NULL is accepted. */
void kvf_siblings_free(kvf_remote_rank *ranks, uint32_t count);

#endif
