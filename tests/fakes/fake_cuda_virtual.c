/*
 * The stand-in's memory of cuMemCreate(). An allocation is a file, whose name says which device it is of and how it
 * may be shared; it lives as long as handles or mappings of it. Reserved addresses have no access rights, and beside
 * them as many of this library's own, where segments that are mapped one behind the other lie so, too. A segment can
 * be used by a device only once that has access; everything else ends the context, as with the driver.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake_cuda_inside.h"

#define NAME "fake_cuda_segment"
#define RESERVATIONS 256u
#define NOT_SUPPORTED 801
#define INVISIBLE 5    /* a CUmemLocationType from CUDA 13.2 on */
#define NO_DEVICE (-2) /* CU_DEVICE_INVALID */

typedef struct allocation {
    int file, types;
    CUmemLocation location;
    bool rdma; /* for network cards */
    size_t bytes;
    unsigned handles, mappings;
} allocation;

typedef struct reservation {
    unsigned char *addresses, *shadow; /* NULL: the entry is free */
    size_t bytes;
} reservation;

static reservation reservations[RESERVATIONS];

/* ---- allocations -------------------------------------------------------------------------------- */

static CUresult new_allocation(int file, CUmemLocation location, int types, bool rdma, size_t bytes,
                               CUmemGenericAllocationHandle *out) {
    allocation *made = calloc(1, sizeof *made);
    if (!made) {
        (void)close(file);
        return OUT_OF_MEMORY;
    }
    *made = (allocation){
        .file = file, .location = location, .types = types, .rdma = rdma, .bytes = bytes, .handles = 1};
    fake.left++;
    *out = (uint64_t)(uintptr_t)made;
    return 0;
}

static allocation *allocation_of(CUmemGenericAllocationHandle handle) {
    return (allocation *)(uintptr_t)handle;
}

static void free_unused(allocation *of) {
    if (of->handles > 0 || of->mappings > 0)
        return;
    (void)close(of->file);
    free(of);
}

/* Like the driver's, this needs no context. */
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties, int which) {
    *bytes = FAKE_SEGMENT;
    if (which != CU_MEM_ALLOC_GRANULARITY_MINIMUM || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return INVALID_VALUE;
    return fake_told(__func__);
}

/* A new file whose bytes are not 0, as those of new memory of a device may be; -1: there is none. */
static int new_file(const char *name, size_t bytes) {
    const int file = bytes <= MEMORY_OF_DEVICE ? memfd_create(name, MFD_CLOEXEC) : -1;
    void *seen = file >= 0 && ftruncate(file, (off_t)bytes) == 0
                     ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                     : MAP_FAILED;
    if (seen != MAP_FAILED) {
        memset(seen, 0xa5, bytes);
        (void)munmap(seen, bytes);
        return file;
    }
    if (file >= 0)
        (void)close(file);
    return -1;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *properties, unsigned long long flags) {
    BEGIN;
    char name[64];
    if (bytes == 0 || bytes % FAKE_SEGMENT != 0 || flags ||
        properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return INVALID_VALUE;
    const bool rdma = properties->allocFlags.gpuDirectRDMACapable;
    if (rdma && !fake_number("FAKE_CUDA_RDMA", 1))
        return INVALID_DEVICE;
    (void)snprintf(name, sizeof name, NAME "-%d-%d", fake_of_machine(properties->location.id),
                   properties->requestedHandleTypes);
    const int file = new_file(name, bytes);
    if (file < 0)
        return OUT_OF_MEMORY;
    (void)pthread_mutex_lock(&fake.lock);
    const CUresult result =
        new_allocation(file, properties->location, properties->requestedHandleTypes, rdma, bytes, handle);
    (void)pthread_mutex_unlock(&fake.lock);
    return result;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    BEGIN;
    allocation *of = allocation_of(handle);
    (void)pthread_mutex_lock(&fake.lock);
    const bool good = of->handles > 0;
    if (good) {
        of->handles--;
        fake.left--;
        free_unused(of);
    }
    (void)pthread_mutex_unlock(&fake.lock);
    return good ? 0 : INVALID_VALUE;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    BEGIN;
    (void)pthread_mutex_lock(&fake.lock);
    const fake_range *found = fake_range_at((uint64_t)(uintptr_t)address);
    allocation *of = found && found->kind == VIRTUAL ? found->allocation : NULL;
    if (of) {
        of->handles++;
        fake.left++;
        *handle = (uint64_t)(uintptr_t)of;
    }
    (void)pthread_mutex_unlock(&fake.lock);
    return of ? 0 : INVALID_VALUE;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                CUmemGenericAllocationHandle handle) {
    BEGIN;
    const allocation *of = allocation_of(handle);
    *properties = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                        .requestedHandleTypes = of->types,
                                        .location = of->location,
                                        .allocFlags.gpuDirectRDMACapable = of->rdma};
    return 0;
}

/* ---- sharing ------------------------------------------------------------------------------------ */

/* The content of a fabric handle: where the allocation's file is open as long as the allocation lives. */
static void write_fabric(const allocation *of, CUmemFabricHandle *out) {
    memset(out, 0, sizeof *out);
    (void)snprintf((char *)out->data, sizeof out->data, "/proc/%d/fd/%d", getpid(), of->file);
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type,
                                      unsigned long long flags) {
    BEGIN;
    const allocation *of = allocation_of(handle);
    if (flags || !(of->types & type))
        return INVALID_VALUE;
    if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
        write_fabric(of, shareable);
        return 0;
    }
    const int file =
        type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? fcntl(of->file, F_DUPFD_CLOEXEC, 0) : -1;
    if (file < 0)
        return OUT_OF_MEMORY;
    *(int *)shareable = file;
    return 0;
}

