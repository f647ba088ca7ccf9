#include "agent/siblings.h"

#include "base/base.h"

void kvf_siblings_free(kvf_remote_rank *ranks, uint32_t count) {
    for (uint32_t i = 0; ranks && i < count; i++) {
        kvf_free(ranks[i].endpoint);
        kvf_free(ranks[i].public_key);
    }
    kvf_free(ranks);
}

static kvf_status check_introduction(const kvf_introduction *intro, const kvf_welcome *welcome,
                                     const uint8_t *digest, kvf_shard *const *shards) {
    uint32_t count = welcome->introduction_count;
    if (strcmp(intro->engine, welcome->engine) != 0)
        return kvf_fail(KVF_E_MISMATCH, "an introduction is of engine %s, not %s", intro->engine,
                        welcome->engine);
    if (memcmp(intro->digest, digest, sizeof intro->digest) != 0)
        return kvf_fail(KVF_E_MISMATCH, "rank %u caches other cells than its siblings", intro->rank);
    if (intro->rank_count != count || intro->rank >= count)
        return kvf_fail(KVF_E_MISMATCH, "an introduction is of rank %u of %u, and there are %u", intro->rank,
                        intro->rank_count, count);
    if (shards[intro->rank])
        return kvf_fail(KVF_E_MISMATCH, "rank %u is introduced twice", intro->rank);
    return KVF_OK;
}

static kvf_status take_shard(const kvf_introduction *intro, kvf_shard_reader read, const void *context,
                             kvf_shard **out) {
    kvf_status status = read(context, intro->shard, out);
    uint32_t rank = status ? 0 : kvf_shard_get(*out)->rank;
    if (!status && rank != intro->rank)
        status = kvf_fail(KVF_E_MISMATCH, "the shard of rank %u says it is of rank %u", intro->rank, rank);
    return status;
}

static kvf_status take_place(const kvf_introduction *intro, kvf_remote_rank *out) {
    out->endpoint = kvf_strdup(intro->endpoint);
    out->public_key = kvf_strdup(intro->public_key);
    out->incarnation = intro->incarnation;
    return out->endpoint && out->public_key ? KVF_OK : kvf_nomem("an engine's ranks");
}

kvf_status kvf_siblings_take(const kvf_welcome *welcome, const uint8_t *digest, const kvf_model *model,
                             kvf_shard_reader read, const void *context, kvf_remote_rank **ranks,
                             kvf_engine **out) {
    uint32_t count = welcome->introduction_count;
    kvf_remote_rank *places = kvf_alloc0(count, sizeof *places);
    kvf_shard **shards = kvf_alloc0(count, sizeof *shards);
    kvf_status status = places && shards ? KVF_OK : kvf_nomem("an engine's ranks");
    for (uint32_t i = 0; i < count && !status; i++) {
        kvf_introduction intro;
        void *storage = NULL;
        status = kvf_wire_decode_introduction(welcome->introductions[i], &intro, &storage);
        if (!status)
            status = check_introduction(&intro, welcome, digest, shards);
        if (!status)
            status = take_shard(&intro, read, context, &shards[intro.rank]);
        if (!status)
            status = take_place(&intro, &places[intro.rank]);
        kvf_free(storage);
    }
    if (!status)
        status = kvf_engine_from_shards(model, welcome->engine, shards, count, out);
    for (uint32_t i = 0; status && shards && i < count; i++)
        kvf_shard_free(shards[i]);
    kvf_free(shards);
    if (status)
        kvf_siblings_free(places, count);
    else
        *ranks = places;
    return status;
}
