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

bool kvf_fences_seen(const kvf_fences *fences, const unsigned char *name) {
    for (uint64_t i = 0; i < kvf_min_u64(fences->seen, KVF_FENCES_SEEN); i++)
        if (same(fences->last[i], name))
            return true;
    return false;
}

void kvf_fences_see(kvf_fences *fences, const unsigned char *name) {
    if (!kvf_fences_seen(fences, name))
        memcpy(fences->last[fences->seen++ % KVF_FENCES_SEEN], name, KVF_FENCE_NAME_BYTES);
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
