/*
 * Memory of the UCX fabric: allocating, registering, and the keys on the card.
 */
#include <unistd.h>

#include "transport/ucx/ucx.h"

static kvf_status map_memory(kvf_ucx_endpoint *endpoint, unsigned flags, kvf_ucx_memory *memory) {
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_FLAGS | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = memory->address,
        .length = memory->bytes,
        .flags = flags,
        .memory_type = memory->type,
    };
    ucs_status_t status = endpoint->ucx->ucp_mem_map(endpoint->context, &params, &memory->handle);
    return status == UCS_OK ? KVF_OK
                            : kvf_ucx_fail(endpoint->ucx, status, flags ? "allocation" : "registration");
}

kvf_status kvf_ucx_allocate(void *self, kvf_memory_kind kind, uint32_t device, uint64_t bytes, void **out) {
    (void)kind, (void)device; /* host memory only */
    kvf_ucx_endpoint *endpoint = self;
    uint64_t padded; /* so that rounding up to pages inside UCX cannot overflow */
    if (!kvf_add(bytes, 1u << 30, &padded))
        return kvf_fail(KVF_E_NOMEM, "no memory for %llu bytes", (unsigned long long)bytes);
    kvf_ucx_allocation *allocation = kvf_alloc0(1, sizeof *allocation);
    if (!allocation)
        return kvf_nomem("an allocation");
    allocation->memory.bytes = bytes;
    allocation->memory.type = UCS_MEMORY_TYPE_HOST;
    const kvf_cuda *entered = kvf_ucx_enter(endpoint);
    kvf_status status = map_memory(endpoint, UCP_MEM_MAP_ALLOCATE, &allocation->memory);
    ucp_mem_attr_t attributes = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};
    if (!status)
        (void)endpoint->ucx->ucp_mem_query(allocation->memory.handle, &attributes);
    kvf_ucx_leave(entered);
    if (status) {
        kvf_free(allocation);
        return status;
    }
    allocation->memory.address = attributes.address;
    allocation->following = endpoint->allocations;
    endpoint->allocations = allocation;
    *out = attributes.address;
    return KVF_OK;
}

/* The allocation that a region lies in. Its handle serves the region too, and lets peers on this machine map it. */
static const kvf_ucx_allocation *allocation_of(const kvf_ucx_endpoint *endpoint, const kvf_memory *region) {
    uintptr_t address = (uintptr_t)region->address;
    for (const kvf_ucx_allocation *at = endpoint->allocations; at; at = at->following) {
        uintptr_t begin = (uintptr_t)at->memory.address;
        if (address >= begin && address - begin <= at->memory.bytes &&
            region->bytes <= at->memory.bytes - (address - begin))
            return at;
    }
    return NULL;
}

/* Where UCX looks whether network cards reach memory of devices: a module of the kernel tells them where it lies, or the
 * driver does. */
static bool cards_reach(uint32_t device) {
    static const char *const modules[] = {"/sys/module/nvidia_peermem/version",
                                          "/sys/module/nv_peer_mem/version",
                                          "/sys/kernel/mm/memory_peers/nv_mem/version"};
    const kvf_cuda *cuda;
    CUdevice handle;
    int can = 0;
    for (size_t i = 0; i < sizeof modules / sizeof *modules; i++)
        if (access(modules[i], F_OK) == 0)
            return true;
    return !kvf_cuda_find(&cuda) && !cuda->cuDeviceGet(&handle, (int)device) &&
           !cuda->cuDeviceGetAttribute(&can, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, handle) && can;
}

/* UCX takes memory of devices that its network cards do not reach, too, and emulates for that alone. */
static kvf_status check_cuda(const kvf_ucx_endpoint *endpoint, uint32_t i, const kvf_memory *region) {
    if (!(endpoint->memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)))
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "region %u is CUDA memory, but this UCX (%s) works without CUDA here", i,
                        endpoint->ucx->version);
    if (endpoint->emulates || endpoint->takes_emulated || cards_reach(region->device))
        return KVF_OK;
    return kvf_fail(
        KVF_E_UNSUPPORTED,
        "region %u is memory of CUDA device %u, which network cards do not reach here, so that UCX "
        "would emulate one-sided operations on it: load the module nvidia_peermem, register the "
        "memory as withheld, or set ucx.emulated to \"on\"",
        i, region->device);
}

static kvf_status register_one(kvf_ucx_endpoint *endpoint, uint32_t i, const kvf_memory *region,
                               kvf_ucx_memory *out) {
    kvf_status refusal = kvf_ucx_check_memory(endpoint, region->kind);
    if (refusal)
        return kvf_fail_in(refusal, "region %u: ", i);
    *out = (kvf_ucx_memory){.address = region->address, .bytes = region->bytes, .type = UCS_MEMORY_TYPE_HOST};
    out->withheld = endpoint->emulates && !endpoint->takes_emulated &&
                    kvf_transport_withholds_emulated(endpoint->transport);
    if (region->kind == KVF_MEMORY_CUDA) {
        out->type = UCS_MEMORY_TYPE_CUDA;
        refusal = check_cuda(endpoint, i, region);
        if (refusal)
            return refusal;
    }
    const kvf_ucx_allocation *allocation = allocation_of(endpoint, region);
    if (allocation) {
        out->handle = allocation->memory.handle;
        return KVF_OK;
    }
    kvf_status status = map_memory(endpoint, 0, out);
    out->mapped = !status;
    return status ? kvf_fail_in(kvf_device_memory_refused(status, region), "region %u: ", i) : KVF_OK;
}

