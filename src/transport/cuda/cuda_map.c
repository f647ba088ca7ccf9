#include "transport/cuda/cuda.h"

static bool is_there(const kvf_cuda_region *region) {
    return region->bytes > 0;
}

static kvf_status check_region(const kvf_cuda_region *region, uint32_t i) {
    if (region->bytes > region->allocation_bytes || region->offset > region->allocation_bytes - region->bytes)
        return kvf_fail(KVF_E_PARSE, "region %u: %llu bytes at offset %llu of an allocation of %llu", i,
                        (unsigned long long)region->bytes, (unsigned long long)region->offset,
                        (unsigned long long)region->allocation_bytes);
    return KVF_OK;
}

/* For memory of another process: engines' allocators put many regions into one allocation, which is opened once. */
static kvf_status open_handle(const kvf_cuda *cuda, kvf_cuda_map *map, const kvf_cuda_region *region,
                              uint32_t i, CUdeviceptr *out) {
    CUdeviceptr base = 0;
    size_t bytes = 0;
    CUresult result = cuda->cuIpcOpenMemHandle_v2(out, region->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (result) {
        (void)kvf_cuda_status(map->device, result, "opening a handle");
        return kvf_fail_in(KVF_E_UNSUPPORTED, "region %u is freed, or this process may not map it: ", i);
    }
    map->opened[map->opened_count++] = *out;
    result = cuda->cuMemGetAddressRange_v2(&base, &bytes, *out);
    if (result)
        return kvf_cuda_status(map->device, result, "asking what a handle has opened");
    bytes -= *out - base; /* it may be a block from which the allocation was cut */
    if (bytes < region->allocation_bytes)
        return kvf_fail(KVF_E_PARSE, "region %u: its allocation has %llu bytes in the card and %zu here", i,
                        (unsigned long long)region->allocation_bytes, bytes);
    return KVF_OK;
}

bool kvf_cuda_map_shares(const kvf_cuda_region *a, const kvf_cuda_region *b) {
    return a->base == b->base && a->allocation_bytes == b->allocation_bytes && a->segments == b->segments &&
           memcmp(&a->device, &b->device, sizeof a->device) == 0 &&
           memcmp(&a->handle, &b->handle, sizeof a->handle) == 0;
}

/* Opens its allocation unless an earlier region lies there. */
static kvf_status map_region(const kvf_cuda *cuda, kvf_cuda_map *map, const kvf_cuda_region *regions,
                             uint32_t i) {
    const kvf_cuda_region *region = &regions[i];
    CUdeviceptr base = 0;
    for (uint32_t before = 0; before < i && !base; before++)
        if (map->addresses[before] && kvf_cuda_map_shares(&regions[before], region))
            base = map->addresses[before] - regions[before].offset;
    kvf_status status = base ? KVF_OK : open_handle(cuda, map, region, i, &base);
    if (!status)
        map->addresses[i] = base + region->offset;
    return status;
}

/* The peer's device, by the id that it has in both processes. One that this process does not see
 * (CUDA_VISIBLE_DEVICES) cannot be asked about: the driver says whether it is reached when its memory is mapped. */
static kvf_status check_device(const kvf_cuda *cuda, uint32_t device, const kvf_cuda_region *region,
                               bool same_process) {
    const uint32_t other = kvf_cuda_device_with(cuda, &region->device);
    if (other == KVF_CUDA_DEVICES_MAX && !same_process)
        return KVF_OK;
    return same_process ? kvf_cuda_let_reach(device, other) : kvf_cuda_check_reach(cuda, device, other);
}

/* Checks all regions, and gives those their address that are good for this map's device as they are; none if `map` is
 * NULL. The user of segments has given its own device access to them; ours may be another. */
static kvf_status take_all(const kvf_cuda *cuda, uint32_t device, const kvf_cuda_region *regions,
                           uint32_t count, bool same_process, kvf_cuda_map *map) {
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < count && !status; i++) {
        if (!is_there(&regions[i]))
            continue;
        status = check_region(&regions[i], i);
        if (!status)
            status = check_device(cuda, device, &regions[i], same_process);
        if (!status && map && same_process &&
            (regions[i].segments == 0 || kvf_cuda_device_with(cuda, &regions[i].device) == device))
            map->addresses[i] = regions[i].base + regions[i].offset;
    }
    return status;
}

kvf_status kvf_cuda_map_check(uint32_t device, const kvf_cuda_region *regions, uint32_t count) {
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_enter(device, &cuda);
    if (status)
        return status;
    status = take_all(cuda, device, regions, count, false, NULL);
    kvf_cuda_leave(cuda);
    return status;
}

kvf_status kvf_cuda_map_open(uint32_t device, const kvf_cuda_region *regions, uint32_t count,
                             bool same_process, kvf_cuda_map **out) {
    const kvf_cuda *cuda;
    kvf_cuda_map *map = kvf_alloc0(1, sizeof *map);
    if (!map)
        return kvf_nomem("a peer's memory");
    map->device = device;
    map->addresses = kvf_alloc0(count, sizeof *map->addresses);
    map->opened = kvf_alloc0(count, sizeof *map->opened);
    kvf_status status =
        map->addresses && map->opened ? kvf_cuda_enter(device, &cuda) : kvf_nomem("a peer's memory");
    if (!status) {
        status = take_all(cuda, device, regions, count, same_process, map);
        kvf_cuda_leave(cuda);
    }
    if (status)
        kvf_cuda_map_close(map);
    else
        *out = map;
    return status;
}

static void close_handles(const kvf_cuda *cuda, kvf_cuda_map *map) {
    while (map->opened_count > 0)
        (void)cuda->cuIpcCloseMemHandle(map->opened[--map->opened_count]);
}

bool kvf_cuda_map_awaits(const kvf_cuda_map *map, const kvf_cuda_region *region, uint32_t i) {
    return is_there(region) && region->segments == 0 && !map->addresses[i];
}

/* Of two regions without segments, either both have addresses of ours or both are mapped by handles. */
void kvf_cuda_map_close_handles(kvf_cuda_map *map, const kvf_cuda_region *regions, uint32_t count) {
    const kvf_cuda *cuda;
    if (map->opened_count == 0 || kvf_cuda_enter(map->device, &cuda))
        return;
    close_handles(cuda, map);
    kvf_cuda_leave(cuda);
    for (uint32_t i = 0; i < count; i++)
        if (regions[i].segments == 0)
            map->addresses[i] = 0;
}

kvf_status kvf_cuda_map_handles(kvf_cuda_map *map, const kvf_cuda_region *regions, uint32_t count) {
    const kvf_cuda *cuda;
    bool any = false;
    for (uint32_t i = 0; i < count; i++)
        any = any || kvf_cuda_map_awaits(map, &regions[i], i);
    kvf_status status = any ? kvf_cuda_enter(map->device, &cuda) : KVF_OK;
    if (status || !any)
        return status;
    for (uint32_t i = 0; i < count && !status; i++)
        if (kvf_cuda_map_awaits(map, &regions[i], i))
            status = map_region(cuda, map, regions, i);
    kvf_cuda_leave(cuda);
    return status;
}

void kvf_cuda_map_close(kvf_cuda_map *map) {
    const kvf_cuda *cuda;
    if (map->opened && map->opened_count > 0 && kvf_cuda_enter(map->device, &cuda) == KVF_OK) {
        close_handles(cuda, map);
        kvf_cuda_leave(cuda);
    }
    kvf_free(map->addresses);
    kvf_free(map->opened);
    kvf_free(map);
}
