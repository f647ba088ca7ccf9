/*
 * Which ranks of which consumer engines are done with something that several of them take.
 */
#include "agent/tally.h"

static kvf_tally_engine *find_engine(const kvf_tally *tally, const char *name) {
    for (kvf_tally_engine *engine = tally->engines; engine; engine = engine->next)
        if (strcmp(engine->name, name) == 0)
            return engine;
    return NULL;
}

static kvf_status add_engine(kvf_tally *tally, const char *name, uint32_t expected_ranks,
                             kvf_tally_engine **out) {
    kvf_tally_engine *engine = kvf_alloc0(1, sizeof *engine);
    char *copy = kvf_strdup(name);
    if (!engine || !copy) {
        kvf_free(engine);
        kvf_free(copy);
        return kvf_nomem("a count of consumers");
    }
    engine->name = copy;
    engine->expected_ranks = expected_ranks;
    engine->next = tally->engines;
    tally->engines = engine;
    *out = engine;
    return KVF_OK;
}

static kvf_status add_rank(kvf_tally_engine *engine, uint32_t rank, kvf_tally_mark mark) {
    if (rank >= engine->rank_capacity) {
        uint32_t capacity = (rank / 8 + 1) * 8;
        uint8_t *ranks = kvf_resize(engine->ranks, capacity, 1);
        if (!ranks)
            return kvf_nomem("a count of consumers");
        memset(ranks + engine->rank_capacity, 0, capacity - engine->rank_capacity);
        engine->ranks = ranks;
        engine->rank_capacity = capacity;
    }
    engine->count += engine->ranks[rank] == KVF_TALLY_WAITS;
    if (engine->ranks[rank] != KVF_TALLY_HAS_IT)
        engine->ranks[rank] = (uint8_t)mark;
    return KVF_OK;
}

kvf_status kvf_tally_add(kvf_tally *tally, const char *name, uint32_t rank, uint32_t expected_ranks,
                         kvf_tally_mark mark) {
    if (expected_ranks == 0 || rank >= KVF_WIRE_MAX_RANKS)
        return kvf_fail(KVF_E_RANGE,
                        "rank %u of %s, one of %u to say so; allowed: ranks below %u, at least 1", rank, name,
                        expected_ranks, KVF_WIRE_MAX_RANKS);
    kvf_tally_engine *engine = find_engine(tally, name);
    kvf_status status = engine ? KVF_OK : add_engine(tally, name, expected_ranks, &engine);
    if (!status && engine->expected_ranks != expected_ranks)
        status = kvf_fail(KVF_E_MISMATCH, "rank %u of %s says %u ranks take part, and others said %u", rank,
                          name, expected_ranks, engine->expected_ranks);
    if (status)
        return status;
    bool before = engine->count >= engine->expected_ranks;
    status = add_rank(engine, rank, mark);
    tally->done += !before && engine->count >= engine->expected_ranks;
    return status;
}

kvf_tally_mark kvf_tally_of(const kvf_tally *tally, const char *name, uint32_t rank) {
    const kvf_tally_engine *engine = find_engine(tally, name);
    return engine && rank < engine->rank_capacity ? (kvf_tally_mark)engine->ranks[rank] : KVF_TALLY_WAITS;
}

void kvf_tally_take_back(kvf_tally *tally, const char *name, uint32_t rank) {
    kvf_tally_engine *engine = find_engine(tally, name);
    if (!engine || kvf_tally_of(tally, name, rank) != KVF_TALLY_GAVE_UP)
        return;
    tally->done -= engine->count == engine->expected_ranks;
    engine->count--;
    engine->ranks[rank] = KVF_TALLY_WAITS;
}

const char *kvf_tally_deserter(const kvf_tally *tally, uint32_t *rank) {
    for (const kvf_tally_engine *engine = tally->engines; engine; engine = engine->next)
        for (uint32_t r = 0; r < engine->rank_capacity; r++)
            if (engine->ranks[r] == KVF_TALLY_GAVE_UP) {
                *rank = r;
                return engine->name;
            }
    return NULL;
}

bool kvf_tally_complete(const kvf_tally *tally) {
    return tally->done >= tally->wanted;
}

void kvf_tally_free(kvf_tally *tally) {
    while (tally->engines) {
        kvf_tally_engine *engine = tally->engines;
        tally->engines = engine->next;
        kvf_free(engine->name);
        kvf_free(engine->ranks);
        kvf_free(engine);
    }
    tally->done = 0;
}
