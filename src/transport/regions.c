/*
 * The front's memory: what endpoints allocate, and which regions are registered with which fabric.
 */
#include <errno.h>
#include <stdio.h>
#include <sys/mman.h>

#include "cuda/allocation.h"
#include "transport/front.h"
#include "transport/memory.h"

struct kvf_plain_memory {
    void *address;
    size_t bytes;
    kvf_memory_kind kind;
    uint32_t device;
    struct kvf_plain_memory *following;
};

const kvf_memory *kvf_transport_regions(const kvf_transport *transport, const void *endpoint,
                                        uint32_t *count) {
    uint32_t i = 0;
    while (i < transport->fabric_count && transport->fabrics[i].endpoint != endpoint)
        i++;
    KVF_ASSERT(i < transport->fabric_count);
    *count = transport->region_count;
    return transport->fabrics[i].served;
}

const kvf_memory *kvf_transport_memory(const kvf_transport *transport, uint32_t *count) {
    *count = transport->region_count;
    return transport->regions;
}

bool kvf_transport_withholds(const kvf_transport *transport) {
    for (uint32_t i = 0; i < transport->region_count; i++)
        if (transport->regions[i].withheld)
            return true;
    return false;
}

unsigned char *const *kvf_transport_bases(const kvf_transport *transport) {
    return transport->bases;
}

uint64_t kvf_transport_oldest(const kvf_transport *transport) {
    return transport->oldest;
}

/* ---- regions as callers give them ------------------------------------------------------------ */

static const char *const kind_names[] = {[KVF_MEMORY_HOST] = "host", [KVF_MEMORY_CUDA] = "CUDA"};
#define KINDS ((int)(sizeof kind_names / sizeof *kind_names))

static kvf_status check_kind(kvf_memory_kind kind, uint32_t device) {
    if ((int)kind < 0 || (int)kind >= KINDS)
        return kvf_fail(KVF_E_INVALID, "memory kind is %d; allowed: 0 to %d", (int)kind, KINDS - 1);
    if (kind == KVF_MEMORY_HOST && device != 0)
        return kvf_fail(KVF_E_INVALID, "device is %u; allowed: 0 for host memory", device);
    return KVF_OK;
}

kvf_status kvf_memory_check(const kvf_memory *regions, uint32_t count, const char *what) {
    for (uint32_t i = 0; i < count; i++) {
        const kvf_memory *region = kvf_memory_at(regions, i);
        if (region->struct_size < KVF_MEMORY_LEAST || region->struct_size % _Alignof(kvf_memory) != 0 ||
            region->struct_size != regions->struct_size)
            return kvf_fail(KVF_E_INVALID, "%s: region %u: struct_size is %zu; set it to sizeof(kvf_memory)",
                            what, i, region->struct_size);
        kvf_memory known;
        kvf_status status = kvf_take_options(&known, sizeof known, region, "kvf_memory");
        if (!status)
            status = check_kind(known.kind, known.device);
        if (status)
            return kvf_fail_in(status, "%s: region %u: ", what, i);
    }
    return KVF_OK;
}

/* ---- allocating ------------------------------------------------------------------------------ */

static kvf_status map_plain(struct kvf_plain_memory *memory) {
    memory->address = mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory->address == MAP_FAILED)
        return kvf_fail(KVF_E_NOMEM, "no memory for %zu bytes: %s", memory->bytes, strerror(errno));
    (void)madvise(memory->address, memory->bytes, MADV_HUGEPAGE);
    return KVF_OK;
}

static kvf_status allocate_on_device(struct kvf_plain_memory *memory) {
    CUdeviceptr address = 0;
    kvf_status status = kvf_cuda_allocate(memory->device, memory->bytes, &address);
    memory->address = (void *)(uintptr_t)address;
    return status;
}

/* For fabrics without memory of their own: no other process can map it, but it is aligned and zeroed too. */
static kvf_status allocate_plain(kvf_transport *transport, kvf_memory_kind kind, uint32_t device,
                                 uint64_t bytes, void **out) {
    struct kvf_plain_memory *memory = kvf_alloc(1, sizeof *memory);
    if (!memory)
        return kvf_nomem("transport memory");
    *memory = (struct kvf_plain_memory){.bytes = bytes, .kind = kind, .device = device};
    kvf_status status = kind == KVF_MEMORY_HOST ? map_plain(memory) : allocate_on_device(memory);
    if (status) {
        kvf_free(memory);
        return status;
    }
    memory->following = transport->plain_memory;
    transport->plain_memory = memory;
    *out = memory->address;
    return KVF_OK;
}

