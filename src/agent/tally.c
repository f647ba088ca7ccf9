/*
 * Which ranks of which consumer engines are done with something that several of them take.
 */
#include "agent/agent.h"

static kvf_tally_engine *find_engine(const kvf_tally *tally, const char *name) {
    for (kvf_tally_engine *engine = tally->engines; engine; engine = engine->next)
        if (strcmp(engine->name, name) == 0)
            return engine;
    return NULL;
}

static kvf_status add_engine(kvf_tally *tally, const char *name, uint32_t of, kvf_tally_engine **out) {
    kvf_tally_engine *engine = kvf_alloc0(1, sizeof *engine);
    char *copy = kvf_strdup(name);
    if (!engine || !copy) {
        kvf_free(engine);
        kvf_free(copy);
        return kvf_nomem("a count of consumers");
    }
    engine->name = copy;
    engine->of = of;
    engine->next = tally->engines;
    tally->engines = engine;
    *out = engine;
    return KVF_OK;
}

static kvf_status add_rank(kvf_tally_engine *engine, uint32_t rank) {
    if (rank >= engine->rank_capacity) {
        uint32_t capacity = (rank / 8 + 1) * 8;
        uint8_t *ranks = kvf_resize(engine->ranks, capacity, 1);
        if (!ranks)
            return kvf_nomem("a count of consumers");
        memset(ranks + engine->rank_capacity, 0, capacity - engine->rank_capacity);
        engine->ranks = ranks;
        engine->rank_capacity = capacity;
    }
    engine->count += !engine->ranks[rank];
    engine->ranks[rank] = 1;
    return KVF_OK;
}

kvf_status kvf_tally_add(kvf_tally *tally, const char *name, uint32_t rank, uint32_t of) {
    if (of == 0 || rank >= KVF_WIRE_MAX_RANKS)
        return kvf_fail(KVF_E_RANGE,
                        "rank %u of %s, one of %u to say so; allowed: ranks below %u, at least 1", rank, name,
                        of, KVF_WIRE_MAX_RANKS);
    kvf_tally_engine *engine = find_engine(tally, name);
    kvf_status status = engine ? KVF_OK : add_engine(tally, name, of, &engine);
    if (!status && engine->of != of)
        status = kvf_fail(KVF_E_MISMATCH, "rank %u of %s says %u ranks take part, and others said %u", rank,
                          name, of, engine->of);
    if (status)
        return status;
    bool before = engine->count >= engine->of;
    status = add_rank(engine, rank);
    tally->done += !before && engine->count >= engine->of;
    return status;
}

bool kvf_tally_has(const kvf_tally *tally, const char *name, uint32_t rank) {
    const kvf_tally_engine *engine = find_engine(tally, name);
    return engine && rank < engine->rank_capacity && engine->ranks[rank];
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
