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

/* ---- the fabric's functions ------------------------------------------------------------------ */

static kvf_status read_part(const void *part, size_t bytes, kvf_shm_card *out) {
    if (bytes != sizeof *out)
        return kvf_fail(KVF_E_PARSE, "its part of the card has %zu bytes; allowed: %zu", bytes, sizeof *out);
    memcpy(out, part, sizeof *out);
    return KVF_OK;
}

kvf_status kvf_shm_fence(void *self, const void *part, size_t bytes) {
    kvf_shm_endpoint *endpoint = self;
    kvf_shm_card card;
    kvf_status status = read_part(part, bytes, &card);
    if (!status)
        status = kvf_fences_add(&endpoint->fences, card.name);
    if (status)
        return status;
    for (kvf_shm_client *client = endpoint->clients; client; client = client->following) {
        if (memcmp(client->from, card.name, SHM_ID_BYTES) != 0)
            continue;
        kvf_shm_client_refuse(client, SHM_REFUSED_FENCED);
        kvf_status inside = kvf_shm_client_shut_out(client);
        status = inside ? inside : status;
    }
    kvf_wake_set(&endpoint->wake, true); /* to hang up */
    if (status)
        return status;
    return kvf_fences_seen(&endpoint->fences, card.name) ? KVF_OK : KVF_E_NOT_FOUND;
}

kvf_status kvf_shm_admit(void *self, const void *part, size_t bytes) {
    kvf_shm_endpoint *endpoint = self;
    kvf_shm_card card;
    kvf_status status = read_part(part, bytes, &card);
    if (!status)
        kvf_fences_remove(&endpoint->fences, card.name);
    return status;
}