kvf_status kvf_ucx_register(void *self, uint32_t region, const kvf_memory *memory) {
    kvf_ucx_endpoint *endpoint = self;
    if (region >= endpoint->region_count) {
        kvf_ucx_memory *grown = kvf_resize(endpoint->regions, (size_t)region + 1, sizeof *grown);
        if (!grown)
            return kvf_nomem("regions");
        endpoint->regions = grown;
        for (; endpoint->region_count <= region; endpoint->region_count++)
            grown[endpoint->region_count] = (kvf_ucx_memory){0};
    }
    kvf_ucx_memory made;
    const kvf_device_context before = kvf_device_context_take(&endpoint->device_context, memory);
    const kvf_cuda *entered = kvf_ucx_enter(endpoint);
    kvf_status status = register_one(endpoint, region, memory, &made);
    kvf_ucx_leave(entered);
    if (status)
        endpoint->device_context = before;
    else
        endpoint->regions[region] = made;
    return status;
}

/* Peers on this machine watch the beacon: its end ends their connections, and makes their cards invalid. UCX keeps no
 * others out. Where it emulates, it serves any address. With RDMA, ucp_mem_unmap() only returns the registration to
 * UCX's cache, where keys of older cards stay good until the memory is unmapped or the cache drops it. RCACHE_ENABLE=n
 * is no way out: before 1.16 UCX would register the memory of each operation anew, and UCX aborts the process if it has
 * to invalidate a registration without a cache. */
kvf_status kvf_ucx_unregister(void *self, uint32_t region) {
    kvf_ucx_endpoint *endpoint = self;
    kvf_ucx_memory *memory = &endpoint->regions[region];
    const kvf_cuda *entered = kvf_ucx_enter(endpoint);
    if (memory->mapped)
        (void)endpoint->ucx->ucp_mem_unmap(endpoint->context, memory->handle);
    kvf_ucx_leave(entered);
    *memory = (kvf_ucx_memory){0};
    kvf_beacon_open(&endpoint->beacon, endpoint->event_fd);
    return KVF_OK;
}

/* ---- the card -------------------------------------------------------------------------------- */

/* The last regions of the front may be withheld from us, and the last of ours refused and forgotten by the front. */
static kvf_status pack_keys(const kvf_ucx_endpoint *endpoint, uint32_t count, kvf_ucx_card *card) {
    static const kvf_ucx_memory none;
    for (uint32_t i = 0; i < count; i++) {
        const kvf_ucx_memory *region = i < endpoint->region_count ? &endpoint->regions[i] : &none;
        if (region->bytes == 0 || region->withheld) {
            card->regions[card->region_count++] = (kvf_ucx_card_region){.bytes = region->bytes};
            continue;
        }
        void *key;
        size_t bytes;
        ucs_status_t status = endpoint->ucx->ucp_rkey_pack(endpoint->context, region->handle, &key, &bytes);
        if (status != UCS_OK)
            return kvf_ucx_fail(endpoint->ucx, status, "memory key");
        card->regions[card->region_count++] = (kvf_ucx_card_region){
            .address = (uintptr_t)region->address,
            .bytes = region->bytes,
            .key = key,
            .key_bytes = (uint32_t)bytes,
        };
    }
    return KVF_OK;
}

kvf_status kvf_ucx_write_card(void *self, kvf_buffer *out) {
    kvf_ucx_endpoint *endpoint = self;
    uint32_t count;
    (void)kvf_transport_regions(endpoint->transport, endpoint, &count);
    kvf_ucx_card card = {.regions = kvf_alloc(count, sizeof *card.regions)};
    if (!card.regions)
        return kvf_nomem("a card");
    memcpy(card.beacon, endpoint->beacon.mark, sizeof card.beacon);
    card.major = endpoint->ucx->major;
    card.minor = endpoint->ucx->minor;
    ucp_address_t *address = NULL;
    size_t address_bytes = 0;
    const kvf_cuda *entered = kvf_ucx_enter(endpoint);
    kvf_status status = KVF_OK;
    ucs_status_t got = endpoint->ucx->ucp_worker_get_address(endpoint->worker, &address, &address_bytes);
    if (got != UCS_OK)
        status = kvf_ucx_fail(endpoint->ucx, got, "worker address");
    card.worker = address;
    card.worker_bytes = (uint32_t)address_bytes;
    if (!status)
        status = pack_keys(endpoint, count, &card);
    if (!status)
        status = kvf_ucx_card_write(&card, out);
    for (uint32_t i = 0; i < card.region_count; i++)
        if (card.regions[i].key)
            endpoint->ucx->ucp_rkey_buffer_release((void *)(uintptr_t)card.regions[i].key);
    if (address)
        endpoint->ucx->ucp_worker_release_address(endpoint->worker, address);
    kvf_ucx_leave(entered);
    kvf_free(card.regions);
    return status;
}
