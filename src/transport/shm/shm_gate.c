#include <sys/mman.h>

#include "transport/shm/shm.h"

/* ---- the gate -------------------------------------------------------------------------------- */

kvf_status kvf_shm_gate_make(kvf_shm_gate **out, int *fd) {
    uint64_t bytes = sizeof(kvf_shm_gate);
    unsigned char *address;
    kvf_status status = kvf_shm_make_memory(&bytes, fd, &address);
    if (!status)
        *out = (kvf_shm_gate *)(void *)address;
    return status;
}

kvf_status kvf_shm_gate_map(int fd, kvf_shm_gate **out) {
    unsigned char *address;
    kvf_status status = kvf_shm_map_foreign(fd, sizeof(kvf_shm_gate), &address);
    if (!status)
        *out = (kvf_shm_gate *)(void *)address;
    return status;
}

void kvf_shm_gate_unmap(kvf_shm_gate *gate) {
    if (gate)
        (void)munmap(gate, sizeof *gate);
}

/* ---- guests ---------------------------------------------------------------------------------- */

static bool same(const unsigned char *a, const unsigned char *b) {
    return memcmp(a, b, SHM_ID_BYTES) == 0;
}

bool kvf_shm_guests_fenced(const kvf_shm_guests *guests, const unsigned char *name) {
    for (uint32_t i = 0; i < guests->fenced_count; i++)
        if (same(guests->fenced[i], name))
            return true;
    return false;
}

bool kvf_shm_guests_seen(const kvf_shm_guests *guests, const unsigned char *name) {
    for (uint64_t i = 0; i < kvf_min_u64(guests->seen, SHM_GUESTS_KEPT); i++)
        if (same(guests->last[i], name))
            return true;
    return false;
}

void kvf_shm_guests_see(kvf_shm_guests *guests, const unsigned char *name) {
    if (!kvf_shm_guests_seen(guests, name))
        memcpy(guests->last[guests->seen++ % SHM_GUESTS_KEPT], name, SHM_ID_BYTES);
}

kvf_status kvf_shm_guests_fence(kvf_shm_guests *guests, const unsigned char *name) {
    if (kvf_shm_guests_fenced(guests, name))
        return KVF_OK;
    if (guests->fenced_count == UINT32_MAX)
        return kvf_nomem("a fence");
    void *grown = kvf_resize(guests->fenced, (size_t)guests->fenced_count + 1, sizeof *guests->fenced);
    if (!grown)
        return kvf_nomem("a fence");
    guests->fenced = grown;
    memcpy(guests->fenced[guests->fenced_count++], name, SHM_ID_BYTES);
    return KVF_OK;
}

void kvf_shm_guests_admit(kvf_shm_guests *guests, const unsigned char *name) {
    for (uint32_t i = 0; i < guests->fenced_count; i++) {
        if (!same(guests->fenced[i], name))
            continue;
        memcpy(guests->fenced[i], guests->fenced[--guests->fenced_count], SHM_ID_BYTES);
        return;
    }
}

void kvf_shm_guests_free(kvf_shm_guests *guests) {
    kvf_free(guests->fenced);
}

/* ---- the fabric's functions ------------------------------------------------------------------ */

static kvf_status read_part(const void *part, size_t bytes, kvf_shm_card *out) {
    if (bytes != sizeof *out)
        return kvf_fail(KVF_E_PARSE, "its part of the card has %zu bytes; allowed %zu", bytes, sizeof *out);
    memcpy(out, part, sizeof *out);
    return KVF_OK;
}

kvf_status kvf_shm_fence(void *self, const void *part, size_t bytes) {
    kvf_shm_endpoint *endpoint = self;
    kvf_shm_card card;
    kvf_status status = read_part(part, bytes, &card);
    if (!status)
        status = kvf_shm_guests_fence(&endpoint->guests, card.name);
    if (status)
        return status;
    for (kvf_shm_client *client = endpoint->clients; client; client = client->following) {
        if (!same(client->from, card.name))
            continue;
        kvf_shm_client_refuse(client, SHM_REFUSED_FENCED);
        kvf_status inside = kvf_shm_client_shut_out(client);
        status = inside ? inside : status;
    }
    kvf_wake_set(&endpoint->wake, true); /* to hang up */
    if (status)
        return status;
    return kvf_shm_guests_seen(&endpoint->guests, card.name) ? KVF_OK : KVF_E_NOT_FOUND;
}

kvf_status kvf_shm_admit(void *self, const void *part, size_t bytes) {
    kvf_shm_endpoint *endpoint = self;
    kvf_shm_card card;
    kvf_status status = read_part(part, bytes, &card);
    if (!status)
        kvf_shm_guests_admit(&endpoint->guests, card.name);
    return status;
}
