#include "transport/fences.h"

static bool same(const unsigned char *a, const unsigned char *b) {
    return memcmp(a, b, KVF_FENCE_NAME_BYTES) == 0;
}

bool kvf_fences_has(const kvf_fences *fences, const unsigned char *name) {
    for (uint32_t i = 0; i < fences->fenced_count; i++)
        if (same(fences->fenced[i], name))
            return true;
    return false;
}

/* Its place in the ring; KVF_FENCES_SEEN: none. */
static uint64_t place_of(const kvf_fences *fences, const unsigned char *name) {
    const uint64_t count = kvf_min_u64(fences->seen, KVF_FENCES_SEEN);
    for (uint64_t i = 0; i < count; i++)
        if (same(fences->last[i].name, name))
            return i;
    return KVF_FENCES_SEEN;
}

bool kvf_fences_seen(const kvf_fences *fences, const unsigned char *name) {
    const uint64_t place = place_of(fences, name);
    return place < KVF_FENCES_SEEN && !fences->last[place].was_sent_on;
}

void kvf_fences_see(kvf_fences *fences, const unsigned char *name) {
    if (place_of(fences, name) < KVF_FENCES_SEEN)
        return;
    kvf_fence_visitor *visitor = &fences->last[fences->seen++ % KVF_FENCES_SEEN];
    memcpy(visitor->name, name, KVF_FENCE_NAME_BYTES);
    visitor->was_sent_on = false;
}

void kvf_fences_send_on(kvf_fences *fences, const unsigned char *name) {
    const uint64_t place = place_of(fences, name);
    if (place < KVF_FENCES_SEEN)
        fences->last[place].was_sent_on = true;
}

kvf_status kvf_fences_add(kvf_fences *fences, const unsigned char *name) {
    if (kvf_fences_has(fences, name))
        return KVF_OK;
    if (fences->fenced_count == UINT32_MAX)
        return kvf_nomem("a fence");
    void *grown = kvf_resize(fences->fenced, (size_t)fences->fenced_count + 1, sizeof *fences->fenced);
    if (!grown)
        return kvf_nomem("a fence");
    fences->fenced = grown;
    memcpy(fences->fenced[fences->fenced_count++], name, KVF_FENCE_NAME_BYTES);
    return KVF_OK;
}

void kvf_fences_remove(kvf_fences *fences, const unsigned char *name) {
    for (uint32_t i = 0; i < fences->fenced_count; i++) {
        if (!same(fences->fenced[i], name))
            continue;
        memcpy(fences->fenced[i], fences->fenced[--fences->fenced_count], KVF_FENCE_NAME_BYTES);
        return;
    }
}

void kvf_fences_free(kvf_fences *fences) {
    kvf_free(fences->fenced);
}
