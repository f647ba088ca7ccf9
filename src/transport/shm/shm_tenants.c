#include "transport/shm/shm_tenants.h"

#include <stdatomic.h>

/* All endpoints of a process share its descriptors. */
static _Atomic uint32_t clients_of_process;

void kvf_shm_tenants_open(kvf_shm_tenants *tenants, uint64_t descriptors) {
    *tenants = (kvf_shm_tenants){.door.turn.turn_work = SHM_TURN_WORK / 2};
    tenants->process_clients_max = descriptors / 2;
    tenants->clients_max = (uint32_t)kvf_min_u64(SHM_CLIENTS_MAX, descriptors / 2);
    tenants->strangers_max = (uint32_t)kvf_max_u64(1, kvf_min_u64(SHM_STRANGERS_MAX, descriptors / 8));
}

/* ---- coming and going ------------------------------------------------------------------------ */

kvf_shm_tenant *kvf_shm_tenants_enter(kvf_shm_tenants *tenants, pid_t process) {
    kvf_shm_tenant *tenant = tenants->all;
    while (tenant && tenant->process != process)
        tenant = tenant->next;
    if (!tenant) {
        tenant = kvf_alloc0(1, sizeof *tenant);
        if (!tenant)
            return NULL;
        tenant->process = process;
        tenant->turn.turn_work = SHM_TURN_WORK;
        tenant->next = tenants->all;
        tenants->all = tenant;
    }
    tenant->strangers++;
    tenants->strangers++;
    return tenant;
}

static bool is_full(const kvf_shm_tenants *tenants) {
    return tenants->clients >= tenants->clients_max ||
           atomic_load(&clients_of_process) >= tenants->process_clients_max;
}

static kvf_shm_tenant *find_largest(const kvf_shm_tenants *tenants) {
    kvf_shm_tenant *largest = tenants->all;
    for (kvf_shm_tenant *tenant = tenants->all; tenant; tenant = tenant->next)
        if (tenant->clients > largest->clients)
            largest = tenant;
    return largest;
}

kvf_shm_refusal kvf_shm_tenants_admit(kvf_shm_tenants *tenants, kvf_shm_tenant *tenant, uint64_t *limit,
                                      kvf_shm_tenant **loser) {
    /* Processes that cannot be told apart share half of the places. */
    *limit = tenant->process ? SHM_TENANT_CLIENTS_MAX : tenants->clients_max / 2;
    *loser = NULL;
    if (tenant->clients >= *limit)
        return SHM_REFUSED_LIMIT;
    if (is_full(tenants)) {
        *limit = tenants->clients_max;
        *loser = find_largest(tenants);
        if (tenant->clients + 1 >= (*loser)->clients)
            return SHM_REFUSED_FULL;
    }
    KVF_ASSERT(tenant->strangers > 0 && tenants->strangers > 0);
    tenant->strangers--;
    tenants->strangers--;
    tenant->clients++;
    tenants->clients++;
    (void)atomic_fetch_add(&clients_of_process, 1);
    return (kvf_shm_refusal)0;
}

static void free_tenant(kvf_shm_tenants *tenants, kvf_shm_tenant *tenant) {
    kvf_shm_tenant **at = &tenants->all;
    KVF_ASSERT(tenant->buffer_bytes == 0);
    kvf_turns_leave(&tenants->turns, &tenant->turn);
    while (*at != tenant)
        at = &(*at)->next;
    *at = tenant->next;
    kvf_free(tenant);
}

void kvf_shm_tenants_leave(kvf_shm_tenants *tenants, kvf_shm_tenant *tenant, bool known) {
    uint32_t *here = known ? &tenant->clients : &tenant->strangers;
    uint32_t *all = known ? &tenants->clients : &tenants->strangers;
    KVF_ASSERT(*here > 0 && *all > 0);
    --*here;
    --*all;
    if (known)
        (void)atomic_fetch_sub(&clients_of_process, 1);
    if (tenant->clients == 0 && tenant->strangers == 0)
        free_tenant(tenants, tenant);
}

/* ---- memory ---------------------------------------------------------------------------------- */

void kvf_shm_tenants_take_buffer(kvf_shm_tenants *tenants, kvf_shm_tenant *tenant, uint64_t *slot_bytes,
                                 uint32_t *slots) {
    uint64_t most = tenant->process ? SHM_TENANT_BUFFERS_BYTES : SHM_BUFFERS_BYTES / 2;
    uint64_t bytes = *slot_bytes * *slots;
    bool fits = tenants->buffer_bytes + bytes <= SHM_BUFFERS_BYTES && tenant->buffer_bytes + bytes <= most;
    if (!fits && bytes > SHM_BUFFER_BYTES_LEAST) {
        tenants->cut_buffers++;
        *slots = 1;
        *slot_bytes = kvf_min_u64(*slot_bytes, SHM_BUFFER_BYTES_LEAST);
    }
    tenants->buffer_bytes += *slot_bytes * *slots;
    tenant->buffer_bytes += *slot_bytes * *slots;
}

void kvf_shm_tenants_drop_buffer(kvf_shm_tenants *tenants, kvf_shm_tenant *tenant, uint64_t bytes) {
    KVF_ASSERT(tenants->buffer_bytes >= bytes && tenant->buffer_bytes >= bytes);
    tenants->buffer_bytes -= bytes;
    tenant->buffer_bytes -= bytes;
}

/* ---- turns ----------------------------------------------------------------------------------- */

void kvf_shm_tenants_wait(kvf_shm_tenants *tenants, kvf_shm_tenant *tenant, kvf_shm_seat *seat) {
    kvf_turns_wait(&tenants->turns, &tenant->turn, &seat->turn);
}

void kvf_shm_tenants_stop_waiting(kvf_shm_seat *seat) {
    kvf_turns_stop_waiting(&seat->turn);
}

kvf_shm_seat *kvf_shm_tenants_next(kvf_shm_tenants *tenants, kvf_shm_tenant **whose) {
    kvf_turn_party *party;
    kvf_turn_seat *seat = kvf_turns_next(&tenants->turns, &party);
    if (seat)
        *whose = (kvf_shm_tenant *)party;
    return (kvf_shm_seat *)seat;
}

void kvf_shm_tenants_spend(kvf_shm_tenants *tenants, kvf_shm_tenant *tenant, uint64_t work) {
    kvf_turns_spend(&tenant->turn, work);
    if (tenant == &tenants->door)
        tenants->door_work += work;
}

bool kvf_shm_tenants_opens_door(kvf_shm_tenants *tenants, uint64_t now_ns) {
    uint64_t past_ns = kvf_min_u64(now_ns - tenants->door_work_ns, 1000000000u); /* more changes nothing */
    uint64_t forgotten = past_ns * (SHM_DOOR_WORK_PER_MS / 1024) / (1000000 / 1024);
    tenants->door_work -= kvf_min_u64(tenants->door_work, forgotten);
    tenants->door_work_ns = now_ns;
    return tenants->door_work < SHM_DOOR_WORK;
}
