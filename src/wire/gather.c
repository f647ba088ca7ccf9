#include "wire/gather.h"

/* The most bytes of introductions in one message, which also has facts. */
#define PART_BYTES (512u << 10)

uint32_t kvf_gather_end(const kvf_wire_buffer *introductions, uint32_t first, uint32_t count) {
    uint64_t bytes = 0;
    uint32_t end = first;
    while (end < count && (end == first || bytes + introductions[end].size <= PART_BYTES))
        bytes += introductions[end++].size;
    return end;
}

void kvf_gather_free(kvf_gathering *gathering) {
    for (uint32_t i = 0; gathering->introductions && i < gathering->count; i++)
        kvf_free((void *)gathering->introductions[i].data);
    kvf_free(gathering->introductions);
    kvf_free(gathering->facts);
    *gathering = (kvf_gathering){0};
}

static kvf_status begin(kvf_gathering *gathering, const uint8_t *digest, const kvf_welcome *welcome) {
    kvf_gather_free(gathering);
    kvf_bytes *introductions = kvf_alloc0(welcome->rank_count, sizeof *introductions);
    char *facts = kvf_strdup(welcome->facts);
    if (!introductions || !facts) {
        kvf_free(introductions);
        kvf_free(facts);
        return kvf_nomem("a remote engine");
    }
    gathering->introductions = introductions;
    gathering->facts = facts;
    gathering->rank_count = welcome->rank_count;
    gathering->incarnation = welcome->incarnation;
    memcpy(gathering->digest, digest, sizeof gathering->digest);
    return KVF_OK;
}

static kvf_status add(kvf_gathering *gathering, kvf_bytes introduction) {
    if (gathering->count == gathering->rank_count)
        return kvf_fail(KVF_E_PARSE, "the engine introduces more than its %u ranks", gathering->rank_count);
    if (introduction.size > KVF_GATHER_MAX_BYTES - gathering->bytes)
        return kvf_fail(KVF_E_RANGE, "the introductions of the first %u ranks have more than %llu bytes",
                        gathering->count, KVF_GATHER_MAX_BYTES);
    void *copy = kvf_copy(introduction.data, introduction.size, 1);
    if (!copy)
        return kvf_nomem("a remote engine");
    gathering->introductions[gathering->count++] = (kvf_bytes){copy, introduction.size};
    gathering->bytes += introduction.size;
    return KVF_OK;
}

kvf_status kvf_gather(kvf_gathering *gathering, const uint8_t *digest, const kvf_welcome *welcome,
                      bool *complete) {
    kvf_status status = KVF_OK;
    bool same = gathering->introductions && welcome->incarnation == gathering->incarnation &&
                welcome->rank_count == gathering->rank_count &&
                memcmp(digest, gathering->digest, sizeof gathering->digest) == 0;
    *complete = false;
    if (!same && welcome->first_rank != 0) {
        kvf_gather_free(gathering); /* begins again with the first */
        return KVF_OK;
    }
    if (!same)
        status = begin(gathering, digest, welcome);
    if (status || welcome->first_rank != gathering->count)
        return status;
    for (uint32_t i = 0; i < welcome->introduction_count && !status; i++)
        status = add(gathering, welcome->introductions[i]);
    *complete = !status && gathering->count == gathering->rank_count;
    return status;
}

kvf_welcome kvf_gathered(const kvf_gathering *gathering, const kvf_welcome *welcome) {
    kvf_welcome all = *welcome;
    all.first_rank = 0;
    all.introductions = gathering->introductions;
    all.introduction_count = gathering->count;
    all.facts = gathering->facts;
    return all;
}