static void unmap_plain(const struct kvf_plain_memory *memory) {
    if (memory->kind == KVF_MEMORY_HOST)
        (void)munmap(memory->address, memory->bytes);
    else
        kvf_cuda_free(memory->device, (CUdeviceptr)(uintptr_t)memory->address);
}

static void free_plain(const kvf_transport *transport, struct kvf_plain_memory *memory) {
    if (!transport->leaves_memory)
        unmap_plain(memory);
    kvf_free(memory);
}

/* Whether a fabric may take plain memory of the kind. */
static bool is_served(const kvf_transport *transport, kvf_memory_kind kind) {
    for (uint32_t i = 0; i < transport->fabric_count; i++)
        if (transport->fabrics[i].fabric->kind.memory_kinds & 1u << kind)
            return true;
    return kind == KVF_MEMORY_HOST;
}

kvf_status kvf_transport_allocate(kvf_transport *transport, kvf_memory_kind kind, uint32_t device,
                                  uint64_t bytes, void **out) {
    if (!transport || !out)
        return kvf_fail(KVF_E_INVALID, "allocate: %s is NULL", !transport ? "transport" : "out");
    if (bytes == 0)
        return kvf_fail(KVF_E_INVALID, "allocate: 0 bytes");
    kvf_status status = kvf_front_check_process(transport, "allocate");
    if (status)
        return status;
    status = check_kind(kind, device);
    if (status)
        return kvf_fail_in(status, "allocate: ");
    for (uint32_t i = 0; i < transport->fabric_count; i++) {
        kvf_front_fabric *front = &transport->fabrics[i];
        if (!(front->fabric->kind.allocates & 1u << kind))
            continue;
        front->owns_memory = true;
        return front->fabric->allocate(front->endpoint, kind, device, bytes, out);
    }
    if (!is_served(transport, kind))
        return kvf_fail(KVF_E_UNSUPPORTED, "allocate: no transport here moves %s memory", kind_names[kind]);
    return allocate_plain(transport, kind, device, bytes, out);
}

void kvf_transport_give_back(kvf_transport *transport, const void *address) {
    struct kvf_plain_memory **place = &transport->plain_memory;
    while (*place && (*place)->address != address)
        place = &(*place)->following;
    struct kvf_plain_memory *memory = *place;
    if (!memory)
        return;
    *place = memory->following;
    free_plain(transport, memory);
}

void kvf_transport_leave_memory(kvf_transport *transport) {
    transport->leaves_memory = true;
}

void kvf_front_free_memory(kvf_transport *transport) {
    for (struct kvf_plain_memory *memory = transport->plain_memory, *next; memory; memory = next) {
        next = memory->following;
        free_plain(transport, memory);
    }
    kvf_free(transport->regions);
    kvf_free(transport->served);
    kvf_free(transport->arenas);
    kvf_free(transport->bases);
}

/* ---- one region and the fabrics -------------------------------------------------------------- */

static bool is_registered(const kvf_transport *transport, uint32_t region) {
    return region < transport->region_count && transport->regions[region].bytes > 0;
}

/* Whether kvf_transport_unregister_region() has begun to take a region back, and must be called again. */
static bool leaves(const kvf_transport *transport, uint32_t region) {
    return is_registered(transport, region) && !transport->regions[region].withheld &&
           transport->served[region].bytes == 0;
}

static kvf_status check_region(uint32_t region, const kvf_memory *memory) {
    uint64_t end;
    if (!memory->address || memory->bytes == 0)
        return kvf_fail(KVF_E_INVALID, "register: region %u: %s", region,
                        memory->bytes == 0 ? "0 bytes" : "address is NULL");
    if (!kvf_add((uint64_t)(uintptr_t)memory->address, memory->bytes, &end))
        return kvf_fail(KVF_E_OVERFLOW, "register: region %u: %llu bytes do not fit after address %p", region,
                        (unsigned long long)memory->bytes, memory->address);
    return KVF_OK;
}

/* From now on it is on no card, and peers that connect do not learn of it. */
static void hide(const kvf_transport *transport, uint32_t region) {
    transport->served[region] = (kvf_memory){0};
    for (uint32_t i = 0; i < transport->fabric_count; i++)
        transport->fabrics[i].served[region] = (kvf_memory){0};
}

