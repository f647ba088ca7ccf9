#include "agent/siblings.h"

#include "base/base.h"
#include "shard/shard.h"

void kvf_siblings_free(kvf_remote_rank *ranks, uint32_t count) {
    for (uint32_t i = 0; ranks && i < count; i++) {
        kvf_free(ranks[i].endpoint);
        kvf_free(ranks[i].public_key);
    }
    kvf_free(ranks);
}

static kvf_status check_introduction(const kvf_introduction *intro, const kvf_siblings *siblings,
                                     const char *engine, const uint8_t *digest) {
    uint32_t count = siblings->count;
    if (strcmp(intro->engine, engine) != 0)
        return kvf_fail(KVF_E_MISMATCH, "an introduction is of engine %s, not %s", intro->engine, engine);
    if (memcmp(intro->digest, digest, sizeof intro->digest) != 0)
        return kvf_fail(KVF_E_MISMATCH, "rank %u caches other cells than its siblings", intro->rank);
    if (intro->rank_count != count || intro->rank >= count)
        return kvf_fail(KVF_E_MISMATCH, "an introduction is of rank %u of %u, but the engine has %u ranks",
                        intro->rank, intro->rank_count, count);
    if (siblings->told[intro->rank].data)
        return kvf_fail(KVF_E_MISMATCH, "rank %u is introduced twice", intro->rank);
    return KVF_OK;
}

static kvf_status take_place(const kvf_introduction *intro, kvf_remote_rank *out) {
    out->endpoint = kvf_strdup(intro->endpoint);
    out->public_key = kvf_strdup(intro->public_key);
    out->incarnation = intro->incarnation;
    return out->endpoint && out->public_key ? KVF_OK : kvf_nomem("an engine's ranks");
}

kvf_status kvf_siblings_begin(kvf_siblings *siblings, uint32_t count, const uint8_t *digest) {
    *siblings = (kvf_siblings){.ranks = kvf_alloc0(count, sizeof *siblings->ranks),
                               .told = kvf_alloc0(count, sizeof *siblings->told),
                               .shards = kvf_alloc0(count, sizeof *siblings->shards),
                               .count = count};
    memcpy(siblings->sum, digest, sizeof siblings->sum);
    if (siblings->ranks && siblings->told && siblings->shards)
        return KVF_OK;
    kvf_siblings_drop(siblings);
    return kvf_nomem("an engine's ranks");
}

void kvf_siblings_drop(kvf_siblings *siblings) {
    for (uint32_t i = 0; siblings->shards && i < siblings->count; i++)
        kvf_shard_free(siblings->shards[i]);
    kvf_free(siblings->shards);
    kvf_free(siblings->told);
    kvf_siblings_free(siblings->ranks, siblings->count);
    *siblings = (kvf_siblings){0};
}

kvf_status kvf_siblings_add(kvf_siblings *siblings, kvf_bytes introduction, const char *engine,
                            const uint8_t *digest) {
    kvf_introduction intro;
    void *storage = NULL;
    kvf_status status = kvf_wire_decode_introduction(introduction, &intro, &storage);
    if (!status)
        status = check_introduction(&intro, siblings, engine, digest);
    if (!status)
        status = take_place(&intro, &siblings->ranks[intro.rank]);
    if (!status) {
        siblings->told[intro.rank] = intro.shard;
        kvf_wire_sum_shard(siblings->sum, intro.rank, intro.shard);
        siblings->taken++;
    }
    kvf_free(storage);
    return status;
}

/* Counts the memory of a shard that was read. */
static kvf_status count_shard(kvf_siblings *siblings, const kvf_shard *shard) {
    const uint64_t most = KVF_SIBLINGS_SPARE_BYTES + siblings->count * KVF_SIBLINGS_SHARD_BYTES;
    siblings->bytes += kvf_shard_memory_bytes(shard);
    return siblings->bytes <= most
               ? KVF_OK
               : kvf_fail(KVF_E_RANGE,
                          "the shards of the first %u ranks take %llu bytes; allowed: up to %llu in all",
                          siblings->read + 1, (unsigned long long)siblings->bytes, (unsigned long long)most);
}

kvf_status kvf_siblings_read(kvf_siblings *siblings, kvf_shard_reader read, const void *context) {
    const uint32_t rank = siblings->read;
    KVF_ASSERT(siblings->taken == siblings->count && rank < siblings->count);
    uint64_t pieces = 0;
    kvf_status status = read(context, siblings->told[rank], &pieces, &siblings->shards[rank]);
    siblings->pieces += pieces;
    const uint32_t said = status ? rank : kvf_shard_get(siblings->shards[rank])->rank;
    if (said != rank)
        status = kvf_fail(KVF_E_MISMATCH, "the shard of rank %u says it is of rank %u", rank, said);
    if (!status)
        status = count_shard(siblings, siblings->shards[rank]);
    siblings->read += !status;
    return status;
}

kvf_status kvf_siblings_engine(kvf_siblings *siblings, const char *engine, const kvf_model *model,
                               kvf_engine **out) {
    kvf_status status = kvf_engine_from_shards(model, engine, siblings->shards, siblings->count, out);
    if (status)
        return status;
    kvf_free(siblings->shards); /* the engine owns the shards */
    siblings->shards = NULL;
    return KVF_OK;
}

kvf_remote_rank *kvf_siblings_end(kvf_siblings *siblings) {
    kvf_remote_rank *ranks = siblings->ranks;
    siblings->ranks = NULL;
    kvf_siblings_drop(siblings);
    return ranks;
}

kvf_status kvf_siblings_take(const kvf_welcome *welcome, const uint8_t *digest, const kvf_model *model,
                             kvf_shard_reader read, const void *context, kvf_remote_rank **ranks,
                             kvf_engine **out) {
    kvf_siblings siblings;
    const uint32_t count = welcome->introduction_count;
    kvf_status status = kvf_siblings_begin(&siblings, count, digest);
    for (uint32_t i = 0; i < count && !status; i++)
        status = kvf_siblings_add(&siblings, welcome->introductions[i], welcome->engine, digest);
    for (uint32_t i = 0; i < count && !status; i++)
        status = kvf_siblings_read(&siblings, read, context);
    if (!status)
        status = kvf_siblings_engine(&siblings, welcome->engine, model, out);
    if (!status)
        *ranks = kvf_siblings_end(&siblings);
    kvf_siblings_drop(&siblings);
    return status;
}
