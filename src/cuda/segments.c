#include "cuda/segments.h"

#include <stdatomic.h>

#include "base/watch.h"

/* ---- the owner ---------------------------------------------------------------------------------- */

/* Finds the segment that contains an address. 0: the caller releases the handle. */
static CUresult hold(const kvf_cuda *cuda, CUdeviceptr at, CUdeviceptr *base, size_t *bytes,
                     CUmemGenericAllocationHandle *out) {
    CUresult result = cuda->cuMemRetainAllocationHandle(out, (void *)(uintptr_t)at);
    if (result)
        return result;
    result = cuda->cuMemGetAddressRange_v2(base, bytes, at);
    if (result)
        (void)cuda->cuMemRelease(*out);
    return result;
}

/* The size of the segment that begins at an address; 0: none of this device begins there. */
static uint64_t segment_at(const kvf_cuda *cuda, uint32_t device, CUdeviceptr at) {
    CUmemGenericAllocationHandle handle = 0;
    CUdeviceptr base = 0;
    size_t bytes = 0;
    int ordinal = -1;
    if (cuda->cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at) ||
        ordinal != (int)device || hold(cuda, at, &base, &bytes, &handle))
        return 0;
    (void)cuda->cuMemRelease(handle);
    return base == at ? bytes : 0;
}

void kvf_segments_find(const kvf_cuda *cuda, uint32_t device, CUdeviceptr address, uint64_t bytes,
                       kvf_cuda_place *place) {
    uint64_t more = segment_at(cuda, device, place->base);
    if (more != place->bytes)
        return;
    place->segments = 1;
    while (bytes > place->bytes - (address - place->base) &&
           (more = segment_at(cuda, device, place->base + place->bytes)) > 0) {
        place->bytes += more;
        place->segments++;
    }
}

/* A descriptor rather than a fabric handle, for which the reader needs a right; 0: it cannot be shared. */
static int sharing_of(const CUmemAllocationProp *properties) {
    const int types = properties->requestedHandleTypes;
    return types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                                                            : types & CU_MEM_HANDLE_TYPE_FABRIC;
}

static kvf_status check_segment(const kvf_cuda *cuda, uint32_t device, CUdeviceptr at, uint64_t *bytes) {
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp found = {0};
    CUdeviceptr base = 0;
    size_t size = 0;
    CUresult result = hold(cuda, at, &base, &size, &handle);
    if (!result) {
        result = cuda->cuMemGetAllocationPropertiesFromHandle(&found, handle);
        (void)cuda->cuMemRelease(handle);
    }
    *bytes = size;
    if (result)
        return kvf_cuda_status(device, result, "asking how memory was created");
    if (!sharing_of(&found))
        return kvf_fail(
            KVF_E_UNSUPPORTED,
            "memory of cuMemCreate() at 0x%llx was created with handle types %d and cannot be shared "
            "with other processes; create it with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR (%d) or "
            "CU_MEM_HANDLE_TYPE_FABRIC (%d), or register it as withheld",
            (unsigned long long)at, found.requestedHandleTypes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            CU_MEM_HANDLE_TYPE_FABRIC);
    return KVF_OK;
}

kvf_status kvf_segments_check(uint32_t device, const kvf_cuda_place *place) {
    const kvf_cuda *cuda;
    uint64_t bytes = 0;
    if (place->segments > KVF_SEGMENTS_MAX)
        return kvf_fail(KVF_E_LIMIT, "memory in %u segments of cuMemCreate(); allowed: up to %u",
                        place->segments, KVF_SEGMENTS_MAX);
    kvf_status status = kvf_cuda_enter(device, &cuda);
    if (status)
        return status;
    for (uint64_t at = 0; at < place->bytes && !status; at += bytes)
        status = check_segment(cuda, device, place->base + at, &bytes);
    kvf_cuda_leave(cuda);
    return status;
}

static CUresult export_handle(const kvf_cuda *cuda, CUmemGenericAllocationHandle handle,
                              kvf_segment_handle *out) {
    CUmemAllocationProp found = {0};
    const CUresult result = cuda->cuMemGetAllocationPropertiesFromHandle(&found, handle);
    if (result)
        return result;
    const int type = sharing_of(&found);
    return cuda->cuMemExportToShareableHandle(
        type == CU_MEM_HANDLE_TYPE_FABRIC ? (void *)&out->fabric : (void *)&out->fd, handle, type, 0);
}

