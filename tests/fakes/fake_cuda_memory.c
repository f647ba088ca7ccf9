/* The stand-in's memory: of devices, of the host as far as devices know it, and of other processes. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake_cuda_inside.h"

#define RANGES 4096u
#define BLOCK ((size_t)2 << 20) /* from which the driver cuts smaller allocations */

typedef fake_range range;

static range ranges[RANGES];
static _Alignas(64) unsigned char nowhere[64]; /* what a kernel finds that may not find anything */

/* ---- memory ------------------------------------------------------------------------------------- */

static bool has(const range *of, uint64_t address) {
    return of->kind != FREE && address >= of->address && address - of->address < of->bytes;
}

/* Kernels look up every vector, mostly in the same two ranges in turn. */
range *fake_range_at(uint64_t address) {
    static _Thread_local range *last[2];
    for (int i = 0; i < 2; i++)
        if (last[i] && has(last[i], address))
            return last[i];
    for (size_t i = 0; i < RANGES; i++)
        if (has(&ranges[i], address)) {
            last[0] = last[1];
            return last[1] = &ranges[i];
        }
    return NULL;
}

bool fake_knows(uint64_t address) {
    return fake_range_at(address) != NULL;
}

void *fake_cuda_look(uint64_t address) {
    const range *found = fake_range_at(address);
    return found ? found->shadow + (address - found->address) : NULL;
}

uint64_t fake_cuda_address(const void *found) {
    const unsigned char *at = found;
    for (size_t i = 0; i < RANGES; i++)
        if (ranges[i].kind != FREE && at >= ranges[i].shadow && at < ranges[i].shadow + ranges[i].bytes)
            return ranges[i].address + (uint64_t)(at - ranges[i].shadow);
    return 0;
}

/* Segments that are mapped one behind the other count as one; and each device needs access to each. */
static bool reaches(const range *found, uint64_t address, uint64_t bytes) {
    while (found && (found->kind != VIRTUAL || (found->access >> fake.running & 1))) {
        const uint64_t there = found->bytes - (address - found->address);
        if (bytes <= there)
            return true;
        if (found->kind != VIRTUAL)
            return false;
        address += there;
        bytes -= there;
        found = fake_range_at(address);
    }
    return false;
}

static void stick(int result) {
    fake.stuck = fake.stuck ? fake.stuck : result;
}

void *fake_reach(uint64_t address, uint64_t bytes) {
    const range *found = fake_range_at(address);
    if (!found || !reaches(found, address, bytes)) {
        stick(ILLEGAL_ADDRESS);
        return nowhere;
    }
    return found->shadow + (address - found->address);
}

/* Kernels, unlike copies, must have been let reach another device. */
static bool is_let_reach(const range *found) {
    return found->device == fake.running || (found->kind != DEVICE && found->kind != MAPPED) ||
           (found->kind == DEVICE && fake.peers[fake.running][found->device]);
}

void *fake_access(uint64_t address, uint64_t bytes) {
    const range *found = fake_range_at(address);
    const bool aligned = address % bytes == 0;
    if (!aligned)
        stick(CUDA_ERROR_MISALIGNED_ADDRESS);
    else if (found && !is_let_reach(found))
        stick(ILLEGAL_ADDRESS);
    return aligned ? fake_reach(address, bytes) : nowhere;
}

range *fake_range_new(void) {
    for (size_t i = 0; i < RANGES; i++)
        if (ranges[i].kind == FREE)
            return &ranges[i];
    return NULL;
}

/* Maps a file twice, see fake_cuda.c; takes ownership of the file. */
static CUresult map(int file, size_t bytes, fake_kind kind, CUdeviceptr *out) {
    range *made = fake_range_new();
    void *address = mmap(NULL, bytes, PROT_NONE, MAP_SHARED, file, 0);
    void *shadow = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (!made || address == MAP_FAILED || shadow == MAP_FAILED) {
        (void)close(file);
        return OUT_OF_MEMORY;
    }
    *made = (range){.kind = kind,
                    .address = (uint64_t)(uintptr_t)address,
                    .shadow = shadow,
                    .bytes = bytes,
                    .file = file,
                    .device = fake_current[fake_depth - 1]->device};
    fake.left++;
    *out = made->address;
    return 0;
}

static CUresult unmap(uint64_t address, fake_kind kind) {
    range *found = fake_range_at(address);
    if (!found || found->address != address || found->kind != kind)
        return INVALID_VALUE;
    (void)munmap((void *)(uintptr_t)found->address, found->bytes);
    (void)munmap(found->shadow, found->bytes);
    (void)close(found->file);
    found->kind = FREE;
    fake.left--;
    return 0;
}

