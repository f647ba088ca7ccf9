/*
 * Memory of the libfabric fabric: registering, and the keys on the card.
 */
#include "transport/libfabric/libfabric.h"

/* A key that nobody can guess, of as many bytes as the provider's keys have. */
static kvf_status draw_key(const kvf_libfabric_endpoint *endpoint, uint64_t *out) {
    const size_t bytes = endpoint->info->domain_attr->mr_key_size;
    *out = 0;
    return kvf_random(out, bytes < sizeof *out ? bytes : sizeof *out);
}

static kvf_status bind(kvf_libfabric_endpoint *endpoint, struct fid_mr *mr) {
    if (!(endpoint->info->domain_attr->mr_mode & FI_MR_ENDPOINT))
        return KVF_OK;
    int failed = fi_mr_bind(mr, &endpoint->port.ep->fid, 0);
    if (!failed)
        failed = fi_mr_enable(mr);
    return failed ? kvf_libfabric_refuse(endpoint->library, failed, "registration") : KVF_OK;
}

kvf_status kvf_libfabric_map(kvf_libfabric_endpoint *endpoint, const kvf_memory *memory, bool shared,
                             kvf_libfabric_memory *out) {
    const struct iovec where = {memory->address, memory->bytes};
    const bool is_device = memory->kind == KVF_MEMORY_CUDA;
    struct fi_mr_attr attributes = {
        .mr_iov = &where,
        .iov_count = 1,
        .access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | (shared ? FI_REMOTE_READ | FI_REMOTE_WRITE : 0),
        .iface = is_device ? FI_HMEM_CUDA : FI_HMEM_SYSTEM,
        .device.cuda = is_device ? (int)memory->device : 0,
    };
    kvf_status status = draw_key(endpoint, &attributes.requested_key);
    if (status)
        return status;
    *out = (kvf_libfabric_memory){.address = memory->address, .bytes = memory->bytes};
    int failed = fi_mr_regattr(endpoint->domain, &attributes, 0, &out->mr);
    if (failed) {
        out->mr = NULL;
        return kvf_libfabric_refuse(endpoint->library, failed, "registration");
    }
    status = bind(endpoint, out->mr);
    if (status)
        (void)kvf_libfabric_unmap(out);
    return status;
}

/* After any error but -FI_EBUSY the registration is gone as well: EFA frees it whatever its driver answers. */
int kvf_libfabric_unmap(kvf_libfabric_memory *memory) {
    const int failed = memory->mr ? fi_close(&memory->mr->fid) : 0;
    if (failed == -FI_EBUSY)
        return failed;
    *memory = (kvf_libfabric_memory){0};
    return 0;
}

void *kvf_libfabric_desc(const kvf_libfabric_memory *memory) {
    return memory->mr ? fi_mr_desc(memory->mr) : NULL;
}

/* ---- regions --------------------------------------------------------------------------------- */

static kvf_status make_room(kvf_libfabric_endpoint *endpoint, uint32_t region) {
    if (region < endpoint->region_count)
        return KVF_OK;
    kvf_libfabric_memory *grown = kvf_resize(endpoint->regions, (size_t)region + 1, sizeof *grown);
    if (!grown)
        return kvf_nomem("regions");
    endpoint->regions = grown;
    for (; endpoint->region_count <= region; endpoint->region_count++)
        grown[endpoint->region_count] = (kvf_libfabric_memory){0};
    return KVF_OK;
}

static kvf_status unmap(const kvf_libfabric_endpoint *endpoint, uint32_t region) {
    const int failed = kvf_libfabric_unmap(&endpoint->regions[region]);
    if (!failed)
        return KVF_OK;
    (void)kvf_libfabric_fail(endpoint->library, failed, "keeps the memory for now");
    return KVF_E_AGAIN;
}

/* Of memory in segments, libfabric (1.20 to 2.6) asks the driver for the first one. EFA then fails to register all of it,
 * and from 2.5 on no longer asks for other memory either, such as an arena. */
static bool is_in_segments(const kvf_memory *memory) {
    kvf_cuda_place place;
    return !kvf_cuda_place_of(memory->device, (uintptr_t)memory->address, memory->bytes, &place) &&
           place.segments > 1;
}

static kvf_status check_cuda(const kvf_libfabric_endpoint *endpoint, uint32_t region,
                             const kvf_memory *memory) {
    if (!(endpoint->info->caps & FI_HMEM))
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "region %u is CUDA memory, which the provider %s of libfabric %s does not take here",
                        region, endpoint->info->fabric_attr->prov_name, endpoint->library->version);
    if (is_in_segments(memory))
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "region %u is memory of CUDA device %u in several segments of cuMemCreate(), which "
                        "libfabric does not register as a whole; to move it packed, register it as withheld",
                        region, memory->device);
    return KVF_OK;
}