/* The file of an allocation that is shared: a descriptor, which the caller closes; -1: there is none. */
static int shared_file(void *shareable, int type) {
    char path[sizeof(CUmemFabricHandle) + 1] = "";
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return fcntl((int)(intptr_t)shareable, F_DUPFD_CLOEXEC, 0);
    if (type != CU_MEM_HANDLE_TYPE_FABRIC || getenv("FAKE_CUDA_NO_CHANNEL"))
        return -1;
    memcpy(path, shareable, sizeof(CUmemFabricHandle));
    return open(path, O_RDWR | O_CLOEXEC);
}

/* Of a device that this process does not see the driver says only that. */
static CUmemLocation location_here(int device) {
    const int here = fake_of_process(device);
    return here < 0 ? (CUmemLocation){INVISIBLE, NO_DEVICE}
                    : (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, here};
}

/* Takes only files of this library. */
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type) {
    BEGIN;
    const int file = shared_file(shareable, type);
    int device = 0, types = 0;
    char path[64], name[128] = "";
    struct stat found;
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    if (file < 0 || readlink(path, name, sizeof name - 1) < 0 ||
        sscanf(name, "/memfd:" NAME "-%d-%d", &device, &types) != 2 || // NOLINT(cert-err34-c)
        !(types & type) || fstat(file, &found) != 0) {
        if (file >= 0)
            (void)close(file);
        return INVALID_VALUE;
    }
    (void)pthread_mutex_lock(&fake.lock);
    const CUresult result =
        new_allocation(file, location_here(device), types, false, (size_t)found.st_size, handle);
    (void)pthread_mutex_unlock(&fake.lock);
    return result;
}

/* ---- addresses ---------------------------------------------------------------------------------- */

static reservation *reservation_of(uint64_t address, size_t bytes) {
    for (size_t i = 0; i < RESERVATIONS; i++) {
        const uint64_t begin = (uint64_t)(uintptr_t)reservations[i].addresses;
        if (begin && address >= begin && address - begin <= reservations[i].bytes &&
            bytes <= reservations[i].bytes - (address - begin))
            return &reservations[i];
    }
    return NULL;
}

static void *reserve(size_t bytes) {
    void *made = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return made == MAP_FAILED ? NULL : made;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    BEGIN;
    reservation *made = NULL;
    if (bytes == 0 || bytes % FAKE_SEGMENT != 0 || alignment || wanted || flags)
        return INVALID_VALUE;
    (void)pthread_mutex_lock(&fake.lock);
    for (size_t i = 0; i < RESERVATIONS && !made; i++)
        made = reservations[i].addresses ? NULL : &reservations[i];
    if (made) {
        *made = (reservation){reserve(bytes), reserve(bytes), bytes};
        fake.left += made->addresses != NULL;
    }
    const bool good = made && made->addresses && made->shadow;
    if (good)
        *address = (uint64_t)(uintptr_t)made->addresses;
    (void)pthread_mutex_unlock(&fake.lock);
    return good ? 0 : OUT_OF_MEMORY;
}