static kvf_status export_segment(const kvf_cuda *cuda, uint32_t device, CUdeviceptr at, uint64_t most,
                                 uint64_t *bytes, kvf_segment_handle *out) {
    CUmemGenericAllocationHandle handle = 0;
    CUdeviceptr base = 0;
    size_t size = 0;
    CUresult result = hold(cuda, at, &base, &size, &handle);
    if (result && !kvf_cuda_is_unknown(result))
        return kvf_cuda_status(device, result, "exporting memory of cuMemCreate()");
    if (result || base != at || size > most) {
        if (!result)
            (void)cuda->cuMemRelease(handle);
        return kvf_fail(
            KVF_E_INVALID,
            "the memory at 0x%llx is no longer what was registered: it was unmapped, or mapped anew",
            (unsigned long long)at);
    }
    result = export_handle(cuda, handle, out);
    (void)cuda->cuMemRelease(handle);
    *bytes = size;
    if (!result)
        return KVF_OK;
    out->fd = -1;
    return kvf_cuda_status(device, result, "exporting memory of cuMemCreate()");
}

kvf_status kvf_segment_export(uint32_t device, CUdeviceptr at, uint64_t most, uint64_t *bytes,
                              kvf_segment_handle *out) {
    const kvf_cuda *cuda;
    *out = (kvf_segment_handle){.fd = -1};
    kvf_status status = kvf_cuda_enter(device, &cuda);
    if (status)
        return status;
    status = export_segment(cuda, device, at, most, bytes, out);
    kvf_cuda_leave(cuda);
    return status;
}

/* Whether memory of cuMemCreate() may be asked for that network cards reach. */
static bool serves_network_cards(const kvf_cuda *cuda, uint32_t device) {
    CUdevice handle = 0;
    int can = 0;
    return !cuda->cuDeviceGet(&handle, (int)device) &&
           !cuda->cuDeviceGetAttribute(&can, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                                       handle) &&
           can;
}

/* Creates memory for network cards if the driver gives it, and otherwise without. */
static CUresult create(const kvf_cuda *cuda, uint64_t bytes, const CUmemAllocationProp *properties,
                       CUmemGenericAllocationHandle *out) {
    CUmemAllocationProp without = *properties;
    const CUresult result = cuda->cuMemCreate(out, bytes, properties, 0);
    if (!result || !properties->allocFlags.gpuDirectRDMACapable)
        return result;
    without.allocFlags.gpuDirectRDMACapable = 0;
    return cuda->cuMemCreate(out, bytes, &without, 0);
}

/* Maps new memory at reserved addresses. */
static kvf_status create_at(const kvf_cuda *cuda, CUdeviceptr at, uint64_t bytes,
                            const CUmemAllocationProp *properties) {
    const CUmemAccessDesc access = {properties->location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const uint32_t device = (uint32_t)properties->location.id;
    CUmemGenericAllocationHandle handle = 0;
    CUresult result = create(cuda, bytes, properties, &handle);
    if (result)
        return kvf_cuda_status(device, result, "creating memory of a device that can be exported");
    result = cuda->cuMemMap(at, bytes, 0, handle, 0);
    (void)cuda->cuMemRelease(handle); /* the mapping keeps the memory */
    if (result)
        return kvf_cuda_status(device, result, "mapping memory of a device that can be exported");
    result = cuda->cuMemSetAccess(at, bytes, &access, 1);
    if (result)
        (void)cuda->cuMemUnmap(at, bytes);
    return kvf_cuda_status(device, result, "giving a device access to memory that can be exported");
}

/* Computes the size of the segment that holds these bytes: the driver takes only multiples of a number of its own. */
static kvf_status round_up(const kvf_cuda *cuda, uint64_t bytes, const CUmemAllocationProp *properties,
                           uint64_t *out) {
    size_t multiple = 0;
    const CUresult result =
        cuda->cuMemGetAllocationGranularity(&multiple, properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (result)
        return kvf_cuda_status((uint32_t)properties->location.id, result,
                               "asking which sizes memory that can be exported may have");
    if (!kvf_add(bytes, multiple - 1, out))
        return kvf_fail(KVF_E_NOMEM, "%llu bytes of a device are more than there can be",
                        (unsigned long long)bytes);
    *out -= *out % multiple;
    return KVF_OK;
}

static kvf_status allocate(const kvf_cuda *cuda, uint32_t device, uint64_t bytes, CUdeviceptr *out,
                           uint64_t *all_bytes) {
    const CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                            .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, (int)device},
                                            .allocFlags.gpuDirectRDMACapable =
                                                serves_network_cards(cuda, device)};
    kvf_status status = round_up(cuda, bytes, &properties, all_bytes);
    if (!status)
        status = kvf_cuda_status(device, cuda->cuMemAddressReserve(out, *all_bytes, 0, 0, 0),
                                 "reserving addresses for memory of a device");
    if (status)
        return status;
    status = create_at(cuda, *out, *all_bytes, &properties);
    if (status)
        (void)cuda->cuMemAddressFree(*out, *all_bytes);
    return status;
}

