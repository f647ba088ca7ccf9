#include "transport/guests.h"

static bool same(const unsigned char *a, const unsigned char *b) {
    return memcmp(a, b, KVF_GUEST_BYTES) == 0;
}

bool kvf_guests_fenced(const kvf_guests *guests, const unsigned char *name) {
    for (uint32_t i = 0; i < guests->fenced_count; i++)
        if (same(guests->fenced[i], name))
            return true;
    return false;
}

bool kvf_guests_seen(const kvf_guests *guests, const unsigned char *name) {
    for (uint64_t i = 0; i < kvf_min_u64(guests->seen, KVF_GUESTS_KEPT); i++)
        if (same(guests->last[i], name))
            return true;
    return false;
}

void kvf_guests_see(kvf_guests *guests, const unsigned char *name) {
    if (!kvf_guests_seen(guests, name))
        memcpy(guests->last[guests->seen++ % KVF_GUESTS_KEPT], name, KVF_GUEST_BYTES);
}

kvf_status kvf_guests_fence(kvf_guests *guests, const unsigned char *name) {
    if (kvf_guests_fenced(guests, name))
        return KVF_OK;
    if (guests->fenced_count == UINT32_MAX)
        return kvf_nomem("a fence");
    void *grown = kvf_resize(guests->fenced, (size_t)guests->fenced_count + 1, sizeof *guests->fenced);
    if (!grown)
        return kvf_nomem("a fence");
    guests->fenced = grown;
    memcpy(guests->fenced[guests->fenced_count++], name, KVF_GUEST_BYTES);
    return KVF_OK;
}

void kvf_guests_admit(kvf_guests *guests, const unsigned char *name) {
    for (uint32_t i = 0; i < guests->fenced_count; i++) {
        if (!same(guests->fenced[i], name))
            continue;
        memcpy(guests->fenced[i], guests->fenced[--guests->fenced_count], KVF_GUEST_BYTES);
        return;
    }
}

void kvf_guests_free(kvf_guests *guests) {
    kvf_free(guests->fenced);
}
