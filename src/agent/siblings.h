/*
 * The ranks of an engine, as its WELCOME introduces them.
 */
#ifndef KVF_AGENT_SIBLINGS_H
#define KVF_AGENT_SIBLINGS_H

#include <kvferry/shard.h>

#include "wire/wire.h"

/** How to reach a rank. */
typedef struct kvf_remote_rank {
    char *endpoint, *public_key;
    uint64_t incarnation;
    struct kvf_session *session;         /* ours with it; NULL: none */
    struct kvf_remote *remote;           /* if there is one: the engine, and */
    struct kvf_remote_rank *prev, *next; /* the session's list */
} kvf_remote_rank;

/* What all shards of an engine may take, beside 32 KiB for each: a shard of a few hundred bytes may name 2^18 regions. */
#define KVF_SIBLINGS_SPARE_BYTES (64ull << 20)
#define KVF_SIBLINGS_SHARD_BYTES (32ull << 10)

/** Reads a shard of the engine, as a shard of the model in kvf_siblings_end(). `pieces` receives how many pieces of cells
 * were compared. */
typedef kvf_status (*kvf_shard_reader)(const void *context, kvf_bytes bytes, uint64_t *pieces,
                                       kvf_shard **out);

/** Introductions that are taken one by one, and then their shards, likewise; zeroed, or from kvf_siblings_begin(). */
typedef struct kvf_siblings {
    kvf_remote_rank *ranks;
    kvf_bytes *told;                    /* by rank: the shard in its introduction; NULL: not taken yet */
    uint8_t sum[KVF_WIRE_DIGEST_BYTES]; /* of the facts, and of all of `told` that were taken */
    kvf_shard **shards;                 /* by rank */
    uint32_t count, taken, read;
    uint64_t pieces; /* of cells that were compared to read the shards */
    uint64_t bytes;  /* of the shards that were read */
} kvf_siblings;

/** @param digest  of the engine's facts */
kvf_status kvf_siblings_begin(kvf_siblings *siblings, uint32_t count, const uint8_t *digest);

/**
 * Takes the next introduction. Each rank may come once, and all must be of one engine with the same cells.
 *
 * @param introduction  must stay valid until its shard was read
 * @return KVF_OK; KVF_E_MISMATCH (introductions contradict each other); KVF_E_NOMEM
 */
kvf_status kvf_siblings_add(kvf_siblings *siblings, kvf_bytes introduction, const char *engine,
                            const uint8_t *digest);

/**
 * Reads the next shard, after all introductions were taken.
 *
 * @param read  gets `context`
 * @return KVF_OK; KVF_E_MISMATCH (the shard is of another rank than its introduction); KVF_E_RANGE (the shards take more
 *         than they may); what `read` returns
 */
kvf_status kvf_siblings_read(kvf_siblings *siblings, kvf_shard_reader read, const void *context);

/**
 * Makes an engine of the shards, after all were read.
 *
 * @return KVF_OK, and the engine owns the shards; what kvf_engine_from_shards() returns
 */
kvf_status kvf_siblings_engine(kvf_siblings *siblings, const char *engine, const kvf_model *model,
                               kvf_engine **out);

/** Returns the `count` ranks, for kvf_siblings_free(), and drops everything else. */
kvf_remote_rank *kvf_siblings_end(kvf_siblings *siblings);

/** Frees everything taken so far. */
void kvf_siblings_drop(kvf_siblings *siblings);

/** Does all of the above at once. On error nothing is received. */
kvf_status kvf_siblings_take(const kvf_welcome *welcome, const uint8_t *digest, const kvf_model *model,
                             kvf_shard_reader read, const void *context, kvf_remote_rank **ranks,
                             kvf_engine **out);

/** NULL is accepted. */
void kvf_siblings_free(kvf_remote_rank *ranks, uint32_t count);

#endif