kvf_status kvf_segment_allocate(uint32_t device, uint64_t bytes, CUdeviceptr *out, uint64_t *all_bytes) {
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_enter(device, &cuda);
    if (status)
        return status;
    status = allocate(cuda, device, bytes, out, all_bytes);
    kvf_cuda_leave(cuda);
    return status;
}

/* Nothing says that cuMemUnmap() waits for the device. A kernel that used the memory afterwards would end the context. */
void kvf_segment_free(uint32_t device, CUdeviceptr address, uint64_t all_bytes) {
    const kvf_cuda *cuda;
    if (kvf_cuda_enter(device, &cuda))
        return;
    (void)cuda->cuCtxSynchronize();
    (void)cuda->cuMemUnmap(address, all_bytes);
    (void)cuda->cuMemAddressFree(address, all_bytes);
    kvf_cuda_leave(cuda);
}

/* ---- the reader --------------------------------------------------------------------------------- */

struct kvf_mapping {
    CUdeviceptr base;
    uint64_t bytes, mapped;
    uint32_t reader; /* is entered */
};

static _Atomic uint64_t reserved; /* bytes of all mappings */

/* A card is only believed as far as a device goes, and all cards together as far as leaves addresses to others. */
static kvf_status check_size(const kvf_cuda *cuda, uint32_t device, uint64_t bytes) {
    CUdevice handle = 0;
    size_t all = KVF_UNSEEN_BYTES;
    CUresult result = 0;
    if (device < cuda->device_count && !(result = cuda->cuDeviceGet(&handle, (int)device)))
        result = cuda->cuDeviceTotalMem_v2(&all, handle);
    if (result)
        return kvf_cuda_status(device, result, "asking for a device's memory");
    if (bytes > all)
        return kvf_fail(KVF_E_PARSE, "memory of %llu bytes on a device; allowed: up to %zu",
                        (unsigned long long)bytes, all);
    return KVF_OK;
}

static kvf_status reserve(const kvf_cuda *cuda, uint32_t device, kvf_mapping *mapping) {
    kvf_status status = check_size(cuda, device, mapping->bytes);
    if (status)
        return status;
    if (atomic_fetch_add(&reserved, mapping->bytes) > KVF_MAPPINGS_BYTES - mapping->bytes)
        status = kvf_fail(
            KVF_E_LIMIT,
            "%llu bytes of addresses for memory of peers, beside what is mapped; allowed: %llu in all",
            (unsigned long long)mapping->bytes, (unsigned long long)KVF_MAPPINGS_BYTES);
    if (!status)
        status = kvf_cuda_status(mapping->reader,
                                 cuda->cuMemAddressReserve(&mapping->base, mapping->bytes, 0, 0, 0),
                                 "reserving addresses");
    if (status)
        (void)atomic_fetch_sub(&reserved, mapping->bytes);
    return status;
}

kvf_status kvf_mapping_open(uint32_t device, uint64_t bytes, uint32_t reader, kvf_mapping **out) {
    const kvf_cuda *cuda;
    kvf_mapping *mapping = kvf_alloc0(1, sizeof *mapping);
    if (!mapping)
        return kvf_nomem("a mapping");
    mapping->bytes = bytes;
    mapping->reader = reader;
    kvf_status status = kvf_cuda_enter(reader, &cuda);
    if (!status) {
        status = reserve(cuda, device, mapping);
        kvf_cuda_leave(cuda);
    }
    if (status)
        kvf_free(mapping);
    else
        *out = mapping;
    return status;
}

