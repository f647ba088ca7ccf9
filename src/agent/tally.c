/*
 * Which ranks of which consumer engines are done with something that several of them receive.
 */
#include "agent/tally.h"

static kvf_tally_engine *find_engine(const kvf_tally *tally, const char *name) {
    for (kvf_tally_engine *engine = tally->engines; engine; engine = engine->next)
        if (strcmp(engine->name, name) == 0)
            return engine;
    return NULL;
}

static void count_bytes(kvf_tally *tally, uint64_t bytes) {
    tally->bytes += bytes;
    if (tally->kept)
        *tally->kept += bytes;
}

static kvf_status add_engine(kvf_tally *tally, const char *name, uint32_t expected_ranks,
                             kvf_tally_engine **out) {
    if (tally->engine_count >= (uint64_t)tally->wanted + KVF_TALLY_STRANGERS)
        return kvf_fail(KVF_E_LIMIT, "ranks of %u engines have said that they are done, the most allowed",
                        tally->engine_count);
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
    tally->engine_count++;
    count_bytes(tally, sizeof *engine + strlen(name) + 1);
    *out = engine;
    return KVF_OK;
}

/* ---- marks ----------------------------------------------------------------------------------- */

#define RANK_MASK (KVF_WIRE_MAX_RANKS - 1)

static uint32_t rank_of(uint32_t said) {
    return said & RANK_MASK;
}

static kvf_tally_mark mark_of(uint32_t said) {
    return (kvf_tally_mark)(said / KVF_WIRE_MAX_RANKS);
}

static void set_mark(uint32_t *said, uint32_t rank, kvf_tally_mark mark) {
    *said = rank | (uint32_t)mark * KVF_WIRE_MAX_RANKS;
}

/* The index of a rank, or where it would be inserted: the first that is not below it. */
static uint32_t place_of(const kvf_tally_engine *engine, uint32_t rank) {
    uint32_t low = 0, high = engine->said_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (rank_of(engine->said[middle]) < rank)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static uint32_t *find_rank(const kvf_tally_engine *engine, uint32_t rank) {
    if (!engine)
        return NULL;
    uint32_t place = place_of(engine, rank);
    bool is_there = place < engine->said_count && rank_of(engine->said[place]) == rank;
    return is_there ? &engine->said[place] : NULL;
}

static kvf_status insert_rank(kvf_tally *tally, kvf_tally_engine *engine, uint32_t rank, uint32_t **out) {
    uint32_t place = place_of(engine, rank);
    if (engine->said_count == engine->said_capacity) {
        uint32_t capacity = engine->said_capacity ? 2 * engine->said_capacity : 8;
        uint32_t *said = kvf_resize(engine->said, capacity, sizeof *said);
        if (!said)
            return kvf_nomem("a count of consumers");
        count_bytes(tally, (capacity - engine->said_capacity) * sizeof *said);
        engine->said = said;
        engine->said_capacity = capacity;
    }
    memmove(engine->said + place + 1, engine->said + place,
            (engine->said_count - place) * sizeof *engine->said);
    set_mark(&engine->said[place], rank, KVF_TALLY_WAITS);
    engine->said_count++;
    *out = &engine->said[place];
    return KVF_OK;
}

static kvf_status add_rank(kvf_tally *tally, kvf_tally_engine *engine, uint32_t rank, kvf_tally_mark mark) {
    uint32_t *said = find_rank(engine, rank);
    kvf_status status = said ? KVF_OK : insert_rank(tally, engine, rank, &said);
    if (status)
        return status;
    engine->count += mark_of(*said) == KVF_TALLY_WAITS;
    if (mark_of(*said) != KVF_TALLY_HAS_IT)
        set_mark(said, rank, mark);
    return KVF_OK;
}

/* ---- counting -------------------------------------------------------------------------------- */

kvf_status kvf_tally_add(kvf_tally *tally, const char *name, uint32_t rank, uint32_t expected_ranks,
                         kvf_tally_mark mark) {
    if (expected_ranks == 0 || rank >= KVF_WIRE_MAX_RANKS)
        return kvf_fail(
            KVF_E_RANGE,
            "rank %u of %s says that %u ranks take part; allowed: ranks below %u, and at least 1 taking part",
            rank, name, expected_ranks, KVF_WIRE_MAX_RANKS);
    kvf_tally_engine *engine = find_engine(tally, name);
    kvf_status status = engine ? KVF_OK : add_engine(tally, name, expected_ranks, &engine);
    if (!status && engine->expected_ranks != expected_ranks)
        status = kvf_fail(KVF_E_MISMATCH, "rank %u of %s says that %u ranks take part; others said %u", rank,
                          name, expected_ranks, engine->expected_ranks);
    if (status)
        return status;
    bool before = engine->count >= engine->expected_ranks;
    status = add_rank(tally, engine, rank, mark);
    tally->done += !before && engine->count >= engine->expected_ranks;
    return status;
}

kvf_tally_mark kvf_tally_of(const kvf_tally *tally, const char *name, uint32_t rank) {
    const uint32_t *said = find_rank(find_engine(tally, name), rank);
    return said ? mark_of(*said) : KVF_TALLY_WAITS;
}

void kvf_tally_take_back(kvf_tally *tally, const char *name, uint32_t rank) {
    kvf_tally_engine *engine = find_engine(tally, name);
    uint32_t *said = find_rank(engine, rank);
    if (!said || mark_of(*said) != KVF_TALLY_GAVE_UP)
        return;
    tally->done -= engine->count == engine->expected_ranks;
    engine->count--;
    set_mark(said, rank, KVF_TALLY_WAITS);
}

const char *kvf_tally_deserter(const kvf_tally *tally, uint32_t *rank) {
    for (const kvf_tally_engine *engine = tally->engines; engine; engine = engine->next)
        for (uint32_t i = 0; i < engine->said_count; i++)
            if (mark_of(engine->said[i]) == KVF_TALLY_GAVE_UP) {
                *rank = rank_of(engine->said[i]);
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
        kvf_free(engine->said);
        kvf_free(engine);
    }
    if (tally->kept)
        *tally->kept -= tally->bytes;
}