static void forget(const kvf_transport *transport, uint32_t region) {
    transport->regions[region] = (kvf_memory){0};
    transport->arenas[region] = false;
    transport->bases[region] = NULL;
}

/* Makes room for region numbers up to this one in all tables; new numbers are not registered. */
static kvf_status make_room(kvf_transport *transport, uint32_t region) {
    if (region < transport->region_count)
        return KVF_OK;
    size_t count = (size_t)region + 1;
    kvf_memory *regions = kvf_resize(transport->regions, count, sizeof *regions);
    if (regions)
        transport->regions = regions;
    kvf_memory *served = kvf_resize(transport->served, count, sizeof *served);
    if (served)
        transport->served = served;
    unsigned char **bases = kvf_resize(transport->bases, count, sizeof *bases);
    if (bases)
        transport->bases = bases;
    bool *arenas = kvf_resize(transport->arenas, count, sizeof *arenas);
    if (arenas)
        transport->arenas = arenas;
    bool complete = regions && served && bases && arenas;
    for (uint32_t i = 0; i < transport->fabric_count && complete; i++) {
        kvf_front_fabric *front = &transport->fabrics[i];
        served = kvf_resize(front->served, count, sizeof *served);
        if (served)
            front->served = served;
        bool *holds = kvf_resize(front->holds, count, sizeof *holds);
        if (holds)
            front->holds = holds;
        complete = served && holds;
    }
    if (!complete)
        return kvf_nomem("the regions");
    hide(transport, region);
    forget(transport, region);
    for (uint32_t i = 0; i < transport->fabric_count; i++)
        transport->fabrics[i].holds[region] = false;
    transport->region_count = region + 1;
    return KVF_OK;
}

/* How many regions that are shown to peers there are, arenas or others; and how many of them a fabric serves. */
static uint32_t count_shown(const kvf_transport *transport, bool arenas, const kvf_front_fabric *front,
                            uint32_t *served) {
    uint32_t count = 0;
    *served = 0;
    for (uint32_t region = 0; region < transport->region_count; region++) {
        if (transport->served[region].bytes == 0 || transport->arenas[region] != arenas)
            continue;
        count++;
        *served += front->served[region].bytes > 0;
    }
    return count;
}

/* In which kinds of memory there are arenas that a fabric serves, as bits. */
static uint32_t find_arenas(const kvf_transport *transport, const kvf_front_fabric *front) {
    uint32_t kinds = 0;
    for (uint32_t region = 0; region < transport->region_count; region++)
        if (transport->arenas[region] && front->served[region].bytes > 0)
            kinds |= 1u << front->served[region].kind;
    return kinds;
}

/*
 * Finds what each fabric is good for, and returns whether none is good for anything. One that does not serve all
 * regions is disabled, unless it serves an arena: then what it does not serve moves packed through that. And one that
 * serves all but the arenas moves runs.
 */
static bool find_disabled(kvf_transport *transport) {
    bool all = true;
    transport->split = false;
    for (uint32_t i = 0; i < transport->fabric_count; i++) {
        kvf_front_fabric *front = &transport->fabrics[i];
        uint32_t served;
        const uint32_t arenas = count_shown(transport, true, front, &served);
        const uint32_t others = count_shown(transport, false, front, &served);
        front->runs = served == others && (others > 0 || arenas == 0);
        front->arena_kinds = find_arenas(transport, front);
        const bool packs = front->arena_kinds != 0;
        front->disabled = !front->runs && !packs;
        transport->split = transport->split || (arenas > 0 && others > 0 && front->runs != packs);
        all = all && front->disabled;
    }
    return all;
}

bool kvf_transport_is_split(const kvf_transport *transport) {
    return transport->split;
}

static kvf_status add_to_fabric(kvf_front_fabric *front, uint32_t region, const kvf_memory *memory) {
    if (!(front->fabric->kind.memory_kinds & 1u << memory->kind))
        return kvf_fail(KVF_E_UNSUPPORTED, "region %u is %s memory, which it does not serve", region,
                        kind_names[memory->kind]);
    front->served[region] = *memory;
    kvf_status status = front->fabric->register_region(front->endpoint, region, memory);
    if (status)
        front->served[region] = (kvf_memory){0};
    front->holds[region] = front->holds[region] || !status;
    return status;
}