static CUresult import_handle(const kvf_cuda *cuda, const kvf_segment_handle *given,
                              CUmemGenericAllocationHandle *out) {
    CUmemFabricHandle fabric = given->fabric;
    return given->fd < 0 ? cuda->cuMemImportFromShareableHandle(out, &fabric, CU_MEM_HANDLE_TYPE_FABRIC)
                         : cuda->cuMemImportFromShareableHandle(out, (void *)(intptr_t)given->fd,
                                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

/* Whose memory it is is not asked: of a device that this process does not see, drivers say different things, and what
 * ours reach is asked with kvf_mapping_allow(). The mapping keeps the memory, without the handle. */
static kvf_status import(const kvf_cuda *cuda, kvf_mapping *mapping, const kvf_segment_handle *given,
                         uint64_t bytes) {
    CUmemGenericAllocationHandle handle = 0;
    CUresult result = import_handle(cuda, given, &handle);
    if (result) {
        (void)kvf_cuda_status(mapping->reader, result, "importing a segment");
        return kvf_fail_in(KVF_E_UNSUPPORTED, "this process may not map it: ");
    }
    result = cuda->cuMemMap(mapping->base + mapping->mapped, bytes, 0, handle, 0);
    (void)cuda->cuMemRelease(handle);
    if (!result)
        return KVF_OK;
    (void)kvf_cuda_status(mapping->reader, result, "mapping a segment");
    return kvf_fail_in(KVF_E_UNSUPPORTED, "a segment of %llu bytes: ", (unsigned long long)bytes);
}

kvf_status kvf_mapping_add(kvf_mapping *mapping, const kvf_segment_handle *handle, uint64_t bytes) {
    const kvf_cuda *cuda;
    if (bytes == 0 || bytes > kvf_mapping_left(mapping))
        return kvf_fail(KVF_E_PARSE, "a segment has %llu bytes; allowed: 1 to %llu",
                        (unsigned long long)bytes, (unsigned long long)kvf_mapping_left(mapping));
    kvf_status status = kvf_cuda_enter(mapping->reader, &cuda);
    if (status)
        return status;
    status = import(cuda, mapping, handle, bytes);
    kvf_cuda_leave(cuda);
    if (!status)
        mapping->mapped += bytes;
    return status;
}

uint64_t kvf_mapping_left(const kvf_mapping *mapping) {
    return mapping->bytes - mapping->mapped;
}

CUdeviceptr kvf_mapping_base(const kvf_mapping *mapping) {
    return mapping->base;
}

/* Asks for writing, too, as all other users do: whether drivers give less was not tried. */
kvf_status kvf_mapping_allow(const kvf_mapping *mapping, const uint32_t *devices, uint32_t count) {
    const kvf_cuda *cuda;
    CUmemAccessDesc access[KVF_CUDA_DEVICES_MAX];
    KVF_ASSERT(kvf_mapping_left(mapping) == 0 && count <= KVF_CUDA_DEVICES_MAX);
    for (uint32_t i = 0; i < count; i++)
        access[i] = (CUmemAccessDesc){{CU_MEM_LOCATION_TYPE_DEVICE, (int)devices[i]},
                                      CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    kvf_status status = kvf_cuda_enter(mapping->reader, &cuda);
    if (status)
        return status;
    const CUresult result = cuda->cuMemSetAccess(mapping->base, mapping->bytes, access, count);
    kvf_cuda_leave(cuda);
    if (!result)
        return KVF_OK;
    (void)kvf_cuda_status(mapping->reader, result, "cuMemSetAccess()");
    return kvf_fail_in(KVF_E_UNSUPPORTED, "the devices may not read it: ");
}

void kvf_mapping_close(kvf_mapping *mapping) {
    const kvf_cuda *cuda;
    if (mapping && kvf_cuda_enter(mapping->reader, &cuda) == KVF_OK) {
        if (mapping->mapped > 0)
            (void)cuda->cuMemUnmap(mapping->base, mapping->mapped);
        (void)cuda->cuMemAddressFree(mapping->base, mapping->bytes);
        kvf_cuda_leave(cuda);
        (void)atomic_fetch_sub(&reserved, mapping->bytes);
    }
    kvf_free(mapping);
}
