/* The local rank's facts, and the remote engines it knows by id. */
#include "connector/connector.h"

/* Ranks of one engine. The bound limits the memory of rank lists, because the number may come from a peer. */
#define MAX_RANKS 65536u

static kvf_status check_ranks(const char *who, uint32_t tp_size, uint32_t dcp_size) {
    if (tp_size == 0 || tp_size > MAX_RANKS)
        return kvf_plain_fail(KVF_E_RANGE, "%s tp_size is %u; allowed: 1 to %u", who, tp_size, MAX_RANKS);
    if (dcp_size == 0 || tp_size % dcp_size)
        return kvf_plain_fail(KVF_E_INVALID, "%s dcp_size is %u; it must divide tp_size %u", who, dcp_size,
                              tp_size);
    return KVF_OK;
}

kvf_status kvf_take_remote(const kvf_engine_transfer_info *remote, kvf_engine_transfer_info *out) {
    if (!remote)
        return kvf_plain_fail(KVF_E_INVALID, "remote engine is NULL");
    kvf_engine_transfer_info taken;
    kvf_status status = kvf_take_struct(&taken, sizeof taken, remote, "kvf_engine_transfer_info");
    if (status)
        return status;
    if (!taken.dcp_size)
        taken.dcp_size = 1;
    if (!taken.physical_blocks_per_logical)
        taken.physical_blocks_per_logical = 1;
    status = check_ranks("remote", taken.tp_size, taken.dcp_size);
    if (status)
        return status;
    if (!taken.block_size)
        return kvf_plain_fail(KVF_E_INVALID, "remote block_size is 0; allowed: 1 and more");
    taken.struct_size = sizeof taken;
    *out = taken;
    return KVF_OK;
}

static kvf_status check_local(const kvf_topology_desc *local) {
    if (!local->engine_id)
        return kvf_plain_fail(KVF_E_INVALID, "engine_id is NULL");
    kvf_status status = check_ranks("local", local->tp_size, local->dcp_size);
    if (status)
        return status;
    if (local->tp_rank >= local->tp_size)
        return kvf_plain_fail(KVF_E_RANGE, "tp_rank is %u; allowed: 0 to %u", local->tp_rank,
                              local->tp_size - 1);
    if (!local->block_size)
        return kvf_plain_fail(KVF_E_INVALID, "block_size is 0; allowed: 1 and more");
    if (!local->total_kv_heads && !local->is_mla)
        return kvf_plain_fail(KVF_E_INVALID, "total_kv_heads is 0; allowed: 1 and more");
    if (local->dialect != KVF_DIALECT_V0_32 && local->dialect != KVF_DIALECT_PR_40731)
        return kvf_plain_fail(KVF_E_RANGE, "dialect is %d; allowed: 0 and 1", (int)local->dialect);
    return KVF_OK;
}

kvf_status kvf_topology_create(const kvf_topology_desc *desc, kvf_topology **out) {
    if (!desc || !out)
        return kvf_plain_fail(KVF_E_INVALID, "%s is NULL", desc ? "out" : "desc");
    kvf_topology_desc local;
    kvf_status status = kvf_take_struct(&local, sizeof local, desc, "kvf_topology_desc");
    if (status)
        return status;
    if (!local.dcp_size)
        local.dcp_size = 1;
    status = check_local(&local);
    if (status)
        return status;
    kvf_topology *made = kvf_alloc0(1, sizeof *made);
    if (!made)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for a topology");
    made->local = local;
    made->local.struct_size = sizeof local;
    made->engine_id = kvf_strdup(local.engine_id);
    if (!made->engine_id) {
        kvf_free(made);
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for an engine id");
    }
    made->local.engine_id = made->engine_id;
    *out = made;
    return KVF_OK;
}

void kvf_topology_free(kvf_topology *topology) {
    if (!topology)
        return;
    for (size_t i = 0; i < topology->known_count; i++)
        kvf_free(topology->known[i].id);
    kvf_free(topology->known);
    kvf_free(topology->engine_id);
    kvf_free(topology);
}

static kvf_known_engine *find(const kvf_topology *topology, const char *engine_id) {
    for (size_t i = 0; i < topology->known_count; i++)
        if (strcmp(topology->known[i].id, engine_id) == 0)
            return &topology->known[i];
    return NULL;
}

static kvf_status append(kvf_topology *topology, const char *engine_id,
                         const kvf_engine_transfer_info *facts) {
    if (topology->known_count == topology->known_capacity) {
        size_t capacity = topology->known_capacity ? 2 * topology->known_capacity : 4;
        kvf_known_engine *known = kvf_resize(topology->known, capacity, sizeof *known);
        if (!known)
            return kvf_plain_fail(KVF_E_NOMEM, "no memory for %zu engines", capacity);
        topology->known = known;
        topology->known_capacity = capacity;
    }
    char *id = kvf_strdup(engine_id);
    if (!id)
        return kvf_plain_fail(KVF_E_NOMEM, "no memory for an engine id");
    topology->known[topology->known_count++] = (kvf_known_engine){.id = id, .facts = *facts};
    return KVF_OK;
}

kvf_status kvf_topology_register(kvf_topology *topology, const char *engine_id,
                                 const kvf_engine_transfer_info *remote, kvf_engine_transfer_info *stored) {
    if (!topology || !engine_id)
        return kvf_plain_fail(KVF_E_INVALID, "%s is NULL", topology ? "engine_id" : "topology");
    if (strcmp(engine_id, topology->engine_id) == 0)
        return kvf_refuse(KVF_REFUSAL_REGISTER_SELF, KVF_E_EXISTS,
                          "engine_id \"%s\" is the local engine's own; a remote engine needs another",
                          engine_id);
    kvf_known_engine *known = find(topology, engine_id);
    if (!known) {
        kvf_engine_transfer_info facts;
        kvf_status status = kvf_take_remote(remote, &facts);
        if (!status && topology->local.is_mamba)
            status = kvf_topology_check(topology, &facts);
        if (!status)
            status = append(topology, engine_id, &facts);
        if (status)
            return status;
        known = &topology->known[topology->known_count - 1];
    }
    if (stored)
        *stored = known->facts;
    return KVF_OK;
}

kvf_status kvf_topology_get(const kvf_topology *topology, const char *engine_id,
                            kvf_engine_transfer_info *out) {
    if (!topology || !engine_id || !out)
        return kvf_plain_fail(KVF_E_INVALID, "topology, engine_id and out must be given");
    const kvf_known_engine *known = find(topology, engine_id);
    if (!known)
        return kvf_refuse(KVF_REFUSAL_UNKNOWN_ENGINE, KVF_E_NOT_FOUND, "engine_id \"%s\" is not registered",
                          engine_id);
    *out = known->facts;
    return KVF_OK;
}

void kvf_topology_unregister(kvf_topology *topology, const char *engine_id) {
    kvf_known_engine *known = topology && engine_id ? find(topology, engine_id) : NULL;
    if (!known)
        return;
    kvf_free(known->id);
    size_t after = (size_t)(topology->known + topology->known_count - known) - 1;
    memmove(known, known + 1, after * sizeof *known);
    topology->known_count--;
}