/* KVF_E_AGAIN: a peer is in the middle of a write; fabrics that have released the region stay without it. */
static kvf_status take_from_fabrics(kvf_transport *transport, uint32_t region) {
    kvf_status result = KVF_OK;
    for (uint32_t i = 0; i < transport->fabric_count; i++) {
        kvf_front_fabric *front = &transport->fabrics[i];
        if (!front->holds[region])
            continue;
        kvf_status status = front->fabric->unregister_region(front->endpoint, region);
        front->holds[region] = status != KVF_OK;
        if (status && !result)
            result = kvf_fail_in(status, "unregister: %s: ", front->fabric->kind.name);
    }
    return result;
}

/* The detail of a refusal, with the fabric's name before it. Skips fabrics that do not serve such memory. */
static void note_refusal(char *why, const kvf_fabric *fabric, const kvf_memory *memory) {
    const size_t used = strlen(why);
    if (fabric->kind.memory_kinds & 1u << memory->kind)
        (void)snprintf(why + used, KVF_DETAIL_BYTES - used, "%s%s: %s", used ? "; " : "", fabric->kind.name,
                       kvf_error_detail());
}

/* With "auto", a fabric that cannot serve a region is left out. */
static kvf_status add_to_fabrics(kvf_transport *transport, uint32_t region) {
    const kvf_memory *memory = &transport->regions[region];
    char why[KVF_DETAIL_BYTES] = "";
    for (uint32_t i = 0; i < transport->fabric_count; i++) {
        kvf_front_fabric *front = &transport->fabrics[i];
        kvf_status status = add_to_fabric(front, region, memory);
        if (status && (status != KVF_E_UNSUPPORTED || !transport->automatic))
            return kvf_fail_in(status, "register: %s: ", front->fabric->kind.name);
        if (status)
            note_refusal(why, front->fabric, memory);
    }
    if (find_disabled(transport))
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "register: no transport here serves all of this memory: region %u, %s memory: %s",
                        region, kind_names[memory->kind],
                        *why ? why : "with another that it is registered beside");
    return KVF_OK;
}

static void forget_card(kvf_transport *transport) {
    kvf_buffer_free(&transport->card);
    transport->generation++;
}

/* Takes back a region that no peer knows of yet. */
static void drop(kvf_transport *transport, uint32_t region) {
    hide(transport, region);
    (void)take_from_fabrics(transport, region);
    forget(transport, region);
    (void)find_disabled(transport);
}

static kvf_status add(kvf_transport *transport, uint32_t region, const kvf_memory *memory, bool is_arena) {
    const uint32_t count = transport->region_count;
    kvf_status status = check_region(region, memory);
    if (!status)
        status = make_room(transport, region);
    if (status)
        return status;
    kvf_memory known;
    (void)kvf_take_options(&known, sizeof known, memory, "kvf_memory"); /* checked before */
    known.struct_size = sizeof known;
    transport->regions[region] = known;
    transport->arenas[region] = is_arena;
    transport->bases[region] = known.address;
    if (known.withheld)
        return KVF_OK;
    transport->served[region] = known;
    status = add_to_fabrics(transport, region);
    if (status) {
        char why[KVF_DETAIL_BYTES];
        memcpy(why, kvf_error_detail(), strlen(kvf_error_detail()) + 1);
        drop(transport, region);
        transport->region_count = count;
        return kvf_fail(status, "%s", why);
    }
    return KVF_OK;
}

/* Serves a region that leaves again. After an error it still leaves. */
static kvf_status keep(kvf_transport *transport, uint32_t region, const kvf_memory *memory) {
    const kvf_memory *own = &transport->regions[region];
    if (memory->address != own->address || memory->bytes != own->bytes || memory->kind != own->kind ||
        memory->device != own->device)
        return kvf_fail(KVF_E_EXISTS, "register: region %u is being taken back, as other memory", region);
    transport->served[region] = *own;
    kvf_status status = add_to_fabrics(transport, region);
    if (status) {
        hide(transport, region);
        (void)find_disabled(transport);
    }
    return status;
}

/* ---- functions for users --------------------------------------------------------------------- */

/* The user's threads must not read the tables, or copy, while regions come and go. False: a device still copies. */
static bool settle_user(const kvf_transport *transport) {
    return !transport->user.settle || transport->user.settle(transport->user.context);
}