static kvf_status register_one(kvf_libfabric_endpoint *endpoint, uint32_t region, const kvf_memory *memory) {
    kvf_status status = memory->kind == KVF_MEMORY_CUDA ? check_cuda(endpoint, region, memory) : KVF_OK;
    if (status)
        return status;
    const bool withheld = endpoint->emulates && kvf_transport_withholds_emulated(endpoint->transport);
    status = make_room(endpoint, region);
    if (!status)
        status = unmap(endpoint, region); /* it may have been kept */
    if (!status) {
        status = kvf_libfabric_map(endpoint, memory, !withheld, &endpoint->regions[region]);
        status = status ? kvf_device_memory_refused(status, memory) : KVF_OK;
    }
    if (status)
        return kvf_fail_in(status, "region %u: ", region);
    endpoint->regions[region].withheld = withheld;
    return KVF_OK;
}

kvf_status kvf_libfabric_register(void *self, uint32_t region, const kvf_memory *memory) {
    kvf_libfabric_endpoint *endpoint = self;
    const kvf_device_context before = kvf_device_context_take(&endpoint->device_context, memory);
    const kvf_cuda *entered = kvf_device_context_enter(&endpoint->device_context);
    kvf_status status = register_one(endpoint, region, memory);
    kvf_device_context_leave(entered);
    if (status)
        endpoint->device_context = before;
    return status;
}

/* Its key is never used again, so that peers of other machines are refused. Those on this machine watch the beacon: its
 * end, once, ends their connections, and makes their cards invalid. Where libfabric emulates, it may be in the middle of a
 * write to the memory, which only the end of the connection ends. */
static kvf_status unregister_one(kvf_libfabric_endpoint *endpoint, uint32_t region) {
    if (!endpoint->regions[region].leaves)
        kvf_beacon_open(&endpoint->beacon, endpoint->event_fd);
    endpoint->regions[region].leaves = true;
    kvf_status status = unmap(endpoint, region);
    if (!status && endpoint->emulates && kvf_libfabric_serve(endpoint))
        status = KVF_E_AGAIN;
    return status;
}

kvf_status kvf_libfabric_unregister(void *self, uint32_t region) {
    kvf_libfabric_endpoint *endpoint = self;
    const kvf_cuda *entered = kvf_device_context_enter(&endpoint->device_context);
    kvf_status status = unregister_one(endpoint, region);
    kvf_device_context_leave(entered);
    return status;
}

/* ---- the card -------------------------------------------------------------------------------- */

/* The front may know more regions, the last of which are withheld from us. */
static kvf_libfabric_target describe(const kvf_libfabric_endpoint *endpoint, uint32_t region) {
    const kvf_libfabric_memory *memory = region < endpoint->region_count ? &endpoint->regions[region] : NULL;
    if (!memory || !memory->mr || memory->leaves)
        return (kvf_libfabric_target){0};
    if (memory->withheld)
        return (kvf_libfabric_target){.bytes = memory->bytes, .withheld = true};
    const bool by_address = endpoint->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
    return (kvf_libfabric_target){.base = by_address ? (uintptr_t)memory->address : 0,
                                  .bytes = memory->bytes,
                                  .key = fi_mr_key(memory->mr)};
}

kvf_status kvf_libfabric_write_card(void *self, kvf_buffer *out) {
    kvf_libfabric_endpoint *endpoint = self;
    const struct fi_info *info = endpoint->info;
    unsigned char address[KVF_LIBFABRIC_ADDRESS_MAX];
    size_t address_bytes = sizeof address;
    uint32_t count;
    (void)kvf_transport_regions(endpoint->transport, endpoint, &count);
    if (!endpoint->port.ep)
        return KVF_OK; /* nobody can connect */
    int failed = fi_getname(&endpoint->port.ep->fid, address, &address_bytes);
    if (failed)
        return kvf_libfabric_fail(endpoint->library, failed, "address");
    kvf_libfabric_card card = {
        .protocol = info->ep_attr->protocol,
        .protocol_version = info->ep_attr->protocol_version,
        .format = info->addr_format,
        .address = address,
        .address_bytes = (uint32_t)address_bytes,
        .regions = kvf_alloc(count, sizeof *card.regions),
        .region_count = count,
    };
    if (!card.regions)
        return kvf_nomem("a card");
    memcpy(card.beacon, endpoint->beacon.mark, sizeof card.beacon);
    (void)snprintf(card.provider, sizeof card.provider, "%s", info->fabric_attr->prov_name);
    for (uint32_t i = 0; i < card.region_count; i++)
        card.regions[i] = describe(endpoint, i);
    kvf_status status = kvf_libfabric_card_write(&card, out);
    kvf_free(card.regions);
    return status;
}