CUresult fake_free(uint64_t address) {
    return unmap(address, DEVICE);
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    BEGIN;
    fake_wait_for_streams();
    (void)pthread_mutex_lock(&fake.lock);
    fake_advance();
    const CUresult result = unmap(address, DEVICE);
    (void)pthread_mutex_unlock(&fake.lock);
    return result;
}

CUresult fake_allocate(CUdeviceptr *address, size_t bytes) {
    const int file = bytes > 0 && bytes <= MEMORY_OF_DEVICE ? memfd_create("fake_cuda", MFD_CLOEXEC) : -1;
    if (file < 0 || ftruncate(file, (off_t)bytes) != 0)
        return bytes == 0 ? INVALID_VALUE : OUT_OF_MEMORY;
    return map(file, bytes, DEVICE, address);
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    BEGIN;
    (void)pthread_mutex_lock(&fake.lock);
    const CUresult result = fake_allocate(address, bytes);
    (void)pthread_mutex_unlock(&fake.lock);
    return result;
}

/* The range of the host's memory that contains an address of the host. */
static range *host_range(const void *address) {
    const unsigned char *at = address;
    for (size_t i = 0; i < RANGES; i++)
        if ((ranges[i].kind == HOST || ranges[i].kind == PINNED) && at >= ranges[i].shadow &&
            at < ranges[i].shadow + ranges[i].bytes)
            return &ranges[i];
    return NULL;
}

/* Whether the driver knows a part of this memory. */
static bool knows_some(const unsigned char *begin, size_t bytes) {
    for (size_t i = 0; i < RANGES; i++)
        if ((ranges[i].kind == HOST || ranges[i].kind == PINNED) &&
            begin < ranges[i].shadow + ranges[i].bytes && ranges[i].shadow < begin + bytes)
            return true;
    return false;
}

static CUresult note_host(void *address, size_t bytes, fake_kind kind, bool aliased) {
    range *made = fake_range_new();
    void *alias = address;
    if (knows_some(address, bytes))
        return ALREADY_REGISTERED;
    if (made && aliased)
        alias = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!made || alias == MAP_FAILED)
        return OUT_OF_MEMORY;
    *made = (range){.kind = kind,
                    .address = (uint64_t)(uintptr_t)alias,
                    .shadow = address,
                    .bytes = bytes,
                    .file = -1,
                    .device = -1};
    fake.left++;
    return 0;
}

CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    BEGIN;
    (void)flags;
    (void)pthread_mutex_lock(&fake.lock);
    *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    const CUresult result = *address ? note_host(*address, bytes, HOST, false) : OUT_OF_MEMORY;
    (void)pthread_mutex_unlock(&fake.lock);
    return result;
}

CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    BEGIN;
    if (bytes == 0 || flags & ~(unsigned)(CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP))
        return INVALID_VALUE;
    (void)pthread_mutex_lock(&fake.lock);
    const CUresult result = note_host(address, bytes, PINNED, fake_number("FAKE_CUDA_ALIASED", 0));
    (void)pthread_mutex_unlock(&fake.lock);
    return result;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *memory, unsigned flags) {
    BEGIN;
    (void)pthread_mutex_lock(&fake.lock);
    const range *found = flags ? NULL : host_range(memory);
    if (found)
        *address = found->address + (uint64_t)((unsigned char *)memory - found->shadow);
    (void)pthread_mutex_unlock(&fake.lock);
    return found ? 0 : INVALID_VALUE;
}

static CUresult forget_host(void *address, fake_kind kind) {
    range *found = host_range(address);
    if (!found || found->kind != kind || found->shadow != address)
        return kind == HOST ? INVALID_VALUE : NOT_REGISTERED;
    if (found->address != (uint64_t)(uintptr_t)address)
        (void)munmap((void *)(uintptr_t)found->address, found->bytes);
    found->kind = FREE;
    fake.left--;
    return 0;
}

CUresult cuMemHostUnregister(void *address) {
    BEGIN;
    fake_wait_for_streams();
    (void)pthread_mutex_lock(&fake.lock);
    const CUresult result = forget_host(address, PINNED);
    (void)pthread_mutex_unlock(&fake.lock);
    return result;
}

CUresult cuMemFreeHost(void *address) {
    BEGIN;
    fake_wait_for_streams();
    (void)pthread_mutex_lock(&fake.lock);
    const CUresult result = forget_host(address, HOST);
    if (result == 0)
        free(address);
    (void)pthread_mutex_unlock(&fake.lock);
    return result;
}

CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) {
    BEGIN;
    (void)pthread_mutex_lock(&fake.lock);
    const range *found = fake_range_at(address);
    if (!found)
        found = host_range((const void *)(uintptr_t)address);
    const bool of_device = found && found->kind != HOST && found->kind != PINNED;
    const int known = attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? (of_device ? CU_MEMORYTYPE_DEVICE : 1)
                      : attribute == CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
                          ? of_device && (found->kind != VIRTUAL || found->rdma)
                          : (found ? found->device : -1);
    (void)pthread_mutex_unlock(&fake.lock);
    if (!found)
        return INVALID_VALUE;
    *(int *)value = known;
    return 0;
}

/* Of opened memory the driver may know only the block from which its owner's driver cut the allocation. */
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    BEGIN;
    (void)pthread_mutex_lock(&fake.lock);
    const range *found = fake_range_at(address);
    if (found) {
        const size_t before = found->kind == MAPPED ? BLOCK / 2 : 0;
        *base = found->address - before;
        *bytes = before ? (before + found->bytes + BLOCK - 1) / BLOCK * BLOCK : found->bytes;
    }
    (void)pthread_mutex_unlock(&fake.lock);
    return found ? 0 : INVALID_VALUE;
}

/* ---- memory of other processes ------------------------------------------------------------------ */

/* The content of a handle: a file descriptor of the exporting process, the inode that it had then, and the machine's
 * device. */
typedef struct handle {
    long process, file;
    uint64_t bytes, inode;
    int device;
} handle;

static uint64_t inode_of(int file) {
    struct stat found;
    return fstat(file, &found) == 0 ? (uint64_t)found.st_ino : 0;
}

void fake_cuda_handle(long process, int file, uint64_t bytes, void *out) {
    const handle made = {.process = process, .file = file, .bytes = bytes, .inode = inode_of(file)};
    memset(out, 0, sizeof(CUipcMemHandle));
    memcpy(out, &made, sizeof made);
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address) {
    BEGIN;
    handle made = {.process = getpid()};
    (void)pthread_mutex_lock(&fake.lock);
    const range *found = fake_range_at(address);
    const bool good = found && found->kind == DEVICE && !found->pooled && found->address == address;
    if (good) {
        made.file = found->file;
        made.bytes = found->bytes;
        made.inode = inode_of(found->file);
        made.device = fake_of_machine(found->device);
    }
    (void)pthread_mutex_unlock(&fake.lock);
    memset(out, 0, sizeof *out);
    memcpy(out, &made, sizeof made);
    return good ? 0 : INVALID_VALUE;
}

/* The range that the current device got when it opened a file; NULL: it has not opened it. */
static range *opened_before(uint64_t inode) {
    for (size_t i = 0; i < RANGES; i++)
        if (ranges[i].kind == MAPPED && ranges[i].inode == inode &&
            ranges[i].device == fake_current[fake_depth - 1]->device)
            return &ranges[i];
    return NULL;
}

/* Like the driver, this takes memory of a device that the process does not see, and gives the address that the current
 * device has for it already, if it has one. */
static CUresult open_handle(const handle *given, CUdeviceptr *address) {
    char path[64];
    if (given->device != fake_of_machine(fake_current[fake_depth - 1]->device) && getenv("FAKE_CUDA_APART"))
        return PEER_ACCESS_UNSUPPORTED;
    (void)snprintf(path, sizeof path, "/proc/%ld/fd/%ld", given->process, given->file);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    const bool good = file >= 0 && given->bytes > 0 && inode_of(file) == given->inode;
    range *opened = good ? opened_before(given->inode) : NULL;
    if (file >= 0 && (!good || opened))
        (void)close(file);
    if (!good)
        return INVALID_VALUE;
    const CUresult result = opened ? 0 : map(file, given->bytes, MAPPED, address);
    if (result)
        return result;
    if (!opened)
        opened = fake_range_at(*address);
    opened->inode = given->inode;
    opened->opened++;
    *address = opened->address;
    return 0;
}

/* Like the driver, this fails in the process that made the handle. */
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle bytes, unsigned flags) {
    BEGIN;
    handle given;
    memcpy(&given, &bytes, sizeof given);
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return INVALID_VALUE;
    if (given.process == getpid())
        return INVALID_CONTEXT;
    (void)pthread_mutex_lock(&fake.lock);
    const CUresult result = open_handle(&given, address);
    (void)pthread_mutex_unlock(&fake.lock);
    return result;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    BEGIN;
    fake_wait_for_streams();
    (void)pthread_mutex_lock(&fake.lock);
    range *found = fake_range_at(address);
    CUresult result = 0;
    if (!found || found->kind != MAPPED || found->address != address ||
        found->device != fake_current[fake_depth - 1]->device)
        result = INVALID_VALUE;
    else if (--found->opened == 0)
        result = unmap(address, MAPPED);
    (void)pthread_mutex_unlock(&fake.lock);
    return result;
}