kvf_status kvf_transport_register(kvf_transport *transport, const kvf_memory *regions, uint32_t count) {
    if (!transport)
        return kvf_fail(KVF_E_INVALID, "register: transport is NULL");
    if (!regions || count == 0)
        return kvf_fail(KVF_E_INVALID, "register: %s", count == 0 ? "no regions" : "regions is NULL");
    for (uint32_t i = 0; i < transport->region_count; i++)
        if (is_registered(transport, i))
            return kvf_fail(KVF_E_EXISTS, "register: region %u is registered already", i);
    kvf_status status = kvf_front_check_process(transport, "register");
    if (!status)
        status = kvf_memory_check(regions, count, "register");
    (void)settle_user(transport);
    const uint32_t before = transport->region_count;
    uint32_t added = 0;
    while (!status && added < count &&
           !(status = add(transport, added, kvf_memory_at(regions, added), false)))
        added++;
    if (!status) {
        forget_card(transport);
        return KVF_OK;
    }
    char why[KVF_DETAIL_BYTES];
    memcpy(why, kvf_error_detail(), strlen(kvf_error_detail()) + 1);
    while (added > 0)
        drop(transport, --added);
    transport->region_count = before; /* numbers that were unregistered stay: cards have them */
    return kvf_fail(status, "%s", why);
}

static kvf_status register_region(kvf_transport *transport, uint32_t region, const kvf_memory *memory,
                                  bool is_arena) {
    if (!transport || !memory)
        return kvf_fail(KVF_E_INVALID, "register: %s is NULL", !transport ? "transport" : "memory");
    if (region > transport->region_count)
        return kvf_fail(KVF_E_RANGE, "register: region is %u; allowed: 0 to %u", region,
                        transport->region_count);
    const bool stays = leaves(transport, region);
    if (is_registered(transport, region) && !stays)
        return kvf_fail(KVF_E_EXISTS, "register: region %u is registered already", region);
    kvf_status status = kvf_front_check_process(transport, "register");
    if (!status)
        status = kvf_memory_check(memory, 1, "register");
    (void)settle_user(transport);
    if (!status)
        status = stays ? keep(transport, region, memory) : add(transport, region, memory, is_arena);
    if (!status)
        forget_card(transport);
    return status;
}

kvf_status kvf_transport_register_region(kvf_transport *transport, uint32_t region,
                                         const kvf_memory *memory) {
    return register_region(transport, region, memory, false);
}

kvf_status kvf_transport_register_arena(kvf_transport *transport, uint32_t region, const kvf_memory *memory) {
    return register_region(transport, region, memory, true);
}

bool kvf_transport_stop_writing(kvf_transport *transport, uint32_t region, uint64_t offset, uint64_t bytes) {
    bool quiet = true;
    for (uint32_t i = 0; i < transport->fabric_count; i++) {
        const kvf_front_fabric *front = &transport->fabrics[i];
        if (front->fabric->stop_writing)
            quiet = front->fabric->stop_writing(front->endpoint, region, offset, bytes) && quiet;
    }
    return quiet;
}

/* Makes all cards invalid that there are. Peers that connect by a later one have nothing to do with the region. */
static void withdraw(kvf_transport *transport, uint32_t region) {
    hide(transport, region);
    (void)find_disabled(transport);
    forget_card(transport);
    transport->oldest = transport->generation;
}

/* Whether a batch of ours that is under way reads or writes the region. */
static bool is_in_use(const kvf_transport *transport, uint32_t region) {
    for (const kvf_peer *peer = transport->peers; peer; peer = peer->following)
        for (const kvf_batch *batch = peer->batches.first; batch; batch = batch->following)
            for (size_t i = 0; i < batch->count; i++)
                if (batch->runs[i].local_region == region)
                    return true;
    return false;
}

kvf_status kvf_transport_unregister_region(kvf_transport *transport, uint32_t region) {
    if (!transport)
        return kvf_fail(KVF_E_INVALID, "unregister: transport is NULL");
    if (!is_registered(transport, region))
        return kvf_fail(KVF_E_NOT_REGISTERED, "unregister: region %u is not registered", region);
    if (is_in_use(transport, region))
        return kvf_fail(KVF_E_AGAIN, "unregister: operations of this endpoint use region %u", region);
    kvf_status status = kvf_front_check_process(transport, "unregister");
    if (status)
        return status;
    if (!settle_user(transport))
        return kvf_fail(KVF_E_AGAIN, "unregister: the device copies cells of a stage, and has not finished");
    if (!leaves(transport, region))
        withdraw(transport, region);
    status = take_from_fabrics(transport, region);
    if (!status)
        forget(transport, region);
    return status;
}