/* Whether nothing is mapped in these addresses. */
static bool is_bare(uint64_t address, size_t bytes) {
    for (size_t at = 0; at < bytes; at += FAKE_SEGMENT)
        if (fake_range_at(address + at))
            return false;
    return true;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    BEGIN;
    (void)pthread_mutex_lock(&fake.lock);
    fake_advance();
    reservation *of = reservation_of(address, bytes);
    const bool good =
        of && (uint64_t)(uintptr_t)of->addresses == address && of->bytes == bytes && is_bare(address, bytes);
    if (good) {
        (void)munmap(of->addresses, bytes);
        (void)munmap(of->shadow, bytes);
        *of = (reservation){0};
        fake.left--;
    }
    (void)pthread_mutex_unlock(&fake.lock);
    return good ? 0 : INVALID_VALUE;
}

/* ---- segments ------------------------------------------------------------------------------------- */

static CUresult map_segment(uint64_t address, size_t bytes, allocation *of) {
    const reservation *in = reservation_of(address, bytes);
    fake_range *made = fake_range_new();
    if (!in || bytes == 0 || bytes % FAKE_SEGMENT != 0 || bytes > of->bytes || of->handles == 0 ||
        !is_bare(address, bytes) || (address - (uint64_t)(uintptr_t)in->addresses) % FAKE_SEGMENT != 0)
        return INVALID_VALUE;
    unsigned char *shadow = in->shadow + (address - (uint64_t)(uintptr_t)in->addresses);
    if (!made ||
        mmap(shadow, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, of->file, 0) == MAP_FAILED)
        return OUT_OF_MEMORY;
    *made = (fake_range){.kind = VIRTUAL,
                         .address = address,
                         .shadow = shadow,
                         .bytes = bytes,
                         .file = -1,
                         .device = of->location.id,
                         .allocation = of,
                         .rdma = of->rdma};
    of->mappings++;
    fake.left++;
    return 0;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    BEGIN;
    if (offset || flags)
        return INVALID_VALUE;
    (void)pthread_mutex_lock(&fake.lock);
    const CUresult result = map_segment(address, bytes, allocation_of(handle));
    (void)pthread_mutex_unlock(&fake.lock);
    return result;
}

/* Whether whole segments fill these addresses. */
static bool is_whole(uint64_t address, size_t bytes) {
    const uint64_t end = address + bytes;
    while (address < end) {
        const fake_range *segment = fake_range_at(address);
        if (!segment || segment->kind != VIRTUAL || segment->address != address ||
            segment->bytes > end - address)
            return false;
        address += segment->bytes;
    }
    return bytes > 0;
}

static void unmap_segment(fake_range *segment) {
    allocation *of = segment->allocation;
    (void)mmap(segment->shadow, segment->bytes, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    segment->kind = FREE;
    of->mappings--;
    fake.left--;
    free_unused(of);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    BEGIN;
    fake_wait_for_streams();
    (void)pthread_mutex_lock(&fake.lock);
    fake_advance();
    const bool good = is_whole(address, bytes);
    for (const uint64_t end = address + bytes; good && address < end;) {
        fake_range *segment = fake_range_at(address);
        address += segment->bytes;
        unmap_segment(segment);
    }
    (void)pthread_mutex_unlock(&fake.lock);
    return good ? 0 : INVALID_VALUE;
}

/* A device that reaches no other may not have access to another's memory. */
static bool may_have(const fake_range *segment, const CUmemAccessDesc *access) {
    return access->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
           access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE &&
           (access->location.id == segment->device || !getenv("FAKE_CUDA_APART"));
}

static CUresult set_access(uint64_t address, size_t bytes, const CUmemAccessDesc *access) {
    const uint64_t end = address + bytes;
    while (address < end) {
        fake_range *segment = fake_range_at(address);
        if (!may_have(segment, access))
            return NOT_SUPPORTED;
        segment->access |= UINT64_C(1) << access->location.id;
        address += segment->bytes;
    }
    return 0;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    BEGIN;
    (void)pthread_mutex_lock(&fake.lock);
    CUresult result = count > 0 && is_whole(address, bytes) ? 0 : INVALID_VALUE;
    for (size_t i = 0; i < count && !result; i++)
        result = set_access(address, bytes, &access[i]);
    (void)pthread_mutex_unlock(&fake.lock);
    return result;
}
